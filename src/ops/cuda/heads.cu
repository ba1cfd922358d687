#include "ops/cuda/heads.h"

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/quantise.cuh"
#include "ops/cuda/wgmma.cuh"

/* A block computes 128 columns of one head for up to 64 rows: while the copy engine brings its
 * weights, its threads round its rows to FP8 into shared memory; then two warpgroups multiply, 64
 * columns each, with weights on the M side of wgmma. All of K (at most 512) is there at once. */
enum {
    HEADS_THREADS = 256,
    HEADS_WARPS = HEADS_THREADS / 32,
    BLOCK_K = YARD_GROUP,
    MAX_BLOCKS_K = HEADS_MAX_K / BLOCK_K,
    W_BLOCK_BYTES = HEADS_TILE_OUT * BLOCK_K,
    X_BLOCK_BYTES = HEADS_TILE_ROWS * BLOCK_K,
    STORE_BYTES = 1024, /* a warp's buffer on the way out */
    LANES_A_GROUP = 16, /* eight values each: 16 bytes of bf16 */
    LANE_VALUES = BLOCK_K / LANES_A_GROUP
};

static uint32_t shared_bytes(uint32_t n_blocks_k)
{
    return 1024 + n_blocks_k * (W_BLOCK_BYTES + X_BLOCK_BYTES + HEADS_TILE_ROWS * 4) +
           HEADS_WARPS * STORE_BYTES + 16;
}

struct heads_shared {
    uint32_t w, x, stores, bar;
    char *x_bytes, *store_bytes;
    float *x_scale; /* [n_blocks_k, 64] */

    __device__ __forceinline__ heads_shared(char *raw, uint32_t n_blocks_k)
    {
        const uint32_t start = (shared_address(raw) + 1023u) & ~1023u;
        char *at = raw + (start - shared_address(raw));

        w = start;
        at += n_blocks_k * W_BLOCK_BYTES;
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

/* Eight values of a row as bf16 values in f32; zeros beyond n_in. */
static __device__ __forceinline__ void load_eight(const yard_heads_args &a, size_t at, uint32_t k,
                                                  float (&value)[LANE_VALUES])
{
    if (a.x_aligned && k + LANE_VALUES <= a.n_in) {
        const uint4 raw = *(const uint4 *)((const uint16_t *)a.x.data + at + k);
        const uint32_t word[4] = { raw.x, raw.y, raw.z, raw.w };
#pragma unroll
        for (int i = 0; i < LANE_VALUES; i++)
            value[i] = __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
        return;
    }
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) {
        value[i] = 0.0f;
        if (k + i < a.n_in)
            value[i] =
                a.x.dtype == YARD_F32
                    ? bf16_round(((const float *)a.x.data)[at + k + i])
                    : __uint_as_float((uint32_t)((const uint16_t *)a.x.data)[at + k + i] << 16);
    }
}

/* Half a warp rounds one group of one row: as yard_ops.quantise does, byte for byte. */
static __device__ __forceinline__ void quantise_group(const yard_heads_args &a,
                                                      const heads_shared &m, uint32_t row,
                                                      uint32_t block,
                                                      const float (&value)[LANE_VALUES])
{
    const uint32_t lane = threadIdx.x % LANES_A_GROUP;
    uint32_t code[2] = { 0, 0 };
    float amax = 0.0f;

#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++)
        amax = fmaxf(amax, fabsf(value[i]));
#pragma unroll
    for (int distance = LANES_A_GROUP / 2; distance > 0; distance /= 2)
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
    const float scale = group_scale(amax, a.ue8m0), inverse = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < LANE_VALUES; i++) {
        const float x = value[i] == 0.0f ? value[i] : __fmul_rn(value[i], inverse);
        code[i / 4] |= (uint32_t)e4m3_from_f32(x) << i % 4 * 8;
    }
    /* rows of 128 bytes, 16-byte pieces exchanged by the row: what wgmma expects */
    *(uint2 *)(m.x_bytes + block * X_BLOCK_BYTES + row * BLOCK_K +
               ((lane / 2 ^ row % 8) * 16 + lane % 2 * 8)) = make_uint2(code[0], code[1]);
    if (lane == 0)
        m.x_scale[block * HEADS_TILE_ROWS + row] = scale;
}

/* All rows of the tile, all groups; several loads in flight before the first is used. */
static __device__ __forceinline__ void quantise_rows(const yard_heads_args &a,
                                                     const heads_shared &m, uint32_t head,
                                                     int first, int n_rows, int width,
                                                     uint32_t n_blocks_k)
{
    enum { IN_FLIGHT = 4 };
    const uint32_t half = threadIdx.x / LANES_A_GROUP, n_halves = HEADS_THREADS / LANES_A_GROUP;
    const uint32_t lane = threadIdx.x % LANES_A_GROUP, n_items = width * n_blocks_k;
    float value[IN_FLIGHT][LANE_VALUES];

    /* n_items is even, so the two halves of a warp always go on together */
    for (uint32_t item = half; item < n_items; item += n_halves * IN_FLIGHT) {
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const uint32_t at = item + i * n_halves, row = at / n_blocks_k, k = at % n_blocks_k;
            if (at < n_items && (int)row < n_rows)
                load_eight(a, (size_t)(first + row) * a.x.ld + head * a.x_step,
                           k * BLOCK_K + lane * LANE_VALUES, value[i]);
            else
                for (int j = 0; j < LANE_VALUES; j++)
                    value[i][j] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            const uint32_t at = item + i * n_halves;
            if (at < n_items)
                quantise_group(a, m, at / n_blocks_k, at % n_blocks_k, value[i]);
        }
    }
}

template <int WIDTH>
static __device__ __forceinline__ void multiply(const yard_heads_args &a, const heads_shared &m,
                                                float (&sum)[WIDTH / 2], uint32_t w_row,
                                                uint32_t n_blocks_k)
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
        const uint64_t w = wgmma_descriptor(m.w + block * W_BLOCK_BYTES + warpgroup * 64 * BLOCK_K);
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
    const uint32_t col = out0 + threadIdx.x / 128 * 64;
    float sum[WIDTH / 2];

    quantise_rows(a, m, head, first, n_rows, WIDTH, n_blocks_k);
    fence_async_shared(); /* wgmma reads what these stores wrote */
    __syncthreads();
    barrier_wait(m.bar, 0);
    /* columns beyond the last one take any scale: nothing of them is stored */
    multiply<WIDTH>(a, m, sum, head * a.w_step + a.w_first + (col < a.n_out ? col : 0), n_blocks_k);
    store<WIDTH>(a, m, sum, head, col + threadIdx.x % 128 / 32 * 16, first, n_rows);
}

/* Grid: (head, 128 columns) by 64 rows. */
static __global__ void __launch_bounds__(HEADS_THREADS)
    heads_e4m3_kernel(const __grid_constant__ yard_tensor_map w,
                      const __grid_constant__ yard_heads_args a)
{
    extern __shared__ char raw[];
    const uint32_t n_blocks_k = (a.n_in + BLOCK_K - 1) / BLOCK_K;
    const uint32_t n_tiles = (a.n_out + HEADS_TILE_OUT - 1) / HEADS_TILE_OUT;
    const uint32_t head = blockIdx.x / n_tiles, out0 = blockIdx.x % n_tiles * HEADS_TILE_OUT;
    const int first = blockIdx.y * HEADS_TILE_ROWS;
    const heads_shared m(raw, n_blocks_k);

    if (threadIdx.x == 0) {
        barrier_init(m.bar, 1);
        barrier_init_fence();
        /* weights do not depend on any kernel before this one */
        barrier_expect(m.bar, n_blocks_k * W_BLOCK_BYTES);
        for (uint32_t block = 0; block < n_blocks_k; block++)
            tma_load(m.w + block * W_BLOCK_BYTES, &w, block * BLOCK_K,
                     head * a.w_step + a.w_first + out0, m.bar);
    }
    allow_next_kernel();
    wait_previous_kernel();
    __syncthreads(); /* the barrier is there before anybody waits for it */

    const int n_rows = min(*a.n_rows - first, (int)HEADS_TILE_ROWS);
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
                             (int)shared_bytes(MAX_BLOCKS_K));

    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "heads: %s", cudaGetErrorString(code));
    return YARD_OK;
}

yard_status yard_cuda_heads_launch(const yard_tensor_map *w, const yard_heads_args *a,
                                   uint32_t max_rows, void *stream, yard_error *err)
{
    const uint32_t n_blocks_k = yard_ceil_div(a->n_in, BLOCK_K);
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    cudaError_t code;

    if (max_rows == 0)
        return YARD_OK;
    config.gridDim = dim3(a->n_heads * yard_ceil_div(a->n_out, HEADS_TILE_OUT),
                          yard_ceil_div(max_rows, HEADS_TILE_ROWS), 1);
    config.blockDim = dim3(HEADS_THREADS, 1, 1);
    config.dynamicSmemBytes = shared_bytes(n_blocks_k);
    config.stream = (cudaStream_t)stream;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    code = cudaLaunchKernelEx(&config, heads_e4m3_kernel, *w, *a);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "heads: launch: %s", cudaGetErrorString(code));
    return YARD_OK;
}
