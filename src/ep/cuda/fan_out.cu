/* Dispatch, receiving many tokens: one kernel lays out the rows from all id packets, another copies
 * each row once its flag has come. Rows in place stay where they are: the first kernel waits for
 * them, and there is no other. */
#include "ep/cuda/device.cuh"

enum {
    LAYOUT_WARPS = EP_CUDA_LAYOUT_THREADS / WARP,
    LAYOUT_BATCH = 4 /* packets that a thread asks for at once */
};

typedef struct layout_shared {
    uint32_t n_tokens[EP_CUDA_MAX_RANKS];
    uint32_t count[EP_CUDA_MAX_LOCAL + 1];
    uint32_t warp_sum[LAYOUT_WARPS];
    uint32_t n_smaller; /* rows of smaller experts than this block's */
    uint32_t failed;
} layout_shared;

/* ---- layout -------------------------------------------------------------------------------- */

/* Packet i of an instance, n_id_packets a token. */
template <typename ARGS> DEVICE const uint8_t *packet_at(const ARGS &a, uint32_t group, uint32_t i)
{
    return place(a, a.rank, ids_at(a, group, i));
}

DEVICE void await_counts(const ep_cuda_args &a, layout_shared *s, uint32_t epoch)
{
    for (uint32_t r = threadIdx.x; r < a.n_ranks; r += blockDim.x) {
        uint4 v;
        if (!await_packet(a, place(a, a.rank, count_at(a, 0, r)), epoch, &v, EP_FAULT_DISPATCH, r))
            s->failed = 1;
        else if (!has_our_limit(a, v, r))
            s->failed = 1;
        s->n_tokens[r] = v.w == epoch ? v.x : 0;
    }
}

DEVICE void add_counts(layout_shared *s, uint4 v)
{
#pragma unroll
    for (uint32_t j = 0; j < 8; j++) {
        const uint32_t e = byte_of(make_uint2(v.x, v.y), j);
        if (e != EP_CUDA_NO_EXPERT)
            atomicAdd(&s->count[e], 1u);
    }
}

/* Waits for all packets. Where rows are not rounded up, a block needs only the sum below its expert
 * (four), which registers hold. */
template <typename ARGS>
DEVICE void count_experts(const ARGS &a, layout_shared *s, bool each, uint32_t four, uint32_t epoch)
{
    uint32_t n_bits = 0; /* eight a choice */

    for (uint32_t g = 0; g < a.dp; g++) {
        const uint32_t n = s->n_tokens[g * a.tp] * a.n_id_packets;

#pragma unroll 1
        for (uint32_t first = threadIdx.x; first < n; first += LAYOUT_BATCH * blockDim.x) {
            uint4 v[LAYOUT_BATCH];

#pragma unroll
            for (uint32_t j = 0; j < LAYOUT_BATCH; j++)
                if (first + j * blockDim.x < n)
                    v[j] = load_packet(a, packet_at(a, g, first + j * blockDim.x));
#pragma unroll
            for (uint32_t j = 0; j < LAYOUT_BATCH; j++) {
                const uint32_t i = first + j * blockDim.x;

                if (i >= n)
                    break;
                if (v[j].w != epoch &&
                    !await_packet(a, packet_at(a, g, i), epoch, &v[j], EP_FAULT_DISPATCH,
                                  owner_of(a, g, i / a.n_id_packets)))
                    s->failed = 1;
                else if (each)
                    add_counts(s, v[j]);
                else
                    n_bits += (uint32_t)(__popc(__vcmpltu4(v[j].x, four)) +
                                         __popc(__vcmpltu4(v[j].y, four)));
            }
        }
    }
    n_bits = __reduce_add_sync(ALL_LANES, n_bits);
    if (!each && threadIdx.x % WARP == 0)
        atomicAdd(&s->n_smaller, n_bits / 8);
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
template <typename ARGS>
DEVICE uint32_t note_choices(const ARGS &a, uint32_t slot, uint32_t k, uint2 ids, uint32_t expert,
                             bool clears, uint32_t row)
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

/* Rows of one expert, in order of (instance, token, k): a thread takes tokens that follow each
 * other. Block e also clears the entries of choices that are elsewhere, for its share of the
 * tokens: nobody else writes those. All packets have come: the loads only read. */
template <typename ARGS> DEVICE void place_expert(const ARGS &a, layout_shared *s, uint32_t expert)
{
    const uint32_t four = expert * 0x01010101u;
    uint32_t next = 0;

    for (uint32_t e = threadIdx.x % WARP; a.row_align > 1 && e < expert; e += WARP)
        next += (s->count[e] + a.row_align - 1) / a.row_align * a.row_align;
    next = a.row_align > 1 ? __reduce_add_sync(ALL_LANES, next) : s->n_smaller;
    for (uint32_t g = 0; g < a.dp; g++) {
        const uint32_t n_tokens = s->n_tokens[g * a.tp];

#pragma unroll 1
        for (uint32_t t0 = 0; t0 < n_tokens; t0 += LAYOUT_BATCH * blockDim.x) {
            const uint32_t first = t0 + LAYOUT_BATCH * threadIdx.x;
            uint32_t n = 0, total, row;
            uint4 v[LAYOUT_BATCH] = {};

#pragma unroll
            for (uint32_t j = 0; j < LAYOUT_BATCH; j++)
                for (uint32_t i = 0; i < a.n_id_packets && first + j < n_tokens; i++) {
                    v[j] = load_relaxed(packet_at(a, g, (first + j) * a.n_id_packets + i));
                    n += (uint32_t)(__popc(__vcmpeq4(v[j].x, four)) +
                                    __popc(__vcmpeq4(v[j].y, four))) /
                         8;
                }
            row = next + scan(s, n, &total);
            next += total;
#pragma unroll
            for (uint32_t j = 0; j < LAYOUT_BATCH; j++) {
                const uint32_t t = first + j, slot = g * a.max_tokens + t;
                const bool clears = t - quotient(t, a.by_local) * a.n_local == expert;

                if (t >= n_tokens || (n == 0 && !clears))
                    continue;
                for (uint32_t i = 0; i < a.n_id_packets; i++) {
                    if (a.n_id_packets > 1) /* else it is still there */
                        v[j] = load_relaxed(packet_at(a, g, t * a.n_id_packets + i));
                    if (clears && i == 0)
                        a.ordinal[slot] = v[j].z;
                    row = note_choices(a, slot, 8 * i, make_uint2(v[j].x, v[j].y), expert, clears,
                                       row);
                }
            }
        }
    }
}

/* Flat rows: the tokens that have an expert here, in order. */
template <typename ARGS> DEVICE void place_tokens(const ARGS &a, layout_shared *s)
{
    uint32_t next = 0;

    for (uint32_t g = 0; g < a.dp; g++) {
        const uint32_t n_tokens = s->n_tokens[g * a.tp];

#pragma unroll 1
        for (uint32_t t0 = 0; t0 < n_tokens; t0 += LAYOUT_BATCH * blockDim.x) {
            const uint32_t first = t0 + LAYOUT_BATCH * threadIdx.x;
            uint32_t here = 0, total, row; /* here: a bit for each token */

#pragma unroll
            for (uint32_t j = 0; j < LAYOUT_BATCH; j++)
                for (uint32_t i = 0; i < a.n_id_packets && first + j < n_tokens; i++) {
                    const uint4 v = load_relaxed(packet_at(a, g, (first + j) * a.n_id_packets + i));
                    here |= (v.x & v.y) != ~0u ? 1u << j : 0;
                }
            row = next + scan(s, (uint32_t)__popc(here), &total);
            next += total;
#pragma unroll
            for (uint32_t j = 0; j < LAYOUT_BATCH; j++)
                if (here >> j & 1)
                    a.flat_row[g * a.max_tokens + first + j] = (int32_t)row++;
        }
    }
}

/* By all of the block: fan_out waits for this instead of the kernel's end. */
DEVICE void finish_layout(const ep_cuda_args &a)
{
    __syncthreads(); /* the block's writes come before the count */
    if (threadIdx.x == 0)
        count_block(&a.state->n_laid_out);
}

/* By one thread. All packets have come. */
template <typename ARGS> DEVICE bool comes_here(const ARGS &a, uint32_t g, uint32_t t)
{
    uint32_t all = ~0u;

    for (uint32_t i = 0; i < a.n_id_packets; i++) {
        const uint4 v = load_relaxed(packet_at(a, g, t * a.n_id_packets + i));
        all &= v.x & v.y;
    }
    return all != ~0u;
}

/* Rows in place: a thread a source that stores, or a row that is put. Kernels behind this one see
 * what came before the words. */
template <typename ARGS>
DEVICE void await_sources(const ARGS &a, const layout_shared *s, uint32_t epoch)
{
    for (uint32_t r = threadIdx.x; r < a.n_ranks; r += blockDim.x) {
        const uint32_t *sent = (const uint32_t *)place(a, a.rank, a.at_sent + r * 4ull);
        waiting w = BEGIN_WAITING;

        while (is_direct(a, r) && (int32_t)(load_acquire(sent) + 1 - epoch * EP_CUDA_DONE) < 0)
            if (!may_wait(a, &w, EP_FAULT_DISPATCH, r))
                break;
    }
    for (uint32_t g = 0; PUTS && g < a.dp; g++)
        for (uint32_t t = threadIdx.x; t < s->n_tokens[g * a.tp]; t += blockDim.x) {
            const uint32_t source = owner_of(a, g, t);

            if (!is_direct(a, source) && comes_here(a, g, t))
                await_signal(a, EP_SIGNAL_ROW, g * a.max_tokens + t, epoch, EP_FAULT_DISPATCH,
                             source);
        }
}

/* A block for each local expert, one for the counts and, in the flat layout, the tokens. No block
 * waits for another: each counts the experts for itself. */
template <typename ARGS> DEVICE void lay_out(const ARGS &a, layout_shared *s, uint32_t epoch)
{
    const bool places = blockIdx.x < a.n_local;

    for (uint32_t i = threadIdx.x; i <= EP_CUDA_MAX_LOCAL; i += blockDim.x)
        s->count[i] = 0;
    if (threadIdx.x == 0)
        s->failed = s->n_smaller = 0;
    __syncthreads(); /* cleared before anybody adds */
    if (!await_puts(a, EP_SIGNAL_HEADER, epoch, EP_FAULT_DISPATCH))
        return;
    await_counts(a, s, epoch);
    __syncthreads(); /* the token counts */
    if (!places)
        for (uint32_t g = threadIdx.x; g < a.dp; g += blockDim.x)
            a.arrived[g] = s->n_tokens[g * a.tp];
    count_experts(a, s, !places || a.row_align > 1, blockIdx.x * 0x01010101u, epoch);
    __syncthreads(); /* the rows of every expert */
    if (s->failed)
        return;
    if (places)
        place_expert(a, s, blockIdx.x);
    else if (a.flat)
        place_tokens(a, s);
    if (!a.in_place)
        finish_layout(a);
    for (uint32_t e = threadIdx.x; !places && e < a.n_local; e += blockDim.x)
        a.expert_count[e] = (int32_t)s->count[e];
    if (!places && a.in_place)
        await_sources(a, s, epoch);
}

template <typename ARGS>
static __global__ void __maxnreg__(EP_CUDA_LAYOUT_REGISTERS)
    layout_kernel(const __grid_constant__ ARGS a)
{
    static __shared__ layout_shared s;
    const uint32_t epoch = load_word(&a.state->dispatch_epoch) + 1, failed = load_word(a.error);

    if (!a.in_place)
        let_successor_start();
    dawdle(a, 4);
    if (!failed)
        lay_out(a, &s, epoch);
    if (a.early && a.in_place)
        wait_predecessor(); /* its end must mean that the send has ended, too */
}

cudaError_t yard_ep_cuda_launch_layout(const ep_cuda_args *a, const ep_cuda_launch *l)
{
    return launch(is_common(a) ? (const void *)layout_kernel<ep_cuda_common>
                               : (const void *)layout_kernel<ep_cuda_args>,
                  a, l);
}

/* ---- rows ---------------------------------------------------------------------------------- */

/* An arrival to be copied: this lane's entry of its rows, and of its row the thread's vector and in
 * each warp's first lane the scales of the warp's vectors. */
typedef struct copy {
    uint32_t slot;
    int32_t row; /* -1: nothing */
    uint4 payload, scales;
} copy;

template <typename ARGS> DEVICE copy look_up(const ARGS &a, uint32_t q, uint32_t lane)
{
    const uint32_t t = quotient(q, a.by_dp), before = q - t * a.dp + a.group + 1;
    const uint32_t g = before < a.dp ? before : before - a.dp;
    copy c = { g * a.max_tokens + t, -1, {}, {} };

    if (lane < a.top_k && q < a.dp * a.bound && t < load_shallow(a.arrived + g))
        c.row = load_shallow(a.row_map + c.slot * a.top_k + lane);
    return c;
}

DEVICE bool await_flag(const ep_cuda_args &a, uint32_t slot, uint32_t epoch)
{
    const uint32_t *flag = (const uint32_t *)place(a, a.rank, a.at_flags + slot * 4ull);
    const uint32_t source = owner_of(a, slot / a.max_tokens, slot % a.max_tokens);
    waiting w = BEGIN_WAITING;

    if (!is_direct(a, source))
        return await_signal(a, EP_SIGNAL_ROW, slot, epoch, EP_FAULT_DISPATCH, source);
    while (load_acquire(flag) != epoch)
        if (!may_wait(a, &w, EP_FAULT_DISPATCH, source))
            return false;
    return true;
}

/* Vectors `base` and on of the row, a warp's. */
template <typename ARGS> DEVICE void load_part(const ARGS &a, copy *c, uint32_t base, uint32_t lane)
{
    const uint8_t *row = place(a, a.rank, row_at(a, c->slot));

    if (base + lane < a.n_vectors)
        c->payload = load_plain(row + (base + lane) * VECTOR);
    if (base < a.n_vectors && lane == 0 && a.n_cols > 0)
        c->scales = load_plain(row + a.scale_at + base / WARP * VECTOR);
}

template <typename ARGS>
DEVICE void store_part(const ARGS &a, const copy &c, int32_t flat_row, uint32_t base, uint32_t lane)
{
    const uint32_t v = base + lane;

#pragma unroll 2
    for (uint32_t k = 0; k < (a.flat ? 1 : a.top_k); k++) {
        const int32_t to = a.flat ? flat_row : __shfl_sync(ALL_LANES, c.row, k);

        if (to < 0)
            continue;
        if (v < a.n_vectors)
            put_vector((uint8_t *)a.expert_x + (uint64_t)to * a.payload_bytes, v * VECTOR,
                       a.payload_bytes, c.payload, a.wide);
        if (base < a.n_vectors && lane == 0 && a.n_cols > 0)
            put_scales(a, (uint64_t)to, base / 8, c.scales);
    }
}

/* Payload and scales of one row to all its places; the first vectors have been loaded. */
template <typename ARGS> DEVICE void copy_row(const ARGS &a, copy c, uint32_t lane)
{
    const int32_t flat_row = a.flat ? load_shallow(a.flat_row + c.slot) : 0;
    uint32_t base = threadIdx.x - lane;

    store_part(a, c, flat_row, base, lane);
    for (base += blockDim.x; base < a.n_vectors; base += blockDim.x) {
        load_part(a, &c, base, lane);
        store_part(a, c, flat_row, base, lane);
    }
    if (a.flat && a.row_index && threadIdx.x < WARP && c.row >= 0)
        a.row_index[c.row] = flat_row;
}

/* Neither the layout nor the send need have ended when this kernel begins: that every block has
 * counted itself says that it has read and written all that matters. */
DEVICE bool await_layout(const ep_cuda_args &a, uint32_t epoch)
{
    waiting w = { 1, 128 }; /* all blocks poll this word: with pauses from the first */

    while (!all_counted(&a.state->n_laid_out, epoch))
        if (!may_wait(a, &w, EP_FAULT_LAYOUT, a.rank))
            return false;
    return true;
}

DEVICE void await_send(const ep_cuda_args &a, uint32_t epoch)
{
    waiting w = BEGIN_WAITING;

    while (!all_counted(&a.state->n_sent, epoch))
        if (!may_wait(a, &w, EP_FAULT_DISPATCH, a.rank))
            return;
}

/* The next row is loaded before the one at hand is stored. */
template <typename ARGS>
static __global__ void __launch_bounds__(EP_CUDA_THREADS, 2)
    fan_out_kernel(const __grid_constant__ ARGS a)
{
    const uint32_t lane = threadIdx.x % WARP, n = a.dp * a.bound;
    const uint32_t epoch = load_word(&a.state->dispatch_epoch) + 1;
    copy now = { 0, -1, {}, {} }, next;
    static __shared__ bool laid_out;

    dawdle(a, 5);
    if (threadIdx.x == 0)
        laid_out = load_word(a.error) == 0 && await_layout(a, epoch);
    __syncthreads(); /* the acquire of one thread stands for the block */
    if (!laid_out)
        return;
    next = look_up(a, blockIdx.x, lane);
#pragma unroll 1
    for (uint32_t q = blockIdx.x; q < n + gridDim.x; q += gridDim.x) {
        const copy after = look_up(a, q + gridDim.x, lane);
        const bool comes = __any_sync(ALL_LANES, next.row >= 0);

        if (comes && threadIdx.x == 0)
            await_flag(a, next.slot, epoch);
        __syncthreads(); /* the acquire of one thread stands for the block */
        if (comes)
            load_part(a, &next, threadIdx.x - lane, lane);
        if (__any_sync(ALL_LANES, now.row >= 0))
            copy_row(a, now, lane);
        now = next;
        next = after;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0)
        await_send(a, epoch);
    wait_predecessor();
}

cudaError_t yard_ep_cuda_launch_fan_out(const ep_cuda_args *a, const ep_cuda_launch *l)
{
    return launch(is_common(a) ? (const void *)fan_out_kernel<ep_cuda_common>
                               : (const void *)fan_out_kernel<ep_cuda_args>,
                  a, l);
}
