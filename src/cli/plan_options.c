#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/plan_options.h"

enum {
    KEY_MODEL = 0x1000,
    KEY_GPU,
    KEY_GPU_FILE,
    KEY_NIC,
    KEY_EFFICIENCY,
    KEY_MEASURED,
    KEY_EP,
    KEY_TP,
    KEY_BATCH,
    KEY_QUERY,
    KEY_KV,
    KEY_SCHEDULE,
    KEY_PREFILL,
    KEY_PROMPT,
    KEY_CHUNK,
    KEY_ACCEPTANCE,
    KEY_IMBALANCE,
    KEY_LOAD,
    KEY_REDUNDANT,
    KEY_COPIES,
    KEY_WEIGHTS,
    KEY_KV_DTYPE,
    KEY_NO_DRAFT,
    KEY_PRICE,
    KEY_JSON,
    KEY_OUT
};

static const struct argp_option option_list[] = {
    { NULL, 0, NULL, 0, "What runs:", 1 },
    { "model", KEY_MODEL, "MODEL", 0,
      "deepseek-v3 (default), deepseek-v2-lite, kimi-k2, mixtral-8x7b, llama-3-70b, or a directory "
      "with a config.json",
      1 },
    { "weights", KEY_WEIGHTS, "TYPE", 0, "fp8, bf16 or nvfp4 (default: the model's)", 1 },
    { "kv-dtype", KEY_KV_DTYPE, "TYPE", 0,
      "bf16 (default) or fp8: latents with scales, rotated keys in bf16", 1 },
    { "no-draft", KEY_NO_DRAFT, NULL, 0, "Several tokens a step, but no draft module", 1 },
    { NULL, 0, NULL, 0, "Where:", 2 },
    { "gpu", KEY_GPU, "GPU", 0, "h100 (default), h200, h800, h20, b200, gb200", 2 },
    { "gpu-file", KEY_GPU_FILE, "FILE", 0, "A GPU of your own, as JSON", 2 },
    { "nic", KEY_NIC, "NIC", 0, "cx7, efa or cx8 (default: what the GPU's entry says)", 2 },
    { "ep", KEY_EP, "N", 0, "Ranks, all of them: EP = DP x TP (default 8)", 2 },
    { "tp", KEY_TP, "N", 0, "Tensor-parallel ranks of a DP group (default 1)", 2 },
    { "redundant", KEY_REDUNDANT, "N", 0, "Expert slots beyond one an expert (default 0)", 2 },
    { "price", KEY_PRICE, "USD", 0, "A GPU hour of --gpu (default: a round figure)", 2 },
    { NULL, 0, NULL, 0, "How:", 3 },
    { "batch", KEY_BATCH, "N", 0, "Requests of a DP group (default 1)", 3 },
    { "query", KEY_QUERY, "N", 0, "Tokens a step and request, drafts included (default 2)", 3 },
    { "kv", KEY_KV, "N", 0, "Cached tokens of a request (default 5000; prefill 0)", 3 },
    { "schedule", KEY_SCHEDULE, "NAME", 0,
      "none (default), dispatch-overlap, micro-batch or micro-batch-stages", 3 },
    { "acceptance", KEY_ACCEPTANCE, "A", 0, "Of a drafted token (default 0.6)", 3 },
    { "prefill", KEY_PREFILL, NULL, 0, "Prompts instead of decode", 3 },
    { "prompt", KEY_PROMPT, "N", 0, "Prefill: new tokens of a prompt (default 4096)", 3 },
    { "chunk", KEY_CHUNK, "N", 0, "Prefill: tokens of a DP group in a step (default 16384)", 3 },
    { "copies", KEY_COPIES, "PER", 0,
      "A token crosses the wire once per expert (default), rank or node", 3 },
    { "imbalance", KEY_IMBALANCE, "R", 0,
      "Expert rows of the busiest rank over the mean (default 1)", 3 },
    { "load-file", KEY_LOAD, "FILE", 0, "Measured rows of each rank instead: a JSON list", 3 },
    { "efficiency", KEY_EFFICIENCY, "NAME", 0,
      "floor, article, public, deepseek, sglang, trtllm or trtllm-2025 (default: article on h100 "
      "and h200, "
      "public "
      "elsewhere)",
      3 },
    { "measured", KEY_MEASURED, "FILE", 0, "Rows of `switchyard bench --json` replace efficiencies",
      3 },
    { NULL, 0, NULL, 0, "Output:", 4 },
    { "json", KEY_JSON, NULL, 0, "JSON instead of tables", 4 },
    { "out", KEY_OUT, "DIR", 0,
      "Draw timeline.svg there; sweep: plots (.svg, .png), their .dat and .gp, report.html", 4 },
    { 0 },
};

static void usage_if(struct argp_state *state, yard_status st, const yard_error *err)
{
    if (st)
        argp_error(state, "%s", err->message);
}

static uint32_t number(struct argp_state *state, const char *option, const char *text, uint64_t min,
                       uint64_t max)
{
    yard_error err = { 0 };
    uint64_t value = 0;

    usage_if(state, yard_cli_parse_u64(option, text, min, max, &value, &err), &err);
    return (uint32_t)value;
}

static double real(struct argp_state *state, const char *option, const char *text, double min,
                   double max)
{
    char *end;
    const double value = strtod(text, &end);

    if (end == text || *end || !isfinite(value) || value < min || value > max)
        argp_error(state, "%s: want a number from %g to %g, got '%s'", option, min, max, text);
    return value;
}

static yard_plan_list numbers(struct argp_state *state, const char *option, const char *text,
                              uint32_t max)
{
    yard_plan_list list = { 0 };
    char item[24];

    while (1) {
        const size_t n = strcspn(text, ",");
        if (n >= sizeof(item) || list.n == YARD_PLAN_MAX_LIST)
            argp_error(state, "%s: want up to %d numbers separated by commas", option,
                       YARD_PLAN_MAX_LIST);
        memcpy(item, text, n);
        item[n] = '\0';
        list.value[list.n++] = number(state, option, item, 1, max);
        if (!text[n])
            return list;
        text += n + 1;
    }
}

/* The index of text in names, which end with NULL. */
static int choice(struct argp_state *state, const char *option, const char *text,
                  const char *const *names)
{
    char legal[128] = "";
    size_t at = 0;

    for (int i = 0; names[i]; i++) {
        if (!strcmp(names[i], text))
            return i;
        at += (size_t)snprintf(legal + at, sizeof(legal) - at, "%s%s", i ? ", " : "", names[i]);
    }
    argp_error(state, "%s: no '%s'; legal: %s", option, text, legal);
    return 0;
}

static const char *const schedules[] = { "none", "dispatch-overlap", "micro-batch",
                                         "micro-batch-stages", NULL };
static const char *const copies[] = { "expert", "rank", "node", NULL };
static const char *const weight_types[] = { "fp8", "bf16", "nvfp4", NULL };
static const uint32_t weight_bits[] = { 8, 16, 4 };
static const char *const kv_types[] = { "bf16", "fp8", NULL };

static void initialise(yard_plan_options *o)
{
    *o = (yard_plan_options){
        .config = YARD_PLAN_CONFIG_INIT,
        .model_name = "deepseek-v3",
        .price = -1,
    };
    o->config.ep = 8;
    o->config.kv = UINT32_MAX; /* not given */
}

static bool parse_text(int key, char *arg, yard_plan_options *o)
{
    const struct {
        int key;
        const char **to;
    } texts[] = {
        { KEY_MODEL, &o->model_name },        { KEY_GPU, &o->gpu_name },
        { KEY_GPU_FILE, &o->gpu_file },       { KEY_NIC, &o->nic_name },
        { KEY_LOAD, &o->load_file },          { KEY_OUT, &o->out_dir },
        { KEY_EFFICIENCY, &o->profile_name }, { KEY_MEASURED, &o->measured },
    };

    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        if (texts[i].key == key) {
            *texts[i].to = arg;
            return true;
        }
    return false;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    yard_plan_options *o = state->input;
    yard_plan_config *c = &o->config;

    if (parse_text(key, arg, o))
        return 0;
    switch (key) {
    case ARGP_KEY_INIT:
        initialise(o);
        return 0;
    case KEY_EP:
        o->ep = numbers(state, "--ep", arg, 1 << 16);
        return 0;
    case KEY_TP:
        o->tp = numbers(state, "--tp", arg, 1 << 12);
        return 0;
    case KEY_BATCH:
        o->batch = numbers(state, "--batch", arg, 1 << 16);
        return 0;
    case KEY_QUERY:
        c->query = number(state, "--query", arg, 1, 64);
        return 0;
    case KEY_KV:
        c->kv = number(state, "--kv", arg, 0, 10000000);
        return 0;
    case KEY_PROMPT:
        c->prompt = number(state, "--prompt", arg, 1, 10000000);
        o->prompt_given = true;
        return 0;
    case KEY_CHUNK:
        c->chunk = number(state, "--chunk", arg, 1, 1 << 24);
        o->prompt_given = true;
        return 0;
    case KEY_REDUNDANT:
        c->redundant = number(state, "--redundant", arg, 0, 1 << 16);
        return 0;
    case KEY_SCHEDULE:
        c->schedule = (yard_plan_schedule)choice(state, "--schedule", arg, schedules);
        o->schedule_given = true;
        return 0;
    case KEY_COPIES:
        c->copies = (yard_plan_copies)choice(state, "--copies", arg, copies);
        return 0;
    case KEY_WEIGHTS:
        c->weight_bits = weight_bits[choice(state, "--weights", arg, weight_types)];
        return 0;
    case KEY_KV_DTYPE:
        c->kv_bits = choice(state, "--kv-dtype", arg, kv_types) ? 8 : 16;
        return 0;
    case KEY_ACCEPTANCE:
        c->acceptance = real(state, "--acceptance", arg, 0, 1);
        return 0;
    case KEY_IMBALANCE:
        c->imbalance = real(state, "--imbalance", arg, 1, 1e4);
        return 0;
    case KEY_PRICE:
        o->price = real(state, "--price", arg, 0, 1e4);
        return 0;
    case KEY_PREFILL:
        c->phase = YARD_PLAN_PREFILL;
        return 0;
    case KEY_NO_DRAFT:
        c->no_draft = true;
        return 0;
    case KEY_JSON:
        o->json = true;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

const struct argp yard_plan_argp = { .options = option_list, .parser = parse };

static yard_status no_name(const char *option, const char *name, const char *legal, bool *usage,
                           yard_error *err)
{
    *usage = true;
    return yard_fail(err, YARD_EINVAL, "%s: no '%s'; legal: %s", option, name, legal);
}

static yard_status resolve_model(yard_plan_options *o, bool *usage, yard_error *err)
{
    const yard_plan_model *m = yard_plan_model_find(o->model_name);
    char legal[160] = "";
    size_t at = 0;

    if (m) {
        o->model = *m;
        return YARD_OK;
    }
    if (strchr(o->model_name, '/') || yard_cli_check_model(o->model_name, NULL) == YARD_OK)
        return yard_plan_model_load(&o->model, o->model_name, err);
    for (uint32_t i = 0; yard_plan_model_at(i); i++)
        at += (size_t)snprintf(legal + at, sizeof(legal) - at, "%s, ", yard_plan_model_at(i)->name);
    snprintf(legal + at, sizeof(legal) - at, "a directory");
    return no_name("--model", o->model_name, legal, usage, err);
}

static yard_status resolve_gpu(yard_plan_options *o, bool *usage, yard_error *err)
{
    const char *name = o->gpu_name ? o->gpu_name : "h100";
    const yard_plan_gpu *g = yard_plan_gpu_find(name);
    char legal[128] = "";
    size_t at = 0;

    if (o->gpu_file)
        return yard_plan_gpu_load(&o->gpu, o->gpu_file, err);
    for (uint32_t i = 0; yard_plan_gpu_at(i); i++)
        at += (size_t)snprintf(legal + at, sizeof(legal) - at, "%s%s", i ? ", " : "",
                               yard_plan_gpu_at(i)->name);
    if (!g)
        return no_name("--gpu", name, legal, usage, err);
    o->gpu = *g;
    return YARD_OK;
}

static yard_status resolve_nic(yard_plan_options *o, bool *usage, yard_error *err)
{
    const yard_plan_nic *nic;

    if (!o->nic_name)
        return YARD_OK;
    nic = yard_plan_nic_find(o->nic_name);
    if (!nic)
        return no_name("--nic", o->nic_name, "cx7, efa, cx8", usage, err);
    o->nic = *nic;
    o->config.nic = &o->nic;
    return YARD_OK;
}

static yard_status resolve_profile(yard_plan_options *o, bool *usage, yard_error *err)
{
    const bool article = !strcmp(o->gpu.name, "h100") || !strcmp(o->gpu.name, "h200");
    const char *name = o->profile_name ? o->profile_name : article ? "article" : "public";
    const yard_plan_profile *p = yard_plan_profile_find(name);

    if (!p)
        return no_name("--efficiency", name,
                       "floor, article, public, deepseek, sglang, trtllm, trtllm-2025", usage, err);
    o->profile = *p;
    return o->measured ? yard_plan_profile_measure(&o->profile, &o->gpu, o->measured, err)
                       : YARD_OK;
}

static yard_status read_load(yard_plan_options *o, yard_error *err)
{
    json_error_t why = { 0 };
    json_t *list, *value;
    size_t i;
    yard_status st = YARD_OK;

    if (!o->load_file)
        return YARD_OK;
    list = json_load_file(o->load_file, 0, &why);
    if (!list)
        return yard_fail(err, YARD_EFORMAT, "%s: %s", o->load_file, why.text);
    if (!json_is_array(list) || json_array_size(list) == 0 || json_array_size(list) > 1 << 16)
        st = yard_fail(err, YARD_EFORMAT, "%s: want a list of numbers, one a rank", o->load_file);
    else if (!(o->load = calloc(json_array_size(list), sizeof(*o->load))))
        st = yard_fail(err, YARD_ENOMEM, "%s: no memory", o->load_file);
    json_array_foreach(list, i, value)
    {
        if (st)
            break;
        if (!json_is_number(value))
            st = yard_fail(err, YARD_EFORMAT, "%s: entry %zu: want a number", o->load_file, i);
        else
            o->load[i] = json_number_value(value);
    }
    if (!st) {
        o->config.load = o->load;
        o->config.n_load = (uint32_t)json_array_size(list);
    }
    json_decref(list);
    return st;
}

yard_status yard_plan_options_resolve(yard_plan_options *o, bool *usage, yard_error *err)
{
    yard_plan_config *c = &o->config;
    yard_status st;

    *usage = false;
    if ((st = resolve_model(o, usage, err)) || (st = resolve_gpu(o, usage, err)) ||
        (st = resolve_nic(o, usage, err)) || (st = resolve_profile(o, usage, err)) ||
        (st = read_load(o, err)))
        return st;
    if (o->price >= 0) {
        o->gpu.price_per_hour = o->price;
        o->gpu.price_origin = YARD_PLAN_GIVEN;
    }
    if (c->phase == YARD_PLAN_PREFILL ? o->batch.n > 0 : o->prompt_given) {
        *usage = true;
        return yard_fail(err, YARD_EINVAL,
                         c->phase == YARD_PLAN_PREFILL
                             ? "--batch: of decode alone; a step of --prefill holds --chunk tokens"
                             : "--prompt, --chunk: of --prefill alone");
    }
    c->model = &o->model;
    c->gpu = &o->gpu;
    c->profile = &o->profile;
    if (c->kv == UINT32_MAX)
        c->kv = c->phase == YARD_PLAN_PREFILL ? 0 : 5000;
    if (o->ep.n)
        c->ep = o->ep.value[0];
    if (o->tp.n)
        c->tp = o->tp.value[0];
    if (o->batch.n)
        c->batch = o->batch.value[0];
    if (!o->ep.n && !c->model->n_experts)
        c->ep = c->tp; /* a dense model: replicas of TP ranks */
    return YARD_OK;
}

void yard_plan_options_release(yard_plan_options *o)
{
    free(o->load);
}

yard_status yard_plan_print_json(json_t *value, yard_error *err)
{
    /* a failed write is told once, by yard_cli_close_stdout */
    if (!value || (json_dumpf(value, stdout, JSON_COMPACT | JSON_REAL_PRECISION(7)) != 0 &&
                   !ferror(stdout))) {
        json_decref(value);
        return yard_fail(err, YARD_ENOMEM, "no memory for the JSON text");
    }
    json_decref(value);
    printf("\n");
    return YARD_OK;
}
