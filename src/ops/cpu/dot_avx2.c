/* AVX2 + FMA dot products of many rows: attention's scores, and weights that strips_avx2.c does not
 * take. */
#include <assert.h>

#include "ops/cpu/cpu.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "ops/cpu/lanes_avx2.h"

enum {
    TILE_X = 3, /* 12 sums, TILE_X vectors of x and one of w */
    TILE_W = 4,
};

/* Rows of x and w, and the sums [TILE_W, LANES] of each row of x: addresses that stay in registers
 * while columns are counted. */
typedef struct tile {
    const float *x[TILE_X], *w[TILE_W];
    const float *before[TILE_X]; /* what the sums go on from */
    float *sum[TILE_X];
} tile;

static const float zeros[TILE_W * LANES];

/* lanes[m][n] += x[m] . w[n] at 8 columns; mx and nw are compile-time constants. */
INLINE void dot_step(const tile *t, size_t k, int mx, int nw, __m256 lanes[TILE_X][TILE_W])
{
    __m256 xv[TILE_X];

    for (int m = 0; m < mx; m++) {
        xv[m] = _mm256_loadu_ps(t->x[m] + k);
        IN_REGISTER(xv[m]);
    }
    for (int n = 0; n < nw; n++) {
        __m256 wv = _mm256_loadu_ps(t->w[n] + k);

        IN_REGISTER(wv);
        for (int m = 0; m < mx; m++)
            lanes[m][n] = _mm256_fmadd_ps(xv[m], wv, lanes[m][n]);
    }
}

INLINE void half_tile(const tile *t, int h, uint32_t n_k, int mx, int nw)
{
    __m256 lanes[TILE_X][TILE_W];

    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            lanes[m][n] = _mm256_loadu_ps(t->before[m] + n * LANES + h);
    for (size_t k = (size_t)h; k < n_k; k += LANES)
        dot_step(t, k, mx, nw, lanes);
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            _mm256_storeu_ps(t->sum[m] + n * LANES + h, lanes[m][n]);
}

INLINE void dot_tile(const dot_args *a, uint32_t m0, uint32_t n0, int mx, int nw)
{
    _Alignas(32) float own[TILE_X][TILE_W * LANES];
    tile t;

    for (int n = 0; n < nw; n++)
        t.w[n] = a->w + (n0 + (uint32_t)n) * a->w_ld;
    for (int m = 0; m < mx; m++) {
        const size_t row = m0 + (uint32_t)m, carried = (row * a->n_w + n0) * LANES;

        t.x[m] = a->x + row * a->x_ld;
        t.sum[m] = a->lanes ? a->lanes + carried : own[m];
        t.before[m] = a->continued ? a->lanes + carried : zeros;
    }
    half_tile(&t, 0, pad_lanes(a->n_k), mx, nw);
    half_tile(&t, HALF, pad_lanes(a->n_k), mx, nw);
    for (int m = 0; m < mx && a->y; m++)
        for (int n = 0; n < nw; n++)
            a->y[(m0 + m) * a->y_ld + n0 + n] = add_lanes(t.sum[m] + n * LANES);
}

INLINE void dot_rows(const dot_args *a, uint32_t m0, uint32_t n0, uint32_t n_w, int mx)
{
    uint32_t n = 0;

    for (; n + TILE_W <= n_w; n += TILE_W)
        dot_tile(a, m0, n0 + n, mx, TILE_W);
    for (; n < n_w; n++)
        dot_tile(a, m0, n0 + n, mx, 1);
}

/* Rows of x from the second cache, three at a time, meet PANEL_ROWS rows of w in the first. Four
 * are two and two, since one alone has too few sums. */
static void dot_block(const dot_args *a, uint32_t n0, uint32_t n_w)
{
    uint32_t m = 0;

    for (; a->n_x - m == 3 || a->n_x - m > 4; m += 3)
        dot_rows(a, m, n0, n_w, 3);
    for (; a->n_x - m >= 2; m += 2)
        dot_rows(a, m, n0, n_w, 2);
    if (m < a->n_x)
        dot_rows(a, m, n0, n_w, 1);
}

void yard_cpu_dot_avx2(const dot_args *a)
{
    assert(!a->factor); /* those products are by strips */
    assert(a->lanes || !a->continued);
    for (uint32_t n = 0; n < a->n_w; n += PANEL_ROWS)
        dot_block(a, n, a->n_w - n < PANEL_ROWS ? a->n_w - n : PANEL_ROWS);
}

#endif
