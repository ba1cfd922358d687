/* Weights to a device with memory of its own, once, at load: matrices in the form that its products
 * read, norms and biases as they are. */
#include <stdlib.h>

#include "model/forward_impl.h"

typedef struct placer {
    yard_model *m;
    yard_arena vectors; /* first measured, then filled */
    yard_error *err;
} placer;

static yard_status place_values(placer *p, const void **values, size_t n_bytes)
{
    yard_status st = YARD_OK;
    void *to;

    if (!*values)
        return YARD_OK;
    to = yard_arena_take(&p->vectors, n_bytes);
    if (to) {
        st = p->m->ops->upload(p->m->stream, to, *values, n_bytes, p->err);
        *values = to;
    }
    return st;
}

static yard_status place_vector(placer *p, yard_vector *v)
{
    return place_values(p, &v->data, v->n * yard_dtype_bytes(v->dtype));
}

static yard_status place_bias(placer *p, yard_moe_weights *w)
{
    const void *bias = w->bias;
    const yard_status st = place_values(p, &bias, p->m->config.n_experts * sizeof(float));

    w->bias = bias;
    return st;
}

static yard_status place_layer_vectors(placer *p, yard_layer_weights *w)
{
    yard_vector *const vectors[] = { &w->input_norm, &w->post_norm, &w->attention.q_a_norm,
                                     &w->attention.kv_a_norm };
    yard_status st = YARD_OK;

    for (size_t i = 0; i < sizeof(vectors) / sizeof(vectors[0]) && st == YARD_OK; i++)
        st = place_vector(p, vectors[i]);
    return st == YARD_OK && w->is_moe ? place_bias(p, &w->moe) : st;
}

/* Called twice: to measure, then to place. */
static yard_status walk_vectors(placer *p)
{
    yard_model *m = p->m;
    yard_mtp_weights *mtp = m->options.mtp ? &m->weights->mtp[0] : NULL;
    yard_status st = place_vector(p, &m->weights->final_norm);

    for (uint32_t i = 0; i < m->config.n_layers && st == YARD_OK; i++)
        st = place_layer_vectors(p, &m->weights->layers[i]);
    if (st != YARD_OK || !mtp)
        return st;
    st = place_layer_vectors(p, &mtp->layer);
    if (st == YARD_OK)
        st = place_vector(p, &mtp->enorm);
    if (st == YARD_OK)
        st = place_vector(p, &mtp->hnorm);
    return st == YARD_OK ? place_vector(p, &mtp->head_norm) : st;
}

static yard_status place_vectors(placer *p)
{
    yard_model *m = p->m;
    yard_status st = walk_vectors(p);

    if (st == YARD_OK)
        st = m->ops->allocate(&m->vectors, m->stream, p->vectors.used_bytes, p->err);
    if (st != YARD_OK)
        return st;
    p->vectors = (yard_arena){ .base = m->vectors, .size_bytes = p->vectors.used_bytes };
    return walk_vectors(p);
}

/* n matrices of one shape, for one grouped product; absorb: see yard_prepare_args. */
static yard_status place_group(placer *p, yard_matrix *w, uint32_t n,
                               const yard_head_linear_args *absorb)
{
    yard_model *m = p->m;
    struct yard_prepared **more;
    yard_status st;

    if (!w || n == 0 || !w[0].data)
        return YARD_OK;
    more = realloc(m->prepared, (m->n_prepared + 1) * sizeof(struct yard_prepared *));
    if (!more)
        return yard_fail(p->err, YARD_ENOMEM, "weights: no memory for a list of %u matrices",
                         m->n_prepared + 1);
    m->prepared = more;
    st = m->ops->prepare(
        &more[m->n_prepared], w, m->stream,
        &(yard_prepare_args){ .parts = w, .n_matrices = n, .n_parts = 1, .absorb = absorb },
        p->err);
    m->n_prepared += st == YARD_OK;
    return st;
}

static yard_status place_matrix(placer *p, yard_matrix *w)
{
    return place_group(p, w, 1, NULL);
}

static yard_status place_attention(placer *p, yard_attention_weights *w)
{
    const yard_model *m = p->m;
    const yard_head_linear_args absorb = { .n_heads = m->share.heads.n,
                                           .head_rows = m->config.nope_dims,
                                           .head_stride = m->config.nope_dims + m->config.v_dims,
                                           .transposed = true,
                                           .w = w->kv_b };
    yard_matrix *const matrices[] = { &w->q_a, &w->q_b, &w->kv_a, &w->k, &w->v, &w->o };
    yard_status st = place_group(p, &w->kv_b, 1, &absorb);

    for (size_t i = 0; i < sizeof(matrices) / sizeof(matrices[0]) && st == YARD_OK; i++)
        st = place_matrix(p, matrices[i]);
    return st;
}

static yard_status place_mlp(placer *p, yard_mlp_weights *w)
{
    yard_status st = place_matrix(p, &w->gate);

    if (st == YARD_OK)
        st = place_matrix(p, &w->up);
    return st == YARD_OK ? place_matrix(p, &w->down) : st;
}

static yard_status place_moe(placer *p, yard_moe_weights *w)
{
    yard_matrix *const experts[] = { w->gate, w->up, w->down };
    yard_status st = place_matrix(p, &w->router);

    for (size_t i = 0; i < sizeof(experts) / sizeof(experts[0]) && st == YARD_OK; i++)
        st = place_group(p, experts[i], p->m->share.experts.n, NULL);
    return st == YARD_OK ? place_mlp(p, &w->shared) : st;
}

static yard_status place_layer(placer *p, yard_layer_weights *w)
{
    const yard_status st = place_attention(p, &w->attention);

    if (st != YARD_OK)
        return st;
    return w->is_moe ? place_moe(p, &w->moe) : place_mlp(p, &w->dense);
}

static yard_status place_mtp(placer *p, yard_mtp_weights *w)
{
    yard_status st = place_layer(p, &w->layer);

    if (st == YARD_OK)
        st = place_matrix(p, &w->embed);
    if (st == YARD_OK)
        st = place_matrix(p, &w->eh_proj);
    return st == YARD_OK ? place_matrix(p, &w->head) : st;
}

static yard_status place_matrices(placer *p, const yard_notify *notify)
{
    yard_model *m = p->m;
    yard_weights *w = m->weights;
    const uint32_t n = m->config.n_layers + (m->options.mtp ? 1 : 0) + 1;
    yard_status st = place_matrix(p, &w->embed);

    if (m->config.tied_embedding)
        w->head = w->embed;
    else if (st == YARD_OK)
        st = place_matrix(p, &w->head);
    for (uint32_t i = 0; i + 1 < n && st == YARD_OK; i++) {
        yard_progress(notify, "weights to the device", i + 1, n);
        st = i < m->config.n_layers ? place_layer(p, &w->layers[i]) : place_mtp(p, &w->mtp[0]);
    }
    if (st == YARD_OK)
        yard_progress(notify, "weights to the device", n, n);
    return st;
}

yard_status yard_model_place_weights(yard_model *m, const yard_notify *notify, yard_error *err)
{
    placer p = { .m = m, .err = err };
    yard_status st;

    if (m->ops->in_host_memory)
        return YARD_OK;
    st = place_vectors(&p);
    return st == YARD_OK ? place_matrices(&p, notify) : st;
}

void yard_model_release_weights(yard_model *m)
{
    for (uint32_t i = 0; i < m->n_prepared; i++)
        m->ops->release_prepared(m->stream, m->prepared[i]);
    free(m->prepared);
    m->ops->release(m->stream, m->vectors);
}
