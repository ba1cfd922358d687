/* Of the candidates in order, from the largest probability down: the one at which the sum of
 * weights reaches a number.
 *
 * Nothing is sorted. A histogram over the probabilities' bits says in which bin the sum is reached,
 * and only that bin's candidates are compared with each other; a bin of too many is divided into
 * bins again, and equal probabilities by halving. Where much weight lies behind the number, small
 * probabilities cannot be the answer and stay out of the bins: most of a vocabulary. */
#ifndef YARD_OPS_CUDA_SAMPLE_SEARCH_CUH
#define YARD_OPS_CUDA_SAMPLE_SEARCH_CUH

#include "ops/cuda/sample.cuh"

/* Calls fn(probability, number in the slice) for those whose bits lie in [low, top]. */
template <typename FN>
static __device__ __forceinline__ void each_between(const sampler *s, uint32_t top, uint32_t low,
                                                    FN fn)
{
    each_four(s, [&](float4 x, uint32_t i) {
        const float e[4] = { x.x, x.y, x.z, x.w };
        uint32_t in[4];

#pragma unroll
        for (uint32_t c = 0; c < 4; c++)
            in[c] = top - __float_as_uint(e[c]) <= top - low;
        if (!(in[0] | in[1] | in[2] | in[3]))
            return;
#pragma unroll
        for (uint32_t c = 0; c < 4; c++)
            if (in[c])
                fn(e[c], i + c);
    });
}

/* bins */

/* Sums of weights by bin, over the cluster: of probabilities whose bits lie in [low, top], the
 * first bin at the top. */
static __device__ __forceinline__ void fill_bins(sampler *s, uint32_t top, uint32_t low)
{
    sample_shared *m = shared();
    uint32_t shift = 0;
    uint64_t own = 0;

    while ((top - low) >> shift >= BINS)
        shift++;
    s->top = top;
    s->low = low;
    s->shift = shift;
    for (uint32_t b = threadIdx.x * 4; b < LIMBS * BINS; b += SAMPLE_THREADS * 4)
        *(uint4 *)&m->bin[0][b] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    if (s->counting)
        each_between(s, top, low, [&](float e, uint32_t) {
            atomicAdd(&m->bin[0][(top - __float_as_uint(e)) >> shift], 1u);
        });
    else
        each_four(s, [&](float4 x, uint32_t) {
            const float e[4] = { x.x, x.y, x.z, x.w };
#pragma unroll
            for (int c = 0; c < 4; c++) { /* no branches: most warps have something to add */
                const uint32_t below = top - __float_as_uint(e[c]);
                uint32_t high, low_digit;

                digits_of(e[c], &high, &low_digit);
                if (below <= top - low)
                    atomicAdd(&m->bin[0][below >> shift], low_digit - digit_bits);
                if (below <= top - low && high != digit_bits)
                    atomicAdd(&m->bin[1][below >> shift], high - digit_bits);
            }
        });
    cluster_sync(); /* every block's bins are complete */
    if (threadIdx.x < OWN_BINS) {
        const uint32_t b = s->rank * OWN_BINS + threadIdx.x;
#pragma unroll
        for (uint32_t r = 0; r < CLUSTER; r++)
#pragma unroll
            for (uint32_t l = 0; l < LIMBS; l++)
                own += (uint64_t)*at_rank(&m->bin[l][b], r) << LIMB_BITS * l;
        m->own_sum[threadIdx.x] = own;
    }
    /* Also: nobody clears its bins before all have read them, and all sums are there. */
    const uint32_t turn = s->turn;
    over_cluster<added_longs>(s, (pair){ own, 0 });
    if (threadIdx.x < CLUSTER)
        m->rank_sum[threadIdx.x] = m->told[turn][threadIdx.x].a;
}

/* The bin in which the sum from the top reaches `wanted`, and the sum before it. Every block looks
 * for itself, in the sums of the rank that has the bin. */
static __device__ __forceinline__ uint32_t find_bin(uint64_t wanted, uint64_t *before)
{
    enum { EACH = OWN_BINS / WARP_LANES };
    sample_shared *m = shared();
    uint32_t bin;

    if (threadIdx.x < WARP_LANES) {
        const uint32_t first = threadIdx.x * EACH;
        uint64_t sum[EACH], above = 0, mine = 0, at;
        uint32_t owner = 0;

        __syncwarp(); /* its own lanes wrote rank_sum */
        while (owner < CLUSTER - 1 && above + m->rank_sum[owner] < wanted)
            above += m->rank_sum[owner++];
        const uint64_t *sums = at_rank(m->own_sum, owner) + first;
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
    bin = m->found_bin;
    *before = m->found_before;
    return bin; /* written again behind the barriers of list_range */
}

/* one bin's candidates */

/* Puts the candidates of probabilities in [low, top] into rank 0's list, each block in a part of
 * its own. Returns the largest number of a block, LIST or more. */
static __device__ __forceinline__ uint32_t list_range(const sampler *s, uint32_t top, uint32_t low)
{
    sample_shared *m = shared();
    uint32_t most = 0;

    if (threadIdx.x == 0)
        m->n_listed = 0;
    __syncthreads();
    each_between(s, top, low, [&](float e, uint32_t i) {
        const uint32_t at = atomicAdd(&m->n_listed, 1u), id = s->first + i;

        if (at < LIST)
            *at_rank(&m->list.part[s->rank][at], 0) =
                (listed){ (uint64_t)__float_as_uint(e) << 32 | logit_order(s->logits[id]), id };
    });
    __syncthreads();
    if (threadIdx.x < CLUSTER)
        *at_rank(&m->n_list[s->rank], threadIdx.x) = m->n_listed;
    cluster_sync(); /* lists and counts are complete */
    for (uint32_t r = 0; r < CLUSTER; r++)
        most = max(most, m->n_list[r]);
    return most;
}

/* Closes the gaps in the list; returns how many there are. */
static __device__ __forceinline__ uint32_t close_gaps(void)
{
    sample_shared *m = shared();
    const uint32_t mine = threadIdx.x / LIST, i = threadIdx.x % LIST;
    uint32_t n = 0, first = 0;

    for (uint32_t r = 0; r < CLUSTER; r++) {
        first += r < mine ? m->n_list[r] : 0;
        n += m->n_list[r];
    }
    if (mine < CLUSTER && i < m->n_list[mine])
        m->list.all[first + i] = m->list.part[mine][i];
    __syncthreads();
    return n;
}

/* Finds the listed candidate at which the sum reaches `wanted`, and that sum; tells
 * ranks below n_told. A warp takes a candidate at a time. */
static __device__ __forceinline__ void compare_listed(const sampler *s, uint64_t before,
                                                      uint64_t wanted, uint32_t n_told)
{
    sample_shared *m = shared();
    const uint32_t lane = threadIdx.x % WARP_LANES, n = close_gaps();

    for (uint32_t i = threadIdx.x / WARP_LANES; i < n; i += SAMPLE_WARPS) {
        const listed mine = m->list.all[i];
        const uint64_t weight = weight_of(s, __uint_as_float((uint32_t)(mine.rank >> 32)));
        pair sum = { 0, 0 };

        for (uint32_t j = lane; j < n; j += WARP_LANES) {
            const listed other = m->list.all[j];
            const uint64_t w = weight_of(s, __uint_as_float((uint32_t)(other.rank >> 32)));
            if (other.rank > mine.rank || (other.rank == mine.rank && other.id <= mine.id)) {
                sum.a += (uint32_t)(w >> LIMB_BITS);
                sum.b += (uint32_t)w & ((1u << LIMB_BITS) - 1);
            }
        }
        sum = added_words::lanes(sum);
        const uint64_t upto = before + (sum.a << LIMB_BITS) + sum.b;
        if (lane < n_told && upto >= wanted && upto - weight < wanted) {
            *at_rank(&m->found, lane) = mine;
            *at_rank(&m->found_upto, lane) = upto;
        }
    }
}

/* How many candidates of the probability e there are from key `least` on. */
static __device__ __forceinline__ uint64_t count_equals(sampler *s, uint32_t e, candidate least)
{
    uint32_t n = 0;

    each_between(s, e, e, [&](float, uint32_t i) {
        n += candidate_of(s->logits[s->first + i], s->first + i) >= least;
    });
    return over_cluster<added_words>(s, (pair){ n, 0 }).a;
}

/* Candidates of one probability, too many for the list: the largest key from which on there are
 * enough, by halving the interval. */
static __device__ __forceinline__ listed halve_equals(sampler *s, uint32_t e, uint64_t before,
                                                      uint64_t wanted, uint64_t *upto)
{
    const uint64_t weight = weight_of(s, __uint_as_float(e));
    const uint64_t n_wanted = (wanted - before + weight - 1) / weight;
    candidate low = 0, high = 0; /* low: complement of the smallest key, so that both are maxima */
    pair ends;

    each_between(s, e, e, [&](float, uint32_t i) {
        const candidate key = candidate_of(s->logits[s->first + i], s->first + i);
        high = high > key ? high : key;
        low = low > ~key ? low : ~key;
    });
    ends = over_cluster<largest_candidates>(s, (pair){ high, low });
    high = ends.a;
    low = ~ends.b;
    while (low < high) {
        const candidate middle = low + (high - low + 1) / 2;

        if (count_equals(s, e, middle) >= n_wanted)
            low = middle;
        else
            high = middle - 1;
    }
    *upto = before + n_wanted * weight;
    return (listed){ (uint64_t)e << 32 | low >> 32, (uint32_t)~low };
}

/* the search */

/* The candidate at which the sum of weights from the top reaches `wanted`, which is at least 1 and
 * reached in [low, 1]; *upto is the sum with it. Where it is the row's last search, rank 0 alone
 * knows, and nobody waits for it. */
static __device__ __noinline__ listed search(sampler *s, uint64_t wanted, uint32_t low,
                                             bool is_last, uint64_t *upto)
{
    uint32_t top = one_bits;
    uint64_t before = 0;

    for (;;) {
        uint64_t before_bin;
        uint32_t bin, n;

        if (s->top != top || s->low != low)
            fill_bins(s, top, low);
        bin = find_bin(wanted - before, &before_bin);
        before += before_bin;
        low = max(low, top - (bin << s->shift) - ((1u << s->shift) - 1));
        top -= bin << s->shift;
        n = list_range(s, top, low);
        if (n > LIST && top == low)
            return halve_equals(s, top, before, wanted, upto);
        if (n > LIST)
            continue;
        if (s->rank == 0)
            compare_listed(s, before, wanted, is_last ? 1 : CLUSTER);
        if (is_last)
            __syncthreads();
        else
            cluster_sync();
        *upto = shared()->found_upto;
        return shared()->found;
    }
}

/* Bits of a probability below which the candidate that reaches `wanted` of `all` cannot lie: it and
 * those after it weigh more than what is behind `wanted`, and none of them more than it. */
static __device__ __forceinline__ uint32_t least_possible(const sampler *s, uint64_t wanted,
                                                          uint64_t all)
{
    const float behind = (float)(all - wanted) / (float)s->n_vocab;
    /* less half a unit and what this arithmetic may be wrong */
    const float least = (0.999f * behind - 0.5f) * 0x1p-32f;

    return least > 0.0f ? max(least_bits, __float_as_uint(least)) : least_bits;
}

#endif
