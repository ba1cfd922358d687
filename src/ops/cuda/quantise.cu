/* Rows to FP8, and SiLU times up on the way there. Half a warp takes a group of 128 columns at a
 * time, for SiLU a warp; a fixed number of blocks shares out the rows that the count on the device
 * says there are. Agrees with the plain C definition in every byte. */
#include "ops/cuda/launch.h"

#include "ops/cuda/rows.cuh"

enum {
    QUANTISE_THREADS = 128,
    QUANTISE_COLS = 8, /* of a lane; SiLU computes more for each */
    SILU_COLS = 4,
    QUANTISE_MAX_BLOCKS = 132 * 12,
    SILU_MAX_BLOCKS = 132 * 16,
    AT_ONCE = 2 /* groups of a lane whose loads are under way together */
};

/* How far a lane's group is from its next one: as many groups as the grid takes at a time. */
typedef struct stride {
    uint32_t rows, groups, n_groups; /* n_groups: of a row */
} stride;

/* One of the rows' groups. */
typedef struct place {
    uint32_t row, group;
} place;

/* The lane's first group: known before the rows are. */
template <int N> static __device__ __forceinline__ place first_place(const stride &step)
{
    const uint32_t i = (blockIdx.x * QUANTISE_THREADS + threadIdx.x) / (YARD_GROUP / N);

    return (place){ i / step.n_groups, i % step.n_groups };
}

static __device__ __forceinline__ place move_on(place p, const stride &step)
{
    p.row += step.rows;
    p.group += step.groups;
    if (p.group >= step.n_groups) {
        p.group -= step.n_groups;
        p.row++;
    }
    return p;
}

/* The lane's first column; none is there behind the last row. */
template <int N> static __device__ __forceinline__ uint32_t first_col(place p)
{
    return p.group * YARD_GROUP + threadIdx.x % (YARD_GROUP / N) * N;
}

static uint32_t group_blocks(uint32_t max_rows, uint32_t n_cols, uint32_t cols, uint32_t max_blocks)
{
    return grid_for((uint64_t)max_rows * yard_group_count(n_cols),
                    QUANTISE_THREADS * cols / YARD_GROUP, max_blocks);
}

static stride stride_of(uint32_t n_blocks, uint32_t n_cols, uint32_t cols)
{
    const uint32_t n_groups = n_cols ? (uint32_t)yard_group_count(n_cols) : 1;
    const uint32_t step = n_blocks * (QUANTISE_THREADS * cols / YARD_GROUP);

    return (stride){ step / n_groups, step % n_groups, n_groups };
}

typedef struct quantise_args {
    yard_quantise_args a;
    stride step;
} quantise_args;

template <bool WIDE>
static __global__ void __launch_bounds__(QUANTISE_THREADS)
    quantise_rows_e4m3_kernel(const __grid_constant__ quantise_args q)
{
    enum { N = QUANTISE_COLS };
    const yard_quantise_args &a = q.a;
    place at = first_place<N>(q.step);

    allow_next_kernel();
    wait_previous_kernel();
    const uint32_t n_rows = a.n_cols ? (uint32_t)*a.n_rows : 0;
    while (__any_sync(0xffffffffu, at.row < n_rows)) { /* warps stay together */
        place now[AT_ONCE];
        values<N> x[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            now[i] = at;
            at = move_on(at, q.step);
            x[i] = load_values<N>(a.x, (size_t)now[i].row * a.x.ld, first_col<N>(now[i]),
                                  now[i].row < n_rows ? a.n_cols : 0, WIDE);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            if (!__any_sync(0xffffffffu, now[i].row < n_rows))
                return;
            quantise_values(a.y, now[i].row, first_col<N>(now[i]),
                            now[i].row < n_rows ? a.n_cols : 0, a.ue8m0, WIDE, x[i]);
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

yard_status yard_cuda_quantise_launch(const yard_quantise_args *a, uint32_t max_rows, void *stream,
                                      yard_error *err)
{
    const uint32_t n_blocks = group_blocks(max_rows, a->n_cols, QUANTISE_COLS, QUANTISE_MAX_BLOCKS);
    const quantise_args q = { *a, stride_of(n_blocks, a->n_cols, QUANTISE_COLS) };
    const bool wide = is_wide(&a->x, a->n_cols) && is_wide(&a->y, a->n_cols);
    const yard_status st = check_args(a, err);

    if (st != YARD_OK)
        return st;
    return launch_rows(wide ? quantise_rows_e4m3_kernel<true> : quantise_rows_e4m3_kernel<false>,
                       n_blocks, QUANTISE_THREADS, 0, q, "quantise", stream, err);
}

typedef struct silu_args {
    yard_silu_mul_args a;
    stride step;
} silu_args;

typedef values<SILU_COLS> silu_values;

/* gate / (1 + exp(-gate)) * up. Where all gates are at most 60 the exponential needs no limits, and
 * quotient is exact: of all such gates of 2^-28 and more, and smaller ones have a divisor of 2,
 * only 2^-23 gives another one when the reciprocal is off by a unit. The sign is the gate's, a
 * zero's too. */
static __device__ __forceinline__ silu_values silu_mul(const silu_values &gate,
                                                       const silu_values &up)
{
    bool is_easy = true;
    silu_values y;

#pragma unroll
    for (int i = 0; i < SILU_COLS; i++)
        is_easy &= fabsf(gate.v[i]) <= 60.0f && gate.v[i] != 0x1p-23f; /* no: not a number */
    if (is_easy) {
#pragma unroll
        for (int i = 0; i < SILU_COLS; i++) {
            const float divisor = __fadd_rn(1.0f, exp_between(-gate.v[i]));
            y.v[i] = __fmul_rn(copysignf(quotient(gate.v[i], divisor), gate.v[i]), up.v[i]);
        }
    } else {
        for (int i = 0; i < SILU_COLS; i++) {
            const float divisor = __fadd_rn(1.0f, exp_defined(-gate.v[i]));
            const float x = gate.v[i] == 0.0f ? gate.v[i] : __fdiv_rn(gate.v[i], divisor);
            y.v[i] = __fmul_rn(x, up.v[i]);
        }
    }
    return y;
}

/* A warp has one group at a time: others hide its way to memory. */
template <bool WIDE>
static __global__ void __launch_bounds__(QUANTISE_THREADS)
    silu_mul_quant_kernel(const __grid_constant__ silu_args q)
{
    enum { N = SILU_COLS };
    const yard_silu_mul_args &a = q.a;
    place at = first_place<N>(q.step);

    allow_next_kernel();
    wait_previous_kernel();
    const uint32_t n_rows = a.n_cols ? (uint32_t)*a.n_rows : 0;
    for (; at.row < n_rows; at = move_on(at, q.step)) {
        const size_t row = (size_t)at.row * a.gate_up.ld;
        const uint32_t col = first_col<N>(at);
        const silu_values gate = load_values<N>(a.gate_up, row, col, a.n_cols, WIDE);
        const silu_values up = load_values<N>(a.gate_up, row + a.n_cols, col, a.n_cols, WIDE);
        emit_values(a.y, at.row, col, a.n_cols, a.ue8m0, WIDE, silu_mul(gate, up));
    }
}

yard_status yard_cuda_silu_mul_launch(const yard_silu_mul_args *a, uint32_t max_rows, void *stream,
                                      yard_error *err)
{
    const uint32_t n_blocks = group_blocks(max_rows, a->n_cols, SILU_COLS, SILU_MAX_BLOCKS);
    const silu_args q = { *a, stride_of(n_blocks, a->n_cols, SILU_COLS) };
    const bool wide = is_wide(&a->gate_up, a->n_cols) && is_wide(&a->y.plain, a->n_cols) &&
                      is_wide(&a->y.quant, a->n_cols);

    if (a->gate_up.dtype != YARD_F32 && a->gate_up.dtype != YARD_BF16)
        return yard_fail(err, YARD_EINVAL, "silu_mul: want f32 or bf16, got %s",
                         yard_dtype_name(a->gate_up.dtype));
    return launch_rows(wide ? silu_mul_quant_kernel<true> : silu_mul_quant_kernel<false>, n_blocks,
                       QUANTISE_THREADS, 0, q, "silu_mul", stream, err);
}
