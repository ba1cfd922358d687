/* Counting parameters and bytes of a description: what `switchyard inspect` and the planner print.
 */
#ifndef YARD_MODEL_MEMORY_H
#define YARD_MODEL_MEMORY_H

#include "model/layout.h"

/* MTP modules are counted apart. */
typedef struct yard_param_count {
    uint64_t total;           /* without MTP */
    uint64_t active;          /* per token: chosen experts only, without embedding, with head */
    uint64_t mtp;             /* all modules, their copies of embedding and head included */
    uint64_t embedding, head; /* head 0 when tied */
    /* attention with the norms of its latents, the router with its correction biases; the two
     * norms of a layer are in no part */
    uint64_t attention_per_layer, dense_mlp_per_layer, expert, shared_per_layer, router_per_layer;
} yard_param_count;

void yard_model_count_params(const yard_model_config *c, yard_param_count *out);

/* Values that each of tp ranks caches for one token and layer: kv_rank + rope, which all have
 * whole, or the keys and values of its heads. */
uint32_t yard_model_kv_width(const yard_model_config *c, uint32_t tp);

/* Bytes of that many values in a cache of that dtype; FP8 is for MLA alone: see yard_latent_row. */
uint32_t yard_model_kv_row_bytes(const yard_model_config *c, uint32_t tp, yard_dtype dtype);

/* Bytes of KV cache of one token in all layers, without TP. */
uint64_t yard_model_kv_bytes_per_token(const yard_model_config *c, yard_dtype dtype);

/* What one rank holds; formulas in memory.c. */
typedef struct yard_rank_memory {
    uint32_t dp_group, tp_slice;
    uint32_t first_expert, n_experts; /* per MoE layer */
    uint64_t weight_bytes;            /* without MTP */
    uint64_t mtp_weight_bytes;
} yard_rank_memory;

/* Errors: YARD_EINVAL naming what does not divide and the nearest layout that does. */
yard_status yard_model_rank_memory(const yard_model_config *c, yard_layout layout, uint32_t rank,
                                   yard_rank_memory *out, yard_error *err);

#endif
