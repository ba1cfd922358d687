/* Timing of the products of a device, for `switchyard bench roofline` and the choice of kernels:
 * one graph of many calls over weights that no cache holds, replayed; a sample of results checked.
 */
#ifndef YARD_CLI_BENCH_GEMM_H
#define YARD_CLI_BENCH_GEMM_H

#include "cli/bench.h"
#include "ops/ops.h"

/* Weights of one shape, n_matrices of them on the device. */
typedef struct yard_bench_weights {
    uint32_t n_matrices, n_out, n_in;
    yard_matrix host; /* one matrix's values: all n_matrices have the same */
    yard_matrix *device;
    struct yard_prepared *prepared;
} yard_bench_weights;

/* One product. n_groups 0: linear; otherwise the rows of each group are drawn for n_rows pairs, and
 * the mean of a group is n_rows / n_groups. */
typedef struct yard_bench_gemm {
    const yard_bench_weights *w;
    uint32_t n_groups, n_rows;
    uint32_t n_active; /* draw until so many groups have rows; 0: any */
    uint32_t
        padded_rows; /* .. and so many rows are there, each group's rounded up to 128; 0: any */
} yard_bench_gemm;

typedef struct yard_bench_gemm_time {
    double p50_us, p99_us, min_us;
    double flops;
    double article_bytes; /* one byte a result, all groups read (R110, R116) */
    double bytes;         /* what moves: active groups, scales, bf16 results (C14) */
    uint32_t n_active, max_group_rows;
    bool verified;
} yard_bench_gemm_time;

/* n_bytes: at least so many of weights, so that reading them all in turn passes every cache. */
yard_status yard_bench_weights_create(yard_bench_weights **out, const yard_ops *ops, yard_stream s,
                                      yard_dtype dtype, uint32_t n_out, uint32_t n_in,
                                      size_t n_bytes, yard_error *err);
void yard_bench_weights_destroy(const yard_ops *ops, yard_stream s, yard_bench_weights *w);

/* Errors: those of the table; YARD_ENOTSUP where it has no graphs. */
yard_status yard_bench_gemm_run(yard_bench_gemm_time *out, const yard_ops *ops, yard_stream s,
                                const yard_bench_gemm *g, yard_error *err);

#endif
