/* Number formats against exhaustive or arithmetic definitions. ctest: sanitize */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/base.h"

/* The nearest code by search, ties to the even code: the definition, slowly. */
static uint8_t nearest_e4m3(float x)
{
    uint8_t best = 0;
    double best_distance = INFINITY;

    if (isnan(x))
        return 0x7f;
    for (int code = 0; code < 0x7f; code++) {
        const double distance = fabs(fabs((double)x) - (double)yard_f32_from_e4m3((uint8_t)code));
        if (distance < best_distance || (distance == best_distance && code % 2 == 0)) {
            best_distance = distance;
            best = (uint8_t)code;
        }
    }
    return (uint8_t)(best | (signbit(x) ? 0x80 : 0));
}

static void e4m3_round_trip(void **state)
{
    (void)state;
    for (int code = 0; code < 256; code++) {
        const float x = yard_f32_from_e4m3((uint8_t)code);
        if ((code & 0x7f) == 0x7f)
            assert_true(isnan(x));
        else
            assert_int_equal(yard_e4m3_from_f32(x), code);
    }
    assert_float_equal(yard_f32_from_e4m3(0x7e), 448.0f, 0);
    assert_float_equal(yard_f32_from_e4m3(0x01), 0x1p-9f, 0);
    assert_float_equal(yard_f32_from_e4m3(0xb8), -1.0f, 0);
}

static void e4m3_rounds_to_nearest_even(void **state)
{
    (void)state;
    /* every bf16 value, and points just beside and at every midpoint */
    for (uint32_t b = 0; b < 65536; b++) {
        const float x = yard_f32_from_bf16((uint16_t)b);
        assert_int_equal(yard_e4m3_from_f32(x), nearest_e4m3(x));
    }
    for (int code = 0; code < 0x7e; code++) {
        const float low = yard_f32_from_e4m3((uint8_t)code);
        const float high = yard_f32_from_e4m3((uint8_t)(code + 1));
        const float middle = (low + high) / 2;
        const float at[3] = { nextafterf(middle, 0), middle, nextafterf(middle, 1000) };
        for (int i = 0; i < 3; i++) {
            assert_int_equal(yard_e4m3_from_f32(at[i]), nearest_e4m3(at[i]));
            assert_int_equal(yard_e4m3_from_f32(-at[i]), nearest_e4m3(-at[i]));
        }
    }
    assert_int_equal(yard_e4m3_from_f32(INFINITY), 0x7e);
    assert_int_equal(yard_e4m3_from_f32(-1e30f), 0xfe);
}

static void bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    srand(1);
    for (int i = 0; i < 200000; i++) {
        const uint32_t bits = (uint32_t)rand() << 16 ^ (uint32_t)rand();
        const float x = yard_f32_from_bits(bits);
        const float y = yard_bf16_round(x);
        const float down = yard_f32_from_bits(bits & 0xffff0000u);
        const float up = yard_f32_from_bits((bits & 0xffff0000u) + 0x10000u);
        if (isnan(x)) {
            assert_true(isnan(y));
        } else if ((bits & 0xffffu) == 0x8000u) {
            assert_true(y == down || y == up);
            assert_int_equal(yard_bits_from_f32(y) >> 16 & 1, 0);
        } else {
            assert_true(y == ((bits & 0xffffu) < 0x8000u ? down : up));
        }
    }
}

static void f16_known_values(void **state)
{
    (void)state;
    assert_true(yard_f32_from_f16(0x3c00) == 1.0f);
    assert_true(yard_f32_from_f16(0xc000) == -2.0f);
    assert_true(yard_f32_from_f16(0x7bff) == 65504.0f);
    assert_true(yard_f32_from_f16(0x0001) == 0x1p-24f);
    assert_true(yard_f32_from_f16(0x0400) == 0x1p-14f);
    assert_true(isinf(yard_f32_from_f16(0x7c00)));
    assert_true(isnan(yard_f32_from_f16(0x7e00)));
}

static void utf8(void **state)
{
    static const struct {
        const char *text;
        size_t n_bytes;
        bool valid;
        size_t bad_at;
    } cases[] = {
        { "", 0, true, 0 },
        { "a\0b", 3, true, 0 },
        { "\xf4\x8f\xbf\xbf", 4, true, 0 },
        { "\xf4\x90\x80\x80", 4, false, 0 },
        { "x\xc0\x80", 3, false, 1 },
        { "\xed\xa0\x80", 3, false, 0 },
        { "\xe4\xbd\xa0\xe4\xbd", 5, false, 3 },
        { "\x80", 1, false, 0 },
    };
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t bad_at = 0;
        assert_int_equal(yard_utf8_valid(cases[i].text, cases[i].n_bytes, &bad_at), cases[i].valid);
        assert_int_equal(bad_at, cases[i].bad_at);
    }
}

static void errors_are_one_printable_line(void **state)
{
    yard_error err = { 0 };
    char long_name[2000];

    (void)state;
    assert_int_equal(yard_fail(&err, YARD_EFORMAT, "name '%s'", "a\nb\x1b[31m\xff"), YARD_EFORMAT);
    assert_string_equal(err.message, "name 'a?b?[31m?'");
    memset(long_name, 'x', sizeof(long_name));
    memcpy(long_name + 500, "\xe4\xbd\xa0\xe4\xbd\xa0\xe4\xbd\xa0\xe4\xbd\xa0", 12);
    long_name[1999] = '\0';
    yard_fail(&err, YARD_EIO, "%s", long_name);
    assert_true(strlen(err.message) < YARD_ERROR_MESSAGE_BYTES);
    assert_true(yard_utf8_valid(err.message, strlen(err.message), NULL));
    assert_int_equal(yard_fail(NULL, YARD_EIO, "nobody listens"), YARD_EIO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(e4m3_round_trip),
        cmocka_unit_test(e4m3_rounds_to_nearest_even),
        cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(f16_known_values),
        cmocka_unit_test(utf8),
        cmocka_unit_test(errors_are_one_printable_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
