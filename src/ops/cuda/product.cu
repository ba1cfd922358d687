#include "ops/cuda/product.h"

#include "ops/cuda/values.cuh"

/* A block computes 64 rows by 64 columns; both operands lie in shared memory as f32, 128 of K at a
 * time, one float of padding a row against bank conflicts. */
enum {
    TILE = 64,
    TILE_K = YARD_GROUP,
    PITCH = TILE_K + 1,
    PRODUCT_THREADS = 256,
    EACH = 4, /* rows, and columns, of a thread */
    SHARED_BYTES = 2 * TILE * PITCH * sizeof(float),
    MAX_ROW_BLOCKS = 64 /* of the grid; the rest is a loop */
};

/* x[row of the tile, k0 ..] to shared memory; four threads a row. */
static __device__ void load_x(const yard_product_args &a, uint32_t group, int first, int n_rows,
                              uint32_t k0, float *tile)
{
    const int row = threadIdx.x / 4, part = threadIdx.x % 4;
    float *to = tile + row * PITCH;
    float amax = 0.0f;
    size_t at = 0;

    if (row < n_rows) {
        const int x_row = a.x_index ? a.x_index[first + row] : first + row;
        const uint32_t col = group * a.x_step + k0;
        at = (size_t)x_row * a.x.ld + col;
        for (uint32_t k = part; k < TILE_K; k += 4) {
            float value = k0 + k < a.n_in ? plain_value(a.x.dtype, a.x.data, at + k) : 0.0f;
            if (a.x.dtype == YARD_FP8_E4M3)
                value *= a.x.scale[(size_t)x_row * ((a.n_in + YARD_GROUP - 1) / YARD_GROUP) +
                                   k0 / YARD_GROUP];
            if (a.quantise)
                value = bf16_round(value);
            to[k] = value;
            amax = fmaxf(amax, fabsf(value));
        }
    } else {
        for (uint32_t k = part; k < TILE_K; k += 4)
            to[k] = 0.0f;
    }
    if (!a.quantise)
        return;
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
    const float scale = group_scale(amax, a.ue8m0), inverse = __frcp_rn(scale);
    for (uint32_t k = part; k < TILE_K; k += 4)
        if (to[k] != 0.0f)
            to[k] = e4m3_value(e4m3_from_f32(__fmul_rn(to[k], inverse))) * scale;
}

static __device__ void load_w(const yard_product_args &a, uint32_t group, uint32_t out0,
                              uint32_t k0, float *tile)
{
    const size_t base = a.w_first + (size_t)group * a.w_step;

    for (uint32_t i = threadIdx.x; i < TILE * TILE_K; i += PRODUCT_THREADS) {
        /* neighbouring threads read neighbouring elements of w */
        const uint32_t o = a.transposed ? i % TILE : i / TILE_K;
        const uint32_t k = a.transposed ? i / TILE : i % TILE_K;
        float value = 0.0f;
        if (out0 + o < a.n_out && k0 + k < a.n_in)
            value = a.transposed ? w_value(&a.w, base + k0 + k, out0 + o)
                                 : w_value(&a.w, base + out0 + o, k0 + k);
        tile[o * PITCH + k] = value;
    }
}

static __device__ void product_tile(const yard_product_args &a, uint32_t group, int first,
                                    int n_rows, float *shared)
{
    float *x = shared, *w = shared + TILE * PITCH;
    const uint32_t out0 = blockIdx.x * TILE, col = threadIdx.x % 16, row = threadIdx.x / 16;
    float sum[EACH][EACH] = {};

    for (uint32_t k0 = 0; k0 < a.n_in; k0 += TILE_K) {
        load_x(a, group, first, n_rows, k0, x);
        load_w(a, group, out0, k0, w);
        __syncthreads(); /* the tiles are written before they are read */
        for (int k = 0; k < TILE_K; k++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    sum[i][j] = fmaf(x[(row + 16 * i) * PITCH + k], w[(col + 16 * j) * PITCH + k],
                                     sum[i][j]);
        __syncthreads(); /* .. and read before they are written again */
    }
    for (int i = 0; i < EACH; i++) {
        const int at = (int)row + 16 * i;
        if (at >= n_rows || (a.row_mask && !a.row_mask[first + at]))
            continue;
        for (int j = 0; j < EACH; j++)
            if (out0 + col + 16 * j < a.n_out)
                store_value(a.y.dtype, a.y.data,
                            ((size_t)first + at) * a.y.ld + group * a.y_step + out0 + col + 16 * j,
                            sum[i][j]);
    }
}

/* Grid: columns by row tiles by groups (heads) or 1 (groups with rows of their own). */
static __global__ void __launch_bounds__(PRODUCT_THREADS)
    product_f32_kernel(const __grid_constant__ yard_product_args a)
{
    extern __shared__ float tiles[];
    const uint32_t first_group = a.offset ? 0 : blockIdx.z;
    const uint32_t end_group = a.offset ? a.n_groups : blockIdx.z + 1;
    int tile = 0; /* number of the row tile over all groups */

    for (uint32_t g = first_group; g < end_group; g++) {
        const int first = a.offset ? a.offset[g] : 0;
        const int count = !a.offset     ? a.row_count[0]
                          : a.row_count ? a.row_count[g]
                                        : a.offset[g + 1] - first;
        for (int row = 0; row < count; row += TILE, tile++)
            if (tile % gridDim.y == blockIdx.y)
                product_tile(a, g, first + row, min(TILE, count - row), tiles);
    }
}

yard_status yard_cuda_product_launch(const yard_product_args *a, uint32_t max_rows, void *stream,
                                     yard_error *err)
{
    const uint32_t row_tiles = yard_ceil_div(max_rows, TILE) + (a->offset ? a->n_groups : 0);
    const dim3 grid(yard_ceil_div(a->n_out, TILE),
                    row_tiles < MAX_ROW_BLOCKS ? row_tiles : (uint32_t)MAX_ROW_BLOCKS,
                    a->offset ? 1 : a->n_groups);
    cudaError_t code;

    if (max_rows == 0)
        return YARD_OK;
    code = cudaFuncSetAttribute(product_f32_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                SHARED_BYTES);
    if (code == cudaSuccess) {
        product_f32_kernel<<<grid, PRODUCT_THREADS, SHARED_BYTES, (cudaStream_t)stream>>>(*a);
        code = cudaGetLastError();
    }
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "product: launch: %s", cudaGetErrorString(code));
    return YARD_OK;
}
