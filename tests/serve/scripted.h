/* An engine without a model: each stream gets so many tokens a second, told by its prompt alone.
 * For tests of what is above engines. As a program: scripted_engine.c; in a test's own process: the
 * functions of scripted_served(). */
#ifndef YARD_TESTS_SERVE_SCRIPTED_H
#define YARD_TESTS_SERVE_SCRIPTED_H

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

#include "serve/engine_server.h"

enum { SCRIPTED_STEP_US = 10000 }; /* tokens of one such step come together, as an engine's do */

typedef struct scripted_config {
    uint32_t n_instances, max_requests, context, vocab;
    double rate;         /* tokens a second of each choice; 0: as fast as they are taken */
    uint64_t prefill_us; /* from the arrival of a request to its first token */
} scripted_config;

/* Token i of a choice. vocab > 3: ids 0 to 2 are left out, for they mean something in real ones. */
static inline int32_t scripted_token(const scripted_config *c, const int32_t *prompt,
                                     uint32_t n_prompt, uint32_t choice, uint32_t i)
{
    uint64_t h = 0xcbf29ce484222325u;

    for (uint32_t p = 0; p < n_prompt; p++)
        h = (h ^ (uint32_t)prompt[p]) * 0x100000001b3u;
    h = (h ^ choice << 24 ^ i) * 0x9e3779b97f4a7c15u;
    return 3 + (int32_t)((h >> 33) % (c->vocab - 3));
}

typedef struct scripted_request {
    uint64_t id;
    uint32_t instance, n_prompt, n_choices, max_new, n_out;
    int32_t *prompt;
    uint64_t arrived_us;
    bool *ended; /* [n_choices] */
} scripted_request;

typedef struct scripted_engine {
    scripted_config config;
    scripted_request *items; /* [n] */
    size_t n, max;
    uint64_t last_id, next_us;
    yard_pod_event *events; /* [first, n_events) */
    size_t first, n_events, max_events;
    /* for tests */
    uint64_t n_aborts;
    bool silent; /* computes nothing */
} scripted_engine;

static inline void scripted_describe(void *ctx, yard_pod_state *out)
{
    const scripted_engine *e = ctx;

    *out = (yard_pod_state){ .pod = { .n_instances = e->config.n_instances,
                                      .max_requests = e->config.max_requests,
                                      .context = e->config.context,
                                      .vocab = e->config.vocab,
                                      .page_root = yard_page_hash_root("scripted", 8, "", 0),
                                      .generation = 1,
                                      .model = "scripted" },
                             .serves = true,
                             .n_ranks = e->config.n_instances,
                             .n_ranks_alive = e->config.n_instances };
}

static inline void scripted_push(scripted_engine *e, yard_pod_event event)
{
    if (e->first == e->n_events)
        e->first = e->n_events = 0;
    if (e->n_events == e->max_events) {
        e->max_events = e->max_events ? 2 * e->max_events : 256;
        e->events = realloc(e->events, e->max_events * sizeof(*e->events));
        if (!e->events)
            abort();
    }
    e->events[e->n_events++] = event;
}

static inline yard_status scripted_submit(void *ctx, uint32_t instance, const yard_request *request,
                                          uint64_t *id, yard_error *err)
{
    scripted_engine *e = ctx;
    scripted_request r = { .id = ++e->last_id,
                           .instance = instance,
                           .n_prompt = request->n_prompt,
                           .n_choices = request->n_choices,
                           .max_new = request->max_new_tokens,
                           .arrived_us = yard_now_us() };

    if (request->n_prompt == 0)
        return yard_fail(err, YARD_EINVAL, "prompt: want at least one token");
    if (r.max_new > e->config.context - r.n_prompt)
        r.max_new = e->config.context - r.n_prompt;
    r.prompt = malloc(r.n_prompt * sizeof(*r.prompt));
    r.ended = calloc(r.n_choices, sizeof(*r.ended));
    if (e->n == e->max) {
        e->max = e->max ? 2 * e->max : 64;
        e->items = realloc(e->items, e->max * sizeof(*e->items));
    }
    if (!r.prompt || !r.ended || !e->items)
        abort();
    memcpy(r.prompt, request->prompt, r.n_prompt * sizeof(*r.prompt));
    e->items[e->n++] = r;
    *id = r.id;
    return YARD_OK;
}

static inline void scripted_drop_ended(scripted_engine *e)
{
    size_t kept = 0;

    for (size_t i = 0; i < e->n; i++) {
        scripted_request *r = &e->items[i];
        bool all = true;

        for (uint32_t c = 0; c < r->n_choices; c++)
            all = all && r->ended[c];
        if (all) {
            free(r->prompt);
            free(r->ended);
        } else {
            e->items[kept++] = *r;
        }
    }
    e->n = kept;
}

static inline void scripted_abort(void *ctx, uint64_t id, uint32_t choice)
{
    scripted_engine *e = ctx;

    e->n_aborts++;
    for (size_t i = 0; i < e->n; i++)
        for (uint32_t c = 0; e->items[i].id == id && c < e->items[i].n_choices; c++) {
            if (e->items[i].ended[c] || (choice != YARD_ALL_CHOICES && choice != c))
                continue;
            e->items[i].ended[c] = true;
            scripted_push(e,
                          (yard_pod_event){ .id = id, .choice = c, .finish = YARD_FINISH_ABORTED });
        }
    scripted_drop_ended(e);
}

static inline void scripted_give_token(scripted_engine *e, scripted_request *r)
{
    for (uint32_t c = 0; c < r->n_choices; c++) {
        if (r->ended[c])
            continue;
        r->ended[c] = r->n_out + 1 >= r->max_new;
        scripted_push(e,
                      (yard_pod_event){
                          .id = r->id,
                          .choice = c,
                          .n_tokens = 1,
                          .token = scripted_token(&e->config, r->prompt, r->n_prompt, c, r->n_out),
                          .finish = r->ended[c] ? YARD_FINISH_LENGTH : YARD_RUNNING });
    }
    r->n_out++;
}

/* What is due of all streams by now. */
static inline void scripted_step(scripted_engine *e, uint64_t now)
{
    for (size_t i = 0; i < e->n && !e->silent; i++) {
        scripted_request *r = &e->items[i];
        const uint64_t first_us = r->arrived_us + e->config.prefill_us;
        uint32_t due = now < first_us ? 0 : r->n_out + 1;

        if (e->config.rate > 0 && now >= first_us)
            due = 1 + (uint32_t)((double)(now - first_us) * 1e-6 * e->config.rate);
        while (r->n_out < due && r->n_out < r->max_new)
            scripted_give_token(e, r);
    }
    scripted_drop_ended(e);
}

static inline yard_status scripted_run(void *ctx, int fd, uint64_t timeout_us, yard_error *err)
{
    scripted_engine *e = ctx;
    const uint64_t until_us = yard_now_us() + timeout_us;

    for (;;) {
        struct pollfd p = { .fd = fd, .events = POLLIN };
        uint64_t now = yard_now_us(), wake_us = until_us;

        if (e->n > 0 && now >= e->next_us) {
            scripted_step(e, now);
            e->next_us = now + (e->config.rate > 0 ? SCRIPTED_STEP_US : 0);
        }
        if (e->first < e->n_events || now >= until_us)
            return YARD_OK;
        if (e->n > 0 && !e->silent && e->next_us < wake_us)
            wake_us = e->next_us;
        if (poll(&p, 1, wake_us > now ? (int)((wake_us - now + 999) / 1000) : 0) > 0)
            return YARD_OK;
    }
}

static inline uint32_t scripted_poll(void *ctx, yard_pod_event *events, uint32_t max_events)
{
    scripted_engine *e = ctx;
    uint32_t n = 0;

    while (n < max_events && e->first < e->n_events)
        events[n++] = e->events[e->first++];
    return n;
}

static inline bool scripted_report(void *ctx, uint32_t instance, yard_engine_report *out)
{
    const scripted_engine *e = ctx;

    *out = (yard_engine_report){ .n_seen = e->last_id, .n_free_pages = 1000 };
    for (size_t i = 0; i < e->n; i++)
        if (e->items[i].instance == instance) {
            out->n_requests++;
            out->prompt_tokens += e->items[i].n_out ? 0 : e->items[i].n_prompt;
            out->running_tokens += e->items[i].n_out ? e->items[i].n_prompt + e->items[i].n_out : 0;
        }
    return true;
}

/* It has no cache. */
static inline uint32_t scripted_poll_pages(void *ctx, yard_page_event *events, uint32_t max_events)
{
    return 0;
}

static inline void scripted_pages_anew(void *ctx, uint32_t instance)
{
}

static inline yard_served_engine scripted_served(scripted_engine *e)
{
    return (yard_served_engine){ .ctx = e,
                                 .describe = scripted_describe,
                                 .submit = scripted_submit,
                                 .abort = scripted_abort,
                                 .run = scripted_run,
                                 .poll = scripted_poll,
                                 .report = scripted_report,
                                 .poll_pages = scripted_poll_pages,
                                 .pages_anew = scripted_pages_anew };
}

static inline void scripted_release(scripted_engine *e)
{
    for (size_t i = 0; i < e->n; i++) {
        free(e->items[i].prompt);
        free(e->items[i].ended);
    }
    free(e->items);
    free(e->events);
}

#endif
