/* tokenizer.json to tables. The file is untrusted: every member is checked where it is read. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "model/tokenizer_load.h"

enum { MAX_FILE_BYTES = 1 << 30 };

const char *yard_json_kind(const json_t *value)
{
    if (!value)
        return "nothing";
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "a whole number";
    case JSON_REAL:
        return "a fraction";
    case JSON_TRUE:
        return "true";
    case JSON_FALSE:
        return "false";
    case JSON_NULL:
        return "null";
    }
    return "something else";
}

bool yard_json_absent(const json_t *value)
{
    return !value || json_is_null(value);
}

yard_status yard_loader_want(yard_tokenizer_loader *l, const char *field, const char *expected,
                             const json_t *got)
{
    return yard_fail(l->err, YARD_EFORMAT, "%s: %s: want %s, got %s", l->file, field, expected,
                     yard_json_kind(got));
}

yard_status yard_loader_no_memory(yard_tokenizer_loader *l)
{
    return yard_fail(l->err, YARD_ENOMEM, "%s: no memory for the tokenizer", l->file);
}

yard_status yard_loader_type(yard_tokenizer_loader *l, const char *field, const json_t *object,
                             const char **type)
{
    *type = json_string_value(json_object_get(object, "type"));
    if (!json_is_object(object))
        return yard_loader_want(l, field, "an object", object);
    if (!*type)
        return yard_fail(l->err, YARD_EFORMAT, "%s: %s.type: want a string, got %s", l->file, field,
                         yard_json_kind(json_object_get(object, "type")));
    return YARD_OK;
}

yard_status yard_loader_refuse(yard_tokenizer_loader *l, const char *field, const char *type)
{
    return yard_fail(l->err, YARD_ENOTSUP, "%s: %s: '%.*s' is not implemented", l->file, field,
                     YARD_MAX_NAME_BYTES, type);
}

yard_status yard_loader_bool(yard_tokenizer_loader *l, const char *field, const json_t *object,
                             const char *name, bool *value)
{
    const json_t *member = json_object_get(object, name);

    if (!member)
        return YARD_OK;
    if (!json_is_boolean(member))
        return yard_fail(l->err, YARD_EFORMAT, "%s: %s.%s: want true or false, got %s", l->file,
                         field, name, yard_json_kind(member));
    *value = json_is_true(member);
    return YARD_OK;
}

static void warn_unknown_members(yard_tokenizer_loader *l, const json_t *root)
{
    static const char *const known[] = { "version",        "truncation", "padding",
                                         "added_tokens",   "normalizer", "pre_tokenizer",
                                         "post_processor", "decoder",    "model" };
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)root, name, value)
    {
        bool found = false;
        for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
            found = found || !strcmp(name, known[i]);
        if (!found)
            yard_warn(l->notify, "%s: member '%.*s' is not known and ignored", l->file,
                      YARD_MAX_NAME_BYTES, name);
    }
}

static yard_status read_root(yard_tokenizer_loader *l, const json_t *root)
{
    const json_t *added = json_object_get(root, "added_tokens");
    yard_status st;

    if (!json_is_object(root))
        return yard_loader_want(l, "the file", "an object", root);
    warn_unknown_members(l, root);
    if (!yard_json_absent(added) && !json_is_array(added))
        return yard_loader_want(l, "added_tokens", "an array", added);
    st = yard_loader_vocab(l, json_object_get(root, "model"), added);
    if (st == YARD_OK)
        st = yard_loader_pipeline(l, root);
    if (st == YARD_OK)
        st = yard_loader_added(l, added);
    return st;
}

static yard_status parse_json(yard_tokenizer_loader *l, const char *text, size_t n_bytes,
                              json_t **root)
{
    json_error_t error = { 0 };

    *root = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    if (*root)
        return YARD_OK;
    /* jansson gives no text when it could not even begin */
    if (json_error_code(&error) == json_error_out_of_memory || !error.text[0])
        return yard_loader_no_memory(l);
    return yard_fail(l->err, YARD_EFORMAT, "%s: want JSON, got: %s, at byte %d", l->file,
                     error.text, error.position);
}

static yard_status copy_text(yard_tokenizer_loader *l, const json_t *value, char **out)
{
    const size_t n = json_string_length(value);

    *out = malloc(n + 1);
    if (!*out)
        return yard_loader_no_memory(l);
    memcpy(*out, json_string_value(value), n + 1);
    return YARD_OK;
}

/* "text", {"content": "text"} or null. */
static yard_status read_special(yard_tokenizer_loader *l, const json_t *root, const char *name,
                                char **out)
{
    const json_t *value = json_object_get(root, name);

    if (json_is_object(value))
        value = json_object_get(value, "content");
    else if (yard_json_absent(value))
        return YARD_OK;
    if (!json_is_string(value))
        return yard_loader_want(l, name, "a string or an object with \"content\"", value);
    return copy_text(l, value, out);
}

/* A template, or an array of named ones, of which "default" is for chat. */
static yard_status read_chat_template(yard_tokenizer_loader *l, const json_t *root)
{
    const json_t *value = json_object_get(root, "chat_template");
    size_t idx;
    const json_t *entry;

    if (yard_json_absent(value))
        return YARD_OK;
    if (json_is_string(value))
        return copy_text(l, value, &l->tok->chat_template);
    if (!json_is_array(value))
        return yard_loader_want(l, "chat_template", "a string or an array", value);
    json_array_foreach(value, idx, entry)
    {
        const char *name = json_string_value(json_object_get(entry, "name"));
        const json_t *text = json_object_get(entry, "template");
        if (!name || !json_is_string(text))
            return yard_loader_want(l, "chat_template[]", "{\"name\": text, \"template\": text}",
                                    entry);
        if (!strcmp(name, "default"))
            return copy_text(l, text, &l->tok->chat_template);
    }
    return YARD_OK;
}

static yard_status read_config(yard_tokenizer_loader *l, const char *text, size_t n_bytes)
{
    json_t *root;
    yard_status st = parse_json(l, text, n_bytes, &root);

    if (st != YARD_OK)
        return st;
    if (!json_is_object(root))
        st = yard_loader_want(l, "the file", "an object", root);
    if (st == YARD_OK)
        st = read_special(l, root, "bos_token", &l->tok->bos_text);
    if (st == YARD_OK)
        st = read_special(l, root, "eos_token", &l->tok->eos_text);
    if (st == YARD_OK)
        st = read_chat_template(l, root);
    l->tok->adds_bos = json_is_true(json_object_get(root, "add_bos_token"));
    json_decref(root);
    return st;
}

static yard_status parse(yard_tokenizer **out, yard_tokenizer_loader *l, const char *tokenizer_json,
                         size_t n_bytes, const char *config_file, const char *config_json,
                         size_t n_config_bytes)
{
    json_t *root;
    yard_status st;

    l->tok = calloc(1, sizeof(*l->tok));
    if (!l->tok)
        return yard_loader_no_memory(l);
    st = parse_json(l, tokenizer_json, n_bytes, &root);
    if (st == YARD_OK) {
        st = read_root(l, root);
        json_decref(root);
    }
    if (st == YARD_OK && config_json) {
        l->file = config_file;
        st = read_config(l, config_json, n_config_bytes);
    }
    if (st != YARD_OK) {
        yard_tokenizer_free(l->tok);
        return st;
    }
    *out = l->tok;
    return YARD_OK;
}

yard_status yard_tokenizer_parse(yard_tokenizer **out, const char *tokenizer_json, size_t n_bytes,
                                 const char *config_json, size_t n_config_bytes, yard_error *err)
{
    yard_tokenizer_loader l = { .file = "tokenizer.json", .err = err };

    return parse(out, &l, tokenizer_json, n_bytes, "tokenizer_config.json", config_json,
                 n_config_bytes);
}

/* *data NULL when an optional file does not exist. */
static yard_status read_file(const char *path, bool optional, char **data, size_t *n_bytes,
                             yard_error *err)
{
    FILE *in = fopen(path, "rb");
    struct stat info;
    yard_status st = YARD_OK;

    *data = NULL;
    if (!in && errno == ENOENT && optional)
        return YARD_OK;
    if (!in)
        return yard_fail(err, YARD_EIO, "%s: cannot open: %s", path, strerror(errno));
    if (fstat(fileno(in), &info) != 0 || !S_ISREG(info.st_mode))
        st = yard_fail(err, YARD_EIO, "%s: want a regular file", path);
    else if (info.st_size > MAX_FILE_BYTES)
        st = yard_fail(err, YARD_EFORMAT, "%s: want at most %d bytes, got %lld", path,
                       MAX_FILE_BYTES, (long long)info.st_size);
    else if (!(*data = malloc((size_t)info.st_size + 1)))
        st = yard_fail(err, YARD_ENOMEM, "%s: no memory for %lld bytes", path,
                       (long long)info.st_size);
    else if ((*n_bytes = fread(*data, 1, (size_t)info.st_size, in)) != (size_t)info.st_size)
        st = yard_fail(err, YARD_EIO, "%s: cannot read: %s", path,
                       ferror(in) ? strerror(errno) : "it became shorter");
    fclose(in);
    if (st != YARD_OK) {
        free(*data);
        *data = NULL;
    }
    return st;
}

yard_status yard_tokenizer_load(yard_tokenizer **out, const char *dir, const yard_notify *notify,
                                yard_error *err)
{
    static const char *const names[2] = { "tokenizer.json", "tokenizer_config.json" };
    char *path[2] = { NULL, NULL }, *data[2] = { NULL, NULL };
    size_t n_bytes[2] = { 0, 0 };
    yard_status st = YARD_OK;

    for (int i = 0; i < 2 && st == YARD_OK; i++) {
        if (asprintf(&path[i], "%s/%s", dir, names[i]) < 0) {
            path[i] = NULL; /* left undefined by asprintf */
            st = yard_fail(err, YARD_ENOMEM, "%s: no memory for a path", names[i]);
            break;
        }
        st = read_file(path[i], i == 1, &data[i], &n_bytes[i], err);
    }
    if (st == YARD_OK) {
        yard_tokenizer_loader l = { .file = path[0], .notify = notify, .err = err };
        st = parse(out, &l, data[0], n_bytes[0], path[1], data[1], n_bytes[1]);
    }
    for (int i = 0; i < 2; i++) {
        free(path[i]);
        free(data[i]);
    }
    return st;
}

void yard_tokenizer_free(yard_tokenizer *tok)
{
    if (!tok)
        return;
    free(tok->pool);
    free(tok->tokens);
    free(tok->added);
    yard_bytes_map_free(&tok->by_bytes);
    yard_bytes_map_free(&tok->by_added);
    yard_pair_map_free(&tok->merges);
    yard_trie_free(&tok->raw_added);
    yard_trie_free(&tok->normalized_added);
    for (uint32_t i = 0; i < tok->n_splits; i++)
        yard_split_free(&tok->splits[i]);
    free(tok->chat_template);
    free(tok->bos_text);
    free(tok->eos_text);
    free(tok);
}
