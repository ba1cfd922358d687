/* The three operations of transport.cuh by NVSHMEM. Inline: where peer memory is mapped, they are a
 * copy, a fence and a store, and a call would take as long. */
#ifndef YARD_EP_CUDA_NVSHMEM_DEVICE_CUH
#define YARD_EP_CUDA_NVSHMEM_DEVICE_CUH

#include <nvshmem.h>
#include <nvshmemx.h>

extern "C" __device__ __forceinline__ void yard_device_put_signal(void *dst, const void *src,
                                                                  uint32_t n_bytes, uint64_t *sig,
                                                                  uint64_t value, uint32_t peer)
{
    nvshmemx_putmem_signal_nbi_block(dst, (void *)src, n_bytes, sig, value, NVSHMEM_SIGNAL_SET,
                                     (int)peer);
}

extern "C" __device__ __forceinline__ void yard_device_signal(uint64_t *sig, uint64_t value,
                                                              uint32_t peer)
{
    nvshmemx_signal_op(sig, value, NVSHMEM_SIGNAL_SET, (int)peer);
}

extern "C" __device__ __forceinline__ void yard_device_wait_until(uint64_t *sig, uint64_t value)
{
    nvshmem_signal_wait_until(sig, NVSHMEM_CMP_EQ, value);
}

#endif
