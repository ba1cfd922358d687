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

/* Two devices take turns: each of n_turns is a store to peer and a wait for its answer in own, a
 * whole number of 16 bytes that nothing else uses. first: this one begins. ns  [1] of all turns but
 * the first tenth, or UINT64_MAX when the peer did not answer within 5 s. Values count up from
 * begin; each call of a fabric takes n_turns of them. */
typedef struct ep_cuda_turns {
    void *own, *peer;
    uint32_t begin, n_turns;
    bool first;
    uint64_t *ns;
} ep_cuda_turns;
cudaError_t yard_ep_cuda_launch_turns(const ep_cuda_turns *t, cudaStream_t stream);
/* Stores n_bytes as the kernels of dispatch do. */
cudaError_t yard_ep_cuda_launch_store(void *to, size_t n_bytes, cudaStream_t stream);
cudaError_t yard_ep_cuda_launch_copy(void *to, const void *from, size_t n_bytes,
                                     cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
