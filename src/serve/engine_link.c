/* Two streams to the pod: Generate, whose first message names it, then Watch for that name. The
 * link is up from the first state that says that the pod serves, until either stream ends or both
 * are silent. */
#include "serve/engine_link.h"

#include <stdio.h>
#include <stdlib.h>

#include "serve/engine_messages.h"
#include "serve/rpc.h"

enum {
    DEFAULT_TIMEOUT_US = 2000000,
    DEFAULT_BACKOFF_US = 2000000,
    MIN_BACKOFF_US = 50000,
    MAX_DECODED_BYTES = 64 << 20
};

typedef enum what { NOTHING, OUTPUTS, STATE } what;

struct yard_link {
    yard_link_config config;
    char *address;
    yard_rpc *rpc;
    yard_reader *reader;
    what reads; /* what is left in the reader */
    yard_bytes bytes;
    yard_rpc_call *generate, *watch; /* NULL: between two tries */
    bool up;
    yard_pod_state state;
    uint64_t heard_us, retry_us, backoff_us;
    char message[YARD_ERROR_MESSAGE_BYTES]; /* of the last DOWN */
};

static void set_timer(yard_link *link)
{
    const uint64_t silent_us = link->heard_us + link->config.timeout_us;

    yard_rpc_wake_at(link->rpc, link->generate ? silent_us : link->retry_us);
}

static void call_pod(yard_link *link)
{
    link->heard_us = yard_now_us();
    link->generate = yard_rpc_start(link->rpc, YARD_METHOD_GENERATE, 0);
    link->retry_us = link->heard_us + link->backoff_us;
    set_timer(link);
}

/* Both streams are given up, and tried again later. True: *out tells that the link is down. */
static bool lose(yard_link *link, const char *why, yard_link_event *out)
{
    const bool was_up = link->up;

    if (link->generate)
        yard_rpc_cancel(link->generate);
    if (link->watch)
        yard_rpc_cancel(link->watch);
    link->generate = link->watch = NULL;
    link->up = false;
    link->reads = NOTHING;
    link->retry_us = yard_now_us() + link->backoff_us;
    link->backoff_us = 2 * link->backoff_us < link->config.max_backoff_us
                           ? 2 * link->backoff_us
                           : link->config.max_backoff_us;
    set_timer(link);
    if (!was_up)
        return false;
    snprintf(link->message, sizeof(link->message), "%s: %s", link->address, why);
    *out = (yard_link_event){ .kind = YARD_LINK_DOWN, .message = link->message };
    return true;
}

yard_status yard_link_open(yard_link **out, const yard_link_config *config, yard_error *err)
{
    yard_link *link = calloc(1, sizeof(*link));
    yard_rpc_config rpc = { .methods = yard_engine_methods, .n_methods = YARD_METHOD_COUNT };
    yard_status st;

    if (!link)
        return yard_fail(err, YARD_ENOMEM, "link: %zu bytes", sizeof(*link));
    link->config = *config;
    if (!link->config.timeout_us)
        link->config.timeout_us = DEFAULT_TIMEOUT_US;
    if (!link->config.max_backoff_us)
        link->config.max_backoff_us = DEFAULT_BACKOFF_US;
    link->backoff_us = MIN_BACKOFF_US;
    link->address = strdup(config->address);
    st = link->address ? yard_reader_create(&link->reader, MAX_DECODED_BYTES, err)
                       : yard_fail(err, YARD_ENOMEM, "link: no memory for an address");
    if (st == YARD_OK) {
        rpc.address = link->address;
        rpc.keepalive_us = link->config.timeout_us;
        rpc.max_backoff_us = link->config.max_backoff_us;
        st = yard_rpc_connect(&link->rpc, &rpc, err);
    }
    if (st != YARD_OK) {
        yard_link_close(link);
        return st;
    }
    call_pod(link);
    *out = link;
    return YARD_OK;
}

void yard_link_close(yard_link *link)
{
    if (!link)
        return;
    yard_rpc_close(link->rpc);
    yard_reader_destroy(link->reader);
    yard_bytes_release(&link->bytes);
    free(link->address);
    free(link);
}

int yard_link_fd(const yard_link *link)
{
    return yard_rpc_fd(link->rpc);
}

static bool take_outputs(yard_link *link, const yard_rpc_event *e, yard_link_event *out)
{
    uint64_t stream;

    if (!yard_decode_tokens(link->reader, e->bytes, e->n_bytes, &stream))
        return lose(link, "sent what is no message of tokens", out);
    link->reads = OUTPUTS;
    if (link->watch || stream == 0)
        return false;
    link->watch = yard_rpc_start(link->rpc, YARD_METHOD_WATCH, 0);
    if (!link->watch || !yard_encode_watch(&link->bytes, stream) ||
        !yard_rpc_send(link->watch, link->bytes.data, link->bytes.n))
        return lose(link, "no memory", out);
    yard_rpc_finish(link->watch, YARD_RPC_OK, NULL);
    return false;
}

static bool take_state(yard_link *link, const yard_rpc_event *e, yard_link_event *out)
{
    bool has_pod;

    if (!yard_decode_state(link->reader, e->bytes, e->n_bytes, &has_pod, &link->state))
        return lose(link, "sent what is no state of a pod", out);
    link->reads = STATE;
    if (has_pod && link->up && !link->state.serves) {
        *out = (yard_link_event){ .kind = YARD_LINK_PAUSED };
        return true;
    }
    if (!has_pod || link->up || !link->state.serves)
        return false;
    link->up = true;
    link->backoff_us = MIN_BACKOFF_US;
    *out = (yard_link_event){ .kind = YARD_LINK_UP, .pod = link->state.pod };
    return true;
}

static bool take_end(yard_link *link, const yard_rpc_event *e, yard_link_event *out)
{
    char why[YARD_ERROR_MESSAGE_BYTES];

    if (e->code == YARD_RPC_OK || !e->message[0])
        snprintf(why, sizeof(why), "ended the connection (code %d)", (int)e->code);
    else
        snprintf(why, sizeof(why), "%s (code %d)", e->message, (int)e->code);
    if (e->call == link->generate)
        link->generate = NULL;
    else
        link->watch = NULL;
    return lose(link, why, out);
}

static bool take_timer(yard_link *link, yard_link_event *out)
{
    const uint64_t now = yard_now_us();
    char why[64];

    if (!link->generate) {
        if (now >= link->retry_us)
            call_pod(link);
    } else if (link->watch && now - link->heard_us >= link->config.timeout_us) {
        snprintf(why, sizeof(why), "silent for %.1f s", (double)(now - link->heard_us) * 1e-6);
        return lose(link, why, out);
    } else if (!link->watch) {
        link->heard_us = now; /* not connected yet, which gRPC sees to */
    }
    set_timer(link);
    return false;
}

/* True: *out was set. */
static bool take_event(yard_link *link, const yard_rpc_event *e, yard_link_event *out)
{
    if (e->kind == YARD_RPC_TIMER)
        return take_timer(link, out);
    if (e->call != link->generate && e->call != link->watch)
        return false; /* of a stream that was given up */
    if (e->kind == YARD_RPC_ENDED)
        return take_end(link, e, out);
    if (e->kind != YARD_RPC_MESSAGE)
        return false;
    link->heard_us = yard_now_us();
    return e->call == link->generate ? take_outputs(link, e, out) : take_state(link, e, out);
}

/* The next thing that is left in the reader. What comes before the link is up is nobody's. */
static bool read_on(yard_link *link, yard_link_event *out)
{
    bool any = false;

    if (link->reads == OUTPUTS) {
        *out = (yard_link_event){ .kind = YARD_LINK_TOKENS };
        any = yard_reader_next_output(link->reader, &out->tokens);
    } else {
        do {
            any = yard_reader_next_event(link->reader, out);
        } while (any && out->instance >= link->state.pod.n_instances);
    }
    if (!any)
        link->reads = NOTHING;
    return any && link->up;
}

bool yard_link_next(yard_link *link, yard_link_event *out)
{
    yard_rpc_event e;

    for (;;) {
        if (link->reads != NOTHING && read_on(link, out))
            return true;
        if (link->reads != NOTHING)
            continue;
        if (!yard_rpc_next(link->rpc, &e))
            return false;
        if (take_event(link, &e, out))
            return true;
    }
}

bool yard_link_generate(yard_link *link, uint32_t instance, uint64_t tag,
                        const yard_request *request)
{
    if (!link->up)
        return true;
    return yard_encode_request(&link->bytes, instance, tag, request) &&
           yard_rpc_send(link->generate, link->bytes.data, link->bytes.n);
}

void yard_link_abort(yard_link *link, uint64_t tag, uint32_t choice)
{
    if (link->up && yard_encode_abort(&link->bytes, tag, choice))
        yard_rpc_send(link->generate, link->bytes.data, link->bytes.n);
}
