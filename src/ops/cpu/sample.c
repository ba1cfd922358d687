#include "ops/cpu/sample.h"

#include <float.h>
#include <math.h>

size_t yard_cpu_sample_scratch_bytes(uint32_t n_vocab)
{
    /* the candidates' keys; before them, in the same place, the penalties' marks */
    return (size_t)n_vocab * sizeof(uint64_t);
}

/* The finaliser of splitmix64 (Steele, Lea, Flood 2014; constants by Stafford). */
static uint64_t mix64(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

double yard_cpu_sample_uniform(uint64_t seed, uint64_t position)
{
    const uint64_t golden = 0x9e3779b97f4a7c15u;

    /* The seed is mixed before the position is added: otherwise seeds that differ by a multiple
     * of the increment would walk the same sequence, shifted. */
    return (double)(mix64(mix64(seed + golden) + golden * (position + 1)) >> 11) * 0x1p-53;
}

static const uint32_t penalty_done = UINT32_MAX;

/* Hugging Face's repetition rule (prompt and output) and OpenAI's presence and frequency rule
 * (output). Only marks of ids that occur are touched: no pass over the vocabulary. */
static void penalise_token(const yard_sample_params *p, float *logits, uint32_t *n_seen,
                           int32_t token)
{
    const uint32_t n_output = n_seen[token];
    float x = logits[token];

    if (n_output == penalty_done)
        return;
    n_seen[token] = penalty_done;
    x = x > 0 ? x / p->repetition_penalty : x * p->repetition_penalty;
    if (n_output > 0)
        x -= p->presence_penalty + p->frequency_penalty * (float)n_output;
    logits[token] = x;
}

static void apply_penalties(const yard_sample_row *row, float *logits, uint32_t *n_seen)
{
    const yard_sample_params *p = &row->params;

    if (p->repetition_penalty == 1 && p->presence_penalty == 0 && p->frequency_penalty == 0)
        return;
    for (uint32_t i = 0; i < row->n_prompt; i++)
        n_seen[row->prompt[i]] = 0;
    for (uint32_t i = 0; i < row->n_output; i++)
        n_seen[row->output[i]] = 0;
    for (uint32_t i = 0; i < row->n_output; i++)
        n_seen[row->output[i]]++;
    for (uint32_t i = 0; i < row->n_prompt; i++)
        penalise_token(p, logits, n_seen, row->prompt[i]);
    for (uint32_t i = 0; i < row->n_output; i++)
        penalise_token(p, logits, n_seen, row->output[i]);
}

static int32_t greedy_token(const float *logits, uint32_t n_vocab)
{
    float best = -INFINITY;
    int32_t token = 0;

    for (uint32_t i = 0; i < n_vocab; i++)
        if (logits[i] > best) {
            best = logits[i];
            token = (int32_t)i;
        }
    return token;
}

/* A max-heap that is emptied only as far as somebody looks: usually a few candidates hold all the
 * probability, and sorting a whole vocabulary for them would cost more than the rest.
 *
 * A key holds the logit's bits, mapped so that unsigned order is numeric order, above the
 * complement of the id: the largest key is the largest logit, the lowest id among equals. Taken
 * keys move to the end of the array, as in heapsort: candidate r lies at keys[n - 1 - r]. */
typedef struct candidates {
    uint64_t *keys;
    uint32_t n, n_taken;
    double max_logit, temperature;
} candidates;

static uint64_t key_of(float logit, uint32_t id)
{
    const uint32_t bits = yard_bits_from_f32(logit);
    const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;

    return (uint64_t)ordered << 32 | (uint32_t)~id;
}

static float key_logit(uint64_t key)
{
    const uint32_t ordered = (uint32_t)(key >> 32);

    return yard_f32_from_bits(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
}

static void sift_down(uint64_t *keys, uint32_t n, uint32_t at)
{
    const uint64_t key = keys[at];

    for (uint32_t child = 2 * at + 1; child < n; child = 2 * at + 1) {
        if (child + 1 < n && keys[child + 1] > keys[child])
            child++;
        if (keys[child] <= key)
            break;
        keys[at] = keys[child];
        at = child;
    }
    keys[at] = key;
}

/* NaN and minus infinity are no candidates. Plus infinity becomes the largest float, so that
 * differences of logits stay numbers; adding zero makes -0 equal to 0. */
static void collect(candidates *c, const float *logits, uint32_t n_vocab, void *scratch,
                    double temperature)
{
    *c = (candidates){ .keys = scratch, .temperature = temperature };
    for (uint32_t i = 0; i < n_vocab; i++)
        if (logits[i] > -INFINITY)
            c->keys[c->n++] = key_of(fminf(logits[i], FLT_MAX) + 0.0f, i);
    for (uint32_t i = c->n / 2; i-- > 0;)
        sift_down(c->keys, c->n, i);
    if (c->n > 0)
        c->max_logit = (double)key_logit(c->keys[0]);
}

/* Probability relative to the first candidate's. */
static double weight_of(const candidates *c, float logit)
{
    return exp(((double)logit - c->max_logit) / c->temperature);
}

static uint64_t candidate_key(candidates *c, uint32_t rank)
{
    while (c->n_taken <= rank) {
        const uint32_t last = c->n - 1 - c->n_taken++;
        const uint64_t top = c->keys[0];

        c->keys[0] = c->keys[last];
        c->keys[last] = top;
        sift_down(c->keys, last, 0);
    }
    return c->keys[c->n - 1 - rank];
}

static double candidate_weight(candidates *c, uint32_t rank)
{
    return weight_of(c, key_logit(candidate_key(c, rank)));
}

/* The sum over the first n candidates. All of them are summed in the order of ids: that needs no
 * sorting and is as well defined. */
static double total_weight(candidates *c, uint32_t n, const float *logits, uint32_t n_vocab)
{
    double total = 0;

    if (n < c->n) {
        for (uint32_t i = 0; i < n; i++)
            total += candidate_weight(c, i);
        return total;
    }
    for (uint32_t i = 0; i < n_vocab; i++)
        if (logits[i] > -INFINITY)
            total += weight_of(c, fminf(logits[i], FLT_MAX));
    return total;
}

static int32_t draw(const yard_sample_row *row, candidates *c, const float *logits,
                    uint32_t n_vocab)
{
    const yard_sample_params *p = &row->params;
    const uint32_t k = p->top_k > 0 ? (uint32_t)p->top_k : c->n;
    uint32_t n_kept = k < c->n ? k : c->n;
    double sum = total_weight(c, n_kept, logits, n_vocab);

    if (p->top_p < 1 || p->min_p > 0) {
        const double enough = p->top_p < 1 ? (double)p->top_p * sum : INFINITY;
        uint32_t i = 1;

        sum = candidate_weight(c, 0);
        for (; i < n_kept && sum < enough; i++) {
            const double w = candidate_weight(c, i);
            if (w < (double)p->min_p)
                break;
            sum += w;
        }
        n_kept = i;
    }

    /* The inverse of the cumulative distribution. A rounded sum may never exceed the target: then
     * it is the last candidate that has any weight. */
    const double target = yard_cpu_sample_uniform(p->seed, row->position) * sum;
    double cumulative = candidate_weight(c, 0);
    uint32_t chosen = 0;
    while (cumulative <= target && chosen + 1 < n_kept) {
        const double w = candidate_weight(c, chosen + 1);
        if (w == 0)
            break;
        cumulative += w;
        chosen++;
    }
    return (int32_t) ~(uint32_t)candidate_key(c, chosen);
}

void yard_cpu_sample_row(const yard_sample_row *row, float *logits, uint32_t n_vocab, void *scratch,
                         int32_t *token)
{
    candidates c;

    for (uint32_t i = 0; i < row->n_bias; i++)
        logits[row->bias_token[i]] += row->bias_value[i];
    apply_penalties(row, logits, scratch);
    if (!(row->params.temperature > 0)) {
        *token = greedy_token(logits, n_vocab);
        return;
    }
    collect(&c, logits, n_vocab, scratch, (double)row->params.temperature);
    *token = c.n > 0 ? draw(row, &c, logits, n_vocab) : 0;
}
