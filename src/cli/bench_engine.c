/* switchyard bench engine: what its options ask for. The rows are those of bench_engine_here.c, or
 * of bench_engine_ranks.c and bench_engine_mixed.c. */
#include "cli/bench_engine.h"
#include "cli/args.h"
#include "cli/bench_engine_mixed.h"

enum { MAX_THREADS = 1024, MAX_PROMPT = 1 << 20, MAX_BATCH = 1024 };
enum {
    KEY_THREADS = 0x1000,
    KEY_PROMPT,
    KEY_BATCH,
    KEY_DECODE,
    KEY_REPEAT,
    KEY_EXACT,
    KEY_KV_DTYPE,
    KEY_DEVICE,
    KEY_CUDA_VARIANT,
    KEY_CUDA_CHOICES,
    KEY_VARIANT,
    KEY_PIN,
    KEY_RANKS,
    KEY_TP,
    KEY_TRANSPORT,
    KEY_MIXED
};

/* What would be left out without a word. */
static void check_together(const yard_bench_engine_args *a, struct argp_state *state)
{
    const bool group = a->n_ranks || a->mixed;

    if (!group && (a->tp > 1 || a->transport))
        argp_error(state, "%s: only with --ranks or --mixed",
                   a->transport ? "--transport" : "--tp");
    if (group && ((a->threads_given && a->threads.n > 1) || (a->prompt_given && a->prompt.n > 1)))
        argp_error(state, "%s: want one number with %s",
                   a->prompt_given && a->prompt.n > 1 ? "--prompt-tokens" : "--threads",
                   a->mixed ? "--mixed" : "--ranks");
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    yard_bench_engine_args *a = state->input;
    yard_error err = { 0 };
    yard_status st = YARD_OK;

    switch (key) {
    case KEY_RANKS:
        st = yard_cli_parse_u64("--ranks", arg, 1, MAX_THREADS, &a->n_ranks, &err);
        break;
    case KEY_TP:
        st = yard_cli_parse_u64("--tp", arg, 1, MAX_THREADS, &a->tp, &err);
        break;
    case KEY_MIXED:
        a->mixed = true;
        break;
    case KEY_TRANSPORT:
        a->transport = arg;
        break;
    case KEY_THREADS:
        a->threads_given = true;
        st = yard_bench_parse_list("--threads", arg, MAX_THREADS, &a->threads, &err);
        break;
    case KEY_PROMPT:
        a->prompt_given = true;
        st = yard_bench_parse_list("--prompt-tokens", arg, MAX_PROMPT, &a->prompt, &err);
        break;
    case KEY_BATCH:
        st = yard_bench_parse_list("--batch", arg, MAX_BATCH, &a->batch, &err);
        break;
    case KEY_DECODE:
        st = yard_cli_parse_u64("--decode-tokens", arg, 2, MAX_PROMPT, &a->n_decode, &err);
        break;
    case KEY_REPEAT:
        st = yard_cli_parse_u64("--repeat", arg, 1, 10000, &a->n_repeats, &err);
        break;
    case KEY_EXACT:
        a->exact = true;
        break;
    case KEY_KV_DTYPE:
        a->kv_dtype = yard_cli_argp_kv_dtype(state, arg);
        break;
    case KEY_DEVICE:
        a->device = yard_cli_argp_device(state, arg);
        break;
    case KEY_CUDA_VARIANT:
        a->cuda_variant = yard_cli_argp_cuda_variant(state, arg);
        break;
    case KEY_CUDA_CHOICES:
        a->cuda_choices = arg;
        break;
    case KEY_VARIANT:
        a->variant = yard_cli_argp_cpu_variant(state, arg);
        break;
    case KEY_PIN:
        a->pin = yard_cli_argp_pin(state, arg);
        break;
    case 'j':
        a->json = true;
        break;
    case ARGP_KEY_ARG:
        if (state->arg_num > 0)
            argp_error(state, "want one MODEL, got '%s' too", arg);
        a->model = arg;
        break;
    case ARGP_KEY_END:
        yard_cli_argp_check_device(state, a->device, a->cuda_variant, a->cuda_choices);
        check_together(a, state);
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    if (st != YARD_OK)
        argp_error(state, "%s", err.message);
    return 0;
}

static const struct argp_option option_list[] = {
    { "threads", KEY_THREADS, "LIST", 0, "Numbers of threads (default 1,2)", 0 },
    { "prompt-tokens", KEY_PROMPT, "LIST", 0, "Lengths of the prompt (default 128,512)", 0 },
    { "batch", KEY_BATCH, "LIST", 0, "Requests at once (default 1,8)", 0 },
    { "decode-tokens", KEY_DECODE, "N", 0, "Tokens to generate in each request (default 64)", 0 },
    { "repeat", KEY_REPEAT, "N", 0, "Timed runs of each case (default 5)", 0 },
    { "exact", KEY_EXACT, NULL, 0, "Activations in f32, never quantised", 0 },
    { "kv-dtype", KEY_KV_DTYPE, "TYPE", 0, YARD_CLI_KV_DTYPE_HELP, 0 },
    { "device", KEY_DEVICE, "NAME", 0, YARD_CLI_DEVICE_HELP, 0 },
    { "cuda-variant", KEY_CUDA_VARIANT, "NAME", 0, YARD_CLI_CUDA_VARIANT_HELP, 0 },
    { "cuda-choices", KEY_CUDA_CHOICES, "FILE", 0, YARD_CLI_CUDA_CHOICES_HELP, 0 },
    { "pin", KEY_PIN, "WHERE", 0, YARD_CLI_PIN_HELP, 0 },
    { "cpu-variant", KEY_VARIANT, "NAME", 0, YARD_CLI_CPU_VARIANT_HELP, 0 },
    { "ranks", KEY_RANKS, "N", 0,
      "On N ranks, beside one rank: decode, what a group costs beside computing, start. --threads "
      "(default 1) are those of a rank, --batch the requests of an instance, --prompt-tokens one "
      "number (default 16)",
      1 },
    { "mixed", KEY_MIXED, NULL, 0,
      "Only this: the times between tokens of one instance's answers (the first number of --batch) "
      "while another takes prompts of --prompt-tokens (default 2000), with and without a budget of "
      "prompt tokens. On --ranks (default 2)",
      1 },
    { "tp", KEY_TP, "T", 0, "Ranks of an instance (default 1)", 1 },
    { "transport", KEY_TRANSPORT, "NAME", 0, "As of generate (default: shm)", 1 },
    { "json", 'j', NULL, 0, "One JSON object a row", 0 },
    { 0 },
};

static const struct argp engine_argp = {
    .options = option_list,
    .parser = parse,
    .args_doc = "[MODEL]",
    .doc =
        "Measures prefill and decode of a model (default: models/demo) with prompts of random "
        "ids."
        "\v\"verified\" says that every sequence got the ids that it got alone, on the first "
        "number of threads, or, with the fast table of a GPU, whose bits depend on the others of a "
        "step, those of the row's first run, at least half of them with --ranks. The floor of "
        "decode is the time to read the weights "
        "and the cache "
        "of a step once with as many threads, or at an H200's rate; a batch is taken to choose its "
        "experts evenly.\n\n"
        "Examples:\n"
        "  switchyard bench engine\n"
        "  switchyard bench engine models/demo --threads 2 --batch 1,4,16 --json\n"
        "  switchyard bench engine models/demo --device cuda --batch 1,8,32\n"
        "  switchyard bench engine models/demo --ranks 2 --batch 1,8\n"
        "  switchyard bench engine models/demo --device cuda --ranks 2 --batch 1,32\n"
        "  switchyard bench engine models/demo --mixed --batch 8\n",
};

bool yard_bench_engine_on_cpu(const yard_bench_engine_args *a)
{
    return !a->device || !strcmp(a->device, "cpu");
}

yard_dtype yard_bench_engine_cached(const yard_bench_engine_args *a)
{
    return a->kv_dtype == YARD_KV_FP8 ? YARD_FP8_E4M3 : a->exact ? YARD_F32 : YARD_BF16;
}

static yard_status run_ranks(const yard_bench_engine_args *a, uint64_t *n_wrong, yard_error *err)
{
    const yard_bench_ranks ranks = { .model = a->model,
                                     .device = a->device,
                                     .variant = a->variant,
                                     .cuda_variant = a->cuda_variant,
                                     .cuda_choices = a->cuda_choices,
                                     .transport = a->transport,
                                     .n_ranks = (uint32_t)(a->n_ranks ? a->n_ranks : 2),
                                     .tp = (uint32_t)a->tp,
                                     .n_threads = a->threads_given ? a->threads.value[0] : 1,
                                     .n_prompt = a->prompt_given ? a->prompt.value[0]
                                                 : a->mixed      ? 2000
                                                                 : 16,
                                     .n_decode = (uint32_t)a->n_decode,
                                     .n_repeats = (uint32_t)a->n_repeats,
                                     .batch = a->batch,
                                     .pin = (yard_thread_place)a->pin,
                                     .kv_dtype = a->kv_dtype,
                                     .kv_name = yard_dtype_name(yard_bench_engine_cached(a)),
                                     .exact = a->exact,
                                     .json = a->json };

    if (ranks.n_ranks % a->tp != 0)
        return yard_fail(err, YARD_EINVAL, "--ranks: want a multiple of --tp %llu, got %llu",
                         (unsigned long long)a->tp, (unsigned long long)ranks.n_ranks);
    return a->mixed ? yard_bench_engine_mixed(&ranks, n_wrong, err)
                    : yard_bench_engine_ranks(&ranks, n_wrong, err);
}

int yard_bench_engine(int argc, char **argv)
{
    yard_bench_engine_args a = { .model = "models/demo",
                                 .threads = { 2, { 1, 2 } },
                                 .prompt = { 2, { 128, 512 } },
                                 .batch = { 2, { 1, 8 } },
                                 .tp = 1,
                                 .n_decode = 64,
                                 .n_repeats = 5 };
    uint64_t n_wrong = 0;
    yard_error err = { 0 };
    yard_status st;
    int rc;

    yard_cli_parse_args(&engine_argp, "switchyard bench engine", argc, argv, 0, &a);
    yard_bench_print_head(a.json);
    st = a.n_ranks || a.mixed ? run_ranks(&a, &n_wrong, &err)
                              : yard_bench_engine_here(&a, &n_wrong, &err);
    if (st == YARD_OK && n_wrong > 0)
        st = yard_fail(&err, YARD_EDEVICE, "%llu rows gave other ids than a request alone",
                       (unsigned long long)n_wrong);
    rc = yard_cli_close_stdout("bench engine");
    return st == YARD_OK ? rc : yard_cli_fail("bench engine", &err);
}
