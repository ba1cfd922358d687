/* The server of proto/engine.proto: fronts on one side, an engine on the other, which is a pod or
 * anything else with its functions (tests script one). It has no thread of its own but for the
 * RPC's: everything happens in yard_engine_server_run(). Private to the serve room's neighbours in
 * cli.
 *
 *     yard_engine_server_open(&server, &config, &err);
 *     while (!done && yard_engine_server_run(server, 1000000, &err) == YARD_OK)
 *         ;
 *     yard_engine_server_close(server);
 *
 * Threads: one caller at a time. */
#ifndef YARD_SERVE_ENGINE_SERVER_H
#define YARD_SERVE_ENGINE_SERVER_H

#include "serve/engine_link.h"

/* What an engine says about itself beside yard_link_pod. */
typedef struct yard_pod_state {
    yard_link_pod pod;
    bool serves;
    uint32_t n_ranks, n_ranks_alive;
} yard_pod_state;

/* As the functions of a pod of the same names. */
typedef struct yard_served_engine {
    void *ctx;
    void (*describe)(void *ctx, yard_pod_state *out);
    yard_status (*submit)(void *ctx, uint32_t instance, const yard_request *request, uint64_t *id,
                          yard_error *err); /* ids ascend */
    void (*abort)(void *ctx, uint64_t id, uint32_t choice);
    /* returns at the latest after timeout_us, earlier when there are events or fd is readable */
    yard_status (*run)(void *ctx, int fd, uint64_t timeout_us, yard_error *err);
    uint32_t (*poll)(void *ctx, yard_pod_event *events, uint32_t max_events);
    bool (*report)(void *ctx, uint32_t instance, yard_engine_report *out);
    uint32_t (*poll_pages)(void *ctx, yard_page_event *events, uint32_t max_events);
    void (*pages_anew)(void *ctx, uint32_t instance);
} yard_served_engine;

typedef struct yard_engine_server yard_engine_server;

typedef struct yard_engine_server_config {
    const char *address; /* "host:port", port 0: a free one; or "unix:path" */
    yard_served_engine engine;
    uint32_t max_requests; /* of all fronts at a time; more are refused; 0: 65,536 */
    size_t
        max_unsent_bytes; /* that a front may leave unread before its stream is ended; 0: 16 MiB */
    uint64_t late_us;     /* a step older than this is no progress; 0: 10 s */
} yard_engine_server_config;

/* Listens from now on. Errors: YARD_EINVAL, YARD_EIO, YARD_ENOMEM. The caller closes *out. */
yard_status yard_engine_server_open(yard_engine_server **out,
                                    const yard_engine_server_config *config, yard_error *err);
/* Ends all streams; the engine is left as it is. NULL is fine. */
void yard_engine_server_close(yard_engine_server *server);

const char *
yard_engine_server_address(const yard_engine_server *server); /* that clients connect to */

/* Does what is to be done for up to timeout_us. Errors: those of the engine's run. */
yard_status yard_engine_server_run(yard_engine_server *server, uint64_t timeout_us,
                                   yard_error *err);

/* Refuses requests from now on, so that fronts take them elsewhere; those under way go on. */
void yard_engine_server_drain(yard_engine_server *server);
/* No request is under way, and all outputs are on their way to the fronts. */
bool yard_engine_server_idle(const yard_engine_server *server);

#endif
