/* Rotary embedding of one head by one warp, and where a token lies in the paged cache. */
#ifndef YARD_OPS_CUDA_ROPE_CUH
#define YARD_OPS_CUDA_ROPE_CUH

#include "ops/cuda/rows.cuh"

enum { ROPE_MAX_DIMS = 256, ROPE_LANE_PAIRS = ROPE_MAX_DIMS / 2 / WARP_LANES };

/* Row of the cache [n_pages * 64, width] for batch row `row`. */
static __device__ __forceinline__ size_t cache_row(const yard_batch &b, uint32_t row)
{
    const uint32_t position = (uint32_t)b.position[row];
    const int32_t page =
        b.page_table[(size_t)b.seq[row] * b.page_table_ld + position / YARD_PAGE_TOKENS];

    return (size_t)page * YARD_PAGE_TOKENS + position % YARD_PAGE_TOKENS;
}

/* Cosine and sine of pair i at a position. Angles in double: at position 100,000 an f32 angle is
 * off by several thousandths. */
static __device__ __forceinline__ float2 turn_of(const yard_rope &rope, int32_t position,
                                                 uint32_t i)
{
    double s, c;

    sincos((double)position * (double)rope.inv_freq[i], &s, &c);
    return make_float2((float)c, (float)s);
}

static __device__ __forceinline__ float load_one(const yard_rows &x, size_t at)
{
    return x.dtype == YARD_BF16 ? __uint_as_float((uint32_t)((const uint16_t *)x.data)[at] << 16)
                                : ((const float *)x.data)[at];
}

static __device__ __forceinline__ void store_one(const yard_rows &y, size_t at, float x)
{
    if (y.dtype == YARD_BF16)
        ((uint16_t *)y.data)[at] = (uint16_t)bf16_bits(x);
    else
        ((float *)y.data)[at] = x;
}

/* The rotated part of a head from element x_at of x to element y_at of y, which may be the same
 * place: all lanes have read before any writes. turn(i) gives pair i's cosine and sine. */
template <typename TURN>
static __device__ __forceinline__ void rotate(const yard_rope &rope, TURN turn, const yard_rows &x,
                                              size_t x_at, const yard_rows &y, size_t y_at,
                                              uint32_t lane)
{
    const uint32_t half = rope.n_dims / 2;
    const uint32_t step = rope.layout == YARD_ROPE_HALVES ? 1 : 2;
    const uint32_t second = rope.layout == YARD_ROPE_HALVES ? half : 1;
    float a[ROPE_LANE_PAIRS], b[ROPE_LANE_PAIRS];

#pragma unroll
    for (uint32_t p = 0; p < ROPE_LANE_PAIRS; p++) {
        const uint32_t i = p * WARP_LANES + lane;
        a[p] = i < half ? load_one(x, x_at + step * i) : 0.0f;
        b[p] = i < half ? load_one(x, x_at + step * i + second) : 0.0f;
    }
    __syncwarp();
#pragma unroll
    for (uint32_t p = 0; p < ROPE_LANE_PAIRS; p++) {
        const uint32_t i = p * WARP_LANES + lane;
        if (i >= half)
            break;
        const float2 t = turn(i);
        store_one(y, y_at + i, __fsub_rn(__fmul_rn(a[p], t.x), __fmul_rn(b[p], t.y)));
        store_one(y, y_at + half + i, __fadd_rn(__fmul_rn(b[p], t.x), __fmul_rn(a[p], t.y)));
    }
}

/* The same with turns computed here. */
static __device__ __forceinline__ void rotate_head(const yard_rope &rope, int32_t position,
                                                   const yard_rows &x, size_t x_at,
                                                   const yard_rows &y, size_t y_at, uint32_t lane)
{
    rotate(
        rope, [&](uint32_t i) { return turn_of(rope, position, i); }, x, x_at, y, y_at, lane);
}

#endif
