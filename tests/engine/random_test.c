/* Requests with common beginnings come, are aborted, run out of pages and end, in an order that a
 * seed chooses: after every step the accounts of pages hold and the page events told are the pages
 * named; every answer is, to the bit, that of the request alone, or its beginning.
 * YARD_TEST_SEEDS sets how many. */
#include "service.h"

enum { N_KINDS = 8, N_LIVE = 12, N_STEPS = 60, N_SEEDS = 6, MAX_PAGES = 64 };

static service_request kinds[N_KINDS];

typedef struct run {
    yard_engine *engine;
    uint64_t random;
    service_request live[N_LIVE], *all[N_LIVE]; /* id 0: none */
    yard_page_hash told[MAX_PAGES];
    uint32_t n_told;
} run;

static uint32_t any(run *t, uint32_t n)
{
    t->random = t->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(t->random >> 33) % n;
}

static void make_kinds(void)
{
    service_request *some[N_KINDS];

    for (uint32_t i = 0; i < N_KINDS; i++) {
        kinds[i] = service_request_of(i % 3, 60 * (i % 3), 50 + i, 10 + 23 * i % 90, 10 + 9 * i);
        kinds[i].temperature = i % 2 ? 1.0f : 0.0f;
        kinds[i].n_choices = i % 4 == 3 ? 3 : 1;
        kinds[i].prompt_logprobs = i % 4 == 2;
        some[i] = &kinds[i];
    }
    service_answer_alone(some, N_KINDS);
}

static void submit(run *t)
{
    service_request *r = &t->live[any(t, N_LIVE)];

    if (r->id && !service_has_ended(r))
        return;
    *r = kinds[any(t, N_KINDS)];
    service_submit(t->engine, r);
}

static void abort_some(run *t)
{
    service_request *r = &t->live[any(t, N_LIVE)];
    const uint32_t choice = any(t, 2) ? any(t, SERVICE_MAX_CHOICES) : YARD_ALL_CHOICES;
    bool found = false;

    if (!r->id)
        return;
    for (uint32_t c = 0; c < r->n_choices; c++)
        if ((choice == c || choice == YARD_ALL_CHOICES) && r->answer[c].finish == YARD_RUNNING &&
            !r->aborted[c])
            found = r->aborted[c] = true;
    assert_int_equal(yard_engine_abort(t->engine, r->id, choice), found ? YARD_OK : YARD_EINVAL);
}

static int find_told(const run *t, yard_page_hash page)
{
    for (uint32_t i = 0; i < t->n_told; i++)
        if (yard_page_hash_equal(t->told[i], page))
            return (int)i;
    return -1;
}

static void follow_pages(run *t)
{
    const yard_page_pool *pool = &t->engine->pool;
    yard_page_event e;
    uint32_t n_named = 0;

    while (yard_engine_poll_pages(t->engine, &e, 1)) {
        const int at = find_told(t, e.page);

        if (e.change == YARD_PAGES_UNKNOWN) {
            t->n_told = 0;
        } else if (e.change == YARD_PAGE_ADDED) {
            assert_true(at < 0 && t->n_told < MAX_PAGES);
            t->told[t->n_told++] = e.page;
        } else {
            assert_true(at >= 0);
            t->told[at] = t->told[--t->n_told];
        }
    }
    for (uint32_t i = 0; i < pool->n_pages; i++) {
        n_named += pool->page[i].named;
        assert_true(!pool->page[i].named || find_told(t, pool->page[i].name) >= 0);
    }
    assert_int_equal(n_named, t->n_told);
}

static void check_ended(run *t)
{
    for (uint32_t i = 0; i < N_LIVE; i++)
        if (t->live[i].id && service_has_ended(&t->live[i])) {
            service_compare(&t->live[i]);
            t->live[i].id = 0;
        }
}

static void step(run *t)
{
    service_step(t->engine, t->all, N_LIVE);
    check_ended(t);
    if (any(t, 50) == 0)
        yard_engine_pages_anew(t->engine);
    if (any(t, 4) == 0)
        follow_pages(t);
}

static bool is_idle(const run *t)
{
    for (uint32_t i = 0; i < N_LIVE; i++)
        if (t->live[i].id)
            return false;
    return true;
}

static uint64_t one_run(uint64_t seed)
{
    static run t;
    yard_engine_config config;
    uint64_t n_preemptions;

    t = (run){ .random = seed * 0x9e3779b97f4a7c15u + 1 };
    for (uint32_t i = 0; i < N_LIVE; i++)
        t.all[i] = &t.live[i];
    config = service_config(seed % 4 == 3 ? YARD_CACHE_OFF : YARD_CACHE_STRICT);
    config.max_seqs = 3 + any(&t, 6);
    config.max_tokens = 20 + any(&t, 100);
    config.prefill_budget = 1 + any(&t, 60);
    config.kv_tokens = 320 + 64 * any(&t, 4);
    t.engine = golden_engine(config);
    for (int i = 0; i < N_STEPS; i++) {
        for (uint32_t n = any(&t, 4); n > 1; n--)
            submit(&t);
        if (any(&t, 8) == 0)
            abort_some(&t);
        step(&t);
    }
    while (!is_idle(&t))
        step(&t);
    follow_pages(&t);
    service_all_is_free(t.engine);
    n_preemptions = service_stats(t.engine).n_preemptions;
    yard_engine_destroy(t.engine);
    return n_preemptions;
}

static void any_order_gives_the_same_answers(void **state)
{
    const char *text = getenv("YARD_TEST_SEEDS");
    const uint64_t n = text ? (uint64_t)atoll(text) : N_SEEDS;
    uint64_t n_preemptions = 0;

    (void)state;
    make_kinds();
    for (uint64_t seed = 0; seed < n; seed++) {
        print_message("seed %llu\n", (unsigned long long)seed);
        n_preemptions += one_run(seed);
    }
    print_message("%llu preemptions\n", (unsigned long long)n_preemptions);
    assert_true(n_preemptions > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_order_gives_the_same_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
