/* Who computes what in MLA decode. Every thread block works out its own share from the batch, so
 * that no kernel has to run before, and nothing of it is known to the host.
 *
 * A *piece* is up to four rows of one sequence that read the cache together (draft tokens); with
 * its heads it fills some blocks' 64 query rows, `lanes` of them. A *worker* is as many blocks, or
 * twice as many with half the columns each. All pieces lie in a line, a tile of 64 positions a unit
 * and some for the start of each, which is cut into equal stretches, one a worker. Pieces are cut
 * there (fast), or at fixed positions into parts that go to the worker whose stretch has their
 * middle (deterministic: where a row is cut depends on its length alone, and all rows of a piece
 * are cut alike; what a row does not see has the weight 0 and changes no bit of it). Where it costs
 * no more, pieces begin with a stretch, and no worker has two of them, or stretches with a piece,
 * and none is cut. */
#ifndef YARD_OPS_CUDA_MLA_PLAN_CUH
#define YARD_OPS_CUDA_MLA_PLAN_CUH

#include "ops/cuda/mla_rows.cuh"

enum {
    PLAN_THREADS = 384,
    PLAN_WARPS = PLAN_THREADS / 32,
    ITEM_TILES = 3,   /* what the start and the end of an item cost, in tiles */
    LEAST_TILES = 2,  /* of a stretch: shorter ones make more parts to join */
    SHARED_ITEMS = 6, /* of a block, by turns: see feed_item; the rest lies in memory */
    SHARED_SPLITS = 1 /* the first piece that several blocks compute; likewise */
};

/* Tiles [first_tile, end_tile) of n_rows rows from `row` on. slot: where the partial result goes;
 * < 0: it is the whole. n_parts: so many, this one the last, are joined by the block when it is
 * done; ITEM_PAIR: two, by the block that is done last; 0: by all blocks, or none. */
struct __align__(16) mla_item
{
    uint32_t row_and_count; /* row * 8 + n_rows */
    uint16_t first_tile, end_tile;
    int16_t slot;
    uint8_t n_parts, last_positions; /* of the last tile */
    int32_t seq;
};

enum { ITEM_PAIR = 0xff };

/* A piece's parts are in n slots from first on. */
struct __align__(8) mla_splits
{
    uint32_t row_and_count;
    uint16_t first, n;
};

/* Pieces, their tiles and the cost of their parts, for chains of 1, 2 ..; the longest piece;
 * whether rows of a chain are cut in different ways. */
enum {
    TOTAL_PIECES,
    TOTAL_TILES = MLA_MAX_CHAIN,
    TOTAL_COST = 2 * MLA_MAX_CHAIN,
    TOTAL_LONGEST = 3 * MLA_MAX_CHAIN,
    TOTAL_MIXED,
    N_TOTALS
};

struct plan_sums {
    uint32_t cost, items;
};

struct plan_shared {
    uint32_t total[N_TOTALS];
    plan_sums warp_sums[PLAN_WARPS];
    uint32_t warp_splits[PLAN_WARPS];
    uint32_t first_ordinal, n_items;
};

/* What make_plan leaves in shared memory. */
struct plan_kept {
    mla_item items[SHARED_ITEMS];
    mla_splits splits[SHARED_SPLITS];
    uint32_t n_items;
    uint8_t lane, lanes; /* lane: which of the pieces' heads the block has */
    uint8_t halves : 2;  /* of the columns: HALF_0, HALF_1 or both */
    uint8_t chain : 6;   /* this and n_splits are the same in all blocks */
    uint8_t n_splits;
};
static_assert(MLA_MAX_BLOCKS <= UINT8_MAX, "plan_kept");

enum { HALF_0 = 1, HALF_1 = 2, BOTH_HALVES = HALF_0 | HALF_1 };

/* What a block has to do. */
struct block_share {
    const mla_item *list; /* its items beyond the first */
    const mla_splits *splits;
    uint32_t n_items, lane, lanes, halves;
};

/* The line of a block. */
struct plan {
    uint32_t end; /* of rows */
    uint32_t chain, lanes, n_workers, worker, lane, halves;
    uint32_t stretch, snap;
    bool aligned; /* pieces begin with a stretch */
    bool pairs;   /* no piece has more than two parts, no worker more than one: see mla_pair.cuh */
};

/* ---- the line -------------------------------------------------------------------------------- */

/* What a part takes of the line. */
static __device__ uint32_t part_cost(uint32_t n_tiles)
{
    return part_tiles(n_tiles) + ITEM_TILES;
}

/* What a row's parts take of the line. */
static __device__ uint32_t row_cost(uint32_t n_tiles)
{
    return count_parts(n_tiles) * part_cost(n_tiles);
}

static __device__ uint32_t piece_cost(const yard_mla_decode_task &t, const plan &p,
                                      uint32_t n_tiles)
{
    const uint32_t cost = t.deterministic ? row_cost(n_tiles) : n_tiles;

    return p.aligned ? divide_up(cost, p.stretch) * p.stretch
                     : cost + (t.deterministic ? 0 : ITEM_TILES);
}

/* Fills m.total. */
static __device__ void add_up(const yard_mla_decode_task &t, plan_shared &m, const plan &p,
                              plan_row r)
{
    const uint32_t lane = threadIdx.x % 32, all = 0xffffffffu;

    for (uint32_t row = threadIdx.x;;) {
        const uint32_t pieces = __popc(__ballot_sync(all, r.absorbed));
        const uint32_t tiles = __reduce_add_sync(all, r.absorbed ? r.tiles : 0);
        const uint32_t longest = __reduce_max_sync(all, r.absorbed ? r.tiles : 0);
        const uint32_t cost =
            t.deterministic ? __reduce_add_sync(all, r.absorbed ? row_cost(r.tiles) : 0) : 0;
        uint32_t mine = lane < TOTAL_TILES ? pieces : lane < TOTAL_COST ? tiles : cost;
        mine = lane == TOTAL_LONGEST ? longest : mine;
        if (__any_sync(all, r.absorbed && (r.offset > 0 || !r.ends))) { /* chains */
#pragma unroll
            for (uint32_t q = 1; q < MLA_MAX_CHAIN; q++) {
                const bool is_piece = ends_piece(r, q + 1);
                const uint32_t n = __popc(__ballot_sync(all, is_piece));
                const uint32_t sum = __reduce_add_sync(all, is_piece ? r.tiles : 0);
                mine = lane == TOTAL_PIECES + q ? n : lane == TOTAL_TILES + q ? sum : mine;
            }
            if (t.deterministic) {
#pragma unroll
                for (uint32_t q = 1; q < MLA_MAX_CHAIN; q++) {
                    const uint32_t sum =
                        __reduce_add_sync(all, ends_piece(r, q + 1) ? row_cost(r.tiles) : 0);
                    mine = lane == TOTAL_COST + q ? sum : mine;
                }
                if (r.absorbed && r.offset > 0 && part_tiles(r.tiles) != part_tiles(r.tiles_before))
                    m.total[TOTAL_MIXED] = 1;
            }
        }
        if (lane < TOTAL_LONGEST)
            atomicAdd(&m.total[lane], mine);
        else if (lane == TOTAL_LONGEST)
            atomicMax(&m.total[lane], mine);
        row += PLAN_THREADS;
        if (row - lane >= p.end)
            break;
        r = look_at(t.batch, p.end, row);
    }
    __syncthreads(); /* the totals are complete */
}

/* How many rows of a chain go together: as many as do not leave heads of blocks idle, and are cut
 * alike. */
static __device__ uint32_t choose_chain(const yard_mla_decode_task &t, const plan_shared &m)
{
    uint32_t least = 0xffffffffu, chain = 1;

    if (m.total[TOTAL_MIXED])
        return 1;
#pragma unroll
    for (uint32_t q = 1; q <= MLA_MAX_CHAIN; q++)
        least =
            min(least, m.total[TOTAL_PIECES + q - 1] * ((q * t.n_heads + MLA_ROWS - 1) / MLA_ROWS));
#pragma unroll
    for (uint32_t q = 2; q <= MLA_MAX_CHAIN; q++) {
        const uint32_t lanes = (q * t.n_heads + MLA_ROWS - 1) / MLA_ROWS;
        const uint32_t pieces = m.total[TOTAL_PIECES + q - 1];
        if (lanes <= gridDim.x && pieces * lanes <= least + least / 8 &&
            pieces < m.total[TOTAL_PIECES + q - 2])
            chain = q;
    }
    return chain;
}

/* Which blocks are a worker. Where each part has a worker of its own even if workers are twice as
 * many blocks, a block has half the columns: scores are computed twice, and a part is done sooner.
 * It changes no bit: both blocks write the same sums of exponentials. */
static __device__ void choose_workers(const yard_mla_decode_task &t, const plan_shared &m, plan &p)
{
    const uint32_t parts =
        m.total[TOTAL_PIECES + p.chain - 1] * count_parts(m.total[TOTAL_LONGEST]);
    const bool halved = t.deterministic && parts * p.lanes * 2 <= gridDim.x;
    const uint32_t n_blocks = halved ? 2 * p.lanes : p.lanes;

    p.n_workers = divide(gridDim.x, n_blocks);
    p.worker = divide(blockIdx.x, n_blocks);
    p.lane = blockIdx.x - p.worker * n_blocks;
    p.halves = BOTH_HALVES;
    if (halved) {
        p.halves = p.lane < p.lanes ? HALF_0 : HALF_1;
        p.lane -= p.lane < p.lanes ? 0 : p.lanes;
    }
}

/* Chooses the stretch. */
static __device__ void cut_line(const yard_mla_decode_task &t, const plan_shared &m, plan &p)
{
    const uint32_t n = m.total[TOTAL_PIECES + p.chain - 1], longest = m.total[TOTAL_LONGEST];
    const uint32_t tiles = m.total[TOTAL_TILES + p.chain - 1];
    const uint32_t total =
        t.deterministic ? m.total[TOTAL_COST + p.chain - 1] : tiles + n * ITEM_TILES;
    const bool even = tiles == n * longest;
    uint32_t aligned = 0;

    p.aligned = false;
    p.stretch = max((total + p.n_workers - 1) / p.n_workers, (uint32_t)LEAST_TILES);
    if (even && n <= p.n_workers) {
        const uint32_t each = divide(p.n_workers, n); /* workers of a piece */
        aligned = t.deterministic ? divide_up(count_parts(longest), each) * part_cost(longest)
                                  : max(divide_up(longest, each), (uint32_t)LEAST_TILES);
    } else if (!t.deterministic && n < p.n_workers) { /* each piece has one stretch more, at most */
        aligned = max(divide_up(tiles, p.n_workers - n), (uint32_t)LEAST_TILES);
    }
    if (aligned && aligned <= p.stretch + (t.deterministic ? part_cost(longest) : ITEM_TILES)) {
        p.aligned = true;
        p.stretch = aligned;
    } else if (even) {
        const uint32_t whole = divide_up(n, p.n_workers) * piece_cost(t, p, longest);
        p.stretch = whole <= p.stretch + p.stretch / 16 ? whole : p.stretch;
    }
    p.snap = p.aligned ? 1 : 1 + p.stretch / 16;
    p.pairs = !t.deterministic && p.aligned && longest <= 2 * p.stretch;
}

/* ---- shares ---------------------------------------------------------------------------------- */

/* Where the cut before a worker's stretch falls in a piece that begins at `at` of the line. Cuts
 * near an end are moved there: they are not worth a partial result. */
static __device__ uint32_t cut_of(const plan &p, uint32_t worker, uint32_t at, uint32_t n_tiles)
{
    const uint32_t cut = worker * p.stretch;

    if (cut < at + p.snap)
        return 0;
    return cut - at + p.snap > n_tiles ? n_tiles : cut - at;
}

/* The first of n parts, `cost` of the line each, that is of this worker or a later one. */
static __device__ uint32_t first_part_of(const plan &p, uint32_t worker, uint32_t at, uint32_t n,
                                         uint32_t cost)
{
    const uint32_t cut = worker * p.stretch, middle = at + cost / 2;

    return cut <= middle ? 0 : min(divide_up(cut - middle, cost), n);
}

/* What this block has of a piece that begins at `at`: parts [from, from + n) (deterministic), or
 * one item of tiles [from, to). */
struct plan_share {
    uint32_t n, from, to;
};

static __device__ plan_share share_of(const yard_mla_decode_task &t, const plan &p,
                                      const plan_row &r, uint32_t at)
{
    plan_share s = {};

    if (t.deterministic) {
        const uint32_t n = count_parts(r.tiles), cost = part_cost(r.tiles);
        s.from = first_part_of(p, p.worker, at, n, cost);
        s.n = first_part_of(p, p.worker + 1, at, n, cost) - s.from;
    } else {
        s.from = cut_of(p, p.worker, at, r.tiles);
        s.to = cut_of(p, p.worker + 1, at, r.tiles);
        s.n = s.to > s.from;
    }
    return s;
}

/* Slots of the deterministic table: rows that several workers share, then each worker's own. In the
 * fast one, a worker's is its number and that of the pieces with parts so far. */
static __device__ uint32_t fixed_slot(uint32_t idx)
{
    return idx * MLA_MAX_SPLITS;
}

/* Which workers have parts of a piece, for all but those of a deterministic row that one has alone:
 * n of them, or n parts, and what its first part's slot would be if no piece before had parts. */
static __device__ mla_splits splits_of(const yard_mla_decode_task &t, const plan &p,
                                       const plan_row &r, uint32_t at, uint32_t row)
{
    const uint32_t n_rows = r.offset % p.chain + 1;
    mla_splits s = {};

    s.row_and_count = (row + 1 - n_rows) * 8 + n_rows;
    if (t.deterministic) {
        const uint32_t n = count_parts(r.tiles), cost = part_cost(r.tiles), middle = at + cost / 2;
        /* blocks that have half the columns join nothing alone */
        const bool shared = p.halves != BOTH_HALVES ||
                            divide(middle, p.stretch) != divide(middle + (n - 1) * cost, p.stretch);
        s.n = shared ? n : 1;
    } else {
        /* the first worker is the one before the first cut that is not moved to the beginning, the
         * last one the one before the first that is moved to, or lies at, the end */
        const uint32_t first = divide(at + p.snap - 1, p.stretch);
        s.n = max(divide(max(at + r.tiles, p.snap) - p.snap, p.stretch), first) + 1 - first;
        s.first = first;
    }
    return s;
}

/* The i-th item of a share. */
static __device__ mla_item item_of(const yard_mla_decode_task &t, const plan &p, const plan_row &r,
                                   const plan_share &share, const mla_splits &s, uint32_t split,
                                   uint32_t i)
{
    mla_item item = {};

    item.row_and_count = s.row_and_count;
    item.seq = r.seq;
    if (t.deterministic) {
        const uint32_t n = count_parts(r.tiles), part = share.from + i;
        const uint32_t first = s.n > 1 ? s.first : fixed_slot(p.n_workers + p.worker);
        item.first_tile = part * part_tiles(r.tiles);
        item.end_tile = min(item.first_tile + part_tiles(r.tiles), r.tiles);
        item.slot = n > 1 ? (int16_t)(first + part) : -1;
        item.n_parts = s.n == 1 && n > 1 && part == n - 1 ? n : 0;
    } else {
        item.first_tile = share.from;
        item.end_tile = share.to;
        item.slot = s.n > 1 ? (int16_t)(p.worker + split) : -1;
        item.n_parts = s.n > 1 && p.pairs ? ITEM_PAIR : 0;
    }
    item.last_positions = item.end_tile == r.tiles ? r.last_positions : YARD_PAGE_TOKENS;
    return item;
}

/* ---- the plan -------------------------------------------------------------------------------- */

/* The sums over the threads before this one, and over earlier calls; *carry: of all so far. */
static __device__ plan_sums sum_before(plan_shared &m, plan_sums x, plan_sums *carry)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = 0xffffffffu;
    plan_sums sum = x, before, others = {};

#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t cost = __shfl_up_sync(all, sum.cost, distance);
        const uint32_t items = __shfl_up_sync(all, sum.items, distance);
        sum.cost += lane >= (uint32_t)distance ? cost : 0;
        sum.items += lane >= (uint32_t)distance ? items : 0;
    }
    if (lane == 31)
        m.warp_sums[warp] = sum;
    __syncthreads(); /* all warps' sums are there, and this call's before the next one's */
    if (lane < PLAN_WARPS)
        others = m.warp_sums[lane];
    before.cost =
        carry->cost + __reduce_add_sync(all, lane < warp ? others.cost : 0) + sum.cost - x.cost;
    before.items =
        carry->items + __reduce_add_sync(all, lane < warp ? others.items : 0) + sum.items - x.items;
    carry->cost += __reduce_add_sync(all, others.cost);
    carry->items += __reduce_add_sync(all, others.items);
    return before;
}

/* How many pieces with parts come before this thread's. */
static __device__ uint32_t count_before(plan_shared &m, bool has_parts, uint32_t *carry)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = 0xffffffffu;
    const uint32_t mine = __ballot_sync(all, has_parts);

    if (lane == 0)
        m.warp_splits[warp] = __popc(mine);
    __syncthreads(); /* as in sum_before */
    const uint32_t others = lane < PLAN_WARPS ? m.warp_splits[lane] : 0;
    const uint32_t before = *carry + __reduce_add_sync(all, lane < warp ? others : 0) +
                            __popc(mine & ((1u << lane) - 1));
    *carry += __reduce_add_sync(all, others);
    return before;
}

/* Works out the block's share; writes the first items and splits to shared memory, and the rest to
 * its lists. All threads; a barrier must follow. */
static __device__ void make_plan(const yard_mla_decode_task &t, plan_shared &m, plan_kept &kept,
                                 mla_item *list, mla_splits *splits)
{
    plan p;
    plan_sums carry = {};
    uint32_t n_splits = 0;

    if (threadIdx.x < N_TOTALS)
        m.total[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        m.first_ordinal = 0xffffffffu;
        m.n_items = 0;
        kept.n_splits = 0;
        kept.n_items = 0;
    }
    p.end = min((uint32_t)*t.batch.n_tokens, t.max_rows);
    __syncthreads(); /* zeros are there */
    if (p.end == 0)
        return;
    plan_row r = look_at(t.batch, p.end, threadIdx.x);
    add_up(t, m, p, r);
    p.chain = choose_chain(t, m);
    p.lanes = (p.chain * t.n_heads + MLA_ROWS - 1) / MLA_ROWS;
    if (m.total[TOTAL_PIECES] == 0)
        return;
    choose_workers(t, m, p);
    cut_line(t, m, p);
    for (uint32_t row = threadIdx.x;;) {
        const bool is_piece = ends_piece(r, p.chain);
        plan_sums x = {};
        plan_share share = {};
        mla_splits s = {};
        if (is_piece) {
            x.cost = piece_cost(t, p, r.tiles);
            x.items = t.deterministic ? count_parts(r.tiles) : 1;
        }
        const plan_sums before = sum_before(m, x, &carry);
        if (is_piece) {
            s = splits_of(t, p, r, before.cost, row);
            if (p.worker < p.n_workers)
                share = share_of(t, p, r, before.cost);
        }
        const uint32_t ordinal = before.items + (t.deterministic ? share.from : 0);
        if (share.n) {
            atomicMin(&m.first_ordinal, ordinal);
            atomicAdd(&m.n_items, share.n);
        }
        /* ends with the first ordinal known, before the others find their places */
        const uint32_t split = count_before(m, s.n > 1, &n_splits);
        s.first = t.deterministic ? fixed_slot(split) : s.first + split;
        if (s.n > 1)
            (split < SHARED_SPLITS ? kept.splits : splits)[split] = s;
        for (uint32_t i = 0; i < share.n; i++) {
            const uint32_t place = ordinal - m.first_ordinal + i;
            (place < SHARED_ITEMS ? kept.items : list)[place] =
                item_of(t, p, r, share, s, split, i);
        }
        row += PLAN_THREADS;
        if (row - threadIdx.x >= p.end)
            break;
        r = look_at(t.batch, p.end, row);
    }
    if (threadIdx.x == 0) {
        kept.n_splits = p.pairs ? 0 : n_splits;
        kept.chain = p.chain;
        kept.lane = p.lane;
        kept.lanes = p.lanes;
        kept.halves = p.halves;
    }
    __syncthreads(); /* the list and its length are complete */
    if (threadIdx.x == 0)
        kept.n_items = m.n_items;
}

#endif
