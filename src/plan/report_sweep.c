/* The points of a sweep as a table and as JSON. */
#include "plan/plan.h"

static const char *mark(const yard_plan_choice *p)
{
    if (!p->result.fits)
        return "does not fit";
    return p->best ? "best of all" : p->on_frontier ? "frontier" : "";
}

void yard_plan_print_sweep(FILE *to, const yard_plan_choice *list, uint32_t n, bool all)
{
    uint32_t n_fit = 0, n_shown = 0;

    fprintf(to, "%-6s %5s %4s %4s %6s  %-17s %12s %12s %10s %8s  %s\n", "gpu", "EP", "DP", "TP",
            "batch", "schedule", "tok/s a req", "tok/s, 8 GPU", "layer us", "GB", "");
    for (uint32_t i = 0; i < n; i++) {
        const yard_plan_choice *p = &list[i];
        n_fit += p->result.fits;
        if (!all && !p->on_frontier)
            continue;
        n_shown++;
        fprintf(to, "%-6s %5u %4u %4u %6u  %-17s %12.1f %12.0f %10.0f %8.1f  %s\n",
                p->config.gpu->name, p->config.ep, p->result.dp, p->config.tp, p->config.batch,
                yard_plan_schedule_name(p->config.schedule), p->result.tokens_per_s_per_request,
                p->result.tokens_per_s_per_node,
                p->config.model->n_experts ? p->result.layer_us : p->result.dense_layer_us,
                p->result.memory.total_gb, mark(p));
    }
    fprintf(to, "%u points, %u of them fit, %u shown%s\n", n, n_fit, n_shown,
            all ? "" : " (the frontier of each EP; --all for the rest)");
}

static json_t *json_choice(const yard_plan_choice *p)
{
    return json_pack("{s:s, s:i, s:i, s:i, s:i, s:s, s:f, s:f, s:f, s:f, s:f, s:b, s:s, s:b, s:b}",
                     "gpu", p->config.gpu->name, "ep", (int)p->config.ep, "dp", (int)p->result.dp,
                     "tp", (int)p->config.tp, "batch", (int)p->config.batch, "schedule",
                     yard_plan_schedule_name(p->config.schedule), "layer_us", p->result.layer_us,
                     "step_ms", p->result.step_us * 1e-3, "tokens_per_s_per_request",
                     p->result.tokens_per_s_per_request, "tokens_per_s_per_node",
                     p->result.tokens_per_s_per_node, "memory_gb", p->result.memory.total_gb,
                     "fits", p->result.fits, "why", p->result.why, "frontier", p->on_frontier,
                     "best", p->best);
}

static json_t *json_prefill(const yard_plan_choice *p)
{
    return json_pack(
        "{s:s, s:i, s:i, s:i, s:i, s:s, s:s, s:f, s:f, s:f}", "gpu", p->config.gpu->name, "ep",
        (int)p->config.ep, "dp", (int)p->result.dp, "tp", (int)p->config.tp, "chunk",
        (int)p->config.chunk, "schedule", yard_plan_schedule_name(p->config.schedule), "efficiency",
        p->config.profile->name, "tokens_per_s_per_gpu", p->result.tokens_per_s_per_gpu, "ttft_ms",
        p->result.prompt_us * 1e-3, "memory_gb", p->result.memory.total_gb);
}

static json_t *json_decision(const yard_plan_pools *pools)
{
    const yard_plan_gpu *gpu = pools->decode.config.gpu;

    return json_pack("{s:o, s:o, s:f, s:f, s:f, s:f, s:s}", "decode", json_choice(&pools->decode),
                     "prefill", pools->has_prefill ? json_prefill(&pools->prefill) : json_null(),
                     "prefill_gpus_per_decode_gpu", pools->gpus_ratio, "requests_per_s",
                     pools->requests_per_s, "usd_per_million_output_tokens", pools->usd_per_million,
                     "usd_per_gpu_hour", gpu->price_per_hour, "price_origin",
                     yard_plan_origin_name(gpu->price_origin));
}

json_t *yard_plan_json_sweep(const yard_plan_choice *list, uint32_t n, const yard_plan_pools *pools)
{
    json_t *points = json_array();

    for (uint32_t i = 0; points && i < n; i++)
        if (json_array_append_new(points, json_choice(&list[i])) != 0) {
            json_decref(points);
            points = NULL;
        }
    return json_pack("{s:o, s:o}", "points", points, "decision",
                     pools ? json_decision(pools) : json_null());
}
