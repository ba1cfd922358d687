/* The drawing of `bench serve`: how latency grows with load. */
#ifndef YARD_CLI_BENCH_SERVE_H
#define YARD_CLI_BENCH_SERVE_H

#include <stdio.h>

#include "cli/serve_load.h"

/* Begins DIR/serve.tsv. Errors: YARD_EIO. */
yard_status yard_serve_plot_begin(const char *dir, FILE **points, yard_error *err);

/* One case; load: clients or requests a second. Its samples are sorted. */
void yard_serve_plot_point(FILE *points, uint32_t load, const yard_load_result *result);

/* Closes points and draws DIR/serve.svg. Errors: YARD_EIO, also when there is no gnuplot. */
yard_status yard_serve_plot_end(const char *dir, FILE *points, const char *axis, yard_error *err);

#endif
