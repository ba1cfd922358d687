/* The CPU backend: what it keeps in the heap and beside it. */
#include <stdlib.h>

#include "ep/ep_impl.h"

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
    h->expert_y = take(at, ep->routed_rows * c->hidden * (c->combine == YARD_EP_BF16 ? 2 : 4));
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

static const void *expert_x(const yard_ep_round *round, size_t *pitch_bytes, size_t *scale_at_bytes)
{
    const yard_ep *ep = round->ep;

    *pitch_bytes = ep->dispatch_row_bytes;
    *scale_at_bytes = yard_align_up(ep->payload_bytes, 4);
    return ep_heap(ep, round->heap.dispatch_rows);
}

static yard_status check(const yard_ep *ep, yard_error *err)
{
    (void)ep;
    (void)err;
    return YARD_OK;
}

static yard_status open_cpu(yard_ep *ep, yard_error *err)
{
    yard_status st = check_nodes(ep, err);

    ep->convert = yard_convert_best();
    if (st == YARD_OK)
        st = allocate(ep, err);
    if (st != YARD_OK)
        return st;
    choose_relays(ep);
    choose_places(ep);
    return YARD_OK;
}

const ep_backend yard_ep_cpu = {
    .name = "cpu",
    .check = check,
    .heap_bytes = heap_bytes,
    .open = open_cpu,
    .expert_x = expert_x,
    .dispatch_send = yard_ep_cpu_dispatch_send,
    .dispatch_recv = yard_ep_cpu_dispatch_recv,
    .combine_send = yard_ep_cpu_combine_send,
    .combine_recv = yard_ep_cpu_combine_recv,
};
