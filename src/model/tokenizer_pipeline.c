/* Normalizer, pre-tokenizer, post-processor and decoder of tokenizer.json. */
#include <stdio.h>

#include <utf8proc.h>

#include "model/tokenizer_load.h"

static yard_status read_normalizer(yard_tokenizer_loader *l, const json_t *object, int depth)
{
    static const struct {
        const char *type;
        int options;
    } forms[] = {
        { "NFC", UTF8PROC_STABLE | UTF8PROC_COMPOSE },
        { "NFD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE },
        { "NFKC", UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT },
        { "NFKD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT },
    };
    const json_t *members = json_object_get(object, "normalizers");
    yard_tokenizer *tok = l->tok;
    const char *type;
    size_t idx;
    const json_t *member;

    if (depth == 0 && yard_json_absent(object))
        return YARD_OK;
    if (yard_loader_type(l, "normalizer", object, &type) != YARD_OK)
        return YARD_EFORMAT;
    for (size_t i = 0; i < sizeof(forms) / sizeof(forms[0]); i++)
        if (!strcmp(type, forms[i].type)) {
            if (tok->n_normalizers == YARD_MAX_NORMALIZERS)
                return yard_loader_refuse(l, "normalizer", "a sequence this long");
            tok->normalizers[tok->n_normalizers++] = forms[i].options;
            return YARD_OK;
        }
    if (strcmp(type, "Sequence") || depth == YARD_MAX_NESTING)
        return yard_loader_refuse(l, "normalizer", type);
    if (!json_is_array(members))
        return yard_loader_want(l, "normalizer.normalizers", "an array", members);
    json_array_foreach(members, idx, member)
    {
        yard_status st = read_normalizer(l, member, depth + 1);
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}

static yard_status add_split(yard_tokenizer_loader *l, const char *pattern, size_t n_bytes,
                             bool literal)
{
    yard_tokenizer *tok = l->tok;
    char where[256];

    if (tok->n_splits == YARD_MAX_SPLITS)
        return yard_loader_refuse(l, "pre_tokenizer", "a sequence this long");
    snprintf(where, sizeof(where), "%.200s: pre_tokenizer, split %u", l->file, tok->n_splits);
    return yard_split_compile(&tok->splits[tok->n_splits++], where, pattern, n_bytes, literal,
                              l->err);
}

static yard_status read_split(yard_tokenizer_loader *l, const json_t *object)
{
    const json_t *pattern = json_object_get(object, "pattern");
    const json_t *regex = json_object_get(pattern, "Regex");
    const json_t *string = json_object_get(pattern, "String");
    const char *behavior = json_string_value(json_object_get(object, "behavior"));
    const json_t *text = regex ? regex : string;
    bool invert = false;

    if (!json_is_string(text) || (regex && string))
        return yard_loader_want(l, "pre_tokenizer.pattern",
                                "{\"Regex\": text} or {\"String\": text}", pattern);
    if (!behavior)
        return yard_loader_want(l, "pre_tokenizer.behavior", "a string",
                                json_object_get(object, "behavior"));
    if (strcmp(behavior, "Isolated"))
        return yard_loader_refuse(l, "pre_tokenizer.behavior", behavior);
    if (yard_loader_bool(l, "pre_tokenizer", object, "invert", &invert) != YARD_OK)
        return YARD_EFORMAT;
    if (invert)
        return yard_loader_refuse(l, "pre_tokenizer", "invert");
    return add_split(l, json_string_value(text), json_string_length(text), !regex);
}

static yard_status read_byte_level(yard_tokenizer_loader *l, const json_t *object)
{
    static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|"
                               "\\s+(?!\\S)|\\s+";
    bool use_regex = true;

    l->tok->prefix_space_at = l->tok->n_splits;
    l->tok->add_prefix_space = true;
    if (yard_loader_bool(l, "pre_tokenizer", object, "use_regex", &use_regex) != YARD_OK ||
        yard_loader_bool(l, "pre_tokenizer", object, "add_prefix_space",
                         &l->tok->add_prefix_space) != YARD_OK)
        return YARD_EFORMAT;
    return use_regex ? add_split(l, gpt2, sizeof(gpt2) - 1, false) : YARD_OK;
}

/* *done: ByteLevel has been seen; nothing can follow it. */
static yard_status read_pre_tokenizer(yard_tokenizer_loader *l, const json_t *object, int depth,
                                      bool *done)
{
    const json_t *members = json_object_get(object, "pretokenizers");
    bool individual = false;
    const char *type;
    size_t idx;
    const json_t *member;

    if (yard_loader_type(l, "pre_tokenizer", object, &type) != YARD_OK)
        return YARD_EFORMAT;
    if (*done)
        return yard_loader_refuse(l, "pre_tokenizer after ByteLevel", type);
    if (!strcmp(type, "Split"))
        return read_split(l, object);
    if (!strcmp(type, "ByteLevel")) {
        *done = true;
        return read_byte_level(l, object);
    }
    if (!strcmp(type, "Digits")) {
        if (yard_loader_bool(l, "pre_tokenizer", object, "individual_digits", &individual) !=
            YARD_OK)
            return YARD_EFORMAT;
        return individual ? add_split(l, "\\p{N}", 5, false) : add_split(l, "\\p{N}+", 6, false);
    }
    if (strcmp(type, "Sequence") || depth == YARD_MAX_NESTING)
        return yard_loader_refuse(l, "pre_tokenizer", type);
    if (!json_is_array(members))
        return yard_loader_want(l, "pre_tokenizer.pretokenizers", "an array", members);
    json_array_foreach(members, idx, member)
    {
        yard_status st = read_pre_tokenizer(l, member, depth + 1, done);
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}

/* A post-processor only adds tokens, which encoding here never does; its kind is still checked, as
 * an unknown one means a file from a later time. */
static yard_status check_post_processor(yard_tokenizer_loader *l, const json_t *object, int depth)
{
    const json_t *members = json_object_get(object, "processors");
    const char *type;
    size_t idx;
    const json_t *member;

    if (depth == 0 && yard_json_absent(object))
        return YARD_OK;
    if (yard_loader_type(l, "post_processor", object, &type) != YARD_OK)
        return YARD_EFORMAT;
    if (!strcmp(type, "ByteLevel") || !strcmp(type, "TemplateProcessing"))
        return YARD_OK;
    if (strcmp(type, "Sequence") || depth == YARD_MAX_NESTING)
        return yard_loader_refuse(l, "post_processor", type);
    json_array_foreach(members, idx, member)
    {
        yard_status st = check_post_processor(l, member, depth + 1);
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}

static yard_status read_byte_level_pipeline(yard_tokenizer_loader *l, const json_t *root)
{
    bool byte_level = false;
    const char *decoder;
    yard_status st = read_normalizer(l, json_object_get(root, "normalizer"), 0);

    if (st == YARD_OK)
        st = read_pre_tokenizer(l, json_object_get(root, "pre_tokenizer"), 0, &byte_level);
    if (st == YARD_OK && !byte_level)
        st = yard_fail(l->err, YARD_ENOTSUP,
                       "%s: pre_tokenizer: want ByteLevel at the end, got none", l->file);
    if (st == YARD_OK)
        st = yard_loader_type(l, "decoder", json_object_get(root, "decoder"), &decoder);
    if (st == YARD_OK && strcmp(decoder, "ByteLevel"))
        st = yard_loader_refuse(l, "decoder", decoder);
    return st;
}

yard_status yard_loader_pipeline(yard_tokenizer_loader *l, const json_t *root)
{
    yard_status st;

    if (!yard_json_absent(json_object_get(root, "truncation")))
        return yard_loader_refuse(l, "truncation", "cutting prompts");
    st = l->tok->metaspace ? yard_loader_metaspace(l, root) : read_byte_level_pipeline(l, root);
    return st == YARD_OK ? check_post_processor(l, json_object_get(root, "post_processor"), 0) : st;
}
