/* Who computes what in MLA decode. Every thread block works out its own share from the batch, so
 * that no kernel has to run before, and nothing of it is known to the host.
 *
 * A *piece* is up to four rows of one sequence that read the cache together (draft tokens); with
 * its heads it fills some blocks' 64 query rows, `lanes` of them. A *worker* is as many blocks. All
 * pieces in a line, a tile of 64 positions a unit and some for the start of each, are cut into
 * equal stretches, one a worker (fast), or at fixed positions into items that go to the worker
 * whose stretch has their middle (deterministic: there a piece is one row, and where it is cut
 * depends on its length alone). */
#ifndef YARD_OPS_CUDA_MLA_PLAN_CUH
#define YARD_OPS_CUDA_MLA_PLAN_CUH

#include "ops/cuda/mla_decode.h"

enum {
    PLAN_THREADS = 384,
    PLAN_WARPS = PLAN_THREADS / 32,
    ITEM_TILES = 3,  /* what the start and the end of an item cost, in tiles; and least of a cut */
    SHARED_ITEMS = 2 /* the first items of a block; the rest lies in memory */
};

/* Tiles [first_tile, end_tile) of n_rows rows from `row` on. slot: where the partial result goes;
 * < 0: it is the whole. */
struct mla_item {
    uint32_t row_and_count; /* row * 8 + n_rows */
    uint32_t first_tile, end_tile;
    int32_t slot;
};

/* Parts of a row: slots first, second, second + step, .. */
struct mla_splits {
    uint32_t first, second, step;
    uint16_t n;     /* < 2: nothing to combine, or no row of ours */
    uint8_t offset; /* of the row in its piece */
    uint8_t lanes;
};

struct plan_shared {
    uint64_t warp_total[PLAN_WARPS];
    uint32_t first_ordinal, n_items, tiles;
};

struct plan_row {
    bool absorbed, ends; /* ends: the next row is not of the same chain */
    uint32_t offset;     /* in its chain */
    uint32_t tiles;
};

/* The line of a block. */
struct plan {
    uint32_t first, end; /* rows */
    uint32_t chain, lanes, n_workers, worker, lane;
    uint32_t stretch, snap; /* fast */
    bool whole;             /* no piece is cut */
    uint32_t total;
};

/* All loads are independent: one trip to memory. */
static __device__ plan_row look_at(const yard_batch &b, const plan &p, uint32_t row)
{
    const uint32_t at = min(row, p.end - 1), before = max(at, p.first + 1) - 1;
    const uint32_t after = min(at + 1, p.end - 1);
    const uint8_t mine = b.absorbed[at], absorbed_before = b.absorbed[before];
    const uint8_t absorbed_after = b.absorbed[after];
    const int32_t seq = b.seq[at], seq_before = b.seq[before], seq_after = b.seq[after];
    plan_row r;

    r.tiles = (uint32_t)b.position[at] / YARD_PAGE_TOKENS + 1;
    r.absorbed = row < p.end && mine;
    r.ends = after == at || !absorbed_after || seq_after != seq;
    r.offset = at > p.first && absorbed_before && seq_before == seq;
    if (r.offset) /* a draft: few steps */
        while (at - r.offset > p.first && b.absorbed[at - r.offset - 1] &&
               b.seq[at - r.offset - 1] == seq)
            r.offset++;
    return r;
}

/* The sum of x over the threads before this one, and over earlier calls; *carry: of all so far. */
static __device__ uint64_t sum_before(plan_shared &m, uint64_t x, uint64_t *carry)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t sum = x, before = *carry;

#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const uint64_t other = __shfl_up_sync(0xffffffffu, sum, distance);
        sum += lane >= (uint32_t)distance ? other : 0;
    }
    if (lane == 31)
        m.warp_total[warp] = sum;
    __syncthreads(); /* totals are there before they are read */
    for (uint32_t i = 0; i < PLAN_WARPS; i++) {
        before += i < warp ? m.warp_total[i] : 0;
        *carry += m.warp_total[i];
    }
    __syncthreads(); /* .. and read before the next call's are written */
    return before + sum - x;
}

static __device__ bool ends_piece(const plan &p, const plan_row &r)
{
    return r.absorbed && (r.ends || r.offset % p.chain == p.chain - 1);
}

/* How many rows of a chain go together: as many as do not leave heads of blocks idle. Sets
 * n_pieces, and *even when all rows have equally many tiles. */
static __device__ void choose_chain(const yard_mla_decode_task &t, plan_shared &m, plan &p,
                                    uint32_t *n_pieces, bool *even)
{
    uint32_t pieces[MLA_MAX_CHAIN + 1] = {}, least = 0xffffffffu;

    *even = true;
    for (uint32_t at = p.first; at < p.end; at += PLAN_THREADS) {
        const plan_row r = look_at(t.batch, p, at + threadIdx.x);
        if (r.absorbed)
            m.tiles = r.tiles; /* anybody's */
#pragma unroll
        for (uint32_t q = 1; q <= MLA_MAX_CHAIN; q++)
            pieces[q] += __syncthreads_count(r.absorbed && (r.ends || r.offset % q == q - 1));
        *even = !__syncthreads_or(r.absorbed && r.tiles != m.tiles) && *even;
    }
#pragma unroll
    for (uint32_t q = 1; q <= MLA_MAX_CHAIN; q++)
        least = min(least, pieces[q] * ((q * t.n_heads + MLA_ROWS - 1) / MLA_ROWS));
#pragma unroll
    for (uint32_t q = 1; q <= MLA_MAX_CHAIN; q++) {
        const uint32_t lanes = (q * t.n_heads + MLA_ROWS - 1) / MLA_ROWS;
        if (lanes <= gridDim.x && pieces[q] * lanes <= least + least / 8 &&
            (q == 1 || pieces[q] < pieces[q - 1])) {
            p.chain = q;
            p.lanes = lanes;
            *n_pieces = pieces[q];
        }
    }
}

/* In tiles; a function of the row's length alone. */
static __device__ uint32_t split_tiles(uint32_t n_tiles)
{
    uint32_t split = n_tiles <= 16 ? 4 : 10;

    while (split * MLA_MAX_SPLITS < n_tiles)
        split *= 2;
    return split;
}

static __device__ uint32_t count_splits(uint32_t n_tiles)
{
    const uint32_t split = split_tiles(n_tiles);

    return (n_tiles + split - 1) / split;
}

static __device__ uint32_t piece_cost(const yard_mla_decode_task &t, const plan_row &r)
{
    return r.tiles + (t.deterministic ? count_splits(r.tiles) : 1) * ITEM_TILES;
}

static __device__ uint32_t sum_costs(const yard_mla_decode_task &t, plan_shared &m, const plan &p)
{
    uint64_t total = 0;

    for (uint32_t at = p.first; at < p.end; at += PLAN_THREADS) {
        const plan_row r = look_at(t.batch, p, at + threadIdx.x);
        sum_before(m, ends_piece(p, r) ? piece_cost(t, r) : 0, &total);
    }
    return (uint32_t)total;
}

/* Where the cut before a worker's stretch falls in a piece that begins at `at` of the line. Cuts
 * near an end are moved there: they are not worth a partial result. */
static __device__ uint32_t cut_of(const plan &p, uint32_t worker, uint32_t at, uint32_t n_tiles)
{
    const uint32_t cut = worker * p.stretch;

    if (cut < at + p.snap)
        return 0;
    return cut - at + p.snap > n_tiles ? n_tiles : cut - at;
}

/* Items of this block in a piece that begins at `at`: [first, end) of the row's cuts. */
struct plan_share {
    uint32_t first_cut, n; /* deterministic */
    uint32_t from, to;     /* fast: tiles */
};

static __device__ plan_share share_of(const yard_mla_decode_task &t, const plan &p,
                                      const plan_row &r, uint32_t at)
{
    plan_share s = {};

    if (!t.deterministic) {
        s.from = cut_of(p, p.worker, at, r.tiles);
        s.to = cut_of(p, p.worker + 1, at, r.tiles);
        s.n = s.to > s.from;
        return s;
    }
    const uint32_t split = split_tiles(r.tiles), n = (r.tiles + split - 1) / split;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t length = min(split, r.tiles - i * split) + ITEM_TILES;
        const uint64_t middle = 2 * (at + i * (split + ITEM_TILES)) + length; /* twice */
        if (middle * p.n_workers / (2 * (uint64_t)p.total) != p.worker)
            continue;
        s.first_cut = s.n ? s.first_cut : i;
        s.n++;
    }
    return s;
}

static __device__ mla_item item_of(const yard_mla_decode_task &t, const plan &p, const plan_row &r,
                                   const plan_share &s, uint32_t row, uint32_t i)
{
    const uint32_t n_rows = r.offset % p.chain + 1;
    mla_item item;

    item.row_and_count = (row + 1 - n_rows) * 8 + n_rows;
    if (t.deterministic) {
        const uint32_t split = split_tiles(r.tiles), cut = s.first_cut + i;
        item.first_tile = cut * split;
        item.end_tile = min(item.first_tile + split, r.tiles);
        item.slot =
            count_splits(r.tiles) > 1 ? (int32_t)((row - p.first) * MLA_MAX_SPLITS + cut) : -1;
    } else {
        item.first_tile = s.from;
        item.end_tile = s.to;
        item.slot = s.from == 0 && s.to == r.tiles ? -1 : (int32_t)(2 * p.worker + (s.from == 0));
    }
    return item;
}

/* [max_rows]; the place before it has the end of the rows that may have parts. */
static __device__ mla_splits *splits_of(const yard_mla_decode_task &t)
{
    return (mla_splits *)t.space.splits + 1;
}

/* What the combining kernel reads; by the block with the first part of a piece. */
static __device__ void describe_splits(const yard_mla_decode_task &t, const plan &p,
                                       const plan_row &r, uint32_t at, uint32_t row)
{
    mla_splits s;

    s.lanes = p.lanes;
    if (t.deterministic) {
        s.first = (row - p.first) * MLA_MAX_SPLITS;
        s.second = s.first + 1;
        s.step = 1;
        s.n = count_splits(r.tiles);
    } else {
        s.first = 2 * p.worker + 1;
        s.second = 2 * (p.worker + 1);
        s.step = 2;
        /* the last worker is the first whose end is moved to, or lies at, the end of the piece */
        s.n = (at + r.tiles - p.snap) / p.stretch + 1 - p.worker;
        if (cut_of(p, p.worker + 1, at, r.tiles) == r.tiles)
            s.n = 1;
    }
    for (uint32_t i = 0; i <= r.offset % p.chain; i++) {
        s.offset = r.offset % p.chain - i;
        splits_of(t)[row - i] = s;
    }
}

/* Returns the number of this block's items; writes the first to shared memory, and the rest to its
 * list. All threads; ends with a barrier. */
static __device__ uint32_t make_plan(const yard_mla_decode_task &t, plan_shared &m, plan &p,
                                     mla_item *first_items, mla_item *list)
{
    uint32_t n_pieces = 0;
    uint64_t carry = 0;
    bool even = false;

    if (blockIdx.x == 0 && threadIdx.x == 0)
        splits_of(t)[-1].first = 0;
    p.first = t.first_row;
    p.end = min((uint32_t)*t.batch.n_tokens, t.end_row);
    p.chain = 1;
    p.lanes = (t.n_heads + MLA_ROWS - 1) / MLA_ROWS;
    if (p.first >= p.end)
        return 0;
    if (threadIdx.x == 0) {
        m.first_ordinal = 0xffffffffu;
        m.n_items = 0;
    }
    if (!t.deterministic)
        choose_chain(t, m, p, &n_pieces, &even);
    p.total = sum_costs(t, m, p);
    p.n_workers = gridDim.x / p.lanes;
    p.worker = blockIdx.x / p.lanes;
    p.lane = blockIdx.x % p.lanes;
    if (p.total == 0 || p.worker >= p.n_workers)
        return 0;
    p.stretch = max((p.total + p.n_workers - 1) / p.n_workers, (uint32_t)ITEM_TILES);
    p.whole = false;
    if (even) { /* whole pieces, if that costs little */
        const uint32_t whole = (n_pieces + p.n_workers - 1) / p.n_workers * (m.tiles + ITEM_TILES);
        p.whole = whole <= p.stretch + p.stretch / 16;
        p.stretch = p.whole ? whole : p.stretch;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        splits_of(t)[-1].first = p.whole ? 0 : p.end;
    p.snap = 1 + p.stretch / 16;
    for (uint32_t from = p.first; from < p.end; from += PLAN_THREADS) {
        const uint32_t row = from + threadIdx.x;
        const plan_row r = look_at(t.batch, p, row);
        const bool is_piece = ends_piece(p, r);
        const uint64_t mine =
            is_piece
                ? (uint64_t)(t.deterministic ? count_splits(r.tiles) : 1) << 32 | piece_cost(t, r)
                : 0;
        const uint64_t before = sum_before(m, mine, &carry);
        const uint32_t at = (uint32_t)before;
        plan_share s = {};
        if (is_piece)
            s = share_of(t, p, r, at);
        const uint32_t ordinal = (uint32_t)(before >> 32) + s.first_cut;
        if (s.n)
            atomicMin(&m.first_ordinal, ordinal);
        __syncthreads(); /* the first one is known before the others find their places */
        for (uint32_t i = 0; i < s.n; i++) {
            const uint32_t place = ordinal - m.first_ordinal + i;
            (place < SHARED_ITEMS ? first_items : list)[place] = item_of(t, p, r, s, row, i);
        }
        if (s.n)
            atomicAdd(&m.n_items, s.n);
        if (p.lane == 0 && s.n && s.from == 0 && s.first_cut == 0)
            describe_splits(t, p, r, at, row);
        if (blockIdx.x == 0 && !r.absorbed && row < p.end)
            splits_of(t)[row].n = 0;
    }
    __syncthreads(); /* the list and its length are complete */
    return m.n_items;
}

#endif
