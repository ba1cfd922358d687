/* Parts of a step: their buffers, and the walk through the layers that a schedule asks for. */
#include <stdlib.h>

#include "model/forward_impl.h"

static uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

yard_rows yard_rows_take(yard_arena *arena, yard_dtype dtype, size_t n_rows, uint32_t n_cols)
{
    yard_rows rows = { .dtype = dtype, .ld = n_cols };

    rows.data = yard_arena_take(arena, n_rows * n_cols * yard_dtype_bytes(dtype));
    if (dtype == YARD_FP8_E4M3)
        rows.scale = yard_arena_take(arena, n_rows * yard_group_count(n_cols) * sizeof(float));
    return rows;
}

activation yard_activation_take(const yard_model *m, yard_arena *arena, size_t n_rows,
                                uint32_t n_cols)
{
    activation a = { .plain = yard_rows_take(arena, m->plain, n_rows, n_cols) };

    if (m->quantise)
        a.quant = yard_rows_take(arena, YARD_FP8_E4M3, n_rows, n_cols);
    return a;
}

static void lay_out_attention(const yard_model *m, yard_part *p, yard_arena *arena)
{
    const yard_model_config *c = &m->config;
    const size_t t = m->options.max_tokens;
    const uint32_t heads = m->share.heads.n;

    p->x = yard_arena_take(arena, t * c->hidden * sizeof(float));
    p->h = yard_activation_take(m, arena, t, c->hidden);
    p->q_a = yard_rows_take(arena, YARD_F32, t, c->q_rank);
    p->q_a_norm = yard_activation_take(m, arena, t, c->q_rank);
    p->q = yard_rows_take(arena, m->plain, t, heads * (c->nope_dims + c->rope_dims));
    if (c->attention == YARD_ATTENTION_GQA) {
        p->k = yard_rows_take(arena, YARD_F32, t, m->share.kv_heads.n * c->rope_dims);
        p->v = yard_rows_take(arena, YARD_F32, t, m->share.kv_heads.n * c->v_dims);
    } else {
        p->kv_a = yard_rows_take(arena, YARD_F32, t, c->kv_rank + c->rope_dims);
        p->q_latent = yard_rows_take(arena, m->plain, t, heads * c->kv_rank);
        p->o_latent = yard_rows_take(arena, m->plain, t, heads * c->kv_rank);
    }
    p->attended = yard_activation_take(m, arena, t, heads * c->v_dims);
    p->delta = yard_rows_take(arena, YARD_F32, t, c->hidden);
}

static void lay_out_mlp(const yard_model *m, yard_part *p, yard_arena *arena)
{
    const yard_model_config *c = &m->config;
    const size_t t = m->options.max_tokens, chosen = t * c->top_k;
    const uint32_t inter =
        max_u32(max_u32(m->share.dense.n, 1), c->n_shared_experts * c->expert_inter);

    p->mlp_gate_up = yard_rows_take(arena, m->plain, t, 2 * inter);
    p->mlp_mid = yard_activation_take(m, arena, t, inter);
    p->router_logits = yard_arena_take(arena, t * c->n_experts * sizeof(float));
    p->expert = yard_arena_take(arena, chosen * sizeof(int32_t));
    p->expert_weight = yard_arena_take(arena, chosen * sizeof(float));
    p->row_index = yard_arena_take(arena, chosen * sizeof(int32_t));
    p->expert_y = yard_rows_take(
        arena, m->plain, yard_exchange_in_place(&m->options) ? 0 : m->expert_rows, c->hidden);
    p->moe_y = yard_arena_take(arena, t * c->hidden * sizeof(float));
}

void yard_part_lay_out(const yard_model *m, yard_part *p, yard_arena *arena)
{
    lay_out_attention(m, p, arena);
    lay_out_mlp(m, p, arena);
}

static void skip_rows(yard_rows *rows, size_t n)
{
    if (rows->data)
        rows->data = (uint8_t *)rows->data + n * rows->ld * yard_dtype_bytes(rows->dtype);
    if (rows->scale)
        rows->scale += n * yard_group_count(rows->ld);
}

static void skip_activation(activation *a, size_t n)
{
    skip_rows(&a->plain, n);
    skip_rows(&a->quant, n);
}

static void skip_batch(yard_batch *b, size_t n)
{
    b->token += n;
    b->position += n;
    b->seq += n;
    b->absorbed += n;
}

/* Rows [first, first + n) of the step. Results of experts have a place of their own where they stay
 * until they are added: rows of their own on one rank, the round's on several. Where the round has
 * none it takes them at once. */
static void cut_part(yard_model *m, uint32_t half, uint32_t first, uint32_t n)
{
    yard_part *const p = &m->half[half];
    const size_t hidden = m->config.hidden, top_k = m->config.top_k;

    *p = m->all;
    p->n_tokens = (int32_t)n;
    /* the same on all ranks, and the second half's buffers have no room for more */
    p->max_rows = yard_model_bound_rows((m->all.max_rows + 1) / 2,
                                        max_u32((m->options.max_tokens + 1 - half) / 2, 1));
    p->batch.n_tokens = yard_mirrored(&m->inputs, &m->count[1 + half]);
    skip_batch(&p->batch, first);
    p->x += first * hidden;
    p->moe_y += first * hidden;
    p->router_logits += (size_t)first * m->config.n_experts;
    p->expert += first * top_k;
    p->expert_weight += first * top_k;
    p->row_index += first * top_k;
    skip_rows(&p->q_a, first);
    skip_rows(&p->kv_a, first);
    skip_rows(&p->q, first);
    skip_rows(&p->q_latent, first);
    skip_rows(&p->o_latent, first);
    skip_rows(&p->k, first);
    skip_rows(&p->v, first);
    skip_rows(&p->delta, first);
    skip_rows(&p->mlp_gate_up, first);
    skip_activation(&p->h, first);
    skip_activation(&p->q_a_norm, first);
    skip_activation(&p->attended, first);
    skip_activation(&p->mlp_mid, first);
    if (m->ep) {
        yard_exchange_enter(m, p, half);
    } else {
        skip_rows(&p->expert_y, first * top_k);
    }
}

/* n values of four bytes, as the host sees them; a copy is the caller's to free. */
static const void *look_at(const yard_model *m, const void *values, size_t n, void **copy)
{
    *copy = NULL;
    if (m->ops->in_host_memory)
        return values;
    *copy = malloc(n * 4);
    if (*copy && m->ops->download(m->stream, *copy, values, n * 4, NULL) == YARD_OK)
        return *copy;
    return NULL;
}

static void trace_layer(const yard_model *m, uint32_t layer_idx)
{
    const size_t n = (size_t)m->all.n_tokens, n_chosen = n * m->config.top_k;
    const bool is_moe = m->layers[layer_idx].w->is_moe;
    yard_layer_trace trace = { .layer = layer_idx, .n_tokens = (uint32_t)n };
    void *copies[3] = { NULL };

    if (!m->trace || layer_idx >= m->config.n_layers)
        return;
    m->ops->synchronise(m->stream);
    trace.hidden = look_at(m, m->all.x, n * m->config.hidden, &copies[0]);
    if (is_moe) {
        trace.expert = look_at(m, m->all.expert, n_chosen, &copies[1]);
        trace.weight = look_at(m, m->all.expert_weight, n_chosen, &copies[2]);
    }
    m->trace(m->trace_ctx, &trace);
    for (int i = 0; i < 3; i++)
        free(copies[i]);
}

/* Layers that all take the same schedule: see schedule.h. */
static void walk(yard_model *m, const yard_schedule *schedule, uint32_t first, uint32_t end)
{
    yard_part *const parts = schedule->n_halves == 1 ? &m->all : m->half;

    m->schedule = schedule;
    for (int64_t i = (int64_t)first - 1; i <= end; i++) {
        for (uint32_t j = 0; j < schedule->n_calls; j++) {
            const yard_stage_call *call = &schedule->call[j];
            const int64_t layer = i + call->layer_offset;

            if (layer >= first && layer < end && m->failed == YARD_OK)
                yard_model_run_stage(m, &parts[call->half], (uint32_t)layer, call->stage);
        }
        if (schedule->n_halves == 1 && i >= first && i < end)
            trace_layer(m, (uint32_t)i);
    }
}

yard_status yard_model_cut(yard_model *m, const yard_schedule *schedule, yard_error *err)
{
    const uint32_t n = (uint32_t)m->all.n_tokens;

    if (schedule->n_halves == 1)
        return YARD_OK;
    if (m->ep && !m->options.micro_batch)
        return yard_fail(err, YARD_EINVAL,
                         "schedule %s: want a model created with micro_batch, its second round of "
                         "exchange is missing",
                         schedule->name);
    cut_part(m, 0, 0, (n + 1) / 2);
    cut_part(m, 1, (n + 1) / 2, n / 2);
    return YARD_OK;
}

void yard_model_issue_layers(yard_model *m, const yard_schedule *schedule, uint32_t first,
                             uint32_t end)
{
    const uint32_t n_dense = m->config.n_dense_layers;
    const uint32_t first_moe = first < n_dense ? n_dense : first;

    if (first < first_moe)
        walk(m, &yard_schedule_none, first, first_moe);
    walk(m, schedule, first_moe, end);
}
