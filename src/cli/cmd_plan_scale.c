/* switchyard plan scale: groups beyond what was measured, failures, a day of traffic. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/args.h"
#include "cli/plan_options.h"

enum { KEY_REQUESTS = 0x4000, KEY_OUTPUT, KEY_OCCUPANCY, KEY_HOURS, KEY_RESTART };

typedef struct scale_args {
    yard_plan_options o;
    float requests, occupancy, restart_s;
    uint32_t out_tokens;
    const char *hours_file;
} scale_args;

static void parse_real(struct argp_state *state, const char *option, const char *text, float min,
                       float max, float *out)
{
    yard_error err = { 0 };

    if (yard_cli_parse_f32(option, text, min, max, out, &err) != YARD_OK)
        argp_error(state, "%s", err.message);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    scale_args *args = state->input;
    yard_error err = { 0 };
    uint64_t value = 0;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->o;
        return 0;
    case KEY_REQUESTS:
        parse_real(state, "--requests", arg, 1e-3f, 1e6f, &args->requests);
        return 0;
    case KEY_OCCUPANCY:
        parse_real(state, "--occupancy", arg, 0.01f, 1, &args->occupancy);
        return 0;
    case KEY_RESTART:
        parse_real(state, "--restart", arg, 0, 3600, &args->restart_s);
        return 0;
    case KEY_HOURS:
        args->hours_file = arg;
        return 0;
    case KEY_OUTPUT:
        if (yard_cli_parse_u64("--output-tokens", arg, 1, 10000000, &value, &err) != YARD_OK)
            argp_error(state, "%s", err.message);
        args->out_tokens = (uint32_t)value;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "no arguments, got '%s'", arg);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option option_list[] = {
    { NULL, 0, NULL, 0, "Traffic and failures:", 5 },
    { "requests", KEY_REQUESTS, "X", 0, "Mean requests/s of the day (default 500)", 5 },
    { "output-tokens", KEY_OUTPUT, "N", 0, "Answer tokens of a mean request (default 1000)", 5 },
    { "hours-file", KEY_HOURS, "FILE", 0,
      "A JSON list of 24 relative loads (default: a sine whose peak is 1.23 of the mean, as "
      "DeepSeek's "
      "278 nodes over 226.75)",
      5 },
    { "occupancy", KEY_OCCUPANCY, "S", 0, "Of a decode group at most (default 0.9, assumed)", 5 },
    { "restart", KEY_RESTART, "S", 0, "Seconds to form a group again (default 120, assumed)", 5 },
    { 0 },
};

static const struct argp_child children[] = { { &yard_plan_argp, 0, NULL, 0 }, { 0 } };

static const struct argp scale_argp = {
    .options = option_list,
    .parser = parse,
    .children = children,
    .args_doc = "",
    .doc = "Extrapolates: larger groups (experts are replicated where there are more ranks than "
           "experts), NVLink islands joined by the network, a machine lost for an hour, traffic by "
           "hour. "
           "Nothing here was measured."
           "\vExamples:\n"
           "  switchyard plan scale --gpu h100 --batch 64\n"
           "  switchyard plan scale --gpu gb200 --weights nvfp4 --batch 128 \\\n"
           "      --ep 8,18,36,72,144,288\n"
           "  switchyard plan scale --ep 128 --batch 64 --requests 2000\n",
};

static json_t *json_row(const yard_plan_scale_row *row)
{
    return json_pack("{s:i, s:i, s:s, s:f, s:f, s:f, s:f, s:b, s:s}", "ep", (int)row->config.ep,
                     "redundant", (int)row->config.redundant, "schedule",
                     yard_plan_schedule_name(row->config.schedule), "layer_us",
                     row->result.layer_us, "tokens_per_s_per_request",
                     row->result.tokens_per_s_per_request, "tokens_per_s_per_gpu",
                     row->result.tokens_per_s_per_gpu, "memory_gb", row->result.memory.total_gb,
                     "fits", row->result.fits, "bound", row->result.bound);
}

static void print_rows(const yard_plan_scale_row *rows, uint32_t n, const yard_plan_config *base)
{
    printf(
        "Groups of %s, TP %u, %u requests a group, %u tokens each a step, %u cached (simulated)\n",
        base->gpu->name, base->tp, base->batch, base->query, base->kv);
    printf("%5s %6s %7s %10s  %-17s %9s %11s %11s %9s %7s  %s\n", "EP", "spare", "islands",
           "experts", "schedule", "layer us", "tok/s a req", "tok/s a GPU", "to first", "GB",
           "waits for");
    for (uint32_t i = 0; i < n; i++) {
        const yard_plan_config *c = &rows[i].config;
        const yard_plan_result *r = &rows[i].result;
        printf("%5u %6u %7u %10.2f  %-17s %9.0f %11.1f %11.0f %8.2fx %7.1f  %s%s\n", c->ep,
               c->redundant, yard_ceil_div(c->ep, c->gpu->gpus_per_island),
               (c->model->n_experts + c->redundant) / (double)c->ep,
               yard_plan_schedule_name(c->schedule), r->layer_us, r->tokens_per_s_per_request,
               r->tokens_per_s_per_gpu, rows[i].against_first, r->memory.total_gb, r->bound,
               r->fits ? "" : "; DOES NOT FIT");
    }
}

static void print_failure(const yard_plan_failure *f, uint32_t node)
{
    printf("\nA machine of %u GPUs lost for an hour, EP %u: ", node, f->ep_before);
    if (f->ep_after)
        printf(
            "%.0f s to form EP %u again, then the hour gives %.1f instead of %.1f million tokens: "
            "%.0f %% lost.\n",
            f->restart_s, f->ep_after, f->tokens_after * 1e-6, f->tokens_before * 1e-6,
            100 * f->lost);
    else
        printf("no smaller group is possible, all %.1f million tokens of the hour are lost.\n",
               f->tokens_before * 1e-6);
    printf("With one spare machine in reach: %.1f %%. What it needs: a spare machine for the "
           "groups that "
           "share it, or that share of capacity over.\n",
           100 * f->lost_with_spare);
}

static void print_day(const yard_plan_day *d, bool fits, const scale_args *args)
{
    printf("\nA day, %g requests/s in the mean, %u tokens each, groups of EP %u that carry %.1f "
           "requests/s at most %.0f %% full%s:\n  hour      ",
           (double)args->requests, args->out_tokens, args->o.config.ep, d->group_capacity,
           100 * (double)args->occupancy, fits ? "" : " (they DO NOT FIT in memory)");
    for (int h = 0; h < 24; h += 2)
        printf("%6d", h);
    printf("\n  requests/s");
    for (int h = 0; h < 24; h += 2)
        printf(" %5.0f", d->requests_per_s[h]);
    printf("\n  groups    ");
    for (int h = 0; h < 24; h += 2)
        printf(" %5u", d->groups[h]);
    printf("\nAlways at the peak: %u groups, %.0f GPU hours, %.0f USD a day. By the hour: %.0f GPU "
           "hours, "
           "%.0f USD (%.0f %% less), %.3f USD a million tokens; decode pool only.\n",
           d->peak_groups, d->gpu_hours_fixed, d->usd_fixed, d->gpu_hours_scaled, d->usd_scaled,
           100 * (1 - d->gpu_hours_scaled / d->gpu_hours_fixed), d->usd_per_million);
}

/* 278 of 226.75 nodes at the peak: DeepSeek's day 6 overview. */
static void default_shape(double shape[24])
{
    const double peak = 278 / 226.75 - 1, pi = 3.14159265358979;

    for (int h = 0; h < 24; h++)
        shape[h] = 1 + peak * cos((h - 15) * pi / 12);
}

static yard_status read_shape(const char *path, double shape[24], yard_error *err)
{
    json_error_t why = { 0 };
    json_t *list;
    yard_status st = YARD_OK;
    double sum = 0;

    if (!path) {
        default_shape(shape);
        return YARD_OK;
    }
    list = json_load_file(path, 0, &why);
    if (!list || json_array_size(list) != 24)
        st = yard_fail(err, YARD_EFORMAT, "%s: want a JSON list of 24 numbers%s%s", path,
                       list ? "" : ": ", list ? "" : why.text);
    for (size_t h = 0; !st && h < 24; h++) {
        const json_t *value = json_array_get(list, h);
        shape[h] = json_number_value(value);
        sum += shape[h];
        if (!json_is_number(value) || !isfinite(shape[h]) || shape[h] < 0)
            st = yard_fail(err, YARD_EFORMAT, "%s: hour %zu: want a number, at least 0", path, h);
    }
    if (!st && sum <= 0)
        st = yard_fail(err, YARD_EFORMAT, "%s: no hour has any load", path);
    json_decref(list);
    return st;
}

static yard_status print_json(const yard_plan_scale_row *rows, uint32_t n,
                              const yard_plan_failure *f, const yard_plan_day *d, yard_error *err)
{
    json_t *list = json_array();

    for (uint32_t i = 0; list && i < n; i++)
        if (json_array_append_new(list, json_row(&rows[i])) != 0) {
            json_decref(list);
            list = NULL;
        }
    return yard_plan_print_json(
        json_pack("{s:o, s:{s:i, s:i, s:f, s:f}, s:{s:i, s:f, s:f, s:f}}", "groups", list,
                  "failure", "ep_before", (int)f->ep_before, "ep_after", (int)f->ep_after, "lost",
                  f->lost, "lost_with_spare", f->lost_with_spare, "day", "peak_groups",
                  (int)d->peak_groups, "gpu_hours_fixed", d->gpu_hours_fixed, "gpu_hours_scaled",
                  d->gpu_hours_scaled, "usd_per_million", d->usd_per_million),
        err);
}

static yard_status scale(scale_args *args, bool *usage, yard_error *err)
{
    static const yard_plan_list usual = { 8, { 8, 16, 32, 64, 128, 256, 512, 1024 } };
    yard_plan_scale_row rows[YARD_PLAN_MAX_SCALE];
    yard_plan_config *c = &args->o.config;
    const yard_plan_list *ep = args->o.ep.n > 1 ? &args->o.ep : &usual;
    yard_plan_failure failure;
    yard_plan_day day;
    double shape[24];
    uint32_t n = 0;
    yard_plan_memory memory;
    yard_status st = yard_plan_options_resolve(&args->o, usage, err);

    if (st)
        return st;
    if (c->phase == YARD_PLAN_PREFILL || !c->model->n_experts) {
        *usage = true;
        return yard_fail(err, YARD_EINVAL, "scale: decode of models with experts only");
    }
    if (args->o.tp.n > 1 || args->o.batch.n > 1 || args->o.out_dir) {
        *usage = true;
        return yard_fail(err, YARD_EINVAL,
                         "scale: lists are of --ep alone, and there are no drawings (--out)");
    }
    if (!args->o.ep.n)
        c->ep = 128;
    if ((st = read_shape(args->hours_file, shape, err)) ||
        (st = yard_plan_scale(c, ep->value, ep->n, rows, &n, err)))
        return st;
    if (args->o.ep.n > 1) { /* failure and day are of the largest */
        c->ep = rows[n - 1].config.ep;
        c->redundant = rows[n - 1].config.redundant;
    }
    c->schedule = args->o.schedule_given ? c->schedule : rows[n - 1].config.schedule;
    if ((st = yard_plan_fail_node(c, (double)args->restart_s, &failure, err)) ||
        (st = yard_plan_run_day(c, shape, (double)args->requests, args->out_tokens,
                                (double)args->occupancy, &day, err)) ||
        (st = yard_plan_memory_of(c, false, &memory, err)))
        return st;
    if (args->o.json)
        return print_json(rows, n, &failure, &day, err);
    print_rows(rows, n, c);
    print_failure(&failure, c->gpu->gpus_per_node);
    print_day(&day, memory.total_gb <= c->gpu->hbm_gb, args);
    return YARD_OK;
}

int yard_plan_scale_main(int argc, char **argv)
{
    scale_args args = { .requests = 500, .occupancy = 0.9f, .restart_s = 120, .out_tokens = 1000 };
    yard_error err = { 0 };
    bool usage = false;
    yard_status st;

    yard_cli_parse_args(&scale_argp, "switchyard plan scale", argc, argv, 0, &args);
    st = scale(&args, &usage, &err);
    yard_plan_options_release(&args.o);
    if (st)
        return usage ? yard_cli_usage("plan", "%s", err.message) : yard_cli_fail("plan", &err);
    return yard_cli_close_stdout("plan");
}
