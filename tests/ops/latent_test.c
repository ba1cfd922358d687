/* What the latent cache holds: append against double precision; the FP8 form of a row to the byte,
 * by a quantisation written here; attention over an FP8 cache gives the bits of one that holds its
 * values as bf16, and of the unrounded one where products round the latents anyway. ctest: sanitize
 */
#include "ops/ops_test.h"

enum { N_TOKENS = 70, N_PAGES = 3, MAX_ROPE = 64 };

struct shape {
    uint32_t n_heads, rank, nope, rope, v;
};

static const struct shape shapes[] = {
    { 2, 512, 128, 64, 128 }, /* DeepSeek-V3's, fewer heads */
    { 4, 128, 64, 32, 64 },   /* the demo's */
    { 5, 72, 20, 12, 28 },    /* one short group */
    { 3, 330, 8, 10, 8 },     /* a short last group, codes that end between words */
};

struct scene {
    struct shape shape;
    yard_rows kv, norm;
    float inv_freq[MAX_ROPE / 2];
    int32_t n_tokens, position[N_TOKENS], seq[N_TOKENS], page_table[N_PAGES];
    uint8_t absorbed[N_TOKENS];
    yard_batch batch;
};

/* One sequence, its first token at the second position, over pages in falling order. Latents have
 * groups of very different size; one is all zeros. */
static void make_scene(struct scene *s, rng *r, struct shape shape)
{
    memset(s, 0, sizeof(*s));
    s->shape = shape;
    s->n_tokens = N_TOKENS;
    s->kv = random_rows(r, YARD_F32, N_TOKENS, shape.rank + shape.rope);
    s->norm = random_rows(r, YARD_BF16, 1, shape.rank);
    for (uint32_t i = 0; i < N_TOKENS; i++)
        for (uint32_t c = 0; c < shape.rank; c++)
            ((float *)s->kv.data)[i * (shape.rank + shape.rope) + c] *=
                i == 3 && c < YARD_GROUP ? 0 : ldexpf(1, (int)(c / YARD_GROUP * 5) - 8);
    for (uint32_t i = 0; i < shape.rope / 2; i++)
        s->inv_freq[i] = powf(10000, -2.0f * (float)i / (float)shape.rope);
    for (int32_t i = 0; i < N_TOKENS; i++)
        s->position[i] = i + 1;
    for (int32_t i = 0; i < N_PAGES; i++)
        s->page_table[i] = N_PAGES - 1 - i;
    s->batch = (yard_batch){ .n_tokens = &s->n_tokens,
                             .position = s->position,
                             .seq = s->seq,
                             .absorbed = s->absorbed,
                             .page_table = s->page_table,
                             .page_table_ld = N_PAGES };
}

static void free_scene(struct scene *s)
{
    free_rows(s->kv);
    free_rows(s->norm);
}

static yard_kv_layer open_cache(const struct scene *s, yard_dtype dtype)
{
    const struct shape *h = &s->shape;
    const size_t n = (size_t)N_PAGES * 64 * yard_latent_row_of(dtype, h->rank, h->rope).n_bytes;
    yard_kv_layer cache = { .dtype = dtype, .width = h->rank + h->rope, .data = yard_alloc(n) };

    memset(cache.data, 0xa5, n);
    return cache;
}

static uint8_t *row_of(const struct scene *s, const yard_kv_layer *cache, int32_t position)
{
    const size_t page = (size_t)s->page_table[position / 64];

    return (uint8_t *)cache->data +
           (page * 64 + (size_t)(position % 64)) *
               yard_latent_row_of(cache->dtype, s->shape.rank, s->shape.rope).n_bytes;
}

static void append(yard_stream stream, const struct scene *s, yard_kv_layer cache, bool ue8m0)
{
    yard_ops_cpu.rope_append_kv(
        stream,
        &(yard_rope_append_kv_args){ .batch = &s->batch,
                                     .kv_rank = s->shape.rank,
                                     .kv = s->kv,
                                     .norm_dtype = YARD_BF16,
                                     .norm_weight = s->norm.data,
                                     .eps = 1e-6f,
                                     .rope = { .inv_freq = s->inv_freq, .n_dims = s->shape.rope },
                                     .cache = cache,
                                     .ue8m0 = ue8m0 });
}

static double code_value(uint8_t code) /* not of a NaN */
{
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const double size = exponent ? ldexp(1 + fraction / 8.0, exponent - 7) : ldexp(fraction, -9);

    return code & 0x80 ? -size : size;
}

/* The code nearest to x, by looking at all; the even one of two. */
static uint8_t nearest_code(double x)
{
    uint8_t best = 0;

    for (uint8_t code = 0; code < 0x7f; code++) {
        const double off = fabs(code_value(code) - fabs(x)),
                     least = fabs(code_value(best) - fabs(x));
        if (off < least || (off == least && code % 2 == 0))
            best = code;
    }
    return (uint8_t)(best | (signbit(x) ? 0x80 : 0));
}

static float scale_for(float amax, bool ue8m0)
{
    float scale = amax / 448.0f;

    if (amax == 0)
        return 1;
    if (!ue8m0)
        return scale;
    for (scale = ldexpf(1, -126); scale < amax / 448.0f; scale *= 2)
        ;
    return scale;
}

static void check_plain_row(const struct scene *s, uint32_t i, yard_dtype dtype, const void *row)
{
    const struct shape *h = &s->shape;
    const yard_rows got = { .dtype = dtype, .ld = h->rank + h->rope, .data = (void *)row };
    double squares = 0;

    for (uint32_t c = 0; c < h->rank; c++)
        squares += pow(rows_value(s->kv, i, c), 2);
    for (uint32_t c = 0; c < h->rank; c++)
        assert_close("latent", i, dtype, rows_value(got, 0, c),
                     rows_value(s->kv, i, c) / sqrt(squares / h->rank + 1e-6) *
                         rows_value(s->norm, 0, c),
                     1e-3);
    for (uint32_t c = 0; c < h->rope / 2; c++) {
        const double angle = s->position[i] * (double)s->inv_freq[c];
        const double a = rows_value(s->kv, i, h->rank + 2 * c);
        const double b = rows_value(s->kv, i, h->rank + 2 * c + 1);

        assert_close("rope", i, dtype, rows_value(got, 0, h->rank + c),
                     a * cos(angle) - b * sin(angle), 8);
        assert_close("rope", i, dtype, rows_value(got, 0, h->rank + h->rope / 2 + c),
                     b * cos(angle) + a * sin(angle), 8);
    }
}

/* The bf16 row of the same token, quantised by hand; nothing behind the row's end is written. */
static void check_fp8_row(const struct scene *s, bool ue8m0, const uint8_t *plain,
                          const uint8_t *row)
{
    const struct shape *h = &s->shape;
    const uint32_t n_scales = (h->rank + 127) / 128, scale_at = (h->rank + 3) & ~3u;
    const uint32_t rope_at = scale_at + 4 * n_scales, end = rope_at + 2 * h->rope;
    const uint16_t *values = (const uint16_t *)(const void *)plain;

    for (uint32_t g = 0; g < n_scales; g++) {
        float amax = 0, scale, stored;
        for (uint32_t c = g * 128; c < h->rank && c < g * 128 + 128; c++)
            amax = fmaxf(amax, fabsf(yard_f32_from_bf16(values[c])));
        scale = scale_for(amax, ue8m0);
        memcpy(&stored, row + scale_at + 4 * g, 4);
        assert_memory_equal(&stored, &scale, 4);
        for (uint32_t c = g * 128; c < h->rank && c < g * 128 + 128; c++) {
            const float x = yard_f32_from_bf16(values[c]);
            const double off = fabs(code_value(row[c]) * (double)scale - (double)x);

            assert_int_equal(row[c], nearest_code((double)(x * (1.0f / scale))));
            /* half a step: 2^-4 of the value, or 2^-10 scales where codes are subnormal */
            assert_true(off <= fmax(0x1.001p-4 * fabs((double)x), 0x1p-10 * (double)scale));
        }
    }
    assert_memory_equal(row + rope_at, values + h->rank, 2 * h->rope);
    for (uint32_t i = h->rank; i < scale_at; i++)
        assert_int_equal(row[i], 0xa5);
    for (uint32_t i = end; i % 16 != 0; i++)
        assert_int_equal(row[i], 0xa5);
    assert_int_equal(yard_latent_row_of(YARD_FP8_E4M3, h->rank, h->rope).n_bytes,
                     (end + 15) / 16 * 16);
}

static void one_append(yard_stream *streams, uint32_t n_streams, struct shape shape, uint64_t seed,
                       bool ue8m0)
{
    static const yard_dtype dtypes[] = { YARD_F32, YARD_BF16, YARD_FP8_E4M3 };
    static struct scene s;
    yard_kv_layer cache[3], other;
    rng r = { seed };

    make_scene(&s, &r, shape);
    for (uint32_t d = 0; d < 3; d++) {
        const size_t n =
            (size_t)N_PAGES * 64 * yard_latent_row_of(dtypes[d], shape.rank, shape.rope).n_bytes;

        cache[d] = open_cache(&s, dtypes[d]);
        append(streams[0], &s, cache[d], ue8m0);
        for (uint32_t v = 1; v < n_streams; v++) {
            other = open_cache(&s, dtypes[d]);
            append(streams[v], &s, other, ue8m0);
            assert_memory_equal(other.data, cache[d].data, n);
            free(other.data);
        }
        for (uint32_t i = 0; i < 64; i++) /* no token is before or after the sequence's */
            assert_int_equal(row_of(&s, &cache[d], i < 32 ? 0 : N_TOKENS + 1)[i], 0xa5);
    }
    for (uint32_t i = 0; i < N_TOKENS; i++) {
        check_plain_row(&s, i, YARD_F32, row_of(&s, &cache[0], s.position[i]));
        check_plain_row(&s, i, YARD_BF16, row_of(&s, &cache[1], s.position[i]));
        check_fp8_row(&s, ue8m0, row_of(&s, &cache[1], s.position[i]),
                      row_of(&s, &cache[2], s.position[i]));
    }
    for (uint32_t d = 0; d < 3; d++)
        free(cache[d].data);
    free_scene(&s);
}

static void appended(void **state)
{
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_variants(streams);

    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        one_append(streams, n, shapes[i], 1 + i, false);
        one_append(streams, n, shapes[i], 11 + i, true);
    }
    close_variants(streams, n);
}

static void published_size(void **state)
{
    const yard_latent_row v3 = yard_latent_row_of(YARD_FP8_E4M3, 512, 64);

    (void)state;
    assert_int_equal(v3.n_bytes, 656);
    assert_int_equal(v3.scale_at, 512);
    assert_int_equal(v3.rope_at, 528);
    assert_int_equal(yard_latent_row_of(YARD_BF16, 512, 64).n_bytes, 1152);
    assert_int_equal(yard_latent_row_of(YARD_F32, 512, 64).n_bytes, 2304);
}

/* A bf16 cache of what an FP8 one says. */
static yard_kv_layer widened(const struct scene *s, const yard_kv_layer *fp8)
{
    const struct shape *h = &s->shape;
    const yard_latent_row at = yard_latent_row_of(YARD_FP8_E4M3, h->rank, h->rope);
    const yard_kv_layer cache = open_cache(s, YARD_BF16);

    for (uint32_t i = 0; i < N_TOKENS; i++) {
        const uint8_t *from = row_of(s, fp8, s->position[i]);
        uint8_t *to = row_of(s, &cache, s->position[i]);

        for (uint32_t c = 0; c < h->rank; c++) {
            float scale;
            memcpy(&scale, from + at.scale_at + 4 * (c / YARD_GROUP), 4);
            ((uint16_t *)(void *)to)[c] =
                yard_bf16_from_f32((float)(code_value(from[c]) * (double)scale));
        }
        memcpy(to + 2 * h->rank, from + at.rope_at, 2 * h->rope);
    }
    return cache;
}

/* Position 0 is part of every query's sequence: it repeats position 1. */
static void complete(const struct scene *s, const yard_kv_layer *cache)
{
    memcpy(row_of(s, cache, 0), row_of(s, cache, 1),
           yard_latent_row_of(cache->dtype, s->shape.rank, s->shape.rope).n_bytes);
}

static yard_rows decode_over(yard_stream stream, const struct scene *s, yard_kv_layer cache,
                             yard_rows q, yard_rows q_latent)
{
    const struct shape *h = &s->shape;
    rng r = { 1 };
    yard_rows y = random_rows(&r, YARD_BF16, N_TOKENS, h->n_heads * h->rank);

    poison(y, N_TOKENS);
    yard_ops_cpu.mla_decode(stream, &(yard_mla_decode_args){ .batch = &s->batch,
                                                             .n_heads = h->n_heads,
                                                             .kv_rank = h->rank,
                                                             .rope_dims = h->rope,
                                                             .softmax_scale = 0.05f,
                                                             .q_latent = q_latent,
                                                             .q = q,
                                                             .head_dim = h->nope + h->rope,
                                                             .cache = cache,
                                                             .y = y });
    return y;
}

static yard_rows prefill_over(yard_stream stream, const struct scene *s, yard_kv_layer cache,
                              yard_rows q, yard_matrix kv_b, bool ue8m0)
{
    const struct shape *h = &s->shape;
    rng r = { 1 };
    yard_rows y = random_rows(&r, YARD_BF16, N_TOKENS, h->n_heads * h->v);

    poison(y, N_TOKENS);
    yard_ops_cpu.mla_prefill(stream,
                             &(yard_mla_prefill_args){ .batch = &s->batch,
                                                       .n_heads = h->n_heads,
                                                       .kv_rank = h->rank,
                                                       .nope_dims = h->nope,
                                                       .rope_dims = h->rope,
                                                       .v_dims = h->v,
                                                       .softmax_scale = 0.05f,
                                                       .q = q,
                                                       .kv_b = kv_b,
                                                       .quantise = kv_b.dtype == YARD_FP8_E4M3,
                                                       .ue8m0 = ue8m0,
                                                       .cache = cache,
                                                       .y = y });
    return y;
}

static void assert_same(yard_rows a, yard_rows b)
{
    assert_memory_equal(a.data, b.data, (size_t)N_TOKENS * a.ld * 2);
    free_rows(a);
    free_rows(b);
}

static void one_attention(yard_stream stream, struct shape h, uint64_t seed, bool ue8m0)
{
    static struct scene s;
    rng r = { seed };
    yard_kv_layer fp8, plain, wide;
    yard_rows q, q_latent;
    random_matrix kv_b[2];

    make_scene(&s, &r, h);
    q = random_rows(&r, YARD_BF16, N_TOKENS, h.n_heads * (h.nope + h.rope));
    q_latent = random_rows(&r, YARD_BF16, N_TOKENS, h.n_heads * h.rank);
    kv_b[0] = make_matrix(&r, YARD_BF16, h.n_heads * (h.nope + h.v), h.rank, 0, 0, 128);
    kv_b[1] = make_matrix(&r, YARD_FP8_E4M3, h.n_heads * (h.nope + h.v), h.rank, 0, 0, 128);
    fp8 = open_cache(&s, YARD_FP8_E4M3);
    plain = open_cache(&s, YARD_BF16);
    append(stream, &s, fp8, ue8m0);
    append(stream, &s, plain, ue8m0);
    wide = widened(&s, &fp8);
    complete(&s, &fp8);
    complete(&s, &plain);
    complete(&s, &wide);
    for (uint32_t w = 0; w < 2; w++) /* a product of plain values, and of rounded ones */
        assert_same(prefill_over(stream, &s, fp8, q, kv_b[w].m, ue8m0),
                    prefill_over(stream, &s, wide, q, kv_b[w].m, ue8m0));
    assert_same(prefill_over(stream, &s, fp8, q, kv_b[1].m, ue8m0),
                prefill_over(stream, &s, plain, q, kv_b[1].m, ue8m0));
    memset(s.absorbed, 1, sizeof(s.absorbed));
    assert_same(decode_over(stream, &s, fp8, q, q_latent),
                decode_over(stream, &s, wide, q, q_latent));
    for (uint32_t w = 0; w < 2; w++)
        free_matrix(kv_b[w]);
    free_rows(q);
    free_rows(q_latent);
    free(fp8.data);
    free(plain.data);
    free(wide.data);
    free_scene(&s);
}

static void attended(void **state)
{
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_variants(streams);

    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        for (uint32_t v = 0; v < n; v++) {
            one_attention(streams[v], shapes[i], 21 + i, false);
            one_attention(streams[v], shapes[i], 31 + i, true);
        }
    close_variants(streams, n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_size),
        cmocka_unit_test(appended),
        cmocka_unit_test(attended),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
