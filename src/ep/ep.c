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
        { "n_experts", c->n_experts, 1, 1u << 20 },
        { "top_k", c->top_k, 1, YARD_EP_MAX_TOP_K },
        { "hidden", c->hidden, 1, 1u << 20 },
        { "max_tokens", c->max_tokens, 1, 1u << 20 },
        { "tp", c->tp, 1, YARD_EP_MAX_TP },
        { "n_rounds", c->n_rounds, 1, 16 },
        { "row_align", c->row_align, 1, 4096 },
        { "dispatch", c->dispatch, 0, YARD_EP_FP8 },
        { "combine", c->combine, 0, YARD_EP_BF16 },
        { "input", c->input, 0, YARD_EP_FP8 },
        { "output", c->output, 0, YARD_EP_BF16 },
        { "mode", c->mode, 0, YARD_EP_PARTIAL },
        { "layout", c->layout, 0, YARD_EP_FLAT_IN_PLACE },
        { "device", c->device, 0, YARD_EP_CUDA },
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
    if (c->layout == YARD_EP_FLAT_IN_PLACE && c->node_copies)
        return yard_fail(
            err, YARD_EINVAL,
            "ep config: node_copies: want false with rows in place, got true: rows for "
            "a node land at one of its ranks");
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

static const ep_backend *backend_of(const yard_ep_config *c)
{
    return c->device == YARD_EP_CUDA ? &yard_ep_cuda : &yard_ep_cpu;
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

    ep->backend = backend_of(c);
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

static bool is_flat(const yard_ep_config *c)
{
    return c->layout != YARD_EP_EXPERT_MAJOR;
}

/* Device memory that all ranks map needs no staging. Any other transport of devices is named. */
static bool stores_directly(const yard_ep_config *c)
{
    const char *transport = c->fabric_config ? c->fabric_config->transport : NULL;

    return c->device == YARD_EP_CUDA && (!transport || !strcmp(transport, "nvlink"));
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
        is_flat(&ep.config) ? (uint64_t)ep.dp * ep.config.max_tokens : ep.routed_rows;
    st = ep.backend->check(&ep, err);
    if (st == YARD_OK)
        out->heap_bytes = ep.backend->heap_bytes(&ep, stores_directly(&ep.config));
    return st;
}

static bool on_device(const yard_ep *ep)
{
    return ep->config.device == YARD_EP_CUDA;
}

/* A device's heap is no place for the host to compare configs in. */
static yard_status borrow_fabric(yard_ep *ep, yard_error *err)
{
    const uint64_t has = yard_fabric_heap_bytes(ep->config.fabric), at = ep->config.heap_at;
    const uint32_t n_ranks = yard_fabric_size(ep->config.fabric);
    yard_status st;

    ep->fabric = ep->config.fabric;
    if (on_device(ep))
        return check_config(&ep->config, n_ranks, err);
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
    st = ep->backend->check(ep, err);
    if (st != YARD_OK) {
        tell_others(config);
        return st;
    }
    config.heap_bytes = ep->backend->heap_bytes(ep, false);
    if (!config.transport)
        config.transport = ep->backend->transport;
    ep->owns_fabric = true;
    return yard_fabric_create_for(&ep->fabric, &config, ep->backend->heap_bytes(ep, true), err);
}

static yard_status check_heap(const yard_ep *ep, yard_error *err)
{
    const uint64_t at = ep->config.heap_at;
    const uint64_t has = on_device(ep) ? yard_fabric_device_heap_bytes(ep->fabric)
                                       : yard_fabric_heap_bytes(ep->fabric);
    const bool copies =
        on_device(ep) ? !yard_fabric_device_puts(ep->fabric) : yard_fabric_copies(ep->fabric);
    const size_t want = ep->backend->heap_bytes(ep, copies);

    if (at % ALIGN != 0 || at > has || want > has - at)
        return yard_fail(err, YARD_EINVAL,
                         "ep: want a heap of %zu bytes from %llu on, the fabric's has %llu%s", want,
                         (unsigned long long)at, (unsigned long long)has,
                         on_device(ep) ? " of a device's memory" : "");
    return YARD_OK;
}

static yard_status start(yard_ep *ep, yard_error *err)
{
    const char *reason = "", *transport;
    yard_status st = ep->config.fabric ? borrow_fabric(ep, err) : make_fabric(ep, err);

    if (st != YARD_OK)
        return st;
    derive(ep, yard_fabric_rank(ep->fabric), yard_fabric_size(ep->fabric));
    st = ep->backend->check(ep, err);
    if (st == YARD_OK)
        st = check_heap(ep, err);
    if (st != YARD_OK)
        return st;
    transport = yard_fabric_transport(ep->fabric, &reason);
    snprintf(ep->description, sizeof(ep->description), "%s over %s: %s", ep->backend->name,
             transport, reason);
    return ep->backend->open(ep, err);
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
    if (ep->backend && ep->backend->close)
        ep->backend->close(ep); /* before the heap goes */
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

yard_status yard_ep_round_limit(yard_ep_round *round, uint32_t n_tokens)
{
    yard_ep *ep = round->ep;

    if (n_tokens > ep->config.max_tokens)
        return yard_fail(&ep->err, YARD_EINVAL, "round_limit: want at most %u tokens, got %u",
                         ep->config.max_tokens, n_tokens);
    if (round->state != ROUND_IDLE)
        return yard_fail(&ep->err, YARD_EINVAL, "round_limit: want a round between exchanges");
    round->limit = n_tokens;
    return YARD_OK;
}

void *yard_ep_expert_y(const yard_ep_round *round)
{
    return round->ep->config.expert_y_in_place ? ep_heap(round->ep, round->heap.expert_y) : NULL;
}

const void *yard_ep_expert_x(const yard_ep_round *round, size_t *pitch_bytes,
                             size_t *scale_at_bytes)
{
    const yard_ep *ep = round->ep;

    if (ep->config.layout != YARD_EP_FLAT_IN_PLACE)
        return NULL;
    return ep->backend->expert_x(round, pitch_bytes, scale_at_bytes);
}

void yard_ep_get_stats(const yard_ep *ep, yard_ep_stats *out)
{
    *out = ep->stats;
}

yard_status yard_ep_dispatch_send(yard_ep_round *round, const void *x, const float *x_scale,
                                  const int32_t *expert, const float *weight,
                                  const int32_t *n_tokens, yard_stream stream)
{
    const yard_status st = yard_ep_enter(round, ROUND_IDLE, "dispatch_send");

    if (st != YARD_OK)
        return st;
    return round->ep->backend->dispatch_send(round, x, x_scale, expert, weight, n_tokens, stream);
}

static yard_status check_received(yard_ep *ep, const void *expert_x, const float *expert_x_scale,
                                  const int32_t *expert_count, const int32_t *row_index)
{
    const bool in_place = ep->config.layout == YARD_EP_FLAT_IN_PLACE;

    if (!row_index && is_flat(&ep->config))
        return yard_fail(&ep->err, YARD_EINVAL,
                         "dispatch_recv: row_index: the flat layout needs "
                         "it, got NULL");
    if (in_place && (expert_x || expert_x_scale))
        return yard_fail(
            &ep->err, YARD_EINVAL,
            "dispatch_recv: expert_x, expert_x_scale: want NULL, for rows in place are "
            "at yard_ep_expert_x(), got a buffer");
    if (!in_place && (expert_x_scale != NULL) != (ep->config.dispatch == YARD_EP_FP8))
        return yard_fail(&ep->err, YARD_EINVAL,
                         "dispatch_recv: expert_x_scale: want it exactly "
                         "when dispatch is FP8");
    if ((!in_place && !expert_x) || !expert_count)
        return yard_fail(&ep->err, YARD_EINVAL,
                         "dispatch_recv: expert_x, expert_count: want buffers, got NULL");
    return YARD_OK;
}

yard_status yard_ep_dispatch_recv(yard_ep_round *round, void *expert_x, float *expert_x_scale,
                                  int32_t *expert_count, int32_t *row_index, yard_stream stream)
{
    yard_ep *ep = round->ep;
    yard_status st = yard_ep_enter(round, ROUND_DISPATCH_SENT, "dispatch_recv");

    if (st == YARD_OK)
        st = check_received(ep, expert_x, expert_x_scale, expert_count, row_index);
    if (st != YARD_OK)
        return st;
    return ep->backend->dispatch_recv(round, expert_x, expert_x_scale, expert_count, row_index,
                                      stream);
}

yard_status yard_ep_combine_send(yard_ep_round *round, const void *expert_y, yard_stream stream)
{
    const yard_status st = yard_ep_enter(round, ROUND_DISPATCHED, "combine_send");

    return st == YARD_OK ? round->ep->backend->combine_send(round, expert_y, stream) : st;
}

yard_status yard_ep_combine_recv(yard_ep_round *round, void *y, yard_stream stream)
{
    const yard_status st = yard_ep_enter(round, ROUND_COMBINE_SENT, "combine_recv");

    return st == YARD_OK ? round->ep->backend->combine_recv(round, y, stream) : st;
}

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
