/* MLA decode joins the parts of a row: a block those of a row that it has alone, when it has the
 * last one; all blocks together, when all are done, the others. There no block has to wait for one
 * that has not begun: after some patience it leaves, and the last one to come joins everything. Who
 * joins changes no bit. */
#ifndef YARD_OPS_CUDA_MLA_JOIN_CUH
#define YARD_OPS_CUDA_MLA_JOIN_CUH

#include "ops/cuda/mla_tiles.cuh"
#include "ops/cuda/softmax.cuh"

enum {
    QUARTERS = 4, /* of a row's columns, four a thread of a warp each */
    QUARTER_COLS = MLA_RANK / QUARTERS,
    SHARED_AT_ONCE = 32, /* loads a thread has under way */
    OWN_AT_ONCE = 16
};

/* ---- who joins ------------------------------------------------------------------------------- */

enum share { JOIN_NOTHING, JOIN_SHARE, JOIN_ALL };

static __device__ __forceinline__ uint64_t clock_ns(void)
{
    uint64_t ns;

    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

/* One thread, after a barrier of the block. The upper bit of `arrived` turns over when the last
 * block arrives, and the others are 0 again then: nothing is left to be cleared for the next
 * launch, or the next replay of a graph. */
static __device__ share meet(const yard_mla_workspace &space)
{
    const uint32_t half = 0x80000000u;
    const uint32_t mine = blockIdx.x == 0 ? half - (gridDim.x - 1) : 1;
    yard_mla_meeting *meeting = space.meeting;

    /* the block's partial results are visible to whoever sees it arrive */
    const uint32_t before = add_acq_rel(&meeting->arrived, mine), turn = before >> 31;
    if ((before ^ (before + mine)) & half) {
        __threadfence(); /* the arrival, before `left` is read */
        meeting->left[turn ^ 1] = 0;
        return atomicAdd(&meeting->left[turn], 0) ? JOIN_ALL : JOIN_SHARE;
    }
    for (const uint64_t start = clock_ns();;) {
        if ((load_relaxed(&meeting->arrived) ^ before) & half) {
            load_acquire(&meeting->arrived);
            return JOIN_SHARE;
        }
        if (clock_ns() - start < space.patience_ns)
            continue;
        atomicExch(&meeting->left[turn], 1);
        __threadfence(); /* either we see the last one's arrival, or it sees that we left */
        return (load_acquire(&meeting->arrived) ^ before) & half ? JOIN_SHARE : JOIN_NOTHING;
    }
}

/* ---- joining --------------------------------------------------------------------------------- */

/* Where the parts of one head of a row lie. */
struct join_place {
    mla_splits s;
    uint32_t lanes, idx; /* idx: among the query rows of the piece */

    /* The place of a part's row among those of all rooms. */
    __device__ __forceinline__ uint32_t at(uint32_t i) const
    {
        const uint32_t slot = i == 0 ? s.first : s.second + (i - 1) * s.step;

        return slot * lanes * MLA_ROWS + idx;
    }
};

/* A warp joins N quarters from first_quarter on, parts in ascending order. */
template <int N, int AT_ONCE>
static __device__ __forceinline__ void join(const yard_mla_decode_task &t, const join_place &p,
                                            uint32_t first_quarter, uint16_t *to)
{
    constexpr uint32_t parts = AT_ONCE / N;
    const uint32_t lane = threadIdx.x % 32, col = first_quarter * QUARTER_COLS + lane * 4;
    const uint2 *partial = (const uint2 *)t.space.partial + col / 4;
    float most = -INFINITY, total = 0.0f, weight = 0.0f, sum[N][4] = {};

    for (uint32_t first = 0; first < p.s.n; first += parts) {
        uint2 x[parts][N];
#pragma unroll
        for (uint32_t k = 0; k < parts; k++) {
            const uint2 *from = partial + (size_t)p.at(first + k) * (MLA_RANK / 4);
#pragma unroll
            for (int q = 0; q < N; q++)
                x[k][q] = first + k < p.s.n ? __ldcg(from + q * (QUARTER_COLS / 4)) : uint2{};
        }
        if (first == 0) { /* after the first loads, so that all are one trip to memory */
            for (uint32_t i = lane; i < p.s.n; i += 32)
                most = fmaxf(most, __ldcg(t.space.lse + p.at(i)));
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2)
                most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, distance));
        }
        if (first % 32 == 0) {
            const uint32_t i = first + lane;
            weight = i < p.s.n ? exp2_fast(__ldcg(t.space.lse + p.at(i)) - most) : 0.0f;
            total += weight;
        }
#pragma unroll
        for (uint32_t k = 0; k < parts; k++) {
            const float w = __shfl_sync(0xffffffffu, weight, (first + k) % 32);
#pragma unroll
            for (int q = 0; q < N; q++) {
                sum[q][0] = fmaf(w, __uint_as_float(x[k][q].x << 16), sum[q][0]);
                sum[q][1] = fmaf(w, __uint_as_float(x[k][q].x & 0xffff0000u), sum[q][1]);
                sum[q][2] = fmaf(w, __uint_as_float(x[k][q].y << 16), sum[q][2]);
                sum[q][3] = fmaf(w, __uint_as_float(x[k][q].y & 0xffff0000u), sum[q][3]);
            }
        }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        total += __shfl_xor_sync(0xffffffffu, total, distance);
    const float inverse = 1.0f / total;
#pragma unroll
    for (int q = 0; q < N; q++)
        *(uint2 *)(to + col + q * QUARTER_COLS) =
            make_uint2(pack_bf16(sum[q][0] * inverse, sum[q][1] * inverse),
                       pack_bf16(sum[q][2] * inverse, sum[q][3] * inverse));
}

/* The query row's result in y, if there is such a row. */
static __device__ __forceinline__ uint16_t *joined_at(const yard_mla_decode_task &t,
                                                      const join_place &p)
{
    if (p.idx >= p.s.row_and_count % 8 * t.n_heads)
        return NULL;
    return (uint16_t *)t.y.data + (size_t)(p.s.row_and_count / 8 + p.idx / t.n_heads) * t.y.ld +
           p.idx % t.n_heads * MLA_RANK;
}

/* The parts of a row that the block has alone, after the last one; the value warps. */
static __device__ __forceinline__ void join_own(const yard_mla_decode_task &t, const block_share &b,
                                                const mla_item &last)
{
    join_place p;

    p.s.row_and_count = last.row_and_count;
    p.s.n = last.n_parts;
    p.s.first = last.slot + 1 - last.n_parts;
    p.s.second = p.s.first + 1;
    p.s.step = 1;
    p.lanes = b.lanes;
    named_sync(OWN_STORED, 256); /* all columns of all parts are stored */
    for (uint32_t row = threadIdx.x / 32 - 4; row < MLA_ROWS; row += 8) {
        p.idx = b.lane * MLA_ROWS + row;
        uint16_t *to = joined_at(t, p);
        if (to)
            join<QUARTERS, OWN_AT_ONCE>(t, p, 0, to);
    }
    named_sync(OWN_STORED, 256); /* the next row's parts go where these were */
}

/* A warp takes one head of a row, or a quarter of its columns where those are few. */
static __device__ __forceinline__ void
join_shared(const yard_mla_decode_task &t, const plan_kept &kept, uint32_t first, uint32_t n_blocks)
{
    const uint32_t n_rows = kept.chain * t.n_heads; /* of a piece */
    const bool few = kept.n_splits * n_rows * 2 <= gridDim.x * PLAN_WARPS;
    const uint32_t split = few ? QUARTERS : 1, n_units = kept.n_splits * n_rows * split;
    join_place p;

    p.lanes = (n_rows + MLA_ROWS - 1) / MLA_ROWS;
    for (uint32_t i = first + threadIdx.x / 32 * n_blocks; i < n_units;
         i += n_blocks * PLAN_WARPS) {
        const uint32_t unit = i / split, ordinal = unit / n_rows;
        p.s = ordinal < SHARED_SPLITS ? kept.splits[ordinal]
                                      : ((const mla_splits *)t.space.splits)[ordinal];
        p.idx = unit % n_rows;
        uint16_t *to = joined_at(t, p);
        if (to && few)
            join<1, SHARED_AT_ONCE>(t, p, i % split, to);
        else if (to)
            join<QUARTERS, SHARED_AT_ONCE>(t, p, 0, to);
    }
}

/* All threads of the block, when it is done. */
static __device__ __forceinline__ void join_parts(const yard_mla_decode_task &t,
                                                  const decode_shared &m)
{
    const plan_kept &kept = *(const plan_kept *)(m.bytes + KEPT_AT);
    volatile uint32_t *share_of_block = (volatile uint32_t *)(m.bytes + FEED_AT);

    if (kept.n_splits == 0)
        return;
    named_sync(ALL_STORED, PLAN_THREADS); /* all partial results are stored */
    if (threadIdx.x == 0)
        *share_of_block = meet(t.space);
    named_sync(ALL_STORED, PLAN_THREADS); /* everybody's are */
    const uint32_t mine = *share_of_block;
    if (mine == JOIN_ALL)
        join_shared(t, kept, 0, 1);
    else if (mine == JOIN_SHARE)
        join_shared(t, kept, blockIdx.x, gridDim.x);
}

#endif
