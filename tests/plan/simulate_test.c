/* The virtual clock: schedules against times worked out by hand, and what has to hold always.
 * ctest: sanitize */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "plan/plan.h"

static yard_plan_config config(uint32_t ep, uint32_t batch)
{
    yard_plan_config c = YARD_PLAN_CONFIG_INIT;

    c.model = yard_plan_model_find("deepseek-v3");
    c.gpu = yard_plan_gpu_find("h100");
    c.profile = yard_plan_profile_find("article");
    c.ep = ep;
    c.batch = batch;
    return c;
}

static yard_plan_result point(const yard_plan_config *c)
{
    yard_plan_result r;
    yard_error err = { 0 };

    if (yard_plan_point(c, &r, &err) != YARD_OK)
        fail_msg("%s", err.message);
    return r;
}

static yard_plan_stage_times times(double scale)
{
    return (yard_plan_stage_times){ .input_us = 10 * scale,
                                    .attend_us = 40 * scale,
                                    .send_us = 1 * scale,
                                    .shared_us = 5 * scale,
                                    .receive_copy_us = 2 * scale,
                                    .experts_us = 20 * scale,
                                    .combine_send_us = 3 * scale,
                                    .combine_receive_us = 4 * scale,
                                    .dispatch = { .latency_us = 7, .busy_us = 30 * scale },
                                    .combine = { .latency_us = 9, .busy_us = 60 * scale } };
}

static yard_plan_run run(yard_plan_schedule s, uint32_t n_layers, uint32_t n_classes, double scale)
{
    yard_plan_work work = { .n_layers = n_layers, .n_classes = n_classes };
    yard_plan_run out;

    for (uint32_t k = 0; k < n_classes; k++)
        work.part[k][0] = work.part[k][1] = times(scale);
    yard_plan_simulate(s, &work, NULL, &out);
    return out;
}

static void by_hand(void **state)
{
    (void)state;
    /* 10 + 40 + 1, 30 + 7 of waiting, 2, 5, 20, 3, 60 + 9 of waiting, 4 */
    assert_true(fabs(run(YARD_PLAN_NONE, 1, 1, 1).total_us - 191) < 1e-9);
    assert_true(fabs(run(YARD_PLAN_NONE, 7, 1, 1).total_us - 7 * 191) < 1e-9);
    /* the shared expert runs while rows travel */
    assert_true(fabs(run(YARD_PLAN_DISPATCH_OVERLAP, 3, 1, 1).total_us - 3 * 186) < 1e-9);
    /* Two halves: A1 A2 A3 until 56, B until 112 with its dispatch sent at 107. A's rows arrive at
     * 51 + 37 = 88; A4 ends at 137, its combine would start at 137 and B's dispatch holds the link
     * until 137: it arrives at 137 + 69 = 206. B4 ends at 162 and its combine waits for the link
     * until 197: 266. A5 ends at 210, B5 at 270. */
    assert_true(fabs(run(YARD_PLAN_MICRO_BATCH, 1, 1, 1).total_us - 270) < 1e-9);
    assert_true(fabs(run(YARD_PLAN_NONE, 0, 1, 1).total_us) < 1e-9);
}

static void accounts(void **state)
{
    (void)state;
    for (int s = 0; s < YARD_PLAN_SCHEDULE_COUNT; s++) {
        const yard_plan_run r = run((yard_plan_schedule)s, 20, 1, 1);
        const double halves = yard_plan_schedule_halves((yard_plan_schedule)s);
        /* everything that runs, and the idle time, is the whole */
        assert_true(fabs(r.total_us / 20 - halves * 85 - r.idle_us) < 1e-9);
        assert_true(fabs(r.wire_us - halves * 90) < 1e-9);
        /* no schedule beats its busiest resource */
        assert_true(r.total_us / 20 >= fmax(halves * 85, halves * 90) - 1e-9);
    }
}

typedef struct seen {
    double free_at[3], work_us;
    uint32_t n;
} seen;

static void watch(void *ctx, const yard_plan_event *e)
{
    seen *s = ctx;
    const int lane = !strcmp(e->resource, "network");

    assert_true(e->end_us > e->start_us);
    assert_true(e->stage >= 1 && e->stage <= 5);
    if (e->rank_class == 0) { /* one piece of work at a time on each resource */
        assert_true(e->start_us >= s->free_at[lane] - 1e-9);
        s->free_at[lane] = e->end_us;
        s->n++;
    }
}

static void resources_are_exclusive(void **state)
{
    (void)state;
    for (int s = 0; s < YARD_PLAN_SCHEDULE_COUNT; s++) {
        yard_plan_config c = config(128, 128);
        seen n = { 0 };
        c.schedule = (yard_plan_schedule)s;
        assert_int_equal(yard_plan_timeline(&c, 4, watch, &n, NULL), YARD_OK);
        assert_true(n.n > 4 * 8);
    }
}

/* Classes of ranks that behave alike give what one class gives. */
static void classes(void **state)
{
    (void)state;
    for (int s = 0; s < YARD_PLAN_SCHEDULE_COUNT; s++)
        assert_true(run((yard_plan_schedule)s, 9, 1, 1).total_us ==
                    run((yard_plan_schedule)s, 9, 5, 1).total_us);
}

static void imbalance(void **state)
{
    yard_plan_config c = config(32, 64);
    const double even = point(&c).layer_us;
    double load[32], last = even;

    (void)state;
    for (int i = 0; i < 32; i++)
        load[i] = 3;
    c.load = load;
    c.n_load = 32;
    assert_true(point(&c).layer_us == even);
    load[5] = 6; /* 2 over a mean of 99/32 */
    assert_true(point(&c).layer_us > even);
    c.load = NULL;
    for (double r = 1.25; r <= 3; r += 0.25) {
        c.imbalance = r;
        assert_true(point(&c).layer_us > last);
        last = point(&c).layer_us;
    }
}

/* More of anything never takes less time; a split of one request is none. */
static void monotonic(void **state)
{
    (void)state;
    for (int s = 0; s < YARD_PLAN_SCHEDULE_COUNT; s++) {
        double last = 0;
        for (uint32_t batch = 2; batch <= 512; batch *= 2) {
            yard_plan_config c = config(64, batch);
            yard_plan_result r;
            c.schedule = (yard_plan_schedule)s;
            r = point(&c);
            assert_true(r.step_us > last);
            assert_true(r.layer_us >= r.layer_floor_us);
            last = r.step_us;
        }
    }
    for (uint32_t ep = 8; ep <= 128; ep *= 2) {
        yard_plan_config c = config(ep, 1);
        yard_plan_result overlap, micro;
        c.schedule = YARD_PLAN_DISPATCH_OVERLAP;
        overlap = point(&c);
        c.schedule = YARD_PLAN_MICRO_BATCH;
        micro = point(&c);
        assert_true(overlap.step_us == micro.step_us);
        assert_false(micro.split);
    }
}

/* A step is its layers, the head, sampling and the draft. */
static void step_counts(void **state)
{
    yard_plan_config c = config(128, 128);
    yard_plan_result r = point(&c);

    (void)state;
    assert_true(fabs(r.step_us - (58 * r.layer_us + 3 * r.dense_layer_us + r.head_us + r.draft_us +
                                  r.other_us)) < 1e-6);
    assert_true(r.draft_us > r.layer_us);
    c.query = 1;
    assert_true(point(&c).draft_us == 0);
    c.query = 4;
    c.acceptance = 0.5;
    r = point(&c);
    assert_true(fabs(r.tokens_per_step - 1.875) < 1e-9);
    c.phase = YARD_PLAN_PREFILL;
    c.kv = 0;
    r = point(&c);
    assert_true(r.draft_us == 0 && r.prompt_us > 0);
}

/* One copy to a node is less than one to a rank, which is less than one to an expert. */
static void copies(void **state)
{
    yard_plan_config c = config(32, 128);
    double last = INFINITY;

    (void)state;
    for (int k = 0; k < 3; k++) {
        double network, nvlink;
        c.copies = (yard_plan_copies)k;
        yard_plan_exchange_bytes(&c, 1000, 100, &network, &nvlink);
        assert_true(network < last);
        last = network;
    }
    c.nic = yard_plan_nic_find("efa"); /* slower by its proxy */
    c.profile = yard_plan_profile_find("public");
    {
        const double efa = point(&c).layer_us;
        c.nic = yard_plan_nic_find("cx7");
        assert_true(efa > point(&c).layer_us);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(by_hand),
        cmocka_unit_test(accounts),
        cmocka_unit_test(resources_are_exclusive),
        cmocka_unit_test(classes),
        cmocka_unit_test(imbalance),
        cmocka_unit_test(monotonic),
        cmocka_unit_test(step_counts),
        cmocka_unit_test(copies),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
