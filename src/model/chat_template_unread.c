/* Members of chat messages that no template reads. */
#include <stdio.h>

#include <jansson.h>

#include "model/chat_template.h"

typedef struct unread {
    json_t *told; /* an object with the names warned of */
    const yard_notify *notify;
} unread;

/* Members of one object; where ("messages[0].", ..) is for the warning. */
static void warn_members(unread *u, const char *where, const json_t *object,
                         const char *const *known)
{
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)object, name, value)
    {
        const char *const *k = known;
        while (*k && strcmp(*k, name) != 0)
            k++;
        if (*k || json_is_null(value) || json_object_get(u->told, name))
            continue;
        json_object_set_new(u->told, name, json_true()); /* failed: told again */
        yard_warn(u->notify, "%s%.60s: unknown member ignored", where, name);
    }
}

static void warn_parts(unread *u, size_t message_idx, const json_t *parts)
{
    static const char *const known[] = { "type", "text", NULL };
    char where[64];

    for (size_t i = 0; i < json_array_size(parts); i++) {
        snprintf(where, sizeof(where), "messages[%zu].content[%zu].", message_idx, i);
        warn_members(u, where, json_array_get(parts, i), known);
    }
}

static void warn_calls(unread *u, size_t message_idx, const json_t *calls)
{
    static const char *const of_call[] = { "type", "function", "id", "index", NULL };
    static const char *const of_function[] = { "name", "arguments", NULL };
    char where[80];

    for (size_t i = 0; i < json_array_size(calls); i++) {
        const json_t *call = json_array_get(calls, i);
        snprintf(where, sizeof(where), "messages[%zu].tool_calls[%zu].", message_idx, i);
        warn_members(u, where, call, of_call);
        snprintf(where, sizeof(where), "messages[%zu].tool_calls[%zu].function.", message_idx, i);
        warn_members(u, where, json_object_get(call, "function"), of_function);
    }
}

void yard_chat_messages_warn_unread(const char *messages_json, size_t n_bytes,
                                    const yard_notify *notify)
{
    static const char *const known[] = { "role",         "content",           "tool_calls",
                                         "tool_call_id", "refusal",           "annotations",
                                         "audio",        "reasoning_content", NULL };
    json_t *root = json_loadb(messages_json, n_bytes, JSON_ALLOW_NUL, NULL);
    unread u = { .told = json_object(), .notify = notify };

    for (size_t i = 0; i < json_array_size(root); i++) {
        const json_t *message = json_array_get(root, i);
        char where[64];
        snprintf(where, sizeof(where), "messages[%zu].", i);
        warn_members(&u, where, message, known);
        warn_parts(&u, i, json_object_get(message, "content"));
        warn_calls(&u, i, json_object_get(message, "tool_calls"));
    }
    json_decref(u.told);
    json_decref(root);
}
