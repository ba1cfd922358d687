/* config.json: families as rows of a table, each with its fields and its constants. */
#include "model/config.h"

#include <stdio.h>
#include <stdlib.h>

#include "model/config_parts.h"

/* Bounds that no model comes near and that keep every product of sizes within 64 bits:
 * layers * experts * 3 * hidden * inter stays below 2^60. */
enum {
    MAX_LAYERS = 1 << 10,
    MAX_EXPERTS = 1 << 12,
    MAX_HIDDEN = 1 << 17,
    MAX_INTER = 1 << 18,
    MAX_VOCAB = 1 << 24,
    MAX_HEADS = 1 << 12,
    MAX_HEAD_DIMS = 1 << 12,
    MAX_POSITIONS = 1 << 30,
    MAX_BLOCK_ROWS = 1 << 16
};

/* A whole number of config.json and where it goes. */
typedef struct size_field {
    const char *key;
    size_t offset;
    uint32_t min, max;
    bool null_is_zero;
} size_field;

#define FIELD(member) offsetof(yard_model_config, member)

/* A field with the one value that is implemented, as yard_json_describe() shows it. */
typedef struct fixed_field {
    const char *key, *want;
    bool optional;
} fixed_field;

/* One family of checkpoints. Another model of the same kind is another row here, not a branch in
 * the code that reads the description. */
typedef struct family {
    const char *name, *architecture, *model_type;
    yard_attention_kind attention;
    yard_router_score score;
    yard_topk_method topk_method;
    bool mtp_reads_normed_hidden;
    const size_field *sizes;
    const fixed_field *fixed;
    const char *const *ignored; /* known, and of no meaning for inference */
} family;

static const size_field deepseek_v3_sizes[] = {
    { "vocab_size", FIELD(vocab), 1, MAX_VOCAB, false },
    { "hidden_size", FIELD(hidden), 1, MAX_HIDDEN, false },
    { "num_hidden_layers", FIELD(n_layers), 1, MAX_LAYERS, false },
    { "first_k_dense_replace", FIELD(n_dense_layers), 0, MAX_LAYERS, false },
    { "num_attention_heads", FIELD(n_heads), 1, MAX_HEADS, false },
    { "q_lora_rank", FIELD(q_rank), 0, MAX_HIDDEN, true },
    { "kv_lora_rank", FIELD(kv_rank), 1, MAX_HIDDEN, false },
    { "qk_nope_head_dim", FIELD(nope_dims), 1, MAX_HEAD_DIMS, false },
    { "qk_rope_head_dim", FIELD(rope_dims), 2, MAX_HEAD_DIMS, false },
    { "v_head_dim", FIELD(v_dims), 1, MAX_HEAD_DIMS, false },
    { "intermediate_size", FIELD(dense_inter), 1, MAX_INTER, false },
    { "moe_intermediate_size", FIELD(expert_inter), 1, MAX_INTER, false },
    { "n_routed_experts", FIELD(n_experts), 1, MAX_EXPERTS, false },
    { "n_shared_experts", FIELD(n_shared_experts), 0, MAX_EXPERTS, true },
    { "num_experts_per_tok", FIELD(top_k), 1, YARD_MAX_TOP_K, false },
    { "n_group", FIELD(n_groups), 1, MAX_EXPERTS, false },
    { "topk_group", FIELD(top_groups), 1, MAX_EXPERTS, false },
    { "max_position_embeddings", FIELD(max_positions), 1, MAX_POSITIONS, false },
    { "num_nextn_predict_layers", FIELD(n_mtp), 0, 16, false },
    { NULL, 0, 0, 0, false },
};

/* An absent attention_bias or moe_layer_freq cannot mislead: biases would be surplus tensors, dense
 * layers among the others missing ones. The rest would give a model that runs and is wrong. */
static const fixed_field deepseek_v3_fixed[] = {
    { "hidden_act", "'silu'", false },      { "scoring_func", "'sigmoid'", false },
    { "topk_method", "'noaux_tc'", false }, { "attention_bias", "false", true },
    { "moe_layer_freq", "1", true },        { "rope_interleave", "true", true },
    { "mlp_bias", "false", true },          { NULL, NULL, false },
};

static const char *const deepseek_v3_ignored[] = {
    "attention_dropout", "auto_map",      "aux_loss_alpha",       "ep_size",     "head_dim",
    "initializer_range", "pad_token_id",  "pretraining_tp",       "qk_head_dim", "seq_aux",
    "use_cache",         "_name_or_path", "transformers_version", NULL,
};

static const family families[] = {
    {
        .name = "deepseek_v3",
        .architecture = "DeepseekV3ForCausalLM",
        .model_type = "deepseek_v3",
        .attention = YARD_ATTENTION_MLA,
        .score = YARD_SCORE_SIGMOID,
        .topk_method = YARD_TOPK_NOAUX_TC,
        .mtp_reads_normed_hidden = true,
        .sizes = deepseek_v3_sizes,
        .fixed = deepseek_v3_fixed,
        .ignored = deepseek_v3_ignored,
    },
};

enum { N_FAMILIES = sizeof(families) / sizeof(families[0]) };

/* By the top-level architecture: nested parts of multimodal models may claim another one. */
static const family *find_family(yard_json_reader *r)
{
    char what[YARD_JSON_DESCRIBE_BYTES];
    bool present;
    const json_t *list = yard_json_get(r, "architectures", &present);
    const char *name =
        json_array_size(list) == 1 ? json_string_value(json_array_get(list, 0)) : NULL;

    if (!name && present)
        yard_json_fail(r, YARD_EFORMAT, "architectures", "want a list of one name, found %s",
                       yard_json_describe(list, what));
    else if (!name)
        yard_json_fail(r, YARD_EFORMAT, "architectures", "missing");
    if (!name)
        return NULL;
    for (int i = 0; i < N_FAMILIES; i++) {
        char want[YARD_JSON_DESCRIBE_BYTES];
        if (strcmp(families[i].architecture, name) != 0)
            continue;
        snprintf(want, sizeof(want), "'%s'", families[i].model_type);
        yard_json_expect(r, "model_type", want, true);
        return &families[i];
    }
    yard_json_fail(r, YARD_ENOTSUP, "architectures", "only '%s' is implemented, found '%.64s'",
                   families[0].architecture, name);
    return NULL;
}

static void read_sizes(yard_model_config *c, const family *f, yard_json_reader *r)
{
    for (const size_field *s = f->sizes; s->key; s++) {
        const bool is_null = json_is_null(json_object_get(r->object, s->key));
        uint32_t value = 0;
        if (s->null_is_zero && is_null)
            yard_json_get(r, s->key, NULL);
        else
            value = (uint32_t)yard_json_get_u64(r, s->key, s->min, s->max);
        memcpy((char *)c + s->offset, &value, sizeof(value));
    }
    for (const fixed_field *x = f->fixed; x->key; x++)
        yard_json_expect(r, x->key, x->want, x->optional);
}

static void read_quantisation(yard_model_config *c, yard_json_reader *r, const yard_notify *notify)
{
    static const char *const ignored[] = { "modules_to_not_convert", NULL };
    yard_json_reader in = { .file = r->file, .where = "quantization_config.", .err = r->err };
    const json_t *block, *object = yard_json_get(r, "quantization_config", NULL);
    char what[YARD_JSON_DESCRIBE_BYTES];

    if (!object || r->status)
        return;
    if (!json_is_object(object)) {
        yard_json_fail(r, YARD_EFORMAT, "quantization_config", "want an object, found %s",
                       yard_json_describe(object, what));
        return;
    }
    in.object = object;
    c->fp8 = true;
    yard_json_expect(&in, "quant_method", "'fp8'", false);
    yard_json_expect(&in, "fmt", "'e4m3'", true); /* each tensor says its dtype anyway */
    yard_json_expect(&in, "activation_scheme", "'dynamic'", false);
    yard_json_expect(&in, "scale_fmt", "'ue8m0'", true);
    c->ue8m0 = json_is_string(json_object_get(object, "scale_fmt"));
    block = yard_json_get(&in, "weight_block_size", NULL);
    if (!block)
        yard_json_fail(&in, YARD_EFORMAT, "weight_block_size", "missing");
    else if (json_array_size(block) != 2 || !json_is_integer(json_array_get(block, 0)) ||
             !json_is_integer(json_array_get(block, 1)))
        yard_json_fail(&in, YARD_EFORMAT, "weight_block_size", "want two whole numbers, found %s",
                       yard_json_describe(block, what));
    else {
        const json_int_t rows = json_integer_value(json_array_get(block, 0));
        const json_int_t cols = json_integer_value(json_array_get(block, 1));
        if (rows < 1 || rows > MAX_BLOCK_ROWS || cols != YARD_GROUP)
            yard_json_fail(&in, YARD_ENOTSUP, "weight_block_size",
                           "only [1 to %d, %d] is implemented, found [%lld, %lld]", MAX_BLOCK_ROWS,
                           YARD_GROUP, (long long)rows, (long long)cols);
        c->block_rows = (uint32_t)rows;
    }
    if (!in.status)
        yard_json_warn_unread(&in, ignored, notify);
    r->status = in.status;
}

/* The dtype of what is not FP8, for counting bytes; each tensor says its own when it is read. */
static void read_dtype(yard_model_config *c, yard_json_reader *r)
{
    const char *const key = yard_json_get(r, "dtype", NULL) ? "dtype" : "torch_dtype";
    const json_t *value = yard_json_get(r, key, NULL);

    c->plain_bytes = json_is_string(value) && !strcmp(json_string_value(value), "float32") ? 4 : 2;
}

static void read_token_ids(yard_model_config *c, yard_json_reader *r)
{
    c->bos = -1;
    if (yard_json_get(r, "bos_token_id", NULL))
        c->bos = (int32_t)yard_json_get_u64(r, "bos_token_id", 0, c->vocab ? c->vocab - 1 : 0);
    yard_config_read_eos(c->eos, &c->n_eos, c->vocab, r);
}

static void check_heads(const yard_model_config *c, yard_json_reader *r)
{
    const uint64_t kv_heads = yard_json_get_u64(r, "num_key_value_heads", 1, MAX_HEADS);

    if (kv_heads != c->n_heads)
        yard_json_fail(r, YARD_ENOTSUP, "num_key_value_heads",
                       "want num_attention_heads %u, found %llu", c->n_heads,
                       (unsigned long long)kv_heads);
    if (c->rope_dims % 2)
        yard_json_fail(r, YARD_EFORMAT, "qk_rope_head_dim", "want an even number, found %u",
                       c->rope_dims);
}

static void check_experts(const yard_model_config *c, yard_json_reader *r)
{
    uint32_t n_eligible;

    if (c->n_dense_layers > c->n_layers)
        yard_json_fail(r, YARD_EFORMAT, "first_k_dense_replace",
                       "want at most num_hidden_layers %u, found %u", c->n_layers,
                       c->n_dense_layers);
    if (r->status || c->n_groups == 0)
        return;
    if (c->n_experts % c->n_groups)
        yard_json_fail(r, YARD_EFORMAT, "n_group",
                       "want a divisor of n_routed_experts %u, found %u", c->n_experts,
                       c->n_groups);
    if (c->top_groups > c->n_groups)
        yard_json_fail(r, YARD_EFORMAT, "topk_group", "want at most n_group %u, found %u",
                       c->n_groups, c->top_groups);
    n_eligible = c->top_groups * (c->n_experts / c->n_groups);
    if (c->top_k > n_eligible)
        yard_json_fail(r, YARD_EFORMAT, "num_experts_per_tok",
                       "want at most the %u experts of topk_group groups, found %u", n_eligible,
                       c->top_k);
    if ((uint64_t)c->n_shared_experts * c->expert_inter > MAX_INTER)
        yard_json_fail(r, YARD_EFORMAT, "n_shared_experts",
                       "want at most %d rows in all, found %u of %u", MAX_INTER,
                       c->n_shared_experts, c->expert_inter);
}

static void read_model(yard_model_config *c, yard_json_reader *r, const yard_notify *notify)
{
    const family *f = find_family(r);

    if (!f)
        return;
    c->family = f->name;
    c->attention = f->attention;
    c->score = f->score;
    c->topk_method = f->topk_method;
    c->mtp_reads_normed_hidden = f->mtp_reads_normed_hidden;
    read_sizes(c, f, r);
    c->normalise_topk = yard_json_get_bool(r, "norm_topk_prob");
    c->routed_scale = (float)yard_json_get_number(r, "routed_scaling_factor", 1e-6, 1e6);
    c->norm_eps = (float)yard_json_get_number(r, "rms_norm_eps", 1e-30, 1);
    c->tied_embedding = yard_json_get_bool(r, "tie_word_embeddings");
    check_heads(c, r);
    check_experts(c, r);
    yard_config_read_rope(c, r, notify);
    read_quantisation(c, r, notify);
    read_token_ids(c, r);
    read_dtype(c, r);
    if (!r->status)
        yard_json_warn_unread(r, f->ignored, notify);
}

yard_status yard_model_config_parse(yard_model_config *out, const char *json, size_t n_bytes,
                                    const char *name, const yard_notify *notify, yard_error *err)
{
    yard_model_config c = { 0 };
    yard_json_reader r = { .file = name, .where = "", .err = err };
    json_t *root = NULL;
    yard_status st = yard_json_parse_object(&root, json, n_bytes, name, err);

    if (st)
        return st;
    r.object = root;
    read_model(&c, &r, notify);
    json_decref(root);
    if (!r.status)
        *out = c;
    return r.status;
}

yard_status yard_model_config_load(yard_model_config *out, const char *dir,
                                   const yard_notify *notify, yard_error *err)
{
    static const char *const name = "config.json";
    yard_model_config c = { 0 };
    char *text = NULL;
    size_t n_bytes = 0;
    yard_status st;

    st = yard_json_read_file(&text, &n_bytes, dir, name, YARD_CONFIG_MAX_BYTES, NULL, err);
    if (!st)
        st = yard_model_config_parse(&c, text, n_bytes, name, notify, err);
    free(text);
    if (!st && c.n_eos == 0)
        st = yard_fail(err, YARD_EFORMAT, "config.json: eos_token_id: missing");
    if (!st)
        *out = c;
    return st;
}
