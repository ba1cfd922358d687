/* The pages of the KV cache: who holds them, and which can be found by name.
 *
 *              take                name                    drop (the last holder)
 *     free -----------> held ---------------> held, named ------------------------> idle
 *      ^                 | drop                     ^                                | |
 *      +-----------------+                          +-------------- hold ------------+ |
 *      +------------- evicted, the longest idle first, when nothing is free -----------+
 *
 * Idle pages count as available. Everything here follows from the calls alone, so ranks that make
 * the same calls have the same pages. Private to the engine room. */
#ifndef YARD_ENGINE_PAGE_POOL_H
#define YARD_ENGINE_PAGE_POOL_H

#include "engine/page_hash.h"

enum { YARD_NO_PAGE = -1 };

typedef struct yard_pool_page {
    yard_page_hash name;
    uint32_t n_holders;
    int32_t next_in_bucket;
    int32_t older, newer; /* while idle */
    bool named;
    bool generated; /* some of its tokens, or of those before it, were not computed as a prompt */
} yard_pool_page;

typedef struct yard_page_pool {
    yard_pool_page *page; /* [n_pages] */
    uint32_t n_pages;
    int32_t *free; /* [n_free] a stack; the lowest page is taken first */
    uint32_t n_free, n_idle;
    int32_t oldest, newest; /* of the idle ones */
    int32_t *bucket;        /* [n_buckets] first page, a power of two */
    uint32_t n_buckets;
    /* A name was lost; may be NULL. */
    void (*evicted)(void *ctx, yard_page_hash name);
    void *ctx;
} yard_page_pool;

yard_status yard_page_pool_open(yard_page_pool *pool, uint32_t n_pages, yard_error *err);
void yard_page_pool_close(yard_page_pool *pool);

/* Pages that can be taken. */
static inline uint32_t yard_page_pool_available(const yard_page_pool *pool)
{
    return pool->n_free + pool->n_idle;
}

/* A page of unknown content with one holder; YARD_NO_PAGE when none is available. */
int32_t yard_page_pool_take(yard_page_pool *pool);

/* One holder more, of a page that has some or is idle; one less. */
void yard_page_pool_hold(yard_page_pool *pool, int32_t page);
void yard_page_pool_drop(yard_page_pool *pool, int32_t page);

/* Makes a held page one that can be found. False: another page has the name already, and keeps it.
 */
bool yard_page_pool_name(yard_page_pool *pool, int32_t page, yard_page_hash name, bool generated);

/* YARD_NO_PAGE: there is none. */
int32_t yard_page_pool_find(const yard_page_pool *pool, yard_page_hash name);

/* Contents are void: no page has a name any more, idle ones are free. Nobody is told. */
void yard_page_pool_forget(yard_page_pool *pool);

/* True when lists, names and counts agree, and page p has exactly n_holders[p] holders. */
bool yard_page_pool_is_sound(const yard_page_pool *pool, const uint32_t *n_holders);

#endif
