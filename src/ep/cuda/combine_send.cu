/* Combine, sending: a block takes a token that arrived, and returns its experts' rows one by one
 * (exact) or their weighted sum (partial). */
#include "ep/cuda/device.cuh"

/* What is known of an arrival; one lane a choice k. */
typedef struct arrival {
    int32_t row;   /* of expert_y, or -1 */
    uint4 weights; /* packet of this lane: three weights of the token; partial only */
    uint32_t group, t, ordinal;
    bool exists;
} arrival;

/* Peers' tokens before this rank's own. Loads only: nothing is waited for. */
template <bool EXACT> DEVICE arrival look_up(const ep_cuda_args &a, uint32_t q, uint32_t lane)
{
    const uint32_t g = (q % a.dp + a.group + 1) % a.dp, t = q / a.dp, slot = g * a.max_tokens + t;
    arrival n = { -1, {}, g, t, 0, false };

    n.exists = t < load_shallow(a.arrived + g);
    if (lane < a.top_k)
        n.row = load_shallow(a.row_map + slot * a.top_k + lane);
    if (!EXACT && lane < a.n_weight_packets)
        n.weights = load_packet(
            a,
            place(a, a.rank, a.at_weights + ((uint64_t)slot * a.n_weight_packets + lane) * VECTOR));
    if (!EXACT)
        n.ordinal = load_shallow(a.ordinal + slot);
    if (!n.exists)
        n.row = -1;
    return n;
}

/* This lane's weight. The packets went with the token's header; whoever finds one late waits. */
DEVICE float weight_of(const ep_cuda_args &a, const arrival &n, uint32_t epoch, uint32_t lane)
{
    const uint32_t slot = n.group * a.max_tokens + n.t;
    uint4 w = n.weights;
    uint32_t x, y, z;

    if (lane < a.n_weight_packets && w.w != epoch)
        await_packet(
            a,
            place(a, a.rank, a.at_weights + ((uint64_t)slot * a.n_weight_packets + lane) * VECTOR),
            epoch, &w, EP_FAULT_DISPATCH, owner_of(a, n.group, n.t));
    __syncwarp();
    x = __shfl_sync(ALL_LANES, w.x, lane / 3);
    y = __shfl_sync(ALL_LANES, w.y, lane / 3);
    z = __shfl_sync(ALL_LANES, w.z, lane / 3);
    return __uint_as_float(lane % 3 == 0 ? x : lane % 3 == 1 ? y : z);
}

template <bool BF16> DEVICE uint4 pack(const float value[8])
{
    if constexpr (BF16)
        return make_uint4(bf16_pair(value[0], value[1]), bf16_pair(value[2], value[3]),
                          bf16_pair(value[4], value[5]), bf16_pair(value[6], value[7]));
    else
        return make_uint4(__float_as_uint(value[0]), __float_as_uint(value[1]),
                          __float_as_uint(value[2]), __float_as_uint(value[3]));
}

DEVICE void return_vector(const ep_cuda_args &a, uint8_t *to, uint32_t v, uint4 value,
                          uint32_t substitute)
{
    if (v < a.n_result_vectors)
        store_relaxed(to + v * VECTOR, without_poison(value, substitute));
}

template <bool BF16, bool EXACT>
DEVICE void return_token(const ep_cuda_args &a, const arrival &n, float weight, uint32_t part,
                         uint32_t lane)
{
    const uint32_t end = min((part + 1) * a.part_vectors, a.n_result_vectors);
    const uint32_t substitute = BF16 ? 0xfffefffeu : POISON - 1; /* NaNs again */
    const uint32_t owner = owner_of(a, n.group, n.t);

    for (uint32_t base = part * a.part_vectors + threadIdx.x - lane; base < end;
         base += blockDim.x) {
        const uint32_t v = base + lane;
        float sum[8] = {};

        for (uint32_t k0 = 0; k0 < a.top_k; k0 += EP_CUDA_ROWS_IN_FLIGHT) {
            uint4 in[EP_CUDA_ROWS_IN_FLIGHT];

#pragma unroll
            for (uint32_t i = 0; i < EP_CUDA_ROWS_IN_FLIGHT; i++) {
                const int32_t row = __shfl_sync(ALL_LANES, n.row, k0 + i);
                if (k0 + i < a.top_k && row >= 0 && v < a.n_result_vectors)
                    in[i] = get_vector((const uint8_t *)a.expert_y + (uint64_t)row * a.result_bytes,
                                       v * VECTOR, a.result_bytes, a.wide);
            }
#pragma unroll
            for (uint32_t i = 0; i < EP_CUDA_ROWS_IN_FLIGHT; i++) {
                const int32_t row = __shfl_sync(ALL_LANES, n.row, k0 + i);
                const float w = __shfl_sync(ALL_LANES, weight, k0 + i);
                if (k0 + i >= a.top_k || row < 0)
                    continue;
                if (EXACT)
                    return_vector(a, place(a, owner, result_at(a, n.t, k0 + i)), v, in[i],
                                  substitute);
                else
                    accumulate<BF16>(sum, in[i], w);
            }
        }
        if (!EXACT)
            return_vector(a, place(a, owner, result_at(a, n.t, n.ordinal)), v, pack<BF16>(sum),
                          substitute);
    }
}

/* To every rank, also where nothing is returned: this rank has read what dispatch brought. */
DEVICE void send_packets(const ep_cuda_args &a, uint32_t epoch)
{
    for (uint32_t i = threadIdx.x; i < a.n_ranks; i += blockDim.x)
        store_relaxed(place(a, (a.rank + 1 + i) % a.n_ranks, count_at(a, 1, a.rank)),
                      make_uint4(0, 0, 0, epoch));
    if (threadIdx.x == 0)
        a.state->dispatch_epoch = epoch;
}

template <bool BF16, bool EXACT>
static __global__ void __launch_bounds__(EP_CUDA_THREADS, 2)
    combine_send_kernel(const __grid_constant__ ep_cuda_args a)
{
    const uint32_t lane = threadIdx.x % WARP, n_items = a.dp * a.bound * a.n_parts;
    uint32_t item = blockIdx.x, epoch, failed;
    arrival next = { -1, {}, 0, 0, 0, false };

    wait_predecessor();
    let_successor_start();
    dawdle(a, 2);
    epoch = load_word(&a.state->combine_epoch) + 1;
    failed = load_word(a.error);
    if (item < n_items)
        next = look_up<EXACT>(a, item / a.n_parts, lane);
    if (failed)
        return;
    if (blockIdx.x == 0)
        send_packets(a, epoch);
    for (; item < n_items; item += gridDim.x) {
        const arrival n = next;
        float weight = 0.0f;

        if (item + gridDim.x < n_items)
            next = look_up<EXACT>(a, (item + gridDim.x) / a.n_parts, lane);
        if (!__any_sync(ALL_LANES, n.row >= 0))
            continue;
        if (!EXACT)
            weight = weight_of(a, n, epoch, lane);
        return_token<BF16, EXACT>(a, n, weight, item % a.n_parts, lane);
    }
}

cudaError_t yard_ep_cuda_launch_combine_send(const ep_cuda_args *a, bool bf16, bool exact,
                                             const ep_cuda_launch *l)
{
    if (bf16)
        return exact ? launch((const void *)combine_send_kernel<true, true>, a, l)
                     : launch((const void *)combine_send_kernel<true, false>, a, l);
    return exact ? launch((const void *)combine_send_kernel<false, true>, a, l)
                 : launch((const void *)combine_send_kernel<false, false>, a, l);
}
