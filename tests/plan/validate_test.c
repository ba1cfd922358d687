/* The comparison tables: every check holds, predictions are the frozen ones, fits are what is built
 * in. A change of the planner that moves a published run shows here. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "plan/plan.h"

static void checks(void **state)
{
    yard_plan_check_result list[YARD_PLAN_MAX_CHECKS];
    uint32_t n = 0;

    (void)state;
    assert_int_equal(yard_plan_run_checks(list, &n, NULL), YARD_OK);
    assert_true(n > 70 && n < YARD_PLAN_MAX_CHECKS);
    for (uint32_t i = 0; i < n; i++)
        if (!list[i].passed)
            fail_msg("%s %s: want %g within %g, got %g", list[i].id, list[i].what, list[i].expected,
                     list[i].tolerance, list[i].got);
}

/* Every acceptance check is in the list. */
static void all_ids(void **state)
{
    yard_plan_check_result list[YARD_PLAN_MAX_CHECKS];
    char id[8];
    uint32_t n = 0;

    (void)state;
    assert_int_equal(yard_plan_run_checks(list, &n, NULL), YARD_OK);
    for (int a = 1; a <= 18; a++) {
        bool found = false;
        snprintf(id, sizeof(id), "A%d", a);
        for (uint32_t i = 0; i < n && !found; i++)
            found = !strcmp(list[i].id, id);
        if (!found)
            fail_msg("no check %s", id);
    }
}

static void blind_half(void **state)
{
    yard_plan_deployment runs[YARD_PLAN_MAX_DEPLOYMENTS];
    double median, worst;
    uint32_t n = 0, n_blind = 0;

    (void)state;
    assert_int_equal(yard_plan_predict(runs, NULL, &n, NULL), YARD_OK);
    for (uint32_t i = 0; i < n; i++) {
        assert_true(runs[i].published > 0);
        n_blind += runs[i].half == YARD_PLAN_BLIND_HALF;
        if (!strcmp(runs[i].id, "D1")) /* it fits the occupancy */
            assert_true(fabs(runs[i].error) < 0.01);
    }
    assert_true(2 * n_blind >= n); /* half of them at least */
    yard_plan_error_summary(runs, n, YARD_PLAN_BLIND_HALF, &median, &worst);
    if (median > 0.15 || worst > 0.35)
        fail_msg("median %.3f, worst %.3f", median, worst);
    assert_true(yard_plan_deployments_pass(runs, n)); /* what the exit code says */
    for (uint32_t i = 0; i < n; i++)
        if (runs[i].half == YARD_PLAN_BLIND_HALF)
            runs[i].error = 0.2;
    assert_false(yard_plan_deployments_pass(runs, n));
}

static void frozen(void **state)
{
    yard_plan_deployment runs[YARD_PLAN_MAX_DEPLOYMENTS];
    FILE *in = fopen("bench/plan/predictions.jsonl", "rb");
    char line[256];
    uint32_t n = 0, at = 0;

    (void)state;
    assert_non_null(in);
    assert_int_equal(yard_plan_predict(runs, NULL, &n, NULL), YARD_OK);
    while (fgets(line, sizeof(line), in)) {
        json_t *row = json_loads(line, 0, NULL);
        const double want = json_number_value(json_object_get(row, "predicted"));
        assert_true(at < n);
        assert_string_equal(json_string_value(json_object_get(row, "id")), runs[at].id);
        if (fabs(runs[at].predicted / want - 1) > 0.005)
            fail_msg("%s: frozen at %g, now %g", runs[at].id, want, runs[at].predicted);
        json_decref(row);
        at++;
    }
    fclose(in);
    assert_int_equal(at, n);
}

static void fits(void **state)
{
    static const char *const stacks[] = { "deepseek", "sglang", "trtllm", "trtllm-2025" };

    (void)state;
    for (size_t i = 0; i < sizeof(stacks) / sizeof(stacks[0]); i++) {
        const yard_plan_profile *p = yard_plan_profile_find(stacks[i]);
        double stretch = 0, step_us = 0, worst = 0;
        assert_int_equal(yard_plan_fit(stacks[i], &stretch, &step_us, &worst, NULL), YARD_OK);
        assert_true(fabs(stretch - p->stretch) < 0.011);
        assert_true(fabs(step_us - p->step_us) < 1);
        assert_true(worst < 0.1);
    }
    assert_int_equal(yard_plan_fit("nobody", &(double){ 0 }, &(double){ 0 }, &(double){ 0 }, NULL),
                     YARD_EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(checks), cmocka_unit_test(all_ids), cmocka_unit_test(blind_half),
        cmocka_unit_test(frozen), cmocka_unit_test(fits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
