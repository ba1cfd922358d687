/* FP8 codes to bf16 in registers, and the sum of LANES partial sums; only for files compiled with
 * AVX-512 VBMI and BF16. */
#ifndef YARD_OPS_CPU_WIDEN_AVX512_H
#define YARD_OPS_CPU_WIDEN_AVX512_H

#include <immintrin.h>
#include <stdint.h>

#include "base/widen_avx2.h"

enum { STEP = 64 }; /* codes widened at once */

/* The codes of one exponent above 0. */
#define BF16_EIGHT(exponent)                                                                       \
    ((exponent) + 120) << 7, ((exponent) + 120) << 7 | 0x10, ((exponent) + 120) << 7 | 0x20,       \
        ((exponent) + 120) << 7 | 0x30, ((exponent) + 120) << 7 | 0x40,                            \
        ((exponent) + 120) << 7 | 0x50, ((exponent) + 120) << 7 | 0x60,                            \
        ((exponent) + 120) << 7 | 0x70

/* bf16 bits of the 128 codes without sign; the first eight are e4m3's subnormals. */
static const uint16_t bf16_of_code[128] = {
    0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60, BF16_EIGHT(1), BF16_EIGHT(2),
    BF16_EIGHT(3), BF16_EIGHT(4), BF16_EIGHT(5), BF16_EIGHT(6), BF16_EIGHT(7), BF16_EIGHT(8),
    BF16_EIGHT(9), BF16_EIGHT(10), BF16_EIGHT(11), BF16_EIGHT(12), BF16_EIGHT(13), BF16_EIGHT(14),
    /* 15, whose last code is NaN */
    135 << 7, 135 << 7 | 0x10, 135 << 7 | 0x20, 135 << 7 | 0x30, 135 << 7 | 0x40, 135 << 7 | 0x50,
    135 << 7 | 0x60, 0x7fc0
};

/* Their low and high bytes apart. */
typedef struct code_tables {
    __m512i low[2], high[2];
} code_tables;

INLINE __m512i bytes_of_words(const uint16_t *words, int shift)
{
    const __m512i a = _mm512_loadu_si512(words), b = _mm512_loadu_si512(words + 32);

    return _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm512_cvtepi16_epi8(shift ? _mm512_srli_epi16(a, 8) : a)),
        _mm512_cvtepi16_epi8(shift ? _mm512_srli_epi16(b, 8) : b), 1);
}

INLINE code_tables load_code_tables(void)
{
    return (
        code_tables){ { bytes_of_words(bf16_of_code, 0), bytes_of_words(bf16_of_code + 64, 0) },
                      { bytes_of_words(bf16_of_code, 1), bytes_of_words(bf16_of_code + 64, 1) } };
}

/* STEP codes as bf16: of each four codes the first two, then the others. */
typedef struct bf16_step {
    __m512i at[2];
} bf16_step;

INLINE bf16_step widen_codes(const code_tables *t, __m512i codes)
{
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_set_epi64x(0x0f0e0b0a07060302, 0x0d0c090805040100));
    const __m512i c = _mm512_shuffle_epi8(codes, order);
    const __m512i low = _mm512_permutex2var_epi8(t->low[0], c, t->low[1]);
    const __m512i high = _mm512_permutex2var_epi8(t->high[0], c, t->high[1]);
    /* high | (c & 0x80) */
    const __m512i sign = _mm512_ternarylogic_epi32(high, c, _mm512_set1_epi8((char)0x80), 0xf8);

    return (bf16_step){ { _mm512_unpacklo_epi8(low, sign), _mm512_unpackhi_epi8(low, sign) } };
}

/* The first n of STEP codes, the others 0. */
INLINE __m512i load_codes(const uint8_t *w, uint32_t n)
{
    return n >= STEP ? _mm512_loadu_si512(w) : _mm512_maskz_loadu_epi8(((uint64_t)1 << n) - 1, w);
}

/* Up to a CHUNK of codes, n of them, of two rows as bf16: two values of each lane, then two more.
 */
INLINE bf16_step load_two_rows(const code_tables *t, const uint8_t *first, const uint8_t *second,
                               uint32_t n)
{
    __m256i a, b;

    if (n >= STEP / 2) {
        a = _mm256_loadu_si256((const __m256i *)(const void *)first);
        b = _mm256_loadu_si256((const __m256i *)(const void *)second);
    } else {
        a = _mm256_maskz_loadu_epi8((1u << n) - 1, first);
        b = _mm256_maskz_loadu_epi8((1u << n) - 1, second);
    }
    return widen_codes(t, _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
}

/* Pairs of bf16 values as f32. */
INLINE void split_bf16(__m512i two, __m512 *odd, __m512 *even)
{
    *odd = _mm512_castsi512_ps(_mm512_and_si512(two, _mm512_set1_epi32((int)0xffff0000u)));
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(two, 16));
}

/* Pairwise: l with l + 8, l + 4, l + 2, l + 1. */
INLINE float add_lanes(__m512 v)
{
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));

    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

#endif
