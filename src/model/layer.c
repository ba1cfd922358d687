/* One layer as five stages. Each is a list of operations; nothing here looks at a value. */
#include "model/forward_impl.h"

void yard_model_linear(yard_model *m, const activation *in, const int32_t *n_rows,
                       const yard_matrix *w, yard_rows y)
{
    const bool fp8 = m->quantise && w->dtype == YARD_FP8_E4M3;

    m->ops->linear(
        m->stream,
        &(yard_linear_args){ .n_rows = n_rows, .x = fp8 ? in->quant : in->plain, .w = *w, .y = y });
}

static void linear(yard_model *m, const activation *in, const yard_matrix *w, yard_rows y)
{
    yard_model_linear(m, in, m->batch.n_tokens, w, y);
}

static void norm(yard_model *m, yard_rows x, yard_rows add, const yard_vector *w,
                 const activation *y)
{
    m->ops->rms_norm_quant(m->stream, &(yard_rms_norm_args){ .n_rows = m->batch.n_tokens,
                                                             .n_cols = w->n,
                                                             .x = x,
                                                             .add = add,
                                                             .weight_dtype = w->dtype,
                                                             .weight = w->data,
                                                             .eps = m->config.norm_eps,
                                                             .ue8m0 = m->config.ue8m0,
                                                             .y = *y });
}

static yard_rows residual(const yard_model *m)
{
    return (yard_rows){ .dtype = YARD_F32, .ld = m->config.hidden, .data = m->x };
}

static yard_head_linear_args kv_b_part(const yard_model *m, const yard_layer *layer)
{
    const yard_matrix *w = &layer->w->attention.kv_b;

    return (yard_head_linear_args){ .n_rows = m->batch.n_tokens,
                                    .row_mask = m->batch.absorbed,
                                    .n_heads = m->config.n_heads,
                                    .head_stride = m->config.nope_dims + m->config.v_dims,
                                    .quantise = m->quantise && w->dtype == YARD_FP8_E4M3,
                                    .ue8m0 = m->config.ue8m0,
                                    .w = *w };
}

/* q = x W_q, in one projection or through a latent. */
static void project_queries(yard_model *m, const yard_mla_weights *w)
{
    const yard_rows none = { 0 };

    if (m->config.q_rank == 0) {
        linear(m, &m->h, &w->q_b, m->q);
        return;
    }
    linear(m, &m->h, &w->q_a, m->q_a);
    norm(m, m->q_a, none, &w->q_a_norm, &m->q_a_norm);
    linear(m, &m->q_a_norm, &w->q_b, m->q);
}

static void stage_input(yard_model *m, const yard_layer *layer)
{
    const yard_model_config *c = &m->config;
    const yard_mla_weights *w = &layer->w->attention;
    const yard_rope rope = { .inv_freq = m->inv_freq, .n_dims = c->rope_dims };
    const yard_rows none = { 0 };
    yard_head_linear_args absorb = kv_b_part(m, layer);

    norm(m, residual(m), none, &layer->w->input_norm, &m->h);
    linear(m, &m->h, &w->kv_a, m->kv_a);
    m->ops->rope_append_kv(m->stream, &(yard_rope_append_kv_args){ .batch = &m->batch,
                                                                   .kv_rank = c->kv_rank,
                                                                   .kv = m->kv_a,
                                                                   .norm_dtype = w->kv_a_norm.dtype,
                                                                   .norm_weight = w->kv_a_norm.data,
                                                                   .eps = c->norm_eps,
                                                                   .rope = rope,
                                                                   .cache = layer->cache });
    project_queries(m, w);
    m->ops->rope_q(m->stream, &(yard_rope_q_args){ .batch = &m->batch,
                                                   .n_heads = c->n_heads,
                                                   .head_dim = c->nope_dims + c->rope_dims,
                                                   .rope = rope,
                                                   .q = m->q });
    absorb.head_rows = c->nope_dims;
    absorb.transposed = true;
    absorb.x = m->q;
    absorb.x_head_stride = c->nope_dims + c->rope_dims;
    absorb.y = m->q_latent;
    absorb.y_head_stride = c->kv_rank;
    m->ops->head_linear(m->stream, &absorb);
}

/* Both forms of attention; each row belongs to one of them. */
static void attend(yard_model *m, const yard_layer *layer)
{
    const yard_model_config *c = &m->config;
    yard_head_linear_args values = kv_b_part(m, layer);

    m->ops->mla_prefill(m->stream, &(yard_mla_prefill_args){ .batch = &m->batch,
                                                             .n_heads = c->n_heads,
                                                             .kv_rank = c->kv_rank,
                                                             .nope_dims = c->nope_dims,
                                                             .rope_dims = c->rope_dims,
                                                             .v_dims = c->v_dims,
                                                             .softmax_scale = m->softmax_scale,
                                                             .q = m->q,
                                                             .kv_b = layer->w->attention.kv_b,
                                                             .quantise = values.quantise,
                                                             .ue8m0 = c->ue8m0,
                                                             .cache = layer->cache,
                                                             .y = m->attended.plain });
    m->ops->mla_decode(m->stream, &(yard_mla_decode_args){ .batch = &m->batch,
                                                           .n_heads = c->n_heads,
                                                           .kv_rank = c->kv_rank,
                                                           .rope_dims = c->rope_dims,
                                                           .softmax_scale = m->softmax_scale,
                                                           .q_latent = m->q_latent,
                                                           .q = m->q,
                                                           .head_dim = c->nope_dims + c->rope_dims,
                                                           .cache = layer->cache,
                                                           .y = m->o_latent });
    values.head_rows = c->v_dims;
    values.head_offset = c->nope_dims;
    values.x = m->o_latent;
    values.x_head_stride = c->kv_rank;
    values.y = m->attended.plain;
    values.y_head_stride = c->v_dims;
    m->ops->head_linear(m->stream, &values);
}

static void route(yard_model *m, const yard_moe_weights *w)
{
    const yard_model_config *c = &m->config;
    const yard_rows logits = { .dtype = YARD_F32, .ld = c->n_experts, .data = m->router_logits };

    linear(m, &m->h, &w->router, logits);
    m->ops->moe_route(m->stream, &(yard_moe_route_args){ .n_rows = m->batch.n_tokens,
                                                         .n_experts = c->n_experts,
                                                         .top_k = c->top_k,
                                                         .n_groups = c->n_groups,
                                                         .top_groups = c->top_groups,
                                                         .score = c->score,
                                                         .normalise = c->normalise_topk,
                                                         .scale = c->routed_scale,
                                                         .logits = m->router_logits,
                                                         .bias = w->bias,
                                                         .expert = m->expert,
                                                         .weight = m->expert_weight });
}

static void stage_attend(yard_model *m, const yard_layer *layer)
{
    attend(m, layer);
    if (m->attended.quant.data)
        m->ops->quantise(m->stream,
                         &(yard_quantise_args){ .n_rows = m->batch.n_tokens,
                                                .n_cols = m->config.n_heads * m->config.v_dims,
                                                .x = m->attended.plain,
                                                .ue8m0 = m->config.ue8m0,
                                                .y = m->attended.quant });
    linear(m, &m->attended, &layer->w->attention.o, m->delta);
    norm(m, residual(m), m->delta, &layer->w->post_norm, &m->h);
    if (layer->w->is_moe)
        route(m, &layer->w->moe);
}

/* y = down(silu(gate(h)) * up(h)) for all rows: a dense MLP, or the shared expert. */
static void dense_mlp(yard_model *m, const yard_mlp_weights *w)
{
    const uint32_t inter = w->gate.rows;
    activation mid = m->mlp_mid;

    m->mlp_gate_up.ld = 2 * inter;
    mid.plain.ld = mid.quant.ld = inter;
    linear(m, &m->h, &w->gate, m->mlp_gate_up);
    linear(m, &m->h, &w->up, yard_columns(m->mlp_gate_up, inter));
    m->ops->silu_mul_quant(m->stream, &(yard_silu_mul_args){ .n_rows = m->batch.n_tokens,
                                                             .n_cols = inter,
                                                             .gate_up = m->mlp_gate_up,
                                                             .ue8m0 = m->config.ue8m0,
                                                             .y = mid });
    linear(m, &mid, &w->down, m->delta);
}

static void stage_send(yard_model *m, const yard_layer *layer)
{
    const yard_model_config *c = &m->config;
    bool fp8;

    if (!layer->w->is_moe) {
        dense_mlp(m, &layer->w->dense);
        return;
    }
    fp8 = m->quantise && layer->w->moe.gate[0].dtype == YARD_FP8_E4M3;
    m->ops->moe_scatter(m->stream, &(yard_moe_scatter_args){ .n_tokens = m->batch.n_tokens,
                                                             .n_experts = c->n_experts,
                                                             .top_k = c->top_k,
                                                             .n_cols = c->hidden,
                                                             .expert = m->expert,
                                                             .x = fp8 ? m->h.quant : m->h.plain,
                                                             .offset = m->offset,
                                                             .row_index = m->row_index,
                                                             .expert_x = fp8 ? m->expert_x.quant
                                                                             : m->expert_x.plain });
    if (layer->w->moe.shared.gate.data)
        dense_mlp(m, &layer->w->moe.shared);
}

static void grouped(yard_model *m, const activation *in, const yard_matrix *w, yard_rows y)
{
    const bool fp8 = m->quantise && w->dtype == YARD_FP8_E4M3;

    m->ops->grouped_linear(m->stream, &(yard_grouped_linear_args){ .n_groups = m->config.n_experts,
                                                                   .offset = m->offset,
                                                                   .x = fp8 ? in->quant : in->plain,
                                                                   .w = w,
                                                                   .y = y });
}

static void stage_experts(yard_model *m, const yard_layer *layer)
{
    const yard_moe_weights *w = &layer->w->moe;
    const uint32_t inter = m->config.expert_inter;

    if (!layer->w->is_moe)
        return;
    grouped(m, &m->expert_x, w->gate, m->expert_gate_up);
    grouped(m, &m->expert_x, w->up, yard_columns(m->expert_gate_up, inter));
    m->ops->silu_mul_quant(m->stream,
                           &(yard_silu_mul_args){ .n_rows = m->offset + m->config.n_experts,
                                                  .n_cols = inter,
                                                  .gate_up = m->expert_gate_up,
                                                  .ue8m0 = m->config.ue8m0,
                                                  .y = m->expert_mid });
    grouped(m, &m->expert_mid, w->down, m->expert_y);
}

static void stage_receive(yard_model *m, const yard_layer *layer)
{
    const yard_model_config *c = &m->config;
    const yard_rows routed = { .dtype = YARD_F32, .ld = c->hidden, .data = m->moe_y };
    const bool is_moe = layer->w->is_moe;
    const yard_rows none = { 0 };
    yard_rows second = none;

    if (is_moe) {
        m->ops->moe_gather(m->stream, &(yard_moe_gather_args){ .n_tokens = m->batch.n_tokens,
                                                               .top_k = c->top_k,
                                                               .n_cols = c->hidden,
                                                               .row_index = m->row_index,
                                                               .weight = m->expert_weight,
                                                               .expert_y = m->expert_y,
                                                               .y = m->moe_y });
        if (layer->w->moe.shared.gate.data)
            second = m->delta;
    }
    m->ops->residual_add(m->stream, &(yard_residual_add_args){ .n_rows = m->batch.n_tokens,
                                                               .n_cols = c->hidden,
                                                               .x = m->x,
                                                               .a = is_moe ? routed : m->delta,
                                                               .b = second });
}

void yard_model_run_layer(yard_model *m, const yard_layer *layer)
{
    static void (*const stages[YARD_STAGE_COUNT])(yard_model *, const yard_layer *) = {
        [YARD_STAGE_INPUT] = stage_input,     [YARD_STAGE_ATTEND] = stage_attend,
        [YARD_STAGE_SEND] = stage_send,       [YARD_STAGE_EXPERTS] = stage_experts,
        [YARD_STAGE_RECEIVE] = stage_receive,
    };

    for (uint32_t i = 0; i < m->schedule->n_calls; i++)
        stages[m->schedule->call[i].stage](m, layer);
}
