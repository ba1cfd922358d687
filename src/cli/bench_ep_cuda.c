/* The library on GPUs in `switchyard bench ep --device cuda`: bf16 rows in, FP8 on the wire, bf16
 * back and out. Each number of tokens is a group of its own, as large as it must be. The device
 * times itself: a sample is the mean pair of a graph's replay, or one pair call by call. */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/bench_ep.h"
#include "ep/ep.h"

enum { N_SETS = 4, MAX_SETS_TOKENS = 256, PAIRS = 20, LARGE_PAIRS = 4 };

typedef struct gpu_side {
    yard_ep *ep;
    yard_ep_config config;
    yard_ep_capacity capacity;
    uint8_t *expert_x;
    float *expert_x_scale, *y;
    uint16_t *x, *y_bf16; /* [N_SETS, n_tokens, hidden]; [n_tokens, hidden] */
    int32_t *count, *row_index;
} gpu_side;

yard_status yard_bench_ep_open_device(yard_bench_ep_rank *r, size_t impl_bytes, yard_error *err)
{
    uint32_t n_devices = 0;
    yard_status st = yard_ep_device_count(&n_devices, err);

    if (st == YARD_OK)
        st = yard_ep_device_use(r->rank % n_devices, r->device, NULL, err);
    r->impl = calloc(1, impl_bytes);
    if (st == YARD_OK && !r->impl)
        st = yard_fail(err, YARD_ENOMEM, "bench: no memory");
    return st;
}

/* A transport that cannot be had here is found out before the first case. */
static yard_status open_device(yard_bench_ep_rank *r, yard_error *err)
{
    yard_fabric_config config = YARD_FABRIC_CONFIG_INIT;
    yard_fabric *f = NULL;
    yard_status st = yard_bench_ep_open_device(r, sizeof(gpu_side), err);

    if (st != YARD_OK || !strcmp(r->peer->name, "nvlink"))
        return st;
    config.rank = r->rank;
    config.n_ranks = r->settings->n_ranks;
    config.transport = r->peer->name;
    config.rendezvous = r->rendezvous;
    config.heap_bytes = 4096;
    st = yard_fabric_create(&f, &config, err);
    yard_fabric_destroy(f);
    return st;
}

static void release_case(gpu_side *s)
{
    yard_ep_destroy(s->ep);
    free(s->expert_x);
    free(s->expert_x_scale);
    free(s->y);
    free(s->x);
    free(s->y_bf16);
    free(s->count);
    free(s->row_index);
    *s = (gpu_side){ 0 };
}

static yard_status allocate(gpu_side *s, uint32_t n_tokens, uint32_t n_local, yard_error *err)
{
    const size_t hidden = s->config.hidden, rows = s->capacity.expert_x_rows;

    s->expert_x = yard_alloc(rows * hidden);
    s->expert_x_scale = yard_alloc(rows * yard_group_count((uint32_t)hidden) * sizeof(float));
    s->y = yard_alloc(n_tokens * hidden * sizeof(*s->y));
    s->x = yard_alloc((size_t)N_SETS * n_tokens * hidden * sizeof(*s->x));
    s->y_bf16 = yard_alloc(n_tokens * hidden * sizeof(*s->y_bf16));
    s->count = yard_alloc(n_local * sizeof(*s->count));
    s->row_index = yard_alloc(s->capacity.expert_y_rows * sizeof(*s->row_index));
    if (s->expert_x && s->expert_x_scale && s->y && s->x && s->y_bf16 && s->count && s->row_index)
        return YARD_OK;
    return yard_fail(err, YARD_ENOMEM, "bench: no memory for %zu rows", rows);
}

static yard_status prepare(yard_bench_ep_rank *r, yard_error *err)
{
    const yard_bench_ep_settings *settings = r->settings;
    yard_fabric_config fabric = YARD_FABRIC_CONFIG_INIT;
    yard_ep_config config = YARD_EP_CONFIG_INIT;
    gpu_side *s = r->impl;
    char rendezvous[96];
    yard_status st;

    release_case(s);
    r->data->shape.y_bf16 = true;
    snprintf(rendezvous, sizeof(rendezvous), "%s-%u", r->rendezvous, r->data->shape.n_tokens);
    fabric.rank = r->rank;
    fabric.n_ranks = settings->n_ranks;
    fabric.transport = r->peer->name;
    fabric.rendezvous = rendezvous;
    config.n_experts = settings->n_experts;
    config.top_k = settings->top_k;
    config.hidden = settings->hidden;
    config.max_tokens = r->data->shape.n_tokens;
    config.mode = r->partial ? YARD_EP_PARTIAL : YARD_EP_EXACT;
    config.layout = (yard_ep_layout)yard_bench_ep_layout_of(r);
    config.output = YARD_EP_BF16;
    config.device = YARD_EP_CUDA;
    config.send_sms = r->peer->send_sms;
    config.timeout_us = YARD_BENCH_EP_TIMEOUT_US;
    config.fabric_config = &fabric;
    st = yard_ep_capacity_of(&config, fabric.n_ranks, &s->capacity, err);
    if (st == YARD_OK)
        st = yard_ep_create(&s->ep, &config, err);
    s->config = config;
    s->config.fabric_config = NULL;
    return st == YARD_OK ? allocate(s, config.max_tokens, r->data->n_local, err) : st;
}

/* The rows that quantise to the current values: their scales are powers of two and each group has
 * a 448, so the products are exact. */
static void make_x(const yard_bench_ep_data *d, uint16_t *x)
{
    for (size_t t = 0; t < d->shape.n_tokens; t++)
        for (uint32_t i = 0; i < d->shape.hidden; i++)
            x[t * d->shape.hidden + i] =
                yard_bf16_from_f32(yard_f32_from_e4m3(d->x[t * d->shape.hidden + i]) *
                                   d->x_scale[t * d->n_groups + i / YARD_GROUP]);
}

/* Set i has the values of seed + i; data is left with those of seed. The routing is one. */
static yard_status open_sets(yard_bench_ep_rank *r, uint32_t n_sets, yard_ep_bench **out,
                             yard_error *err)
{
    yard_bench_ep_data *d = r->data;
    gpu_side *s = r->impl;
    const uint64_t seed = d->seed;
    const size_t n = (size_t)d->shape.n_tokens * d->shape.top_k;
    int32_t *expert = malloc(n_sets * n * sizeof(*expert));
    float *weight = malloc(n_sets * n * sizeof(*weight));
    uint16_t *expert_y = calloc(s->capacity.expert_y_rows, yard_bench_ep_result_bytes(d));
    yard_status st = YARD_OK;

    for (uint32_t i = n_sets; expert && weight && i-- > 0;) {
        yard_bench_ep_fill(d, seed + i);
        make_x(d, s->x + (size_t)i * d->shape.n_tokens * d->shape.hidden);
        memcpy(expert + i * n, d->expert + r->rank * n, n * sizeof(*expert));
        memcpy(weight + i * n, d->weight + r->rank * n, n * sizeof(*weight));
    }
    if (!expert || !weight || !expert_y) {
        st = yard_fail(err, YARD_ENOMEM, "bench: no memory for inputs");
    } else {
        const yard_ep_bench_inputs in = { .n_sets = n_sets,
                                          .n_tokens = d->shape.n_tokens,
                                          .x = s->x,
                                          .expert = expert,
                                          .weight = weight,
                                          .expert_y = expert_y };
        memcpy(expert_y, d->expert_y, d->n_routed * yard_bench_ep_result_bytes(d));
        st = yard_ep_bench_create(out, s->ep, &s->config, &in, err);
    }
    free(expert);
    free(weight);
    free(expert_y);
    return st;
}

static yard_status exchange_set(yard_bench_ep_rank *r, yard_ep_bench *b, yard_error *err)
{
    gpu_side *s = r->impl;

    return yard_ep_bench_exchange(b, 0, s->expert_x, s->expert_x_scale, s->count, s->row_index,
                                  s->y_bf16, err);
}

/* The whole exchange: there is nothing between the calls that the host could do. */
static yard_status dispatch(yard_bench_ep_rank *r, yard_error *err)
{
    yard_ep_bench *b = NULL;
    yard_status st = open_sets(r, 1, &b, err);

    if (st == YARD_OK)
        st = exchange_set(r, b, err);
    yard_ep_bench_destroy(b);
    return st;
}

static yard_status combine(yard_bench_ep_rank *r, yard_error *err)
{
    return YARD_OK;
}

/* Phases come from a run of their own, for marks between the calls cost time; the pair is what the
 * first run says. Outputs of an exchange after the timed ones are what check() looks at. */
static yard_status measure(yard_bench_ep_rank *r, double *samples_us, uint32_t *n, yard_error *err)
{
    yard_ep_bench_plan plan = { .launch =
                                    r->peer->single ? YARD_EP_BENCH_SINGLE : YARD_EP_BENCH_GRAPH,
                                .between_us = r->peer->between_us,
                                .cold = r->peer->cold,
                                .agree = yard_bench_ep_agree,
                                .ctx = r };
    const uint32_t n_repeats = (uint32_t)r->settings->n_repeats;
    const bool large = r->data->shape.n_tokens > MAX_SETS_TOKENS;
    double *dispatch_us = samples_us + (size_t)YARD_BENCH_EP_DISPATCH * n_repeats;
    double *combine_us = samples_us + (size_t)YARD_BENCH_EP_COMBINE * n_repeats;
    double *pair_us = samples_us + (size_t)YARD_BENCH_EP_PAIR * n_repeats;
    yard_ep_bench *b = NULL;
    yard_status st = open_sets(r, large ? 1 : N_SETS, &b, err);

    plan.n_samples = n_repeats;
    plan.n_pairs = large ? LARGE_PAIRS : PAIRS;
    plan.phases = true;
    if (st == YARD_OK && !r->peer->pair_only)
        st = yard_ep_bench_time(b, &plan, pair_us, dispatch_us, combine_us, err);
    plan.phases = false;
    if (st == YARD_OK)
        st = yard_ep_bench_time(b, &plan, pair_us, NULL, NULL, err);
    if (st == YARD_OK) /* what was agreed upon */
        *n = yard_bench_ep_agree(r, 0);
    if (st == YARD_OK)
        st = exchange_set(r, b, err);
    yard_ep_bench_destroy(b);
    return st;
}

static void poison(yard_bench_ep_rank *r)
{
    gpu_side *s = r->impl;

    memset(s->count, 0x55, r->data->n_local * sizeof(*s->count));
    memset(s->row_index, 0x55, s->capacity.expert_y_rows * sizeof(*s->row_index));
}

static bool check(yard_bench_ep_rank *r, yard_error *err)
{
    const gpu_side *s = r->impl;
    const size_t n = (size_t)r->data->shape.n_tokens * r->data->shape.hidden;

    for (size_t i = 0; i < n; i++)
        s->y[i] = yard_f32_from_bf16(s->y_bf16[i]);
    return yard_bench_ep_check_dispatch(r->data, s->expert_x, s->expert_x_scale, s->count,
                                        s->row_index, r->data->shape.n_tokens, err) &&
           yard_bench_ep_check_combine(r->data, s->y, err);
}

static void close_device(yard_bench_ep_rank *r)
{
    if (r->impl)
        release_case(r->impl);
    free(r->impl);
    r->impl = NULL;
}

#define GPU_PEER(transport, ...)                                                                   \
    {                                                                                              \
        .name = (transport), .open = open_device, .prepare = prepare, .dispatch = dispatch,        \
        .combine = combine, .measure = measure, .poison = poison, .check = check,                  \
        .close = close_device, __VA_ARGS__                                                         \
    }
#define GPU_PEERS(transport)                                                                       \
    {                                                                                              \
        GPU_PEER(transport, .launch = "graph"),                                                    \
            GPU_PEER(transport, .launch = "single", .single = true),                               \
            GPU_PEER(transport, .launch = "cold", .cold = true, .pair_only = true),                \
            GPU_PEER(transport, .launch = "split", .between_us = 200, .pair_only = true),          \
            GPU_PEER(transport, .launch = "24sms", .send_sms = 24)                                 \
    }

const yard_bench_ep_peer yard_bench_ep_nvlink[] = GPU_PEERS("nvlink");
const yard_bench_ep_peer yard_bench_ep_nvshmem[] = GPU_PEERS("nvshmem");
