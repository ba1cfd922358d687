/* Rows to FP8, and SiLU times up on the way there. A warp takes a group of 128 columns at a time, a
 * block eight next to each other; a fixed number of blocks shares out the rows that the count on
 * the device says there are. Agrees with the plain C definition in every byte. */
#include "ops/cuda/launch.h"

#include "ops/cuda/rows.cuh"

enum {
    QUANTISE_THREADS = 256,
    QUANTISE_WARPS = QUANTISE_THREADS / WARP_LANES,
    QUANTISE_MAX_BLOCKS = 132 * 8,
    AT_ONCE = 2 /* groups of a warp whose loads are under way together */
};

/* ---- quantise -------------------------------------------------------------------------------- */

typedef struct quantise_args {
    yard_quantise_args a;
    bool wide;
} quantise_args;

static __global__ void __launch_bounds__(QUANTISE_THREADS)
    quantise_rows_e4m3_kernel(const __grid_constant__ quantise_args q)
{
    const yard_quantise_args &a = q.a;
    const uint32_t n_groups = (a.n_cols + YARD_GROUP - 1) / YARD_GROUP;
    const uint32_t lane = threadIdx.x % WARP_LANES;
    const uint32_t step = gridDim.x * QUANTISE_WARPS;

    allow_next_kernel();
    wait_previous_kernel();
    const uint32_t n_items = (uint32_t)*a.n_rows * n_groups;
    for (uint32_t item = blockIdx.x * QUANTISE_WARPS + threadIdx.x / WARP_LANES; item < n_items;
         item += AT_ONCE * step) {
        four x[AT_ONCE];
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            const uint32_t at = item + i * step, col = at % n_groups * YARD_GROUP;
            if (at < n_items)
                x[i] = load_four(a.x, (size_t)(at / n_groups) * a.x.ld, col + lane * LANE_COLS,
                                 a.n_cols, q.wide);
        }
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            const uint32_t at = item + i * step;
            if (at < n_items)
                quantise_group(a.y, at / n_groups, at % n_groups, lane, a.n_cols, a.ue8m0, q.wide,
                               x[i]);
        }
    }
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
    return grid_for((uint64_t)max_rows * yard_group_count(n_cols), QUANTISE_WARPS,
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

static __device__ __forceinline__ four silu_mul(const four &gate, const four &up)
{
    four y;

#pragma unroll
    for (int i = 0; i < LANE_COLS; i++) {
        const float divisor = __fadd_rn(1.0f, exp_defined(-gate.v[i]));
        y.v[i] = __fmul_rn(__fdiv_rn(gate.v[i], divisor), up.v[i]);
    }
    return y;
}

static __global__ void __launch_bounds__(QUANTISE_THREADS)
    silu_mul_quant_kernel(const __grid_constant__ silu_args q)
{
    const yard_silu_mul_args &a = q.a;
    const uint32_t n_groups = (a.n_cols + YARD_GROUP - 1) / YARD_GROUP;
    const uint32_t lane = threadIdx.x % WARP_LANES;
    const uint32_t step = gridDim.x * QUANTISE_WARPS;

    allow_next_kernel();
    wait_previous_kernel();
    const uint32_t n_items = (uint32_t)*a.n_rows * n_groups;
    for (uint32_t item = blockIdx.x * QUANTISE_WARPS + threadIdx.x / WARP_LANES; item < n_items;
         item += AT_ONCE * step) {
        four gate[AT_ONCE], up[AT_ONCE];
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            const uint32_t at = item + i * step;
            const uint32_t col = at % n_groups * YARD_GROUP + lane * LANE_COLS;
            const size_t row = (size_t)(at / n_groups) * a.gate_up.ld;
            if (at >= n_items)
                continue;
            gate[i] = load_four(a.gate_up, row, col, a.n_cols, q.wide);
            up[i] = load_four(a.gate_up, row + a.n_cols, col, a.n_cols, q.wide);
        }
#pragma unroll
        for (uint32_t i = 0; i < AT_ONCE; i++) {
            const uint32_t at = item + i * step;
            if (at < n_items)
                emit_group(a.y, at / n_groups, at % n_groups, lane, a.n_cols, a.ue8m0, q.wide,
                           silu_mul(gate[i], up[i]));
        }
    }
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
