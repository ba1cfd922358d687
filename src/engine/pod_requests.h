/* The requests that a pod holds, and the events it has for its caller. */
#ifndef YARD_ENGINE_POD_REQUESTS_H
#define YARD_ENGINE_POD_REQUESTS_H

#include "engine/pod.h"

typedef struct yard_pod_request {
    uint64_t id;
    uint32_t instance;
    void *frame; /* as SUBMIT frames carry it */
    size_t n_frame;
    uint64_t n_tokens; /* streamed so far, of all choices */
    uint32_t n_tries;  /* groups it was given to */
    bool sent;         /* in this generation */
    uint64_t sent_us;  /* when */
    uint32_t n_choices, n_ended;
    uint8_t *choice; /* [n_choices] yard_pod_choice */
} yard_pod_request;

typedef enum yard_pod_choice {
    YARD_CHOICE_LIVE,
    YARD_CHOICE_ABORTING, /* its end is asked for */
    YARD_CHOICE_ENDED
} yard_pod_choice;

typedef struct yard_pod_requests {
    yard_pod_request *items; /* [n] ascending by id */
    size_t n, capacity;
    uint64_t last_id;
    yard_pod_event *events; /* [first_event, n_events) to be polled */
    size_t first_event, n_events, event_capacity;
} yard_pod_requests;

void yard_pod_requests_close(yard_pod_requests *q);
yard_status yard_pod_requests_add(yard_pod_requests *q, uint32_t instance,
                                  const yard_request *request, uint64_t *id, yard_error *err);
yard_pod_request *yard_pod_requests_find(const yard_pod_requests *q, uint64_t id);

/* The oldest request of an instance that is newer than last_id; NULL: there is none. */
const yard_pod_request *yard_pod_requests_after(const yard_pod_requests *q, uint32_t instance,
                                                uint64_t last_id);

/* An event of an engine; of a choice that is gone: nothing. False: no memory. */
bool yard_pod_requests_event(yard_pod_requests *q, const yard_event *event);

/* Asks for the end of a choice (YARD_ALL_CHOICES: all); what was not sent ends at once. *to_send:
 * the engine has to be told. False: no memory. */
bool yard_pod_requests_abort(yard_pod_requests *q, uint64_t id, uint32_t choice, bool *to_send);

/* Ends a request, all its choices, with an error. False: no memory. */
bool yard_pod_requests_fail(yard_pod_requests *q, uint64_t id, const char *message);

/* The group is over: what streamed nothing is to be sent again, unless it was in several already;
 * the rest ends with an error, why. False: no memory. */
bool yard_pod_requests_regroup(yard_pod_requests *q, const char *why);

#endif
