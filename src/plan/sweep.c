/* All layouts, and those that no other beats. */
#include <math.h>
#include <stdlib.h>

#include "plan/plan.h"

/* The best schedule of one layout and batch. */
static yard_status best_schedule(yard_plan_config c, const yard_plan_sweep *sweep,
                                 yard_plan_choice *out, yard_error *err)
{
    yard_plan_result r;
    yard_status st;
    bool found = false;

    for (uint32_t i = 0; i < sweep->n_schedule; i++) {
        c.schedule = sweep->schedule[i];
        if ((st = yard_plan_point(&c, &r, err)))
            return st;
        if (found && r.step_us >= out->result.step_us)
            continue;
        out->config = c;
        out->result = r;
        found = true;
    }
    return YARD_OK;
}

static int by_ep_and_speed(const void *a, const void *b)
{
    const yard_plan_choice *x = a, *y = b;

    if (x->config.ep != y->config.ep)
        return x->config.ep < y->config.ep ? -1 : 1;
    if (x->result.tokens_per_s_per_request != y->result.tokens_per_s_per_request)
        return x->result.tokens_per_s_per_request < y->result.tokens_per_s_per_request ? -1 : 1;
    return x->result.tokens_per_s_per_gpu < y->result.tokens_per_s_per_gpu ? -1 : 1;
}

static int by_falling_speed(const void *a, const void *b)
{
    const yard_plan_choice *const *x = a, *const *y = b;
    const double d = (*x)->result.tokens_per_s_per_request - (*y)->result.tokens_per_s_per_request;

    return d > 0 ? -1 : d < 0;
}

/* list is sorted by EP, then speed: from the fast end, each point that lifts the throughput. */
static void mark_frontiers(yard_plan_choice *list, uint32_t n, yard_plan_choice **order)
{
    double highest = 0;

    for (uint32_t i = n; i-- > 0;) {
        yard_plan_choice *p = &list[i];
        if (i + 1 == n || list[i + 1].config.ep != p->config.ep)
            highest = 0;
        if (p->result.fits && p->result.tokens_per_s_per_gpu > highest) {
            highest = p->result.tokens_per_s_per_gpu;
            p->on_frontier = true;
        }
    }
    for (uint32_t i = 0; i < n; i++)
        order[i] = &list[i];
    qsort(order, n, sizeof(*order), by_falling_speed);
    highest = 0;
    for (uint32_t i = 0; i < n; i++)
        if (order[i]->on_frontier && order[i]->result.tokens_per_s_per_gpu > highest) {
            highest = order[i]->result.tokens_per_s_per_gpu;
            order[i]->best = true;
        }
}

static yard_plan_config layout(const yard_plan_config *base, const yard_plan_sweep *sweep,
                               uint32_t ep, uint32_t tp, uint32_t batch)
{
    yard_plan_config c = *base;

    c.ep = ep;
    c.tp = tp;
    c.batch = batch;
    if (sweep->one_node_gpu && ep <= sweep->one_node_gpu->gpus_per_node)
        c.gpu = sweep->one_node_gpu;
    return c;
}

static yard_status fill(const yard_plan_config *base, const yard_plan_sweep *sweep,
                        yard_plan_choice *list, uint32_t *n_out, yard_error *err)
{
    uint32_t n = 0;

    for (uint32_t e = 0; e < sweep->n_ep; e++)
        for (uint32_t t = 0; t < sweep->n_tp; t++)
            for (uint32_t b = 0; b < sweep->n_batch; b++) {
                const yard_plan_config c =
                    layout(base, sweep, sweep->ep[e], sweep->tp[t], sweep->batch[b]);
                yard_status st;
                if (!yard_plan_is_legal(&c) || (sweep->max_gpus && c.ep > sweep->max_gpus))
                    continue;
                if ((st = best_schedule(c, sweep, &list[n], err)))
                    return st;
                n++;
            }
    *n_out = n;
    return YARD_OK;
}

static uint32_t least_ep(const yard_plan_sweep *sweep)
{
    uint32_t least = sweep->ep[0];

    for (uint32_t i = 1; i < sweep->n_ep; i++)
        if (sweep->ep[i] < least)
            least = sweep->ep[i];
    return least;
}

yard_status yard_plan_sweep_run(const yard_plan_config *base, const yard_plan_sweep *sweep,
                                yard_plan_choice **out, uint32_t *n_out, yard_error *err)
{
    const size_t n_max = (size_t)sweep->n_ep * sweep->n_tp * sweep->n_batch;
    yard_plan_choice *list = NULL, **order = NULL;
    uint32_t n = 0;
    yard_status st;

    if (sweep->size != sizeof(*sweep) || !n_max || !sweep->n_schedule)
        return yard_fail(err, YARD_EINVAL, "sweep: want EP, TP, batch and schedules");
    list = calloc(n_max, sizeof(*list));
    order = calloc(n_max, sizeof(*order));
    if (!list || !order) {
        st = yard_fail(err, YARD_ENOMEM, "sweep: no memory for %zu points", n_max);
        goto out;
    }
    if ((st = fill(base, sweep, list, &n, err)))
        goto out;
    if (!n) {
        st = sweep->max_gpus
                 ? yard_fail(err, YARD_EINVAL,
                             "sweep: no legal layout of at most %u GPUs among "
                             "those asked for, which are EP %u and up",
                             sweep->max_gpus, least_ep(sweep))
                 : yard_fail(err, YARD_EINVAL, "sweep: no legal layout among those asked for");
        goto out;
    }
    qsort(list, n, sizeof(*list), by_ep_and_speed);
    mark_frontiers(list, n, order);
    *out = list;
    *n_out = n;
    list = NULL;
out:
    free(order);
    free(list);
    return st;
}

/* Of one EP; the list rises in speed, and so falls in throughput along the frontier. */
static double frontier_of(const yard_plan_choice *list, uint32_t n, uint32_t ep, double speed)
{
    const yard_plan_result *last = NULL;

    for (uint32_t i = 0; i < n; i++) {
        const yard_plan_result *r = &list[i].result;
        if (list[i].config.ep != ep || !list[i].on_frontier)
            continue;
        if (r->tokens_per_s_per_request >= speed) {
            if (!last) /* slower requests are served as well by the slowest point */
                return r->tokens_per_s_per_node;
            const double x0 = last->tokens_per_s_per_request, x1 = r->tokens_per_s_per_request;
            const double f = x1 > x0 ? (speed - x0) / (x1 - x0) : 1;
            return exp((1 - f) * log(last->tokens_per_s_per_node) +
                       f * log(r->tokens_per_s_per_node));
        }
        last = r;
    }
    return 0;
}

double yard_plan_frontier_at(const yard_plan_choice *list, uint32_t n, uint32_t ep,
                             double tokens_per_s_per_request)
{
    double best = 0;

    if (ep)
        return frontier_of(list, n, ep, tokens_per_s_per_request);
    for (uint32_t i = 0; i < n; i++)
        if (i == 0 || list[i].config.ep != list[i - 1].config.ep)
            best = fmax(best, frontier_of(list, n, list[i].config.ep, tokens_per_s_per_request));
    return best;
}
