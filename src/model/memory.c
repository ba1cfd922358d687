/* Parameters and bytes, from the description alone.
 *
 * One rank of a layout holds
 *   - embedding, head, norms, routers, correction biases, q_a, kv_a and the shared expert: whole;
 *   - q_b, kv_b and o, or grouped-query attention's q, k, v and o: the heads of its TP slice;
 *   - dense MLPs: its share of the 128-wide blocks of the inner dimension;
 *   - routed experts: n_experts / ep of every MoE layer.
 * A projection of an FP8 checkpoint takes a byte a weight and an F32 scale per block, partial
 * blocks included; everything else, and every projection of other checkpoints, takes
 * plain_bytes (two, or four where config.json says float32), correction biases four. */
#include "model/memory.h"

static uint64_t product(uint32_t a, uint32_t b)
{
    return (uint64_t)a * b;
}

static uint64_t count_attention(const yard_model_config *c)
{
    const uint32_t q_rows = c->n_heads * (c->nope_dims + c->rope_dims);
    uint64_t n = product(c->hidden, c->n_heads * c->v_dims);

    if (c->attention == YARD_ATTENTION_GQA)
        n += product(c->n_kv_heads * (c->nope_dims + c->rope_dims + c->v_dims), c->hidden);
    else
        n += product(c->kv_rank + c->rope_dims, c->hidden) + c->kv_rank +
             product(c->n_heads * (c->nope_dims + c->v_dims), c->kv_rank);
    if (c->q_rank)
        n += product(c->q_rank, c->hidden) + c->q_rank + product(q_rows, c->q_rank);
    else
        n += product(q_rows, c->hidden);
    return n;
}

void yard_model_count_params(const yard_model_config *c, yard_param_count *out)
{
    const uint32_t n_moe = c->n_layers - c->n_dense_layers;
    const uint64_t layer_norms = 2 * (uint64_t)c->hidden;
    yard_param_count n = {
        .embedding = product(c->vocab, c->hidden),
        .head = c->tied_embedding ? 0 : product(c->vocab, c->hidden),
        .attention_per_layer = count_attention(c),
        .dense_mlp_per_layer = 3 * product(c->dense_inter, c->hidden),
        .expert = 3 * product(c->expert_inter, c->hidden),
        .router_per_layer = product(c->n_experts, c->hidden) + (c->router_bias ? c->n_experts : 0),
    };
    uint64_t every_token, moe_layer;

    n.shared_per_layer = c->n_shared_experts * n.expert;
    every_token = c->n_layers * (n.attention_per_layer + layer_norms) +
                  c->n_dense_layers * n.dense_mlp_per_layer +
                  n_moe * (n.router_per_layer + n.shared_per_layer) + c->hidden;
    n.total = every_token + n_moe * c->n_experts * n.expert + n.embedding + n.head;
    /* A tied head is the embedding, used as a head. */
    n.active = every_token + n_moe * (uint64_t)c->top_k * n.expert + product(c->vocab, c->hidden);
    moe_layer = n.attention_per_layer + layer_norms + n.router_per_layer + n.shared_per_layer +
                c->n_experts * n.expert;
    n.mtp = c->n_mtp * (moe_layer + 2 * product(c->vocab, c->hidden) +
                        product(c->hidden, 2 * c->hidden) + 3 * (uint64_t)c->hidden);
    *out = n;
}

uint64_t yard_model_kv_bytes_per_token(const yard_model_config *c, yard_dtype dtype)
{
    return product(c->n_layers, yard_model_kv_row_bytes(c, 1, dtype));
}

uint32_t yard_model_kv_row_bytes(const yard_model_config *c, uint32_t tp, yard_dtype dtype)
{
    if (c->attention == YARD_ATTENTION_GQA)
        return yard_model_kv_width(c, tp) * (uint32_t)yard_dtype_bytes(dtype);
    return yard_latent_row_of(dtype, c->kv_rank, c->rope_dims).n_bytes;
}

uint32_t yard_model_kv_width(const yard_model_config *c, uint32_t tp)
{
    if (c->attention == YARD_ATTENTION_GQA)
        return c->n_kv_heads / tp * (c->nope_dims + c->rope_dims + c->v_dims);
    return c->kv_rank + c->rope_dims;
}

static yard_span whole(uint32_t n)
{
    return (yard_span){ 0, n };
}

/* The blocks of that size that the span touches. */
static uint64_t blocks_of(yard_span s, uint32_t block)
{
    return yard_ceil_div(s.first + s.n, block) - s.first / block;
}

static uint64_t projection_bytes(const yard_model_config *c, yard_span rows, yard_span cols)
{
    const uint64_t n = product(rows.n, cols.n);

    if (!c->fp8)
        return c->plain_bytes * n;
    return n + 4 * blocks_of(rows, c->block_rows) * blocks_of(cols, YARD_GROUP);
}

/* gate and up by rows, down by columns. */
static uint64_t mlp_bytes(const yard_model_config *c, yard_span inter)
{
    return 2 * projection_bytes(c, inter, whole(c->hidden)) +
           projection_bytes(c, whole(c->hidden), inter);
}

static uint64_t gqa_bytes(const yard_model_config *c, const yard_share *share)
{
    const yard_span q = { share->heads.first * c->rope_dims, share->heads.n * c->rope_dims };
    const yard_span kv = { share->kv_heads.first * c->rope_dims, share->kv_heads.n * c->rope_dims };

    return projection_bytes(c, q, whole(c->hidden)) +
           2 * projection_bytes(c, kv, whole(c->hidden)) + projection_bytes(c, whole(c->hidden), q);
}

static uint64_t mla_bytes(const yard_model_config *c, yard_span heads)
{
    const uint32_t q_dims = c->nope_dims + c->rope_dims, kv_dims = c->nope_dims + c->v_dims;
    const yard_span q = { heads.first * q_dims, heads.n * q_dims };
    const yard_span kv = { heads.first * kv_dims, heads.n * kv_dims };
    const yard_span v = { heads.first * c->v_dims, heads.n * c->v_dims };
    uint64_t n_bytes = projection_bytes(c, whole(c->kv_rank + c->rope_dims), whole(c->hidden)) +
                       projection_bytes(c, kv, whole(c->kv_rank)) +
                       projection_bytes(c, whole(c->hidden), v) +
                       c->plain_bytes * ((uint64_t)c->kv_rank + c->q_rank); /* norms */

    if (c->q_rank)
        n_bytes += projection_bytes(c, whole(c->q_rank), whole(c->hidden));
    return n_bytes + projection_bytes(c, q, whole(c->q_rank ? c->q_rank : c->hidden));
}

static uint64_t moe_bytes(const yard_model_config *c, uint32_t n_local_experts)
{
    const uint64_t router =
        (c->plain_bytes * (uint64_t)c->hidden + (c->router_bias ? 4 : 0)) * c->n_experts;
    const uint32_t shared = c->n_shared_experts * c->expert_inter;

    return router + n_local_experts * mlp_bytes(c, whole(c->expert_inter)) +
           (shared ? mlp_bytes(c, whole(shared)) : 0);
}

yard_status yard_model_rank_memory(const yard_model_config *c, yard_layout layout, uint32_t rank,
                                   yard_rank_memory *out, yard_error *err)
{
    const yard_status st = yard_layout_check(c, layout, true, err);
    const uint64_t matrix = c->plain_bytes * product(c->vocab, c->hidden); /* embedding or head */
    const uint64_t norm = c->plain_bytes * (uint64_t)c->hidden;
    yard_rank_memory m = { 0 };
    uint64_t attention, moe;
    yard_share share;

    if (st)
        return st;
    if (rank >= layout.ep)
        return yard_fail(err, YARD_EINVAL, "rank: want below EP %u, got %u", layout.ep, rank);
    share = yard_layout_share(c, layout, rank);
    m.dp_group = share.dp_group;
    m.tp_slice = share.tp_slice;
    m.n_experts = share.experts.n;
    m.first_expert = share.experts.first;
    attention = 2 * norm + (c->attention == YARD_ATTENTION_GQA ? gqa_bytes(c, &share)
                                                               : mla_bytes(c, share.heads));
    moe = moe_bytes(c, m.n_experts);
    m.weight_bytes = c->n_layers * attention + (c->n_layers - c->n_dense_layers) * moe +
                     (c->tied_embedding ? 1 : 2) * matrix + norm;
    if (c->n_dense_layers)
        m.weight_bytes += c->n_dense_layers * mlp_bytes(c, share.dense);
    m.mtp_weight_bytes =
        c->n_mtp * (attention + moe + 2 * matrix + 2 * norm * c->hidden + 3 * norm);
    *out = m;
    return YARD_OK;
}
