/* Names of requests on the links: a slot of a table, and how often it was used. What comes under a
 * name that has been dropped belongs to nobody. */
#include <stdlib.h>

#include "serve/front_impl.h"

enum { FIRST_TAGS = 64 };

static bool grow(yard_front *front)
{
    const uint32_t n = front->n_tags ? 2 * front->n_tags : FIRST_TAGS;
    yard_front_tag *larger = realloc(front->tags, n * sizeof(*larger));

    if (!larger)
        return false;
    front->tags = larger;
    for (uint32_t i = n; i-- > front->n_tags;) {
        larger[i] = (yard_front_tag){ .generation = 1, .next_free = front->free_tag };
        front->free_tag = i;
    }
    front->n_tags = n;
    return true;
}

uint64_t yard_front_tag_take(yard_front *front, yard_front_part *part)
{
    yard_front_tag *t;

    if (front->free_tag == UINT32_MAX && !grow(front))
        return 0;
    t = &front->tags[front->free_tag];
    part->tag = (uint64_t)t->generation << 32 | front->free_tag;
    front->free_tag = t->next_free;
    t->part = part;
    return part->tag;
}

void yard_front_tag_drop(yard_front *front, yard_front_part *part)
{
    yard_front_tag *t;

    if (part->tag == 0)
        return;
    t = &front->tags[(uint32_t)part->tag];
    t->part = NULL;
    t->generation++;
    t->next_free = front->free_tag;
    front->free_tag = (uint32_t)part->tag;
    part->tag = 0;
}

yard_front_part *yard_front_tag_find(const yard_front *front, uint64_t tag)
{
    const uint32_t slot = (uint32_t)tag;

    if (slot >= front->n_tags || front->tags[slot].generation != (uint32_t)(tag >> 32))
        return NULL;
    return front->tags[slot].part;
}
