/* AVX2 + FMA + F16C: weights as they are stored, decoded into memory or, for few rows of x, in
 * registers. */
#include "ops/cpu/cpu.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "ops/cpu/lanes_avx2.h"
#include "ops/cpu/widen_codes_avx2.h"

/* LANES partial sums. */
typedef struct lanes {
    __m256 half[2];
} lanes;

INLINE lanes zero_lanes(void)
{
    return (lanes){ { _mm256_setzero_ps(), _mm256_setzero_ps() } };
}

INLINE float add_halves(lanes v)
{
    return add_eight(_mm256_add_ps(v.half[0], v.half[1]));
}

/* A CHUNK of stored elements in pairs: [0] the odd ones, [1] the even ones. */
typedef struct pairs {
    lanes at[2];
} pairs;

/* 16 bf16 values in order, as they lie in pairs. */
INLINE void split_pairs(__m256i two, int h, pairs *p)
{
    p->at[0].half[h] =
        _mm256_castsi256_ps(_mm256_and_si256(two, _mm256_set1_epi32((int)0xffff0000u)));
    p->at[1].half[h] = _mm256_castsi256_ps(_mm256_slli_epi32(two, 16));
}

INLINE pairs load_bf16(const uint16_t *w)
{
    pairs p;

    for (int h = 0; h < 2; h++)
        split_pairs(_mm256_loadu_si256((const __m256i *)(const void *)(w + 16 * h)), h, &p);
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

INLINE pairs load_pairs(yard_dtype dtype, const uint8_t *w)
{
    __m256 v[4];

    switch (dtype) {
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
    return dtype == YARD_F32 ? 4 : 2;
}

/* The last elements, which fill no chunk: through a padded copy, since the stored row may end at
 * the end of the mapping. */
INLINE pairs load_rest(yard_dtype dtype, const uint8_t *w, uint32_t n)
{
    _Alignas(32) uint8_t last[CHUNK * 4] = { 0 };

    memcpy(last, w, n * bytes_of(dtype));
    return load_pairs(dtype, last);
}

INLINE void store_pairs(float *dst, pairs p)
{
    for (int v = 0; v < 4; v++)
        _mm256_storeu_ps(dst + 8 * v, p.at[v / 2].half[v % 2]);
}

INLINE void decode_dtype(yard_dtype dtype, const uint8_t *src, uint32_t n, float *dst)
{
    for (uint32_t i = 0; i < n; i += CHUNK) {
        const uint8_t *at = src + i * bytes_of(dtype);
        store_pairs(dst + i, n - i >= CHUNK ? load_pairs(dtype, at) : load_rest(dtype, at, n - i));
    }
}

INLINE pairs widen_to_pairs(const code_tables *t, const uint8_t *w)
{
    /* quarters in an order that unpacking undoes */
    const bf16_chunk chunk = widen_codes(
        t, _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)(const void *)w), 0xd8));
    pairs p;

    split_pairs(chunk.half[0], 0, &p);
    split_pairs(chunk.half[1], 1, &p);
    return p;
}

/* Tables have 480 for a NaN. */
static void put_nans(const uint8_t *codes, float *dst)
{
    for (int i = 0; i < CHUNK; i++)
        if ((codes[i] & 0x7f) == 0x7f)
            dst[i % 2 ? i / 2 : LANES + i / 2] = yard_f32_from_e4m3(codes[i]);
}

INLINE void decode_chunk(const code_tables *t, const uint8_t *codes, float *dst)
{
    const __m256i most = _mm256_set1_epi8(0x7f);
    const __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)codes);

    store_pairs(dst, widen_to_pairs(t, codes));
    if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(v, most), most)))
        put_nans(codes, dst);
}

/* By tables: a third faster than by halves, where there are registers for them. */
static void decode_fp8(const uint8_t *src, uint32_t n, float *dst)
{
    const code_tables t = load_code_tables();
    uint8_t last[CHUNK] = { 0 };
    uint32_t i = 0;

    for (; i + CHUNK <= n; i += CHUNK)
        decode_chunk(&t, src + i, dst + i);
    if (i < n) {
        memcpy(last, src + i, n - i);
        decode_chunk(&t, last, dst + i);
    }
}

void yard_cpu_decode_pairs_avx2(yard_dtype dtype, const void *src, uint32_t n, float *dst)
{
    switch (dtype) {
    case YARD_FP8_E4M3:
        decode_fp8(src, n, dst);
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

void yard_cpu_pairs_to_quads_avx2(float *values, uint32_t n)
{
    for (; n > 0; n -= CHUNK, values += CHUNK) {
        __m256 v[4];

        for (int i = 0; i < 4; i++)
            v[i] = _mm256_loadu_ps(values + 8 * i);
        for (int i = 0; i < 4; i++)
            _mm256_storeu_ps(values + 8 * i, every_other(v[i % 2 * 2], v[i % 2 * 2 + 1], i / 2));
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
            _mm_prefetch((const char *)(at + (size_t)nw * a->w_ld * bytes_of(dtype) + 64),
                         _MM_HINT_T1);
            raw_step(a, load_pairs(dtype, at), k, mx, n, lane);
        }
    if (k < end)
        for (int n = 0; n < nw; n++)
            raw_step(a, load_rest(dtype, w[n] + k * bytes_of(dtype), end - k), k, mx, n, lane);
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
    raw_span(a, w, 0, a->n_k, mx, nw, dtype, outer);
    for (int m = 0; m < mx; m++)
        for (int n = 0; n < nw; n++)
            a->y[m * a->y_ld + n0 + n] = add_halves(outer[m][n]);
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
        raw_rows(a, 3, dtype == YARD_BF16 ? 2 : 1, dtype);
    else
        raw_rows(a, 4, 1, dtype);
}

/* 16 words, a code in the high byte of each, to halves' bits: sign, exponent and mantissa one place
 * down, whose value is 2^-8 of the code's. */
INLINE __m256i half_bits(__m256i high_codes)
{
    return _mm256_and_si256(_mm256_srai_epi16(high_codes, 1), _mm256_set1_epi16((short)0xbf80));
}

/* lane[m] += x[m] . w at a CHUNK of columns in quads; w times 2^-8. */
INLINE void fp8_chunk(const raw_dot_args *a, const uint8_t *w, uint32_t k, int mx,
                      __m256 lane[FEW_ROWS])
{
    /* quads of 128 bits each, then first halves in front */
    const __m256i words = _mm256_permute4x64_epi64(
        codes_in_quads(_mm256_loadu_si256((const __m256i *)(const void *)w)), 0xd8);
    __m256i halves[2] = { half_bits(words), half_bits(_mm256_slli_epi16(words, 8)) };

    if (mx == 1)
        __asm__("" : "+m"(halves)); /* from memory a conversion takes no shuffle */
    for (int v = 0; v < 4; v++) {
        const __m256 wv = _mm256_cvtph_ps(((const __m128i *)(const void *)&halves[v % 2])[v / 2]);

        for (int m = 0; m < mx; m++)
            lane[m] = _mm256_fmadd_ps(
                _mm256_loadu_ps(a->x + m * a->x_ld + k + (uint32_t)(SCALED_LANES * v)), wv,
                lane[m]);
    }
}

/* A group of columns, or less, of nw rows of w. */
INLINE void fp8_group(const raw_dot_args *a, const uint8_t *const *w, uint32_t k, int mx, int nw,
                      __m256 lane[RAW_TILE_W][FEW_ROWS])
{
    const uint32_t end = a->n_k - k < YARD_GROUP ? a->n_k : k + YARD_GROUP;

    for (int n = 0; n < nw; n++)
        for (int m = 0; m < mx; m++)
            lane[n][m] = _mm256_setzero_ps();
    for (; k + CHUNK <= end; k += CHUNK)
        for (int n = 0; n < nw; n++) {
            const uint8_t *at = w[n] + k;

            _mm_prefetch((const char *)(at + (size_t)nw * a->w_ld), _MM_HINT_T1);
            fp8_chunk(a, at, k, mx, lane[n]);
        }
    for (int n = 0; k < end && n < nw; n++) {
        uint8_t last[CHUNK] = { 0 };

        memcpy(last, w[n] + k, end - k);
        fp8_chunk(a, last, k, mx, lane[n]);
    }
}

INLINE void fp8_tile(const raw_dot_args *a, uint32_t n0, int mx, int nw)
{
    const uint8_t *w[RAW_TILE_W];
    __m256 outer[RAW_TILE_W][FEW_ROWS];

    for (int n = 0; n < nw; n++) {
        w[n] = (const uint8_t *)a->w + (n0 + (uint32_t)n) * a->w_ld;
        for (int m = 0; m < mx; m++)
            outer[n][m] = _mm256_setzero_ps();
    }
    for (uint32_t k = 0, group = 0; k < a->n_k; k += YARD_GROUP, group++) {
        __m256 lane[RAW_TILE_W][FEW_ROWS];

        fp8_group(a, w, k, mx, nw, lane);
        for (int n = 0; n < nw; n++)
            for (int m = 0; m < mx; m++) {
                const float ws = a->w_scale[n0 + (uint32_t)n][group];
                const float f = a->x_scale ? a->x_scale[m * a->x_scale_ld + group] * ws : ws;
                outer[n][m] =
                    _mm256_fmadd_ps(lane[n][m], _mm256_set1_ps(f * FP8_FACTOR), outer[n][m]);
            }
    }
    for (int n = 0; n < nw; n++)
        for (int m = 0; m < mx; m++)
            a->y[m * a->y_ld + n0 + (uint32_t)n] = add_eight(outer[n][m]);
}

INLINE void fp8_rows(const raw_dot_args *a, int mx, int nw)
{
    uint32_t n = 0;

    for (; n + (uint32_t)nw <= a->n_w; n += (uint32_t)nw)
        fp8_tile(a, n, mx, nw);
    for (; n < a->n_w; n++)
        fp8_tile(a, n, mx, 1);
}

/* With scales, always: unscaled FP8 does not exist in checkpoints. */
static void raw_dot_fp8(const raw_dot_args *a)
{
    if (a->n_x == 1)
        fp8_rows(a, 1, 4);
    else if (a->n_x == 2)
        fp8_rows(a, 2, 2);
    else if (a->n_x == 3)
        fp8_rows(a, 3, 2);
    else
        fp8_rows(a, 4, 2);
}

void yard_cpu_raw_dot_avx2(const raw_dot_args *a)
{
    switch (a->w_dtype) {
    case YARD_FP8_E4M3:
        raw_dot_fp8(a);
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

#endif
