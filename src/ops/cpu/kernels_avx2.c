/* AVX2 + FMA + F16C variants of the inner kernels: the same operations in the same order as the
 * definition, so the same bits. */
#include "ops/cpu/cpu.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <math.h>

#include "ops/cpu/exp.h"
#include "ops/cpu/lanes_avx2.h"

/* The first n of eight f32 lanes, n in 1..8. */
INLINE __m256i lane_mask(uint32_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

enum {
    AXPY_ROWS = 4,
    AXPY_SUMS = 8,    /* vectors: enough for both units */
    AXPY_COLUMNS = 64 /* of 64 rows of w: half of the first cache */
};

/* acc[m, c .. c + 8 nc) over all r. */
INLINE void axpy_tile(const float *x, size_t x_ld, int mx, const float *w, size_t w_ld,
                      uint32_t n_r, int nc, float *acc, size_t acc_ld)
{
    __m256 sum[AXPY_ROWS][AXPY_SUMS];

    for (int m = 0; m < mx; m++)
        for (int c = 0; c < nc; c++)
            sum[m][c] = _mm256_loadu_ps(acc + m * acc_ld + c * 8);
    for (uint32_t r = 0; r < n_r; r++) {
        __m256 wv[AXPY_SUMS];
        for (int c = 0; c < nc; c++)
            wv[c] = _mm256_loadu_ps(w + r * w_ld + c * 8);
        for (int m = 0; m < mx; m++) {
            const __m256 xv = _mm256_broadcast_ss(x + m * x_ld + r);
            for (int c = 0; c < nc; c++)
                sum[m][c] = _mm256_fmadd_ps(xv, wv[c], sum[m][c]);
        }
    }
    for (int m = 0; m < mx; m++)
        for (int c = 0; c < nc; c++)
            _mm256_storeu_ps(acc + m * acc_ld + c * 8, sum[m][c]);
}

/* mx rows at n_c columns. */
INLINE void axpy_rows(const float *x, size_t x_ld, int mx, const float *w, size_t w_ld,
                      uint32_t n_r, uint32_t n_c, float *acc, size_t acc_ld)
{
    const int most = AXPY_SUMS / mx;
    uint32_t c = 0;

    for (; c + 8 * (uint32_t)most <= n_c; c += 8 * (uint32_t)most)
        axpy_tile(x, x_ld, mx, w + c, w_ld, n_r, most, acc + c, acc_ld);
    for (; c + 8 <= n_c; c += 8)
        axpy_tile(x, x_ld, mx, w + c, w_ld, n_r, 1, acc + c, acc_ld);
    for (; c < n_c; c++)
        for (int m = 0; m < mx; m++)
            for (uint32_t r = 0; r < n_r; r++)
                acc[m * acc_ld + c] = fmaf(x[m * x_ld + r], w[r * w_ld + c], acc[m * acc_ld + c]);
}

/* All rows at as many columns as a page of rows of w leaves in the first cache. */
static void axpy(const float *x, size_t x_ld, uint32_t n_x, const float *w, size_t w_ld,
                 uint32_t n_r, uint32_t n_c, float *acc, size_t acc_ld)
{
    for (uint32_t c = 0; c < n_c; c += AXPY_COLUMNS) {
        const uint32_t n = n_c - c < AXPY_COLUMNS ? n_c - c : AXPY_COLUMNS;
        uint32_t m = 0;

        for (; m + 4 <= n_x; m += 4)
            axpy_rows(x + m * x_ld, x_ld, 4, w + c, w_ld, n_r, n, acc + m * acc_ld + c, acc_ld);
        for (; m + 2 <= n_x; m += 2)
            axpy_rows(x + m * x_ld, x_ld, 2, w + c, w_ld, n_r, n, acc + m * acc_ld + c, acc_ld);
        if (m < n_x)
            axpy_rows(x + m * x_ld, x_ld, 1, w + c, w_ld, n_r, n, acc + m * acc_ld + c, acc_ld);
    }
}

/* A zero may come back with the other sign than the definition's: as a maximum it is the same. */
float yard_cpu_scale_max_avx2(float *x, uint32_t n, float f, float max)
{
    const __m256 fv = _mm256_set1_ps(f);
    __m256 largest = _mm256_set1_ps(max);
    __m128 four;
    uint32_t i = 0;

    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), fv);
        _mm256_storeu_ps(x + i, v);
        largest = _mm256_max_ps(v, largest); /* the second where one is a NaN */
    }
    four = _mm_max_ps(_mm256_castps256_ps128(largest), _mm256_extractf128_ps(largest, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    max = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    for (; i < n; i++) {
        x[i] *= f;
        if (x[i] > max)
            max = x[i];
    }
    return max;
}

void yard_cpu_scale_avx2(float *acc, uint32_t n, float f)
{
    const __m256 fv = _mm256_set1_ps(f);
    uint32_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(acc + i, _mm256_mul_ps(_mm256_loadu_ps(acc + i), fv));
    for (; i < n; i++)
        acc[i] *= f;
}

float yard_cpu_sum_squares_avx2(const float *x, uint32_t n)
{
    enum { EIGHTS = SQUARE_LANES / 8 };
    __m256 lane[EIGHTS] = { 0 };
    uint32_t i = 0;

    for (; i + SQUARE_LANES <= n; i += SQUARE_LANES)
        for (int e = 0; e < EIGHTS; e++) {
            const __m256 v = _mm256_loadu_ps(x + i + 8 * e);
            lane[e] = _mm256_fmadd_ps(v, v, lane[e]);
        }
    for (int e = 0; e < EIGHTS && i + 8 * e < n; e++) {
        const uint32_t left = n - i - 8 * e;
        const __m256 v = left >= 8 ? _mm256_loadu_ps(x + i + 8 * e)
                                   : _mm256_maskload_ps(x + i + 8 * e, lane_mask(left));
        lane[e] = _mm256_fmadd_ps(v, v, lane[e]);
    }
    for (int half = EIGHTS / 2; half > 0; half /= 2)
        for (int e = 0; e < half; e++)
            lane[e] = _mm256_add_ps(lane[e], lane[e + half]);
    return add_eight(lane[0]);
}

INLINE __m256 exp8(__m256 x)
{
    const __m256 tiny = _mm256_cmp_ps(x, _mm256_set1_ps(EXP_MIN), _CMP_LT_OQ);
    const __m256 clamped =
        _mm256_max_ps(_mm256_min_ps(_mm256_set1_ps(EXP_MAX), x), _mm256_set1_ps(EXP_MIN));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(clamped, _mm256_set1_ps(EXP_LOG2E)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-EXP_LN2_HIGH), clamped);
    __m256 p = _mm256_set1_ps(EXP_C6);
    __m256i power;

    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-EXP_LN2_LOW), r);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C2));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    p = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
    p = _mm256_andnot_ps(tiny, p);
    /* a NaN stays the NaN it was */
    return _mm256_blendv_ps(p, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

float yard_cpu_exp_sum_avx2(float *x, uint32_t n, float max)
{
    const __m256 maxv = _mm256_set1_ps(max);
    __m256 lane = _mm256_setzero_ps();
    uint32_t i = 0;

    for (; i + 8 <= n; i += 8) {
        const __m256 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(x + i), maxv));
        _mm256_storeu_ps(x + i, e);
        lane = _mm256_add_ps(lane, e);
    }
    if (i < n) {
        const __m256i mask = lane_mask(n - i);
        const __m256 e = exp8(_mm256_sub_ps(_mm256_maskload_ps(x + i, mask), maxv));
        _mm256_maskstore_ps(x + i, mask, e);
        lane = _mm256_add_ps(lane, _mm256_and_ps(e, _mm256_castsi256_ps(mask)));
    }
    return add_eight(lane);
}

INLINE __m256 silu_mul8(__m256 gate, __m256 up)
{
    const __m256 minus = _mm256_xor_ps(gate, _mm256_set1_ps(-0.0f));
    const __m256 below = _mm256_add_ps(_mm256_set1_ps(1.0f), exp8(minus));

    return _mm256_mul_ps(_mm256_div_ps(gate, below), up);
}

void yard_cpu_silu_mul_avx2(const float *gate, const float *up, uint32_t n, float *y)
{
    uint32_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, silu_mul8(_mm256_loadu_ps(gate + i), _mm256_loadu_ps(up + i)));
    if (i < n) {
        const __m256i mask = lane_mask(n - i);
        _mm256_maskstore_ps(
            y + i, mask,
            silu_mul8(_mm256_maskload_ps(gate + i, mask), _mm256_maskload_ps(up + i, mask)));
    }
}

const cpu_kernels yard_cpu_kernels_avx2 = {
    .name = "avx2",
    .reason = "the processor has AVX2, FMA and F16C",
    .convert = &yard_convert_avx2,
    .decode_pairs = yard_cpu_decode_pairs_avx2,
    .pairs_to_quads = yard_cpu_pairs_to_quads_avx2,
    .dot = yard_cpu_dot_avx2,
    .raw_dot = yard_cpu_raw_dot_avx2,
    .fp8_strips = &yard_cpu_strips_avx2,
    .bf16_strips = &yard_cpu_strips_avx2,
    .codes = &yard_cpu_codes_avx2,
    .axpy = axpy,
    .scale_max = yard_cpu_scale_max_avx2,
    .scale = yard_cpu_scale_avx2,
    .sum_squares = yard_cpu_sum_squares_avx2,
    .exp_sum = yard_cpu_exp_sum_avx2,
    .silu_mul = yard_cpu_silu_mul_avx2,
};

#endif
