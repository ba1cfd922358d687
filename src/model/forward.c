/* The passes over all layers: forward, output head, MTP module. */
#include "model/forward_impl.h"

/* A pass over rows that are there; complete on return. */
static yard_status run_pass(yard_model *m, const yard_schedule *schedule, yard_pass_kind kind,
                            yard_pass pass, yard_error *err)
{
    yard_status st;

    if (!schedule)
        schedule = &yard_schedule_none;
    st = yard_model_cut(m, schedule, err);
    if (st == YARD_OK)
        st = yard_model_issue_pass(m, schedule, kind, pass, err);
    if (st != YARD_OK)
        return st;
    m->ops->synchronise(m->stream);
    st = m->ops->check(m->stream, err);
    return st == YARD_OK ? yard_exchange_check(m, err) : st;
}

static void forward(yard_model *m, const yard_schedule *schedule)
{
    m->ops->embed(m->stream, &(yard_embed_args){ .n_rows = m->all.batch.n_tokens,
                                                 .max_rows = m->all.max_rows,
                                                 .token = m->all.batch.token,
                                                 .table = m->weights->embed,
                                                 .x = m->all.x });
    yard_model_issue_layers(m, schedule, 0, m->config.n_layers);
}

yard_status yard_model_forward(yard_model *m, const yard_schedule *schedule, yard_error *err)
{
    const yard_status st = yard_model_bring_rows(m, m->step.n_tokens, err);

    if (st != YARD_OK)
        return st;
    m->drafted = false;
    return run_pass(m, schedule, YARD_PASS_FORWARD, forward, err);
}

static yard_rms_norm_args norm_args(const yard_model *m, const int32_t *n_rows, uint32_t max_rows,
                                    float *x, const yard_vector *w, yard_rows y)
{
    return (yard_rms_norm_args){ .n_rows = n_rows,
                                 .max_rows = max_rows,
                                 .n_cols = w->n,
                                 .x = { .dtype = YARD_F32, .ld = w->n, .data = x },
                                 .weight_dtype = w->dtype,
                                 .weight = w->data,
                                 .eps = m->config.norm_eps,
                                 .y = { .plain = y } };
}

yard_status yard_model_logits(yard_model *m, const int32_t *index, uint32_t n_rows, yard_error *err)
{
    const yard_vector *final = m->drafted ? &m->weights->mtp[0].head_norm : &m->weights->final_norm;
    const yard_matrix *head = m->drafted ? &m->weights->mtp[0].head : &m->weights->head;
    const yard_rows logits = { .dtype = YARD_F32, .ld = m->config.vocab, .data = m->logits };
    const int32_t *const n = yard_mirrored(&m->inputs, m->n_logits);
    const uint32_t max_rows = yard_model_bound_rows(n_rows, m->options.max_logits);
    yard_rms_norm_args norm = norm_args(m, n, max_rows, m->selected, final, m->selected_norm.plain);
    yard_status st;

    *m->n_logits = (int32_t)n_rows;
    memcpy(m->logit_index, index, n_rows * sizeof(*index));
    st = yard_mirror_upload(m, &m->inputs, 0, (size_t)((uint8_t *)m->count - m->inputs.host), err);
    if (st != YARD_OK)
        return st;
    m->ops->select_rows(
        m->stream, &(yard_select_rows_args){ .n_rows = n,
                                             .max_rows = max_rows,
                                             .index = yard_mirrored(&m->inputs, m->logit_index),
                                             .n_cols = m->config.hidden,
                                             .x = m->all.x,
                                             .out = m->selected });
    norm.y.quant = m->selected_norm.quant;
    norm.ue8m0 = m->config.ue8m0;
    m->ops->rms_norm_quant(m->stream, &norm);
    yard_model_linear(m, &m->selected_norm, n, max_rows, head, logits);
    if (m->ops->in_host_memory)
        m->ops->synchronise(m->stream);
    return m->ops->check(m->stream, err);
}

static void draft(yard_model *m, const yard_schedule *schedule)
{
    const yard_mtp_weights *w = &m->weights->mtp[0];
    const yard_rows joined_hidden = yard_columns(m->joined, m->config.hidden);
    const yard_rows x = { .dtype = YARD_F32, .ld = m->config.hidden, .data = m->all.x };
    const activation joined = { .plain = m->joined };
    const int32_t *const n = m->all.batch.n_tokens;
    yard_rms_norm_args norm;

    if (m->config.mtp_reads_normed_hidden) {
        norm = norm_args(m, n, m->all.max_rows, m->all.x, &m->weights->final_norm, x);
        m->ops->rms_norm_quant(m->stream, &norm);
    }
    m->ops->embed(m->stream, &(yard_embed_args){ .n_rows = n,
                                                 .max_rows = m->all.max_rows,
                                                 .token = yard_mirrored(&m->inputs, m->next_token),
                                                 .table = w->embed,
                                                 .x = m->next_embed });
    norm = norm_args(m, n, m->all.max_rows, m->next_embed, &w->enorm, m->joined);
    m->ops->rms_norm_quant(m->stream, &norm);
    norm = norm_args(m, n, m->all.max_rows, m->all.x, &w->hnorm, joined_hidden);
    m->ops->rms_norm_quant(m->stream, &norm);
    yard_model_linear(m, &joined, n, m->all.max_rows, &w->eh_proj, x);
    yard_model_issue_layers(m, schedule, m->config.n_layers, m->config.n_layers + 1);
}

yard_status yard_model_draft(yard_model *m, const yard_schedule *schedule,
                             const int32_t *next_token, int32_t n_rows, yard_error *err)
{
    yard_status st;

    if (n_rows > 0)
        memcpy(m->next_token, next_token, (size_t)n_rows * sizeof(*next_token));
    st = yard_model_bring_rows(m, n_rows, err);
    if (st != YARD_OK)
        return st;
    m->drafted = true;
    return run_pass(m, schedule, YARD_PASS_DRAFT, draft, err);
}
