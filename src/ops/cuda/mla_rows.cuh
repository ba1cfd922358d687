/* What the plan of MLA decode looks at: the rows of a batch, their chains (rows of a sequence,
 * draft tokens) and lengths, and where the deterministic table cuts them. */
#ifndef YARD_OPS_CUDA_MLA_ROWS_CUH
#define YARD_OPS_CUDA_MLA_ROWS_CUH

#include "ops/cuda/mla_decode.h"

struct plan_row {
    bool absorbed, ends; /* ends: the next row is not of the same chain */
    uint32_t offset;     /* in its chain */
    uint32_t tiles, last_positions;
    uint32_t tiles_before; /* of the row before, if there is one */
    int32_t seq;
};

/* Row `row` of `end`. All loads are independent: one trip to memory. */
static __device__ plan_row look_at(const yard_batch &b, uint32_t end, uint32_t row)
{
    const uint32_t at = min(row, end - 1), before = max(at, 1u) - 1;
    const uint32_t after = min(at + 1, end - 1);
    const uint8_t mine = b.absorbed[at], absorbed_before = b.absorbed[before];
    const uint8_t absorbed_after = b.absorbed[after];
    const int32_t seq = b.seq[at], seq_before = b.seq[before], seq_after = b.seq[after];
    const uint32_t position = (uint32_t)b.position[at];
    const uint32_t position_before = (uint32_t)b.position[before];
    plan_row r;

    r.tiles = position / YARD_PAGE_TOKENS + 1;
    r.tiles_before = position_before / YARD_PAGE_TOKENS + 1;
    r.last_positions = position % YARD_PAGE_TOKENS + 1;
    r.seq = seq;
    r.absorbed = row < end && mine;
    r.ends = after == at || !absorbed_after || seq_after != seq;
    r.offset = at > 0 && absorbed_before && seq_before == seq;
    if (r.offset) /* a draft: few steps */
        while (at > r.offset && b.absorbed[at - r.offset - 1] && b.seq[at - r.offset - 1] == seq)
            r.offset++;
    return r;
}

static __device__ bool ends_piece(const plan_row &r, uint32_t chain)
{
    return r.absorbed && (r.ends || r.offset % chain == chain - 1);
}

/* x / d, where that is below 2^20: the reciprocal is off by less than one then. A third of the code
 * of the compiler's division, and the plan is code that runs once. */
static __device__ uint32_t divide(uint32_t x, uint32_t d)
{
    const uint32_t q = (uint32_t)__fdividef((float)x, (float)d);
    const int32_t left = (int32_t)(x - q * d);

    return left < 0 ? q - 1 : left >= (int32_t)d ? q + 1 : q;
}

static __device__ uint32_t divide_up(uint32_t x, uint32_t d)
{
    return divide(x + d - 1, d);
}

/* ---- fixed parts ----------------------------------------------------------------------------- */

/* In tiles; a function of the row's length alone. At least 3: score warps are two tiles ahead at
 * most, so they end no part of the next row while value warps still join this one's, whose sums lie
 * in the same place. */
static __device__ uint32_t part_tiles(uint32_t n_tiles)
{
    uint32_t tiles = n_tiles <= 16 ? 4 : 10;

    while (tiles * MLA_MAX_SPLITS < n_tiles)
        tiles *= 2;
    return tiles;
}

static __device__ uint32_t count_parts(uint32_t n_tiles)
{
    const uint32_t tiles = part_tiles(n_tiles);

    return divide_up(n_tiles, tiles);
}

#endif
