/* From a body to prompts of token ids: all that can be refused without knowing the engines, but for
 * the context. */
#include <stdlib.h>

#include "serve/front_impl.h"

enum { MAX_TOKENIZE_BYTES = 8 << 20 }; /* a second of work */

void yard_front_prepared_release(yard_front_prepared *p)
{
    for (uint32_t i = 0; i < p->n_prompts; i++) {
        free(p->prompt[i].ids);
        free(p->prompt[i].echo);
    }
    free(p->prompt);
    yard_api_out_release(&p->answer);
    yard_api_request_release(&p->request);
    *p = (yard_front_prepared){ 0 };
}

static bool is_chat(const yard_api_request *r)
{
    return r->messages != NULL;
}

static yard_status no_memory(yard_front_prepared *p)
{
    yard_error err;

    yard_fail(&err, YARD_ENOMEM, "no memory for the request");
    return yard_api_error_from(&p->error, &err);
}

/* Tokenising some text that cannot fit is work for nothing. A character of a normalised text can
 * be three times as long as what it becomes. */
static yard_status check_text(yard_front_prepared *p, const yard_front_model_data *m,
                              size_t n_bytes, uint32_t context)
{
    const size_t at_least = n_bytes / 3 / m->max_token_bytes;

    if (at_least < context)
        return YARD_OK;
    return yard_api_too_long(&p->error, is_chat(&p->request) ? "messages" : "prompt", context,
                             at_least > UINT32_MAX ? UINT32_MAX : (uint32_t)at_least);
}

/* Ids of a text; with_bos: after the BOS token, if the model has texts begin with it. */
static yard_status encode(yard_front_prepared *p, const yard_front_model_data *m,
                          yard_front_prompt *prompt, const char *text, size_t n_bytes,
                          bool with_bos, uint32_t context)
{
    const size_t n_bos = with_bos && m->bos >= 0 ? 1 : 0;
    yard_error err = { 0 };
    int32_t *ids = NULL;
    size_t n_ids = 0;
    yard_status st = check_text(p, m, n_bytes, context);

    if (st != YARD_OK)
        return st;
    st = yard_tokenizer_encode(m->tok, text, n_bytes, true, &ids, &n_ids, &err);
    if (st != YARD_OK)
        return yard_api_error_from(&p->error, &err);
    prompt->ids = malloc((n_bos + n_ids + 1) * sizeof(*ids));
    if (prompt->ids) {
        prompt->ids[0] = m->bos;
        memcpy(prompt->ids + n_bos, ids, n_ids * sizeof(*ids));
        prompt->n_ids = (uint32_t)(n_bos + n_ids);
    }
    free(ids);
    return prompt->ids ? YARD_OK : no_memory(p);
}

static bool ends_with(const char *text, size_t n_bytes, const char *end)
{
    const size_t n = strlen(end);

    return n_bytes >= n && !memcmp(text + n_bytes - n, end, n);
}

/* Where a thinking model's answer begins depends on what the template wrote last. */
static yard_reasoning_state begin_of(const yard_front_model_data *m, const char *text,
                                     size_t n_bytes)
{
    if (ends_with(text, n_bytes, "<think>") || ends_with(text, n_bytes, "<think>\n"))
        return YARD_REASONING_INSIDE;
    return yard_chat_template_thinks(m->tpl) ? YARD_REASONING_START : YARD_REASONING_ANSWER;
}

static yard_status prepare_messages(yard_front_prepared *p, const yard_front_model_data *m,
                                    uint32_t context)
{
    const yard_api_request *r = &p->request;
    yard_error err = { 0 };
    char *text = NULL;
    size_t n_text = 0;
    yard_status st = check_text(p, m, r->n_messages_bytes / 6, context); /* \u0041 is one byte */

    if (st != YARD_OK)
        return st;
    if (!m->tpl)
        return yard_api_error_from(&p->error, &m->no_template);
    st = yard_chat_template_render(m->tpl, m->tok, r->messages, r->n_messages_bytes,
                                   r->add_generation_prompt, &text, &n_text, &err);
    if (st != YARD_OK) {
        yard_api_error_from(&p->error, &err);
        memcpy(p->error.param, "messages", sizeof("messages"));
        return st;
    }
    p->begin = begin_of(m, text, n_text);
    st = encode(p, m, p->prompt, text, n_text, false, context);
    free(text);
    return st;
}

static yard_status copy_ids(yard_front_prepared *p, yard_front_prompt *prompt,
                            const yard_api_prompt *from)
{
    prompt->ids = malloc((from->n_ids + (size_t)1) * sizeof(*prompt->ids));
    if (!prompt->ids)
        return no_memory(p);
    memcpy(prompt->ids, from->ids, from->n_ids * sizeof(*prompt->ids));
    prompt->n_ids = from->n_ids;
    return YARD_OK;
}

static yard_status echo(yard_front_prepared *p, const yard_front_model_data *m,
                        yard_front_prompt *prompt, const yard_api_prompt *from)
{
    yard_error err = { 0 };

    if (from->text) {
        prompt->echo = malloc(from->n_bytes + 1);
        if (!prompt->echo)
            return no_memory(p);
        memcpy(prompt->echo, from->text, from->n_bytes);
        prompt->n_echo = from->n_bytes;
        return YARD_OK;
    }
    if (yard_tokenizer_decode(m->tok, prompt->ids, prompt->n_ids, true, &prompt->echo,
                              &prompt->n_echo, &err) != YARD_OK) {
        yard_api_error_from(&p->error, &err);
        memcpy(p->error.param, "prompt", sizeof("prompt"));
        return err.status;
    }
    return YARD_OK;
}

static yard_status prepare_prompts(yard_front_prepared *p, const yard_front_model_data *m,
                                   uint32_t context)
{
    const yard_api_request *r = &p->request;
    yard_status st = YARD_OK;

    p->begin = YARD_REASONING_ANSWER;
    for (uint32_t i = 0; i < p->n_prompts && st == YARD_OK; i++) {
        const yard_api_prompt *from = &r->prompt[i];
        yard_front_prompt *prompt = &p->prompt[i];

        st = from->text
                 ? encode(p, m, prompt, from->text, from->n_bytes, r->add_special_tokens, context)
                 : copy_ids(p, prompt, from);
        if (st == YARD_OK && prompt->n_ids == 0)
            st = yard_api_refuse(&p->error, NULL, "prompt", "want at least one token, got none");
        if (st == YARD_OK && r->echo)
            st = echo(p, m, prompt, from);
    }
    return st;
}

static yard_status parse(yard_front_prepared *p, const yard_front_model_data *m,
                         yard_front_route route, const char *body, size_t n_bytes)
{
    yard_api_request *r = &p->request;

    switch (route) {
    case YARD_ROUTE_CHAT:
        return yard_api_parse_chat(r, body, n_bytes, &m->limits, &p->error);
    case YARD_ROUTE_COMPLETIONS:
        return yard_api_parse_completion(r, body, n_bytes, &m->limits, &p->error);
    case YARD_ROUTE_TOKENIZE:
        return yard_api_parse_tokenize(r, body, n_bytes, &p->error);
    default:
        return yard_api_parse_detokenize(r, body, n_bytes, &p->error);
    }
}

static yard_status detokenize(yard_front_prepared *p, const yard_front_model_data *m)
{
    const yard_api_prompt *from = &p->request.prompt[0];
    yard_error err = { 0 };
    char *text = NULL;
    size_t n_bytes = 0;

    if (yard_tokenizer_decode(m->tok, from->ids, from->n_ids, false, &text, &n_bytes, &err)) {
        yard_api_error_from(&p->error, &err);
        memcpy(p->error.param, "tokens", sizeof("tokens"));
        return err.status;
    }
    yard_api_put_detokenized(&p->answer, text, n_bytes);
    free(text);
    return YARD_OK;
}

static yard_status prepare(yard_front_prepared *p, const yard_front_model_data *m,
                           yard_front_route route, uint32_t context)
{
    const yard_api_request *r = &p->request;
    yard_status st;

    if (r->model && strcmp(r->model, m->name) != 0)
        return yard_api_no_such_model(&p->error, r->model);
    if (route == YARD_ROUTE_DETOKENIZE)
        return detokenize(p, m);
    p->n_prompts = is_chat(r) ? 1 : r->n_prompts;
    p->prompt = calloc(p->n_prompts, sizeof(*p->prompt));
    if (!p->prompt) {
        p->n_prompts = 0;
        return no_memory(p);
    }
    if (is_chat(r))
        st = prepare_messages(p, m, context);
    else if (route == YARD_ROUTE_TOKENIZE && r->prompt[0].n_bytes > MAX_TOKENIZE_BYTES)
        st = yard_api_refuse(&p->error, NULL, "prompt", "want at most %d bytes, got %zu",
                             MAX_TOKENIZE_BYTES, r->prompt[0].n_bytes);
    else if (route == YARD_ROUTE_TOKENIZE)
        st = encode(p, m, p->prompt, r->prompt[0].text, r->prompt[0].n_bytes, r->add_special_tokens,
                    UINT32_MAX);
    else
        st = prepare_prompts(p, m, context);
    if (st == YARD_OK && route == YARD_ROUTE_TOKENIZE)
        yard_api_put_tokens(&p->answer, p->prompt[0].ids, p->prompt[0].n_ids, context);
    return st;
}

void yard_front_prepare(yard_front_prepared *out, const yard_front_model_data *m,
                        yard_front_route route, const char *body, size_t n_bytes, uint32_t context)
{
    *out = (yard_front_prepared){ 0 };
    if (parse(out, m, route, body, n_bytes) == YARD_OK)
        prepare(out, m, route, context);
}
