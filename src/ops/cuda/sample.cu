/* Sampling: a cluster of thread blocks holds a whole row of logits in shared memory, a slice a
 * block.
 *
 * The definition walks down the sorted candidates and adds up weights until they pass a threshold.
 * Nothing is sorted here: weights are whole numbers (2^45 for the best candidate), so that sums are
 * exact in any order, a histogram over the logits says in which bin a threshold is passed, and only
 * that bin's candidates are compared with each other. top-k is the same search with weights of 1.
 */
#include "ops/cuda/launch.h"

#include <float.h>
#include <math_constants.h>

#include "ops/cuda/rows.cuh"

enum {
    SAMPLE_THREADS = 512,
    SAMPLE_WARPS = SAMPLE_THREADS / WARP_LANES,
    CLUSTER = 8,              /* blocks of a row */
    SAMPLE_MAX_CLUSTERS = 32, /* two blocks on each of 128 processors */
    BINS = 2048,
    OWN_BINS = BINS / CLUSTER, /* bins whose sum over the cluster a block makes */
    LIST = 768,                /* candidates of one bin that are compared directly */
    LIMBS = 3,                 /* of a bin's sum in a slice, 16 bits of each weight: no carry */
    COUNTERS = LIMBS * BINS,   /* ids whose occurrences are counted at once, in the bins' place */
    EXP_STEPS = 64,            /* of a factor 2 */
    WEIGHT_BITS = 45,          /* 2^45 * 2^17 candidates fit */
    MAX_SAMPLE_BYTES = 227 << 10
};

typedef uint64_t candidate; /* the order key of a logit above the complement of its id */

typedef struct listed {
    candidate key;
    uint64_t weight;
} listed;

/* The slice follows, in whole vectors. */
struct alignas(16) sample_shared {
    uint32_t bin[LIMBS][BINS];  /* of this block's slice */
    listed list[LIST];          /* rank 0's: of the bin in question */
    uint64_t own_sum[OWN_BINS]; /* over the cluster */
    double exp_step[EXP_STEPS];
    uint64_t told[2][2][CLUSTER]; /* what the blocks told each other; two sets take turns */
    uint64_t answer[2];           /* of a search: what rank 0 tells all */
    uint64_t partial[2][SAMPLE_WARPS];
    uint64_t found_before;
    uint32_t found_bin;
    uint32_t n_listed[2]; /* of the two searches in the same bins */
};

/* What is the same in all threads of a block. */
typedef struct sampler {
    sample_shared *m;
    float *logits; /* the slice: minus infinity for what is no candidate */
    uint32_t rank, n, first;
    uint32_t turn;              /* which set of told comes next */
    uint32_t n_searches;        /* in the bins as they are */
    bool counting;              /* weights are 1 */
    uint64_t rank_sum[CLUSTER]; /* of the bins that each rank has */
    float max_logit;            /* as in the definition */
    float bins_per_unit;
    double steps_per_unit; /* EXP_STEPS / (ln 2 * temperature) */
} sampler;

template <typename T> static __device__ __forceinline__ T *at_rank(T *p, uint32_t rank)
{
    return (T *)__cluster_map_shared_rank(p, rank);
}

/* ---- sums and maxima over the cluster ----------------------------------------------------------
 */

typedef struct pair {
    uint64_t a, b;
} pair;

/* op over all threads of the cluster, for both numbers; op commutes. */
template <typename OP>
static __device__ __forceinline__ pair over_cluster(sampler *s, pair x, OP op)
{
    sample_shared *m = s->m;
    const uint32_t lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    const uint32_t turn = s->turn;

    for (int d = WARP_LANES / 2; d > 0; d /= 2) {
        x.a = op(x.a, __shfl_xor_sync(0xffffffffu, x.a, d));
        x.b = op(x.b, __shfl_xor_sync(0xffffffffu, x.b, d));
    }
    if (lane == 0) {
        m->partial[0][warp] = x.a;
        m->partial[1][warp] = x.b;
    }
    __syncthreads();
    if (warp == 0) {
        x = (pair){ m->partial[0][lane % SAMPLE_WARPS], m->partial[1][lane % SAMPLE_WARPS] };
        for (int d = SAMPLE_WARPS / 2; d > 0; d /= 2) {
            x.a = op(x.a, __shfl_xor_sync(0xffffffffu, x.a, d));
            x.b = op(x.b, __shfl_xor_sync(0xffffffffu, x.b, d));
        }
        if (lane < CLUSTER) { /* lane r tells rank r */
            *at_rank(&m->told[turn][0][s->rank], lane) = x.a;
            *at_rank(&m->told[turn][1][s->rank], lane) = x.b;
        }
    }
    /* A set is written again two turns later: by then all have read it, since they came to the
     * barrier between. */
    cluster_sync();
    s->turn = 1 - turn;
    x = (pair){ m->told[turn][0][0], m->told[turn][1][0] };
    for (int r = 1; r < CLUSTER; r++)
        x = (pair){ op(x.a, m->told[turn][0][r]), op(x.b, m->told[turn][1][r]) };
    return x;
}

static __device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static __device__ __forceinline__ uint64_t added(uint64_t a, uint64_t b)
{
    return a + b;
}

/* ---- candidates ------------------------------------------------------------------------------ */

static __device__ __forceinline__ candidate candidate_of(float logit, uint32_t id)
{
    const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0f)); /* -0 equals 0 */

    return (uint64_t)(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | (uint32_t)~id;
}

static __device__ __forceinline__ float candidate_logit(candidate key)
{
    const uint32_t ordered = (uint32_t)(key >> 32);

    return __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

/* 0 for what is no candidate, 1 when counting, else exp((logit - max) / temperature) in units of
 * 2^-45, to about half a unit: 2^(k / 64) from a table times a polynomial on 1/128 of an octave.
 * What is below half a unit counts as nothing. No branches: several of these are under way at once.
 */
static __device__ __forceinline__ uint64_t weight_of(const sampler *s, float logit)
{
    const double shift = 0x1.8p52; /* adding it rounds to a whole number in the low bits */
    const double u = ((double)logit - (double)s->max_logit) * s->steps_per_unit;
    const double k = u + shift;
    const double r = (u - (k - shift)) * (0.69314718055994530942 / EXP_STEPS);
    const int32_t steps = __double2loint(k);
    double p;
    uint64_t w;

    p = __fma_rn(r, 1.0 / 120, 1.0 / 24);
    p = __fma_rn(p, r, 1.0 / 6);
    p = __fma_rn(p, r, 0.5);
    p = __fma_rn(p, r, 1.0);
    p = __fma_rn(p, r, 1.0) * s->m->exp_step[steps & (EXP_STEPS - 1)];
    p = __hiloint2double(__double2hiint(p) + (((steps >> 6) + WEIGHT_BITS) << 20),
                         __double2loint(p)) +
        0x1p52; /* rounds */
    w = ((uint64_t)(uint32_t)__double2hiint(p) << 32 | (uint32_t)__double2loint(p)) &
        0xfffffffffffffu;
    if (!(logit > -CUDART_INF_F))
        return 0;
    return s->counting ? 1 : u > -(WEIGHT_BITS + 2.0) * EXP_STEPS ? w : 0;
}

/* Does not fall as logits fall. */
static __device__ __forceinline__ uint32_t bin_of(const sampler *s, float logit)
{
    const float at = __fmul_rn(__fsub_rn(s->max_logit, logit), s->bins_per_unit);

    return at < (float)(BINS - 1) ? (uint32_t)at : BINS - 1;
}

/* ---- the slice ------------------------------------------------------------------------------- */

/* Calls fn(logits of four ids, first of them) for the slice. */
template <typename FN> static __device__ __forceinline__ void each_four(const sampler *s, FN fn)
{
    for (uint32_t i = threadIdx.x * 4; i < s->n; i += SAMPLE_THREADS * 4)
        fn(*(const float4 *)(s->logits + i), i);
}

static __device__ __forceinline__ void load_slice(const sampler *s, const float *logits, bool wide)
{
    if (wide) {
#pragma unroll 8
        for (uint32_t i = threadIdx.x * 4; i < s->n; i += SAMPLE_THREADS * 4)
            *(float4 *)(s->logits + i) = *(const float4 *)(logits + s->first + i);
    } else {
        for (uint32_t i = threadIdx.x; i < (s->n + 3) / 4 * 4; i += SAMPLE_THREADS)
            s->logits[i] = i < s->n ? logits[s->first + i] : -CUDART_INF_F;
    }
    __syncthreads();
}

/* Asks for the slice of the cluster's next row while this one is worked on. */
static __device__ __forceinline__ void prefetch_slice(const sampler *s, const float *logits)
{
    const uint32_t line = 128 / sizeof(float);

    for (uint32_t i = threadIdx.x * line; i < s->n; i += SAMPLE_THREADS * line)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(logits + s->first + i));
}

/* One after the other, since an id may come twice. */
static __device__ __forceinline__ void add_bias(const sampler *s, const yard_sample_row *row,
                                                float *logits)
{
    if (threadIdx.x < WARP_LANES)
        for (uint32_t at = 0; at < row->n_bias; at += WARP_LANES) {
            const uint32_t i = at + threadIdx.x, n = min(row->n_bias - at, (uint32_t)WARP_LANES);
            const uint32_t mine = i < row->n_bias ? (uint32_t)row->bias_token[i] - s->first : ~0u;
            const float value = i < row->n_bias ? row->bias_value[i] : 0.0f;

            for (uint32_t l = 0; l < n; l++) {
                const uint32_t id = __shfl_sync(0xffffffffu, mine, l);
                const float add = __shfl_sync(0xffffffffu, value, l);
                if (threadIdx.x == 0 && id < s->n)
                    logits[s->first + id] = s->logits[id] = __fadd_rn(s->logits[id], add);
            }
        }
    __syncthreads();
}

static __device__ __forceinline__ float penalised(const yard_sample_params *p, float x,
                                                  uint32_t n_output)
{
    x = x > 0.0f ? __fdiv_rn(x, p->repetition_penalty) : __fmul_rn(x, p->repetition_penalty);
    if (n_output > 0)
        x = __fsub_rn(
            x, __fadd_rn(p->presence_penalty, __fmul_rn(p->frequency_penalty, (float)n_output)));
    return x;
}

/* Counts occurrences of the slice's ids, a piece of it at a time, and lowers those that occur. */
static __device__ __forceinline__ void penalise(const sampler *s, const yard_sample_row *row,
                                                float *logits)
{
    const uint32_t in_prompt = 1u << 31;
    uint32_t *count = s->m->bin[0];

    for (uint32_t begin = 0; begin < s->n; begin += COUNTERS) {
        const uint32_t n = min(s->n - begin, (uint32_t)COUNTERS), first = s->first + begin;

        for (uint32_t i = threadIdx.x; i < n; i += SAMPLE_THREADS)
            count[i] = 0;
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < row->n_prompt; i += SAMPLE_THREADS)
            if ((uint32_t)row->prompt[i] - first < n)
                atomicOr(&count[row->prompt[i] - first], in_prompt);
        for (uint32_t i = threadIdx.x; i < row->n_output; i += SAMPLE_THREADS)
            if ((uint32_t)row->output[i] - first < n)
                atomicAdd(&count[row->output[i] - first], 1u);
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n; i += SAMPLE_THREADS)
            if (count[i] != 0)
                logits[first + i] = s->logits[begin + i] =
                    penalised(&row->params, s->logits[begin + i], count[i] & ~in_prompt);
        __syncthreads();
    }
}

/* ---- greedy ---------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t id_of(candidate key)
{
    return key == 0 ? 0u : (uint32_t)~key;
}

static __device__ __forceinline__ candidate largest_of(const sampler *s, candidate best, float4 x,
                                                       uint32_t i)
{
    const float v[4] = { x.x, x.y, x.z, x.w };
    float most = -CUDART_INF_F;
    uint32_t at = 0;

#pragma unroll
    for (uint32_t c = 0; c < 4; c++)
        if (v[c] > most) {
            most = v[c];
            at = i + c;
        }
    return most > -CUDART_INF_F ? larger(best, candidate_of(most, s->first + at)) : best;
}

static __device__ __forceinline__ candidate largest_candidate(sampler *s)
{
    candidate best = 0;

    each_four(s, [&](float4 x, uint32_t i) { best = largest_of(s, best, x, i); });
    return over_cluster(s, (pair){ best, 0 }, larger).a;
}

/* 1 where a logit is infinite or no number: zero times it is not zero. */
static __device__ __forceinline__ uint64_t not_finite(float4 x)
{
    return !(0.0f * x.x == 0.0f && 0.0f * x.y == 0.0f && 0.0f * x.z == 0.0f && 0.0f * x.w == 0.0f);
}

/* The same from where the logits are, which nothing changes; *finite says that all of them are. */
static __device__ __forceinline__ candidate largest_in_place(sampler *s, const float *logits,
                                                             bool *finite)
{
    pair all = { 0, 0 };

#pragma unroll 8
    for (uint32_t i = threadIdx.x * 4; i < s->n; i += SAMPLE_THREADS * 4) {
        const float4 x = *(const float4 *)(logits + s->first + i);

        all.a = largest_of(s, all.a, x, i);
        all.b |= not_finite(x);
    }
    all = over_cluster(s, all, larger);
    *finite = all.b == 0;
    return all.a;
}

/* Of the slice; beyond its end there is minus infinity. */
static __device__ __forceinline__ bool are_finite(sampler *s)
{
    uint64_t bad = 0;

    each_four(s, [&](float4 x, uint32_t i) {
        x.y = i + 1 < s->n ? x.y : 0.0f;
        x.z = i + 2 < s->n ? x.z : 0.0f;
        x.w = i + 3 < s->n ? x.w : 0.0f;
        bad |= not_finite(x);
    });
    return over_cluster(s, (pair){ bad, 0 }, larger).a == 0;
}

/* ---- the search ------------------------------------------------------------------------------ */

/* Makes candidates plain numbers and everything else minus infinity; the range of the bins. False:
 * there is no candidate. */
static __device__ __forceinline__ bool prepare(sampler *s, double temperature)
{
    candidate best = 0, worst = 0; /* worst: of the negated logits, the largest */
    float highest = -CUDART_INF_F, lowest = CUDART_INF_F, range;
    pair both;

    each_four(s, [&](float4 x, uint32_t i) {
        float v[4] = { x.x, x.y, x.z, x.w };
#pragma unroll
        for (int c = 0; c < 4; c++) {
            v[c] = v[c] > -CUDART_INF_F ? fminf(v[c], FLT_MAX) : -CUDART_INF_F;
            highest = fmaxf(highest, v[c]);
            lowest = v[c] > -CUDART_INF_F ? fminf(lowest, v[c]) : lowest;
        }
        *(float4 *)(s->logits + i) = make_float4(v[0], v[1], v[2], v[3]);
    });
    if (highest > -CUDART_INF_F) {
        best = candidate_of(highest, 0);
        worst = candidate_of(-lowest, 0);
    }
    both = over_cluster(s, (pair){ best, worst }, larger);
    if (both.a == 0)
        return false;
    s->max_logit = candidate_logit(both.a);
    /* what is further below than this weighs nothing */
    range = fminf(__fadd_rn(s->max_logit, candidate_logit(both.b)),
                  (float)((WEIGHT_BITS + 2) * 0.6931472 * temperature));
    s->bins_per_unit = range > 0.0f ? (float)BINS / range : 0.0f;
    s->steps_per_unit = EXP_STEPS / (0.69314718055994530942 * temperature);
    return true;
}

/* Sums of weights by bin, over the cluster; returns the sum of all. */
static __device__ __forceinline__ uint64_t fill_bins(sampler *s)
{
    sample_shared *m = s->m;
    uint64_t own = 0;

    for (uint32_t b = threadIdx.x; b < LIMBS * BINS; b += SAMPLE_THREADS)
        m->bin[0][b] = 0;
    if (threadIdx.x < 2)
        m->n_listed[threadIdx.x] = 0;
    s->n_searches = 0;
    __syncthreads();
    each_four(s, [&](float4 x, uint32_t) {
        const float v[4] = { x.x, x.y, x.z, x.w };
        uint64_t w[4];
#pragma unroll
        for (int c = 0; c < 4; c++)
            w[c] = weight_of(s, v[c]);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const uint32_t b = bin_of(s, v[c]);
#pragma unroll
            for (int l = 0; l < LIMBS; l++)
                if ((w[c] >> 16 * l & 0xffff) != 0)
                    atomicAdd(&m->bin[l][b], (uint32_t)(w[c] >> 16 * l & 0xffff));
        }
    });
    cluster_sync(); /* every block's bins are complete */
    if (threadIdx.x < OWN_BINS) {
        const uint32_t b = s->rank * OWN_BINS + threadIdx.x;
        for (uint32_t r = 0; r < CLUSTER; r++)
            for (uint32_t l = 0; l < LIMBS; l++)
                own += (uint64_t)*at_rank(&m->bin[l][b], r) << 16 * l;
        m->own_sum[threadIdx.x] = own;
    }
    /* Also: nobody clears its bins before all have read them, and all sums are there. */
    const uint32_t turn = s->turn;
    own = over_cluster(s, (pair){ own, 0 }, added).a;
    for (uint32_t r = 0; r < CLUSTER; r++)
        s->rank_sum[r] = m->told[turn][0][r];
    return own;
}

/* One thread of the cluster tells all blocks what the search found. */
static __device__ __forceinline__ void tell(const sampler *s, uint64_t a, uint64_t b)
{
    for (uint32_t r = 0; r < CLUSTER; r++) {
        *at_rank(&s->m->answer[0], r) = a;
        *at_rank(&s->m->answer[1], r) = b;
    }
}

/* The bin in which the sum from the top reaches `wanted`, and the sum before it. Every block looks
 * for itself, in the sums of the rank that has the bin. */
static __device__ __forceinline__ void find_bin(const sampler *s, uint64_t wanted, uint32_t *bin,
                                                uint64_t *before)
{
    enum { EACH = OWN_BINS / WARP_LANES };
    sample_shared *m = s->m;
    uint64_t above = 0;
    uint32_t owner = 0;

#pragma unroll
    for (uint32_t r = 0; r < CLUSTER - 1; r++)
        if (owner == r && above + s->rank_sum[r] < wanted) {
            above += s->rank_sum[r];
            owner = r + 1;
        }
    if (threadIdx.x < WARP_LANES) {
        const uint32_t first = threadIdx.x * EACH;
        const uint64_t *sums = at_rank(m->own_sum, owner) + first;
        uint64_t sum[EACH], mine = 0, at;

#pragma unroll
        for (uint32_t i = 0; i < EACH; i++)
            sum[i] = sums[i];
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++)
            mine += sum[i];
        at = mine;
        for (int d = 1; d < WARP_LANES; d *= 2) {
            const uint64_t lower = __shfl_up_sync(0xffffffffu, at, d);
            at += (int)threadIdx.x >= d ? lower : 0;
        }
        at += above - mine;
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++) {
            if (at < wanted && wanted <= at + sum[i]) {
                m->found_bin = owner * OWN_BINS + first + i;
                m->found_before = at;
            }
            at += sum[i];
        }
    }
    __syncthreads();
    *bin = m->found_bin;
    *before = m->found_before;
    __syncthreads(); /* the next search writes there again */
}

/* Puts the bin's candidates into rank 0's list; returns how many there are, LIST or more. */
static __device__ __forceinline__ uint32_t list_bin(sampler *s, uint32_t bin)
{
    sample_shared *m = s->m;
    uint32_t *n_listed = at_rank(&m->n_listed[s->n_searches++ % 2], 0);

    each_four(s, [&](float4 x, uint32_t i) {
        const float v[4] = { x.x, x.y, x.z, x.w };
#pragma unroll
        for (uint32_t c = 0; c < 4; c++)
            if (v[c] > -CUDART_INF_F && bin_of(s, v[c]) == bin) {
                const uint32_t at = atomicAdd(n_listed, 1u);
                if (at < LIST)
                    *at_rank(&m->list[at], 0) =
                        (listed){ candidate_of(v[c], s->first + i + c), weight_of(s, v[c]) };
            }
    });
    cluster_sync(); /* the list is complete */
    return *n_listed;
}

/* Tells the listed candidate at which the sum reaches `wanted`, and that sum. */
static __device__ __forceinline__ void compare_listed(const sampler *s, uint32_t n, uint64_t before,
                                                      uint64_t wanted)
{
    const listed *list = s->m->list;

    for (uint32_t i = threadIdx.x; i < n; i += SAMPLE_THREADS) {
        uint64_t sum = before;
        for (uint32_t j = 0; j < n; j++)
            sum += list[j].key >= list[i].key ? list[j].weight : 0;
        if (sum >= wanted && sum - list[i].weight < wanted)
            tell(s, list[i].key, sum);
    }
}

/* The sum over the bin's candidates from key `least` on. */
static __device__ __forceinline__ uint64_t bin_weight(sampler *s, uint32_t bin, candidate least)
{
    uint64_t sum = 0;

    for (uint32_t i = threadIdx.x; i < s->n; i += SAMPLE_THREADS) {
        const float x = s->logits[i];
        if (x > -CUDART_INF_F && bin_of(s, x) == bin && candidate_of(x, s->first + i) >= least)
            sum += weight_of(s, x);
    }
    return over_cluster(s, (pair){ sum, 0 }, added).a;
}

/* The same for a bin of more candidates than the list takes (equal logits, mostly): the largest key
 * whose sum is enough, by halving the interval. */
static __device__ __forceinline__ candidate halve_bin(sampler *s, uint32_t bin, uint64_t before,
                                                      uint64_t wanted, uint64_t *upto)
{
    candidate low = 0, high = 0; /* low: complement of the smallest key, so that both are maxima */
    pair ends;

    for (uint32_t i = threadIdx.x; i < s->n; i += SAMPLE_THREADS) {
        const float x = s->logits[i];
        if (!(x > -CUDART_INF_F) || bin_of(s, x) != bin)
            continue;
        high = larger(high, candidate_of(x, s->first + i));
        low = larger(low, ~candidate_of(x, s->first + i));
    }
    ends = over_cluster(s, (pair){ high, low }, larger);
    high = ends.a;
    low = ~ends.b;
    *upto = before + bin_weight(s, bin, low);
    while (low < high) {
        const candidate middle = low + (high - low + 1) / 2;
        const uint64_t sum = before + bin_weight(s, bin, middle);

        if (sum >= wanted) {
            low = middle;
            *upto = sum;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* The candidate at which the sum of weights from the top reaches `wanted`, 1 to the sum of all;
 * *upto is the sum with it. At most two searches in the same bins. Where it is the row's last one,
 * rank 0 alone knows, and nobody waits for it. */
static __device__ __forceinline__ candidate search(sampler *s, uint64_t wanted, bool is_last,
                                                   uint64_t *upto)
{
    uint64_t before;
    uint32_t bin, n;

    find_bin(s, wanted, &bin, &before);
    n = list_bin(s, bin);
    if (n > LIST)
        return halve_bin(s, bin, before, wanted, upto);
    if (s->rank == 0)
        compare_listed(s, n, before, wanted);
    if (is_last)
        __syncthreads();
    else
        cluster_sync();
    *upto = s->m->answer[1];
    return s->m->answer[0];
}

/* ---- drawing --------------------------------------------------------------------------------- */

static __device__ __forceinline__ void keep_top_k(sampler *s, uint32_t k)
{
    candidate least;
    uint64_t upto;

    s->counting = true;
    if (fill_bins(s) > k) {
        least = search(s, k, false, &upto);
        for (uint32_t i = threadIdx.x; i < s->n; i += SAMPLE_THREADS)
            if (s->logits[i] > -CUDART_INF_F && candidate_of(s->logits[i], s->first + i) < least)
                s->logits[i] = -CUDART_INF_F;
    }
    s->counting = false;
}

/* The sum of the weights that are not below min_p; the first candidate always counts. */
static __device__ __forceinline__ uint64_t min_p_weight(sampler *s, float min_p)
{
    const double one = (double)(1ull << WEIGHT_BITS);
    const double least = (double)min_p * one;
    uint64_t sum = 0;

    each_four(s, [&](float4 x, uint32_t) {
        const float v[4] = { x.x, x.y, x.z, x.w };
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const uint64_t w = weight_of(s, v[c]);
            sum += (double)w >= least ? w : 0;
        }
    });
    return larger(over_cluster(s, (pair){ sum, 0 }, added).a, 1ull << WEIGHT_BITS);
}

/* As yard_cpu_sample_uniform: 53 random bits. */
static __device__ __forceinline__ uint64_t mix64(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static __device__ __forceinline__ uint64_t random_bits(uint64_t seed, uint64_t position)
{
    const uint64_t golden = 0x9e3779b97f4a7c15ull;

    return mix64(mix64(seed + golden) + golden * (position + 1)) >> 11;
}

static __device__ __forceinline__ candidate draw(sampler *s, const yard_sample_row *row)
{
    const yard_sample_params *p = &row->params;
    uint64_t kept, upto;

    if (!prepare(s, (double)p->temperature))
        return 0;
    if (p->top_k > 0)
        keep_top_k(s, (uint32_t)p->top_k);
    kept = fill_bins(s);
    if (p->top_p < 1.0f) {
        const double enough = ceil((double)p->top_p * (double)kept);
        search(s, enough < 1.0 ? 1 : min((uint64_t)enough, kept), false, &upto);
        kept = upto;
    }
    if (p->min_p > 0.0f)
        kept = min(kept, min_p_weight(s, p->min_p));
    /* floor of the random number times what is kept: whole numbers again */
    return search(s, __umul64hi(random_bits(p->seed, row->position) << 11, kept) + 1, true, &upto);
}

/* ---- the kernel ------------------------------------------------------------------------------ */

typedef struct sample_args {
    yard_sample_args a;
    uint32_t slice; /* logits of a block */
    bool wide;
} sample_args;

static __device__ __forceinline__ bool has_penalties(const yard_sample_params *p)
{
    return p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f ||
           p->frequency_penalty != 0.0f;
}

/* Nothing changes its logits. */
static __device__ __forceinline__ bool is_plain_greedy(const yard_sample_row *row)
{
    return !(row->params.temperature > 0.0f) && row->n_bias == 0 && !has_penalties(&row->params);
}

static __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(SAMPLE_THREADS, 2)
    sample_kernel(const __grid_constant__ sample_args n)
{
    extern __shared__ float4 raw[];
    const yard_sample_args &a = n.a;
    sampler s = {};

    s.m = (sample_shared *)raw;
    s.logits = (float *)(s.m + 1);
    s.rank = cluster_rank();
    s.first = min(s.rank * n.slice, a.n_vocab);
    s.n = min(n.slice, a.n_vocab - s.first);
    if (threadIdx.x < EXP_STEPS)
        s.m->exp_step[threadIdx.x] = exp2((double)threadIdx.x / EXP_STEPS);
    allow_next_kernel();
    cluster_sync(); /* all blocks are there before one writes to another's memory */
    wait_previous_kernel();
    const uint32_t n_clusters = gridDim.x / CLUSTER;
    for (uint32_t i = blockIdx.x / CLUSTER; i < (uint32_t)*a.n_rows; i += n_clusters) {
        const yard_sample_row *row = &a.rows[i];
        float *logits = a.logits + (size_t)i * a.n_vocab;
        candidate key;
        bool finite = true;

        if (i + n_clusters < (uint32_t)*a.n_rows)
            prefetch_slice(&s, logits + (size_t)n_clusters * a.n_vocab);
        if (n.wide && is_plain_greedy(row)) {
            key = largest_in_place(&s, logits, &finite);
        } else {
            load_slice(&s, logits, n.wide);
            if (a.finite)
                finite = are_finite(&s);
            add_bias(&s, row, logits);
            if (has_penalties(&row->params))
                penalise(&s, row, logits);
            key = row->params.temperature > 0.0f ? draw(&s, row) : largest_candidate(&s);
        }
        if (s.rank == 0 && threadIdx.x == 0) {
            a.token[i] = (int32_t)id_of(key);
            if (a.finite)
                a.finite[i] = finite;
        }
        __syncthreads(); /* the next row's slice takes the same place */
    }
    cluster_sync(); /* no block leaves while another may write to it */
}

static size_t shared_bytes(uint32_t slice)
{
    return sizeof(sample_shared) + slice * sizeof(float);
}

yard_status yard_cuda_sample_launch(const yard_sample_args *a, uint32_t max_rows, void *stream,
                                    yard_error *err)
{
    const uint32_t slice = yard_ceil_div(yard_ceil_div(a->n_vocab, CLUSTER), 4) * 4;
    const sample_args n = { *a, slice, (uintptr_t)a->logits % 16 == 0 && a->n_vocab % 4 == 0 };

    if (shared_bytes(slice) > MAX_SAMPLE_BYTES)
        return yard_fail(err, YARD_EINVAL, "sample: want at most %zu ids, got %u",
                         (MAX_SAMPLE_BYTES - sizeof(sample_shared)) / sizeof(float) * CLUSTER,
                         a->n_vocab);
    return launch_rows(sample_kernel, grid_for(max_rows, 1, SAMPLE_MAX_CLUSTERS) * CLUSTER,
                       SAMPLE_THREADS, shared_bytes(slice), n, "sample", stream, err);
}

yard_status yard_cuda_sample_open(yard_error *err)
{
    cudaError_t code = cudaFuncSetAttribute(
        sample_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MAX_SAMPLE_BYTES);

    if (code == cudaSuccess) /* room for two blocks a processor */
        code = cudaFuncSetAttribute(sample_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "sample: %s", cudaGetErrorString(code));
    return YARD_OK;
}
