#include "cli/engine_options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Keys above any character: these options have long names only. */
enum {
    KEY_EXACT = 0x100,
    KEY_DEVICE,
    KEY_CUDA_VARIANT,
    KEY_CUDA_CHOICES,
    KEY_THREADS,
    KEY_CPU_VARIANT,
    KEY_PIN,
    KEY_MAX_BATCH_TOKENS,
    KEY_KV_TOKENS,
    KEY_KV_DTYPE,
    KEY_PREFILL_BUDGET,
    KEY_PREFIX_CACHE,
    KEY_CACHE_SALT,
    KEY_TEMPERATURE,
    KEY_TOP_K,
    KEY_TOP_P,
    KEY_MIN_P,
    KEY_REPETITION,
    KEY_PRESENCE,
    KEY_FREQUENCY,
    KEY_LOGIT_BIAS,
    KEY_SEED,
    KEY_MAX_TOKENS,
    KEY_STOP,
    KEY_IGNORE_EOS,
    KEY_PROMPT,
    KEY_PROMPT_FILE,
    KEY_IDS,
    KEY_IDS_FILE,
};

enum { MAX_THREADS = 1024, MAX_BATCH_TOKENS = 1 << 20 };

static yard_prefix_cache parse_cache(struct argp_state *state, const char *arg)
{
    static const char *const names[] = {
        [YARD_CACHE_ON] = "on", [YARD_CACHE_STRICT] = "strict", [YARD_CACHE_OFF] = "off"
    };

    for (int i = 0; i < 3; i++)
        if (!strcmp(arg, names[i]))
            return (yard_prefix_cache)i;
    argp_error(state, "--prefix-cache: want on, strict or off, got '%s'", arg);
    return YARD_CACHE_ON;
}

static error_t parse_engine(int key, char *arg, struct argp_state *state)
{
    yard_engine_config *config = state->input;

    switch (key) {
    case ARGP_KEY_INIT: {
        const yard_notify *notify = yard_cli_notify();
        *config = (yard_engine_config)YARD_ENGINE_CONFIG_INIT;
        config->warn = notify->warn;
        config->progress = notify->progress;
        config->notify_ctx = notify->ctx;
        return 0;
    }
    case KEY_EXACT:
        config->mode = YARD_EXACT;
        return 0;
    case KEY_DEVICE:
        config->device = yard_cli_argp_device(state, arg);
        return 0;
    case KEY_CUDA_VARIANT:
        config->cuda_variant = yard_cli_argp_cuda_variant(state, arg);
        return 0;
    case KEY_CUDA_CHOICES:
        config->cuda_choices = arg;
        return 0;
    case ARGP_KEY_END:
        yard_cli_argp_check_device(state, config->device, config->cuda_variant,
                                   config->cuda_choices);
        return 0;
    case KEY_THREADS:
        config->n_threads = (uint32_t)yard_cli_argp_u64(state, "--threads", arg, 1, MAX_THREADS);
        return 0;
    case KEY_CPU_VARIANT:
        config->cpu_variant = yard_cli_argp_cpu_variant(state, arg);
        return 0;
    case KEY_PIN:
        config->pin = (yard_thread_place)yard_cli_argp_pin(state, arg);
        return 0;
    case KEY_MAX_BATCH_TOKENS:
        config->max_tokens =
            (uint32_t)yard_cli_argp_u64(state, "--max-batch-tokens", arg, 1, MAX_BATCH_TOKENS);
        return 0;
    case KEY_KV_TOKENS:
        config->kv_tokens = yard_cli_argp_u64(state, "--kv-tokens", arg, 1, INT32_MAX);
        return 0;
    case KEY_KV_DTYPE:
        config->kv_dtype = yard_cli_argp_kv_dtype(state, arg);
        return 0;
    case KEY_PREFILL_BUDGET:
        config->prefill_budget =
            (uint32_t)yard_cli_argp_u64(state, "--prefill-budget", arg, 1, MAX_BATCH_TOKENS);
        return 0;
    case KEY_PREFIX_CACHE:
        config->prefix_cache = parse_cache(state, arg);
        return 0;
    case KEY_CACHE_SALT:
        config->cache_salt = arg;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option engine_option_list[] = {
    { "exact", KEY_EXACT, NULL, 0, "Activations in f32, never quantised", 0 },
    { "device", KEY_DEVICE, "NAME", 0, YARD_CLI_DEVICE_HELP, 0 },
    { "cuda-variant", KEY_CUDA_VARIANT, "NAME", 0, YARD_CLI_CUDA_VARIANT_HELP, 0 },
    { "cuda-choices", KEY_CUDA_CHOICES, "FILE", 0, YARD_CLI_CUDA_CHOICES_HELP, 0 },
    { "threads", KEY_THREADS, "N", 0, "Threads (default: all processors)", 0 },
    { "pin", KEY_PIN, "WHERE", 0, YARD_CLI_PIN_HELP, 0 },
    { "cpu-variant", KEY_CPU_VARIANT, "NAME", 0, YARD_CLI_CPU_VARIANT_HELP, 0 },
    { "max-batch-tokens", KEY_MAX_BATCH_TOKENS, "N", 0,
      "Rows of one step; a longer prompt is computed in chunks (default 512)", 0 },
    { "kv-tokens", KEY_KV_TOKENS, "N", 0,
      "Tokens the KV cache holds, prompts and answers (default: the model's context for each "
      "sequence that runs at once, or what 2 GB hold)",
      0 },
    { "kv-dtype", KEY_KV_DTYPE, "TYPE", 0, YARD_CLI_KV_DTYPE_HELP, 0 },
    { "prefill-budget", KEY_PREFILL_BUDGET, "N", 0,
      "Prompt tokens, of all instances, in a step in which an answer waits for its next token "
      "(default: an eighth of --max-batch-tokens, at least 64)",
      0 },
    { "prefix-cache", KEY_PREFIX_CACHE, "WHICH", 0,
      "Take over the cache of requests that began alike: on (default), strict (of prompts alone, "
      "so "
      "that results are equal to the bit with and without), off",
      0 },
    { "cache-salt", KEY_CACHE_SALT, "TEXT", 0,
      "Engines with other salts never share cached pages, nor know them by name", 0 },
    { 0 },
};

const struct argp yard_engine_argp = {
    engine_option_list, parse_engine, NULL, NULL, NULL, NULL, NULL
};

/* Room for one more item of an array that lives as long as the options. */
static void *grow(struct argp_state *state, void *items, uint32_t n, size_t item_bytes)
{
    void *larger = realloc(items, ((size_t)n + 1) * item_bytes);

    if (!larger)
        argp_failure(state, EXIT_FAILURE, ENOMEM, "options");
    return larger;
}

static void add_bias(yard_sampling_options *options, const char *arg, struct argp_state *state)
{
    const char *colon = strchr(arg, ':');
    char id[16];

    if (!colon || (size_t)(colon - arg) >= sizeof(id))
        argp_error(state, "--logit-bias: want ID:VALUE, got '%s'", arg);
    memcpy(id, arg, (size_t)(colon - arg));
    id[colon - arg] = '\0';
    options->bias = grow(state, options->bias, options->n_bias, sizeof(options->bias[0]));
    options->bias[options->n_bias++] = (yard_logit_bias){
        .token = (int32_t)yard_cli_argp_u64(state, "--logit-bias", id, 0, INT32_MAX),
        .value = yard_cli_argp_f32(state, "--logit-bias", colon + 1, -1e30f, 1e30f),
    };
}

static void add_stop(yard_sampling_options *options, const char *arg, struct argp_state *state)
{
    if (!arg[0])
        argp_error(state, "--stop: want some text");
    if (!yard_utf8_valid(arg, strlen(arg), NULL))
        argp_error(state, "--stop: not UTF-8");
    options->stop = grow(state, options->stop, options->n_stop, sizeof(options->stop[0]));
    options->stop[options->n_stop++] = arg;
}

static error_t parse_sampling(int key, char *arg, struct argp_state *state)
{
    yard_sampling_options *o = state->input;
    yard_sampling *s = &o->sampling;

    switch (key) {
    case ARGP_KEY_INIT:
        *o = (yard_sampling_options){
            .sampling = ((yard_request)YARD_REQUEST_INIT).sampling,
            .max_tokens = UINT32_MAX,
        };
        return 0;
    case KEY_TEMPERATURE:
        s->temperature = yard_cli_argp_f32(state, "--temperature", arg, 0, 1000);
        o->temperature_given = true;
        return 0;
    case KEY_TOP_K:
        s->top_k = (int32_t)yard_cli_argp_u64(state, "--top-k", arg, 0, INT32_MAX);
        o->top_k_given = true;
        return 0;
    case KEY_TOP_P:
        s->top_p = yard_cli_argp_f32(state, "--top-p", arg, 1e-6f, 1);
        o->top_p_given = true;
        return 0;
    case KEY_MIN_P:
        s->min_p = yard_cli_argp_f32(state, "--min-p", arg, 0, 1);
        o->min_p_given = true;
        return 0;
    case KEY_REPETITION:
        s->repetition_penalty = yard_cli_argp_f32(state, "--repetition-penalty", arg, 1e-3f, 1000);
        o->repetition_given = true;
        return 0;
    case KEY_PRESENCE:
        s->presence_penalty = yard_cli_argp_f32(state, "--presence-penalty", arg, -1000, 1000);
        o->presence_given = true;
        return 0;
    case KEY_FREQUENCY:
        s->frequency_penalty = yard_cli_argp_f32(state, "--frequency-penalty", arg, -1000, 1000);
        o->frequency_given = true;
        return 0;
    case KEY_LOGIT_BIAS:
        add_bias(o, arg, state);
        return 0;
    case KEY_SEED:
        s->seed = yard_cli_argp_u64(state, "--seed", arg, 0, UINT64_MAX);
        o->seed_given = true;
        return 0;
    case KEY_MAX_TOKENS:
        o->max_tokens = (uint32_t)yard_cli_argp_u64(state, "--max-tokens", arg, 1, UINT32_MAX);
        o->max_tokens_given = true;
        return 0;
    case KEY_STOP:
        add_stop(o, arg, state);
        return 0;
    case KEY_IGNORE_EOS:
        o->ignore_eos = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option sampling_option_list[] = {
    { "temperature", KEY_TEMPERATURE, "X", 0, "0: always the likeliest token", 0 },
    { "top-k", KEY_TOP_K, "K", 0, "Only the K likeliest tokens (0: all)", 0 },
    { "top-p", KEY_TOP_P, "P", 0, "Only the likeliest tokens that make up P together (1: all)", 0 },
    { "min-p", KEY_MIN_P, "P", 0, "Only tokens at least P times as likely as the likeliest", 0 },
    { "repetition-penalty", KEY_REPETITION, "X", 0,
      "Divides the logits of tokens in the prompt or output (1: off)", 0 },
    { "presence-penalty", KEY_PRESENCE, "X", 0, "Subtracted once from tokens in the output", 0 },
    { "frequency-penalty", KEY_FREQUENCY, "X", 0,
      "Subtracted from tokens in the output for each time they occur", 0 },
    { "logit-bias", KEY_LOGIT_BIAS, "ID:VALUE", 0,
      "Added to the logit of a token; may be given several times", 0 },
    { "seed", KEY_SEED, "N", 0, "The same seed gives the same text", 0 },
    { "max-tokens", KEY_MAX_TOKENS, "N", 0, "Tokens to generate at most", 0 },
    { "stop", KEY_STOP, "TEXT", 0,
      "End before this text, which is not shown; may be given several times", 0 },
    { "ignore-eos", KEY_IGNORE_EOS, NULL, 0, "Go on after an end-of-sequence token", 0 },
    { 0 },
};

const struct argp yard_sampling_argp = {
    sampling_option_list, parse_sampling, NULL, NULL, NULL, NULL, NULL
};

void yard_sampling_options_release(yard_sampling_options *options)
{
    free(options->bias);
    free(options->stop);
    *options = (yard_sampling_options){ 0 };
}

void yard_sampling_options_default(yard_sampling_options *options,
                                   const yard_generation_config *defaults)
{
    const yard_sample_params *d = &defaults->params;
    yard_sampling *s = &options->sampling;

    if (!options->temperature_given)
        s->temperature = defaults->do_sample ? d->temperature : 0;
    if (!options->top_p_given)
        s->top_p = d->top_p;
    if (!options->min_p_given)
        s->min_p = d->min_p;
    if (!options->top_k_given)
        s->top_k = d->top_k;
    if (!options->repetition_given)
        s->repetition_penalty = d->repetition_penalty;
    if (!options->presence_given)
        s->presence_penalty = d->presence_penalty;
    if (!options->frequency_given)
        s->frequency_penalty = d->frequency_penalty;
    options->n_stop_token = options->ignore_eos ? 0 : defaults->n_eos;
    memcpy(options->stop_token, defaults->eos, sizeof(options->stop_token));
}

yard_request yard_sampling_options_request(const yard_sampling_options *options, const int32_t *ids,
                                           size_t n_ids)
{
    yard_request request = YARD_REQUEST_INIT;

    request.prompt = ids;
    request.n_prompt = n_ids > UINT32_MAX ? UINT32_MAX : (uint32_t)n_ids; /* refused as too long */
    request.max_new_tokens = options->max_tokens;
    request.sampling = options->sampling;
    request.bias = options->bias;
    request.n_bias = options->n_bias;
    request.ignore_eos = options->ignore_eos;
    request.stop_token = options->stop_token;
    request.n_stop_token = options->n_stop_token;
    return request;
}

static void check_prompt(const yard_prompt_options *o, struct argp_state *state)
{
    const int n_given = !!o->text + !!o->text_path + !!o->ids_text + !!o->ids_path + o->elsewhere;
    yard_error err = { 0 };
    int32_t *ids = NULL;
    size_t n_ids = 0;

    if (o->text && !yard_utf8_valid(o->text, strlen(o->text), NULL))
        argp_error(state, "--prompt: not UTF-8");
    if (n_given != 1)
        argp_error(state, "want one of --prompt, --prompt-file, --ids and --ids-file, got %d",
                   n_given);
    if (o->text && !o->text[0])
        argp_error(state, "--prompt: empty; want some text");
    if (!o->ids_text)
        return;
    if (yard_cli_parse_ids(o->ids_text, strlen(o->ids_text), &ids, &n_ids, &err) != YARD_OK)
        argp_error(state, "--%s", err.message);
    free(ids);
    if (n_ids == 0)
        argp_error(state, "--ids: empty; want at least one id");
}

static error_t parse_prompt(int key, char *arg, struct argp_state *state)
{
    yard_prompt_options *o = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        *o = (yard_prompt_options){ 0 };
        return 0;
    case KEY_PROMPT:
        o->text = arg;
        return 0;
    case KEY_PROMPT_FILE:
        o->text_path = arg;
        return 0;
    case KEY_IDS:
        o->ids_text = arg;
        return 0;
    case KEY_IDS_FILE:
        o->ids_path = arg;
        return 0;
    case ARGP_KEY_SUCCESS:
        check_prompt(o, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option prompt_option_list[] = {
    { "prompt", KEY_PROMPT, "TEXT", 0, "The prompt; added tokens in it are recognised", 0 },
    { "prompt-file", KEY_PROMPT_FILE, "FILE", 0, "The prompt is all of FILE (-: standard input)",
      0 },
    { "ids", KEY_IDS, "1,2,3", 0, "The prompt as token ids", 0 },
    { "ids-file", KEY_IDS_FILE, "FILE", 0,
      "Ids separated by commas or white space (-: standard input)", 0 },
    { 0 },
};

const struct argp yard_prompt_argp = {
    prompt_option_list, parse_prompt, NULL, NULL, NULL, NULL, NULL
};

yard_status yard_prompt_read(const yard_prompt_options *options, const yard_tokenizer *tok,
                             int32_t **ids, size_t *n_ids, yard_error *err)
{
    const char *path = options->text_path ? options->text_path : options->ids_path;
    const char *given = options->text ? options->text : options->ids_text;
    char *data = NULL;
    size_t n_bytes = given ? strlen(given) : 0;
    yard_status st = YARD_OK;

    if (path) {
        st = yard_cli_read_all(path, &data, &n_bytes, err);
        if (st != YARD_OK)
            return st;
        given = data;
    }
    if (yard_prompt_is_text(options))
        st = yard_tokenizer_encode(tok, given, n_bytes, true, ids, n_ids, err);
    else
        st = yard_cli_parse_ids(given, n_bytes, ids, n_ids, err);
    free(data);
    if (st == YARD_OK && *n_ids == 0) {
        free(*ids);
        *ids = NULL;
        st = yard_fail(err, YARD_EINVAL, "%s: empty; want at least one token",
                       path ? yard_cli_input_name(path) : "prompt");
    }
    return st;
}

yard_status yard_cli_load_tokenizer(yard_tokenizer **out, const char *model_dir, bool required,
                                    yard_error *err)
{
    char path[4096];

    *out = NULL;
    snprintf(path, sizeof(path), "%s/tokenizer.json", model_dir);
    if (!required && access(path, F_OK) != 0 && errno == ENOENT)
        return YARD_OK;
    return yard_tokenizer_load(out, model_dir, yard_cli_notify(), err);
}
