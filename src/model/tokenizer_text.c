/* Ids to text: all at once, and one by one with stop strings. */
#include <stdlib.h>

#include "model/tokenizer_impl.h"

uint32_t yard_tokenizer_vocab_size(const yard_tokenizer *tok)
{
    return tok->vocab_size;
}

const char *yard_tokenizer_token_bytes(const yard_tokenizer *tok, int32_t id, size_t *n_bytes)
{
    if (id < 0 || (uint32_t)id >= tok->vocab_size || !tok->tokens[id].bytes)
        return NULL;
    *n_bytes = tok->tokens[id].n_bytes;
    return tok->tokens[id].bytes;
}

bool yard_tokenizer_is_special(const yard_tokenizer *tok, int32_t id)
{
    return id >= 0 && (uint32_t)id < tok->vocab_size && tok->tokens[id].special;
}

int32_t yard_tokenizer_find(const yard_tokenizer *tok, const char *text, size_t n_bytes)
{
    const int32_t added = yard_bytes_map_find(&tok->by_added, text, n_bytes);

    return added >= 0 ? added : yard_bytes_map_find(&tok->by_bytes, text, n_bytes);
}

const char *yard_tokenizer_chat_template(const yard_tokenizer *tok)
{
    return tok->chat_template;
}

const char *yard_tokenizer_bos_text(const yard_tokenizer *tok)
{
    return tok->bos_text;
}

const char *yard_tokenizer_eos_text(const yard_tokenizer *tok)
{
    return tok->eos_text;
}

bool yard_tokenizer_adds_bos(const yard_tokenizer *tok)
{
    return tok->adds_bos;
}

static yard_status find_bytes(const yard_tokenizer *tok, int32_t id, bool skip_special,
                              const char **bytes, size_t *n_bytes, yard_error *err)
{
    *bytes = yard_tokenizer_token_bytes(tok, id, n_bytes);
    if (!*bytes)
        return yard_fail(err, YARD_EINVAL, "ids: want ids of the vocabulary (0 to %lld), got %d",
                         (long long)tok->vocab_size - 1, id);
    if (skip_special && tok->tokens[id].special)
        *n_bytes = 0;
    return YARD_OK;
}

static const char REPLACEMENT[] = "\xef\xbf\xbd";

enum {
    REPLACEMENT_BYTES = 3,
    MAX_CHARACTER_BYTES = 4,
};

/* Writes UTF-8 with U+FFFD for what is none; out has room for 3 * n_bytes. Unless `last`, what
 * could be the beginning of a character stays: *n_used says how much was read. */
static size_t to_utf8(char *out, const char *bytes, size_t n_bytes, bool last, size_t *n_used)
{
    size_t n_out = 0, i = 0;

    while (i < n_bytes) {
        bool good, incomplete;
        const size_t n = yard_utf8_step(bytes + i, n_bytes - i, &good, &incomplete);
        if (incomplete && !last)
            break;
        memcpy(out + n_out, good ? bytes + i : REPLACEMENT, good ? n : REPLACEMENT_BYTES);
        n_out += good ? n : REPLACEMENT_BYTES;
        i += n;
    }
    *n_used = i;
    return n_out;
}

yard_status yard_tokenizer_decode(const yard_tokenizer *tok, const int32_t *ids, size_t n_ids,
                                  bool skip_special, char **text, size_t *n_bytes, yard_error *err)
{
    size_t n_raw = 0, n = 0, n_stripped = 0, used;
    const char *bytes;
    char *raw, *out;

    for (size_t i = 0; i < n_ids; i++) {
        yard_status st = find_bytes(tok, ids[i], skip_special, &bytes, &n, err);
        if (st != YARD_OK)
            return st;
        n_raw += n;
    }
    raw = malloc(n_raw + 1);
    out = malloc(n_raw * REPLACEMENT_BYTES + 1);
    if (!raw || !out) {
        free(raw);
        free(out);
        return yard_fail(err, YARD_ENOMEM, "ids: no memory for %zu bytes of text", n_raw);
    }
    n_raw = 0;
    for (size_t i = 0; i < n_ids; i++) {
        (void)find_bytes(tok, ids[i], skip_special, &bytes, &n, NULL); /* checked above */
        memcpy(raw + n_raw, bytes, n);
        n_raw += n;
    }
    while (n_stripped < tok->n_stripped && n_stripped < n_raw && raw[n_stripped] == ' ')
        n_stripped++;
    *n_bytes = to_utf8(out, raw + n_stripped, n_raw - n_stripped, true, &used);
    out[*n_bytes] = '\0';
    *text = out;
    free(raw);
    return YARD_OK;
}

/* Aho and Corasick's automaton: after each byte, its node is the longest end of the text that
 * begins a stop string. That is exactly what has to be held back. */
typedef struct stop_node {
    uint32_t fallback; /* the node of the next shorter such end */
    uint32_t depth;    /* length of this one */
    uint32_t n_stop;   /* length of the longest stop string that ends here, 0 when none does */
} stop_node;

struct yard_text_stream {
    const yard_tokenizer *tok;
    bool skip_special, stopped;
    uint32_t n_stop; /* bytes of the stop string at text[shown], once stopped */

    char partial[MAX_CHARACTER_BYTES]; /* the beginning of a character */
    size_t n_partial;

    /* text[start..shown) went out with the last call, [shown..n_text) is held back */
    char *text;
    size_t start, shown, n_text, max_text;

    yard_pair_map next; /* (node, byte) -> node */
    stop_node *nodes;
    uint32_t n_nodes, node;
};

static yard_status add_stop(yard_text_stream *stream, const char *stop, size_t n_bytes,
                            yard_error *err)
{
    uint32_t node = 0;
    uint64_t next;

    for (size_t i = 0; i < n_bytes; i++) {
        const unsigned char byte = (unsigned char)stop[i];
        if (!yard_pair_map_get(&stream->next, node, byte, &next)) {
            next = stream->n_nodes;
            if (!yard_pair_map_put(&stream->next, node, byte, next))
                return yard_fail(err, YARD_ENOMEM, "stop strings: no memory");
            stream->nodes[next].depth = (uint32_t)i + 1;
            stream->n_nodes++;
        }
        node = (uint32_t)next;
    }
    stream->nodes[node].n_stop = (uint32_t)n_bytes;
    return YARD_OK;
}

static uint32_t step(const yard_text_stream *stream, uint32_t node, unsigned char byte)
{
    uint64_t next;

    while (!yard_pair_map_get(&stream->next, node, byte, &next)) {
        if (node == 0)
            return 0;
        node = stream->nodes[node].fallback;
    }
    return (uint32_t)next;
}

/* Walks along one stop string. */
typedef struct follower {
    const char *rest;
    uint32_t node;
} follower;

/* Fallbacks in order of depth, as each needs those of shorter ends: all stop strings are followed
 * at once, one byte at a time. */
static void link_stops(yard_text_stream *stream, follower *followers, uint32_t n_open)
{
    while (n_open > 0) {
        uint32_t n_left = 0;
        for (uint32_t i = 0; i < n_open; i++) {
            follower f = followers[i];
            const unsigned char byte = (unsigned char)*f.rest++;
            uint64_t next = 0;
            stop_node *node;

            yard_pair_map_get(&stream->next, f.node, byte, &next);
            node = &stream->nodes[next];
            node->fallback = f.node ? step(stream, stream->nodes[f.node].fallback, byte) : 0;
            if (!node->n_stop)
                node->n_stop = stream->nodes[node->fallback].n_stop;
            f.node = (uint32_t)next;
            if (*f.rest)
                followers[n_left++] = f;
        }
        n_open = n_left;
    }
}

static yard_status add_stops(yard_text_stream *stream, const char *const *stop, uint32_t n_stop,
                             yard_error *err)
{
    size_t n_nodes = 1;
    yard_status st = YARD_OK;
    follower *followers;

    for (uint32_t i = 0; i < n_stop; i++) {
        const size_t n = strlen(stop[i]);
        if (n == 0 || !yard_utf8_valid(stop[i], n, NULL))
            return yard_fail(err, YARD_EINVAL, "stop string %u: want text, got %s", i,
                             n ? "bytes that are not UTF-8" : "an empty one");
        n_nodes += n;
    }
    if (n_nodes >= UINT32_MAX)
        return yard_fail(err, YARD_EINVAL, "stop strings: want less than 4 GiB");
    stream->nodes = calloc(n_nodes, sizeof(*stream->nodes));
    followers = calloc((size_t)n_stop + 1, sizeof(*followers));
    if (!stream->nodes || !followers) {
        free(followers);
        return yard_fail(err, YARD_ENOMEM, "stop strings: no memory");
    }
    stream->n_nodes = 1;
    for (uint32_t i = 0; i < n_stop && st == YARD_OK; i++) {
        st = add_stop(stream, stop[i], strlen(stop[i]), err);
        followers[i].rest = stop[i];
    }
    if (st == YARD_OK)
        link_stops(stream, followers, n_stop);
    free(followers);
    return st;
}

yard_status yard_text_stream_create(yard_text_stream **out, const yard_tokenizer *tok,
                                    bool skip_special, const char *const *stop, uint32_t n_stop,
                                    yard_error *err)
{
    yard_text_stream *stream = calloc(1, sizeof(*stream));
    yard_status st;

    if (!stream)
        return yard_fail(err, YARD_ENOMEM, "text stream: no memory");
    stream->tok = tok;
    stream->skip_special = skip_special;
    st = add_stops(stream, stop, n_stop, err);
    if (st != YARD_OK) {
        yard_text_stream_destroy(stream);
        return st;
    }
    *out = stream;
    return YARD_OK;
}

void yard_text_stream_destroy(yard_text_stream *stream)
{
    if (!stream)
        return;
    free(stream->text);
    free(stream->nodes);
    yard_pair_map_free(&stream->next);
    free(stream);
}

/* Forgets what was shown and makes room for n_bytes more. */
static bool make_room(yard_text_stream *stream, size_t n_bytes)
{
    const size_t n_held = stream->n_text - stream->shown;

    stream->start = stream->shown;
    if (stream->max_text > 0 && stream->max_text - stream->n_text >= n_bytes)
        return true;
    /* Moving only when the text shown is as long as the text moved keeps the whole linear, also
     * with a long stop string that holds much back. */
    if (stream->max_text == 0 || stream->start < n_held || stream->max_text - n_held < n_bytes) {
        const size_t max_text = (n_held + n_bytes) * 2 + 64;
        char *larger = malloc(max_text);
        if (!larger)
            return false;
        if (n_held > 0)
            memcpy(larger, stream->text + stream->start, n_held);
        free(stream->text);
        stream->text = larger;
        stream->max_text = max_text;
    } else {
        memmove(stream->text, stream->text + stream->start, n_held);
    }
    stream->start = stream->shown = 0;
    stream->n_text = n_held;
    return true;
}

/* Runs the automaton over the text from `from` on; decides what is shown. */
static void watch_stops(yard_text_stream *stream, size_t from)
{
    for (size_t i = from; i < stream->n_text; i++) {
        const stop_node *node;
        stream->node = step(stream, stream->node, (unsigned char)stream->text[i]);
        node = &stream->nodes[stream->node];
        if (node->n_stop) {
            stream->stopped = true;
            stream->n_stop = node->n_stop;
            stream->shown = i + 1 - node->n_stop;
            stream->n_text = stream->shown;
            stream->node = 0; /* nothing is held back any more */
            return;
        }
    }
    stream->shown = stream->n_text - stream->nodes[stream->node].depth;
}

/* Adds bytes; `last`: no more will follow. */
static yard_status add_bytes(yard_text_stream *stream, const char *bytes, size_t n_bytes, bool last,
                             yard_error *err)
{
    /* The character begun earlier can end within these bytes. */
    char joined[2 * MAX_CHARACTER_BYTES];
    const size_t n_taken = n_bytes < MAX_CHARACTER_BYTES ? n_bytes : MAX_CHARACTER_BYTES;
    const size_t n_partial = stream->n_partial, from = stream->n_text - stream->shown;
    size_t n_used = 0, skip = 0;

    if (!make_room(stream, (n_partial + n_bytes) * REPLACEMENT_BYTES))
        return yard_fail(err, YARD_ENOMEM, "text stream: no memory");
    if (n_partial > 0) {
        memcpy(joined, stream->partial, n_partial);
        if (n_taken > 0)
            memcpy(joined + n_partial, bytes, n_taken);
        stream->n_text += to_utf8(stream->text + stream->n_text, joined, n_partial + n_taken,
                                  last && n_taken == n_bytes, &n_used);
        if (n_used < n_partial) { /* still the beginning of one character */
            stream->n_partial = n_partial + n_taken;
            memcpy(stream->partial, joined, stream->n_partial);
            return YARD_OK;
        }
        skip = n_used - n_partial;
    }
    stream->n_text +=
        to_utf8(stream->text + stream->n_text, bytes + skip, n_bytes - skip, last, &n_used);
    stream->n_partial = n_bytes - skip - n_used;
    if (stream->n_partial > 0)
        memcpy(stream->partial, bytes + skip + n_used, stream->n_partial);
    watch_stops(stream, stream->start + from);
    return YARD_OK;
}

yard_status yard_text_stream_push(yard_text_stream *stream, int32_t id, const char **text,
                                  size_t *n_bytes, bool *stopped, yard_error *err)
{
    const char *bytes;
    size_t n = 0;
    yard_status st = find_bytes(stream->tok, id, stream->skip_special, &bytes, &n, err);

    if (st != YARD_OK)
        return st;
    return yard_text_stream_push_text(stream, bytes, n, text, n_bytes, stopped, err);
}

yard_status yard_text_stream_push_text(yard_text_stream *stream, const char *bytes, size_t n_pushed,
                                       const char **text, size_t *n_bytes, bool *stopped,
                                       yard_error *err)
{
    yard_status st = add_bytes(stream, bytes, stream->stopped ? 0 : n_pushed, false, err);

    if (st != YARD_OK)
        return st;
    *text = stream->text + stream->start;
    *n_bytes = stream->shown - stream->start;
    *stopped = stream->stopped;
    return YARD_OK;
}

const char *yard_text_stream_stop(const yard_text_stream *stream, size_t *n_bytes)
{
    *n_bytes = stream->n_stop;
    return stream->stopped ? stream->text + stream->shown : NULL;
}

yard_status yard_text_stream_finish(yard_text_stream *stream, const char **text, size_t *n_bytes,
                                    yard_error *err)
{
    yard_status st;

    if (stream->stopped)
        stream->n_partial = 0; /* belongs to what follows the stop string */
    st = add_bytes(stream, "", 0, true, err);
    if (st != YARD_OK)
        return st;
    stream->shown = stream->n_text;
    *text = stream->text + stream->start;
    *n_bytes = stream->shown - stream->start;
    return YARD_OK;
}
