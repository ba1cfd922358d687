/* The dimensions of known architectures, and config.json of any description. */
#include <stdio.h>
#include <stdlib.h>

#include "model/architectures.h"
#include "model/config_families.h"
#include "model/synth_parts.h"

#define DEEPSEEK_YARN                                                                              \
    .has_yarn = true, .yarn_factor = 40, .yarn_beta_fast = 32, .yarn_beta_slow = 1,                \
    .yarn_original_positions = 4096

static const struct {
    const char *arch;
    yard_model_config config; /* what the family says is filled in */
} known[] = {
    { "deepseek-v3",
      { .family = "deepseek_v3",
        YARD_DEEPSEEK_V3_DIMENSIONS,
        .n_kv_heads = 128,
        .normalise_topk = true,
        .routed_scale = 2.5f,
        .norm_eps = 1e-6f,
        .rope_theta = 10000,
        DEEPSEEK_YARN,
        .yarn_mscale = 1,
        .yarn_mscale_all_dim = 1,
        .max_positions = 163840,
        .plain_bytes = 2,
        .fp8 = true,
        .block_rows = 128,
        .bos = 0,
        .eos = { 1 },
        .n_eos = 1 } },
    { "deepseek-v2-lite",
      { .family = "deepseek_v2",
        YARD_DEEPSEEK_V2_LITE_DIMENSIONS,
        .n_kv_heads = 16,
        .routed_scale = 1,
        .norm_eps = 1e-6f,
        .rope_theta = 10000,
        DEEPSEEK_YARN,
        .yarn_mscale = 0.707,
        .yarn_mscale_all_dim = 0.707,
        .max_positions = 163840,
        .plain_bytes = 2,
        .bos = 100000,
        .eos = { 100001 },
        .n_eos = 1 } },
    { "kimi-k2",
      { .family = "kimi_k2",
        YARD_KIMI_K2_DIMENSIONS,
        .n_kv_heads = 64,
        .normalise_topk = true,
        .routed_scale = 2.827f,
        .norm_eps = 1e-6f,
        .rope_theta = 50000,
        .has_yarn = true,
        .yarn_factor = 32,
        .yarn_beta_fast = 1,
        .yarn_beta_slow = 1,
        .yarn_original_positions = 4096,
        .yarn_mscale = 1,
        .yarn_mscale_all_dim = 1,
        .max_positions = 131072,
        .plain_bytes = 2,
        .fp8 = true,
        .block_rows = 128,
        .bos = 163584,
        .eos = { 163585 },
        .n_eos = 1 } },
    { "mixtral-8x7b",
      { .family = "mixtral",
        YARD_MIXTRAL_8X7B_DIMENSIONS,
        .rope_dims = YARD_MIXTRAL_8X7B_HEAD_DIMS,
        .v_dims = YARD_MIXTRAL_8X7B_HEAD_DIMS,
        .normalise_topk = true,
        .routed_scale = 1,
        .norm_eps = 1e-5f,
        .rope_theta = 1e6,
        .max_positions = 32768,
        .plain_bytes = 2,
        .bos = 1,
        .eos = { 2 },
        .n_eos = 1 } },
};

enum { N_KNOWN = sizeof(known) / sizeof(known[0]) };

yard_status yard_synth_dimensions(yard_model_config *out, const char *arch, yard_error *err)
{
    char names[128] = "";
    size_t at = 0;

    for (int i = 0; i < N_KNOWN; i++) {
        if (strcmp(known[i].arch, arch) != 0) {
            at += (size_t)snprintf(names + at, sizeof(names) - at, "%s%s", i ? ", " : "",
                                   known[i].arch);
            continue;
        }
        *out = known[i].config;
        yard_family_apply(yard_family_find(out->family), out);
        return YARD_OK;
    }
    return yard_fail(err, YARD_ENOTSUP, "architecture: no '%s'; known: %s", arch, names);
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

/* Takes value; false when memory ran out. */
static bool put(json_t *root, const char *key, json_t *value)
{
    return json_object_set_new(root, key, value) == 0;
}

static bool put_sizes(json_t *root, const yard_model_config *c, const yard_family *f)
{
    bool ok = true;

    for (const yard_size_field *s = f->sizes; s->key && ok; s++) {
        uint32_t n;
        memcpy(&n, (const char *)c + s->offset, sizeof(n));
        ok = put(root, s->key, n || s->presence == YARD_REQUIRED ? json_integer(n) : json_null());
    }
    return ok;
}

/* 'text', true, false or a number, as the table shows them. */
static json_t *fixed_json(const char *want)
{
    if (want[0] == '\'')
        return json_stringn(want + 1, strlen(want) - 2);
    return json_loads(want, JSON_DECODE_ANY, NULL);
}

static bool put_fixed(json_t *root, const yard_family *f)
{
    bool ok = true;

    for (const yard_fixed_field *x = f->fixed; x->key && ok; x++)
        ok = put(root, x->key, fixed_json(x->want));
    return ok;
}

static bool put_routing(json_t *root, const yard_model_config *c, const yard_family *f)
{
    if (f->routing == YARD_ROUTING_NORMALISED)
        return true;
    if (f->routing == YARD_ROUTING_GREEDY &&
        !put(root, "topk_method", json_string(c->n_groups > 1 ? "group_limited_greedy" : "greedy")))
        return false;
    return put(root, "norm_topk_prob", json_boolean(c->normalise_topk)) &&
           put(root, "routed_scaling_factor", json_real(short_decimal(c->routed_scale)));
}

static bool put_common(json_t *root, const yard_model_config *c, const yard_family *f)
{
    return put(root, "architectures", json_pack("[s]", f->architecture)) &&
           put(root, "model_type", json_string(f->model_type)) &&
           put(root, "tie_word_embeddings", json_boolean(c->tied_embedding)) &&
           put(root, "rms_norm_eps", json_real(short_decimal(c->norm_eps))) &&
           put(root, "rope_theta", json_real(c->rope_theta)) &&
           put(root, "rope_scaling", rope_json(c)) &&
           put(root, "torch_dtype", json_string("bfloat16")) &&
           put(root, "bos_token_id", c->bos < 0 ? json_null() : json_integer(c->bos)) &&
           put(root, "eos_token_id", eos_json(c)) &&
           (!c->fp8 || put(root, "quantization_config", quantisation_json(c)));
}

json_t *yard_synth_config_json(const yard_model_config *c)
{
    const yard_family *f = yard_family_find(c->family);
    json_t *root = json_object();

    if (root && put_sizes(root, c, f) && put_fixed(root, f) && put_routing(root, c, f) &&
        put_common(root, c, f))
        return root;
    json_decref(root);
    return NULL;
}
