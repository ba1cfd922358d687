/* The rows of `bench engine --ranks`. */
#ifndef YARD_CLI_BENCH_ENGINE_RANKS_H
#define YARD_CLI_BENCH_ENGINE_RANKS_H

#include "cli/bench.h"
#include "engine/engine.h"

typedef struct yard_bench_ranks {
    const char *model, *device, *variant, *cuda_variant, *cuda_choices, *transport;
    uint32_t n_ranks, tp, n_threads; /* threads of each rank */
    uint32_t n_prompt, n_decode, n_repeats;
    yard_bench_list batch; /* requests of an instance at once */
    yard_thread_place pin;
    yard_kv_dtype kv_dtype;
    const char *kv_name; /* of rows */
    bool exact, json;
} yard_bench_ranks;

/* What the options say of a rank's engine. */
yard_engine_config yard_bench_ranks_engine(const yard_bench_ranks *b);

/* Of rows of a pod that has served: the processor's name, or the GPU's; name [96]. This process
 * itself leaves GPUs alone: the ranks of later pods are forked from it. */
const char *yard_bench_ranks_hardware(const yard_bench_ranks *b, const yard_pod *pod, char *name);

/* Decode on one rank and on n_ranks, then what a group costs beside computing: the wait for
 * records, the sleep, the way from asleep to the first layer, the start. *n_wrong counts rows whose
 * ids are not those of one rank (TP 1) or of the first run (TP > 1, where rounding differs); with
 * the fast table of a GPU, whose bits depend on who shares a step, of which less than half are. */
yard_status yard_bench_engine_ranks(const yard_bench_ranks *b, uint64_t *n_wrong, yard_error *err);

#endif
