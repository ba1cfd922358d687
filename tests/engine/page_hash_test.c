/* Page hashes against values computed by Python's hashlib from the definition in page_hash.h, and
 * what they must tell apart. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "engine/engine.h"

enum { N_IDS = 3 * YARD_PAGE_TOKENS + 5 };

static void fill(int32_t ids[N_IDS])
{
    for (int32_t i = 0; i < N_IDS; i++)
        ids[i] = i * 7919 % 100000;
}

/* hex: the 16 bytes in order */
static void assert_hash(yard_page_hash hash, const char *hex)
{
    char text[33];

    for (int i = 0; i < 16; i++)
        snprintf(text + 2 * i, 3, "%02x", (unsigned)(hash.word[i / 8] >> 8 * (i % 8) & 0xff));
    assert_string_equal(text, hex);
}

static void hashes_are_those_of_the_definition(void **state)
{
    const yard_page_hash root = yard_page_hash_root("demo", 4, "salt", 4);
    int32_t ids[N_IDS];
    yard_page_hash page[4];

    (void)state;
    fill(ids);
    assert_hash(root, "e575556811c9a56d95749072cb57a59e");
    assert_hash(yard_page_hash_root("", 0, NULL, 0), "adfdc2c60f8b5c27dd48730ba2c525a4");
    assert_int_equal(yard_page_hash_chain(root, ids, N_IDS, page), 3);
    assert_hash(page[0], "e93b05cef3e6eee0560169c55347f91f");
    assert_hash(page[1], "c70df8a1a055f47a730afc0271fa892a");
    assert_hash(page[2], "4b4e1bfff88a626db5243d9b59fdbdca");
    for (uint32_t i = 0; i < YARD_PAGE_TOKENS; i++)
        ids[i] = -1;
    assert_hash(yard_page_hash_next(root, ids), "7d9ff0db8c0ff369f255c0b83377ac69");
}

static void a_part_of_a_page_has_no_hash(void **state)
{
    const yard_page_hash root = yard_page_hash_root("demo", 4, "", 0);
    int32_t ids[N_IDS];
    yard_page_hash page[3];

    (void)state;
    fill(ids);
    assert_int_equal(yard_page_hash_chain(root, ids, 0, page), 0);
    assert_int_equal(yard_page_hash_chain(root, ids, YARD_PAGE_TOKENS - 1, page), 0);
    assert_int_equal(yard_page_hash_chain(root, ids, YARD_PAGE_TOKENS, page), 1);
}

/* Where the identity ends and the salt begins counts, and so does every token before the page. */
static void different_prefixes_have_different_hashes(void **state)
{
    const yard_page_hash a = yard_page_hash_root("demo", 4, "salt", 4),
                         b = yard_page_hash_root("demos", 5, "alt", 3);
    int32_t ids[N_IDS];
    yard_page_hash first[3], second[3];

    (void)state;
    assert_false(yard_page_hash_equal(a, b));
    fill(ids);
    yard_page_hash_chain(a, ids, N_IDS, first);
    yard_page_hash_chain(b, ids, N_IDS, second);
    for (int i = 0; i < 3; i++)
        assert_false(yard_page_hash_equal(first[i], second[i]));
    ids[YARD_PAGE_TOKENS] ^= 1 << 20; /* the first token of the second page */
    yard_page_hash_chain(a, ids, N_IDS, second);
    assert_true(yard_page_hash_equal(first[0], second[0]));
    assert_false(yard_page_hash_equal(first[1], second[1]));
    assert_false(yard_page_hash_equal(first[2], second[2]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hashes_are_those_of_the_definition),
        cmocka_unit_test(a_part_of_a_page_has_no_hash),
        cmocka_unit_test(different_prefixes_have_different_hashes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
