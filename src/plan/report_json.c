/* Results as JSON, for programs. */
#include "plan/plan.h"

static json_t *json_kernel(const yard_plan_config *c, const yard_plan_kernel *k)
{
    const bool exchange = !strcmp(k->name, "dispatch") || !strcmp(k->name, "combine");
    const char *source = exchange && c->profile->n_exchange ? c->profile->exchange_source
                                                            : c->profile->share[k->cls].source;

    return json_pack("{s:s, s:i, s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:s, s:s, s:s}", "name",
                     k->name, "stage", (int)k->stage, "class", yard_plan_class_name(k->cls),
                     "flops", k->flops, "bytes", k->bytes, "network_bytes", k->network_bytes,
                     "nvlink_bytes", k->nvlink_bytes, "floor_us", k->floor_us, "us", k->us, "bound",
                     k->bound, "origin", yard_plan_origin_name(k->origin), "source",
                     source ? source : "");
}

static json_t *json_memory(const yard_plan_memory *m)
{
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:i, s:i}", "weights", m->weights_gb,
                     "mtp", m->mtp_gb, "exchange", m->exchange_gb, "graphs", m->graphs_gb,
                     "scratch", m->scratch_gb, "kv", m->kv_gb, "total", m->total_gb, "max_batch",
                     (int)m->max_batch, "max_batch_bound", (int)m->max_batch_bound);
}

static json_t *json_parts(const yard_plan_result *r)
{
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "dispatch", r->dispatch_us,
                     "combine", r->combine_us, "group_gemm", r->group_gemm_us, "gemm", r->gemm_us,
                     "attention", r->attention_us, "rest", r->rest_us, "wire", r->wire_us, "idle",
                     r->idle_us);
}

static json_t *json_config(const yard_plan_config *c)
{
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:i, s:i, "
                     "s:i, s:i, s:s, s:s, s:f, s:s, s:s}",
                     "model", c->model->name, "gpu", c->gpu->name, "efficiency", c->profile->name,
                     "phase", c->phase == YARD_PLAN_PREFILL ? "prefill" : "decode", "schedule",
                     yard_plan_schedule_name(c->schedule), "ep", (int)c->ep, "dp",
                     (int)yard_plan_dp(c), "tp", (int)c->tp, "batch", (int)c->batch, "query",
                     (int)c->query, "kv", (int)c->kv, "acceptance", c->acceptance, "imbalance",
                     c->imbalance, "redundant", (int)c->redundant, "weight_bits",
                     (int)yard_plan_weight_bits(c), "kv_bits", (int)c->kv_bits, "n_gpus",
                     (int)c->ep, "gpu_origin", yard_plan_origin_name(c->gpu->origin), "gpu_source",
                     c->gpu->source, "stretch", c->profile->stretch, "stretch_origin",
                     yard_plan_origin_name(c->profile->stretch_origin), "step_origin",
                     yard_plan_origin_name(c->profile->step_origin));
}

/* Adds value to object under key; takes value. */
static bool put(json_t *object, const char *key, json_t *value)
{
    return value && json_object_set_new(object, key, value) == 0;
}

json_t *yard_plan_json_point(const yard_plan_config *c, const yard_plan_result *r)
{
    json_t *kernels = json_array();
    json_t *point = json_pack(
        "{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:b, s:s, s:s, s:f, s:f}", "layer_us",
        r->layer_us, "layer_floor_us", r->layer_floor_us, "step_ms", r->step_us * 1e-3,
        "dense_layer_us", r->dense_layer_us, "head_us", r->head_us, "draft_us", r->draft_us,
        "tokens_per_s_per_request", r->tokens_per_s_per_request, "tokens_per_s_per_gpu",
        r->tokens_per_s_per_gpu, "tokens_per_s_per_node", r->tokens_per_s_per_node, "memory_gb",
        r->memory.total_gb, "fits", r->fits, "why", r->why, "bound", r->bound, "rows_per_expert",
        r->rows_per_expert, "active_experts", r->active_experts);
    bool ok = kernels && point;

    for (uint32_t i = 0; ok && i < r->n_kernels; i++)
        ok = json_array_append_new(kernels, json_kernel(c, &r->kernel[i])) == 0;
    ok = ok && put(point, "config", json_config(c)) &&
         put(point, "memory", json_memory(&r->memory)) &&
         put(point, "layer_parts_us", json_parts(r)) &&
         json_object_set(point, "kernels", kernels) == 0;
    json_decref(kernels);
    if (!ok) {
        json_decref(point);
        return NULL;
    }
    return point;
}
