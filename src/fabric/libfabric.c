/* Transport over libfabric: InfiniBand and RoCE (verbs), EFA, and whatever else it has a provider
 * with reliable datagrams for.
 *
 * A put is one write with an immediate: {value, signal word}. The receiver's completion queue
 * delivers the immediate after the data, and the receiver adds. No order between writes is asked
 * for, which EFA would not give. A signal alone is a write of a few bytes to a place that nobody
 * reads. Whoever has the key of a rank's heap can write to it; keys go over the authenticated
 * connections of the start only. */
#include "fabric/libfabric.h"

#ifdef YARD_HAVE_LIBFABRIC

#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum {
    N_ENTRIES = 32,
    MAX_READS = 16,
    MAX_PARTS = 1024, /* messages that carry one large value */
    SIGNAL_BYTES = 8, /* written to nowhere */
    IDLE_US = 10000,  /* providers progress in our calls, also where they have a descriptor */
    POLL_US = 50,     /* of a waiting caller without a descriptor, and ASIDE_US of the thread */
    LINGER_STEP_US = 1000
};

static uint64_t largest_value(const yard_lf *t)
{
    return t->value_bits >= 63 ? INT64_MAX : (UINT64_C(1) << t->value_bits) - 1;
}

/* Under the lock; 0, -FI_EAGAIN or what is wrong. */
static ssize_t post(yard_lf *t, yard_lf_peer *p, const yard_queued_put *item, uint64_t flags)
{
    const bool empty = item->put.n_bytes == 0;
    uint8_t *heap = t->fabric->heap;
    struct iovec iov = {
        .iov_base = empty ? heap + t->nowhere + SIGNAL_BYTES : (void *)(uintptr_t)item->src,
        .iov_len = empty ? SIGNAL_BYTES : (size_t)item->put.n_bytes,
    };
    const struct fi_rma_iov rma = {
        .addr = p->base + (empty ? t->nowhere : item->put.dst),
        .len = iov.iov_len,
        .key = p->key,
    };
    const struct fi_msg_rma msg = {
        .msg_iov = &iov,
        .desc = t->desc ? &t->desc : NULL,
        .iov_count = 1,
        .addr = p->address,
        .rma_iov = &rma,
        .rma_iov_count = 1,
        .context = p,
        .data = item->put.value << t->index_bits | item->put.sig / 8,
    };
    const ssize_t rc = fi_writemsg(t->ep, &msg, FI_COMPLETION | FI_REMOTE_CQ_DATA | flags);

    if (rc == 0)
        t->n_outstanding++;
    return rc;
}

static void lose(yard_lf *t, yard_lf_peer *p, int why)
{
    const uint64_t greeting = yard_fabric_read_signal(t->fabric, t->greetings + 8 * p->rank);

    t->n_queued -= p->queue.n_items;
    yard_put_queue_pop(&p->queue, p->queue.n_items);
    /* Writes to a rank that has said goodbye fail as those to a dead one do. */
    yard_peer_mark(t->fabric, p->rank, greeting >= 2 ? YARD_PEER_LEFT : YARD_PEER_LOST, why);
}

/* Under the lock: posts what the provider takes now. */
static void post_queued(yard_lf *t)
{
    for (uint32_t r = 0; r < t->fabric->n_ranks && t->n_queued > 0; r++) {
        yard_lf_peer *p = &t->peers[r];
        ssize_t rc = 0;

        while (p->queue.n_items > 0 && rc == 0) {
            rc = post(t, p, yard_put_queue_at(&p->queue, 0), 0);
            if (rc == 0) {
                yard_put_queue_pop(&p->queue, 1);
                t->n_queued--;
            }
        }
        if (rc != 0 && rc != -FI_EAGAIN)
            lose(t, p, (int)-rc);
    }
}

/* Under the lock: at once, or into the queue behind others. */
static yard_status send_one(yard_lf *t, yard_lf_peer *p, const yard_queued_put *item)
{
    ssize_t rc = -FI_EAGAIN;

    if (p->queue.n_items == 0)
        rc = post(t, p, item, 0);
    if (rc == 0)
        return YARD_OK;
    if (rc != -FI_EAGAIN)
        return yard_fail(&t->fabric->err, YARD_EPEER, "libfabric: writing to %s: %s",
                         t->fabric->peers[p->rank].name, t->lib.strerror((int)-rc));
    if (!yard_put_queue_push(&p->queue, item))
        return yard_fail(&t->fabric->err, YARD_ENOMEM, "libfabric: a queue of %u puts to %s",
                         p->queue.n_items, t->fabric->peers[p->rank].name);
    t->n_queued++;
    /* The thread may sleep on a descriptor that says nothing of room for more writes. */
    if (t->n_queued == 1 && t->runs)
        eventfd_write(t->kick, 1);
    return YARD_OK;
}

/* A value that the immediate has no room for goes in parts: signals add, so that only all of them
 * reach what a waiter waits for. */
static yard_status lf_put_signal(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                                 yard_sym sig, uint64_t value, uint32_t peer)
{
    yard_lf *t = f->impl;
    yard_queued_put item = { .put = { .dst = dst, .n_bytes = n_bytes, .sig = sig, .value = value },
                             .src = src };
    const uint64_t largest = largest_value(t);
    yard_status st = YARD_OK;

    if (n_bytes > t->info->ep_attr->max_msg_size)
        return yard_fail(&f->err, YARD_ENOTSUP, "libfabric: provider %s writes %zu bytes at most",
                         t->info->fabric_attr->prov_name, t->info->ep_attr->max_msg_size);
    if (value / largest >= MAX_PARTS)
        return yard_fail(&f->err, YARD_ENOTSUP,
                         "libfabric: provider %s has %u bits for a signal's value, got %llu",
                         t->info->fabric_attr->prov_name, t->value_bits, (unsigned long long)value);
    pthread_mutex_lock(&t->lock);
    do {
        item.put.value = value < largest ? value : largest;
        value -= item.put.value;
        st = send_one(t, &t->peers[peer], &item);
        item.put.n_bytes = 0;
    } while (value > 0 && st == YARD_OK);
    pthread_mutex_unlock(&t->lock);
    return st;
}

/* An immediate comes from whoever may write to this heap; still, look where it points. */
static void take_immediate(yard_lf *t, uint64_t data)
{
    const uint64_t index = data & ((UINT64_C(1) << t->index_bits) - 1);

    if (index < t->total_bytes / 8)
        yard_driver_add(&t->driver, t->fabric, 8 * index, data >> t->index_bits);
}

static void take_error(yard_lf *t)
{
    struct fi_cq_err_entry e = { 0 };

    if (fi_cq_readerr(t->cq, &e, 0) < 0)
        return;
    if (e.op_context && t->n_outstanding > 0)
        t->n_outstanding--;
    if (e.op_context)
        lose(t, e.op_context, e.err == FI_ECANCELED ? 0 : e.err);
}

/* Under the lock: everything that has completed, then what has room now. */
static void progress_locked(yard_lf *t)
{
    struct fi_cq_data_entry entries[N_ENTRIES];
    ssize_t n = N_ENTRIES;

    /* Bounded: the caller has a signal to look at, and maybe a deadline. */
    for (int i_read = 0; i_read < MAX_READS && (n == N_ENTRIES || n == -FI_EAVAIL); i_read++) {
        n = fi_cq_read(t->cq, entries, N_ENTRIES);
        for (ssize_t i = 0; i < n; i++) {
            if (entries[i].flags & FI_REMOTE_CQ_DATA)
                take_immediate(t, entries[i].data);
            else if (t->n_outstanding > 0)
                t->n_outstanding--;
        }
        if (n == -FI_EAVAIL)
            take_error(t);
    }
    if (t->n_queued > 0)
        post_queued(t);
}

static void progress(yard_lf *t)
{
    if (pthread_mutex_trylock(&t->lock) != 0)
        return;
    progress_locked(t);
    pthread_mutex_unlock(&t->lock);
}

/* Whether the descriptor may be waited for: the provider must have nothing left inside. */
static bool may_block(yard_lf *t)
{
    struct fid *fids[1] = { &t->cq->fid };
    bool may;

    pthread_mutex_lock(&t->lock);
    may = t->cq_fd >= 0 && t->n_queued == 0 && fi_trywait(t->fid_fabric, fids, 1) == 0;
    pthread_mutex_unlock(&t->lock);
    return may;
}

static uint64_t sooner(uint64_t until, uint64_t in_us)
{
    const uint64_t then = yard_now_us() + in_us;

    return until < then ? until : then;
}

static void drive(yard_lf *t, yard_sym sig, uint64_t seen, yard_deadline until)
{
    const uint64_t spin_until = yard_now_us() + YARD_DRIVER_SPIN_US;

    do {
        progress(t);
        if (yard_wait_over(t->fabric, sig, seen))
            return;
        sched_yield(); /* the peer may need this very core */
    } while (yard_now_us() < spin_until);
    if (may_block(t))
        yard_driver_block(&t->driver, t->fabric, sig, seen, t->cq_fd, sooner(until, IDLE_US));
    else
        yard_driver_block(&t->driver, t->fabric, sig, seen, -1, sooner(until, POLL_US));
    progress(t);
}

static void lf_sleep(yard_fabric *f, yard_sym sig, uint64_t seen, yard_deadline until)
{
    yard_lf *t = f->impl;

    yard_driver_begin(&t->driver);
    drive(t, sig, seen, until);
    yard_driver_end(&t->driver);
}

static void lf_wake(yard_fabric *f)
{
    const yard_lf *t = f->impl;

    eventfd_write(t->driver.wake, 1);
}

static bool lf_drained(yard_fabric *f, uint32_t peer)
{
    const yard_lf *t = f->impl;

    return yard_fabric_read_signal(f, t->greetings + 8 * peer) >= 2;
}

static void *thread_main(void *arg)
{
    yard_lf *t = arg;

    while (!atomic_load_explicit(&t->stop, memory_order_acquire)) {
        const bool aside = yard_driver_was_active(&t->driver);
        eventfd_t count;

        if (!aside && may_block(t))
            yard_poll_two(t->cq_fd, t->kick, sooner(UINT64_MAX, IDLE_US));
        else
            yard_poll_two(-1, t->kick, sooner(UINT64_MAX, YARD_DRIVER_ASIDE_US));
        eventfd_read(t->kick, &count);
        if (!atomic_load_explicit(&t->driver.driving, memory_order_relaxed))
            progress(t);
    }
    return NULL;
}

static bool all_greeted(const yard_lf *t, bool *missing)
{
    bool all = true;

    for (uint32_t r = 0; r < t->fabric->n_ranks; r++) {
        missing[r] =
            r != t->fabric->rank && yard_fabric_read_signal(t->fabric, t->greetings + 8 * r) == 0;
        all = all && !missing[r];
    }
    return all;
}

/* Adds to this rank's greeting word on all others. */
static yard_status greet(yard_lf *t, uint64_t flags)
{
    yard_fabric *f = t->fabric;
    const yard_queued_put item = { .put = { .sig = t->greetings + 8 * f->rank, .value = 1 } };
    yard_status st = YARD_OK;

    for (uint32_t r = 0; r < f->n_ranks && st == YARD_OK; r++) {
        if (r == f->rank || yard_peer_gone(f, r))
            continue;
        pthread_mutex_lock(&t->lock);
        if (!flags || post(t, &t->peers[r], &item, flags) != 0)
            st = send_one(t, &t->peers[r], &item);
        pthread_mutex_unlock(&t->lock);
    }
    return st;
}

/* Connections are made by the first write to a peer: let that be now, where a path that does not
 * work is an error of the start and names who cannot be reached. */
static yard_status say_hello(yard_lf *t, yard_error *err)
{
    enum { STEP_MS = 1 };
    yard_fabric *f = t->fabric;
    bool *missing = calloc(f->n_ranks, sizeof(*missing));
    yard_status st = missing ? greet(t, 0) : YARD_ENOMEM;

    if (st != YARD_OK && missing)
        yard_fail(err, st, "%s", f->err.message);
    else if (!missing)
        yard_fail(err, st, "libfabric: room for %u ranks", f->n_ranks);
    while (st == YARD_OK && !all_greeted(t, missing)) {
        char whom[256];

        yard_ranks_text(whom, sizeof(whom), missing, f->n_ranks);
        if (yard_stage_wait_ms(f, whom) == 0)
            st = yard_fail(err, YARD_ETIMEDOUT,
                           "libfabric: provider %s: nothing arrived from %s after %.1f s",
                           t->info->fabric_attr->prov_name, whom, yard_stage_seconds(f));
        else
            st = yard_rendezvous_check(f, err);
        progress(t);
        poll(NULL, 0, STEP_MS);
    }
    free(missing);
    return st;
}

static yard_status start_thread(yard_lf *t, yard_error *err)
{
    const int rc = yard_start_thread(&t->thread, thread_main, t);

    if (rc != 0)
        return yard_fail(err, YARD_ENOMEM, "libfabric: thread: %s", strerror(rc));
    t->runs = true;
    return YARD_OK;
}

static yard_status lf_open(yard_fabric *f, yard_error *err)
{
    yard_lf *t = calloc(1, sizeof(*t));
    yard_status st = YARD_OK;

    if (!t)
        return yard_fail(err, YARD_ENOMEM, "libfabric: %zu bytes", sizeof(*t));
    f->impl = t;
    t->fabric = f;
    t->cq_fd = -1;
    pthread_mutex_init(&t->lock, NULL);
    t->kick = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!yard_driver_open(&t->driver) || t->kick < 0)
        st = yard_fail(err, YARD_EIO, "libfabric: eventfd: %s", strerror(errno));
    if (st == YARD_OK)
        st = yard_lf_open_objects(t, err);
    if (st == YARD_OK)
        st = say_hello(t, err);
    if (st == YARD_OK && f->n_ranks > 1)
        st = yard_rendezvous_exchange(f, NULL, 0, NULL, err);
    if (st == YARD_OK)
        yard_lf_forget_name(t);
    if (st == YARD_OK)
        st = start_thread(t, err);
    return st;
}

/* Until everything is with its receiver, as far as the receivers live. */
static void linger(yard_lf *t)
{
    const uint64_t until = yard_linger_until(t->fabric);
    bool done = false;

    while (!done && yard_now_us() < until) {
        const struct timespec step = { .tv_nsec = LINGER_STEP_US * 1000 };

        pthread_mutex_lock(&t->lock);
        progress_locked(t);
        done = t->n_queued == 0 && t->n_outstanding == 0;
        pthread_mutex_unlock(&t->lock);
        if (!done)
            nanosleep(&step, NULL);
    }
}

static void lf_close(yard_fabric *f)
{
    yard_lf *t = f->impl;

    if (!t)
        return;
    if (t->runs) {
        linger(t);
        /* Delivered means that the peer's provider has processed it: without, what a socket still
         * holds is lost when it is closed. */
        greet(t, FI_DELIVERY_COMPLETE);
        linger(t);
        atomic_store_explicit(&t->stop, true, memory_order_release);
        eventfd_write(t->kick, 1);
        pthread_join(t->thread, NULL);
    }
    yard_lf_close_objects(t);
    if (t->kick >= 0)
        close(t->kick);
    if (t->driver.wake >= 0)
        close(t->driver.wake);
    pthread_mutex_destroy(&t->lock);
    f->impl = NULL;
    free(t);
}

const yard_fabric_ops yard_fabric_libfabric = {
    .name = "libfabric",
    .copies = false,
    .sleep_receives = true,
    .open = lf_open,
    .close = lf_close,
    .put_signal = lf_put_signal,
    .sleep = lf_sleep,
    .drained = lf_drained,
    .wake = lf_wake,
};

#else

#include "fabric/fabric_impl.h"

static yard_status lf_open(yard_fabric *f, yard_error *err)
{
    return yard_fail(err, YARD_ENOTSUP,
                     "libfabric: this build was made without its headers (libfabric-dev)");
}

static void lf_close(yard_fabric *f)
{
}

static yard_status lf_put_signal(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                                 yard_sym sig, uint64_t value, uint32_t peer)
{
    return YARD_ENOTSUP;
}

const yard_fabric_ops yard_fabric_libfabric = {
    .name = "libfabric",
    .open = lf_open,
    .close = lf_close,
    .put_signal = lf_put_signal,
};

#endif
