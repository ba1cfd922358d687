/* The plain C definition of row conversions, and the choice among its forms. */
#include "base/convert.h"

#include <math.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

static void decode(yard_dtype dtype, const void *src, uint32_t n, float *dst)
{
    const uint8_t *codes = src;
    const uint16_t *halves = src;

    switch (dtype) {
    case YARD_FP8_E4M3:
        for (uint32_t i = 0; i < n; i++)
            dst[i] = yard_f32_from_e4m3(codes[i]);
        break;
    case YARD_BF16:
        for (uint32_t i = 0; i < n; i++)
            dst[i] = yard_f32_from_bf16(halves[i]);
        break;
    case YARD_F16:
        for (uint32_t i = 0; i < n; i++)
            dst[i] = yard_f32_from_f16(halves[i]);
        break;
    default:
        memcpy(dst, src, n * sizeof(*dst));
    }
}

static void add_scaled(const float *part, uint32_t n, float f, float *acc)
{
    for (uint32_t i = 0; i < n; i++)
        acc[i] = fmaf(part[i], f, acc[i]);
}

static float value_at(yard_dtype dtype, const void *row, uint32_t i)
{
    return dtype == YARD_BF16 ? yard_f32_from_bf16(((const uint16_t *)row)[i])
                              : ((const float *)row)[i];
}

static void weighted_sum(yard_dtype dtype, const void *const *rows, const float *weight,
                         uint32_t n_rows, uint32_t n, yard_dtype y_dtype, void *y)
{
    for (uint32_t i = 0; i < n; i++) {
        float sum = 0.0f;

        for (uint32_t r = 0; r < n_rows; r++)
            sum = fmaf(value_at(dtype, rows[r], i), weight[r], sum);
        if (y_dtype == YARD_BF16)
            ((uint16_t *)y)[i] = yard_bf16_from_f32(sum);
        else
            ((float *)y)[i] = sum;
    }
}

/* The smallest power of two that is not below x; x > 0. */
static float power_of_two_above(float x)
{
    int exponent;
    const float fraction = frexpf(x, &exponent);

    return ldexpf(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

static float group_scale(float amax, bool ue8m0)
{
    const float exact = amax / 448.0f;

    if (amax == 0.0f)
        return 1.0f;
    return ue8m0 && isfinite(exact) ? power_of_two_above(exact) : exact;
}

static void quantise(const float *x, uint32_t n, bool ue8m0, uint8_t *codes, float *scales)
{
    for (uint32_t k = 0, group = 0; k < n; k += YARD_GROUP, group++) {
        const uint32_t end = n - k < YARD_GROUP ? n : k + YARD_GROUP;
        float amax = 0.0f, inverse;

        for (uint32_t i = k; i < end; i++)
            if (fabsf(x[i]) > amax)
                amax = fabsf(x[i]);
        scales[group] = group_scale(amax, ue8m0);
        inverse = 1.0f / scales[group];
        /* a scale below 2^-128 has no finite inverse; zeros stay zeros then too */
        for (uint32_t i = k; i < end; i++)
            codes[i] = yard_e4m3_from_f32(x[i] == 0.0f ? x[i] : x[i] * inverse);
    }
}

static void round_bf16(const float *x, uint32_t n, uint16_t *y)
{
    for (uint32_t i = 0; i < n; i++)
        y[i] = yard_bf16_from_f32(x[i]);
}

static void widen_fp8(const uint8_t *codes, uint32_t n, float scale, float *dst)
{
    for (uint32_t i = 0; i < n; i++)
        dst[i] = yard_bf16_round(yard_f32_from_e4m3(codes[i]) * scale);
}

const yard_convert yard_convert_c = {
    .name = "c",
    .decode = decode,
    .round_bf16 = round_bf16,
    .widen_fp8 = widen_fp8,
    .quantise = quantise,
    .add_scaled = add_scaled,
    .weighted_sum = weighted_sum,
};

bool yard_cpu_has_avx2(void)
{
#if defined(__x86_64__)
    unsigned int a, b, c, d;

    __builtin_cpu_init();
    /* clang 14 does not know "f16c" */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
#else
    return false;
#endif
}

bool yard_cpu_has_avx512(void)
{
#if defined(__x86_64__)
    return yard_cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
           __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

const yard_convert *yard_convert_best(void)
{
#if defined(__x86_64__)
    if (yard_cpu_has_avx2())
        return &yard_convert_avx2;
#endif
    return &yard_convert_c;
}
