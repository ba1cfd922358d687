/* Events, from the step that makes them until they are polled. */
#include <stdlib.h>

#include "engine/engine_impl.h"

yard_status yard_events_reserve(event_queue *q, uint32_t n_more, yard_error *err)
{
    const uint32_t want = q->n + n_more;
    yard_event *larger;

    if (want <= q->capacity)
        return YARD_OK;
    larger = malloc((size_t)2 * want * sizeof(*larger));
    if (!larger)
        return yard_fail(err, YARD_ENOMEM, "events: no memory for %u", 2 * want);
    for (uint32_t i = 0; i < q->n; i++)
        larger[i] = q->events[(q->first + i) % q->capacity];
    free(q->events);
    q->events = larger;
    q->capacity = 2 * want;
    q->first = 0;
    return YARD_OK;
}

void yard_events_push(event_queue *q, yard_event event)
{
    q->events[(q->first + q->n++) % q->capacity] = event;
}

yard_event yard_event_of(sequence *seq, yard_finish finish)
{
    const yard_event event = { .id = seq->id,
                               .choice = seq->choice,
                               .finish = finish,
                               .n_cached = seq->told ? 0 : seq->n_found };

    seq->told = true;
    return event;
}

void yard_events_forget_logprobs(yard_engine *e)
{
    event_queue *q = &e->events;

    for (uint32_t i = 0; i < q->n && e->n_logprobs > 0; i++) {
        q->events[(q->first + i) % q->capacity].n_logprobs = 0;
        q->events[(q->first + i) % q->capacity].logprob = NULL;
    }
    e->n_logprobs = 0;
}

uint32_t yard_engine_poll(yard_engine *e, yard_event *events, uint32_t max_events)
{
    event_queue *q = &e->events;
    uint32_t n = 0;

    while (n < max_events && q->n > 0) {
        events[n++] = q->events[q->first];
        q->first = (q->first + 1) % q->capacity;
        q->n--;
    }
    return n;
}
