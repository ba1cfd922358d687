/* switchyard plan sweep: all layouts, the frontier, the decision, the drawings. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cli/args.h"
#include "cli/plan_options.h"

enum {
    KEY_MIN_SPEED = 0x3000,
    KEY_MAX_TTFT,
    KEY_GPUS,
    KEY_ONE_NODE,
    KEY_ONE_NODE_PRICE,
    KEY_ALL,
    KEY_IN,
    KEY_OUTPUT,
    KEY_OCCUPANCY
};

typedef struct sweep_args {
    yard_plan_options o;
    yard_plan_wish wish;
    const char *one_node;
    yard_plan_gpu one_node_gpu;
    double one_node_price; /* negative: the GPU's */
    bool all;
} sweep_args;

static double real(struct argp_state *state, const char *option, const char *text, float min,
                   float max)
{
    yard_error err = { 0 };
    float value = 0;

    if (yard_cli_parse_f32(option, text, min, max, &value, &err) != YARD_OK)
        argp_error(state, "%s", err.message);
    return (double)value;
}

static uint32_t whole(struct argp_state *state, const char *option, const char *text, uint64_t max)
{
    yard_error err = { 0 };
    uint64_t value = 0;

    if (yard_cli_parse_u64(option, text, 1, max, &value, &err) != YARD_OK)
        argp_error(state, "%s", err.message);
    return (uint32_t)value;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    sweep_args *args = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->o;
        return 0;
    case KEY_MIN_SPEED:
        args->wish.min_speed = real(state, "--min-speed", arg, 0, 1e6f);
        return 0;
    case KEY_MAX_TTFT:
        args->wish.max_ttft_ms = real(state, "--max-ttft", arg, 0, 1e9f);
        return 0;
    case KEY_OCCUPANCY:
        args->wish.occupancy = real(state, "--occupancy", arg, 0.01f, 1);
        return 0;
    case KEY_GPUS:
        args->wish.max_gpus = whole(state, "--gpus", arg, 1 << 20);
        return 0;
    case KEY_IN:
        args->wish.in_tokens = whole(state, "--input-tokens", arg, 10000000);
        return 0;
    case KEY_OUTPUT:
        args->wish.out_tokens = whole(state, "--output-tokens", arg, 10000000);
        return 0;
    case KEY_ONE_NODE:
        args->one_node = arg;
        return 0;
    case KEY_ONE_NODE_PRICE:
        args->one_node_price = real(state, "--one-node-price", arg, 0, 1e4f);
        return 0;
    case KEY_ALL:
        args->all = true;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "no arguments, got '%s'", arg);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option option_list[] = {
    { NULL, 0, NULL, 0, "What is wanted:", 5 },
    { "min-speed", KEY_MIN_SPEED, "X", 0, "Tokens/s a request, at least", 5 },
    { "max-ttft", KEY_MAX_TTFT, "MS", 0, "First token of a prompt, without queueing, at most", 5 },
    { "gpus", KEY_GPUS, "N", 0, "GPUs of a group, at most", 5 },
    { "input-tokens", KEY_IN, "N", 0, "New prompt tokens of a mean request (default 4000)", 5 },
    { "output-tokens", KEY_OUTPUT, "N", 0, "Answer tokens of a mean request (default 1000)", 5 },
    { "occupancy", KEY_OCCUPANCY, "S", 0,
      "Share of the prefill pool that traffic uses (default 0.615, fitted to DeepSeek's day)", 5 },
    { "one-node-gpu", KEY_ONE_NODE, "GPU", 0,
      "GPU of layouts within one machine (default: the same; h200, as in the article, where "
      "neither a GPU nor a measurement file is named)",
      5 },
    { "one-node-price", KEY_ONE_NODE_PRICE, "USD", 0, "A GPU hour of that", 5 },
    { "all", KEY_ALL, NULL, 0, "All points in the table", 5 },
    { 0 },
};

static const struct argp_child children[] = { { &yard_plan_argp, 0, NULL, 0 }, { 0 } };

static const struct argp sweep_argp = {
    .options = option_list,
    .parser = parse,
    .children = children,
    .args_doc = "",
    .doc = "All layouts of a model on a kind of machine, and those no other beats. --ep, --tp and "
           "--batch take lists here; without --schedule the best of none, dispatch-overlap and "
           "micro-batch is taken at each point. The default is the deployment article's sweep: EP "
           "8 to "
           "128, TP 1 to 8, batch 1 to 128, two tokens a step, 5,000 cached."
           "\vExamples:\n"
           "  switchyard plan sweep --out plots\n"
           "  switchyard plan sweep --min-speed 40 --max-ttft 2000 --price 2.2\n"
           "  switchyard plan sweep --gpu gb200 --weights nvfp4 --ep 8,16,32,64 \\\n"
           "      --tp 1,2,4\n"
           "  switchyard plan sweep --model llama-3-70b --gpu h100 --query 1\n",
};

typedef struct lists {
    yard_plan_list ep, tp, batch;
    yard_plan_schedule schedule[3];
    uint32_t n_schedule;
} lists;

static yard_plan_list powers(uint32_t from, uint32_t to)
{
    yard_plan_list list = { 0 };

    for (uint32_t v = from; v <= to; v *= 2)
        list.value[list.n++] = v;
    return list;
}

static lists what_to_sweep(const yard_plan_options *o)
{
    lists l = { .ep = o->ep, .tp = o->tp, .batch = o->batch };

    if (!l.tp.n)
        l.tp = powers(1, 8);
    if (!l.ep.n)
        l.ep = o->model.n_experts ? powers(8, 128) : l.tp; /* a dense model: EP is TP */
    if (!l.batch.n)
        l.batch = powers(1, 128);
    if (o->schedule_given) {
        l.schedule[l.n_schedule++] = o->config.schedule;
        return l;
    }
    l.schedule[l.n_schedule++] = YARD_PLAN_NONE;
    if (o->model.n_experts) {
        l.schedule[l.n_schedule++] = YARD_PLAN_DISPATCH_OVERLAP;
        l.schedule[l.n_schedule++] = YARD_PLAN_MICRO_BATCH;
    }
    return l;
}

static yard_status one_node_gpu(sweep_args *args, const yard_plan_gpu **out, yard_error *err)
{
    const yard_plan_options *o = &args->o;
    const char *name = args->one_node;
    const yard_plan_gpu *gpu;

    *out = NULL;
    if (!name && !o->gpu_name && !o->gpu_file && !o->measured && o->model.n_experts)
        name = "h200";
    if (!name)
        return args->one_node_price < 0
                   ? YARD_OK
                   : yard_fail(err, YARD_EINVAL, "--one-node-price: want --one-node-gpu as well");
    gpu = yard_plan_gpu_find(name);
    if (!gpu)
        return yard_fail(err, YARD_EINVAL,
                         "--one-node-gpu: no '%s'; legal: h100, h200, h800, h20, "
                         "b200, gb200",
                         name);
    if (o->measured && strcmp(name, o->gpu.name) != 0)
        return yard_fail(err, YARD_EINVAL,
                         "--measured: rows of %s say nothing of --one-node-gpu %s; legal: %s",
                         o->gpu.name, name, o->gpu.name);
    args->one_node_gpu = *gpu;
    if (args->one_node_price >= 0) {
        args->one_node_gpu.price_per_hour = args->one_node_price;
        args->one_node_gpu.price_origin = YARD_PLAN_GIVEN;
    }
    *out = &args->one_node_gpu;
    return YARD_OK;
}

/* Every EP and TP that was asked for has a legal layout with one of the others: it would be missing
 * from the answer without a word. */
static yard_status check_lists(const yard_plan_options *o, const lists *l, yard_error *err)
{
    for (uint32_t given = 0; given < 2; given++) {
        const yard_plan_list *asked = given ? &o->tp : &o->ep, *others = given ? &l->ep : &l->tp;
        for (uint32_t i = 0; i < asked->n; i++) {
            yard_plan_config c = o->config;
            bool legal = false;
            for (uint32_t k = 0; k < others->n && !legal; k++) {
                c.ep = given ? others->value[k] : asked->value[i];
                c.tp = given ? asked->value[i] : others->value[k];
                legal = yard_plan_is_legal(&c);
            }
            c.ep = given ? others->value[0] : asked->value[i];
            c.tp = given ? asked->value[i] : others->value[0];
            if (!legal)
                return yard_plan_check_layout(&c, err);
        }
    }
    return YARD_OK;
}

/* Drawings of an earlier run, perhaps of another GPU, must not get into this report. */
static yard_status remove_drawings(const char *dir, yard_error *err)
{
    static const char *const names[] = { "frontier.svg", "frontier.png",  "layer.svg",
                                         "layer.png",    "crossover.svg", "crossover.png",
                                         "roofline.svg", "roofline.png",  "timeline.svg",
                                         "layer.dat",    "layer.gp",      "crossover.dat",
                                         "crossover.gp", "roofline.dat",  "roofline.gp" };
    char path[4096];

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        snprintf(path, sizeof(path), "%s/%s", dir, names[i]);
        if (unlink(path) != 0 && errno != ENOENT)
            return yard_fail(err, YARD_EIO, "%s: cannot replace: %s", path, strerror(errno));
    }
    return YARD_OK;
}

static yard_status write_data(const char *dir, const yard_plan_config *base, bool layers,
                              const yard_plan_choice *list, uint32_t n, yard_error *err)
{
    yard_plan_config point = *base;
    yard_status st;

    if ((st = yard_plan_plot_frontier(dir, list, n, err)) || !base->model->n_experts)
        return st;
    /* the article's figures of a layer, on the GPU that was asked for */
    point.batch = 128;
    if (layers && ((st = yard_plan_plot_layer(dir, &point, err)) ||
                   (st = yard_plan_plot_crossover(dir, &point, err)) ||
                   (st = yard_plan_plot_roofline(dir, &point, err))))
        return st;
    point.ep = list[n - 1].config.ep;
    point.tp = 1;
    return yard_plan_draw_timeline(dir, &point, err);
}

/* The layer figures are of EP 8 to 128 with one imbalance for all; where a model's experts, spare
 * slots or a load do not allow that there are none. */
static bool has_layer_figures(const yard_plan_config *base)
{
    yard_plan_config c = *base;

    c.tp = 1;
    for (c.ep = 8; c.ep <= 128; c.ep *= 2)
        if (!base->model->n_experts || !yard_plan_is_legal(&c) || base->load ||
            base->imbalance > c.ep)
            return false;
    return true;
}

static yard_status draw(const sweep_args *args, const yard_plan_choice *list, uint32_t n,
                        yard_error *err)
{
    static const char *const scripts[] = { "frontier.gp", "layer.gp", "crossover.gp",
                                           "roofline.gp" };
    const char *dir = args->o.out_dir;
    const yard_plan_config *base = &args->o.config;
    const bool layers = has_layer_figures(base);
    int rc = 0;
    yard_status st;

    if (mkdir(dir, 0777) != 0 && errno != EEXIST)
        return yard_fail(err, YARD_EIO, "%s: cannot create: %s", dir, strerror(errno));
    if ((st = remove_drawings(dir, err)) || (st = write_data(dir, base, layers, list, n, err)))
        return st;
    for (size_t i = 0; i < (layers ? 4 : 1) && !rc; i++)
        rc = yard_cli_run_gnuplot(dir, scripts[i]);
    if (rc == ENOENT)
        fprintf(stderr, "switchyard plan: no gnuplot (gnuplot-nox): tables, .dat and .gp only\n");
    else if (rc)
        fprintf(stderr, "switchyard plan: gnuplot failed in %s: tables, .dat and .gp only\n", dir);
    return yard_plan_write_html(dir, list, n, &args->wish, err);
}

static yard_status report(const sweep_args *args, const yard_plan_choice *list, uint32_t n,
                          yard_error *err)
{
    yard_plan_pools pools;
    /* a wish that nothing meets is told before anything is printed; programs that wish for nothing
     * get the points, even if none fits */
    yard_status st = yard_plan_choose(list, n, &args->wish, &pools, err);
    const bool decided = st == YARD_OK;

    if (st == YARD_EINVAL && args->o.json && !args->o.out_dir && args->wish.min_speed <= 0 &&
        args->wish.max_ttft_ms <= 0)
        st = YARD_OK;
    if (st || (args->o.out_dir && (st = draw(args, list, n, err))))
        return st;
    if (args->o.json)
        return yard_plan_print_json(yard_plan_json_sweep(list, n, decided ? &pools : NULL), err);
    yard_plan_print_sweep(stdout, list, n, args->all);
    printf("\n");
    if ((st = yard_plan_advise(stdout, list, n, &args->wish, err)))
        return st;
    if (args->o.out_dir)
        printf("Drawings and report.html: %s\n", args->o.out_dir);
    return YARD_OK;
}

static yard_status sweep(sweep_args *args, bool *usage, yard_error *err)
{
    yard_plan_choice *list = NULL;
    uint32_t n = 0;
    yard_plan_sweep s = { .size = sizeof(s), .max_gpus = args->wish.max_gpus };
    yard_status st = yard_plan_options_resolve(&args->o, usage, err);
    lists l;

    if (st)
        return st;
    if (args->o.config.phase == YARD_PLAN_PREFILL) {
        *usage = true;
        return yard_fail(err, YARD_EINVAL,
                         "--prefill: a sweep is of decode; the prefill pool is chosen "
                         "with it");
    }
    if ((st = one_node_gpu(args, &s.one_node_gpu, err))) {
        *usage = true;
        return st;
    }
    l = what_to_sweep(&args->o);
    if ((st = check_lists(&args->o, &l, err)))
        return st;
    s.ep = l.ep.value;
    s.n_ep = l.ep.n;
    s.tp = l.tp.value;
    s.n_tp = l.tp.n;
    s.batch = l.batch.value;
    s.n_batch = l.batch.n;
    s.schedule = l.schedule;
    s.n_schedule = l.n_schedule;
    st = yard_plan_sweep_run(&args->o.config, &s, &list, &n, err);
    if (!st)
        st = report(args, list, n, err);
    free(list);
    return st;
}

int yard_plan_sweep_main(int argc, char **argv)
{
    sweep_args args = {
        .one_node_price = -1,
        .wish = { .in_tokens = 4000, .out_tokens = 1000, .occupancy = YARD_PLAN_ONLINE_OCCUPANCY }
    };
    yard_error err = { 0 };
    bool usage = false;
    yard_status st;

    yard_cli_parse_args(&sweep_argp, "switchyard plan sweep", argc, argv, 0, &args);
    st = sweep(&args, &usage, &err);
    yard_plan_options_release(&args.o);
    if (st)
        return usage ? yard_cli_usage("plan", "%s", err.message) : yard_cli_fail("plan", &err);
    return yard_cli_close_stdout("plan");
}
