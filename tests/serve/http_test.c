/* The HTTP server with a front whose engine answers by itself; clients are bare sockets, so that
 * they can be as bad as they like. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <malloc.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "serve/http.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

enum { PATIENCE_MS = 60000 };

/* ---- an engine that answers by itself
 * ------------------------------------------------------------
 *
 * A request gets max_new_tokens tokens at once, unless its seed says otherwise. Reports come five
 * times a second. */

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

static void wake(yard_link *link)
{
    const struct itimerspec soon = { .it_value = { .tv_nsec = 1 },
                                     .it_interval = { .tv_nsec = 200000000 } };

    if (timerfd_settime(link->fd, 0, &soon, NULL) != 0)
        abort();
}

static yard_status engine_open(yard_link **out, const yard_link_config *config, yard_error *err)
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

static void engine_close(yard_link *link)
{
    close(link->fd);
    free(link->request);
    free(link);
}

static int engine_fd(const yard_link *link)
{
    return link->fd;
}

static bool engine_next(yard_link *link, yard_link_event *out)
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

static bool engine_generate(yard_link *link, uint32_t instance, uint64_t tag,
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

static void engine_abort(yard_link *link, uint64_t tag, uint32_t choice)
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

/* ---- a server on a thread
 * ------------------------------------------------------------------------ */

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

static void *serve(void *arg)
{
    yard_error err = { 0 };
    server *s = arg;

    return (void *)(intptr_t)yard_http_run(s->http, &err);
}

static void quiet(void *ctx, const char *line)
{
    (void)ctx;
    (void)line;
}

static void listen_anywhere(server *s)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof(at);

    s->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(s->listen_fd, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(s->listen_fd, 4096), 0);
    assert_int_equal(getsockname(s->listen_fd, (struct sockaddr *)&at, &n), 0);
    s->port = ntohs(at.sin_port);
}

static server *open_logging(yard_http_config config, bool log)
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
    assert_int_equal(pthread_create(&s->thread, NULL, serve, s), 0);
    return s;
}

static server *open_server(yard_http_config config)
{
    return open_logging(config, false);
}

static void stop(const server *s)
{
    const uint64_t one = 1;

    assert_int_equal(write(s->stop_fd, &one, sizeof(one)), sizeof(one));
}

static void close_server(server *s)
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

/* ---- a client
 * -------------------------------------------------------------------------------------- */

static int connect_to(const server *s)
{
    struct sockaddr_in to = { .sin_family = AF_INET,
                              .sin_port = htons(s->port),
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
    return fd;
}

/* What the server no longer takes is not this function's business. */
static void send_bytes(int fd, const char *bytes, size_t n_bytes)
{
    while (n_bytes > 0) {
        const ssize_t n = send(fd, bytes, n_bytes, MSG_NOSIGNAL);

        if (n <= 0)
            return;
        bytes += n;
        n_bytes -= (size_t)n;
    }
}

static void send_text(int fd, const char *text)
{
    send_bytes(fd, text, strlen(text));
}

static void post(int fd, const char *path, const char *headers, const char *body)
{
    char head[512];

    snprintf(head, sizeof(head), "POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %zu\r\n\r\n",
             path, headers, strlen(body));
    send_text(fd, head);
    send_text(fd, body);
}

typedef struct answer {
    int status; /* 0: the connection ended without one */
    char *text; /* head and body, NUL-terminated */
    size_t n_bytes;
    const char *body;
} answer;

/* One more piece; false at the end. */
static bool receive(int fd, answer *a)
{
    struct pollfd wait = { .fd = fd, .events = POLLIN };
    ssize_t n;

    assert_int_equal(poll(&wait, 1, PATIENCE_MS), 1);
    a->text = realloc(a->text, a->n_bytes + 65537);
    n = recv(fd, a->text + a->n_bytes, 65536, 0);
    if (n <= 0)
        n = 0;
    a->n_bytes += (size_t)n;
    a->text[a->n_bytes] = '\0';
    return n > 0;
}

static bool is_whole(answer *a)
{
    const char *end = a->text ? strstr(a->text, "\r\n\r\n") : NULL, *length;

    if (!end)
        return false;
    a->body = end + 4;
    a->status = atoi(a->text + 9);
    length = strcasestr(a->text, "\r\nContent-Length:");
    if (length && length < end)
        return strlen(a->body) >= strtoul(length + 17, NULL, 10);
    return strstr(a->body, "\r\n0\r\n\r\n") != NULL; /* chunked */
}

static answer read_answer(int fd)
{
    answer a = { 0 };

    while (!is_whole(&a) && receive(fd, &a))
        ;
    return a;
}

/* One request on a connection of its own; returns the status. */
static int ask(const server *s, const char *path, const char *headers, const char *body)
{
    const int fd = connect_to(s);
    answer a;
    int status;

    post(fd, path, headers, body);
    a = read_answer(fd);
    status = a.status;
    free(a.text);
    close(fd);
    return status;
}

static answer get(const server *s, const char *path, const char *headers)
{
    const int fd = connect_to(s);
    char head[512];
    answer a;

    snprintf(head, sizeof(head), "GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n", path, headers);
    send_text(fd, head);
    a = read_answer(fd);
    close(fd);
    return a;
}

static int get_status(const server *s, const char *path)
{
    answer a = get(s, path, "");

    free(a.text);
    return a.status;
}

/* The value of a metric without labels. */
static double metric(const server *s, const char *name)
{
    answer a = get(s, "/metrics", "");
    char line[128];
    const char *at;
    double value = -1;

    assert_int_equal(a.status, 200);
    snprintf(line, sizeof(line), "\n%s ", name);
    at = strstr(a.body, line);
    if (at)
        value = atof(at + strlen(line));
    free(a.text);
    return value;
}

static void nap(void)
{
    poll(NULL, 0, 2);
}

static void wait_for(atomic_uint *counter, unsigned at_least)
{
    const uint64_t until_us = yard_now_us() + (uint64_t)PATIENCE_MS * 1000;

    while (atomic_load(counter) < at_least) {
        assert_true(yard_now_us() < until_us);
        nap();
    }
}

static void wait_for_no_jobs(const server *s)
{
    const uint64_t until_us = yard_now_us() + (uint64_t)PATIENCE_MS * 1000;

    while (metric(s, "switchyard_jobs") > 0) {
        assert_true(yard_now_us() < until_us);
        nap();
    }
}

/* The end of a connection, whatever comes before it. */
static answer read_to_end(int fd)
{
    answer a = { 0 };

    while (receive(fd, &a))
        ;
    is_whole(&a);
    return a;
}

#define CHAT(more)                                                                                 \
    "{\"model\":\"demo\",\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]" more "}"

static const char chat[] = "/v1/chat/completions";

/* ---- good days
 * --------------------------------------------------------------------------------------- */

static void routes(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    answer a;

    (void)state;
    assert_int_equal(get_status(s, "/health/live"), 200);
    assert_int_equal(get_status(s, "/health/ready"), 200);
    assert_int_equal(get_status(s, "/health/progress"), 200);
    assert_int_equal(get_status(s, "/health"), 200);
    assert_int_equal(get_status(s, "/health/x"), 404);
    assert_int_equal(get_status(s, "/metrics"), 200);
    assert_int_equal(get_status(s, "/v1/models/demo"), 200);
    assert_int_equal(get_status(s, "/v1/models/x"), 404);
    assert_int_equal(get_status(s, "/v1/modelsx"), 404);
    assert_int_equal(get_status(s, "/nothing"), 404);
    assert_int_equal(get_status(s, chat), 405);
    assert_int_equal(ask(s, "/v1/models", "", ""), 405);
    a = get(s, "/v1/models", "X-Request-Id: mine-7\r\n");
    assert_non_null(strstr(a.text, "X-Request-Id: mine-7\r\n"));
    assert_non_null(strstr(a.body, "\"id\":\"demo\""));
    assert_non_null(strstr(a.body, "\"max_model_len\":4096"));
    free(a.text);
    a = get(s, "/v1/models", "X-Request-Id: \"bad\"\r\n");
    assert_null(strstr(a.text, "bad"));
    free(a.text);
    assert_int_equal(ask(s, chat, "", CHAT(",\"max_tokens\":3")), 200);
    assert_int_equal(ask(s, "/tokenize", "", "{\"prompt\":\"a\"}"), 200);
    assert_int_equal(ask(s, "/detokenize", "", "{\"tokens\":[72]}"), 200);
    close_server(s);
}

static void one_connection_many_requests(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const int fd = connect_to(s);
    answer a;

    (void)state;
    for (int i = 0; i < 3; i++) {
        post(fd, chat, "", CHAT(",\"max_tokens\":3"));
        a = read_answer(fd);
        assert_int_equal(a.status, 200);
        free(a.text);
    }
    /* a stream, and requests that do not wait for its end */
    post(fd, chat, "", CHAT(",\"max_tokens\":20,\"stream\":true"));
    post(fd, chat, "", CHAT(",\"max_tokens\":2"));
    post(fd, chat, "Connection: close\r\n", "{");
    a = read_to_end(fd);
    assert_non_null(strstr(a.text, "data: [DONE]\n\n"));
    assert_non_null(strstr(a.text, "\"completion_tokens\":2"));
    assert_non_null(strstr(a.text, "HTTP/1.1 400 Bad Request"));
    free(a.text);
    close(fd);
    close_server(s);
}

static void keys(void **state)
{
    static const char *const key[] = { "secret", "other" };
    yard_http_config config = YARD_HTTP_CONFIG_INIT;
    server *s;

    (void)state;
    config.api_key = key;
    config.n_api_keys = 2;
    s = open_server(config);
    assert_int_equal(get_status(s, "/v1/models"), 401);
    assert_int_equal(get_status(s, "/health/live"), 200);
    assert_int_equal(ask(s, chat, "", CHAT(",\"max_tokens\":1")), 401);
    assert_int_equal(ask(s, chat, "Authorization: Bearer secre\r\n", CHAT("")), 401);
    assert_int_equal(ask(s, chat, "Authorization: Bearer secrets\r\n", CHAT("")), 401);
    assert_int_equal(ask(s, chat, "Authorization: secret\r\n", CHAT("")), 401);
    assert_int_equal(ask(s, chat, "Authorization: bearer other\r\n", CHAT(",\"max_tokens\":1")),
                     200);
    close_server(s);
}

static void the_log(void **state)
{
    server *s = open_logging((yard_http_config)YARD_HTTP_CONFIG_INIT, true);

    (void)state;
    assert_int_equal(ask(s, chat, "X-Request-Id: r1\r\n", CHAT(",\"max_tokens\":3")), 200);
    assert_int_equal(ask(s, chat, "", "{"), 400);
    stop(s);
    pthread_join(s->thread, NULL);
    fflush(s->log);
    assert_non_null(strstr(s->log_text, "\"id\":\"r1\",\"method\":\"POST\",\"uri\":"
                                        "\"/v1/chat/completions\",\"status\":200,"));
    assert_non_null(strstr(s->log_text, "\"output_tokens\":3,"));
    assert_non_null(strstr(s->log_text, "\"status\":400,"));
    assert_int_equal(pthread_create(&s->thread, NULL, serve, s), 0); /* for close_server to stop */
    close_server(s);
}

/* ---- clients that leave
 * ------------------------------------------------------------------------------ */

static void leaving_before_the_first_token(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    int fd = connect_to(s);

    (void)state;
    post(fd, chat, "", CHAT(",\"seed\":42"));
    wait_for(&n_generated, 1);
    close(fd);
    wait_for(&n_aborted, 1);
    fd = connect_to(s);
    post(fd, chat, "", CHAT(",\"seed\":42,\"stream\":true"));
    wait_for(&n_generated, 2);
    shutdown(fd, SHUT_WR); /* half closed is closed */
    wait_for(&n_aborted, 2);
    close(fd);
    wait_for_no_jobs(s);
    close_server(s);
}

static void leaving_within_a_stream(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const int fd = connect_to(s);
    answer a = { 0 };

    (void)state;
    post(fd, chat, "", CHAT(",\"seed\":43,\"stream\":true"));
    while (a.n_bytes < 20000)
        receive(fd, &a);
    free(a.text);
    close(fd);
    wait_for(&n_aborted, 1);
    wait_for_no_jobs(s);
    close_server(s);
}

static void not_reading(void **state)
{
    yard_http_config config = YARD_HTTP_CONFIG_INIT;
    const int small = 4096;
    server *s;
    int fd;

    (void)state;
    config.max_unread_bytes = 256 << 10;
    s = open_server(config);
    fd = connect_to(s);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    post(fd, chat, "", CHAT(",\"seed\":43,\"stream\":true"));
    wait_for(&n_aborted, 1);
    wait_for_no_jobs(s);
    close(fd);
    assert_int_equal(ask(s, chat, "", CHAT(",\"max_tokens\":3")), 200);
    close_server(s);
}

/* Leaving after any number of bytes of a request: a job begins for the whole one only. */
static void leaving_within_a_request(void **state)
{
    static const char whole[] = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                                "Content-Length: 74\r\n\r\n" CHAT(",\"seed\":42");
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);

    (void)state;
    for (size_t n = 0; n < sizeof(whole); n += SANITIZED ? 7 : 1) {
        const int fd = connect_to(s);

        send_bytes(fd, whole, n);
        close(fd);
    }
    wait_for_no_jobs(s);
    assert_int_equal(atomic_load(&n_generated), atomic_load(&n_aborted));
    assert_int_equal(ask(s, chat, "", CHAT(",\"max_tokens\":3")), 200);
    close_server(s);
}

static uint32_t count_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    uint32_t n = 0;

    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

static void abandon(const server *s, int n, int batch)
{
    int fds[64];

    for (int i = 0; i < n; i += batch) {
        for (int k = 0; k < batch; k++) {
            fds[k] = connect_to(s);
            post(fds[k], chat, "",
                 k % 2 ? CHAT(",\"seed\":42") : CHAT(",\"seed\":43,\"stream\":true"));
        }
        for (int k = 0; k < batch; k++)
            close(fds[k]);
    }
    wait_for_no_jobs(s);
}

static void thousands_abandoned(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const int n = SANITIZED ? 512 : 2048;
    uint32_t n_fds;
    size_t n_bytes;

    (void)state;
    abandon(s, n, 64);
    n_fds = count_fds();
    n_bytes = mallinfo2().uordblks;
    abandon(s, n, 64);
    for (int i = 0; i < 1000 && count_fds() > n_fds; i++)
        nap(); /* sockets whose end has not been read yet */
    assert_true(count_fds() <= n_fds);
    if (!SANITIZED)
        assert_true(mallinfo2().uordblks < n_bytes + (64 << 10));
    close_server(s);
}

/* ---- bad requests
 * -------------------------------------------------------------------------------------- */

static void bodies_cut_and_broken_at_every_byte(void **state)
{
    static const char good[] = CHAT(",\"max_tokens\":1,\"logit_bias\":{\"5\":1}");
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const int fd = connect_to(s);
    char body[sizeof(good)];
    answer a;

    (void)state;
    for (size_t i = 0; i + 1 < sizeof(good); i++) {
        memcpy(body, good, i);
        body[i] = '\0';
        post(fd, chat, "", body);
        a = read_answer(fd);
        assert_int_equal(a.status, 400);
        assert_non_null(strstr(a.body, "\"type\":\"invalid_request_error\""));
        free(a.text);
        memcpy(body, good, sizeof(good));
        body[i] = (char)0xff; /* never UTF-8 */
        post(fd, chat, "", body);
        a = read_answer(fd);
        assert_int_equal(a.status, 400);
        free(a.text);
    }
    close(fd);
    assert_int_equal(atomic_load(&n_generated), 0);
    close_server(s);
}

static void every_field_of_a_wrong_type(void **state)
{
    static const char *const fields[] = { "max_tokens",
                                          "temperature",
                                          "top_p",
                                          "top_k",
                                          "min_p",
                                          "stop",
                                          "n",
                                          "stream",
                                          "seed",
                                          "logprobs",
                                          "top_logprobs",
                                          "logit_bias",
                                          "presence_penalty",
                                          "frequency_penalty",
                                          "repetition_penalty",
                                          "stream_options",
                                          "stop_token_ids",
                                          "ignore_eos",
                                          "max_completion_tokens",
                                          "messages",
                                          "model",
                                          "tools",
                                          "response_format",
                                          "tool_choice" };
    static const char *const wrong[] = { "{\"a\":1}", "[[]]", "[{}]" };
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    char body[256];

    (void)state;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        for (size_t k = 0; k < sizeof(wrong) / sizeof(wrong[0]); k++) {
            const int fd = connect_to(s);
            answer a;

            snprintf(body, sizeof(body),
                     "{\"model\":\"demo\",\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}],"
                     "\"%s\":%s}",
                     fields[i], wrong[k]);
            post(fd, chat, "", body);
            a = read_answer(fd);
            if (a.status != 400)
                fail_msg("%s: got %d", body, a.status);
            free(a.text);
            close(fd);
        }
    close_server(s);
}

/* A body of n_bytes: one long message. */
static int ask_with_body(const server *s, size_t n_bytes, bool chunked)
{
    static const char head[] =
        "{\"model\":\"demo\",\"messages\":[{\"role\":\"user\",\"content\":\"",
                      tail[] = "\"}]}";
    const int fd = connect_to(s);
    char *body = malloc(n_bytes), line[160];
    answer a;

    memset(body, 'a', n_bytes);
    memcpy(body, head, sizeof(head) - 1);
    memcpy(body + n_bytes - (sizeof(tail) - 1), tail, sizeof(tail) - 1);
    if (chunked)
        snprintf(line, sizeof(line),
                 "POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%zx\r\n", chat,
                 n_bytes);
    else
        snprintf(line, sizeof(line), "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %zu\r\n\r\n",
                 chat, n_bytes);
    send_text(fd, line);
    send_bytes(fd, body, n_bytes);
    if (chunked)
        send_text(fd, "\r\n0\r\n\r\n");
    a = read_answer(fd);
    free(a.text);
    free(body);
    close(fd);
    return a.status;
}

static void bodies_too_large(void **state)
{
    yard_http_config config = YARD_HTTP_CONFIG_INIT;
    server *s = open_server(config);

    (void)state;
    assert_int_equal(ask_with_body(s, 1 << 20, true), 400); /* context_length_exceeded */
    if (!SANITIZED)
        assert_int_equal(ask_with_body(s, 64 << 20, false), 400);
    close_server(s);
    config.max_body_bytes = 100000;
    s = open_server(config);
    assert_int_equal(ask_with_body(s, 200, false), 200);
    assert_int_equal(ask_with_body(s, 100001, false), 413);
    assert_int_equal(ask_with_body(s, 100001, true), 413);
    assert_int_equal(ask_with_body(s, 10 << 20, false), 413);
    close_server(s);
}

static void headers_too_large(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const int fd = connect_to(s);
    answer a;

    (void)state;
    send_text(fd, "GET /health HTTP/1.1\r\nX: ");
    for (int i = 0; i < 1024; i++)
        send_text(fd, "0123456789012345678901234567890123456789012345678901234567890123456789");
    a = read_to_end(fd);
    assert_true(a.status == 0 || a.status / 100 == 4);
    free(a.text);
    close(fd);
    assert_int_equal(get_status(s, "/health"), 200);
    close_server(s);
}

static void no_http_at_all(void **state)
{
    static const char *const requests[] = { "\r\n\r\n",
                                            "hello\r\n\r\n",
                                            "GET /\r\n\r\n",
                                            "GET / HTTP/9.9\r\n\r\n",
                                            "\x16\x03\x01 TLS?\r\n\r\n",
                                            "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: "
                                            "-5\r\n\r\n",
                                            "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: "
                                            "99999999999999999999\r\n\r\n" };
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);

    (void)state;
    for (size_t i = 0; i < sizeof(requests) / sizeof(requests[0]); i++) {
        const int fd = connect_to(s);
        answer a;

        send_text(fd, requests[i]);
        shutdown(fd, SHUT_WR);
        a = read_to_end(fd);
        assert_true(a.status == 0 || a.status / 100 == 4 || a.status == 505);
        free(a.text);
        close(fd);
    }
    assert_int_equal(get_status(s, "/health"), 200);
    close_server(s);
}

/* One byte now and then, for ever. */
static void a_slow_loris(void **state)
{
    static const char head[] = "POST /v1/chat/completions HTTP/1.1\r\nX: ";
    yard_http_config config = YARD_HTTP_CONFIG_INIT;
    server *s;
    int fd;
    struct pollfd wait;

    (void)state;
    config.read_timeout_us = 300000;
    s = open_server(config);
    fd = connect_to(s);
    send_text(fd, head);
    wait = (struct pollfd){ .fd = fd, .events = POLLIN };
    for (int i = 0; i < PATIENCE_MS / 20 && poll(&wait, 1, 20) == 0; i++)
        send_text(fd, "x");
    assert_int_equal(wait.revents & POLLIN, POLLIN); /* its end */
    close(fd);
    assert_int_equal(ask(s, chat, "", CHAT(",\"max_tokens\":3")), 200);
    close_server(s);
}

/* A client may be silent for longer than it may take to ask. */
static void a_long_answer(void **state)
{
    yard_http_config config = YARD_HTTP_CONFIG_INIT;
    server *s;
    int fd;
    struct pollfd wait;

    (void)state;
    config.read_timeout_us = 100000;
    s = open_server(config);
    fd = connect_to(s);
    post(fd, chat, "", CHAT(",\"seed\":42"));
    wait_for(&n_generated, 1);
    wait = (struct pollfd){ .fd = fd, .events = POLLIN };
    assert_int_equal(poll(&wait, 1, 2500), 0);
    assert_int_equal(atomic_load(&n_aborted), 0);
    close(fd);
    wait_for(&n_aborted, 1);
    close_server(s);
}

static void more_connections_than_allowed(void **state)
{
    yard_http_config config = YARD_HTTP_CONFIG_INIT;
    server *s;
    int fds[16];
    answer a;

    (void)state;
    config.max_connections = 8;
    s = open_server(config);
    for (int i = 0; i < 16; i++)
        fds[i] = connect_to(s); /* the kernel takes what the server does not yet */
    post(fds[15], chat, "", CHAT(",\"max_tokens\":3"));
    for (int i = 0; i < 15; i++)
        close(fds[i]);
    a = read_answer(fds[15]); /* its turn has come */
    assert_int_equal(a.status, 200);
    free(a.text);
    close(fds[15]);
    close_server(s);
}

static void the_end(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const int idle = connect_to(s), fd = connect_to(s);
    answer a = { 0 };

    (void)state;
    post(idle, chat, "", CHAT(",\"max_tokens\":3"));
    a = read_answer(idle);
    free(a.text);
    a = (answer){ 0 };
    post(fd, chat, "", CHAT(",\"max_tokens\":3000,\"stream\":true"));
    receive(fd, &a);
    stop(s);
    while (!strstr(a.text, "[DONE]"))
        assert_true(receive(fd, &a));
    free(a.text);
    close(fd);
    pthread_join(s->thread, NULL);
    close(idle);
    assert_int_equal(pthread_create(&s->thread, NULL, serve, s), 0); /* for close_server to stop */
    close_server(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(routes),
        cmocka_unit_test(one_connection_many_requests),
        cmocka_unit_test(keys),
        cmocka_unit_test(the_log),
        cmocka_unit_test(leaving_before_the_first_token),
        cmocka_unit_test(leaving_within_a_stream),
        cmocka_unit_test(not_reading),
        cmocka_unit_test(leaving_within_a_request),
        cmocka_unit_test(thousands_abandoned),
        cmocka_unit_test(bodies_cut_and_broken_at_every_byte),
        cmocka_unit_test(every_field_of_a_wrong_type),
        cmocka_unit_test(bodies_too_large),
        cmocka_unit_test(headers_too_large),
        cmocka_unit_test(no_http_at_all),
        cmocka_unit_test(a_slow_loris),
        cmocka_unit_test(a_long_answer),
        cmocka_unit_test(more_connections_than_allowed),
        cmocka_unit_test(the_end),
    };

    mallopt(M_ARENA_MAX, 1); /* so that mallinfo2() tells of all threads */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
