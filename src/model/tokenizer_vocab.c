/* The BPE model and the added tokens of tokenizer.json. */
#include <stdio.h>
#include <stdlib.h>

#include "model/tokenizer_load.h"

static bool is_printable_latin1(int byte)
{
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

static void build_alphabet(yard_tokenizer_loader *l)
{
    int next = 256;

    memset(l->alphabet, 0xff, sizeof(l->alphabet));
    for (int byte = 0; byte < 256; byte++)
        l->alphabet[is_printable_latin1(byte) ? byte : next++] = (int16_t)byte;
}

/* The bytes that a string in the byte alphabet stands for; false when it is not in it. The result
 * is never longer than the string. */
static bool from_alphabet(const yard_tokenizer_loader *l, const char *text, size_t n_bytes,
                          char *out, size_t *n_out)
{
    size_t n = 0;

    for (size_t i = 0; i < n_bytes; i++) {
        uint32_t c = (unsigned char)text[i];
        if (c >= 0xc0 && c < 0xe0 && i + 1 < n_bytes)
            c = (c & 0x1f) << 6 | ((unsigned char)text[++i] & 0x3f);
        else if (c >= 0x80)
            return false;
        if (c >= YARD_ALPHABET_SIZE || l->alphabet[c] < 0)
            return false;
        out[n++] = (char)l->alphabet[c];
    }
    *n_out = n;
    return true;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* The byte that "<0x0A>" names, -1 for other names. */
static int byte_name(const char *name, size_t n_bytes)
{
    if (n_bytes != 6 || memcmp(name, "<0x", 3) != 0 || name[5] != '>' || hex_digit(name[3]) < 0 ||
        hex_digit(name[4]) < 0)
        return -1;
    return hex_digit(name[3]) * 16 + hex_digit(name[4]);
}

/* The text that merges into a token of this name; false: none does. The result is never longer than
 * the name. */
static bool text_of_name(const yard_tokenizer_loader *l, const char *name, size_t n_bytes,
                         char *out, size_t *n_out)
{
    if (!l->tok->metaspace)
        return from_alphabet(l, name, n_bytes, out, n_out);
    if (byte_name(name, n_bytes) >= 0 || memchr(name, ' ', n_bytes))
        return false;
    *n_out = yard_metaspace_to_spaces(name, n_bytes, out);
    return true;
}

static yard_status read_id(yard_tokenizer_loader *l, const char *field, const char *name,
                           const json_t *value, int32_t *id)
{
    const json_int_t number = json_integer_value(value);

    if (!json_is_integer(value))
        return yard_fail(l->err, YARD_EFORMAT, "%s: %s '%.*s': want an id, got %s", l->file, field,
                         YARD_MAX_NAME_BYTES, name, yard_json_kind(value));
    if (number < 0 || number > YARD_MAX_TOKEN_ID)
        return yard_fail(l->err, YARD_EFORMAT,
                         "%s: %s '%.*s': want an id from 0 to %d, got %" JSON_INTEGER_FORMAT,
                         l->file, field, YARD_MAX_NAME_BYTES, name, YARD_MAX_TOKEN_ID, number);
    *id = (int32_t)number;
    return YARD_OK;
}

/* Checks all ids and makes the tables large enough for vocabulary and added tokens. */
static yard_status size_tables(yard_tokenizer_loader *l, const json_t *added)
{
    yard_tokenizer *tok = l->tok;
    const size_t n_added = json_array_size(added);
    size_t n_pool = 1, idx;
    int32_t id = 0, max_id = -1;
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)l->vocab, name, value)
    {
        if (read_id(l, "model.vocab", name, value, &id) != YARD_OK)
            return YARD_EFORMAT;
        max_id = id > max_id ? id : max_id;
        n_pool += strlen(name);
    }
    json_array_foreach(added, idx, value)
    {
        const json_t *content = json_object_get(value, "content");
        if (!json_is_string(content) || json_string_length(content) == 0)
            return yard_fail(l->err, YARD_EFORMAT,
                             "%s: added_tokens[%zu].content: want text, got %s", l->file, idx,
                             json_is_string(content) ? "an empty string" : yard_json_kind(content));
        if (read_id(l, "added_tokens", json_string_value(content), json_object_get(value, "id"),
                    &id) != YARD_OK)
            return YARD_EFORMAT;
        max_id = id > max_id ? id : max_id;
        n_pool += json_string_length(content);
    }
    tok->vocab_size = (uint32_t)(max_id + 1);
    tok->pool = malloc(n_pool);
    tok->tokens = calloc((size_t)tok->vocab_size + 1, sizeof(*tok->tokens));
    tok->added = calloc(n_added + 1, sizeof(*tok->added));
    if (!tok->pool || !tok->tokens || !tok->added ||
        !yard_bytes_map_create(&tok->by_bytes, json_object_size(l->vocab)) ||
        !yard_bytes_map_create(&tok->by_added, n_added))
        return yard_loader_no_memory(l);
    return YARD_OK;
}

static yard_status read_vocab(yard_tokenizer_loader *l)
{
    yard_tokenizer *tok = l->tok;
    const char *name;
    json_t *value;

    memset(tok->byte_ids, 0xff, sizeof(tok->byte_ids));
    json_object_foreach((json_t *)l->vocab, name, value)
    {
        const size_t n_name = strlen(name);
        char *bytes = tok->pool + l->n_pool;
        yard_token *token = &tok->tokens[json_integer_value(value)];
        size_t n_bytes = n_name;

        if (token->bytes)
            return yard_fail(
                l->err, YARD_EFORMAT,
                "%s: model.vocab '%.*s': want an id of its own, got %" JSON_INTEGER_FORMAT
                ", which another token has",
                l->file, YARD_MAX_NAME_BYTES, name, json_integer_value(value));
        if (text_of_name(l, name, n_name, bytes, &n_bytes)) {
            yard_bytes_map_add(&tok->by_bytes, bytes, (uint32_t)n_bytes,
                               (int32_t)json_integer_value(value));
        } else if (tok->metaspace && byte_name(name, n_name) >= 0) {
            bytes[0] = (char)byte_name(name, n_name);
            n_bytes = 1;
            tok->byte_ids[byte_name(name, n_name)] = (int32_t)json_integer_value(value);
        } else { /* an added token, or one that no text becomes */
            memcpy(bytes, name, n_name);
        }
        l->n_pool += n_bytes;
        *token = (yard_token){ .bytes = bytes, .n_bytes = (uint32_t)n_bytes };
    }
    for (int byte = 0; byte < 256; byte++) {
        const char c = (char)byte;
        if (!tok->metaspace)
            tok->byte_ids[byte] = yard_bytes_map_find(&tok->by_bytes, &c, 1);
        if (tok->byte_ids[byte] < 0)
            return yard_fail(l->err, YARD_ENOTSUP,
                             "%s: model.vocab: want a token for each of the 256 bytes, got none "
                             "for 0x%02x",
                             l->file, byte);
    }
    return YARD_OK;
}

/* The two sides of a merge, "a b" or ["a", "b"]. */
static bool merge_sides(const json_t *merge, const char *side[2], size_t n_side[2])
{
    if (json_is_array(merge) && json_array_size(merge) == 2) {
        for (size_t i = 0; i < 2; i++) {
            side[i] = json_string_value(json_array_get(merge, i));
            n_side[i] = json_string_length(json_array_get(merge, i));
        }
        return side[0] && side[1];
    }
    side[0] = json_string_value(merge);
    if (!side[0])
        return false;
    side[1] = memchr(side[0], ' ', json_string_length(merge));
    if (!side[1])
        return false;
    n_side[0] = (size_t)(side[1]++ - side[0]);
    n_side[1] = json_string_length(merge) - n_side[0] - 1;
    return !memchr(side[1], ' ', n_side[1]);
}

static yard_status unknown_token(yard_tokenizer_loader *l, size_t rank, const char *text,
                                 size_t n_bytes)
{
    return yard_fail(l->err, YARD_EFORMAT,
                     "%s: model.merges[%zu]: want tokens of model.vocab, got '%.*s'", l->file, rank,
                     (int)(n_bytes < YARD_MAX_NAME_BYTES ? n_bytes : YARD_MAX_NAME_BYTES), text);
}

/* joined: room for both sides. */
static yard_status read_merge(yard_tokenizer_loader *l, const json_t *merge, size_t rank,
                              char *joined)
{
    const yard_bytes_map *map = &l->tok->by_bytes;
    const char *side[2];
    size_t n_side[2], n_bytes[2];
    int32_t id[3];

    if (!merge_sides(merge, side, n_side))
        return yard_fail(l->err, YARD_EFORMAT,
                         "%s: model.merges[%zu]: want \"a b\" or [\"a\", \"b\"], got %s", l->file,
                         rank, json_is_string(merge) ? "another string" : yard_json_kind(merge));
    for (size_t i = 0; i < 2; i++)
        if (!json_object_getn(l->vocab, side[i], n_side[i]))
            return unknown_token(l, rank, side[i], n_side[i]);
    memcpy(joined, side[0], n_side[0]);
    memcpy(joined + n_side[0], side[1], n_side[1]);
    if (!json_object_getn(l->vocab, joined, n_side[0] + n_side[1]))
        return unknown_token(l, rank, joined, n_side[0] + n_side[1]);
    /* A side that no text becomes is a pair that no text has. */
    if (!text_of_name(l, side[0], n_side[0], joined, &n_bytes[0]) ||
        !text_of_name(l, side[1], n_side[1], joined + n_bytes[0], &n_bytes[1]))
        return YARD_OK;
    id[0] = yard_bytes_map_find(map, joined, n_bytes[0]);
    id[1] = yard_bytes_map_find(map, joined + n_bytes[0], n_bytes[1]);
    id[2] = yard_bytes_map_find(map, joined, n_bytes[0] + n_bytes[1]);
    /* A pair named twice has its last rank, as in the reference. */
    if (!yard_pair_map_put(&l->tok->merges, (uint32_t)id[0], (uint32_t)id[1],
                           yard_merge_pack((yard_merge){ (uint32_t)rank, id[2] })))
        return yard_loader_no_memory(l);
    return YARD_OK;
}

static yard_status read_merges(yard_tokenizer_loader *l, const json_t *merges)
{
    yard_status st = YARD_OK;
    size_t rank, n_longest = 0;
    const json_t *merge;
    char *joined;

    if (!json_is_array(merges))
        return yard_loader_want(l, "model.merges", "an array", merges);
    json_array_foreach(merges, rank, merge)
    {
        const char *side[2];
        size_t n_side[2];
        if (merge_sides(merge, side, n_side) && n_side[0] + n_side[1] > n_longest)
            n_longest = n_side[0] + n_side[1];
    }
    joined = malloc(n_longest + 1);
    if (!joined)
        return yard_loader_no_memory(l);
    json_array_foreach(merges, rank, merge)
    {
        st = read_merge(l, merge, rank, joined);
        if (st != YARD_OK)
            break;
    }
    free(joined);
    return st;
}

/* Members that change what the model does and are not implemented must be off. */
static yard_status check_model(yard_tokenizer_loader *l, const json_t *model)
{
    static const char *const off[] = { "dropout", "continuing_subword_prefix", "end_of_word_suffix",
                                       "unk_token" };
    const size_t n_off = sizeof(off) / sizeof(off[0]);
    const json_t *type = json_object_get(model, "type");

    if (!json_is_object(model))
        return yard_loader_want(l, "model", "an object", model);
    if (type && !json_is_string(type))
        return yard_loader_want(l, "model.type", "a string", type);
    if (type && strcmp(json_string_value(type), "BPE"))
        return yard_loader_refuse(l, "model.type", json_string_value(type));
    if (!yard_json_absent(json_object_get(model, "byte_fallback")) &&
        yard_loader_bool(l, "model", model, "byte_fallback", &l->tok->metaspace) != YARD_OK)
        return YARD_EFORMAT;
    /* Where every byte has a token nothing is unknown. */
    for (size_t i = 0; i < (l->tok->metaspace ? n_off - 1 : n_off); i++) {
        const json_t *value = json_object_get(model, off[i]);
        const bool empty = json_is_string(value) && json_string_length(value) == 0;
        if (!yard_json_absent(value) && !json_is_false(value) && !empty)
            return yard_fail(l->err, YARD_ENOTSUP,
                             "%s: model.%s: want null or false, got %s: not implemented", l->file,
                             off[i], yard_json_kind(value));
    }
    return yard_loader_bool(l, "model", model, "ignore_merges", &l->tok->ignore_merges);
}

static yard_status read_added_token(yard_tokenizer_loader *l, const json_t *entry, size_t idx)
{
    yard_tokenizer *tok = l->tok;
    const json_t *content = json_object_get(entry, "content");
    const char *text = json_string_value(content);
    const size_t n_bytes = json_string_length(content);
    yard_added_token added = { .id = (int32_t)json_integer_value(json_object_get(entry, "id")),
                               .normalized = true,
                               .n_bytes = (uint32_t)n_bytes };
    const json_t *in_vocab = json_object_getn(l->vocab, text, n_bytes);
    bool single_word = false;
    char field[48];

    snprintf(field, sizeof(field), "added_tokens[%zu]", idx);
    if (yard_loader_bool(l, field, entry, "single_word", &single_word) != YARD_OK ||
        yard_loader_bool(l, field, entry, "lstrip", &added.lstrip) != YARD_OK ||
        yard_loader_bool(l, field, entry, "rstrip", &added.rstrip) != YARD_OK ||
        yard_loader_bool(l, field, entry, "normalized", &added.normalized) != YARD_OK ||
        yard_loader_bool(l, field, entry, "special", &added.special) != YARD_OK)
        return YARD_EFORMAT;
    if (single_word)
        return yard_fail(l->err, YARD_ENOTSUP,
                         "%s: %s.single_word: want false, got true: not implemented", l->file,
                         field);
    if (in_vocab ? json_integer_value(in_vocab) != added.id : tok->tokens[added.id].bytes != NULL)
        return yard_fail(l->err, YARD_EFORMAT,
                         "%s: %s '%.*s': want the id of model.vocab or an unused one, got %d",
                         l->file, field, YARD_MAX_NAME_BYTES, text, added.id);
    added.text = memcpy(tok->pool + l->n_pool, text, n_bytes);
    l->n_pool += n_bytes;
    if (!yard_bytes_map_add(&tok->by_added, added.text, added.n_bytes, added.id))
        return yard_fail(l->err, YARD_EFORMAT, "%s: %s '%.*s': want each token once, got it twice",
                         l->file, field, YARD_MAX_NAME_BYTES, text);
    tok->tokens[added.id] = (yard_token){ added.text, added.n_bytes, added.special };
    tok->added[tok->n_added++] = added;
    return YARD_OK;
}

/* Tokens marked "normalized" are looked for, in normalised form, in the normalised text. */
static yard_status build_tries(yard_tokenizer_loader *l)
{
    yard_tokenizer *tok = l->tok;

    for (uint32_t i = 0; i < tok->n_added; i++) {
        const yard_added_token *added = &tok->added[i];
        char *normalized = NULL;
        size_t n_bytes = added->n_bytes;
        yard_status st = YARD_OK;
        bool ok;

        if (added->normalized)
            st = yard_tokenizer_normalize(tok, added->text, added->n_bytes, &normalized, &n_bytes,
                                          l->err);
        if (st != YARD_OK)
            return st;
        ok = yard_trie_add(added->normalized ? &tok->normalized_added : &tok->raw_added,
                           normalized ? normalized : added->text,
                           normalized ? n_bytes : added->n_bytes, (int32_t)i);
        free(normalized);
        if (!ok)
            return yard_loader_no_memory(l);
    }
    return YARD_OK;
}

yard_status yard_loader_vocab(yard_tokenizer_loader *l, const json_t *model, const json_t *added)
{
    yard_status st;

    build_alphabet(l);
    l->vocab = json_object_get(model, "vocab");
    st = check_model(l, model);
    if (st == YARD_OK && !json_is_object(l->vocab))
        st = yard_loader_want(l, "model.vocab", "an object", l->vocab);
    if (st == YARD_OK)
        st = size_tables(l, added);
    if (st == YARD_OK)
        st = read_vocab(l);
    if (st == YARD_OK)
        st = read_merges(l, json_object_get(model, "merges"));
    return st;
}

yard_status yard_loader_added(yard_tokenizer_loader *l, const json_t *added)
{
    const json_t *entry;
    size_t idx;

    json_array_foreach(added, idx, entry)
    {
        yard_status st = read_added_token(l, entry, idx);
        if (st != YARD_OK)
            return st;
    }
    return build_tries(l);
}
