/* Ranks of one node: every rank maps the heaps of all (heaps.h) and puts by copying.
 *
 * No wake-up is lost. The sleeper: (1) reads rung, (2) stores sleeps_on, (3) reads the word; it
 * sleeps only if the word still has the old value, and then only while rung is as in (1). The
 * signaller: (4) adds to the word, (5) reads sleeps_on, and if that is its word or any, (6) adds to
 * rung and wakes. All of 2-5 are sequentially consistent, so they have one order: if (3) comes
 * before (4), then (2) before (5), and the signaller rings. The ring's (6) comes after (1): either
 * the sleeper is in the kernel and is woken, or the kernel finds rung changed. Otherwise (4) comes
 * before (3), and the sleeper sees the word. */
#include <limits.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fabric/heaps.h"

/* Signal words lie at multiples of 8, so neither 0 (awake) nor this is one's offset + 1. */
#define SLEEPS_ON_ANY UINT64_C(2)

static uint64_t sleeper_of(yard_sym sig)
{
    return sig == YARD_ANY_SIGNAL ? SLEEPS_ON_ANY : sig + 1;
}

/* Not FUTEX_PRIVATE: the word is shared by processes. until is of the monotonic clock, as is the
 * absolute time of FUTEX_WAIT_BITSET. */
static void futex_wait(_Atomic uint32_t *word, uint32_t seen, yard_deadline until)
{
    const struct timespec at = { .tv_sec = (time_t)(until / 1000000),
                                 .tv_nsec = (long)(until % 1000000 * 1000) };

    syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, &at, NULL, FUTEX_BITSET_MATCH_ANY);
}

static void ring(yard_heap_control *d)
{
    atomic_fetch_add(&d->rung, 1);
    syscall(SYS_futex, &d->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void shm_sleep(yard_fabric *f, yard_sym sig, uint64_t seen, yard_deadline until)
{
    yard_heap_control *d = yard_heaps_control(f->impl, f->rank);
    const uint32_t rung = atomic_load(&d->rung);

    atomic_store(&d->sleeps_on, sleeper_of(sig));
    if (!yard_wait_over(f, sig, seen))
        futex_wait(&d->rung, rung, until);
    atomic_store_explicit(&d->sleeps_on, 0, memory_order_relaxed);
}

static void shm_wake(yard_fabric *f)
{
    ring(yard_heaps_control(f->impl, f->rank));
}

/* Adds to a word in the heap of a rank, which may be this one. */
static void add(const yard_heaps *h, uint32_t rank, yard_sym sig, uint64_t value)
{
    yard_heap_control *d = yard_heaps_control(h, rank);
    uint64_t sleeper;

    /* Releases the copy: who acquires the sum sees the bytes. */
    atomic_fetch_add(yard_heaps_word(h, rank, sig), value);
    /* Taking sleeps_on back leaves one wake-up for many signals to one word. */
    sleeper = atomic_load(&d->sleeps_on);
    if ((sleeper == sleeper_of(sig) || sleeper == SLEEPS_ON_ANY) &&
        atomic_compare_exchange_strong(&d->sleeps_on, &sleeper, 0))
        ring(d);
}

static yard_status shm_put_signal(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                                  yard_sym sig, uint64_t value, uint32_t peer)
{
    const yard_heaps *h = f->impl;

    if (n_bytes)
        yard_copy(yard_heaps_heap(h, peer) + dst, src, n_bytes);
    add(h, peer, sig, value);
    return YARD_OK;
}

static yard_status shm_put_signal_node(yard_fabric *f, yard_sym dst, const void *src,
                                       size_t n_bytes, uint32_t relay, yard_sym sig, uint64_t value,
                                       const uint32_t *targets, uint32_t n_targets)
{
    const yard_heaps *h = f->impl;

    if (n_bytes)
        yard_copy(yard_heaps_heap(h, relay) + dst, src, n_bytes);
    for (uint32_t i = 0; i < n_targets; i++)
        add(h, targets[i], sig, value);
    return YARD_OK;
}

static const void *shm_view(const yard_fabric *f, uint32_t rank)
{
    return yard_heaps_heap(f->impl, rank);
}

static yard_status shm_open_fabric(yard_fabric *f, yard_error *err)
{
    f->impl = calloc(1, sizeof(yard_heaps));
    if (!f->impl)
        return yard_fail(err, YARD_ENOMEM, "fabric: heap: %zu bytes", sizeof(yard_heaps));
    return yard_heaps_open(f, f->impl, f->heap_bytes, -1, err);
}

static void shm_close(yard_fabric *f)
{
    if (!f->impl)
        return;
    yard_heaps_close(f, f->impl);
    free(f->impl);
    f->impl = NULL;
}

const yard_fabric_ops yard_fabric_shm = {
    .name = "shm",
    .copies = true,
    .open = shm_open_fabric,
    .close = shm_close,
    .put_signal = shm_put_signal,
    .put_signal_node = shm_put_signal_node,
    .view = shm_view,
    .sleep = shm_sleep,
    .wake = shm_wake,
};
