/* Products of more than a few rows of x with weights of 8 or 16 bits, AVX2 + FMA.
 *
 * On Zen 3 a store of a vector takes the place of one or two multiply-adds, while loads, shifts and
 * masks beside them are free, and the first cache serves one stream of whole lines at twice the
 * speed of many. So weights are widened to bf16 only, and from there in registers, and what is
 * multiplied lies in the order in which it is read. Rows of x are laid out in strips of up to
 * STRIP_ROWS, rows of w in tiles of up to TILE_ROWS. Scaled, in quads:
 *
 *   strip  [chunks, 2 halves, odd and even, rows, 8] f32
 *   tile   [chunks, 2 halves, rows, 16] bf16, which widen to 8 odd and 8 even ones
 *   sums   [rows of x, rows of w, 8] f32
 *
 * Not scaled, in pairs, whose halves are half of the lanes (0 to 3 and 8 to 11, then the others):
 *
 *   strip  [panels, 2 halves, chunks, odd and even, rows, 8] f32
 *   tile   [2 halves, chunks, rows, 16] bf16
 *   sums   [2 halves, rows of x, rows of w, 8] f32 */
#include "ops/cpu/cpu.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "ops/cpu/lanes_avx2.h"
#include "ops/cpu/strips.h"
#include "ops/cpu/widen_codes_avx2.h"

enum { STRIP_ROWS = 4, TILE_ROWS = 3, TILE_SUMS = STRIP_ROWS * TILE_ROWS * LANES };

static const _Alignas(32) float zeros[TILE_SUMS];

/* Rows of the next strip when so many are left: fours, but neither one nor two alone, whose sums
 * are too few for both units, unless there are no others. */
static uint32_t strip_rows(uint32_t left)
{
    return left == 5 || left == 6 || left == 9 || left == 10 ? 3 : left < 4 ? left : 4;
}

/* Rows of the next tile. */
static uint32_t tile_rows(uint32_t left)
{
    return left == 4 || left < 3 ? (left < 2 ? left : 2) : 3;
}

/* In this order of instructions: 12 sums, three vectors of w and one of x are all the registers
 * there are, and a compiler that loads ahead or moves sums about puts some into memory. */
#define PINNED(v) __asm__ volatile("" : "+x"(v))

/* sum[n] += x . w[n], for 8 values of x. */
INLINE void add_products(const float *x, const __m256 w[TILE_ROWS], int nw, __m256 sum[TILE_ROWS])
{
    const __m256 *xv = (const __m256 *)(const void *)x;
    __m256 t;

    if (nw == 3)
        __asm__ volatile("vmovaps %4, %3\n\tvfmadd231ps %5, %3, %0\n\t"
                         "vfmadd231ps %6, %3, %1\n\tvfmadd231ps %7, %3, %2"
                         : "+x"(sum[0]), "+x"(sum[1]), "+x"(sum[2]), "=&x"(t)
                         : "m"(*xv), "x"(w[0]), "x"(w[1]), "x"(w[2]));
    else if (nw == 2)
        __asm__ volatile("vmovaps %3, %2\n\tvfmadd231ps %4, %2, %0\n\tvfmadd231ps %5, %2, %1"
                         : "+x"(sum[0]), "+x"(sum[1]), "=&x"(t)
                         : "m"(*xv), "x"(w[0]), "x"(w[1]));
    else
        __asm__ volatile("vfmadd231ps %1, %2, %0" : "+x"(sum[0]) : "m"(*xv), "x"(w[0]));
}

/* The odd ones of 16 bf16 values; the mask stays in memory for want of a register. */
INLINE __m256 widen_odd(__m256i values)
{
    static const _Alignas(32) uint32_t mask[8] = { 0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000,
                                                   0xffff0000, 0xffff0000, 0xffff0000, 0xffff0000 };

    __asm__ volatile("vpand %1, %0, %0" : "+x"(values) : "m"(mask));
    return _mm256_castsi256_ps(values);
}

INLINE __m256 widen_even(__m256i values)
{
    __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(values, 16));

    PINNED(even);
    return even;
}

/* sum += x . w (or =, when first) for the odd or the even values of half a chunk.
 * All but the pointers are compile-time constants. */
INLINE void add_step(const float *x, const uint16_t *w, bool odd, bool first, int mx, int nw,
                     __m256 sum[STRIP_ROWS][TILE_ROWS])
{
    __m256 wv[TILE_ROWS];

    for (int n = 0; n < nw; n++) {
        const __m256i values = _mm256_load_si256((const __m256i *)(const void *)(w + LANES * n));
        wv[n] = odd ? widen_odd(values) : widen_even(values);
    }
    for (int m = 0; m < mx; m++, x += HALF) {
        if (!first) {
            add_products(x, wv, nw, sum[m]);
            continue;
        }
        for (int n = 0; n < nw; n++) {
            sum[m][n] = _mm256_mul_ps(_mm256_load_ps(x), wv[n]);
            PINNED(sum[m][n]);
        }
    }
}

INLINE void add_half(const float *x, const uint16_t *w, bool first, int mx, int nw,
                     __m256 sum[STRIP_ROWS][TILE_ROWS])
{
    add_step(x, w, true, first, mx, nw, sum);
    add_step(x + HALF * mx, w, false, false, mx, nw, sum);
}

/* 8 lanes of so many halves of chunks, after what is in before. */
INLINE void add_halves(const float *x, const uint16_t *w, uint32_t n, int mx, int nw,
                       const float *before, float *sums)
{
    __m256 sum[STRIP_ROWS][TILE_ROWS];

    for (int i = 0; i < mx * nw; i++) {
        sum[i / nw][i % nw] = _mm256_load_ps(before + i * HALF);
        PINNED(sum[i / nw][i % nw]);
    }
    for (; n > 0; n--, x += 2 * HALF * mx, w += LANES * nw)
        add_half(x, w, false, mx, nw, sum);
    for (int i = 0; i < mx * nw; i++)
        _mm256_store_ps(sums + i * HALF, sum[i / nw][i % nw]);
}

INLINE void plain_tile(const float *x, const uint16_t *w, uint32_t n_k, int mx, int nw,
                       const float *before, float *sums)
{
    const uint32_t n_chunks = chunks_of(n_k);
    const int half = HALF * mx * nw;

    add_halves(x, w, n_chunks, mx, nw, before, sums);
    x += n_chunks * 2 * HALF * (size_t)mx;
    w += n_chunks * LANES * (size_t)nw;
    add_halves(x, w, n_chunks, mx, nw, before + half, sums + half);
}

/* sums = before + sum * factor */
INLINE void add_scaled(__m256 sum[STRIP_ROWS][TILE_ROWS], const float *factor, int mx, int nw,
                       const float *before, float *sums)
{
    for (int m = 0; m < mx; m++) {
        const __m256 f = _mm256_broadcast_ss(factor + m);

        for (int n = 0; n < nw; n++) {
            const int at = (m * nw + n) * HALF;
            _mm256_store_ps(sums + at, _mm256_fmadd_ps(sum[m][n], f, _mm256_load_ps(before + at)));
        }
    }
}

/* A whole group, begun anew and added with its scale. A sum that starts as its first product has
 * the bits of one that starts as 0, unless it is -0, and adding either to the sum of other groups
 * gives the same: only where all of these underflowed, a 0 may have the other sign. The first
 * products are no multiply-adds: they go on beside the stores of the group before. */
INLINE void scaled_group(const float *x, const uint16_t *w, const float *factor, int mx, int nw,
                         const float *before, float *sums)
{
    __m256 sum[STRIP_ROWS][TILE_ROWS];

    add_half(x, w, true, mx, nw, sum);
    for (int c = 1; c < 2 * YARD_GROUP / CHUNK; c++)
        add_half(x + c * 2 * HALF * mx, w + c * LANES * nw, false, mx, nw, sum);
    add_scaled(sum, factor, mx, nw, before, sums);
}

/* Columns that are less than a group. */
INLINE void scaled_rest(const float *x, const uint16_t *w, uint32_t n_k, const float *factor,
                        int mx, int nw, const float *before, float *sums)
{
    _Alignas(32) float part[TILE_SUMS];
    __m256 sum[STRIP_ROWS][TILE_ROWS];

    add_halves(x, w, 2 * chunks_of(n_k), mx, nw, zeros, part);
    for (int i = 0; i < mx * nw; i++)
        sum[i / nw][i % nw] = _mm256_load_ps(part + i * HALF);
    add_scaled(sum, factor, mx, nw, before, sums);
}

INLINE void scaled_tile(const float *x, const uint16_t *w, uint32_t n_k, const float *factor,
                        int mx, int nw, const float *before, float *sums)
{
    for (; n_k >= YARD_GROUP; n_k -= YARD_GROUP, factor += MAX_TILE_ROWS) {
        scaled_group(x, w, factor, mx, nw, before, sums);
        x += YARD_GROUP * mx;
        w += YARD_GROUP * nw;
        before = sums;
    }
    if (n_k)
        scaled_rest(x, w, n_k, factor, mx, nw, before, sums);
}

INLINE __m128 add_to_four(const float *eight)
{
    return _mm_add_ps(_mm_load_ps(eight), _mm_load_ps(eight + 4));
}

/* y[m, n] = its sum, added pairwise: see LANES. Four rows of x at once. */
INLINE void finish_tile(const float *sums, bool scaled, int mx, int nw, float *y, size_t y_ld)
{
    const int half = HALF * mx * nw;

    for (int n = 0; n < nw; n++) {
        __m128 v[STRIP_ROWS] = { 0 }, low, high;
        _Alignas(16) uint32_t added[STRIP_ROWS]; /* as integers: such stores cost nothing */

        for (int m = 0; m < mx; m++) {
            const float *at = sums + (m * nw + n) * HALF;
            v[m] = scaled ? add_to_four(at) : _mm_add_ps(add_to_four(at), add_to_four(at + half));
        }
        low = _mm_add_ps(_mm_movelh_ps(v[0], v[1]), _mm_movehl_ps(v[1], v[0]));
        high = _mm_add_ps(_mm_movelh_ps(v[2], v[3]), _mm_movehl_ps(v[3], v[2]));
        _mm_store_ps((float *)(void *)added,
                     _mm_add_ps(_mm_shuffle_ps(low, high, 0x88), _mm_shuffle_ps(low, high, 0xdd)));
        for (int m = 0; m < mx; m++)
            memcpy(y + (size_t)m * y_ld + (size_t)n, &added[m], sizeof(added[m]));
    }
}

INLINE void add_tile(const strip_args *a, const float *x, const uint16_t *w, const float *factor,
                     int mx, int nw, float *sums, float *y)
{
    const float *before = a->continued ? sums : zeros;

    if (factor)
        scaled_tile(x, w, a->n_k, factor, mx, nw, before, sums);
    else
        plain_tile(x, w, a->n_k, mx, nw, before, sums);
    if (y)
        finish_tile(sums, factor, mx, nw, y, a->y_ld);
}

/* A strip of mx rows from m0 on meets all tiles, which stay in the first cache. */
INLINE void dot_strip(const strip_args *a, uint32_t m0, int mx, fetcher *f)
{
    const float *x = a->x + m0 * a->x_ld + (size_t)a->at * (size_t)mx;
    const float *factor = a->factor ? a->factor + m0 : NULL;
    const int lanes = factor ? SCALED_LANES : LANES;
    float *sums = a->sums + (size_t)m0 * a->n_w * (size_t)lanes;
    const size_t w_ld = pad_lanes(a->n_k);

    for (uint32_t n = 0, nw; n < a->n_w; n += nw, sums += nw * (size_t)(lanes * mx)) {
        const uint16_t *w = (const uint16_t *)a->w + n * w_ld;
        float *y = a->y ? a->y + m0 * a->y_ld + n : NULL;

        fetch_some(f);
        nw = tile_rows(a->n_w - n);
        if (nw == 3)
            add_tile(a, x, w, factor, mx, 3, sums, y);
        else if (nw == 2)
            add_tile(a, x, w, factor, mx, 2, sums, y);
        else
            add_tile(a, x, w, factor, mx, 1, sums, y);
    }
}

static void dot(const strip_args *a)
{
    fetcher f = start_fetch(&a->ahead,
                            yard_ceil_div(a->n_x, STRIP_ROWS) * yard_ceil_div(a->n_w, TILE_ROWS));

    for (uint32_t m = 0, mx; m < a->n_x; m += mx) {
        mx = strip_rows(a->n_x - m);
        if (mx == 4)
            dot_strip(a, m, 4, &f);
        else if (mx == 3)
            dot_strip(a, m, 3, &f);
        else if (mx == 2)
            dot_strip(a, m, 2, &f);
        else
            dot_strip(a, m, 1, &f);
    }
}

INLINE __m256 half_of(const float *lanes, int h)
{
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(lanes + 4 * h)),
                                _mm_loadu_ps(lanes + HALF + 4 * h), 1);
}

/* Where row m of n_x begins in its strip, and how far its next 8 values are. */
static float *strip_row(uint32_t m, uint32_t n_x, float *x, size_t x_ld, uint32_t *step)
{
    uint32_t first = 0, mx = strip_rows(n_x);

    while (m >= first + mx) {
        first += mx;
        mx = strip_rows(n_x - first);
    }
    *step = HALF * mx;
    return x + first * x_ld + (m - first) * (size_t)HALF;
}

static void lay_quads(const float *quads, uint32_t n_k, uint32_t m, uint32_t n_x, float *x,
                      size_t x_ld)
{
    uint32_t step;
    float *at = strip_row(m, n_x, x, x_ld, &step);

    for (uint32_t i = 0; i < chunks_of(n_k) * CHUNK; i += HALF, at += step)
        _mm256_store_ps(at, _mm256_loadu_ps(quads + i));
}

static void lay_pairs(const float *pairs, uint32_t n_k, uint32_t m, uint32_t n_x, float *x,
                      size_t x_ld)
{
    uint32_t step;
    float *at = strip_row(m, n_x, x, x_ld, &step);

    for (uint32_t k = 0; k < n_k; k += PANEL_K) {
        const uint32_t n_chunks = chunks_of(n_k - k < PANEL_K ? n_k - k : PANEL_K);

        for (int h = 0; h < 2; h++)
            for (uint32_t i = 0; i < 2 * n_chunks; i++, at += step)
                _mm256_store_ps(at, half_of(pairs + k + i * LANES, h));
    }
}

/* The halves of a chunk, `half` elements apart. */
INLINE void store_chunk(bf16_chunk chunk, uint32_t half, uint16_t *w)
{
    _mm256_store_si256((__m256i *)(void *)w, chunk.half[0]);
    _mm256_store_si256((__m256i *)(void *)(w + half), chunk.half[1]);
}

INLINE bf16_chunk load_chunk(const code_tables *t, yard_dtype dtype, const uint8_t *src)
{
    const __m128i *at = (const __m128i *)(const void *)src;
    bf16_chunk chunk;

    if (dtype == YARD_FP8_E4M3)
        return widen_codes(t,
                           codes_in_quads(_mm256_loadu_si256((const __m256i *)(const void *)src)));
    for (int h = 0; h < 2; h++)
        chunk.half[h] = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(at + h)),
                                                _mm_loadu_si128(at + 2 + h), 1);
    return chunk;
}

/* n_k columns of nw rows, which lie src_ld bytes apart, become a tile. */
INLINE void lay_tile(const code_tables *t, yard_dtype dtype, const uint8_t *src, size_t src_ld,
                     uint32_t n_k, uint32_t nw, uint16_t *w)
{
    const bool scaled = dtype == YARD_FP8_E4M3;
    const uint32_t bytes = scaled ? 1 : 2;
    const uint32_t half = (scaled ? 1 : chunks_of(n_k)) * LANES * nw;
    const uint32_t chunk = (scaled ? 2 : 1) * LANES * nw;

    for (; n_k >= CHUNK; n_k -= CHUNK, src += CHUNK * bytes, w += chunk)
        for (uint32_t n = 0; n < nw; n++)
            store_chunk(load_chunk(t, dtype, src + n * src_ld), half, w + n * LANES);
    /* through a padded copy: the stored row may end at the end of the mapping */
    for (uint32_t n = 0; n_k && n < nw; n++) {
        uint8_t last[2 * CHUNK] = { 0 };

        memcpy(last, src + n * src_ld, n_k * bytes);
        store_chunk(load_chunk(t, dtype, last), half, w + n * LANES);
    }
}

INLINE void lay_dtype(const strip_source *s, yard_dtype dtype, uint16_t *w)
{
    const code_tables t = load_code_tables();

    for (uint32_t n = 0, nw; n < s->n_w; n += nw, w += nw * (size_t)pad_lanes(s->n_k)) {
        const uint8_t *src = (const uint8_t *)s->first + n * s->ld_bytes;

        nw = tile_rows(s->n_w - n);
        if (nw == 3)
            lay_tile(&t, dtype, src, s->ld_bytes, s->n_k, 3, w);
        else if (nw == 2)
            lay_tile(&t, dtype, src, s->ld_bytes, s->n_k, 2, w);
        else
            lay_tile(&t, dtype, src, s->ld_bytes, s->n_k, 1, w);
    }
}

static void lay_w(const strip_source *s, void *w)
{
    if (s->dtype == YARD_FP8_E4M3)
        lay_dtype(s, YARD_FP8_E4M3, w);
    else
        lay_dtype(s, YARD_BF16, w);
}

const strip_kernels yard_cpu_strips_avx2 = { .panel_rows = 12,
                                             .block_rows = 36,
                                             .lay_quads = lay_quads,
                                             .lay_pairs = lay_pairs,
                                             .lay_w = lay_w,
                                             .dot = dot };

#endif
