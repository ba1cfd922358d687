/* Combine, receiving: a block takes a token that this rank owns, adds its results in one fixed
 * order and gives the finished row to its siblings; afterwards it takes the rows that they finish.
 */
#include "ep/cuda/combine.cuh"

/* What was kept of a token's routing; one lane a choice k. */
typedef struct kept {
    int32_t expert;
    uint32_t n_ranks;
    float weight;
} kept;

/* Loads only: the results are asked for before these have come. */
template <bool EXACT, typename ARGS> DEVICE kept look_up(const ARGS &a, uint32_t t, uint32_t lane)
{
    kept n = { -1, 0, 1.0f };

    if (EXACT && lane < a.top_k) {
        n.expert = load_shallow(a.kept_expert + t * a.top_k + lane);
        n.weight = load_shallow(a.kept_weight + t * a.top_k + lane);
    }
    if (!EXACT)
        n.n_ranks = load_shallow(a.kept_ranks + t);
    return n;
}

/* Bit mask of the landing slots that hold results. */
template <bool EXACT> DEVICE uint32_t slots_of(const kept &n)
{
    if (EXACT)
        return __ballot_sync(ALL_LANES, n.expert >= 0);
    return n.n_ranks >= 32 ? ~0u : (1u << n.n_ranks) - 1;
}

/* Of the landing slots `from` and on, a pitch apart. */
template <bool EXACT, uint32_t FLIGHT, typename ARGS>
DEVICE void load_results(const ARGS &a, const uint8_t *from, uint32_t first, uint4 in[FLIGHT])
{
    const uint32_t n_slots = EXACT ? a.top_k : min(a.top_k, a.n_ranks);

#pragma unroll
    for (uint32_t i = 0; i < FLIGHT; i++)
        if (first + i < n_slots)
            in[i] = load_relaxed(from + i * (uint64_t)a.result_pitch);
}

/* Polls those that are expected and were still poison. */
template <uint32_t FLIGHT>
DEVICE void await_results(const ep_cuda_args &a, uint32_t t, uint32_t slots, const uint8_t *from,
                          uint4 in[FLIGHT])
{
    waiting w = BEGIN_WAITING;
    bool late = true;

    while (late) {
        late = false;
#pragma unroll
        for (uint32_t i = 0; i < FLIGHT; i++)
            if ((slots >> i & 1) && is_poisoned(in[i])) {
                in[i] = load_relaxed(from + i * (uint64_t)a.result_pitch);
                late = true;
            }
        if (late && !may_wait(a, &w, EP_FAULT_RESULT, t))
            return;
    }
}

/* The sum of a vector of token t, whose landing slots begin at `from`. in: what load_results found
 * for the first slots; exists: the vector lies in the row. */
template <bool BF16, bool EXACT, uint32_t FLIGHT, typename ARGS>
DEVICE void add_results(const ARGS &a, const kept &k, uint32_t t, uint8_t *from, bool exists,
                        uint4 in[FLIGHT], float sum[8])
{
    const uint32_t all = slots_of<EXACT>(k);

#pragma unroll
    for (int i = 0; i < 8; i++)
        sum[i] = 0.0f;
    for (uint32_t first = 0; first < a.top_k; first += FLIGHT) {
        const uint32_t slots = exists ? all >> first : 0;

        if (first > 0) {
            if (all >> first == 0)
                break;
            from += FLIGHT * (uint64_t)a.result_pitch;
            if (exists)
                load_results<EXACT, FLIGHT>(a, from, first, in);
        }
        await_results<FLIGHT>(a, t, slots, from, in);
        __syncwarp();
#pragma unroll
        for (uint32_t i = 0; i < FLIGHT; i++) {
            const float weight =
                EXACT ? __shfl_sync(ALL_LANES, k.weight, (first + i) % WARP) : 1.0f;
            if (!(slots >> i & 1))
                continue;
            store_plain(from + i * (uint64_t)a.result_pitch, poison());
            accumulate<BF16>(sum, in[i], weight);
        }
    }
}

/* ---- finished rows ------------------------------------------------------------------------ */

/* N values from column col on, as words of the output dtype: N or N / 2 of them. */
template <int N>
DEVICE void output_words(const ep_cuda_args &a, const float value[8], uint32_t word[8])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        word[i] = __float_as_uint(value[i]);
    if (a.output_bf16)
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            word[i] = bf16_pair(value[2 * i], value[2 * i + 1]);
}

template <int N>
DEVICE void write_ragged(const ep_cuda_args &a, uint32_t t, uint32_t col, const uint32_t word[8])
{
    const uint64_t at = (uint64_t)t * a.hidden + col;

#pragma unroll
    for (uint32_t i = 0; i < N; i++) {
        if (col + i >= a.hidden)
            continue;
        if (a.output_bf16)
            ((uint16_t *)a.y)[at + i] = (uint16_t)(word[i / 2] >> 16 * (i % 2));
        else
            ((uint32_t *)a.y)[at + i] = word[i];
    }
}

template <int N, typename ARGS>
DEVICE void write_output(const ARGS &a, uint32_t t, uint32_t col, const uint32_t word[8])
{
    const uint64_t at = (uint64_t)t * a.hidden + col;

    if (!a.wide) {
        write_ragged<N>(a, t, col, word);
    } else if (a.output_bf16) {
        if (N == 8)
            store_plain((uint16_t *)a.y + at, make_uint4(word[0], word[1], word[2], word[3]));
        else
            *(uint2 *)((uint16_t *)a.y + at) = make_uint2(word[0], word[1]);
    } else {
        store_plain((uint32_t *)a.y + at, make_uint4(word[0], word[1], word[2], word[3]));
        if (N == 8)
            store_plain((uint32_t *)a.y + at + 4, make_uint4(word[4], word[5], word[6], word[7]));
    }
}

DEVICE uint64_t output_at(const ep_cuda_args &a, uint32_t t)
{
    return a.at_outputs + (uint64_t)t * a.output_pitch;
}

/* To the siblings' landing rows, which hold whole vectors. */
template <int N>
DEVICE void push_output(const ep_cuda_args &a, uint32_t t, uint32_t col, uint32_t word[8])
{
    const uint32_t substitute = a.output_bf16 ? 0xfffefffeu : POISON - 1;

#pragma unroll
    for (int i = 0; i < N; i++)
        word[i] = without_poison(word[i], substitute);
    for (uint32_t j = 1; j < a.tp; j++) {
        const uint32_t sibling = a.group * a.tp + (a.replica + j) % a.tp;
        uint8_t *to = place(a, sibling, output_at(a, t)) + col * (a.output_bf16 ? 2 : 4);

        if (N == 4 && a.output_bf16) {
            store_relaxed_half(to, word[0], word[1]);
            if (col / N % 2 == 0 && col / N + 1 == a.n_result_vectors)
                store_relaxed_half(to + VECTOR / 2, 0, 0); /* no half of a vector stays poison */
            continue;
        }
        store_relaxed(to, make_uint4(word[0], word[1], word[2], word[3]));
        if (N == 8 && !a.output_bf16)
            store_relaxed(to + VECTOR, make_uint4(word[4], word[5], word[6], word[7]));
    }
}

/* Before rows are pushed: the siblings' packets say that their landing rows are free. */
DEVICE void await_siblings(const ep_cuda_args &a, uint32_t epoch)
{
    if (threadIdx.x < a.tp) {
        const uint32_t sibling = a.group * a.tp + threadIdx.x;
        uint4 v;
        await_packet(a, place(a, a.rank, count_at(a, 1, sibling)), epoch, &v, EP_FAULT_COMBINE,
                     sibling);
    }
    __syncthreads(); /* nobody pushes before all siblings are known to be there */
}

/* Rows of this instance that its other ranks finish. */
DEVICE void take_outputs(const ep_cuda_args &a, uint32_t n_tokens)
{
    const uint32_t row_bytes = a.hidden * (a.output_bf16 ? 2 : 4);
    const uint32_t first = blockIdx.y * blockDim.x + threadIdx.x, step = gridDim.y * blockDim.x;

    for (uint32_t t = blockIdx.x; t < n_tokens; t += gridDim.x) {
        if (t % a.tp == a.replica)
            continue;
        for (uint32_t at = first * VECTOR; at < row_bytes; at += step * VECTOR) {
            uint8_t *from = place(a, a.rank, output_at(a, t)) + at;
            uint4 v = load_relaxed(from);

            await_vector(a, from, &v, EP_FAULT_OUTPUT, owner_of(a, a.group, t));
            store_plain(from, poison());
            put_vector((uint8_t *)a.y + (uint64_t)t * row_bytes, at, row_bytes, v, a.wide);
        }
    }
}

/* ---- the kernels --------------------------------------------------------------------------- */

template <bool BF16, bool EXACT, uint32_t FLIGHT, typename ARGS>
DEVICE void finish_tokens(const ARGS &a, uint32_t n_blocks, uint32_t failed, uint32_t epoch)
{
    const int N = BF16 ? 8 : 4; /* values of a vector */
    const uint32_t lane = threadIdx.x % WARP, begin = blockIdx.y * a.part_vectors;
    const uint32_t v = begin + threadIdx.x, end = min(begin + a.part_vectors, a.n_result_vectors);

#pragma unroll 1
    for (uint32_t t = a.replica + blockIdx.x * a.tp; t < a.bound; t += n_blocks * a.tp) {
        const kept k = look_up<EXACT>(a, t, lane);
        uint8_t *const from = place(a, a.rank, result_at(a, t, 0)) + v * VECTOR;
        uint4 in[FLIGHT];
        uint32_t word[8];
        float sum[8];

        if (!PUTS && v < end)
            load_results<EXACT, FLIGHT>(a, from, 0, in);
        const uint32_t puts = PUTS ? load_shallow(a.kept_puts + t) : 0;
        const uint32_t n_tokens = load_word(a.kept_count);
        if (failed || t >= n_tokens) /* not asked before: the loads above would wait */
            return;
        if (PUTS) {
            if (!await_put_results(a, t, puts, epoch))
                return;
            if (v < end)
                load_results<EXACT, FLIGHT>(a, from, 0, in);
        }
        add_results<BF16, EXACT, FLIGHT>(a, k, t, from, v < end, in, sum);
        if (v >= end)
            continue;
        output_words<N>(a, sum, word);
        write_output<N>(a, t, v * N, word);
        if (a.tp > 1)
            push_output<N>(a, t, v * N, word);
    }
}

/* By the block more. Having all packets is what lets memory be used again. */
DEVICE void await_packets(const ep_cuda_args &a, uint32_t epoch)
{
    for (uint32_t r = threadIdx.x; r < a.n_ranks && blockIdx.y == 0; r += blockDim.x) {
        uint4 v;
        if (is_direct(a, r))
            await_packet(a, place(a, a.rank, count_at(a, 1, r)), epoch, &v, EP_FAULT_COMBINE, r);
        else
            await_signal(a, EP_SIGNAL_COMBINE, r, epoch, EP_FAULT_COMBINE, r);
    }
}

/* Block (t, y) begins with part y of token t; there is one block more in x. FLIGHT: results that
 * are loaded at the same time. Two ranks have two partial sums a token, which need few registers;
 * more blocks then share a multiprocessor. */
template <bool BF16, bool EXACT, uint32_t FLIGHT, typename ARGS>
static __global__ void __launch_bounds__(EP_CUDA_THREADS, FLIGHT == 2 ? 3 : 2)
    combine_recv_kernel(const __grid_constant__ ARGS a)
{
    if (a.lets_next_start)
        let_successor_start();
    const uint32_t epoch = load_word(&a.state->combine_epoch) + 1;
    const uint32_t failed = load_word(a.error);

    dawdle(a, 3);
    if (blockIdx.x == gridDim.x - 1) {
        await_packets(a, epoch);
    } else {
        if (a.tp > 1)
            await_siblings(a, epoch);
        finish_tokens<BF16, EXACT, FLIGHT>(a, gridDim.x - 1, failed, epoch);
    }
    if (!failed && a.tp > 1)
        take_outputs(a, load_word(a.kept_count));
    if (a.early)
        wait_predecessor(); /* its end must mean that the send has ended, too */
}

/* ---- own share apart ----------------------------------------------------------------------- */

/* What is known of an own token; the first two of this lane's choice. */
typedef struct share {
    int32_t row; /* of expert_y, or -1 */
    float weight;
    uint32_t ordinal, n_ranks; /* of this rank among those that the token went to */
} share;

/* LATE: the weights lie in packets of this rank's own dispatch_send, which are there. */
template <bool LATE> DEVICE share look_up_share(const ep_cuda_apart &a, uint32_t t, uint32_t lane)
{
    const uint32_t slot = a.group * a.max_tokens + t;
    share s = { -1, 0.0f, load_shallow(a.ordinal + slot), load_shallow(a.kept_ranks + t) };

    if (lane < a.top_k) {
        s.row = load_shallow(a.row_map + slot * a.top_k + lane);
        if (LATE)
            s.weight = load_shallow((const float *)place(a, a.rank, weights_at(a, slot, lane / 3)) +
                                    lane % 3);
    }
    return s;
}

/* What combine_send has left, or what LATE it has not made. */
template <bool LATE>
DEVICE uint4 own_result(const ep_cuda_apart &a, const share &s, uint32_t t, uint32_t v, bool exists)
{
    float sum[8] = {};

    if (!LATE)
        return exists ? load_plain(place(a, a.rank, result_at(a, t, a.n_ranks)) + v * VECTOR)
                      : poison();
    take_rows<true, false, EP_CUDA_ROWS_IN_FLIGHT / 2>(a, s.row, s.weight, v, exists, NULL, sum);
    return without_poison(pack<true>(sum), not_poison<true>());
}

/* Others' results of a vector of token t, and its own before number `ordinal` of them, in the order
 * of ranks. */
template <uint32_t PEERS, bool LATE>
DEVICE void finish_share(const ep_cuda_apart &a, const share &s, uint32_t t, uint32_t v,
                         bool exists)
{
    const bool has_own = __any_sync(ALL_LANES, s.row >= 0);
    const uint32_t ordinal = has_own ? s.ordinal : PEERS + 1, n_peers = s.n_ranks - has_own;
    uint8_t *const from = place(a, a.rank, result_at(a, t, 0)) + v * VECTOR;
    uint4 in[PEERS], own = poison();
    float sum[8] = {};
    uint32_t word[8];

#pragma unroll
    for (uint32_t i = 0; i < PEERS; i++)
        if (exists && i < n_peers)
            in[i] = load_relaxed(from + (i + (i >= ordinal)) * (uint64_t)a.result_pitch);
    if (has_own)
        own = own_result<LATE>(a, s, t, v, exists);
    if (!exists)
        return;
#pragma unroll
    for (uint32_t i = 0; i <= PEERS; i++) {
        uint8_t *const at = from + (i + (i >= ordinal)) * (uint64_t)a.result_pitch;

        if (i == ordinal)
            accumulate<true>(sum, own, 1.0f);
        if (i == PEERS || i >= n_peers)
            continue;
        await_vector(a, at, &in[i], EP_FAULT_RESULT, t);
        store_plain(at, poison());
        accumulate<true>(sum, in[i], 1.0f);
    }
    output_words<8>(a, sum, word);
    write_output<8>(static_cast<const ep_cuda_args &>(a), t, v * 8, word);
}

/* Many tokens of which this rank's own share did not land. PEERS: other ranks at most. */
template <uint32_t PEERS, bool LATE>
static __global__ void __launch_bounds__(EP_CUDA_THREADS / 2, EP_CUDA_APART_BLOCKS(PEERS))
    combine_recv_apart_kernel(const __grid_constant__ ep_cuda_apart a)
{
    const uint32_t lane = threadIdx.x % WARP, begin = blockIdx.y * a.part_vectors;
    const uint32_t v = begin + threadIdx.x, end = min(begin + a.part_vectors, a.n_result_vectors);
    const uint32_t n_blocks = gridDim.x - 1;
    uint32_t t = blockIdx.x;

    if (a.lets_next_start)
        let_successor_start();
    const uint32_t epoch = load_word(&a.state->combine_epoch) + 1;
    const uint32_t n_tokens = load_word(a.error) ? 0 : load_word(a.kept_count);

    dawdle(a, 3);
    if (blockIdx.x == n_blocks) {
        await_packets(a, epoch);
    } else if (t < n_tokens) {
        share next = look_up_share<LATE>(a, t, lane);
#pragma unroll 1
        for (; t < n_tokens; t += n_blocks) {
            const share s = next;

            if (t + n_blocks < n_tokens)
                next = look_up_share<LATE>(a, t + n_blocks, lane);
            finish_share<PEERS, LATE>(a, s, t, v, v < end);
        }
    }
    if (a.early)
        wait_predecessor(); /* its end must mean that the send has ended, too */
}

/* ---- launching ----------------------------------------------------------------------------- */

template <uint32_t PEERS> static const void *apart_kernel(bool late)
{
    return late ? (const void *)combine_recv_apart_kernel<PEERS, true>
                : (const void *)combine_recv_apart_kernel<PEERS, false>;
}

template <bool BF16, typename ARGS> static const void *kernel_for(bool exact, bool two)
{
    if (exact)
        return (const void *)combine_recv_kernel<BF16, true, EP_CUDA_ROWS_IN_FLIGHT, ARGS>;
    return two ? (const void *)combine_recv_kernel<BF16, false, 2, ARGS>
               : (const void *)combine_recv_kernel<BF16, false, EP_CUDA_ROWS_IN_FLIGHT, ARGS>;
}

cudaError_t yard_ep_cuda_launch_combine_recv(const ep_cuda_args *a, bool bf16, bool exact,
                                             const ep_cuda_launch *l)
{
    const bool two = a->n_ranks <= 2;

    if (a->own_apart)
        return launch(two ? apart_kernel<1>(a->early)
                          : apart_kernel<EP_CUDA_APART_RANKS - 1>(a->early),
                      a, l);
    if (bf16 && is_common(a))
        return launch(kernel_for<true, ep_cuda_common>(exact, two), a, l);
    return launch(bf16 ? kernel_for<true, ep_cuda_args>(exact, two)
                       : kernel_for<false, ep_cuda_args>(exact, two),
                  a, l);
}
