/* Calls over gRPC's C core, and what happens to them: a thread takes completions and moves calls
 * on, the caller takes events. */
#include <grpc/byte_buffer_reader.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "serve/rpc_impl.h"

/* A call that nobody hears of. */
typedef struct refusal {
    yard_rpc_tag tag; /* first */
    grpc_call *grpc;
    int cancelled;
} refusal;

typedef struct out_message {
    struct out_message *next;
    grpc_byte_buffer *buffer;
} out_message;

struct yard_rpc_call {
    yard_rpc *rpc;
    grpc_call *grpc;
    uint32_t method;
    yard_rpc_state state;
    yard_rpc_tag tags[YARD_RPC_BATCH_COUNT];
    void *user;

    out_message *out, **out_end;
    grpc_byte_buffer *received; /* by the receive in flight, then until it is told */
    grpc_metadata_array initial, trailing;
    grpc_status_code code;
    grpc_slice details; /* of code */
    int cancelled;
    yard_rpc_code finish_code;
    char finish_message[YARD_ERROR_MESSAGE_BYTES], end_message[YARD_ERROR_MESSAGE_BYTES];

    bool tell_opened, tell_message, tell_sent, tell_closed, tell_ended;
    bool told_closed, told_ended;
    bool is_ready; /* in the list of those with something to tell */
    yard_rpc_call *next_ready, *next, **link;
};

static yard_rpc_call *add_call(yard_rpc *rpc, grpc_call *grpc, uint32_t method)
{
    yard_rpc_call *c = calloc(1, sizeof(*c));

    if (!c)
        return NULL;
    c->rpc = rpc;
    c->grpc = grpc;
    c->method = method;
    c->state.server = rpc->server != NULL;
    c->state.wants_message = true;
    c->out_end = &c->out;
    c->details = grpc_empty_slice();
    for (int batch = 0; batch < YARD_RPC_BATCH_COUNT; batch++)
        c->tags[batch] = (yard_rpc_tag){ YARD_RPC_TAG_BATCH, c, (yard_rpc_batch)batch };
    grpc_metadata_array_init(&c->initial);
    grpc_metadata_array_init(&c->trailing);
    c->next = rpc->calls;
    if (c->next)
        c->next->link = &c->next;
    c->link = &rpc->calls;
    rpc->calls = c;
    rpc->n_calls++;
    return c;
}

static void drop_out(yard_rpc_call *c)
{
    while (c->out) {
        out_message *m = c->out;

        c->out = m->next;
        grpc_byte_buffer_destroy(m->buffer);
        free(m);
    }
    c->out_end = &c->out;
}

static void free_call(yard_rpc_call *c)
{
    *c->link = c->next;
    if (c->next)
        c->next->link = c->link;
    c->rpc->n_calls--;
    drop_out(c);
    if (c->received)
        grpc_byte_buffer_destroy(c->received);
    grpc_metadata_array_destroy(&c->initial);
    grpc_metadata_array_destroy(&c->trailing);
    grpc_slice_unref(c->details);
    grpc_call_unref(c->grpc);
    free(c);
}

static void make_ready(yard_rpc_call *c)
{
    yard_rpc *rpc = c->rpc;

    if (c->is_ready)
        return;
    if (!rpc->ready)
        eventfd_write(rpc->wake, 1);
    c->is_ready = true;
    c->next_ready = NULL;
    *rpc->ready_end = c;
    rpc->ready_end = &c->next_ready;
}

static size_t fill_begin(yard_rpc_call *c, grpc_op *ops)
{
    ops[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    if (c->state.server)
        return 1;
    ops[0].flags =
        GRPC_INITIAL_METADATA_WAIT_FOR_READY | GRPC_INITIAL_METADATA_WAIT_FOR_READY_EXPLICITLY_SET;
    ops[1].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[1].data.recv_initial_metadata.recv_initial_metadata = &c->initial;
    return 2;
}

static void fill_end(yard_rpc_call *c, grpc_op *op)
{
    if (c->state.server) {
        op->op = GRPC_OP_RECV_CLOSE_ON_SERVER;
        op->data.recv_close_on_server.cancelled = &c->cancelled;
        return;
    }
    op->op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    op->data.recv_status_on_client.trailing_metadata = &c->trailing;
    op->data.recv_status_on_client.status = &c->code;
    op->data.recv_status_on_client.status_details = &c->details;
}

static void fill_finish(yard_rpc_call *c, grpc_op *op, grpc_slice *details)
{
    if (!c->state.server) {
        op->op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
        return;
    }
    op->op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    op->data.send_status_from_server.status = (grpc_status_code)c->finish_code;
    *details = grpc_slice_from_copied_string(c->finish_message);
    op->data.send_status_from_server.status_details = details;
}

/* Starts what the state allows. A batch that cannot be started counts as failed. */
static void advance(yard_rpc_call *c)
{
    yard_rpc_batch batch;

    while (!c->rpc->closing && yard_rpc_state_next(&c->state, &batch)) {
        grpc_op ops[2] = { 0 };
        grpc_slice details = grpc_empty_slice();
        size_t n = 1;

        if (batch == YARD_RPC_BEGIN) {
            n = fill_begin(c, ops);
        } else if (batch == YARD_RPC_END) {
            fill_end(c, ops);
        } else if (batch == YARD_RPC_SEND) {
            ops->op = GRPC_OP_SEND_MESSAGE;
            ops->data.send_message.send_message = c->out->buffer;
        } else if (batch == YARD_RPC_RECEIVE) {
            ops->op = GRPC_OP_RECV_MESSAGE;
            ops->data.recv_message.recv_message = &c->received;
        } else {
            fill_finish(c, ops, &details);
        }
        if (grpc_call_start_batch(c->grpc, ops, n, &c->tags[batch], NULL) != GRPC_CALL_OK) {
            yard_rpc_state_done(&c->state, batch, false, false);
            grpc_call_cancel(c->grpc, NULL);
        }
        grpc_slice_unref(details);
    }
    if (yard_rpc_state_over(&c->state) && !c->told_ended) {
        c->tell_ended = c->told_ended = true;
        make_ready(c);
    }
}

static void has_sent(yard_rpc_call *c, bool ok)
{
    out_message *m = c->out;

    c->out = m->next;
    if (!c->out)
        c->out_end = &c->out;
    grpc_byte_buffer_destroy(m->buffer);
    free(m);
    c->tell_sent = c->tell_sent || (ok && c->state.n_unsent == 0);
}

static void has_ended(yard_rpc_call *c)
{
    if (c->state.server) {
        c->code = c->cancelled ? GRPC_STATUS_CANCELLED : GRPC_STATUS_OK;
        return;
    }
    snprintf(c->end_message, sizeof(c->end_message), "%.*s", (int)GRPC_SLICE_LENGTH(c->details),
             (const char *)GRPC_SLICE_START_PTR(c->details));
}

static void batch_done(yard_rpc_call *c, yard_rpc_batch batch, bool ok)
{
    yard_rpc_state_done(&c->state, batch, ok, c->received != NULL);
    if (batch == YARD_RPC_SEND)
        has_sent(c, ok);
    else if (batch == YARD_RPC_RECEIVE && c->received)
        c->tell_message = true;
    else if (batch == YARD_RPC_END)
        has_ended(c);
    if (c->state.peer_closed && !c->told_closed)
        c->tell_closed = c->told_closed = true;
    if (c->tell_message || c->tell_sent || c->tell_closed)
        make_ready(c);
    advance(c);
}

void yard_rpc_await_call(yard_rpc *rpc)
{
    grpc_call_details_init(&rpc->new_details);
    grpc_metadata_array_init(&rpc->new_metadata);
    grpc_server_request_call(rpc->server, &rpc->new_call, &rpc->new_details, &rpc->new_metadata,
                             rpc->queue, rpc->queue, &rpc->new_tag);
}

static void refuse(yard_rpc *rpc, grpc_call *grpc, grpc_status_code code, const char *why)
{
    refusal *r = calloc(1, sizeof(*r));
    grpc_slice details = grpc_slice_from_static_string(why);
    grpc_op ops[3] = { { .op = GRPC_OP_SEND_INITIAL_METADATA },
                       { .op = GRPC_OP_SEND_STATUS_FROM_SERVER },
                       { .op = GRPC_OP_RECV_CLOSE_ON_SERVER } };

    if (r) {
        *r = (refusal){ .tag = { .kind = YARD_RPC_TAG_REFUSAL }, .grpc = grpc };
        ops[1].data.send_status_from_server.status = code;
        ops[1].data.send_status_from_server.status_details = &details;
        ops[2].data.recv_close_on_server.cancelled = &r->cancelled;
        if (grpc_call_start_batch(grpc, ops, 3, r, NULL) == GRPC_CALL_OK)
            return;
    }
    free(r);
    grpc_call_cancel(grpc, NULL);
    grpc_call_unref(grpc);
}

static uint32_t find_method(const yard_rpc *rpc, grpc_slice name)
{
    uint32_t m = 0;

    while (m < rpc->config.n_methods && grpc_slice_str_cmp(name, rpc->config.methods[m]) != 0)
        m++;
    return m;
}

static void take_call(yard_rpc *rpc, bool ok)
{
    const uint32_t method = ok ? find_method(rpc, rpc->new_details.method) : 0;
    yard_rpc_call *c;

    if (ok && rpc->closing) {
        grpc_call_cancel(rpc->new_call, NULL);
        grpc_call_unref(rpc->new_call);
    } else if (ok && method == rpc->config.n_methods) {
        refuse(rpc, rpc->new_call, GRPC_STATUS_UNIMPLEMENTED, "no such method");
    } else if (ok && (rpc->n_calls >= rpc->config.max_calls ||
                      !(c = add_call(rpc, rpc->new_call, method)))) {
        refuse(rpc, rpc->new_call, GRPC_STATUS_RESOURCE_EXHAUSTED, "too many calls at once");
    } else if (ok) {
        c->tell_opened = true;
        advance(c);
        make_ready(c);
    }
    grpc_call_details_destroy(&rpc->new_details);
    grpc_metadata_array_destroy(&rpc->new_metadata);
    if (ok && !rpc->closing)
        yard_rpc_await_call(rpc);
}

void *yard_rpc_run(void *arg)
{
    yard_rpc *rpc = arg;

    for (;;) {
        const grpc_event e =
            grpc_completion_queue_next(rpc->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        yard_rpc_tag *t = e.tag;

        if (e.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        if (e.type != GRPC_OP_COMPLETE)
            continue;
        pthread_mutex_lock(&rpc->lock);
        if (t->kind == YARD_RPC_TAG_BATCH) {
            batch_done(t->call, t->batch, e.success);
        } else if (t->kind == YARD_RPC_TAG_NEW_CALL) {
            take_call(rpc, e.success);
        } else if (t->kind == YARD_RPC_TAG_REFUSAL) {
            grpc_call_unref(((refusal *)(void *)t)->grpc);
            free(t);
        }
        pthread_mutex_unlock(&rpc->lock);
    }
}

/* What the last event lent is the call's again: it is free, or has room for the next message. */
static void return_taken(yard_rpc *rpc)
{
    yard_rpc_call *c = rpc->taken;

    if (rpc->taken_message) {
        grpc_slice_unref(rpc->taken_slice);
        c->state.wants_message = true;
        advance(c);
    } else if (c) {
        free_call(c);
    }
    rpc->taken = NULL;
    rpc->taken_message = false;
}

static void lend_message(yard_rpc_call *c, yard_rpc_event *out)
{
    yard_rpc *rpc = c->rpc;
    grpc_byte_buffer_reader reader;

    rpc->taken_slice = grpc_empty_slice();
    if (grpc_byte_buffer_reader_init(&reader, c->received)) {
        rpc->taken_slice = grpc_byte_buffer_reader_readall(&reader);
        grpc_byte_buffer_reader_destroy(&reader);
    }
    grpc_byte_buffer_destroy(c->received);
    c->received = NULL;
    rpc->taken = c;
    rpc->taken_message = true;
    out->bytes = GRPC_SLICE_START_PTR(rpc->taken_slice);
    out->n_bytes = GRPC_SLICE_LENGTH(rpc->taken_slice);
}

/* The first thing that a call has to tell. */
static void tell(yard_rpc_call *c, yard_rpc_event *out)
{
    *out = (yard_rpc_event){ .call = c, .method = c->method };
    if (c->tell_opened) {
        c->tell_opened = false;
        out->kind = YARD_RPC_OPENED;
    } else if (c->tell_message) {
        c->tell_message = false;
        out->kind = YARD_RPC_MESSAGE;
        lend_message(c, out);
    } else if (c->tell_closed) {
        c->tell_closed = false;
        out->kind = YARD_RPC_CLOSED;
    } else if (c->tell_sent) {
        c->tell_sent = false;
        out->kind = YARD_RPC_SENT;
    } else {
        c->tell_ended = false;
        out->kind = YARD_RPC_ENDED;
        out->code = (yard_rpc_code)c->code;
        out->message = c->end_message;
        c->rpc->taken = c;
    }
}

static bool timer_is_due(yard_rpc *rpc)
{
    uint64_t count;

    if (!rpc->timer_us || yard_now_us() < rpc->timer_us)
        return false;
    rpc->timer_us = 0;
    return read(rpc->timer, &count, sizeof(count)) != 0;
}

bool yard_rpc_next(yard_rpc *rpc, yard_rpc_event *out)
{
    yard_rpc_call *c;
    eventfd_t count;

    pthread_mutex_lock(&rpc->lock);
    return_taken(rpc);
    c = rpc->ready;
    if (c) {
        rpc->ready = c->next_ready;
        if (!rpc->ready)
            rpc->ready_end = &rpc->ready;
        c->is_ready = false;
        tell(c, out);
        if (c->tell_message || c->tell_sent || c->tell_closed || c->tell_ended)
            make_ready(c);
    } else {
        eventfd_read(rpc->wake, &count);
    }
    pthread_mutex_unlock(&rpc->lock);
    if (!c && timer_is_due(rpc)) {
        *out = (yard_rpc_event){ .kind = YARD_RPC_TIMER };
        return true;
    }
    return c != NULL;
}

void yard_rpc_wake_at(yard_rpc *rpc, uint64_t at_us)
{
    const struct itimerspec at = { .it_value = { .tv_sec = (time_t)(at_us / 1000000),
                                                 .tv_nsec = (long)(at_us % 1000000 * 1000) } };

    rpc->timer_us = at_us;
    timerfd_settime(rpc->timer, TFD_TIMER_ABSTIME, &at, NULL);
}

void yard_rpc_cancel_calls(yard_rpc *rpc)
{
    pthread_mutex_lock(&rpc->lock);
    rpc->closing = true; /* nothing starts any more */
    for (yard_rpc_call *c = rpc->calls; c; c = c->next)
        grpc_call_cancel(c->grpc, NULL);
    pthread_mutex_unlock(&rpc->lock);
}

void yard_rpc_free_calls(yard_rpc *rpc)
{
    return_taken(rpc);
    while (rpc->calls)
        free_call(rpc->calls);
}

yard_rpc_call *yard_rpc_start(yard_rpc *rpc, uint32_t method, uint64_t timeout_us)
{
    const gpr_timespec deadline =
        timeout_us ? gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                  gpr_time_from_micros((int64_t)timeout_us, GPR_TIMESPAN))
                   : gpr_inf_future(GPR_CLOCK_MONOTONIC);
    grpc_call *grpc = grpc_channel_create_call(
        rpc->channel, NULL, GRPC_PROPAGATE_DEFAULTS, rpc->queue,
        grpc_slice_from_static_string(rpc->config.methods[method]), NULL, deadline, NULL);
    yard_rpc_call *c;

    pthread_mutex_lock(&rpc->lock);
    c = add_call(rpc, grpc, method);
    if (c)
        advance(c);
    pthread_mutex_unlock(&rpc->lock);
    if (!c) {
        grpc_call_cancel(grpc, NULL);
        grpc_call_unref(grpc);
    }
    return c;
}

void yard_rpc_set_user(yard_rpc_call *call, void *user)
{
    call->user = user;
}

void *yard_rpc_user(const yard_rpc_call *call)
{
    return call->user;
}

bool yard_rpc_send(yard_rpc_call *c, const void *bytes, size_t n_bytes)
{
    out_message *m = calloc(1, sizeof(*m));
    grpc_slice slice;

    if (!m)
        return false;
    slice = grpc_slice_from_copied_buffer(bytes, n_bytes);
    m->buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    pthread_mutex_lock(&c->rpc->lock);
    *c->out_end = m;
    c->out_end = &m->next;
    c->state.n_unsent++;
    advance(c);
    pthread_mutex_unlock(&c->rpc->lock);
    return true;
}

uint32_t yard_rpc_unsent(const yard_rpc_call *c)
{
    uint32_t n;

    pthread_mutex_lock(&c->rpc->lock);
    n = c->state.n_unsent;
    pthread_mutex_unlock(&c->rpc->lock);
    return n;
}

void yard_rpc_finish(yard_rpc_call *c, yard_rpc_code code, const char *message)
{
    pthread_mutex_lock(&c->rpc->lock);
    c->finish_code = code;
    snprintf(c->finish_message, sizeof(c->finish_message), "%s", message ? message : "");
    c->state.wants_finish = true;
    advance(c);
    pthread_mutex_unlock(&c->rpc->lock);
}

void yard_rpc_cancel(yard_rpc_call *c)
{
    grpc_call_cancel(c->grpc, NULL);
}
