/* The third kernel: the candidates in question, in order, and the one that is drawn. */
#ifndef YARD_OPS_CUDA_SAMPLE_DRAW_CUH
#define YARD_OPS_CUDA_SAMPLE_DRAW_CUH

#include "ops/cuda/sample_weigh.cuh"

/* lists */

static __device__ __forceinline__ void begin_list(void)
{
    if (threadIdx.x == 0)
        shared()->n_listed = 0;
    __syncthreads();
}

static __device__ __forceinline__ uint64_t rank_of(float e, float logit)
{
    return (uint64_t)__float_as_uint(e) << 32 | logit_order(logit);
}

/* Counts also those for which there is no room. */
static __device__ __forceinline__ void put_on_list(float e, float logit, uint32_t id)
{
    sample_shared *m = shared();
    const uint32_t at = atomicAdd(&m->n_listed, 1u);

    if (at < LISTED) {
        m->rank[at] = rank_of(e, logit);
        m->id[at] = id;
    }
}

/* Whether candidate a of the list comes behind b. */
static __device__ __forceinline__ bool is_behind(uint32_t a, uint32_t b)
{
    const sample_shared *m = shared();

    return m->rank[a] < m->rank[b] || (m->rank[a] == m->rank[b] && m->id[a] > m->id[b]);
}

/* Puts the n listed in order (bitonic), the first candidate first. */
static __device__ __forceinline__ void sort_list(uint32_t n)
{
    sample_shared *m = shared();
    uint32_t n_all = 2;

    while (n_all < n)
        n_all *= 2;
    for (uint32_t i = n + threadIdx.x; i < n_all; i += SAMPLE_THREADS) {
        m->rank[i] = 0;
        m->id[i] = ~0u;
    }
    __syncthreads();
    for (uint32_t run = 2; run <= n_all; run *= 2)
        for (uint32_t step = run / 2; step > 0; step /= 2) {
            for (uint32_t i = threadIdx.x; i < n_all / 2; i += SAMPLE_THREADS) {
                const uint32_t a = 2 * i - (i & (step - 1)), b = a + step;
                if (is_behind(a, b) == ((a & run) == 0)) {
                    const uint64_t rank = m->rank[a];
                    const uint32_t id = m->id[a];
                    m->rank[a] = m->rank[b];
                    m->id[a] = m->id[b];
                    m->rank[b] = rank;
                    m->id[b] = id;
                }
            }
            __syncthreads(); /* a step's pairs are not the next one's */
        }
}

/* Puts the sum of weights up to each of the n in order into the place of its rank. before(bits of
 * a probability): what to add to sums of the list there. */
template <typename FN> static __device__ __forceinline__ void sum_list(uint32_t n, FN before)
{
    sample_shared *m = shared();
    uint64_t sum[BINS_EACH];
    uint32_t e[BINS_EACH], none[BINS_EACH] = {};

#pragma unroll
    for (uint32_t i = 0; i < BINS_EACH; i++) {
        e[i] = own_bin(i) < n ? (uint32_t)(m->rank[own_bin(i)] >> 32) : 0;
        sum[i] = e[i] ? weight_of(__uint_as_float(e[i])) : 0;
    }
    scan(sum, none);
#pragma unroll
    for (uint32_t i = 0; i < BINS_EACH; i++)
        m->upto[own_bin(i)] = e[i] ? sum[i] + before(e[i]) : ~0ull;
    __syncthreads(); /* the sums are there */
}

/* A candidate, and the sum of weights up to it. */
typedef struct found_candidate {
    uint64_t upto;
    uint32_t id;
    bool found;
} found_candidate;

static __device__ __forceinline__ found_candidate candidate_at(uint32_t i, uint32_t n)
{
    const sample_shared *m = shared();

    if (i >= n || m->upto[i] == ~0ull) /* the list's end */
        return found_candidate{};
    return { m->upto[i], m->id[i], true };
}

/* the draw */

/* As the definition goes: find(wanted sum, 0) or find(0, k) is the candidate at which the sum is
 * reached, or the k-th. */
template <typename FN>
static __device__ __forceinline__ found_candidate draw(const yard_sample_row *row,
                                                       const row_choice &c, FN find)
{
    const yard_sample_params *p = &row->params;
    uint64_t kept = c.all;
    found_candidate x;

    if (p->top_k > 0 && c.n > (uint32_t)p->top_k) {
        x = find(0, (uint32_t)p->top_k);
        if (!x.found)
            return x;
        kept = x.upto;
    }
    if (p->top_p < 1.0f) {
        x = find(wanted_by_top_p(p->top_p, kept), 0);
        if (!x.found)
            return x;
        kept = x.upto;
    }
    kept = kept_by_min_p(p->min_p, c.enough_for_min_p, kept);
    return find(wanted_by_draw(c.uniform, kept), 0);
}

/* From the row's list. */
static __device__ __forceinline__ found_candidate draw_from_list(const sample_args &n,
                                                                 const piece &w,
                                                                 const row_choice &c)
{
    sample_shared *m = shared();
    const uint32_t n_listed = w.slot->n_listed;

    if (n_listed > LISTED)
        return found_candidate{};
    for (uint32_t i = threadIdx.x; i < n_listed; i += SAMPLE_THREADS) {
        m->rank[i] = w.slot->list_rank[i];
        m->id[i] = w.slot->list_id[i];
    }
    sort_list(n_listed);
    sum_list(n_listed, [&](uint32_t e) {
        return e >= c.range[0].low || c.n_ranges < 2   ? c.range[0].before
               : e >= c.range[1].low || c.n_ranges < 3 ? c.range[1].before
                                                       : c.range[2].before;
    });
    return draw(&n.a.rows[w.row], c, [&](uint64_t wanted, uint32_t k) {
        return candidate_at(k > 0 ? c.last_of_top_k
                                  : first_to_reach(m->upto, (unsigned long long)wanted),
                            n_listed);
    });
}

/* The same from the whole row, for rows of many candidates in one bin */

/* Candidates are told apart by their probability, then by their logit, then by their id. */
enum key_level { BY_PROBABILITY, BY_LOGIT, BY_ID };

/* A part of the order: those whose key at a level is in [low, top], and which are equal at the
 * levels before. */
typedef struct part {
    uint32_t level, top, low;
    uint32_t e, order; /* what they have in common at the levels before */
    uint64_t before;   /* what weighs more */
    uint32_t n_before;
} part;

template <typename FN>
static __device__ __forceinline__ void each_of_part(const sample_args &n, const piece &w,
                                                    const row_scale &scale, const part &p, FN fn)
{
    const float *logits = n.a.logits + (size_t)w.row * n.a.n_vocab;

#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < n.a.n_vocab; i += SAMPLE_THREADS) {
        const float logit = logits[i];
        const float e = exp_between(exponent_of(logit, scale.largest, scale.per));
        const uint32_t bits = __float_as_uint(e);
        uint32_t key = bits;

        if (p.level != BY_PROBABILITY) {
            if (bits != p.e)
                continue;
            key = logit_order(logit);
            if (p.level == BY_ID) {
                if (key != p.order)
                    continue;
                key = ~i;
            }
        }
        if (key - p.low <= p.top - p.low)
            fn(e, logit, i, key);
    }
}

/* Narrows the part to one of BINS, that which has the candidate; returns how many lie in it. */
static __device__ __noinline__ uint32_t narrow(const sample_args &n, const piece &w,
                                               const row_scale &scale, part *p, uint64_t wanted,
                                               uint32_t k)
{
    sample_shared *m = shared();
    const uint32_t shift = shift_of(p->top, p->low);

    __syncthreads(); /* what was there has been read */
    clear_bins();
    __syncthreads();
    each_of_part(n, w, scale, *p, [&](float e, float, uint32_t, uint32_t key) {
        atomicAdd(&m->upto[(p->top - key) >> shift], (unsigned long long)weight_of(e));
        atomicAdd(&m->n_upto[(p->top - key) >> shift], 1u);
    });
    __syncthreads();
    sum_bins();
    const uint32_t bin =
        min(k > 0 ? first_to_reach(m->n_upto, k - p->n_before)
                  : first_to_reach(m->upto, (unsigned long long)(wanted - p->before)),
            (uint32_t)BINS - 1);
    const uint32_t n_before = bin == 0 ? 0 : m->n_upto[bin - 1];
    const uint32_t n_inside = m->n_upto[bin] - n_before;
    p->before += before_bin(bin);
    p->n_before += n_before;
    p->top -= bin << shift;
    p->low = p->top - p->low > (1u << shift) - 1 ? p->top - ((1u << shift) - 1) : p->low;
    return n_inside;
}

static __device__ __noinline__ found_candidate find_in_row(const sample_args &n, const piece &w,
                                                           const row_scale &scale, uint64_t wanted,
                                                           uint32_t k)
{
    sample_shared *m = shared();
    part p = { BY_PROBABILITY, one_bits, least_bits, 0, 0, 0, 0 };

    for (;;) {
        const uint32_t n_inside = narrow(n, w, scale, &p, wanted, k);
        if (n_inside <= LISTED)
            break;
        if (p.top != p.low)
            continue;
        if (p.level == BY_PROBABILITY)
            p.e = p.top;
        else
            p.order = p.top;
        p.level++;
        p.top = ~0u;
        p.low = 0;
    }
    begin_list();
    each_of_part(n, w, scale, p,
                 [&](float e, float logit, uint32_t i, uint32_t) { put_on_list(e, logit, i); });
    __syncthreads();
    const uint32_t n_listed = m->n_listed;
    sort_list(n_listed);
    sum_list(n_listed, [&](uint32_t) { return p.before; });
    return candidate_at(
        k > 0 ? k - p.n_before - 1 : first_to_reach(m->upto, (unsigned long long)wanted), n_listed);
}

/* gathering */

/* Limits of logit - largest within which a range's candidates lie, and a few others. */
static __device__ __forceinline__ float2 limits_of(uint32_t top, uint32_t low, float per)
{
    const float margin = 3e-5f;

    return make_float2((__logf(__uint_as_float(low)) - margin) / per,
                       top == one_bits ? CUDART_INF_F
                                       : (__logf(__uint_as_float(top)) + margin) / per);
}

static __device__ __forceinline__ bool is_in(const float2 &limits, float x)
{
    return x >= limits.x && x <= limits.y;
}

/* Whether all candidates of the probability are gathered. */
static __device__ __forceinline__ bool is_gathered(const row_choice &c, float e)
{
    const uint32_t bits = __float_as_uint(e);
    bool in = false;

#pragma unroll
    for (uint32_t r = 0; r < MAX_RANGES; r++)
        in |= r < c.n_ranges && bits - c.range[r].low <= c.range[r].top - c.range[r].low;
    return in;
}

/* The slice's candidates of the ranges to the row's list: first which may be, then which are. */
static __device__ __forceinline__ void gather_slice(const sample_args &n, const piece &w,
                                                    const row_scale &scale, const row_choice &c)
{
    sample_shared *m = shared();
    const float *slice = slice_of(n, w);
    const float largest = scale.largest;
    const float2 first = limits_of(c.range[0].top, c.range[0].low, scale.per);
    const uint32_t last_low = c.n_ranges == 2 ? c.range[1].low : c.range[2].low;
    const float2 others = /* of three, the last two and what is between */
        c.n_ranges == 1 ? first : limits_of(c.range[1].top, last_low, scale.per);

    begin_list();
    each_batch(slice, w.n, n.wide, [&](const float4(&x)[BATCH], uint32_t at, auto) {
        uint32_t in = 0; /* a bit a logit: seldom one is set */
#pragma unroll
        for (uint32_t l = 0; l < BATCH; l++) {
            const float v[4] = { x[l].x, x[l].y, x[l].z, x[l].w };
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                if (is_in(first, v[i] - largest) | is_in(others, v[i] - largest))
                    in |= 1u << (4 * l + i);
        }
        for (; in != 0; in &= in - 1) {
            const uint32_t bit = (uint32_t)__ffs((int)in) - 1;
            const uint32_t i = at + bit / 4 * BATCH_STEP + bit % 4;
            const uint32_t place = i < w.n ? atomicAdd(&m->n_listed, 1u) : (uint32_t)LISTED;
            if (place < LISTED)
                m->id[place] = i;
        }
    });
    __syncthreads(); /* the list is complete */
    const uint32_t n_mine = m->n_listed;
    if (threadIdx.x == 0)
        m->first_listed = n_mine > 0 ? atomicAdd(&w.slot->n_listed, n_mine) : 0;
    __syncthreads();
    const uint32_t to = m->first_listed;
    for (uint32_t i = threadIdx.x; i < n_mine && to + i < LISTED; i += SAMPLE_THREADS) {
        const float logit = slice[m->id[i]];
        const float e = exp_between(exponent_of(logit, largest, scale.per));
        w.slot->list_rank[to + i] =
            is_gathered(c, e) ? rank_of(e, logit) : 0; /* none: behind all */
        w.slot->list_id[to + i] = w.first + m->id[i];
    }
}

static __device__ __forceinline__ void gather(const sample_args &n, const piece &w)
{
    sample_slot *slot = w.slot;
    const row_choice &c = slot->choice; /* no copy: it would be one of each thread in memory */
    const uint32_t state = c.state;
    found_candidate x = {};

    if (state == ROW_IS_DONE || (state == ROW_IS_LOST && w.slice > 0))
        return;
    if (state == ROW_GATHERS) {
        gather_slice(n, w, c.scale, c);
        if (!arrive(&slot->n_gathered, w.n_slices))
            return;
        x = draw_from_list(n, w, c);
    }
    if (!x.found)
        x = draw(&n.a.rows[w.row], c, [&](uint64_t wanted, uint32_t k) {
            return find_in_row(n, w, c.scale, wanted, k);
        });
    if (threadIdx.x == 0) {
        finish_row(n, w.row, x.id, c.scale.finite);
        slot->n_gathered = slot->n_listed = 0;
    }
}

#endif
