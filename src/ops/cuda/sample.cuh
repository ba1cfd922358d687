/* What the thread blocks of a row share when they sample it: a cluster of eight holds the row in
 * shared memory, a slice a block, first as logits, then as relative probabilities.
 *
 * A probability e is exp((logit - largest) / temperature) in f32; its weight is e in whole units of
 * 2^-32, kept as two numbers of 16 bits, so that sums of a slice fit 32 bits, are exact and do not
 * depend on their order. */
#ifndef YARD_OPS_CUDA_SAMPLE_CUH
#define YARD_OPS_CUDA_SAMPLE_CUH

#include <float.h>
#include <math_constants.h>

#include "ops/cuda/rows.cuh"

enum {
    SAMPLE_THREADS = 256,
    SAMPLE_WARPS = SAMPLE_THREADS / WARP_LANES,
    SAMPLE_LOADS = 8, /* vectors of a thread that are on their way together */
    CLUSTER = 8,      /* blocks of a row */
    BINS = 1024,
    OWN_BINS = BINS / CLUSTER, /* bins whose sum over the cluster a block makes */
    LIST = 32,                 /* candidates of one bin in one slice that are compared directly */
    ALL_LISTED = LIST * CLUSTER,
    LIMB_BITS = 16,
    LIMBS = 2,
    COUNTERS = LIMBS * BINS /* ids whose occurrences are counted at once, in the bins' place */
};

/* Probabilities as bits, which are ordered as they are. */
static const uint32_t one_bits = 0x3f800000u;
static const uint32_t least_bits = 0x2f000001u; /* above 2^-33: the least that weighs 1 */
static const uint32_t digit_bits = 0x4b000000u; /* of 2^23, see digits_of */

typedef struct sample_args {
    yard_sample_args a;
    uint32_t slice; /* logits of a block */
    bool wide;      /* rows are whole vectors */
} sample_args;

typedef uint64_t candidate; /* the order key of a logit above the complement of its id */

/* Order: by probability, then by logit, then by id. */
typedef struct listed {
    uint64_t rank; /* bits of the probability above the order key of the logit */
    uint32_t id;
} listed;

typedef struct pair {
    uint64_t a, b;
} pair;

/* The slice follows, in whole vectors. */
struct alignas(16) sample_shared {
    union {
        uint32_t bin[LIMBS][BINS]; /* of this block's slice, until the cluster's sums are made */
        struct {
            listed part[CLUSTER][LIST]; /* rank 0's: what each block has of the bin in question */
            listed all[ALL_LISTED];     /* the same without gaps */
        } list;
    };
    uint32_t n_list[CLUSTER];   /* every block's: how many, also those that do not fit */
    uint64_t own_sum[OWN_BINS]; /* over the cluster */
    uint64_t rank_sum[CLUSTER]; /* of the bins that each rank has */
    pair told[2][CLUSTER];      /* what the blocks told each other; two sets take turns */
    pair partial[SAMPLE_WARPS];
    listed found; /* of a search: what rank 0 tells all */
    uint64_t found_upto, found_before;
    uint32_t found_bin;
    uint32_t n_listed; /* of this block's slice, so far */
};

/* What is the same in all threads of a block. */
typedef struct sampler {
    const float *logits; /* the row as bias and penalties leave it */
    uint32_t rank, n, first, n_vocab;
    uint32_t turn; /* which set of told comes next */
    bool counting; /* weights are 1 */
    bool finite;   /* all of the row's logits, before anything changed them */
    /* probabilities that are in the bins, as bits, and how many of them share one */
    uint32_t top, low, shift;
} sampler;

/* Functions and not pointers in the sampler: so the compiler sees shared memory in every access. */
static __device__ __forceinline__ sample_shared *shared(void)
{
    extern __shared__ float4 raw[];

    return (sample_shared *)raw;
}

/* The slice: logits, then probabilities. */
static __device__ __forceinline__ float *slice_values(void)
{
    return (float *)(shared() + 1);
}

template <typename T> static __device__ __forceinline__ T *at_rank(T *p, uint32_t rank)
{
    return (T *)__cluster_map_shared_rank(p, rank);
}

/* sums and maxima over the cluster */

/* What over_cluster can do to pairs: `lanes` over a warp, `two` with what others have. */
struct largest_words { /* 32 bits */
    static __device__ __forceinline__ pair lanes(pair x)
    {
        return (pair){ __reduce_max_sync(0xffffffffu, (uint32_t)x.a),
                       __reduce_max_sync(0xffffffffu, (uint32_t)x.b) };
    }
    static __device__ __forceinline__ pair two(pair x, pair y)
    {
        return (pair){ x.a > y.a ? x.a : y.a, x.b > y.b ? x.b : y.b };
    }
};

struct added_words { /* 32 bits in a block, 64 over the cluster */
    static __device__ __forceinline__ pair lanes(pair x)
    {
        return (pair){ __reduce_add_sync(0xffffffffu, (uint32_t)x.a),
                       __reduce_add_sync(0xffffffffu, (uint32_t)x.b) };
    }
    static __device__ __forceinline__ pair two(pair x, pair y)
    {
        return (pair){ x.a + y.a, x.b + y.b };
    }
};

struct added_longs { /* 64 bits, a alone */
    static __device__ __forceinline__ pair two(pair x, pair y)
    {
        return (pair){ x.a + y.a, 0 };
    }
    static __device__ __forceinline__ pair lanes(pair x)
    {
        for (int d = WARP_LANES / 2; d > 0; d /= 2)
            x.a += __shfl_xor_sync(0xffffffffu, x.a, d);
        return x;
    }
};

struct largest_candidates { /* 64 bits */
    static __device__ __forceinline__ pair two(pair x, pair y)
    {
        return (pair){ x.a > y.a ? x.a : y.a, x.b > y.b ? x.b : y.b };
    }
    static __device__ __forceinline__ pair lanes(pair x)
    {
        for (int d = WARP_LANES / 2; d > 0; d /= 2)
            x = two(x, (pair){ __shfl_xor_sync(0xffffffffu, x.a, d),
                               __shfl_xor_sync(0xffffffffu, x.b, d) });
        return x;
    }
};

/* OP over all threads of the cluster. */
template <typename OP> static __device__ __forceinline__ pair over_cluster(sampler *s, pair x)
{
    sample_shared *m = shared();
    const uint32_t lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    const uint32_t turn = s->turn;

    x = OP::lanes(x);
    if (lane == 0)
        m->partial[warp] = x;
    __syncthreads();
    if (warp == 0) {
        x = OP::lanes(lane < SAMPLE_WARPS ? m->partial[lane] : (pair){ 0, 0 });
        if (lane < CLUSTER) /* lane r tells rank r */
            *at_rank(&m->told[turn][s->rank], lane) = x;
    }
    /* A set is written again two turns later: by then all have read it, since they came to the
     * barrier between. */
    cluster_sync();
    s->turn = 1 - turn;
    x = m->told[turn][0];
    for (int r = 1; r < CLUSTER; r++)
        x = OP::two(x, m->told[turn][r]);
    return x;
}

/* candidates and weights */

/* Larger for larger logits; plus infinity counts as the largest float, -0 equals 0. */
static __device__ __forceinline__ uint32_t logit_order(float logit)
{
    const uint32_t bits = __float_as_uint(__fadd_rn(fminf(logit, FLT_MAX), 0.0f));

    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static __device__ __forceinline__ float ordered_logit(uint32_t order)
{
    return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}

static __device__ __forceinline__ candidate candidate_of(float logit, uint32_t id)
{
    return (uint64_t)logit_order(logit) << 32 | (uint32_t)~id;
}

static __device__ __forceinline__ uint32_t id_of(candidate key)
{
    return key == 0 ? 0u : (uint32_t)~key;
}

/* What one thread has seen of a row: the first of the largest logits. */
typedef struct largest_seen {
    float logit;
    uint32_t id;
} largest_seen;

static __device__ __forceinline__ void see_four(largest_seen *seen, float4 x, uint32_t first_id)
{
    const float v[4] = { x.x, x.y, x.z, x.w };

#pragma unroll
    for (uint32_t c = 0; c < 4; c++)
        if (v[c] > seen->logit)
            *seen = (largest_seen){ v[c], first_id + c };
}

static __device__ __forceinline__ candidate candidate_seen(largest_seen seen)
{
    /* plus infinity is larger than the largest float here */
    return seen.logit > -CUDART_INF_F
               ? (uint64_t)(logit_order(seen.logit) + (seen.logit > FLT_MAX)) << 32 |
                     (uint32_t)~seen.id
               : 0;
}

/* exp(x) for x <= 0; 0 below -23.5, where nothing has a weight. */
static __device__ __forceinline__ float probability_of(float x)
{
    const float e = exp_between(x);

    return x >= -23.5f ? e : 0.0f;
}

/* The two digits of e * 2^32, rounded: whole numbers in the low bits of floats from 2^23 on. */
static __device__ __forceinline__ void digits_of(float e, uint32_t *high, uint32_t *low)
{
    const float whole = 0x1p23f, high_units = 0x1p16f;
    const float h = __fmaf_rz(e, high_units, whole);
    const float rest = __fmaf_rn(e, high_units, -__fsub_rn(h, whole)); /* exact */

    *high = __float_as_uint(h);
    *low = __float_as_uint(__fmaf_rn(rest, high_units, whole));
}

static __device__ __forceinline__ uint64_t weight_of(const sampler *s, float e)
{
    uint32_t high, low;

    digits_of(e, &high, &low);
    return s->counting ? (uint64_t)(__float_as_uint(e) >= least_bits)
                       : ((uint64_t)(high - digit_bits) << LIMB_BITS) + (low - digit_bits);
}

/* the slice */

/* Calls fn(values of four ids, first of them) for the slice. */
template <typename FN> static __device__ __forceinline__ void each_four(const sampler *s, FN fn)
{
#pragma unroll 2
    for (uint32_t i = threadIdx.x * 4; i < s->n; i += SAMPLE_THREADS * 4)
        fn(*(const float4 *)(slice_values() + i), i);
}

/* The same for one row's logits in memory, several vectors under way at once. */
template <typename FN>
static __device__ __forceinline__ void each_four_loaded(const sampler *s, const float *slice, FN fn)
{
    const float none = -CUDART_INF_F;

    for (uint32_t at = threadIdx.x * 4; at < s->n; at += SAMPLE_LOADS * SAMPLE_THREADS * 4) {
        float4 x[SAMPLE_LOADS];
#pragma unroll
        for (uint32_t l = 0; l < SAMPLE_LOADS; l++) {
            const uint32_t i = at + l * SAMPLE_THREADS * 4;
            x[l] = i < s->n ? *(const float4 *)(slice + i) : make_float4(none, none, none, none);
        }
#pragma unroll
        for (uint32_t l = 0; l < SAMPLE_LOADS; l++)
            fn(x[l], at + l * SAMPLE_THREADS * 4);
    }
}

static __device__ __forceinline__ float largest_of_four(float largest, float4 x)
{
    /* passes over what is no number */
    return fmaxf(largest, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
}

/* No number as soon as one of the four is infinite or no number; otherwise `so_far`. */
static __device__ __forceinline__ float finite_so_far(float so_far, float4 x)
{
    so_far = __fmaf_rn(0.0f, x.x, so_far); /* zero times infinity is no number */
    so_far = __fmaf_rn(0.0f, x.y, so_far);
    so_far = __fmaf_rn(0.0f, x.z, so_far);
    return __fmaf_rn(0.0f, x.w, so_far);
}

/* What a thread has seen of its logits: the largest, and 1 where one is not finite. */
typedef struct slice_view {
    float largest;
    uint32_t not_finite;
} slice_view;

static __device__ __forceinline__ slice_view load_slice(const sampler *s, bool wide)
{
    const float *slice = s->logits + s->first;
    float largest = -CUDART_INF_F, finite = 0.0f;

    if (wide) {
        each_four_loaded(s, slice, [&](float4 x, uint32_t i) {
            if (i < s->n) {
                *(float4 *)(slice_values() + i) = x;
                finite = finite_so_far(finite, x);
            }
            largest = largest_of_four(largest, x);
        });
    } else {
        for (uint32_t i = threadIdx.x; i < (s->n + 3) / 4 * 4; i += SAMPLE_THREADS) {
            const float x = i < s->n ? slice[i] : -CUDART_INF_F;
            slice_values()[i] = x;
            finite = i < s->n ? __fmaf_rn(0.0f, x, finite) : finite;
            largest = fmaxf(largest, x);
        }
    }
    __syncthreads();
    return (slice_view){ largest, finite != finite };
}

/* Asks for the slice of the cluster's next row while this one is worked on. */
static __device__ __forceinline__ void prefetch_slice(const sampler *s, const float *logits)
{
    const uint32_t line = 128 / sizeof(float);

    for (uint32_t i = threadIdx.x * line; i < s->n; i += SAMPLE_THREADS * line)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(logits + s->first + i));
}

/* bias and penalties */

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
                    logits[s->first + id] = slice_values()[id] = __fadd_rn(slice_values()[id], add);
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
    uint32_t *count = shared()->bin[0];

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
                logits[first + i] = slice_values()[begin + i] =
                    penalised(&row->params, slice_values()[begin + i], count[i] & ~in_prompt);
        __syncthreads();
    }
}

static __device__ __forceinline__ bool has_penalties(const yard_sample_params *p)
{
    return p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f ||
           p->frequency_penalty != 0.0f;
}

/* Nothing changes its logits, and they are whole vectors. */
static __device__ __forceinline__ bool is_plain_greedy(const sample_args &n,
                                                       const yard_sample_row *row)
{
    return n.wide && !(row->params.temperature > 0.0f) && row->n_bias == 0 &&
           !has_penalties(&row->params);
}

/* The row's slice with bias and penalties, also in memory. Returns the largest of the thread's
 * logits then, and whether they were finite before. */
static __device__ __forceinline__ slice_view prepare_slice(const sampler *s,
                                                           const yard_sample_row *row,
                                                           float *logits, bool wide)
{
    slice_view view = load_slice(s, wide);

    if (row->n_bias == 0 && !has_penalties(&row->params))
        return view;
    add_bias(s, row, logits);
    if (has_penalties(&row->params))
        penalise(s, row, logits);
    view.largest = -CUDART_INF_F;
    each_four(s, [&](float4 x, uint32_t) { view.largest = largest_of_four(view.largest, x); });
    return view;
}

/* The rows of sample_greedy.cu. The kernel is enqueued on return. */
extern "C" yard_status yard_cuda_sample_greedy_launch(const sample_args *n, uint32_t max_rows,
                                                      void *stream, yard_error *err);

#endif
