/* Bodies of API requests to plain structs. Everything that can be refused is refused here, by name,
 * before an answer has begun. Private to the serve room. */
#ifndef YARD_SERVE_API_REQUEST_H
#define YARD_SERVE_API_REQUEST_H

#include "engine/engine.h"
#include "serve/api_error.h"

/* One prompt: text or ids. Owned by the request. */
typedef struct yard_api_prompt {
    const char *text; /* [n_bytes] UTF-8 and a NUL; NULL: ids */
    size_t n_bytes;
    int32_t *ids; /* [n_ids], at least 0 each; NULL: text */
    uint32_t n_ids;
} yard_api_prompt;

/* A request to /v1/chat/completions or /v1/completions. Strings are UTF-8, NUL-terminated and owned
 * by the request. */
typedef struct yard_api_request {
    const char *model;
    char *messages; /* JSON array for yard_chat_template_render(), role developer as system; NULL:
                     * prompt
                     */
    size_t n_messages_bytes;
    yard_api_prompt *prompt; /* [n_prompts] */
    uint32_t n_prompts;
    bool add_special_tokens;    /* BOS before a text; default true */
    bool add_generation_prompt; /* after messages; default true */

    uint32_t max_new_tokens; /* UINT32_MAX: up to the context */
    yard_sampling sampling;  /* what the body does not say is as in the defaults */
    bool has_seed;           /* false: sampling.seed is the defaults' */
    yard_logit_bias *bias;   /* [n_bias] */
    uint32_t n_bias;
    const char **stop; /* [n_stop] */
    uint32_t n_stop;
    int32_t *stop_token; /* [n_stop_token] */
    uint32_t n_stop_token;
    bool ignore_eos;

    uint32_t n; /* choices of each prompt */
    bool echo;
    bool logprobs;
    uint32_t top_logprobs; /* alternatives of each token, with logprobs */
    bool stream;
    bool include_usage;    /* an extra last chunk */
    bool continuous_usage; /* in every chunk */

    void *json; /* the body, which strings point into */
} yard_api_request;

/* What a body may ask for and what it gets when it does not. */
typedef struct yard_api_limits {
    yard_sampling defaults; /* OpenAI's: temperature 1, top_p 1 */
    uint32_t max_n;         /* choices of a request, over all its prompts */
    uint32_t max_stop;      /* stop strings, and stop token ids */
    uint32_t max_top_logprobs;
} yard_api_limits;

#define YARD_API_LIMITS_INIT                                                                       \
    {                                                                                              \
        .defaults = { .temperature = 1.0f, .top_p = 1.0f, .repetition_penalty = 1.0f },            \
        .max_n = 128, .max_stop = 16, .max_top_logprobs = 20                                       \
    }

/* Null is as good as absent everywhere. Unknown members are ignored. On success the caller releases
 * *out. Errors: YARD_EINVAL with a 400 in err, YARD_ENOMEM with a 500. */
yard_status yard_api_parse_chat(yard_api_request *out, const char *body, size_t n_bytes,
                                const yard_api_limits *limits, yard_api_error *err);
yard_status yard_api_parse_completion(yard_api_request *out, const char *body, size_t n_bytes,
                                      const yard_api_limits *limits, yard_api_error *err);

/* {"prompt"} or {"messages"} of /tokenize and {"tokens"} of /detokenize: into messages or one
 * prompt. */
yard_status yard_api_parse_tokenize(yard_api_request *out, const char *body, size_t n_bytes,
                                    yard_api_error *err);
yard_status yard_api_parse_detokenize(yard_api_request *out, const char *body, size_t n_bytes,
                                      yard_api_error *err);

void yard_api_request_release(yard_api_request *request); /* all zero is fine */

#endif
