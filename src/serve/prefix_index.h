/* Which instance holds which cache pages, as far as the front knows: a bounded mirror of what
 * engines announce. It answers one question, how long a prefix of a prompt each instance holds.
 * Private to the serve room, but for scheduler.c's callers who never see it.
 *
 * A page of an instance is *held* (the engine announced it) or *expected* (a request sent there
 * will write it: a hint, so that requests of one burst meet where their common prefix is being
 * computed). Nothing here is a promise: an engine that no longer has a page computes it again.
 *
 * Beyond max_pages different pages the least recently used is forgotten. Memory is taken once. One
 * caller at a time. */
#ifndef YARD_SERVE_PREFIX_INDEX_H
#define YARD_SERVE_PREFIX_INDEX_H

#include "engine/engine.h"

typedef struct yard_prefix_index yard_prefix_index;

/* n_instances, max_pages >= 1. Errors: YARD_EINVAL, YARD_ENOMEM. */
yard_status yard_prefix_index_create(yard_prefix_index **out, uint32_t n_instances,
                                     uint32_t max_pages, yard_error *err);
void yard_prefix_index_destroy(yard_prefix_index *index); /* NULL is fine */

typedef enum yard_page_claim { YARD_PAGE_HELD, YARD_PAGE_EXPECTED } yard_page_claim;

/* The instance has (will have) these pages; it has them no longer. Pages of one chain are given
 * first to last. Twice is once; what is not there is no error. */
void yard_prefix_index_add(yard_prefix_index *index, uint32_t instance, yard_page_claim claim,
                           const yard_page_hash *page, uint32_t n_pages);
void yard_prefix_index_remove(yard_prefix_index *index, uint32_t instance, yard_page_claim claim,
                              const yard_page_hash *page, uint32_t n_pages);
/* The instance has no page at all. Looks at every page of the index. */
void yard_prefix_index_clear(yard_prefix_index *index, uint32_t instance);

/* chain[i] [n_instances]: how many of the pages, from the first on without a gap, instance i holds
 * or is expected to. The pages that count become the most recently used. */
void yard_prefix_index_match(yard_prefix_index *index, const yard_page_hash *page, uint32_t n_pages,
                             uint32_t *chain);

uint32_t yard_prefix_index_count(const yard_prefix_index *index); /* different pages */

#endif
