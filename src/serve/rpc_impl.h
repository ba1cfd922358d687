/* Private to rpc.c (calls and events) and rpc_open.c (addresses, listening, connecting): the two
 * files that know gRPC. */
#ifndef YARD_SERVE_RPC_IMPL_H
#define YARD_SERVE_RPC_IMPL_H

#include <grpc/grpc.h>
#include <pthread.h>

#include "serve/rpc.h"
#include "serve/rpc_state.h"

enum { YARD_RPC_ADDRESS_BYTES = 300 };

typedef enum yard_rpc_tag_kind {
    YARD_RPC_TAG_BATCH,
    YARD_RPC_TAG_NEW_CALL,
    YARD_RPC_TAG_REFUSAL,
    YARD_RPC_TAG_SHUTDOWN
} yard_rpc_tag_kind;

/* What a completion points to. */
typedef struct yard_rpc_tag {
    yard_rpc_tag_kind kind;
    yard_rpc_call *call; /* of BATCH */
    yard_rpc_batch batch;
} yard_rpc_tag;

struct yard_rpc {
    yard_rpc_config config;
    char address[YARD_RPC_ADDRESS_BYTES];
    grpc_completion_queue *queue;
    grpc_server *server; /* NULL: a client */
    grpc_channel *channel;
    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock; /* over all below, and calls */
    bool closing;
    yard_rpc_call *calls;
    uint32_t n_calls;
    yard_rpc_call *ready, **ready_end; /* those that have something to tell */

    yard_rpc_tag new_tag, shutdown_tag; /* new: of the request for the next call */
    grpc_call *new_call;
    grpc_call_details new_details;
    grpc_metadata_array new_metadata;

    int fd, wake, timer; /* epoll over the other two: eventfd and timerfd */
    uint64_t timer_us;   /* 0: none */

    /* what the last event lent */
    yard_rpc_call *taken;
    bool taken_message;
    grpc_slice taken_slice;
};

/* The thread: takes completions until the queue is shut down. arg: the yard_rpc. */
void *yard_rpc_run(void *arg);

/* Of a server: asks for the next call of a client. */
void yard_rpc_await_call(yard_rpc *rpc);

void yard_rpc_cancel_calls(yard_rpc *rpc); /* all, for good */
void yard_rpc_free_calls(yard_rpc *rpc);   /* once the thread has ended */

#endif
