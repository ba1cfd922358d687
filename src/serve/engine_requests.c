#include "serve/engine_requests.h"

#include <stdlib.h>

void yard_served_requests_release(yard_served_requests *q)
{
    free(q->items);
    *q = (yard_served_requests){ 0 };
}

bool yard_served_requests_reserve(yard_served_requests *q)
{
    const size_t wanted = q->max ? 2 * q->max : 64;
    yard_served_request *larger;

    if (q->n < q->max)
        return true;
    larger = realloc(q->items, wanted * sizeof(*larger));
    if (!larger)
        return false;
    q->items = larger;
    q->max = wanted;
    return true;
}

void yard_served_requests_add(yard_served_requests *q, yard_served_request request)
{
    q->items[q->n++] = request;
}

static int compare(const void *a, const void *b)
{
    const uint64_t x = ((const yard_served_request *)a)->id;
    const uint64_t y = ((const yard_served_request *)b)->id;

    return x < y ? -1 : x > y;
}

yard_served_request *yard_served_requests_find(const yard_served_requests *q, uint64_t id)
{
    const yard_served_request key = { .id = id };

    return q->n ? bsearch(&key, q->items, q->n, sizeof(key), compare) : NULL;
}

void yard_served_requests_remove(yard_served_requests *q, yard_served_request *r)
{
    const size_t after = q->n - (size_t)(r - q->items) - 1;

    memmove(r, r + 1, after * sizeof(*r));
    q->n--;
}

void yard_seen_release(yard_seen *s)
{
    free(s->ids);
    *s = (yard_seen){ 0 };
}

bool yard_seen_reserve(yard_seen *s)
{
    const uint32_t wanted = s->max ? 2 * s->max : 16;
    uint64_t *larger;

    if (s->n < s->max)
        return true;
    larger = malloc(wanted * sizeof(*larger));
    if (!larger)
        return false;
    for (uint32_t i = 0; i < s->n; i++)
        larger[i] = s->ids[(s->first + i) % s->max];
    free(s->ids);
    s->ids = larger;
    s->max = wanted;
    s->first = 0;
    return true;
}

void yard_seen_add(yard_seen *s, uint64_t id)
{
    s->ids[(s->first + s->n++) % s->max] = id;
    s->n_sent++;
}

uint64_t yard_seen_count(yard_seen *s, uint64_t last_id)
{
    while (s->n > 0 && s->ids[s->first] <= last_id) {
        s->first = (s->first + 1) % s->max;
        s->n--;
    }
    return s->n_sent - s->n;
}
