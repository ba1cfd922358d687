/* Local dispatch and combine: where each token's rows lie among its experts', the copies there and
 * the weighted sum back. */
#include "ops/cuda/launch.h"

#include "ops/cuda/rows.cuh"

enum {
    PLACE_THREADS = 1024,
    PLACE_WARPS = PLACE_THREADS / WARP_LANES,
    PLACE_MAX_EXPERTS = 1024,
    PLACE_MAX_BYTES = (PLACE_WARPS + 1) * PLACE_MAX_EXPERTS * (int)sizeof(int32_t)
};

/* Exclusive sums of x over the block's threads; *total: of all. */
static __device__ __forceinline__ int32_t scan_block(int32_t x, int32_t *total)
{
    __shared__ int32_t warp_sum[PLACE_WARPS];
    const uint32_t lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    int32_t sum = x, others;

    for (int distance = 1; distance < WARP_LANES; distance *= 2) {
        const int32_t below = __shfl_up_sync(0xffffffffu, sum, distance);
        sum += (int)lane >= distance ? below : 0;
    }
    if (lane == WARP_LANES - 1)
        warp_sum[warp] = sum;
    __syncthreads();
    others = warp_sum[lane];
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
        at = carried + scan_block(count, &total);
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

/* Rows as pieces of PIECE, then their scales. */
template <typename PIECE>
static __global__ void __launch_bounds__(ITEM_THREADS)
    moe_copy_kernel(const __grid_constant__ yard_moe_scatter_args a)
{
    const uint32_t element = a.x.dtype == YARD_F32 ? 4 : a.x.dtype == YARD_FP8_E4M3 ? 1 : 2;
    const uint32_t n_pieces = a.n_cols * element / (uint32_t)sizeof(PIECE);
    const uint32_t n_scales =
        a.x.dtype == YARD_FP8_E4M3 ? (a.n_cols + YARD_GROUP - 1) / YARD_GROUP : 0;
    const size_t x_ld = (size_t)a.x.ld * element / sizeof(PIECE);
    const size_t y_ld = (size_t)a.expert_x.ld * element / sizeof(PIECE);

    each_item(a.n_tokens, n_pieces + n_scales, [&](uint32_t t, uint32_t at) {
        const int32_t *row = a.row_index + (size_t)t * a.top_k;

        if (at < n_pieces) {
            const PIECE value = ((const PIECE *)a.x.data)[t * x_ld + at];
            for (uint32_t k = 0; k < a.top_k; k++)
                if (row[k] >= 0)
                    ((PIECE *)a.expert_x.data)[(size_t)row[k] * y_ld + at] = value;
        } else {
            const float value = a.x.scale[(size_t)t * n_scales + at - n_pieces];
            for (uint32_t k = 0; k < a.top_k; k++)
                if (row[k] >= 0)
                    a.expert_x.scale[(size_t)row[k] * n_scales + at - n_pieces] = value;
        }
    });
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
        const int32_t before = scan_block(g < a.n_groups ? a.count[g] : 0, &total);

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

typedef struct gather_args {
    yard_moe_gather_args a;
    bool wide;
} gather_args;

static __global__ void __launch_bounds__(ITEM_THREADS)
    moe_gather_kernel(const __grid_constant__ gather_args n)
{
    const yard_moe_gather_args &a = n.a;
    const yard_rows y = { YARD_F32, a.n_cols, a.y, NULL };

    each_eight(a.n_tokens, a.n_cols, [&](uint32_t t, uint32_t col) {
        eight sum = {};
#pragma unroll 8
        for (uint32_t k = 0; k < a.top_k; k++) {
            const int32_t row = a.row_index[(size_t)t * a.top_k + k];
            const float weight = a.weight[(size_t)t * a.top_k + k];
            if (row < 0)
                continue;
            const eight x =
                load_values(a.expert_y, (size_t)row * a.expert_y.ld, col, a.n_cols, n.wide);
#pragma unroll
            for (int c = 0; c < LANE_COLS; c++)
                sum.v[c] = __fmaf_rn(x.v[c], weight, sum.v[c]);
        }
        store_values(y, (size_t)t * a.n_cols, col, a.n_cols, n.wide, sum);
    });
}

yard_status yard_cuda_moe_gather_launch(const yard_moe_gather_args *a, uint32_t max_rows,
                                        void *stream, yard_error *err)
{
    const yard_rows y = { YARD_F32, a->n_cols, a->y, NULL };
    const gather_args n = { *a, is_wide(&a->expert_y, a->n_cols) && is_wide(&y, a->n_cols) };

    if (a->expert_y.dtype != YARD_F32 && a->expert_y.dtype != YARD_BF16)
        return yard_fail(err, YARD_EINVAL, "moe_gather: want f32 or bf16, got %s",
                         yard_dtype_name(a->expert_y.dtype));
    return launch_rows(moe_gather_kernel, eight_blocks(max_rows, a->n_cols), ITEM_THREADS, 0, n,
                       "moe_gather", stream, err);
}
