/* Products of more than a few rows of x with weights of 8 or 16 bits, AVX-512. As strips_avx2.c,
 * with 32 registers of 16 lanes: 24 sums, 4 registers of w and one of x, so that weights are f32 in
 * their panel and nothing but loads stands beside the multiply-adds. Tiles have TILE_W registers of
 * w. Scaled, in quads, two rows of w in each register:
 *
 *   strip  [steps: 4 a chunk, rows, 8] f32
 *   tile   [steps, registers, two rows, 8] f32
 *   sums   [rows of x, registers, two rows, 8] f32
 *
 * Not scaled, in pairs, one row of w in each:
 *
 *   strip  [steps: 2 a chunk, rows, 16] f32
 *   tile   [steps, registers, 16] f32
 *   sums   [rows of x, registers, 16] f32 */
#include "ops/cpu/cpu.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

#include <assert.h>

#include "ops/cpu/strips.h"
#include "ops/cpu/widen_avx512.h"

enum { STRIP_ROWS = 6, TILE_W = 4, TILE_SUMS = STRIP_ROWS * TILE_W * LANES };

static const _Alignas(64) float zeros[TILE_SUMS];

/* Rows of the next strip when so many are left: 3 at least, of more than FEW_ROWS. */
static uint32_t strip_rows(uint32_t left)
{
    return yard_ceil_div(left, yard_ceil_div(left, STRIP_ROWS));
}

/* Rows of w in a register, and lanes of each. */
INLINE int rows_of(bool scaled)
{
    return scaled ? 2 : 1;
}

INLINE int lanes_of(bool scaled)
{
    return scaled ? SCALED_LANES : LANES;
}

/* Registers of the next tile. */
INLINE uint32_t tile_registers(uint32_t left_rows, bool scaled)
{
    return left_rows > (TILE_W - 1) * (uint32_t)rows_of(scaled) ? TILE_W : 1;
}

/* sum += x . w (or =, when first). All but the pointers are compile-time constants. */
INLINE void add_step(const float *x, const float *w, bool scaled, bool first, int mx, int nw,
                     __m512 sum[STRIP_ROWS][TILE_W])
{
    __m512 wv[TILE_W];

    for (int n = 0; n < nw; n++) {
        wv[n] = _mm512_load_ps(w + n * LANES);
        IN_REGISTER(wv[n]);
    }
    for (int m = 0; m < mx; m++) {
        const float *at = x + m * lanes_of(scaled);
        __m512 xv = scaled ? _mm512_broadcast_f32x8(_mm256_load_ps(at)) : _mm512_load_ps(at);

        IN_REGISTER(xv);
        for (int n = 0; n < nw; n++)
            sum[m][n] = first ? _mm512_mul_ps(xv, wv[n]) : _mm512_fmadd_ps(xv, wv[n], sum[m][n]);
    }
}

INLINE void plain_tile(const float *x, const float *w, uint32_t n_k, int mx, int nw,
                       const float *before, float *sums)
{
    __m512 sum[STRIP_ROWS][TILE_W];

    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            sum[m][n] = _mm512_load_ps(before + (m * nw + n) * LANES);
    for (uint32_t n = 2 * chunks_of(n_k); n > 0; n--, x += LANES * mx, w += LANES * nw)
        add_step(x, w, false, false, mx, nw, sum);
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            _mm512_store_ps(sums + (m * nw + n) * LANES, sum[m][n]);
}

/* A group, begun anew and added with its scale; see scaled_group() of strips_avx2.c. */
INLINE void scaled_group(const float *x, const float *w, uint32_t n_steps, const float *factor,
                         int mx, int nw, const float *before, float *sums)
{
    __m512 sum[STRIP_ROWS][TILE_W];

    add_step(x, w, true, true, mx, nw, sum);
    while (--n_steps > 0) {
        x += SCALED_LANES * mx;
        w += LANES * nw;
        add_step(x, w, true, false, mx, nw, sum);
    }
    for (int m = 0; m < mx; m++) {
        const __m512 f = _mm512_set1_ps(factor[m]);

        for (int n = 0; n < nw; n++) {
            const int at = (m * nw + n) * LANES;
            _mm512_store_ps(sums + at, _mm512_fmadd_ps(sum[m][n], f, _mm512_load_ps(before + at)));
        }
    }
}

INLINE void scaled_tile(const float *x, const float *w, uint32_t n_k, const float *factor, int mx,
                        int nw, const float *before, float *sums)
{
    for (uint32_t k = 0; k < n_k; k += YARD_GROUP, factor += MAX_TILE_ROWS, before = sums) {
        const uint32_t n_chunks = chunks_of(n_k - k < YARD_GROUP ? n_k - k : YARD_GROUP);

        scaled_group(x + k * (size_t)mx, w + k * (size_t)(2 * nw), 4 * n_chunks, factor, mx, nw,
                     before, sums);
    }
}

/* Eight lanes of two rows in each of four registers, added pairwise: one value a row. */
INLINE __m256 add_eights(const __m512 two[TILE_W])
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    __m512 four[2], both, one;

    for (int i = 0; i < 2; i++)
        four[i] = _mm512_add_ps(_mm512_shuffle_f32x4(two[2 * i], two[2 * i + 1], 0x88),
                                _mm512_shuffle_f32x4(two[2 * i], two[2 * i + 1], 0xdd));
    both = _mm512_add_ps(_mm512_shuffle_ps(four[0], four[1], 0x44),
                         _mm512_shuffle_ps(four[0], four[1], 0xee));
    one = _mm512_add_ps(both, _mm512_permute_ps(both, 0xb1));
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, one));
}

/* y[m, n] = its sum, added pairwise, for n_w rows of w: see LANES. */
INLINE void finish_tile(const float *sums, bool scaled, int mx, int nw, uint32_t n_w, float *y,
                        size_t y_ld)
{
    const __mmask8 rows = (__mmask8)((1u << n_w) - 1);

    for (int m = 0; m < mx; m++, sums += nw * LANES, y += y_ld) {
        __m512 v[TILE_W] = { 0 };

        for (int n = 0; n < nw; n++)
            v[n] = _mm512_load_ps(sums + n * LANES);
        if (!scaled) {
            for (int i = 0; i < 2; i++)
                v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                                     _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
            v[2] = v[3] = _mm512_setzero_ps();
        }
        _mm256_mask_storeu_ps(y, rows, add_eights(v));
    }
}

/* n_w rows of w, in nw registers. */
INLINE void add_tile(const strip_args *a, const float *x, const float *w, const float *factor,
                     int mx, int nw, uint32_t n_w, float *sums, float *y)
{
    const float *before = a->continued ? sums : zeros;

    if (factor)
        scaled_tile(x, w, a->n_k, factor, mx, nw, before, sums);
    else
        plain_tile(x, w, a->n_k, mx, nw, before, sums);
    if (y)
        finish_tile(sums, factor, mx, nw, n_w, y, a->y_ld);
}

/* A strip of mx rows from m0 on meets all tiles, which stay in the first cache. */
INLINE void dot_strip(const strip_args *a, uint32_t m0, int mx, bool scaled, fetcher *f)
{
    const float *x = a->x + m0 * a->x_ld + (size_t)a->at * (size_t)mx, *w = a->w;
    const float *factor = scaled ? a->factor + m0 : NULL;
    const uint32_t rows = (uint32_t)rows_of(scaled);
    float *sums = a->sums + (size_t)m0 * (a->n_w + a->n_w % rows) * (size_t)lanes_of(scaled);

    for (uint32_t n = 0, nw; n < a->n_w; n += nw * rows) {
        const uint32_t left = a->n_w - n;
        float *y = a->y ? a->y + m0 * a->y_ld + n : NULL;

        fetch_some(f);
        nw = tile_registers(left, scaled);
        if (nw == TILE_W)
            add_tile(a, x, w, factor, mx, TILE_W, left < TILE_W * rows ? left : TILE_W * rows, sums,
                     y);
        else
            add_tile(a, x, w, factor, mx, 1, left < rows ? left : rows, sums, y);
        w += nw * rows * (size_t)pad_lanes(a->n_k);
        sums += nw * (size_t)(LANES * mx);
    }
}

INLINE void dot_strips(const strip_args *a, bool scaled)
{
    const uint32_t tile_rows = TILE_W * (uint32_t)rows_of(scaled);
    fetcher f = start_fetch(&a->ahead,
                            yard_ceil_div(a->n_x, STRIP_ROWS) * yard_ceil_div(a->n_w, tile_rows));

    assert(a->n_x > FEW_ROWS);
    for (uint32_t m = 0, mx; m < a->n_x; m += mx) {
        mx = strip_rows(a->n_x - m);
        if (mx == 6)
            dot_strip(a, m, 6, scaled, &f);
        else if (mx == 5)
            dot_strip(a, m, 5, scaled, &f);
        else if (mx == 4)
            dot_strip(a, m, 4, scaled, &f);
        else
            dot_strip(a, m, 3, scaled, &f);
    }
}

static void dot(const strip_args *a)
{
    if (a->factor)
        dot_strips(a, true);
    else
        dot_strips(a, false);
}

INLINE void lay_row(const float *row, uint32_t n_k, uint32_t m, uint32_t n_x, bool scaled, float *x,
                    size_t x_ld)
{
    const uint32_t lanes = (uint32_t)lanes_of(scaled);
    uint32_t first = 0, mx = strip_rows(n_x);

    while (m >= first + mx) {
        first += mx;
        mx = strip_rows(n_x - first);
    }
    x += first * x_ld + (m - first) * (size_t)lanes;
    for (uint32_t k = 0; k < pad_lanes(n_k); k += lanes, x += lanes * mx)
        memcpy(x, row + k, lanes * sizeof(*x));
}

static void lay_quads(const float *quads, uint32_t n_k, uint32_t m, uint32_t n_x, float *x,
                      size_t x_ld)
{
    lay_row(quads, n_k, m, n_x, true, x, x_ld);
}

static void lay_pairs(const float *pairs, uint32_t n_k, uint32_t m, uint32_t n_x, float *x,
                      size_t x_ld)
{
    lay_row(pairs, n_k, m, n_x, false, x, x_ld);
}

/* The odd values of each pair, then the even ones, `step` apart. */
INLINE void store_pairs(__m512i pairs, uint32_t step, float *w)
{
    __m512 odd, even;

    split_bf16(pairs, &odd, &even);
    _mm512_store_ps(w, odd);
    _mm512_store_ps(w + step, even);
}

/* A register of a tile of nw: two rows of codes, or one of bf16 values. */
INLINE void lay_scaled(const code_tables *t, const uint8_t *first, const uint8_t *second,
                       uint32_t n_k, uint32_t nw, float *w)
{
    const uint32_t step = nw * LANES;

    for (uint32_t k = 0; k < n_k; k += CHUNK, w += 4 * step) {
        const bf16_step v = load_two_rows(t, first + k, second + k, n_k - k);

        store_pairs(v.at[0], step, w);
        store_pairs(v.at[1], step, w + 2 * step);
    }
}

INLINE void lay_plain(const uint8_t *row, uint32_t n_k, uint32_t nw, float *w)
{
    for (uint32_t k = 0; k < n_k; k += CHUNK, w += 2 * nw * LANES) {
        const uint32_t left = n_k - k;

        store_pairs(left >= CHUNK ? _mm512_loadu_si512(row + 2 * k)
                                  : _mm512_maskz_loadu_epi16((1u << left) - 1, row + 2 * k),
                    nw * LANES, w);
    }
}

/* Row n, or the last one where there are no more. */
INLINE const uint8_t *row_of(const strip_source *s, uint32_t n)
{
    return (const uint8_t *)s->first + (n < s->n_w ? n : s->n_w - 1) * s->ld_bytes;
}

static void lay_w(const strip_source *s, void *panel)
{
    const bool scaled = s->dtype == YARD_FP8_E4M3;
    const uint32_t rows = (uint32_t)rows_of(scaled);
    const code_tables t = load_code_tables();
    float *w = panel;

    for (uint32_t n = 0, nw; n < s->n_w; w += nw * rows * (size_t)pad_lanes(s->n_k)) {
        nw = tile_registers(s->n_w - n, scaled);
        for (uint32_t i = 0; i < nw; i++, n += rows) {
            if (scaled)
                lay_scaled(&t, row_of(s, n), row_of(s, n + 1), s->n_k, nw, w + i * LANES);
            else
                lay_plain(row_of(s, n), s->n_k, nw, w + i * LANES);
        }
    }
}

const strip_kernels yard_cpu_strips_avx512 = { .panel_rows = 8,
                                               .block_rows = STRIP_BLOCK_ROWS,
                                               .lay_quads = lay_quads,
                                               .lay_pairs = lay_pairs,
                                               .lay_w = lay_w,
                                               .dot = dot };

#endif
