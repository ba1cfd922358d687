/* What the network transports share: queues of puts that a peer does not take yet, and the caller
 * that receives while it waits. */
#ifndef YARD_FABRIC_PUTS_H
#define YARD_FABRIC_PUTS_H

#include "fabric/fabric_impl.h"

typedef struct yard_put {
    uint64_t dst, n_bytes; /* in the receiver's heap */
    uint64_t sig, value;
    uint64_t target; /* rank whose word sig is: the receiver, or for tcp a rank of its node */
} yard_put;

typedef struct yard_queued_put {
    yard_put put;
    const void *src; /* in the heap, unchanged until the caller knows that the peer has it */
} yard_queued_put;

/* First in, first out; grows. All zero is an empty one. */
typedef struct yard_put_queue {
    yard_queued_put *items; /* ring of capacity, a power of two */
    uint32_t capacity, first, n_items;
} yard_put_queue;

bool yard_put_queue_push(yard_put_queue *q, const yard_queued_put *item); /* false: no memory */
const yard_queued_put *yard_put_queue_at(const yard_put_queue *q, uint32_t i);
void yard_put_queue_pop(yard_put_queue *q, uint32_t n);
void yard_put_queue_free(yard_put_queue *q);

/* Who receives. A caller that waits does it itself: on two cores a hop from a receiving thread to a
 * waiting one costs as much as the message. The transport's thread stays out of its way as long as
 * the caller keeps coming back, and does it while the caller computes. */
typedef struct yard_driver {
    int wake;              /* eventfd, -1: none: makes a blocked caller look around */
    _Atomic bool driving;  /* the caller is in ops->sleep */
    _Atomic bool *blocked; /* .. and may be in poll(); where ranks that wake it see it */
    _Atomic bool own_blocked;
    _Atomic uint32_t n_drives; /* calls of ops->sleep */
    uint32_t n_drives_seen;    /* by the thread */
} yard_driver;

enum {
    YARD_DRIVER_SPIN_US = 25, /* receive attempts before the caller blocks, a turn each */
    YARD_DRIVER_ASIDE_US =
        500, /* how long the thread leaves receiving to a caller that comes and goes */
    YARD_LINGER_US = 2000000 /* how long close() waits for peers that take nothing */
};

/* The flag lies in *d until the caller tells another place. Close d->wake. False: no eventfd
 * (errno). */
bool yard_driver_open(yard_driver *d);

/* Adds to a signal word whose data lies in the heap of a rank, and wakes its caller if it is
 * blocked: blocked and wake are those of its driver. */
void yard_driver_signal(_Atomic uint64_t *word, uint64_t value, _Atomic bool *blocked, int wake);

/* Adds to a signal word whose data lies in the heap, and wakes the caller if it is blocked. */
void yard_driver_add(yard_driver *d, const yard_fabric *f, uint64_t sig, uint64_t value);

/* The caller, in ops->sleep. */
void yard_driver_begin(yard_driver *d);
void yard_driver_end(yard_driver *d);

/* The caller: blocks until fd can be read (-1: none), it is woken, or the deadline. Not at all when
 * the word has changed. */
void yard_driver_block(yard_driver *d, const yard_fabric *f, yard_sym sig, uint64_t seen, int fd,
                       uint64_t until);

/* The thread: whether the caller has been receiving since it last asked. */
bool yard_driver_was_active(yard_driver *d);

/* Blocks until one of the two can be read or the time comes; true when it is (also) the second. */
bool yard_poll_two(int fd, int other_fd, uint64_t until);

/* When close() gives up waiting for peers. */
uint64_t yard_linger_until(const yard_fabric *f);

/* Starts a thread with all signals blocked: they are for the program's threads. An errno, or 0. */
int yard_start_thread(pthread_t *thread, void *(*main)(void *), void *arg);

#endif
