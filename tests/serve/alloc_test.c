/* Each allocation of ours fails in turn, while a request is read, scheduled and answered: memory
 * ran out, and nothing else happened. Nothing is leaked either way. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>
#include <jansson.h>

#include "failing_alloc.h"
#include "serve/api_answer.h"
#include "serve/api_request.h"
#include "serve/serve.h"

#if FAILING_ALLOC

/* jansson 2.14 writes past its memory after some failed allocations of its own, so those succeed
 * here. */
static void *never_refuse(size_t n)
{
    return count_live(__libc_malloc(n));
}

static yard_status read_chat(void)
{
    static const char body[] =
        "{\"model\":\"m\",\"messages\":[{\"role\":\"developer\",\"content\":\"hi\"}],\"stop\":["
        "\"a\"],"
        "\"stop_token_ids\":[1],\"logit_bias\":{\"1\":2},\"seed\":3,\"top_p\":0.5}";
    const yard_api_limits limits = YARD_API_LIMITS_INIT;
    yard_api_request r = { 0 };
    yard_api_error err = { 0 };
    const yard_status st = yard_api_parse_chat(&r, body, sizeof(body) - 1, &limits, &err);

    assert_true(st == YARD_OK || (st == YARD_ENOMEM && err.http_status == 500));
    yard_api_request_release(&r);
    return st;
}

static yard_status read_completion(void)
{
    static const char body[] = "{\"model\":\"m\",\"prompt\":[[1,2],[3]]}";
    const yard_api_limits limits = YARD_API_LIMITS_INIT;
    yard_api_request r = { 0 };
    yard_api_error err = { 0 };
    const yard_status st = yard_api_parse_completion(&r, body, sizeof(body) - 1, &limits, &err);

    assert_true(st == YARD_OK || (st == YARD_ENOMEM && err.http_status == 500));
    yard_api_request_release(&r);
    return st;
}

static yard_status write_answer(void)
{
    const yard_api_head head = { .id = "i", .model = "m", .chat = true };
    const yard_api_usage usage = { 0 };
    yard_api_out out = { 0 };
    bool no_memory;

    yard_api_put_answer(&out, &head, &(yard_api_choice){ .text = "x", .n_text = 1 }, 1, &usage);
    no_memory = out.no_memory;
    yard_api_out_release(&out);
    return no_memory ? YARD_ENOMEM : YARD_OK;
}

/* A request that is not accepted leaves no trace: the others go their way. */
static yard_status schedule(void)
{
    yard_scheduler_config config = YARD_SCHEDULER_CONFIG_INIT;
    const yard_page_hash page[2] = { { { 1, 1 } }, { { 2, 2 } } };
    const yard_scheduler_request request = {
        .n_prompt = 130, .page = page, .max_new_tokens = 1, .deadline_us = UINT64_MAX
    };
    yard_scheduler *s = NULL;
    uint32_t n_accepted = 0, n_ended = 0;
    yard_status st;
    yard_action a;

    config.n_instances = 2;
    config.max_index_pages = 100;
    st = yard_scheduler_create(&s, &config, NULL);
    if (st != YARD_OK)
        return st;
    yard_scheduler_instance_up(s, 0, 1, 100);
    for (int i = 0; i < 70; i++) { /* the table of requests grows once */
        uint64_t id;
        const yard_status submitted = yard_scheduler_submit(s, &request, &id, NULL);

        assert_true(submitted == YARD_OK || submitted == YARD_ENOMEM);
        st = submitted ? submitted : st;
        n_accepted += submitted == YARD_OK;
        while (yard_scheduler_next(s, 0, &a))
            assert_true(a.kind == YARD_ACTION_SEND && yard_scheduler_started(s, a.id, 1));
    }
    yard_scheduler_instance_lost(s, 1);
    while (yard_scheduler_next(s, 0, &a))
        n_ended += a.kind == YARD_ACTION_END;
    assert_int_equal(n_ended, n_accepted);
    yard_scheduler_destroy(s);
    return st;
}

static void fail_each(yard_status (*run)(void))
{
    yard_status st = YARD_ENOMEM;

    for (long n = 1; st != YARD_OK; n++) {
        n_blocks = 0;
        n_live = 0;
        fail_at = n;
        counting = true;
        st = run();
        counting = false;
        assert_true(st == YARD_OK || st == YARD_ENOMEM);
        assert_int_equal(n_live, 0);
        assert_true(n < 1000);
    }
    assert_true(n_blocks < fail_at); /* that run had them all */
}

static void a_chat_request(void **state)
{
    (void)state;
    fail_each(read_chat);
}

static void a_completion_request(void **state)
{
    (void)state;
    fail_each(read_completion);
}

static void an_answer(void **state)
{
    (void)state;
    fail_each(write_answer);
}

static void the_scheduler(void **state)
{
    (void)state;
    fail_each(schedule);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_chat_request),
        cmocka_unit_test(a_completion_request),
        cmocka_unit_test(an_answer),
        cmocka_unit_test(the_scheduler),
    };
    json_set_alloc_funcs(never_refuse, free);
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

int main(void)
{
    return 77;
}

#endif
