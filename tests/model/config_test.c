/* config.json and generation_config.json: the demo's values, every refusal by name.
 * ctest: sanitize */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "model/config.h"

static const char demo_path[] = "models/demo/config.json";

struct warnings {
    uint32_t n;
    char last[YARD_ERROR_MESSAGE_BYTES];
};

static void keep_warning(void *ctx, const char *line)
{
    struct warnings *w = ctx;

    w->n++;
    snprintf(w->last, sizeof(w->last), "%s", line);
}

static void demo_values(void **state)
{
    struct warnings warnings = { 0 };
    const yard_notify notify = { .warn = keep_warning, .ctx = &warnings };
    yard_model_config c;
    yard_error err = { 0 };

    (void)state;
    assert_int_equal(yard_model_config_load(&c, "models/demo", &notify, &err), YARD_OK);
    assert_int_equal(warnings.n, 0);
    assert_string_equal(c.family, "deepseek_v3");
    assert_int_equal(c.vocab, 3584);
    assert_int_equal(c.hidden, 256);
    assert_int_equal(c.n_layers, 6);
    assert_int_equal(c.n_dense_layers, 1);
    assert_int_equal(c.n_heads, 4);
    assert_int_equal(c.q_rank, 128);
    assert_int_equal(c.kv_rank, 128);
    assert_int_equal(c.nope_dims, 64);
    assert_int_equal(c.rope_dims, 32);
    assert_int_equal(c.v_dims, 64);
    assert_int_equal(c.dense_inter, 768);
    assert_int_equal(c.expert_inter, 128);
    assert_int_equal(c.n_experts, 24);
    assert_int_equal(c.n_shared_experts, 1);
    assert_int_equal(c.top_k, 4);
    assert_int_equal(c.n_groups, 4);
    assert_int_equal(c.top_groups, 2);
    assert_int_equal(c.max_positions, 4096);
    assert_int_equal(c.n_mtp, 1);
    assert_int_equal(c.bos, 0);
    assert_int_equal(c.n_eos, 1);
    assert_int_equal(c.eos[0], 1);
    assert_int_equal(c.block_rows, 128);
    assert_true(c.fp8 && !c.ue8m0 && c.normalise_topk && !c.tied_embedding);
    assert_true(c.mtp_reads_normed_hidden);
    assert_true(c.routed_scale == 2.5f && c.norm_eps == 1e-6f);
}

/* The values of numpy's double-precision computation in the training code's check. */
static void demo_rope(void **state)
{
    static const double want[16] = {
        1,
        0.562341325,
        0.316227766,
        0.158774947,
        0.0785714286,
        0.0381588756,
        0.0180701581,
        0.00825629726,
        0.00357142857,
        0.00140585331,
        0.000790569415,
        0.000444569853,
        0.00025,
        0.000140585331,
        7.90569415e-05,
        4.44569853e-05,
    };
    yard_model_config c;
    float inv_freq[16];

    (void)state;
    assert_int_equal(yard_model_config_load(&c, "models/demo", NULL, NULL), YARD_OK);
    yard_model_inv_freq(&c, inv_freq);
    for (int i = 0; i < 16; i++)
        assert_true(fabs(inv_freq[i] / want[i] - 1) < 1e-7);
    assert_true(fabs(yard_model_softmax_scale(&c) - 0.13232112898211337) < 1e-8);
    c.has_yarn = false;
    yard_model_inv_freq(&c, inv_freq);
    for (int i = 0; i < 16; i++)
        assert_true(fabs(inv_freq[i] * pow(10000, i / 16.0) - 1) < 1e-6);
    assert_true(fabs(yard_model_softmax_scale(&c) - 1 / sqrt(96)) < 1e-8);
}

/* The demo's config.json with one member (of the object `in`, or of the whole) set to value, or
 * removed for NULL; the text is malloc'd. */
static char *edit(const char *in, const char *key, const char *value)
{
    json_t *root = json_load_file(demo_path, 0, NULL);
    json_t *object = in ? json_object_get(root, in) : root;
    char *text;

    assert_non_null(object);
    if (value)
        assert_int_equal(json_object_set_new(object, key, json_loads(value, JSON_DECODE_ANY, NULL)),
                         0);
    else
        assert_int_equal(json_object_del(object, key), 0);
    text = json_dumps(root, 0);
    json_decref(root);
    return text;
}

static const char *const plain_keys[] = {
    "architectures",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "first_k_dense_replace",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "max_position_embeddings",
    "num_nextn_predict_layers",
    "norm_topk_prob",
    "routed_scaling_factor",
    "rms_norm_eps",
    "tie_word_embeddings",
    "hidden_act",
    "scoring_func",
    "topk_method",
    "rope_theta",
};

static void a_missing_field_is_refused_by_name(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(plain_keys) / sizeof(plain_keys[0]); i++) {
        char *text = edit(NULL, plain_keys[i], NULL);
        char want[128];
        yard_model_config c;
        yard_error err = { 0 };
        snprintf(want, sizeof(want), "config.json: %s: missing", plain_keys[i]);
        assert_int_equal(yard_model_config_parse(&c, text, strlen(text), "config.json", NULL, &err),
                         YARD_EFORMAT);
        assert_string_equal(err.message, want);
        free(text);
    }
}

static void bad_values(void **state)
{
    static const struct {
        const char *in, *key, *value;
        yard_status status;
        const char *message; /* after "config.json: " */
    } cases[] = {
        { NULL, "hidden_size", "\"256\"", YARD_EFORMAT,
          "hidden_size: want a whole number from 1 to 131072, found '256'" },
        { NULL, "hidden_size", "256.0", YARD_EFORMAT,
          "hidden_size: want a whole number from 1 to 131072, found 256.0" },
        { NULL, "hidden_size", "-1", YARD_EFORMAT,
          "hidden_size: want a whole number from 1 to 131072, found -1" },
        { NULL, "hidden_size", "null", YARD_EFORMAT,
          "hidden_size: want a whole number, found null" },
        { NULL, "vocab_size", "4294967296", YARD_EFORMAT,
          "vocab_size: want a whole number from 1 to 16777216, found 4294967296" },
        { NULL, "architectures", "[\"LlamaForCausalLM\"]", YARD_ENOTSUP,
          "architectures: only 'DeepseekV3ForCausalLM', 'DeepseekV2ForCausalLM' and "
          "'MixtralForCausalLM' are implemented, found 'LlamaForCausalLM'" },
        { NULL, "architectures", "[]", YARD_EFORMAT,
          "architectures: want a list of one name, found an array of 0" },
        { NULL, "model_type", "\"deepseek_v2\"", YARD_ENOTSUP,
          "model_type: of architecture 'DeepseekV3ForCausalLM' only 'deepseek_v3' and 'kimi_k2' "
          "are "
          "implemented, found 'deepseek_v2'" },
        { NULL, "hidden_act", "\"gelu\"", YARD_ENOTSUP,
          "hidden_act: only 'silu' is implemented, found 'gelu'" },
        { NULL, "attention_bias", "true", YARD_ENOTSUP,
          "attention_bias: only false is implemented, found true" },
        { NULL, "moe_layer_freq", "2", YARD_ENOTSUP,
          "moe_layer_freq: only 1 is implemented, found 2" },
        { NULL, "scoring_func", "\"softmax\"", YARD_ENOTSUP,
          "scoring_func: only 'sigmoid' is implemented, found 'softmax'" },
        { NULL, "topk_method", "\"greedy\"", YARD_ENOTSUP,
          "topk_method: only 'noaux_tc' is implemented, found 'greedy'" },
        { NULL, "norm_topk_prob", "1", YARD_EFORMAT,
          "norm_topk_prob: want true or false, found 1" },
        { NULL, "rms_norm_eps", "0", YARD_EFORMAT,
          "rms_norm_eps: want a number from 1e-30 to 1, found 0" },
        { NULL, "rms_norm_eps", "\"1e-6\"", YARD_EFORMAT,
          "rms_norm_eps: want a number from 1e-30 to 1, found '1e-6'" },
        { NULL, "n_group", "5", YARD_EFORMAT,
          "n_group: want a divisor of n_routed_experts 24, found 5" },
        { NULL, "topk_group", "5", YARD_EFORMAT, "topk_group: want at most n_group 4, found 5" },
        { NULL, "num_experts_per_tok", "13", YARD_EFORMAT,
          "num_experts_per_tok: want at most the 12 experts of topk_group groups, found 13" },
        { NULL, "num_key_value_heads", "2", YARD_ENOTSUP,
          "num_key_value_heads: want num_attention_heads 4, found 2" },
        { NULL, "qk_rope_head_dim", "33", YARD_EFORMAT,
          "qk_rope_head_dim: want an even number, found 33" },
        { NULL, "first_k_dense_replace", "7", YARD_EFORMAT,
          "first_k_dense_replace: want at most num_hidden_layers 6, found 7" },
        { NULL, "n_shared_experts", "4096", YARD_EFORMAT,
          "n_shared_experts: want at most 262144 rows in all, found 4096 of 128" },
        { NULL, "bos_token_id", "3584", YARD_EFORMAT,
          "bos_token_id: want a whole number from 0 to 3583, found 3584" },
        { NULL, "eos_token_id", "[1, 3584]", YARD_EFORMAT,
          "eos_token_id: want an id below vocab_size 3584 or a list of them, found 3584" },
        { NULL, "eos_token_id", "\"</s>\"", YARD_EFORMAT,
          "eos_token_id: want an id below vocab_size 3584 or a list of them, found '</s>'" },
        { NULL, "eos_token_id", "[1,2,3,4,5,6,7,8,9]", YARD_ENOTSUP,
          "eos_token_id: at most 8 ids are implemented" },
        { NULL, "rope_scaling", NULL, YARD_EFORMAT,
          "rope_scaling: missing (null when there is none)" },
        { NULL, "rope_scaling", "[]", YARD_EFORMAT, "rope_scaling: want an object or null" },
        { NULL, "rope_parameters", "{\"rope_type\":\"default\"}", YARD_EFORMAT,
          "rope_parameters: want this or rope_scaling, found both" },
        { "rope_scaling", "type", "\"linear\"", YARD_ENOTSUP,
          "rope_scaling.rope_type: only 'yarn' and 'default' are implemented, found 'linear'" },
        { "rope_scaling", "factor", NULL, YARD_EFORMAT, "rope_scaling.factor: missing" },
        { "rope_scaling", "beta_fast", NULL, YARD_EFORMAT, "rope_scaling.beta_fast: missing" },
        { "rope_scaling", "beta_fast", "0.5", YARD_EFORMAT,
          "rope_scaling.beta_fast: want at least beta_slow 1, found 0.5" },
        { "rope_scaling", "mscale", "0.707", YARD_ENOTSUP,
          "rope_scaling.mscale: only the value of mscale_all_dim (1) is implemented, found "
          "0.707" },
        { "rope_scaling", "attention_factor", "1.5", YARD_ENOTSUP,
          "rope_scaling.attention_factor: only null is implemented" },
        { "rope_scaling", "truncate", "false", YARD_ENOTSUP,
          "rope_scaling.truncate: only true is implemented, found false" },
        { NULL, "quantization_config", "\"fp8\"", YARD_EFORMAT,
          "quantization_config: want an object, found 'fp8'" },
        { "quantization_config", "quant_method", "\"awq\"", YARD_ENOTSUP,
          "quantization_config.quant_method: only 'fp8' is implemented, found 'awq'" },
        { "quantization_config", "fmt", "\"e5m2\"", YARD_ENOTSUP,
          "quantization_config.fmt: only 'e4m3' is implemented, found 'e5m2'" },
        { "quantization_config", "activation_scheme", "\"static\"", YARD_ENOTSUP,
          "quantization_config.activation_scheme: only 'dynamic' is implemented, found 'static'" },
        { "quantization_config", "scale_fmt", "\"e8m0\"", YARD_ENOTSUP,
          "quantization_config.scale_fmt: only 'ue8m0' is implemented, found 'e8m0'" },
        { "quantization_config", "weight_block_size", NULL, YARD_EFORMAT,
          "quantization_config.weight_block_size: missing" },
        { "quantization_config", "weight_block_size", "[128]", YARD_EFORMAT,
          "quantization_config.weight_block_size: want two whole numbers, found an array of 1" },
        { "quantization_config", "weight_block_size", "[128, 64]", YARD_ENOTSUP,
          "quantization_config.weight_block_size: only [1 to 65536, 128] is implemented, found "
          "[128, 64]" },
        { "quantization_config", "weight_block_size", "[0, 128]", YARD_ENOTSUP,
          "quantization_config.weight_block_size: only [1 to 65536, 128] is implemented, found "
          "[0, 128]" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *text = edit(cases[i].in, cases[i].key, cases[i].value);
        char want[YARD_ERROR_MESSAGE_BYTES];
        yard_model_config c;
        yard_error err = { 0 };
        yard_status st;
        snprintf(want, sizeof(want), "config.json: %s", cases[i].message);
        st = yard_model_config_parse(&c, text, strlen(text), "config.json", NULL, &err);
        assert_string_equal(err.message, want);
        assert_int_equal(st, cases[i].status);
        free(text);
    }
}

static void bad_text(void **state)
{
    static const struct {
        const char *text, *message;
    } cases[] = {
        { "", "c: bad JSON at byte 0: '[' or '{' expected near end of file" },
        { "[1]", "c: want a JSON object, found an array of 1" },
        { "{\"a\": 1, \"a\": 2}", "c: bad JSON at byte 12: duplicate object key near '\"a\"'" },
        { "{} x", "c: bad JSON at byte 4: end of file expected near 'x'" },
        { "{\"a\": 1e999}", "c: bad JSON at byte 11: real number overflow near '1e999'" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        yard_model_config c;
        yard_error err = { 0 };
        assert_int_equal(
            yard_model_config_parse(&c, cases[i].text, strlen(cases[i].text), "c", NULL, &err),
            YARD_EFORMAT);
        assert_string_equal(err.message, cases[i].message);
    }
}

static void parse_edited(yard_model_config *c, const char *in, const char *key, const char *value,
                         struct warnings *warnings)
{
    const yard_notify notify = { .warn = keep_warning, .ctx = warnings };
    char *text = edit(in, key, value);

    memset(warnings, 0, sizeof(*warnings));
    assert_int_equal(yard_model_config_parse(c, text, strlen(text), "config.json", &notify, NULL),
                     YARD_OK);
    free(text);
}

static void accepted_variants(void **state)
{
    struct warnings w;
    yard_model_config c;

    (void)state;
    parse_edited(&c, NULL, "q_lora_rank", "null", &w);
    assert_int_equal(c.q_rank, 0);
    parse_edited(&c, NULL, "n_shared_experts", "null", &w);
    assert_int_equal(c.n_shared_experts, 0);
    parse_edited(&c, NULL, "bos_token_id", NULL, &w);
    assert_int_equal(c.bos, -1);
    parse_edited(&c, NULL, "eos_token_id", "[7, 1, 7, 9]", &w);
    assert_int_equal(c.n_eos, 3);
    assert_true(c.eos[0] == 7 && c.eos[1] == 1 && c.eos[2] == 9);
    parse_edited(&c, NULL, "rms_norm_eps", "1", &w);
    assert_true(c.norm_eps == 1.0f);
    parse_edited(&c, NULL, "rope_scaling", "null", &w);
    assert_false(c.has_yarn);
    parse_edited(&c, NULL, "quantization_config", NULL, &w);
    assert_false(c.fp8);
    parse_edited(&c, "quantization_config", "scale_fmt", "\"ue8m0\"", &w);
    assert_true(c.ue8m0);
    parse_edited(&c, "quantization_config", "weight_block_size", "[64, 128]", &w);
    assert_int_equal(c.block_rows, 64);
    parse_edited(&c, NULL, "moe_layer_freq", NULL, &w);
    parse_edited(&c, NULL, "initializer_range", "null", &w);
    assert_int_equal(w.n, 0);
}

static void unknown_keys_are_reported_once(void **state)
{
    struct warnings w;
    yard_model_config c;

    (void)state;
    parse_edited(&c, NULL, "first_k_dense_replaced", "3", &w);
    assert_int_equal(w.n, 1);
    assert_string_equal(w.last, "config.json: unknown key 'first_k_dense_replaced' ignored");
    parse_edited(&c, "rope_scaling", "long_factor", "[1]", &w);
    assert_int_equal(w.n, 1);
    assert_string_equal(w.last, "config.json: unknown key 'rope_scaling.long_factor' ignored");
    parse_edited(&c, "quantization_config", "bits", "8", &w);
    assert_int_equal(w.n, 1);
    assert_string_equal(w.last, "config.json: unknown key 'quantization_config.bits' ignored");
}

/* rope_parameters holds theta itself. */
static void newer_rope_spelling(void **state)
{
    static const char with_theta[] = "{\"rope_type\": \"default\", \"rope_theta\": 1000000}";
    json_t *root = json_load_file(demo_path, 0, NULL);
    yard_model_config c;
    char *text;

    (void)state;
    json_object_del(root, "rope_scaling");
    json_object_del(root, "rope_theta");
    json_object_set_new(root, "rope_parameters", json_loads(with_theta, 0, NULL));
    text = json_dumps(root, 0);
    json_decref(root);
    assert_int_equal(yard_model_config_parse(&c, text, strlen(text), "config.json", NULL, NULL),
                     YARD_OK);
    assert_true(c.rope_theta == 1e6 && !c.has_yarn);
    free(text);
}

static void load_seed(yard_model_config *c, const char *name)
{
    struct warnings warnings = { 0 };
    const yard_notify notify = { .warn = keep_warning, .ctx = &warnings };
    yard_error err = { 0 };
    json_t *root;
    char path[128], *text;

    snprintf(path, sizeof(path), "tests/fuzz/corpus/config/%s", name);
    root = json_load_file(path, 0, NULL);
    assert_non_null(root);
    text = json_dumps(root, 0);
    if (yard_model_config_parse(c, text, strlen(text), name, &notify, &err) != YARD_OK)
        fail_msg("%s", err.message);
    if (warnings.n)
        fail_msg("%s", warnings.last);
    json_decref(root);
    free(text);
}

static void published_deepseek_v2_lite(void **state)
{
    yard_model_config c;

    (void)state;
    load_seed(&c, "deepseek_v2_lite");
    assert_string_equal(c.family, "deepseek_v2");
    assert_int_equal(c.attention, YARD_ATTENTION_MLA);
    assert_int_equal(c.score, YARD_SCORE_SOFTMAX);
    assert_int_equal(c.group_value, YARD_GROUP_LARGEST);
    assert_true(!c.router_bias && !c.normalise_topk && !c.fp8 && c.routed_scale == 1);
    assert_true(c.q_rank == 0 && c.n_groups == 1 && c.top_groups == 1 && c.n_mtp == 0);
    /* 0.1 x 0.707 x ln 40 + 1 = 1.26080469, squared, over sqrt(192) */
    assert_true(fabs(yard_model_softmax_scale(&c) - 0.114721) < 1e-6);
}

static void published_kimi_k2(void **state)
{
    yard_model_config c;

    (void)state;
    load_seed(&c, "kimi_k2");
    assert_string_equal(c.family, "kimi_k2");
    assert_true(c.n_experts == 384 && c.n_groups == 1 && c.n_mtp == 0 && c.n_heads == 64);
    assert_true(c.router_bias && c.normalise_topk && c.fp8 && c.routed_scale == 2.827f);
    assert_int_equal(c.score, YARD_SCORE_SIGMOID);
}

static void published_mixtral(void **state)
{
    yard_model_config c;

    (void)state;
    load_seed(&c, "mixtral_8x7b");
    assert_string_equal(c.family, "mixtral");
    assert_int_equal(c.attention, YARD_ATTENTION_GQA);
    assert_int_equal(c.rope_layout, YARD_ROPE_HALVES);
    assert_int_equal(c.score, YARD_SCORE_SOFTMAX);
    assert_true(c.n_heads == 32 && c.n_kv_heads == 8 && c.window == 0);
    assert_true(c.nope_dims == 0 && c.rope_dims == 128 && c.v_dims == 128 && c.kv_rank == 0);
    assert_true(!c.router_bias && c.normalise_topk && c.routed_scale == 1);
    assert_true(c.n_dense_layers == 0 && c.n_shared_experts == 0 && c.expert_inter == 14336);
    assert_true(fabs(yard_model_softmax_scale(&c) - 1 / sqrt(128)) < 1e-8);
}

/* One member of a seed changed; NULL removes it. */
static yard_status parse_seed_with(yard_model_config *c, const char *name, const char *key,
                                   const char *value, yard_error *err)
{
    char path[128], *text;
    json_t *root;
    yard_status st;

    snprintf(path, sizeof(path), "tests/fuzz/corpus/config/%s", name);
    root = json_load_file(path, 0, NULL);
    if (value)
        json_object_set_new(root, key, json_loads(value, JSON_DECODE_ANY, NULL));
    else
        json_object_del(root, key);
    text = json_dumps(root, 0);
    st = yard_model_config_parse(c, text, strlen(text), "c", NULL, err);
    json_decref(root);
    free(text);
    return st;
}

static void family_refusals(void **state)
{
    static const struct {
        const char *seed, *key, *value, *message;
    } cases[] = {
        { "deepseek_v2_lite", "topk_method", "\"noaux_tc\"",
          "c: topk_method: only 'greedy' and 'group_limited_greedy' are implemented, found "
          "'noaux_tc'" },
        { "deepseek_v2_lite", "topk_method", NULL, "c: topk_method: missing" },
        { "deepseek_v2_lite", "scoring_func", "\"sigmoid\"",
          "c: scoring_func: only 'softmax' is implemented, found 'sigmoid'" },
        { "deepseek_v2_lite", "model_type", "\"deepseek_v3\"",
          "c: model_type: of architecture 'DeepseekV2ForCausalLM' only 'deepseek_v2' is "
          "implemented, "
          "found 'deepseek_v3'" },
        { "kimi_k2", "model_type", "\"kimi_k3\"",
          "c: model_type: of architecture 'DeepseekV3ForCausalLM' only 'deepseek_v3' and 'kimi_k2' "
          "are "
          "implemented, found 'kimi_k3'" },
        { "kimi_k2", "num_nextn_predict_layers", "1",
          "c: num_nextn_predict_layers: want a whole number from 0 to 0, found 1" },
        { "mixtral_8x7b", "num_key_value_heads", "5",
          "c: num_key_value_heads: want a divisor of num_attention_heads 32, found 5" },
        { "mixtral_8x7b", "hidden_size", "4100",
          "c: head_dim: missing, and hidden_size 4100 does not give one for 32 heads" },
        { "mixtral_8x7b", "head_dim", "33", "c: head_dim: want an even number, found 33" },
        { "mixtral_8x7b", "sliding_window", "0",
          "c: sliding_window: want a whole number from 1 to 1073741824, found 0" },
        { "mixtral_8x7b", "num_experts_per_tok", "9",
          "c: num_experts_per_tok: want at most the 8 experts of topk_group groups, found 9" },
        { "mixtral_8x7b", "rope_scaling", "{\"type\": \"yarn\"}",
          "c: rope_scaling.rope_type: only 'default' is implemented, found 'yarn'" },
        { "mixtral_8x7b", "hidden_act", "\"gelu\"",
          "c: hidden_act: only 'silu' is implemented, found 'gelu'" },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        yard_model_config c;
        yard_error err = { 0 };
        assert_int_not_equal(parse_seed_with(&c, cases[i].seed, cases[i].key, cases[i].value, &err),
                             YARD_OK);
        assert_string_equal(err.message, cases[i].message);
    }
}

static void family_variants(void **state)
{
    yard_model_config c;
    yard_error err = { 0 };

    (void)state;
    assert_int_equal(parse_seed_with(&c, "mixtral_8x7b", "sliding_window", "4096", &err), YARD_OK);
    assert_int_equal(c.window, 4096);
    assert_int_equal(parse_seed_with(&c, "mixtral_8x7b", "head_dim", "96", &err), YARD_OK);
    assert_true(c.rope_dims == 96 && c.v_dims == 96);
    assert_int_equal(parse_seed_with(&c, "deepseek_v2_lite", "n_group", "8", &err), YARD_OK);
    assert_int_equal(c.n_groups, 1); /* greedy looks at no groups */
    assert_int_equal(
        parse_seed_with(&c, "deepseek_v2_lite", "topk_method", "\"group_limited_greedy\"", &err),
        YARD_OK);
    /* the published gate scales what it does not normalise */
    assert_int_equal(parse_seed_with(&c, "deepseek_v2_lite", "routed_scaling_factor", "16.0", &err),
                     YARD_OK);
    assert_true(c.routed_scale == 16 && !c.normalise_topk);
    assert_int_equal(parse_seed_with(&c, "deepseek_v2_lite", "norm_topk_prob", "true", &err),
                     YARD_OK);
    assert_true(c.routed_scale == 1 && c.normalise_topk);
}

static void write_text(const char *dir, const char *name, const char *text)
{
    char path[256];
    FILE *f;

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

static void remove_file(const char *dir, const char *name)
{
    char path[256];

    snprintf(path, sizeof(path), "%s/%s", dir, name);
    unlink(path);
}

static void end_ids_are_those_of_config_json(void **state)
{
    char dir[] = "/tmp/yard-config-XXXXXX", path[64], want[128];
    char *text = edit(NULL, "eos_token_id", NULL);
    yard_generation_config g;
    yard_model_config c;
    yard_error err = { 0 };

    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(want, sizeof(want), "%s/config.json: cannot open: No such file or directory", dir);
    assert_int_equal(yard_model_config_load(&c, dir, NULL, &err), YARD_EIO);
    assert_string_equal(err.message, want);
    write_text(dir, "config.json", text);
    assert_int_equal(yard_model_config_load(&c, dir, NULL, &err), YARD_EFORMAT);
    assert_string_equal(err.message, "config.json: eos_token_id: missing");
    write_text(dir, "generation_config.json", "{\"eos_token_id\": [5, 6]}");
    assert_int_equal(yard_model_config_load(&c, dir, NULL, &err), YARD_EFORMAT);
    assert_int_equal(yard_generation_config_load(&g, dir, NULL, &err), YARD_OK);
    assert_int_equal(g.n_eos, 2);
    assert_int_equal(g.eos[1], 6);
    remove_file(dir, "config.json");
    snprintf(path, sizeof(path), "%s/config.json", dir);
    assert_int_equal(mkfifo(path, 0600), 0); /* must not wait for a writer */
    assert_int_equal(yard_model_config_load(&c, dir, NULL, &err), YARD_EIO);
    snprintf(want, sizeof(want), "%s/config.json: want a regular file", dir);
    assert_string_equal(err.message, want);
    remove_file(dir, "config.json");
    remove_file(dir, "generation_config.json");
    rmdir(dir);
    free(text);
}

static void generation_defaults(void **state)
{
    static const struct {
        const char *text, *message; /* NULL: accepted */
        bool do_sample;
        float temperature, top_p;
        int32_t top_k;
    } cases[] = {
        { "{}", NULL, false, 0, 1, 0 },
        { "{\"do_sample\": true}", NULL, true, 1, 1, 0 },
        { "{\"do_sample\": false, \"temperature\": 0.7}", NULL, false, 0, 1, 0 },
        { "{\"do_sample\": true, \"temperature\": 0.6, \"top_p\": 0.95, \"top_k\": 20}", NULL, true,
          0.6f, 0.95f, 20 },
        { "{\"do_sample\": true, \"top_k\": null}", NULL, true, 1, 1, 0 },
        { "{\"top_k\": -1}", "top_k: want a whole number from 0 to 2147483647, found -1", 0, 0, 0,
          0 },
        { "{\"top_p\": 1.5}", "top_p: want a number from 1e-06 to 1, found 1.5", 0, 0, 0, 0 },
        { "{\"temperature\": \"hot\"}", "temperature: want a number from 0 to 100, found 'hot'", 0,
          0, 0, 0 },
        { "{\"do_sample\": 1}", "do_sample: want true or false, found 1", 0, 0, 0, 0 },
    };
    char dir[] = "/tmp/yard-config-XXXXXX";
    yard_generation_config g;

    (void)state;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(yard_generation_config_load(&g, dir, NULL, NULL), YARD_OK);
    assert_true(!g.do_sample && g.params.temperature == 0 && g.params.top_p == 1);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char want[256];
        yard_error err = { 0 };
        yard_status st;
        write_text(dir, "generation_config.json", cases[i].text);
        st = yard_generation_config_load(&g, dir, NULL, &err);
        if (cases[i].message) {
            snprintf(want, sizeof(want), "generation_config.json: %s", cases[i].message);
            assert_int_equal(st, YARD_EFORMAT);
            assert_string_equal(err.message, want);
            continue;
        }
        assert_int_equal(st, YARD_OK);
        assert_int_equal(g.do_sample, cases[i].do_sample);
        assert_int_equal(g.params.top_k, cases[i].top_k);
        assert_true(g.params.temperature == cases[i].temperature &&
                    g.params.top_p == cases[i].top_p && g.params.repetition_penalty == 1);
    }
    remove_file(dir, "generation_config.json");
    rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(demo_values),
        cmocka_unit_test(demo_rope),
        cmocka_unit_test(a_missing_field_is_refused_by_name),
        cmocka_unit_test(bad_values),
        cmocka_unit_test(bad_text),
        cmocka_unit_test(accepted_variants),
        cmocka_unit_test(unknown_keys_are_reported_once),
        cmocka_unit_test(newer_rope_spelling),
        cmocka_unit_test(published_deepseek_v2_lite),
        cmocka_unit_test(published_kimi_k2),
        cmocka_unit_test(published_mixtral),
        cmocka_unit_test(family_refusals),
        cmocka_unit_test(family_variants),
        cmocka_unit_test(end_ids_are_those_of_config_json),
        cmocka_unit_test(generation_defaults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
