/* FP8 codes to bf16 by byte tables, a CHUNK at a time. Only for files compiled with AVX2. */
#ifndef YARD_OPS_CPU_WIDEN_CODES_AVX2_H
#define YARD_OPS_CPU_WIDEN_CODES_AVX2_H

#include "base/widen_avx2.h"

/* What makes bf16 of codes: the low byte is the code's low half, in front; the high byte is found
 * by the code's high half. Codes of exponent 0 are put right by their low half: m is m 2^-9. */
typedef struct code_tables {
    __m256i high, high_fix, low_fix;
    __m256i half, unsigned_code, to_small;
} code_tables;

INLINE __m256i byte_table(uint64_t low, uint64_t high)
{
    __m256i v =
        _mm256_setr_epi64x((long long)low, (long long)high, (long long)low, (long long)high);

    IN_REGISTER(v); /* or in memory, but not made anew for every group */
    return v;
}

INLINE code_tables load_code_tables(void)
{
    return (code_tables){
        .high = byte_table(0x434241403f3e3d3c, 0xc3c2c1c0bfbebdbc),
        .high_fix = byte_table(0x000000000707073c, 0),
        .low_fix = byte_table(0x10207040f0a01000, 0),
        .half = byte_table(0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f),
        .unsigned_code = byte_table(0x7f7f7f7f7f7f7f7f, 0x7f7f7f7f7f7f7f7f),
        .to_small = byte_table(0x7070707070707070, 0x7070707070707070),
    };
}

/* So that widening gives a CHUNK in quads: of each four codes the first two, then the others. */
INLINE __m256i codes_in_quads(__m256i codes)
{
    const __m256i order = _mm256_set_epi64x(0x0f0e0b0a07060302, 0x0d0c090805040100,
                                            0x0f0e0b0a07060302, 0x0d0c090805040100);

    return _mm256_shuffle_epi8(codes, order);
}

/* A CHUNK of values: the first and third eight of them, the second and fourth. */
typedef struct bf16_chunk {
    __m256i half[2];
} bf16_chunk;

INLINE bf16_chunk widen_codes(const code_tables *t, __m256i codes)
{
    const __m256i low = _mm256_and_si256(codes, t->half);
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), t->half);
    /* below 128 for codes of exponents 0 and 1: others look up a 0 */
    const __m256i small = _mm256_add_epi8(_mm256_and_si256(codes, t->unsigned_code), t->to_small);
    const __m256i high_byte = _mm256_xor_si256(_mm256_shuffle_epi8(t->high, high),
                                               _mm256_shuffle_epi8(t->high_fix, small));
    const __m256i low_byte =
        _mm256_xor_si256(_mm256_slli_epi16(low, 4), _mm256_shuffle_epi8(t->low_fix, small));

    return (bf16_chunk){ { _mm256_unpacklo_epi8(low_byte, high_byte),
                           _mm256_unpackhi_epi8(low_byte, high_byte) } };
}

#endif
