/* Prompts of random token ids: they cost a server what text of that length costs, and need no
 * tokenizer here. */
#include <math.h>
#include <stdlib.h>

#include "cli/serve_load.h"

enum { LEAST_TOKENS = 4, LONGEST = 8 }; /* of a chat-like length; times the median */

/* splitmix64: any two states give unrelated streams. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static double uniform(uint64_t *state) /* in (0, 1) */
{
    return ((double)(next_random(state) >> 11) + 0.5) * 0x1p-53;
}

static double normal(uint64_t *state)
{
    const double a = uniform(state), b = uniform(state);

    return sqrt(-2 * log(a)) * cos(2 * 3.14159265358979323846 * b);
}

static uint64_t stream_of(const yard_load_workload *w, uint64_t what, uint64_t i)
{
    uint64_t state = w->seed * 3 + what;

    return next_random(&state) ^ (i * 0xd1342543de82ef95u);
}

enum { STREAM_PROMPT, STREAM_PREFIX, STREAM_PAUSE };

static uint32_t length_of(const yard_load_workload *w, uint32_t median, double sigma,
                          uint64_t *state)
{
    double n = median;

    if (w->lengths == YARD_LENGTHS_CHAT)
        n = round(median * exp(sigma * normal(state)));
    if (n > (double)median * LONGEST)
        n = (double)median * LONGEST;
    if (w->lengths == YARD_LENGTHS_CHAT && n < LEAST_TOKENS)
        n = LEAST_TOKENS;
    return (uint32_t)n;
}

static void fill(const yard_load_workload *w, int32_t *ids, uint32_t n, uint64_t state)
{
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)(w->first_id + next_random(&state) % w->n_ids);
}

bool yard_load_prompt_of(const yard_load_workload *w, uint64_t i, yard_load_prompt *out)
{
    const uint64_t which = w->n_distinct ? i % w->n_distinct : i;
    uint64_t state = stream_of(w, STREAM_PROMPT, which);
    const uint32_t n_prefix = w->n_prefixes ? w->n_prefix_tokens : 0;
    const uint32_t n_own = length_of(w, w->n_prompt, 0.8, &state);

    out->n_output = length_of(w, w->n_output, 0.6, &state);
    out->n_ids = n_prefix + n_own;
    out->ids = malloc(out->n_ids * sizeof(*out->ids));
    if (!out->ids)
        return false;
    if (n_prefix)
        fill(w, out->ids, n_prefix,
             stream_of(w, STREAM_PREFIX, next_random(&state) % w->n_prefixes));
    fill(w, out->ids + n_prefix, n_own, state);
    return true;
}

double yard_load_pause(const yard_load_workload *w, uint64_t i)
{
    uint64_t state = stream_of(w, STREAM_PAUSE, i);

    return -log(uniform(&state));
}
