/* Private to ops/cpu: the stream and the inner kernels that have variants.
 *
 * The order of every sum is part of the definition, so that all variants give the same bits. A dot
 * product has LANES partial sums, lane l taking elements l, l + 16, l + 32, .. of its two rows as
 * they lie in memory. Products with FP8 weights, which are *scaled*, have SCALED_LANES instead (l,
 * l + 8, ..), start new ones for every group of 128 and add them, times the scale, to outer lanes.
 * Lanes are added pairwise at the end (l with l + 8, then l + 4, l + 2, l + 1). Every multiply-add
 * is fused.
 *
 * Products with weights take their rows *in pairs*: of each CHUNK of 32 elements first the odd ones
 * (lane l: element 2 l + 1), then the even ones. That is the order of the processors' bf16 dot
 * product, and 32-bit words with two bf16 values come apart into it with one instruction each.
 * Scaled ones take them *in quads*: of each CHUNK first elements 4 l + 1, then 4 l, 4 l + 3 and
 * 4 l + 2, so that a lane's four are a word of four codes, or twice a word of two bf16 values. */
#ifndef YARD_OPS_CPU_H
#define YARD_OPS_CPU_H

#include "base/convert.h"
#include "ops/ops.h"

enum {
    LANES = 16,
    SCALED_LANES = 8,
    CHUNK = 2 * LANES,     /* rows are padded with zeros to a multiple of it */
    MAX_TILE_ROWS = 64,    /* rows of x that a product holds at once */
    PANEL_ROWS = 8,        /* rows of w decoded at once for them */
    PANEL_K = 512,         /* and so many columns of them, a multiple of YARD_GROUP */
    BLOCK_ROWS = 32,       /* rows of w that use a panel's columns of x in turn */
    STRIP_BLOCK_ROWS = 64, /* the same for products by strips, at most */
    FEW_ROWS = 4,          /* up to so many rows of x, w is decoded in registers instead */
    MAX_ROW_GAP = 512,     /* floats between rows of x, at most: see row_form_ld() */
    SQUARE_LANES = 64,     /* of a norm's sum: enough for a GPU to make the same sum at speed */
    MAX_TASK_COLUMNS = 256 /* of a task of linear */
};

/* x [n_x, n_k] and w [n_w, n_k], f32, rows padded. The sum over K may be cut at multiples of
 * YARD_GROUP: lanes [n_x, n_w, LANES or SCALED_LANES] then carries the sums from one call to the
 * next. */
typedef struct dot_args {
    const float *x, *w;
    size_t x_ld, w_ld;
    uint32_t n_x, n_w, n_k;
    /* [groups, MAX_TILE_ROWS] what a group's sums count in each row of x, which is x's scale times
     * the scale that all rows of w share; NULL: no scales. */
    const float *factor;
    float *y; /* [n_x, y_ld]; NULL: leave the sums in lanes */
    size_t y_ld;
    float *lanes;   /* NULL: this is the whole sum */
    bool continued; /* lanes holds sums of earlier columns */
} dot_args;

/* The same with w as stored, one row after the other; x in pairs, or in quads where w is FP8. */
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

/* FP8 codes on both sides, with scales on both. Rows of x are bf16 as codes_to_bf16 makes them,
 * padded with zeros to a multiple of 2 * CHUNK. All w_scale are one row of scales: the rows of w
 * lie in one row of blocks. */
typedef struct fp8_dot_args {
    const uint16_t *x;
    size_t x_ld;
    uint32_t n_x, n_w, n_k;
    const uint8_t *w; /* [n_w, n_k] as stored */
    size_t w_ld;
    const float *x_scale;
    size_t x_scale_ld;
    const float *w_scale;
    float *y;
    size_t y_ld;
    void *scratch; /* FP8_DOT_SCRATCH bytes */
} fp8_dot_args;

enum {
    FP8_PANEL_ROWS = 8,
    FP8_PANEL_K = 1024,
    FP8_DOT_SCRATCH = FP8_PANEL_ROWS * FP8_PANEL_K * 2 +
                      MAX_TILE_ROWS * FP8_PANEL_ROWS * SCALED_LANES * 4 +
                      MAX_TILE_ROWS * (FP8_PANEL_K / YARD_GROUP) * 4
};

/* Memory that will be read next: n_bytes of each of n_rows. */
typedef struct piece_ahead {
    const uint8_t *first;
    size_t ld_bytes;
    uint32_t n_rows, n_bytes;
} piece_ahead;

/* Columns [at, at + n_k) of x times a panel of w, both laid out by the functions below; see
 * strips_avx2.c and strips_avx512.c. Sums may be cut like dot's. */
typedef struct strip_args {
    const float *x;
    size_t x_ld;
    uint32_t n_x;
    uint32_t at, n_k;    /* at is a multiple of PANEL_K, n_k at most as much */
    const void *w;       /* as lay_w made it */
    uint32_t n_w;        /* <= panel_rows */
    const float *factor; /* as dot's; NULL: no scales */
    float *sums;         /* as dot's lanes, in an order of its own */
    bool continued;      /* sums holds those of earlier columns */
    float *y;            /* [n_x, y_ld]; NULL: leave them in sums */
    size_t y_ld;
    piece_ahead ahead; /* fetched meanwhile */
} strip_args;

/* Rows as stored that become a panel of w. */
typedef struct strip_source {
    yard_dtype dtype;
    const void *first;
    size_t ld_bytes;
    uint32_t n_w, n_k;
} strip_source;

/* Products of more than FEW_ROWS rows with FP8 or BF16 weights. */
typedef struct strip_kernels {
    uint32_t panel_rows, block_rows; /* see PANEL_ROWS, BLOCK_ROWS */
    /* A row, the m-th of n_x, becomes part of x: in quads for FP8, in pairs for BF16. */
    void (*lay_quads)(const float *quads, uint32_t n_k, uint32_t m, uint32_t n_x, float *x,
                      size_t x_ld);
    void (*lay_pairs)(const float *pairs, uint32_t n_k, uint32_t m, uint32_t n_x, float *x,
                      size_t x_ld);
    void (*lay_w)(const strip_source *s, void *w);
    void (*dot)(const strip_args *a);
} strip_kernels;

/* Products of FP8 with FP8 for up to FEW_ROWS rows; see codes_avx2.c. */
typedef struct code_kernels {
    bool (*usable)(void);               /* by this thread, on this processor */
    void (*dot)(const raw_dot_args *a); /* with scales on both sides */
} code_kernels;

typedef struct cpu_kernels {
    const char *name;
    const char *reason;
    const yard_convert *convert;
    /* decode, in pairs, padded with zeros to CHUNK */
    void (*decode_pairs)(yard_dtype dtype, const void *src, uint32_t n, float *dst);
    /* n values in pairs, a multiple of CHUNK, are put in quads */
    void (*pairs_to_quads)(float *values, uint32_t n);
    /* n_x <= MAX_TILE_ROWS with factors, any number without; no factors where fp8_strips are */
    void (*dot)(const dot_args *a);
    void (*raw_dot)(const raw_dot_args *a);
    /* Products of FP8 with FP8, by a way of their own; NULL: as f32. codes_to_bf16 makes the rows
     * of x for it. For more than FEW_ROWS rows if fp8_dot_many says so, else by strips. */
    void (*fp8_dot)(const fp8_dot_args *a);
    bool (*fp8_dot_many)(void);
    void (*codes_to_bf16)(const uint8_t *codes, uint32_t n, uint16_t *dst);
    const strip_kernels *fp8_strips, *bf16_strips; /* NULL: these products are dot's */
    const code_kernels *codes; /* NULL, or not usable: these products are raw_dot's */
    /* acc[m, c] = fma(x[m, r], w[r, c], acc[m, c]) for r ascending */
    void (*axpy)(const float *x, size_t x_ld, uint32_t n_x, const float *w, size_t w_ld,
                 uint32_t n_r, uint32_t n_c, float *acc, size_t acc_ld);
    /* x[i] *= f; returns the largest of these and max, NaNs aside */
    float (*scale_max)(float *x, uint32_t n, float f, float max);
    /* acc[c] *= f */
    void (*scale)(float *acc, uint32_t n, float f);
    /* sum of squares, element i in lane i % SQUARE_LANES; lanes are added pairwise as above */
    float (*sum_squares)(const float *x, uint32_t n);
    /* x[i] = exp(x[i] - max); returns the sum in 8 lanes */
    float (*exp_sum)(float *x, uint32_t n, float max);
    /* y[i] = gate[i] / (1 + exp(-gate[i])) * up[i] */
    void (*silu_mul)(const float *gate, const float *up, uint32_t n, float *y);
} cpu_kernels;

extern const cpu_kernels yard_cpu_kernels_c;
extern const cpu_kernels yard_cpu_kernels_avx2;
extern const cpu_kernels yard_cpu_kernels_avx512;
extern const cpu_kernels yard_cpu_kernels_amx; /* not the definition's bits: see fp8_amx.c */
/* Of dot_avx2.c and raw_avx2.c. */
void yard_cpu_dot_avx2(const dot_args *a);
void yard_cpu_raw_dot_avx2(const raw_dot_args *a);
void yard_cpu_decode_pairs_avx2(yard_dtype dtype, const void *src, uint32_t n, float *dst);
void yard_cpu_pairs_to_quads_avx2(float *values, uint32_t n);
extern const strip_kernels yard_cpu_strips_avx2;
extern const strip_kernels yard_cpu_strips_avx512;
extern const code_kernels yard_cpu_codes_avx2;
/* Of kernels_avx2.c, for AVX-512 too. */
void yard_cpu_scale_avx2(float *acc, uint32_t n, float f);
float yard_cpu_scale_max_avx2(float *x, uint32_t n, float f, float max);
float yard_cpu_sum_squares_avx2(const float *x, uint32_t n);
float yard_cpu_exp_sum_avx2(float *x, uint32_t n, float max);
void yard_cpu_silu_mul_avx2(const float *gate, const float *up, uint32_t n, float *y);
/* Of fp8_avx512.c. */
void yard_cpu_fp8_dot_avx512(const fp8_dot_args *a);
void yard_cpu_fp8_dot_amx(const fp8_dot_args *a);
void yard_cpu_codes_to_bf16_avx512(const uint8_t *codes, uint32_t n, uint16_t *dst);

/* The best variant this processor can run that gives the definition's bits, or the one asked for;
 * NULL when that is impossible. */
const cpu_kernels *yard_cpu_kernels_choose(const char *variant);

/* Scratch of one thread; lay_out() in cpu.c sizes it from yard_ops_limits. */
typedef struct cpu_scratch {
    float *x;         /* rows of x of a product (bf16 for fp8_dot), or queries of an attention */
    int64_t x_row;    /* the first of a linear's rows that lie in x; -1: others */
    float *x_scale;   /* their scales */
    float *latent;    /* [64, kv_rank + rope] one page of the cache */
    float *panel;     /* decoded rows of w, or what fp8_dot wants */
    float *lanes;     /* [rows of a block, MAX_TILE_ROWS, LANES], panel after panel */
    float *out;       /* [MAX_TILE_ROWS, columns of a task] */
    float *k, *v;     /* [64, nope + rope], [64, v] one page of one head, expanded */
    float *score;     /* [rows, 64] */
    float *acc;       /* [rows, v or kv_rank] */
    float *max, *sum; /* [rows] of the softmax so far */
    float *row;       /* two activation rows */
    float *turns;     /* [rope dims or head dims] */
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

/* How the values of a row are laid out for the kernel that reads them. */
typedef enum row_form {
    ROW_PLAIN,       /* f32 as they come, padded to CHUNK */
    ROW_PAIRS,       /* f32 in pairs, padded to CHUNK */
    ROW_QUADS,       /* f32 in quads, padded to CHUNK */
    ROW_PAIR_STRIPS, /* these two as strip_kernels want them */
    ROW_QUAD_STRIPS,
    ROW_BF16 /* bf16 as fp8_dot wants them, padded to 2 * CHUNK; rows with scales only */
} row_form;

/* Elements from one row to the next of n columns in that form. Rows do not start at the same place
 * of a page: the columns that a panel of weights meets would share a part of every cache. */
static inline uint32_t row_form_ld(row_form form, uint32_t n)
{
    const uint32_t unit = form == ROW_BF16 ? 2 * CHUNK : CHUNK;
    const uint32_t half_page = form == ROW_BF16 ? 2 * MAX_ROW_GAP : MAX_ROW_GAP;
    const uint32_t ld = (n + unit - 1) / unit * unit;

    return ld % (2 * half_page) == 0 ? ld + half_page : ld;
}

/* Plain F32 or BF16 columns of a row, as f32, not padded. */
void yard_cpu_read_row(const cpu_kernels *k, yard_rows x, size_t row, size_t col, uint32_t n,
                       float *dst);

/* Writes n f32 values to columns [col, ..) of a row of an F32 or BF16 buffer. */
void yard_cpu_store_row(const cpu_kernels *k, yard_rows y, size_t row, size_t col, uint32_t n,
                        const float *src);

/* Rows of x of a product, [n_x, n_k] in some form. FP8 rows are code values and scales. */
typedef struct x_rows {
    row_form form;
    void *x;
    size_t ld; /* row_form_ld() */
    uint32_t n_x, n_k;
    bool scaled;    /* x_scale is in use */
    float *x_scale; /* [n_x, groups of n_k] */
} x_rows;

/* Where n_x <= MAX_TILE_ROWS rows lie that a product with w reads: in x and scratch->x_scale. */
x_rows yard_cpu_product_rows(const cpu_kernels *k, const row_source *source, const yard_matrix *w,
                             uint32_t n_x, float *x, cpu_scratch *scratch);

/* Row `row` of the source, columns [col, col + x->n_k), becomes the m-th of x. FP8 (stored or made
 * here) gives code values, and one scale per group. */
void yard_cpu_load_row(const cpu_kernels *k, const row_source *source, size_t row, size_t col,
                       cpu_scratch *scratch, const x_rows *x, uint32_t m);

/* y[i, j] = x[i] . w[w_first + j] for n_w rows of w. */
typedef struct product_args {
    x_rows x;
    const yard_matrix *w;
    uint32_t w_first, n_w;
    float *y;
    size_t y_ld;
} product_args;
void yard_cpu_product(const cpu_kernels *k, cpu_scratch *scratch, const product_args *a);

/* Cosines and sines [n_dims] of a position, and x [n_dims] rotated by them into y, another buffer;
 * see yard_rope. */
void yard_cpu_turns(const yard_rope *rope, int32_t position, float *turns);
void yard_cpu_rotate(const yard_rope *rope, const float *turns, const float *x, float *y);

/* values = bf16 of values */
void yard_cpu_round_values(const cpu_kernels *k, float *values, uint32_t n);

/* Where a position of the sequence of batch row `row` lies in the cache. */
void *yard_cpu_page_row(const yard_kv_layer *cache, size_t row_bytes, const yard_batch *b,
                        uint32_t row, uint32_t page_idx, uint32_t position_in_page);

/* Rows of the latent cache (latent.c), as [kv_rank] latents and [rope] rotated values in f32.
 * store changes the latents. */
void yard_cpu_store_latent(const cpu_kernels *k, yard_dtype dtype, uint32_t kv_rank,
                           uint32_t rope_dims, bool ue8m0, float *latent, const float *rope,
                           void *row);
void yard_cpu_load_latent(const cpu_kernels *k, yard_dtype dtype, uint32_t kv_rank, const void *row,
                          float *latent);
void yard_cpu_load_rope(const cpu_kernels *k, yard_dtype dtype, uint32_t kv_rank,
                        uint32_t rope_dims, const void *row, float *rope);

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
    return (n + CHUNK - 1) / CHUNK * CHUNK;
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

/* Memory and weights; see ops.h. memory.c */
yard_status yard_cpu_available(uint64_t *n_bytes, yard_stream s, yard_error *err);
yard_status yard_cpu_allocate(void **out, yard_stream s, size_t n_bytes, yard_error *err);
void yard_cpu_release(yard_stream s, void *memory);
yard_status yard_cpu_upload(yard_stream s, void *to, const void *host, size_t n_bytes,
                            yard_error *err);
yard_status yard_cpu_download(yard_stream s, void *host, const void *from, size_t n_bytes,
                              yard_error *err);
yard_status yard_cpu_prepare(struct yard_prepared **out, yard_matrix *w, yard_stream s,
                             const yard_prepare_args *a, yard_error *err);
void yard_cpu_release_prepared(yard_stream s, struct yard_prepared *prepared);

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
