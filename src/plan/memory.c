/* What one rank holds.
 *
 * Weights: projections at the model's width, with their scales; router, embedding, head and norms
 * in BF16. Routed experts are n_slots / ep of every MoE layer; q_b, kv_b, o and dense MLPs are cut
 * by TP; q_a, kv_a, shared expert, router, embedding and head lie on every rank. A rank of a DP
 * group holds the cache of the whole group. */
#include <math.h>

#include "plan/plan.h"

enum { HEAD_BITS = 16 };

/* Assumed: graphs of all batch sizes, and the context of driver and libraries. */
static const double graphs_gb = 1.0;

static double mla_bytes(const yard_plan_config *c, bool kv_b_on_all_ranks)
{
    const yard_plan_model *m = c->model;
    const uint32_t bits = yard_plan_weight_bits(c);
    const double heads = (double)m->n_heads / c->tp;
    const double q_in = m->q_rank ? m->q_rank : m->hidden;
    const double kv_b_heads = kv_b_on_all_ranks ? m->n_heads : heads;
    double n = yard_plan_weight_bytes(bits, m->kv_rank + m->rope_dims, m->hidden) +
               yard_plan_weight_bytes(bits, heads * (m->nope_dims + m->rope_dims), q_in) +
               yard_plan_weight_bytes(bits, kv_b_heads * (m->nope_dims + m->v_dims), m->kv_rank) +
               yard_plan_weight_bytes(bits, m->hidden, heads * m->v_dims) +
               2.0 * (m->kv_rank + m->q_rank);

    if (m->q_rank)
        n += yard_plan_weight_bytes(bits, m->q_rank, m->hidden);
    return n;
}

static double gqa_bytes(const yard_plan_config *c)
{
    const yard_plan_model *m = c->model;
    const uint32_t bits = yard_plan_weight_bits(c);
    const double heads = (double)m->n_heads / c->tp;
    const double kv_heads = fmax(1, (double)m->n_kv_heads / c->tp);

    return yard_plan_weight_bytes(bits, (heads + 2 * kv_heads) * m->head_dims, m->hidden) +
           yard_plan_weight_bytes(bits, m->hidden, heads * m->head_dims);
}

static double attention_bytes(const yard_plan_config *c, bool kv_b_on_all_ranks)
{
    return 4.0 * c->model->hidden +
           (c->model->attention == YARD_PLAN_MLA ? mla_bytes(c, kv_b_on_all_ranks) : gqa_bytes(c));
}

static double mlp_bytes(const yard_plan_config *c, double inter)
{
    const uint32_t bits = yard_plan_weight_bits(c);

    return yard_plan_weight_bytes(bits, 2 * inter, c->model->hidden) +
           yard_plan_weight_bytes(bits, c->model->hidden, inter);
}

static double moe_bytes(const yard_plan_config *c)
{
    const yard_plan_model *m = c->model;
    const double router =
        2.0 * m->hidden * m->n_experts + (m->router_bias ? 4.0 * m->n_experts : 0);

    return router + yard_plan_slots(c) * mlp_bytes(c, m->expert_inter) +
           m->n_shared_experts * mlp_bytes(c, m->expert_inter);
}

static double weight_bytes(const yard_plan_config *c, bool kv_b_on_all_ranks)
{
    const yard_plan_model *m = c->model;
    const double n_moe = m->n_layers - m->n_dense_layers;
    double n = m->n_layers * attention_bytes(c, kv_b_on_all_ranks) +
               2.0 * m->vocab * m->hidden * HEAD_BITS / 8 + 2.0 * m->hidden;

    if (m->n_dense_layers)
        n += m->n_dense_layers * mlp_bytes(c, (double)m->dense_inter / c->tp);
    return n_moe > 0 ? n + n_moe * moe_bytes(c) : n;
}

/* A draft module is a MoE layer and a projection; it shares embedding and head with the model. */
static double mtp_bytes(const yard_plan_config *c)
{
    const yard_plan_model *m = c->model;

    if (!m->n_mtp || c->no_draft || c->phase == YARD_PLAN_PREFILL || c->query < 2)
        return 0;
    return m->n_mtp *
           (attention_bytes(c, false) + moe_bytes(c) +
            yard_plan_weight_bytes(yard_plan_weight_bits(c), m->hidden, 2.0 * m->hidden));
}

static double max_tokens(const yard_plan_config *c)
{
    return c->phase == YARD_PLAN_PREFILL ? c->chunk : (double)c->batch * c->query;
}

/* Exchange buffers. Decode: the articles' layout, a private region per expert and source on both
 * sides. That grows with the experts times the tokens; for the large steps of prefill take the
 * project's own: one row a token and source for dispatch, k rows a token for combine. */
static double exchange_bytes(const yard_plan_config *c)
{
    const yard_plan_model *m = c->model;
    const double t = max_tokens(c), dispatch = yard_plan_dispatch_row_bytes(c);

    if (!m->n_experts || c->ep == 1)
        return 0;
    if (c->phase == YARD_PLAN_PREFILL)
        return c->ep / (double)c->tp * t * dispatch + m->top_k * t * yard_plan_combine_row_bytes(c);
    return (double)yard_plan_slots(c) * yard_plan_dp(c) * t * dispatch +
           t * (m->n_experts + c->redundant) * yard_plan_combine_row_bytes(c);
}

/* Activations of the widest point of a step: the routed rows between the expert projections. */
static double scratch_bytes(const yard_plan_config *c)
{
    const yard_plan_model *m = c->model;
    const double t = max_tokens(c);
    const double rows = m->n_experts ? yard_plan_expert_rows(c, t) : 0;

    return t * (24.0 * m->hidden + 8.0 * m->n_heads * 192 / c->tp + 2.0 * m->dense_inter / c->tp) +
           rows * (3.0 * m->hidden + 6.0 * m->expert_inter) +
           2.0 * m->vocab * (c->phase == YARD_PLAN_PREFILL ? t / c->prompt + 1 : t);
}

static uint32_t requests_in(double gb, double per_request)
{
    return gb <= 0 ? 0 : (uint32_t)floor(gb * 1e9 / per_request);
}

void yard_plan_fill_memory(const yard_plan_config *c, bool kv_b_on_all_ranks, yard_plan_memory *out)
{
    const bool prefill = c->phase == YARD_PLAN_PREFILL;
    const double token = c->model->n_layers * yard_plan_kv_row_bytes(c) /
                         (c->model->attention == YARD_PLAN_GQA ? c->tp : 1);
    const double length = prefill ? (double)c->kv + c->prompt : c->kv;
    const double n_requests = prefill ? ceil((double)c->chunk / c->prompt) : c->batch;
    const double per_request = token * fmax(1, length);
    /* what a further request takes beside its cache */
    double fixed_gb;

    out->weights_gb = weight_bytes(c, kv_b_on_all_ranks) * 1e-9;
    out->mtp_gb = mtp_bytes(c) * 1e-9;
    out->exchange_gb = exchange_bytes(c) * 1e-9;
    out->scratch_gb = scratch_bytes(c) * 1e-9;
    out->graphs_gb = prefill ? 0 : graphs_gb;
    out->kv_gb = n_requests * per_request * 1e-9;
    fixed_gb = out->weights_gb + out->mtp_gb + out->graphs_gb;
    out->total_gb = fixed_gb + out->exchange_gb + out->scratch_gb + out->kv_gb;
    out->max_batch_bound = requests_in(c->gpu->hbm_gb - out->weights_gb, per_request);
    out->max_batch =
        requests_in(c->gpu->hbm_gb - fixed_gb,
                    per_request + (out->exchange_gb + out->scratch_gb) * 1e9 / n_requests);
}

yard_status yard_plan_memory_of(const yard_plan_config *config, bool kv_b_on_all_ranks,
                                yard_plan_memory *out, yard_error *err)
{
    const yard_status st = yard_plan_check(config, err);

    if (!st)
        yard_plan_fill_memory(config, kv_b_on_all_ranks, out);
    return st;
}
