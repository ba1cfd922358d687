/* Rows to the experts of all ranks and back. On one rank both ways are copies by the ops table; on
 * several they are the four calls of libyard-ep. What arrives has the same order within an expert
 * (instance, then token), results are added in the same order of k, from rows of the same dtype: so
 * ranks change no bit. */
#include <stdlib.h>

#include "model/forward_impl.h"

static const uint32_t no_layer = UINT32_MAX;

static bool has_ranks(const yard_model_options *o)
{
    return o->layout.ep > 1;
}

/* One of a device's own memory is CUDA's: its streams are what libyard-ep takes there. */
static bool on_device(const yard_model_options *o)
{
    return !o->ops->in_host_memory;
}

bool yard_exchange_in_place(const yard_model_options *o)
{
    return has_ranks(o) && !on_device(o);
}

/* The device has a heap of its own. */
static yard_sym heap_at(const yard_model_options *o)
{
    return on_device(o) ? 0 : o->heap_at;
}

static yard_ep_config ep_config(const yard_model_config *c, const yard_model_options *o)
{
    const yard_ep_dtype plain = o->exact ? YARD_EP_F32 : YARD_EP_BF16;
    yard_ep_config e = YARD_EP_CONFIG_INIT;

    e.n_experts = c->n_experts;
    e.top_k = c->top_k;
    e.hidden = c->hidden;
    e.max_tokens = o->max_tokens;
    e.tp = o->layout.tp;
    e.n_rounds = o->micro_batch ? YARD_MAX_HALVES : 1;
    /* FP8 rows are those that the norm before the router made, with their scales. */
    e.dispatch = e.input = c->fp8 && !o->exact ? YARD_EP_FP8 : plain;
    e.combine = plain;
    e.ue8m0 = c->ue8m0;
    e.timeout_us = o->timeout_us;
    e.fabric = o->fabric;
    e.heap_at = heap_at(o);
    e.device = on_device(o) ? YARD_EP_CUDA : YARD_EP_CPU;
    e.expert_y_in_place = yard_exchange_in_place(o);
    return e;
}

/* Behind what dispatch and combine need. */
static yard_all_reduce_config reduce_config(const yard_model_config *c, const yard_model_options *o,
                                            size_t ep_bytes)
{
    return (yard_all_reduce_config){ .tp = o->layout.tp,
                                     .max_rows = o->max_tokens,
                                     .n_cols = c->hidden,
                                     .fabric = o->fabric,
                                     .heap_at = heap_at(o) + yard_align_up(ep_bytes, 64),
                                     .timeout_us = o->timeout_us };
}

yard_status yard_exchange_size(const yard_model_config *c, const yard_model_options *o,
                               size_t *expert_rows, size_t *heap_bytes, yard_error *err)
{
    const yard_ep_config config = ep_config(c, o);
    yard_all_reduce_config reduce;
    yard_ep_capacity capacity;
    yard_status st;

    *expert_rows = (size_t)o->max_tokens * c->top_k;
    *heap_bytes = 0;
    if (!has_ranks(o))
        return YARD_OK;
    st = yard_ep_capacity_of(&config, o->layout.ep, &capacity, err);
    if (st != YARD_OK)
        return st;
    *expert_rows = capacity.expert_y_rows;
    reduce = reduce_config(c, o, capacity.heap_bytes);
    *heap_bytes = reduce.heap_at - heap_at(o);
    if (o->layout.tp > 1)
        *heap_bytes += yard_all_reduce_heap_bytes(&reduce);
    return YARD_OK;
}

yard_status yard_exchange_create(yard_model *m, yard_error *err)
{
    const yard_ep_config config = ep_config(&m->config, &m->options);
    yard_all_reduce_config reduce;
    yard_ep_capacity capacity;
    yard_status st;

    if (!has_ranks(&m->options))
        return YARD_OK;
    st = yard_ep_create(&m->ep, &config, err);
    if (st == YARD_OK)
        st = yard_ep_capacity_of(&config, m->options.layout.ep, &capacity, err);
    if (st != YARD_OK)
        return st;
    yard_exchange_enter(m, &m->all, 0);
    reduce = reduce_config(&m->config, &m->options, capacity.heap_bytes);
    return reduce.tp > 1 ? yard_all_reduce_create(&m->reduce, &reduce, err) : YARD_OK;
}

void yard_exchange_enter(yard_model *m, yard_part *p, uint32_t round_idx)
{
    p->round = yard_ep_get_round(m->ep, round_idx);
    if (yard_exchange_in_place(&m->options))
        p->expert_y.data = yard_ep_expert_y(p->round);
}

void yard_exchange_destroy(yard_model *m)
{
    yard_all_reduce_destroy(m->reduce);
    yard_ep_destroy(m->ep);
    m->reduce = NULL;
    m->ep = NULL;
}

/* What kernels have found. They run behind the calls that start them, so at no stage. */
static void look_at_device(yard_model *m)
{
    yard_status st = YARD_OK;

    if (m->reduce)
        st = yard_all_reduce_poll(m->reduce);
    if (st == YARD_OK && m->ep)
        st = yard_ep_poll(m->ep);
    if (st == YARD_OK || m->failed != YARD_OK)
        return;
    m->failed_at.layer_idx = no_layer;
    m->failed = st;
}

yard_status yard_exchange_check(yard_model *m, yard_error *err)
{
    static const char *const stages[YARD_STAGE_COUNT] = {
        [YARD_STAGE_INPUT] = "input",     [YARD_STAGE_ATTEND] = "attend",
        [YARD_STAGE_SEND] = "send",       [YARD_STAGE_EXPERTS] = "experts",
        [YARD_STAGE_RECEIVE] = "receive",
    };
    const char *what;

    if (on_device(&m->options))
        look_at_device(m);
    if (m->failed == YARD_OK)
        return YARD_OK;
    what = m->reduce && *yard_all_reduce_error(m->reduce) ? yard_all_reduce_error(m->reduce)
                                                          : yard_ep_error(m->ep);
    if (m->failed_at.layer_idx == no_layer)
        return yard_fail(err, m->failed, "exchange of a layer: %s", what);
    return yard_fail(err, m->failed, "layer %u, stage %s: %s", m->failed_at.layer_idx,
                     stages[m->failed_at.stage], what);
}

/* A call of the ep room, as the stream will make it. */
typedef struct exchange_call {
    yard_model *m;
    yard_part *p;
    bool fp8;
    yard_place at;
    yard_status (*run)(const struct exchange_call *call);
} exchange_call;

static void run_call(void *ctx)
{
    const exchange_call *call = ctx;
    yard_status st;

    if (call->m->failed != YARD_OK)
        return;
    st = call->run(call);
    if (st == YARD_OK)
        return;
    call->m->failed_at = call->at;
    call->m->failed = st;
}

static void issue(yard_model *m, yard_part *p, bool fp8,
                  yard_status (*run)(const exchange_call *call))
{
    exchange_call call = { .m = m, .p = p, .fp8 = fp8, .at = m->at, .run = run };

    if (m->ops->issue)
        m->ops->issue(m->stream, run_call, &call, sizeof(call));
    else
        run_call(&call);
}

static yard_stream stream_of(const yard_model *m)
{
    return m->ops->native_stream ? m->ops->native_stream(m->stream) : m->stream;
}

static yard_status run_sum(const exchange_call *call)
{
    return yard_all_reduce_sum(call->m->reduce, call->p->delta.data, call->p->batch.n_tokens,
                               stream_of(call->m));
}

void yard_exchange_sum(yard_model *m, yard_part *p)
{
    if (m->reduce)
        issue(m, p, false, run_sum);
}

static yard_status run_send(const exchange_call *call)
{
    const yard_part *p = call->p;
    const yard_rows *const x = call->fp8 ? &p->h.quant : &p->h.plain;
    const yard_status st = yard_ep_round_limit(p->round, p->max_rows);

    if (st != YARD_OK)
        return st;
    return yard_ep_dispatch_send(p->round, x->data, x->scale, p->expert, p->expert_weight,
                                 p->batch.n_tokens, stream_of(call->m));
}

void yard_exchange_send(yard_model *m, yard_part *p, bool fp8)
{
    if (m->ep)
        issue(m, p, fp8, run_send);
}

static void take_local(yard_model *m, yard_part *p, bool fp8)
{
    m->ops->moe_scatter(m->stream, &(yard_moe_scatter_args){ .n_tokens = p->batch.n_tokens,
                                                             .max_rows = p->max_rows,
                                                             .n_experts = m->config.n_experts,
                                                             .top_k = m->config.top_k,
                                                             .n_cols = m->config.hidden,
                                                             .expert = p->expert,
                                                             .x = fp8 ? p->h.quant : p->h.plain,
                                                             .offset = m->offset,
                                                             .row_index = p->row_index,
                                                             .expert_x = fp8 ? m->expert_x.quant
                                                                             : m->expert_x.plain });
}

static yard_status run_take(const exchange_call *call)
{
    const yard_model *m = call->m;
    const yard_rows *const x = call->fp8 ? &m->expert_x.quant : &m->expert_x.plain;

    return yard_ep_dispatch_recv(call->p->round, x->data, x->scale, m->expert_count, NULL,
                                 stream_of(m));
}

void yard_exchange_take(yard_model *m, yard_part *p, bool fp8)
{
    if (!m->ep) {
        take_local(m, p, fp8);
        return;
    }
    issue(m, p, fp8, run_take);
    m->ops->count_offsets(m->stream, &(yard_count_offsets_args){ .n_groups = m->share.experts.n,
                                                                 .count = m->expert_count,
                                                                 .offset = m->offset });
}

static yard_status run_return(const exchange_call *call)
{
    return yard_ep_combine_send(call->p->round, call->p->expert_y.data, stream_of(call->m));
}

void yard_exchange_return(yard_model *m, yard_part *p)
{
    if (m->ep)
        issue(m, p, false, run_return);
}

static yard_status run_finish(const exchange_call *call)
{
    return yard_ep_combine_recv(call->p->round, call->p->moe_y, stream_of(call->m));
}

void yard_exchange_finish(yard_model *m, yard_part *p)
{
    if (m->ep) {
        issue(m, p, false, run_finish);
        return;
    }
    m->ops->moe_gather(m->stream, &(yard_moe_gather_args){ .n_tokens = p->batch.n_tokens,
                                                           .max_rows = p->max_rows,
                                                           .top_k = m->config.top_k,
                                                           .n_cols = m->config.hidden,
                                                           .row_index = p->row_index,
                                                           .weight = p->expert_weight,
                                                           .expert_y = p->expert_y,
                                                           .y = p->moe_y });
}
