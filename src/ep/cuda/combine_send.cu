/* Combine, sending: a block takes a token that arrived, and returns its experts' rows one by one
 * (exact) or their weighted sum (partial). */
#include "ep/cuda/combine.cuh"

/* What is known of an arrival; one lane a choice k. */
typedef struct arrival {
    int32_t row;   /* of expert_y, or -1 */
    uint4 weights; /* packet of this lane: three weights of the token; partial only */
    uint32_t group, t, ordinal;
    bool exists;
} arrival;

/* Peers' tokens before this rank's own; with puts all of them. Loads only: nothing is waited for.
 */
template <bool EXACT, typename ARGS>
DEVICE arrival look_up(const ARGS &a, uint32_t q, uint32_t lane)
{
    const uint32_t first = quotient(q, PUTS ? a.by_bound : a.by_served);
    const uint32_t second = q - first * (PUTS ? a.bound : a.n_served);
    const uint32_t t = PUTS ? second : first, before = (PUTS ? first : second) + a.group + 1;
    const uint32_t g = before < a.dp ? before : before - a.dp, slot = g * a.max_tokens + t;
    arrival n = { -1, {}, g, t, 0, false };

    n.exists = t < load_shallow(a.arrived + g);
    if (lane < a.top_k)
        n.row = load_shallow(a.row_map + slot * a.top_k + lane);
    if (!EXACT && lane < a.n_weight_packets)
        n.weights = load_packet(a, place(a, a.rank, weights_at(a, slot, lane)));
    if (!EXACT)
        n.ordinal =
            keeps_own_apart<ARGS> && g == a.group ? a.n_ranks : load_shallow(a.ordinal + slot);
    if (!n.exists)
        n.row = -1;
    return n;
}

/* This lane's weight. The packets went with the token's header; whoever finds one late waits. */
template <typename ARGS>
DEVICE float weight_of(const ARGS &a, const arrival &n, uint32_t epoch, uint32_t lane)
{
    const uint32_t slot = n.group * a.max_tokens + n.t;
    uint4 w = n.weights;
    uint32_t x, y, z;

    if (lane < a.n_weight_packets && w.w != epoch)
        await_packet(a, place(a, a.rank, weights_at(a, slot, lane)), epoch, &w, EP_FAULT_DISPATCH,
                     owner_of(a, n.group, n.t));
    __syncwarp();
    x = __shfl_sync(ALL_LANES, w.x, lane / 3);
    y = __shfl_sync(ALL_LANES, w.y, lane / 3);
    z = __shfl_sync(ALL_LANES, w.z, lane / 3);
    return __uint_as_float(lane % 3 == 0 ? x : lane % 3 == 1 ? y : z);
}

/* The staged form is for a put, which the same block reads: plain stores stay near. */
template <bool BF16, bool EXACT, uint32_t FLIGHT, typename ARGS>
DEVICE void return_token(const ARGS &a, const arrival &n, float weight, uint32_t v, uint32_t end)
{
    const uint32_t owner = owner_of(a, n.group, n.t);
    const bool direct = is_direct(a, owner);
    uint8_t *to = direct ? place(a, owner, result_at(a, n.t, EXACT ? 0 : n.ordinal)) + v * VECTOR
                         : place(a, a.rank, results_stage_at<EXACT>(a, n.group, n.t)) + v * VECTOR;
    float sum[8] = {};
    uint4 packed;

    take_rows<BF16, EXACT, FLIGHT>(a, n.row, weight, v, v < end, to, sum);
    if (EXACT || v >= end)
        return;
    packed = without_poison(pack<BF16>(sum), not_poison<BF16>());
    if (direct)
        store_relaxed(to, packed);
    else
        store_plain(to, packed);
}

/* To every rank, also where nothing is returned: this rank has read what dispatch brought. */
DEVICE void send_packets(const ep_cuda_args &a, uint32_t epoch)
{
    for (uint32_t r = threadIdx.x; r < a.n_ranks; r += blockDim.x)
        if (is_direct(a, r))
            store_relaxed(place(a, r, count_at(a, 1, a.rank)), make_uint4(0, 0, 0, epoch));
        else
            signal(a, EP_SIGNAL_COMBINE, epoch, r);
    if (threadIdx.x == 0)
        a.state->dispatch_epoch = epoch;
}

/* Block (q, y) begins with part y of arrival q. FLIGHT: half the rows at a time need half the
 * registers, and of such blocks more share a multiprocessor. With puts a block returns whole rows,
 * one a put. */
template <bool BF16, bool EXACT, uint32_t FLIGHT, typename ARGS>
static __global__ void
__launch_bounds__(PUTS || FLIGHT == EP_CUDA_ROWS_IN_FLIGHT ? EP_CUDA_THREADS : EP_CUDA_THREADS / 2,
                  PUTS || FLIGHT == EP_CUDA_ROWS_IN_FLIGHT ? 2 : EP_CUDA_HALF_BLOCKS)
    combine_send_kernel(const __grid_constant__ ARGS a)
{
    const uint32_t lane = threadIdx.x % WARP, n_items = a.n_served * a.bound;
    const uint32_t begin = blockIdx.y * a.part_vectors;
    const uint32_t v = begin + threadIdx.x, end = min(begin + a.part_vectors, a.n_result_vectors);
    uint32_t q = blockIdx.x, epoch, failed;
    arrival next = { -1, {}, 0, 0, 0, false };

    wait_predecessor();
    let_successor_start();
    dawdle(a, 2);
    epoch = load_word(&a.state->combine_epoch) + 1;
    failed = load_word(a.error);
    if (q < n_items)
        next = look_up<EXACT>(a, q, lane);
    if (failed)
        return;
    if (blockIdx.x == (PUTS ? gridDim.x - 1 : 0) && blockIdx.y == 0)
        send_packets(a, epoch);
#pragma unroll 1
    for (; q < n_items; q += gridDim.x) {
        const arrival n = next;
        float weight = 0.0f;

        if (q + gridDim.x < n_items)
            next = look_up<EXACT>(a, q + gridDim.x, lane);
        if (!__any_sync(ALL_LANES, n.row >= 0))
            continue;
        if (!EXACT)
            weight = weight_of(a, n, epoch, lane);
        return_token<BF16, EXACT, FLIGHT>(a, n, weight, v, end);
#pragma unroll 1
        for (uint32_t u = v + blockDim.x; PUTS && u - threadIdx.x < end; u += blockDim.x)
            return_token<BF16, EXACT, FLIGHT>(a, n, weight, u, end);
        if (PUTS && !is_direct(a, owner_of(a, n.group, n.t)))
            put_results<EXACT>(a, n.group, n.t, __ballot_sync(ALL_LANES, n.row >= 0), n.ordinal,
                               epoch);
    }
}

template <bool BF16, uint32_t FLIGHT, typename ARGS> static const void *kernel_of(bool exact)
{
    return exact ? (const void *)combine_send_kernel<BF16, true, FLIGHT, ARGS>
                 : (const void *)combine_send_kernel<BF16, false, FLIGHT, ARGS>;
}

template <bool BF16, typename ARGS> static const void *kernel_for(bool exact, bool half_flight)
{
    const uint32_t n = EP_CUDA_ROWS_IN_FLIGHT;

    if constexpr (!PUTS)
        if (!half_flight)
            return kernel_of<BF16, n, ARGS>(exact);
    return kernel_of<BF16, n / 2, ARGS>(exact);
}

cudaError_t yard_ep_cuda_launch_combine_send(const ep_cuda_args *a, bool bf16, bool exact,
                                             const ep_cuda_launch *l)
{
    if constexpr (!PUTS)
        if (a->own_apart)
            return launch(
                (const void *)
                    combine_send_kernel<true, false, EP_CUDA_ROWS_IN_FLIGHT / 2, ep_cuda_apart>,
                a, l);
    if (bf16 && is_common(a))
        return launch(kernel_for<true, ep_cuda_common>(exact, l->half_flight), a, l);
    return launch(bf16 ? kernel_for<true, ep_cuda_args>(exact, l->half_flight)
                       : kernel_for<false, ep_cuda_args>(exact, l->half_flight),
                  a, l);
}
