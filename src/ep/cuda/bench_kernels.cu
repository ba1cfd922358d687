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

/* ---- limits ---------------------------------------------------------------------------------- */

static __global__ void turns_kernel(ep_cuda_turns t)
{
    const uint64_t until = now_ns() + 5000000000ull;
    uint64_t begun = 0;

    for (uint32_t i = 1; i <= t.n_turns; i++) {
        const uint32_t value = t.begin + i;

        if (i == t.n_turns / 10)
            begun = now_ns();
        if (t.first)
            store_relaxed(t.peer, make_uint4(value, value, value, value));
        for (uint32_t n = 1; load_relaxed(t.own).w != value; n++)
            if (n % POLLS_BETWEEN == 0 && now_ns() > until) {
                *t.ns = ~0ull;
                return;
            }
        if (!t.first)
            store_relaxed(t.peer, make_uint4(value, value, value, value));
    }
    *t.ns = now_ns() - begun;
}

cudaError_t yard_ep_cuda_launch_turns(const ep_cuda_turns *t, cudaStream_t stream)
{
    turns_kernel<<<1, 1, 0, stream>>>(*t);
    return cudaGetLastError();
}

enum { LIMIT_BLOCKS = 132 * 4, LIMIT_THREADS = 448 };

static __global__ void __launch_bounds__(LIMIT_THREADS) store_kernel(uint4 *to, size_t n)
{
    const uint4 v = make_uint4(threadIdx.x, blockIdx.x, 3, 4);

    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        store_relaxed(to + i, v);
}

cudaError_t yard_ep_cuda_launch_store(void *to, size_t n_bytes, cudaStream_t stream)
{
    store_kernel<<<LIMIT_BLOCKS, LIMIT_THREADS, 0, stream>>>((uint4 *)to, n_bytes / VECTOR);
    return cudaGetLastError();
}

/* Four loads under way a thread. */
static __global__ void __launch_bounds__(LIMIT_THREADS)
    copy_kernel(uint4 *to, const uint4 *from, size_t n)
{
    const size_t stride = (size_t)gridDim.x * blockDim.x;

    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += 4 * stride) {
        uint4 v[4];

#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * stride < n)
                v[j] = load_plain(from + i + j * stride);
#pragma unroll
        for (int j = 0; j < 4; j++)
            if (i + j * stride < n)
                store_plain(to + i + j * stride, v[j]);
    }
}

cudaError_t yard_ep_cuda_launch_copy(void *to, const void *from, size_t n_bytes,
                                     cudaStream_t stream)
{
    copy_kernel<<<LIMIT_BLOCKS, LIMIT_THREADS, 0, stream>>>((uint4 *)to, (const uint4 *)from,
                                                            n_bytes / VECTOR);
    return cudaGetLastError();
}
