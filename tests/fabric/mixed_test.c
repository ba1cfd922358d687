/* The transport that is shm inside a node and TCP between nodes: the suite of all transports, and
 * puts that cross once and signal several ranks. ctest: sanitize */
#include "traffic.h"

enum { WORDS = 1024, ROWS = 4096, ROW = 1500, N_ROWS = 40, ROUNDS = 20, RANKS = 6, PER_NODE = 3 };

/* Targets of row i that rank from sends to a node: any but none of its ranks. */
static uint32_t plan_targets(uint32_t round, uint32_t from, uint32_t node, uint32_t i,
                             uint32_t targets[static PER_NODE])
{
    const uint64_t mask = traffic_mix((round * 64 + from) * 4096 + node * 1024 + i) % 7 + 1;
    uint32_t n = 0;

    for (uint32_t j = 0; j < PER_NODE; j++)
        if (mask >> j & 1)
            targets[n++] = node * PER_NODE + j;
    return n;
}

static uint32_t relay_of(uint32_t from, uint32_t node)
{
    return node * PER_NODE + from % PER_NODE;
}

static void put_rows(yard_fabric *f, uint32_t round, uint32_t node)
{
    const uint32_t me = yard_fabric_rank(f);
    uint8_t *src = yard_fabric_local(f, ROWS + (yard_sym)(RANKS + node) * N_ROWS * ROW);
    const yard_sym dst = ROWS + (yard_sym)me * N_ROWS * ROW;

    for (uint32_t i = 0; i < N_ROWS; i++) {
        const traffic_put what = { .n_bytes = ROW, .key = (round * 64 + me) * 64 + i };
        uint32_t targets[PER_NODE];
        const uint32_t n = plan_targets(round, me, node, i, targets);

        traffic_fill(src + i * ROW, &what);
        CHECK_OK(f, yard_fabric_put_signal_node(f, dst + i * ROW, src + i * ROW, ROW,
                                                relay_of(me, node), WORDS + 8 * me, 1, targets, n));
    }
}

/* Rows are seen where they lie, by every target. */
static void check_rows(yard_fabric *f, uint32_t round, uint32_t from, uint64_t *total)
{
    const uint32_t me = yard_fabric_rank(f), node = yard_fabric_node(f, me);
    const uint32_t relay = relay_of(from, node);
    const yard_sym at = ROWS + (yard_sym)from * N_ROWS * ROW;
    bool mine[N_ROWS] = { false };

    for (uint32_t i = 0; i < N_ROWS; i++) {
        uint32_t targets[PER_NODE];
        const uint32_t n = plan_targets(round, from, node, i, targets);

        for (uint32_t j = 0; j < n; j++)
            mine[i] |= targets[j] == me;
        *total += mine[i];
    }
    CHECK_OK(f, yard_fabric_wait_relayed(f, WORDS + 8 * from, *total, from, relay,
                                         yard_fabric_deadline(f, 0)));
    for (uint32_t i = 0; i < N_ROWS; i++) {
        const traffic_put what = { .n_bytes = ROW, .key = (round * 64 + from) * 64 + i };

        CHECK(!mine[i] || traffic_arrived(yard_fabric_view(f, relay, at + i * ROW), &what));
    }
    CHECK(yard_fabric_read_signal(f, WORDS + 8 * from) == *total);
}

static void node_put_rank(const yard_fabric_config *config, void *ctx)
{
    yard_fabric *f =
        traffic_create(config, ROWS + (size_t)(RANKS + RANKS / PER_NODE) * N_ROWS * ROW);
    uint64_t totals[RANKS] = { 0 };
    yard_fabric_stats stats;

    CHECK(yard_fabric_shares_node(f));
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        for (uint32_t node = 0; node < RANKS / PER_NODE; node++)
            put_rows(f, round, node);
        for (uint32_t from = 0; from < RANKS; from++)
            check_rows(f, round, from, &totals[from]);
        test_barrier(f, 2048, round);
    }
    yard_fabric_get_stats(f, &stats);
    CHECK(stats.n_puts == ROUNDS * N_ROWS * 1 + /* own node: where the relay is another rank */
                              (relay_of(config->rank, config->rank / PER_NODE) != config->rank
                                   ? ROUNDS * N_ROWS
                                   : 0));
    yard_fabric_destroy(f);
}

static void one_copy_reaches_several_ranks(void **state)
{
    test_run(RANKS, node_put_rank, NULL);
}

static void idle_relay_rank(const yard_fabric_config *config, void *ctx)
{
    const test_pipe *done = ctx;
    yard_fabric *f = traffic_create(config, 8192);
    const uint32_t targets[] = { 3, 5 };
    const uint8_t *seen;

    test_barrier(f, 2048, 1);
    switch (config->rank) {
    case 0:
        memset(yard_fabric_local(f, 6000), 7, 100);
        CHECK_OK(f, yard_fabric_put_signal_node(f, 4096, yard_fabric_local(f, 6000), 100, 4, 8, 1,
                                                targets, 2));
        break;
    case 3:
    case 5:
        CHECK_OK(f, yard_fabric_wait_relayed(f, 8, 1, 0, 4, yard_fabric_deadline(f, 0)));
        seen = yard_fabric_view(f, 4, 4096);
        CHECK(seen && seen[0] == 7 && seen[99] == 7);
        test_tell(done);
        break;
    case 4: /* no call of the fabric until both have it */
        test_hear(done);
        test_hear(done);
        CHECK(yard_fabric_read_signal(f, 8) == 0);
        break;
    }
    test_barrier(f, 2048, 2);
    yard_fabric_destroy(f);
}

static void relays_need_no_call(void **state)
{
    test_pipe done;

    test_pipe_open(&done);
    test_run(RANKS, idle_relay_rank, &done);
    test_pipe_close(&done);
}

/* What rank 0 relayed before it left arrives at all targets; then it is gone. */
static void leaving_rank(const yard_fabric_config *config, void *ctx)
{
    yard_fabric *f = traffic_create(config, ROWS + TRAFFIC_FLOOD);
    const uint32_t targets[] = { 3, 4, 5 };

    if (config->rank == 0)
        CHECK_OK(f, yard_fabric_put_signal_node(f, ROWS, yard_fabric_local(f, ROWS), TRAFFIC_FLOOD,
                                                4, 8, 1, targets, 3));
    if (config->rank >= PER_NODE) {
        CHECK_OK(f, yard_fabric_wait_relayed(f, 8, 1, 0, 4, yard_fabric_deadline(f, 0)));
        CHECK(yard_fabric_wait_relayed(f, 8, 2, 0, 4, yard_fabric_deadline(f, 0)) == YARD_EPEER);
        CHECK_TEXT(yard_fabric_error(f), "rank ");
        CHECK_TEXT(yard_fabric_error(f), "left");
    }
    yard_fabric_destroy(f);
}

static void last_relayed_puts_arrive(void **state)
{
    for (int i = 0; i < 10; i++)
        test_run(RANKS, leaving_rank, NULL);
}

static void lost_relay_rank(const yard_fabric_config *config, void *ctx)
{
    yard_fabric *f = traffic_create(config, 8192);
    const uint32_t targets[] = { 3 };

    test_barrier(f, 2048, 1);
    if (config->rank == 4)
        kill(getpid(), SIGKILL);
    if (config->rank == 3) {
        CHECK(yard_fabric_wait_relayed(f, 8, 1, 0, 4, yard_fabric_deadline(f, 0)) == YARD_EPEER);
        CHECK_TEXT(yard_fabric_error(f), "rank 4 ");
        CHECK_OK(f, yard_fabric_signal(f, 16, 1, 0));
    }
    if (config->rank == 0) {
        CHECK_OK(f, yard_fabric_wait_until(f, 16, 1, 3, yard_fabric_deadline(f, 0)));
        CHECK(yard_fabric_wait_until(f, 8, 1, 4, yard_fabric_deadline(f, 0)) == YARD_EPEER);
        CHECK(yard_fabric_put_signal_node(f, 0, NULL, 0, 4, 8, 1, targets, 1) == YARD_EPEER);
        CHECK_TEXT(yard_fabric_error(f), "rank 4 ");
    }
    yard_fabric_destroy(f);
}

static void lost_relays_are_named(void **state)
{
    test_group g = { 0 };

    test_start(&g, RANKS, lost_relay_rank, NULL);
    assert_int_equal(test_wait_rank(&g, 4), 128 + SIGKILL);
    test_wait_all(&g);
}

static void refusing_rank(const yard_fabric_config *config, void *ctx)
{
    yard_fabric *f = traffic_create(config, 8192);
    const uint32_t near = config->rank / PER_NODE * PER_NODE, far = (near + PER_NODE) % RANKS;
    const uint32_t targets[] = { far, near };

    CHECK(yard_fabric_put_signal_node(f, 0, NULL, 0, far, 8, 1, targets, 2) == YARD_EINVAL);
    CHECK(yard_fabric_put_signal_node(f, 0, NULL, 0, far, 8, 1, targets, 0) == YARD_EINVAL);
    CHECK(yard_fabric_put_signal_node(f, 0, NULL, 0, far, 8188, 1, targets, 1) == YARD_EINVAL);
    CHECK(yard_fabric_put_signal_node(f, 0, NULL, 0, RANKS, 8, 1, targets, 1) == YARD_EINVAL);
    CHECK(yard_fabric_view(f, far, 0) == NULL);
    CHECK(yard_fabric_view(f, near, 8193) == NULL);
    CHECK(yard_fabric_view(f, config->rank, 64) == yard_fabric_local(f, 64));
    test_barrier(f, 2048, 1);
    yard_fabric_destroy(f);
}

static void wrong_node_puts_are_refused(void **state)
{
    test_run(RANKS, refusing_rank, NULL);
}

static void choosing_rank(const yard_fabric_config *config, void *ctx)
{
    static const char *const want[] = { "shm", "tcp", "shm+tcp", "shm+tcp", "shm" };
    yard_fabric_config c = *config;

    for (uint32_t per_node = 0; per_node < 5; per_node++) {
        char rendezvous[80];
        yard_fabric *f;

        snprintf(rendezvous, sizeof(rendezvous), "%s-%u", config->rendezvous, per_node);
        c.rendezvous = rendezvous;
        c.ranks_per_node = per_node;
        f = test_create(&c);
        CHECK(!strcmp(yard_fabric_transport(f, NULL), want[per_node]));
        CHECK(yard_fabric_node(f, 3) == (per_node ? 3 / per_node : 0));
        CHECK(yard_fabric_shares_node(f) == (per_node != 1));
        CHECK((yard_fabric_put_signal_node(f, 0, NULL, 0, config->rank, 8, 1, &config->rank, 1) ==
               YARD_OK) == (per_node != 1));
        test_barrier(f, 2048, 1);
        yard_fabric_destroy(f);
    }
}

static void nodes_decide_the_transport(void **state)
{
    test_run(4, choosing_rank, NULL);
}

/* Whatever the rendezvous is: "unix:" says that there is one node, not how its ranks are to talk.
 */
static void told_rank(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;
    yard_fabric *f;

    c.transport = ctx;
    f = test_create(&c);
    CHECK(!strcmp(yard_fabric_transport(f, NULL), ctx));
    test_barrier(f, 2048, 1);
    yard_fabric_destroy(f);
}

static void the_config_decides_the_transport(void **state)
{
    test_run(3, told_rank, "shm");
    test_run(3, told_rank, "tcp");
    test_run(3, told_rank, "shm+tcp");
}

/* What only transports need that read their sources later is not taken where puts copy at once. */
static void sized_rank(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;
    yard_error err = { 0 };
    yard_fabric *f = NULL;

    c.transport = ctx;
    CHECK(yard_fabric_create_for(&f, &c, 4096, &err) == YARD_OK);
    CHECK(yard_fabric_heap_bytes(f) == (yard_fabric_copies(f) ? 4096 : c.heap_bytes));
    CHECK(yard_fabric_put_signal(f, 0, NULL, 0, 8192, 1, 0) ==
          (yard_fabric_copies(f) ? YARD_EINVAL : YARD_OK));
    test_barrier(f, 2048, 1); /* a peer that has left takes no puts */
    yard_fabric_destroy(f);
}

static void copying_transports_need_less(void **state)
{
    test_run(2, sized_rank, "shm");
    test_run(2, sized_rank, "tcp");
}

int main(void)
{
    const struct CMUnitTest suite[] = {
        TRAFFIC_SUITE,
    };
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_copy_reaches_several_ranks),
        cmocka_unit_test(relays_need_no_call),
        cmocka_unit_test(last_relayed_puts_arrive),
        cmocka_unit_test(lost_relays_are_named),
        cmocka_unit_test(wrong_node_puts_are_refused),
        cmocka_unit_test(nodes_decide_the_transport),
        cmocka_unit_test(the_config_decides_the_transport),
        cmocka_unit_test(copying_transports_need_less),
    };
    int n_failed = 0;

    alarm(2 * TEST_ALARM_S);
    traffic_transport = "shm+tcp";
    for (traffic_per_node = 1; traffic_per_node <= 3; traffic_per_node++) {
        traffic_n_again = 20;
        printf("%u ranks per node\n", traffic_per_node);
        n_failed += cmocka_run_group_tests_name("traffic", suite, NULL, NULL);
    }
    traffic_per_node = PER_NODE;
    n_failed += cmocka_run_group_tests_name("nodes", tests, NULL, NULL);
    return n_failed;
}
