/* Every backend and transport must pass this: random cases against the plain definition, ranks as
 * real processes. YARD_TEST_TRANSPORT picks a transport (default shm). ctest: sanitize */
#include "fabric/fabric_test.h"

#include "ep/ep_case.h"

static const char *transport(void)
{
    const char *name = getenv("YARD_TEST_TRANSPORT");

    return name ? name : "shm";
}

struct suite {
    uint64_t first_seed;
    uint32_t n_seeds, max_hidden;
    void (*change)(ep_case *c);
};

/* Groups of one process follow each other: each meets at a place of its own. */
static yard_ep *open_group(const yard_fabric_config *base, ep_case *c, yard_fabric_config *fabric,
                           char *meet, size_t n_bytes)
{
    yard_ep *ep = NULL;
    yard_error err = { 0 };

    *fabric = *base;
    snprintf(meet, n_bytes, "%s-%llu", base->rendezvous, (unsigned long long)c->seed);
    fabric->rendezvous = meet;
    fabric->transport = transport();
    fabric->force_network = strcmp(transport(), "shm") != 0;
    c->config.fabric_config = fabric;
    c->config.timeout_us = base->timeout_us;
    if (yard_ep_create(&ep, &c->config, &err) != YARD_OK) {
        fprintf(stderr, "rank %u: %s: %s\n", base->rank, err.message, case_describe(c));
        _exit(1);
    }
    return ep;
}

/* Rows that this rank must send: one per token and other rank (dispatch), per token and expert or
 * rank elsewhere (combine), per owned token and sibling (output). */
static void check_counts(const case_rank *r)
{
    const yard_ep_config *g = &r->c->config;
    uint64_t n_dispatch = 0, n_output = 0;
    yard_ep_stats stats;

    for (uint32_t step = 0; step < r->c->n_steps; step++)
        for (uint32_t t = r->rank % g->tp; t < case_tokens(r->c, step, r->group); t += g->tp) {
            int32_t expert[32];
            float weight[32];
            uint64_t seen = 0; /* by rank; tests have at most 64 where this is called */

            case_routing(r->c, step, r->group, t, expert, weight);
            for (uint32_t k = 0; k < g->top_k; k++)
                if (expert[k] >= 0)
                    seen |= 1ull << (uint32_t)expert[k] / r->n_local;
            n_dispatch += (uint64_t)__builtin_popcountll(seen & ~(1ull << r->rank));
            n_output += g->tp - 1;
        }
    yard_ep_get_stats(r->ep, &stats);
    CHECK(stats.n_dispatch_rows_sent + stats.n_rows_in_place == n_dispatch);
    CHECK(!strcmp(transport(), "shm") && !case_in_place(r->c) ? stats.n_dispatch_rows_sent == 0
                                                              : stats.n_rows_in_place == 0);
    CHECK(stats.n_output_rows_sent == n_output);
}

static void run_suite(const yard_fabric_config *config, void *ctx)
{
    const struct suite *suite = ctx;

    for (uint32_t i = 0; i < suite->n_seeds; i++) {
        ep_case c = case_from_seed(suite->first_seed + i, config->n_ranks, suite->max_hidden);
        yard_fabric_config fabric;
        char meet[128];
        case_rank r;
        yard_ep *ep;

        if (suite->change)
            suite->change(&c);
        ep = open_group(config, &c, &fabric, meet, sizeof(meet));
        case_open(&r, &c, ep);
        if (!case_run(&r)) {
            fprintf(stderr, "%s: %s\n", r.failure, case_describe(&c));
            _exit(1);
        }
        if (config->n_ranks <= 64)
            check_counts(&r);
        case_close(&r);
        yard_ep_destroy(ep);
    }
}

static void random_cases(void **state)
{
    static const uint32_t n_ranks[] = { 1, 2, 3, 4, 6, 8 };

    (void)state;
    for (size_t i = 0; i < sizeof(n_ranks) / sizeof(n_ranks[0]); i++) {
        struct suite suite = { .first_seed = 1000 * i, .n_seeds = 12, .max_hidden = 300 };
        test_run(n_ranks[i], run_suite, &suite);
    }
}

static void widest_rows(ep_case *c)
{
    c->config.hidden = 7168;
    c->config.top_k = 8;
    c->config.n_experts = 32;
    c->config.max_tokens = 20;
    c->n_steps = 2;
}

static void model_sized_rows(void **state)
{
    struct suite suite = {
        .first_seed = 9000, .n_seeds = 4, .max_hidden = 8, .change = widest_rows
    };

    (void)state;
    test_run(2, run_suite, &suite);
    test_run(4, run_suite, &suite);
}

static void small_rows(ep_case *c)
{
    c->config.hidden = 16;
    c->config.n_experts = c->n_ranks;
    c->config.top_k = 4;
    c->config.max_tokens = 2;
    c->config.tp = 1;
    c->config.n_rounds = 1;
    c->n_steps = 2;
}

/* More ranks than cores by far. */
static void many_ranks(void **state)
{
    struct suite suite = {
        .first_seed = 9900, .n_seeds = 1, .max_hidden = 8, .change = small_rows
    };

    (void)state;
    test_run(32, run_suite, &suite);
    if (!strcmp(transport(), "shm"))
        test_run(128, run_suite, &suite);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_cases),
        cmocka_unit_test(model_sized_rows),
        cmocka_unit_test(many_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
