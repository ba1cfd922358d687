/* Events are written often, so they are put together from pieces, not from a tree of values. */
#include "serve/api_answer.h"

/* name is all that stands before the value: "{\"id\":" */
static void put_text(yard_api_out *out, const char *name, const char *text)
{
    yard_api_put(out, name);
    if (text)
        yard_api_put_string(out, text, strlen(text));
    else
        yard_api_put(out, "null");
}

static void put_count(yard_api_out *out, const char *name, int64_t n)
{
    yard_api_put(out, name);
    yard_api_put_integer(out, n);
}

/* Cached tokens in both forms: some clients read one, some the other. */
static void put_usage(yard_api_out *out, const yard_api_usage *u)
{
    put_count(out, ",\"usage\":{\"prompt_tokens\":", u->n_prompt);
    put_count(out, ",\"completion_tokens\":", u->n_output);
    put_count(out, ",\"total_tokens\":", (int64_t)u->n_prompt + u->n_output);
    put_count(out, ",\"prompt_tokens_details\":{\"cached_tokens\":", u->n_cached);
    put_count(out, "},\"completion_tokens_details\":{\"reasoning_tokens\":", u->n_reasoning);
    put_count(out, "},\"prompt_cache_hit_tokens\":", u->n_cached);
    put_count(out, ",\"prompt_cache_miss_tokens\":", (int64_t)u->n_prompt - u->n_cached);
    yard_api_put(out, "}");
}

/* With bytes: tokens split characters, so their text alone would not do. */
static void put_chat_token(yard_api_out *out, const yard_api_logprob *p)
{
    yard_api_put(out, "{\"token\":");
    yard_api_put_string(out, p->bytes, p->n_bytes);
    yard_api_put(out, ",\"logprob\":");
    yard_api_put_float(out, p->logprob);
    yard_api_put(out, ",\"bytes\":[");
    for (size_t i = 0; i < p->n_bytes; i++)
        put_count(out, i ? "," : "", (unsigned char)p->bytes[i]);
    yard_api_put(out, "]");
}

static void put_chat_logprobs(yard_api_out *out, const yard_api_choice *c)
{
    yard_api_put(out, ",\"logprobs\":{\"content\":[");
    for (uint32_t i = 0; i < c->n_tokens; i++) {
        yard_api_put(out, i ? "," : "");
        put_chat_token(out, &c->token[i].chosen);
        yard_api_put(out, ",\"top_logprobs\":[");
        for (uint32_t k = 0; k < c->token[i].n_top; k++) {
            yard_api_put(out, k ? "," : "");
            put_chat_token(out, &c->token[i].top[k]);
            yard_api_put(out, "}");
        }
        yard_api_put(out, "]}");
    }
    yard_api_put(out, "]}");
}

static void put_top(yard_api_out *out, const yard_api_token *token)
{
    if (token->n_top == 0) {
        yard_api_put(out, "null");
        return;
    }
    yard_api_put(out, "{");
    for (uint32_t k = 0; k < token->n_top; k++) {
        yard_api_put(out, k ? "," : "");
        yard_api_put_string(out, token->top[k].bytes, token->top[k].n_bytes);
        yard_api_put(out, ":");
        yard_api_put_float(out, token->top[k].logprob);
    }
    yard_api_put(out, "}");
}

static void put_completion_logprobs(yard_api_out *out, const yard_api_choice *c)
{
    yard_api_put(out, ",\"logprobs\":{\"tokens\":[");
    for (uint32_t i = 0; i < c->n_tokens; i++) {
        yard_api_put(out, i ? "," : "");
        yard_api_put_string(out, c->token[i].chosen.bytes, c->token[i].chosen.n_bytes);
    }
    yard_api_put(out, "],\"token_logprobs\":[");
    for (uint32_t i = 0; i < c->n_tokens; i++) {
        yard_api_put(out, i ? "," : "");
        yard_api_put_float(out, c->token[i].chosen.logprob);
    }
    yard_api_put(out, "],\"top_logprobs\":[");
    for (uint32_t i = 0; i < c->n_tokens; i++) {
        yard_api_put(out, i ? "," : "");
        put_top(out, &c->token[i]);
    }
    yard_api_put(out, "],\"text_offset\":[");
    for (uint32_t i = 0; i < c->n_tokens; i++)
        put_count(out, i ? "," : "", c->token[i].text_offset);
    yard_api_put(out, "]}");
}

static void put_logprobs(yard_api_out *out, const yard_api_head *head, const yard_api_choice *c)
{
    if (!c->logprobs)
        yard_api_put(out, ",\"logprobs\":null");
    else if (head->chat)
        put_chat_logprobs(out, c);
    else
        put_completion_logprobs(out, c);
}

static void put_finish(yard_api_out *out, const yard_api_choice *c)
{
    put_text(out, ",\"finish_reason\":", c->finish_reason);
    if (!c->finish_reason)
        return;
    if (!c->stop && c->stop_token)
        put_count(out, ",\"stop_reason\":", *c->stop_token);
    else
        put_text(out, ",\"stop_reason\":", c->stop);
}

/* Reasoning before content, and never both names for one text. */
static void put_message(yard_api_out *out, const yard_api_choice *c)
{
    yard_api_put(out, ",\"message\":{\"role\":\"assistant\"");
    if (c->reasoning) {
        yard_api_put(out, ",\"reasoning_content\":");
        yard_api_put_string(out, c->reasoning, c->n_reasoning);
    }
    yard_api_put(out, ",\"content\":");
    yard_api_put_string(out, c->text ? c->text : "", c->text ? c->n_text : 0);
    yard_api_put(out, "}");
}

static void put_delta(yard_api_out *out, const yard_api_choice *c)
{
    const char *comma = "";

    yard_api_put(out, ",\"delta\":{");
    if (c->begins) {
        yard_api_put(out, "\"role\":\"assistant\"");
        comma = ",";
    }
    if (c->reasoning) {
        yard_api_put(out, comma);
        yard_api_put(out, "\"reasoning_content\":");
        yard_api_put_string(out, c->reasoning, c->n_reasoning);
        comma = ",";
    }
    if (c->text || (c->begins && !c->reasoning)) {
        yard_api_put(out, comma);
        yard_api_put(out, "\"content\":");
        yard_api_put_string(out, c->text ? c->text : "", c->text ? c->n_text : 0);
    }
    yard_api_put(out, "}");
}

static void put_choice(yard_api_out *out, const yard_api_head *head, const yard_api_choice *c,
                       bool whole)
{
    put_count(out, "{\"index\":", c->index);
    if (!head->chat) {
        yard_api_put(out, ",\"text\":");
        yard_api_put_string(out, c->text ? c->text : "", c->text ? c->n_text : 0);
    } else if (whole) {
        put_message(out, c);
    } else {
        put_delta(out, c);
    }
    put_logprobs(out, head, c);
    put_finish(out, c);
    yard_api_put(out, "}");
}

/* Up to the list of choices. */
static void put_head(yard_api_out *out, const yard_api_head *head, const char *object)
{
    put_text(out, "{\"id\":", head->id);
    put_text(out, ",\"object\":", object);
    put_count(out, ",\"created\":", head->created);
    put_text(out, ",\"model\":", head->model);
    if (head->fingerprint)
        put_text(out, ",\"system_fingerprint\":", head->fingerprint);
    yard_api_put(out, ",\"choices\":[");
}

void yard_api_put_answer(yard_api_out *out, const yard_api_head *head,
                         const yard_api_choice *choices, uint32_t n_choices,
                         const yard_api_usage *usage)
{
    put_head(out, head, head->chat ? "chat.completion" : "text_completion");
    for (uint32_t i = 0; i < n_choices; i++) {
        yard_api_put(out, i ? "," : "");
        put_choice(out, head, &choices[i], true);
    }
    yard_api_put(out, "]");
    put_usage(out, usage);
    yard_api_put(out, "}");
}

void yard_api_put_error(yard_api_out *out, const yard_api_error *err)
{
    put_text(out, "{\"error\":{\"message\":", err->message);
    put_text(out, ",\"type\":", err->type);
    put_text(out, ",\"param\":", err->param[0] ? err->param : NULL);
    put_text(out, ",\"code\":", err->code);
    yard_api_put(out, "}}");
}

void yard_api_put_models(yard_api_out *out, bool list, const char *model, int64_t created,
                         uint32_t context)
{
    yard_api_put(out, list ? "{\"object\":\"list\",\"data\":[" : "");
    put_text(out, "{\"id\":", model);
    put_count(out, ",\"object\":\"model\",\"created\":", created);
    put_count(out, ",\"owned_by\":\"switchyard\",\"max_model_len\":", context);
    put_count(out, ",\"context_length\":", context);
    yard_api_put(out, list ? "}]}" : "}");
}

void yard_api_put_tokens(yard_api_out *out, const int32_t *ids, size_t n_ids, uint32_t context)
{
    put_count(out, "{\"count\":", (int64_t)n_ids);
    put_count(out, ",\"max_model_len\":", context);
    yard_api_put(out, ",\"tokens\":[");
    for (size_t i = 0; i < n_ids; i++)
        put_count(out, i ? "," : "", ids[i]);
    yard_api_put(out, "]}");
}

void yard_api_put_detokenized(yard_api_out *out, const char *text, size_t n_bytes)
{
    yard_api_put(out, "{\"prompt\":");
    yard_api_put_string(out, text, n_bytes);
    yard_api_put(out, "}");
}

static const char *event_object(const yard_api_head *head)
{
    return head->chat ? "chat.completion.chunk" : "text_completion";
}

void yard_api_put_event(yard_api_out *out, const yard_api_head *head, const yard_api_choice *choice,
                        const yard_api_usage *usage)
{
    yard_api_put(out, "data: ");
    put_head(out, head, event_object(head));
    put_choice(out, head, choice, false);
    yard_api_put(out, "]");
    if (usage)
        put_usage(out, usage);
    else if (head->include_usage)
        yard_api_put(out, ",\"usage\":null");
    yard_api_put(out, "}\n\n");
}

void yard_api_put_usage_event(yard_api_out *out, const yard_api_head *head,
                              const yard_api_usage *usage)
{
    yard_api_put(out, "data: ");
    put_head(out, head, event_object(head));
    yard_api_put(out, "]");
    put_usage(out, usage);
    yard_api_put(out, "}\n\n");
}

void yard_api_put_done(yard_api_out *out)
{
    yard_api_put(out, "data: [DONE]\n\n");
}

void yard_api_put_error_event(yard_api_out *out, const yard_api_error *err)
{
    yard_api_put(out, "data: ");
    yard_api_put_error(out, err);
    yard_api_put(out, "\n\n");
}

void yard_api_put_keep_alive(yard_api_out *out)
{
    yard_api_put(out, ": keep-alive\n\n");
}
