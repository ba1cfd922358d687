/* The request scheduler: which engine instance takes which request. It has no clock, thread or
 * socket: the caller passes the time and what it hears from engines and clients, and takes
 * decisions out one by one.
 *
 *     yard_scheduler_submit(s, &request, &id, &err);         and what else happened
 *     while (yard_scheduler_next(s, now_us, &action))
 *         ... send, cancel or answer, as the action says
 *
 * Choice: the instance where taking the request costs least, tokens that it holds in its cache
 * counting as none. The cost is the tokens in line there (prompt tokens to be computed, and one for
 * each unfinished request), plus the request's own that are not cached, plus the delay that these
 * mean to others: twice the lesser of them and the instance's whole work (they hold it up, and
 * their pages push out cached ones that will be missed). So a prefix is copied to an idle instance
 * as soon as waiting for it would take longer, and to a busy one only when it takes much longer.
 * Ties: fewer running tokens, then the lower number.
 *
 * The whole work of an instance is its prompt tokens to be computed and the output that its
 * unfinished requests are expected to have: the mean of recent ones, no more than each may have.
 * What is known of an instance is its last report, plus what was sent to it since. One that has not
 * reported for stale_after_us gets nothing new.
 *
 * Every accepted request ends by exactly one YARD_ACTION_END. One that waits or has streamed
 * nothing survives the loss of its instance, max_attempts times in all, so that a request that
 * kills engines does not go round. */
#ifndef YARD_SERVE_SCHEDULER_H
#define YARD_SERVE_SCHEDULER_H

#include "engine/engine.h"

typedef struct yard_scheduler yard_scheduler;

typedef struct yard_scheduler_config {
    size_t size;              /* set by the initialiser */
    uint32_t n_instances;     /* required; all are down at first */
    uint32_t max_queued;      /* requests that wait for room; default 1,024 */
    uint32_t max_index_pages; /* different cache pages known; default 1,048,576 */
    uint32_t max_attempts; /* instances that a request is sent to, one after the other; default 2 */
    uint64_t stale_after_us; /* default 2 s */
} yard_scheduler_config;

#define YARD_SCHEDULER_CONFIG_INIT                                                                 \
    {                                                                                              \
        .size = sizeof(yard_scheduler_config), .max_queued = 1024, .max_index_pages = 1 << 20,     \
        .max_attempts = 2, .stale_after_us = 2000000                                               \
    }

/* Errors: YARD_EINVAL, YARD_ENOMEM. */
yard_status yard_scheduler_create(yard_scheduler **out, const yard_scheduler_config *config,
                                  yard_error *err);
void yard_scheduler_destroy(yard_scheduler *s); /* NULL is fine */

/* requests */

typedef struct yard_scheduler_request {
    uint32_t n_prompt;          /* tokens, at least 1 */
    const yard_page_hash *page; /* [n_prompt / YARD_PAGE_TOKENS], copied: yard_page_hash_chain() */
    uint32_t max_new_tokens;
    uint64_t deadline_us; /* the request ends then, whatever its state; UINT64_MAX: never */
    void *ctx;            /* the caller's, in all actions for the request */
} yard_scheduler_request;

/* Accepts a request. *id is never 0 and never used again. Errors: YARD_EAGAIN when the queue is
 * full (see yard_scheduler_retry_after_s()), YARD_ENOMEM; then the request is not accepted. Take
 * all actions before the next call, or the queue looks fuller than it is. */
yard_status yard_scheduler_submit(yard_scheduler *s, const yard_scheduler_request *request,
                                  uint64_t *id, yard_error *err);

/* What to tell a client that was refused: seconds until the queue as it is will have drained at the
 * pace of late, 1 to 60. */
uint32_t yard_scheduler_retry_after_s(const yard_scheduler *s);

/* What became of an attempt. Each returns false, and changes nothing, when this attempt is no
 * longer the request's current one: then whatever came from it is to be thrown away. started   its
 * first output goes to the client: it cannot be tried again finished  the engine ended it after
 * n_output tokens failed    the engine did not take it or gave it up; retry: another may do better
 */
bool yard_scheduler_started(yard_scheduler *s, uint64_t id, uint32_t attempt);
bool yard_scheduler_finished(yard_scheduler *s, uint64_t now_us, uint64_t id, uint32_t attempt,
                             uint32_t n_output);
bool yard_scheduler_failed(yard_scheduler *s, uint64_t id, uint32_t attempt, bool retry);

/* The client has left. False when the request has ended. */
bool yard_scheduler_abort(yard_scheduler *s, uint64_t id);

/* instances */

/* An instance serves: it holds no request and no page. It takes max_requests (at least 1) at a
 * time, those of other fronts included. Up again means that it was lost in between. */
void yard_scheduler_instance_up(yard_scheduler *s, uint64_t now_us, uint32_t instance,
                                uint32_t max_requests);
void yard_scheduler_instance_lost(yard_scheduler *s, uint32_t instance);
/* It takes nothing new until it reports again; what it has goes on. */
void yard_scheduler_instance_paused(yard_scheduler *s, uint32_t instance);

/* What an instance said about itself: see yard_engine_report. n_seen counts YARD_ACTION_SENDs to it
 * since it came up. */
void yard_scheduler_report(yard_scheduler *s, uint64_t now_us, uint32_t instance,
                           const yard_engine_report *report);

/* Cache pages that an instance now holds, or has evicted; a chain first to last. */
void yard_scheduler_pages_added(yard_scheduler *s, uint32_t instance, const yard_page_hash *page,
                                uint32_t n_pages);
void yard_scheduler_pages_evicted(yard_scheduler *s, uint32_t instance, const yard_page_hash *page,
                                  uint32_t n_pages);
/* Events were missed: forgets what the instance held, until it says so again. */
void yard_scheduler_pages_unknown(yard_scheduler *s, uint32_t instance);

/* decisions */

typedef enum yard_action_kind {
    YARD_ACTION_SEND, /* send the request to instance */
    YARD_ACTION_END   /* the request has ended */
} yard_action_kind;

typedef enum yard_end_reason {
    YARD_END_FINISHED,      /* as the engine said */
    YARD_END_ABORTED,       /* as the client wished */
    YARD_END_DEADLINE,      /* its time is over */
    YARD_END_INSTANCE_LOST, /* after output had been streamed, or once too often */
    YARD_END_FAILED,        /* yard_scheduler_failed() without retry, or once too often */
    YARD_END_REASON_COUNT
} yard_end_reason;

enum { YARD_NO_INSTANCE = UINT32_MAX };

typedef struct yard_action {
    yard_action_kind kind;
    uint64_t id;
    void *ctx;
    uint32_t attempt;  /* 1, 2, ..; of END the last, 0 if it was never sent */
    uint32_t instance; /* SEND: where to. END: where it still runs and is to be aborted, or
                          YARD_NO_INSTANCE */
    uint32_t n_cached; /* SEND: prompt tokens expected in the cache there */
    yard_end_reason reason;
} yard_action;

/* The next decision; false when there is none now. */
bool yard_scheduler_next(yard_scheduler *s, uint64_t now_us, yard_action *action);

/* No later than the earliest deadline of all requests: when to call next again even if nothing
 * happened. UINT64_MAX: never. */
uint64_t yard_scheduler_wake_us(const yard_scheduler *s);

/* for metrics */

typedef struct yard_scheduler_stats {
    uint32_t n_queued, n_sent; /* now: waiting here; at an instance */
    uint64_t n_accepted, n_refused, n_retried;
    uint64_t n_ended[YARD_END_REASON_COUNT];
    uint64_t n_prompt_tokens, n_cached_tokens; /* of everything sent; cached: as expected */
    uint32_t n_index_pages;
} yard_scheduler_stats;

void yard_scheduler_get_stats(const yard_scheduler *s, yard_scheduler_stats *out);

/* Work of an instance in tokens, as the next choice sees it. */
uint64_t yard_scheduler_work(const yard_scheduler *s, uint32_t instance);

#endif
