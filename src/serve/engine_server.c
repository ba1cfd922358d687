#include <stdlib.h>

#include "serve/engine_server_impl.h"

enum {
    DEFAULT_MAX_REQUESTS = 65536,
    DEFAULT_MAX_UNSENT = 16 << 20,
    DEFAULT_LATE_US = 10000000,
    PROBE_US = 10000000, /* of fronts that say nothing: they need not answer as fast as pods */
    MAX_DECODED_BYTES = 64 << 20
};

void yard_server_no_memory(yard_engine_server *s)
{
    if (s->failure.status == YARD_OK)
        yard_fail(&s->failure, YARD_ENOMEM, "%s: no memory", s->config.address);
}

void yard_server_end_session(yard_session *x, yard_rpc_code code, const char *message)
{
    x->over = true;
    yard_rpc_finish(x->call, code, message);
}

void yard_server_send(yard_engine_server *s, yard_session *x)
{
    if (!yard_rpc_send(x->call, s->bytes.data, s->bytes.n))
        yard_server_no_memory(s);
}

static void open_session(yard_engine_server *s, const yard_rpc_event *e)
{
    yard_session *x = calloc(1, sizeof(*x));

    if (!x) {
        yard_rpc_cancel(e->call);
        return;
    }
    *x = (yard_session){ .next = s->sessions,
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
        yard_server_send(s, x);
    else
        yard_server_end_session(x, YARD_RPC_EXHAUSTED, "no memory");
}

static void free_session(yard_engine_server *s, yard_session *x)
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

yard_session *yard_server_find_front(const yard_engine_server *s, uint64_t number)
{
    yard_session *x = number ? s->sessions : NULL;

    while (x && x->number != number)
        x = x->next;
    return x;
}

static void answer_abort(yard_engine_server *s, yard_session *x, const yard_rpc_event *e)
{
    yard_session *front;
    uint64_t stream, tag;

    if (!yard_decode_abort(s->reader, e->bytes, e->n_bytes, &stream, &tag)) {
        yard_server_end_session(x, YARD_RPC_INVALID, "sent what is no AbortRequest");
        return;
    }
    front = yard_server_find_front(s, stream);
    if (yard_encode_abort_reply(&s->bytes,
                                front && yard_server_abort(s, front, &tag, YARD_ALL_CHOICES) > 0))
        yard_server_send(s, x);
    yard_server_end_session(x, YARD_RPC_OK, NULL);
}

static void take_message(yard_engine_server *s, yard_session *x, const yard_rpc_event *e)
{
    const bool first = !x->heard;

    x->heard = true;
    if (x->method == YARD_METHOD_GENERATE)
        yard_server_take_generate(s, x, e);
    else if (!first || x->over)
        return;
    else if (x->method == YARD_METHOD_WATCH)
        yard_server_begin_watch(s, x, e);
    else if (x->method == YARD_METHOD_ABORT)
        answer_abort(s, x, e);
    else
        yard_server_answer_health(s, x);
}

static void take_close(yard_engine_server *s, yard_session *x)
{
    if (x->method == YARD_METHOD_GENERATE) {
        x->half_closed = true;
        yard_server_flush(s, x);
    } else if (!x->heard && !x->over) {
        yard_server_end_session(x, YARD_RPC_INVALID, "sent no message");
    }
}

static void take_end(yard_engine_server *s, yard_session *x)
{
    if (x->method == YARD_METHOD_GENERATE)
        yard_server_front_left(s, x);
    free_session(s, x);
}

static void take_sent(yard_engine_server *s, yard_session *x)
{
    if (x->method == YARD_METHOD_GENERATE)
        yard_server_flush(s, x);
    else
        yard_server_watcher_read(s, x);
}

static void take_rpc_events(yard_engine_server *s)
{
    yard_rpc_event e;

    while (yard_rpc_next(s->rpc, &e)) {
        yard_session *x = e.call ? yard_rpc_user(e.call) : NULL;

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

static yard_status open_server(yard_engine_server *s, yard_error *err)
{
    const yard_rpc_config rpc = { .address = s->config.address,
                                  .methods = yard_engine_methods,
                                  .n_methods = YARD_METHOD_COUNT,
                                  .keepalive_us = PROBE_US };
    uint32_t n;
    yard_status st;

    yard_server_look_at_pod(s);
    n = s->state.pod.n_instances;
    s->page_events = malloc(YARD_SERVER_MAX_PAGES * sizeof(*s->page_events));
    s->hashes = malloc(YARD_SERVER_MAX_PAGES * sizeof(*s->hashes));
    s->instances = malloc((n + YARD_SERVER_MAX_PAGES) * sizeof(*s->instances));
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
    yard_server_take_outputs(s);
    yard_server_look_at_pod(s);
    yard_server_tell_watchers(s);
}

yard_status yard_engine_server_run(yard_engine_server *s, uint64_t timeout_us, yard_error *err)
{
    const uint64_t begun_us = yard_now_us();
    yard_status st = YARD_OK;
    uint64_t now = begun_us;

    do {
        const uint64_t left_us = timeout_us - (now - begun_us);

        st = s->engine.run(s->engine.ctx, yard_rpc_fd(s->rpc),
                           s->has_news                     ? 0
                           : left_us < YARD_SERVER_TELL_US ? left_us
                                                           : YARD_SERVER_TELL_US,
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

    for (const yard_session *x = s->sessions; x; x = x->next)
        sent = sent && x->outputs.n == 0 && yard_rpc_unsent(x->call) == 0;
    return sent && s->requests.n == 0;
}
