/* What is known exactly, or was published, against what the planner computes. The numbers are those
 * of the deployment article (A), the communication article (B), and of arithmetic on them; R and C
 * numbers are the project's list of requirements and contradictions. */
#include <math.h>
#include <stdlib.h>

#include "plan/plan.h"

typedef struct list {
    yard_plan_check_result *out;
    uint32_t n;
    yard_status st;
    yard_error *err;
} list;

static void add(list *l, const char *id, const char *what, double expected, double got,
                double tolerance)
{
    if (l->n == YARD_PLAN_MAX_CHECKS)
        return;
    l->out[l->n++] = (yard_plan_check_result){ .id = id,
                                               .what = what,
                                               .expected = expected,
                                               .got = got,
                                               .tolerance = tolerance,
                                               .passed = fabs(got - expected) <= tolerance };
}

static void add_least(list *l, const char *id, const char *what, double least, double got)
{
    if (l->n == YARD_PLAN_MAX_CHECKS)
        return;
    l->out[l->n++] = (yard_plan_check_result){ .id = id,
                                               .what = what,
                                               .expected = least,
                                               .got = got,
                                               .at_least = true,
                                               .passed = got >= least };
}

/* For reading, not a gate. */
static void show(list *l, const char *id, const char *what, double expected, double got)
{
    add(l, id, what, expected, got, INFINITY);
}

static yard_plan_config config(const char *gpu, const char *profile, uint32_t ep, uint32_t batch)
{
    yard_plan_config c = YARD_PLAN_CONFIG_INIT;

    c.model = yard_plan_model_find("deepseek-v3");
    c.gpu = yard_plan_gpu_find(gpu);
    c.profile = yard_plan_profile_find(profile);
    c.ep = ep;
    c.batch = batch;
    return c;
}

static yard_plan_result point(list *l, const yard_plan_config *c)
{
    yard_plan_result r = { 0 };

    if (!l->st)
        l->st = yard_plan_point(c, &r, l->err);
    return r;
}

static yard_plan_floors floors(list *l, const yard_plan_config *c)
{
    yard_plan_floors f = { 0 };

    if (!l->st)
        l->st = yard_plan_floor(c, &f, l->err);
    return f;
}

static const yard_plan_kernel *kernel(const yard_plan_result *r, const char *name)
{
    static const yard_plan_kernel none = { .bound = "" };

    for (uint32_t i = 0; i < r->n_kernels; i++)
        if (!strcmp(r->kernel[i].name, name))
            return &r->kernel[i];
    return &none;
}

static void check_counts(list *l)
{
    const yard_plan_model *m = yard_plan_model_find("deepseek-v3");
    yard_plan_params n;

    yard_plan_count_params(m, &n);
    add(l, "A1", "cache bytes a token", 70272, (double)yard_plan_kv_bytes_per_token(m, 16), 0);
    add(l, "A1", "cache bytes a token, FP8", 40016, (double)yard_plan_kv_bytes_per_token(m, 8), 0);
    add(l, "A2", "parameters", 671026419200, (double)n.total, 0);
    add(l, "A2", "active, with head", 36625618432, (double)n.active, 0);
    add(l, "A2", "active, with head and embedding", 37552297472, (double)n.active_with_embedding,
        0);
    add(l, "A3", "parameters read, 16 experts", 57060267520, (double)yard_plan_params_read(m, 16),
        0);
}

static double fits(list *l, const char *gpu, uint32_t ep, uint32_t batch)
{
    const yard_plan_config c = config(gpu, "floor", ep, batch);

    return point(l, &c).fits;
}

static void check_memory(list *l)
{
    static const struct {
        uint32_t ep;
        double gb, m;
    } by_ep[] = { { 8, 100.84, 64 },
                  { 16, 59.96, 128 },
                  { 32, 39.52, 256 },
                  { 64, 29.3, 512 },
                  { 128, 24.19, 1024 } };
    const yard_plan_config h200 = config("h200", "floor", 8, 1);
    yard_plan_result r;

    for (size_t i = 0; i < sizeof(by_ep) / sizeof(by_ep[0]); i++) {
        const yard_plan_config c = config("h100", "floor", by_ep[i].ep, 128);
        r = point(l, &c);
        add(l, "A4", "weight GB a GPU at EP 8 to 128", by_ep[i].gb, r.memory.weights_gb,
            0.01 * by_ep[i].gb);
        add(l, "A6", "rows per expert at EP 8 to 128", by_ep[i].m, r.rows_per_expert, 0);
    }
    r = point(l, &h200);
    add(l, "A5", "EP8 on H200: requests, bound", 114, r.memory.max_batch_bound, 0);
    add(l, "A5", "EP8 on H200: requests after buffers", 100, r.memory.max_batch, 12);
    add(l, "A5", "EP8 on H200 fits 128", 0, fits(l, "h200", 8, 128), 0);
    add(l, "A5", "EP8 on H100 fits 1", 0, fits(l, "h100", 8, 1), 0);
    add(l, "A5", "EP16 on H100 fits 64", 0, fits(l, "h100", 16, 64), 0);
    add(l, "A5", "EP32 on H100 fits 128", 0, fits(l, "h100", 32, 128), 0);
    add(l, "A5", "EP64 on H100 fits 128", 1, fits(l, "h100", 64, 128), 0);
    add(l, "A5", "EP128 on H100 fits 128", 1, fits(l, "h100", 128, 128), 0);
}

enum {
    NO_OVERLAP_US = 2667,
    DISPATCH_OVERLAP_US = 2651,
    MICRO_BATCH_US = 1896,
    EP8_US = 1802,
    DISPATCH_US = 593,
    COMBINE_US = 1012,
    MICRO_DISPATCH_US = 367,
    MICRO_COMBINE_US = 237,
    MICRO_GROUP_US = 270,
    EP8_GROUP_US = 555,
    GEMM_INCREASE_US = 95,
    COMM_INCREASE_US = 213
};

static void check_closure(list *l)
{
    const double ep8_comm = MICRO_DISPATCH_US + MICRO_COMBINE_US - COMM_INCREASE_US;
    const double others = EP8_US - ep8_comm - EP8_GROUP_US;
    const double compute = NO_OVERLAP_US - DISPATCH_US - COMBINE_US;
    const double group = compute - others;
    const double increase = MICRO_BATCH_US - MICRO_DISPATCH_US - MICRO_COMBINE_US - compute;

    add(l, "A7", "EP8 transfers", 391, ep8_comm, 0);
    add(l, "A7", "other kernels", 856, others, 0);
    add(l, "A7", "EP128 group GEMM", 206, group, 0);
    add(l, "A7", "micro-batches: group GEMM adds", 64, MICRO_GROUP_US - group, 0);
    add(l, "A7", "micro-batches: the rest adds", 71,
        increase - (MICRO_GROUP_US - group) - GEMM_INCREASE_US, 0);
    add(l, "A7", "micro-batches: compute adds", 230, increase, 0);
}

static yard_plan_result article(list *l, uint32_t ep, uint32_t batch, yard_plan_schedule s)
{
    yard_plan_config c = config("h100", "article", ep, batch);

    c.schedule = s;
    return point(l, &c);
}

static void check_layers(list *l)
{
    const yard_plan_result none = article(l, 128, 128, YARD_PLAN_NONE);
    const yard_plan_result overlap = article(l, 128, 128, YARD_PLAN_DISPATCH_OVERLAP);
    const yard_plan_result micro = article(l, 128, 128, YARD_PLAN_MICRO_BATCH);
    const yard_plan_result stages = article(l, 128, 128, YARD_PLAN_MICRO_BATCH_STAGES);
    const yard_plan_result ep8 = article(l, 8, 128, YARD_PLAN_NONE);

    add(l, "A8", "layer, EP128 no overlap", NO_OVERLAP_US, none.layer_us, 0.1 * NO_OVERLAP_US);
    add(l, "A8", "layer, EP128 dispatch overlap", DISPATCH_OVERLAP_US, overlap.layer_us,
        0.1 * DISPATCH_OVERLAP_US);
    add(l, "A8", "layer, EP128 micro-batches", MICRO_BATCH_US, micro.layer_us,
        0.1 * MICRO_BATCH_US);
    add(l, "A8", "layer, EP8", EP8_US, ep8.layer_us, 0.1 * EP8_US);
    add_least(l, "A8", "floor, EP128 no overlap", 1450, none.layer_us);
    add_least(l, "A8", "floor, EP128 dispatch overlap", 1433.8, overlap.layer_us);
    add_least(l, "A8", "floor, EP128 micro-batches", 834.9, micro.layer_us);
    add_least(l, "A8", "floor, EP8", 1051, ep8.layer_us);
    show(l, "O1", "micro-batches, switch at sends", MICRO_BATCH_US, micro.layer_us);
    show(l, "O1", "micro-batches, stage by stage", MICRO_BATCH_US, stages.layer_us);
    show(l, "R098", "no overlap: dispatch", DISPATCH_US, none.dispatch_us);
    show(l, "R098", "no overlap: combine", COMBINE_US, none.combine_us);
    show(l, "R098", "no overlap: group GEMM (closure)", 206, none.group_gemm_us);
    show(l, "R096", "dispatch overlap saves", 16, none.layer_us - overlap.layer_us);
    show(l, "R098", "micro-batches: dispatch", MICRO_DISPATCH_US, micro.dispatch_us);
    show(l, "R098", "micro-batches: combine", MICRO_COMBINE_US, micro.combine_us);
    show(l, "R098", "micro-batches: both", MICRO_DISPATCH_US + MICRO_COMBINE_US,
         micro.dispatch_us + micro.combine_us);
    show(l, "R103", "micro-batches: group GEMM", MICRO_GROUP_US, micro.group_gemm_us);
    show(l, "R106", "micro-batches: GEMM adds", GEMM_INCREASE_US, micro.gemm_us - none.gemm_us);
    show(l, "R103", "EP8: group GEMM", EP8_GROUP_US, ep8.group_gemm_us);
    show(l, "R104", "EP8: dispatch and combine (closure)", 391, ep8.dispatch_us + ep8.combine_us);
    show(l, "R095", "EP8: other kernels (closure)", 856,
         ep8.layer_us - ep8.dispatch_us - ep8.combine_us - ep8.group_gemm_us);
}

static void check_wire(list *l)
{
    const yard_plan_config c = config("h100", "article", 128, 128);
    const yard_plan_result r = point(l, &c);
    const yard_plan_kernel *d = kernel(&r, "dispatch"), *m = kernel(&r, "combine");

    add(l, "A11", "bytes of a dispatched row", 7408, yard_plan_dispatch_row_bytes(&c), 74);
    add(l, "A11", "bytes of a combined row", 14336, yard_plan_combine_row_bytes(&c), 143);
    add(l, "A11", "dispatch floor, 256 tokens, EP128", 284.5, d->floor_us, 2.8);
    add(l, "A11", "combine floor, 256 tokens, EP128", 550.5, m->floor_us, 5.5);
    add(l, "A11", "GB/s reached by 593 us", 24.0, d->network_bytes * 1e-3 / DISPATCH_US, 0.24);
    add(l, "A11", "GB/s reached by 1012 us", 27.2, m->network_bytes * 1e-3 / COMBINE_US, 0.27);
    add(l, "C2", "share of InfiniBand that is modelled", 0.5,
        (d->network_bytes + m->network_bytes) / (r.dispatch_us + r.combine_us) / 50e3, 0.05);
}

static void check_step(list *l)
{
    const double step_ms = 58 * MICRO_BATCH_US * 1e-3, all_ms = 61 * MICRO_BATCH_US * 1e-3;
    const double decode = 168e9 / 86400 / 14800, prefill = 608e9 / 86400 / 73700;
    const double nodes = 226.75;

    add(l, "A12", "58 measured layers, ms", 109.97, step_ms, 1.1);
    add(l, "A12", "tokens/s a request", 14.55, 1.6e3 / step_ms, 0.15);
    add(l, "A12", "tokens/s a node", 14899, 1.6e3 * 1024 / step_ms, 149);
    add(l, "A12", "the same if 61 layers are alike", 14166, 1.6e3 * 1024 / all_ms, 142);
    add(l, "A13", "service: decode share of the nodes", 0.579, decode / nodes, 0.002);
    add(l, "A13", "service: prefill share of the nodes", 0.421, prefill / nodes, 0.002);
}

/* Change of the layer's speed from dispatch overlap to micro-batches. */
static double micro_gain(list *l, uint32_t ep, uint32_t batch)
{
    const yard_plan_config c = config("h100", "floor", ep, batch);
    const yard_plan_floors f = floors(l, &c);

    return f.micro_batch_us > 0 ? f.dispatch_overlap_us / f.micro_batch_us - 1 : -1;
}

static void check_crossover(list *l)
{
    static const uint32_t ep[] = { 8, 16, 32, 64, 128 };
    static const double first[] = { 0, 128, 64, 32, 32 };
    static const uint32_t batch[] = { 4, 8, 16, 32 };
    static const double change[] = { -0.38, -0.26, -0.02, 0.32 };

    for (int i = 0; i < 5; i++) {
        double found = 0;
        for (uint32_t b = 2; b <= 128 && found == 0; b *= 2)
            if (micro_gain(l, ep[i], b) > 0)
                found = b;
        add(l, "A9", "floors: micro-batches win from, EP 8 to 128", first[i], found, 0);
    }
    for (int i = 0; i < 4; i++)
        add(l, "A10", "floors: gain at EP128, batch 4 to 32", change[i],
            micro_gain(l, 128, batch[i]), 0.01);
}

/* Rows an expert from which a product is bound by compute, by the article's bytes. */
static double ridge(const yard_plan_gpu *g, double n, double k)
{
    double m = 1;

    while (2 * m * n * k / g->fp8_flops < (m * k + n * k + m * n) / g->hbm_bytes_per_s)
        m++;
    return m;
}

static void check_ridge(list *l)
{
    const yard_plan_gpu *g = yard_plan_gpu_find("h100");

    add(l, "C11", "group GEMM compute bound from m, gate and up", 334, ridge(g, 4096, 7168), 0);
    add(l, "C11", "group GEMM compute bound from m, down", 363, ridge(g, 7168, 2048), 0);
}

static void check_floors(list *l)
{
    const yard_plan_config ep8 = config("h100", "floor", 8, 128),
                           one = config("h100", "floor", 8, 1);
    const yard_plan_config ep128 = config("h100", "floor", 128, 128);
    const yard_plan_config one128 = config("h100", "floor", 128, 1);
    const yard_plan_result a = point(l, &ep8), b = point(l, &ep128);
    const yard_plan_kernel *up = kernel(&b, "moe_gate_up"), *down = kernel(&b, "moe_down");

    add(l, "A14", "active experts, EP8 batch 1", 12.75, point(l, &one).active_experts, 0.02);
    add(l, "A14", "active experts, EP128 batch 1", 2.0, point(l, &one128).active_experts, 0.02);
    add(l, "A15", "group GEMM, EP128: GFLOP", 180.389, (up->flops + down->flops) * 1e-9, 1.8);
    add(l, "A15", "group GEMM, EP128: floor", 91.15, up->floor_us + down->floor_us, 0.9);
    add(l, "A15", "group GEMM, EP128: compute bound", 1, !strcmp(up->bound, "compute"), 0);
    add(l, "A15", "group GEMM, EP8: floor", 440.37,
        kernel(&a, "moe_gate_up")->floor_us + kernel(&a, "moe_down")->floor_us, 4.4);
    add(l, "A15", "group GEMM, EP8: memory bound", 1,
        !strcmp(kernel(&a, "moe_gate_up")->bound, "memory"), 0);
    add(l, "A16", "attention: GFLOP", 356.516, kernel(&b, "mla_attention")->flops * 1e-9, 3.6);
    add(l, "A16", "attention: floor", 360.3, kernel(&b, "mla_attention")->floor_us, 3.6);
    add(l, "A16", "attention: compute bound", 1,
        !strcmp(kernel(&b, "mla_attention")->bound, "compute"), 0);
}

/* On floors, without overlap or draft: tokens/s a request, and for 8 GPUs. */
static double floor_speed(list *l, const char *gpu, uint32_t ep, uint32_t batch)
{
    const yard_plan_config c = config(gpu, "floor", ep, batch);
    const yard_plan_floors f = floors(l, &c);

    return f.step_us > 0 ? 1.6e6 / f.step_us : 0;
}

static void check_frontier(list *l)
{
    const double single = floor_speed(l, "h200", 8, 4);
    const double s16 = floor_speed(l, "h100", 128, 16), s32 = floor_speed(l, "h100", 128, 32);
    const double f = (s16 - single) / (s16 - s32);
    const double wide = 8 * ((1 - f) * 16 * s16 + f * 32 * s32);
    const double at64 = floor_speed(l, "h200", 8, 64) / floor_speed(l, "h100", 128, 64);

    add(l, "A17", "floors: EP128 over EP8 at 82.6 tokens/s", 5.3, wide / (8 * 4 * single), 0.3);
    add(l, "A18", "floors: EP8 on H200 over EP128 at 64 requests", 1.26, at64, 0.05);
}

static double article_gain(list *l, uint32_t batch)
{
    return article(l, 128, batch, YARD_PLAN_DISPATCH_OVERLAP).layer_us /
               article(l, 128, batch, YARD_PLAN_MICRO_BATCH).layer_us -
           1;
}

static void check_shapes(list *l)
{
    yard_plan_config single = config("h200", "article", 8, 64);
    yard_plan_config latency = config("h200", "article", 8, 1);
    yard_plan_result wide = article(l, 128, 64, YARD_PLAN_MICRO_BATCH);
    double first = 0;

    single.schedule = YARD_PLAN_DISPATCH_OVERLAP;
    latency.tp = 8;
    latency.schedule = YARD_PLAN_DISPATCH_OVERLAP;
    for (uint32_t b = 2; b <= 128 && first == 0; b *= 2)
        if (article_gain(l, b) > 0)
            first = b;
    add(l, "R101", "micro-batches win from, EP128", 32, first, 0);
    show(l, "R101", "gain at batch 4 (A: -5 to -40 %)", -0.2, article_gain(l, 4));
    show(l, "R101", "gain at batch 16 (A: -5 to -40 %)", -0.05, article_gain(l, 16));
    show(l, "R101", "gain at batch 32 (A: 10 to 35 %)", 0.1, article_gain(l, 32));
    show(l, "R101", "gain at batch 128 (A: 39.8 %)", 0.398, article_gain(l, 128));
    add_least(l, "R069", "EP8 DP1 TP8, one request: tokens/s", 100,
              point(l, &latency).tokens_per_s_per_request);
    add(l, "R077", "EP8 on H200 over EP128 at 64 requests", 1.1,
        point(l, &single).tokens_per_s_per_node / wide.tokens_per_s_per_node, 0.1);
}

static void check_sweep(list *l)
{
    static const uint32_t ep[] = { 8, 16, 32, 64, 128 }, tp[] = { 1, 2, 4, 8 };
    static const uint32_t batch[] = { 1, 2, 4, 8, 16, 32, 64, 128 };
    static const yard_plan_schedule schedules[] = { YARD_PLAN_NONE, YARD_PLAN_DISPATCH_OVERLAP,
                                                    YARD_PLAN_MICRO_BATCH };
    const yard_plan_sweep sweep = { .size = sizeof(sweep),
                                    .ep = ep,
                                    .tp = tp,
                                    .batch = batch,
                                    .schedule = schedules,
                                    .n_ep = 5,
                                    .n_tp = 4,
                                    .n_batch = 8,
                                    .n_schedule = 3,
                                    .one_node_gpu = yard_plan_gpu_find("h200") };
    static const char *const profiles[] = { "article", "floor" };
    static const char *const names[][2] = {
        { "best EP128 over EP8 in 40 to 80 tokens/s (A: 5)",
          "least gain of a doubling, 25 to 70 tokens/s" },
        { "floors: best EP128 over EP8 in 40 to 80", "floors: least gain of a doubling, 40 to 70" },
    };
    static const int from[] = { 25, 40 };

    for (int p = 0; p < 2; p++) {
        const yard_plan_config base = config("h100", profiles[p], 8, 1);
        yard_plan_choice *points = NULL;
        uint32_t n = 0;
        double ratio = 0, least = INFINITY;
        if (l->st || (l->st = yard_plan_sweep_run(&base, &sweep, &points, &n, l->err)))
            return;
        for (int speed = 40; speed <= 80; speed++) {
            const double one = yard_plan_frontier_at(points, n, 8, speed);
            if (one > 0)
                ratio = fmax(ratio, yard_plan_frontier_at(points, n, 128, speed) / one);
        }
        for (int speed = from[p]; speed <= 70; speed++)
            for (int i = 2; i < 5; i++) {
                const double small = yard_plan_frontier_at(points, n, ep[i - 1], speed);
                if (small > 0)
                    least = fmin(least, yard_plan_frontier_at(points, n, ep[i], speed) / small);
            }
        free(points);
        show(l, "R071", names[p][0], 5, ratio);
        add_least(l, "R074", names[p][1], p == 0 ? 1.0 : 0.98, least);
    }
}

yard_status yard_plan_run_checks(yard_plan_check_result out[YARD_PLAN_MAX_CHECKS], uint32_t *n_out,
                                 yard_error *err)
{
    list l = { .out = out, .err = err };

    check_counts(&l);
    check_memory(&l);
    check_closure(&l);
    check_layers(&l);
    check_crossover(&l);
    check_wire(&l);
    check_step(&l);
    check_ridge(&l);
    check_floors(&l);
    check_frontier(&l);
    check_shapes(&l);
    check_sweep(&l);
    *n_out = l.n;
    return l.st;
}
