/* The dimensions of known architectures, and config.json of any description. */
#include <stdlib.h>

#include "model/architectures.h"
#include "model/synth_parts.h"

static const struct {
    const char *arch;
    yard_model_config config;
} known[] = {
    { "deepseek-v3",
      { .family = "deepseek_v3",
        YARD_DEEPSEEK_V3_DIMENSIONS,
        .normalise_topk = true,
        .routed_scale = 2.5f,
        .norm_eps = 1e-6f,
        .rope_theta = 10000,
        .has_yarn = true,
        .yarn_factor = 40,
        .yarn_beta_fast = 32,
        .yarn_beta_slow = 1,
        .yarn_mscale = 1,
        .yarn_mscale_all_dim = 1,
        .yarn_original_positions = 4096,
        .max_positions = 163840,
        .plain_bytes = 2,
        .fp8 = true,
        .block_rows = 128,
        .bos = 0,
        .eos = { 1 },
        .n_eos = 1 } },
};

enum { N_KNOWN = sizeof(known) / sizeof(known[0]) };

yard_status yard_synth_dimensions(yard_model_config *out, const char *arch, yard_error *err)
{
    for (int i = 0; i < N_KNOWN; i++) {
        if (strcmp(known[i].arch, arch) != 0)
            continue;
        *out = known[i].config;
        return YARD_OK;
    }
    return yard_fail(err, YARD_ENOTSUP, "architecture: only '%s' is known, got '%s'", known[0].arch,
                     arch);
}

/* The short decimal that was meant by a float: 2.827, not 2.8269999. */
static double short_decimal(float x)
{
    char text[32];

    snprintf(text, sizeof(text), "%.7g", (double)x);
    return strtod(text, NULL);
}

static json_t *rope_json(const yard_model_config *c)
{
    if (!c->has_yarn)
        return json_null();
    return json_pack("{s:s, s:f, s:i, s:f, s:f, s:f, s:f}", "type", "yarn", "factor",
                     c->yarn_factor, "original_max_position_embeddings",
                     (int)c->yarn_original_positions, "beta_fast", c->yarn_beta_fast, "beta_slow",
                     c->yarn_beta_slow, "mscale", c->yarn_mscale, "mscale_all_dim",
                     c->yarn_mscale_all_dim);
}

static json_t *quantisation_json(const yard_model_config *c)
{
    return json_pack("{s:s, s:s, s:s, s:[i,i], s:s*}", "quant_method", "fp8", "fmt", "e4m3",
                     "activation_scheme", "dynamic", "weight_block_size", (int)c->block_rows,
                     YARD_GROUP, "scale_fmt", c->ue8m0 ? "ue8m0" : NULL);
}

static json_t *eos_json(const yard_model_config *c)
{
    json_t *list = json_array();

    if (c->n_eos == 1) {
        json_decref(list);
        return json_integer(c->eos[0]);
    }
    for (uint32_t i = 0; i < c->n_eos && list; i++)
        json_array_append_new(list, json_integer(c->eos[i]));
    return list;
}

/* The whole numbers of the description by their names in config.json. */
static json_t *sizes_json(const yard_model_config *c)
{
    return json_pack(
        "{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, "
        "s:i, s:i, s:i}",
        "vocab_size", (int)c->vocab, "hidden_size", (int)c->hidden, "num_hidden_layers",
        (int)c->n_layers, "first_k_dense_replace", (int)c->n_dense_layers, "num_attention_heads",
        (int)c->n_heads, "num_key_value_heads", (int)c->n_heads, "kv_lora_rank", (int)c->kv_rank,
        "qk_nope_head_dim", (int)c->nope_dims, "qk_rope_head_dim", (int)c->rope_dims, "v_head_dim",
        (int)c->v_dims, "intermediate_size", (int)c->dense_inter, "moe_intermediate_size",
        (int)c->expert_inter, "n_routed_experts", (int)c->n_experts, "num_experts_per_tok",
        (int)c->top_k, "n_group", (int)c->n_groups, "topk_group", (int)c->top_groups,
        "max_position_embeddings", (int)c->max_positions, "num_nextn_predict_layers", (int)c->n_mtp,
        "bos_token_id", c->bos, "moe_layer_freq", 1);
}

static json_t *optional_size(uint32_t n)
{
    return n ? json_integer(n) : json_null();
}

json_t *yard_synth_config_json(const yard_model_config *c)
{
    json_t *root = sizes_json(c);
    json_t *rest = json_pack(
        "{s:[s], s:s, s:b, s:s, s:s, s:s, s:b, s:b, s:f, s:f, s:f, s:s, s:o, s:o, s:o, s:o}",
        "architectures", "DeepseekV3ForCausalLM", "model_type", c->family, "attention_bias", 0,
        "hidden_act", "silu", "scoring_func", "sigmoid", "topk_method", "noaux_tc",
        "norm_topk_prob", c->normalise_topk, "tie_word_embeddings", c->tied_embedding,
        "routed_scaling_factor", short_decimal(c->routed_scale), "rms_norm_eps",
        short_decimal(c->norm_eps), "rope_theta", c->rope_theta, "torch_dtype", "bfloat16",
        "q_lora_rank", optional_size(c->q_rank), "n_shared_experts",
        optional_size(c->n_shared_experts), "eos_token_id", eos_json(c), "rope_scaling",
        rope_json(c));
    bool ok = root && rest;

    if (ok && c->bos < 0)
        ok = json_object_set_new(root, "bos_token_id", json_null()) == 0;
    if (ok && c->fp8)
        ok = json_object_set_new(root, "quantization_config", quantisation_json(c)) == 0;
    if (ok)
        ok = json_object_update(root, rest) == 0;
    json_decref(rest);
    if (!ok) {
        json_decref(root);
        root = NULL;
    }
    return root;
}
