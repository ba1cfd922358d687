/* FP8 times FP8 for few rows of x, AVX2 + FMA, where denormals cost nothing.
 *
 * A code whose sign, exponent and mantissa are shifted to their places in an f32 is 2^-120 of its
 * value, subnormals included: one shift, or two, and a mask, where a conversion from half precision
 * takes twice as long. Products of two codes, and all their sums, are multiples of 2^-18, so that
 * with the factor they keep their bits down to f32's denormals; the factor is undone with the
 * scales. On Intel's processors a multiply-add with a denormal takes 150 cycles: raw_avx2.c is for
 * them, and for threads that take denormals for 0.
 *
 * The bytes of 32-bit words come apart into quads. */
#include "ops/cpu/cpu.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <float.h>
#include <math.h>

#include "ops/cpu/lanes_avx2.h"

#define UNSHIFT 0x1p120f

enum {
    TILE_W = 4,
    X_FLOATS = 7168, /* of rows of x: they stay in the first cache meanwhile */
    BATCH_SUMS = 64  /* of rows of w: they wait for the next columns */
};

static bool usable(void)
{
    enum { FLUSH_TO_ZERO = 0x8000, DENORMALS_ARE_ZEROS = 0x0040 };

    return __builtin_cpu_is("amd") && !(_mm_getcsr() & (FLUSH_TO_ZERO | DENORMALS_ARE_ZEROS));
}

/* One byte of each word, as a value times 2^-120. */
INLINE __m256 shift_codes(__m256i words, int byte)
{
    const __m256i top = byte == 3 ? words : _mm256_slli_epi32(words, 24 - 8 * byte);

    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_srai_epi32(top, 4), _mm256_set1_epi32((int)0x87f00000)));
}

/* lane[m] += x[m] . w at a CHUNK of columns. */
INLINE void add_chunk(const raw_dot_args *a, const uint8_t *w, uint32_t k, int mx,
                      __m256 lane[FEW_ROWS])
{
    const __m256i words = _mm256_loadu_si256((const __m256i *)(const void *)w);
    const __m256 wv[4] = { shift_codes(words, 1), shift_codes(words, 0), shift_codes(words, 3),
                           shift_codes(words, 2) };

    for (int m = 0; m < mx; m++)
        for (int v = 0; v < 4; v++)
            lane[m] = _mm256_fmadd_ps(
                _mm256_loadu_ps(a->x + m * a->x_ld + k + (uint32_t)(SCALED_LANES * v)), wv[v],
                lane[m]);
}

/* far: what undoes the shift and the scale is no f32. */
INLINE __m256 add_scaled(__m256 lane, float scale, bool far, __m256 sum)
{
    const __m256 f = _mm256_set1_ps(far ? scale : scale * UNSHIFT);

    return _mm256_fmadd_ps(far ? _mm256_mul_ps(lane, _mm256_set1_ps(UNSHIFT)) : lane, f, sum);
}

/* A group of columns from k on, of nw rows of w from n on. */
INLINE void add_group(const raw_dot_args *a, uint32_t n, uint32_t k, int mx, int nw, bool far,
                      __m256 sum[TILE_W][FEW_ROWS])
{
    const uint32_t end = a->n_k - k < YARD_GROUP ? a->n_k : k + YARD_GROUP, group = k / YARD_GROUP;
    const uint8_t *w = (const uint8_t *)a->w + n * a->w_ld;
    __m256 lane[TILE_W][FEW_ROWS];

    for (int i = 0; i < nw; i++)
        for (int m = 0; m < mx; m++)
            lane[i][m] = _mm256_setzero_ps();
    for (; k + CHUNK <= end; k += CHUNK)
        for (int i = 0; i < nw; i++) {
            const uint8_t *at = w + (size_t)i * a->w_ld + k;

            /* the same columns of rows to come: the memory's own prefetchers lose a row's end, and
             * the next two rows alone are too near */
            _mm_prefetch((const char *)(at + TILE_W * a->w_ld), _MM_HINT_T1);
            add_chunk(a, at, k, mx, lane[i]);
        }
    if (k < end)
        for (int i = 0; i < nw; i++) {
            uint8_t last[CHUNK] = { 0 }; /* the stored row may end at the end of the mapping */

            memcpy(last, w + (size_t)i * a->w_ld + k, end - k);
            add_chunk(a, last, k, mx, lane[i]);
        }
    for (int i = 0; i < nw; i++)
        for (int m = 0; m < mx; m++)
            sum[i][m] = add_scaled(lane[i][m],
                                   a->x_scale[m * a->x_scale_ld + group] *
                                       a->w_scale[n + (uint32_t)i][group],
                                   far, sum[i][m]);
}

/* Columns [k, end) of nw rows of w from n on. carried: [nw, mx] sums of the columns before, where
 * those of these columns stay unless they are the last. */
INLINE void dot_tile(const raw_dot_args *a, uint32_t n, uint32_t k, uint32_t end, int mx, int nw,
                     bool far, __m256 *carried)
{
    __m256 sum[TILE_W][FEW_ROWS];

    for (int i = 0; i < nw; i++)
        for (int m = 0; m < mx; m++)
            sum[i][m] = k ? carried[i * mx + m] : _mm256_setzero_ps();
    for (; k < end; k += YARD_GROUP)
        add_group(a, n, k, mx, nw, far, sum);
    for (int i = 0; i < nw; i++)
        for (int m = 0; m < mx; m++)
            if (end == a->n_k)
                a->y[m * a->y_ld + n + (uint32_t)i] = add_eight(sum[i][m]);
            else
                carried[i * mx + m] = sum[i][m];
}

/* All of some rows of w, then of the next; more columns of x than the first cache holds come in
 * pieces, each for all of these rows. */
INLINE void dot_rows(const raw_dot_args *a, int mx, int nw)
{
    const uint32_t batch = BATCH_SUMS / (uint32_t)mx;
    const uint32_t piece = X_FLOATS / (uint32_t)mx / YARD_GROUP * YARD_GROUP;
    __m256 carried[BATCH_SUMS];

    for (uint32_t first = 0, last; first < a->n_w; first = last) {
        last = a->n_w - first < batch ? a->n_w : first + batch;
        for (uint32_t k = 0, end; k < a->n_k; k = end) {
            uint32_t n = first;

            end = a->n_k - k < piece ? a->n_k : k + piece;
            for (; n + (uint32_t)nw <= last; n += (uint32_t)nw)
                dot_tile(a, n, k, end, mx, nw, false, carried + (n - first) * (uint32_t)mx);
            for (; n < last; n++)
                dot_tile(a, n, k, end, mx, 1, false, carried + (n - first) * (uint32_t)mx);
        }
    }
}

static void dot_far(const raw_dot_args *a)
{
    raw_dot_args row = *a;

    for (uint32_t m = 0; m < a->n_x; m++, row.x += a->x_ld, row.x_scale += a->x_scale_ld)
        for (uint32_t n = 0; n < a->n_w; n++) {
            row.y = a->y + m * a->y_ld;
            dot_tile(&row, n, 0, a->n_k, 1, 1, true, NULL);
        }
}

static bool any_far(const raw_dot_args *a)
{
    for (uint32_t n = 0; n < a->n_w; n++)
        for (uint32_t i = 0; i < a->n_x * yard_group_count(a->n_k); i++) {
            const uint32_t m = i / yard_group_count(a->n_k), group = i % yard_group_count(a->n_k);

            if (n > 0 && a->w_scale[n] == a->w_scale[n - 1])
                break; /* a row of the same blocks */
            if (!(fabsf(a->x_scale[m * a->x_scale_ld + group] * a->w_scale[n][group] * UNSHIFT) <=
                  FLT_MAX))
                return true;
        }
    return false;
}

static void dot(const raw_dot_args *a)
{
    if (any_far(a))
        dot_far(a);
    else if (a->n_x == 1)
        dot_rows(a, 1, 4);
    else if (a->n_x == 2)
        dot_rows(a, 2, 2);
    else if (a->n_x == 3)
        dot_rows(a, 3, 2);
    else
        dot_rows(a, 4, 2);
}

const code_kernels yard_cpu_codes_avx2 = { .usable = usable, .dot = dot };

#endif
