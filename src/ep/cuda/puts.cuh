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

DEVICE uint64_t signal_at(const ep_cuda_args &a, uint32_t which, uint32_t source)
{
    return a.at_signals + ((uint64_t)which * a.n_ranks + source) * sizeof(uint64_t);
}

/* By a whole block, behind a barrier after it has written the source, which lies in its own heap.
 * Adds value to the signal once the bytes are there. */
DEVICE void put_signal(const ep_cuda_args &a, uint64_t dst, uint64_t src, uint32_t n_bytes,
                       ep_cuda_signal which, uint64_t value, uint32_t peer)
{
    if (PUTS)
        yard_device_put_signal(place(a, a.rank, dst), place(a, a.rank, src), n_bytes,
                               (uint64_t *)place(a, a.rank, signal_at(a, which, a.rank)), value,
                               peer);
}

DEVICE void signal(const ep_cuda_args &a, ep_cuda_signal which, uint64_t value, uint32_t peer)
{
    if (PUTS)
        yard_device_signal((uint64_t *)place(a, a.rank, signal_at(a, which, a.rank)), value, peer);
}

/* Waits until a source's signals add up to want. Words begin with all ones, as the whole heap does:
 * one before 0. NVSHMEM's own wait has no deadline, so it is called when there is nothing to wait
 * for any more: it makes what came before the signal visible. */
DEVICE bool await_signal(const ep_cuda_args &a, ep_cuda_signal which, uint32_t source,
                         uint64_t want, uint32_t what)
{
    const uint64_t *word = (const uint64_t *)place(a, a.rank, signal_at(a, which, source));
    waiting w = BEGIN_WAITING;

    while (load_acquire_long(word) + 1 < want)
        if (!may_wait(a, &w, what, source))
            return false;
    if (PUTS)
        yard_device_wait_until((uint64_t *)word, want - 1);
    return true;
}

/* By a whole block: every peer that puts, one thread each. */
DEVICE bool await_puts(const ep_cuda_args &a, ep_cuda_signal which, uint64_t want, uint32_t what)
{
    bool good = true;

    if (PUTS) {
        for (uint32_t r = threadIdx.x; r < a.n_ranks; r += blockDim.x)
            if (!is_direct(a, r))
                good &= await_signal(a, which, r, want, what);
        good = __syncthreads_and(good); /* what one thread saw, all may read */
    }
    return good;
}

/* ---- dispatch ---------------------------------------------------------------------------- */

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

/* By one thread: the id packets of a token for rank `to`; returns how many choices go there. */
DEVICE uint32_t write_ids(const ep_cuda_args &a, uint32_t t, uint32_t epoch, uint32_t to,
                          uint8_t *packets)
{
    uint32_t before = 0, n_here = 0; /* before: ranks below 32 that come before it */

    for (uint32_t i = 0; i < a.n_id_packets; i++) {
        uint32_t word[2] = { ~0u, ~0u };
        int32_t expert[8];

#pragma unroll
        for (uint32_t j = 0; j < 8; j++)
            expert[j] = 8 * i + j < a.top_k ? load_shallow(a.expert + t * a.top_k + 8 * i + j) : -1;
#pragma unroll
        for (uint32_t j = 0; j < 8; j++) {
            const bool valid = expert[j] >= 0 && expert[j] < (int32_t)a.n_experts;
            const uint32_t rank = valid ? (uint32_t)rank_of(a, expert[j]) : a.n_ranks;

            if (rank == to) {
                word[j / 4] ^= (((uint32_t)expert[j] - rank * a.n_local) ^ 255u) << 8 * (j % 4);
                n_here++;
            }
            before |= rank < to && rank < WARP ? 1u << rank : 0;
        }
        store_plain(packets + i * VECTOR, make_uint4(word[0], word[1], 0, epoch));
    }
    before = (uint32_t)__popc(before);
    for (uint32_t w = 1; n_here > 0 && w * WARP < to; w++)
        before += (uint32_t)__popc(ranks_below(a, t, to, w));
    for (uint32_t i = 0; i < a.n_id_packets; i++)
        ((uint32_t *)(packets + i * VECTOR))[2] = before;
    return n_here;
}

/* By a whole block. The counts also tell the peer how many results it will send. */
DEVICE void put_header(const ep_cuda_args &a, uint32_t n_tokens, uint32_t epoch, uint32_t to)
{
    static __shared__ uint32_t n_rows, n_choices;
    const uint64_t at = a.at_stage_headers + (uint64_t)to * a.header_pitch;
    uint8_t *stage = place(a, a.rank, at);
    uint32_t n = 0;

    if (threadIdx.x == 0)
        n_rows = n_choices = 0;
    __syncthreads(); /* cleared before anybody adds, and free of the last header */
    if (n_tokens > a.replica)
        n = (n_tokens - a.replica + a.tp - 1) / a.tp;
    for (uint32_t i = threadIdx.x; i < n; i += blockDim.x) {
        const uint32_t n_here = write_ids(a, a.replica + i * a.tp, epoch, to,
                                          stage + (1 + (uint64_t)i * a.n_id_packets) * VECTOR);
        if (n_here > 0) {
            atomicAdd(&n_rows, 1u);
            atomicAdd(&n_choices, n_here);
        }
    }
    __syncthreads(); /* the counts of all */
    if (threadIdx.x == 0)
        store_plain(stage, make_uint4(n_tokens, n_rows, n_choices, epoch));
    __syncthreads(); /* the whole header before it is put */
    put_signal(a, count_at(a, 0, a.rank), at, (1 + n * a.n_id_packets) * VECTOR, EP_SIGNAL_HEADER,
               1, to);
    if (threadIdx.x == 0)
        signal(a, EP_SIGNAL_ROWS, EP_CUDA_BATCH - n_rows, to);
    __syncthreads(); /* n_rows was read */
}

/* n_heads blocks, of which this is the one of that number, share the peers that are put to. */
DEVICE void put_headers(const ep_cuda_args &a, uint32_t n_tokens, uint32_t epoch, uint32_t number)
{
    uint32_t n = 0;

    for (uint32_t i = 1; i < a.n_ranks; i++) {
        const uint32_t to = (a.rank + i) % a.n_ranks;

        if (!is_direct(a, to) && n++ % a.n_heads == number)
            put_header(a, n_tokens, epoch, to);
    }
}

/* Where the row of an own token waits to be put, weights first. */
DEVICE uint64_t stage_at(const ep_cuda_args &a, uint32_t slot)
{
    return a.at_stage_rows + (uint64_t)(slot - a.group * a.max_tokens) / a.tp * a.row_pitch;
}

/* By a whole block, which has staged the row behind a barrier, to the ranks of a bit mask that
 * begins with rank `first`. */
DEVICE void put_row_to(const ep_cuda_args &a, uint32_t ranks, uint32_t first, uint32_t slot)
{
    for (uint32_t m = ranks; m; m &= m - 1)
        put_signal(a, a.at_rows + (uint64_t)slot * a.row_pitch, stage_at(a, slot), a.row_bytes,
                   EP_SIGNAL_ROWS, 1, first + (uint32_t)__ffs((int)m) - 1);
}

/* By a whole block: all rows that a rank puts in this dispatch. */
DEVICE void await_rows(const ep_cuda_args &a, uint32_t source, uint32_t epoch)
{
    if (threadIdx.x == 0)
        await_signal(a, EP_SIGNAL_ROWS, source, (uint64_t)epoch * EP_CUDA_BATCH, EP_FAULT_DISPATCH);
    __syncthreads(); /* what one thread saw, all may read */
}

/* ---- combine ----------------------------------------------------------------------------- */

/* Where the results for a token of another rank wait to be put: one for each choice when exact. */
template <bool EXACT>
DEVICE uint64_t results_stage_at(const ep_cuda_args &a, uint32_t group, uint32_t t)
{
    return a.at_stage_results +
           (uint64_t)(group * a.max_tokens + t) * (EXACT ? a.top_k : 1) * a.result_pitch;
}

/* By a whole block, which has staged vectors `begin` to `end` of the results: those of the choices
 * in a bit mask, or their sum, which lands at ordinal. */
template <bool EXACT>
DEVICE void put_results(const ep_cuda_args &a, uint32_t group, uint32_t t, uint32_t choices,
                        uint32_t ordinal, uint32_t begin, uint32_t end)
{
    const uint32_t owner = group * a.tp + t % a.tp;

    __syncthreads(); /* all of the part before it is put */
    for (uint32_t m = EXACT ? choices : 1; m; m &= m - 1) {
        const uint32_t k = (uint32_t)__ffs((int)m) - 1;

        put_signal(a, result_at(a, t, EXACT ? k : ordinal) + begin * VECTOR,
                   results_stage_at<EXACT>(a, group, t) + (uint64_t)k * a.result_pitch +
                       begin * VECTOR,
                   (end - begin) * VECTOR, EP_SIGNAL_RESULTS, 1, owner);
    }
}

/* By one thread: makes what the puts of this combine add up to one batch, also where nothing is
 * returned. The peer has told with its tokens how many there are. */
template <bool EXACT> DEVICE void signal_results(const ep_cuda_args &a, uint32_t to)
{
    const uint4 header = load_packet(a, place(a, a.rank, count_at(a, 0, to)));

    signal(a, EP_SIGNAL_RESULTS, EP_CUDA_BATCH - (EXACT ? header.z : header.y) * gridDim.y, to);
}

#endif
