/* rope_q and gqa_append_kv: rotary embedding of many heads of a token. A block computes the turns
 * of one position once for the heads that its warps share. */
#include "ops/cuda/launch.h"

#include "ops/cuda/rope.cuh"

enum {
    ROPE_THREADS = 256,
    ROPE_WARPS = ROPE_THREADS / WARP_LANES,
    ROPE_PART_HEADS = 32,     /* of a block, or as often as many */
    ROPE_MAX_BLOCKS = 132 * 4 /* as many as there is room for at once */
};

/* By the last threads: the first ones rotate heads meanwhile. */
static __device__ __forceinline__ void make_turns(const yard_rope &rope, int32_t position,
                                                  float2 *turns)
{
    for (uint32_t i = ROPE_THREADS - 1 - threadIdx.x; i < rope.n_dims / 2; i += ROPE_THREADS)
        turns[i] = turn_of(rope, position, i);
}

typedef struct rope_q_args {
    yard_rope_q_args a;
    yard_batch batch;
    uint32_t n_parts, part_heads; /* of a token's heads */
} rope_q_args;

/* The batch is as it was before the step: the first token's turns do not wait for the kernel before
 * this one. */
static __global__ void __launch_bounds__(ROPE_THREADS)
    rope_q_kernel(const __grid_constant__ rope_q_args n)
{
    __shared__ alignas(16) float2 turns[2][ROPE_MAX_DIMS / 2]; /* of this token and the next */
    const yard_rope_q_args &a = n.a;

    uint32_t now = 0;

    allow_next_kernel();
    const uint32_t n_items = (uint32_t)*n.batch.n_tokens * n.n_parts;
    if (blockIdx.x < n_items)
        make_turns(a.rope, n.batch.position[blockIdx.x / n.n_parts], turns[now]);
    wait_previous_kernel();
    for (uint32_t item = blockIdx.x; item < n_items; item += gridDim.x, now ^= 1) {
        const uint32_t row = item / n.n_parts, first = item % n.n_parts * n.part_heads;
        const size_t at = (size_t)row * a.q.ld + (size_t)(first + 1) * a.head_dim - a.rope.n_dims;
        const uint32_t next = item + gridDim.x;

        __syncthreads(); /* the turns are there, and nobody reads those before */
        if (next < n_items)
            make_turns(a.rope, n.batch.position[next / n.n_parts], turns[now ^ 1]);
        rotate_heads(a.rope, turns[now], a.q, at, a.head_dim, a.q, at, a.head_dim,
                     min(n.part_heads, a.n_heads - first), threadIdx.x / WARP_LANES, ROPE_WARPS,
                     threadIdx.x % WARP_LANES);
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
    /* few tokens: several blocks share one's heads */
    const uint32_t least = yard_ceil_div(a->n_heads, ROPE_PART_HEADS);
    const uint32_t wanted = max_rows ? ROPE_MAX_BLOCKS / max_rows : least;
    const uint32_t parts = wanted < 1 ? 1 : wanted < least ? wanted : least;
    const uint32_t part_heads =
        (uint32_t)yard_align_up(yard_ceil_div(a->n_heads, parts), ROPE_PART_HEADS);
    const rope_q_args n = { *a, *a->batch, yard_ceil_div(a->n_heads, part_heads), part_heads };
    const yard_status st = check_rope(&a->rope, &a->q, "rope_q", err);

    if (st != YARD_OK)
        return st;
    return launch_rows(rope_q_kernel, grid_for((uint64_t)max_rows * n.n_parts, 1, ROPE_MAX_BLOCKS),
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
    __shared__ alignas(16) float2 turns[2][ROPE_MAX_DIMS / 2]; /* of this token and the next */
    const yard_gqa_append_kv_args &a = n.a;
    const yard_rows cache = { a.cache.dtype, a.cache.width, a.cache.data, NULL };
    const uint32_t width = a.n_kv_heads * a.head_dim;

    uint32_t now = 0;

    allow_next_kernel();
    const uint32_t n_tokens = (uint32_t)*n.batch.n_tokens;
    size_t to = 0;
    if (blockIdx.x < n_tokens) {
        to = cache_row(n.batch, blockIdx.x) * a.cache.width;
        make_turns(a.rope, n.batch.position[blockIdx.x], turns[now]);
    }
    wait_previous_kernel();
    for (uint32_t row = blockIdx.x; row < n_tokens; row += gridDim.x, now ^= 1) {
        const uint32_t next = row + gridDim.x;
        const size_t at = to;

        __syncthreads(); /* the turns are there, and nobody reads those before */
        if (next < n_tokens) {
            to = cache_row(n.batch, next) * a.cache.width;
            make_turns(a.rope, n.batch.position[next], turns[now ^ 1]);
        }
        rotate_heads(a.rope, turns[now], a.k, (size_t)row * a.k.ld, a.head_dim, cache, at,
                     a.head_dim, a.n_kv_heads, threadIdx.x / WARP_LANES, ROPE_WARPS,
                     threadIdx.x % WARP_LANES);
        for (uint32_t col = threadIdx.x * LANE_COLS; col < width; col += ROPE_THREADS * LANE_COLS)
            store_values(cache, at + width, col, width, n.wide,
                         load_values(a.v, (size_t)row * a.v.ld, col, width, n.wide));
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
