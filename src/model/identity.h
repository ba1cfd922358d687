/* A name for what a checkpoint computes, so that caches of two programs are mixed only when they
 * belong to the same weights. Not a proof: of the weights themselves only samples are read, for all
 * would take as long as loading them. */
#ifndef YARD_MODEL_IDENTITY_H
#define YARD_MODEL_IDENTITY_H

#include "model/safetensors.h"

enum { YARD_IDENTITY_BYTES = 33 }; /* 32 hexadecimal digits and the end */

/* SHA-256, cut to 16 bytes, of dir's config.json, every tensor's name, dtype and shape, and the
 * first bytes of 64 tensors spread over the checkpoint. Errors: YARD_EIO. */
yard_status yard_checkpoint_identity(const yard_checkpoint *ckpt, const char *dir,
                                     char out[YARD_IDENTITY_BYTES], yard_error *err);

#endif
