/* Each allocation fails in turn while requests pass through the front: every one of them still
 * ends, and nothing is leaked. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <jansson.h>

#include "failing_alloc.h"
#include "serve/fake_link.h"

#if FAILING_ALLOC

/* jansson 2.14 writes past its memory after some failed allocations of its own, so those succeed
 * here. */
static void *never_refuse(size_t n)
{
    return count_live(__libc_malloc(n));
}

typedef struct client {
    bool ended, whole; /* whole: as if memory had been there */
} client;

static void on_answer(void *ctx, const yard_front_summary *summary, const yard_api_out *body,
                      uint32_t retry_after_s)
{
    client *c = ctx;

    (void)retry_after_s;
    assert_false(c->ended);
    assert_true(summary->http_status == 200 || summary->http_status == 500);
    c->ended = true;
    c->whole = summary->http_status == 200 && !body->no_memory;
}

static bool on_events(void *ctx, const yard_front_summary *summary, const yard_api_out *events)
{
    client *c = ctx;

    assert_false(c->ended);
    c->ended = summary || events->no_memory;
    c->whole = summary && summary->http_status == 200 && !events->no_memory;
    return !events->no_memory;
}

static const yard_front_sink sink = { on_answer, on_events };

static yard_front *open_front(void)
{
    static const char *const address = "a:1";
    yard_front_config config = YARD_FRONT_CONFIG_INIT;
    yard_front *front = NULL;
    yard_error err = { 0 };

    config.model_dir = "models/demo";
    config.model = "demo";
    config.engine = &address;
    config.n_engines = 1;
    config.link = &fake_ops;
    if (yard_front_create(&front, &config, &err) != YARD_OK)
        fail_msg("%s", err.message);
    fake_say_up(0, 1, 128, 4096);
    yard_front_run(front, 1);
    return front;
}

static void answer(void)
{
    const int32_t token[3] = { 72, 300, 301 };

    for (uint32_t i = 0; i < fake_links[0]->n_sent; i++)
        for (uint32_t k = 0; k < 2 * fake_links[0]->sent[i].request.n_choices; k++) {
            const yard_request *r = &fake_links[0]->sent[i].request;
            yard_link_tokens *t =
                fake_say_tokens(0, i, k / 2, token, 3, k % 2 ? YARD_FINISH_LENGTH : YARD_RUNNING);

            if (r->n_logprobs > 0)
                fake_add_logprobs(t, r->n_logprobs);
        }
}

static void run_each(yard_front_route route, const char *body)
{
    bool failed = true;

    for (long n = 1; failed; n++) {
        client c = { 0 };
        yard_front_health h;
        yard_front *front;
        char *copy;

        n_blocks = n_live = 0;
        fail_at = 0; /* none while it is made */
        counting = true;
        front = open_front();
        copy = strdup(body);
        n_blocks = 0;
        fail_at = n;
        yard_front_submit(front, 1, route, copy, strlen(body), "id", &sink, &c);
        answer();
        yard_front_run(front, 1);
        failed = n_blocks >= fail_at;
        fail_at = 0;
        assert_true(c.ended);
        assert_true(failed || c.whole);
        yard_front_get_health(front, 1, &h);
        assert_int_equal(h.n_jobs, 0);
        assert_int_equal(h.n_queued, 0);
        yard_front_destroy(front);
        counting = false;
        if (n_live != 0)
            fail_msg("allocation %ld fails: %ld blocks are leaked", n, (long)n_live);
        assert_true(n < 1000);
    }
}

static void a_stream(void **state)
{
    (void)state;
    run_each(
        YARD_ROUTE_CHAT,
        "{\"model\":\"demo\",\"stream\":true,\"stop\":[\"never\",\"said\"],\"messages\":[{"
        "\"role\":\"user\",\"content\":\"Hi\"}],\"logprobs\":true,\"top_logprobs\":2,\"n\":2}");
}

static void a_whole_answer(void **state)
{
    (void)state;
    run_each(YARD_ROUTE_COMPLETIONS,
             "{\"model\":\"demo\",\"prompt\":[\"a\",[1,2]],\"echo\":true,\"stop\":\"x\"}");
}

static void tokens_and_back(void **state)
{
    (void)state;
    run_each(YARD_ROUTE_TOKENIZE, "{\"prompt\":\"Hello\"}");
    run_each(YARD_ROUTE_DETOKENIZE, "{\"tokens\":[72,300]}");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream),
        cmocka_unit_test(a_whole_answer),
        cmocka_unit_test(tokens_and_back),
    };
    json_set_alloc_funcs(never_refuse, free);
    yard_front_destroy(open_front()); /* what libc takes once and keeps */
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

int main(void)
{
    return 77;
}

#endif
