/* One small product per head for few rows and one block of K: k_b. */
#include "ops/cuda/heads_multiply.cuh"

/* A block has 256 columns of a head, 32 KB of weights, and little enough of everything that four of
 * them fit on a processor: all blocks of a call beside those of the next one, whose weights come
 * meanwhile. All warps ask for rows themselves and round them, then two warpgroups multiply. With
 * more rows the blocks that have warps for each task are faster: these ones round everything twice,
 * and wait for each other between the steps. */
enum {
    FEW_THREADS = 256,
    FEW_BLOCKS = 4, /* on a processor */
    FEW_UNITS = 4,  /* of 64 columns */
    FEW_TURNS = FEW_UNITS / (FEW_THREADS / 128),
    FEW_UNIT_BYTES = COLUMNS * BLOCK_K,
    FEW_BUFFER_BYTES = ROWS * STORE_ROW_BYTES,
    FEW_SHARED_BYTES = 1024 + FEW_UNITS * FEW_UNIT_BYTES + X_BLOCK_BYTES +
                       FEW_UNITS * FEW_BUFFER_BYTES + ROWS * 4 + FEW_UNITS * 4 + 8
};
static_assert(FEW_BLOCKS * (FEW_SHARED_BYTES + 1024) <= 228 * 1024, "blocks on a processor");
static_assert(FEW_THREADS / 32 >= ROWS / BATCH_ROWS, "a warp for every eight rows");

/* As heads_shared. */
struct few_shared {
    struct {
        uint32_t x_bytes;
    } size;
    uint32_t n_blocks_k, w, x, stores, w_full; /* addresses and a barrier */
    char *x_data, *store_data;
    float *x_scale, *w_scale;

    __device__ __forceinline__ explicit few_shared(char *raw)
    {
        w = (shared_address(raw) + 1023u) & ~1023u;
        x_data = raw + (w - shared_address(raw)) + FEW_UNITS * FEW_UNIT_BYTES;
        x = shared_address(x_data);
        store_data = x_data + X_BLOCK_BYTES;
        stores = shared_address(store_data);
        x_scale = (float *)(store_data + FEW_UNITS * FEW_BUFFER_BYTES);
        w_scale = x_scale + ROWS;
        w_full = shared_address(w_scale + FEW_UNITS);
        size.x_bytes = X_BLOCK_BYTES;
        n_blocks_k = 1;
    }
    __device__ __forceinline__ uint32_t w_at(uint32_t columns, uint32_t) const
    {
        return w + columns * FEW_UNIT_BYTES;
    }
};

/* The lane's pieces of its row of a tile, straight from memory. */
static __device__ __forceinline__ void fetch(uint4 (&raw)[PIECES], const yard_heads_args &a,
                                             uint32_t head, int row, int n_rows)
{
    const uint32_t col = threadIdx.x % GROUP_LANES * PIECE_VALUES;
    const uint16_t *from =
        (const uint16_t *)a.x.data + (size_t)row * a.x.ld + head * a.x_step + col;

#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        constexpr int STEP = GROUP_LANES * PIECE_VALUES;
        raw[p] = make_uint4(0, 0, 0, 0);
        if (row < n_rows && col + p * STEP < a.n_in)
            raw[p] = *(const uint4 *)(from + p * STEP);
    }
}

template <int WIDTH>
static __device__ __forceinline__ void few_compute(const yard_heads_args &a, const few_shared &m,
                                                   uint32_t head, uint32_t out0, int n_rows)
{
    const heads_out out(a, head, 0, n_rows);
    float sum[WIDTH / 2];

#pragma unroll 1
    for (uint32_t turn = 0; turn < FEW_TURNS; turn++) {
        const uint32_t unit = threadIdx.x / 128 * FEW_TURNS + turn, col = out0 + unit * COLUMNS;

        if (col >= a.n_out)
            break;
        multiply<true, WIDTH>(m, sum, 0, 0, unit);
        store<WIDTH>(a, m, sum, out, col, unit * FEW_BUFFER_BYTES);
    }
}

/* One thread: the barrier, and weights, which do not depend on any kernel before this one. */
static __device__ __forceinline__ void few_begin(const yard_tensor_map &w, const few_shared &m,
                                                 uint32_t first_w_row)
{
    barrier_init(m.w_full, 1);
    barrier_init_fence();
    barrier_expect(m.w_full, FEW_UNITS * FEW_UNIT_BYTES);
    for (uint32_t i = 0; i < FEW_UNITS; i++)
        tma_load(m.w_at(i, 0), &w, 0, first_w_row + i * COLUMNS, m.w_full);
}

/* Grid: (head, columns of a block). All rows are one tile. */
static __global__ void __launch_bounds__(FEW_THREADS, FEW_BLOCKS)
    heads_few_e4m3_kernel(const __grid_constant__ yard_tensor_map w,
                          const __grid_constant__ yard_heads_args a)
{
    extern __shared__ char raw_shared[];
    const few_shared m(raw_shared);
    const uint32_t n_column_blocks = (a.n_out + FEW_UNITS * COLUMNS - 1) / (FEW_UNITS * COLUMNS);
    const uint32_t head = blockIdx.x / n_column_blocks;
    const uint32_t out0 = blockIdx.x % n_column_blocks * FEW_UNITS * COLUMNS;
    const int at_row = threadIdx.x / GROUP_LANES; /* the lane's, in a tile */
    const bool rounds = at_row < ROWS;            /* its warp has eight rows */
    uint4 raw[PIECES];

    if (threadIdx.x == 0)
        few_begin(w, m, head * a.w_step + a.w_first + out0);
    load_w_scale(a, m, FEW_UNITS, head, out0);
    allow_next_kernel();
    wait_previous_kernel();

    const int n_rows = *a.n_rows;
    if (rounds) /* before it is known how many there are: there is memory for max_rows */
        fetch(raw, a, head, at_row, a.max_rows);
    __syncthreads();           /* the barrier and scales are there */
    barrier_wait(m.w_full, 0); /* also without rows: no block leaves before its copies have come */
    if (n_rows == 0)
        return;
    if (rounds)
        round_batch(m, 0, 0, at_row, raw, a.ue8m0);
    fence_async_shared(); /* wgmma reads what these stores wrote */
    __syncthreads();
    if (n_rows > 16)
        few_compute<ROWS>(a, m, head, out0, n_rows);
    else if (n_rows > 8)
        few_compute<16>(a, m, head, out0, n_rows);
    else
        few_compute<8>(a, m, head, out0, n_rows);
}

bool yard_cuda_heads_few_take(const yard_heads_args *a)
{
    return a->x_aligned && a->y_aligned && a->n_in <= BLOCK_K && a->max_rows <= ROWS;
}

yard_status yard_cuda_heads_few_open(yard_error *err)
{
    const cudaError_t code = cudaFuncSetAttribute(
        heads_few_e4m3_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_SHARED_BYTES);

    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "heads: %s", cudaGetErrorString(code));
    return YARD_OK;
}

yard_status yard_cuda_heads_few_launch(const yard_tensor_map *w, const yard_heads_args *a,
                                       void *stream, yard_error *err)
{
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    cudaError_t code;

    config.gridDim = dim3(a->n_heads * yard_ceil_div(a->n_out, FEW_UNITS * COLUMNS), 1, 1);
    config.blockDim = dim3(FEW_THREADS, 1, 1);
    config.dynamicSmemBytes = FEW_SHARED_BYTES;
    config.stream = (cudaStream_t)stream;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    code = cudaLaunchKernelEx(&config, heads_few_e4m3_kernel, *w, *a);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "heads: launch: %s", cudaGetErrorString(code));
    return YARD_OK;
}
