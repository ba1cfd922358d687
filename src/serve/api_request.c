#include "serve/api_request.h"

#include <stdio.h>
#include <stdlib.h>

#include "serve/api_fields.h"

void yard_api_request_release(yard_api_request *r)
{
    for (uint32_t i = 0; i < r->n_prompts; i++)
        free(r->prompt[i].ids);
    free(r->prompt);
    free(r->messages);
    free(r->bias);
    free(r->stop);
    free(r->stop_token);
    json_decref(r->json);
    *r = (yard_api_request){ 0 };
}

static yard_status parse_object(json_t **out, const char *body, size_t n_bytes, yard_api_error *err)
{
    yard_error no_memory;
    json_error_t error = { 0 }; /* jansson does not write all of it: unknown unless it says more */
    json_t *root = json_loadb(body, n_bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
    char what[32];

    /* jansson leaves some failed allocations without a code of their own */
    if (!root && (json_error_code(&error) == json_error_out_of_memory ||
                  json_error_code(&error) == json_error_unknown)) {
        yard_fail(&no_memory, YARD_ENOMEM, "request: no memory");
        return yard_api_error_from(err, &no_memory);
    }
    if (!root)
        return yard_api_refuse(err, "invalid_json", "body", "want JSON, got: %s, at byte %d",
                               error.text, error.position);
    if (!json_is_object(root)) {
        yard_api_refuse(err, NULL, "body", "want a JSON object, got %s",
                        yard_api_describe(root, what));
        json_decref(root);
        return YARD_EINVAL;
    }
    *out = root;
    return YARD_OK;
}

static bool is_text(const json_t *value, const char *text)
{
    return json_is_string(value) && !strcmp(json_string_value(value), text);
}

static bool is_empty(const json_t *value)
{
    return json_is_false(value) || (json_is_array(value) && json_array_size(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0) || is_text(value, "") ||
           (json_is_integer(value) && json_integer_value(value) == 0);
}

/* Members that would change the answer and are not implemented: absent, or saying what happens
 * anyway. */
static void refuse_unsupported(yard_api_fields *f)
{
    static const char *const keys[] = { "tools",
                                        "functions",
                                        "function_call",
                                        "audio",
                                        "prediction",
                                        "suffix",
                                        "reasoning_effort",
                                        "thinking",
                                        "chat_template_kwargs",
                                        "web_search_options",
                                        "guided_json",
                                        "guided_regex",
                                        "guided_choice",
                                        "guided_grammar",
                                        "structured_outputs",
                                        "min_tokens",
                                        "prompt_logprobs",
                                        "use_beam_search" };
    const json_t *choice = yard_api_get(f, "tool_choice");
    const json_t *format = yard_api_get(f, "response_format");

    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        const json_t *value = yard_api_get(f, keys[i]);

        if (value && !is_empty(value))
            yard_api_not_supported(f, keys[i]);
    }
    if (choice && !is_text(choice, "none") && !is_text(choice, "auto"))
        yard_api_not_supported(f, "tool_choice");
    if (format && !is_text(json_object_get(format, "type"), "text"))
        yard_api_not_supported(f, "response_format");
}

static void read_sampling(yard_api_fields *f, yard_api_request *r)
{
    yard_sampling *s = &r->sampling;
    int64_t n;

    yard_api_get_number(f, "temperature", 0, 2, &s->temperature);
    if (yard_api_get_number(f, "top_p", 0, 1, &s->top_p) && s->top_p == 0)
        s->top_p = 1e-9f; /* clients mean: the likeliest token only */
    yard_api_get_number(f, "min_p", 0, 1, &s->min_p);
    yard_api_get_number(f, "presence_penalty", -2, 2, &s->presence_penalty);
    yard_api_get_number(f, "frequency_penalty", -2, 2, &s->frequency_penalty);
    yard_api_get_number(f, "repetition_penalty", 0.01, 100, &s->repetition_penalty);
    if (yard_api_get_integer(f, "top_k", -1, INT32_MAX, &n))
        s->top_k = n < 0 ? 0 : (int32_t)n; /* -1 is how some say off */
    r->has_seed = yard_api_get_integer(f, "seed", INT64_MIN, INT64_MAX, &n);
    if (r->has_seed)
        s->seed = (uint64_t)n;
}

static void read_bias(yard_api_fields *f, yard_api_request *r)
{
    const json_t *object = yard_api_get(f, "logit_bias"), *value;
    yard_api_fields inner = { .where = "logit_bias.", .err = f->err };
    const char *key;

    if (!object)
        return;
    if (!json_is_object(object)) {
        yard_api_want(f, "logit_bias", "an object from token ids to numbers", object);
        return;
    }
    r->bias = malloc((json_object_size(object) + 1) * sizeof(*r->bias));
    if (!r->bias) {
        yard_api_no_memory(f);
        return;
    }
    inner.object = object;
    json_object_foreach((json_t *)object, key, value)
    {
        char *end = NULL;
        const long id = strtol(key, &end, 10);
        yard_logit_bias *b = &r->bias[r->n_bias];

        if (key[0] < '0' || key[0] > '9' || *end || id > INT32_MAX) {
            f->status = yard_api_refuse(f->err, NULL, "logit_bias",
                                        "want token ids as keys, got '%.32s'", key);
            return;
        }
        b->token = (int32_t)id;
        if (!yard_api_get_number(&inner, key, -100, 100, &b->value)) {
            if (!inner.status)
                yard_api_want(&inner, key, "a number from -100 to 100", value);
            f->status = inner.status;
            return;
        }
        r->n_bias++;
    }
}

static void read_stop(yard_api_fields *f, yard_api_request *r, uint32_t max_stop)
{
    const json_t *stop = yard_api_get(f, "stop");
    const size_t n = json_is_array(stop) ? json_array_size(stop) : 1;
    char want[80];

    if (!stop)
        return;
    snprintf(want, sizeof(want), "a string or an array of at most %u, none empty", max_stop);
    if (n > max_stop) {
        yard_api_want(f, "stop", want, stop);
        return;
    }
    r->stop = malloc((n + 1) * sizeof(*r->stop));
    if (!r->stop) {
        yard_api_no_memory(f);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        const json_t *value = json_is_array(stop) ? json_array_get(stop, i) : stop;

        if (!json_is_string(value) || json_string_length(value) == 0) {
            yard_api_want(f, "stop", want, value);
            return;
        }
        r->stop[r->n_stop++] = json_string_value(value);
    }
}

static void read_stop_tokens(yard_api_fields *f, yard_api_request *r, uint32_t max_stop)
{
    const json_t *ids = yard_api_get(f, "stop_token_ids");
    char want[48];

    if (!ids)
        return;
    snprintf(want, sizeof(want), "an array of at most %u token ids", max_stop);
    if (!json_is_array(ids) || json_array_size(ids) > max_stop)
        yard_api_want(f, "stop_token_ids", want, ids);
    yard_api_read_ids(f, "stop_token_ids", ids, &r->stop_token, &r->n_stop_token);
}

static void read_stream(yard_api_fields *f, yard_api_request *r)
{
    const json_t *options = yard_api_get(f, "stream_options");
    yard_api_fields inner = { .object = options, .where = "stream_options.", .err = f->err };

    yard_api_get_bool(f, "stream", &r->stream);
    if (!options)
        return;
    if (!json_is_object(options) || !r->stream) {
        yard_api_want(f, "stream_options", "an object, and only with \"stream\": true", options);
        return;
    }
    yard_api_get_bool(&inner, "include_usage", &r->include_usage);
    yard_api_get_bool(&inner, "continuous_usage_stats", &r->continuous_usage);
    f->status = f->status ? f->status : inner.status;
}

static void read_common(yard_api_fields *f, yard_api_request *r, const yard_api_limits *limits)
{
    int64_t n;

    r->sampling = limits->defaults;
    r->max_new_tokens = UINT32_MAX;
    r->n = 1;
    if (!yard_api_get_string(f, "model", &r->model))
        yard_api_want(f, "model", "a string", json_object_get(f->object, "model"));
    refuse_unsupported(f);
    read_sampling(f, r);
    read_bias(f, r);
    read_stop(f, r, limits->max_stop);
    read_stop_tokens(f, r, limits->max_stop);
    read_stream(f, r);
    yard_api_get_bool(f, "ignore_eos", &r->ignore_eos);
    if (yard_api_get_integer(f, "max_tokens", 1, INT32_MAX, &n))
        r->max_new_tokens = (uint32_t)n;
    if (yard_api_get_integer(f, "n", 1, limits->max_n, &n))
        r->n = (uint32_t)n;
}

/* As the template reads them: "developer" is the newer name of "system". */
static void read_messages(yard_api_fields *f, yard_api_request *r)
{
    json_t *messages = (json_t *)yard_api_get(f, "messages"), *message;
    size_t i;

    if (f->status)
        return;
    if (!json_is_array(messages) || json_array_size(messages) == 0) {
        yard_api_want(f, "messages", "an array of at least one message",
                      json_object_get(f->object, "messages"));
        return;
    }
    json_array_foreach(messages, i, message)
    {
        const char *role = json_string_value(json_object_get(message, "role"));

        if (role && !strcmp(role, "developer") &&
            json_object_set_new(message, "role", json_string("system")) != 0) {
            yard_api_no_memory(f);
            return;
        }
    }
    r->messages = json_dumps(messages, JSON_COMPACT);
    if (!r->messages)
        yard_api_no_memory(f);
    else
        r->n_messages_bytes = strlen(r->messages);
}

static void read_chat(yard_api_fields *f, yard_api_request *r, const yard_api_limits *limits)
{
    int64_t n;

    read_common(f, r, limits);
    if (yard_api_get_integer(f, "max_completion_tokens", 1, INT32_MAX, &n))
        r->max_new_tokens = (uint32_t)n; /* the newer name wins */
    yard_api_get_bool(f, "logprobs", &r->logprobs);
    if (yard_api_get_integer(f, "top_logprobs", 0, limits->max_top_logprobs, &n)) {
        r->top_logprobs = (uint32_t)n;
        if (n > 0 && !r->logprobs)
            yard_api_want(f, "top_logprobs", "it only with \"logprobs\": true",
                          yard_api_get(f, "top_logprobs"));
    }
    read_messages(f, r);
}

static void read_prompt(yard_api_fields *f, yard_api_request *r, const json_t *value)
{
    yard_api_prompt *p = &r->prompt[r->n_prompts++];

    if (json_is_string(value)) {
        p->text = json_string_value(value);
        p->n_bytes = json_string_length(value);
        return;
    }
    if (!json_is_array(value) || json_array_size(value) == 0) {
        yard_api_want(f, "prompt", "a text or a list of token ids, or a list of these", value);
        return;
    }
    yard_api_read_ids(f, "prompt", value, &p->ids, &p->n_ids);
}

/* A list of numbers is one prompt, a list of texts or of lists is many. */
static void read_prompts(yard_api_fields *f, yard_api_request *r, const char *key)
{
    const json_t *value = yard_api_get(f, key);
    const bool many = json_is_array(value) && json_array_size(value) > 0 &&
                      !json_is_number(json_array_get(value, 0));
    const size_t n = many ? json_array_size(value) : 1;

    if (f->status)
        return;
    if (!value) {
        yard_api_want(f, key, "a text or a list of token ids, or a list of these",
                      json_object_get(f->object, key));
        return;
    }
    r->prompt = calloc(n, sizeof(*r->prompt));
    if (!r->prompt) {
        yard_api_no_memory(f);
        return;
    }
    for (size_t i = 0; i < n && !f->status; i++)
        read_prompt(f, r, many ? json_array_get(value, i) : value);
}

static void read_completion(yard_api_fields *f, yard_api_request *r, const yard_api_limits *limits)
{
    int64_t n;

    read_common(f, r, limits);
    yard_api_get_bool(f, "echo", &r->echo);
    r->logprobs = yard_api_get_integer(f, "logprobs", 0, limits->max_top_logprobs, &n);
    if (r->logprobs)
        r->top_logprobs = (uint32_t)n;
    if (yard_api_get_integer(f, "best_of", 1, limits->max_n, &n) && (uint32_t)n != r->n)
        yard_api_not_supported(f, "best_of");
    read_prompts(f, r, "prompt");
    if (!f->status && (uint64_t)r->n * r->n_prompts > limits->max_n)
        f->status = yard_api_refuse(f->err, NULL, "n",
                                    "want at most %u choices over all prompts, "
                                    "got %u for each of %u",
                                    limits->max_n, r->n, r->n_prompts);
}

static void read_tokenize(yard_api_fields *f, yard_api_request *r, const yard_api_limits *limits)
{
    yard_api_get_string(f, "model", &r->model);
    if (yard_api_get(f, "messages")) {
        read_messages(f, r);
        return;
    }
    read_prompts(f, r, "prompt");
    if (!f->status && (r->n_prompts != 1 || !r->prompt[0].text))
        yard_api_want(f, "prompt", "a string", yard_api_get(f, "prompt"));
}

static void read_detokenize(yard_api_fields *f, yard_api_request *r, const yard_api_limits *limits)
{
    const json_t *ids = yard_api_get(f, "tokens");

    yard_api_get_string(f, "model", &r->model);
    if (!json_is_array(ids)) {
        yard_api_want(f, "tokens", "an array of token ids", json_object_get(f->object, "tokens"));
        return;
    }
    r->prompt = calloc(1, sizeof(*r->prompt));
    if (!r->prompt) {
        yard_api_no_memory(f);
        return;
    }
    r->n_prompts = 1;
    yard_api_read_ids(f, "tokens", ids, &r->prompt->ids, &r->prompt->n_ids);
}

typedef void (*read_fn)(yard_api_fields *f, yard_api_request *r, const yard_api_limits *limits);

static yard_status parse(yard_api_request *out, const char *body, size_t n_bytes, read_fn read,
                         const yard_api_limits *limits, yard_api_error *err)
{
    yard_api_request r = { .add_special_tokens = true, .add_generation_prompt = true };
    yard_api_fields f = { .where = "", .err = err };
    json_t *root = NULL;

    f.status = parse_object(&root, body, n_bytes, err);
    if (f.status)
        return f.status;
    r.json = root;
    f.object = root;
    yard_api_get_bool(&f, "add_special_tokens", &r.add_special_tokens);
    yard_api_get_bool(&f, "add_generation_prompt", &r.add_generation_prompt);
    read(&f, &r, limits);
    if (f.status)
        yard_api_request_release(&r);
    else
        *out = r;
    return f.status;
}

yard_status yard_api_parse_chat(yard_api_request *out, const char *body, size_t n_bytes,
                                const yard_api_limits *limits, yard_api_error *err)
{
    return parse(out, body, n_bytes, read_chat, limits, err);
}

yard_status yard_api_parse_completion(yard_api_request *out, const char *body, size_t n_bytes,
                                      const yard_api_limits *limits, yard_api_error *err)
{
    return parse(out, body, n_bytes, read_completion, limits, err);
}

yard_status yard_api_parse_tokenize(yard_api_request *out, const char *body, size_t n_bytes,
                                    yard_api_error *err)
{
    return parse(out, body, n_bytes, read_tokenize, NULL, err);
}

yard_status yard_api_parse_detokenize(yard_api_request *out, const char *body, size_t n_bytes,
                                      yard_api_error *err)
{
    return parse(out, body, n_bytes, read_detokenize, NULL, err);
}
