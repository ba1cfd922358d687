/* A model's description: everything the layer code needs to know, read from config.json.
 * Families are rows of one table (config_families.c); the layer code reads this struct and nothing
 * else. */
#ifndef YARD_MODEL_CONFIG_H
#define YARD_MODEL_CONFIG_H

#include "base/base.h"
#include "ops/ops.h"

typedef enum yard_attention_kind {
    YARD_ATTENTION_MLA, /* one cached latent for all heads */
    YARD_ATTENTION_GQA  /* cached keys and values of n_kv_heads */
} yard_attention_kind;

/* How a checkpoint names its tensors. */
typedef enum yard_weight_names { YARD_NAMES_DEEPSEEK, YARD_NAMES_MIXTRAL } yard_weight_names;

enum { YARD_MAX_EOS = 8, YARD_MAX_TOP_K = 64 };

typedef struct yard_model_config {
    const char *family; /* "deepseek_v3"; static */
    yard_attention_kind attention;
    yard_weight_names names;

    uint32_t vocab, hidden, n_layers;
    uint32_t n_dense_layers;      /* layers [0, n_dense_layers) have a dense MLP */
    uint32_t n_heads, n_kv_heads; /* equal with MLA */
    uint32_t q_rank, kv_rank;     /* q_rank 0: q is one projection, not two; GQA: both 0 */
    /* of a head of q and k, not rotated and rotated, and of v; GQA: 0, head_dim, head_dim */
    uint32_t nope_dims, rope_dims, v_dims;
    uint32_t window; /* positions a query sees, its own included; 0: all. GQA only */
    uint32_t dense_inter, expert_inter;
    uint32_t n_experts, n_shared_experts, top_k, n_groups, top_groups;
    yard_router_score score;
    yard_group_value group_value;
    bool router_bias; /* a learned bias is added to the scores for the choice */
    bool normalise_topk;
    float routed_scale;
    float norm_eps;
    bool tied_embedding; /* lm_head is embed_tokens */

    yard_rope_layout rope_layout;
    double rope_theta;
    bool has_yarn; /* the fields below hold only then */
    double yarn_factor, yarn_beta_fast, yarn_beta_slow, yarn_mscale, yarn_mscale_all_dim;
    uint32_t yarn_original_positions;
    uint32_t max_positions;

    uint32_t n_mtp;               /* multi-token-prediction modules stored as layers n_layers .. */
    bool mtp_reads_normed_hidden; /* family: the module reads the state after model.norm; false
                                     for families without modules */

    uint32_t plain_bytes; /* of a value that is not FP8: 4 when the file says float32, else 2 */
    bool fp8;             /* projections are FP8 e4m3 with weight_scale_inv */
    uint32_t block_rows;  /* rows of a block; columns are always 128 */
    bool ue8m0;           /* activation scales are rounded up to powers of two */

    int32_t bos; /* -1: none */
    int32_t eos[YARD_MAX_EOS];
    uint32_t n_eos;
} yard_model_config;

/* Defaults of a checkpoint's authors for chat; absent fields keep "off". */
typedef struct yard_generation_config {
    bool do_sample;
    int32_t eos[YARD_MAX_EOS]; /* ids that end a sequence, beside those of config.json */
    uint32_t n_eos;
    yard_sample_params params;
} yard_generation_config;

/* Reads dir/config.json. A missing
 * field, a wrong type or a value that is not implemented is refused by name; a key nobody reads
 * is reported once through notify->warn. Errors: YARD_EIO, YARD_EFORMAT, YARD_ENOTSUP. */
yard_status yard_model_config_load(yard_model_config *out, const char *dir,
                                   const yard_notify *notify, yard_error *err);

/* The same from memory (fuzzing, tests). name stands for the file in messages. */
yard_status yard_model_config_parse(yard_model_config *out, const char *json, size_t n_bytes,
                                    const char *name, const yard_notify *notify, yard_error *err);

/* dir/generation_config.json; an absent file gives greedy defaults. Ids are not checked against the
 * vocabulary. */
yard_status yard_generation_config_load(yard_generation_config *out, const char *dir,
                                        const yard_notify *notify, yard_error *err);

/* [rope_dims / 2] inverse frequencies with YaRN's correction, computed in double. */
void yard_model_inv_freq(const yard_model_config *c, float *inv_freq);

/* 1 / sqrt(nope + rope), times YaRN's mscale squared. */
float yard_model_softmax_scale(const yard_model_config *c);

#endif
