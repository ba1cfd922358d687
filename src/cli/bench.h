/* The benchmark harness of the whole project: measure, verify, and print rows, as a table for
 * people or as JSON lines to keep under bench/results/. A benchmark is one file bench_<name>.c
 * and one line of the table in cmd_bench.c. */
#ifndef YARD_CLI_BENCH_H
#define YARD_CLI_BENCH_H

#include <jansson.h>

#include "cli/cli.h"

int yard_bench_engine(int argc, char **argv);
int yard_bench_load(int argc, char **argv);
int yard_bench_ep(int argc, char **argv);
int yard_bench_ops(int argc, char **argv);
int yard_bench_serve(int argc, char **argv);
int yard_bench_roofline(int argc, char **argv);

/* One measured case. */
typedef struct yard_bench_row {
    const char *bench; /* "engine" */
    json_t *shape;     /* the row's "case": shape and variant; owned by the caller. A whole number
                          "tokens" in it, tokens of one repetition, gives the table a rate */
    double p50_us, p99_us, min_us;
    double p90_us;       /* 0: not known */
    double floor_us;     /* what the hardware could do at best; negative: unknown */
    double bytes, flops; /* of one repetition; negative: unknown */
    bool verified;       /* the results were checked and are right */
    json_t *found; /* what else was found, as members of the JSON row; "tokens_per_s" is the table's
                      rate; owned by the caller; NULL: nothing */
    const char *device;
    const char *variant; /* what ran and why; NULL: the case says it */
    uint32_t ranks;
} yard_bench_row;

typedef struct yard_bench_plan {
    uint32_t n_warmup, n_repeats; /* n_repeats >= 1 */
} yard_bench_plan;

/* Runs fn n_warmup + n_repeats times and fills the times from the latter. Errors:
 * the first one of fn, YARD_ENOMEM. */
typedef yard_status (*yard_bench_fn)(void *ctx, yard_error *err);
yard_status yard_bench_measure(yard_bench_row *row, const yard_bench_plan *plan, yard_bench_fn fn,
                               void *ctx, yard_error *err);

/* The same from n >= 1 durations taken elsewhere; sorts them. p90 and p99 are the smallest samples
 * that 90 % and 99 % do not exceed. */
void yard_bench_fill(yard_bench_row *row, double *samples_us, size_t n);

double yard_bench_now_us(void); /* finer than yard_now_us: an operation may take less than 1 us */

/* Prints one row on standard output; head comes before the first row of a table. Errors:
 * YARD_ENOMEM. */
void yard_bench_print_head(bool json);
yard_status yard_bench_print_row(const yard_bench_row *row, bool json, yard_error *err);

/* The processor's name; static storage. */
const char *yard_bench_cpu_name(void);

/* Least time to read n_bytes of memory once with n_threads threads, negative on failure: the
 * floor of an operation that must read that much. Above 1 GiB it is extrapolated. */
double yard_bench_read_floor_us(double n_bytes, uint32_t n_threads);

/* "1,2,8" as numbers in [1, max]. Errors: YARD_EINVAL naming the option. */
enum { YARD_BENCH_MAX_LIST = 16 };
typedef struct yard_bench_list {
    uint32_t n, value[YARD_BENCH_MAX_LIST];
} yard_bench_list;
yard_status yard_bench_parse_list(const char *option, const char *text, uint32_t max,
                                  yard_bench_list *out, yard_error *err);

/* Names separated by commas: whether name is one of them, and that is_known takes each of them;
 * examples are for the message. Errors: YARD_EINVAL naming the option. */
bool yard_bench_is_listed(const char *list, const char *name);
yard_status yard_bench_check_names(const char *option, const char *list,
                                   bool (*is_known)(const char *name), const char *examples,
                                   yard_error *err);

#endif
