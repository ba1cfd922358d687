/* The operations whose launch needs nothing but their arguments. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/launch.h"

/* Rows of experts too: a step has at most so many of any kind. */
static uint32_t max_rows(const cuda_stream *s)
{
    return s->limits.max_rows > s->limits.max_tokens ? s->limits.max_rows : s->limits.max_tokens;
}

#define OPERATION(name, launch, args)                                                              \
    void yard_cuda_##name(yard_stream stream, const args *a)                                       \
    {                                                                                              \
        cuda_stream *s = cuda_of(stream);                                                          \
        yard_error err = { 0 };                                                                    \
                                                                                                   \
        launch(a, max_rows(s), s->stream, &err);                                                   \
        yard_cuda_set_error(s, &err);                                                              \
    }

OPERATION(embed, yard_cuda_embed_launch, yard_embed_args)
OPERATION(rms_norm_quant, yard_cuda_rms_norm_launch, yard_rms_norm_args)
OPERATION(rope_q, yard_cuda_rope_q_launch, yard_rope_q_args)
OPERATION(rope_append_kv, yard_cuda_rope_append_kv_launch, yard_rope_append_kv_args)
OPERATION(gqa_append_kv, yard_cuda_gqa_append_kv_launch, yard_gqa_append_kv_args)
OPERATION(moe_route, yard_cuda_moe_route_launch, yard_moe_route_args)
OPERATION(moe_scatter, yard_cuda_moe_scatter_launch, yard_moe_scatter_args)
OPERATION(count_offsets, yard_cuda_count_offsets_launch, yard_count_offsets_args)
OPERATION(moe_gather, yard_cuda_moe_gather_launch, yard_moe_gather_args)
OPERATION(silu_mul_quant, yard_cuda_silu_mul_launch, yard_silu_mul_args)
OPERATION(residual_add, yard_cuda_residual_add_launch, yard_residual_add_args)
OPERATION(quantise, yard_cuda_quantise_launch, yard_quantise_args)
OPERATION(select_rows, yard_cuda_select_rows_launch, yard_select_rows_args)

void yard_cuda_sample(yard_stream stream, const yard_sample_args *a)
{
    cuda_stream *s = cuda_of(stream);
    yard_error err = { 0 };

    yard_cuda_sample_launch(a, &s->sample, s->stream, &err);
    yard_cuda_set_error(s, &err);
}
