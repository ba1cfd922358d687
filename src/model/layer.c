/* One layer as five stages. Each is a list of operations; nothing here looks at a value. */
#include "model/forward_impl.h"

void yard_model_linear(const yard_model *m, const activation *in, const int32_t *n_rows,
                       uint32_t max_rows, const yard_matrix *w, yard_rows y)
{
    const bool fp8 = m->quantise && w->dtype == YARD_FP8_E4M3;

    m->ops->linear(m->stream, &(yard_linear_args){ .n_rows = n_rows,
                                                   .max_rows = max_rows,
                                                   .x = fp8 ? in->quant : in->plain,
                                                   .w = *w,
                                                   .y = y });
}

static void linear(yard_model *m, const yard_part *p, const activation *in, const yard_matrix *w,
                   yard_rows y)
{
    yard_model_linear(m, in, p->batch.n_tokens, p->max_rows, w, y);
}

static void norm(yard_model *m, const yard_part *p, yard_rows x, yard_rows add,
                 const yard_vector *w, const activation *y)
{
    m->ops->rms_norm_quant(m->stream, &(yard_rms_norm_args){ .n_rows = p->batch.n_tokens,
                                                             .max_rows = p->max_rows,
                                                             .n_cols = w->n,
                                                             .x = x,
                                                             .add = add,
                                                             .weight_dtype = w->dtype,
                                                             .weight = w->data,
                                                             .eps = m->config.norm_eps,
                                                             .ue8m0 = m->config.ue8m0,
                                                             .y = *y });
}

static yard_rows residual(const yard_model *m, const yard_part *p)
{
    return (yard_rows){ .dtype = YARD_F32, .ld = m->config.hidden, .data = p->x };
}

static yard_head_linear_args kv_b_args(const yard_model *m, const yard_part *p,
                                       const yard_layer *layer)
{
    const yard_matrix *w = &layer->w->attention.kv_b;

    return (yard_head_linear_args){ .n_rows = p->batch.n_tokens,
                                    .max_rows = p->max_rows,
                                    .row_mask = p->batch.absorbed,
                                    .n_heads = m->share.heads.n,
                                    .head_stride = m->config.nope_dims + m->config.v_dims,
                                    .quantise = m->quantise && w->dtype == YARD_FP8_E4M3,
                                    .ue8m0 = m->config.ue8m0,
                                    .w = *w };
}

/* q = x W_q, in one projection or through a latent. */
static void project_queries(yard_model *m, yard_part *p, const yard_attention_weights *w)
{
    const yard_rows none = { 0 };

    if (m->config.q_rank == 0) {
        linear(m, p, &p->h, &w->q_b, p->q);
        return;
    }
    linear(m, p, &p->h, &w->q_a, p->q_a);
    norm(m, p, p->q_a, none, &w->q_a_norm, &p->q_a_norm);
    linear(m, p, &p->q_a_norm, &w->q_b, p->q);
}

static void mla_input(yard_model *m, yard_part *p, const yard_layer *layer)
{
    const yard_model_config *c = &m->config;
    const yard_attention_weights *w = &layer->w->attention;
    const yard_rope rope = yard_model_rope(m);
    yard_head_linear_args absorb = kv_b_args(m, p, layer);

    linear(m, p, &p->h, &w->kv_a, p->kv_a);
    m->ops->rope_append_kv(m->stream, &(yard_rope_append_kv_args){ .batch = &p->batch,
                                                                   .max_rows = p->max_rows,
                                                                   .kv_rank = c->kv_rank,
                                                                   .kv = p->kv_a,
                                                                   .norm_dtype = w->kv_a_norm.dtype,
                                                                   .norm_weight = w->kv_a_norm.data,
                                                                   .eps = c->norm_eps,
                                                                   .rope = rope,
                                                                   .cache = layer->cache,
                                                                   .ue8m0 = c->ue8m0 });
    project_queries(m, p, w);
    m->ops->rope_q(m->stream, &(yard_rope_q_args){ .batch = &p->batch,
                                                   .max_rows = p->max_rows,
                                                   .n_heads = m->share.heads.n,
                                                   .head_dim = c->nope_dims + c->rope_dims,
                                                   .rope = rope,
                                                   .q = p->q });
    if (!p->has_generated)
        return;
    absorb.head_rows = c->nope_dims;
    absorb.transposed = true;
    absorb.x = p->q;
    absorb.x_head_stride = c->nope_dims + c->rope_dims;
    absorb.y = p->q_latent;
    absorb.y_head_stride = c->kv_rank;
    m->ops->head_linear(m->stream, &absorb);
}

/* Both forms of latent attention; each row belongs to one of them. */
static void mla_attend(yard_model *m, yard_part *p, const yard_layer *layer)
{
    const yard_model_config *c = &m->config;
    yard_head_linear_args values = kv_b_args(m, p, layer);

    if (p->has_prompts)
        m->ops->mla_prefill(m->stream, &(yard_mla_prefill_args){ .batch = &p->batch,
                                                                 .n_heads = m->share.heads.n,
                                                                 .kv_rank = c->kv_rank,
                                                                 .nope_dims = c->nope_dims,
                                                                 .rope_dims = c->rope_dims,
                                                                 .v_dims = c->v_dims,
                                                                 .softmax_scale = m->softmax_scale,
                                                                 .q = p->q,
                                                                 .kv_b = layer->w->attention.kv_b,
                                                                 .quantise = values.quantise,
                                                                 .ue8m0 = c->ue8m0,
                                                                 .cache = layer->cache,
                                                                 .y = p->attended.plain });
    if (!p->has_generated)
        return;
    m->ops->mla_decode(m->stream, &(yard_mla_decode_args){ .batch = &p->batch,
                                                           .n_heads = m->share.heads.n,
                                                           .kv_rank = c->kv_rank,
                                                           .rope_dims = c->rope_dims,
                                                           .softmax_scale = m->softmax_scale,
                                                           .q_latent = p->q_latent,
                                                           .q = p->q,
                                                           .head_dim = c->nope_dims + c->rope_dims,
                                                           .cache = layer->cache,
                                                           .y = p->o_latent });
    values.head_rows = c->v_dims;
    values.head_offset = c->nope_dims;
    values.x = p->o_latent;
    values.x_head_stride = c->kv_rank;
    values.y = p->attended.plain;
    values.y_head_stride = c->v_dims;
    m->ops->head_linear(m->stream, &values);
}

/* What the first two stages do between the norms, by kind of attention. */
static const struct {
    void (*input)(yard_model *m, yard_part *p, const yard_layer *layer);
    void (*attend)(yard_model *m, yard_part *p, const yard_layer *layer);
} attentions[] = {
    [YARD_ATTENTION_MLA] = { mla_input, mla_attend },
    [YARD_ATTENTION_GQA] = { yard_model_gqa_input, yard_model_gqa_attend },
};

static void stage_input(yard_model *m, yard_part *p, const yard_layer *layer)
{
    const yard_rows none = { 0 };

    norm(m, p, residual(m, p), none, &layer->w->input_norm, &p->h);
    attentions[m->config.attention].input(m, p, layer);
}

static void route(yard_model *m, yard_part *p, const yard_moe_weights *w)
{
    const yard_model_config *c = &m->config;
    const yard_rows logits = { .dtype = YARD_F32, .ld = c->n_experts, .data = p->router_logits };

    linear(m, p, &p->h, &w->router, logits);
    m->ops->moe_route(m->stream, &(yard_moe_route_args){ .n_rows = p->batch.n_tokens,
                                                         .max_rows = p->max_rows,
                                                         .n_experts = c->n_experts,
                                                         .top_k = c->top_k,
                                                         .n_groups = c->n_groups,
                                                         .top_groups = c->top_groups,
                                                         .score = c->score,
                                                         .group_value = c->group_value,
                                                         .normalise = c->normalise_topk,
                                                         .scale = c->routed_scale,
                                                         .logits = p->router_logits,
                                                         .bias = w->bias,
                                                         .expert = p->expert,
                                                         .weight = p->expert_weight });
}

static void stage_attend(yard_model *m, yard_part *p, const yard_layer *layer)
{
    attentions[m->config.attention].attend(m, p, layer);
    if (p->attended.quant.data)
        m->ops->quantise(m->stream,
                         &(yard_quantise_args){ .n_rows = p->batch.n_tokens,
                                                .max_rows = p->max_rows,
                                                .n_cols = m->share.heads.n * m->config.v_dims,
                                                .x = p->attended.plain,
                                                .ue8m0 = m->config.ue8m0,
                                                .y = p->attended.quant });
    linear(m, p, &p->attended, &layer->w->attention.o, p->delta);
    yard_exchange_sum(m, p);
    norm(m, p, residual(m, p), p->delta, &layer->w->post_norm, &p->h);
    if (layer->w->is_moe)
        route(m, p, &layer->w->moe);
}

/* delta = down(silu(gate(h)) * up(h)) for all rows: a slice of a dense MLP, or the shared expert.
 */
static void dense_mlp(yard_model *m, yard_part *p, const yard_mlp_weights *w)
{
    const uint32_t inter = w->gate.rows;
    activation mid = p->mlp_mid;

    p->mlp_gate_up.ld = 2 * inter;
    mid.plain.ld = mid.quant.ld = inter;
    linear(m, p, &p->h, &w->gate, p->mlp_gate_up);
    linear(m, p, &p->h, &w->up, yard_columns(p->mlp_gate_up, inter));
    m->ops->silu_mul_quant(m->stream, &(yard_silu_mul_args){ .n_rows = p->batch.n_tokens,
                                                             .max_rows = p->max_rows,
                                                             .n_cols = inter,
                                                             .gate_up = p->mlp_gate_up,
                                                             .ue8m0 = m->config.ue8m0,
                                                             .y = mid });
    linear(m, p, &mid, &w->down, p->delta);
}

/* Whether the layer's routed experts read FP8 rows. */
static bool experts_read_fp8(const yard_model *m, const yard_layer *layer)
{
    return m->quantise && layer->w->moe.gate[0].dtype == YARD_FP8_E4M3;
}

static void shared_expert(yard_model *m, yard_part *p, const yard_layer *layer)
{
    if (layer->w->moe.shared.gate.data)
        dense_mlp(m, p, &layer->w->moe.shared);
}

static void stage_send(yard_model *m, yard_part *p, const yard_layer *layer)
{
    if (!layer->w->is_moe) {
        dense_mlp(m, p, &layer->w->dense);
        yard_exchange_sum(m, p);
        return;
    }
    yard_exchange_send(m, p, experts_read_fp8(m, layer));
    if (m->schedule->shared_before_recv)
        shared_expert(m, p, layer);
}

/* Every instance may send each of its rows to as many experts of this rank as a row names. */
static uint32_t most_expert_rows(const yard_model *m, const yard_part *p)
{
    const uint32_t here = m->share.experts.n;
    const uint32_t per_row = m->config.top_k < here ? m->config.top_k : here;

    return m->options.layout.dp * p->max_rows * per_row;
}

static void grouped(yard_model *m, const yard_part *p, const activation *in, const yard_matrix *w,
                    yard_rows y)
{
    const bool fp8 = m->quantise && w->dtype == YARD_FP8_E4M3;
    const uint32_t expected = p->max_rows * m->config.top_k / m->options.layout.tp;

    m->ops->grouped_linear(m->stream,
                           &(yard_grouped_linear_args){ .n_groups = m->share.experts.n,
                                                        .offset = m->offset,
                                                        .max_rows = most_expert_rows(m, p),
                                                        .expected_rows = expected,
                                                        .x = fp8 ? in->quant : in->plain,
                                                        .w = w,
                                                        .y = y });
}

static void stage_experts(yard_model *m, yard_part *p, const yard_layer *layer)
{
    const yard_moe_weights *w = &layer->w->moe;
    const uint32_t inter = m->config.expert_inter;

    if (!layer->w->is_moe)
        return;
    yard_exchange_take(m, p, experts_read_fp8(m, layer));
    if (!m->schedule->shared_before_recv)
        shared_expert(m, p, layer);
    grouped(m, p, &m->expert_x, w->gate, m->expert_gate_up);
    grouped(m, p, &m->expert_x, w->up, yard_columns(m->expert_gate_up, inter));
    m->ops->silu_mul_quant(m->stream,
                           &(yard_silu_mul_args){ .n_rows = m->offset + m->share.experts.n,
                                                  .max_rows = most_expert_rows(m, p),
                                                  .n_cols = inter,
                                                  .gate_up = m->expert_gate_up,
                                                  .ue8m0 = m->config.ue8m0,
                                                  .y = m->expert_mid });
    grouped(m, p, &m->expert_mid, w->down, p->expert_y);
    yard_exchange_return(m, p);
}

static void stage_receive(yard_model *m, yard_part *p, const yard_layer *layer)
{
    const yard_model_config *c = &m->config;
    const yard_rows routed = { .dtype = YARD_F32, .ld = c->hidden, .data = p->moe_y };
    const bool is_moe = layer->w->is_moe;
    const yard_rows none = { 0 };
    yard_rows second = none;

    if (is_moe) {
        yard_exchange_finish(m, p);
        if (layer->w->moe.shared.gate.data)
            second = p->delta;
    }
    m->ops->residual_add(m->stream, &(yard_residual_add_args){ .n_rows = p->batch.n_tokens,
                                                               .max_rows = p->max_rows,
                                                               .n_cols = c->hidden,
                                                               .x = p->x,
                                                               .a = is_moe ? routed : p->delta,
                                                               .b = second });
}

void yard_model_run_stage(yard_model *m, yard_part *p, uint32_t layer_idx, yard_stage stage)
{
    static void (*const stages[YARD_STAGE_COUNT])(yard_model *, yard_part *, const yard_layer *) = {
        [YARD_STAGE_INPUT] = stage_input,     [YARD_STAGE_ATTEND] = stage_attend,
        [YARD_STAGE_SEND] = stage_send,       [YARD_STAGE_EXPERTS] = stage_experts,
        [YARD_STAGE_RECEIVE] = stage_receive,
    };

    m->at = (yard_place){ layer_idx, stage };
    stages[stage](m, p, &m->layers[layer_idx]);
}
