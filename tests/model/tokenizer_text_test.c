/* Text as it is generated: whole characters only, stop strings held back and found.
 * ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "model/tokenizer.h"
#include "model/tokenizer_files.h"

enum { MAX_STOPS = 4, MAX_TEXT = 4096 };

static yard_tokenizer *minimal; /* ids 0 to 255 are the bytes; 300 is special, 301 is added */
static uint64_t random_state;

static uint32_t random_below(uint32_t n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}

static int set_up(void **state)
{
    json_t *root = tokenizer_file_minimal();
    char *text;

    (void)state;
    tokenizer_file_set(root, "added_tokens",
                       "[{\"id\":300,\"content\":\"<s>\",\"special\":true},"
                       "{\"id\":301,\"content\":\"<think>\",\"special\":false}]");
    text = json_dumps(root, 0);
    json_decref(root);
    if (yard_tokenizer_parse(&minimal, text, strlen(text), NULL, 0, NULL) != YARD_OK)
        return -1;
    free(text);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    yard_tokenizer_free(minimal);
    return 0;
}

typedef struct shown {
    char text[MAX_TEXT]; /* pieces are separated by | when they were shown apart */
    bool stopped;
} shown;

/* Pushes ids and finishes. with_bars: "|" after each push, "!" where the stream stopped. */
static void run(shown *out, const int32_t *ids, size_t n_ids, const char *const *stop,
                uint32_t n_stop, bool with_bars)
{
    yard_text_stream *stream = NULL;
    const char *text;
    size_t n_bytes, n = 0;

    assert_int_equal(yard_text_stream_create(&stream, minimal, true, stop, n_stop, NULL), YARD_OK);
    out->stopped = false;
    for (size_t i = 0; i < n_ids && !out->stopped; i++) {
        assert_int_equal(
            yard_text_stream_push(stream, ids[i], &text, &n_bytes, &out->stopped, NULL), YARD_OK);
        assert_true(yard_utf8_valid(text, n_bytes, NULL));
        memcpy(out->text + n, text, n_bytes);
        n += n_bytes;
        if (with_bars)
            out->text[n++] = out->stopped ? '!' : '|';
    }
    assert_int_equal(yard_text_stream_finish(stream, &text, &n_bytes, NULL), YARD_OK);
    memcpy(out->text + n, text, n_bytes);
    out->text[n + n_bytes] = '\0';
    yard_text_stream_destroy(stream);
}

static const struct example {
    const char *stop[MAX_STOPS];
    const char *bytes; /* one token each, except that 1 is id 300, 2 is 301, 3 is "ab" */
    const char *want;
} examples[] = {
    { { NULL }, "abc", "a|b|c|" },
    { { NULL }, "", "" },
    { { NULL }, "\xe2\x82\xac!", "||€|!|" },
    { { NULL }, "\xe2\x82", "||\ufffd" },
    { { NULL }, "\xe2\x82z", "||\ufffdz|" },
    { { NULL }, "\xff\xff", "\ufffd|\ufffd|" },
    { { NULL }, "\xf0\x9f\x99\x82", "|||🙂|" },
    { { NULL }, "a\1b\2", "a||b|<think>|" },
    /* held back while it may be a stop string */
    { { "END" }, "xENy", "x|||ENy|" },
    { { "END" }, "xEEND", "x||E||!" },
    { { "END" }, "xEN", "x|||EN" },
    { { "END" }, "E\1N\1D", "||||!" }, /* skipped tokens do not interrupt a stop string */
    { { "aab" }, "aaab", "||a|!" },
    /* the one complete first wins; of two complete at once, the longer */
    { { "abcd", "bc" }, "xabcd", "x|||a!" },
    { { "b", "ab" }, "xab", "x||!" },
    { { "ab", "b" }, "cb", "c|!" },
    { { "he", "she", "hers" }, "ushers", "u|||!" },
    /* within and across tokens */
    { { "b" }, "x\3y", "x|a!" },
    { { "bx" }, "\3xy", "a|!" },
    { { "think" }, "\2", "<!" },
    { { "€" }, "a\xe2\x82\xac", "a|||!" },
    { { "€" }, "a\xe2\x82\xad", "a|||\u20ad|" },
    { { "\ufffd" }, "a\xffz", "a|!" },
};

static void examples_are_shown(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(examples) / sizeof(examples[0]); i++) {
        const struct example *e = &examples[i];
        int32_t ids[64];
        uint32_t n_stop = 0;
        size_t n = strlen(e->bytes);
        shown out;

        while (n_stop < MAX_STOPS && e->stop[n_stop])
            n_stop++;
        for (size_t k = 0; k < n; k++) {
            const unsigned char byte = (unsigned char)e->bytes[k];
            ids[k] = byte == 1 ? 300 : byte == 2 ? 301 : byte == 3 ? 256 : byte;
        }
        run(&out, ids, n, e->stop, n_stop, true);
        if (strcmp(out.text, e->want))
            fail_msg("'%s' with stop '%s': want '%s', got '%s'", e->bytes, n_stop ? e->stop[0] : "",
                     e->want, out.text);
    }
}

/* Where the plain search says that text ends: at the stop string that is complete first. */
static size_t search_stop(const char *text, const char *const *stop, uint32_t n_stop, bool *found)
{
    const size_t n = strlen(text);

    for (size_t end = 1; end <= n; end++) {
        size_t longest = 0;
        for (uint32_t i = 0; i < n_stop; i++) {
            const size_t n_bytes = strlen(stop[i]);
            if (n_bytes <= end && n_bytes > longest &&
                !memcmp(text + end - n_bytes, stop[i], n_bytes))
                longest = n_bytes;
        }
        if (longest > 0) {
            *found = true;
            return end - longest;
        }
    }
    *found = false;
    return n;
}

static void stream_equals_search(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 20000; seed++) {
        char stops[MAX_STOPS][8];
        const char *stop[MAX_STOPS];
        char *whole;
        int32_t ids[40];
        size_t n_ids, n_whole;
        bool found;
        shown out;

        random_state = seed;
        const uint32_t n_stop = random_below(MAX_STOPS);
        for (uint32_t i = 0; i < n_stop; i++) {
            const uint32_t n = 1 + random_below(5);
            for (uint32_t k = 0; k < n; k++)
                stops[i][k] = "abc"[random_below(3)];
            stops[i][n] = '\0';
            stop[i] = stops[i];
        }
        n_ids = random_below(40);
        for (size_t i = 0; i < n_ids; i++) {
            static const int32_t some[] = { 'a', 'b', 'c', 256, 257, 0xc3, 0xa9, 300, 0xff };
            ids[i] = some[random_below(sizeof(some) / sizeof(some[0]))];
        }
        run(&out, ids, n_ids, stop, n_stop, false);
        assert_int_equal(yard_tokenizer_decode(minimal, ids, n_ids, true, &whole, &n_whole, NULL),
                         YARD_OK);
        whole[search_stop(whole, stop, n_stop, &found)] = '\0';
        if (strcmp(whole, out.text) || found != out.stopped)
            fail_msg("seed %llu: want '%s', got '%s'", (unsigned long long)seed, whole, out.text);
        free(whole);
    }
}

/* A long stop string that never completes holds almost everything back; this must stay linear. */
static void long_stop_is_linear(void **state)
{
    enum { N = 1 << 18 };
    char *stop = malloc(N + 1);
    const char *const stops[] = { stop };
    yard_text_stream *stream = NULL;
    const char *text;
    size_t n_bytes, n = 0;
    bool stopped;

    (void)state;
    memset(stop, 'a', N);
    stop[N] = '\0';
    stop[N - 1] = 'b';
    assert_int_equal(yard_text_stream_create(&stream, minimal, true, stops, 1, NULL), YARD_OK);
    for (size_t i = 0; i < 4 * (size_t)N; i++) {
        assert_int_equal(yard_text_stream_push(stream, 'a', &text, &n_bytes, &stopped, NULL),
                         YARD_OK);
        n += n_bytes;
    }
    assert_int_equal(n, 3 * (size_t)N + 1); /* all but the stop string's first N - 1 */
    assert_int_equal(yard_text_stream_push(stream, 'b', &text, &n_bytes, &stopped, NULL), YARD_OK);
    assert_true(stopped);
    yard_text_stream_destroy(stream);
    free(stop);
}

static void after_the_stop(void **state)
{
    static const char *const stop[] = { "b" };
    yard_text_stream *stream = NULL;
    const char *text;
    size_t n_bytes;
    bool stopped;

    (void)state;
    assert_int_equal(yard_text_stream_create(&stream, minimal, true, stop, 1, NULL), YARD_OK);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(yard_text_stream_push(stream, 256, &text, &n_bytes, &stopped, NULL),
                         YARD_OK);
        assert_true(stopped);
        assert_int_equal(n_bytes, i == 0);
    }
    assert_int_equal(yard_text_stream_finish(stream, &text, &n_bytes, NULL), YARD_OK);
    assert_int_equal(n_bytes, 0);
    yard_text_stream_destroy(stream);
}

static void bad_arguments(void **state)
{
    static const char *const empty[] = { "a", "" }, *const broken[] = { "\xff" };
    yard_text_stream *stream = NULL;
    yard_error err = { 0 };
    const char *text;
    size_t n_bytes;
    bool stopped;

    (void)state;
    assert_int_equal(yard_text_stream_create(&stream, minimal, true, empty, 2, &err), YARD_EINVAL);
    assert_non_null(strstr(err.message, "stop string 1"));
    assert_int_equal(yard_text_stream_create(&stream, minimal, true, broken, 1, &err), YARD_EINVAL);
    assert_null(stream);
    assert_int_equal(yard_text_stream_create(&stream, minimal, true, NULL, 0, &err), YARD_OK);
    assert_int_equal(yard_text_stream_push(stream, 299, &text, &n_bytes, &stopped, &err),
                     YARD_EINVAL);
    assert_non_null(strstr(err.message, "299"));
    yard_text_stream_destroy(stream);
    yard_text_stream_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(examples_are_shown),  cmocka_unit_test(stream_equals_search),
        cmocka_unit_test(long_stop_is_linear), cmocka_unit_test(after_the_stop),
        cmocka_unit_test(bad_arguments),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
