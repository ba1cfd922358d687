#include "ops/cuda/heads_multiply.cuh"

template <class S, int WIDTH>
static __device__ __forceinline__ void
compute(const yard_heads_args &a, const heads_shared<S> &m, int stage, uint32_t head, uint32_t out0,
        uint32_t warpgroup, int first, int n_rows, uint32_t &turn)
{
    const uint32_t n_columns = a.block_tiles * (HEADS_TILE_OUT / COLUMNS);
    const heads_out out(a, head, first, n_rows);
    uint32_t columns = warpgroup; /* by which it begins, in 64s */
    float sum[WIDTH / 2];

    do {
        if (columns < n_columns)
            multiply<S::ONE, WIDTH>(m, sum, stage, 0, columns);
        if (columns + S::WARPGROUPS >= n_columns) { /* the rows are read: others may come */
            __syncwarp();
            if (threadIdx.x % 32 == 0)
                barrier_arrive(m.empty + stage * 8);
        }
        if (columns < n_columns) {
            if (a.y_aligned)
                store<WIDTH>(a, m, sum, out, out0 + columns * COLUMNS,
                             m.store_buffer(warpgroup, turn++));
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
    for (uint32_t i = 0; i < a.block_tiles * 2 * m.n_blocks_k; i++)
        tma_load(m.w_at(i / m.n_blocks_k, i % m.n_blocks_k), &w, i % m.n_blocks_k * BLOCK_K,
                 first_w_row + i / m.n_blocks_k * COLUMNS, m.w_full);
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
    load_w_scale(a, m, a.block_tiles * (HEADS_TILE_OUT / COLUMNS), head, out0);
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
    return yard_cuda_heads_few_open(err);
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
    if (yard_cuda_heads_few_take(a))
        return yard_cuda_heads_few_launch(w, a, stream, err);
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
