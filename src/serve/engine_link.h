/* The front's link to one pod over RPC: requests go out, and what the pod says comes back as events
 * in order. The link connects in the background, and again with growing pauses whenever it is lost;
 * nothing here blocks. Private to the serve room.
 *
 *     yard_link_open(&link, &config, &err);
 *     ... when yard_link_fd(link) is readable:
 *     while (yard_link_next(link, &event))
 *         ...
 *
 * Order: UP comes first; TOKENS, PAUSED, REPORT and PAGES only between an UP and the next DOWN.
 * DOWN voids everything that was sent: nothing comes of it any more. Threads: one caller at a time.
 */
#ifndef YARD_SERVE_ENGINE_LINK_H
#define YARD_SERVE_ENGINE_LINK_H

#include "engine/engine.h"

typedef struct yard_link yard_link;

typedef struct yard_link_config {
    const char *address;     /* "host:port" or "unix:path" */
    uint64_t timeout_us;     /* of silence, after which the pod counts as lost; 0: 2 s */
    uint64_t max_backoff_us; /* between tries to connect; 0: 2 s */
} yard_link_config;

/* Errors: YARD_EINVAL (an address that is none), YARD_ENOMEM. The caller closes *out. */
yard_status yard_link_open(yard_link **out, const yard_link_config *config, yard_error *err);
void yard_link_close(yard_link *link); /* NULL is fine; requests under way are aborted there */

/* Readable while yard_link_next() has events; owned by the link. */
int yard_link_fd(const yard_link *link);

/* What a pod is. */
typedef struct yard_link_pod {
    uint32_t n_instances;
    uint32_t max_requests; /* that an instance takes at a time */
    uint32_t context;      /* tokens of prompt and output together that a request may have */
    uint32_t vocab;
    yard_page_hash page_root; /* parent of first pages: yard_page_hash_chain() */
    uint32_t generation;      /* of the group of ranks */
    char model[256];          /* identity of the checkpoint, for messages and fingerprints */
} yard_link_pod;

/* New output of one choice of a request. */
typedef struct yard_link_tokens {
    uint64_t tag;
    uint32_t choice;
    uint32_t n_cached;    /* prompt tokens found in the cache; with the choice's first event */
    const int32_t *token; /* [n_tokens] */
    uint32_t n_tokens;
    /* [n_tokens * n_logprobs]: of each token its own, then the likeliest, descending; NULL: not
     * asked for */
    const yard_token_logprob *logprob;
    uint32_t n_logprobs;
    bool of_prompt;      /* the tokens are the prompt's, in order: yard_request.prompt_logprobs */
    yard_finish finish;  /* other than YARD_RUNNING: the choice's last event */
    const char *message; /* of YARD_FINISH_ERROR: why */
    bool retry;          /* of YARD_FINISH_ERROR: another instance may do better */
} yard_link_tokens;

typedef enum yard_link_event_kind {
    YARD_LINK_UP,          /* pod serves */
    YARD_LINK_DOWN,        /* message: why */
    YARD_LINK_PAUSED,      /* the pod ends, or forms again: it takes nothing new before a REPORT */
    YARD_LINK_TOKENS,      /* tokens */
    YARD_LINK_REPORT,      /* instance, report */
    YARD_LINK_PAGES_ADDED, /* instance, page [n_pages], a chain first to last */
    YARD_LINK_PAGES_EVICTED, /* instance, page [n_pages] */
    YARD_LINK_PAGES_UNKNOWN  /* instance: events were lost; all that it holds is said anew */
} yard_link_event_kind;

/* Pointers are valid until the next call of yard_link_next(). */
typedef struct yard_link_event {
    yard_link_event_kind kind;
    uint32_t instance; /* of the pod */
    yard_link_pod pod;
    const char *message;
    yard_link_tokens tokens;
    yard_engine_report report;
    const yard_page_hash *page;
    uint32_t n_pages;
} yard_link_event;

/* The next event; false when there is none now. */
bool yard_link_next(yard_link *link, yard_link_event *out);

/* Sends a request; everything is copied. tag: the caller's name for it, not used before on this
 * link. While the link is down this does nothing: DOWN has said so. False: no memory. */
bool yard_link_generate(yard_link *link, uint32_t instance, uint64_t tag,
                        const yard_request *request);

/* Ends a request, or one choice of it (YARD_ALL_CHOICES: all), within a step. Its last event says
 * how it ended; unknown tags are none. */
void yard_link_abort(yard_link *link, uint64_t tag, uint32_t choice);

#endif
