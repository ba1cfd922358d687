/* The choice of an instance, and what the scheduler knows about each. */
#include <assert.h>

#include "serve/scheduler_impl.h"

static uint64_t expected_output(const yard_scheduler *s, uint32_t max_new_tokens)
{
    const uint64_t mean = (uint64_t)s->mean_output;

    return mean < max_new_tokens ? mean : max_new_tokens;
}

/* Tokens that the next steps compute anyway. */
static uint64_t line_of(const instance *x)
{
    return x->report.prompt_tokens + x->unseen_prompt_tokens + x->report.n_requests + x->n_unseen;
}

static uint64_t work_of(const yard_scheduler *s, const instance *x)
{
    return x->report.prompt_tokens + x->report.n_requests * (uint64_t)s->mean_output +
           x->unseen_prompt_tokens + x->unseen_output;
}

uint64_t yard_scheduler_work(const yard_scheduler *s, uint32_t at)
{
    return work_of(s, &s->instances[at]);
}

/* Of pages that may be reused the prompt's last token is never a part: its output is wanted. */
static uint32_t cached_tokens(const yard_scheduler *s, uint32_t at)
{
    return s->chain[at] * YARD_PAGE_TOKENS;
}

static bool takes_requests(const yard_scheduler *s, const instance *x, uint64_t now_us)
{
    if (!x->up || x->paused ||
        (now_us > x->heard_us && now_us - x->heard_us > s->config.stale_after_us))
        return false;
    return x->report.n_requests + (uint64_t)x->n_unseen < x->max_requests;
}

/* Weighing a miss by what it does to others keeps the cache of a loaded group: each prefix computed
 * twice makes the queues longer and the cache smaller, which makes the next miss likelier, until
 * every instance computes everything. An idle one has nobody to delay. */
static uint64_t cost_of(const yard_scheduler *s, const instance *x, uint64_t n_uncached)
{
    const uint64_t work = work_of(s, x);

    return line_of(x) + n_uncached + 2 * (n_uncached < work ? n_uncached : work);
}

/* What an instance is chosen by: the least in this order. */
typedef struct choice {
    instance *at; /* NULL: nothing is worse */
    bool avoided;
    uint64_t cost, running_tokens;
} choice;

static bool is_better(const choice *a, const choice *b)
{
    if (!b->at)
        return true;
    if (a->avoided != b->avoided)
        return b->avoided;
    if (a->cost != b->cost)
        return a->cost < b->cost;
    return a->running_tokens < b->running_tokens;
}

instance *yard_scheduler_choose(yard_scheduler *s, uint64_t now_us, const request *r)
{
    choice best = { 0 };
    uint32_t i = 0;

    while (i < s->config.n_instances && !takes_requests(s, &s->instances[i], now_us))
        i++;
    if (i == s->config.n_instances)
        return NULL; /* the usual case while the queue is long: without a look into the index */
    yard_prefix_index_match(s->index, r->page, r->n_pages, s->chain);
    for (; i < s->config.n_instances; i++) {
        instance *x = &s->instances[i];
        const choice this = { .at = x,
                              .avoided = i == r->avoid,
                              .cost = cost_of(s, x, r->n_prompt - cached_tokens(s, i)),
                              .running_tokens = x->report.running_tokens + x->unseen_running };

        if (takes_requests(s, x, now_us) && is_better(&this, &best))
            best = this;
    }
    return best.at;
}

static uint32_t number_of(const yard_scheduler *s, const instance *x)
{
    return (uint32_t)(x - s->instances);
}

/* The list first: a request counts as unseen by its serial number. */
void yard_scheduler_place(yard_scheduler *s, request *r, instance *x)
{
    r->state = REQUEST_SENT;
    r->attempt++;
    r->instance = number_of(s, x);
    r->serial = ++x->n_sent;
    r->prompt_tokens = r->n_prompt - cached_tokens(s, r->instance);
    r->expected_output = expected_output(s, r->max_new_tokens);
    yard_list_append(s, &x->sent, r);
    s->n_sent++;
    x->n_unseen++;
    x->unseen_prompt_tokens += r->prompt_tokens;
    x->unseen_output += r->expected_output;
    x->unseen_running += r->n_prompt;
    yard_prefix_index_add(s->index, r->instance, YARD_PAGE_EXPECTED, r->page, r->n_pages);
    s->stats.n_prompt_tokens += r->n_prompt;
    s->stats.n_cached_tokens += r->n_prompt - r->prompt_tokens;
}

static void see(instance *x, const request *r)
{
    assert(x->n_unseen > 0);
    x->n_unseen--;
    x->unseen_prompt_tokens -= r->prompt_tokens;
    x->unseen_output -= r->expected_output;
    x->unseen_running -= r->n_prompt;
}

void yard_scheduler_unexpect(yard_scheduler *s, request *r)
{
    if (r->page)
        yard_prefix_index_remove(s->index, r->instance, YARD_PAGE_EXPECTED, r->page, r->n_pages);
}

void yard_scheduler_unplace(yard_scheduler *s, request *r)
{
    instance *x = &s->instances[r->instance];

    if (r->serial > x->report.n_seen)
        see(x, r);
    yard_list_remove(s, &x->sent, r);
    s->n_sent--;
    yard_scheduler_unexpect(s, r);
}

static void hear(instance *x, uint64_t at_us)
{
    if (at_us > x->heard_us)
        x->heard_us = at_us;
}

void yard_scheduler_instance_up(yard_scheduler *s, uint64_t now_us, uint32_t at,
                                uint32_t max_requests)
{
    instance *x = &s->instances[at];

    assert(at < s->config.n_instances);
    yard_scheduler_instance_lost(s, at);
    *x = (instance){ .up = true,
                     .max_requests = max_requests > 0 ? max_requests : 1,
                     .heard_us = now_us,
                     .sent = { YARD_NO_REQUEST, YARD_NO_REQUEST } };
}

/* Its requests go by their age, so that none overtakes another that came before it. */
void yard_scheduler_instance_lost(yard_scheduler *s, uint32_t at)
{
    instance *x = &s->instances[at];

    assert(at < s->config.n_instances);
    while (x->sent.oldest != YARD_NO_REQUEST)
        yard_scheduler_retry(s, &s->requests[x->sent.oldest], YARD_END_INSTANCE_LOST);
    yard_prefix_index_clear(s->index, at);
    x->up = false;
    x->report = (yard_engine_report){ 0 };
}

void yard_scheduler_instance_paused(yard_scheduler *s, uint32_t at)
{
    assert(at < s->config.n_instances);
    s->instances[at].paused = true;
}

/* Reports may be lost, but not overtake each other: they come on one stream. */
void yard_scheduler_report(yard_scheduler *s, uint64_t now_us, uint32_t at,
                           const yard_engine_report *report)
{
    instance *x = &s->instances[at];
    uint32_t i = x->sent.newest;

    assert(at < s->config.n_instances);
    if (!x->up || report->n_seen < x->report.n_seen || report->n_seen > x->n_sent)
        return;
    while (i != YARD_NO_REQUEST && s->requests[i].serial > x->report.n_seen) {
        if (s->requests[i].serial <= report->n_seen)
            see(x, &s->requests[i]);
        i = s->requests[i].older;
    }
    x->report = *report;
    x->paused = false;
    hear(x, now_us > report->step_age_us ? now_us - report->step_age_us : 0);
}

void yard_scheduler_pages_added(yard_scheduler *s, uint32_t at, const yard_page_hash *page,
                                uint32_t n_pages)
{
    if (s->instances[at].up)
        yard_prefix_index_add(s->index, at, YARD_PAGE_HELD, page, n_pages);
}

void yard_scheduler_pages_evicted(yard_scheduler *s, uint32_t at, const yard_page_hash *page,
                                  uint32_t n_pages)
{
    yard_prefix_index_remove(s->index, at, YARD_PAGE_HELD, page, n_pages);
}

void yard_scheduler_pages_unknown(yard_scheduler *s, uint32_t at)
{
    yard_prefix_index_clear(s->index, at);
}
