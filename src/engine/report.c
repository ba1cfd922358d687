#include "engine/report.h"

#include <stdlib.h>

enum { MIN_EVENTS = 64 };

void yard_page_events_close(yard_page_events *q)
{
    free(q->events);
    *q = (yard_page_events){ 0 };
}

static bool grow(yard_page_events *q)
{
    uint32_t capacity = q->capacity ? 2 * q->capacity : MIN_EVENTS;
    yard_page_event *larger;

    capacity = capacity < q->max_events ? capacity : q->max_events;
    larger = malloc(capacity * sizeof(*larger));
    if (!larger)
        return false;
    for (uint32_t i = 0; i < q->n; i++)
        larger[i] = q->events[(q->first + i) % q->capacity];
    free(q->events);
    q->events = larger;
    q->capacity = capacity;
    q->first = 0;
    return true;
}

bool yard_page_events_push(yard_page_events *q, yard_page_event event)
{
    if (q->n >= q->max_events || (q->n == q->capacity && !grow(q)))
        return false;
    q->events[(q->first + q->n++) % q->capacity] = event;
    return true;
}

uint32_t yard_page_events_take(yard_page_events *q, yard_page_event *out, uint32_t max_events)
{
    uint32_t n = 0;

    for (; n < max_events && q->n > 0; n++) {
        out[n] = q->events[q->first];
        q->first = (q->first + 1) % q->capacity;
        q->n--;
    }
    return n;
}
