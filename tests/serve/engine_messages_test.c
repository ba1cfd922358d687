/* Messages of the engine RPC there and back: all fields, their absence, parts, and bytes that are
 * no message or too large a one. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "serve/engine_messages.h"

enum { MAX_BYTES = 1 << 20 };

static yard_reader *reader;

static void requests_come_back(void **state)
{
    const int32_t prompt[] = { 0, 5, 2147483647 }, stop[] = { 7 };
    const yard_logit_bias bias[] = { { 3, -1.5f }, { 9, 100.0f } };
    yard_request r = YARD_REQUEST_INIT;
    yard_request_message m;
    yard_bytes b = { 0 };

    (void)state;
    r.prompt = prompt;
    r.n_prompt = 3;
    r.max_new_tokens = 0; /* not the same as none given */
    r.sampling = (yard_sampling){ 0.5f, 0.25f, 0.125f, 40, 1.5f, -0.5f, 0.75f, UINT64_MAX };
    r.bias = bias;
    r.n_bias = 2;
    r.ignore_eos = true;
    r.stop_token = stop;
    r.n_stop_token = 1;
    r.n_choices = 4;
    r.n_logprobs = 6;
    r.prompt_logprobs = true;
    assert_true(yard_encode_request(&b, 3, UINT64_MAX - 1, &r));
    assert_true(yard_decode_request(reader, b.data, b.n, &m));
    assert_false(m.is_abort);
    assert_true(m.tag == UINT64_MAX - 1 && m.instance == 3);
    assert_int_equal(m.request.n_prompt, 3);
    assert_memory_equal(m.request.prompt, prompt, sizeof(prompt));
    assert_int_equal(m.request.max_new_tokens, 0);
    assert_memory_equal(&m.request.sampling, &r.sampling, sizeof(r.sampling));
    assert_int_equal(m.request.n_bias, 2);
    assert_memory_equal(m.request.bias, bias, sizeof(bias));
    assert_int_equal(m.request.n_stop_token, 1);
    assert_int_equal(m.request.stop_token[0], 7);
    assert_true(m.request.ignore_eos && m.request.prompt_logprobs);
    assert_true(m.request.n_choices == 4 && m.request.n_logprobs == 6);
    yard_bytes_release(&b);
}

/* What a client of another language leaves out. */
static void absent_fields_are_defaults(void **state)
{
    const uint8_t bytes[] = { 0x0a, 0x03, 0x1a, 0x01, 0x05 }; /* a request with the prompt {5} */
    const yard_request defaults = YARD_REQUEST_INIT;
    yard_request_message m;

    (void)state;
    assert_true(yard_decode_request(reader, bytes, sizeof(bytes), &m));
    assert_int_equal(m.request.n_prompt, 1);
    assert_int_equal(m.request.prompt[0], 5);
    assert_int_equal(m.request.max_new_tokens, defaults.max_new_tokens);
    assert_int_equal(m.request.n_choices, 1);
    assert_memory_equal(&m.request.sampling, &defaults.sampling, sizeof(defaults.sampling));
}

static void aborts_come_back(void **state)
{
    yard_request_message m;
    yard_bytes b = { 0 };

    (void)state;
    assert_true(yard_encode_abort(&b, 5, YARD_ALL_CHOICES));
    assert_true(yard_decode_request(reader, b.data, b.n, &m));
    assert_true(m.is_abort && m.tag == 5 && m.choice == YARD_ALL_CHOICES);
    assert_true(yard_encode_abort(&b, 6, 0));
    assert_true(yard_decode_request(reader, b.data, b.n, &m));
    assert_true(m.is_abort && m.tag == 6 && m.choice == 0);
    yard_bytes_release(&b);
}

static void outputs_come_back_in_parts(void **state)
{
    const int32_t tokens[] = { 4, 0, 6 };
    const yard_token_logprob logprobs[] = { { 4, -0.5f },     { 9, -1.0f }, { 0, NAN },
                                            { 1, -INFINITY }, { 6, 0.0f },  { 2, -3.0f } };
    const yard_link_tokens sent[] = {
        { .tag = 1,
          .choice = 2,
          .n_cached = 64,
          .token = tokens,
          .n_tokens = 3,
          .logprob = logprobs,
          .n_logprobs = 2,
          .of_prompt = true },
        { .tag = UINT64_MAX, .token = tokens, .n_tokens = 1, .finish = YARD_FINISH_STOP },
        { .tag = 3, .finish = YARD_FINISH_ERROR, .message = "why", .retry = true },
    };
    yard_outputs outputs = { 0 };
    yard_bytes b = { 0 };
    yard_link_tokens t;
    uint64_t stream;

    (void)state;
    for (int i = 0; i < 3; i++)
        assert_true(yard_outputs_add(&outputs, &sent[i]));
    assert_int_equal(yard_outputs_part(&outputs, 0, 1), 1);
    assert_int_equal(yard_outputs_part(&outputs, 0, 1000), 3);
    for (size_t first = 0; first < 3; first++) {
        assert_true(yard_encode_tokens(&b, &outputs, first, 3));
        assert_true(yard_decode_tokens(reader, b.data, b.n, &stream));
        assert_int_equal(stream, 0);
        for (size_t i = first; i < 3; i++) {
            assert_true(yard_reader_next_output(reader, &t));
            assert_true(t.tag == sent[i].tag && t.choice == sent[i].choice);
            assert_true(t.finish == sent[i].finish && t.retry == sent[i].retry);
            assert_true(t.n_cached == sent[i].n_cached && t.of_prompt == sent[i].of_prompt);
            assert_int_equal(t.n_tokens, sent[i].n_tokens);
            if (t.n_tokens)
                assert_memory_equal(t.token, tokens, t.n_tokens * sizeof(*tokens));
            assert_int_equal(t.n_logprobs, sent[i].n_logprobs);
            if (t.n_logprobs)
                assert_memory_equal(t.logprob, logprobs, sizeof(logprobs));
            assert_int_equal(t.message != NULL, i == 2);
        }
        assert_string_equal(t.message, "why");
        assert_false(yard_reader_next_output(reader, &t));
    }
    yard_outputs_clear(&outputs);
    assert_int_equal(outputs.n_bytes, 0);
    assert_true(yard_encode_stream(&b, 77));
    assert_true(yard_decode_tokens(reader, b.data, b.n, &stream));
    assert_int_equal(stream, 77);
    assert_false(yard_reader_next_output(reader, &t));
    yard_outputs_release(&outputs);
    yard_bytes_release(&b);
}

static void states_come_back(void **state)
{
    const yard_page_hash pages[] = { { { 1, 2 } }, { { UINT64_MAX, 0x0102030405060708u } } };
    const yard_engine_report report = { 1, 2, 3, 4, 5, 6 };
    const yard_instance_state parts[] = {
        { .instance = 1, .change = YARD_PAGES_UNKNOWN },
        { .instance = 1, .change = YARD_PAGE_ADDED, .page = pages, .n_pages = 2 },
        { .instance = 0, .report = &report },
        { .instance = 1, .change = YARD_PAGE_EVICTED, .page = pages + 1, .n_pages = 1 },
        { .instance = 1,
          .report = &report,
          .change = YARD_PAGE_ADDED,
          .page = pages,
          .n_pages = 1 },
    };
    static const struct {
        yard_link_event_kind kind;
        uint32_t instance, n_pages;
    } want[] = { { YARD_LINK_PAGES_UNKNOWN, 1, 0 }, { YARD_LINK_PAGES_ADDED, 1, 2 },
                 { YARD_LINK_REPORT, 0, 0 },        { YARD_LINK_PAGES_EVICTED, 1, 1 },
                 { YARD_LINK_REPORT, 1, 0 },        { YARD_LINK_PAGES_ADDED, 1, 1 } };
    yard_pod_state pod = { .pod = { 2, 3, 4, 5, pages[1], 6, "a model" },
                           .serves = true,
                           .n_ranks = 7,
                           .n_ranks_alive = 8 };
    yard_pod_state got = { 0 };
    yard_link_event e;
    yard_bytes b = { 0 };
    bool has_pod;

    (void)state;
    assert_true(yard_encode_state(&b, &pod, parts, 5));
    assert_true(yard_decode_state(reader, b.data, b.n, &has_pod, &got));
    assert_true(has_pod);
    assert_memory_equal(&got.pod, &pod.pod, offsetof(yard_link_pod, model));
    assert_string_equal(got.pod.model, pod.pod.model);
    assert_true(got.serves && got.n_ranks == 7 && got.n_ranks_alive == 8);
    for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++) {
        assert_true(yard_reader_next_event(reader, &e));
        assert_int_equal(e.kind, want[i].kind);
        assert_int_equal(e.instance, want[i].instance);
        assert_int_equal(e.n_pages, want[i].n_pages);
        if (e.kind == YARD_LINK_REPORT)
            assert_memory_equal(&e.report, &report, sizeof(report));
        for (uint32_t p = 0; p < e.n_pages; p++)
            assert_true(
                yard_page_hash_equal(e.page[p], pages[e.kind == YARD_LINK_PAGES_EVICTED ? 1 : p]));
    }
    assert_false(yard_reader_next_event(reader, &e));
    assert_true(yard_encode_state(&b, NULL, NULL, 0));
    assert_true(yard_decode_state(reader, b.data, b.n, &has_pod, &got));
    assert_false(has_pod);
    yard_bytes_release(&b);
}

static void small_messages_come_back(void **state)
{
    const yard_health health = { true, false, 1, 2, 3, 4 };
    yard_health got = { 0 };
    yard_bytes b = { 0 };
    uint64_t stream, tag;
    const uint8_t abort_bytes[] = { 0x08, 0x05, 0x10, 0x06 };

    (void)state;
    assert_true(yard_encode_watch(&b, 9));
    assert_true(yard_decode_watch(reader, b.data, b.n, &stream));
    assert_int_equal(stream, 9);
    assert_true(yard_encode_health(&b, &health));
    assert_true(yard_decode_health(reader, b.data, b.n, &got));
    assert_true(got.ready && !got.progressing && got.step_age_us == 1 && got.n_ranks_alive == 4);
    assert_true(yard_decode_abort(reader, abort_bytes, sizeof(abort_bytes), &stream, &tag));
    assert_true(stream == 5 && tag == 6);
    yard_bytes_release(&b);
}

static void what_is_no_message_is_refused(void **state)
{
    static const struct {
        const char *what;
        uint8_t bytes[8];
        size_t n;
    } requests[] = { { "nothing", { 0 }, 0 },
                     { "neither request nor abort", { 0x1a, 0x00 }, 2 },
                     { "cut short", { 0x0a, 0x05, 0x1a }, 3 },
                     { "a token and no value for it", { 0x0a, 0x03, 0x6a, 0x01, 0x05 }, 5 } };
    /* an output with a finish that there is not, and one with a lone log-probability */
    const uint8_t finish[] = { 0x12, 0x02, 0x20, 0x05 }, lone[] = { 0x12, 0x03, 0x42, 0x01, 0x05 };
    /* a state with 15 bytes as a name of a page */
    const uint8_t pages[] = { 0x12, 0x15, 0x1a, 0x13, 0x12, 0x11, 1, 1, 1, 1, 1, 1,
                              1,    1,    1,    1,    1,    1,    1, 1, 1, 1, 1 };
    yard_request_message m;
    yard_pod_state pod;
    uint64_t stream;
    bool has_pod;

    (void)state;
    for (size_t i = 0; i < sizeof(requests) / sizeof(requests[0]); i++)
        if (yard_decode_request(reader, requests[i].bytes, requests[i].n, &m))
            fail_msg("taken for a request: %s", requests[i].what);
    assert_false(yard_decode_tokens(reader, finish, sizeof(finish), &stream));
    assert_false(yard_decode_tokens(reader, lone, sizeof(lone), &stream));
    assert_false(yard_decode_state(reader, pages, sizeof(pages), &has_pod, &pod));
}

/* Two bytes for an output are hundreds in memory. */
static void memory_is_bounded(void **state)
{
    enum { N = MAX_BYTES / 64 };
    uint8_t *bytes = malloc(2 * N);
    uint64_t stream;

    (void)state;
    assert_non_null(bytes);
    for (size_t i = 0; i < N; i++) {
        bytes[2 * i] = 0x12;
        bytes[2 * i + 1] = 0;
    }
    assert_true(yard_decode_tokens(reader, bytes, 2000, &stream));
    assert_false(yard_decode_tokens(reader, bytes, 2 * N, &stream));
    assert_true(yard_decode_tokens(reader, bytes, 2000, &stream));
    free(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_come_back),
        cmocka_unit_test(absent_fields_are_defaults),
        cmocka_unit_test(aborts_come_back),
        cmocka_unit_test(outputs_come_back_in_parts),
        cmocka_unit_test(states_come_back),
        cmocka_unit_test(small_messages_come_back),
        cmocka_unit_test(what_is_no_message_is_refused),
        cmocka_unit_test(memory_is_bounded),
    };
    int n_failed;

    if (yard_reader_create(&reader, MAX_BYTES, NULL) != YARD_OK)
        return EXIT_FAILURE;
    n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    yard_reader_destroy(reader);
    return n_failed;
}
