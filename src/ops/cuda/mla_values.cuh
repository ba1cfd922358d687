/* The other two warpgroups of MLA decode: weights times latents, 256 columns each. */
#ifndef YARD_OPS_CUDA_MLA_VALUES_CUH
#define YARD_OPS_CUDA_MLA_VALUES_CUH

#include "ops/cuda/mla_join.cuh"
#include "ops/cuda/mla_pair.cuh"
#include "ops/cuda/mla_widen.cuh"
#include "ops/cuda/softmax.cuh"
#include "ops/cuda/wgmma_attend.cuh"

/* The stage of the tile that was just multiplied takes the next one, once both halves are done. */
template <bool FP8>
static __device__ __forceinline__ void refill(const yard_mla_decode_maps &maps,
                                              const yard_mla_decode_task &t, const decode_shared &m,
                                              const block_share &b, uint32_t tile, uint32_t stage)
{
    if (threadIdx.x / 32 != 4)
        return;
    if (threadIdx.x == 128) {
        barrier_wait(m.values_done, tile & 1);
        feed_tile<FP8>(maps, t, m, b, stage);
    }
    __syncwarp();
}

/* First column of a query row's result: in its room if it is a part, or in y. */
static __device__ __forceinline__ uint16_t *result_of(const yard_mla_decode_task &t,
                                                      const block_share &b, const mla_item &item,
                                                      uint32_t row, bool is_part, bool *wanted)
{
    const uint32_t idx = b.lane * MLA_ROWS + row, n_rows = item.row_and_count % 8;

    *wanted = is_part || idx < n_rows * t.n_heads;
    if (is_part)
        return (uint16_t *)t.space.partial +
               (((size_t)item.slot * b.lanes + b.lane) * MLA_ROWS + row) * MLA_RANK;
    return (uint16_t *)t.y.data + (size_t)(item.row_and_count / 8 + idx / t.n_heads) * t.y.ld +
           idx % t.n_heads * MLA_RANK;
}

/* One of the two parts of a row: joined with the other if that is there. */
static __device__ __forceinline__ void finish_pair(const yard_mla_decode_task &t,
                                                   const decode_shared &m, const block_share &b,
                                                   uint32_t half, const float (&d)[128])
{
    const mla_item &item = item_at(m, 0);
    const uint32_t row = this_thread() % 128 / 32 * 16 + this_thread() % 32 / 4;
    volatile const float *inverse = (const float *)(m.bytes + INVERSE_AT) + row;
    uint32_t x[64];
    bool wanted0, wanted1;

    round_rows(x, d, inverse[0], inverse[8]);
    const pair_place p = pair_of(t, b, item);
    if (!is_second(p, x))
        return;
    join_pair(t, p, row, x);
    uint16_t *to0 = result_of(t, b, item, row, false, &wanted0) + half * 256;
    uint16_t *to1 = result_of(t, b, item, row + 8, false, &wanted1) + half * 256;
    store_rounded<0>(x, to0, wanted0);
    store_rounded<1>(x, to1, wanted1);
}

/* The first tiles; one warp. */
template <bool FP8>
static __device__ __forceinline__ void feed_first(const yard_mla_decode_maps &maps,
                                                  const yard_mla_decode_task &t,
                                                  const decode_shared &m, const block_share &b)
{
    volatile feed *f = (volatile feed *)(m.bytes + FEED_AT);
    const bool feeds = threadIdx.x % 32 == 0;

    if (b.n_items == 0)
        return;
    if (feeds) {
        f->item = 0;
        feed_item(t, m, b, f);
        wait_previous_kernel();
        feed_tile<FP8>(maps, t, m, b, 0);
    }
    __syncwarp();
    named_sync(QUERIES_TAKEN, 128 + 32); /* the last stage is free, and no query waits for a tile */
    if (feeds)
        for (uint32_t i = 1; i < STAGES; i++)
            feed_tile<FP8>(maps, t, m, b, i);
    __syncwarp();
}

/* half: which 256 columns of the latents. */
template <bool FP8>
static __device__ __forceinline__ void
compute_values(const yard_mla_decode_maps &maps, const yard_mla_decode_task &t,
               const decode_shared &m, const block_share &b, uint32_t half)
{
    const uint32_t row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const float *shrink = (const float *)(m.bytes + SHRINK_AT) + row;
    const float *inverse = (const float *)(m.bytes + INVERSE_AT) + row;
    uint32_t tiles = 0, stage = 0;
    float d[128];

    if (threadIdx.x / 32 == 4)
        feed_first<FP8>(maps, t, m, b);
    wait_previous_kernel(); /* the kernel ahead may still read partial results, or y */
    if (FP8)
        widen_first(m, b);
    for (uint32_t i = 0; i < b.n_items; i++) {
        uint32_t n_left = 0, used;
        for (int is_first = 1;; is_first = 0) {
            const uint64_t weights =
                wgmma_descriptor(m.base + stage * TILE_BYTES + ROPE_CHUNK * CHUNK_BYTES);
            const uint64_t values = wgmma_descriptor_rows(
                m.base + stage * TILE_BYTES + half * (ROPE_CHUNK / 2) * CHUNK_BYTES, CHUNK_BYTES);
            barrier_wait(m.weights_ready, tiles & 1);
            if (is_first)
                n_left = item_at(m, i).end_tile - item_at(m, i).first_tile;
            else
                shrink_rows(d,
                            make_float2(*(volatile const float *)(shrink + (tiles & 1) * 64),
                                        *(volatile const float *)(shrink + (tiles & 1) * 64 + 8)));
            pin(d);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < YARD_PAGE_TOKENS / 16; k++)
                multiply_rows_256(d, weights + 2 * k, values + 128 * k, k > 0 || !is_first);
            wgmma_commit();
            if (FP8)
                widen_ahead(m, b, i, n_left, tiles, stage);
            wgmma_wait<0>();
            pin(d);
            used = stage;
            tiles++;
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            if (--n_left == 0)
                break;
            arrive_warp(m.values_done);
            refill<FP8>(maps, t, m, b, tiles - 1, used);
        }
        const float f0 = *(volatile const float *)inverse;
        const float f1 = *(volatile const float *)(inverse + 8);
        arrive_warp(m.values_done);
        refill<FP8>(maps, t, m, b, tiles - 1, used);
        const mla_item &done = item_at(m, i);
        if (done.n_parts == ITEM_PAIR) { /* the block's only item */
            finish_pair(t, m, b, half, d);
            return;
        }
        bool wanted0, wanted1;
        uint16_t *to0 = result_of(t, b, done, row, done.slot >= 0, &wanted0) + half * 256;
        uint16_t *to1 = result_of(t, b, done, row + 8, done.slot >= 0, &wanted1) + half * 256;
        store_row<0>(d, f0, to0, wanted0);
        store_row<1>(d, f1, to1, wanted1);
        __syncwarp(); /* the item is read again: no register is left to keep it */
        if (item_at(m, i).n_parts) {
            join_own(t, b, item_at(m, i));
#pragma unroll
            for (int k = 0; k < 128; k++) /* so that no register is kept over the join */
                d[k] = 0.0f;
        }
    }
}

/* The warpgroup of the half that the block has not: it takes part in what both do. */
template <bool FP8>
static __device__ __forceinline__ void skip_values(const yard_mla_decode_maps &maps,
                                                   const yard_mla_decode_task &t,
                                                   const decode_shared &m, const block_share &b)
{
    uint32_t tiles = 0, stage = 0;

    if (threadIdx.x / 32 == 4)
        feed_first<FP8>(maps, t, m, b);
    wait_previous_kernel();
    if (FP8)
        widen_first(m, b);
    for (uint32_t i = 0; i < b.n_items; i++) {
        uint32_t n_left = 0;
        do {
            barrier_wait(m.weights_ready, tiles & 1);
            n_left = n_left ? n_left : item_at(m, i).end_tile - item_at(m, i).first_tile;
            if (FP8)
                widen_ahead(m, b, i, n_left, tiles, stage);
            arrive_warp(m.values_done);
            refill<FP8>(maps, t, m, b, tiles, stage);
            tiles++;
            stage = stage == STAGES - 1 ? 0 : stage + 1;
        } while (--n_left);
    }
}

#endif
