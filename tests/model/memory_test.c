/* Parameters and bytes per rank against the published figures of three models. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "model/model.h"

static yard_model_config deepseek_v3(void)
{
    yard_model_config c;

    assert_int_equal(yard_synth_dimensions(&c, "deepseek-v3", NULL), YARD_OK);
    c.n_mtp = 1;
    return c;
}

static void deepseek_v3_counts(void **state)
{
    const yard_model_config c = deepseek_v3();
    yard_param_count n;

    (void)state;
    yard_model_count_params(&c, &n);
    assert_int_equal(n.total, 671026419200);
    assert_int_equal(n.active, 36625618432);
    assert_int_equal(n.attention_per_layer, 187107328);
    assert_int_equal(n.expert, 44040192);
    assert_int_equal(n.shared_per_layer, 44040192);
    assert_int_equal(n.dense_mlp_per_layer, 396361728);
    assert_int_equal(n.router_per_layer, 1835008 + 256);
    assert_int_equal(n.embedding, 926679040);
    assert_int_equal(n.head, 926679040);
    /* 11,610,032,128 of matrices, two copies, seven norms and the biases */
    assert_int_equal(n.mtp, 11610032128 + 2 * 926679040 + 5 * 7168 + 256);
    assert_int_equal(yard_model_kv_bytes_per_token(&c, YARD_BF16), 70272);
    assert_int_equal(yard_model_kv_bytes_per_token(&c, YARD_FP8_E4M3), 40016);
}

static void other_models(void **state)
{
    yard_model_config c = deepseek_v3();
    yard_param_count n;

    (void)state;
    /* Kimi-K2 */
    c.n_dense_layers = 1;
    c.n_heads = 64;
    c.n_experts = 384;
    c.vocab = 163840;
    c.n_mtp = 0;
    yard_model_count_params(&c, &n);
    assert_int_equal(n.total, 1026408232448);
    assert_int_equal(n.active, 31687095808);
    assert_int_equal(n.mtp, 0);
    /* DeepSeek-V2-Lite: no q rank, two shared experts; it has no biases, 64 in each of 26 layers */
    c.n_layers = 27;
    c.hidden = 2048;
    c.n_heads = 16;
    c.q_rank = 0;
    c.dense_inter = 10944;
    c.expert_inter = 1408;
    c.n_experts = 64;
    c.n_shared_experts = 2;
    c.top_k = 6;
    c.vocab = 102400;
    yard_model_count_params(&c, &n);
    assert_int_equal(n.total, 15706484224 + 26 * 64);
    assert_int_equal(n.active, 2451435008 + 26 * 64);
    assert_int_equal(n.attention_per_layer, 13763072);
    assert_int_equal(yard_model_kv_bytes_per_token(&c, YARD_BF16), 31104);
    assert_int_equal(yard_model_kv_bytes_per_token(&c, YARD_FP8_E4M3), 27 * 656);
    c.tied_embedding = true;
    yard_model_count_params(&c, &n);
    assert_int_equal(n.total, 15706484224 + 26 * 64 - 102400 * 2048);
    assert_int_equal(n.active, 2451435008 + 26 * 64);
    assert_int_equal(n.head, 0);
}

/* In units of 10 MB, for EP 8, 16, .. 128 and TP 1, 2, 4, 8; published for kv_b whole on every
 * rank: what the rank does not have of it is added. */
static void deepseek_v3_ranks(void **state)
{
    static const int want[5][4] = {
        { 10084, 9551, 9285, 9151 }, { 5996, 5463, 5197, 5064 }, { 3952, 3419, 3153, 3020 },
        { 2930, 2397, 2131, 1998 },  { 2419, 1886, 1620, 1487 },
    };
    const yard_model_config c = deepseek_v3();
    const uint64_t kv_b = 61 * (uint64_t)(128 * 256 * 512 + 4 * 256 * 4);

    (void)state;
    for (uint32_t i = 0; i < 5; i++)
        for (uint32_t j = 0; j < 4; j++) {
            const yard_layout l = { 8u << i, (8u << i) >> j, 1u << j };
            for (uint32_t rank = 0; rank < l.ep; rank++) {
                yard_rank_memory m;
                assert_int_equal(yard_model_rank_memory(&c, l, rank, &m, NULL), YARD_OK);
                m.weight_bytes += kv_b - kv_b / l.tp;
                assert_int_equal((m.weight_bytes + 5000000) / 10000000, want[i][j]);
                assert_int_equal(m.dp_group, rank / l.tp);
                assert_int_equal(m.tp_slice, rank % l.tp);
                assert_int_equal(m.n_experts, 256 / l.ep);
                assert_int_equal(m.first_expert, rank * m.n_experts);
            }
        }
}

/* One rank holds what the files hold. */
static void demo_bytes(void **state)
{
    yard_model_config c;
    yard_checkpoint *ckpt = NULL;
    yard_rank_memory m;
    uint64_t mtp = 0, rest = 0;

    (void)state;
    assert_int_equal(yard_model_config_load(&c, "models/demo", NULL, NULL), YARD_OK);
    assert_int_equal(yard_checkpoint_open(&ckpt, "models/demo", NULL, NULL), YARD_OK);
    for (uint32_t i = 0; i < yard_checkpoint_tensor_count(ckpt); i++) {
        const yard_tensor *t = yard_checkpoint_tensor(ckpt, i);
        if (!strncmp(t->name, "model.layers.6.", 15))
            mtp += t->n_bytes;
        else
            rest += t->n_bytes;
    }
    yard_checkpoint_close(ckpt);
    assert_int_equal(yard_model_rank_memory(&c, (yard_layout){ 1, 1, 1 }, 0, &m, NULL), YARD_OK);
    assert_int_equal(m.weight_bytes, rest);
    assert_int_equal(m.mtp_weight_bytes, mtp);
}

/* Split parts of the demo add up: six blocks of the dense MLP over four ranks are 1, 2, 1, 2. */
static void uneven_dense_blocks(void **state)
{
    static const uint64_t block_bytes = 3 * (128 * 256 + 2 * 4);
    yard_model_config c;
    yard_rank_memory m[4];

    (void)state;
    assert_int_equal(yard_model_config_load(&c, "models/demo", NULL, NULL), YARD_OK);
    c.nope_dims = 96; /* heads of whole blocks, or slices would share some and their scales */
    c.v_dims = 32;
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(yard_model_rank_memory(&c, (yard_layout){ 4, 1, 4 }, i, &m[i], NULL),
                         YARD_OK);
    assert_int_equal(m[0].weight_bytes, m[2].weight_bytes);
    assert_int_equal(m[1].weight_bytes, m[3].weight_bytes);
    assert_int_equal(m[1].weight_bytes - m[0].weight_bytes, block_bytes);
}

static void sixteen_bit_checkpoints(void **state)
{
    yard_model_config c;
    yard_param_count n;
    yard_rank_memory m;

    (void)state;
    assert_int_equal(yard_model_config_load(&c, "models/demo", NULL, NULL), YARD_OK);
    c.fp8 = false;
    yard_model_count_params(&c, &n);
    assert_int_equal(yard_model_rank_memory(&c, (yard_layout){ 1, 1, 1 }, 0, &m, NULL), YARD_OK);
    /* correction biases are F32: two bytes more for each of 24 in 5 layers */
    assert_int_equal(m.weight_bytes, 2 * n.total + 2 * 24 * 5);
    assert_int_equal(m.mtp_weight_bytes, 2 * n.mtp + 2 * 24);
}

static void layouts_that_cannot_be(void **state)
{
    static const struct {
        yard_layout layout;
        const char *message;
    } cases[] = {
        { { 12, 12, 1 },
          "layout EP 12, DP 12, TP 1: 256 experts do not divide by EP 12; nearest: EP 8, DP 8, "
          "TP 1" },
        { { 8, 4, 4 },
          "layout EP 8, DP 4, TP 4: want EP = DP x TP, at least 1; nearest: EP 8, DP 2, TP 4" },
        { { 0, 0, 0 },
          "layout EP 0, DP 0, TP 0: want EP = DP x TP, at least 1; nearest: EP 1, DP 1, TP 1" },
        { { 256, 1, 256 },
          "layout EP 256, DP 1, TP 256: 128 heads do not divide by TP 256; nearest: EP 256, DP 2, "
          "TP 128" },
        { { UINT32_MAX, 65535, 65537 },
          "layout EP 4294967295, DP 65535, TP 65537: 256 experts do not divide by EP 4294967295; "
          "nearest: EP 256, DP 2, TP 128" },
    };
    yard_model_config c = deepseek_v3();
    yard_error err = { 0 };
    yard_rank_memory m;

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(yard_model_rank_memory(&c, cases[i].layout, 0, &m, &err), YARD_EINVAL);
        assert_string_equal(err.message, cases[i].message);
    }
    assert_int_equal(yard_model_rank_memory(&c, (yard_layout){ 8, 8, 1 }, 8, &m, &err),
                     YARD_EINVAL);
    assert_string_equal(err.message, "rank: want below EP 8, got 8");
    c.dense_inter = 130; /* two blocks */
    assert_int_equal(yard_model_rank_memory(&c, (yard_layout){ 4, 1, 4 }, 0, &m, &err),
                     YARD_EINVAL);
    assert_string_equal(err.message, "layout EP 4, DP 1, TP 4: the dense MLP has 2 blocks of 128 "
                                     "for TP 4; nearest: EP 4, DP 2, TP 2");
    c.n_dense_layers = 0;
    assert_int_equal(yard_model_rank_memory(&c, (yard_layout){ 4, 1, 4 }, 0, &m, &err), YARD_OK);
}

/* Four heads of 64: with TP 4 two ranks would share a group of 128 and its scale. */
static void cut_groups(void **state)
{
    const yard_layout l = { 4, 1, 4 };
    yard_model_config c;
    yard_error err = { 0 };

    (void)state;
    assert_int_equal(yard_model_config_load(&c, "models/demo", NULL, NULL), YARD_OK);
    assert_int_equal(yard_layout_check(&c, l, true, &err), YARD_OK);
    assert_int_equal(yard_layout_check(&c, l, false, &err), YARD_EINVAL);
    assert_string_equal(err.message,
                        "layout EP 4, DP 1, TP 4: TP 4 cuts the attention outputs, 4 heads of 64, "
                        "inside a group of 128 that has one scale (exact mode can); nearest: EP 4, "
                        "DP 2, TP 2");
    c.v_dims = 96; /* the second slice would lie in two groups */
    assert_int_equal(yard_layout_check(&c, l, true, &err), YARD_EINVAL);
    c.fp8 = false; /* no groups */
    assert_int_equal(yard_layout_check(&c, l, false, &err), YARD_OK);
}

/* What a model's creation will take: cache as the pages say, buffers that grow with rows. */
static void budgets(void **state)
{
    yard_model_options o = { .mtp = true,
                             .n_threads = 1,
                             .max_tokens = 64,
                             .max_seqs = 4,
                             .max_logits = 4,
                             .n_pages = 10,
                             .max_pages_per_seq = 4 };
    yard_model_budget one, two, cut;
    yard_model_config c;
    yard_rank_memory m;
    yard_error err = { 0 };

    (void)state;
    assert_int_equal(yard_model_config_load(&c, "models/demo", NULL, NULL), YARD_OK);
    assert_int_equal(yard_model_rank_memory(&c, (yard_layout){ 1, 1, 1 }, 0, &m, NULL), YARD_OK);
    assert_int_equal(yard_model_budget_of(&c, &o, &one, &err), YARD_OK);
    assert_int_equal(one.weight_bytes, m.weight_bytes + m.mtp_weight_bytes);
    assert_int_equal(one.cache_bytes, 7 * 10 * 64 * (128 + 32) * 2);
    assert_int_equal(one.heap_bytes, 0);
    assert_true(one.scratch_bytes > 64 * 4 * (256 * 3 + 3 * 128) && one.scratch_bytes < 20000000);
    o.layout = (yard_layout){ 2, 2, 1 };
    assert_int_equal(yard_model_budget_of(&c, &o, &two, &err), YARD_OK);
    assert_true(two.weight_bytes < one.weight_bytes && two.heap_bytes > 2 * 64 * 4 * 256);
    assert_int_equal(two.cache_bytes, one.cache_bytes);
    o.layout = (yard_layout){ 2, 1, 2 };
    o.mtp = false;
    assert_int_equal(yard_model_budget_of(&c, &o, &cut, &err), YARD_OK);
    assert_int_equal(cut.cache_bytes, 6 * 10 * 64 * (128 + 32) * 2); /* a copy each */
    /* the sum over the instance: two sets of two slots */
    assert_true(cut.heap_bytes > 2 * 2 * 64 * 256 * 4);
    o.rank = 2;
    assert_int_equal(yard_model_budget_of(&c, &o, &cut, &err), YARD_EINVAL);
    assert_string_equal(err.message, "rank: want below EP 2, got 2");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(deepseek_v3_counts),
        cmocka_unit_test(other_models),
        cmocka_unit_test(deepseek_v3_ranks),
        cmocka_unit_test(demo_bytes),
        cmocka_unit_test(uneven_dense_blocks),
        cmocka_unit_test(sixteen_bit_checkpoints),
        cmocka_unit_test(layouts_that_cannot_be),
        cmocka_unit_test(cut_groups),
        cmocka_unit_test(budgets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
