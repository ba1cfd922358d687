#include "ops/cuda/heads.cuh"

#include "ops/cuda/wgmma.cuh"

/* The products of one block of K, 64 columns by WIDTH rows. */
template <class S, int WIDTH>
static __device__ __forceinline__ void multiply_block(const heads_shared<S> &m,
                                                      float (&acc)[WIDTH / 2], int stage,
                                                      uint32_t columns, uint32_t block)
{
    const uint64_t w = wgmma_descriptor(m.w + (columns / 2 * m.n_blocks_k + block) * W_BLOCK_BYTES +
                                        columns % 2 * COLUMNS * BLOCK_K);
    const uint64_t x =
        wgmma_descriptor(m.x + stage * m.size.x_bytes + block * m.size.X_BLOCK_BYTES);

    pin(acc);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < BLOCK_K / 32; i++)
        wgmma<true, WIDTH>::issue(acc, w + 2 * i, x + 2 * i, i > 0);
    wgmma_commit();
    wgmma_wait<0>();
    pin(acc);
}

/* sum += acc times its scales; ONE: from zero. */
template <class S, int WIDTH>
static __device__ __forceinline__ void promote(const heads_shared<S> &m, float (&sum)[WIDTH / 2],
                                               const float (&acc)[WIDTH / 2], int stage,
                                               uint32_t columns, uint32_t block)
{
    const float ws = m.w_scale[columns * m.n_blocks_k + block];
    const float *xs = m.x_scale + (stage * m.n_blocks_k + block) * ROWS + threadIdx.x % 4 * 2;

#pragma unroll
    for (int j = 0; j < WIDTH / 8; j++) {
        const float2 s = *(const float2 *)(xs + 8 * j);
        const float s0 = s.x * ws, s1 = s.y * ws;
        const bool first = S::ONE;
        sum[4 * j] = fmaf(acc[4 * j], s0, first ? 0.0f : sum[4 * j]);
        sum[4 * j + 1] = fmaf(acc[4 * j + 1], s1, first ? 0.0f : sum[4 * j + 1]);
        sum[4 * j + 2] = fmaf(acc[4 * j + 2], s0, first ? 0.0f : sum[4 * j + 2]);
        sum[4 * j + 3] = fmaf(acc[4 * j + 3], s1, first ? 0.0f : sum[4 * j + 3]);
    }
}

/* 64 columns by WIDTH rows. */
template <class S, int WIDTH>
static __device__ __forceinline__ void multiply(const heads_shared<S> &m, float (&sum)[WIDTH / 2],
                                                int stage, uint32_t columns)
{
    if constexpr (S::ONE) { /* no registers but those of the sums */
        multiply_block<S, WIDTH>(m, sum, stage, columns, 0);
        promote<S, WIDTH>(m, sum, sum, stage, columns, 0);
    } else {
        float acc[WIDTH / 2];
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++)
            sum[i] = 0.0f;
#pragma unroll 1
        for (uint32_t block = 0; block < m.n_blocks_k; block++) {
            multiply_block<S, WIDTH>(m, acc, stage, columns, block);
            promote<S, WIDTH>(m, sum, acc, stage, columns, block);
        }
    }
}

static __device__ __forceinline__ bool wanted(const yard_heads_args &a, int first, int n_rows,
                                              int row)
{
    return row < n_rows && (!a.row_mask || a.row_mask[first + row]);
}

/* Element by element: f32, or rows that are not whole 16-byte pieces. */
template <int WIDTH>
static __device__ __forceinline__ void store_elements(const yard_heads_args &a,
                                                      const float (&sum)[WIDTH / 2], uint32_t head,
                                                      uint32_t col, int first, int n_rows)
{
    const uint32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;

#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
        const uint32_t c = col + warp * 16 + lane / 4 + i % 4 / 2 * 8;
        const size_t at = (size_t)(first + row) * a.y.ld + (size_t)head * a.y_step + c;
        if (c >= a.n_out || !wanted(a, first, n_rows, row))
            continue;
        if (a.y.dtype == YARD_F32)
            ((float *)a.y.data)[at] = sum[i];
        else
            ((uint16_t *)a.y.data)[at] = (uint16_t)(pack_bf16(sum[i], 0.0f) & 0xffffu);
    }
    __syncwarp();
}

/* A warpgroup's 64 columns through one of its two buffers, transposed to rows of y: whole lines of
 * 128 bytes. Buffers take turns, so that none is written again before the barrier of the other turn
 * says that everybody has read it. */
template <class S, int WIDTH>
static __device__ __forceinline__ void store(const yard_heads_args &a, const heads_shared<S> &m,
                                             const float (&sum)[WIDTH / 2], uint32_t head,
                                             uint32_t col, int first, int n_rows, uint32_t turn)
{
    const uint32_t warpgroup = threadIdx.x / 128, warp = threadIdx.x % 128 / 32;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t buffer = (2 * warpgroup + turn % 2) * m.size.STORE_BYTES;
    const size_t base = (size_t)head * a.y_step;

#pragma unroll
    for (int j = 0; j < WIDTH / 8; j += 2) {
        const uint32_t to = lane % 8 + lane / 16 * 8, piece = warp * 2 + lane / 8 % 2;
        constexpr int LAST = WIDTH / 8 - 1;
        const int more = j < LAST ? 4 : 0; /* a width of 8 has one square only: twice the same */

        store_matrix_transposed(
            m.stores + buffer + (j * 8 + to) * STORE_ROW_BYTES + (piece ^ to % 8) * 16,
            pack_bf16(sum[4 * j], sum[4 * j + 1]), pack_bf16(sum[4 * j + 2], sum[4 * j + 3]),
            pack_bf16(sum[4 * j + more], sum[4 * j + more + 1]),
            pack_bf16(sum[4 * j + more + 2], sum[4 * j + more + 3]));
    }
    named_sync(1 + warpgroup, 128); /* the warpgroup's columns are all there */
#pragma unroll
    for (int i = 0; i < (WIDTH + 15) / 16; i++) {
        const int row = i * 16 + warp * 4 + lane / 8;
        const uint32_t piece = lane % 8, c = col + piece * 8;
        if (c < a.n_out && wanted(a, first, n_rows, row))
            *(uint4 *)((uint16_t *)a.y.data + (size_t)(first + row) * a.y.ld + base + c) =
                *(const uint4 *)(m.store_data + buffer + row * STORE_ROW_BYTES +
                                 (piece ^ row % 8) * 16);
    }
}

template <class S, int WIDTH>
static __device__ __forceinline__ void
compute(const yard_heads_args &a, const heads_shared<S> &m, int stage, uint32_t head, uint32_t out0,
        uint32_t warpgroup, int first, int n_rows, uint32_t &turn)
{
    const uint32_t n_columns = a.block_tiles * (HEADS_TILE_OUT / COLUMNS);
    uint32_t columns = warpgroup; /* by which it begins, in 64s */
    float sum[WIDTH / 2];

    do {
        if (columns < n_columns)
            multiply<S, WIDTH>(m, sum, stage, columns);
        if (columns + S::WARPGROUPS >= n_columns) { /* the rows are read: others may come */
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                barrier_arrive(m.empty + stage * 8);
        }
        if (columns < n_columns) {
            if (a.y_aligned)
                store<S, WIDTH>(a, m, sum, head, out0 + columns * COLUMNS, first, n_rows, turn++);
            else
                store_elements<WIDTH>(a, sum, head, out0 + columns * COLUMNS, first, n_rows);
        }
        columns += S::WARPGROUPS;
    } while (columns < n_columns);
}

template <class S>
static __device__ __forceinline__ void multiply_rows(const yard_heads_args &a,
                                                     const heads_shared<S> &m, uint32_t head,
                                                     uint32_t out0, uint32_t warpgroup)
{
    const heads_rows rows(*a.n_rows);
    uint32_t turn = 0;

    barrier_wait(m.w_full, 0); /* also without rows: no block leaves before its copies have come */
    for (int tile = 0; tile < rows.n_tiles; tile++) {
        const int stage = tile % STAGES, first = rows.begin(tile), n_rows = rows.count(tile);

        barrier_wait(m.full + stage * 8, tile / STAGES % 2);
        if (n_rows > 16)
            compute<S, ROWS>(a, m, stage, head, out0, warpgroup, first, n_rows, turn);
        else if (n_rows > 8)
            compute<S, 16>(a, m, stage, head, out0, warpgroup, first, n_rows, turn);
        else
            compute<S, 8>(a, m, stage, head, out0, warpgroup, first, n_rows, turn);
    }
}

/* One thread: barriers, and weights, which do not depend on any kernel before this one. */
template <class S>
static __device__ __forceinline__ void begin(const yard_tensor_map &w, const yard_heads_args &a,
                                             const heads_shared<S> &m, uint32_t first_w_row)
{
    barrier_init(m.w_full, 1);
    for (int i = 0; i < STAGES; i++) {
        barrier_init(m.full + i * 8, S::ROUND_WARPS);
        barrier_init(m.empty + i * 8, S::MULTIPLY_WARPS);
    }
    for (int i = 0; i < ROW_STAGES; i++) {
        barrier_init(m.rows_full + i * 8, LOAD_WARPS);
        barrier_init(m.rows_empty + i * 8, S::ROUND_WARPS);
    }
    barrier_init_fence();
    barrier_expect(m.w_full, m.size.w_bytes);
    for (uint32_t i = 0; i < a.block_tiles * m.n_blocks_k; i++)
        tma_load(m.w + i * W_BLOCK_BYTES, &w, i % m.n_blocks_k * BLOCK_K,
                 first_w_row + i / m.n_blocks_k * HEADS_TILE_OUT, m.w_full);
}

/* The scale of 64 columns of w by a block of K, one a thread. Columns beyond the last one take any:
 * nothing of them is stored. */
template <class S>
static __device__ __forceinline__ void
load_w_scale(const yard_heads_args &a, const heads_shared<S> &m, uint32_t head, uint32_t out0)
{
    const uint32_t i = threadIdx.x, col = out0 + i / m.n_blocks_k * COLUMNS;
    const uint32_t row = head * a.w_step + a.w_first + (col < a.n_out ? col : 0);

    if (i < a.block_tiles * (HEADS_TILE_OUT / COLUMNS) * m.n_blocks_k)
        m.w_scale[i] =
            __ldg(a.w_scale + (size_t)(row / YARD_GROUP) * a.w_scale_ld + i % m.n_blocks_k);
}

/* Grid: (head, columns of a block) by tiles of rows. */
template <class S>
static __global__ void __launch_bounds__(S::THREADS, 1)
    heads_e4m3_kernel(const __grid_constant__ yard_tensor_map w,
                      const __grid_constant__ yard_heads_args a)
{
    extern __shared__ char raw[];
    const heads_shared<S> m(raw, a.n_in, a.block_tiles);
    const uint32_t block_columns = a.block_tiles * HEADS_TILE_OUT;
    const uint32_t n_column_blocks = (a.n_out + block_columns - 1) / block_columns;
    const uint32_t head = blockIdx.x / n_column_blocks;
    const uint32_t out0 = blockIdx.x % n_column_blocks * block_columns;
    const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); /* uniform */

    if (threadIdx.x == S::THREADS - 1)
        begin(w, a, m, head * a.w_step + a.w_first + out0);
    load_w_scale(a, m, head, out0);
    allow_next_kernel();
    wait_previous_kernel();
    __syncthreads(); /* barriers and scales are there before anybody wants them */

    if (warp < S::MULTIPLY_WARPS)
        multiply_rows(a, m, head, out0, warp / 4);
    else if (warp < S::MULTIPLY_WARPS + S::ROUND_WARPS)
        round_rows(a, m, head, warp - S::MULTIPLY_WARPS);
    else if constexpr (S::WHOLE)
        load_rows(a, m, head, warp - S::MULTIPLY_WARPS - S::ROUND_WARPS);
}

template <class S> static cudaError_t open_shape(void)
{
    const heads_layout<S> most =
        S::ONE ? heads_layout<S>(BLOCK_K, MAX_W_BLOCKS) : heads_layout<S>(HEADS_MAX_K, 1);

    return cudaFuncSetAttribute(heads_e4m3_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                (int)most.total());
}

yard_status yard_cuda_heads_open(yard_error *err)
{
    cudaError_t code = open_shape<wide_in_shape>();

    if (code == cudaSuccess)
        code = open_shape<wide_out_shape>();
    if (code == cudaSuccess)
        code = open_shape<any_shape>();
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "heads: %s", cudaGetErrorString(code));
    return YARD_OK;
}

/* As many columns in a block as shared memory takes, unless that leaves processors idle. */
enum { ENOUGH_BLOCKS = 128 };
static uint32_t choose_tiles(const yard_heads_args *a, uint32_t n_blocks_k, uint32_t row_tiles)
{
    const uint32_t n_tiles = yard_ceil_div(a->n_out, HEADS_TILE_OUT);
    uint32_t tiles = MAX_W_BLOCKS / n_blocks_k;

    tiles = tiles < n_tiles ? tiles : n_tiles;
    while (tiles > 1 && a->n_heads * row_tiles * yard_ceil_div(n_tiles, tiles) < ENOUGH_BLOCKS)
        tiles = (tiles + 1) / 2;
    return tiles;
}

template <class S>
static cudaError_t launch_shape(const yard_tensor_map *w, const yard_heads_args *a, void *stream)
{
    const uint32_t n_blocks_k = yard_ceil_div(a->n_in, BLOCK_K);
    const uint32_t row_tiles = yard_ceil_div(a->max_rows, ROWS);
    yard_heads_args args = *a;
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    uint32_t n_columns, n_rows;

    args.block_tiles = choose_tiles(a, n_blocks_k, row_tiles);
    n_columns = a->n_heads * yard_ceil_div(a->n_out, args.block_tiles * HEADS_TILE_OUT);
    /* weights are read once where blocks are many; otherwise rows are shared out too */
    n_rows = yard_ceil_div(ENOUGH_BLOCKS, n_columns);
    n_rows = n_rows < row_tiles ? n_rows : row_tiles;
    config.gridDim = dim3(n_columns, n_rows, 1);
    config.blockDim = dim3(S::THREADS, 1, 1);
    config.dynamicSmemBytes = heads_layout<S>(a->n_in, args.block_tiles).total();
    config.stream = (cudaStream_t)stream;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, heads_e4m3_kernel<S>, *w, args);
}

yard_status yard_cuda_heads_launch(const yard_tensor_map *w, const yard_heads_args *a, void *stream,
                                   yard_error *err)
{
    cudaError_t code;

    if (a->max_rows == 0)
        return YARD_OK;
    if (!a->x_aligned)
        code = launch_shape<any_shape>(w, a, stream);
    else if (a->n_in > BLOCK_K)
        code = launch_shape<wide_in_shape>(w, a, stream);
    else
        code = launch_shape<wide_out_shape>(w, a, stream);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "heads: launch: %s", cudaGetErrorString(code));
    return YARD_OK;
}
