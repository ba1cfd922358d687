/* Products in plain f32 arithmetic, for whatever the tensor-core kernels do not take: f32
 * activations, weights in f32 or f16, blocks of odd heights, rows that are not aligned. Correct and
 * simple; speed is not the point. Plain C. */
#ifndef YARD_OPS_CUDA_PRODUCT_H
#define YARD_OPS_CUDA_PRODUCT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "ops/ops.h"

/* y[row, g * y_step + o] = sum over k of x[row, g * x_step + k] w(g, o, k). A group's rows are its
 * own (offset, row_count), or all rows (heads: offset NULL, row_count [1]). */
typedef struct yard_product_args {
    uint32_t n_groups, n_in, n_out;
    const int32_t *offset, *row_count, *x_index;
    const uint8_t *row_mask;
    yard_rows x, y;
    uint32_t x_step, y_step;
    bool quantise, ue8m0; /* round x to FP8 first, groups of 128 from k = 0 */
    yard_matrix w;        /* of all groups; row w_first + g * w_step is the first of group g */
    uint32_t w_first, w_step;
    bool transposed; /* k counts rows of w, o its columns */
} yard_product_args;

/* max_rows: of all groups together. Errors: YARD_EDEVICE. */
yard_status yard_cuda_product_launch(const yard_product_args *a, uint32_t max_rows, void *stream,
                                     yard_error *err);

#ifdef __cplusplus
}
#endif

#endif
