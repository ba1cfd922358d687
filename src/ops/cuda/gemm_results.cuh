/* The matrix product kernel: what becomes of a tile's sums. Pieces of a cut K are joined, results
 * rounded and stored. */
#ifndef YARD_OPS_CUDA_GEMM_RESULTS_CUH
#define YARD_OPS_CUDA_GEMM_RESULTS_CUH

#include "ops/cuda/gemm.cuh"

/* Rows on M: in a tile of up to half the rows and of two scales both warpgroups have the same rows,
 * and half of the columns each. */
template <class S> __device__ __forceinline__ bool is_halved(const gemm_tile &t)
{
    return S::W_SCALES > 1 && t.width <= S::WIDTH / 2;
}

/* Which part of the block's work is this thread's. */
struct gemm_thread {
    int warpgroup, warp, lane; /* warp: in its warpgroup */
    int consumer;              /* number among all consumer threads */
    uint32_t store;            /* its warp's buffer in shared memory */
};

/* ---- split K ----------------------------------------------------------------------------- */

/* sum becomes the sum of the pieces of workers first to last, in this order; this block's own is in
 * registers. Several pieces are on their way at once: each takes a trip to L2. */
template <class S, int WIDTH, class SLOT>
__device__ __forceinline__ void add_pieces(float (&sum)[WIDTH / 2], uint32_t first, uint32_t last,
                                           const SLOT &slot)
{
    constexpr int EACH = WIDTH / 8, AT_ONCE = EACH >= 8 ? 1 : 8 / EACH;
    float total[WIDTH / 2];

#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++)
        total[i] = 0.0f;
    for (uint32_t worker = first; worker <= last; worker += AT_ONCE) {
        float4 piece[AT_ONCE][EACH];
#pragma unroll
        for (int p = 0; p < AT_ONCE; p++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (worker + p <= last && worker + p != blockIdx.x)
                    piece[p][i] = __ldcg(slot(worker + p) + i * S::CONSUMERS);
                else
                    piece[p][i] =
                        make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
#pragma unroll
        for (int p = 0; p < AT_ONCE; p++)
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (worker + p <= last) {
                    total[4 * i] += piece[p][i].x;
                    total[4 * i + 1] += piece[p][i].y;
                    total[4 * i + 2] += piece[p][i].z;
                    total[4 * i + 3] += piece[p][i].w;
                }
    }
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++)
        sum[i] = total[i];
}

/* Adds up the pieces of a cut tile. Every thread block but the last one to come leaves its sums in
 * memory; the last adds them all, in the order of K whoever it is, and has the result. Elements lie
 * where the same thread of any block finds them again. False: another block goes on. */
template <class S, int WIDTH>
__device__ __forceinline__ bool join_pieces(float (&sum)[WIDTH / 2], const yard_gemm_args &a,
                                            const gemm_shared<S> &m, const gemm_tile &t,
                                            const gemm_thread &me)
{
    const gemm_share share = split_walk<S>::share_of(a, m.count[0]);
    const uint32_t begin = t.unit * a.n_blocks;
    const uint32_t first = share.worker_of(begin), last = share.worker_of(begin + a.n_blocks - 1);
    const size_t slot_floats = (size_t)GEMM_TILE_ROWS * S::WIDTH;
    uint32_t *arrivals = &a.arrivals[t.unit];
    /* a worker has at most two cut tiles: the one it begins in, slot 0, and the one it ends in */
    const auto slot = [&](uint32_t worker) {
        const uint32_t idx = 2 * worker + (share.begin(worker) >= begin ? 0 : 1);
        return (float4 *)(a.partial + idx * slot_floats) + me.consumer;
    };

    /* if all others are there already, this block is the last and need not leave its own sums */
    if (me.consumer == 0)
        m.word[0] = load_acquire(arrivals);
    named_sync(1, S::CONSUMERS);
    bool last_to_come = m.word[0] == last - first;
    named_sync(1, S::CONSUMERS); /* everybody has read the word before it is written again */
    if (!last_to_come) {
        float4 *to = slot(blockIdx.x);
#pragma unroll
        for (int i = 0; i < WIDTH / 8; i++)
            to[i * S::CONSUMERS] =
                make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
        /* the sums are in memory before the count says so, and the count is read before the sums */
        __threadfence();
        named_sync(1, S::CONSUMERS);
        if (me.consumer == 0)
            m.word[1] = atomicAdd(arrivals, 1);
        named_sync(1, S::CONSUMERS);
        last_to_come = m.word[1] == last - first;
        if (!last_to_come)
            return false;
    }
    __threadfence();
    if (me.consumer == 0)
        *arrivals = 0;
    add_pieces<S, WIDTH>(sum, first, last, slot);
    return true;
}

/* ---- results ----------------------------------------------------------------------------- */

/* Where column col of a row of the tile lies in y, and whether the row is wanted. */
template <class S>
__device__ __forceinline__ size_t place_of(const yard_gemm_args &a, const gemm_tile &t, int row,
                                           int col)
{
    return (size_t)(t.row + row) * a.y_ld + (S::HEADS ? t.group * a.y_step : 0) + col;
}

template <class S>
__device__ __forceinline__ bool wanted(const yard_gemm_args &a, const gemm_tile &t, int row)
{
    return row < t.n_rows && (!S::HEADS || !a.row_mask || a.row_mask[t.row + row]);
}

template <class S>
__device__ __forceinline__ void store_one(const yard_gemm_args &a, const gemm_tile &t, int row,
                                          int col, float value)
{
    const size_t at = place_of<S>(a, t, row, col);

    if (!wanted<S>(a, t, row) || col >= (int)a.n_out)
        return;
    if (a.y_f32)
        ((float *)a.y)[at] = value;
    else
        ((uint16_t *)a.y)[at] = (uint16_t)(pack_bf16(value, 0.0f) & 0xffffu);
}

/* 16 bytes of bf16 to one row of y; n_out is a multiple of 8 here. */
template <class S>
__device__ __forceinline__ void store_eight(const yard_gemm_args &a, const gemm_tile &t, int row,
                                            int col, const void *from)
{
    if (wanted<S>(a, t, row) && col < (int)a.n_out)
        *(uint4 *)((uint16_t *)a.y + place_of<S>(a, t, row, col)) = *(const uint4 *)from;
}

/* Where a warp's results begin, in rows of the tile and in columns of y. */
template <class S>
__device__ __forceinline__ int first_row_of(const gemm_tile &t, const gemm_thread &me)
{
    return S::SWAPPED ? 0 : (is_halved<S>(t) ? 0 : me.warpgroup * 64) + me.warp * 16;
}

template <class S>
__device__ __forceinline__ int first_column_of(const gemm_tile &t, const gemm_thread &me)
{
    return t.w_tile * S::W_ROWS + (S::SWAPPED        ? me.warpgroup * 64 + me.warp * 16
                                   : is_halved<S>(t) ? me.warpgroup * (S::W_ROWS / 2)
                                                     : 0);
}

/* Element by element: f32, or rows that are not whole 16-byte pieces. */
template <class S, int WIDTH>
__device__ __forceinline__ void store_elements(const float (&sum)[WIDTH / 2],
                                               const yard_gemm_args &a, const gemm_tile &t,
                                               const gemm_thread &me)
{
    const int row = first_row_of<S>(t, me), col = first_column_of<S>(t, me);

#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) {
        const int along_m = me.lane / 4 + i % 4 / 2 * 8;
        const int along_n = i / 4 * 8 + me.lane % 4 * 2 + i % 2;
        store_one<S>(a, t, row + (S::SWAPPED ? along_n : along_m),
                     col + (S::SWAPPED ? along_m : along_n), sum[i]);
    }
    __syncwarp();
}

/* Swapped: 16 columns of y (rows of w) by 16 rows at a time through the warp's buffer, transposed.
 * The 16-byte halves of a buffer row are exchanged in every other four rows: no bank conflicts. */
template <class S, int WIDTH>
__device__ __forceinline__ void store_swapped(const float (&sum)[WIDTH / 2],
                                              const yard_gemm_args &a, const gemm_tile &t,
                                              const gemm_thread &me, char *buffer)
{
    const int col = first_column_of<S>(t, me);

#pragma unroll
    for (int j = 0; j < WIDTH / 8; j += 2) {
        char *half = buffer + j / 2 % 2 * 512;
        const int to = me.lane % 8 + me.lane / 16 * 8, side = me.lane / 8 % 2;
        const uint32_t address =
            me.store + j / 2 % 2 * 512 + to * 32 + ((side ^ (to / 4 % 2)) * 16);
        const int from = me.lane / 2, from_side = me.lane % 2;
        constexpr int LAST = WIDTH / 8 - 1;
        const bool two = j < LAST;

        store_matrix_transposed(address, pack_bf16(sum[4 * j], sum[4 * j + 1]),
                                pack_bf16(sum[4 * j + 2], sum[4 * j + 3]),
                                two ? pack_bf16(sum[4 * (j + two)], sum[4 * (j + two) + 1]) : 0,
                                two ? pack_bf16(sum[4 * (j + two) + 2], sum[4 * (j + two) + 3])
                                    : 0);
        __syncwarp();
        if (two || from < 8)
            store_eight<S>(a, t, j * 8 + from, col + from_side * 8,
                           half + from * 32 + (from_side ^ (from / 4 % 2)) * 16);
    }
    __syncwarp(); /* the buffer is free for the next tile */
}

/* Rows of x on M: 16 rows by STORE_COLUMNS at a time through the warp's buffer. */
template <class S, int WIDTH>
__device__ __forceinline__ void store_rows(const float (&sum)[WIDTH / 2], const yard_gemm_args &a,
                                           const gemm_tile &t, const gemm_thread &me, char *buffer)
{
    constexpr int COLUMNS = WIDTH % S::STORE_COLUMNS ? 32 : S::STORE_COLUMNS;
    constexpr int PIECES = COLUMNS / 8; /* of 16 bytes in a row */
    constexpr int SPREAD = 8 / PIECES;  /* rows whose pieces lie in the same order */
    const int row = first_row_of<S>(t, me), col = first_column_of<S>(t, me);

#pragma unroll
    for (int part = 0; part < WIDTH / COLUMNS; part++) {
#pragma unroll
        for (int j = 0; j < PIECES; j += 2) {
            const int i = part * COLUMNS / 2 + j * 4;
            const int to = me.lane % 16, piece = j + me.lane / 16;
            store_matrix(me.store + to * COLUMNS * 2 + (piece ^ (to / SPREAD % PIECES)) * 16,
                         pack_bf16(sum[i], sum[i + 1]), pack_bf16(sum[i + 2], sum[i + 3]),
                         pack_bf16(sum[i + 4], sum[i + 5]), pack_bf16(sum[i + 6], sum[i + 7]));
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < PIECES / 2; i++) {
            const int from = i * (32 / PIECES) + me.lane / PIECES, piece = me.lane % PIECES;
            store_eight<S>(a, t, row + from, col + part * COLUMNS + piece * 8,
                           buffer + from * COLUMNS * 2 + (piece ^ (from / SPREAD % PIECES)) * 16);
        }
        __syncwarp();
    }
}

#endif
