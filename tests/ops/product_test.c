/* Linear, grouped linear and per-head products of every variant: against double precision, and bit
 * for bit against the definition. ctest: sanitize */
#include "ops/cpu/cpu.h"
#include "ops/ops_test.h"

static const yard_dtype x_types[] = { YARD_F32, YARD_BF16, YARD_FP8_E4M3 };
static const yard_dtype w_types[] = { YARD_FP8_E4M3, YARD_BF16, YARD_F16, YARD_F32 };

static bool makes_sense(yard_dtype x, yard_dtype w)
{
    return x != YARD_FP8_E4M3 || w == YARD_FP8_E4M3;
}

static const cpu_kernels *usual;

static bool other_fp8_dot_many(void)
{
    return !usual->fp8_dot_many();
}

/* One more: AVX-512 with products of many rows in the way that other processors make them. */
static uint32_t open_product_variants(yard_stream *streams)
{
    static cpu_kernels other;
    const yard_ops_config config = { .n_threads = 3, .variant = "avx512", .limits = test_limits() };
    const uint32_t n = open_variants(streams);

    if (yard_ops_cpu.open(&streams[n], &config, NULL) != YARD_OK)
        return n;
    usual = streams[n]->kernels;
    other = *usual;
    other.fp8_dot_many = other_fp8_dot_many;
    streams[n]->kernels = &other;
    return n + 1;
}

static void check_product(uint64_t seed, yard_rows x, size_t x_row, const yard_matrix *w,
                          yard_rows y, size_t y_row, uint32_t n_rows)
{
    for (uint32_t i = 0; i < n_rows; i++)
        for (uint32_t n = 0; n < w->rows; n++) {
            double want = 0, size = 0;
            for (uint32_t k = 0; k < w->cols; k++) {
                const double term = rows_value(x, x_row + i, k) * matrix_value(w, n, k);
                want += term;
                size += fabs(term);
            }
            assert_close("linear", seed, y.dtype, rows_value(y, y_row + i, n), want, size);
        }
}

static void one_linear(yard_stream *streams, uint32_t n_streams, uint64_t seed, yard_dtype x_type,
                       yard_dtype w_type)
{
    static const uint32_t row_counts[] = { 0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 16, 33, 70 };
    rng r = { seed };
    const uint32_t rows = 1 + rng_below(&r, 150), cols = 1 + rng_below(&r, 400);
    const uint32_t block_rows = rng_below(&r, 2) ? 128 : 1 + rng_below(&r, 100);
    const int32_t n = (int32_t)row_counts[rng_below(&r, 13)];
    const yard_dtype y_type = rng_below(&r, 2) ? YARD_F32 : YARD_BF16;
    const random_matrix w =
        make_matrix(&r, w_type, rows, cols, rng_below(&r, 200), 128 * rng_below(&r, 3), block_rows);
    const yard_rows x = random_rows(&r, x_type, (size_t)n, cols);
    yard_rows y[MAX_VARIANTS];

    for (uint32_t v = 0; v < n_streams; v++) {
        y[v] = random_rows(&r, y_type, (size_t)n + 1, rows);
        poison(y[v], (size_t)n + 1);
        yard_ops_cpu.linear(streams[v],
                            &(yard_linear_args){ .n_rows = &n, .x = x, .w = w.m, .y = y[v] });
        assert_memory_equal(y[v].data, y[0].data,
                            ((size_t)n + 1) * rows * yard_dtype_bytes(y_type));
    }
    check_product(seed, x, 0, &w.m, y[0], 0, (uint32_t)n);
    for (uint32_t v = 0; v < n_streams; v++)
        free_rows(y[v]);
    free_rows(x);
    free_matrix(w);
}

static void linear(void **state)
{
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_product_variants(streams);

    (void)state;
    for (uint64_t seed = 1; seed <= 40; seed++)
        for (size_t x = 0; x < 3; x++)
            for (size_t w = 0; w < 4; w++)
                if (makes_sense(x_types[x], w_types[w]))
                    one_linear(streams, n, seed * 100 + x * 10 + w, x_types[x], w_types[w]);
    close_variants(streams, n);
}

/* bf16 values of three kinds: 0 or between 2^-54 and 2^60; those and a few smaller ones; smaller
 * ones alone, down to the smallest denormal. Most are 0, so that a result is the sum of few
 * products and shows when one that is a denormal, or whose factor is one, got lost. */
static uint16_t extreme_bf16(rng *r, uint32_t kind)
{
    const uint16_t sign = (uint16_t)(rng_below(r, 2) << 15);
    const bool small = kind == 2 || (kind == 1 && rng_below(r, 20) == 0);

    if (rng_below(r, 8))
        return sign;
    return sign |
           (uint16_t)(small ? 1 + rng_below(r, 0x247f) : 0x2480 + rng_below(r, 0x5d81 - 0x2480));
}

static void extremes(void **state)
{
    enum { ROWS = 13, TOKENS = 66 };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n_streams = open_product_variants(streams);
    const int32_t n = TOKENS;
    rng r = { 17 };

    (void)state;
    for (uint32_t i = 0; i < 6; i++) {
        const uint32_t cols = i % 2 ? 1100 : 70;
        const random_matrix w = make_matrix(&r, YARD_BF16, ROWS, cols, 0, 0, 1);
        const yard_rows x = random_rows(&r, YARD_BF16, TOKENS, cols);
        yard_rows y[MAX_VARIANTS];

        for (size_t e = 0; e < (size_t)TOKENS * cols; e++)
            ((uint16_t *)x.data)[e] = extreme_bf16(&r, e / cols / 5 % 3);
        for (size_t row = 0; row < ROWS; row++)
            for (uint32_t c = 0; c < cols; c++)
                ((uint16_t *)(uintptr_t)w.m.data)[row * w.m.ld + c] =
                    extreme_bf16(&r, (row / 4 + i) % 3);
        for (uint32_t v = 0; v < n_streams; v++) {
            y[v] = random_rows(&r, YARD_F32, TOKENS, ROWS);
            poison(y[v], TOKENS);
            yard_ops_cpu.linear(streams[v],
                                &(yard_linear_args){ .n_rows = &n, .x = x, .w = w.m, .y = y[v] });
            assert_memory_equal(y[v].data, y[0].data, TOKENS * ROWS * sizeof(float));
        }
        for (uint32_t v = 0; v < n_streams; v++)
            free_rows(y[v]);
        free_rows(x);
        free_matrix(w);
    }
    close_variants(streams, n_streams);
}

/* Rows so long that panels of weights are cut, in every place where a last piece may end. */
static void long_rows(void **state)
{
    static const uint32_t lengths[] = { 1023, 1024, 1025, 1056, 1152, 2047, 2560, 3001 };
    static const int32_t counts[] = { 1, 2, 3, 4, 5, 6, 7, 65, 130 };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n_streams = open_product_variants(streams);
    rng r = { 11 };

    (void)state;
    for (size_t i = 0; i < 8; i++)
        for (size_t t = 0; t < 4; t++) {
            const uint32_t rows = 5 + rng_below(&r, 30);
            const int32_t n = counts[(i + 2 * t) % 9];
            const yard_dtype x_type = w_types[t] == YARD_FP8_E4M3 ? x_types[i % 3] : x_types[i % 2];
            const random_matrix w =
                make_matrix(&r, w_types[t], rows, lengths[i], rng_below(&r, 9), 0, 1 + i);
            const yard_rows x = random_rows(&r, x_type, (size_t)n, lengths[i]);
            yard_rows y[MAX_VARIANTS];

            for (uint32_t v = 0; v < n_streams; v++) {
                y[v] = random_rows(&r, YARD_F32, (size_t)n, rows);
                poison(y[v], (size_t)n);
                yard_ops_cpu.linear(
                    streams[v], &(yard_linear_args){ .n_rows = &n, .x = x, .w = w.m, .y = y[v] });
                assert_memory_equal(y[v].data, y[0].data, (size_t)n * rows * sizeof(float));
            }
            check_product(i, x, 0, &w.m, y[0], 0, (uint32_t)n);
            for (uint32_t v = 0; v < n_streams; v++)
                free_rows(y[v]);
            free_rows(x);
            free_matrix(w);
        }
    close_variants(streams, n_streams);
}

/* Columns of padding have no scales, also where they begin another group. */
static void padded_rows(void **state)
{
    enum { N = 3, COLS = 128, LD = 144, ROWS = 8 };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n_streams = open_product_variants(streams);
    const int32_t n = N;
    rng r = { 5 };
    const random_matrix w = make_matrix(&r, YARD_FP8_E4M3, ROWS, COLS, 0, 0, 128);
    const yard_rows values = random_rows(&r, YARD_BF16, N, COLS);
    const yard_rows dense = random_rows(&r, YARD_FP8_E4M3, N, COLS);
    const yard_rows want = random_rows(&r, YARD_F32, N, ROWS);
    const yard_rows got = random_rows(&r, YARD_F32, N, ROWS);
    yard_rows padded = random_rows(&r, YARD_FP8_E4M3, N, LD);

    (void)state;
    padded.scale[N] = -1.0f; /* there is room for two scales a row */
    for (uint32_t v = 0; v < n_streams; v++) {
        yard_quantise_args a = { .n_rows = &n, .n_cols = COLS, .x = values, .y = dense };
        yard_ops_cpu.quantise(streams[v], &a);
        a.y = padded;
        yard_ops_cpu.quantise(streams[v], &a);
        assert_memory_equal(padded.scale, dense.scale, N * sizeof(float));
        assert_true(padded.scale[N] == -1.0f);
        yard_ops_cpu.linear(streams[v],
                            &(yard_linear_args){ .n_rows = &n, .x = dense, .w = w.m, .y = want });
        yard_ops_cpu.linear(streams[v],
                            &(yard_linear_args){ .n_rows = &n, .x = padded, .w = w.m, .y = got });
        assert_memory_equal(got.data, want.data, N * ROWS * sizeof(float));
    }
    free_rows(values);
    free_rows(dense);
    free_rows(padded);
    free_rows(want);
    free_rows(got);
    free_matrix(w);
    close_variants(streams, n_streams);
}

/* Every FP8 code times every other: subnormals, both zeros, the largest. */
static void every_code(void **state)
{
    enum { CODES = 256, COLS = 64 };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n_streams = open_product_variants(streams);
    uint8_t *w = malloc(CODES * COLS), *x = malloc(CODES * COLS);
    float w_scale[1] = { 0.5f }, *x_scale = malloc(CODES * sizeof(float));
    const yard_matrix m = { .dtype = YARD_FP8_E4M3,
                            .rows = CODES,
                            .cols = COLS,
                            .ld = COLS,
                            .data = w,
                            .scale = w_scale,
                            .scale_ld = 1,
                            .block_rows = CODES };
    const yard_rows rows = { .dtype = YARD_FP8_E4M3, .ld = COLS, .data = x, .scale = x_scale };
    const int32_t n = CODES;
    rng r = { 3 };
    yard_rows y[MAX_VARIANTS];

    (void)state;
    memset(w, 0, CODES * COLS);
    for (int c = 0; c < CODES; c++) {
        w[c * COLS + c % COLS] = (c & 0x7f) == 0x7f ? 0 : (uint8_t)c;
        x_scale[c] = 2.0f;
        for (int k = 0; k < COLS; k++)
            x[c * COLS + k] = (c & 0x7f) == 0x7f ? 0 : (uint8_t)c;
    }
    for (uint32_t v = 0; v < n_streams; v++) {
        y[v] = random_rows(&r, YARD_F32, CODES, CODES);
        yard_ops_cpu.linear(streams[v],
                            &(yard_linear_args){ .n_rows = &n, .x = rows, .w = m, .y = y[v] });
        assert_memory_equal(y[v].data, y[0].data, CODES * CODES * sizeof(float));
    }
    for (int i = 0; i < CODES; i++)
        for (int c = 0; c < CODES; c++) {
            const float want =
                (i & 0x7f) == 0x7f || (c & 0x7f) == 0x7f
                    ? 0.0f
                    : yard_f32_from_e4m3((uint8_t)i) * yard_f32_from_e4m3((uint8_t)c);
            assert_true(((float *)y[0].data)[i * CODES + c] == want);
        }
    for (uint32_t v = 0; v < n_streams; v++)
        free_rows(y[v]);
    free(w);
    free(x);
    free(x_scale);
    close_variants(streams, n_streams);
}

/* A NaN among the codes of a row is one in its results, and in no others. */
static void nan_among_codes(void **state)
{
    enum { ROWS = 20, COLS = 200, MOST = 16 };
    static const int32_t counts[] = { 1, 3, 5, MOST };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n_streams = open_product_variants(streams);
    rng r = { 31 };
    const random_matrix w = make_matrix(&r, YARD_FP8_E4M3, ROWS, COLS, 0, 0, 128);
    const yard_rows x = random_rows(&r, YARD_FP8_E4M3, MOST, COLS);
    const yard_rows y = random_rows(&r, YARD_F32, MOST, ROWS);
    const yard_rows want = random_rows(&r, YARD_F32, MOST, ROWS);

    (void)state;
    for (uint32_t i = 0; i < 8; i++) {
        const int32_t n = counts[i % 4], one = n / 2;
        uint8_t *code = (uint8_t *)x.data + one * COLS + rng_below(&r, COLS);
        const uint8_t was = *code;
        const yard_linear_args a = { .n_rows = &n, .x = x, .w = w.m, .y = y };
        yard_linear_args clean = a;

        clean.y = want;
        yard_ops_cpu.linear(streams[0], &clean);
        *code = i < 4 ? 0x7f : 0xff;
        for (uint32_t v = 0; v < n_streams; v++) {
            yard_ops_cpu.linear(streams[v], &a);
            for (int32_t e = 0; e < n * ROWS; e++)
                if (e / ROWS == one)
                    assert_true(isnan(((float *)y.data)[e]));
                else
                    assert_true(((float *)y.data)[e] == ((float *)want.data)[e]);
        }
        *code = was;
    }
    free_rows(x);
    free_rows(y);
    free_rows(want);
    free_matrix(w);
    close_variants(streams, n_streams);
}

/* Streams of all variants for longer rows, of this thread alone. */
static uint32_t open_long(yard_stream *streams, uint32_t longest)
{
    static const char *const names[] = { "c", "avx2", "avx512" };
    yard_ops_config config = { .n_threads = 1, .limits = test_limits() };
    uint32_t n = 0;

    config.limits.max_in = longest;
    for (size_t i = 0; i < 3; i++) {
        config.variant = names[i];
        n += yard_ops_cpu.open(&streams[n], &config, NULL) == YARD_OK;
    }
    return n;
}

static void random_codes(rng *r, void *codes, size_t n)
{
    uint8_t *at = codes;

    for (size_t i = 0; i < n; i++) {
        at[i] = (uint8_t)rng_next(r);
        if ((at[i] & 0x7f) == 0x7f)
            at[i] = 0;
    }
}

/* Up to four rows of any codes, subnormals among them, so long that columns are cut; factors of
 * usual sizes and near both ends of f32. A thread that takes denormals for 0 gets the same. */
static void few_rows_of_codes(void **state)
{
    enum { ROWS = 70, LONGEST = 15000 };
    static const uint32_t lengths[] = { 7168, 7199, LONGEST };
    static const float factors[] = { 1.0f, 0x1p60f, 0x1p-70f };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n_streams = open_long(streams, LONGEST);
    rng r = { 29 };

    (void)state;
    for (uint32_t i = 0; i < 24; i++) {
        const int32_t n = 1 + (int32_t)(i % 4);
        const uint32_t cols = lengths[i / 4 % 3];
        const float factor = factors[i / 8];
        const random_matrix w = make_matrix(&r, YARD_FP8_E4M3, ROWS, cols, 0, 0, i % 5 ? 128 : 3);
        const yard_rows x = random_rows(&r, YARD_FP8_E4M3, (size_t)n, cols);
        const yard_rows y = random_rows(&r, YARD_F32, (size_t)n, ROWS);
        const yard_rows want = random_rows(&r, YARD_F32, (size_t)n, ROWS);
        const yard_linear_args a = { .n_rows = &n, .x = x, .w = w.m, .y = y };
        yard_linear_args definition = a;

        random_codes(&r, w.stored, (size_t)ROWS * cols);
        random_codes(&r, x.data, (size_t)n * cols);
        for (uint32_t g = 0; g < (uint32_t)n * yard_group_count(cols); g++)
            x.scale[g] *= factor;
        for (uint32_t g = 0; g < yard_group_count(cols); g++) /* of some rows of w */
            w.scale[g] *= factor;
        definition.y = want;
        yard_ops_cpu.linear(streams[0], &definition);
        for (uint32_t v = 1; v < n_streams; v++) {
            poison(y, (size_t)n);
            yard_ops_cpu.linear(streams[v], &a);
            assert_memory_equal(y.data, want.data, (size_t)n * ROWS * sizeof(float));
#if defined(__SSE__)
            if (factor >= 1.0f) { /* the results are no denormals */
                const unsigned int csr = __builtin_ia32_stmxcsr();

                poison(y, (size_t)n);
                __builtin_ia32_ldmxcsr(csr | 0x8040);
                yard_ops_cpu.linear(streams[v], &a);
                __builtin_ia32_ldmxcsr(csr);
                assert_memory_equal(y.data, want.data, (size_t)n * ROWS * sizeof(float));
            }
#endif
        }
        free_rows(x);
        free_rows(y);
        free_rows(want);
        free_matrix(w);
    }
    close_variants(streams, n_streams);
}

/* AMX tiles round sums in an order of their own: near the exact value, and independent of other
 * rows. Skipped where there is none. */
static void amx_is_near(void **state)
{
    const yard_ops_config config = { .n_threads = 3, .variant = "amx", .limits = test_limits() };
    yard_stream stream = NULL;

    (void)state;
    if (yard_ops_cpu.open(&stream, &config, NULL) != YARD_OK)
        skip();
    for (uint64_t seed = 1; seed <= 60; seed++) {
        rng r = { seed };
        const uint32_t rows = 1 + rng_below(&r, 150), cols = 1 + rng_below(&r, 2500);
        const int32_t n = 1 + (int32_t)rng_below(&r, 140), one = 1;
        const random_matrix w = make_matrix(&r, YARD_FP8_E4M3, rows, cols, rng_below(&r, 200), 0,
                                            1 + rng_below(&r, 200));
        const yard_rows x = random_rows(&r, YARD_FP8_E4M3, (size_t)n, cols);
        const yard_rows y = random_rows(&r, YARD_F32, (size_t)n, rows);
        const yard_rows alone = random_rows(&r, YARD_F32, 1, rows);
        yard_rows last = x;

        yard_ops_cpu.linear(stream, &(yard_linear_args){ .n_rows = &n, .x = x, .w = w.m, .y = y });
        check_product(seed, x, 0, &w.m, y, 0, (uint32_t)n);
        last.data = (uint8_t *)x.data + (size_t)(n - 1) * cols;
        last.scale = x.scale + (size_t)(n - 1) * yard_group_count(cols);
        yard_ops_cpu.linear(stream,
                            &(yard_linear_args){ .n_rows = &one, .x = last, .w = w.m, .y = alone });
        assert_memory_equal(alone.data, (float *)y.data + (size_t)(n - 1) * rows,
                            rows * sizeof(float));
        free_rows(alone);
        free_rows(y);
        free_rows(x);
        free_matrix(w);
    }
    yard_ops_cpu.close(stream);
}

static void an_unknown_variant_is_refused(void **state)
{
    const yard_ops_config config = { .n_threads = 1, .variant = "sse", .limits = test_limits() };
    yard_stream stream = NULL;
    yard_error err = { 0 };

    (void)state;
    assert_int_equal(yard_ops_cpu.open(&stream, &config, &err), YARD_EINVAL);
    assert_null(stream);
    assert_non_null(strstr(err.message, "(its best: "));
    assert_non_null(strstr(err.message, "got 'sse'"));
}

/* Row i gives the same bits alone and among others. */
static void rows_are_independent(void **state)
{
    enum { ROWS = 75, COLS = 300, N_OUT = 61 };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n_streams = open_product_variants(streams);
    rng r = { 7 };

    (void)state;
    for (size_t t = 0; t < 3; t++) {
        const random_matrix w = make_matrix(&r, YARD_FP8_E4M3, N_OUT, COLS, 3, 0, 128);
        const yard_rows x = random_rows(&r, x_types[t], ROWS, COLS);
        const yard_rows all = random_rows(&r, YARD_F32, ROWS, N_OUT);
        const yard_rows part = random_rows(&r, YARD_F32, ROWS, N_OUT);
        const size_t x_bytes = COLS * yard_dtype_bytes(x.dtype);
        const int32_t n_all = ROWS;

        yard_ops_cpu.linear(streams[n_streams - 1],
                            &(yard_linear_args){ .n_rows = &n_all, .x = x, .w = w.m, .y = all });
        for (int32_t n = 1; n < 6; n++)
            for (uint32_t from = 0; from + 6 < ROWS; from += 5) {
                yard_rows some = x;
                some.data = (uint8_t *)x.data + from * x_bytes;
                some.scale = x.scale ? x.scale + from * yard_group_count(COLS) : NULL;
                yard_ops_cpu.linear(
                    streams[n_streams - 1],
                    &(yard_linear_args){ .n_rows = &n, .x = some, .w = w.m, .y = part });
                assert_memory_equal(part.data, (float *)all.data + (size_t)from * N_OUT,
                                    (size_t)n * N_OUT * sizeof(float));
            }
        free_rows(x);
        free_rows(all);
        free_rows(part);
        free_matrix(w);
    }
    close_variants(streams, n_streams);
}

static void grouped_linear(void **state)
{
    enum { GROUPS = 9, N_OUT = 100, COLS = 200, MAX_ROWS = 220 };
    static const int32_t sizes[][GROUPS] = {
        { 0, 0, 0, 0, 0, 0, 0, 0, 0 },    { 0, 0, 0, 0, 100, 0, 0, 0, 0 },
        { 1, 1, 1, 1, 1, 1, 1, 1, 1 },    { 0, 40, 2, 0, 0, 3, 33, 0, 5 },
        { 0, 70, 0, 3, 130, 0, 0, 0, 9 }, /* more than a product holds at once */
    };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n_streams = open_product_variants(streams);

    (void)state;
    for (uint32_t s = 0; s < 5; s++) {
        rng r = { 1000 + s };
        const yard_rows x = random_rows(&r, YARD_FP8_E4M3, MAX_ROWS, COLS);
        int32_t offset[GROUPS + 1] = { 0 };
        random_matrix stored[GROUPS];
        yard_matrix w[GROUPS];
        yard_rows y[MAX_VARIANTS];

        for (int g = 0; g < GROUPS; g++) {
            stored[g] = make_matrix(&r, YARD_FP8_E4M3, N_OUT, COLS, 0, 0, 128);
            w[g] = stored[g].m;
            offset[g + 1] = offset[g] + sizes[s][g];
        }
        for (uint32_t v = 0; v < n_streams; v++) {
            y[v] = random_rows(&r, YARD_BF16, MAX_ROWS, N_OUT);
            poison(y[v], MAX_ROWS);
            yard_ops_cpu.grouped_linear(
                streams[v], &(yard_grouped_linear_args){
                                .n_groups = GROUPS, .offset = offset, .x = x, .w = w, .y = y[v] });
            assert_memory_equal(y[v].data, y[0].data, (size_t)MAX_ROWS * N_OUT * 2);
        }
        for (int g = 0; g < GROUPS; g++) {
            check_product(s, x, (size_t)offset[g], &w[g], y[0], (size_t)offset[g],
                          (uint32_t)sizes[s][g]);
            free_matrix(stored[g]);
        }
        /* rows beyond the last group stay as they were */
        for (size_t i = (size_t)offset[GROUPS] * N_OUT; i < (size_t)MAX_ROWS * N_OUT; i++)
            assert_int_equal(((uint16_t *)y[0].data)[i], 0xffff);
        for (uint32_t v = 0; v < n_streams; v++)
            free_rows(y[v]);
        free_rows(x);
    }
    close_variants(streams, n_streams);
}

/* Groups with gaps between them, rows of x picked by an index, weights stacked from parts. */
static void grouped_layouts(void **state)
{
    enum { GROUPS = 3, N_OUT = 70, COLS = 200, MAX_ROWS = 64, X_ROWS = 10 };
    static const int32_t offset[GROUPS + 1] = { 0, 16, 32, 64 }, count[GROUPS] = { 5, 0, 20 };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n_streams = open_product_variants(streams);
    rng r = { 77 };
    const yard_rows x = random_rows(&r, YARD_FP8_E4M3, X_ROWS, COLS);
    yard_matrix parts[GROUPS * 2], w[GROUPS];
    random_matrix stored[GROUPS * 2];
    struct yard_prepared *prepared = NULL;
    int32_t index[MAX_ROWS];

    (void)state;
    for (int i = 0; i < MAX_ROWS; i++)
        index[i] = (int32_t)rng_below(&r, X_ROWS);
    for (int i = 0; i < GROUPS * 2; i++) {
        stored[i] = make_matrix(&r, YARD_FP8_E4M3, i % 2 ? 30 : 40, COLS, (uint32_t)i, 0, 128);
        parts[i] = stored[i].m;
    }
    assert_int_equal(yard_ops_cpu.prepare(
                         &prepared, w, streams[0],
                         &(yard_prepare_args){ .parts = parts, .n_matrices = GROUPS, .n_parts = 2 },
                         NULL),
                     YARD_OK);
    for (uint32_t v = 0; v < n_streams; v++) {
        const yard_rows y = random_rows(&r, YARD_F32, MAX_ROWS, N_OUT);
        poison(y, MAX_ROWS);
        yard_ops_cpu.grouped_linear(streams[v], &(yard_grouped_linear_args){ .n_groups = GROUPS,
                                                                             .offset = offset,
                                                                             .row_count = count,
                                                                             .x_index = index,
                                                                             .x = x,
                                                                             .w = w,
                                                                             .y = y });
        for (int g = 0; g < GROUPS; g++)
            for (int32_t row = offset[g]; row < offset[g + 1]; row++) {
                if (row >= offset[g] + count[g]) {
                    assert_true(isnan(rows_value(y, (size_t)row, 0)));
                    continue;
                }
                for (uint32_t n = 0; n < N_OUT; n++) {
                    const yard_matrix *part = &parts[2 * g + (n >= 40)];
                    double want = 0, size = 0;
                    for (uint32_t k = 0; k < COLS; k++) {
                        const double term = rows_value(x, (size_t)index[row], k) *
                                            matrix_value(part, n >= 40 ? n - 40 : n, k);
                        want += term;
                        size += fabs(term);
                    }
                    assert_close("grouped layouts", 77, y.dtype, rows_value(y, (size_t)row, n),
                                 want, size);
                }
            }
        free_rows(y);
    }
    yard_ops_cpu.release_prepared(streams[0], prepared);
    parts[3].rows++;
    assert_int_equal(yard_ops_cpu.prepare(
                         &prepared, w, streams[0],
                         &(yard_prepare_args){ .parts = parts, .n_matrices = GROUPS, .n_parts = 2 },
                         NULL),
                     YARD_EINVAL);
    for (int i = 0; i < GROUPS * 2; i++)
        free_matrix(stored[i]);
    free_rows(x);
    close_variants(streams, n_streams);
}

/* Memory, errors and graphs of a table whose operations run at once. */
static void table(void **state)
{
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n_streams = open_product_variants(streams);
    uint8_t out[3] = { 0 };
    yard_graph *graph = NULL;
    void *memory = NULL;

    (void)state;
    assert_ptr_equal(yard_ops_find("cpu"), &yard_ops_cpu);
    assert_null(yard_ops_find("abacus"));
    assert_int_equal(yard_ops_cpu.allocate(&memory, streams[0], 3, NULL), YARD_OK);
    assert_int_equal(yard_ops_cpu.upload(streams[0], memory, "abc", 3, NULL), YARD_OK);
    assert_int_equal(yard_ops_cpu.download(streams[0], out, memory, 3, NULL), YARD_OK);
    assert_memory_equal(out, "abc", 3);
    yard_ops_cpu.release(streams[0], memory);
    yard_ops_cpu.release(streams[0], NULL);
    assert_int_equal(yard_ops_cpu.check(streams[0], NULL), YARD_OK);
    assert_int_equal(yard_ops_cpu.capture_begin(streams[0], NULL), YARD_ENOTSUP);
    assert_int_equal(yard_ops_cpu.capture_end(&graph, streams[0], NULL), YARD_ENOTSUP);
    assert_int_equal(yard_ops_cpu.replay(streams[0], graph, NULL, NULL), YARD_ENOTSUP);
    yard_ops_cpu.release_graph(streams[0], NULL);
    close_variants(streams, n_streams);
}

struct head_shape {
    uint32_t n_heads, nope, v, rank;
};

/* What the product reads for one head: x as it is, or quantised from the head's first element. */
static void head_input(const yard_head_linear_args *a, uint32_t row, uint32_t h, uint32_t n_in,
                       double *x)
{
    for (uint32_t k = 0; k < n_in; k += YARD_GROUP) {
        const uint32_t end = k + YARD_GROUP < n_in ? k + YARD_GROUP : n_in;
        float amax = 0, scale;

        for (uint32_t i = k; i < end; i++) {
            x[i] = rows_value(a->x, row, (size_t)h * a->x_head_stride + i);
            amax = fabs(x[i]) > (double)amax ? fabsf((float)x[i]) : amax;
        }
        if (!a->quantise)
            continue;
        scale = amax / 448.0f;
        for (uint32_t i = k; i < end; i++)
            x[i] = (double)yard_f32_from_e4m3(yard_e4m3_from_f32((float)x[i] * (1.0f / scale))) *
                   (double)scale;
    }
}

static void check_heads(uint64_t seed, const yard_head_linear_args *a, yard_rows y, uint32_t n_rows)
{
    const uint32_t n_in = a->transposed ? a->head_rows : a->w.cols;
    const uint32_t n_out = a->transposed ? a->w.cols : a->head_rows;
    double x[1024];

    for (uint32_t i = 0; i < n_rows; i++)
        for (uint32_t h = 0; h < a->n_heads; h++) {
            head_input(a, i, h, n_in, x);
            for (uint32_t o = 0; o < n_out; o++) {
                const uint32_t first = h * a->head_stride + a->head_offset;
                const size_t col = (size_t)h * a->y_head_stride + o;
                double want = 0, size = 0;

                if (!a->row_mask[i]) {
                    assert_true(isnan(rows_value(y, i, col))); /* poisoned, untouched */
                    continue;
                }
                for (uint32_t k = 0; k < n_in; k++) {
                    const double w = a->transposed ? matrix_value(&a->w, first + k, o)
                                                   : matrix_value(&a->w, first + o, k);
                    want += x[k] * w;
                    size += fabs(x[k] * w);
                }
                assert_close("head_linear", seed, y.dtype, rows_value(y, i, col), want, size);
            }
        }
}

static void one_head_linear(yard_stream *streams, uint32_t n_streams, uint64_t seed,
                            struct head_shape s, bool transposed, yard_dtype w_type)
{
    enum { ROWS = 37 };
    rng r = { seed };
    const int32_t n_rows = ROWS;
    const uint32_t head_rows = s.nope + s.v;
    const random_matrix w =
        make_matrix(&r, w_type, s.n_heads * head_rows, s.rank, transposed ? 0 : 64, 0, 128);
    const uint32_t in = transposed ? s.nope + 8 : s.rank, out = transposed ? s.rank : s.v;
    const bool quantise = w_type == YARD_FP8_E4M3 && seed % 2;
    const yard_rows x = random_rows(&r, YARD_BF16, ROWS, s.n_heads * in);
    uint8_t mask[ROWS];
    yard_rows y[MAX_VARIANTS];
    yard_head_linear_args a = { .n_rows = &n_rows,
                                .row_mask = mask,
                                .n_heads = s.n_heads,
                                .head_rows = transposed ? s.nope : s.v,
                                .head_stride = head_rows,
                                .head_offset = transposed ? 0 : s.nope,
                                .transposed = transposed,
                                .quantise = quantise,
                                .w = w.m,
                                .x = x,
                                .x_head_stride = in,
                                .y_head_stride = out };

    for (int i = 0; i < ROWS; i++)
        mask[i] = rng_below(&r, 3) > 0;
    for (uint32_t v = 0; v < n_streams; v++) {
        y[v] = random_rows(&r, YARD_BF16, ROWS, s.n_heads * out);
        poison(y[v], ROWS);
        a.y = y[v];
        yard_ops_cpu.head_linear(streams[v], &a);
        assert_memory_equal(y[v].data, y[0].data, (size_t)ROWS * s.n_heads * out * 2);
    }
    check_heads(seed, &a, y[0], ROWS);
    for (uint32_t v = 0; v < n_streams; v++)
        free_rows(y[v]);
    free_rows(x);
    free_matrix(w);
}

static void head_linear(void **state)
{
    static const struct head_shape shapes[] = {
        { 4, 64, 64, 128 },   /* the demo's: a block of rows is one head */
        { 2, 128, 128, 512 }, /* DeepSeek-V3's */
        { 3, 192, 256, 512 }, /* heads that straddle blocks */
        { 3, 40, 24, 72 },    /* nothing is a multiple of anything */
    };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_product_variants(streams);

    (void)state;
    for (size_t s = 0; s < 4; s++)
        for (uint64_t seed = 1; seed <= 4; seed++)
            one_head_linear(streams, n, seed + 10 * s, shapes[s], seed > 2,
                            seed % 2 || s == 0 ? YARD_FP8_E4M3 : YARD_BF16);
    close_variants(streams, n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear),
        cmocka_unit_test(long_rows),
        cmocka_unit_test(extremes),
        cmocka_unit_test(padded_rows),
        cmocka_unit_test(every_code),
        cmocka_unit_test(few_rows_of_codes),
        cmocka_unit_test(nan_among_codes),
        cmocka_unit_test(amx_is_near),
        cmocka_unit_test(an_unknown_variant_is_refused),
        cmocka_unit_test(rows_are_independent),
        cmocka_unit_test(grouped_linear),
        cmocka_unit_test(grouped_layouts),
        cmocka_unit_test(table),
        cmocka_unit_test(head_linear),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
