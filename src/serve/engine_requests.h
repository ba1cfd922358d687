/* Which front's request the engine's event is of: the server's table, and for each front how many
 * of its requests an instance knows of. Private to engine_server.c. */
#ifndef YARD_SERVE_ENGINE_REQUESTS_H
#define YARD_SERVE_ENGINE_REQUESTS_H

#include "base/base.h"

typedef struct yard_served_request {
    uint64_t id;     /* the engine's */
    void *front;     /* its session; NULL: it has left */
    uint64_t tag;    /* the front's */
    uint32_t n_left; /* choices that have not ended */
} yard_served_request;

typedef struct yard_served_requests {
    yard_served_request *items; /* [n] ascending by id */
    size_t n, max;
} yard_served_requests;

void yard_served_requests_release(yard_served_requests *requests);
/* Room for one more, so that the next add succeeds. False: no memory. */
bool yard_served_requests_reserve(yard_served_requests *requests);
void yard_served_requests_add(yard_served_requests *requests, yard_served_request request);
yard_served_request *yard_served_requests_find(const yard_served_requests *requests, uint64_t id);
void yard_served_requests_remove(yard_served_requests *requests, yard_served_request *request);

/* The requests that a front sent to one instance, and those of them that its reports know of. */
typedef struct yard_seen {
    uint64_t n_sent;
    uint64_t *ids; /* ring [max] of those not known yet, ascending */
    uint32_t first, n, max;
} yard_seen;

void yard_seen_release(yard_seen *seen);
bool yard_seen_reserve(yard_seen *seen); /* as above */
/* One was sent; id: the engine's, or for one that it did not get the last one that it has. */
void yard_seen_add(yard_seen *seen, uint64_t id);
/* How many are known to a report that knows all up to last_id; these do not decrease. */
uint64_t yard_seen_count(yard_seen *seen, uint64_t last_id);

#endif
