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

/* The operations of ops.h, whose shapes and rules hold. Counts are read on the device: max_rows
 * sizes the grid only, and fewer rows cost next to nothing. */
yard_status yard_cuda_embed_launch(const yard_embed_args *a, uint32_t max_rows, void *stream,
                                   yard_error *err);
yard_status yard_cuda_rms_norm_launch(const yard_rms_norm_args *a, uint32_t max_rows, void *stream,
                                      yard_error *err);
yard_status yard_cuda_rope_q_launch(const yard_rope_q_args *a, uint32_t max_rows, void *stream,
                                    yard_error *err);
yard_status yard_cuda_rope_append_kv_launch(const yard_rope_append_kv_args *a, uint32_t max_rows,
                                            void *stream, yard_error *err);
yard_status yard_cuda_gqa_append_kv_launch(const yard_gqa_append_kv_args *a, uint32_t max_rows,
                                           void *stream, yard_error *err);
yard_status yard_cuda_moe_route_launch(const yard_moe_route_args *a, uint32_t max_rows,
                                       void *stream, yard_error *err);
yard_status yard_cuda_moe_scatter_launch(const yard_moe_scatter_args *a, uint32_t max_rows,
                                         void *stream, yard_error *err);
yard_status yard_cuda_count_offsets_launch(const yard_count_offsets_args *a, uint32_t max_rows,
                                           void *stream, yard_error *err);
yard_status yard_cuda_moe_gather_launch(const yard_moe_gather_args *a, uint32_t max_rows,
                                        void *stream, yard_error *err);
yard_status yard_cuda_silu_mul_launch(const yard_silu_mul_args *a, uint32_t max_rows, void *stream,
                                      yard_error *err);
yard_status yard_cuda_residual_add_launch(const yard_residual_add_args *a, uint32_t max_rows,
                                          void *stream, yard_error *err);
yard_status yard_cuda_quantise_launch(const yard_quantise_args *a, uint32_t max_rows, void *stream,
                                      yard_error *err);
yard_status yard_cuda_select_rows_launch(const yard_select_rows_args *a, uint32_t max_rows,
                                         void *stream, yard_error *err);

/* Raise the shared memory limits of the kernels that need it, once per device. */
yard_status yard_cuda_moe_open(yard_error *err);

#ifdef __cplusplus
}
#endif

#endif
