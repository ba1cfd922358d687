/* Dispatch, sending: a block takes a token, makes its row in registers and stores it to every rank
 * that has one of its experts. */
#include "ep/cuda/device.cuh"

/* ---- where a token goes ------------------------------------------------------------------ */

/* One lane a choice k: the expert and its rank, or -1; ranks: bit mask of all lanes' ranks below
 * 32, the first word of the token's mask of ranks. */
typedef struct choice {
    int32_t expert, rank;
    float weight;
    uint32_t ranks;
} choice;

static_assert(sizeof(ep_cuda_args) <= 4096, "what every driver takes as a kernel's arguments");

/* Word w of the mask, which has n_rank_words. By a whole warp. */
DEVICE uint32_t word_of_ranks(const choice &c, uint32_t w)
{
    const uint32_t rank = (uint32_t)c.rank; /* -1 is in no word */

    return __reduce_or_sync(ALL_LANES, rank / WARP == w ? 1u << rank % WARP : 0);
}

DEVICE uint32_t ranks_of(const choice &c, uint32_t w)
{
    return w == 0 ? c.ranks : word_of_ranks(c, w);
}

template <typename ARGS> DEVICE choice choose(const ARGS &a, uint32_t t, uint32_t lane)
{
    choice c = { -1, -1, 0.0f, 0 };

    if (lane < a.top_k) {
        c.expert = load_shallow(a.expert + t * a.top_k + lane);
        c.weight = load_shallow(a.weight + t * a.top_k + lane);
    }
    return c;
}

/* After the loads of choose: nothing here waits for memory twice. */
DEVICE void find_ranks(const ep_cuda_args &a, choice *c)
{
    if (c->expert < -1 || c->expert >= (int32_t)a.n_experts) {
        report(a, EP_FAULT_EXPERT, c->expert);
        c->expert = -1;
    }
    __syncwarp();
    c->rank = c->expert >= 0 ? rank_of(a, c->expert) : -1;
    c->ranks = word_of_ranks(*c, 0);
}

/* ---- headers ----------------------------------------------------------------------------- */

/* From each lane that has a place for them. */
DEVICE void send_weights(const ep_cuda_args &a, const choice &c, uint32_t epoch, uint8_t *to)
{
#pragma unroll 1
    for (uint32_t i = 0; i < a.n_weight_packets; i++) {
        const float w0 = __shfl_sync(ALL_LANES, c.weight, 3 * i);
        const float w1 = __shfl_sync(ALL_LANES, c.weight, 3 * i + 1);
        const float w2 = __shfl_sync(ALL_LANES, c.weight, 3 * i + 2);

        if (to)
            store_relaxed(to + i * VECTOR, make_uint4(__float_as_uint(w0), __float_as_uint(w1),
                                                      __float_as_uint(w2), epoch));
    }
}

/* Of a lane's rank among those of the token: how many are below it. */
template <typename ARGS> DEVICE uint32_t ordinal_of(const ARGS &a, const choice &c)
{
    uint32_t n = 0;

    for (uint32_t w = 0; w < a.n_rank_words; w++) {
        const uint32_t n_below = (uint32_t)max(c.rank - (int32_t)(w * WARP), 0);
        n += (uint32_t)__popc(ranks_of(c, w) & (__funnelshift_lc(0, 1, n_below) - 1));
    }
    return n;
}

template <typename ARGS> DEVICE uint32_t count_ranks(const ARGS &a, const choice &c)
{
    uint32_t n = 0;

    for (uint32_t w = 0; w < a.n_rank_words; w++)
        n += (uint32_t)__popc(ranks_of(c, w));
    return n;
}

/* By one warp. Every rank hears of every token, or it would wait for those that do not go there:
 * from the first lane of its choices, or else from the lane that bears its number, modulo 32. Also
 * keeps the routing for combine_recv. */
template <typename ARGS>
DEVICE void send_header(const ARGS &a, const choice &c, uint32_t t, uint32_t epoch, uint32_t lane)
{
    const uint32_t slot = a.group * a.max_tokens + t;
    const uint32_t same = __match_any_sync(ALL_LANES, c.rank);
    const bool goes =
        c.rank >= 0 && (int)lane == __ffs((int)same) - 1 && is_direct(a, (uint32_t)c.rank);
    const uint32_t local = (uint32_t)(c.expert - c.rank * (int32_t)a.n_local);
    const uint32_t byte = c.rank >= 0 ? (local ^ EP_CUDA_NO_EXPERT) << 8 * (lane % 4) : 0;
    const uint32_t ordinal = ordinal_of(a, c), n_ranks = count_ranks(a, c);
    const uint64_t at = ids_at(a, a.group, t * a.n_id_packets);

    for (uint32_t i = 0; i < a.n_id_packets; i++) {
        const uint32_t x = __reduce_or_sync(same, lane / 4 == 2 * i ? byte : 0);
        const uint32_t y = __reduce_or_sync(same, lane / 4 == 2 * i + 1 ? byte : 0);

        if (goes)
            store_relaxed(place(a, (uint32_t)c.rank, at + i * VECTOR),
                          make_uint4(~x, ~y, ordinal, epoch));
    }
    for (uint32_t w = 0; w < a.n_rank_words; w++) {
        const uint32_t rank = w * WARP + lane, goes_to = ranks_of(c, w);

        if (rank < a.n_ranks && !(goes_to >> lane & 1) && is_direct(a, rank))
            for (uint32_t i = 0; i < a.n_id_packets; i++)
                store_relaxed(place(a, rank, at + i * VECTOR), make_uint4(~0u, ~0u, 0, epoch));
    }
    __syncwarp();
    send_weights(a, c, epoch, goes ? place(a, (uint32_t)c.rank, weights_at(a, slot, 0)) : NULL);
    if (lane < a.top_k) {
        a.kept_expert[t * a.top_k + lane] = c.expert;
        a.kept_weight[t * a.top_k + lane] = c.weight;
    }
    if (lane == 0)
        a.kept_ranks[t] = n_ranks;
    if (PUTS) {
        const bool put = c.rank >= 0 && !is_direct(a, (uint32_t)c.rank);
        const uint32_t landing = a.n_weight_packets ? ordinal : lane; /* partial, exact */
        const uint32_t slots = __reduce_or_sync(ALL_LANES, put ? 1u << landing : 0);

        if (lane == 0)
            a.kept_puts[t] = slots;
    }
}

/* ---- rows -------------------------------------------------------------------------------- */

/* A vector of a row and, in each warp's first lane, the four scales of the warp's 512 values. */
typedef struct piece {
    uint4 payload, scales;
} piece;

typedef struct source {
    uint4 v[4]; /* 16 bytes raw, 16 values of bf16 or f32 */
} source;

template <ep_cuda_input INPUT, typename ARGS>
DEVICE source load_source(const ARGS &a, uint32_t t, uint32_t v)
{
    const uint32_t n = INPUT == EP_INPUT_RAW ? 1 : INPUT == EP_INPUT_BF16 ? 2 : 4;
    const uint32_t row_bytes = INPUT == EP_INPUT_RAW ? a.payload_bytes : a.hidden * n;
    const uint8_t *row = (const uint8_t *)a.x + (uint64_t)t * row_bytes;
    source s;

#pragma unroll
    for (uint32_t i = 0; i < n; i++)
        s.v[i] = get_vector(row, (v * n + i) * VECTOR, row_bytes, a.wide);
    return s;
}

/* The smallest power of two that is not below x; x > 0 and finite. */
DEVICE float power_of_two_above(float x)
{
    const uint32_t bits = __float_as_uint(x);

    if (bits < 0x800000u) /* subnormal: the bits are a whole number of 2^-149 */
        return __uint_as_float(bits <= 1 ? bits : 1u << (32 - __clz((int)(bits - 1))));
    return __uint_as_float((bits + 0x7fffffu) & 0xff800000u);
}

DEVICE uint32_t e4m3_pair(float low, float high)
{
    uint16_t pair;

    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

DEVICE float bf16_round(float x)
{
    return __uint_as_float(bf16_pair(0.0f, x));
}

template <ep_cuda_input INPUT> DEVICE void widen(const source &s, float f[16])
{
    if constexpr (INPUT == EP_INPUT_BF16) {
        widen_bf16(s.v[0], f);
        widen_bf16(s.v[1], f + 8);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            f[4 * i] = bf16_round(__uint_as_float(s.v[i].x));
            f[4 * i + 1] = bf16_round(__uint_as_float(s.v[i].y));
            f[4 * i + 2] = bf16_round(__uint_as_float(s.v[i].z));
            f[4 * i + 3] = bf16_round(__uint_as_float(s.v[i].w));
        }
    }
}

/* Eight lanes hold a group of 128 values. To the bit the quantisation of ops. */
template <ep_cuda_input INPUT> DEVICE piece quantise(const ep_cuda_args &a, const source &s)
{
    float f[16], amax = 0.0f, scale, inverse;
    uint32_t word[4], bits;
    piece p;

    widen<INPUT>(s, f);
#pragma unroll
    for (int i = 0; i < 16; i++)
        amax = fmaxf(amax, fabsf(f[i]));
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2)
        amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, distance));
    scale = __fdiv_rn(amax, 448.0f);
    scale = amax == 0.0f ? 1.0f : a.ue8m0 ? power_of_two_above(scale) : scale;
    inverse = __frcp_rn(scale);
#pragma unroll
    for (int i = 0; i < 16; i++) /* a tiny scale has no finite inverse; zeros stay zeros */
        f[i] = f[i] == 0.0f ? f[i] : __fmul_rn(f[i], inverse);
#pragma unroll
    for (int i = 0; i < 4; i++)
        word[i] = e4m3_pair(f[4 * i], f[4 * i + 1]) | e4m3_pair(f[4 * i + 2], f[4 * i + 3]) << 16;
    p.payload = make_uint4(word[0], word[1], word[2], word[3]);
    bits = __float_as_uint(scale);
    p.scales = make_uint4(__shfl_sync(ALL_LANES, bits, 0), __shfl_sync(ALL_LANES, bits, 8),
                          __shfl_sync(ALL_LANES, bits, 16), __shfl_sync(ALL_LANES, bits, 24));
    return p;
}

/* FP8 with scales, or values that travel as they are. */
DEVICE piece pass_on(const ep_cuda_args &a, const source &s, uint32_t t, uint32_t v, uint32_t lane)
{
    uint32_t word[4] = { 0, 0, 0, 0 };
    piece p;

    p.payload = s.v[0];
    if (a.n_cols > 0 && lane == 0)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            if (v / 8 + i < a.n_cols)
                word[i] =
                    __float_as_uint(load_shallow(a.x_scale + (uint64_t)t * a.n_cols + v / 8 + i));
    p.scales = make_uint4(word[0], word[1], word[2], word[3]);
    return p;
}

template <ep_cuda_input INPUT>
DEVICE piece make_piece(const ep_cuda_args &a, const source &s, uint32_t t, uint32_t v,
                        uint32_t lane)
{
    piece p;

    if (INPUT == EP_INPUT_RAW)
        p = pass_on(a, s, t, v, lane);
    else
        p = quantise<INPUT>(a, s);
    p.payload = without_poison(p.payload, a.poison_substitute);
    p.scales = without_poison(p.scales, POISON - 1); /* another NaN */
    return p;
}

DEVICE void store_piece(const ep_cuda_args &a, const piece &p, uint8_t *row, uint32_t v,
                        uint32_t lane)
{
    if (v < a.n_vectors)
        store_relaxed(row + v * VECTOR, p.payload);
    if (lane == 0 && a.n_cols > 0)
        store_relaxed(row + a.scale_at + v / WARP * VECTOR, p.scales);
}

/* Whether the token goes to ranks that are put to. By a whole warp. */
template <typename ARGS> DEVICE bool has_puts(const ARGS &a, const choice &c)
{
    uint32_t any = 0;

    for (uint32_t w = 0; PUTS && w < a.n_rank_words; w++)
        any |= ranks_of(c, w) & ~a.stores[w];
    return any != 0;
}

/* For puts, which the same block reads: plain stores stay near. */
DEVICE void stage_piece(const ep_cuda_args &a, const piece &p, uint8_t *row, uint32_t v,
                        uint32_t lane)
{
    if (v < a.n_vectors)
        store_plain(row + v * VECTOR, p.payload);
    if (lane == 0 && a.n_cols > 0)
        store_plain(row + a.scale_at + v / WARP * VECTOR, p.scales);
}

/* Beginning with the rank behind this one, so that ranks begin differently; of its 32 this rank
 * comes last: its own memory is near. */
template <typename ARGS>
DEVICE void store_everywhere(const ARGS &a, const choice &c, const piece &p, uint32_t slot,
                             uint32_t v, uint32_t lane)
{
    const uint32_t behind = a.rank + 1;

    if (has_puts(a, c))
        stage_piece(a, p, place(a, a.rank, stage_at(a, slot)) + a.n_weight_packets * VECTOR, v,
                    lane);
    for (uint32_t i = 0; i < a.n_rank_words; i++) {
        const uint32_t w = a.n_rank_words == 1 ? 0 : (a.rank / WARP + i) % a.n_rank_words;
        const uint32_t ranks = ranks_of(c, w) & (PUTS ? a.stores[w] : ~0u);

#pragma unroll 1
        for (uint32_t m = __funnelshift_r(ranks, ranks, behind); m; m &= m - 1) {
            const uint32_t bit = ((uint32_t)__ffs((int)m) - 1 + behind) % WARP;
            store_piece(a, p, place(a, w * WARP + bit, row_at(a, slot)), v, lane);
        }
    }
}

/* By a whole block, which has made the row: once for each rank that is not stored to. */
template <typename ARGS>
DEVICE void put_row(const ARGS &a, const choice &c, uint32_t slot, uint32_t epoch)
{
    if (!has_puts(a, c))
        return;
    __syncthreads(); /* the whole row before it is put */
    for (uint32_t w = 0; w < a.n_rank_words; w++)
        put_row_to(a, ranks_of(c, w) & ~a.stores[w], w * WARP, slot, epoch);
}

/* ---- the kernel ---------------------------------------------------------------------------- */

/* The token count of this rank goes to every rank: also from a rank without tokens. */
DEVICE void send_counts(const ep_cuda_args &a, uint32_t n_tokens, uint32_t epoch)
{
    for (uint32_t r = threadIdx.x; r < a.n_ranks; r += blockDim.x)
        if (is_direct(a, r))
            store_relaxed(place(a, r, count_at(a, 0, a.rank)),
                          make_uint4(n_tokens, a.bound, 0, epoch));
    if (threadIdx.x == 0) {
        *a.kept_count = n_tokens;
        a.state->combine_epoch = epoch - 1;
        if (a.in_flagged_group) { /* the next one with flags counts from where this epoch ends */
            a.state->n_sent += EP_CUDA_DONE;
            a.state->n_laid_out += EP_CUDA_DONE;
        }
    }
}

DEVICE uint32_t valid_tokens(const ep_cuda_args &a, int32_t n)
{
    if (n >= 0 && (uint32_t)n <= a.bound)
        return (uint32_t)n;
    if (threadIdx.x == 0 && blockIdx.x == 0)
        report(a, EP_FAULT_TOKENS, n);
    return 0;
}

/* With flags, headers come first: the receivers lay out their rows while these are under way. */
template <typename ARGS>
DEVICE void send_headers_first(const ARGS &a, uint32_t n_tokens, uint32_t epoch)
{
    const uint32_t lane = threadIdx.x % WARP, n_warps = blockDim.x / WARP * gridDim.x;

    for (uint32_t t = a.replica + (blockIdx.x + threadIdx.x / WARP * gridDim.x) * a.tp;
         t < n_tokens; t += n_warps * a.tp) {
        choice c = choose(a, t, lane);
        find_ranks(a, &c);
        send_header(a, c, t, epoch, lane);
    }
}

/* Orders the row before its flags: the barrier puts the stores of the block before one warp's
 * release, which is cumulative, and which the others do not wait for. */
template <typename ARGS>
DEVICE void send_flags(const ARGS &a, const choice &c, uint32_t slot, uint32_t epoch, bool last)
{
    const uint32_t lane = threadIdx.x % WARP;

    __syncthreads();
    for (uint32_t w = 0; last && w < a.n_rank_words; w++)
        if ((ranks_of(c, w) >> lane & 1) && is_direct(a, w * WARP + lane))
            store_release((uint32_t *)place(a, w * WARP + lane, a.at_flags + slot * 4ull), epoch);
}

/* Rows in place: by a whole block, when it has stored all of its rows. One release stands for all,
 * where a flag a row would make each wait for the last. */
DEVICE void tell_sent(const ep_cuda_args &a)
{
    for (uint32_t r = threadIdx.x; r < a.n_ranks; r += blockDim.x)
        if (is_direct(a, r))
            add_release((uint32_t *)place(a, r, a.at_sent + a.rank * 4ull), block_share());
}

/* The last warp sends the header, or the flags, while the others make rows. A block (t, y) begins
 * with token t and makes part y of its rows; with flags there is one part. The loads of the first
 * token are under way before its existence is known. */
template <ep_cuda_input INPUT, bool FLAGS, typename ARGS>
static __global__ void __launch_bounds__(EP_CUDA_THREADS + WARP,
                                         blocks_that_fit(EP_CUDA_THREADS + WARP,
                                                         FLAGS &&INPUT != EP_INPUT_F32 ? 3 : 2))
    dispatch_send_kernel(const __grid_constant__ ARGS a)
{
    const uint32_t lane = threadIdx.x % WARP, first = threadIdx.x - lane;
    const uint32_t row_threads = blockDim.x - WARP;
    const uint32_t begin = blockIdx.y * a.part_vectors + first;
    const uint32_t end = min((blockIdx.y + 1) * a.part_vectors, a.n_vectors);
    const bool last = first == row_threads;
    const uint32_t n_row_blocks = gridDim.x - (PUTS ? a.n_heads : 0), step = n_row_blocks * a.tp;
    uint32_t t = a.replica + blockIdx.x * a.tp, n_tokens = 0, epoch = 0;
    const bool heads = PUTS && blockIdx.x >= n_row_blocks; /* puts headers, takes no token */
    token_ids first_ids = {};

    wait_predecessor();
    let_successor_start();
    dawdle(a, 0);
    if (heads && first_own(a) < a.n_readable)
        first_ids = load_ids(a, first_own(a), 0);
    for (bool known = false;; t += step, known = true) {
        const uint32_t slot = a.group * a.row_slots + t; /* of the row */
        const bool loads = known ? t < n_tokens : !heads && t < a.n_readable;
        choice c = { -1, -1, 0.0f, 0 };
        source s = {};

        if (loads) {
            c = choose(a, t, lane);
            if (!last && begin + lane < end)
                s = load_source<INPUT>(a, t, begin + lane);
        }
        if (!known) {
            const uint32_t failed = load_word(a.error);
            const int32_t n = load_shallow(a.n_tokens);

            epoch = load_word(&a.state->dispatch_epoch) + 1;
            if (failed)
                return;
            n_tokens = valid_tokens(a, n);
            if (blockIdx.x == 0 && blockIdx.y == 0)
                send_counts(a, n_tokens, epoch);
            if (FLAGS)
                send_headers_first(a, n_tokens, epoch);
            if (heads) {
                put_headers(a, first_ids, first_own(a) < a.n_readable, n_tokens, epoch,
                            blockIdx.x - n_row_blocks);
                break;
            }
        }
        if (t >= n_tokens)
            break;
        if (!loads) { /* rows that could not be read early */
            c = choose(a, t, lane);
            if (!last && begin + lane < end)
                s = load_source<INPUT>(a, t, begin + lane);
        }
        find_ranks(a, &c);
        if (!FLAGS && last && blockIdx.y == 0)
            send_header(a, c, t, epoch, lane);
        if (PUTS && last && has_puts(a, c))
            send_weights(a, c, epoch, lane == 0 ? place(a, a.rank, stage_at(a, slot)) : NULL);
#pragma unroll 1
        for (uint32_t base = begin; !last && base < end; base += row_threads) {
            if ((FLAGS || PUTS) && base != begin) {
                s = source{};
                if (base + lane < end)
                    s = load_source<INPUT>(a, t, base + lane);
            }
            store_everywhere(a, c, make_piece<INPUT>(a, s, t, base, lane), slot, base + lane, lane);
        }
        if (PUTS)
            put_row(a, c, slot, epoch);
        if (FLAGS && !a.in_place)
            send_flags(a, c, slot, epoch, last);
    }
    if (!FLAGS)
        return;
    __syncthreads(); /* all of the block's rows come before what is told of them */
    if (a.in_place)
        tell_sent(a);
    else if (threadIdx.x == 0) /* fan_out waits for this instead of the kernel's end */
        count_block(&a.state->n_sent);
}

template <ep_cuda_input INPUT, typename ARGS>
static cudaError_t launch_for(const ep_cuda_args *a, bool flags, const ep_cuda_launch *l)
{
    return launch(flags ? (const void *)dispatch_send_kernel<INPUT, true, ARGS>
                        : (const void *)dispatch_send_kernel<INPUT, false, ARGS>,
                  a, l);
}

cudaError_t yard_ep_cuda_launch_dispatch_send(const ep_cuda_args *a, ep_cuda_input input,
                                              bool flags, const ep_cuda_launch *l)
{
    if (input == EP_INPUT_F32)
        return launch_for<EP_INPUT_F32, ep_cuda_args>(a, flags, l);
    if (input == EP_INPUT_BF16)
        return is_common(a) ? launch_for<EP_INPUT_BF16, ep_cuda_common>(a, flags, l)
                            : launch_for<EP_INPUT_BF16, ep_cuda_args>(a, flags, l);
    return is_common(a) ? launch_for<EP_INPUT_RAW, ep_cuda_common>(a, flags, l)
                        : launch_for<EP_INPUT_RAW, ep_cuda_args>(a, flags, l);
}
