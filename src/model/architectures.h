/* Dimensions of published models, each stored once. A row fills every struct that has members of
 * these names: a description (yard_model_config, where synth takes it from) and the planner's
 * model. */
#ifndef YARD_MODEL_ARCHITECTURES_H
#define YARD_MODEL_ARCHITECTURES_H

/* clang-format off */

/* deepseek-ai/DeepSeek-V3 config.json; R1 is the same */
#define YARD_DEEPSEEK_V3_DIMENSIONS                                                             \
    .vocab = 129280, .hidden = 7168, .n_layers = 61, .n_dense_layers = 3,                       \
    .n_heads = 128, .q_rank = 1536, .kv_rank = 512,                                             \
    .nope_dims = 128, .rope_dims = 64, .v_dims = 128,                                           \
    .dense_inter = 18432, .expert_inter = 2048, .n_experts = 256, .n_shared_experts = 1,        \
    .top_k = 8, .n_groups = 8, .top_groups = 4

/* deepseek-ai/DeepSeek-V2-Lite config.json */
#define YARD_DEEPSEEK_V2_LITE_DIMENSIONS                                                        \
    .vocab = 102400, .hidden = 2048, .n_layers = 27, .n_dense_layers = 1,                       \
    .n_heads = 16, .kv_rank = 512,                                                              \
    .nope_dims = 128, .rope_dims = 64, .v_dims = 128,                                           \
    .dense_inter = 10944, .expert_inter = 1408, .n_experts = 64, .n_shared_experts = 2,         \
    .top_k = 6, .n_groups = 1, .top_groups = 1

/* moonshotai/Kimi-K2-Instruct config.json */
#define YARD_KIMI_K2_DIMENSIONS                                                                 \
    .vocab = 163840, .hidden = 7168, .n_layers = 61, .n_dense_layers = 1,                       \
    .n_heads = 64, .q_rank = 1536, .kv_rank = 512,                                              \
    .nope_dims = 128, .rope_dims = 64, .v_dims = 128,                                           \
    .dense_inter = 18432, .expert_inter = 2048, .n_experts = 384, .n_shared_experts = 1,        \
    .top_k = 8, .n_groups = 1, .top_groups = 1

/* mistralai/Mixtral-8x7B-v0.1 config.json; the structs name the size of a head differently */
#define YARD_MIXTRAL_8X7B_DIMENSIONS                                                            \
    .vocab = 32000, .hidden = 4096, .n_layers = 32, .n_heads = 32, .n_kv_heads = 8,             \
    .expert_inter = 14336, .n_experts = 8, .top_k = 2, .n_groups = 1, .top_groups = 1
enum { YARD_MIXTRAL_8X7B_HEAD_DIMS = 128 };

/* clang-format on */

#endif
