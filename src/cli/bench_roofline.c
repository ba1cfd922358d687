/* switchyard bench roofline: the products of a DeepSeek-V3 layer at EP8 to EP128 and batches of 1
 * to 128, as two roofline plots with data beside them. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/args.h"
#include "cli/bench_roofline.h"

enum { KEY_OUT = 0x1000, KEY_BATCH, KEY_EP, KEY_KERNELS, KEY_WHAT, KEY_WRITE, KEY_CHOICES };
enum { MAX_KERNELS = 32, QUERY_LENGTH = 2, EXPERTS = 256, TOP_K = 8 };

typedef struct roofline_args {
    const char *out, *what, *write, *choices, *kernel[MAX_KERNELS];
    int n_kernels;
    yard_bench_list batch, ep;
    bool json;
} roofline_args;

/* Projections of a layer (R116, R133). */
static const struct projection {
    const char *name;
    uint32_t n_out, n_in;
    yard_dtype dtype;
} projections[] = {
    { "qkv_a", 2112, 7168, YARD_FP8_E4M3 },       { "q_a", 1536, 7168, YARD_FP8_E4M3 },
    { "kv_a", 576, 7168, YARD_FP8_E4M3 },         { "q_b", 24576, 1536, YARD_FP8_E4M3 },
    { "o", 7168, 16384, YARD_FP8_E4M3 },          { "shared_gate_up", 4096, 7168, YARD_FP8_E4M3 },
    { "shared_down", 7168, 2048, YARD_FP8_E4M3 }, { "dense_gate_up", 36864, 7168, YARD_FP8_E4M3 },
    { "dense_down", 7168, 18432, YARD_FP8_E4M3 }, { "router", 256, 7168, YARD_BF16 },
    { "eh_proj", 7168, 14336, YARD_BF16 },
};
static const struct projection expert_projections[] = {
    { "gate_up", 4096, 7168, YARD_FP8_E4M3 },
    { "down", 7168, 2048, YARD_FP8_E4M3 },
};
enum { N_PROJECTIONS = sizeof(projections) / sizeof(projections[0]), LINEAR_BYTES = 400000000 };
enum { N_EXPERT_PROJECTIONS = sizeof(expert_projections) / sizeof(expert_projections[0]) };

static bool is_product(const char *name)
{
    for (int i = 0; i < N_EXPERT_PROJECTIONS; i++)
        if (!strcmp(expert_projections[i].name, name))
            return true;
    for (int i = 0; i < N_PROJECTIONS; i++)
        if (!strcmp(projections[i].name, name))
            return true;
    return false;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    roofline_args *a = state->input;
    yard_error err = { 0 };

    switch (key) {
    case KEY_OUT:
        a->out = arg;
        break;
    case KEY_BATCH:
        if (yard_bench_parse_list("--batch", arg, 4096, &a->batch, &err) != YARD_OK)
            argp_error(state, "%s", err.message);
        break;
    case KEY_EP:
        if (yard_bench_parse_list("--ep", arg, EXPERTS, &a->ep, &err) != YARD_OK)
            argp_error(state, "%s", err.message);
        break;
    case KEY_KERNELS:
        a->n_kernels = 0;
        for (char *k = strtok(arg, ","); k; k = strtok(NULL, ",")) {
            if (a->n_kernels == MAX_KERNELS)
                argp_error(state, "--kernels: want at most %d names", MAX_KERNELS);
            a->kernel[a->n_kernels++] = k;
        }
        if (a->n_kernels == 0)
            argp_error(state, "--kernels: want names such as fast or rows128, got none");
        break;
    case KEY_WHAT:
        if (yard_bench_check_names("--products", arg, is_product, "gate_up, down, q_b or o",
                                   &err) != YARD_OK)
            argp_error(state, "%s", err.message);
        a->what = arg;
        break;
    case KEY_WRITE:
        a->write = arg;
        break;
    case KEY_CHOICES:
        a->choices = arg;
        break;
    case 'j':
        a->json = true;
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static const struct argp_option option_list[] = {
    { "batch", KEY_BATCH, "LIST", 0, "Requests a GPU (default 1,2,4,8,16,32,64,128)", 0 },
    { "ep", KEY_EP, "LIST", 0, "GPUs that share the experts (default 8,16,32,64,128)", 0 },
    { "products", KEY_WHAT, "LIST", 0, "Such as gate_up or o (default: all)", 0 },
    { "kernels", KEY_KERNELS, "LIST", 0,
      "Tables or kernels, each in turn (default fast; see docs/kernels.md)", 0 },
    { "out", KEY_OUT, "DIR", 0, "Draw there: SVG, gnuplot scripts and data", 0 },
    { "write-choices", KEY_WRITE, "FILE", 0,
      "Write the fastest of --kernels for each projection: a file for --choices", 0 },
    { "choices", KEY_CHOICES, "FILE", 0, "Measured choices instead of the built-in ones", 0 },
    { "json", 'j', NULL, 0, "One JSON object a row", 0 },
    { 0 },
};

static const struct argp roofline_argp = {
    .options = option_list,
    .parser = parse,
    .doc = "Measures the products of a DeepSeek-V3 layer on a GPU: those of routed experts (pairs "
           "of tokens and experts fall on them at random, as many as a balanced GPU gets) and the "
           "projections, with two tokens a request."
           "\vA time is the median of replays of a graph of many calls, over weights that no "
           "cache holds. halves_us is the time of two products of half the rows. The floor is the "
           "longer of bytes at 4.67 TB/s and operations at 1,300 TFLOP/s in FP8, 680 in bf16, what "
           "an H200 was seen to reach.\n\n"
           "Examples:\n"
           "  switchyard bench roofline --out roofline\n"
           "  switchyard bench roofline --ep 8 --batch 8,128 --products gate_up --json\n"
           "  switchyard bench roofline --products o,q_b \\\n"
           "      --kernels few_fp8:0,few_fp8:8,rows128 --write-choices here.txt\n",
};

typedef struct roofline {
    roofline_args args;
    const yard_ops *ops;
    yard_stream s;
    const char *kernel;
    char device[96];
    yard_roofline_point *points;
    size_t n_points;
    uint32_t n_wrong;
} roofline;

static const double h200_read_rate = 4.67e12, h200_fp8_rate = 1.3e15, h200_bf16_rate = 6.8e14;

static yard_status print_point(const roofline *b, const yard_roofline_point *p, yard_dtype dtype,
                               yard_error *err)
{
    const yard_bench_gemm_time *t = &p->time;
    const double read_us = t->bytes / h200_read_rate * 1e6;
    const double multiply_us =
        t->flops / (dtype == YARD_BF16 ? h200_bf16_rate : h200_fp8_rate) * 1e6;
    yard_bench_row row = {
        .bench = "roofline",
        .p50_us = t->p50_us,
        .p99_us = t->p99_us,
        .min_us = t->min_us,
        .floor_us = read_us > multiply_us ? read_us : multiply_us,
        .bytes = t->bytes,
        .flops = t->flops,
        .verified = t->verified,
        .device = b->device,
        .ranks = 1,
    };
    yard_status st;

    row.shape = json_pack("{s:s, s:s, s:s, s:i, s:i, s:f, s:i, s:i}", "op",
                          p->ep ? "grouped_linear" : "linear", "shape", p->name, "table", p->kernel,
                          "ep", (int)p->ep, "batch", (int)p->batch, "m", p->m, "groups",
                          (int)p->n_groups, "active", (int)t->n_active);
    if (!row.shape)
        return yard_fail(err, YARD_ENOMEM, "no memory for a row");
    st = yard_bench_print_row(&row, b->args.json, err);
    json_decref(row.shape);
    fflush(stdout);
    return st;
}

static yard_status keep_point(roofline *b, const yard_roofline_point *p, yard_error *err)
{
    yard_roofline_point *grown = realloc(b->points, (b->n_points + 1) * sizeof(*grown));

    if (!grown)
        return yard_fail(err, YARD_ENOMEM, "no memory for %zu points", b->n_points + 1);
    b->points = grown;
    b->points[b->n_points++] = *p;
    b->n_wrong += !p->time.verified;
    return YARD_OK;
}

/* With --out also two products of half the rows. */
static yard_status measure(roofline *b, const struct projection *p, uint32_t ep, uint32_t batch,
                           const yard_bench_gemm *g, yard_error *err)
{
    const yard_bench_gemm half = { .w = g->w, .n_groups = g->n_groups, .n_rows = g->n_rows / 2 };
    yard_roofline_point point = { .name = p->name,
                                  .kernel = b->kernel,
                                  .n_out = p->n_out,
                                  .n_in = p->n_in,
                                  .ep = ep,
                                  .batch = batch,
                                  .n_groups = g->n_groups ? g->n_groups : 1,
                                  .n_rows = g->n_rows,
                                  .halves_us = -1 };
    yard_bench_gemm_time t;
    yard_status st = yard_bench_gemm_run(&point.time, b->ops, b->s, g, err);

    point.m = (double)g->n_rows / point.n_groups;
    if (!st && b->args.out) {
        st = yard_bench_gemm_run(&t, b->ops, b->s, &half, err);
        point.halves_us = st ? -1 : 2 * t.p50_us;
    }
    if (!st)
        st = keep_point(b, &point, err);
    return st ? st : print_point(b, &point, p->dtype, err);
}

static yard_status open_kernel(roofline *b, int i, yard_error *err)
{
    const yard_ops_config config = { .variant = b->args.kernel[i],
                                     .choices = b->args.choices,
                                     .limits = { .max_tokens = 8192 } };

    b->kernel = b->args.kernel[i];
    return b->ops->open(&b->s, &config, err);
}

static void close_kernel(roofline *b)
{
    if (b->s)
        b->ops->close(b->s);
    b->s = NULL;
}

/* Once with every kernel named. */
static yard_status each_kernel(roofline *b, const struct projection *p, uint32_t ep, uint32_t batch,
                               const yard_bench_gemm *g, yard_error *err)
{
    yard_status st = YARD_OK;

    for (int i = 0; i < b->args.n_kernels && !st; i++) {
        st = open_kernel(b, i, err);
        if (!st && b->device[0] == '\0')
            sscanf(b->ops->describe(b->s), "cuda, %95[^,]", b->device);
        if (!st)
            st = measure(b, p, ep, batch, g, err);
        close_kernel(b);
    }
    return st;
}

/* Draws that other libraries were measured with (docs/kernels.md), where a draw makes a difference.
 */
static void like_the_peers(yard_bench_gemm *g, uint32_t ep, uint32_t batch)
{
    if (ep == 8 && batch == 8)
        g->n_active = 31;
    if (ep == 32 && batch == 128)
        g->padded_rows = 2432;
}

static yard_status run_experts(roofline *b, const struct projection *p, yard_error *err)
{
    enum { HELD = 32 }; /* experts whose weights are on the device: more than any cache holds */
    yard_bench_weights *w = NULL;
    yard_status st = yard_bench_weights_create(&w, b->ops, b->s, p->dtype, p->n_out, p->n_in,
                                               (size_t)p->n_out * p->n_in * HELD, err);

    for (uint32_t i = 0; i < b->args.ep.n && !st; i++)
        for (uint32_t j = 0; j < b->args.batch.n && !st; j++) {
            const uint32_t ep = b->args.ep.value[i], batch = b->args.batch.value[j];
            yard_bench_gemm g = { .w = w,
                                  .n_groups = EXPERTS / ep,
                                  .n_rows = batch * QUERY_LENGTH * TOP_K };
            like_the_peers(&g, ep, batch);
            st = each_kernel(b, p, ep, batch, &g, err);
        }
    yard_bench_weights_destroy(b->ops, b->s, w);
    return st;
}

static yard_status run_projection(roofline *b, const struct projection *p, yard_error *err)
{
    yard_bench_weights *w = NULL;
    yard_status st =
        yard_bench_weights_create(&w, b->ops, b->s, p->dtype, p->n_out, p->n_in, LINEAR_BYTES, err);

    for (uint32_t j = 0; j < b->args.batch.n && !st; j++) {
        const uint32_t batch = b->args.batch.value[j];
        const yard_bench_gemm g = { .w = w, .n_rows = batch * QUERY_LENGTH };
        st = each_kernel(b, p, 0, batch, &g, err);
    }
    yard_bench_weights_destroy(b->ops, b->s, w);
    return st;
}

static yard_status draw(const roofline *b, yard_error *err)
{
    const yard_roofline_limits limits = { b->device, h200_read_rate, h200_fp8_rate };
    bool drawn = false;
    const yard_status st =
        yard_roofline_draw(b->args.out, &limits, b->points, b->n_points, &drawn, err);

    if (!st && !drawn)
        fprintf(stderr,
                "switchyard: bench roofline: not drawn, gnuplot is missing or failed; later: "
                "cd %s && gnuplot grouped.gp gemm.gp\n",
                b->args.out);
    return st;
}

static bool same_case(const yard_roofline_point *a, const yard_roofline_point *b)
{
    return a->ep == b->ep && a->n_rows == b->n_rows && a->n_out == b->n_out && a->n_in == b->n_in;
}

/* A line for each projection and number of rows: what measured shortest. Points of one case lie
 * together. */
static yard_status write_choices(const roofline *b, yard_error *err)
{
    FILE *f = fopen(b->args.write, "w");
    bool bad;

    if (!f)
        return yard_fail(err, YARD_EIO, "%s: %s", b->args.write, strerror(errno));
    fprintf(f, "# %s: N_OUT N_IN MAX_ROWS KERNEL, by switchyard bench roofline\n", b->device);
    for (size_t i = 0; i < b->n_points;) {
        const yard_roofline_point *best = &b->points[i];
        size_t end = i;
        for (; end < b->n_points && same_case(&b->points[i], &b->points[end]); end++)
            if (b->points[end].time.p50_us < best->time.p50_us)
                best = &b->points[end];
        if (best->ep == 0)
            fprintf(f, "%u %u %u %s\n", best->n_out, best->n_in, best->n_rows, best->kernel);
        i = end;
    }
    bad = ferror(f);
    if (fclose(f) || bad)
        return yard_fail(err, YARD_EIO, "%s: write: %s", b->args.write, strerror(errno));
    return YARD_OK;
}

static bool is_wanted(const roofline *b, const struct projection *p)
{
    return !b->args.what || yard_bench_is_listed(b->args.what, p->name);
}

/* There is a GPU, and it takes every kernel and the choices: told before anything is measured. */
static yard_status check_kernels(roofline *b, yard_error *err)
{
    yard_status st = YARD_OK;

    for (int i = 0; i < b->args.n_kernels && !st; i++) {
        st = open_kernel(b, i, err);
        close_kernel(b);
    }
    return st;
}

static yard_status run_all(roofline *b, yard_error *err)
{
    yard_status st = check_kernels(b, err);

    if (!st)
        yard_bench_print_head(b->args.json);
    for (int i = 0; i < N_EXPERT_PROJECTIONS && !st; i++)
        if (is_wanted(b, &expert_projections[i]))
            st = run_experts(b, &expert_projections[i], err);
    for (int i = 0; i < N_PROJECTIONS && !st; i++)
        if (is_wanted(b, &projections[i]))
            st = run_projection(b, &projections[i], err);
    if (!st && b->args.out)
        st = draw(b, err);
    if (!st && b->args.write)
        st = write_choices(b, err);
    if (!st && b->n_wrong)
        st = yard_fail(err, YARD_EDEVICE, "%u products of %zu are wrong", b->n_wrong, b->n_points);
    return st;
}

int yard_bench_roofline(int argc, char **argv)
{
    roofline b = { .args = { .kernel = { "fast" },
                             .n_kernels = 1,
                             .batch = { 8, { 1, 2, 4, 8, 16, 32, 64, 128 } },
                             .ep = { 5, { 8, 16, 32, 64, 128 } } } };
    yard_error err = { 0 };
    yard_status st = YARD_OK;
    int rc;

    yard_cli_parse_args(&roofline_argp, "switchyard bench roofline", argc, argv, 0, &b.args);
    b.ops = yard_ops_find("cuda");
    if (!b.ops)
        st = yard_fail(&err, YARD_ENOTSUP, "this build has no cuda: it was made without nvcc");
    if (!st)
        st = run_all(&b, &err);
    free(b.points);
    rc = yard_cli_close_stdout("bench roofline");
    return st == YARD_OK ? rc : yard_cli_fail("bench roofline", &err);
}
