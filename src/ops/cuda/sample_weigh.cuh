/* The second kernel: exact weights, by ranges of probabilities, and in which of these the
 * candidates lie at which the row's sums reach what top-k, top-p and the draw want. */
#ifndef YARD_OPS_CUDA_SAMPLE_WEIGH_CUH
#define YARD_OPS_CUDA_SAMPLE_WEIGH_CUH

#include "ops/cuda/sample.cuh"

enum { BINS_EACH = BINS / SAMPLE_THREADS };

/* what is wanted, as the definition says; all of these grow with `kept` */

/* As yard_cpu_sample_uniform. */
static __device__ __forceinline__ uint64_t mix64(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static __device__ __forceinline__ double uniform_of(const yard_sample_row *row)
{
    const uint64_t golden = 0x9e3779b97f4a7c15ull;

    return (double)(mix64(mix64(row->params.seed + golden) + golden * (row->position + 1)) >> 11) *
           0x1p-53;
}

/* The sum of weights at which top-p ends. */
static __device__ __forceinline__ uint64_t wanted_by_top_p(float top_p, uint64_t kept)
{
    const double enough = ceil((double)top_p * (double)kept);

    return enough < 1.0 ? 1 : min((uint64_t)enough, kept);
}

static __device__ __forceinline__ uint64_t kept_by_min_p(float min_p, uint64_t enough,
                                                         uint64_t kept)
{
    return min_p > 0.0f ? min(kept, max(enough, first_weight)) : kept; /* the first always counts */
}

static __device__ __forceinline__ uint64_t wanted_by_draw(double uniform, uint64_t kept)
{
    return min((uint64_t)(uniform * (double)kept), kept - 1) + 1;
}

/* bins: of probabilities from one down to `from`, both as bits */

static __device__ __forceinline__ uint32_t shift_of(uint32_t top, uint32_t low)
{
    const uint32_t n_bits = 32 - (uint32_t)__clz((int)(top - low));

    return n_bits > BIN_BITS ? n_bits - BIN_BITS : 0;
}

typedef struct bin_set {
    uint32_t from, shift;
} bin_set;

/* From where no candidate lies below that is looked for: it and those behind it weigh more than the
 * share of the sum that comes after it, and none of them more than it. Should `about` be too far
 * off, the candidate is not found in the bins. */
static __device__ __forceinline__ bin_set bins_for(const sample_args &n, const piece &w,
                                                   float about)
{
    const yard_sample_row *row = &n.a.rows[w.row];
    const float share = row->params.top_p < 1.0f ? row->params.top_p : (float)uniform_of(row);
    const float least = 0.99f * (1.0f - share) * about / (float)n.a.n_vocab - 0x1p-32f;
    bin_set bins = { least_bits, 0 };

    if (row->params.top_k <= 0 && least > 0.0f && least < 1.0f)
        bins.from = max(least_bits, __float_as_uint(least));
    bins.shift = shift_of(one_bits, bins.from);
    bins.from = max(least_bits, one_bits + 1 - (BINS << bins.shift)); /* whole bins */
    return bins;
}

static __device__ __forceinline__ void clear_bins(void)
{
    for (uint32_t b = threadIdx.x * 4; b < (LIMBS + 1) * ALL_BINS; b += SAMPLE_THREADS * 4)
        *(uint4 *)&shared()->words[b] = make_uint4(0, 0, 0, 0);
}

/* Sums of a block, in all threads of the first warp. */
static __device__ __forceinline__ uint64_t add_in_block(uint64_t x)
{
    sample_shared *m = shared();

    for (int d = WARP_LANES / 2; d > 0; d /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, d);
    __syncthreads(); /* what was there has been read */
    if (lane_of() == 0)
        m->partial[warp_of()] = x;
    __syncthreads();
    x = lane_of() < SAMPLE_WARPS ? m->partial[lane_of()] : 0;
    for (int d = SAMPLE_WARPS / 2; d > 0; d /= 2)
        x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

/* MORE: top-k or min-p need more than sums, or there is an infinity. What has no bin is added to
 * the lane's, without a branch: some lanes of most warps have something to add. */
template <bool MORE>
static __device__ __forceinline__ slice_weighed weigh_slice(const sample_args &n, const piece &w,
                                                            const row_scale &scale,
                                                            const bin_set &bins)
{
    sample_shared *m = shared();
    const uint32_t no_bin = BINS + lane_of();
    const uint64_t least =
        (uint64_t)ceil((double)n.a.rows[w.row].params.min_p * (double)first_weight);
    slice_weighed sums = {};
    uint32_t n_candidates = 0;
    uint64_t enough = 0;

    each_batch(slice_of(n, w), w.n, n.wide, [&](const float4(&x)[BATCH], uint32_t, auto) {
#pragma unroll
        for (uint32_t l = 0; l < BATCH; l++) {
            const float v[4] = { x[l].x, x[l].y, x[l].z, x[l].w };
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float e = exp_between(exponent_of<!MORE>(v[c], scale.largest, scale.per));
                const uint32_t bits = __float_as_uint(e);
                const uint32_t b = min((one_bits - bits) >> bins.shift, no_bin);
                uint32_t high, low;

                digits_of(e, &high, &low);
                atomicAdd(&m->limb[0][b], low);
                atomicAdd(&m->limb[1][b], high);
                if (MORE) {
                    const bool is_candidate = bits >= least_bits;
                    const uint64_t weight = ((uint64_t)high << LIMB_BITS) + low;
                    atomicAdd(&m->n_in_bin[b], (uint32_t)is_candidate);
                    n_candidates += is_candidate;
                    enough += weight >= least ? weight : 0;
                }
            }
        }
    });
    if (MORE) {
        sums.enough_for_min_p = add_in_block(enough);
        sums.n = (uint32_t)add_in_block(n_candidates);
    }
    return sums;
}

/* The block's bins to the row's. Returns what they and what has no bin weigh, in the first warp. */
static __device__ __forceinline__ uint64_t add_bins(const piece &w, bool counts)
{
    const sample_shared *m = shared();
    uint64_t all = 0;

    __syncthreads(); /* the bins are complete */
    for (uint32_t b = threadIdx.x; b < ALL_BINS; b += SAMPLE_THREADS) {
        const uint64_t sum = ((uint64_t)m->limb[1][b] << LIMB_BITS) + m->limb[0][b];
        all += sum;
        if (b < BINS && sum != 0)
            atomicAdd(&w.slot->bin[b], (unsigned long long)sum);
        if (b < BINS && counts && m->n_in_bin[b] != 0)
            atomicAdd(&w.slot->n_in_bin[b], m->n_in_bin[b]);
    }
    return add_in_block(all);
}

/* sums from the top */

/* Of BINS numbers, a warp has those of a stretch, a lane every 32nd of these. */
static __device__ __forceinline__ uint32_t own_bin(uint32_t i)
{
    return warp_of() * (BINS / SAMPLE_WARPS) + i * WARP_LANES + lane_of();
}

/* Adds to each number those before it. */
static __device__ __forceinline__ void scan(uint64_t (&x)[BINS_EACH], uint32_t (&count)[BINS_EACH])
{
    sample_shared *m = shared();
    const uint32_t lane = lane_of(), warp = warp_of();
    uint64_t before = 0;
    uint32_t n_before = 0;

#pragma unroll
    for (uint32_t i = 0; i < BINS_EACH; i++) {
#pragma unroll
        for (uint32_t d = 1; d < WARP_LANES; d *= 2) {
            const uint64_t lower = __shfl_up_sync(0xffffffffu, x[i], d);
            const uint32_t n_lower = __shfl_up_sync(0xffffffffu, count[i], d);
            x[i] += lane >= d ? lower : 0;
            count[i] += lane >= d ? n_lower : 0;
        }
        x[i] += before;
        count[i] += n_before;
        before = __shfl_sync(0xffffffffu, x[i], WARP_LANES - 1);
        n_before = __shfl_sync(0xffffffffu, count[i], WARP_LANES - 1);
    }
    __syncthreads(); /* what was there has been read */
    if (lane == 0) {
        m->partial[warp] = before;
        m->n_partial[warp] = n_before;
    }
    __syncthreads();
    before = n_before = 0;
    for (uint32_t i = 0; i < warp; i++) {
        before += m->partial[i];
        n_before += m->n_partial[i];
    }
#pragma unroll
    for (uint32_t i = 0; i < BINS_EACH; i++) {
        x[i] += before;
        count[i] += n_before;
    }
}

/* Turns what each bin holds into what it holds with all before it. */
static __device__ __noinline__ void sum_bins(void)
{
    sample_shared *m = shared();
    uint64_t sum[BINS_EACH];
    uint32_t count[BINS_EACH];

#pragma unroll
    for (uint32_t i = 0; i < BINS_EACH; i++) {
        sum[i] = m->upto[own_bin(i)];
        count[i] = m->n_upto[own_bin(i)];
    }
    scan(sum, count);
#pragma unroll
    for (uint32_t i = 0; i < BINS_EACH; i++) {
        m->upto[own_bin(i)] = sum[i];
        m->n_upto[own_bin(i)] = count[i];
    }
    __syncthreads(); /* the sums are there */
}

/* The first of BINS sums that is no less; BINS: none. Every warp for itself. */
template <typename T>
static __device__ __forceinline__ uint32_t first_to_reach(const T *upto, T wanted)
{
    enum { EACH = BINS / WARP_LANES };
    const uint32_t lane = lane_of();
    const uint32_t parts = __ballot_sync(0xffffffffu, upto[lane * EACH + EACH - 1] >= wanted);

    if (parts == 0)
        return BINS;
    const uint32_t first = (uint32_t)(__ffs((int)parts) - 1) * EACH;
    for (uint32_t i = 0;; i += WARP_LANES) { /* ends: the part's last one does */
        const uint32_t has = __ballot_sync(0xffffffffu, upto[first + i + lane] >= wanted);
        if (has)
            return first + i + (uint32_t)__ffs((int)has) - 1;
    }
}

/* the choice */

/* Bins in which a wanted candidate may lie. */
typedef struct bin_span {
    uint32_t first, last;
} bin_span;

static __device__ __forceinline__ void swap_spans(bin_span *a, bin_span *b)
{
    const bin_span x = *a;

    *a = *b;
    *b = x;
}

static __device__ __forceinline__ uint64_t before_bin(uint32_t b)
{
    return b == 0 ? 0 : shared()->upto[b - 1];
}

/* Orders spans and joins those that touch. */
static __device__ __forceinline__ uint32_t join_spans(bin_span *span, uint32_t n)
{
    uint32_t n_joined = 0;

    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = i + 1; j < n; j++)
            if (span[j].first < span[i].first)
                swap_spans(&span[i], &span[j]);
    for (uint32_t i = 0; i < n; i++)
        if (n_joined > 0 && span[i].first <= span[n_joined - 1].last + 1)
            span[n_joined - 1].last = max(span[n_joined - 1].last, span[i].last);
        else
            span[n_joined++] = span[i];
    return n_joined;
}

/* In the first warp, over summed bins: what has to be gathered. Before the candidates are known,
 * what is kept is known within a bin, and so is what follows from it. */
static __device__ __forceinline__ void choose_ranges(const sample_args &n, const piece &w,
                                                     const bin_set &bins, row_choice *c)
{
    const sample_shared *m = shared();
    const yard_sample_row *row = &n.a.rows[w.row];
    const yard_sample_params *p = &row->params;
    const uint32_t shift = bins.shift;
    const double u = c->uniform = uniform_of(row);
    uint64_t least = c->all, most = c->all, passed = 0;
    uint32_t n_spans = 0, n_passed = 0, bin_of_k = BINS;
    bin_span span[MAX_RANGES];

    if (p->top_k > 0 && c->n > (uint32_t)p->top_k) {
        bin_of_k = min(first_to_reach(m->n_upto, (uint32_t)p->top_k), (uint32_t)BINS - 1);
        span[n_spans++] = { bin_of_k, bin_of_k };
        least = before_bin(bin_of_k) + 1;
        most = m->upto[bin_of_k];
    }
    if (p->top_p < 1.0f) {
        least = wanted_by_top_p(p->top_p, least);
        const uint32_t first = first_to_reach(m->upto, (unsigned long long)least);
        const uint32_t last =
            first_to_reach(m->upto, (unsigned long long)wanted_by_top_p(p->top_p, most));
        span[n_spans++] = { first, last };
        most = last < BINS ? m->upto[last] : most;
    }
    least = kept_by_min_p(p->min_p, c->enough_for_min_p, least);
    most = kept_by_min_p(p->min_p, c->enough_for_min_p, most);
    span[n_spans++] = { first_to_reach(m->upto, (unsigned long long)wanted_by_draw(u, least)),
                        first_to_reach(m->upto, (unsigned long long)wanted_by_draw(u, most)) };
    n_spans = join_spans(span, n_spans);
    if (span[n_spans - 1].last >= BINS) {
        c->state = ROW_IS_LOST;
        return;
    }
    c->state = ROW_GATHERS;
    c->n_ranges = n_spans;
    for (uint32_t i = 0; i < n_spans; i++) {
        const uint32_t low = one_bits - (span[i].last << shift) - ((1u << shift) - 1);
        const uint64_t before = before_bin(span[i].first);

        c->range[i] = { one_bits - (span[i].first << shift), max(bins.from, low), before - passed };
        if (bin_of_k >= span[i].first && bin_of_k <= span[i].last)
            c->last_of_top_k = (uint32_t)p->top_k - 1 + n_passed -
                               (span[i].first == 0 ? 0 : m->n_upto[span[i].first - 1]);
        passed += m->upto[span[i].last] - before;
        n_passed +=
            m->n_upto[span[i].last] - (span[i].first == 0 ? 0 : m->n_upto[span[i].first - 1]);
    }
}

/* What the slices weigh together; in the first warp. */
static __device__ __forceinline__ void add_slices(const piece &w, row_choice *c)
{
    const uint32_t lane = lane_of();
    slice_weighed x = lane < w.n_slices ? w.slot->weighed[lane] : slice_weighed{};

    for (int d = WARP_LANES / 2; d > 0; d /= 2) {
        x.all += __shfl_xor_sync(0xffffffffu, x.all, d);
        x.enough_for_min_p += __shfl_xor_sync(0xffffffffu, x.enough_for_min_p, d);
        x.n += __shfl_xor_sync(0xffffffffu, x.n, d);
    }
    c->all = x.all;
    c->enough_for_min_p = x.enough_for_min_p;
    c->n = x.n;
}

/* The row's bins, which are empty again then, summed from the top. */
static __device__ __forceinline__ void take_bins(const piece &w, bool counts)
{
    sample_shared *m = shared();

    for (uint32_t b = threadIdx.x; b < BINS; b += SAMPLE_THREADS) {
        m->upto[b] = w.slot->bin[b];
        w.slot->bin[b] = 0;
        m->n_upto[b] = 0;
        if (counts) {
            m->n_upto[b] = w.slot->n_in_bin[b];
            w.slot->n_in_bin[b] = 0;
        }
    }
    __syncthreads();
    sum_bins();
}

/* In one thread. */
static __device__ __forceinline__ void finish_row(const sample_args &n, uint32_t row, uint32_t id,
                                                  bool finite)
{
    n.a.token[row] = (int32_t)id;
    if (n.a.finite)
        n.a.finite[row] = finite;
}

/* The first of the largest logits. By one warp. */
static __device__ __forceinline__ void finish_greedy(const sample_args &n, const piece &w)
{
    const uint32_t lane = lane_of();
    const slice_seen seen = lane < w.n_slices ? w.slot->seen[lane] : slice_seen{};
    const uint64_t key = largest_of_warp(seen.largest);
    const bool finite = !__any_sync(0xffffffffu, seen.not_finite != 0);

    if (lane == 0) {
        finish_row(n, w.row, key == 0 ? 0 : ~(uint32_t)key, finite);
        w.slot->choice.state = ROW_IS_DONE;
    }
}

static __device__ __forceinline__ void weigh(const sample_args &n, const piece &w)
{
    const yard_sample_params p = n.a.rows[w.row].params;
    const row_scale scale = scale_of(w, per_temperature(&n.a.rows[w.row]));
    const bin_set bins = bins_for(n, w, scale.about);
    const bool counts = p.top_k > 0;
    slice_weighed sums;

    if (scale.order == 0) { /* no candidate */
        if (w.slice == 0 && threadIdx.x == 0) {
            finish_row(n, w.row, 0, scale.finite);
            w.slot->choice.state = ROW_IS_DONE;
        }
        return;
    }
    clear_bins();
    __syncthreads(); /* the bins are empty */
    if (counts || p.min_p > 0.0f || !scale.finite)
        sums = weigh_slice<true>(n, w, scale, bins);
    else
        sums = weigh_slice<false>(n, w, scale, bins);
    sums.all = add_bins(w, counts);
    if (threadIdx.x == 0)
        w.slot->weighed[w.slice] = sums;
    if (!arrive(&w.slot->n_weighed, w.n_slices))
        return;
    take_bins(w, counts);
    if (threadIdx.x >= WARP_LANES)
        return;
    row_choice c = {};
    c.scale = scale;
    add_slices(w, &c);
    choose_ranges(n, w, bins, &c);
    if (threadIdx.x == 0) {
        w.slot->choice = c;
        w.slot->n_weighed = 0;
    }
}

#endif
