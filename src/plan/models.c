/* Model dimensions: the built-in ones, and what a config.json says. */
#include <stdio.h>

#include "model/model.h"
#include "plan/plan.h"

static const yard_plan_model models[] = {
    { .size = sizeof(yard_plan_model),
      .name = "deepseek-v3",
      .attention = YARD_PLAN_MLA,
      YARD_DEEPSEEK_V3_DIMENSIONS,
      .n_mtp = 1,
      .router_bias = true,
      .weight_bits = 8 },
    { .size = sizeof(yard_plan_model),
      .name = "deepseek-v2-lite",
      .attention = YARD_PLAN_MLA,
      YARD_DEEPSEEK_V2_LITE_DIMENSIONS,
      .weight_bits = 16 },
    { .size = sizeof(yard_plan_model),
      .name = "kimi-k2",
      .attention = YARD_PLAN_MLA,
      YARD_KIMI_K2_DIMENSIONS,
      .router_bias = true,
      .weight_bits = 8 },
    { .size = sizeof(yard_plan_model),
      .name = "mixtral-8x7b",
      .attention = YARD_PLAN_GQA,
      YARD_MIXTRAL_8X7B_DIMENSIONS,
      .head_dims = YARD_MIXTRAL_8X7B_HEAD_DIMS,
      .weight_bits = 16 },
    /* Meta-Llama-3-70B config.json: the dense baseline */
    { .size = sizeof(yard_plan_model),
      .name = "llama-3-70b",
      .attention = YARD_PLAN_GQA,
      .vocab = 128256,
      .hidden = 8192,
      .n_layers = 80,
      .n_dense_layers = 80,
      .n_heads = 64,
      .n_kv_heads = 8,
      .head_dims = 128,
      .dense_inter = 28672,
      .weight_bits = 16 },
};

enum { N_MODELS = sizeof(models) / sizeof(models[0]) };

const yard_plan_model *yard_plan_model_at(uint32_t i)
{
    return i < N_MODELS ? &models[i] : NULL;
}

const yard_plan_model *yard_plan_model_find(const char *name)
{
    for (uint32_t i = 0; i < N_MODELS; i++)
        if (!strcmp(models[i].name, name))
            return &models[i];
    return NULL;
}

static void keep_first(void *ctx, const char *line)
{
    char *first = ctx;

    if (!first[0])
        snprintf(first, YARD_PLAN_WHY_BYTES, "%s", line);
}

yard_status yard_plan_model_load(yard_plan_model *out, const char *dir, yard_error *err)
{
    char unknown[YARD_PLAN_WHY_BYTES] = "";
    const yard_notify notify = { .warn = keep_first, .ctx = unknown };
    yard_model_config c;
    const yard_status st = yard_model_config_load(&c, dir, &notify, err);
    const char *base = strrchr(dir, '/');

    if (st)
        return st;
    /* the engine goes on; a plan could be of another model, and nothing would show it */
    if (unknown[0])
        return yard_fail(err, YARD_ENOTSUP,
                         "%s; a field the planner does not know may change the cost", unknown);
    *out = (yard_plan_model){
        .size = sizeof(*out),
        .attention = c.attention == YARD_ATTENTION_GQA ? YARD_PLAN_GQA : YARD_PLAN_MLA,
        .vocab = c.vocab,
        .hidden = c.hidden,
        .n_layers = c.n_layers,
        .n_dense_layers = c.n_dense_layers,
        .n_heads = c.n_heads,
        .n_kv_heads = c.n_kv_heads,
        .head_dims = c.rope_dims, /* read with grouped-query attention, which has no others */
        .q_rank = c.q_rank,
        .kv_rank = c.kv_rank,
        .nope_dims = c.nope_dims,
        .rope_dims = c.rope_dims,
        .v_dims = c.v_dims,
        .dense_inter = c.dense_inter,
        .expert_inter = c.expert_inter,
        .n_experts = c.n_experts,
        .n_shared_experts = c.n_shared_experts,
        .top_k = c.top_k,
        .n_groups = c.n_groups,
        .top_groups = c.top_groups,
        .n_mtp = c.n_mtp,
        .router_bias = c.router_bias,
        .weight_bits = c.fp8 ? 8 : 16,
    };
    snprintf(out->name, sizeof(out->name), "%s", base && base[1] ? base + 1 : dir);
    for (char *at = out->name; *at; at++) /* it gets into scripts of gnuplot and HTML */
        if (strchr("\"\\`$<>&", *at) || (unsigned char)*at < ' ')
            *at = '_';
    return YARD_OK;
}

static uint64_t product(uint32_t a, uint32_t b)
{
    return (uint64_t)a * b;
}

static uint64_t count_attention(const yard_plan_model *m)
{
    const uint32_t q_rows = m->n_heads * (m->nope_dims + m->rope_dims);
    uint64_t n;

    if (m->attention == YARD_PLAN_GQA)
        return 2 * product(m->hidden, m->n_heads * m->head_dims) +
               2 * product(m->hidden, m->n_kv_heads * m->head_dims);
    n = product(m->hidden, m->kv_rank + m->rope_dims) + m->kv_rank +
        product(m->kv_rank, m->n_heads * (m->nope_dims + m->v_dims)) +
        product(m->n_heads * m->v_dims, m->hidden);
    if (m->q_rank)
        return n + product(m->hidden, m->q_rank) + m->q_rank + product(m->q_rank, q_rows);
    return n + product(m->hidden, q_rows);
}

void yard_plan_count_params(const yard_plan_model *m, yard_plan_params *out)
{
    *out = (yard_plan_params){
        .attention_per_layer = count_attention(m),
        .dense_mlp = m->n_dense_layers ? 3 * product(m->hidden, m->dense_inter) : 0,
        .expert = 3 * product(m->hidden, m->expert_inter),
        .router = product(m->hidden, m->n_experts) + (m->router_bias ? m->n_experts : 0),
        .embedding = product(m->vocab, m->hidden),
    };
    out->total = yard_plan_params_read(m, m->n_experts) + out->embedding;
    out->active = yard_plan_params_read(m, m->top_k);
    out->active_with_embedding = out->active + out->embedding;
}

uint64_t yard_plan_params_read(const yard_plan_model *m, uint32_t n_experts)
{
    const uint64_t n_moe = m->n_layers - m->n_dense_layers;
    const uint64_t expert = 3 * product(m->hidden, m->expert_inter);
    const uint64_t router = product(m->hidden, m->n_experts) + (m->router_bias ? m->n_experts : 0);

    return m->n_layers * (count_attention(m) + 2 * (uint64_t)m->hidden) +
           m->n_dense_layers * 3 * product(m->hidden, m->dense_inter) +
           n_moe * (router + ((uint64_t)n_experts + m->n_shared_experts) * expert) + m->hidden +
           product(m->vocab, m->hidden);
}

static uint64_t kv_row_bytes(const yard_plan_model *m, uint32_t kv_bits, bool one_scale)
{
    const bool mla = m->attention == YARD_PLAN_MLA;
    const uint64_t values =
        mla ? (uint64_t)m->kv_rank + m->rope_dims : 2 * product(m->n_kv_heads, m->head_dims);

    if (mla && kv_bits == 8 && !one_scale) /* in units of 16 bytes */
        return (m->kv_rank + 4 * ((m->kv_rank + 127) / 128) + 2 * m->rope_dims + 15) / 16 * 16;
    return values * kv_bits / 8;
}

uint64_t yard_plan_kv_bytes_per_token(const yard_plan_model *m, uint32_t kv_bits)
{
    return m->n_layers * kv_row_bytes(m, kv_bits, false);
}

double yard_plan_kv_row_bytes(const yard_plan_config *c)
{
    return (double)kv_row_bytes(c->model, c->kv_bits, c->kv_one_scale);
}
