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
DEVICE uint32_t slot_of(const ep_cuda_args &a, uint32_t q)
{
    return q / a.bound * a.max_tokens + q % a.bound;
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
DEVICE uint4 await_ids(const ep_cuda_args &a, recv_shared *s, uint4 v, const uint8_t *p, uint32_t q,
                       uint32_t epoch)
{
    const uint32_t source = owner_of(a, q / a.bound, q % a.bound);
    waiting w = { 0, 0 };

    while (v.w != epoch) {
        const uint32_t n = *(volatile uint32_t *)&s->n_tokens[source];

        if (n != UNKNOWN && q % a.bound >= n)
            return make_uint4(~0u, ~0u, 0, epoch);
        if (!may_wait(a, &w, EP_FAULT_DISPATCH, source)) {
            s->failed = 1;
            return make_uint4(~0u, ~0u, 0, epoch);
        }
        v = load_packet(a, p);
    }
    return v;
}

DEVICE const uint8_t *ids_at(const ep_cuda_args &a, uint32_t i)
{
    const uint64_t at =
        (uint64_t)slot_of(a, i / a.n_id_packets) * a.n_id_packets + i % a.n_id_packets;

    return place(a, a.rank, a.at_ids + at * VECTOR);
}

/* The first packet that a thread looks at, asked for before anything is known. */
typedef struct first_packets {
    uint4 count, ids;
} first_packets;

DEVICE first_packets ask_for_packets(const ep_cuda_args &a)
{
    first_packets p = {};

    if (threadIdx.x < a.n_ranks)
        p.count = load_packet(a, place(a, a.rank, count_at(a, 0, threadIdx.x)));
    if (threadIdx.x < a.dp * a.bound * a.n_id_packets)
        p.ids = load_packet(a, ids_at(a, threadIdx.x));
    return p;
}

DEVICE void collect(const ep_cuda_args &a, recv_shared *s, uint2 *ids, first_packets p,
                    uint32_t own_q, bool counting, uint32_t epoch)
{
    const uint32_t n_packets = a.dp * a.bound * a.n_id_packets;

    if (threadIdx.x < a.n_ranks) {
        if (p.count.w != epoch && !await_packet(a, place(a, a.rank, count_at(a, 0, threadIdx.x)),
                                                epoch, &p.count, EP_FAULT_DISPATCH, threadIdx.x))
            s->failed = 1;
        *(volatile uint32_t *)&s->n_tokens[threadIdx.x] = p.count.w == epoch ? p.count.x : 0;
    }
    __syncwarp(); /* no lane polls below for what another lane of its warp still waits for here */
    for (uint32_t i = threadIdx.x; i < n_packets; i += blockDim.x) {
        uint4 v = p.ids;

        if (i != threadIdx.x)
            v = load_packet(a, ids_at(a, i));
        v = await_ids(a, s, v, ids_at(a, i), i / a.n_id_packets, epoch);
        ids[i] = make_uint2(v.x, v.y);
        if (counting)
            add_counts(s, ids[i]);
        if (i == own_q * a.n_id_packets)
            s->ordinal = v.z;
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

    for (uint32_t e = lane; e < expert; e += WARP)
        n += (s->count[e] + a.row_align - 1) / a.row_align * a.row_align;
    return __reduce_add_sync(ALL_LANES, n);
}

/* By one warp: the row of choice k of token q. */
DEVICE int32_t find_row(const ep_cuda_args &a, const recv_shared *s, const uint2 *ids, uint32_t q,
                        uint32_t k, uint32_t lane)
{
    const uint32_t n_packets = a.dp * a.bound * a.n_id_packets, own = q * a.n_id_packets;
    const uint32_t expert = byte_of(ids[own + k / 8], k % 8), four = expert * 0x01010101u;
    uint32_t n = 0; /* in bits: eight a byte */
    bool again;

    if (expert == EP_CUDA_NO_EXPERT)
        return -1;
    if (a.row_align == 1)
        for (uint32_t i = lane; i < n_packets; i += WARP)
            n += smaller_bytes(ids[i], four) + (i < own ? equal_bytes(ids[i], four) : 0);
    else
        for (uint32_t i = lane; i < own; i += WARP)
            n += equal_bytes(ids[i], four);
    n = __reduce_add_sync(ALL_LANES, n) / 8;
    again = lane < k && byte_of(ids[own + lane / 8], lane % 8) == expert;
    n += (uint32_t)__popc(__ballot_sync(ALL_LANES, again));
    return (int32_t)(n + (a.row_align == 1 ? 0 : first_row(a, s, expert, lane)));
}

DEVICE bool has_expert(const ep_cuda_args &a, const uint2 *ids, uint32_t q)
{
    bool any = false;

    for (uint32_t i = 0; i < a.n_id_packets; i++)
        any |= (ids[q * a.n_id_packets + i].x & ids[q * a.n_id_packets + i].y) != ~0u;
    return any;
}

DEVICE void find_rows(const ep_cuda_args &a, recv_shared *s, const uint2 *ids, uint32_t q)
{
    const uint32_t lane = threadIdx.x % WARP, n_warps = blockDim.x / WARP;

    for (uint32_t k = threadIdx.x / WARP; k < a.top_k; k += n_warps) {
        const int32_t row = find_row(a, s, ids, q, k, lane);
        if (lane == 0)
            s->row[k] = row;
    }
    if (a.flat && threadIdx.x / WARP == n_warps - 1) {
        uint32_t n = 0;
        for (uint32_t i = lane; i < q; i += WARP)
            n += has_expert(a, ids, i);
        n = __reduce_add_sync(ALL_LANES, n);
        if (lane == 0)
            s->n_before = n;
    }
}

/* ---- copying ------------------------------------------------------------------------------- */

DEVICE void copy_out(const ep_cuda_args &a, const recv_shared *s, int32_t my_row, uint32_t base,
                     uint32_t lane, uint4 payload, uint4 scales)
{
    const uint32_t v = base + lane;

    for (uint32_t k = 0; k < (a.flat ? 1 : a.top_k); k++) {
        const int32_t row = a.flat ? (int32_t)s->n_before : __shfl_sync(ALL_LANES, my_row, k);

        if (row < 0)
            continue;
        if (v < a.n_vectors)
            put_vector((uint8_t *)a.expert_x + (uint64_t)row * a.payload_bytes, v * VECTOR,
                       a.payload_bytes, payload, a.wide);
        if (lane == 0 && a.n_cols > 0)
            put_scales(a, (uint64_t)row, base / 8, scales);
    }
}

/* What combine_send needs to know, and the caller's row_index. */
DEVICE void note_rows(const ep_cuda_args &a, const recv_shared *s, int32_t my_row, uint32_t q,
                      uint32_t lane)
{
    const uint32_t slot = slot_of(a, q);

    if (lane < a.top_k)
        a.row_map[slot * a.top_k + lane] = my_row;
    if (lane == 0)
        a.ordinal[slot] = s->ordinal;
    if (a.row_index && my_row >= 0)
        a.row_index[my_row] = (int32_t)(a.flat ? s->n_before : slot);
}

/* The first vector of each thread was asked for before it was known whether it comes. */
typedef struct first_try {
    uint4 payload, scales;
} first_try;

DEVICE void take_row(const ep_cuda_args &a, const recv_shared *s, uint32_t q, uint32_t part,
                     first_try early)
{
    const uint32_t lane = threadIdx.x % WARP, begin = part * a.part_vectors;
    const uint32_t end = min(begin + a.part_vectors, a.n_vectors);
    const uint32_t source = owner_of(a, q / a.bound, q % a.bound);
    const int32_t my_row = lane < a.top_k ? s->row[lane] : -1;
    uint8_t *const row = place(a, a.rank, row_at(a, slot_of(a, q)));

    if (part == 0 && threadIdx.x < WARP)
        note_rows(a, s, my_row, q, lane);
    if (!__any_sync(ALL_LANES, my_row >= 0))
        return;
    for (uint32_t base = begin + threadIdx.x - lane; base < end; base += blockDim.x) {
        const uint32_t v = base + lane;
        uint8_t *const payload_at = row + v * VECTOR, *const scales_at =
                                                          row + a.scale_at + base / WARP * VECTOR;
        const bool has_payload = v < a.n_vectors, has_scales = lane == 0 && a.n_cols > 0;

        if (base >= begin + blockDim.x) {
            early.payload = early.scales = poison();
            if (has_payload)
                early.payload = load_relaxed(payload_at);
            if (has_scales)
                early.scales = load_relaxed(scales_at);
        }
        if (has_payload) {
            await_vector(a, payload_at, &early.payload, EP_FAULT_DISPATCH, source);
            store_plain(payload_at, poison());
        }
        if (has_scales) {
            await_vector(a, scales_at, &early.scales, EP_FAULT_DISPATCH, source);
            store_plain(scales_at, poison());
        }
        __syncwarp();
        copy_out(a, s, my_row, base, lane, early.payload, early.scales);
    }
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

DEVICE void receive(const ep_cuda_args &a, recv_shared *s, uint2 *ids)
{
    const bool counts = blockIdx.x == gridDim.x - 1;
    const uint32_t q = counts ? 0 : blockIdx.x / a.n_parts, part = blockIdx.x % a.n_parts;
    const uint32_t lane = threadIdx.x % WARP, v = part * a.part_vectors + threadIdx.x;
    const uint32_t epoch = load_word(&a.state->dispatch_epoch) + 1, failed = load_word(a.error);
    const uint8_t *row = place(a, a.rank, row_at(a, slot_of(a, q)));
    const bool counting = counts || a.row_align != 1;
    const first_packets packets = ask_for_packets(a);
    first_try early = { poison(), poison() };

    if (!counts && v < a.n_vectors) {
        early.payload = load_relaxed(row + v * VECTOR);
        if (lane == 0 && a.n_cols > 0)
            early.scales = load_relaxed(row + a.scale_at + v / WARP * VECTOR);
    }
    for (uint32_t i = threadIdx.x; i < a.n_ranks; i += blockDim.x)
        s->n_tokens[i] = UNKNOWN;
    for (uint32_t i = threadIdx.x; counting && i <= EP_CUDA_MAX_LOCAL; i += blockDim.x)
        s->count[i] = 0;
    if (threadIdx.x == 0)
        s->failed = failed;
    __syncthreads(); /* shared memory is set before threads write what they find */
    if (failed)
        return;
    collect(a, s, ids, packets, q, counting, epoch);
    __syncthreads(); /* all ids before anybody counts them */
    if (s->failed)
        return;
    if (counts) {
        write_counts(a, s);
        return;
    }
    if (q % a.bound >= s->n_tokens[q / a.bound * a.tp])
        return;
    find_rows(a, s, ids, q);
    __syncthreads(); /* the rows of all choices before anybody copies */
    take_row(a, s, q, part, early);
}

static __global__ void __launch_bounds__(EP_CUDA_THREADS, 2)
    dispatch_recv_kernel(const __grid_constant__ ep_cuda_args a)
{
    extern __shared__ uint2 ids[];
    static __shared__ recv_shared shared;

    dawdle(a, 1);
    receive(a, &shared, ids);
    if (a.early)
        wait_predecessor(); /* its end must mean that the send has ended, too */
}

cudaError_t yard_ep_cuda_launch_dispatch_recv(const ep_cuda_args *a, const ep_cuda_launch *l)
{
    return launch((const void *)dispatch_recv_kernel, a, l);
}
