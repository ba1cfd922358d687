/* Small tokenizer.json files for tests: the smallest valid one, with any member replaced. */
#ifndef YARD_TESTS_TOKENIZER_FILES_H
#define YARD_TESTS_TOKENIZER_FILES_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

/* The byte alphabet of ByteLevel, ids 0 to 255 in byte order, then "ab", "abc" and "bc". */
static inline json_t *tokenizer_file_minimal(void)
{
    json_t *vocab = json_object();
    int next = 256;

    for (int byte = 0; byte < 256; byte++) {
        const int printable =
            (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
        const int c = printable ? byte : next++;
        char name[3] = { (char)c };
        if (c >= 0x80) {
            name[0] = (char)(0xc0 | c >> 6);
            name[1] = (char)(0x80 | (c & 0x3f));
        }
        json_object_set_new(vocab, name, json_integer(byte));
    }
    json_object_set_new(vocab, "ab", json_integer(256));
    json_object_set_new(vocab, "abc", json_integer(257));
    json_object_set_new(vocab, "bc", json_integer(258));
    return json_pack("{s:[], s:n, s:{s:s, s:b, s:b}, s:{s:s}, s:{s:s, s:o, s:[s,s]}}",
                     "added_tokens", "normalizer", "pre_tokenizer", "type", "ByteLevel",
                     "add_prefix_space", 0, "use_regex", 0, "decoder", "type", "ByteLevel", "model",
                     "type", "BPE", "vocab", vocab, "merges", "a b", "ab c");
}

/* Replaces the member at path ("model.merges") by the JSON text value; NULL removes it. */
static inline void tokenizer_file_set(json_t *root, const char *path, const char *value)
{
    char copy[128], *name = copy, *dot;
    json_error_t error;
    json_t *parsed;

    snprintf(copy, sizeof(copy), "%s", path);
    for (; (dot = strchr(name, '.')); name = dot + 1) {
        *dot = '\0';
        root = json_object_get(root, name);
    }
    if (!value) {
        json_object_del(root, name);
        return;
    }
    parsed = json_loads(value, JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
    if (!parsed)
        fprintf(stderr, "test: bad JSON '%s': %s\n", value, error.text);
    json_object_set_new(root, name, parsed);
}

#endif
