/* Answers byte for byte, and everything that is written read back by a JSON parser. ctest: sanitize
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>
#include <jansson.h>

#include "serve/api_answer.h"

static const yard_api_head chat = { .id = "chatcmpl-1", .created = 7, .model = "m", .chat = true };
static const yard_api_head text = {
    .id = "cmpl-1", .created = 7, .model = "m", .fingerprint = "f"
};

static void assert_out(yard_api_out *out, const char *want)
{
    assert_false(out->no_memory);
    assert_string_equal(out->bytes, want);
    assert_int_equal(out->n_bytes, strlen(want));
    yard_api_out_release(out);
}

static void a_stream_of_a_chat(void **state)
{
    yard_api_head head = chat;
    yard_api_out out = { 0 };

    (void)state;
    head.include_usage = true;
    yard_api_put_event(&out, &head, &(yard_api_choice){ .begins = true }, NULL);
    yard_api_put_event(&out, &head, &(yard_api_choice){ .reasoning = "hm", .n_reasoning = 2 },
                       NULL);
    yard_api_put_event(&out, &head, &(yard_api_choice){ .text = "a\nb", .n_text = 3 }, NULL);
    yard_api_put_event(&out, &head,
                       &(yard_api_choice){ .index = 1, .finish_reason = "stop", .stop = "END" },
                       NULL);
    yard_api_put_usage_event(
        &out, &head,
        &(yard_api_usage){ .n_prompt = 9, .n_cached = 4, .n_output = 3, .n_reasoning = 1 });
    yard_api_put_keep_alive(&out);
    yard_api_put_done(&out);
#define START                                                                                      \
    "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":7,"             \
    "\"model\":\"m\",\"choices\":["
    assert_out(&out,
               START "{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
                     "\"logprobs\":null,\"finish_reason\":null}],\"usage\":null}\n\n" START
                     "{\"index\":0,\"delta\":{\"reasoning_content\":\"hm\"},"
                     "\"logprobs\":null,\"finish_reason\":null}],\"usage\":null}\n\n" START
                     "{\"index\":0,\"delta\":{\"content\":\"a\\nb\"},"
                     "\"logprobs\":null,\"finish_reason\":null}],\"usage\":null}\n\n" START
                     "{\"index\":1,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\","
                     "\"stop_reason\":\"END\"}],\"usage\":null}\n\n" START
                     "],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3,\"total_tokens\":12,"
                     "\"prompt_tokens_details\":{\"cached_tokens\":4},"
                     "\"completion_tokens_details\":{\"reasoning_tokens\":1},"
                     "\"prompt_cache_hit_tokens\":4,\"prompt_cache_miss_tokens\":5}}\n\n"
                     ": keep-alive\n\ndata: [DONE]\n\n");
}

static void usage_is_left_out_unless_asked_for(void **state)
{
    yard_api_out out = { 0 };

    (void)state;
    yard_api_put_event(&out, &text, &(yard_api_choice){ .text = "x", .n_text = 1 }, NULL);
    assert_out(&out, "data: {\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":7,"
                     "\"model\":\"m\",\"system_fingerprint\":\"f\",\"choices\":[{\"index\":0,"
                     "\"text\":\"x\",\"logprobs\":null,\"finish_reason\":null}]}\n\n");
}

/* The value at a path of keys and numbers, which must be there. */
static json_t *at(json_t *value, const char *path)
{
    char key[64];

    while (*path) {
        const size_t n = strcspn(path, ".");

        memcpy(key, path, n);
        key[n] = '\0';
        value = json_is_array(value) ? json_array_get(value, (size_t)atoi(key))
                                     : json_object_get(value, key);
        assert_non_null(value);
        path += n + (path[n] == '.');
    }
    return value;
}

static json_t *parse(yard_api_out *out)
{
    json_t *root = json_loadb(out->bytes, out->n_bytes, JSON_REJECT_DUPLICATES, NULL);

    if (!root)
        fail_msg("no JSON: %s", out->bytes);
    yard_api_out_release(out);
    return root;
}

static const yard_api_logprob top[] = { { "\xc3", 1, -0.5f }, { "b", 1, -INFINITY } };
static const yard_api_token token = {
    .chosen = { "\xc3", 1, -0.5f }, .top = top, .n_top = 2, .text_offset = 6
};
static const int32_t end_id = 42;
static const yard_api_token first = { .chosen = { "a", 1, NAN } };

static void a_whole_chat_answer(void **state)
{
    const yard_api_choice choices[] = {
        { .reasoning = "r",
          .n_reasoning = 1,
          .text = "\"q\"",
          .n_text = 3,
          .logprobs = true,
          .token = &token,
          .n_tokens = 1,
          .finish_reason = "length" },
        { .index = 1, .finish_reason = "stop", .stop_token = &end_id },
    };
    yard_api_out out = { 0 };
    json_t *root;

    (void)state;
    yard_api_put_answer(&out, &chat, choices, 2, &(yard_api_usage){ .n_prompt = 2, .n_output = 3 });
    root = parse(&out);
    assert_string_equal(json_string_value(at(root, "object")), "chat.completion");
    assert_string_equal(json_string_value(at(root, "choices.0.message.role")), "assistant");
    assert_string_equal(json_string_value(at(root, "choices.0.message.content")), "\"q\"");
    assert_string_equal(json_string_value(at(root, "choices.0.message.reasoning_content")), "r");
    assert_string_equal(json_string_value(at(root, "choices.0.finish_reason")), "length");
    assert_true(json_is_null(at(root, "choices.0.stop_reason")));
    assert_string_equal(json_string_value(at(root, "choices.0.logprobs.content.0.token")),
                        "\xef\xbf\xbd");
    assert_int_equal(json_integer_value(at(root, "choices.0.logprobs.content.0.bytes.0")), 0xc3);
    assert_true(json_number_value(at(root, "choices.0.logprobs.content.0.logprob")) == -0.5);
    assert_true(json_number_value(
                    at(root, "choices.0.logprobs.content.0.top_logprobs.1.logprob")) == -9999);
    assert_true(json_is_null(at(root, "choices.1.logprobs")));
    assert_string_equal(json_string_value(at(root, "choices.1.message.content")), "");
    assert_int_equal(json_integer_value(at(root, "choices.1.stop_reason")), 42);
    assert_int_equal(json_integer_value(at(root, "usage.total_tokens")), 5);
    json_decref(root);
}

static void a_whole_completion(void **state)
{
    const yard_api_token tokens[] = { first, token };
    const yard_api_choice choice = { .text = "a\xc3\xa9",
                                     .n_text = 3,
                                     .logprobs = true,
                                     .token = tokens,
                                     .n_tokens = 2,
                                     .finish_reason = "stop" };
    yard_api_out out = { 0 };
    json_t *root;

    (void)state;
    yard_api_put_answer(&out, &text, &choice, 1, &(yard_api_usage){ 0 });
    root = parse(&out);
    assert_string_equal(json_string_value(at(root, "object")), "text_completion");
    assert_string_equal(json_string_value(at(root, "choices.0.text")), "a\xc3\xa9");
    assert_string_equal(json_string_value(at(root, "choices.0.logprobs.tokens.0")), "a");
    assert_true(json_is_null(at(root, "choices.0.logprobs.token_logprobs.0")));
    assert_true(json_is_null(at(root, "choices.0.logprobs.top_logprobs.0")));
    assert_true(json_number_value(at(root, "choices.0.logprobs.top_logprobs.1.b")) == -9999);
    assert_int_equal(json_integer_value(at(root, "choices.0.logprobs.text_offset.1")), 6);
    json_decref(root);
}

static void errors_have_four_keys(void **state)
{
    yard_api_error err = { 0 };
    yard_api_out out = { 0 };

    (void)state;
    yard_api_refuse(&err, NULL, "top_p", "want \"more\"");
    yard_api_put_error(&out, &err);
    assert_out(&out, "{\"error\":{\"message\":\"top_p: want \\\"more\\\"\","
                     "\"type\":\"invalid_request_error\",\"param\":\"top_p\",\"code\":null}}");
    yard_api_error_from(&err, &(yard_error){ .status = YARD_EPEER, .message = "lost" });
    yard_api_put_error_event(&out, &err);
    assert_out(&out, "data: {\"error\":{\"message\":\"lost\",\"type\":\"server_error\","
                     "\"param\":null,\"code\":null}}\n\n");
}

static void small_answers(void **state)
{
    const int32_t ids[] = { 5, 0 };
    yard_api_out out = { 0 };

    (void)state;
    yard_api_put_models(&out, true, "m", 7, 4096);
    assert_out(&out,
               "{\"object\":\"list\",\"data\":[{\"id\":\"m\",\"object\":\"model\",\"created\":7,"
               "\"owned_by\":\"switchyard\",\"max_model_len\":4096,\"context_length\":4096}]}");
    yard_api_put_tokens(&out, ids, 2, 64);
    assert_out(&out, "{\"count\":2,\"max_model_len\":64,\"tokens\":[5,0]}");
    yard_api_put_tokens(&out, NULL, 0, 64);
    assert_out(&out, "{\"count\":0,\"max_model_len\":64,\"tokens\":[]}");
    yard_api_put_detokenized(&out, "a", 1);
    assert_out(&out, "{\"prompt\":\"a\"}");
}

/* Every pair of bytes as a string comes back as it was, or with U+FFFD for what is no text. */
static void strings_come_back(void **state)
{
    (void)state;
    for (int code = 0; code < 65536; code++) {
        const char bytes[2] = { (char)(code >> 8), (char)code };
        yard_api_out out = { 0 };
        json_t *value;

        yard_api_put_string(&out, bytes, 2);
        value = json_loadb(out.bytes, out.n_bytes, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
        if (!value)
            fail_msg("code %d: no JSON: %s", code, out.bytes);
        if (yard_utf8_valid(bytes, 2, NULL)) {
            assert_int_equal(json_string_length(value), 2);
            assert_memory_equal(json_string_value(value), bytes, 2);
        } else {
            assert_non_null(strstr(out.bytes, "\xef\xbf\xbd"));
        }
        json_decref(value);
        yard_api_out_release(&out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_stream_of_a_chat),
        cmocka_unit_test(usage_is_left_out_unless_asked_for),
        cmocka_unit_test(a_whole_chat_answer),
        cmocka_unit_test(a_whole_completion),
        cmocka_unit_test(errors_have_four_keys),
        cmocka_unit_test(small_answers),
        cmocka_unit_test(strings_come_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
