#include "cli/pod_answers.h"

#include <stdio.h>
#include <stdlib.h>

#include <jansson.h>

#include "cli/answer.h"

static yard_status encode_line(const char *path, size_t line_number, const char *line, size_t n,
                               const yard_tokenizer *tok, yard_prompt *out, yard_error *err)
{
    yard_status st;
    json_t *string = NULL;
    json_error_t error = { 0 };

    if (line[0] == '"') {
        string = json_loadb(line, n, JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
        if (!string)
            return yard_fail(err, YARD_EFORMAT, "%s: line %zu: want a JSON string: %s", path,
                             line_number, error.text);
        line = json_string_value(string);
        n = json_string_length(string);
    }
    st = yard_tokenizer_encode(tok, line, n, true, &out->ids, &out->n_ids, err);
    if (st == YARD_OK && out->n_ids == 0)
        st = yard_fail(err, YARD_EFORMAT, "%s: line %zu: no token", path, line_number);
    json_decref(string);
    return st;
}

static yard_status encode_lines(const char *path, const char *data, size_t n_bytes,
                                const yard_tokenizer *tok, yard_prompt **out, size_t *n,
                                yard_error *err)
{
    const char *const end = data + n_bytes;
    yard_status st = YARD_OK;
    size_t line_number = 0;

    for (const char *at = data; at < end && st == YARD_OK;) {
        const char *newline = memchr(at, '\n', (size_t)(end - at));
        const size_t n_line = (size_t)((newline ? newline : end) - at);
        yard_prompt *larger;

        line_number++;
        if (n_line > 0) {
            larger = realloc(*out, (*n + 1) * sizeof(**out));
            if (!larger)
                return yard_fail(err, YARD_ENOMEM, "%s: no memory for %zu prompts", path, *n + 1);
            *out = larger;
            larger[*n] = (yard_prompt){ 0 };
            st = encode_line(path, line_number, at, n_line, tok, &larger[(*n)++], err);
        }
        at += n_line + 1;
    }
    if (st == YARD_OK && *n == 0)
        st = yard_fail(err, YARD_EINVAL, "%s: empty; want at least one prompt", path);
    return st;
}

yard_status yard_prompts_read(const char *path, const yard_tokenizer *tok, yard_prompt **out,
                              size_t *n, yard_error *err)
{
    char *data = NULL;
    size_t n_bytes;
    yard_status st = yard_cli_read_all(path, &data, &n_bytes, err);

    *out = NULL;
    *n = 0;
    if (st == YARD_OK)
        st = encode_lines(yard_cli_input_name(path), data, n_bytes, tok, out, n, err);
    free(data);
    if (st != YARD_OK) {
        yard_prompts_release(*out, *n);
        *out = NULL;
        *n = 0;
    }
    return st;
}

void yard_prompts_release(yard_prompt *prompts, size_t n)
{
    for (size_t i = 0; i < n; i++)
        free(prompts[i].ids);
    free(prompts);
}

typedef struct answer {
    bool ours; /* of an instance of this pod */
    uint64_t id;
    yard_text_stream *stream; /* NULL without a tokenizer */
    char *text;
    size_t n_text, n_shown;
    int32_t *ids;
    size_t n_ids;
    bool stopped; /* a stop string is complete: what comes now is nobody's */
    yard_finish finish;
    char *error;
} answer;

typedef struct answers {
    const yard_pod_answers_config *config;
    answer *items;        /* [n] */
    size_t n, n_left, at; /* not ended; the one that is shown */
    bool interrupted;
} answers;

static yard_status add_text(answer *a, const char *text, size_t n, yard_error *err)
{
    char *larger = realloc(a->text, a->n_text + n + 1);

    if (!larger)
        return yard_fail(err, YARD_ENOMEM, "answer: no memory for its text");
    a->text = larger;
    memcpy(a->text + a->n_text, text, n);
    a->n_text += n;
    a->text[a->n_text] = '\0';
    return YARD_OK;
}

static yard_status add_token(answers *all, answer *a, int32_t token, yard_error *err)
{
    int32_t *ids = realloc(a->ids, (a->n_ids + 1) * sizeof(*ids));
    const char *text;
    char number[16];
    size_t n;
    yard_status st;

    if (!ids)
        return yard_fail(err, YARD_ENOMEM, "answer: no memory for its ids");
    a->ids = ids;
    a->ids[a->n_ids++] = token;
    if (!a->stream) {
        n = (size_t)snprintf(number, sizeof(number), a->n_ids > 1 ? ",%d" : "%d", token);
        return add_text(a, number, n, err);
    }
    st = yard_text_stream_push(a->stream, token, &text, &n, &a->stopped, err);
    if (st == YARD_OK)
        st = add_text(a, text, n, err);
    if (a->stopped)
        yard_pod_abort(all->config->pod, a->id, YARD_ALL_CHOICES);
    return st;
}

static yard_status end_answer(answers *all, answer *a, yard_pod_event *e, yard_error *err)
{
    const char *text;
    size_t n;
    yard_status st = YARD_OK;

    a->finish = a->stopped ? YARD_FINISH_STOP : e->finish;
    a->error = e->message;
    e->message = NULL;
    all->n_left--;
    if (a->stream && !a->stopped) {
        st = yard_text_stream_finish(a->stream, &text, &n, err);
        if (st == YARD_OK)
            st = add_text(a, text, n, err);
    }
    return st;
}

static answer *find(answers *all, uint64_t id)
{
    for (size_t i = 0; i < all->n; i++)
        if (all->items[i].ours && all->items[i].id == id)
            return &all->items[i];
    return NULL;
}

static yard_status take_event(answers *all, yard_pod_event *e, yard_error *err)
{
    answer *a = find(all, e->id);
    yard_status st = YARD_OK;

    if (!a)
        return YARD_OK;
    if (e->n_tokens > 0 && !a->stopped)
        st = add_token(all, a, e->token, err);
    if (st == YARD_OK && e->finish != YARD_RUNNING)
        st = end_answer(all, a, e, err);
    return st;
}

static yard_status take_events(answers *all, yard_error *err)
{
    yard_pod_event events[64];
    yard_status st = YARD_OK;
    uint32_t n;

    while (st == YARD_OK && (n = yard_pod_poll(all->config->pod, events, 64)) > 0)
        for (uint32_t i = 0; i < n; i++) {
            if (st == YARD_OK)
                st = take_event(all, &events[i], err);
            yard_pod_event_free(&events[i]);
        }
    return st;
}

static const char *finish_name(const answer *a)
{
    return a->finish == YARD_FINISH_ERROR ? "error" : yard_answer_finish_name(a->finish);
}

static yard_status print_json(const answers *all, size_t i, yard_error *err)
{
    const answer *a = &all->items[i];
    json_t *ids = json_array(), *line;
    json_t *text = a->stream ? json_stringn(a->text ? a->text : "", a->n_text) : json_null();

    for (size_t j = 0; j < a->n_ids; j++)
        json_array_append_new(ids, json_integer(a->ids[j]));
    line = json_pack("{s:I,s:o,s:o,s:s}", "prompt", (json_int_t)i, "text", text, "ids", ids,
                     "finish_reason", finish_name(a));
    if (a->error)
        json_object_set_new(line, "error", json_string(a->error));
    if (!line)
        return yard_fail(err, YARD_ENOMEM, "answer: no memory for its JSON");
    json_dumpf(line, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(line);
    return YARD_OK;
}

/* Of the answer at hand what is there, then of those behind it that are whole. */
static yard_status show(answers *all, yard_error *err)
{
    yard_status st = YARD_OK;

    for (; all->at < all->n && st == YARD_OK; all->at++) {
        answer *a = &all->items[all->at];

        if (!a->ours)
            continue;
        if (!all->config->json && a->n_text > a->n_shown) { /* no text: no memory yet */
            fwrite(a->text + a->n_shown, 1, a->n_text - a->n_shown, stdout);
            a->n_shown = a->n_text;
        }
        if (a->finish == YARD_RUNNING)
            break;
        if (all->config->json)
            st = print_json(all, all->at, err);
        else
            putchar('\n');
        if (a->error && !all->config->json) {
            fflush(stdout);
            fprintf(stderr, "switchyard generate: prompt %zu: %s\n", all->at, a->error);
        }
    }
    fflush(stdout);
    return st;
}

static yard_status submit(answers *all, const yard_prompt *prompts, uint32_t n_instances,
                          yard_error *err)
{
    const yard_pod_answers_config *c = all->config;
    const uint32_t first = yard_pod_first_instance(c->pod), n = yard_pod_instance_count(c->pod);
    yard_status st = YARD_OK;

    for (size_t i = 0; i < all->n && st == YARD_OK; i++) {
        const uint32_t instance = (uint32_t)(i % n_instances);
        const yard_request request =
            yard_sampling_options_request(c->sampling, prompts[i].ids, prompts[i].n_ids);
        answer *a = &all->items[i];

        a->ours = instance >= first && instance < first + n;
        if (!a->ours)
            continue;
        if (c->tok)
            st = yard_text_stream_create(&a->stream, c->tok, true, c->sampling->stop,
                                         c->sampling->n_stop, err);
        if (st == YARD_OK)
            st = yard_pod_submit(c->pod, instance - first, &request, &a->id, err);
        all->n_left++;
    }
    return st;
}

static void interrupt(answers *all)
{
    all->interrupted = true;
    for (size_t i = 0; i < all->n; i++)
        if (all->items[i].ours && all->items[i].finish == YARD_RUNNING)
            yard_pod_abort(all->config->pod, all->items[i].id, YARD_ALL_CHOICES);
}

yard_status yard_pod_answer_all(const yard_pod_answers_config *config, const yard_prompt *prompts,
                                size_t n, uint32_t n_instances, yard_pod_answers_result *out,
                                yard_error *err)
{
    enum { LOOK_US = 100000 };
    answers all = { .config = config, .items = calloc(n, sizeof(*all.items)), .n = n };
    yard_status st = YARD_OK;

    *out = (yard_pod_answers_result){ 0 };
    if (!all.items)
        return yard_fail(err, YARD_ENOMEM, "answers: no memory for %zu", n);
    if (!config->tok && config->sampling->n_stop > 0)
        st = yard_fail(err, YARD_EINVAL,
                       "--stop: the model has no tokenizer.json, so there is no text");
    if (st == YARD_OK)
        st = submit(&all, prompts, n_instances, err);
    while (st == YARD_OK && all.n_left > 0) {
        if (!all.interrupted && (yard_interrupt_take() || ferror(stdout)))
            interrupt(&all);
        st = yard_pod_run(config->pod, LOOK_US, err);
        if (st == YARD_OK)
            st = take_events(&all, err);
        if (st == YARD_OK)
            st = show(&all, err);
    }
    for (size_t i = 0; i < n; i++) {
        out->n_failed += all.items[i].error != NULL;
        yard_text_stream_destroy(all.items[i].stream);
        free(all.items[i].text);
        free(all.items[i].ids);
        free(all.items[i].error);
    }
    out->interrupted = all.interrupted;
    free(all.items);
    return st;
}
