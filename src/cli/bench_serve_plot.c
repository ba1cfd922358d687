#include "cli/bench_serve.h"

#include <errno.h>
#include <math.h>

enum { PATH_BYTES = 1024 };

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
        return yard_fail(err, YARD_EIO, "%s: cannot write: %s", dir, strerror(errno));
    return YARD_OK;
}

yard_status yard_serve_plot_begin(const char *dir, FILE **points, yard_error *err)
{
    *points = open_in(dir, "serve.tsv", err);
    if (!*points)
        return YARD_EIO;
    fprintf(*points, "# load\ttokens_per_s\tttft_p50_ms\tttft_p90_ms\tttft_p99_ms\t"
                     "itl_p50_ms\titl_p90_ms\titl_p99_ms\n");
    return YARD_OK;
}

static void put_percentiles(FILE *f, const yard_load_samples *s)
{
    static const double share[] = { 0.5, 0.9, 0.99 };

    for (size_t i = 0; i < sizeof(share) / sizeof(share[0]); i++)
        fprintf(f, "\t%.3f", s->us[(size_t)ceil(share[i] * (double)s->n) - 1] * 1e-3);
}

void yard_serve_plot_point(FILE *points, uint32_t load, const yard_load_result *result)
{
    fprintf(points, "%u\t%.1f", load, (double)result->n_output_tokens / result->seconds);
    put_percentiles(points, &result->ttft);
    put_percentiles(points, &result->gap);
    fputc('\n', points);
}

static const char script[] =
    "set terminal svg size 900,420 font 'sans,11' background 'white'\n"
    "set output 'serve.svg'\n"
    "set multiplot layout 1,3\n"
    "set xlabel axis\n"
    "set logscale x 2\n"
    "set key top left\n"
    "set grid\n"
    "set yrange [0:]\n"
    "set ylabel 'tokens/s'\n"
    "plot 'serve.tsv' using 1:2 with linespoints pt 7 title 'all clients'\n"
    "set ylabel 'time to first token, ms'\n"
    "plot for [i=0:2] 'serve.tsv' using 1:(column(3+i)) with linespoints pt 7 "
    "title word('p50 p90 p99', i+1)\n"
    "set ylabel 'time between tokens, ms'\n"
    "plot for [i=0:2] 'serve.tsv' using 1:(column(6+i)) with linespoints pt 7 "
    "title word('p50 p90 p99', i+1)\n";

yard_status yard_serve_plot_end(const char *dir, FILE *points, const char *axis, yard_error *err)
{
    yard_status st = close_file(points, dir, err);
    FILE *f = st == YARD_OK ? open_in(dir, "serve.gnuplot", err) : NULL;
    int rc;

    if (!f)
        return YARD_EIO;
    fprintf(f, "axis = '%s'\n%s", axis, script);
    st = close_file(f, dir, err);
    if (st != YARD_OK)
        return st;
    rc = yard_cli_run_gnuplot(dir, "serve.gnuplot");
    if (rc)
        return yard_fail(err, YARD_EIO, "%s/serve.gnuplot: %s", dir,
                         rc == ENOENT ? "gnuplot is not installed; serve.tsv has the data"
                                      : strerror(rc));
    return YARD_OK;
}
