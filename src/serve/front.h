/* The front: requests of the OpenAI API, from the bytes of a body to the bytes of an answer. It
 * reads and tokenises a request, lets the scheduler choose an instance, sends it there over the
 * pod's link, and turns what comes back into text, stop strings, thoughts, log-probabilities and
 * usage. It has no socket: http.c is its caller, tests are another.
 *
 *     yard_front_create(&front, &config, &err);
 *     job = yard_front_submit(front, now_us, route, body, n_bytes, &sink, ctx);
 *     ... when one of yard_front_fds() is readable, and no later than yard_front_wake_us():
 *     yard_front_run(front, now_us);
 *
 * Threads: one caller at a time; a thread of its own reads the bodies that are long. */
#ifndef YARD_SERVE_FRONT_H
#define YARD_SERVE_FRONT_H

#include "model/model.h"
#include "serve/api_out.h"
#include "serve/api_request.h"
#include "serve/engine_link.h"

typedef struct yard_front yard_front;
typedef struct yard_front_job yard_front_job; /* a request that is being answered */

/* engine_link.h's functions, or what stands for them in a test. */
typedef struct yard_link_ops {
    yard_status (*open)(yard_link **out, const yard_link_config *config, yard_error *err);
    void (*close)(yard_link *link);
    int (*fd)(const yard_link *link);
    bool (*next)(yard_link *link, yard_link_event *out);
    bool (*generate)(yard_link *link, uint32_t instance, uint64_t tag, const yard_request *request);
    void (*abort)(yard_link *link, uint64_t tag, uint32_t choice);
} yard_link_ops;

typedef struct yard_front_config {
    size_t size;               /* set by the initialiser */
    const char *model_dir;     /* for its tokenizer, template and defaults; required */
    const char *model;         /* the name that clients use; required */
    const char *const *engine; /* [n_engines] addresses of pods; required */
    uint32_t n_engines;
    const yard_link_ops *link;   /* required */
    const char *template_name;   /* NULL: by the checkpoint's own */
    uint32_t max_queued;         /* requests that wait for room; default 1,024 */
    uint64_t request_timeout_us; /* of a request, from its arrival; default an hour */
    uint64_t keep_alive_us;      /* silence after which a stream gets a comment; default 5 s */
    size_t long_body_bytes;      /* longer bodies are read by the thread; default 16 KiB, 2 ms */
    yard_notify notify;          /* warnings: engines that come and go */
} yard_front_config;

#define YARD_FRONT_CONFIG_INIT                                                                     \
    {                                                                                              \
        .size = sizeof(yard_front_config), .max_queued = 1024, .request_timeout_us = 3600000000,   \
        .keep_alive_us = 5000000, .long_body_bytes = 16 << 10                                      \
    }

enum { YARD_FRONT_MAX_POD_INSTANCES = 64 };

/* Strings of the config are copied but for link. Errors: YARD_EINVAL, YARD_EIO, YARD_EFORMAT,
 * YARD_ENOTSUP, YARD_ENOMEM. */
yard_status yard_front_create(yard_front **out, const yard_front_config *config, yard_error *err);
/* Every job must have ended or been cancelled. NULL is fine. */
void yard_front_destroy(yard_front *front);

/* requests */

typedef enum yard_front_route {
    YARD_ROUTE_CHAT,
    YARD_ROUTE_COMPLETIONS,
    YARD_ROUTE_TOKENIZE,
    YARD_ROUTE_DETOKENIZE
} yard_front_route;

/* For the log and the metrics of a request that has ended. */
typedef struct yard_front_summary {
    int http_status;
    bool stream;
    uint32_t n_prompt, n_cached, n_output;
    uint64_t first_token_us; /* from arrival; 0: there was none */
} yard_front_summary;

/* Where an answer goes. Each job ends with exactly one answer() or one events() that is the last,
 * unless it is cancelled. No call of the front may be made from within. */
typedef struct yard_front_sink {
    /* A whole answer; retry_after_s: 0: none. */
    void (*answer)(void *ctx, const yard_front_summary *summary, const yard_api_out *body,
                   uint32_t retry_after_s);
    /* Server-sent events; the first call begins an answer of status 200. summary: NULL unless these
     * are the last. False: the client is gone or does not read; the job ends, nothing follows.
     * events->no_memory: they are lost, so the connection must be cut, and false be returned. */
    bool (*events)(void *ctx, const yard_front_summary *summary, const yard_api_out *events);
} yard_front_sink;

/* Takes a request. body [n_bytes] is malloc'd and passes to the front; id, of at most 63
 * characters, is for the answer's id. Returns NULL when it was answered at once. */
yard_front_job *yard_front_submit(yard_front *front, uint64_t now_us, yard_front_route route,
                                  char *body, size_t n_bytes, const char *id,
                                  const yard_front_sink *sink, void *ctx);
/* The client is gone: the request ends everywhere, the sink hears nothing any more. */
void yard_front_cancel(yard_front *front, uint64_t now_us, yard_front_job *job);

/* the loop */

/* fds [1 + n_engines], all to be watched for reading; returns how many. */
uint32_t yard_front_fds(const yard_front *front, int *fds);
void yard_front_run(yard_front *front, uint64_t now_us);
uint64_t yard_front_wake_us(const yard_front *front);

/* what it knows */

typedef struct yard_front_health {
    uint32_t n_pods, n_pods_up, n_instances_up;
    uint32_t n_jobs, n_queued;
    uint64_t
        step_age_us; /* the largest of all instances: since the last step while there is work */
    bool stuck; /* an instance has work and has not finished a step, or said so, for 2 s; of one
                   that drains nothing is expected */
} yard_front_health;

void yard_front_get_health(const yard_front *front, uint64_t now_us, yard_front_health *out);

const char *yard_front_model(const yard_front *front);
uint32_t yard_front_context(const yard_front *front); /* the pods', or the model's own before */
int64_t yard_front_created(const yard_front *front);  /* Unix time */

/* Appends the metrics of engines, scheduler and requests in Prometheus' text format. */
void yard_front_put_metrics(const yard_front *front, uint64_t now_us, yard_api_out *out);

#endif
