/* One small product per head, first half: shapes, shared memory, and the warps that round rows. */
#ifndef YARD_OPS_CUDA_HEADS_CUH
#define YARD_OPS_CUDA_HEADS_CUH

#include "ops/cuda/heads.h"

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/quantise.cuh"

/* A block computes some tiles of 128 columns of one head, for one tile of rows after another. Its
 * weights, all of K, are brought once by the copy engine. Some warps have it bring rows as they
 * are, some tiles ahead; some warps round them to FP8 into one of two stages of shared memory; the
 * others, in warpgroups, multiply what is in the other stage, 64 columns at a time, with weights on
 * the M side of wgmma. */
enum {
    ROWS = 32, /* of a tile */
    STAGES = 2,
    ROW_STAGES = 3, /* tiles of rows on their way */
    LOAD_WARPS =
        4, /* that have rows brought: a warp asks for one row after another, 50 cycles each */
    BLOCK_K = YARD_GROUP,
    X_BLOCK_BYTES = ROWS * BLOCK_K,
    MAX_W_BLOCKS = HEADS_MAX_K / BLOCK_K, /* of 128 by 128 in a block's weights */
    W_BLOCK_BYTES = HEADS_TILE_OUT * BLOCK_K,
    COLUMNS = 64, /* of a warpgroup at a time */
    STORE_ROW_BYTES = COLUMNS * 2,
    /* Rounding: four lanes have a group of 128 values, a warp eight rows. A lane has four pieces of
     * eight values, 16 bytes of bf16; the pieces of the four lanes lie beside each other. */
    GROUP_LANES = 4,
    BATCH_ROWS = 32 / GROUP_LANES,
    PIECES = 4,
    PIECE_VALUES = 8
};

/* How the kernel comes: so many warps that round and warpgroups that multiply. WHOLE: x is bf16 in
 * whole pieces, for the copy engine, and warps that ask it; otherwise the warps that round read it
 * themselves. ONE: K is one block, and its products are the sums. */
template <int ROUND_WARPS_, int WARPGROUPS_, bool WHOLE_, bool ONE_> struct heads_shape {
    static constexpr int ROUND_WARPS = ROUND_WARPS_, WARPGROUPS = WARPGROUPS_;
    static constexpr bool WHOLE = WHOLE_, ONE = ONE_;
    static constexpr int MULTIPLY_WARPS = 4 * WARPGROUPS;
    static constexpr int THREADS = (MULTIPLY_WARPS + ROUND_WARPS + (WHOLE ? LOAD_WARPS : 0)) * 32;
};
/* v_b's kind has much to read and round, k_b's much to store */
typedef heads_shape<8, 2, true, false> wide_in_shape;
typedef heads_shape<4, 4, true, true> wide_out_shape;
typedef heads_shape<8, 2, false, false> any_shape;

/* Bytes of the parts of a block's shared memory. */
template <class S> struct heads_layout {
    uint32_t w_bytes, x_bytes, pitch, rows_bytes, scale_bytes;

    static constexpr uint32_t STORE_BYTES = ROWS * STORE_ROW_BYTES; /* two of a warpgroup */
    static constexpr uint32_t STORES_BYTES = 2 * S::WARPGROUPS * STORE_BYTES;
    static constexpr uint32_t FIXED_BYTES =
        1024 + STORES_BYTES + 2 * MAX_W_BLOCKS * 4 + (1 + 2 * STAGES + 2 * ROW_STAGES) * 8;

    __host__ __device__ __forceinline__ heads_layout(uint32_t n_in, uint32_t n_tiles)
    {
        const uint32_t n_blocks_k = (n_in + BLOCK_K - 1) / BLOCK_K;

        w_bytes = n_tiles * n_blocks_k * W_BLOCK_BYTES;
        x_bytes = n_blocks_k * X_BLOCK_BYTES;
        /* rows as they are: neighbours begin half a line apart, against bank conflicts */
        pitch = n_blocks_k * BLOCK_K * 2 + 64;
        rows_bytes = S::WHOLE ? ROWS * pitch : 0;
        scale_bytes = n_blocks_k * ROWS * 4;
    }
    __host__ __device__ __forceinline__ uint32_t total() const
    {
        return FIXED_BYTES + w_bytes + STAGES * (x_bytes + scale_bytes) + ROW_STAGES * rows_bytes;
    }
};

template <class S> struct heads_shared {
    heads_layout<S> size;
    uint32_t n_blocks_k;
    uint32_t w, x, stores, rows; /* addresses */
    char *x_data, *store_data, *rows_data;
    float *x_scale;                                      /* [STAGES, n_blocks_k, ROWS] */
    float *w_scale;                                      /* [columns / 64, n_blocks_k] */
    uint32_t w_full, full, empty, rows_full, rows_empty; /* barriers */

    __device__ __forceinline__ heads_shared(char *raw, uint32_t n_in, uint32_t n_tiles)
        : size(n_in, n_tiles), n_blocks_k(S::ONE ? 1 : (n_in + BLOCK_K - 1) / BLOCK_K)
    {
        const uint32_t start = (shared_address(raw) + 1023u) & ~1023u;
        char *at = raw + (start - shared_address(raw));

        w = start;
        at += size.w_bytes;
        x = shared_address(at);
        x_data = at;
        at += STAGES * size.x_bytes;
        stores = shared_address(at);
        store_data = at;
        at += size.STORES_BYTES;
        rows = shared_address(at);
        rows_data = at;
        at += ROW_STAGES * size.rows_bytes;
        x_scale = (float *)at;
        at += STAGES * size.scale_bytes;
        w_scale = (float *)at;
        w_full = shared_address(at + 2 * MAX_W_BLOCKS * 4);
        full = w_full + 8;
        empty = full + STAGES * 8;
        rows_full = empty + STAGES * 8;
        rows_empty = rows_full + ROW_STAGES * 8;
    }
    /* 64 columns of w, a block of K: half of a tile of 128 */
    __device__ __forceinline__ uint32_t w_at(uint32_t columns, uint32_t block) const
    {
        return w + (columns / 2 * n_blocks_k + block) * W_BLOCK_BYTES +
               columns % 2 * COLUMNS * BLOCK_K;
    }
    /* Buffers take turns, so that none is written again before the barrier of the other turn says
     * that everybody has read it. */
    __device__ __forceinline__ uint32_t store_buffer(uint32_t warpgroup, uint32_t turn) const
    {
        return (2 * warpgroup + turn % 2) * size.STORE_BYTES;
    }
};

/* The tiles of rows of a block, one after another. */
struct heads_rows {
    int n_rows, first, step, n_tiles;

    __device__ __forceinline__ explicit heads_rows(int n)
        : n_rows(n), first(blockIdx.y * ROWS), step(gridDim.y * ROWS)
    {
        n_tiles = n_rows > first ? (n_rows - first + step - 1) / step : 0;
    }
    __device__ __forceinline__ int begin(int tile) const
    {
        return first + tile * step;
    }
    __device__ __forceinline__ int count(int tile) const
    {
        return min(n_rows - begin(tile), ROWS);
    }
};

/* The scale of 64 columns of w by a block of K, one a thread. Columns beyond the last one take any:
 * nothing of them is stored. */
template <class M>
static __device__ __forceinline__ void
load_w_scale(const yard_heads_args &a, const M &m, uint32_t n_columns, uint32_t head, uint32_t out0)
{
    const uint32_t i = threadIdx.x, col = out0 + i / m.n_blocks_k * COLUMNS;
    const uint32_t row = head * a.w_step + a.w_first + (col < a.n_out ? col : 0);

    if (i < n_columns * m.n_blocks_k)
        m.w_scale[i] =
            __ldg(a.w_scale + (size_t)(row / YARD_GROUP) * a.w_scale_ld + i % m.n_blocks_k);
}

/* Eight values of a row, bf16 in pairs, one by one; zeros beyond n_in. */
static __device__ __forceinline__ uint4 load_eight(const yard_heads_args &a, size_t at, uint32_t k)
{
    uint32_t half[PIECE_VALUES];

#pragma unroll
    for (int i = 0; i < PIECE_VALUES; i++) {
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

/* Four values of two words times inverse, as FP8. ZEROS: zeros stay zeros where inverse is
 * infinite.
 */
template <bool ZEROS>
static __device__ __forceinline__ uint32_t e4m3_from_four(uint32_t a, uint32_t b, float inverse)
{
    float x[4] = { __uint_as_float(a << 16), __uint_as_float(a & 0xffff0000u),
                   __uint_as_float(b << 16), __uint_as_float(b & 0xffff0000u) };
    uint16_t lo, hi;

#pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = ZEROS && x[i] == 0.0f ? x[i] : __fmul_rn(x[i], inverse);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(x[1]), "f"(x[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(x[3]), "f"(x[2]));
    return lo | (uint32_t)hi << 16;
}

/* A lane's pieces of one row, as FP8: rows of 128 bytes, 16-byte pieces exchanged by the row, which
 * is what wgmma expects. */
template <bool ZEROS>
static __device__ __forceinline__ void put_pieces(char *row, uint32_t row_idx,
                                                  const uint4 (&raw)[PIECES], float inverse)
{
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const uint32_t at = i * GROUP_LANES + threadIdx.x % GROUP_LANES; /* in eights of values */
        *(uint2 *)(row + (at / 2 ^ row_idx % 8) * 16 + at % 2 * 8) =
            make_uint2(e4m3_from_four<ZEROS>(raw[i].x, raw[i].y, inverse),
                       e4m3_from_four<ZEROS>(raw[i].z, raw[i].w, inverse));
    }
}

/* Rounds a batch, eight rows of block k of K, as yard_ops.quantise does, byte for byte. The whole
 * warp; at_row is the lane's. */
template <class M>
static __device__ __forceinline__ void round_batch(const M &m, int stage, uint32_t k,
                                                   uint32_t at_row, const uint4 (&raw)[PIECES],
                                                   bool ue8m0)
{
    uint32_t pair = 0;

#pragma unroll
    for (int i = 0; i < PIECES; i++)
        pair = max_pairs(pair,
                         max_pairs(max_pairs(raw[i].x, raw[i].y), max_pairs(raw[i].z, raw[i].w)));
#pragma unroll
    for (int distance = GROUP_LANES / 2; distance > 0; distance /= 2)
        pair = max_pairs(pair, __shfl_xor_sync(0xffffffffu, pair, distance));
    const float scale = group_scale(__uint_as_float(max(pair << 16, pair & 0xffff0000u)), ue8m0);
    const float inverse = __frcp_rn(scale);
    char *row = m.x_data + stage * m.size.x_bytes + k * X_BLOCK_BYTES + at_row * BLOCK_K;
    if (__any_sync(0xffffffffu, isinf(inverse))) /* a scale below 2^-128 */
        put_pieces<true>(row, at_row, raw, inverse);
    else
        put_pieces<false>(row, at_row, raw, inverse);
    if (threadIdx.x % GROUP_LANES == 0)
        m.x_scale[(stage * m.n_blocks_k + k) * ROWS + at_row] = scale;
}

/* A lane's pieces of a row of a tile, from where the copy engine brought it or from memory. Lanes
 * of rows that are not there get anything: nothing of them is stored. */
template <class S>
static __device__ __forceinline__ void
read_pieces(uint4 (&to)[PIECES], const yard_heads_args &a, const heads_shared<S> &m,
            const heads_rows &rows, uint32_t head, int tile, uint32_t k, uint32_t at_row)
{
    const char *near = m.rows_data + tile % ROW_STAGES * m.size.rows_bytes + at_row * m.size.pitch;
    const size_t far = (size_t)(rows.begin(tile) + at_row) * a.x.ld + head * a.x_step;

#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const uint32_t col =
            k * BLOCK_K + (i * GROUP_LANES + threadIdx.x % GROUP_LANES) * PIECE_VALUES;
        to[i] = make_uint4(0, 0, 0, 0);
        if constexpr (S::WHOLE) {
            if (col < a.n_in)
                to[i] = *(const uint4 *)(near + col * 2);
        } else if ((int)at_row < rows.count(tile)) {
            to[i] = load_eight(a, far, col);
        }
    }
}

/* The warps that round. */
template <class S>
static __device__ __forceinline__ void
round_rows(const yard_heads_args &a, const heads_shared<S> &m, uint32_t head, uint32_t warp)
{
    const heads_rows rows(*a.n_rows);

    if (S::WHOLE && rows.n_tiles == 0) /* no block leaves before its copies have come */
        barrier_wait(m.rows_full, 0);
    for (int tile = 0; tile < rows.n_tiles; tile++) {
        const int stage = tile % STAGES;

        if (S::WHOLE)
            barrier_wait(m.rows_full + tile % ROW_STAGES * 8, tile / ROW_STAGES % 2);
        barrier_wait(m.empty + stage * 8, (tile / STAGES % 2) ^ 1);
        for (uint32_t i = warp; i < ROWS / BATCH_ROWS * m.n_blocks_k; i += S::ROUND_WARPS) {
            const uint32_t k = i % m.n_blocks_k, eight = i / m.n_blocks_k;
            const uint32_t at_row = eight * BATCH_ROWS + threadIdx.x % 32 / GROUP_LANES;
            uint4 raw[PIECES];

            if ((int)(eight * BATCH_ROWS) >= rows.count(tile))
                break;
            read_pieces(raw, a, m, rows, head, tile, k, at_row);
            round_batch(m, stage, k, at_row, raw, a.ue8m0);
        }
        fence_async_shared(); /* wgmma reads what these stores wrote */
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(m.full + stage * 8);
            barrier_arrive(m.rows_empty + tile % ROW_STAGES * 8);
        }
    }
}

/* The warps that have rows brought, some of each tile. The first ones need not wait for how many
 * there are: there is memory for max_rows. */
template <class S>
static __device__ __forceinline__ void load_rows(const yard_heads_args &a, const heads_shared<S> &m,
                                                 uint32_t head, uint32_t warp)
{
    const uint32_t row_bytes = a.n_in * sizeof(uint16_t);
    const int n_rows = *a.n_rows, each = ROWS / LOAD_WARPS, mine = (int)warp * each;
    const int row = mine + (int)(threadIdx.x % 32);
    heads_rows rows(a.max_rows);

    for (int tile = 0; tile < rows.n_tiles; tile++) {
        const uint32_t stage = tile % ROW_STAGES, full = m.rows_full + stage * 8;
        const uint16_t *from = (const uint16_t *)a.x.data + (size_t)rows.begin(tile) * a.x.ld +
                               (size_t)head * a.x_step;
        const int end = min(rows.count(tile), mine + each);

        barrier_wait(m.rows_empty + stage * 8, (tile / ROW_STAGES % 2) ^ 1);
        if (threadIdx.x % 32 == 0)
            barrier_expect(full, max(end - mine, 0) * row_bytes);
        __syncwarp(); /* the barrier expects bytes before any can arrive */
        if (row < end)
            bulk_load(m.rows + stage * m.size.rows_bytes + row * m.size.pitch, from + row * a.x.ld,
                      row_bytes, full);
        if (tile == 0)
            rows = heads_rows(n_rows);
    }
}

#endif
