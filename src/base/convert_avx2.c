/* AVX2 + FMA + F16C forms of row conversions: the same operations as the definition, eight at once.
 */
#include "base/convert.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <math.h>

#include "base/widen_avx2.h"

enum { LANES = 8 };

static void decode_fp8(const uint8_t *src, uint32_t n, float *dst)
{
    const __m256 factor = _mm256_set1_ps(FP8_FACTOR);
    uint32_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(dst + i, _mm256_mul_ps(widen_fp8(src + i), factor));
    for (; i < n; i++)
        dst[i] = yard_f32_from_e4m3(src[i]);
}

static void decode(yard_dtype dtype, const void *src, uint32_t n, float *dst)
{
    const uint16_t *halves = src;
    uint32_t i = 0;

    switch (dtype) {
    case YARD_FP8_E4M3:
        decode_fp8(src, n, dst);
        break;
    case YARD_BF16:
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(dst + i, widen_bf16(halves + i));
        for (; i < n; i++)
            dst[i] = yard_f32_from_bf16(halves[i]);
        break;
    case YARD_F16:
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(dst + i,
                             _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i))));
        for (; i < n; i++)
            dst[i] = yard_f32_from_f16(halves[i]);
        break;
    default:
        memcpy(dst, src, n * sizeof(*dst));
    }
}

static void add_scaled(const float *part, uint32_t n, float f, float *acc)
{
    const __m256 fv = _mm256_set1_ps(f);
    uint32_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(acc + i,
                         _mm256_fmadd_ps(_mm256_loadu_ps(part + i), fv, _mm256_loadu_ps(acc + i)));
    for (; i < n; i++)
        acc[i] = fmaf(part[i], f, acc[i]);
}

/* Eight values, |x| <= 464 or more, to codes: the integer form of yard_e4m3_from_f32. */
INLINE __m256i encode_fp8(__m256 x)
{
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(magnitude, _mm256_set1_epi32(0x7ffff)), odd);
    const __m256i normal =
        _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32(120 << 3));
    const __m256i subnormal = _mm256_and_si256(
        _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p14f))),
        _mm256_set1_epi32(0xff));
    __m256i code = _mm256_blendv_epi8(normal, subnormal,
                                      _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), magnitude));

    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7e),
                              _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x43e7ffff)));
    code = _mm256_or_si256(code, sign);
    return _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f),
                              _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000)));
}

/* The low byte of eight 32-bit lanes. */
INLINE void store_bytes(__m256i v, uint8_t *dst)
{
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));

    _mm_storel_epi64((__m128i *)(void *)dst, _mm_packus_epi16(words, words));
}

/* One whole group; others go to the definition. */
static void quantise_group(const float *x, bool ue8m0, uint8_t *codes, float *scales)
{
    const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 amax = _mm256_setzero_ps();
    __m256 inverse;
    __m128 four;
    float values[4], most = 0.0f;

    /* max(new, old) keeps old where new is a NaN, as the definition's comparison does */
    for (int i = 0; i < YARD_GROUP; i += LANES)
        amax = _mm256_max_ps(_mm256_and_ps(_mm256_loadu_ps(x + i), no_sign), amax);
    four = _mm_max_ps(_mm256_castps256_ps128(amax), _mm256_extractf128_ps(amax, 1));
    _mm_storeu_ps(values, four);
    for (int i = 0; i < 4; i++)
        most = values[i] > most ? values[i] : most;
    if (ue8m0 || most < 0x1p-100f) { /* rare: rounding of scales, zeros, no finite inverse */
        yard_convert_c.quantise(x, YARD_GROUP, ue8m0, codes, scales);
        return;
    }
    *scales = most / 448.0f;
    inverse = _mm256_set1_ps(1.0f / *scales);
    for (int i = 0; i < YARD_GROUP; i += LANES)
        store_bytes(encode_fp8(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse)), codes + i);
}

static void quantise(const float *x, uint32_t n, bool ue8m0, uint8_t *codes, float *scales)
{
    uint32_t k = 0;

    for (; k + YARD_GROUP <= n; k += YARD_GROUP)
        quantise_group(x + k, ue8m0, codes + k, scales + k / YARD_GROUP);
    if (k < n)
        yard_convert_c.quantise(x + k, n - k, ue8m0, codes + k, scales + k / YARD_GROUP);
}

static void round_bf16(const float *x, uint32_t n, uint16_t *y)
{
    uint32_t i = 0;

    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i up = _mm256_srli_epi32(
            _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
        const __m256i nan = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
        const __m256i r =
            _mm256_blendv_epi8(up, nan, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));

        _mm_storeu_si128(
            (__m128i *)(void *)(y + i),
            _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
    }
    for (; i < n; i++)
        y[i] = yard_bf16_from_f32(x[i]);
}

const yard_convert yard_convert_avx2 = {
    .name = "avx2",
    .decode = decode,
    .round_bf16 = round_bf16,
    .quantise = quantise,
    .add_scaled = add_scaled,
};

#endif
