/* Private to the model room: what model.c allocates and layer.c runs on. */
#ifndef YARD_MODEL_FORWARD_IMPL_H
#define YARD_MODEL_FORWARD_IMPL_H

#include "model/forward.h"

/* Activations in the forms that consumers want: plain (F32 or BF16), and FP8 when projections are.
 *
 * In quantised mode a value is rounded to bf16 where a product or the cache reads it or the wire
 * will carry it. What only a norm or the residual stream reads stays f32. */
typedef yard_out activation;

typedef struct yard_layer {
    const yard_layer_weights *w;
    yard_kv_layer cache;
} yard_layer;

struct yard_model {
    yard_model_config config;
    yard_model_options options;
    yard_weights *weights;
    const yard_ops *ops;
    yard_stream stream;
    const yard_schedule *schedule;

    void *block; /* memory under the buffers below */
    size_t block_bytes;
    yard_dtype plain; /* dtype of plain activations: F32 when exact, else BF16 */
    bool quantise;    /* FP8 projections get FP8 activations */
    float softmax_scale;
    float *inv_freq;

    yard_layer *layers; /* [n_layers (+ 1 with MTP)] */
    yard_step step;
    yard_batch batch;     /* the step as operations see it */
    int32_t *n_logits;    /* [1] */
    int32_t *logit_index; /* [max_logits] */

    float *x;              /* [max_tokens, hidden] residual stream */
    activation h;          /* [.., hidden] normalised */
    yard_rows q_a, kv_a;   /* [.., q_rank], [.., kv_rank + rope] f32 */
    activation q_a_norm;   /* [.., q_rank] */
    yard_rows q;           /* [.., heads * (nope + rope)] */
    yard_rows q_latent;    /* [.., heads * kv_rank] */
    yard_rows o_latent;    /* [.., heads * kv_rank] */
    activation attended;   /* [.., heads * v] */
    yard_rows delta;       /* [.., hidden] f32, what attention or a dense MLP adds */
    yard_rows mlp_gate_up; /* [.., 2 * dense_inter or 2 * shared inter] */
    activation mlp_mid;

    float *router_logits; /* [.., n_experts] */
    int32_t *expert;      /* [.., top_k] */
    float *expert_weight; /* [.., top_k] */
    int32_t *offset;      /* [n_experts + 1] */
    int32_t *row_index;   /* [.., top_k] */
    activation expert_x;  /* [max_tokens * top_k, hidden] one form a layer */
    yard_rows expert_gate_up;
    activation expert_mid; /* [max_tokens * top_k, expert_inter] */
    yard_rows expert_y;    /* [max_tokens * top_k, hidden] */
    float *moe_y;          /* [.., hidden] */

    float *selected; /* [max_logits, hidden] */
    activation selected_norm;
    float *logits; /* [max_logits, vocab] */

    bool drafted;        /* x holds the MTP module's output */
    int32_t *next_token; /* [max_tokens] */
    float *next_embed;   /* [.., hidden] */
    yard_rows joined;    /* [.., 2 * hidden] */

    void (*trace)(void *ctx, const yard_layer_trace *trace);
    void *trace_ctx;
};

/* y = in . w^T, reading FP8 activations when w is FP8 and the mode quantises. */
void yard_model_linear(yard_model *m, const activation *in, const int32_t *n_rows,
                       const yard_matrix *w, yard_rows y);

/* One layer, its stages in the order of the schedule. */
void yard_model_run_layer(yard_model *m, const yard_layer *layer);

/* Columns [first, ..) of rows. */
static inline yard_rows yard_columns(yard_rows x, uint32_t first)
{
    x.data = (uint8_t *)x.data + first * yard_dtype_bytes(x.dtype);
    return x;
}

#endif
