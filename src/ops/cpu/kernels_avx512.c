/* AVX-512 variants of the inner kernels whose sums have LANES partial sums: one register each. Rows
 * and conversions are AVX2's, and so are products of a few plain rows with FP8 weights, which only
 * the exact mode has. */
#include "ops/cpu/cpu.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

#include <assert.h>
#include <math.h>

#include "ops/cpu/widen_avx512.h"

enum { TILE_X = 3, TILE_W = 4 };

/* acc[m][n] += x[m] . w[n] over [k, end); mx and nw are compile-time constants. */
INLINE void dot_span(const dot_args *a, const float *x, const float *w, uint32_t k, uint32_t end,
                     int mx, int nw, __m512 acc[TILE_X][TILE_W])
{
    for (; k < end; k += LANES) {
        __m512 wv[TILE_W];
        for (int n = 0; n < nw; n++) {
            wv[n] = _mm512_loadu_ps(w + n * a->w_ld + k);
            IN_REGISTER(wv[n]);
        }
        for (int m = 0; m < mx; m++) {
            const __m512 xv = _mm512_loadu_ps(x + m * a->x_ld + k);
            for (int n = 0; n < nw; n++)
                acc[m][n] = _mm512_fmadd_ps(xv, wv[n], acc[m][n]);
        }
    }
}

INLINE void dot_tile(const dot_args *a, uint32_t m0, uint32_t n0, int mx, int nw)
{
    __m512 outer[TILE_X][TILE_W];

    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            outer[m][n] =
                a->continued
                    ? _mm512_loadu_ps(a->lanes + ((size_t)(m0 + m) * a->n_w + n0 + n) * LANES)
                    : _mm512_setzero_ps();
    dot_span(a, a->x + m0 * a->x_ld, a->w + n0 * a->w_ld, 0, pad_lanes(a->n_k), mx, nw, outer);
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++) {
            if (a->y)
                a->y[(m0 + m) * a->y_ld + n0 + n] = add_lanes(outer[m][n]);
            else
                _mm512_storeu_ps(a->lanes + ((size_t)(m0 + m) * a->n_w + n0 + n) * LANES,
                                 outer[m][n]);
        }
}

INLINE void dot_rows(const dot_args *a, uint32_t m0, uint32_t n0, uint32_t n_w, int mx)
{
    uint32_t n = 0;

    for (; n + TILE_W <= n_w; n += TILE_W)
        dot_tile(a, m0, n0 + n, mx, TILE_W);
    for (; n < n_w; n++)
        dot_tile(a, m0, n0 + n, mx, 1);
}

/* Rows of x from the second cache, three at a time, meet PANEL_ROWS rows of w in the first. */
static void dot_block(const dot_args *a, uint32_t n0, uint32_t n_w)
{
    uint32_t m = 0;

    for (; m + 3 <= a->n_x; m += 3)
        dot_rows(a, m, n0, n_w, 3);
    if (m + 2 <= a->n_x)
        dot_rows(a, m, n0, n_w, 2);
    else if (m < a->n_x)
        dot_rows(a, m, n0, n_w, 1);
}

static void dot(const dot_args *a)
{
    assert(!a->factor); /* those products are by strips */
    for (uint32_t n = 0; n < a->n_w; n += PANEL_ROWS)
        dot_block(a, n, a->n_w - n < PANEL_ROWS ? a->n_w - n : PANEL_ROWS);
}

/* A STEP of stored elements in pairs: odd, even, odd, even. */
typedef struct pairs {
    __m512 at[4];
} pairs;

INLINE void split_plain(__m512 low, __m512 high, __m512 *odd, __m512 *even)
{
    const __m512i evens =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);

    *even = _mm512_permutex2var_ps(low, evens, high);
    *odd = _mm512_permutex2var_ps(low, _mm512_add_epi32(evens, _mm512_set1_epi32(1)), high);
}

INLINE pairs load_pairs(yard_dtype dtype, const uint8_t *w)
{
    pairs p;

    switch (dtype) {
    case YARD_BF16:
        for (int i = 0; i < 2; i++)
            split_bf16(_mm512_loadu_si512(w + 64 * i), &p.at[2 * i], &p.at[2 * i + 1]);
        break;
    case YARD_F16:
        for (int i = 0; i < 2; i++)
            split_plain(
                _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(w + 64 * i))),
                _mm512_cvtph_ps(
                    _mm256_loadu_si256((const __m256i *)(const void *)(w + 64 * i + 32))),
                &p.at[2 * i], &p.at[2 * i + 1]);
        break;
    default:
        for (int i = 0; i < 2; i++)
            split_plain(_mm512_loadu_ps(w + 128 * i), _mm512_loadu_ps(w + 128 * i + 64),
                        &p.at[2 * i], &p.at[2 * i + 1]);
    }
    return p;
}

INLINE size_t bytes_of(yard_dtype dtype)
{
    return dtype == YARD_F32 ? 4 : 2;
}

/* The last elements, fewer than a step: through a padded copy, since the stored row may end at the
 * end of the mapping. */
INLINE pairs load_rest(yard_dtype dtype, const uint8_t *w, uint32_t n)
{
    _Alignas(64) uint8_t last[STEP * 4] = { 0 };

    memcpy(last, w, n * bytes_of(dtype));
    return load_pairs(dtype, last);
}

INLINE void decode_dtype(yard_dtype dtype, const uint8_t *src, uint32_t n, float *dst)
{
    for (uint32_t i = 0; i < n; i += STEP) {
        const uint8_t *at = src + i * bytes_of(dtype);
        const pairs p = n - i >= STEP ? load_pairs(dtype, at) : load_rest(dtype, at, n - i);
        const int used = n - i > CHUNK ? 4 : 2; /* dst ends with a chunk */
        for (int v = 0; v < used; v++)
            _mm512_storeu_ps(dst + i + LANES * v, p.at[v]);
    }
}

static void decode_pairs(yard_dtype dtype, const void *src, uint32_t n, float *dst)
{
    switch (dtype) {
    case YARD_FP8_E4M3:
        yard_cpu_decode_pairs_avx2(YARD_FP8_E4M3, src, n, dst);
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

/* used: vectors of x that are there; the others would be multiplied with zeros. */
INLINE void raw_step(const raw_dot_args *a, pairs p, uint32_t k, int mx, int n, int used,
                     __m512 lane[FEW_ROWS][TILE_W])
{
    for (int m = 0; m < mx; m++)
        for (int v = 0; v < used; v++)
            lane[m][n] = _mm512_fmadd_ps(_mm512_loadu_ps(a->x + m * a->x_ld + k + LANES * v),
                                         p.at[v], lane[m][n]);
}

/* Adds x[m] . w[n] over [k, end) to the lanes. */
INLINE void raw_span(const raw_dot_args *a, const uint8_t *const *w, uint32_t k, uint32_t end,
                     int mx, int nw, yard_dtype dtype, __m512 lane[FEW_ROWS][TILE_W])
{
    for (; k + STEP <= end; k += STEP)
        for (int n = 0; n < nw; n++) {
            const uint8_t *at = w[n] + k * bytes_of(dtype);

            /* the same columns of the next rows: the memory's own prefetchers lose a row's end */
            for (size_t line = 0; line < STEP * bytes_of(dtype); line += 64)
                _mm_prefetch((const char *)(at + (size_t)nw * a->w_ld * bytes_of(dtype) + line),
                             _MM_HINT_T1);
            raw_step(a, load_pairs(dtype, at), k, mx, n, 4, lane);
        }
    if (k < end)
        for (int n = 0; n < nw; n++) {
            const pairs p = load_rest(dtype, w[n] + k * bytes_of(dtype), end - k);
            if (end - k > CHUNK)
                raw_step(a, p, k, mx, n, 4, lane);
            else
                raw_step(a, p, k, mx, n, 2, lane);
        }
}

INLINE void raw_tile(const raw_dot_args *a, uint32_t n0, int mx, int nw, yard_dtype dtype)
{
    const uint8_t *w[TILE_W];
    __m512 outer[FEW_ROWS][TILE_W];

    for (int n = 0; n < nw; n++)
        w[n] = (const uint8_t *)a->w + (n0 + n) * a->w_ld * bytes_of(dtype);
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            outer[m][n] = _mm512_setzero_ps();
    raw_span(a, w, 0, a->n_k, mx, nw, dtype, outer);
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            a->y[m * a->y_ld + n0 + n] = add_lanes(outer[m][n]);
}

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
        raw_rows(a, 2, 4, dtype);
    else if (a->n_x == 3)
        raw_rows(a, 3, 2, dtype);
    else
        raw_rows(a, 4, 2, dtype);
}

static void raw_dot(const raw_dot_args *a)
{
    switch (a->w_dtype) {
    case YARD_FP8_E4M3:
        yard_cpu_raw_dot_avx2(a);
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

/* acc[m, c .. c + 16 nc) over all r; the last vector has only the columns of its mask. */
INLINE void axpy_tile(const float *x, size_t x_ld, int mx, const float *w, size_t w_ld,
                      uint32_t n_r, int nc, __mmask16 mask, float *acc, size_t acc_ld)
{
    __m512 sum[4][4];

    for (int m = 0; m < mx; m++)
        for (int c = 0; c < nc; c++)
            sum[m][c] =
                _mm512_maskz_loadu_ps(c == nc - 1 ? mask : 0xffff, acc + m * acc_ld + c * LANES);
    for (uint32_t r = 0; r < n_r; r++) {
        __m512 wv[4];
        for (int c = 0; c < nc; c++)
            wv[c] = _mm512_maskz_loadu_ps(c == nc - 1 ? mask : 0xffff, w + r * w_ld + c * LANES);
        for (int m = 0; m < mx; m++) {
            const __m512 xv = _mm512_set1_ps(x[m * x_ld + r]);
            for (int c = 0; c < nc; c++)
                sum[m][c] = _mm512_fmadd_ps(xv, wv[c], sum[m][c]);
        }
    }
    for (int m = 0; m < mx; m++)
        for (int c = 0; c < nc; c++)
            _mm512_mask_storeu_ps(acc + m * acc_ld + c * LANES, c == nc - 1 ? mask : 0xffff,
                                  sum[m][c]);
}

INLINE void axpy_rows(const float *x, size_t x_ld, int mx, const float *w, size_t w_ld,
                      uint32_t n_r, uint32_t n_c, float *acc, size_t acc_ld)
{
    uint32_t c = 0;

    for (; c + 4 * LANES <= n_c; c += 4 * LANES)
        axpy_tile(x, x_ld, mx, w + c, w_ld, n_r, 4, 0xffff, acc + c, acc_ld);
    for (; c < n_c; c += LANES)
        axpy_tile(x, x_ld, mx, w + c, w_ld, n_r, 1,
                  n_c - c >= LANES ? 0xffff : (__mmask16)((1u << (n_c - c)) - 1), acc + c, acc_ld);
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

/* bf16 dot products have twice the rate of f32 multiply-adds on AMD's processors, half of it on
 * Intel's. */
static bool dot_bf16_is_fast(void)
{
    return __builtin_cpu_is("amd");
}

static bool always(void)
{
    return true;
}

const cpu_kernels yard_cpu_kernels_avx512 = {
    .name = "avx512",
    .reason = "the processor has AVX-512 with VBMI and BF16",
    .convert = &yard_convert_avx2,
    .decode_pairs = decode_pairs,
    .pairs_to_quads = yard_cpu_pairs_to_quads_avx2,
    .dot = dot,
    .raw_dot = raw_dot,
    .fp8_strips = &yard_cpu_strips_avx512,
    .bf16_strips = &yard_cpu_strips_avx512,
    .fp8_dot = yard_cpu_fp8_dot_avx512,
    .fp8_dot_many = dot_bf16_is_fast,
    .codes_to_bf16 = yard_cpu_codes_to_bf16_avx512,
    .axpy = axpy,
    .scale_max = yard_cpu_scale_max_avx2,
    .scale = yard_cpu_scale_avx2,
    .sum_squares = yard_cpu_sum_squares_avx2,
    .exp_sum = yard_cpu_exp_sum_avx2,
    .silu_mul = yard_cpu_silu_mul_avx2,
};

const cpu_kernels yard_cpu_kernels_amx = {
    .name = "amx",
    .reason = "asked for; FP8 products on AMX tiles",
    .convert = &yard_convert_avx2,
    .decode_pairs = decode_pairs,
    .pairs_to_quads = yard_cpu_pairs_to_quads_avx2,
    .dot = dot,
    .raw_dot = raw_dot,
    .fp8_strips = &yard_cpu_strips_avx512,
    .bf16_strips = &yard_cpu_strips_avx512,
    .fp8_dot = yard_cpu_fp8_dot_amx,
    .fp8_dot_many = always,
    .codes_to_bf16 = yard_cpu_codes_to_bf16_avx512,
    .axpy = axpy,
    .scale_max = yard_cpu_scale_max_avx2,
    .scale = yard_cpu_scale_avx2,
    .sum_squares = yard_cpu_sum_squares_avx2,
    .exp_sum = yard_cpu_exp_sum_avx2,
    .silu_mul = yard_cpu_silu_mul_avx2,
};

#endif
