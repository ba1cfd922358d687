/* The TCP transport: wire format, and the state that its files share. tcp.c opens, closes and runs
 * the thread; tcp_in.c receives; tcp_out.c sends. */
#ifndef YARD_FABRIC_TCP_H
#define YARD_FABRIC_TCP_H

#include <sys/uio.h>

#include "fabric/puts.h"

enum {
    YARD_TCP_MAX_PUTS = 64,       /* of a batch; one iovec each, far below IOV_MAX */
    YARD_TCP_STAGE_BYTES = 16384, /* a short message arrives whole in one call */
    YARD_TCP_HOLD_BYTES = 65536   /* held puts go out once they are this much */
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
    uint32_t burst;        /* of the last put that was sent at once */
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
    int fd;              /* -1 for this rank */
    _Atomic bool closed; /* nothing more will be sent or received */
    yard_tcp_in in;
    yard_tcp_out out;
} yard_tcp_peer;

typedef struct yard_tcp {
    yard_fabric *fabric;
    yard_tcp_peer *peers; /* [n_ranks] */
    uint32_t magic;
    size_t mapped_bytes;

    int epoll_in;  /* all sockets, for reading */
    int epoll_out; /* sockets that are full, for writing; and kick */
    int kick;      /* eventfd: makes the thread look around */
    int timer;     /* timerfd: the thread sends what the caller held back */

    /* The first put to a peer is sent at once, those that follow are held back for a moment, so
     * that a burst goes out in few calls: until there are YARD_TCP_HOLD_BYTES, the caller waits, or
     * the timer. A burst is what lies between two of the latter. */
    _Atomic uint32_t burst;
    _Atomic bool holding; /* the timer runs */

    pthread_t thread;
    bool runs;
    _Atomic bool stop;

    yard_driver driver;
} yard_tcp;

/* Receives what is there from one peer, unless another thread is about it. */
void yard_tcp_receive(yard_tcp *t, yard_tcp_peer *p);

/* Queues a put, or sends as much as the socket takes. Never blocks. */
yard_status yard_tcp_send(yard_tcp *t, yard_tcp_peer *p, const yard_queued_put *item);

/* Sends what is queued, as much as the socket takes, unless another thread is about it. */
void yard_tcp_flush(yard_tcp *t, yard_tcp_peer *p);

/* A burst is over: sends all that is held. */
void yard_tcp_end_burst(yard_tcp *t);

/* Ends the connection. why: an errno (EBADMSG: the peer broke the protocol), or 0 when the stream
 * ended. The peer has left or is lost. */
void yard_tcp_end(yard_tcp *t, yard_tcp_peer *p, yard_peer_state state, int why);

#endif
