/* Local dispatch: where each token's rows lie among its experts', and the copies there. */
#include "ops/cuda/launch.h"

#include "ops/cuda/rows.cuh"

enum {
    PLACE_THREADS = 1024,
    PLACE_WARPS = PLACE_THREADS / WARP_LANES,
    PLACE_MAX_EXPERTS = 1024,
    PLACE_MAX_BYTES = (PLACE_WARPS + 1) * PLACE_MAX_EXPERTS * (int)sizeof(int32_t)
};

/* Exclusive sums of x over the block's threads; *total: of all. */
template <int WARPS> static __device__ __forceinline__ int32_t scan_block(int32_t x, int32_t *total)
{
    __shared__ int32_t warp_sum[WARPS];
    const uint32_t lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    int32_t sum = x, others;

    for (int distance = 1; distance < WARP_LANES; distance *= 2) {
        const int32_t below = __shfl_up_sync(0xffffffffu, sum, distance);
        sum += (int)lane >= distance ? below : 0;
    }
    if (lane == WARP_LANES - 1)
        warp_sum[warp] = sum;
    __syncthreads();
    others = lane < WARPS ? warp_sum[lane] : 0;
    for (int distance = 1; distance < WARP_LANES; distance *= 2) {
        const int32_t below = __shfl_up_sync(0xffffffffu, others, distance);
        others += (int)lane >= distance ? below : 0;
    }
    *total = __shfl_sync(0xffffffffu, others, WARP_LANES - 1);
    others = __shfl_sync(0xffffffffu, others, warp == 0 ? 0 : warp - 1);
    __syncthreads(); /* the sums may be written again */
    return sum - x + (warp == 0 ? 0 : others);
}

/* Calls fn(i, expert, rank) for the warp's entries in order: rank counts the earlier ones of the
 * same expert, from next[expert] on, which moves along. */
template <typename FN>
static __device__ __forceinline__ void walk(const int32_t *expert, uint32_t begin, uint32_t end,
                                            int32_t *next, FN fn)
{
    const uint32_t lane = threadIdx.x % WARP_LANES;

    for (uint32_t at = begin; at < end; at += WARP_LANES) {
        const uint32_t i = at + lane;
        const int32_t e = i < end ? expert[i] : -1;
        const uint32_t same = __match_any_sync(0xffffffffu, e);
        const int32_t before = __popc(same & ((1u << lane) - 1));

        if (e >= 0)
            fn(i, next[e] + before);
        else if (i < end)
            fn(i, -1);
        __syncwarp();
        if (e >= 0 && before == 0)
            next[e] += __popc(same);
        __syncwarp();
    }
}

/* One block. Each warp takes a stretch of the entries: it counts them by expert, the counts become
 * first rows, expert by expert and warp by warp, and the same walk again hands the rows out. */
static __global__ void __launch_bounds__(PLACE_THREADS)
    moe_place_kernel(const __grid_constant__ yard_moe_scatter_args a)
{
    extern __shared__ int32_t next[]; /* [PLACE_WARPS, n_experts] */
    const uint32_t warp = threadIdx.x / WARP_LANES;
    int32_t *const mine = next + warp * a.n_experts;
    int32_t carried = 0;

    allow_next_kernel();
    for (uint32_t i = threadIdx.x; i < PLACE_WARPS * a.n_experts; i += PLACE_THREADS)
        next[i] = 0;
    wait_previous_kernel();
    const uint32_t n = (uint32_t)*a.n_tokens * a.top_k;
    const uint32_t stretch =
        (n + PLACE_THREADS - 1) / PLACE_THREADS * WARP_LANES; /* whole warps of entries */
    const uint32_t begin = min(warp * stretch, n), end = min(begin + stretch, n);
    __syncthreads();
    walk(a.expert, begin, end, mine, [](uint32_t, int32_t) {});
    __syncthreads();
    for (uint32_t first = 0; first < a.n_experts; first += PLACE_THREADS) {
        const uint32_t e = first + threadIdx.x;
        int32_t count = 0, total, at;

        for (uint32_t w = 0; e < a.n_experts && w < PLACE_WARPS; w++)
            count += next[w * a.n_experts + e];
        at = carried + scan_block<PLACE_WARPS>(count, &total);
        carried += total;
        if (e >= a.n_experts)
            continue;
        a.offset[e] = at;
        for (uint32_t w = 0; w < PLACE_WARPS; w++) {
            const int32_t here = next[w * a.n_experts + e];
            next[w * a.n_experts + e] = at;
            at += here;
        }
    }
    if (threadIdx.x == 0)
        a.offset[a.n_experts] = carried;
    __syncthreads();
    walk(a.expert, begin, end, mine, [&](uint32_t i, int32_t row) {
        a.row_index[i] = row;
        if (row >= 0 && a.row_choice)
            a.row_choice[row] = (int32_t)i;
    });
}

/* The rows of x and expert_x as pieces of PIECE. */
template <typename PIECE> struct pieces {
    uint32_t n, n_scales; /* of a row */
    size_t x_ld, y_ld;

    explicit __device__ pieces(const yard_moe_scatter_args &a)
    {
        const uint32_t element = a.x.dtype == YARD_F32 ? 4 : a.x.dtype == YARD_FP8_E4M3 ? 1 : 2;

        n = a.n_cols * element / (uint32_t)sizeof(PIECE);
        n_scales = a.x.dtype == YARD_FP8_E4M3 ? (a.n_cols + YARD_GROUP - 1) / YARD_GROUP : 0;
        x_ld = (size_t)a.x.ld * element / sizeof(PIECE);
        y_ld = (size_t)a.expert_x.ld * element / sizeof(PIECE);
    }
};

/* A value to the same place of all the rows that are not negative. */
template <typename VALUE>
static __device__ __forceinline__ void copy_to(const int32_t *row, uint32_t n_rows, VALUE *to,
                                               size_t ld, uint32_t at, VALUE value)
{
    for (uint32_t k = 0; k < n_rows; k++)
        if (row[k] >= 0)
            to[(size_t)row[k] * ld + at] = value;
}

/* Pieces, then scales. */
template <typename PIECE>
static __global__ void __launch_bounds__(ITEM_THREADS)
    moe_copy_kernel(const __grid_constant__ yard_moe_scatter_args a)
{
    const pieces<PIECE> p(a);

    each_item(a.n_tokens, p.n + p.n_scales, [&](uint32_t t, uint32_t at) {
        const int32_t *row = a.row_index + (size_t)t * a.top_k;

        if (at < p.n)
            copy_to(row, a.top_k, (PIECE *)a.expert_x.data, p.y_ld, at,
                    ((const PIECE *)a.x.data)[t * p.x_ld + at]);
        else
            copy_to(row, a.top_k, a.expert_x.scale, p.n_scales, at - p.n,
                    a.x.scale[(size_t)t * p.n_scales + at - p.n]);
    });
}

/* Few choices: every block looks at all of them, and nobody waits for another kernel. A choice's
 * row is how many choices come before it, by expert and then in order: keys in that order are whole
 * numbers, and what is no choice comes last. */
enum {
    FEW_THREADS = 512,
    FEW_WARPS = FEW_THREADS / WARP_LANES,
    FEW_EACH = 4, /* choices that a thread looks at */
    FEW_CHOICES = FEW_EACH * FEW_THREADS,
    FEW_MAX_TOP_K = WARP_LANES,
    NO_KEY = 0x7fffffff
};

static __device__ __forceinline__ int32_t choice_key(int32_t expert, uint32_t i)
{
    return expert < 0 ? NO_KEY : expert * FEW_CHOICES + (int32_t)i;
}

/* The experts of all choices there is room for. */
static __device__ __forceinline__ void load_choices(const yard_moe_scatter_args &a,
                                                    int32_t (&expert)[FEW_EACH])
{
#pragma unroll
    for (uint32_t j = 0; j < FEW_EACH; j++) {
        const uint32_t i = threadIdx.x + j * FEW_THREADS;
        expert[j] = i < a.max_rows * a.top_k ? a.expert[i] : -1;
    }
}

/* Adds up, in row[k], how many of the threads' keys come before the token's k-th; below zero where
 * that is no choice. expert: the token's, a lane each. */
static __device__ __forceinline__ void count_before(const yard_moe_scatter_args &a, uint32_t token,
                                                    const int32_t (&key)[FEW_EACH], int32_t expert,
                                                    int32_t *row)
{
    const uint32_t lane = threadIdx.x % WARP_LANES;
    const int32_t own = choice_key(expert, token * a.top_k + lane);
    int32_t mine = 0;

#pragma unroll 4
    for (uint32_t k = 0; k < a.top_k; k++) {
        const int32_t kth = __shfl_sync(0xffffffffu, own, (int)k);
        uint32_t before = 0;
#pragma unroll
        for (uint32_t j = 0; j < FEW_EACH; j++)
            before += key[j] < kth;
        before = __reduce_add_sync(0xffffffffu, before);
        mine = lane == k ? (int32_t)before : mine;
    }
    if (lane < a.top_k)
        atomicAdd(&row[lane], expert < 0 ? -FEW_CHOICES : mine);
}

/* A value to the same place of the token's rows. */
template <typename VALUE>
static __device__ __forceinline__ void copy_few(const int32_t *row, uint32_t n_rows, VALUE *to,
                                                size_t ld, uint32_t at, VALUE value)
{
#pragma unroll 2
    for (uint32_t k = 0; k < n_rows; k += 4) {
        const int4 four = *(const int4 *)(row + k);
        if (four.x >= 0)
            to[(size_t)four.x * ld + at] = value;
        if (four.y >= 0)
            to[(size_t)four.y * ld + at] = value;
        if (four.z >= 0)
            to[(size_t)four.z * ld + at] = value;
        if (four.w >= 0)
            to[(size_t)four.w * ld + at] = value;
    }
}

/* The first block: where each expert's rows begin. */
static __device__ __forceinline__ void few_offsets(const yard_moe_scatter_args &a)
{
    __shared__ int32_t count[PLACE_MAX_EXPERTS];
    int32_t expert[FEW_EACH], carried = 0;

    for (uint32_t e = threadIdx.x; e < a.n_experts; e += FEW_THREADS)
        count[e] = 0;
    __syncthreads(); /* all begin at zero */
    wait_previous_kernel();
    const uint32_t n = (uint32_t)*a.n_tokens * a.top_k;
    load_choices(a, expert);
#pragma unroll
    for (uint32_t j = 0; j < FEW_EACH; j++)
        if (expert[j] >= 0 && threadIdx.x + j * FEW_THREADS < n)
            atomicAdd(&count[expert[j]], 1);
    __syncthreads(); /* all are counted */
    for (uint32_t first = 0; first < a.n_experts; first += FEW_THREADS) {
        const uint32_t e = first + threadIdx.x;
        int32_t total;
        const int32_t before = scan_block<FEW_WARPS>(e < a.n_experts ? count[e] : 0, &total);

        if (e < a.n_experts)
            a.offset[e] = carried + before;
        carried += total;
    }
    if (threadIdx.x == 0)
        a.offset[a.n_experts] = carried;
}

/* Block 0: the offsets; the others: a token each. What a thread copies first is on its way together
 * with the choices and the number of tokens. */
template <typename PIECE>
static __global__ void __launch_bounds__(FEW_THREADS)
    moe_scatter_few_kernel(const __grid_constant__ yard_moe_scatter_args a)
{
    __shared__ alignas(16) int32_t row[FEW_MAX_TOP_K]; /* below zero: none */
    const pieces<PIECE> p(a);
    const uint32_t token = blockIdx.x - 1, scale_at = FEW_THREADS - 1 - threadIdx.x;
    const uint32_t lane = threadIdx.x % WARP_LANES;
    const PIECE *const x = (const PIECE *)a.x.data + token * p.x_ld;
    const float *const scale = a.x.scale + (size_t)token * p.n_scales;
    int32_t key[FEW_EACH];
    PIECE first = {};
    float first_scale = 0.0f;

    allow_next_kernel();
    if (blockIdx.x == 0) {
        few_offsets(a);
        return;
    }
    if (threadIdx.x < FEW_MAX_TOP_K)
        row[threadIdx.x] = threadIdx.x < a.top_k ? 0 : -1;
    __syncthreads(); /* all begin at zero */
    wait_previous_kernel();
    const uint32_t n = (uint32_t)*a.n_tokens;
    const int32_t expert = lane < a.top_k ? a.expert[token * a.top_k + lane] : -1;
    load_choices(a, key);
    if (threadIdx.x < p.n)
        first = x[threadIdx.x];
    if (scale_at < p.n_scales)
        first_scale = scale[scale_at];
#pragma unroll
    for (uint32_t j = 0; j < FEW_EACH; j++) {
        const uint32_t i = threadIdx.x + j * FEW_THREADS;
        key[j] = choice_key(i < n * a.top_k ? key[j] : -1, i);
    }
    count_before(a, token, key, expert, row);
    __syncthreads(); /* the rows are there */
    if (token >= n)
        return;
    if (threadIdx.x < a.top_k) {
        const uint32_t i = token * a.top_k + threadIdx.x;
        a.row_index[i] = max(row[threadIdx.x], -1);
        if (row[threadIdx.x] >= 0 && a.row_choice)
            a.row_choice[row[threadIdx.x]] = (int32_t)i;
    }
    for (uint32_t at = threadIdx.x; at < p.n; at += FEW_THREADS)
        copy_few(row, a.top_k, (PIECE *)a.expert_x.data, p.y_ld, at,
                 at == threadIdx.x ? first : x[at]);
    for (uint32_t at = scale_at; at < p.n_scales; at += FEW_THREADS)
        copy_few(row, a.top_k, a.expert_x.scale, p.n_scales, at,
                 at == scale_at ? first_scale : scale[at]);
}

/* Whether rows of both sides are whole aligned pieces. */
static bool are_pieces(const yard_moe_scatter_args *a, size_t piece)
{
    const size_t bytes = yard_dtype_bytes(a->x.dtype);

    return ((uintptr_t)a->x.data | (uintptr_t)a->expert_x.data) % piece == 0 &&
           a->n_cols * bytes % piece == 0 && a->x.ld * bytes % piece == 0 &&
           a->expert_x.ld * bytes % piece == 0;
}

yard_status yard_cuda_moe_scatter_launch(const yard_moe_scatter_args *a, uint32_t max_rows,
                                         void *stream, yard_error *err)
{
    const size_t row_bytes = a->n_cols * yard_dtype_bytes(a->x.dtype);
    const bool vectors = are_pieces(a, sizeof(uint4)), words = are_pieces(a, sizeof(uint32_t));
    const size_t piece = vectors ? sizeof(uint4) : words ? sizeof(uint32_t) : 1;
    yard_status st;

    if (a->n_experts == 0 || a->n_experts > PLACE_MAX_EXPERTS || a->expert_x.dtype != a->x.dtype)
        return yard_fail(err, YARD_EINVAL,
                         "moe_scatter: want 1 to %d experts and one dtype, got %u, %s and %s",
                         PLACE_MAX_EXPERTS, a->n_experts, yard_dtype_name(a->x.dtype),
                         yard_dtype_name(a->expert_x.dtype));
    if (a->max_rows > 0 && (size_t)a->max_rows * a->top_k <= FEW_CHOICES &&
        a->top_k <= FEW_MAX_TOP_K)
        return launch_rows(vectors ? moe_scatter_few_kernel<uint4>
                           : words ? moe_scatter_few_kernel<uint32_t>
                                   : moe_scatter_few_kernel<uint8_t>,
                           a->max_rows + 1, FEW_THREADS, 0, *a, "moe_scatter", stream, err);
    st = launch_rows(moe_place_kernel, 1, PLACE_THREADS,
                     (size_t)PLACE_WARPS * a->n_experts * sizeof(int32_t), *a, "moe_scatter",
                     stream, err);
    if (st != YARD_OK)
        return st;
    return launch_rows(vectors ? moe_copy_kernel<uint4>
                       : words ? moe_copy_kernel<uint32_t>
                               : moe_copy_kernel<uint8_t>,
                       item_blocks(max_rows, row_bytes / piece), ITEM_THREADS, 0, *a, "moe_scatter",
                       stream, err);
}

yard_status yard_cuda_moe_open(yard_error *err)
{
    const cudaError_t code = cudaFuncSetAttribute(
        moe_place_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, PLACE_MAX_BYTES);

    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "moe_scatter: %s", cudaGetErrorString(code));
    return YARD_OK;
}

static __global__ void __launch_bounds__(PLACE_THREADS)
    count_offsets_kernel(const __grid_constant__ yard_count_offsets_args a)
{
    int32_t carried = 0, total;

    allow_next_kernel();
    wait_previous_kernel();
    for (uint32_t first = 0; first < a.n_groups; first += PLACE_THREADS) {
        const uint32_t g = first + threadIdx.x;
        const int32_t before = scan_block<PLACE_WARPS>(g < a.n_groups ? a.count[g] : 0, &total);

        if (g < a.n_groups)
            a.offset[g] = carried + before;
        carried += total;
    }
    if (threadIdx.x == 0)
        a.offset[a.n_groups] = carried;
}

yard_status yard_cuda_count_offsets_launch(const yard_count_offsets_args *a, uint32_t max_rows,
                                           void *stream, yard_error *err)
{
    (void)max_rows;
    return launch_rows(count_offsets_kernel, 1, PLACE_THREADS, 0, *a, "count_offsets", stream, err);
}
