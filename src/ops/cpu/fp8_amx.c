/* Products of FP8 activations with FP8 weights on AMX tiles of bf16. A variant that is taken only
 * by name: within a group of 128 a tile adds products in an order of its own, so results differ
 * from the definition by the rounding of these sums, at most 2^-17 of the sum of the products'
 * sizes. Rows are independent here too: there is one way for all numbers of them. */
#include "ops/cpu/cpu.h"

/* gcc and clang spell it apart */
#if (defined(__AMX_BF16__) || defined(__AMXBF16__)) && defined(__AVX512BF16__)

#include "ops/cpu/widen_avx512.h"

/* A tile is 16 rows of 64 bytes: 16 rows of x times 32 columns of K, or 16 pairs along K of 16 rows
 * of w, or 16 x 16 sums. Two of x times two of w are multiplied at once. */
enum {
    SIDE = 16,
    BLOCK = 2 * SIDE, /* rows of x, rows of w */
    TILE_K = 32,
    TILE_WORDS = SIDE * SIDE,
    GROUP_TILES = YARD_GROUP / TILE_K, /* along K */
    SUM_FLOATS = MAX_TILE_ROWS * BLOCK
};

_Static_assert(FP8_DOT_SCRATCH >= (2 * GROUP_TILES * TILE_WORDS + 4 * TILE_WORDS + SUM_FLOATS) * 4,
               "what scratch holds");

static void configure_tiles(void)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = { .palette = 1 };

    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = SIDE;
    }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* gcc 12 tells only 8 bytes to be read */
    _tile_loadconfig(&config);
}

/* rows[i] word j -> dst row j, word i */
INLINE void transpose_words(const __m512i rows[SIDE], uint32_t *dst)
{
    __m512i a[SIDE], b[SIDE];

    for (int i = 0; i < SIDE; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < SIDE; i += 4) /* b[i + q]: word 4 l + q of rows i .. i + 3, in lane l */
        for (int h = 0; h < 2; h++) {
            b[i + 2 * h] = _mm512_unpacklo_epi64(a[i + h], a[i + 2 + h]);
            b[i + 2 * h + 1] = _mm512_unpackhi_epi64(a[i + h], a[i + 2 + h]);
        }
    for (int q = 0; q < 4; q++) {
        const __m512i even01 = _mm512_shuffle_i32x4(b[q], b[q + 4], 0x88);
        const __m512i odd01 = _mm512_shuffle_i32x4(b[q], b[q + 4], 0xdd);
        const __m512i even23 = _mm512_shuffle_i32x4(b[q + 8], b[q + 12], 0x88);
        const __m512i odd23 = _mm512_shuffle_i32x4(b[q + 8], b[q + 12], 0xdd);

        _mm512_store_si512(dst + (q)*SIDE, _mm512_shuffle_i32x4(even01, even23, 0x88));
        _mm512_store_si512(dst + (q + 8) * SIDE, _mm512_shuffle_i32x4(even01, even23, 0xdd));
        _mm512_store_si512(dst + (q + 4) * SIDE, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
        _mm512_store_si512(dst + (q + 12) * SIDE, _mm512_shuffle_i32x4(odd01, odd23, 0xdd));
    }
}

/* Tiles of w [2, GROUP_TILES]: BLOCK rows from n0, a group from k0; zeros beyond the ends. */
static void decode_tiles(const fp8_dot_args *a, const code_tables *t, uint32_t n0, uint32_t k0,
                         uint32_t *tiles)
{
    for (uint32_t half = 0; half < 2; half++)
        for (uint32_t step = 0; step < YARD_GROUP / STEP; step++) {
            const uint32_t k = k0 + step * STEP;
            __m512i words[2][SIDE];

            for (uint32_t i = 0; i < SIDE; i++) {
                const uint32_t n = n0 + half * SIDE + i;
                bf16_step v = { { _mm512_setzero_si512(), _mm512_setzero_si512() } };

                if (n < a->n_w && k < a->n_k)
                    v = widen_codes(t, load_codes(a->w + n * a->w_ld + k, a->n_k - k));
                words[0][i] = v.at[0];
                words[1][i] = v.at[1];
            }
            for (uint32_t h = 0; h < 2; h++)
                transpose_words(words[h], tiles + (half * GROUP_TILES + 2 * step + h) * TILE_WORDS);
        }
}

/* parts [2, 2] tiles: rows m0 .. of x times the decoded tiles, one group. Rows beyond n_x are what
 * scratch holds there; nobody reads their sums. */
static void multiply(const fp8_dot_args *a, const uint32_t *tiles, uint32_t m0, uint32_t k0,
                     float *parts)
{
    const uint32_t left = a->n_k - k0;
    const uint32_t n_tiles = left < YARD_GROUP ? (left + STEP - 1) / STEP * 2 : GROUP_TILES;
    const uint16_t *x = a->x + m0 * a->x_ld + k0;
    const size_t x_bytes = a->x_ld * sizeof(*x);

    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (uint32_t i = 0; i < n_tiles; i++) {
        _tile_loadd(4, x + i * TILE_K, x_bytes);
        _tile_loadd(5, x + SIDE * a->x_ld + i * TILE_K, x_bytes);
        _tile_loadd(6, tiles + i * TILE_WORDS, 64);
        _tile_loadd(7, tiles + (GROUP_TILES + i) * TILE_WORDS, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, parts, 64);
    _tile_stored(1, parts + TILE_WORDS, 64);
    _tile_stored(2, parts + 2 * TILE_WORDS, 64);
    _tile_stored(3, parts + 3 * TILE_WORDS, 64);
}

/* sums[m, 0 .. BLOCK) += scale * parts */
static void add_parts(const fp8_dot_args *a, const float *parts, uint32_t m0, uint32_t group,
                      float *sums)
{
    const uint32_t n = a->n_x - m0 < BLOCK ? a->n_x - m0 : BLOCK;

    for (uint32_t m = 0; m < n; m++) {
        const __m512 f =
            _mm512_set1_ps(a->x_scale[(m0 + m) * a->x_scale_ld + group] * a->w_scale[group]);
        const float *part = parts + m / SIDE * 2 * TILE_WORDS + m % SIDE * SIDE;
        float *sum = sums + (size_t)(m0 + m) * BLOCK;

        for (uint32_t h = 0; h < 2; h++)
            _mm512_storeu_ps(sum + h * SIDE, _mm512_fmadd_ps(_mm512_loadu_ps(part + h * TILE_WORDS),
                                                             f, _mm512_loadu_ps(sum + h * SIDE)));
    }
}

void yard_cpu_fp8_dot_amx(const fp8_dot_args *a)
{
    const code_tables t = load_code_tables();
    uint32_t *tiles = a->scratch;
    float *parts = (float *)tiles + 2 * GROUP_TILES * TILE_WORDS, *sums = parts + 4 * TILE_WORDS;

    configure_tiles();
    for (uint32_t n = 0; n < a->n_w; n += BLOCK) {
        const uint32_t n_w = a->n_w - n < BLOCK ? a->n_w - n : BLOCK;

        memset(sums, 0, SUM_FLOATS * sizeof(*sums));
        for (uint32_t k = 0; k < a->n_k; k += YARD_GROUP) {
            decode_tiles(a, &t, n, k, tiles);
            for (uint32_t m = 0; m < a->n_x; m += BLOCK) {
                multiply(a, tiles, m, k, parts);
                add_parts(a, parts, m, k / YARD_GROUP, sums);
            }
        }
        for (uint32_t m = 0; m < a->n_x; m++)
            memcpy(a->y + m * a->y_ld + n, sums + (size_t)m * BLOCK, n_w * sizeof(float));
    }
    _tile_release();
}

#endif
