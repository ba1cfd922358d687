/* Generations without processes: random ranks that start, form, lose each other, stop, hang and die
 * at any moment. Whatever happened: when faults cease, the pod serves again, in bounded time; a
 * group is formed of ranks that are in none; every process that is started was down, every one that
 * is killed was late or stopped in a group that is over. Seeds are printed. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "engine/generation.h"

enum { MAX_R = 6, START_US = 1000, LEAVE_US = 200, STOP_US = 300 };

/* What a process really is. */
typedef enum body { NONE, BOOTING, IDLE, JOINING, WORKING, ABANDONING } body;

typedef struct sim {
    yard_generation g;
    uint64_t random, now_us;
    body body[MAX_R];
    bool halted[MAX_R];  /* stopped: does nothing until killed or continued */
    bool hanging[MAX_R]; /* the same, but nobody can see it */
    bool dying[MAX_R];   /* killed; what it said before may still come */
    bool sick[MAX_R];    /* does not join this group */
    uint32_t n_formed;
} sim;

static uint32_t pick(sim *s, uint32_t n)
{
    s->random = s->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((s->random >> 33) % n);
}

static void end_process(sim *s, uint32_t r)
{
    s->body[r] = NONE;
    s->halted[r] = s->hanging[r] = s->sick[r] = s->dying[r] = false;
    yard_generation_ended(&s->g, r, s->now_us);
}

static bool group_is_whole(const sim *s)
{
    for (uint32_t r = 0; r < s->g.n_ranks; r++)
        if ((s->body[r] != JOINING && s->body[r] != WORKING) || s->halted[r] || s->hanging[r])
            return false;
    return true;
}

/* The pod does what the state machine asks for. */
static void act(sim *s)
{
    yard_generation_act what;
    uint32_t r;

    while ((what = yard_generation_next(&s->g, s->now_us, &r)) != YARD_GENERATION_NOTHING) {
        assert_int_not_equal(what, YARD_GENERATION_GIVE_UP);
        switch (what) {
        case YARD_GENERATION_START:
            assert_int_equal(s->body[r], NONE);
            s->body[r] = BOOTING;
            break;
        case YARD_GENERATION_KILL:
            assert_true(s->body[r] != NONE);
            assert_false(s->g.forming && s->body[r] == WORKING && !s->halted[r]);
            s->dying[r] = true;
            break;
        case YARD_GENERATION_LEAVE:
            if (s->body[r] == JOINING || s->body[r] == WORKING)
                s->body[r] = ABANDONING;
            break;
        case YARD_GENERATION_FORM:
            for (uint32_t i = 0; i < s->g.n_ranks; i++) {
                assert_int_equal(s->body[i], IDLE);
                assert_false(s->dying[i]);
                s->body[i] = JOINING;
            }
            s->n_formed++;
            break;
        default:
            fail();
        }
    }
}

/* One rank goes on, if it can. */
static void go_on(sim *s, uint32_t r)
{
    if (s->dying[r] && pick(s, 2) == 0)
        end_process(s, r);
    if (s->halted[r] || s->hanging[r])
        return;
    switch (s->body[r]) {
    case BOOTING:
    case ABANDONING:
        s->body[r] = IDLE;
        s->sick[r] = false;
        yard_generation_ready(&s->g, r);
        break;
    case JOINING:
        if (s->sick[r])
            break;
        if (group_is_whole(s)) {
            s->body[r] = WORKING;
            yard_generation_formed(&s->g, r);
        } else if (pick(s, 4) == 0) { /* it notices */
            s->body[r] = ABANDONING;
            yard_generation_lost(&s->g, s->now_us);
        }
        break;
    case WORKING:
        if (!group_is_whole(s) && pick(s, 4) == 0) {
            s->body[r] = ABANDONING;
            yard_generation_lost(&s->g, s->now_us);
        }
        break;
    default:
        break;
    }
}

static void harm(sim *s, uint32_t r)
{
    if (s->body[r] == NONE)
        return;
    switch (pick(s, 5)) {
    case 0:
        end_process(s, r);
        break;
    case 1:
        s->halted[r] = true;
        yard_generation_stopped(&s->g, r, true, s->now_us);
        break;
    case 2:
        s->halted[r] = false;
        yard_generation_stopped(&s->g, r, false, s->now_us);
        break;
    case 3:
        s->hanging[r] = true;
        break;
    default:
        s->sick[r] = s->body[r] == JOINING;
        break;
    }
}

static void run(uint64_t seed)
{
    sim s = { .random = seed * 0x9e3779b97f4a7c15u + 1 };
    const uint32_t n_ranks = 1 + pick(&s, MAX_R), n_faults = pick(&s, 12);
    uint32_t n_left = 4000;

    assert_int_equal(yard_generation_open(&s.g, n_ranks, START_US, LEAVE_US, STOP_US, NULL),
                     YARD_OK);
    s.g.max_attempts = 1000; /* giving up has a test of its own */
    for (uint32_t i = 0; i < 60 * n_faults; i++) {
        s.now_us += pick(&s, 30);
        act(&s);
        go_on(&s, pick(&s, n_ranks));
        if (pick(&s, 60) == 0)
            harm(&s, pick(&s, n_ranks));
    }
    for (; !yard_generation_serves(&s.g) && n_left > 0; n_left--) {
        s.now_us += pick(&s, 30);
        act(&s);
        go_on(&s, pick(&s, n_ranks));
    }
    if (n_left == 0)
        fail_msg("seed %llu: %u ranks do not serve again", (unsigned long long)seed, n_ranks);
    assert_int_equal(s.g.number, s.n_formed);
    yard_generation_close(&s.g);
}

static void it_serves_again(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 20000; seed++)
        run(seed);
}

static void take(yard_generation *g, uint64_t now_us, yard_generation_act want, uint32_t want_rank)
{
    uint32_t rank;

    assert_int_equal(yard_generation_next(g, now_us, &rank), want);
    if (want != YARD_GENERATION_NOTHING && want != YARD_GENERATION_FORM &&
        want != YARD_GENERATION_GIVE_UP)
        assert_int_equal(rank, want_rank);
}

static void a_stopped_rank_dies_when_others_miss_it(void **state)
{
    yard_generation g;

    (void)state;
    assert_int_equal(yard_generation_open(&g, 2, START_US, LEAVE_US, STOP_US, NULL), YARD_OK);
    take(&g, 0, YARD_GENERATION_START, 0);
    take(&g, 0, YARD_GENERATION_START, 1);
    take(&g, 0, YARD_GENERATION_NOTHING, 0);
    assert_int_equal(yard_generation_deadline(&g), START_US);
    yard_generation_ready(&g, 0);
    take(&g, 1, YARD_GENERATION_NOTHING, 0);
    yard_generation_ready(&g, 1);
    take(&g, 2, YARD_GENERATION_FORM, 0);
    yard_generation_formed(&g, 0);
    assert_false(yard_generation_serves(&g));
    yard_generation_formed(&g, 1);
    assert_true(yard_generation_serves(&g));
    assert_true(yard_generation_deadline(&g) == UINT64_MAX);
    assert_int_equal(g.n_attempts, 0);

    yard_generation_stopped(&g, 1, true, 5900);
    take(&g, 5950, YARD_GENERATION_NOTHING, 0); /* nobody misses it yet */
    yard_generation_lost(&g, 6000);
    take(&g, 6000, YARD_GENERATION_LEAVE, 0);
    take(&g, 6000, YARD_GENERATION_LEAVE, 1);
    take(&g, 6000, YARD_GENERATION_KILL, 1);
    take(&g, 6000, YARD_GENERATION_NOTHING, 0);
    yard_generation_ready(&g, 0);
    take(&g, 6001, YARD_GENERATION_NOTHING, 0);
    yard_generation_ended(&g, 1, 6002);
    take(&g, 6002, YARD_GENERATION_START, 1);
    yard_generation_ready(&g, 1);
    take(&g, 6003, YARD_GENERATION_FORM, 0);
    assert_int_equal(g.number, 2);
    yard_generation_close(&g);
}

static void a_stopped_rank_dies_also_alone(void **state)
{
    yard_generation g;

    (void)state;
    assert_int_equal(yard_generation_open(&g, 1, START_US, LEAVE_US, STOP_US, NULL), YARD_OK);
    take(&g, 0, YARD_GENERATION_START, 0);
    yard_generation_ready(&g, 0);
    take(&g, 0, YARD_GENERATION_FORM, 0);
    yard_generation_formed(&g, 0);
    yard_generation_stopped(&g, 0, true, 50);
    yard_generation_stopped(&g, 0, true, 90); /* still */
    assert_int_equal(yard_generation_deadline(&g), 50 + STOP_US);
    take(&g, 49 + STOP_US, YARD_GENERATION_NOTHING, 0);
    yard_generation_stopped(&g, 0, false, 49 + STOP_US);
    take(&g, 50 + STOP_US, YARD_GENERATION_NOTHING, 0);
    yard_generation_stopped(&g, 0, true, 400);
    take(&g, 400 + STOP_US, YARD_GENERATION_KILL, 0);
    yard_generation_close(&g);
}

static void who_does_not_leave_in_time_is_killed(void **state)
{
    yard_generation g;

    (void)state;
    assert_int_equal(yard_generation_open(&g, 2, START_US, LEAVE_US, STOP_US, NULL), YARD_OK);
    take(&g, 0, YARD_GENERATION_START, 0);
    take(&g, 0, YARD_GENERATION_START, 1);
    yard_generation_ready(&g, 0);
    yard_generation_ready(&g, 1);
    take(&g, 0, YARD_GENERATION_FORM, 0);
    yard_generation_ended(&g, 0, 10);
    take(&g, 10, YARD_GENERATION_START, 0);
    take(&g, 10, YARD_GENERATION_LEAVE, 1);
    take(&g, 10 + LEAVE_US - 1, YARD_GENERATION_NOTHING, 0);
    take(&g, 10 + LEAVE_US, YARD_GENERATION_KILL, 1);
    yard_generation_close(&g);
}

static void it_gives_up_on_what_never_serves(void **state)
{
    yard_generation g;
    yard_generation_act what = YARD_GENERATION_NOTHING;
    uint32_t rank, n_starts = 0;

    (void)state;
    assert_int_equal(yard_generation_open(&g, 1, START_US, LEAVE_US, STOP_US, NULL), YARD_OK);
    for (uint64_t now = 0; what != YARD_GENERATION_GIVE_UP && now < 100; now++) {
        what = yard_generation_next(&g, now, &rank);
        if (what == YARD_GENERATION_START) {
            n_starts++;
            yard_generation_ended(&g, 0, now);
        }
    }
    assert_int_equal(what, YARD_GENERATION_GIVE_UP);
    assert_int_equal(n_starts, g.max_attempts + 1);
    yard_generation_close(&g);
    assert_int_equal(yard_generation_open(&g, 1, START_US, LEAVE_US, STOP_US, NULL), YARD_OK);
    yard_generation_failed(&g);
    take(&g, 0, YARD_GENERATION_GIVE_UP, 0);
    yard_generation_close(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_serves_again),
        cmocka_unit_test(a_stopped_rank_dies_when_others_miss_it),
        cmocka_unit_test(a_stopped_rank_dies_also_alone),
        cmocka_unit_test(who_does_not_leave_in_time_is_killed),
        cmocka_unit_test(it_gives_up_on_what_never_serves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
