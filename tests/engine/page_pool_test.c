/* Random calls on the page pool beside a plain list of what it must hold: who holds a page, which
 * names are there, and which idle page goes first. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "engine/page_pool.h"

enum { N_PAGES = 24, N_NAMES = 40, N_CALLS = 20000, N_SEEDS = 10 };

typedef struct model {
    uint32_t n_holders[N_PAGES];
    int name[N_PAGES];         /* -1: none */
    uint64_t idle_at[N_PAGES]; /* when the last holder left */
    uint64_t now;
    int evicted; /* the name that the pool told; -1: none */
    uint64_t random;
} model;

static yard_page_hash hash_of(int name)
{
    return (
        yard_page_hash){ { (uint64_t)name % 5, (uint64_t)name } }; /* names that share buckets */
}

static uint32_t any(model *m, uint32_t n)
{
    m->random = m->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(m->random >> 33) % n;
}

static int32_t page_of(const model *m, int name)
{
    for (int32_t i = 0; i < N_PAGES; i++)
        if (m->name[i] == name)
            return i;
    return YARD_NO_PAGE;
}

static void note_eviction(void *ctx, yard_page_hash name)
{
    model *m = ctx;

    assert_int_equal(m->evicted, -1);
    m->evicted = (int)name.word[1];
}

static void take(yard_page_pool *p, model *m)
{
    int32_t oldest = YARD_NO_PAGE, page;
    bool any_free = false;

    for (int32_t i = 0; i < N_PAGES; i++) {
        if (m->n_holders[i] > 0)
            continue;
        any_free = any_free || m->name[i] < 0;
        if (m->name[i] >= 0 && (oldest < 0 || m->idle_at[i] < m->idle_at[oldest]))
            oldest = i;
    }
    m->evicted = -1;
    page = yard_page_pool_take(p);
    if (any_free) {
        assert_true(page >= 0 && m->n_holders[page] == 0 && m->name[page] < 0);
        assert_int_equal(m->evicted, -1);
    } else {
        assert_int_equal(page, oldest);
        assert_int_equal(m->evicted, oldest < 0 ? -1 : m->name[oldest]);
    }
    if (page < 0)
        return;
    m->n_holders[page] = 1;
    m->name[page] = -1;
}

static void drop(yard_page_pool *p, model *m, int32_t page)
{
    yard_page_pool_drop(p, page);
    if (--m->n_holders[page] == 0)
        m->idle_at[page] = m->now;
}

static void call(yard_page_pool *p, model *m)
{
    const int32_t page = (int32_t)any(m, N_PAGES);
    const int name = (int)any(m, N_NAMES);

    m->now++;
    switch (any(m, 5)) {
    case 0:
    case 1:
        take(p, m);
        break;
    case 2:
        if (m->n_holders[page] > 0)
            drop(p, m, page);
        break;
    case 3:
        if (page_of(m, name) >= 0) {
            yard_page_pool_hold(p, page_of(m, name));
            m->n_holders[page_of(m, name)]++;
        }
        break;
    default:
        if (m->n_holders[page] > 0 && m->name[page] < 0 &&
            yard_page_pool_name(p, page, hash_of(name), false)) {
            assert_int_equal(page_of(m, name), YARD_NO_PAGE);
            m->name[page] = name;
        }
        break;
    }
}

static void check(const yard_page_pool *p, const model *m)
{
    uint32_t n_available = 0;

    assert_true(yard_page_pool_is_sound(p, m->n_holders));
    for (int i = 0; i < N_PAGES; i++)
        n_available += m->n_holders[i] == 0;
    assert_int_equal(yard_page_pool_available(p), n_available);
    for (int name = 0; name < N_NAMES; name++)
        assert_int_equal(yard_page_pool_find(p, hash_of(name)), page_of(m, name));
}

static void random_calls(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < N_SEEDS; seed++) {
        model m = { .random = seed };
        yard_page_pool p;

        print_message("seed %llu\n", (unsigned long long)seed);
        assert_int_equal(yard_page_pool_open(&p, N_PAGES, NULL), YARD_OK);
        p.evicted = note_eviction;
        p.ctx = &m;
        for (int i = 0; i < N_PAGES; i++)
            m.name[i] = -1;
        for (int i = 0; i < N_CALLS; i++) {
            call(&p, &m);
            check(&p, &m);
        }
        for (int32_t i = 0; i < N_PAGES; i++)
            while (m.n_holders[i] > 0)
                drop(&p, &m, i);
        yard_page_pool_forget(&p);
        assert_int_equal(p.n_free, N_PAGES);
        for (int i = 0; i < N_PAGES; i++)
            m.name[i] = -1;
        check(&p, &m);
        yard_page_pool_close(&p);
    }
}

/* A count that is wrong by one is seen. */
static void unsound_counts_are_seen(void **state)
{
    uint32_t n_holders[N_PAGES] = { 0 };
    yard_page_pool p;

    (void)state;
    assert_int_equal(yard_page_pool_open(&p, N_PAGES, NULL), YARD_OK);
    assert_true(yard_page_pool_is_sound(&p, n_holders));
    n_holders[yard_page_pool_take(&p)] = 1;
    assert_true(yard_page_pool_is_sound(&p, n_holders));
    n_holders[0]++;
    assert_false(yard_page_pool_is_sound(&p, n_holders));
    n_holders[0]--;
    p.n_free--;
    assert_false(yard_page_pool_is_sound(&p, n_holders));
    yard_page_pool_close(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_calls),
        cmocka_unit_test(unsound_counts_are_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
