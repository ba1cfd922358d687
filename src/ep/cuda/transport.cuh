/* The fabric's three operations as a kernel sees them: how peers are reached that plain stores do
 * not reach. Their definition is that of the library that the kernel is compiled for; kernels
 * without YARD_EP_NVSHMEM only store. */
#ifndef YARD_EP_CUDA_TRANSPORT_CUH
#define YARD_EP_CUDA_TRANSPORT_CUH

#include <stdint.h>

#ifdef YARD_EP_NVSHMEM
static const bool PUTS = true;
#else
static const bool PUTS = false;
#endif

/* Addresses are those of this rank's heap and stand for the same place in that of the peer. */

/* By a whole block, which has written src and passed a barrier. Copies, then sets the word sig of
 * the peer. Returns at once; src must not change until the protocol says that the peer has it. */
extern "C" __device__ void yard_device_put_signal(void *dst, const void *src, uint32_t n_bytes,
                                                  uint64_t *sig, uint64_t value, uint32_t peer);

/* By one thread: sets. */
extern "C" __device__ void yard_device_signal(uint64_t *sig, uint64_t value, uint32_t peer);

/* By one thread, without a deadline: until this rank's word is value, and what was put before it is
 * visible. */
extern "C" __device__ void yard_device_wait_until(uint64_t *sig, uint64_t value);

#ifdef YARD_EP_NVSHMEM
#include "ep/cuda/nvshmem/device.cuh"
#endif

#endif
