/* Checkpoints with random weights in the published layout, for measuring and testing. */
#ifndef YARD_MODEL_SYNTH_H
#define YARD_MODEL_SYNTH_H

#include <stdatomic.h>

#include "model/config.h"

typedef struct yard_synth_options {
    uint64_t seed;        /* the same seed and description give the same bytes */
    uint64_t shard_bytes; /* a shard ends before it would grow beyond this; 0: 4 GB */
    uint32_t n_threads;   /* at least 1 */
    /* NULL, or asked all along, from every thread: not 0 (a signal's handler may set it) stops */
    const atomic_int *cancelled;
} yard_synth_options;

/* The published dimensions of an architecture ("deepseek-v3", "deepseek-v2-lite", "kimi-k2",
 * "mixtral-8x7b"), without MTP module. Errors:
 * YARD_ENOTSUP naming the known ones. */
yard_status yard_synth_dimensions(yard_model_config *out, const char *arch, yard_error *err);

/* Writes config.json, shards and index into dir, which is made if it is not there and must be
 * empty. FP8 projections if c->fp8, else BF16 ones; norms, router, embedding and head BF16. Weights
 * are Gaussian, of a size that keeps activations near 1. On failure nothing of it is left, also not
 * the directory if it was made.
 * Progress: the stage "write", in bytes. Errors: YARD_EINVAL for a directory that is not empty,
 * YARD_EIO (a full disk: with the bytes that were needed), YARD_ENOMEM, YARD_EAGAIN if cancelled.
 */
yard_status yard_synth_write(const char *dir, const yard_model_config *c,
                             const yard_synth_options *options, const yard_notify *notify,
                             yard_error *err);

#endif
