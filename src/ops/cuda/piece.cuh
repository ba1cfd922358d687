/* Pieces of 512 columns of a row, a warp each, in registers: what the norms' sums are made of. The
 * definition has 64 lanes a piece; a lane here is two of them that are neighbours, so that it holds
 * eight pairs of columns, 64 apart. */
#ifndef YARD_OPS_CUDA_PIECE_CUH
#define YARD_OPS_CUDA_PIECE_CUH

#include "ops/cuda/rows.cuh"

enum {
    PIECE_COLS = 512,
    PIECE_PAIRS = 8,                          /* of a lane */
    PAIR_STEP = PIECE_COLS / PIECE_PAIRS,     /* columns from one to the next */
    PIECE_GROUPS = PIECE_COLS / YARD_GROUP,   /* groups with a scale of their own */
    GROUP_PAIRS = PIECE_PAIRS / PIECE_GROUPS, /* of a lane */
};

typedef struct piece {
    float2 pair[PIECE_PAIRS];
} piece;

/* The lane's first column of the piece that begins at column `begin`. */
static __device__ __forceinline__ uint32_t lane_col(uint32_t begin)
{
    return begin + threadIdx.x % WARP_LANES * 2;
}

/* Columns from begin on of a row that begins at `at`; 0 beyond n_cols. whole: see has_whole_pieces.
 */
static __device__ __forceinline__ piece load_piece(const yard_rows &x, size_t at, uint32_t begin,
                                                   uint32_t n_cols, bool whole)
{
    const size_t from = at + lane_col(begin);
    piece p = {};

    if (whole && x.dtype == YARD_BF16) {
        const uint32_t *const pairs = (const uint32_t *)((const uint16_t *)x.data + from);
        uint32_t both[PIECE_PAIRS];
#pragma unroll
        for (int i = 0; i < PIECE_PAIRS; i++)
            both[i] = pairs[i * PAIR_STEP / 2];
#pragma unroll
        for (int i = 0; i < PIECE_PAIRS; i++)
            p.pair[i] =
                make_float2(__uint_as_float(both[i] << 16), __uint_as_float(both[i] & 0xffff0000u));
    } else if (whole) {
        const float2 *const pairs = (const float2 *)((const float *)x.data + from);
#pragma unroll
        for (int i = 0; i < PIECE_PAIRS; i++)
            p.pair[i] = pairs[i * PAIR_STEP / 2];
    } else {
#pragma unroll
        for (uint32_t i = 0; i < PIECE_PAIRS; i++) {
            const uint32_t col = lane_col(begin) + i * PAIR_STEP;
            if (col < n_cols)
                p.pair[i].x = load_one(x, at + col);
            if (col + 1 < n_cols)
                p.pair[i].y = load_one(x, at + col + 1);
        }
    }
    return p;
}

static __device__ __forceinline__ void store_piece(const yard_rows &y, size_t at, uint32_t begin,
                                                   uint32_t n_cols, bool whole, const piece &p)
{
    const size_t to = at + lane_col(begin);

    if (whole && y.dtype == YARD_BF16) {
        uint32_t *const pairs = (uint32_t *)((uint16_t *)y.data + to);
#pragma unroll
        for (int i = 0; i < PIECE_PAIRS; i++)
            pairs[i * PAIR_STEP / 2] = pack_bf16(p.pair[i].x, p.pair[i].y);
    } else if (whole) {
        float2 *const pairs = (float2 *)((float *)y.data + to);
#pragma unroll
        for (int i = 0; i < PIECE_PAIRS; i++)
            pairs[i * PAIR_STEP / 2] = p.pair[i];
    } else {
#pragma unroll
        for (uint32_t i = 0; i < PIECE_PAIRS; i++) {
            const uint32_t col = lane_col(begin) + i * PAIR_STEP;
            if (col < n_cols)
                store_one(y, at + col, p.pair[i].x);
            if (col + 1 < n_cols)
                store_one(y, at + col + 1, p.pair[i].y);
        }
    }
}

static __device__ __forceinline__ void add_piece(piece *p, const piece &add)
{
#pragma unroll
    for (int i = 0; i < PIECE_PAIRS; i++) {
        p->pair[i].x = __fadd_rn(p->pair[i].x, add.pair[i].x);
        p->pair[i].y = __fadd_rn(p->pair[i].y, add.pair[i].y);
    }
}

/* The definition's sum of the squares of a piece, the same in all lanes. */
static __device__ __forceinline__ float piece_squares(const piece &p)
{
    float even = 0.0f, odd = 0.0f;

#pragma unroll
    for (int i = 0; i < PIECE_PAIRS; i++) {
        even = __fmaf_rn(p.pair[i].x, p.pair[i].x, even);
        odd = __fmaf_rn(p.pair[i].y, p.pair[i].y, odd);
    }
    /* both sides get the same sum: addition commutes */
#pragma unroll
    for (int half = WARP_LANES / 2; half > 0; half /= 2) {
        even = __fadd_rn(even, __shfl_xor_sync(0xffffffffu, even, half));
        odd = __fadd_rn(odd, __shfl_xor_sync(0xffffffffu, odd, half));
    }
    return __fadd_rn(even, odd);
}

/* 1 / the root of the mean of squares: n_pieces sums, one after the other. */
static __device__ __forceinline__ float inverse_rms(const float *piece_sum, uint32_t n_pieces,
                                                    uint32_t n_cols, float eps)
{
    const float n = (float)n_cols;
    float sum = 0.0f;

#pragma unroll 4
    for (uint32_t p = 0; p < n_pieces; p++)
        sum = __fadd_rn(sum, piece_sum[p]);
    const float mean = sum >= 0x1p-90f && sum <= 0x1p90f ? quotient(sum, n) : __fdiv_rn(sum, n);
    return __frcp_rn(__fsqrt_rn(__fadd_rn(mean, eps)));
}

/* p * inverse * weight, in p. */
static __device__ __forceinline__ void scale_piece(piece *p, float inverse, const piece &weight)
{
#pragma unroll
    for (int i = 0; i < PIECE_PAIRS; i++) {
        p->pair[i].x = __fmul_rn(__fmul_rn(p->pair[i].x, inverse), weight.pair[i].x);
        p->pair[i].y = __fmul_rn(__fmul_rn(p->pair[i].y, inverse), weight.pair[i].y);
    }
}

/* A group's magnitude, the same in all lanes: no number counts as 0, as in the definition. */
static __device__ __forceinline__ float group_magnitude(const float2 (&x)[GROUP_PAIRS])
{
    float amax = 0.0f;

#pragma unroll
    for (int i = 0; i < GROUP_PAIRS; i++)
        amax = fmaxf(amax, fmaxf(fabsf(x[i].x), fabsf(x[i].y)));
    /* not negative: as whole numbers they have the same order */
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(amax)));
}

/* FP8 of the bf16-rounded values, with a scale a group. All lanes of the warp together; a lane
 * makes the scale of one group. */
static __device__ __forceinline__ void quantise_piece(const yard_rows &y, size_t row,
                                                      uint32_t begin, uint32_t n_cols, bool ue8m0,
                                                      bool whole, const piece &p)
{
    const uint32_t lane = threadIdx.x % WARP_LANES;
    const uint32_t n_groups = (n_cols + YARD_GROUP - 1) / YARD_GROUP;
    uint8_t *const to = (uint8_t *)y.data + row * y.ld;
    float2 value[PIECE_GROUPS][GROUP_PAIRS];
    float mine = 0.0f;

#pragma unroll
    for (uint32_t g = 0; g < PIECE_GROUPS; g++) {
#pragma unroll
        for (uint32_t i = 0; i < GROUP_PAIRS; i++) {
            const float2 x = p.pair[g * GROUP_PAIRS + i];
            const uint32_t both = pack_bf16(x.x, x.y);
            value[g][i] =
                make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
        }
        const float amax = group_magnitude(value[g]);
        mine = lane % PIECE_GROUPS == g ? amax : mine;
    }
    const float scale = group_scale(mine, ue8m0), inverse = __frcp_rn(scale);
    /* it may have no finite inverse; zeros stay zeros then too */
    const bool tiny = __any_sync(0xffffffffu, scale < 0x1p-126f);
#pragma unroll
    for (uint32_t g = 0; g < PIECE_GROUPS; g++) {
        const float by = __shfl_sync(0xffffffffu, inverse, (int)g);
#pragma unroll
        for (uint32_t i = 0; i < GROUP_PAIRS; i++) {
            const uint32_t col = lane_col(begin) + (g * GROUP_PAIRS + i) * PAIR_STEP;
            float2 x = value[g][i];
            if (!tiny || x.x != 0.0f)
                x.x = __fmul_rn(x.x, by);
            if (!tiny || x.y != 0.0f)
                x.y = __fmul_rn(x.y, by);
            const uint16_t codes = e4m3_pair(x.x, x.y);
            if (whole) {
                *(uint16_t *)(to + col) = codes;
            } else {
                if (col < n_cols)
                    to[col] = (uint8_t)codes;
                if (col + 1 < n_cols)
                    to[col + 1] = (uint8_t)(codes >> 8);
            }
        }
    }
    if (lane < PIECE_GROUPS && begin + lane * YARD_GROUP < n_cols)
        y.scale[row * n_groups + begin / YARD_GROUP + lane] = scale;
}

/* on the host: whether rows are pieces without a rest, and pairs aligned accesses */
static inline bool has_whole_pieces(const yard_rows *r, uint32_t n_cols)
{
    return is_wide(r, n_cols) && n_cols % PIECE_COLS == 0;
}

#endif
