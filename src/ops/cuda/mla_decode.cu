#include "ops/cuda/mla_decode.h"

#include "ops/cuda/mla_join.cuh"
#include "ops/cuda/mla_plan.cuh"
#include "ops/cuda/softmax.cuh"
#include "ops/cuda/wgmma_attend.cuh"

/* A block has 64 query rows and walks over tiles of 64 positions with three warpgroups: one
 * computes scores and weights, the other two multiply the weights with 256 columns of the latents
 * each, and one of their threads asks the copy engine for the next tiles.
 *
 * Queries stay in registers, all but the last steps, so that three tiles fit into shared memory. A
 * tile's weights are written over its own rotated keys, which nobody needs once there are scores:
 * they live as long as the tile. Weights of a tile are handed over only when most of the next
 * tile's scores are on their way, so that the softmax runs beneath the other product. */
enum {
    STAGES = 3,
    CHUNK_BYTES = 8192, /* 64 positions by 64 columns, rows of 128 bytes, swizzled */
    ROPE_CHUNK = MLA_RANK / 64,
    TILE_CHUNKS = MLA_WIDTH / 64,
    TILE_BYTES = TILE_CHUNKS * CHUNK_BYTES,
    PARTS = 3, /* a tile arrives in thirds, each with a barrier */
    PART_CHUNKS = TILE_CHUNKS / PARTS,
    PART_BYTES = PART_CHUNKS * CHUNK_BYTES,
    STEPS = MLA_WIDTH / 16,     /* of K, of scores */
    PART_STEPS = STEPS / PARTS, /* of a third */
    REGISTER_STEPS = 31,        /* queries in registers; then one step, then the rotated ones */
    TAIL_STEPS = 12,            /* of the next scores under way when values may start */
    SCORE_REGISTERS = 184,
    VALUE_REGISTERS = 160, /* the assembler wants that many for 256 columns */
    VALUE_WARPS = 8,

    ROPE_AT = STAGES * TILE_BYTES,   /* rotated queries, as a chunk */
    STEP_AT = ROPE_AT + CHUNK_BYTES, /* queries of step 31, without swizzle */
    SHRINK_AT = STEP_AT + 2048,      /* [2][64] f32 */
    INVERSE_AT = SHRINK_AT + 512,    /* [64] f32 */
    BARRIERS_AT = INVERSE_AT + 256,
    FEED_AT = BARRIERS_AT + 8 * (STAGES * PARTS + 3), /* one spare: 16 bytes aligned items */
    ITEMS_AT = FEED_AT + 32,
    SHARED_BYTES = ITEMS_AT + SHARED_ITEMS * MLA_ITEM_BYTES
};
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory of a block");
static_assert(sizeof(mla_item) == MLA_ITEM_BYTES && sizeof(mla_splits) == MLA_SPLIT_BYTES, "sizes");

struct decode_shared {
    uint8_t *bytes;
    uint32_t base, full, weights_ready, values_done;

    __device__ __forceinline__ explicit decode_shared(uint8_t *raw)
    {
        bytes = raw;
        base = shared_address(raw);
        full = base + BARRIERS_AT;
        weights_ready = full + 8 * STAGES * PARTS;
        values_done = weights_ready + 8;
    }
};

/* The block's place: which items, which of the pieces' heads. */
struct block_share {
    const mla_item *list;
    uint32_t n_items, lane, lanes;
};

static __device__ __forceinline__ mla_item item_at(const decode_shared &m, const block_share &b,
                                                   uint32_t i)
{
    return i < SHARED_ITEMS ? ((const mla_item *)(m.bytes + ITEMS_AT))[i] : b.list[i];
}

/* ---- the copy engine ------------------------------------------------------------------------- */

/* The producer's place, in shared memory: one thread's registers are a warpgroup's. */
struct feed {
    uint32_t item, tile, end;
    int32_t page;
    const int32_t *pages;
};
static_assert(sizeof(feed) == 24, "FEED_AT");

static __device__ __forceinline__ void feed_item(const yard_mla_decode_task &t,
                                                 const decode_shared &m, const block_share &b,
                                                 volatile feed *f)
{
    if (f->item >= b.n_items)
        return;
    const mla_item item = item_at(m, b, f->item);
    const int32_t *pages =
        t.batch.page_table + (size_t)t.batch.seq[item.row_and_count / 8] * t.batch.page_table_ld;
    f->tile = item.first_tile;
    f->end = item.end_tile;
    f->pages = pages;
    f->page = pages[item.first_tile];
}

/* Asks for the next tile, if there is one. */
static __device__ __forceinline__ void feed_tile(const yard_tensor_map *map,
                                                 const yard_mla_decode_task &t,
                                                 const decode_shared &m, const block_share &b,
                                                 uint32_t stage)
{
    volatile feed *f = (volatile feed *)(m.bytes + FEED_AT);

    if (f->item >= b.n_items)
        return;
    const uint32_t row = (uint32_t)f->page * YARD_PAGE_TOKENS;
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const uint32_t bar = m.full + 8 * (stage * PARTS + i);
        barrier_expect(bar, PART_BYTES);
        tma_load_3d(m.base + stage * TILE_BYTES + i * PART_BYTES, map, 0, row, i * PART_CHUNKS,
                    bar);
    }
    const uint32_t tile = f->tile + 1;
    f->tile = tile;
    if (tile < f->end) {
        f->page = f->pages[tile];
    } else {
        f->item = f->item + 1;
        feed_item(t, m, b, f);
    }
}

/* The first tiles into L2, whatever of them is there already: nothing is read yet. */
static __device__ __forceinline__ void prefetch_tiles(const yard_tensor_map *map,
                                                      const block_share &b, volatile feed *f)
{
    if (b.n_items == 0)
        return;
    for (uint32_t tile = f->tile; tile < min(f->end, f->tile + STAGES); tile++)
        for (int i = 0; i < PARTS; i++)
            tma_prefetch_3d(map, 0, (uint32_t)f->pages[tile] * YARD_PAGE_TOKENS, i * PART_CHUNKS);
}

/* ---- scores ---------------------------------------------------------------------------------- */

/* Where a query row's two pieces lie; rows beyond the last one read the first. */
struct query_row {
    const uint16_t *latent, *rotated;
};

static __device__ __forceinline__ query_row query_of(const yard_mla_decode_task &t, uint32_t first,
                                                     uint32_t n, uint32_t idx)
{
    const uint32_t i = idx < n * t.n_heads ? idx : 0, head = i % t.n_heads;
    const size_t row = first + i / t.n_heads;
    query_row q;

    q.latent = (const uint16_t *)t.q_latent.data + row * t.q_latent.ld + head * MLA_RANK;
    q.rotated = (const uint16_t *)t.q.data + row * t.q.ld + (head + 1) * t.head_dim - MLA_ROPE;
    return q;
}

/* Positions that the query row sees. */
static __device__ __forceinline__ int seen_by(const yard_mla_decode_task &t, uint32_t first,
                                              uint32_t n, uint32_t idx)
{
    return idx < n * t.n_heads ? t.batch.position[first + idx / t.n_heads] + 1 : 0;
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

#pragma unroll
    for (int k = 0; k < REGISTER_STEPS; k++) {
        q[4 * k] = __ldg(a + 8 * k);
        q[4 * k + 1] = __ldg(b + 8 * k);
        q[4 * k + 2] = __ldg(a + 8 * k + 4);
        q[4 * k + 3] = __ldg(b + 8 * k + 4);
    }
    named_sync(1, 128); /* all warps have multiplied with the queries that lie there */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t at = thread + 128 * i, r = at / 8, piece = at % 8;
        *(uint4 *)(m.bytes + ROPE_AT + r * 128 + (piece ^ r % 8) * 16) =
            *(const uint4 *)(query_of(t, first, n, idx0 + r).rotated + piece * 8);
    }
    *(uint4 *)(m.bytes + STEP_AT + thread * 16) =
        *(const uint4 *)(query_of(t, first, n, idx0 + thread % 64).latent + REGISTER_STEPS * 16 +
                         thread / 64 * 8);
    fence_async_shared(); /* wgmma reads what these stores wrote */
    named_sync(1, 128);
}

/* The rows of the next item into L2. */
static __device__ __forceinline__ void prefetch_queries(const yard_mla_decode_task &t,
                                                        const decode_shared &m,
                                                        const block_share &b, uint32_t i)
{
    const uint32_t thread = threadIdx.x % 128;

    if (i >= b.n_items)
        return;
    const mla_item item = item_at(m, b, i);
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

static __device__ __forceinline__ void compute_scores(const yard_mla_decode_task &t,
                                                      const decode_shared &m, const block_share &b)
{
    const uint32_t thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
    const uint32_t row = warp * 16 + lane / 4;
    const uint32_t matrix_row = warp * 16 + lane % 16; /* of stmatrix */
    const uint32_t weights = m.base + ROPE_CHUNK * CHUNK_BYTES + matrix_row * 128 +
                             ((lane / 16) ^ (matrix_row % 8)) * 16;
    uint32_t tiles = 0, stage = 0, phase = 0; /* tiles: so far, over all items */

    uint32_t q[4 * REGISTER_STEPS], loaded = 0xffffffffu; /* of which rows */

    wait_previous_kernel();
    allow_next_kernel(); /* later than the wait: see yard_mla_workspace */
    for (uint32_t i = 0; i < b.n_items; i++) {
        const mla_item item = item_at(m, b, i);
        const uint32_t first = item.row_and_count / 8, n = item.row_and_count % 8;
        const int start = (int)item.first_tile * YARD_PAGE_TOKENS;
        int n_left = (int)(item.end_tile - item.first_tile);
        int n0 = seen_by(t, first, n, b.lane * MLA_ROWS + row) - start - (int)(lane % 4 * 2);
        int n1 = seen_by(t, first, n, b.lane * MLA_ROWS + row + 8) - start - (int)(lane % 4 * 2);
        row_state s0 = { lowest_log2, 0.0f }, s1 = { lowest_log2, 0.0f };
        float d[32];

        if (item.row_and_count != loaded) /* parts of one row come one after another */
            load_queries(t, m, item, b.lane * MLA_ROWS, q);
        loaded = item.row_and_count;
        prefetch_queries(t, m, b, i + 1);
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
                const int end = t.batch.position[first + n - 1] + 1 -
                                (int)(item.end_tile - 1) * YARD_PAGE_TOKENS;
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
            const int32_t slot = item_at(m, b, i).slot;
            if (slot >= 0) {
                float *lse = t.space.lse + ((size_t)slot * b.lanes + b.lane) * MLA_ROWS + row;
                lse[0] = s0.reference + log2f(s0.sum);
                lse[8] = s1.reference + log2f(s1.sum);
            }
        }
        arrive_warp(m.weights_ready);
    }
}

/* ---- values ---------------------------------------------------------------------------------- */

/* The stage of the tile that was just multiplied takes the next one, once both halves are done. */
static __device__ __forceinline__ void refill(const yard_tensor_map *map,
                                              const yard_mla_decode_task &t, const decode_shared &m,
                                              const block_share &b, uint32_t tile, uint32_t stage)
{
    if (threadIdx.x / 32 != 4)
        return;
    if (threadIdx.x == 128) {
        barrier_wait(m.values_done, tile & 1);
        feed_tile(map, t, m, b, stage);
    }
    __syncwarp();
}

/* First column of a query row's result: in its room, or in y. */
static __device__ __forceinline__ uint16_t *result_of(const yard_mla_decode_task &t,
                                                      const block_share &b, const mla_item &item,
                                                      uint32_t row, bool *wanted)
{
    const uint32_t idx = b.lane * MLA_ROWS + row, n_rows = item.row_and_count % 8;

    *wanted = item.slot >= 0 || idx < n_rows * t.n_heads;
    if (item.slot >= 0)
        return (uint16_t *)t.space.partial +
               (((size_t)item.slot * b.lanes + b.lane) * MLA_ROWS + row) * MLA_RANK;
    return (uint16_t *)t.y.data + (size_t)(item.row_and_count / 8 + idx / t.n_heads) * t.y.ld +
           idx % t.n_heads * MLA_RANK;
}

/* half: which 256 columns of the latents. */
static __device__ __forceinline__ void compute_values(const yard_tensor_map *map,
                                                      const yard_mla_decode_task &t,
                                                      const decode_shared &m, const block_share &b,
                                                      uint32_t half)
{
    const uint32_t row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const float *shrink = (const float *)(m.bytes + SHRINK_AT) + row;
    const float *inverse = (const float *)(m.bytes + INVERSE_AT) + row;
    uint32_t tiles = 0, stage = 0;
    float d[128];

    if (threadIdx.x == 128) {
        volatile feed *f = (volatile feed *)(m.bytes + FEED_AT);
        f->item = 0;
        feed_item(t, m, b, f);
        prefetch_tiles(map, b, f);
        wait_previous_kernel();
        for (uint32_t i = 0; i < STAGES; i++)
            feed_tile(map, t, m, b, i);
    }
    __syncwarp();
    wait_previous_kernel(); /* the kernel ahead may still read partial results, or y */
    for (uint32_t i = 0; i < b.n_items; i++) {
        const mla_item item = item_at(m, b, i);
        uint32_t n_left = item.end_tile - item.first_tile, used;
        for (int is_first = 1;; is_first = 0) {
            const uint64_t weights =
                wgmma_descriptor(m.base + stage * TILE_BYTES + ROPE_CHUNK * CHUNK_BYTES);
            const uint64_t values = wgmma_descriptor_rows(
                m.base + stage * TILE_BYTES + half * (ROPE_CHUNK / 2) * CHUNK_BYTES, CHUNK_BYTES);
            barrier_wait(m.weights_ready, tiles & 1);
            if (!is_first)
                shrink_rows(d,
                            make_float2(*(volatile const float *)(shrink + (tiles & 1) * 64),
                                        *(volatile const float *)(shrink + (tiles & 1) * 64 + 8)));
            pin(d);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < YARD_PAGE_TOKENS / 16; k++)
                multiply_rows_256(d, weights + 2 * k, values + 128 * k, k > 0 || !is_first);
            wgmma_commit();
            wgmma_wait<0>();
            pin(d);
            used = stage;
            tiles++;
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            if (--n_left == 0)
                break;
            arrive_warp(m.values_done);
            refill(map, t, m, b, tiles - 1, used);
        }
        const float f0 = *(volatile const float *)inverse;
        const float f1 = *(volatile const float *)(inverse + 8);
        arrive_warp(m.values_done);
        refill(map, t, m, b, tiles - 1, used);
        const mla_item done = item_at(m, b, i);
        bool wanted0, wanted1;
        uint16_t *to0 = result_of(t, b, done, row, &wanted0) + half * 256;
        uint16_t *to1 = result_of(t, b, done, row + 8, &wanted1) + half * 256;
        store_row<0>(d, f0, to0, wanted0);
        store_row<1>(d, f1, to1, wanted1);
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

static __global__ void __launch_bounds__(PLAN_THREADS, 1)
    mla_decode_kernel(const __grid_constant__ yard_tensor_map map,
                      const __grid_constant__ yard_mla_decode_task t)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    const decode_shared m(raw);
    const uint32_t warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    mla_item *list = (mla_item *)t.space.items + (size_t)blockIdx.x * t.space.max_items;
    block_share b;
    plan p;

    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < STAGES * PARTS; i++)
            barrier_init(m.full + 8 * i, 1);
        barrier_init(m.weights_ready, 4);
        barrier_init(m.values_done, VALUE_WARPS);
        barrier_init_fence();
        prefetch_map(&map);
    }
    /* The batch was there before the step, so the plan need not wait for the kernels ahead. Its
     * memory is the first tile's later. */
    b.n_items = make_plan(t, *(plan_shared *)raw, p, (mla_item *)(raw + ITEMS_AT), list);
    b.list = list;
    b.lane = p.lane;
    b.lanes = p.lanes;
    fence_async_shared(); /* the plan is read before the copy engine writes over it */
    __syncthreads();      /* barriers and first items are there */
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)SCORE_REGISTERS));
        compute_scores(t, m, b);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)VALUE_REGISTERS));
        compute_values(&map, t, m, b, warpgroup - 1);
    }
}

/* ---- launch ---------------------------------------------------------------------------------- */

yard_status yard_cuda_mla_decode_open(uint32_t *n_thread_blocks, yard_error *err)
{
    int device = 0, n = 0;
    cudaError_t code = cudaFuncSetAttribute(
        mla_decode_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);

    if (code == cudaSuccess)
        code = cudaGetDevice(&device);
    if (code == cudaSuccess)
        code = cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "mla_decode: %s", cudaGetErrorString(code));
    *n_thread_blocks = n < MLA_MAX_BLOCKS ? (uint32_t)n : (uint32_t)MLA_MAX_BLOCKS;
    return YARD_OK;
}

static cudaError_t launch_pass(const yard_tensor_map *cache, const yard_mla_decode_task *t,
                               cudaStream_t stream)
{
    const uint32_t n_joins =
        yard_ceil_div((t->end_row - t->first_row) * t->n_heads * QUARTERS, JOIN_THREADS / 32);
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    cudaError_t code;

    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    config.stream = stream;
    config.gridDim = dim3(t->space.n_thread_blocks, 1, 1);
    config.blockDim = dim3(PLAN_THREADS, 1, 1);
    config.dynamicSmemBytes = SHARED_BYTES;
    code = cudaLaunchKernelEx(&config, mla_decode_kernel, *cache, *t);
    if (code != cudaSuccess)
        return code;
    config.gridDim = dim3(n_joins < JOIN_BLOCKS ? n_joins : (uint32_t)JOIN_BLOCKS, 1, 1);
    config.blockDim = dim3(JOIN_THREADS, 1, 1);
    config.dynamicSmemBytes = 0;
    return cudaLaunchKernelEx(&config, mla_join_kernel, *t);
}

yard_status yard_cuda_mla_decode_launch(const yard_tensor_map *cache, const yard_mla_decode_task *t,
                                        yard_mla_workspace *space, void *stream, yard_error *err)
{
    const uint32_t lanes = yard_ceil_div(t->n_heads, MLA_ROWS);
    /* parts of a pass's rows have rooms of their own; balanced stretches need two a block only */
    const uint32_t step = t->deterministic ? MLA_ROOMS / (MLA_MAX_SPLITS * lanes) : space->max_rows;
    yard_mla_decode_task pass = *t;
    cudaError_t code = cudaSuccess;

    pass.space = *space;
    for (uint32_t row = 0; row < space->max_rows && code == cudaSuccess; row += step) {
        pass.first_row = row;
        pass.end_row = space->max_rows - row < step ? space->max_rows : row + step;
        space->turn ^= 1;
        pass.space.items = (uint8_t *)space->items +
                           (size_t)space->turn * MLA_MAX_BLOCKS * space->max_items * MLA_ITEM_BYTES;
        pass.space.splits = (uint8_t *)space->splits +
                            (size_t)space->turn * (1 + space->max_rows) * MLA_SPLIT_BYTES;
        code = launch_pass(cache, &pass, (cudaStream_t)stream);
    }
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "mla_decode: launch: %s", cudaGetErrorString(code));
    return YARD_OK;
}
