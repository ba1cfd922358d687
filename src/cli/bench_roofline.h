/* The rows of `switchyard bench roofline`, and how they become plots. */
#ifndef YARD_CLI_BENCH_ROOFLINE_H
#define YARD_CLI_BENCH_ROOFLINE_H

#include "cli/bench_gemm.h"

/* One measured product. ep 0: a projection, the same at every EP. */
typedef struct yard_roofline_point {
    const char *name, *kernel;
    uint32_t n_out, n_in, ep, batch, n_groups, n_rows;
    double m; /* mean rows of a group */
    yard_bench_gemm_time time;
    double
        halves_us; /* two products of half the rows, one after the other; negative: not measured */
} yard_roofline_point;

/* Limits of the device: bytes/s and operations/s. */
typedef struct yard_roofline_limits {
    const char *device;
    double read_rate, flop_rate;
} yard_roofline_limits;

/* Writes grouped.dat, gemm.dat and a gnuplot script for each into dir (made if it is missing), and
 * runs gnuplot there: grouped.svg and gemm.svg. *drawn is false when there is no gnuplot. Errors:
 * YARD_EIO. */
yard_status yard_roofline_draw(const char *dir, const yard_roofline_limits *limits,
                               const yard_roofline_point *points, size_t n, bool *drawn,
                               yard_error *err);

#endif
