/* The prefix index against sets kept by hand under random events, and its bound. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "serve/prefix_index.h"

static yard_page_hash page(uint64_t n)
{
    /* few home slots, so that probing and the closing of gaps are used */
    return (yard_page_hash){ { n % 3, n } };
}

static void fill(yard_page_hash *out, uint64_t from, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = page(from + i);
}

static uint32_t chain_at(yard_prefix_index *x, uint64_t from, uint32_t n, uint32_t instance)
{
    yard_page_hash pages[64];
    uint32_t chain[128];

    fill(pages, from, n);
    yard_prefix_index_match(x, pages, n, chain);
    return chain[instance];
}

static void add(yard_prefix_index *x, uint32_t instance, uint64_t from, uint32_t n)
{
    yard_page_hash pages[64];

    fill(pages, from, n);
    yard_prefix_index_add(x, instance, YARD_PAGE_HELD, pages, n);
}

static void removes(yard_prefix_index *x, uint32_t instance, uint64_t from, uint32_t n)
{
    yard_page_hash pages[64];

    fill(pages, from, n);
    yard_prefix_index_remove(x, instance, YARD_PAGE_HELD, pages, n);
}

static void a_chain_ends_at_the_first_gap(void **state)
{
    yard_prefix_index *x = NULL;

    (void)state;
    assert_int_equal(yard_prefix_index_create(&x, 100, 50, NULL), YARD_OK);
    add(x, 70, 0, 10);
    add(x, 3, 0, 4);
    add(x, 3, 5, 5);
    assert_int_equal(chain_at(x, 0, 10, 70), 10);
    assert_int_equal(chain_at(x, 0, 7, 70), 7);
    assert_int_equal(chain_at(x, 0, 10, 3), 4);
    assert_int_equal(chain_at(x, 0, 10, 99), 0);
    assert_int_equal(chain_at(x, 0, 0, 70), 0);
    removes(x, 70, 2, 1);
    assert_int_equal(chain_at(x, 0, 10, 70), 2);
    assert_int_equal(yard_prefix_index_count(x), 10);
    yard_prefix_index_clear(x, 70);
    assert_int_equal(chain_at(x, 0, 10, 70), 0);
    assert_int_equal(chain_at(x, 0, 10, 3), 4);
    assert_int_equal(yard_prefix_index_count(x), 9);
    yard_prefix_index_destroy(x);
}

/* Held outlives expected and the other way round. */
static void claims_are_apart(void **state)
{
    yard_prefix_index *x = NULL;
    const yard_page_hash p = page(1);

    (void)state;
    assert_int_equal(yard_prefix_index_create(&x, 2, 5, NULL), YARD_OK);
    yard_prefix_index_add(x, 0, YARD_PAGE_EXPECTED, &p, 1);
    assert_int_equal(chain_at(x, 1, 1, 0), 1);
    yard_prefix_index_remove(x, 0, YARD_PAGE_HELD, &p, 1);
    assert_int_equal(chain_at(x, 1, 1, 0), 1);
    yard_prefix_index_add(x, 0, YARD_PAGE_HELD, &p, 1);
    yard_prefix_index_remove(x, 0, YARD_PAGE_EXPECTED, &p, 1);
    assert_int_equal(chain_at(x, 1, 1, 0), 1);
    yard_prefix_index_remove(x, 0, YARD_PAGE_HELD, &p, 1);
    assert_int_equal(chain_at(x, 1, 1, 0), 0);
    assert_int_equal(yard_prefix_index_count(x), 0);
    yard_prefix_index_destroy(x);
}

/* Of a full index the least recently used page goes, and of a chain its end. */
static void the_bound_holds(void **state)
{
    yard_prefix_index *x = NULL;

    (void)state;
    assert_int_equal(yard_prefix_index_create(&x, 2, 10, NULL), YARD_OK);
    add(x, 0, 0, 5);
    add(x, 0, 100, 5);
    assert_int_equal(chain_at(x, 0, 5, 0), 5); /* now the other chain is the older one */
    add(x, 1, 200, 2);
    assert_int_equal(yard_prefix_index_count(x), 10);
    assert_int_equal(chain_at(x, 100, 5, 0), 3);
    assert_int_equal(chain_at(x, 0, 5, 0), 5);
    add(x, 1, 300, 12);
    assert_int_equal(yard_prefix_index_count(x), 10);
    assert_int_equal(chain_at(x, 300, 12, 1), 10);
    assert_int_equal(chain_at(x, 0, 5, 0), 0);
    yard_prefix_index_destroy(x);
}

static void bad_sizes_are_refused(void **state)
{
    yard_prefix_index *x = NULL;
    yard_error err = { 0 };

    (void)state;
    assert_int_equal(yard_prefix_index_create(&x, 0, 10, &err), YARD_EINVAL);
    assert_int_equal(yard_prefix_index_create(&x, 1, 0, &err), YARD_EINVAL);
    assert_int_equal(yard_prefix_index_create(&x, UINT32_MAX, 10, &err), YARD_EINVAL);
    assert_int_equal(yard_prefix_index_create(&x, 1, UINT32_MAX, &err), YARD_EINVAL);
    assert_null(x);
    yard_prefix_index_destroy(NULL);
}

enum { N_INSTANCES = 67, N_PAGES = 40 };

static void random_events(uint32_t seed)
{
    static bool has[N_INSTANCES][2][N_PAGES];
    yard_prefix_index *x = NULL;
    unsigned int random = seed;
    uint32_t n_different = 0;

    memset(has, 0, sizeof(has));
    assert_int_equal(yard_prefix_index_create(&x, N_INSTANCES, N_PAGES, NULL), YARD_OK);
    for (int round = 0; round < 300; round++) {
        const uint32_t at = (uint32_t)rand_r(&random) % N_INSTANCES;
        const uint32_t from = (uint32_t)rand_r(&random) % N_PAGES;
        const uint32_t n = (uint32_t)rand_r(&random) % (N_PAGES - from + 1);
        const yard_page_claim claim = (yard_page_claim)(rand_r(&random) & 1);
        const int what = rand_r(&random) % 20;
        yard_page_hash pages[N_PAGES];
        uint32_t chain[N_INSTANCES];

        fill(pages, from, n);
        if (what < 10)
            yard_prefix_index_add(x, at, claim, pages, n);
        else if (what < 19)
            yard_prefix_index_remove(x, at, claim, pages, n);
        else
            yard_prefix_index_clear(x, at);
        for (uint32_t i = 0; what < 19 && i < n; i++)
            has[at][claim][from + i] = what < 10;
        if (what == 19)
            memset(has[at], 0, sizeof(has[at]));

        yard_prefix_index_match(x, pages, n, chain);
        for (uint32_t i = 0; i < N_INSTANCES; i++) {
            uint32_t depth = 0;

            while (depth < n && (has[i][0][from + depth] || has[i][1][from + depth]))
                depth++;
            if (chain[i] != depth)
                fail_msg("seed %u, round %d: instance %u: want %u pages, found %u", seed, round, i,
                         depth, chain[i]);
        }
    }
    for (uint32_t p = 0; p < N_PAGES; p++) {
        bool any = false;

        for (uint32_t i = 0; i < N_INSTANCES; i++)
            any = any || has[i][0][p] || has[i][1][p];
        n_different += any;
    }
    assert_int_equal(yard_prefix_index_count(x), n_different);
    yard_prefix_index_destroy(x);
}

static void it_agrees_with_sets_kept_by_hand(void **state)
{
    (void)state;
    for (uint32_t seed = 1; seed <= 300; seed++)
        random_events(seed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_chain_ends_at_the_first_gap),
        cmocka_unit_test(claims_are_apart),
        cmocka_unit_test(the_bound_holds),
        cmocka_unit_test(bad_sizes_are_refused),
        cmocka_unit_test(it_agrees_with_sets_kept_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
