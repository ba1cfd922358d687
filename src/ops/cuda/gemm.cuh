/* The matrix product kernel, first half: the producers.
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

#include "ops/cuda/gemm_tiles.cuh"

static __device__ __forceinline__ int x_row(const yard_gemm_args &a, int row)
{
    return a.x_index ? a.x_index[row] : row;
}

/* Which box is as high as the tile is wide. A cluster shares the load, each block takes its part.
 */
template <class S> __device__ __forceinline__ int box_of(int width)
{
    if constexpr (S::STEP > 0) {
        return width / S::STEP;
    } else {
        int box = 1;
        for (int w = S::MIN_WIDTH; w < width; w = S::width_after(w))
            box++;
        return box;
    }
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

/* One block of K of a tile's rows of w. */
template <class S>
__device__ __forceinline__ void load_w(const yard_gemm_maps &maps, const yard_gemm_args &a,
                                       const gemm_shared<S> &m, int stage, int k, uint32_t w_row,
                                       uint64_t once)
{
    const uint32_t full = m.full + stage * 8, col = k * (S::FP8 ? 128 : 64);

    if (S::W_ROWS != GEMM_TILE_ROWS)
        for (int i = 0; i < S::W_ROWS; i += GEMM_W_BOX)
            tma_load(m.w(stage) + i * GEMM_BLOCK_BYTES, &maps.w, col, w_row + i, full);
    else if (a.w_once)
        tma_load_hint(m.w(stage), &maps.w, col, w_row, full, once);
    else
        tma_load(m.w(stage), &maps.w, col, w_row, full);
}

/* w of the first stages, before it is known what the kernel before this one writes: only the number
 * of rows depends on that, and not which tiles of w this block reads. One thread; the number of
 * stages it filled. */
template <class S>
__device__ __forceinline__ int load_early(const yard_gemm_maps &maps, const yard_gemm_args &a,
                                          const gemm_shared<S> &m)
{
    const uint64_t once = policy_evict_first();
    auto walk = first_tiles<S>(a);
    gemm_tile t;
    int n = 0;

    while (n < S::STAGES && walk.next(a, m, t))
        for (int k = t.k0; k < t.k1 && n < S::STAGES; k++, n++) {
            barrier_expect_more(m.full + n * 8, S::W_BYTES);
            load_w(maps, a, m, n, k, first_w_row<S>(a, t), once);
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
 * (lane 0 knows how many) have their w. */
template <class S>
__device__ __forceinline__ void load_tiles(const yard_gemm_maps &maps, const yard_gemm_args &a,
                                           const gemm_shared<S> &m, int lane, int n_early)
{
    const uint64_t once = policy_evict_first();
    gemm_walk<S> walk(a, m);
    gemm_ring<S> ring;
    gemm_tile t;

    n_early = __shfl_sync(0xffffffffu, n_early, 0); /* the same in all lanes, as the ring is */
    while (walk.next(a, m, t)) {
        const int share = t.width / S::CLUSTER;
        const int part = S::CLUSTER > 1 ? (int)cluster_rank() * share : 0;
        const uint32_t w_row = first_w_row<S>(a, t), x_col = first_x_column<S>(a, t);
        const yard_tensor_map *box = &maps.box[box_of<S>(t.width)];

        for (int k = t.k0; k < t.k1; k++) {
            const uint32_t full = m.full + ring.stage * 8;
            const uint32_t col = k * (S::FP8 ? 128 : 64);
            const bool early = S::EARLY && n_early-- > 0;
            barrier_wait(m.empty + ring.stage * 8, ring.parity ^ 1);
            if (lane == 0) {
                barrier_expect(full, (early ? 0 : S::W_BYTES) + t.width * GEMM_BLOCK_BYTES);
                if (!early)
                    load_w(maps, a, m, ring.stage, k, w_row, once);
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
