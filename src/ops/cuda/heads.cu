#include "ops/cuda/heads.h"

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/quantise.cuh"
#include "ops/cuda/wgmma.cuh"

/* A block computes some tiles of 128 columns of one head for up to 64 rows: while the copy engine
 * brings its weights, its threads round its rows to FP8 into shared memory, once for all its tiles;
 * then two warpgroups multiply, 64 columns each, with weights on the M side of wgmma. All of K is
 * there at once: 512 at most, tiles times K too. */
enum {
    HEADS_THREADS = 256,
    HEADS_WARPS = HEADS_THREADS / 32,
    BLOCK_K = YARD_GROUP,
    MAX_W_BLOCKS = HEADS_MAX_K / BLOCK_K, /* of 128 by 128 in a block's weights */
    W_BLOCK_BYTES = HEADS_TILE_OUT * BLOCK_K,
    X_BLOCK_BYTES = HEADS_TILE_ROWS * BLOCK_K,
    STORE_BYTES = 1024, /* a warp's buffer on the way out */
    LANES_A_GROUP = 16, /* eight values each: 16 bytes of bf16 */
    LANE_VALUES = BLOCK_K / LANES_A_GROUP
};

static uint32_t shared_bytes(uint32_t n_blocks_k, uint32_t n_tiles)
{
    return 1024 + n_tiles * n_blocks_k * W_BLOCK_BYTES +
           n_blocks_k * (X_BLOCK_BYTES + HEADS_TILE_ROWS * 4) + HEADS_WARPS * STORE_BYTES + 16;
}

struct heads_shared {
    uint32_t w, x, stores, bar;
    char *x_bytes, *store_bytes;
    float *x_scale; /* [n_blocks_k, 64] */

    __device__ __forceinline__ heads_shared(char *raw, uint32_t n_blocks_k, uint32_t n_tiles)
    {
        const uint32_t start = (shared_address(raw) + 1023u) & ~1023u;
        char *at = raw + (start - shared_address(raw));

        w = start;
        at += n_tiles * n_blocks_k * W_BLOCK_BYTES;
        x = shared_address(at);
        x_bytes = at;
        at += n_blocks_k * X_BLOCK_BYTES;
        x_scale = (float *)at;
        at += n_blocks_k * HEADS_TILE_ROWS * 4;
        stores = shared_address(at);
        store_bytes = at;
        bar = stores + HEADS_WARPS * STORE_BYTES;
    }
};

/* Eight values of a row, bf16 in pairs; zeros beyond n_in. */
static __device__ __forceinline__ uint4 load_eight(const yard_heads_args &a, size_t at, uint32_t k)
{
    uint32_t half[LANE_VALUES];

    if (a.x_aligned && k + LANE_VALUES <= a.n_in)
        return *(const uint4 *)((const uint16_t *)a.x.data + at + k);
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) {
        half[i] = 0;
        if (k + i < a.n_in)
            half[i] = a.x.dtype == YARD_F32
                          ? __float_as_uint(bf16_round(((const float *)a.x.data)[at + k + i])) >> 16
                          : ((const uint16_t *)a.x.data)[at + k + i];
    }
    return make_uint4(half[0] | half[1] << 16, half[2] | half[3] << 16, half[4] | half[5] << 16,
                      half[6] | half[7] << 16);
}

/* The larger of the magnitudes in both halves, pairwise; bits of magnitudes are in their order. */
static __device__ __forceinline__ uint32_t max_pairs(uint32_t a, uint32_t b)
{
    return __vmaxu2(a & 0x7fff7fffu, b & 0x7fff7fffu);
}

/* Four values of two words times inverse, as FP8. */
static __device__ __forceinline__ uint32_t e4m3_from_four(uint32_t a, uint32_t b, float inverse)
{
    float x[4] = { __uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u),
                   __uint_as_float(b << 16), __uint_as_float(b & 0xffff0000u) };
    uint16_t lo, hi;

#pragma unroll
    for (int i = 0; i < 4; i++) /* a scale below 2^-128 has no finite inverse; zeros stay zeros */
        x[i] = x[i] == 0.0f ? x[i] : __fmul_rn(x[i], inverse);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(x[1]), "f"(x[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(x[3]), "f"(x[2]));
    return lo | (uint32_t)hi << 16;
}

/* Rounds the rows of the tile to FP8 in shared memory, as yard_ops.quantise does, byte for byte.
 * Half a warp takes a group of a row; several groups are under way at once, step by step, to hide
 * what loads, shuffles and divisions take. */
static __device__ __forceinline__ void quantise_rows(const yard_heads_args &a,
                                                     const heads_shared &m, uint32_t head,
                                                     int first, int n_rows, int width,
                                                     uint32_t n_blocks_k)
{
    enum { AT_ONCE = 8 };
    const uint32_t half = threadIdx.x / LANES_A_GROUP, n_halves = HEADS_THREADS / LANES_A_GROUP;
    const uint32_t lane = threadIdx.x % LANES_A_GROUP, n_items = width * n_blocks_k;

    /* n_items is even, so the two halves of a warp always go on together */
    for (uint32_t item = half; item < n_items; item += n_halves * AT_ONCE) {
        uint4 raw[AT_ONCE];
        float scale[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const uint32_t at = item + i * n_halves, row = at / n_blocks_k, k = at % n_blocks_k;
            raw[i] = make_uint4(0, 0, 0, 0);
            if ((int)row < n_rows)
                raw[i] = load_eight(a, (size_t)(first + row) * a.x.ld + head * a.x_step,
                                    k * BLOCK_K + lane * LANE_VALUES);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            uint32_t pair = max_pairs(max_pairs(raw[i].x, raw[i].y), max_pairs(raw[i].z, raw[i].w));
#pragma unroll
            for (int distance = LANES_A_GROUP / 2; distance > 0; distance /= 2)
                pair = max_pairs(pair, __shfl_xor_sync(0xffffffffu, pair, distance));
            scale[i] = group_scale(__uint_as_float(max(pair << 16, pair & 0xffff0000u)), a.ue8m0);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const uint32_t at = item + i * n_halves, row = at / n_blocks_k, k = at % n_blocks_k;
            const float inverse = __frcp_rn(scale[i]);
            const uint2 code = make_uint2(e4m3_from_four(raw[i].x, raw[i].y, inverse),
                                          e4m3_from_four(raw[i].z, raw[i].w, inverse));
            if (at >= n_items)
                continue;
            /* rows of 128 bytes, 16-byte pieces exchanged by the row: what wgmma expects */
            *(uint2 *)(m.x_bytes + k * X_BLOCK_BYTES + row * BLOCK_K +
                       ((lane / 2 ^ row % 8) * 16 + lane % 2 * 8)) = code;
            if (lane == 0)
                m.x_scale[k * HEADS_TILE_ROWS + row] = scale[i];
        }
    }
}

template <int WIDTH>
static __device__ __forceinline__ void multiply(const yard_heads_args &a, const heads_shared &m,
                                                float (&sum)[WIDTH / 2], uint32_t tile,
                                                uint32_t w_row, uint32_t n_blocks_k)
{
    const uint32_t warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    const float *w_scale = a.w_scale + (size_t)(w_row / YARD_GROUP) * a.w_scale_ld;
    float acc[WIDTH / 2];

#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++)
        sum[i] = 0.0f;
    for (uint32_t block = 0; block < n_blocks_k; block++) {
        const float ws = __ldg(w_scale + block);
        const float *xs = m.x_scale + block * HEADS_TILE_ROWS + lane % 4 * 2;
        const uint64_t w = wgmma_descriptor(m.w + (tile * n_blocks_k + block) * W_BLOCK_BYTES +
                                            warpgroup * 64 * BLOCK_K);
        const uint64_t x = wgmma_descriptor(m.x + block * X_BLOCK_BYTES);

        pin(acc);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_K / 32; i++)
            wgmma<true, WIDTH>::issue(acc, w + 2 * i, x + 2 * i, i > 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin(acc);
#pragma unroll
        for (int j = 0; j < WIDTH / 8; j++) {
            const float s0 = xs[8 * j] * ws, s1 = xs[8 * j + 1] * ws;
            sum[4 * j] = fmaf(acc[4 * j], s0, sum[4 * j]);
            sum[4 * j + 1] = fmaf(acc[4 * j + 1], s1, sum[4 * j + 1]);
            sum[4 * j + 2] = fmaf(acc[4 * j + 2], s0, sum[4 * j + 2]);
            sum[4 * j + 3] = fmaf(acc[4 * j + 3], s1, sum[4 * j + 3]);
        }
    }
}

static __device__ __forceinline__ bool wanted(const yard_heads_args &a, int first, int n_rows,
                                              int row)
{
    return row < n_rows && (!a.row_mask || a.row_mask[first + row]);
}

/* Four 8 x 8 squares at a time through the warp's buffer, transposed to rows of y. */
template <int WIDTH>
static __device__ __forceinline__ void store(const yard_heads_args &a, const heads_shared &m,
                                             const float (&sum)[WIDTH / 2], uint32_t head,
                                             uint32_t col, int first, int n_rows)
{
    const uint32_t lane = threadIdx.x % 32, buffer = threadIdx.x / 32 * STORE_BYTES;
    const size_t base = (size_t)head * a.y_step;

    if (!a.y_aligned) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) {
            const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
            const uint32_t c = col + lane / 4 + i % 4 / 2 * 8;
            const size_t at = (size_t)(first + row) * a.y.ld + base + c;
            if (c >= a.n_out || !wanted(a, first, n_rows, row))
                continue;
            if (a.y.dtype == YARD_F32)
                ((float *)a.y.data)[at] = sum[i];
            else
                ((uint16_t *)a.y.data)[at] = (uint16_t)(pack_bf16(sum[i], 0.0f) & 0xffffu);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j += 2) {
        const uint32_t half = buffer + j / 2 % 2 * 512;
        const uint32_t to = lane % 8 + lane / 16 * 8, side = lane / 8 % 2;
        const uint32_t from = lane / 2, from_side = lane % 2;
        constexpr int LAST = WIDTH / 8 - 1;
        const int more = j < LAST ? 4 : 0; /* a width of 8 has one square only: twice the same */

        store_matrix_transposed(m.stores + half + to * 32 + (side ^ to / 4 % 2) * 16,
                                pack_bf16(sum[4 * j], sum[4 * j + 1]),
                                pack_bf16(sum[4 * j + 2], sum[4 * j + 3]),
                                pack_bf16(sum[4 * j + more], sum[4 * j + more + 1]),
                                pack_bf16(sum[4 * j + more + 2], sum[4 * j + more + 3]));
        __syncwarp();
        const int row = j * 8 + from;
        const uint32_t c = col + from_side * 8;
        if (c < a.n_out && (more || from < 8) && wanted(a, first, n_rows, row))
            *(uint4 *)((uint16_t *)a.y.data + (size_t)(first + row) * a.y.ld + base + c) = *(
                const uint4 *)(m.store_bytes + half + from * 32 + (from_side ^ from / 4 % 2) * 16);
    }
}

template <int WIDTH>
static __device__ __forceinline__ void compute(const yard_heads_args &a, const heads_shared &m,
                                               uint32_t head, uint32_t out0, int first, int n_rows,
                                               uint32_t n_blocks_k)
{
    float sum[WIDTH / 2];

    quantise_rows(a, m, head, first, n_rows, WIDTH, n_blocks_k);
    fence_async_shared(); /* wgmma reads what these stores wrote */
    __syncthreads();
    barrier_wait(m.bar, 0);
    for (uint32_t tile = 0; tile < a.block_tiles; tile++) {
        const uint32_t col = out0 + tile * HEADS_TILE_OUT + threadIdx.x / 128 * 64;
        /* columns beyond the last one take any scale: nothing of them is stored */
        multiply<WIDTH>(a, m, sum, tile, head * a.w_step + a.w_first + (col < a.n_out ? col : 0),
                        n_blocks_k);
        store<WIDTH>(a, m, sum, head, col + threadIdx.x % 128 / 32 * 16, first, n_rows);
        __syncwarp(); /* the warp's buffer is free for the next tile */
    }
}

/* Grid: (head, columns of a block) by 64 rows. */
static __global__ void __launch_bounds__(HEADS_THREADS)
    heads_e4m3_kernel(const __grid_constant__ yard_tensor_map w,
                      const __grid_constant__ yard_heads_args a)
{
    extern __shared__ char raw[];
    const uint32_t n_blocks_k = (a.n_in + BLOCK_K - 1) / BLOCK_K;
    const uint32_t block_columns = a.block_tiles * HEADS_TILE_OUT;
    const uint32_t n_column_blocks = (a.n_out + block_columns - 1) / block_columns;
    const uint32_t head = blockIdx.x / n_column_blocks;
    const uint32_t out0 = blockIdx.x % n_column_blocks * block_columns;
    const int first = blockIdx.y * a.block_rows;
    const heads_shared m(raw, n_blocks_k, a.block_tiles);

    if (threadIdx.x == 0) {
        barrier_init(m.bar, 1);
        barrier_init_fence();
        /* weights do not depend on any kernel before this one */
        barrier_expect(m.bar, a.block_tiles * n_blocks_k * W_BLOCK_BYTES);
        for (uint32_t i = 0; i < a.block_tiles * n_blocks_k; i++)
            tma_load(m.w + i * W_BLOCK_BYTES, &w, i % n_blocks_k * BLOCK_K,
                     head * a.w_step + a.w_first + out0 + i / n_blocks_k * HEADS_TILE_OUT, m.bar);
    }
    allow_next_kernel();
    wait_previous_kernel();
    const int n_rows = min(*a.n_rows - first, (int)a.block_rows);
    __syncthreads(); /* the barrier is there before anybody waits for it */

    if (n_rows > 32)
        compute<64>(a, m, head, out0, first, n_rows, n_blocks_k);
    else if (n_rows > 16)
        compute<32>(a, m, head, out0, first, n_rows, n_blocks_k);
    else if (n_rows > 8)
        compute<16>(a, m, head, out0, first, n_rows, n_blocks_k);
    else if (n_rows > 0)
        compute<8>(a, m, head, out0, first, n_rows, n_blocks_k);
    else
        barrier_wait(m.bar, 0); /* no block leaves while a copy into it is under way */
}

yard_status yard_cuda_heads_open(yard_error *err)
{
    const cudaError_t code =
        cudaFuncSetAttribute(heads_e4m3_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             (int)shared_bytes(HEADS_MAX_K / BLOCK_K, 1));

    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "heads: %s", cudaGetErrorString(code));
    return YARD_OK;
}

/* As many columns in a block as shared memory takes, unless that leaves processors idle. */
static uint32_t choose_tiles(const yard_heads_args *a, uint32_t n_blocks_k, uint32_t row_tiles)
{
    enum { ENOUGH_BLOCKS = 128 };
    const uint32_t n_tiles = yard_ceil_div(a->n_out, HEADS_TILE_OUT);
    uint32_t tiles = MAX_W_BLOCKS / n_blocks_k;

    tiles = tiles < n_tiles ? tiles : n_tiles;
    while (tiles > 1 && a->n_heads * row_tiles * yard_ceil_div(n_tiles, tiles) < ENOUGH_BLOCKS)
        tiles = (tiles + 1) / 2;
    return tiles;
}

yard_status yard_cuda_heads_launch(const yard_tensor_map *w, const yard_heads_args *a,
                                   uint32_t max_rows, void *stream, yard_error *err)
{
    const uint32_t n_blocks_k = yard_ceil_div(a->n_in, BLOCK_K);
    /* few rows: half of them a block, so that rounding takes half the time */
    const uint32_t block_rows = max_rows <= HEADS_TILE_ROWS ? HEADS_TILE_ROWS / 2 : HEADS_TILE_ROWS;
    const uint32_t row_tiles = yard_ceil_div(max_rows, block_rows);
    yard_heads_args args = *a;
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    cudaError_t code;

    if (max_rows == 0)
        return YARD_OK;
    args.block_rows = block_rows;
    args.block_tiles = choose_tiles(a, n_blocks_k, row_tiles);
    config.gridDim =
        dim3(a->n_heads * yard_ceil_div(a->n_out, args.block_tiles * HEADS_TILE_OUT), row_tiles, 1);
    config.blockDim = dim3(HEADS_THREADS, 1, 1);
    config.dynamicSmemBytes = shared_bytes(n_blocks_k, args.block_tiles);
    config.stream = (cudaStream_t)stream;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    code = cudaLaunchKernelEx(&config, heads_e4m3_kernel, *w, args);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "heads: launch: %s", cudaGetErrorString(code));
    return YARD_OK;
}
