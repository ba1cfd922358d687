/* One small product per head, first half: shapes, shared memory, and the warps that round rows. */
#ifndef YARD_OPS_CUDA_HEADS_CUH
#define YARD_OPS_CUDA_HEADS_CUH

#include "ops/cuda/heads.h"

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/quantise.cuh"

/* A block computes some tiles of 128 columns of one head, for one tile of rows after another. Its
 * weights, all of K, are brought once by the copy engine. Some warps round rows to FP8 into one of
 * two stages of shared memory; the others, in warpgroups, multiply what is in the other stage, 64
 * columns at a time, with weights on the M side of wgmma. */
enum {
    STAGES = 2,
    BLOCK_K = YARD_GROUP,
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

/* How the kernel comes: tiles of ROWS rows at most, so many warps that round, with AHEAD loads
 * under way in each (what keeps memory busy), and warpgroups that multiply; BLOCKS on a processor
 * at once. WHOLE: x is bf16 in whole pieces. */
template <int ROWS_, int ROUND_WARPS_, int WARPGROUPS_, int AHEAD_, int BLOCKS_, bool WHOLE_>
struct heads_shape {
    static constexpr int ROWS = ROWS_, ROUND_WARPS = ROUND_WARPS_, WARPGROUPS = WARPGROUPS_;
    static constexpr int AHEAD = AHEAD_, BLOCKS = BLOCKS_;
    static constexpr bool WHOLE = WHOLE_;
    static constexpr int MULTIPLY_WARPS = 4 * WARPGROUPS;
    static constexpr int THREADS = (ROUND_WARPS + MULTIPLY_WARPS) * 32;
};
/* few rows: while one kernel ends, the next one's weights can come already */
typedef heads_shape<HEADS_TILE_ROWS / 2, 8, 2, 1, 2, true> few_shape;
/* many rows: much to round, or much to store */
typedef heads_shape<HEADS_TILE_ROWS, 12, 1, 2, 1, true> wide_in_shape;
typedef heads_shape<HEADS_TILE_ROWS, 4, 3, 2, 1, true> wide_out_shape;
typedef heads_shape<HEADS_TILE_ROWS, 8, 2, 1, 1, false> any_shape;

/* Bytes of the parts of a block's shared memory. */
template <class S> struct heads_layout {
    uint32_t w_bytes, x_bytes;

    static constexpr uint32_t X_BLOCK_BYTES = S::ROWS * BLOCK_K;
    static constexpr uint32_t STORE_BYTES = S::ROWS * STORE_ROW_BYTES; /* of a warpgroup */
    static constexpr uint32_t FIXED_BYTES =
        1024 + S::WARPGROUPS * STORE_BYTES + 2 * MAX_W_BLOCKS * 4 + (1 + 2 * STAGES) * 8;

    __host__ __device__ __forceinline__ heads_layout(uint32_t n_blocks_k, uint32_t n_tiles)
        : w_bytes(n_tiles * n_blocks_k * W_BLOCK_BYTES), x_bytes(n_blocks_k * X_BLOCK_BYTES)
    {
    }
    __host__ __device__ __forceinline__ uint32_t total(uint32_t n_blocks_k) const
    {
        return FIXED_BYTES + w_bytes + STAGES * (x_bytes + n_blocks_k * S::ROWS * 4);
    }
};

template <class S> struct heads_shared {
    heads_layout<S> size;
    uint32_t n_blocks_k;
    uint32_t w, x, stores; /* addresses */
    char *x_data, *store_data;
    float *x_scale;               /* [STAGES, n_blocks_k, ROWS] */
    float *w_scale;               /* [columns / 64, n_blocks_k] */
    uint32_t w_full, full, empty; /* barriers */

    __device__ __forceinline__ heads_shared(char *raw, uint32_t n_blocks, uint32_t n_tiles)
        : size(n_blocks, n_tiles), n_blocks_k(n_blocks)
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
        at += S::WARPGROUPS * size.STORE_BYTES;
        x_scale = (float *)at;
        at += STAGES * n_blocks_k * S::ROWS * 4;
        w_scale = (float *)at;
        w_full = shared_address(at + 2 * MAX_W_BLOCKS * 4);
        full = w_full + 8;
        empty = full + STAGES * 8;
    }
};

/* The tiles of rows of a block, one after another. */
template <class S> struct heads_rows {
    int n_rows, first, step, n_tiles;

    __device__ __forceinline__ explicit heads_rows(int n)
        : n_rows(n), first(blockIdx.y * S::ROWS), step(gridDim.y * S::ROWS)
    {
        n_tiles = n_rows > first ? (n_rows - first + step - 1) / step : 0;
    }
    __device__ __forceinline__ int begin(int tile) const
    {
        return first + tile * step;
    }
    __device__ __forceinline__ int count(int tile) const
    {
        return min(n_rows - begin(tile), S::ROWS);
    }
};

/* ---- rounding ------------------------------------------------------------------------------ */

/* Eight values of a row, bf16 in pairs; zeros beyond n_in. */
template <bool WHOLE>
static __device__ __forceinline__ uint4 load_eight(const yard_heads_args &a, size_t at, uint32_t k)
{
    if constexpr (WHOLE) {
        return k < a.n_in ? *(const uint4 *)((const uint16_t *)a.x.data + at + k)
                          : make_uint4(0, 0, 0, 0);
    } else {
        uint32_t half[PIECE_VALUES];
#pragma unroll
        for (int i = 0; i < PIECE_VALUES; i++) {
            half[i] = 0;
            if (k + i < a.n_in)
                half[i] =
                    a.x.dtype == YARD_F32
                        ? __float_as_uint(bf16_round(((const float *)a.x.data)[at + k + i])) >> 16
                        : ((const uint16_t *)a.x.data)[at + k + i];
        }
        return make_uint4(half[0] | half[1] << 16, half[2] | half[3] << 16, half[4] | half[5] << 16,
                          half[6] | half[7] << 16);
    }
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

/* Which batch is a warp's turn: eight rows of one block of K of a tile. A tile's batches go round
 * the warps, blocks of K first; every tile has as many steps, whatever it holds, so that loads can
 * run ahead from one tile into the next. */
template <class S> struct heads_batch {
    int tile = 0, step = 0;
    uint32_t k, eight;

    __device__ __forceinline__ heads_batch(uint32_t n_blocks_k, uint32_t warp)
        : k(warp % n_blocks_k), eight(warp / n_blocks_k)
    {
    }
    static __device__ __forceinline__ int n_steps(uint32_t n_blocks_k)
    {
        return (S::ROWS / BATCH_ROWS * n_blocks_k + S::ROUND_WARPS - 1) / S::ROUND_WARPS;
    }
    __device__ __forceinline__ int row() const /* this lane's */
    {
        return (int)(eight * BATCH_ROWS + threadIdx.x % 32 / GROUP_LANES);
    }
    __device__ __forceinline__ void advance(uint32_t n_blocks_k, uint32_t warp)
    {
        if (++step == n_steps(n_blocks_k)) {
            tile++;
            step = 0;
            k = warp % n_blocks_k;
            eight = warp / n_blocks_k;
            return;
        }
        k += S::ROUND_WARPS % n_blocks_k;
        eight += S::ROUND_WARPS / n_blocks_k;
        if (k >= n_blocks_k) {
            k -= n_blocks_k;
            eight++;
        }
    }
};

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

/* Rounds a batch as yard_ops.quantise does, byte for byte. The whole warp. */
template <class S>
static __device__ __forceinline__ void round_batch(const heads_shared<S> &m, int stage,
                                                   const heads_batch<S> &b,
                                                   const uint4 (&raw)[PIECES], bool ue8m0)
{
    const uint32_t at_row = b.row();
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
    char *row = m.x_data + stage * m.size.x_bytes + b.k * m.size.X_BLOCK_BYTES + at_row * BLOCK_K;
    if (__any_sync(0xffffffffu, isinf(inverse))) /* a scale below 2^-128 */
        put_pieces<true>(row, at_row, raw, inverse);
    else
        put_pieces<false>(row, at_row, raw, inverse);
    if (threadIdx.x % GROUP_LANES == 0)
        m.x_scale[(stage * m.n_blocks_k + b.k) * S::ROWS + at_row] = scale;
}

/* The warps that round. */
template <class S>
static __device__ __forceinline__ void
round_rows(const yard_heads_args &a, const heads_shared<S> &m, uint32_t head, uint32_t warp)
{
    const int n_steps = heads_batch<S>::n_steps(m.n_blocks_k);
    heads_batch<S> now(m.n_blocks_k, warp), ahead(m.n_blocks_k, warp);
    uint4 raw[S::AHEAD][PIECES];

    const auto load = [&](uint4(&to)[PIECES], const heads_rows<S> &rows) {
        if (ahead.tile < rows.n_tiles && ahead.row() < rows.count(ahead.tile)) {
            const size_t row =
                (size_t)(rows.begin(ahead.tile) + ahead.row()) * a.x.ld + head * a.x_step;
#pragma unroll
            for (int i = 0; i < PIECES; i++)
                to[i] = load_eight<S::WHOLE>(a, row,
                                             ahead.k * BLOCK_K +
                                                 (i * GROUP_LANES + threadIdx.x % GROUP_LANES) *
                                                     PIECE_VALUES);
        }
        ahead.advance(m.n_blocks_k, warp);
    };

    /* the first rows need not wait for how many there are: there is memory for max_rows */
    const int n_rows = *a.n_rows;
#pragma unroll
    for (int i = 0; i < S::AHEAD; i++)
        load(raw[i], heads_rows<S>(a.max_rows));
    const heads_rows<S> rows(n_rows);
    while (now.tile < rows.n_tiles) {
#pragma unroll
        for (int i = 0; i < S::AHEAD; i++) {
            const int stage = now.tile % STAGES;
            if (now.tile >= rows.n_tiles)
                break;
            if (now.step == 0)
                barrier_wait(m.empty + stage * 8, (now.tile / STAGES % 2) ^ 1);
            if ((int)now.eight * BATCH_ROWS < rows.count(now.tile))
                round_batch(m, stage, now, raw[i], a.ue8m0);
            load(raw[i], rows);
            if (now.step == n_steps - 1) {
                fence_async_shared(); /* wgmma reads what these stores wrote */
                __syncwarp();
                if (threadIdx.x % 32 == 0)
                    barrier_arrive(m.full + stage * 8);
            }
            now.advance(m.n_blocks_k, warp);
        }
    }
}

#endif
