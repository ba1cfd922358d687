/* A block of MLA decode: what lies where in its shared memory, and the copy engine's part. */
#ifndef YARD_OPS_CUDA_MLA_TILES_CUH
#define YARD_OPS_CUDA_MLA_TILES_CUH

#include "ops/cuda/mla_plan.cuh"
#include "ops/cuda/ptx.cuh"

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
    CODES_CHUNK = 3,            /* an FP8 tile arrives here and beyond: see mla_widen.cuh */
    STEPS = MLA_WIDTH / 16,     /* of K, of scores */
    PART_STEPS = STEPS / PARTS, /* of a third */
    REGISTER_STEPS = 31,        /* queries in registers; then one step, then the rotated ones */
    TAIL_STEPS = 12,            /* of the next scores under way when values may start */
    SCORE_REGISTERS = 184,
    VALUE_REGISTERS = 160, /* the assembler wants that many for 256 columns */
    SCORE_WARPS = 4,
    VALUE_WARPS = MLA_VALUE_WARPS,

    /* the first item's queries come by way of the last stage, in boxes of [8 chunks, 8 heads, 64
     * columns], rows of 128 bytes, swizzled */
    BOX_ROW_BYTES = MLA_BOX_HEADS * 128, /* a chunk */
    BOX_BYTES = MLA_RANK / 64 * BOX_ROW_BYTES,
    QUERIES_AT = (STAGES - 1) * TILE_BYTES,

    ROPE_AT = STAGES * TILE_BYTES,   /* rotated queries, as a chunk */
    STEP_AT = ROPE_AT + CHUNK_BYTES, /* queries of step 31, without swizzle */
    SHRINK_AT = STEP_AT + 2048,      /* [2][64] f32 */
    INVERSE_AT = SHRINK_AT + 512,    /* [64] f32 */
    BARRIERS_AT = INVERSE_AT + 256,
    FEED_AT = BARRIERS_AT + 8 * (STAGES * PARTS + STAGES + 3),
    KEPT_AT = FEED_AT + 24,
    SHARED_BYTES = KEPT_AT + sizeof(plan_kept)
};
static_assert(SHARED_BYTES <= 227 * 1024 && KEPT_AT % 16 == 0, "shared memory of a block");
static_assert(sizeof(mla_item) == MLA_ITEM_BYTES && sizeof(mla_splits) == MLA_SPLIT_BYTES, "sizes");

/* Barriers of some warps; 0 is the block's. */
enum { QUERIES_STORED = 1, QUERIES_TAKEN, ALL_STORED, OWN_STORED, TEAM_DONE };

struct decode_shared {
    uint8_t *bytes;
    uint32_t base;
    /* full: thirds of stages, in bf16; codes: stages of an FP8 cache */
    uint32_t full, codes, weights_ready, values_done, queries_here;

    __device__ __forceinline__ explicit decode_shared(uint8_t *raw)
    {
        bytes = raw;
        base = shared_address(raw);
        full = base + BARRIERS_AT;
        codes = full + 8 * STAGES * PARTS;
        weights_ready = codes + 8 * STAGES;
        values_done = weights_ready + 8;
        queries_here = values_done + 8;
    }
};

/* Not known to be the same every time, so that what comes of it stays in no register. */
static __device__ __forceinline__ uint32_t this_thread(void)
{
    uint32_t x;

    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

/* An item that the producer has begun: after a wait for its first tile. */
static __device__ __forceinline__ const mla_item &item_at(const decode_shared &m, uint32_t i)
{
    return ((const plan_kept *)(m.bytes + KEPT_AT))->items[i % SHARED_ITEMS];
}

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

/* The producer's place, in shared memory: one thread's registers are a warpgroup's. It never waits
 * for memory: the page of the next tile and the item after this one are on their way while it does
 * something else. */
struct feed {
    uint32_t item, tile, end;
    int32_t page; /* after copy_wait */
    const int32_t *pages;
};
static_assert(sizeof(feed) == 24, "FEED_AT");

/* Item i + 1 goes where item i - 5 was. All warps are done with that: the tile before item i was
 * just asked for, so the third before it has been multiplied, and that is no earlier than i - 4. */
static __device__ __forceinline__ void feed_item(const yard_mla_decode_task &t,
                                                 const decode_shared &m, const block_share &b,
                                                 volatile feed *f)
{
    const uint32_t i = f->item;

    if (i >= b.n_items)
        return;
    const mla_item &item = item_at(m, i);
    const int32_t *pages = t.batch.page_table + (size_t)item.seq * t.batch.page_table_ld;
    f->tile = item.first_tile;
    f->end = item.end_tile;
    f->pages = pages;
    copy_ahead<4>(m.base + FEED_AT + offsetof(feed, page), pages + item.first_tile);
    if (i + 1 >= SHARED_ITEMS && i + 1 < b.n_items)
        copy_ahead<16>(shared_address(&item_at(m, i + 1)), b.list + i + 1);
}

static __device__ __forceinline__ void
load_tile(const decode_shared &m, const yard_tensor_map *cache, uint32_t row, uint32_t stage)
{
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const uint32_t bar = m.full + 8 * (stage * PARTS + i);
        barrier_expect(bar, PART_BYTES);
        tma_load_3d(m.base + stage * TILE_BYTES + i * PART_BYTES, cache, 0, row, i * PART_CHUNKS,
                    bar);
    }
}

/* Codes and scales; the rotated keys belong to the last third. */
static __device__ __forceinline__ void
load_codes(const decode_shared &m, const yard_mla_decode_maps &maps, uint32_t row, uint32_t stage)
{
    const uint32_t to = m.base + stage * TILE_BYTES, codes = m.codes + 8 * stage;
    const uint32_t last = m.full + 8 * (stage * PARTS + PARTS - 1);

    barrier_expect(codes, MLA_CODES_CHUNKS * CHUNK_BYTES);
    tma_load_3d(to + CODES_CHUNK * CHUNK_BYTES, &maps.cache, 0, row, 0, codes);
    barrier_expect(last, CHUNK_BYTES);
    tma_load_3d(to + ROPE_CHUNK * CHUNK_BYTES, &maps.keys, 0, row, 0, last);
}

/* Asks for the next tile, if there is one. */
template <bool FP8>
static __device__ __forceinline__ void
feed_tile(const yard_mla_decode_maps &maps, const yard_mla_decode_task &t, const decode_shared &m,
          const block_share &b, uint32_t stage)
{
    volatile feed *f = (volatile feed *)(m.bytes + FEED_AT);

    if (f->item >= b.n_items)
        return;
    copy_wait();
    const uint32_t row = (uint32_t)f->page * YARD_PAGE_TOKENS;
    if (FP8)
        load_codes(m, maps, row, stage);
    else
        load_tile(m, &maps.cache, row, stage);
    const uint32_t tile = f->tile + 1;
    f->tile = tile;
    if (tile < f->end) {
        copy_ahead<4>(m.base + FEED_AT + offsetof(feed, page), f->pages + tile);
    } else {
        f->item = f->item + 1;
        feed_item(t, m, b, f);
    }
}

/* A score warp's rows of the first item's queries. Boxes beyond the last row read the first. */
static __device__ __forceinline__ void feed_queries(const yard_mla_decode_maps &maps,
                                                    const yard_mla_decode_task &t,
                                                    const decode_shared &m, const block_share &b)
{
    const mla_item &item = item_at(m, 0);
    const uint32_t first = item.row_and_count / 8, n = item.row_and_count % 8;

    barrier_expect(m.queries_here, 2 * (BOX_BYTES + BOX_ROW_BYTES));
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        const uint32_t box = threadIdx.x / 32 * 2 + i;
        const uint32_t idx = b.lane * MLA_ROWS + box * MLA_BOX_HEADS;
        const uint32_t at = idx < n * t.n_heads ? idx : 0;
        const uint32_t row = first + at / t.n_heads, head = at % t.n_heads;
        tma_load_4d(m.base + QUERIES_AT + box * BOX_BYTES, &maps.latent, head, row, m.queries_here);
        tma_load_4d(m.base + ROPE_AT + box * BOX_ROW_BYTES, &maps.rotated, head, row,
                    m.queries_here);
    }
}

#endif
