/* Arrival traces: what comes when, from a seed. Rates are near what the simulator's group can serve
 * when requests are spread and prefixes reused. */
#ifndef YARD_TESTS_TRACES_H
#define YARD_TESTS_TRACES_H

#include <math.h>

#include "simulator.h"

enum { TRACE_REQUESTS = 3000, TRACE_MAX_OUTPUT = 1000 };

typedef struct trace_kind {
    const char *name;
    double per_s;        /* arrivals, on average */
    uint32_t burst;      /* arrive at one moment */
    uint32_t n_prefixes; /* 0: nothing is shared */
    double zipf;         /* popularity of prefix k falls as 1 / k^zipf; 0: all alike */
    double sharing;      /* the part of requests that have a prefix */
    uint32_t n_prefix_pages;
    uint32_t min_own, max_own; /* prompt tokens beyond the prefix, log-uniform */
    double mean_output;        /* geometric */
} trace_kind;

static const trace_kind trace_kinds[] = {
    { "Poisson", 50, 1, 0, 0, 0, 0, 100, 2000, 120 },
    { "bursts", 40, 60, 0, 0, 0, 0, 100, 2000, 120 },
    { "10 prefixes", 60, 1, 10, 0, 1, 62, 50, 500, 120 },
    { "one hot prefix", 60, 1, 1, 0, 0.8, 62, 50, 1000, 120 },
    { "long tail", 40, 1, 300, 1, 1, 31, 50, 1000, 120 },
};
enum { N_TRACE_KINDS = sizeof(trace_kinds) / sizeof(trace_kinds[0]) };

typedef struct trace_random {
    uint64_t state;
} trace_random;

static uint64_t trace_next(trace_random *random)
{
    uint64_t x = random->state += 0x9e3779b97f4a7c15u;

    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static double trace_uniform(trace_random *random) /* (0, 1] */
{
    return (double)((trace_next(random) >> 11) + 1) * 0x1p-53;
}

static uint64_t trace_prefix(const trace_kind *kind, trace_random *random)
{
    double sum = 0, at;
    uint32_t k = 1;

    for (uint32_t i = 1; i <= kind->n_prefixes; i++)
        sum += pow(i, -kind->zipf);
    at = trace_uniform(random) * sum;
    while (k < kind->n_prefixes && (at -= pow(k, -kind->zipf)) > 0)
        k++;
    return k;
}

/* requests: [TRACE_REQUESTS], in order of arrival */
static void trace_make(const trace_kind *kind, uint64_t seed, sim_request *requests)
{
    trace_random random = { seed << 32 };
    double now_us = 0;

    for (uint32_t i = 0; i < TRACE_REQUESTS; i++) {
        const double own =
            kind->min_own * pow((double)kind->max_own / kind->min_own, trace_uniform(&random));
        const double output = 1 - log(trace_uniform(&random)) * kind->mean_output;
        const bool shares = trace_uniform(&random) <= kind->sharing;
        sim_request *r = &requests[i];

        if (i % kind->burst == 0)
            now_us -= log(trace_uniform(&random)) * 1e6 * kind->burst / kind->per_s;
        *r = (sim_request){ .arrival_us = (uint64_t)now_us,
                            .n_output = (uint32_t)fmin(output, TRACE_MAX_OUTPUT),
                            .unique = 1000000 + i };
        if (shares && kind->n_prefixes > 0) {
            r->prefix = trace_prefix(kind, &random);
            r->n_prefix_pages = kind->n_prefix_pages;
        }
        r->n_prompt = r->n_prefix_pages * YARD_PAGE_TOKENS + (uint32_t)own;
    }
}

#endif
