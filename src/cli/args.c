#include "cli/args.h"

#include <assert.h>
#include <stdlib.h>

static error_t parse_short_help(int key, char *arg, struct argp_state *state)
{
    (void)arg;
    if (key != 'h')
        return ARGP_ERR_UNKNOWN;
    argp_state_help(state, stdout, ARGP_HELP_STD_HELP);
    return 0;
}

static const struct argp_option short_help_list[] = {
    { NULL, 'h', NULL, OPTION_HIDDEN, NULL, 0 },
    { 0 },
};

static const struct argp short_help = {
    short_help_list, parse_short_help, NULL, NULL, NULL, NULL, NULL
};

void yard_cli_parse_args(const struct argp *argp, const char *name, int argc, char **argv,
                         unsigned flags, void *input)
{
    enum { MAX_CHILDREN = 8 };
    struct argp_child children[MAX_CHILDREN + 2] = { 0 }; /* those of argp, one more, the end */
    struct argp with_help = *argp;
    int n = 0;

    for (; argp->children && argp->children[n].argp; n++) {
        assert(n < MAX_CHILDREN);
        children[n] = argp->children[n];
    }
    children[n].argp = &short_help;
    with_help.children = children;
    argp_err_exit_status = YARD_EXIT_USAGE;
    argv[0] = (char *)name; /* argp and getopt show it, and write to none of argv's strings */
    argp_parse(&with_help, argc, argv, flags, NULL, input);
}

error_t yard_cli_parse_model(int key, char *arg, struct argp_state *state, const char **model)
{
    switch (key) {
    case ARGP_KEY_ARG:
        if (*model)
            argp_error(state, "want one MODEL, got '%s' and '%s'", *model, arg);
        *model = arg;
        return 0;
    case ARGP_KEY_NO_ARGS:
        argp_error(state, "want a MODEL directory");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

uint64_t yard_cli_argp_u64(struct argp_state *state, const char *option, const char *text,
                           uint64_t min, uint64_t max)
{
    yard_error err = { 0 };
    uint64_t value = min;

    if (yard_cli_parse_u64(option, text, min, max, &value, &err) != YARD_OK)
        argp_error(state, "%s", err.message);
    return value;
}

float yard_cli_argp_f32(struct argp_state *state, const char *option, const char *text, float min,
                        float max)
{
    yard_error err = { 0 };
    float value = min;

    if (yard_cli_parse_f32(option, text, min, max, &value, &err) != YARD_OK)
        argp_error(state, "%s", err.message);
    return value;
}

const char *yard_cli_argp_cpu_variant(struct argp_state *state, const char *text)
{
    static const char *const names[] = { "c", "avx2", "avx512",
                                         "amx" }; /* as the options' help tells */

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (!strcmp(text, names[i]))
            return text;
    argp_error(state, "--cpu-variant: want c, avx2, avx512 or amx, got '%s'", text);
    return text;
}

static const char *one_of_two(struct argp_state *state, const char *option, const char *text,
                              const char *a, const char *b)
{
    if (strcmp(text, a) != 0 && strcmp(text, b) != 0)
        argp_error(state, "%s: want %s or %s, got '%s'", option, a, b, text);
    return text;
}

const char *yard_cli_argp_device(struct argp_state *state, const char *text)
{
    return one_of_two(state, "--device", text, "cpu", "cuda");
}

const char *yard_cli_argp_cuda_variant(struct argp_state *state, const char *text)
{
    return one_of_two(state, "--cuda-variant", text, "fast", "deterministic");
}

void yard_cli_argp_check_device(struct argp_state *state, const char *device,
                                const char *cuda_variant, const char *cuda_choices)
{
    if ((cuda_variant || cuda_choices) && (!device || strcmp(device, "cuda") != 0))
        argp_error(state, "--cuda-%s: want --device cuda beside it",
                   cuda_variant ? "variant" : "choices");
}

yard_kv_dtype yard_cli_argp_kv_dtype(struct argp_state *state, const char *text)
{
    return strcmp(one_of_two(state, "--kv-dtype", text, "bf16", "fp8"), "fp8") ? YARD_KV_BF16
                                                                               : YARD_KV_FP8;
}

yard_pin yard_cli_argp_pin(struct argp_state *state, const char *text)
{
    static const char *const names[] = {
        [YARD_PIN_NONE] = "none", [YARD_PIN_CPU] = "cpu", [YARD_PIN_NODE] = "node"
    };

    for (int i = 0; i < 3; i++)
        if (!strcmp(text, names[i]))
            return (yard_pin)i;
    argp_error(state, "--pin: want none, cpu or node, got '%s'", text);
    return YARD_PIN_NONE;
}
