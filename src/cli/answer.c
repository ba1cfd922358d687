#include "cli/answer.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <jansson.h>

static volatile sig_atomic_t interrupted;
static int wake_fd = -1; /* readable once interrupted; -1: an ignored entry of poll */

static void on_interrupt(int signal_number)
{
    const int saved = errno;
    const uint64_t one = 1;
    ssize_t written;

    if (interrupted) {
        signal(signal_number, SIG_DFL);
        raise(signal_number);
    }
    interrupted = 1;
    written = write(wake_fd, &one, sizeof(one));
    (void)written; /* without it the flag still counts, and poll ends with EINTR as a rule */
    errno = saved;
}

void yard_interrupt_catch(void)
{
    struct sigaction action = { .sa_handler = on_interrupt };

    if (wake_fd < 0)
        wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
}

bool yard_interrupt_take(void)
{
    const bool was = interrupted;
    uint64_t count;

    interrupted = 0;
    while (read(wake_fd, &count, sizeof(count)) > 0)
        ;
    return was;
}

bool yard_interrupt_wait_input(void)
{
    struct pollfd fds[2] = { { .fd = STDIN_FILENO, .events = POLLIN },
                             { .fd = wake_fd, .events = POLLIN } };

    while (!interrupted && poll(fds, 2, -1) < 0 && errno == EINTR)
        ;
    return !interrupted;
}

typedef struct answer_run {
    const yard_answer_config *config;
    yard_answer *answer;
    yard_text_stream *stream; /* NULL without a tokenizer */
    FILE *text;               /* collects answer->text; NULL without a tokenizer */
    bool stopped;             /* a stop string is complete */
} answer_run;

static void show(const answer_run *run, const char *text, size_t n_bytes)
{
    if (run->text)
        fwrite(text, 1, n_bytes, run->text);
    if (!run->config->show || n_bytes == 0)
        return;
    fwrite(text, 1, n_bytes, stdout);
    fflush(stdout);
}

static yard_status add_id(yard_answer *answer, int32_t id, yard_error *err)
{
    if (answer->n_ids == answer->max_ids) {
        const size_t max_ids = answer->max_ids ? 2 * answer->max_ids : 256;
        int32_t *ids = realloc(answer->ids, max_ids * sizeof(*ids));

        if (!ids)
            return yard_fail(err, YARD_ENOMEM, "answer: no memory for %zu ids", max_ids);
        answer->ids = ids;
        answer->max_ids = max_ids;
    }
    answer->ids[answer->n_ids++] = id;
    return YARD_OK;
}

static yard_status take_token(answer_run *run, int32_t id, yard_error *err)
{
    const char *text;
    size_t n_bytes;
    char number[16];
    yard_status st = add_id(run->answer, id, err);

    if (st != YARD_OK)
        return st;
    if (run->stream) {
        st = yard_text_stream_push(run->stream, id, &text, &n_bytes, &run->stopped, err);
        if (st == YARD_OK)
            show(run, text, n_bytes);
        return st;
    }
    n_bytes = (size_t)snprintf(number, sizeof(number), run->answer->n_ids > 1 ? ",%d" : "%d", id);
    show(run, number, n_bytes);
    return YARD_OK;
}

/* Events of one step. After a stop string whatever else comes belongs to nobody. */
static yard_status take_events(answer_run *run, uint64_t id, yard_error *err)
{
    yard_event events[16];
    uint32_t n;

    while ((n = yard_engine_poll(run->config->engine, events, 16)) > 0)
        for (uint32_t i = 0; i < n; i++) {
            yard_status st = YARD_OK;

            if (events[i].id != id)
                continue;
            if (events[i].n_tokens > 0 && !run->stopped)
                st = take_token(run, events[i].token, err);
            if (st != YARD_OK)
                return st;
            if (events[i].finish == YARD_FINISH_ERROR)
                return yard_fail(err, YARD_EFORMAT, "%s", yard_engine_error(run->config->engine));
            if (events[i].finish != YARD_RUNNING)
                run->answer->finish = events[i].finish;
        }
    return YARD_OK;
}

/* Waits for the last event even when the request is aborted: the next one starts clean. */
static yard_status run_to_end(answer_run *run, uint64_t id, yard_error *err)
{
    yard_engine *engine = run->config->engine;
    yard_answer *answer = run->answer;
    const uint64_t begin_us = yard_now_us();
    uint64_t first_us = 0;
    bool aborted = false;

    while (answer->finish == YARD_RUNNING) {
        yard_status st = YARD_OK;

        if (!aborted && (run->stopped || interrupted || ferror(stdout))) {
            aborted = true;
            st = yard_engine_abort(engine, id, YARD_ALL_CHOICES);
        }
        if (st == YARD_OK)
            st = yard_engine_step(engine);
        if (st != YARD_OK)
            return yard_fail(err, st, "%s", yard_engine_error(engine));
        st = take_events(run, id, err);
        if (st != YARD_OK)
            return st;
        if (first_us == 0 && answer->n_ids > 0)
            first_us = yard_now_us();
    }
    if (run->stopped)
        answer->finish = YARD_FINISH_STOP;
    if (first_us != 0) {
        answer->prefill_us = first_us - begin_us;
        answer->decode_us = yard_now_us() - first_us;
    }
    return YARD_OK;
}

static yard_status open_text(answer_run *run, yard_error *err)
{
    const yard_answer_config *config = run->config;

    if (!config->tok) {
        if (config->n_stop > 0)
            return yard_fail(err, YARD_EINVAL,
                             "--stop: the model has no tokenizer.json, so there is no text");
        return YARD_OK;
    }
    run->text = open_memstream(&run->answer->text, &run->answer->n_bytes);
    if (!run->text)
        return yard_fail(err, YARD_ENOMEM, "answer: no memory for its text");
    return yard_text_stream_create(&run->stream, config->tok, true, config->stop, config->n_stop,
                                   err);
}

static yard_status close_text(answer_run *run, yard_status st, yard_error *err)
{
    const char *text;
    size_t n_bytes;

    if (st == YARD_OK && run->stream && !run->stopped) {
        st = yard_text_stream_finish(run->stream, &text, &n_bytes, err);
        if (st == YARD_OK)
            show(run, text, n_bytes);
    }
    if (run->text && fclose(run->text) != 0 && st == YARD_OK)
        st = yard_fail(err, YARD_ENOMEM, "answer: no memory for its text");
    yard_text_stream_destroy(run->stream);
    return st;
}

yard_status yard_answer_run(yard_answer *out, const yard_answer_config *config,
                            const yard_request *request, yard_error *err)
{
    answer_run run = { .config = config, .answer = out };
    uint64_t id;
    yard_status st;

    *out = (yard_answer){ .finish = YARD_RUNNING };
    st = open_text(&run, err);
    if (st == YARD_OK) {
        st = yard_engine_submit(config->engine, request, &id);
        if (st != YARD_OK)
            yard_fail(err, st, "%s", yard_engine_error(config->engine));
    }
    if (st == YARD_OK)
        st = run_to_end(&run, id, err);
    return close_text(&run, st, err);
}

void yard_answer_release(yard_answer *answer)
{
    free(answer->ids);
    free(answer->text);
    *answer = (yard_answer){ 0 };
}

const char *yard_answer_finish_name(yard_finish finish)
{
    switch (finish) {
    case YARD_FINISH_STOP:
        return "stop";
    case YARD_FINISH_LENGTH:
        return "length";
    default:
        return "abort";
    }
}

yard_status yard_answer_print_json(const yard_answer *answer, yard_error *err)
{
    json_t *ids = json_array();
    json_t *text = answer->text ? json_stringn(answer->text, answer->n_bytes) : json_null();
    json_t *line;
    yard_status st = YARD_OK;

    for (size_t i = 0; i < answer->n_ids; i++)
        json_array_append_new(ids, json_integer(answer->ids[i]));
    line = json_pack("{s:o,s:o,s:s}", "text", text, "ids", ids, "finish_reason",
                     yard_answer_finish_name(answer->finish));
    if (!line || json_array_size(ids) != answer->n_ids)
        st = yard_fail(err, YARD_ENOMEM, "answer: no memory for its JSON");
    else if (json_dumpf(line, stdout, JSON_COMPACT) == 0)
        fputc('\n', stdout);
    json_decref(line);
    return st;
}

static double per_second(size_t n, uint64_t us)
{
    return us > 0 ? (double)n * 1e6 / (double)us : 0;
}

void yard_answer_print_timing(const yard_answer *answer, uint32_t n_prompt)
{
    const size_t n_decoded = answer->n_ids > 0 ? answer->n_ids - 1 : 0;

    if (!isatty(STDERR_FILENO) || answer->n_ids == 0)
        return;
    fprintf(stderr, "prompt: %u tokens, %.0f tokens/s; generated: %zu tokens, %.1f tokens/s\n",
            n_prompt, per_second(n_prompt, answer->prefill_us), answer->n_ids,
            per_second(n_decoded, answer->decode_us));
}
