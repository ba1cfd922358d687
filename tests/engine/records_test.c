/* A schedule explorer for step agreement: the ranks' own code (records.c, agree.c) in one process
 * over a simulated network, one rank running at a time. Messages land in any order, as late as can
 * be; their source is read only then. Requests arrive, and reach the ranks of an instance, at any
 * moment; any rank may be held up between any two calls. Everything follows from a seed, which a
 * failure prints. Proved: no two ranks derive different plans, no step runs without a peer, no
 * wake-up is lost, replicas take the same requests at the same step. ctest: sanitize */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "engine/records.h"

enum { MAX_RANKS = 6, MAX_FLIGHT = 256, MAX_COMMANDS = 12, MAX_STEPS = 400, MAX_EVENTS = 100000 };

typedef struct message {
    uint32_t from, to;
    yard_sym dst, sig;
    const void *src;
    size_t n_bytes;
    uint64_t value;
} message;

/* A request: prompt tokens to compute, then tokens to generate. */
typedef struct command {
    uint32_t prompt, output;
} command;

struct sim_rank;

/* Why a rank does not run. */
typedef enum waits { RUNS, WAITS_WORD, WAITS_ANY, WAITS_STEP, DONE } waits;

typedef struct world {
    yard_agree_config config;
    bool decodes; /* rank 0 has a token in every step: the budget counts */
    uint64_t random;
    uint32_t slow; /* this rank runs, and its messages land, only when nothing else can happen */
    uint8_t *heap[MAX_RANKS];
    message flight[MAX_FLIGHT];
    uint32_t n_flight;

    command commands[MAX_RANKS][MAX_COMMANDS]; /* [instance] */
    uint32_t n_commands[MAX_RANKS];            /* [instance] */
    uint32_t n_heard[MAX_RANKS];               /* [rank] */
    bool over;                                 /* no more requests come, all have slept */

    yard_step_plan plans[MAX_STEPS];      /* as the first rank derived it */
    uint32_t n_planned[MAX_STEPS];        /* ranks */
    uint32_t n_launched[MAX_STEPS];       /* ranks */
    uint32_t prefill[MAX_STEPS];          /* tokens of all instances */
    uint64_t state[MAX_STEPS][MAX_RANKS]; /* [instance] before the step, as its first rank had it */

    pthread_mutex_t lock;
    pthread_cond_t turn[MAX_RANKS + 1]; /* [n_ranks]: the explorer's */
    uint32_t running;                   /* rank that may run; n_ranks: the explorer */
    struct sim_rank *ranks;
    char failure[300];
} world;

typedef struct sim_rank {
    world *w;
    uint32_t rank, instance;
    yard_fabric *fabric;
    waits state;
    yard_sym wait_sig;
    uint64_t wait_seen;
    uint64_t step; /* that runs */

    uint64_t n_taken;        /* commands */
    uint32_t prompt, output; /* left to compute */
} sim_rank;

static void wrong(world *w, const char *format, ...)
{
    va_list args;

    if (w->failure[0])
        return;
    va_start(args, format);
    vsnprintf(w->failure, sizeof(w->failure), format, args);
    va_end(args);
}

static uint32_t pick(world *w, uint32_t n)
{
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((w->random >> 33) % n);
}

static void give_turn(world *w, uint32_t to)
{
    w->running = to;
    pthread_cond_signal(&w->turn[to]);
}

static void await_turn(world *w, uint32_t me)
{
    while (w->running != me)
        pthread_cond_wait(&w->turn[me], &w->lock);
}

/* Gives the turn to the explorer, and takes it back. */
static void yield_as(sim_rank *self, waits state)
{
    world *w = self->w;

    self->state = state;
    give_turn(w, w->config.n_ranks);
    await_turn(w, self->rank);
    self->state = RUNS;
}

static yard_status sim_put(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                           yard_sym sig, uint64_t value, uint32_t peer)
{
    sim_rank *self = yard_fabric_impl(f);
    world *w = self->w;

    if (w->n_flight == MAX_FLIGHT)
        return YARD_ENOMEM;
    w->flight[w->n_flight++] = (message){ self->rank, peer, dst, sig, src, n_bytes, value };
    return YARD_OK;
}

static void land(world *w, uint32_t i)
{
    const message m = w->flight[i];

    w->flight[i] = w->flight[--w->n_flight];
    memcpy(w->heap[m.to] + m.dst, m.src, m.n_bytes);
    *(uint64_t *)(void *)(w->heap[m.to] + m.sig) += m.value;
}

static void sim_sleep(yard_fabric *f, yard_sym sig, uint64_t seen, yard_deadline until)
{
    sim_rank *self = yard_fabric_impl(f);

    (void)until;
    self->wait_sig = sig;
    self->wait_seen = seen;
    yield_as(self, sig == YARD_ANY_SIGNAL ? WAITS_ANY : WAITS_WORD);
}

static const yard_fabric_ops sim_ops = {
    .name = "simulated", .copies = false, .put_signal = sim_put, .sleep = sim_sleep
};

static bool has_work(void *ctx)
{
    const sim_rank *self = ctx;

    return self->prompt > 0 || self->output > 0 || self->w->n_heard[self->rank] > self->n_taken ||
           self->w->over;
}

/* Bounds of the next step, as the engine knows them before this one has run. */
static yard_step_record record_of(const sim_rank *self)
{
    const world *w = self->w;
    yard_step_record r = { .n_commands = w->n_heard[self->rank],
                           .n_tokens = self->output > 0 || (w->decodes && self->rank == 0),
                           .prefill_tokens = self->prompt,
                           .mtp_passes = self->instance,
                           .schedule = self->rank % 3 };

    for (uint64_t c = self->n_taken; c < r.n_commands; c++)
        r.prefill_tokens += w->commands[self->instance][c].prompt;
    r.has_work = self->prompt > 0 || self->output > 0 || r.n_commands > self->n_taken;
    return r;
}

static void check_plan(sim_rank *self, const yard_step_plan *p)
{
    world *w = self->w;
    yard_step_plan *first = &w->plans[p->step];
    const uint64_t state = self->n_taken << 40 | (uint64_t)self->prompt << 20 | self->output;

    if (w->n_planned[p->step]++ == 0)
        *first = *p;
    if (first->runs != p->runs || first->schedule != p->schedule ||
        first->n_rounds != p->n_rounds || first->mtp_passes != p->mtp_passes ||
        first->generation != p->generation)
        wrong(w, "step %llu: rank %u has another plan", (unsigned long long)p->step, self->rank);
    if (self->rank % w->config.tp == 0) {
        w->prefill[p->step] += p->prefill_tokens;
        if (w->decodes && w->prefill[p->step] > w->config.prefill_budget)
            wrong(w, "step %llu: %u prompt tokens", (unsigned long long)p->step,
                  w->prefill[p->step]);
    }
    if (w->state[p->step][self->instance] == 0)
        w->state[p->step][self->instance] = state + 1;
    if (w->state[p->step][self->instance] != state + 1)
        wrong(w, "step %llu: replica %u differs", (unsigned long long)p->step, self->rank);
    if (p->n_commands > w->n_heard[self->rank])
        wrong(w, "step %llu: rank %u is to take what it has not heard", (unsigned long long)p->step,
              self->rank);
}

static void take_commands(sim_rank *self, uint64_t n_commands)
{
    for (; self->n_taken < n_commands; self->n_taken++) {
        const command *c = &self->w->commands[self->instance][self->n_taken];

        self->prompt += c->prompt;
        self->output += c->output;
    }
}

/* A step is collective: it ends when all have launched it. */
static void run_step(sim_rank *self, const yard_step_plan *p)
{
    world *w = self->w;
    const uint32_t n = self->prompt < p->prefill_tokens ? self->prompt : p->prefill_tokens;

    w->n_launched[p->step]++;
    self->step = p->step;
    while (w->n_launched[p->step] < w->config.n_ranks)
        yield_as(self, WAITS_STEP);
    if (self->prompt == 0 && self->output > 0)
        self->output--;
    self->prompt -= n;
}

static void run_rank(sim_rank *self, yard_records *r)
{
    world *w = self->w;
    yard_error err = { 0 };
    yard_status st = YARD_OK;

    while (st == YARD_OK && !w->failure[0]) {
        yard_step_record mine = record_of(self);
        yard_step_plan plan;

        st = yard_records_post(r, &mine, &err);
        yield_as(self, RUNS);
        if (st == YARD_OK && yard_records_asleep(r)) {
            if (w->over)
                return;
            st = yard_records_sleep(r, has_work, self, UINT64_MAX, &err);
            continue;
        }
        if (st == YARD_OK)
            st = yard_records_plan(r, UINT64_MAX, &plan, &err);
        if (st != YARD_OK || w->failure[0])
            break;
        if (plan.step >= MAX_STEPS - 1) {
            wrong(w, "no end");
            break;
        }
        check_plan(self, &plan);
        take_commands(self, plan.n_commands);
        mine = record_of(self);
        yield_as(self, RUNS);
        st = yard_records_post(r, &mine, &err);
        if (plan.runs)
            run_step(self, &plan);
    }
    if (st != YARD_OK)
        wrong(w, "%s", err.message);
}

static void *rank_main(void *arg)
{
    sim_rank *self = arg;
    world *w = self->w;
    yard_records r = { 0 };

    pthread_mutex_lock(&w->lock);
    await_turn(w, self->rank);
    if (yard_records_open(&r, &w->config, self->fabric, 64, self->rank, NULL) == YARD_OK)
        run_rank(self, &r);
    yard_records_close(&r);
    self->state = DONE;
    give_turn(w, w->config.n_ranks);
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

static bool can_run(const world *w, uint32_t rank)
{
    const sim_rank *s = &w->ranks[rank];

    switch (s->state) {
    case RUNS:
        return true;
    case WAITS_WORD:
    case WAITS_ANY:
        return yard_wait_over(s->fabric, s->wait_sig, s->wait_seen);
    case WAITS_STEP:
        return w->n_launched[s->step] == w->config.n_ranks;
    default:
        return false;
    }
}

enum { LAND = 0, RUN = 1000, HEAR = 2000 };

/* Everything that can happen next; the slow rank's only when nothing else can. */
static uint32_t choices(const world *w, uint32_t *choice, bool also_slow)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < w->n_flight; i++)
        if (also_slow || (w->flight[i].from != w->slow && w->flight[i].to != w->slow))
            choice[n++] = LAND + i;
    for (uint32_t r = 0; r < w->config.n_ranks; r++) {
        if (can_run(w, r) && (also_slow || r != w->slow))
            choice[n++] = RUN + r;
        if (w->n_heard[r] < w->n_commands[w->ranks[r].instance] && (also_slow || r != w->slow))
            choice[n++] = HEAR + r;
    }
    return n;
}

static bool one_event(world *w)
{
    uint32_t choice[MAX_FLIGHT + 2 * MAX_RANKS];
    uint32_t n = choices(w, choice, false), c;

    if (n == 0)
        n = choices(w, choice, true);
    if (n == 0 || w->failure[0])
        return false;
    c = choice[pick(w, n)];
    if (c >= HEAR) {
        w->n_heard[c - HEAR]++;
    } else if (c < RUN) {
        land(w, c - LAND);
    } else {
        give_turn(w, c - RUN);
        await_turn(w, w->config.n_ranks);
    }
    return true;
}

/* Nothing can happen any more: all must be asleep with nothing left to do. */
static void check_rest(world *w)
{
    for (uint32_t r = 0; r < w->config.n_ranks; r++) {
        const sim_rank *s = &w->ranks[r];

        if (s->state == WAITS_STEP)
            wrong(w, "step %llu: a peer is missing", (unsigned long long)s->step);
        else if (s->state != WAITS_ANY)
            wrong(w, "rank %u waits for ever", r);
        else if (s->n_taken < w->n_commands[s->instance] || s->prompt || s->output)
            wrong(w, "rank %u sleeps on work", r);
    }
}

static void make_work(world *w)
{
    const uint32_t dp = w->config.n_ranks / w->config.tp;

    for (uint32_t i = 0; i < dp; i++) {
        w->n_commands[i] = pick(w, 5);
        for (uint32_t c = 0; c < w->n_commands[i]; c++)
            w->commands[i][c] = (command){ pick(w, 6), 1 + pick(w, 3) };
    }
}

static void start(world *w, pthread_t *threads)
{
    const size_t heap_bytes = 64 + yard_records_heap_bytes(w->config.n_ranks);

    for (uint32_t r = 0; r < w->config.n_ranks; r++) {
        w->heap[r] = yard_alloc(heap_bytes);
        w->ranks[r] = (sim_rank){ .w = w, .rank = r, .instance = r / w->config.tp };
        assert_int_equal(yard_fabric_create_custom(&w->ranks[r].fabric, &sim_ops, r,
                                                   w->config.n_ranks, w->heap[r], heap_bytes,
                                                   &w->ranks[r], NULL),
                         YARD_OK);
    }
    for (uint32_t r = 0; r < w->config.n_ranks; r++)
        pthread_create(&threads[r], NULL, rank_main, &w->ranks[r]);
}

/* One schedule; returns how many steps ran. */
static uint64_t explore(uint64_t seed)
{
    static world w;
    sim_rank ranks[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    uint64_t n_steps = 0;
    uint32_t n_events = 0;

    memset(&w, 0, sizeof(w));
    w.random = seed * 0x9e3779b97f4a7c15u + 1;
    w.config.tp = 1 + pick(&w, 2);
    w.config.n_ranks = w.config.tp * (1 + pick(&w, MAX_RANKS / w.config.tp));
    w.config.prefill_budget = 1 + pick(&w, 8);
    w.decodes = pick(&w, 4) > 0;
    w.slow = pick(&w, w.config.n_ranks + 1); /* n_ranks: nobody */
    w.running = w.config.n_ranks;
    w.ranks = ranks;
    make_work(&w);
    pthread_mutex_init(&w.lock, NULL);
    for (uint32_t r = 0; r <= MAX_RANKS; r++)
        pthread_cond_init(&w.turn[r], NULL);
    pthread_mutex_lock(&w.lock);
    start(&w, threads);
    while (one_event(&w))
        if (++n_events == MAX_EVENTS)
            wrong(&w, "no end");
    if (!w.failure[0])
        check_rest(&w);
    if (w.failure[0]) { /* ranks that wait for ever cannot be ended: the process has to */
        print_error("schedule %llu, %u ranks, tp %u: %s\n", (unsigned long long)seed,
                    w.config.n_ranks, w.config.tp, w.failure);
        exit(1);
    }
    w.over = true; /* wakes all, for the last time */
    while (one_event(&w))
        ;
    pthread_mutex_unlock(&w.lock);
    for (uint32_t r = 0; r < w.config.n_ranks; r++) {
        pthread_join(threads[r], NULL);
        yard_fabric_destroy(ranks[r].fabric);
        free(w.heap[r]);
    }
    for (uint32_t s = 0; s < MAX_STEPS; s++)
        n_steps += w.plans[s].runs;
    return n_steps;
}

static void any_schedule_agrees(void **state)
{
    const char *text = getenv("YARD_TEST_SCHEDULES");
    const uint32_t n = text ? (uint32_t)atoi(text) : 2000;
    uint64_t n_steps = 0;

    (void)state;
    for (uint32_t i = 0; i < n; i++)
        n_steps += explore(i);
    print_message("%u schedules, %llu steps\n", n, (unsigned long long)n_steps);
    assert_true(n_steps > n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_schedule_agrees),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
