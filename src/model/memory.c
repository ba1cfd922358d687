/* Parameters and bytes, from the description alone.
 *
 * One rank of a layout holds
 *   - embedding, head, norms, routers, correction biases, q_a, kv_a, kv_b and the shared expert:
 *     whole (kv_b could be cut by heads; article A keeps it whole);
 *   - q_b and o: the heads of its TP slice;
 *   - dense MLPs: its share of the 128-wide blocks of the inner dimension;
 *   - routed experts: n_experts / ep of every MoE layer.
 * A projection of an FP8 checkpoint takes a byte a weight and an F32 scale per block, partial
 * blocks included; everything else, and every projection of other checkpoints, takes
 * plain_bytes (two, or four where config.json says float32), correction biases four. */
#include "model/memory.h"

#include <stdio.h>

static uint64_t product(uint32_t a, uint32_t b)
{
    return (uint64_t)a * b;
}

static uint64_t count_attention(const yard_model_config *c)
{
    const uint32_t q_rows = c->n_heads * (c->nope_dims + c->rope_dims);
    uint64_t n = product(c->kv_rank + c->rope_dims, c->hidden) + c->kv_rank +
                 product(c->n_heads * (c->nope_dims + c->v_dims), c->kv_rank) +
                 product(c->hidden, c->n_heads * c->v_dims);

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
        .router_per_layer = product(c->n_experts, c->hidden) + c->n_experts,
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

uint64_t yard_model_kv_bytes_per_token(const yard_model_config *c)
{
    return 2 * product(c->n_layers, c->kv_rank + c->rope_dims);
}

static uint32_t dense_blocks(const yard_model_config *c)
{
    return yard_group_count(c->dense_inter);
}

/* Some rank would get no block of the dense MLPs. */
static bool has_idle_slice(const yard_model_config *c, uint32_t tp)
{
    return c->n_dense_layers > 0 && dense_blocks(c) < tp;
}

static bool is_legal(const yard_model_config *c, yard_layout l)
{
    return l.ep > 0 && l.tp > 0 && l.ep == product(l.dp, l.tp) && c->n_experts % l.ep == 0 &&
           c->n_heads % l.tp == 0 && !has_idle_slice(c, l.tp);
}

static uint32_t distance(uint32_t a, uint32_t b)
{
    return a > b ? a - b : b - a;
}

/* The legal layout with the nearest ep, then the nearest tp; of two as near, the smaller. */
static yard_layout nearest_layout(const yard_model_config *c, yard_layout to)
{
    yard_layout best = { 1, 1, 1 }; /* always legal */

    for (uint32_t ep = 1; ep <= c->n_experts; ep++) {
        if (distance(ep, to.ep) > distance(best.ep, to.ep))
            continue;
        for (uint32_t tp = 1; tp <= ep; tp++) {
            const yard_layout l = { ep, ep / tp, tp };
            if (is_legal(c, l) && (distance(ep, to.ep) < distance(best.ep, to.ep) ||
                                   distance(tp, to.tp) < distance(best.tp, to.tp)))
                best = l;
        }
    }
    return best;
}

static yard_status check_layout(const yard_model_config *c, yard_layout l, yard_error *err)
{
    char why[128];
    yard_layout near;

    if (is_legal(c, l))
        return YARD_OK;
    if (l.ep == 0 || l.ep != product(l.dp, l.tp))
        snprintf(why, sizeof(why), "want EP = DP x TP, at least 1");
    else if (c->n_experts % l.ep)
        snprintf(why, sizeof(why), "%u experts do not divide by EP %u", c->n_experts, l.ep);
    else if (c->n_heads % l.tp)
        snprintf(why, sizeof(why), "%u heads do not divide by TP %u", c->n_heads, l.tp);
    else
        snprintf(why, sizeof(why), "the dense MLP has %u blocks of %d for TP %u", dense_blocks(c),
                 YARD_GROUP, l.tp);
    near = nearest_layout(c, l);
    return yard_fail(err, YARD_EINVAL,
                     "layout EP %u, DP %u, TP %u: %s; nearest: EP %u, DP %u, TP %u", l.ep, l.dp,
                     l.tp, why, near.ep, near.dp, near.tp);
}

/* Part of a range of rows or columns. */
typedef struct span {
    uint32_t first, n;
} span;

static span whole(uint32_t n)
{
    return (span){ 0, n };
}

/* The blocks of that size that the span touches. */
static uint64_t blocks_of(span s, uint32_t block)
{
    return yard_ceil_div(s.first + s.n, block) - s.first / block;
}

static uint64_t projection_bytes(const yard_model_config *c, span rows, span cols)
{
    const uint64_t n = product(rows.n, cols.n);

    if (!c->fp8)
        return c->plain_bytes * n;
    return n + 4 * blocks_of(rows, c->block_rows) * blocks_of(cols, YARD_GROUP);
}

/* gate and up by rows, down by columns. */
static uint64_t mlp_bytes(const yard_model_config *c, span inter)
{
    return 2 * projection_bytes(c, inter, whole(c->hidden)) +
           projection_bytes(c, whole(c->hidden), inter);
}

static uint64_t attention_bytes(const yard_model_config *c, uint32_t tp, uint32_t slice)
{
    const uint32_t heads = c->n_heads / tp, first = heads * slice;
    const uint32_t q_dims = c->nope_dims + c->rope_dims, kv_dims = c->nope_dims + c->v_dims;
    const span q = { first * q_dims, heads * q_dims };
    const span v = { first * c->v_dims, heads * c->v_dims };
    uint64_t n_bytes = projection_bytes(c, whole(c->kv_rank + c->rope_dims), whole(c->hidden)) +
                       projection_bytes(c, whole(c->n_heads * kv_dims), whole(c->kv_rank)) +
                       projection_bytes(c, whole(c->hidden), v) +
                       c->plain_bytes * ((uint64_t)c->kv_rank + c->q_rank); /* norms */

    if (c->q_rank)
        n_bytes += projection_bytes(c, whole(c->q_rank), whole(c->hidden));
    return n_bytes + projection_bytes(c, q, whole(c->q_rank ? c->q_rank : c->hidden));
}

static uint64_t dense_bytes(const yard_model_config *c, uint32_t tp, uint32_t slice)
{
    const uint32_t first = (uint32_t)(product(dense_blocks(c), slice) / tp) * YARD_GROUP;
    const uint32_t end = (uint32_t)(product(dense_blocks(c), slice + 1) / tp) * YARD_GROUP;
    const uint32_t stop = end < c->dense_inter ? end : c->dense_inter;

    return mlp_bytes(c, (span){ first, stop - first });
}

static uint64_t moe_bytes(const yard_model_config *c, uint32_t n_local_experts)
{
    const uint64_t router = (c->plain_bytes * (uint64_t)c->hidden + 4) * c->n_experts;
    const uint32_t shared = c->n_shared_experts * c->expert_inter;

    return router + n_local_experts * mlp_bytes(c, whole(c->expert_inter)) +
           (shared ? mlp_bytes(c, whole(shared)) : 0);
}

yard_status yard_model_rank_memory(const yard_model_config *c, yard_layout layout, uint32_t rank,
                                   yard_rank_memory *out, yard_error *err)
{
    const yard_status st = check_layout(c, layout, err);
    const uint64_t matrix = c->plain_bytes * product(c->vocab, c->hidden); /* embedding or head */
    const uint64_t norm = c->plain_bytes * (uint64_t)c->hidden;
    yard_rank_memory m;
    uint64_t attention, moe;

    if (st)
        return st;
    if (rank >= layout.ep)
        return yard_fail(err, YARD_EINVAL, "rank: want below EP %u, got %u", layout.ep, rank);
    m.dp_group = rank / layout.tp;
    m.tp_slice = rank % layout.tp;
    m.n_experts = c->n_experts / layout.ep;
    m.first_expert = rank * m.n_experts;
    attention = attention_bytes(c, layout.tp, m.tp_slice) + 2 * norm;
    moe = moe_bytes(c, m.n_experts);
    m.weight_bytes = c->n_layers * attention + (c->n_layers - c->n_dense_layers) * moe +
                     (c->tied_embedding ? 1 : 2) * matrix + norm;
    if (c->n_dense_layers)
        m.weight_bytes += c->n_dense_layers * dense_bytes(c, layout.tp, m.tp_slice);
    m.mtp_weight_bytes =
        c->n_mtp * (attention + moe + 2 * matrix + 2 * norm * c->hidden + 3 * norm);
    *out = m;
    return YARD_OK;
}
