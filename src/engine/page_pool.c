#include "engine/page_pool.h"

#include <assert.h>
#include <stdlib.h>

yard_status yard_page_pool_open(yard_page_pool *p, uint32_t n_pages, yard_error *err)
{
    *p = (yard_page_pool){ .n_pages = n_pages, .n_buckets = 1 };
    while (p->n_buckets < n_pages)
        p->n_buckets *= 2;
    p->page = calloc(n_pages, sizeof(*p->page));
    p->free = calloc(n_pages, sizeof(*p->free));
    p->bucket = calloc(p->n_buckets, sizeof(*p->bucket));
    if (!p->page || !p->free || !p->bucket) {
        yard_page_pool_close(p);
        return yard_fail(err, YARD_ENOMEM, "engine: %u pages", n_pages);
    }
    for (uint32_t i = 0; i < n_pages; i++)
        p->free[p->n_free++] = (int32_t)(n_pages - 1 - i);
    for (uint32_t i = 0; i < p->n_buckets; i++)
        p->bucket[i] = YARD_NO_PAGE;
    p->oldest = p->newest = YARD_NO_PAGE;
    return YARD_OK;
}

void yard_page_pool_close(yard_page_pool *p)
{
    free(p->page);
    free(p->free);
    free(p->bucket);
    *p = (yard_page_pool){ 0 };
}

static int32_t *bucket_of(const yard_page_pool *p, yard_page_hash name)
{
    return &p->bucket[name.word[0] & (p->n_buckets - 1)];
}

int32_t yard_page_pool_find(const yard_page_pool *p, yard_page_hash name)
{
    int32_t at = *bucket_of(p, name);

    while (at != YARD_NO_PAGE && !yard_page_hash_equal(p->page[at].name, name))
        at = p->page[at].next_in_bucket;
    return at;
}

bool yard_page_pool_name(yard_page_pool *p, int32_t page, yard_page_hash name, bool generated)
{
    int32_t *bucket = bucket_of(p, name);

    assert(p->page[page].n_holders > 0 && !p->page[page].named);
    if (yard_page_pool_find(p, name) != YARD_NO_PAGE)
        return false;
    p->page[page].name = name;
    p->page[page].named = true;
    p->page[page].generated = generated;
    p->page[page].next_in_bucket = *bucket;
    *bucket = page;
    return true;
}

static void unname(yard_page_pool *p, int32_t page)
{
    int32_t *at = bucket_of(p, p->page[page].name);

    while (*at != page)
        at = &p->page[*at].next_in_bucket;
    *at = p->page[page].next_in_bucket;
    p->page[page].named = p->page[page].generated = false;
}

static void add_newest(yard_page_pool *p, int32_t page)
{
    p->page[page].older = p->newest;
    p->page[page].newer = YARD_NO_PAGE;
    if (p->newest == YARD_NO_PAGE)
        p->oldest = page;
    else
        p->page[p->newest].newer = page;
    p->newest = page;
    p->n_idle++;
}

static void take_out(yard_page_pool *p, int32_t page)
{
    const yard_pool_page *x = &p->page[page];

    if (x->older == YARD_NO_PAGE)
        p->oldest = x->newer;
    else
        p->page[x->older].newer = x->newer;
    if (x->newer == YARD_NO_PAGE)
        p->newest = x->older;
    else
        p->page[x->newer].older = x->older;
    p->n_idle--;
}

int32_t yard_page_pool_take(yard_page_pool *p)
{
    int32_t page;

    if (p->n_free > 0) {
        page = p->free[--p->n_free];
    } else if (p->n_idle > 0) {
        page = p->oldest;
        take_out(p, page);
        unname(p, page);
        if (p->evicted)
            p->evicted(p->ctx, p->page[page].name);
    } else {
        return YARD_NO_PAGE;
    }
    p->page[page].n_holders = 1;
    return page;
}

void yard_page_pool_hold(yard_page_pool *p, int32_t page)
{
    assert(p->page[page].n_holders > 0 || p->page[page].named);
    if (p->page[page].n_holders++ == 0)
        take_out(p, page);
}

void yard_page_pool_drop(yard_page_pool *p, int32_t page)
{
    assert(p->page[page].n_holders > 0);
    if (--p->page[page].n_holders > 0)
        return;
    if (p->page[page].named)
        add_newest(p, page);
    else
        p->free[p->n_free++] = page;
}

void yard_page_pool_forget(yard_page_pool *p)
{
    while (p->newest != YARD_NO_PAGE) {
        const int32_t page = p->newest;
        take_out(p, page);
        p->free[p->n_free++] = page;
    }
    for (uint32_t i = 0; i < p->n_pages; i++)
        p->page[i].named = p->page[i].generated = false;
    for (uint32_t i = 0; i < p->n_buckets; i++)
        p->bucket[i] = YARD_NO_PAGE;
}

bool yard_page_pool_is_sound(const yard_page_pool *p, const uint32_t *n_holders)
{
    uint32_t n_held = 0, n_idle = 0, n_found = 0, n_named = 0;

    for (uint32_t i = 0; i < p->n_pages; i++) {
        const yard_pool_page *x = &p->page[i];

        if (x->n_holders != n_holders[i])
            return false;
        n_held += x->n_holders > 0;
        n_named += x->named;
        n_found += x->named && yard_page_pool_find(p, x->name) == (int32_t)i;
    }
    for (int32_t at = p->oldest; at != YARD_NO_PAGE; at = p->page[at].newer, n_idle++)
        if (n_idle == p->n_pages || p->page[at].n_holders > 0 || !p->page[at].named)
            return false;
    for (uint32_t i = 0; i < p->n_free; i++)
        if (p->page[p->free[i]].n_holders > 0 || p->page[p->free[i]].named)
            return false;
    return n_idle == p->n_idle && n_found == n_named && n_held + n_idle + p->n_free == p->n_pages;
}
