/* switchyard bench serve: load on a running server, and what its clients see of it.
 *
 * A case is a number of clients that each wait for their answer (closed loop), or a rate at which
 * requests arrive whatever becomes of the earlier ones (open loop). Each case gives three rows:
 * time to first token, time between tokens, time of the whole answer. */
#include "cli/bench_serve.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/args.h"
#include "cli/bench.h"
#include "cli/engine_options.h"

enum { MAX_CLIENTS = 20000, MAX_TOKENS = 1 << 20, MAX_REQUESTS = 10000000, MAX_RATE = 1000000 };
enum {
    KEY_URL = 0x1000,
    KEY_IN_PROCESS,
    KEY_MAX_SEQS,
    KEY_MODEL,
    KEY_API_KEY,
    KEY_CLIENTS,
    KEY_RATE,
    KEY_REQUESTS,
    KEY_PROMPT,
    KEY_OUTPUT,
    KEY_LENGTHS,
    KEY_PREFIXES,
    KEY_PREFIX,
    KEY_DISTINCT,
    KEY_SEED,
    KEY_IDS,
    KEY_TIMEOUT,
    KEY_LABEL,
    KEY_PLOT
};

typedef struct serve_args {
    yard_load_server server;
    yard_engine_config engine; /* of in_process */
    yard_load_workload workload;
    yard_bench_list clients, rate; /* cases */
    uint64_t n_requests;           /* 0: as many as a case needs */
    const char *label, *plot, *in_process;
    uint32_t max_seqs;
    bool json;
} serve_args;

static uint32_t small(struct argp_state *state, const char *option, const char *arg, uint64_t min,
                      uint64_t max)
{
    return (uint32_t)yard_cli_argp_u64(state, option, arg, min, max);
}

static void parse_cases(struct argp_state *state, const char *option, const char *arg, uint32_t max,
                        yard_bench_list *out)
{
    yard_error err = { 0 };

    if (yard_bench_parse_list(option, arg, max, out, &err) != YARD_OK)
        argp_error(state, "%s", err.message);
}

static void parse_ids(struct argp_state *state, const char *arg, yard_load_workload *w)
{
    unsigned first, last;
    char end;

    if (sscanf(arg, "%u-%u%c", &first, &last, &end) != 2 || last < first || last > INT32_MAX)
        argp_error(state, "--ids: want FIRST-LAST, got '%s'", arg);
    w->first_id = first;
    w->n_ids = last - first + 1;
}

static void parse_lengths(struct argp_state *state, const char *arg, yard_load_workload *w)
{
    if (!strcmp(arg, "fixed"))
        w->lengths = YARD_LENGTHS_FIXED;
    else if (!strcmp(arg, "chat"))
        w->lengths = YARD_LENGTHS_CHAT;
    else
        argp_error(state, "--lengths: want fixed or chat, got '%s'", arg);
}

static error_t parse_workload(int key, char *arg, struct argp_state *state, serve_args *a)
{
    yard_load_workload *w = &a->workload;

    switch (key) {
    case KEY_PROMPT:
        w->n_prompt = small(state, "--prompt-tokens", arg, 1, MAX_TOKENS);
        break;
    case KEY_OUTPUT:
        w->n_output = small(state, "--output-tokens", arg, 1, MAX_TOKENS);
        break;
    case KEY_LENGTHS:
        parse_lengths(state, arg, w);
        break;
    case KEY_PREFIXES:
        w->n_prefixes = small(state, "--prefixes", arg, 1, MAX_TOKENS);
        break;
    case KEY_PREFIX:
        w->n_prefix_tokens = small(state, "--prefix-tokens", arg, 1, MAX_TOKENS);
        break;
    case KEY_DISTINCT:
        w->n_distinct = small(state, "--distinct", arg, 1, 1 << 16);
        break;
    case KEY_SEED:
        w->seed = yard_cli_argp_u64(state, "--seed", arg, 0, UINT64_MAX);
        break;
    case KEY_IDS:
        parse_ids(state, arg, w);
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    return 0;
}

static error_t parse(int key, char *arg, struct argp_state *state)
{
    serve_args *a = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &a->engine;
        break;
    case KEY_URL:
        a->server.url = arg;
        break;
    case KEY_IN_PROCESS:
        a->in_process = arg;
        break;
    case KEY_MAX_SEQS:
        a->max_seqs = small(state, "--max-seqs", arg, 1, 65536);
        break;
    case KEY_MODEL:
        a->server.model = arg;
        break;
    case KEY_API_KEY:
        a->server.api_key = arg;
        break;
    case KEY_CLIENTS:
        parse_cases(state, "--clients", arg, MAX_CLIENTS, &a->clients);
        break;
    case KEY_RATE:
        parse_cases(state, "--rate", arg, MAX_RATE, &a->rate);
        break;
    case KEY_REQUESTS:
        a->n_requests = yard_cli_argp_u64(state, "--requests", arg, 1, MAX_REQUESTS);
        break;
    case KEY_TIMEOUT:
        a->server.timeout_s = small(state, "--timeout", arg, 1, 86400);
        break;
    case KEY_LABEL:
        a->label = arg;
        break;
    case KEY_PLOT:
        a->plot = arg;
        break;
    case 'j':
        a->json = true;
        break;
    default:
        return parse_workload(key, arg, state, a);
    }
    return 0;
}

static const struct argp_option option_list[] = {
    { "url", KEY_URL, "URL", 0, "The server (default http://127.0.0.1:8080)", 0 },
    { "in-process", KEY_IN_PROCESS, "MODEL", 0,
      "No server: an engine in this process, to compare with", 0 },
    { "model", KEY_MODEL, "NAME", 0, "As the server calls it (default: its first)", 0 },
    { "api-key", KEY_API_KEY, "KEY", 0, "Sent as bearer", 0 },
    { "clients", KEY_CLIENTS, "LIST", 0,
      "Closed loop: so many clients, each with one request at a time (default 1,8,32)", 0 },
    { "rate", KEY_RATE, "LIST", 0,
      "Open loop: so many requests a second, at random times (default: none)", 0 },
    { "requests", KEY_REQUESTS, "N", 0,
      "Of each case (default: 4 for each client, at least 32; 10 s of a rate)", 0 },
    { "prompt-tokens", KEY_PROMPT, "N", 0, "Length of a prompt (default 128)", 0 },
    { "output-tokens", KEY_OUTPUT, "N", 0, "Length of an answer (default 64)", 0 },
    { "lengths", KEY_LENGTHS, "KIND", 0,
      "fixed (default), or chat: log-normal, with these lengths as medians", 0 },
    { "prefixes", KEY_PREFIXES, "N", 0, "Prompts begin with one of N texts (default: no prefix)",
      0 },
    { "prefix-tokens", KEY_PREFIX, "N", 0, "Length of each of them (default 1024)", 0 },
    { "distinct", KEY_DISTINCT, "N", 0,
      "Only N different prompts; each is asked alone first, and every answer must equal that", 0 },
    { "ids", KEY_IDS, "FIRST-LAST", 0, "Token ids that prompts are made of (default 256-999)", 0 },
    { "seed", KEY_SEED, "N", 0, "Of prompts and arrivals (default 0)", 0 },
    { "timeout", KEY_TIMEOUT, "S", 0, "A request fails after so long a silence (default 120)", 0 },
    { "label", KEY_LABEL, "TEXT", 0, "What is measured, for the rows", 0 },
    { "plot", KEY_PLOT, "DIR", 0, "Write serve.svg, and its data, into an existing folder", 0 },
    { "json", 'j', NULL, 0, "One JSON object a row", 0 },
    { "max-seqs", KEY_MAX_SEQS, "N", 0, "With --in-process: sequences at once (default 16)", 0 },
    { 0 },
};

static const struct argp_child children[] = {
    { &yard_engine_argp, 0, "With --in-process:", 1 },
    { 0 },
};

static const struct argp serve_argp = {
    .options = option_list,
    .parser = parse,
    .children = children,
    .doc = "Puts load on a server of the OpenAI API and prints time to first token (ttft), time "
           "between tokens (itl) and time of the whole answer (e2e), with tokens/s of all clients."
           "\v"
           "Requests are streams of /v1/completions with token ids as prompts, temperature 0 and "
           "ignore_eos. A row is verified when every request was answered with the tokens asked "
           "for, and, with --distinct, with the text that it gets alone. In an open loop times "
           "count from when a request was due.\n\n"
           "Examples:\n"
           "  switchyard bench serve --clients 1,8,32\n"
           "  switchyard bench serve --rate 10,20,50 --lengths chat --json\n"
           "  switchyard bench serve --clients 8 --prefixes 10 --prefix-tokens 1024 \\\n"
           "      --requests 200\n"
           "  switchyard bench serve --in-process models/demo --rate 50\n"
           "  switchyard bench serve --clients 1000 --distinct 20 --requests 4000\n",
};

/* What tells cases apart; what was found is in the rows' other members. */
static json_t *shape_of(const serve_args *a, const yard_load_plan *plan, const char *model,
                        const char *metric)
{
    const yard_load_workload *w = &plan->workload;
    json_t *shape =
        json_pack("{s:s, s:s, s:s, s:i, s:i, s:I}", "metric", metric, "model", model, "lengths",
                  w->lengths == YARD_LENGTHS_CHAT ? "chat" : "fixed", "prompt", (int)w->n_prompt,
                  "output", (int)w->n_output, "requests", (json_int_t)plan->n_requests);

    if (plan->n_clients)
        json_object_set_new(shape, "clients", json_integer(plan->n_clients));
    else
        json_object_set_new(shape, "rate", json_integer((json_int_t)plan->rate));
    if (w->n_prefixes) {
        json_object_set_new(shape, "prefixes", json_integer(w->n_prefixes));
        json_object_set_new(shape, "prefix", json_integer(w->n_prefix_tokens));
    }
    if (w->n_distinct)
        json_object_set_new(shape, "distinct", json_integer(w->n_distinct));
    if (a->label || a->in_process)
        json_object_set_new(shape, "server", json_string(a->label ? a->label : "in process"));
    return shape;
}

static json_t *found_of(const yard_load_result *r)
{
    return json_pack(
        "{s:f, s:f, s:I, s:I, s:I, s:I, s:f}", "tokens_per_s",
        (double)r->n_output_tokens / r->seconds, "requests_per_s", (double)r->n_done / r->seconds,
        "done", (json_int_t)r->n_done, "refused", (json_int_t)r->n_refused, "failed",
        (json_int_t)r->n_failed, "wrong", (json_int_t)r->n_wrong, "cached_share",
        r->n_prompt_tokens ? (double)r->n_cached_tokens / (double)r->n_prompt_tokens : 0.0);
}

static yard_status print_metric(const serve_args *a, const yard_load_plan *plan, const char *model,
                                const char *metric, yard_load_samples *s, yard_load_result *r,
                                yard_error *err)
{
    yard_bench_row row = { .bench = "serve",
                           .shape = shape_of(a, plan, model, metric),
                           .found = found_of(r),
                           .floor_us = -1,
                           .bytes = -1,
                           .flops = -1,
                           .verified = r->n_done == plan->n_requests && r->n_wrong == 0,
                           .device = yard_bench_cpu_name(),
                           .ranks = 1 };
    yard_status st = YARD_OK;

    if (!row.shape || !row.found)
        st = yard_fail(err, YARD_ENOMEM, "bench serve: no memory for a row");
    else if (s->n > 0) {
        yard_bench_fill(&row, s->us, s->n);
        st = yard_bench_print_row(&row, a->json, err);
    }
    json_decref(row.shape);
    json_decref(row.found);
    return st;
}

static yard_status print_case(const serve_args *a, const yard_load_plan *plan, const char *model,
                              yard_load_result *r, yard_error *err)
{
    yard_status st = print_metric(a, plan, model, "ttft", &r->ttft, r, err);

    if (st == YARD_OK)
        st = print_metric(a, plan, model, "itl", &r->gap, r, err);
    if (st == YARD_OK)
        st = print_metric(a, plan, model, "e2e", &r->whole, r, err);
    if (r->n_done < plan->n_requests)
        fprintf(stderr,
                "switchyard bench serve: of %llu requests %llu were refused and %llu failed: %s\n",
                (unsigned long long)plan->n_requests, (unsigned long long)r->n_refused,
                (unsigned long long)r->n_failed, r->first_failure);
    if (r->n_wrong > 0)
        fprintf(stderr, "switchyard bench serve: %llu answers are not what was asked for\n",
                (unsigned long long)r->n_wrong);
    return st;
}

typedef struct serve_bench {
    serve_args args;
    yard_load *load;     /* NULL: engine */
    yard_engine *engine; /* NULL: load */
    char **expected;     /* [workload.n_distinct] */
    FILE *points;        /* of the plot */
    bool all_right;
} serve_bench;

static yard_status ask_alone(serve_bench *b, yard_error *err)
{
    const yard_load_workload *w = &b->args.workload;
    yard_status st = YARD_OK;

    b->expected = calloc(w->n_distinct, sizeof(*b->expected));
    if (!b->expected)
        return yard_fail(err, YARD_ENOMEM, "bench serve: no memory for %u texts", w->n_distinct);
    for (uint32_t i = 0; i < w->n_distinct && st == YARD_OK; i++) {
        st = yard_load_ask(b->load, w, i, &b->expected[i], err);
        yard_progress(yard_cli_notify(), "alone", i + 1, w->n_distinct);
    }
    return st;
}

static yard_status run_case(serve_bench *b, uint32_t n_clients, uint32_t rate, yard_error *err)
{
    const serve_args *a = &b->args;
    yard_load_plan plan = { .workload = a->workload,
                            .n_requests = a->n_requests,
                            .n_clients = n_clients,
                            .rate = rate,
                            .expected = b->expected };
    yard_load_result result;
    yard_status st;

    if (plan.n_requests == 0 && n_clients)
        plan.n_requests = n_clients < 8 ? 32 : 4 * (uint64_t)n_clients;
    else if (plan.n_requests == 0)
        plan.n_requests = 10 * (uint64_t)rate;
    st = b->load ? yard_load_run(b->load, &plan, &result, err)
                 : yard_load_run_engine(b->engine, &plan, &result, err);
    if (st != YARD_OK)
        return st;
    b->all_right &= result.n_done == plan.n_requests && result.n_wrong == 0;
    st = print_case(a, &plan, b->load ? yard_load_model(b->load) : a->in_process, &result, err);
    if (b->points && result.ttft.n && result.gap.n)
        yard_serve_plot_point(b->points, n_clients ? n_clients : rate, &result);
    yard_load_result_release(&result);
    return st;
}

static yard_status run_cases(serve_bench *b, yard_error *err)
{
    const serve_args *a = &b->args;
    yard_status st = YARD_OK;

    if (a->plot)
        st = yard_serve_plot_begin(a->plot, &b->points, err);
    if (st == YARD_OK && b->load && a->workload.n_distinct)
        st = ask_alone(b, err);
    if (st == YARD_OK)
        yard_bench_print_head(a->json);
    for (uint32_t i = 0; i < a->clients.n && st == YARD_OK; i++)
        st = run_case(b, a->clients.value[i], 0, err);
    for (uint32_t i = 0; i < a->rate.n && st == YARD_OK; i++)
        st = run_case(b, 0, a->rate.value[i], err);
    if (st == YARD_OK && a->plot)
        st = yard_serve_plot_end(a->plot, b->points, a->clients.n ? "clients" : "requests/s", err);
    return st;
}

static yard_status open_engine(serve_bench *b, yard_error *err)
{
    yard_engine_config *c = &b->args.engine;
    const yard_status st = yard_cli_check_model(b->args.in_process, err);

    if (st != YARD_OK)
        return st;
    c->model_dir = b->args.in_process;
    c->max_seqs = b->args.max_seqs;
    return yard_engine_create(&b->engine, c, err);
}

static void check(const serve_args *a, yard_error *err)
{
    if (a->plot && a->clients.n && a->rate.n)
        yard_fail(err, YARD_EINVAL,
                  "--plot: want --clients or --rate, not both: they share no axis");
    else if (a->workload.n_prefix_tokens && !a->workload.n_prefixes)
        yard_fail(err, YARD_EINVAL, "--prefix-tokens: want --prefixes, too");
}

int yard_bench_serve(int argc, char **argv)
{
    serve_bench b = {
        .args = { .server = { .url = "http://127.0.0.1:8080", .timeout_s = 120 },
                  .workload = { .n_prompt = 128, .n_output = 64, .first_id = 256, .n_ids = 744 },
                  .max_seqs = 16 },
        .all_right = true
    };
    serve_args *a = &b.args;
    yard_error err = { 0 };
    yard_status st;

    yard_cli_parse_args(&serve_argp, "switchyard bench serve", argc, argv, 0, a);
    check(a, &err);
    if (err.message[0])
        return yard_cli_usage("bench serve", "%s", err.message);
    if (a->clients.n == 0 && a->rate.n == 0)
        a->clients = (yard_bench_list){ .n = 3, .value = { 1, 8, 32 } };
    if (a->workload.n_prefixes && !a->workload.n_prefix_tokens)
        a->workload.n_prefix_tokens = 1024;
    st = a->in_process ? open_engine(&b, &err) : yard_load_open(&b.load, &a->server, &err);
    if (st == YARD_OK)
        st = run_cases(&b, &err);
    for (uint32_t i = 0; b.expected && i < a->workload.n_distinct; i++)
        free(b.expected[i]);
    free(b.expected);
    yard_load_close(b.load);
    yard_engine_destroy(b.engine);
    if (st == YARD_EINVAL)
        return yard_cli_usage("bench serve", "%s", err.message);
    if (st != YARD_OK)
        return yard_cli_fail("bench serve", &err);
    return yard_cli_close_stdout("bench serve") || !b.all_right;
}
