/* Requests through the front: answers, streams, refusals. ctest: sanitize */
#include <poll.h>

#include "serve/front_stage.h"

static void a_whole_answer(void **state)
{
    stage *s = open_stage(1, NULL, 8);

    (void)state;
    fake_say_up(0, 1, 4, 4096);
    run(s);
    assert_non_null(ask(s, YARD_ROUTE_CHAT, chat));
    assert_int_equal(fake_links[0]->n_sent, 1);
    say(s, 0, 0, 0, "Hello", YARD_RUNNING)->n_cached = 2;
    run(s);
    assert_false(last(s)->ended);
    say(s, 0, 0, 0, " world", YARD_FINISH_STOP);
    run(s);
    assert_int_equal(last(s)->status, 200);
    expect_text(last(s)->text, "choices.0.message.content", "Hello world");
    expect_text(last(s)->text, "choices.0.finish_reason", "stop");
    expect_text(last(s)->text, "object", "chat.completion");
    expect_text(last(s)->text, "id", "chatcmpl-id");
    expect_number(last(s)->text, "usage.prompt_tokens_details.cached_tokens", 2);
    assert_int_equal(last(s)->summary.n_cached, 2);
    close_stage(s);
}

static void a_stream(void **state)
{
    stage *s = open_stage(1, NULL, 8);

    (void)state;
    fake_say_up(0, 1, 4, 4096);
    run(s);
    ask(s, YARD_ROUTE_CHAT, chat_stream);
    say(s, 0, 0, 0, "Hello", YARD_RUNNING);
    run(s);
    assert_int_equal(last(s)->n_events, 1);
    assert_non_null(strstr(last(s)->text, "\"role\":\"assistant\""));
    say(s, 0, 0, 0, " wide", YARD_RUNNING);
    say(s, 0, 0, 0, " world", YARD_FINISH_LENGTH);
    run(s); /* both in one event: the front was behind */
    assert_int_equal(last(s)->n_events, 3);
    assert_true(last(s)->ended);
    expect_joined(last(s)->text, 0, "content", "Hello wide world");
    assert_non_null(strstr(last(s)->text, "\"finish_reason\":\"length\""));
    assert_non_null(strstr(last(s)->text, "\"choices\":[],\"usage\":{\"prompt_tokens\":"));
    assert_string_equal(last(s)->text + last(s)->n_bytes - 14, "data: [DONE]\n\n");
    close_stage(s);
}

static void characters_stay_whole(void **state)
{
    static const char text[] = "\xf0\x9f\x8e\x88"; /* a balloon: several tokens */
    stage *s = open_stage(1, NULL, 8);
    int32_t *ids = NULL;
    size_t n = 0;
    yard_error err;

    (void)state;
    assert_int_equal(yard_tokenizer_encode(s->tok, text, 4, true, &ids, &n, &err), YARD_OK);
    assert_true(n > 1);
    fake_say_up(0, 1, 4, 4096);
    run(s);
    ask(s, YARD_ROUTE_CHAT, chat_stream);
    for (size_t i = 0; i < n; i++) {
        fake_say_tokens(0, 0, 0, &ids[i], 1, i + 1 < n ? YARD_RUNNING : YARD_FINISH_LENGTH);
        run(s);
    }
    expect_joined(last(s)->text, 0, "content", text);
    assert_null(strstr(last(s)->text, "\xef\xbf\xbd"));
    ask(s, YARD_ROUTE_CHAT, chat_stream); /* cut off in the middle */
    fake_say_tokens(0, 1, 0, ids, 1, YARD_FINISH_LENGTH);
    run(s);
    expect_joined(last(s)->text, 0, "content", "\xef\xbf\xbd");
    free(ids);
    close_stage(s);
}

static void stop_strings_across_tokens(void **state)
{
    stage *s = open_stage(1, NULL, 8);

    (void)state;
    fake_say_up(0, 1, 4, 4096);
    run(s);
    ask(s, YARD_ROUTE_CHAT,
        "{\"model\":\"demo\",\"stream\":true,\"stop\":[\"END\",\"nothing\"],\"messages\":"
        "[{\"role\":\"user\",\"content\":\"Hi\"}]}");
    say(s, 0, 0, 0, "one E", YARD_RUNNING);
    run(s);
    expect_joined(last(s)->text, 0, "content", "one ");
    say(s, 0, 0, 0, "E", YARD_RUNNING);
    say(s, 0, 0, 0, "ND more", YARD_RUNNING);
    run(s);
    assert_true(last(s)->ended);
    expect_joined(last(s)->text, 0, "content", "one E");
    assert_non_null(strstr(last(s)->text, "\"stop_reason\":\"END\""));
    assert_true(fake_links[0]->sent[0].aborted);
    say(s, 0, 0, 0, "late", YARD_FINISH_ABORTED); /* belongs to nobody */
    run(s);
    close_stage(s);
}

static void two_choices(void **state)
{
    stage *s = open_stage(1, NULL, 8);

    (void)state;
    fake_say_up(0, 1, 4, 4096);
    run(s);
    ask(s, YARD_ROUTE_COMPLETIONS,
        "{\"model\":\"demo\",\"prompt\":[\"a\",\"b\"],\"n\":2,\"stop\":\"X\"}");
    assert_int_equal(fake_links[0]->n_sent, 2);
    assert_int_equal(fake_links[0]->sent[0].request.n_choices, 2);
    say(s, 0, 0, 1, "first one", YARD_FINISH_STOP);
    say(s, 0, 1, 0, "second nil X", YARD_RUNNING); /* a stop string: this choice alone ends */
    say(s, 0, 0, 0, "first nil", YARD_FINISH_STOP);
    say(s, 0, 1, 1, "second one", YARD_FINISH_LENGTH);
    run(s);
    assert_true(fake_links[0]->sent[1].aborted);
    assert_int_equal(fake_links[0]->sent[1].aborted_choice, 0);
    assert_true(last(s)->ended);
    expect_text(last(s)->text, "choices.0.text", "first nil");
    expect_text(last(s)->text, "choices.1.text", "first one");
    expect_text(last(s)->text, "choices.2.text", "second nil ");
    expect_text(last(s)->text, "choices.3.text", "second one");
    expect_number(last(s)->text, "choices.3.index", 3);
    expect_text(last(s)->text, "choices.3.finish_reason", "length");
    expect_number(last(s)->text, "usage.prompt_tokens", 2);
    close_stage(s);
}

static void logprobs_in_both_forms(void **state)
{
    stage *s = open_stage(1, NULL, 8);
    yard_link_tokens *t;

    (void)state;
    fake_say_up(0, 1, 4, 4096);
    run(s);
    ask(s, YARD_ROUTE_CHAT,
        "{\"model\":\"demo\",\"logprobs\":true,\"top_logprobs\":2,\"messages\":[{\"role\":"
        "\"user\",\"content\":\"Hi\"}]}");
    assert_int_equal(fake_links[0]->sent[0].request.n_logprobs, 3);
    fake_add_logprobs(say(s, 0, 0, 0, "Hello", YARD_FINISH_STOP), 3);
    run(s);
    expect_text(last(s)->text, "choices.0.message.content", "Hello");
    assert_non_null(strstr(last(s)->text, "\"top_logprobs\":[{\"token\""));
    assert_non_null(strstr(last(s)->text, "\"bytes\":[72"));

    ask(s, YARD_ROUTE_COMPLETIONS,
        "{\"model\":\"demo\",\"prompt\":\"One\",\"echo\":true,\"logprobs\":1,\"max_tokens\":1}");
    assert_true(fake_links[0]->sent[1].request.prompt_logprobs);
    t = say(s, 0, 1, 0, "One", YARD_RUNNING);
    fake_add_logprobs(t, 2);
    t->of_prompt = true;
    fake_add_logprobs(say(s, 0, 1, 0, " two", YARD_FINISH_LENGTH), 2);
    run(s);
    expect_text(last(s)->text, "choices.0.text", "One two");
    expect_number(last(s)->text, "choices.0.logprobs.text_offset.0", 0);
    {
        json_t *root = parse(last(s)->text);
        const json_t *offsets = member(root, "choices.0.logprobs.text_offset");
        const json_t *tokens = member(root, "choices.0.logprobs.tokens");
        size_t i, at = 0;

        assert_int_equal(json_array_size(offsets), json_array_size(tokens));
        for (i = 0; i < json_array_size(tokens); i++) {
            assert_int_equal(json_integer_value(json_array_get(offsets, i)), at);
            at += json_string_length(json_array_get(tokens, i));
        }
        assert_int_equal(at, strlen("One two"));
        json_decref(root);
    }
    close_stage(s);
}

static void thoughts_are_apart(void **state)
{
    stage *s = open_stage(1, "deepseek-r1", 8);

    (void)state;
    fake_say_up(0, 1, 4, 4096);
    run(s);
    ask(s, YARD_ROUTE_CHAT,
        "{\"model\":\"demo\",\"stream\":true,\"stop\":\"STOP\",\"messages\":[{\"role\":\"user\","
        "\"content\":\"Hi\"}],\"stream_options\":{\"include_usage\":true}}");
    say(s, 0, 0, 0, "a STOP", YARD_RUNNING); /* no stop string within thoughts */
    run(s);
    say(s, 0, 0, 0, "</thi", YARD_RUNNING);
    run(s);
    say(s, 0, 0, 0, "nk>b", YARD_RUNNING);
    run(s);
    say(s, 0, 0, 0, " ST", YARD_RUNNING);
    run(s);
    say(s, 0, 0, 0, "OP c", YARD_RUNNING);
    run(s);
    assert_true(last(s)->ended);
    expect_joined(last(s)->text, 0, "reasoning_content", "a STOP");
    expect_joined(last(s)->text, 0, "content", "b ");
    assert_null(strstr(last(s)->text, "\"reasoning_tokens\":0"));
    close_stage(s);
}

static void tokens_and_back(void **state)
{
    stage *s = open_stage(1, NULL, 8);

    (void)state;
    assert_null(ask(s, YARD_ROUTE_TOKENIZE, "{\"prompt\":\"Hello\"}"));
    assert_int_equal(last(s)->status, 200);
    expect_number(last(s)->text, "max_model_len", 4096);
    assert_null(ask(s, YARD_ROUTE_DETOKENIZE, "{\"tokens\":[72, 1]}"));
    assert_int_equal(last(s)->status, 200);
    assert_null(ask(s, YARD_ROUTE_DETOKENIZE, "{\"tokens\":[1000000]}"));
    assert_int_equal(last(s)->status, 400);
    expect_text(last(s)->text, "error.param", "tokens");
    close_stage(s);
}

static void refusals(void **state)
{
    stage *s = open_stage(1, NULL, 1);

    (void)state;
    assert_null(ask(s, YARD_ROUTE_CHAT, chat)); /* no engine yet */
    assert_int_equal(last(s)->status, 503);
    assert_int_equal(last(s)->retry_after_s, 1);
    fake_say_up(0, 1, 1, 8);
    run(s);
    assert_null(ask(s, YARD_ROUTE_CHAT, "{"));
    assert_int_equal(last(s)->status, 400);
    assert_null(ask(s, YARD_ROUTE_COMPLETIONS, "{\"model\":\"x\",\"prompt\":\"a\"}"));
    assert_int_equal(last(s)->status, 404);
    expect_text(last(s)->text, "error.code", "model_not_found");
    assert_null(
        ask(s, YARD_ROUTE_COMPLETIONS, "{\"model\":\"demo\",\"prompt\":[1,2,3,4,5,6,7,8]}"));
    assert_int_equal(last(s)->status, 400);
    expect_text(last(s)->text, "error.code", "context_length_exceeded");
    assert_non_null(strstr(last(s)->text, "maximum context length is 8 tokens"));
    assert_null(ask(s, YARD_ROUTE_COMPLETIONS, "{\"model\":\"demo\",\"prompt\":[1,4096]}"));
    assert_int_equal(last(s)->status, 400);
    assert_null(ask(s, YARD_ROUTE_COMPLETIONS, "{\"model\":\"demo\",\"prompt\":\"\"}"));
    assert_int_equal(last(s)->status, 400);
    assert_null(ask(s, YARD_ROUTE_COMPLETIONS, "{\"model\":\"demo\",\"prompt\":[1],\"n\":2}"));
    assert_int_equal(last(s)->status, 400);
    expect_text(last(s)->text, "error.param", "n");
    /* one runs, one waits, the third is one too many */
    assert_non_null(ask(s, YARD_ROUTE_COMPLETIONS, "{\"model\":\"demo\",\"prompt\":[1]}"));
    assert_non_null(ask(s, YARD_ROUTE_COMPLETIONS, "{\"model\":\"demo\",\"prompt\":[2]}"));
    assert_null(ask(s, YARD_ROUTE_COMPLETIONS, "{\"model\":\"demo\",\"prompt\":[3]}"));
    assert_int_equal(last(s)->status, 429);
    assert_true(last(s)->retry_after_s >= 1);
    say(s, 0, 0, 0, "a", YARD_FINISH_STOP);
    run(s);
    assert_int_equal(fake_links[0]->n_sent, 2);
    say(s, 0, 1, 0, "a", YARD_FINISH_STOP);
    run(s);
    close_stage(s);
}

static void a_long_body_is_read_beside(void **state)
{
    stage *s = open_stage(1, NULL, 8);
    const size_t n = 1 << 20;
    char *body = malloc(n + 200);
    int fds[2];
    struct pollfd wait = { .events = POLLIN };
    int at = sprintf(body, "{\"model\":\"demo\",\"messages\":[{\"role\":\"user\",\"content\":\"");

    (void)state;
    memset(body + at, 'a', n);
    strcpy(body + at + n, "\"}]}");
    fake_say_up(0, 1, 4, 4096);
    run(s);
    yard_front_fds(s->front, fds);
    wait.fd = fds[0];
    assert_non_null(ask(s, YARD_ROUTE_CHAT, body));
    assert_false(last(s)->ended);
    assert_int_equal(poll(&wait, 1, 60000), 1);
    run(s);
    assert_int_equal(last(s)->status, 400);
    expect_text(last(s)->text, "error.code", "context_length_exceeded");
    yard_front_cancel(s->front, s->now_us,
                      ask(s, YARD_ROUTE_CHAT, body)); /* gone while it is read */
    last(s)->deaf = true;
    free(body);
    close_stage(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_whole_answer),
        cmocka_unit_test(a_stream),
        cmocka_unit_test(characters_stay_whole),
        cmocka_unit_test(stop_strings_across_tokens),
        cmocka_unit_test(two_choices),
        cmocka_unit_test(logprobs_in_both_forms),
        cmocka_unit_test(thoughts_are_apart),
        cmocka_unit_test(tokens_and_back),
        cmocka_unit_test(refusals),
        cmocka_unit_test(a_long_body_is_read_beside),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
