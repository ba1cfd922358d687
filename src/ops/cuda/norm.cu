/* RMS norm with the residual sum before it and the rounding after it, and what a latent's norm is
 * part of: rope_append_kv. Squares are summed as in the definition: pieces of 512 columns, 64 lanes
 * a piece. */
#include "ops/cuda/launch.h"

#include "ops/cuda/rope.cuh"
#include "ops/cuda/rows.cuh"

enum {
    NORM_MAX_THREADS = 1024, /* a thread for every eight columns, as long as there are enough */
    NORM_MAX_ROUNDS = 4,     /* eights of a thread, where there are not */
    NORM_MAX_COLS = NORM_MAX_ROUNDS * NORM_MAX_THREADS * LANE_COLS,
    NORM_MAX_BLOCKS = 132 * 4,
    PIECE_COLS = 512,
    SQUARE_LANES = 64,
    MAX_PIECES = NORM_MAX_COLS / PIECE_COLS
};

/* One piece's sum by one warp, which does two lanes at a time; values up to n_cols. */
static __device__ __forceinline__ float sum_piece(const float *values, uint32_t n_cols)
{
    const uint32_t lane = threadIdx.x % WARP_LANES;
    float low = 0.0f, high = 0.0f, sum;

#pragma unroll
    for (uint32_t i = 0; i < PIECE_COLS; i += SQUARE_LANES) {
        const float a = lane + i < n_cols ? values[lane + i] : 0.0f;
        const float b = lane + i + WARP_LANES < n_cols ? values[lane + i + WARP_LANES] : 0.0f;
        low = __fmaf_rn(a, a, low);
        high = __fmaf_rn(b, b, high);
    }
    sum = __fadd_rn(low, high);
    /* both sides of a pair get the same sum: addition commutes */
    for (int half = WARP_LANES / 2; half > 0; half /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, half));
    return sum;
}

/* The pieces' sums, a warp each, into shared memory. Ends with every thread past a barrier. */
static __device__ __forceinline__ void sum_pieces(const float *values, uint32_t n_cols,
                                                  float *piece_sum)
{
    const uint32_t n_pieces = (n_cols + PIECE_COLS - 1) / PIECE_COLS;

    for (uint32_t p = threadIdx.x / WARP_LANES; p < n_pieces; p += blockDim.x / WARP_LANES) {
        const float squares = sum_piece(values + p * PIECE_COLS, n_cols - p * PIECE_COLS);
        if (threadIdx.x % WARP_LANES == 0)
            piece_sum[p] = squares;
    }
    __syncthreads();
}

/* 1 / the root of what the definition's sum_squares gives over n_cols. */
static __device__ __forceinline__ float inverse_rms(const float *piece_sum, uint32_t n_cols,
                                                    float eps)
{
    const uint32_t n_pieces = (n_cols + PIECE_COLS - 1) / PIECE_COLS;
    float sum = 0.0f;

#pragma unroll 4
    for (uint32_t p = 0; p < n_pieces; p++)
        sum = __fadd_rn(sum, piece_sum[p]);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)n_cols), eps)));
}

static __device__ __forceinline__ eight normalised(const eight &x, float inverse,
                                                   const eight &weight)
{
    eight y;

#pragma unroll
    for (int i = 0; i < LANE_COLS; i++)
        y.v[i] = __fmul_rn(__fmul_rn(x.v[i], inverse), weight.v[i]);
    return y;
}

static __device__ __forceinline__ void to_shared(float *p, const eight &x)
{
    *(float4 *)p = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
    *(float4 *)(p + 4) = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}

static __device__ __forceinline__ eight from_shared(const float *p)
{
    const float4 low = *(const float4 *)p, high = *(const float4 *)(p + 4);

    return (eight){ { low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w } };
}

typedef struct norm_args {
    yard_rms_norm_args a;
} norm_args;

/* Puts the row, with what is added to it, into shared memory. All loads first: one trip to memory,
 * not one a round. */
template <int ROUNDS, bool WIDE>
static __device__ __forceinline__ void load_row(const norm_args &n, uint32_t row, float *values)
{
    const yard_rms_norm_args &a = n.a;
    const uint32_t first = threadIdx.x * LANE_COLS, step = blockDim.x * LANE_COLS;
    eight x[ROUNDS], add[ROUNDS];

#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        x[r] = load_values(a.x, (size_t)row * a.x.ld, first + r * step, a.n_cols, WIDE);
        if (a.add.data)
            add[r] = load_values(a.add, (size_t)row * a.add.ld, first + r * step, a.n_cols, WIDE);
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const uint32_t col = first + r * step;
        if (a.add.data) {
#pragma unroll
            for (int i = 0; i < LANE_COLS; i++)
                x[r].v[i] = __fadd_rn(x[r].v[i], add[r].v[i]);
            store_values(a.x, (size_t)row * a.x.ld, col, a.n_cols, WIDE, x[r]);
        }
        if (col < a.n_cols)
            to_shared(values + col, x[r]);
    }
}

/* One row a block at a time. WIDE: of x, what is added, weights and results. */
template <int ROUNDS, bool WIDE>
static __global__ void __launch_bounds__(NORM_MAX_THREADS, ROUNDS == 1 ? 2 : 1)
    rms_norm_quant_kernel(const __grid_constant__ norm_args n)
{
    extern __shared__ float4 raw[];
    __shared__ float piece_sum[MAX_PIECES], inverse_of_row;
    const yard_rms_norm_args &a = n.a;
    const yard_rows weight = { a.weight_dtype, a.n_cols, (void *)a.weight, NULL };
    const uint32_t first = threadIdx.x * LANE_COLS, step = blockDim.x * LANE_COLS;
    float *values = (float *)raw;

    allow_next_kernel();
    /* weights do not depend on any kernel before this one; to hold them takes too many registers */
#pragma unroll
    for (int r = 0; r < ROUNDS; r++)
        if (first + r * step < a.n_cols)
            asm volatile("prefetch.global.L1 [%0];" ::"l"(
                (const char *)a.weight +
                (size_t)(first + r * step) * (a.weight_dtype == YARD_BF16 ? 2 : 4)));
    wait_previous_kernel();

    for (uint32_t row = blockIdx.x; row < (uint32_t)*a.n_rows; row += gridDim.x) {
        eight w[ROUNDS];

        load_row<ROUNDS, WIDE>(n, row, values);
        __syncthreads(); /* the row is whole */
        sum_pieces(values, a.n_cols, piece_sum);
        if (threadIdx.x == 0) /* three divisions and a chain of sums: not for every warp */
            inverse_of_row = inverse_rms(piece_sum, a.n_cols, a.eps);
#pragma unroll
        for (int r = 0; r < ROUNDS; r++)
            w[r] = load_values(weight, 0, first + r * step, a.n_cols, WIDE);
        __syncthreads(); /* the inverse is there */
        const float inverse = inverse_of_row;
#pragma unroll
        for (int r = 0; r < ROUNDS; r++) {
            const uint32_t col = first + r * step;
            /* warps leave together: a warp's columns are two groups */
            if (col / (2 * YARD_GROUP) * (2 * YARD_GROUP) >= a.n_cols)
                break;
            const eight x = col < a.n_cols ? from_shared(values + col) : (eight){};
            emit_values(a.y, row, col, a.n_cols, a.ue8m0, WIDE, normalised(x, inverse, w[r]));
        }
        __syncthreads(); /* the next row takes the same places */
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
    const norm_args n = { *a };
    const bool wide = is_wide(&a->x, a->n_cols) && is_wide(&a->add, a->n_cols) &&
                      is_wide(&a->y.plain, a->n_cols) && is_wide(&a->y.quant, a->n_cols) &&
                      is_wide(&weight, a->n_cols);
    const uint32_t n_threads =
        (uint32_t)yard_align_up(yard_ceil_div(a->n_cols, LANE_COLS), WARP_LANES);
    const bool fits = n_threads <= NORM_MAX_THREADS;

    if (a->n_cols > NORM_MAX_COLS)
        return yard_fail(err, YARD_EINVAL, "rms_norm: want at most %d columns, got %u",
                         NORM_MAX_COLS, a->n_cols);
    if (!is_plain(a->x.dtype) || !is_plain(a->weight_dtype))
        return yard_fail(err, YARD_EINVAL, "rms_norm: want rows and weights in f32 or bf16");
    if (a->add.data && a->x.dtype != YARD_F32)
        return yard_fail(err, YARD_EINVAL, "rms_norm: want f32 rows where a sum is written back");
    return launch_rows(
        fits   ? wide ? rms_norm_quant_kernel<1, true> : rms_norm_quant_kernel<1, false>
          : wide ? rms_norm_quant_kernel<NORM_MAX_ROUNDS, true>
               : rms_norm_quant_kernel<NORM_MAX_ROUNDS, false>,
        grid_for(max_rows, 1, NORM_MAX_BLOCKS), fits ? n_threads : (uint32_t)NORM_MAX_THREADS,
        yard_align_up(a->n_cols, LANE_COLS) * sizeof(float), n, "rms_norm", stream, err);
}

enum { APPEND_THREADS = 96, APPEND_MAX_BLOCKS = 132 * 8, APPEND_MAX_RANK = 4096 };

typedef struct append_args {
    yard_rope_append_kv_args a;
    yard_batch batch;
    bool wide, weight_wide, cache_wide;
    yard_latent_row cached; /* of an FP8 cache */
} append_args;

/* The normed latent as codes and scales of an FP8 cache's row. */
static __device__ __forceinline__ void store_codes(const append_args &n, const float *values,
                                                   float inverse, const yard_rows &weight,
                                                   uint8_t *to)
{
    const uint32_t kv_rank = n.a.kv_rank, lane = threadIdx.x % WARP_LANES;
    const yard_rows codes = { YARD_FP8_E4M3, kv_rank, to, (float *)(to + n.cached.scale_at) };

    for (uint32_t first = threadIdx.x / WARP_LANES * WARP_LANES * LANE_COLS; first < kv_rank;
         first += APPEND_THREADS * LANE_COLS) { /* whole warps: lanes share groups */
        const uint32_t col = first + lane * LANE_COLS;
        const eight x = col < kv_rank
                            ? normalised(from_shared(values + col), inverse,
                                         load_values(weight, 0, col, kv_rank, n.weight_wide))
                            : (eight){};
        quantise_values(codes, 0, col, kv_rank, n.a.ue8m0, n.cache_wide, x);
    }
}

/* The last warp turns the key's rotary part while the others norm the latent. */
static __global__ void __launch_bounds__(APPEND_THREADS)
    rope_append_kv_kernel(const __grid_constant__ append_args n)
{
    extern __shared__ float4 raw[];
    __shared__ float piece_sum[APPEND_MAX_RANK / PIECE_COLS];
    const yard_rope_append_kv_args &a = n.a;
    const yard_rows weight = { a.norm_dtype, a.kv_rank, (void *)a.norm_weight, NULL };
    const bool fp8 = a.cache.dtype == YARD_FP8_E4M3;
    const yard_rows cache = { fp8 ? YARD_BF16 : a.cache.dtype, a.cache.width, a.cache.data, NULL };
    const uint32_t n_norm_threads = APPEND_THREADS - WARP_LANES;
    float *values = (float *)raw;

    allow_next_kernel();
    wait_previous_kernel();
    for (uint32_t row = blockIdx.x; row < (uint32_t)*n.batch.n_tokens; row += gridDim.x) {
        const size_t kv = (size_t)row * a.kv.ld, slot = cache_row(n.batch, row);
        const size_t to = slot * a.cache.width;
        const size_t turned =
            fp8 ? (slot * n.cached.n_bytes + n.cached.rope_at) / 2 : to + a.kv_rank;

        if (threadIdx.x < n_norm_threads)
            for (uint32_t col = threadIdx.x * LANE_COLS; col < a.kv_rank;
                 col += n_norm_threads * LANE_COLS)
                to_shared(values + col, load_values(a.kv, kv, col, a.kv_rank, n.wide));
        else
            rotate_head(a.rope, n.batch.position[row], a.kv, kv + a.kv_rank, cache, turned,
                        threadIdx.x % WARP_LANES);
        __syncthreads(); /* the latent is whole */
        sum_pieces(values, a.kv_rank, piece_sum);
        const float inverse = inverse_rms(piece_sum, a.kv_rank, a.eps);
        if (fp8)
            store_codes(n, values, inverse, weight,
                        (uint8_t *)a.cache.data + slot * n.cached.n_bytes);
        for (uint32_t col = threadIdx.x * LANE_COLS; col < a.kv_rank && !fp8;
             col += APPEND_THREADS * LANE_COLS)
            store_values(cache, to, col, a.kv_rank, n.cache_wide,
                         normalised(from_shared(values + col), inverse,
                                    load_values(weight, 0, col, a.kv_rank, n.weight_wide)));
        __syncthreads(); /* the next row takes the same places */
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
    const append_args n = { *a,
                            *a->batch,
                            is_wide(&a->kv, a->kv_rank),
                            is_wide(&weight, a->kv_rank),
                            is_wide(&cache, a->kv_rank),
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
                       APPEND_THREADS, yard_align_up(a->kv_rank, LANE_COLS) * sizeof(float), n,
                       "rope_append_kv", stream, err);
}

yard_status yard_cuda_rows_open(yard_error *err)
{
    const int n_bytes = NORM_MAX_COLS * (int)sizeof(float);
    cudaError_t code = cudaFuncSetAttribute(rms_norm_quant_kernel<NORM_MAX_ROUNDS, true>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes);

    if (code == cudaSuccess)
        code = cudaFuncSetAttribute(rms_norm_quant_kernel<NORM_MAX_ROUNDS, false>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, n_bytes);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "rms_norm: %s", cudaGetErrorString(code));
    return YARD_OK;
}
