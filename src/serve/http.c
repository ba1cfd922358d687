/* The server's making and its loop. */
#include "serve/http.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

#include "serve/http_impl.h"

enum { LONGEST_WAIT_S = 3600 };

void yard_http_set_wake(yard_http *http)
{
    const uint64_t at_us = yard_front_wake_us(http->front), now_us = yard_now_us();
    uint64_t wait_us = at_us > now_us ? at_us - now_us : 0;
    struct timeval t;

    if (wait_us > (uint64_t)LONGEST_WAIT_S * 1000000)
        wait_us = (uint64_t)LONGEST_WAIT_S * 1000000;
    t = (struct timeval){ .tv_sec = (time_t)(wait_us / 1000000),
                          .tv_usec = (suseconds_t)(wait_us % 1000000) };
    event_add(http->wake, &t);
}

void yard_http_leave_if_drained(yard_http *http)
{
    uint32_t n_busy = 0;

    if (!http->draining)
        return;
    if (http->n_exchanges == 0)
        yard_http_guard_look(&http->guard, yard_now_us(), http->config.read_timeout_us, &n_busy);
    if ((http->n_exchanges == 0 && n_busy == 0) || yard_now_us() >= http->drain_until_us)
        event_base_loopexit(http->base, NULL);
}

static void look_whether_ready(yard_http *http)
{
    yard_front_health h;

    if (http->is_ready)
        return;
    yard_front_get_health(http->front, yard_now_us(), &h);
    if (h.n_pods_up == 0)
        return;
    http->is_ready = true;
    if (http->config.ready)
        http->config.ready(http->config.ready_ctx);
}

static void run_front(evutil_socket_t fd, short what, void *arg)
{
    yard_http *http = arg;

    (void)fd;
    (void)what;
    yard_front_run(http->front, yard_now_us());
    look_whether_ready(http);
    yard_http_leave_if_drained(http);
    yard_http_set_wake(http);
}

static void every_second(evutil_socket_t fd, short what, void *arg)
{
    yard_http *http = arg;
    const bool was_full = http->full;
    uint32_t n_busy;

    (void)fd;
    (void)what;
    http->n_connections =
        yard_http_guard_look(&http->guard, yard_now_us(), http->config.read_timeout_us, &n_busy);
    http->full = http->n_connections >= http->config.max_connections;
    if (http->full && !was_full)
        evconnlistener_disable(http->listener);
    if (!http->full && was_full)
        evconnlistener_enable(http->listener);
    yard_http_leave_if_drained(http);
}

/* evhttp asks for each new connection: the looks are a second apart, a flood is faster. */
static struct bufferevent *new_connection(struct event_base *base, void *arg)
{
    yard_http *http = arg;

    http->n_connections++;
    if (http->n_connections >= http->config.max_connections && !http->full) {
        http->full = true;
        evconnlistener_disable(http->listener);
    }
    return bufferevent_socket_new(base, -1, BEV_OPT_CLOSE_ON_FREE);
}

/* No descriptor is left: wait for the next look. */
static void on_accept_error(struct evconnlistener *listener, void *arg)
{
    yard_http *http = arg;

    http->full = true;
    evconnlistener_disable(listener);
}

/* Connections are taken until the end: whoever started this process may hold the socket as well,
 * and what nobody accepts would wait there unanswered. */
static void on_stop(evutil_socket_t fd, short what, void *arg)
{
    yard_http *http = arg;
    char buffer[512];

    (void)what;
    if (read(fd, buffer, sizeof(buffer)) < 0 && errno == EAGAIN)
        return;
    if (http->draining)
        http->drain_until_us = 0;
    if (!http->draining) {
        http->draining = true;
        http->drain_until_us = yard_now_us() + http->config.drain_timeout_us;
    }
    yard_http_leave_if_drained(http);
}

static yard_status watch_front(yard_http *http, yard_error *err)
{
    yard_front_health h;
    uint32_t n;
    int *fds;

    yard_front_get_health(http->front, yard_now_us(), &h);
    fds = calloc(h.n_pods + (size_t)1, sizeof(*fds));
    http->front_events = calloc(h.n_pods + (size_t)1, sizeof(struct event *));
    if (!fds || !http->front_events) {
        free(fds);
        return yard_fail(err, YARD_ENOMEM, "http: no memory");
    }
    n = yard_front_fds(http->front, fds);
    for (uint32_t i = 0; i < n; i++) {
        struct event *e = event_new(http->base, fds[i], EV_READ | EV_PERSIST, run_front, http);

        if (!e || event_add(e, NULL) != 0) {
            free(fds);
            return yard_fail(err, YARD_ENOMEM, "http: no memory");
        }
        http->front_events[http->n_front_events++] = e;
    }
    free(fds);
    return YARD_OK;
}

static yard_status listen_on(yard_http *http, yard_error *err)
{
    const int fd = fcntl(http->config.listen_fd, F_DUPFD_CLOEXEC, 0);

    if (fd < 0)
        return yard_fail(err, YARD_EIO, "http: listening socket: %s", strerror(errno));
    evutil_make_socket_nonblocking(fd);
    yard_http_guard_open(&http->guard, fd);
    http->listener = evconnlistener_new(http->base, NULL, NULL,
                                        LEV_OPT_CLOSE_ON_FREE | LEV_OPT_CLOSE_ON_EXEC, 0, fd);
    if (!http->listener) {
        close(fd);
        return yard_fail(err, YARD_ENOMEM, "http: no memory");
    }
    evconnlistener_set_error_cb(http->listener, on_accept_error);
    if (!evhttp_bind_listener(http->server, http->listener)) {
        evconnlistener_free(http->listener);
        http->listener = NULL;
        return yard_fail(err, YARD_ENOMEM, "http: no memory");
    }
    return YARD_OK;
}

static yard_status make_events(yard_http *http, yard_error *err)
{
    const struct timeval second = { .tv_sec = 1 };

    http->wake = evtimer_new(http->base, run_front, http);
    http->second = event_new(http->base, -1, EV_PERSIST, every_second, http);
    if (!http->wake || !http->second || event_add(http->second, &second) != 0)
        return yard_fail(err, YARD_ENOMEM, "http: no memory");
    if (http->config.stop_fd >= 0) {
        http->stop =
            event_new(http->base, http->config.stop_fd, EV_READ | EV_PERSIST, on_stop, http);
        if (!http->stop || event_add(http->stop, NULL) != 0)
            return yard_fail(err, YARD_ENOMEM, "http: no memory");
    }
    return YARD_OK;
}

static void configure(yard_http *http)
{
    const yard_http_config *c = &http->config;
    const struct timeval timeout = { .tv_sec = (time_t)(c->read_timeout_us / 1000000),
                                     .tv_usec = (suseconds_t)(c->read_timeout_us % 1000000) };

    evhttp_set_max_headers_size(http->server, (ev_ssize_t)c->max_header_bytes);
    evhttp_set_max_body_size(http->server, (ev_ssize_t)c->max_body_bytes);
    evhttp_set_timeout_tv(http->server, &timeout);
    evhttp_set_flags(http->server, EVHTTP_SERVER_LINGERING_CLOSE);
    evhttp_set_allowed_methods(http->server, EVHTTP_REQ_GET | EVHTTP_REQ_POST | EVHTTP_REQ_HEAD |
                                                 EVHTTP_REQ_PUT | EVHTTP_REQ_DELETE |
                                                 EVHTTP_REQ_OPTIONS | EVHTTP_REQ_PATCH);
    evhttp_set_bevcb(http->server, new_connection, http);
    evhttp_set_gencb(http->server, yard_http_take, http);
    if (getrandom(&http->id_base, sizeof(http->id_base), GRND_NONBLOCK) < 0)
        http->id_base = yard_now_us();
}

yard_status yard_http_create(yard_http **out, const yard_http_config *config, yard_front *front,
                             yard_error *err)
{
    yard_http *http = calloc(1, sizeof(*http));
    yard_status st = YARD_OK;

    if (!http)
        return yard_fail(err, YARD_ENOMEM, "http: no memory");
    http->config = *config;
    http->front = front;
    http->base = event_base_new();
    http->server = http->base ? evhttp_new(http->base) : NULL;
    if (!http->server)
        st = yard_fail(err, YARD_ENOMEM, "http: no memory");
    if (st == YARD_OK) {
        configure(http);
        st = make_events(http, err);
    }
    if (st == YARD_OK)
        st = watch_front(http, err);
    if (st == YARD_OK)
        st = listen_on(http, err);
    if (st != YARD_OK) {
        yard_http_destroy(http);
        return st;
    }
    *out = http;
    return YARD_OK;
}

yard_status yard_http_run(yard_http *http, yard_error *err)
{
    run_front(-1, 0, http); /* what came before there was a loop */
    if (event_base_dispatch(http->base) < 0)
        return yard_fail(err, YARD_EIO, "http: the event loop failed: %s", strerror(errno));
    return YARD_OK;
}

static void free_event(struct event *e)
{
    if (e)
        event_free(e);
}

void yard_http_destroy(yard_http *http)
{
    if (!http)
        return;
    while (http->newest) { /* cut off by the end of the drain */
        yard_http_exchange *x = http->newest;

        evhttp_connection_set_closecb(evhttp_request_get_connection(x->request), NULL, NULL);
        if (x->job)
            yard_front_cancel(http->front, yard_now_us(), x->job);
        yard_http_drop(x);
    }
    if (http->server)
        evhttp_free(http->server);
    for (uint32_t i = 0; i < http->n_front_events; i++)
        free_event(http->front_events[i]);
    free(http->front_events);
    free_event(http->wake);
    free_event(http->second);
    free_event(http->stop);
    yard_http_guard_close(&http->guard);
    if (http->base)
        event_base_free(http->base);
    free(http);
}
