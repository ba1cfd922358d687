/* Both forms of latent attention against double precision, every variant bit for bit; page tables
 * in random order, several sequences, pages that hold garbage beyond a sequence's end; caches of
 * plain values and FP8 ones. ctest: sanitize */
#include "ops/ops_test.h"

enum { MAX_ROWS = 200, N_PAGES = 24, MAX_PAGES_PER_SEQ = 6, N_SEQS = 3 };

struct shape {
    uint32_t n_heads, rank, nope, rope, v;
};

struct scene {
    struct shape shape;
    uint64_t seed;
    yard_batch batch;
    int32_t n_tokens, token[MAX_ROWS], position[MAX_ROWS], seq[MAX_ROWS];
    uint8_t absorbed[MAX_ROWS];
    int32_t page_table[N_SEQS * MAX_PAGES_PER_SEQ];
    yard_kv_layer cache;
    random_matrix kv_b;
    yard_rows q;
    yard_dtype dtype; /* of q and of results; the cache's own may be FP8 */
    float scale;
};

static size_t row_bytes(const struct scene *s)
{
    return yard_latent_row_of(s->cache.dtype, s->shape.rank, s->shape.rope).n_bytes;
}

static uint8_t *cached_row(const struct scene *s, int32_t seq, int32_t p)
{
    const size_t page = (size_t)s->page_table[seq * MAX_PAGES_PER_SEQ + p / 64];

    return (uint8_t *)s->cache.data + (page * 64 + (size_t)(p % 64)) * row_bytes(s);
}

static void add_rows(struct scene *s, int32_t seq, int32_t from, int32_t n, bool absorbed)
{
    for (int32_t i = 0; i < n; i++) {
        s->position[s->n_tokens] = from + i;
        s->seq[s->n_tokens] = seq;
        s->absorbed[s->n_tokens++] = absorbed;
    }
}

static void fill_row(const struct scene *s, rng *r, uint8_t *row)
{
    const uint32_t rank = s->shape.rank, width = s->cache.width;
    const yard_latent_row at = yard_latent_row_of(s->cache.dtype, rank, s->shape.rope);

    for (uint32_t c = 0; c < width; c++) {
        const float value = rng_float(r);
        if (s->cache.dtype == YARD_F32)
            ((float *)(void *)row)[c] = value;
        else if (s->cache.dtype == YARD_BF16)
            ((uint16_t *)(void *)row)[c] = yard_bf16_from_f32(value);
        else if (c < rank)
            row[c] = yard_e4m3_from_f32(value * 448);
        else
            ((uint16_t *)(void *)(row + at.rope_at))[c - rank] = yard_bf16_from_f32(value);
    }
    for (uint32_t g = 0; s->cache.dtype == YARD_FP8_E4M3 && g < yard_group_count(rank); g++)
        ((float *)(void *)(row + at.scale_at))[g] = (1 + rng_float(r) / 2) / 448;
}

/* Cache rows hold values where a sequence has them and NaN everywhere else. */
static void fill_cache(struct scene *s, rng *r, const int32_t *lengths)
{
    int32_t pages[N_PAGES];

    memset(s->cache.data, 0xff, (size_t)N_PAGES * YARD_PAGE_TOKENS * row_bytes(s));
    for (int32_t i = 0; i < N_PAGES; i++) {
        const uint32_t j = rng_below(r, (uint32_t)i + 1);
        pages[i] = pages[j];
        pages[j] = i;
    }
    for (int32_t i = 0; i < N_SEQS * MAX_PAGES_PER_SEQ; i++)
        s->page_table[i] = pages[i];
    for (int32_t seq = 0; seq < N_SEQS; seq++)
        for (int32_t p = 0; p < lengths[seq]; p++)
            fill_row(s, r, cached_row(s, seq, p));
}

static void make_scene(struct scene *s, struct shape shape, uint64_t seed, yard_dtype cached)
{
    static const int32_t lengths[N_SEQS] = { 1, 130, 333 };
    rng r = { seed };

    memset(s, 0, sizeof(*s));
    s->shape = shape;
    s->seed = seed;
    s->scale = 0.1f;
    s->dtype = cached == YARD_F32 ? YARD_F32 : YARD_BF16;
    s->cache = (yard_kv_layer){ .dtype = cached, .width = shape.rank + shape.rope };
    s->cache.data = malloc((size_t)N_PAGES * 64 * row_bytes(s));
    fill_cache(s, &r, lengths);
    add_rows(s, 0, 0, 1, false);           /* a prompt of one token */
    add_rows(s, 1, 129, 1, true);          /* a decode */
    add_rows(s, 2, 333 - 120, 120, false); /* the last chunk of a long prompt */
    s->batch = (yard_batch){ .n_tokens = &s->n_tokens,
                             .token = s->token,
                             .position = s->position,
                             .seq = s->seq,
                             .absorbed = s->absorbed,
                             .page_table = s->page_table,
                             .page_table_ld = MAX_PAGES_PER_SEQ };
    s->kv_b =
        make_matrix(&r, YARD_BF16, shape.n_heads * (shape.nope + shape.v), shape.rank, 0, 0, 128);
    s->q =
        random_rows(&r, s->dtype, (size_t)s->n_tokens, shape.n_heads * (shape.nope + shape.rope));
}

static void free_scene(struct scene *s)
{
    free(s->cache.data);
    free_rows(s->q);
    free_matrix(s->kv_b);
}

static double cached(const struct scene *s, int32_t seq, int32_t p, uint32_t c)
{
    const uint32_t rank = s->shape.rank;
    const uint8_t *row = cached_row(s, seq, p);
    const yard_latent_row at = yard_latent_row_of(s->cache.dtype, rank, s->shape.rope);
    const yard_rows rows = { .dtype = s->cache.dtype, .ld = s->cache.width, .data = (void *)row };

    if (s->cache.dtype != YARD_FP8_E4M3)
        return rows_value(rows, 0, c);
    if (c >= rank)
        return (double)yard_f32_from_bf16(
            ((const uint16_t *)(const void *)(row + at.rope_at))[c - rank]);
    return (double)yard_bf16_round(
        yard_f32_from_e4m3(row[c]) *
        ((const float *)(const void *)(row + at.scale_at))[c / YARD_GROUP]);
}

/* The weights of one head, [nope + v, rank]: read once, since every position needs them. */
static double *weights_of(const struct scene *s, uint32_t head)
{
    const struct shape *h = &s->shape;
    const uint32_t n_rows = h->nope + h->v;
    double *w = malloc((size_t)n_rows * h->rank * sizeof(*w));

    for (uint32_t o = 0; o < n_rows; o++)
        for (uint32_t c = 0; c < h->rank; c++)
            w[(size_t)o * h->rank + c] = matrix_value(&s->kv_b.m, head * n_rows + o, c);
    return w;
}

/* key[nope + rope] and value of one position as attention sees them. */
static void expand(const struct scene *s, int32_t seq, int32_t p, const double *w, double *key,
                   double *value)
{
    const struct shape *h = &s->shape;
    double latent[512];

    for (uint32_t c = 0; c < h->rank; c++)
        latent[c] = cached(s, seq, p, c);
    for (uint32_t o = 0; o < h->nope + h->v; o++) {
        double sum = 0;

        for (uint32_t c = 0; c < h->rank; c++)
            sum += latent[c] * w[(size_t)o * h->rank + c];
        if (s->dtype == YARD_BF16)
            sum = (double)yard_bf16_round((float)sum);
        if (o < h->nope)
            key[o] = sum;
        else
            value[o - h->nope] = sum;
    }
    for (uint32_t c = 0; c < h->rope; c++)
        key[h->nope + c] = cached(s, seq, p, h->rank + c);
}

/* softmax(q . key * scale) . value over n keys; rows of key and value have their own strides. */
static void attend(const double *q, const double *key, uint32_t n_q, const double *value,
                   uint32_t n_v, int32_t n, double scale, double *out)
{
    double *score = malloc((size_t)n * sizeof(*score)), sum = 0, most = -INFINITY;

    for (int32_t p = 0; p < n; p++) {
        score[p] = 0;
        for (uint32_t c = 0; c < n_q; c++)
            score[p] += q[c] * key[(size_t)p * n_q + c];
        score[p] *= scale;
        most = score[p] > most ? score[p] : most;
    }
    memset(out, 0, n_v * sizeof(*out));
    for (int32_t p = 0; p < n; p++) {
        const double weight = exp(score[p] - most);
        sum += weight;
        for (uint32_t c = 0; c < n_v; c++)
            out[c] += weight * value[(size_t)p * n_v + c];
    }
    for (uint32_t c = 0; c < n_v; c++)
        out[c] /= sum;
    free(score);
}

static void assert_near(const struct scene *s, const char *what, double got, double want)
{
    const double tolerance = s->dtype == YARD_BF16 ? 0.03 : 1e-4;

    if (!(fabs(got - want) <= tolerance * (1 + fabs(want))))
        fail_msg("%s: seed %llu: want %.6g, got %.6g", what, (unsigned long long)s->seed, want,
                 got);
}

static void check_prefill_row(const struct scene *s, yard_rows y, uint32_t row, uint32_t head)
{
    const struct shape *h = &s->shape;
    const uint32_t n_q = h->nope + h->rope;
    const int32_t n = s->position[row] + 1;
    double *key = malloc((size_t)n * n_q * sizeof(*key));
    double *value = malloc((size_t)n * h->v * sizeof(*value));
    double *w = weights_of(s, head);
    double q[512], want[512];

    for (int32_t p = 0; p < n; p++)
        expand(s, s->seq[row], p, w, key + (size_t)p * n_q, value + (size_t)p * h->v);
    for (uint32_t c = 0; c < n_q; c++)
        q[c] = rows_value(s->q, row, (size_t)head * n_q + c);
    attend(q, key, n_q, value, h->v, n, (double)s->scale, want);
    for (uint32_t c = 0; c < h->v; c++)
        assert_near(s, "mla_prefill", rows_value(y, row, (size_t)head * h->v + c), want[c]);
    free(w);
    free(key);
    free(value);
}

static void one_prefill(yard_stream *streams, uint32_t n_streams, struct shape h, yard_dtype cached,
                        uint64_t seed)
{
    static struct scene s;
    yard_rows y[MAX_VARIANTS];
    rng r = { seed };

    make_scene(&s, h, seed, cached);
    for (uint32_t v = 0; v < n_streams; v++) {
        y[v] = random_rows(&r, s.dtype, MAX_ROWS, h.n_heads * h.v);
        poison(y[v], MAX_ROWS);
        yard_ops_cpu.mla_prefill(streams[v], &(yard_mla_prefill_args){ .batch = &s.batch,
                                                                       .n_heads = h.n_heads,
                                                                       .kv_rank = h.rank,
                                                                       .nope_dims = h.nope,
                                                                       .rope_dims = h.rope,
                                                                       .v_dims = h.v,
                                                                       .softmax_scale = s.scale,
                                                                       .q = s.q,
                                                                       .kv_b = s.kv_b.m,
                                                                       .cache = s.cache,
                                                                       .y = y[v] });
        assert_memory_equal(y[v].data, y[0].data,
                            (size_t)MAX_ROWS * h.n_heads * h.v * yard_dtype_bytes(s.dtype));
    }
    check_prefill_row(&s, y[0], 0, 0);
    for (int32_t row = 2; row < s.n_tokens; row += 17)
        check_prefill_row(&s, y[0], (uint32_t)row, (uint32_t)row % h.n_heads);
    for (uint32_t c = 0; c < h.n_heads * h.v; c++) /* the absorbed row is not ours */
        assert_true(isnan(rows_value(y[0], 1, c)));
    for (uint32_t v = 0; v < n_streams; v++)
        free_rows(y[v]);
    free_scene(&s);
}

static void check_decode_row(const struct scene *s, yard_rows q_latent, yard_rows y, uint32_t row,
                             uint32_t head)
{
    const struct shape *h = &s->shape;
    const uint32_t n_q = h->rank + h->rope, head_dim = h->nope + h->rope;
    const int32_t n = s->position[row] + 1;
    double *key = malloc((size_t)n * n_q * sizeof(*key));
    double *value = malloc((size_t)n * h->rank * sizeof(*value));
    double q[1024], want[1024];

    for (int32_t p = 0; p < n; p++)
        for (uint32_t c = 0; c < n_q; c++) {
            key[(size_t)p * n_q + c] = cached(s, s->seq[row], p, c);
            if (c < h->rank)
                value[(size_t)p * h->rank + c] = key[(size_t)p * n_q + c];
        }
    for (uint32_t c = 0; c < n_q; c++)
        q[c] = c < h->rank ? rows_value(q_latent, row, (size_t)head * h->rank + c)
                           : rows_value(s->q, row, (size_t)head * head_dim + h->nope + c - h->rank);
    attend(q, key, n_q, value, h->rank, n, (double)s->scale, want);
    for (uint32_t c = 0; c < h->rank; c++)
        assert_near(s, "mla_decode", rows_value(y, row, (size_t)head * h->rank + c), want[c]);
    free(key);
    free(value);
}

static void one_decode(yard_stream *streams, uint32_t n_streams, struct shape h, yard_dtype cached,
                       uint64_t seed)
{
    static struct scene s;
    yard_rows q_latent, y[MAX_VARIANTS];
    rng r = { seed };

    make_scene(&s, h, seed, cached);
    for (int32_t i = 0; i < s.n_tokens; i++)
        s.absorbed[i] = i != 5; /* also many rows of one sequence, as after a preemption */
    q_latent = random_rows(&r, s.dtype, (size_t)s.n_tokens, h.n_heads * h.rank);
    for (uint32_t v = 0; v < n_streams; v++) {
        y[v] = random_rows(&r, s.dtype, MAX_ROWS, h.n_heads * h.rank);
        poison(y[v], MAX_ROWS);
        yard_ops_cpu.mla_decode(streams[v], &(yard_mla_decode_args){ .batch = &s.batch,
                                                                     .n_heads = h.n_heads,
                                                                     .kv_rank = h.rank,
                                                                     .rope_dims = h.rope,
                                                                     .softmax_scale = s.scale,
                                                                     .q_latent = q_latent,
                                                                     .q = s.q,
                                                                     .head_dim = h.nope + h.rope,
                                                                     .cache = s.cache,
                                                                     .y = y[v] });
        assert_memory_equal(y[v].data, y[0].data,
                            (size_t)MAX_ROWS * h.n_heads * h.rank * yard_dtype_bytes(s.dtype));
    }
    for (int32_t row = 0; row < s.n_tokens; row += row < 4 ? 1 : 19)
        check_decode_row(&s, q_latent, y[0], (uint32_t)row, (uint32_t)row % h.n_heads);
    for (uint32_t c = 0; c < h.n_heads * h.rank; c++)
        assert_true(isnan(rows_value(y[0], 5, c)));
    for (uint32_t v = 0; v < n_streams; v++)
        free_rows(y[v]);
    free_rows(q_latent);
    free_scene(&s);
}

static const struct shape shapes[] = {
    { 4, 128, 64, 32, 64 },   /* the demo's */
    { 2, 512, 128, 64, 128 }, /* DeepSeek-V3's, fewer heads */
    { 5, 72, 20, 12, 28 },    /* nothing is a multiple of eight */
};

static void prefill(void **state)
{
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_variants(streams);

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        one_prefill(streams, n, shapes[i], YARD_F32, 1 + i);
        one_prefill(streams, n, shapes[i], YARD_BF16, 11 + i);
        one_prefill(streams, n, shapes[i], YARD_FP8_E4M3, 41 + i);
    }
    close_variants(streams, n);
}

static void decode(void **state)
{
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_variants(streams);

    (void)state;
    for (size_t i = 0; i < 3; i++) {
        one_decode(streams, n, shapes[i], YARD_F32, 21 + i);
        one_decode(streams, n, shapes[i], YARD_BF16, 31 + i);
        one_decode(streams, n, shapes[i], YARD_FP8_E4M3, 51 + i);
    }
    close_variants(streams, n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prefill),
        cmocka_unit_test(decode),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
