/* Published runs and their conditions. The half is a decision taken before anything was compared:
 * bench/plan/split.md says how. Rates are tokens/s a GPU unless the unit says otherwise. */
#include <math.h>
#include <stdio.h>

#include "plan/plan.h"

/* What is not in the publication and had to be chosen is marked (a). */
typedef struct deployment_row {
    const char *id, *what, *conditions, *source, *stack, *gpu;
    yard_plan_half half;
    double published;
    yard_plan_phase phase;
    yard_plan_schedule schedule;
    uint32_t ep, redundant, batch, query, kv, prompt;
    double acceptance, imbalance;
    uint32_t weight_bits, kv_bits;
    /* offline runs: prompts and answers of one engine, in turn; batch 0: the most that fits */
    uint32_t in_tokens, out_tokens;
    double occupancy; /* of the pool by its traffic; 0: all of it */
} deployment_row;

/* Left over after rebalancing with spare slots, (max - mean) / mean: 0.109 at EP32, 0.115 at EP36
 * (TensorRT-LLM tech blog 4). Taken for every run that had rebalancing and real routing. */
#define BALANCED 1.11

#define DAY6 "deepseek-ai/open-infra-index, day 6"
#define PROFILE "deepseek-ai/profile-data; rate as read by SGLang"
#define LMSYS "lmsys.org blog, 5 May 2025"
#define MTPBLOG "lmsys.org blog, 17 July 2025"
#define TRT "TensorRT-LLM performance overview"
#define TRTBLOG "TensorRT-LLM blog, DeepSeek-R1 best practice"

#include "plan/published.inc"

static const deployment_row rows[] = {
    { .id = "D4",
      .what = "DeepSeek profile, prefill",
      .source = PROFILE,
      .stack = "deepseek",
      .conditions = "H800, EP32, two micro-batches, 4K prompts, 16K tokens a GPU, even routing",
      .gpu = "h800",
      .half = YARD_PLAN_FIT_HALF,
      .published = 7839,
      .phase = YARD_PLAN_PREFILL,
      .schedule = YARD_PLAN_MICRO_BATCH,
      .ep = 32,
      .prompt = 4096,
      .imbalance = 1 },
    { .id = "D5",
      .what = "DeepSeek profile, decode",
      .source = PROFILE,
      .stack = "deepseek",
      .conditions = "H800, EP128, two micro-batches, 128 requests a GPU, 4K cached, even routing",
      .gpu = "h800",
      .half = YARD_PLAN_FIT_HALF,
      .published = 2325,
      .schedule = YARD_PLAN_MICRO_BATCH,
      .ep = 128,
      .batch = 128,
      .query = 1,
      .kv = 4096,
      .imbalance = 1 },
    { .id = "D1",
      .what = "DeepSeek service, prefill",
      .source = DAY6,
      .stack = "deepseek",
      .conditions = "H800, EP32 + 32 spare slots, real traffic, computed tokens only; 4.4K prompts "
                    "of which 56 % cached (a), pool occupancy fitted here",
      .gpu = "h800",
      .half = YARD_PLAN_FIT_HALF,
      .published = 4026,
      .phase = YARD_PLAN_PREFILL,
      .schedule = YARD_PLAN_MICRO_BATCH,
      .ep = 32,
      .redundant = 32,
      .prompt = 1914,
      .kv = 2466,
      .imbalance = BALANCED,
      .occupancy = YARD_PLAN_ONLINE_OCCUPANCY },
    { .id = "D2",
      .what = "DeepSeek service, decode",
      .source = DAY6,
      .stack = "deepseek",
      .conditions = "H800, EP144 + 32 spare slots, two micro-batches, 88 requests a GPU, 4,989 "
                    "cached, no MTP (a)",
      .gpu = "h800",
      .half = YARD_PLAN_BLIND_HALF,
      .published = BLIND_D2,
      .schedule = YARD_PLAN_MICRO_BATCH,
      .ep = 144,
      .redundant = 32,
      .batch = 88,
      .query = 1,
      .kv = 4989,
      .imbalance = BALANCED },
    { .id = "S1d",
      .what = "SGLang, prefill 4K, even",
      .source = LMSYS,
      .stack = "sglang",
      .conditions = "H100, EP32 + 32 spare slots, TBO, 16K tokens a GPU, routing forced even",
      .gpu = "h100",
      .half = YARD_PLAN_FIT_HALF,
      .published = 7417,
      .phase = YARD_PLAN_PREFILL,
      .schedule = YARD_PLAN_MICRO_BATCH,
      .ep = 32,
      .redundant = 32,
      .prompt = 4096,
      .imbalance = 1 },
    { .id = "S1a",
      .what = "SGLang, prefill 1K",
      .source = LMSYS,
      .stack = "sglang",
      .conditions = "as S1d, 1K prompts, expert map of the same data",
      .gpu = "h100",
      .half = YARD_PLAN_FIT_HALF,
      .published = 7209,
      .phase = YARD_PLAN_PREFILL,
      .schedule = YARD_PLAN_MICRO_BATCH,
      .ep = 32,
      .redundant = 32,
      .prompt = 1024,
      .imbalance = BALANCED },
    { .id = "S1b",
      .what = "SGLang, prefill 2K",
      .source = LMSYS,
      .stack = "sglang",
      .conditions = "as S1a, 2K prompts",
      .gpu = "h100",
      .half = YARD_PLAN_BLIND_HALF,
      .published = BLIND_S1B,
      .phase = YARD_PLAN_PREFILL,
      .schedule = YARD_PLAN_MICRO_BATCH,
      .ep = 32,
      .redundant = 32,
      .prompt = 2048,
      .imbalance = BALANCED },
    { .id = "S1c",
      .what = "SGLang, prefill 4K",
      .source = LMSYS,
      .stack = "sglang",
      .conditions = "as S1a, 4K prompts",
      .gpu = "h100",
      .half = YARD_PLAN_BLIND_HALF,
      .published = BLIND_S1C,
      .phase = YARD_PLAN_PREFILL,
      .schedule = YARD_PLAN_MICRO_BATCH,
      .ep = 32,
      .redundant = 32,
      .prompt = 4096,
      .imbalance = BALANCED },
    { .id = "S3",
      .what = "SGLang, decode, simulated MTP",
      .source = LMSYS,
      .stack = "sglang",
      .conditions =
          "H100, EP72 + 32 spare slots, TBO, 128 requests a GPU, 4,000 cached, two tokens "
          "a request, 60 % accepted, no draft module",
      .gpu = "h100",
      .half = YARD_PLAN_FIT_HALF,
      .published = 2172,
      .schedule = YARD_PLAN_MICRO_BATCH,
      .ep = 72,
      .redundant = 32,
      .batch = 128,
      .query = 2,
      .kv = 4000,
      .acceptance = 0.6,
      .imbalance = BALANCED },
    { .id = "S4b",
      .what = "SGLang, the same without TBO",
      .source = LMSYS,
      .stack = "sglang",
      .conditions = "as S3, no overlap (a: none at all)",
      .gpu = "h100",
      .half = YARD_PLAN_BLIND_HALF,
      .published = BLIND_S4B,
      .schedule = YARD_PLAN_NONE,
      .ep = 72,
      .redundant = 32,
      .batch = 128,
      .query = 2,
      .kv = 4000,
      .acceptance = 0.6,
      .imbalance = BALANCED },
    { .id = "S2",
      .what = "SGLang, decode",
      .source = LMSYS,
      .stack = "sglang",
      .conditions = "H100, EP72 + 32 spare slots, TBO, 256 requests a GPU, 2,000 in and 100 out",
      .gpu = "h100",
      .half = YARD_PLAN_BLIND_HALF,
      .published = BLIND_S2,
      .schedule = YARD_PLAN_MICRO_BATCH,
      .ep = 72,
      .redundant = 32,
      .batch = 256,
      .query = 1,
      .kv = 2050,
      .imbalance = BALANCED },
    { .id = "S4c",
      .what = "SGLang, the same without TBO",
      .source = LMSYS,
      .stack = "sglang",
      .conditions = "as S2, no overlap; rate derived from a printed gain",
      .gpu = "h100",
      .half = YARD_PLAN_BLIND_HALF,
      .published = BLIND_S4C,
      .schedule = YARD_PLAN_NONE,
      .ep = 72,
      .redundant = 32,
      .batch = 256,
      .query = 1,
      .kv = 2050,
      .imbalance = BALANCED },
    { .id = "S7a",
      .what = "SGLang, long context, no MTP",
      .source = MTPBLOG,
      .stack = "sglang",
      .conditions = "2 x 8 H200, EP16, 2 requests a GPU, 65,536 in and 4,096 out, overlapped "
                    "scheduler",
      .gpu = "h200",
      .half = YARD_PLAN_FIT_HALF,
      .published = 60.4,
      .schedule = YARD_PLAN_DISPATCH_OVERLAP,
      .ep = 16,
      .batch = 2,
      .query = 1,
      .kv = 67584,
      .imbalance = 1 },
    { .id = "S7b",
      .what = "SGLang, long context, MTP 3",
      .source = MTPBLOG,
      .stack = "sglang",
      .conditions = "as S7a, three drafted tokens, 2.18 a step",
      .gpu = "h200",
      .half = YARD_PLAN_BLIND_HALF,
      .published = BLIND_S7B,
      .schedule = YARD_PLAN_DISPATCH_OVERLAP,
      .ep = 16,
      .batch = 2,
      .query = 4,
      .kv = 67584,
      .acceptance = 0.603,
      .imbalance = 1 },
    { .id = "T4a",
      .what = "TensorRT-LLM, BF16 cache",
      .source = TRTBLOG,
      .stack = "trtllm-2025",
      .conditions = "8 x B200, NVFP4, 384 requests a GPU, 1K in and 2K out, no MTP",
      .gpu = "b200",
      .half = YARD_PLAN_FIT_HALF,
      .published = 4548,
      .schedule = YARD_PLAN_NONE,
      .ep = 8,
      .batch = 384,
      .query = 1,
      .imbalance = 1,
      .weight_bits = 4,
      .in_tokens = 1024,
      .out_tokens = 2048 },
    { .id = "T4b",
      .what = "TensorRT-LLM, FP8 cache",
      .source = TRTBLOG,
      .stack = "trtllm-2025",
      .conditions = "as T4a, 896 requests a GPU",
      .gpu = "b200",
      .half = YARD_PLAN_BLIND_HALF,
      .published = BLIND_T4B,
      .schedule = YARD_PLAN_NONE,
      .ep = 8,
      .batch = 896,
      .query = 1,
      .imbalance = 1,
      .weight_bits = 4,
      .kv_bits = 8,
      .in_tokens = 1024,
      .out_tokens = 2048 },
    { .id = "T2a",
      .what = "TensorRT-LLM offline 1K/1K",
      .source = TRT,
      .stack = "trtllm",
      .conditions = "4 x B200, NVFP4, FP8 cache (a), the batch that fits (a)",
      .gpu = "b200",
      .half = YARD_PLAN_FIT_HALF,
      .published = 6463,
      .schedule = YARD_PLAN_NONE,
      .ep = 4,
      .query = 1,
      .imbalance = 1,
      .weight_bits = 4,
      .kv_bits = 8,
      .in_tokens = 1024,
      .out_tokens = 1024 },
    { .id = "T2b",
      .what = "TensorRT-LLM offline 1K/8K",
      .source = TRT,
      .stack = "trtllm",
      .conditions = "as T2a",
      .gpu = "b200",
      .half = YARD_PLAN_BLIND_HALF,
      .published = BLIND_T2B,
      .schedule = YARD_PLAN_NONE,
      .ep = 4,
      .query = 1,
      .imbalance = 1,
      .weight_bits = 4,
      .kv_bits = 8,
      .in_tokens = 1024,
      .out_tokens = 8192 },
    { .id = "T2c",
      .what = "TensorRT-LLM offline 1K/32K",
      .source = TRT,
      .stack = "trtllm",
      .conditions = "as T2a",
      .gpu = "b200",
      .half = YARD_PLAN_BLIND_HALF,
      .published = BLIND_T2C,
      .schedule = YARD_PLAN_NONE,
      .ep = 4,
      .query = 1,
      .imbalance = 1,
      .weight_bits = 4,
      .kv_bits = 8,
      .in_tokens = 1024,
      .out_tokens = 32768 },
    { .id = "T2d",
      .what = "TensorRT-LLM offline 8K/1K",
      .source = TRT,
      .stack = "trtllm",
      .conditions = "as T2a",
      .gpu = "b200",
      .half = YARD_PLAN_BLIND_HALF,
      .published = BLIND_T2D,
      .schedule = YARD_PLAN_NONE,
      .ep = 4,
      .query = 1,
      .imbalance = 1,
      .weight_bits = 4,
      .kv_bits = 8,
      .in_tokens = 8192,
      .out_tokens = 1024 },
    { .id = "T2e",
      .what = "TensorRT-LLM offline 1K/1K",
      .source = TRT,
      .stack = "trtllm",
      .conditions = "as T2a, 4 x GB200",
      .gpu = "gb200",
      .half = YARD_PLAN_FIT_HALF,
      .published = 6939,
      .schedule = YARD_PLAN_NONE,
      .ep = 4,
      .query = 1,
      .imbalance = 1,
      .weight_bits = 4,
      .kv_bits = 8,
      .in_tokens = 1024,
      .out_tokens = 1024 },
    { .id = "T2f",
      .what = "TensorRT-LLM offline 1K/8K",
      .source = TRT,
      .stack = "trtllm",
      .conditions = "as T2e",
      .gpu = "gb200",
      .half = YARD_PLAN_FIT_HALF,
      .published = 4379,
      .schedule = YARD_PLAN_NONE,
      .ep = 4,
      .query = 1,
      .imbalance = 1,
      .weight_bits = 4,
      .kv_bits = 8,
      .in_tokens = 1024,
      .out_tokens = 8192 },
};

enum { N_ROWS = sizeof(rows) / sizeof(rows[0]) };

static yard_plan_config config_of(const deployment_row *row)
{
    yard_plan_config c = YARD_PLAN_CONFIG_INIT;

    c.model = yard_plan_model_find("deepseek-v3");
    c.gpu = yard_plan_gpu_find(row->gpu);
    c.profile = yard_plan_profile_find(row->stack);
    c.phase = row->phase;
    c.schedule = row->schedule;
    c.ep = row->ep;
    c.redundant = row->redundant;
    c.batch = row->batch ? row->batch : 1;
    c.query = row->query ? row->query : 1;
    c.kv = row->kv;
    if (row->prompt)
        c.prompt = row->prompt;
    if (row->phase == YARD_PLAN_PREFILL && row->ep > 8)
        c.copies = YARD_PLAN_PER_NODE;
    c.acceptance = row->acceptance;
    c.imbalance = row->imbalance;
    c.weight_bits = row->weight_bits;
    c.kv_bits = row->kv_bits ? row->kv_bits : 16;
    c.kv_one_scale = true;        /* those with 8 bits are TensorRT-LLM's */
    c.no_draft = row->query == 2; /* S3's MTP is simulated: two tokens, no module */
    return c;
}

/* An engine that does prompts and answers in turn: seconds of a GPU for one request of each. */
static yard_status offline(const deployment_row *row, yard_plan_deployment *d, yard_error *err)
{
    yard_plan_config prefill = d->config;
    yard_plan_result r;
    yard_plan_memory memory;
    yard_status st;

    d->config.kv = row->in_tokens + row->out_tokens / 2;
    if (!row->batch) {
        if ((st = yard_plan_memory_of(&d->config, false, &memory, err)))
            return st;
        d->config.batch = memory.max_batch < 1      ? 1
                          : memory.max_batch > 2048 ? 2048
                                                    : memory.max_batch;
    }
    prefill.phase = YARD_PLAN_PREFILL;
    prefill.prompt = row->in_tokens;
    prefill.kv = 0;
    prefill.chunk = 8192;
    if ((st = yard_plan_point(&d->config, &d->result, err)) ||
        (st = yard_plan_point(&prefill, &r, err)))
        return st;
    d->predicted = row->out_tokens / (row->out_tokens / d->result.tokens_per_s_per_gpu +
                                      row->in_tokens / r.tokens_per_s_per_gpu);
    return YARD_OK;
}

static yard_status predict(const deployment_row *row, const yard_plan_profile *profile,
                           yard_plan_deployment *d, yard_error *err)
{
    yard_status st;

    *d = (yard_plan_deployment){ .id = row->id,
                                 .what = row->what,
                                 .conditions = row->conditions,
                                 .source = row->source,
                                 .stack = row->stack,
                                 .half = row->half,
                                 .published = row->published,
                                 .unit = "tokens/s a GPU",
                                 .config = config_of(row) };
    if (profile)
        d->config.profile = profile;
    if (row->out_tokens)
        st = offline(row, d, err);
    else {
        st = yard_plan_point(&d->config, &d->result, err);
        d->predicted = d->result.tokens_per_s_per_gpu;
    }
    if (row->occupancy > 0)
        d->predicted *= row->occupancy;
    if (row->published > 0)
        d->error = d->predicted / row->published - 1;
    return st;
}

yard_status yard_plan_predict(yard_plan_deployment out[YARD_PLAN_MAX_DEPLOYMENTS],
                              const yard_plan_profile *profile, uint32_t *n_out, yard_error *err)
{
    yard_status st = YARD_OK;

    for (uint32_t i = 0; i < N_ROWS && !st; i++)
        st = predict(&rows[i], profile, &out[i], err);
    *n_out = N_ROWS;
    return st;
}

/* Largest |log(predicted / published)| over the fit half of a stack; D1 fits its own occupancy and
 * takes no part. */
static yard_status worst_of(const char *stack, const yard_plan_profile *p, double *worst,
                            yard_error *err)
{
    yard_plan_deployment d;

    *worst = 0;
    for (uint32_t i = 0; i < N_ROWS; i++) {
        yard_status st;
        if (strcmp(rows[i].stack, stack) || rows[i].half != YARD_PLAN_FIT_HALF ||
            rows[i].occupancy > 0)
            continue;
        if ((st = predict(&rows[i], p, &d, err)))
            return st;
        *worst = fmax(*worst, fabs(log(d.predicted / d.published)));
    }
    return YARD_OK;
}

static uint32_t count_fit_points(const char *stack)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < N_ROWS; i++)
        n += !strcmp(rows[i].stack, stack) && rows[i].half == YARD_PLAN_FIT_HALF &&
             !(rows[i].occupancy > 0);
    return n;
}

/* Steps of 1 % and of 1 ms; the smallest worst error wins. One point cannot tell two numbers: the
 * time of a step stays as it is then. */
yard_status yard_plan_fit(const char *stack, double *stretch, double *step_us, double *worst,
                          yard_error *err)
{
    const yard_plan_profile *base = yard_plan_profile_find(stack);
    yard_plan_profile p;
    const bool one = count_fit_points(stack) == 1;
    double best = INFINITY;

    if (!base)
        return yard_fail(err, YARD_EINVAL, "fit: no stack '%s'", stack);
    p = *base;
    for (int s = 100; s <= 250; s++)
        for (int ms = 1; ms <= 12; ms++) {
            double now;
            yard_status st;
            p.stretch = s / 100.0;
            p.step_us = one ? base->step_us : ms * 1000.0;
            if ((st = worst_of(stack, &p, &now, err)))
                return st;
            if (now < best - 1e-4) {
                best = now;
                *stretch = p.stretch;
                *step_us = p.step_us;
            }
        }
    *worst = exp(best) - 1;
    return YARD_OK;
}
