/* Where a model runs when it runs on several ranks: --ranks, --tp, --transport, .., and what a
 * launcher left in the environment. An argp child. */
#ifndef YARD_CLI_POD_OPTIONS_H
#define YARD_CLI_POD_OPTIONS_H

#include "cli/args.h"
#include "engine/engine.h"

typedef struct yard_pod_options {
    uint32_t n_ranks, tp;
    uint32_t max_seqs; /* 0: the engine's default */
    const char *transport;
    double timeout_s, start_timeout_s;
    bool given; /* one of these options was */
} yard_pod_options;

/* Input: a yard_pod_options, which the parser initialises. */
extern const struct argp yard_pod_argp;

/* The pod for these options: config->engine as given, notices to standard error. storage must live
 * as long as the pod. Errors: YARD_EINVAL naming a variable of the environment. */
yard_status yard_pod_options_config(const yard_pod_options *options,
                                    const yard_engine_config *engine, yard_fabric_env *storage,
                                    yard_pod_config *out, yard_error *err);

/* One line about the memory that each rank is going to take, on standard error. */
yard_status yard_pod_print_budget(const yard_pod_config *config, yard_error *err);

#endif
