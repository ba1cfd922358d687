/* Text that grows, and JSON values in it. Private to the serve room. */
#ifndef YARD_SERVE_API_OUT_H
#define YARD_SERVE_API_OUT_H

#include "base/base.h"

/* All zero is empty. Once memory has run out, no_memory stays set and nothing is added any more;
 * the caller looks once, before it sends. To use it again, set n_bytes to 0. */
typedef struct yard_api_out {
    char *bytes; /* [n_bytes] and a NUL, or NULL */
    size_t n_bytes, max_bytes;
    bool no_memory;
} yard_api_out;

void yard_api_out_release(yard_api_out *out);

void yard_api_put_bytes(yard_api_out *out, const char *bytes, size_t n_bytes);
void yard_api_put(yard_api_out *out, const char *text);
/* Quoted and escaped; each byte that is no UTF-8 becomes U+FFFD. */
void yard_api_put_string(yard_api_out *out, const char *text, size_t n_bytes);
void yard_api_put_integer(yard_api_out *out, int64_t n);
/* What JSON cannot say: NaN becomes null, an infinity -9999 (of log-probabilities: impossible). */
void yard_api_put_float(yard_api_out *out, float x);

#endif
