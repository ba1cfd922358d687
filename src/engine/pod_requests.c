#include "engine/pod_requests.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/pod_wire.h"

/* A request that kills its ranks each time must not do so for ever. */
enum { MAX_TRIES = 3 };

void yard_pod_requests_close(yard_pod_requests *q)
{
    for (size_t i = 0; i < q->n; i++)
        free(q->items[i].frame);
    for (size_t i = q->first_event; i < q->n_events; i++)
        free(q->events[i].message);
    free(q->items);
    free(q->events);
    *q = (yard_pod_requests){ 0 };
}

/* Room for one more item of an array; NULL: no memory. */
static void *grow(void *items, size_t n, size_t *capacity, size_t item_bytes)
{
    const size_t wanted = *capacity ? 2 * *capacity : 64;

    if (n < *capacity)
        return items;
    items = realloc(items, wanted * item_bytes);
    if (items)
        *capacity = wanted;
    return items;
}

yard_status yard_pod_requests_add(yard_pod_requests *q, uint32_t instance,
                                  const yard_request *request, uint64_t *id, yard_error *err)
{
    yard_pod_request *items = grow(q->items, q->n, &q->capacity, sizeof(*items));
    yard_pod_request r = { .id = q->last_id + 1, .instance = instance };

    if (items)
        q->items = items;
    r.frame = yard_request_encode(r.id, request, &r.n_frame);
    if (!items || !r.frame) {
        free(r.frame);
        return yard_fail(err, YARD_ENOMEM, "pod: no memory for a request of %u tokens",
                         request->n_prompt);
    }
    q->items[q->n++] = r;
    *id = q->last_id = r.id;
    return YARD_OK;
}

yard_pod_request *yard_pod_requests_find(const yard_pod_requests *q, uint64_t id)
{
    size_t first = 0, end = q->n;

    while (first < end) {
        const size_t middle = (first + end) / 2;

        if (q->items[middle].id < id)
            first = middle + 1;
        else
            end = middle;
    }
    return first < q->n && q->items[first].id == id ? &q->items[first] : NULL;
}

static void forget(yard_pod_requests *q, yard_pod_request *r)
{
    const size_t at = (size_t)(r - q->items);

    free(r->frame);
    memmove(r, r + 1, (q->n - at - 1) * sizeof(*r));
    q->n--;
}

static bool push(yard_pod_requests *q, yard_pod_event event)
{
    yard_pod_event *events;

    if (q->first_event == q->n_events)
        q->first_event = q->n_events = 0;
    events = grow(q->events, q->n_events, &q->event_capacity, sizeof(*events));
    if (!events)
        return false;
    q->events = events;
    q->events[q->n_events++] = event;
    return true;
}

bool yard_pod_requests_event(yard_pod_requests *q, const yard_event *e)
{
    yard_pod_request *r = yard_pod_requests_find(q, e->id);
    yard_pod_event event = {
        .id = e->id, .n_tokens = e->n_tokens, .token = e->token, .finish = e->finish
    };

    if (!r)
        return true;
    if (e->finish == YARD_FINISH_ERROR)
        return yard_pod_requests_fail(
            q, e->id, "the model's logits are not finite numbers: its weights overflow");
    r->n_tokens += e->n_tokens;
    if (e->finish != YARD_RUNNING)
        forget(q, r);
    return push(q, event);
}

bool yard_pod_requests_fail(yard_pod_requests *q, uint64_t id, const char *message)
{
    yard_pod_request *r = yard_pod_requests_find(q, id);
    yard_pod_event event = { .id = id, .finish = YARD_FINISH_ERROR };

    if (!r)
        return true;
    event.message = strdup(message);
    forget(q, r);
    if (event.message && push(q, event))
        return true;
    free(event.message);
    return false;
}

bool yard_pod_requests_regroup(yard_pod_requests *q, const char *why)
{
    char message[YARD_ERROR_MESSAGE_BYTES];

    for (size_t i = 0; i < q->n;) {
        yard_pod_request *r = &q->items[i];

        if (!r->sent || (r->n_tokens == 0 && r->n_tries < MAX_TRIES && !r->aborted)) {
            r->sent = false;
            i++;
            continue;
        }
        if (r->aborted) {
            const yard_event end = { .id = r->id, .finish = YARD_FINISH_ABORTED };
            if (!yard_pod_requests_event(q, &end))
                return false;
            continue;
        }
        snprintf(message, sizeof(message), "lost after %llu tokens in %u attempts: %s",
                 (unsigned long long)r->n_tokens, r->n_tries, why);
        if (!yard_pod_requests_fail(q, r->id, message))
            return false;
    }
    return true;
}
