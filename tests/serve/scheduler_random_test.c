/* Random sequences of everything that can happen, against a model that keeps each request's state
 * apart and chooses by brute force: every accepted request ends exactly once, for the right reason,
 * and every choice is the least. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "serve/serve.h"

enum {
    N_SEEDS = 4000,
    N_EVENTS = 250,
    N_INSTANCES = 5,
    N_PREFIXES = 3,
    N_PAGES = 6,
    MAX_QUEUED = 6,
    MAX_ATTEMPTS = 3,
    STALE_US = 50
};

typedef enum where { QUEUED, SENT, ENDING, ENDED } where;

typedef struct model_request {
    uint64_t id, deadline_us, serial;
    where at;
    uint32_t prefix, n_prompt, max_new, attempt, instance, avoid;
    uint64_t prompt_tokens, output; /* as expected when sent */
    bool started;
    yard_end_reason reason;
} model_request;

typedef struct model_instance {
    bool up, paused;
    uint32_t max_requests;
    uint64_t heard_us, n_sent;
    yard_engine_report report;
    bool held[N_PREFIXES][N_PAGES], expected[N_PREFIXES][N_PAGES];
} model_instance;

typedef struct world {
    yard_scheduler *s;
    unsigned int random;
    uint32_t seed;
    int event;
    uint64_t now_us;
    double mean_output;
    model_request requests[N_EVENTS]; /* in order of arrival */
    uint32_t n_requests;
    model_instance instances[N_INSTANCES];
} world;

static uint32_t any(world *w, uint32_t n)
{
    return (uint32_t)rand_r(&w->random) % n;
}

#define CHECK(w, truth)                                                                            \
    do {                                                                                           \
        if (!(truth))                                                                              \
            fail_msg("seed %u, event %d: not true: %s", (w)->seed, (w)->event, #truth);            \
    } while (0)

static yard_page_hash page_of(uint32_t prefix, uint32_t i)
{
    return (yard_page_hash){ { prefix * 1000 + i, i } };
}

static uint32_t pages_of(const model_request *r)
{
    return (r->n_prompt - 1) / YARD_PAGE_TOKENS;
}

static bool takes_requests(const world *w, const model_instance *x)
{
    uint32_t n = x->report.n_requests;

    for (uint32_t i = 0; i < w->n_requests; i++) {
        const model_request *r = &w->requests[i];
        n += r->at == SENT && r->instance == x - w->instances && r->serial > x->report.n_seen;
    }
    return x->up && !x->paused && w->now_us - x->heard_us <= STALE_US && n < x->max_requests;
}

static uint32_t cached_at(const model_request *r, const model_instance *x)
{
    uint32_t n = 0;

    while (n < pages_of(r) && (x->held[r->prefix][n] || x->expected[r->prefix][n]))
        n++;
    return n * YARD_PAGE_TOKENS;
}

static uint64_t work_of(const world *w, const model_instance *x)
{
    uint64_t work = x->report.prompt_tokens + x->report.n_requests * (uint64_t)w->mean_output;

    for (uint32_t i = 0; i < w->n_requests; i++) {
        const model_request *r = &w->requests[i];
        if (r->at == SENT && r->instance == x - w->instances && r->serial > x->report.n_seen)
            work += r->prompt_tokens + r->output;
    }
    return work;
}

static uint64_t running_tokens_of(const world *w, const model_instance *x)
{
    uint64_t n = x->report.running_tokens;

    for (uint32_t i = 0; i < w->n_requests; i++) {
        const model_request *r = &w->requests[i];
        if (r->at == SENT && r->instance == x - w->instances && r->serial > x->report.n_seen)
            n += r->n_prompt;
    }
    return n;
}

static uint64_t cost_at(const world *w, const model_request *new, const model_instance *x)
{
    const uint64_t uncached = new->n_prompt - cached_at(new, x), work = work_of(w, x);
    uint64_t line = x->report.prompt_tokens + x->report.n_requests;

    for (uint32_t i = 0; i < w->n_requests; i++) {
        const model_request *r = &w->requests[i];
        if (r->at == SENT && r->instance == x - w->instances && r->serial > x->report.n_seen)
            line += r->prompt_tokens + 1;
    }
    return line + uncached + 2 * (uncached < work ? uncached : work);
}

/* NULL when none has room. */
static model_instance *choose(world *w, const model_request *r)
{
    model_instance *best = NULL;
    uint64_t least[3] = { 0 };

    for (uint32_t i = 0; i < N_INSTANCES; i++) {
        model_instance *x = &w->instances[i];
        const uint64_t key[3] = { i == r->avoid, cost_at(w, r, x), running_tokens_of(w, x) };
        int k = 0;

        if (!takes_requests(w, x))
            continue;
        while (best && k < 3 && key[k] == least[k])
            k++;
        if (best && (k == 3 || key[k] > least[k]))
            continue;
        best = x;
        memcpy(least, key, sizeof(least));
    }
    return best;
}

static void expect_pages(world *w, const model_request *r, bool expected)
{
    for (uint32_t i = 0; i < pages_of(r); i++)
        w->instances[r->instance].expected[r->prefix][i] = expected;
}

static void leave_instance(world *w, model_request *r)
{
    if (r->at == SENT && !r->started)
        expect_pages(w, r, false);
}

static void ends(world *w, model_request *r, yard_end_reason reason, uint32_t instance)
{
    leave_instance(w, r);
    r->at = ENDING;
    r->reason = reason;
    r->instance = instance;
}

static void tries_again(world *w, model_request *r, yard_end_reason reason)
{
    if (r->started || r->attempt == MAX_ATTEMPTS) {
        ends(w, r, reason, YARD_NO_INSTANCE);
        return;
    }
    leave_instance(w, r);
    r->at = QUEUED;
    r->instance = YARD_NO_INSTANCE;
}

static void pass_deadlines(world *w)
{
    for (uint32_t i = 0; i < w->n_requests; i++) {
        model_request *r = &w->requests[i];
        if (r->at <= SENT && r->deadline_us <= w->now_us)
            ends(w, r, YARD_END_DEADLINE, r->instance);
    }
}

static uint32_t count(const world *w, where at)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < w->n_requests; i++)
        n += w->requests[i].at == at;
    return n;
}

static model_request *oldest_queued(world *w)
{
    for (uint32_t i = 0; i < w->n_requests; i++)
        if (w->requests[i].at == QUEUED)
            return &w->requests[i];
    return NULL;
}

static model_request *find(world *w, uint64_t id)
{
    for (uint32_t i = 0; i < w->n_requests; i++)
        if (w->requests[i].id == id)
            return &w->requests[i];
    return NULL;
}

static void check_end(world *w, const yard_action *a)
{
    model_request *r = find(w, a->id);

    CHECK(w, r && r->at == ENDING);
    CHECK(w, a->reason == r->reason && a->instance == r->instance && a->attempt == r->attempt);
    r->at = ENDED;
}

static void check_send(world *w, const yard_action *a)
{
    model_request *r = oldest_queued(w);
    model_instance *x;

    CHECK(w, count(w, ENDING) == 0);
    CHECK(w, r && a->id == r->id);
    x = choose(w, r);
    CHECK(w, x && a->instance == x - w->instances);
    CHECK(w, a->n_cached == cached_at(r, x) && a->n_cached < r->n_prompt);
    r->at = SENT;
    r->attempt++;
    CHECK(w, a->attempt == r->attempt && r->attempt <= MAX_ATTEMPTS);
    r->instance = a->instance;
    r->serial = ++x->n_sent;
    r->prompt_tokens = r->n_prompt - a->n_cached;
    r->output = r->max_new < (uint64_t)w->mean_output ? r->max_new : (uint64_t)w->mean_output;
    expect_pages(w, r, true);
}

static void take_actions(world *w)
{
    yard_action a;

    pass_deadlines(w);
    while (yard_scheduler_next(w->s, w->now_us, &a)) {
        if (a.kind == YARD_ACTION_END)
            check_end(w, &a);
        else
            check_send(w, &a);
    }
    CHECK(w, count(w, ENDING) == 0);
    CHECK(w, !oldest_queued(w) || !choose(w, oldest_queued(w)));
    for (uint32_t i = 0; i < w->n_requests; i++)
        CHECK(w, w->requests[i].at == ENDED ||
                     yard_scheduler_wake_us(w->s) <= w->requests[i].deadline_us);
}

static void submit(world *w)
{
    model_request r = { .at = QUEUED,
                        .deadline_us = any(w, 3) ? UINT64_MAX : w->now_us + any(w, 200),
                        .prefix = any(w, N_PREFIXES),
                        .n_prompt = 1 + any(w, N_PAGES * YARD_PAGE_TOKENS),
                        .max_new = 1 + any(w, 300),
                        .instance = YARD_NO_INSTANCE,
                        .avoid = YARD_NO_INSTANCE };
    yard_page_hash page[N_PAGES];
    yard_status st;

    for (uint32_t i = 0; i < N_PAGES; i++)
        page[i] = page_of(r.prefix, i);
    st = yard_scheduler_submit(w->s,
                               &(yard_scheduler_request){ .n_prompt = r.n_prompt,
                                                          .page = page,
                                                          .max_new_tokens = r.max_new,
                                                          .deadline_us = r.deadline_us },
                               &r.id, NULL);
    if (count(w, QUEUED) >= MAX_QUEUED) {
        CHECK(w, st == YARD_EAGAIN);
        return;
    }
    CHECK(w, st == YARD_OK && r.id != 0 && !find(w, r.id));
    w->requests[w->n_requests++] = r;
}

/* Words about any request of the past and any attempt; only those of the present count. */
static void hear_of_request(world *w)
{
    model_request *r;
    uint32_t attempt;
    bool now;

    if (w->n_requests == 0)
        return;
    r = &w->requests[any(w, 2) ? any(w, w->n_requests) : w->n_requests - 1];
    attempt = any(w, 4) ? r->attempt : any(w, MAX_ATTEMPTS + 1);
    now = r->at == SENT && attempt == r->attempt;
    switch (any(w, 4)) {
    case 0:
        CHECK(w, yard_scheduler_started(w->s, r->id, attempt) == now);
        if (now) {
            leave_instance(w, r);
            r->started = true;
        }
        break;
    case 1: {
        const uint32_t n = any(w, 400);

        CHECK(w, yard_scheduler_finished(w->s, w->now_us, r->id, attempt, n) == now);
        if (now) {
            w->mean_output += (n - w->mean_output) / 32;
            ends(w, r, YARD_END_FINISHED, YARD_NO_INSTANCE);
        }
        break;
    }
    case 2: {
        const bool retry = any(w, 2);

        CHECK(w, yard_scheduler_failed(w->s, r->id, attempt, retry) == now);
        if (!now)
            break;
        r->avoid = r->instance;
        if (retry)
            tries_again(w, r, YARD_END_FAILED);
        else
            ends(w, r, YARD_END_FAILED, YARD_NO_INSTANCE);
        break;
    }
    default:
        now = r->at <= SENT;
        CHECK(w, yard_scheduler_abort(w->s, r->id) == now);
        if (now)
            ends(w, r, YARD_END_ABORTED, r->instance);
    }
}

static void lose(world *w, uint32_t at)
{
    for (uint32_t i = 0; i < w->n_requests; i++)
        if (w->requests[i].at == SENT && w->requests[i].instance == at)
            tries_again(w, &w->requests[i], YARD_END_INSTANCE_LOST);
    w->instances[at] = (model_instance){ 0 };
}

static void fall(world *w, uint32_t at)
{
    lose(w, at);
    yard_scheduler_instance_lost(w->s, at);
}

/* Of one that is up too: then it was lost in between. */
static void rise(world *w, uint32_t at)
{
    lose(w, at);
    w->instances[at] =
        (model_instance){ .up = true, .max_requests = 1 + any(w, 4), .heard_us = w->now_us };
    yard_scheduler_instance_up(w->s, w->now_us, at, w->instances[at].max_requests);
}

static void stop_for_now(world *w, uint32_t at)
{
    w->instances[at].paused = true;
    yard_scheduler_instance_paused(w->s, at);
}

static void report(world *w)
{
    const uint32_t at = any(w, N_INSTANCES);
    model_instance *x = &w->instances[at];
    const yard_engine_report said = { .n_seen = any(w, (uint32_t)x->n_sent + 2),
                                      .n_requests = any(w, 3),
                                      .prompt_tokens = any(w, 3) * 100,
                                      .running_tokens = any(w, 3) * 100,
                                      .step_age_us = any(w, 4) ? 0 : any(w, 100) };

    yard_scheduler_report(w->s, w->now_us, at, &said);
    if (!x->up || said.n_seen < x->report.n_seen || said.n_seen > x->n_sent)
        return;
    x->report = said;
    x->paused = false;
    if (w->now_us - said.step_age_us > x->heard_us)
        x->heard_us = w->now_us - said.step_age_us;
}

static void change_pages(world *w)
{
    const uint32_t at = any(w, N_INSTANCES), prefix = any(w, N_PREFIXES), from = any(w, N_PAGES);
    const uint32_t n = any(w, N_PAGES - from + 1), what = any(w, 8);
    model_instance *x = &w->instances[at];
    yard_page_hash page[N_PAGES];

    for (uint32_t i = 0; i < n; i++)
        page[i] = page_of(prefix, from + i);
    if (what == 0) {
        yard_scheduler_pages_unknown(w->s, at);
        memset(x->held, 0, sizeof(x->held));
        memset(x->expected, 0, sizeof(x->expected));
        return;
    }
    if (what < 6)
        yard_scheduler_pages_added(w->s, at, page, n);
    else
        yard_scheduler_pages_evicted(w->s, at, page, n);
    for (uint32_t i = 0; i < n; i++)
        x->held[prefix][from + i] = what < 6 && x->up;
}

static void happen(world *w)
{
    switch (any(w, 10)) {
    case 0:
    case 1:
    case 2:
        submit(w);
        break;
    case 3:
    case 4:
        hear_of_request(w);
        break;
    case 5:
        if (any(w, 2))
            rise(w, any(w, N_INSTANCES));
        else if (any(w, 2))
            fall(w, any(w, N_INSTANCES));
        else
            stop_for_now(w, any(w, N_INSTANCES));
        break;
    case 6:
    case 7:
        report(w);
        break;
    case 8:
        change_pages(w);
        break;
    default:
        w->now_us += any(w, 30);
    }
}

/* Whatever is left ends too, once the instances are gone and the clients as well. */
static void wind_up(world *w, yard_scheduler_stats *sum)
{
    yard_scheduler_stats stats;
    uint64_t n_ended = 0;

    for (uint32_t i = 0; i < N_INSTANCES; i++)
        fall(w, i);
    take_actions(w);
    CHECK(w, count(w, SENT) == 0);
    for (uint32_t i = 0; i < w->n_requests; i++)
        if (w->requests[i].at == QUEUED) {
            CHECK(w, yard_scheduler_abort(w->s, w->requests[i].id));
            ends(w, &w->requests[i], YARD_END_ABORTED, YARD_NO_INSTANCE);
        }
    take_actions(w);
    CHECK(w, count(w, ENDED) == w->n_requests);
    yard_scheduler_get_stats(w->s, &stats);
    for (int i = 0; i < YARD_END_REASON_COUNT; i++) {
        n_ended += stats.n_ended[i];
        sum->n_ended[i] += stats.n_ended[i];
    }
    sum->n_refused += stats.n_refused;
    sum->n_retried += stats.n_retried;
    sum->n_cached_tokens += stats.n_cached_tokens;
    CHECK(w, stats.n_accepted == w->n_requests && n_ended == w->n_requests);
    CHECK(w, stats.n_queued == 0 && stats.n_sent == 0);
    CHECK(w, stats.n_index_pages == 0);
}

static void live(world *w, uint32_t seed, yard_scheduler_stats *sum)
{
    yard_scheduler_config config = YARD_SCHEDULER_CONFIG_INIT;

    config.n_instances = N_INSTANCES;
    config.max_queued = MAX_QUEUED;
    config.max_index_pages = N_PREFIXES * N_PAGES;
    config.max_attempts = MAX_ATTEMPTS;
    config.stale_after_us = STALE_US;
    *w = (world){ .random = seed, .seed = seed, .now_us = 1000, .mean_output = 128 };
    assert_int_equal(yard_scheduler_create(&w->s, &config, NULL), YARD_OK);
    for (uint32_t i = 0; i < N_INSTANCES; i++)
        rise(w, i);
    for (w->event = 0; w->event < N_EVENTS; w->event++) {
        happen(w);
        if (any(w, 3)) /* mostly at once; sometimes several things happen first */
            take_actions(w);
    }
    wind_up(w, sum);
    yard_scheduler_destroy(w->s);
}

static void every_request_ends_exactly_once(void **state)
{
    static world w;
    yard_scheduler_stats sum = { 0 };

    (void)state;
    for (uint32_t seed = 1; seed <= N_SEEDS; seed++)
        live(&w, seed, &sum);
    /* nothing that can happen is rare */
    for (int i = 0; i < YARD_END_REASON_COUNT; i++)
        assert_true(sum.n_ended[i] > N_SEEDS);
    assert_true(sum.n_refused > N_SEEDS && sum.n_retried > N_SEEDS);
    assert_true(sum.n_cached_tokens > (uint64_t)N_SEEDS * YARD_PAGE_TOKENS);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(every_request_ends_exactly_once) };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
