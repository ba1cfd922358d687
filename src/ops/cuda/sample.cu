/* Sampling: bias, penalties, greedy, temperature, top-k, top-p, min-p and the draw. The CPU
 * definition's tokens: weights are the same whole numbers there. */
#include "ops/cuda/launch.h"

#include "ops/cuda/sample_search.cuh"

enum { MAX_SAMPLE_BYTES = 227 << 10 };

/* Logits become probabilities; returns the sum of their weights. */
static __device__ __forceinline__ uint64_t make_probabilities(sampler *s, float largest,
                                                              float temperature)
{
    const float per = fminf(fmaxf(__frcp_rn(temperature), FLT_MIN), FLT_MAX);
    uint32_t high_sum = 0, low_sum = 0, n = 0;
    pair sum;

    each_four(s, [&](float4 x, uint32_t i) {
        const float v[4] = { x.x, x.y, x.z, x.w };
        float e[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            /* what is no number becomes minus infinity, and plus infinity the largest float */
            const float logit = fminf(fmaxf(v[c], -CUDART_INF_F), FLT_MAX);
            uint32_t high, low;

            e[c] = probability_of(__fmul_rn(__fsub_rn(logit, largest), per));
            digits_of(e[c], &high, &low);
            high_sum += high;
            low_sum += low;
        }
        n += 4;
        *(float4 *)(slice_values() + i) = make_float4(e[0], e[1], e[2], e[3]);
    });
    sum =
        over_cluster<added_words>(s, (pair){ high_sum - n * digit_bits, low_sum - n * digit_bits });
    return (sum.a << LIMB_BITS) + sum.b;
}

/* The sum of the weights from `least` on. */
static __device__ __forceinline__ uint64_t sum_weights(sampler *s, uint64_t least)
{
    uint32_t high_sum = 0, low_sum = 0;
    pair sum;

    each_between(s, one_bits, least_bits, [&](float e, uint32_t) {
        const uint64_t w = weight_of(s, e);
        high_sum += w >= least ? (uint32_t)(w >> LIMB_BITS) : 0;
        low_sum += w >= least ? (uint32_t)w & ((1u << LIMB_BITS) - 1) : 0;
    });
    sum = over_cluster<added_words>(s, (pair){ high_sum, low_sum });
    return (sum.a << LIMB_BITS) + sum.b;
}

/* Candidates after the first k lose their probability; returns what the others weigh. */
static __device__ __forceinline__ uint64_t keep_top_k(sampler *s, uint32_t k, uint64_t all)
{
    uint64_t upto;
    listed last;
    uint32_t e, order;

    s->counting = true;
    if (sum_weights(s, 0) <= k) {
        s->counting = false;
        return all;
    }
    last = search(s, k, least_bits, false, &upto);
    s->counting = false;
    s->top = 0; /* the bins have counts */
    e = (uint32_t)(last.rank >> 32);
    order = (uint32_t)last.rank;
    for (uint32_t i = threadIdx.x; i < s->n; i += SAMPLE_THREADS) {
        const uint32_t mine = __float_as_uint(slice_values()[i]), id = s->first + i;

        if (mine > e)
            continue;
        if (mine == e) {
            const uint32_t at = logit_order(s->logits[id]);
            if (at > order || (at == order && id <= last.id))
                continue;
        }
        slice_values()[i] = 0.0f;
    }
    __syncthreads(); /* the slice is as it will be */
    return sum_weights(s, 0);
}

/* As yard_cpu_sample_uniform. */
static __device__ __forceinline__ uint64_t mix64(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static __device__ __forceinline__ double uniform(uint64_t seed, uint64_t position)
{
    const uint64_t golden = 0x9e3779b97f4a7c15ull;

    return (double)(mix64(mix64(seed + golden) + golden * (position + 1)) >> 11) * 0x1p-53;
}

static __device__ __forceinline__ uint32_t draw(sampler *s, const yard_sample_row *row,
                                                slice_view view)
{
    const yard_sample_params *p = &row->params;
    const bool any = view.largest > -CUDART_INF_F;
    const pair all = over_cluster<largest_words>(
        s, (pair){ any ? logit_order(view.largest) : 0u, view.not_finite });
    const uint32_t order = (uint32_t)all.a;
    uint32_t low;
    uint64_t kept, wanted, upto;

    s->finite = all.b == 0;
    if (order == 0) /* no candidate */
        return 0;
    kept = make_probabilities(s, ordered_logit(order), p->temperature);
    s->top = 0; /* the bins are empty */
    if (p->top_k > 0)
        kept = keep_top_k(s, (uint32_t)p->top_k, kept);
    low = least_bits;
    if (p->top_p < 1.0f) {
        const double enough = ceil((double)p->top_p * (double)kept);

        wanted = enough < 1.0 ? 1 : min((uint64_t)enough, kept);
        low = least_possible(s, wanted, kept);
        search(s, wanted, low, false, &upto);
        kept = upto;
    }
    if (p->min_p > 0.0f) { /* the first candidate always counts */
        const uint64_t first = 1ull << 2 * LIMB_BITS;
        const uint64_t least = (uint64_t)ceil((double)p->min_p * (double)first);

        kept = min(kept, max(sum_weights(s, least), first));
    }
    wanted = min((uint64_t)(uniform(p->seed, row->position) * (double)kept), kept - 1) + 1;
    if (s->top != one_bits) /* no bins yet, or a part of the range */
        low = least_possible(s, wanted, kept);
    return search(s, wanted, low, true, &upto).id;
}

static __device__ __forceinline__ candidate largest_of_slice(sampler *s, slice_view view)
{
    largest_seen seen = { -CUDART_INF_F, 0 };
    pair all;

    each_four(s, [&](float4 x, uint32_t i) { see_four(&seen, x, s->first + i); });
    all = over_cluster<largest_candidates>(s, (pair){ candidate_seen(seen), view.not_finite });
    s->finite = all.b == 0;
    return all.a;
}

static __device__ __forceinline__ void sample_row(const sample_args &n, sampler *s, uint32_t i)
{
    const yard_sample_row *row = &n.a.rows[i];
    float *logits = n.a.logits + (size_t)i * n.a.n_vocab;
    slice_view view;
    uint32_t id;

    s->logits = logits;
    view = prepare_slice(s, row, logits, n.wide);
    id = row->params.temperature > 0.0f ? draw(s, row, view) : id_of(largest_of_slice(s, view));
    if (s->rank == 0 && threadIdx.x == 0) {
        n.a.token[i] = (int32_t)id;
        if (n.a.finite)
            n.a.finite[i] = s->finite;
    }
    __syncthreads(); /* the next row's slice takes the same place */
}

static __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(SAMPLE_THREADS, 3)
    sample_kernel(const __grid_constant__ sample_args n)
{
    const yard_sample_args &a = n.a;
    const uint32_t step = gridDim.x / CLUSTER;
    sampler s = {};

    s.rank = cluster_rank();
    s.n_vocab = a.n_vocab;
    s.first = min(s.rank * n.slice, a.n_vocab);
    s.n = min(n.slice, a.n_vocab - s.first);
    allow_next_kernel();
    cluster_sync(); /* all blocks are there before one writes to another's memory */
    wait_previous_kernel();
    const uint32_t n_rows = (uint32_t)*a.n_rows;
    for (uint32_t i = blockIdx.x / CLUSTER; i < n_rows; i += step) {
        if (is_plain_greedy(n, &a.rows[i]))
            continue;
        if (i + step < n_rows && !is_plain_greedy(n, &a.rows[i + step]))
            prefetch_slice(&s, a.logits + (size_t)(i + step) * a.n_vocab);
        sample_row(n, &s, i);
    }
    cluster_sync(); /* no block leaves while another may write to it */
}

static size_t shared_bytes(uint32_t slice)
{
    return sizeof(sample_shared) + slice * sizeof(float);
}

/* How many rows the device works on at once. One more would wait for a whole round of the others.
 */
static uint32_t clusters_at_once(size_t n_shared_bytes)
{
    cudaLaunchConfig_t config = {};
    int n = 0;

    config.gridDim = dim3(CLUSTER, 1, 1);
    config.blockDim = dim3(SAMPLE_THREADS, 1, 1);
    config.dynamicSmemBytes = n_shared_bytes;
    if (cudaOccupancyMaxActiveClusters(&n, sample_kernel, &config) != cudaSuccess || n < 1)
        return 1;
    return (uint32_t)n;
}

yard_status yard_cuda_sample_launch(const yard_sample_args *a, uint32_t max_rows, void *stream,
                                    yard_error *err)
{
    const uint32_t slice = yard_ceil_div(yard_ceil_div(a->n_vocab, CLUSTER), 4) * 4;
    const size_t n_bytes = shared_bytes(slice);
    const sample_args n = { *a, slice, (uintptr_t)a->logits % 16 == 0 && a->n_vocab % 4 == 0 };
    yard_status st;

    if (n_bytes > MAX_SAMPLE_BYTES)
        return yard_fail(err, YARD_EINVAL, "sample: want at most %zu ids, got %u",
                         (MAX_SAMPLE_BYTES - sizeof(sample_shared)) / sizeof(float) * CLUSTER,
                         a->n_vocab);
    st = yard_cuda_sample_greedy_launch(&n, max_rows, stream, err);
    if (st != YARD_OK)
        return st;
    return launch_rows(sample_kernel, grid_for(max_rows, 1, clusters_at_once(n_bytes)) * CLUSTER,
                       SAMPLE_THREADS, n_bytes, n, "sample", stream, err);
}

yard_status yard_cuda_sample_open(yard_error *err)
{
    cudaError_t code = cudaFuncSetAttribute(
        sample_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MAX_SAMPLE_BYTES);

    if (code == cudaSuccess) /* room for as many blocks as fit */
        code = cudaFuncSetAttribute(sample_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared);
    if (code != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "sample: %s", cudaGetErrorString(code));
    return YARD_OK;
}
