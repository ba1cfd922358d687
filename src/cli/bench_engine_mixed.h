/* The rows of `bench engine --mixed`: what a prompt at one instance means to answers at another. */
#ifndef YARD_CLI_BENCH_ENGINE_MIXED_H
#define YARD_CLI_BENCH_ENGINE_MIXED_H

#include "cli/bench_engine_ranks.h"

/* Times between the tokens of instance 0's answers (as many as the batch), each with no prompt
 * elsewhere, with prompts of n_prompt tokens one after the other at instance 1, and the same
 * without a budget of prompt tokens. Needs two instances at least. *n_wrong counts rows whose ids
 * are not those of the first run. */
yard_status yard_bench_engine_mixed(const yard_bench_ranks *b, uint64_t *n_wrong, yard_error *err);

#endif
