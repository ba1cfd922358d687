/* Two blocks that share a row of MLA decode: whichever is done last has its part in registers
 * still, and joins it with the other's. No block waits for the other.
 *
 * Each warp of the values is for itself: it has 16 rows and 256 columns, and what it needs is with
 * the same warp of the other block, in the order of registers. */
#ifndef YARD_OPS_CUDA_MLA_PAIR_CUH
#define YARD_OPS_CUDA_MLA_PAIR_CUH

#include "ops/cuda/mla_tiles.cuh"
#include "ops/cuda/softmax.cuh"

enum { KEPT_PIECES = 16 }; /* of 16 bytes a thread, in a room */
static_assert((int)VALUE_WARPS * 32 * KEPT_PIECES * 16 == MLA_ROOM_BYTES, "a room");

/* Sums become a part as it is kept, in pairs of columns; of two rows, by turns. The warp gathers
 * now and then: else the compiler puts all products before the first pair, and has no registers for
 * them. */
static __device__ __forceinline__ void round_rows(uint32_t (&x)[64], const float (&d)[128],
                                                  float f0, float f1)
{
#pragma unroll
    for (int k = 0; k < 64; k++) {
        const float f = k % 2 == 0 ? f0 : f1;
        x[k] = pack_bf16(d[2 * k] * f, d[2 * k + 1] * f);
        if (k % 4 == 3)
            __syncwarp();
    }
}

/* What two parts of a row count, from the log2 of their sums of exponentials. */
static __device__ __forceinline__ float2 weigh(float a, float b)
{
    const float most = fmaxf(fmaxf(a, b), lowest_log2);
    const float x = exp2_fast(a - most), y = exp2_fast(b - most);
    const float inverse = __fdividef(1.0f, fmaxf(x + y, 1.0f)); /* 1 to 2, or 0 */

    return make_float2(x * inverse, y * inverse);
}

/* The same bits if a and b change places. */
static __device__ __forceinline__ uint32_t mean_of(uint32_t a, uint32_t b, float2 w)
{
    const float lo = __fadd_rn(__fmul_rn(__uint_as_float(a << 16), w.x),
                               __fmul_rn(__uint_as_float(b << 16), w.y));
    const float hi = __fadd_rn(__fmul_rn(__uint_as_float(a & 0xffff0000u), w.x),
                               __fmul_rn(__uint_as_float(b & 0xffff0000u), w.y));

    return pack_bf16(lo, hi);
}

/* Where a warp of the two blocks finds its things. Rooms and rows of lse by the parts' order. */
struct pair_place {
    uint32_t mine, other; /* rooms */
    uint32_t *word;       /* odd: the other warp's part is there */
    uint4 *pieces;        /* the thread's of room 0 */
};

static __device__ __forceinline__ pair_place pair_of(const yard_mla_decode_task &t,
                                                     const block_share &b, const mla_item &item)
{
    const uint32_t thread = this_thread() - 128;
    const bool is_first = item.first_tile == 0;
    pair_place p;

    p.mine = item.slot * b.lanes + b.lane;
    p.other = is_first ? p.mine + b.lanes : p.mine - b.lanes;
    p.word = t.space.meeting->pairs[is_first ? p.mine : p.other] + thread / 32;
    p.pieces = (uint4 *)t.space.partial + thread;
    return p;
}

/* True if the other warp's part is there. Else this one's is kept for it. */
static __device__ __forceinline__ bool is_second(const pair_place &p, const uint32_t (&x)[64])
{
    const bool speaks = threadIdx.x % 32 == 0;
    uint32_t before = 0;

    if (speaks)
        before = load_acquire(p.word);
    before = __shfl_sync(0xffffffffu, before, 0);
    if (before & 1) {
        if (speaks)
            atomicAdd(p.word, 1);
    } else {
        uint4 *to = p.pieces + p.mine * (MLA_ROOM_BYTES / 16);
#pragma unroll
        for (int k = 0; k < KEPT_PIECES; k++)
            __stcg(to + k * VALUE_WARPS * 32,
                   make_uint4(x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3]));
        __syncwarp(); /* the warp's part is there when it adds one */
        if (speaks)
            before = add_acq_rel(p.word, 1);
        before = __shfl_sync(0xffffffffu, before, 0);
    }
    __syncwarp(); /* what lane 0 has seen of the other part, all see */
    return before & 1;
}

/* x becomes the whole. */
static __device__ __forceinline__ void join_pair(const yard_mla_decode_task &t, const pair_place &p,
                                                 uint32_t row, uint32_t (&x)[64])
{
    enum { AT_A_TIME = 8 }; /* all at once would be more than there are registers */
    const uint4 *from = p.pieces + p.other * (MLA_ROOM_BYTES / 16);
    const float *mine = t.space.lse + p.mine * MLA_ROWS + row;
    const float *other = t.space.lse + p.other * MLA_ROWS + row;
    const float2 w0 = weigh(__ldcg(mine), __ldcg(other));
    const float2 w1 = weigh(__ldcg(mine + 8), __ldcg(other + 8));

#pragma unroll
    for (int first = 0; first < KEPT_PIECES; first += AT_A_TIME) {
        uint4 y[AT_A_TIME];
#pragma unroll
        for (int k = 0; k < AT_A_TIME; k++)
            y[k] = __ldcg(from + (first + k) * VALUE_WARPS * 32);
        asm volatile("" ::: "memory"); /* the compiler begins no other loads before */
#pragma unroll
        for (int k = 0; k < AT_A_TIME; k++) {
            const int at = 4 * (first + k);
            x[at] = mean_of(x[at], y[k].x, w0);
            x[at + 1] = mean_of(x[at + 1], y[k].y, w1);
            x[at + 2] = mean_of(x[at + 2], y[k].z, w0);
            x[at + 3] = mean_of(x[at + 3], y[k].w, w1);
        }
    }
}

/* One of the thread's two rows (0 or 1), as store_row stores it. */
template <int ROW>
static __device__ __forceinline__ void store_rounded(const uint32_t (&x)[64], uint16_t *to,
                                                     bool wanted)
{
#pragma unroll
    for (int g = 0; g < 8; g++) {
        uint32_t y[4] = { x[8 * g + ROW], x[8 * g + 2 + ROW], x[8 * g + 4 + ROW],
                          x[8 * g + 6 + ROW] };
        transpose_quad(y);
        if (wanted)
            *(uint4 *)(to + 32 * g + threadIdx.x % 4 * 8) = make_uint4(y[0], y[1], y[2], y[3]);
    }
}

#endif
