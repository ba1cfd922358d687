/* What the library refuses: wrong configs, configs that differ between ranks, wrong calls. Each
 * with one line that says what, where, expected and found, and without harm to the group. ctest:
 * sanitize */
#include "fabric/fabric_test.h"

#include "ep/ep_case.h"

static yard_ep *alone(yard_ep_config *config)
{
    static yard_fabric_config fabric = YARD_FABRIC_CONFIG_INIT;
    yard_error err = { 0 };
    yard_ep *ep = NULL;

    fabric.n_ranks = 1;
    config->fabric_config = &fabric;
    if (yard_ep_create(&ep, config, &err) != YARD_OK)
        fail_msg("%s", err.message);
    return ep;
}

static yard_ep_config tiny_config(void)
{
    yard_ep_config c = YARD_EP_CONFIG_INIT;

    c.n_experts = 4;
    c.top_k = 2;
    c.hidden = 8;
    c.max_tokens = 3;
    c.dispatch = c.input = c.combine = YARD_EP_F32;
    return c;
}

static void wrong_calls_are_refused(void **state)
{
    yard_ep_config config = tiny_config();
    yard_ep *ep = alone(&config);
    yard_ep_round *round = yard_ep_get_round(ep, 0);
    float x[24] = { 0 }, weight[6] = { 0 }, expert_x[64], y[24];
    int32_t expert[6] = { 0, 1, 2, 3, 0, 1 }, count[4], n = 3;

    (void)state;
    assert_null(yard_ep_get_round(ep, 1));
    assert_int_equal(yard_ep_dispatch_recv(round, expert_x, NULL, count, NULL, NULL), YARD_EINVAL);
    assert_string_equal(yard_ep_error(ep),
                        "dispatch_recv: this round's next call is dispatch_send");
    n = 4;
    assert_int_equal(yard_ep_dispatch_send(round, x, NULL, expert, weight, &n, NULL), YARD_EINVAL);
    assert_string_equal(yard_ep_error(ep),
                        "dispatch_send: n_tokens: want 0 to 3 (max_tokens), got 4");
    n = 3;
    expert[5] = 4;
    assert_int_equal(yard_ep_dispatch_send(round, x, NULL, expert, weight, &n, NULL), YARD_EINVAL);
    assert_string_equal(yard_ep_error(ep),
                        "dispatch_send: token 2: want expert ids from -1 to 3, got 4");
    expert[5] = -1;
    assert_int_equal(yard_ep_dispatch_send(round, x, x, expert, weight, &n, NULL), YARD_EINVAL);
    assert_int_equal(yard_ep_dispatch_send(round, x, NULL, NULL, weight, &n, NULL), YARD_EINVAL);
    assert_int_equal(yard_ep_dispatch_send(round, x, NULL, expert, weight, NULL, NULL),
                     YARD_EINVAL);
    assert_string_equal(yard_ep_error(ep), "dispatch_send: n_tokens: want a number, got NULL");
    assert_int_equal(yard_ep_dispatch_send(round, x, NULL, NULL, weight, &n, NULL), YARD_EINVAL);
    assert_string_equal(yard_ep_error(ep),
                        "dispatch_send: x, expert, weight: want 3 rows, got NULL");
    /* nothing of this broke the group */
    assert_int_equal(yard_ep_dispatch_send(round, x, NULL, expert, weight, &n, NULL), YARD_OK);
    assert_int_equal(yard_ep_dispatch_send(round, x, NULL, expert, weight, &n, NULL), YARD_EINVAL);
    assert_int_equal(yard_ep_dispatch_recv(round, expert_x, NULL, count, NULL, NULL), YARD_OK);
    assert_int_equal(count[0] + count[1] + count[2] + count[3], 5);
    assert_int_equal(yard_ep_combine_send(round, expert_x, NULL), YARD_OK);
    assert_int_equal(yard_ep_combine_recv(round, y, NULL), YARD_OK);
    assert_int_equal(yard_ep_poll(ep), YARD_OK);
    yard_ep_destroy(ep);
    yard_ep_destroy(NULL);
}

static void limits_are_kept(void **state)
{
    yard_ep_config config = tiny_config();
    yard_ep *ep = alone(&config);
    yard_ep_round *round = yard_ep_get_round(ep, 0);
    float x[24] = { 0 }, weight[6] = { 0 }, expert_x[64], y[24];
    int32_t expert[6] = { 0, 1, 2, 3, 0, 1 }, count[4], n = 3;

    (void)state;
    assert_int_equal(yard_ep_round_limit(round, 4), YARD_EINVAL);
    assert_string_equal(yard_ep_error(ep), "round_limit: want at most 3 tokens, got 4");
    assert_int_equal(yard_ep_round_limit(round, 2), YARD_OK);
    assert_int_equal(yard_ep_dispatch_send(round, x, NULL, expert, weight, &n, NULL), YARD_EINVAL);
    assert_string_equal(yard_ep_error(ep),
                        "dispatch_send: n_tokens: want 0 to 2 (the round's limit), got 3");
    n = 2;
    assert_int_equal(yard_ep_dispatch_send(round, x, NULL, expert, weight, &n, NULL), YARD_OK);
    assert_int_equal(yard_ep_round_limit(round, 0), YARD_EINVAL);
    assert_string_equal(yard_ep_error(ep), "round_limit: want a round between exchanges");
    assert_int_equal(yard_ep_dispatch_recv(round, expert_x, NULL, count, NULL, NULL), YARD_OK);
    assert_int_equal(yard_ep_combine_send(round, expert_x, NULL), YARD_OK);
    assert_int_equal(yard_ep_combine_recv(round, y, NULL), YARD_OK);
    n = 3;
    assert_int_equal(yard_ep_round_limit(round, 0), YARD_OK);
    assert_int_equal(yard_ep_dispatch_send(round, x, NULL, expert, weight, &n, NULL), YARD_OK);
    yard_ep_destroy(ep);
}

/* Capacities count min(top_k, experts of a rank) rows of a token: an expert named twice would bring
 * more than the caller's buffers and the staging hold. */
static void repeated_experts_are_refused(void **state)
{
    yard_ep_config config = tiny_config();
    float x[24] = { 0 }, weight[12] = { 0 };
    int32_t expert[12] = { 0, 1, 2, 3, 3, 2, 1, 0, 1, -1, -1, 0 }, n = 3;
    yard_ep *ep;

    (void)state;
    config.top_k = 4;
    ep = alone(&config);
    expert[10] = 1;
    assert_int_equal(
        yard_ep_dispatch_send(yard_ep_get_round(ep, 0), x, NULL, expert, weight, &n, NULL),
        YARD_EINVAL);
    assert_string_equal(yard_ep_error(ep),
                        "dispatch_send: token 2: want different experts, got 1 twice");
    expert[10] = -1;
    assert_int_equal(
        yard_ep_dispatch_send(yard_ep_get_round(ep, 0), x, NULL, expert, weight, &n, NULL),
        YARD_OK);
    yard_ep_destroy(ep);
}

/* Rows in place belong to the library. */
static void buffers_for_rows_in_place_are_refused(void **state)
{
    yard_ep_config config = tiny_config();
    float x[24] = { 0 }, weight[6] = { 0 }, rows[64], y[24];
    int32_t expert[6] = { 0, 1, 2, 3, 0, 1 }, count[4], row_index[16], n = 3;
    size_t pitch_bytes = 0, scale_at_bytes = 0;
    yard_ep_round *round;
    yard_ep *ep = alone(&config);

    (void)state;
    assert_null(yard_ep_expert_x(yard_ep_get_round(ep, 0), &pitch_bytes, &scale_at_bytes));
    yard_ep_destroy(ep);
    config.layout = YARD_EP_FLAT_IN_PLACE;
    ep = alone(&config);
    round = yard_ep_get_round(ep, 0);
    assert_non_null(yard_ep_expert_x(round, &pitch_bytes, &scale_at_bytes));
    assert_int_equal(pitch_bytes % 16, 0);
    assert_int_equal(yard_ep_dispatch_send(round, x, NULL, expert, weight, &n, NULL), YARD_OK);
    assert_int_equal(yard_ep_dispatch_recv(round, rows, NULL, count, row_index, NULL), YARD_EINVAL);
    assert_string_equal(yard_ep_error(ep),
                        "dispatch_recv: expert_x, expert_x_scale: want NULL, for rows in place are "
                        "at yard_ep_expert_x(), got a buffer");
    assert_int_equal(yard_ep_dispatch_recv(round, NULL, rows, count, row_index, NULL), YARD_EINVAL);
    assert_int_equal(yard_ep_dispatch_recv(round, NULL, NULL, count, NULL, NULL), YARD_EINVAL);
    assert_int_equal(yard_ep_dispatch_recv(round, NULL, NULL, count, row_index, NULL), YARD_OK);
    assert_int_equal(row_index[0], 0);
    assert_int_equal(yard_ep_combine_send(round, rows, NULL), YARD_OK);
    assert_int_equal(yard_ep_combine_recv(round, y, NULL), YARD_OK);
    yard_ep_destroy(ep);
}

static void wrong_configs_are_refused(void **state)
{
    yard_ep_config config = tiny_config();
    yard_ep_capacity capacity;
    yard_error err = { 0 };

    (void)state;
    assert_int_equal(yard_ep_version(), YARD_EP_ABI_VERSION);
    assert_int_equal(yard_ep_capacity_of(&config, 3, &capacity, &err), YARD_EINVAL);
    assert_string_equal(err.message, "ep config: n_experts: want a multiple of 3 ranks, got 4");
    config.top_k = 33;
    assert_int_equal(yard_ep_capacity_of(&config, 2, &capacity, &err), YARD_EINVAL);
    assert_string_equal(err.message, "ep config: top_k: want 1 to 32, got 33");
    config = tiny_config();
    config.tp = 3;
    assert_int_equal(yard_ep_capacity_of(&config, 4, &capacity, &err), YARD_EINVAL);
    config = tiny_config();
    config.input = YARD_EP_BF16;
    assert_int_equal(yard_ep_capacity_of(&config, 2, &capacity, &err), YARD_EINVAL);
    config = tiny_config();
    assert_int_equal(yard_ep_capacity_of(&config, 2, &capacity, &err), YARD_OK);
    assert_int_equal(capacity.expert_y_rows, 2 * 3 * 2);
    config.size = 4;
    assert_int_equal(yard_ep_capacity_of(&config, 2, &capacity, &err), YARD_EINVAL);
    config = tiny_config();
    config.layout = YARD_EP_FLAT_IN_PLACE;
    assert_int_equal(yard_ep_capacity_of(&config, 2, &capacity, &err), YARD_OK);
    assert_int_equal(capacity.expert_x_rows, 2 * 3);
    config.node_copies = true;
    assert_int_equal(yard_ep_capacity_of(&config, 2, &capacity, &err), YARD_EINVAL);
    assert_string_equal(err.message, "ep config: node_copies: want false with rows in place, got "
                                     "true: rows for a node land at one of its ranks");
    config = tiny_config();
    config.row_align = 4096; /* rows are numbered by int32_t, those of the alignment too */
    config.n_experts = 1 << 20;
    assert_int_equal(yard_ep_capacity_of(&config, 2, &capacity, &err), YARD_EINVAL);
    assert_int_equal(yard_ep_capacity_of(&config, 4, &capacity, &err), YARD_OK);
}

/* What never saw its initialiser is refused, whatever it holds. */
static void uninitialised_configs_are_refused(void **state)
{
    yard_fabric_config fabric = { .n_ranks = 1 };
    yard_ep_config config = tiny_config(), garbage;
    yard_error err = { 0 };
    yard_ep *ep = NULL;

    (void)state;
    memset(&garbage, 0xff, sizeof(garbage));
    assert_int_equal(yard_ep_create(&ep, &garbage, &err), YARD_EINVAL);
    assert_string_equal(err.message, "ep config: want YARD_EP_CONFIG_INIT first");
    config.fabric_config = &fabric;
    assert_int_equal(yard_ep_create(&ep, &config, &err), YARD_EINVAL);
    assert_string_equal(err.message, "fabric: config: want YARD_FABRIC_CONFIG_INIT first");
    memset(&fabric, 0xff, sizeof(fabric));
    assert_int_equal(yard_ep_create(&ep, &config, &err), YARD_EINVAL);
    assert_null(ep);
}

/* What differs is named, on all ranks, in one line. */
static void run_mismatch(const yard_fabric_config *config, void *ctx)
{
    yard_ep_config c = tiny_config();
    yard_fabric_config fabric = *config;
    yard_error err = { 0 };
    yard_ep *ep = NULL;

    (void)ctx;
    if (config->rank == 1) {
        c.hidden = 64;
        c.layout = YARD_EP_FLAT;
    }
    c.fabric_config = &fabric;
    CHECK(yard_ep_create(&ep, &c, &err) == YARD_EINVAL);
    CHECK(ep == NULL);
    CHECK_TEXT(err.message, "rank 0 has 'hidden 8, layout expert-major', rank 1 has 'hidden 64, "
                            "layout flat'; want the same on all ranks");
}

/* A config that its own rank refuses: the others hear of it, too, whoever comes first. */
static void run_odd(const yard_fabric_config *config, void *ctx)
{
    const uint32_t *odd_rank = ctx;
    yard_ep_config c = tiny_config();
    yard_fabric_config fabric = *config;
    yard_error err = { 0 };
    yard_ep *ep = NULL;

    c.fabric_config = &fabric;
    c.n_experts = 6;
    if (config->rank == *odd_rank)
        c.top_k = 33;
    CHECK(yard_ep_create(&ep, &c, &err) == YARD_EINVAL);
    if (config->rank == *odd_rank)
        CHECK_TEXT(err.message, "ep config: top_k: want 1 to 32, got 33");
    else
        CHECK_TEXT(err.message, "top_k 33'");
}

static void differing_configs_are_refused(void **state)
{
    uint32_t odd_rank;

    (void)state;
    test_run(2, run_mismatch, NULL);
    for (odd_rank = 0; odd_rank < 3; odd_rank++)
        test_run(3, run_odd, &odd_rank);
}

/* Replicas of an instance that do not send the same routing: both are told, with both values. */
static void run_replicas(const yard_fabric_config *config, void *ctx)
{
    const bool fewer = ctx != NULL;
    yard_ep_config c = tiny_config();
    yard_fabric_config fabric = *config;
    float x[24] = { 0 }, weight[6] = { 0 }, expert_x[96];
    int32_t expert[6] = { 0, 1, 2, 3, 0, 1 }, count[2], n = 3;
    yard_error err = { 0 };
    yard_ep *ep = NULL;
    yard_ep_round *round;

    c.tp = 2;
    c.fabric_config = &fabric;
    CHECK(yard_ep_create(&ep, &c, &err) == YARD_OK);
    round = yard_ep_get_round(ep, 0);
    if (config->rank == 1 && fewer)
        n = 2;
    else if (config->rank == 1)
        weight[4] = 0.25f;
    CHECK(yard_ep_dispatch_send(round, x, NULL, expert, weight, &n, NULL) == YARD_OK);
    CHECK(yard_ep_dispatch_recv(round, expert_x, NULL, count, NULL, NULL) == YARD_EINVAL);
    CHECK_TEXT(yard_ep_error(ep), fewer ? "ranks 0 and 1 are replicas of one instance, want the "
                                          "same routing, got 3 and 2 tokens (hash "
                                        : "got 3 and 3 tokens (hash ");
    CHECK(yard_ep_poll(ep) == YARD_EINVAL);
    yard_ep_destroy(ep);
}

static void differing_replicas_are_refused(void **state)
{
    (void)state;
    test_run(2, run_replicas, NULL);
    test_run(2, run_replicas, "fewer");
}

static yard_fabric *borrowed_fabric(const yard_fabric_config *config, const char *transport)
{
    yard_fabric_config c = *config;

    c.transport = transport;
    return test_create(&c);
}

static void run_borrowed_mismatch(const yard_fabric_config *config, void *ctx)
{
    yard_fabric *f = borrowed_fabric(config, ctx);
    yard_ep_config c = tiny_config();
    yard_error err = { 0 };
    yard_ep *ep = NULL;

    c.fabric = f;
    c.n_experts = 6;
    if (config->rank == 2)
        c.max_tokens = 4;
    CHECK(yard_ep_create(&ep, &c, &err) == YARD_EINVAL && !ep);
    CHECK_TEXT(err.message, "rank 0 has 'max_tokens 3', rank 2 has 'max_tokens 4'");
    test_barrier(f, 32768, 1); /* nobody leaves before all have seen it */
    yard_fabric_destroy(f);
}

/* One part of a heap serves one group, once: its signal words have counted. */
static void run_borrowed_twice(const yard_fabric_config *config, void *ctx)
{
    yard_fabric *f = borrowed_fabric(config, ctx);
    yard_ep_config c = tiny_config();
    yard_error err = { 0 };
    yard_ep *a = NULL, *b = NULL, *none = NULL;

    c.fabric = f;
    CHECK(yard_ep_create(&a, &c, &err) == YARD_OK);
    CHECK(yard_ep_create(&none, &c, &err) == YARD_EINVAL && !none);
    CHECK_TEXT(err.message, "ep: the fabric's heap at 0 has had a group before");
    c.heap_at = 24576;
    CHECK(yard_ep_create(&b, &c, &err) == YARD_OK);
    yard_ep_destroy(a);
    c.heap_at = 0;
    CHECK(yard_ep_create(&none, &c, &err) == YARD_EINVAL && !none);
    c.heap_at = 65536;
    CHECK(yard_ep_create(&none, &c, &err) == YARD_EINVAL && !none);
    CHECK_TEXT(err.message, "heap_at: want a multiple of 64 in the fabric's heap of 65536 bytes");
    yard_ep_destroy(b);
    test_barrier(f, 61440, 1);
    yard_fabric_destroy(f);
}

static void borrowed_fabrics_are_checked(void **state)
{
    (void)state;
    test_run(3, run_borrowed_mismatch, "shm");
    test_run(3, run_borrowed_mismatch, "tcp");
    test_run(2, run_borrowed_twice, "shm");
    test_run(2, run_borrowed_twice, "tcp");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_calls_are_refused),
        cmocka_unit_test(limits_are_kept),
        cmocka_unit_test(repeated_experts_are_refused),
        cmocka_unit_test(buffers_for_rows_in_place_are_refused),
        cmocka_unit_test(wrong_configs_are_refused),
        cmocka_unit_test(uninitialised_configs_are_refused),
        cmocka_unit_test(differing_configs_are_refused),
        cmocka_unit_test(differing_replicas_are_refused),
        cmocka_unit_test(borrowed_fabrics_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
