/* The operations whose launch needs nothing but their arguments. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/launch.h"

/* Rows of experts too: a step has at most so many of any kind. */
static uint32_t max_rows(const cuda_stream *s)
{
    return s->limits.max_rows > s->limits.max_tokens ? s->limits.max_rows : s->limits.max_tokens;
}

/* bound: of the rows; what is not known is as many as a step can have. */
#define OPERATION(name, launch, args, bound)                                                       \
    void yard_cuda_##name(yard_stream stream, const args *a)                                       \
    {                                                                                              \
        cuda_stream *s = cuda_of(stream);                                                          \
        yard_error err = { 0 };                                                                    \
                                                                                                   \
        launch(a, (bound) ? (bound) : max_rows(s), s->stream, &err);                               \
        yard_cuda_set_error(s, &err);                                                              \
    }

OPERATION(embed, yard_cuda_embed_launch, yard_embed_args, a->max_rows)
OPERATION(rms_norm_quant, yard_cuda_rms_norm_launch, yard_rms_norm_args, a->max_rows)
OPERATION(rope_q, yard_cuda_rope_q_launch, yard_rope_q_args, a->max_rows)
OPERATION(rope_append_kv, yard_cuda_rope_append_kv_launch, yard_rope_append_kv_args, a->max_rows)
OPERATION(gqa_append_kv, yard_cuda_gqa_append_kv_launch, yard_gqa_append_kv_args, a->max_rows)
OPERATION(moe_route, yard_cuda_moe_route_launch, yard_moe_route_args, a->max_rows)
OPERATION(moe_scatter, yard_cuda_moe_scatter_launch, yard_moe_scatter_args, a->max_rows)
OPERATION(count_offsets, yard_cuda_count_offsets_launch, yard_count_offsets_args, 0)
OPERATION(moe_gather, yard_cuda_moe_gather_launch, yard_moe_gather_args, a->max_rows)
OPERATION(silu_mul_quant, yard_cuda_silu_mul_launch, yard_silu_mul_args, a->max_rows)
OPERATION(residual_add, yard_cuda_residual_add_launch, yard_residual_add_args, a->max_rows)
OPERATION(quantise, yard_cuda_quantise_launch, yard_quantise_args, a->max_rows)
OPERATION(select_rows, yard_cuda_select_rows_launch, yard_select_rows_args, a->max_rows)

void yard_cuda_sample(yard_stream stream, const yard_sample_args *a)
{
    cuda_stream *s = cuda_of(stream);
    yard_error err = { 0 };

    yard_cuda_sample_launch(a, &s->sample, s->stream, &err);
    yard_cuda_set_error(s, &err);
}
