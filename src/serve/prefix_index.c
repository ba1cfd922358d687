/* A hash table (linear probing, backward-shift deletion) over a pool of pages; each page has two
 * sets of instances and a place in the order of use. */
#include "serve/prefix_index.h"

#include <assert.h>
#include <stdlib.h>

enum { NONE = UINT32_MAX, MAX_INSTANCES = 1 << 16, MAX_PAGES = 1 << 28 };

typedef struct page_entry {
    yard_page_hash hash;
    uint32_t newer, older; /* in the order of use; older also links free entries */
} page_entry;

struct yard_prefix_index {
    uint32_t n_instances, n_words;          /* words of one set of instances */
    uint32_t max_pages, n_pages, n_touched; /* entries below n_touched were used once */
    uint32_t newest, oldest, first_free;
    page_entry *entry; /* [max_pages] */
    uint64_t *sets;    /* [max_pages][2][n_words], by yard_page_claim */
    uint32_t *slot;    /* [n_slots] entry or NONE, stored plus one */
    uint32_t n_slots;  /* a power of two, at least twice max_pages */
    uint64_t *alive;   /* [n_words] of match */
};

static size_t sets_bytes(const yard_prefix_index *x)
{
    return (size_t)x->max_pages * 2 * x->n_words * sizeof(*x->sets);
}

yard_status yard_prefix_index_create(yard_prefix_index **out, uint32_t n_instances,
                                     uint32_t max_pages, yard_error *err)
{
    yard_prefix_index *x;

    if (n_instances == 0 || n_instances > MAX_INSTANCES)
        return yard_fail(err, YARD_EINVAL, "prefix index: want 1 to %d instances, got %u",
                         MAX_INSTANCES, n_instances);
    if (max_pages == 0 || max_pages > MAX_PAGES)
        return yard_fail(err, YARD_EINVAL, "prefix index: want 1 to %d pages, got %u", MAX_PAGES,
                         max_pages);
    x = calloc(1, sizeof(*x));
    if (!x)
        return yard_fail(err, YARD_ENOMEM, "prefix index: no memory");
    *x = (yard_prefix_index){ .n_instances = n_instances,
                              .n_words = yard_ceil_div(n_instances, 64),
                              .max_pages = max_pages,
                              .newest = NONE,
                              .oldest = NONE,
                              .first_free = NONE,
                              .n_slots = 2 };
    while (x->n_slots < 2 * max_pages)
        x->n_slots *= 2;
    x->entry = yard_pages_alloc((size_t)max_pages * sizeof(*x->entry));
    x->sets = yard_pages_alloc(sets_bytes(x));
    x->slot = yard_pages_alloc((size_t)x->n_slots * sizeof(*x->slot));
    x->alive = calloc(x->n_words, sizeof(*x->alive));
    if (!x->entry || !x->sets || !x->slot || !x->alive) {
        yard_prefix_index_destroy(x);
        return yard_fail(err, YARD_ENOMEM, "prefix index: no memory for %u pages of %u instances",
                         max_pages, n_instances);
    }
    *out = x;
    return YARD_OK;
}

void yard_prefix_index_destroy(yard_prefix_index *x)
{
    if (!x)
        return;
    yard_pages_free(x->entry, (size_t)x->max_pages * sizeof(*x->entry));
    yard_pages_free(x->sets, sets_bytes(x));
    yard_pages_free(x->slot, (size_t)x->n_slots * sizeof(*x->slot));
    free(x->alive);
    free(x);
}

uint32_t yard_prefix_index_count(const yard_prefix_index *x)
{
    return x->n_pages;
}

static uint64_t *set_of(yard_prefix_index *x, uint32_t at, yard_page_claim claim)
{
    return x->sets + ((size_t)at * 2 + claim) * x->n_words;
}

static void unlink_entry(yard_prefix_index *x, uint32_t at)
{
    const page_entry *e = &x->entry[at];

    *(e->newer == NONE ? &x->newest : &x->entry[e->newer].older) = e->older;
    *(e->older == NONE ? &x->oldest : &x->entry[e->older].newer) = e->newer;
}

static void link_newest(yard_prefix_index *x, uint32_t at)
{
    x->entry[at].newer = NONE;
    x->entry[at].older = x->newest;
    *(x->newest == NONE ? &x->oldest : &x->entry[x->newest].newer) = at;
    x->newest = at;
}

static void touch(yard_prefix_index *x, uint32_t at)
{
    unlink_entry(x, at);
    link_newest(x, at);
}

static uint32_t home_of(const yard_prefix_index *x, yard_page_hash hash)
{
    return (uint32_t)hash.word[0] & (x->n_slots - 1);
}

/* The slot that holds the hash, or the free one where it belongs. */
static uint32_t find_slot(const yard_prefix_index *x, yard_page_hash hash)
{
    uint32_t s = home_of(x, hash);

    while (x->slot[s] && !yard_page_hash_equal(x->entry[x->slot[s] - 1].hash, hash))
        s = (s + 1) & (x->n_slots - 1);
    return s;
}

static uint32_t find(const yard_prefix_index *x, yard_page_hash hash)
{
    const uint32_t s = find_slot(x, hash);

    return x->slot[s] ? x->slot[s] - 1 : NONE;
}

/* Closes the gap at slot s: whatever probed past it moves back. */
static void close_gap(yard_prefix_index *x, uint32_t s)
{
    const uint32_t mask = x->n_slots - 1;

    for (uint32_t t = (s + 1) & mask; x->slot[t]; t = (t + 1) & mask) {
        const uint32_t home = home_of(x, x->entry[x->slot[t] - 1].hash);

        if (((t - home) & mask) >= ((t - s) & mask)) {
            x->slot[s] = x->slot[t];
            s = t;
        }
    }
    x->slot[s] = 0;
}

static void forget(yard_prefix_index *x, uint32_t at)
{
    close_gap(x, find_slot(x, x->entry[at].hash));
    unlink_entry(x, at);
    x->entry[at].older = x->first_free;
    x->first_free = at;
    x->n_pages--;
}

static uint32_t insert(yard_prefix_index *x, yard_page_hash hash)
{
    uint32_t at;

    if (x->n_pages == x->max_pages)
        forget(x, x->oldest);
    at = x->first_free;
    if (at != NONE)
        x->first_free = x->entry[at].older;
    else
        at = x->n_touched++;
    x->entry[at].hash = hash;
    memset(set_of(x, at, YARD_PAGE_HELD), 0, 2 * x->n_words * sizeof(*x->sets));
    x->slot[find_slot(x, hash)] = at + 1;
    link_newest(x, at);
    x->n_pages++;
    return at;
}

/* Last to first, so that the first pages of a chain are forgotten last: without them the others
 * are of no use. */
void yard_prefix_index_add(yard_prefix_index *x, uint32_t instance, yard_page_claim claim,
                           const yard_page_hash *page, uint32_t n_pages)
{
    assert(instance < x->n_instances);
    for (uint32_t i = n_pages; i-- > 0;) {
        uint32_t at = find(x, page[i]);

        if (at == NONE)
            at = insert(x, page[i]);
        else
            touch(x, at);
        set_of(x, at, claim)[instance / 64] |= (uint64_t)1 << instance % 64;
    }
}

/* Forgets a page that nobody has. */
static void take_away(yard_prefix_index *x, uint32_t at, uint32_t instance, yard_page_claim claim)
{
    const uint64_t *sets = set_of(x, at, YARD_PAGE_HELD);

    set_of(x, at, claim)[instance / 64] &= ~((uint64_t)1 << instance % 64);
    for (uint32_t i = 0; i < 2 * x->n_words; i++)
        if (sets[i])
            return;
    forget(x, at);
}

void yard_prefix_index_remove(yard_prefix_index *x, uint32_t instance, yard_page_claim claim,
                              const yard_page_hash *page, uint32_t n_pages)
{
    assert(instance < x->n_instances);
    for (uint32_t i = 0; i < n_pages; i++) {
        const uint32_t at = find(x, page[i]);

        if (at != NONE)
            take_away(x, at, instance, claim);
    }
}

void yard_prefix_index_clear(yard_prefix_index *x, uint32_t instance)
{
    assert(instance < x->n_instances);
    for (uint32_t at = x->newest; at != NONE;) {
        const uint32_t older = x->entry[at].older;

        set_of(x, at, YARD_PAGE_HELD)[instance / 64] &= ~((uint64_t)1 << instance % 64);
        take_away(x, at, instance, YARD_PAGE_EXPECTED);
        at = older;
    }
}

/* Instances that were alive and do not have the page at depth end there. Returns whether any is
 * left. */
static bool narrow(yard_prefix_index *x, uint32_t at, uint32_t depth, uint32_t *chain)
{
    uint64_t left = 0;

    for (uint32_t w = 0; w < x->n_words; w++) {
        const uint64_t has =
            at == NONE ? 0
                       : set_of(x, at, YARD_PAGE_HELD)[w] | set_of(x, at, YARD_PAGE_EXPECTED)[w];

        for (uint64_t gone = x->alive[w] & ~has; gone; gone &= gone - 1)
            chain[w * 64 + (uint32_t)__builtin_ctzll(gone)] = depth;
        x->alive[w] &= has;
        left |= x->alive[w];
    }
    return left != 0;
}

void yard_prefix_index_match(yard_prefix_index *x, const yard_page_hash *page, uint32_t n_pages,
                             uint32_t *chain)
{
    uint32_t depth = 0;

    memset(x->alive, 0, x->n_words * sizeof(*x->alive));
    for (uint32_t i = 0; i < x->n_instances; i++)
        x->alive[i / 64] |= (uint64_t)1 << i % 64;
    while (depth < n_pages && narrow(x, find(x, page[depth]), depth, chain))
        depth++;
    narrow(x, NONE, depth, chain);
    while (depth-- > 0)
        touch(x, find(x, page[depth]));
}
