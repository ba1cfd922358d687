#include "serve/engine_server.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "serve/engine_messages.h"
#include "serve/engine_requests.h"
#include "serve/rpc.h"

enum {
    DEFAULT_MAX_REQUESTS = 65536,
    DEFAULT_MAX_UNSENT = 16 << 20,
    DEFAULT_LATE_US = 10000000,
    MAX_DECODED_BYTES = 64 << 20,
    PART_BYTES = 1 << 20,     /* of a message, about */
    TELL_US = 100000,         /* between states when nothing happens */
    FIRST_WORD_US = 10000000, /* that a call may take for its first message */
    MAX_BEHIND = 64,          /* states that a watcher may leave unread */
    MAX_PAGES = 4096          /* page events of a state */
};

/* One call of a client. */
typedef struct session {
    struct session *next, **link;
    yard_rpc_call *call;
    yard_engine_method method;
    uint64_t opened_us;
    bool heard; /* its first message came */
    bool over;  /* this side has ended it */

    /* of GENERATE */
    uint64_t number;
    yard_outputs outputs; /* that wait for the next message */
    uint32_t n_requests;
    bool half_closed;
    yard_seen *seen; /* [n_instances] */

    /* of WATCH */
    uint64_t front;   /* number of the stream whose requests are counted; 0: none */
    uint64_t version; /* of the pod's state that it knows */
    bool behind;      /* page events were left out */
} session;

struct yard_engine_server {
    yard_engine_server_config config;
    yard_served_engine engine;
    yard_rpc *rpc;
    yard_reader *reader;
    session *sessions;
    yard_served_requests requests;
    uint64_t last_id;     /* that the engine gave */
    uint64_t last_number; /* of streams */
    yard_pod_state state; /* as it was last told */
    uint64_t version;     /* of state */
    uint64_t tell_us;     /* when the next state is due */
    bool draining, has_news;
    yard_error failure;
    yard_bytes bytes;
    yard_page_event *page_events;   /* [MAX_PAGES] */
    yard_page_hash *hashes;         /* the same, without the rest */
    yard_instance_state *instances; /* [n_instances + MAX_PAGES] of a state */
    yard_engine_report *reports;    /* [n_instances] */
};

/* ---- sessions ---------------------------------------------------------------------------- */

static void no_memory(yard_engine_server *s)
{
    if (s->failure.status == YARD_OK)
        yard_fail(&s->failure, YARD_ENOMEM, "%s: no memory", s->config.address);
}

static void end_session(session *x, yard_rpc_code code, const char *message)
{
    x->over = true;
    yard_rpc_finish(x->call, code, message);
}

static void send_bytes(yard_engine_server *s, session *x)
{
    if (!yard_rpc_send(x->call, s->bytes.data, s->bytes.n))
        no_memory(s);
}

static void open_session(yard_engine_server *s, const yard_rpc_event *e)
{
    session *x = calloc(1, sizeof(*x));

    if (!x) {
        yard_rpc_cancel(e->call);
        return;
    }
    *x = (session){ .next = s->sessions,
                    .link = &s->sessions,
                    .call = e->call,
                    .method = (yard_engine_method)e->method,
                    .opened_us = yard_now_us() };
    if (x->next)
        x->next->link = &x->next;
    s->sessions = x;
    yard_rpc_set_user(e->call, x);
    if (x->method != YARD_METHOD_GENERATE)
        return;
    x->number = ++s->last_number;
    x->seen = calloc(s->state.pod.n_instances, sizeof(*x->seen));
    if (x->seen && yard_encode_stream(&s->bytes, x->number))
        send_bytes(s, x);
    else
        end_session(x, YARD_RPC_EXHAUSTED, "no memory");
}

static void free_session(yard_engine_server *s, session *x)
{
    *x->link = x->next;
    if (x->next)
        x->next->link = x->link;
    for (uint32_t i = 0; x->seen && i < s->state.pod.n_instances; i++)
        yard_seen_release(&x->seen[i]);
    free(x->seen);
    yard_outputs_release(&x->outputs);
    free(x);
}

static session *find_front(const yard_engine_server *s, uint64_t number)
{
    session *x = number ? s->sessions : NULL;

    while (x && x->number != number)
        x = x->next;
    return x;
}

/* ---- to fronts --------------------------------------------------------------------------- */

/* Of a front, or of one tag or choice of it. Returns how many. The engine says how they end. */
static uint32_t abort_requests(yard_engine_server *s, uint64_t front, const uint64_t *tag,
                               uint32_t choice)
{
    uint32_t n = 0;

    for (size_t i = 0; i < s->requests.n; i++) {
        const yard_served_request *r = &s->requests.items[i];

        if (r->front != front || (tag && r->tag != *tag))
            continue;
        s->engine.abort(s->engine.ctx, r->id, choice);
        n++;
    }
    return n;
}

static void give_up_front(yard_engine_server *s, session *x, yard_rpc_code code,
                          const char *message)
{
    if (x->over)
        return;
    abort_requests(s, x->number, NULL, YARD_ALL_CHOICES);
    yard_outputs_clear(&x->outputs);
    end_session(x, code, message);
}

/* What has gathered while the last message was under way goes out as the next. */
static void flush(yard_engine_server *s, session *x)
{
    size_t end;

    if (x->over || yard_rpc_unsent(x->call) > 0)
        return;
    for (size_t at = 0; at < x->outputs.n; at = end) {
        end = yard_outputs_part(&x->outputs, at, PART_BYTES);
        if (!yard_encode_tokens(&s->bytes, &x->outputs, at, end)) {
            no_memory(s);
            return;
        }
        send_bytes(s, x);
    }
    yard_outputs_clear(&x->outputs);
    if (x->half_closed && x->n_requests == 0)
        end_session(x, YARD_RPC_OK, NULL);
}

static void add_output(yard_engine_server *s, session *x, const yard_link_tokens *output)
{
    if (x->over)
        return;
    if (!yard_outputs_add(&x->outputs, output))
        give_up_front(s, x, YARD_RPC_EXHAUSTED, "no memory for outputs");
    else if (x->outputs.n_bytes > s->config.max_unsent_bytes)
        give_up_front(s, x, YARD_RPC_EXHAUSTED, "reads its outputs too slowly");
}

static void take_output(yard_engine_server *s, const yard_pod_event *e)
{
    yard_served_request *r = yard_served_requests_find(&s->requests, e->id);
    session *x;
    yard_link_tokens output = { .choice = e->choice,
                                .n_cached = e->n_cached,
                                .token = &e->token,
                                .n_tokens = e->n_tokens,
                                .logprob = e->n_logprobs > 0 ? e->logprob : NULL,
                                .n_logprobs = e->n_logprobs,
                                .of_prompt = e->of_prompt,
                                .finish = e->finish,
                                .message = e->message,
                                .retry = e->lost };

    if (!r)
        return;
    x = find_front(s, r->front);
    output.tag = r->tag;
    if (e->finish != YARD_RUNNING && --r->n_left == 0) {
        yard_served_requests_remove(&s->requests, r);
        if (x)
            x->n_requests--;
    }
    if (x)
        add_output(s, x, &output);
}

static void take_outputs(yard_engine_server *s)
{
    yard_pod_event events[64];
    uint32_t n;

    while ((n = s->engine.poll(s->engine.ctx, events, 64)) > 0) {
        s->has_news = true;
        for (uint32_t i = 0; i < n; i++) {
            take_output(s, &events[i]);
            yard_pod_event_free(&events[i]);
        }
    }
    for (session *x = s->sessions; x; x = x->next)
        if (x->method == YARD_METHOD_GENERATE && (x->outputs.n > 0 || x->half_closed))
            flush(s, x);
}

/* ---- from fronts ------------------------------------------------------------------------- */

/* Ends a request that the engine does not get: each choice, as the engine would. */
static void refuse(yard_engine_server *s, session *x, const yard_request_message *m, bool retry,
                   const char *format, ...) YARD_PRINTF(5, 6);

static void refuse(yard_engine_server *s, session *x, const yard_request_message *m, bool retry,
                   const char *format, ...)
{
    const uint32_t most = s->state.pod.max_requests;
    const uint32_t n = m->request.n_choices < most ? m->request.n_choices : most;
    char message[YARD_ERROR_MESSAGE_BYTES];
    yard_link_tokens output = {
        .tag = m->tag, .finish = YARD_FINISH_ERROR, .message = message, .retry = retry
    };
    va_list args;

    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    for (output.choice = 0; output.choice < n; output.choice++)
        add_output(s, x, &output);
}

static void submit(yard_engine_server *s, session *x, const yard_request_message *m)
{
    yard_error err = { 0 };
    uint64_t id;

    if (!yard_served_requests_reserve(&s->requests)) {
        refuse(s, x, m, true, "no memory for a request");
        return;
    }
    if (s->engine.submit(s->engine.ctx, m->instance, &m->request, &id, &err) != YARD_OK) {
        refuse(s, x, m, err.status == YARD_ENOMEM, "%s", err.message);
        return;
    }
    s->last_id = id;
    yard_served_requests_add(&s->requests,
                             (yard_served_request){ id, x->number, m->tag, m->request.n_choices });
    x->n_requests++;
}

/* Sizes are looked at here, so that nobody takes memory for what the engine refuses anyway; the
 * rest is the engine's. */
static void take_request(yard_engine_server *s, session *x, const yard_request_message *m)
{
    const yard_link_pod *pod = &s->state.pod;
    yard_seen *seen = m->instance < pod->n_instances ? &x->seen[m->instance] : NULL;

    if (!seen) {
        refuse(s, x, m, false, "instance: want below %u, got %u", pod->n_instances, m->instance);
        return;
    }
    if (!yard_seen_reserve(seen)) {
        give_up_front(s, x, YARD_RPC_EXHAUSTED, "no memory for a request");
        return;
    }
    if (s->draining)
        refuse(s, x, m, true, "the pod is ending and takes no request");
    else if (s->requests.n >= s->config.max_requests)
        refuse(s, x, m, true, "the pod has %u requests already", s->config.max_requests);
    else if (m->request.n_prompt > pod->context)
        refuse(s, x, m, false, "prompt: want at most %u tokens, got %u", pod->context,
               m->request.n_prompt);
    else if (m->request.n_choices > pod->max_requests)
        refuse(s, x, m, false, "choices: want at most %u, got %u", pod->max_requests,
               m->request.n_choices);
    else
        submit(s, x, m);
    yard_seen_add(seen, s->last_id);
}

static void take_generate(yard_engine_server *s, session *x, const yard_rpc_event *e)
{
    yard_request_message m;

    if (x->over)
        return;
    if (!yard_decode_request(s->reader, e->bytes, e->n_bytes, &m))
        give_up_front(s, x, YARD_RPC_INVALID, "sent what is no GenerateRequest");
    else if (m.is_abort)
        abort_requests(s, x->number, &m.tag, m.choice);
    else
        take_request(s, x, &m);
}

/* ---- other calls ------------------------------------------------------------------------- */

static void answer_health(yard_engine_server *s, session *x)
{
    yard_health h = { .ready = s->state.serves,
                      .generation = s->state.pod.generation,
                      .n_ranks = s->state.n_ranks,
                      .n_ranks_alive = s->state.n_ranks_alive };

    for (uint32_t i = 0; i < s->state.pod.n_instances; i++) {
        yard_engine_report r;

        if (s->engine.report(s->engine.ctx, i, &r) && r.step_age_us > h.step_age_us)
            h.step_age_us = r.step_age_us;
    }
    h.progressing = h.ready && h.step_age_us < s->config.late_us;
    if (yard_encode_health(&s->bytes, &h))
        send_bytes(s, x);
    end_session(x, YARD_RPC_OK, NULL);
}

static void answer_abort(yard_engine_server *s, session *x, const yard_rpc_event *e)
{
    uint64_t stream, tag;

    if (!yard_decode_abort(s->reader, e->bytes, e->n_bytes, &stream, &tag)) {
        end_session(x, YARD_RPC_INVALID, "sent what is no AbortRequest");
        return;
    }
    if (yard_encode_abort_reply(&s->bytes, abort_requests(s, stream, &tag, YARD_ALL_CHOICES) > 0))
        send_bytes(s, x);
    end_session(x, YARD_RPC_OK, NULL);
}

static void begin_watch(yard_engine_server *s, session *x, const yard_rpc_event *e)
{
    if (!yard_decode_watch(s->reader, e->bytes, e->n_bytes, &x->front)) {
        end_session(x, YARD_RPC_INVALID, "sent what is no WatchRequest");
        return;
    }
    for (uint32_t i = 0; i < s->state.pod.n_instances; i++)
        s->engine.pages_anew(s->engine.ctx, i);
    s->has_news = true;
}

static void take_message(yard_engine_server *s, session *x, const yard_rpc_event *e)
{
    const bool first = !x->heard;

    x->heard = true;
    if (x->method == YARD_METHOD_GENERATE)
        take_generate(s, x, e);
    else if (!first || x->over)
        return;
    else if (x->method == YARD_METHOD_WATCH)
        begin_watch(s, x, e);
    else if (x->method == YARD_METHOD_ABORT)
        answer_abort(s, x, e);
    else
        answer_health(s, x);
}

static void take_close(yard_engine_server *s, session *x)
{
    if (x->method == YARD_METHOD_GENERATE) {
        x->half_closed = true;
        flush(s, x);
    } else if (!x->heard && !x->over) {
        end_session(x, YARD_RPC_INVALID, "sent no message");
    }
}

static void take_end(yard_engine_server *s, session *x)
{
    if (x->method == YARD_METHOD_GENERATE)
        abort_requests(s, x->number, NULL, YARD_ALL_CHOICES);
    free_session(s, x);
}

static void take_sent(yard_engine_server *s, session *x)
{
    if (x->method == YARD_METHOD_GENERATE) {
        flush(s, x);
    } else if (x->behind) {
        x->behind = false;
        for (uint32_t i = 0; i < s->state.pod.n_instances; i++)
            s->engine.pages_anew(s->engine.ctx, i);
    }
}

static void take_rpc_events(yard_engine_server *s)
{
    yard_rpc_event e;

    while (yard_rpc_next(s->rpc, &e)) {
        session *x = e.call ? yard_rpc_user(e.call) : NULL;

        if (e.kind == YARD_RPC_OPENED)
            open_session(s, &e);
        else if (!x)
            continue;
        else if (e.kind == YARD_RPC_MESSAGE)
            take_message(s, x, &e);
        else if (e.kind == YARD_RPC_CLOSED)
            take_close(s, x);
        else if (e.kind == YARD_RPC_SENT)
            take_sent(s, x);
        else
            take_end(s, x);
    }
}

/* ---- to watchers ------------------------------------------------------------------------- */

static void look_at_pod(yard_engine_server *s)
{
    yard_pod_state now = { 0 };

    s->engine.describe(s->engine.ctx, &now);
    now.serves = now.serves && !s->draining;
    if (s->version > 0 && now.serves == s->state.serves &&
        now.pod.generation == s->state.pod.generation &&
        now.n_ranks_alive == s->state.n_ranks_alive)
        return;
    s->state = now;
    s->version++;
    s->has_news = true;
}

/* Neighbouring events of one kind and instance are one part. Returns how many. */
static uint32_t group_pages(yard_engine_server *s, yard_instance_state *parts, uint32_t n_events)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < n_events; i++) {
        const yard_page_event *e = &s->page_events[i];
        yard_instance_state *last = n > 0 ? &parts[n - 1] : NULL;

        s->hashes[i] = e->page;
        if (last && last->instance == e->instance && last->change == e->change &&
            e->change != YARD_PAGES_UNKNOWN)
            last->n_pages++;
        else
            parts[n++] = (yard_instance_state){ .instance = e->instance,
                                                .change = e->change,
                                                .page = &s->hashes[i],
                                                .n_pages = e->change != YARD_PAGES_UNKNOWN };
    }
    return n;
}

/* Reports as this watcher's front reads them. Returns how many. */
static uint32_t add_reports(yard_engine_server *s, const session *x, yard_instance_state *parts)
{
    const session *front = find_front(s, x->front);
    uint32_t n = 0;

    for (uint32_t i = 0; s->state.serves && i < s->state.pod.n_instances; i++) {
        yard_engine_report *r = &s->reports[i];

        if (!s->engine.report(s->engine.ctx, i, r))
            continue;
        r->n_seen = front ? yard_seen_count(&front->seen[i], r->n_seen) : 0;
        parts[n++] = (yard_instance_state){ .instance = i, .report = r };
    }
    return n;
}

static void tell_watcher(yard_engine_server *s, session *x, uint32_t n_pages)
{
    const uint32_t unsent = yard_rpc_unsent(x->call);
    yard_instance_state *parts = s->instances;
    uint32_t n = n_pages;

    x->behind = x->behind || unsent > MAX_BEHIND;
    if (x->behind || (unsent > 0 && n_pages == 0))
        return; /* the next state says the same, and more */
    n += add_reports(s, x, parts + n_pages);
    if (!yard_encode_state(&s->bytes, x->version != s->version ? &s->state : NULL, parts, n)) {
        no_memory(s);
        return;
    }
    x->version = s->version;
    send_bytes(s, x);
}

static void tell_watchers(yard_engine_server *s)
{
    const uint32_t n_events = s->engine.poll_pages(s->engine.ctx, s->page_events, MAX_PAGES);
    const uint64_t now = yard_now_us();
    uint32_t n_pages;

    if (n_events == 0 && !s->has_news && now < s->tell_us)
        return;
    s->has_news = n_events == MAX_PAGES; /* there may be more */
    s->tell_us = now + TELL_US;
    n_pages = group_pages(s, s->instances, n_events);
    for (session *x = s->sessions; x; x = x->next) {
        if (!x->over && !x->heard && x->method != YARD_METHOD_GENERATE &&
            now - x->opened_us > FIRST_WORD_US)
            end_session(x, YARD_RPC_TIMED_OUT, "sent no message");
        if (!x->over && x->heard && x->method == YARD_METHOD_WATCH)
            tell_watcher(s, x, n_pages);
    }
}

/* ---- the server -------------------------------------------------------------------------- */

static yard_status open_server(yard_engine_server *s, yard_error *err)
{
    const yard_rpc_config rpc = { .address = s->config.address,
                                  .methods = yard_engine_methods,
                                  .n_methods = YARD_METHOD_COUNT };
    uint32_t n;
    yard_status st;

    look_at_pod(s);
    n = s->state.pod.n_instances;
    s->page_events = malloc(MAX_PAGES * sizeof(*s->page_events));
    s->hashes = malloc(MAX_PAGES * sizeof(*s->hashes));
    s->instances = malloc((n + MAX_PAGES) * sizeof(*s->instances));
    s->reports = malloc((n + 1) * sizeof(*s->reports));
    if (!s->page_events || !s->hashes || !s->instances || !s->reports)
        return yard_fail(err, YARD_ENOMEM, "server: no memory for %u instances", n);
    st = yard_reader_create(&s->reader, MAX_DECODED_BYTES, err);
    return st == YARD_OK ? yard_rpc_listen(&s->rpc, &rpc, err) : st;
}

yard_status yard_engine_server_open(yard_engine_server **out,
                                    const yard_engine_server_config *config, yard_error *err)
{
    yard_engine_server *s = calloc(1, sizeof(*s));
    yard_status st;

    if (!s)
        return yard_fail(err, YARD_ENOMEM, "server: %zu bytes", sizeof(*s));
    s->config = *config;
    s->engine = config->engine;
    if (!s->config.max_requests)
        s->config.max_requests = DEFAULT_MAX_REQUESTS;
    if (!s->config.max_unsent_bytes)
        s->config.max_unsent_bytes = DEFAULT_MAX_UNSENT;
    if (!s->config.late_us)
        s->config.late_us = DEFAULT_LATE_US;
    st = open_server(s, err);
    if (st != YARD_OK) {
        yard_engine_server_close(s);
        return st;
    }
    *out = s;
    return YARD_OK;
}

void yard_engine_server_close(yard_engine_server *s)
{
    if (!s)
        return;
    yard_rpc_close(s->rpc);
    while (s->sessions)
        free_session(s, s->sessions);
    yard_served_requests_release(&s->requests);
    yard_reader_destroy(s->reader);
    yard_bytes_release(&s->bytes);
    free(s->page_events);
    free(s->hashes);
    free(s->instances);
    free(s->reports);
    free(s);
}

const char *yard_engine_server_address(const yard_engine_server *s)
{
    return yard_rpc_address(s->rpc);
}

static void turn(yard_engine_server *s)
{
    take_rpc_events(s);
    take_outputs(s);
    look_at_pod(s);
    tell_watchers(s);
}

yard_status yard_engine_server_run(yard_engine_server *s, uint64_t timeout_us, yard_error *err)
{
    const uint64_t begun_us = yard_now_us();
    yard_status st = YARD_OK;
    uint64_t now = begun_us;

    do {
        const uint64_t left_us = timeout_us - (now - begun_us);

        st = s->engine.run(s->engine.ctx, yard_rpc_fd(s->rpc),
                           s->has_news         ? 0
                           : left_us < TELL_US ? left_us
                                               : TELL_US,
                           err);
        turn(s);
        now = yard_now_us();
    } while (st == YARD_OK && s->failure.status == YARD_OK && now - begun_us < timeout_us);
    if (st == YARD_OK && s->failure.status != YARD_OK)
        st = yard_fail(err, s->failure.status, "%s", s->failure.message);
    return st;
}

void yard_engine_server_drain(yard_engine_server *s)
{
    s->draining = true;
}

bool yard_engine_server_idle(const yard_engine_server *s)
{
    bool sent = true;

    for (const session *x = s->sessions; x; x = x->next)
        sent = sent && x->outputs.n == 0 && yard_rpc_unsent(x->call) == 0;
    return sent && s->requests.n == 0;
}
