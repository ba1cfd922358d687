#include "model/layout.h"

#include <stdio.h>

static uint32_t dense_blocks(const yard_model_config *c)
{
    return yard_group_count(c->dense_inter);
}

/* Some rank would get no block of the dense MLPs. */
static bool has_idle_slice(const yard_model_config *c, uint32_t tp)
{
    return c->n_dense_layers > 0 && dense_blocks(c) < tp;
}

/* Columns of the output projection are cut by heads. FP8 weights have a scale per 128 of them, and
 * quantised activations too, which must be the same scale as without TP: then slices are whole
 * groups. Exact mode reads weights only, whose scales stay right when no slice lies in two groups.
 */
static bool cuts_group(const yard_model_config *c, uint32_t tp, bool exact)
{
    const uint32_t cols = c->n_heads / tp * c->v_dims;

    return c->fp8 && tp > 1 && cols % YARD_GROUP != 0 && !(exact && YARD_GROUP % cols == 0);
}

static bool is_legal(const yard_model_config *c, yard_layout l, bool exact)
{
    return l.ep > 0 && l.tp > 0 && l.ep == (uint64_t)l.dp * l.tp && c->n_experts % l.ep == 0 &&
           c->n_kv_heads % l.tp == 0 && !has_idle_slice(c, l.tp) && !cuts_group(c, l.tp, exact);
}

static uint32_t distance(uint32_t a, uint32_t b)
{
    return a > b ? a - b : b - a;
}

/* The legal layout with the nearest ep, then the nearest tp; of two as near, the smaller. */
static yard_layout nearest_layout(const yard_model_config *c, yard_layout to, bool exact)
{
    yard_layout best = { 1, 1, 1 }; /* always legal */

    for (uint32_t ep = 1; ep <= c->n_experts; ep++) {
        if (c->n_experts % ep != 0 || distance(ep, to.ep) > distance(best.ep, to.ep))
            continue;
        for (uint32_t tp = 1; tp <= ep; tp++) {
            const yard_layout l = { ep, ep / tp, tp };
            if (is_legal(c, l, exact) && (distance(ep, to.ep) < distance(best.ep, to.ep) ||
                                          distance(tp, to.tp) < distance(best.tp, to.tp)))
                best = l;
        }
    }
    return best;
}

yard_status yard_layout_check(const yard_model_config *c, yard_layout l, bool exact,
                              yard_error *err)
{
    char why[160];
    yard_layout near;

    if (is_legal(c, l, exact))
        return YARD_OK;
    if (l.ep > 0 && l.tp > 0 && l.ep % l.tp != 0)
        snprintf(why, sizeof(why), "EP is no multiple of TP");
    else if (l.ep == 0 || l.ep != (uint64_t)l.dp * l.tp)
        snprintf(why, sizeof(why), "want EP = DP x TP, at least 1");
    else if (c->n_experts % l.ep)
        snprintf(why, sizeof(why), "%u experts do not divide by EP %u", c->n_experts, l.ep);
    else if (c->n_kv_heads % l.tp)
        snprintf(why, sizeof(why), "%u %sheads do not divide by TP %u", c->n_kv_heads,
                 c->attention == YARD_ATTENTION_GQA ? "kv " : "", l.tp);
    else if (has_idle_slice(c, l.tp))
        snprintf(why, sizeof(why), "the dense MLP has %u blocks of %d for TP %u", dense_blocks(c),
                 YARD_GROUP, l.tp);
    else
        snprintf(why, sizeof(why),
                 "TP %u cuts the attention outputs, %u heads of %u, inside a group of %d that has "
                 "one scale%s",
                 l.tp, c->n_heads, c->v_dims, YARD_GROUP,
                 cuts_group(c, l.tp, true) ? "" : " (exact mode can)");
    near = nearest_layout(c, l, exact);
    return yard_fail(err, YARD_EINVAL,
                     "layout EP %u, DP %u, TP %u: %s; nearest: EP %u, DP %u, TP %u", l.ep, l.dp,
                     l.tp, why, near.ep, near.dp, near.tp);
}

yard_status yard_layout_check_nodes(yard_layout l, const yard_fabric *fabric, yard_error *err)
{
    uint32_t tp = l.tp;

    for (uint32_t r = 0; r < l.ep; r++)
        while (yard_fabric_node(fabric, r) != yard_fabric_node(fabric, r / tp * tp))
            do
                tp--;
            while (l.tp % tp != 0);
    if (tp == l.tp)
        return YARD_OK;
    return yard_fail(err, YARD_EINVAL,
                     "layout EP %u, DP %u, TP %u: an instance would lie on two nodes; nearest: EP "
                     "%u, DP %u, TP %u",
                     l.ep, l.dp, l.tp, l.ep, l.ep / tp, tp);
}

static yard_span share_of(uint32_t n, uint32_t n_parts, uint32_t part)
{
    return (yard_span){ part * (n / n_parts), n / n_parts };
}

static yard_span dense_share(const yard_model_config *c, uint32_t tp, uint32_t slice)
{
    const uint64_t blocks = dense_blocks(c);
    const uint32_t first = (uint32_t)(blocks * slice / tp) * YARD_GROUP;
    const uint32_t end = (uint32_t)(blocks * (slice + 1) / tp) * YARD_GROUP;

    return (yard_span){ first, (end < c->dense_inter ? end : c->dense_inter) - first };
}

yard_share yard_layout_share(const yard_model_config *c, yard_layout l, uint32_t rank)
{
    yard_share s = { .dp_group = rank / l.tp, .tp_slice = rank % l.tp };

    s.experts = share_of(c->n_experts, l.ep, rank);
    s.heads = share_of(c->n_heads, l.tp, s.tp_slice);
    s.kv_heads = share_of(c->n_kv_heads, l.tp, s.tp_slice);
    if (c->n_dense_layers)
        s.dense = dense_share(c, l.tp, s.tp_slice);
    return s;
}
