/* Larger than what was measured: replicated experts, islands, a lost machine, a day of traffic. */
#include <math.h>

#include "plan/plan.h"

/* Spare slots so that the slots divide by ep: as few as possible. */
static bool add_slots(yard_plan_config *c, uint32_t ep)
{
    const uint32_t n = c->model->n_experts;
    const uint32_t slots = (n + ep - 1) / ep * ep;

    c->ep = ep;
    c->redundant = slots - n;
    /* more than three copies an expert is no layout anybody would buy */
    return slots <= 4 * n && yard_plan_is_legal(c);
}

static yard_status best_schedule(yard_plan_config *c, yard_plan_result *best, yard_error *err)
{
    static const yard_plan_schedule all[] = { YARD_PLAN_NONE, YARD_PLAN_DISPATCH_OVERLAP,
                                              YARD_PLAN_MICRO_BATCH };
    yard_plan_schedule kept = YARD_PLAN_NONE;

    for (int i = 0; i < 3; i++) {
        yard_plan_result r;
        yard_status st;
        c->schedule = all[i];
        if ((st = yard_plan_point(c, &r, err)))
            return st;
        if (i && r.step_us >= best->step_us)
            continue;
        *best = r;
        kept = all[i];
    }
    c->schedule = kept;
    return YARD_OK;
}

yard_status yard_plan_scale(const yard_plan_config *base, const uint32_t *ep, uint32_t n,
                            yard_plan_scale_row out[YARD_PLAN_MAX_SCALE], uint32_t *n_out,
                            yard_error *err)
{
    uint32_t k = 0;

    for (uint32_t i = 0; i < n && k < YARD_PLAN_MAX_SCALE; i++) {
        yard_plan_scale_row *row = &out[k];
        yard_status st;
        row->config = *base;
        if (!add_slots(&row->config, ep[i]))
            continue;
        if ((st = best_schedule(&row->config, &row->result, err)))
            return st;
        row->against_first = row->result.tokens_per_s_per_gpu / out[0].result.tokens_per_s_per_gpu;
        k++;
    }
    *n_out = k;
    return k ? YARD_OK
             : yard_fail(err, YARD_EINVAL, "scale: %s on %s has none of these groups",
                         base->model->name, base->gpu->name);
}

yard_status yard_plan_fail_node(const yard_plan_config *base, double restart_s,
                                yard_plan_failure *out, yard_error *err)
{
    yard_plan_config c = *base;
    yard_plan_result before, after = { 0 };
    const uint32_t node = base->gpu->gpus_per_node;
    yard_status st = yard_plan_point(base, &before, err);
    bool found = false;

    if (st)
        return st;
    for (uint32_t ep = base->ep > node ? base->ep - node : 0; ep >= base->tp && ep > 0 && !found;
         ep--) {
        if (!add_slots(&c, ep))
            continue;
        if ((st = best_schedule(&c, &after, err)))
            return st;
        found = after.fits;
    }
    *out = (yard_plan_failure){ .ep_before = base->ep,
                                .ep_after = found ? c.ep : 0,
                                .restart_s = restart_s,
                                .tokens_before = before.tokens_per_s_per_gpu * base->ep * 3600 };
    if (found)
        out->tokens_after = after.tokens_per_s_per_gpu * c.ep * (3600 - restart_s);
    out->lost = 1 - out->tokens_after / out->tokens_before;
    out->lost_with_spare = restart_s / 3600;
    return YARD_OK;
}

yard_status yard_plan_run_day(const yard_plan_config *base, const double shape[24],
                              double mean_requests_per_s, double out_tokens, double occupancy,
                              yard_plan_day *out, yard_error *err)
{
    yard_plan_result r;
    const yard_status st = yard_plan_point(base, &r, err);
    const double max_groups = 1e6;
    double sum = 0, groups = 0;

    if (st)
        return st;
    *out = (yard_plan_day){ .group_capacity = r.tokens_per_s_per_gpu * base->ep / out_tokens };
    for (int h = 0; h < 24; h++)
        sum += shape[h];
    for (int h = 0; h < 24; h++) {
        double need;
        /* the share first: loads of any unit, also those whose product would be infinite */
        out->requests_per_s[h] = mean_requests_per_s * 24 * (shape[h] / sum);
        need = ceil(out->requests_per_s[h] / (out->group_capacity * occupancy) - 1e-9);
        if (!(need <= max_groups))
            return yard_fail(err, YARD_EINVAL,
                             "scale: %g requests/s need %g groups that carry %g each; legal: at "
                             "most %g groups",
                             out->requests_per_s[h], need, out->group_capacity * occupancy,
                             max_groups);
        out->groups[h] = (uint32_t)need;
        if (out->groups[h] > out->peak_groups)
            out->peak_groups = out->groups[h];
        groups += out->groups[h];
    }
    out->gpu_hours_fixed = 24.0 * out->peak_groups * base->ep;
    out->gpu_hours_scaled = groups * base->ep;
    out->usd_fixed = out->gpu_hours_fixed * base->gpu->price_per_hour;
    out->usd_scaled = out->gpu_hours_scaled * base->gpu->price_per_hour;
    out->usd_per_million = out->usd_scaled / (mean_requests_per_s * out_tokens * 86400) * 1e6;
    return YARD_OK;
}
