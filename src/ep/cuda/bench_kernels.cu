/* Kernels that only measurements need. */
#include "ep/cuda/bench.h"
#include "ep/cuda/device.cuh"

static __global__ void busy_kernel(uint64_t ns)
{
    const uint64_t begun = now_ns();

    while (now_ns() - begun < ns)
        ;
}

cudaError_t yard_ep_cuda_launch_busy(uint32_t us, cudaStream_t stream)
{
    busy_kernel<<<132, 1024, 0, stream>>>((uint64_t)us * 1000);
    return cudaGetLastError();
}

static __global__ void sweep_kernel(const uint4 *p, size_t n)
{
    uint4 sum = make_uint4(0, 0, 0, 0);

    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        const uint4 v = p[i];
        sum = make_uint4(sum.x ^ v.x, sum.y ^ v.y, sum.z ^ v.z, sum.w ^ v.w);
    }
    if (sum.x == 0x12345 && sum.y == 77) /* never: keeps the loads */
        ((volatile uint4 *)p)->x = 1;
}

cudaError_t yard_ep_cuda_launch_sweep(const void *p, size_t n_bytes, cudaStream_t stream)
{
    sweep_kernel<<<528, 512, 0, stream>>>((const uint4 *)p, n_bytes / VECTOR);
    return cudaGetLastError();
}
