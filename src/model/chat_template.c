#include <stdio.h>
#include <stdlib.h>

#include <jansson.h>
#include <sha2.h>

#include "model/chat_template_impl.h"

enum { MAX_NAME_BYTES = 60 }; /* of a string from the messages that an error shows */

struct yard_chat_template {
    const char *name;
    const char *sha256; /* of the Jinja text */
    yard_template_encoder encode;
    yard_template_rules rules;
};

static const yard_chat_template templates[] = {
    { "demo",
      "1413b9e9fb37d33f8ae9f79f455d07b6cfed3224ad4dbe01ecf1b4a42b092f5b",
      yard_encode_demo,
      { 0 } },
    { "deepseek-v3",
      "3b8267e54b67df6500f231ffa969955cc9d26b3444a291ced4eb96ca7d3ca1ea",
      yard_encode_deepseek_v3,
      { .join_system = true, .output_separator = "\n" } },
    { "deepseek-v3-0324",
      "22e97ba043dacf9df1f071a9de9d2bb6b0757491f16e96e810834b86e1641286",
      yard_encode_deepseek_v3_0324,
      { .join_system = true, .output_separator = "\n" } },
    { "deepseek-v3.1",
      "45690185067ea25c073bff2d3e425a45ee2564d2bbf6cdf7d885e139d460b8e0",
      yard_encode_deepseek_v3_1,
      { .join_system = true } },
    { "deepseek-r1",
      "563b1ce7d61d50a9b4c7439a912a1116f095b712df5b5e4d3e1116049874eb64",
      yard_encode_deepseek_v3,
      { .join_system = true,
        .calls_beat_text = true,
        .drop_thoughts = true,
        .open_thoughts = true,
        .output_separator = "" } },
    { "deepseek-r1-2025-01", /* the first release: does not open <think> */
      "3a3036eeb96ca0e48565fc1f19b4d7d3fa17ada32bb1b3d5ed539ae74cf22923",
      yard_encode_deepseek_v3,
      { .join_system = true,
        .calls_beat_text = true,
        .drop_thoughts = true,
        .output_separator = "" } },
    { "deepseek-r1-0528",
      "53671bac29bcb3e1f95f51b8c77d85a6011b66dc38bd23dce64eef04384a976b",
      yard_encode_deepseek_v3_0324,
      { .join_system = true, .drop_thoughts = true, .output_separator = "\n" } },
    { "deepseek-r1-distill",
      "56a1447ad31926fdc21fb07e56e5642bd9c850c4f52d8c8af7bbe5f079a84f5f",
      yard_encode_deepseek_v3,
      { .drop_thoughts = true, .open_thoughts = true, .output_separator = "\n" } },
    { "deepseek-r1-distill-2025-01",
      "b6835114b7303ddd78919a82e4d9f7d8c26ed0d7dfc36beeb12d524f6144eab1",
      yard_encode_deepseek_v3,
      { .drop_thoughts = true, .output_separator = "\n" } },
    { "deepseek-v2",
      "8aeba567270fa9a8d5372caf4b04affea947c4421d96adc01e3ff94021b0ae8e",
      yard_encode_deepseek_v2,
      { .needs_eos = true, .no_tools = true } },
    { "deepseek-v2-escaped", /* the same with line ends written as \n */
      "5b0c475e85b3954175a606f8e7540ec0c6a16edb516e2b8cd0c000dff7b1ad65",
      yard_encode_deepseek_v2,
      { .needs_eos = true, .no_tools = true } },
    { "mixtral-instruct",
      "26a59556925c987317ce5291811ba3b7f32ec4c647c400c6cc7e3a9993007ba7",
      yard_encode_mixtral,
      { .needs_eos = true, .no_tools = true, .alternates = true } },
    { "mixtral-instruct-2024",
      "796853172235ab3aaa4810013ddfe2eab481bda3306dad4f700c00d436eed596",
      yard_encode_mixtral,
      { .needs_eos = true,
        .no_tools = true,
        .alternates = true,
        .system_first = true,
        .spaced = true } },
};

enum { N_TEMPLATES = sizeof(templates) / sizeof(templates[0]) };

static void list_names(char *out, size_t max_bytes)
{
    size_t n = 0;

    for (int i = 0; i < N_TEMPLATES && n < max_bytes; i++)
        n += (size_t)snprintf(out + n, max_bytes - n, "%s%s", i ? ", " : "", templates[i].name);
}

yard_status yard_chat_template_find(const yard_chat_template **out, const yard_tokenizer *tok,
                                    const char *name, yard_error *err)
{
    const char *text = name ? NULL : yard_tokenizer_chat_template(tok);
    char hash[SHA256_DIGEST_STRING_LENGTH], names[384];

    list_names(names, sizeof(names));
    if (!name && !text)
        return yard_fail(err, YARD_EFORMAT,
                         "tokenizer_config.json: chat_template: want a template, got none; "
                         "known by name: %s",
                         names);
    if (!name)
        SHA256Data((const uint8_t *)text, strlen(text), hash);
    for (int i = 0; i < N_TEMPLATES; i++)
        if (name ? !strcmp(name, templates[i].name) : !strcmp(hash, templates[i].sha256)) {
            *out = &templates[i];
            return YARD_OK;
        }
    if (name)
        return yard_fail(err, YARD_ENOTSUP, "chat template '%.*s' is not known; known: %s",
                         MAX_NAME_BYTES, name, names);
    return yard_fail(err, YARD_ENOTSUP,
                     "tokenizer_config.json: chat_template: the one with SHA-256 %s is not known; "
                     "known by name: %s",
                     hash, names);
}

const char *yard_chat_template_name(const yard_chat_template *tpl)
{
    return tpl->name;
}

/* The templates that take earlier thoughts out of the conversation are those of R1. */
bool yard_chat_template_thinks(const yard_chat_template *tpl)
{
    return tpl->rules.drop_thoughts;
}

void yard_prompt_span(yard_prompt *prompt, yard_span span)
{
    if (span.n_bytes == 0 || prompt->no_memory)
        return;
    if (prompt->max_text - prompt->n_text <= span.n_bytes) {
        const size_t max_text = (prompt->n_text + span.n_bytes) * 2 + 256;
        char *larger = realloc(prompt->text, max_text);
        if (!larger) {
            prompt->no_memory = true;
            return;
        }
        prompt->text = larger;
        prompt->max_text = max_text;
    }
    memcpy(prompt->text + prompt->n_text, span.bytes, span.n_bytes);
    prompt->n_text += span.n_bytes;
    prompt->text[prompt->n_text] = '\0';
}

void yard_prompt_put(yard_prompt *prompt, const char *text)
{
    yard_prompt_span(prompt, (yard_span){ text, strlen(text) });
}

typedef struct reader {
    yard_message *messages;
    size_t n_messages;
    size_t at; /* message being read, for errors */
    yard_error *err;
} reader;

static const char *kind(const json_t *value)
{
    static const char *const names[] = {
        [JSON_OBJECT] = "an object", [JSON_ARRAY] = "an array", [JSON_STRING] = "a string",
        [JSON_INTEGER] = "a number", [JSON_REAL] = "a number",  [JSON_TRUE] = "true",
        [JSON_FALSE] = "false",      [JSON_NULL] = "null",
    };
    return value ? names[json_typeof(value)] : "nothing";
}

static yard_status want(reader *r, const char *member, const char *expected, const json_t *got)
{
    return yard_fail(r->err, YARD_EFORMAT, "messages[%zu]%s: want %s, got %s", r->at, member,
                     expected, kind(got));
}

static yard_span span_of(const json_t *string)
{
    return (yard_span){ json_string_value(string), json_string_length(string) };
}

static yard_status read_role(reader *r, const json_t *object, yard_role *role)
{
    static const char *const names[] = {
        [YARD_ROLE_SYSTEM] = "system",
        [YARD_ROLE_USER] = "user",
        [YARD_ROLE_ASSISTANT] = "assistant",
        [YARD_ROLE_TOOL] = "tool",
    };
    const json_t *value = json_object_get(object, "role");

    if (!json_is_string(value))
        return want(r, ".role", "a string", value);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (!strcmp(json_string_value(value), names[i])) {
            *role = (yard_role)i;
            return YARD_OK;
        }
    return yard_fail(r->err, YARD_EFORMAT,
                     "messages[%zu].role: want system, user, assistant or tool, got '%.*s'", r->at,
                     MAX_NAME_BYTES, json_string_value(value));
}

/* One string, made once in the JSON tree, so that it lives as long as the others. */
static yard_status join_parts(reader *r, json_t *object, json_t *parts)
{
    yard_prompt joined = { 0 };
    json_t *string;
    const json_t *part;
    size_t idx;

    json_array_foreach(parts, idx, part)
    {
        const char *type = json_string_value(json_object_get(part, "type"));
        const json_t *text = json_object_get(part, "text");
        if (!type || strcmp(type, "text") || !json_is_string(text)) {
            free(joined.text);
            return yard_fail(r->err, YARD_EFORMAT,
                             "messages[%zu].content[%zu]: want {\"type\": \"text\", \"text\": "
                             "text}, got %s%.*s",
                             r->at, idx, type ? "type " : "", MAX_NAME_BYTES,
                             type ? type : kind(part));
        }
        yard_prompt_span(&joined, span_of(text));
    }
    string =
        joined.no_memory ? NULL : json_stringn(joined.n_text ? joined.text : "", joined.n_text);
    free(joined.text);
    if (!string || json_object_set_new(object, "content", string) != 0)
        return yard_fail(r->err, YARD_ENOMEM, "messages[%zu]: no memory", r->at);
    return YARD_OK;
}

static yard_status read_content(reader *r, json_t *object, yard_message *m)
{
    json_t *content = json_object_get(object, "content");

    if (json_is_array(content)) {
        yard_status st = join_parts(r, object, content);
        if (st != YARD_OK)
            return st;
        content = json_object_get(object, "content");
    }
    if (json_is_string(content))
        m->content = span_of(content);
    else if (m->n_calls == 0 || (content && !json_is_null(content)))
        return want(r, ".content", "a string or an array of parts", content);
    return YARD_OK;
}

static yard_status read_call_text(reader *r, size_t call_idx, const char *member,
                                  const json_t *value, yard_span *out)
{
    char name[64];

    if (!json_is_string(value)) {
        snprintf(name, sizeof(name), ".tool_calls[%zu].%s", call_idx, member);
        return want(r, name, "a string", value);
    }
    *out = span_of(value);
    return YARD_OK;
}

/* An absent, null or empty list means none. */
static yard_status read_calls(reader *r, const json_t *object, yard_message *m)
{
    const json_t *calls = json_object_get(object, "tool_calls");
    yard_status st = YARD_OK;
    const json_t *call;
    size_t idx;

    if (!calls || json_is_null(calls))
        return YARD_OK;
    if (!json_is_array(calls))
        return want(r, ".tool_calls", "an array", calls);
    if (json_array_size(calls) == 0)
        return YARD_OK;
    if (m->role != YARD_ROLE_ASSISTANT)
        return want(r, ".tool_calls", "them in assistant messages only", calls);
    m->calls = calloc(json_array_size(calls), sizeof(*m->calls));
    if (!m->calls)
        return yard_fail(r->err, YARD_ENOMEM, "messages[%zu].tool_calls: no memory", r->at);
    m->n_calls = json_array_size(calls);
    json_array_foreach(calls, idx, call)
    {
        const json_t *function = json_object_get(call, "function");
        yard_tool_call *out = &m->calls[idx];
        st = read_call_text(r, idx, "type", json_object_get(call, "type"), &out->type);
        if (st == YARD_OK)
            st = read_call_text(r, idx, "function.name", json_object_get(function, "name"),
                                &out->name);
        if (st == YARD_OK)
            st = read_call_text(r, idx, "function.arguments",
                                json_object_get(function, "arguments"), &out->arguments);
        if (st != YARD_OK)
            break;
    }
    return st;
}

static yard_status read_messages(reader *r, const json_t *root)
{
    json_t *object;

    if (!json_is_array(root))
        return yard_fail(r->err, YARD_EFORMAT, "messages: want an array, got %s", kind(root));
    r->n_messages = json_array_size(root);
    r->messages = calloc(r->n_messages + 1, sizeof(*r->messages));
    if (!r->messages)
        return yard_fail(r->err, YARD_ENOMEM, "messages: no memory for %zu", r->n_messages);
    json_array_foreach((json_t *)root, r->at, object)
    {
        yard_message *m = &r->messages[r->at];
        yard_status st;

        if (!json_is_object(object))
            return want(r, "", "an object", object);
        st = read_role(r, object, &m->role);
        if (st == YARD_OK)
            st = read_calls(r, object, m);
        if (st == YARD_OK)
            st = read_content(r, object, m);
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}

static void free_messages(reader *r)
{
    for (size_t i = 0; r->messages && i < r->n_messages; i++)
        free(r->messages[i].calls);
    free(r->messages);
}

/* What the Jinja text raises an exception for, or leaves out without a word. */
static yard_status check_roles(const yard_chat_template *tpl, const reader *r)
{
    const yard_template_rules *rules = &tpl->rules;
    const bool system_first =
        rules->system_first && r->n_messages > 1 && r->messages[0].role == YARD_ROLE_SYSTEM;

    for (size_t i = 0; i < r->n_messages; i++) {
        const yard_message *m = &r->messages[i];
        const yard_role in_turn = (i + system_first) % 2 ? YARD_ROLE_ASSISTANT : YARD_ROLE_USER;

        if (rules->no_tools && (m->role == YARD_ROLE_TOOL || m->n_calls))
            return yard_fail(r->err, YARD_ENOTSUP, "messages[%zu]: template %s has no tools", i,
                             tpl->name);
        if (rules->alternates && m->role != in_turn && !(system_first && i == 0))
            return yard_fail(r->err, YARD_ENOTSUP,
                             "messages[%zu].role: template %s wants user and assistant in turn, "
                             "user first, and %s",
                             i, tpl->name,
                             rules->system_first ? "at most one system message before them"
                                                 : "no other role");
    }
    return YARD_OK;
}

static yard_status encode(const yard_chat_template *tpl, const yard_tokenizer *tok, const reader *r,
                          bool add_generation_prompt, char **text, size_t *n_text, yard_error *err)
{
    const char *bos = yard_tokenizer_bos_text(tok), *eos = yard_tokenizer_eos_text(tok);
    const yard_conversation talk = { .messages = r->messages,
                                     .n_messages = r->n_messages,
                                     .bos = { bos, bos ? strlen(bos) : 0 },
                                     .eos = { eos, eos ? strlen(eos) : 0 },
                                     .generation_prompt = add_generation_prompt };
    yard_prompt prompt = { 0 };

    if (!bos || (tpl->rules.needs_eos && !eos))
        return yard_fail(err, YARD_EFORMAT,
                         "tokenizer_config.json: %s: want one for the chat template, got none",
                         bos ? "eos_token" : "bos_token");
    tpl->encode(&tpl->rules, &talk, &prompt);
    if (!prompt.text)
        prompt.text = calloc(1, 1); /* no text at all is not NULL */
    if (prompt.no_memory || !prompt.text) {
        free(prompt.text);
        return yard_fail(err, YARD_ENOMEM, "chat template: no memory for the prompt");
    }
    *text = prompt.text;
    *n_text = prompt.n_text;
    return YARD_OK;
}

yard_status yard_chat_template_render(const yard_chat_template *tpl, const yard_tokenizer *tok,
                                      const char *messages_json, size_t n_bytes,
                                      bool add_generation_prompt, char **text, size_t *n_text,
                                      yard_error *err)
{
    reader r = { .err = err };
    json_error_t error = { 0 };
    json_t *root =
        json_loadb(messages_json, n_bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    yard_status st;

    /* jansson gives no text when it could not even begin */
    if (!root && (json_error_code(&error) == json_error_out_of_memory || !error.text[0]))
        return yard_fail(err, YARD_ENOMEM, "messages: no memory");
    if (!root)
        return yard_fail(err, YARD_EFORMAT, "messages: want JSON, got: %s, at byte %d", error.text,
                         error.position);
    st = read_messages(&r, root);
    if (st == YARD_OK)
        st = check_roles(tpl, &r);
    if (st == YARD_OK)
        st = encode(tpl, tok, &r, add_generation_prompt, text, n_text, err);
    free_messages(&r);
    json_decref(root);
    return st;
}
