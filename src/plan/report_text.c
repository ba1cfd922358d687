/* Results as tables, for people. */
#include "plan/plan.h"

static void print_head(FILE *to, const yard_plan_config *c, const yard_plan_result *r)
{
    fprintf(to, "%s on %u x %s, EP %u = DP %u x TP %u, %s, efficiencies: %s (%s)\n", c->model->name,
            c->ep, c->gpu->name, c->ep, r->dp, c->tp, yard_plan_schedule_name(c->schedule),
            c->profile->name, c->profile->what);
    if (c->phase == YARD_PLAN_PREFILL)
        fprintf(to,
                "prefill of %u-token prompts after %u cached ones, %u tokens a DP group and step\n",
                c->prompt, c->kv, c->chunk);
    else
        fprintf(to, "decode of %u requests a DP group, %u tokens each a step, %u cached\n",
                c->batch, c->query, c->kv);
    if (!r->split && yard_plan_schedule_halves(c->schedule) == 2)
        fprintf(to, "one request cannot be split: run with dispatch overlap\n");
    fprintf(to, "device rates: %s (%s)\n", yard_plan_origin_name(c->gpu->origin), c->gpu->source);
    if (c->nic)
        fprintf(to, "network: %s, %s (%s)\n", c->nic->name, yard_plan_origin_name(c->nic->origin),
                c->nic->source);
    if (c->model->n_experts)
        fprintf(to, "expert load: busiest rank %s%.2f x the mean\n", c->load ? "measured, " : "",
                c->imbalance);
}

static void print_kernels(FILE *to, const yard_plan_result *r)
{
    fprintf(to, "\n%-28s %-17s %1s %10s %10s %9s %9s  %-8s %s\n", "kernel of a layer", "class", "s",
            "GFLOP", "MB", "floor us", "us", "bound", "origin");
    for (uint32_t i = 0; i < r->n_kernels; i++) {
        const yard_plan_kernel *k = &r->kernel[i];
        fprintf(to, "%-28s %-17s %u %10.3f %10.3f %9.2f %9.2f  %-8s %s\n", k->name,
                yard_plan_class_name(k->cls), k->stage, k->flops * 1e-9,
                (k->bytes + k->network_bytes + k->nvlink_bytes) * 1e-6, k->floor_us, k->us,
                k->bound, yard_plan_origin_name(k->origin));
    }
}

static void print_times(FILE *to, const yard_plan_config *c, const yard_plan_result *r)
{
    const uint32_t n_moe = c->model->n_layers - c->model->n_dense_layers;

    fprintf(to, "\n");
    if (c->model->n_experts) {
        fprintf(to, "MoE layer    %9.0f us  (floor %.0f)\n", r->layer_us, r->layer_floor_us);
        fprintf(
            to,
            "  of it      dispatch %.0f, combine %.0f (waiting included), group GEMM %.0f, GEMM "
            "%.0f, attention %.0f, rest %.0f; links busy %.0f, GPU idle %.0f\n",
            r->dispatch_us, r->combine_us, r->group_gemm_us, r->gemm_us, r->attention_us,
            r->rest_us, r->wire_us, r->idle_us);
        fprintf(to, "  experts    %.1f rows each, %.2f of %u active a rank\n", r->rows_per_expert,
                r->active_experts, yard_plan_slots(c));
    }
    fprintf(
        to,
        "step         %9.2f ms  = %u MoE layers + %u dense of %.0f us + head %.0f + draft %.0f + "
        "launch and sampling %.0f (%s)\n",
        r->step_us * 1e-3, n_moe, c->model->n_dense_layers, r->dense_layer_us, r->head_us,
        r->draft_us, r->other_us, yard_plan_origin_name(c->profile->step_origin));
    if (c->profile->stretch != 1)
        fprintf(to, "stretch      %9.2f     every kernel (%s)\n", c->profile->stretch,
                yard_plan_origin_name(c->profile->stretch_origin));
}

bool yard_plan_drafts_are_free(const yard_plan_config *c)
{
    return c->phase == YARD_PLAN_DECODE && c->query > 1 && (c->no_draft || !c->model->n_mtp);
}

static void print_rates(FILE *to, const yard_plan_config *c, const yard_plan_result *r)
{
    const yard_plan_memory *m = &r->memory;

    if (c->phase == YARD_PLAN_PREFILL)
        fprintf(to, "prompt       %9.0f ms  to the first token, without queueing\n",
                r->prompt_us * 1e-3);
    else
        fprintf(to, "speed        %9.1f tokens/s a request (%.2f a step, acceptance %.2f)\n",
                r->tokens_per_s_per_request, r->tokens_per_step, c->acceptance);
    if (yard_plan_drafts_are_free(c))
        fprintf(to, "drafts                 of no draft module; making them takes no time here "
                    "(--query 1: none)\n");
    fprintf(to, "throughput   %9.0f tokens/s a GPU, %.0f for 8\n", r->tokens_per_s_per_gpu,
            r->tokens_per_s_per_node);
    if (c->gpu->price_per_hour <= 0)
        fprintf(to, "cost                   no price of %s is known (--price)\n", c->gpu->name);
    else if (r->tokens_per_s_per_gpu > 0)
        fprintf(to, "cost         %9.3f USD a million tokens at %.2f USD a GPU hour (%s)\n",
                c->gpu->price_per_hour / 3600 / r->tokens_per_s_per_gpu * 1e6,
                c->gpu->price_per_hour, yard_plan_origin_name(c->gpu->price_origin));
    fprintf(to,
            "memory       %9.1f GB of %.0f: weights %.1f, MTP %.1f, exchange %.1f, graphs %.1f, "
            "scratch %.1f, KV %.1f; room for %u requests a group\n",
            m->total_gb, c->gpu->hbm_gb, m->weights_gb, m->mtp_gb, m->exchange_gb, m->graphs_gb,
            m->scratch_gb, m->kv_gb, m->max_batch);
    if (!r->fits)
        fprintf(to, "DOES NOT FIT: %s\n", r->why);
    fprintf(to, "waits for    %s\n", r->bound);
}

void yard_plan_print_point(FILE *to, const yard_plan_config *c, const yard_plan_result *r)
{
    print_head(to, c, r);
    print_kernels(to, r);
    print_times(to, c, r);
    print_rates(to, c, r);
}
