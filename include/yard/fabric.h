/* Symmetric memory between the ranks of a job, and exactly three ways to touch a peer: put with
 * signal, signal, wait. Everything the libraries above exchange goes through these.
 *
 *   - Every rank has a heap of the same size and layout; a yard_sym is an offset in it, valid at
 *     every rank.
 *   - A signal word is 8 bytes of the heap. Signals *add*; a waiter waits for *at least n*. A word
 *     has exactly one writing rank. No order between messages is assumed: a signal says that its
 *     own put has arrived, and nothing about any other.
 *   - There is no fence, no flush and no remote read.
 *   - Ranks of a node may see each other's heaps. A put can then cross to one of them and signal
 *     several, who read it there (yard_fabric_put_signal_node, yard_fabric_view).
 *
 * Sources of puts lie in the heap too (library staging, registered once); they must stay unchanged
 * until the protocol above proves that the peer has the data. src may be any memory for transports
 * that copy at once (yard_fabric_copies()).
 *
 * Threads: put, signal and wait of one fabric from one thread at a time, yard_fabric_interrupt()
 * from any; several fabrics in one process are independent. */
#ifndef YARD_FABRIC_H
#define YARD_FABRIC_H

#include <stdbool.h>
#include <stddef.h>

#include <yard/status.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct yard_fabric yard_fabric;

typedef uint64_t yard_sym;      /* offset in the symmetric heap */
typedef uint64_t yard_deadline; /* monotonic clock in microseconds, as yard_fabric_deadline() */

typedef struct yard_fabric_config {
    size_t size;            /* set by the initialiser */
    uint32_t rank, n_ranks; /* required; yard_fabric_config_from_env() finds them */
    size_t heap_bytes;      /* required, equal on all ranks */
    const char *transport;  /* NULL: shm if all ranks are on one node, tcp if each has its own, else
                               shm+tcp; or "shm", "tcp", "shm+tcp", "libfabric";
                               "nvlink": device memory of one node, for libyard-ep on GPUs;
                               "nvlink+nvshmem": device memory of several nodes, where kernels put
                               by NVSHMEM what stores do not reach; "nvshmem": put to all ranks;
                               "device": nvlink on one node, nvlink+nvshmem on several */
    const char *provider;   /* libfabric: "tcp", "verbs", "efa", ..; NULL: best there is. NVSHMEM:
                               "ibgda", "ibrc", "efa", "none"; NULL: what its variables say, else
                               "none" on one node and its own default on several */
    const char *rendezvous; /* where rank 0 listens: "host:port", or "unix:NAME" when all ranks are
                               on one node. NULL with n_ranks 1 */
    const char *secret;     /* job secret, equal on all ranks; connections without it are refused.
                               NULL: the rendezvous string itself */
    const char *bind_host;  /* address other nodes reach this rank at; default 127.0.0.1 */
    uint64_t config_hash;   /* hash of what the caller needs equal on all ranks; 0: nothing */
    const char *config_text;   /* the same for people, as "name value, name value", up to 399
                                  characters of which are compared too; when something differs, the
                                  items that do are shown for both ranks */
    uint64_t start_timeout_us; /* each start stage; default 60 s */
    uint64_t timeout_us;       /* default deadline of waits, for callers; default 5 s */
    bool force_network;        /* treat every rank as its own node (tests) */
    void (*notice)(void *ctx,
                   const char *line); /* start stages that take long say who is missing */
    void *notice_ctx;
    uint32_t ranks_per_node; /* a node is at most the ranks r with equal r / ranks_per_node (tests);
                                0: all ranks of a machine. Equal on all ranks */
    bool (*gives_up)(void *ctx); /* asked some twenty times a second while the start waits for other
                                    ranks, by the thread that creates; true ends it with
                                    YARD_EPEER on all ranks that are there. NULL: never */
    void *gives_up_ctx;
    size_t device_heap_bytes; /* a second heap beside the first, in the memory of the device that is
                                 current to the calling thread: what kernels of libyard-ep store to,
                                 while the host's calls keep to the first. All ranks on one node;
                                 equal on all ranks; not with transports whose heap is a device's.
                                 Default 0: none */
} yard_fabric_config;

#define YARD_FABRIC_CONFIG_INIT                                                                    \
    {                                                                                              \
        .size = sizeof(yard_fabric_config), .start_timeout_us = 60000000, .timeout_us = 5000000    \
    }

/* Fills rank, n_ranks and rendezvous from the environment, first match: YARD_RANK/YARD_SIZE/
 * YARD_RENDEZVOUS (set by `switchyard run`), Open MPI and PMIx, Slurm, torchrun-style
 * RANK/WORLD_SIZE/MASTER_ADDR/MASTER_PORT, Kubernetes indexed jobs. Strings point into *storage.
 * YARD_RENDEZVOUS, YARD_SECRET and YARD_BIND_HOST count with each of them, YARD_SIZE where a
 * launcher does not tell the number of ranks. Errors: YARD_EINVAL naming a variable that is missing
 * or no number. When no scheme is there, storage->scheme is NULL and the config unchanged;
 * variables of half a scheme are an error. */
typedef struct yard_fabric_env {
    char rendezvous[256], secret[128], bind_host[128];
    const char *scheme; /* "switchyard run", "Open MPI", ..; NULL when none */
} yard_fabric_env;
YARD_API yard_status yard_fabric_config_from_env(yard_fabric_config *config,
                                                 yard_fabric_env *storage, yard_error *err);

/* Collective: returns on all ranks, or fails on all within start_timeout_us; the message names the
 * stage ("rendezvous", "peers", "heap", ..) and the missing ranks. The heap is touched (no page
 * fault later), zeroed, 64-byte aligned. Nothing is left behind when processes die. On success the
 * caller owns *out. Errors: YARD_EINVAL, YARD_ETIMEDOUT, YARD_EPEER, YARD_ENOMEM, YARD_EIO,
 * YARD_ENOTSUP (a transport, or a device, that this machine lacks: what is missing is named). */
YARD_API yard_status yard_fabric_create(yard_fabric **out, const yard_fabric_config *config,
                                        yard_error *err);

/* Not collective. Peers that wait for this rank later see YARD_EPEER. NULL is fine. */
YARD_API void yard_fabric_destroy(yard_fabric *fabric);

YARD_API uint32_t yard_fabric_rank(const yard_fabric *fabric);
YARD_API uint32_t yard_fabric_size(const yard_fabric *fabric);
/* Number of the node that a rank is on, counted from 0 in order of first rank. */
YARD_API uint32_t yard_fabric_node(const yard_fabric *fabric, uint32_t rank);
/* "shm" and the reason for it ("all 2 ranks are on one node"). Owned by the fabric. */
YARD_API const char *yard_fabric_transport(const yard_fabric *fabric, const char **reason);

/* Local address of a heap offset. */
YARD_API void *yard_fabric_local(const yard_fabric *fabric, yard_sym at);
YARD_API size_t yard_fabric_heap_bytes(const yard_fabric *fabric);

/* True when put_signal has read its source before it returns, so that any memory may be a source
 * and nothing needs to stay unchanged. */
YARD_API bool yard_fabric_copies(const yard_fabric *fabric);

/* Copies n_bytes from src to dst on rank peer; once they are visible there, adds value to the
 * signal word sig there. Returns at once, never blocks on the network. n_bytes may be 0. peer may
 * be this rank. Errors: YARD_EINVAL (outside the heap), YARD_EPEER (lost). */
YARD_API yard_status yard_fabric_put_signal(yard_fabric *fabric, yard_sym dst, const void *src,
                                            size_t n_bytes, yard_sym sig, uint64_t value,
                                            uint32_t peer);

/* Adds value to the signal word sig on rank peer. Returns at once. */
YARD_API yard_status yard_fabric_signal(yard_fabric *fabric, yard_sym sig, uint64_t value,
                                        uint32_t peer);

/* True when the ranks of a node see each other's heaps (shm, shm+tcp): put_signal_node and view
 * work. The same on all ranks. */
YARD_API bool yard_fabric_shares_node(const yard_fabric *fabric);

/* One copy for several ranks of a node: as yard_fabric_put_signal() to rank relay, but once the
 * bytes are visible there, adds value to the signal word sig of every target. targets  [n_targets]
 * different ranks of relay's node, relay among them or not; at least one. Read before the call
 * returns. Completion: returns at once, as put_signal; the signals are added where the data is
 * received, without any call of the relay's program. src must stay unchanged until any one target's
 * signal proves the arrival. A target finds the bytes by yard_fabric_view() of relay and waits with
 * yard_fabric_wait_relayed(); when relay is lost on the way, so may be its signals. A signal word
 * has one writing rank and one relay. Errors: those of put_signal, YARD_EINVAL (a target on another
 * node, none at all), YARD_EPEER (relay or a target lost), YARD_ENOTSUP unless
 * yard_fabric_shares_node(). Nothing is sent on error.
 */
YARD_API yard_status yard_fabric_put_signal_node(yard_fabric *fabric, yard_sym dst, const void *src,
                                                 size_t n_bytes, uint32_t relay, yard_sym sig,
                                                 uint64_t value, const uint32_t *targets,
                                                 uint32_t n_targets);

/* Local address of heap offset at of a rank of this node; NULL for ranks of other nodes, offsets
 * outside the heap, and unless yard_fabric_shares_node(). To be read only. Valid until destroy,
 * also when the rank is lost. */
YARD_API const void *yard_fabric_view(const yard_fabric *fabric, uint32_t rank, yard_sym at);

/* Waits until the local signal word sig, written by rank peer, is at least n; on return everything
 * that its signals announced is visible. Errors: YARD_ETIMEDOUT at the deadline, YARD_EPEER as soon
 * as peer is known to be lost, each naming the rank and its address. */
YARD_API yard_status yard_fabric_wait_until(yard_fabric *fabric, yard_sym sig, uint64_t at_least,
                                            uint32_t peer, yard_deadline until);

/* The same for a word that peer signals by yard_fabric_put_signal_node() through relay; also
 * YARD_EPEER once relay is gone; a passed deadline names both. */
YARD_API yard_status yard_fabric_wait_relayed(yard_fabric *fabric, yard_sym sig, uint64_t at_least,
                                              uint32_t peer, uint32_t relay, yard_deadline until);

/* The word's value now, with acquire order: for callers that poll several words. */
YARD_API uint64_t yard_fabric_read_signal(const yard_fabric *fabric, yard_sym sig);

/* Waits until ready(ctx), for callers that wait for any of several words: looks again whenever a
 * signal arrives here, a peer goes, or yard_fabric_interrupt() is called. ready is called by the
 * waiting thread, reads words by yard_fabric_read_signal() and must not block. Errors:
 * YARD_ETIMEDOUT at the deadline (without a message of its own: it may be no failure); YARD_EPEER
 * once any peer is lost or has left, naming it. */
YARD_API yard_status yard_fabric_wait_any(yard_fabric *fabric, bool (*ready)(void *ctx), void *ctx,
                                          yard_deadline until);

/* Makes a waiting call of this fabric look again, yard_fabric_wait_any() at its ready. Any thread.
 */
YARD_API void yard_fabric_interrupt(yard_fabric *fabric);

/* A deadline timeout_us from now; yard_fabric_config.timeout_us when 0. */
YARD_API yard_deadline yard_fabric_deadline(const yard_fabric *fabric, uint64_t timeout_us);

/* YARD_EPEER once any peer is lost (process gone, connection broken); never blocks. *lost_rank (may
 * be NULL) names the first one. A peer that has destroyed its fabric left in order and is not lost:
 * only waits for it and puts to it fail, or the end of every job would look like a failure. */
YARD_API yard_status yard_fabric_poll(yard_fabric *fabric, uint32_t *lost_rank);

/* Message of the last failure of a call on this fabric; "" if there was none. */
YARD_API const char *yard_fabric_error(const yard_fabric *fabric);

/* What went over the wire to other ranks, for tests and benches. */
typedef struct yard_fabric_stats {
    uint64_t n_puts, n_put_bytes, n_signals;
} yard_fabric_stats;
YARD_API void yard_fabric_get_stats(const yard_fabric *fabric, yard_fabric_stats *out);

#ifdef __cplusplus
}
#endif

#endif
