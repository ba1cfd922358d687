/* What dispatch and combine are compared with on GPUs: two padded all-to-alls with room for every
 * token and expert of a rank, as where nobody counts. By NCCL, and by NVSHMEM's own collective. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/bench_ep.h"
#include "ep/ep.h"

enum { PAIRS = 20, LARGE_PAIRS = 4, MAX_SMALL = 16 };

typedef struct padded_side {
    yard_ep_bench *bench; /* of the current number of tokens */
    yard_fabric *fabric;  /* NVSHMEM's */
    uint32_t number;      /* of NCCL's group */
} padded_side;

/* A new group for each number of tokens; rank 0 makes its id, and port counts them. */
static yard_status share_id(yard_bench_ep_rank *r, uint32_t number, yard_error *err)
{
    const uint64_t until_us = yard_now_us() + YARD_BENCH_EP_TIMEOUT_US;
    yard_status st = YARD_OK;

    if (r->rank == 0) {
        st = yard_ep_nccl_id(r->group_id, err);
        atomic_store(r->port, st == YARD_OK ? number : UINT32_MAX);
    }
    while (atomic_load(r->port) < number && yard_now_us() < until_us)
        sched_yield();
    if (st == YARD_OK && (atomic_load(r->port) < number || atomic_load(r->port) == UINT32_MAX))
        st = yard_fail(err, YARD_ENOTSUP, "nccl: rank 0 could not begin");
    return st;
}

static void release(padded_side *s)
{
    yard_ep_bench_destroy(s->bench);
    yard_fabric_destroy(s->fabric);
    s->bench = NULL;
    s->fabric = NULL;
}

static yard_ep_padded_config config_of(const yard_bench_ep_rank *r)
{
    const yard_bench_ep_data *d = r->data;
    const size_t room = (size_t)d->n_local * d->shape.n_tokens;

    return (yard_ep_padded_config){ .n_ranks = d->shape.n_ranks,
                                    .rank = r->rank,
                                    .dispatch_bytes = room * yard_bench_ep_row_bytes(d),
                                    .combine_bytes = room * yard_bench_ep_result_bytes(d) };
}

static yard_status prepare_nccl(yard_bench_ep_rank *r, yard_error *err)
{
    padded_side *s = r->impl;
    yard_ep_padded_config config = config_of(r);
    yard_status st;

    release(s);
    st = share_id(r, ++s->number, err);
    config.id = r->group_id;
    return st == YARD_OK ? yard_ep_bench_create_padded(&s->bench, &config, err) : st;
}

/* n_tokens 0: only to see whether NVSHMEM is there. */
static yard_status open_fabric(yard_bench_ep_rank *r, size_t heap_bytes, uint32_t n_tokens,
                               yard_fabric **out, yard_error *err)
{
    yard_fabric_config config = YARD_FABRIC_CONFIG_INIT;
    char rendezvous[96];

    snprintf(rendezvous, sizeof(rendezvous), "%s-%u", r->rendezvous, n_tokens);
    config.rank = r->rank;
    config.n_ranks = r->settings->n_ranks;
    config.transport = "nvshmem";
    config.rendezvous = rendezvous;
    config.heap_bytes = heap_bytes;
    return yard_fabric_create(out, &config, err);
}

static yard_status prepare_nvshmem(yard_bench_ep_rank *r, yard_error *err)
{
    padded_side *s = r->impl;
    yard_ep_padded_config config = config_of(r);
    yard_status st;

    release(s);
    st = open_fabric(r, yard_ep_padded_heap_bytes(&config), r->data->shape.n_tokens, &s->fabric,
                     err);
    config.fabric = s->fabric;
    return st == YARD_OK ? yard_ep_bench_create_padded(&s->bench, &config, err) : st;
}

static yard_status open_nccl(yard_bench_ep_rank *r, yard_error *err)
{
    return yard_bench_ep_open_device(r, sizeof(padded_side), err);
}

static yard_status open_nvshmem(yard_bench_ep_rank *r, yard_error *err)
{
    yard_fabric *f = NULL;
    yard_status st = open_nccl(r, err);

    if (st == YARD_OK)
        st = open_fabric(r, 4096, 0, &f, err);
    yard_fabric_destroy(f);
    return st;
}

static yard_status exchange(yard_bench_ep_rank *r, yard_error *err)
{
    padded_side *s = r->impl;

    return yard_ep_bench_padded_check(s->bench, err);
}

static yard_status time_padded(yard_bench_ep_rank *r, double *samples_us, uint32_t *n,
                               yard_error *err)
{
    const uint32_t n_repeats = (uint32_t)r->settings->n_repeats;
    const bool large = r->data->shape.n_tokens > MAX_SMALL;
    const yard_ep_bench_plan plan = { .launch = YARD_EP_BENCH_GRAPH,
                                      .n_samples = n_repeats,
                                      .n_pairs = large ? LARGE_PAIRS : PAIRS,
                                      .phases = true,
                                      .agree = yard_bench_ep_agree,
                                      .ctx = r };
    padded_side *s = r->impl;
    const yard_status st =
        yard_ep_bench_time(s->bench, &plan, samples_us + (size_t)YARD_BENCH_EP_PAIR * n_repeats,
                           samples_us + (size_t)YARD_BENCH_EP_DISPATCH * n_repeats,
                           samples_us + (size_t)YARD_BENCH_EP_COMBINE * n_repeats, err);

    if (st == YARD_OK)
        *n = yard_bench_ep_agree(r, 0);
    return st;
}

static void poison_padded(yard_bench_ep_rank *r)
{
}

/* Every exchange outside of the timing has been checked already. */
static bool check_padded(yard_bench_ep_rank *r, yard_error *err)
{
    return true;
}

static double bytes_padded(const yard_bench_ep_rank *r, int phase)
{
    const yard_bench_ep_data *d = r->data;
    const double room = (double)d->n_local * d->shape.n_tokens * d->shape.n_ranks;
    const double dispatched = room * (double)yard_bench_ep_row_bytes(d);
    const double combined = room * (double)yard_bench_ep_result_bytes(d);

    return (phase != YARD_BENCH_EP_COMBINE ? dispatched : 0) +
           (phase != YARD_BENCH_EP_DISPATCH ? combined : 0);
}

static void close_padded(yard_bench_ep_rank *r)
{
    padded_side *s = r->impl;

    if (s)
        release(s);
    free(s);
    r->impl = NULL;
}

/* Dispatch is the whole exchange. */
static yard_status nothing(yard_bench_ep_rank *r, yard_error *err)
{
    return YARD_OK;
}

#define PADDED_PEER(library, open_function, prepare_function)                                      \
    {                                                                                              \
        .name = (library), .variant = "padded", .launch = "graph", .open = (open_function),        \
        .prepare = (prepare_function), .dispatch = exchange, .combine = nothing,                   \
        .measure = time_padded, .poison = poison_padded, .check = check_padded,                    \
        .close = close_padded, .bytes = bytes_padded                                               \
    }

const yard_bench_ep_peer yard_bench_ep_padded_nccl = PADDED_PEER("nccl", open_nccl, prepare_nccl);
const yard_bench_ep_peer yard_bench_ep_padded_nvshmem =
    PADDED_PEER("nvshmem", open_nvshmem, prepare_nvshmem);
