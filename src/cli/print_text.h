/* How tokenize and template write text. */
#ifndef YARD_CLI_PRINT_TEXT_H
#define YARD_CLI_PRINT_TEXT_H

#include "base/base.h"

/* text as it is, or {"text":..} and a newline, on standard output; text is UTF-8. A failed write is
 * left to yard_cli_close_stdout. Errors: YARD_ENOMEM. */
yard_status yard_cli_print_text(const char *text, size_t n_bytes, bool json, yard_error *err);

#endif
