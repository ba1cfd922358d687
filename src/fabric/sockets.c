/* Listening and connecting: abstract unix names and TCP. */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "fabric/wire.h"

enum {
    BACKLOG = 4096,
    CONNECT_US = 5000000 /* one attempt: a packet to a machine that is down may vanish */
};

bool yard_split_host_port(const char *text, char *host, size_t n_host, uint16_t *port)
{
    const char *colon = strrchr(text, ':');
    size_t n = colon ? (size_t)(colon - text) : 0;
    char *end = NULL;
    unsigned long value;

    if (!colon || colon[1] < '0' || colon[1] > '9')
        return false;
    value = strtoul(colon + 1, &end, 10);
    if (*end || value == 0 || value > UINT16_MAX)
        return false;
    if (n >= 2 && text[0] == '[' && text[n - 1] == ']') {
        text++;
        n -= 2;
    } else if (memchr(text, ':', n)) {
        return false; /* a bare IPv6 address: where its port begins is a guess */
    }
    if (n == 0 || n >= n_host)
        return false;
    memcpy(host, text, n);
    host[n] = 0;
    *port = (uint16_t)value;
    return true;
}

static socklen_t unix_address(struct sockaddr_un *a, const char *name)
{
    const size_t n = strlen(name);

    *a = (struct sockaddr_un){ .sun_family = AF_UNIX };
    memcpy(a->sun_path + 1, name, n);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (n ? 1 + n : 0));
}

static bool unix_name_fits(const char *name)
{
    if (strlen(name) < sizeof(((struct sockaddr_un *)NULL)->sun_path) - 1)
        return true;
    errno = ENAMETOOLONG;
    return false;
}

int yard_listen_unix(char *name, size_t n_name)
{
    struct sockaddr_un a;
    socklen_t n;
    int fd, saved;

    if (!unix_name_fits(name))
        return -1;
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    /* An address of the family alone makes the kernel choose a free abstract name. */
    n = unix_address(&a, name);
    if (bind(fd, (struct sockaddr *)&a, n) != 0 || listen(fd, BACKLOG) != 0)
        goto fail;
    n = sizeof(a);
    if (getsockname(fd, (struct sockaddr *)&a, &n) != 0)
        goto fail;
    n -= (socklen_t)offsetof(struct sockaddr_un, sun_path) + 1;
    if (!name[0])
        snprintf(name, n_name, "%.*s", (int)n, a.sun_path + 1);
    return fd;
fail:
    saved = errno;
    close(fd);
    errno = saved;
    return -1;
}

int yard_connect_unix(const char *name, const char **why)
{
    struct sockaddr_un a;
    socklen_t n;
    int fd, saved;

    *why = "name too long";
    if (!unix_name_fits(name))
        return -1;
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    n = unix_address(&a, name);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&a, n) == 0)
        return fd;
    saved = errno;
    *why = strerror(saved);
    if (fd >= 0)
        close(fd);
    errno = saved;
    return -1;
}

static struct addrinfo *resolve(const char *host, uint16_t port, int flags, const char **why)
{
    const struct addrinfo hints = { .ai_socktype = SOCK_STREAM,
                                    .ai_flags = flags | AI_NUMERICSERV };
    struct addrinfo *list = NULL;
    char service[8];
    int rc;

    snprintf(service, sizeof(service), "%u", port);
    rc = getaddrinfo(host, service, &hints, &list);
    if (rc == 0)
        return list;
    *why = gai_strerror(rc);
    errno = rc == EAI_SYSTEM ? errno : EHOSTUNREACH;
    return NULL;
}

static uint16_t local_port(int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } a = { 0 };
    socklen_t n = sizeof(a);

    if (getsockname(fd, &a.any, &n) != 0)
        return 0;
    return ntohs(a.any.sa_family == AF_INET6 ? a.v6.sin6_port : a.v4.sin_port);
}

bool yard_is_loopback(int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } a = { 0 };
    socklen_t n = sizeof(a);

    if (getsockname(fd, &a.any, &n) != 0)
        return false;
    return a.any.sa_family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(&a.v6.sin6_addr)
                                       : ntohl(a.v4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
}

static int listen_at(const struct addrinfo *at)
{
    const int on = 1;
    const int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int saved;

    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    saved = errno;
    close(fd);
    errno = saved;
    return -1;
}

int yard_listen_tcp(const char *host, uint16_t *port, const char **why)
{
    struct addrinfo *list = resolve(host, *port, AI_PASSIVE, why);
    int fd = -1, saved;

    for (struct addrinfo *at = list; at && fd < 0; at = at->ai_next) {
        fd = listen_at(at);
        if (fd < 0)
            *why = strerror(errno);
    }
    saved = errno;
    if (list)
        freeaddrinfo(list);
    if (fd >= 0)
        *port = local_port(fd);
    errno = saved;
    return fd;
}

/* While nobody listens at a port of the kernel's ephemeral range, connecting to it on the same
 * machine can choose it as the local port too: TCP then connects the socket to itself. */
static bool connected_to_itself(int fd)
{
    struct sockaddr_storage a = { 0 }, b = { 0 };
    socklen_t n_a = sizeof(a), n_b = sizeof(b);

    return getsockname(fd, (struct sockaddr *)&a, &n_a) == 0 &&
           getpeername(fd, (struct sockaddr *)&b, &n_b) == 0 && n_a == n_b && !memcmp(&a, &b, n_a);
}

static bool connect_finish(int fd, yard_deadline until)
{
    int code = 0;
    socklen_t n = sizeof(code);

    if (!yard_wait_fd(fd, POLLOUT, until))
        return false;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &n) != 0)
        return false;
    errno = code;
    return code == 0;
}

static int connect_at(const struct addrinfo *at, yard_deadline until)
{
    const int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int saved;

    if (fd < 0)
        return -1;
    if (connect(fd, at->ai_addr, at->ai_addrlen) == 0 ||
        (errno == EINPROGRESS && connect_finish(fd, until))) {
        if (!connected_to_itself(fd))
            return fd;
        errno = ECONNREFUSED;
    }
    saved = errno;
    close(fd);
    errno = saved;
    return -1;
}

int yard_connect_tcp(const char *host, uint16_t port, yard_deadline until, const char **why)
{
    struct addrinfo *list = resolve(host, port, 0, why);
    const yard_deadline soon = yard_now_us() + CONNECT_US;
    int fd = -1, saved;

    for (struct addrinfo *at = list; at && fd < 0; at = at->ai_next) {
        fd = connect_at(at, until < soon ? until : soon);
        if (fd < 0)
            *why = strerror(errno);
    }
    saved = errno;
    if (list)
        freeaddrinfo(list);
    errno = saved;
    return fd;
}

/* Not a heartbeat of our own: the kernel answers for a process that is stopped or busy, as it does
 * on a unix socket, and nothing of ours wakes up for it. TCP_USER_TIMEOUT bounds both the probes
 * and data that is not acknowledged. */
void yard_tune_tcp(int fd, uint64_t dead_after_us)
{
    const int on = 1, seconds = 1;
    const unsigned int timeout_ms = (unsigned int)(dead_after_us / 1000);
    const int n_probes = (int)(dead_after_us / 1000000) + 1;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof(seconds));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof(seconds));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &n_probes, sizeof(n_probes));
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof(timeout_ms));
}
