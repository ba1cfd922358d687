/* Text through the demo tokenizer: what is UTF-8 must come back unchanged, at once and as a
 * stream. Run in the source directory. */
#include <stdlib.h>

#include "model/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static yard_tokenizer *demo(void)
{
    static yard_tokenizer *tok; /* loaded once: a fuzzer has no place to keep it */

    if (!tok && yard_tokenizer_load(&tok, "models/demo", NULL, NULL) != YARD_OK)
        abort();
    return tok;
}

static void check_equal(const char *text, size_t n_text, const uint8_t *data, size_t n_bytes)
{
    if (n_text != n_bytes || (n_bytes > 0 && memcmp(text, data, n_bytes)))
        abort();
}

static void check_stream(const int32_t *ids, size_t n_ids, const uint8_t *data, size_t n_bytes)
{
    static const char *const stop[] = { "\x01never\x02" };
    yard_text_stream *stream = NULL;
    char *shown = malloc(n_bytes + 64);
    const char *text;
    size_t n = 0, n_text;
    bool stopped = false;

    if (!shown || yard_text_stream_create(&stream, demo(), false, stop, 1, NULL) != YARD_OK)
        abort();
    for (size_t i = 0; i < n_ids && !stopped; i++) {
        if (yard_text_stream_push(stream, ids[i], &text, &n_text, &stopped, NULL) != YARD_OK)
            abort();
        memcpy(shown + n, text, n_text);
        n += n_text;
    }
    if (yard_text_stream_finish(stream, &text, &n_text, NULL) != YARD_OK)
        abort();
    memcpy(shown + n, text, n_text);
    check_equal(shown, n + n_text, data, stopped ? n + n_text : n_bytes);
    yard_text_stream_destroy(stream);
    free(shown);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    yard_error err = { 0 };

    for (int added = 0; added < 2; added++) {
        int32_t *ids;
        size_t n_ids, n_text;
        char *text;

        if (yard_tokenizer_encode(demo(), (const char *)data, n_bytes, added, &ids, &n_ids, &err) !=
            YARD_OK) {
            if (yard_utf8_valid((const char *)data, n_bytes, NULL))
                abort();
            return 0;
        }
        if (yard_tokenizer_decode(demo(), ids, n_ids, false, &text, &n_text, &err) != YARD_OK)
            abort();
        check_equal(text, n_text, data, n_bytes);
        check_stream(ids, n_ids, data, n_bytes);
        free(text);
        free(ids);
    }
    return 0;
}
