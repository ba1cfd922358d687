#include "cli/serve_options.h"

#include <stdio.h>
#include <stdlib.h>

#include "cli/engine_options.h"
#include "cli/pod_options.h"

enum {
    KEY_HOST = 0x5000,
    KEY_PORT,
    KEY_ENGINES,
    KEY_NAME,
    KEY_API_KEY,
    KEY_API_KEY_FILE,
    KEY_TEMPLATE,
    KEY_ACCESS_LOG,
    KEY_MAX_QUEUED,
    KEY_REQUEST_TIMEOUT,
    KEY_MAX_CONNECTIONS,
    KEY_MAX_BODY,
    KEY_DRAIN_TIMEOUT,
    KEY_LISTEN_FD,
    DEFAULT_PORT = 8080
};

void yard_words_add(yard_words *words, const char *word)
{
    char **larger = realloc(words->word, (words->n_words + 2) * sizeof(*larger));
    char *copy = strdup(word);

    if (!larger || !copy) {
        fprintf(stderr, "switchyard serve: no memory for the command line\n");
        exit(EXIT_FAILURE);
    }
    words->word = larger;
    words->word[words->n_words++] = copy;
    words->word[words->n_words] = NULL;
}

void yard_words_release(yard_words *words)
{
    for (size_t i = 0; i < words->n_words; i++)
        free(words->word[i]);
    free(words->word);
    *words = (yard_words){ 0 };
}

static void add_option(yard_words *words, const char *name, const char *value)
{
    char *text = NULL;

    if (asprintf(&text, value ? "--%s=%s" : "--%s", name, value) < 0)
        text = NULL;
    yard_words_add(words, text ? text : "");
    free(text);
}

/* What the parsers of these options write to comes first, as they expect it to be their input. */
typedef struct passed_engine {
    yard_engine_config config;
    yard_words *words;
} passed_engine;

typedef struct passed_pod {
    yard_pod_options options;
    yard_words *words;
} passed_pod;

static error_t pass(const struct argp *argp, int key, char *arg, struct argp_state *state,
                    yard_words *words)
{
    const error_t code = argp->parser(key, arg, state);

    for (const struct argp_option *o = argp->options; code == 0 && o->name; o++)
        if (o->key == key)
            add_option(words, o->name, arg);
    return code;
}

static error_t parse_engine(int key, char *arg, struct argp_state *state)
{
    return pass(&yard_engine_argp, key, arg, state, ((passed_engine *)state->input)->words);
}

static error_t parse_pod(int key, char *arg, struct argp_state *state)
{
    return pass(&yard_pod_argp, key, arg, state, ((passed_pod *)state->input)->words);
}

typedef struct parsing {
    yard_serve_options *o;
    passed_engine engine;
    passed_pod pod;
} parsing;

static const struct argp_option option_list[] = {
    { "host", KEY_HOST, "ADDR", 0, "Address to listen on (default 127.0.0.1; 0.0.0.0: all)", 1 },
    { "port", KEY_PORT, "N", 0, "Port (default 8080; 0: a free one, which is printed)", 1 },
    { "served-model-name", KEY_NAME, "NAME", 0,
      "What clients call the model (default: the last part of MODEL)", 1 },
    { "api-key", KEY_API_KEY, "KEY", 0,
      "Take only requests with \"Authorization: Bearer KEY\"; may be given several times", 1 },
    { "api-key-file", KEY_API_KEY_FILE, "FILE", 0, "Keys, one a line", 1 },
    { "template", KEY_TEMPLATE, "NAME", 0, "Chat template (default: the checkpoint's)", 1 },
    { "access-log", KEY_ACCESS_LOG, "FILE", 0, "One JSON line a request (-: standard output)", 1 },
    { "engines", KEY_ENGINES, "A:PORT,..", 0,
      "Engines that run elsewhere ('switchyard engine'); none is started here. "
      "unix:PATH is an address too",
      2 },
    { "max-queued", KEY_MAX_QUEUED, "N", 0,
      "Requests that may wait; more get status 429 (default 1024)", 3 },
    { "request-timeout", KEY_REQUEST_TIMEOUT, "S", 0,
      "Seconds for a request, waiting included (default 3600)", 3 },
    { "max-connections", KEY_MAX_CONNECTIONS, "N", 0, "Further ones wait (default 4096)", 3 },
    { "max-body", KEY_MAX_BODY, "MIB", 0, "Largest body of a request (default 64)", 3 },
    { "drain-timeout", KEY_DRAIN_TIMEOUT, "S", 0,
      "Seconds that requests have to end after SIGTERM (default 30)", 3 },
    { "listen-fd", KEY_LISTEN_FD, "FD", OPTION_HIDDEN, NULL, 0 },
    { 0 },
};

static void add_list(yard_words *words, const char *list)
{
    while (*list) {
        const size_t n = strcspn(list, ",");
        char *item = strndup(list, n);

        if (n > 0)
            yard_words_add(words, item ? item : "");
        free(item);
        list += n + (list[n] == ',');
    }
}

static void read_keys(yard_words *words, const char *path, struct argp_state *state)
{
    yard_error err = { 0 };
    char *data = NULL, *save = NULL;
    size_t n_bytes = 0;

    if (yard_cli_read_all(path, &data, &n_bytes, &err) != YARD_OK)
        argp_error(state, "--api-key-file: %s", err.message);
    for (char *line = strtok_r(data, "\r\n", &save); line; line = strtok_r(NULL, "\r\n", &save))
        yard_words_add(words, line);
    free(data);
    if (words->n_words == 0)
        argp_error(state, "--api-key-file: %s: want a key a line, got none", path);
}

static uint64_t seconds_us(struct argp_state *state, const char *option, const char *arg)
{
    return (uint64_t)((double)yard_cli_argp_f32(state, option, arg, 0.001f, 1e6f) * 1e6);
}

static error_t parse_value(int key, char *arg, struct argp_state *state)
{
    yard_serve_options *o = ((parsing *)state->input)->o;

    switch (key) {
    case KEY_HOST:
        o->host = arg;
        return 0;
    case KEY_PORT:
        o->port = (uint32_t)yard_cli_argp_u64(state, "--port", arg, 0, 65535);
        return 0;
    case KEY_ENGINES:
        add_list(&o->engines, arg);
        if (o->engines.n_words == 0)
            argp_error(state, "--engines: want addresses separated by commas, got '%s'", arg);
        return 0;
    case KEY_NAME:
        if (!arg[0] || !yard_utf8_valid(arg, strlen(arg), NULL))
            argp_error(state, "--served-model-name: want some text");
        o->served_name = arg;
        return 0;
    case KEY_API_KEY:
        if (!arg[0])
            argp_error(state, "--api-key: want a key, got an empty one");
        yard_words_add(&o->api_keys, arg);
        return 0;
    case KEY_API_KEY_FILE:
        read_keys(&o->api_keys, arg, state);
        return 0;
    case KEY_TEMPLATE:
        o->template_name = arg;
        return 0;
    case KEY_ACCESS_LOG:
        o->access_log = arg;
        return 0;
    case KEY_MAX_QUEUED:
        o->front.max_queued = (uint32_t)yard_cli_argp_u64(state, "--max-queued", arg, 1, 1 << 24);
        return 0;
    case KEY_REQUEST_TIMEOUT:
        o->front.request_timeout_us = seconds_us(state, "--request-timeout", arg);
        return 0;
    case KEY_MAX_CONNECTIONS:
        o->http.max_connections =
            (uint32_t)yard_cli_argp_u64(state, "--max-connections", arg, 1, 1 << 20);
        return 0;
    case KEY_MAX_BODY:
        o->http.max_body_bytes = (size_t)yard_cli_argp_u64(state, "--max-body", arg, 1, 4096) << 20;
        return 0;
    case KEY_DRAIN_TIMEOUT:
        o->http.drain_timeout_us = seconds_us(state, "--drain-timeout", arg);
        return 0;
    case KEY_LISTEN_FD:
        o->listen_fd = (int)yard_cli_argp_u64(state, "--listen-fd", arg, 3, 1 << 20);
        return 0;
    default:
        return yard_cli_parse_model(key, arg, state, &o->model);
    }
}

/* A front in a process of its own gets what was given but for where to listen. */
static error_t parse(int key, char *arg, struct argp_state *state)
{
    parsing *p = state->input;
    error_t code;

    if (key == ARGP_KEY_INIT) {
        state->child_inputs[0] = &p->engine;
        state->child_inputs[1] = &p->pod;
        return 0;
    }
    if (key == ARGP_KEY_END && p->o->engines.n_words > 0 && p->o->for_engine.n_words > 0)
        argp_error(state,
                   "%s: want it given to 'switchyard engine', got it with --engines, "
                   "which starts none",
                   p->o->for_engine.word[0]);
    code = parse_value(key, arg, state);
    for (const struct argp_option *o = option_list; code == 0 && o->name; o++)
        if (o->key == key && key != KEY_HOST && key != KEY_PORT && key != KEY_LISTEN_FD)
            add_option(&p->o->for_front, o->name, arg);
    return code;
}

static const struct argp engine_child = {
    .parser = parse_engine,
};

static const struct argp pod_child = {
    .parser = parse_pod,
};

static const char doc[] =
    "Serves a model over HTTP with the API of OpenAI: /v1/chat/completions, /v1/completions, "
    "/v1/models, and /tokenize, /detokenize, /health/live, /health/ready, /health/progress, "
    "/metrics."
    "\vAn engine is started beside the server, and both are started again should they die. With "
    "--engines the server is the front of engines that run elsewhere; MODEL is read for its "
    "tokenizer, template and defaults. SIGTERM and Ctrl-C let requests under way end; a second one "
    "does not. Whoever can reach the address can use the model: set --api-key before --host.\n\n"
    "Examples:\n"
    "  switchyard serve models/demo --port 8080\n"
    "  switchyard serve models/demo --ranks 2 --api-key-file keys.txt \\\n"
    "      --host 0.0.0.0\n"
    "  switchyard serve models/demo --engines node0:9000,node1:9000\n";

/* /models/demo/ is "demo". */
static char *last_part(const char *path)
{
    size_t n = strlen(path), begin;

    while (n > 1 && path[n - 1] == '/')
        n--;
    for (begin = n; begin > 0 && path[begin - 1] != '/'; begin--)
        ;
    return strndup(path + begin, n - begin);
}

void yard_serve_options_parse(yard_serve_options *out, int argc, char **argv)
{
    struct argp engine = engine_child, pod = pod_child;
    const struct argp_child children[] = { { &engine, 0, "Computing:", 4 },
                                           { &pod, 0, "On several ranks:", 5 },
                                           { 0 } };
    const struct argp argp = { option_list, parse, "MODEL", doc, children, NULL, NULL };
    parsing p = { .o = out, .engine.words = &out->for_engine, .pod.words = &out->for_engine };

    *out = (yard_serve_options){ .host = "127.0.0.1",
                                 .port = DEFAULT_PORT,
                                 .listen_fd = -1,
                                 .front = YARD_FRONT_CONFIG_INIT,
                                 .http = YARD_HTTP_CONFIG_INIT };
    engine.options = yard_engine_argp.options;
    pod.options = yard_pod_argp.options;
    yard_cli_parse_args(&argp, "switchyard serve", argc, argv, 0, &p);
    if (!out->served_name) {
        out->default_name = last_part(out->model);
        out->served_name = out->default_name ? out->default_name : out->model;
    }
}

void yard_serve_options_release(yard_serve_options *o)
{
    free(o->default_name);
    yard_words_release(&o->engines);
    yard_words_release(&o->api_keys);
    yard_words_release(&o->for_front);
    yard_words_release(&o->for_engine);
}
