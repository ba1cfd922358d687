/* A model that runs, or one rank's share of it: weights, cache and buffers on one device, and the
 * forward pass of a step. A layer is five stages in the order of a schedule (schedule.h); on one
 * rank dispatch and combine are local copies.
 *
 * With several ranks every rank makes the same forward and draft calls with the same schedules in
 * the same order, also with no tokens; tokens, sequences and pages are each instance's own, and
 * equal on its ranks. */
#ifndef YARD_MODEL_FORWARD_H
#define YARD_MODEL_FORWARD_H

#include <yard/fabric.h>

#include "model/layout.h"
#include "model/schedule.h"
#include "model/weights.h"

typedef struct yard_model_options {
    bool exact;          /* f32 activations, nothing quantised */
    bool fp8_cache;      /* latents are cached as FP8; not with exact, nor without latents */
    bool mtp;            /* load the first MTP module, if there is one */
    uint32_t n_threads;  /* 0: all processors of the affinity mask */
    const char *variant; /* of ops: see yard_ops_config; NULL: its default */
    const char *choices; /* of ops: see yard_ops_config; NULL: the built-in ones */
    yard_pin pin;        /* where the CPU's threads run */
    const yard_ops *ops; /* NULL: the CPU's. Several ranks of one whose memory is its own (not
                            in_host_memory) exchange through libyard-ep's CUDA */
    uint32_t max_tokens; /* rows of a step */
    uint32_t max_seqs;
    uint32_t max_logits; /* rows whose logits are computed at once */
    uint32_t n_pages;    /* cache pages of YARD_PAGE_TOKENS positions */
    uint32_t max_pages_per_seq;

    yard_layout layout;  /* all zero: one rank; equal on all ranks, as exact, fp8_cache, mtp and
                            max_tokens */
    uint32_t rank;       /* of layout.ep */
    bool micro_batch;    /* schedules of two halves may be asked for: more heap. Equal on all ranks
                          */
    yard_fabric *fabric; /* of layout.ep ranks; borrowed, must outlive the model; NULL with one */
    yard_sym heap_at;    /* where budget.heap_bytes of its heap begin, zeroed, for the model
                            alone; a multiple of 64, equal on all ranks. On a device they are its
                            device_heap_bytes, from 0 on */
    uint64_t timeout_us; /* of every wait for a peer; 0: the fabric's default */
} yard_model_options;

/* Memory of one rank, known before anything is allocated. */
typedef struct yard_model_budget {
    uint64_t weight_bytes;  /* mapped from the checkpoint and read; copied to a device's memory */
    uint64_t heap_bytes;    /* symmetric heap, rows between ranks: what the fabric is created with,
                               on the device where memory is its; 0 with one rank */
    uint64_t cache_bytes;   /* KV */
    uint64_t scratch_bytes; /* activations, logits, the operations' workspace: touched as needed
                               where memory is the host's */
} yard_model_budget;

/* fabric and heap_at of the options are not read. Errors: as yard_layout_check(); YARD_EINVAL for a
 * rank outside the layout, for fp8_cache in exact mode, and for what libyard-ep cannot exchange;
 * YARD_ENOTSUP for fp8_cache of a model without latents. */
yard_status yard_model_budget_of(const yard_model_config *config, const yard_model_options *options,
                                 yard_model_budget *out, yard_error *err);

/* The rows of the next step, filled by the caller before yard_model_forward(): see yard_batch. The
 * arrays belong to the model, in the host's memory; the forward pass brings them to the device. */
typedef struct yard_step {
    int32_t n_tokens;
    uint32_t max_rows; /* several ranks, and equal on all: none of them has more tokens. Up to
                          max_tokens, which it is at first; what a device takes its kernels by */
    int32_t *token, *position, *seq; /* [max_tokens] */
    uint8_t *absorbed;               /* [max_tokens] */
    int32_t *page_table;             /* [max_seqs, max_pages_per_seq] */
} yard_step;

typedef struct yard_model yard_model;

/* Loads this rank's weights from dir and allocates everything; a device with memory of its own gets
 * the weights, with a progress notice. config is copied. Not collective. Errors: as
 * yard_model_budget_of(), yard_layout_check_nodes() and yard_weights_load(); YARD_EDEVICE and
 * YARD_ENOTSUP of the device; YARD_ENOMEM naming what did not fit. */
yard_status yard_model_create(yard_model **out, const char *dir, const yard_model_config *config,
                              const yard_model_options *options, const yard_notify *notify,
                              yard_error *err);
void yard_model_destroy(yard_model *model); /* NULL is fine */

/* After a failure: the same rank of a new group, over another fabric that is like the first was at
 * creation. Weights stay; the cache's contents are void. Not collective. Errors: as
 * yard_model_create(). */
yard_status yard_model_rejoin(yard_model *model, yard_fabric *fabric, yard_error *err);

yard_step *yard_model_step(yard_model *model);
const char *yard_model_describe(const yard_model *model);
bool yard_model_has_mtp(const yard_model *model);
const char *yard_model_identity(const yard_model *model); /* yard_checkpoint_identity() */

/* Runs all layers over the step's rows. schedule NULL: yard_schedule_none. Errors: YARD_EPEER,
 * YARD_ETIMEDOUT: a rank was lost, or a wait passed its deadline; the message names layer, stage
 * and ranks, on a device the ranks alone. The step's results are void then, and every later call
 * returns the same status: the group is to be formed anew (yard_model_rejoin). YARD_EINVAL: two
 * halves without micro_batch. YARD_EDEVICE: the device failed; nothing runs on it any more. */
yard_status yard_model_forward(yard_model *model, const yard_schedule *schedule, yard_error *err);

/* Computes the logits of the rows index[0..n_rows) of the last forward pass, n_rows <= max_logits;
 * they stay on the device until the next call. Errors: YARD_EDEVICE. */
yard_status yard_model_logits(yard_model *model, const int32_t *index, uint32_t n_rows,
                              yard_error *err);

/* *out: rows [first, first + n_rows) of those logits, [n_rows, vocab] f32 in the host's memory,
 * owned by the model, valid until the next call of this or of those before and after. Errors:
 * YARD_ENOMEM, YARD_EDEVICE. */
yard_status yard_model_read_logits(yard_model *model, uint32_t first, uint32_t n_rows,
                                   const float **out, yard_error *err);

/* Samples one token for each row of those logits, which it changes.
 *   rows    [n_rows] their lists lie in the host's memory
 *   token   [n_rows] out
 *   finite  [n_rows] out: 1 where all logits were finite numbers
 * Errors: YARD_ENOMEM, YARD_EDEVICE. */
yard_status yard_model_sample(yard_model *model, const yard_sample_row *rows, uint32_t n_rows,
                              int32_t *token, uint8_t *finite, yard_error *err);

/* Runs the MTP module over the first n_rows rows of the last forward pass; next_token[i] is the
 * token after row i; NULL when n_rows is 0. Logits calls that follow are the module's (row i
 * predicts the token two after its own) until the next forward pass. Uses and fills a cache of its
 * own, at the same positions. Errors: as yard_model_forward(). */
yard_status yard_model_draft(yard_model *model, const yard_schedule *schedule,
                             const int32_t *next_token, int32_t n_rows, yard_error *err);

/* A cache page of all layers, MTP's included, as bytes: layer by layer, 64 rows of the cache.
 * Between steps. Errors: those of the device; YARD_ENOMEM (copy). */
size_t yard_model_page_bytes(const yard_model *model);
yard_status yard_model_read_page(yard_model *model, int32_t page, void *out, yard_error *err);
yard_status yard_model_write_page(yard_model *model, int32_t page, const void *data,
                                  yard_error *err);
yard_status yard_model_copy_page(yard_model *model, int32_t from, int32_t to, yard_error *err);

/* What a layer left behind, in the host's memory, for tests: called after each layer of forward().
 */
typedef struct yard_layer_trace {
    uint32_t layer;
    uint32_t n_tokens;
    const float *hidden;   /* [n_tokens, hidden] residual stream after the layer */
    const int32_t *expert; /* [n_tokens, top_k] NULL for dense layers */
    const float *weight;   /* [n_tokens, top_k] */
} yard_layer_trace;
void yard_model_set_trace(yard_model *model, void (*fn)(void *ctx, const yard_layer_trace *trace),
                          void *ctx);

#endif
