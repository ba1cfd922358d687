/* The matrix product kernel: its tiles, and which thread block works on which. */
#ifndef YARD_OPS_CUDA_GEMM_TILES_CUH
#define YARD_OPS_CUDA_GEMM_TILES_CUH

#include "ops/cuda/gemm_shape.cuh"

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
        t.row = part * rounded;
        t.n_rows = min(rounded, n_rows - t.row);
        t.width = S::width_of(rounded);
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
                t.width = S::width_of(each);
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

/* Groups, rows on M: tiles more than half full go round the blocks. Small remainders take half the
 * time: two each go to the blocks that the last round leaves idle. Others have one between two full
 * tiles of theirs, where that is differs: a remainder reads w for few products, and memory would
 * not keep up with all of them at once. What is left goes round at the end. */
template <class S> struct full_first_walk {
    int full_group = 0, full_base = 0; /* the next full tile's group, tiles of those before it */
    int rest_group = 0, rest_base = 0; /* the same of small ones */
    int n_full, n_small, busy;         /* busy: blocks that the last round has work for; 0: all */
    int round = 0, small_round;
    int between = -1; /* the round that one small tile comes before */

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
        const int n = gridDim.x, block = blockIdx.x;
        int n_tall = 0, n_rest = 0;

        for (uint32_t g = threadIdx.x % 32; g < a.n_groups; g += 32) {
            n_tall += full_tiles(m.count[g]);
            n_rest += small_tiles(m.count[g]);
        }
        n_full = __reduce_add_sync(0xffffffffu, n_tall) * a.n_tiles;
        n_small = __reduce_add_sync(0xffffffffu, n_rest) * a.n_tiles;

        const int rounds = quick_divide(n_full, n);
        busy = n_full - rounds * n;
        small_round = busy && block >= busy ? 0 : 2;
        const int others = min(n_small + block - small_at(2), n);
        if (small_round == 2 && block < others && rounds > 0) /* in order: neighbours share w */
            between = quick_divide(block * (rounds + (block < busy)), others);
    }
    /* Number of the block's small tile of that round; the first two are for idle blocks. */
    __device__ __forceinline__ int small_at(int i) const
    {
        const int n = gridDim.x, block = blockIdx.x, idle = busy ? n - busy : 0;

        return i < 2 ? block - busy + i * idle : 2 * idle + block + (i - 2) * n;
    }
    __device__ __forceinline__ bool next(const yard_gemm_args &a, const gemm_shared<S> &m,
                                         gemm_tile &t)
    {
        int at = blockIdx.x + round * gridDim.x;
        const bool small = at >= n_full || round == between;

        if (small) {
            between = -1;
            at = small_at(small_round++);
            if (at >= n_small)
                return false;
        } else {
            round++;
        }
        int group = small ? rest_group : full_group, base = small ? rest_base : full_base;
        for (;; group++) {
            const int count = m.count[group];
            const int n = small ? small_tiles(count) : full_tiles(count);
            if (at < base + n * (int)a.n_tiles) {
                const int i = at - base, w_tile = small ? i : quick_divide(i, n);
                const int part = small ? count / S::WIDTH : i - w_tile * n;
                full_group = small ? full_group : group;
                full_base = small ? full_base : base;
                rest_group = small ? group : rest_group;
                rest_base = small ? base : rest_base;
                t.group = group;
                t.w_tile = w_tile;
                t.row = m.first[group] + part * S::WIDTH;
                t.n_rows = min(S::WIDTH, count - part * S::WIDTH);
                t.width = S::width_of(t.n_rows);
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

/* The tiles of w that a block reads where rows are one tile at most, however many they are. */
template <class S> struct early_walk {
    uint32_t at;

    __device__ __forceinline__ explicit early_walk(const yard_gemm_args &) : at(blockIdx.x)
    {
    }
    __device__ __forceinline__ bool next(const yard_gemm_args &a, const gemm_shared<S> &,
                                         gemm_tile &t)
    {
        if (at >= a.n_groups * a.n_tiles)
            return false;
        t.group = at / a.n_tiles;
        t.w_tile = at % a.n_tiles;
        t.k0 = 0;
        t.k1 = a.n_blocks;
        at += gridDim.x;
        return true;
    }
};
template <class S> __device__ __forceinline__ auto first_tiles(const yard_gemm_args &a)
{
    if constexpr (S::SPLIT)
        return split_walk<S>(a, 1);
    else
        return early_walk<S>(a);
}

#endif
