/* Eight stored values to f32, in registers; only for files compiled with AVX2 and F16C. FP8 codes
 * become half-precision bits (sign, exponent, mantissa shifted into place), whose value is 2^-8 of
 * the code's; the factor is exact wherever it is undone. */
#ifndef YARD_BASE_WIDEN_AVX2_H
#define YARD_BASE_WIDEN_AVX2_H

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define FP8_FACTOR 256.0f

/* The value stays in a register: a compiler would rather load it again for every use, and loads are
 * what products have too many of. */
#define IN_REGISTER(v) __asm__("" : "+v"(v))

/* Eight codes, times 2^-8. */
INLINE __m256 widen_fp8(const uint8_t *codes)
{
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)codes));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16((short)0xbfff));

    return _mm256_cvtph_ps(half);
}

INLINE __m256 widen_bf16(const uint16_t *halves)
{
    const __m128i raw = _mm_loadu_si128((const __m128i *)halves);

    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

#endif
