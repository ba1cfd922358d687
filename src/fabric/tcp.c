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
#include <unistd.h>

#include "fabric/tcp.h"

enum {
    CHANNEL = 1,
    N_EVENTS = 64,
    KICK = UINT32_MAX, /* epoll tag */
    DIRECT_PEERS = 4,  /* so few sockets are tried one by one rather than asked for by epoll */
    LINGER_STEP_US = 1000
};

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

    if (t->n_connected > DIRECT_PEERS) {
        receive_ready(t);
        return;
    }
    for (uint32_t r = 0; r < f->n_ranks; r++)
        if (t->peers[r].fd >= 0)
            yard_tcp_receive(t, &t->peers[r]);
}

void yard_tcp_add(yard_tcp *t, uint32_t rank, yard_sym sig, uint64_t value)
{
    if (rank == t->fabric->rank)
        yard_driver_add(&t->driver, t->fabric, sig, value);
    else
        yard_driver_signal(yard_heaps_word(&t->heaps, rank, sig), value,
                           &yard_heaps_control(&t->heaps, rank)->blocked, t->heaps.events[rank]);
}

/* Tells the node that nothing more comes from a rank here: what it sent through this rank to
 * others is done. They are woken whether or not they sleep, so that no one falls asleep on what it
 * saw before. */
static void tell_node(yard_tcp *t, uint32_t rank)
{
    atomic_store(&yard_heaps_control(&t->heaps, t->fabric->rank)->ended[rank], true);
    for (uint32_t r = 0; r < t->fabric->n_ranks; r++)
        if (t->heaps.events[r] >= 0)
            eventfd_write(t->heaps.events[r], 1);
}

/* A thread that finds the caller in the middle of it does not shut the socket twice. */
void yard_tcp_end(yard_tcp *t, yard_tcp_peer *p, yard_peer_state state, int why)
{
    if (atomic_exchange(&p->closed, true))
        return;
    if (t->heaps.maps)
        tell_node(t, p->rank);
    /* A process that ends with unread bytes resets its connections. Before the peer can know and
     * say goodbye, which would count instead. */
    yard_peer_mark(t->fabric, p->rank, state, why == ECONNRESET ? 0 : why);
    epoll_ctl(t->epoll_in, EPOLL_CTL_DEL, p->fd, NULL);
    shutdown(p->fd, SHUT_RDWR);
}

static void drive(yard_tcp *t, yard_sym sig, uint64_t seen, yard_deadline until)
{
    const uint64_t spin_until = yard_now_us() + YARD_DRIVER_SPIN_US;

    do {
        receive_all(t);
        if (yard_wait_over(t->fabric, sig, seen))
            return;
        sched_yield(); /* the peer may need this very core */
    } while (yard_now_us() < spin_until);
    yard_driver_block(&t->driver, t->fabric, sig, seen, t->epoll_in, until);
    receive_all(t);
}

void yard_tcp_begin_wait(yard_fabric *f)
{
    yard_tcp_end_burst(f->impl);
}

void yard_tcp_sleep(yard_fabric *f, yard_sym sig, uint64_t seen, yard_deadline until)
{
    yard_tcp *t = f->impl;

    yard_driver_begin(&t->driver);
    drive(t, sig, seen, until);
    yard_driver_end(&t->driver);
}

void yard_tcp_wake(yard_fabric *f)
{
    const yard_tcp *t = f->impl;

    eventfd_write(t->driver.wake, 1);
}

static void flush_ready(yard_tcp *t)
{
    struct epoll_event events[N_EVENTS];
    const int n = epoll_wait(t->epoll_out, events, N_EVENTS, 0);

    for (int i = 0; i < n; i++) {
        eventfd_t count;

        if (events[i].data.u32 == KICK)
            eventfd_read(t->kick, &count);
        else
            yard_tcp_flush(t, &t->peers[events[i].data.u32]);
    }
}

/* What the caller holds back is not to wait for longer than this. */
static void flush_held(yard_tcp *t, uint64_t *held_until)
{
    const uint64_t now = yard_now_us();

    if (!atomic_load_explicit(&t->holding, memory_order_relaxed)) {
        *held_until = 0;
    } else if (*held_until == 0) {
        *held_until = now + YARD_DRIVER_ASIDE_US;
    } else if (now >= *held_until) {
        *held_until = 0;
        yard_tcp_end_burst(t);
    }
}

/* Sleeps until something happens; or only for a moment, and not for what arrives, while the caller
 * comes and goes and receives for itself, or holds something back. */
static void doze(yard_tcp *t)
{
    bool aside = yard_driver_was_active(&t->driver);

    if (!aside) {
        atomic_store_explicit(&t->dozing, true, memory_order_seq_cst);
        aside = atomic_load_explicit(&t->holding, memory_order_seq_cst);
    }
    if (aside)
        atomic_store_explicit(&t->dozing, false, memory_order_relaxed);
    yard_poll_two(t->epoll_out, aside ? -1 : t->epoll_in,
                  aside ? yard_now_us() + YARD_DRIVER_ASIDE_US : UINT64_MAX);
    atomic_store_explicit(&t->dozing, false, memory_order_relaxed);
}

static void *thread_main(void *arg)
{
    yard_tcp *t = arg;
    uint64_t held_until = 0;

    while (!atomic_load_explicit(&t->stop, memory_order_acquire)) {
        doze(t);
        flush_held(t, &held_until);
        flush_ready(t);
        if (!atomic_load_explicit(&t->driver.driving, memory_order_relaxed))
            receive_ready(t);
    }
    return NULL;
}

yard_status yard_tcp_put_signal(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                                yard_sym sig, uint64_t value, uint32_t peer)
{
    const yard_queued_put item = { .put = { dst, n_bytes, sig, value, peer }, .src = src };
    yard_tcp *t = f->impl;

    return yard_tcp_send(t, &t->peers[peer], &item, 1);
}

/* A rank of this node, if it still runs, has received all that the peer sent it. */
static bool mate_drained(const yard_tcp *t, uint32_t mate, uint32_t peer)
{
    return !yard_heaps_has(&t->heaps, mate) ||
           atomic_load(&yard_heaps_control(&t->heaps, mate)->ended[peer]) ||
           (mate != t->fabric->rank && yard_peer_gone(t->fabric, mate));
}

bool yard_tcp_drained(yard_fabric *f, uint32_t peer)
{
    const yard_tcp *t = f->impl;
    bool drained =
        t->peers[peer].fd < 0 || atomic_load_explicit(&t->peers[peer].closed, memory_order_acquire);

    for (uint32_t r = 0; t->peers[peer].fd >= 0 && drained && r < f->n_ranks; r++)
        drained = mate_drained(t, r, peer);
    return drained;
}

static yard_status map_shared_heap(yard_tcp *t, yard_error *err)
{
    yard_status st =
        yard_heaps_open(t->fabric, &t->heaps, t->fabric->heap_bytes, t->driver.wake, err);

    if (st == YARD_OK) /* where the ranks that signal this one see it */
        t->driver.blocked = &yard_heaps_control(&t->heaps, t->fabric->rank)->blocked;
    return st;
}

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
        const bool connected = r != t->fabric->rank && !yard_heaps_has(&t->heaps, r);

        if (connected)
            t->peers[r].in.stage = malloc(YARD_TCP_STAGE_BYTES);
        if (connected && !t->peers[r].in.stage)
            return yard_fail(err, YARD_ENOMEM, "tcp: room for %u ranks", n_ranks);
    }
    return YARD_OK;
}

static yard_status make_fds(yard_tcp *t, yard_error *err)
{
    struct epoll_event event = { .events = EPOLLIN, .data.u32 = KICK };

    t->epoll_in = epoll_create1(EPOLL_CLOEXEC);
    t->epoll_out = epoll_create1(EPOLL_CLOEXEC);
    t->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (t->epoll_in < 0 || t->epoll_out < 0 || t->kick < 0 || !yard_driver_open(&t->driver) ||
        epoll_ctl(t->epoll_out, EPOLL_CTL_ADD, t->kick, &event) != 0)
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
    st = yard_mesh_connect(f, CHANNEL, t->heaps.maps ? YARD_MESH_NONE : YARD_MESH_TCP, fds, err);
    for (uint32_t r = 0; r < f->n_ranks; r++) {
        t->peers[r].fd = fds[r];
        t->n_connected += fds[r] >= 0;
    }
    free(fds);
    for (uint32_t r = 0; r < f->n_ranks && st == YARD_OK; r++) {
        struct epoll_event event = { .events = EPOLLIN, .data.u32 = r };

        if (t->peers[r].fd >= 0 &&
            epoll_ctl(t->epoll_in, EPOLL_CTL_ADD, t->peers[r].fd, &event) != 0)
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

yard_status yard_tcp_open(yard_fabric *f, bool shares_node, yard_error *err)
{
    yard_tcp *t = calloc(1, sizeof(*t));
    yard_status st;

    if (!t)
        return yard_fail(err, YARD_ENOMEM, "tcp: %zu bytes", sizeof(*t));
    t->fabric = f;
    t->epoll_in = t->epoll_out = t->kick = t->driver.wake = -1;
    memcpy(&t->magic, f->job_id, sizeof(t->magic));
    f->impl = t;
    st = make_fds(t, err);
    if (st == YARD_OK)
        st = shares_node ? map_shared_heap(t, err) : map_heap(t, err);
    if (st == YARD_OK)
        st = make_peers(t, err);
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

void yard_tcp_close(yard_fabric *f)
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
    yard_heaps_close(f, &t->heaps);
    if (t->mapped_bytes)
        munmap(f->heap, t->mapped_bytes);
    f->heap = NULL;
    f->impl = NULL;
    free(t);
}

static yard_status open_alone(yard_fabric *f, yard_error *err)
{
    return yard_tcp_open(f, false, err);
}

const yard_fabric_ops yard_fabric_tcp = {
    .name = "tcp",
    .copies = false,
    .sleep_receives = true,
    .open = open_alone,
    .close = yard_tcp_close,
    .put_signal = yard_tcp_put_signal,
    .flush = yard_tcp_begin_wait,
    .sleep = yard_tcp_sleep,
    .drained = yard_tcp_drained,
    .wake = yard_tcp_wake,
};
