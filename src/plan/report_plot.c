/* Plots: data and a gnuplot script each. The scripts stand alone: run them where they lie. */
#include <errno.h>
#include <math.h>
#include <stdio.h>

#include "plan/plan.h"

yard_status yard_plan_open(FILE **out, const char *dir, const char *name, yard_error *err)
{
    char path[4096];

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    *out = fopen(path, "wb");
    if (!*out)
        return yard_fail(err, YARD_EIO, "%s: cannot write: %s", path, strerror(errno));
    return YARD_OK;
}

yard_status yard_plan_close(FILE *f, const char *name, yard_error *err)
{
    const bool bad = ferror(f) != 0;

    if (fclose(f) != 0 || bad)
        return yard_fail(err, YARD_EIO, "%s: cannot write: %s", name, strerror(errno));
    return YARD_OK;
}

/* Dark enough on white, and told apart by those who see no red or green. */
static const char *color_of(uint32_t i)
{
    static const char *const colors[] = { "#D55E00", "#E69F00", "#009E73", "#0072B2",
                                          "#CC79A7", "#333333", "#56B4E9", "#8C564B" };

    return colors[i % (sizeof(colors) / sizeof(colors[0]))];
}

static void script_head(FILE *gp, const char *title, const char *x, const char *y)
{
    fprintf(gp,
            "set title \"%s\"\nset xlabel \"%s\"\nset ylabel \"%s\"\n"
            "set grid lc rgb \"#dddddd\" lt 1\nset key outside right top samplen 2\n",
            title, x, y);
}

static void script_tail(FILE *gp, const char *name, const char *plot)
{
    fprintf(gp,
            "set terminal svg size 900,560 noenhanced font \"sans,14\" background \"white\"\n"
            "set output \"%s.svg\"\n%s\n"
            "set terminal pngcairo size 900,560 noenhanced font \"sans,11\"\nset output "
            "\"%s.png\"\nreplot\n",
            name, plot, name);
}

/* Blocks of one EP: the frontier, then what fits, then what does not. */
static uint32_t frontier_data(FILE *dat, const yard_plan_choice *list, uint32_t n, uint32_t eps[64])
{
    uint32_t n_eps = 0;

    fprintf(dat, "# tokens/s a request, tokens/s for 8 GPUs, TP, batch, schedule\n");
    for (uint32_t i = 0; i < n; i++)
        if ((i == 0 || list[i].config.ep != list[i - 1].config.ep) && n_eps < 64)
            eps[n_eps++] = list[i].config.ep;
    for (uint32_t e = 0; e < n_eps; e++)
        for (int kind = 0; kind < 3; kind++) {
            fprintf(dat, "\n\n# EP %u, %s\n", eps[e],
                    kind == 0   ? "frontier"
                    : kind == 1 ? "fits"
                                : "does not fit");
            fprintf(dat, "NaN NaN\n"); /* an empty block would shift the numbers of the rest */
            for (uint32_t i = 0; i < n; i++) {
                const yard_plan_choice *p = &list[i];
                const int is = !p->result.fits ? 2 : p->on_frontier ? 0 : 1;
                if (p->config.ep == eps[e] && is == kind)
                    fprintf(dat, "%.4g %.5g %u %u %s\n", p->result.tokens_per_s_per_request,
                            p->result.tokens_per_s_per_node, p->config.tp, p->config.batch,
                            yard_plan_schedule_name(p->config.schedule));
            }
        }
    return n_eps;
}

/* All layouts of an EP are on one GPU; those of one machine may be on another than the rest. */
static const char *gpu_of(const yard_plan_choice *list, uint32_t n, uint32_t ep)
{
    for (uint32_t i = 0; i < n; i++)
        if (list[i].config.ep == ep)
            return list[i].config.gpu->name;
    return "";
}

yard_status yard_plan_plot_frontier(const char *dir, const yard_plan_choice *list, uint32_t n,
                                    yard_error *err)
{
    uint32_t eps[64], n_eps;
    char plot[8192] = "plot ", title[160];
    size_t at = 5;
    FILE *f;
    yard_status st = yard_plan_open(&f, dir, "frontier.dat", err);

    if (st)
        return st;
    n_eps = frontier_data(f, list, n, eps);
    if ((st = yard_plan_close(f, "frontier.dat", err)) ||
        (st = yard_plan_open(&f, dir, "frontier.gp", err)))
        return st;
    snprintf(title, sizeof(title), "%s: throughput against speed, one frontier an EP",
             list[0].config.model->name);
    script_head(f, title, "output speed, tokens/s a request", "throughput, tokens/s for 8 GPUs");
    fprintf(f, "set logscale y\nset xrange [0:*]\n");
    for (uint32_t e = 0; e < n_eps && at < sizeof(plot) - 512; e++)
        at += (size_t)snprintf(
            plot + at, sizeof(plot) - at,
            "\"frontier.dat\" index %u with linespoints lw 2 pt 7 ps 0.8 lc rgb \"%s\" title \"EP "
            "%u, %s\", "
            "\"frontier.dat\" index %u with points pt 7 ps 0.25 lc rgb \"%s\" notitle, "
            "\"frontier.dat\" index %u with points pt 6 ps 0.7 lc rgb \"%s\" notitle, ",
            3 * e, color_of(e), eps[e], gpu_of(list, n, eps[e]), 3 * e + 1, color_of(e), 3 * e + 2,
            color_of(e));
    snprintf(plot + at, sizeof(plot) - at,
             "1/0 with points pt 6 ps 0.7 lc rgb \"#888888\" title \"does not fit\"");
    script_tail(f, "frontier", plot);
    return yard_plan_close(f, "frontier.gp", err);
}

typedef struct layer_bar {
    const char *name;
    uint32_t ep;
    yard_plan_schedule schedule;
} layer_bar;

static yard_status layer_data(FILE *dat, const yard_plan_config *base, yard_error *err)
{
    static const layer_bar bars[] = { { "EP8", 8, YARD_PLAN_NONE },
                                      { "EP128", 128, YARD_PLAN_NONE },
                                      { "EP128 overlap", 128, YARD_PLAN_DISPATCH_OVERLAP },
                                      { "EP128 micro", 128, YARD_PLAN_MICRO_BATCH } };

    fprintf(dat, "# series, us: dispatch, combine, group GEMM, GEMM, attention, rest\n");
    for (size_t i = 0; i < sizeof(bars) / sizeof(bars[0]); i++) {
        yard_plan_config c = *base;
        yard_plan_result r;
        yard_status st;
        c.ep = bars[i].ep;
        c.tp = 1;
        c.batch = 128;
        c.schedule = bars[i].schedule;
        if ((st = yard_plan_point(&c, &r, err)))
            return st;
        fprintf(dat, "\"%s\" %.1f %.1f %.1f %.1f %.1f %.1f\n", bars[i].name, r.dispatch_us,
                r.combine_us, r.group_gemm_us, r.gemm_us, r.attention_us,
                r.layer_us - r.dispatch_us - r.combine_us - r.group_gemm_us - r.gemm_us -
                    r.attention_us);
    }
    return YARD_OK;
}

yard_status yard_plan_plot_layer(const char *dir, const yard_plan_config *base, yard_error *err)
{
    char title[160];
    FILE *f;
    yard_status st = yard_plan_open(&f, dir, "layer.dat", err), closed;

    if (st)
        return st;
    st = layer_data(f, base, err);
    closed = yard_plan_close(f, "layer.dat", st ? NULL : err);
    if (st || (st = closed) || (st = yard_plan_open(&f, dir, "layer.gp", err)))
        return st;
    snprintf(title, sizeof(title),
             "One MoE layer on %s, 128 requests a GPU (dispatch and combine include waiting)",
             base->gpu->name);
    script_head(f, title, "", "microseconds");
    fprintf(f, "set style data histograms\nset style histogram rowstacked\n"
               "set style fill solid 0.9 border -1\nset boxwidth 0.6\nset yrange [0:*]\n"
               "set key invert\n");
    script_tail(f, "layer",
                "plot \"layer.dat\" using 2:xtic(1) lc rgb \"#0072B2\" title \"dispatch\", "
                "\"\" using 3 lc rgb \"#56B4E9\" title \"combine\", "
                "\"\" using 4 lc rgb \"#D55E00\" title \"group GEMM\", "
                "\"\" using 5 lc rgb \"#E69F00\" title \"GEMM\", "
                "\"\" using 6 lc rgb \"#009E73\" title \"attention\", "
                "\"\" using 7 lc rgb \"#999999\" title \"rest\"");
    return yard_plan_close(f, "layer.gp", err);
}

static const uint32_t article_ep[] = { 8, 16, 32, 64, 128 };
enum { N_ARTICLE_EP = sizeof(article_ep) / sizeof(article_ep[0]) };

static yard_status crossover_data(FILE *dat, const yard_plan_config *base, yard_error *err)
{
    fprintf(dat,
            "# batch, time of the layer with micro-batches over dispatch overlap - 1, %%, EP 8 to "
            "128\n");
    for (uint32_t batch = 2; batch <= 128; batch *= 2) {
        fprintf(dat, "%u", batch);
        for (int i = 0; i < N_ARTICLE_EP; i++) {
            yard_plan_config c = *base;
            yard_plan_result overlap, micro;
            yard_status st;
            c.ep = article_ep[i];
            c.tp = 1;
            c.batch = batch;
            c.schedule = YARD_PLAN_DISPATCH_OVERLAP;
            if ((st = yard_plan_point(&c, &overlap, err)))
                return st;
            c.schedule = YARD_PLAN_MICRO_BATCH;
            if ((st = yard_plan_point(&c, &micro, err)))
                return st;
            fprintf(dat, " %.2f", 100 * (overlap.layer_us / micro.layer_us - 1));
        }
        fprintf(dat, "\n");
    }
    return YARD_OK;
}

yard_status yard_plan_plot_crossover(const char *dir, const yard_plan_config *base, yard_error *err)
{
    char plot[2048] = "plot 0 lc rgb \"#888888\" notitle", title[160];
    size_t at = strlen(plot);
    FILE *f;
    yard_status st = yard_plan_open(&f, dir, "crossover.dat", err), closed;

    if (st)
        return st;
    st = crossover_data(f, base, err);
    closed = yard_plan_close(f, "crossover.dat", st ? NULL : err);
    if (st || (st = closed) || (st = yard_plan_open(&f, dir, "crossover.gp", err)))
        return st;
    snprintf(title, sizeof(title), "Micro-batches against dispatch overlap on %s", base->gpu->name);
    script_head(f, title, "requests a GPU", "layers a second, change in %");
    fprintf(f, "set logscale x 2\nset xrange [2:128]\n");
    for (uint32_t i = 0; i < N_ARTICLE_EP; i++)
        at += (size_t)snprintf(
            plot + at, sizeof(plot) - at,
            ", \"crossover.dat\" using 1:%u with linespoints lw 2 pt 7 ps 0.7 lc rgb "
            "\"%s\" title \"EP %u\"",
            i + 2, color_of(i), article_ep[i]);
    script_tail(f, "crossover", plot);
    return yard_plan_close(f, "crossover.gp", err);
}

/* The article's bytes, one an element of FP8, but only of experts that have rows: with all of them
 * points of few rows would lie above the roof. */
static double article_bytes(double groups, double active, double m, double n, double k)
{
    return active * n * k + groups * (m * k + m * n);
}

static yard_status roofline_data(FILE *dat, const yard_plan_config *base, yard_error *err)
{
    const double h = base->model->hidden, inter = base->model->expert_inter;

    for (int i = 0; i < N_ARTICLE_EP; i++) {
        fprintf(dat, "%s# EP %u: FLOP a byte, TFLOP/s, rows per expert, requests a GPU\n",
                i ? "\n\n" : "", article_ep[i]);
        for (uint32_t batch = 1; batch <= 128; batch *= 2) {
            yard_plan_config c = *base;
            yard_plan_result r;
            yard_status st;
            double flops, bytes, groups;
            c.ep = article_ep[i];
            c.tp = 1;
            c.batch = batch;
            c.schedule = YARD_PLAN_NONE;
            if ((st = yard_plan_point(&c, &r, err)))
                return st;
            groups = yard_plan_slots(&c);
            flops = 6 * groups * r.rows_per_expert * h * inter;
            bytes = article_bytes(groups, r.active_experts, r.rows_per_expert, 2 * inter, h) +
                    article_bytes(groups, r.active_experts, r.rows_per_expert, h, inter);
            bytes *= yard_plan_weight_bits(&c) / 8.0;
            fprintf(dat, "%.5g %.5g %g %u\n", flops / bytes, flops / r.group_gemm_us * 1e-6,
                    r.rows_per_expert, batch);
        }
    }
    return YARD_OK;
}

/* Operations a second of the arithmetic that the experts' weights call for. */
static double group_gemm_peak(const yard_plan_config *c)
{
    const yard_plan_rows rows = { .tokens = 1, .requests = 1, .load = 1 };
    yard_plan_kernel kernels[YARD_PLAN_MAX_KERNELS];
    const uint32_t n = yard_plan_layer_kernels(c, YARD_PLAN_MOE_LAYER, rows, kernels);

    for (uint32_t i = 0; i < n; i++)
        if (kernels[i].cls == YARD_PLAN_GROUP_GEMM)
            return kernels[i].peak_flops;
    return c->gpu->fp8_flops;
}

yard_status yard_plan_plot_roofline(const char *dir, const yard_plan_config *base, yard_error *err)
{
    const double peak = group_gemm_peak(base) * 1e-12;
    const double rate = base->gpu->hbm_bytes_per_s * 1e-12;
    char plot[2048];
    size_t at;
    FILE *f;
    yard_status st = yard_plan_open(&f, dir, "roofline.dat", err), closed;

    if (st)
        return st;
    st = roofline_data(f, base, err);
    closed = yard_plan_close(f, "roofline.dat", st ? NULL : err);
    if (st || (st = closed) || (st = yard_plan_open(&f, dir, "roofline.gp", err)))
        return st;
    script_head(f, "Group GEMM under the roof, 1 to 128 requests a GPU (stars: 128)", "FLOP a byte",
                "TFLOP/s");
    fprintf(f,
            "set logscale xy\nset xrange [0.5:%g]\nset yrange [%g:%g]\n"
            "roof(x) = x * %g < %g ? x * %g : %g\n",
            fmax(2000, 3 * peak / rate), fmin(1, rate / 4), 1.5 * peak, rate, peak, rate, peak);
    at = (size_t)snprintf(plot, sizeof(plot), "plot roof(x) lw 2 lc rgb \"#888888\" title \"%s\"",
                          base->gpu->name);
    for (uint32_t i = 0; i < N_ARTICLE_EP; i++)
        at += (size_t)snprintf(
            plot + at, sizeof(plot) - at,
            ", \"roofline.dat\" index %u with linespoints pt 7 ps 0.6 lc rgb \"%s\" "
            "title \"EP %u\", \"roofline.dat\" index %u every ::7::7 with points pt 3 "
            "ps 1.6 lc rgb \"%s\" notitle",
            i, color_of(i), article_ep[i], i, color_of(i));
    script_tail(f, "roofline", plot);
    return yard_plan_close(f, "roofline.gp", err);
}
