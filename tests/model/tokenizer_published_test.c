/* The pre-tokenizers that DeepSeek-V3 and DeepSeek-V2 publish, by their documented rules: where
 * text is cut. A token for each expected piece, no merges, ignore_merges: ids show the pieces.
 * ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "model/tokenizer.h"
#include "model/tokenizer_files.h"

enum { MAX_PIECES = 16, FIRST_ID = 1000 };

typedef struct pre_tokenizer {
    const char *split[6]; /* regular expressions, in order */
    bool digits;          /* then Digits, one by one; at last ByteLevel */
} pre_tokenizer;

/* Numbers of up to three digits; runs of Han, Hiragana and Katakana; then ASCII punctuation with
 * letters after it, words with at most one mark or space before them, punctuation with a space
 * before and line ends after, line ends, space up to the last one before a word. */
static const pre_tokenizer v3 = {
    .split = { "\\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+",
               "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|"
               "[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|"
               "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+" },
};

/* Line ends alone; words, then punctuation, with one space before; space at the end; runs of Han,
 * kana and Hangul; single digits. (The published list of letters goes on.) */
static const pre_tokenizer v2 = {
    .split = { "[\\r\\n]", "\\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+", "\\s?[!-/:-~！-／：-～‘-‟　-。]+", "\\s+$",
               "[一-龥ࠀ-一가-퟿]+" },
    .digits = true,
};

static const struct {
    const pre_tokenizer *pre_tokenizer;
    const char *piece[MAX_PIECES]; /* together they are the text */
} cases[] = {
    { &v3, { "Hello", " world", "!" } },
    { &v3, { "123", "456", "7" } }, /* digits by threes, from the left */
    { &v3, { "v", "3", " in", " ", "202", "4" } },
    { &v3, { "漢字かなカナ", "abc" } }, /* one run of the three scripts, cut before */
    { &v3, { "abc", "漢字", "def" } },
    { &v3, { "don", "'t" } }, /* punctuation takes the letters after it */
    { &v3, { "a", ".b" } },
    { &v3, { "x", " =", " y", ";\n", "z" } }, /* line ends stay with punctuation */
    { &v3, { "  ", " a" } },                  /* the last space goes with the word */
    { &v3, { "a", "  ", "1" } },              /* all of it stays together before a number */
    { &v3, { "a", "\n\n", "b" } },
    { &v3, { "a", "  \n", " b" } },
    { &v3, { "\tx" } },                /* a word may take any one mark before it */
    { &v3, { "e\xcc\x81t\xc3\xa9" } }, /* combining marks belong to words */
    { &v3, { "a", " 🙂🙂", " b" } },
    { &v2, { "Hello", " world", "!" } },
    { &v2, { "1", "2", "3" } },
    { &v2, { "a", "\n", "\n", "b" } },
    { &v2, { "don", "'", "t" } },
    { &v2, { "a", " ", " b" } },
    { &v2, { "x", " =", " y" } },
    { &v2, { "漢字かな", "abc" } },
    { &v2, { "abc", "漢字한글" } }, /* letters outside the list go by runs */
    { &v2, { "a", " ", "漢字" } },
    { &v2, { "a", "  " } }, /* at the end */
    { &v2, { "a", "。", " b" } },
    { &v2, { "a", ",", " b", "...", "\r", "\n" } },
};

/* The name of bytes in the byte alphabet. */
static void name_of(const char *bytes, char *name)
{
    for (const unsigned char *b = (const unsigned char *)bytes; *b; b++) {
        int c = *b, n_before = 0;
        if (!((c >= 0x21 && c <= 0x7e) || (c >= 0xa1 && c <= 0xac) || c >= 0xae)) {
            for (int k = 0; k < c; k++)
                n_before += !((k >= 0x21 && k <= 0x7e) || (k >= 0xa1 && k <= 0xac) || k >= 0xae);
            c = 256 + n_before;
        }
        if (c >= 0x80)
            *name++ = (char)(0xc0 | c >> 6);
        *name++ = (char)(c < 0x80 ? c : 0x80 | (c & 0x3f));
    }
    *name = '\0';
}

static json_t *pre_tokenizer_json(const pre_tokenizer *p)
{
    json_t *list = json_array();

    for (int i = 0; i < 6 && p->split[i]; i++)
        json_array_append_new(list,
                              json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern",
                                        "Regex", p->split[i], "behavior", "Isolated", "invert", 0));
    if (p->digits)
        json_array_append_new(list,
                              json_pack("{s:s, s:b}", "type", "Digits", "individual_digits", 1));
    json_array_append_new(list, json_pack("{s:s, s:b, s:b}", "type", "ByteLevel",
                                          "add_prefix_space", 0, "use_regex", 0));
    return json_pack("{s:s, s:o}", "type", "Sequence", "pretokenizers", list);
}

/* A token for each stretch of pieces: one that is not cut where it should be shows. */
static void add_stretches(json_t *vocab, const char *const *piece)
{
    for (int first = 0; first < MAX_PIECES && piece[first]; first++) {
        char text[128] = "", name[256];

        for (int last = first; last < MAX_PIECES && piece[last]; last++) {
            strcat(text, piece[last]);
            name_of(text, name);
            if (!json_object_get(vocab, name))
                json_object_set_new(vocab, name,
                                    json_integer(FIRST_ID + first * MAX_PIECES + last));
        }
    }
}

static yard_tokenizer *tokenizer_of(size_t case_idx)
{
    json_t *root = tokenizer_file_minimal(), *model = json_object_get(root, "model");
    yard_tokenizer *tok = NULL;
    yard_error err = { 0 };
    char *text;

    json_object_set_new(root, "pre_tokenizer", pre_tokenizer_json(cases[case_idx].pre_tokenizer));
    tokenizer_file_set(root, "model.merges", "[]");
    json_object_set_new(model, "ignore_merges", json_true());
    add_stretches(json_object_get(model, "vocab"), cases[case_idx].piece);
    text = json_dumps(root, 0);
    if (yard_tokenizer_parse(&tok, text, strlen(text), NULL, 0, &err) != YARD_OK)
        fail_msg("case %zu: %s", case_idx, err.message);
    free(text);
    json_decref(root);
    return tok;
}

static void pieces(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        yard_tokenizer *tok = tokenizer_of(i);
        char text[256] = "", got[512] = "";
        size_t n_want = 0, n_ids;
        bool same = true;
        int32_t *ids;

        for (; n_want < MAX_PIECES && cases[i].piece[n_want]; n_want++)
            strcat(text, cases[i].piece[n_want]);
        assert_int_equal(yard_tokenizer_encode(tok, text, strlen(text), true, &ids, &n_ids, NULL),
                         YARD_OK);
        for (size_t k = 0; k < n_ids; k++) {
            size_t n = 0;
            const char *bytes = yard_tokenizer_token_bytes(tok, ids[k], &n);
            same = same && k < n_want && n == strlen(cases[i].piece[k]) &&
                   !memcmp(bytes, cases[i].piece[k], n);
            snprintf(got + strlen(got), sizeof(got) - strlen(got), "[%.*s]", (int)n, bytes);
        }
        if (!same || n_ids != n_want)
            fail_msg("case %zu, '%s': %s", i, text, got);
        free(ids);
        yard_tokenizer_free(tok);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(pieces) };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
