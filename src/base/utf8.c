#include "base/base.h"

/* Bytes of the well-formed character at text (Unicode table 3-7), 0 when there is none. */
static size_t character_bytes(const unsigned char *text, size_t n_bytes)
{
    const unsigned char lead = text[0];
    unsigned char low = 0x80, high = 0xbf;
    size_t n;

    if (lead < 0x80)
        return 1;
    if (lead < 0xc2 || lead > 0xf4)
        return 0;
    n = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    if (n > n_bytes)
        return 0;
    if (lead == 0xe0)
        low = 0xa0; /* no overlong forms */
    else if (lead == 0xed)
        high = 0x9f; /* no surrogates */
    else if (lead == 0xf0)
        low = 0x90;
    else if (lead == 0xf4)
        high = 0x8f; /* nothing above U+10FFFF */
    if (text[1] < low || text[1] > high)
        return 0;
    for (size_t i = 2; i < n; i++)
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    return n;
}

bool yard_utf8_valid(const char *text, size_t n_bytes, size_t *bad_at)
{
    const unsigned char *bytes = (const unsigned char *)text;

    for (size_t i = 0; i < n_bytes;) {
        const size_t n = character_bytes(bytes + i, n_bytes - i);
        if (n == 0) {
            if (bad_at)
                *bad_at = i;
            return false;
        }
        i += n;
    }
    return true;
}
