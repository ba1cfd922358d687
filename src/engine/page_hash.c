#include "engine/page_hash.h"

#include <sha2.h>

#include "model/model.h"

static void put_le(uint8_t *out, uint64_t value, uint32_t n_bytes)
{
    for (uint32_t i = 0; i < n_bytes; i++)
        out[i] = (uint8_t)(value >> 8 * i);
}

static void add_u64(SHA2_CTX *sha, uint64_t value)
{
    uint8_t bytes[8];

    put_le(bytes, value, 8);
    SHA256Update(sha, bytes, sizeof(bytes));
}

static yard_page_hash finish(SHA2_CTX *sha)
{
    uint8_t digest[SHA256_DIGEST_LENGTH];
    yard_page_hash hash = { { 0 } };

    SHA256Final(digest, sha);
    for (uint32_t i = 0; i < 16; i++)
        hash.word[i / 8] |= (uint64_t)digest[i] << 8 * (i % 8);
    return hash;
}

yard_page_hash yard_page_hash_root(const char *identity, size_t n_identity, const char *salt,
                                   size_t n_salt)
{
    SHA2_CTX sha;

    SHA256Init(&sha);
    SHA256Update(&sha, (const uint8_t *)"yardroot", 8);
    add_u64(&sha, n_identity);
    SHA256Update(&sha, (const uint8_t *)identity, n_identity);
    add_u64(&sha, n_salt);
    SHA256Update(&sha, (const uint8_t *)salt, n_salt);
    return finish(&sha);
}

yard_page_hash yard_page_hash_next(yard_page_hash parent, const int32_t *token)
{
    uint8_t ids[4 * YARD_PAGE_TOKENS];
    SHA2_CTX sha;

    for (uint32_t i = 0; i < YARD_PAGE_TOKENS; i++)
        put_le(ids + 4 * i, (uint32_t)token[i], 4);
    SHA256Init(&sha);
    SHA256Update(&sha, (const uint8_t *)"yardpage", 8);
    add_u64(&sha, parent.word[0]);
    add_u64(&sha, parent.word[1]);
    SHA256Update(&sha, ids, sizeof(ids));
    return finish(&sha);
}

uint32_t yard_page_hash_chain(yard_page_hash root, const int32_t *ids, uint32_t n_ids,
                              yard_page_hash *hash)
{
    const uint32_t n_pages = n_ids / YARD_PAGE_TOKENS;

    for (uint32_t i = 0; i < n_pages; i++) {
        root = yard_page_hash_next(root, ids + (size_t)i * YARD_PAGE_TOKENS);
        hash[i] = root;
    }
    return n_pages;
}
