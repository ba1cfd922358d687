/* What attention kernels do with scores in registers, laid out as wgmma leaves them: a row is
 * shared by four neighbouring threads. */
#ifndef YARD_OPS_CUDA_SOFTMAX_CUH
#define YARD_OPS_CUDA_SOFTMAX_CUH

#include "ops/cuda/ptx.cuh"

/* A row's reference maximum moves only when it grows by more than this, in log2 units: weights stay
 * below 256, and the sums are scaled seldom. The rule looks at the row alone. */
static constexpr float lazy_log2 = 8.0f;

/* The reference of a row that has seen nothing: below every score, and finite, so that differences
 * with -inf are no NaN. */
static constexpr float lowest_log2 = -1e30f;

static __device__ __forceinline__ float exp2_fast(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float row_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

static __device__ __forceinline__ float row_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* A row's running softmax: the reference maximum (log2, scaled) and the sum. */
struct row_state {
    float reference, sum;
};

/* Moves the reference if it must; returns what earlier sums are multiplied by. */
static __device__ __forceinline__ float move_reference(row_state &s, float largest)
{
    if (largest <= s.reference + lazy_log2)
        return 1.0f;
    const float shrink = exp2_fast(s.reference - largest);
    s.reference = largest;
    s.sum *= shrink;
    return shrink;
}

/* Scores to weights, in place; the thread's two rows see the first n0 and n1 of the tile's
 * positions from the thread's first column on. Returns what earlier sums of the rows are multiplied
 * by. */
template <int N>
static __device__ __forceinline__ float2 soften(float (&d)[N], row_state &s0, row_state &s1,
                                                float scale_log2, int n0, int n1)
{
    if (min(n0, n1) < 2 * N) {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (j / 4 * 8 + j % 2 >= (j % 4 < 2 ? n0 : n1))
                d[j] = -INFINITY;
    }
    float most0 = d[0], most1 = d[2];
#pragma unroll
    for (int j = 1; j < N; j++)
        if (j % 4 < 2)
            most0 = fmaxf(most0, d[j]);
        else
            most1 = fmaxf(most1, d[j]);
    const float shrink0 = move_reference(s0, row_max(most0) * scale_log2);
    const float shrink1 = move_reference(s1, row_max(most1) * scale_log2);
#pragma unroll
    for (int j = 0; j < N; j++) {
        d[j] = exp2_fast(fmaf(d[j], scale_log2, j % 4 < 2 ? -s0.reference : -s1.reference));
        if (j % 4 < 2)
            s0.sum += d[j];
        else
            s1.sum += d[j];
    }
    return make_float2(shrink0, shrink1);
}

/* Earlier sums of the thread's two rows, where any row of the warp has moved. */
template <int N> static __device__ __forceinline__ void shrink_rows(float (&d)[N], float2 factor)
{
    if (!__any_sync(0xffffffffu, factor.x != 1.0f || factor.y != 1.0f))
        return;
#pragma unroll
    for (int j = 0; j < N; j++)
        d[j] *= j % 4 < 2 ? factor.x : factor.y;
}

/* One arrival a warp; what its threads stored before is visible to whoever waits. */
static __device__ __forceinline__ void arrive_warp(uint32_t bar)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        barrier_arrive(bar);
}

/* Thread q of four gives its word i to thread i, and gets that one's word q. */
static __device__ __forceinline__ void transpose_quad(uint32_t (&x)[4])
{
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;

#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 1);
        x[i] = odd ? got : x[i];
        x[i + 1] = odd ? x[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? x[i] : x[i + 2], 2);
        x[i] = high ? got : x[i];
        x[i + 2] = high ? x[i + 2] : got;
    }
}

/* One of the thread's two rows (0 or 1) times factor as bf16, in pieces of 16 bytes; four threads
 * share a row, of 2 N columns. */
template <int ROW, int N>
static __device__ __forceinline__ void store_row(const float (&d)[N], float factor, uint16_t *to,
                                                 bool wanted)
{
#pragma unroll
    for (int g = 0; g < N / 16; g++) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = 16 * g + 4 * i + 2 * ROW;
            x[i] = pack_bf16(d[at] * factor, d[at + 1] * factor);
        }
        transpose_quad(x);
        if (wanted)
            *(uint4 *)(to + 32 * g + threadIdx.x % 4 * 8) = make_uint4(x[0], x[1], x[2], x[3]);
    }
}

#endif
