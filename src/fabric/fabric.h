/* The fabric room's header for its neighbours. */
#ifndef YARD_FABRIC_ROOM_H
#define YARD_FABRIC_ROOM_H

#include <yard/fabric.h>

#include "base/base.h"

/* In place of a word's offset: a wait for any of several words. */
#define YARD_ANY_SIGNAL UINT64_MAX

/* One transport. Functions get the fabric whose common part is filled in; they keep their own state
 * in fabric->impl. Errors go to fabric->err (open: to err). */
typedef struct yard_fabric_ops {
    const char *name;
    bool copies;         /* see yard_fabric_copies() */
    bool sleep_receives; /* signals change while the caller is in sleep: no spin before it */
    /* After rendezvous: maps or registers the heap and connects to all peers. Sets heap. */
    yard_status (*open)(yard_fabric *f, yard_error *err);
    void (*close)(yard_fabric *f); /* half-opened fabrics too */
    /* Arguments are checked, peer is another rank that is not known to be gone. n_bytes 0: only the
     * signal. */
    yard_status (*put_signal)(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                              yard_sym sig, uint64_t value, uint32_t peer);
    /* A wait begins: puts that were held back to go out together go now. NULL: nothing is held. */
    void (*flush)(yard_fabric *f);
    /* As yard_fabric_put_signal_node(), whose arguments are checked; relay may be this rank. NULL:
     * ranks of a node do not share memory. */
    yard_status (*put_signal_node)(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                                   uint32_t relay, yard_sym sig, uint64_t value,
                                   const uint32_t *targets, uint32_t n_targets);
    /* Heap of another rank of this node; NULL exactly where put_signal_node is. */
    const void *(*view)(const yard_fabric *f, uint32_t rank);
    /* Sleeps until yard_wait_over(f, sig, seen), or the deadline: the slow part of a wait, after a
     * brief spin. sig may be YARD_ANY_SIGNAL. May return early. */
    void (*sleep)(yard_fabric *f, yard_sym sig, uint64_t seen, yard_deadline until);
    /* After a peer has left in order: true once nothing that it sent can arrive any more. A wait
     * for it fails only then. NULL: always true (a sender's puts are done when it returns). */
    bool (*drained)(yard_fabric *f, uint32_t peer);
    /* Makes a sleeper look again (a peer was lost); called from the control thread. */
    void (*wake)(yard_fabric *f);
    /* The heap is memory of a device: kernels put and wait, calls from the host get YARD_ENOTSUP.
     * Where this rank's device reaches the heap of a rank by plain stores, or NULL. The heap is
     * filled with ones, not zeros: what self-proving data needs. NULL: host memory. */
    void *(*device_heap)(const yard_fabric *f, uint32_t rank);
    /* As yard_fabric_device_puts(); NULL: it has none. */
    const struct yard_nvshmem *(*device_puts)(const yard_fabric *f);
    bool only_puts; /* as yard_fabric_only_puts() */
} yard_fabric_ops;

enum { YARD_MAX_CONFIG_BYTES = 4096 }; /* a config whose size is larger was never initialised */

/* Copies a caller's config, of an older or newer version: defaults for a missing tail, YARD_EINVAL
 * for an unknown setting and for one that was not initialised. */
yard_status yard_fabric_config_read(yard_fabric_config *out, const yard_fabric_config *config,
                                    yard_error *err);

/* yard_fabric_create() for a caller that needs less where puts copy at once (yard_fabric_copies()):
 * the heap then has copying_heap_bytes; 0: config.heap_bytes. */
yard_status yard_fabric_create_for(yard_fabric **out, const yard_fabric_config *config,
                                   size_t copying_heap_bytes, yard_error *err);

/* "ranks 2, 5-7 of 8" (at most a few ranges, then ".."): those with missing[rank]. */
void yard_ranks_text(char *text, size_t n_text, const bool *missing, uint32_t n_ranks);

/* What the caller of a rank needs equal on all ranks: as config_hash and config_text. */
typedef struct yard_rank_config {
    uint32_t rank;
    uint64_t hash;
    const char *text;
} yard_rank_config;

/* YARD_EINVAL that names what differs between two ranks, both values. */
yard_status yard_fabric_config_differs(const yard_rank_config *a, const yard_rank_config *b,
                                       yard_error *err);

/* A deadline config.start_timeout_us from now, for what callers exchange while they start. */
yard_deadline yard_fabric_start_deadline(const yard_fabric *fabric);

/* See ops->device_heap: of the transport's heap, or of the one beside it
 * (config.device_heap_bytes). NULL where there is none, and for ranks that do not exist. */
void *yard_fabric_device_heap(const yard_fabric *f, uint32_t rank);
size_t yard_fabric_device_heap_bytes(const yard_fabric *f); /* 0: it has none */

/* A word in host memory that devices read, 0 until a peer is lost: for kernels that wait. Owned by
 * the fabric, made by the first call. NULL with *err: YARD_ENOMEM, YARD_ENOTSUP without CUDA. */
const uint32_t *yard_fabric_device_lost(yard_fabric *f, yard_error *err);

/* The symbol yard_nvshmem_library of libyard-ep-nvshmem, which is built where NVSHMEM is. Functions
 * return NVSHMEM's status, 0 when all is well, and are collective but for make_id and reach; they
 * have no deadline. */
typedef struct yard_nvshmem {
    size_t size;         /* of this struct: both libraries are from one build */
    size_t id_bytes;     /* at most YARD_NVSHMEM_ID_BYTES */
    const char *version; /* that it was compiled against */
    int (*make_id)(void *id);
    int (*start)(const void *id, uint32_t rank, uint32_t n_ranks);
    void *(*allocate)(size_t n_bytes); /* symmetric memory of the current device; NULL: none left */
    void (*release)(void *heap);
    void *(*reach)(const void *heap, uint32_t rank); /* by plain stores; NULL: only by puts */
    /* its own collective on a stream of CUDA, for comparison: n_bytes of every rank to every rank
     */
    int (*all_to_all)(void *to, const void *from, size_t n_bytes, void *stream);
    const void *kernels; /* of the ep room: ep_cuda_kernels */
} yard_nvshmem;

enum { YARD_NVSHMEM_ID_BYTES = 256 };

/* Of a fabric whose peers are reached by puts, all or some: what they are put by; NULL: stores
 * reach all. */
const yard_nvshmem *yard_fabric_device_puts(const yard_fabric *f);
/* Peers are put to also where stores would reach them. */
bool yard_fabric_only_puts(const yard_fabric *f);

/* A fabric over a transport that is not in the table (tests: simulated networks). heap is
 * heap_bytes of zeroed memory, 64-byte aligned, owned by the transport. ops->open is not called;
 * its close, wake and sleep may be NULL (a wait then yields). Waits do not spin before ops->sleep,
 * so that time can be simulated there. */
yard_status yard_fabric_create_custom(yard_fabric **out, const yard_fabric_ops *ops, uint32_t rank,
                                      uint32_t n_ranks, void *heap, size_t heap_bytes, void *impl,
                                      yard_error *err);

/* Makes nodes of n consecutive ranks in a custom fabric, whose ranks are all on one otherwise. */
void yard_fabric_set_nodes(yard_fabric *f, uint32_t ranks_per_node);

/* For ops->sleep: true once the word is not as it was seen, or (YARD_ANY_SIGNAL) what the caller
 * waits for has come; also when a peer has gone or the wait was interrupted. Sequentially
 * consistent with what the transport did before. */
bool yard_wait_over(const yard_fabric *f, yard_sym sig, uint64_t seen);

/* A transport's state, for custom transports. */
void *yard_fabric_impl(const yard_fabric *f);

#endif
