/* Sweeps, refusals, users' files, scale. ctest: sanitize */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "plan/plan.h"

static yard_plan_config config(const char *model, const char *gpu, const char *profile)
{
    yard_plan_config c = YARD_PLAN_CONFIG_INIT;

    c.model = yard_plan_model_find(model);
    c.gpu = yard_plan_gpu_find(gpu);
    c.profile = yard_plan_profile_find(profile);
    return c;
}

static const uint32_t eps[] = { 8, 16, 32, 64, 128, 256 }, tps[] = { 1, 2, 4, 8 };
static const uint32_t batches[] = { 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 };
static const yard_plan_schedule schedules[] = { YARD_PLAN_NONE, YARD_PLAN_DISPATCH_OVERLAP,
                                                YARD_PLAN_MICRO_BATCH };

static yard_plan_sweep full_sweep(void)
{
    return (yard_plan_sweep){ .size = sizeof(yard_plan_sweep),
                              .ep = eps,
                              .tp = tps,
                              .batch = batches,
                              .schedule = schedules,
                              .n_ep = 6,
                              .n_tp = 4,
                              .n_batch = 10,
                              .n_schedule = 3,
                              .one_node_gpu = yard_plan_gpu_find("h200") };
}

static void frontier(void **state)
{
    const yard_plan_config base = config("deepseek-v3", "h100", "article");
    const yard_plan_sweep sweep = full_sweep();
    yard_plan_choice *list = NULL;
    const clock_t start = clock();
    uint32_t n = 0;

    (void)state;
    assert_int_equal(yard_plan_sweep_run(&base, &sweep, &list, &n, NULL), YARD_OK);
    assert_true((double)(clock() - start) / CLOCKS_PER_SEC < 2); /* the whole of it, on one core */
    assert_int_equal(n, 6 * 4 * 10);
    for (uint32_t i = 0; i < n; i++) {
        const yard_plan_result *r = &list[i].result;
        if (list[i].on_frontier)
            assert_true(r->fits);
        else if (list[i].best)
            fail_msg("best of all, but not of its EP");
        /* nothing of the same EP that fits beats a point of the frontier */
        for (uint32_t j = 0; list[i].on_frontier && j < n; j++)
            if (list[j].config.ep == list[i].config.ep && list[j].result.fits)
                assert_false(list[j].result.tokens_per_s_per_request >
                                 r->tokens_per_s_per_request &&
                             list[j].result.tokens_per_s_per_gpu > r->tokens_per_s_per_gpu);
        if (!r->fits)
            assert_true(r->why[0] != '\0' && r->layer_us > 0);
    }
    free(list);
}

static void pools(void **state)
{
    const yard_plan_config base = config("deepseek-v3", "h200", "public");
    const yard_plan_sweep sweep = full_sweep();
    yard_plan_wish wish = { .in_tokens = 4000, .out_tokens = 1000, .occupancy = 0.6 };
    yard_plan_choice *list = NULL;
    yard_plan_pools p;
    yard_error err = { 0 };
    uint32_t n = 0;
    double ratio;

    (void)state;
    assert_int_equal(yard_plan_sweep_run(&base, &sweep, &list, &n, NULL), YARD_OK);
    assert_int_equal(yard_plan_choose(list, n, &wish, &p, NULL), YARD_OK);
    assert_true(p.has_prefill &&
                p.prefill.config.ep < p.decode.config.ep); /* smaller EP: R141, F03 */
    ratio = p.gpus_ratio;
    wish.in_tokens = 8000;
    assert_int_equal(yard_plan_choose(list, n, &wish, &p, NULL), YARD_OK);
    assert_true(p.gpus_ratio > 1.9 * ratio); /* longer prompts, and their attention */
    ratio = p.gpus_ratio;
    wish.occupancy = 0.3; /* half as full: twice as many */
    assert_int_equal(yard_plan_choose(list, n, &wish, &p, NULL), YARD_OK);
    assert_true(fabs(p.gpus_ratio / ratio - 2) < 1e-9);
    wish.min_speed = 50;
    assert_int_equal(yard_plan_choose(list, n, &wish, &p, NULL), YARD_OK);
    assert_true(p.decode.result.tokens_per_s_per_request >= 50);
    wish.min_speed = 5000;
    assert_int_equal(yard_plan_choose(list, n, &wish, &p, &err), YARD_EINVAL);
    assert_non_null(strstr(err.message, "fastest"));
    free(list);
}

/* The baseline of dense models: a larger batch gives throughput for speed, more TP speed for
 * throughput (R003). */
static void dense_model(void **state)
{
    yard_plan_config c = config("llama-3-70b", "h200", "public");
    double last_speed = 0, last_gpu = 0;

    (void)state;
    c.query = 1;
    for (uint32_t tp = 2; tp <= 8; tp *= 2) {
        yard_plan_result small, large;
        c.ep = c.tp = tp;
        c.batch = 8;
        assert_int_equal(yard_plan_point(&c, &small, NULL), YARD_OK);
        c.batch = 32;
        assert_int_equal(yard_plan_point(&c, &large, NULL), YARD_OK);
        assert_true(large.tokens_per_s_per_request < small.tokens_per_s_per_request);
        assert_true(large.tokens_per_s_per_gpu > small.tokens_per_s_per_gpu);
        if (last_speed > 0) {
            assert_true(small.tokens_per_s_per_request > last_speed);
            assert_true(small.tokens_per_s_per_gpu < last_gpu);
        }
        last_speed = small.tokens_per_s_per_request;
        last_gpu = small.tokens_per_s_per_gpu;
    }
}

static void refused(const yard_plan_config *c, const char *word)
{
    yard_plan_result r;
    yard_error err = { 0 };

    assert_int_equal(yard_plan_point(c, &r, &err), YARD_EINVAL);
    if (!strstr(err.message, word))
        fail_msg("want '%s' in: %s", word, err.message);
}

static void refusals(void **state)
{
    const yard_plan_config good = config("deepseek-v3", "h100", "floor");
    yard_plan_config c = good;
    const double load[2] = { 1, -1 };

    (void)state;
    c.ep = 7;
    refused(&c, "legal: 1, 2, 4, 8");
    c = good;
    c.tp = c.ep = 3;
    refused(&c, "legal: 1, 2, 4, 8");
    c = good;
    c.ep = c.tp = 16; /* a group spans no nodes */
    refused(&c, "inside one node");
    c = good;
    c.ep = 8;
    c.redundant = 3;
    refused(&c, "expert slots");
    c = good;
    c.batch = 0;
    refused(&c, "batch");
    c = good;
    c.kv = 0;
    refused(&c, "kv");
    c = good;
    c.acceptance = NAN;
    refused(&c, "acceptance");
    c = good;
    c.imbalance = 0.5;
    refused(&c, "imbalance");
    c = good;
    c.kv_bits = 4;
    refused(&c, "legal: 8, 16");
    c = good;
    c.ep = 2;
    c.load = load;
    c.n_load = 2;
    refused(&c, "rank 1");
    c.n_load = 1;
    refused(&c, "each of 2 ranks");
    c = config("llama-3-70b", "h100", "floor");
    c.ep = 8;
    c.tp = 4;
    refused(&c, "no experts");
    c = good;
    c.model = NULL;
    refused(&c, "model");
}

static char *write_file(const char *text)
{
    static const char name[] = "/tmp/yard_plan_XXXXXX";
    char *path = strdup(name);
    const int fd = mkstemp(path);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    close(fd);
    return path;
}

#define GPU_BODY                                                                                   \
    "\"hbm_gb\": 100, \"hbm_bytes_per_s\": 5e12, \"fp8_flops\": 3e15, \"bf16_flops\": 1.5e15, "    \
    "\"nvlink_bytes_per_s\": 4e11, \"network_bytes_per_s\": 5e10, \"gpus_per_node\": 4"

static void gpu_files(void **state)
{
    static const struct {
        const char *text, *word;
    } bad[] = {
        { "{", ":" },
        { "[]", "object" },
        { "{" GPU_BODY "}", "name" },
        { "{\"name\": \"x\", " GPU_BODY ", \"tflops\": 3}",
          "unknown field tflops; legal: name, hbm_gb" },
        { "{\"name\": \"x\", \"hbm_gb\": 80}", "missing" },
        { "{\"name\": \"\", " GPU_BODY "}", "letters" },
        { "{\"name\": \"a\\\"b\", " GPU_BODY "}", "letters" },
        { "{\"name\": \"a name far longer than tables have room for it\", " GPU_BODY "}",
          "letters" },
        { "{\"name\": \"x\", " GPU_BODY ", \"fp4_flops\": -1}", "fp4_flops" },
        { "{\"name\": \"x\", " GPU_BODY ", \"gpus_per_island\": 2.5}", "whole" },
        { "{\"name\": \"x\", " GPU_BODY ", \"price_per_hour\": \"2\"}", "price_per_hour" },
    };
    yard_plan_gpu gpu;
    char *path = write_file("{\"name\": \"mine\", " GPU_BODY "}");

    (void)state;
    assert_int_equal(yard_plan_gpu_load(&gpu, path, NULL), YARD_OK);
    assert_string_equal(gpu.name, "mine");
    assert_int_equal(gpu.gpus_per_island, 4);
    unlink(path);
    free(path);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        yard_error err = { 0 };
        path = write_file(bad[i].text);
        assert_true(yard_plan_gpu_load(&gpu, path, &err) != YARD_OK);
        if (!strstr(err.message, bad[i].word))
            fail_msg("want '%s' in: %s", bad[i].word, err.message);
        unlink(path);
        free(path);
    }
    assert_int_equal(yard_plan_gpu_load(&gpu, "/nonexistent", NULL), YARD_EIO);
}

#define ROW(bench, device, p50, floor)                                                             \
    "{\"bench\":\"" bench "\",\"case\":{},\"p50_us\":" p50 ",\"floor_us\":" floor                  \
    ",\"verified\":true,\"device\":\"" device "\"}\n"

static void measurement_files(void **state)
{
    static const struct {
        const char *text, *word;
    } bad[] = {
        { ROW("grouped_linear", "NVIDIA H100", "100", "80"), "measured on 'NVIDIA H100'" },
        { ROW("engine", "NVIDIA H200", "100", "80"), "no verified row" },
        { ROW("grouped_linear", "NVIDIA H200", "70", "80"), "below its floor" },
        { "{\"bench\": 3}\n", "want bench" },
        { "rubbish\n", "1:" },
        { "", "no verified row" },
    };
    const yard_plan_gpu *h200 = yard_plan_gpu_find("h200");
    yard_plan_profile p = *yard_plan_profile_find("public");
    char *path = write_file(ROW("grouped_linear", "NVIDIA H200 SXM", "100", "80")
                                ROW("engine", "NVIDIA H200 SXM", "100", "80"));

    (void)state;
    assert_int_equal(yard_plan_profile_measure(&p, h200, path, NULL), YARD_OK);
    assert_int_equal(p.share[YARD_PLAN_GROUP_GEMM].origin, YARD_PLAN_MEASURED);
    assert_true(fabs(p.share[YARD_PLAN_GROUP_GEMM].memory - 0.8) < 1e-9);
    assert_int_equal(p.share[YARD_PLAN_GEMM].origin, YARD_PLAN_PUBLISHED);
    unlink(path);
    free(path);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        yard_error err = { 0 };
        path = write_file(bad[i].text);
        assert_true(yard_plan_profile_measure(&p, h200, path, &err) != YARD_OK);
        if (!strstr(err.message, bad[i].word))
            fail_msg("want '%s' in: %s", bad[i].word, err.message);
        unlink(path);
        free(path);
    }
}

static void larger(void **state)
{
    static const uint32_t groups[] = { 36, 72, 144, 288 };
    yard_plan_config c = config("deepseek-v3", "gb200", "public");
    yard_plan_scale_row rows[YARD_PLAN_MAX_SCALE];
    yard_plan_failure f;
    yard_plan_day day;
    double shape[24];
    uint32_t n = 0;

    (void)state;
    c.batch = 128;
    c.weight_bits = 4;
    assert_int_equal(yard_plan_scale(&c, groups, 4, rows, &n, NULL), YARD_OK);
    assert_int_equal(n, 4);
    assert_true(rows[1].result.tokens_per_s_per_gpu > rows[0].result.tokens_per_s_per_gpu);
    /* beyond the island there is a cliff */
    assert_true(rows[2].result.tokens_per_s_per_gpu < 0.9 * rows[1].result.tokens_per_s_per_gpu);
    c = rows[1].config;
    assert_int_equal(yard_plan_fail_node(&c, 120, &f, NULL), YARD_OK);
    assert_true(f.ep_after > 0 && f.ep_after <= 68);
    assert_true(f.lost > f.lost_with_spare && f.lost < 0.5);
    {
        const double quick = f.lost;
        assert_int_equal(yard_plan_fail_node(&c, 1920, &f, NULL), YARD_OK);
        /* half an hour more without tokens */
        assert_true(fabs((1 - f.lost) / (1 - quick) - 1680.0 / 3480) < 1e-9);
    }
    for (int h = 0; h < 24; h++)
        shape[h] = h == 12 ? 4 : 1;
    assert_int_equal(yard_plan_run_day(&c, shape, 1000, 1000, 0.9, &day, NULL), YARD_OK);
    assert_true(day.groups[12] == day.peak_groups && day.groups[0] < day.peak_groups);
    assert_true(day.gpu_hours_scaled < day.gpu_hours_fixed);
    assert_int_equal(yard_plan_run_day(&c, shape, 1e6, 1e7, 0.01, &day, NULL), YARD_EINVAL);
    for (int h = 0; h < 24; h++)
        shape[h] = 1e306; /* any unit */
    assert_int_equal(yard_plan_run_day(&c, shape, 1000, 1000, 0.9, &day, NULL), YARD_OK);
    assert_true(fabs(day.requests_per_s[7] - 1000) < 1e-6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frontier),    cmocka_unit_test(pools),
        cmocka_unit_test(dense_model), cmocka_unit_test(refusals),
        cmocka_unit_test(gpu_files),   cmocka_unit_test(measurement_files),
        cmocka_unit_test(larger),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
