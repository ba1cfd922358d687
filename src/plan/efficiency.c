/* How far kernels stay from their floors, and how it is known.
 *
 * article: one number a class, so that the deployment article's four layer times come out; its
 *   all-to-all is the library's own published table.
 * public: kernel tables that others published (DeepGEMM, FlashMLA, DeepEP), nothing fitted.
 * deepseek, sglang, trtllm, trtllm-2025: public, and one number each, the stretch of the whole
 * stack, fitted to the fit half of the published deployments (validate.c; `switchyard plan validate
 * --fit`). */
#include <math.h>

#include "plan/plan.h"

static const char *const class_names[YARD_PLAN_CLASS_COUNT] = {
    [YARD_PLAN_GEMM] = "gemm",
    [YARD_PLAN_GROUP_GEMM] = "group_gemm",
    [YARD_PLAN_ATTENTION] = "attention",
    [YARD_PLAN_PREFILL_ATTENTION] = "prefill_attention",
    [YARD_PLAN_BMM] = "bmm",
    [YARD_PLAN_VECTOR] = "vector",
    [YARD_PLAN_COPY] = "copy",
    [YARD_PLAN_NVLINK] = "nvlink",
    [YARD_PLAN_NETWORK] = "network",
    [YARD_PLAN_ALL_REDUCE] = "all_reduce",
};

static const char *const origin_names[] = {
    [YARD_PLAN_ASSUMED] = "assumed", [YARD_PLAN_PUBLISHED] = "published",
    [YARD_PLAN_FITTED] = "fitted",   [YARD_PLAN_MEASURED] = "measured",
    [YARD_PLAN_EXACT] = "exact",     [YARD_PLAN_GIVEN] = "given",
};

const char *yard_plan_class_name(yard_plan_class c)
{
    return class_names[c];
}

const char *yard_plan_origin_name(yard_plan_origin origin)
{
    return origin_names[origin];
}

/* pplx-kernels, README at 12cecfd: 1 and 128 tokens; NVLink at EP8, GPU-initiated InfiniBand above.
 * The slope is (time of 128 - time of 1) / 127. */
#define PPLX(ep, d1, d128, c1, c128)                                                               \
    {                                                                                              \
        ep, d1, (d128 - d1) / 127, c1, (c128 - c1) / 127                                           \
    }
static const yard_plan_exchange pplx_exchange[] = {
    PPLX(8, 41.6, 83.6, 41.7, 102.3),     PPLX(16, 102.7, 622.4, 62.7, 668.1),
    PPLX(32, 115.7, 427.6, 55.4, 481.4),  PPLX(64, 121.0, 317.4, 58.6, 529.9),
    PPLX(128, 125.9, 307.7, 63.2, 593.9),
};

/* The article's micro-batches lengthen what is neither GEMM nor group GEMM by 71 us: about 5 us a
 * launch for the kernels that run twice. */
#define LAUNCHED(share, from, why)                                                                 \
    {                                                                                              \
        share, share, 5, 0, from, why                                                              \
    }
#define ONE(share, from, why)                                                                      \
    {                                                                                              \
        share, share, 0, 0, from, why                                                              \
    }

#define PUBLIC_SHARES                                                                              \
    {                                                                                              \
        [YARD_PLAN_GEMM] = { 0.66,                                                                 \
                             0.89,                                                                 \
                             3,                                                                    \
                             100,                                                                  \
                             YARD_PLAN_PUBLISHED,                                                  \
                             "DeepGEMM README at 55ab91f, H800, m 64 to 4096" },                   \
        [YARD_PLAN_GROUP_GEMM] = { 0.65,                                                           \
                                   0.80,                                                           \
                                   4,                                                              \
                                   114,                                                            \
                                   YARD_PLAN_PUBLISHED,                                            \
                                   "DeepGEMM README at 55ab91f, grouped, m 256 to 8192" },         \
        [YARD_PLAN_ATTENTION] = { 0.667,                                                           \
                                  0.896,                                                           \
                                  9,                                                               \
                                  0,                                                               \
                                  YARD_PLAN_PUBLISHED,                                             \
                                  "FlashMLA README: 660 TFLOP/s, 3,000 GB/s; 9 us fixed "          \
                                  "measured" },                                                    \
        [YARD_PLAN_PREFILL_ATTENTION] = { 0.6,                                                     \
                                          0.8,                                                     \
                                          5,                                                       \
                                          0,                                                       \
                                          YARD_PLAN_ASSUMED,                                       \
                                          "as FlashAttention-3 class kernels" },                   \
        [YARD_PLAN_BMM] = { 0.5, 0.8, 4, 0, YARD_PLAN_ASSUMED, "like a small GEMM" },              \
        [YARD_PLAN_VECTOR] = { 0.7, 0.7, 3, 0, YARD_PLAN_ASSUMED, "launch within a graph" },       \
        [YARD_PLAN_COPY] = { 0.7, 0.7, 2, 0, YARD_PLAN_ASSUMED, "part of exchange kernels" },      \
        [YARD_PLAN_NVLINK] = { 0.7,                                                                \
                               0.7,                                                                \
                               25,                                                                 \
                               0,                                                                  \
                               YARD_PLAN_PUBLISHED,                                                \
                               "pplx-garden docs, DeepEP at EP8: 42.6 and 72.0 us" },              \
        [YARD_PLAN_NETWORK] = { 0.83,                                                              \
                                0.83,                                                              \
                                25,                                                                \
                                0,                                                                 \
                                YARD_PLAN_PUBLISHED,                                               \
                                "DeepEP docs/legacy.md, 128 tokens, EP16 to EP256" },              \
        [YARD_PLAN_ALL_REDUCE] = { 0.7, 0.7, 10, 0, YARD_PLAN_ASSUMED, "one-shot kernels" },       \
    }

static const yard_plan_profile profiles[] = {
    { .size = sizeof(yard_plan_profile),
      .name = "floor",
      .what = "nothing is lost: lower bounds",
      .share = { [YARD_PLAN_GEMM] = ONE(1, YARD_PLAN_EXACT, "floor"),
                 [YARD_PLAN_GROUP_GEMM] = ONE(1, YARD_PLAN_EXACT, "floor"),
                 [YARD_PLAN_ATTENTION] = ONE(1, YARD_PLAN_EXACT, "floor"),
                 [YARD_PLAN_PREFILL_ATTENTION] = ONE(1, YARD_PLAN_EXACT, "floor"),
                 [YARD_PLAN_BMM] = ONE(1, YARD_PLAN_EXACT, "floor"),
                 [YARD_PLAN_VECTOR] = ONE(1, YARD_PLAN_EXACT, "floor"),
                 [YARD_PLAN_COPY] = ONE(1, YARD_PLAN_EXACT, "floor"),
                 [YARD_PLAN_NVLINK] = ONE(1, YARD_PLAN_EXACT, "floor"),
                 [YARD_PLAN_NETWORK] = ONE(1, YARD_PLAN_EXACT, "floor"),
                 [YARD_PLAN_ALL_REDUCE] = ONE(1, YARD_PLAN_EXACT, "floor") },
      .stretch = 1,
      .stretch_origin = YARD_PLAN_EXACT,
      .step_origin = YARD_PLAN_EXACT },
    { .size = sizeof(yard_plan_profile),
      .name = "article",
      .what = "the deployment article's engine of April 2025: one efficiency a kernel class",
      .share = { [YARD_PLAN_GEMM] =
                     ONE(0.67, YARD_PLAN_FITTED, "the 95 us that halving the batch adds"),
                 [YARD_PLAN_GROUP_GEMM] =
                     ONE(0.66, YARD_PLAN_FITTED, "between 555 us at EP8 and 206 us at EP128"),
                 [YARD_PLAN_ATTENTION] = LAUNCHED(0.585, YARD_PLAN_PUBLISHED,
                                                  "580 TFLOP/s before April 2025 (FlashMLA)"),
                 [YARD_PLAN_PREFILL_ATTENTION] = LAUNCHED(0.5, YARD_PLAN_ASSUMED, "no time given"),
                 [YARD_PLAN_BMM] = LAUNCHED(0.46, YARD_PLAN_FITTED, "the rest of 856 us"),
                 [YARD_PLAN_VECTOR] = LAUNCHED(0.7, YARD_PLAN_FITTED, "the rest of 856 us"),
                 [YARD_PLAN_COPY] = ONE(0.5, YARD_PLAN_ASSUMED, "part of the exchange kernels"),
                 [YARD_PLAN_NVLINK] = { 0.28, 0.28, 41.6, 0, YARD_PLAN_PUBLISHED,
                                        "pplx-kernels README, EP8" },
                 [YARD_PLAN_NETWORK] = { 0.5, 0.5, 95, 0, YARD_PLAN_PUBLISHED,
                                         "half of InfiniBand, stated for EP128" },
                 [YARD_PLAN_ALL_REDUCE] = { 0.7, 0.7, 10, 0, YARD_PLAN_ASSUMED,
                                            "one-shot kernels on 8 GPUs" } },
      .exchange = pplx_exchange,
      .n_exchange = sizeof(pplx_exchange) / sizeof(pplx_exchange[0]),
      .exchange_source = "pplx-kernels README at 12cecfd, 1 and 128 tokens",
      .exchange_kernel_us = 41.6, /* one token over NVLink, where the wire takes 2 us */
      .stretch = 1,
      .stretch_origin = YARD_PLAN_EXACT,
      .step_origin = YARD_PLAN_ASSUMED },
    { .size = sizeof(yard_plan_profile),
      .name = "public",
      .what = "published kernel tables, nothing fitted",
      .share = PUBLIC_SHARES,
      .stretch = 1,
      .stretch_origin = YARD_PLAN_ASSUMED,
      .exchange_kernel_us = 4,
      .exchange_sm_share = 24.0 / 132, /* DeepEP's throughput kernels, 24 of 132 */
      .exchange_origin = YARD_PLAN_PUBLISHED,
      .step_us = 1000,
      .step_origin = YARD_PLAN_ASSUMED },
    { .size = sizeof(yard_plan_profile),
      .name = "deepseek",
      .what = "public, stretched as DeepSeek's own profiles are",
      .share = PUBLIC_SHARES,
      .stretch = 1.13,
      .stretch_origin = YARD_PLAN_FITTED,
      .exchange_kernel_us = 4,
      .exchange_sm_share = 24.0 / 132, /* DeepEP's throughput kernels, 24 of 132 */
      .exchange_origin = YARD_PLAN_PUBLISHED,
      .step_us = 1000,
      .step_origin = YARD_PLAN_FITTED },
    { .size = sizeof(yard_plan_profile),
      .name = "sglang",
      .what = "public, stretched as SGLang of May 2025 is",
      .share = PUBLIC_SHARES,
      .stretch = 1.27,
      .stretch_origin = YARD_PLAN_FITTED,
      .exchange_kernel_us = 4,
      .exchange_sm_share = 24.0 / 132, /* DeepEP's throughput kernels, 24 of 132 */
      .exchange_origin = YARD_PLAN_PUBLISHED,
      .step_us = 5000,
      .step_origin = YARD_PLAN_FITTED },
    { .size = sizeof(yard_plan_profile),
      .name = "trtllm",
      .what = "public, stretched as TensorRT-LLM on Blackwell is",
      .share = PUBLIC_SHARES,
      .stretch = 1.64,
      .stretch_origin = YARD_PLAN_FITTED,
      .exchange_kernel_us = 4,
      .exchange_sm_share = 24.0 / 132, /* DeepEP's throughput kernels, 24 of 132 */
      .exchange_origin = YARD_PLAN_PUBLISHED,
      .step_us = 8000,
      .step_origin = YARD_PLAN_FITTED },
    { .size = sizeof(yard_plan_profile),
      .name = "trtllm-2025",
      .what = "public, stretched as TensorRT-LLM of spring 2025 on Blackwell is",
      .share = PUBLIC_SHARES,
      .stretch = 2.01,
      .stretch_origin = YARD_PLAN_FITTED,
      .exchange_kernel_us = 4,
      .exchange_sm_share = 24.0 / 132, /* DeepEP's throughput kernels, 24 of 132 */
      .exchange_origin = YARD_PLAN_PUBLISHED,
      .step_us = 8000,
      .step_origin = YARD_PLAN_ASSUMED },
};

enum { N_PROFILES = sizeof(profiles) / sizeof(profiles[0]) };

const yard_plan_profile *yard_plan_profile_at(uint32_t i)
{
    return i < N_PROFILES ? &profiles[i] : NULL;
}

const yard_plan_profile *yard_plan_profile_find(const char *name)
{
    for (uint32_t i = 0; i < N_PROFILES; i++)
        if (!strcmp(profiles[i].name, name))
            return &profiles[i];
    return NULL;
}

static double compute_share(const yard_plan_share *s, const yard_plan_kernel *k)
{
    return s->half_rows > 0 && k->rows > 0 ? s->compute * k->rows / (k->rows + s->half_rows)
                                           : s->compute;
}

void yard_plan_time_kernel(const yard_plan_config *c, yard_plan_kernel *k)
{
    const yard_plan_share *s = &c->profile->share[k->cls];
    const double memory_us = k->bytes / (c->gpu->hbm_bytes_per_s * s->memory) * 1e6;
    const double compute_us = k->flops / (k->peak_flops * compute_share(s, k)) * 1e6;
    const double link_us = k->nvlink_bytes / (c->gpu->nvlink_bytes_per_s * s->memory) * 1e6;

    k->origin = s->origin;
    /* link_us: all-reduces; the exchanges between experts are timed by network.c */
    k->us = (s->fixed_us + fmax(link_us, fmax(memory_us, compute_us))) * c->profile->stretch;
}
