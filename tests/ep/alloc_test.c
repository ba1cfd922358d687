/* Each allocation of one rank fails in turn, while a group of two starts, works and ends: an error
 * or success on both ranks, never a crash and never a wait without end. */
#include "fabric/fabric_test.h"
#include "failing_alloc.h"

#include "ep/ep_case.h"

#if FAILING_ALLOC

enum { NOT_REACHED = 3 }; /* exit code: the run had fewer allocations */

static void run_rank(const yard_fabric_config *config, void *ctx)
{
    ep_case c = case_from_seed(11, config->n_ranks, 64);
    yard_fabric_config fabric = *config;
    yard_error err = { 0 };
    yard_ep *ep = NULL;
    case_rank r;
    yard_status st;

    c.config.tp = 1;
    c.config.n_experts = 4;
    c.config.top_k = 2;
    fabric.start_timeout_us = 1000000;
    c.config.fabric_config = &fabric;
    c.config.timeout_us = 2000000;
    fail_at = *(const long *)ctx;
    counting = config->rank == 1;
    st = yard_ep_create(&ep, &c.config, &err);
    counting = false;
    CHECK(st == err.status);
    if (st != YARD_OK) {
        CHECK(ep == NULL);
        CHECK(err.message[0] != '\0');
        _exit(0);
    }
    case_open(&r, &c, ep);
    if (!case_run(&r)) /* the other rank gave up */
        CHECK(yard_ep_poll(ep) != YARD_OK);
    case_close(&r);
    yard_ep_destroy(ep);
    _exit(config->rank == 1 && n_blocks < fail_at ? NOT_REACHED : 0);
}

static void every_allocation_of_a_rank_may_fail(void **state)
{
    long number = 1;
    int rc = 0;

    (void)state;
    for (; rc != NOT_REACHED; number++) {
        test_group g = { 0 };

        assert_true(number < 2000);
        test_start(&g, 2, run_rank, &number);
        rc = test_wait_rank(&g, 1);
        if (rc != 0 && rc != NOT_REACHED)
            fail_msg("allocation %ld: rank 1 ended with %d", number, rc);
        assert_int_equal(test_wait_rank(&g, 0), 0);
    }
    print_message("%ld allocations\n", number - 2);
    assert_true(number > 20);
}

#else

static void every_allocation_of_a_rank_may_fail(void **state)
{
    (void)state;
    skip();
}

#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_allocation_of_a_rank_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
