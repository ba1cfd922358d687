/* The scheduler's inside. Private to scheduler*.c. */
#ifndef YARD_SERVE_SCHEDULER_IMPL_H
#define YARD_SERVE_SCHEDULER_IMPL_H

#include "serve/prefix_index.h"
#include "serve/scheduler.h"

enum { YARD_NO_REQUEST = UINT32_MAX };

typedef enum request_state {
    REQUEST_FREE,
    REQUEST_QUEUED, /* waits here, in order of arrival */
    REQUEST_SENT,   /* at an instance, in order of sending */
    REQUEST_ENDED   /* its END is to be told */
} request_state;

/* A slot of the request table. A used one is in the one list of its state, a free one in the list
 * of free ones. */
typedef struct request {
    uint64_t id; /* generation of the slot << 32 | slot */
    uint64_t arrival;
    uint64_t deadline_us;
    void *ctx;
    yard_page_hash *page; /* [n_pages]; NULL once it cannot be sent again */
    uint32_t n_pages, n_prompt, max_new_tokens;
    uint32_t newer, older; /* in its list */
    request_state state;
    uint32_t attempt;
    uint32_t instance;        /* while sent; of an ended one: where to abort, or YARD_NO_INSTANCE */
    uint32_t avoid;           /* the instance that failed it last, or YARD_NO_INSTANCE */
    uint64_t serial;          /* sent as number serial to its instance, from 1 */
    uint64_t prompt_tokens;   /* to be computed there, as expected when it was sent */
    uint64_t expected_output; /* when it was sent */
    bool started;
    yard_end_reason reason;
} request;

typedef struct request_list {
    uint32_t oldest, newest;
} request_list;

typedef struct instance {
    bool up, paused;
    uint32_t max_requests;
    uint64_t heard_us; /* when it last made progress, as far as is known */
    yard_engine_report report;
    request_list sent;
    uint64_t n_sent; /* since it came up */
    /* requests sent after the report: sums of the fields of request */
    uint32_t n_unseen;
    uint64_t unseen_prompt_tokens, unseen_output, unseen_running;
} instance;

struct yard_scheduler {
    yard_scheduler_config config;
    yard_prefix_index *index;
    instance *instances; /* [n_instances] */
    uint32_t *chain;     /* [n_instances] of the request being placed */

    request *requests; /* [n_slots] */
    uint32_t n_slots;
    request_list free, queued, ended;
    uint32_t n_queued, n_sent;
    uint64_t n_arrived;
    uint64_t wake_us; /* no later than any deadline */

    double mean_output;   /* tokens of finished requests, recent ones more */
    double us_per_end;    /* between ends while requests wait, the same way */
    uint64_t last_end_us; /* 0: there was none since the queue was last empty */
    yard_scheduler_stats stats;
};

/* A sent request whose attempt failed: back into the queue by its age, or the end. */
void yard_scheduler_retry(yard_scheduler *s, request *r, yard_end_reason reason);
/* Its pages are no longer about to be written. */
void yard_scheduler_unexpect(yard_scheduler *s, request *r);

/* The instance for a request, NULL when none has room; s->chain is filled. */
instance *yard_scheduler_choose(yard_scheduler *s, uint64_t now_us, const request *r);
/* Puts a queued request into the books of an instance. */
void yard_scheduler_place(yard_scheduler *s, request *r, instance *at);
/* Takes a sent request out of them. */
void yard_scheduler_unplace(yard_scheduler *s, request *r);

void yard_list_append(yard_scheduler *s, request_list *list, request *r);
void yard_list_remove(yard_scheduler *s, request_list *list, request *r);

#endif
