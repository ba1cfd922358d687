/* The HTTP server over a front: routes, keys, limits, log. One loop on the calling thread.
 *
 *     POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize
 *     GET  /v1/models, /v1/models/NAME, /health/live, /health/ready, /health/progress, /metrics
 *
 * A client that leaves ends its request at once, also before the first token. A client that closes
 * only its sending side counts as one that leaves: the two cannot be told apart in time. */
#ifndef YARD_SERVE_HTTP_H
#define YARD_SERVE_HTTP_H

#include <stdio.h>

#include "serve/front.h"

typedef struct yard_http yard_http;

typedef struct yard_http_config {
    size_t size;                /* set by the initialiser */
    int listen_fd;              /* a listening socket, borrowed; required */
    int stop_fd;                /* readable: drain; readable once more: leave. Signals of a signalfd
                                   are read off it. -1: none */
    const char *const *api_key; /* [n_api_keys] one of which a request must bear, but to /health and
                                   /metrics; none: no key is asked for. Borrowed */
    uint32_t n_api_keys;
    FILE *access_log;          /* JSON lines, borrowed; NULL: none */
    uint32_t max_connections;  /* further ones wait; default 4,096 */
    size_t max_header_bytes;   /* default 64 KiB */
    size_t max_body_bytes;     /* default 64 MiB */
    size_t max_unread_bytes;   /* of a stream, after which it ends; default 1 MiB */
    uint64_t read_timeout_us;  /* for a whole request, from the connection's beginning or its last
                                  answer; default 75 s */
    uint64_t drain_timeout_us; /* for requests under way after stop_fd; default 30 s */
    void (*ready)(void *ctx);  /* called once, when the first engine is up; may be NULL */
    void *ready_ctx;
} yard_http_config;

#define YARD_HTTP_CONFIG_INIT                                                                      \
    {                                                                                              \
        .size = sizeof(yard_http_config), .listen_fd = -1, .stop_fd = -1, .max_connections = 4096, \
        .max_header_bytes = 64 << 10, .max_body_bytes = 64 << 20, .max_unread_bytes = 1 << 20,     \
        .read_timeout_us = 75000000, .drain_timeout_us = 30000000                                  \
    }

/* front is borrowed and must outlive *out. Errors: YARD_EINVAL, YARD_EIO, YARD_ENOMEM. */
yard_status yard_http_create(yard_http **out, const yard_http_config *config, yard_front *front,
                             yard_error *err);
/* Serves until stop_fd has said so and what was under way has ended. Errors: YARD_EIO. */
yard_status yard_http_run(yard_http *http, yard_error *err);
void yard_http_destroy(yard_http *http); /* NULL is fine */

#endif
