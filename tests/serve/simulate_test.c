/* The scheduler against round-robin, random and pure affinity on simulated engines. Prints the
 * table of docs/serving.md; the first argument replaces the number of seeds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "traces.h"

static uint32_t n_seeds = 10;

typedef enum policy { OURS, ROUND_ROBIN, RANDOM, AFFINITY, N_POLICIES } policy;
static const char *const policy_names[] = { "switchyard", "round-robin", "random", "affinity" };

typedef struct run {
    policy policy;
    sim_request requests[TRACE_REQUESTS];
    sim_group group;
    yard_scheduler *s; /* of OURS */
    uint64_t now_us;
    trace_random random;
} run;

static void on_added(void *ctx, uint32_t instance, yard_page_hash page)
{
    yard_scheduler_pages_added(((run *)ctx)->s, instance, &page, 1);
}

static void on_evicted(void *ctx, uint32_t instance, yard_page_hash page)
{
    yard_scheduler_pages_evicted(((run *)ctx)->s, instance, &page, 1);
}

static void on_started(void *ctx, sim_request *r)
{
    assert_true(yard_scheduler_started(((run *)ctx)->s, r->id, 1));
}

static void on_finished(void *ctx, sim_request *r)
{
    run *w = ctx;

    assert_true(yard_scheduler_finished(w->s, w->now_us, r->id, 1, r->n_output));
}

static uint32_t find_request(const run *w, uint64_t id)
{
    uint32_t i = 0;

    while (w->requests[i].id != id)
        i++;
    return i;
}

static void take_actions(run *w)
{
    yard_action a;

    while (w->policy == OURS && yard_scheduler_next(w->s, w->now_us, &a))
        if (a.kind == YARD_ACTION_SEND)
            sim_send(&w->group, find_request(w, a.id), a.instance);
}

static void report_all(run *w)
{
    for (uint32_t at = 0; w->policy == OURS && at < SIM_INSTANCES; at++) {
        const yard_engine_report report = sim_report(&w->group, at);

        yard_scheduler_report(w->s, w->now_us, at, &report);
    }
}

static void submit(run *w, uint32_t i)
{
    sim_request *r = &w->requests[i];
    yard_page_hash page[128];

    assert_true(r->n_prompt / YARD_PAGE_TOKENS <= 128);
    for (uint32_t k = 0; k < r->n_prompt / YARD_PAGE_TOKENS; k++)
        page[k] = sim_hash(r, k);
    assert_int_equal(
        yard_scheduler_submit(w->s,
                              &(yard_scheduler_request){ .n_prompt = r->n_prompt,
                                                         .page = page,
                                                         .max_new_tokens = TRACE_MAX_OUTPUT,
                                                         .deadline_us = UINT64_MAX },
                              &r->id, NULL),
        YARD_OK);
    take_actions(w);
}

/* Affinity: always where the first page leads, whatever waits there. */
static void arrive(run *w, uint32_t i)
{
    switch (w->policy) {
    case OURS:
        submit(w, i);
        break;
    case ROUND_ROBIN:
        sim_send(&w->group, i, i % SIM_INSTANCES);
        break;
    case RANDOM:
        sim_send(&w->group, i, (uint32_t)(trace_next(&w->random) % SIM_INSTANCES));
        break;
    default:
        sim_send(&w->group, i, (uint32_t)(sim_hash(&w->requests[i], 0).word[0] % SIM_INSTANCES));
    }
}

static void replay(run *w)
{
    uint32_t n_arrived = 0;
    sim_step step;

    for (;;) {
        uint64_t end_us;

        if (!sim_begin_step(&w->group, &step)) {
            if (n_arrived == TRACE_REQUESTS)
                return;
            w->now_us = w->requests[n_arrived].arrival_us;
            report_all(w);
            arrive(w, n_arrived++);
            continue;
        }
        end_us = w->now_us + step.duration_us;
        while (n_arrived < TRACE_REQUESTS && w->requests[n_arrived].arrival_us < end_us) {
            w->now_us = w->requests[n_arrived].arrival_us;
            arrive(w, n_arrived++);
        }
        w->now_us = end_us;
        sim_end_step(&w->group, &step, w->now_us);
        report_all(w);
        take_actions(w);
    }
}

static void start_scheduler(run *w)
{
    yard_scheduler_config config = YARD_SCHEDULER_CONFIG_INIT;

    config.n_instances = SIM_INSTANCES;
    config.max_queued = TRACE_REQUESTS;
    assert_int_equal(yard_scheduler_create(&w->s, &config, NULL), YARD_OK);
    for (uint32_t at = 0; at < SIM_INSTANCES; at++)
        yard_scheduler_instance_up(w->s, 0, at, SIM_SLOTS);
}

typedef struct result {
    double p50_ms, p99_ms; /* time to first token, over all seeds */
    double busiest;        /* thousand tokens computed by the busiest instance, mean of seeds */
    double imbalance;      /* that over the mean instance's */
    double hit_rate;       /* cached tokens among prompt tokens */
} result;

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void add_load(const sim_group *g, result *out)
{
    double most = 0, sum = 0;

    for (uint32_t at = 0; at < SIM_INSTANCES; at++) {
        most = fmax(most, (double)g->at[at].n_computed);
        sum += (double)g->at[at].n_computed;
    }
    out->busiest += most / 1000 / n_seeds;
    out->imbalance += most * SIM_INSTANCES / sum / n_seeds;
}

static result measure(const trace_kind *kind, policy which)
{
    const sim_listener listener = { on_added, on_evicted, on_started, on_finished, NULL };
    const uint32_t n = n_seeds * TRACE_REQUESTS;
    double *first_ms = malloc(n * sizeof(*first_ms)), n_prompt = 0, n_cached = 0;
    run *w = malloc(sizeof(*w));
    result out = { 0 };

    for (uint32_t seed = 1; seed <= n_seeds; seed++) {
        sim_listener own = which == OURS ? listener : (sim_listener){ 0 };

        memset(w, 0, sizeof(*w));
        own.ctx = w;
        w->policy = which;
        w->random.state = seed;
        trace_make(kind, seed, w->requests);
        sim_group_init(&w->group, w->requests, &own);
        if (which == OURS)
            start_scheduler(w);
        replay(w);
        yard_scheduler_destroy(w->s);
        add_load(&w->group, &out);
        for (uint32_t i = 0; i < TRACE_REQUESTS; i++) {
            const sim_request *r = &w->requests[i];

            assert_int_equal(r->n_generated, r->n_output);
            first_ms[(seed - 1) * TRACE_REQUESTS + i] =
                (double)(r->first_us - r->arrival_us) / 1000;
            n_prompt += r->n_prompt;
            n_cached += r->n_cached;
        }
    }
    qsort(first_ms, n, sizeof(*first_ms), compare);
    out.p50_ms = first_ms[n / 2];
    out.p99_ms = first_ms[n - n / 100];
    out.hit_rate = n_cached / n_prompt;
    free(first_ms);
    free(w);
    return out;
}

/* Of one instance with room for everything: a prefix is computed once. */
static double ideal_hit_rate(const trace_kind *kind)
{
    static sim_request requests[TRACE_REQUESTS];
    double n_prompt = 0, n_cached = 0;

    for (uint32_t seed = 1; seed <= n_seeds; seed++) {
        bool seen[1024] = { false };

        trace_make(kind, seed, requests);
        for (uint32_t i = 0; i < TRACE_REQUESTS; i++) {
            n_prompt += requests[i].n_prompt;
            if (seen[requests[i].prefix])
                n_cached += requests[i].n_prefix_pages * YARD_PAGE_TOKENS;
            seen[requests[i].prefix] = true;
        }
    }
    return n_cached / n_prompt;
}

static double best(const result *results, size_t offset, bool largest)
{
    double value = 0;

    for (int p = 0; p < N_POLICIES; p++) {
        const double x = *(const double *)((const char *)&results[p] + offset);

        if (p == 0 || (largest ? x > value : x < value))
            value = x;
    }
    return value;
}

/* In how many of the four things is it more than 3 % behind the best policy? */
static int count_worse(const result *r)
{
    return (r[OURS].p50_ms > 1.03 * best(r, offsetof(result, p50_ms), false)) +
           (r[OURS].p99_ms > 1.03 * best(r, offsetof(result, p99_ms), false)) +
           (r[OURS].busiest > 1.03 * best(r, offsetof(result, busiest), false)) +
           (r[OURS].hit_rate < 0.97 * best(r, offsetof(result, hit_rate), true));
}

static void the_scheduler_is_best_or_within_3_percent(void **state)
{
    int n_worse = 0;

    (void)state;
    print_message("| trace | policy | TTFT p50 ms | TTFT p99 ms | busiest, k tokens | max / mean | "
                  "hit rate |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |\n");
    for (int k = 0; k < N_TRACE_KINDS; k++) {
        result r[N_POLICIES];

        for (policy p = 0; p < N_POLICIES; p++) {
            r[p] = measure(&trace_kinds[k], p);
            print_message("| %s | %s | %.0f | %.0f | %.0f | %.2f | %.1f %% |\n",
                          trace_kinds[k].name, policy_names[p], r[p].p50_ms, r[p].p99_ms,
                          r[p].busiest, r[p].imbalance, 100 * r[p].hit_rate);
        }
        n_worse += count_worse(r);
        /* eight caches against a single one with room for everything */
        assert_true(r[OURS].hit_rate >= 0.95 * ideal_hit_rate(&trace_kinds[k]));
    }
    assert_int_equal(n_worse, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(
        the_scheduler_is_best_or_within_3_percent) };

    if (argc > 1)
        n_seeds = (uint32_t)strtoul(argv[1], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
