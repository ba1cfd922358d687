/* What grouped-query attention does in the first two stages of a layer. */
#include "model/forward_impl.h"

void yard_model_gqa_input(yard_model *m, yard_part *p, const yard_layer *layer)
{
    const yard_model_config *c = &m->config;
    const yard_attention_weights *w = &layer->w->attention;

    yard_model_linear(m, &p->h, p->batch.n_tokens, p->max_rows, &w->k, p->k);
    yard_model_linear(m, &p->h, p->batch.n_tokens, p->max_rows, &w->v, p->v);
    m->ops->gqa_append_kv(m->stream, &(yard_gqa_append_kv_args){ .batch = &p->batch,
                                                                 .max_rows = p->max_rows,
                                                                 .n_kv_heads = m->share.kv_heads.n,
                                                                 .head_dim = c->rope_dims,
                                                                 .rope = yard_model_rope(m),
                                                                 .k = p->k,
                                                                 .v = p->v,
                                                                 .cache = layer->cache });
    yard_model_linear(m, &p->h, p->batch.n_tokens, p->max_rows, &w->q_b, p->q);
    m->ops->rope_q(m->stream, &(yard_rope_q_args){ .batch = &p->batch,
                                                   .max_rows = p->max_rows,
                                                   .n_heads = m->share.heads.n,
                                                   .head_dim = c->rope_dims,
                                                   .rope = yard_model_rope(m),
                                                   .q = p->q });
}

void yard_model_gqa_attend(yard_model *m, yard_part *p, const yard_layer *layer)
{
    const yard_model_config *c = &m->config;

    m->ops->gqa_attend(m->stream, &(yard_gqa_attend_args){ .batch = &p->batch,
                                                           .n_heads = m->share.heads.n,
                                                           .n_kv_heads = m->share.kv_heads.n,
                                                           .head_dim = c->rope_dims,
                                                           .window = c->window,
                                                           .softmax_scale = m->softmax_scale,
                                                           .q = p->q,
                                                           .cache = layer->cache,
                                                           .y = p->attended.plain });
}
