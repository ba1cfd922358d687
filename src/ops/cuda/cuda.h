/* Private to ops/cuda: the stream, prepared weights, and the operations that launch kernels. No
 * CUDA header is needed to include this one: its types are opaque here. */
#ifndef YARD_OPS_CUDA_CUDA_H
#define YARD_OPS_CUDA_CUDA_H

#include "ops/cuda/gemm.h"
#include "ops/cuda/mla_decode.h"
#include "ops/cuda/mla_prefill.h"
#include "ops/cuda/sample.h"
#include "ops/ops.h"

enum { CUDA_VARIANTS = 11 };

/* Which kernel computes a product, and where it can split K: how many blocks of K a thread block
 * takes at least (0: whole tiles), and how many rows of x a tile has at most (0: all it can have).
 */
typedef struct cuda_choice {
    const yard_gemm_variant *variant;
    uint32_t min_blocks, tile_width;
} cuda_choice;

/* One line of the table of choices: the kernel for products of up to max_rows rows. */
typedef struct cuda_choice_row {
    uint32_t n_out, n_in, max_rows;
    cuda_choice choice;
} cuda_choice_row;

/* For streams that are given no file. */
extern const cuda_choice_row yard_cuda_choices_h200[];
extern const uint32_t yard_cuda_n_choices_h200;

typedef struct cuda_stream {
    void *stream; /* cudaStream_t */
    int device;
    bool deterministic;
    bool capturing;
    cuda_choice forced;    /* variant NULL: none */
    cuda_choice_row *rows; /* from a file; NULL: the built-in ones */
    uint32_t n_rows;
    yard_ops_limits limits;
    uint32_t n_thread_blocks[CUDA_VARIANTS]; /* of each variant that run at once */
    float *partial;                          /* see yard_gemm_args */
    uint32_t *arrivals;
    yard_mla_workspace mla;         /* items NULL: the limits have no such heads */
    yard_prefill_workspace prefill; /* states NULL: the same */
    yard_sample_space sample;       /* slots NULL: the limits have no vocabulary */
    yard_error error;               /* the first one */
    char description[160];
} cuda_stream;

/* Weights on the device: n_matrices of [rows, cols] under one another, each padded with zeros to
 * padded_rows, rows of ld elements. */
struct yard_prepared {
    uint32_t n_matrices, rows, cols, padded_rows;
    yard_matrix all;     /* device, one tall matrix */
    bool tiled;          /* for the tensor-core kernels: whole tiles of 128, one scale a block */
    yard_tensor_map map; /* boxes of 128 rows by 128 bytes; tiled only */
    yard_tensor_map half_map; /* boxes of 64 rows */
    /* The transposed form for head_linear: [n_heads * absorb_step, absorb_cols], data NULL: none.
     */
    yard_matrix absorb;
    uint32_t absorb_step;
    yard_tensor_map absorb_map;
};

static inline cuda_stream *cuda_of(yard_stream s)
{
    return (cuda_stream *)s;
}

/* Keeps err if it is the first one. */
void yard_cuda_set_error(cuda_stream *s, const yard_error *err);

/* choose.c. Choices depend on shapes and bounds known to the host, never on what is on the device.
 */
extern const yard_gemm_variant *const yard_cuda_variants[CUDA_VARIANTS];
uint32_t yard_cuda_variant_idx(const yard_gemm_variant *variant);
/* Reads config->variant and config->choices into s. Errors: YARD_EINVAL, YARD_EIO, YARD_EFORMAT. */
yard_status yard_cuda_read_choices(cuda_stream *s, const yard_ops_config *config, yard_error *err);
cuda_choice yard_cuda_choose(const cuda_stream *s, yard_dtype dtype, uint32_t n_out, uint32_t n_in,
                             uint32_t n_groups, bool grouped, uint32_t n_rows);

/* prepare.c; see ops.h. */
yard_status yard_cuda_prepare(struct yard_prepared **out, yard_matrix *w, yard_stream s,
                              const yard_prepare_args *a, yard_error *err);
void yard_cuda_release_prepared(yard_stream s, struct yard_prepared *prepared);
/* A map of rows of row_bytes at data, ld_bytes apart, in boxes of box_rows by 128 bytes, swizzled;
 * element_bytes 1 or 2. */
yard_status yard_cuda_encode_map(yard_tensor_map *out, const void *data, uint32_t element_bytes,
                                 uint64_t n_rows, uint64_t n_cols, uint64_t ld_bytes,
                                 uint32_t box_rows, yard_error *err);

/* A map of bf16 rows as chunks of 64 columns, in boxes of box_chunks chunks by box_rows rows: each
 * chunk of a box lies in one piece, rows of 128 bytes, swizzled. */
yard_status yard_cuda_encode_chunks(yard_tensor_map *out, const void *data, uint64_t n_rows,
                                    uint32_t n_chunks, uint64_t ld_bytes, uint32_t box_rows,
                                    uint32_t box_chunks, yard_error *err);

/* A map of bf16 rows of heads, head_ld and ld elements apart, as chunks of 64 columns, in boxes of
 * box_heads heads of a row: all n_chunks chunks, each as above. */
yard_status yard_cuda_encode_heads(yard_tensor_map *out, const void *data, uint64_t n_rows,
                                   uint32_t n_heads, uint32_t head_ld, uint32_t ld,
                                   uint32_t n_chunks, uint32_t box_heads, yard_error *err);

/* products.c; see ops.h. */
void yard_cuda_linear(yard_stream s, const yard_linear_args *a);
void yard_cuda_grouped_linear(yard_stream s, const yard_grouped_linear_args *a);
void yard_cuda_head_linear(yard_stream s, const yard_head_linear_args *a);

/* operations.c; see ops.h. */
void yard_cuda_embed(yard_stream s, const yard_embed_args *a);
void yard_cuda_rms_norm_quant(yard_stream s, const yard_rms_norm_args *a);
void yard_cuda_rope_q(yard_stream s, const yard_rope_q_args *a);
void yard_cuda_rope_append_kv(yard_stream s, const yard_rope_append_kv_args *a);
void yard_cuda_gqa_append_kv(yard_stream s, const yard_gqa_append_kv_args *a);
void yard_cuda_moe_route(yard_stream s, const yard_moe_route_args *a);
void yard_cuda_moe_scatter(yard_stream s, const yard_moe_scatter_args *a);
void yard_cuda_count_offsets(yard_stream s, const yard_count_offsets_args *a);
void yard_cuda_moe_gather(yard_stream s, const yard_moe_gather_args *a);
void yard_cuda_silu_mul_quant(yard_stream s, const yard_silu_mul_args *a);
void yard_cuda_residual_add(yard_stream s, const yard_residual_add_args *a);
void yard_cuda_quantise(yard_stream s, const yard_quantise_args *a);
void yard_cuda_select_rows(yard_stream s, const yard_select_rows_args *a);
void yard_cuda_sample(yard_stream s, const yard_sample_args *a);

/* attention.c; see ops.h. */
void yard_cuda_mla_decode(yard_stream s, const yard_mla_decode_args *a);
void yard_cuda_mla_prefill(yard_stream s, const yard_mla_prefill_args *a);
void yard_cuda_gqa_attend(yard_stream s, const yard_gqa_attend_args *a);
/* The stream's memory for them, none for limits without attention. Errors: YARD_ENOMEM,
 * YARD_EDEVICE. */
size_t yard_cuda_attention_bytes(const yard_ops_limits *limits);
yard_status yard_cuda_attention_open(cuda_stream *s, yard_error *err);
void yard_cuda_attention_close(cuda_stream *s);

#endif
