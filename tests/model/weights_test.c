/* Binding: the demo's tensors in their places, and each way a checkpoint can be wrong.
 * ctest: sanitize */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "failing_alloc.h"
#include "small_checkpoint.h"

static void demo_places(void **state)
{
    static const uint8_t kv_a[4] = { 0x62, 0xe1, 0xed, 0x66 };
    static const uint8_t kv_a_scale[4] = { 0xda, 0xdd, 0x49, 0x3b };
    static const uint8_t bias[4] = { 0xb8, 0x9d, 0x64, 0x3e };
    static const uint8_t down[4] = { 0x54, 0xed, 0x6b, 0x74 };
    static const uint8_t head_norm[4] = { 0x74, 0x40, 0x74, 0x40 };
    yard_model_config c;
    yard_weights *w = NULL;
    const yard_layer_weights *l;

    (void)state;
    assert_int_equal(yard_model_config_load(&c, "models/demo", NULL, NULL), YARD_OK);
    assert_int_equal(yard_weights_load(&w, "models/demo", &c, NULL, 2, NULL, NULL), YARD_OK);
    l = &w->layers[0];
    assert_false(l->is_moe);
    assert_int_equal(l->attention.kv_a.dtype, YARD_FP8_E4M3);
    assert_int_equal(l->attention.kv_a.rows, 160);
    assert_int_equal(l->attention.kv_a.cols, 256);
    assert_int_equal(l->attention.kv_a.ld, 256);
    assert_int_equal(l->attention.kv_a.scale_ld, 2);
    assert_int_equal(l->attention.kv_a.block_rows, 128);
    assert_memory_equal(l->attention.kv_a.data, kv_a, 4);
    assert_memory_equal(l->attention.kv_a.scale, kv_a_scale, 4);
    assert_int_equal(l->dense.down.cols, 768);
    assert_memory_equal(w->layers[3].moe.down[23].data, down, 4);
    assert_int_equal(w->layers[3].moe.shared.gate.rows, 128);
    assert_memory_equal(w->layers[5].moe.bias, bias, 4);
    assert_int_equal(w->layers[5].moe.router.rows, 24);
    assert_int_equal(w->n_mtp, 1);
    assert_true(w->mtp[0].layer.is_moe);
    assert_int_equal(w->mtp[0].eh_proj.cols, 512);
    assert_memory_equal(w->mtp[0].head_norm.data, head_norm, 4);
    assert_int_equal(w->final_norm.dtype, YARD_BF16);
    assert_int_equal(w->final_norm.n, 256);
    yard_weights_free(w);
    yard_weights_free(NULL);
}

static void make_small(char dir[64], const yard_model_config *c)
{
    const yard_synth_options options = { .seed = 1, .n_threads = 1 };

    snprintf(dir, 64, "/tmp/yard-weights-XXXXXX");
    assert_non_null(mkdtemp(dir));
    assert_int_equal(yard_synth_write(dir, c, &options, NULL, NULL), YARD_OK);
}

/* Loads, wants this message (after "DIR: " where it begins with '@'), removes the directory. */
static void expect_refusal(const char *dir, const yard_model_config *c, const char *message)
{
    yard_weights *w = NULL;
    yard_error err = { 0 };
    char want[YARD_ERROR_MESSAGE_BYTES];

    if (message[0] == '@')
        snprintf(want, sizeof(want), "%s: %s", dir, message + 1);
    else
        snprintf(want, sizeof(want), "%s: %s", small_shard, message);
    assert_int_equal(yard_weights_load(&w, dir, c, NULL, 2, NULL, &err), YARD_EFORMAT);
    assert_string_equal(err.message, want);
    assert_null(w);
    small_remove(dir);
}

static void bad_dtypes_and_shapes(void **state)
{
    static const struct {
        const char *tensor, *dtype, *shape, *message;
    } cases[] = {
        { "model.layers.1.mlp.gate.e_score_correction_bias", "\"F8_E4M3\"", "[16]",
          "tensor 'model.layers.1.mlp.gate.e_score_correction_bias': dtype: want f32, bf16 or f16, "
          "found fp8_e4m3" },
        { "model.norm.weight", "\"F8_E4M3\"", "[320]",
          "tensor 'model.norm.weight': dtype: want f32, bf16 or f16, found fp8_e4m3" },
        { "lm_head.weight", NULL, "[160, 96]",
          "tensor 'lm_head.weight': shape: want [96, 160], found [160, 96]" },
        { "lm_head.weight", NULL, "[15360]",
          "tensor 'lm_head.weight': shape: want [96, 160], found [15360]" },
        { "model.norm.weight", NULL, "[1, 160]",
          "tensor 'model.norm.weight': shape: want [160], found [1, 160]" },
        { "model.layers.0.mlp.up_proj.weight", NULL, "[160, 200]",
          "tensor 'model.layers.0.mlp.up_proj.weight': shape: want [200, 160], found [160, 200]" },
        { "model.layers.0.mlp.up_proj.weight_scale_inv", NULL, "[4, 1]",
          "tensor 'model.layers.0.mlp.up_proj.weight_scale_inv': shape: want [2, 2], found [4, "
          "1]" },
        { "model.layers.0.mlp.up_proj.weight_scale_inv", "\"BF16\"", "[2, 4]",
          "tensor 'model.layers.0.mlp.up_proj.weight_scale_inv': dtype: want f32, found bf16" },
    };
    const yard_model_config c = small_config();
    char dir[64];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        make_small(dir, &c);
        small_retype(dir, cases[i].tensor, cases[i].dtype, cases[i].shape);
        expect_refusal(dir, &c, cases[i].message);
    }
}

static void missing_and_surplus(void **state)
{
    yard_model_config c = small_config();
    char dir[64];

    (void)state;
    make_small(dir, &c);
    small_rename(dir, "model.norm.weight", "model.narm.weight");
    expect_refusal(dir, &c, "@tensor 'model.norm.weight': missing");

    make_small(dir, &c);
    small_rename(dir, "model.layers.0.mlp.up_proj.weight_scale_inv", "x");
    expect_refusal(dir, &c, "@tensor 'model.layers.0.mlp.up_proj.weight_scale_inv': missing");

    make_small(dir, &c);
    c.n_mtp = 0;
    expect_refusal(dir, &c,
                   "tensor 'model.layers.2.mlp.experts.0.down_proj.weight_scale_inv': surplus: "
                   "nothing in config.json asks for it (52 such tensors in all)");
    make_small(dir, &c);
    c.n_mtp = 1;
    expect_refusal(dir, &c, "@tensor 'model.layers.2.embed_tokens.weight': missing");

    c = small_config();
    make_small(dir, &c);
    c.fp8 = false;
    expect_refusal(dir, &c,
                   "tensor 'model.layers.0.self_attn.q_a_proj.weight': dtype: want f32, bf16 or "
                   "f16, found fp8_e4m3");
}

static void bad_values(void **state)
{
    static const uint8_t fp8_nan[1] = { 0x7f }, fp8_minus_nan[1] = { 0xff };
    static const uint8_t bf16_infinity[2] = { 0x80, 0x7f }, bf16_nan[2] = { 0xc1, 0xff };
    static const float zero = 0, minus_zero = -0.0f, minus = -1, infinity = INFINITY, nan = NAN;
    static const struct {
        const char *tensor;
        size_t byte_at;
        const void *value;
        size_t n;
        const char *message; /* after the tensor's name */
    } cases[] = {
        { "model.layers.1.mlp.experts.3.down_proj.weight", 0, fp8_nan, 1,
          "row 0, column 0: want a finite fp8_e4m3, found NaN" },
        { "model.layers.1.mlp.experts.3.down_proj.weight", 72 * 159 + 71, fp8_minus_nan, 1,
          "row 159, column 71: want a finite fp8_e4m3, found NaN" },
        { "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 5 * 160 + 3, fp8_nan, 1,
          "row 5, column 3: want a finite fp8_e4m3, found NaN" },
        { "model.embed_tokens.weight", 2 * (160 * 95 + 159), bf16_infinity, 2,
          "row 95, column 159: want a finite bf16, found inf" },
        { "model.norm.weight", 2 * 7, bf16_nan, 2,
          "row 0, column 7: want a finite bf16, found NaN" },
        { "model.layers.1.mlp.gate.e_score_correction_bias", 4, &infinity, 4,
          "row 0, column 1: want a finite f32, found inf" },
        { "model.layers.0.mlp.up_proj.weight_scale_inv", 12, &zero, 4,
          "block [1, 1]: want a finite scale above 0, found 0" },
        { "model.layers.0.mlp.up_proj.weight_scale_inv", 4, &minus_zero, 4,
          "block [0, 1]: want a finite scale above 0, found -0" },
        { "model.layers.0.mlp.up_proj.weight_scale_inv", 0, &minus, 4,
          "block [0, 0]: want a finite scale above 0, found -1" },
        { "model.layers.0.mlp.up_proj.weight_scale_inv", 8, &infinity, 4,
          "block [1, 0]: want a finite scale above 0, found inf" },
        { "model.layers.0.mlp.up_proj.weight_scale_inv", 8, &nan, 4,
          "block [1, 0]: want a finite scale above 0, found NaN" },
    };
    const yard_model_config c = small_config();
    char dir[64], message[300];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        make_small(dir, &c);
        small_poke(dir, cases[i].tensor, cases[i].byte_at, cases[i].value, cases[i].n);
        snprintf(message, sizeof(message), "tensor '%s': %s", cases[i].tensor, cases[i].message);
        expect_refusal(dir, &c, message);
    }
}

/* Every code at every place of a tensor: only the two NaN codes are refused. */
static void every_fp8_code(void **state)
{
    static const char tensor[] = "model.layers.0.self_attn.q_a_proj.weight"; /* 64 x 160 */
    const yard_model_config c = small_config();
    char dir[64];
    yard_weights *w = NULL;

    (void)state;
    make_small(dir, &c);
    for (int code = 0; code < 256; code++) {
        const uint8_t value = (uint8_t)code;
        const bool nan = (code & 0x7f) == 0x7f;
        const yard_status want = nan ? YARD_EFORMAT : YARD_OK;
        small_poke(dir, tensor, (size_t)code * 37 % (64 * 160), &value, 1);
        assert_int_equal(yard_weights_load(&w, dir, &c, NULL, 1, NULL, NULL), want);
        if (nan)
            small_poke(dir, tensor, (size_t)code * 37 % (64 * 160), "", 1);
        else
            yard_weights_free(w);
    }
    small_remove(dir);
}

static void accepted_variants(void **state)
{
    yard_model_config c = small_config();
    yard_weights *w = NULL;
    char dir[64];

    (void)state;
    /* bf16 throughout, no q rank, head tied, blocks of 64 rows */
    c.fp8 = false;
    c.q_rank = 0;
    c.tied_embedding = true;
    c.n_shared_experts = 0;
    make_small(dir, &c);
    assert_int_equal(yard_weights_load(&w, dir, &c, NULL, 1, NULL, NULL), YARD_OK);
    assert_null(w->layers[0].attention.q_a.data);
    assert_int_equal(w->layers[0].attention.q_b.cols, 160);
    assert_int_equal(w->layers[0].attention.q_b.dtype, YARD_BF16);
    assert_null(w->layers[1].moe.shared.gate.data);
    assert_ptr_equal(w->head.data, w->embed.data);
    yard_weights_free(w);
    small_remove(dir);

    c = small_config();
    c.block_rows = 64;
    make_small(dir, &c);
    assert_int_equal(yard_weights_load(&w, dir, &c, NULL, 1, NULL, NULL), YARD_OK);
    assert_int_equal(w->layers[0].dense.gate.block_rows, 64);
    yard_weights_free(w);
    small_remove(dir);
}

/* F16 norms become F32; 0x3f80, BF16's 1, is 1.875 in F16. */
static void f16_norms(void **state)
{
    const yard_model_config c = small_config();
    const uint16_t one = 0x3f80;
    yard_weights *w = NULL;
    char dir[64];

    (void)state;
    make_small(dir, &c);
    small_poke(dir, "model.norm.weight", 6, &one, 2);
    small_retype(dir, "model.norm.weight", "\"F16\"", NULL);
    assert_int_equal(yard_weights_load(&w, dir, &c, NULL, 1, NULL, NULL), YARD_OK);
    assert_int_equal(w->final_norm.dtype, YARD_F32);
    assert_true(((const float *)w->final_norm.data)[3] == 1.875f);
    yard_weights_free(w);
    small_remove(dir);
}

/* A table that follows from config.json is not surplus. */
static void derived_table(void **state)
{
    yard_model_config c = small_config();
    char dir[64];
    yard_weights *w = NULL;

    (void)state;
    make_small(dir, &c);
    small_rename(dir, "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq");
    c.tied_embedding = true;
    assert_int_equal(yard_weights_load(&w, dir, &c, NULL, 1, NULL, NULL), YARD_OK);
    yard_weights_free(w);
    small_remove(dir);
}

#if FAILING_ALLOC
/* Fails each allocation of a load in turn, one thread: an error every time, and nothing is lost.
 * Two are forgiven by those who make them: qsort goes on without its buffer, and Jansson drops a
 * letter of a name, which is then not found. */
static void every_allocation_may_fail(void **state)
{
    yard_model_config c = small_config();
    uint32_t n_no_memory = 0;
    char dir[64];

    (void)state;
    make_small(dir, &c);
    small_retype(dir, "model.norm.weight", "\"F16\"", NULL); /* the one that is converted */
    for (fail_at = 1; n_blocks >= fail_at - 1; fail_at++) {
        yard_weights *w = NULL;
        yard_error err = { 0 };
        yard_status st;
        n_blocks = n_live = 0;
        counting = true;
        st = yard_model_config_load(&c, dir, NULL, &err);
        if (!st)
            st = yard_weights_load(&w, dir, &c, NULL, 1, NULL, &err);
        yard_weights_free(w);
        counting = false;
        assert_int_equal(n_live, 0);
        assert_int_equal(st, err.status);
        assert_true(st == YARD_OK || st == YARD_ENOMEM || st == YARD_EFORMAT);
        n_no_memory += st == YARD_ENOMEM;
    }
    assert_true(fail_at > 1000);
    assert_true(n_no_memory > 1000);
    small_remove(dir);
}
#else
static void every_allocation_may_fail(void **state)
{
    (void)state;
    skip();
}
#endif

struct progress {
    uint64_t last, total;
    uint32_t n;
};

static void keep_progress(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    struct progress *p = ctx;

    assert_string_equal(what, "weights");
    assert_true(done > p->last && done <= total);
    p->last = done;
    p->total = total;
    p->n++;
}

static void progress_ends_at_the_total(void **state)
{
    struct progress p = { 0 };
    const yard_notify notify = { .progress = keep_progress, .ctx = &p };
    yard_model_config c;
    yard_weights *w = NULL;

    (void)state;
    assert_int_equal(yard_model_config_load(&c, "models/demo", NULL, NULL), YARD_OK);
    assert_int_equal(yard_weights_load(&w, "models/demo", &c, NULL, 2, &notify, NULL), YARD_OK);
    assert_true(p.n > 0);
    assert_int_equal(p.last, p.total);
    assert_int_equal(p.total, 24806588); /* total_size of the index */
    yard_weights_free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(demo_places),
        cmocka_unit_test(bad_dtypes_and_shapes),
        cmocka_unit_test(missing_and_surplus),
        cmocka_unit_test(bad_values),
        cmocka_unit_test(every_fp8_code),
        cmocka_unit_test(accepted_variants),
        cmocka_unit_test(f16_norms),
        cmocka_unit_test(derived_table),
        cmocka_unit_test(every_allocation_may_fail),
        cmocka_unit_test(progress_ends_at_the_total),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
