/* One small product per head: 64 columns by some rows on tensor cores, and results on their way
 * out. M, the shared memory of a kernel, has: w_at(64 columns, block of K), x, x_data, x_scale
 * [stage, n_blocks_k, ROWS], w_scale, n_blocks_k, stores, store_data, size.x_bytes. */
#ifndef YARD_OPS_CUDA_HEADS_MULTIPLY_CUH
#define YARD_OPS_CUDA_HEADS_MULTIPLY_CUH

#include "ops/cuda/heads.cuh"

#include "ops/cuda/wgmma.cuh"

/* The products of one block of K, 64 columns by WIDTH rows from `row` of the tile on. */
template <int WIDTH, class M>
static __device__ __forceinline__ void multiply_block(const M &m, float (&acc)[WIDTH / 2],
                                                      int stage, uint32_t row, uint32_t columns,
                                                      uint32_t block)
{
    const uint64_t w = wgmma_descriptor(m.w) + (m.w_at(columns, block) - m.w) / 16;
    const uint64_t x = wgmma_descriptor(m.x) +
                       (stage * m.size.x_bytes + block * X_BLOCK_BYTES + row * BLOCK_K) / 16;

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
template <bool ONE, int WIDTH, class M>
static __device__ __forceinline__ void promote(const M &m, float (&sum)[WIDTH / 2],
                                               const float (&acc)[WIDTH / 2], int stage,
                                               uint32_t row, uint32_t columns, uint32_t block)
{
    const float ws = m.w_scale[columns * m.n_blocks_k + block];
    const float *xs = m.x_scale + (stage * m.n_blocks_k + block) * ROWS + row + threadIdx.x % 4 * 2;

#pragma unroll
    for (int j = 0; j < WIDTH / 8; j++) {
        const float2 s = *(const float2 *)(xs + 8 * j);
        const float s0 = s.x * ws, s1 = s.y * ws;
        sum[4 * j] = fmaf(acc[4 * j], s0, ONE ? 0.0f : sum[4 * j]);
        sum[4 * j + 1] = fmaf(acc[4 * j + 1], s1, ONE ? 0.0f : sum[4 * j + 1]);
        sum[4 * j + 2] = fmaf(acc[4 * j + 2], s0, ONE ? 0.0f : sum[4 * j + 2]);
        sum[4 * j + 3] = fmaf(acc[4 * j + 3], s1, ONE ? 0.0f : sum[4 * j + 3]);
    }
}

/* 64 columns by WIDTH rows from `row` of the tile on. ONE: K is one block. */
template <bool ONE, int WIDTH, class M>
static __device__ __forceinline__ void multiply(const M &m, float (&sum)[WIDTH / 2], int stage,
                                                uint32_t row, uint32_t columns)
{
    if constexpr (ONE) { /* no registers but those of the sums */
        multiply_block<WIDTH>(m, sum, stage, row, columns, 0);
        promote<ONE, WIDTH>(m, sum, sum, stage, row, columns, 0);
    } else {
        float acc[WIDTH / 2];
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++)
            sum[i] = 0.0f;
#pragma unroll 1
        for (uint32_t block = 0; block < m.n_blocks_k; block++) {
            multiply_block<WIDTH>(m, acc, stage, row, columns, block);
            promote<ONE, WIDTH>(m, sum, acc, stage, row, columns, block);
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

/* A thread's part in storing a tile of rows, 16 bytes of every sixteenth row: what does not depend
 * on the columns. */
struct heads_out {
    uint32_t put, get; /* places in a buffer: where it leaves sums, where it takes a row's piece */
    uint16_t *y;       /* its first row, its piece of the head's first 64 columns */
    size_t step;       /* 16 rows */
    uint32_t wanted;   /* bit i: row 16 i is there and wanted */

    __device__ __forceinline__ heads_out(const yard_heads_args &a, uint32_t head, int first,
                                         int n_rows)
    {
        const uint32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, piece = lane % 8;
        const uint32_t to = lane % 8 + lane / 16 * 8, row = warp * 4 + lane / 8;

        put = to * STORE_ROW_BYTES + ((warp * 2 + lane / 8 % 2) ^ to % 8) * 16;
        get = row * STORE_ROW_BYTES + (piece ^ row % 8) * 16;
        y = (uint16_t *)a.y.data + (size_t)(first + row) * a.y.ld + (size_t)head * a.y_step +
            piece * 8;
        step = (size_t)16 * a.y.ld;
        wanted = 0;
#pragma unroll
        for (int i = 0; i < ROWS / 16; i++)
            wanted |= ::wanted(a, first, n_rows, row + i * 16) << i;
    }
};

/* A warpgroup's 64 columns from col on through a buffer of its own, transposed to rows of y: whole
 * lines of 128 bytes. */
template <int WIDTH, class M>
static __device__ __forceinline__ void store(const yard_heads_args &a, const M &m,
                                             const float (&sum)[WIDTH / 2], const heads_out &out,
                                             uint32_t col, uint32_t buffer)
{
    const bool in_range = col + threadIdx.x % 8 * 8 < a.n_out;

#pragma unroll
    for (int j = 0; j < WIDTH / 8; j += 2) {
        constexpr int LAST = WIDTH / 8 - 1;
        const int more = j < LAST ? 4 : 0; /* a width of 8 has one square only: twice the same */

        store_matrix_transposed(m.stores + buffer + out.put + j * 8 * STORE_ROW_BYTES,
                                pack_bf16(sum[4 * j], sum[4 * j + 1]),
                                pack_bf16(sum[4 * j + 2], sum[4 * j + 3]),
                                pack_bf16(sum[4 * j + more], sum[4 * j + more + 1]),
                                pack_bf16(sum[4 * j + more + 2], sum[4 * j + more + 3]));
    }
    named_sync(1 + threadIdx.x / 128, 128); /* the warpgroup's columns are all there */
#pragma unroll
    for (int i = 0; i < (WIDTH + 15) / 16; i++)
        if (in_range && (out.wanted >> i & 1))
            *(uint4 *)(out.y + i * out.step + col) =
                *(const uint4 *)(m.store_data + buffer + out.get + i * 16 * STORE_ROW_BYTES);
}

#endif
