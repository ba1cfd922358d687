/* Generations: when the ranks of a pod form a group, when it is over, who is killed and started
 * again. A state machine of its own, without processes, sockets or a clock: the pod tells it what
 * happened (yard_generation_*) and does what it asks for (yard_generation_next).
 *
 *   a rank            READY        all ranks READY:          FORMED
 *   DOWN -> STARTING -------> READY ---------------> FORMING --------> SERVING
 *    ^                          ^     (FORM to all)     |                 |
 *    |                          |                       +-- over ---------+
 *    |                          +-- READY -- LEAVING <--+
 *    +-- its process ended (from any state)
 *
 * The group is over when one of its ranks reports a loss or ends, or when forming takes too long;
 * all others then leave, those that do not in time, or are stopped, are killed. One that is stopped
 * for too long is killed in any state: where it is the pod's only rank, nobody here misses it. A
 * group that never served counts as a failed attempt; after a few in a row the pod gives up. */
#ifndef YARD_ENGINE_GENERATION_H
#define YARD_ENGINE_GENERATION_H

#include "base/base.h"

typedef enum yard_rank_state {
    YARD_RANK_DOWN, /* no process */
    YARD_RANK_STARTING,
    YARD_RANK_READY, /* in no group */
    YARD_RANK_FORMING,
    YARD_RANK_SERVING,
    YARD_RANK_LEAVING /* the group is over; it has been told, and has not said READY yet */
} yard_rank_state;

typedef struct yard_generation {
    uint32_t n_ranks;
    /* how long starting, forming; leaving may take; how long a rank may be stopped */
    uint64_t start_us, leave_us, stop_us;
    uint32_t max_attempts;

    uint32_t number;        /* groups formed or tried so far */
    uint32_t n_attempts;    /* in a row that did not serve */
    bool forming;           /* a group is there, or is being formed */
    bool hopeless;          /* a rank cannot work at all */
    yard_rank_state *state; /* [n_ranks] */
    uint64_t *until_us;     /* [n_ranks] of STARTING, FORMING, LEAVING */
    uint64_t *stopped_us;   /* [n_ranks] since when it is stopped; 0: it is not */
    bool *to_leave;         /* [n_ranks] */
    bool *killed;           /* [n_ranks] its end is awaited */
} yard_generation;

typedef enum yard_generation_act {
    YARD_GENERATION_NOTHING,
    YARD_GENERATION_START, /* a process for rank */
    YARD_GENERATION_KILL,  /* rank's process, which then ends */
    YARD_GENERATION_LEAVE, /* tell rank */
    YARD_GENERATION_FORM,  /* tell all: group number `number` */
    YARD_GENERATION_GIVE_UP
} yard_generation_act;

yard_status yard_generation_open(yard_generation *g, uint32_t n_ranks, uint64_t start_us,
                                 uint64_t leave_us, uint64_t stop_us, yard_error *err);
void yard_generation_close(yard_generation *g);

/* The next thing to do, until there is none; each is asked for once, and taken as done. */
yard_generation_act yard_generation_next(yard_generation *g, uint64_t now_us, uint32_t *rank);

/* What happened. */
void yard_generation_ready(yard_generation *g, uint32_t rank);
void yard_generation_formed(yard_generation *g, uint32_t rank);
void yard_generation_lost(yard_generation *g, uint64_t now_us); /* a rank reports a loss */
void yard_generation_ended(yard_generation *g, uint32_t rank, uint64_t now_us); /* its process */
void yard_generation_stopped(yard_generation *g, uint32_t rank, bool stopped, uint64_t now_us);
void yard_generation_failed(yard_generation *g); /* a rank says that it never will work */

bool yard_generation_serves(const yard_generation *g);

/* When next() may have something to do although nothing happens; UINT64_MAX: never. */
uint64_t yard_generation_deadline(const yard_generation *g);

#endif
