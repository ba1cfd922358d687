/* switchyard plan: what a deployment will give. One point here; sweep, validate and scale have
 * files of their own. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "cli/args.h"
#include "cli/plan_options.h"

static error_t parse(int key, char *arg, struct argp_state *state)
{
    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = state->input;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "no '%s' here; legal: sweep, validate, scale, or options alone", arg);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = { { &yard_plan_argp, 0, NULL, 0 }, { 0 } };

static const struct argp point_argp = {
    .parser = parse,
    .children = children,
    .args_doc = "[sweep|validate|scale]",
    .doc =
        "What a deployment will give before it is bought: every kernel of a layer with its floor, "
        "the step on a virtual clock, memory, speed and throughput. `plan sweep` searches layouts, "
        "`plan validate` compares with published runs, `plan scale` goes to larger groups."
        "\vBatch is requests of a DP group, of which there are EP / TP. Rates are dense, times "
        "without queueing. Each number says whether it was measured, published, fitted to "
        "published "
        "times, or assumed. A layout that does not fit in memory is timed all the same and says so."
        "\n\nExamples:\n"
        "  switchyard plan --gpu h100 --ep 128 --batch 128 --schedule micro-batch\n"
        "  switchyard plan --gpu h200 --ep 8 --tp 8 --json\n"
        "  switchyard plan --prefill --gpu h800 --ep 32 --copies node \\\n"
        "      --efficiency public\n"
        "  switchyard plan sweep --out plots\n"
        "  switchyard plan validate\n",
};

/* The timeline alone; the other drawings need a sweep. */
static yard_status draw(const yard_plan_options *o, yard_error *err)
{
    if (mkdir(o->out_dir, 0777) != 0 && errno != EEXIST)
        return yard_fail(err, YARD_EIO, "%s: cannot create: %s", o->out_dir, strerror(errno));
    return yard_plan_draw_timeline(o->out_dir, &o->config, err);
}

static yard_status answer(const yard_plan_options *o, yard_error *err)
{
    yard_plan_result r;
    yard_status st = yard_plan_point(&o->config, &r, err);

    if (st || (o->out_dir && (st = draw(o, err))))
        return st;
    if (o->json)
        return yard_plan_print_json(yard_plan_json_point(&o->config, &r), err);
    yard_plan_print_point(stdout, &o->config, &r);
    return YARD_OK;
}

static int run_point(int argc, char **argv)
{
    yard_plan_options o;
    yard_error err = { 0 };
    yard_status st;
    bool usage = false;

    yard_cli_parse_args(&point_argp, "switchyard plan", argc, argv, 0, &o);
    st = yard_plan_options_resolve(&o, &usage, &err);
    if (!st && (o.ep.n > 1 || o.tp.n > 1 || o.batch.n > 1)) {
        usage = true;
        st = yard_fail(&err, YARD_EINVAL, "lists of --ep, --tp and --batch are for `plan sweep`");
    }
    if (!st)
        st = answer(&o, &err);
    yard_plan_options_release(&o);
    if (st)
        return usage ? yard_cli_usage("plan", "%s", err.message) : yard_cli_fail("plan", &err);
    return yard_cli_close_stdout("plan");
}

int yard_cmd_plan(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(int argc, char **argv);
    } parts[] = {
        { "sweep", yard_plan_sweep_main },
        { "validate", yard_plan_validate_main },
        { "scale", yard_plan_scale_main },
    };

    for (size_t i = 0; argc > 1 && i < sizeof(parts) / sizeof(parts[0]); i++)
        if (!strcmp(argv[1], parts[i].name))
            return parts[i].run(argc - 1, argv + 1);
    return run_point(argc, argv);
}
