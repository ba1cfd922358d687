/* AVX2 + FMA dot products of many rows. */
#include "ops/cpu/cpu.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <assert.h>

#include "ops/cpu/lanes_avx2.h"

enum {
    TILE_X = 3, /* 12 sums, TILE_X vectors of x and one of w */
    TILE_W = 4,
    PANEL_GROUPS = PANEL_K / YARD_GROUP
};

typedef struct tile {
    const float *x, *w;
    size_t x_ld, w_ld;
    float *sum; /* [TILE_X, sum_ld], of which [n_w, LANES] */
    size_t sum_ld;
} tile;

INLINE float *sum_of(const tile *t, int m, int n)
{
    return t->sum + m * t->sum_ld + n * LANES;
}

/* What a panel's groups are multiplied with: the scales of nw rows of w, or those times x's. */
typedef struct factors {
    float at[PANEL_GROUPS][TILE_W];
} factors;

/* lanes[m][n] += x[m] . w[n] over [k, k + n_k), half of the lanes; mx and nw are compile-time
 * constants. */
INLINE void dot_span(const tile *t, size_t k, uint32_t n_k, int mx, int nw,
                     __m256 lanes[TILE_X][TILE_W])
{
    const float *x = t->x + k, *w = t->w + k;
    const size_t x_ld = t->x_ld, w_ld = t->w_ld;

    for (const float *end = x + n_k; x < end; x += LANES, w += LANES) {
        __m256 xv[TILE_X];

        for (int m = 0; m < mx; m++) {
            xv[m] = _mm256_loadu_ps(x + m * x_ld);
            IN_REGISTER(xv[m]);
        }
        for (int n = 0; n < nw; n++) {
            __m256 wv = _mm256_loadu_ps(w + n * w_ld);

            IN_REGISTER(wv);
            for (int m = 0; m < mx; m++)
                lanes[m][n] = _mm256_fmadd_ps(xv[m], wv, lanes[m][n]);
        }
    }
}

INLINE void plain_half(const tile *t, int h, uint32_t n_k, int mx, int nw)
{
    __m256 lanes[TILE_X][TILE_W];

    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            lanes[m][n] = _mm256_loadu_ps(sum_of(t, m, n) + h);
    dot_span(t, (size_t)h, n_k, mx, nw, lanes);
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            _mm256_storeu_ps(sum_of(t, m, n) + h, lanes[m][n]);
}

INLINE void scaled_half(const tile *t, size_t k, uint32_t n_k, int h, int mx, int nw,
                        const factors f[TILE_X], uint32_t g)
{
    __m256 lanes[TILE_X][TILE_W];

    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            lanes[m][n] = _mm256_setzero_ps();
    dot_span(t, k + (size_t)h, n_k, mx, nw, lanes);
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            add_to_sum(sum_of(t, m, n) + h, lanes[m][n], &f[m].at[g][n]);
}

INLINE void row_factors(const dot_args *a, uint32_t m, const factors *w, factors *f)
{
    for (uint32_t g = 0; g < yard_group_count(a->n_k); g++) {
        const __m128 xs = _mm_set1_ps(a->x_scale[m * a->x_scale_ld + g]);
        _mm_storeu_ps(f->at[g], _mm_mul_ps(xs, _mm_loadu_ps(w->at[g])));
    }
}

INLINE void dot_scaled(const dot_args *a, const tile *t, const factors *w, uint32_t m0, int mx,
                       int nw)
{
    const uint32_t n_k = pad_lanes(a->n_k);
    factors f[TILE_X];

    for (int m = 0; m < mx; m++) {
        if (a->x_scale)
            row_factors(a, m0 + (uint32_t)m, w, &f[m]);
        else
            f[m] = *w;
    }
    for (uint32_t k = 0, g = 0; k < n_k; k += YARD_GROUP, g++) {
        const uint32_t n_group = n_k - k < YARD_GROUP ? n_k - k : YARD_GROUP;

        /* half after half of one group, while it is in the first cache */
        scaled_half(t, k, n_group, 0, mx, nw, f, g);
        scaled_half(t, k, n_group, HALF, mx, nw, f, g);
    }
}

INLINE void dot_tile(const dot_args *a, const factors *w, uint32_t m0, uint32_t n0, int mx, int nw)
{
    _Alignas(32) float own[TILE_X][TILE_W * LANES];
    const tile t = {
        .x = a->x + m0 * a->x_ld,
        .w = a->w + n0 * a->w_ld,
        .x_ld = a->x_ld,
        .w_ld = a->w_ld,
        .sum = a->lanes ? a->lanes + ((size_t)m0 * a->n_w + n0) * LANES : own[0],
        .sum_ld = a->lanes ? (size_t)a->n_w * LANES : TILE_W * LANES,
    };

    for (int m = 0; m < mx && !a->continued; m++)
        for (int n = 0; n < nw; n++)
            clear_lanes(sum_of(&t, m, n));
    if (a->w_scale) {
        dot_scaled(a, &t, w, m0, mx, nw);
    } else {
        plain_half(&t, 0, pad_lanes(a->n_k), mx, nw);
        plain_half(&t, HALF, pad_lanes(a->n_k), mx, nw);
    }
    for (int m = 0; m < mx && a->y; m++)
        for (int n = 0; n < nw; n++)
            a->y[(m0 + m) * a->y_ld + n0 + n] = add_lanes(sum_of(&t, m, n));
}

INLINE void dot_rows(const dot_args *a, const factors *w, uint32_t m0, uint32_t n0, uint32_t n_w,
                     int mx)
{
    uint32_t n = 0;

    for (; n + TILE_W <= n_w; n += TILE_W)
        dot_tile(a, &w[n], m0, n0 + n, mx, TILE_W);
    for (; n < n_w; n++)
        dot_tile(a, &w[n], m0, n0 + n, mx, 1);
}

/* Rows of x from the second cache, three at a time, meet PANEL_ROWS rows of w in the first. Four
 * are two and two, since one alone has too few sums. */
static void dot_block(const dot_args *a, uint32_t n0, uint32_t n_w)
{
    factors w[PANEL_ROWS]; /* those of TILE_W rows from each row on */
    uint32_t m = 0;

    for (uint32_t n = 0; n < n_w && a->w_scale; n++)
        for (uint32_t g = 0; g < yard_group_count(a->n_k); g++)
            for (uint32_t i = 0; i < TILE_W; i++)
                w[n].at[g][i] = n + i < n_w ? a->w_scale[n0 + n + i][g] : 0.0f;
    for (; a->n_x - m == 3 || a->n_x - m > 4; m += 3)
        dot_rows(a, w, m, n0, n_w, 3);
    for (; a->n_x - m >= 2; m += 2)
        dot_rows(a, w, m, n0, n_w, 2);
    if (m < a->n_x)
        dot_rows(a, w, m, n0, n_w, 1);
}

void yard_cpu_dot_avx2(const dot_args *a)
{
    assert(!a->w_scale || a->n_k <= PANEL_K);
    for (uint32_t n = 0; n < a->n_w; n += PANEL_ROWS)
        dot_block(a, n, a->n_w - n < PANEL_ROWS ? a->n_w - n : PANEL_ROWS);
}

#endif
