/* A checkpoint bound to a description: every tensor the model needs, found, checked and given its
 * place; every tensor it does not know refused. */
#ifndef YARD_MODEL_WEIGHTS_H
#define YARD_MODEL_WEIGHTS_H

#include "model/config.h"
#include "model/layout.h"
#include "model/safetensors.h"

/* A norm's weight [n]. */
typedef struct yard_vector {
    yard_dtype dtype; /* F32 or BF16 */
    uint32_t n;
    const void *data;
} yard_vector;

/* MLA has the latents' members, grouped-query attention q_b, k, v and o; the others are empty. */
typedef struct yard_attention_weights {
    yard_matrix q_a;       /* [q_rank, hidden]; absent (data NULL) when q_rank == 0 */
    yard_vector q_a_norm;  /* [q_rank] */
    yard_matrix q_b;       /* [n_heads * (nope + rope), q_rank], or [.., hidden] when q_rank == 0 */
    yard_matrix kv_a;      /* [kv_rank + rope, hidden] */
    yard_vector kv_a_norm; /* [kv_rank] */
    yard_matrix kv_b;      /* [n_heads * (nope + v), kv_rank], head by head: nope rows, v rows */
    yard_matrix k;         /* [n_kv_heads * (nope + rope), hidden] */
    yard_matrix v;         /* [n_kv_heads * v, hidden] */
    yard_matrix o;         /* [hidden, n_heads * v] */
} yard_attention_weights;

typedef struct yard_mlp_weights {
    yard_matrix gate, up; /* [inter, hidden] */
    yard_matrix down;     /* [hidden, inter] */
} yard_mlp_weights;

typedef struct yard_moe_weights {
    yard_matrix router;            /* [n_experts, hidden] BF16 or F32 */
    const float *bias;             /* [n_experts]; NULL when the router has none */
    yard_matrix *gate, *up, *down; /* [experts of the share] each */
    yard_mlp_weights shared;       /* inter = n_shared_experts * expert_inter; data NULL without */
} yard_moe_weights;

typedef struct yard_layer_weights {
    yard_vector input_norm, post_norm;
    yard_attention_weights attention;
    bool is_moe;
    yard_mlp_weights dense; /* !is_moe */
    yard_moe_weights moe;   /* is_moe */
} yard_layer_weights;

typedef struct yard_mtp_weights {
    yard_matrix embed; /* [vocab, hidden] */
    yard_vector enorm, hnorm;
    yard_matrix eh_proj; /* [hidden, 2 * hidden]: embedding first, hidden second */
    yard_layer_weights layer;
    yard_vector head_norm;
    yard_matrix head; /* [vocab, hidden] */
} yard_mtp_weights;

typedef struct yard_weights {
    yard_matrix embed;          /* [vocab, hidden] */
    yard_layer_weights *layers; /* [n_layers] */
    yard_vector final_norm;
    yard_matrix head;                 /* [vocab, hidden] */
    yard_mtp_weights *mtp;            /* [n_mtp] */
    uint32_t n_layers, n_mtp;         /* as in the config */
    yard_checkpoint *ckpt;            /* owned: the mappings under every pointer above */
    struct yard_converted *converted; /* owned: F32 copies of norms and biases, a list */
} yard_weights;

/* Opens dir and binds a rank's share of it (NULL: all). Refuses by name: a missing tensor, one with
 * another shape or dtype, one that nothing reads, also of other ranks' shares; of its own a value
 * that is not finite, a scale that is not finite and above zero. The scan for such values reads
 * every byte of the share once, and no other, with n_threads (>= 1) threads and a progress notice.
 * Errors: YARD_EIO, YARD_EFORMAT, YARD_ENOMEM. */
yard_status yard_weights_load(yard_weights **out, const char *dir, const yard_model_config *config,
                              const yard_share *share, uint32_t n_threads,
                              const yard_notify *notify, yard_error *err);
void yard_weights_free(yard_weights *weights); /* NULL is fine */

#endif
