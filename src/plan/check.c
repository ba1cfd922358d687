/* What a configuration may be; a refusal names the legal values. */
#include <math.h>
#include <stdio.h>

#include "plan/plan.h"

/* "1, 2, 4" : the values of 1 .. max that pass. */
static void list_legal(char *text, size_t n_bytes, const yard_plan_config *c, uint32_t max,
                       bool (*legal)(const yard_plan_config *c, uint32_t value))
{
    size_t at = 0;

    text[0] = '\0';
    for (uint32_t v = 1; v <= max && at < n_bytes; v++)
        if (legal(c, v))
            at += (size_t)snprintf(text + at, n_bytes - at, "%s%u", at ? ", " : "", v);
}

/* At least one block of 128 of the dense MLPs for every rank of a group. */
static bool tp_is_legal(const yard_plan_config *c, uint32_t tp)
{
    const yard_plan_model *m = c->model;

    return m->n_heads % tp == 0 && tp <= c->gpu->gpus_per_node &&
           (!m->n_dense_layers || yard_group_count(m->dense_inter) >= tp);
}

static bool ep_is_legal(const yard_plan_config *c, uint32_t ep)
{
    const yard_plan_model *m = c->model;
    const uint32_t slots = m->n_experts + c->redundant;

    if (ep % c->tp || ep == 0)
        return false;
    return m->n_experts ? slots % ep == 0 && slots >= ep : ep == c->tp;
}

bool yard_plan_is_legal(const yard_plan_config *c)
{
    return c->tp && tp_is_legal(c, c->tp) && ep_is_legal(c, c->ep);
}

yard_status yard_plan_check_layout(const yard_plan_config *c, yard_error *err)
{
    const yard_plan_model *m = c->model;
    char legal[224];

    if (!c->tp || !tp_is_legal(c, c->tp)) {
        list_legal(legal, sizeof(legal), c, c->gpu->gpus_per_node, tp_is_legal);
        return yard_fail(err, YARD_EINVAL,
                         "TP %u: want a divisor of the %u heads, at least one block of 128 of the "
                         "dense MLP a rank, inside one node of %u; legal: %s",
                         c->tp, m->n_heads, c->gpu->gpus_per_node, legal);
    }
    if (ep_is_legal(c, c->ep))
        return YARD_OK;
    if (!m->n_experts)
        return yard_fail(err, YARD_EINVAL, "EP %u: %s has no experts; legal: %u, the TP", c->ep,
                         m->name, c->tp);
    list_legal(legal, sizeof(legal), c, m->n_experts + c->redundant, ep_is_legal);
    return yard_fail(err, YARD_EINVAL,
                     "EP %u: want a multiple of TP %u that divides the %u expert slots; legal: %s",
                     c->ep, c->tp, m->n_experts + c->redundant, legal);
}

static yard_status check_range(const char *name, double x, double min, double max, yard_error *err)
{
    if (isfinite(x) && x >= min && x <= max)
        return YARD_OK;
    return yard_fail(err, YARD_EINVAL, "%s: want a number from %g to %g, got %g", name, min, max,
                     x);
}

static yard_status check_numbers(const yard_plan_config *c, yard_error *err)
{
    const struct {
        const char *name;
        double value, min, max;
    } ranges[] = {
        { "batch", c->batch, 1, 1 << 16 },
        { "query", c->query, 1, 64 },
        { "kv", c->kv, c->phase == YARD_PLAN_PREFILL ? 0 : 1, 10e6 },
        { "prompt", c->prompt, 1, 10e6 },
        { "chunk", c->chunk, 1, 1 << 24 },
        { "acceptance", c->acceptance, 0, 1 },
        { "imbalance", c->imbalance, 1, c->model->n_experts ? c->ep : 1 },
        { "redundant", c->redundant, 0, 1 << 16 },
    };
    yard_status st;

    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++)
        if ((st = check_range(ranges[i].name, ranges[i].value, ranges[i].min, ranges[i].max, err)))
            return st;
    if (c->kv_bits != 16 && c->kv_bits != 8)
        return yard_fail(err, YARD_EINVAL, "kv bits: legal: 8, 16; got %u", c->kv_bits);
    if (c->weight_bits && c->weight_bits != 4 && c->weight_bits != 8 && c->weight_bits != 16)
        return yard_fail(err, YARD_EINVAL, "weight bits: legal: 4, 8, 16; got %u", c->weight_bits);
    if ((uint32_t)c->phase > YARD_PLAN_PREFILL || (uint32_t)c->copies > YARD_PLAN_PER_NODE ||
        (uint32_t)c->schedule >= YARD_PLAN_SCHEDULE_COUNT)
        return yard_fail(err, YARD_EINVAL, "phase, copies or schedule: no such value");
    return YARD_OK;
}

static yard_status check_load(const yard_plan_config *c, yard_error *err)
{
    double sum = 0;

    if (!c->load)
        return YARD_OK;
    if (c->n_load != c->ep)
        return yard_fail(err, YARD_EINVAL, "load: want one value for each of %u ranks, got %u",
                         c->ep, c->n_load);
    for (uint32_t i = 0; i < c->n_load; i++) {
        if (!isfinite(c->load[i]) || c->load[i] < 0)
            return yard_fail(err, YARD_EINVAL, "load: rank %u: want a number, at least 0", i);
        sum += c->load[i];
    }
    if (sum <= 0)
        return yard_fail(err, YARD_EINVAL, "load: all ranks have 0");
    return YARD_OK;
}

yard_status yard_plan_check(const yard_plan_config *c, yard_error *err)
{
    yard_status st;

    if (c->size != sizeof(*c) || !c->model || !c->gpu || !c->profile)
        return yard_fail(err, YARD_EINVAL, "plan: want size, model, gpu and profile to be set");
    if ((st = yard_plan_check_layout(c, err)) || (st = check_numbers(c, err)))
        return st;
    return check_load(c, err);
}
