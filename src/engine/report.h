/* What an instance says about itself to whoever places requests: how much work it has, and which
 * cache pages it holds. */
#ifndef YARD_ENGINE_REPORT_H
#define YARD_ENGINE_REPORT_H

#include "engine/page_hash.h"

/* After every step and at least a few times a second. */
typedef struct yard_engine_report {
    uint64_t n_seen;       /* requests of the asker that the numbers know of, ended ones included */
    uint32_t n_requests;   /* waiting and running, of all askers */
    uint32_t n_free_pages; /* those that only the cache holds included */
    uint64_t prompt_tokens;  /* of these, still to be computed */
    uint64_t running_tokens; /* that these hold in the cache */
    uint64_t step_age_us;    /* since the last finished step while there is work; 0 when idle */
} yard_engine_report;

typedef enum yard_page_change {
    YARD_PAGE_ADDED,   /* the cache holds the page; pages of one prompt come first to last */
    YARD_PAGE_EVICTED, /* it does so no longer */
    YARD_PAGES_UNKNOWN /* forget all of this instance: what it holds is said anew */
} yard_page_change;

typedef struct yard_page_event {
    uint32_t instance; /* of the pod; from an engine 0 */
    yard_page_change change;
    yard_page_hash page; /* of YARD_PAGES_UNKNOWN nothing */
} yard_page_event;

/* Page events that wait to be taken, at most max_events of them. Zero is an empty queue that
 * never has room. */
typedef struct yard_page_events {
    yard_page_event *events; /* [capacity] a ring */
    uint32_t max_events, capacity, first, n;
} yard_page_events;

void yard_page_events_close(yard_page_events *q);

/* False: full, or no memory; nothing is lost of what is in there. */
bool yard_page_events_push(yard_page_events *q, yard_page_event event);

/* Oldest first; returns how many. */
uint32_t yard_page_events_take(yard_page_events *q, yard_page_event *out, uint32_t max_events);

#endif
