/* Clients of the HTTP server's tests: bare sockets, so that they can be as bad as they like. */
#ifndef TESTS_SERVE_HTTP_CLIENT_H
#define TESTS_SERVE_HTTP_CLIENT_H

#include <poll.h>

#include "serve/http_server.h"

enum { PATIENCE_MS = 60000 };

static inline int connect_to(const server *s)
{
    struct sockaddr_in to = { .sin_family = AF_INET,
                              .sin_port = htons(s->port),
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
    return fd;
}

/* What the server no longer takes is not this function's business. */
static inline void send_bytes(int fd, const char *bytes, size_t n_bytes)
{
    while (n_bytes > 0) {
        const ssize_t n = send(fd, bytes, n_bytes, MSG_NOSIGNAL);

        if (n <= 0)
            return;
        bytes += n;
        n_bytes -= (size_t)n;
    }
}

static inline void send_text(int fd, const char *text)
{
    send_bytes(fd, text, strlen(text));
}

static inline void post(int fd, const char *path, const char *headers, const char *body)
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
static inline bool receive(int fd, answer *a)
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

static inline bool is_whole(answer *a)
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

static inline answer read_answer(int fd)
{
    answer a = { 0 };

    while (!is_whole(&a) && receive(fd, &a))
        ;
    return a;
}

/* One request on a connection of its own; returns the status. */
static inline int ask(const server *s, const char *path, const char *headers, const char *body)
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

static inline answer get(const server *s, const char *path, const char *headers)
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

static inline int get_status(const server *s, const char *path)
{
    answer a = get(s, path, "");

    free(a.text);
    return a.status;
}

/* The value of a metric without labels. */
static inline double metric(const server *s, const char *name)
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

static inline void nap(void)
{
    poll(NULL, 0, 2);
}

static inline void wait_for(atomic_uint *counter, unsigned at_least)
{
    const uint64_t until_us = yard_now_us() + (uint64_t)PATIENCE_MS * 1000;

    while (atomic_load(counter) < at_least) {
        assert_true(yard_now_us() < until_us);
        nap();
    }
}

static inline void wait_for_no_jobs(const server *s)
{
    const uint64_t until_us = yard_now_us() + (uint64_t)PATIENCE_MS * 1000;

    while (metric(s, "switchyard_jobs") > 0) {
        assert_true(yard_now_us() < until_us);
        nap();
    }
}

/* The end of a connection, whatever comes before it. */
static inline answer read_to_end(int fd)
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

#endif
