/* The router: one block a token, a thread an expert. Scores, ties and sums are the definition's to
 * the bit, so all replicas of a token choose the same. */
#include "ops/cuda/launch.h"

#include <math_constants.h>

#include "ops/cuda/rows.cuh"

enum {
    ROUTE_MAX_BLOCKS = 132 * 8,
    ROUTE_MAX_TOP_K = 64,
    ROUTE_MAX_EXPERTS = 512,
    ROUTE_MAX_WARPS = ROUTE_MAX_EXPERTS / WARP_LANES
};

/* What the threads of a token tell each other. Keys are read in fours. */
typedef struct route_shared {
    alignas(16) uint32_t key[ROUTE_MAX_EXPERTS];  /* each warp's own; then ranks of the best */
    alignas(16) uint32_t best[ROUTE_MAX_EXPERTS]; /* the largest keys of each warp, in order */
    float value[ROUTE_MAX_EXPERTS];               /* scores or choices */
    float group[WARP_LANES];
    float chosen[ROUTE_MAX_TOP_K];
    uint32_t taken[ROUTE_MAX_WARPS]; /* experts of a warp; of them numbers, in the upper half */
} route_shared;

typedef struct route_args {
    yard_moe_route_args a;
    uint32_t group_size;
    uint32_t each;      /* the largest keys of a warp that are compared with other warps' */
    uint32_t log_parts; /* of the lanes that compare one of them */
} route_args;

/* Larger numbers have larger keys, equal ones equal keys; not a number: 0, below all numbers. */
static __device__ __forceinline__ uint32_t order_key(float x)
{
    const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));

    return x != x ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* Softmax over all experts, with the definition's sum: one after the other. Every thread goes
 * through all of them, at the same address. */
static __device__ __forceinline__ float softmax(const yard_moe_route_args &a, route_shared *m,
                                                float logit)
{
    float largest, sum = 0.0f, e;

    m->value[threadIdx.x] = logit;
    __syncthreads(); /* all logits are there */
    largest = m->value[0];
    for (uint32_t i = 1; i < a.n_experts; i++)
        if (m->value[i] > largest)
            largest = m->value[i];
    e = exp_defined(__fsub_rn(logit, largest));
    __syncthreads(); /* everybody has seen them */
    m->value[threadIdx.x] = e;
    __syncthreads(); /* all exponentials are there */
    for (uint32_t i = 0; i < a.n_experts; i++)
        sum = __fadd_rn(sum, m->value[i]);
    __syncthreads(); /* the places may be written again */
    return __fdiv_rn(e, sum);
}

/* What group g is worth: the definition's loops, one lane a group. */
static __device__ __forceinline__ float
group_value(const yard_moe_route_args &a, const route_shared *m, uint32_t g, uint32_t size)
{
    float first = m->value[g * size], second;
    const bool largest_only = a.group_value == YARD_GROUP_LARGEST;

    if (size == 1)
        return first;
    second = m->value[g * size + 1];
    if (second > first) {
        const float swap = first;
        first = second;
        second = swap;
    }
    for (uint32_t i = 2; i < size; i++) {
        const float x = m->value[g * size + i];
        if (x > first) {
            second = first;
            first = x;
        } else if (x > second) {
            second = x;
        }
    }
    return largest_only ? first : __fadd_rn(first, second);
}

/* The number of a key. */
static __device__ __forceinline__ float of_key(uint32_t key)
{
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

/* The same where the group is the warp, each lane with its choice. */
static __device__ __forceinline__ float warp_value(const yard_moe_route_args &a,
                                                   const route_shared *m, float choice)
{
    const uint32_t key = order_key(choice), first = __reduce_max_sync(0xffffffffu, key);
    const uint32_t firsts = __ballot_sync(0xffffffffu, key == first);
    const uint32_t others = __reduce_max_sync(0xffffffffu, key == first ? 0 : key);
    const float largest = of_key(first);

    if (__any_sync(0xffffffffu, key == 0)) { /* no number: the definition's order matters */
        __syncwarp();                        /* the choices are there */
        return group_value(a, m, threadIdx.x / WARP_LANES, WARP_LANES);
    }
    return a.group_value == YARD_GROUP_LARGEST
               ? largest
               : __fadd_rn(largest, __popc(firsts) > 1 ? largest : of_key(others));
}

/* How many groups come before group g. */
static __device__ __forceinline__ uint32_t groups_before(const yard_moe_route_args &a,
                                                         const route_shared *m, uint32_t g)
{
    uint32_t before = 0;

    for (uint32_t h = 0; h < a.n_groups; h++)
        before += m->group[h] > m->group[g] || (m->group[h] == m->group[g] && h < g);
    return before;
}

/* The same for the group that is the warp, all lanes together. */
static __device__ __forceinline__ uint32_t warps_before(const yard_moe_route_args &a,
                                                        const route_shared *m)
{
    const uint32_t g = threadIdx.x / WARP_LANES, h = threadIdx.x % WARP_LANES;
    const float ours = m->group[g], theirs = h < a.n_groups ? m->group[h] : 0.0f;

    return __popc(
        __ballot_sync(0xffffffffu, h < a.n_groups && (theirs > ours || (theirs == ours && h < g))));
}

/* The expert's choice, or minus infinity outside the best groups. */
static __device__ __forceinline__ float in_best_groups(const route_args &r, route_shared *m,
                                                       float choice)
{
    const yard_moe_route_args &a = r.a;
    const uint32_t size = r.group_size;
    const uint32_t g = size == WARP_LANES ? threadIdx.x / WARP_LANES : threadIdx.x / size;
    uint32_t before;

    m->value[threadIdx.x] = choice;
    if (size == WARP_LANES) {
        const float value = warp_value(a, m, choice);
        if (threadIdx.x % WARP_LANES == 0)
            m->group[g] = value;
    } else {
        __syncthreads(); /* all choices are there */
        if (threadIdx.x < a.n_groups)
            m->group[threadIdx.x] = group_value(a, m, threadIdx.x, size);
    }
    __syncthreads(); /* the groups' values are */
    if (g >= a.n_groups)
        return choice;
    before = size == WARP_LANES ? warps_before(a, m) : groups_before(a, m, g);
    return before < a.top_groups ? choice : -CUDART_INF_F;
}

/* *n += a >= b, in two instructions. */
static __device__ __forceinline__ void add_not_below(uint32_t *n, uint32_t a, uint32_t b)
{
    asm("{\n.reg .u32 r;\nsub.cc.u32 r, %1, %2;\naddc.u32 %0, %0, 0;\n}"
        : "+r"(*n)
        : "r"(a), "r"(b));
}

/* How many of the n keys from the begin-th four on, each step-th four, are not larger; n is a
 * multiple of four. */
static __device__ __forceinline__ uint32_t count_not_larger(const uint32_t *keys, uint32_t n,
                                                            uint32_t begin, uint32_t step,
                                                            uint32_t mine)
{
    uint32_t count = 0;

#pragma unroll 8
    for (uint32_t i = begin * 4; i < n; i += step * 4) {
        const uint4 k = *(const uint4 *)(keys + i);
        add_not_below(&count, mine, k.x);
        add_not_below(&count, mine, k.y);
        add_not_below(&count, mine, k.z);
        add_not_below(&count, mine, k.w);
    }
    return count;
}

/* How many of the warps' n largest are larger than each, into the keys' place. A few lanes, a power
 * of two, take one of them. */
static __device__ __forceinline__ void rank_best(const route_args &r, route_shared *m, uint32_t n)
{
    const uint32_t parts = 1u << r.log_parts, i = threadIdx.x >> r.log_parts;
    uint32_t others;

    others = i < n ? count_not_larger(m->best, n, threadIdx.x % parts, parts, m->best[i]) : 0;
    for (uint32_t d = parts / 2; d > 0; d /= 2)
        others += __shfl_xor_sync(0xffffffffu, others, (int)d);
    if (i < n && threadIdx.x % parts == 0)
        m->key[i] = n - others;
    __syncthreads(); /* all are ranked */
}

/* What all warps have taken of what m->taken says; *before: those of lower experts. */
static __device__ __forceinline__ uint32_t count_taken(route_shared *m, bool taken, bool is_number,
                                                       uint32_t *before)
{
    const uint32_t warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    const uint32_t all = __ballot_sync(0xffffffffu, taken);
    const uint32_t numbers = __ballot_sync(0xffffffffu, taken && is_number);

    if (lane == 0)
        m->taken[warp] = __popc(all) | (uint32_t)__popc(numbers) << 16;
    __syncthreads(); /* all warps have counted */
    const uint32_t theirs = lane < blockDim.x / WARP_LANES ? m->taken[lane] : 0;
    *before = __reduce_add_sync(0xffffffffu, lane < warp ? theirs & 0xffffu : 0) +
              __popc(all & ((1u << lane) - 1));
    return __reduce_add_sync(0xffffffffu, theirs);
}

/* Whether the expert is among the top_k largest, of equals the lowest, or no number; *at: how many
 * lower ones are. Returns how many there are. Each warp's largest are compared with those of the
 * other warps: what is behind top_k of its own warp is behind top_k of all. */
static __device__ __forceinline__ uint32_t take_largest(const route_args &r, route_shared *m,
                                                        uint32_t key, bool is_number, bool *taken,
                                                        uint32_t *at)
{
    const yard_moe_route_args &a = r.a;
    const uint32_t lane = threadIdx.x % WARP_LANES, first = threadIdx.x - lane;
    const uint32_t each = r.each, slots = first / WARP_LANES * each;
    const uint32_t n = blockDim.x / WARP_LANES * each;
    const bool wanted = key > 0; /* an expert, and a number */
    uint32_t rank, larger = 0, sum;

    m->key[threadIdx.x] = key;
    __syncwarp(); /* the warp's keys are there */
    rank = lane;
    if (__any_sync(0xffffffffu, key != m->key[first])) { /* all the same where the group is out */
        rank = WARP_LANES - count_not_larger(m->key + first, WARP_LANES, 0, 1, key);
        if (__reduce_or_sync(0xffffffffu, 1u << rank) != ~0u) /* equals: lower ones come first */
            rank += __popc(__match_any_sync(0xffffffffu, key) & ((1u << lane) - 1));
    }
    if (rank < each)
        m->best[slots + rank] = key;
    __syncthreads(); /* all warps' largest are there */
    rank_best(r, m, n);
    if (rank < each)
        larger = m->key[slots + rank];
    *taken = !is_number || (wanted && rank < each && larger < a.top_k);
    sum = count_taken(m, *taken, is_number, at);
    if (sum >> 16 <= a.top_k)
        return sum & 0xffffu;
    /* equals at the end: more than there is room for */
    if (rank < each)
        for (uint32_t i = 0; i < slots + rank; i++)
            larger += m->best[i] == key;
    *taken = *taken && (!is_number || larger < a.top_k);
    __syncthreads(); /* everybody has read the counts */
    return count_taken(m, *taken, is_number, at) & 0xffffu;
}

/* The chosen in ascending order, with their weights; n of them. */
static __device__ __forceinline__ void write_choices(const yard_moe_route_args &a, uint32_t row,
                                                     route_shared *m, bool taken, uint32_t at,
                                                     uint32_t n, float score)
{
    int32_t *expert = a.expert + (size_t)row * a.top_k;
    float *weight = a.weight + (size_t)row * a.top_k;
    float sum = 0.0f;

    if (taken && at < a.top_k) {
        expert[at] = (int32_t)threadIdx.x;
        m->chosen[at] = score;
    }
    __syncthreads(); /* the chosen are there */
    if (threadIdx.x >= WARP_LANES)
        return;
#pragma unroll 8
    for (uint32_t k = 0; k < n; k++)
        sum = __fadd_rn(sum, m->chosen[k]);
    for (uint32_t k = threadIdx.x; k < a.top_k; k += WARP_LANES) {
        const float x = k < n ? m->chosen[k] : 0.0f;
        weight[k] = __fmul_rn(a.normalise ? __fdiv_rn(x, __fadd_rn(sum, 1e-20f)) : x, a.scale);
        if (k >= n) { /* only logits that are not numbers leave a choice open */
            expert[k] = -1;
            weight[k] = 0.0f;
        }
    }
}

/* A row's last readers of shared memory are past two barriers of the next row before anybody writes
 * to the same places. */
static __global__ void __launch_bounds__(ROUTE_MAX_EXPERTS)
    moe_route_kernel(const __grid_constant__ route_args r)
{
    const yard_moe_route_args &a = r.a;
    __shared__ route_shared m;
    const uint32_t e = threadIdx.x;
    const bool exists = e < a.n_experts;
    uint32_t row = blockIdx.x;

    allow_next_kernel();
    /* a weight: no kernel before this one writes it */
    const float bias = a.bias && exists ? a.bias[e] : 0.0f;
    wait_previous_kernel();
    if (!may_read_row(row, a.n_rows, a.max_rows))
        return;
    const uint32_t n_rows = (uint32_t)*a.n_rows;
    float logit = exists ? a.logits[(size_t)row * a.n_experts + e] : 0.0f;
    for (;;) {
        const float score = a.score == YARD_SCORE_SOFTMAX
                                ? softmax(a, &m, logit)
                                : __frcp_rn(__fadd_rn(1.0f, exp_defined(-logit)));
        float choice = a.bias ? __fadd_rn(score, bias) : score;
        uint32_t at, n;
        bool taken;

        if (a.top_groups < a.n_groups)
            choice = in_best_groups(r, &m, choice);
        const bool is_number = !exists || choice == choice;
        n = take_largest(r, &m, exists ? order_key(choice) : 0, is_number, &taken, &at);
        if (row >= n_rows)
            return;
        write_choices(a, row, &m, taken, at, min(n, a.top_k), score);
        row += gridDim.x;
        if (row >= n_rows)
            return;
        logit = exists ? a.logits[(size_t)row * a.n_experts + e] : 0.0f;
    }
}

yard_status yard_cuda_moe_route_launch(const yard_moe_route_args *a, uint32_t max_rows,
                                       void *stream, yard_error *err)
{
    const uint32_t n_threads = (uint32_t)yard_align_up(a->n_experts, WARP_LANES);
    route_args r = { *a, 0, 0, 0 };

    if (a->n_experts == 0 || a->n_experts > ROUTE_MAX_EXPERTS || a->top_k == 0 ||
        a->top_k > ROUTE_MAX_TOP_K)
        return yard_fail(err, YARD_EINVAL,
                         "moe_route: want 1 to %d of 1 to %d experts, got %u of %u",
                         ROUTE_MAX_TOP_K, ROUTE_MAX_EXPERTS, a->top_k, a->n_experts);
    if (a->n_groups == 0 || a->n_experts % a->n_groups ||
        (a->top_groups < a->n_groups && a->n_groups > WARP_LANES))
        return yard_fail(err, YARD_EINVAL,
                         "moe_route: want at most %d groups that divide %u experts, got %u",
                         WARP_LANES, a->n_experts, a->n_groups);
    r.group_size = a->n_experts / a->n_groups;
    r.each = (uint32_t)yard_align_up(a->top_k, 4);
    r.each = r.each < WARP_LANES ? r.each : (uint32_t)WARP_LANES;
    while ((1u << r.log_parts) < WARP_LANES &&
           (n_threads / WARP_LANES * r.each) << (r.log_parts + 1) <= n_threads)
        r.log_parts++;
    return launch_rows(moe_route_kernel, grid_for(max_rows, 1, ROUTE_MAX_BLOCKS), n_threads, 0, r,
                       "moe_route", stream, err);
}
