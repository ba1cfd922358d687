/* Requests from their acceptance to their one end. */
#include <assert.h>
#include <stdlib.h>

#include "serve/scheduler_impl.h"

static uint32_t slot_of(const yard_scheduler *s, const request *r)
{
    return (uint32_t)(r - s->requests);
}

static void link_before(yard_scheduler *s, request_list *list, uint32_t newer, request *r)
{
    r->newer = newer;
    r->older = newer == YARD_NO_REQUEST ? list->newest : s->requests[newer].older;
    *(r->older == YARD_NO_REQUEST ? &list->oldest : &s->requests[r->older].newer) = slot_of(s, r);
    *(newer == YARD_NO_REQUEST ? &list->newest : &s->requests[newer].older) = slot_of(s, r);
}

void yard_list_append(yard_scheduler *s, request_list *list, request *r)
{
    link_before(s, list, YARD_NO_REQUEST, r);
}

/* Before the first one that came later. */
static void insert_by_arrival(yard_scheduler *s, request_list *list, request *r)
{
    uint32_t newer = list->oldest;

    while (newer != YARD_NO_REQUEST && s->requests[newer].arrival < r->arrival)
        newer = s->requests[newer].newer;
    link_before(s, list, newer, r);
}

void yard_list_remove(yard_scheduler *s, request_list *list, request *r)
{
    *(r->older == YARD_NO_REQUEST ? &list->oldest : &s->requests[r->older].newer) = r->newer;
    *(r->newer == YARD_NO_REQUEST ? &list->newest : &s->requests[r->newer].older) = r->older;
}

static yard_status check_config(const yard_scheduler_config *c, yard_error *err)
{
    if (c->size != sizeof(*c))
        return yard_fail(err, YARD_EINVAL, "scheduler: want YARD_SCHEDULER_CONFIG_INIT first");
    if (c->max_queued == 0)
        return yard_fail(err, YARD_EINVAL, "scheduler: max_queued: want at least 1, got 0");
    if (c->max_attempts == 0)
        return yard_fail(err, YARD_EINVAL, "scheduler: max_attempts: want at least 1, got 0");
    return YARD_OK;
}

yard_status yard_scheduler_create(yard_scheduler **out, const yard_scheduler_config *config,
                                  yard_error *err)
{
    const request_list empty = { YARD_NO_REQUEST, YARD_NO_REQUEST };
    yard_status st = check_config(config, err);
    yard_scheduler *s;

    if (st != YARD_OK)
        return st;
    s = calloc(1, sizeof(*s));
    if (!s)
        return yard_fail(err, YARD_ENOMEM, "scheduler: no memory");
    *s = (yard_scheduler){ .config = *config,
                           .free = empty,
                           .queued = empty,
                           .ended = empty,
                           .wake_us = UINT64_MAX,
                           .mean_output = 128 };
    st = yard_prefix_index_create(&s->index, config->n_instances, config->max_index_pages, err);
    if (st != YARD_OK)
        goto out;
    s->instances = calloc(config->n_instances, sizeof(*s->instances));
    s->chain = calloc(config->n_instances, sizeof(*s->chain));
    if (!s->instances || !s->chain) {
        st = yard_fail(err, YARD_ENOMEM, "scheduler: no memory for %u instances",
                       config->n_instances);
        goto out;
    }
    for (uint32_t i = 0; i < config->n_instances; i++)
        s->instances[i].sent = empty;
    *out = s;
    s = NULL;
out:
    yard_scheduler_destroy(s);
    return st;
}

void yard_scheduler_destroy(yard_scheduler *s)
{
    if (!s)
        return;
    for (uint32_t i = 0; i < s->n_slots; i++)
        free(s->requests[i].page);
    free(s->requests);
    free(s->instances);
    free(s->chain);
    yard_prefix_index_destroy(s->index);
    free(s);
}

static yard_status add_slots(yard_scheduler *s, yard_error *err)
{
    const uint32_t n = s->n_slots ? 2 * s->n_slots : 64;
    request *larger = realloc(s->requests, n * sizeof(*larger));

    if (!larger)
        return yard_fail(err, YARD_ENOMEM, "scheduler: no memory for %u requests", n);
    s->requests = larger;
    while (s->n_slots < n) {
        request *r = &s->requests[s->n_slots];

        *r = (request){ .id = (uint64_t)1 << 32 | s->n_slots };
        s->n_slots++;
        yard_list_append(s, &s->free, r);
    }
    return YARD_OK;
}

/* Pages that may be reused; the last token is always computed, so a page that ends with it is of no
 * use. */
static yard_status copy_pages(request *r, const yard_scheduler_request *from, yard_error *err)
{
    r->n_pages = (from->n_prompt - 1) / YARD_PAGE_TOKENS;
    r->page = malloc((r->n_pages + (size_t)1) * sizeof(*r->page));
    if (!r->page)
        return yard_fail(err, YARD_ENOMEM, "scheduler: no memory for %u page hashes", r->n_pages);
    if (r->n_pages > 0)
        memcpy(r->page, from->page, r->n_pages * sizeof(*r->page));
    return YARD_OK;
}

yard_status yard_scheduler_submit(yard_scheduler *s, const yard_scheduler_request *from,
                                  uint64_t *id, yard_error *err)
{
    yard_status st = YARD_OK;
    request *r;

    if (from->n_prompt == 0)
        return yard_fail(err, YARD_EINVAL, "request: want at least 1 prompt token, got 0");
    if (s->n_queued >= s->config.max_queued) {
        s->stats.n_refused++;
        return yard_fail(err, YARD_EAGAIN, "the queue is full: %u requests wait", s->n_queued);
    }
    if (s->free.oldest == YARD_NO_REQUEST)
        st = add_slots(s, err);
    if (st != YARD_OK)
        return st;
    r = &s->requests[s->free.oldest];
    st = copy_pages(r, from, err);
    if (st != YARD_OK)
        return st;
    yard_list_remove(s, &s->free, r);
    r->state = REQUEST_QUEUED;
    r->arrival = s->n_arrived++;
    r->deadline_us = from->deadline_us;
    r->ctx = from->ctx;
    r->n_prompt = from->n_prompt;
    r->max_new_tokens = from->max_new_tokens;
    r->attempt = 0;
    r->instance = YARD_NO_INSTANCE;
    r->avoid = YARD_NO_INSTANCE;
    r->started = false;
    yard_list_append(s, &s->queued, r);
    s->n_queued++;
    s->stats.n_accepted++;
    if (from->deadline_us < s->wake_us)
        s->wake_us = from->deadline_us;
    *id = r->id;
    return YARD_OK;
}

uint32_t yard_scheduler_retry_after_s(const yard_scheduler *s)
{
    const double seconds = s->us_per_end * 1e-6 * s->n_queued;

    return seconds < 1 ? 1 : seconds > 60 ? 60 : (uint32_t)(seconds + 0.5);
}

/* Takes a request out of its list: out of the queue, or away from its instance. */
static void detach(yard_scheduler *s, request *r)
{
    if (r->state == REQUEST_SENT) {
        yard_scheduler_unplace(s, r);
        return;
    }
    assert(r->state == REQUEST_QUEUED);
    yard_list_remove(s, &s->queued, r);
    s->n_queued--;
}

/* at_instance: where it still runs. */
static void end(yard_scheduler *s, request *r, yard_end_reason reason, uint32_t at_instance)
{
    detach(s, r);
    r->state = REQUEST_ENDED;
    r->reason = reason;
    r->instance = at_instance;
    yard_list_append(s, &s->ended, r);
}

void yard_scheduler_retry(yard_scheduler *s, request *r, yard_end_reason reason)
{
    assert(r->state == REQUEST_SENT);
    if (r->started || r->attempt >= s->config.max_attempts) {
        end(s, r, reason, YARD_NO_INSTANCE);
        return;
    }
    detach(s, r);
    r->state = REQUEST_QUEUED;
    r->instance = YARD_NO_INSTANCE;
    insert_by_arrival(s, &s->queued, r);
    s->n_queued++;
    s->stats.n_retried++;
}

/* NULL unless the request has not ended and attempt (0: any) is its current one. */
static request *find(yard_scheduler *s, uint64_t id, uint32_t attempt)
{
    const uint32_t slot = (uint32_t)id;
    request *r = slot < s->n_slots ? &s->requests[slot] : NULL;

    if (!r || r->id != id || (r->state != REQUEST_QUEUED && r->state != REQUEST_SENT))
        return NULL;
    if (attempt != 0 && (r->state != REQUEST_SENT || r->attempt != attempt))
        return NULL;
    return r;
}

bool yard_scheduler_started(yard_scheduler *s, uint64_t id, uint32_t attempt)
{
    request *r = find(s, id, attempt);

    if (!r || attempt == 0)
        return false;
    r->started = true;
    yard_scheduler_unexpect(s, r); /* written by now, and announced or not worth it */
    free(r->page);
    r->page = NULL;
    r->n_pages = 0;
    return true;
}

static void average(double *mean, double value)
{
    *mean += (value - *mean) / 32;
}

/* The pace is that of ends while requests wait: without a queue it is the clients' pace. */
static void measure_pace(yard_scheduler *s, uint64_t now_us)
{
    if (s->n_queued > 0 && s->last_end_us > 0 && now_us >= s->last_end_us)
        average(&s->us_per_end, (double)(now_us - s->last_end_us));
    s->last_end_us = s->n_queued > 0 ? now_us : 0;
}

bool yard_scheduler_finished(yard_scheduler *s, uint64_t now_us, uint64_t id, uint32_t attempt,
                             uint32_t n_output)
{
    request *r = find(s, id, attempt);

    if (!r || attempt == 0)
        return false;
    average(&s->mean_output, n_output);
    measure_pace(s, now_us);
    end(s, r, YARD_END_FINISHED, YARD_NO_INSTANCE);
    return true;
}

bool yard_scheduler_failed(yard_scheduler *s, uint64_t id, uint32_t attempt, bool retry)
{
    request *r = find(s, id, attempt);

    if (!r || attempt == 0)
        return false;
    r->avoid = r->instance;
    if (retry)
        yard_scheduler_retry(s, r, YARD_END_FAILED);
    else
        end(s, r, YARD_END_FAILED, YARD_NO_INSTANCE);
    return true;
}

bool yard_scheduler_abort(yard_scheduler *s, uint64_t id)
{
    request *r = find(s, id, 0);

    if (!r)
        return false;
    end(s, r, YARD_END_ABORTED, r->instance);
    return true;
}

/* Looks at all requests, but only when one is due: wake_us may be too early, never too late. */
static void end_overdue(yard_scheduler *s, uint64_t now_us)
{
    if (now_us < s->wake_us)
        return;
    s->wake_us = UINT64_MAX;
    for (uint32_t i = 0; i < s->n_slots; i++) {
        request *r = &s->requests[i];

        if (r->state != REQUEST_QUEUED && r->state != REQUEST_SENT)
            continue;
        if (r->deadline_us <= now_us && r->deadline_us != UINT64_MAX)
            end(s, r, YARD_END_DEADLINE, r->instance);
        else if (r->deadline_us < s->wake_us)
            s->wake_us = r->deadline_us;
    }
}

/* Tells the end and frees the slot under a new id. */
static void tell_end(yard_scheduler *s, yard_action *action)
{
    request *r = &s->requests[s->ended.oldest];

    *action = (yard_action){ .kind = YARD_ACTION_END,
                             .id = r->id,
                             .ctx = r->ctx,
                             .attempt = r->attempt,
                             .instance = r->instance,
                             .reason = r->reason };
    s->stats.n_ended[r->reason]++;
    yard_list_remove(s, &s->ended, r);
    free(r->page);
    r->page = NULL;
    r->state = REQUEST_FREE;
    r->id += (uint64_t)1 << 32;
    yard_list_append(s, &s->free, r);
}

bool yard_scheduler_next(yard_scheduler *s, uint64_t now_us, yard_action *action)
{
    instance *at;
    request *r;

    end_overdue(s, now_us);
    if (s->ended.oldest != YARD_NO_REQUEST) {
        tell_end(s, action);
        return true;
    }
    if (s->queued.oldest == YARD_NO_REQUEST)
        return false;
    r = &s->requests[s->queued.oldest];
    at = yard_scheduler_choose(s, now_us, r);
    if (!at)
        return false;
    detach(s, r);
    yard_scheduler_place(s, r, at);
    *action = (yard_action){ .kind = YARD_ACTION_SEND,
                             .id = r->id,
                             .ctx = r->ctx,
                             .attempt = r->attempt,
                             .instance = r->instance,
                             .n_cached = r->n_prompt - (uint32_t)r->prompt_tokens };
    return true;
}

uint64_t yard_scheduler_wake_us(const yard_scheduler *s)
{
    return s->wake_us;
}

void yard_scheduler_get_stats(const yard_scheduler *s, yard_scheduler_stats *out)
{
    *out = s->stats;
    out->n_queued = s->n_queued;
    out->n_sent = s->n_sent;
    out->n_index_pages = yard_prefix_index_count(s->index);
}
