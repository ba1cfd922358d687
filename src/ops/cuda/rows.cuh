/* What the kernels that work on rows share: values eight at a time, the forms of a result, a
 * block's place in a fixed grid. Arithmetic is written with intrinsics that no compiler flag can
 * fuse, in the order of the CPU definition: results are equal to the bit. */
#ifndef YARD_OPS_CUDA_ROWS_CUH
#define YARD_OPS_CUDA_ROWS_CUH

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/quantise.cuh"

/* A lane takes eight columns next to each other, 16 bytes of bf16, half a warp a group of
 * YARD_GROUP; where there is more to compute than to load, four, and a warp a group. */
enum { WARP_LANES = 32, LANE_COLS = 8 };

template <int N> struct values {
    float v[N];
};
typedef values<LANE_COLS> eight;

static __device__ __forceinline__ void load_words(const void *from, uint32_t (&word)[4])
{
    const uint4 raw = *(const uint4 *)from;

    word[0] = raw.x;
    word[1] = raw.y;
    word[2] = raw.z;
    word[3] = raw.w;
}

static __device__ __forceinline__ void load_words(const void *from, uint32_t (&word)[2])
{
    const uint2 raw = *(const uint2 *)from;

    word[0] = raw.x;
    word[1] = raw.y;
}

static __device__ __forceinline__ void store_words(void *to, const uint32_t (&word)[4])
{
    *(uint4 *)to = make_uint4(word[0], word[1], word[2], word[3]);
}

static __device__ __forceinline__ void store_words(void *to, const uint32_t (&word)[2])
{
    *(uint2 *)to = make_uint2(word[0], word[1]);
}

static __device__ __forceinline__ void store_words(void *to, const uint32_t (&word)[1])
{
    *(uint32_t *)to = word[0];
}

static __device__ __forceinline__ float load_one(const yard_rows &x, size_t at)
{
    return x.dtype == YARD_BF16 ? __uint_as_float((uint32_t)((const uint16_t *)x.data)[at] << 16)
                                : ((const float *)x.data)[at];
}

static __device__ __forceinline__ void store_one(const yard_rows &y, size_t at, float x)
{
    if (y.dtype == YARD_BF16)
        ((uint16_t *)y.data)[at] = (uint16_t)pack_bf16(x, 0.0f);
    else
        ((float *)y.data)[at] = x;
}

/* N values, eight or four, from column col of a row that begins at `at`; 0 beyond n_cols. wide: see
 * is_wide. */
template <int N = LANE_COLS>
static __device__ __forceinline__ values<N> load_values(const yard_rows &x, size_t at, uint32_t col,
                                                        uint32_t n_cols, bool wide)
{
    values<N> r = {};

    if (wide) {
        if (col >= n_cols)
            return r;
        if (x.dtype == YARD_BF16) {
            uint32_t word[N / 2];
            load_words((const uint16_t *)x.data + at + col, word);
#pragma unroll
            for (int i = 0; i < N / 2; i++) {
                r.v[2 * i] = __uint_as_float(word[i] << 16);
                r.v[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                const float4 four = *(const float4 *)((const float *)x.data + at + col + i);
                r.v[i] = four.x;
                r.v[i + 1] = four.y;
                r.v[i + 2] = four.z;
                r.v[i + 3] = four.w;
            }
        }
        return r;
    }
#pragma unroll
    for (uint32_t i = 0; i < N; i++)
        if (col + i < n_cols)
            r.v[i] = x.dtype == YARD_BF16
                         ? __uint_as_float((uint32_t)((const uint16_t *)x.data)[at + col + i] << 16)
                         : ((const float *)x.data)[at + col + i];
    return r;
}

template <int N>
static __device__ __forceinline__ void store_values(const yard_rows &y, size_t at, uint32_t col,
                                                    uint32_t n_cols, bool wide, const values<N> &x)
{
    if (wide) {
        if (col >= n_cols)
            return;
        if (y.dtype == YARD_BF16) {
            uint32_t word[N / 2];
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                word[i] = pack_bf16(x.v[2 * i], x.v[2 * i + 1]);
            store_words((uint16_t *)y.data + at + col, word);
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 4)
                *(float4 *)((float *)y.data + at + col + i) =
                    make_float4(x.v[i], x.v[i + 1], x.v[i + 2], x.v[i + 3]);
        }
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        if (col + i >= n_cols)
            return;
        if (y.dtype == YARD_BF16)
            ((uint16_t *)y.data)[at + col + i] = (uint16_t)pack_bf16(x.v[i], 0.0f);
        else
            ((float *)y.data)[at + col + i] = x.v[i];
    }
}

/* FP8 of a group's bf16-rounded values, with its scale. col: this lane's first column. All lanes of
 * a warp together, groups of YARD_GROUP / N lanes each. */
template <int N>
static __device__ __forceinline__ void quantise_values(const yard_rows &y, size_t row, uint32_t col,
                                                       uint32_t n_cols, bool ue8m0, bool wide,
                                                       const values<N> &x)
{
    const uint32_t n_groups = (n_cols + YARD_GROUP - 1) / YARD_GROUP;
    uint32_t codes[N / 4] = {};
    float amax = 0.0f;
    values<N> value;

#pragma unroll
    for (int i = 0; i < N; i += 2) {
        const uint32_t pair = pack_bf16(x.v[i], x.v[i + 1]);
        value.v[i] = __uint_as_float(pair << 16);
        value.v[i + 1] = __uint_as_float(pair & 0xffff0000u);
        /* fmaxf passes over what is no number, as the definition does */
        amax = fmaxf(amax, fmaxf(fabsf(value.v[i]), fabsf(value.v[i + 1])));
    }
#pragma unroll
    for (int d = YARD_GROUP / N / 2; d > 0; d /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, d));

    const float scale = group_scale(amax, ue8m0);
    const float inverse = __frcp_rn(scale);
    uint8_t *to = (uint8_t *)y.data + row * y.ld + col;
    if (scale < 0x1p-126f) /* it may have no finite inverse; zeros stay zeros then too */
        for (int i = 0; i < N; i++)
            value.v[i] = value.v[i] == 0.0f ? value.v[i] : __fmul_rn(value.v[i], inverse);
    else
        for (int i = 0; i < N; i++)
            value.v[i] = __fmul_rn(value.v[i], inverse);
#pragma unroll
    for (int i = 0; i < N; i += 2)
        codes[i / 4] |= (uint32_t)e4m3_pair(value.v[i], value.v[i + 1]) << 8 * (i % 4);
    if (wide) {
        if (col < n_cols)
            store_words(to, codes);
    } else {
#pragma unroll
        for (uint32_t i = 0; i < N; i++)
            if (col + i < n_cols)
                to[i] = (uint8_t)(codes[i / 4] >> 8 * (i % 4));
    }
    if (col % YARD_GROUP == 0 && col < n_cols)
        y.scale[row * n_groups + col / YARD_GROUP] = scale;
}

/* A lane's values into the forms that are wanted; all lanes of a warp together. */
template <int N>
static __device__ __forceinline__ void emit_values(const yard_out &y, size_t row, uint32_t col,
                                                   uint32_t n_cols, bool ue8m0, bool wide,
                                                   const values<N> &x)
{
    if (y.plain.data)
        store_values(y.plain, row * y.plain.ld, col, n_cols, wide, x);
    if (y.quant.data)
        quantise_values(y.quant, row, col, n_cols, ue8m0, wide, x);
}

/* Whether the row that a block begins with may be read. Where the room is known this does not wait
 * for the count: row and count are on their way together, and what turns out not to be a row is not
 * written. */
static __device__ __forceinline__ bool may_read_row(uint32_t row, const int32_t *n_rows,
                                                    uint32_t max_rows)
{
    return max_rows ? row < max_rows : row < (uint32_t)*n_rows;
}

enum { ITEM_THREADS = 256, ITEM_MAX_BLOCKS = 132 * 8 }; /* of kernels of independent items */

/* Calls fn(row, item of the row) for every item of the rows there are, each once in the grid. The
 * kernel's first and last doing. */
template <typename FN>
static __device__ __forceinline__ void each_item(const int32_t *n_rows, uint32_t n_row_items, FN fn)
{
    allow_next_kernel();
    wait_previous_kernel();
    const uint32_t n_items = (uint32_t)*n_rows * n_row_items;
    for (uint32_t i = blockIdx.x * ITEM_THREADS + threadIdx.x; i < n_items;
         i += gridDim.x * ITEM_THREADS)
        fn(i / n_row_items, i % n_row_items);
}

/* The same with an item for eight columns: fn(row, first column). */
template <typename FN>
static __device__ __forceinline__ void each_eight(const int32_t *n_rows, uint32_t n_cols, FN fn)
{
    each_item(n_rows, (n_cols + LANE_COLS - 1) / LANE_COLS,
              [&](uint32_t row, uint32_t i) { fn(row, i * LANE_COLS); });
}

/* exp by the operations of ops/cpu/exp.h, in their order, for x from -87.3 to 88.3. The whole part
 * of the exponent is read off the low bits of a sum and added to the product's exponent, which
 * stays that of a normal number: the same bits without a conversion. */
static __device__ __forceinline__ float exp_between(float x)
{
    const float shift = 0x1.8p23f;
    const float at = __fadd_rn(__fmul_rn(x, 0x1.715476p+0f), shift);
    const float n = __fsub_rn(at, shift);
    float r = __fmaf_rn(n, -0x1.62e4p-1f, x);
    float p;

    r = __fmaf_rn(n, -0x1.7f7d1cp-20f, r);
    p = __fmaf_rn(0x1.6c16c2p-10f, r, 0x1.111112p-7f);
    p = __fmaf_rn(p, r, 0x1.555556p-5f);
    p = __fmaf_rn(p, r, 0x1.555556p-3f);
    p = __fmaf_rn(p, r, 0x1p-1f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(at) << 23));
}

static __device__ __forceinline__ float exp_defined(float x)
{
    const float e = exp_between(fminf(x, 88.3f));

    return x >= -87.3f ? e : x != x ? x : 0.0f;
}

/* a / b for |a| from 2^-90 to 2^90 and b from 1 to 2^100: what __fdiv_rn does when it need not look
 * at its operands, so that several of these can be under way at once. Correctly rounded also of a
 * reciprocal that is off by one unit in the last place, unless b's digits are all ones. */
static __device__ __forceinline__ float quotient(float a, float b)
{
    float y, q;

    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
    y = __fmaf_rn(__fmaf_rn(-b, y, 1.0f), y, y);
    q = __fmul_rn(a, y);
    q = __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
    return __fmaf_rn(__fmaf_rn(-b, q, a), y, q);
}

/* on the host */

/* Whether eight values next to each other are whole aligned accesses in every row: 16 bytes, 8 of
 * FP8. */
static inline bool is_wide(const yard_rows *r, uint32_t n_cols)
{
    const size_t piece = r->dtype == YARD_FP8_E4M3 ? LANE_COLS : 16;

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

static inline uint32_t item_blocks(uint32_t max_rows, size_t n_row_items)
{
    return grid_for(max_rows * (uint64_t)n_row_items, ITEM_THREADS, ITEM_MAX_BLOCKS);
}

static inline uint32_t eight_blocks(uint32_t max_rows, uint32_t n_cols)
{
    return item_blocks(max_rows, yard_ceil_div(n_cols, LANE_COLS));
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
