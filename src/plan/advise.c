/* From a sweep to a decision. */
#include <math.h>
#include <stdlib.h>

#include "plan/plan.h"

/* ---- the pair of pools ----------------------------------------------------------------------- */

static double usd_per_million(const yard_plan_choice *p)
{
    return p->config.gpu->price_per_hour / 3600 / p->result.tokens_per_s_per_gpu * 1e6;
}

static bool is_wanted(const yard_plan_choice *p, const yard_plan_wish *wish)
{
    return p->result.fits && p->result.tokens_per_s_per_request >= wish->min_speed &&
           (!wish->max_gpus || p->config.ep <= wish->max_gpus);
}

static const yard_plan_choice *choose_decode(const yard_plan_choice *list, uint32_t n,
                                             const yard_plan_wish *wish)
{
    const yard_plan_choice *best = NULL;

    for (uint32_t i = 0; i < n; i++)
        if (is_wanted(&list[i], wish) &&
            (!best || list[i].result.tokens_per_s_per_gpu / list[i].config.gpu->price_per_hour >
                          best->result.tokens_per_s_per_gpu / best->config.gpu->price_per_hour))
            best = &list[i];
    return best;
}

static yard_plan_config prefill_config(const yard_plan_choice *decode, const yard_plan_wish *wish,
                                       uint32_t ep, uint32_t tp)
{
    yard_plan_config c = decode->config;

    /* the article has no times of prefill; DeepSeek's profile has */
    if (!strcmp(c.profile->name, "article"))
        c.profile = yard_plan_profile_find("deepseek");
    c.phase = YARD_PLAN_PREFILL;
    c.ep = ep;
    c.tp = tp;
    c.kv = 0;
    c.prompt = wish->in_tokens;
    c.chunk = 16384;
    /* throughput kernels send a token once to a place */
    c.copies = ep > c.gpu->gpus_per_island ? YARD_PLAN_PER_NODE : YARD_PLAN_PER_RANK;
    return c;
}

/* Prefill has EP, DP and TP of its own; smaller ones do, for prompts bring tokens enough. */
static yard_status choose_prefill(const yard_plan_choice *decode, const yard_plan_wish *wish,
                                  yard_plan_pools *out, yard_error *err)
{
    static const uint32_t eps[] = { 1, 2, 4, 8, 16, 32, 64, 72, 128 }, tps[] = { 1, 2, 4, 8 };
    const yard_plan_schedule schedules[] = { YARD_PLAN_DISPATCH_OVERLAP, YARD_PLAN_MICRO_BATCH };

    out->has_prefill = false;
    for (size_t e = 0; e < sizeof(eps) / sizeof(eps[0]); e++)
        for (size_t t = 0; t < sizeof(tps) / sizeof(tps[0]); t++)
            for (int s = 0; s < 2; s++) {
                yard_plan_choice p = { .config = prefill_config(decode, wish, eps[e], tps[t]) };
                yard_status st;
                p.config.schedule = schedules[s];
                if (!yard_plan_is_legal(&p.config) || (wish->max_gpus && eps[e] > wish->max_gpus))
                    continue;
                if ((st = yard_plan_point(&p.config, &p.result, err)))
                    return st;
                if (!p.result.fits ||
                    (wish->max_ttft_ms > 0 && p.result.prompt_us * 1e-3 > wish->max_ttft_ms))
                    continue;
                if (out->has_prefill &&
                    p.result.tokens_per_s_per_gpu <= out->prefill.result.tokens_per_s_per_gpu)
                    continue;
                out->prefill = p;
                out->has_prefill = true;
            }
    return YARD_OK;
}

yard_status yard_plan_choose(const yard_plan_choice *list, uint32_t n, const yard_plan_wish *wish,
                             yard_plan_pools *out, yard_error *err)
{
    const yard_plan_choice *decode = choose_decode(list, n, wish);
    yard_status st;

    if (!decode) {
        double fastest = 0;
        for (uint32_t i = 0; i < n; i++)
            if (list[i].result.fits)
                fastest = fmax(fastest, list[i].result.tokens_per_s_per_request);
        return yard_fail(
            err, YARD_EINVAL,
            "no layout that fits reaches %.1f tokens/s a request%s; the fastest gives %.1f",
            wish->min_speed, wish->max_gpus ? " within the GPUs allowed" : "", fastest);
    }
    *out = (yard_plan_pools){ .decode = *decode };
    if ((st = choose_prefill(decode, wish, out, err)))
        return st;
    out->requests_per_s =
        decode->result.tokens_per_s_per_gpu * decode->config.ep / wish->out_tokens;
    out->usd_per_million = usd_per_million(decode);
    if (out->has_prefill) {
        out->gpus_ratio = decode->result.tokens_per_s_per_gpu / wish->out_tokens * wish->in_tokens /
                          (out->prefill.result.tokens_per_s_per_gpu * wish->occupancy);
        out->usd_per_million *= 1 + out->gpus_ratio;
    }
    return YARD_OK;
}

/* ---- what binds ------------------------------------------------------------------------------ */

/* The step if one class of work took no time. */
static yard_status step_without(const yard_plan_config *base, yard_plan_class cls, double *step_us,
                                yard_error *err)
{
    yard_plan_profile p = *base->profile;
    yard_plan_config c = *base;
    yard_plan_result r;
    yard_status st;

    c.profile = &p;
    p.share[cls].compute = p.share[cls].memory = 1e9;
    p.share[cls].fixed_us = 0;
    if (cls == YARD_PLAN_NETWORK) { /* all of the exchange, whichever link it takes */
        p.share[YARD_PLAN_NVLINK] = p.share[cls];
        p.share[YARD_PLAN_COPY] = p.share[cls];
        p.n_exchange = 0;
        p.exchange_kernel_us = 0;
    }
    st = yard_plan_point(&c, &r, err);
    *step_us = r.step_us;
    return st;
}

static const char *const class_words[YARD_PLAN_CLASS_COUNT] = {
    [YARD_PLAN_GEMM] = "the dense projections",
    [YARD_PLAN_GROUP_GEMM] = "the experts' products",
    [YARD_PLAN_ATTENTION] = "attention",
    [YARD_PLAN_BMM] = "the absorbed products (k_b, v_b)",
    [YARD_PLAN_VECTOR] = "norms, quantisation and other small kernels",
    [YARD_PLAN_NETWORK] = "the exchange between experts",
    [YARD_PLAN_ALL_REDUCE] = "the all-reduce of TP",
};

static yard_status print_bounds(FILE *to, const yard_plan_choice *p, yard_error *err)
{
    double gain[YARD_PLAN_CLASS_COUNT] = { 0 };
    int first = -1, second = -1;

    for (int i = 0; i < YARD_PLAN_CLASS_COUNT; i++) {
        double step_us;
        yard_status st;
        if (!class_words[i])
            continue;
        if ((st = step_without(&p->config, (yard_plan_class)i, &step_us, err)))
            return st;
        gain[i] = 1 - step_us / p->result.step_us;
        if (first < 0 || gain[i] > gain[first]) {
            second = first;
            first = i;
        } else if (second < 0 || gain[i] > gain[second]) {
            second = i;
        }
    }
    fprintf(to,
            "What bounds it: %s. If that took no time, the step would be %.0f %% shorter. The next "
            "is %s, "
            "%.0f %%.\n",
            class_words[first], 100 * gain[first], class_words[second], 100 * gain[second]);
    return YARD_OK;
}

/* ---- words ----------------------------------------------------------------------------------- */

static void print_decode(FILE *to, const yard_plan_choice *p)
{
    const yard_plan_config *c = &p->config;
    const yard_plan_result *r = &p->result;

    fprintf(
        to,
        "Run decode on %u x %s as EP %u = DP %u x TP %u, %u requests a group, schedule %s: %.1f "
        "tokens/s a request, %.0f tokens/s a GPU, %.0f requests at once, %.1f of %.0f GB.\n",
        c->ep, c->gpu->name, c->ep, r->dp, c->tp, c->batch, yard_plan_schedule_name(c->schedule),
        r->tokens_per_s_per_request, r->tokens_per_s_per_gpu, (double)c->batch * r->dp,
        r->memory.total_gb, c->gpu->hbm_gb);
}

static void print_pools(FILE *to, const yard_plan_pools *pools, const yard_plan_wish *wish)
{
    const yard_plan_choice *p = &pools->prefill;
    const double usd = pools->usd_per_million;
    const yard_plan_origin origin = pools->decode.config.gpu->price_origin;

    if (!pools->has_prefill) {
        fprintf(to, "Prefill: no layout on %s meets a first token within %.0f ms.\n",
                pools->decode.config.gpu->name, wish->max_ttft_ms);
        return;
    }
    fprintf(to,
            "Run prefill apart, on groups of %u x %s as EP %u = DP %u x TP %u (%s; efficiencies: "
            "%s): %.0f prompt "
            "tokens/s "
            "a GPU, %.0f ms to a first token without queueing. For %u tokens in and %u out, %.2f "
            "prefill GPUs for each decode GPU at %.0f %% occupancy (fitted to a published day).\n",
            p->config.ep, p->config.gpu->name, p->config.ep, p->result.dp, p->config.tp,
            yard_plan_schedule_name(p->config.schedule), p->config.profile->name,
            p->result.tokens_per_s_per_gpu, p->result.prompt_us * 1e-3, wish->in_tokens,
            wish->out_tokens, pools->gpus_ratio, 100 * wish->occupancy);
    fprintf(
        to,
        "One decode group carries %.1f requests/s. Cost: %.3f USD a million output tokens, prefill "
        "included, at %.2f USD a GPU hour (%s).\n",
        pools->requests_per_s, usd, pools->decode.config.gpu->price_per_hour,
        yard_plan_origin_name(origin));
}

/* The frontier of each EP at the speed that was asked for, or that of the choice. */
static void print_doublings(FILE *to, const yard_plan_choice *list, uint32_t n, double speed)
{
    double last = 0;

    fprintf(to, "What machines bring, at %.0f tokens/s a request, tokens/s for 8 GPUs:\n", speed);
    for (uint32_t i = 0; i < n; i++) {
        double now;
        if (i > 0 && list[i].config.ep == list[i - 1].config.ep)
            continue;
        now = yard_plan_frontier_at(list, n, list[i].config.ep, speed);
        fprintf(to, "  EP %-4u on %-6s ", list[i].config.ep, list[i].config.gpu->name);
        if (now <= 0)
            fprintf(to, "does not reach it\n");
        else if (last > 0)
            fprintf(to, "%8.0f  (%+.0f %% over the one before)\n", now, 100 * (now / last - 1));
        else
            fprintf(to, "%8.0f\n", now);
        last = now;
    }
}

yard_status yard_plan_advise(FILE *to, const yard_plan_choice *list, uint32_t n,
                             const yard_plan_wish *wish, yard_error *err)
{
    yard_plan_pools pools;
    yard_status st = yard_plan_choose(list, n, wish, &pools, err);

    if (st)
        return st;
    print_decode(to, &pools.decode);
    if ((st = print_bounds(to, &pools.decode, err)))
        return st;
    print_pools(to, &pools, wish);
    print_doublings(to, list, n,
                    wish->min_speed > 0 ? wish->min_speed
                                        : pools.decode.result.tokens_per_s_per_request);
    return YARD_OK;
}
