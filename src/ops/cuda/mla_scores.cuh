/* The first warpgroup of MLA decode: scores, softmax, weights. */
#ifndef YARD_OPS_CUDA_MLA_SCORES_CUH
#define YARD_OPS_CUDA_MLA_SCORES_CUH

#include "ops/cuda/mla_tiles.cuh"
#include "ops/cuda/softmax.cuh"
#include "ops/cuda/wgmma_attend.cuh"

/* Positions that the query row sees. */
static __device__ __forceinline__ int seen_by(const yard_mla_decode_task &t, uint32_t first,
                                              uint32_t n, uint32_t idx)
{
    return idx < n * t.n_heads ? t.batch.position[first + idx / t.n_heads] + 1 : 0;
}

/* Queries that are in shared memory, but for the rotated ones, which are where they belong; their
 * stage is the copy engine's then. */
static __device__ __forceinline__ void take_queries(const decode_shared &m,
                                                    uint32_t (&q)[4 * REGISTER_STEPS])
{
    const uint32_t thread = threadIdx.x % 128, lane = thread % 32;
    const uint32_t row = thread / 32 * 16 + lane % 16; /* of ldmatrix */
    const uint32_t from =
        m.base + QUERIES_AT + row / 8 * BOX_BYTES + row % 8 * 128 + (lane / 16 ^ row % 8) * 16;
    const uint32_t last = QUERIES_AT + thread % 64 / 8 * BOX_BYTES + 7 * BOX_ROW_BYTES +
                          thread % 8 * 128 + (6 + thread / 64 ^ thread % 8) * 16;

    barrier_wait(m.queries_here, 0);
#pragma unroll
    for (int k = 0; k < REGISTER_STEPS; k++)
        load_matrix((from ^ k % 4 * 32) + k / 4 * BOX_ROW_BYTES, q + 4 * k);
    *(uint4 *)(m.bytes + STEP_AT + thread * 16) = *(const uint4 *)(m.bytes + last);
    fence_async_shared(); /* wgmma reads what this store wrote */
    named_sync(QUERIES_STORED, 128);
}

static __device__ __forceinline__ void load_queries(const yard_mla_decode_task &t,
                                                    const decode_shared &m, const mla_item &item,
                                                    uint32_t idx0,
                                                    uint32_t (&q)[4 * REGISTER_STEPS])
{
    const uint32_t thread = threadIdx.x % 128, lane = thread % 32;
    const uint32_t first = item.row_and_count / 8, n = item.row_and_count % 8;
    const uint32_t row = thread / 32 * 16 + lane / 4;
    const uint32_t *a = (const uint32_t *)query_of(t, first, n, idx0 + row).latent + lane % 4;
    const uint32_t *b = (const uint32_t *)query_of(t, first, n, idx0 + row + 8).latent + lane % 4;
    uint4 rotated[4];

#pragma unroll
    for (int k = 0; k < REGISTER_STEPS; k++) {
        q[4 * k] = __ldg(a + 8 * k);
        q[4 * k + 1] = __ldg(b + 8 * k);
        q[4 * k + 2] = __ldg(a + 8 * k + 4);
        q[4 * k + 3] = __ldg(b + 8 * k + 4);
    }
    const uint4 step = *(const uint4 *)(query_of(t, first, n, idx0 + thread % 64).latent +
                                        REGISTER_STEPS * 16 + thread / 64 * 8);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t at = thread + 128 * i;
        rotated[i] = *(const uint4 *)(query_of(t, first, n, idx0 + at / 8).rotated + at % 8 * 8);
    }
    named_sync(QUERIES_STORED, 128); /* all warps have multiplied with the queries that lie there */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t at = thread + 128 * i, r = at / 8, piece = at % 8;
        *(uint4 *)(m.bytes + ROPE_AT + r * 128 + (piece ^ r % 8) * 16) = rotated[i];
    }
    *(uint4 *)(m.bytes + STEP_AT + thread * 16) = step;
    fence_async_shared(); /* wgmma reads what these stores wrote */
    named_sync(QUERIES_STORED, 128);
}

/* The rows of item i into L2, if they are others than those loaded; its record is there with the
 * item before. */
static __device__ __forceinline__ void prefetch_queries(const yard_mla_decode_task &t,
                                                        const decode_shared &m,
                                                        const block_share &b, uint32_t i,
                                                        uint32_t loaded)
{
    const uint32_t thread = threadIdx.x % 128;

    if (i >= b.n_items || item_at(m, i).row_and_count == loaded)
        return;
    const mla_item &item = item_at(m, i);
    const query_row q =
        query_of(t, item.row_and_count / 8, item.row_and_count % 8, b.lane * MLA_ROWS + thread / 2);
#pragma unroll
    for (int k = 0; k < 4; k++)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(q.latent + thread % 2 * 256 + k * 64));
    if (thread % 2)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(q.rotated));
}

/* Latents of positions [n, 64) of a tile become zeros: their weights are 0, but what lies there may
 * be no number. */
static __device__ __forceinline__ void clear_tail(const decode_shared &m, uint32_t stage, int n)
{
    const uint32_t piece = threadIdx.x % 64, to = stage * TILE_BYTES + piece / 8 * CHUNK_BYTES;

    for (int row = n + threadIdx.x % 128 / 64; row < YARD_PAGE_TOKENS; row += 2)
        *(uint4 *)(m.bytes + to + row * 128 + piece % 8 * 16) = make_uint4(0, 0, 0, 0);
}

static __device__ __forceinline__ void issue_scores(const decode_shared &m, float (&d)[32],
                                                    const uint32_t (&q)[4 * REGISTER_STEPS],
                                                    uint32_t stage, uint32_t phase)
{
    const uint64_t keys = wgmma_descriptor(m.base + stage * TILE_BYTES);
    const uint64_t rope = wgmma_descriptor(m.base + ROPE_AT);
    const uint64_t step = wgmma_descriptor_step(m.base + STEP_AT);

    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; k++) {
        const uint64_t key = keys + k / 4 * (CHUNK_BYTES / 16) + k % 4 * 2;
        if (k % PART_STEPS == 0)
            barrier_wait(m.full + 8 * (stage * PARTS + k / PART_STEPS), phase);
        if (k < REGISTER_STEPS)
            multiply_registers_64(d, q + 4 * (k < REGISTER_STEPS ? k : 0), key, k > 0);
        else
            wgmma<false, 64>::issue(d, k == REGISTER_STEPS ? step : rope + k % 4 * 2, key, 1);
        if (k == STEPS - 1 - TAIL_STEPS)
            wgmma_commit();
    }
    wgmma_commit();
}

static __device__ __forceinline__ void store_weights(const float (&d)[32], uint32_t to)
{
#pragma unroll
    for (int j = 0; j < 4; j++)
        store_matrix(to ^ j * 32, pack_bf16(d[8 * j], d[8 * j + 1]),
                     pack_bf16(d[8 * j + 2], d[8 * j + 3]), pack_bf16(d[8 * j + 4], d[8 * j + 5]),
                     pack_bf16(d[8 * j + 6], d[8 * j + 7]));
}

static __device__ __forceinline__ void compute_scores(const yard_mla_decode_maps &maps,
                                                      const yard_mla_decode_task &t,
                                                      const decode_shared &m, const block_share &b)
{
    const uint32_t thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    const uint32_t row = warp * 16 + lane / 4;
    const uint32_t matrix_row = warp * 16 + lane % 16; /* of stmatrix */
    const uint32_t weights = m.base + ROPE_CHUNK * CHUNK_BYTES + matrix_row * 128 +
                             ((lane / 16) ^ (matrix_row % 8)) * 16;
    uint32_t tiles = 0, stage = 0, phase = 0; /* tiles: so far, over all items */

    uint32_t q[4 * REGISTER_STEPS], loaded = 0xffffffffu; /* of which rows */
    int n0 = 0, n1 = 0; /* positions from here on that the thread's two rows see */

    wait_previous_kernel();
    allow_next_kernel(); /* later than the wait: see yard_mla_workspace */
    if (t.boxes && b.n_items && lane == 0)
        feed_queries(maps, t, m, b);
    __syncwarp();
    for (uint32_t i = 0; i < b.n_items; i++) {
        row_state s0 = { lowest_log2, 0.0f }, s1 = { lowest_log2, 0.0f };
        float d[32];

        if (i > 0) /* the item is there with its first tile */
            barrier_wait(m.full + 8 * stage * PARTS, phase);
        const mla_item item = item_at(m, i);
        int n_left = item.end_tile - item.first_tile;
        if (item.row_and_count != loaded) { /* parts of one row come one after another */
            const uint32_t first = item.row_and_count / 8, n = item.row_and_count % 8;
            const int start = item.first_tile * YARD_PAGE_TOKENS + (int)(lane % 4 * 2);
            n0 = seen_by(t, first, n, b.lane * MLA_ROWS + row) - start;
            n1 = seen_by(t, first, n, b.lane * MLA_ROWS + row + 8) - start;
            if (t.boxes && i == 0)
                take_queries(m, q);
            else
                load_queries(t, m, item, b.lane * MLA_ROWS, q);
            if (i == 0)
                named_arrive(QUERIES_TAKEN, 128 + 32);
            loaded = item.row_and_count;
        }
        prefetch_queries(t, m, b, i + 1, loaded);
        for (bool is_first = true;; is_first = false) {
            issue_scores(m, d, q, stage, phase);
            /* shrink factors of two tiles ago are free to be overwritten; for an item's first tile
             * that was waited for at the end of the item before */
            if (tiles >= 2 && !is_first)
                barrier_wait(m.values_done, tiles & 1);
            wgmma_wait<1>();
            if (!is_first)
                arrive_warp(m.weights_ready); /* the tile before */
            wgmma_wait<0>();
            pin(d);
            const float2 factor = soften(d, s0, s1, t.scale_log2, n0, n1);
            if (lane % 4 == 0) {
                float *shrink = (float *)(m.bytes + SHRINK_AT) + (tiles & 1) * 64 + row;
                shrink[0] = factor.x;
                shrink[8] = factor.y;
            }
            store_weights(d, weights + stage * TILE_BYTES);
            if (n_left == 1) {
                const int end = item_at(m, i).last_positions;
                if (end < YARD_PAGE_TOKENS)
                    clear_tail(m, stage, end);
            }
            fence_async_shared(); /* wgmma reads weights and zeros */
            tiles++;
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            phase ^= stage == 0;
            n0 -= YARD_PAGE_TOKENS;
            n1 -= YARD_PAGE_TOKENS;
            if (--n_left == 0)
                break;
        }
        /* the last tile goes over with the factors that end the item */
        if (tiles >= 2)
            barrier_wait(m.values_done, tiles & 1);
        s0.sum = row_sum(s0.sum);
        s1.sum = row_sum(s1.sum);
        if (lane % 4 == 0) {
            float *inverse = (float *)(m.bytes + INVERSE_AT) + row;
            inverse[0] = s0.sum > 0.0f ? 1.0f / s0.sum : 0.0f;
            inverse[8] = s1.sum > 0.0f ? 1.0f / s1.sum : 0.0f;
            const int32_t slot = item_at(m, i).slot;
            if (slot >= 0) {
                float *lse = t.space.lse + ((size_t)slot * b.lanes + b.lane) * MLA_ROWS + row;
                lse[0] = s0.reference + log2f(s0.sum);
                lse[8] = s1.reference + log2f(s1.sum);
            }
        }
        arrive_warp(m.weights_ready);
    }
}

#endif
