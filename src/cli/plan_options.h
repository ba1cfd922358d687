/* The options that all of `switchyard plan` shares, as one argp child. */
#ifndef YARD_CLI_PLAN_OPTIONS_H
#define YARD_CLI_PLAN_OPTIONS_H

#include <argp.h>

#include "cli/cli.h"
#include "plan/plan.h"

enum { YARD_PLAN_MAX_LIST = 16 };

typedef struct yard_plan_list {
    uint32_t n, value[YARD_PLAN_MAX_LIST];
} yard_plan_list;

typedef struct yard_plan_options {
    yard_plan_config config; /* points into this struct */
    yard_plan_model model;
    yard_plan_gpu gpu;
    yard_plan_nic nic;
    yard_plan_profile profile;
    const char *gpu_name; /* NULL: not given, h100 */
    const char *model_name, *gpu_file, *nic_name, *profile_name, *measured, *load_file;
    double *load; /* malloc'd */
    double price; /* negative: the GPU's */
    yard_plan_list ep, tp, batch;
    bool schedule_given, prompt_given; /* the latter: --prompt or --chunk */
    bool json;
    const char *out_dir; /* NULL: no files */
} yard_plan_options;

/* Input: a yard_plan_options, which the parser initialises. */
extern const struct argp yard_plan_argp;

/* Looks names up and reads files. *usage is set when an option's value is to blame. */
yard_status yard_plan_options_resolve(yard_plan_options *o, bool *usage, yard_error *err);
void yard_plan_options_release(yard_plan_options *o);

int yard_plan_sweep_main(int argc, char **argv);
int yard_plan_validate_main(int argc, char **argv);
int yard_plan_scale_main(int argc, char **argv);

/* Prints a value and a newline; YARD_ENOMEM when it is NULL. Takes it. */
yard_status yard_plan_print_json(json_t *value, yard_error *err);

#endif
