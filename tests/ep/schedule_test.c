/* A schedule explorer: all ranks in one process over a simulated network, one running at a time. A
 * message stays in flight until the explorer lands it, in any order; its source is read only then,
 * so memory that is used again too early shows. Between any two calls any rank may be held up.
 * Everything follows from a seed, which a failure prints. ctest: sanitize */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "ep/ep_case.h"
#include "fabric/fabric.h"

enum { MAX_RANKS = 8, MAX_IN_FLIGHT = 4096 };

struct message {
    uint32_t from, to;
    uint32_t targets; /* of a put for a node: mask of ranks that it signals; 0: it signals to */
    yard_sym dst, sig;
    const void *src;
    size_t n_bytes;
    uint64_t value;
};

struct world {
    uint32_t n_ranks, per_node;
    uint64_t random;
    uint32_t slow; /* this rank runs, and its messages land, only when nothing else can happen */
    uint8_t *heap[MAX_RANKS];
    struct message flight[MAX_IN_FLIGHT];
    uint32_t n_flight;

    pthread_mutex_t lock;
    pthread_cond_t turn;
    uint32_t running; /* rank that may run; n_ranks: the explorer */
    bool waiting[MAX_RANKS], done[MAX_RANKS];
    yard_sym wait_sig[MAX_RANKS];
    uint64_t wait_seen[MAX_RANKS];
};

struct sim_rank {
    struct world *w;
    uint32_t rank;
    const ep_case *c;
    char failure[600];
};

static uint32_t pick(struct world *w, uint32_t n)
{
    w->random = case_mix(w->random);
    return (uint32_t)(w->random % n);
}

/* Gives the turn to the explorer, and takes it back. */
static void yield(struct sim_rank *self)
{
    struct world *w = self->w;

    w->running = w->n_ranks;
    pthread_cond_broadcast(&w->turn);
    while (w->running != self->rank)
        pthread_cond_wait(&w->turn, &w->lock);
}

static yard_status fly(struct world *w, struct message m)
{
    if (w->n_flight == MAX_IN_FLIGHT)
        return YARD_ENOMEM;
    w->flight[w->n_flight++] = m;
    return YARD_OK;
}

static yard_status sim_put(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                           yard_sym sig, uint64_t value, uint32_t peer)
{
    struct sim_rank *self = yard_fabric_impl(f);

    return fly(self->w, (struct message){ self->rank, peer, 0, dst, sig, src, n_bytes, value });
}

static yard_status sim_put_node(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                                uint32_t relay, yard_sym sig, uint64_t value,
                                const uint32_t *targets, uint32_t n_targets)
{
    struct sim_rank *self = yard_fabric_impl(f);
    struct message m = { self->rank, relay, 0, dst, sig, src, n_bytes, value };

    for (uint32_t i = 0; i < n_targets; i++)
        m.targets |= 1u << targets[i];
    return fly(self->w, m);
}

static const void *sim_view(const yard_fabric *f, uint32_t rank)
{
    const struct sim_rank *self = yard_fabric_impl(f);

    return self->w->heap[rank];
}

/* The signals of a put for a node fly on, one by one: any time may pass between them. */
static void land(struct world *w, uint32_t i)
{
    const struct message m = w->flight[i];

    w->flight[i] = w->flight[--w->n_flight];
    if (m.n_bytes)
        memcpy(w->heap[m.to] + m.dst, m.src, m.n_bytes);
    if (!m.targets)
        *(uint64_t *)(void *)(w->heap[m.to] + m.sig) += m.value;
    for (uint32_t r = 0; r < w->n_ranks; r++)
        if (m.targets >> r & 1 &&
            fly(w,
                (struct message){
                    .from = m.from, .to = r, .sig = m.sig, .src = w->heap[r], .value = m.value }) !=
                YARD_OK)
            abort();
}

static void sim_sleep(yard_fabric *f, yard_sym sig, uint64_t seen, yard_deadline until)
{
    struct sim_rank *self = yard_fabric_impl(f);

    (void)until;
    self->w->waiting[self->rank] = true;
    self->w->wait_sig[self->rank] = sig;
    self->w->wait_seen[self->rank] = seen;
    yield(self);
    self->w->waiting[self->rank] = false;
}

static void sim_wake(yard_fabric *f)
{
    (void)f;
}

static void sim_close(yard_fabric *f)
{
    (void)f;
}

static const yard_fabric_ops sim_ops = { .name = "simulated",
                                         .copies = false,
                                         .close = sim_close,
                                         .put_signal = sim_put,
                                         .put_signal_node = sim_put_node,
                                         .view = sim_view,
                                         .sleep = sim_sleep,
                                         .wake = sim_wake };

static bool can_run(const struct world *w, uint32_t rank)
{
    if (w->done[rank])
        return false;
    return !w->waiting[rank] ||
           *(uint64_t *)(void *)(w->heap[rank] + w->wait_sig[rank]) != w->wait_seen[rank];
}

/* One event: a message lands, or a rank runs until it waits or passes a point. False when nothing
 * can happen: all are done, or all wait for ever. */
static bool one_event(struct world *w)
{
    uint32_t choice[MAX_IN_FLIGHT + MAX_RANKS], n = 0;

    for (int pass = 0; pass < 2 && n == 0; pass++) { /* the slow rank's only in the second */
        for (uint32_t i = 0; i < w->n_flight; i++)
            if (pass == 1 || (w->flight[i].from != w->slow && w->flight[i].to != w->slow))
                choice[n++] = i;
        for (uint32_t r = 0; r < w->n_ranks; r++)
            if (can_run(w, r) && (pass == 1 || r != w->slow))
                choice[n++] = MAX_IN_FLIGHT + r;
    }
    if (n == 0)
        return false;
    const uint32_t c = choice[pick(w, n)];
    if (c < MAX_IN_FLIGHT) {
        land(w, c);
        return true;
    }
    w->running = c - MAX_IN_FLIGHT;
    pthread_cond_broadcast(&w->turn);
    while (w->running != w->n_ranks)
        pthread_cond_wait(&w->turn, &w->lock);
    return true;
}

static void point(void *ctx)
{
    yield(ctx);
}

static void run_case_on(struct sim_rank *self, yard_fabric *fabric)
{
    ep_case c = *self->c;
    case_rank r;
    yard_ep *ep = NULL;
    yard_error err = { 0 };

    c.config.fabric = fabric;
    c.config.timeout_us = 3600000000u;
    if (yard_ep_create(&ep, &c.config, &err) != YARD_OK) {
        snprintf(self->failure, sizeof(self->failure), "%s", err.message);
        return;
    }
    case_open(&r, &c, ep);
    r.point = point;
    r.point_ctx = self;
    if (!case_run(&r))
        snprintf(self->failure, sizeof(self->failure), "%s", r.failure);
    case_close(&r);
    yard_ep_destroy(ep);
}

static void *rank_main(void *arg)
{
    struct sim_rank *self = arg;
    struct world *w = self->w;
    yard_fabric *fabric = NULL;
    yard_ep_capacity capacity = { 0 };

    pthread_mutex_lock(&w->lock);
    while (w->running != self->rank)
        pthread_cond_wait(&w->turn, &w->lock);
    yard_ep_capacity_of(&self->c->config, w->n_ranks, &capacity, NULL);
    if (yard_fabric_create_custom(&fabric, &sim_ops, self->rank, w->n_ranks, w->heap[self->rank],
                                  capacity.heap_bytes, self, NULL) == YARD_OK) {
        yard_fabric_set_nodes(fabric, w->per_node);
        run_case_on(self, fabric);
    }
    yard_fabric_destroy(fabric);
    w->done[self->rank] = true;
    w->running = w->n_ranks;
    pthread_cond_broadcast(&w->turn);
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Runs one case under one schedule; "" or what went wrong. */
static void explore(const ep_case *c, uint64_t schedule, char *failure, size_t n_bytes)
{
    static struct world w;
    struct sim_rank ranks[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    yard_ep_capacity capacity = { 0 };

    memset(&w, 0, sizeof(w));
    w.n_ranks = w.running = c->n_ranks;
    w.per_node = c->n_ranks < 6 ? 2 : 3;
    w.random = schedule;
    w.slow = pick(&w, c->n_ranks + 1); /* n_ranks: nobody */
    pthread_mutex_init(&w.lock, NULL);
    pthread_cond_init(&w.turn, NULL);
    yard_ep_capacity_of(&c->config, c->n_ranks, &capacity, NULL);
    failure[0] = '\0';
    pthread_mutex_lock(&w.lock);
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        w.heap[r] = yard_alloc(capacity.heap_bytes);
        ranks[r] = (struct sim_rank){ .w = &w, .rank = r, .c = c };
        pthread_create(&threads[r], NULL, rank_main, &ranks[r]);
    }
    while (one_event(&w))
        ;
    for (uint32_t r = 0; r < c->n_ranks; r++)
        if (!w.done[r]) { /* its thread cannot be ended: the process has to */
            print_error("schedule %llu: rank %u waits for ever: %s\n", (unsigned long long)schedule,
                        r, case_describe(c));
            abort();
        }
    pthread_mutex_unlock(&w.lock);
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        pthread_join(threads[r], NULL);
        if (ranks[r].failure[0] && !failure[0])
            snprintf(failure, n_bytes, "schedule %llu: %s: %s", (unsigned long long)schedule,
                     ranks[r].failure, case_describe(c));
        free(w.heap[r]);
    }
}

static uint32_t schedules(uint32_t otherwise)
{
    const char *text = getenv("YARD_TEST_SCHEDULES");

    return text ? (uint32_t)atoi(text) : otherwise;
}

static void any_schedule_gives_the_definition(void **state)
{
    const uint32_t n = schedules(600);
    char failure[1200];

    (void)state;
    for (uint32_t i = 0; i < n; i++) {
        ep_case c = case_from_seed(i, 1 + i % 5, 40);

        c.config.node_copies = i % 3 == 0 && !case_in_place(&c);
        explore(&c, i, failure, sizeof(failure));
        if (failure[0])
            fail_msg("%s", failure);
    }
}

/* The same inputs give the same bits at any timing: covered above bit for bit; here one dense case
 * with two rounds in flight under many schedules. */
static void many_schedules_of_one_case(void **state)
{
    const uint32_t n = schedules(400);
    ep_case c = case_from_seed(5, 4, 20);
    char failure[1200];

    (void)state;
    c.config.tp = 2;
    c.config.n_rounds = 2;
    c.config.max_tokens = 3;
    c.n_steps = 6;
    c.crowd = 2;
    c.taste = 0;
    c.config.mode = YARD_EP_EXACT;
    for (uint32_t i = 0; i < n; i++) {
        c.config.expert_y_in_place = i % 2;
        c.config.layout = i / 2 % 2 ? YARD_EP_FLAT_IN_PLACE : YARD_EP_EXPERT_MAJOR;
        explore(&c, 100000 + i, failure, sizeof(failure));
        if (failure[0])
            fail_msg("%s", failure);
    }
}

/* Rows of several sources through relays, two rounds in flight, every rank of a node in need of
 * every row. */
static void many_schedules_of_node_copies(void **state)
{
    const uint32_t n = schedules(400);
    char failure[1200];

    (void)state;
    for (uint32_t i = 0; i < n; i++) {
        ep_case c = case_from_seed(7, i % 2 ? 4 : 6, 20);

        c.config.tp = i % 4 < 2 ? 1 : 2;
        c.config.n_experts = c.config.top_k = c.n_ranks;
        c.config.n_rounds = 2;
        c.config.max_tokens = 2;
        c.config.node_copies = true;
        c.config.layout = (yard_ep_layout)(i % 2); /* not in place */
        c.n_steps = 6;
        c.crowd = i % 3 ? 2 : 0;
        c.taste = i % 3 ? 0 : 2;
        explore(&c, 200000 + i, failure, sizeof(failure));
        if (failure[0])
            fail_msg("%s", failure);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_schedule_gives_the_definition),
        cmocka_unit_test(many_schedules_of_one_case),
        cmocka_unit_test(many_schedules_of_node_copies),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
