/* Engines of several ranks: real processes with a fabric each. Requests are given to instances, on
 * all their ranks; the answers are those of the golden file (exact), whatever the layout, the
 * transport, the chunks and the mixture; ranks without requests take part. Groups sleep and are
 * woken by any rank; aborts free what they held; the loss of a rank is an error that names it, and
 * the rest joins a new group. */
#include "../model/ranks.h"

#include "engine/engine.h"

typedef struct engine_case {
    uint32_t n_ranks, tp;
    const char *transport;
    uint32_t max_tokens, prefill_budget, kv_tokens;
    uint32_t n_prompts;
    const ranks_prompt *prompts;
} engine_case;

typedef struct engine_rank {
    const engine_case *c;
    yard_fabric *fabric;
    yard_engine *engine;
    uint32_t rank, instance;
    uint64_t id[RANKS_PROMPTS]; /* request of a prompt; 0: none */
    uint32_t n_ids[RANKS_PROMPTS];
    bool ended[RANKS_PROMPTS];
} engine_rank;

static yard_engine_config engine_config_of(const engine_case *c)
{
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;

    config.model_dir = RANKS_DEMO_DIR;
    config.mode = YARD_EXACT;
    config.n_threads = 1;
    config.max_seqs = 4;
    config.max_tokens = c->max_tokens;
    config.kv_tokens = c->kv_tokens ? c->kv_tokens : 8192;
    config.tp = c->tp;
    config.prefill_budget = c->prefill_budget;
    return config;
}

static void engine_rank_open(engine_rank *r, const engine_case *c, const yard_fabric_config *base)
{
    yard_engine_config config = engine_config_of(c);
    yard_fabric_config fabric_config = *base;
    yard_engine_budget budget;
    yard_error err = { 0 };
    yard_status st;

    *r = (engine_rank){ .c = c, .rank = base->rank, .instance = base->rank / c->tp };
    st = yard_engine_budget_of(&config, c->n_ranks, base->rank, &budget, &err);
    fabric_config.heap_bytes = budget.heap_bytes;
    fabric_config.transport = c->transport;
    if (st == YARD_OK)
        st = yard_fabric_create(&r->fabric, &fabric_config, &err);
    config.fabric = r->fabric;
    if (st == YARD_OK)
        st = yard_engine_create(&r->engine, &config, &err);
    if (st != YARD_OK) {
        fprintf(stderr, "rank %u: %s\n", base->rank, err.message);
        _exit(1);
    }
}

static void engine_rank_close(engine_rank *r)
{
    yard_engine_destroy(r->engine);
    yard_fabric_destroy(r->fabric);
}

static void submit(engine_rank *r, uint32_t prompt)
{
    yard_request request = YARD_REQUEST_INIT;

    request.prompt = r->c->prompts[prompt].ids;
    request.n_prompt = r->c->prompts[prompt].n_ids;
    request.max_new_tokens = RANKS_NEW;
    request.ignore_eos = true;
    r->n_ids[prompt] = 0;
    r->ended[prompt] = false;
    if (yard_engine_submit(r->engine, &request, &r->id[prompt]) != YARD_OK) {
        fprintf(stderr, "rank %u: %s\n", r->rank, yard_engine_error(r->engine));
        _exit(1);
    }
}

static void take_events(engine_rank *r)
{
    yard_event events[16];
    uint32_t n;

    while ((n = yard_engine_poll(r->engine, events, 16)) > 0)
        for (uint32_t i = 0; i < n; i++)
            for (uint32_t p = 0; p < r->c->n_prompts; p++) {
                const ranks_prompt *want = &r->c->prompts[p];
                if (r->id[p] != events[i].id)
                    continue;
                if (events[i].n_tokens > 0)
                    CHECK(events[i].token == want->ids[want->n_ids + r->n_ids[p]++]);
                r->ended[p] = events[i].finish != YARD_RUNNING;
            }
}

static void check_ok(const engine_rank *r, yard_status st)
{
    if (st == YARD_OK)
        return;
    fprintf(stderr, "rank %u: %s\n", r->rank, yard_engine_error(r->engine));
    _exit(1);
}

static uint64_t steps_so_far(const engine_rank *r)
{
    yard_engine_stats stats;

    yard_engine_get_stats(r->engine, &stats);
    return stats.n_steps;
}

/* Until the group sleeps: a call that runs no step. */
static void run_until_asleep(engine_rank *r)
{
    uint64_t before;

    do {
        before = steps_so_far(r);
        check_ok(r, yard_engine_step(r->engine));
        take_events(r);
    } while (steps_so_far(r) > before);
}

static void check_all_is_free(const engine_rank *r)
{
    yard_engine_stats stats;

    yard_engine_get_stats(r->engine, &stats);
    CHECK(stats.n_running == 0 && stats.n_queued == 0 && stats.n_free_pages == stats.n_pages);
}

static void check_was_woken(const engine_rank *r, uint64_t after_us)
{
    yard_engine_stats stats;

    yard_engine_get_stats(r->engine, &stats);
    CHECK(stats.woken_at_us >= after_us && stats.woken_at_us <= yard_now_us());
}

/* Prompts that an instance has in all: instance 0 many, the others fewer, the last none. */
static bool has_prompt(const engine_rank *r, uint32_t prompt)
{
    const uint32_t dp = r->c->n_ranks / r->c->tp;

    return dp == 1 || prompt % (dp + 1) % dp == r->instance % dp;
}

static void answering_rank(const yard_fabric_config *base, void *ctx)
{
    const engine_case *c = ctx;
    const uint32_t dp = c->n_ranks / c->tp;
    yard_engine_stats stats;
    engine_rank r;

    engine_rank_open(&r, c, base);
    for (uint32_t p = 0; p < c->n_prompts; p++)
        if (has_prompt(&r, p))
            submit(&r, p);
    run_until_asleep(&r);
    for (uint32_t p = 0; p < c->n_prompts; p++)
        CHECK(!r.id[p] || (r.ended[p] && r.n_ids[p] == RANKS_NEW));
    check_all_is_free(&r);
    /* One instance after the other wakes the group that sleeps. */
    for (uint32_t i = 0; i < dp; i++) {
        const uint64_t asleep_us = yard_now_us();

        if (r.instance == i)
            submit(&r, i % c->n_prompts);
        check_ok(&r, yard_engine_wait(r.engine, 0));
        run_until_asleep(&r);
        check_was_woken(&r, asleep_us);
        CHECK(r.instance != i || r.ended[i % c->n_prompts]);
    }
    check_all_is_free(&r);
    yard_engine_get_stats(r.engine, &stats);
    CHECK(r.instance > 0 || c->prompts[0].n_ids <= YARD_PAGE_TOKENS || stats.n_found_tokens > 0);
    engine_rank_close(&r);
}

static ranks_prompt prompts[RANKS_PROMPTS];

static void answers_are_the_golden_ones(void **state)
{
    static const engine_case cases[] = {
        { .n_ranks = 1, .tp = 1, .max_tokens = 512, .n_prompts = RANKS_SHORT_PROMPTS },
        { .n_ranks = 2, .tp = 1, .max_tokens = 512, .n_prompts = RANKS_SHORT_PROMPTS },
        { .n_ranks = 2, .tp = 1, .transport = "tcp", .max_tokens = 16, .n_prompts = 6 },
        { .n_ranks = 4, .tp = 1, .max_tokens = 32, .prefill_budget = 5, .n_prompts = 8 },
        { .n_ranks = 2, .tp = 2, .max_tokens = 32, .n_prompts = 6 },
        { .n_ranks = 4, .tp = 2, .transport = "tcp", .max_tokens = 64, .n_prompts = 8 },
        /* requests wait for pages */
        { .n_ranks = 2, .tp = 1, .max_tokens = 64, .n_prompts = 8, .kv_tokens = 320 },
        { .n_ranks = 2, .tp = 2, .max_tokens = 32, .n_prompts = 8, .kv_tokens = 320 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        engine_case c = cases[i];
        c.prompts = prompts;
        test_run(c.n_ranks, answering_rank, &c);
    }
}

enum { MANY = 4, MANY_NEW = 150 };

typedef struct preemption {
    engine_case c;
    int32_t (*token)[MANY][MANY_NEW]; /* [instances] shared */
    bool is_reference;                /* writes the tokens; otherwise compares */
} preemption;

static uint64_t submit_many(engine_rank *r, uint32_t i)
{
    yard_request request = YARD_REQUEST_INIT;
    uint64_t id = 0;

    request.prompt = r->c->prompts[1 + i].ids;
    request.n_prompt = r->c->prompts[1 + i].n_ids;
    request.max_new_tokens = MANY_NEW;
    request.ignore_eos = true;
    request.sampling.temperature = i % 2 ? 0.9f : 0.0f;
    check_ok(r, yard_engine_submit(r->engine, &request, &id));
    return id;
}

/* Pages run out: requests give way and begin again, alike on the ranks of an instance, and what
 * they say is what they say with plenty of pages. */
static void preempting_rank(const yard_fabric_config *base, void *ctx)
{
    const preemption *p = ctx;
    uint32_t n[MANY] = { 0 }, n_events;
    uint64_t id[MANY], before;
    yard_engine_stats stats;
    yard_event event;
    engine_rank r;

    engine_rank_open(&r, &p->c, base);
    for (uint32_t i = 0; i < MANY; i++)
        id[i] = submit_many(&r, i);
    do {
        before = steps_so_far(&r);
        check_ok(&r, yard_engine_step(r.engine));
        while ((n_events = yard_engine_poll(r.engine, &event, 1)) > 0)
            for (uint32_t i = 0; i < MANY; i++)
                if (id[i] == event.id && p->is_reference)
                    p->token[r.instance][i][n[i]++] = event.token;
                else if (id[i] == event.id)
                    CHECK(event.token == p->token[r.instance][i][n[i]++]);
    } while (steps_so_far(&r) > before);
    for (uint32_t i = 0; i < MANY; i++)
        CHECK(n[i] == MANY_NEW);
    check_all_is_free(&r);
    yard_engine_get_stats(r.engine, &stats);
    CHECK((stats.n_preemptions > 0) == !p->is_reference);
    engine_rank_close(&r);
}

static void preemption_changes_nothing(void **state)
{
    const size_t n_bytes = 2 * sizeof(int32_t[MANY][MANY_NEW]);
    void *shared = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    (void)state;
    assert_true(shared != MAP_FAILED);
    for (uint32_t tp = 1; tp <= 2; tp++)
        for (int small = 0; small < 2; small++) {
            preemption p = { .c = { .n_ranks = 2,
                                    .tp = tp,
                                    .max_tokens = 48,
                                    .kv_tokens = small ? 448 : 0,
                                    .prompts = prompts },
                             .token = shared,
                             .is_reference = !small };
            test_run(2, preempting_rank, &p);
        }
    munmap(shared, n_bytes);
}

/* Each rank has finished when its own requests have ended, and goes on for the others. Its fabric
 * goes only when all are done: a loss would be an error. */
static void finishing_rank(const yard_fabric_config *base, void *ctx)
{
    engine_rank r;

    engine_rank_open(&r, ctx, base);
    for (uint32_t p = 0; p < base->rank * 2; p++)
        submit(&r, p);
    for (bool all = false; !yard_engine_ended(r.engine);) {
        all = true;
        for (uint32_t p = 0; p < base->rank * 2; p++)
            all = all && r.ended[p];
        if (all)
            yard_engine_finish(r.engine);
        check_ok(&r, yard_engine_step(r.engine));
        take_events(&r);
        check_ok(&r, yard_engine_wait(r.engine, 1000));
    }
    for (uint32_t p = 0; p < base->rank * 2; p++)
        CHECK(r.ended[p] && r.n_ids[p] == RANKS_NEW);
    engine_rank_close(&r);
}

static void a_group_ends_in_order(void **state)
{
    engine_case c = {
        .n_ranks = 4, .tp = 1, .max_tokens = 512, .n_prompts = 6, .prompts = prompts
    };

    (void)state;
    test_run(4, finishing_rank, &c);
}

static void aborting_rank(const yard_fabric_config *base, void *ctx)
{
    engine_rank r;

    engine_rank_open(&r, ctx, base);
    submit(&r, 0);
    submit(&r, 1);
    check_ok(&r, yard_engine_abort(r.engine, r.id[1], YARD_ALL_CHOICES)); /* before it began */
    for (int i = 0; i < 6; i++) {
        check_ok(&r, yard_engine_step(r.engine));
        take_events(&r);
    }
    check_ok(&r, yard_engine_abort(r.engine, r.id[0], YARD_ALL_CHOICES));
    check_ok(&r, yard_engine_abort(r.engine, 999, YARD_ALL_CHOICES)); /* of no request: nothing */
    run_until_asleep(&r);
    CHECK(r.ended[0] && r.n_ids[0] > 0 && r.n_ids[0] < RANKS_NEW);
    CHECK(r.ended[1] && r.n_ids[1] == 0);
    check_all_is_free(&r);
    engine_rank_close(&r);
}

static void aborts_free_what_was_held(void **state)
{
    engine_case c = {
        .n_ranks = 2, .tp = 1, .max_tokens = 512, .n_prompts = 2, .prompts = prompts
    };

    (void)state;
    test_run(2, aborting_rank, &c);
}

typedef struct loss {
    engine_case c;
    test_pipe left; /* "I have left the old group" */
    char again[64]; /* rendezvous of the new one */
    bool asleep;    /* when the rank is lost */
} loss;

static void serve_again(engine_rank *r)
{
    submit(r, r->rank);
    run_until_asleep(r);
    CHECK(r->ended[r->rank] && r->n_ids[r->rank] == RANKS_NEW);
    check_all_is_free(r);
}

static void losing_rank(const yard_fabric_config *base, void *ctx)
{
    const loss *l = ctx;
    yard_fabric_config config = *base;
    yard_fabric *fabric = NULL;
    engine_rank r;
    yard_error err = { 0 };
    yard_status st = YARD_OK;

    engine_rank_open(&r, &l->c, base);
    if (l->asleep)
        run_until_asleep(&r);
    else
        submit(&r, 0);
    while (st == YARD_OK) {
        if (base->rank == 1 && (l->asleep || r.n_ids[0] > 3))
            raise(SIGKILL);
        st = yard_engine_step(r.engine);
        take_events(&r);
        if (st == YARD_OK)
            st = yard_engine_wait(r.engine, 0);
    }
    CHECK(st == YARD_EPEER);
    CHECK_TEXT(yard_engine_error(r.engine), "rank ");
    CHECK(yard_engine_step(r.engine) == YARD_EPEER && yard_engine_wait(r.engine, 0) == YARD_EPEER);
    config.rendezvous = l->again;
    config.heap_bytes = yard_fabric_heap_bytes(r.fabric);
    yard_fabric_destroy(r.fabric);
    r.fabric = NULL;
    test_tell(&l->left);
    if (yard_fabric_create(&fabric, &config, &err) != YARD_OK ||
        yard_engine_rejoin(r.engine, fabric, &err) != YARD_OK) {
        fprintf(stderr, "rank %u: %s\n", base->rank, err.message);
        _exit(1);
    }
    r.fabric = fabric;
    serve_again(&r);
    engine_rank_close(&r);
}

static void new_rank(const yard_fabric_config *base, void *ctx)
{
    const loss *l = ctx;
    engine_rank r;

    engine_rank_open(&r, &l->c, base);
    serve_again(&r);
    engine_rank_close(&r);
}

static void the_rest_joins_a_new_group(void **state)
{
    (void)state;
    for (int asleep = 0; asleep < 2; asleep++) {
        test_group g = { 0 };
        loss l = {
            .c = { .n_ranks = 4, .tp = 1, .max_tokens = 512, .n_prompts = 4, .prompts = prompts },
            .asleep = asleep
        };

        test_pipe_open(&l.left);
        snprintf(l.again, sizeof(l.again), "unix:yard-again-%d-%d", getpid(), asleep);
        test_start(&g, l.c.n_ranks, losing_rank, &l);
        assert_int_equal(test_wait_rank(&g, 1), 128 + SIGKILL);
        for (uint32_t r = 0; r < l.c.n_ranks - 1; r++)
            test_hear(&l.left);
        snprintf(g.rendezvous, sizeof(g.rendezvous), "%s", l.again);
        test_start_rank(&g, 1, new_rank, &l);
        test_wait_all(&g);
        test_pipe_close(&l.left);
    }
}

static void impossible_layouts_are_refused(void **state)
{
    engine_case c = { .n_ranks = 5, .tp = 1, .max_tokens = 64 };
    yard_engine_config config = engine_config_of(&c);
    yard_error err = { 0 };
    yard_engine_budget budget;

    (void)state;
    assert_int_equal(yard_engine_budget_of(&config, 5, 0, &budget, &err), YARD_EINVAL);
    assert_non_null(strstr(err.message, "EP"));
    config.tp = 3;
    assert_int_equal(yard_engine_budget_of(&config, 4, 0, &budget, &err), YARD_EINVAL);
    assert_string_equal(err.message, "layout EP 4, DP 1, TP 3: EP is no multiple of TP; nearest: "
                                     "EP 4, DP 2, TP 2");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_are_the_golden_ones),
        cmocka_unit_test(preemption_changes_nothing),
        cmocka_unit_test(a_group_ends_in_order),
        cmocka_unit_test(aborts_free_what_was_held),
        cmocka_unit_test(the_rest_joins_a_new_group),
        cmocka_unit_test(impossible_layouts_are_refused),
    };

    ranks_load_prompts(RANKS_DEMO_GOLDEN, prompts);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
