#include <stdlib.h>

#include "model/tokenizer_impl.h"

static const uint64_t NO_KEY = UINT64_MAX; /* ids and nodes stay below 2^31 */

/* The finaliser of MurmurHash3: every input bit reaches every output bit. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdu;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 33;
}

void yard_pair_map_free(yard_pair_map *map)
{
    free(map->entries);
    *map = (yard_pair_map){ 0 };
}

static yard_pair_entry *pair_slot(const yard_pair_map *map, uint64_t key)
{
    size_t i = mix(key) & (map->n_slots - 1);

    while (map->entries[i].key != key && map->entries[i].key != NO_KEY)
        i = (i + 1) & (map->n_slots - 1);
    return &map->entries[i];
}

static bool pair_map_grow(yard_pair_map *map)
{
    yard_pair_map larger = { .n_slots = map->n_slots ? map->n_slots * 2 : 16,
                             .n_used = map->n_used };

    larger.entries = malloc(larger.n_slots * sizeof(*larger.entries));
    if (!larger.entries)
        return false;
    for (size_t i = 0; i < larger.n_slots; i++)
        larger.entries[i].key = NO_KEY;
    for (size_t i = 0; i < map->n_slots; i++)
        if (map->entries[i].key != NO_KEY)
            *pair_slot(&larger, map->entries[i].key) = map->entries[i];
    free(map->entries);
    *map = larger;
    return true;
}

bool yard_pair_map_put(yard_pair_map *map, uint32_t first, uint32_t second, uint64_t value)
{
    const uint64_t key = (uint64_t)first << 32 | second;
    yard_pair_entry *entry;

    if (map->n_used >= map->n_slots / 2 && !pair_map_grow(map))
        return false;
    entry = pair_slot(map, key);
    if (entry->key == NO_KEY)
        map->n_used++;
    *entry = (yard_pair_entry){ key, value };
    return true;
}

bool yard_pair_map_get(const yard_pair_map *map, uint32_t first, uint32_t second, uint64_t *value)
{
    const yard_pair_entry *entry;

    if (map->n_used == 0)
        return false;
    entry = pair_slot(map, (uint64_t)first << 32 | second);
    if (entry->key == NO_KEY)
        return false;
    *value = entry->value;
    return true;
}

void yard_bytes_map_free(yard_bytes_map *map)
{
    free(map->entries);
    *map = (yard_bytes_map){ 0 };
}

bool yard_bytes_map_create(yard_bytes_map *map, size_t max_entries)
{
    size_t n_slots = 16;

    while (n_slots / 2 < max_entries)
        n_slots *= 2;
    map->entries = calloc(n_slots, sizeof(*map->entries));
    map->n_slots = n_slots;
    return map->entries != NULL;
}

static yard_bytes_entry *bytes_slot(const yard_bytes_map *map, const char *bytes, size_t n_bytes)
{
    uint64_t hash = 0xcbf29ce484222325u; /* FNV-1a */
    size_t i;

    for (size_t k = 0; k < n_bytes; k++)
        hash = (hash ^ (unsigned char)bytes[k]) * 0x100000001b3u;
    for (i = mix(hash) & (map->n_slots - 1); map->entries[i].bytes;
         i = (i + 1) & (map->n_slots - 1))
        if (map->entries[i].n_bytes == n_bytes && !memcmp(map->entries[i].bytes, bytes, n_bytes))
            break;
    return &map->entries[i];
}

bool yard_bytes_map_add(yard_bytes_map *map, const char *bytes, uint32_t n_bytes, int32_t id)
{
    yard_bytes_entry *entry = bytes_slot(map, bytes, n_bytes);

    if (entry->bytes)
        return false;
    *entry = (yard_bytes_entry){ bytes, n_bytes, id };
    return true;
}

int32_t yard_bytes_map_find(const yard_bytes_map *map, const char *bytes, size_t n_bytes)
{
    const yard_bytes_entry *entry;

    if (map->n_slots == 0)
        return -1;
    entry = bytes_slot(map, bytes, n_bytes);
    return entry->bytes ? entry->id : -1;
}

void yard_trie_free(yard_trie *trie)
{
    yard_pair_map_free(&trie->next);
    free(trie->string_idx);
    *trie = (yard_trie){ 0 };
}

static bool trie_node(yard_trie *trie, uint32_t *node)
{
    if (trie->n_nodes == trie->max_nodes) {
        const uint32_t max_nodes = trie->max_nodes ? trie->max_nodes * 2 : 16;
        int32_t *larger = realloc(trie->string_idx, max_nodes * sizeof(*larger));
        if (!larger)
            return false;
        trie->string_idx = larger;
        trie->max_nodes = max_nodes;
    }
    trie->string_idx[trie->n_nodes] = -1;
    *node = trie->n_nodes++;
    return true;
}

bool yard_trie_add(yard_trie *trie, const char *bytes, size_t n_bytes, int32_t string_idx)
{
    uint32_t node = 0;
    uint64_t next;

    if (trie->n_nodes == 0 && !trie_node(trie, &node))
        return false;
    for (size_t i = 0; i < n_bytes; i++) {
        const unsigned char byte = (unsigned char)bytes[i];
        if (!yard_pair_map_get(&trie->next, node, byte, &next)) {
            uint32_t made;
            if (!trie_node(trie, &made) || !yard_pair_map_put(&trie->next, node, byte, made))
                return false;
            next = made;
        }
        node = (uint32_t)next;
    }
    if (n_bytes > 0)
        trie->starts[(unsigned char)bytes[0]] = true;
    trie->string_idx[node] = string_idx;
    return true;
}

int32_t yard_trie_match(const yard_trie *trie, const char *text, size_t n_bytes, size_t *n_matched)
{
    int32_t found = -1;
    uint32_t node = 0;
    uint64_t next;

    if (n_bytes == 0 || !trie->starts[(unsigned char)text[0]])
        return -1;
    for (size_t i = 0; i < n_bytes; i++) {
        if (!yard_pair_map_get(&trie->next, node, (unsigned char)text[i], &next))
            break;
        node = (uint32_t)next;
        if (trie->string_idx[node] >= 0) {
            found = trie->string_idx[node];
            *n_matched = i + 1;
        }
    }
    return found;
}

size_t yard_utf8_step(const char *text, size_t n_bytes, bool *good, bool *incomplete)
{
    const unsigned char *bytes = (const unsigned char *)text;
    const unsigned char lead = bytes[0];
    /* of the second byte: no overlong forms, no surrogates, nothing above U+10FFFF */
    const unsigned char low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const unsigned char high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    size_t want, n = 1;

    *good = lead < 0x80;
    *incomplete = false;
    if (lead < 0xc2 || lead > 0xf4)
        return 1;
    want = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
    while (n < want && n < n_bytes &&
           (n == 1 ? bytes[n] >= low && bytes[n] <= high : (bytes[n] & 0xc0) == 0x80))
        n++;
    *good = n == want;
    *incomplete = n < want && n == n_bytes;
    return n;
}
