/* Private to the model room: what forward.c allocates, layer.c and exchange.c run on. */
#ifndef YARD_MODEL_FORWARD_IMPL_H
#define YARD_MODEL_FORWARD_IMPL_H

#include "ep/ep.h"
#include "model/forward.h"
#include "model/identity.h"

/* Activations in the forms that consumers want: plain (F32 or BF16), and FP8 when projections are.
 *
 * In quantised mode a value is rounded to bf16 where a product or the cache reads it or the wire
 * will carry it. What only a norm or the residual stream reads stays f32. */
typedef yard_out activation;

typedef struct yard_layer {
    const yard_layer_weights *w;
    yard_kv_layer cache;
} yard_layer;

/* Where a pass is. */
typedef struct yard_place {
    uint32_t layer_idx;
    yard_stage stage;
} yard_place;

/* Memory that the host fills and operations read. Where the device's memory is the host's, both
 * sides are the same. */
typedef struct yard_mirror {
    uint8_t *host, *device;
    size_t n_bytes;
} yard_mirror;

/* Buffers of consecutive rows of a step: all of them, or one of two halves. */
typedef struct yard_part {
    int32_t n_tokens;
    uint32_t max_rows; /* bounds n_tokens, on all ranks: operations pick kernels by it, a power of
                          two, so that few different ones are asked for */
    yard_batch batch;  /* the rows as operations see them; its n_tokens says the same */
    bool has_prompts, has_generated; /* of the whole step: rows with absorbed 0, with 1 */
    yard_ep_round *round;

    float *x;              /* [max_tokens, hidden] residual stream */
    activation h;          /* [.., hidden] normalised */
    yard_rows q_a, kv_a;   /* [.., q_rank], [.., kv_rank + rope] f32 */
    activation q_a_norm;   /* [.., q_rank] */
    yard_rows q;           /* [.., heads * (nope + rope)] */
    yard_rows q_latent;    /* [.., heads * kv_rank] */
    yard_rows o_latent;    /* [.., heads * kv_rank] */
    yard_rows k, v;        /* grouped-query attention: [.., kv heads * head_dim] f32 */
    activation attended;   /* [.., heads * v] */
    yard_rows delta;       /* [.., hidden] f32, what attention or a dense MLP adds */
    yard_rows mlp_gate_up; /* [.., 2 * dense_inter or 2 * shared inter] */
    activation mlp_mid;

    float *router_logits; /* [.., n_experts] */
    int32_t *expert;      /* [.., top_k] */
    float *expert_weight; /* [.., top_k] */
    int32_t *row_index;   /* [.., top_k]; one rank only */
    yard_rows expert_y;   /* [expert rows, hidden] results of the rows' experts */
    float *moe_y;         /* [.., hidden] */
} yard_part;

/* Passes that are recorded (replay.c): the model's layers, the MTP module's. */
typedef enum yard_pass_kind { YARD_PASS_FORWARD, YARD_PASS_DRAFT, YARD_PASS_COUNT } yard_pass_kind;

enum { YARD_REPLAY_ROWS = 256, YARD_REPLAY_BOUNDS = 9 }; /* 1, 2, 4, .. 256 rows */

typedef struct yard_replay {
    const yard_schedule *schedule; /* of the recording, or of the one to come; NULL: none yet */
    yard_graph *graph;
} yard_replay;

struct yard_model {
    yard_model_config config;
    yard_model_options options;
    yard_share share; /* what this rank has of each layer */
    yard_weights *weights;
    char identity[YARD_IDENTITY_BYTES];
    const yard_ops *ops;
    yard_stream stream;
    yard_ep *ep;                   /* NULL: one rank */
    yard_all_reduce *reduce;       /* NULL: TP 1 */
    const yard_schedule *schedule; /* of the pass under way */
    yard_place at;                 /* of the stage that is being issued */
    _Atomic yard_status failed; /* of the first exchange of the group that failed, at failed_at */
    yard_place failed_at;       /* layer_idx UINT32_MAX: a device found it as the pass ran */

    size_t heap_bytes; /* of the symmetric heap */

    /* What the host fills for a pass: one of its arrays is one of step's, or named below. */
    yard_mirror inputs;
    yard_step step;
    int32_t *n_logits;    /* [1] */
    int32_t *logit_index; /* [max_logits] */
    int32_t *count;       /* [1 + YARD_MAX_HALVES] rows of the step, and of each half */
    int32_t *next_token;  /* [max_tokens] */
    size_t page_table_at; /* bytes of inputs before step.page_table, which comes last */

    yard_mirror sampling; /* what yard_model_sample() brings; grows */
    float *read_logits;   /* [max_logits, vocab] copies on the host; NULL: not needed yet */
    struct yard_prepared **prepared; /* [n_prepared] weights on the device */
    uint32_t n_prepared;
    void *vectors; /* norms and biases there */

    void *block; /* the device's memory under the buffers below */
    size_t block_bytes;
    yard_dtype plain;  /* dtype of plain activations: F32 when exact, else BF16 */
    yard_dtype cached; /* of the cache: plain, or FP8 */
    bool quantise;     /* FP8 projections get FP8 activations */
    float softmax_scale;
    float *inv_freq;

    yard_layer *layers; /* [n_layers (+ 1 with MTP)] */
    yard_part all, half[YARD_MAX_HALVES];
    yard_replay replays[YARD_PASS_COUNT][YARD_REPLAY_BOUNDS];

    /* of this rank's experts, between receipt and return of rows */
    size_t expert_rows;    /* how many there may be */
    int32_t *expert_count; /* [experts] rows of each */
    int32_t *offset;       /* [experts + 1] first row of each */
    activation expert_x;   /* [expert_rows, hidden] one form a layer */
    yard_rows expert_gate_up;
    activation expert_mid; /* [expert_rows, expert_inter] */

    float *selected; /* [max_logits, hidden] */
    activation selected_norm;
    float *logits; /* [max_logits, vocab] */

    bool drafted;      /* x holds the MTP module's output */
    float *next_embed; /* [.., hidden] */
    yard_rows joined;  /* [.., 2 * hidden] */

    void (*trace)(void *ctx, const yard_layer_trace *trace);
    void *trace_ctx;
};

/* device.c: what crosses between the host and the device */

yard_status yard_mirror_open(const yard_model *m, yard_mirror *mirror, size_t n_bytes,
                             yard_error *err);
void yard_mirror_close(const yard_model *m, yard_mirror *mirror);
yard_status yard_mirror_upload(const yard_model *m, const yard_mirror *mirror, size_t first,
                               size_t n_bytes, yard_error *err);
/* Where the device sees what the host has at p. */
static inline void *yard_mirrored(const yard_mirror *mirror, const void *p)
{
    return mirror->device + ((const uint8_t *)p - mirror->host);
}

/* The power of two, or max_rows, that operations over n_rows are told. */
uint32_t yard_model_bound_rows(uint32_t n_rows, uint32_t max_rows);
/* The inputs of a pass over n_tokens rows, on their way. */
yard_status yard_model_bring_rows(yard_model *m, int32_t n_tokens, yard_error *err);

/* place.c */

/* Weights to a device with memory of its own: m->weights refers to that afterwards. */
yard_status yard_model_place_weights(yard_model *m, const yard_notify *notify, yard_error *err);
void yard_model_release_weights(yard_model *m);

/* y = in . w^T, reading FP8 activations when w is FP8 and the mode quantises; max_rows as in
 * yard_linear_args. */
void yard_model_linear(const yard_model *m, const activation *in, const int32_t *n_rows,
                       uint32_t max_rows, const yard_matrix *w, yard_rows y);

/* Grouped-query attention (layer_gqa.c): q, k, v of the normalised rows and append to the cache;
 * attention. */
void yard_model_gqa_input(yard_model *m, yard_part *p, const yard_layer *layer);
void yard_model_gqa_attend(yard_model *m, yard_part *p, const yard_layer *layer);

/* One stage of a layer over the rows of p. */
void yard_model_run_stage(yard_model *m, yard_part *p, uint32_t layer_idx, yard_stage stage);

/* Layers [first, end) over the step's rows, their stages in the order of the schedule. */
void yard_model_issue_layers(yard_model *m, const yard_schedule *schedule, uint32_t first,
                             uint32_t end);
/* The step's rows in two halves, if the schedule has halves. Errors: YARD_EINVAL. */
yard_status yard_model_cut(yard_model *m, const yard_schedule *schedule, yard_error *err);

/* What a pass issues; all of it depends on the schedule, the rows' bound and the inputs alone. */
typedef void (*yard_pass)(yard_model *m, const yard_schedule *schedule);
yard_status yard_model_issue_pass(yard_model *m, const yard_schedule *schedule, yard_pass_kind kind,
                                  yard_pass pass, yard_error *err);
void yard_model_release_replays(yard_model *m);

/* Places the buffers of max_tokens rows. */
void yard_part_lay_out(const yard_model *m, yard_part *p, yard_arena *arena);
yard_rows yard_rows_take(yard_arena *arena, yard_dtype dtype, size_t n_rows, uint32_t n_cols);
activation yard_activation_take(const yard_model *m, yard_arena *arena, size_t n_rows,
                                uint32_t n_cols);

/* What passes between ranks. The sum over an instance (m->reduce), and rows to the experts of all
 * ranks and back: copies on one rank, libyard-ep on several. A layer
 * makes the four calls in this order; two parts may be between send and finish at once. All are
 * operations of the stream; after a failure they do nothing. */

/* What expert_rows is, and what the heap needs. */
yard_status yard_exchange_size(const yard_model_config *c, const yard_model_options *options,
                               size_t *expert_rows, size_t *heap_bytes, yard_error *err);
/* Results of experts are left where the round has a place for them. */
bool yard_exchange_in_place(const yard_model_options *options);
yard_status yard_exchange_create(yard_model *m, yard_error *err);
/* p takes the round, and its place for results if it has one. */
void yard_exchange_enter(yard_model *m, yard_part *p, uint32_t round_idx);
void yard_exchange_destroy(yard_model *m);
/* YARD_OK, or that of the first failure with its message. After synchronise. */
yard_status yard_exchange_check(yard_model *m, yard_error *err);

/* p->delta becomes the sum of what the ranks of the instance have in theirs. */
void yard_exchange_sum(yard_model *m, yard_part *p);
/* The rows of p->h on their way to p->expert; fp8: their FP8 form. */
void yard_exchange_send(yard_model *m, yard_part *p, bool fp8);
/* Fills offset and expert_x, all ranks' rows for this rank's experts. */
void yard_exchange_take(yard_model *m, yard_part *p, bool fp8);
/* p->expert_y on its way back. */
void yard_exchange_return(yard_model *m, yard_part *p);
/* Fills p->moe_y. */
void yard_exchange_finish(yard_model *m, yard_part *p);

static inline yard_rope yard_model_rope(const yard_model *m)
{
    return (yard_rope){ .inv_freq = m->inv_freq,
                        .n_dims = m->config.rope_dims,
                        .layout = m->config.rope_layout };
}

/* Columns [first, ..) of rows. */
static inline yard_rows yard_columns(yard_rows x, uint32_t first)
{
    x.data = (uint8_t *)x.data + first * yard_dtype_bytes(x.dtype);
    return x;
}

#endif
