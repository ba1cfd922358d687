/* Dispatch, receiving self-proving rows: a block takes a token, finds out where its row goes from
 * the id packets of all tokens, and copies it there.
 *
 * Every block reads all id packets and computes the rows of its own token. That is redundant and
 * faster than one block that computes them for the others, up to a thousand tokens. */
#include "ep/cuda/device.cuh"

static const uint32_t UNKNOWN = 0xffffffffu;

typedef struct recv_shared {
    int32_t row[EP_CUDA_MAX_TOP_K]; /* of this block's token */
    uint32_t n_tokens[EP_CUDA_MAX_RANKS];
    uint32_t count[EP_CUDA_MAX_LOCAL + 1];
    uint32_t n_before; /* tokens with a row here, before this block's; flat */
    uint32_t ordinal;
    uint32_t failed;
} recv_shared;

/* q numbers the tokens in order of (instance, token): q = instance * bound + token. */
typedef struct origin {
    uint32_t group, t, slot;
} origin;

DEVICE origin origin_of(const ep_cuda_args &a, uint32_t q)
{
    const uint32_t g = quotient(q, a.by_bound), t = q - g * a.bound;

    return { g, t, g * a.max_tokens + t };
}

/* ---- all id packets ------------------------------------------------------------------------ */

DEVICE void add_counts(recv_shared *s, uint2 ids)
{
#pragma unroll
    for (uint32_t i = 0; i < 8; i++)
        if (byte_of(ids, i) != EP_CUDA_NO_EXPERT)
            atomicAdd(&s->count[byte_of(ids, i)], 1u);
}

/* The packet, or none once the instance's token count says that there is no such token. One thread
 * of a block polls each packet: more pollers of one line slow its writer down. */
template <typename ARGS>
DEVICE uint4 await_ids(const ARGS &a, recv_shared *s, uint4 v, const uint8_t *p, origin o,
                       uint32_t epoch)
{
    const uint32_t source = owner_of(a, o.group, o.t);
    waiting w = BEGIN_WAITING;

    while (v.w != epoch) {
        const uint32_t n = atomicAdd(&s->n_tokens[source], 0u);

        if (n != UNKNOWN && o.t >= n)
            return make_uint4(~0u, ~0u, 0, epoch);
        if (!may_wait(a, &w, EP_FAULT_DISPATCH, source)) {
            s->failed = 1;
            return make_uint4(~0u, ~0u, 0, epoch);
        }
        v = load_packet(a, p);
    }
    return v;
}

template <typename ARGS> DEVICE const uint8_t *packet_at(const ARGS &a, uint32_t i)
{
    const uint32_t q = i / a.n_id_packets;
    const origin o = origin_of(a, q);

    return place(a, a.rank, ids_at(a, o.group, o.t * a.n_id_packets + (i - q * a.n_id_packets)));
}

/* The first packets that a thread looks at, asked for before anything is known. The block's last
 * warp looks after the token counts, a lane every 32nd rank. */
typedef struct first_packets {
    uint4 count, ids;
} first_packets;

DEVICE uint32_t counted_rank(void)
{
    return threadIdx.x + WARP - blockDim.x; /* no rank in other warps */
}

template <typename ARGS> DEVICE first_packets ask_for_packets(const ARGS &a)
{
    const uint32_t rank = counted_rank();
    first_packets p = {};

    if (rank < a.n_ranks) /* of these the first */
        p.count = load_packet(a, place(a, a.rank, count_at(a, 0, rank)));
    if (threadIdx.x < a.dp * a.bound * a.n_id_packets)
        p.ids = load_packet(a, packet_at(a, threadIdx.x));
    return p;
}

DEVICE void await_counts(const ep_cuda_args &a, recv_shared *s, uint4 v, uint32_t epoch)
{
    for (uint32_t rank = counted_rank(); rank < a.n_ranks; rank += WARP) {
        if (rank >= WARP)
            v = load_packet(a, place(a, a.rank, count_at(a, 0, rank)));
        if (v.w != epoch && !await_packet(a, place(a, a.rank, count_at(a, 0, rank)), epoch, &v,
                                          EP_FAULT_DISPATCH, rank))
            s->failed = 1;
        else if (!has_our_limit(a, v, rank))
            s->failed = 1;
        atomicExch(&s->n_tokens[rank], v.w == epoch ? v.x : 0u); /* polled in await_ids() */
    }
    __syncwarp(); /* no lane polls for ids that another lane of its warp still counts here */
}

template <typename ARGS>
DEVICE void collect(const ARGS &a, recv_shared *s, uint2 *ids, first_packets p, uint32_t own_q,
                    bool counting, uint32_t epoch)
{
    const uint32_t n_packets = a.dp * a.bound * a.n_id_packets;

    await_counts(a, s, p.count, epoch);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < n_packets; i += blockDim.x) {
        const uint8_t *const at = packet_at(a, i);

        if (i != threadIdx.x)
            p.ids = load_packet(a, at);
        p.ids = await_ids(a, s, p.ids, at, origin_of(a, i / a.n_id_packets), epoch);
        ids[i] = make_uint2(p.ids.x, p.ids.y);
        if (counting)
            add_counts(s, ids[i]);
        if (i == own_q * a.n_id_packets)
            s->ordinal = p.ids.z;
    }
}

/* ---- the rows of one token ----------------------------------------------------------------- */

DEVICE uint32_t equal_bytes(uint2 ids, uint32_t four)
{
    return (uint32_t)(__popc(__vcmpeq4(ids.x, four)) + __popc(__vcmpeq4(ids.y, four)));
}

DEVICE uint32_t smaller_bytes(uint2 ids, uint32_t four)
{
    return (uint32_t)(__popc(__vcmpltu4(ids.x, four)) + __popc(__vcmpltu4(ids.y, four)));
}

/* First row of a local expert: the rows of smaller experts, each rounded up. */
DEVICE uint32_t first_row(const ep_cuda_args &a, const recv_shared *s, uint32_t expert,
                          uint32_t lane)
{
    uint32_t n = 0;

#pragma unroll 1
    for (uint32_t e = lane; e < expert; e += WARP)
        n += (s->count[e] + a.row_align - 1) / a.row_align * a.row_align;
    return __reduce_add_sync(ALL_LANES, n);
}

/* By one warp: the row of choice k of token q. */
template <typename ARGS>
DEVICE int32_t find_row(const ARGS &a, const recv_shared *s, const uint2 *ids, uint32_t q,
                        uint32_t k, uint32_t lane)
{
    const uint32_t n_packets = a.dp * a.bound * a.n_id_packets, own = q * a.n_id_packets;
    const uint32_t expert = byte_of(ids[own + k / 8], k % 8), four = expert * 0x01010101u;
    uint32_t n = 0; /* in bits: eight a byte */
    bool again;

    if (expert == EP_CUDA_NO_EXPERT)
        return -1;
    if (a.row_align == 1)
#pragma unroll 4
        for (uint32_t i = lane; i < n_packets; i += WARP)
            n += smaller_bytes(ids[i], four) + (i < own ? equal_bytes(ids[i], four) : 0);
    else
#pragma unroll 1
        for (uint32_t i = lane; i < own; i += WARP)
            n += equal_bytes(ids[i], four);
    n = __reduce_add_sync(ALL_LANES, n) / 8;
    again = lane < k && byte_of(ids[own + lane / 8], lane % 8) == expert;
    n += (uint32_t)__popc(__ballot_sync(ALL_LANES, again));
    return (int32_t)(n + (a.row_align == 1 ? 0 : first_row(a, s, expert, lane)));
}

template <typename ARGS> DEVICE bool has_expert(const ARGS &a, const uint2 *ids, uint32_t q)
{
    bool any = false;

    for (uint32_t i = 0; i < a.n_id_packets; i++)
        any |= (ids[q * a.n_id_packets + i].x & ids[q * a.n_id_packets + i].y) != ~0u;
    return any;
}

template <typename ARGS>
DEVICE void find_rows(const ARGS &a, recv_shared *s, const uint2 *ids, uint32_t q)
{
    const uint32_t lane = threadIdx.x % WARP, n_warps = blockDim.x / WARP;

#pragma unroll 1
    for (uint32_t k = threadIdx.x / WARP; k < a.top_k; k += n_warps) {
        const int32_t row = find_row(a, s, ids, q, k, lane);
        if (lane == 0)
            s->row[k] = row;
    }
    if (a.flat && threadIdx.x / WARP == n_warps - 1) {
        uint32_t n = 0;
#pragma unroll 1
        for (uint32_t i = lane; i < q; i += WARP)
            n += has_expert(a, ids, i);
        n = __reduce_add_sync(ALL_LANES, n);
        if (lane == 0)
            s->n_before = n;
    }
}

/* ---- copying ------------------------------------------------------------------------------- */

template <typename ARGS>
DEVICE void copy_out(const ARGS &a, const recv_shared *s, int32_t my_row, uint32_t v,
                     bool has_payload, bool has_scales, uint4 payload, uint4 scales)
{
#pragma unroll 2
    for (uint32_t k = 0; k < (a.flat ? 1 : a.top_k); k++) {
        const int32_t row = a.flat ? (int32_t)s->n_before : __shfl_sync(ALL_LANES, my_row, k);

        if (row < 0)
            continue;
        if (has_payload)
            put_vector((uint8_t *)a.expert_x + (uint64_t)row * a.payload_bytes, v * VECTOR,
                       a.payload_bytes, payload, a.wide);
        if (has_scales)
            put_scales(a, (uint64_t)row, v / 8, scales);
    }
}

/* What combine_send needs to know, and the caller's row_index. */
template <typename ARGS>
DEVICE void note_rows(const ARGS &a, const recv_shared *s, int32_t my_row, uint32_t slot,
                      uint32_t lane)
{
    if (lane < a.top_k)
        a.row_map[slot * a.top_k + lane] = my_row;
    if (lane == 0)
        a.ordinal[slot] = s->ordinal;
    if (a.row_index && my_row >= 0)
        a.row_index[my_row] = (int32_t)(a.flat ? s->n_before : slot);
}

/* One vector of this block's part of a row, and in each warp's first lane the scales of the warp's
 * vectors; asked for before it was known whether they come. */
typedef struct piece {
    uint4 payload, scales;
    uint8_t *payload_at, *scales_at;
    uint32_t v;
    bool has_payload, has_scales;
} piece;

template <typename ARGS> DEVICE piece ask_for_piece(const ARGS &a, uint32_t slot)
{
    const uint32_t begin = blockIdx.y * a.part_vectors, lane = threadIdx.x % WARP;
    const uint32_t v = begin + threadIdx.x, end = min(begin + a.part_vectors, a.n_vectors);
    uint8_t *const row = place(a, a.rank, row_at(a, slot));
    piece p = { poison(), poison(), row + v * VECTOR, row + a.scale_at + v / WARP * VECTOR, v };

    p.has_payload = v < end;
    p.has_scales = p.has_payload && lane == 0 && a.n_cols > 0;
    if (p.has_payload)
        p.payload = load_relaxed(p.payload_at);
    if (p.has_scales)
        p.scales = load_relaxed(p.scales_at);
    return p;
}

/* Both vectors are asked for at once. */
DEVICE void await_piece(const ep_cuda_args &a, piece *p, uint32_t source)
{
    waiting w = BEGIN_WAITING;

    for (;;) {
        const bool no_payload = p->has_payload && is_poisoned(p->payload);
        const bool no_scales = p->has_scales && is_poisoned(p->scales);

        if (!no_payload && !no_scales)
            return;
        if (!may_wait(a, &w, EP_FAULT_DISPATCH, source))
            return;
        if (no_payload)
            p->payload = load_relaxed(p->payload_at);
        if (no_scales)
            p->scales = load_relaxed(p->scales_at);
    }
}

template <typename ARGS>
DEVICE void take_row(const ARGS &a, const recv_shared *s, origin o, piece p)
{
    const uint32_t lane = threadIdx.x % WARP, source = owner_of(a, o.group, o.t);
    const int32_t my_row = lane < a.top_k ? s->row[lane] : -1;

    if (blockIdx.y == 0 && threadIdx.x < WARP)
        note_rows(a, s, my_row, o.slot, lane);
    if (!__any_sync(ALL_LANES, my_row >= 0))
        return;
    await_piece(a, &p, source);
    if (p.has_payload)
        store_plain(p.payload_at, poison());
    if (p.has_scales)
        store_plain(p.scales_at, poison());
    __syncwarp();
    copy_out(a, s, my_row, p.v, p.has_payload, p.has_scales, p.payload, p.scales);
}

/* ---- with puts ----------------------------------------------------------------------------- */

/* The tokens in the order that blocks take them: this rank's own first, whose rows are near. */
DEVICE uint32_t own_first(const ep_cuda_args &a, uint32_t i)
{
    const uint32_t n = a.dp * a.bound, q = i + a.group * a.bound;

    return q < n ? q : q - n;
}

/* By the block's last thread, while other warps find rows: the row is there, if the token has one.
 */
template <typename ARGS>
DEVICE void await_row(const ARGS &a, recv_shared *s, const uint2 *ids, uint32_t q, origin o,
                      uint32_t epoch)
{
    const uint32_t source = owner_of(a, o.group, o.t);

    if (!is_direct(a, source) && has_expert(a, ids, q) &&
        !await_signal(a, EP_SIGNAL_ROW, o.slot, epoch, EP_FAULT_DISPATCH, source))
        s->failed = 1;
}

/* early: what was asked for of the token's row before it was known to be there. */
template <typename ARGS>
DEVICE void take_put_token(const ARGS &a, recv_shared *s, const uint2 *ids, uint32_t q, origin o,
                           uint32_t epoch, piece early)
{
    find_rows(a, s, ids, q);
    if (threadIdx.x == blockDim.x - 1)
        await_row(a, s, ids, q, o, epoch);
    __syncthreads(); /* the rows of all choices, and the row itself, before anybody copies */
    if (s->failed)
        return;
    if (!is_direct(a, owner_of(a, o.group, o.t)))
        early = ask_for_piece(a, o.slot); /* what was loaded before the signal does not count */
    take_row(a, s, o, early);
}

/* ---- the kernel ---------------------------------------------------------------------------- */

/* One block more than there are tokens: it counts, and its having all packets of all ranks is what
 * lets memory be used again. */
DEVICE void write_counts(const ep_cuda_args &a, const recv_shared *s)
{
    for (uint32_t e = threadIdx.x; e < a.n_local; e += blockDim.x)
        a.expert_count[e] = (int32_t)s->count[e];
    for (uint32_t g = threadIdx.x; g < a.dp; g += blockDim.x)
        a.arrived[g] = s->n_tokens[g * a.tp];
}

/* Block (q, y) takes part y of token q's row; there is one block more in x. */
template <typename ARGS> DEVICE void receive(const ARGS &a, recv_shared *s, uint2 *ids)
{
    const bool counts = blockIdx.x == gridDim.x - 1;
    const uint32_t q = counts ? 0 : PUTS ? own_first(a, blockIdx.x) : blockIdx.x;
    const origin o = origin_of(a, q);
    const uint32_t epoch = load_word(&a.state->dispatch_epoch) + 1, failed = load_word(a.error);
    const bool counting = counts || a.row_align != 1;
    first_packets packets = ask_for_packets(a);
    const piece early = ask_for_piece(a, o.group * a.row_slots + o.t);

    for (uint32_t r = threadIdx.x; r < a.n_ranks; r += blockDim.x)
        s->n_tokens[r] = UNKNOWN;
    for (uint32_t i = threadIdx.x; counting && i <= EP_CUDA_MAX_LOCAL; i += blockDim.x)
        s->count[i] = 0;
    if (threadIdx.x == 0)
        s->failed = failed;
    __syncthreads(); /* shared memory is set before threads write what they find */
    if (failed || (counts && blockIdx.y > 0))
        return;
    if (!await_puts(a, EP_SIGNAL_HEADER, epoch, EP_FAULT_DISPATCH))
        return;
    if (PUTS)
        packets = ask_for_packets(a); /* what was loaded before the signals does not count */
    collect(a, s, ids, packets, q, counting, epoch);
    __syncthreads(); /* all ids before anybody counts them */
    if (s->failed)
        return;
    if (counts) {
        write_counts(a, s);
        return;
    }
    if (o.t >= s->n_tokens[o.group * a.tp])
        return;
    if (PUTS) {
        take_put_token(a, s, ids, q, o, epoch, early);
        return;
    }
    find_rows(a, s, ids, q);
    __syncthreads(); /* the rows of all choices before anybody copies */
    take_row(a, s, o, early);
}

template <typename ARGS>
static __global__ void __launch_bounds__(EP_CUDA_THREADS, 2)
    dispatch_recv_kernel(const __grid_constant__ ARGS a)
{
    extern __shared__ uint2 ids[];
    static __shared__ recv_shared shared;

    if (a.lets_next_start)
        let_successor_start();
    dawdle(a, 1);
    receive(a, &shared, ids);
    if (a.early)
        wait_predecessor(); /* its end must mean that the send has ended, too */
}

cudaError_t yard_ep_cuda_launch_dispatch_recv(const ep_cuda_args *a, const ep_cuda_launch *l)
{
    return launch(is_common(a) ? (const void *)dispatch_recv_kernel<ep_cuda_common>
                               : (const void *)dispatch_recv_kernel<ep_cuda_args>,
                  a, l);
}
