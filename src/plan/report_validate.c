/* The comparison tables of `plan validate`. */
#include <math.h>
#include <stdlib.h>

#include "plan/plan.h"

/* The blind half's limits; the fit half has none, it was fitted. */
static const double max_median = 0.15, max_worst = 0.35;

bool yard_plan_print_checks(FILE *to, const yard_plan_check_result *checks, uint32_t n)
{
    uint32_t n_gates = 0, n_wrong = 0;

    fprintf(to, "%-5s %-50s %15s %15s %8s  %s\n", "id", "what", "expected", "planner", "error", "");
    for (uint32_t i = 0; i < n; i++) {
        const yard_plan_check_result *c = &checks[i];
        const bool gate = c->at_least || isfinite(c->tolerance);
        n_gates += gate;
        n_wrong += !c->passed;
        fprintf(to, "%-5s %-50s %s%14.*f %15.*f ", c->id, c->what, c->at_least ? ">" : " ",
                fabs(c->expected) < 100 ? 2 : 0, c->expected, fabs(c->expected) < 100 ? 2 : 0,
                c->got);
        if (c->expected != 0)
            fprintf(to, "%+7.1f%%", 100 * (c->got / c->expected - 1));
        else
            fprintf(to, "%8s", "");
        fprintf(to, "  %s\n", !gate ? "shown" : c->passed ? "ok" : "WRONG");
    }
    fprintf(to, "%u checks, %u wrong; %u more shown for comparison\n", n_gates, n_wrong,
            n - n_gates);
    return n_wrong == 0;
}

static int by_size(const void *a, const void *b)
{
    const double d = *(const double *)a - *(const double *)b;

    return d < 0 ? -1 : d > 0;
}

void yard_plan_error_summary(const yard_plan_deployment *d, uint32_t n, yard_plan_half half,
                             double *median, double *worst)
{
    double sizes[YARD_PLAN_MAX_DEPLOYMENTS];
    uint32_t k = 0;

    for (uint32_t i = 0; i < n; i++)
        if (d[i].half == half && d[i].published > 0)
            sizes[k++] = fabs(d[i].error);
    *median = *worst = 0;
    if (!k)
        return;
    qsort(sizes, k, sizeof(sizes[0]), by_size);
    *median = k % 2 ? sizes[k / 2] : (sizes[k / 2 - 1] + sizes[k / 2]) / 2;
    *worst = sizes[k - 1];
}

static void print_half(FILE *to, const yard_plan_deployment *d, uint32_t n, yard_plan_half half)
{
    double median, worst;

    fprintf(to, "\n%s half\n%-4s %-31s %-11s %10s %10s %8s  %s\n",
            half == YARD_PLAN_FIT_HALF ? "Fit" : "Blind", "id", "run", "stack", "published",
            "planner", "error", "conditions");
    for (uint32_t i = 0; i < n; i++) {
        if (d[i].half != half)
            continue;
        fprintf(to, "%-4s %-31s %-11s ", d[i].id, d[i].what, d[i].stack);
        if (d[i].published > 0)
            fprintf(to, "%10.0f %10.0f %+7.1f%%", d[i].published, d[i].predicted, 100 * d[i].error);
        else
            fprintf(to, "%10s %10.0f %8s", "withheld", d[i].predicted, "");
        fprintf(to, "  %s\n", d[i].conditions);
    }
    yard_plan_error_summary(d, n, half, &median, &worst);
    fprintf(to, "error: median %.1f%%, worst %.1f%%", 100 * median, 100 * worst);
    if (half == YARD_PLAN_BLIND_HALF)
        fprintf(to, " (aim: at most %.0f%% and %.0f%%)", 100 * max_median, 100 * max_worst);
    fprintf(to, "\n");
}

bool yard_plan_print_deployments(FILE *to, const yard_plan_deployment *d, uint32_t n)
{
    fprintf(to, "Published runs, output (prefill: input) tokens/s a GPU. (a): assumed, not in the "
                "publication\n");
    print_half(to, d, n, YARD_PLAN_FIT_HALF);
    print_half(to, d, n, YARD_PLAN_BLIND_HALF);
    return yard_plan_deployments_pass(d, n);
}

bool yard_plan_deployments_pass(const yard_plan_deployment *d, uint32_t n)
{
    double median, worst;

    yard_plan_error_summary(d, n, YARD_PLAN_BLIND_HALF, &median, &worst);
    return median <= max_median && worst <= max_worst;
}

static json_t *append(json_t *list, json_t *value)
{
    if (list && value && json_array_append_new(list, value) == 0)
        return list;
    json_decref(list);
    return NULL;
}

json_t *yard_plan_json_checks(const yard_plan_check_result *checks, uint32_t n)
{
    json_t *list = json_array();

    for (uint32_t i = 0; list && i < n; i++) {
        const yard_plan_check_result *c = &checks[i];
        const bool gate = c->at_least || isfinite(c->tolerance);
        list = append(list, json_pack("{s:s, s:s, s:f, s:f, s:o, s:b, s:b}", "id", c->id, "what",
                                      c->what, "expected", c->expected, "planner", c->got,
                                      "tolerance", gate ? json_real(c->tolerance) : json_null(),
                                      "at_least", c->at_least, "passed", c->passed));
    }
    return list;
}

json_t *yard_plan_json_deployments(const yard_plan_deployment *d, uint32_t n)
{
    json_t *list = json_array();

    for (uint32_t i = 0; list && i < n; i++)
        list =
            append(list, json_pack("{s:s, s:s, s:s, s:s, s:s, s:s, s:f, s:f, s:f, s:f}", "id",
                                   d[i].id, "what", d[i].what, "half",
                                   d[i].half == YARD_PLAN_FIT_HALF ? "fit" : "blind", "stack",
                                   d[i].stack, "conditions", d[i].conditions, "source", d[i].source,
                                   "published", d[i].published, "predicted", d[i].predicted,
                                   "error", d[i].error, "step_ms", d[i].result.step_us * 1e-3));
    return list;
}
