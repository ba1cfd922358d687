/* Grouped-query attention against double precision, every variant bit for bit, on random shapes:
 * keys and values go in through the append operation, pages lie in random order and hold garbage
 * beyond a sequence's end. ctest: sanitize */
#include "ops/ops_test.h"

enum { MAX_ROWS = 400, PAGES_PER_SEQ = 5, N_SEQS = 3, N_PAGES = N_SEQS * PAGES_PER_SEQ };

struct shape {
    uint32_t n_heads, n_kv_heads, head_dim, window;
    yard_rope_layout layout;
};

struct scene {
    struct shape shape;
    uint64_t seed;
    yard_batch batch;
    int32_t n_tokens, token[MAX_ROWS], position[MAX_ROWS], seq[MAX_ROWS];
    uint8_t absorbed[MAX_ROWS];
    int32_t page_table[N_PAGES];
    float inv_freq[128];
    yard_kv_layer cache;
    yard_rows k, v, q;
};

static void add_rows(struct scene *s, int32_t seq, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        s->position[s->n_tokens] = i;
        s->seq[s->n_tokens] = seq;
        s->absorbed[s->n_tokens++] = i % 3 == 0;
    }
}

static size_t cache_bytes(const struct scene *s)
{
    return (size_t)N_PAGES * YARD_PAGE_TOKENS * s->cache.width * yard_dtype_bytes(s->cache.dtype);
}

static void shuffle_pages(struct scene *s, rng *r)
{
    for (int32_t i = 0; i < N_PAGES; i++) {
        const uint32_t j = rng_below(r, (uint32_t)i + 1);
        s->page_table[i] = s->page_table[j];
        s->page_table[j] = i;
    }
}

static void make_scene(struct scene *s, struct shape h, uint64_t seed, yard_dtype dtype)
{
    const uint32_t kv_cols = h.n_kv_heads * h.head_dim;
    rng r = { seed };

    memset(s, 0, sizeof(*s));
    s->shape = h;
    s->seed = seed;
    s->cache = (yard_kv_layer){ .dtype = dtype, .width = 2 * kv_cols };
    s->cache.data = malloc(cache_bytes(s));
    shuffle_pages(s, &r);
    add_rows(s, 1, 1);
    add_rows(s, 0, 1 + (int32_t)rng_below(&r, 100));
    add_rows(s, 2, 230 + (int32_t)rng_below(&r, 60));
    for (uint32_t i = 0; i < h.head_dim / 2; i++)
        s->inv_freq[i] = powf(1000.0f, -2.0f * (float)i / (float)h.head_dim);
    s->batch = (yard_batch){ .n_tokens = &s->n_tokens,
                             .token = s->token,
                             .position = s->position,
                             .seq = s->seq,
                             .absorbed = s->absorbed,
                             .page_table = s->page_table,
                             .page_table_ld = PAGES_PER_SEQ };
    s->k = random_rows(&r, dtype, (size_t)s->n_tokens, kv_cols);
    s->v = random_rows(&r, dtype, (size_t)s->n_tokens, kv_cols);
    s->q = random_rows(&r, dtype, (size_t)s->n_tokens, h.n_heads * h.head_dim);
}

static void free_scene(struct scene *s)
{
    free(s->cache.data);
    free_rows(s->k);
    free_rows(s->v);
    free_rows(s->q);
}

static void append(const struct scene *s, yard_stream stream)
{
    memset(s->cache.data, 0xff, cache_bytes(s)); /* NaN */
    yard_ops_cpu.gqa_append_kv(
        stream,
        &(yard_gqa_append_kv_args){ .batch = &s->batch,
                                    .n_kv_heads = s->shape.n_kv_heads,
                                    .head_dim = s->shape.head_dim,
                                    .rope = { s->inv_freq, s->shape.head_dim, s->shape.layout },
                                    .k = s->k,
                                    .v = s->v,
                                    .cache = s->cache });
}

static void attend(const struct scene *s, yard_stream stream, yard_rows y)
{
    yard_ops_cpu.gqa_attend(stream, &(yard_gqa_attend_args){ .batch = &s->batch,
                                                             .n_heads = s->shape.n_heads,
                                                             .n_kv_heads = s->shape.n_kv_heads,
                                                             .head_dim = s->shape.head_dim,
                                                             .window = s->shape.window,
                                                             .softmax_scale = 0.1f,
                                                             .q = s->q,
                                                             .cache = s->cache,
                                                             .y = y });
}

static double cached(const struct scene *s, int32_t seq, int32_t p, uint32_t c)
{
    const yard_rows rows = { .dtype = s->cache.dtype, .ld = s->cache.width, .data = s->cache.data };
    const int32_t page = s->page_table[seq * PAGES_PER_SEQ + p / YARD_PAGE_TOKENS];

    return rows_value(rows, (size_t)page * YARD_PAGE_TOKENS + (size_t)(p % YARD_PAGE_TOKENS), c);
}

/* Element c of the rotated key of head g, by complex numbers. */
static double rotated(const struct scene *s, uint32_t row, uint32_t g, uint32_t c)
{
    const uint32_t half = s->shape.head_dim / 2, i = c % half;
    const bool pairs = s->shape.layout == YARD_ROPE_PAIRS;
    const size_t at = (size_t)g * s->shape.head_dim;
    const double a = rows_value(s->k, row, at + (pairs ? 2 * i : i));
    const double b = rows_value(s->k, row, at + (pairs ? 2 * i + 1 : half + i));
    const double angle = (double)s->position[row] * (double)s->inv_freq[i];

    return c < half ? a * cos(angle) - b * sin(angle) : b * cos(angle) + a * sin(angle);
}

static void assert_near(const struct scene *s, const char *what, double got, double want)
{
    const double tolerance = s->cache.dtype == YARD_BF16 ? 0.02 : 1e-4;

    if (!(fabs(got - want) <= tolerance * (1 + fabs(want))))
        fail_msg("%s: seed %llu: want %.6g, got %.6g", what, (unsigned long long)s->seed, want,
                 got);
}

static void check_cache(const struct scene *s)
{
    const struct shape *h = &s->shape;
    const uint32_t values_at = h->n_kv_heads * h->head_dim;

    for (uint32_t row = 0; row < (uint32_t)s->n_tokens; row += 7)
        for (uint32_t c = 0; c < values_at; c++) {
            const int32_t seq = s->seq[row], p = s->position[row];
            assert_near(s, "key", cached(s, seq, p, c),
                        rotated(s, row, c / h->head_dim, c % h->head_dim));
            assert_near(s, "value", cached(s, seq, p, values_at + c), rows_value(s->v, row, c));
        }
}

static void check_row(const struct scene *s, yard_rows y, uint32_t row, uint32_t head)
{
    const struct shape *h = &s->shape;
    const uint32_t n = h->head_dim, g = head / (h->n_heads / h->n_kv_heads);
    const int32_t last = s->position[row];
    const int32_t first =
        h->window && last >= (int32_t)h->window ? last + 1 - (int32_t)h->window : 0;
    double weight[MAX_ROWS], sum = 0;

    for (int32_t p = first; p <= last; p++) {
        double score = 0;
        for (uint32_t c = 0; c < n; c++)
            score +=
                rows_value(s->q, row, (size_t)head * n + c) * cached(s, s->seq[row], p, g * n + c);
        weight[p] = exp((double)0.1f * score);
        sum += weight[p];
    }
    for (uint32_t c = 0; c < n; c++) {
        double want = 0;
        for (int32_t p = first; p <= last; p++)
            want += weight[p] / sum * cached(s, s->seq[row], p, (h->n_kv_heads + g) * n + c);
        assert_near(s, "gqa_attend", rows_value(y, row, (size_t)head * n + c), want);
    }
}

static void one_shape(yard_stream *streams, uint32_t n_streams, struct shape h, yard_dtype dtype,
                      uint64_t seed)
{
    static struct scene s;
    const size_t row_bytes = (size_t)h.n_heads * h.head_dim * yard_dtype_bytes(dtype);
    yard_rows y[MAX_VARIANTS];
    void *first_cache;
    rng r = { seed };

    make_scene(&s, h, seed, dtype);
    first_cache = malloc(cache_bytes(&s));
    for (uint32_t i = 0; i < n_streams; i++) {
        append(&s, streams[i]);
        if (i == 0)
            memcpy(first_cache, s.cache.data, cache_bytes(&s));
        assert_memory_equal(s.cache.data, first_cache, cache_bytes(&s));
        y[i] = random_rows(&r, dtype, MAX_ROWS, h.n_heads * h.head_dim);
        poison(y[i], MAX_ROWS);
        attend(&s, streams[i], y[i]);
        assert_memory_equal(y[i].data, y[0].data, MAX_ROWS * row_bytes);
    }
    check_cache(&s);
    for (uint32_t row = 0; row < (uint32_t)s.n_tokens; row += 13)
        check_row(&s, y[0], row, row % h.n_heads);
    for (uint32_t i = 0; i < n_streams; i++)
        free_rows(y[i]);
    free(first_cache);
    free_scene(&s);
}

static const struct shape shapes[] = {
    { 8, 2, 128, 0, YARD_ROPE_HALVES },  /* Mixtral's, fewer heads */
    { 16, 1, 64, 0, YARD_ROPE_HALVES },  /* one kv head */
    { 6, 6, 20, 0, YARD_ROPE_PAIRS },    /* a kv head each; nothing is a multiple of eight */
    { 6, 2, 36, 100, YARD_ROPE_HALVES }, /* a window that cuts pages */
    { 4, 2, 16, 64, YARD_ROPE_PAIRS },   /* as wide as a page */
    { 4, 1, 8, 1, YARD_ROPE_HALVES },    /* itself only */
};

static void fixed_shapes(void **state)
{
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_variants(streams);

    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        one_shape(streams, n, shapes[i], YARD_F32, 1 + i);
        one_shape(streams, n, shapes[i], YARD_BF16, 101 + i);
    }
    close_variants(streams, n);
}

static void random_shapes(void **state)
{
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_variants(streams);

    (void)state;
    for (uint64_t seed = 1000; seed < 1012; seed++) {
        rng r = { seed };
        struct shape h = { .n_kv_heads = 1 + rng_below(&r, 4),
                           .head_dim = 2 * (1 + rng_below(&r, 40)),
                           .window = rng_below(&r, 2) ? 1 + rng_below(&r, 300) : 0,
                           .layout = rng_below(&r, 2) };
        h.n_heads = h.n_kv_heads * (1 + rng_below(&r, 4));
        one_shape(streams, n, h, seed % 2 ? YARD_F32 : YARD_BF16, seed);
    }
    close_variants(streams, n);
}

/* Each row alone, in other pages and of the other kind (absorbed), has the same bits. */
static void rows_are_independent(void **state)
{
    static struct scene s;
    const struct shape h = { 6, 2, 40, 150, YARD_ROPE_HALVES };
    const size_t row_bytes = (size_t)h.n_heads * h.head_dim * sizeof(float);
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_variants(streams);
    yard_rows all, alone;
    yard_batch batch;
    rng r = { 7 };

    (void)state;
    make_scene(&s, h, 77, YARD_F32);
    append(&s, streams[0]);
    all = random_rows(&r, YARD_F32, MAX_ROWS, h.n_heads * h.head_dim);
    alone = random_rows(&r, YARD_F32, 1, h.n_heads * h.head_dim);
    attend(&s, streams[0], all);
    shuffle_pages(&s, &r);
    for (int32_t i = 0; i < s.n_tokens; i++)
        s.absorbed[i] = !s.absorbed[i];
    append(&s, streams[n - 1]);
    batch = s.batch;
    for (int32_t row = 0; row < s.n_tokens; row += 11) {
        const int32_t one = 1;
        struct scene single = s;
        single.batch = batch;
        single.batch.n_tokens = &one;
        single.batch.position += row;
        single.batch.seq += row;
        single.batch.absorbed += row;
        single.q.data = (float *)s.q.data + (size_t)row * s.q.ld;
        attend(&single, streams[n - 1], alone);
        assert_memory_equal(alone.data, (uint8_t *)all.data + (size_t)row * row_bytes, row_bytes);
    }
    free_rows(all);
    free_rows(alone);
    free_scene(&s);
    close_variants(streams, n);
}

/* One row a sequence, as when all of them decode: the same bits as among the rows of prompts. */
static void decode_steps(void **state)
{
    static struct scene s;
    const struct shape h = { 14, 7, 24, 0, YARD_ROPE_HALVES };
    const uint32_t cols = h.n_heads * h.head_dim;
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_variants(streams);
    int32_t last[N_SEQS] = { 0 }, position[N_SEQS], seq[N_SEQS], n_rows = N_SEQS;
    struct scene step;
    yard_rows all, some;
    rng r = { 8 };

    (void)state;
    make_scene(&s, h, 88, YARD_F32);
    append(&s, streams[0]);
    all = random_rows(&r, YARD_F32, MAX_ROWS, cols);
    some = random_rows(&r, YARD_F32, N_SEQS, cols);
    attend(&s, streams[0], all);
    for (int32_t i = 0; i < s.n_tokens; i++)
        last[s.seq[i]] = i;
    step = s;
    step.q = random_rows(&r, YARD_F32, N_SEQS, cols);
    for (int32_t i = 0; i < N_SEQS; i++) {
        position[i] = s.position[last[i]];
        seq[i] = i;
        memcpy((float *)step.q.data + (size_t)i * cols, (float *)s.q.data + (size_t)last[i] * cols,
               cols * sizeof(float));
    }
    step.batch = (yard_batch){ .n_tokens = &n_rows,
                               .position = position,
                               .seq = seq,
                               .absorbed = s.absorbed,
                               .page_table = s.page_table,
                               .page_table_ld = PAGES_PER_SEQ };
    for (uint32_t v = 0; v < n; v++) {
        poison(some, N_SEQS);
        attend(&step, streams[v], some);
        for (int32_t i = 0; i < N_SEQS; i++)
            assert_memory_equal((float *)some.data + (size_t)i * cols,
                                (float *)all.data + (size_t)last[i] * cols, cols * sizeof(float));
    }
    free_rows(all);
    free_rows(some);
    free_rows(step.q);
    free_scene(&s);
    close_variants(streams, n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fixed_shapes),
        cmocka_unit_test(random_shapes),
        cmocka_unit_test(rows_are_independent),
        cmocka_unit_test(decode_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
