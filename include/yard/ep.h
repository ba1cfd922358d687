/* libyard-ep: dispatch and combine for expert parallelism.
 *
 * n_experts experts are spread over n_ranks ranks, n_experts / n_ranks consecutive ones on each.
 * Ranks form instances (DP groups) of tp consecutive ranks; all ranks of an instance hold the same
 * tokens and routing. *Dispatch* brings every token to the ranks of its experts, *combine* brings
 * the experts' results back and adds them with their weights. Each is split into a send that never
 * blocks and a receive, so that anything can run between them:
 *
 *     yard_ep_dispatch_send(round, x, NULL, expert, weight, &n_tokens, stream);
 *     ...                                                 // the shared expert, say
 *     yard_ep_dispatch_recv(round, expert_x, expert_x_scale, count, row_index, stream);
 *     ...                                                 // the routed experts: expert_y
 *     yard_ep_combine_send(round, expert_y, stream);
 *     yard_ep_combine_recv(round, y, stream);
 *
 * A *round* is one exchange in flight and keeps the routing of its send; micro-batches use two.
 * Every rank makes the same calls on the same rounds in the same order, also with zero tokens.
 *
 * Shapes, capacities and alignment depend on the config only, which is equal on all ranks. The same
 * inputs give the same bits at any timing.
 *
 * Threads: one at a time in all calls of a group, its rounds included; groups are independent.
 *
 * Errors are sticky: when a call reports a lost peer or a passed deadline, every later call on the
 * group returns the same status at once; destroy the group and create a new one. */
#ifndef YARD_EP_H
#define YARD_EP_H

#include <yard/fabric.h>
#include <yard/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define YARD_EP_ABI_VERSION 1

/* The ABI version of the library in use; YARD_EP_ABI_VERSION is that of the header. */
YARD_API uint32_t yard_ep_version(void);

typedef struct yard_ep yard_ep;
typedef struct yard_ep_round yard_ep_round;

typedef enum yard_ep_dtype {
    YARD_EP_F32,
    YARD_EP_BF16,
    YARD_EP_FP8 /* dispatch only: e4m3 codes, one f32 scale per 128 values of a row */
} yard_ep_dtype;

typedef enum yard_ep_combine {
    YARD_EP_EXACT, /* one row per (token, expert) travels back; weights are applied at its origin */
    YARD_EP_PARTIAL /* the experts of one rank are summed there first, in f32: fewer bytes, one
                       rounding more */
} yard_ep_combine;

typedef enum yard_ep_device {
    YARD_EP_CPU, /* processes that share memory or a network; every call is complete at return */
    YARD_EP_CUDA /* kernels on a stream of the calling thread's current device */
} yard_ep_device;

typedef enum yard_ep_layout {
    YARD_EP_EXPERT_MAJOR, /* the rows of each expert are contiguous */
    YARD_EP_FLAT,         /* each token once per rank; row_index says which rows an expert reads */
    YARD_EP_FLAT_IN_PLACE /* the same, but rows stay where they landed: yard_ep_expert_x() */
} yard_ep_layout;

typedef struct yard_ep_config {
    size_t size;            /* set by the initialiser */
    uint32_t n_experts;     /* required; a multiple of the number of ranks */
    uint32_t top_k;         /* experts a token names; required, 1 to 32 */
    uint32_t hidden;        /* values of a row; required */
    uint32_t max_tokens;    /* of an instance in one call; required */
    uint32_t tp;            /* ranks of an instance; default 1; divides the number of ranks */
    uint32_t n_rounds;      /* rounds that may be in flight; default 1 */
    uint32_t row_align;     /* expert-major: an expert's first row is a multiple of it; default 1 */
    yard_ep_dtype dispatch; /* rows on the wire and in expert_x; default FP8 */
    yard_ep_dtype combine;  /* rows of expert_y and on the wire: F32 or BF16; default BF16 */
    yard_ep_dtype input;    /* of x when dispatch is FP8: BF16 or F32 (quantised by the send), or
                               FP8 with x_scale; otherwise equal to dispatch; default BF16 */
    yard_ep_dtype output;   /* of y: F32 or BF16; default F32 */
    yard_ep_combine mode;   /* default exact */
    yard_ep_layout layout;  /* default expert-major */
    bool ue8m0;             /* quantisation scales are rounded up to powers of two */
    uint64_t timeout_us;    /* of every receive; default 5 s */
    yard_fabric *fabric; /* borrowed; its heap holds the group's heap_bytes from heap_at on. NULL:
                            the group makes its own from fabric_config */
    const yard_fabric_config *fabric_config; /* NULL: from the environment, and one rank where that
                                                says nothing. With n_ranks 0 the environment gives
                                                rank, n_ranks and rendezvous, the config the rest.
                                                heap_bytes, config_hash, config_text and timeout_us
                                                are filled in by the library */
    bool node_copies; /* dispatch sends a row once to each other node that has experts of its token,
                         whose ranks all read it there, instead of once per rank. Wants ranks of a
                         node to share memory (transport shm or shm+tcp) where there are several
                         nodes, one with several ranks. Default false */
    bool expert_y_in_place; /* expert_y is the round's own buffer, yard_ep_expert_y(): results are
                               read where the experts wrote them instead of being copied, on this
                               rank, and on ranks whose memory is shared (shm, shm+tcp). Costs heap,
                               see yard_ep_capacity_of(). Default false */
    uint64_t heap_at; /* of a borrowed fabric: where the group's part of the heap begins, zeroed and
                         used by nobody else, no group before included; a multiple of 64, equal on
                         all ranks. Default 0 */
    yard_ep_device device;        /* default CPU */
    uint32_t self_proving_tokens; /* CUDA: up to so many max_tokens, rows need no flags, which is
                                     fastest for small batches. Default 128; 0: always flags. Rows
                                     in place are counted at any number of tokens */
    uint32_t send_sms; /* CUDA: the sends have as many blocks as fill so many multiprocessors, over
                          more of which they may be spread; 0, the default: all */
} yard_ep_config;

#define YARD_EP_CONFIG_INIT                                                                        \
    {                                                                                              \
        .size = sizeof(yard_ep_config), .tp = 1, .n_rounds = 1, .row_align = 1,                    \
        .dispatch = YARD_EP_FP8, .combine = YARD_EP_BF16, .input = YARD_EP_BF16,                   \
        .output = YARD_EP_F32, .timeout_us = 5000000, .self_proving_tokens = 128                   \
    }

/* On GPUs (device YARD_EP_CUDA) the four calls enqueue kernels and return; they neither synchronise
 * nor allocate, and may be captured in a CUDA graph and replayed. What differs from the CPU:
 *   - The group belongs to the device that was current in yard_ep_create(). All pointers of the
 * four calls are device memory, n_tokens too, and stream is a cudaStream_t of that device.
 *   - "When the call returns" becomes "when the stream passes the call", completion and reuse
 * alike.
 *   - Bad token counts or ids and passed deadlines are found by kernels: the exchange's outputs are
 *     then undefined, no later kernel of the group does anything, and yard_ep_poll() and every
 *     later call report it. A receive also ends, within milliseconds, when a peer's process has.
 *   - Values of a NaN may change into another NaN. yard_ep_get_stats() counts nothing.
 *   - At most 384 ranks, 255 experts a rank. Ranks of one node store to each other (NVLink or PCIe
 *     peer access); those of other nodes are put to by NVSHMEM, which needs libyard-ep-nvshmem. Of
 *     NVSHMEM a process has one set of ranks: later groups over it have the same ones.
 *   - capacity.heap_bytes is of a group over nvlink, unless fabric_config names another transport.
 *   - A borrowed fabric is one whose heap is a device's, or has one beside it (device_heap_bytes):
 * heap_bytes and heap_at are of that heap, which is filled with ones, not zeros. Configs are not
 *     compared over it.
 *   - A receive that waits keeps the multiprocessors that it will need. So nothing that a peer
 * waits for may come to stand behind it: receives of several rounds, or groups, come in one order
 * on all ranks (one stream, or streams joined by events). Ranks that each wait for what the other
 *     cannot start end by their deadlines.
 *   - A call from inside a stream capture, right behind the send that it belongs to, starts its
 *     kernel while that send still runs. */

/* Rows that expert_x, expert_y and row_index must have room for.
 *   dp = n_ranks / tp, local = n_experts / n_ranks
 *   routed = dp * max_tokens * min(top_k, local) + local * (row_align - 1)
 * expert-major: expert_x, expert_y, row_index: routed. flat, in place or not: expert_x: dp *
 * max_tokens; expert_y and row_index: routed. */
typedef struct yard_ep_capacity {
    uint64_t expert_x_rows, expert_y_rows;
    size_t heap_bytes; /* of the symmetric heap, per rank: the formula is in yard_ep_capacity_of */
} yard_ep_capacity;

/* Bytes of heap, all terms rounded up to 64 (R = n_ranks, T = max_tokens, k = top_k):
 *   once:       R * 8 + 8 + R * 384                  comparing the ranks' configs
 *   per round:  R * header(T)                        headers of dispatch, one per source rank
 *             + dp * T * dispatch_row                rows of dispatch
 *             + T * k * combine_row                  rows of combine
 *             + T * output_row                       finished rows from siblings, tp > 1 only
 *             + 5 * R * 8                            signal words
 *             + routed * hidden * bytes + 2 * R * T * min(k, local) * 4   expert_y_in_place only
 *             + staging: header(T) * R + T * dispatch_row, and for transports that do not copy
 *               at once (all but shm) routed * combine_row, unless expert_y_in_place, + T *
 *               output_row
 *   header(T) = 64 + T * (4 + 8 * k);  dispatch_row = hidden * bytes + scales.
 * Needs no group. Errors: YARD_EINVAL naming the field. */
YARD_API yard_status yard_ep_capacity_of(const yard_ep_config *config, uint32_t n_ranks,
                                         yard_ep_capacity *out, yard_error *err);

/* Collective. On success the caller owns *out. Errors: YARD_EINVAL (a field, or another value on
 * another rank: both are shown, on all ranks), those of yard_fabric_create(). */
YARD_API yard_status yard_ep_create(yard_ep **out, const yard_ep_config *config, yard_error *err);
/* Not collective; rounds end with it. NULL is fine. */
YARD_API void yard_ep_destroy(yard_ep *ep);

YARD_API uint32_t yard_ep_rank(const yard_ep *ep);
YARD_API uint32_t yard_ep_size(const yard_ep *ep);
/* "cpu over shm: all 2 ranks are on one node". Owned by the group. */
YARD_API const char *yard_ep_describe(const yard_ep *ep);

/* Round number round_idx < n_rounds. Owned by the group. NULL when there is no such round. */
YARD_API yard_ep_round *yard_ep_get_round(yard_ep *ep, uint32_t round_idx);

/* Says that no instance has more than n_tokens in an exchange of this round, from its next
 * dispatch_send on; 0: config.max_tokens, as at first. For callers that know it on the host, as a
 * step of an engine does: on GPUs a group for many tokens then exchanges few as fast as a group for
 * few, and kernels that are captured keep the limit. All ranks say the same before the same
 * dispatch_send; more tokens than it are an error there. Reads nothing of the device, never blocks.
 * Errors: YARD_EINVAL (above max_tokens, or the round is in flight). */
YARD_API yard_status yard_ep_round_limit(yard_ep_round *round, uint32_t n_tokens);

/* Sends this instance's tokens to the ranks of their experts.
 *
 *   x        [n_tokens, hidden] of config.input, caller-owned; free when the stream passes the call
 *   x_scale  [n_tokens, ceil(hidden / 128)] f32, only when config.input is FP8, else NULL
 *   expert   [n_tokens, top_k] i32 global expert ids, those of a token different; -1 is skipped
 *   weight   [n_tokens, top_k] f32
 *   n_tokens [1] i32, 0 to max_tokens, or the round's limit; read when the call runs
 *
 * All ranks of an instance pass the same values; each sends the rows t with t mod tp == its place.
 * Never blocks. Errors: YARD_EINVAL (too many tokens, an id outside the experts or twice in a
 * token, a round whose last combine_recv has not been called; nothing is sent and the group goes
 * on), YARD_EPEER. */
YARD_API yard_status yard_ep_dispatch_send(yard_ep_round *round, const void *x,
                                           const float *x_scale, const int32_t *expert,
                                           const float *weight, const int32_t *n_tokens,
                                           yard_stream stream);

/* Receives the tokens that were sent to this rank's experts.
 *
 *   expert_x       expert-major: [capacity, hidden] of config.dispatch; the rows of local expert e
 *                  follow those of e - 1, each expert's first row a multiple of row_align; within
 *                  an expert in ascending order of (instance, token). flat: one row per token, in
 *                  ascending order of (instance, token). Rows beyond are left unwritten.
 *                  flat in place: NULL, the rows are at yard_ep_expert_x()
 *   expert_x_scale [capacity, ceil(hidden / 128)] f32; only when dispatch is FP8, else NULL; flat
 *                  in place: NULL
 *   expert_count   [n_local_experts] i32 rows of each local expert
 *   row_index      [expert_y_rows] i32. expert-major: the row's origin, instance * max_tokens +
 *                  token. flat: the row of expert_x that expert row i reads (the rows of expert_y
 *                  are numbered as in expert-major); in place that is the origin again. NULL is
 *                  fine in expert-major.
 *
 * Completion: the buffers are valid when the stream passes the call. Errors: YARD_ETIMEDOUT,
 * YARD_EPEER naming the rank; YARD_EINVAL without a matching send. */
YARD_API yard_status yard_ep_dispatch_recv(yard_ep_round *round, void *expert_x,
                                           float *expert_x_scale, int32_t *expert_count,
                                           int32_t *row_index, yard_stream stream);

/* Where tokens land, with the layout FLAT_IN_PLACE, else NULL: row number instance * max_tokens +
 * token begins so many times *pitch_bytes behind it and has hidden values of config.dispatch; its
 * FP8 scales, f32, begin *scale_at_bytes behind its first value. All are multiples of 4, rows of
 * 16. Read only, owned by the group, in device memory on GPUs; the same in every exchange.
 *
 * Only rows that row_index names hold anything. They may be read from a dispatch_recv that succeeds
 * to the combine_send that follows (on GPUs: by what stands between the two calls in the stream, or
 * is joined to it by events): afterwards peers write them again. */
YARD_API const void *yard_ep_expert_x(const yard_ep_round *round, size_t *pitch_bytes,
                                      size_t *scale_at_bytes);

/* The round's buffer for results, [expert_y_rows, hidden] of config.combine, owned by the group;
 * NULL unless config.expert_y_in_place. The caller may write it from a dispatch_recv that succeeds
 * to the combine_send that follows, and at no other time: peers read it until the next
 * dispatch_recv succeeds. combine_send may change it (partial sums). */
YARD_API void *yard_ep_expert_y(const yard_ep_round *round);

/* Sends the experts' results back.
 *   expert_y [expert_y_rows, hidden] of config.combine, numbered as expert-major rows;
 *     caller-owned, free when the stream passes the call, or combine_recv where that is the next
 *     thing in a CUDA graph; with expert_y_in_place it must be yard_ep_expert_y().
 * Never blocks. Errors as dispatch_send. */
YARD_API yard_status yard_ep_combine_send(yard_ep_round *round, const void *expert_y,
                                          yard_stream stream);

/* Receives the results of this instance's tokens and adds them.
 *   y [n_tokens, hidden] of config.output, caller-owned: the sum over the token's experts of weight
 *     times result, in f32, in ascending order of k (partial: of ranks). 0 for a token without
 *     experts. The same bits on all ranks of the instance.
 * Ends the round: its next call is dispatch_send. Errors as dispatch_recv. */
YARD_API yard_status yard_ep_combine_recv(yard_ep_round *round, void *y, yard_stream stream);

/* YARD_EPEER once a peer is lost, the sticky status after an error, else YARD_OK. Never blocks. */
YARD_API yard_status yard_ep_poll(yard_ep *ep);
/* The message of the first failure; "" if there was none. Owned by the group. */
YARD_API const char *yard_ep_error(const yard_ep *ep);

/* Rows for other ranks since creation, so that what one copy per token and destination means can be
 * counted. With node_copies a row to another node counts once. What ranks read in place, in memory
 * that they share, is not sent; it counts apart, once for each reader. */
typedef struct yard_ep_stats {
    uint64_t n_dispatch_rows_sent, n_combine_rows_sent, n_output_rows_sent;
    uint64_t n_wire_bytes; /* headers, rows, and 4 bytes for each result in place */
    uint64_t n_rows_in_place, n_results_in_place;
} yard_ep_stats;
YARD_API void yard_ep_get_stats(const yard_ep *ep, yard_ep_stats *out);

#ifdef __cplusplus
}
#endif

#endif
