/* The TCP transport: wire format, and the state that its files share. tcp.c opens, closes and runs
 * the thread; tcp_in.c receives; tcp_out.c sends. mixed.c makes "shm+tcp" of it: its heap is one
 * that the ranks of the node share, and only ranks of other nodes are connected. */
#ifndef YARD_FABRIC_TCP_H
#define YARD_FABRIC_TCP_H

#include <sys/uio.h>

#include "fabric/heaps.h"
#include "fabric/puts.h"

enum {
    YARD_TCP_MAX_PUTS = 64,      /* of a batch; one iovec each, far below IOV_MAX */
    YARD_TCP_STAGE_BYTES = 16384 /* a short message arrives whole in one call */
};

/* On the wire: batches. A batch is a head, n_puts of yard_put, then the data of all puts. With the
 * descriptions in front the receiver knows where all the data goes and receives it there, many puts
 * in one call. Fields are in the machine's byte order; the ranks of a job run one architecture. */
typedef struct yard_tcp_head {
    uint32_t magic;  /* drawn from the job id: another group's bytes are refused */
    uint32_t n_puts; /* 1 to YARD_TCP_MAX_PUTS, or YARD_TCP_BYE: no more will come */
} yard_tcp_head;

enum { YARD_TCP_BYE = 0x455942 };

/* What is being received from one peer. Whoever holds the lock receives: the thread that waits in
 * yard_fabric_wait_until(), or else the transport's. */
typedef struct yard_tcp_in {
    pthread_mutex_t lock;
    /* The batch whose data is arriving; n_puts 0: none. */
    yard_put puts[YARD_TCP_MAX_PUTS];
    uint32_t n_puts, n_done;
    uint64_t n_done_bytes; /* of puts[n_done] */
    /* Bytes that came along with what was asked for. */
    uint8_t *stage; /* [YARD_TCP_STAGE_BYTES] */
    size_t stage_at, stage_end;
} yard_tcp_in;

/* What is to be sent to one peer. The lock guards the queue and the flags; the batch belongs to the
 * thread that set flushing, so that the caller never waits for a send of the transport's thread. */
typedef struct yard_tcp_out {
    pthread_mutex_t lock;
    yard_put_queue queue;
    uint64_t n_held_bytes; /* of the queue */
    bool flushing;
    bool blocked; /* the socket is full; the transport's thread goes on when it has room */
    struct {
        yard_tcp_head head;
        yard_put puts[YARD_TCP_MAX_PUTS];
    } batch;
    struct iovec iov[1 + YARD_TCP_MAX_PUTS];
    uint32_t n_iov, iov_at; /* equal: no batch under way */
} yard_tcp_out;

typedef struct yard_tcp_peer {
    uint32_t rank;
    int fd;              /* -1 for this rank, and for those whose heaps are mapped */
    _Atomic bool closed; /* nothing more will be sent or received */
    yard_tcp_in in;
    yard_tcp_out out;
} yard_tcp_peer;

typedef struct yard_tcp {
    yard_fabric *fabric;
    yard_tcp_peer *peers; /* [n_ranks] */
    uint32_t n_connected;
    uint32_t magic;
    size_t mapped_bytes; /* of a heap of its own */
    yard_heaps heaps;    /* or of one shared with the node */

    int epoll_in;  /* all sockets, for reading */
    int epoll_out; /* sockets that are full, for writing; and kick */
    int kick;      /* eventfd: makes the thread look around */

    _Atomic bool holding; /* the caller has held puts back */
    _Atomic bool dozing;  /* the thread sleeps until something happens */

    pthread_t thread;
    bool runs;
    _Atomic bool stop;

    yard_driver driver;
} yard_tcp;

/* Receives what is there from one peer, unless another thread is about it. */
void yard_tcp_receive(yard_tcp *t, yard_tcp_peer *p);

/* Queues puts, or sends as much as the socket takes. Never blocks. They land in this order. */
yard_status yard_tcp_send(yard_tcp *t, yard_tcp_peer *p, const yard_queued_put *items, uint32_t n);

/* Sends what is queued, as much as the socket takes, unless another thread is about it. */
void yard_tcp_flush(yard_tcp *t, yard_tcp_peer *p);

/* A burst is over: sends all that is held. */
void yard_tcp_end_burst(yard_tcp *t);

/* Ends the connection. why: an errno (EBADMSG: the peer broke the protocol), or 0 when the stream
 * ended. The peer has left or is lost. */
void yard_tcp_end(yard_tcp *t, yard_tcp_peer *p, yard_peer_state state, int why);

/* Adds to a signal word of this rank or one whose heap is mapped, and wakes the rank. Any thread.
 */
void yard_tcp_add(yard_tcp *t, uint32_t rank, yard_sym sig, uint64_t value);

/* The functions of yard_fabric_ops. shares_node: the heap is mapped by the ranks of the node, which
 * are not connected by TCP. */
yard_status yard_tcp_open(yard_fabric *f, bool shares_node, yard_error *err);
void yard_tcp_close(yard_fabric *f);
yard_status yard_tcp_put_signal(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                                yard_sym sig, uint64_t value, uint32_t peer);
void yard_tcp_begin_wait(yard_fabric *f);
void yard_tcp_sleep(yard_fabric *f, yard_sym sig, uint64_t seen, yard_deadline until);
bool yard_tcp_drained(yard_fabric *f, uint32_t peer);
void yard_tcp_wake(yard_fabric *f);

#endif
