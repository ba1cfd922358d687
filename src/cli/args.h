/* What all commands with argp share. A wrong value ends the program with YARD_EXIT_USAGE. */
#ifndef YARD_CLI_ARGS_H
#define YARD_CLI_ARGS_H

#include <argp.h>

#include <yard/engine.h>

#include "cli/cli.h"

/* Parses with argp, and with -h for --help, under the name "switchyard COMMAND" (name), which must
 * be a string literal. flags are argp's; input goes to the parser of argp itself. */
void yard_cli_parse_args(const struct argp *argp, const char *name, int argc, char **argv,
                         unsigned flags, void *input);

/* The positional argument MODEL of a command whose argp has no other; for its parser's default. */
error_t yard_cli_parse_model(int key, char *arg, struct argp_state *state, const char **model);

/* A value of an option; what is not one in [min, max] ends the program. */
uint64_t yard_cli_argp_u64(struct argp_state *state, const char *option, const char *text,
                           uint64_t min, uint64_t max);
float yard_cli_argp_f32(struct argp_state *state, const char *option, const char *text, float min,
                        float max);

/* The name of one of the processor's variants; any other ends the program. Whether this processor
 * has it is for the engine to say. */
#define YARD_CLI_CPU_VARIANT_HELP                                                                  \
    "c, avx2, avx512 or amx (default: the best of the first three, which give the same bits; amx " \
    "has sums in another order, so that answers may differ)"
const char *yard_cli_argp_cpu_variant(struct argp_state *state, const char *text);

/* cpu or cuda; fast or deterministic; any other word ends the program. Whether there is a GPU is
 * for the engine to say. */
#define YARD_CLI_DEVICE_HELP                                                                       \
    "cpu (default), or cuda: a GPU of compute capability 9.0 for each rank, which has its "        \
    "weights "                                                                                     \
    "and cache in its memory"
const char *yard_cli_argp_device(struct argp_state *state, const char *text);
#define YARD_CLI_CUDA_VARIANT_HELP                                                                 \
    "fast (default), or deterministic: a request's bits do not depend on the others of its step"
#define YARD_CLI_CUDA_CHOICES_HELP                                                                 \
    "Kernels measured on this GPU by bench roofline --write-choices (default: those of an H200)"
const char *yard_cli_argp_cuda_variant(struct argp_state *state, const char *text);
/* With all options read: those of a GPU (NULL: not given) want --device cuda, or the program ends.
 */
void yard_cli_argp_check_device(struct argp_state *state, const char *device,
                                const char *cuda_variant, const char *cuda_choices);

/* bf16 or fp8; any other word ends the program. */
#define YARD_CLI_KV_DTYPE_HELP                                                                     \
    "KV cache: bf16 (default; f32 with --exact), or fp8: latents in 8 bits with scales, 57 % of "  \
    "the bytes at DeepSeek-V3's sizes. For models with latent attention"
yard_kv_dtype yard_cli_argp_kv_dtype(struct argp_state *state, const char *text);

/* none, cpu or node; any other word ends the program. */
#define YARD_CLI_PIN_HELP                                                                          \
    "cpu: each thread on a processor of its own; node: threads dealt to the NUMA nodes; none "     \
    "(default)"
yard_pin yard_cli_argp_pin(struct argp_state *state, const char *text);

#endif
