/* MLA prefill on tensor cores: prompt rows in multi-head form, heads of 128 + 64 and 128, rank 512,
 * weights FP8 (latents rounded first) or bf16. Plain C. */
#ifndef YARD_OPS_CUDA_MLA_PREFILL_H
#define YARD_OPS_CUDA_MLA_PREFILL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "ops/cuda/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PREFILL_RANK = 512,
    PREFILL_NOPE = 128,
    PREFILL_ROPE = 64,
    PREFILL_KEY = PREFILL_NOPE + PREFILL_ROPE,
    PREFILL_V = 128,
    /* a row of an FP8 cache: see yard_latent_row_of() */
    PREFILL_SCALE_AT = PREFILL_RANK,
    PREFILL_ROPE_AT = PREFILL_SCALE_AT + PREFILL_RANK / YARD_GROUP * 4,
    PREFILL_CODES_BYTES = PREFILL_ROPE_AT + PREFILL_ROPE * 2,
    PREFILL_OUT = PREFILL_NOPE + PREFILL_V, /* rows of kv_b a head */
    PREFILL_RANGE = 4096,                   /* positions expanded at once */
    PREFILL_MAX_CLUSTERS = 132,
    PREFILL_CLUSTER = 2 /* thread blocks that share the keys and values of a head */
};

/* A stream's memory: keys and values of one range of one head for every cluster, and the running
 * softmax of rows that see more than one range. */
typedef struct yard_prefill_workspace {
    uint16_t *keys;   /* [n_clusters, PREFILL_RANGE, PREFILL_KEY] bf16 */
    uint16_t *values; /* [n_clusters, PREFILL_RANGE, PREFILL_V] bf16 */
    float *sums;      /* [max_rows, max_heads, PREFILL_V] */
    float *states;    /* [max_rows, max_heads, 2] reference and total */
    uint32_t n_clusters, max_rows, max_heads;
    yard_tensor_map key_map, value_map; /* boxes of 128 rows, all chunks of 64 columns */
} yard_prefill_workspace;

typedef struct yard_prefill_task {
    yard_batch batch;
    uint32_t n_heads;
    float scale_log2;     /* softmax_scale * log2(e) */
    yard_rows q, y;       /* bf16, whole 16-byte pieces a head */
    yard_kv_layer cache;  /* bf16 or FP8 */
    bool fp8, ue8m0;      /* fp8: weights are, and latents are rounded */
    uint32_t w_first;     /* row of the map where kv_b begins */
    const float *w_scale; /* of kv_b: one a row of 128 and block of 128 columns */
    uint32_t w_scale_ld;
    uint16_t *keys, *values;
    float *sums, *states;
} yard_prefill_task;

/* How many clusters run at once; raises the shared memory limit. Errors of both: YARD_EDEVICE. */
yard_status yard_cuda_mla_prefill_open(uint32_t *n_clusters, yard_error *err);
/* w: the map of the prepared weights. */
yard_status yard_cuda_mla_prefill_launch(const yard_tensor_map *w, const yard_prefill_task *t,
                                         const yard_prefill_workspace *space, void *stream,
                                         yard_error *err);

#ifdef __cplusplus
}
#endif

#endif
