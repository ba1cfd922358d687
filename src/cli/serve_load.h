/* Load on a server that speaks the OpenAI API: prompts, streams, and when their tokens came. */
#ifndef YARD_CLI_SERVE_LOAD_H
#define YARD_CLI_SERVE_LOAD_H

#include <yard/engine.h>

#include "cli/cli.h"

/* what is asked: serve_prompts.c */

typedef enum yard_load_lengths {
    YARD_LENGTHS_FIXED,
    YARD_LENGTHS_CHAT /* log-normal with the given medians: most are short, some are long */
} yard_load_lengths;

/* Equal workloads ask for the same prompts in the same order. */
typedef struct yard_load_workload {
    uint64_t seed;
    yard_load_lengths lengths;
    uint32_t n_prompt, n_output;          /* tokens of a request, a shared prefix not counted */
    uint32_t n_prefixes, n_prefix_tokens; /* each request begins with one of them; 0: none */
    uint32_t n_distinct;                  /* different prompts, taken in turn; 0: all differ */
    uint32_t first_id, n_ids; /* token ids are drawn from [first_id, first_id + n_ids) */
} yard_load_workload;

typedef struct yard_load_prompt {
    int32_t *ids; /* [n_ids], malloc'd, the caller's */
    uint32_t n_ids, n_output;
} yard_load_prompt;

/* The prompt of request i. False: no memory. */
bool yard_load_prompt_of(const yard_load_workload *w, uint64_t i, yard_load_prompt *out);

/* Exponentially distributed with mean 1; of request i. */
double yard_load_pause(const yard_load_workload *w, uint64_t i);

/* the load: serve_load.c */

typedef struct yard_load_server {
    const char *url;   /* http://host:port */
    const char *model; /* NULL: the first that the server has */
    const char *api_key;
    uint32_t timeout_s; /* of silence, for each request */
} yard_load_server;

typedef struct yard_load yard_load;

/* Asks the server for its models; waits. Errors: YARD_EINVAL (the URL), YARD_EIO with what the
 * server said, YARD_ENOMEM. */
yard_status yard_load_open(yard_load **out, const yard_load_server *server, yard_error *err);
void yard_load_close(yard_load *load); /* NULL is fine */
const char *yard_load_model(const yard_load *load);

typedef struct yard_load_plan {
    yard_load_workload workload;
    uint64_t n_requests;
    uint32_t n_clients; /* closed loop: each sends its next request when the last one ended */
    double rate;        /* open loop, with n_clients 0: requests a second, Poisson */
    char **expected;    /* [workload.n_distinct] texts that answers must equal; NULL: only their
                           length is checked */
} yard_load_plan;

typedef struct yard_load_samples {
    double *us; /* [n] */
    size_t n, capacity;
} yard_load_samples;

bool yard_load_add_sample(yard_load_samples *s, uint64_t us); /* false: no memory */

typedef struct yard_load_result {
    /* until the first token; between events with tokens; until the end. In an open loop from when a
     * request was due, also if it could be sent only later. */
    yard_load_samples ttft, gap, whole;
    uint64_t n_done, n_refused, n_failed, n_wrong;              /* refused: 429; wrong: of done */
    uint64_t n_prompt_tokens, n_cached_tokens, n_output_tokens; /* as the server counts them */
    double seconds;                                             /* first request to last answer */
    char first_failure[256];                                    /* what it was */
} yard_load_result;

/* Sends and waits for everything. Errors: YARD_ENOMEM; failed requests are in the result. The
 * caller releases *out. */
yard_status yard_load_run(yard_load *load, const yard_load_plan *plan, yard_load_result *out,
                          yard_error *err);
void yard_load_result_release(yard_load_result *result);

/* The same on an engine in this process, without text: serve_local.c. Of plan->expected nothing is
 * read. Errors: those of the engine, YARD_ENOMEM. */
yard_status yard_load_run_engine(yard_engine *engine, const yard_load_plan *plan,
                                 yard_load_result *out, yard_error *err);

/* The text of the answer to prompt i, asked for alone; malloc'd. Errors: YARD_EIO, YARD_ENOMEM. */
yard_status yard_load_ask(yard_load *load, const yard_load_workload *w, uint64_t i, char **text,
                          yard_error *err);

#endif
