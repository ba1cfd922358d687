/* Streams of /v1/completions on one event loop.
 *
 * A connection carries one request at a time and is kept for the next one; there are as many as
 * requests were under way at once. */
#include "cli/serve_load.h"

#include <stdlib.h>

#include <event2/buffer.h>
#include <event2/event.h>
#include <event2/http.h>
#include <jansson.h>

struct yard_load {
    yard_load_server server;
    struct event_base *base;
    struct evhttp_uri *uri;
    char *model;
    struct run *run;        /* under way */
    struct stream *streams; /* all there are */
    struct stream *idle;    /* of these, without a request */
};

/* A connection, and the request that it carries. */
typedef struct stream {
    struct stream *next, *next_idle;
    yard_load *load;
    struct evhttp_connection *connection;
    struct evbuffer *lines; /* what has come and is no whole line yet */
    uint64_t request;       /* its number */
    uint64_t due_us, last_us;
    uint32_t n_output, n_counted; /* tokens asked for; come, as the server counts */
    char *text;
    size_t n_text, text_capacity;
    bool done, no_memory;
    char failure[200]; /* the server's own words; "": none */
} stream;

/* A load under way. */
typedef struct run {
    const yard_load_plan *plan;
    yard_load_result *out;
    struct event *timer; /* open loop: the next arrival */
    uint64_t n_sent, n_ended;
    uint64_t begin_us, due_us;
    bool no_memory;
} run;

bool yard_load_add_sample(yard_load_samples *s, uint64_t us)
{
    if (s->n == s->capacity) {
        const size_t capacity = s->capacity ? 2 * s->capacity : 1024;
        double *grown = realloc(s->us, capacity * sizeof(*grown));
        if (!grown)
            return false;
        s->us = grown;
        s->capacity = capacity;
    }
    s->us[s->n++] = (double)us;
    return true;
}

void yard_load_result_release(yard_load_result *r)
{
    free(r->ttft.us);
    free(r->gap.us);
    free(r->whole.us);
}

static bool append_text(stream *s, const char *text, size_t n)
{
    if (s->n_text + n + 1 > s->text_capacity) {
        const size_t capacity = 2 * (s->n_text + n) + 64;
        char *grown = realloc(s->text, capacity);
        if (!grown)
            return false;
        s->text = grown;
        s->text_capacity = capacity;
    }
    memcpy(s->text + s->n_text, text, n);
    s->n_text += n;
    s->text[s->n_text] = '\0';
    return true;
}

static uint64_t number_in(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    return json_is_integer(value) && json_integer_value(value) > 0
               ? (uint64_t)json_integer_value(value)
               : 0;
}

static void take_failure(stream *s, const json_t *event)
{
    const json_t *error = json_object_get(event, "error");
    const char *message = json_string_value(json_object_get(error, "message"));

    snprintf(s->failure, sizeof(s->failure), "%s",
             message ? message : "an error without a message");
}

/* Tokens came: the first of the answer, or more. */
static void take_time(stream *s, yard_load_result *out)
{
    const uint64_t now = yard_now_us();

    if (!yard_load_add_sample(s->n_counted == 0 ? &out->ttft : &out->gap,
                              now - (s->n_counted == 0 ? s->due_us : s->last_us)))
        s->no_memory = true;
    s->last_us = now;
}

static void take_event(stream *s, const json_t *event)
{
    run *r = s->load->run;
    const json_t *usage = json_object_get(event, "usage");
    const json_t *choice = json_array_get(json_object_get(event, "choices"), 0);
    const json_t *text = json_object_get(choice, "text");
    const uint32_t n = (uint32_t)number_in(usage, "completion_tokens");

    if (json_object_get(event, "error")) {
        take_failure(s, event);
        return;
    }
    if (choice && r && (usage ? n > s->n_counted : json_string_length(text) > 0))
        take_time(s, r->out);
    if (text && !append_text(s, json_string_value(text), json_string_length(text)))
        s->no_memory = true;
    if (json_is_object(usage))
        s->n_counted = n;
    else if (json_string_length(text) > 0)
        s->n_counted++;
    if (!choice && r) {
        r->out->n_prompt_tokens += number_in(usage, "prompt_tokens");
        r->out->n_cached_tokens +=
            number_in(json_object_get(usage, "prompt_tokens_details"), "cached_tokens");
    }
}

static void take_line(stream *s, const char *line, size_t n)
{
    json_t *event;

    if (n < 5 || memcmp(line, "data:", 5) != 0)
        return;
    line += 5;
    n -= 5;
    while (n && *line == ' ') {
        line++;
        n--;
    }
    if (n == 6 && !memcmp(line, "[DONE]", 6)) {
        s->done = true;
        return;
    }
    event = json_loadb(line, n, 0, NULL);
    if (event)
        take_event(s, event);
    else
        snprintf(s->failure, sizeof(s->failure), "an event that is not JSON: %.*s",
                 (int)(n < 80 ? n : 80), line);
    json_decref(event);
}

static void on_data(struct evhttp_request *request, void *ctx)
{
    stream *s = ctx;
    char *line;
    size_t n;

    evbuffer_add_buffer(s->lines, evhttp_request_get_input_buffer(request));
    if (evhttp_request_get_response_code(request) != HTTP_OK)
        return;
    while ((line = evbuffer_readln(s->lines, &n, EVBUFFER_EOL_CRLF))) {
        take_line(s, line, n);
        free(line);
    }
}

static void send_due(yard_load *load);
static bool send_request(yard_load *load, uint64_t i, uint64_t due_us);

/* Why a request ended that was not answered in full. */
static void note_failure(stream *s, int status)
{
    run *r = s->load->run;

    if (status == 429)
        r->out->n_refused++;
    else
        r->out->n_failed++;
    if (!r->out->first_failure[0])
        snprintf(r->out->first_failure, sizeof(r->out->first_failure), "%s",
                 s->failure[0]   ? s->failure
                 : status == 0   ? "no answer: the connection broke or nothing came in time"
                 : status == 200 ? "the stream broke off"
                                 : "an answer without a message");
}

static void note_done(stream *s)
{
    run *r = s->load->run;
    const yard_load_plan *plan = r->plan;
    const char *expected =
        plan->expected ? plan->expected[s->request % plan->workload.n_distinct] : NULL;

    r->out->n_done++;
    r->out->n_output_tokens += s->n_counted;
    if (s->n_counted != s->n_output || (expected && strcmp(expected, s->text ? s->text : "") != 0))
        r->out->n_wrong++;
    if (!yard_load_add_sample(&r->out->whole, yard_now_us() - s->due_us))
        s->no_memory = true;
}

static void on_end(struct evhttp_request *request, void *ctx)
{
    stream *s = ctx;
    yard_load *load = s->load;
    run *r = load->run;
    const int status = request ? evhttp_request_get_response_code(request) : 0;
    json_t *body;

    if (request)
        on_data(request, s);
    if (status != HTTP_OK && evbuffer_get_length(s->lines) > 0) {
        body = json_loadb((const char *)evbuffer_pullup(s->lines, -1),
                          evbuffer_get_length(s->lines), 0, NULL);
        take_failure(s, body);
        json_decref(body);
    }
    evbuffer_drain(s->lines, evbuffer_get_length(s->lines));
    if (!r) { /* asked alone */
        event_base_loopbreak(load->base);
        return;
    }
    if (s->done && !s->failure[0])
        note_done(s);
    else
        note_failure(s, status);
    r->no_memory |= s->no_memory;
    r->n_ended++;
    s->next_idle = load->idle;
    load->idle = s;
    if (r->n_ended == r->plan->n_requests || r->no_memory)
        event_base_loopbreak(load->base);
    else if (r->plan->n_clients && r->n_sent < r->plan->n_requests)
        r->no_memory |= !send_request(load, r->n_sent, yard_now_us());
}

static stream *new_stream(yard_load *load)
{
    const int port = evhttp_uri_get_port(load->uri);
    stream *s = calloc(1, sizeof(*s));

    if (!s)
        return NULL;
    s->load = load;
    s->lines = evbuffer_new();
    s->connection = evhttp_connection_base_bufferevent_new(
        load->base, NULL, NULL, evhttp_uri_get_host(load->uri), (uint16_t)(port < 0 ? 80 : port));
    if (!s->lines || !s->connection) {
        if (s->lines)
            evbuffer_free(s->lines);
        free(s);
        return NULL;
    }
    evhttp_connection_set_timeout(s->connection, (int)load->server.timeout_s);
    s->next = load->streams;
    load->streams = s;
    return s;
}

static stream *take_stream(yard_load *load)
{
    stream *s = load->idle;

    if (!s)
        return new_stream(load);
    load->idle = s->next_idle;
    return s;
}

static json_t *body_of(const yard_load *load, const yard_load_prompt *p)
{
    json_t *ids = json_array();
    json_t *body =
        json_pack("{s:s, s:i, s:f, s:b, s:b, s:{s:b, s:b}}", "model", load->model, "max_tokens",
                  (int)p->n_output, "temperature", 0.0, "ignore_eos", 1, "stream", 1,
                  "stream_options", "include_usage", 1, "continuous_usage_stats", 1);

    for (uint32_t i = 0; ids && i < p->n_ids; i++)
        json_array_append_new(ids, json_integer(p->ids[i]));
    if (!body || !ids || json_array_size(ids) != p->n_ids ||
        json_object_set_new(body, "prompt", ids)) {
        json_decref(body);
        return NULL;
    }
    return body;
}

static bool add_headers(const yard_load *load, struct evhttp_request *request)
{
    struct evkeyvalq *headers = evhttp_request_get_output_headers(request);
    const char *key = load->server.api_key;
    char bearer[512];

    evhttp_add_header(headers, "Host", evhttp_uri_get_host(load->uri));
    evhttp_add_header(headers, "Content-Type", "application/json");
    if (key && snprintf(bearer, sizeof(bearer), "Bearer %s", key) < (int)sizeof(bearer))
        evhttp_add_header(headers, "Authorization", bearer);
    return true;
}

/* Starts request i. The stream goes back to the idle ones when it ends. */
static stream *start(yard_load *load, const yard_load_workload *w, uint64_t i)
{
    yard_load_prompt prompt = { 0 };
    stream *s = take_stream(load);
    json_t *body = s && yard_load_prompt_of(w, i, &prompt) ? body_of(load, &prompt) : NULL;
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    struct evhttp_request *request = text ? evhttp_request_new(on_end, s) : NULL;

    json_decref(body);
    free(prompt.ids);
    if (!request) {
        free(text);
        return NULL;
    }
    s->request = i;
    s->n_output = prompt.n_output;
    s->n_counted = 0;
    s->n_text = 0;
    if (s->text)
        s->text[0] = '\0';
    s->done = false;
    s->failure[0] = '\0';
    add_headers(load, request);
    evhttp_request_set_chunked_cb(request, on_data);
    evbuffer_add(evhttp_request_get_output_buffer(request), text, strlen(text));
    free(text);
    /* On failure the request is released, and on_end is called from the loop or not at all. */
    return evhttp_make_request(s->connection, request, EVHTTP_REQ_POST, "/v1/completions") == 0
               ? s
               : NULL;
}

static bool send_request(yard_load *load, uint64_t i, uint64_t due_us)
{
    stream *s = start(load, &load->run->plan->workload, i);

    if (!s)
        return false;
    s->due_us = due_us;
    s->last_us = due_us;
    load->run->n_sent++;
    return true;
}

static void on_timer(evutil_socket_t fd, short what, void *ctx)
{
    (void)fd;
    (void)what;
    send_due(ctx);
}

/* Open loop: everything whose time has come, and the timer for the next one. */
static void send_due(yard_load *load)
{
    run *r = load->run;
    const yard_load_plan *plan = r->plan;
    uint64_t now = yard_now_us();
    struct timeval pause;

    while (r->n_sent < plan->n_requests && r->due_us <= now && !r->no_memory) {
        r->no_memory = !send_request(load, r->n_sent, r->due_us);
        r->due_us += (uint64_t)(yard_load_pause(&plan->workload, r->n_sent) / plan->rate * 1e6);
    }
    if (r->no_memory) {
        event_base_loopbreak(load->base);
        return;
    }
    if (r->n_sent == plan->n_requests)
        return;
    now = yard_now_us();
    r->due_us = r->due_us > now ? r->due_us : now;
    pause.tv_sec = (time_t)((r->due_us - now) / 1000000);
    pause.tv_usec = (suseconds_t)((r->due_us - now) % 1000000);
    event_add(r->timer, &pause);
}

static void on_second(evutil_socket_t fd, short what, void *ctx)
{
    const yard_load *load = ctx;
    const yard_notify *notify = yard_cli_notify();

    (void)fd;
    (void)what;
    yard_progress(notify, "requests", load->run->n_ended, load->run->plan->n_requests);
}

yard_status yard_load_run(yard_load *load, const yard_load_plan *plan, yard_load_result *out,
                          yard_error *err)
{
    run r = { .plan = plan, .out = out };
    struct event *second = event_new(load->base, -1, EV_PERSIST, on_second, load);
    const struct timeval tick = { .tv_usec = 200000 };

    memset(out, 0, sizeof(*out));
    r.timer = evtimer_new(load->base, on_timer, load);
    r.no_memory = !r.timer || !second;
    load->run = &r;
    r.begin_us = r.due_us = yard_now_us();
    if (second)
        event_add(second, &tick);
    if (!r.no_memory && plan->n_clients == 0)
        send_due(load);
    for (uint32_t i = 0; i < plan->n_clients && r.n_sent < plan->n_requests && !r.no_memory; i++)
        r.no_memory = !send_request(load, r.n_sent, r.begin_us);
    if (!r.no_memory)
        event_base_dispatch(load->base);
    out->seconds = (double)(yard_now_us() - r.begin_us) * 1e-6;
    yard_progress(yard_cli_notify(), "requests", plan->n_requests, plan->n_requests);
    if (second)
        event_free(second);
    if (r.timer)
        event_free(r.timer);
    load->run = NULL;
    if (!r.no_memory)
        return YARD_OK;
    yard_load_result_release(out);
    return yard_fail(err, YARD_ENOMEM, "bench serve: no memory for %llu requests",
                     (unsigned long long)plan->n_requests);
}

yard_status yard_load_ask(yard_load *load, const yard_load_workload *w, uint64_t i, char **text,
                          yard_error *err)
{
    stream *s = start(load, w, i);

    if (!s)
        return yard_fail(err, YARD_ENOMEM, "bench serve: no memory for a request");
    event_base_dispatch(load->base);
    s->next_idle = load->idle;
    load->idle = s;
    if (!s->done || s->failure[0])
        return yard_fail(err, YARD_EIO, "%s: %s", load->server.url,
                         s->failure[0] ? s->failure : "the answer to a lone request broke off");
    *text = strdup(s->text ? s->text : "");
    return *text ? YARD_OK : yard_fail(err, YARD_ENOMEM, "bench serve: no memory for a text");
}

typedef struct models_answer {
    yard_load *load;
    char *model;
    int status;
} models_answer;

static void on_models(struct evhttp_request *request, void *ctx)
{
    models_answer *a = ctx;
    struct evbuffer *body = request ? evhttp_request_get_input_buffer(request) : NULL;
    json_t *json = NULL;
    const char *id;

    if (request)
        a->status = evhttp_request_get_response_code(request);
    if (body && evbuffer_get_length(body) > 0)
        json =
            json_loadb((const char *)evbuffer_pullup(body, -1), evbuffer_get_length(body), 0, NULL);
    id = json_string_value(json_object_get(json_array_get(json_object_get(json, "data"), 0), "id"));
    a->model = id ? strdup(id) : NULL;
    json_decref(json);
    event_base_loopbreak(a->load->base);
}

static yard_status ask_model(yard_load *load, yard_error *err)
{
    models_answer a = { .load = load };
    stream *s = take_stream(load);
    struct evhttp_request *request = s ? evhttp_request_new(on_models, &a) : NULL;

    if (!request)
        return yard_fail(err, YARD_ENOMEM, "bench serve: no memory for a request");
    add_headers(load, request);
    if (evhttp_make_request(s->connection, request, EVHTTP_REQ_GET, "/v1/models") == 0)
        event_base_dispatch(load->base);
    s->next_idle = load->idle;
    load->idle = s;
    if (a.status != HTTP_OK)
        return yard_fail(err, YARD_EIO, "%s: /v1/models: want status 200, got %d%s",
                         load->server.url, a.status,
                         a.status ? "" : ": no answer; is the server running?");
    if (!a.model)
        return yard_fail(err, YARD_EIO, "%s: /v1/models names no model; give --model",
                         load->server.url);
    load->model = a.model;
    return YARD_OK;
}

/* Arrivals at their time and not up to a millisecond later. */
static struct event_base *precise_base(void)
{
    struct event_config *config = event_config_new();
    struct event_base *base = NULL;

    if (config && event_config_set_flag(config, EVENT_BASE_FLAG_PRECISE_TIMER) == 0)
        base = event_base_new_with_config(config);
    if (config)
        event_config_free(config);
    return base;
}

yard_status yard_load_open(yard_load **out, const yard_load_server *server, yard_error *err)
{
    yard_load *load = calloc(1, sizeof(*load));
    yard_status st = YARD_OK;
    const char *scheme;

    if (!load)
        return yard_fail(err, YARD_ENOMEM, "bench serve: no memory");
    load->server = *server;
    load->base = precise_base();
    load->uri = evhttp_uri_parse(server->url);
    scheme = load->uri ? evhttp_uri_get_scheme(load->uri) : NULL;
    if (!scheme || strcmp(scheme, "http") != 0 || !evhttp_uri_get_host(load->uri) ||
        !evhttp_uri_get_host(load->uri)[0])
        st = yard_fail(err, YARD_EINVAL, "--url: want http://HOST:PORT, got '%s'", server->url);
    else if (!load->base)
        st = yard_fail(err, YARD_ENOMEM, "bench serve: no memory for an event loop");
    else if (!server->model)
        st = ask_model(load, err);
    else if (!(load->model = strdup(server->model)))
        st = yard_fail(err, YARD_ENOMEM, "bench serve: no memory");
    if (st == YARD_OK)
        *out = load;
    else
        yard_load_close(load);
    return st;
}

const char *yard_load_model(const yard_load *load)
{
    return load->model;
}

void yard_load_close(yard_load *load)
{
    if (!load)
        return;
    for (stream *s = load->streams, *next; s; s = next) {
        next = s->next;
        evhttp_connection_free(s->connection);
        evbuffer_free(s->lines);
        free(s->text);
        free(s);
    }
    if (load->base)
        event_base_free(load->base);
    if (load->uri)
        evhttp_uri_free(load->uri);
    free(load->model);
    free(load);
}
