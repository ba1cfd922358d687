/* Counts, memory and floors against tables computed by hand. ctest: sanitize */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "model/model.h"
#include "plan/derived.h"
#include "plan/plan.h"

/* a layer in the tables is a sum of numbers that were rounded to 0.01 */
#define SUM 0.03

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

static yard_plan_config config(const char *gpu, uint32_t ep, uint32_t tp, uint32_t batch)
{
    yard_plan_config c = YARD_PLAN_CONFIG_INIT;

    c.model = yard_plan_model_find("deepseek-v3");
    c.gpu = yard_plan_gpu_find(gpu);
    c.profile = yard_plan_profile_find("floor");
    c.ep = ep;
    c.tp = tp;
    c.batch = batch;
    return c;
}

static void near(const char *what, double got, double want, double tolerance)
{
    if (!(fabs(got - want) <= tolerance))
        fail_msg("%s: want %.4f within %g, got %.4f", what, want, tolerance, got);
}

static void parameters(void **state)
{
    static const struct {
        const char *name;
        uint64_t total, active, embedded, kv;
    } want[] = {
        { "deepseek-v3", 671026419200, 36625618432, 37552297472, 70272 },
        { "deepseek-v2-lite", 15706484224, 2451435008, 2661150208, 31104 },
        { "kimi-k2", 1026408232448, 31687095808, 32861500928, 70272 },
        { "mixtral-8x7b", 46702792704, 12748853248, 12879925248, 131072 },
        { "llama-3-70b", 70553706496, 69503033344, 70553706496, 327680 },
    };

    (void)state;
    for (size_t i = 0; i < COUNT(want); i++) {
        const yard_plan_model *m = yard_plan_model_find(want[i].name);
        yard_plan_params n;
        assert_non_null(m);
        yard_plan_count_params(m, &n);
        if (n.total != want[i].total || n.active != want[i].active)
            fail_msg("%s: total %llu, active %llu", m->name, (unsigned long long)n.total,
                     (unsigned long long)n.active);
        assert_int_equal(n.active_with_embedding, want[i].embedded);
        assert_int_equal(yard_plan_kv_bytes_per_token(m, 16), want[i].kv);
    }
    assert_int_equal(yard_plan_params_read(yard_plan_model_find("deepseek-v3"), 16), 57060267520);
}

/* The planner's count and the engine's are the same for what the engine can load. */
static void engine_counts(void **state)
{
    yard_model_config c;
    yard_param_count n;
    yard_plan_model m;
    yard_plan_params p;

    (void)state;
    assert_int_equal(yard_model_config_load(&c, "models/demo", NULL, NULL), YARD_OK);
    assert_int_equal(yard_plan_model_load(&m, "models/demo", NULL), YARD_OK);
    yard_model_count_params(&c, &n);
    yard_plan_count_params(&m, &p);
    assert_int_equal(p.total, n.total);
    assert_int_equal(p.active, n.active);
}

/* And so do they agree on memory, for each architecture and layout. */
static void engine_memory(void **state)
{
    static const char *const names[] = { "deepseek-v3", "deepseek-v2-lite", "kimi-k2",
                                         "mixtral-8x7b" };
    yard_plan_config point = config("h200", 8, 1, 1);

    (void)state;
    for (size_t i = 0; i < COUNT(names); i++)
        for (uint32_t tp = 1; tp <= 8; tp *= 2) {
            const yard_layout layout = { 8, 8 / tp, tp };
            yard_rank_memory rank;
            yard_plan_memory memory;
            yard_model_config c;
            assert_int_equal(yard_synth_dimensions(&c, names[i], NULL), YARD_OK);
            point.model = yard_plan_model_find(names[i]);
            point.tp = tp;
            assert_int_equal(yard_model_rank_memory(&c, layout, 0, &rank, NULL), YARD_OK);
            assert_int_equal(yard_plan_memory_of(&point, false, &memory, NULL), YARD_OK);
            near(names[i], memory.weights_gb, (double)rank.weight_bytes * 1e-9, 0.03);
        }
}

static void memory_per_gpu(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(derived_memories); i++) {
        const derived_memory *want = &derived_memories[i];
        yard_plan_config c = config("h100", want->ep, want->tp, 1);
        yard_plan_memory m;
        assert_int_equal(yard_plan_memory_of(&c, true, &m, NULL), YARD_OK);
        near("weights, kv_b copied", m.weights_gb, want->weights_gb, 0.006);
        assert_int_equal(m.max_batch_bound, want->h100_requests);
        c.gpu = yard_plan_gpu_find("h200");
        assert_int_equal(yard_plan_memory_of(&c, true, &m, NULL), YARD_OK);
        assert_int_equal(m.max_batch_bound, want->h200_requests);
        assert_int_equal(yard_plan_memory_of(&c, false, &m, NULL), YARD_OK);
        near("weights, kv_b split", m.weights_gb, want->weights_kv_b_split_gb, 0.006);
    }
}

static void exchange_buffers(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(derived_buffers); i++) {
        const derived_buffer *want = &derived_buffers[i];
        const yard_plan_config c = config("h200", want->ep, 1, want->max_tokens / 2);
        yard_plan_memory m;
        assert_int_equal(yard_plan_memory_of(&c, false, &m, NULL), YARD_OK);
        near("buffers", m.exchange_gb * 1e3, want->dispatch_mb + want->combine_mb, 0.11);
    }
}

static const yard_plan_kernel *find(const yard_plan_kernel *k, uint32_t n, const char *name)
{
    for (uint32_t i = 0; i < n; i++)
        if (!strcmp(k[i].name, name))
            return &k[i];
    fail_msg("no kernel %s", name);
    return NULL;
}

static void layer_kernels(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(derived_kernels); i++) {
        const derived_kernel *want = &derived_kernels[i];
        const yard_plan_config c = config("h100", 128, 1, want->batch);
        yard_plan_result r;
        const yard_plan_kernel *k;
        assert_int_equal(yard_plan_point(&c, &r, NULL), YARD_OK);
        k = find(r.kernel, r.n_kernels, want->name);
        near(want->name, k->flops * 1e-9, want->gflop, 0.00051 + 1e-4 * want->gflop);
        near(want->name, k->bytes * 1e-6, want->mb, 0.00065);
        near(want->name, k->floor_us, want->floor_us, 0.00051);
        assert_true(k->us == k->floor_us);
    }
}

static void layers(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(derived_layers); i++) {
        const derived_layer *want = &derived_layers[i];
        const yard_plan_config c = config("h100", want->ep, 1, want->batch);
        yard_plan_result r;
        yard_plan_floors f;
        assert_int_equal(yard_plan_point(&c, &r, NULL), YARD_OK);
        assert_int_equal(yard_plan_floor(&c, &f, NULL), YARD_OK);
        near("gate_up", find(r.kernel, r.n_kernels, "moe_gate_up")->floor_us, want->gate_up_us,
             0.006);
        near("down", find(r.kernel, r.n_kernels, "moe_down")->floor_us, want->down_us, 0.006);
        near("silu", find(r.kernel, r.n_kernels, "moe_silu_quant")->floor_us, want->silu_us, 0.006);
        near("dispatch", find(r.kernel, r.n_kernels, "dispatch")->floor_us, want->dispatch_us,
             0.006);
        near("combine", find(r.kernel, r.n_kernels, "combine")->floor_us, want->combine_us, 0.006);
        near("no overlap", f.no_overlap_us, want->no_overlap_us, SUM);
        near("dispatch overlap", f.dispatch_overlap_us, want->dispatch_overlap_us, SUM);
        near("micro-batch", f.micro_batch_us, want->micro_batch_us, 2 * SUM);
        near("step", f.step_us * 1e-3, want->step_ms, 61e-3 * SUM);
        /* the simulator, without losses and overlap, is the sum of the floors */
        near("simulated", r.layer_us, want->no_overlap_us, SUM);
        near("memory", r.memory.weights_gb + r.memory.kv_gb, want->need_gb, 0.051);
    }
}

static void group_gemm(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(derived_group_gemms); i++) {
        const derived_group_gemm *want = &derived_group_gemms[i];
        const yard_plan_config c = config("h100", want->ep, 1, want->batch);
        const yard_plan_kernel *up, *down;
        yard_plan_result r;
        assert_int_equal(yard_plan_point(&c, &r, NULL), YARD_OK);
        up = find(r.kernel, r.n_kernels, "moe_gate_up");
        down = find(r.kernel, r.n_kernels, "moe_down");
        assert_true(r.rows_per_expert == want->m); /* exact: A6 */
        near("active experts", r.active_experts, want->active, 0.006);
        near("gflop", (up->flops + down->flops) * 1e-9, want->gflop, 0.0006);
        near("floor", up->floor_us + down->floor_us, want->floor_us, 0.011);
    }
}

static void dense_layer_and_head(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(derived_edges); i++) {
        const yard_plan_config c = config("h100", 8, 1, derived_edges[i].batch);
        yard_plan_floors f;
        assert_int_equal(yard_plan_floor(&c, &f, NULL), YARD_OK);
        near("dense layer", f.dense_layer_us, derived_edges[i].dense_layer_us, 0.006);
        near("head", f.head_us, derived_edges[i].head_us, 0.051);
    }
}

static void single_node(void **state)
{
    (void)state;
    for (size_t i = 0; i < COUNT(derived_singles); i++) {
        const yard_plan_config c = config("h200", 8, 1, derived_singles[i].batch);
        yard_plan_result r;
        yard_plan_floors f;
        assert_int_equal(yard_plan_point(&c, &r, NULL), YARD_OK);
        assert_int_equal(yard_plan_floor(&c, &f, NULL), YARD_OK);
        near("group GEMM", r.group_gemm_us, derived_singles[i].group_gemm_us, 0.011);
        near("layer", f.no_overlap_us, derived_singles[i].layer_us, SUM);
        near("step", f.step_us * 1e-3, derived_singles[i].step_ms, 61e-3 * SUM);
    }
}

/* Batch from which a product of the experts is bound by compute, by the article's bytes. */
static void ridge(void **state)
{
    const double peak = 1979e12, rate = 3.35e12;
    const struct {
        double n, k, m;
    } products[] = { { 4096, 7168, 334 }, { 7168, 2048, 363 } };

    (void)state;
    for (size_t i = 0; i < COUNT(products); i++) {
        const double n = products[i].n, k = products[i].k;
        double m = 1;
        while (2 * m * n * k / peak < (m * k + n * k + m * n) / rate)
            m++;
        near("ridge", m, products[i].m, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameters),
        cmocka_unit_test(engine_counts),
        cmocka_unit_test(engine_memory),
        cmocka_unit_test(memory_per_gpu),
        cmocka_unit_test(exchange_buffers),
        cmocka_unit_test(layer_kernels),
        cmocka_unit_test(layers),
        cmocka_unit_test(group_gemm),
        cmocka_unit_test(dense_layer_and_head),
        cmocka_unit_test(single_node),
        cmocka_unit_test(ridge),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
