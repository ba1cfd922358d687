/* AVX2 + FMA + F16C variants of the inner kernels: the same operations in the same order as the
 * definition, so the same bits. */
#include "ops/cpu/cpu.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>
#include <math.h>

#include "base/widen_avx2.h"
#include "ops/cpu/exp.h"

INLINE float add_eight(__m256 v)
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

/* LANES partial sums. */
typedef struct lanes {
    __m256 half[2];
} lanes;

INLINE lanes zero_lanes(void)
{
    return (lanes){ { _mm256_setzero_ps(), _mm256_setzero_ps() } };
}

INLINE float add_lanes(lanes v)
{
    return add_eight(_mm256_add_ps(v.half[0], v.half[1]));
}

INLINE lanes scale_lanes(lanes v, float f, lanes acc)
{
    const __m256 fv = _mm256_set1_ps(f);

    acc.half[0] = _mm256_fmadd_ps(v.half[0], fv, acc.half[0]);
    acc.half[1] = _mm256_fmadd_ps(v.half[1], fv, acc.half[1]);
    return acc;
}

/* ---- dot products ---------------------------------------------------------------------- */

enum { TILE_X = 3, TILE_W = 2 }; /* 12 sums, 4 vectors of w, and x from memory */

/* acc[m][n] += x[m] . w[n] over [k, end); mx and nw are compile-time constants. */
INLINE void dot_span(const dot_args *a, const float *x, const float *w, uint32_t k, uint32_t end,
                     int mx, int nw, lanes acc[TILE_X][TILE_W])
{
    for (; k < end; k += LANES) {
        __m256 wv[TILE_W][2];
        for (int n = 0; n < nw; n++)
            for (int h = 0; h < 2; h++)
                wv[n][h] = _mm256_loadu_ps(w + n * a->w_ld + k + 8 * h);
        for (int m = 0; m < mx; m++)
            for (int h = 0; h < 2; h++) {
                const __m256 xv = _mm256_loadu_ps(x + m * a->x_ld + k + 8 * h);
                for (int n = 0; n < nw; n++)
                    acc[m][n].half[h] = _mm256_fmadd_ps(xv, wv[n][h], acc[m][n].half[h]);
            }
    }
}

INLINE void dot_scaled(const dot_args *a, uint32_t m0, uint32_t n0, int mx, int nw,
                       lanes outer[TILE_X][TILE_W])
{
    const float *x = a->x + m0 * a->x_ld, *w = a->w + n0 * a->w_ld;
    const uint32_t n_k = pad_lanes(a->n_k);

    for (uint32_t k = 0, group = 0; k < n_k; k += YARD_GROUP, group++) {
        const uint32_t end = n_k - k < YARD_GROUP ? n_k : k + YARD_GROUP;
        lanes lane[TILE_X][TILE_W];

        for (int m = 0; m < mx; m++)
            for (int n = 0; n < nw; n++)
                lane[m][n] = zero_lanes();
        dot_span(a, x, w, k, end, mx, nw, lane);
        for (int m = 0; m < mx; m++)
            for (int n = 0; n < nw; n++) {
                const float ws = a->w_scale[n0 + n][group];
                const float f = a->x_scale ? a->x_scale[(m0 + m) * a->x_scale_ld + group] * ws : ws;
                outer[m][n] = scale_lanes(lane[m][n], f, outer[m][n]);
            }
    }
}

/* The carried sums of x[m] . w[n]; only where there are any. */
INLINE float *carried_lanes(const dot_args *a, uint32_t m, uint32_t n)
{
    return a->lanes + ((size_t)m * a->n_w + n) * LANES;
}

INLINE lanes load_lanes(const float *at)
{
    return (lanes){ { _mm256_loadu_ps(at), _mm256_loadu_ps(at + 8) } };
}

INLINE void store_lanes(lanes v, float *at)
{
    _mm256_storeu_ps(at, v.half[0]);
    _mm256_storeu_ps(at + 8, v.half[1]);
}

INLINE void dot_tile(const dot_args *a, uint32_t m0, uint32_t n0, int mx, int nw)
{
    lanes outer[TILE_X][TILE_W];

    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            outer[m][n] = a->continued
                              ? load_lanes(carried_lanes(a, m0 + (uint32_t)m, n0 + (uint32_t)n))
                              : zero_lanes();
    if (a->w_scale)
        dot_scaled(a, m0, n0, mx, nw, outer);
    else
        dot_span(a, a->x + m0 * a->x_ld, a->w + n0 * a->w_ld, 0, pad_lanes(a->n_k), mx, nw, outer);
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++) {
            if (a->y)
                a->y[(m0 + m) * a->y_ld + n0 + n] = add_lanes(outer[m][n]);
            else
                store_lanes(outer[m][n], carried_lanes(a, m0 + (uint32_t)m, n0 + (uint32_t)n));
        }
}

INLINE void dot_columns(const dot_args *a, uint32_t n0, int nw)
{
    uint32_t m = 0;

    for (; m + 3 <= a->n_x; m += 3)
        dot_tile(a, m, n0, 3, nw);
    if (m + 2 <= a->n_x)
        dot_tile(a, m, n0, 2, nw);
    else if (m < a->n_x)
        dot_tile(a, m, n0, 1, nw);
}

static void dot(const dot_args *a)
{
    uint32_t n = 0;

    for (; n + 2 <= a->n_w; n += 2)
        dot_columns(a, n, 2);
    if (n < a->n_w)
        dot_columns(a, n, 1);
}

/* ---- stored weights -------------------------------------------------------------------- */

/* A CHUNK of stored elements in pairs: [0] the odd ones, [1] the even ones. */
typedef struct pairs {
    lanes at[2];
} pairs;

/* 16 words, a code in the high byte of each, to halves' bits: sign, exponent and mantissa one place
 * down, whose value is 2^-8 of the code's. */
INLINE __m256i half_bits(__m256i high_codes)
{
    return _mm256_and_si256(_mm256_srai_epi16(high_codes, 1), _mm256_set1_epi16((short)0xbf80));
}

INLINE lanes widen_halves(__m256i halves)
{
    return (lanes){ { _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                      _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)) } };
}

INLINE pairs load_fp8(const uint8_t *w)
{
    const __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)w);

    return (pairs){ { widen_halves(half_bits(words)),
                      widen_halves(half_bits(_mm256_slli_epi16(words, 8))) } };
}

INLINE pairs load_bf16(const uint16_t *w)
{
    const __m256i high = _mm256_set1_epi32((int)0xffff0000u);
    pairs p;

    for (int h = 0; h < 2; h++) {
        const __m256i two = _mm256_loadu_si256((const __m256i *)(const void *)(w + 16 * h));
        p.at[0].half[h] = _mm256_castsi256_ps(_mm256_and_si256(two, high));
        p.at[1].half[h] = _mm256_castsi256_ps(_mm256_slli_epi32(two, 16));
    }
    return p;
}

/* Sixteen consecutive values; which says odd (1) or even (0). */
INLINE __m256 every_other(__m256 low, __m256 high, int which)
{
    const __m256 mixed =
        which ? _mm256_shuffle_ps(low, high, 0xdd) : _mm256_shuffle_ps(low, high, 0x88);

    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xd8));
}

INLINE pairs from_plain(const __m256 v[4])
{
    pairs p;

    for (int h = 0; h < 2; h++) {
        p.at[0].half[h] = every_other(v[2 * h], v[2 * h + 1], 1);
        p.at[1].half[h] = every_other(v[2 * h], v[2 * h + 1], 0);
    }
    return p;
}

/* FP8 times 2^-8. */
INLINE pairs load_pairs(yard_dtype dtype, const uint8_t *w)
{
    __m256 v[4];

    switch (dtype) {
    case YARD_FP8_E4M3:
        return load_fp8(w);
    case YARD_BF16:
        return load_bf16((const uint16_t *)(const void *)w);
    case YARD_F16:
        for (int i = 0; i < 4; i++)
            v[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(w + 16 * i)));
        return from_plain(v);
    default:
        for (int i = 0; i < 4; i++)
            v[i] = _mm256_loadu_ps((const float *)(const void *)(w + 32 * i));
        return from_plain(v);
    }
}

INLINE size_t bytes_of(yard_dtype dtype)
{
    return dtype == YARD_FP8_E4M3 ? 1 : dtype == YARD_F32 ? 4 : 2;
}

/* The last elements, which fill no chunk: through a padded copy, since the stored row may end at
 * the end of the mapping. */
INLINE pairs load_rest(yard_dtype dtype, const uint8_t *w, uint32_t n)
{
    _Alignas(32) uint8_t last[CHUNK * 4] = { 0 };

    memcpy(last, w, n * bytes_of(dtype));
    return load_pairs(dtype, last);
}

INLINE void decode_dtype(yard_dtype dtype, const uint8_t *src, uint32_t n, float *dst)
{
    const __m256 factor = _mm256_set1_ps(dtype == YARD_FP8_E4M3 ? FP8_FACTOR : 1.0f);

    for (uint32_t i = 0; i < n; i += CHUNK) {
        const uint8_t *at = src + i * bytes_of(dtype);
        const pairs p = n - i >= CHUNK ? load_pairs(dtype, at) : load_rest(dtype, at, n - i);
        for (int v = 0; v < 4; v++)
            _mm256_storeu_ps(dst + i + 8 * v, _mm256_mul_ps(p.at[v / 2].half[v % 2], factor));
    }
}

static void decode_pairs(yard_dtype dtype, const void *src, uint32_t n, float *dst)
{
    switch (dtype) {
    case YARD_FP8_E4M3:
        decode_dtype(YARD_FP8_E4M3, src, n, dst);
        break;
    case YARD_BF16:
        decode_dtype(YARD_BF16, src, n, dst);
        break;
    case YARD_F16:
        decode_dtype(YARD_F16, src, n, dst);
        break;
    default:
        decode_dtype(YARD_F32, src, n, dst);
    }
}

enum { RAW_TILE_W = 4 };

INLINE void raw_step(const raw_dot_args *a, pairs p, uint32_t k, int mx, int n,
                     lanes lane[FEW_ROWS][RAW_TILE_W])
{
    for (int m = 0; m < mx; m++)
        for (int v = 0; v < 4; v++) {
            const __m256 xv = _mm256_loadu_ps(a->x + m * a->x_ld + k + 8 * v);
            lane[m][n].half[v % 2] =
                _mm256_fmadd_ps(xv, p.at[v / 2].half[v % 2], lane[m][n].half[v % 2]);
        }
}

/* Adds x[m] . w[n] over [k, end) to the lanes. */
INLINE void raw_span(const raw_dot_args *a, const uint8_t *const *w, uint32_t k, uint32_t end,
                     int mx, int nw, yard_dtype dtype, lanes lane[FEW_ROWS][RAW_TILE_W])
{
    for (; k + CHUNK <= end; k += CHUNK)
        for (int n = 0; n < nw; n++) {
            const uint8_t *at = w[n] + k * bytes_of(dtype);

            /* the same columns of the next rows: the memory's own prefetchers lose a row's end */
            _mm_prefetch((const char *)(at + (size_t)nw * a->w_ld * bytes_of(dtype)), _MM_HINT_T1);
            if (dtype != YARD_FP8_E4M3)
                _mm_prefetch((const char *)(at + (size_t)nw * a->w_ld * bytes_of(dtype) + 64),
                             _MM_HINT_T1);
            raw_step(a, load_pairs(dtype, at), k, mx, n, lane);
        }
    if (k < end)
        for (int n = 0; n < nw; n++)
            raw_step(a, load_rest(dtype, w[n] + k * bytes_of(dtype), end - k), k, mx, n, lane);
}

INLINE void raw_scaled(const raw_dot_args *a, const uint8_t *const *w, uint32_t n0, int mx, int nw,
                       yard_dtype dtype, lanes outer[FEW_ROWS][RAW_TILE_W])
{
    const float factor = dtype == YARD_FP8_E4M3 ? FP8_FACTOR : 1.0f;

    for (uint32_t k = 0, group = 0; k < a->n_k; k += YARD_GROUP, group++) {
        const uint32_t end = a->n_k - k < YARD_GROUP ? a->n_k : k + YARD_GROUP;
        lanes lane[FEW_ROWS][RAW_TILE_W];

        for (int m = 0; m < mx; m++)
            for (int n = 0; n < nw; n++)
                lane[m][n] = zero_lanes();
        raw_span(a, w, k, end, mx, nw, dtype, lane);
        for (int m = 0; m < mx; m++)
            for (int n = 0; n < nw; n++) {
                const float ws = a->w_scale[n0 + n][group];
                const float f = a->x_scale ? a->x_scale[m * a->x_scale_ld + group] * ws : ws;
                outer[m][n] = scale_lanes(lane[m][n], f * factor, outer[m][n]);
            }
    }
}

INLINE void raw_tile(const raw_dot_args *a, uint32_t n0, int mx, int nw, yard_dtype dtype)
{
    const uint8_t *w[RAW_TILE_W];
    lanes outer[FEW_ROWS][RAW_TILE_W];

    for (int n = 0; n < nw; n++)
        w[n] = (const uint8_t *)a->w + (n0 + n) * a->w_ld * bytes_of(dtype);
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            outer[m][n] = zero_lanes();
    if (a->w_scale)
        raw_scaled(a, w, n0, mx, nw, dtype, outer);
    else
        raw_span(a, w, 0, a->n_k, mx, nw, dtype, outer);
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            a->y[m * a->y_ld + n0 + n] = add_lanes(outer[m][n]);
}

/* As many rows of w at once as leave the sums in registers. */
INLINE void raw_rows(const raw_dot_args *a, int mx, int nw, yard_dtype dtype)
{
    uint32_t n = 0;

    for (; n + (uint32_t)nw <= a->n_w; n += (uint32_t)nw)
        raw_tile(a, n, mx, nw, dtype);
    for (; n < a->n_w; n++)
        raw_tile(a, n, mx, 1, dtype);
}

INLINE void raw_dot_dtype(const raw_dot_args *a, yard_dtype dtype)
{
    if (a->n_x == 1)
        raw_rows(a, 1, 4, dtype);
    else if (a->n_x == 2)
        raw_rows(a, 2, 2, dtype);
    else if (a->n_x == 3)
        raw_rows(a, 3, 1, dtype);
    else
        raw_rows(a, 4, 1, dtype);
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
            sum[m][c] = _mm256_loadu_ps(acc + m * acc_ld + c * 8);
    for (uint32_t r = 0; r < n_r; r++) {
        __m256 wv[2];
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

void yard_cpu_scale_avx2(float *acc, uint32_t n, float f)
{
    const __m256 fv = _mm256_set1_ps(f);
    uint32_t i = 0;

    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(acc + i, _mm256_mul_ps(_mm256_loadu_ps(acc + i), fv));
    for (; i < n; i++)
        acc[i] *= f;
}

/* ---- rows ------------------------------------------------------------------------------ */

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
    .decode_pairs = decode_pairs,
    .dot = dot,
    .raw_dot = raw_dot,
    .axpy = axpy,
    .scale = yard_cpu_scale_avx2,
    .sum_squares = yard_cpu_sum_squares_avx2,
    .exp_sum = yard_cpu_exp_sum_avx2,
    .silu_mul = yard_cpu_silu_mul_avx2,
};

#endif
