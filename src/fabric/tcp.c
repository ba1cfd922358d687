/* Transport over TCP: one connection per pair of ranks and one thread per fabric.
 *
 * Sends go out from the calling thread as far as the socket takes them, and a caller that waits
 * receives (puts.h). The transport's own thread does the rest: it drains queues of full sockets,
 * and receives while the caller computes, so that peers are never held up. */
#include <errno.h>
#include <linux/sockios.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "fabric/tcp.h"

enum {
    CHANNEL = 1,
    N_EVENTS = 64,
    KICK = UINT32_MAX, /* epoll tags */
    TIMER = UINT32_MAX - 1,
    DIRECT_PEERS = 4, /* so few sockets are tried one by one rather than asked for by epoll */
    LINGER_STEP_US = 1000
};

/* ---- receiving: whoever drives ------------------------------------------------------------------
 */

static void receive_ready(yard_tcp *t)
{
    struct epoll_event events[N_EVENTS];
    const int n = epoll_wait(t->epoll_in, events, N_EVENTS, 0);

    for (int i = 0; i < n; i++)
        yard_tcp_receive(t, &t->peers[events[i].data.u32]);
}

static void receive_all(yard_tcp *t)
{
    const yard_fabric *f = t->fabric;

    if (f->n_ranks - 1 > DIRECT_PEERS) {
        receive_ready(t);
        return;
    }
    for (uint32_t r = 0; r < f->n_ranks; r++)
        if (r != f->rank)
            yard_tcp_receive(t, &t->peers[r]);
}

/* A thread that finds the caller in the middle of it does not shut the socket twice. */
void yard_tcp_end(yard_tcp *t, yard_tcp_peer *p, yard_peer_state state, int why)
{
    if (atomic_exchange(&p->closed, true))
        return;
    epoll_ctl(t->epoll_in, EPOLL_CTL_DEL, p->fd, NULL);
    shutdown(p->fd, SHUT_RDWR);
    /* A process that ends with unread bytes resets its connections. */
    yard_peer_mark(t->fabric, p->rank, state, why == ECONNRESET ? 0 : why);
}

static void drive(yard_tcp *t, yard_sym sig, uint64_t seen, yard_deadline until)
{
    const uint64_t spin_until = yard_now_us() + YARD_DRIVER_SPIN_US;

    do {
        receive_all(t);
        if (yard_driver_changed(t->fabric, sig, seen))
            return;
        sched_yield(); /* the peer may need this very core */
    } while (yard_now_us() < spin_until);
    yard_driver_block(&t->driver, t->fabric, sig, seen, t->epoll_in, until);
    receive_all(t);
}

static void tcp_sleep(yard_fabric *f, yard_sym sig, uint64_t seen, yard_deadline until)
{
    yard_tcp *t = f->impl;

    yard_driver_begin(&t->driver);
    yard_tcp_end_burst(t);
    drive(t, sig, seen, until);
    yard_driver_end(&t->driver);
}

static void tcp_wake(yard_fabric *f)
{
    const yard_tcp *t = f->impl;

    eventfd_write(t->driver.wake, 1);
}

/* ---- the transport's thread ---------------------------------------------------------------------
 */

static void flush_ready(yard_tcp *t)
{
    struct epoll_event events[N_EVENTS];
    const int n = epoll_wait(t->epoll_out, events, N_EVENTS, 0);

    for (int i = 0; i < n; i++) {
        uint64_t count;

        if (events[i].data.u32 == KICK) {
            eventfd_read(t->kick, &count);
        } else if (events[i].data.u32 == TIMER) {
            if (read(t->timer, &count, sizeof(count)) > 0)
                yard_tcp_end_burst(t);
        } else
            yard_tcp_flush(t, &t->peers[events[i].data.u32]);
    }
}

static void *thread_main(void *arg)
{
    yard_tcp *t = arg;

    while (!atomic_load_explicit(&t->stop, memory_order_acquire)) {
        const bool aside = yard_driver_was_active(&t->driver);

        yard_poll_two(t->epoll_out, aside ? -1 : t->epoll_in,
                      aside ? yard_now_us() + YARD_DRIVER_ASIDE_US : UINT64_MAX);
        flush_ready(t);
        if (!atomic_load_explicit(&t->driver.driving, memory_order_relaxed))
            receive_ready(t);
    }
    return NULL;
}

/* ---- puts ------------------------------------------------------------------------------------ */

static yard_status tcp_put_signal(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                                  yard_sym sig, uint64_t value, uint32_t peer)
{
    const yard_queued_put item = { .put = { dst, n_bytes, sig, value }, .src = src };
    yard_tcp *t = f->impl;

    return yard_tcp_send(t, &t->peers[peer], &item);
}

static bool tcp_drained(yard_fabric *f, uint32_t peer)
{
    const yard_tcp *t = f->impl;

    return atomic_load_explicit(&t->peers[peer].closed, memory_order_acquire);
}

/* ---- open and close -------------------------------------------------------------------------- */

static yard_status map_heap(yard_tcp *t, yard_error *err)
{
    yard_fabric *f = t->fabric;
    void *heap = mmap(NULL, f->heap_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

    if (heap == MAP_FAILED)
        return yard_fail(err, YARD_ENOMEM, "tcp: a heap of %zu bytes: %s", f->heap_bytes,
                         strerror(errno));
    f->heap = heap;
    t->mapped_bytes = f->heap_bytes;
    return YARD_OK;
}

static yard_status make_peers(yard_tcp *t, yard_error *err)
{
    const uint32_t n_ranks = t->fabric->n_ranks;

    t->peers = calloc(n_ranks, sizeof(*t->peers));
    if (!t->peers)
        return yard_fail(err, YARD_ENOMEM, "tcp: room for %u ranks", n_ranks);
    for (uint32_t r = 0; r < n_ranks; r++) {
        t->peers[r].rank = r;
        t->peers[r].fd = -1;
        pthread_mutex_init(&t->peers[r].in.lock, NULL);
        pthread_mutex_init(&t->peers[r].out.lock, NULL);
    }
    for (uint32_t r = 0; r < n_ranks; r++) {
        if (r != t->fabric->rank)
            t->peers[r].in.stage = malloc(YARD_TCP_STAGE_BYTES);
        if (r != t->fabric->rank && !t->peers[r].in.stage)
            return yard_fail(err, YARD_ENOMEM, "tcp: room for %u ranks", n_ranks);
    }
    return YARD_OK;
}

static yard_status make_fds(yard_tcp *t, yard_error *err)
{
    struct epoll_event event = { .events = EPOLLIN, .data.u32 = KICK };
    struct epoll_event timer = { .events = EPOLLIN, .data.u32 = TIMER };

    t->epoll_in = epoll_create1(EPOLL_CLOEXEC);
    t->epoll_out = epoll_create1(EPOLL_CLOEXEC);
    t->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    t->driver.wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    t->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (t->epoll_in < 0 || t->epoll_out < 0 || t->kick < 0 || t->driver.wake < 0 || t->timer < 0 ||
        epoll_ctl(t->epoll_out, EPOLL_CTL_ADD, t->kick, &event) != 0 ||
        epoll_ctl(t->epoll_out, EPOLL_CTL_ADD, t->timer, &timer) != 0)
        return yard_fail(err, YARD_EIO, "tcp: epoll and eventfd: %s", strerror(errno));
    return YARD_OK;
}

static yard_status connect_peers(yard_tcp *t, yard_error *err)
{
    yard_fabric *f = t->fabric;
    int *fds = calloc(f->n_ranks, sizeof(*fds));
    yard_status st;

    if (!fds)
        return yard_fail(err, YARD_ENOMEM, "tcp: room for %u ranks", f->n_ranks);
    st = yard_mesh_connect(f, CHANNEL, false, fds, err);
    for (uint32_t r = 0; r < f->n_ranks; r++)
        t->peers[r].fd = fds[r];
    free(fds);
    for (uint32_t r = 0; r < f->n_ranks && st == YARD_OK; r++) {
        struct epoll_event event = { .events = EPOLLIN, .data.u32 = r };

        if (r != f->rank && epoll_ctl(t->epoll_in, EPOLL_CTL_ADD, t->peers[r].fd, &event) != 0)
            st = yard_fail(err, YARD_EIO, "tcp: epoll: %s", strerror(errno));
    }
    return st;
}

static yard_status start_thread(yard_tcp *t, yard_error *err)
{
    const int rc = yard_start_thread(&t->thread, thread_main, t);

    if (rc != 0)
        return yard_fail(err, YARD_ENOMEM, "tcp: thread: %s", strerror(rc));
    t->runs = true;
    return YARD_OK;
}

static yard_status tcp_open(yard_fabric *f, yard_error *err)
{
    yard_tcp *t = calloc(1, sizeof(*t));
    yard_status st;

    if (!t)
        return yard_fail(err, YARD_ENOMEM, "tcp: %zu bytes", sizeof(*t));
    t->fabric = f;
    t->epoll_in = t->epoll_out = t->kick = t->driver.wake = t->timer = -1;
    memcpy(&t->magic, f->job_id, sizeof(t->magic));
    f->impl = t;
    t->burst = 1; /* of no put yet */
    st = map_heap(t, err);
    if (st == YARD_OK)
        st = make_peers(t, err);
    if (st == YARD_OK)
        st = make_fds(t, err);
    if (st == YARD_OK)
        st = connect_peers(t, err);
    if (st == YARD_OK)
        st = start_thread(t, err);
    return st;
}

/* The peer's machine has acknowledged everything. */
static bool is_sent(yard_tcp_peer *p)
{
    int n_unsent = 0;
    bool queued;

    pthread_mutex_lock(&p->out.lock);
    queued = p->out.flushing || p->out.queue.n_items > 0 || p->out.iov_at < p->out.n_iov;
    pthread_mutex_unlock(&p->out.lock);
    return !queued && (ioctl(p->fd, SIOCOUTQ, &n_unsent) != 0 || n_unsent == 0);
}

static bool has_sent_all(yard_tcp *t)
{
    for (uint32_t r = 0; r < t->fabric->n_ranks; r++) {
        yard_tcp_peer *p = &t->peers[r];

        if (p->fd >= 0 && !atomic_load(&p->closed) && !yard_peer_gone(t->fabric, r) && !is_sent(p))
            return false;
    }
    return true;
}

/* What was put before is still delivered: a socket that is closed with unread bytes in it throws
 * away what it has not sent. The thread goes on receiving meanwhile, or two ranks that leave at
 * once with full sockets would wait for each other. */
static void linger(yard_tcp *t)
{
    const uint64_t until = yard_linger_until(t->fabric);

    yard_tcp_end_burst(t);
    while (!has_sent_all(t) && yard_now_us() < until) {
        const struct timespec step = { .tv_nsec = LINGER_STEP_US * 1000 };

        nanosleep(&step, NULL);
    }
}

/* In the stream, so that it comes after all data; without it the end of the stream is a loss. */
static void say_goodbye(yard_tcp *t)
{
    const yard_tcp_head bye = { .magic = t->magic, .n_puts = YARD_TCP_BYE };

    for (uint32_t r = 0; r < t->fabric->n_ranks; r++) {
        yard_tcp_peer *p = &t->peers[r];

        if (p->fd < 0 || !is_sent(p))
            continue;
        (void)!send(p->fd, &bye, sizeof(bye), MSG_NOSIGNAL | MSG_DONTWAIT);
        shutdown(p->fd, SHUT_WR);
    }
}

static void close_fd(int fd)
{
    if (fd >= 0)
        close(fd);
}

static void destroy_peers(yard_tcp *t)
{
    for (uint32_t r = 0; t->peers && r < t->fabric->n_ranks; r++) {
        yard_tcp_peer *p = &t->peers[r];

        close_fd(p->fd);
        pthread_mutex_destroy(&p->in.lock);
        pthread_mutex_destroy(&p->out.lock);
        free(p->in.stage);
        yard_put_queue_free(&p->out.queue);
    }
    free(t->peers);
}

static void tcp_close(yard_fabric *f)
{
    yard_tcp *t = f->impl;

    if (!t)
        return;
    if (t->runs) {
        linger(t);
        say_goodbye(t);
        atomic_store_explicit(&t->stop, true, memory_order_release);
        eventfd_write(t->kick, 1);
        pthread_join(t->thread, NULL);
    }
    destroy_peers(t);
    close_fd(t->epoll_in);
    close_fd(t->epoll_out);
    close_fd(t->kick);
    close_fd(t->driver.wake);
    close_fd(t->timer);
    if (f->heap)
        munmap(f->heap, t->mapped_bytes);
    f->heap = NULL;
    f->impl = NULL;
    free(t);
}

const yard_fabric_ops yard_fabric_tcp = {
    .name = "tcp",
    .copies = false,
    .sleep_receives = true,
    .open = tcp_open,
    .close = tcp_close,
    .put_signal = tcp_put_signal,
    .sleep = tcp_sleep,
    .drained = tcp_drained,
    .wake = tcp_wake,
};
