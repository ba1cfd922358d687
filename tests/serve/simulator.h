/* A group of engine instances on a virtual clock. They step together, as ranks of one
 * expert-parallel group do: a step lasts as long as that of the instance with the most to do. Each
 * instance has slots, pages, a cache of full prompt pages with reference counts and LRU eviction,
 * prefill in order of arrival with a token budget. Costs are those of an H200 with DeepSeek-V3,
 * roughly; what matters is that a prompt costs, that a step has a fixed part, and that the cache is
 * smaller than the demand. */
#ifndef YARD_TESTS_SIMULATOR_H
#define YARD_TESTS_SIMULATOR_H

#include <stdlib.h>

#include "serve/serve.h"

enum {
    SIM_INSTANCES = 8,
    SIM_SLOTS = 64,           /* requests of an instance in prefill or decoding */
    SIM_PAGES = 2048,         /* of an instance */
    SIM_BUDGET = 512,         /* tokens of a step */
    SIM_STEP_US = 10000,      /* fixed part of a step */
    SIM_TOKEN_US = 100,       /* each token of a step */
    SIM_CONTEXT_TOKENS = 6000 /* cached tokens whose reading costs as much as one token */
};

/* One request, before and while it runs. */
typedef struct sim_request {
    uint64_t arrival_us;
    uint32_t n_prompt, n_output;
    uint64_t prefix;         /* requests with the same one share their first pages */
    uint32_t n_prefix_pages; /* 0: nothing is shared */

    uint64_t unique;
    uint32_t instance, next; /* next in the instance's waiting list or running list */
    uint32_t n_cached, n_computed, n_generated, n_pages;
    uint32_t *page; /* [n_pages] indices into the instance's pool */
    uint64_t first_us;
    uint64_t id; /* the scheduler's */
} sim_request;

typedef struct sim_page {
    yard_page_hash hash;
    bool indexed; /* can be found by its hash */
    uint32_t refs;
    uint32_t newer, older; /* among those without references */
    uint32_t next;         /* in its bucket */
} sim_page;

typedef struct sim_instance {
    sim_page pages[SIM_PAGES];
    uint32_t bucket[1024];
    uint32_t newest, oldest; /* pages without references, indexed ones and empty ones */
    uint32_t n_unused;
    uint32_t waiting_first, waiting_last, running_first, running_last;
    uint32_t n_waiting, n_running;
    uint64_t n_received;
    uint64_t n_computed; /* tokens, prompt and output */
} sim_instance;

/* What happened in a step, told while it ends. Any may be NULL. */
typedef struct sim_listener {
    void (*added)(void *ctx, uint32_t instance, yard_page_hash page);
    void (*evicted)(void *ctx, uint32_t instance, yard_page_hash page);
    void (*started)(void *ctx, sim_request *r);
    void (*finished)(void *ctx, sim_request *r);
    void *ctx;
} sim_listener;

typedef struct sim_group {
    sim_instance at[SIM_INSTANCES];
    sim_request *requests;
    sim_listener listener;
} sim_group;

enum { SIM_NONE = UINT32_MAX };

static uint32_t sim_min(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static yard_page_hash sim_hash(const sim_request *r, uint32_t page_idx)
{
    const uint64_t owner = page_idx < r->n_prefix_pages ? r->prefix : r->unique;
    uint64_t x = owner * 0x9e3779b97f4a7c15u + page_idx;

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (yard_page_hash){ { x ^ x >> 31, owner << 20 | page_idx } };
}

/* pages */

static uint32_t *sim_bucket(sim_instance *x, yard_page_hash hash)
{
    return &x->bucket[hash.word[0] % (sizeof(x->bucket) / sizeof(x->bucket[0]))];
}

static uint32_t sim_find_page(sim_instance *x, yard_page_hash hash)
{
    uint32_t p = *sim_bucket(x, hash);

    while (p != SIM_NONE && !yard_page_hash_equal(x->pages[p].hash, hash))
        p = x->pages[p].next;
    return p;
}

static void sim_index_page(sim_instance *x, uint32_t p, yard_page_hash hash)
{
    uint32_t *bucket = sim_bucket(x, hash);

    x->pages[p].hash = hash;
    x->pages[p].indexed = true;
    x->pages[p].next = *bucket;
    *bucket = p;
}

static void sim_forget_page(sim_instance *x, uint32_t p)
{
    uint32_t *link = sim_bucket(x, x->pages[p].hash);

    while (*link != p)
        link = &x->pages[*link].next;
    *link = x->pages[p].next;
    x->pages[p].indexed = false;
}

static void sim_use_page(sim_instance *x, uint32_t p)
{
    sim_page *page = &x->pages[p];

    if (page->refs++ > 0)
        return;
    *(page->newer == SIM_NONE ? &x->newest : &x->pages[page->newer].older) = page->older;
    *(page->older == SIM_NONE ? &x->oldest : &x->pages[page->older].newer) = page->newer;
    x->n_unused--;
}

/* A page of no further use to anybody goes first. */
static void sim_leave_page(sim_instance *x, uint32_t p)
{
    sim_page *page = &x->pages[p];

    if (--page->refs > 0)
        return;
    x->n_unused++;
    if (page->indexed) {
        page->newer = SIM_NONE;
        page->older = x->newest;
        *(x->newest == SIM_NONE ? &x->oldest : &x->pages[x->newest].newer) = p;
        x->newest = p;
    } else {
        page->older = SIM_NONE;
        page->newer = x->oldest;
        *(x->oldest == SIM_NONE ? &x->newest : &x->pages[x->oldest].older) = p;
        x->oldest = p;
    }
}

static uint32_t sim_take_page(sim_group *g, uint32_t at)
{
    sim_instance *x = &g->at[at];
    const uint32_t p = x->oldest;

    if (x->pages[p].indexed) {
        sim_forget_page(x, p);
        if (g->listener.evicted)
            g->listener.evicted(g->listener.ctx, at, x->pages[p].hash);
    }
    sim_use_page(x, p);
    return p;
}

/* a request */

static void sim_group_init(sim_group *g, sim_request *requests, const sim_listener *listener)
{
    memset(g, 0, sizeof(*g));
    g->requests = requests;
    g->listener = *listener;
    for (uint32_t i = 0; i < SIM_INSTANCES; i++) {
        sim_instance *x = &g->at[i];

        memset(x->bucket, 0xff, sizeof(x->bucket));
        x->newest = x->oldest = SIM_NONE;
        x->waiting_first = x->waiting_last = x->running_first = x->running_last = SIM_NONE;
        for (uint32_t p = 0; p < SIM_PAGES; p++) {
            x->pages[p].refs = 1;
            sim_leave_page(x, p);
        }
    }
}

static void sim_append(sim_group *g, uint32_t *first, uint32_t *last, uint32_t i)
{
    g->requests[i].next = SIM_NONE;
    *(*last == SIM_NONE ? first : &g->requests[*last].next) = i;
    *last = i;
}

static void sim_send(sim_group *g, uint32_t request, uint32_t at)
{
    sim_instance *x = &g->at[at];

    g->requests[request].instance = at;
    x->n_received++;
    x->n_waiting++;
    sim_append(g, &x->waiting_first, &x->waiting_last, request);
}

/* Starts the first one that waits; false when slots or pages do not suffice. */
static bool sim_start(sim_group *g, uint32_t at)
{
    sim_instance *x = &g->at[at];
    const uint32_t i = x->waiting_first;
    sim_request *r = &g->requests[i];
    const uint32_t max_cached = (r->n_prompt - 1) / YARD_PAGE_TOKENS;
    uint32_t n_hits = 0, n_unused_hits = 0, p;

    if (x->n_running == SIM_SLOTS)
        return false;
    r->n_pages = yard_ceil_div(r->n_prompt + r->n_output, YARD_PAGE_TOKENS);
    while (n_hits < max_cached && (p = sim_find_page(x, sim_hash(r, n_hits))) != SIM_NONE) {
        n_unused_hits += x->pages[p].refs == 0;
        n_hits++;
    }
    if (r->n_pages - n_hits > x->n_unused - n_unused_hits)
        return false;
    r->page = malloc(r->n_pages * sizeof(*r->page));
    for (uint32_t k = 0; k < n_hits; k++) {
        r->page[k] = sim_find_page(x, sim_hash(r, k));
        sim_use_page(x, r->page[k]);
    }
    for (uint32_t k = n_hits; k < r->n_pages; k++)
        r->page[k] = sim_take_page(g, at);
    r->n_cached = r->n_computed = n_hits * YARD_PAGE_TOKENS;
    x->waiting_first = r->next;
    if (x->waiting_first == SIM_NONE)
        x->waiting_last = SIM_NONE;
    x->n_waiting--;
    x->n_running++;
    sim_append(g, &x->running_first, &x->running_last, i);
    return true;
}

static void sim_compute(sim_group *g, sim_request *r, uint32_t n_tokens)
{
    sim_instance *x = &g->at[r->instance];
    const uint32_t from = r->n_computed / YARD_PAGE_TOKENS;

    r->n_computed += n_tokens;
    for (uint32_t k = from; k < r->n_computed / YARD_PAGE_TOKENS; k++) {
        const yard_page_hash hash = sim_hash(r, k);

        if (sim_find_page(x, hash) != SIM_NONE)
            continue; /* somebody computed the same */
        sim_index_page(x, r->page[k], hash);
        if (g->listener.added)
            g->listener.added(g->listener.ctx, r->instance, hash);
    }
}

static void sim_finish(sim_group *g, sim_request *r)
{
    for (uint32_t k = r->n_pages; k-- > 0;) /* the ends of chains are evicted first */
        sim_leave_page(&g->at[r->instance], r->page[k]);
    free(r->page);
    r->page = NULL;
    g->at[r->instance].n_running--;
    if (g->listener.finished)
        g->listener.finished(g->listener.ctx, r);
}

/* a step */

/* What each request gets in the step that runs. */
typedef struct sim_plan {
    uint32_t request, n_prompt_tokens; /* 0: it generates a token */
} sim_plan;

typedef struct sim_step {
    sim_plan plan[SIM_INSTANCES][SIM_SLOTS];
    uint32_t n[SIM_INSTANCES];
    uint64_t duration_us;
} sim_step;

static uint64_t sim_plan_instance(sim_group *g, uint32_t at, sim_step *step)
{
    sim_instance *x = &g->at[at];
    uint32_t budget = SIM_BUDGET, context = 0;

    step->n[at] = 0;
    for (uint32_t i = x->running_first; i != SIM_NONE; i = g->requests[i].next) {
        const sim_request *r = &g->requests[i];

        if (r->n_computed < r->n_prompt)
            continue;
        step->plan[at][step->n[at]++] = (sim_plan){ i, 0 };
        budget--;
        context += r->n_prompt + r->n_generated;
    }
    for (uint32_t i = x->running_first; budget > 0;) {
        uint32_t n;

        while (i != SIM_NONE && g->requests[i].n_computed == g->requests[i].n_prompt)
            i = g->requests[i].next;
        if (i == SIM_NONE) {
            if (x->waiting_first == SIM_NONE || !sim_start(g, at))
                break;
            i = x->running_last;
        }
        n = sim_min(budget, g->requests[i].n_prompt - g->requests[i].n_computed);
        step->plan[at][step->n[at]++] = (sim_plan){ i, n };
        budget -= n;
        i = g->requests[i].next;
    }
    x->n_computed += SIM_BUDGET - budget;
    return (uint64_t)(SIM_BUDGET - budget) * SIM_TOKEN_US +
           (uint64_t)context * SIM_TOKEN_US / SIM_CONTEXT_TOKENS;
}

/* Plans a step; false when there is nothing to do. */
static bool sim_begin_step(sim_group *g, sim_step *step)
{
    uint64_t most = 0;

    for (uint32_t at = 0; at < SIM_INSTANCES; at++) {
        const uint64_t us = sim_plan_instance(g, at, step);

        most = us > most ? us : most;
    }
    if (most == 0)
        return false;
    step->duration_us = SIM_STEP_US + most;
    return true;
}

static void sim_end_step(sim_group *g, const sim_step *step, uint64_t now_us)
{
    for (uint32_t at = 0; at < SIM_INSTANCES; at++) {
        sim_instance *x = &g->at[at];
        uint32_t i;

        for (uint32_t k = 0; k < step->n[at]; k++) {
            sim_request *r = &g->requests[step->plan[at][k].request];

            if (step->plan[at][k].n_prompt_tokens > 0)
                sim_compute(g, r, step->plan[at][k].n_prompt_tokens);
            if (r->n_computed < r->n_prompt)
                continue;
            r->n_generated++;
            if (r->n_generated == 1) {
                r->first_us = now_us;
                if (g->listener.started)
                    g->listener.started(g->listener.ctx, r);
            }
        }
        i = x->running_first;
        x->running_first = x->running_last = SIM_NONE;
        while (i != SIM_NONE) {
            const uint32_t next = g->requests[i].next;

            if (g->requests[i].n_generated == g->requests[i].n_output)
                sim_finish(g, &g->requests[i]);
            else
                sim_append(g, &x->running_first, &x->running_last, i);
            i = next;
        }
    }
}

static yard_engine_report sim_report(const sim_group *g, uint32_t at)
{
    const sim_instance *x = &g->at[at];
    yard_engine_report report = { .n_seen = x->n_received,
                                  .n_requests = x->n_waiting + x->n_running };

    for (uint32_t i = x->waiting_first; i != SIM_NONE; i = g->requests[i].next)
        report.prompt_tokens += g->requests[i].n_prompt;
    for (uint32_t i = x->running_first; i != SIM_NONE; i = g->requests[i].next) {
        report.prompt_tokens += g->requests[i].n_prompt - g->requests[i].n_computed;
        report.running_tokens += g->requests[i].n_computed + g->requests[i].n_generated;
    }
    return report;
}

#endif
