/* Conversions of rows: every variant against the definition. ctest: sanitize */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/convert.h"

enum { MAX_N = 1024, N_ROUNDS = 2000, N_ROWS = 5 };

static uint64_t state_of_random = 1;

static uint32_t random_bits(void)
{
    state_of_random = state_of_random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state_of_random >> 32);
}

/* Mostly of activations' size; some of any, infinities, NaN, zeros. */
static float random_value(void)
{
    const uint32_t bits = random_bits();

    switch (random_bits() % 16) {
    case 0:
        return yard_f32_from_bits(bits);
    case 1:
        return bits % 2 ? 0.0f : -0.0f;
    default:
        return ((float)(bits >> 8) - 0x1p23f) * 0x1p-21f;
    }
}

static void assert_same(const float *a, const float *b, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (isnan(a[i]) || isnan(b[i]))
            assert_true(isnan(a[i]) && isnan(b[i]));
        else
            assert_int_equal(yard_bits_from_f32(a[i]), yard_bits_from_f32(b[i]));
}

static const yard_convert *other(void)
{
    if (yard_convert_best() == &yard_convert_c)
        skip();
    return yard_convert_best();
}

static void stored_values_are_decoded_alike(void **state)
{
    static const yard_dtype dtypes[] = { YARD_FP8_E4M3, YARD_BF16, YARD_F16, YARD_F32 };
    const yard_convert *best = other();
    uint32_t stored[MAX_N];
    float want[MAX_N], got[MAX_N];

    (void)state;
    for (int round = 0; round < N_ROUNDS; round++) {
        const uint32_t from = random_bits() % 4, n = random_bits() % (MAX_N - from);
        const yard_dtype dtype = dtypes[round % 4];

        for (uint32_t i = 0; i < MAX_N; i++)
            stored[i] = random_bits();
        for (uint32_t i = 0; i < sizeof(stored) && round / 4 % 2; i++) /* without NaN */
            ((uint8_t *)stored)[i] &= 0xf7;
        yard_convert_c.decode(dtype, stored + from, n, want);
        best->decode(dtype, stored + from, n, got);
        assert_same(want, got, n);
    }
}

static void codes_of_a_cache_are_widened_alike(void **state)
{
    const yard_convert *best = other();
    uint8_t codes[MAX_N];
    float want[MAX_N], got[MAX_N];

    (void)state;
    for (int round = 0; round < N_ROUNDS; round++) {
        const uint32_t n = random_bits() % MAX_N;
        const float value = fabsf(random_value());
        const float scale = isfinite(value) ? value / 448 : 1.0f; /* as quantise makes it */

        for (uint32_t i = 0; i < n; i++)
            codes[i] = (uint8_t)(round % 4 ? random_bits() & 0xf7 : random_bits());
        yard_convert_c.widen_fp8(codes, n, scale, want);
        best->widen_fp8(codes, n, scale, got);
        assert_same(want, got, n);
    }
}

static void values_are_rounded_and_quantised_alike(void **state)
{
    const yard_convert *best = other();
    float x[MAX_N], want_scale[MAX_N / YARD_GROUP + 1], got_scale[MAX_N / YARD_GROUP + 1];
    uint16_t want[MAX_N], got[MAX_N];
    uint8_t want_code[MAX_N], got_code[MAX_N];

    (void)state;
    for (int round = 0; round < N_ROUNDS; round++) {
        const uint32_t n = 1 + random_bits() % (MAX_N - 1);
        const bool ue8m0 = random_bits() % 2;

        for (uint32_t i = 0; i < n; i++)
            x[i] = random_value();
        yard_convert_c.round_bf16(x, n, want);
        best->round_bf16(x, n, got);
        assert_memory_equal(want, got, n * sizeof(*want));
        for (uint32_t i = 0; i < n; i++)
            x[i] = yard_f32_from_bf16(want[i]);
        yard_convert_c.quantise(x, n, ue8m0, want_code, want_scale);
        best->quantise(x, n, ue8m0, got_code, got_scale);
        assert_memory_equal(want_code, got_code, n);
        assert_same(want_scale, got_scale, (n + YARD_GROUP - 1) / YARD_GROUP);
    }
}

/* An overflow stays one, whatever form scales have. */
static void infinity_is_its_own_scale(void **state)
{
    float x[YARD_GROUP] = { [7] = -INFINITY, [9] = 3.0f }, scale;
    uint8_t code[YARD_GROUP];

    (void)state;
    for (int i = 0; i < 4; i++) {
        const yard_convert *convert = i < 2 ? &yard_convert_c : yard_convert_best();

        convert->quantise(x, YARD_GROUP, i % 2, code, &scale);
        assert_true(scale == INFINITY);
    }
}

static void sums_are_alike(void **state)
{
    const yard_convert *best = other();
    float row[N_ROWS][MAX_N], want[MAX_N], got[MAX_N], weight[N_ROWS];
    const void *rows[N_ROWS];

    (void)state;
    for (int round = 0; round < N_ROUNDS; round++) {
        const uint32_t n = random_bits() % MAX_N, n_rows = random_bits() % (N_ROWS + 1);
        const yard_dtype dtype = round % 2 ? YARD_F32 : YARD_BF16;
        const yard_dtype y_dtype = round / 2 % 2 ? YARD_F32 : YARD_BF16;

        for (uint32_t r = 0; r < N_ROWS; r++) {
            rows[r] = row[r];
            weight[r] = random_value();
            for (uint32_t i = 0; i < n; i++)
                row[r][i] = random_value();
            if (dtype == YARD_BF16)
                yard_convert_c.round_bf16(row[r], n, (uint16_t *)(void *)row[r]);
        }
        memset(want, 0, sizeof(want));
        memset(got, 0, sizeof(got));
        yard_convert_c.weighted_sum(dtype, rows, weight, n_rows, n, y_dtype, want);
        best->weighted_sum(dtype, rows, weight, n_rows, n, y_dtype, got);
        if (y_dtype == YARD_F32) {
            assert_same(want, got, n);
        } else {
            yard_convert_c.decode(YARD_BF16, want, n, row[0]);
            yard_convert_c.decode(YARD_BF16, got, n, row[1]);
            assert_same(row[0], row[1], n);
        }
        for (uint32_t i = 0; i < n; i++)
            want[i] = got[i] = random_value();
        for (uint32_t i = 0; i < n; i++)
            row[0][i] = random_value();
        yard_convert_c.add_scaled(row[0], n, weight[0], want);
        best->add_scaled(row[0], n, weight[0], got);
        assert_same(want, got, n);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stored_values_are_decoded_alike),
        cmocka_unit_test(codes_of_a_cache_are_widened_alike),
        cmocka_unit_test(values_are_rounded_and_quantised_alike),
        cmocka_unit_test(infinity_is_its_own_scale),
        cmocka_unit_test(sums_are_alike),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
