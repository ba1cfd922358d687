/* The second kernel of MLA decode: joins the parts of rows that several blocks computed. */
#ifndef YARD_OPS_CUDA_MLA_JOIN_CUH
#define YARD_OPS_CUDA_MLA_JOIN_CUH

#include "ops/cuda/mla_plan.cuh"
#include "ops/cuda/softmax.cuh"

enum {
    JOIN_THREADS = 256,
    JOIN_BLOCKS = 396, /* three a processor; the rest is a loop */
    QUARTERS = 4,      /* of a row's columns, four a thread of a warp each */
    QUARTER_COLS = MLA_RANK / QUARTERS,
    JOIN_AT_ONCE = 16, /* loads a thread has under way */
    FEW_PARTS = 4
};

/* Where the parts of one head of a row lie. */
struct join_place {
    mla_splits s;
    uint32_t lane, row;

    /* The place of a part's row among those of all rooms. */
    __device__ __forceinline__ uint32_t at(uint32_t i) const
    {
        const uint32_t slot = i == 0 ? s.first : s.second + (i - 1) * s.step;

        return (slot * s.lanes + lane) * MLA_ROWS + row;
    }
};

/* A warp joins N quarters from first_quarter on, parts in ascending order. */
template <int N>
static __device__ __forceinline__ void join(const yard_mla_decode_task &t, const join_place &p,
                                            uint32_t first_quarter, uint16_t *to)
{
    constexpr uint32_t parts = JOIN_AT_ONCE / N;
    const uint32_t lane = threadIdx.x % 32, col = first_quarter * QUARTER_COLS + lane * 4;
    const uint2 *partial = (const uint2 *)t.space.partial + col / 4;
    float most = -INFINITY, total = 0.0f, weight = 0.0f, sum[N][4] = {};

    for (uint32_t first = 0; first < p.s.n; first += parts) {
        uint2 x[parts][N];
#pragma unroll
        for (uint32_t k = 0; k < parts; k++) { /* beyond the last part: its weight is 0 */
            const uint2 *from = partial + p.at(min(first + k, p.s.n - 1u)) * (MLA_RANK / 4);
#pragma unroll
            for (int q = 0; q < N; q++)
                x[k][q] = __ldcg(from + q * (QUARTER_COLS / 4));
        }
        if (first == 0) { /* after the first loads, so that all are one trip to memory */
            for (uint32_t i = lane; i < p.s.n; i += 32)
                most = fmaxf(most, __ldcg(t.space.lse + p.at(i)));
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2)
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
        }
        if (first % 32 == 0) {
            const uint32_t i = first + lane;
            weight = i < p.s.n ? exp2_fast(__ldcg(t.space.lse + p.at(i)) - most) : 0.0f;
            total += weight;
        }
#pragma unroll
        for (uint32_t k = 0; k < parts; k++) {
            const float w = __shfl_sync(0xffffffffu, weight, (first + k) % 32);
#pragma unroll
            for (int q = 0; q < N; q++) {
                sum[q][0] = fmaf(w, __uint_as_float(x[k][q].x << 16), sum[q][0]);
                sum[q][1] = fmaf(w, __uint_as_float(x[k][q].x & 0xffff0000u), sum[q][1]);
                sum[q][2] = fmaf(w, __uint_as_float(x[k][q].y << 16), sum[q][2]);
                sum[q][3] = fmaf(w, __uint_as_float(x[k][q].y & 0xffff0000u), sum[q][3]);
            }
        }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        total += __shfl_xor_sync(0xffffffffu, total, distance);
    const float inverse = 1.0f / total;
#pragma unroll
    for (int q = 0; q < N; q++)
        *(uint2 *)(to + col + q * QUARTER_COLS) =
            make_uint2(pack_bf16(sum[q][0] * inverse, sum[q][1] * inverse),
                       pack_bf16(sum[q][2] * inverse, sum[q][3] * inverse));
}

/* A warp takes a quarter of one head's columns of one row, or all where parts are few. */
static __global__ void __launch_bounds__(JOIN_THREADS, 3)
    mla_join_kernel(const __grid_constant__ yard_mla_decode_task t)
{
    const uint32_t warp = threadIdx.x / 32;

    wait_previous_kernel();
    allow_next_kernel();
    const uint32_t end = splits_of(t)[-1].first, units = t.n_heads * QUARTERS;
    for (uint32_t i = blockIdx.x * (JOIN_THREADS / 32) + warp;;
         i += gridDim.x * (JOIN_THREADS / 32)) {
        const uint32_t row = t.first_row + i / units, unit = i % units;
        const uint32_t head = unit / QUARTERS, quarter = unit % QUARTERS;
        if (row >= t.end_row)
            return;
        join_place p;
        p.s = splits_of(t)[row]; /* with `end`, one trip to memory */
        if (row >= end)
            return;
        if (p.s.n < 2)
            continue;
        p.lane = (p.s.offset * t.n_heads + head) / MLA_ROWS;
        p.row = (p.s.offset * t.n_heads + head) % MLA_ROWS;
        uint16_t *to = (uint16_t *)t.y.data + (size_t)row * t.y.ld + head * MLA_RANK;
        if (p.s.n > FEW_PARTS)
            join<1>(t, p, quarter, to);
        else if (quarter == 0)
            join<QUARTERS>(t, p, 0, to);
    }
}

#endif
