/* Request bodies: what each field becomes, every field with every wrong type, and a body cut at
 * every byte. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "serve/api_request.h"

static const yard_api_limits limits = YARD_API_LIMITS_INIT;

typedef enum form { CHAT, COMPLETION, TOKENIZE, DETOKENIZE } form;

static yard_status parse(form what, const char *body, yard_api_request *r, yard_api_error *err)
{
    const size_t n = strlen(body);

    *err = (yard_api_error){ 0 };
    *r = (yard_api_request){ 0 };
    switch (what) {
    case CHAT:
        return yard_api_parse_chat(r, body, n, &limits, err);
    case COMPLETION:
        return yard_api_parse_completion(r, body, n, &limits, err);
    case TOKENIZE:
        return yard_api_parse_tokenize(r, body, n, err);
    default:
        return yard_api_parse_detokenize(r, body, n, err);
    }
}

static yard_api_request accept(form what, const char *body)
{
    yard_api_request r;
    yard_api_error err;

    if (parse(what, body, &r, &err) != YARD_OK)
        fail_msg("%s: %s", body, err.message);
    return r;
}

static void refuse(form what, const char *body, const char *param, const char *message)
{
    yard_api_request r;
    yard_api_error err;

    if (parse(what, body, &r, &err) != YARD_EINVAL)
        fail_msg("accepted: %s", body);
    assert_int_equal(err.http_status, 400);
    assert_string_equal(err.type, "invalid_request_error");
    if (strcmp(err.param, param) != 0)
        fail_msg("%s: want param '%s', got '%s'", body, param, err.param);
    if (message)
        assert_string_equal(err.message, message);
}

#define CHAT_START "{\"model\":\"m\",\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"
#define TEXT_START "{\"model\":\"m\",\"prompt\":\"hi\""

static void a_chat_request_says_everything(void **state)
{
    yard_api_request r = accept(
        CHAT, CHAT_START
        ",\"max_tokens\":5,\"max_completion_tokens\":7,\"temperature\":0.5,\"top_p\":0.25,"
        "\"top_k\":-1,\"min_p\":0.125,\"presence_penalty\":1,\"frequency_penalty\":-2,"
        "\"repetition_penalty\":1.5,\"seed\":-1,\"n\":3,\"stop\":[\"a\",\"b\\u00e9\"],"
        "\"stop_token_ids\":[4,5],\"ignore_eos\":true,\"logit_bias\":{\"17\":-100,\"3\":2.5},"
        "\"logprobs\":true,\"top_logprobs\":2,\"stream\":true,"
        "\"stream_options\":{\"include_usage\":true},\"user\":\"u\",\"tools\":[],"
        "\"tool_choice\":\"none\",\"response_format\":{\"type\":\"text\"},\"store\":true}");

    (void)state;
    assert_string_equal(r.model, "m");
    assert_string_equal(r.messages, "[{\"role\":\"user\",\"content\":\"hi\"}]");
    assert_int_equal(r.n_messages_bytes, strlen(r.messages));
    assert_int_equal(r.max_new_tokens, 7);
    assert_true(r.sampling.temperature == 0.5f && r.sampling.top_p == 0.25f);
    assert_true(r.sampling.min_p == 0.125f && r.sampling.presence_penalty == 1);
    assert_true(r.sampling.frequency_penalty == -2 && r.sampling.repetition_penalty == 1.5f);
    assert_int_equal(r.sampling.top_k, 0);
    assert_true(r.has_seed && r.sampling.seed == UINT64_MAX);
    assert_int_equal(r.n, 3);
    assert_int_equal(r.n_stop, 2);
    assert_string_equal(r.stop[1], "b\xc3\xa9");
    assert_int_equal(r.n_stop_token, 2);
    assert_int_equal(r.stop_token[1], 5);
    assert_true(r.ignore_eos);
    assert_int_equal(r.n_bias, 2);
    assert_int_equal(r.bias[0].token, 17);
    assert_true(r.bias[0].value == -100 && r.bias[1].value == 2.5f);
    assert_true(r.logprobs && r.top_logprobs == 2);
    assert_true(r.stream && r.include_usage && !r.continuous_usage);
    yard_api_request_release(&r);
    assert_null(r.messages);
}

static void what_is_absent_or_null_has_its_default(void **state)
{
    static const char *const bodies[] = {
        CHAT_START "}",
        CHAT_START ",\"max_tokens\":null,\"temperature\":null,\"stop\":null,\"n\":null,"
                   "\"stream\":null,\"stream_options\":null,\"tools\":null,\"logit_bias\":null,"
                   "\"seed\":null,\"logprobs\":null,\"response_format\":null,\"no such key\":1}",
    };

    (void)state;
    for (int i = 0; i < 2; i++) {
        yard_api_request r = accept(CHAT, bodies[i]);

        assert_true(r.max_new_tokens == UINT32_MAX && r.n == 1);
        assert_true(r.sampling.temperature == 1 && r.sampling.top_p == 1);
        assert_true(r.sampling.repetition_penalty == 1 && !r.has_seed);
        assert_true(!r.stream && !r.logprobs && !r.echo && r.n_stop == 0 && r.n_bias == 0);
        assert_true(r.add_special_tokens && r.add_generation_prompt);
        yard_api_request_release(&r);
    }
}

static void prompts_come_in_four_forms(void **state)
{
    yard_api_request r = accept(COMPLETION, "{\"model\":\"m\",\"prompt\":\"a\"}");

    (void)state;
    assert_int_equal(r.n_prompts, 1);
    assert_string_equal(r.prompt[0].text, "a");
    yard_api_request_release(&r);
    r = accept(COMPLETION,
               "{\"model\":\"m\",\"prompt\":[\"a\",\"bc\"],\"echo\":true,\"logprobs\":0,"
               "\"n\":2,\"best_of\":2}");
    assert_int_equal(r.n_prompts, 2);
    assert_int_equal(r.prompt[1].n_bytes, 2);
    assert_true(r.echo && r.logprobs && r.top_logprobs == 0 && r.n == 2);
    yard_api_request_release(&r);
    r = accept(COMPLETION, "{\"model\":\"m\",\"prompt\":[5,6,7]}");
    assert_int_equal(r.n_prompts, 1);
    assert_int_equal(r.prompt[0].n_ids, 3);
    assert_int_equal(r.prompt[0].ids[2], 7);
    yard_api_request_release(&r);
    r = accept(COMPLETION, "{\"model\":\"m\",\"prompt\":[[5],[6,7]]}");
    assert_int_equal(r.n_prompts, 2);
    assert_int_equal(r.prompt[1].ids[1], 7);
    yard_api_request_release(&r);
    refuse(COMPLETION, "{\"model\":\"m\",\"prompt\":[5,\"a\"]}", "prompt",
           "prompt: want token ids, got a string");
    refuse(COMPLETION, "{\"model\":\"m\",\"prompt\":[[5],[]]}", "prompt", NULL);
    refuse(COMPLETION, "{\"model\":\"m\",\"prompt\":[\"a\",5]}", "prompt", NULL);
    refuse(COMPLETION, "{\"model\":\"m\",\"prompt\":[-1]}", "prompt", NULL);
    refuse(COMPLETION, "{\"model\":\"m\"}", "prompt", NULL);
    refuse(COMPLETION, "{\"model\":\"m\",\"prompt\":[\"a\",\"b\"],\"n\":65}", "n", NULL);
}

static void tokenize_and_detokenize(void **state)
{
    yard_api_request r = accept(TOKENIZE, "{\"prompt\":\"a\",\"add_special_tokens\":false}");

    (void)state;
    assert_string_equal(r.prompt[0].text, "a");
    assert_false(r.add_special_tokens);
    yard_api_request_release(&r);
    r = accept(TOKENIZE, "{\"messages\":[{\"role\":\"developer\",\"content\":\"x\"}],"
                         "\"add_generation_prompt\":false}");
    assert_string_equal(r.messages, "[{\"role\":\"system\",\"content\":\"x\"}]");
    assert_false(r.add_generation_prompt);
    yard_api_request_release(&r);
    r = accept(DETOKENIZE, "{\"tokens\":[1,2]}");
    assert_int_equal(r.prompt[0].n_ids, 2);
    yard_api_request_release(&r);
    refuse(TOKENIZE, "{\"prompt\":[1]}", "prompt", NULL);
    refuse(TOKENIZE, "{}", "prompt", NULL);
    refuse(DETOKENIZE, "{\"tokens\":\"a\"}", "tokens", NULL);
    refuse(DETOKENIZE, "{\"tokens\":[1.5]}", "tokens", NULL);
}

enum { STRING = 1, INTEGER = 2, REAL = 4, BOOL = 8, ARRAY = 16, OBJECT = 32 };

static const struct {
    int kind;
    const char *text;
} values[] = { { STRING, "\"x\"" }, { INTEGER, "1" },  { REAL, "0.5" },
               { BOOL, "true" },    { ARRAY, "[[]]" }, { OBJECT, "{\"x\":{}}" } };

static void every_wrong_type_is_refused_by_name(void **state)
{
    static const struct {
        form form;
        const char *key;
        int right; /* kinds that are fine */
    } fields[] = {
        { CHAT, "model", STRING },
        { CHAT, "messages", ARRAY /* of what, the template says */ },
        { CHAT, "temperature", INTEGER | REAL },
        { CHAT, "top_p", INTEGER | REAL },
        { CHAT, "min_p", INTEGER | REAL },
        { CHAT, "presence_penalty", INTEGER | REAL },
        { CHAT, "frequency_penalty", INTEGER | REAL },
        { CHAT, "repetition_penalty", INTEGER | REAL },
        { CHAT, "top_k", INTEGER },
        { CHAT, "seed", INTEGER },
        { CHAT, "n", INTEGER },
        { CHAT, "max_tokens", INTEGER },
        { CHAT, "max_completion_tokens", INTEGER },
        { CHAT, "stop", STRING },
        { CHAT, "stop_token_ids", 0 },
        { CHAT, "ignore_eos", BOOL },
        { CHAT, "logit_bias", 0 },
        { CHAT, "logprobs", BOOL },
        { CHAT, "top_logprobs", 0 },
        { CHAT, "stream", BOOL },
        { CHAT, "stream_options", 0 },
        { CHAT, "add_generation_prompt", BOOL },
        { CHAT, "tools", 0 },
        { CHAT, "tool_choice", 0 },
        { CHAT, "functions", 0 },
        { CHAT, "function_call", 0 },
        { CHAT, "response_format", 0 },
        { CHAT, "reasoning_effort", 0 },
        { CHAT, "thinking", 0 },
        { CHAT, "chat_template_kwargs", 0 },
        { COMPLETION, "prompt", STRING },
        { COMPLETION, "echo", BOOL },
        { COMPLETION, "logprobs", INTEGER },
        { COMPLETION, "best_of", INTEGER },
        { COMPLETION, "suffix", 0 },
        { COMPLETION, "add_special_tokens", BOOL },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        for (size_t k = 0; k < sizeof(values) / sizeof(values[0]); k++) {
            const bool given = fields[i].form == CHAT;
            const char *const other = given ? "messages" : "prompt";
            char body[256];
            yard_api_request r;

            snprintf(body, sizeof(body), "{%s%s\"%s\":%s}",
                     strcmp(fields[i].key, "model") ? "\"model\":\"m\"," : "",
                     !strcmp(fields[i].key, other) ? ""
                     : given ? "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],"
                             : "\"prompt\":\"hi\",",
                     fields[i].key, values[k].text);
            if (values[k].kind & fields[i].right) {
                r = accept(fields[i].form, body);
                yard_api_request_release(&r);
            } else {
                refuse(fields[i].form, body, fields[i].key, NULL);
            }
        }
}

static void values_out_of_range_are_refused(void **state)
{
    (void)state;
    refuse(CHAT, CHAT_START ",\"temperature\":2.5}", "temperature",
           "temperature: want a number from 0 to 2, got 2.5");
    refuse(CHAT, CHAT_START ",\"temperature\":-0.1}", "temperature", NULL);
    refuse(CHAT, CHAT_START ",\"top_p\":1.01}", "top_p", NULL);
    refuse(CHAT, CHAT_START ",\"max_tokens\":0}", "max_tokens",
           "max_tokens: want a whole number from 1 to 2147483647, got 0");
    refuse(CHAT, CHAT_START ",\"max_tokens\":64.0}", "max_tokens",
           "max_tokens: want a whole number from 1 to 2147483647, got 64.0");
    refuse(CHAT, CHAT_START ",\"n\":129}", "n", NULL);
    refuse(CHAT, CHAT_START ",\"stop\":[\"\"]}", "stop", NULL);
    refuse(CHAT, CHAT_START ",\"stop\":[1]}", "stop", NULL);
    refuse(CHAT, CHAT_START ",\"logit_bias\":{\"1\":101}}", "logit_bias.1",
           "logit_bias.1: want a number from -100 to 100, got 101");
    refuse(CHAT, CHAT_START ",\"logit_bias\":{\"1\":null}}", "logit_bias.1", NULL);
    refuse(CHAT, CHAT_START ",\"logit_bias\":{\"x\":1}}", "logit_bias", NULL);
    refuse(CHAT, CHAT_START ",\"logit_bias\":{\"99999999999\":1}}", "logit_bias", NULL);
    refuse(CHAT, CHAT_START ",\"top_logprobs\":2}", "top_logprobs", NULL);
    refuse(CHAT, CHAT_START ",\"logprobs\":true,\"top_logprobs\":21}", "top_logprobs", NULL);
    refuse(CHAT, CHAT_START ",\"stream_options\":{}}", "stream_options", NULL);
    refuse(CHAT, CHAT_START ",\"stream\":true,\"stream_options\":{\"include_usage\":1}}",
           "stream_options.include_usage", NULL);
    refuse(CHAT, CHAT_START ",\"tools\":[{}]}", "tools", "tools: is not supported here");
    refuse(CHAT, CHAT_START ",\"response_format\":{\"type\":\"json_object\"}}", "response_format",
           NULL);
    refuse(CHAT, "{\"model\":\"m\",\"messages\":[]}", "messages", NULL);
    refuse(CHAT, "{\"messages\":[{}]}", "model", "model: want a string, got nothing");
    refuse(COMPLETION, TEXT_START ",\"n\":2,\"best_of\":3}", "best_of", NULL);
}

static void what_is_no_json_is_refused(void **state)
{
    static const char body[] = CHAT_START ",\"stop\":[\"\\u00e9\"],\"seed\":-12,\"top_p\":1e-1}";
    char cut[sizeof(body)];

    (void)state;
    for (size_t n = 0; n + 1 < sizeof(body); n++) {
        memcpy(cut, body, n);
        cut[n] = '\0';
        refuse(CHAT, cut, "body", NULL);
    }
    refuse(CHAT, "[]", "body", "body: want a JSON object, got an array of 0");
    refuse(CHAT, "{\"model\":\"m\",\"model\":\"m\"}", "body", NULL);
    refuse(CHAT, "{\"model\":\"\xff\"}", "body", NULL);
    refuse(CHAT, CHAT_START "} x", "body", NULL);
}

static void errors_of_calls_below_become_those_of_clients(void **state)
{
    yard_api_error out;
    yard_error err;

    (void)state;
    yard_fail(&err, YARD_EFORMAT, "messages[2].role: want system, got 'x'");
    assert_int_equal(yard_api_error_from(&out, &err), YARD_EFORMAT);
    assert_int_equal(out.http_status, 400);
    assert_string_equal(out.param, "messages[2].role");
    assert_null(out.code);
    yard_fail(&err, YARD_EAGAIN, "the queue is full: 3 requests wait");
    yard_api_error_from(&out, &err);
    assert_int_equal(out.http_status, 429);
    assert_string_equal(out.param, "");
    assert_string_equal(out.code, "rate_limit_exceeded");
    yard_fail(&err, YARD_EPEER, "x");
    yard_api_error_from(&out, &err);
    assert_int_equal(out.http_status, 503);
    assert_string_equal(out.type, "server_error");
    yard_api_no_such_model(&out, "gpt");
    assert_int_equal(out.http_status, 404);
    assert_string_equal(out.code, "model_not_found");
    yard_api_too_long(&out, "messages", 4096, 5000);
    assert_string_equal(out.code, "context_length_exceeded");
    assert_non_null(strstr(out.message, "maximum context length is 4096 tokens"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_chat_request_says_everything),
        cmocka_unit_test(what_is_absent_or_null_has_its_default),
        cmocka_unit_test(prompts_come_in_four_forms),
        cmocka_unit_test(tokenize_and_detokenize),
        cmocka_unit_test(every_wrong_type_is_refused_by_name),
        cmocka_unit_test(values_out_of_range_are_refused),
        cmocka_unit_test(what_is_no_json_is_refused),
        cmocka_unit_test(errors_of_calls_below_become_those_of_clients),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
