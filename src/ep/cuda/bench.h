/* Kernels that only measurements need. */
#ifndef YARD_EP_CUDA_BENCH_H
#define YARD_EP_CUDA_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Keeps all multiprocessors busy for so long. */
cudaError_t yard_ep_cuda_launch_busy(uint32_t us, cudaStream_t stream);
/* Reads n_bytes, so that what was in the cache before is not any more. */
cudaError_t yard_ep_cuda_launch_sweep(const void *p, size_t n_bytes, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
