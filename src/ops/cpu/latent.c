/* Rows of the latent cache: see yard_latent_row_of(). */
#include "ops/cpu/cpu.h"

static yard_dtype rope_dtype(yard_dtype dtype)
{
    return dtype == YARD_FP8_E4M3 ? YARD_BF16 : dtype;
}

void yard_cpu_store_latent(const cpu_kernels *k, yard_dtype dtype, uint32_t kv_rank,
                           uint32_t rope_dims, bool ue8m0, float *latent, const float *rope,
                           void *row)
{
    const yard_latent_row at = yard_latent_row_of(dtype, kv_rank, rope_dims);
    uint8_t *const bytes = row;
    const yard_rows values = { .dtype = rope_dtype(dtype), .data = bytes };
    const yard_rows turned = { .dtype = rope_dtype(dtype), .data = bytes + at.rope_at };

    if (dtype == YARD_FP8_E4M3) {
        yard_cpu_round_values(k, latent, kv_rank);
        k->convert->quantise(latent, kv_rank, ue8m0, bytes, (float *)(void *)(bytes + at.scale_at));
    } else {
        yard_cpu_store_row(k, values, 0, 0, kv_rank, latent);
    }
    yard_cpu_store_row(k, turned, 0, 0, rope_dims, rope);
}

void yard_cpu_load_latent(const cpu_kernels *k, yard_dtype dtype, uint32_t kv_rank, const void *row,
                          float *latent)
{
    const uint8_t *const bytes = row;
    const float *scale =
        (const float *)(const void *)(bytes + yard_latent_row_of(dtype, kv_rank, 0).scale_at);

    if (dtype != YARD_FP8_E4M3)
        k->convert->decode(dtype, row, kv_rank, latent);
    else
        for (uint32_t c = 0; c < kv_rank; c += YARD_GROUP)
            k->convert->widen_fp8(bytes + c, kv_rank - c < YARD_GROUP ? kv_rank - c : YARD_GROUP,
                                  *scale++, latent + c);
}

void yard_cpu_load_rope(const cpu_kernels *k, yard_dtype dtype, uint32_t kv_rank,
                        uint32_t rope_dims, const void *row, float *rope)
{
    const uint8_t *const bytes = row;

    k->convert->decode(rope_dtype(dtype),
                       bytes + yard_latent_row_of(dtype, kv_rank, rope_dims).rope_at, rope_dims,
                       rope);
}
