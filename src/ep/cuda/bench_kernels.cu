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

static __global__ void copy_kernel(uint4 *to, const uint4 *from, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        to[i] = from[i];
}

cudaError_t yard_ep_cuda_launch_copy(void *to, const void *from, size_t n_bytes,
                                     cudaStream_t stream)
{
    copy_kernel<<<528, 512, 0, stream>>>((uint4 *)to, (const uint4 *)from, n_bytes / VECTOR);
    return cudaGetLastError();
}

/* Gives up after a second: the peer may never come. */
static __global__ void pingpong_kernel(uint32_t *mine, uint32_t *theirs, uint32_t first_value,
                                       uint32_t n, bool first, uint64_t *ns)
{
    const uint64_t begun = now_ns();

    for (uint32_t i = first_value; i < first_value + n; i++) {
        if (first)
            *(volatile uint32_t *)theirs = i;
        while (*(volatile uint32_t *)mine != i && now_ns() - begun < 1000000000u)
            ;
        if (!first)
            *(volatile uint32_t *)theirs = i;
    }
    *ns = now_ns() - begun;
}

cudaError_t yard_ep_cuda_launch_pingpong(uint32_t *mine, uint32_t *theirs, uint32_t first_value,
                                         uint32_t n, bool first, uint64_t *ns, cudaStream_t stream)
{
    pingpong_kernel<<<1, 1, 0, stream>>>(mine, theirs, first_value, n, first, ns);
    return cudaGetLastError();
}
