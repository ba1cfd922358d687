/* Step agreement without a fabric: the plan as a function of its vector, and the protocol of
 * agree.h checked exhaustively on a model: every order in which ranks can run, requests arrive and
 * records land, for 2 and 3 ranks. Decisions are those of agree.c; the model keeps who has posted,
 * what has landed in which of the two places, and what each rank has left to do. That the model can
 * fail is tested too. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "engine/agree.h"

static yard_step_plan plan_of(uint32_t n_ranks, uint32_t tp, uint32_t budget,
                              const yard_step_record *records, uint32_t instance)
{
    const yard_agree_config config = { .n_ranks = n_ranks, .tp = tp, .prefill_budget = budget };
    yard_step_plan plan;

    yard_step_plan_of(&config, records, instance, &plan);
    return plan;
}

static void a_step_runs_when_one_has_work(void **state)
{
    yard_step_record r[3] = { { .step = 7 }, { .step = 7 }, { .step = 7 } };

    (void)state;
    assert_false(plan_of(3, 1, 9, r, 0).runs);
    r[2].has_work = 1;
    assert_true(plan_of(3, 1, 9, r, 0).runs);
    assert_int_equal(plan_of(3, 1, 9, r, 0).step, 7);
}

static void a_group_ends_when_all_have_finished(void **state)
{
    yard_step_record r[2] = { { .finished = 1 }, { .finished = 0 } };

    (void)state;
    assert_false(plan_of(2, 1, 9, r, 0).ends);
    r[1].finished = 1;
    assert_true(plan_of(2, 1, 9, r, 0).ends);
    assert_false(plan_of(2, 1, 9, r, 0).runs);
    r[0].has_work = 1; /* what was there before goes on */
    assert_false(plan_of(2, 1, 9, r, 0).ends);
    assert_true(plan_of(2, 1, 9, r, 0).runs);
}

static void the_maximum_and_the_least_decide(void **state)
{
    yard_step_record r[4] = {
        { .n_tokens = 1, .mtp_passes = 1, .schedule = YARD_STEP_MICRO_BATCH, .n_commands = 3 },
        { .n_tokens = 1, .mtp_passes = 3, .schedule = YARD_STEP_MICRO_BATCH, .n_commands = 5 },
        { .n_tokens = 0, .mtp_passes = 0, .schedule = YARD_STEP_NONE, .n_commands = 9 },
        { .n_tokens = 0, .mtp_passes = 0, .schedule = YARD_STEP_NONE, .n_commands = 8 },
    };

    (void)state;
    r[1].generation = 4;
    assert_int_equal(plan_of(4, 2, 9, r, 0).generation, 4);
    assert_int_equal(plan_of(4, 2, 9, r, 0).mtp_passes, 3);
    assert_int_equal(plan_of(4, 2, 9, r, 0).n_commands, 3); /* what both replicas have */
    assert_int_equal(plan_of(4, 2, 9, r, 1).n_commands, 8);
    /* ranks without tokens go along */
    assert_int_equal(plan_of(4, 2, 9, r, 1).schedule, YARD_STEP_MICRO_BATCH);
    assert_int_equal(plan_of(4, 2, 9, r, 1).n_rounds, 2);
    r[3].prefill_tokens = 1;
    assert_int_equal(plan_of(4, 2, 9, r, 0).schedule, YARD_STEP_NONE);
    assert_int_equal(plan_of(4, 2, 9, r, 0).n_rounds, 1);
    assert_int_equal(plan_of(4, 2, 9, r, 1).prefill_tokens, 0); /* rank 2 has not heard of it */
    r[2].prefill_tokens = 4;
    assert_int_equal(plan_of(4, 2, 9, r, 1).prefill_tokens, 1);
}

/* Every wish in 0..4 of 3 instances, every budget: nothing above wish or budget, nothing left over
 * that somebody wishes, nobody behind another who gets more than it needs. */
static void the_prefill_budget_is_shared(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 125; code++)
        for (uint32_t budget = 1; budget < 14; budget++)
            for (uint64_t step = 0; step < 3; step++) {
                yard_step_record r[3] = {
                    { .prefill_tokens = code % 5, .n_tokens = 1, .step = step },
                    { .prefill_tokens = code / 5 % 5, .step = step },
                    { .prefill_tokens = code / 25, .step = step }
                };
                uint32_t got[3], sum = 0, wished = 0;

                for (uint32_t i = 0; i < 3; i++) {
                    got[i] = plan_of(3, 1, budget, r, i).prefill_tokens;
                    assert_true(got[i] <= r[i].prefill_tokens);
                    sum += got[i];
                    wished += r[i].prefill_tokens;
                }
                assert_int_equal(sum, wished < budget ? wished : budget);
                for (uint32_t i = 0; i < 3; i++)
                    for (uint32_t j = 0; j < 3; j++)
                        assert_true(got[i] == r[i].prefill_tokens || got[j] <= got[i] + 1);
            }
}

/* No instance has more rows than all are told, whatever it gets of the budget; and they are told
 * the same. */
static void rows_are_bounded(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 125; code++)
        for (uint32_t budget = 1; budget < 14; budget++) {
            const yard_step_record r[4] = {
                { .prefill_tokens = code % 5, .n_tokens = 2, .n_resumed = 3 },
                { .prefill_tokens = code % 5, .n_tokens = 3 },
                { .prefill_tokens = code / 5 % 5 },
                { .prefill_tokens = code / 25, .n_resumed = code % 2 },
            };
            const uint64_t told = plan_of(4, 1, budget, r, 0).max_rows;
            uint64_t most = 0;

            for (uint32_t i = 0; i < 4; i++) {
                const yard_step_plan plan = plan_of(4, 1, budget, r, i);
                const uint64_t n = (uint64_t)r[i].n_tokens + r[i].n_resumed + plan.prefill_tokens;

                most = n > most ? n : most;
                assert_int_equal(plan.max_rows, told);
            }
            assert_true(most <= told && told <= most + 1);
        }
}

static void a_budget_below_one_each_starves_nobody(void **state)
{
    uint32_t got[3] = { 0 };

    (void)state;
    for (uint64_t step = 0; step < 3; step++)
        for (uint32_t i = 0; i < 3; i++) {
            const yard_step_record r[3] = { { .prefill_tokens = 5, .n_tokens = 1, .step = step },
                                            { .prefill_tokens = 5, .step = step },
                                            { .prefill_tokens = 5, .step = step } };
            got[i] += plan_of(3, 1, 1, r, i).prefill_tokens;
        }
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(got[i], 1);
}

static void nobody_is_held_up_where_nobody_decodes(void **state)
{
    const yard_step_record r[3] = { { .prefill_tokens = 500 },
                                    { .prefill_tokens = 1 << 20 },
                                    { .prefill_tokens = 0 } };

    (void)state;
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(plan_of(3, 1, 1, r, i).prefill_tokens, r[i].prefill_tokens);
}

static void a_record_is_due_right_after_launch(void **state)
{
    yard_agree a = { 0 };
    yard_step_plan plan = { .runs = true };

    (void)state;
    assert_true(yard_agree_must_post(&a, false, false));
    yard_agree_posted(&a);
    assert_false(yard_agree_must_post(&a, true, true));
    yard_agree_planned(&a, &plan);
    assert_true(yard_agree_must_post(&a, false, false));
    yard_agree_posted(&a);
    plan = (yard_step_plan){ .step = 1 };
    yard_agree_planned(&a, &plan);
    assert_false(yard_agree_must_post(&a, false, false));
    assert_true(yard_agree_must_post(&a, true, false));
    assert_true(yard_agree_must_post(&a, false, true));
    assert_int_equal(a.step, 2);
}

enum { MAX_R = 3 };

/* A record of the model: the step it is of, and whether it says work. Steps stay small. */
typedef struct place {
    uint8_t step, work;
} place;

typedef struct state {
    uint8_t step[MAX_R], at[MAX_R];  /* yard_agree */
    uint8_t launched[MAX_R];         /* 1 + the step that runs here; 0: none */
    uint8_t arrivals[MAX_R];         /* requests still to come */
    uint8_t work[MAX_R];             /* steps of work that are here */
    uint8_t finished[MAX_R];         /* 1 + the last step that ran to its end here */
    place staged[MAX_R][2];          /* by parity */
    place landed[MAX_R][MAX_R][2];   /* [to][from][parity] */
    uint8_t count[MAX_R][MAX_R][2];  /* arrivals there */
    uint8_t flying[MAX_R][MAX_R][2]; /* [to][from][parity]; 1 + its step */
} state;

/* A mistake put in on purpose. */
enum { SOUND, DEAF, ONE_PLACE, LATE_WORK, ANY_RECORD };

typedef struct model {
    uint32_t n_ranks;
    int flaw;
    state *states; /* all that were ever reached; those from next on are to be expanded */
    size_t n_states, next, capacity;
    uint32_t *table; /* hash of state to its number + 1 */
    size_t table_size;
    const char *mistake;
} model;

static void wrong(model *m, const char *what)
{
    if (!m->mistake)
        m->mistake = what;
}

static void add(model *m, const state *s)
{
    const uint8_t *bytes = (const uint8_t *)s;
    uint64_t hash = 0xcbf29ce484222325u;
    size_t at;

    for (size_t i = 0; i < sizeof(*s); i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    at = (hash ^ hash >> 29) % m->table_size;
    for (; m->table[at]; at = (at + 1) % m->table_size)
        if (!memcmp(&m->states[m->table[at] - 1], s, sizeof(*s)))
            return;
    assert_true(m->n_states < m->capacity);
    m->states[m->n_states] = *s;
    m->table[at] = (uint32_t)++m->n_states;
}

static uint32_t parity(const model *m, uint32_t step)
{
    return m->flaw == ONE_PLACE ? 0 : step & 1;
}

static uint32_t arrivals_with(const model *m, uint32_t step)
{
    return m->flaw == ONE_PLACE ? step + 1 : step / 2 + 1;
}

static bool is_there(const model *m, const state *s, uint32_t to, uint32_t from)
{
    const uint32_t step = s->step[to];

    return s->count[to][from][parity(m, step)] >= arrivals_with(m, step);
}

static bool heard(const model *m, const state *s, uint32_t rank)
{
    for (uint32_t from = 0; from < m->n_ranks; from++)
        if (from != rank && is_there(m, s, rank, from))
            return m->flaw != DEAF;
    return false;
}

static void load(const state *s, uint32_t rank, yard_agree *a)
{
    *a = (yard_agree){ .step = s->step[rank], .state = (yard_agree_state)s->at[rank] };
}

static void store(state *s, uint32_t rank, const yard_agree *a)
{
    s->step[rank] = (uint8_t)a->step;
    s->at[rank] = (uint8_t)a->state;
}

/* May be posted while a step runs here, but not before it was launched. */
static bool post(model *m, state *s, uint32_t rank)
{
    const uint32_t step = s->step[rank], p = parity(m, step);
    yard_agree a;

    load(s, rank, &a);
    if (!yard_agree_must_post(&a, s->work[rank] > 0, heard(m, s, rank)))
        return false;
    s->staged[rank][p] = (place){ (uint8_t)step, s->work[rank] > 0 };
    for (uint32_t to = 0; to < m->n_ranks; to++) {
        if (to == rank)
            continue;
        if (s->flying[to][rank][p])
            wrong(m, "two records on the way to one place");
        s->flying[to][rank][p] = (uint8_t)(1 + step);
    }
    yard_agree_posted(&a);
    store(s, rank, &a);
    return true;
}

static void plan_step(model *m, state *s, uint32_t rank)
{
    const uint32_t step = s->step[rank], p = parity(m, step);
    const yard_agree_config config = { .n_ranks = m->n_ranks, .tp = 1, .prefill_budget = 1 };
    yard_step_record records[MAX_R] = { 0 };
    yard_step_plan plan;
    yard_agree a;

    for (uint32_t from = 0; from < m->n_ranks; from++) {
        const place *r = from == rank ? &s->staged[rank][p] : &s->landed[rank][from][p];

        if (r->step != step)
            wrong(m, "a record of another step is read");
        records[from] = (yard_step_record){ .step = step, .has_work = r->work };
    }
    if (m->flaw == LATE_WORK) /* what came after posting */
        records[rank].has_work = s->work[rank] > 0;
    yard_step_plan_of(&config, records, 0, &plan);
    load(s, rank, &a);
    yard_agree_planned(&a, &plan);
    store(s, rank, &a);
    if (plan.runs)
        s->launched[rank] = (uint8_t)(1 + step);
}

/* A step ends here once all have launched it. One that a peer went past is never launched there. */
static bool end_step(model *m, state *s, uint32_t rank)
{
    const uint8_t mine = s->launched[rank];

    if (!mine)
        return false;
    for (uint32_t r = 0; r < m->n_ranks; r++) {
        if (s->launched[r] >= mine || s->finished[r] >= mine)
            continue;
        if (s->step[r] >= mine)
            wrong(m, "a step with a missing peer");
        return false;
    }
    s->finished[rank] = mine;
    s->launched[rank] = 0;
    s->work[rank] -= s->work[rank] > 0;
    return true;
}

static bool ready_to_plan(const model *m, const state *s, uint32_t rank)
{
    uint32_t n = 0;

    if (s->at[rank] != YARD_AGREE_WAITING || s->launched[rank])
        return false;
    for (uint32_t from = 0; from < m->n_ranks; from++)
        n += from != rank && is_there(m, s, rank, from);
    return n == m->n_ranks - 1 || (m->flaw == ANY_RECORD && n > 0);
}

static void check_rest(model *m, const state *s)
{
    for (uint32_t r = 0; r < m->n_ranks; r++) {
        if (s->work[r])
            wrong(m, "work is slept on");
        if (s->at[r] != YARD_AGREE_ASLEEP)
            wrong(m, "a rank waits for ever");
        if (s->step[r] != s->step[0])
            wrong(m, "ranks sleep at different steps");
    }
}

/* All states that follow s. */
static void expand(model *m, const state *s)
{
    bool moved = false;

    for (uint32_t r = 0; r < m->n_ranks; r++) {
        state next = *s;

        if (s->arrivals[r]) {
            next.arrivals[r]--;
            next.work[r]++;
            add(m, &next);
            moved = true;
        }
        next = *s;
        if (post(m, &next, r)) {
            add(m, &next);
            moved = true;
        }
        if (ready_to_plan(m, s, r)) {
            next = *s;
            plan_step(m, &next, r);
            add(m, &next);
            moved = true;
        }
        next = *s;
        if (end_step(m, &next, r)) {
            add(m, &next);
            moved = true;
        }
        for (uint32_t from = 0; from < m->n_ranks; from++)
            for (uint32_t p = 0; p < 2; p++)
                if (s->flying[r][from][p]) {
                    next = *s;
                    if (s->staged[from][p].step + 1 != s->flying[r][from][p])
                        wrong(m, "staging is used again before its record landed");
                    next.landed[r][from][p] = s->staged[from][p];
                    next.count[r][from][p]++;
                    next.flying[r][from][p] = 0;
                    add(m, &next);
                    moved = true;
                }
    }
    if (!moved)
        check_rest(m, s);
}

static const char *explore(uint32_t n_ranks, const uint8_t *arrivals, int flaw, size_t *n_states)
{
    model m = { .n_ranks = n_ranks, .flaw = flaw, .capacity = 4000000, .table_size = 8000009 };
    state first = { 0 };

    m.states = malloc(m.capacity * sizeof(*m.states));
    m.table = calloc(m.table_size, sizeof(*m.table));
    assert_true(m.states && m.table);
    memcpy(first.arrivals, arrivals, n_ranks);
    add(&m, &first);
    while (m.next < m.n_states && !m.mistake) {
        const state s = m.states[m.next++];
        expand(&m, &s);
    }
    *n_states += m.n_states;
    free(m.states);
    free(m.table);
    return m.mistake;
}

static void two_ranks_exhaustively(void **state_)
{
    static const uint8_t arrivals[][2] = { { 0, 0 }, { 1, 0 }, { 1, 1 }, { 3, 0 },
                                           { 2, 1 }, { 2, 2 }, { 3, 3 } };
    size_t n_states = 0;

    (void)state_;
    for (size_t i = 0; i < sizeof(arrivals) / sizeof(arrivals[0]); i++) {
        const char *mistake = explore(2, arrivals[i], SOUND, &n_states);
        if (mistake)
            fail_msg("arrivals %u, %u: %s", arrivals[i][0], arrivals[i][1], mistake);
    }
    print_message("2 ranks: %zu states\n", n_states);
}

static void three_ranks_exhaustively(void **state_)
{
    static const uint8_t arrivals[][3] = { { 0, 0, 0 }, { 1, 0, 0 }, { 1, 1, 0 }, { 2, 0, 0 } };
    size_t n_states = 0;

    (void)state_;
    for (size_t i = 0; i < sizeof(arrivals) / sizeof(arrivals[0]); i++) {
        const char *mistake = explore(3, arrivals[i], SOUND, &n_states);
        if (mistake)
            fail_msg("arrivals %u, %u, %u: %s", arrivals[i][0], arrivals[i][1], arrivals[i][2],
                     mistake);
    }
    print_message("3 ranks: %zu states\n", n_states);
}

static void flaws_are_found(void **state_)
{
    static const uint8_t arrivals[3] = { 2, 1, 0 };
    size_t n_states = 0;

    (void)state_;
    for (int flaw = DEAF; flaw <= ANY_RECORD; flaw++) {
        const char *mistake = explore(flaw == ANY_RECORD ? 3 : 2, arrivals, flaw, &n_states);

        if (!mistake)
            fail_msg("flaw %d is not found", flaw);
        print_message("flaw %d: %s\n", flaw, mistake);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_runs_when_one_has_work),
        cmocka_unit_test(a_group_ends_when_all_have_finished),
        cmocka_unit_test(the_maximum_and_the_least_decide),
        cmocka_unit_test(the_prefill_budget_is_shared),
        cmocka_unit_test(rows_are_bounded),
        cmocka_unit_test(a_budget_below_one_each_starves_nobody),
        cmocka_unit_test(nobody_is_held_up_where_nobody_decodes),
        cmocka_unit_test(a_record_is_due_right_after_launch),
        cmocka_unit_test(two_ranks_exhaustively),
        cmocka_unit_test(three_ranks_exhaustively),
        cmocka_unit_test(flaws_are_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
