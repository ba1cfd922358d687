/* MLA decode over an FP8 cache: a tile arrives as codes and scales, and the warpgroups that
 * multiply values make bf16 of it where it lies, while their last product runs. */
#ifndef YARD_OPS_CUDA_MLA_WIDEN_CUH
#define YARD_OPS_CUDA_MLA_WIDEN_CUH

#include "ops/cuda/mla_tiles.cuh"
#include "ops/cuda/quantise.cuh"
#include "ops/cuda/softmax.cuh"

/* Group g of a tile's columns arrives in chunk CODES_CHUNK + g and becomes chunks 2 g and 2 g + 1,
 * the lowest first: what is written over has been read. The scales come last. */
enum { GROUPS = MLA_RANK / YARD_GROUP, SCALES_CHUNK = CODES_CHUNK + GROUPS };
static_assert((int)SCALES_CHUNK < ROPE_CHUNK && (int)MLA_CODES_CHUNKS == GROUPS + 1,
              "chunks of a tile");

static __device__ __forceinline__ uint4 widen_eight(uint32_t lo, uint32_t hi, float scale)
{
    return make_uint4(widen_pair(lo, scale), widen_pair(lo >> 16, scale), widen_pair(hi, scale),
                      widen_pair(hi >> 16, scale));
}

/* A tile that arrives in `stage`, when it is there; all value warps. A warp has eight rows, so that
 * only its own lanes read what it writes over; a lane has a quarter of each group of a row. */
static __device__ __forceinline__ void widen_tile(const decode_shared &m, uint32_t stage,
                                                  uint32_t phase)
{
    const uint32_t thread = this_thread(), lane = thread % 32, quarter = lane / 8;
    const uint32_t row = (thread / 32 - SCORE_WARPS) * 8 + lane % 8, swizzle = lane % 8 * 16;
    const uint32_t from = quarter * 32 ^ swizzle, to = quarter % 2 * 64 ^ swizzle;
    uint8_t *tile = m.bytes + stage * TILE_BYTES + row * 128;

    barrier_wait(m.codes + 8 * stage, phase);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const uint8_t *codes = tile + (CODES_CHUNK + g) * CHUNK_BYTES;
        uint8_t *wide = tile + (2 * g + quarter / 2) * CHUNK_BYTES;
        const float scale = *(const float *)(tile + SCALES_CHUNK * CHUNK_BYTES + swizzle + g * 4);
        const uint4 a = *(const uint4 *)(codes + from), b = *(const uint4 *)(codes + (from ^ 16));
        __syncwarp(); /* all of it is read before any of it is written over */
        *(uint4 *)(wide + to) = widen_eight(a.x, a.y, scale);
        *(uint4 *)(wide + (to ^ 16)) = widen_eight(a.z, a.w, scale);
        *(uint4 *)(wide + (to ^ 32)) = widen_eight(b.x, b.y, scale);
        *(uint4 *)(wide + (to ^ 48)) = widen_eight(b.z, b.w, scale);
        if (g > 0) {              /* thirds 0, 1 and 2 are complete with groups 1, 2 and 3 */
            fence_async_shared(); /* wgmma reads what these stores wrote */
            arrive_warp(m.full + 8 * (stage * PARTS + g - 1));
        }
    }
}

static __device__ __forceinline__ uint32_t tiles_of(const decode_shared &m, uint32_t i)
{
    return item_at(m, i).end_tile - item_at(m, i).first_tile;
}

/* The block's first two tiles. */
static __device__ __forceinline__ void widen_first(const decode_shared &m, const block_share &b)
{
    const uint32_t n = b.n_items > 1 ? 2 : b.n_items == 1 ? min(tiles_of(m, 0), 2u) : 0;

#pragma unroll 1
    for (uint32_t stage = 0; stage < n; stage++)
        widen_tile(m, stage, 0);
}

/* Two tiles ahead of the block's tile-th one, which is in `stage`, beneath its product: it is of
 * item i, of which n_left tiles are left with it. */
static __device__ __forceinline__ void widen_ahead(const decode_shared &m, const block_share &b,
                                                   uint32_t i, uint32_t n_left, uint32_t tile,
                                                   uint32_t stage)
{
    const uint32_t n_after = b.n_items - 1 - i; /* items, of a tile at least */

    if (n_left + n_after > 2 || (n_left == 1 && n_after == 1 && tiles_of(m, i + 1) > 1))
        widen_tile(m, stage == 0 ? STAGES - 1 : stage - 1, (tile + 2) / STAGES & 1);
}

#endif
