/* Local combine: the weighted sum of a token's rows, one after the other as in the definition. */
#include "ops/cuda/launch.h"

#include "ops/cuda/rows.cuh"

enum {
    GATHER_THREADS = 128,
    SLAB_COLS = GATHER_THREADS * LANE_COLS, /* of a block */
    GATHER_MAX_BLOCKS = 132 * 16,
    GATHER_ROWS = 8, /* of a thread, on their way together */
    GATHER_FEW_ROWS = 2
};

typedef struct gather_args {
    yard_moe_gather_args a;
    uint32_t n_slabs; /* of a row */
    bool wide;
} gather_args;

/* Rows of a token and their weights; -1 behind the last one. */
template <int ROWS> struct chosen {
    int32_t row[ROWS];
    float weight[ROWS];
};

template <int ROWS>
static __device__ __forceinline__ chosen<ROWS> load_chosen(const yard_moe_gather_args &a,
                                                           uint32_t token, uint32_t first)
{
    chosen<ROWS> c;

#pragma unroll
    for (uint32_t k = 0; k < ROWS; k++) {
        const size_t i = (size_t)token * a.top_k + first + k;
        const bool exists = first + k < a.top_k;
        c.row[k] = exists ? a.row_index[i] : -1;
        c.weight[k] = exists ? a.weight[i] : 0.0f;
    }
    return c;
}

static __device__ __forceinline__ void add_scaled(eight *sum, const eight &x, float weight)
{
#pragma unroll
    for (int i = 0; i < LANE_COLS; i++)
        sum->v[i] = __fmaf_rn(x.v[i], weight, sum->v[i]);
}

static __device__ __forceinline__ eight eight_of(const uint4 &raw)
{
    const uint32_t word[] = { raw.x, raw.y, raw.z, raw.w };
    eight x;

#pragma unroll
    for (int i = 0; i < 4; i++) {
        x.v[2 * i] = __uint_as_float(word[i] << 16);
        x.v[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
    return x;
}

/* sum += a row's eight columns times its weight, one row after the other. All are asked for before
 * the first is used. */
template <int ROWS>
static __device__ __forceinline__ void add_rows(const gather_args &n, const chosen<ROWS> &c,
                                                uint32_t col, eight *sum)
{
    const yard_rows &y = n.a.expert_y;
    const uint16_t *const from = (const uint16_t *)y.data + col;
    uint4 raw[ROWS];

    if (!n.wide || y.dtype != YARD_BF16) {
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            if (c.row[k] >= 0)
                add_scaled(sum, load_values(y, (size_t)c.row[k] * y.ld, col, n.a.n_cols, n.wide),
                           c.weight[k]);
        return;
    }
    if (col >= n.a.n_cols)
        return;
#pragma unroll
    for (int k = 0; k < ROWS; k++)
        if (c.row[k] >= 0)
            raw[k] = *(const uint4 *)(from + (size_t)c.row[k] * y.ld);
#pragma unroll
    for (int k = 0; k < ROWS; k++)
        if (c.row[k] >= 0)
            add_scaled(sum, eight_of(raw[k]), c.weight[k]);
}

/* A block has a slab of a token's columns at a time. */
template <int ROWS>
static __global__ void __launch_bounds__(GATHER_THREADS)
    moe_gather_kernel(const __grid_constant__ gather_args n)
{
    const yard_moe_gather_args &a = n.a;
    const yard_rows y = { YARD_F32, a.n_cols, a.y, NULL };
    uint32_t item = blockIdx.x, token = item / n.n_slabs;

    allow_next_kernel();
    wait_previous_kernel();
    if (!may_read_row(token, a.n_tokens, a.max_rows))
        return;
    const uint32_t n_items = (uint32_t)*a.n_tokens * n.n_slabs;
    chosen<ROWS> c = load_chosen<ROWS>(a, token, 0);
    while (item < n_items) {
        const uint32_t col = item % n.n_slabs * SLAB_COLS + threadIdx.x * LANE_COLS;
        eight sum = {};

        add_rows(n, c, col, &sum);
        for (uint32_t k = ROWS; k < a.top_k; k += ROWS)
            add_rows(n, load_chosen<ROWS>(a, token, k), col, &sum);
        store_values(y, (size_t)token * a.n_cols, col, a.n_cols, n.wide, sum);
        item += gridDim.x;
        token = item / n.n_slabs;
        if (item < n_items)
            c = load_chosen<ROWS>(a, token, 0);
    }
}

yard_status yard_cuda_moe_gather_launch(const yard_moe_gather_args *a, uint32_t max_rows,
                                        void *stream, yard_error *err)
{
    const yard_rows y = { YARD_F32, a->n_cols, a->y, NULL };
    const uint32_t n_slabs = yard_ceil_div(a->n_cols, SLAB_COLS);
    const gather_args n = { *a, n_slabs ? n_slabs : 1,
                            is_wide(&a->expert_y, a->n_cols) && is_wide(&y, a->n_cols) };

    if (a->expert_y.dtype != YARD_F32 && a->expert_y.dtype != YARD_BF16)
        return yard_fail(err, YARD_EINVAL, "moe_gather: want f32 or bf16, got %s",
                         yard_dtype_name(a->expert_y.dtype));
    return launch_rows(a->top_k > GATHER_FEW_ROWS ? moe_gather_kernel<GATHER_ROWS>
                                                  : moe_gather_kernel<GATHER_FEW_ROWS>,
                       grid_for((uint64_t)max_rows * n.n_slabs, 1, GATHER_MAX_BLOCKS),
                       GATHER_THREADS, 0, n, "moe_gather", stream, err);
}
