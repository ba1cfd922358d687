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

/* Value c of a row of a cache; at and kv_rank are for FP8, which is of latents: see
 * yard_latent_row_of(). */
static __device__ __forceinline__ float cached_value(const yard_kv_layer &cache,
                                                     const yard_latent_row &at, uint32_t kv_rank,
                                                     size_t row, uint32_t c)
{
    const uint8_t *stored = (const uint8_t *)cache.data + row * at.n_bytes;

    if (cache.dtype != YARD_FP8_E4M3)
        return plain_value(cache.dtype, cache.data, row * cache.width + c);
    if (c >= kv_rank)
        return plain_value(YARD_BF16, stored + at.rope_at, c - kv_rank);
    return bf16_round(
        __fmul_rn(e4m3_value(stored[c]), ((const float *)(stored + at.scale_at))[c / YARD_GROUP]));
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
