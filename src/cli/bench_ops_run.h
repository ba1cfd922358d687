/* What a run of `switchyard bench ops` holds: shared by bench_ops.c, which walks over cases, and
 * bench_ops_case.c, which times one. */
#ifndef YARD_CLI_BENCH_OPS_RUN_H
#define YARD_CLI_BENCH_OPS_RUN_H

#include "cli/args.h"
#include "cli/bench_ops.h"

typedef struct ops_args {
    const char *device, *model, *ops, *variant, *table;
    const char *blas;
    yard_bench_list tokens;
    uint64_t context, n_threads, n_repeats;
    uint64_t n_experts; /* 0 until the model is known: its default */
    bool json;
    yard_kv_dtype kv_dtype;
    yard_pin pin;
} ops_args;

typedef struct ops_bench {
    ops_args args;
    yard_model_config model;
    const yard_bench_ops_device *device;
    const yard_ops *ops;
    const char *table;
    yard_ops_config config;
    yard_stream stream, definition; /* definition: plain C, to compare with */
    double read_rate;
    double flop_rate[YARD_DTYPE_COUNT]; /* 0: not measured yet */
    void *pool; /* memory of the device under all sets of a case; the next case uses it again */
    size_t pool_bytes;
    uint32_t n_rows, n_wrong;
    yard_bench_blas *blas; /* NULL: not asked for */
} ops_bench;

/* Places the case at n_tokens, compares one call with the definition, times it and prints its row.
 */
yard_status yard_bench_ops_time_case(ops_bench *b, const yard_bench_ops_case *c, uint32_t n_tokens,
                                     yard_error *err);

#endif
