#ifndef YARD_ENGINE_SIGNATURE_H
#define YARD_ENGINE_SIGNATURE_H

#include <yard/engine.h>

enum { YARD_ENGINE_SIGNATURE_BYTES = 320 };

/* What the ranks of a group must have alike, as yard_fabric_config.config_text: options, and the
 * checkpoint's identity, for which its headers are read. Errors: YARD_EIO, YARD_EFORMAT. */
yard_status yard_engine_sign(const yard_engine_config *config,
                             char out[YARD_ENGINE_SIGNATURE_BYTES], yard_error *err);

#endif
