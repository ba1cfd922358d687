/* RMS norm with the residual sum before it and the rounding after it, and what a latent's norm is
 * part of: rope_append_kv. */
#include "ops/cuda/launch.h"

#include "ops/cuda/piece.cuh"
#include "ops/cuda/rope.cuh"

enum {
    NORM_MAX_WARPS = 16, /* a warp a piece, as long as there are enough */
    NORM_MAX_ROUNDS = 4, /* pieces of a warp, where there are not */
    NORM_MAX_PIECES = NORM_MAX_ROUNDS * NORM_MAX_WARPS,
    NORM_MAX_COLS = NORM_MAX_PIECES * PIECE_COLS,
    NORM_MAX_BLOCKS = 132 * 4
};

static uint32_t piece_count(uint32_t n_cols)
{
    return yard_ceil_div(n_cols, PIECE_COLS);
}

typedef struct norm_args {
    yard_rms_norm_args a;
    uint32_t n_pieces;
} norm_args;

/* Column where the warp's r-th piece begins. */
static __device__ __forceinline__ uint32_t piece_begin(int r)
{
    return (threadIdx.x / WARP_LANES + r * NORM_MAX_WARPS) * PIECE_COLS;
}

/* The warp's pieces of a row, with what is added to it; those behind the last are zeros. */
template <int ROUNDS, bool WHOLE>
static __device__ __forceinline__ void load_row(const norm_args &n, uint32_t row,
                                                piece (&x)[ROUNDS])
{
    const yard_rms_norm_args &a = n.a;

#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const uint32_t begin = piece_begin(r);
        x[r] = (piece){};
        if (begin >= a.n_cols)
            continue;
        x[r] = load_piece(a.x, (size_t)row * a.x.ld, begin, a.n_cols, WHOLE);
        if (a.add.data)
            add_piece(&x[r], load_piece(a.add, (size_t)row * a.add.ld, begin, a.n_cols, WHOLE));
    }
}

/* Brings weights near; to hold them takes too many registers. */
static __device__ __forceinline__ void prefetch_weight(const yard_rms_norm_args &a)
{
    const uint32_t element = a.weight_dtype == YARD_BF16 ? 2 : 4;

    for (uint32_t at = threadIdx.x * 128; at < a.n_cols * element; at += blockDim.x * 128)
        asm volatile("prefetch.global.L1 [%0];" ::"l"((const char *)a.weight + at));
}

/* One row a block at a time, which stays in registers. WHOLE: all rows are whole pieces. */
template <int ROUNDS, bool WHOLE>
static __global__ void __launch_bounds__(NORM_MAX_WARPS *WARP_LANES, ROUNDS == 1 ? 2 : 1)
    rms_norm_quant_kernel(const __grid_constant__ norm_args n)
{
    /* by turns: who is one row ahead does not write where others still read */
    __shared__ float piece_sum[2][ROUNDS * NORM_MAX_WARPS];
    const yard_rms_norm_args &a = n.a;
    const yard_rows weight = { a.weight_dtype, a.n_cols, (void *)a.weight, NULL };
    uint32_t row = blockIdx.x, turn = 0;
    piece x[ROUNDS];

    allow_next_kernel();
    prefetch_weight(a); /* does not depend on any kernel before this one */
    wait_previous_kernel();
    if (!may_read_row(row, a.n_rows, a.max_rows))
        return;
    const uint32_t n_rows = (uint32_t)*a.n_rows;
    load_row<ROUNDS, WHOLE>(n, row, x);
    for (;;) {
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const float squares = piece_squares(x[r]);
            if (threadIdx.x % WARP_LANES == 0)
                piece_sum[turn][threadIdx.x / WARP_LANES + r * NORM_MAX_WARPS] = squares;
        }
        piece w = load_piece(weight, 0, piece_begin(0), a.n_cols, WHOLE);
        __syncthreads(); /* all pieces' sums are there */
        if (row >= n_rows)
            return;
        const float inverse = inverse_rms(piece_sum[turn], n.n_pieces, a.n_cols, a.eps);
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const uint32_t begin = piece_begin(r);
            if (begin >= a.n_cols)
                break;
            if (r > 0)
                w = load_piece(weight, 0, begin, a.n_cols, WHOLE);
            if (a.add.data)
                store_piece(a.x, (size_t)row * a.x.ld, begin, a.n_cols, WHOLE, x[r]);
            scale_piece(&x[r], inverse, w);
            if (a.y.plain.data)
                store_piece(a.y.plain, (size_t)row * a.y.plain.ld, begin, a.n_cols, WHOLE, x[r]);
            if (a.y.quant.data)
                quantise_piece(a.y.quant, row, begin, a.n_cols, a.ue8m0, WHOLE, x[r]);
        }
        row += gridDim.x;
        turn ^= 1;
        if (row >= n_rows)
            return;
        load_row<ROUNDS, WHOLE>(n, row, x);
    }
}

static bool is_plain(yard_dtype dtype)
{
    return dtype == YARD_F32 || dtype == YARD_BF16;
}

yard_status yard_cuda_rms_norm_launch(const yard_rms_norm_args *a, uint32_t max_rows, void *stream,
                                      yard_error *err)
{
    const yard_rows weight = { a->weight_dtype, a->n_cols, (void *)a->weight, NULL };
    const norm_args n = { *a, piece_count(a->n_cols) };
    const bool whole = has_whole_pieces(&a->x, a->n_cols) && has_whole_pieces(&a->add, a->n_cols) &&
                       has_whole_pieces(&a->y.plain, a->n_cols) &&
                       has_whole_pieces(&a->y.quant, a->n_cols) &&
                       has_whole_pieces(&weight, a->n_cols);
    const bool fits = n.n_pieces <= NORM_MAX_WARPS;

    if (a->n_cols > NORM_MAX_COLS)
        return yard_fail(err, YARD_EINVAL, "rms_norm: want at most %d columns, got %u",
                         NORM_MAX_COLS, a->n_cols);
    if (!is_plain(a->x.dtype) || !is_plain(a->weight_dtype))
        return yard_fail(err, YARD_EINVAL, "rms_norm: want rows and weights in f32 or bf16");
    if (a->add.data && a->x.dtype != YARD_F32)
        return yard_fail(err, YARD_EINVAL, "rms_norm: want f32 rows where a sum is written back");
    return launch_rows(
        fits    ? whole ? rms_norm_quant_kernel<1, true> : rms_norm_quant_kernel<1, false>
           : whole ? rms_norm_quant_kernel<NORM_MAX_ROUNDS, true>
                : rms_norm_quant_kernel<NORM_MAX_ROUNDS, false>,
        grid_for(max_rows, 1, NORM_MAX_BLOCKS),
        (fits ? n.n_pieces : (uint32_t)NORM_MAX_WARPS) * WARP_LANES, 0, n, "rms_norm", stream, err);
}

enum {
    APPEND_MAX_PIECES = 8, /* of the latent, a warp each; one more turns the key's rotary part */
    APPEND_MAX_RANK = APPEND_MAX_PIECES * PIECE_COLS,
    APPEND_MAX_BLOCKS = 132 * 8
};

typedef struct append_args {
    yard_rope_append_kv_args a;
    yard_batch batch;
    uint32_t n_pieces;
    bool whole;             /* kv, weights and cache */
    yard_latent_row cached; /* of an FP8 cache */
} append_args;

/* Where token `row` goes in the cache: elements before its latent and its turned key; of an FP8
 * cache, bytes before its codes. */
typedef struct append_place {
    size_t latent, turned, codes;
    int32_t position;
} append_place;

static __device__ __forceinline__ append_place place_of(const append_args &n, uint32_t row)
{
    const size_t slot = cache_row(n.batch, row), latent = slot * n.a.cache.width;
    const size_t codes = slot * n.cached.n_bytes;

    return (append_place){ latent,
                           n.a.cache.dtype == YARD_FP8_E4M3 ? (codes + n.cached.rope_at) / 2
                                                            : latent + n.a.kv_rank,
                           codes, n.batch.position[row] };
}

/* The batch is as it was before the step: places, turns and weights do not wait for the kernel
 * before this one. */
static __global__ void __launch_bounds__((APPEND_MAX_PIECES + 1) * WARP_LANES)
    rope_append_kv_kernel(const __grid_constant__ append_args n)
{
    __shared__ float piece_sum[2][APPEND_MAX_PIECES]; /* by turns, as in the norm */
    const yard_rope_append_kv_args &a = n.a;
    const yard_rows weight = { a.norm_dtype, a.kv_rank, (void *)a.norm_weight, NULL };
    const bool fp8 = a.cache.dtype == YARD_FP8_E4M3;
    const yard_rows cache = { fp8 ? YARD_BF16 : a.cache.dtype, a.cache.width, a.cache.data, NULL };
    const uint32_t warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const uint32_t begin = warp * PIECE_COLS;
    const bool turns = warp == n.n_pieces;
    float2 turn[ROPE_LANE_PAIRS];
    append_place to;

    allow_next_kernel();
    const uint32_t n_tokens = (uint32_t)*n.batch.n_tokens;
    uint32_t row = blockIdx.x, flip = 0;
    const piece w = turns ? (piece){} : load_piece(weight, 0, begin, a.kv_rank, n.whole);
    if (row < n_tokens) {
        to = place_of(n, row);
        if (turns)
            make_lane_turns(a.rope, to.position, lane, turn);
    }
    wait_previous_kernel();
    for (; row < n_tokens; row += gridDim.x, flip ^= 1) {
        const size_t kv = (size_t)row * a.kv.ld;
        piece x;

        if (row != blockIdx.x)
            to = place_of(n, row);
        if (!turns) {
            x = load_piece(a.kv, kv, begin, a.kv_rank, n.whole);
            const float squares = piece_squares(x);
            if (lane == 0)
                piece_sum[flip][warp] = squares;
        } else {
            if (row != blockIdx.x)
                make_lane_turns(a.rope, to.position, lane, turn);
            rotate<1, ROPE_LANE_PAIRS>(
                a.rope, [&](uint32_t, uint32_t p) { return turn[p]; }, a.kv, kv + a.kv_rank, 0,
                cache, to.turned, 0, 1, lane);
        }
        __syncthreads(); /* all pieces' sums are there */
        if (turns)
            continue;
        scale_piece(&x, inverse_rms(piece_sum[flip], n.n_pieces, a.kv_rank, a.eps), w);
        if (fp8) {
            uint8_t *const codes = (uint8_t *)a.cache.data + to.codes;
            quantise_piece((yard_rows){ YARD_FP8_E4M3, a.kv_rank, codes,
                                        (float *)(codes + n.cached.scale_at) },
                           0, begin, a.kv_rank, a.ue8m0, n.whole, x);
        } else {
            store_piece(cache, to.latent, begin, a.kv_rank, n.whole, x);
        }
    }
}

yard_status yard_cuda_rope_append_kv_launch(const yard_rope_append_kv_args *a, uint32_t max_rows,
                                            void *stream, yard_error *err)
{
    const yard_rows weight = { a->norm_dtype, a->kv_rank, (void *)a->norm_weight, NULL };
    const yard_latent_row cached = yard_latent_row_of(a->cache.dtype, a->kv_rank, a->rope.n_dims);
    const bool fp8 = a->cache.dtype == YARD_FP8_E4M3;
    const yard_rows cache = { a->cache.dtype, fp8 ? cached.n_bytes : a->cache.width, a->cache.data,
                              NULL };
    const append_args n = { *a, *a->batch, piece_count(a->kv_rank),
                            has_whole_pieces(&a->kv, a->kv_rank) &&
                                has_whole_pieces(&weight, a->kv_rank) &&
                                has_whole_pieces(&cache, a->kv_rank),
                            cached };

    if (a->kv_rank > APPEND_MAX_RANK || a->rope.n_dims > ROPE_MAX_DIMS || a->rope.n_dims % 2)
        return yard_fail(
            err, YARD_EINVAL,
            "rope_append_kv: want a latent of at most %d and at most %d rotated, even; "
            "got %u and %u",
            APPEND_MAX_RANK, ROPE_MAX_DIMS, a->kv_rank, a->rope.n_dims);
    if (!is_plain(a->kv.dtype) || !(fp8 || is_plain(a->cache.dtype)) || !is_plain(a->norm_dtype))
        return yard_fail(err, YARD_EINVAL,
                         "rope_append_kv: want rows in f32 or bf16, a cache in those or FP8");
    if (fp8 && (uintptr_t)a->cache.data % 16)
        return yard_fail(err, YARD_EINVAL, "rope_append_kv: want an FP8 cache at 16 bytes");
    return launch_rows(rope_append_kv_kernel, grid_for(max_rows, 1, APPEND_MAX_BLOCKS),
                       (n.n_pieces + 1) * WARP_LANES, 0, n, "rope_append_kv", stream, err);
}
