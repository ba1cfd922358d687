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

/* The rotated parts of HEADS heads, one after the other at strides of x and y: element x_at of x to
 * element y_at of y, which may be the same place: all lanes have read before any writes. A lane
 * takes PAIRS pairs of a head. turn(i, p) gives the cosine and sine of pair i, the lane's p-th. */
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
        const float2 t = turn(i, p);
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

/* Whether four pairs next to each other are whole aligned accesses on both sides, and a head's are
 * a part of a warp's. */
static __device__ __forceinline__ bool is_in_eights(const yard_rope &rope, const yard_rows &x,
                                                    size_t x_at, size_t x_stride,
                                                    const yard_rows &y, size_t y_at,
                                                    size_t y_stride)
{
    const size_t places = x_at | x_stride | y_at | y_stride;
    const uintptr_t bases = (uintptr_t)x.data | (uintptr_t)y.data;

    return x.dtype == YARD_BF16 && y.dtype == YARD_BF16 && places % 8 == 0 && bases % 16 == 0 &&
           rope.n_dims % 8 == 0 && 8 * WARP_LANES % rope.n_dims == 0;
}

/* Two neighbouring pairs turned: a's to *low, b's to *high. */
static __device__ __forceinline__ void turn_two(uint32_t a, uint32_t b, float2 t, float2 u,
                                                uint32_t *low, uint32_t *high)
{
    const float a0 = __uint_as_float(a << 16), a1 = __uint_as_float(a & 0xffff0000u);
    const float b0 = __uint_as_float(b << 16), b1 = __uint_as_float(b & 0xffff0000u);

    *low = pack_bf16(__fsub_rn(__fmul_rn(a0, t.x), __fmul_rn(b0, t.y)),
                     __fsub_rn(__fmul_rn(a1, u.x), __fmul_rn(b1, u.y)));
    *high = pack_bf16(__fadd_rn(__fmul_rn(b0, t.x), __fmul_rn(a0, t.y)),
                      __fadd_rn(__fmul_rn(b1, u.x), __fmul_rn(a1, u.y)));
}

/* As rotate for bf16: a lane takes four neighbouring pairs of a head, so a warp does
 * 8 * WARP_LANES / n_dims heads together, ROUNDS times: the next ones are `step` heads on. */
template <int ROUNDS>
static __device__ __forceinline__ void
rotate_eights(const yard_rope &rope, const float2 *turns, const yard_rows &x, size_t x_at,
              size_t x_stride, const yard_rows &y, size_t y_at, size_t y_stride, uint32_t step,
              uint32_t n_heads, uint32_t lane)
{
    const uint32_t half = rope.n_dims / 2, head_lanes = rope.n_dims / 8;
    const uint32_t i = lane % head_lanes * 4;
    const uint16_t *from = (const uint16_t *)x.data + x_at;
    uint16_t *to = (uint16_t *)y.data + y_at;
    const bool halves = rope.layout == YARD_ROPE_HALVES;
    uint4 raw[ROUNDS]; /* four pairs, or four a's and four b's */

#pragma unroll
    for (uint32_t r = 0; r < ROUNDS; r++) {
        const uint32_t head = r * step + lane / head_lanes;
        const uint16_t *p = from + head * x_stride;
        if (head >= n_heads)
            continue;
        if (halves) {
            const uint2 a = *(const uint2 *)(p + i), b = *(const uint2 *)(p + half + i);
            raw[r] = make_uint4(a.x, a.y, b.x, b.y);
        } else {
            raw[r] = *(const uint4 *)(p + 2 * i);
        }
    }
    const float4 t = *(const float4 *)(turns + i), u = *(const float4 *)(turns + i + 2);
    __syncwarp(); /* all lanes have read what they may overwrite */
#pragma unroll
    for (uint32_t r = 0; r < ROUNDS; r++) {
        const uint32_t head = r * step + lane / head_lanes;
        uint4 x4 = raw[r];
        uint2 low, high;
        if (head >= n_heads)
            return;
        if (!halves)
            x4 = make_uint4(__byte_perm(x4.x, x4.y, 0x5410), __byte_perm(x4.z, x4.w, 0x5410),
                            __byte_perm(x4.x, x4.y, 0x7632), __byte_perm(x4.z, x4.w, 0x7632));
        turn_two(x4.x, x4.z, make_float2(t.x, t.y), make_float2(t.z, t.w), &low.x, &high.x);
        turn_two(x4.y, x4.w, make_float2(u.x, u.y), make_float2(u.z, u.w), &low.y, &high.y);
        *(uint2 *)(to + head * y_stride + i) = low;
        *(uint2 *)(to + head * y_stride + half + i) = high;
    }
}

/* n_heads heads of a token, by n_warps warps; turns: of all its pairs, 16-byte aligned. */
static __device__ __forceinline__ void rotate_heads(const yard_rope &rope, const float2 *turns,
                                                    const yard_rows &x, size_t x_at,
                                                    size_t x_stride, const yard_rows &y,
                                                    size_t y_at, size_t y_stride, uint32_t n_heads,
                                                    uint32_t warp, uint32_t n_warps, uint32_t lane)
{
    enum { ROUNDS = 2 };
    const bool eights = is_in_eights(rope, x, x_at, x_stride, y, y_at, y_stride);
    const uint32_t at_once = eights               ? 8 * WARP_LANES / rope.n_dims
                             : rope.n_dims <= 64  ? 4
                             : rope.n_dims <= 128 ? 2
                                                  : 1;
    const uint32_t step = n_warps * at_once;
    const auto turn = [&](uint32_t i, uint32_t) { return turns[i]; };

    for (uint32_t h = warp * at_once; h < n_heads; h += (eights ? ROUNDS : 1) * step) {
        const size_t from = x_at + h * x_stride, to = y_at + h * y_stride;
        const uint32_t left = n_heads - h;
        if (eights)
            rotate_eights<ROUNDS>(rope, turns, x, from, x_stride, y, to, y_stride, step, left,
                                  lane);
        else if (at_once == 4)
            rotate<4, 1>(rope, turn, x, from, x_stride, y, to, y_stride, left, lane);
        else if (at_once == 2)
            rotate<2, 2>(rope, turn, x, from, x_stride, y, to, y_stride, left, lane);
        else
            rotate<1, ROPE_LANE_PAIRS>(rope, turn, x, from, x_stride, y, to, y_stride, left, lane);
    }
}

/* The turns of a head's pairs, the lane's. */
static __device__ __forceinline__ void make_lane_turns(const yard_rope &rope, int32_t position,
                                                       uint32_t lane,
                                                       float2 (&turn)[ROPE_LANE_PAIRS])
{
#pragma unroll
    for (uint32_t p = 0; p < ROPE_LANE_PAIRS; p++) {
        const uint32_t i = p * WARP_LANES + lane;
        if (i < rope.n_dims / 2)
            turn[p] = turn_of(rope, position, i);
    }
}

#endif
