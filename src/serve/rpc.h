/* Calls between processes. A thin layer over gRPC's C core, so that all grpc_* names are in rpc.c:
 * one endpoint serves methods or calls them, each call carries messages both ways, and what happens
 * comes out as events. Nothing here blocks but yard_rpc_close(). Private to the serve room.
 *
 *     yard_rpc_listen(&rpc, &config, &err);              yard_rpc_connect(&rpc, &config, &err);
 *     ... when yard_rpc_fd(rpc) is readable:             call = yard_rpc_start(rpc, method, ..);
 *     while (yard_rpc_next(rpc, &event))
 *         ...
 *
 * Order of a call's events: OPENED (server), then MESSAGE, SENT and CLOSED as they come, ENDED
 * last. A call's next message is read once its last one has been taken, so whoever takes no events
 * slows the other side down and fills no memory. Threads: one caller at a time; gRPC has its own.
 */
#ifndef YARD_SERVE_RPC_H
#define YARD_SERVE_RPC_H

#include "base/base.h"

typedef struct yard_rpc yard_rpc;
typedef struct yard_rpc_call
    yard_rpc_call; /* valid until the call of yard_rpc_next() after ENDED */

typedef struct yard_rpc_config {
    const char *address;        /* "host:port" or "unix:path"; a server's port 0: a free one */
    const char *const *methods; /* [n_methods] "/package.Service/Method" */
    uint32_t n_methods;
    uint32_t max_calls;       /* of a server at a time; more are refused; 0: 1,024 */
    size_t max_message_bytes; /* a larger one that arrives ends its call; 0: 4 MiB */
    uint64_t keepalive_us; /* a connection that is silent so long is probed, by a server only while
                              it has calls, and is lost after as long again; 0: 2 s */
    uint64_t max_backoff_us; /* of a client between tries to connect; 0: 2 s */
} yard_rpc_config;

/* Errors: YARD_EINVAL (an address that is none), YARD_EIO (which cannot be listened on),
 * YARD_ENOMEM. The caller closes *out. */
yard_status yard_rpc_listen(yard_rpc **out, const yard_rpc_config *config, yard_error *err);
/* Connects in the background, again and again; calls wait for it. */
yard_status yard_rpc_connect(yard_rpc **out, const yard_rpc_config *config, yard_error *err);
/* Ends all calls without events. NULL is fine. */
void yard_rpc_close(yard_rpc *rpc);

/* Of a server: where clients find it, with the port that it has. Owned by rpc. */
const char *yard_rpc_address(const yard_rpc *rpc);

int yard_rpc_fd(const yard_rpc *rpc); /* readable while there are events; owned by rpc */

typedef enum yard_rpc_code { /* gRPC's numbers */
                             YARD_RPC_OK = 0,
                             YARD_RPC_CANCELLED = 1,
                             YARD_RPC_INVALID = 3,
                             YARD_RPC_TIMED_OUT = 4,
                             YARD_RPC_NOT_FOUND = 5,
                             YARD_RPC_EXHAUSTED = 8,
                             YARD_RPC_UNIMPLEMENTED = 12,
                             YARD_RPC_INTERNAL = 13,
                             YARD_RPC_UNAVAILABLE = 14
} yard_rpc_code;

typedef enum yard_rpc_event_kind {
    YARD_RPC_OPENED,  /* server: a client calls method */
    YARD_RPC_MESSAGE, /* bytes [n_bytes], valid until the next call of yard_rpc_next() */
    YARD_RPC_SENT, /* all that was sent so far is on its way: a good moment for the next message */
    YARD_RPC_CLOSED, /* the other side sends no more messages */
    YARD_RPC_ENDED,  /* client: code and message; server: code OK or CANCELLED */
    YARD_RPC_TIMER   /* of yard_rpc_wake_at() */
} yard_rpc_event_kind;

typedef struct yard_rpc_event {
    yard_rpc_event_kind kind;
    yard_rpc_call *call;
    uint32_t method;
    const uint8_t *bytes;
    size_t n_bytes;
    yard_rpc_code code;
    const char *message; /* valid as bytes */
} yard_rpc_event;

/* The next event; false when there is none now. */
bool yard_rpc_next(yard_rpc *rpc, yard_rpc_event *out);

/* One TIMER at this time of the monotonic clock, or up to 50 ms later; replaces the last one. */
void yard_rpc_wake_at(yard_rpc *rpc, uint64_t at_us);

/* Of a client. timeout_us: of the whole call, YARD_RPC_TIMED_OUT then; 0: none. NULL: no memory. */
yard_rpc_call *yard_rpc_start(yard_rpc *rpc, uint32_t method, uint64_t timeout_us);

/* What the caller keeps with a call; NULL at first. */
void yard_rpc_set_user(yard_rpc_call *call, void *user);
void *yard_rpc_user(const yard_rpc_call *call);

/* Sends a message behind those under way; bytes are copied. False: no memory. */
bool yard_rpc_send(yard_rpc_call *call, const void *bytes, size_t n_bytes);
uint32_t yard_rpc_unsent(const yard_rpc_call *call); /* messages not yet on their way */

/* Nothing more is sent: a client half-closes, a server ends the call (message may be NULL). */
void yard_rpc_finish(yard_rpc_call *call, yard_rpc_code code, const char *message);
/* Ends the call now, whatever is under way. ENDED follows. */
void yard_rpc_cancel(yard_rpc_call *call);

#endif
