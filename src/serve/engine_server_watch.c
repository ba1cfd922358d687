#include "serve/engine_server_impl.h"

enum {
    FIRST_WORD_US = 10000000, /* that a call may take for its first message */
    MAX_BEHIND = 64           /* states that a watcher may leave unread */
};

static void ask_for_pages(yard_engine_server *s)
{
    for (uint32_t i = 0; i < s->state.pod.n_instances; i++)
        s->engine.pages_anew(s->engine.ctx, i);
}

void yard_server_begin_watch(yard_engine_server *s, yard_session *x, const yard_rpc_event *e)
{
    if (!yard_decode_watch(s->reader, e->bytes, e->n_bytes, &x->front)) {
        yard_server_end_session(x, YARD_RPC_INVALID, "sent what is no WatchRequest");
        return;
    }
    ask_for_pages(s);
    s->has_news = true;
}

void yard_server_watcher_read(yard_engine_server *s, yard_session *x)
{
    if (x->behind)
        ask_for_pages(s);
    x->behind = false;
}

void yard_server_answer_health(yard_engine_server *s, yard_session *x)
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
        yard_server_send(s, x);
    yard_server_end_session(x, YARD_RPC_OK, NULL);
}

void yard_server_look_at_pod(yard_engine_server *s)
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
static uint32_t add_reports(yard_engine_server *s, const yard_session *x,
                            yard_instance_state *parts)
{
    const yard_session *front = yard_server_find_front(s, x->front);
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

static void tell_watcher(yard_engine_server *s, yard_session *x, uint32_t n_pages)
{
    const uint32_t unsent = yard_rpc_unsent(x->call);
    yard_instance_state *parts = s->instances;
    uint32_t n = n_pages;

    x->behind = x->behind || unsent > MAX_BEHIND;
    if (x->behind || (unsent > 0 && n_pages == 0))
        return; /* the next state says the same, and more */
    n += add_reports(s, x, parts + n_pages);
    if (!yard_encode_state(&s->bytes, x->version != s->version ? &s->state : NULL, parts, n)) {
        yard_server_no_memory(s);
        return;
    }
    x->version = s->version;
    yard_server_send(s, x);
}

void yard_server_tell_watchers(yard_engine_server *s)
{
    const uint32_t n_events =
        s->engine.poll_pages(s->engine.ctx, s->page_events, YARD_SERVER_MAX_PAGES);
    const uint64_t now = yard_now_us();
    uint32_t n_pages;

    if (n_events == 0 && !s->has_news && now < s->tell_us)
        return;
    s->has_news = n_events == YARD_SERVER_MAX_PAGES; /* there may be more */
    s->tell_us = now + YARD_SERVER_TELL_US;
    n_pages = group_pages(s, s->instances, n_events);
    for (yard_session *x = s->sessions; x; x = x->next) {
        if (!x->over && !x->heard && x->method != YARD_METHOD_GENERATE &&
            now - x->opened_us > FIRST_WORD_US)
            yard_server_end_session(x, YARD_RPC_TIMED_OUT, "sent no message");
        if (!x->over && x->heard && x->method == YARD_METHOD_WATCH)
            tell_watcher(s, x, n_pages);
    }
}
