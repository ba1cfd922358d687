/* The matrix product kernel, first half: shapes, tiles and who works on which, the producers.
 *
 * A thread block is some consumer warpgroups and one producer warpgroup. Its shared memory is a
 * ring of stages; a stage is one block of K (128 bytes) of the tile's 128 or 192 rows of w and of
 * its rows of x. Warp 0 of the producers feeds it with the copy engine. For FP8 its warps 1 to 3
 * write a table of products x_scale * w_scale beside the stage, so that consumers multiply once,
 * and so that groups may start at any row. Consumers run wgmma on a stage, and add the result times
 * its scales to f32 sums (FP8) before they release it.
 *
 * Two forms. Swapped: rows of w on the M side of wgmma (64 a warpgroup), rows of x on N, as many as
 * there are, in steps of 8 or 16: nothing is wasted on few rows. Otherwise rows of x are on M, 64 a
 * warpgroup, and 128 or 192 rows of w on N: two scales a thread, or four, instead of one a column.
 *
 * Sums over K run in the same order in every form: the same block of K, the same promotion. */
#ifndef YARD_OPS_CUDA_GEMM_CUH
#define YARD_OPS_CUDA_GEMM_CUH

#include "ops/cuda/gemm.h"

#include "ops/cuda/ptx.cuh"
#include "ops/cuda/wgmma.cuh"

enum { WARPGROUP = 128, SCALE_THREADS = 96, PRODUCER_WARPS = 4 };

/* STEP: rows of x are rounded up to it (swapped); 0: 8, 16, 24, 32, 48, 64, 96, 128. */
template <bool FP8_, bool SWAPPED_, int WARPGROUPS_, int WIDTH_, int STEP_, int STAGES_,
          int CLUSTER_, bool SPLIT_, bool PAIRED_, int W_ROWS_ = GEMM_TILE_ROWS>
struct gemm_shape {
    static constexpr int W_ROWS = W_ROWS_; /* of w in a tile */
    static constexpr int W_SCALES = (W_ROWS + GEMM_TILE_ROWS - 1) / GEMM_TILE_ROWS;
    static constexpr bool FP8 = FP8_, SWAPPED = SWAPPED_, SPLIT = SPLIT_, PAIRED = PAIRED_;
    static constexpr bool HEADS = false; /* see yard_gemm_args */
    static constexpr int WARPGROUPS = WARPGROUPS_, WIDTH = WIDTH_, STEP = STEP_, STAGES = STAGES_,
                         CLUSTER = CLUSTER_;
    static constexpr int CONSUMERS = WARPGROUPS * WARPGROUP;
    static constexpr int THREADS = CONSUMERS + WARPGROUP;
    /* what a block starts with (168 or 128 a thread) is all that its warpgroups can share out */
    static constexpr int CONSUMER_REGISTERS = WARPGROUPS == 3 ? 152 : 224;
    static constexpr int PRODUCER_REGISTERS = 56;
    static_assert(CONSUMERS * CONSUMER_REGISTERS + WARPGROUP * PRODUCER_REGISTERS <=
                      THREADS * (65536 / THREADS / 8 * 8),
                  "registers");
    static constexpr int W_BYTES = W_ROWS * GEMM_BLOCK_BYTES;
    static constexpr int X_BYTES = WIDTH * GEMM_BLOCK_BYTES;
    static constexpr int STAGE_BYTES = W_BYTES + X_BYTES;
    static constexpr int SCALE_WIDTH = (WIDTH + 15) / 16 * 16;
    static constexpr int SCALES = FP8 ? W_SCALES * SCALE_WIDTH : 0; /* floats a stage */
    static constexpr int SCALE_BYTES = (SCALES * 4 * STAGES + 1023) / 1024 * 1024;
    static constexpr int FULL_ARRIVALS = FP8 ? 1 + SCALE_THREADS / 32 : 1;
    /* rows on M: columns of y that a warp stores at a time; three warpgroups leave less room */
    static constexpr int STORE_COLUMNS = WARPGROUPS == 3 ? 32 : 64;
    static constexpr int STORE_BYTES = SWAPPED ? 1024 : 16 * STORE_COLUMNS * 2; /* of a warp */
    static constexpr int GROUP_BYTES = GEMM_MAX_GROUPS * 8;
    static constexpr int SHARED_BYTES = 1024 + STAGES * STAGE_BYTES + SCALE_BYTES +
                                        CONSUMERS / 32 * STORE_BYTES + STAGES * 16 + 64 +
                                        (SPLIT ? 16 : GROUP_BYTES);
    static_assert(SWAPPED ? WARPGROUPS == 2 : WIDTH == 64 * WARPGROUPS, "rows of a tile");
    static_assert(!SPLIT || (WIDTH <= GEMM_SPLIT_WIDTH && CLUSTER == 1),
                  "the workspace of partial sums");
    static_assert(SHARED_BYTES <= 232448, "shared memory of a block");

    static constexpr __host__ __device__ int width_after(int w)
    {
        return STEP ? w + STEP : w < 32 ? w + 8 : w < 64 ? w + 16 : w + 32;
    }
    static constexpr int MIN_WIDTH = STEP ? STEP : 8;
};

/* Where things lie in shared memory. */
template <class S> struct gemm_shared {
    uint32_t stages, scales_address, stores, full, empty;
    float *scales;
    int32_t *first, *count; /* [n_groups] */
    uint32_t *word;         /* two, for broadcasts */

    __device__ __forceinline__ explicit gemm_shared(char *raw)
    {
        stages = (shared_address(raw) + 1023u) & ~1023u;
        char *at = raw + (stages - shared_address(raw)) + S::STAGES * S::STAGE_BYTES;
        scales = (float *)at;
        at += S::SCALE_BYTES;
        stores = shared_address(at);
        at += S::CONSUMERS / 32 * S::STORE_BYTES;
        full = shared_address(at);
        empty = full + S::STAGES * 8;
        at += S::STAGES * 16;
        word = (uint32_t *)at;
        first = (int32_t *)(at + 16);
        count = first + (S::SPLIT ? 1 : GEMM_MAX_GROUPS);
    }
    __device__ __forceinline__ uint32_t w(int stage) const
    {
        return stages + stage * S::STAGE_BYTES;
    }
    __device__ __forceinline__ uint32_t x(int stage) const
    {
        return w(stage) + S::W_BYTES;
    }
};

/* A position in the ring. */
template <class S> struct gemm_ring {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance()
    {
        if (++stage == S::STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* ---- tiles ------------------------------------------------------------------------------ */

struct gemm_tile {
    int group, w_tile;
    int row;    /* of y */
    int width;  /* rows of x that are computed */
    int n_rows; /* rows of x that count; <= width, or less than 1 */
    int k0, k1; /* blocks of K */
    int unit;   /* split: number of the tile */
};

/* i / n for 0 <= i < 2^22, n > 0. The compiler's division of whole numbers is a chain of some
 * hundred cycles, and every warp is between two tiles when it asks. */
static __device__ __forceinline__ int quick_divide(int i, int n)
{
    const int q = (int)__fdividef((float)i, (float)n); /* off by one at most */
    const int rest = i - q * n;

    return q + (rest >= n) - (rest < 0);
}

/* Contiguous ranges of n_units for n_workers: the first n_units % n_workers have one more. */
struct gemm_share {
    uint32_t n_workers, each, more;

    __device__ __forceinline__ gemm_share(uint32_t n_units, uint32_t n)
        : n_workers(n), each(n_units / n), more(n_units % n)
    {
    }
    __device__ __forceinline__ uint32_t begin(uint32_t worker) const
    {
        return worker * each + min(worker, more);
    }
    __device__ __forceinline__ uint32_t worker_of(uint32_t unit) const
    {
        const uint32_t longer = more * (each + 1);
        return unit < longer ? unit / (each + 1) : more + (unit - longer) / each;
    }
};

/* One group, K cut: the blocks of K of all tiles are one list, every thread block takes an equal
 * stretch of it, so that all of them read the same amount of w. */
template <class S> struct split_walk {
    uint32_t at, end, units; /* units of a tile */
    int n_rows, row_tiles;

    static __device__ __forceinline__ int row_tiles_of(const yard_gemm_args &a, int n_rows)
    {
        return (n_rows + a.tile_width - 1) / a.tile_width;
    }
    static __device__ __forceinline__ gemm_share share_of(const yard_gemm_args &a, int n_rows)
    {
        const uint32_t n_units =
            a.n_tiles * row_tiles_of(a, n_rows) * (a.min_blocks ? a.n_blocks : 1);
        const uint32_t wanted = n_units / (a.min_blocks ? a.min_blocks : 1);
        return { n_units, wanted < 1 ? 1 : min(wanted, gridDim.x) };
    }
    __device__ __forceinline__ split_walk(const yard_gemm_args &a, const gemm_shared<S> &m)
        : split_walk(a, m.count[0])
    {
    }
    __device__ __forceinline__ split_walk(const yard_gemm_args &a, int n)
    {
        n_rows = n;
        row_tiles = row_tiles_of(a, n);
        units = a.min_blocks ? a.n_blocks : 1;
        const gemm_share share = share_of(a, n);
        at = blockIdx.x < share.n_workers ? share.begin(blockIdx.x) : 0;
        end = blockIdx.x < share.n_workers ? share.begin(blockIdx.x + 1) : 0;
    }
    __device__ __forceinline__ bool next(const yard_gemm_args &a, const gemm_shared<S> &,
                                         gemm_tile &t)
    {
        if (at >= end)
            return false;
        t.unit = at / units;
        t.group = 0;
        t.w_tile = t.unit / row_tiles;
        const int part = t.unit % row_tiles;
        const int rounded = (n_rows + row_tiles - 1) / row_tiles;
        int width = S::MIN_WIDTH;
        while (width < rounded)
            width = S::width_after(width);
        t.row = part * rounded;
        t.n_rows = min(rounded, n_rows - t.row);
        t.width = width;
        if (units == 1) {
            t.k0 = 0;
            t.k1 = a.n_blocks;
            at++;
        } else {
            t.k0 = at % units;
            t.k1 = min(units, t.k0 + end - at);
            at += t.k1 - t.k0;
        }
        return true;
    }
};

/* Groups, swapped: a group is cut into as few tiles of rows as its count needs, evenly, and tiles
 * go round the clusters. The blocks of a cluster take neighbouring tiles of w. */
template <class S> struct even_walk {
    int group = 0, base = 0, at;

    __device__ __forceinline__ even_walk(const yard_gemm_args &, const gemm_shared<S> &)
    {
        at = blockIdx.x / S::CLUSTER;
    }
    __device__ __forceinline__ bool next(const yard_gemm_args &a, const gemm_shared<S> &m,
                                         gemm_tile &t)
    {
        const int across = (a.n_tiles + S::CLUSTER - 1) / S::CLUSTER;

        for (; group < (int)a.n_groups; group++) {
            const int count = m.count[group];
            const int row_tiles = (count + S::WIDTH - 1) / S::WIDTH;
            if (at < base + row_tiles * across) {
                const int i = at - base;
                int w_tile = i, part = 0, each = count;
                if (row_tiles > 1) {
                    w_tile = quick_divide(i, row_tiles);
                    part = i - w_tile * row_tiles;
                    each = quick_divide(count + row_tiles - 1, row_tiles);
                }
                t.width = (each + S::STEP - 1) / S::STEP * S::STEP;
                t.group = group;
                t.w_tile = w_tile * S::CLUSTER + (S::CLUSTER > 1 ? cluster_rank() : 0);
                t.row = m.first[group] + part * each;
                t.n_rows = min(each, count - part * each);
                t.k0 = 0;
                t.k1 = a.n_blocks;
                at += gridDim.x / S::CLUSTER;
                return true;
            }
            base += row_tiles * across;
        }
        return false;
    }
};

/* Groups, rows on M: tiles more than half full first, round the blocks; then the small remainders,
 * two each on the blocks that the last round left idle, because they take half the time. */
template <class S> struct full_first_walk {
    int group = 0, base = 0, round = -1, n_full, n_small;
    bool small = false;

    static __device__ __forceinline__ int full_tiles(int count)
    {
        return count / S::WIDTH + (count % S::WIDTH > S::WIDTH / 2);
    }
    static __device__ __forceinline__ int small_tiles(int count)
    {
        return count % S::WIDTH > 0 && count % S::WIDTH <= S::WIDTH / 2;
    }
    /* The whole warp. */
    __device__ __forceinline__ full_first_walk(const yard_gemm_args &a, const gemm_shared<S> &m)
    {
        int full = 0, rest = 0;

        for (uint32_t g = threadIdx.x % 32; g < a.n_groups; g += 32) {
            full += full_tiles(m.count[g]);
            rest += small_tiles(m.count[g]);
        }
        n_full = __reduce_add_sync(0xffffffffu, full) * a.n_tiles;
        n_small = __reduce_add_sync(0xffffffffu, rest) * a.n_tiles;
    }
    __device__ __forceinline__ int small_at()
    {
        const int n = gridDim.x, block = blockIdx.x;
        const int busy = n_full - quick_divide(n_full, n) * n, idle = n - busy;

        if (round < 2 && busy && block >= busy && block - busy + round * idle < n_small)
            return block - busy + round * idle;
        round = max(round, 2);
        return (busy ? 2 * idle : 0) + block + (round - 2) * n;
    }
    __device__ __forceinline__ bool next(const yard_gemm_args &a, const gemm_shared<S> &m,
                                         gemm_tile &t)
    {
        int at = blockIdx.x + ++round * gridDim.x;

        if (!small && at >= n_full) {
            small = true;
            group = base = round = 0;
        }
        if (small) {
            at = small_at();
            if (at >= n_small)
                return false;
        }
        for (;; group++) {
            const int count = m.count[group];
            const int n = small ? small_tiles(count) : full_tiles(count);
            if (at < base + n * (int)a.n_tiles) {
                const int i = at - base, w_tile = small ? i : quick_divide(i, n);
                const int part = small ? count / S::WIDTH : i - w_tile * n;
                t.group = group;
                t.w_tile = w_tile;
                t.row = m.first[group] + part * S::WIDTH;
                t.n_rows = min(S::WIDTH, count - part * S::WIDTH);
                t.width = small ? S::WIDTH / 2 : S::WIDTH;
                t.k0 = 0;
                t.k1 = a.n_blocks;
                return true;
            }
            base += n * a.n_tiles;
        }
    }
};

template <class S, bool SPLIT, bool SWAPPED> struct walk_of;
template <class S, bool SWAPPED> struct walk_of<S, true, SWAPPED> {
    typedef split_walk<S> type;
};
template <class S> struct walk_of<S, false, true> {
    typedef even_walk<S> type;
};
template <class S> struct walk_of<S, false, false> {
    typedef full_first_walk<S> type;
};
template <class S> using gemm_walk = typename walk_of<S, S::SPLIT, S::SWAPPED>::type;

/* ---- producers -------------------------------------------------------------------------- */

static __device__ __forceinline__ int x_row(const yard_gemm_args &a, int row)
{
    return a.x_index ? a.x_index[row] : row;
}

/* Which box is as high as the tile is wide; a cluster shares the load, each block takes its part.
 * Rows on M: all of the tile, or half of it. */
template <class S> __device__ __forceinline__ int box_of(int width)
{
    int box = 1;

    if constexpr (S::SWAPPED) {
        for (int w = S::MIN_WIDTH; w < width; w = S::width_after(w))
            box++;
        return box;
    }
    return width == S::WIDTH ? 1 : 2;
}

/* The first row of a tile of w, and the first column of x that its group reads. */
template <class S>
__device__ __forceinline__ uint32_t first_w_row(const yard_gemm_args &a, const gemm_tile &t)
{
    if constexpr (S::HEADS)
        return a.w_first + t.group * a.w_step + t.w_tile * GEMM_TILE_ROWS;
    else
        return (t.group + a.first_group) * a.group_rows + t.w_tile * S::W_ROWS;
}

template <class S>
__device__ __forceinline__ uint32_t first_x_column(const yard_gemm_args &a, const gemm_tile &t)
{
    return S::HEADS ? t.group * a.x_step : 0;
}

/* Copies rows of x one by one: the whole warp issues. */
template <class S>
__device__ __forceinline__ void gather_rows(const yard_gemm_maps &maps, const yard_gemm_args &a,
                                            const gemm_tile &t, uint32_t to, int k, uint32_t full,
                                            int lane)
{
    const int share = t.width / S::CLUSTER;
    const int begin = S::CLUSTER > 1 ? (int)cluster_rank() * share : 0;

    for (int i = begin + lane; i < begin + share; i += 32) {
        const int row = x_row(a, t.row + min(i, t.n_rows - 1));
        const uint32_t at = to + i * GEMM_BLOCK_BYTES, col = k * (S::FP8 ? 128 : 64);
        if (S::CLUSTER > 1)
            tma_load_multicast(at, &maps.box[0], col, row, full, (1 << S::CLUSTER) - 1);
        else
            tma_load(at, &maps.box[0], col, row, full);
    }
}

/* w of the first stages, before it is known what the kernel before this one writes: only the number
 * of rows depends on that, and not which tiles of w this block reads. One thread; the number of
 * stages it filled. */
template <class S>
__device__ __forceinline__ int load_early(const yard_gemm_maps &maps, const yard_gemm_args &a,
                                          const gemm_shared<S> &m)
{
    const uint64_t once = policy_evict_first();
    split_walk<S> walk(a, 1);
    gemm_tile t;
    int n = 0;

    while (n < S::STAGES && walk.next(a, m, t))
        for (int k = t.k0; k < t.k1 && n < S::STAGES; k++, n++) {
            barrier_expect_more(m.full + n * 8, S::W_BYTES);
            tma_load_hint(m.w(n), &maps.w, k * (S::FP8 ? 128 : 64),
                          (a.first_group * a.n_tiles + t.w_tile) * GEMM_TILE_ROWS, m.full + n * 8,
                          once);
        }
    return n;
}

/* There are no rows after all: waits for what load_early began. */
template <class S> __device__ __forceinline__ void drop_early(const gemm_shared<S> &m, int n)
{
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < S::FULL_ARRIVALS; j++)
            barrier_arrive(m.full + i * 8);
        barrier_wait(m.full + i * 8, 0);
    }
}

/* The warp that feeds the ring; one thread of it unless rows are gathered. The first n_early stages
 * have their w. */
template <class S>
__device__ __forceinline__ void load_tiles(const yard_gemm_maps &maps, const yard_gemm_args &a,
                                           const gemm_shared<S> &m, int lane, int n_early)
{
    const uint64_t once = policy_evict_first();
    gemm_walk<S> walk(a, m);
    gemm_ring<S> ring;
    gemm_tile t;

    while (walk.next(a, m, t)) {
        const int share = t.width / S::CLUSTER;
        const int part = S::CLUSTER > 1 ? (int)cluster_rank() * share : 0;
        const uint32_t w_row = first_w_row<S>(a, t), x_col = first_x_column<S>(a, t);
        const yard_tensor_map *box = &maps.box[box_of<S>(t.width)];

        for (int k = t.k0; k < t.k1; k++) {
            const uint32_t full = m.full + ring.stage * 8;
            const uint32_t col = k * (S::FP8 ? 128 : 64);
            barrier_wait(m.empty + ring.stage * 8, ring.parity ^ 1);
            if (lane == 0) {
                const bool early = S::SPLIT && n_early-- > 0;
                barrier_expect(full, (early ? 0 : S::W_BYTES) + t.width * GEMM_BLOCK_BYTES);
                if (early)
                    ;
                else if (S::W_ROWS != GEMM_TILE_ROWS)
                    for (int i = 0; i < S::W_ROWS; i += GEMM_W_BOX)
                        tma_load(m.w(ring.stage) + i * GEMM_BLOCK_BYTES, &maps.w, col, w_row + i,
                                 full);
                else if (a.w_once)
                    tma_load_hint(m.w(ring.stage), &maps.w, col, w_row, full, once);
                else
                    tma_load(m.w(ring.stage), &maps.w, col, w_row, full);
            }
            if (!S::HEADS && a.x_index) {
                __syncwarp(); /* the barrier expects bytes before any can arrive */
                gather_rows<S>(maps, a, t, m.x(ring.stage), k, full, lane);
            } else if (lane == 0) {
                const uint32_t to = m.x(ring.stage) + part * GEMM_BLOCK_BYTES;
                if (S::CLUSTER > 1)
                    tma_load_multicast(to, box, col, t.row + part, full, (1 << S::CLUSTER) - 1);
                else
                    tma_load(to, box, x_col + col, t.row, full);
            }
            ring.advance();
        }
    }
}

/* Swapped consumers read the scales of columns 8 j + 2 q (+ 1) and of 8 (j + 1) + .. as one 16-byte
 * piece, q = lane % 4. */
template <class S> __device__ __forceinline__ int scale_place(int row)
{
    const int j = row / 8, q = row % 8 / 2;

    return S::SWAPPED ? (j / 2 * 4 + q) * 4 + j % 2 * 2 + row % 2 : row;
}

/* Scales of up to four blocks of K: of the rows of x of one thread, and of w. */
template <class S> struct scale_chunk {
    static constexpr int EACH = (S::WIDTH + SCALE_THREADS - 1) / SCALE_THREADS;
    float x[EACH][4], w[S::W_SCALES][4];
};

/* The rows of one thread of the warps that write scale products. */
template <class S> struct scale_rows {
    static constexpr int EACH = scale_chunk<S>::EACH;
    const float *x[EACH], *w[S::W_SCALES];
    int place[EACH]; /* in the table; negative: none */
    bool aligned;

    __device__ __forceinline__ scale_rows(const yard_gemm_args &a, const gemm_tile &t, int id)
    {
        const int group_tiles = a.group_rows / GEMM_TILE_ROWS;
        const size_t first = (size_t)(t.group + a.first_group) * group_tiles;

        /* rows of w beyond the last one (odd counts in clusters) compute nothing of use */
#pragma unroll
        for (int i = 0; i < S::W_SCALES; i++) {
            const int tile = t.w_tile * S::W_ROWS / GEMM_TILE_ROWS + i;
            w[i] = a.w_scale + (first + min(tile, group_tiles - 1)) * a.n_blocks;
        }
        aligned = a.n_blocks % 4 == 0 && (uint64_t)a.x_scale % 16 == 0;
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int row = id + e * SCALE_THREADS, last = max(t.n_rows - 1, 0);
            place[e] = row < t.width ? scale_place<S>(row) : -1;
            x[e] = a.x_scale + (size_t)x_row(a, t.row + min(row, last)) * a.n_blocks;
        }
    }
    /* How many blocks are read together: up to the next multiple of four. */
    static __device__ __forceinline__ int chunk_at(int k, int end)
    {
        return min(4 - k % 4, end - k);
    }
    /* Four in one load where they can be: a load of 4 bytes from each of 32 rows takes as much of
     * shared memory's bandwidth, of which the matrix instructions leave little. */
    static __device__ __forceinline__ void load_row(float (&to)[4], const float *at, int n,
                                                    bool whole)
    {
        if (whole) {
            const float4 v = __ldg((const float4 *)at);
            to[0] = v.x;
            to[1] = v.y;
            to[2] = v.z;
            to[3] = v.w;
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            to[i] = i < n ? __ldg(at + i) : 0.0f;
    }
    __device__ __forceinline__ void load(scale_chunk<S> &c, int k, int n) const
    {
#pragma unroll
        for (int i = 0; i < S::W_SCALES; i++)
            load_row(c.w[i], w[i] + k, n, aligned && n == 4);
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (place[e] >= 0)
                load_row(c.x[e], x[e] + k, n, aligned && n == 4);
    }
    /* The products of one block of K, to the next stage. */
    __device__ __forceinline__ void put(const gemm_shared<S> &m, gemm_ring<S> &ring,
                                        const scale_chunk<S> &c, int i) const
    {
        barrier_wait(m.empty + ring.stage * 8, ring.parity ^ 1);
#pragma unroll
        for (int e = 0; e < EACH; e++)
#pragma unroll
            for (int s = 0; s < S::W_SCALES; s++)
                if (place[e] >= 0)
                    m.scales[ring.stage * S::SCALES + s * S::SCALE_WIDTH + place[e]] =
                        c.x[e][i] * c.w[s][i];
        __syncwarp();
        if (threadIdx.x % 32 == 0)
            barrier_arrive(m.full + ring.stage * 8);
        ring.advance();
    }
};

/* The warps that write scale products; id is 0 to 95. While one chunk is written the next one is
 * on its way. */
template <class S>
__device__ __forceinline__ void load_scales(const yard_gemm_args &a, const gemm_shared<S> &m,
                                            int id)
{
    gemm_walk<S> walk(a, m);
    gemm_ring<S> ring;
    gemm_tile t;

    while (walk.next(a, m, t)) {
        const scale_rows<S> rows(a, t, id);
        scale_chunk<S> now, next;
        int n = rows.chunk_at(t.k0, t.k1), n_next;

        rows.load(now, t.k0, n);
        for (int k = t.k0; k < t.k1; k += n, n = n_next, now = next) {
            n_next = rows.chunk_at(k + n, t.k1);
            if (n_next > 0)
                rows.load(next, k + n, n_next);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (i < n)
                    rows.put(m, ring, now, i);
        }
    }
}

#endif
