/* Groups: config, heap layout, creation, errors. */
#include <stdio.h>
#include <stdlib.h>

#include "ep/ep_impl.h"

enum {
    ALIGN = 64,
    TELL_US = 2000000 /* a rank that fails alone lets the others know within */
};

size_t yard_ep_align(size_t n)
{
    return yard_align_up(n, ALIGN);
}

uint32_t yard_ep_version(void)
{
    return YARD_EP_ABI_VERSION;
}

/* ---- config ------------------------------------------------------------------------------ */

static yard_status read_config(yard_ep_config *out, const yard_ep_config *config, yard_error *err)
{
    const yard_ep_config defaults = YARD_EP_CONFIG_INIT;
    const size_t known = sizeof(*out);

    if (!config || config->size < sizeof(config->size) || config->size > YARD_MAX_CONFIG_BYTES)
        return yard_fail(err, YARD_EINVAL, "ep config: want YARD_EP_CONFIG_INIT first");
    for (size_t i = known; i < config->size; i++)
        if (((const uint8_t *)config)[i] != 0)
            return yard_fail(err, YARD_ENOTSUP,
                             "ep config: want %zu bytes at most, got %zu with a setting this "
                             "library does not know",
                             known, config->size);
    *out = defaults;
    memcpy(out, config, config->size < known ? config->size : known);
    return YARD_OK;
}

struct field_check {
    const char *name;
    uint32_t value, min, max;
};

static yard_status check_fields(const yard_ep_config *c, yard_error *err)
{
    const struct field_check checks[] = {
        { "n_experts", c->n_experts, 1, 1u << 20 }, { "top_k", c->top_k, 1, YARD_EP_MAX_TOP_K },
        { "hidden", c->hidden, 1, 1u << 20 },       { "max_tokens", c->max_tokens, 1, 1u << 20 },
        { "tp", c->tp, 1, YARD_EP_MAX_TP },         { "n_rounds", c->n_rounds, 1, 16 },
        { "row_align", c->row_align, 1, 4096 },     { "dispatch", c->dispatch, 0, YARD_EP_FP8 },
        { "combine", c->combine, 0, YARD_EP_BF16 }, { "input", c->input, 0, YARD_EP_FP8 },
        { "output", c->output, 0, YARD_EP_BF16 },   { "mode", c->mode, 0, YARD_EP_PARTIAL },
        { "layout", c->layout, 0, YARD_EP_FLAT },
    };

    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++)
        if (checks[i].value < checks[i].min || checks[i].value > checks[i].max)
            return yard_fail(err, YARD_EINVAL, "ep config: %s: want %u to %u, got %u",
                             checks[i].name, checks[i].min, checks[i].max, checks[i].value);
    if (c->dispatch != YARD_EP_FP8 && c->input != c->dispatch)
        return yard_fail(err, YARD_EINVAL,
                         "ep config: input: want the dtype of dispatch (%d), got %d; only FP8 is "
                         "converted",
                         c->dispatch, c->input);
    return YARD_OK;
}

static yard_status check_ranks(const yard_ep_config *c, uint32_t n_ranks, yard_error *err)
{
    if (n_ranks == 0 || n_ranks > YARD_EP_MAX_RANKS)
        return yard_fail(err, YARD_EINVAL, "ep: want 1 to %d ranks, got %u", YARD_EP_MAX_RANKS,
                         n_ranks);
    if (c->n_experts % n_ranks != 0)
        return yard_fail(err, YARD_EINVAL,
                         "ep config: n_experts: want a multiple of %u ranks, got %u", n_ranks,
                         c->n_experts);
    if (n_ranks % c->tp != 0)
        return yard_fail(err, YARD_EINVAL, "ep config: tp: want a divisor of %u ranks, got %u",
                         n_ranks, c->tp);
    /* rows are numbered by int32_t */
    if ((uint64_t)n_ranks / c->tp * c->max_tokens * c->top_k +
            (uint64_t)c->n_experts / n_ranks * c->row_align >
        INT32_MAX)
        return yard_fail(err, YARD_EINVAL,
                         "ep config: max_tokens: want instances x max_tokens x top_k + experts of "
                         "a rank x row_align below 2^31, got %u x %u x %u + %u x %u",
                         n_ranks / c->tp, c->max_tokens, c->top_k, c->n_experts / n_ranks,
                         c->row_align);
    return YARD_OK;
}

static yard_status check_config(const yard_ep_config *c, uint32_t n_ranks, yard_error *err)
{
    const yard_status st = check_fields(c, err);

    return st == YARD_OK ? check_ranks(c, n_ranks, err) : st;
}

static size_t dtype_bytes(yard_ep_dtype dtype)
{
    return dtype == YARD_EP_F32 ? 4 : dtype == YARD_EP_BF16 ? 2 : 1;
}

/* Everything that follows from the config and the number of ranks. */
static void derive(yard_ep *ep, uint32_t rank, uint32_t n_ranks)
{
    const yard_ep_config *c = &ep->config;
    uint32_t per_token;

    ep->rank = rank;
    ep->n_ranks = n_ranks;
    ep->dp = n_ranks / c->tp;
    ep->group = rank / c->tp;
    ep->replica = rank % c->tp;
    ep->n_local = c->n_experts / n_ranks;
    ep->first_expert = rank * ep->n_local;
    ep->entry_bytes = (1 + 2 * (size_t)c->top_k) * sizeof(int32_t);
    ep->header_bytes = yard_ep_align(sizeof(ep_header) + c->max_tokens * ep->entry_bytes);
    ep->payload_bytes = c->hidden * dtype_bytes(c->dispatch);
    ep->n_groups_cols = yard_group_count(c->hidden);
    ep->scale_bytes = c->dispatch == YARD_EP_FP8 ? ep->n_groups_cols * sizeof(float) : 0;
    ep->dispatch_row_bytes = yard_ep_align(yard_align_up(ep->payload_bytes, 4) + ep->scale_bytes);
    ep->combine_row_bytes = yard_ep_align(c->hidden * dtype_bytes(c->combine));
    ep->output_row_bytes = yard_ep_align(c->hidden * dtype_bytes(c->output));
    per_token = c->top_k < ep->n_local ? c->top_k : ep->n_local;
    ep->list_bytes = yard_ep_align((size_t)c->max_tokens * per_token * sizeof(int32_t));
    ep->routed_rows =
        (uint64_t)ep->dp * c->max_tokens * per_token + (uint64_t)ep->n_local * (c->row_align - 1);
}

static yard_sym take(yard_sym *at, size_t n_bytes)
{
    const yard_sym place = *at;

    *at += yard_ep_align(n_bytes);
    return place;
}

static void lay_out_round(const yard_ep *ep, bool copies, yard_sym *at, round_heap *h)
{
    const yard_ep_config *c = &ep->config;
    const size_t r = ep->n_ranks, t = c->max_tokens;

    h->headers = take(at, r * ep->header_bytes);
    h->dispatch_rows = take(at, (size_t)ep->dp * t * ep->dispatch_row_bytes);
    h->combine_rows = take(at, t * c->top_k * ep->combine_row_bytes);
    h->output_rows = take(at, c->tp > 1 ? t * ep->output_row_bytes : 0);
    h->sig_header = take(at, r * 8);
    h->sig_rows = take(at, r * 8);
    h->sig_combine = take(at, r * 8);
    h->sig_results = take(at, r * 8);
    h->sig_output = take(at, r * 8);
    h->stage_headers = take(at, r * ep->header_bytes);
    h->stage_rows = take(at, t * ep->dispatch_row_bytes);
    h->stage_combine =
        take(at, (copies || c->expert_y_in_place ? 1 : ep->routed_rows) * ep->combine_row_bytes);
    h->stage_output = take(at, (copies ? 1 : t) * ep->output_row_bytes);
    if (!c->expert_y_in_place)
        return;
    h->expert_y = take(at, ep->routed_rows * c->hidden * dtype_bytes(c->combine));
    h->result_lists = take(at, r * ep->list_bytes);
    h->stage_lists = take(at, r * ep->list_bytes);
}

static size_t heap_bytes(const yard_ep *ep, bool copies)
{
    yard_sym at = yard_ep_agree_bytes(ep->n_ranks);
    round_heap unused;

    for (uint32_t i = 0; i < ep->config.n_rounds; i++)
        lay_out_round(ep, copies, &at, &unused);
    return at;
}

yard_status yard_ep_capacity_of(const yard_ep_config *config, uint32_t n_ranks,
                                yard_ep_capacity *out, yard_error *err)
{
    yard_ep ep = { 0 };
    yard_status st = read_config(&ep.config, config, err);

    if (st == YARD_OK)
        st = check_fields(&ep.config, err);
    if (st == YARD_OK)
        st = check_ranks(&ep.config, n_ranks, err);
    if (st != YARD_OK)
        return st;
    derive(&ep, 0, n_ranks);
    out->expert_y_rows = ep.routed_rows;
    out->expert_x_rows =
        ep.config.layout == YARD_EP_FLAT ? (uint64_t)ep.dp * ep.config.max_tokens : ep.routed_rows;
    out->heap_bytes = heap_bytes(&ep, false);
    return YARD_OK;
}

/* ---- creation ---------------------------------------------------------------------------- */

static yard_status borrow_fabric(yard_ep *ep, yard_error *err)
{
    const uint64_t has = yard_fabric_heap_bytes(ep->config.fabric), at = ep->config.heap_at;
    const uint32_t n_ranks = yard_fabric_size(ep->config.fabric);
    yard_status st;

    ep->fabric = ep->config.fabric;
    if (at % ALIGN != 0 || at > has || yard_ep_agree_bytes(n_ranks) > has - at)
        return yard_fail(err, YARD_EINVAL,
                         "ep config: heap_at: want a multiple of %d in the fabric's heap of %llu "
                         "bytes, got %llu",
                         ALIGN, (unsigned long long)has, (unsigned long long)at);
    st = yard_ep_agree(ep, err);
    return st == YARD_OK ? check_config(&ep->config, n_ranks, err) : st;
}

/* This rank refuses its own config. If the others' are different, they hear of it here and do not
 * wait until their deadline for a rank that never comes. */
static void tell_others(yard_fabric_config config)
{
    yard_fabric *f = NULL;

    config.heap_bytes = ALIGN;
    config.notice = NULL;
    if (config.start_timeout_us > TELL_US)
        config.start_timeout_us = TELL_US;
    if (config.n_ranks > 1)
        yard_fabric_create(&f, &config, NULL);
    yard_fabric_destroy(f);
}

static yard_status make_fabric(yard_ep *ep, yard_error *err)
{
    const yard_ep_config *c = &ep->config;
    yard_fabric_config config = YARD_FABRIC_CONFIG_INIT;
    yard_fabric_env env;
    ep_signature signature;
    yard_status st = YARD_OK;

    if (c->fabric_config)
        st = yard_fabric_config_read(&config, c->fabric_config, err);
    if (st == YARD_OK && config.n_ranks == 0)
        st = yard_fabric_config_from_env(&config, &env, err);
    if (st != YARD_OK)
        return st;
    if (config.n_ranks == 0)
        config.n_ranks = 1;
    yard_ep_sign(c, &signature);
    config.config_text = signature.text;
    config.config_hash = signature.hash;
    config.timeout_us = c->timeout_us;
    st = check_config(c, config.n_ranks, err);
    if (st != YARD_OK) {
        tell_others(config);
        return st;
    }
    derive(ep, config.rank, config.n_ranks);
    config.heap_bytes = heap_bytes(ep, false);
    ep->owns_fabric = true;
    return yard_fabric_create_for(&ep->fabric, &config, heap_bytes(ep, true), err);
}

/* Called twice: to measure, then to place. */
static void lay_out_memory(yard_ep *ep, yard_arena *arena)
{
    const yard_ep_config *c = &ep->config;
    const size_t r = ep->n_ranks * sizeof(uint64_t);

    ep->rounds = yard_arena_take(arena, c->n_rounds * sizeof(*ep->rounds));
    ep->cursor = yard_arena_take(arena, (ep->n_local + 1) * sizeof(*ep->cursor));
    ep->row_f32 = yard_arena_take(arena, c->hidden * sizeof(float));
    ep->target = yard_arena_take(arena, ep->n_ranks);
    ep->used = yard_arena_take(arena, c->n_experts * sizeof(*ep->used));
    ep->relay_to = yard_arena_take(arena, ep->n_ranks * sizeof(*ep->relay_to));
    ep->relay_from = yard_arena_take(arena, ep->n_ranks * sizeof(*ep->relay_from));
    ep->seen = yard_arena_take(arena, ep->n_ranks * sizeof(*ep->seen));
    ep->in_place = yard_arena_take(arena, ep->n_ranks * sizeof(*ep->in_place));
    ep->n_listed = yard_arena_take(arena, ep->n_ranks * sizeof(*ep->n_listed));
    for (uint32_t i = 0; i < c->n_rounds; i++) {
        yard_ep_round round = {
            .ep = ep,
            .rows_seen = yard_arena_take(arena, r),
            .results_seen = yard_arena_take(arena, r),
            .outputs_seen = yard_arena_take(arena, r),
            .expert = yard_arena_take(arena, (size_t)c->max_tokens * c->top_k * sizeof(int32_t)),
            .weight = yard_arena_take(arena, (size_t)c->max_tokens * c->top_k * sizeof(float)),
            .arrivals = yard_arena_take(arena, (size_t)ep->dp * c->max_tokens * sizeof(arrival)),
            .first_row = yard_arena_take(arena, (ep->n_local + 1) * sizeof(int32_t)),
        };
        if (arena->base)
            ep->rounds[i] = round;
    }
}

static yard_status allocate(yard_ep *ep, yard_error *err)
{
    yard_arena arena = { 0 };
    yard_sym at = ep->config.heap_at + yard_ep_agree_bytes(ep->n_ranks);

    lay_out_memory(ep, &arena);
    arena.size_bytes = arena.used_bytes;
    arena.used_bytes = 0;
    arena.base = ep->block = yard_alloc(arena.size_bytes);
    if (!ep->block)
        return yard_fail(err, YARD_ENOMEM, "ep: %zu bytes", arena.size_bytes);
    lay_out_memory(ep, &arena);
    for (uint32_t i = 0; i < ep->config.n_rounds; i++)
        lay_out_round(ep, yard_fabric_copies(ep->fabric), &at, &ep->rounds[i].heap);
    return YARD_OK;
}

/* The rank of to's node whose heap takes from's rows: to itself, or with node_copies and from
 * elsewhere the relay, which is chosen by from so that the load spreads. */
static uint32_t relay_of(const yard_ep *ep, uint32_t from, uint32_t to)
{
    const uint32_t node = yard_fabric_node(ep->fabric, to);
    uint32_t n_mates = 1, relay = 0, skip; /* to itself is one */

    if (!ep->config.node_copies || yard_fabric_node(ep->fabric, from) == node)
        return to;
    for (uint32_t r = 0; r < ep->n_ranks; r++)
        n_mates += r != to && yard_fabric_node(ep->fabric, r) == node;
    skip = from % n_mates;
    while (yard_fabric_node(ep->fabric, relay) != node || skip-- > 0)
        relay++;
    return relay;
}

/* The same answer on all ranks, for they all know the nodes. */
static yard_status check_nodes(const yard_ep *ep, yard_error *err)
{
    uint32_t n_nodes = 0;

    for (uint32_t r = 0; r < ep->n_ranks; r++)
        if (yard_fabric_node(ep->fabric, r) >= n_nodes)
            n_nodes = yard_fabric_node(ep->fabric, r) + 1;
    if (!ep->config.node_copies || yard_fabric_shares_node(ep->fabric) || n_nodes == 1 ||
        n_nodes == ep->n_ranks)
        return YARD_OK;
    return yard_fail(err, YARD_ENOTSUP,
                     "ep config: node_copies: want a transport by which ranks of a node share "
                     "memory (shm+tcp), got %s",
                     yard_fabric_transport(ep->fabric, NULL));
}

static void choose_relays(yard_ep *ep)
{
    for (uint32_t r = 0; r < ep->n_ranks; r++) {
        ep->relay_to[r] = relay_of(ep, ep->rank, r);
        ep->relay_from[r] = relay_of(ep, r, ep->rank);
    }
}

static void choose_places(yard_ep *ep)
{
    for (uint32_t r = 0; r < ep->n_ranks; r++) {
        ep->seen[r] = r != ep->rank && yard_fabric_view(ep->fabric, r, 0) != NULL;
        ep->in_place[r] = ep->config.expert_y_in_place && (r == ep->rank || ep->seen[r]);
    }
}

static yard_status check_heap(const yard_ep *ep, yard_error *err)
{
    const uint64_t has = yard_fabric_heap_bytes(ep->fabric), at = ep->config.heap_at;
    const size_t want = heap_bytes(ep, yard_fabric_copies(ep->fabric));

    if (at > has || want > has - at)
        return yard_fail(err, YARD_EINVAL,
                         "ep: want a heap of %zu bytes from %llu on, the fabric's has %llu", want,
                         (unsigned long long)at, (unsigned long long)has);
    return YARD_OK;
}

static yard_status start(yard_ep *ep, yard_error *err)
{
    const char *reason = "";
    yard_status st = ep->config.fabric ? borrow_fabric(ep, err) : make_fabric(ep, err);

    if (st != YARD_OK)
        return st;
    derive(ep, yard_fabric_rank(ep->fabric), yard_fabric_size(ep->fabric));
    st = check_heap(ep, err);
    if (st != YARD_OK)
        return st;
    if (check_nodes(ep, err) != YARD_OK)
        return YARD_ENOTSUP;
    ep->convert = yard_convert_best();
    const char *transport = yard_fabric_transport(ep->fabric, &reason);
    snprintf(ep->description, sizeof(ep->description), "cpu over %s: %s", transport, reason);
    st = allocate(ep, err);
    if (st == YARD_OK) {
        choose_relays(ep);
        choose_places(ep);
    }
    return st;
}

yard_status yard_ep_create(yard_ep **out, const yard_ep_config *config, yard_error *err)
{
    yard_ep *ep = calloc(1, sizeof(*ep));
    yard_status st;

    if (!ep)
        return yard_fail(err, YARD_ENOMEM, "ep: %zu bytes", sizeof(*ep));
    st = read_config(&ep->config, config, err);
    if (st == YARD_OK)
        st = start(ep, err);
    if (st != YARD_OK) {
        yard_ep_destroy(ep);
        return st;
    }
    *out = ep;
    return YARD_OK;
}

void yard_ep_destroy(yard_ep *ep)
{
    if (!ep)
        return;
    if (ep->owns_fabric)
        yard_fabric_destroy(ep->fabric);
    free(ep->block);
    free(ep);
}

uint32_t yard_ep_rank(const yard_ep *ep)
{
    return ep->rank;
}

uint32_t yard_ep_size(const yard_ep *ep)
{
    return ep->n_ranks;
}

const char *yard_ep_describe(const yard_ep *ep)
{
    return ep->description;
}

yard_ep_round *yard_ep_get_round(yard_ep *ep, uint32_t round_idx)
{
    return round_idx < ep->config.n_rounds ? &ep->rounds[round_idx] : NULL;
}

void *yard_ep_expert_y(const yard_ep_round *round)
{
    return round->ep->config.expert_y_in_place ? ep_heap(round->ep, round->heap.expert_y) : NULL;
}

void yard_ep_get_stats(const yard_ep *ep, yard_ep_stats *out)
{
    *out = ep->stats;
}

/* ---- puts ---------------------------------------------------------------------------------- */

yard_status yard_ep_put_node(yard_ep *ep, yard_sym dst, const void *src, size_t n_bytes,
                             uint32_t relay, yard_sym sig, const uint32_t *targets,
                             uint32_t n_targets)
{
    ep->stats.n_wire_bytes += n_bytes;
    return yard_fabric_put_signal_node(ep->fabric, dst, src, n_bytes, relay, sig, 1, targets,
                                       n_targets);
}

yard_status yard_ep_put(yard_ep *ep, yard_sym dst, const void *src, size_t n_bytes, yard_sym sig,
                        uint64_t value, uint32_t peer)
{
    if (peer != ep->rank)
        ep->stats.n_wire_bytes += n_bytes;
    return yard_fabric_put_signal(ep->fabric, dst, src, n_bytes, sig, value, peer);
}
