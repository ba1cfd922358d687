/* A start is collective through rank 0: it gathers one frame of every rank and answers all. A rank
 * that fails says so there, and rank 0 passes it on, so that all fail with the same reason. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fabric/star.h"

enum {
    FIRST_NOTICE_US = 3000000,
    NEXT_NOTICE_US = 10000000,
    MAX_BLOB_BYTES = 4096,
    ASK_MS = 50,        /* whether the caller gives up */
    SLACK_US = 2000000, /* others wait longer than rank 0, whose message names who is missing */
    GOODBYE_US = 500000
};

void yard_stage_begin(yard_fabric *f, const char *name)
{
    const uint64_t now = yard_now_us(), soon = f->config.start_timeout_us / 4;

    f->stage =
        (yard_stage){ .name = name,
                      .begun_us = now,
                      .next_notice_us = now + (soon < FIRST_NOTICE_US ? soon : FIRST_NOTICE_US),
                      .until = now + f->config.start_timeout_us };
}

int yard_stage_wait_ms(yard_fabric *f, const char *whom)
{
    const uint64_t now = yard_now_us();
    yard_stage *s = &f->stage;
    yard_deadline wake;
    int wait_ms;

    s->given_up = s->given_up || (f->config.gives_up && f->config.gives_up(f->config.gives_up_ctx));
    if (s->given_up)
        return 0;
    if (now >= s->next_notice_us) {
        char line[512];

        snprintf(line, sizeof(line), "fabric: rank %u of %u: %s: waiting for %s for %.0f s",
                 f->rank, f->n_ranks, s->name, whom, (double)(now - s->begun_us) / 1e6);
        if (f->config.notice)
            f->config.notice(f->config.notice_ctx, line);
        s->next_notice_us = now + NEXT_NOTICE_US;
    }
    if (now >= s->until)
        return 0;
    wake = s->next_notice_us < s->until ? s->next_notice_us : s->until;
    wait_ms = (int)((wake - now) / 1000) + 1;
    return f->config.gives_up && wait_ms > ASK_MS ? ASK_MS : wait_ms;
}

double yard_stage_seconds(const yard_fabric *f)
{
    const yard_stage *s = &f->stage;

    return (double)(s->given_up ? yard_now_us() - s->begun_us : f->config.start_timeout_us) / 1e6;
}

yard_status yard_stage_status(const yard_fabric *f)
{
    return f->stage.given_up ? YARD_EPEER : YARD_ETIMEDOUT;
}

void yard_ranks_text(char *text, size_t n_text, const bool *missing, uint32_t n_ranks)
{
    enum { MAX_RANGES = 8 };
    char list[160] = "";
    uint32_t n_ranges = 0, n_missing = 0;
    size_t n = 0;

    for (uint32_t r = 0; r < n_ranks; r++) {
        uint32_t last = r;

        if (!missing[r])
            continue;
        while (last + 1 < n_ranks && missing[last + 1])
            last++;
        n_missing += last - r + 1;
        if (++n_ranges <= MAX_RANGES && n < sizeof(list)) {
            n += (size_t)snprintf(list + n, sizeof(list) - n, "%s%u", n_ranges > 1 ? ", " : "", r);
            if (last > r && n < sizeof(list))
                n += (size_t)snprintf(list + n, sizeof(list) - n, "-%u", last);
        } else if (n_ranges == MAX_RANGES + 1 && n < sizeof(list)) {
            n += (size_t)snprintf(list + n, sizeof(list) - n, ", ..");
        }
        r = last;
    }
    snprintf(text, n_text, "rank%s %s of %u", n_missing == 1 ? "" : "s", list, n_ranks);
}

yard_status yard_star_create(yard_fabric *f, yard_error *err)
{
    yard_star *star = calloc(1, sizeof(*star));
    const uint32_t n = f->rank == 0 ? f->n_ranks : 1;

    if (!star)
        return yard_fail(err, YARD_ENOMEM, "fabric: %zu bytes", sizeof(*star));
    f->star = star;
    star->epoll = epoll_create1(EPOLL_CLOEXEC);
    star->conns = calloc(n, sizeof(*star->conns));
    star->missing = calloc(n, sizeof(*star->missing));
    if (!star->conns || !star->missing)
        return yard_fail(err, YARD_ENOMEM, "fabric: room for %u connections", n);
    star->n_conns = n;
    for (uint32_t i = 0; i < n; i++) {
        star->conns[i].fd = -1;
        star->missing[i] = f->rank != 0 || i != 0;
    }
    if (star->epoll < 0)
        return yard_fail(err, YARD_EIO, "fabric: epoll: %s", strerror(errno));
    return YARD_OK;
}

static yard_status watch(yard_star *star, uint32_t i, yard_error *err)
{
    struct epoll_event event = { .events = EPOLLIN, .data.u32 = i };

    if (epoll_ctl(star->epoll, EPOLL_CTL_ADD, star->conns[i].fd, &event) == 0)
        return YARD_OK;
    return yard_fail(err, YARD_EIO, "fabric: epoll: %s", strerror(errno));
}

yard_status yard_star_add(yard_fabric *f, uint32_t conn_idx, yard_conn *conn, yard_error *err)
{
    f->star->conns[conn_idx] = (yard_conn){ .fd = conn->fd };
    conn->fd = -1;
    return watch(f->star, conn_idx, err);
}

/* Sockets with unread data are reset by close(), which can overtake the reason just sent: so end
 * the own direction and let the others close first. */
static void say_goodbye(yard_star *star)
{
    const yard_deadline until = yard_now_us() + GOODBYE_US;

    for (uint32_t i = 0; i < star->n_conns; i++)
        if (star->conns[i].fd >= 0)
            shutdown(star->conns[i].fd, SHUT_WR);
    for (uint32_t i = 0; i < star->n_conns; i++) {
        char rest[4096];
        ssize_t n = 1;

        while (star->conns[i].fd >= 0 && n > 0 && yard_wait_fd(star->conns[i].fd, POLLIN, until))
            n = recv(star->conns[i].fd, rest, sizeof(rest), 0);
    }
}

void yard_rendezvous_close(yard_fabric *f)
{
    yard_star *star = f->star;

    if (!star)
        return;
    if (star->failed.status != YARD_OK && star->conns)
        say_goodbye(star);
    for (uint32_t i = 0; i < star->n_conns; i++)
        yard_conn_close(&star->conns[i]);
    if (star->epoll >= 0)
        close(star->epoll);
    free(star->conns);
    free(star->missing);
    free(star);
    f->star = NULL;
}

int yard_rendezvous_fd(const yard_fabric *f)
{
    return f->star ? f->star->epoll : -1;
}

void yard_star_broadcast_fail(yard_fabric *f, const yard_error *why)
{
    yard_star *star = f->star;

    if (star->failed.status == YARD_OK)
        star->failed = *why;
    if (star->told)
        return;
    star->told = true;
    for (uint32_t i = 0; i < star->n_conns; i++)
        if (star->conns[i].fd >= 0)
            yard_frame_send_fail(star->conns[i].fd, &star->failed, yard_now_us() + GOODBYE_US);
}

void yard_rendezvous_abort(yard_fabric *f, const yard_error *err)
{
    yard_error told = { .status = err->status };

    if (!f->star || f->star->failed.status != YARD_OK)
        return; /* everybody knows already */
    yard_fail(&told, err->status, "%s: %s", f->peers[f->rank].name, err->message);
    yard_star_broadcast_fail(f, &told);
}

/* One connection has something to read. */
static yard_status take_frame(yard_fabric *f, uint32_t i, yard_error *err)
{
    yard_star *star = f->star;
    yard_conn *conn = &star->conns[i];
    const yard_conn_event event = yard_conn_read(conn, YARD_FRAME_MAX_BYTES);

    switch (event) {
    case YARD_CONN_AGAIN:
        return YARD_OK;
    case YARD_CONN_FRAME:
        if (conn->header[0] == YARD_FRAME_FAIL)
            return yard_frame_fail_status(conn, err);
        star->missing[i] = false;
        /* Out of the set, or a rank that sent its frame early keeps the loop awake. */
        epoll_ctl(star->epoll, EPOLL_CTL_DEL, conn->fd, NULL);
        return YARD_OK;
    case YARD_CONN_CLOSED:
        return yard_fail(err, YARD_EPEER, "fabric: %s: %s went away while the group was starting",
                         f->stage.name, f->peers[i].name);
    case YARD_CONN_BAD:
        break;
    }
    return yard_fail(err, YARD_EFORMAT, "fabric: %s: damaged message from %s", f->stage.name,
                     f->peers[i].name);
}

yard_status yard_star_pump(yard_fabric *f, yard_error *err)
{
    enum { N_EVENTS = 64 };
    struct epoll_event events[N_EVENTS];
    yard_star *star = f->star;
    const int n = star->failed.status == YARD_OK ? epoll_wait(star->epoll, events, N_EVENTS, 0) : 0;

    for (int i = 0; i < n; i++) {
        yard_error why = { 0 };

        if (take_frame(f, events[i].data.u32, &why) != YARD_OK) {
            star->failed = why;
            if (f->rank == 0)
                yard_star_broadcast_fail(f, &why);
            break;
        }
    }
    if (star->failed.status != YARD_OK)
        return yard_fail(err, star->failed.status, "%s", star->failed.message);
    return YARD_OK;
}

yard_status yard_rendezvous_check(yard_fabric *f, yard_error *err)
{
    return f->star ? yard_star_pump(f, err) : YARD_OK;
}

void yard_rendezvous_reason(yard_fabric *f, yard_error *err)
{
    const yard_deadline until = yard_now_us() + GOODBYE_US;

    while (f->star && yard_star_pump(f, err) == YARD_OK)
        if (!yard_wait_fd(f->star->epoll, POLLIN, until))
            return;
}

static bool any_missing(const yard_star *star)
{
    for (uint32_t i = 0; i < star->n_conns; i++)
        if (star->missing[i])
            return true;
    return false;
}

yard_status yard_star_gather(yard_fabric *f, uint64_t slack_us, const char *whom, yard_error *err)
{
    yard_star *star = f->star;
    yard_error late = { 0 };
    yard_status st = YARD_OK;
    char ranks[256];

    f->stage.until += slack_us;
    while (st == YARD_OK && any_missing(star)) {
        struct pollfd p = { .fd = star->epoll, .events = POLLIN };
        int wait_ms;

        if (!whom)
            yard_ranks_text(ranks, sizeof(ranks), star->missing, f->n_ranks);
        wait_ms = yard_stage_wait_ms(f, whom ? whom : ranks);
        if (wait_ms == 0) {
            yard_fail(&late, yard_stage_status(f), "fabric: %s: %s missing after %.1f s",
                      f->stage.name, whom ? whom : ranks, yard_stage_seconds(f));
            yard_star_broadcast_fail(f, &late);
        }
        poll(&p, 1, wait_ms);
        st = yard_star_pump(f, err);
    }
    f->stage.until -= slack_us;
    return st;
}

yard_status yard_star_rearm(yard_fabric *f, yard_error *err)
{
    yard_star *star = f->star;

    for (uint32_t i = 0; i < star->n_conns; i++) {
        yard_status st;

        if (star->conns[i].fd < 0 || star->missing[i])
            continue;
        star->missing[i] = true;
        st = watch(star, i, err);
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}

yard_status yard_star_broadcast(yard_fabric *f, uint32_t type, const void *data, size_t n_bytes,
                                yard_error *err)
{
    yard_star *star = f->star;

    for (uint32_t i = 0; i < star->n_conns; i++) {
        const int fd = star->conns[i].fd;

        if (fd >= 0 && !yard_frame_send(fd, type, data, n_bytes, f->stage.until))
            return yard_fail(err, YARD_EPEER, "fabric: %s: cannot send to %s: %s", f->stage.name,
                             f->peers[i].name, strerror(errno));
    }
    return YARD_OK;
}

static yard_status exchange_root(yard_fabric *f, size_t n_bytes, uint8_t *all, yard_error *err)
{
    yard_star *star = f->star;
    yard_status st = yard_star_gather(f, 0, NULL, err);

    for (uint32_t r = 1; st == YARD_OK && r < f->n_ranks; r++) {
        const yard_conn *conn = &star->conns[r];

        if (conn->header[0] != YARD_FRAME_BLOB || conn->header[1] != n_bytes)
            st = yard_fail(err, YARD_EFORMAT, "fabric: %s: want %zu bytes of %s, got %u",
                           f->stage.name, n_bytes, f->peers[r].name, conn->header[1]);
        else if (n_bytes)
            memcpy(all + (size_t)r * n_bytes, conn->data, n_bytes);
    }
    if (st == YARD_OK)
        st = yard_star_broadcast(f, YARD_FRAME_ALL_BLOBS, all, n_bytes * f->n_ranks, err);
    return st;
}

static yard_status exchange_other(yard_fabric *f, const void *blob, size_t n_bytes, uint8_t *all,
                                  yard_error *err)
{
    const yard_conn *conn = &f->star->conns[0];
    yard_status st;

    if (!yard_frame_send(conn->fd, YARD_FRAME_BLOB, blob, n_bytes, f->stage.until)) {
        const int code = errno;

        st = yard_star_pump(f, err); /* rank 0 may have said why it left */
        if (st != YARD_OK)
            return st;
        return yard_fail(err, YARD_EPEER, "fabric: %s: cannot send to %s: %s", f->stage.name,
                         f->peers[0].name, strerror(code));
    }
    st = yard_star_gather(f, SLACK_US, f->peers[0].name, err);
    if (st != YARD_OK)
        return st;
    if (conn->header[0] != YARD_FRAME_ALL_BLOBS || conn->header[1] != n_bytes * f->n_ranks)
        return yard_fail(err, YARD_EFORMAT, "fabric: %s: damaged message from %s", f->stage.name,
                         f->peers[0].name);
    if (n_bytes)
        memcpy(all, conn->data, n_bytes * f->n_ranks);
    return YARD_OK;
}

yard_status yard_rendezvous_exchange(yard_fabric *f, const void *blob, size_t n_bytes, void *all,
                                     yard_error *err)
{
    yard_status st;

    if (n_bytes > MAX_BLOB_BYTES)
        return yard_fail(err, YARD_EINVAL, "fabric: exchange: want at most %d bytes, got %zu",
                         MAX_BLOB_BYTES, n_bytes);
    if (n_bytes)
        memcpy((uint8_t *)all + f->rank * n_bytes, blob, n_bytes);
    if (!f->star)
        return YARD_OK;
    st = f->rank == 0 ? exchange_root(f, n_bytes, all, err)
                      : exchange_other(f, blob, n_bytes, all, err);
    return st == YARD_OK ? yard_star_rearm(f, err) : st;
}
