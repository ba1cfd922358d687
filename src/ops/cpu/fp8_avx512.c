/* Products of FP8 activations with FP8 weights on AVX-512 VBMI and BF16. Every e4m3 value is a bf16
 * value and every product of two of them an f32 value, so the processor's bf16 dot product, which
 * adds a lane's odd element and then its even one, each sum rounded to nearest, gives the bits of
 * the definition. (It flushes denormals; sums of such products are multiples of 2^-18.) A register
 * has the lanes of two rows of w. More than a few rows of x come here on processors where that dot
 * product is faster than f32 multiply-adds; strips_avx512.c is for the others. */
#include "ops/cpu/cpu.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

#include "ops/cpu/widen_avx512.h"

/* TILE_W: registers of w */
enum { TILE_X = 3, TILE_W = FP8_PANEL_ROWS / 2, PANEL_GROUPS = FP8_PANEL_K / YARD_GROUP };

/* Two bf16 values of each lane, the q-th of four of a STEP that codes_to_bf16 made, for both rows
 * of w. */
INLINE __m512bh load_x(const uint16_t *x, int q)
{
    const uint16_t *at = x + q % 2 * CHUNK + q / 2 * LANES;

    return (__m512bh)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(const void *)at));
}

/* Pairwise, both rows: see LANES. */
INLINE void add_both(__m512 v, float *first, float *second)
{
    const __m512 four = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    const __m512 two = _mm512_add_ps(four, _mm512_permute_ps(four, 0x4e));
    const __m512 one = _mm512_add_ps(two, _mm512_permute_ps(two, 0xb1));

    *second = _mm_cvtss_f32(_mm512_extractf32x4_ps(one, 2));
    *first = _mm512_cvtss_f32(one);
}

void yard_cpu_codes_to_bf16_avx512(const uint8_t *codes, uint32_t n, uint16_t *dst)
{
    const code_tables t = load_code_tables();

    for (uint32_t i = 0; i < n; i += STEP) {
        const bf16_step v = widen_codes(&t, load_codes(codes + i, n - i));
        _mm512_storeu_si512(dst + i, v.at[0]);
        _mm512_storeu_si512(dst + i + CHUNK, v.at[1]);
    }
}

/* lane[m] += x[m] . w at up to a STEP of columns, n of them, of a row of w and the one `second`
 * bytes on. */
INLINE void few_step(const code_tables *t, const uint16_t *x, size_t x_ld, const uint8_t *w,
                     size_t second, uint32_t n, int mx, int at, __m512 lane[FEW_ROWS][TILE_W])
{
    for (int c = 0; c < 2; c++) {
        const uint32_t at_k = (uint32_t)c * CHUNK;
        const bf16_step v = load_two_rows(t, w + at_k, w + second + at_k, n > at_k ? n - at_k : 0);

        for (int m = 0; m < mx; m++)
            for (int h = 0; h < 2; h++)
                lane[m][at] = _mm512_dpbf16_ps(lane[m][at], load_x(x + m * x_ld, 2 * c + h),
                                               (__m512bh)v.at[h]);
    }
}

INLINE void few_group(const fp8_dot_args *a, const code_tables *t, const uint8_t *w, size_t second,
                      uint32_t k, int mx, int nw, __m512 lane[FEW_ROWS][TILE_W])
{
    const uint32_t end = a->n_k - k < YARD_GROUP ? a->n_k : k + YARD_GROUP;

    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            lane[m][n] = _mm512_setzero_ps();
    for (; k + STEP <= end; k += STEP)
        for (int n = 0; n < nw; n++) {
            const uint8_t *at = w + (size_t)(2 * n) * a->w_ld + k;

            /* the same columns of the next rows: the memory's own prefetchers lose a row's end */
            _mm_prefetch((const char *)(at + (size_t)(2 * nw) * a->w_ld), _MM_HINT_T1);
            _mm_prefetch((const char *)(at + (size_t)(2 * nw + 1) * a->w_ld), _MM_HINT_T1);
            few_step(t, a->x + k, a->x_ld, at, second, STEP, mx, n, lane);
        }
    if (k < end)
        for (int n = 0; n < nw; n++)
            few_step(t, a->x + k, a->x_ld, w + (size_t)(2 * n) * a->w_ld + k, second, end - k, mx,
                     n, lane);
}

/* 2 nw rows of w from n0 on, or the last one, which is then both of a register. */
INLINE void few_tile(const fp8_dot_args *a, const code_tables *t, uint32_t n0, int mx, int nw)
{
    const uint8_t *w = a->w + n0 * a->w_ld;
    const bool single = n0 + 1 == a->n_w;
    __m512 outer[FEW_ROWS][TILE_W];

    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            outer[m][n] = _mm512_setzero_ps();
    for (uint32_t k = 0, group = 0; k < a->n_k; k += YARD_GROUP, group++) {
        __m512 lane[FEW_ROWS][TILE_W];

        few_group(a, t, w, single ? 0 : a->w_ld, k, mx, nw, lane);
        for (int m = 0; m < mx; m++) {
            const __m512 f =
                _mm512_set1_ps(a->x_scale[m * a->x_scale_ld + group] * a->w_scale[group]);
            for (int n = 0; n < nw; n++)
                outer[m][n] = _mm512_fmadd_ps(lane[m][n], f, outer[m][n]);
        }
    }
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++) {
            float *y = a->y + m * a->y_ld + n0 + 2 * n;

            add_both(outer[m][n], y, single ? y : y + 1);
        }
}

INLINE void few_rows(const fp8_dot_args *a, const code_tables *t, int mx, int nw)
{
    uint32_t n = 0;

    for (; n + 2 * (uint32_t)nw <= a->n_w; n += 2 * (uint32_t)nw)
        few_tile(a, t, n, mx, nw);
    for (; n < a->n_w; n += 2)
        few_tile(a, t, n, mx, 1);
}

/* What scratch holds. */
typedef struct panel {
    uint16_t *w;  /* [TILE_W, chunks, 2, two rows, LANES] */
    float *lanes; /* [MAX_TILE_ROWS, FP8_PANEL_ROWS, SCALED_LANES] */
    float *scale; /* [MAX_TILE_ROWS, PANEL_GROUPS] of x times w */
    uint32_t n_w, n_k;
    bool first, last; /* columns of the row */
} panel;

static void decode_panel(const fp8_dot_args *a, const code_tables *t, const panel *p, uint32_t n0,
                         uint32_t k0)
{
    for (uint32_t n = 0; n < p->n_w; n += 2) {
        const uint8_t *first = a->w + (n0 + n) * a->w_ld + k0;
        const uint8_t *second = n + 1 < p->n_w ? first + a->w_ld : first;
        uint16_t *dst = p->w + (size_t)n * FP8_PANEL_K;

        for (uint32_t k = 0; k < p->n_k; k += CHUNK, dst += 2 * CHUNK) {
            const bf16_step v = load_two_rows(t, first + k, second + k, p->n_k - k);

            _mm512_store_si512(dst, v.at[0]);
            _mm512_store_si512(dst + CHUNK, v.at[1]);
            _mm_prefetch(
                (const char *)((k & CHUNK ? second : first) + FP8_PANEL_ROWS * a->w_ld + k),
                _MM_HINT_T1);
        }
        if (p->n_k % STEP != 0 && p->n_k % STEP <= CHUNK) /* what many_tile reads */
            memset(dst, 0, 2 * CHUNK * sizeof(*dst));
    }
    for (uint32_t m = 0; m < a->n_x; m++)
        for (uint32_t g = 0; g < yard_group_count(p->n_k); g++)
            p->scale[m * PANEL_GROUPS + g] = a->x_scale[m * a->x_scale_ld + k0 / YARD_GROUP + g] *
                                             a->w_scale[k0 / YARD_GROUP + g];
}

INLINE void many_tile(const fp8_dot_args *a, const panel *p, uint32_t m0, uint32_t k0, uint32_t n0,
                      int mx, int nw)
{
    const uint16_t *x = a->x + m0 * a->x_ld + k0;
    __m512 outer[TILE_X][TILE_W];

    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            outer[m][n] = p->first ? _mm512_setzero_ps()
                                   : _mm512_loadu_ps(p->lanes + ((m0 + m) * TILE_W + n) * LANES);
    for (uint32_t k = 0, group = 0; k < p->n_k; k += YARD_GROUP, group++) {
        const uint32_t end =
            p->n_k - k < YARD_GROUP ? (p->n_k + STEP - 1) / STEP * STEP : k + YARD_GROUP;
        __m512 lane[TILE_X][TILE_W];

        for (int m = 0; m < mx; m++)
            for (int n = 0; n < nw; n++)
                lane[m][n] = _mm512_setzero_ps();
        for (uint32_t i = k; i < end; i += STEP)
            for (int q = 0; q < 4; q++) {
                __m512bh wv[TILE_W];

                for (int n = 0; n < nw; n++) {
                    wv[n] =
                        (__m512bh)_mm512_load_si512(p->w + 2 * (n * FP8_PANEL_K + i) + q * CHUNK);
                    IN_REGISTER(wv[n]);
                }
                for (int m = 0; m < mx; m++) {
                    const __m512bh xv = load_x(x + m * a->x_ld + i, q);

                    for (int n = 0; n < nw; n++)
                        lane[m][n] = _mm512_dpbf16_ps(lane[m][n], xv, wv[n]);
                }
            }
        for (int m = 0; m < mx; m++) {
            const __m512 f = _mm512_set1_ps(p->scale[(m0 + m) * PANEL_GROUPS + group]);
            for (int n = 0; n < nw; n++)
                outer[m][n] = _mm512_fmadd_ps(lane[m][n], f, outer[m][n]);
        }
    }
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++) {
            float *y = a->y + (m0 + m) * a->y_ld + n0 + 2 * n;

            if (p->last)
                add_both(outer[m][n], y, p->n_w == 1 ? y : y + 1);
            else
                _mm512_storeu_ps(p->lanes + ((m0 + m) * TILE_W + n) * LANES, outer[m][n]);
        }
}

INLINE void many_columns(const fp8_dot_args *a, const panel *p, uint32_t k0, uint32_t n0, int nw)
{
    uint32_t m = 0;

    for (; m + 3 <= a->n_x; m += 3)
        many_tile(a, p, m, k0, n0, 3, nw);
    if (m + 2 <= a->n_x)
        many_tile(a, p, m, k0, n0, 2, nw);
    else if (m < a->n_x)
        many_tile(a, p, m, k0, n0, 1, nw);
}

/* Out of line: the tables of codes would take the registers of four sums. */
static __attribute__((noinline)) void many_whole(const fp8_dot_args *a, const panel *p, uint32_t k0,
                                                 uint32_t n0)
{
    many_columns(a, p, k0, n0, TILE_W);
}

static __attribute__((noinline)) void many_rest(const fp8_dot_args *a, const panel *p, uint32_t k0,
                                                uint32_t n0)
{
    many_columns(a, p, k0, n0, 1);
}

static void many_rows(const fp8_dot_args *a, const code_tables *t)
{
    panel p = { .w = a->scratch };

    p.lanes = (float *)(void *)(p.w + FP8_PANEL_ROWS * FP8_PANEL_K);
    p.scale = p.lanes + MAX_TILE_ROWS * FP8_PANEL_ROWS * SCALED_LANES;
    /* whole panels, then two rows of w at a time */
    for (uint32_t n = 0, n_w = FP8_PANEL_ROWS; n < a->n_w; n += n_w) {
        n_w = a->n_w - n >= FP8_PANEL_ROWS ? FP8_PANEL_ROWS : a->n_w - n > 1 ? 2 : 1;
        for (uint32_t k = 0; k < a->n_k; k += FP8_PANEL_K) {
            p.n_w = n_w;
            p.n_k = a->n_k - k < FP8_PANEL_K ? a->n_k - k : FP8_PANEL_K;
            p.first = k == 0;
            p.last = k + p.n_k == a->n_k;
            decode_panel(a, t, &p, n, k);
            if (p.n_w == FP8_PANEL_ROWS)
                many_whole(a, &p, k, n);
            else
                many_rest(a, &p, k, n);
        }
    }
}

void yard_cpu_fp8_dot_avx512(const fp8_dot_args *a)
{
    const code_tables t = load_code_tables();

    if (a->n_x == 1)
        few_rows(a, &t, 1, 4);
    else if (a->n_x == 2)
        few_rows(a, &t, 2, 4);
    else if (a->n_x == 3)
        few_rows(a, &t, 3, 2);
    else if (a->n_x == 4)
        few_rows(a, &t, 4, 2);
    else
        many_rows(a, &t);
}

#endif
