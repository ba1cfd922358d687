/* One request on a connection: who may ask, what is asked, and the answer's way back. */
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

#include "serve/api_answer.h"
#include "serve/http_impl.h"

enum { INPUT_WHILE_ANSWERING_BYTES = 64 << 10 };

static struct bufferevent *bufferevent_of(struct evhttp_request *request)
{
    struct evhttp_connection *connection = evhttp_request_get_connection(request);

    return connection ? evhttp_connection_get_bufferevent(connection) : NULL;
}

static void set_timeouts(const yard_http *http, struct bufferevent *b, bool reading)
{
    const struct timeval t = { .tv_sec = (time_t)(http->config.read_timeout_us / 1000000),
                               .tv_usec = (suseconds_t)(http->config.read_timeout_us % 1000000) };

    bufferevent_set_timeouts(b, reading ? &t : NULL, &t);
}

/* While an answer is under way, reading is only for noticing that the client has left: what it
 * sends waits, and not without bounds, and its silence is no fault. */
static void stop_reading(yard_http *http, struct evhttp_request *request)
{
    struct bufferevent *b = bufferevent_of(request);
    const int fd = bufferevent_getfd(b), one = 1;
    bufferevent_data_cb read_cb, write_cb;
    bufferevent_event_cb event_cb;
    void *ctx;

    bufferevent_getcb(b, &read_cb, &write_cb, &event_cb, &ctx);
    bufferevent_setcb(b, NULL, write_cb, event_cb, ctx);
    bufferevent_setwatermark(b, EV_READ, 0, INPUT_WHILE_ANSWERING_BYTES);
    set_timeouts(http, b, false);
    bufferevent_enable(b, EV_READ);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)); /* a Unix socket has no delay */
    yard_http_guard_mark(&http->guard, yard_now_us(), fd, true);
}

/* The answer is out; evhttp goes back to reading by itself. */
static void resume_reading(struct evhttp_request *request, void *arg)
{
    yard_http *http = arg;
    struct bufferevent *b = bufferevent_of(request);

    bufferevent_setwatermark(b, EV_READ, 0, 0);
    set_timeouts(http, b, true);
    yard_http_guard_mark(&http->guard, yard_now_us(), bufferevent_getfd(b), false);
    yard_http_leave_if_drained(http);
}

static void on_close(struct evhttp_connection *connection, void *arg)
{
    yard_http_exchange *x = arg;
    const yard_front_summary summary = { .http_status = 499 };
    yard_http *http = x->http;

    (void)connection;
    yard_http_log(http, x->request, x->id, x->arrived_us, &summary);
    evhttp_request_free(x->request); /* evhttp has let go of it */
    if (x->job)
        yard_front_cancel(http->front, yard_now_us(), x->job);
    yard_http_drop(x);
    yard_http_set_wake(http);
}

static yard_http_exchange *open_exchange(yard_http *http, struct evhttp_request *request)
{
    yard_http_exchange *x = calloc(1, sizeof(*x));

    if (!x)
        return NULL;
    x->http = http;
    x->request = request;
    x->older = http->newest;
    if (http->newest)
        http->newest->newer = x;
    http->newest = x;
    http->n_exchanges++;
    return x;
}

void yard_http_drop(yard_http_exchange *x)
{
    yard_http *http = x->http;

    *(x->newer ? &x->newer->older : &http->newest) = x->older;
    if (x->older)
        x->older->newer = x->newer;
    http->n_exchanges--;
    free(x);
}

static const char *reason_of(int status)
{
    static const struct {
        int status;
        const char *reason;
    } reasons[] = {
        { 200, "OK" },
        { 400, "Bad Request" },
        { 401, "Unauthorized" },
        { 404, "Not Found" },
        { 405, "Method Not Allowed" },
        { 429, "Too Many Requests" },
        { 500, "Internal Server Error" },
        { 503, "Service Unavailable" },
        { 504, "Gateway Timeout" },
    };

    for (size_t i = 0; i < sizeof(reasons) / sizeof(reasons[0]); i++)
        if (reasons[i].status == status)
            return reasons[i].reason;
    return "Error";
}

static void add_headers(const yard_http *http, struct evhttp_request *request, const char *id,
                        const char *content_type)
{
    struct evkeyvalq *headers = evhttp_request_get_output_headers(request);

    evhttp_add_header(headers, "Content-Type", content_type);
    evhttp_add_header(headers, "X-Request-Id", id);
    if (http->draining)
        evhttp_add_header(headers, "Connection", "close");
}

static void finish(yard_http *http, struct evhttp_request *request, const char *id,
                   uint64_t arrived_us, const yard_front_summary *summary)
{
    yard_http_log(http, request, id, arrived_us, summary);
    evhttp_connection_set_closecb(evhttp_request_get_connection(request), NULL, NULL);
    evhttp_request_set_on_complete_cb(request, resume_reading, http);
}

static void reply(yard_http *http, struct evhttp_request *request, const char *id,
                  uint64_t arrived_us, const yard_front_summary *summary, const yard_api_out *body)
{
    struct evbuffer *b = evhttp_request_get_output_buffer(request);

    if (!body->no_memory)
        evbuffer_add(b, body->bytes, body->n_bytes);
    finish(http, request, id, arrived_us, summary);
    evhttp_send_reply(request, summary->http_status, reason_of(summary->http_status), NULL);
}

static void on_answer(void *ctx, const yard_front_summary *summary, const yard_api_out *body,
                      uint32_t retry_after_s)
{
    yard_http_exchange *x = ctx;
    char seconds[16];

    add_headers(x->http, x->request, x->id, "application/json");
    if (retry_after_s > 0) {
        snprintf(seconds, sizeof(seconds), "%u", retry_after_s);
        evhttp_add_header(evhttp_request_get_output_headers(x->request), "Retry-After", seconds);
    }
    reply(x->http, x->request, x->id, x->arrived_us, summary, body);
    yard_http_drop(x);
}

/* Out of memory, or the client has let too much pile up: the connection goes, and its request. */
static bool give_up(yard_http_exchange *x)
{
    const yard_front_summary summary = { .http_status = 499, .stream = true };
    struct evhttp_connection *connection = evhttp_request_get_connection(x->request);

    yard_http_log(x->http, x->request, x->id, x->arrived_us, &summary);
    evhttp_connection_set_closecb(connection, NULL, NULL);
    evhttp_connection_free(connection);
    yard_http_drop(x);
    return false;
}

static bool on_events(void *ctx, const yard_front_summary *summary, const yard_api_out *events)
{
    yard_http_exchange *x = ctx;
    struct bufferevent *b = bufferevent_of(x->request);
    struct evbuffer *chunk = evbuffer_new();
    bool good =
        !events->no_memory && chunk && evbuffer_add(chunk, events->bytes, events->n_bytes) == 0;

    if (good && !x->begun) {
        x->begun = true;
        add_headers(x->http, x->request, x->id, "text/event-stream; charset=utf-8");
        evhttp_add_header(evhttp_request_get_output_headers(x->request), "Cache-Control",
                          "no-cache");
        evhttp_send_reply_start(x->request, 200, reason_of(200));
    }
    if (good)
        evhttp_send_reply_chunk(x->request, chunk);
    if (chunk)
        evbuffer_free(chunk);
    good =
        good && evbuffer_get_length(bufferevent_get_output(b)) <= x->http->config.max_unread_bytes;
    if (!good)
        return give_up(x);
    if (summary) {
        finish(x->http, x->request, x->id, x->arrived_us, summary);
        evhttp_send_reply_end(x->request);
        yard_http_drop(x);
    }
    return true;
}

static const yard_front_sink sink = { .answer = on_answer, .events = on_events };

/* The client's own id, if it is one for logs and headers; else one of ours. */
static void choose_id(yard_http *http, struct evhttp_request *request, char id[64])
{
    const char *given =
        evhttp_find_header(evhttp_request_get_input_headers(request), "X-Request-Id");
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                  "-_.";

    if (given && given[0] && strlen(given) < 64 && strspn(given, allowed) == strlen(given))
        snprintf(id, 64, "%s", given);
    else
        snprintf(id, 64, "%016llx%08llx", (unsigned long long)http->id_base,
                 (unsigned long long)http->n_ids++);
}

/* In a time that does not tell how much of it was right. */
static bool equal_secrets(const char *a, const char *b)
{
    const size_t n_a = strlen(a), n_b = strlen(b);
    unsigned char differ = n_a != n_b;

    for (size_t i = 0; i < n_a; i++)
        differ |= (unsigned char)(a[i] ^ b[i < n_b ? i : n_b]);
    return !differ;
}

static bool may_ask(const yard_http *http, struct evhttp_request *request)
{
    static const char bearer[] = "Bearer ";
    const char *given =
        evhttp_find_header(evhttp_request_get_input_headers(request), "Authorization");

    if (http->config.n_api_keys == 0)
        return true;
    if (!given || strncasecmp(given, bearer, sizeof(bearer) - 1) != 0)
        return false;
    for (uint32_t i = 0; i < http->config.n_api_keys; i++)
        if (equal_secrets(given + sizeof(bearer) - 1, http->config.api_key[i]))
            return true;
    return false;
}

static void refuse(yard_http *http, struct evhttp_request *request, const char *id,
                   uint64_t arrived_us, int status, const char *code, const char *message)
{
    const yard_front_summary summary = { .http_status = status };
    struct evkeyvalq *headers = evhttp_request_get_output_headers(request);
    yard_api_error error = { .http_status = status,
                             .type = status >= 500 ? "server_error" : "invalid_request_error",
                             .code = code };
    yard_api_out out = { 0 };

    snprintf(error.message, sizeof(error.message), "%s", message);
    yard_api_put_error(&out, &error);
    add_headers(http, request, id, "application/json");
    if (status == 401)
        evhttp_add_header(headers, "WWW-Authenticate", "Bearer");
    if (status == 503)
        evhttp_add_header(headers, "Retry-After", "1");
    reply(http, request, id, arrived_us, &summary, &out);
    yard_api_out_release(&out);
}

static void show_page(yard_http *http, struct evhttp_request *request, const char *id,
                      uint64_t arrived_us, int status, const char *path, const yard_api_out *out)
{
    const yard_front_summary summary = { .http_status = status };

    add_headers(http, request, id,
                strcmp(path, "/metrics") ? "application/json" : "text/plain; version=0.0.4");
    reply(http, request, id, arrived_us, &summary, out);
}

static bool find_route(const char *path, yard_front_route *out)
{
    static const char *const paths[] = {
        [YARD_ROUTE_CHAT] = "/v1/chat/completions",
        [YARD_ROUTE_COMPLETIONS] = "/v1/completions",
        [YARD_ROUTE_TOKENIZE] = "/tokenize",
        [YARD_ROUTE_DETOKENIZE] = "/detokenize",
    };

    for (uint32_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++)
        if (!strcmp(path, paths[i])) {
            *out = (yard_front_route)i;
            return true;
        }
    return false;
}

static void submit(yard_http *http, struct evhttp_request *request, const char *id,
                   uint64_t arrived_us, yard_front_route route)
{
    struct evbuffer *input = evhttp_request_get_input_buffer(request);
    const size_t n_bytes = evbuffer_get_length(input);
    yard_http_exchange *x = open_exchange(http, request);
    char *body = malloc(n_bytes + 1);
    yard_front_job *job;

    if (!x || !body) {
        if (x)
            yard_http_drop(x);
        free(body);
        refuse(http, request, id, arrived_us, 500, NULL, "no memory for the request");
        return;
    }
    evbuffer_remove(input, body, n_bytes);
    body[n_bytes] = '\0';
    x->arrived_us = arrived_us;
    snprintf(x->id, sizeof(x->id), "%s", id);
    evhttp_connection_set_closecb(evhttp_request_get_connection(request), on_close, x);
    job = yard_front_submit(http->front, arrived_us, route, body, n_bytes, id, &sink, x);
    if (job) /* else x is gone */
        x->job = job;
    yard_http_set_wake(http);
}

void yard_http_take(struct evhttp_request *request, void *arg)
{
    yard_http *http = arg;
    const uint64_t now_us = yard_now_us();
    const char *path = evhttp_uri_get_path(evhttp_request_get_evhttp_uri(request));
    const enum evhttp_cmd_type method = evhttp_request_get_command(request);
    const bool open = path && (!strcmp(path, "/metrics") || !strncmp(path, "/health", 7));
    yard_api_out out = { 0 };
    yard_front_route route;
    char id[64];
    int status;

    choose_id(http, request, id);
    stop_reading(http, request);
    if (!path)
        path = "/";
    if (!open && !may_ask(http, request)) {
        refuse(http, request, id, now_us, 401, "invalid_api_key",
               "want a valid API key: Authorization: Bearer KEY");
    } else if (find_route(path, &route)) {
        if (method != EVHTTP_REQ_POST)
            refuse(http, request, id, now_us, 405, NULL, "want POST here");
        else if (http->draining)
            refuse(http, request, id, now_us, 503, NULL, "the server is shutting down");
        else
            submit(http, request, id, now_us, route);
    } else if (yard_http_page(http, path, &out, &status)) {
        if (method != EVHTTP_REQ_GET && method != EVHTTP_REQ_HEAD)
            refuse(http, request, id, now_us, 405, NULL, "want GET here");
        else
            show_page(http, request, id, now_us, status, path, &out);
    } else {
        refuse(http, request, id, now_us, 404, NULL, "no such path");
    }
    yard_api_out_release(&out);
}
