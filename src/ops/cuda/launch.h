/* Launch wrappers of the CUDA kernels, with plain-C signatures: no CUDA header is needed to include
 * this one. Pointers in the argument structs are device memory. stream is a cudaStream_t (NULL: the
 * default stream). A wrapper returns once the kernel is enqueued; the outputs are valid when the
 * stream has passed it. Errors: YARD_EINVAL, YARD_EDEVICE; nothing is enqueued on error. */
#ifndef YARD_OPS_CUDA_LAUNCH_H
#define YARD_OPS_CUDA_LAUNCH_H

/* The system headers of the room headers below, outside their C linkage. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "ops/ops.h"

/* yard_ops.quantise: FP8 of the bf16-rounded rows, one scale per YARD_GROUP columns.
 *   x  [*n_rows, n_cols] F32 or BF16
 *   y  [*n_rows, n_cols] FP8 with scale [*n_rows, yard_group_count(n_cols)]; columns and rows
 * beyond are left unwritten max_rows bounds *n_rows, which the kernel itself reads: it sizes the
 * grid only, and fewer rows cost next to nothing. 0 enqueues nothing. */
yard_status yard_cuda_quantise_launch(const yard_quantise_args *a, uint32_t max_rows, void *stream,
                                      yard_error *err);

#ifdef __cplusplus
}
#endif

#endif
