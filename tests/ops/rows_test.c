/* Row operations and routing: against double precision or their definition in words, every variant
 * bit for bit. ctest: sanitize */
#include "ops/ops_test.h"

#include "ops/cpu/cpu.h"

enum { ROWS = 13 };

static yard_out make_out(rng *r, yard_dtype plain, uint32_t n_cols, bool quantised)
{
    yard_out y = { .plain = random_rows(r, plain, ROWS, n_cols) };

    poison(y.plain, ROWS);
    if (quantised) {
        y.quant = random_rows(r, YARD_FP8_E4M3, ROWS, n_cols);
        poison(y.quant, ROWS);
    }
    return y;
}

static void free_out(yard_out y)
{
    free_rows(y.plain);
    free_rows(y.quant);
}

static void assert_same_out(yard_out a, yard_out b, uint32_t n_cols)
{
    assert_memory_equal(a.plain.data, b.plain.data,
                        (size_t)ROWS * n_cols * yard_dtype_bytes(a.plain.dtype));
    if (!a.quant.data)
        return;
    assert_memory_equal(a.quant.data, b.quant.data, (size_t)ROWS * n_cols);
    assert_memory_equal(a.quant.scale, b.quant.scale,
                        (size_t)ROWS * yard_group_count(n_cols) * sizeof(float));
}

/* The rule, word by word: scale = amax / 448, 1 for amax 0, a power of two not below it for ue8m0;
 * code = nearest even of x * (1 / scale). */
static void check_quantised(yard_out y, uint32_t n_cols, bool ue8m0)
{
    for (uint32_t i = 0; i < ROWS; i++)
        for (uint32_t k = 0; k < n_cols; k += YARD_GROUP) {
            const uint32_t end = k + YARD_GROUP < n_cols ? k + YARD_GROUP : n_cols;
            const float got = y.quant.scale[i * yard_group_count(n_cols) + k / YARD_GROUP];
            float amax = 0, want;

            for (uint32_t c = k; c < end; c++)
                amax = fmaxf(amax, fabsf(yard_bf16_round((float)rows_value(y.plain, i, c))));
            want = amax == 0 ? 1.0f : amax / 448.0f;
            if (ue8m0 && amax != 0)
                want = exp2f(ceilf(log2f(want)));
            assert_true(got == want);
            for (uint32_t c = k; c < end; c++) {
                const float x = yard_bf16_round((float)rows_value(y.plain, i, c));
                assert_int_equal(((uint8_t *)y.quant.data)[i * n_cols + c],
                                 yard_e4m3_from_f32(x * (1.0f / want)));
            }
        }
}

static void norm(void **state)
{
    static const uint32_t widths[] = { 1, 5, 8, 100, 128, 130, 256, 1000 };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_variants(streams);
    const int32_t n_rows = ROWS;

    (void)state;
    for (size_t i = 0; i < sizeof(widths) / sizeof(widths[0]); i++) {
        const uint32_t cols = widths[i];
        const bool ue8m0 = i % 2;
        rng r = { 50 + i };
        yard_rows x = random_rows(&r, YARD_F32, ROWS, cols);
        const yard_rows before = random_rows(&r, YARD_F32, ROWS, cols);
        const yard_rows add = random_rows(&r, i % 3 ? YARD_BF16 : YARD_F32, ROWS, cols);
        const yard_rows weight = random_rows(&r, YARD_BF16, 1, cols);
        yard_out y[MAX_VARIANTS];

        memset((float *)x.data + cols, 0, cols * sizeof(float)); /* a row of zeros */
        memset((uint8_t *)add.data + cols * yard_dtype_bytes(add.dtype), 0,
               cols * yard_dtype_bytes(add.dtype));
        memcpy(before.data, x.data, (size_t)ROWS * cols * sizeof(float));
        for (uint32_t v = 0; v < n; v++) {
            memcpy(x.data, before.data, (size_t)ROWS * cols * sizeof(float));
            y[v] = make_out(&r, YARD_F32, cols, true);
            yard_ops_cpu.rms_norm_quant(streams[v],
                                        &(yard_rms_norm_args){ .n_rows = &n_rows,
                                                               .n_cols = cols,
                                                               .x = x,
                                                               .add = add,
                                                               .weight_dtype = YARD_BF16,
                                                               .weight = weight.data,
                                                               .eps = 1e-6f,
                                                               .ue8m0 = ue8m0,
                                                               .y = y[v] });
            assert_same_out(y[v], y[0], cols);
        }
        check_quantised(y[0], cols, ue8m0);
        for (uint32_t row = 0; row < ROWS; row++) {
            double squares = 0;
            for (uint32_t c = 0; c < cols; c++) {
                const double sum = rows_value(before, row, c) + rows_value(add, row, c);
                assert_close("residual", i, YARD_F32, rows_value(x, row, c), sum, 1);
                squares += sum * sum;
            }
            for (uint32_t c = 0; c < cols; c++) {
                const double want =
                    rows_value(x, row, c) / sqrt(squares / cols + 1e-6) * rows_value(weight, 0, c);
                assert_close("norm", i, YARD_F32, rows_value(y[0].plain, row, c), want, fabs(want));
            }
        }
        for (uint32_t v = 0; v < n; v++)
            free_out(y[v]);
        free_rows(x);
        free_rows(before);
        free_rows(add);
        free_rows(weight);
    }
    close_variants(streams, n);
}

static void silu(void **state)
{
    static const uint32_t widths[] = { 1, 7, 128, 200, 500 };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_variants(streams);
    const int32_t n_rows = ROWS;

    (void)state;
    for (size_t i = 0; i < sizeof(widths) / sizeof(widths[0]); i++) {
        const uint32_t cols = widths[i];
        rng r = { 70 + i };
        const yard_rows gate_up = random_rows(&r, YARD_F32, ROWS, 2 * cols);
        yard_out y[MAX_VARIANTS];

        ((float *)gate_up.data)[0] = -1000.0f; /* where exp overflows */
        for (uint32_t v = 0; v < n; v++) {
            y[v] = make_out(&r, YARD_F32, cols, true);
            yard_ops_cpu.silu_mul_quant(
                streams[v], &(yard_silu_mul_args){
                                .n_rows = &n_rows, .n_cols = cols, .gate_up = gate_up, .y = y[v] });
            assert_same_out(y[v], y[0], cols);
        }
        check_quantised(y[0], cols, false);
        for (uint32_t row = 0; row < ROWS; row++)
            for (uint32_t c = 0; c < cols; c++) {
                const double gate = rows_value(gate_up, row, c);
                const double want = gate / (1 + exp(-gate)) * rows_value(gate_up, row, cols + c);
                assert_close("silu", i, YARD_F32, rows_value(y[0].plain, row, c), want,
                             fabs(want) + 1e-30);
            }
        for (uint32_t v = 0; v < n; v++)
            free_out(y[v]);
        free_rows(gate_up);
    }
    close_variants(streams, n);
}

/* Values that meet every branch of the conversion: zeros, subnormal scales, huge ones. */
static void quantise_extremes(void **state)
{
    static const float sizes[] = { 0.0f,   1e-45f, 1e-40f, 1e-38f, 1e-36f, 1e-30f,
                                   1e-10f, 1.0f,   448.0f, 1e10f,  3e38f };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_variants(streams);
    const int32_t n_rows = ROWS;

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        rng r = { 90 + i };
        const uint32_t cols = 300;
        const yard_rows x = random_rows(&r, YARD_F32, ROWS, cols);
        yard_rows y[MAX_VARIANTS];

        for (uint32_t c = 0; c < ROWS * cols; c++)
            ((float *)x.data)[c] *= c % 5 ? sizes[i] / 4.0f : 0.0f;
        for (uint32_t v = 0; v < n; v++) {
            y[v] = random_rows(&r, YARD_FP8_E4M3, ROWS, cols);
            poison(y[v], ROWS);
            yard_ops_cpu.quantise(
                streams[v],
                &(yard_quantise_args){
                    .n_rows = &n_rows, .n_cols = cols, .x = x, .ue8m0 = i % 2, .y = y[v] });
            assert_memory_equal(y[v].data, y[0].data, ROWS * cols);
            assert_memory_equal(y[v].scale, y[0].scale,
                                ROWS * yard_group_count(cols) * sizeof(float));
        }
        for (uint32_t c = 0; c < ROWS * cols; c++) {
            const uint8_t code = ((uint8_t *)y[0].data)[c];
            assert_int_not_equal(code & 0x7f, 0x7f);
            if (((float *)x.data)[c] == 0.0f)
                assert_int_equal(code & 0x7f, 0);
        }
        for (uint32_t v = 0; v < n; v++)
            free_rows(y[v]);
        free_rows(x);
    }
    close_variants(streams, n);
}

static void exponential(void **state)
{
    double worst = 0;

    (void)state;
    for (float x = -87.0f; x < 88.0f; x += 0.000731f) {
        const double want = exp((double)x), error = fabs((double)yard_cpu_exp(x) / want - 1);
        worst = error > worst ? error : worst;
    }
    assert_true(worst < 3e-7);
    assert_true(yard_cpu_exp(0.0f) == 1.0f);
    assert_true(yard_cpu_exp(-INFINITY) == 0.0f);
    assert_true(yard_cpu_exp(-90.0f) == 0.0f);
    assert_true(isnan(yard_cpu_exp(NAN)));
}

/* The choice by sorting: groups by value, then experts by choice, lower index first. */
static void score_naively(const yard_moe_route_args *a, uint32_t row, float *score)
{
    const float *logits = a->logits + row * a->n_experts;
    float largest = -INFINITY, sum = 0;

    for (uint32_t e = 0; e < a->n_experts; e++)
        largest = fmaxf(largest, logits[e]);
    for (uint32_t e = 0; e < a->n_experts; e++)
        sum += yard_cpu_exp(logits[e] - largest);
    for (uint32_t e = 0; e < a->n_experts; e++)
        score[e] = a->score == YARD_SCORE_SOFTMAX ? yard_cpu_exp(logits[e] - largest) / sum
                                                  : 1.0f / (1.0f + yard_cpu_exp(-logits[e]));
}

static void route_naively(const yard_moe_route_args *a, uint32_t row, bool *chosen, float *score)
{
    const uint32_t size = a->n_experts / a->n_groups;
    double choice[64], value[64];
    bool group_in[64] = { false };

    score_naively(a, row, score);
    for (uint32_t e = 0; e < a->n_experts; e++)
        choice[e] = (double)(score[e] + (a->bias ? a->bias[e] : 0.0f));
    for (uint32_t g = 0; g < a->n_groups; g++) {
        double first = -INFINITY, second = -INFINITY;
        for (uint32_t i = g * size; i < (g + 1) * size; i++) {
            if (choice[i] > first) {
                second = first;
                first = choice[i];
            } else if (choice[i] > second) {
                second = choice[i];
            }
        }
        value[g] = size == 1 || a->group_value == YARD_GROUP_LARGEST
                       ? first
                       : (double)((float)first + (float)second);
    }
    for (uint32_t n = 0; n < a->top_groups; n++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t g = 0; g < a->n_groups; g++)
            if (!group_in[g] && (best == UINT32_MAX || value[g] > value[best]))
                best = g;
        group_in[best] = true;
    }
    memset(chosen, 0, a->n_experts * sizeof(*chosen));
    for (uint32_t n = 0; n < a->top_k; n++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t e = 0; e < a->n_experts; e++)
            if (group_in[e / size] && !chosen[e] &&
                (best == UINT32_MAX || choice[e] > choice[best]))
                best = e;
        chosen[best] = true;
    }
}

static void route(void **state)
{
    static const struct {
        uint32_t n_experts, top_k, n_groups, top_groups;
    } shapes[] = { { 24, 4, 4, 2 }, { 64, 8, 8, 4 }, { 64, 6, 1, 1 },
                   { 8, 2, 8, 3 },  { 3, 3, 1, 1 },  { 16, 4, 4, 1 } };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_variants(streams);
    const int32_t n_rows = ROWS;

    (void)state;
    for (uint32_t i = 0; i < 240; i++) {
        rng r = { 200 + i };
        float logits[ROWS * 64], bias[64], weight[ROWS * 8];
        int32_t expert[ROWS * 8];
        yard_moe_route_args a = { .n_rows = &n_rows,
                                  .n_experts = shapes[i % 6].n_experts,
                                  .top_k = shapes[i % 6].top_k,
                                  .n_groups = shapes[i % 6].n_groups,
                                  .top_groups = shapes[i % 6].top_groups,
                                  .score = i / 60 % 2 ? YARD_SCORE_SOFTMAX : YARD_SCORE_SIGMOID,
                                  .group_value =
                                      i < 120 ? YARD_GROUP_TWO_LARGEST : YARD_GROUP_LARGEST,
                                  .normalise = i % 3,
                                  .scale = 2.5f,
                                  .logits = logits,
                                  .bias = i % 2 ? bias : NULL,
                                  .expert = expert,
                                  .weight = weight };
        for (uint32_t e = 0; e < ROWS * 64; e++) /* few distinct values: many ties */
            logits[e] = i % 4 ? rng_float(&r) * 6 : (float)rng_below(&r, 3);
        for (uint32_t e = 0; e < 64; e++)
            bias[e] = i % 8 ? rng_float(&r) * 0.2f : 0.0f;
        yard_ops_cpu.moe_route(streams[i % n], &a);
        for (uint32_t row = 0; row < ROWS; row++) {
            bool chosen[64];
            float score[64];
            double sum = 0, weights = 0;

            route_naively(&a, row, chosen, score);
            for (uint32_t k = 0; k < a.top_k; k++) {
                const int32_t e = expert[row * a.top_k + k];
                assert_in_range(e, 0, a.n_experts - 1);
                assert_true(k == 0 || e > expert[row * a.top_k + k - 1]);
                if (!chosen[e])
                    fail_msg("seed %u row %u: expert %d is not among the best", 200 + i, row, e);
                sum += (double)score[e];
                weights += (double)weight[row * a.top_k + k];
            }
            assert_true(fabs(weights - 2.5 * (a.normalise ? 1 : sum)) < 1e-4);
        }
    }
    close_variants(streams, n);
}

static void scatter_and_gather(void **state)
{
    enum { TOKENS = 9, EXPERTS = 6, TOP_K = 3, COLS = 40 };
    yard_stream streams[MAX_VARIANTS];
    const uint32_t n = open_variants(streams);

    (void)state;
    for (int32_t n_tokens = 0; n_tokens <= TOKENS; n_tokens++) {
        rng r = { 300 + (uint64_t)n_tokens };
        const yard_rows x = random_rows(&r, YARD_FP8_E4M3, TOKENS, COLS);
        const yard_rows expert_x = random_rows(&r, YARD_FP8_E4M3, TOKENS * TOP_K, COLS);
        const yard_rows expert_y = random_rows(&r, YARD_BF16, TOKENS * TOP_K, COLS);
        int32_t expert[TOKENS * TOP_K], offset[EXPERTS + 1], row_index[TOKENS * TOP_K];
        int32_t row_choice[TOKENS * TOP_K];
        float weight[TOKENS * TOP_K], y[TOKENS * COLS];

        for (int i = 0; i < TOKENS * TOP_K; i++) {
            expert[i] = (int32_t)rng_below(&r, EXPERTS + 1) - 1; /* -1: skipped */
            weight[i] = rng_float(&r);
        }
        yard_ops_cpu.moe_scatter(streams[0], &(yard_moe_scatter_args){ .n_tokens = &n_tokens,
                                                                       .n_experts = EXPERTS,
                                                                       .top_k = TOP_K,
                                                                       .n_cols = COLS,
                                                                       .expert = expert,
                                                                       .x = x,
                                                                       .offset = offset,
                                                                       .row_index = row_index,
                                                                       .expert_x = expert_x,
                                                                       .row_choice = row_choice });
        for (int i = 0; i < n_tokens * TOP_K; i++) {
            if (expert[i] < 0) {
                assert_int_equal(row_index[i], -1);
                continue;
            }
            assert_in_range(row_index[i], offset[expert[i]], offset[expert[i] + 1] - 1);
            assert_int_equal(row_choice[row_index[i]], i);
            for (uint32_t c = 0; c < COLS; c++)
                assert_true(rows_value(expert_x, (size_t)row_index[i], c) ==
                            rows_value(x, (size_t)i / TOP_K, c));
        }
        for (uint32_t v = 0; v < n; v++) {
            yard_ops_cpu.moe_gather(streams[v], &(yard_moe_gather_args){ .n_tokens = &n_tokens,
                                                                         .top_k = TOP_K,
                                                                         .n_cols = COLS,
                                                                         .row_index = row_index,
                                                                         .weight = weight,
                                                                         .expert_y = expert_y,
                                                                         .y = y });
            for (int32_t t = 0; t < n_tokens; t++)
                for (uint32_t c = 0; c < COLS; c++) {
                    float want = 0;
                    for (int k = 0; k < TOP_K; k++)
                        if (row_index[t * TOP_K + k] >= 0)
                            want = fmaf(
                                (float)rows_value(expert_y, (size_t)row_index[t * TOP_K + k], c),
                                weight[t * TOP_K + k], want);
                    assert_true(y[t * COLS + (int32_t)c] == want);
                }
        }
        free_rows(x);
        free_rows(expert_x);
        free_rows(expert_y);
    }
    close_variants(streams, n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norm),
        cmocka_unit_test(silu),
        cmocka_unit_test(quantise_extremes),
        cmocka_unit_test(exponential),
        cmocka_unit_test(route),
        cmocka_unit_test(scatter_and_gather),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
