/* Data and gnuplot scripts of the two roofline plots. Plots have the article's bytes on the x axis
 * (one byte a result, all groups read; R110, R116); the data have those that move, too (C14). */
#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>

#include "cli/bench_roofline.h"
#include "cli/cli.h"

enum { STAR_BATCH = 128, PATH_BYTES = 512 };

static FILE *open_in(const char *dir, const char *name, yard_error *err)
{
    char path[PATH_BYTES];
    FILE *f;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    f = fopen(path, "w");
    if (!f)
        yard_fail(err, YARD_EIO, "%s: %s", path, strerror(errno));
    return f;
}

static yard_status close_file(FILE *f, const char *dir, yard_error *err)
{
    const bool bad = ferror(f);

    if (fclose(f) || bad)
        return yard_fail(err, YARD_EIO, "%s: write: %s", dir, strerror(errno));
    return YARD_OK;
}

/* Blocks of one curve each, with two empty lines between them: gnuplot's `index`. */
static yard_status write_data(const char *dir, const char *name, const yard_roofline_point *points,
                              size_t n, bool grouped, yard_error *err)
{
    FILE *f = open_in(dir, name, err);
    const yard_roofline_point *last = NULL;

    if (!f)
        return YARD_EIO;
    fprintf(f, "# product\tkernel\tep\tbatch\tgroups\tm\trows\tus\thalves_us\tflops\t"
               "article_bytes\tbytes\tarticle_flop_per_byte\tflop_per_byte\ttflops\n");
    for (size_t i = 0; i < n; i++) {
        const yard_roofline_point *p = &points[i];
        const yard_bench_gemm_time *t = &p->time;
        if ((p->ep > 0) != grouped)
            continue;
        if (last && (last->ep != p->ep || strcmp(last->name, p->name) != 0))
            fprintf(f, "\n\n");
        last = p;
        fprintf(f, "%s\t%s\t%u\t%u\t%u\t%g\t%u\t%.2f\t%.2f\t%.0f\t%.0f\t%.0f\t%.3f\t%.3f\t%.2f\n",
                p->name, p->kernel, p->ep, p->batch, p->n_groups, p->m, p->n_rows, t->p50_us,
                p->halves_us, t->flops, t->article_bytes, t->bytes, t->flops / t->article_bytes,
                t->flops / t->bytes, t->flops / t->p50_us * 1e-6);
    }
    return close_file(f, dir, err);
}

static void plot_curves(FILE *f, const char *data, const yard_roofline_point *points, size_t n,
                        bool grouped)
{
    const yard_roofline_point *last = NULL;
    uint32_t curve = 0;

    for (size_t i = 0; i < n; i++) {
        const yard_roofline_point *p = &points[i];
        if ((p->ep > 0) != grouped || (last && last->ep == p->ep && !strcmp(last->name, p->name))) {
            last = (p->ep > 0) == grouped ? p : last;
            continue;
        }
        last = p;
        fprintf(f, ", \\\n  '%s' index %u using 13:15 with linespoints pt 7 ps 0.5 lc %u title '",
                data, curve, curve + 1);
        if (grouped)
            fprintf(f, "%s, EP%u'", p->name, p->ep);
        else
            fprintf(f, "%s'", p->name);
        fprintf(
            f,
            ", \\\n  '%s' index %u using ($4 == %d ? $13 : 1/0):15 with points pt 3 ps 1.5 lc %u "
            "notitle",
            data, curve, STAR_BATCH, curve + 1);
        if (grouped)
            fprintf(
                f,
                ", \\\n  '%s' index %u using ($4 == %d ? $13 : 1/0):15:(sprintf('m = %%g', $6)) "
                "with labels offset 0,-1 font ',9' notitle",
                data, curve, STAR_BATCH);
        curve++;
    }
}

static yard_status write_script(const char *dir, const char *name, const yard_roofline_limits *l,
                                const yard_roofline_point *points, size_t n, bool grouped,
                                yard_error *err)
{
    char script[64], data[64];
    FILE *f;

    snprintf(script, sizeof(script), "%s.gp", name);
    snprintf(data, sizeof(data), "%s.dat", name);
    f = open_in(dir, script, err);
    if (!f)
        return YARD_EIO;
    fprintf(f,
            "set terminal svg noenhanced size 900,640 font 'sans,12' background 'white'\n"
            "set output '%s.svg'\nset datafile separator '\\t'\nset logscale xy\nset grid\n"
            "set title '%s on %s; stars: batch %d'\n"
            "set xlabel 'FLOP per byte (one byte a result, all weights read)'\n"
            "set ylabel 'TFLOP/s'\nset key bottom right font ',10'\nset samples 500\n"
            "plot [0.5:4000] (x * %g < %g ? x * %g : %g) with lines lw 2 lc 'black' "
            "title '%.2f TB/s, %.0f TFLOP/s measured'",
            name, grouped ? "Products of routed experts" : "Projections of a layer", l->device,
            STAR_BATCH, l->read_rate * 1e-12, l->flop_rate * 1e-12, l->read_rate * 1e-12,
            l->flop_rate * 1e-12, l->read_rate * 1e-12, l->flop_rate * 1e-12);
    plot_curves(f, data, points, n, grouped);
    fprintf(f, "\n");
    return close_file(f, dir, err);
}

yard_status yard_roofline_draw(const char *dir, const yard_roofline_limits *limits,
                               const yard_roofline_point *points, size_t n, bool *drawn,
                               yard_error *err)
{
    static const char *const names[] = { "gemm", "grouped" };
    yard_status st = YARD_OK;

    *drawn = true;
    if (mkdir(dir, 0777) != 0 && errno != EEXIST)
        return yard_fail(err, YARD_EIO, "%s: %s", dir, strerror(errno));
    for (int grouped = 0; grouped < 2 && !st; grouped++) {
        bool some = false;
        char data[64], script[64];
        for (size_t i = 0; i < n; i++)
            some = some || (points[i].ep > 0) == (grouped == 1);
        if (!some)
            continue;
        snprintf(data, sizeof(data), "%s.dat", names[grouped]);
        snprintf(script, sizeof(script), "%s.gp", names[grouped]);
        st = write_data(dir, data, points, n, grouped, err);
        if (!st)
            st = write_script(dir, names[grouped], limits, points, n, grouped, err);
        if (!st)
            *drawn = yard_cli_run_gnuplot(dir, script) == 0 && *drawn;
    }
    return st;
}
