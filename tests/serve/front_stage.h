/* The front with an engine that says what the test wants, and clients that keep what they get. */
#ifndef TESTS_SERVE_FRONT_STAGE_H
#define TESTS_SERVE_FRONT_STAGE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <jansson.h>

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

static inline void on_answer(void *ctx, const yard_front_summary *summary, const yard_api_out *body,
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

static inline bool on_events(void *ctx, const yard_front_summary *summary,
                             const yard_api_out *events)
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

static inline void warn(void *ctx, const char *line)
{
    ((stage *)ctx)->n_missing += strstr(line, "does not answer") != NULL;
}

static inline stage *open_stage(uint32_t n_links, const char *template_name, uint32_t max_queued)
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

static inline void close_stage(stage *s)
{
    for (uint32_t i = 0; i < s->n_clients; i++) {
        assert_true(s->client[i].ended || s->client[i].deaf);
        free(s->client[i].text);
    }
    yard_front_destroy(s->front);
    yard_tokenizer_free(s->tok);
    free(s);
}

static inline yard_front_job *ask(stage *s, yard_front_route route, const char *body)
{
    client *c = &s->client[s->n_clients++];

    return yard_front_submit(s->front, s->now_us, route, strdup(body), strlen(body), "id", &sink,
                             c);
}

static inline void run(stage *s)
{
    yard_front_run(s->front, s->now_us);
}

static inline client *last(stage *s)
{
    return &s->client[s->n_clients - 1];
}

/* The ids of a text, as one event of one choice. */
static inline yard_link_tokens *say(stage *s, uint32_t link, uint32_t sent, uint32_t choice,
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

static inline json_t *parse(const char *text)
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

static inline void expect_text(const char *body, const char *path, const char *want)
{
    json_t *root = parse(body);
    const char *got = json_string_value(member(root, path));

    if (!got || strcmp(got, want) != 0)
        fail_msg("%s: want '%s', got '%s' in %s", path, want, got ? got : "(none)", body);
    json_decref(root);
}

static inline void expect_number(const char *body, const char *path, long long want)
{
    json_t *root = parse(body);
    const json_t *got = member(root, path);

    if (!json_is_integer(got) || json_integer_value(got) != want)
        fail_msg("%s: want %lld in %s", path, want, body);
    json_decref(root);
}

/* What a stream's events say together of one choice: its text, or its thoughts. */
static inline char *joined(const char *stream, long long index, const char *key)
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

static inline void expect_joined(const char *stream, long long index, const char *key,
                                 const char *want)
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

#endif
