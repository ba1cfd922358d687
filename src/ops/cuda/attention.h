/* Attention kernels of the CUDA table: launch wrappers in plain C. All pointers in the argument
 * structs are device memory, but the structs and yard_batch themselves are the host's.
 *
 * A wrapper returns once its kernels are enqueued; max_rows bounds *batch.n_tokens and sizes grids
 * and passes only. Errors: YARD_EINVAL for shapes that no kernel takes, YARD_EDEVICE; nothing is
 * enqueued on YARD_EINVAL. */
#ifndef YARD_OPS_CUDA_ATTENTION_H
#define YARD_OPS_CUDA_ATTENTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "ops/cuda/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- attend_plain.cu: any shape, f32 arithmetic ---------------------------------------------- */

enum { ATTEND_ABSORBED_ONLY = 1, ATTEND_ALL_ROWS = 2 };

/* One piece of a query head: dims elements from element h * stride + first of the row. */
typedef struct yard_attend_query {
    yard_rows rows;
    uint32_t dims, stride, first;
} yard_attend_query;

/* y[i, h] = softmax(scale * [q0, q1][i, h] . key[p, g]) value[p, g], g = h / n_shared, over the
 * positions that the row sees. */
typedef struct yard_attend_args {
    yard_batch batch;
    uint32_t which; /* ATTEND_ABSORBED_ONLY: rows with absorbed set; ATTEND_ALL_ROWS */
    uint32_t n_heads, n_shared;
    yard_attend_query q0, q1; /* q1.dims 0: none */
    yard_kv_layer cache;
    uint32_t kv_rank; /* of an FP8 cache, and how its rows lie */
    yard_latent_row cached;
    uint32_t key_stride; /* key of kv head g: from element g * key_stride of a cache row */
    uint32_t value_first, value_stride, n_v;
    uint32_t window;
    float scale;
    yard_rows y; /* head h from element h * n_v */
} yard_attend_args;

yard_status yard_cuda_attend_launch(const yard_attend_args *a, uint32_t max_rows, void *stream,
                                    yard_error *err);

/* gqa.cu: bf16 in whole pieces of 16 bytes, heads of 64 or 128 alike (value_first elements from
 * their keys), up to 16 to a kv head; all rows. */
yard_status yard_cuda_gqa_launch(const yard_attend_args *a, uint32_t max_rows, void *stream,
                                 yard_error *err);

/* mla_prefill for any shape: every block expands the pages that its eight rows see. w: the device's
 * matrix. */
yard_status yard_cuda_attend_expanded_launch(const yard_mla_prefill_args *a, uint32_t max_rows,
                                             void *stream, yard_error *err);

#ifdef __cplusplus
}
#endif

#endif
