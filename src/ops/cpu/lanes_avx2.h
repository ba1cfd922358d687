/* LANES partial sums in AVX2 registers. There are 16 of these, so tiles of sums work on one half of
 * the lanes at a time: 12 sums of 8 lanes, and what is multiplied. Only for files compiled with
 * AVX2 and FMA. */
#ifndef YARD_OPS_CPU_LANES_AVX2_H
#define YARD_OPS_CPU_LANES_AVX2_H

#include "base/widen_avx2.h"
#include "ops/cpu/cpu.h"

enum { HALF = LANES / 2 }; /* SCALED_LANES too */

/* Pairwise: l with l + 4, l + 2, l + 1. */
INLINE float add_eight(__m256 v)
{
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));

    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float add_lanes(const float *lanes)
{
    return add_eight(_mm256_add_ps(_mm256_loadu_ps(lanes), _mm256_loadu_ps(lanes + HALF)));
}

#endif
