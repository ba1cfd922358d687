/* switchyard chat: a conversation in the terminal, or one turn for each line of standard input. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

#include <jansson.h>

#include "cli/answer.h"
#include "cli/engine_options.h"
#include "engine/engine.h"

enum { KEY_SYSTEM = 0x1000, KEY_TEMPLATE, KEY_RAW, KEY_JSON };

typedef struct chat_args {
    const char *model, *system;
    const yard_chat_template *tpl; /* NULL: the model's */
    bool raw, json;
    yard_sampling_options sampling;
    yard_engine_config engine;
} chat_args;

typedef struct chat {
    chat_args args;
    yard_tokenizer *tok;
    const yard_chat_template *tpl; /* NULL with --raw */
    yard_engine *engine;
    json_t *messages; /* the system message, if any, then turns */
    uint32_t context_tokens;
    bool terminal; /* a person types */
} chat;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    chat_args *args = state->input;
    yard_error err = { 0 };

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &args->sampling;
        state->child_inputs[1] = &args->engine;
        return 0;
    case KEY_SYSTEM:
        args->system = arg;
        return 0;
    case KEY_TEMPLATE:
        if (yard_chat_template_find(&args->tpl, NULL, arg, &err) != YARD_OK)
            argp_error(state, "%s", err.message);
        return 0;
    case KEY_RAW:
        args->raw = true;
        return 0;
    case KEY_JSON:
        args->json = true;
        return 0;
    case ARGP_KEY_SUCCESS:
        if (args->raw && (args->system || args->tpl))
            argp_error(state, "--raw goes without --system and --chat-template");
        if (args->system && !yard_utf8_valid(args->system, strlen(args->system), NULL))
            argp_error(state, "--system: not UTF-8");
        return 0;
    default:
        return yard_cli_parse_model(key, arg, state, &args->model);
    }
}

static const struct argp_option option_list[] = {
    { "system", KEY_SYSTEM, "TEXT", 0, "The system message", 0 },
    { "chat-template", KEY_TEMPLATE, "NAME", 0,
      "Use this encoder, not the one the checkpoint's template is recognised as", 0 },
    { "raw", KEY_RAW, NULL, 0, "No template, no history: each line is a prompt as it is", 0 },
    { "json", KEY_JSON, NULL, 0,
      "For each answer one line {\"text\":..,\"ids\":[..],\"finish_reason\":..}", 0 },
    { 0 },
};

static const struct argp_child children[] = {
    { &yard_sampling_argp, 0, "Choosing tokens:", 2 },
    { &yard_engine_argp, 0, "Computing:", 3 },
    { 0 },
};

static const struct argp chat_argp = {
    .options = option_list,
    .parser = parse,
    .args_doc = "MODEL",
    .doc = "Talks to a model. Defaults for choosing tokens come from the checkpoint's "
           "generation_config.json; --max-tokens from the context. Without --seed a seed is drawn."
           "\vIn a terminal Ctrl-C stops the running answer, what was said so far stays; /reset "
           "forgets the conversation, /quit or Ctrl-D ends. Otherwise every line of standard input "
           "is one turn, also /reset and /quit (only empty lines are skipped), the answers follow "
           "each other, and the first error ends. When the conversation outgrows the context, its "
           "oldest turns are dropped, "
           "with a note; the system message stays.\n\n"
           "Examples:\n"
           "  switchyard chat models/demo\n"
           "  echo 'What is a horse?' | switchyard chat models/demo --temperature 0\n",
    .children = children,
};

static yard_status no_memory(yard_error *err)
{
    return yard_fail(err, YARD_ENOMEM, "chat: no memory for the conversation");
}

static yard_status add_message(chat *c, const char *role, const char *text, size_t n_bytes,
                               yard_error *err)
{
    json_t *content = json_stringn(text, n_bytes);
    json_t *message = json_pack("{s:s,s:o}", "role", role, "content", content);

    /* steals message, also when it fails */
    return json_array_append_new(c->messages, message) == 0 ? YARD_OK : no_memory(err);
}

/* The messages after the system message: a user's, the answer to it, and so on. */
static size_t first_turn(const chat *c)
{
    return c->args.system ? 1 : 0;
}

static yard_status reset(chat *c, yard_error *err)
{
    json_array_clear(c->messages);
    if (!c->args.system)
        return YARD_OK;
    return add_message(c, "system", c->args.system, strlen(c->args.system), err);
}

static yard_status encode_messages(const chat *c, int32_t **ids, size_t *n_ids, yard_error *err)
{
    char *json = json_dumps(c->messages, JSON_COMPACT);
    char *text = NULL;
    size_t n_text = 0;
    yard_status st;

    if (!json)
        return no_memory(err);
    st = yard_chat_template_render(c->tpl, c->tok, json, strlen(json), true, &text, &n_text, err);
    free(json);
    if (st == YARD_OK)
        st = yard_tokenizer_encode(c->tok, text, n_text, true, ids, n_ids, err);
    free(text);
    return st;
}

/* Ids of the conversation, oldest turns dropped until a quarter of the context (or --max-tokens,
 * if that is less) is free for the answer. A last turn that is too long is the engine's to refuse.
 */
static yard_status encode_fitting(chat *c, int32_t **ids, size_t *n_ids, yard_error *err)
{
    const uint32_t quarter = c->context_tokens / 4;
    const uint32_t reserve =
        c->args.sampling.max_tokens < quarter ? c->args.sampling.max_tokens : quarter;
    const size_t first = first_turn(c);

    for (;;) {
        const yard_status st = encode_messages(c, ids, n_ids, err);
        if (st != YARD_OK)
            return st;
        if (*n_ids + reserve <= c->context_tokens || json_array_size(c->messages) <= first + 1)
            return YARD_OK;
        free(*ids);
        *ids = NULL;
        json_array_remove(c->messages, first);
        json_array_remove(c->messages, first);
        fprintf(stderr,
                "switchyard chat: the context of %u tokens is full: the oldest turn was "
                "dropped\n",
                c->context_tokens);
    }
}

static yard_status show_answer(chat *c, const int32_t *ids, size_t n_ids, yard_answer *answer,
                               yard_error *err)
{
    const yard_sampling_options *sampling = &c->args.sampling;
    const yard_answer_config config = {
        .engine = c->engine,
        .tok = c->tok,
        .stop = sampling->stop,
        .n_stop = sampling->n_stop,
        .show = !c->args.json,
    };
    const yard_request request = yard_sampling_options_request(sampling, ids, n_ids);
    yard_status st = yard_answer_run(answer, &config, &request, err);

    if (st == YARD_OK && c->args.json)
        st = yard_answer_print_json(answer, err);
    else if (st == YARD_OK)
        putchar('\n');
    fflush(stdout);
    if (st == YARD_OK && c->terminal && answer->finish == YARD_FINISH_LENGTH)
        fprintf(stderr, "(cut off after %zu tokens)\n", answer->n_ids);
    if (st == YARD_OK && c->terminal)
        yard_answer_print_timing(answer, request.n_prompt);
    return st;
}

/* One turn. After an error the conversation is as before the turn. */
static yard_status take_turn(chat *c, const char *line, size_t n_bytes, yard_error *err)
{
    yard_answer answer = { 0 };
    int32_t *ids = NULL;
    size_t n_ids = 0, bad_at = 0;
    yard_status st;

    if (!yard_utf8_valid(line, n_bytes, &bad_at))
        return yard_fail(err, YARD_EFORMAT, "line: not UTF-8 at byte %zu", bad_at);
    if (c->args.raw) {
        st = yard_tokenizer_encode(c->tok, line, n_bytes, true, &ids, &n_ids, err);
    } else {
        st = add_message(c, "user", line, n_bytes, err);
        if (st != YARD_OK)
            return st;
        st = encode_fitting(c, &ids, &n_ids, err);
    }
    if (st == YARD_OK)
        st = show_answer(c, ids, n_ids, &answer, err);
    if (st == YARD_OK && !c->args.raw)
        st = add_message(c, "assistant", answer.text, answer.n_bytes, err);
    if (st != YARD_OK && !c->args.raw)
        json_array_remove(c->messages, json_array_size(c->messages) - 1);
    yard_answer_release(&answer);
    free(ids);
    return st;
}

/* Reads a line without its end. False at the end of input, and for a Ctrl-C in a pipeline. In a
 * terminal the wait comes first; it hands over whole lines, so none waits in stdin's buffer. */
static bool read_line(const chat *c, char **line, size_t *max_bytes, size_t *n_bytes)
{
    ssize_t n;

    for (;;) {
        n = -1;
        if (c->terminal)
            fputs("> ", stderr);
        if (!c->terminal || yard_interrupt_wait_input())
            n = getline(line, max_bytes, stdin);
        if (n >= 0)
            break;
        if (!c->terminal)
            return false;
        fputc('\n', stderr);
        if (!yard_interrupt_take())
            return false;
        clearerr(stdin);
        fputs("(/quit or Ctrl-D ends)\n", stderr);
    }
    if (n > 0 && (*line)[n - 1] == '\n')
        (*line)[--n] = '\0';
    *n_bytes = (size_t)n;
    return true;
}

static int converse(chat *c)
{
    char *line = NULL;
    size_t max_bytes = 0, n_bytes;
    yard_error err = { 0 };
    int rc = EXIT_SUCCESS;

    yard_interrupt_catch();
    while (rc == EXIT_SUCCESS && !ferror(stdout) && read_line(c, &line, &max_bytes, &n_bytes)) {
        yard_status st;

        if (n_bytes == 0)
            continue;
        if (c->terminal && !strcmp(line, "/quit"))
            break;
        if (c->terminal && !strcmp(line, "/reset"))
            st = reset(c, &err);
        else
            st = take_turn(c, line, n_bytes, &err);
        if (st != YARD_OK) {
            rc = yard_cli_fail("chat", &err);
            if (c->terminal)
                rc = EXIT_SUCCESS; /* told; the person goes on */
        }
        if (yard_interrupt_take() && !c->terminal)
            rc = YARD_EXIT_INTERRUPTED;
    }
    if (rc == EXIT_SUCCESS && yard_interrupt_take())
        rc = YARD_EXIT_INTERRUPTED;
    free(line);
    return rc;
}

static yard_status prepare_sampling(chat_args *args, yard_error *err)
{
    yard_generation_config defaults;
    yard_status st = yard_generation_config_load(&defaults, args->model, yard_cli_notify(), err);
    uint32_t seed;

    if (st != YARD_OK)
        return st;
    yard_sampling_options_default(&args->sampling, &defaults);
    if (!args->sampling.seed_given) {
        if (getrandom(&seed, sizeof(seed), 0) != (ssize_t)sizeof(seed))
            return yard_fail(err, YARD_EIO, "seed: the system gives no random numbers");
        args->sampling.sampling.seed = seed;
    }
    return YARD_OK;
}

static yard_status open_chat(chat *c, yard_error *err)
{
    yard_engine_stats stats;
    yard_status st = yard_cli_check_model(c->args.model, err);

    if (st == YARD_OK)
        st = prepare_sampling(&c->args, err);
    if (st == YARD_OK)
        st = yard_cli_load_tokenizer(&c->tok, c->args.model, true, err);
    c->tpl = c->args.tpl;
    if (st == YARD_OK && !c->args.raw && !c->tpl)
        st = yard_chat_template_find(&c->tpl, c->tok, NULL, err);
    if (st != YARD_OK)
        return st;
    c->messages = json_array();
    if (!c->messages)
        return no_memory(err);
    st = reset(c, err);
    if (st == YARD_OK)
        st = yard_engine_create(&c->engine, &c->args.engine, err);
    if (st != YARD_OK)
        return st;
    yard_engine_get_stats(c->engine, &stats);
    c->context_tokens = yard_engine_model_config(c->engine)->max_positions;
    if ((uint64_t)stats.n_pages * YARD_PAGE_TOKENS < c->context_tokens)
        c->context_tokens = stats.n_pages * YARD_PAGE_TOKENS;
    return YARD_OK;
}

/* Above the first prompt: what a person needs to get the same text again, and to leave. */
static void print_hint(const chat *c)
{
    const yard_sampling *s = &c->args.sampling.sampling;

    fprintf(stderr, "%s; %s", yard_engine_describe(c->engine),
            c->tpl ? yard_chat_template_name(c->tpl) : "no template");
    if (s->temperature > 0)
        fprintf(stderr, "; temperature %g, top-p %g, seed %llu", (double)s->temperature,
                (double)s->top_p, (unsigned long long)s->seed);
    fprintf(stderr, "\nCtrl-C stops an answer, /reset forgets the conversation, /quit ends.\n");
}

int yard_cmd_chat(int argc, char **argv)
{
    chat c = { .terminal = isatty(STDIN_FILENO) };
    yard_error err = { 0 };
    int rc;

    yard_cli_parse_args(&chat_argp, "switchyard chat", argc, argv, 0, &c.args);
    c.args.engine.model_dir = c.args.model;
    c.args.engine.max_seqs = 1;

    if (open_chat(&c, &err) != YARD_OK) {
        rc = yard_cli_fail("chat", &err);
    } else {
        if (c.terminal)
            print_hint(&c);
        rc = converse(&c);
        if (yard_cli_close_stdout("chat") != EXIT_SUCCESS && rc == EXIT_SUCCESS)
            rc = EXIT_FAILURE;
    }
    json_decref(c.messages);
    yard_engine_destroy(c.engine);
    yard_tokenizer_free(c.tok);
    yard_sampling_options_release(&c.args.sampling);
    return rc;
}
