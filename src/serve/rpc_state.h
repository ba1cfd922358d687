/* What one call may do next, as gRPC's rules have it: five batches of operations, of each at most
 * one in flight; the first one starts all others; nothing starts any more once the end has been
 * seen. No gRPC here, so that every order of completions can be tried
 * (tests/serve/rpc_state_test.c). Private to rpc.c. */
#ifndef YARD_SERVE_RPC_STATE_H
#define YARD_SERVE_RPC_STATE_H

#include "base/base.h"

typedef enum yard_rpc_batch {
    YARD_RPC_BEGIN,   /* metadata: out, and at a client in */
    YARD_RPC_END,     /* waits for the end: status at a client, close at a server */
    YARD_RPC_SEND,    /* one message */
    YARD_RPC_RECEIVE, /* one message, or word that there is none any more */
    YARD_RPC_FINISH,  /* the last of this side: half-close of a client, status of a server */
    YARD_RPC_BATCH_COUNT
} yard_rpc_batch;

/* All zero but for server: a new call. */
typedef struct yard_rpc_state {
    bool server;
    bool started[YARD_RPC_BATCH_COUNT], in_flight[YARD_RPC_BATCH_COUNT];
    uint32_t n_unsent;  /* messages, the one in flight included */
    bool wants_message; /* there is room for the next one */
    bool wants_finish;  /* when all is sent */
    bool peer_closed;   /* the other side sends no more */
    bool broken;        /* a send failed: the rest would, too */
    bool ended;
} yard_rpc_state;

/* The next batch to start, which counts as in flight from then on; false: none now. */
bool yard_rpc_state_next(yard_rpc_state *s, yard_rpc_batch *out);

/* A batch has completed. ok: as gRPC says. has_message: of RECEIVE, there was one. */
void yard_rpc_state_done(yard_rpc_state *s, yard_rpc_batch batch, bool ok, bool has_message);

/* The end was seen and nothing is in flight: the call can be released. */
bool yard_rpc_state_over(const yard_rpc_state *s);

#endif
