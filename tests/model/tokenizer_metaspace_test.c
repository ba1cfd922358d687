/* The tokenizer in SentencePiece's way, as Mixtral's files have it: both published spellings
 * against the reference's ids, its rules one by one, what is refused. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "model/tokenizer.h"
#include "model/tokenizer_files.h"

#define DIR "tests/golden/metaspace"
#define SPACE "\xe2\x96\x81" /* U+2581 */

static json_t *load_file(void)
{
    json_t *root = json_load_file(DIR "/tokenizer.json", 0, NULL);

    assert_non_null(root);
    return root;
}

/* The later spelling: Metaspace in place of the normalizer. */
static void set_scheme(json_t *root, const char *scheme)
{
    json_object_set_new(root, "normalizer", json_null());
    json_object_set_new(root, "pre_tokenizer",
                        json_pack("{s:s, s:s, s:s, s:b}", "type", "Metaspace", "replacement", SPACE,
                                  "prepend_scheme", scheme, "split", 0));
}

/* Takes root. */
static yard_status parse(json_t *root, yard_tokenizer **tok, yard_error *err)
{
    char *text = json_dumps(root, 0);
    const yard_status st = yard_tokenizer_parse(tok, text, strlen(text), NULL, 0, err);

    json_decref(root);
    free(text);
    return st;
}

static yard_tokenizer *parse_good(json_t *root)
{
    yard_tokenizer *tok = NULL;
    yard_error err = { 0 };

    if (parse(root, &tok, &err) != YARD_OK)
        fail_msg("%s", err.message);
    return tok;
}

static void check_entry(const yard_tokenizer *tok, const char *spelling, const json_t *entry)
{
    const json_t *text = json_object_get(entry, "text"), *want = json_object_get(entry, spelling);
    const json_t *want_ids = json_object_get(want, "ids");
    const json_t *want_text = json_object_get(want, "decoded");
    size_t n_ids, n_bytes;
    int32_t *ids;
    char *decoded;

    assert_non_null(want);
    assert_int_equal(yard_tokenizer_encode(tok, json_string_value(text), json_string_length(text),
                                           true, &ids, &n_ids, NULL),
                     YARD_OK);
    for (size_t i = 0; i < n_ids || i < json_array_size(want_ids); i++)
        if (i >= n_ids || i >= json_array_size(want_ids) ||
            ids[i] != json_integer_value(json_array_get(want_ids, i)))
            fail_msg("'%s' (%s): id %zu differs", json_string_value(text), spelling, i);
    assert_int_equal(yard_tokenizer_decode(tok, ids, n_ids, false, &decoded, &n_bytes, NULL),
                     YARD_OK);
    if (n_bytes != json_string_length(want_text) ||
        memcmp(decoded, json_string_value(want_text), n_bytes))
        fail_msg("'%s' (%s): want '%s', decoded '%s'", json_string_value(text), spelling,
                 json_string_value(want_text), decoded);
    free(decoded);
    free(ids);
}

static void golden_strings(void **state)
{
    static const char *const spellings[] = { "normalizer", "always", "first", "never" };
    json_t *values = json_load_file(DIR "/values.json", JSON_ALLOW_NUL, NULL);
    const json_t *entry;

    (void)state;
    assert_true(json_array_size(json_object_get(values, "strings")) > 30);
    for (size_t s = 0; s < 4; s++) {
        json_t *root = load_file();
        yard_tokenizer *tok;
        size_t i;

        if (s > 0)
            set_scheme(root, spellings[s]);
        tok = parse_good(root);
        json_array_foreach(json_object_get(values, "strings"), i, entry)
            check_entry(tok, spellings[s], entry);
        yard_tokenizer_free(tok);
    }
    json_decref(values);
}

/* 256 bytes as ids 3.., then a few tokens; merges are given as text, as older files have them. */
static json_t *small_file(void)
{
    static const char *const more[] = { SPACE, "a", "b", SPACE "a", "ab", SPACE "ab", SPACE SPACE };
    json_t *root = load_file(), *vocab = json_object(), *model = json_object_get(root, "model");

    json_object_set_new(vocab, "<unk>", json_integer(0));
    json_object_set_new(vocab, "<s>", json_integer(1));
    json_object_set_new(vocab, "</s>", json_integer(2));
    for (int byte = 0; byte < 256; byte++) {
        char name[8];
        snprintf(name, sizeof(name), "<0x%02X>", byte);
        json_object_set_new(vocab, name, json_integer(3 + byte));
    }
    for (int i = 0; i < 7; i++)
        json_object_set_new(vocab, more[i], json_integer(300 + i));
    json_object_set_new(model, "vocab", vocab);
    json_object_set_new(model, "merges",
                        json_pack("[s, s, s, s]", SPACE " a", "a b", SPACE "a b", SPACE " " SPACE));
    return root;
}

static void check(const yard_tokenizer *tok, const char *text, bool added, const int32_t *want,
                  size_t n_want)
{
    int32_t *ids;
    size_t n_ids;

    assert_int_equal(yard_tokenizer_encode(tok, text, strlen(text), added, &ids, &n_ids, NULL),
                     YARD_OK);
    if (n_ids != n_want || memcmp(ids, want, n_want * sizeof(*ids)))
        fail_msg("'%s': other ids (%zu)", text, n_ids);
    free(ids);
}

#define CHECK(tok, text, added, ...)                                                               \
    do {                                                                                           \
        static const int32_t want_[] = { __VA_ARGS__ };                                            \
        check(tok, text, added, want_, sizeof(want_) / sizeof(want_[0]));                          \
    } while (0)

enum { BYTE = 3, SP = 300, A, B, SP_A, AB, SP_AB, SP_SP };

static void rules(void **state)
{
    yard_tokenizer *tok = parse_good(small_file());

    (void)state;
    CHECK(tok, "a", true, SP_A);           /* a space goes before */
    CHECK(tok, " a", true, SP, SP_A);      /* also where there is one */
    CHECK(tok, "ab", true, SP_AB);         /* the merge of lower rank first */
    CHECK(tok, SPACE "a", true, SP, SP_A); /* U+2581 is a space */
    CHECK(tok, "c", true, SP, BYTE + 'c'); /* no token: its bytes */
    CHECK(tok, "é", true, SP, BYTE + 0xc3, BYTE + 0xa9);
    CHECK(tok, "<0x61>", true, SP, BYTE + '<', BYTE + '0', BYTE + 'x', BYTE + '6', BYTE + '1',
          BYTE + '>');                 /* the name of a byte is text like any other */
    CHECK(tok, "<s>a", true, 1, SP_A); /* each stretch between added tokens gets its space */
    CHECK(tok, "a</s>", true, SP_A, 2);
    CHECK(tok, "<s>", false, SP, BYTE + '<', BYTE + 's', BYTE + '>');
    assert_int_equal(yard_tokenizer_find(tok, " ab", 3), SP_AB);
    assert_true(yard_tokenizer_is_special(tok, 2));
    yard_tokenizer_free(tok);
}

static void schemes(void **state)
{
    json_t *root = small_file();
    yard_tokenizer *tok;

    (void)state;
    set_scheme(root, "first");
    tok = parse_good(root);
    CHECK(tok, "a", true, SP_A);
    CHECK(tok, " a", true, SP_A); /* only where there is none */
    CHECK(tok, "<s>a", true, 1, A);
    CHECK(tok, "a<s>a", true, SP_A, 1, A);
    yard_tokenizer_free(tok);
    root = small_file();
    set_scheme(root, "always");
    tok = parse_good(root);
    CHECK(tok, "<s>a", true, 1, SP_A);
    CHECK(tok, "<s> a", true, 1, SP_A);
    yard_tokenizer_free(tok);
    root = small_file();
    set_scheme(root, "never");
    tok = parse_good(root);
    CHECK(tok, "a", true, A);
    yard_tokenizer_free(tok);
}

static void decoding(void **state)
{
    static const int32_t ids[] = { SP_A, SP_AB, BYTE + 0xc3, BYTE + 0xa9, SP, BYTE + 0xff, 2 };
    yard_tokenizer *tok = parse_good(small_file());
    yard_text_stream *stream = NULL;
    const char *part;
    char *text;
    size_t n;
    bool stopped;

    (void)state;
    assert_int_equal(yard_tokenizer_decode(tok, ids, 7, false, &text, &n, NULL), YARD_OK);
    assert_string_equal(text, "a abé \ufffd</s>"); /* one space less at the beginning */
    free(text);
    assert_int_equal(yard_tokenizer_decode(tok, ids, 7, true, &text, &n, NULL), YARD_OK);
    assert_string_equal(text, "a abé \ufffd");
    free(text);
    /* a stream goes on where the prompt ended */
    assert_int_equal(yard_text_stream_create(&stream, tok, true, NULL, 0, NULL), YARD_OK);
    assert_int_equal(yard_text_stream_push(stream, SP_A, &part, &n, &stopped, NULL), YARD_OK);
    assert_int_equal(n, 2);
    assert_memory_equal(part, " a", 2);
    assert_int_equal(yard_text_stream_push(stream, BYTE + 0xc3, &part, &n, &stopped, NULL),
                     YARD_OK);
    assert_int_equal(n, 0);
    assert_int_equal(yard_text_stream_push(stream, BYTE + 0xa9, &part, &n, &stopped, NULL),
                     YARD_OK);
    assert_memory_equal(part, "é", 2);
    yard_text_stream_destroy(stream);
    yard_tokenizer_free(tok);
}

static void refusals(void **state)
{
    static const struct {
        const char *member, *value, *message;
    } cases[] = {
        { "model.byte_fallback", "7", "model.byte_fallback: want true or false" },
        { "model.vocab", "{\"a\":0,\"<0x00>\":1}", "want a token for each of the 256 bytes" },
        { "model.dropout", "0.1", "model.dropout" },
        { "normalizer", "null", "either a normalizer or a pre_tokenizer" },
        { "normalizer", "{\"type\":\"NFKC\"}", "only Prepend and Replace of spaces by U+2581" },
        { "normalizer",
          "{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\"\u2581\"}",
          "only Prepend and Replace" },
        { "normalizer", "{\"type\":\"Sequence\",\"normalizers\":[]}", "only Prepend and Replace" },
        { "pre_tokenizer", "{\"type\":\"ByteLevel\"}", "either a normalizer or a pre_tokenizer" },
        { "decoder", "{\"type\":\"ByteLevel\"}", "only Replace, ByteFallback, Fuse and Strip" },
        { "decoder", "null", "only Replace, ByteFallback" },
        { "truncation", "{\"max_length\":512}", "truncation" },
    };
    static const struct {
        const char *member, *value, *message;
    } metaspaces[] = {
        { "pre_tokenizer", "{\"type\":\"ByteLevel\"}", "only Metaspace of U+2581" },
        { "pre_tokenizer.replacement", "\"_\"", "only Metaspace of U+2581" },
        { "pre_tokenizer.split", "true", "pre_tokenizer.split: with model.byte_fallback only" },
        { "pre_tokenizer.split", "null", "pre_tokenizer.split: want true or false" },
        { "pre_tokenizer.prepend_scheme", "\"last\"", "only always, first or never" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]) + 5; i++) {
        const size_t n = sizeof(cases) / sizeof(cases[0]);
        json_t *root = small_file();
        yard_tokenizer *tok = NULL;
        yard_error err = { 0 };
        const char *message = i < n ? cases[i].message : metaspaces[i - n].message;

        if (i < n) {
            tokenizer_file_set(root, cases[i].member, cases[i].value);
        } else {
            set_scheme(root, "first");
            tokenizer_file_set(root, metaspaces[i - n].member, metaspaces[i - n].value);
        }
        assert_int_not_equal(parse(root, &tok, &err), YARD_OK);
        if (!strstr(err.message, message) || strncmp(err.message, "tokenizer.json: ", 16))
            fail_msg("want '%s', got '%s'", message, err.message);
        assert_null(tok);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_strings), cmocka_unit_test(rules),    cmocka_unit_test(schemes),
        cmocka_unit_test(decoding),       cmocka_unit_test(refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
