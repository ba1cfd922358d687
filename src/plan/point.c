/* One point: the kernels of a step, timed, simulated and added up. */
#include <math.h>
#include <stdio.h>

#include "plan/plan.h"

/* Time of the kernels of one class, in a layer. */
typedef struct layer_sums {
    double us[YARD_PLAN_CLASS_COUNT];
} layer_sums;

/* Throughput kernels of the exchange hold multiprocessors all the time; low-latency ones do not. */
static double slowed(const yard_plan_config *c, double us)
{
    const bool held = c->phase == YARD_PLAN_PREFILL && c->ep > c->gpu->gpus_per_island;

    return held ? us / (1 - c->profile->exchange_sm_share) : us;
}

/* Adds the layer's kernels up by stage. */
static yard_plan_stage_times stage_times(const yard_plan_config *c, yard_plan_rows rows,
                                         layer_sums *sums)
{
    yard_plan_kernel k[YARD_PLAN_MAX_KERNELS];
    const uint32_t n = yard_plan_layer_kernels(c, YARD_PLAN_MOE_LAYER, rows, k);
    const yard_plan_kernel *dispatch = NULL, *combine = NULL;
    yard_plan_stage_times t = { 0 };

    for (uint32_t i = 0; i < n; i++) {
        if (!strcmp(k[i].name, "dispatch")) {
            dispatch = &k[i];
            continue;
        }
        if (!strcmp(k[i].name, "combine")) {
            combine = &k[i];
            continue;
        }
        yard_plan_time_kernel(c, &k[i]);
        k[i].us = slowed(c, k[i].us);
        if (sums)
            sums->us[k[i].cls] += k[i].us;
        if (!strcmp(k[i].name, "dispatch_recv_copy"))
            t.receive_copy_us += k[i].us;
        else if (!strcmp(k[i].name, "combine_send_copy"))
            t.combine_send_us += k[i].us;
        else if (k[i].stage == 1)
            t.input_us += k[i].us;
        else if (k[i].stage == 2)
            t.attend_us += k[i].us;
        else if (k[i].stage == 3)
            t.shared_us += k[i].us;
        else if (k[i].stage == 4)
            t.experts_us += k[i].us;
        else
            t.combine_receive_us += k[i].us;
    }
    if (dispatch)
        t.dispatch = yard_plan_exchange_time(c, dispatch, rows.tokens, t.receive_copy_us);
    if (combine)
        t.combine = yard_plan_exchange_time(c, combine, rows.tokens,
                                            t.combine_send_us + t.combine_receive_us);
    t.send_us = t.dispatch.kernel_us / 2;
    t.receive_copy_us += t.dispatch.kernel_us / 2;
    t.combine_send_us += t.combine.kernel_us / 2;
    t.combine_receive_us += t.combine.kernel_us / 2;
    /* a busy rank receives, and sends back, more than the mean */
    t.dispatch.busy_us *= fmax(1, rows.load);
    t.combine.busy_us *= fmax(1, rows.load);
    return t;
}

/* Loads of the classes of ranks, the busiest first. */
static uint32_t rank_classes(const yard_plan_config *c, double load[YARD_PLAN_MAX_RANK_CLASSES])
{
    double mean = 0, max = 0;

    load[0] = c->imbalance;
    if (!c->load) {
        if (c->imbalance <= 1 || c->ep == 1)
            return 1;
        load[1] = (c->ep - c->imbalance) / (c->ep - 1);
        return 2;
    }
    for (uint32_t i = 0; i < c->n_load; i++) {
        mean += c->load[i] / c->n_load;
        max = fmax(max, c->load[i]);
    }
    /* the busiest rank, then the busiest of each seventh of the group */
    load[0] = max / mean;
    for (uint32_t k = 1; k < YARD_PLAN_MAX_RANK_CLASSES; k++) {
        const uint32_t first = (k - 1) * c->n_load / (YARD_PLAN_MAX_RANK_CLASSES - 1);
        const uint32_t end = k * c->n_load / (YARD_PLAN_MAX_RANK_CLASSES - 1);
        load[k] = 0;
        for (uint32_t i = first; i < end; i++)
            load[k] = fmax(load[k], c->load[i] / mean);
    }
    return YARD_PLAN_MAX_RANK_CLASSES;
}

static double step_tokens(const yard_plan_config *c)
{
    return c->phase == YARD_PLAN_PREFILL ? c->chunk : (double)c->batch * c->query;
}

static yard_plan_rows whole_batch(const yard_plan_config *c, double load)
{
    return (yard_plan_rows){ .tokens = step_tokens(c), .requests = c->batch, .load = load };
}

/* Requests are not cut; prompts are. */
static yard_plan_rows half_batch(const yard_plan_config *c, uint32_t half, double load)
{
    const uint32_t n = half ? c->batch / 2 : (c->batch + 1) / 2;

    if (c->phase == YARD_PLAN_PREFILL)
        return (yard_plan_rows){ .tokens = c->chunk / 2.0, .load = load };
    return (yard_plan_rows){ .tokens = (double)n * c->query, .requests = n, .load = load };
}

static bool can_split(const yard_plan_config *c)
{
    return c->phase == YARD_PLAN_PREFILL || c->batch > 1;
}

/* Micro-batches of one request are no micro-batches: it falls back to dispatch overlap. */
static yard_plan_schedule real_schedule(const yard_plan_config *c)
{
    if (yard_plan_schedule_halves(c->schedule) == 2 && !can_split(c))
        return YARD_PLAN_DISPATCH_OVERLAP;
    return c->schedule;
}

static void fill_work(const yard_plan_config *c, yard_plan_schedule schedule, uint32_t n_layers,
                      yard_plan_work *work, layer_sums *sums)
{
    const uint32_t n_halves = yard_plan_schedule_halves(schedule);
    double load[YARD_PLAN_MAX_RANK_CLASSES];

    work->n_layers = n_layers;
    work->n_classes = rank_classes(c, load);
    for (uint32_t k = 0; k < work->n_classes; k++)
        for (uint32_t half = 0; half < n_halves; half++)
            work->part[k][half] = stage_times(
                c, n_halves == 1 ? whole_batch(c, load[k]) : half_batch(c, half, load[k]),
                k == 0 ? sums : NULL);
}

static double layer_time(const yard_plan_config *c, yard_plan_layer_kind kind, yard_plan_rows rows,
                         bool floor)
{
    yard_plan_kernel k[YARD_PLAN_MAX_KERNELS];
    const uint32_t n = yard_plan_layer_kernels(c, kind, rows, k);
    double us = 0;

    for (uint32_t i = 0; i < n; i++) {
        yard_plan_time_kernel(c, &k[i]);
        us += floor ? k[i].floor_us : k[i].us;
    }
    return us;
}

static double head_time(const yard_plan_config *c, double rows, bool floor)
{
    yard_plan_kernel k = yard_plan_head_kernel(c, rows);

    yard_plan_time_kernel(c, &k);
    return floor ? k.floor_us : k.us;
}

/* Rows that need logits. */
static double head_rows(const yard_plan_config *c)
{
    return c->phase == YARD_PLAN_PREFILL ? ceil((double)c->chunk / c->prompt) : step_tokens(c);
}

/* The draft module: its first pass takes all rows of the step, so that its cache is filled; each
 * further drafted token takes one row a request. */
static double draft_time(const yard_plan_config *c)
{
    double us = 0;

    if (c->phase == YARD_PLAN_PREFILL || c->query < 2 || !c->model->n_mtp || c->no_draft)
        return 0;
    for (uint32_t pass = 0; pass + 1 < c->query; pass++) {
        yard_plan_config one = *c;
        yard_plan_work work;
        yard_plan_run run;
        yard_plan_kernel join;

        one.query = pass ? 1 : c->query;
        join = yard_plan_draft_kernel(c, step_tokens(&one));
        yard_plan_time_kernel(c, &join);
        fill_work(&one, YARD_PLAN_DISPATCH_OVERLAP, 1, &work, NULL);
        yard_plan_simulate(YARD_PLAN_DISPATCH_OVERLAP, &work, NULL, &run);
        us += run.total_us + join.us + head_time(c, c->batch, false);
    }
    return us;
}

/* Compute with copies, and transfers, of one micro-batch. */
static void floor_parts(const yard_plan_config *c, yard_plan_rows rows, double *work_us,
                        double *wire_us, double *shared_us, double *dispatch_us)
{
    yard_plan_kernel k[YARD_PLAN_MAX_KERNELS];
    const uint32_t n = yard_plan_layer_kernels(c, YARD_PLAN_MOE_LAYER, rows, k);

    *work_us = *wire_us = *shared_us = *dispatch_us = 0;
    for (uint32_t i = 0; i < n; i++) {
        const bool wire = !strcmp(k[i].name, "dispatch") || !strcmp(k[i].name, "combine");
        *(wire ? wire_us : work_us) += k[i].floor_us;
        if (!strcmp(k[i].name, "dispatch"))
            *dispatch_us = k[i].floor_us;
        if (!wire && k[i].stage == 3)
            *shared_us += k[i].floor_us;
    }
}

static void fill_floors(const yard_plan_config *c, yard_plan_floors *out)
{
    const yard_plan_model *m = c->model;
    const yard_plan_rows whole = whole_batch(c, 1);
    double work_us, wire_us, shared_us, dispatch_us, half_work, half_wire, unused;

    *out = (yard_plan_floors){ .micro_batch_us = -1 };
    out->head_us = head_time(c, head_rows(c), true);
    if (m->n_dense_layers)
        out->dense_layer_us = layer_time(c, YARD_PLAN_DENSE_LAYER, whole, true);
    if (m->n_experts) {
        floor_parts(c, whole, &work_us, &wire_us, &shared_us, &dispatch_us);
        out->no_overlap_us = work_us + wire_us;
        out->dispatch_overlap_us = out->no_overlap_us - fmin(shared_us, dispatch_us);
        if (can_split(c)) {
            floor_parts(c, half_batch(c, 0, 1), &work_us, &wire_us, &shared_us, &unused);
            floor_parts(c, half_batch(c, 1, 1), &half_work, &half_wire, &shared_us, &unused);
            out->micro_batch_us = fmax(work_us + half_work, wire_us + half_wire);
        }
    }
    out->step_us = (m->n_layers - m->n_dense_layers) * out->no_overlap_us +
                   m->n_dense_layers * out->dense_layer_us + out->head_us;
}

yard_status yard_plan_floor(const yard_plan_config *config, yard_plan_floors *out, yard_error *err)
{
    const yard_status st = yard_plan_check(config, err);

    if (!st)
        fill_floors(config, out);
    return st;
}

static double floor_of(const yard_plan_floors *f, yard_plan_schedule s)
{
    if (yard_plan_schedule_halves(s) == 2)
        return f->micro_batch_us;
    return s == YARD_PLAN_NONE ? f->no_overlap_us : f->dispatch_overlap_us;
}

static void fill_kernels(const yard_plan_config *c, yard_plan_result *r)
{
    const yard_plan_rows rows = whole_batch(c, c->imbalance);
    const yard_plan_stage_times t =
        c->model->n_experts ? stage_times(c, rows, NULL) : (yard_plan_stage_times){ 0 };
    const yard_plan_layer_kind kind =
        c->model->n_experts ? YARD_PLAN_MOE_LAYER : YARD_PLAN_DENSE_LAYER;

    r->n_kernels = yard_plan_layer_kernels(c, kind, rows, r->kernel);
    for (uint32_t i = 0; i < r->n_kernels; i++) {
        yard_plan_kernel *k = &r->kernel[i];
        yard_plan_time_kernel(c, k);
        k->us = slowed(c, k->us);
        if (!strcmp(k->name, "dispatch"))
            k->us = t.dispatch.kernel_us + t.dispatch.latency_us + t.dispatch.busy_us;
        if (!strcmp(k->name, "combine"))
            k->us = t.combine.kernel_us + t.combine.latency_us + t.combine.busy_us;
    }
}

static void fill_parts(const layer_sums *sums, const yard_plan_run *run, yard_plan_result *r)
{
    r->dispatch_us = run->dispatch_us;
    r->combine_us = run->combine_us;
    r->group_gemm_us = sums->us[YARD_PLAN_GROUP_GEMM];
    r->gemm_us = sums->us[YARD_PLAN_GEMM];
    r->attention_us = sums->us[YARD_PLAN_ATTENTION] + sums->us[YARD_PLAN_PREFILL_ATTENTION];
    r->rest_us =
        sums->us[YARD_PLAN_BMM] + sums->us[YARD_PLAN_VECTOR] + sums->us[YARD_PLAN_ALL_REDUCE];
    r->wire_us = run->wire_us;
    r->idle_us = run->idle_us;
}

static void fill_rates(const yard_plan_config *c, yard_plan_result *r)
{
    const double n_moe = c->model->n_layers - c->model->n_dense_layers;

    r->step_us = n_moe * r->layer_us + c->model->n_dense_layers * r->dense_layer_us + r->head_us +
                 r->draft_us + r->other_us;
    if (c->phase == YARD_PLAN_PREFILL) {
        r->tokens_per_step = c->chunk;
        r->prompt_us = r->step_us * ceil((double)c->prompt / c->chunk);
        r->tokens_per_s_per_request = 1e6 * c->prompt / r->prompt_us;
        r->tokens_per_s_per_gpu = (double)c->chunk / c->tp / r->step_us * 1e6;
    } else {
        /* a drafted token counts only if those before it were accepted */
        const double a = c->acceptance;
        r->tokens_per_step = 1;
        for (uint32_t i = 1; i < c->query; i++)
            r->tokens_per_step += pow(a, i);
        r->tokens_per_s_per_request = r->tokens_per_step / r->step_us * 1e6;
        r->tokens_per_s_per_gpu = r->tokens_per_s_per_request * c->batch / c->tp;
    }
    /* a machine of 8: the articles' unit, whatever the number of GPUs in a tray */
    r->tokens_per_s_per_node = 8 * r->tokens_per_s_per_gpu;
}

static const char *what_binds(const yard_plan_config *c, const yard_plan_result *r)
{
    const double n_moe = c->model->n_layers - c->model->n_dense_layers;
    const double group = r->group_gemm_us, gemm = r->gemm_us, attention = r->attention_us;
    const double rest = r->rest_us, idle = r->idle_us;
    const double layers = n_moe > 0 ? n_moe * r->layer_us : c->model->n_layers * r->dense_layer_us;
    double most = fmax(fmax(fmax(group, gemm), fmax(attention, rest)), idle);

    if (layers < 0.5 * r->step_us)
        return "what is outside the layers: head, draft and launch";
    if (most == idle)
        return c->ep > c->gpu->gpus_per_island ? "the network" : "NVLink and its latency";
    if (most == group)
        return "expert weights and products";
    if (most == attention)
        return "attention";
    return most == gemm ? "dense projections" : "small kernels";
}

static void fill_fit(const yard_plan_config *c, yard_plan_result *r)
{
    const yard_plan_memory *m = &r->memory;

    yard_plan_fill_memory(c, false, &r->memory);
    r->fits = m->total_gb <= c->gpu->hbm_gb;
    if (!r->fits)
        snprintf(r->why, sizeof(r->why),
                 "needs %.1f of %.0f GB: weights %.1f, cache %.1f, buffers and the rest %.1f; room "
                 "for %u requests of a group",
                 m->total_gb, c->gpu->hbm_gb, m->weights_gb, m->kv_gb,
                 m->total_gb - m->weights_gb - m->kv_gb, m->max_batch);
}

yard_status yard_plan_point(const yard_plan_config *config, yard_plan_result *out, yard_error *err)
{
    const yard_plan_config *c = config;
    const yard_status st = yard_plan_check(c, err);
    yard_plan_schedule schedule;
    yard_plan_floors floors;
    yard_plan_work work;
    yard_plan_run run = { 0 };
    layer_sums sums = { 0 };

    if (st)
        return st;
    schedule = real_schedule(c);
    *out = (yard_plan_result){ .dp = yard_plan_dp(c), .n_gpus = c->ep, .split = can_split(c) };
    out->rows_per_rank = (uint32_t)step_tokens(c);
    fill_floors(c, &floors);
    if (c->model->n_experts) {
        out->rows_per_expert = yard_plan_expert_rows(c, step_tokens(c)) / yard_plan_slots(c);
        out->active_experts = yard_plan_active_experts(c, step_tokens(c) * out->dp);
        fill_work(c, schedule, c->model->n_layers - c->model->n_dense_layers, &work, &sums);
        yard_plan_simulate(schedule, &work, NULL, &run);
        out->layer_us = run.total_us / work.n_layers;
        out->layer_floor_us = floor_of(&floors, schedule);
        out->draft_us = draft_time(c);
    }
    fill_parts(&sums, &run, out);
    fill_kernels(c, out);
    out->dense_layer_us = c->model->n_dense_layers
                              ? layer_time(c, YARD_PLAN_DENSE_LAYER, whole_batch(c, 1), false)
                              : 0;
    out->head_us = head_time(c, head_rows(c), false);
    out->other_us = c->profile->step_us;
    out->step_floor_us = floors.step_us;
    fill_rates(c, out);
    fill_fit(c, out);
    out->bound = what_binds(c, out);
    return YARD_OK;
}

yard_status yard_plan_timeline(const yard_plan_config *config, uint32_t n_layers,
                               void (*fn)(void *ctx, const yard_plan_event *event), void *ctx,
                               yard_error *err)
{
    const yard_plan_observer observer = { fn, ctx };
    const yard_status st = yard_plan_check(config, err);
    yard_plan_schedule schedule;
    yard_plan_work work;
    yard_plan_run run;

    if (st)
        return st;
    if (!config->model->n_experts)
        return yard_fail(err, YARD_ENOTSUP, "timeline: %s has no MoE layers", config->model->name);
    schedule = real_schedule(config);
    fill_work(config, schedule, n_layers, &work, NULL);
    yard_plan_simulate(schedule, &work, &observer, &run);
    return YARD_OK;
}
