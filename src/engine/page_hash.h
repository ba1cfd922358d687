/* Names of full KV cache pages by content: what the engine's prefix cache looks up, what it tells
 * the scheduler, and what the front computes from a prompt. Each hash covers everything before its
 * page too, so equal hashes mean equal prefixes:
 *
 *     root    = H("yardroot", n_identity, identity, n_salt, salt)
 *     page[0] = H("yardpage", root,      64 token ids)
 *     page[i] = H("yardpage", page[i-1], 64 token ids)
 *
 * H is SHA-256 cut to 16 bytes; numbers are little-endian, lengths 64 bits, ids 32. Two pages with
 * one hash would give somebody the cache of another's prompt, so this is no place for a 64-bit or
 * an unkeyed fast hash: by chance, 2^40 pages collide with probability 2^-49 (64 bits: surely), and
 * who wants to foist a page on a known prompt has 2^128 / pages tries to make. 1.2 us a page. */
#ifndef YARD_ENGINE_PAGE_HASH_H
#define YARD_ENGINE_PAGE_HASH_H

#include "base/base.h"

typedef struct yard_page_hash {
    uint64_t word[2]; /* the 16 bytes, little-endian */
} yard_page_hash;

static inline bool yard_page_hash_equal(yard_page_hash a, yard_page_hash b)
{
    return a.word[0] == b.word[0] && a.word[1] == b.word[1];
}

/* The parent of first pages.
 *   identity  everything that changes cached bits: model and revision, numeric mode, page format
 *   salt      keeps users apart who must not share (or notice) each other's pages; may be empty */
yard_page_hash yard_page_hash_root(const char *identity, size_t n_identity, const char *salt,
                                   size_t n_salt);

/* The page that follows parent. token: [YARD_PAGE_TOKENS]. */
yard_page_hash yard_page_hash_next(yard_page_hash parent, const int32_t *token);

/* All full pages of a prompt: hash[i] for i < n_ids / YARD_PAGE_TOKENS, which is returned. */
uint32_t yard_page_hash_chain(yard_page_hash root, const int32_t *ids, uint32_t n_ids,
                              yard_page_hash *hash);

#endif
