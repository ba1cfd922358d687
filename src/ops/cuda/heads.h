/* One small FP8 product per head (k_b and v_b of latent attention), on tensor cores. Plain C. */
#ifndef YARD_OPS_CUDA_HEADS_H
#define YARD_OPS_CUDA_HEADS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "ops/cuda/gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { HEADS_MAX_K = 512, HEADS_TILE_OUT = 128 };

/* Head h reads rows [h * w_step + w_first, + n_out) of w, K contiguous, 64 rows to a box of the
 * map; w_first and w_step are multiples of 64, so that a warpgroup's 64 rows have one scale a block
 * of K. x is rounded to FP8 here, groups of 128 from each head's first element. */
typedef struct yard_heads_args {
    const int32_t *n_rows;
    uint32_t max_rows; /* x has memory for so many */
    const uint8_t *row_mask;
    uint32_t n_heads, n_in, n_out;
    yard_rows x, y; /* F32 or BF16 */
    uint32_t x_step, y_step;
    bool x_aligned; /* bf16, whole 16-byte pieces at every head, of n_in values too */
    bool y_aligned; /* the same for y */
    bool ue8m0;
    uint32_t block_tiles; /* of 128 columns in a thread block; set by the launch */
    uint32_t w_first, w_step;
    const float *w_scale; /* one a row of 128 and block of K */
    uint32_t w_scale_ld;
} yard_heads_args;

/* Raises the shared memory limit; once per device. Errors of both: YARD_EDEVICE. */
yard_status yard_cuda_heads_open(yard_error *err);
yard_status yard_cuda_heads_launch(const yard_tensor_map *w, const yard_heads_args *a, void *stream,
                                   yard_error *err);

/* heads_few.cu: the same for few rows and one block of K, if it takes them. */
bool yard_cuda_heads_few_take(const yard_heads_args *a);
yard_status yard_cuda_heads_few_open(yard_error *err);
yard_status yard_cuda_heads_few_launch(const yard_tensor_map *w, const yard_heads_args *a,
                                       void *stream, yard_error *err);

#ifdef __cplusplus
}
#endif

#endif
