/* Rows to FP8, and SiLU times up on the way there. A warp takes a group of 128 columns at a time, a
 * block eight next to each other; a fixed number of blocks shares out the rows that the count on
 * the device says there are. Agrees with the plain C definition in every byte. */
#include "ops/cuda/launch.h"

#include "ops/cuda/rows.cuh"

enum {
    QUANTISE_THREADS = 128,
    QUANTISE_GROUPS = QUANTISE_THREADS / GROUP_LANES, /* of a block at a time */
    QUANTISE_MAX_BLOCKS = 132 * 12,
    AT_ONCE = 2 /* groups of a warp whose loads are under way together */
};

/* ---- quantise -------------------------------------------------------------------------------- */

typedef struct quantise_args {
    yard_quantise_args a;
    bool wide;
} quantise_args;

/* One of a row's groups, or none: then there are no columns. */
typedef struct place {
    uint32_t row, col, n_cols; /* col: this lane's first */
} place;

static __device__ __forceinline__ place place_of(uint32_t pair, uint32_t n_items, uint32_t n_cols)
{
    const uint32_t group = pair + threadIdx.x / GROUP_LANES % 2; /* of this half of the warp */
    const uint32_t n_groups = (n_cols + YARD_GROUP - 1) / YARD_GROUP;
    const uint32_t lane_col = threadIdx.x % GROUP_LANES * LANE_COLS;

    if (group >= n_items)
        return (place){ 0, lane_col, 0 };
    return (place){ group / n_groups, group % n_groups * YARD_GROUP + lane_col, n_cols };
}

/* Calls fn(first, step, n_items) so often that first, first + step, .. AT_ONCE of them, are this
 * warp's pairs of groups: warps stay together, and groups from n_items on do not exist. */
template <typename FN>
static __device__ __forceinline__ void share_groups(const int32_t *n_rows, uint32_t n_cols, FN fn)
{
    const uint32_t n_items = (uint32_t)*n_rows * ((n_cols + YARD_GROUP - 1) / YARD_GROUP);
    const uint32_t step = gridDim.x * QUANTISE_GROUPS;

    for (uint32_t warp = blockIdx.x * QUANTISE_GROUPS + threadIdx.x / WARP_LANES * 2;
         warp < n_items; warp += AT_ONCE * step)
        fn(warp, step, n_items);
}

static __global__ void __launch_bounds__(QUANTISE_THREADS)
    quantise_rows_e4m3_kernel(const __grid_constant__ quantise_args q)
{
    const yard_quantise_args &a = q.a;

    allow_next_kernel();
    wait_previous_kernel();
    share_groups(a.n_rows, a.n_cols, [&](uint32_t first, uint32_t step, uint32_t n_items) {
        eight x[AT_ONCE];
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            const place at = place_of(first + i * step, n_items, a.n_cols);
            x[i] = load_eight(a.x, (size_t)at.row * a.x.ld, at.col, at.n_cols, q.wide);
        }
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            const place at = place_of(first + i * step, n_items, a.n_cols);
            if (first + i * step >= n_items)
                return;
            quantise_eight(a.y, at.row, at.col, at.n_cols, a.ue8m0, q.wide, x[i]);
        }
    });
}

static yard_status check_args(const yard_quantise_args *a, yard_error *err)
{
    if (a->x.dtype != YARD_F32 && a->x.dtype != YARD_BF16)
        return yard_fail(err, YARD_EINVAL, "quantise: x: want f32 or bf16, got dtype %d",
                         (int)a->x.dtype);
    if (a->y.dtype != YARD_FP8_E4M3 || !a->y.scale)
        return yard_fail(err, YARD_EINVAL, "quantise: y: want fp8 with scales, got dtype %d",
                         (int)a->y.dtype);
    if (a->n_cols > a->x.ld || a->n_cols > a->y.ld)
        return yard_fail(err, YARD_EINVAL, "quantise: %u columns exceed a row of %u or %u",
                         a->n_cols, a->x.ld, a->y.ld);
    return YARD_OK;
}

static uint32_t group_blocks(uint32_t max_rows, uint32_t n_cols)
{
    return grid_for((uint64_t)max_rows * yard_group_count(n_cols), QUANTISE_GROUPS,
                    QUANTISE_MAX_BLOCKS);
}

yard_status yard_cuda_quantise_launch(const yard_quantise_args *a, uint32_t max_rows, void *stream,
                                      yard_error *err)
{
    const quantise_args q = { *a, is_wide(&a->x, a->n_cols) && is_wide(&a->y, a->n_cols) };
    const yard_status st = check_args(a, err);

    if (st != YARD_OK)
        return st;
    return launch_rows(quantise_rows_e4m3_kernel, group_blocks(max_rows, a->n_cols),
                       QUANTISE_THREADS, 0, q, "quantise", stream, err);
}

/* ---- silu_mul_quant -------------------------------------------------------------------------- */

typedef struct silu_args {
    yard_silu_mul_args a;
    bool wide;
} silu_args;

static __device__ __forceinline__ eight silu_mul(const eight &gate, const eight &up)
{
    bool is_easy = true;
    eight divisor, y;

#pragma unroll
    for (int i = 0; i < LANE_COLS; i++) {
        const float size = fabsf(gate.v[i]);
        divisor.v[i] = __fadd_rn(1.0f, exp_defined(-gate.v[i]));
        is_easy &= size <= 60.0f && (size >= 0x1p-90f || size == 0.0f);
    }
#pragma unroll
    for (int i = 0; i < LANE_COLS; i++) {
        /* a product with the reciprocal of a negative zero's divisor would lose the sign */
        y.v[i] = gate.v[i] == 0.0f ? gate.v[i] : quotient(gate.v[i], divisor.v[i]);
        if (!is_easy)
            y.v[i] = __fdiv_rn(gate.v[i], divisor.v[i]);
        y.v[i] = __fmul_rn(y.v[i], up.v[i]);
    }
    return y;
}

static __global__ void __launch_bounds__(QUANTISE_THREADS)
    silu_mul_quant_kernel(const __grid_constant__ silu_args q)
{
    const yard_silu_mul_args &a = q.a;

    allow_next_kernel();
    wait_previous_kernel();
    share_groups(a.n_rows, a.n_cols, [&](uint32_t first, uint32_t step, uint32_t n_items) {
        eight gate[AT_ONCE], up[AT_ONCE];
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            const place at = place_of(first + i * step, n_items, a.n_cols);
            const size_t row = (size_t)at.row * a.gate_up.ld;
            gate[i] = load_eight(a.gate_up, row, at.col, at.n_cols, q.wide);
            up[i] = load_eight(a.gate_up, row + a.n_cols, at.col, at.n_cols, q.wide);
        }
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            const place at = place_of(first + i * step, n_items, a.n_cols);
            if (first + i * step >= n_items)
                return;
            emit_eight(a.y, at.row, at.col, at.n_cols, a.ue8m0, q.wide, silu_mul(gate[i], up[i]));
        }
    });
}

yard_status yard_cuda_silu_mul_launch(const yard_silu_mul_args *a, uint32_t max_rows, void *stream,
                                      yard_error *err)
{
    const silu_args q = { *a, is_wide(&a->gate_up, a->n_cols) && is_wide(&a->y.plain, a->n_cols) &&
                                  is_wide(&a->y.quant, a->n_cols) };

    if (a->gate_up.dtype != YARD_F32 && a->gate_up.dtype != YARD_BF16)
        return yard_fail(err, YARD_EINVAL, "silu_mul: want f32 or bf16, got %s",
                         yard_dtype_name(a->gate_up.dtype));
    return launch_rows(silu_mul_quant_kernel, group_blocks(max_rows, a->n_cols), QUANTISE_THREADS,
                       0, q, "silu_mul", stream, err);
}
