/* Private to ops/cpu: the stream and the inner kernels that have variants.
 *
 * The order of every sum is part of the definition, so that all variants give the same bits:
 * a dot product has LANES partial sums, lane l taking elements l, l + 8, l + 16, ..; scaled dot
 * products start new lanes for every group of 128 and add them, times the scale, to outer lanes;
 * lanes are added pairwise at the end (l with l + 4, then l + 2, then l + 1). Every multiply-add
 * is fused. */
#ifndef YARD_OPS_CPU_H
#define YARD_OPS_CPU_H

#include "base/convert.h"
#include "ops/ops.h"

enum {
    LANES = 8,
    MAX_TILE_ROWS = 32, /* rows of x that a product decodes at once */
    PANEL_ROWS = 3,     /* rows of w decoded at once for them */
    FEW_ROWS = 3        /* up to so many rows of x, w is decoded in registers instead */
};

/* x [n_x, n_k] and w [n_w, n_k], f32, rows padded with zeros to a multiple of LANES. */
typedef struct dot_args {
    const float *x, *w;
    size_t x_ld, w_ld;
    uint32_t n_x, n_w, n_k;
    const float *x_scale; /* [n_x, x_scale_ld] one per group; NULL: all 1 (or no scales at all) */
    size_t x_scale_ld;
    const float *const *w_scale; /* [n_w] pointers to the scales of one row's groups; NULL: none */
    float *y;                    /* [n_x, y_ld] */
    size_t y_ld;
} dot_args;

/* The same with w as stored: one pointer per row, first element of the row. */
typedef struct raw_dot_args {
    const float *x;
    size_t x_ld;
    uint32_t n_x, n_w, n_k; /* n_x <= FEW_ROWS */
    yard_dtype w_dtype;
    const void *w; /* [n_w, n_k] */
    size_t w_ld;
    const float *x_scale;
    size_t x_scale_ld;
    const float *const *w_scale;
    float *y;
    size_t y_ld;
} raw_dot_args;

typedef struct cpu_kernels {
    const char *name;
    const char *reason;
    const yard_convert *convert;
    void (*dot)(const dot_args *a);
    void (*raw_dot)(const raw_dot_args *a);
    /* acc[m, c] = fma(x[m, r], w[r, c], acc[m, c]) for r ascending */
    void (*axpy)(const float *x, size_t x_ld, uint32_t n_x, const float *w, size_t w_ld,
                 uint32_t n_r, uint32_t n_c, float *acc, size_t acc_ld);
    /* acc[c] *= f */
    void (*scale)(float *acc, uint32_t n, float f);
    /* sum of squares in lanes */
    float (*sum_squares)(const float *x, uint32_t n);
    /* x[i] = exp(x[i] - max); returns the sum in lanes */
    float (*exp_sum)(float *x, uint32_t n, float max);
    /* y[i] = gate[i] / (1 + exp(-gate[i])) * up[i] */
    void (*silu_mul)(const float *gate, const float *up, uint32_t n, float *y);
} cpu_kernels;

extern const cpu_kernels yard_cpu_kernels_c;
extern const cpu_kernels yard_cpu_kernels_avx2;

/* The best variant this processor can run, or the one asked for; NULL when that is impossible. */
const cpu_kernels *yard_cpu_kernels_choose(const char *variant);

/* Scratch of one thread; lay_out() in cpu.c sizes it from yard_ops_limits. */
typedef struct cpu_scratch {
    float *x;         /* rows of x of a product, or queries of an attention */
    float *x_scale;   /* their scales */
    float *latent;    /* [64, kv_rank + rope] one page of the cache */
    float *panel;     /* decoded rows of w */
    float *k, *v;     /* [64, nope + rope], [64, v] one page of one head, expanded */
    float *score;     /* [rows, 64] */
    float *acc;       /* [rows, v or kv_rank] */
    float *max, *sum; /* [rows] of the softmax so far */
    float *row;       /* two activation rows */
    uint8_t *codes;   /* one row */
    void *sample;
} cpu_scratch;

struct yard_stream_s {
    yard_pool *pool;
    const cpu_kernels *kernels;
    yard_ops_limits limits;
    cpu_scratch *scratch; /* [n_threads] */
    void *block;          /* memory under the scratch */
    size_t block_bytes;
    int32_t *list; /* [max(max_tokens, max_experts) + 1] row or group numbers */
    char description[128];
};

/* exp, by the same operations in every variant; within 2 ulp, 0 below -87.3. */
float yard_cpu_exp(float x);

/* How a product reads its activations. */
typedef struct row_source {
    yard_rows x;
    bool quantise; /* round F32/BF16 rows to FP8 first */
    bool ue8m0;
} row_source;

/* Row `row`, columns [col, col + n), as f32 in dst, padded with zeros to LANES; FP8 (stored or made
 * here) gives code values in dst and one scale per group in scale. True when there are scales. */
bool yard_cpu_load_row(const cpu_kernels *k, const row_source *source, size_t row, size_t col,
                       uint32_t n, cpu_scratch *scratch, float *dst, float *scale);

/* Plain F32 or BF16 columns of a row, as f32, not padded. */
void yard_cpu_read_row(const cpu_kernels *k, yard_rows x, size_t row, size_t col, uint32_t n,
                       float *dst);

/* Writes n f32 values to columns [col, ..) of a row of an F32 or BF16 buffer. */
void yard_cpu_store_row(const cpu_kernels *k, yard_rows y, size_t row, size_t col, uint32_t n,
                        const float *src);

/* y[i, j] = x[i] . w[w_first + j] for n_x loaded rows and n_w rows of w. */
typedef struct product_args {
    const float *x;
    size_t x_ld;
    uint32_t n_x;
    const float *x_scale; /* NULL: no scales */
    size_t x_scale_ld;
    const yard_matrix *w;
    uint32_t w_first, n_w;
    float *y;
    size_t y_ld;
} product_args;
void yard_cpu_product(const cpu_kernels *k, cpu_scratch *scratch, const product_args *a);

/* x [n_dims] rotated into y, another buffer; see yard_rope. */
void yard_cpu_rotate(const yard_rope *rope, int32_t position, const float *x, float *y);

/* Where a position of the sequence of batch row `row` lies in the cache. */
const void *yard_cpu_page_row(const yard_kv_layer *cache, const yard_batch *b, uint32_t row,
                              uint32_t page_idx, uint32_t position_in_page);

/* A softmax over pages of keys, for queries whose state lies in scratch->max, sum and acc
 * [.., n_v]: start; for each page put scores into scratch->score and join; finish, which leaves the
 * weighted means in acc. */
void yard_cpu_softmax_start(cpu_scratch *scratch, uint32_t n_x, uint32_t n_v);
/* Queries [first, first + n_x) after keys [from, from + n_k) of a page whose values are v. */
void yard_cpu_softmax_join(const cpu_kernels *k, cpu_scratch *scratch, uint32_t first, uint32_t n_x,
                           uint32_t from, uint32_t n_k, float scale, const float *v, uint32_t v_ld,
                           uint32_t n_v);
void yard_cpu_softmax_finish(const cpu_kernels *k, cpu_scratch *scratch, uint32_t m, uint32_t n_v);

static inline uint32_t pad_lanes(uint32_t n)
{
    return (n + LANES - 1) / LANES * LANES;
}

static inline const void *matrix_row(const yard_matrix *w, size_t row)
{
    return (const uint8_t *)w->data + row * w->ld * yard_dtype_bytes(w->dtype);
}

/* Scales of the groups of one row, first group first. */
static inline const float *matrix_scale_row(const yard_matrix *w, size_t row)
{
    return w->scale + (w->row0 + row) / w->block_rows * w->scale_ld + w->col0 / YARD_GROUP;
}

/* The operations; see ops.h. */
void yard_cpu_embed(yard_stream s, const yard_embed_args *a);
void yard_cpu_rms_norm_quant(yard_stream s, const yard_rms_norm_args *a);
void yard_cpu_linear(yard_stream s, const yard_linear_args *a);
void yard_cpu_grouped_linear(yard_stream s, const yard_grouped_linear_args *a);
void yard_cpu_head_linear(yard_stream s, const yard_head_linear_args *a);
void yard_cpu_rope_q(yard_stream s, const yard_rope_q_args *a);
void yard_cpu_rope_append_kv(yard_stream s, const yard_rope_append_kv_args *a);
void yard_cpu_mla_decode(yard_stream s, const yard_mla_decode_args *a);
void yard_cpu_mla_prefill(yard_stream s, const yard_mla_prefill_args *a);
void yard_cpu_gqa_append_kv(yard_stream s, const yard_gqa_append_kv_args *a);
void yard_cpu_gqa_attend(yard_stream s, const yard_gqa_attend_args *a);
void yard_cpu_moe_route(yard_stream s, const yard_moe_route_args *a);
void yard_cpu_moe_scatter(yard_stream s, const yard_moe_scatter_args *a);
void yard_cpu_count_offsets(yard_stream s, const yard_count_offsets_args *a);
void yard_cpu_moe_gather(yard_stream s, const yard_moe_gather_args *a);
void yard_cpu_silu_mul_quant(yard_stream s, const yard_silu_mul_args *a);
void yard_cpu_residual_add(yard_stream s, const yard_residual_add_args *a);
void yard_cpu_quantise(yard_stream s, const yard_quantise_args *a);
void yard_cpu_select_rows(yard_stream s, const yard_select_rows_args *a);
void yard_cpu_sample(yard_stream s, const yard_sample_args *a);

#endif
