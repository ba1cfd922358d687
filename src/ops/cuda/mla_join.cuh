/* MLA decode joins the parts of a row: a block those of a row that it has alone, when it has the
 * last one; all blocks together, when all are done, the others. There no block has to wait for one
 * that has not begun: after some patience it leaves, and the last one to come joins everything. Who
 * joins changes no bit. */
#ifndef YARD_OPS_CUDA_MLA_JOIN_CUH
#define YARD_OPS_CUDA_MLA_JOIN_CUH

#include "ops/cuda/mla_tiles.cuh"
#include "ops/cuda/softmax.cuh"

enum {
    HALVES = 2, /* of a row's columns, eight a thread of a warp each */
    HALF_COLS = MLA_RANK / HALVES,
    AT_ONCE = 4, /* parts that a warp reads together, while it adds as many */
    TEAM = 4,    /* warps that share half a row where there are few */
    SUM_WORDS = 10 * 32,
    SPIN_NS = 2000,
    LOOK_AGAIN_NS = 100
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
        if ((load_acquire(&meeting->arrived) ^ before) & half)
            return JOIN_SHARE;
        const uint64_t waited_ns = clock_ns() - start;
        if (waited_ns > SPIN_NS) /* many that look keep the last one from arriving */
            __nanosleep(LOOK_AGAIN_NS);
        if (waited_ns < space.patience_ns)
            continue;
        atomicExch(&meeting->left[turn], 1);
        __threadfence(); /* either we see the last one's arrival, or it sees that we left */
        return (load_acquire(&meeting->arrived) ^ before) & half ? JOIN_SHARE : JOIN_NOTHING;
    }
}

/* ---- joining --------------------------------------------------------------------------------- */

/* Where the parts of one head of a row lie. */
struct join_place {
    const uint16_t *values; /* the first part's */
    const float *lse;
    uint32_t n, step; /* step: rows from a part to the next */
    uint16_t *to;     /* NULL: there is no such row */
};

static __device__ __forceinline__ join_place place_of(const yard_mla_decode_task &t,
                                                      const mla_splits &s, uint32_t lanes,
                                                      uint32_t idx)
{
    const uint32_t step = lanes * MLA_ROWS, row = s.row_and_count / 8 + idx / t.n_heads;
    const uint32_t at = s.first * step + idx;
    join_place p;

    p.values = (const uint16_t *)t.space.partial + (size_t)at * MLA_RANK;
    p.lse = t.space.lse + at;
    p.n = s.n;
    p.step = step;
    p.to = idx < s.row_and_count % 8 * t.n_heads
               ? (uint16_t *)t.y.data + (size_t)row * t.y.ld + idx % t.n_heads * MLA_RANK
               : NULL;
    return p;
}

/* Sums of N halves, a thread's columns; total is that of the weights, most their reference. */
template <int N> struct join_sums {
    float x[N][8], total, most;
};

template <int N> static __device__ __forceinline__ join_sums<N> no_sums(void)
{
    join_sums<N> s = {};

    s.most = lowest_log2;
    return s;
}

template <int N> struct join_parts_read {
    uint4 x[AT_ONCE][N];
    float lse[AT_ONCE];
};

/* Parts [first, first + AT_ONCE) before `end` of N halves from `half` on. */
template <int N>
static __device__ __forceinline__ void
read_parts(const join_place &p, uint32_t half, uint32_t first, uint32_t end, join_parts_read<N> &r)
{
    const uint16_t *from =
        p.values + (size_t)(first * p.step) * MLA_RANK + half * HALF_COLS + threadIdx.x % 32 * 8;

#pragma unroll
    for (uint32_t k = 0; k < AT_ONCE; k++) {
        const bool is_part = first + k < end;
        r.lse[k] = is_part ? __ldcg(p.lse + (first + k) * p.step) : -INFINITY;
#pragma unroll
        for (int q = 0; q < N; q++)
            r.x[k][q] = is_part ? __ldcg((const uint4 *)(from + q * HALF_COLS)) : uint4{};
        from += (size_t)p.step * MLA_RANK;
    }
}

static __device__ __forceinline__ void add_weighted(float (&sum)[8], float w, const uint4 &x)
{
    const uint32_t pairs[4] = { x.x, x.y, x.z, x.w };

#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] = fmaf(w, __uint_as_float(pairs[i] << 16), sum[2 * i]);
        sum[2 * i + 1] = fmaf(w, __uint_as_float(pairs[i] & 0xffff0000u), sum[2 * i + 1]);
    }
}

/* Moves the reference; all lanes of a warp have the same. */
template <int N> static __device__ __forceinline__ void refer_to(join_sums<N> &s, float most)
{
    const float shrink = exp2_fast(s.most - most);

    s.most = most;
    s.total *= shrink;
#pragma unroll
    for (int q = 0; q < N; q++)
#pragma unroll
        for (int k = 0; k < 8; k++)
            s.x[q][k] *= shrink;
}

template <int N>
static __device__ __forceinline__ void add_parts(join_sums<N> &s, const join_parts_read<N> &r)
{
    float most = s.most;

#pragma unroll
    for (int k = 0; k < AT_ONCE; k++)
        most = fmaxf(most, r.lse[k]);
    refer_to(s, most);
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
        const float w = exp2_fast(r.lse[k] - most);
        s.total += w;
#pragma unroll
        for (int q = 0; q < N; q++)
            add_weighted(s.x[q], w, r.x[k][q]);
    }
}

template <int N>
static __device__ __forceinline__ void store_joined(const join_place &p, uint32_t half,
                                                    const join_sums<N> &s)
{
    const float inverse = 1.0f / s.total;

#pragma unroll
    for (int q = 0; q < N; q++)
        *(uint4 *)(p.to + (half + q) * HALF_COLS + threadIdx.x % 32 * 8) =
            make_uint4(pack_bf16(s.x[q][0] * inverse, s.x[q][1] * inverse),
                       pack_bf16(s.x[q][2] * inverse, s.x[q][3] * inverse),
                       pack_bf16(s.x[q][4] * inverse, s.x[q][5] * inverse),
                       pack_bf16(s.x[q][6] * inverse, s.x[q][7] * inverse));
}

/* A warp joins rows i, i + step .. before `end` of those that PLACES has, a row's parts in
 * ascending order; the next parts are on their way while some are added, be they of the next row.
 */
template <typename PLACES>
static __device__ __forceinline__ void join_rows(const PLACES &places, uint32_t i, uint32_t step,
                                                 uint32_t end)
{
    join_parts_read<HALVES> now, next;
    join_sums<HALVES> sums = no_sums<HALVES>();
    join_place p, next_p;
    uint32_t first = 0;

    if (i >= end)
        return;
    p = next_p = places.at(i);
    read_parts<HALVES>(p, 0, 0, p.n, next);
#pragma unroll 1
    for (;;) {
        const bool is_last = first + AT_ONCE >= p.n;
        now = next;
        first = is_last ? 0 : first + AT_ONCE;
        if (is_last && i + step < end)
            next_p = places.at(i + step);
        if (!is_last || i + step < end)
            read_parts<HALVES>(next_p, 0, first, next_p.n, next);
        add_parts(sums, now);
        if (!is_last)
            continue;
        if (p.to)
            store_joined(p, 0, sums);
        i += step;
        if (i >= end)
            return;
        p = next_p;
        sums = no_sums<HALVES>();
    }
}

/* The rows of a block. */
struct own_places {
    const yard_mla_decode_task &t;
    const block_share &b;
    mla_splits s;

    __device__ __forceinline__ join_place at(uint32_t i) const
    {
        return place_of(t, s, b.lanes, b.lane * MLA_ROWS + i);
    }
};

/* The parts of rows that the block has alone, after the last one; the value warps. */
static __device__ __forceinline__ void join_own(const yard_mla_decode_task &t, const block_share &b,
                                                const mla_item &last)
{
    const own_places places = {
        t, b, { last.row_and_count, (uint16_t)(last.slot + 1 - last.n_parts), last.n_parts }
    };

    named_sync(OWN_STORED, 256); /* all columns of all parts are stored */
    join_rows(places, threadIdx.x / 32 - SCORE_WARPS, VALUE_WARPS, MLA_ROWS);
    named_sync(OWN_STORED, 256); /* the next row's parts go where these were */
}

/* The rows of all pieces that several blocks have. */
struct shared_places {
    const yard_mla_decode_task &t;
    const plan_kept &kept;
    const mla_splits *splits; /* beyond the first */
    uint32_t n_rows, lanes;   /* of a piece */

    __device__ __forceinline__ join_place at(uint32_t i) const
    {
        const uint32_t ordinal = i / n_rows;

        return place_of(t, (ordinal < SHARED_SPLITS ? kept.splits : splits)[ordinal], lanes,
                        i - ordinal * n_rows);
    }
};

/* A warpgroup joins half a row, each warp a stretch of its parts. */
static __device__ __forceinline__ void join_half(const decode_shared &m, const join_place &p,
                                                 uint32_t half)
{
    const uint32_t warp = threadIdx.x / 32, member = warp % TEAM, each = (p.n + TEAM - 1) / TEAM;
    const uint32_t end = min((member + 1) * each, p.n);
    float *words = (float *)m.bytes + warp * SUM_WORDS + threadIdx.x % 32;
    join_parts_read<1> now, next;
    join_sums<1> s = no_sums<1>();

    read_parts<1>(p, half, member * each, end, next);
#pragma unroll 1
    for (uint32_t first = member * each; first < end; first += AT_ONCE) {
        now = next;
        read_parts<1>(p, half, first + AT_ONCE, end, next);
        add_parts(s, now);
    }
    if (member) {
#pragma unroll
        for (int k = 0; k < 8; k++)
            words[k * 32] = s.x[0][k];
        words[8 * 32] = s.total;
        words[9 * 32] = s.most;
    }
    named_sync(TEAM_DONE + warp / TEAM, 32 * TEAM); /* the others' sums are there */
    if (member == 0) {
#pragma unroll
        for (int i = 1; i < TEAM; i++) {
            const float *other = words + i * SUM_WORDS;
            refer_to(s, fmaxf(s.most, other[9 * 32]));
            const float w = exp2_fast(other[9 * 32] - s.most);
#pragma unroll
            for (int k = 0; k < 8; k++)
                s.x[0][k] = fmaf(w, other[k * 32], s.x[0][k]);
            s.total = fmaf(w, other[8 * 32], s.total);
        }
        store_joined(p, half, s);
    }
    named_sync(TEAM_DONE + warp / TEAM, 32 * TEAM); /* before the next sums are written */
}

/* Each warp takes rows, or each warpgroup halves of rows where those are few: not in the
 * deterministic table, whose sums are the same in all batches. */
static __device__ __forceinline__ void join_shared(const yard_mla_decode_task &t,
                                                   const decode_shared &m, const mla_splits *splits,
                                                   uint32_t first, uint32_t n_blocks)
{
    const plan_kept &kept = *(const plan_kept *)(m.bytes + KEPT_AT);
    const uint32_t n_rows = kept.chain * t.n_heads, warp = threadIdx.x / 32;
    const uint32_t n_halves = kept.n_splits * n_rows * HALVES;
    const shared_places places = { t, kept, splits, n_rows, (n_rows + MLA_ROWS - 1) / MLA_ROWS };

    if (t.deterministic || n_halves * TEAM > 2 * gridDim.x * PLAN_WARPS) {
        join_rows(places, first + warp * n_blocks, n_blocks * PLAN_WARPS, kept.n_splits * n_rows);
        return;
    }
#pragma unroll 1
    for (uint32_t i = first + warp / TEAM * n_blocks; i < n_halves;
         i += n_blocks * (PLAN_WARPS / TEAM)) {
        const join_place p = places.at(i / HALVES);
        if (p.to)
            join_half(m, p, i % HALVES);
    }
}

/* All threads of the block, when it is done. splits: the block's list of them. */
static __device__ __forceinline__ void join_parts(const yard_mla_decode_task &t,
                                                  const decode_shared &m, const mla_splits *splits)
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
    if (mine != JOIN_NOTHING)
        join_shared(t, m, splits, mine == JOIN_ALL ? 0 : blockIdx.x,
                    mine == JOIN_ALL ? 1 : gridDim.x);
}

#endif
