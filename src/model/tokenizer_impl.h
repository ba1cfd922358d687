/* What the tokenizer's files share: tables, the loaded tokenizer, regular expressions. */
#ifndef YARD_MODEL_TOKENIZER_IMPL_H
#define YARD_MODEL_TOKENIZER_IMPL_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "model/tokenizer.h"

enum {
    /* An id is an index into a table, so a hostile file must not name a huge one. The largest
     * published vocabularies have about 2^18 entries. */
    YARD_MAX_TOKEN_ID = (1 << 22) - 1,
    YARD_MAX_SPLITS = 16,
    YARD_MAX_NORMALIZERS = 8,
    YARD_MAX_NESTING = 8, /* Sequence inside Sequence */
};

/* tables (tokenizer_table.c) */

/* (first, second) -> value, open addressing. Merges, tries and stop strings live in these. */
typedef struct yard_pair_entry {
    uint64_t key;
    uint64_t value;
} yard_pair_entry;

typedef struct yard_pair_map {
    yard_pair_entry *entries; /* NULL: empty */
    size_t n_slots;           /* a power of two */
    size_t n_used;
} yard_pair_map;

void yard_pair_map_free(yard_pair_map *map);
/* Replaces an earlier value. false: no memory, the map is unchanged. */
bool yard_pair_map_put(yard_pair_map *map, uint32_t first, uint32_t second, uint64_t value);
bool yard_pair_map_get(const yard_pair_map *map, uint32_t first, uint32_t second, uint64_t *value);

/* Bytes -> id. The bytes are not copied. */
typedef struct yard_bytes_entry {
    const char *bytes; /* NULL: free slot */
    uint32_t n_bytes;
    int32_t id;
} yard_bytes_entry;

typedef struct yard_bytes_map {
    yard_bytes_entry *entries;
    size_t n_slots;
} yard_bytes_map;

void yard_bytes_map_free(yard_bytes_map *map);
bool yard_bytes_map_create(yard_bytes_map *map, size_t max_entries); /* false: no memory */
/* false when the bytes are there already. At most max_entries calls. */
bool yard_bytes_map_add(yard_bytes_map *map, const char *bytes, uint32_t n_bytes, int32_t id);
int32_t yard_bytes_map_find(const yard_bytes_map *map, const char *bytes, size_t n_bytes);

/* A set of strings, found leftmost-longest. Node 0 is the root. */
typedef struct yard_trie {
    yard_pair_map next;  /* (node, byte) -> node */
    int32_t *string_idx; /* [n_nodes] index of the string that ends here, -1 */
    uint32_t n_nodes, max_nodes;
    bool starts[256]; /* bytes that begin a string: most positions fail here */
} yard_trie;

void yard_trie_free(yard_trie *trie);
bool yard_trie_add(yard_trie *trie, const char *bytes, size_t n_bytes, int32_t string_idx);
/* The longest string that begins at text; -1 when there is none. */
int32_t yard_trie_match(const yard_trie *trie, const char *text, size_t n_bytes, size_t *n_matched);

/* Characters of UTF-8. Returns the bytes that belong together at text (n_bytes > 0): a character
 * (*good true), or the longest part of a broken one, which decoders show as one U+FFFD (the
 * Unicode standard's "maximal subpart"). *incomplete: more bytes could complete it. */
size_t yard_utf8_step(const char *text, size_t n_bytes, bool *good, bool *incomplete);

/* regular expressions (tokenizer_regex.c) */

typedef struct yard_split {
    pcre2_code *code;
    bool jit;
} yard_split;

/* What one encode call needs to match on its thread. All zero is valid before use. */
typedef struct yard_matcher {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *jit_stack;
} yard_matcher;

/* pattern: a regular expression of the reference engine (Oniguruma, Ruby syntax), or a plain
 * string. where: file and member, for messages. */
yard_status yard_split_compile(yard_split *split, const char *where, const char *pattern,
                               size_t n_bytes, bool literal, yard_error *err);
void yard_split_free(yard_split *split);

yard_status yard_matcher_create(yard_matcher *matcher, yard_error *err);
void yard_matcher_free(yard_matcher *matcher);

/* The first match at or after *at; *found false when there is none. */
yard_status yard_split_find(const yard_split *split, yard_matcher *matcher, const char *text,
                            size_t n_bytes, size_t at, bool *found, size_t *start, size_t *end,
                            yard_error *err);

/* the tokenizer */

typedef struct yard_token {
    const char *bytes; /* NULL: no token has this id */
    uint32_t n_bytes;
    bool special;
} yard_token;

typedef struct yard_added_token {
    const char *text;
    uint32_t n_bytes;
    int32_t id;
    bool lstrip, rstrip, normalized, special;
} yard_added_token;

typedef struct yard_merge { /* the value of a merges entry */
    uint32_t rank;
    int32_t id;
} yard_merge;

/* When a space goes before a text, of tokenizers whose words begin with one. */
typedef enum yard_prepend {
    YARD_PREPEND_NEVER,
    YARD_PREPEND_ALWAYS,  /* before every stretch between added tokens, as the normalizer Prepend */
    YARD_PREPEND_MISSING, /* the same, where it does not begin with one: Metaspace "always" */
    YARD_PREPEND_FIRST    /* the same, at the very beginning only: Metaspace "first" */
} yard_prepend;

struct yard_tokenizer {
    char *pool; /* bytes of all tokens */
    yard_token *tokens;
    uint32_t vocab_size;

    yard_bytes_map by_bytes; /* tokens that text can become */
    yard_bytes_map by_added; /* added tokens, by their text */
    int32_t byte_ids[256];
    yard_pair_map merges; /* (id, id) -> yard_merge */
    bool ignore_merges;

    /* SentencePiece's way: text is merged from characters, and from bytes <0x00> to <0xFF> where
     * there is no token of a character; U+2581 in the file stands for a space, which is what
     * tokens and texts have here. The other way is byte-level: merged from bytes. */
    bool metaspace;
    bool prepend_is_normal; /* prepend belongs to the normalizer, not to the pre-tokenizer */
    yard_prepend prepend;
    uint32_t n_stripped; /* spaces that decoding takes off the beginning */

    yard_added_token *added;
    uint32_t n_added;
    yard_trie raw_added;        /* found in the text as it is given */
    yard_trie normalized_added; /* found after normalisation */

    int normalizers[YARD_MAX_NORMALIZERS]; /* options of utf8proc_map */
    uint32_t n_normalizers;
    yard_split splits[YARD_MAX_SPLITS]; /* applied in this order */
    uint32_t n_splits;
    uint32_t prefix_space_at; /* before this split, n_splits for after the last */
    bool add_prefix_space;

    char *chat_template, *bos_text, *eos_text;
    bool adds_bos;
};

static inline uint64_t yard_merge_pack(yard_merge merge)
{
    return (uint64_t)merge.rank << 32 | (uint32_t)merge.id;
}

static inline yard_merge yard_merge_unpack(uint64_t value)
{
    return (yard_merge){ (uint32_t)(value >> 32), (int32_t)(uint32_t)value };
}

/* text with U+2581 as spaces, into out (room for n_bytes); returns its length.
 * (tokenizer_metaspace.c) */
size_t yard_metaspace_to_spaces(const char *text, size_t n_bytes, char *out);
/* The same with the space that goes before it, malloc'd; first: text is the beginning of all.
 * false: no memory. */
bool yard_metaspace_prepare(const yard_tokenizer *tok, const char *text, size_t n_bytes, bool first,
                            char **out, size_t *n_out);

/* text normalised into *out (malloc'd), or *out NULL when it stays as it is. (tokenizer_bpe.c) */
yard_status yard_tokenizer_normalize(const yard_tokenizer *tok, const char *text, size_t n_bytes,
                                     char **out, size_t *n_out, yard_error *err);

#endif
