#include "serve/rpc_state.h"

static bool may_start(const yard_rpc_state *s, yard_rpc_batch batch)
{
    if (s->in_flight[batch] || s->ended)
        return false;
    switch (batch) {
    case YARD_RPC_BEGIN:
    case YARD_RPC_END:
        return !s->started[batch];
    case YARD_RPC_SEND:
        return s->n_unsent > 0 && !s->broken && !s->started[YARD_RPC_FINISH];
    case YARD_RPC_RECEIVE:
        return s->wants_message && !s->peer_closed;
    case YARD_RPC_FINISH:
        return s->wants_finish && !s->started[batch] && (s->n_unsent == 0 || s->broken);
    default:
        return false;
    }
}

bool yard_rpc_state_next(yard_rpc_state *s, yard_rpc_batch *out)
{
    /* In the order of the enumeration: metadata and the wait for the end come before the rest. */
    for (int batch = 0; batch < YARD_RPC_BATCH_COUNT; batch++) {
        if (!may_start(s, (yard_rpc_batch)batch))
            continue;
        s->started[batch] = s->in_flight[batch] = true;
        if (batch == YARD_RPC_RECEIVE)
            s->wants_message = false;
        *out = (yard_rpc_batch)batch;
        return true;
    }
    return false;
}

void yard_rpc_state_done(yard_rpc_state *s, yard_rpc_batch batch, bool ok, bool has_message)
{
    s->in_flight[batch] = false;
    switch (batch) {
    case YARD_RPC_SEND:
        s->n_unsent--;
        s->broken = s->broken || !ok;
        break;
    case YARD_RPC_RECEIVE:
        s->peer_closed = s->peer_closed || !ok || !has_message;
        break;
    case YARD_RPC_END:
        s->ended = true;
        break;
    default:
        break;
    }
}

bool yard_rpc_state_over(const yard_rpc_state *s)
{
    bool any = false;

    for (int batch = 0; batch < YARD_RPC_BATCH_COUNT; batch++)
        any = any || s->in_flight[batch];
    return s->ended && !any;
}
