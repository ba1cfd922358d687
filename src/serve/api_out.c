#include "serve/api_out.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

void yard_api_out_release(yard_api_out *out)
{
    free(out->bytes);
    *out = (yard_api_out){ 0 };
}

void yard_api_put_bytes(yard_api_out *out, const char *bytes, size_t n_bytes)
{
    if (out->no_memory)
        return;
    if (out->max_bytes - out->n_bytes <= n_bytes) {
        const size_t max_bytes = 2 * (out->n_bytes + n_bytes) + 256;
        char *larger = realloc(out->bytes, max_bytes);

        if (!larger) {
            out->no_memory = true;
            return;
        }
        out->bytes = larger;
        out->max_bytes = max_bytes;
    }
    if (n_bytes > 0)
        memcpy(out->bytes + out->n_bytes, bytes, n_bytes);
    out->n_bytes += n_bytes;
    out->bytes[out->n_bytes] = '\0';
}

void yard_api_put(yard_api_out *out, const char *text)
{
    yard_api_put_bytes(out, text, strlen(text));
}

/* NULL for a byte that may stand as it is. */
static const char *escape_of(unsigned char c, char buffer[8])
{
    switch (c) {
    case '"':
        return "\\\"";
    case '\\':
        return "\\\\";
    case '\n':
        return "\\n";
    case '\r':
        return "\\r";
    case '\t':
        return "\\t";
    default:
        if (c >= 0x20)
            return NULL;
        snprintf(buffer, 8, "\\u%04x", c);
        return buffer;
    }
}

/* Valid UTF-8. */
static void put_escaped(yard_api_out *out, const char *text, size_t n_bytes)
{
    size_t done = 0;
    char buffer[8];

    for (size_t i = 0; i < n_bytes; i++) {
        const char *escape = escape_of((unsigned char)text[i], buffer);

        if (!escape)
            continue;
        yard_api_put_bytes(out, text + done, i - done);
        yard_api_put(out, escape);
        done = i + 1;
    }
    yard_api_put_bytes(out, text + done, n_bytes - done);
}

void yard_api_put_string(yard_api_out *out, const char *text, size_t n_bytes)
{
    size_t bad_at;

    yard_api_put(out, "\"");
    while (!yard_utf8_valid(text, n_bytes, &bad_at)) {
        put_escaped(out, text, bad_at);
        yard_api_put(out, "\xef\xbf\xbd");
        text += bad_at + 1;
        n_bytes -= bad_at + 1;
    }
    put_escaped(out, text, n_bytes);
    yard_api_put(out, "\"");
}

void yard_api_put_integer(yard_api_out *out, int64_t n)
{
    char text[24];

    snprintf(text, sizeof(text), "%lld", (long long)n);
    yard_api_put(out, text);
}

void yard_api_put_float(yard_api_out *out, float x)
{
    char text[32];

    if (isnan(x))
        snprintf(text, sizeof(text), "null");
    else
        snprintf(text, sizeof(text), "%.9g", isinf(x) ? -9999.0 : (double)x);
    yard_api_put(out, text);
}
