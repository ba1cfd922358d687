/* From a sweep to a decision. */
#include <math.h>
#include <stdlib.h>

#include "plan/plan.h"

static double usd_per_million(const yard_plan_choice *p)
{
    return p->config.gpu->price_per_hour / 3600 / p->result.tokens_per_s_per_gpu * 1e6;
}

static bool is_wanted(const yard_plan_choice *p, const yard_plan_wish *wish)
{
    return p->result.fits && p->result.tokens_per_s_per_request >= wish->min_speed &&
           (!wish->max_gpus || p->config.ep <= wish->max_gpus);
}

/* Of two for nothing (no price is known) the faster one. */
static bool is_cheaper(const yard_plan_choice *a, const yard_plan_choice *b)
{
    const double x = usd_per_million(a), y = usd_per_million(b);

    return x != y ? x < y : a->result.tokens_per_s_per_gpu > b->result.tokens_per_s_per_gpu;
}

static const yard_plan_choice *choose_decode(const yard_plan_choice *list, uint32_t n,
                                             const yard_plan_wish *wish)
{
    const yard_plan_choice *best = NULL;

    for (uint32_t i = 0; i < n; i++)
        if (is_wanted(&list[i], wish) && (!best || is_cheaper(&list[i], best)))
            best = &list[i];
    return best;
}

static double peak_over_mean(const double *load, uint32_t n)
{
    double sum = 0, peak = 0;

    for (uint32_t i = 0; i < n; i++) {
        sum += load[i];
        peak = fmax(peak, load[i]);
    }
    return peak * n / sum;
}

static yard_plan_config prefill_config(const yard_plan_choice *decode, const yard_plan_wish *wish,
                                       uint32_t ep, uint32_t tp, uint32_t chunk)
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
    c.chunk = chunk;
    /* a load is of the decode group's ranks; its peak is kept as far as this EP can have it */
    if (c.load)
        c.imbalance = peak_over_mean(c.load, c.n_load);
    c.load = NULL;
    c.n_load = 0;
    c.imbalance = fmin(c.imbalance, c.model->n_experts ? ep : 1);
    /* throughput kernels send a token once to a place */
    c.copies = ep > c.gpu->gpus_per_island ? YARD_PLAN_PER_NODE : YARD_PLAN_PER_RANK;
    return c;
}

/* Better than what was kept, if it meets the wish; notes the fastest first token in any case. */
static void consider_prefill(const yard_plan_choice *p, const yard_plan_wish *wish,
                             yard_plan_pools *out)
{
    const double ttft_ms = p->result.prompt_us * 1e-3;

    if (!p->result.fits)
        return;
    if (out->fastest_ttft_ms <= 0 || ttft_ms < out->fastest_ttft_ms)
        out->fastest_ttft_ms = ttft_ms;
    if ((wish->max_ttft_ms > 0 && ttft_ms > wish->max_ttft_ms) ||
        (out->has_prefill &&
         p->result.tokens_per_s_per_gpu <= out->prefill.result.tokens_per_s_per_gpu))
        return;
    out->prefill = *p;
    out->has_prefill = true;
}

/* Prefill has EP, DP and TP of its own; smaller ones do, for prompts bring tokens enough. A bound
 * on the first token is met by fewer tokens a step, at some throughput. */
static yard_status choose_prefill(const yard_plan_choice *decode, const yard_plan_wish *wish,
                                  yard_plan_pools *out, yard_error *err)
{
    static const uint32_t eps[] = { 1, 2, 4, 8, 16, 32, 64, 72, 128 }, tps[] = { 1, 2, 4, 8 };
    static const uint32_t chunks[] = { 16384, 8192, 4096, 2048, 1024 };
    const size_t n_chunks = wish->max_ttft_ms > 0 ? sizeof(chunks) / sizeof(chunks[0]) : 1;
    const yard_plan_schedule schedules[] = { YARD_PLAN_DISPATCH_OVERLAP, YARD_PLAN_MICRO_BATCH };

    out->has_prefill = false;
    for (size_t e = 0; e < sizeof(eps) / sizeof(eps[0]); e++)
        for (size_t t = 0; t < sizeof(tps) / sizeof(tps[0]); t++)
            for (size_t i = 0; i < 2 * n_chunks; i++) {
                yard_plan_choice p = { .config = prefill_config(decode, wish, eps[e], tps[t],
                                                                chunks[i / 2]) };
                yard_status st;
                p.config.schedule = schedules[i % 2];
                if (!yard_plan_is_legal(&p.config) || (wish->max_gpus && eps[e] > wish->max_gpus))
                    continue;
                if ((st = yard_plan_point(&p.config, &p.result, err)))
                    return st;
                consider_prefill(&p, wish, out);
            }
    if (wish->max_ttft_ms > 0 && out->fastest_ttft_ms > wish->max_ttft_ms)
        return yard_fail(err, YARD_EINVAL,
                         "no prefill layout on %s gives a first token of %u-token prompts within "
                         "%g ms; the fastest takes %.0f",
                         decode->config.gpu->name, wish->in_tokens, wish->max_ttft_ms,
                         out->fastest_ttft_ms);
    return YARD_OK;
}

yard_status yard_plan_choose(const yard_plan_choice *list, uint32_t n, const yard_plan_wish *wish,
                             yard_plan_pools *out, yard_error *err)
{
    const yard_plan_choice *decode = choose_decode(list, n, wish);
    yard_status st;

    if (!decode) {
        double fastest = 0;
        uint32_t least = 0;
        for (uint32_t i = 0; i < n; i++) {
            if (list[i].result.fits)
                fastest = fmax(fastest, list[i].result.tokens_per_s_per_request);
            if (list[i].result.memory.total_gb < list[least].result.memory.total_gb)
                least = i;
        }
        if (fastest <= 0)
            return yard_fail(err, YARD_EINVAL,
                             "no layout fits in memory; EP %u with TP %u and %u requests a group "
                             "needs least, %.1f of %.0f GB on %s",
                             list[least].config.ep, list[least].config.tp, list[least].config.batch,
                             list[least].result.memory.total_gb, list[least].config.gpu->hbm_gb,
                             list[least].config.gpu->name);
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
    if (yard_plan_drafts_are_free(c))
        fprintf(to,
                "Its %u drafted tokens a step are of no draft module; making them takes no time "
                "here (--query 1: none).\n",
                c->query - 1);
}

static void print_pools(FILE *to, const yard_plan_pools *pools, const yard_plan_wish *wish)
{
    const yard_plan_choice *p = &pools->prefill;
    const double usd = pools->usd_per_million;
    const yard_plan_origin origin = pools->decode.config.gpu->price_origin;

    if (pools->has_prefill)
        fprintf(to,
                "Run prefill apart, on groups of %u x %s as EP %u = DP %u x TP %u (%s, %u tokens a "
                "group and step; efficiencies: %s): %.0f prompt tokens/s a GPU, %.0f ms to a first "
                "token without queueing. For %u tokens in and %u out, %.2f prefill GPUs for each "
                "decode GPU at %.0f %% occupancy (%s).\n",
                p->config.ep, p->config.gpu->name, p->config.ep, p->result.dp, p->config.tp,
                yard_plan_schedule_name(p->config.schedule), p->config.chunk,
                p->config.profile->name, p->result.tokens_per_s_per_gpu, p->result.prompt_us * 1e-3,
                wish->in_tokens, wish->out_tokens, pools->gpus_ratio, 100 * wish->occupancy,
                wish->occupancy == YARD_PLAN_ONLINE_OCCUPANCY ? "fitted to a published day"
                                                              : "given");
    else
        fprintf(to, "Prefill: no layout on %s has room for prompts of %u tokens.\n",
                pools->decode.config.gpu->name, wish->in_tokens);
    fprintf(to, "One decode group carries %.1f requests/s. ", pools->requests_per_s);
    if (pools->decode.config.gpu->price_per_hour > 0)
        fprintf(
            to,
            "Cost: %.3f USD a million output tokens, prefill %s, at %.2f USD a GPU hour (%s).\n",
            usd, pools->has_prefill ? "included" : "not included",
            pools->decode.config.gpu->price_per_hour, yard_plan_origin_name(origin));
    else
        fprintf(to, "Cost: no price of %s is known; the choice is by throughput alone (--price).\n",
                pools->decode.config.gpu->name);
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
