/* switchyard plan validate: the planner against what is known and published. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/args.h"
#include "cli/plan_options.h"

enum { KEY_JSON = 0x2000, KEY_FIT, KEY_PREDICTIONS, KEY_FROZEN };

typedef struct validate_args {
    bool json, fit, predictions;
    const char *frozen;
} validate_args;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    validate_args *args = state->input;

    switch (key) {
    case KEY_JSON:
        args->json = true;
        return 0;
    case KEY_FIT:
        args->fit = true;
        return 0;
    case KEY_PREDICTIONS:
        args->predictions = true;
        return 0;
    case KEY_FROZEN:
        args->frozen = arg;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "no arguments, got '%s'", arg);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option option_list[] = {
    { "json", KEY_JSON, NULL, 0, "One JSON object with all tables", 0 },
    { "fit", KEY_FIT, NULL, 0,
      "Fit the stacks to the fit half again, and compare with what is built in", 0 },
    { "predictions", KEY_PREDICTIONS, NULL, 0,
      "Predictions alone, one JSON line each, no comparison", 0 },
    { "frozen", KEY_FROZEN, "FILE", 0,
      "Fail if predictions differ from this file by more than 0.5 %", 0 },
    { 0 },
};

static const struct argp validate_argp = {
    .options = option_list,
    .parser = parse,
    .args_doc = "",
    .doc =
        "Compares the planner with counts, floors and published times. Exit code 1 if a check is "
        "wrong, or the blind half misses its aim. The blind half of the published runs was "
        "predicted before it was compared."
        "\vExamples:\n"
        "  switchyard plan validate\n"
        "  switchyard plan validate --frozen bench/plan/predictions.jsonl\n"
        "  switchyard plan validate --fit\n",
};

typedef struct tables {
    yard_plan_check_result checks[YARD_PLAN_MAX_CHECKS];
    yard_plan_deployment runs[YARD_PLAN_MAX_DEPLOYMENTS];
    uint32_t n_checks, n_runs;
} tables;

static yard_status print_predictions(const tables *t, yard_error *err)
{
    for (uint32_t i = 0; i < t->n_runs; i++) {
        const yard_status st =
            yard_plan_print_json(json_pack("{s:s, s:s, s:f}", "id", t->runs[i].id, "half",
                                           t->runs[i].half == YARD_PLAN_FIT_HALF ? "fit" : "blind",
                                           "predicted", round(t->runs[i].predicted * 10) / 10),
                                 err);
        if (st)
            return st;
    }
    return YARD_OK;
}

static yard_status print_fit(yard_error *err)
{
    static const char *const stacks[] = { "deepseek", "sglang", "trtllm", "trtllm-2025" };

    for (size_t i = 0; i < sizeof(stacks) / sizeof(stacks[0]); i++) {
        const yard_plan_profile *p = yard_plan_profile_find(stacks[i]);
        double stretch = 0, step_us = 0, worst = 0;
        const yard_status st = yard_plan_fit(stacks[i], &stretch, &step_us, &worst, err);
        if (st)
            return st;
        printf("%-12s stretch %.2f (built in %.2f), step %.0f us (built in %.0f), worst error "
               "%.1f%%\n",
               stacks[i], stretch, p->stretch, step_us, p->step_us, 100 * worst);
    }
    return YARD_OK;
}

static const yard_plan_deployment *find_run(const tables *t, const char *id)
{
    for (uint32_t i = 0; id && i < t->n_runs; i++)
        if (!strcmp(t->runs[i].id, id))
            return &t->runs[i];
    return NULL;
}

/* A prediction that moved after it was frozen is no longer blind. */
static yard_status compare_line(const tables *t, const char *path, uint32_t line, const json_t *row,
                                bool seen[YARD_PLAN_MAX_DEPLOYMENTS], yard_error *err)
{
    const char *id = json_string_value(json_object_get(row, "id"));
    const json_t *want = json_object_get(row, "predicted");
    const yard_plan_deployment *run = find_run(t, id);

    if (!run || !json_is_number(want))
        return yard_fail(err, YARD_EFORMAT, "%s:%u: want the id of a run, and predicted", path,
                         line);
    if (seen[run - t->runs])
        return yard_fail(err, YARD_EFORMAT, "%s:%u: %s for the second time", path, line, id);
    seen[run - t->runs] = true;
    if (fabs(run->predicted / json_number_value(want) - 1) > 0.005)
        return yard_fail(err, YARD_EINVAL, "%s:%u: %s was predicted as %.1f and is %.1f now", path,
                         line, id, json_number_value(want), run->predicted);
    return YARD_OK;
}

static yard_status compare_frozen(const tables *t, const char *path, yard_error *err)
{
    FILE *in = fopen(path, "rb");
    bool seen[YARD_PLAN_MAX_DEPLOYMENTS] = { false };
    char text[256];
    uint32_t n = 0;
    yard_status st = YARD_OK;

    if (!in)
        return yard_fail(err, YARD_EIO, "%s: cannot open: %s", path, strerror(errno));
    while (!st && fgets(text, sizeof(text), in)) {
        json_t *row = json_loads(text, 0, NULL);
        n++;
        st = compare_line(t, path, n, row, seen, err);
        json_decref(row);
    }
    fclose(in);
    if (!st && n != t->n_runs)
        st = yard_fail(err, YARD_EINVAL, "%s: %u predictions for %u runs", path, n, t->n_runs);
    return st;
}

static yard_status print_tables(const tables *t, bool json, bool *passed, yard_error *err)
{
    double median, worst;

    if (!json) {
        const bool checks = yard_plan_print_checks(stdout, t->checks, t->n_checks);
        printf("\n");
        *passed = yard_plan_print_deployments(stdout, t->runs, t->n_runs) && checks;
        return YARD_OK;
    }
    *passed = yard_plan_deployments_pass(t->runs, t->n_runs);
    for (uint32_t i = 0; i < t->n_checks; i++)
        *passed = *passed && t->checks[i].passed;
    yard_plan_error_summary(t->runs, t->n_runs, YARD_PLAN_BLIND_HALF, &median, &worst);
    return yard_plan_print_json(json_pack("{s:b, s:f, s:f, s:o, s:o}", "passed", *passed,
                                          "blind_median_error", median, "blind_worst_error", worst,
                                          "checks", yard_plan_json_checks(t->checks, t->n_checks),
                                          "deployments",
                                          yard_plan_json_deployments(t->runs, t->n_runs)),
                                err);
}

static yard_status validate(const validate_args *args, tables *t, bool *passed, yard_error *err)
{
    yard_status st = yard_plan_predict(t->runs, NULL, &t->n_runs, err);

    *passed = true;
    if (st)
        return st;
    if (args->predictions)
        return print_predictions(t, err);
    if (args->fit)
        return print_fit(err);
    if (args->frozen && (st = compare_frozen(t, args->frozen, err)))
        return st;
    if ((st = yard_plan_run_checks(t->checks, &t->n_checks, err)))
        return st;
    return print_tables(t, args->json, passed, err);
}

int yard_plan_validate_main(int argc, char **argv)
{
    validate_args args = { 0 };
    tables *t = calloc(1, sizeof(*t));
    yard_error err = { 0 };
    bool passed = false;
    yard_status st;
    int rc;

    yard_cli_parse_args(&validate_argp, "switchyard plan validate", argc, argv, 0, &args);
    if (args.fit + args.predictions + (args.json || args.frozen) > 1) {
        free(t);
        return yard_cli_usage("plan",
                              "validate: want --fit, --predictions, or --json and --frozen");
    }
    st = t ? validate(&args, t, &passed, &err) : yard_fail(&err, YARD_ENOMEM, "no memory");
    free(t);
    if (st)
        return yard_cli_fail("plan", &err);
    rc = yard_cli_close_stdout("plan");
    return passed ? rc : EXIT_FAILURE;
}
