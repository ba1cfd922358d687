#include <dirent.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "serve/http_impl.h"

enum { MAX_FD = 1 << 20, FIRST_ENTRIES = 256 };

/* FNV-1a of a socket's own address: it is compared within this process only. Unix sockets that were
 * accepted have their listener's name too. */
static uint64_t name_of(int fd)
{
    union {
        struct sockaddr_storage name;
        unsigned char byte[sizeof(struct sockaddr_storage)];
    } at = { .byte = { 0 } };
    socklen_t n = sizeof(at.name);
    uint64_t hash = 0xcbf29ce484222325ULL;

    if (getsockname(fd, (struct sockaddr *)&at.name, &n) != 0 || n > sizeof(at.name))
        return 0;
    if (at.name.ss_family == AF_INET || at.name.ss_family == AF_INET6)
        n = 4; /* family and port: a listener on any address has connections on each */
    for (socklen_t i = 0; i < n; i++)
        hash = (hash ^ at.byte[i]) * 0x100000001b3ULL;
    return hash;
}

/* 0: not a connection to the listener. The listener itself may be open more than once. */
static uint64_t inode_of(const yard_http_guard *g, int fd)
{
    int listens = 1;
    socklen_t n = sizeof(listens);
    struct stat info;

    if (name_of(fd) != g->listen_name || fstat(fd, &info) != 0 ||
        getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &n) != 0 || listens)
        return 0;
    return info.st_ino;
}

static yard_http_guard_entry *entry_of(yard_http_guard *g, int fd)
{
    if (fd >= g->n_entries) {
        const int n = 2 * fd > FIRST_ENTRIES ? 2 * fd : FIRST_ENTRIES;
        yard_http_guard_entry *larger = realloc(g->entry, (size_t)n * sizeof(*larger));

        if (!larger)
            return NULL;
        memset(larger + g->n_entries, 0, (size_t)(n - g->n_entries) * sizeof(*larger));
        g->entry = larger;
        g->n_entries = n;
    }
    return &g->entry[fd];
}

void yard_http_guard_open(yard_http_guard *g, int listen_fd)
{
    *g = (yard_http_guard){ .listen_name = name_of(listen_fd) };
}

void yard_http_guard_close(yard_http_guard *g)
{
    free(g->entry);
    g->entry = NULL;
}

void yard_http_guard_mark(yard_http_guard *g, uint64_t now_us, int fd, bool busy)
{
    yard_http_guard_entry *e = fd >= 0 && fd < MAX_FD ? entry_of(g, fd) : NULL;
    struct stat info;

    if (e && fstat(fd, &info) == 0)
        *e = (yard_http_guard_entry){ .inode = info.st_ino, .since_us = now_us, .busy = busy };
}

/* The entry of an open connection, begun anew when the socket is another than at the last look. */
static yard_http_guard_entry *look_at(yard_http_guard *g, uint64_t now_us, int fd)
{
    const uint64_t inode = inode_of(g, fd);
    yard_http_guard_entry *e = inode != 0 ? entry_of(g, fd) : NULL;

    if (e && e->inode != inode)
        *e = (yard_http_guard_entry){ .inode = inode, .since_us = now_us };
    return e;
}

/* Without /proc nothing is seen, and idle connections have evhttp's own timeout only. */
uint32_t yard_http_guard_look(yard_http_guard *g, uint64_t now_us, uint64_t read_timeout_us,
                              uint32_t *n_busy)
{
    DIR *dir = opendir("/proc/self/fd");
    const struct dirent *item;
    uint32_t n = 0;

    *n_busy = 0;
    while (dir && (item = readdir(dir))) {
        const int fd = atoi(item->d_name); /* "." and ".." are 0, which is no socket of ours */
        const yard_http_guard_entry *e =
            fd > STDERR_FILENO && fd < MAX_FD ? look_at(g, now_us, fd) : NULL;

        if (!e)
            continue;
        n++;
        *n_busy += e->busy;
        if (!e->busy && now_us - e->since_us > read_timeout_us)
            shutdown(fd, SHUT_RDWR); /* evhttp sees the end and closes it */
    }
    if (dir)
        closedir(dir);
    return n;
}
