/* Names and shapes as in the repositories of DeepSeek-V3 and Mixtral. */
#include "model/tensor_table.h"

#include <stdio.h>

typedef enum dim {
    NONE, /* the tensor has one dimension */
    HIDDEN,
    TWO_HIDDEN,
    VOCAB,
    Q_RANK,
    Q_ROWS,
    K_ROWS,
    V_ROWS,
    KV_RANK,
    KV_A_ROWS,
    KV_B_ROWS,
    VALUES,
    DENSE_INTER,
    EXPERT_INTER,
    SHARED_INTER,
    N_EXPERTS
} dim;

typedef enum condition { ALWAYS, Q_RANKED, Q_DIRECT, DENSE, MOE, BIASED, SHARED, UNTIED } condition;

typedef struct row {
    const char *name;
    yard_tensor_kind kind;
    dim rows, cols;
    size_t place;
    condition when;
} row;

#define PROJECTION YARD_TENSOR_PROJECTION
#define NORM YARD_TENSOR_NORM
#define IN_MODEL(member) offsetof(yard_weights, member)
#define IN_LAYER(member) offsetof(yard_layer_weights, member)
#define IN_MTP(member) offsetof(yard_mtp_weights, member)

/* clang-format off */
static const row first_rows[] = {
    { "model.embed_tokens.weight", YARD_TENSOR_EMBEDDING, VOCAB, HIDDEN, IN_MODEL(embed), ALWAYS },
    { NULL, 0, 0, 0, 0, 0 },
};

static const row last_rows[] = {
    { "model.norm.weight", NORM, HIDDEN, NONE, IN_MODEL(final_norm), ALWAYS },
    { "lm_head.weight", YARD_TENSOR_HEAD, VOCAB, HIDDEN, IN_MODEL(head), UNTIED },
    { NULL, 0, 0, 0, 0, 0 },
};

static const row deepseek_layer_rows[] = {
    { "input_layernorm.weight", NORM, HIDDEN, NONE, IN_LAYER(input_norm), ALWAYS },
    { "self_attn.q_a_proj.weight", PROJECTION, Q_RANK, HIDDEN, IN_LAYER(attention.q_a), Q_RANKED },
    { "self_attn.q_a_layernorm.weight", NORM, Q_RANK, NONE, IN_LAYER(attention.q_a_norm), Q_RANKED },
    { "self_attn.q_b_proj.weight", PROJECTION, Q_ROWS, Q_RANK, IN_LAYER(attention.q_b), Q_RANKED },
    { "self_attn.q_proj.weight", PROJECTION, Q_ROWS, HIDDEN, IN_LAYER(attention.q_b), Q_DIRECT },
    { "self_attn.kv_a_proj_with_mqa.weight", PROJECTION, KV_A_ROWS, HIDDEN, IN_LAYER(attention.kv_a), ALWAYS },
    { "self_attn.kv_a_layernorm.weight", NORM, KV_RANK, NONE, IN_LAYER(attention.kv_a_norm), ALWAYS },
    { "self_attn.kv_b_proj.weight", PROJECTION, KV_B_ROWS, KV_RANK, IN_LAYER(attention.kv_b), ALWAYS },
    { "self_attn.o_proj.weight", PROJECTION, HIDDEN, VALUES, IN_LAYER(attention.o), ALWAYS },
    { "post_attention_layernorm.weight", NORM, HIDDEN, NONE, IN_LAYER(post_norm), ALWAYS },
    { "mlp.gate_proj.weight", PROJECTION, DENSE_INTER, HIDDEN, IN_LAYER(dense.gate), DENSE },
    { "mlp.up_proj.weight", PROJECTION, DENSE_INTER, HIDDEN, IN_LAYER(dense.up), DENSE },
    { "mlp.down_proj.weight", PROJECTION, HIDDEN, DENSE_INTER, IN_LAYER(dense.down), DENSE },
    { "mlp.gate.weight", YARD_TENSOR_ROUTER, N_EXPERTS, HIDDEN, IN_LAYER(moe.router), MOE },
    { "mlp.gate.e_score_correction_bias", YARD_TENSOR_BIAS, N_EXPERTS, NONE, IN_LAYER(moe.bias), BIASED },
    { "mlp.shared_experts.gate_proj.weight", PROJECTION, SHARED_INTER, HIDDEN, IN_LAYER(moe.shared.gate), SHARED },
    { "mlp.shared_experts.up_proj.weight", PROJECTION, SHARED_INTER, HIDDEN, IN_LAYER(moe.shared.up), SHARED },
    { "mlp.shared_experts.down_proj.weight", PROJECTION, HIDDEN, SHARED_INTER, IN_LAYER(moe.shared.down), SHARED },
    { NULL, 0, 0, 0, 0, 0 },
};

static const row deepseek_expert_rows[] = {
    { "gate_proj.weight", PROJECTION, EXPERT_INTER, HIDDEN, IN_LAYER(moe.gate), MOE },
    { "up_proj.weight", PROJECTION, EXPERT_INTER, HIDDEN, IN_LAYER(moe.up), MOE },
    { "down_proj.weight", PROJECTION, HIDDEN, EXPERT_INTER, IN_LAYER(moe.down), MOE },
    { NULL, 0, 0, 0, 0, 0 },
};

static const row mixtral_layer_rows[] = {
    { "input_layernorm.weight", NORM, HIDDEN, NONE, IN_LAYER(input_norm), ALWAYS },
    { "self_attn.q_proj.weight", PROJECTION, Q_ROWS, HIDDEN, IN_LAYER(attention.q_b), ALWAYS },
    { "self_attn.k_proj.weight", PROJECTION, K_ROWS, HIDDEN, IN_LAYER(attention.k), ALWAYS },
    { "self_attn.v_proj.weight", PROJECTION, V_ROWS, HIDDEN, IN_LAYER(attention.v), ALWAYS },
    { "self_attn.o_proj.weight", PROJECTION, HIDDEN, VALUES, IN_LAYER(attention.o), ALWAYS },
    { "post_attention_layernorm.weight", NORM, HIDDEN, NONE, IN_LAYER(post_norm), ALWAYS },
    { "block_sparse_moe.gate.weight", YARD_TENSOR_ROUTER, N_EXPERTS, HIDDEN, IN_LAYER(moe.router), MOE },
    { NULL, 0, 0, 0, 0, 0 },
};

static const row mixtral_expert_rows[] = {
    { "w1.weight", PROJECTION, EXPERT_INTER, HIDDEN, IN_LAYER(moe.gate), MOE },
    { "w3.weight", PROJECTION, EXPERT_INTER, HIDDEN, IN_LAYER(moe.up), MOE },
    { "w2.weight", PROJECTION, HIDDEN, EXPERT_INTER, IN_LAYER(moe.down), MOE },
    { NULL, 0, 0, 0, 0, 0 },
};

/* A module is stored as one more layer, with its own copies of embedding and head. */
static const row mtp_rows[] = {
    { "embed_tokens.weight", YARD_TENSOR_EMBEDDING, VOCAB, HIDDEN, IN_MTP(embed), ALWAYS },
    { "enorm.weight", NORM, HIDDEN, NONE, IN_MTP(enorm), ALWAYS },
    { "hnorm.weight", NORM, HIDDEN, NONE, IN_MTP(hnorm), ALWAYS },
    { "eh_proj.weight", YARD_TENSOR_HEAD, HIDDEN, TWO_HIDDEN, IN_MTP(eh_proj), ALWAYS },
    { "shared_head.norm.weight", NORM, HIDDEN, NONE, IN_MTP(head_norm), ALWAYS },
    { "shared_head.head.weight", YARD_TENSOR_HEAD, VOCAB, HIDDEN, IN_MTP(head), ALWAYS },
    { NULL, 0, 0, 0, 0, 0 },
};
/* clang-format on */

typedef struct naming {
    const row *layer_rows, *expert_rows;
    const char *experts; /* between the layer's prefix and an expert's number */
} naming;

static const naming namings[] = {
    [YARD_NAMES_DEEPSEEK] = { deepseek_layer_rows, deepseek_expert_rows, "mlp.experts" },
    [YARD_NAMES_MIXTRAL] = { mixtral_layer_rows, mixtral_expert_rows, "block_sparse_moe.experts" },
};

static uint32_t dim_size(const yard_model_config *c, dim d)
{
    switch (d) {
    case NONE:
        break;
    case HIDDEN:
        return c->hidden;
    case TWO_HIDDEN:
        return 2 * c->hidden;
    case VOCAB:
        return c->vocab;
    case Q_RANK:
        return c->q_rank;
    case Q_ROWS:
        return c->n_heads * (c->nope_dims + c->rope_dims);
    case K_ROWS:
        return c->n_kv_heads * (c->nope_dims + c->rope_dims);
    case V_ROWS:
        return c->n_kv_heads * c->v_dims;
    case KV_RANK:
        return c->kv_rank;
    case KV_A_ROWS:
        return c->kv_rank + c->rope_dims;
    case KV_B_ROWS:
        return c->n_heads * (c->nope_dims + c->v_dims);
    case VALUES:
        return c->n_heads * c->v_dims;
    case DENSE_INTER:
        return c->dense_inter;
    case EXPERT_INTER:
        return c->expert_inter;
    case SHARED_INTER:
        return c->n_shared_experts * c->expert_inter;
    case N_EXPERTS:
        return c->n_experts;
    }
    return 0;
}

static yard_span times(yard_span s, uint32_t n)
{
    return (yard_span){ s.first * n, s.n * n };
}

/* Which of them the share has: tensor parallelism cuts what belongs to heads and to dense MLPs. */
static yard_span dim_part(const yard_model_config *c, const yard_share *share, dim d)
{
    switch (d) {
    case Q_ROWS:
        return times(share->heads, c->nope_dims + c->rope_dims);
    case K_ROWS:
        return times(share->kv_heads, c->nope_dims + c->rope_dims);
    case V_ROWS:
        return times(share->kv_heads, c->v_dims);
    case KV_B_ROWS:
        return times(share->heads, c->nope_dims + c->v_dims);
    case VALUES:
        return times(share->heads, c->v_dims);
    case DENSE_INTER:
        return share->dense;
    default:
        return (yard_span){ 0, d == NONE ? 1 : dim_size(c, d) };
    }
}

static bool holds(const yard_model_config *c, condition when, uint32_t layer_idx)
{
    const bool is_moe = layer_idx >= c->n_dense_layers;

    switch (when) {
    case ALWAYS:
        break;
    case Q_RANKED:
        return c->q_rank > 0;
    case Q_DIRECT:
        return c->q_rank == 0;
    case DENSE:
        return !is_moe;
    case MOE:
        return is_moe;
    case BIASED:
        return is_moe && c->router_bias;
    case SHARED:
        return is_moe && c->n_shared_experts > 0;
    case UNTIED:
        return !c->tied_embedding;
    }
    return true;
}

typedef struct walker {
    const yard_model_config *c;
    yard_share share;
    yard_status (*each)(void *ctx, const yard_tensor_spec *spec);
    void *ctx;
    yard_status status; /* the first failure sticks */
} walker;

static void walk_rows(walker *w, const row *rows, yard_tensor_scope scope, uint32_t layer_idx,
                      uint32_t expert_idx, const char *prefix)
{
    for (const row *r = rows; r->name && !w->status; r++) {
        yard_tensor_spec spec = {
            .kind = r->kind,
            .scope = scope,
            .layer_idx = layer_idx,
            .expert_idx = expert_idx,
            .place = r->place,
            .n_dims = r->cols == NONE ? 1 : 2,
            .shape = { dim_size(w->c, r->rows), dim_size(w->c, r->cols) },
            .part = { dim_part(w->c, &w->share, r->rows), dim_part(w->c, &w->share, r->cols) },
        };
        if (!holds(w->c, r->when, layer_idx))
            continue;
        if (scope == YARD_SCOPE_EXPERT && expert_idx - w->share.experts.first >= w->share.experts.n)
            spec.part[0] = spec.part[1] = (yard_span){ 0, 0 };
        snprintf(spec.name, sizeof(spec.name), "%s%s", prefix, r->name);
        w->status = w->each(w->ctx, &spec);
    }
}

static void walk_layer(walker *w, uint32_t layer_idx)
{
    const naming *names = &namings[w->c->names];
    char prefix[64];

    snprintf(prefix, sizeof(prefix), "model.layers.%u.", layer_idx);
    if (layer_idx >= w->c->n_layers)
        walk_rows(w, mtp_rows, YARD_SCOPE_MTP, layer_idx, 0, prefix);
    walk_rows(w, names->layer_rows, YARD_SCOPE_LAYER, layer_idx, 0, prefix);
    if (!holds(w->c, MOE, layer_idx))
        return;
    for (uint32_t e = 0; e < w->c->n_experts && !w->status; e++) {
        snprintf(prefix, sizeof(prefix), "model.layers.%u.%s.%u.", layer_idx, names->experts, e);
        walk_rows(w, names->expert_rows, YARD_SCOPE_EXPERT, layer_idx, e, prefix);
    }
}

yard_status yard_tensor_walk(const yard_model_config *c, const yard_share *share,
                             yard_status (*each)(void *ctx, const yard_tensor_spec *spec),
                             void *ctx)
{
    walker w = { .c = c, .each = each, .ctx = ctx };

    w.share = share ? *share : yard_layout_share(c, (yard_layout){ 1, 1, 1 }, 0);

    walk_rows(&w, first_rows, YARD_SCOPE_MODEL, 0, 0, "");
    for (uint32_t i = 0; i < c->n_layers + c->n_mtp && !w.status; i++)
        walk_layer(&w, i);
    walk_rows(&w, last_rows, YARD_SCOPE_MODEL, 0, 0, "");
    return w.status;
}
