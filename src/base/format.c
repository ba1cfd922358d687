/* Number formats: fp8 e4m3, f16, bf16 (the short ones are inline in base.h). */
#include <math.h>

#include "base/base.h"

size_t yard_dtype_bytes(yard_dtype dtype)
{
    static const size_t n_bytes[YARD_DTYPE_COUNT] = {
        [YARD_F32] = 4, [YARD_BF16] = 2, [YARD_F16] = 2, [YARD_FP8_E4M3] = 1
    };
    return n_bytes[dtype];
}

const char *yard_dtype_name(yard_dtype dtype)
{
    static const char *const name[YARD_DTYPE_COUNT] = {
        [YARD_F32] = "f32", [YARD_BF16] = "bf16", [YARD_F16] = "f16", [YARD_FP8_E4M3] = "fp8_e4m3"
    };
    return name[dtype];
}

float yard_f32_from_f16(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t exponent = h >> 10 & 0x1fu;
    const uint32_t mantissa = h & 0x3ffu;

    if (exponent == 0x1f)
        return yard_f32_from_bits(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0) {
        const float value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    return yard_f32_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

/* value = (-1)^s 2^(e - 7) (1 + m / 8), subnormal 2^-6 m / 8; 0x7f and 0xff are NaN. */
#define E4M3_MAGNITUDE(c)                                                                          \
    (((c)&0x7f) == 0x7f ? NAN                                                                      \
                        : (((c) >> 3 & 15) == 0 ? (float)((c)&7) * 0x1p-9f                         \
                                                : (float)(8 + ((c)&7)) * 0x1p-10f *                \
                                                      (float)(1u << ((c) >> 3 & 15))))
#define E4M3_VALUE(c) ((c)&0x80 ? -E4M3_MAGNITUDE(c) : E4M3_MAGNITUDE(c))
#define E4M3_4(c) E4M3_VALUE(c), E4M3_VALUE((c) + 1), E4M3_VALUE((c) + 2), E4M3_VALUE((c) + 3)
#define E4M3_16(c) E4M3_4(c), E4M3_4((c) + 4), E4M3_4((c) + 8), E4M3_4((c) + 12)
#define E4M3_64(c) E4M3_16(c), E4M3_16((c) + 16), E4M3_16((c) + 32), E4M3_16((c) + 48)

const float yard_e4m3_table[256] = { E4M3_64(0), E4M3_64(64), E4M3_64(128), E4M3_64(192) };

uint8_t yard_e4m3_from_f32(float x)
{
    const uint32_t bits = yard_bits_from_f32(x);
    const uint8_t sign = (uint8_t)(bits >> 24 & 0x80u);
    const uint32_t magnitude = bits & 0x7fffffffu;

    if (magnitude > 0x7f800000u)
        return 0x7f;
    if (magnitude >= 0x43e80000u) /* 464 and more round beyond 448, or tie to the even code 0x80 */
        return sign | 0x7e;
    if (magnitude < 0x3c800000u) {
        /* below 2^-6 the codes are multiples of 2^-9; adding 2^14 leaves just those bits, rounded
         * to nearest even by the adder */
        const float rounded = yard_f32_from_bits(magnitude) + 0x1p14f;
        return (uint8_t)(sign | (yard_bits_from_f32(rounded) & 0xffu));
    }
    /* keep 3 bits of mantissa; a carry into the exponent is what rounding up means */
    const uint32_t rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u);
    return (uint8_t)(sign | ((rounded >> 20) - (120u << 3)));
}

bool yard_all_finite(const float *x, size_t n)
{
    float sum = 0.0f;

    for (size_t i = 0; i < n; i++)
        sum += x[i] * 0.0f; /* a NaN if any is not finite */
    return sum == 0.0f;
}
