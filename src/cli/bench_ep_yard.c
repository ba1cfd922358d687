/* The library's own transports in `switchyard bench ep`. */
#include <stdio.h>
#include <stdlib.h>

#include <yard/ep.h>

#include "cli/bench_ep.h"

typedef struct yard_side {
    yard_ep *ep;
    yard_ep_round *round;
    yard_ep_capacity capacity;
    uint8_t *expert_x;
    float *expert_x_scale, *y;
    int32_t *count, *row_index;
    yard_ep_stats before; /* an exchange */
    bool node_copies;
    void *expert_y; /* the round's own; NULL: results are copied from data's */
} yard_side;

/* How a peer uses the library. */
typedef struct yard_use {
    const char *transport;
    uint32_t ranks_per_node; /* as in yard_fabric_config */
    bool node_copies, copied;
} yard_use;

uint32_t yard_bench_ep_layout_of(const yard_bench_ep_rank *r)
{
    static const yard_ep_layout layouts[YARD_BENCH_EP_N_LAYOUTS] = {
        [YARD_BENCH_EP_EXPERT] = YARD_EP_EXPERT_MAJOR,
        [YARD_BENCH_EP_FLAT] = YARD_EP_FLAT,
        [YARD_BENCH_EP_IN_PLACE] = YARD_EP_FLAT_IN_PLACE,
    };

    return layouts[r->layout];
}

static bool in_place(const yard_bench_ep_rank *r)
{
    return r->layout == YARD_BENCH_EP_IN_PLACE;
}

static yard_ep_config config_of(const yard_bench_ep_rank *r)
{
    yard_ep_config c = YARD_EP_CONFIG_INIT;

    c.n_experts = r->settings->n_experts;
    c.top_k = r->settings->top_k;
    c.hidden = r->settings->hidden;
    c.max_tokens = r->max_tokens;
    c.input = YARD_EP_FP8;
    c.mode = r->partial ? YARD_EP_PARTIAL : YARD_EP_EXACT;
    c.layout = (yard_ep_layout)yard_bench_ep_layout_of(r);
    c.timeout_us = YARD_BENCH_EP_TIMEOUT_US;
    return c;
}

static yard_status allocate(yard_bench_ep_rank *r, yard_side *s, yard_error *err)
{
    const size_t hidden = r->settings->hidden;
    const size_t n_rows = s->capacity.expert_x_rows;

    s->expert_x = yard_alloc(n_rows * hidden);
    s->expert_x_scale = yard_alloc(n_rows * yard_group_count((uint32_t)hidden) * sizeof(float));
    s->y = yard_alloc(r->max_tokens * hidden * sizeof(float));
    s->count = yard_alloc(r->settings->n_experts * sizeof(*s->count));
    s->row_index = yard_alloc(s->capacity.expert_y_rows * sizeof(*s->row_index));
    if (!s->expert_x || !s->expert_x_scale || !s->y || !s->count || !s->row_index)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for %zu rows", n_rows);
    return YARD_OK;
}

static yard_status open_as(yard_bench_ep_rank *r, yard_use use, yard_error *err)
{
    yard_fabric_config fabric = YARD_FABRIC_CONFIG_INIT;
    yard_ep_config config = config_of(r);
    yard_side *s = r->impl = calloc(1, sizeof(*s));
    yard_status st;

    if (!s)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory");
    fabric.rank = r->rank;
    fabric.n_ranks = r->settings->n_ranks;
    fabric.transport = use.transport;
    fabric.rendezvous = r->rendezvous;
    fabric.bind_host = r->host;
    fabric.ranks_per_node = use.ranks_per_node;
    config.node_copies = s->node_copies = use.node_copies;
    config.expert_y_in_place = !use.copied;
    config.fabric_config = &fabric;
    st = yard_ep_capacity_of(&config, fabric.n_ranks, &s->capacity, err);
    if (st == YARD_OK)
        st = yard_ep_create(&s->ep, &config, err);
    if (st == YARD_OK) {
        s->round = yard_ep_get_round(s->ep, 0);
        s->expert_y = yard_ep_expert_y(s->round);
        st = allocate(r, s, err);
    }
    return st;
}

static yard_status open_shm(yard_bench_ep_rank *r, yard_error *err)
{
    return open_as(r, (yard_use){ .transport = "shm" }, err);
}

static yard_status open_shm_copied(yard_bench_ep_rank *r, yard_error *err)
{
    return open_as(r, (yard_use){ .transport = "shm", .copied = true }, err);
}

static yard_status open_tcp(yard_bench_ep_rank *r, yard_error *err)
{
    return open_as(r, (yard_use){ .transport = "tcp" }, err);
}

static yard_status open_libfabric(yard_bench_ep_rank *r, yard_error *err)
{
    return open_as(r, (yard_use){ .transport = "libfabric" }, err);
}

static yard_status open_rank_copies(yard_bench_ep_rank *r, yard_error *err)
{
    return open_as(
        r, (yard_use){ .transport = "shm+tcp", .ranks_per_node = r->settings->n_ranks / 2 }, err);
}

static yard_status open_node_copies(yard_bench_ep_rank *r, yard_error *err)
{
    return open_as(r,
                   (yard_use){ .transport = "shm+tcp",
                               .ranks_per_node = r->settings->n_ranks / 2,
                               .node_copies = true },
                   err);
}

static yard_status prepare(yard_bench_ep_rank *r, yard_error *err)
{
    return YARD_OK;
}

static yard_status failed(const yard_side *s, yard_status st, yard_error *err)
{
    return yard_fail(err, st, "%s", yard_ep_error(s->ep));
}

static yard_status dispatch(yard_bench_ep_rank *r, yard_error *err)
{
    const yard_bench_ep_data *d = r->data;
    const size_t mine = (size_t)r->rank * d->shape.n_tokens * d->shape.top_k;
    const int32_t n_tokens = (int32_t)d->shape.n_tokens;
    yard_side *s = r->impl;
    yard_status st;

    st = yard_ep_dispatch_send(s->round, d->x, d->x_scale, d->expert + mine, d->weight + mine,
                               &n_tokens, NULL);
    if (st == YARD_OK)
        st = yard_ep_dispatch_recv(s->round, in_place(r) ? NULL : s->expert_x,
                                   in_place(r) ? NULL : s->expert_x_scale, s->count, s->row_index,
                                   NULL);
    return st == YARD_OK ? st : failed(s, st, err);
}

/* For check(), which comes when peers may have written the places again: rows of tokens that came.
 */
static void keep_rows(const yard_bench_ep_rank *r)
{
    const yard_bench_ep_data *d = r->data;
    const yard_side *s = r->impl;
    size_t pitch_bytes = 0, scale_at_bytes = 0;
    const uint8_t *landed = yard_ep_expert_x(s->round, &pitch_bytes, &scale_at_bytes);

    for (uint32_t i = 0; landed && i < d->n_arrivals; i++) {
        const uint32_t source = d->arrival[i] / d->shape.n_tokens;
        const size_t row = (size_t)source * r->max_tokens + d->arrival[i] % d->shape.n_tokens;

        memcpy(s->expert_x + row * d->shape.hidden, landed + row * pitch_bytes, d->shape.hidden);
        memcpy(s->expert_x_scale + row * d->n_groups, landed + row * pitch_bytes + scale_at_bytes,
               d->n_groups * sizeof(float));
    }
}

/* Results anew each time, as experts make them: they start in this rank's cache, in no other. */
static void experts(yard_bench_ep_rank *r)
{
    const yard_side *s = r->impl;

    keep_rows(r);
    if (s->expert_y)
        memcpy(s->expert_y, r->data->expert_y,
               r->data->n_routed * yard_bench_ep_result_bytes(r->data));
}

static yard_status combine(yard_bench_ep_rank *r, yard_error *err)
{
    yard_side *s = r->impl;
    yard_status st =
        yard_ep_combine_send(s->round, s->expert_y ? s->expert_y : r->data->expert_y, NULL);

    if (st == YARD_OK)
        st = yard_ep_combine_recv(s->round, s->y, NULL);
    return st == YARD_OK ? st : failed(s, st, err);
}

static void poison(yard_bench_ep_rank *r)
{
    yard_side *s = r->impl;
    const size_t hidden = r->settings->hidden;

    memset(s->expert_x, 0x55, s->capacity.expert_x_rows * hidden);
    memset(s->expert_x_scale, 0x55,
           s->capacity.expert_x_rows * r->data->n_groups * sizeof(*s->expert_x_scale));
    memset(s->y, 0x55, r->max_tokens * hidden * sizeof(*s->y));
    memset(s->count, 0x55, r->data->n_local * sizeof(*s->count));
    memset(s->row_index, 0x55, s->capacity.expert_y_rows * sizeof(*s->row_index));
    yard_ep_get_stats(s->ep, &s->before);
}

/* Rows that left since poison(): whole exchanges of one copy per token and destination rank, or
 * per rank of this node and other node. */
static bool check_wire(const yard_bench_ep_rank *r, yard_error *err)
{
    const yard_bench_ep_data *d = r->data;
    const yard_side *s = r->impl;
    const uint32_t n_want = s->node_copies ? d->n_node_rows_out : d->n_rows_out;
    yard_ep_stats now;
    uint64_t n_rows, n_results, n; /* sent, or read in place */

    yard_ep_get_stats(s->ep, &now);
    n_rows = now.n_dispatch_rows_sent - s->before.n_dispatch_rows_sent + now.n_rows_in_place -
             s->before.n_rows_in_place;
    n_results = now.n_combine_rows_sent - s->before.n_combine_rows_sent + now.n_results_in_place -
                s->before.n_results_in_place;
    n = n_want ? n_rows / n_want : 1;
    if (n > 0 && n_rows == n * n_want && n_results == n * d->n_results_out)
        return true;
    yard_fail(err, YARD_EDEVICE,
              "rows to other ranks: want a multiple of %u and %u, sent %llu, %llu", n_want,
              d->n_results_out, (unsigned long long)n_rows, (unsigned long long)n_results);
    return false;
}

static bool check(yard_bench_ep_rank *r, yard_error *err)
{
    const yard_side *s = r->impl;

    return yard_bench_ep_check_dispatch(r->data, s->expert_x, s->expert_x_scale, s->count,
                                        s->row_index, r->max_tokens, err) &&
           yard_bench_ep_check_combine(r->data, s->y, err) && check_wire(r, err);
}

static void close_side(yard_bench_ep_rank *r)
{
    yard_side *s = r->impl;

    if (!s)
        return;
    yard_ep_destroy(s->ep);
    free(s->expert_x);
    free(s->expert_x_scale);
    free(s->y);
    free(s->count);
    free(s->row_index);
    free(s);
    r->impl = NULL;
}

#define YARD_PEER(transport, open_function, ...)                                                   \
    {                                                                                              \
        .name = (transport), .open = (open_function), .prepare = prepare, .dispatch = dispatch,    \
        .experts = experts, .combine = combine, .poison = poison, .check = check,                  \
        .close = close_side, __VA_ARGS__                                                           \
    }

const yard_bench_ep_peer yard_bench_ep_shm = YARD_PEER("shm", open_shm, .network = false);
const yard_bench_ep_peer yard_bench_ep_shm_copied =
    YARD_PEER("shm", open_shm_copied, .variant = "copied");
const yard_bench_ep_peer yard_bench_ep_tcp = YARD_PEER("tcp", open_tcp, .network = true);
const yard_bench_ep_peer yard_bench_ep_libfabric =
    YARD_PEER("libfabric", open_libfabric, .network = true);
const yard_bench_ep_peer yard_bench_ep_rank_copies =
    YARD_PEER("shm+tcp", open_rank_copies, .variant = "rank-copy", .two_nodes = true);
const yard_bench_ep_peer yard_bench_ep_node_copies =
    YARD_PEER("shm+tcp", open_node_copies, .variant = "node-copy", .two_nodes = true);
