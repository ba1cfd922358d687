/* Exchanges that make their own inputs and check their own outputs on the device, so that a graph
 * of them can be replayed thousands of times, each with other tokens and routing. */
#ifndef YARD_TESTS_EP_STRESS_H
#define YARD_TESTS_EP_STRESS_H

#include <stdbool.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { STRESS_MAX_TOP_K = 16, STRESS_STEPS = 10 };

/* Rows are bf16 in, FP8 on the wire, bf16 back, f32 out; expert-major, or in place, where row
 * number instance * max_tokens + token is what a row of expert_y was made from. By value to the
 * kernels.
 */
typedef struct stress {
    uint64_t seed;
    uint32_t rank, n_ranks, tp, group, dp, n_experts, n_local, top_k, hidden, max_tokens, row_align;
    bool partial, in_place, full; /* full: all tokens, uniform routing */
    uint32_t limit[STRESS_STEPS]; /* of tokens, of exchanges in turn; 0: max_tokens */
    uint32_t *step;               /* [1] the exchange, counted by stress_next */
    uint32_t *n_wrong;            /* [4] rows, scales, counts, sums */
    uint16_t *x, *expert_y;
    int32_t *expert, *n_tokens, *count, *row_index;
    float *weight, *expert_x_scale, *y;
    uint8_t *expert_x;
    size_t pitch_bytes, scale_pitch_bytes; /* from row to row of expert_x and expert_x_scale */
} stress;

cudaError_t stress_inputs(const stress *s, cudaStream_t stream); /* spoils the outputs, too */
cudaError_t stress_experts(const stress *s,
                           cudaStream_t stream); /* checks dispatch, fills expert_y */
cudaError_t stress_results(const stress *s, cudaStream_t stream); /* checks combine */
cudaError_t stress_next(const stress *s, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
