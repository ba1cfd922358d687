/* The first kernel: bias and penalties, the largest logit, and about what the row weighs. */
#ifndef YARD_OPS_CUDA_SAMPLE_LOOK_CUH
#define YARD_OPS_CUDA_SAMPLE_LOOK_CUH

#include "ops/cuda/sample.cuh"

/* bias and penalties */

/* An id may come twice: sums are made in order. 32 entries at a time by one warp; the first of
 * those with the same id adds for all of them. */
static __device__ __forceinline__ void add_bias(const piece &w, const yard_sample_row *row,
                                                float *logits)
{
    if (threadIdx.x < WARP_LANES)
        for (uint32_t at = 0; at < row->n_bias; at += WARP_LANES) {
            const uint32_t i = at + threadIdx.x;
            const uint32_t id = i < row->n_bias ? (uint32_t)row->bias_token[i] - w.first : ~0u;
            const float value = i < row->n_bias ? row->bias_value[i] : 0.0f;
            const uint32_t same = __match_any_sync(0xffffffffu, id);
            const bool adds = id < w.n && __ffs((int)same) - 1 == (int)threadIdx.x;
            float x = adds ? logits[id] : 0.0f;

            for (int l = 0; l < WARP_LANES; l++) {
                const float more = __shfl_sync(0xffffffffu, value, l);
                x = same >> l & 1 ? __fadd_rn(x, more) : x;
            }
            if (adds)
                logits[id] = x;
            __syncwarp(); /* before another lane reads the id */
        }
    __syncthreads(); /* the logits are as bias leaves them */
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

/* Counts occurrences of the slice's ids, as many ids at a time as there is room for, and lowers the
 * logits of those that occur. */
static __device__ __forceinline__ void penalise(const piece &w, const yard_sample_row *row,
                                                float *logits)
{
    const uint32_t in_prompt = 1u << 31, n_counters = (LIMBS + 1) * ALL_BINS;
    uint32_t *count = shared()->words;

    for (uint32_t at = 0; at < w.n; at += n_counters) {
        const uint32_t n = min(w.n - at, n_counters), first = w.first + at;

        for (uint32_t i = threadIdx.x; i < n; i += SAMPLE_THREADS)
            count[i] = 0;
        __syncthreads(); /* counters are empty */
        for (uint32_t i = threadIdx.x; i < row->n_prompt; i += SAMPLE_THREADS)
            if ((uint32_t)row->prompt[i] - first < n)
                atomicOr(&count[row->prompt[i] - first], in_prompt);
        for (uint32_t i = threadIdx.x; i < row->n_output; i += SAMPLE_THREADS)
            if ((uint32_t)row->output[i] - first < n)
                atomicAdd(&count[row->output[i] - first], 1u);
        __syncthreads(); /* all are counted */
        for (uint32_t i = threadIdx.x; i < n; i += SAMPLE_THREADS)
            if (count[i] != 0)
                logits[at + i] = penalised(&row->params, logits[at + i], count[i] & ~in_prompt);
        __syncthreads(); /* the logits are there; counters may be written again */
    }
}

static __device__ __forceinline__ bool has_penalties(const yard_sample_params *p)
{
    return p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f ||
           p->frequency_penalty != 0.0f;
}

/* what a thread sees */

static const float least_reference = -1e30f; /* its product with a usual factor is a number */

typedef struct thread_seen {
    float largest;   /* passes over what is no number */
    uint32_t id;     /* its first; of greedy rows */
    float finite;    /* no number as soon as a logit is infinite or no number */
    float about;     /* sum of 2^((logit - reference) * per) */
    float reference; /* the largest so far, a finite number */
} thread_seen;

static __device__ __forceinline__ float largest_of_four(float4 x)
{
    return fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w));
}

/* DRAWS: about instead of id. */
template <bool DRAWS>
static __device__ __forceinline__ thread_seen look_at(const float *slice, uint32_t n, bool wide,
                                                      float log2_factor)
{
    thread_seen s = { -CUDART_INF_F, 0, 0.0f, 0.0f, least_reference };

    each_batch(slice, n, wide, [&](const float4(&x)[BATCH], uint32_t at, auto there) {
        float largest = s.largest;
#pragma unroll
        for (uint32_t l = 0; l < BATCH; l++) {
            const float v[4] = { x[l].x, x[l].y, x[l].z, x[l].w };
            largest = fmaxf(largest, largest_of_four(x[l]));
#pragma unroll
            for (uint32_t c = 0; c < 4; c++) /* zero times infinity is no number */
                s.finite =
                    there.has(l * BATCH_STEP + c) ? __fmaf_rn(0.0f, v[c], s.finite) : s.finite;
        }
        if (DRAWS) {
            const float to = fminf(fmaxf(largest, least_reference), FLT_MAX);
            const float less = -to * log2_factor;
            s.about *= about_exp2((s.reference - to) * log2_factor);
            s.reference = to;
#pragma unroll
            for (uint32_t l = 0; l < BATCH; l++)
                s.about += (about_exp2(fmaf(x[l].x, log2_factor, less)) +
                            about_exp2(fmaf(x[l].y, log2_factor, less))) +
                           (about_exp2(fmaf(x[l].z, log2_factor, less)) +
                            about_exp2(fmaf(x[l].w, log2_factor, less)));
        } else if (largest > s.largest) { /* seldom: then who it is */
#pragma unroll
            for (uint32_t l = BATCH; l-- > 0;) {
                const float v[4] = { x[l].x, x[l].y, x[l].z, x[l].w };
#pragma unroll
                for (uint32_t c = 4; c-- > 0;)
                    if (v[c] == largest)
                        s.id = at + l * BATCH_STEP + c;
            }
        }
        s.largest = largest;
    });
    return s;
}

/* The whole slice's, from what its threads have seen. In the first warp. */
static __device__ __forceinline__ slice_seen seen_by_block(const thread_seen &s, uint32_t first,
                                                           bool draws, float log2_factor)
{
    sample_shared *m = shared();
    uint64_t key = 0;
    float about = 0.0f;

    if (s.largest > -CUDART_INF_F) /* to greedy rows infinity is larger than the largest float */
        key = (uint64_t)(logit_order(s.largest) + (s.largest > FLT_MAX && !draws)) << 32 |
              (uint32_t) ~(first + s.id);
    key = largest_of_warp(key);
    const float in_warp = ordered_logit((uint32_t)(key >> 32));
    about = s.about == 0.0f ? 0.0f : s.about * about_exp2((s.reference - in_warp) * log2_factor);
    for (int d = WARP_LANES / 2; d > 0; d /= 2)
        about += __shfl_xor_sync(0xffffffffu, about, d);
    if (lane_of() == 0) {
        m->partial[warp_of()] = key;
        m->n_partial[warp_of()] = __float_as_uint(about);
    }
    const bool not_finite = __syncthreads_or(s.finite != s.finite);
    if (threadIdx.x < WARP_LANES) {
        const bool is_warp = threadIdx.x < SAMPLE_WARPS;
        const uint64_t mine = is_warp ? m->partial[threadIdx.x] : 0;

        key = largest_of_warp(mine);
        about = is_warp ? __uint_as_float(m->n_partial[threadIdx.x]) : 0.0f;
        if (about != 0.0f)
            about *= about_exp2(
                (ordered_logit((uint32_t)(mine >> 32)) - ordered_logit((uint32_t)(key >> 32))) *
                log2_factor);
        for (int d = SAMPLE_WARPS / 2; d > 0; d /= 2)
            about += __shfl_xor_sync(0xffffffffu, about, d);
    }
    return (slice_seen){ key, about, not_finite };
}

static __device__ __forceinline__ void look(const sample_args &n, const piece &w)
{
    const yard_sample_row *row = &n.a.rows[w.row];
    const bool has_changes = row->n_bias > 0 || has_penalties(&row->params);
    const bool draws = row->params.temperature > 0.0f;
    const float factor = draws ? log2_per(per_temperature(row)) : 0.0f;
    float *logits = n.a.logits + (size_t)w.row * n.a.n_vocab + w.first;
    thread_seen s, before;

    if (has_changes) {
        before = look_at<false>(logits, w.n, n.wide, 0.0f);
        __syncthreads(); /* nobody reads the slice as it was any more */
        add_bias(w, row, logits);
        if (has_penalties(&row->params))
            penalise(w, row, logits);
    }
    if (draws)
        s = look_at<true>(logits, w.n, n.wide, factor);
    else
        s = look_at<false>(logits, w.n, n.wide, factor);
    if (has_changes)
        s.finite = before.finite;
    const slice_seen seen = seen_by_block(s, w.first, draws, factor);
    if (threadIdx.x == 0)
        w.slot->seen[w.slice] = seen;
}

#endif
