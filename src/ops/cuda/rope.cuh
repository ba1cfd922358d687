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
        ((uint16_t *)y.data)[at] = (uint16_t)pack_bf16(x, 0.0f);
    else
        ((float *)y.data)[at] = x;
}

/* The rotated parts of HEADS heads, one after the other at strides of x and y: element x_at of x to
 * element y_at of y, which may be the same place: all lanes have read before any writes. A lane
 * takes PAIRS pairs of a head. turn(i) gives pair i's cosine and sine. */
template <int HEADS, int PAIRS, typename TURN>
static __device__ __forceinline__ void
rotate(const yard_rope &rope, TURN turn, const yard_rows &x, size_t x_at, size_t x_stride,
       const yard_rows &y, size_t y_at, size_t y_stride, uint32_t n_heads, uint32_t lane)
{
    const uint32_t half = rope.n_dims / 2;
    const uint32_t step = rope.layout == YARD_ROPE_HALVES ? 1 : 2;
    const uint32_t second = rope.layout == YARD_ROPE_HALVES ? half : 1;
    float a[HEADS][PAIRS], b[HEADS][PAIRS];

#pragma unroll
    for (uint32_t h = 0; h < HEADS; h++)
#pragma unroll
        for (uint32_t p = 0; p < PAIRS; p++) {
            const uint32_t i = p * WARP_LANES + lane;
            const size_t at = x_at + h * x_stride + step * i;
            a[h][p] = b[h][p] = 0.0f;
            if (i < half && h < n_heads) {
                a[h][p] = load_one(x, at);
                b[h][p] = load_one(x, at + second);
            }
        }
    __syncwarp();
#pragma unroll
    for (uint32_t p = 0; p < PAIRS; p++) {
        const uint32_t i = p * WARP_LANES + lane;
        if (i >= half)
            break;
        const float2 t = turn(i);
#pragma unroll
        for (uint32_t h = 0; h < HEADS; h++) {
            const size_t at = y_at + h * y_stride + i;
            if (h >= n_heads)
                break;
            store_one(y, at, __fsub_rn(__fmul_rn(a[h][p], t.x), __fmul_rn(b[h][p], t.y)));
            store_one(y, at + half, __fadd_rn(__fmul_rn(b[h][p], t.x), __fmul_rn(a[h][p], t.y)));
        }
    }
}

/* Whether two pairs next to each other are whole aligned accesses on both sides, and a head's are a
 * part of a warp's. */
static __device__ __forceinline__ bool is_in_fours(const yard_rope &rope, const yard_rows &x,
                                                   size_t x_at, size_t x_stride, const yard_rows &y,
                                                   size_t y_at, size_t y_stride)
{
    const size_t places = x_at | x_stride | y_at | y_stride;
    const uintptr_t bases = (uintptr_t)x.data | (uintptr_t)y.data;

    return x.dtype == YARD_BF16 && y.dtype == YARD_BF16 && places % 4 == 0 && bases % 8 == 0 &&
           rope.n_dims % 8 == 0 && 4 * WARP_LANES % rope.n_dims == 0;
}

/* As rotate for bf16: a lane takes two neighbouring pairs of a head, so a warp does
 * 4 * WARP_LANES / n_dims heads together, HEADS times. */
template <int HEADS, typename TURN>
static __device__ __forceinline__ void
rotate_fours(const yard_rope &rope, TURN turn, const yard_rows &x, size_t x_at, size_t x_stride,
             const yard_rows &y, size_t y_at, size_t y_stride, uint32_t n_heads, uint32_t lane)
{
    const uint32_t half = rope.n_dims / 2, head_lanes = rope.n_dims / 4;
    const uint32_t i = lane % head_lanes * 2, at_once = WARP_LANES / head_lanes;
    const uint16_t *from = (const uint16_t *)x.data + x_at;
    uint16_t *to = (uint16_t *)y.data + y_at;
    uint32_t first[HEADS], second[HEADS]; /* interleaved: pairs i, i + 1; halves: both a, both b */

#pragma unroll
    for (uint32_t h = 0; h < HEADS; h++) {
        const uint32_t head = h * at_once + lane / head_lanes;
        const uint16_t *p = from + head * x_stride;
        first[h] = second[h] = 0;
        if (head >= n_heads)
            continue;
        if (rope.layout == YARD_ROPE_HALVES) {
            first[h] = *(const uint32_t *)(p + i);
            second[h] = *(const uint32_t *)(p + half + i);
        } else {
            const uint2 both = *(const uint2 *)(p + 2 * i);
            first[h] = both.x & 0xffffu | both.y << 16;
            second[h] = both.x >> 16 | both.y & 0xffff0000u;
        }
    }
    const float2 t = turn(i), u = turn(i + 1);
    __syncwarp();
#pragma unroll
    for (uint32_t h = 0; h < HEADS; h++) {
        const uint32_t head = h * at_once + lane / head_lanes;
        const float a = __uint_as_float(first[h] << 16), b = __uint_as_float(second[h] << 16);
        const float c = __uint_as_float(first[h] & 0xffff0000u);
        const float d = __uint_as_float(second[h] & 0xffff0000u);
        if (head >= n_heads)
            return;
        *(uint32_t *)(to + head * y_stride + i) =
            pack_bf16(__fsub_rn(__fmul_rn(a, t.x), __fmul_rn(b, t.y)),
                      __fsub_rn(__fmul_rn(c, u.x), __fmul_rn(d, u.y)));
        *(uint32_t *)(to + head * y_stride + half + i) =
            pack_bf16(__fadd_rn(__fmul_rn(b, t.x), __fmul_rn(a, t.y)),
                      __fadd_rn(__fmul_rn(d, u.x), __fmul_rn(c, u.y)));
    }
}

/* n_heads heads of a token, by n_warps warps taking several a lane at a time. */
template <typename TURN>
static __device__ __forceinline__ void
rotate_heads(const yard_rope &rope, TURN turn, const yard_rows &x, size_t x_at, size_t x_stride,
             const yard_rows &y, size_t y_at, size_t y_stride, uint32_t n_heads, uint32_t warp,
             uint32_t n_warps, uint32_t lane)
{
    enum { ROUNDS = 2 };
    const bool fours = is_in_fours(rope, x, x_at, x_stride, y, y_at, y_stride);
    const uint32_t at_once = fours                ? ROUNDS * 4 * WARP_LANES / rope.n_dims
                             : rope.n_dims <= 64  ? 4
                             : rope.n_dims <= 128 ? 2
                                                  : 1;

    for (uint32_t h = warp * at_once; h < n_heads; h += n_warps * at_once) {
        const size_t from = x_at + h * x_stride, to = y_at + h * y_stride;
        const uint32_t left = n_heads - h;
        if (fours)
            rotate_fours<ROUNDS>(rope, turn, x, from, x_stride, y, to, y_stride, left, lane);
        else if (at_once == 4)
            rotate<4, 1>(rope, turn, x, from, x_stride, y, to, y_stride, left, lane);
        else if (at_once == 2)
            rotate<2, 2>(rope, turn, x, from, x_stride, y, to, y_stride, left, lane);
        else
            rotate<1, ROPE_LANE_PAIRS>(rope, turn, x, from, x_stride, y, to, y_stride, left, lane);
    }
}

/* One head, with turns computed here. */
static __device__ __forceinline__ void rotate_head(const yard_rope &rope, int32_t position,
                                                   const yard_rows &x, size_t x_at,
                                                   const yard_rows &y, size_t y_at, uint32_t lane)
{
    rotate<1, ROPE_LANE_PAIRS>(
        rope, [&](uint32_t i) { return turn_of(rope, position, i); }, x, x_at, 0, y, y_at, 0, 1,
        lane);
}

#endif
