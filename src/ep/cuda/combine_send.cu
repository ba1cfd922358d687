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

/* Peers' tokens before this rank's own. Loads only: nothing is waited for. */
template <bool EXACT, typename ARGS>
DEVICE arrival look_up(const ARGS &a, uint32_t q, uint32_t lane)
{
    const uint32_t t = quotient(q, a.by_served), before = q - t * a.n_served + a.group + 1;
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

template <bool BF16, bool EXACT, uint32_t FLIGHT, typename ARGS>
DEVICE void return_token(const ARGS &a, const arrival &n, float weight, uint32_t v, uint32_t end)
{
    const uint32_t owner = owner_of(a, n.group, n.t);
    uint8_t *to = is_direct(a, owner)
                      ? place(a, owner, result_at(a, n.t, EXACT ? 0 : n.ordinal)) + v * VECTOR
                      : place(a, a.rank, results_stage_at<EXACT>(a, n.group, n.t)) + v * VECTOR;
    float sum[8] = {};

    take_rows<BF16, EXACT, FLIGHT>(a, n.row, weight, v, v < end, to, sum);
    if (!EXACT && v < end)
        store_relaxed(to, without_poison(pack<BF16>(sum), not_poison<BF16>()));
}

/* To every rank, also where nothing is returned: this rank has read what dispatch brought. */
template <bool EXACT> DEVICE void send_packets(const ep_cuda_args &a, uint32_t epoch)
{
    for (uint32_t r = threadIdx.x; r < a.n_ranks; r += blockDim.x)
        if (is_direct(a, r))
            store_relaxed(place(a, r, count_at(a, 1, a.rank)), make_uint4(0, 0, 0, epoch));
        else
            signal_results<EXACT>(a, r);
    if (threadIdx.x == 0)
        a.state->dispatch_epoch = epoch;
}

/* Block (q, y) begins with part y of arrival q. FLIGHT: half the rows at a time need half the
 * registers, and of such blocks more share a multiprocessor. */
template <bool BF16, bool EXACT, uint32_t FLIGHT, typename ARGS>
static __global__ void
__launch_bounds__(FLIGHT == EP_CUDA_ROWS_IN_FLIGHT ? EP_CUDA_THREADS : EP_CUDA_THREADS / 2,
                  FLIGHT == EP_CUDA_ROWS_IN_FLIGHT
                      ? 2
                      : blocks_that_fit(EP_CUDA_THREADS / 2, EP_CUDA_HALF_BLOCKS))
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
    if (blockIdx.x == 0 && blockIdx.y == 0)
        send_packets<EXACT>(a, epoch);
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
        if (PUTS && !is_direct(a, owner_of(a, n.group, n.t)))
            put_results<EXACT>(a, n.group, n.t, __ballot_sync(ALL_LANES, n.row >= 0), n.ordinal,
                               begin, end);
    }
}

template <bool BF16, uint32_t FLIGHT, typename ARGS> static const void *kernel_for(bool exact)
{
    return exact ? (const void *)combine_send_kernel<BF16, true, FLIGHT, ARGS>
                 : (const void *)combine_send_kernel<BF16, false, FLIGHT, ARGS>;
}

cudaError_t yard_ep_cuda_launch_combine_send(const ep_cuda_args *a, bool bf16, bool exact,
                                             const ep_cuda_launch *l)
{
    const uint32_t n = EP_CUDA_ROWS_IN_FLIGHT;

    if (a->own_apart)
        return launch((const void *)combine_send_kernel<true, false, n / 2, ep_cuda_apart>, a, l);
    if (bf16 && is_common(a))
        return launch(l->half_flight ? kernel_for<true, n / 2, ep_cuda_common>(exact)
                                     : kernel_for<true, n, ep_cuda_common>(exact),
                      a, l);
    if (bf16)
        return launch(l->half_flight ? kernel_for<true, n / 2, ep_cuda_args>(exact)
                                     : kernel_for<true, n, ep_cuda_args>(exact),
                      a, l);
    return launch(l->half_flight ? kernel_for<false, n / 2, ep_cuda_args>(exact)
                                 : kernel_for<false, n, ep_cuda_args>(exact),
                  a, l);
}
