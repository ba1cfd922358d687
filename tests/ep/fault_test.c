/* Bad days: ranks killed or stopped in any call. Every other rank gets an error that names the
 * rank, within the deadline; a new group forms at once. ctest: sanitize */
#include "fabric/fabric_test.h"

#include "ep/ep_case.h"

enum {
    N_RANKS = 3,
    N_NODE_RANKS = 4,
    VICTIM = 1,
    N_CALLS = 4,
    NAMES_OTHERS = 3,
    KILLED_US = 60000000, /* the deadline when the victim is killed: not awaited */
    STOPPED_US = 3000000  /* when it is stopped: awaited; the others are never so slow */
};

struct fault {
    int signal;       /* SIGKILL or SIGSTOP */
    uint32_t at_call; /* the victim stops before this call of step 1 */
    uint64_t timeout_us;
    uint32_t per_node; /* 0: one node; else node copies between nodes of so many ranks */
    test_pipe ready;   /* the victim tells that it is there */
};

static ep_case small_case(uint32_t n_ranks)
{
    ep_case c = case_from_seed(3, n_ranks, 60);

    c.config.tp = 1;
    c.config.n_experts = n_ranks * 2;
    c.config.top_k = n_ranks; /* every rank has work for every other */
    c.config.n_rounds = 1;
    c.config.max_tokens = 6;
    c.crowd = 2;
    c.taste = 0;
    c.n_steps = 100;
    return c;
}

struct victim {
    const struct fault *fault;
    uint32_t n_points;
};

/* case_run passes a point before each call. */
static void stop_at(void *ctx)
{
    struct victim *v = ctx;

    if (v->n_points++ != N_CALLS + v->fault->at_call)
        return;
    test_tell(&v->fault->ready);
    if (v->fault->signal == SIGKILL)
        kill(getpid(), SIGKILL);
    raise(SIGSTOP);
}

/* Itself, as the one that another gave up on, or in the list of those that are missing. */
static bool names_victim(const char *text)
{
    const char *at = strstr(text, "rank 1");

    return (at && (at[6] < '0' || at[6] > '9')) || strstr(text, "ranks 0-") ||
           strstr(text, "ranks 1") || strstr(text, "ranks 0, 1");
}

static void run_faulty(const yard_fabric_config *config, void *ctx)
{
    struct fault *fault = ctx;
    ep_case c = small_case(config->n_ranks);
    struct victim victim = { .fault = fault };
    yard_fabric_config fabric = *config;
    yard_error err = { 0 };
    yard_ep *ep = NULL;
    case_rank r;
    uint64_t begin_us;
    bool names;

    fabric.ranks_per_node = fault->per_node;
    c.config.fabric_config = &fabric;
    c.config.node_copies = fault->per_node > 0;
    if (c.config.node_copies)
        c.config.layout = YARD_EP_FLAT;
    c.config.timeout_us = fault->timeout_us;
    if (yard_ep_create(&ep, &c.config, &err) != YARD_OK) {
        fprintf(stderr, "rank %u: %s\n", config->rank, err.message);
        _exit(1);
    }
    case_open(&r, &c, ep);
    if (config->rank == VICTIM) {
        r.point = stop_at;
        r.point_ctx = &victim;
    }
    begin_us = yard_now_us();
    if (case_run(&r)) { /* a stopped victim goes on after the others have given up */
        CHECK(config->rank == VICTIM);
        _exit(2);
    }
    if (config->rank == VICTIM) {
        CHECK(fault->signal == SIGSTOP); /* the others are gone: an error here too */
        _exit(0);
    }
    names = names_victim(r.failure);
    if (!names && (fault->signal == SIGKILL || fault->per_node == 0))
        CHECK_TEXT(r.failure, "the victim, rank 1");
    CHECK(yard_ep_poll(ep) != YARD_OK);
    CHECK(yard_now_us() - begin_us <
          fault->timeout_us + (fault->signal == SIGKILL ? 0 : KILLED_US));
    /* sticky: the next call says the same at once */
    CHECK(yard_ep_combine_recv(yard_ep_get_round(ep, 0), NULL, NULL) == yard_ep_poll(ep));
    case_close(&r);
    yard_ep_destroy(ep);
    if (!names)
        _exit(NAMES_OTHERS);
}

static void one_fault(int signal, uint32_t at_call, uint32_t per_node)
{
    struct fault fault = { .signal = signal,
                           .at_call = at_call,
                           .timeout_us = signal == SIGKILL ? KILLED_US : STOPPED_US,
                           .per_node = per_node };
    const uint32_t n_ranks = per_node ? N_NODE_RANKS : N_RANKS;
    test_group g = { 0 };
    uint32_t n_naming = 0;

    test_pipe_open(&fault.ready);
    test_start(&g, n_ranks, run_faulty, &fault);
    test_hear(&fault.ready);
    if (signal == SIGSTOP) /* has stopped: what makes it go on must not come before */
        assert_int_equal(waitpid(g.pids[VICTIM], NULL, WUNTRACED), g.pids[VICTIM]);
    /* A rank that is stopped may hold what it put to another node: ranks that have its signals see
     * only those missing that wait for it. Who waits for it names it. */
    for (uint32_t r = 0; r < n_ranks; r++)
        if (r != VICTIM) {
            const int code = test_wait_rank(&g, r);

            assert_true(code == 0 || code == NAMES_OTHERS);
            n_naming += code == 0;
        }
    assert_true(n_naming >= (signal == SIGKILL || !per_node ? n_ranks - 1 : 1));
    if (signal == SIGSTOP)
        kill(g.pids[VICTIM], SIGCONT);
    assert_int_equal(test_wait_rank(&g, VICTIM), signal == SIGKILL ? 128 + SIGKILL : 0);
    test_pipe_close(&fault.ready);
}

static void killed_in_any_call(void **state)
{
    (void)state;
    for (uint32_t call = 0; call < N_CALLS; call++)
        one_fault(SIGKILL, call, 0);
}

static void stopped_in_any_call(void **state)
{
    (void)state;
    for (uint32_t call = 0; call < N_CALLS; call++)
        one_fault(SIGSTOP, call, 0);
}

/* The victim is the relay of rank 3, and a target of the rows that rank 2 sends through rank 0. */
static void killed_or_stopped_relays_and_targets(void **state)
{
    (void)state;
    for (uint32_t call = 0; call < N_CALLS; call++) {
        one_fault(SIGKILL, call, 2);
        one_fault(SIGSTOP, call, 2);
    }
}

/* A group after a lost one, in processes that survived: new memory, nothing old arrives. */
static void run_again(const yard_fabric_config *config, void *ctx)
{
    ep_case c = small_case(config->n_ranks);
    yard_fabric_config fabric = *config;
    yard_error err = { 0 };

    (void)ctx;
    c.n_steps = 3;
    for (int i = 0; i < 5; i++) {
        char meet[128];
        yard_ep *ep = NULL;
        case_rank r;

        snprintf(meet, sizeof(meet), "%s-%d", config->rendezvous, i);
        fabric.rendezvous = meet;
        c.config.fabric_config = &fabric;
        c.config.timeout_us = 60000000;
        CHECK(yard_ep_create(&ep, &c.config, &err) == YARD_OK);
        case_open(&r, &c, ep);
        CHECK(case_run(&r));
        case_close(&r);
        yard_ep_destroy(ep);
    }
}

static void groups_follow_groups(void **state)
{
    (void)state;
    test_run(4, run_again, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_in_any_call),
        cmocka_unit_test(stopped_in_any_call),
        cmocka_unit_test(killed_or_stopped_relays_and_targets),
        cmocka_unit_test(groups_follow_groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
