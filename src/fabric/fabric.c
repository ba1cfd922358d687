/* What all transports have in common: checks, waits, statistics. */
#include <sched.h>
#include <stdio.h>

#include "fabric/fabric_impl.h"

uint32_t yard_fabric_rank(const yard_fabric *f)
{
    return f->rank;
}

uint32_t yard_fabric_size(const yard_fabric *f)
{
    return f->n_ranks;
}

uint32_t yard_fabric_node(const yard_fabric *f, uint32_t rank)
{
    return rank < f->n_ranks ? f->peers[rank].node : 0;
}

const char *yard_fabric_transport(const yard_fabric *f, const char **reason)
{
    if (reason)
        *reason = f->reason;
    return f->ops->name;
}

void *yard_fabric_local(const yard_fabric *f, yard_sym at)
{
    return at <= f->heap_bytes ? f->heap + at : NULL;
}

size_t yard_fabric_heap_bytes(const yard_fabric *f)
{
    return f->heap_bytes;
}

bool yard_fabric_copies(const yard_fabric *f)
{
    return f->ops->copies;
}

void *yard_fabric_impl(const yard_fabric *f)
{
    return f->impl;
}

void *yard_fabric_device_heap(const yard_fabric *f, uint32_t rank)
{
    const yard_fabric_ops *ops = f->beside ? f->beside : f->ops;

    return ops->device_heap && rank < f->n_ranks ? ops->device_heap(f, rank) : NULL;
}

size_t yard_fabric_device_heap_bytes(const yard_fabric *f)
{
    return f->beside ? f->config.device_heap_bytes : f->ops->device_heap ? f->heap_bytes : 0;
}

const yard_nvshmem *yard_fabric_device_puts(const yard_fabric *f)
{
    return f->ops->device_puts ? f->ops->device_puts(f) : NULL;
}

bool yard_fabric_only_puts(const yard_fabric *f)
{
    return f->ops->only_puts;
}

const char *yard_fabric_error(const yard_fabric *f)
{
    return f->err.message;
}

void yard_fabric_get_stats(const yard_fabric *f, yard_fabric_stats *out)
{
    *out = f->stats;
}

yard_deadline yard_fabric_deadline(const yard_fabric *f, uint64_t timeout_us)
{
    const uint64_t now = yard_now_us();

    if (timeout_us == 0)
        timeout_us = f->config.timeout_us;
    return now + timeout_us < now ? UINT64_MAX : now + timeout_us;
}

yard_deadline yard_fabric_start_deadline(const yard_fabric *f)
{
    return yard_fabric_deadline(f, f->config.start_timeout_us);
}

static yard_status check_peer(yard_fabric *f, uint32_t peer)
{
    if (peer < f->n_ranks)
        return YARD_OK;
    return yard_fail(&f->err, YARD_EINVAL, "fabric: peer: want less than %u ranks, got %u",
                     f->n_ranks, peer);
}

static yard_status check_signal(yard_fabric *f, yard_sym sig)
{
    if (f->ops->device_heap)
        return yard_fail(&f->err, YARD_ENOTSUP,
                         "fabric: %s: the heap is device memory, where only kernels put and wait",
                         f->ops->name);
    if (sig % 8 == 0 && f->heap_bytes >= 8 && sig <= f->heap_bytes - 8)
        return YARD_OK;
    return yard_fail(&f->err, YARD_EINVAL,
                     "fabric: sig: want 8 aligned bytes inside the heap's %zu, got offset %llu",
                     f->heap_bytes, (unsigned long long)sig);
}

static yard_status check_data(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes)
{
    const uintptr_t at = (uintptr_t)src, heap = (uintptr_t)f->heap;

    if (dst > f->heap_bytes || n_bytes > f->heap_bytes - dst)
        return yard_fail(&f->err, YARD_EINVAL,
                         "fabric: put: want %zu bytes at %llu inside the heap's %zu", n_bytes,
                         (unsigned long long)dst, f->heap_bytes);
    if (f->ops->copies || n_bytes == 0)
        return YARD_OK;
    if (at >= heap && at - heap <= f->heap_bytes && n_bytes <= f->heap_bytes - (at - heap))
        return YARD_OK;
    return yard_fail(&f->err, YARD_EINVAL, "fabric: put: %s wants the source inside the heap",
                     f->ops->name);
}

yard_status yard_fabric_put_signal(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                                   yard_sym sig, uint64_t value, uint32_t peer)
{
    yard_status st = check_peer(f, peer);

    if (st == YARD_OK)
        st = check_signal(f, sig);
    if (st == YARD_OK)
        st = check_data(f, dst, src, n_bytes);
    if (st != YARD_OK)
        return st;
    if (peer == f->rank) {
        if (n_bytes)
            yard_copy(f->heap + dst, src, n_bytes);
        atomic_fetch_add_explicit(yard_signal_word(f, sig), value, memory_order_release);
        return YARD_OK;
    }
    if (yard_peer_gone(f, peer))
        return yard_peer_fail(f, peer);
    st = f->ops->put_signal(f, dst, src, n_bytes, sig, value, peer);
    if (st == YARD_OK && n_bytes) {
        f->stats.n_puts++;
        f->stats.n_put_bytes += n_bytes;
    } else if (st == YARD_OK) {
        f->stats.n_signals++;
    }
    return st;
}

yard_status yard_fabric_signal(yard_fabric *f, yard_sym sig, uint64_t value, uint32_t peer)
{
    return yard_fabric_put_signal(f, 0, NULL, 0, sig, value, peer);
}

bool yard_fabric_shares_node(const yard_fabric *f)
{
    return f->ops->put_signal_node != NULL;
}

static yard_status check_targets(yard_fabric *f, uint32_t relay, const uint32_t *targets,
                                 uint32_t n_targets)
{
    if (!yard_fabric_shares_node(f))
        return yard_fail(&f->err, YARD_ENOTSUP,
                         "fabric: put for a node: ranks of a node share no memory over %s",
                         f->ops->name);
    if (n_targets == 0)
        return yard_fail(&f->err, YARD_EINVAL, "fabric: put for a node: want targets, got none");
    if (relay != f->rank && yard_peer_gone(f, relay))
        return yard_peer_fail(f, relay);
    for (uint32_t i = 0; i < n_targets; i++) {
        if (targets[i] >= f->n_ranks || f->peers[targets[i]].node != f->peers[relay].node)
            return yard_fail(&f->err, YARD_EINVAL,
                             "fabric: put for a node: want targets on the node of rank %u, got %u",
                             relay, targets[i]);
        if (targets[i] != f->rank && yard_peer_gone(f, targets[i]))
            return yard_peer_fail(f, targets[i]);
    }
    return YARD_OK;
}

yard_status yard_fabric_put_signal_node(yard_fabric *f, yard_sym dst, const void *src,
                                        size_t n_bytes, uint32_t relay, yard_sym sig,
                                        uint64_t value, const uint32_t *targets, uint32_t n_targets)
{
    yard_status st = check_peer(f, relay);

    if (st == YARD_OK)
        st = check_signal(f, sig);
    if (st == YARD_OK)
        st = check_data(f, dst, src, n_bytes);
    if (st == YARD_OK)
        st = check_targets(f, relay, targets, n_targets);
    if (st == YARD_OK)
        st = f->ops->put_signal_node(f, dst, src, n_bytes, relay, sig, value, targets, n_targets);
    if (st != YARD_OK)
        return st;
    if (n_bytes && relay != f->rank) {
        f->stats.n_puts++;
        f->stats.n_put_bytes += n_bytes;
    } else {
        f->stats.n_signals++;
    }
    return YARD_OK;
}

const void *yard_fabric_view(const yard_fabric *f, uint32_t rank, yard_sym at)
{
    if (!yard_fabric_shares_node(f) || rank >= f->n_ranks || at > f->heap_bytes ||
        f->peers[rank].node != f->peers[f->rank].node)
        return NULL;
    if (rank == f->rank)
        return f->heap + at;
    return (const uint8_t *)f->ops->view(f, rank) + at;
}

uint64_t yard_fabric_read_signal(const yard_fabric *f, yard_sym sig)
{
    return atomic_load_explicit(yard_signal_word(f, sig), memory_order_acquire);
}

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static bool spin_until(const yard_fabric *f, yard_sym sig, uint64_t at_least)
{
    for (uint32_t i = 0;; i++) {
        if (yard_fabric_read_signal(f, sig) >= at_least)
            return true;
        if (i >= f->n_spins)
            return false;
        pause_cpu();
    }
}

/* Nothing that the peer sent can be on the way any more. */
static bool is_silent(yard_fabric *f, uint32_t peer)
{
    const uint32_t state = atomic_load_explicit(&f->peers[peer].state, memory_order_acquire);

    if (state == YARD_PEER_LEFT)
        return !f->ops->drained || f->ops->drained(f, peer);
    return state == YARD_PEER_LOST;
}

/* Whether signals of peer can still arrive through relay (peer itself: directly); if not, *gone is
 * the rank to blame. */
static bool is_cut_off(yard_fabric *f, uint32_t peer, uint32_t relay, uint32_t *gone)
{
    *gone = peer;
    if (is_silent(f, peer))
        return true;
    *gone = relay;
    return relay != peer && relay != f->rank && yard_peer_gone(f, relay);
}

static yard_status fail_late(yard_fabric *f, yard_sym sig, uint64_t at_least, uint32_t peer,
                             uint32_t relay, uint64_t waited_us)
{
    char through[YARD_PEER_NAME_BYTES + 16] = "", reason[64];

    if (relay != peer)
        snprintf(through, sizeof(through), " through %s", f->peers[relay].name);
    yard_peer_reason(f, peer, reason, sizeof(reason));
    yard_peer_give_up(f, peer);
    return yard_fail(&f->err, YARD_ETIMEDOUT,
                     "fabric: waited %.3f s for %s%s%s: signal at %llu is %llu, want %llu",
                     (double)waited_us / 1e6, f->peers[peer].name, through, reason,
                     (unsigned long long)sig, (unsigned long long)yard_fabric_read_signal(f, sig),
                     (unsigned long long)at_least);
}

/* The slow part, after the spin. relay: peer itself when its signals come directly. */
static yard_status sleep_until(yard_fabric *f, yard_sym sig, uint64_t at_least, uint32_t peer,
                               uint32_t relay, yard_deadline until)
{
    const uint64_t begun_us = yard_now_us();

    for (;;) {
        bool cut_off;
        uint32_t gone;
        uint64_t seen;

        /* In this order: the count of disturbances before the peer's state, or its change wakes
         * nobody; the state before the word, or what a peer signalled last before it left is
         * overlooked. */
        f->n_disturbed_seen = atomic_load(&f->n_disturbed);
        cut_off = is_cut_off(f, peer, relay, &gone);
        seen = yard_fabric_read_signal(f, sig);
        if (seen >= at_least)
            return YARD_OK;
        if (cut_off)
            return yard_peer_fail(f, gone);
        if (yard_now_us() >= until)
            return fail_late(f, sig, at_least, peer, relay, yard_now_us() - begun_us);
        if (f->ops->sleep)
            f->ops->sleep(f, sig, seen, until);
        else
            sched_yield();
    }
}

yard_status yard_fabric_wait_relayed(yard_fabric *f, yard_sym sig, uint64_t at_least, uint32_t peer,
                                     uint32_t relay, yard_deadline until)
{
    yard_status st = check_peer(f, peer);

    if (st == YARD_OK)
        st = check_peer(f, relay);
    if (st == YARD_OK)
        st = check_signal(f, sig);
    if (st == YARD_OK && f->ops->flush)
        f->ops->flush(f); /* also when there is nothing to wait for: the peers may wait for us */
    if (st != YARD_OK || spin_until(f, sig, at_least))
        return st;
    return sleep_until(f, sig, at_least, peer, relay, until);
}

yard_status yard_fabric_wait_until(yard_fabric *f, yard_sym sig, uint64_t at_least, uint32_t peer,
                                   yard_deadline until)
{
    return yard_fabric_wait_relayed(f, sig, at_least, peer, peer, until);
}

bool yard_wait_over(const yard_fabric *f, yard_sym sig, uint64_t seen)
{
    if (atomic_load(&f->n_disturbed) != f->n_disturbed_seen)
        return true;
    if (sig != YARD_ANY_SIGNAL)
        return atomic_load(yard_signal_word(f, sig)) != seen;
    /* ready reads words with acquire only: not before the transport's "I am about to sleep". */
    atomic_thread_fence(memory_order_seq_cst);
    return f->ready(f->ready_ctx);
}

static yard_status fail_if_any_gone(yard_fabric *f)
{
    for (uint32_t r = 0; r < f->n_ranks; r++)
        if (yard_peer_gone(f, r))
            return yard_peer_fail(f, r);
    return YARD_OK;
}

yard_status yard_fabric_wait_any(yard_fabric *f, bool (*ready)(void *ctx), void *ctx,
                                 yard_deadline until)
{
    yard_status st = YARD_OK;

    if (f->ops->flush)
        f->ops->flush(f);
    f->ready = ready;
    f->ready_ctx = ctx;
    do {
        f->n_disturbed_seen = atomic_load(&f->n_disturbed);
        if (ready(ctx))
            break;
        st = fail_if_any_gone(f);
        if (st == YARD_OK && yard_now_us() >= until)
            st = YARD_ETIMEDOUT;
        if (st == YARD_OK && f->ops->sleep)
            f->ops->sleep(f, YARD_ANY_SIGNAL, 0, until);
        else if (st == YARD_OK)
            sched_yield();
    } while (st == YARD_OK);
    f->ready = NULL;
    return st;
}

void yard_fabric_interrupt(yard_fabric *f)
{
    atomic_fetch_add(&f->n_disturbed, 1);
    if (f->ops->wake)
        f->ops->wake(f);
}

yard_status yard_fabric_poll(yard_fabric *f, uint32_t *lost_rank)
{
    const uint32_t rank = atomic_load_explicit(&f->first_lost, memory_order_acquire);

    if (rank == UINT32_MAX)
        return YARD_OK;
    if (lost_rank)
        *lost_rank = rank;
    return yard_peer_fail(f, rank);
}
