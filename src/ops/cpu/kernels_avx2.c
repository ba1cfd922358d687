/* AVX2 + FMA + F16C variants of the inner kernels: the same operations in the same order as the
 * definition, eight lanes at a time, so the same bits.
 */
#include "ops/cpu/cpu.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>
#include <math.h>

#include "base/widen_avx2.h"
#include "ops/cpu/exp.h"

enum { DOT_TILE_X = 4 };

INLINE float add_lanes(__m256 v)
{
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));

    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* The first n of eight f32 lanes, n in 1..8. */
INLINE __m256i lane_mask(uint32_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* ---- dot products ---------------------------------------------------------------------- */

/* lane[m][n] += x[m] . w[n] over [k, end); MX and NW are compile-time constants. */
INLINE void dot_span(const dot_args *a, const float *x, const float *w, uint32_t k, uint32_t end,
                     int mx, int nw, __m256 lane[DOT_TILE_X][PANEL_ROWS])
{
    for (; k < end; k += LANES) {
        __m256 wv[PANEL_ROWS];
        for (int n = 0; n < nw; n++)
            wv[n] = _mm256_loadu_ps(w + n * a->w_ld + k);
        for (int m = 0; m < mx; m++) {
            const __m256 xv = _mm256_loadu_ps(x + m * a->x_ld + k);
            for (int n = 0; n < nw; n++)
                lane[m][n] = _mm256_fmadd_ps(xv, wv[n], lane[m][n]);
        }
    }
}

/* lane[m][n] = 0 for a tile. */
INLINE void clear_tile(int mx, int nw, __m256 lane[DOT_TILE_X][PANEL_ROWS])
{
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            lane[m][n] = _mm256_setzero_ps();
}

INLINE void dot_tile(const dot_args *a, uint32_t m0, uint32_t n0, int mx, int nw)
{
    const float *x = a->x + m0 * a->x_ld, *w = a->w + n0 * a->w_ld;
    const uint32_t n_k = pad_lanes(a->n_k);
    __m256 outer[DOT_TILE_X][PANEL_ROWS];

    clear_tile(mx, nw, outer);
    if (!a->w_scale) {
        dot_span(a, x, w, 0, n_k, mx, nw, outer);
    } else {
        for (uint32_t k = 0, group = 0; k < n_k; k += YARD_GROUP, group++) {
            const uint32_t end = n_k - k < YARD_GROUP ? n_k : k + YARD_GROUP;
            __m256 lane[DOT_TILE_X][PANEL_ROWS];

            clear_tile(mx, nw, lane);
            dot_span(a, x, w, k, end, mx, nw, lane);
            for (int m = 0; m < mx; m++)
                for (int n = 0; n < nw; n++) {
                    const float ws = a->w_scale[n0 + n][group];
                    const float s =
                        a->x_scale ? a->x_scale[(m0 + m) * a->x_scale_ld + group] * ws : ws;
                    outer[m][n] = _mm256_fmadd_ps(lane[m][n], _mm256_set1_ps(s), outer[m][n]);
                }
        }
    }
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            a->y[(m0 + m) * a->y_ld + n0 + n] = add_lanes(outer[m][n]);
}

INLINE void dot_columns(const dot_args *a, uint32_t n0, int nw)
{
    uint32_t m = 0;

    for (; m + 4 <= a->n_x; m += 4)
        dot_tile(a, m, n0, 4, nw);
    if (m + 2 <= a->n_x) {
        dot_tile(a, m, n0, 2, nw);
        m += 2;
    }
    if (m < a->n_x)
        dot_tile(a, m, n0, 1, nw);
}

static void dot(const dot_args *a)
{
    uint32_t n = 0;

    for (; n + 3 <= a->n_w; n += 3)
        dot_columns(a, n, 3);
    for (; n < a->n_w; n++)
        dot_columns(a, n, 1);
}

/* Eight elements of w, FP8 times 2^-8. */
INLINE __m256 widen(yard_dtype dtype, const uint8_t *w, size_t k)
{
    switch (dtype) {
    case YARD_FP8_E4M3:
        return widen_fp8(w + k);
    case YARD_BF16:
        return widen_bf16((const uint16_t *)(const void *)w + k);
    case YARD_F16:
        return _mm256_cvtph_ps(_mm_loadu_si128(
            (const __m128i *)(const void *)((const uint16_t *)(const void *)w + k)));
    default:
        return _mm256_loadu_ps((const float *)(const void *)w + k);
    }
}

enum { RAW_TILE_W = 4 };

/* Adds x[m] . w[n] over [k, end) to the lanes; the last elements that fill no vector go through a
 * padded copy, since the stored row may end at the end of the mapping. */
INLINE void raw_span(const raw_dot_args *a, const uint8_t *const *w, uint32_t k, uint32_t end,
                     int mx, int nw, yard_dtype dtype, __m256 lane[FEW_ROWS][RAW_TILE_W])
{
    for (; k + LANES <= end; k += LANES)
        for (int n = 0; n < nw; n++) {
            const __m256 wv = widen(dtype, w[n], k);
            for (int m = 0; m < mx; m++)
                lane[m][n] =
                    _mm256_fmadd_ps(_mm256_loadu_ps(a->x + m * a->x_ld + k), wv, lane[m][n]);
        }
    if (k < end)
        for (int n = 0; n < nw; n++) {
            const size_t bytes = dtype == YARD_FP8_E4M3 ? 1 : dtype == YARD_F32 ? 4 : 2;
            _Alignas(32) uint8_t last[LANES * 4] = { 0 };
            memcpy(last, w[n] + k * bytes, (end - k) * bytes);
            const __m256 wv = widen(dtype, last, 0);
            for (int m = 0; m < mx; m++)
                lane[m][n] =
                    _mm256_fmadd_ps(_mm256_loadu_ps(a->x + m * a->x_ld + k), wv, lane[m][n]);
        }
}

INLINE void raw_tile(const raw_dot_args *a, uint32_t n0, int mx, int nw, yard_dtype dtype)
{
    const size_t bytes = dtype == YARD_FP8_E4M3 ? 1 : dtype == YARD_F32 ? 4 : 2;
    const float factor = dtype == YARD_FP8_E4M3 ? FP8_FACTOR : 1.0f;
    const uint8_t *w[RAW_TILE_W];
    __m256 outer[FEW_ROWS][RAW_TILE_W];

    for (int n = 0; n < nw; n++)
        w[n] = (const uint8_t *)a->w + (n0 + n) * a->w_ld * bytes;
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            outer[m][n] = _mm256_setzero_ps();
    if (!a->w_scale) {
        raw_span(a, w, 0, a->n_k, mx, nw, dtype, outer);
    } else {
        for (uint32_t k = 0, group = 0; k < a->n_k; k += YARD_GROUP, group++) {
            const uint32_t end = a->n_k - k < YARD_GROUP ? a->n_k : k + YARD_GROUP;
            __m256 lane[FEW_ROWS][RAW_TILE_W];

            for (int m = 0; m < mx; m++)
                for (int n = 0; n < nw; n++)
                    lane[m][n] = _mm256_setzero_ps();
            raw_span(a, w, k, end, mx, nw, dtype, lane);
            for (int m = 0; m < mx; m++)
                for (int n = 0; n < nw; n++) {
                    const float ws = a->w_scale[n0 + n][group];
                    const float s =
                        (a->x_scale ? a->x_scale[m * a->x_scale_ld + group] * ws : ws) * factor;
                    outer[m][n] = _mm256_fmadd_ps(lane[m][n], _mm256_set1_ps(s), outer[m][n]);
                }
        }
    }
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            a->y[m * a->y_ld + n0 + n] = add_lanes(outer[m][n]);
}

INLINE void raw_rows(const raw_dot_args *a, int mx, yard_dtype dtype)
{
    uint32_t n = 0;

    for (; n + RAW_TILE_W <= a->n_w; n += RAW_TILE_W)
        raw_tile(a, n, mx, RAW_TILE_W, dtype);
    for (; n < a->n_w; n++)
        raw_tile(a, n, mx, 1, dtype);
}

INLINE void raw_dot_dtype(const raw_dot_args *a, yard_dtype dtype)
{
    if (a->n_x == 1)
        raw_rows(a, 1, dtype);
    else if (a->n_x == 2)
        raw_rows(a, 2, dtype);
    else if (a->n_x == 3)
        raw_rows(a, 3, dtype);
}

static void raw_dot(const raw_dot_args *a)
{
    /* Unscaled FP8 does not exist in checkpoints: the factor above relies on that. */
    switch (a->w_dtype) {
    case YARD_FP8_E4M3:
        raw_dot_dtype(a, YARD_FP8_E4M3);
        break;
    case YARD_BF16:
        raw_dot_dtype(a, YARD_BF16);
        break;
    case YARD_F16:
        raw_dot_dtype(a, YARD_F16);
        break;
    default:
        raw_dot_dtype(a, YARD_F32);
    }
}

/* ---- columns --------------------------------------------------------------------------- */

/* acc[m, c .. c + 8 nc) over all r. */
INLINE void axpy_tile(const float *x, size_t x_ld, int mx, const float *w, size_t w_ld,
                      uint32_t n_r, int nc, float *acc, size_t acc_ld)
{
    __m256 sum[4][2];

    for (int m = 0; m < mx; m++)
        for (int c = 0; c < nc; c++)
            sum[m][c] = _mm256_loadu_ps(acc + m * acc_ld + c * LANES);
    for (uint32_t r = 0; r < n_r; r++) {
        __m256 wv[2];
        for (int c = 0; c < nc; c++)
            wv[c] = _mm256_loadu_ps(w + r * w_ld + c * LANES);
        for (int m = 0; m < mx; m++) {
            const __m256 xv = _mm256_broadcast_ss(x + m * x_ld + r);
            for (int c = 0; c < nc; c++)
                sum[m][c] = _mm256_fmadd_ps(xv, wv[c], sum[m][c]);
        }
    }
    for (int m = 0; m < mx; m++)
        for (int c = 0; c < nc; c++)
            _mm256_storeu_ps(acc + m * acc_ld + c * LANES, sum[m][c]);
}

INLINE void axpy_rows(const float *x, size_t x_ld, int mx, const float *w, size_t w_ld,
                      uint32_t n_r, uint32_t n_c, float *acc, size_t acc_ld)
{
    uint32_t c = 0;

    for (; c + 16 <= n_c; c += 16)
        axpy_tile(x, x_ld, mx, w + c, w_ld, n_r, 2, acc + c, acc_ld);
    if (c + 8 <= n_c) {
        axpy_tile(x, x_ld, mx, w + c, w_ld, n_r, 1, acc + c, acc_ld);
        c += 8;
    }
    for (; c < n_c; c++)
        for (int m = 0; m < mx; m++)
            for (uint32_t r = 0; r < n_r; r++)
                acc[m * acc_ld + c] = fmaf(x[m * x_ld + r], w[r * w_ld + c], acc[m * acc_ld + c]);
}

static void axpy(const float *x, size_t x_ld, uint32_t n_x, const float *w, size_t w_ld,
                 uint32_t n_r, uint32_t n_c, float *acc, size_t acc_ld)
{
    uint32_t m = 0;

    for (; m + 4 <= n_x; m += 4)
        axpy_rows(x + m * x_ld, x_ld, 4, w, w_ld, n_r, n_c, acc + m * acc_ld, acc_ld);
    for (; m < n_x; m++)
        axpy_rows(x + m * x_ld, x_ld, 1, w, w_ld, n_r, n_c, acc + m * acc_ld, acc_ld);
}

static void scale(float *acc, uint32_t n, float f)
{
    const __m256 fv = _mm256_set1_ps(f);
    uint32_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(acc + i, _mm256_mul_ps(_mm256_loadu_ps(acc + i), fv));
    for (; i < n; i++)
        acc[i] *= f;
}

/* ---- rows ------------------------------------------------------------------------------ */

static float sum_squares(const float *x, uint32_t n)
{
    __m256 lane = _mm256_setzero_ps();
    uint32_t i = 0;

    for (; i + 8 <= n; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        lane = _mm256_fmadd_ps(v, v, lane);
    }
    if (i < n) {
        const __m256 v = _mm256_maskload_ps(x + i, lane_mask(n - i));
        lane = _mm256_fmadd_ps(v, v, lane);
    }
    return add_lanes(lane);
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

static float exp_sum(float *x, uint32_t n, float max)
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
    return add_lanes(lane);
}

INLINE __m256 silu_mul8(__m256 gate, __m256 up)
{
    const __m256 minus = _mm256_xor_ps(gate, _mm256_set1_ps(-0.0f));
    const __m256 below = _mm256_add_ps(_mm256_set1_ps(1.0f), exp8(minus));

    return _mm256_mul_ps(_mm256_div_ps(gate, below), up);
}

static void silu_mul(const float *gate, const float *up, uint32_t n, float *y)
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
    .dot = dot,
    .raw_dot = raw_dot,
    .axpy = axpy,
    .scale = scale,
    .sum_squares = sum_squares,
    .exp_sum = exp_sum,
    .silu_mul = silu_mul,
};

#endif
