/* One page that can be mailed: words, tables and drawings in a single file. */
#include <errno.h>
#include <stdio.h>

#include "plan/plan.h"

static const struct {
    const char *file, *title;
} figures[] = {
    { "frontier.svg", "Throughput against speed" },
    { "timeline.svg", "Three layers on the virtual clock" },
    { "layer.svg", "One MoE layer by its parts" },
    { "crossover.svg", "When micro-batches win" },
    { "roofline.svg", "Group GEMM under the roof" },
};

/* Copies an SVG without its XML declaration; a missing one is said. */
static void embed(FILE *to, const char *dir, const char *name)
{
    char path[4096], line[4096];
    bool started = false;
    FILE *in;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    in = fopen(path, "rb");
    if (!in) {
        fprintf(to, "<p>%s was not drawn: gnuplot is missing, or the layouts have none.</p>\n",
                name);
        return;
    }
    while (fgets(line, sizeof(line), in)) {
        const char *at = started ? line : strstr(line, "<svg");
        if (!at)
            continue;
        started = true;
        fputs(at, to);
    }
    fclose(in);
}

static void print_escaped(FILE *to, FILE *text)
{
    int c;

    while ((c = fgetc(text)) != EOF)
        if (c == '<')
            fputs("&lt;", to);
        else if (c == '&')
            fputs("&amp;", to);
        else
            fputc(c, to);
}

static void print_points(FILE *to, const yard_plan_choice *list, uint32_t n)
{
    fprintf(to, "<table><tr><th>GPU<th>EP<th>DP<th>TP<th>batch<th>schedule<th>tokens/s a request"
                "<th>tokens/s, 8 GPUs<th>layer, us<th>GB<th></tr>\n");
    for (uint32_t i = 0; i < n; i++) {
        const yard_plan_choice *p = &list[i];
        if (!p->on_frontier)
            continue;
        fprintf(
            to,
            "<tr><td>%s<td>%u<td>%u<td>%u<td>%u<td>%s<td>%.1f<td>%.0f<td>%.0f<td>%.1f<td>%s</tr>\n",
            p->config.gpu->name, p->config.ep, p->result.dp, p->config.tp, p->config.batch,
            yard_plan_schedule_name(p->config.schedule), p->result.tokens_per_s_per_request,
            p->result.tokens_per_s_per_node, p->result.layer_us, p->result.memory.total_gb,
            p->best ? "best of all" : "");
    }
    fprintf(to, "</table>\n");
}

/* Where the rates of each GPU come from; layouts of one machine may be on another than the rest. */
static void print_gpus(FILE *to, const yard_plan_choice *list, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const yard_plan_gpu *gpu = list[i].config.gpu;
        if (i == 0 || gpu != list[i - 1].config.gpu)
            fprintf(to, "<p>%s: rates %s (%s), price %s (%.2f USD a GPU hour).</p>\n", gpu->name,
                    yard_plan_origin_name(gpu->origin), gpu->source,
                    yard_plan_origin_name(gpu->price_origin), gpu->price_per_hour);
    }
}

/* Where the efficiencies come from, class by class. */
static void print_origins(FILE *to, const yard_plan_config *c)
{
    fprintf(to,
            "<p>Efficiencies <b>%s</b>: %s.</p>\n<table><tr><th>class<th>compute"
            "<th>memory, link<th>fixed, us<th>origin<th>source</tr>\n",
            c->profile->name, c->profile->what);
    for (int i = 0; i < YARD_PLAN_CLASS_COUNT; i++) {
        const yard_plan_share *s = &c->profile->share[i];
        fprintf(to, "<tr><td>%s<td>%.2f<td>%.2f<td>%.0f<td>%s<td>%s</tr>\n",
                yard_plan_class_name((yard_plan_class)i), s->compute, s->memory, s->fixed_us,
                yard_plan_origin_name(s->origin), s->source ? s->source : "");
    }
    fprintf(
        to,
        "</table>\n<p>Stretch of the stack %.2f (%s), time of a step outside of kernels %.0f us "
        "(%s). Exchange: %s.</p>\n",
        c->profile->stretch, yard_plan_origin_name(c->profile->stretch_origin), c->profile->step_us,
        yard_plan_origin_name(c->profile->step_origin),
        c->profile->exchange_source ? c->profile->exchange_source
                                    : "latency and bytes over bandwidth");
}

static yard_status print_page(FILE *to, const char *dir, const yard_plan_choice *list, uint32_t n,
                              const yard_plan_wish *wish, yard_error *err)
{
    const yard_plan_config *c = &list[n - 1].config;
    FILE *words = tmpfile();
    yard_plan_pools pools;
    yard_status st;

    if (!words)
        return yard_fail(err, YARD_EIO, "temporary file: %s", strerror(errno));
    st = yard_plan_choose(list, n, wish, &pools, err);
    if (!st)
        st = yard_plan_advise(words, list, n, wish, err);
    if (st) {
        fclose(words);
        return st;
    }
    rewind(words);
    fprintf(
        to,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>%s on %s</title>"
        "<style>body{font:15px/1.5 sans-serif;max-width:1120px;margin:2em auto;padding:0 "
        "1em;color:#222}table{border-collapse:collapse;margin:1em 0}td,th{padding:2px "
        "10px;border-bottom:1px solid #ddd;text-align:left}pre{white-space:pre-wrap;"
        "background:#f6f6f6;padding:1em}svg{max-width:100%%;height:auto}</style></head><body>\n"
        "<h1>%s on %s</h1>\n<pre>",
        c->model->name, c->gpu->name, c->model->name, c->gpu->name);
    print_escaped(to, words);
    fclose(words);
    fprintf(to, "</pre>\n");
    for (size_t i = 0; i < sizeof(figures) / sizeof(figures[0]); i++) {
        fprintf(to, "<h2>%s</h2>\n", figures[i].title);
        embed(to, dir, figures[i].file);
    }
    fprintf(to, "<h2>Frontier</h2>\n");
    print_points(to, list, n);
    fprintf(to, "<h2>Where the numbers come from</h2>\n");
    print_gpus(to, list, n);
    print_origins(to, c);
    if (pools.has_prefill && pools.prefill.config.profile != c->profile)
        print_origins(to, &pools.prefill.config);
    fprintf(to, "</body></html>\n");
    return YARD_OK;
}

yard_status yard_plan_write_html(const char *dir, const yard_plan_choice *list, uint32_t n,
                                 const yard_plan_wish *wish, yard_error *err)
{
    FILE *f;
    yard_status st = yard_plan_open(&f, dir, "report.html", err), closed;

    if (st)
        return st;
    st = print_page(f, dir, list, n, wish, err);
    closed = yard_plan_close(f, "report.html", st ? NULL : err);
    return st ? st : closed;
}
