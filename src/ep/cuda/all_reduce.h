/* The sum over an instance's ranks on GPUs: between the host side and the kernel. */
#ifndef YARD_EP_CUDA_ALL_REDUCE_H
#define YARD_EP_CUDA_ALL_REDUCE_H

#include "ep/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ALL_REDUCE_THREADS = 512, ALL_REDUCE_BLOCKS_PER_SM = 2 };

/* In device memory. */
typedef struct ep_cuda_sum_state {
    uint32_t epoch;  /* sums so far */
    uint32_t n_done; /* blocks that have finished this one; 0 between sums */
} ep_cuda_sum_state;

typedef struct ep_cuda_sum {
    ep_cuda_sum_state *state;
    uint64_t at_sets, slot_bytes; /* see all_reduce_impl.h */
    uint32_t first;               /* rank of the instance */
    uint32_t max_rows, row_vectors;
    bool bf16;
    void *x;
    const int32_t *n_rows;
} ep_cuda_sum;

/* a: heap, rank, tp, error, host_error, lost, timeout_ns and poison_substitute count. */
cudaError_t yard_ep_cuda_launch_all_reduce(const ep_cuda_args *a, const ep_cuda_sum *s,
                                           uint32_t n_blocks, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
