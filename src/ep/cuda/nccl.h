/* All-to-alls and sums by NCCL, which is loaded when they are wanted: for comparison only. */
#ifndef YARD_EP_CUDA_NCCL_H
#define YARD_EP_CUDA_NCCL_H

#include <cuda_runtime_api.h>

#include "ep/ep.h"

typedef struct ep_cuda_nccl ep_cuda_nccl;

/* Collective. Errors: YARD_ENOTSUP (no NCCL), YARD_EDEVICE. */
yard_status yard_ep_cuda_nccl_open(ep_cuda_nccl **out, const uint8_t *id, uint32_t n_ranks,
                                   uint32_t rank, yard_error *err);
void yard_ep_cuda_nccl_close(ep_cuda_nccl *n); /* NULL is fine */

/* Part r of from [n_ranks, n_bytes] goes to rank r, part r of to comes from there. */
yard_status yard_ep_cuda_nccl_all_to_all(ep_cuda_nccl *n, const uint8_t *from, uint8_t *to,
                                         size_t n_bytes, cudaStream_t stream);

/* x [n_values] bf16 becomes the sum over all ranks. */
yard_status yard_ep_cuda_nccl_all_reduce(ep_cuda_nccl *n, void *x, size_t n_values,
                                         cudaStream_t stream);

#endif
