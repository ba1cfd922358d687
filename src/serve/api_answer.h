/* Answers in the shapes that clients of the OpenAI API read: whole, as server-sent events, and
 * errors. Everything appends to a yard_api_out. Strings that come without a length are
 * NUL-terminated. Private to the serve room. */
#ifndef YARD_SERVE_API_ANSWER_H
#define YARD_SERVE_API_ANSWER_H

#include "serve/api_error.h"
#include "serve/api_out.h"

/* The same in every event of an answer. */
typedef struct yard_api_head {
    const char *id;
    int64_t created; /* Unix time, seconds */
    const char *model;
    const char *fingerprint; /* what computes, as seeds need it; NULL: left out */
    bool chat;               /* false: completions */
    bool include_usage;      /* events have "usage": null, but for the one that has it */
} yard_api_head;

typedef struct yard_api_usage {
    uint32_t n_prompt, n_cached;    /* cached: of the prompt's */
    uint32_t n_output, n_reasoning; /* reasoning: of the output's */
} yard_api_usage;

/* A token's own bytes, not always whole characters. */
typedef struct yard_api_logprob {
    const char *bytes;
    size_t n_bytes;
    float logprob; /* NaN: none (the first token of an echoed prompt) */
} yard_api_logprob;

typedef struct yard_api_token {
    yard_api_logprob chosen;
    const yard_api_logprob *top; /* [n_top], likeliest first */
    uint32_t n_top;
    uint32_t text_offset; /* completions: characters of the choice's text before it */
} yard_api_token;

/* A choice, or what is new of it. */
typedef struct yard_api_choice {
    uint32_t index;
    bool begins;           /* an event: the first of the choice, which says the role */
    const char *reasoning; /* [n_reasoning] before any text; NULL: none */
    size_t n_reasoning;
    const char *text; /* [n_text]; NULL: none */
    size_t n_text;
    bool logprobs;               /* wished; false: null */
    const yard_api_token *token; /* [n_tokens] */
    uint32_t n_tokens;
    const char *finish_reason; /* "stop", "length"; NULL: not yet */
    const char *stop;          /* the stop string that ended it; NULL: none */
    const int32_t *stop_token; /* the stop token id that did, if stop is NULL; NULL: none */
} yard_api_choice;

/* whole answers */

void yard_api_put_answer(yard_api_out *out, const yard_api_head *head,
                         const yard_api_choice *choices, uint32_t n_choices,
                         const yard_api_usage *usage);

/* {"error": {message, type, param, code}} */
void yard_api_put_error(yard_api_out *out, const yard_api_error *err);

/* The list of /v1/models, which has one, or (list false) that one. */
void yard_api_put_models(yard_api_out *out, bool list, const char *model, int64_t created,
                         uint32_t context);

void yard_api_put_tokens(yard_api_out *out, const int32_t *ids, size_t n_ids, uint32_t context);
void yard_api_put_detokenized(yard_api_out *out, const char *text, size_t n_bytes);

/* events */

/* usage: of this moment, NULL unless it was asked for in every event. */
void yard_api_put_event(yard_api_out *out, const yard_api_head *head, const yard_api_choice *choice,
                        const yard_api_usage *usage);
/* The extra last event, which has no choices; only if it was asked for. */
void yard_api_put_usage_event(yard_api_out *out, const yard_api_head *head,
                              const yard_api_usage *usage);
void yard_api_put_done(yard_api_out *out); /* after all went well */
/* Instead of done, once an answer has begun and cannot go on. */
void yard_api_put_error_event(yard_api_out *out, const yard_api_error *err);
/* A comment, for clients that give up on silence while a long prompt is computed. */
void yard_api_put_keep_alive(yard_api_out *out);

#endif
