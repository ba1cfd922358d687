#include "ops/cpu/sample.h"

#include <float.h>
#include <math.h>

size_t yard_cpu_sample_scratch_bytes(uint32_t n_vocab)
{
    /* the candidates' keys, before them in the same place the penalties' marks; probabilities */
    return (size_t)n_vocab * (sizeof(uint64_t) + sizeof(float));
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
 * A key holds a probability's bits, ordered as it is, above the complement of the id. Taken keys
 * move to the end of the array, as in heapsort: candidate r lies at keys[n - 1 - r]. */
typedef struct candidates {
    uint64_t *keys;
    const float *logits;
    uint32_t n, n_taken;
} candidates;

static const uint64_t first_weight = (uint64_t)1 << 32;

static uint64_t key_of(float probability, uint32_t id)
{
    return (uint64_t)yard_bits_from_f32(probability) << 32 | (uint32_t)~id;
}

static int32_t key_id(uint64_t key)
{
    return (int32_t) ~(uint32_t)key;
}

/* In units of 2^-32, rounded to nearest even: the low bits of a sum with 2^52, without a call. */
static uint64_t key_weight(uint64_t key)
{
    const double sum = (double)yard_f32_from_bits((uint32_t)(key >> 32)) * 0x1p32 + 0x1p52;
    uint64_t bits;

    memcpy(&bits, &sum, sizeof(bits));
    return bits & (((uint64_t)1 << 52) - 1);
}

/* Of equal probabilities the larger logit comes first, then the lower id. */
static bool comes_before(const candidates *c, uint64_t a, uint64_t b)
{
    float logit_a, logit_b;

    if (a >> 32 != b >> 32)
        return a > b;
    logit_a = fminf(c->logits[key_id(a)], FLT_MAX);
    logit_b = fminf(c->logits[key_id(b)], FLT_MAX);
    return logit_a > logit_b || (logit_a == logit_b && a > b);
}

static void sift_down(const candidates *c, uint32_t n, uint32_t at)
{
    uint64_t *keys = c->keys;
    const uint64_t key = keys[at];

    for (uint32_t child = 2 * at + 1; child < n; child = 2 * at + 1) {
        if (child + 1 < n && comes_before(c, keys[child + 1], keys[child]))
            child++;
        if (!comes_before(c, keys[child], key))
            break;
        keys[at] = keys[child];
        at = child;
    }
    keys[at] = key;
}

/* NaN and minus infinity are no candidates. Plus infinity becomes the largest float, so that
 * differences of logits stay numbers. False: there is no candidate. */
static bool make_probabilities(const cpu_kernels *k, const float *logits, uint32_t n,
                               float temperature, float *probability)
{
    const float per = fminf(fmaxf(1.0f / temperature, FLT_MIN), FLT_MAX);
    float largest = -INFINITY;

    for (uint32_t i = 0; i < n; i++)
        largest = logits[i] > largest ? logits[i] : largest;
    largest = fminf(largest, FLT_MAX);
    if (largest == -INFINITY)
        return false;
    for (uint32_t i = 0; i < n; i++) {
        const float x = logits[i] > FLT_MAX ? FLT_MAX : logits[i];
        probability[i] = x > -INFINITY ? (x - largest) * per : -INFINITY;
    }
    k->exp_sum(probability, n, 0);
    return true;
}

/* Those that weigh something; returns the sum of their weights. */
static uint64_t collect(candidates *c, const float *probability, uint32_t n_vocab)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < n_vocab; i++)
        if (probability[i] > 0x1p-33f) {
            c->keys[c->n] = key_of(probability[i], i);
            sum += key_weight(c->keys[c->n++]);
        }
    for (uint32_t i = c->n / 2; i-- > 0;)
        sift_down(c, c->n, i);
    return sum;
}

static uint64_t candidate_key(candidates *c, uint32_t rank)
{
    while (c->n_taken <= rank) {
        const uint32_t last = c->n - 1 - c->n_taken++;
        const uint64_t top = c->keys[0];

        c->keys[0] = c->keys[last];
        c->keys[last] = top;
        sift_down(c, last, 0);
    }
    return c->keys[c->n - 1 - rank];
}

static uint64_t candidate_weight(candidates *c, uint32_t rank)
{
    return key_weight(candidate_key(c, rank));
}

/* What the first n weigh. */
static uint64_t weigh(candidates *c, uint32_t n)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < n; i++)
        sum += candidate_weight(c, i);
    return sum;
}

static int32_t draw(const yard_sample_row *row, candidates *c, uint64_t sum)
{
    const yard_sample_params *p = &row->params;
    uint32_t n_kept = c->n;

    if (p->top_k > 0 && (uint32_t)p->top_k < c->n) {
        n_kept = (uint32_t)p->top_k;
        sum = weigh(c, n_kept);
    }
    if (p->top_p < 1 || p->min_p > 0) {
        const double enough = p->top_p < 1 ? (double)p->top_p * (double)sum : INFINITY;
        const double least = (double)p->min_p * (double)first_weight;
        uint32_t i = 1;

        sum = first_weight;
        for (; i < n_kept && (double)sum < enough; i++) {
            const uint64_t w = candidate_weight(c, i);
            if ((double)w < least)
                break;
            sum += w;
        }
    }

    /* The inverse of the cumulative distribution. The product may round up to the sum. */
    uint64_t target = (uint64_t)(yard_cpu_sample_uniform(p->seed, row->position) * (double)sum);
    uint64_t cumulative = candidate_weight(c, 0);
    uint32_t chosen = 0;

    target = target < sum ? target : sum - 1;
    while (cumulative <= target)
        cumulative += candidate_weight(c, ++chosen);
    return key_id(candidate_key(c, chosen));
}

void yard_cpu_sample_row(const cpu_kernels *k, const yard_sample_row *row, float *logits,
                         uint32_t n_vocab, void *scratch, int32_t *token)
{
    float *probability = (float *)((uint64_t *)scratch + n_vocab);
    candidates c = { .keys = scratch, .logits = logits };

    for (uint32_t i = 0; i < row->n_bias; i++)
        logits[row->bias_token[i]] += row->bias_value[i];
    apply_penalties(row, logits, scratch);
    if (!(row->params.temperature > 0))
        *token = greedy_token(logits, n_vocab);
    else if (!make_probabilities(k, logits, n_vocab, row->params.temperature, probability))
        *token = 0;
    else
        *token = draw(row, &c, collect(&c, probability, n_vocab));
}
