/* The router: one warp a token, a lane holds PER experts next to each other in registers. Scores,
 * ties and sums are the definition's to the bit, so all replicas of a token choose the same. */
#include "ops/cuda/launch.h"

#include <math_constants.h>

#include "ops/cuda/rows.cuh"

enum {
    ROUTE_THREADS = 128,
    ROUTE_WARPS = ROUTE_THREADS / WARP_LANES,
    ROUTE_MAX_BLOCKS = 132 * 8,
    ROUTE_MAX_TOP_K = 64,
    ROUTE_MAX_EXPERTS = 16 * WARP_LANES,
    /* of a warp's scores in shared memory: one float of padding after 32 keeps the lanes that walk
     * over groups on different banks */
    ROUTE_PITCH = ROUTE_MAX_EXPERTS + ROUTE_MAX_EXPERTS / WARP_LANES
};

/* What one warp keeps: scores or choices of its token, then the chosen scores. */
typedef struct route_shared {
    float value[ROUTE_PITCH];
    float group[WARP_LANES];
    float chosen[ROUTE_MAX_TOP_K];
} route_shared;

static __device__ __forceinline__ uint32_t padded(uint32_t e)
{
    return e + e / WARP_LANES;
}

/* Larger numbers have larger keys, equal ones equal keys; not a number: 0, below all numbers. */
static __device__ __forceinline__ uint32_t order_key(float x)
{
    const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));

    return x != x ? 0u : bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* Softmax over all experts, with the definition's sum: one after the other. Every lane goes through
 * all of them, at the same address. */
template <int PER>
static __device__ __forceinline__ void softmax(const yard_moe_route_args &a, route_shared *m,
                                               uint32_t lane, float (&score)[PER])
{
    float largest, sum = 0.0f;

#pragma unroll
    for (int i = 0; i < PER; i++)
        m->value[padded(lane * PER + i)] = score[i];
    __syncwarp();
    largest = m->value[0];
    for (uint32_t e = 1; e < a.n_experts; e++)
        if (m->value[padded(e)] > largest)
            largest = m->value[padded(e)];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < PER; i++) {
        score[i] = exp_defined(__fsub_rn(score[i], largest));
        m->value[padded(lane * PER + i)] = score[i];
    }
    __syncwarp();
    for (uint32_t e = 0; e < a.n_experts; e++)
        sum = __fadd_rn(sum, m->value[padded(e)]);
#pragma unroll
    for (int i = 0; i < PER; i++)
        score[i] = __fdiv_rn(score[i], sum);
    __syncwarp();
}

/* The lane's experts of a row; nothing beyond the last one. */
template <int PER>
static __device__ __forceinline__ void load_lane(const float *row, uint32_t n_experts,
                                                 uint32_t lane, float (&x)[PER])
{
    if (PER % 4 == 0 && n_experts % 4 == 0 && (uintptr_t)row % sizeof(float4) == 0) {
#pragma unroll
        for (int i = 0; i + 4 <= PER; i += 4) {
            const uint32_t e = lane * PER + i;
            const float4 v =
                e < n_experts ? *(const float4 *)(row + e) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            x[i] = v.x;
            x[i + 1] = v.y;
            x[i + 2] = v.z;
            x[i + 3] = v.w;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < PER; i++)
        x[i] = lane * PER + i < n_experts ? row[lane * PER + i] : 0.0f;
}

/* Logits become scores. */
template <int PER>
static __device__ __forceinline__ void make_scores(const yard_moe_route_args &a, route_shared *m,
                                                   uint32_t lane, float (&score)[PER])
{
    if (a.score == YARD_SCORE_SOFTMAX) {
        softmax<PER>(a, m, lane, score);
        return;
    }
#pragma unroll
    for (int i = 0; i < PER; i++)
        score[i] = __frcp_rn(__fadd_rn(1.0f, exp_defined(-score[i])));
}

/* What group g is worth: the definition's loops, one lane a group. */
static __device__ __forceinline__ float
group_value(const yard_moe_route_args &a, const route_shared *m, uint32_t g, uint32_t size)
{
    float first = m->value[padded(g * size)], second;
    const bool largest_only = a.group_value == YARD_GROUP_LARGEST;

    if (size == 1)
        return first;
    second = m->value[padded(g * size + 1)];
    if (second > first) {
        const float swap = first;
        first = second;
        second = swap;
    }
    for (uint32_t i = 2; i < size; i++) {
        const float x = m->value[padded(g * size + i)];
        if (x > first) {
            second = first;
            first = x;
        } else if (x > second) {
            second = x;
        }
    }
    return largest_only ? first : __fadd_rn(first, second);
}

/* Groups that are whole lanes, a power of two of them, when all choices are numbers: then the order
 * in which a group's largest are found does not matter. True when the lane's group stays. */
template <int PER>
static __device__ __forceinline__ bool group_stays(const yard_moe_route_args &a, uint32_t lane,
                                                   uint32_t group_lanes, const float (&choice)[PER])
{
    float first = -CUDART_INF_F, second = -CUDART_INF_F, value;
    uint32_t before = 0;

#pragma unroll
    for (int i = 0; i < PER; i++) {
        second = fmaxf(second, fminf(first, choice[i]));
        first = fmaxf(first, choice[i]);
    }
    for (uint32_t d = 1; d < group_lanes; d *= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, first, d);
        second = fmaxf(fmaxf(second, __shfl_xor_sync(0xffffffffu, second, d)), fminf(first, other));
        first = fmaxf(first, other);
    }
    value = a.group_value == YARD_GROUP_LARGEST || group_lanes * PER == 1
                ? first
                : __fadd_rn(first, second);
    for (uint32_t g = 0; g < a.n_groups; g++) {
        const float other = __shfl_sync(0xffffffffu, value, g * group_lanes);
        before += other > value || (other == value && g < lane / group_lanes);
    }
    return before < a.top_groups;
}

/* Any groups, any choices, as the definition walks over them: one lane a group. A bit for each
 * group that stays. */
template <int PER>
static __device__ __forceinline__ uint32_t best_groups(const yard_moe_route_args &a,
                                                       route_shared *m, uint32_t lane,
                                                       const float (&choice)[PER])
{
    const uint32_t size = a.n_experts / a.n_groups;
    uint32_t before = 0;

#pragma unroll
    for (int i = 0; i < PER; i++)
        m->value[padded(lane * PER + i)] = choice[i];
    __syncwarp();
    const float value = lane < a.n_groups ? group_value(a, m, lane, size) : 0.0f;
    m->group[lane] = value;
    __syncwarp();
    for (uint32_t g = 0; g < a.n_groups; g++)
        before += m->group[g] > value || (m->group[g] == value && g < lane);
    __syncwarp();
    return __ballot_sync(0xffffffffu, lane < a.n_groups && before < a.top_groups);
}

/* choice[] of experts outside the best groups becomes minus infinity. */
template <int PER>
static __device__ __forceinline__ void mask_groups(const yard_moe_route_args &a, route_shared *m,
                                                   uint32_t lane, bool has_others,
                                                   float (&choice)[PER])
{
    const uint32_t size = a.n_experts / a.n_groups, group_lanes = size / PER;

    if (!has_others && size % PER == 0 && (group_lanes & (group_lanes - 1)) == 0) {
        const bool stays = group_stays<PER>(a, lane, group_lanes, choice);
#pragma unroll
        for (int i = 0; i < PER; i++)
            choice[i] = stays ? choice[i] : -CUDART_INF_F;
        return;
    }
    const uint32_t kept = best_groups<PER>(a, m, lane, choice);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const uint32_t g = (lane * PER + i) / size;
        if (g >= a.n_groups || !(kept >> g & 1))
            choice[i] = -CUDART_INF_F;
    }
}

/* A bit for each of the lane's experts that is among the top_k largest numbers. */
template <int PER>
static __device__ __forceinline__ uint32_t largest_choices(const yard_moe_route_args &a,
                                                           uint32_t lane, uint32_t (&key)[PER])
{
    uint32_t taken = 0, mine = 0;

#pragma unroll
    for (int i = 0; i < PER; i++)
        mine = max(mine, key[i]);
    for (uint32_t k = 0; k < a.top_k; k++) {
        const uint32_t best = __reduce_max_sync(0xffffffffu, mine);
        uint32_t at = 0;

        if (best == 0)
            break;
        /* among equals the lowest expert: the lowest lane has it */
        const bool wins = __ffs((int)__ballot_sync(0xffffffffu, mine == best)) - 1 == (int)lane;
#pragma unroll
        for (int i = PER - 1; i >= 0; i--)
            at = key[i] == best ? i : at;
        taken |= (uint32_t)wins << at;
        mine = 0;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            key[i] = wins && at == i ? 0 : key[i];
            mine = max(mine, key[i]);
        }
    }
    return taken;
}

/* Writes the experts in taken, ascending, top_k at most, with their weights. */
template <int PER>
static __device__ __forceinline__ void write_choices(const yard_moe_route_args &a, uint32_t row,
                                                     route_shared *m, uint32_t lane, uint32_t taken,
                                                     const float (&score)[PER])
{
    int32_t *expert = a.expert + (size_t)row * a.top_k;
    float *weight = a.weight + (size_t)row * a.top_k;
    uint32_t at = __popc(taken), n;
    float sum = 0.0f;

    for (int distance = 1; distance < WARP_LANES; distance *= 2) {
        const uint32_t below = __shfl_up_sync(0xffffffffu, at, distance);
        at += (int)lane >= distance ? below : 0;
    }
    n = min(__shfl_sync(0xffffffffu, at, WARP_LANES - 1), a.top_k);
    at -= __popc(taken);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (!(taken >> i & 1) || at >= a.top_k)
            continue;
        expert[at] = (int32_t)(lane * PER + i);
        m->chosen[at++] = score[i];
    }
    __syncwarp();
#pragma unroll 8
    for (uint32_t k = 0; k < n; k++)
        sum = __fadd_rn(sum, m->chosen[k]);
    for (uint32_t k = lane; k < a.top_k; k += WARP_LANES) {
        const float x = k < n ? m->chosen[k] : 0.0f;
        weight[k] = __fmul_rn(a.normalise ? __fdiv_rn(x, __fadd_rn(sum, 1e-20f)) : x, a.scale);
        if (k >= n) { /* only logits that are not numbers leave a choice open */
            expert[k] = -1;
            weight[k] = 0.0f;
        }
    }
    __syncwarp();
}

template <int PER>
static __global__ void __launch_bounds__(ROUTE_THREADS)
    moe_route_kernel(const __grid_constant__ yard_moe_route_args a)
{
    __shared__ route_shared shared[ROUTE_WARPS];
    const uint32_t lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    route_shared *m = &shared[warp];
    float bias[PER] = {};

    allow_next_kernel();
    if (a.bias) /* a weight: no kernel before this one writes it */
        load_lane<PER>(a.bias, a.n_experts, lane, bias);
    wait_previous_kernel();
    for (uint32_t row = blockIdx.x * ROUTE_WARPS + warp; row < (uint32_t)*a.n_rows;
         row += gridDim.x * ROUTE_WARPS) {
        float score[PER], choice[PER];
        uint32_t key[PER], not_numbers = 0;

        load_lane<PER>(a.logits + (size_t)row * a.n_experts, a.n_experts, lane, score);
        make_scores<PER>(a, m, lane, score);
#pragma unroll
        for (int i = 0; i < PER; i++) {
            choice[i] = a.bias ? __fadd_rn(score[i], bias[i]) : score[i];
            not_numbers |= (uint32_t)(choice[i] != choice[i]) << i;
        }
        if (a.top_groups < a.n_groups)
            mask_groups<PER>(a, m, lane, __any_sync(0xffffffffu, not_numbers != 0), choice);
        not_numbers = 0;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const bool exists = lane * PER + i < a.n_experts;
            key[i] = exists ? order_key(choice[i]) : 0;
            not_numbers |= (uint32_t)(exists && choice[i] != choice[i]) << i;
        }
        write_choices<PER>(a, row, m, lane, not_numbers | largest_choices<PER>(a, lane, key),
                           score);
    }
}

yard_status yard_cuda_moe_route_launch(const yard_moe_route_args *a, uint32_t max_rows,
                                       void *stream, yard_error *err)
{
    const uint32_t n_blocks = grid_for(max_rows, ROUTE_WARPS, ROUTE_MAX_BLOCKS);
    const uint32_t per = yard_ceil_div(a->n_experts, WARP_LANES);

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
    return launch_rows(per <= 1   ? moe_route_kernel<1>
                       : per <= 2 ? moe_route_kernel<2>
                       : per <= 4 ? moe_route_kernel<4>
                       : per <= 8 ? moe_route_kernel<8>
                                  : moe_route_kernel<16>,
                       n_blocks, ROUTE_THREADS, 0, *a, "moe_route", stream, err);
}
