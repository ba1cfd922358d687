/* The scheduler's rules one by one. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "serve/serve.h"

enum { N = 4, P = YARD_PAGE_TOKENS };

static yard_scheduler *make(uint32_t n_up)
{
    yard_scheduler_config config = YARD_SCHEDULER_CONFIG_INIT;
    yard_scheduler *s = NULL;

    config.n_instances = N;
    config.max_queued = 3;
    config.max_index_pages = 1000;
    config.stale_after_us = 1000;
    assert_int_equal(yard_scheduler_create(&s, &config, NULL), YARD_OK);
    for (uint32_t i = 0; i < n_up; i++)
        yard_scheduler_instance_up(s, 0, i, 2);
    return s;
}

static void fill(yard_page_hash *page, uint64_t prefix, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        page[i] = (yard_page_hash){ { prefix, i } };
}

/* A prompt of n_prompt tokens whose pages are those of prefix. */
static yard_status try_submit(yard_scheduler *s, uint64_t prefix, uint32_t n_prompt,
                              uint64_t deadline_us, uint64_t *id)
{
    yard_page_hash page[64];

    fill(page, prefix, n_prompt / P);
    return yard_scheduler_submit(
        s,
        &(yard_scheduler_request){
            .n_prompt = n_prompt, .page = page, .max_new_tokens = 10, .deadline_us = deadline_us },
        id, NULL);
}

static uint64_t submit(yard_scheduler *s, uint64_t prefix, uint32_t n_prompt)
{
    uint64_t id = 0;

    assert_int_equal(try_submit(s, prefix, n_prompt, UINT64_MAX, &id), YARD_OK);
    assert_int_not_equal(id, 0);
    return id;
}

static void hold(yard_scheduler *s, uint32_t instance, uint64_t prefix, uint32_t n_pages)
{
    yard_page_hash page[64];

    fill(page, prefix, n_pages);
    yard_scheduler_pages_added(s, instance, page, n_pages);
}

static void report(yard_scheduler *s, uint64_t now_us, uint32_t instance, uint64_t prompt_tokens,
                   uint64_t running_tokens)
{
    yard_scheduler_report(
        s, now_us, instance,
        &(yard_engine_report){ .prompt_tokens = prompt_tokens, .running_tokens = running_tokens });
}

static uint32_t expect_send(yard_scheduler *s, uint64_t now_us, uint64_t id, uint32_t attempt)
{
    yard_action a;

    assert_true(yard_scheduler_next(s, now_us, &a));
    assert_int_equal(a.kind, YARD_ACTION_SEND);
    assert_true(a.id == id);
    assert_int_equal(a.attempt, attempt);
    return a.instance;
}

static void expect_end(yard_scheduler *s, uint64_t now_us, uint64_t id, yard_end_reason reason,
                       uint32_t instance)
{
    yard_action a;

    assert_true(yard_scheduler_next(s, now_us, &a));
    assert_int_equal(a.kind, YARD_ACTION_END);
    assert_true(a.id == id);
    assert_int_equal(a.reason, reason);
    assert_int_equal(a.instance, instance);
}

static void expect_nothing(yard_scheduler *s, uint64_t now_us)
{
    yard_action a;

    assert_false(yard_scheduler_next(s, now_us, &a));
}

static void the_least_work_is_chosen(void **state)
{
    yard_scheduler *s = make(3);

    (void)state;
    report(s, 0, 0, 500, 0);
    report(s, 0, 1, 300, 9999);
    report(s, 0, 2, 400, 0);
    assert_int_equal(expect_send(s, 0, submit(s, 1, 150), 1), 1);
    /* what was sent counts before the engine speaks of it: 300 + 150 + 10 */
    assert_int_equal(yard_scheduler_work(s, 1), 460);
    assert_int_equal(expect_send(s, 0, submit(s, 2, 10), 1), 2);
    yard_scheduler_destroy(s);
}

static void ties_go_to_fewer_running_tokens_then_the_lower_number(void **state)
{
    yard_scheduler *s = make(4);

    (void)state;
    for (uint32_t i = 0; i < 4; i++)
        report(s, 0, i, 100, i == 0 ? 50 : 20);
    assert_int_equal(expect_send(s, 0, submit(s, 1, 10), 1), 1);
    assert_int_equal(expect_send(s, 0, submit(s, 1, 10), 1), 2);
    yard_scheduler_destroy(s);
}

/* 10 pages are cached at 2; the last token is computed even if its page is. There: 7 P - 1 in line,
 * P of its own, 2 P for the delay; elsewhere 10 P. */
static void cached_tokens_are_no_work(void **state)
{
    yard_scheduler *s = make(3);
    yard_action a;

    (void)state;
    hold(s, 2, 7, 10);
    report(s, 0, 2, 7 * P - 1, 0);
    submit(s, 7, 10 * P);
    assert_true(yard_scheduler_next(s, 0, &a));
    assert_int_equal(a.instance, 2);
    assert_int_equal(a.n_cached, 9 * P);
    assert_int_equal(yard_scheduler_work(s, 2), 7 * P - 1 + P + 10);
    yard_scheduler_destroy(s);
}

static void waiting_for_a_cache_has_a_price(void **state)
{
    yard_scheduler *s = make(3);

    (void)state;
    hold(s, 2, 7, 10);
    report(s, 0, 2, 7 * P + 1, 0);
    assert_int_equal(expect_send(s, 0, submit(s, 7, 10 * P), 1), 0);
    yard_scheduler_destroy(s);
}

/* Where there is work, a miss delays it: 3 P each for prompts without a cache. */
static void a_miss_counts_more_where_it_delays_others(void **state)
{
    yard_scheduler *s = make(2);

    (void)state;
    hold(s, 1, 7, 10);
    report(s, 0, 0, 20 * P, 0);
    report(s, 0, 1, 46 * P, 0); /* 46 P + 3 P < 20 P + 30 P */
    assert_int_equal(expect_send(s, 0, submit(s, 7, 10 * P), 1), 1);
    yard_scheduler_destroy(s);
}

static void evicted_and_unknown_pages_do_not_count(void **state)
{
    yard_scheduler *s = make(3);
    yard_page_hash page[10];

    (void)state;
    fill(page, 7, 10);
    hold(s, 2, 7, 10);
    yard_scheduler_pages_evicted(s, 2, page, 1);
    assert_int_equal(expect_send(s, 0, submit(s, 7, 10 * P), 1), 0);
    hold(s, 1, 8, 10);
    yard_scheduler_pages_unknown(s, 1);
    hold(s, 2, 8, 2);
    assert_int_equal(expect_send(s, 0, submit(s, 8, 10 * P), 1), 2);
    yard_scheduler_destroy(s);
}

/* Before the engine announces a page: the second request of a burst finds the first. */
static void a_burst_meets_where_its_prefix_is_being_computed(void **state)
{
    yard_scheduler *s = make(3);

    (void)state;
    assert_int_equal(expect_send(s, 0, submit(s, 3, 20 * P + 1), 1), 0);
    yard_scheduler_report(
        s, 0, 0, &(yard_engine_report){ .n_seen = 1, .n_requests = 1, .prompt_tokens = 9 });
    assert_int_equal(expect_send(s, 0, submit(s, 3, 20 * P + 5), 1), 0);
    yard_scheduler_destroy(s);
}

static void paused_engines_get_nothing_before_they_report(void **state)
{
    yard_scheduler *s = make(2);
    uint64_t first, second;

    (void)state;
    first = submit(s, 1, 10);
    assert_int_equal(expect_send(s, 0, first, 1), 0);
    yard_scheduler_instance_paused(s, 0);
    yard_scheduler_instance_paused(s, 1);
    second = submit(s, 2, 10);
    expect_nothing(s, 0);
    assert_true(yard_scheduler_finished(s, 0, first, 1, 1)); /* what it has goes on */
    expect_end(s, 0, first, YARD_END_FINISHED, YARD_NO_INSTANCE);
    report(s, 0, 1, 900, 0);
    assert_int_equal(expect_send(s, 0, second, 1), 1); /* the other one has less to do */
    yard_scheduler_destroy(s);
}

static void silent_and_stuck_engines_get_nothing(void **state)
{
    yard_scheduler *s = make(3);
    uint64_t id;

    (void)state;
    report(s, 500, 1, 9000, 0);
    report(s, 1200, 2, 9500, 0);
    assert_int_equal(expect_send(s, 1100, submit(s, 1, 10), 1), 1); /* 0 is silent since 0 */
    yard_scheduler_report(s, 1600, 1, &(yard_engine_report){ .step_age_us = 1500 });
    assert_int_equal(expect_send(s, 1600, submit(s, 1, 10), 1), 2); /* 1 is stuck since 100 */
    id = submit(s, 1, 10);
    expect_nothing(s, 9000);
    report(s, 9000, 0, 1, 0);
    assert_int_equal(expect_send(s, 9000, id, 1), 0);
    yard_scheduler_destroy(s);
}

static void requests_wait_for_room_then_are_refused(void **state)
{
    yard_scheduler *s = make(1);
    uint64_t id[5], none;
    yard_error err = { 0 };

    (void)state;
    for (int i = 0; i < 2; i++) {
        id[i] = submit(s, 1, 10);
        expect_send(s, 0, id[i], 1);
    }
    for (int i = 2; i < 5; i++) {
        id[i] = submit(s, 1, 10);
        expect_nothing(s, 0);
    }
    assert_int_equal(try_submit(s, 1, 10, UINT64_MAX, &none), YARD_EAGAIN);
    assert_int_equal(
        yard_scheduler_submit(s, &(yard_scheduler_request){ .n_prompt = 1 }, &none, &err),
        YARD_EAGAIN);
    assert_string_equal(err.message, "the queue is full: 3 requests wait");
    assert_true(yard_scheduler_finished(s, 5, id[0], 1, 3));
    expect_end(s, 0, id[0], YARD_END_FINISHED, YARD_NO_INSTANCE);
    /* the report still counts nothing, so there is room; then it counts both */
    expect_send(s, 0, id[2], 1);
    yard_scheduler_report(s, 0, 0, &(yard_engine_report){ .n_seen = 2, .n_requests = 1 });
    expect_nothing(s, 0); /* id[1] seen, id[2] not */
    yard_scheduler_report(s, 0, 0, &(yard_engine_report){ .n_seen = 3, .n_requests = 1 });
    expect_send(s, 0, id[3], 1);
    yard_scheduler_destroy(s);
}

static void clients_are_told_when_to_come_back(void **state)
{
    yard_scheduler *s = make(1);
    uint64_t id[5];

    (void)state;
    assert_int_equal(yard_scheduler_retry_after_s(s), 1);
    for (int i = 0; i < 5; i++) {
        yard_action a;

        id[i] = submit(s, 1, 10);
        yard_scheduler_next(s, 0, &a);
    }
    /* the queue of 3 loses one every 100 s: an average over 32 ends begins to tell */
    yard_scheduler_finished(s, 1, id[0], 1, 3);
    yard_scheduler_finished(s, 100000001, id[1], 1, 3);
    assert_int_equal(yard_scheduler_retry_after_s(s), 9);
    yard_scheduler_destroy(s);
}

static void deadlines_end_requests_wherever_they_are(void **state)
{
    yard_scheduler *s = make(1);
    uint64_t id[4];

    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(try_submit(s, 1, 10, 100 + i, &id[i]), YARD_OK);
        if (i < 2)
            expect_send(s, 0, id[i], 1);
    }
    assert_int_equal(yard_scheduler_wake_us(s), 100);
    expect_nothing(s, 99);
    yard_scheduler_started(s, id[0], 1);
    expect_end(s, 100, id[0], YARD_END_DEADLINE, 0); /* to be aborted there */
    expect_send(s, 100, id[2], 1);
    expect_end(s, 103, id[1], YARD_END_DEADLINE, 0);
    expect_end(s, 103, id[2], YARD_END_DEADLINE, 0);
    expect_end(s, 103, id[3], YARD_END_DEADLINE, YARD_NO_INSTANCE);
    expect_nothing(s, 103);
    assert_true(yard_scheduler_wake_us(s) == UINT64_MAX);
    yard_scheduler_destroy(s);
}

static void a_lost_instance_loses_only_what_has_streamed(void **state)
{
    yard_scheduler *s = make(2);
    uint64_t id[3];

    (void)state;
    report(s, 0, 1, 1000, 0);
    for (int i = 0; i < 2; i++) {
        id[i] = submit(s, 1, 10);
        assert_int_equal(expect_send(s, 0, id[i], 1), 0);
    }
    assert_true(yard_scheduler_started(s, id[1], 1));
    yard_scheduler_instance_lost(s, 0);
    id[2] = submit(s, 1, 10);
    expect_end(s, 0, id[1], YARD_END_INSTANCE_LOST, YARD_NO_INSTANCE);
    assert_int_equal(expect_send(s, 0, id[0], 2), 1); /* before the younger one */
    assert_int_equal(expect_send(s, 0, id[2], 1), 1);
    assert_false(yard_scheduler_started(s, id[0], 1)); /* late words of the first attempt */
    assert_false(yard_scheduler_finished(s, 0, id[0], 1, 5));
    assert_false(yard_scheduler_failed(s, id[0], 1, true));
    yard_scheduler_instance_lost(s, 1);
    expect_end(s, 0, id[0], YARD_END_INSTANCE_LOST, YARD_NO_INSTANCE); /* twice is enough */
    expect_nothing(s, 0);
    yard_scheduler_instance_up(s, 0, 1, 2);
    assert_int_equal(expect_send(s, 0, id[2], 2), 1);
    yard_scheduler_destroy(s);
}

static void a_lost_instance_holds_no_pages(void **state)
{
    yard_scheduler *s = make(3);

    (void)state;
    hold(s, 2, 7, 10);
    yard_scheduler_instance_up(s, 0, 2, 2);
    assert_int_equal(expect_send(s, 0, submit(s, 7, 10 * P), 1), 0);
    yard_scheduler_instance_lost(s, 1);
    hold(s, 1, 8, 10); /* late */
    yard_scheduler_instance_up(s, 0, 1, 2);
    assert_int_equal(expect_send(s, 0, submit(s, 8, 2 * P), 1), 1);
    yard_scheduler_destroy(s);
}

static void what_an_engine_refuses_is_tried_elsewhere_or_ends(void **state)
{
    yard_scheduler *s = make(2);
    const uint64_t a = submit(s, 1, 10);
    uint64_t b;

    (void)state;
    report(s, 0, 1, 500, 0);
    assert_int_equal(expect_send(s, 0, a, 1), 0);
    assert_true(yard_scheduler_failed(s, a, 1, true));
    assert_int_equal(expect_send(s, 0, a, 2), 1);
    assert_true(yard_scheduler_failed(s, a, 2, true));
    expect_end(s, 0, a, YARD_END_FAILED, YARD_NO_INSTANCE);
    yard_scheduler_instance_lost(s, 1);
    b = submit(s, 1, 10);
    assert_int_equal(expect_send(s, 0, b, 1), 0);
    assert_true(yard_scheduler_failed(s, b, 1, true));
    assert_int_equal(expect_send(s, 0, b, 2), 0); /* there is no other */
    assert_true(yard_scheduler_failed(s, b, 2, false));
    expect_end(s, 0, b, YARD_END_FAILED, YARD_NO_INSTANCE);
    assert_false(yard_scheduler_abort(s, b));
    yard_scheduler_destroy(s);
}

static void an_abort_says_where_to_stop(void **state)
{
    yard_scheduler *s = make(1);
    uint64_t a = submit(s, 1, 10), b;

    (void)state;
    expect_send(s, 0, a, 1);
    b = submit(s, 1, 10);
    assert_true(yard_scheduler_abort(s, b));
    assert_true(yard_scheduler_abort(s, a));
    assert_false(yard_scheduler_abort(s, a));
    expect_end(s, 0, b, YARD_END_ABORTED, YARD_NO_INSTANCE);
    expect_end(s, 0, a, YARD_END_ABORTED, 0);
    expect_nothing(s, 0);
    assert_false(yard_scheduler_abort(s, 0));
    assert_false(yard_scheduler_abort(s, UINT64_MAX));
    yard_scheduler_destroy(s);
}

static void bad_configs_are_refused(void **state)
{
    yard_scheduler_config config = YARD_SCHEDULER_CONFIG_INIT;
    yard_scheduler *s = NULL;
    uint64_t id;

    (void)state;
    assert_int_equal(yard_scheduler_create(&s, &config, NULL), YARD_EINVAL); /* no instances */
    config.n_instances = 1;
    config.max_queued = 0;
    assert_int_equal(yard_scheduler_create(&s, &config, NULL), YARD_EINVAL);
    config.max_queued = 1;
    config.max_attempts = 0;
    assert_int_equal(yard_scheduler_create(&s, &config, NULL), YARD_EINVAL);
    config.max_attempts = 1;
    config.size--;
    assert_int_equal(yard_scheduler_create(&s, &config, NULL), YARD_EINVAL);
    assert_null(s);
    yard_scheduler_destroy(NULL);
    s = make(0);
    assert_int_equal(yard_scheduler_submit(s, &(yard_scheduler_request){ 0 }, &id, NULL),
                     YARD_EINVAL);
    yard_scheduler_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_least_work_is_chosen),
        cmocka_unit_test(ties_go_to_fewer_running_tokens_then_the_lower_number),
        cmocka_unit_test(cached_tokens_are_no_work),
        cmocka_unit_test(waiting_for_a_cache_has_a_price),
        cmocka_unit_test(a_miss_counts_more_where_it_delays_others),
        cmocka_unit_test(evicted_and_unknown_pages_do_not_count),
        cmocka_unit_test(a_burst_meets_where_its_prefix_is_being_computed),
        cmocka_unit_test(paused_engines_get_nothing_before_they_report),
        cmocka_unit_test(silent_and_stuck_engines_get_nothing),
        cmocka_unit_test(requests_wait_for_room_then_are_refused),
        cmocka_unit_test(clients_are_told_when_to_come_back),
        cmocka_unit_test(deadlines_end_requests_wherever_they_are),
        cmocka_unit_test(a_lost_instance_loses_only_what_has_streamed),
        cmocka_unit_test(a_lost_instance_holds_no_pages),
        cmocka_unit_test(what_an_engine_refuses_is_tried_elsewhere_or_ends),
        cmocka_unit_test(an_abort_says_where_to_stop),
        cmocka_unit_test(bad_configs_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
