/* The tokenizer against golden values, its own properties, and files that must be refused.
 * ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

#include "model/tokenizer.h"
#include "model/tokenizer_files.h"

#define DEMO_DIR "models/demo"

static uint64_t random_state;

static uint32_t random_below(uint32_t n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((random_state >> 33) % n);
}

static yard_tokenizer *load_demo(void)
{
    yard_tokenizer *tok = NULL;
    yard_error err = { 0 };

    if (yard_tokenizer_load(&tok, DEMO_DIR, NULL, &err) != YARD_OK)
        fail_msg("%s", err.message);
    return tok;
}

/* Takes root. */
static yard_status parse_file(json_t *root, yard_tokenizer **tok, yard_error *err)
{
    char *text = json_dumps(root, 0);
    yard_status st = yard_tokenizer_parse(tok, text, strlen(text), NULL, 0, err);

    json_decref(root);
    free(text);
    return st;
}

static yard_tokenizer *parse_good(json_t *root)
{
    yard_tokenizer *tok = NULL;
    yard_error err = { 0 };

    if (parse_file(root, &tok, &err) != YARD_OK)
        fail_msg("%s", err.message);
    return tok;
}

/* ids as "1 2 3"; malloc'd. */
static char *ids_text(const int32_t *ids, size_t n_ids)
{
    char *text = calloc(n_ids * 12 + 1, 1);

    for (size_t i = 0; i < n_ids; i++)
        sprintf(text + strlen(text), i ? " %d" : "%d", ids[i]);
    return text;
}

static void check_encode_bytes(const yard_tokenizer *tok, const char *text, size_t n_bytes,
                               bool added, const char *want)
{
    yard_error err = { 0 };
    int32_t *ids;
    size_t n_ids;
    char *got;

    if (yard_tokenizer_encode(tok, text, n_bytes, added, &ids, &n_ids, &err) != YARD_OK)
        fail_msg("'%s': %s", text, err.message);
    got = ids_text(ids, n_ids);
    if (strcmp(got, want))
        fail_msg("'%s': want %s, got %s", text, want, got);
    free(got);
    free(ids);
}

static void check_encode(const yard_tokenizer *tok, const char *text, bool added, const char *want)
{
    check_encode_bytes(tok, text, strlen(text), added, want);
}

static void check_golden(const yard_tokenizer *tok, const json_t *entry, const char *member,
                         bool added)
{
    const json_t *text = json_object_get(entry, "text"), *want = json_object_get(entry, member);
    int32_t *ids;
    size_t n_ids, n_bytes;
    yard_error err = { 0 };
    char *decoded;

    if (yard_tokenizer_encode(tok, json_string_value(text), json_string_length(text), added, &ids,
                              &n_ids, &err) != YARD_OK)
        fail_msg("'%s': %s", json_string_value(text), err.message);
    for (size_t i = 0; i < n_ids || i < json_array_size(want); i++)
        if (i >= n_ids || ids[i] != json_integer_value(json_array_get(want, i)))
            fail_msg("'%s' (%s): id %zu differs", json_string_value(text), member, i);
    assert_int_equal(n_ids, json_array_size(want));
    assert_int_equal(yard_tokenizer_decode(tok, ids, n_ids, false, &decoded, &n_bytes, &err),
                     YARD_OK);
    assert_int_equal(n_bytes, json_string_length(text));
    assert_memory_equal(decoded, json_string_value(text), n_bytes);
    free(decoded);
    free(ids);
}

static void golden_strings(void **state)
{
    json_t *root = json_load_file("tests/golden/tokenizer.json", JSON_ALLOW_NUL, NULL);
    yard_tokenizer *tok = load_demo();
    const json_t *entry;
    size_t i;

    (void)state;
    assert_true(json_array_size(json_object_get(root, "strings")) > 0);
    json_array_foreach(json_object_get(root, "strings"), i, entry)
    {
        check_golden(tok, entry, "ids", true);
        check_golden(tok, entry, "ids_plain", false);
    }
    yard_tokenizer_free(tok);
    json_decref(root);
}

static void demo_facts(void **state)
{
    yard_tokenizer *tok = load_demo();
    const char *bytes;
    size_t n_bytes;

    (void)state;
    assert_int_equal(yard_tokenizer_vocab_size(tok), 3584);
    assert_true(yard_tokenizer_is_special(tok, 0));
    assert_false(yard_tokenizer_is_special(tok, 3572)); /* added, not special */
    assert_false(yard_tokenizer_is_special(tok, -1));
    assert_false(yard_tokenizer_is_special(tok, INT32_MAX));
    assert_int_equal(yard_tokenizer_find(tok, "<｜User｜>", strlen("<｜User｜>")), 3572);
    assert_int_equal(yard_tokenizer_find(tok, " hello", 6), 1052);
    assert_int_equal(yard_tokenizer_find(tok, "no such token", 13), -1);
    bytes = yard_tokenizer_token_bytes(tok, 1052, &n_bytes);
    assert_int_equal(n_bytes, 6);
    assert_memory_equal(bytes, " hello", 6);
    assert_null(yard_tokenizer_token_bytes(tok, 3584, &n_bytes));
    assert_string_equal(yard_tokenizer_bos_text(tok), "<｜begin▁of▁sentence｜>");
    assert_string_equal(yard_tokenizer_eos_text(tok), "<｜end▁of▁sentence｜>");
    assert_non_null(yard_tokenizer_chat_template(tok));
    yard_tokenizer_free(tok);
}

/* Characters from where the patterns and the added tokens make differences. */
static size_t random_text(char *out, uint32_t n_parts)
{
    static const char *const parts[] = { "a",      "Hello",      " ",        "  ",     "\n",
                                         "\r\n",   "\t",         "7",        "123",    "2024",
                                         "don't",  "漢",         "カ",       "é",      "e\u0301",
                                         "🙂",   "!",          "::",       "_",      "\u00a0",
                                         "\u3000", "<｜User｜>", "</think>", "<｜",    "<|EOT|>",
                                         "ß",      "नमस्ते",       "·",        "\u180e", "\u200d" };
    size_t n = 0;

    for (uint32_t i = 0; i < n_parts; i++) {
        const char *part = parts[random_below(sizeof(parts) / sizeof(parts[0]))];
        memcpy(out + n, part, strlen(part));
        n += strlen(part);
    }
    out[n] = '\0';
    return n;
}

static void decode_inverts_encode(void **state)
{
    yard_tokenizer *tok = load_demo();
    char text[40 * 32], *decoded;
    int32_t *ids;
    size_t n_ids, n_decoded;

    (void)state;
    for (uint64_t seed = 0; seed < 2000; seed++) {
        random_state = seed;
        const size_t n = random_text(text, random_below(40));
        for (int added = 0; added < 2; added++) {
            assert_int_equal(yard_tokenizer_encode(tok, text, n, added, &ids, &n_ids, NULL),
                             YARD_OK);
            assert_int_equal(
                yard_tokenizer_decode(tok, ids, n_ids, false, &decoded, &n_decoded, NULL), YARD_OK);
            if (n_decoded != n || memcmp(decoded, text, n))
                fail_msg("seed %llu: '%s' became '%s'", (unsigned long long)seed, text, decoded);
            free(decoded);
            free(ids);
        }
    }
    yard_tokenizer_free(tok);
}

/* A word without spaces is one piece: merging it must not be quadratic (that would be minutes). */
static void long_word(void **state)
{
    enum { N = 1 << 20 };
    yard_tokenizer *tok = load_demo();
    char *text = malloc(N), *decoded;
    int32_t *ids;
    size_t n_ids, n_decoded;
    clock_t start;

    (void)state;
    for (int kind = 0; kind < 3; kind++) {
        for (size_t i = 0; i < N; i++)
            text[i] = kind == 0 ? 'a' : kind == 1 ? (char)('a' + random_below(26)) : ' ';
        start = clock();
        assert_int_equal(yard_tokenizer_encode(tok, text, N, true, &ids, &n_ids, NULL), YARD_OK);
        assert_true(clock() - start < 20 * CLOCKS_PER_SEC); /* of this process's own time */
        assert_int_equal(yard_tokenizer_decode(tok, ids, n_ids, false, &decoded, &n_decoded, NULL),
                         YARD_OK);
        assert_int_equal(n_decoded, N);
        assert_memory_equal(decoded, text, N);
        free(decoded);
        free(ids);
    }
    free(text);
    yard_tokenizer_free(tok);
}

typedef struct race {
    const yard_tokenizer *tok;
    char text[40 * 32];
    size_t n_text;
    int32_t *want;
    size_t n_want;
} race;

static void encode_once(void *ctx, uint32_t task_idx, uint32_t thread_idx)
{
    const race *r = ctx;
    int32_t *ids = NULL;
    size_t n_ids = 0;

    (void)thread_idx;
    if (yard_tokenizer_encode(r->tok, r->text, r->n_text, true, &ids, &n_ids, NULL) != YARD_OK ||
        n_ids != r->n_want || memcmp(ids, r->want, n_ids * sizeof(*ids)))
        fail_msg("task %u: want the ids of one thread", task_idx);
    free(ids);
}

/* One tokenizer, several threads: nothing of a call is kept in it. */
static void threads_share_it(void **state)
{
    yard_tokenizer *tok = load_demo();
    race r = { .tok = tok };
    yard_pool *pool = NULL;

    (void)state;
    random_state = 1;
    r.n_text = random_text(r.text, 40);
    assert_int_equal(yard_tokenizer_encode(tok, r.text, r.n_text, true, &r.want, &r.n_want, NULL),
                     YARD_OK);
    assert_int_equal(yard_pool_create(&pool, 4, NULL), YARD_OK);
    yard_pool_run(pool, encode_once, &r, 400);
    yard_pool_destroy(pool);
    free(r.want);
    yard_tokenizer_free(tok);
}

static void bad_text_and_ids(void **state)
{
    static const int32_t ids[][2] = { { 0, -1 }, { 0, 3584 }, { 0, INT32_MAX } };
    yard_tokenizer *tok = load_demo();
    yard_error err = { 0 };
    int32_t *out_ids;
    size_t n;
    char *text;

    (void)state;
    assert_int_equal(yard_tokenizer_encode(tok, "ab\xff", 3, true, &out_ids, &n, &err),
                     YARD_EFORMAT);
    assert_non_null(strstr(err.message, "offset 2"));
    for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++)
        assert_int_equal(yard_tokenizer_decode(tok, ids[i], 2, false, &text, &n, &err),
                         YARD_EINVAL);
    assert_non_null(strstr(err.message, "2147483647"));
    yard_tokenizer_free(tok);
}

static void decode_shows_bad_bytes(void **state)
{
    yard_tokenizer *tok = parse_good(tokenizer_file_minimal());
    /* e2 82 is one broken character, 41 a letter, ff another broken one, e2 82 ac a euro sign */
    static const int32_t ids[] = { 0xe2, 0x82, 0x41, 0xff, 0xe2, 0x82, 0xac, 0xf0 };
    static const char want[] = "\ufffdA\ufffd€\ufffd";
    size_t n;
    char *text;

    (void)state;
    assert_int_equal(yard_tokenizer_decode(tok, ids, 8, false, &text, &n, NULL), YARD_OK);
    assert_string_equal(text, want);
    free(text);
    yard_tokenizer_free(tok);
}

#define ADDED(id, text, flags) "{\"id\":" #id ",\"content\":\"" text "\"" flags "}"
#define SPLIT(pattern)                                                                             \
    "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":"        \
    "\"" pattern "\"},\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\","        \
    "\"add_prefix_space\":false,\"use_regex\":false}]}"

static const struct feature {
    const char *member, *value; /* replaced in the minimal file */
    const char *text, *want;
} features[] = {
    { NULL, NULL, "abcab", "257 256" },
    { NULL, NULL, "", "" },
    { "model.merges", "[[\"a\",\"b\"],[\"ab\",\"c\"]]", "abcab", "257 256" },
    { "model.merges", "[\"a b\"]", "abc", "256 99" },
    { "model.ignore_merges", "true", "abc", "257" },
    { "model.merges", "[]", "ab", "97 98" },
    /* a pair named twice has its last rank */
    { "model.merges", "[\"a b\",\"b c\",\"a b\"]", "abc", "97 258" },
    /* added tokens: leftmost, then longest; unnormalised ones first */
    { "added_tokens", "[" ADDED(300, "<x", "") "," ADDED(301, "<x>", "") "]", "a<x>b<x",
      "97 301 98 300" },
    { "added_tokens", "[" ADDED(300, "aX", "") "," ADDED(301, "Xbb", ",\"normalized\":false") "]",
      "aXbb", "97 301" },
    { "added_tokens", "[" ADDED(300, "<X>", ",\"lstrip\":true,\"rstrip\":true") "]",
      "a \\u00a0<X>\\u3000\\nb", "97 300 98" },
    { "added_tokens", "[" ADDED(300, "a\\u0000b", "") "]", "a\\u0000b", "300" },
    /* the added token's id is that of the vocabulary */
    { "added_tokens", "[" ADDED(257, "abc", ",\"special\":true") "]", "abcab", "257 256" },
    /* normal forms; a normalised added token is found in the normalised text */
    { "normalizer", "{\"type\":\"NFC\"}", "e\\u0301", "195 169" },
    { "normalizer", "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFKD\"}]}",
      "\\u00e9\\ufb01", "101 204 129 102 105" },
    { "normalizer", "{\"type\":\"Sequence\",\"normalizers\":[]}", "e\\u0301", "101 204 129" },
    /* U+180E is no white space; U+0085 is */
    { "pre_tokenizer", SPLIT("\\\\s"), "a\\u180eb", "97 225 160 142 98" },
    { "pre_tokenizer", SPLIT("a\\\\S"), "abc", "256 99" },
    { "pre_tokenizer", SPLIT("[^\\\\s]b|[\\\\S]c"), "abc", "256 99" },
    { "pre_tokenizer", SPLIT("(?i:B)"), "abc", "97 98 99" },
    { "pre_tokenizer", SPLIT("\\\\u0062"), "abc", "97 98 99" },
    { "pre_tokenizer", SPLIT("(?=b)"), "abc", "97 98 99" }, /* an empty match cuts */
    { "pre_tokenizer", SPLIT("^b"), "a\\nbc", "97 10 98 99" },
    { "pre_tokenizer",
      "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"String\":\".\"}"
      ","
      "\"behavior\":\"Isolated\"},{\"type\":\"Digits\",\"individual_digits\":true},"
      "{\"type\":\"ByteLevel\",\"add_prefix_space\":true,\"use_regex\":false}]}",
      "ab.1", "32 256 32 46 32 49" },
    { "pre_tokenizer", "{\"type\":\"ByteLevel\",\"add_prefix_space\":true}", "ab abc",
      "32 256 32 257" },
    { "post_processor", "{\"type\":\"TemplateProcessing\",\"single\":[]}", "ab", "256" },
    { "padding", "{\"strategy\":\"BatchLongest\"}", "ab", "256" },
};

static void features_give_ids(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(features) / sizeof(features[0]); i++) {
        const struct feature *f = &features[i];
        json_t *root = tokenizer_file_minimal();
        char quoted[64];
        json_t *text;
        yard_tokenizer *tok;

        if (f->member)
            tokenizer_file_set(root, f->member, f->value);
        snprintf(quoted, sizeof(quoted), "\"%s\"", f->text);
        text = json_loads(quoted, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        tok = parse_good(root);
        check_encode_bytes(tok, json_string_value(text), json_string_length(text), true, f->want);
        yard_tokenizer_free(tok);
        json_decref(text);
    }
}

static void plain_ignores_added_tokens(void **state)
{
    json_t *root = tokenizer_file_minimal();
    yard_tokenizer *tok;

    (void)state;
    tokenizer_file_set(root, "added_tokens", "[" ADDED(300, "<x>", ",\"special\":true") "]");
    tok = parse_good(root);
    check_encode(tok, "<x>", true, "300");
    check_encode(tok, "<x>", false, "60 120 62");
    yard_tokenizer_free(tok);
}

static const struct refusal {
    const char *member, *value;
    yard_status want;
    const char *message; /* a part of it */
} refusals[] = {
    { "model", NULL, YARD_EFORMAT, "model: want an object, got nothing" },
    { "model.type", "\"WordPiece\"", YARD_ENOTSUP, "model.type: 'WordPiece'" },
    { "model.type", "7", YARD_EFORMAT, "model.type: want a string" },
    { "model.dropout", "0.5", YARD_ENOTSUP, "model.dropout" },
    { "model.unk_token", "\"<unk>\"", YARD_ENOTSUP, "model.unk_token" },
    { "model.byte_fallback", "true", YARD_ENOTSUP, "none for 0x00" },
    { "model.continuing_subword_prefix", "\"##\"", YARD_ENOTSUP,
      "model.continuing_subword_prefix" },
    { "model.end_of_word_suffix", "\"</w>\"", YARD_ENOTSUP, "model.end_of_word_suffix" },
    { "model.ignore_merges", "1", YARD_EFORMAT, "model.ignore_merges" },
    { "model.vocab", NULL, YARD_EFORMAT, "model.vocab: want an object, got nothing" },
    { "model.vocab", "{\"a\":0}", YARD_ENOTSUP, "256 bytes" },
    { "model.vocab.zz", "1", YARD_EFORMAT, "model.vocab 'zz': want an id of its own, got 1" },
    { "model.vocab.zz", "-1", YARD_EFORMAT, "model.vocab 'zz': want an id from 0" },
    { "model.vocab.zz", "2147483648", YARD_EFORMAT, "got 2147483648" },
    { "model.vocab.zz", "1.5", YARD_EFORMAT, "want an id, got a fraction" },
    { "model.vocab.zz", "\"3\"", YARD_EFORMAT, "want an id, got a string" },
    { "model.merges", NULL, YARD_EFORMAT, "model.merges: want an array" },
    { "model.merges", "[\"a q q\"]", YARD_EFORMAT, "model.merges[0]" },
    { "model.merges", "[\"ab\"]", YARD_EFORMAT, "model.merges[0]" },
    { "model.merges", "[\"a b\",\"a zz\"]", YARD_EFORMAT,
      "model.merges[1]: want tokens of model.vocab, got 'zz'" },
    { "model.merges", "[\"b a\"]", YARD_EFORMAT, "got 'ba'" },
    { "model.merges", "[[\"a\"]]", YARD_EFORMAT, "model.merges[0]" },
    { "model.merges", "[[\"a\",1]]", YARD_EFORMAT, "model.merges[0]" },
    { "model.merges", "[7]", YARD_EFORMAT, "got a whole number" },
    { "added_tokens", "{}", YARD_EFORMAT, "added_tokens: want an array" },
    { "added_tokens", "[7]", YARD_EFORMAT, "added_tokens[0].content" },
    { "added_tokens", "[" ADDED(300, "", "") "]", YARD_EFORMAT, "an empty string" },
    { "added_tokens", "[" ADDED(5, "<x>", "") "]", YARD_EFORMAT, "'<x>': want the id of" },
    { "added_tokens", "[" ADDED(300, "ab", "") "]", YARD_EFORMAT, "'ab': want the id of" },
    { "added_tokens", "[" ADDED(300, "<x>", "") "," ADDED(301, "<x>", "") "]", YARD_EFORMAT,
      "twice" },
    { "added_tokens", "[" ADDED(300, "<x>", "") "," ADDED(300, "<y>", "") "]", YARD_EFORMAT,
      "'<y>'" },
    { "added_tokens", "[" ADDED(99999999, "<x>", "") "]", YARD_EFORMAT, "got 99999999" },
    { "added_tokens", "[{\"content\":\"<x>\"}]", YARD_EFORMAT, "want an id, got nothing" },
    { "added_tokens", "[" ADDED(300, "<x>", ",\"single_word\":true") "]", YARD_ENOTSUP,
      "single_word" },
    { "added_tokens", "[" ADDED(300, "<x>", ",\"lstrip\":1") "]", YARD_EFORMAT,
      "lstrip: want true or false" },
    { "normalizer", "{\"type\":\"Lowercase\"}", YARD_ENOTSUP, "normalizer: 'Lowercase'" },
    { "normalizer", "{}", YARD_EFORMAT, "normalizer.type" },
    { "normalizer", "[]", YARD_EFORMAT, "normalizer: want an object" },
    { "normalizer", "{\"type\":\"Sequence\"}", YARD_EFORMAT, "normalizers: want an array" },
    { "pre_tokenizer", "null", YARD_EFORMAT, "pre_tokenizer: want an object" },
    { "pre_tokenizer", "{\"type\":\"Metaspace\"}", YARD_ENOTSUP, "'Metaspace'" },
    { "pre_tokenizer", "{\"type\":\"Digits\"}", YARD_ENOTSUP, "ByteLevel at the end" },
    { "pre_tokenizer",
      "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},{\"type\":\"Digits\"}]}",
      YARD_ENOTSUP, "after ByteLevel: 'Digits'" },
    { "pre_tokenizer",
      "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Removed\"}", YARD_ENOTSUP,
      "'Removed'" },
    { "pre_tokenizer",
      "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Isolated\",\"invert\":"
      "true}",
      YARD_ENOTSUP, "'invert'" },
    { "pre_tokenizer", "{\"type\":\"Split\",\"pattern\":\"a\",\"behavior\":\"Isolated\"}",
      YARD_EFORMAT, "pre_tokenizer.pattern" },
    { "pre_tokenizer", SPLIT("(a"), YARD_ENOTSUP, "split 0: want a regular expression" },
    { "pre_tokenizer", SPLIT("[a"), YARD_ENOTSUP, "an unclosed class" },
    { "pre_tokenizer", SPLIT("[a[b]]"), YARD_ENOTSUP, "a class within a class" },
    { "pre_tokenizer", SPLIT("[a&&b]"), YARD_ENOTSUP, "an intersection" },
    { "pre_tokenizer", SPLIT("\\\\w+"), YARD_ENOTSUP, "\\w is not implemented" },
    { "pre_tokenizer", SPLIT("\\\\h"), YARD_ENOTSUP, "\\h is not implemented" },
    { "pre_tokenizer", SPLIT("(a)\\\\1"), YARD_ENOTSUP, "\\1 is not implemented" },
    { "pre_tokenizer", SPLIT("(?m:a)"), YARD_ENOTSUP, "this kind of group" },
    { "pre_tokenizer", SPLIT("(*UTF)a"), YARD_ENOTSUP, "(*" },
    { "pre_tokenizer", SPLIT("a{2}+"), YARD_ENOTSUP, "a suffix of {n,m}" },
    { "pre_tokenizer", SPLIT("a{,2}"), YARD_ENOTSUP, "{,n}" },
    { "pre_tokenizer", SPLIT("[\\\\s-z]"), YARD_ENOTSUP, "a range that begins with" },
    { "pre_tokenizer", SPLIT("\\\\"), YARD_ENOTSUP, "is not implemented" },
    { "pre_tokenizer", SPLIT("\\\\u12"), YARD_ENOTSUP, "hexadecimal" },
    { "pre_tokenizer", SPLIT("\\\\p{"), YARD_ENOTSUP, "unclosed brace" },
    { "pre_tokenizer", SPLIT("\\\\p{Nonsense}"), YARD_ENOTSUP, "regular expression" },
    { "pre_tokenizer", SPLIT(""), YARD_ENOTSUP, "a pattern of 1 to" },
    { "post_processor", "{\"type\":\"BertProcessing\"}", YARD_ENOTSUP, "post_processor: 'Bert" },
    { "decoder", NULL, YARD_EFORMAT, "decoder: want an object, got nothing" },
    { "decoder", "{\"type\":\"WordPiece\"}", YARD_ENOTSUP, "decoder: 'WordPiece'" },
    { "truncation", "{\"max_length\":512}", YARD_ENOTSUP, "truncation" },
};

static void bad_files_are_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(refusals) / sizeof(refusals[0]); i++) {
        const struct refusal *r = &refusals[i];
        json_t *root = tokenizer_file_minimal();
        yard_tokenizer *tok = NULL;
        yard_error err = { 0 };
        yard_status st;

        tokenizer_file_set(root, r->member, r->value);
        st = parse_file(root, &tok, &err);
        if (st != r->want || !strstr(err.message, r->message) ||
            strncmp(err.message, "tokenizer.json: ", 16))
            fail_msg("%s = %s: want %s with '%s', got %s: %s", r->member, r->value,
                     yard_status_name(r->want), r->message, yard_status_name(st), err.message);
        assert_null(tok);
    }
}

static const struct {
    const char *tokenizer, *config;
    const char *message;
} bad_texts[] = {
    { "", NULL, "tokenizer.json: want JSON" },
    { "[]", NULL, "tokenizer.json: the file: want an object, got an array" },
    { "{\"a\":1,\"a\":2}", NULL, "duplicate" },
    { "{\"model\":{\"vocab\":{\"\xff\":1}}}", NULL, "tokenizer.json: want JSON" },
    { "{} x", NULL, "tokenizer.json: want JSON" },
    { NULL, "{", "tokenizer_config.json: want JSON" },
    { NULL, "[]", "tokenizer_config.json: the file: want an object" },
    { NULL, "{\"bos_token\":7}", "tokenizer_config.json: bos_token" },
    { NULL, "{\"eos_token\":{}}", "tokenizer_config.json: eos_token" },
    { NULL, "{\"chat_template\":7}", "tokenizer_config.json: chat_template" },
    { NULL, "{\"chat_template\":[{\"name\":\"default\"}]}", "chat_template[]" },
};

static void bad_json_is_refused(void **state)
{
    json_t *root = tokenizer_file_minimal();
    char *good = json_dumps(root, 0);

    (void)state;
    for (size_t i = 0; i < sizeof(bad_texts) / sizeof(bad_texts[0]); i++) {
        const char *text = bad_texts[i].tokenizer ? bad_texts[i].tokenizer : good;
        const char *config = bad_texts[i].config;
        yard_tokenizer *tok = NULL;
        yard_error err = { 0 };

        assert_int_equal(yard_tokenizer_parse(&tok, text, strlen(text), config,
                                              config ? strlen(config) : 0, &err),
                         YARD_EFORMAT);
        if (!strstr(err.message, bad_texts[i].message))
            fail_msg("%s, %s: want '%s', got '%s'", text, config ? config : "",
                     bad_texts[i].message, err.message);
    }
    free(good);
    json_decref(root);
}

static void config_forms(void **state)
{
    static const char config[] =
        "{\"bos_token\":{\"content\":\"<s>\"},\"eos_token\":\"</s>\",\"chat_template\":"
        "[{\"name\":\"tools\",\"template\":\"t\"},{\"name\":\"default\",\"template\":\"d\"}]}";
    json_t *root = tokenizer_file_minimal();
    char *text = json_dumps(root, 0);
    yard_tokenizer *tok = NULL;

    (void)state;
    assert_int_equal(
        yard_tokenizer_parse(&tok, text, strlen(text), config, sizeof(config) - 1, NULL), YARD_OK);
    assert_string_equal(yard_tokenizer_bos_text(tok), "<s>");
    assert_string_equal(yard_tokenizer_eos_text(tok), "</s>");
    assert_string_equal(yard_tokenizer_chat_template(tok), "d");
    yard_tokenizer_free(tok);
    assert_int_equal(yard_tokenizer_parse(&tok, text, strlen(text), NULL, 0, NULL), YARD_OK);
    assert_null(yard_tokenizer_chat_template(tok));
    yard_tokenizer_free(tok);
    free(text);
    json_decref(root);
}

static void missing_directory(void **state)
{
    yard_tokenizer *tok = NULL;
    yard_error err = { 0 };

    (void)state;
    assert_int_equal(yard_tokenizer_load(&tok, "no/such/directory", NULL, &err), YARD_EIO);
    assert_non_null(strstr(err.message, "no/such/directory/tokenizer.json"));
    assert_int_equal(yard_tokenizer_load(&tok, "tests", NULL, &err), YARD_EIO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_strings),
        cmocka_unit_test(demo_facts),
        cmocka_unit_test(decode_inverts_encode),
        cmocka_unit_test(long_word),
        cmocka_unit_test(threads_share_it),
        cmocka_unit_test(bad_text_and_ids),
        cmocka_unit_test(decode_shows_bad_bytes),
        cmocka_unit_test(features_give_ids),
        cmocka_unit_test(plain_ignores_added_tokens),
        cmocka_unit_test(bad_files_are_refused),
        cmocka_unit_test(bad_json_is_refused),
        cmocka_unit_test(config_forms),
        cmocka_unit_test(missing_directory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
