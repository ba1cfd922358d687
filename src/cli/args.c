#include "cli/args.h"

void yard_cli_parse_args(const struct argp *argp, const char *name, int argc, char **argv,
                         void *input)
{
    argp_err_exit_status = YARD_EXIT_USAGE;
    argv[0] = (char *)name; /* argp and getopt show it, and write to none of argv's strings */
    argp_parse(argp, argc, argv, 0, NULL, input);
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
