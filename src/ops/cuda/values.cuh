/* Single elements of matrices and results on the device, for kernels where speed is not the point.
 */
#ifndef YARD_OPS_CUDA_VALUES_CUH
#define YARD_OPS_CUDA_VALUES_CUH

#include "ops/cuda/quantise.cuh"

static __device__ __forceinline__ float w_value(const yard_matrix *w, size_t row, uint32_t col)
{
    const float value = plain_value(w->dtype, w->data, row * w->ld + col);

    if (w->dtype != YARD_FP8_E4M3)
        return value;
    return value *
           w->scale[(w->row0 + row) / w->block_rows * w->scale_ld + (w->col0 + col) / YARD_GROUP];
}

/* F32 or BF16, rounded to nearest even. */
static __device__ __forceinline__ void store_value(yard_dtype dtype, void *data, size_t at,
                                                   float value)
{
    if (dtype == YARD_F32)
        ((float *)data)[at] = value;
    else
        ((uint16_t *)data)[at] = (uint16_t)(__float_as_uint(bf16_round(value)) >> 16);
}

#endif
