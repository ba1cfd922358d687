/* Fixture of the HTTP server's tests: a server on a thread, with a front whose engine answers by
 * itself. A request gets max_new_tokens tokens at once, unless its seed says otherwise; reports
 * come five times a second. Include cmocka.h first. */
#ifndef TESTS_SERVE_HTTP_SERVER_H
#define TESTS_SERVE_HTTP_SERVER_H

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "serve/http.h"

enum { SEED_SILENT = 42, SEED_FLOOD = 43, MAX_REQUESTS = 8192, FLOOD_A_TURN = 64 };

typedef struct engine_request {
    uint64_t tag;
    uint64_t seed;
    uint32_t n_left;
} engine_request;

struct yard_link {
    int fd;
    bool said_up, reported;
    uint64_t n_seen;
    engine_request *request; /* [n_requests] */
    uint32_t n_requests, turn, n_this_turn;
};

static atomic_uint n_generated, n_aborted;
static const int32_t token = 72;

static inline void wake(yard_link *link)
{
    const struct itimerspec soon = { .it_value = { .tv_nsec = 1 },
                                     .it_interval = { .tv_nsec = 200000000 } };

    if (timerfd_settime(link->fd, 0, &soon, NULL) != 0)
        abort();
}

static inline yard_status engine_open(yard_link **out, const yard_link_config *config,
                                      yard_error *err)
{
    yard_link *link = calloc(1, sizeof(*link));

    (void)config;
    (void)err;
    link->fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    link->request = calloc(MAX_REQUESTS, sizeof(*link->request));
    wake(link);
    *out = link;
    return YARD_OK;
}

static inline void engine_close(yard_link *link)
{
    close(link->fd);
    free(link->request);
    free(link);
}

static inline int engine_fd(const yard_link *link)
{
    return link->fd;
}

static inline bool engine_next(yard_link *link, yard_link_event *out)
{
    uint64_t count;

    *out = (yard_link_event){ 0 };
    if (!link->said_up) {
        link->said_up = true;
        out->kind = YARD_LINK_UP;
        out->pod = (yard_link_pod){
            .n_instances = 1, .max_requests = MAX_REQUESTS, .context = 4096, .vocab = 4096
        };
        return true;
    }
    if (!link->reported) {
        link->reported = true;
        out->kind = YARD_LINK_REPORT;
        out->report =
            (yard_engine_report){ .n_seen = link->n_seen, .n_requests = link->n_requests };
        return true;
    }
    if (link->n_this_turn++ < FLOOD_A_TURN)
        for (uint32_t i = 0; i < link->n_requests; i++) {
            engine_request *r = &link->request[(link->turn + i) % link->n_requests];

            if (r->n_left == 0)
                continue;
            link->turn = (uint32_t)(r - link->request) + 1;
            r->n_left -= r->seed != SEED_FLOOD;
            out->kind = YARD_LINK_TOKENS;
            out->tokens =
                (yard_link_tokens){ .tag = r->tag,
                                    .token = &token,
                                    .n_tokens = 1,
                                    .finish = r->n_left ? YARD_RUNNING : YARD_FINISH_LENGTH };
            if (r->n_left == 0)
                *r = link->request[--link->n_requests];
            return true;
        }
    if (read(link->fd, &count, sizeof(count)) < 0)
        count = 0;
    if (link->n_this_turn > FLOOD_A_TURN)
        wake(link);
    link->n_this_turn = 0;
    link->reported = false;
    return false;
}

static inline bool engine_generate(yard_link *link, uint32_t instance, uint64_t tag,
                                   const yard_request *request)
{
    (void)instance;
    if (link->n_requests == MAX_REQUESTS)
        return false;
    link->request[link->n_requests++] = (engine_request){
        .tag = tag,
        .seed = request->sampling.seed,
        .n_left = request->sampling.seed == SEED_SILENT ? 0 : request->max_new_tokens,
    };
    atomic_fetch_add(&n_generated, 1);
    link->n_seen++;
    wake(link);
    return true;
}

static inline void engine_abort(yard_link *link, uint64_t tag, uint32_t choice)
{
    (void)choice;
    for (uint32_t i = 0; i < link->n_requests; i++)
        if (link->request[i].tag == tag) {
            link->request[i] = link->request[--link->n_requests];
            atomic_fetch_add(&n_aborted, 1);
        }
}

static const yard_link_ops engine = { .open = engine_open,
                                      .close = engine_close,
                                      .fd = engine_fd,
                                      .next = engine_next,
                                      .generate = engine_generate,
                                      .abort = engine_abort };

typedef struct server {
    yard_front *front;
    yard_http *http;
    int listen_fd, stop_fd;
    uint16_t port;
    pthread_t thread;
    FILE *log; /* NULL: none */
    char *log_text;
    size_t n_log;
} server;

static inline void *serve(void *arg)
{
    yard_error err = { 0 };
    server *s = arg;

    return (void *)(intptr_t)yard_http_run(s->http, &err);
}

static inline void quiet(void *ctx, const char *line)
{
    (void)ctx;
    (void)line;
}

static inline void listen_anywhere(server *s)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof(at);

    s->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(s->listen_fd, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(s->listen_fd, 4096), 0);
    assert_int_equal(getsockname(s->listen_fd, (struct sockaddr *)&at, &n), 0);
    s->port = ntohs(at.sin_port);
}

/* It listens; nothing is taken before start(). */
static inline server *prepare_server(yard_http_config config, bool log)
{
    static const char *const address = "here";
    yard_front_config front = YARD_FRONT_CONFIG_INIT;
    yard_error err = { 0 };
    server *s = calloc(1, sizeof(*s));

    front.model_dir = "models/demo";
    front.model = "demo";
    front.engine = &address;
    front.n_engines = 1;
    front.link = &engine;
    front.notify.warn = quiet;
    atomic_store(&n_generated, 0);
    atomic_store(&n_aborted, 0);
    if (yard_front_create(&s->front, &front, &err) != YARD_OK)
        fail_msg("%s", err.message);
    listen_anywhere(s);
    s->stop_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (log)
        s->log = open_memstream(&s->log_text, &s->n_log);
    config.listen_fd = s->listen_fd;
    config.stop_fd = s->stop_fd;
    config.access_log = s->log;
    if (yard_http_create(&s->http, &config, s->front, &err) != YARD_OK)
        fail_msg("%s", err.message);
    return s;
}

static inline void start(server *s)
{
    assert_int_equal(pthread_create(&s->thread, NULL, serve, s), 0);
}

static inline server *open_logging(yard_http_config config, bool log)
{
    server *s = prepare_server(config, log);

    start(s);
    return s;
}

static inline server *open_server(yard_http_config config)
{
    return open_logging(config, false);
}

static inline void stop(const server *s)
{
    const uint64_t one = 1;

    assert_int_equal(write(s->stop_fd, &one, sizeof(one)), sizeof(one));
}

static inline void close_server(server *s)
{
    void *st;

    stop(s);
    pthread_join(s->thread, &st);
    assert_ptr_equal(st, NULL);
    yard_http_destroy(s->http);
    yard_front_destroy(s->front);
    if (s->log)
        fclose(s->log);
    free(s->log_text);
    close(s->listen_fd);
    close(s->stop_fd);
    free(s);
}

#endif
