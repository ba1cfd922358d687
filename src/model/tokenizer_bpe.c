/* Text to ids: added tokens, normalisation, pieces, merges. */
#include <stdlib.h>

#include <utf8proc.h>

#include "model/tokenizer_impl.h"

/* One symbol of the piece being merged. */
typedef struct symbol {
    int32_t id; /* -1: merged into its left neighbour */
    uint32_t previous, next;
} symbol;

enum { NO_SYMBOL = UINT32_MAX };

/* A merge that may be done: left symbol, and the rank and result that the pair had when it was
 * queued. It is stale when the pair's result has changed since. */
typedef struct candidate {
    uint32_t rank, at;
    int32_t id;
} candidate;

typedef struct encoder {
    const yard_tokenizer *tok;
    bool added_tokens;
    yard_error *err;
    yard_matcher matcher;
    const char *beginning; /* of the text; Metaspace's texts have no normalizer */

    int32_t *ids;
    size_t n_ids, max_ids;

    symbol *symbols;
    size_t max_symbols;
    candidate *heap;
    size_t n_heap, max_heap;
} encoder;

static yard_status no_memory(encoder *e)
{
    return yard_fail(e->err, YARD_ENOMEM, "tokenizer: no memory to encode");
}

/* Room for n items of *array, doubling. */
static bool reserve(void **array, size_t *max, size_t n, size_t item_bytes)
{
    size_t larger = *max ? *max : 64;
    void *moved;

    if (n <= *max)
        return true;
    while (larger < n)
        larger *= 2;
    moved = realloc(*array, larger * item_bytes);
    if (!moved)
        return false;
    *array = moved;
    *max = larger;
    return true;
}

static yard_status push_id(encoder *e, int32_t id)
{
    if (!reserve((void **)&e->ids, &e->max_ids, e->n_ids + 1, sizeof(*e->ids)))
        return no_memory(e);
    e->ids[e->n_ids++] = id;
    return YARD_OK;
}

static bool before(candidate a, candidate b)
{
    return a.rank != b.rank ? a.rank < b.rank : a.at < b.at;
}

static bool heap_push(encoder *e, candidate c)
{
    size_t i = e->n_heap;

    if (!reserve((void **)&e->heap, &e->max_heap, i + 1, sizeof(*e->heap)))
        return false;
    e->n_heap++;
    for (; i > 0 && before(c, e->heap[(i - 1) / 2]); i = (i - 1) / 2)
        e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = c;
    return true;
}

static candidate heap_pop(encoder *e)
{
    const candidate top = e->heap[0], last = e->heap[--e->n_heap];
    size_t i = 0;

    for (size_t child; (child = 2 * i + 1) < e->n_heap; i = child) {
        if (child + 1 < e->n_heap && before(e->heap[child + 1], e->heap[child]))
            child++;
        if (!before(e->heap[child], last))
            break;
        e->heap[i] = e->heap[child];
    }
    e->heap[i] = last;
    return top;
}

static bool find_merge(const encoder *e, uint32_t left, yard_merge *merge)
{
    const symbol *symbols = e->symbols;
    uint64_t value;

    if (left == NO_SYMBOL || symbols[left].next == NO_SYMBOL ||
        !yard_pair_map_get(&e->tok->merges, (uint32_t)symbols[left].id,
                           (uint32_t)symbols[symbols[left].next].id, &value))
        return false;
    *merge = yard_merge_unpack(value);
    return true;
}

static bool queue_merge(encoder *e, uint32_t left)
{
    yard_merge merge;

    if (!find_merge(e, left, &merge))
        return true;
    return heap_push(e, (candidate){ merge.rank, left, merge.id });
}

/* Joins a symbol with its right neighbour. */
static void merge_symbols(encoder *e, uint32_t left, int32_t id)
{
    symbol *symbols = e->symbols;
    const uint32_t right = symbols[left].next;

    symbols[left].id = id;
    symbols[left].next = symbols[right].next;
    if (symbols[right].next != NO_SYMBOL)
        symbols[symbols[right].next].previous = left;
    symbols[right].id = -1;
}

/* A token for each character, or for each of its bytes. Returns how many. */
static uint32_t start_characters(encoder *e, const char *piece, size_t n_bytes)
{
    uint32_t n = 0;

    for (size_t i = 0; i < n_bytes;) {
        bool good, incomplete;
        const size_t step = yard_utf8_step(piece + i, n_bytes - i, &good, &incomplete);
        const int32_t id = yard_bytes_map_find(&e->tok->by_bytes, piece + i, step);

        if (id >= 0)
            e->symbols[n++].id = id;
        for (size_t k = 0; k < step && id < 0; k++)
            e->symbols[n++].id = e->tok->byte_ids[(unsigned char)piece[i + k]];
        i += step;
    }
    return n;
}

static uint32_t start_bytes(encoder *e, const char *piece, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        e->symbols[i].id = e->tok->byte_ids[(unsigned char)piece[i]];
    return (uint32_t)n_bytes;
}

/* The merge of lowest rank first, leftmost among equals. A heap and a linked list, because a piece
 * can be the whole text: n log n where repeated scanning would be quadratic. */
static yard_status encode_piece(encoder *e, const char *piece, size_t n_bytes)
{
    const int32_t whole =
        e->tok->ignore_merges ? yard_bytes_map_find(&e->tok->by_bytes, piece, n_bytes) : -1;
    uint32_t n;

    if (whole >= 0)
        return push_id(e, whole);
    if (n_bytes >= NO_SYMBOL ||
        !reserve((void **)&e->symbols, &e->max_symbols, n_bytes, sizeof(*e->symbols)))
        return no_memory(e);
    n = e->tok->metaspace ? start_characters(e, piece, n_bytes) : start_bytes(e, piece, n_bytes);
    for (uint32_t i = 0; i < n; i++) {
        e->symbols[i].previous = i - 1;
        e->symbols[i].next = i + 1 < n ? i + 1 : NO_SYMBOL;
    }
    e->n_heap = 0;
    for (uint32_t i = 0; i < n; i++)
        if (!queue_merge(e, i))
            return no_memory(e);
    while (e->n_heap > 0) {
        const candidate c = heap_pop(e);
        yard_merge merge;
        if (e->symbols[c.at].id < 0 || !find_merge(e, c.at, &merge) || merge.id != c.id)
            continue;
        merge_symbols(e, c.at, c.id);
        if (!queue_merge(e, e->symbols[c.at].previous) || !queue_merge(e, c.at))
            return no_memory(e);
    }
    for (uint32_t i = 0; i != NO_SYMBOL; i = e->symbols[i].next)
        if (push_id(e, e->symbols[i].id) != YARD_OK)
            return YARD_ENOMEM;
    return YARD_OK;
}

static yard_status encode_splits(encoder *e, const char *text, size_t n_bytes, uint32_t split_idx);

static yard_status encode_after_space(encoder *e, const char *text, size_t n_bytes)
{
    char *spaced = malloc(n_bytes + 1);
    yard_status st;

    if (!spaced)
        return no_memory(e);
    spaced[0] = ' ';
    memcpy(spaced + 1, text, n_bytes);
    st = e->tok->prefix_space_at < e->tok->n_splits
             ? encode_splits(e, spaced, n_bytes + 1, e->tok->prefix_space_at)
             : encode_piece(e, spaced, n_bytes + 1);
    free(spaced);
    return st;
}

/* Cuts text at the matches of one split, then at those of the next: matches and the gaps between
 * them are pieces alike. A match of no bytes cuts too, except right after another match. */
static yard_status encode_at_matches(encoder *e, const char *text, size_t n_bytes,
                                     uint32_t split_idx)
{
    size_t piece = 0, at = 0, last_end = SIZE_MAX;
    yard_status st = YARD_OK;

    while (st == YARD_OK && at <= n_bytes) {
        bool found, good, incomplete;
        size_t start, end;
        st = yard_split_find(&e->tok->splits[split_idx], &e->matcher, text, n_bytes, at, &found,
                             &start, &end, e->err);
        if (st != YARD_OK || !found)
            break;
        if (start == end && end == last_end) {
            at = end < n_bytes ? end + yard_utf8_step(text + end, n_bytes - end, &good, &incomplete)
                               : n_bytes + 1;
            continue;
        }
        at = last_end = end;
        if (start > piece)
            st = encode_splits(e, text + piece, start - piece, split_idx + 1);
        if (st == YARD_OK && end > start)
            st = encode_splits(e, text + start, end - start, split_idx + 1);
        piece = end;
    }
    if (st == YARD_OK && n_bytes > piece)
        st = encode_splits(e, text + piece, n_bytes - piece, split_idx + 1);
    return st;
}

static yard_status encode_splits(encoder *e, const char *text, size_t n_bytes, uint32_t split_idx)
{
    if (e->tok->add_prefix_space && split_idx == e->tok->prefix_space_at && text[0] != ' ')
        return encode_after_space(e, text, n_bytes);
    if (split_idx == e->tok->n_splits)
        return encode_piece(e, text, n_bytes);
    return encode_at_matches(e, text, n_bytes, split_idx);
}

/* Bytes of the white space character that begins at text, 0 when none does. */
static size_t space_bytes(const char *text, size_t n_bytes)
{
    const unsigned char *s = (const unsigned char *)text;

    if (n_bytes == 0)
        return 0;
    if (s[0] == ' ' || (s[0] >= 0x09 && s[0] <= 0x0d))
        return 1;
    if (n_bytes >= 2 && s[0] == 0xc2 && (s[1] == 0x85 || s[1] == 0xa0))
        return 2;
    if (n_bytes < 3)
        return 0;
    if ((s[0] == 0xe1 && s[1] == 0x9a && s[2] == 0x80) || /* U+1680 */
        (s[0] == 0xe2 && s[1] == 0x80 &&
         (s[2] <= 0x8a || s[2] == 0xa8 || s[2] == 0xa9 || s[2] == 0xaf)) || /* U+2000.. U+202F */
        (s[0] == 0xe2 && s[1] == 0x81 && s[2] == 0x9f) ||                   /* U+205F */
        (s[0] == 0xe3 && s[1] == 0x80 && s[2] == 0x80))                     /* U+3000 */
        return 3;
    return 0;
}

static size_t skip_space(const char *text, size_t n_bytes, size_t at)
{
    for (size_t n; (n = space_bytes(text + at, n_bytes - at)) > 0;)
        at += n;
    return at;
}

/* Where the white space that ends at `at` begins. */
static size_t space_before(const char *text, size_t at)
{
    while (at > 0) {
        size_t start = at - 1;
        while (start > 0 && ((unsigned char)text[start] & 0xc0) == 0x80)
            start--;
        if (space_bytes(text + start, at - start) != at - start)
            break;
        at = start;
    }
    return at;
}

typedef yard_status (*encode_gap)(encoder *e, const char *text, size_t n_bytes);

/* Ids of the strings of one trie, leftmost-longest, and of the gaps between them. */
static yard_status encode_added(encoder *e, const yard_trie *trie, const char *text, size_t n_bytes,
                                encode_gap gap)
{
    size_t done = 0, at = 0, n_matched = 0;
    yard_status st = YARD_OK;

    while (st == YARD_OK && at < n_bytes) {
        const int32_t idx = yard_trie_match(trie, text + at, n_bytes - at, &n_matched);
        const yard_added_token *added;
        size_t start, end;

        if (idx < 0) {
            at++;
            continue;
        }
        added = &e->tok->added[idx];
        start = added->lstrip ? space_before(text, at) : at;
        end = at + n_matched;
        at = end; /* the search goes on after the token itself, not after stripped space */
        if (added->rstrip)
            end = skip_space(text, n_bytes, end);
        if (start > done)
            st = gap(e, text + done, start - done);
        if (st == YARD_OK)
            st = push_id(e, added->id);
        done = end;
    }
    if (st == YARD_OK && n_bytes > done)
        st = gap(e, text + done, n_bytes - done);
    return st;
}

static yard_status encode_ordinary(encoder *e, const char *text, size_t n_bytes)
{
    char *spaced;
    yard_status st;

    if (!e->tok->metaspace || e->tok->prepend_is_normal)
        return encode_splits(e, text, n_bytes, 0);
    if (!yard_metaspace_prepare(e->tok, text, n_bytes, text == e->beginning, &spaced, &n_bytes))
        return no_memory(e);
    st = encode_piece(e, spaced, n_bytes);
    free(spaced);
    return st;
}

static bool is_ascii(const char *text, size_t n_bytes)
{
    unsigned char any = 0;

    for (size_t i = 0; i < n_bytes; i++)
        any |= (unsigned char)text[i];
    return any < 0x80;
}

yard_status yard_tokenizer_normalize(const yard_tokenizer *tok, const char *text, size_t n_bytes,
                                     char **out, size_t *n_out, yard_error *err)
{
    *out = NULL;
    if (tok->prepend_is_normal)
        return yard_metaspace_prepare(tok, text, n_bytes, true, out, n_out)
                   ? YARD_OK
                   : yard_fail(err, YARD_ENOMEM, "tokenizer: no memory to normalise");
    if (is_ascii(text, n_bytes)) /* no normal form changes ASCII */
        return YARD_OK;
    for (uint32_t i = 0; i < tok->n_normalizers; i++) {
        utf8proc_uint8_t *mapped = NULL;
        const utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)(*out ? *out : text),
                                                (utf8proc_ssize_t)(*out ? *n_out : n_bytes),
                                                &mapped, (utf8proc_option_t)tok->normalizers[i]);
        free(*out);
        *out = NULL;
        if (n < 0)
            return yard_fail(err, n == UTF8PROC_ERROR_NOMEM ? YARD_ENOMEM : YARD_EFORMAT,
                             "tokenizer: cannot normalise: %s", utf8proc_errmsg(n));
        *out = (char *)mapped;
        *n_out = (size_t)n;
    }
    return YARD_OK;
}

static yard_status encode_raw(encoder *e, const char *text, size_t n_bytes)
{
    char *normalized;
    size_t n_normalized = 0;
    yard_status st =
        yard_tokenizer_normalize(e->tok, text, n_bytes, &normalized, &n_normalized, e->err);

    if (st != YARD_OK)
        return st;
    if (normalized) {
        text = normalized;
        n_bytes = n_normalized;
    }
    if (e->added_tokens)
        st = encode_added(e, &e->tok->normalized_added, text, n_bytes, encode_ordinary);
    else if (n_bytes > 0)
        st = encode_ordinary(e, text, n_bytes);
    free(normalized);
    return st;
}

yard_status yard_tokenizer_encode(const yard_tokenizer *tok, const char *text, size_t n_bytes,
                                  bool added_tokens, int32_t **ids, size_t *n_ids, yard_error *err)
{
    encoder e = { .tok = tok, .added_tokens = added_tokens, .err = err, .beginning = text };
    size_t bad_at;
    yard_status st;

    if (!yard_utf8_valid(text, n_bytes, &bad_at))
        return yard_fail(err, YARD_EFORMAT, "text: want UTF-8, got byte 0x%02x at offset %zu",
                         (unsigned char)text[bad_at], bad_at);
    st = yard_matcher_create(&e.matcher, err);
    /* never NULL, also for no text */
    if (st == YARD_OK && !reserve((void **)&e.ids, &e.max_ids, n_bytes / 4 + 1, sizeof(*e.ids)))
        st = no_memory(&e);
    if (st == YARD_OK)
        st = added_tokens ? encode_added(&e, &tok->raw_added, text, n_bytes, encode_raw)
                          : encode_raw(&e, text, n_bytes);
    yard_matcher_free(&e.matcher);
    free(e.symbols);
    free(e.heap);
    if (st != YARD_OK) {
        free(e.ids);
        return st;
    }
    *ids = e.ids;
    *n_ids = e.n_ids;
    return YARD_OK;
}
