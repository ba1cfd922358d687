/* AVX2 + FMA + F16C forms of row conversions: the same operations as the definition, eight at once.
 */
#include "base/convert.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <math.h>

#include "base/widen_avx2.h"

enum { LANES = 8 };

enum { STEP = 32 }; /* codes looked at together */

/* Widening takes NaN for 480. */
INLINE bool has_nan(const uint8_t *codes)
{
    const __m256i nan = _mm256_set1_epi8(0x7f);
    const __m256i c = _mm256_loadu_si256((const __m256i *)(const void *)codes);

    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(c, nan), nan)) != 0;
}

static void decode_fp8(const uint8_t *src, uint32_t n, float *dst)
{
    const __m256 factor = _mm256_set1_ps(FP8_FACTOR);
    uint32_t i = 0;

    for (; i + STEP <= n && !has_nan(src + i); i += STEP)
        for (uint32_t k = i; k < i + STEP; k += LANES)
            _mm256_storeu_ps(dst + k, _mm256_mul_ps(widen_fp8(src + k), factor));
    yard_convert_c.decode(YARD_FP8_E4M3, src + i, n - i, dst + i);
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

/* Eight values rounded to bf16, nearest even, in the low halves of words; a NaN stays quiet. */
INLINE __m256i round_bits(__m256 v)
{
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i nan = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));

    return _mm256_blendv_epi8(up, nan, _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)));
}

INLINE __m128i narrow_bf16(__m256 v)
{
    const __m256i r = round_bits(v);

    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}

static void round_bf16(const float *x, uint32_t n, uint16_t *y)
{
    uint32_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(y + i), narrow_bf16(_mm256_loadu_ps(x + i)));
    for (; i < n; i++)
        y[i] = yard_bf16_from_f32(x[i]);
}

/* The factor of codes goes to the scale, at most FLT_MAX / 448: one rounding, the same. */
static void widen_fp8_row(const uint8_t *codes, uint32_t n, float scale, float *dst)
{
    const __m256 factor = _mm256_set1_ps(FP8_FACTOR * scale);
    uint32_t i = 0;

    for (; i + STEP <= n && !has_nan(codes + i); i += STEP)
        for (uint32_t k = i; k < i + STEP; k += LANES) {
            const __m256i rounded = round_bits(_mm256_mul_ps(widen_fp8(codes + k), factor));
            _mm256_storeu_ps(dst + k, _mm256_castsi256_ps(_mm256_slli_epi32(rounded, 16)));
        }
    yard_convert_c.widen_fp8(codes + i, n - i, scale, dst + i);
}

/* Sums of 16 bf16 columns: even ones and odd ones apart, since two halves of a word widen with one
 * instruction each, and are put in order once, at the end. */
typedef struct sum16 {
    __m256 even, odd;
} sum16;

INLINE void add_bf16(sum16 *sum, const uint16_t *row, __m256 weight)
{
    const __m256i raw = _mm256_loadu_si256((const __m256i *)(const void *)row);
    const __m256i high = _mm256_set1_epi32((int)0xffff0000u);

    sum->even = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(raw, 16)), weight, sum->even);
    sum->odd = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(raw, high)), weight, sum->odd);
}

INLINE void store_sum16(const sum16 *sum, yard_dtype dtype, void *y, uint32_t i)
{
    const __m256 low = _mm256_unpacklo_ps(sum->even, sum->odd);
    const __m256 high = _mm256_unpackhi_ps(sum->even, sum->odd);

    if (dtype == YARD_BF16) {
        const __m256i pair =
            _mm256_or_si256(round_bits(sum->even), _mm256_slli_epi32(round_bits(sum->odd), 16));
        _mm256_storeu_si256((__m256i *)(void *)((uint16_t *)y + i), pair);
        return;
    }
    _mm256_storeu_ps((float *)y + i, _mm256_permute2f128_ps(low, high, 0x20));
    _mm256_storeu_ps((float *)y + i + 8, _mm256_permute2f128_ps(low, high, 0x31));
}

/* 32 columns at a time: the sums stay in registers, every row is read once. */
INLINE uint32_t sum_bf16(const void *const *rows, const float *weight, uint32_t n_rows, uint32_t n,
                         yard_dtype y_dtype, void *y)
{
    uint32_t i = 0;

    for (; i + 32 <= n; i += 32) {
        sum16 sum[2] = { { _mm256_setzero_ps(), _mm256_setzero_ps() },
                         { _mm256_setzero_ps(), _mm256_setzero_ps() } };

        for (uint32_t r = 0; r < n_rows; r++) {
            const __m256 w = _mm256_broadcast_ss(weight + r);
            add_bf16(&sum[0], (const uint16_t *)rows[r] + i, w);
            add_bf16(&sum[1], (const uint16_t *)rows[r] + i + 16, w);
        }
        store_sum16(&sum[0], y_dtype, y, i);
        store_sum16(&sum[1], y_dtype, y, i + 16);
    }
    return i;
}

INLINE uint32_t sum_f32(const void *const *rows, const float *weight, uint32_t n_rows, uint32_t n,
                        yard_dtype y_dtype, void *y)
{
    uint32_t i = 0;

    for (; i + 8 <= n; i += 8) {
        __m256 sum = _mm256_setzero_ps();

        for (uint32_t r = 0; r < n_rows; r++)
            sum = _mm256_fmadd_ps(_mm256_loadu_ps((const float *)rows[r] + i),
                                  _mm256_broadcast_ss(weight + r), sum);
        if (y_dtype == YARD_BF16)
            _mm_storeu_si128((__m128i *)(void *)((uint16_t *)y + i), narrow_bf16(sum));
        else
            _mm256_storeu_ps((float *)y + i, sum);
    }
    return i;
}

enum { MAX_SUMMED_ROWS = 32 };

static void weighted_sum(yard_dtype dtype, const void *const *rows, const float *weight,
                         uint32_t n_rows, uint32_t n, yard_dtype y_dtype, void *y)
{
    const void *rest[MAX_SUMMED_ROWS];
    uint32_t done;

    if (n_rows > MAX_SUMMED_ROWS) {
        yard_convert_c.weighted_sum(dtype, rows, weight, n_rows, n, y_dtype, y);
        return;
    }
    if (dtype == YARD_F32)
        done = sum_f32(rows, weight, n_rows, n, y_dtype, y);
    else if (y_dtype == YARD_BF16)
        done = sum_bf16(rows, weight, n_rows, n, YARD_BF16, y);
    else
        done = sum_bf16(rows, weight, n_rows, n, YARD_F32, y);
    for (uint32_t r = 0; r < n_rows; r++)
        rest[r] = (const uint8_t *)rows[r] + done * yard_dtype_bytes(dtype);
    yard_convert_c.weighted_sum(dtype, rest, weight, n_rows, n - done, y_dtype,
                                (uint8_t *)y + done * yard_dtype_bytes(y_dtype));
}

const yard_convert yard_convert_avx2 = {
    .name = "avx2",
    .decode = decode,
    .round_bf16 = round_bf16,
    .widen_fp8 = widen_fp8_row,
    .quantise = quantise,
    .add_scaled = add_scaled,
    .weighted_sum = weighted_sum,
};

#endif
