/* Bad days: ranks that die, stop, leave, or come back late.
 * ctest: sanitize */
#include "fabric_test.h"

#include <sys/resource.h>

/* What the parent and the ranks tell each other by. */
typedef struct steps {
    test_pipe ready; /* a rank has reached the point of interest */
    test_pipe go[4]; /* by rank */
} steps;

static void steps_open(steps *s)
{
    test_pipe_open(&s->ready);
    for (int i = 0; i < 4; i++)
        test_pipe_open(&s->go[i]);
}

static void steps_close(steps *s)
{
    test_pipe_close(&s->ready);
    for (int i = 0; i < 4; i++)
        test_pipe_close(&s->go[i]);
}

static void stop_process(pid_t pid)
{
    int status = 0;

    assert_int_equal(kill(pid, SIGSTOP), 0);
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_true(WIFSTOPPED(status));
}

static void wait_for_rank_2(const yard_fabric_config *config, void *ctx)
{
    const steps *s = ctx;
    yard_fabric *f = test_create(config);
    const uint32_t me = yard_fabric_rank(f);
    uint32_t lost = 99;

    test_barrier(f, 0, 1);
    test_tell(&s->ready);
    if (me == 2) /* waits, too, and is killed in it */
        yard_fabric_wait_until(f, 64, 1, 0, yard_fabric_deadline(f, 0));
    CHECK(yard_fabric_wait_until(f, 64, 1, 2, yard_fabric_deadline(f, 0)) == YARD_EPEER);
    CHECK_TEXT(yard_fabric_error(f), "rank 2 (pid ");
    CHECK_TEXT(yard_fabric_error(f), "is lost: its process has ended");
    CHECK(yard_fabric_poll(f, &lost) == YARD_EPEER && lost == 2);
    CHECK(yard_fabric_signal(f, 64, 1, 2) == YARD_EPEER);
    CHECK(yard_fabric_put_signal(f, 128, "x", 1, 64, 1, 2) == YARD_EPEER);
    CHECK_TEXT(yard_fabric_error(f), "rank 2 (pid ");
    /* The others still work with each other. */
    for (uint32_t r = 0; r < 4; r++)
        if (r != me && r != 2)
            CHECK_OK(f, yard_fabric_signal(f, 128 + 8 * (yard_sym)me, 1, r));
    for (uint32_t r = 0; r < 4; r++)
        if (r != me && r != 2)
            CHECK_OK(f, yard_fabric_wait_until(f, 128 + 8 * (yard_sym)r, 1, r,
                                               yard_fabric_deadline(f, 0)));
    yard_fabric_destroy(f);
}

static void killed_rank_is_named(void **state)
{
    test_group g = { 0 };
    steps s;

    steps_open(&s);
    test_start(&g, 4, wait_for_rank_2, &s);
    for (int i = 0; i < 4; i++)
        test_hear(&s.ready);
    kill(g.pids[2], SIGKILL);
    assert_int_equal(test_wait_rank(&g, 2), 128 + SIGKILL);
    test_wait_all(&g);
    steps_close(&s);
}

/* Ranks exchange without end until one is killed somewhere in it; all others end with an error that
 * names the killed rank, or one that left because of it. */
static void exchange_until_lost(const yard_fabric_config *config, void *ctx)
{
    const steps *s = ctx;
    yard_fabric *f = test_create(config);
    const uint32_t n = yard_fabric_size(f), me = yard_fabric_rank(f);
    static uint8_t data[3000];
    yard_status st = YARD_OK;

    for (uint64_t round = 1; st == YARD_OK; round++) {
        for (uint32_t k = 1; k < n && st == YARD_OK; k++)
            st = yard_fabric_put_signal(f, 4096 * (1 + (yard_sym)me), data, sizeof(data),
                                        8 * (yard_sym)me, 1, (me + k) % n);
        for (uint32_t k = 1; k < n && st == YARD_OK; k++)
            st = yard_fabric_wait_until(f, 8 * (yard_sym)((me + k) % n), round, (me + k) % n,
                                        yard_fabric_deadline(f, 0));
        if (round == 100)
            test_tell(&s->ready);
    }
    CHECK(st == YARD_EPEER);
    CHECK_TEXT(yard_fabric_error(f), "fabric: rank ");
    yard_fabric_destroy(f);
}

static void killed_at_any_point(void **state)
{
    for (int i = 0; i < 10; i++) {
        test_group g = { 0 };
        steps s;

        steps_open(&s);
        test_start(&g, 4, exchange_until_lost, &s);
        for (int r = 0; r < 4; r++)
            test_hear(&s.ready);
        kill(g.pids[i % 4], SIGKILL);
        assert_int_equal(test_wait_rank(&g, (uint32_t)i % 4), 128 + SIGKILL);
        test_wait_all(&g);
        steps_close(&s);
    }
}

static void wait_for_stopped(const yard_fabric_config *config, void *ctx)
{
    const steps *s = ctx;
    yard_fabric *f = test_create(config);

    test_barrier(f, 0, 1);
    test_tell(&s->ready);
    if (yard_fabric_rank(f) == 1) {
        test_hear(&s->go[1]); /* only once it runs again */
        CHECK_OK(f, yard_fabric_signal(f, 64, 1, 0));
        CHECK_OK(f, yard_fabric_wait_until(f, 64, 1, 0, yard_fabric_deadline(f, 0)));
    } else {
        test_hear(&s->go[0]);
        CHECK(yard_fabric_wait_until(f, 64, 1, 1, yard_fabric_deadline(f, 100000)) ==
              YARD_ETIMEDOUT);
        CHECK_TEXT(yard_fabric_error(f), "s for rank 1 (pid ");
        CHECK_TEXT(yard_fabric_error(f), "signal at 64 is 0, want 1");
        CHECK(yard_fabric_poll(f, NULL) == YARD_OK); /* it is not lost */
        test_tell(&s->ready);
        CHECK_OK(f, yard_fabric_wait_until(f, 64, 1, 1, yard_fabric_deadline(f, 0)));
        CHECK_OK(f, yard_fabric_signal(f, 64, 1, 1));
    }
    yard_fabric_destroy(f);
}

static void stopped_rank_meets_the_deadline(void **state)
{
    test_group g = { 0 };
    steps s;

    steps_open(&s);
    test_start(&g, 2, wait_for_stopped, &s);
    test_hear(&s.ready);
    test_hear(&s.ready);
    stop_process(g.pids[1]);
    test_tell(&s.go[1]);
    test_tell(&s.go[0]);
    test_hear(&s.ready);
    kill(g.pids[1], SIGCONT);
    test_wait_all(&g);
    steps_close(&s);
}

/* A rank is stopped while it puts; the others form a new group with a replacement. When the old
 * rank goes on, its puts reach nothing of the new group. */
typedef struct late {
    steps s;
    char next[64]; /* rendezvous of the new group */
} late;

enum { LATE_SIG = 0, LATE_DATA = 4096 };

static void check_new_group(const yard_fabric_config *config, const late *l)
{
    yard_fabric_config c = *config;
    yard_fabric *f;

    c.rendezvous = l->next;
    f = test_create(&c);
    test_barrier(f, 64, 1);
    test_tell(&l->s.ready);
    if (c.rank == 0) {
        test_hear(&l->s.go[0]); /* the old rank has gone on and ended */
        CHECK(yard_fabric_read_signal(f, LATE_SIG) == 0);
        for (size_t i = LATE_DATA; i < c.heap_bytes; i++)
            CHECK(((uint8_t *)yard_fabric_local(f, 0))[i] == 0);
    }
    test_barrier(f, 64, 2);
    yard_fabric_destroy(f);
}

static void write_late(const yard_fabric_config *config, void *ctx)
{
    const late *l = ctx;
    yard_fabric *f = test_create(config);
    static uint8_t ones[8192];
    yard_status st = YARD_OK;

    memset(ones, 1, sizeof(ones));
    test_barrier(f, 64, 1);
    if (yard_fabric_rank(f) == 1) {
        while (st == YARD_OK)
            st = yard_fabric_put_signal(f, LATE_DATA, ones, sizeof(ones), LATE_SIG, 1, 0);
        CHECK(st == YARD_EPEER);
        CHECK_TEXT(yard_fabric_error(f), "rank 0 (pid ");
        yard_fabric_destroy(f);
        return;
    }
    CHECK_OK(f, yard_fabric_wait_until(f, LATE_SIG, 10, 1, yard_fabric_deadline(f, 0)));
    test_tell(&l->s.ready);
    test_hear(&l->s.go[0]); /* rank 1 is stopped */
    yard_fabric_destroy(f);
    check_new_group(config, l);
}

static void replace_rank_1(const yard_fabric_config *config, void *ctx)
{
    check_new_group(config, ctx);
}

static void late_writes_miss_the_new_group(void **state)
{
    test_group old = { 0 }, replacement = { 0 };
    late l = { 0 };

    steps_open(&l.s);
    test_group_name(&replacement);
    memcpy(l.next, replacement.rendezvous, sizeof(l.next));
    test_start(&old, 2, write_late, &l);
    test_hear(&l.s.ready);
    stop_process(old.pids[1]);
    test_tell(&l.s.go[0]);
    replacement.n_ranks = 2;
    test_start_rank(&replacement, 1, replace_rank_1, &l);
    test_hear(&l.s.ready);
    test_hear(&l.s.ready);
    kill(old.pids[1], SIGCONT);
    assert_int_equal(test_wait_rank(&old, 1), 0);
    test_tell(&l.s.go[0]);
    test_wait_all(&old);
    assert_int_equal(test_wait_rank(&replacement, 1), 0);
    steps_close(&l.s);
}

/* One rank gets no heap: all fail, with its reason. */
static void have_no_room(const yard_fabric_config *config, void *ctx)
{
    const struct rlimit small = { 4096, 4096 };
    yard_fabric *f = NULL;
    yard_error err = { 0 };

    if (config->rank == 1) {
        signal(SIGXFSZ, SIG_IGN);
        CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0); /* counts for memory files, too */
    }
    CHECK(yard_fabric_create(&f, config, &err) == YARD_ENOMEM && !f);
    CHECK_TEXT(err.message, "fabric: heap: ");
    CHECK_TEXT(err.message, "File too large");
    if (config->rank != 1)
        CHECK_TEXT(err.message, "rank 1 (pid ");
}

static void heap_failure_is_everybodys(void **state)
{
    test_run(4, have_no_room, NULL);
}

/* Heaps that no memory holds are refused by all, before the first page is taken. */
static void have_no_memory(const yard_fabric_config *config, void *ctx)
{
    const struct rlimit small = { 1 << 20, 1 << 20 };
    yard_fabric_config c = *config;
    yard_fabric *f = NULL;
    yard_error err = { 0 };

    signal(SIGXFSZ, SIG_IGN);
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0); /* a test that fails takes no memory, either */
    c.heap_bytes = (size_t)1 << 46;
    c.force_network = ctx != NULL;
    CHECK(yard_fabric_create(&f, &c, &err) == YARD_ENOMEM && !f);
    CHECK_TEXT(err.message, ctx ? "fabric: heap: want 1 x 70368744177664 bytes"
                                : "fabric: heap: want 2 x 70368744177664 bytes");
}

static void heaps_beyond_memory_are_refused(void **state)
{
    test_run(2, have_no_memory, NULL);
    test_run(2, have_no_memory, "tcp");
}

/* A rank that stops in the rendezvous holds up the next stage until its deadline. */
static void stop_here(void *ctx, const char *line)
{
    raise(SIGSTOP);
}

static void stop_in_start(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;
    yard_fabric *f = NULL;
    yard_error err = { 0 };

    c.start_timeout_us = 10000000; /* in which rank 2 comes */
    if (c.rank == 1) {
        c.start_timeout_us = 1000000;
        c.notice = stop_here; /* after a quarter of the time without rank 2 */
    }
    CHECK(yard_fabric_create(&f, &c, &err) == YARD_ETIMEDOUT && !f);
    CHECK_TEXT(err.message, "rank 1");
}

static void stopped_in_the_start(void **state)
{
    test_group g = { .n_ranks = 3 };
    int status = 0;

    test_group_name(&g);
    test_start_rank(&g, 0, stop_in_start, NULL);
    test_start_rank(&g, 1, stop_in_start, NULL);
    assert_int_equal(waitpid(g.pids[1], &status, WUNTRACED), g.pids[1]);
    assert_true(WIFSTOPPED(status));
    test_start_rank(&g, 2, stop_in_start, NULL);
    assert_int_equal(test_wait_rank(&g, 0), 0);
    assert_int_equal(test_wait_rank(&g, 2), 0);
    kill(g.pids[1], SIGKILL);
    assert_int_equal(test_wait_rank(&g, 1), 128 + SIGKILL);
}

/* What a rank sent before it left counts; then waits for it end at once. */
static void leave(const yard_fabric_config *config, void *ctx)
{
    yard_fabric *f = test_create(config);

    if (yard_fabric_rank(f) == 1) {
        CHECK_OK(f, yard_fabric_put_signal(f, 4096, "last", 4, 0, 1, 0));
    } else {
        CHECK(yard_fabric_wait_until(f, 0, 2, 1, yard_fabric_deadline(f, 0)) == YARD_EPEER);
        CHECK_TEXT(yard_fabric_error(f), "fabric: rank 1 (pid ");
        CHECK_TEXT(yard_fabric_error(f), "has left the group");
        CHECK_OK(f, yard_fabric_wait_until(f, 0, 1, 1, 0)); /* came before */
        CHECK(!memcmp(yard_fabric_local(f, 4096), "last", 4));
        CHECK(yard_fabric_poll(f, NULL) == YARD_OK); /* in order: not a loss */
        CHECK(yard_fabric_signal(f, 0, 1, 1) == YARD_EPEER);
    }
    yard_fabric_destroy(f);
}

static void leaving_is_told(void **state)
{
    test_run(2, leave, NULL);
}

/* Groups in a row under one name, without a pause. */
/* Rank 1 never signals. Rank 2 gives up on it and leaves; rank 0, who waits for rank 2 alone, hears
 * whose fault that is. */
static void blame(const yard_fabric_config *config, void *ctx)
{
    const test_pipe *over = ctx;
    yard_fabric_config c = *config;
    yard_fabric *f;

    c.force_network = config->n_ranks == 4;
    f = test_create(&c);
    if (c.rank == 2) {
        CHECK(yard_fabric_wait_until(f, 8, 1, 1, yard_fabric_deadline(f, 1000)) == YARD_ETIMEDOUT);
        CHECK_TEXT(yard_fabric_error(f), "for rank 1 (pid ");
    }
    if (c.rank == 0) {
        CHECK(yard_fabric_wait_until(f, 16, 1, 2, yard_fabric_deadline(f, 0)) == YARD_EPEER);
        CHECK_TEXT(yard_fabric_error(f), "rank 2 (pid ");
        CHECK_TEXT(yard_fabric_error(f), "has left the group after it gave up on rank 1");
        /* and so on to those who wait for this one: the first cause, not the messenger */
        test_tell(over);
    }
    if (c.rank == 1)
        test_hear(over);
    if (c.rank == 3) {
        CHECK(yard_fabric_wait_until(f, 24, 1, 0, yard_fabric_deadline(f, 0)) == YARD_EPEER);
        CHECK_TEXT(yard_fabric_error(f), "rank 0 (pid ");
        CHECK_TEXT(yard_fabric_error(f), "has left the group after it gave up on rank 1");
    }
    yard_fabric_destroy(f);
}

static void the_first_cause_is_named(void **state)
{
    test_pipe over;

    test_pipe_open(&over);
    test_run(3, blame, &over);
    test_run(4, blame, &over);
    test_pipe_close(&over);
}

static void form_again(const yard_fabric_config *config, void *ctx)
{
    for (int i = 0; i < 20; i++) {
        yard_fabric *f = test_create(config);

        for (yard_sym at = 0; at < 64; at += 8)
            CHECK(yard_fabric_read_signal(f, at) <= 1); /* nothing of the group before */
        test_barrier(f, 0, 1);
        yard_fabric_destroy(f);
    }
}

static void groups_in_a_row(void **state)
{
    test_run(3, form_again, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_rank_is_named),
        cmocka_unit_test(killed_at_any_point),
        cmocka_unit_test(stopped_rank_meets_the_deadline),
        cmocka_unit_test(late_writes_miss_the_new_group),
        cmocka_unit_test(heap_failure_is_everybodys),
        cmocka_unit_test(heaps_beyond_memory_are_refused),
        cmocka_unit_test(stopped_in_the_start),
        cmocka_unit_test(leaving_is_told),
        cmocka_unit_test(the_first_cause_is_named),
        cmocka_unit_test(groups_in_a_row),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
