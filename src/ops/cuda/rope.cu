/* rope_q and gqa_append_kv: rotary embedding of many heads of a token. A block computes the turns
 * of one position once, then its warps take a head each. */
#include "ops/cuda/launch.h"

#include "ops/cuda/rope.cuh"

enum {
    ROPE_THREADS = 256,
    ROPE_WARPS = ROPE_THREADS / WARP_LANES,
    ROPE_MIN_HEADS = 8, /* of a block: fewer would be turns and nothing else */
    ROPE_MAX_BLOCKS = 132 * 6
};

static __device__ __forceinline__ void make_turns(const yard_rope &rope, int32_t position,
                                                  float2 *turns)
{
    for (uint32_t i = threadIdx.x; i < rope.n_dims / 2; i += ROPE_THREADS)
        turns[i] = turn_of(rope, position, i);
    __syncthreads();
}

typedef struct rope_q_args {
    yard_rope_q_args a;
    yard_batch batch;
} rope_q_args;

static __global__ void __launch_bounds__(ROPE_THREADS)
    rope_q_kernel(const __grid_constant__ rope_q_args n)
{
    __shared__ float2 turns[ROPE_MAX_DIMS / 2];
    const yard_rope_q_args &a = n.a;

    allow_next_kernel();
    wait_previous_kernel();
    const uint32_t n_tokens = (uint32_t)*n.batch.n_tokens;
    const uint32_t element_bytes = a.q.dtype == YARD_BF16 ? 2 : 4;
    /* few tokens: several blocks share one's heads */
    const uint32_t most = (a.n_heads + ROPE_MIN_HEADS - 1) / ROPE_MIN_HEADS;
    const uint32_t n_parts = max(1u, min(most, gridDim.x / max(1u, n_tokens)));
    const uint32_t part_heads = (a.n_heads + n_parts - 1) / n_parts;
    for (uint32_t item = blockIdx.x; item < n_tokens * n_parts; item += gridDim.x) {
        const uint32_t row = item / n_parts, first = item % n_parts * part_heads;
        const uint32_t n_heads = first < a.n_heads ? min(part_heads, a.n_heads - first) : 0;
        const size_t at = (size_t)row * a.q.ld + (size_t)(first + 1) * a.head_dim - a.rope.n_dims;

        /* the heads are on their way while the turns are computed */
        for (uint32_t h = threadIdx.x; h < n_heads; h += ROPE_THREADS)
            asm volatile("prefetch.global.L1 [%0];" ::"l"((const char *)a.q.data +
                                                          (at + h * a.head_dim) * element_bytes));
        make_turns(a.rope, n.batch.position[row], turns);
        rotate_heads(
            a.rope, [&](uint32_t i) { return turns[i]; }, a.q, at, a.head_dim, a.q, at, a.head_dim,
            n_heads, threadIdx.x / WARP_LANES, ROPE_WARPS, threadIdx.x % WARP_LANES);
        __syncthreads(); /* the next item's turns take the same place */
    }
}

static yard_status check_rope(const yard_rope *rope, const yard_rows *x, const char *name,
                              yard_error *err)
{
    if (rope->n_dims > ROPE_MAX_DIMS || rope->n_dims % 2)
        return yard_fail(err, YARD_EINVAL, "%s: want at most %d dimensions, even, got %u", name,
                         ROPE_MAX_DIMS, rope->n_dims);
    if (x->dtype != YARD_F32 && x->dtype != YARD_BF16)
        return yard_fail(err, YARD_EINVAL, "%s: want f32 or bf16, got %s", name,
                         yard_dtype_name(x->dtype));
    return YARD_OK;
}

yard_status yard_cuda_rope_q_launch(const yard_rope_q_args *a, uint32_t max_rows, void *stream,
                                    yard_error *err)
{
    const rope_q_args n = { *a, *a->batch };
    const yard_status st = check_rope(&a->rope, &a->q, "rope_q", err);

    if (st != YARD_OK)
        return st;
    return launch_rows(rope_q_kernel,
                       grid_for((uint64_t)max_rows * yard_ceil_div(a->n_heads, ROPE_MIN_HEADS), 1,
                                ROPE_MAX_BLOCKS),
                       ROPE_THREADS, 0, n, "rope_q", stream, err);
}

typedef struct gqa_args {
    yard_gqa_append_kv_args a;
    yard_batch batch;
    bool wide;
} gqa_args;

static __global__ void __launch_bounds__(ROPE_THREADS)
    gqa_append_kv_kernel(const __grid_constant__ gqa_args n)
{
    __shared__ float2 turns[ROPE_MAX_DIMS / 2];
    const yard_gqa_append_kv_args &a = n.a;
    const yard_rows cache = { a.cache.dtype, a.cache.width, a.cache.data, NULL };
    const uint32_t width = a.n_kv_heads * a.head_dim;

    allow_next_kernel();
    wait_previous_kernel();
    for (uint32_t row = blockIdx.x; row < (uint32_t)*n.batch.n_tokens; row += gridDim.x) {
        const size_t to = cache_row(n.batch, row) * a.cache.width;

        make_turns(a.rope, n.batch.position[row], turns);
        rotate_heads(
            a.rope, [&](uint32_t i) { return turns[i]; }, a.k, (size_t)row * a.k.ld, a.head_dim,
            cache, to, a.head_dim, a.n_kv_heads, threadIdx.x / WARP_LANES, ROPE_WARPS,
            threadIdx.x % WARP_LANES);
        for (uint32_t col = threadIdx.x * LANE_COLS; col < width; col += ROPE_THREADS * LANE_COLS)
            store_values(cache, to + width, col, width, n.wide,
                         load_values(a.v, (size_t)row * a.v.ld, col, width, n.wide));
        __syncthreads(); /* the next row's turns take the same place */
    }
}

yard_status yard_cuda_gqa_append_kv_launch(const yard_gqa_append_kv_args *a, uint32_t max_rows,
                                           void *stream, yard_error *err)
{
    const uint32_t width = a->n_kv_heads * a->head_dim;
    const yard_rows cache = { a->cache.dtype, a->cache.width, a->cache.data, NULL };
    const gqa_args n = { *a, *a->batch, is_wide(&a->v, width) && is_wide(&cache, width) };
    yard_status st = check_rope(&a->rope, &a->k, "gqa_append_kv", err);

    if (st == YARD_OK)
        st = check_rope(&a->rope, &a->v, "gqa_append_kv", err);
    if (st != YARD_OK)
        return st;
    return launch_rows(gqa_append_kv_kernel, grid_for(max_rows, 1, ROPE_MAX_BLOCKS), ROPE_THREADS,
                       0, n, "gqa_append_kv", stream, err);
}
