/* One choice of an answer: its tokens become text, thoughts, and what ends it. */
#include <math.h>
#include <stdlib.h>

#include "serve/front_impl.h"

void yard_front_choice_release(yard_front_choice *c)
{
    yard_text_stream_destroy(c->tokens);
    yard_text_stream_destroy(c->stops);
    yard_api_out_release(&c->thoughts);
    yard_api_out_release(&c->text);
    free(c->token);
    free(c->top);
    *c = (yard_front_choice){ 0 };
}

static uint32_t count_characters(const char *text, size_t n_bytes)
{
    uint32_t n = 0;

    for (size_t i = 0; i < n_bytes; i++)
        n += ((unsigned char)text[i] & 0xc0) != 0x80;
    return n;
}

yard_status yard_front_choice_open(yard_front_choice *c, uint32_t index,
                                   const yard_front_prepared *p, const yard_front_prompt *prompt,
                                   const yard_tokenizer *tok, yard_error *err)
{
    const yard_api_request *r = &p->request;
    yard_status st;

    yard_front_choice_release(c);
    c->index = index;
    c->reasoning.state = p->begin;
    if (prompt->echo) {
        yard_api_put_bytes(&c->text, prompt->echo, prompt->n_echo);
        c->n_chars = count_characters(prompt->echo, prompt->n_echo);
    }
    st = yard_text_stream_create(&c->tokens, tok, true, NULL, 0, err);
    if (st == YARD_OK && r->n_stop > 0)
        st = yard_text_stream_create(&c->stops, tok, true, r->stop, r->n_stop, err);
    return st;
}

static const char *find_stop(const yard_api_request *r, const char *text, size_t n_bytes)
{
    for (uint32_t i = 0; i < r->n_stop; i++)
        if (strlen(r->stop[i]) == n_bytes && !memcmp(r->stop[i], text, n_bytes))
            return r->stop[i];
    return NULL;
}

/* Text of the answer proper. */
static yard_status add_answer(yard_front_choice *c, const yard_api_request *r, const char *text,
                              size_t n_bytes, yard_error *err)
{
    bool stopped = false;
    yard_status st;

    if (c->stops) {
        st = yard_text_stream_push_text(c->stops, text, n_bytes, &text, &n_bytes, &stopped, err);
        if (st != YARD_OK)
            return st;
    }
    yard_api_put_bytes(&c->text, text, n_bytes);
    if (stopped) {
        text = yard_text_stream_stop(c->stops, &n_bytes);
        c->stop = find_stop(r, text, n_bytes);
        c->finish_reason = "stop";
    }
    return YARD_OK;
}

/* Text as the tokens say it; last: there will be no more. */
static yard_status add_text(yard_front_choice *c, const yard_api_request *r, const char *text,
                            size_t n_bytes, bool last, yard_error *err)
{
    yard_api_out answer = { 0 };
    yard_status st;

    if (c->reasoning.state == YARD_REASONING_ANSWER)
        return add_answer(c, r, text, n_bytes, err);
    yard_reasoning_push(&c->reasoning, text, n_bytes, &c->thoughts, &answer);
    if (last)
        yard_reasoning_finish(&c->reasoning, &c->thoughts, &answer);
    if (answer.no_memory)
        st = yard_fail(err, YARD_ENOMEM, "answer: no memory for its text");
    else
        st = add_answer(c, r, answer.bytes ? answer.bytes : "", answer.n_bytes, err);
    yard_api_out_release(&answer);
    return st;
}

/* What was held back, as no more tokens come. */
static yard_status finish_text(yard_front_choice *c, const yard_api_request *r, yard_error *err)
{
    const char *text;
    size_t n_bytes;
    yard_status st = yard_text_stream_finish(c->tokens, &text, &n_bytes, err);

    if (st == YARD_OK)
        st = add_text(c, r, text, n_bytes, true, err);
    if (st != YARD_OK || !c->stops)
        return st;
    st = yard_text_stream_finish(c->stops, &text, &n_bytes, err);
    if (st == YARD_OK)
        yard_api_put_bytes(&c->text, text, n_bytes);
    return st;
}

static yard_api_logprob logprob_of(const yard_tokenizer *tok, yard_token_logprob from)
{
    yard_api_logprob p = { .logprob = from.logprob };

    p.bytes = yard_tokenizer_token_bytes(tok, from.token, &p.n_bytes);
    if (!p.bytes)
        p = (yard_api_logprob){ .bytes = "", .logprob = from.logprob };
    return p;
}

static bool grow_logprobs(yard_front_choice *c, uint32_t n_top)
{
    if (c->n_tokens == c->max_tokens) {
        const uint32_t max = c->max_tokens ? 2 * c->max_tokens : 16;
        yard_api_token *larger = realloc(c->token, max * sizeof(*larger));

        if (!larger)
            return false;
        c->token = larger;
        c->max_tokens = max;
    }
    if (c->max_top - c->n_top < n_top) {
        const uint32_t max = 2 * (c->n_top + n_top);
        yard_api_logprob *larger = realloc(c->top, max * sizeof(*larger));

        if (!larger)
            return false;
        c->top = larger;
        c->max_top = max;
    }
    return true;
}

/* logprob: [n_logprobs] the token's own, then the likeliest. */
static yard_status add_logprobs(yard_front_choice *c, const yard_tokenizer *tok,
                                const yard_token_logprob *logprob, uint32_t n_logprobs,
                                uint32_t text_offset, yard_error *err)
{
    const uint32_t n_top = isnan(logprob[0].logprob) ? 0 : n_logprobs - 1;

    if (!grow_logprobs(c, n_top))
        return yard_fail(err, YARD_ENOMEM, "answer: no memory for log-probabilities");
    c->token[c->n_tokens++] = (yard_api_token){ .chosen = logprob_of(tok, logprob[0]),
                                                .n_top = n_top,
                                                .text_offset = text_offset };
    for (uint32_t i = 0; i < n_top; i++)
        c->top[c->n_top++] = logprob_of(tok, logprob[1 + i]);
    return YARD_OK;
}

static uint32_t characters_of(const yard_tokenizer *tok, int32_t id)
{
    size_t n_bytes = 0;
    const char *bytes = yard_tokenizer_token_bytes(tok, id, &n_bytes);

    return bytes && !yard_tokenizer_is_special(tok, id) ? count_characters(bytes, n_bytes) : 0;
}

/* Tokens of an echoed prompt have log-probabilities and no text: that is there already. */
static yard_status add_prompt(yard_front_choice *c, const yard_tokenizer *tok,
                              const yard_link_tokens *t, yard_error *err)
{
    yard_status st = YARD_OK;

    for (uint32_t i = 0; i < t->n_tokens && st == YARD_OK; i++) {
        if (t->logprob)
            st = add_logprobs(c, tok, t->logprob + i * t->n_logprobs, t->n_logprobs,
                              c->n_prompt_chars, err);
        c->n_prompt_chars += characters_of(tok, t->token[i]);
    }
    return st;
}

/* Ids that the vocabulary has room for but no text are possible with random weights. */
static yard_status add_token(yard_front_choice *c, const yard_api_request *r,
                             const yard_tokenizer *tok, int32_t id, yard_error *err)
{
    const bool thinks = c->reasoning.state != YARD_REASONING_ANSWER;
    const char *text;
    size_t n_bytes = 0;
    bool stopped;
    yard_status st;

    c->n_output++;
    if (!yard_tokenizer_token_bytes(tok, id, &n_bytes))
        return YARD_OK;
    st = yard_text_stream_push(c->tokens, id, &text, &n_bytes, &stopped, err);
    if (st == YARD_OK)
        st = add_text(c, r, text, n_bytes, false, err);
    if (thinks)
        c->n_reasoning = c->n_output;
    return st;
}

static bool is_stop_token(const yard_api_request *r, int32_t id)
{
    for (uint32_t i = 0; i < r->n_stop_token; i++)
        if (r->stop_token[i] == id)
            return true;
    return false;
}

static yard_status finish(yard_front_choice *c, const yard_api_request *r,
                          const yard_link_tokens *t, yard_error *err)
{
    const yard_status st = finish_text(c, r, err);
    const int32_t last = t->n_tokens > 0 ? t->token[t->n_tokens - 1] : -1;

    if (c->finish_reason) /* a stop string within what was held back */
        return st;
    c->finish_reason = t->finish == YARD_FINISH_STOP ? "stop" : "length";
    c->has_stop_token = t->finish == YARD_FINISH_STOP && is_stop_token(r, last);
    c->stop_token = last;
    return st;
}

yard_status yard_front_choice_push(yard_front_choice *c, const yard_front_prepared *p,
                                   const yard_tokenizer *tok, const yard_link_tokens *t,
                                   yard_error *err)
{
    const yard_api_request *r = &p->request;
    const bool may_think = c->reasoning.state == YARD_REASONING_START;
    yard_status st = YARD_OK;

    if (c->finish_reason)
        return YARD_OK;
    c->fresh = true;
    if (t->of_prompt)
        return add_prompt(c, tok, t, err);
    for (uint32_t i = 0; i < t->n_tokens && st == YARD_OK && !c->finish_reason; i++) {
        if (t->logprob)
            st = add_logprobs(c, tok, t->logprob + i * t->n_logprobs, t->n_logprobs, c->n_chars,
                              err);
        c->n_chars += characters_of(tok, t->token[i]);
        if (st == YARD_OK)
            st = add_token(c, r, tok, t->token[i], err);
    }
    if (may_think && c->reasoning.state == YARD_REASONING_ANSWER && c->thoughts.n_bytes == 0)
        c->n_reasoning = 0; /* it did not think at all */
    if (st == YARD_OK && !c->finish_reason && t->finish != YARD_RUNNING)
        st = finish(c, r, t, err);
    if (st == YARD_OK && (c->text.no_memory || c->thoughts.no_memory))
        st = yard_fail(err, YARD_ENOMEM, "answer: no memory for its text");
    return st;
}

yard_api_choice yard_front_choice_show(yard_front_choice *c, const yard_front_prepared *p)
{
    uint32_t first = 0;

    for (uint32_t i = 0; i < c->n_tokens; i++) {
        c->token[i].top = c->token[i].n_top > 0 ? &c->top[first] : NULL;
        first += c->token[i].n_top;
    }
    return (yard_api_choice){
        .index = c->index,
        .begins = !c->begun,
        .reasoning = c->thoughts.n_bytes > 0 ? c->thoughts.bytes : NULL,
        .n_reasoning = c->thoughts.n_bytes,
        .text = c->text.n_bytes > 0 ? c->text.bytes : NULL,
        .n_text = c->text.n_bytes,
        .logprobs = p->request.logprobs,
        .token = c->token,
        .n_tokens = c->n_tokens,
        .finish_reason = c->finish_reason,
        .stop = c->stop,
        .stop_token = c->has_stop_token ? &c->stop_token : NULL,
    };
}

void yard_front_choice_sent(yard_front_choice *c)
{
    c->begun = true;
    c->fresh = false;
    c->told = c->finish_reason != NULL;
    c->thoughts.n_bytes = c->text.n_bytes = 0;
    c->n_tokens = c->n_top = 0;
}
