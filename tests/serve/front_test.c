/* Requests through the front with an engine that says what the test wants. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <jansson.h>
#include <poll.h>

#include "serve/fake_link.h"

enum { MAX_ANSWERS = 64, SECOND_US = 1000000 };

typedef struct client {
    int status; /* 0: none yet */
    uint32_t retry_after_s, n_events;
    bool ended, deaf; /* deaf: takes no events */
    char *text;       /* body, or all events */
    size_t n_bytes;
    yard_front_summary summary;
} client;

static void on_answer(void *ctx, const yard_front_summary *summary, const yard_api_out *body,
                      uint32_t retry_after_s)
{
    client *c = ctx;

    assert_false(c->ended);
    c->ended = true;
    c->status = summary->http_status;
    c->summary = *summary;
    c->retry_after_s = retry_after_s;
    c->text = strndup(body->bytes, body->n_bytes);
}

static bool on_events(void *ctx, const yard_front_summary *summary, const yard_api_out *events)
{
    client *c = ctx;

    assert_false(c->ended);
    if (c->deaf)
        return false;
    c->status = 200;
    c->n_events++;
    c->text = realloc(c->text, c->n_bytes + events->n_bytes + 1);
    memcpy(c->text + c->n_bytes, events->bytes, events->n_bytes + 1);
    c->n_bytes += events->n_bytes;
    if (summary) {
        c->ended = true;
        c->summary = *summary;
    }
    return true;
}

static const yard_front_sink sink = { on_answer, on_events };

typedef struct stage {
    yard_front *front;
    yard_tokenizer *tok;
    uint64_t now_us;
    client client[MAX_ANSWERS];
    uint32_t n_clients;
    uint32_t n_missing; /* lines that said of an engine that it does not answer */
} stage;

static void warn(void *ctx, const char *line)
{
    ((stage *)ctx)->n_missing += strstr(line, "does not answer") != NULL;
}

static stage *open_stage(uint32_t n_links, const char *template_name, uint32_t max_queued)
{
    static const char *const addresses[] = { "a:1", "b:1", "c:1" };
    yard_front_config config = YARD_FRONT_CONFIG_INIT;
    yard_error err = { 0 };
    stage *s = calloc(1, sizeof(*s));

    config.model_dir = "models/demo";
    config.model = "demo";
    config.engine = addresses;
    config.n_engines = n_links;
    config.link = &fake_ops;
    config.template_name = template_name;
    config.max_queued = max_queued;
    config.notify.warn = warn;
    config.notify.ctx = s;
    s->now_us = SECOND_US;
    if (yard_front_create(&s->front, &config, &err) != YARD_OK)
        fail_msg("%s", err.message);
    assert_int_equal(yard_tokenizer_load(&s->tok, "models/demo", NULL, &err), YARD_OK);
    return s;
}

static void close_stage(stage *s)
{
    for (uint32_t i = 0; i < s->n_clients; i++) {
        assert_true(s->client[i].ended || s->client[i].deaf);
        free(s->client[i].text);
    }
    yard_front_destroy(s->front);
    yard_tokenizer_free(s->tok);
    free(s);
}

static yard_front_job *ask(stage *s, yard_front_route route, const char *body)
{
    client *c = &s->client[s->n_clients++];

    return yard_front_submit(s->front, s->now_us, route, strdup(body), strlen(body), "id", &sink,
                             c);
}

static void run(stage *s)
{
    yard_front_run(s->front, s->now_us);
}

static client *last(stage *s)
{
    return &s->client[s->n_clients - 1];
}

/* The ids of a text, as one event of one choice. */
static yard_link_tokens *say(stage *s, uint32_t link, uint32_t sent, uint32_t choice,
                             const char *text, yard_finish finish)
{
    int32_t *ids = NULL;
    size_t n = 0;
    yard_error err;
    yard_link_tokens *t;

    assert_int_equal(yard_tokenizer_encode(s->tok, text, strlen(text), true, &ids, &n, &err), 0);
    assert_true(n <= 8);
    t = fake_say_tokens(link, sent, choice, ids, (uint32_t)n, finish);
    free(ids);
    return t;
}

static json_t *parse(const char *text)
{
    json_error_t err;
    json_t *root = json_loads(text, 0, &err);

    if (!root)
        fail_msg("no JSON: %s: %s", err.text, text);
    return root;
}

/* A member by path: "choices.0.message.content". */
static const json_t *member(const json_t *root, const char *path)
{
    char copy[128], *save = NULL;

    snprintf(copy, sizeof(copy), "%s", path);
    for (char *key = strtok_r(copy, ".", &save); key; key = strtok_r(NULL, ".", &save))
        root = json_is_array(root) ? json_array_get(root, (size_t)atoi(key))
                                   : json_object_get(root, key);
    return root;
}

static void expect_text(const char *body, const char *path, const char *want)
{
    json_t *root = parse(body);
    const char *got = json_string_value(member(root, path));

    if (!got || strcmp(got, want) != 0)
        fail_msg("%s: want '%s', got '%s' in %s", path, want, got ? got : "(none)", body);
    json_decref(root);
}

static void expect_number(const char *body, const char *path, long long want)
{
    json_t *root = parse(body);
    const json_t *got = member(root, path);

    if (!json_is_integer(got) || json_integer_value(got) != want)
        fail_msg("%s: want %lld in %s", path, want, body);
    json_decref(root);
}

/* What a stream's events say together of one choice: its text, or its thoughts. */
static char *joined(const char *stream, long long index, const char *key)
{
    char *out = calloc(1, strlen(stream) + 1);
    const char *line = stream;

    while ((line = strstr(line, "data: {"))) {
        const char *end = strchr(line, '\n');
        char *text = strndup(line + 6, (size_t)(end - line - 6));
        json_t *root = parse(text);
        const json_t *choice = member(root, "choices.0");
        const json_t *delta = json_object_get(choice, "delta");
        const char *piece = json_string_value(json_object_get(delta ? delta : choice, key));

        if (piece && json_integer_value(json_object_get(choice, "index")) == index)
            strcat(out, piece);
        json_decref(root);
        free(text);
        line = end;
    }
    return out;
}

static void expect_joined(const char *stream, long long index, const char *key, const char *want)
{
    char *got = joined(stream, index, key);

    assert_string_equal(got, want);
    free(got);
}

static const char chat[] =
    "{\"model\":\"demo\",\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}";
static const char chat_stream[] = "{\"model\":\"demo\",\"stream\":true,\"messages\":[{\"role\":"
                                  "\"user\",\"content\":\"Hi\"}],\"stream_options\":"
                                  "{\"include_usage\":true}}";

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
        cmocka_unit_test(a_lost_engine),
        cmocka_unit_test(an_engine_that_ends),
        cmocka_unit_test(an_engine_that_fails_a_request),
        cmocka_unit_test(clients_that_leave),
        cmocka_unit_test(silence_and_its_end),
        cmocka_unit_test(engines_that_never_answer_are_named_once),
        cmocka_unit_test(engines_of_another_kind_take_over),
        cmocka_unit_test(metrics_are_prometheus),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
