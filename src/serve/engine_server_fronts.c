#include <stdarg.h>
#include <stdio.h>

#include "serve/engine_server_impl.h"

enum { PART_BYTES = 1 << 20 /* of a message, about */ };

uint32_t yard_server_abort(yard_engine_server *s, const yard_session *front, const uint64_t *tag,
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

static void give_up_front(yard_engine_server *s, yard_session *x, yard_rpc_code code,
                          const char *message)
{
    if (x->over)
        return;
    yard_server_abort(s, x, NULL, YARD_ALL_CHOICES);
    yard_outputs_clear(&x->outputs);
    yard_server_end_session(x, code, message);
}

void yard_server_flush(yard_engine_server *s, yard_session *x)
{
    size_t end;

    if (x->over || yard_rpc_unsent(x->call) > 0)
        return;
    for (size_t at = 0; at < x->outputs.n; at = end) {
        end = yard_outputs_part(&x->outputs, at, PART_BYTES);
        if (!yard_encode_tokens(&s->bytes, &x->outputs, at, end)) {
            yard_server_no_memory(s);
            return;
        }
        yard_server_send(s, x);
    }
    yard_outputs_clear(&x->outputs);
    if (x->half_closed && x->n_requests == 0)
        yard_server_end_session(x, YARD_RPC_OK, NULL);
}

static void add_output(yard_engine_server *s, yard_session *x, const yard_link_tokens *output)
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
    yard_session *x;
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
    x = r->front;
    output.tag = r->tag;
    if (e->finish != YARD_RUNNING && --r->n_left == 0) {
        yard_served_requests_remove(&s->requests, r);
        if (x)
            x->n_requests--;
    }
    if (x)
        add_output(s, x, &output);
}

void yard_server_take_outputs(yard_engine_server *s)
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
    for (yard_session *x = s->sessions; x; x = x->next)
        if (x->method == YARD_METHOD_GENERATE && (x->outputs.n > 0 || x->half_closed))
            yard_server_flush(s, x);
}

/* Ends a request that the engine does not get: each choice, as the engine would. */
static void refuse(yard_engine_server *s, yard_session *x, const yard_request_message *m,
                   bool retry, const char *format, ...) YARD_PRINTF(5, 6);

static void refuse(yard_engine_server *s, yard_session *x, const yard_request_message *m,
                   bool retry, const char *format, ...)
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

static void submit(yard_engine_server *s, yard_session *x, const yard_request_message *m)
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
                             (yard_served_request){ id, x, m->tag, m->request.n_choices });
    x->n_requests++;
}

/* Sizes are looked at here, so that nobody takes memory for what the engine refuses anyway; the
 * rest is the engine's. */
static void take_request(yard_engine_server *s, yard_session *x, const yard_request_message *m)
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

void yard_server_take_generate(yard_engine_server *s, yard_session *x, const yard_rpc_event *e)
{
    yard_request_message m;

    if (x->over)
        return;
    if (!yard_decode_request(s->reader, e->bytes, e->n_bytes, &m))
        give_up_front(s, x, YARD_RPC_INVALID, "sent what is no GenerateRequest");
    else if (m.is_abort)
        yard_server_abort(s, x, &m.tag, m.choice);
    else
        take_request(s, x, &m);
}

void yard_server_front_left(yard_engine_server *s, yard_session *x)
{
    yard_server_abort(s, x, NULL, YARD_ALL_CHOICES);
    for (size_t i = 0; i < s->requests.n; i++)
        if (s->requests.items[i].front == x)
            s->requests.items[i].front = NULL; /* its last events are nobody's */
}
