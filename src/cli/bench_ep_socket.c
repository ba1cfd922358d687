/* What a plain TCP socket does with the bytes that `switchyard bench ep` puts on the wire: nothing
 * is packed, counted or laid out. "stream" sends what the library sends, both ways at once;
 * "pingpong" sends one row of dispatch there and one result row back. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cli/bench_ep.h"

enum { SPINS_BEFORE_YIELD = 10000, CONNECT_STEP_US = 1000 };

/* One direction of one phase. */
typedef struct traffic {
    uint64_t *words;
    size_t n_bytes;
} traffic;

typedef struct side {
    int fd;
    uint64_t seed;         /* of what out holds */
    traffic out[2], in[2]; /* dispatch, combine */
} side;

static yard_status os_failed(yard_error *err, const char *what)
{
    return yard_fail(err, YARD_EIO, "socket: %s: %s", what, strerror(errno));
}

static yard_status accept_one(const yard_bench_ep_rank *r, struct sockaddr_in *at, side *s,
                              yard_error *err)
{
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    socklen_t n = sizeof(*at);
    yard_status st = YARD_OK;

    if (fd < 0 || bind(fd, (struct sockaddr *)at, n) != 0 || listen(fd, 1) != 0 ||
        getsockname(fd, (struct sockaddr *)at, &n) != 0)
        st = os_failed(err, "listen");
    if (st == YARD_OK) {
        atomic_store(r->port, ntohs(at->sin_port));
        s->fd = accept(fd, NULL, NULL);
        if (s->fd < 0)
            st = os_failed(err, "accept");
    }
    if (fd >= 0)
        close(fd);
    return st;
}

static yard_status connect_to(const yard_bench_ep_rank *r, struct sockaddr_in *at, side *s,
                              yard_error *err)
{
    const uint64_t until = yard_now_us() + YARD_BENCH_EP_TIMEOUT_US;

    while (atomic_load(r->port) == 0 && yard_now_us() < until)
        usleep(CONNECT_STEP_US);
    at->sin_port = htons((uint16_t)atomic_load(r->port));
    s->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (s->fd < 0 || connect(s->fd, (struct sockaddr *)at, sizeof(*at)) != 0)
        return os_failed(err, "connect");
    return YARD_OK;
}

static yard_status open_side(yard_bench_ep_rank *r, yard_error *err)
{
    struct sockaddr_in at = { .sin_family = AF_INET };
    const bool between = strcmp(r->host, "127.0.0.1") != 0;
    const char *host = between ? yard_bench_ep_link_host(0) : r->host;
    const int on = 1;
    side *s = r->impl = calloc(1, sizeof(*s));
    yard_status st;

    if (!s)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory");
    s->fd = -1;
    inet_pton(AF_INET, host, &at.sin_addr);
    st = r->rank == 0 ? accept_one(r, &at, s, err) : connect_to(r, &at, s, err);
    if (st == YARD_OK && setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0)
        st = os_failed(err, "TCP_NODELAY");
    return st;
}

static void release(side *s)
{
    for (int phase = 0; phase < 2; phase++) {
        free(s->out[phase].words);
        free(s->in[phase].words);
        s->out[phase].words = s->in[phase].words = NULL;
    }
}

static void close_side(yard_bench_ep_rank *r)
{
    side *s = r->impl;

    if (!s)
        return;
    release(s);
    if (s->fd >= 0)
        close(s->fd);
    free(s);
    r->impl = NULL;
}

static yard_status allocate(side *s, yard_error *err)
{
    for (int phase = 0; phase < 2; phase++) {
        s->out[phase].words = yard_alloc(yard_align_up(s->out[phase].n_bytes, 8));
        s->in[phase].words = yard_alloc(yard_align_up(s->in[phase].n_bytes, 8));
        if (!s->out[phase].words || !s->in[phase].words)
            return yard_fail(err, YARD_ENOMEM, "bench: no memory for %zu bytes",
                             s->out[phase].n_bytes + s->in[phase].n_bytes);
    }
    return YARD_OK;
}

static yard_status prepare_stream(yard_bench_ep_rank *r, yard_error *err)
{
    const yard_bench_ep_data *d = r->data;
    side *s = r->impl;

    release(s);
    s->seed = 0;
    s->out[0].n_bytes = d->n_rows_out * yard_bench_ep_row_bytes(d);
    s->in[0].n_bytes = d->n_rows_in * yard_bench_ep_row_bytes(d);
    s->out[1].n_bytes = d->n_results_out * yard_bench_ep_result_bytes(d);
    s->in[1].n_bytes = d->n_results_in * yard_bench_ep_result_bytes(d);
    return allocate(s, err);
}

static yard_status prepare_pingpong(yard_bench_ep_rank *r, yard_error *err)
{
    const yard_bench_ep_data *d = r->data;
    const bool first = r->rank == 0;
    side *s = r->impl;

    release(s);
    s->seed = 0;
    s->out[0].n_bytes = first ? yard_bench_ep_row_bytes(d) : 0;
    s->in[0].n_bytes = first ? 0 : yard_bench_ep_row_bytes(d);
    s->out[1].n_bytes = first ? 0 : yard_bench_ep_result_bytes(d);
    s->in[1].n_bytes = first ? yard_bench_ep_result_bytes(d) : 0;
    return allocate(s, err);
}

static uint64_t word_of(uint64_t seed, uint32_t rank, int phase, size_t i)
{
    return (seed * 4 + rank * 2 + (uint64_t)phase + i * 8) * 0x9e3779b97f4a7c15u;
}

static void refresh(side *s, const yard_bench_ep_data *d)
{
    if (s->seed == d->seed)
        return;
    s->seed = d->seed;
    for (int phase = 0; phase < 2; phase++)
        for (size_t i = 0; i < yard_align_up(s->out[phase].n_bytes, 8) / 8; i++)
            s->out[phase].words[i] = word_of(d->seed, d->rank, phase, i);
}

/* Moves what the socket takes or gives; false on a broken connection. */
static bool advance(ssize_t moved, size_t *n, bool *idle)
{
    if (moved > 0) {
        *n += (size_t)moved;
        *idle = false;
    }
    return moved > 0 || (moved < 0 && (errno == EAGAIN || errno == EINTR));
}

static yard_status move(yard_bench_ep_rank *r, int phase, yard_error *err)
{
    side *s = r->impl;
    const traffic *out = &s->out[phase], *in = &s->in[phase];
    size_t n_out = 0, n_in = 0;
    uint32_t n_idle = 0;

    refresh(s, r->data);
    while (n_out < out->n_bytes || n_in < in->n_bytes) {
        bool alive = true, idle = true;

        if (n_out < out->n_bytes)
            alive = advance(send(s->fd, (const uint8_t *)out->words + n_out, out->n_bytes - n_out,
                                 MSG_DONTWAIT | MSG_NOSIGNAL),
                            &n_out, &idle);
        if (alive && n_in < in->n_bytes)
            alive =
                advance(recv(s->fd, (uint8_t *)in->words + n_in, in->n_bytes - n_in, MSG_DONTWAIT),
                        &n_in, &idle);
        if (!alive)
            return yard_fail(err, YARD_EPEER, "socket: the other rank is gone");
        n_idle = idle ? n_idle + 1 : 0;
        if (n_idle > SPINS_BEFORE_YIELD)
            sched_yield();
    }
    return YARD_OK;
}

static yard_status dispatch(yard_bench_ep_rank *r, yard_error *err)
{
    return move(r, 0, err);
}

static yard_status combine(yard_bench_ep_rank *r, yard_error *err)
{
    return move(r, 1, err);
}

static void poison(yard_bench_ep_rank *r)
{
    side *s = r->impl;

    for (int phase = 0; phase < 2; phase++)
        memset(s->in[phase].words, 0x55, s->in[phase].n_bytes);
}

static bool check(yard_bench_ep_rank *r, yard_error *err)
{
    const side *s = r->impl;

    for (int phase = 0; phase < 2; phase++)
        for (size_t i = 0; i * 8 < s->in[phase].n_bytes; i++) {
            const uint64_t want = word_of(r->data->seed, 1 - r->rank, phase, i);
            const size_t left = s->in[phase].n_bytes - i * 8;

            if (memcmp(&want, &s->in[phase].words[i], left < 8 ? left : 8) != 0) {
                yard_fail(err, YARD_EDEVICE, "socket: other bytes at %zu", i * 8);
                return false;
            }
        }
    return true;
}

/* On the wire, from this rank. */
static double wire_bytes(const yard_bench_ep_rank *r, int phase)
{
    const side *s = r->impl;

    if (phase == YARD_BENCH_EP_PAIR)
        return (double)s->out[0].n_bytes + (double)s->out[1].n_bytes;
    return (double)s->out[phase].n_bytes;
}

const yard_bench_ep_peer yard_bench_ep_socket = {
    .name = "socket",
    .variant = "stream",
    .network = true,
    .two_ranks = true,
    .open = open_side,
    .prepare = prepare_stream,
    .dispatch = dispatch,
    .combine = combine,
    .poison = poison,
    .check = check,
    .close = close_side,
    .bytes = wire_bytes,
};

const yard_bench_ep_peer yard_bench_ep_pingpong = {
    .name = "socket",
    .variant = "pingpong",
    .network = true,
    .two_ranks = true,
    .one_token = true,
    .pair_only = true,
    .open = open_side,
    .prepare = prepare_pingpong,
    .dispatch = dispatch,
    .combine = combine,
    .poison = poison,
    .check = check,
    .close = close_side,
    .bytes = wire_bytes,
};
