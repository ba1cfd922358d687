/* SentencePiece's way of writing a tokenizer: U+2581 for spaces, <0x0A> for bytes. Two spellings
 * are published: a normalizer of Prepend and Replace without pre-tokenizer (Mixtral, Llama 2), and
 * the pre-tokenizer Metaspace (their later files). */
#include <stdlib.h>

#include "model/tokenizer_load.h"

static const char metaspace[] = "\xe2\x96\x81"; /* U+2581 */
enum { METASPACE_BYTES = sizeof(metaspace) - 1 };

size_t yard_metaspace_to_spaces(const char *text, size_t n_bytes, char *out)
{
    size_t n = 0;

    for (size_t i = 0; i < n_bytes;) {
        const bool space =
            n_bytes - i >= METASPACE_BYTES && !memcmp(text + i, metaspace, METASPACE_BYTES);
        out[n++] = space ? ' ' : text[i];
        i += space ? METASPACE_BYTES : 1;
    }
    return n;
}

bool yard_metaspace_prepare(const yard_tokenizer *tok, const char *text, size_t n_bytes, bool first,
                            char **out, size_t *n_out)
{
    char *spaced = malloc(n_bytes + 2);
    size_t n;

    if (!spaced)
        return false;
    spaced[0] = ' ';
    n = yard_metaspace_to_spaces(text, n_bytes, spaced + 1);
    *n_out = n + 1;
    if (n == 0 || tok->prepend == YARD_PREPEND_NEVER ||
        (tok->prepend == YARD_PREPEND_FIRST && !first) ||
        (tok->prepend != YARD_PREPEND_ALWAYS && spaced[1] == ' ')) {
        memmove(spaced, spaced + 1, n);
        *n_out = n;
    }
    *out = spaced;
    return true;
}

static bool is_text(const json_t *value, const char *want)
{
    return json_is_string(value) && !strcmp(json_string_value(value), want);
}

/* {"type": "Replace", "pattern": {"String": from}, "content": to} */
static bool is_replace(const json_t *entry, const char *from, const char *to)
{
    return is_text(json_object_get(entry, "type"), "Replace") &&
           is_text(json_object_get(json_object_get(entry, "pattern"), "String"), from) &&
           is_text(json_object_get(entry, "content"), to);
}

static yard_status refuse(yard_tokenizer_loader *l, const char *field, const char *want)
{
    return yard_fail(l->err, YARD_ENOTSUP,
                     "%s: %s: with model.byte_fallback only %s is implemented", l->file, field,
                     want);
}

/* Prepend and Replace, or Replace alone. */
static yard_status read_normalizer(yard_tokenizer_loader *l, const json_t *object)
{
    const json_t *entry = object, *list = json_object_get(object, "normalizers");
    size_t n = 1, at = 0;

    if (is_text(json_object_get(object, "type"), "Sequence")) {
        n = json_array_size(list);
        entry = json_array_get(list, 0);
    }
    if (n == 2 && is_text(json_object_get(entry, "type"), "Prepend") &&
        is_text(json_object_get(entry, "prepend"), metaspace)) {
        l->tok->prepend = YARD_PREPEND_ALWAYS;
        entry = json_array_get(list, ++at);
    }
    if (at + 1 != n || !is_replace(entry, " ", metaspace))
        return refuse(l, "normalizer", "Prepend and Replace of spaces by U+2581");
    l->tok->prepend_is_normal = true;
    return YARD_OK;
}

static yard_status read_pre_tokenizer(yard_tokenizer_loader *l, const json_t *object)
{
    static const struct {
        const char *name;
        yard_prepend prepend;
    } schemes[] = { { "always", YARD_PREPEND_MISSING },
                    { "first", YARD_PREPEND_FIRST },
                    { "never", YARD_PREPEND_NEVER } };
    const json_t *scheme = json_object_get(object, "prepend_scheme");
    bool split = true, prefix = true;

    if (!is_text(json_object_get(object, "type"), "Metaspace") ||
        !is_text(json_object_get(object, "replacement"), metaspace))
        return refuse(l, "pre_tokenizer", "Metaspace of U+2581");
    if (yard_loader_bool(l, "pre_tokenizer", object, "split", &split) != YARD_OK ||
        yard_loader_bool(l, "pre_tokenizer", object, "add_prefix_space", &prefix) != YARD_OK)
        return YARD_EFORMAT;
    if (split)
        return refuse(l, "pre_tokenizer.split", "false");
    l->tok->prepend = prefix ? YARD_PREPEND_MISSING : YARD_PREPEND_NEVER;
    if (yard_json_absent(scheme)) /* older files say add_prefix_space instead */
        return YARD_OK;
    for (size_t i = 0; i < sizeof(schemes) / sizeof(schemes[0]); i++)
        if (is_text(scheme, schemes[i].name)) {
            l->tok->prepend = schemes[i].prepend;
            return YARD_OK;
        }
    return refuse(l, "pre_tokenizer.prepend_scheme", "always, first or never");
}

/* Replace, ByteFallback, Fuse, and maybe Strip of spaces at the beginning. */
static yard_status read_decoder(yard_tokenizer_loader *l, const json_t *object)
{
    const json_t *list = json_object_get(object, "decoders");
    const json_t *strip = json_array_get(list, 3);
    const json_t *start = json_object_get(strip, "start");
    const size_t n = json_array_size(list);

    if (!is_text(json_object_get(object, "type"), "Sequence") || n < 3 || n > 4 ||
        !is_replace(json_array_get(list, 0), metaspace, " ") ||
        !is_text(json_object_get(json_array_get(list, 1), "type"), "ByteFallback") ||
        !is_text(json_object_get(json_array_get(list, 2), "type"), "Fuse"))
        return refuse(l, "decoder", "Replace, ByteFallback, Fuse and Strip");
    if (n == 3)
        return YARD_OK;
    if (!is_text(json_object_get(strip, "type"), "Strip") ||
        !is_text(json_object_get(strip, "content"), " ") || !json_is_integer(start) ||
        json_integer_value(start) < 0 || json_integer_value(start) > 16 ||
        json_integer_value(json_object_get(strip, "stop")) != 0)
        return refuse(l, "decoder", "Strip of 0 to 16 spaces at the start");
    l->tok->n_stripped = (uint32_t)json_integer_value(start);
    return YARD_OK;
}

yard_status yard_loader_metaspace(yard_tokenizer_loader *l, const json_t *root)
{
    const json_t *normalizer = json_object_get(root, "normalizer");
    const json_t *pre_tokenizer = json_object_get(root, "pre_tokenizer");
    yard_status st = YARD_OK;

    if (yard_json_absent(normalizer) == yard_json_absent(pre_tokenizer))
        return refuse(l, "normalizer", "either a normalizer or a pre_tokenizer");
    if (!yard_json_absent(normalizer))
        st = read_normalizer(l, normalizer);
    else
        st = read_pre_tokenizer(l, pre_tokenizer);
    return st == YARD_OK ? read_decoder(l, json_object_get(root, "decoder")) : st;
}
