/* What kernels do for peers that they put to: signals, headers, rows. Included by device.cuh. A
 * kernel that only stores contains nothing of it. */
#ifndef YARD_EP_CUDA_PUTS_CUH
#define YARD_EP_CUDA_PUTS_CUH

/* Blocks of a kernel's launch bounds: one that puts calls functions that take 64 registers. */
static constexpr uint32_t blocks_that_fit(uint32_t n_threads, uint32_t n_blocks)
{
    return PUTS && n_blocks > 1024 / n_threads ? 1024 / n_threads : n_blocks;
}

/* ---- signals ----------------------------------------------------------------------------- */

DEVICE uint64_t *signal_word(const ep_cuda_args &a, ep_cuda_signal which, uint32_t idx)
{
    const uint32_t before = which == EP_SIGNAL_HEADER    ? 0
                            : which == EP_SIGNAL_COMBINE ? a.n_ranks
                            : which == EP_SIGNAL_ROW     ? 2 * a.n_ranks
                                                         : 2 * a.n_ranks + a.dp * a.max_tokens;

    return (uint64_t *)place(a, a.rank, a.at_signals) + before + idx;
}

/* By a whole block, behind a barrier after it has written the source, which lies in its own heap.
 */
DEVICE void put_signal(const ep_cuda_args &a, uint64_t dst, uint64_t src, uint32_t n_bytes,
                       ep_cuda_signal which, uint32_t idx, uint32_t epoch, uint32_t peer)
{
    if (PUTS)
        yard_device_put_signal(place(a, a.rank, dst), place(a, a.rank, src), n_bytes,
                               signal_word(a, which, idx), epoch, peer);
}

DEVICE void signal(const ep_cuda_args &a, ep_cuda_signal which, uint32_t epoch, uint32_t peer)
{
    if (PUTS)
        yard_device_signal(signal_word(a, which, a.rank), epoch, peer);
}

/* By one thread. NVSHMEM's own wait has no deadline, so it is called when there is nothing to wait
 * for any more: it makes what came before the signal visible. False: give up. */
DEVICE bool await_signal(const ep_cuda_args &a, ep_cuda_signal which, uint32_t idx, uint32_t epoch,
                         uint32_t what, uint32_t rank)
{
    uint64_t *const word = signal_word(a, which, idx);
    waiting w = BEGIN_WAITING;

    while (load_long(word) != epoch)
        if (!may_wait(a, &w, what, rank))
            return false;
    if (PUTS)
        yard_device_wait_until(word, epoch);
    return true;
}

/* By a whole block: every peer that puts, one thread each. */
DEVICE bool await_puts(const ep_cuda_args &a, ep_cuda_signal which, uint32_t epoch, uint32_t what)
{
    bool good = true;

    if (PUTS) {
        for (uint32_t r = threadIdx.x; r < a.n_ranks; r += blockDim.x)
            if (!is_direct(a, r))
                good &= await_signal(a, which, r, epoch, what, r);
        good = __syncthreads_and(good); /* what one thread saw, all may read */
    }
    return good;
}

/* ---- dispatch ---------------------------------------------------------------------------- */

/* Eight choices of a token. */
typedef struct token_ids {
    int32_t expert[8];
} token_ids;

template <typename ARGS> DEVICE token_ids load_ids(const ARGS &a, uint32_t t, uint32_t i)
{
    token_ids n;

#pragma unroll
    for (uint32_t j = 0; j < 8; j++)
        n.expert[j] = 8 * i + j < a.top_k ? load_shallow(a.expert + t * a.top_k + 8 * i + j) : -1;
    return n;
}

/* The own token whose id packets this thread writes first. */
template <typename ARGS> DEVICE uint32_t first_own(const ARGS &a)
{
    return a.replica + threadIdx.x * a.tp;
}

/* By one thread: of the mask of a token's ranks, word w without `to` and those behind it. */
DEVICE uint32_t ranks_below(const ep_cuda_args &a, uint32_t t, uint32_t to, uint32_t w)
{
    uint32_t mask = 0;

    for (uint32_t k = 0; k < a.top_k; k++) {
        const int32_t expert = load_shallow(a.expert + t * a.top_k + k);
        const bool valid = expert >= 0 && expert < (int32_t)a.n_experts;
        const uint32_t rank = valid ? (uint32_t)rank_of(a, expert) : to;

        mask |= rank < to && rank / WARP == w ? 1u << rank % WARP : 0;
    }
    return mask;
}

/* The packet of eight choices for rank `to`, without the epoch; adds to the ranks below 32 that
 * come before it. */
DEVICE uint4 make_ids(const ep_cuda_args &a, const token_ids &n, uint32_t to, uint32_t *before)
{
    uint32_t word[2] = { ~0u, ~0u };

#pragma unroll
    for (uint32_t j = 0; j < 8; j++) {
        const bool valid = n.expert[j] >= 0 && n.expert[j] < (int32_t)a.n_experts;
        const uint32_t rank = valid ? (uint32_t)rank_of(a, n.expert[j]) : a.n_ranks;

        if (rank == to)
            word[j / 4] ^= (((uint32_t)n.expert[j] - rank * a.n_local) ^ 255u) << 8 * (j % 4);
        *before |= rank < to && rank < WARP ? 1u << rank : 0;
    }
    return make_uint4(word[0], word[1], 0, 0);
}

/* By one thread: the id packets of a token for rank `to`. n: the first eight choices. */
template <typename ARGS>
DEVICE void write_ids(const ARGS &a, const token_ids &n, uint32_t t, uint32_t epoch, uint32_t to,
                      uint8_t *packets)
{
    uint32_t before = 0; /* ranks below 32 that come before it */
    uint4 first = make_ids(a, n, to, &before);
    bool here = (first.x & first.y) != ~0u;

    for (uint32_t i = 1; i < a.n_id_packets; i++) {
        const uint4 v = make_ids(a, load_ids(a, t, i), to, &before);
        here |= (v.x & v.y) != ~0u;
    }
    first.z = (uint32_t)__popc(before);
    for (uint32_t w = 1; here && w < a.n_rank_words && w * WARP < to; w++)
        first.z += (uint32_t)__popc(ranks_below(a, t, to, w));
    first.w = epoch;
    store_plain(packets, first);
    for (uint32_t i = 1; i < a.n_id_packets; i++) {
        uint4 v = make_ids(a, load_ids(a, t, i), to, &before);

        v.z = first.z;
        v.w = epoch;
        store_plain(packets + i * VECTOR, v);
    }
}

/* By a whole block. first: of the token first_own(). */
template <typename ARGS>
DEVICE void put_header(const ARGS &a, const token_ids &first, uint32_t n_tokens, uint32_t epoch,
                       uint32_t to)
{
    const uint64_t at = a.at_stage_headers + (uint64_t)to * a.header_pitch;
    uint8_t *const stage = place(a, a.rank, at);
    uint32_t n = 0;

    if (n_tokens > a.replica)
        n = (n_tokens - a.replica + a.tp - 1) / a.tp;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        const uint32_t t = a.replica + i * a.tp;

        write_ids(a, i == threadIdx.x ? first : load_ids(a, t, 0), t, epoch, to,
                  stage + (1 + (uint64_t)i * a.n_id_packets) * VECTOR);
    }
    if (threadIdx.x == 0)
        store_plain(stage, make_uint4(n_tokens, a.bound, 0, epoch));
    __syncthreads(); /* the whole header before it is put */
    put_signal(a, count_at(a, 0, a.rank), at, (1 + n * a.n_id_packets) * VECTOR, EP_SIGNAL_HEADER,
               a.rank, epoch, to);
}

/* n_heads blocks, of which this is the one of that number, share the peers that are put to. */
template <typename ARGS>
DEVICE void put_headers(const ARGS &a, token_ids first, bool loaded, uint32_t n_tokens,
                        uint32_t epoch, uint32_t number)
{
    uint32_t n = 0;

    if (!loaded && first_own(a) < n_tokens)
        first = load_ids(a, first_own(a), 0);
    for (uint32_t i = 1; i < a.n_ranks; i++) {
        const uint32_t to = (a.rank + i) % a.n_ranks;

        if (!is_direct(a, to) && n++ % a.n_heads == number)
            put_header(a, first, n_tokens, epoch, to);
    }
}

/* Where the row of an own token waits to be put, weights first. */
DEVICE uint64_t stage_at(const ep_cuda_args &a, uint32_t slot)
{
    return a.at_stage_rows + (uint64_t)(slot - a.group * a.max_tokens) / a.tp * a.row_pitch;
}

/* By a whole block, which has staged the row behind a barrier, to the ranks of a bit mask that
 * begins with rank `first`. */
DEVICE void put_row_to(const ep_cuda_args &a, uint32_t ranks, uint32_t first, uint32_t slot,
                       uint32_t epoch)
{
    for (uint32_t m = ranks; m; m &= m - 1)
        put_signal(a, a.at_rows + (uint64_t)slot * a.row_pitch, stage_at(a, slot), a.row_bytes,
                   EP_SIGNAL_ROW, slot, epoch, first + (uint32_t)__ffs((int)m) - 1);
}

/* ---- combine ----------------------------------------------------------------------------- */

/* Where the results for a token of another rank wait to be put: one for each choice when exact. */
template <bool EXACT>
DEVICE uint64_t results_stage_at(const ep_cuda_args &a, uint32_t group, uint32_t t)
{
    return a.at_stage_results +
           (uint64_t)(group * a.max_tokens + t) * (EXACT ? a.top_k : 1) * a.result_pitch;
}

/* By a whole block, which has staged the results: those of the choices in a bit mask, or their sum,
 * which lands at ordinal. */
template <bool EXACT>
DEVICE void put_results(const ep_cuda_args &a, uint32_t group, uint32_t t, uint32_t choices,
                        uint32_t ordinal, uint32_t epoch)
{
    __syncthreads(); /* all of the results before they are put */
    for (uint32_t m = EXACT ? choices : 1; m; m &= m - 1) {
        const uint32_t k = (uint32_t)__ffs((int)m) - 1, slot = EXACT ? k : ordinal;

        put_signal(a, result_at(a, t, slot),
                   results_stage_at<EXACT>(a, group, t) + (uint64_t)k * a.result_pitch,
                   a.n_result_vectors * VECTOR, EP_SIGNAL_RESULT, t * a.top_k + slot, epoch,
                   owner_of(a, group, t));
    }
}

/* By a whole block: the landing slots of an own token that are put to, one thread each. */
DEVICE bool await_put_results(const ep_cuda_args &a, uint32_t t, uint32_t slots, uint32_t epoch)
{
    bool good = true;

    if (threadIdx.x < a.top_k && (slots >> threadIdx.x & 1))
        good =
            await_signal(a, EP_SIGNAL_RESULT, t * a.top_k + threadIdx.x, epoch, EP_FAULT_RESULT, t);
    return __syncthreads_and(good); /* what one thread saw, all may read */
}

#endif
