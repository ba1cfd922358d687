/* The families: fields, constants, kinds. docs/models.md shows this table to people. */
#include "model/config_families.h"

#define FIELD(member) offsetof(yard_model_config, member)

/* clang-format off */

#define LAYER_SIZES                                                                              \
    { "vocab_size", FIELD(vocab), 1, YARD_MAX_VOCAB, YARD_REQUIRED },                            \
    { "hidden_size", FIELD(hidden), 1, YARD_MAX_HIDDEN, YARD_REQUIRED },                         \
    { "num_hidden_layers", FIELD(n_layers), 1, YARD_MAX_LAYERS, YARD_REQUIRED },                 \
    { "num_attention_heads", FIELD(n_heads), 1, YARD_MAX_HEADS, YARD_REQUIRED },                 \
    { "num_key_value_heads", FIELD(n_kv_heads), 1, YARD_MAX_HEADS, YARD_REQUIRED },              \
    { "num_experts_per_tok", FIELD(top_k), 1, YARD_MAX_TOP_K, YARD_REQUIRED },                   \
    { "max_position_embeddings", FIELD(max_positions), 1, YARD_MAX_POSITIONS, YARD_REQUIRED }

#define DEEPSEEK_SIZES                                                                           \
    LAYER_SIZES,                                                                                 \
    { "first_k_dense_replace", FIELD(n_dense_layers), 0, YARD_MAX_LAYERS, YARD_REQUIRED },       \
    { "q_lora_rank", FIELD(q_rank), 0, YARD_MAX_HIDDEN, YARD_NULLABLE },                         \
    { "kv_lora_rank", FIELD(kv_rank), 1, YARD_MAX_HIDDEN, YARD_REQUIRED },                       \
    { "qk_nope_head_dim", FIELD(nope_dims), 1, YARD_MAX_HEAD_DIMS, YARD_REQUIRED },              \
    { "qk_rope_head_dim", FIELD(rope_dims), 2, YARD_MAX_HEAD_DIMS, YARD_REQUIRED },              \
    { "v_head_dim", FIELD(v_dims), 1, YARD_MAX_HEAD_DIMS, YARD_REQUIRED },                       \
    { "intermediate_size", FIELD(dense_inter), 1, YARD_MAX_INTER, YARD_REQUIRED },               \
    { "moe_intermediate_size", FIELD(expert_inter), 1, YARD_MAX_INTER, YARD_REQUIRED },          \
    { "n_routed_experts", FIELD(n_experts), 1, YARD_MAX_EXPERTS, YARD_REQUIRED },                \
    { "n_shared_experts", FIELD(n_shared_experts), 0, YARD_MAX_EXPERTS, YARD_NULLABLE }

/* An absent attention_bias or moe_layer_freq cannot mislead: biases would be surplus tensors, dense
 * layers among the others missing ones. The rest would give a model that runs and is wrong. */
#define DEEPSEEK_FIXED                                                                           \
    { "hidden_act", "'silu'", false },                                                           \
    { "attention_bias", "false", true },                                                         \
    { "moe_layer_freq", "1", true },                                                             \
    { "rope_interleave", "true", true },                                                         \
    { "mlp_bias", "false", true }

#define ALWAYS_IGNORED                                                                           \
    "attention_dropout", "initializer_range", "pad_token_id", "use_cache", "_name_or_path",      \
    "transformers_version"

/* clang-format on */

static const yard_size_field deepseek_v3_sizes[] = {
    DEEPSEEK_SIZES,
    { "n_group", FIELD(n_groups), 1, YARD_MAX_EXPERTS, YARD_REQUIRED },
    { "topk_group", FIELD(top_groups), 1, YARD_MAX_EXPERTS, YARD_REQUIRED },
    { "num_nextn_predict_layers", FIELD(n_mtp), 0, 16, YARD_REQUIRED },
    { NULL, 0, 0, 0, 0 },
};

/* As DeepSeek-V3's, but nothing says how a module of it would read its input. */
static const yard_size_field kimi_k2_sizes[] = {
    DEEPSEEK_SIZES,
    { "n_group", FIELD(n_groups), 1, YARD_MAX_EXPERTS, YARD_REQUIRED },
    { "topk_group", FIELD(top_groups), 1, YARD_MAX_EXPERTS, YARD_REQUIRED },
    { "num_nextn_predict_layers", FIELD(n_mtp), 0, 0, YARD_REQUIRED },
    { NULL, 0, 0, 0, 0 },
};

static const yard_size_field deepseek_v2_sizes[] = {
    DEEPSEEK_SIZES,
    { "n_group", FIELD(n_groups), 1, YARD_MAX_EXPERTS, YARD_OPTIONAL }, /* read_routing() sees to */
    { "topk_group", FIELD(top_groups), 1, YARD_MAX_EXPERTS, YARD_OPTIONAL },
    { NULL, 0, 0, 0, 0 },
};

/* rope_dims: all of a head turns; an absent head_dim follows from the width. */
static const yard_size_field mixtral_sizes[] = {
    LAYER_SIZES,
    { "intermediate_size", FIELD(expert_inter), 1, YARD_MAX_INTER, YARD_REQUIRED },
    { "num_local_experts", FIELD(n_experts), 1, YARD_MAX_EXPERTS, YARD_REQUIRED },
    { "head_dim", FIELD(rope_dims), 2, YARD_MAX_HEAD_DIMS, YARD_OPTIONAL },
    { "sliding_window", FIELD(window), 1, YARD_MAX_POSITIONS, YARD_OPTIONAL },
    { NULL, 0, 0, 0, 0 },
};

static const yard_fixed_field deepseek_v3_fixed[] = {
    DEEPSEEK_FIXED,
    { "scoring_func", "'sigmoid'", false },
    { "topk_method", "'noaux_tc'", false },
    { NULL, NULL, false },
};

static const yard_fixed_field deepseek_v2_fixed[] = {
    DEEPSEEK_FIXED,
    { "scoring_func", "'softmax'", true },
    { NULL, NULL, false },
};

static const yard_fixed_field mixtral_fixed[] = {
    { "hidden_act", "'silu'", false },
    { "attention_bias", "false", true },
    { NULL, NULL, false },
};

static const char *const deepseek_ignored[] = {
    ALWAYS_IGNORED,   "auto_map",    "aux_loss_alpha", "ep_size", "head_dim",
    "pretraining_tp", "qk_head_dim", "seq_aux",        NULL,
};

static const char *const mixtral_ignored[] = {
    ALWAYS_IGNORED, "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", NULL,
};

const yard_family yard_families[] = {
    {
        .name = "deepseek_v3",
        .architecture = "DeepseekV3ForCausalLM",
        .model_type = "deepseek_v3",
        .attention = YARD_ATTENTION_MLA,
        .names = YARD_NAMES_DEEPSEEK,
        .rope_layout = YARD_ROPE_PAIRS,
        .score = YARD_SCORE_SIGMOID,
        .group_value = YARD_GROUP_TWO_LARGEST,
        .routing = YARD_ROUTING_NOAUX_TC,
        .router_bias = true,
        .mtp_reads_normed_hidden = true,
        .sizes = deepseek_v3_sizes,
        .fixed = deepseek_v3_fixed,
        .ignored = deepseek_ignored,
    },
    {
        .name = "kimi_k2",
        .architecture = "DeepseekV3ForCausalLM",
        .model_type = "kimi_k2",
        .attention = YARD_ATTENTION_MLA,
        .names = YARD_NAMES_DEEPSEEK,
        .rope_layout = YARD_ROPE_PAIRS,
        .score = YARD_SCORE_SIGMOID,
        .group_value = YARD_GROUP_TWO_LARGEST,
        .routing = YARD_ROUTING_NOAUX_TC,
        .router_bias = true,
        .sizes = kimi_k2_sizes,
        .fixed = deepseek_v3_fixed,
        .ignored = deepseek_ignored,
    },
    {
        .name = "deepseek_v2",
        .architecture = "DeepseekV2ForCausalLM",
        .model_type = "deepseek_v2",
        .attention = YARD_ATTENTION_MLA,
        .names = YARD_NAMES_DEEPSEEK,
        .rope_layout = YARD_ROPE_PAIRS,
        .score = YARD_SCORE_SOFTMAX,
        .group_value = YARD_GROUP_LARGEST,
        .routing = YARD_ROUTING_GREEDY,
        .sizes = deepseek_v2_sizes,
        .fixed = deepseek_v2_fixed,
        .ignored = deepseek_ignored,
    },
    {
        .name = "mixtral",
        .architecture = "MixtralForCausalLM",
        .model_type = "mixtral",
        .attention = YARD_ATTENTION_GQA,
        .names = YARD_NAMES_MIXTRAL,
        .rope_layout = YARD_ROPE_HALVES,
        .score = YARD_SCORE_SOFTMAX,
        .group_value = YARD_GROUP_LARGEST,
        .routing = YARD_ROUTING_NORMALISED,
        .sizes = mixtral_sizes,
        .fixed = mixtral_fixed,
        .ignored = mixtral_ignored,
    },
};

uint32_t yard_family_count(void)
{
    return sizeof(yard_families) / sizeof(yard_families[0]);
}

const yard_family *yard_family_find(const char *name)
{
    for (uint32_t i = 0; i < yard_family_count(); i++)
        if (!strcmp(yard_families[i].name, name))
            return &yard_families[i];
    return NULL;
}

void yard_family_apply(const yard_family *f, yard_model_config *c)
{
    c->family = f->name;
    c->attention = f->attention;
    c->names = f->names;
    c->rope_layout = f->rope_layout;
    c->score = f->score;
    c->group_value = f->group_value;
    c->router_bias = f->router_bias;
    c->mtp_reads_normed_hidden = f->mtp_reads_normed_hidden;
}
