/* The CUDA backend: limits, memory, errors. */
#include <stdio.h>
#include <stdlib.h>

#include "ep/cuda/group.h"

/* A warp's 512 bytes cross to a peer as four lines, but as five where they begin within one. So
 * places of rows, and rows, begin with a line (as long as the group's part of the heap does). */
enum { VECTOR_BYTES = 16, LINE_BYTES = 128 };

static size_t align_line(size_t n_bytes)
{
    return yard_align_up(n_bytes, LINE_BYTES);
}

/* ---- limits ------------------------------------------------------------------------------- */

static yard_status check(const yard_ep *ep, yard_error *err)
{
    if (ep->n_ranks > EP_CUDA_MAX_RANKS)
        return yard_fail(err, YARD_ENOTSUP, "ep on cuda: want at most %d ranks, got %u",
                         EP_CUDA_MAX_RANKS, ep->n_ranks);
    if (ep->n_local > EP_CUDA_MAX_LOCAL)
        return yard_fail(err, YARD_ENOTSUP,
                         "ep on cuda: n_experts: want at most %d on each of %u ranks, got %u",
                         EP_CUDA_MAX_LOCAL, ep->n_ranks, ep->n_local);
    if ((uint64_t)ep->dp * ep->dp * ep->config.max_tokens > UINT32_MAX) /* see quotient() */
        return yard_fail(
            err, YARD_ENOTSUP,
            "ep on cuda: max_tokens: want at most 2^32 / %u^2 for %u instances, got %u", ep->dp,
            ep->dp, ep->config.max_tokens);
    if (ep->config.node_copies || ep->config.expert_y_in_place)
        return yard_fail(err, YARD_ENOTSUP,
                         "ep on cuda: node_copies, expert_y_in_place: want false, got true");
    return YARD_OK;
}

/* ---- the heap ----------------------------------------------------------------------------- */

/* Sizes and what else follows from the config. puts: some peers are put to. */
static void describe_rows(const yard_ep *ep, bool puts, ep_cuda_args *a)
{
    const yard_ep_config *c = &ep->config;
    const uint32_t values = c->combine == YARD_EP_BF16 ? 8 : 4; /* of a vector */

    a->rank = ep->rank;
    a->n_ranks = ep->n_ranks;
    a->n_rank_words = yard_ceil_div(ep->n_ranks, 32);
    a->tp = c->tp;
    a->dp = ep->dp;
    a->group = ep->group;
    a->replica = ep->replica;
    a->n_experts = c->n_experts;
    a->n_local = ep->n_local;
    a->top_k = c->top_k;
    a->hidden = c->hidden;
    a->max_tokens = c->max_tokens;
    a->row_align = c->row_align;
    a->n_id_packets = yard_ceil_div(c->top_k, 8);
    a->n_weight_packets = c->mode == YARD_EP_PARTIAL ? yard_ceil_div(c->top_k, 3) : 0;
    a->payload_bytes = (uint32_t)ep->payload_bytes;
    a->n_vectors = yard_ceil_div(a->payload_bytes, VECTOR_BYTES);
    a->n_cols = c->dispatch == YARD_EP_FP8 ? ep->n_groups_cols : 0;
    a->scale_at = a->n_vectors * VECTOR_BYTES;
    a->row_bytes = a->scale_at + yard_ceil_div(a->n_cols, 4) * VECTOR_BYTES;
    if (puts) {
        a->row_bytes += a->n_weight_packets * VECTOR_BYTES;
        a->header_pitch = (uint32_t)align_line(
            (1 + yard_ceil_div(c->max_tokens, c->tp) * a->n_id_packets) * VECTOR_BYTES);
    }
    a->row_pitch = (uint32_t)align_line(a->row_bytes);
    a->result_bytes = c->hidden * (c->combine == YARD_EP_BF16 ? 2 : 4);
    a->n_result_vectors = yard_ceil_div(a->result_bytes, VECTOR_BYTES);
    a->result_pitch = (uint32_t)align_line(a->n_result_vectors * VECTOR_BYTES);
    a->output_pitch = (uint32_t)align_line((size_t)a->n_result_vectors * values *
                                           (c->output == YARD_EP_BF16 ? 2 : 4));
    a->poison_substitute = c->dispatch == YARD_EP_FP8    ? 0x7f7f7f7fu
                           : c->dispatch == YARD_EP_BF16 ? 0xfffefffeu
                                                         : 0xfffffffeu;
    a->flat = c->layout == YARD_EP_FLAT;
    a->in_place = c->layout == YARD_EP_FLAT_IN_PLACE;
    a->ue8m0 = c->ue8m0;
    a->output_bf16 = c->output == YARD_EP_BF16;
    a->bound = c->max_tokens;
    a->by_local = ep_cuda_divide_by(ep->n_local);
    a->by_dp = ep_cuda_divide_by(ep->dp);
    a->by_bound = ep_cuda_divide_by(a->bound);
    a->row_slots = c->max_tokens;
}

/* Tokens whose rows can prove themselves. Rows in place cannot: who reads them last, the caller's
 * kernels, would have to poison them again. */
static uint32_t most_self_proving(const yard_ep *ep, const ep_cuda_args *a)
{
    const uint32_t most = a->in_place ? 0 : EP_CUDA_MAX_SELF_PROVING / (ep->dp * a->n_id_packets);

    return most < ep->config.self_proving_tokens ? most : ep->config.self_proving_tokens;
}

/* Rows that prove themselves have places of their own where others have flags: only there are
 * places poisoned again. Weights lie with rows that are put, and few tokens gain little there. */
static uint32_t few_tokens(const yard_ep *ep, bool puts, const ep_cuda_args *a)
{
    const uint32_t most = most_self_proving(ep, a);

    return puts || ep->config.max_tokens <= most ? 0 : most;
}

static yard_sym take(yard_sym *at, uint64_t n_bytes)
{
    const yard_sym place = *at;

    *at += align_line(n_bytes);
    return place;
}

/* What puts need beside the landing places: signals, and the memory that they take from. Headers
 * and rows land in one piece. */
static void lay_out_puts(const yard_ep *ep, ep_cuda_args *a, yard_sym *at)
{
    const uint64_t slots = (uint64_t)a->dp * a->max_tokens;
    const uint64_t headers = (uint64_t)a->n_ranks * a->header_pitch;
    const uint64_t own = yard_ceil_div(a->max_tokens, a->tp);
    const uint32_t results = ep->config.mode == YARD_EP_EXACT ? a->top_k : 1; /* of a token */

    a->at_signals =
        take(at, (2u * a->n_ranks + slots + (uint64_t)a->max_tokens * a->top_k) * sizeof(uint64_t));
    a->at_ids = take(at, headers);
    a->at_stage_headers = take(at, headers);
    a->at_stage_rows = take(at, own * a->row_pitch);
    a->at_stage_results = take(at, slots * results * a->result_pitch);
}

static void lay_out_heap(const yard_ep *ep, bool puts, ep_cuda_args *a, yard_sym *at)
{
    const uint64_t slots = (uint64_t)a->dp * a->max_tokens;

    a->at_count[0] = take(at, (uint64_t)a->n_ranks * VECTOR_BYTES);
    a->at_count[1] = take(at, (uint64_t)a->n_ranks * VECTOR_BYTES);
    if (puts)
        lay_out_puts(ep, a, at);
    else
        a->at_ids = take(at, slots * a->n_id_packets * VECTOR_BYTES);
    a->at_weights = take(at, puts ? 0 : slots * a->n_weight_packets * VECTOR_BYTES);
    a->at_flags = take(at, a->in_place ? 0 : slots * sizeof(uint32_t));
    a->at_sent = take(at, a->in_place ? a->n_ranks * sizeof(uint32_t) : 0);
    a->at_rows = take(at, slots * a->row_pitch);
    a->at_few_rows = take(at, (uint64_t)a->dp * few_tokens(ep, puts, a) * a->row_pitch);
    a->at_results = take(at, (uint64_t)a->max_tokens * a->top_k * a->result_pitch);
    a->at_outputs = take(at, a->tp > 1 ? (uint64_t)a->max_tokens * a->output_pitch : 0);
}

/* Stores need no staging: for them copies is true. */
static size_t heap_bytes(const yard_ep *ep, bool copies)
{
    ep_cuda_args a = { 0 };
    yard_sym at = 0;

    describe_rows(ep, !copies, &a);
    for (uint32_t i = 0; i < ep->config.n_rounds; i++)
        lay_out_heap(ep, !copies, &a, &at);
    return at;
}

/* ---- own memory --------------------------------------------------------------------------- */

/* Called twice: to measure, then to place. */
static void lay_out_own(ep_cuda_args *a, yard_arena *arena)
{
    const size_t slots = (size_t)a->dp * a->max_tokens, t = a->max_tokens;

    a->state = yard_arena_take(arena, sizeof(*a->state));
    a->error = yard_arena_take(arena, sizeof(*a->error));
    a->kept_expert = yard_arena_take(arena, t * a->top_k * sizeof(*a->kept_expert));
    a->kept_weight = yard_arena_take(arena, t * a->top_k * sizeof(*a->kept_weight));
    a->kept_ranks = yard_arena_take(arena, t * sizeof(*a->kept_ranks));
    a->kept_puts = yard_arena_take(arena, t * sizeof(*a->kept_puts));
    a->kept_count = yard_arena_take(arena, sizeof(*a->kept_count));
    a->row_map = yard_arena_take(arena, slots * a->top_k * sizeof(*a->row_map));
    a->ordinal = yard_arena_take(arena, slots * sizeof(*a->ordinal));
    a->arrived = yard_arena_take(arena, a->dp * sizeof(*a->arrived));
    a->flat_row = yard_arena_take(arena, a->flat ? slots * sizeof(*a->flat_row) : 0);
}

static yard_status device_failed(const ep_cuda *cu, cudaError_t rc, const char *what,
                                 yard_error *err)
{
    return yard_fail(err, rc == cudaErrorMemoryAllocation ? YARD_ENOMEM : YARD_EDEVICE,
                     "ep on cuda: device %d: %s: %s", cu->device, what, cudaGetErrorString(rc));
}

static yard_status allocate(yard_ep *ep, ep_cuda *cu, yard_error *err)
{
    const uint32_t n_rounds = ep->config.n_rounds;
    yard_arena arena = { 0 };
    cudaError_t rc;

    for (uint32_t i = 0; i < n_rounds; i++)
        lay_out_own(&cu->rounds[i].args, &arena);
    rc = cudaMalloc(&cu->memory, arena.used_bytes);
    if (rc == cudaSuccess)
        rc = cudaMemset(cu->memory, 0, arena.used_bytes);
    if (rc == cudaSuccess)
        rc = cudaDeviceSynchronize();
    if (rc != cudaSuccess)
        return device_failed(cu, rc, "memory of the rounds", err);
    arena = (yard_arena){ .base = cu->memory, .size_bytes = arena.used_bytes };
    for (uint32_t i = 0; i < n_rounds; i++) {
        lay_out_own(&cu->rounds[i].args, &arena);
        cu->rounds[i].args.error = cu->rounds[0].args.error; /* one of the group */
    }
    rc = cudaHostAlloc((void **)&cu->error, sizeof(*cu->error), cudaHostAllocMapped);
    if (rc != cudaSuccess)
        return device_failed(cu, rc, "host memory", err);
    *cu->error = (ep_cuda_error){ 0 };
    return YARD_OK;
}

/* ---- peers -------------------------------------------------------------------------------- */

/* Ranks of an instance are on one node: their finished rows are always stored. */
static bool is_sibling(const yard_ep *ep, uint32_t rank)
{
    return rank / ep->config.tp == ep->group;
}

static yard_status find_peers(const yard_ep *ep, ep_cuda *cu, ep_cuda_args *a, yard_error *err)
{
    cu->n_put = 0;
    for (uint32_t r = 0; r < ep->n_ranks; r++) {
        const bool stores = is_sibling(ep, r) || !yard_fabric_only_puts(ep->fabric);

        a->heap[r] = stores ? yard_fabric_device_heap(ep->fabric, r) : NULL;
        if (!a->heap[r] && is_sibling(ep, r))
            return yard_fail(err, YARD_ENOTSUP,
                             "ep on cuda: rank %u of the same instance: no stores reach its memory",
                             r);
        a->stores[r / 32] |= a->heap[r] ? UINT32_C(1) << r % 32 : 0;
        cu->n_put += !a->heap[r];
    }
    return YARD_OK;
}

static yard_status prepare_rounds(yard_ep *ep, ep_cuda *cu, yard_error *err)
{
    const uint64_t timeout_us =
        yard_fabric_deadline(ep->fabric, ep->config.timeout_us) - yard_now_us();
    const uint32_t *lost = yard_fabric_device_lost(ep->fabric, err);
    yard_sym at = ep->config.heap_at;
    yard_status st = lost ? YARD_OK : YARD_ENOMEM;

    for (uint32_t i = 0; i < ep->config.n_rounds && st == YARD_OK; i++) {
        ep_cuda_args *a = &cu->rounds[i].args;

        describe_rows(ep, cu->puts, a);
        a->timeout_ns = timeout_us * 1000;
        a->lost = lost;
        lay_out_heap(ep, cu->puts, a, &at);
        st = find_peers(ep, cu, a, err);
        ep->rounds[i].ep = ep;
    }
    if (st != YARD_OK)
        return st;
    st = allocate(ep, cu, err);
    for (uint32_t i = 0; st == YARD_OK && i < ep->config.n_rounds; i++)
        cu->rounds[i].args.host_error = cu->error;
    return st;
}

/* ---- open, close, errors -------------------------------------------------------------------- */

static yard_status open_device(ep_cuda *cu, yard_error *err)
{
    int n_sms = 0;
    cudaError_t rc = cudaGetDevice(&cu->device);

    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, cu->device);
    if (rc == cudaSuccess)
        rc = cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", (void **)&cu->address_range,
                                              12000, cudaEnableDefault, NULL);
    if (rc != cudaSuccess)
        return device_failed(cu, rc, "attributes", err);
    cu->n_sms = (uint32_t)n_sms;
    return YARD_OK;
}

static const ep_cuda_kernels storing_kernels = EP_CUDA_KERNELS;

static yard_status choose_kernels(const yard_ep *ep, ep_cuda *cu, yard_error *err)
{
    const yard_nvshmem *puts = yard_fabric_device_puts(ep->fabric);

    cu->puts = puts != NULL;
    cu->kernels = puts ? puts->kernels : &storing_kernels;
    if (cu->kernels->args_bytes != sizeof(ep_cuda_args))
        return yard_fail(err, YARD_ENOTSUP, "ep on cuda: libyard-ep-nvshmem is of another build");
    return YARD_OK;
}

static yard_status open_cuda(yard_ep *ep, yard_error *err)
{
    const yard_ep_config *c = &ep->config;
    ep_cuda *cu = ep->impl = calloc(1, sizeof(*cu));
    yard_status st;

    if (!yard_fabric_device_heap(ep->fabric, ep->rank))
        return yard_fail(err, YARD_EINVAL,
                         "ep on cuda: want a fabric over nvlink or nvshmem, or with "
                         "device_heap_bytes, got %s",
                         yard_fabric_transport(ep->fabric, NULL));
    ep->rounds = ep->block = calloc(c->n_rounds, sizeof(*ep->rounds));
    if (cu)
        cu->rounds = calloc(c->n_rounds, sizeof(*cu->rounds));
    if (!cu || !cu->rounds || !ep->rounds)
        return yard_fail(err, YARD_ENOMEM, "ep: %u rounds", c->n_rounds);
    st = open_device(cu, err);
    if (st == YARD_OK)
        st = choose_kernels(ep, cu, err);
    if (st == YARD_OK)
        st = prepare_rounds(ep, cu, err);
    if (st != YARD_OK)
        return st;
    cu->flags = c->max_tokens > most_self_proving(ep, &cu->rounds[0].args);
    cu->few_tokens = few_tokens(ep, cu->puts, &cu->rounds[0].args);
    return YARD_OK;
}

/* Kernels may still run, also for a failed group: they end within the deadline. */
static void close_cuda(yard_ep *ep)
{
    ep_cuda *cu = ep->impl;
    int current = 0;

    if (!cu)
        return;
    cudaGetDevice(&current);
    cudaSetDevice(cu->device);
    cudaDeviceSynchronize();
    cudaFree(cu->memory);
    cudaFreeHost(cu->error);
    cudaSetDevice(current);
    free(cu->rounds);
    free(cu);
    ep->impl = NULL;
}

static void say(yard_ep *ep, yard_status st, const char *call, const char *what, int value)
{
    const bool waited = st == YARD_ETIMEDOUT;
    const char *why = waited ? "the deadline passed" : "";
    char lost[48] = "";
    uint32_t first = 0;

    if (yard_fabric_poll(ep->fabric, &first) == YARD_EPEER) {
        snprintf(lost, sizeof(lost), "; lost first: rank %u", first);
        st = waited ? YARD_EPEER : st;
        why = waited ? "gave up" : "";
    }
    ep->status =
        yard_fail(&ep->err, st, "rank %u, %s: %s%s%d%s", ep->rank, call, why, what, value, lost);
}

static void look(yard_ep *ep)
{
    const ep_cuda *cu = ep->impl;
    const uint32_t what = *(volatile uint32_t *)&cu->error->what;
    const int value = *(volatile int32_t *)&cu->error->value;

    switch (what) {
    case EP_FAULT_NONE:
        return;
    case EP_FAULT_TOKENS:
        say(ep, YARD_EINVAL, "dispatch_send", "n_tokens: want 0 to max_tokens or the limit, got ",
            value);
        return;
    case EP_FAULT_EXPERT:
        say(ep, YARD_EINVAL, "dispatch_send", "expert: want -1 to n_experts - 1, got ", value);
        return;
    case EP_FAULT_LAYOUT:
        say(ep, YARD_ETIMEDOUT, "dispatch_recv", " in the layout of rank ", value);
        return;
    case EP_FAULT_LIMIT:
        say(ep, YARD_EINVAL, "dispatch_recv", "another limit of tokens than here has rank ", value);
        return;
    case EP_FAULT_DISPATCH:
        say(ep, YARD_ETIMEDOUT, "dispatch_recv", " waiting for rank ", value);
        return;
    case EP_FAULT_COMBINE:
        say(ep, YARD_ETIMEDOUT, "combine_recv", " waiting for rank ", value);
        return;
    case EP_FAULT_RESULT:
        say(ep, YARD_ETIMEDOUT, "combine_recv", ": no result for token ", value);
        return;
    default:
        say(ep, YARD_ETIMEDOUT, "combine_recv", ": no finished row from rank ", value);
    }
}

static const void *expert_x(const yard_ep_round *round, size_t *pitch_bytes, size_t *scale_at_bytes)
{
    const ep_cuda *cu = round->ep->impl;
    const ep_cuda_args *a = &ep_cuda_round_of(round)->args;

    *pitch_bytes = a->row_pitch;
    *scale_at_bytes = a->scale_at;
    return a->heap[a->rank] + a->at_rows + (cu->puts ? a->n_weight_packets * VECTOR_BYTES : 0);
}

const ep_backend yard_ep_cuda = {
    .name = "cuda",
    .transport = "device",
    .check = check,
    .heap_bytes = heap_bytes,
    .open = open_cuda,
    .close = close_cuda,
    .look = look,
    .expert_x = expert_x,
    .dispatch_send = yard_ep_cuda_dispatch_send,
    .dispatch_recv = yard_ep_cuda_dispatch_recv,
    .combine_send = yard_ep_cuda_combine_send,
    .combine_recv = yard_ep_cuda_combine_recv,
};
