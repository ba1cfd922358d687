/* The tensors of a description: name, shape, kind, and the place each has in yard_weights. One
 * table for those who read checkpoints and those who write them. Private to the model room. */
#ifndef YARD_MODEL_TENSOR_TABLE_H
#define YARD_MODEL_TENSOR_TABLE_H

#include "model/weights.h"

typedef enum yard_tensor_kind {
    YARD_TENSOR_PROJECTION, /* a yard_matrix; FP8 with scales where the description says so */
    YARD_TENSOR_EMBEDDING,  /* a yard_matrix, never FP8: embedding */
    YARD_TENSOR_HEAD,       /* the same, a matrix that is multiplied with: head, eh_proj */
    YARD_TENSOR_ROUTER,     /* the same, the router's */
    YARD_TENSOR_NORM,       /* a yard_vector */
    YARD_TENSOR_BIAS        /* a const float *, converted to F32 */
} yard_tensor_kind;

typedef enum yard_tensor_scope {
    YARD_SCOPE_MODEL,  /* place counts from yard_weights */
    YARD_SCOPE_LAYER,  /* from the yard_layer_weights of layer_idx, an MTP module's from n_layers on
                        */
    YARD_SCOPE_EXPERT, /* the same, but there is a yard_matrix *, the array of all experts */
    YARD_SCOPE_MTP     /* from the yard_mtp_weights of layer_idx - n_layers */
} yard_tensor_scope;

enum { YARD_TENSOR_NAME_BYTES = 96 };

typedef struct yard_tensor_spec {
    char name[YARD_TENSOR_NAME_BYTES];
    yard_tensor_kind kind;
    yard_tensor_scope scope;
    uint32_t layer_idx, expert_idx;
    size_t place; /* byte offset */
    uint32_t n_dims;
    uint32_t shape[2];
    yard_span part[2]; /* the share's rows and columns; n 0: another rank's tensor */
} yard_tensor_spec;

/* Calls each for every tensor, without scales, layer by layer; stops at the first failure and
 * returns it. share NULL: all of every tensor. */
yard_status yard_tensor_walk(const yard_model_config *c, const yard_share *share,
                             yard_status (*each)(void *ctx, const yard_tensor_spec *spec),
                             void *ctx);

#endif
