/* Dispatch, receiving many tokens: one kernel lays out the rows from all id packets, another copies
 * each row once its flag has come. */
#include "ep/cuda/device.cuh"

enum { LAYOUT_WARPS = EP_CUDA_LAYOUT_THREADS / WARP };

typedef struct layout_shared {
    uint32_t n_tokens[EP_CUDA_MAX_RANKS];
    uint32_t count[EP_CUDA_MAX_LOCAL + 1];
    uint32_t warp_sum[LAYOUT_WARPS];
    uint32_t base; /* of the tokens that come next */
    uint32_t failed;
} layout_shared;

/* ---- layout -------------------------------------------------------------------------------- */

/* Ids 8 * i .. 8 * i + 7 of a token of an instance; none when it has no such token. Only the first
 * pass waits. */
DEVICE uint4 ids_of(const ep_cuda_args &a, layout_shared *s, uint32_t group, uint32_t t, uint32_t i,
                    uint32_t epoch)
{
    const uint64_t at = (uint64_t)(group * a.max_tokens + t) * a.n_id_packets + i;
    uint4 v;

    if (!await_packet(a, place(a, a.rank, a.at_ids + at * VECTOR), epoch, &v, EP_FAULT_DISPATCH,
                      owner_of(a, group, t))) {
        s->failed = 1;
        return make_uint4(~0u, ~0u, 0, 0);
    }
    return v;
}

DEVICE void await_counts(const ep_cuda_args &a, layout_shared *s, uint32_t epoch)
{
    for (uint32_t r = threadIdx.x; r < a.n_ranks; r += blockDim.x) {
        uint4 v;
        if (!await_packet(a, place(a, a.rank, count_at(a, 0, r)), epoch, &v, EP_FAULT_DISPATCH, r))
            s->failed = 1;
        s->n_tokens[r] = v.w == epoch ? v.x : 0;
    }
}

DEVICE void count_experts(const ep_cuda_args &a, layout_shared *s, uint32_t epoch)
{
    for (uint32_t g = 0; g < a.dp; g++)
        for (uint32_t t = threadIdx.x; t < s->n_tokens[g * a.tp]; t += blockDim.x)
            for (uint32_t i = 0; i < a.n_id_packets; i++) {
                const uint4 v = ids_of(a, s, g, t, i, epoch);
#pragma unroll
                for (uint32_t j = 0; j < 8; j++) {
                    const uint32_t e = byte_of(make_uint2(v.x, v.y), j);
                    if (e != EP_CUDA_NO_EXPERT)
                        atomicAdd(&s->count[e], 1u);
                }
            }
}

/* Sum of value over the threads before this one; *total over all of the block. */
DEVICE uint32_t scan(layout_shared *s, uint32_t value, uint32_t *total)
{
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint32_t sum = value, before;

#pragma unroll
    for (uint32_t d = 1; d < WARP; d *= 2) {
        const uint32_t other = __shfl_up_sync(ALL_LANES, sum, d);
        sum += lane >= d ? other : 0;
    }
    if (lane == WARP - 1)
        s->warp_sum[warp] = sum;
    __syncthreads(); /* the sums of all warps */
    before = __reduce_add_sync(ALL_LANES, lane < warp ? s->warp_sum[lane] : 0);
    *total = __reduce_add_sync(ALL_LANES, lane < LAYOUT_WARPS ? s->warp_sum[lane] : 0);
    __syncthreads(); /* read before the next scan writes them */
    return before + sum - value;
}

/* The token's choices from k on: those of the expert get rows from row on; returns the next one. */
DEVICE uint32_t note_choices(const ep_cuda_args &a, uint32_t slot, uint32_t k, uint2 ids,
                             uint32_t expert, bool clears, uint32_t row)
{
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) {
        const uint32_t e = byte_of(ids, i);

        if (k + i >= a.top_k)
            continue;
        if (e == expert) {
            if (a.row_index && !a.flat)
                a.row_index[row] = (int32_t)slot;
            a.row_map[slot * a.top_k + k + i] = (int32_t)row++;
        } else if (clears && e == EP_CUDA_NO_EXPERT) {
            a.row_map[slot * a.top_k + k + i] = -1;
        }
    }
    return row;
}

/* Rows of one expert, in order of (instance, token, k). Block e also clears the entries of choices
 * that are elsewhere, for its share of the tokens: nobody else writes those. */
DEVICE void place_expert(const ep_cuda_args &a, layout_shared *s, uint32_t expert, uint32_t epoch)
{
    uint32_t next = 0;

    for (uint32_t e = threadIdx.x % WARP; e < expert; e += WARP)
        next += (s->count[e] + a.row_align - 1) / a.row_align * a.row_align;
    next = __reduce_add_sync(ALL_LANES, next);
    for (uint32_t g = 0; g < a.dp; g++)
        for (uint32_t t0 = 0; t0 < s->n_tokens[g * a.tp]; t0 += blockDim.x) {
            const uint32_t t = t0 + threadIdx.x, slot = g * a.max_tokens + t;
            const bool exists = t < s->n_tokens[g * a.tp],
                       clears = exists && t % a.n_local == expert;
            uint32_t n = 0, total, row;
            uint4 v = {};

            for (uint32_t i = 0; exists && i < a.n_id_packets; i++) {
                v = ids_of(a, s, g, t, i, epoch);
                n += (uint32_t)(__popc(__vcmpeq4(v.x, expert * 0x01010101u)) +
                                __popc(__vcmpeq4(v.y, expert * 0x01010101u))) /
                     8;
                if (clears && i == 0)
                    a.ordinal[slot] = v.z;
            }
            row = next + scan(s, n, &total);
            next += total;
            for (uint32_t i = 0; (n > 0 || clears) && i < a.n_id_packets; i++) {
                if (a.n_id_packets > 1) /* else it is still there */
                    v = ids_of(a, s, g, t, i, epoch);
                row = note_choices(a, slot, 8 * i, make_uint2(v.x, v.y), expert, clears, row);
            }
        }
}

/* Flat rows: the tokens that have an expert here, in order. */
DEVICE void place_tokens(const ep_cuda_args &a, layout_shared *s, uint32_t epoch)
{
    uint32_t next = 0;

    for (uint32_t g = 0; g < a.dp; g++)
        for (uint32_t t0 = 0; t0 < s->n_tokens[g * a.tp]; t0 += blockDim.x) {
            const uint32_t t = t0 + threadIdx.x;
            uint32_t here = 0, total, row;

            for (uint32_t i = 0; t < s->n_tokens[g * a.tp] && i < a.n_id_packets; i++) {
                const uint4 v = ids_of(a, s, g, t, i, epoch);
                here |= (v.x & v.y) != ~0u;
            }
            row = next + scan(s, here, &total);
            if (here)
                a.flat_row[g * a.max_tokens + t] = (int32_t)row;
            next += total;
        }
}

/* A block for each local expert, one for the counts and, in the flat layout, the tokens. No block
 * waits for another: each counts all experts for itself. */
static __global__ void __launch_bounds__(EP_CUDA_LAYOUT_THREADS, 2)
    layout_kernel(const __grid_constant__ ep_cuda_args a)
{
    static __shared__ layout_shared s;
    const uint32_t epoch = load_word(&a.state->dispatch_epoch) + 1, failed = load_word(a.error);

    dawdle(a, 4);
    if (failed)
        return;
    for (uint32_t i = threadIdx.x; i <= EP_CUDA_MAX_LOCAL; i += blockDim.x)
        s.count[i] = 0;
    if (threadIdx.x == 0)
        s.failed = 0;
    __syncthreads(); /* cleared before anybody adds */
    await_counts(a, &s, epoch);
    __syncthreads(); /* the token counts */
    count_experts(a, &s, epoch);
    __syncthreads(); /* the rows of every expert */
    if (s.failed)
        return;
    if (blockIdx.x < a.n_local) {
        place_expert(a, &s, blockIdx.x, epoch);
        return;
    }
    if (a.flat)
        place_tokens(a, &s, epoch);
    for (uint32_t e = threadIdx.x; e < a.n_local; e += blockDim.x)
        a.expert_count[e] = (int32_t)s.count[e];
    for (uint32_t g = threadIdx.x; g < a.dp; g += blockDim.x)
        a.arrived[g] = s.n_tokens[g * a.tp];
}

cudaError_t yard_ep_cuda_launch_layout(const ep_cuda_args *a, const ep_cuda_launch *l)
{
    return launch((const void *)layout_kernel, a, l);
}

/* ---- rows ---------------------------------------------------------------------------------- */

/* This lane's entry of a token's rows; the instance's next token is looked up while one is copied.
 */
DEVICE int32_t rows_of(const ep_cuda_args &a, uint32_t q, uint32_t lane, uint32_t *slot)
{
    const uint32_t g = (q % a.dp + a.group + 1) % a.dp, t = q / a.dp;

    *slot = g * a.max_tokens + t;
    if (t >= load_shallow(a.arrived + g) || lane >= a.top_k)
        return -1;
    return load_shallow(a.row_map + *slot * a.top_k + lane);
}

DEVICE bool await_flag(const ep_cuda_args &a, uint32_t slot, uint32_t epoch)
{
    const uint32_t *flag = (const uint32_t *)place(a, a.rank, a.at_flags + slot * 4ull);
    const uint32_t source = owner_of(a, slot / a.max_tokens, slot % a.max_tokens);
    waiting w = { 0, 0 };

    while (load_acquire(flag) != epoch)
        if (!may_wait(a, &w, EP_FAULT_DISPATCH, source))
            return false;
    return true;
}

/* Payload and scales of one row to all its places. */
DEVICE void copy_row(const ep_cuda_args &a, uint32_t slot, int32_t my_row, uint32_t lane)
{
    const uint8_t *row = place(a, a.rank, row_at(a, slot));
    const int32_t flat_row = a.flat ? load_shallow(a.flat_row + slot) : 0;

    for (uint32_t base = threadIdx.x - lane; base < a.n_vectors; base += blockDim.x) {
        const uint32_t v = base + lane;
        uint4 payload = {}, scales = {};

        if (v < a.n_vectors)
            payload = load_plain(row + v * VECTOR);
        if (lane == 0 && a.n_cols > 0)
            scales = load_plain(row + a.scale_at + base / WARP * VECTOR);
        for (uint32_t k = 0; k < (a.flat ? 1 : a.top_k); k++) {
            const int32_t to = a.flat ? flat_row : __shfl_sync(ALL_LANES, my_row, k);

            if (to < 0)
                continue;
            if (v < a.n_vectors)
                put_vector((uint8_t *)a.expert_x + (uint64_t)to * a.payload_bytes, v * VECTOR,
                           a.payload_bytes, payload, a.wide);
            if (lane == 0 && a.n_cols > 0)
                put_scales(a, (uint64_t)to, base / 8, scales);
        }
    }
    if (a.flat && a.row_index && threadIdx.x < WARP && my_row >= 0)
        a.row_index[my_row] = flat_row;
}

/* The layout kernel ended before this one began, the send perhaps not: that every block of it has
 * counted itself says that it has read all that it reads. */
DEVICE void await_send(const ep_cuda_args &a, uint32_t epoch)
{
    waiting w = { 0, 0 };

    while ((int32_t)(load_acquire(&a.state->n_sent) - epoch * EP_CUDA_SENT) < 0)
        if (!may_wait(a, &w, EP_FAULT_DISPATCH, a.rank))
            return;
}

static __global__ void __launch_bounds__(EP_CUDA_THREADS, 3)
    fan_out_kernel(const __grid_constant__ ep_cuda_args a)
{
    const uint32_t lane = threadIdx.x % WARP, n = a.dp * a.bound;
    uint32_t q = blockIdx.x, slot = 0, next_slot = 0, epoch;
    int32_t my_row, next_row = -1;

    wait_predecessor();
    dawdle(a, 5);
    epoch = load_word(&a.state->dispatch_epoch) + 1;
    if (load_word(a.error))
        return;
    if (q < n)
        next_row = rows_of(a, q, lane, &next_slot);
    for (; q < n; q += gridDim.x) {
        slot = next_slot;
        my_row = next_row;
        if (q + gridDim.x < n)
            next_row = rows_of(a, q + gridDim.x, lane, &next_slot);
        if (!__any_sync(ALL_LANES, my_row >= 0))
            continue;
        if (threadIdx.x == 0)
            await_flag(a, slot, epoch);
        __syncthreads(); /* the acquire of one thread stands for the block */
        copy_row(a, slot, my_row, lane);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        await_send(a, epoch);
}

cudaError_t yard_ep_cuda_launch_fan_out(const ep_cuda_args *a, const ep_cuda_launch *l)
{
    return launch((const void *)fan_out_kernel, a, l);
}
