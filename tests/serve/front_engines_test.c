/* The front when engines are lost, end, fail or are silent, and clients leave. ctest: sanitize */
#include "serve/front_stage.h"

static void a_lost_engine(void **state)
{
    stage *s = open_stage(2, NULL, 8);
    client *streamed;

    (void)state;
    fake_say_up(0, 1, 4, 4096);
    run(s);
    ask(s, YARD_ROUTE_CHAT, chat_stream);
    streamed = last(s);
    say(s, 0, 0, 0, "Hello", YARD_RUNNING);
    run(s);
    ask(s, YARD_ROUTE_CHAT, chat_stream); /* has streamed nothing */
    say(s, 0, 1, 0, "lost", YARD_RUNNING);
    fake_say_down(0);              /* together with its first token */
    ask(s, YARD_ROUTE_CHAT, chat); /* and a whole answer */
    assert_int_equal(fake_links[0]->n_sent, 3);
    fake_say_up(1, 1, 4, 4096);
    run(s);
    assert_true(streamed->ended);
    assert_non_null(strstr(streamed->text, "data: {\"error\":{"));
    assert_null(strstr(streamed->text, "[DONE]"));
    assert_int_equal(streamed->summary.http_status, 503);
    assert_int_equal(fake_links[1]->n_sent, 2);
    say(s, 1, 0, 0, "again", YARD_FINISH_STOP);
    say(s, 1, 1, 0, "whole", YARD_FINISH_STOP);
    run(s);
    expect_joined(s->client[1].text, 0, "content", "again");
    expect_text(s->client[2].text, "choices.0.message.content", "whole");
    close_stage(s);
}

/* What it has goes on; new requests go elsewhere, or wait until there is a place for them. */
static void an_engine_that_ends(void **state)
{
    stage *s = open_stage(2, NULL, 8);

    (void)state;
    fake_say_up(0, 1, 4, 4096);
    fake_say_up(1, 1, 1, 4096);
    run(s);
    ask(s, YARD_ROUTE_COMPLETIONS, "{\"model\":\"demo\",\"prompt\":\"a\",\"stream\":true}");
    run(s);
    assert_int_equal(fake_links[0]->n_sent, 1);
    fake_say(0, YARD_LINK_PAUSED);
    run(s);
    for (int i = 0; i < 2; i++)
        ask(s, YARD_ROUTE_COMPLETIONS, "{\"model\":\"demo\",\"prompt\":\"b\"}");
    run(s);
    assert_int_equal(fake_links[0]->n_sent, 1);
    assert_int_equal(fake_links[1]->n_sent, 1);
    say(s, 0, 0, 0, " day", YARD_FINISH_LENGTH);
    run(s);
    assert_non_null(strstr(s->client[0].text, "[DONE]"));
    fake_say_down(0);
    say(s, 1, 0, 0, " day", YARD_FINISH_LENGTH);
    run(s);
    assert_int_equal(fake_links[1]->n_sent, 2);
    say(s, 1, 1, 0, " day", YARD_FINISH_LENGTH);
    run(s);
    for (int i = 1; i < 3; i++)
        expect_text(s->client[i].text, "choices.0.text", " day");
    close_stage(s);
}

static void an_engine_that_fails_a_request(void **state)
{
    stage *s = open_stage(2, NULL, 8);
    yard_link_tokens *t;

    (void)state;
    fake_say_up(0, 1, 4, 4096);
    fake_say_up(1, 1, 4, 4096);
    run(s);
    ask(s, YARD_ROUTE_CHAT, chat);
    t = say(s, 0, 0, 0, "", YARD_FINISH_ERROR);
    t->retry = true;
    t->message = "no room";
    run(s);
    assert_int_equal(fake_links[1]->n_sent, 1);
    t = say(s, 1, 0, 0, "", YARD_FINISH_ERROR);
    t->message = "logits are not finite";
    run(s);
    assert_int_equal(last(s)->status, 500);
    expect_text(last(s)->text, "error.message", "logits are not finite");
    close_stage(s);
}

static void clients_that_leave(void **state)
{
    stage *s = open_stage(1, NULL, 8);
    yard_front_job *job;
    yard_front_health h;

    (void)state;
    fake_say_up(0, 1, 1, 4096);
    run(s);
    job = ask(s, YARD_ROUTE_CHAT, chat_stream);
    last(s)->deaf = true;
    yard_front_cancel(s->front, s->now_us, job); /* before the first token */
    assert_true(fake_links[0]->sent[0].aborted);
    ask(s, YARD_ROUTE_CHAT, chat_stream);
    last(s)->deaf = true;
    say(s, 0, 1, 0, "not read", YARD_RUNNING);
    run(s);
    assert_true(fake_links[0]->sent[1].aborted);
    ask(s, YARD_ROUTE_CHAT, chat);
    job = ask(s, YARD_ROUTE_CHAT, chat); /* waits */
    last(s)->deaf = true;
    yard_front_cancel(s->front, s->now_us, job);
    assert_int_equal(fake_links[0]->n_sent, 3);
    say(s, 0, 2, 0, "read", YARD_FINISH_STOP);
    run(s);
    yard_front_get_health(s->front, s->now_us, &h);
    assert_int_equal(h.n_jobs, 0);
    close_stage(s);
}

static void silence_and_its_end(void **state)
{
    stage *s = open_stage(1, NULL, 8);

    (void)state;
    fake_say_up(0, 1, 4, 4096);
    run(s);
    ask(s, YARD_ROUTE_CHAT, chat_stream);
    ask(s, YARD_ROUTE_CHAT, chat);
    s->now_us += 6 * (uint64_t)SECOND_US;
    assert_true(yard_front_wake_us(s->front) <= s->now_us);
    run(s);
    assert_string_equal(s->client[0].text, ": keep-alive\n\n");
    assert_int_equal(s->client[1].status, 0);
    s->now_us += 3600 * (uint64_t)SECOND_US;
    run(s);
    assert_non_null(strstr(s->client[0].text, "data: {\"error\":{"));
    assert_int_equal(s->client[1].status, 504);
    assert_true(fake_links[0]->sent[1].aborted);
    close_stage(s);
}

static void engines_that_never_answer_are_named_once(void **state)
{
    stage *s = open_stage(3, NULL, 8);

    (void)state;
    assert_true(yard_front_wake_us(s->front) <= s->now_us);
    run(s);
    fake_say_up(1, 1, 4, 4096);
    s->now_us += 2 * (uint64_t)SECOND_US;
    run(s);
    assert_int_equal(s->n_missing, 0);
    s->now_us += 1 * (uint64_t)SECOND_US;
    assert_true(yard_front_wake_us(s->front) <= s->now_us);
    run(s);
    assert_int_equal(s->n_missing, 2);
    s->now_us += 60 * (uint64_t)SECOND_US;
    run(s);
    assert_int_equal(s->n_missing, 2);
    close_stage(s);
}

/* As when a model is exchanged engine by engine. */
static void engines_of_another_kind_take_over(void **state)
{
    stage *s = open_stage(3, NULL, 8);
    yard_front_health h;

    (void)state;
    fake_say_up(0, 1, 4, 4096);
    fake_say_up(1, 1, 4, 2048);
    fake_say_up(2, 1, 4, 1024);
    run(s);
    yard_front_get_health(s->front, s->now_us, &h);
    assert_int_equal(h.n_pods_up, 1);
    assert_int_equal(yard_front_context(s->front), 4096);
    fake_say_down(2); /* unused, and gone: it must not take over */
    run(s);
    fake_say_down(0);
    run(s);
    yard_front_get_health(s->front, s->now_us, &h);
    assert_int_equal(h.n_pods_up, 1);
    assert_int_equal(yard_front_context(s->front), 2048);
    ask(s, YARD_ROUTE_CHAT, chat);
    assert_int_equal(fake_links[1]->n_sent, 1);
    say(s, 1, 0, 0, "Hello", YARD_FINISH_STOP);
    fake_say_up(0, 1, 4, 2048);
    run(s);
    expect_text(last(s)->text, "choices.0.message.content", "Hello");
    yard_front_get_health(s->front, s->now_us, &h);
    assert_int_equal(h.n_pods_up, 2);
    close_stage(s);
}

static void silence_is_no_progress(void **state)
{
    stage *s = open_stage(1, NULL, 8);
    yard_front_health h;

    (void)state;
    fake_say_up(0, 1, 4, 4096);
    run(s);
    yard_front_get_health(s->front, s->now_us + SECOND_US, &h);
    assert_false(h.stuck);
    yard_front_get_health(s->front, s->now_us + 3 * (uint64_t)SECOND_US, &h);
    assert_true(h.stuck);
    fake_say(0, YARD_LINK_PAUSED); /* so nothing else is to be heard */
    run(s);
    yard_front_get_health(s->front, s->now_us + 60 * (uint64_t)SECOND_US, &h);
    assert_false(h.stuck);
    close_stage(s);
}

static void metrics_are_prometheus(void **state)
{
    stage *s = open_stage(2, NULL, 8);
    yard_api_out out = { 0 };

    (void)state;
    fake_say_up(0, 2, 4, 4096);
    fake_say_up(1, 1, 4, 1024); /* of another context: not used, so its silence is no news */
    run(s);
    ask(s, YARD_ROUTE_CHAT, chat);
    say(s, 0, 0, 0, "Hello", YARD_FINISH_STOP);
    run(s);
    yard_front_put_metrics(s->front, s->now_us + 60 * (uint64_t)SECOND_US, &out);
    assert_non_null(
        strstr(out.bytes, "switchyard_requests_total{route=\"chat\",status=\"200\"} 1\n"));
    assert_non_null(strstr(out.bytes, "switchyard_instance_up{pod=\"0\",instance=\"1\"} 1\n"));
    assert_non_null(
        strstr(out.bytes, "switchyard_instance_step_age_seconds{pod=\"1\",instance=\"0\"} 0\n"));
    assert_non_null(strstr(out.bytes, "switchyard_time_to_first_token_seconds_count 1\n"));
    yard_api_out_release(&out);
    close_stage(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_lost_engine),
        cmocka_unit_test(an_engine_that_ends),
        cmocka_unit_test(an_engine_that_fails_a_request),
        cmocka_unit_test(clients_that_leave),
        cmocka_unit_test(silence_and_its_end),
        cmocka_unit_test(engines_that_never_answer_are_named_once),
        cmocka_unit_test(engines_of_another_kind_take_over),
        cmocka_unit_test(silence_is_no_progress),
        cmocka_unit_test(metrics_are_prometheus),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
