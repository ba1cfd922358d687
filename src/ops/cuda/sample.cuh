/* Sampling: what its three kernels share.
 *
 * A row is cut into slices, a thread block each: look at the logits, weigh them, gather the few
 * that may be drawn. Whichever of a row's blocks comes last does what the kernel needs of the whole
 * row; nobody waits inside a kernel.
 *
 * A probability e is exp((logit - largest) / temperature) in f32; its weight is e in whole units of
 * 2^-32, kept as two numbers of 16 bits, so that sums of a slice fit 32 bits, are exact and do not
 * depend on their order: results do not depend on how rows are cut. */
#ifndef YARD_OPS_CUDA_SAMPLE_CUH
#define YARD_OPS_CUDA_SAMPLE_CUH

#include <float.h>
#include <math_constants.h>

#include "ops/cuda/rows.cuh"
#include "ops/cuda/sample.h"

enum {
    SAMPLE_THREADS = 256,
    SAMPLE_WARPS = SAMPLE_THREADS / WARP_LANES,
    BIN_BITS = 10,
    BINS = 1 << BIN_BITS,
    ALL_BINS = BINS + WARP_LANES, /* and for each lane one of what belongs into none */
    LISTED = BINS,                /* candidates that are put in order */
    MAX_SLICES = 32,
    MAX_SLICE = 15 * 4096, /* logits */
    CUTS = 8,
    LIMB_BITS = 16,
    LIMBS = 2,
    MAX_RANGES = 3
};

/* Probabilities as bits, which are ordered as they are. */
static const uint32_t one_bits = 0x3f800000u;
static const uint32_t least_bits = 0x2f000001u; /* above 2^-33: the least that weighs 1 */
static const uint64_t first_weight = 1ull << 2 * LIMB_BITS;

/* What a look at a slice says. */
typedef struct alignas(16) slice_seen {
    uint64_t largest; /* a candidate: the order key of the logit above the complement of its id */
    float about;      /* what the slice weighs to a few digits, relative to its largest */
    uint32_t not_finite;
} slice_seen;

typedef struct alignas(16) slice_weighed {
    uint64_t all;
    uint64_t enough_for_min_p; /* those that weigh no less than min-p says */
    uint32_t n;                /* with top-k: candidates */
} slice_weighed;

/* Probabilities [low, top], as bits, of which all candidates are gathered. */
typedef struct gather_range {
    uint32_t top, low;
    uint64_t before; /* what weighs more than the range, less what earlier ranges weigh */
} gather_range;

enum row_state { ROW_IS_DONE, ROW_GATHERS, ROW_IS_LOST };

/* What is the same for all candidates of a row. */
typedef struct row_scale {
    float largest, per;
    uint32_t order; /* of the largest; 0: no candidate */
    float about;    /* what the row weighs to a few digits; no number: unknown */
    bool finite;
} row_scale;

typedef struct row_choice {
    uint64_t all, enough_for_min_p;
    double uniform;
    row_scale scale;
    uint32_t state, n_ranges;
    uint32_t n, last_of_top_k; /* candidates, and which one of the gathered is the k-th */
    gather_range range[MAX_RANGES];
} row_choice;

/* A row between its blocks. What is counted up is 0 at rest. */
struct alignas(128) sample_slot {
    slice_seen seen[MAX_SLICES];
    slice_weighed weighed[MAX_SLICES];
    unsigned long long bin[BINS];
    uint32_t n_in_bin[BINS]; /* with top-k */
    row_choice choice;
    uint64_t list_rank[LISTED];
    uint32_t list_id[LISTED];
    uint32_t n_weighed, n_gathered; /* slices */
    uint32_t n_listed;
};

typedef struct sample_args {
    yard_sample_args a;
    sample_slot *slots;
    uint32_t first, n_slots; /* rows from `first` on that have slots */
    bool wide;               /* rows are whole vectors */
    struct {
        uint32_t max_rows; /* of which no more slices are needed than blocks run at once */
        uint32_t n_slices, slice;
    } way[CUTS]; /* to cut rows, from the shortest slices on */
} sample_args;

/* A kernel's work on one slice. What is the same in all threads of a block. */
typedef struct piece {
    uint32_t row, slice, n_slices;
    uint32_t first, n; /* logits */
    sample_slot *slot;
} piece;

struct alignas(16) sample_shared {
    union {
        struct {
            uint32_t limb[LIMBS][ALL_BINS];
            uint32_t n_in_bin[ALL_BINS];
        };
        struct {
            unsigned long long upto[BINS]; /* weight with this bin or candidate */
            uint32_t n_upto[BINS];
        };
        struct {
            uint64_t rank[LISTED];
            uint32_t id[LISTED];
        };
        uint32_t words[(LIMBS + 1) * ALL_BINS]; /* counters of ids, and to clear all */
    };
    uint64_t partial[SAMPLE_WARPS];
    uint32_t n_partial[SAMPLE_WARPS];
    uint32_t n_listed, first_listed;
};

/* A function and not a pointer in the pieces: so the compiler sees shared memory in every access.
 */
static __device__ __forceinline__ sample_shared *shared(void)
{
    extern __shared__ float4 raw[];

    return (sample_shared *)raw;
}

static __device__ __forceinline__ uint32_t lane_of(void)
{
    return threadIdx.x % WARP_LANES;
}

static __device__ __forceinline__ uint32_t warp_of(void)
{
    return threadIdx.x / WARP_LANES;
}

/* The block has done its slice; true in the block that did the row's last one, which then sees what
 * the others wrote. */
static __device__ __forceinline__ bool arrive(uint32_t *n_arrived, uint32_t n_all)
{
    bool last = false;

    __syncthreads(); /* what the block wrote goes before its arrival */
    if (threadIdx.x == 0)
        last = add_acq_rel(n_arrived, 1) == n_all - 1;
    return __syncthreads_or(last);
}

/* candidates and weights */

/* The largest of a warp's, in all lanes. */
static __device__ __forceinline__ uint64_t largest_of_warp(uint64_t key)
{
    const uint32_t order = __reduce_max_sync(0xffffffffu, (uint32_t)(key >> 32));
    const bool has = (uint32_t)(key >> 32) == order;

    return (uint64_t)order << 32 | __reduce_max_sync(0xffffffffu, has ? (uint32_t)key : 0u);
}

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

/* The temperature's inverse, as the definition has it. */
static __device__ __forceinline__ float per_temperature(const yard_sample_row *row)
{
    return fminf(fmaxf(__frcp_rn(row->params.temperature), FLT_MIN), FLT_MAX);
}

/* (logit - largest) / temperature. What is no number counts as minus infinity, and plus infinity,
 * which rows that are FINITE have not, as the largest float; below -23.5 nothing has a weight. */
template <bool FINITE = false>
static __device__ __forceinline__ float exponent_of(float logit, float largest, float per)
{
    const float t = fmaxf(__fmul_rn(__fsub_rn(logit, largest), per), -24.0f);

    return FINITE ? t : fminf(t, 0.0f);
}

/* The two digits of e * 2^32, rounded: the bits of a float below 2^-126 are a whole number of
 * 2^-149.
 */
static __device__ __forceinline__ void digits_of(float e, uint32_t *high, uint32_t *low)
{
    const float h = __fmul_rz(e, 0x1p-133f);

    *high = __float_as_uint(h);
    *low = __float_as_uint(__fmaf_rn(e, 0x1p-117f, -__fmul_rn(h, 0x1p16f)));
}

static __device__ __forceinline__ uint64_t weight_of(float e)
{
    uint32_t high, low;

    digits_of(e, &high, &low);
    return ((uint64_t)high << LIMB_BITS) + low;
}

static __device__ __forceinline__ float about_exp2(float x)
{
    float y;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Factor of an exponent to the base 2. */
static __device__ __forceinline__ float log2_per(float per)
{
    return fminf(per * 0x1.715476p+0f, FLT_MAX);
}

/* Of all slices; every warp for itself. */
static __device__ __forceinline__ row_scale scale_of(const piece &w, float per)
{
    const uint32_t lane = lane_of();
    slice_seen seen = {};
    row_scale s;

    if (lane < w.n_slices)
        seen = w.slot->seen[lane];
    const uint32_t order = (uint32_t)(seen.largest >> 32);
    s.per = per;
    s.order = __reduce_max_sync(0xffffffffu, order);
    s.largest = ordered_logit(s.order);
    s.finite = !__any_sync(0xffffffffu, seen.not_finite != 0);
    s.about = order == 0
                  ? 0.0f
                  : seen.about * about_exp2((ordered_logit(order) - s.largest) * log2_per(s.per));
    for (int d = WARP_LANES / 2; d > 0; d /= 2)
        s.about += __shfl_xor_sync(0xffffffffu, s.about, d);
    return s;
}

/* the logits */

/* The vectors of each thread that are on their way together, SAMPLE_THREADS vectors apart. */
enum { BATCH = 4, BATCH_STEP = SAMPLE_THREADS * 4 };

/* How many logits a batch has from its thread's first on: all, as the compiler may know, or less.
 */
struct whole_batch {
    __device__ __forceinline__ bool has(uint32_t) const
    {
        return true;
    }
};
struct part_of_batch {
    uint32_t n;
    __device__ __forceinline__ bool has(uint32_t i) const
    {
        return i < n;
    }
};

/* Calls fn(vectors, first logit of the first, which there are) for n logits, minus infinity where
 * there is none. */
template <typename FN>
static __device__ __forceinline__ void each_batch(const float *logits, uint32_t n, bool wide, FN fn)
{
    const float none = -CUDART_INF_F;
    uint32_t at = threadIdx.x * 4;
    float4 x[BATCH];

    if (wide)
        for (uint32_t begin = 0; begin + BATCH_STEP * BATCH <= n; begin += BATCH_STEP * BATCH) {
            const float4 *from = (const float4 *)(logits + at);
#pragma unroll
            for (uint32_t l = 0; l < BATCH; l++)
                x[l] = from[l * SAMPLE_THREADS];
            fn(x, at, whole_batch{});
            at += BATCH_STEP * BATCH;
        }
    for (; at < n; at += BATCH_STEP * BATCH) {
#pragma unroll
        for (uint32_t l = 0; l < BATCH; l++) {
            const uint32_t i = at + l * BATCH_STEP;
            if (wide && i < n) {
                x[l] = *(const float4 *)(logits + i);
            } else {
                x[l].x = i < n ? logits[i] : none;
                x[l].y = i + 1 < n ? logits[i + 1] : none;
                x[l].z = i + 2 < n ? logits[i + 2] : none;
                x[l].w = i + 3 < n ? logits[i + 3] : none;
            }
        }
        fn(x, at, part_of_batch{ n - at });
    }
}

static __device__ __forceinline__ const float *slice_of(const sample_args &n, const piece &w)
{
    return n.a.logits + (size_t)w.row * n.a.n_vocab + w.first;
}

#endif
