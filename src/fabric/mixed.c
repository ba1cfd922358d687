/* shm inside a node and TCP between nodes, in one transport.
 *
 * The TCP transport receives into a heap that all ranks of the node map, so a rank puts to its
 * mates by copying, and what arrives for one rank can signal others: whoever receives at the relay
 * (its caller while it waits, its thread otherwise) adds to their words. All sleep in poll(), and
 * are woken by their eventfd, which their mates have; the flag that says so lies in front of the
 * heap. That no wake-up is lost is the argument of puts.c, with the flag in shared memory. */
#include "fabric/tcp.h"

enum { CHUNK = 32 };

static yard_status mixed_open(yard_fabric *f, yard_error *err)
{
    return yard_tcp_open(f, true, err);
}

static yard_status mixed_put_signal(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                                    yard_sym sig, uint64_t value, uint32_t peer)
{
    yard_tcp *t = f->impl;

    if (!yard_heaps_has(&t->heaps, peer))
        return yard_tcp_put_signal(f, dst, src, n_bytes, sig, value, peer);
    if (n_bytes)
        yard_copy(yard_heaps_heap(&t->heaps, peer) + dst, src, n_bytes);
    yard_tcp_add(t, peer, sig, value);
    return YARD_OK;
}

/* To a relay on another node: the data with the first target's signal, then a put without data for
 * each other target. The stream keeps their order, so the data lies there before any signal. */
static yard_status send_node(yard_tcp *t, yard_queued_put first, uint32_t relay,
                             const uint32_t *targets, uint32_t n_targets)
{
    yard_status st = YARD_OK;

    for (uint32_t at = 0; st == YARD_OK && at < n_targets; at += CHUNK) {
        const uint32_t n = n_targets - at < CHUNK ? n_targets - at : CHUNK;
        yard_queued_put items[CHUNK];

        for (uint32_t i = 0; i < n; i++) {
            items[i] = first;
            items[i].put.target = targets[at + i];
            first.put.n_bytes = 0;
        }
        st = yard_tcp_send(t, &t->peers[relay], items, n);
    }
    return st;
}

static yard_status mixed_put_signal_node(yard_fabric *f, yard_sym dst, const void *src,
                                         size_t n_bytes, uint32_t relay, yard_sym sig,
                                         uint64_t value, const uint32_t *targets,
                                         uint32_t n_targets)
{
    yard_tcp *t = f->impl;

    if (!yard_heaps_has(&t->heaps, relay))
        return send_node(t, (yard_queued_put){ .put = { dst, n_bytes, sig, value, 0 }, .src = src },
                         relay, targets, n_targets);
    if (n_bytes)
        yard_copy(yard_heaps_heap(&t->heaps, relay) + dst, src, n_bytes);
    for (uint32_t i = 0; i < n_targets; i++)
        yard_tcp_add(t, targets[i], sig, value);
    return YARD_OK;
}

static const void *mixed_view(const yard_fabric *f, uint32_t rank)
{
    const yard_tcp *t = f->impl;

    return yard_heaps_heap(&t->heaps, rank);
}

const yard_fabric_ops yard_fabric_mixed = {
    .name = "shm+tcp",
    .copies = false,
    .sleep_receives = true,
    .open = mixed_open,
    .close = yard_tcp_close,
    .put_signal = mixed_put_signal,
    .put_signal_node = mixed_put_signal_node,
    .view = mixed_view,
    .flush = yard_tcp_begin_wait,
    .sleep = yard_tcp_sleep,
    .drained = yard_tcp_drained,
    .wake = yard_tcp_wake,
};
