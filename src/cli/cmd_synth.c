/* switchyard synth: a checkpoint with random weights. */
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/args.h"
#include "model/model.h"

enum {
    KEY_ARCH = 0x1000,
    KEY_CONFIG,
    KEY_LAYERS,
    KEY_DENSE_LAYERS,
    KEY_MTP,
    KEY_SEED,
    KEY_SCALE_FMT,
    KEY_THREADS,
    KEY_SHARD_BYTES,
    KEY_OUT
};

enum { UNSET = UINT32_MAX, MAX_THREADS = 4096, MAX_LAYERS = 1024 };

typedef struct synth_args {
    const char *arch, *config_path, *dir;
    yard_model_config dimensions;      /* of arch */
    uint32_t n_layers, n_dense_layers; /* UNSET: not given */
    bool mtp, ue8m0;
    yard_synth_options options;
} synth_args;

enum { EXIT_SIGNALLED = 128 }; /* and the signal's number, as shells have it */

static atomic_int stop_signal; /* 0: none came */

static void on_stop(int signal_number)
{
    atomic_store_explicit(&stop_signal, signal_number, memory_order_relaxed);
}

/* Signals that would end the program in the midst of a shard. One that is ignored stays so (nohup).
 * Progress that nobody reads any more is no reason to stop. */
static void catch_signals(void)
{
    static const int signals[] = { SIGINT, SIGTERM, SIGHUP };
    struct sigaction action = { .sa_handler = on_stop, .sa_flags = SA_RESTART }, old;

    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++)
        if (sigaction(signals[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            sigaction(signals[i], &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}

static void check_args(const synth_args *args, struct argp_state *state)
{
    if (!args->dir)
        argp_error(state, "want --out DIR");
    if (!args->arch == !args->config_path)
        argp_error(state, "want one of --arch and --config");
    if (args->arch && args->n_layers == UNSET)
        argp_error(state, "want --layers N with --arch");
    if (args->n_layers != UNSET && args->n_dense_layers != UNSET &&
        args->n_dense_layers > args->n_layers)
        argp_error(state, "--dense-layers: want at most %u layers, got %u", args->n_layers,
                   args->n_dense_layers);
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    synth_args *args = state->input;
    yard_error err = { 0 };

    switch (key) {
    case KEY_ARCH:
        args->arch = arg;
        if (yard_synth_dimensions(&args->dimensions, arg, &err) != YARD_OK)
            argp_error(state, "%s", err.message);
        return 0;
    case KEY_CONFIG:
        args->config_path = arg;
        return 0;
    case KEY_LAYERS:
        args->n_layers = (uint32_t)yard_cli_argp_u64(state, "--layers", arg, 1, MAX_LAYERS);
        return 0;
    case KEY_DENSE_LAYERS:
        args->n_dense_layers =
            (uint32_t)yard_cli_argp_u64(state, "--dense-layers", arg, 0, MAX_LAYERS);
        return 0;
    case KEY_MTP:
        args->mtp = true;
        return 0;
    case KEY_SEED:
        args->options.seed = yard_cli_argp_u64(state, "--seed", arg, 0, UINT64_MAX);
        return 0;
    case KEY_SCALE_FMT:
        if (strcmp(arg, "ue8m0") != 0)
            argp_error(state, "--scale-fmt: want ue8m0, got '%s'", arg);
        args->ue8m0 = true;
        return 0;
    case KEY_THREADS:
        args->options.n_threads =
            (uint32_t)yard_cli_argp_u64(state, "--threads", arg, 1, MAX_THREADS);
        return 0;
    case KEY_SHARD_BYTES:
        args->options.shard_bytes = yard_cli_argp_u64(state, "--shard-bytes", arg, 1, INT64_MAX);
        return 0;
    case KEY_OUT:
        args->dir = arg;
        return 0;
    case ARGP_KEY_END:
        check_args(args, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option option_list[] = {
    { "arch", KEY_ARCH, "NAME", 0,
      "Published dimensions to use: deepseek-v3, deepseek-v2-lite, kimi-k2 or mixtral-8x7b", 1 },
    { "config", KEY_CONFIG, "FILE", 0, "Or: the dimensions of this config.json", 1 },
    { "layers", KEY_LAYERS, "N", 0, "Layers; with --config the default is the file's number", 1 },
    { "dense-layers", KEY_DENSE_LAYERS, "D", 0,
      "Of these the first D are dense; default: the architecture's number, but one layer less than "
      "all at most",
      1 },
    { "mtp", KEY_MTP, NULL, 0, "Add a multi-token-prediction module if there is none", 1 },
    { "scale-fmt", KEY_SCALE_FMT, "ue8m0", 0, "Block scales that are powers of two", 1 },
    { "out", KEY_OUT, "DIR", 0, "Where to write: a new or an empty directory", 2 },
    { "seed", KEY_SEED, "S", 0, "The same seed gives the same bytes; default 0", 2 },
    { "shard-bytes", KEY_SHARD_BYTES, "N", 0, "Size of a shard; default 4000000000", 2 },
    { "threads", KEY_THREADS, "N", 0, "Default: all processors this process may use", 2 },
    { 0 },
};

static const struct argp synth_argp = {
    .options = option_list,
    .parser = parse,
    .doc = "Writes a checkpoint with random weights in the published format: config.json, "
           "safetensors shards, their index."
           "\vIt is for measuring and testing: its output is noise. It has no tokenizer, so "
           "generate and logits take --ids with it. If writing fails, or Ctrl-C or another "
           "signal stops it (exit code 128 + its number), what was written is removed.\n\n"
           "Examples:\n"
           "  switchyard synth --arch deepseek-v3 --layers 4 --dense-layers 1 \\\n"
           "      --out /data/v3-4\n"
           "  switchyard synth --arch mixtral-8x7b --layers 2 --out /data/mixtral-2\n"
           "  switchyard synth --config models/demo/config.json --seed 7 --out /tmp/small\n",
};

static yard_status read_dimensions(const synth_args *args, yard_model_config *c, yard_error *err)
{
    char *text = NULL;
    size_t n_bytes = 0;
    yard_status st;

    if (args->arch) {
        *c = args->dimensions;
        return YARD_OK;
    }
    st = yard_cli_read_all(args->config_path, &text, &n_bytes, err);
    if (!st)
        st = yard_model_config_parse(c, text, n_bytes, yard_cli_input_name(args->config_path),
                                     yard_cli_notify(), err);
    free(text);
    /* A file that leaves the end ids to generation_config.json: any id serves noise. */
    if (!st && c->n_eos == 0)
        c->eos[c->n_eos++] = 0;
    return st;
}

static yard_status apply_options(const synth_args *args, yard_model_config *c, yard_error *err)
{
    if (args->n_layers != UNSET) {
        c->n_layers = args->n_layers;
        if (c->n_dense_layers >= c->n_layers)
            c->n_dense_layers = c->n_layers - 1;
    }
    if (args->n_dense_layers != UNSET)
        c->n_dense_layers = args->n_dense_layers;
    if (c->n_dense_layers > c->n_layers)
        return yard_fail(err, YARD_EINVAL, "--dense-layers: want at most %u layers, got %u",
                         c->n_layers, c->n_dense_layers);
    if (c->n_dense_layers && c->dense_inter == 0)
        return yard_fail(err, YARD_EINVAL, "--dense-layers: want 0, %s has none", c->family);
    if (args->mtp && !c->mtp_reads_normed_hidden) /* the family would not read it back */
        return yard_fail(err, YARD_EINVAL, "--mtp: %s has no such module", c->family);
    if (args->mtp && c->n_mtp == 0)
        c->n_mtp = 1;
    if (args->ue8m0 && !c->fp8)
        return yard_fail(err, YARD_EINVAL, "--scale-fmt: the config has no FP8 weights");
    c->ue8m0 = c->ue8m0 || args->ue8m0;
    return YARD_OK;
}

int yard_cmd_synth(int argc, char **argv)
{
    synth_args args = { .n_layers = UNSET,
                        .n_dense_layers = UNSET,
                        .options = { .n_threads = yard_cpu_count(), .cancelled = &stop_signal } };
    yard_model_config c;
    yard_error err = { 0 };
    yard_status st;

    yard_cli_parse_args(&synth_argp, "switchyard synth", argc, argv, 0, &args);
    st = read_dimensions(&args, &c, &err);
    if (!st)
        st = apply_options(&args, &c, &err);
    catch_signals(); /* not before: nothing that has to be removed */
    if (!st)
        st = yard_synth_write(args.dir, &c, &args.options, yard_cli_notify(), &err);
    if (st) {
        const int stopped = st == YARD_EAGAIN ? atomic_load(&stop_signal) : 0;
        yard_cli_fail("synth", &err);
        return stopped ? EXIT_SIGNALLED + stopped : EXIT_FAILURE;
    }
    return yard_cli_close_stdout("synth");
}
