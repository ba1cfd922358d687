/* Sampling against a slow definition in double precision. ctest: sanitize */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "ops/cpu/sample.h"

enum { MAX_VOCAB = 4096 };

static const yard_sample_params greedy = { .top_p = 1, .repetition_penalty = 1 };

static uint64_t random_state;

static uint64_t random_u64(void)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return random_state >> 16 ^ random_state << 31;
}

static float random_f32(float low, float high)
{
    return low + (high - low) * (float)(random_u64() % 1000000) * 1e-6f;
}

static int32_t sample(const yard_sample_row *row, const float *logits, uint32_t n_vocab)
{
    float *copy = malloc(n_vocab * sizeof(*copy));
    void *scratch = malloc(yard_cpu_sample_scratch_bytes(n_vocab));
    int32_t token = -1;

    memcpy(copy, logits, n_vocab * sizeof(*copy));
    memset(scratch, 0xa5, yard_cpu_sample_scratch_bytes(n_vocab));
    yard_cpu_sample_row(&yard_cpu_kernels_c, row, copy, n_vocab, scratch, &token);
    free(scratch);
    free(copy);
    return token;
}

static int32_t sample_plain(const yard_sample_params *params, uint64_t position,
                            const float *logits, uint32_t n_vocab)
{
    const yard_sample_row row = { .params = *params, .position = position };

    return sample(&row, logits, n_vocab);
}

typedef struct ranked {
    double logit, p;
    uint32_t id;
} ranked;

static int by_rank(const void *a, const void *b)
{
    const ranked *x = a, *y = b;

    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static void normalise(ranked *c, uint32_t n)
{
    double sum = 0;

    for (uint32_t i = 0; i < n; i++)
        sum += c[i].p;
    for (uint32_t i = 0; i < n; i++)
        c[i].p /= sum;
}

/* Every filter makes a new distribution of the one before. */
static int32_t slow_sample(const yard_sample_params *p, uint64_t position, const float *logits,
                           uint32_t n_vocab)
{
    static ranked c[MAX_VOCAB];
    uint32_t n = n_vocab, kept = 0;
    double before = 0, u = yard_cpu_sample_uniform(p->seed, position);

    for (uint32_t i = 0; i < n; i++)
        c[i] = (ranked){ .logit = (double)logits[i], .id = i };
    qsort(c, n, sizeof(c[0]), by_rank);
    if (p->top_k > 0 && (uint32_t)p->top_k < n)
        n = (uint32_t)p->top_k;
    for (uint32_t i = 0; i < n; i++)
        c[i].p = exp((c[i].logit - c[0].logit) / (double)p->temperature);
    normalise(c, n);
    for (kept = 0; kept < n && (kept == 0 || before < (double)p->top_p); kept++)
        before += c[kept].p;
    if (p->top_p < 1)
        n = kept;
    normalise(c, n);
    for (kept = 0; kept < n && c[kept].p >= (double)p->min_p * c[0].p; kept++)
        ;
    n = kept;
    normalise(c, n);
    for (uint32_t i = 0; i + 1 < n; i++) {
        if (u < c[i].p)
            return (int32_t)c[i].id;
        u -= c[i].p;
    }
    return (int32_t)c[n - 1].id;
}

static void random_logits(float *logits, uint32_t n_vocab)
{
    const bool ties = random_u64() % 2;
    const float spread = random_f32(0.5f, 15);

    for (uint32_t i = 0; i < n_vocab; i++) {
        logits[i] = random_f32(-spread, spread);
        if (ties)
            logits[i] = rintf(logits[i]);
    }
}

static void filters_match_the_definition(void **state)
{
    static float logits[MAX_VOCAB];

    (void)state;
    for (uint64_t round = 0; round < 4000; round++) {
        random_state = round;
        const uint32_t n_vocab = 1 + (uint32_t)(random_u64() % (round % 50 ? 60 : MAX_VOCAB));
        const yard_sample_params p = {
            .temperature = random_f32(0.05f, 3),
            .top_k = round & 1 ? (int32_t)(random_u64() % 50) : 0,
            .top_p = round & 2 ? random_f32(0.01f, 1) : 1,
            .min_p = round & 4 ? random_f32(0, 0.5f) : 0,
            .repetition_penalty = 1,
            .seed = random_u64(),
        };
        random_logits(logits, n_vocab);
        for (uint64_t position = 0; position < 8; position++) {
            const int32_t got = sample_plain(&p, position, logits, n_vocab);
            const int32_t want = slow_sample(&p, position, logits, n_vocab);
            if (got != want)
                fail_msg("random_state %d, position %d: want %d, got %d", (int)round, (int)position,
                         want, got);
        }
    }
}

static void penalties_match_the_definition(void **state)
{
    enum { N = 40, N_IDS = 30 };

    (void)state;
    for (uint64_t round = 0; round < 2000; round++) {
        float logits[N], expected[N], got[N];
        int32_t prompt[N_IDS], output[N_IDS], bias_token[3];
        float bias_value[3];
        uint64_t scratch[2 * N];
        int32_t token;

        random_state = round;
        random_logits(logits, N);
        for (int i = 0; i < N_IDS; i++) {
            prompt[i] = (int32_t)(random_u64() % N);
            output[i] = (int32_t)(random_u64() % N);
        }
        for (int i = 0; i < 3; i++) {
            bias_token[i] = (int32_t)(random_u64() % N);
            bias_value[i] = random_f32(-5, 5);
        }
        const yard_sample_row row = {
            .params = { .top_p = 1,
                        .repetition_penalty = random_f32(0.5f, 2),
                        .presence_penalty = random_f32(-2, 2),
                        .frequency_penalty = random_f32(-2, 2) },
            .prompt = prompt,
            .n_prompt = (uint32_t)(random_u64() % (N_IDS + 1)),
            .output = output,
            .n_output = (uint32_t)(random_u64() % (N_IDS + 1)),
            .bias_token = bias_token,
            .bias_value = bias_value,
            .n_bias = (uint32_t)(random_u64() % 4),
        };
        for (int id = 0; id < N; id++) {
            uint32_t n_output = 0, n_prompt = 0;
            float x = logits[id];
            for (uint32_t i = 0; i < row.n_bias; i++)
                x += bias_token[i] == id ? bias_value[i] : 0;
            for (uint32_t i = 0; i < row.n_prompt; i++)
                n_prompt += prompt[i] == id;
            for (uint32_t i = 0; i < row.n_output; i++)
                n_output += output[i] == id;
            if (n_prompt + n_output > 0)
                x = x > 0 ? x / row.params.repetition_penalty : x * row.params.repetition_penalty;
            if (n_output > 0)
                x -= row.params.presence_penalty + (float)n_output * row.params.frequency_penalty;
            expected[id] = x;
        }
        memcpy(got, logits, sizeof(got));
        yard_cpu_sample_row(&yard_cpu_kernels_c, &row, got, N, scratch, &token);
        for (int id = 0; id < N; id++)
            assert_true(got[id] == expected[id]);
        for (int id = 0; id < N; id++)
            assert_true(expected[id] < expected[token] ||
                        (expected[id] == expected[token] && id >= token));
    }
}

/* Chi-square of 20,000 draws; the bound is far above the 99.9 % point of 9 degrees of freedom
 * (27.9) and the seeds are fixed, so that it fails for a wrong distribution only. */
static void draws_follow_the_distribution(void **state)
{
    enum { N = 10, N_DRAWS = 20000 };
    const float logits[N] = { 1, 0.5f, 2, -1, 0, 0, 1.5f, -0.5f, 2, 0.25f };
    double p[N], sum = 0;

    (void)state;
    for (int i = 0; i < N; i++)
        sum += p[i] = exp((double)logits[i] / 0.8);
    for (int by_seed = 0; by_seed < 2; by_seed++) {
        uint32_t count[N] = { 0 };
        double chi_square = 0;
        for (uint64_t i = 0; i < N_DRAWS; i++) {
            yard_sample_params params = greedy;
            params.temperature = 0.8f;
            params.seed = by_seed ? i : 7;
            count[sample_plain(&params, by_seed ? 3 : i, logits, N)]++;
        }
        for (int i = 0; i < N; i++) {
            const double want = p[i] / sum * N_DRAWS;
            chi_square += (count[i] - want) * (count[i] - want) / want;
        }
        if (chi_square > 35)
            fail_msg("by_seed %d: chi-square %g of 9 degrees of freedom", by_seed, chi_square);
    }
}

static void numbers_are_uniform_and_repeatable(void **state)
{
    double sum = 0, sum_product = 0;

    (void)state;
    for (uint64_t i = 0; i < 100000; i++) {
        const double u = yard_cpu_sample_uniform(i / 1000, i % 1000);
        assert_true(u >= 0 && u < 1);
        assert_true(u == yard_cpu_sample_uniform(i / 1000, i % 1000));
        sum += u;
        sum_product += u * yard_cpu_sample_uniform(i / 1000, i % 1000 + 1);
    }
    assert_true(fabs(sum / 100000 - 0.5) < 0.004);
    assert_true(fabs(sum_product / 100000 - 0.25) < 0.004); /* neighbours are independent */
    assert_true(yard_cpu_sample_uniform(UINT64_MAX, UINT64_MAX) < 1);
    /* a fixed seed gives fixed text also with the next version */
    assert_int_equal((uint64_t)(yard_cpu_sample_uniform(0, 0) * 0x1p53), 0x14e0dba5e9a32f);
    assert_int_equal((uint64_t)(yard_cpu_sample_uniform(42, 1000) * 0x1p53), 0x163f919049aa49);
}

static void greedy_takes_the_lowest_of_equals(void **state)
{
    const float ties[6] = { -1, 3, 2, 3, -INFINITY, NAN };
    const float zeros[3] = { -INFINITY, -0.0f, 0.0f };
    const float worst[3] = { NAN, -INFINITY, NAN };
    const float infinite[3] = { 1, INFINITY, INFINITY };

    (void)state;
    assert_int_equal(sample_plain(&greedy, 0, ties, 6), 1);
    assert_int_equal(sample_plain(&greedy, 0, zeros, 3), 1);
    assert_int_equal(sample_plain(&greedy, 0, worst, 3), 0);
    assert_int_equal(sample_plain(&greedy, 0, infinite, 3), 1);
}

static void one_candidate_always_stays(void **state)
{
    static float logits[MAX_VOCAB];
    yard_sample_params p = greedy;
    int32_t best;

    (void)state;
    random_state = 5;
    for (int i = 0; i < MAX_VOCAB; i++)
        logits[i] = random_f32(-4, 4);
    best = sample_plain(&greedy, 0, logits, MAX_VOCAB);
    for (int which = 0; which < 4; which++) {
        p = greedy;
        p.temperature = which == 3 ? 1e-6f : 1;
        p.top_p = which == 0 ? 1e-30f : 1;
        p.min_p = which == 1 ? 1 : 0;
        p.top_k = which == 2 ? 1 : 0;
        for (uint64_t position = 0; position < 50; position++)
            assert_int_equal(sample_plain(&p, position, logits, MAX_VOCAB), best);
    }
    p = greedy;
    p.temperature = 1;
    for (uint64_t position = 0; position < 20; position++) {
        const int32_t all = sample_plain(&p, position, logits, 100);
        p.top_k = INT32_MAX; /* more than there are: the same as off */
        assert_int_equal(sample_plain(&p, position, logits, 100), all);
        p.top_k = 0;
    }
}

static void extreme_logits_stay_numbers(void **state)
{
    const float large[4] = { -1e6f, 1e6f, 1e6f, 0 };
    const float infinite[4] = { INFINITY, 3e38f, -3e38f, INFINITY };
    const float bad[5] = { NAN, -INFINITY, 1, NAN, -INFINITY };
    const float worst[3] = { NAN, -INFINITY, NAN };
    yard_sample_params p = greedy;
    uint32_t count[4] = { 0 };

    (void)state;
    for (uint64_t position = 0; position < 200; position++) {
        p.temperature = position % 2 ? 1e-6f : 1e-42f;
        count[sample_plain(&p, position, large, 4)]++;
        const int32_t token = sample_plain(&p, position, infinite, 4);
        assert_true(token == 0 || token == 3);
        p.temperature = 1e6f;
        assert_int_equal(sample_plain(&p, position, bad, 5), 2);
        assert_int_equal(sample_plain(&p, position, worst, 3), 0);
    }
    assert_int_equal(count[1] + count[2], 200);
    assert_true(count[1] > 50 && count[2] > 50); /* equals are equally likely */
}

/* A bias of minus infinity bans a token; a large one forces it. */
static void bias_bans_and_forces(void **state)
{
    const float logits[3] = { 5, 4, -2 };
    const int32_t ids[2] = { 0, 2 };
    const float ban[2] = { -INFINITY, 0 }, force[2] = { 0, 100 };
    yard_sample_row row = { .params = greedy, .bias_token = ids, .bias_value = ban, .n_bias = 2 };

    (void)state;
    for (row.position = 0; row.position < 50; row.position++) {
        row.params.temperature = row.position % 2 ? 1 : 0;
        row.bias_value = ban;
        assert_int_not_equal(sample(&row, logits, 3), 0);
        row.bias_value = force;
        assert_int_equal(sample(&row, logits, 3), 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(filters_match_the_definition),
        cmocka_unit_test(penalties_match_the_definition),
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(numbers_are_uniform_and_repeatable),
        cmocka_unit_test(greedy_takes_the_lowest_of_equals),
        cmocka_unit_test(one_candidate_always_stays),
        cmocka_unit_test(extreme_logits_stay_numbers),
        cmocka_unit_test(bias_bans_and_forces),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
