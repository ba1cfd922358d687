/* switchyard bench engine: its options, and the rows of an engine in this process. */
#ifndef YARD_CLI_BENCH_ENGINE_H
#define YARD_CLI_BENCH_ENGINE_H

#include "cli/bench.h"
#include "engine/engine.h"

typedef struct yard_bench_engine_args {
    const char *model, *device, *variant, *cuda_variant, *cuda_choices, *transport;
    uint64_t n_ranks, tp; /* n_ranks 0: in this process */
    bool threads_given, prompt_given, mixed;
    yard_bench_list threads, prompt, batch;
    uint64_t n_decode, n_repeats;
    bool exact, json;
    yard_kv_dtype kv_dtype;
    yard_pin pin;
} yard_bench_engine_args;

/* --device cpu, or none. */
bool yard_bench_engine_on_cpu(const yard_bench_engine_args *a);

/* What the cache holds: kv= of every row. */
yard_dtype yard_bench_engine_cached(const yard_bench_engine_args *a);

/* Prefill and decode for every number of threads, prompt length and batch. *n_wrong counts rows
 * whose ids are not those of each sequence alone, or, where bits of a row depend on the others of
 * a step, of the row's first run. */
yard_status yard_bench_engine_here(const yard_bench_engine_args *a, uint64_t *n_wrong,
                                   yard_error *err);

#endif
