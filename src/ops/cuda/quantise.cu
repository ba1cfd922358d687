/* FP8 quantisation of activation rows; agrees with the plain C definition in every byte. */
#include "ops/cuda/launch.h"

#include "ops/cuda/quantise.cuh"

enum {
    WARP_LANES = 32,
    QUANTISE_THREADS = 256,
    QUANTISE_WARPS = QUANTISE_THREADS / WARP_LANES,
    QUANTISE_MAX_BLOCKS = 4096, /* several waves of the largest device; the rest is a loop */
    LANE_COLS = YARD_GROUP / WARP_LANES
};

static __device__ float load_rounded(const yard_rows *x, size_t idx)
{
    if (x->dtype == YARD_BF16)
        return __uint_as_float((uint32_t)((const uint16_t *)x->data)[idx] << 16);
    return bf16_round(((const float *)x->data)[idx]);
}

/* One warp per group of a row: lane l holds columns l, l + 32, l + 64, l + 96 of the group, so that
 * loads and stores of a warp are consecutive. */
static __device__ void quantise_group(const yard_quantise_args *a, uint32_t row, uint32_t group,
                                      uint32_t lane)
{
    const uint32_t n_groups = (a->n_cols + YARD_GROUP - 1) / YARD_GROUP;
    float value[LANE_COLS];
    float amax = 0.0f;

    for (uint32_t i = 0; i < LANE_COLS; i++) {
        const uint32_t col = group * YARD_GROUP + i * WARP_LANES + lane;
        value[i] = col < a->n_cols ? load_rounded(&a->x, (size_t)row * a->x.ld + col) : 0.0f;
        amax = fmaxf(amax, fabsf(value[i])); /* a maximum does not depend on the order */
    }
    for (int distance = WARP_LANES / 2; distance > 0; distance /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, distance));

    const float scale = group_scale(amax, a->ue8m0);
    const float inverse = __frcp_rn(scale);
    for (uint32_t i = 0; i < LANE_COLS; i++) {
        const uint32_t col = group * YARD_GROUP + i * WARP_LANES + lane;
        /* a scale below 2^-128 has no finite inverse; zeros stay zeros then too */
        const float x = value[i] == 0.0f ? value[i] : __fmul_rn(value[i], inverse);
        if (col < a->n_cols)
            ((uint8_t *)a->y.data)[(size_t)row * a->y.ld + col] = e4m3_from_f32(x);
    }
    if (lane == 0)
        a->y.scale[(size_t)row * n_groups + group] = scale;
}

static __global__ void __launch_bounds__(QUANTISE_THREADS)
    quantise_rows_e4m3_kernel(yard_quantise_args a)
{
    const uint32_t n_groups = (a.n_cols + YARD_GROUP - 1) / YARD_GROUP;
    const uint64_t n_items = (uint64_t)*a.n_rows * n_groups;
    const uint32_t lane = threadIdx.x % WARP_LANES;
    const uint64_t step = (uint64_t)gridDim.x * QUANTISE_WARPS;

    for (uint64_t i = (uint64_t)blockIdx.x * QUANTISE_WARPS + threadIdx.x / WARP_LANES; i < n_items;
         i += step)
        quantise_group(&a, (uint32_t)(i / n_groups), (uint32_t)(i % n_groups), lane);
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
    const uint64_t n_items = (uint64_t)max_rows * yard_group_count(a->n_cols);
    const uint64_t n_wanted = (n_items + QUANTISE_WARPS - 1) / QUANTISE_WARPS;
    const uint32_t n_blocks =
        n_wanted < QUANTISE_MAX_BLOCKS ? (uint32_t)n_wanted : (uint32_t)QUANTISE_MAX_BLOCKS;
    yard_status st = check_args(a, err);
    cudaError_t code;

    if (st != YARD_OK || n_blocks == 0)
        return st; /* an idle rank is normal; an empty grid is an error */
    quantise_rows_e4m3_kernel<<<n_blocks, QUANTISE_THREADS, 0, (cudaStream_t)stream>>>(*a);
    code = cudaGetLastError();
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "quantise: launch: %s", cudaGetErrorString(code));
    return YARD_OK;
}
