/* What the kernels that work on rows share: values four at a time, the forms of a result, a block's
 * place in a fixed grid. Arithmetic is written with intrinsics that no compiler flag can fuse, in
 * the order of the CPU definition: results are equal to the bit. */
#ifndef YARD_OPS_CUDA_ROWS_CUH
#define YARD_OPS_CUDA_ROWS_CUH

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/quantise.cuh"

/* A warp takes a group of YARD_GROUP columns, a lane four of them, next to each other. */
enum { WARP_LANES = 32, LANE_COLS = YARD_GROUP / WARP_LANES };

typedef struct four {
    float v[LANE_COLS];
} four;

/* Four values from column col of a row that begins at `at`; 0 beyond n_cols. wide: see is_wide. */
static __device__ __forceinline__ four load_four(const yard_rows &x, size_t at, uint32_t col,
                                                 uint32_t n_cols, bool wide)
{
    four r = {};

    if (wide && col < n_cols) {
        if (x.dtype == YARD_BF16) {
            const uint2 raw = *(const uint2 *)((const uint16_t *)x.data + at + col);
            r.v[0] = __uint_as_float(raw.x << 16);
            r.v[1] = __uint_as_float(raw.x & 0xffff0000u);
            r.v[2] = __uint_as_float(raw.y << 16);
            r.v[3] = __uint_as_float(raw.y & 0xffff0000u);
        } else {
            const float4 raw = *(const float4 *)((const float *)x.data + at + col);
            r.v[0] = raw.x;
            r.v[1] = raw.y;
            r.v[2] = raw.z;
            r.v[3] = raw.w;
        }
        return r;
    }
#pragma unroll
    for (uint32_t i = 0; i < LANE_COLS; i++)
        if (col + i < n_cols)
            r.v[i] = x.dtype == YARD_BF16
                         ? __uint_as_float((uint32_t)((const uint16_t *)x.data)[at + col + i] << 16)
                         : ((const float *)x.data)[at + col + i];
    return r;
}

static __device__ __forceinline__ uint32_t bf16_bits(float x)
{
    return __float_as_uint(bf16_round(x)) >> 16;
}

static __device__ __forceinline__ void store_four(const yard_rows &y, size_t at, uint32_t col,
                                                  uint32_t n_cols, bool wide, const four &x)
{
    if (wide && col < n_cols) {
        if (y.dtype == YARD_BF16)
            *(uint2 *)((uint16_t *)y.data + at + col) =
                make_uint2(bf16_bits(x.v[0]) | bf16_bits(x.v[1]) << 16,
                           bf16_bits(x.v[2]) | bf16_bits(x.v[3]) << 16);
        else
            *(float4 *)((float *)y.data + at + col) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < LANE_COLS; i++) {
        if (col + i >= n_cols)
            return;
        if (y.dtype == YARD_BF16)
            ((uint16_t *)y.data)[at + col + i] = (uint16_t)bf16_bits(x.v[i]);
        else
            ((float *)y.data)[at + col + i] = x.v[i];
    }
}

/* FP8 of a group's bf16-rounded values, with its scale; all lanes of a warp together. */
static __device__ __forceinline__ void quantise_group(const yard_rows &y, size_t row,
                                                      uint32_t group, uint32_t lane,
                                                      uint32_t n_cols, bool ue8m0, bool wide,
                                                      const four &x)
{
    const uint32_t n_groups = (n_cols + YARD_GROUP - 1) / YARD_GROUP;
    const uint32_t col = group * YARD_GROUP + lane * LANE_COLS;
    uint32_t amax = 0, codes = 0;
    four value;

#pragma unroll
    for (int i = 0; i < LANE_COLS; i++) {
        const uint32_t bits = __float_as_uint(value.v[i] = bf16_round(x.v[i])) & 0x7fffffffu;
        amax = max(amax, bits > 0x7f800000u ? 0u : bits); /* magnitudes are in their bits' order */
    }
    amax = __reduce_max_sync(0xffffffffu, amax);

    const float scale = group_scale(__uint_as_float(amax), ue8m0);
    const float inverse = __frcp_rn(scale);
    uint8_t *to = (uint8_t *)y.data + row * y.ld + col;
#pragma unroll
    for (int i = 0; i < LANE_COLS; i++) {
        /* a scale below 2^-128 has no finite inverse; zeros stay zeros then too */
        const float v = value.v[i] == 0.0f ? value.v[i] : __fmul_rn(value.v[i], inverse);
        codes |= (uint32_t)e4m3_from_f32(v) << 8 * i;
    }
    if (wide && col < n_cols) {
        *(uint32_t *)to = codes;
    } else {
#pragma unroll
        for (uint32_t i = 0; i < LANE_COLS; i++)
            if (col + i < n_cols)
                to[i] = (uint8_t)(codes >> 8 * i);
    }
    if (lane == 0)
        y.scale[row * n_groups + group] = scale;
}

/* A group's values into the forms that are wanted. */
static __device__ __forceinline__ void emit_group(const yard_out &y, size_t row, uint32_t group,
                                                  uint32_t lane, uint32_t n_cols, bool ue8m0,
                                                  bool wide, const four &x)
{
    if (y.plain.data)
        store_four(y.plain, row * y.plain.ld, group * YARD_GROUP + lane * LANE_COLS, n_cols, wide,
                   x);
    if (y.quant.data)
        quantise_group(y.quant, row, group, lane, n_cols, ue8m0, wide, x);
}

/* exp by the operations of ops/cpu/exp.h, in their order. */
static __device__ __forceinline__ float exp_defined(float x)
{
    const float clamped = x > 88.3f ? 88.3f : x;
    const float n = rintf(__fmul_rn(clamped, 0x1.715476p+0f));
    float r = __fmaf_rn(n, -0x1.62e4p-1f, clamped);
    float p;

    r = __fmaf_rn(n, -0x1.7f7d1cp-20f, r);
    p = __fmaf_rn(0x1.6c16c2p-10f, r, 0x1.111112p-7f);
    p = __fmaf_rn(p, r, 0x1.555556p-5f);
    p = __fmaf_rn(p, r, 0x1.555556p-3f);
    p = __fmaf_rn(p, r, 0x1p-1f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    if (!(x >= -87.3f))
        return x != x ? x : 0.0f;
    return __fmul_rn(p, __uint_as_float((uint32_t)((int32_t)n + 127) << 23));
}

/* ---- on the host --------------------------------------------------------------------------- */

/* Whether four values next to each other are one aligned access in every row. */
static inline bool is_wide(const yard_rows *r, uint32_t n_cols)
{
    const size_t piece = LANE_COLS * yard_dtype_bytes(r->dtype);

    return !r->data ||
           ((uintptr_t)r->data % piece == 0 && r->ld % LANE_COLS == 0 && n_cols % LANE_COLS == 0);
}

/* Blocks for so many items; what is more is a loop. Counts are on the device: an idle rank's blocks
 * read theirs and leave. */
static inline uint32_t grid_for(uint64_t n_items, uint32_t items_per_block, uint32_t max_blocks)
{
    const uint64_t n = (n_items + items_per_block - 1) / items_per_block;

    return n == 0 ? 1 : n < max_blocks ? (uint32_t)n : max_blocks;
}

/* Launches a kernel of one argument struct so that it may start while the kernel before it ends:
 * the first thing it does is to wait for that one's results. */
template <typename ARGS>
static yard_status launch_rows(void (*kernel)(ARGS), uint32_t n_blocks, uint32_t n_threads,
                               size_t shared_bytes, const ARGS &args, const char *name,
                               void *stream, yard_error *err)
{
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute;
    cudaError_t code;

    config.gridDim = dim3(n_blocks, 1, 1);
    config.blockDim = dim3(n_threads, 1, 1);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = (cudaStream_t)stream;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    code = cudaLaunchKernelEx(&config, kernel, args);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "%s: launch: %s", name, cudaGetErrorString(code));
    return YARD_OK;
}

#endif
