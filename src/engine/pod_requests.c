#include "engine/pod_requests.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/pod_wire.h"

/* A request that kills its ranks each time must not do so for ever. */
enum { MAX_TRIES = 3 };

void yard_pod_requests_close(yard_pod_requests *q)
{
    for (size_t i = 0; i < q->n; i++) {
        free(q->items[i].frame);
        free(q->items[i].choice);
    }
    for (size_t i = q->first_event; i < q->n_events; i++)
        yard_pod_event_free(&q->events[i]);
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
    yard_pod_request r = { .id = q->last_id + 1,
                           .instance = instance,
                           .n_choices = request->n_choices };

    if (items)
        q->items = items;
    r.frame = yard_request_encode(r.id, request, &r.n_frame);
    r.choice = calloc(r.n_choices, sizeof(*r.choice));
    if (!items || !r.frame || !r.choice) {
        free(r.frame);
        free(r.choice);
        return yard_fail(err, YARD_ENOMEM, "pod: no memory for a request of %u tokens",
                         request->n_prompt);
    }
    q->items[q->n++] = r;
    *id = q->last_id = r.id;
    return YARD_OK;
}

/* Index of the first request with at least this id. */
static size_t first_from(const yard_pod_requests *q, uint64_t id)
{
    size_t first = 0, end = q->n;

    while (first < end) {
        const size_t middle = (first + end) / 2;

        if (q->items[middle].id < id)
            first = middle + 1;
        else
            end = middle;
    }
    return first;
}

yard_pod_request *yard_pod_requests_find(const yard_pod_requests *q, uint64_t id)
{
    const size_t at = first_from(q, id);

    return at < q->n && q->items[at].id == id ? &q->items[at] : NULL;
}

const yard_pod_request *yard_pod_requests_after(const yard_pod_requests *q, uint32_t instance,
                                                uint64_t last_id)
{
    for (size_t i = first_from(q, last_id + 1); i < q->n; i++)
        if (q->items[i].instance == instance)
            return &q->items[i];
    return NULL;
}

static void forget(yard_pod_requests *q, yard_pod_request *r)
{
    const size_t at = (size_t)(r - q->items);

    free(r->frame);
    free(r->choice);
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

/* A choice's last event; the request goes with its last choice. */
static bool end_choice(yard_pod_requests *q, yard_pod_request *r, yard_pod_event event)
{
    r->choice[event.choice] = YARD_CHOICE_ENDED;
    if (++r->n_ended == r->n_choices)
        forget(q, r);
    return push(q, event);
}

static bool fail_choice(yard_pod_requests *q, yard_pod_request *r, uint32_t choice, bool lost,
                        const char *message)
{
    yard_pod_event event = { .id = r->id,
                             .choice = choice,
                             .finish = YARD_FINISH_ERROR,
                             .message = strdup(message),
                             .lost = lost };

    if (event.message && end_choice(q, r, event))
        return true;
    free(event.message);
    return false;
}

static bool abort_choice(yard_pod_requests *q, yard_pod_request *r, uint32_t choice)
{
    return end_choice(
        q, r, (yard_pod_event){ .id = r->id, .choice = choice, .finish = YARD_FINISH_ABORTED });
}

void yard_pod_event_free(yard_pod_event *e)
{
    free(e->logprob);
    free(e->message);
    e->logprob = NULL;
    e->message = NULL;
}

bool yard_pod_requests_event(yard_pod_requests *q, const yard_event *e)
{
    yard_pod_request *r = yard_pod_requests_find(q, e->id);
    yard_pod_event event = { .id = e->id,
                             .choice = e->choice,
                             .n_tokens = e->n_tokens,
                             .token = e->token,
                             .finish = e->finish,
                             .n_cached = e->n_cached,
                             .of_prompt = e->of_prompt,
                             .n_logprobs = e->n_logprobs };

    if (!r || e->choice >= r->n_choices || r->choice[e->choice] == YARD_CHOICE_ENDED)
        return true;
    if (e->finish == YARD_FINISH_ERROR)
        return fail_choice(q, r, e->choice, false,
                           "the model's logits are not finite numbers: its weights overflow");
    if (e->n_logprobs > 0) {
        event.logprob = malloc(e->n_logprobs * sizeof(*event.logprob));
        if (!event.logprob)
            return false;
        memcpy(event.logprob, e->logprob, e->n_logprobs * sizeof(*event.logprob));
    }
    r->n_tokens += e->n_tokens;
    if (e->finish == YARD_RUNNING ? push(q, event) : end_choice(q, r, event))
        return true;
    free(event.logprob);
    return false;
}

bool yard_pod_requests_abort(yard_pod_requests *q, uint64_t id, uint32_t choice, bool *to_send)
{
    yard_pod_request *r = yard_pod_requests_find(q, id);
    const uint32_t first = choice == YARD_ALL_CHOICES ? 0 : choice;
    uint32_t end;

    *to_send = false;
    if (!r || first >= r->n_choices)
        return true;
    end = choice == YARD_ALL_CHOICES ? r->n_choices : choice + 1;
    for (uint32_t c = first, n_left = r->n_choices - r->n_ended; c < end && n_left > 0; c++) {
        if (r->choice[c] != YARD_CHOICE_LIVE)
            continue;
        r->choice[c] = YARD_CHOICE_ABORTING;
        *to_send = r->sent;
        if (r->sent)
            continue;
        n_left--;
        if (!abort_choice(q, r, c))
            return false;
    }
    return true;
}

/* Each live choice, with the same words; those whose end was asked for got that. */
static bool end_all(yard_pod_requests *q, yard_pod_request *r, bool lost, const char *message)
{
    for (uint32_t c = 0, n_left = r->n_choices - r->n_ended; n_left > 0; c++) {
        if (r->choice[c] == YARD_CHOICE_ENDED)
            continue;
        n_left--;
        if (!(r->choice[c] == YARD_CHOICE_ABORTING ? abort_choice(q, r, c)
                                                   : fail_choice(q, r, c, lost, message)))
            return false;
    }
    return true;
}

bool yard_pod_requests_fail(yard_pod_requests *q, uint64_t id, const char *message)
{
    yard_pod_request *r = yard_pod_requests_find(q, id);

    return !r || end_all(q, r, false, message);
}

/* False: no memory. *stays: it has choices left, all of them live. */
static bool end_aborting(yard_pod_requests *q, yard_pod_request *r, bool *stays)
{
    uint32_t n_left = r->n_choices - r->n_ended;

    *stays = false;
    for (uint32_t c = 0; n_left > 0 && c < r->n_choices; c++) {
        if (r->choice[c] != YARD_CHOICE_ABORTING)
            continue;
        n_left--;
        if (!abort_choice(q, r, c))
            return false;
    }
    *stays = n_left > 0;
    return true;
}

bool yard_pod_requests_regroup(yard_pod_requests *q, const char *why)
{
    char message[YARD_ERROR_MESSAGE_BYTES];

    for (size_t i = 0; i < q->n;) {
        yard_pod_request *r = &q->items[i];
        bool stays;

        if (!end_aborting(q, r, &stays))
            return false;
        if (!stays)
            continue;
        if (!r->sent || (r->n_tokens == 0 && r->n_tries < MAX_TRIES)) {
            r->sent = false;
            i++;
            continue;
        }
        snprintf(message, sizeof(message), "lost after %llu tokens in %u attempts: %s",
                 (unsigned long long)r->n_tokens, r->n_tries, why);
        if (!end_all(q, r, true, message))
            return false;
    }
    return true;
}
