/* The ep room's header for its neighbours: libyard-ep, the sum over an instance's ranks that tensor
 * parallelism needs, and what `switchyard bench ep` needs of a GPU without seeing CUDA. */
#ifndef YARD_EP_ROOM_H
#define YARD_EP_ROOM_H

#include <yard/ep.h>

#include "base/base.h"

/* Adds up what the tp ranks of an instance have, in ascending order of ranks, so that all of them
 * get the same bits. */
typedef struct yard_all_reduce yard_all_reduce;

typedef struct yard_all_reduce_config {
    uint32_t tp; /* ranks of an instance; rank r is in instance r / tp */
    uint32_t max_rows, n_cols;
    yard_dtype dtype;    /* of x: F32 or BF16 */
    yard_fabric *fabric; /* borrowed; with a heap in device memory, x and n_rows are there too */
    uint64_t heap_at;    /* as in yard_ep_config */
    uint64_t timeout_us; /* of every wait; 0: the fabric's */
} yard_all_reduce_config;

/* Bytes of heap: 2 * tp * max_rows * n_cols values, tp words. The fabric is not read. */
size_t yard_all_reduce_heap_bytes(const yard_all_reduce_config *config);

/* Not collective. Errors: YARD_EINVAL (heap too small, ranks that do not divide by tp, a dtype that
 * is neither), YARD_ENOMEM; on a device YARD_ENOTSUP for rows that are no multiple of 16 bytes.
 */
yard_status yard_all_reduce_create(yard_all_reduce **out, const yard_all_reduce_config *config,
                                   yard_error *err);
void yard_all_reduce_destroy(yard_all_reduce *reduce); /* NULL is fine */

/* x [n_rows, n_cols] becomes the sum over the instance, made in f32 and rounded once. Collective
 * over the instance, with equal n_rows [1], 0 to max_rows. On CPUs it is complete on return; on a
 * device it is one kernel on the stream (a cudaStream_t), which may be captured: then what fails
 * while it runs shows in a later call and in yard_all_reduce_poll(). Errors are sticky:
 * YARD_ETIMEDOUT, YARD_EPEER naming the rank; a bad n_rows is YARD_EINVAL. */
yard_status yard_all_reduce_sum(yard_all_reduce *reduce, void *x, const int32_t *n_rows,
                                yard_stream stream);

/* The first failure so far, also of kernels that have run. */
yard_status yard_all_reduce_poll(yard_all_reduce *reduce);

/* The message of the first failure; "" if there was none. */
const char *yard_all_reduce_error(const yard_all_reduce *reduce);

/* measurements on a device; without CUDA every call returns YARD_ENOTSUP */

/* The devices of this process. Errors: YARD_ENOTSUP when there is none. */
yard_status yard_ep_device_count(uint32_t *out, yard_error *err);
/* Makes a device that of the calling thread; name  [64] "NVIDIA H200", may be NULL; versions  [64]
 * "driver 13.0, runtime 13.0". */
yard_status yard_ep_device_use(uint32_t device, char *name, char *versions, yard_error *err);

/* Exchanges of a group on a device, over and over. Sets of inputs take turns, so that a row that is
 * left from the exchange before does not look right. */
typedef struct yard_ep_bench yard_ep_bench;

typedef struct yard_ep_bench_inputs {
    uint32_t n_sets, n_tokens;
    const void *x;         /* [n_sets][n_tokens, hidden] of config.input */
    const float *x_scale;  /* [n_sets][n_tokens, groups] when that is FP8, else NULL */
    const int32_t *expert; /* [n_sets][n_tokens, top_k] */
    const float *weight;
    const void *expert_y; /* [expert_y_rows, hidden] of config.combine */
} yard_ep_bench_inputs;

/* Copies the inputs; ep is borrowed and its first round used. config: the one it was made from.
 * Errors: YARD_ENOMEM, YARD_EDEVICE. */
yard_status yard_ep_bench_create(yard_ep_bench **out, yard_ep *ep, const yard_ep_config *config,
                                 const yard_ep_bench_inputs *inputs, yard_error *err);
void yard_ep_bench_destroy(yard_ep_bench *b);

typedef enum yard_ep_bench_launch {
    YARD_EP_BENCH_GRAPH, /* replays of a graph of pairs, nothing between the calls */
    YARD_EP_BENCH_SINGLE /* call by call; a sample is one pair from an idle stream to its end */
} yard_ep_bench_launch;

typedef struct yard_ep_bench_plan {
    yard_ep_bench_launch launch;
    uint32_t n_samples, n_pairs; /* samples, and pairs in the graph that a sample is the mean of */
    /* What stands before each call. The calls are then timed one by one, each between marks of its
     * own, and a pair is the sum of its four. */
    uint32_t between_us; /* busy work of all multiprocessors */
    bool cold;           /* other data pass through the cache */
    bool phases;         /* also dispatch and combine by themselves; marks cost time */
    bool receives;       /* with work between: of the calls only the receives count */
    /* Asked once, behind the warm-up, what a sample takes: how many of n_samples to take, the same
     * on all ranks; 0: none, another rank has failed. NULL: all. */
    uint32_t (*agree)(void *ctx, double sample_us);
    void *ctx; /* of agree */
} yard_ep_bench_plan;

/* All ranks at the same time with the same plan.
 *   pair, dispatch, combine  [n_samples] microseconds of a pair; the latter two with phases */
yard_status yard_ep_bench_time(yard_ep_bench *b, const yard_ep_bench_plan *plan, double *pair,
                               double *dispatch, double *combine, yard_error *err);

/* Spoils the outputs, runs one exchange with input set set_idx and copies what came out; pointers
 * may be NULL. expert_x [expert_x_rows, hidden] of config.dispatch, expert_x_scale, expert_count,
 * row_index as in ep.h; y [n_tokens, hidden] of config.output */
yard_status yard_ep_bench_exchange(yard_ep_bench *b, uint32_t set_idx, void *expert_x,
                                   float *expert_x_scale, int32_t *expert_count, int32_t *row_index,
                                   void *y, yard_error *err);

/* padded all-to-alls, for comparison */

enum { YARD_EP_NCCL_ID_BYTES = 128 };

/* id [YARD_EP_NCCL_ID_BYTES] names a group of ranks. Errors: YARD_ENOTSUP without CUDA or NCCL. */
yard_status yard_ep_nccl_id(uint8_t *id, yard_error *err);

typedef struct yard_ep_padded_config {
    const uint8_t *id;   /* NCCL's, of rank 0's making; or */
    yard_fabric *fabric; /* borrowed, over nvshmem: by NVSHMEM's own collective, in its heap */
    uint32_t n_ranks, rank;
    size_t dispatch_bytes, combine_bytes; /* that a rank sends to each rank, itself included */
} yard_ep_padded_config;

size_t yard_ep_padded_heap_bytes(const yard_ep_padded_config *config); /* of that fabric */

/* A bench whose dispatch and combine are all-to-alls of these sizes: for yard_ep_bench_time(),
 * yard_ep_bench_padded_check() and yard_ep_bench_destroy(). Collective. */
yard_status yard_ep_bench_create_padded(yard_ep_bench **out, const yard_ep_padded_config *config,
                                        yard_error *err);

/* One exchange of bytes that tell who sent them to whom. Errors: YARD_EDEVICE when wrong ones
 * came. */
yard_status yard_ep_bench_padded_check(yard_ep_bench *b, yard_error *err);

/* what the devices could do at best */

typedef struct yard_ep_limits {
    double flag_us;           /* a store until a polling peer has seen it */
    double store_bytes_per_s; /* of stores to a peer, while it stores here */
    double copy_bytes_per_s;  /* of a copy in own memory, read and written counted */
} yard_ep_limits;

enum { YARD_EP_LIMITS_HEAP_BYTES = 64 << 20 };

/* Collective over a fabric over nvlink with a heap of YARD_EP_LIMITS_HEAP_BYTES, borrowed; ranks
 * r and r ^ 1 are each other's peers. Errors: YARD_EINVAL (an odd number of ranks), YARD_EDEVICE,
 * YARD_ETIMEDOUT. */
yard_status yard_ep_limits_measure(yard_fabric *fabric, yard_ep_limits *out, yard_error *err);

#endif
