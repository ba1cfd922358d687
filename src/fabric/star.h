/* The connections between rank 0 and everybody else while a fabric starts. */
#ifndef YARD_FABRIC_STAR_H
#define YARD_FABRIC_STAR_H

#include "fabric/fabric_impl.h"

typedef struct yard_star {
    int epoll;         /* connections whose next frame has not arrived */
    yard_conn *conns;  /* by rank, fd -1 where there is none; only rank 0 has more than conns[0] */
    uint32_t n_conns;  /* n_ranks at rank 0, else 1 */
    bool *missing;     /* [n_conns] no frame yet */
    yard_error failed; /* the start's first failure that this rank knows; YARD_OK: none */
    bool told;         /* the others know it from here */
} yard_star;

yard_status yard_star_create(yard_fabric *f, yard_error *err);

/* Takes conn->fd. */
yard_status yard_star_add(yard_fabric *f, uint32_t conn_idx, yard_conn *conn, yard_error *err);

/* Reads what has arrived. Returns what has failed, if anything: at rank 0 it was passed on. */
yard_status yard_star_pump(yard_fabric *f, yard_error *err);

/* Waits until no conns frame is missing; the frames stay in conns. slack_us beyond the stage's
 * deadline. whom: who is missing, NULL: the missing ranks. */
yard_status yard_star_gather(yard_fabric *f, uint64_t slack_us, const char *whom, yard_error *err);

/* Frames were used: expects the next ones. */
yard_status yard_star_rearm(yard_fabric *f, yard_error *err);

/* At rank 0, to all. */
yard_status yard_star_broadcast(yard_fabric *f, uint32_t type, const void *data, size_t n_bytes,
                                yard_error *err);
void yard_star_broadcast_fail(yard_fabric *f, const yard_error *why);

#endif
