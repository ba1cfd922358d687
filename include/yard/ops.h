/* libyard-ops: the numeric operations of a model, one table per backend.
 *
 * The CPU table is the definition; every other table must agree with it. Operations are
 * asynchronous on a stream. Everything that changes from step to step (row counts, positions,
 * routing, page tables) is read from buffers by the operation itself when it runs, so that the
 * host code above never has to wait for a device. Operations allocate nothing: the stream's
 * workspace is sized by yard_ops_limits at creation.
 *
 * A row's result does not depend on the other rows, their number or their position: the order
 * of summation over K is fixed per shape, attention is split at absolute positions.
 *
 * Pointers inside argument structs are memory of the backend's device, owned by the caller, and
 * must stay valid until the stream has passed the call. Dimensions are elements, not bytes. */
#ifndef YARD_OPS_H
#define YARD_OPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <yard/status.h>
#include <yard/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A weight matrix [rows, cols], used in place (a checkpoint's mapping, or a slice of one).
 * FP8 has one f32 scale per block_rows x 128 block. row0 and col0 say where the slice starts in
 * the stored tensor, because blocks are counted from the stored tensor's first element. */
typedef struct yard_matrix {
    yard_dtype dtype;
    uint32_t rows, cols;
    uint32_t ld;         /* elements from one row to the next */
    const void *data;    /* element [0, 0] of the slice */
    const float *scale;  /* [.., scale_ld] of the stored tensor; NULL unless FP8 */
    uint32_t scale_ld;   /* scales in one row of blocks */
    uint32_t block_rows; /* rows of one block; columns are always YARD_GROUP */
    uint32_t row0, col0; /* first row and column of the slice in the stored tensor; col0 % 128 == 0,
                            or the slice ends in the group of columns where it begins */
    const struct yard_prepared *prepared; /* what yard_ops.prepare made of it; NULL: nothing */
    uint32_t prepared_idx;                /* which of its matrices this one is */
} yard_matrix;

/* Activations [rows, cols], row-major and dense (ld elements a row). dtype F32, BF16, or FP8 with
 * scale [rows, ceil(cols / 128)]. */
typedef struct yard_rows {
    yard_dtype dtype;
    uint32_t ld;
    void *data;
    float *scale;
} yard_rows;

/* Where to put a value in as many forms as the consumers want; unwanted ones have data NULL.
 * plain is F32 or BF16. quant is FP8 of the *bf16-rounded* value with its scales. */
typedef struct yard_out {
    yard_rows plain;
    yard_rows quant;
} yard_out;

/* The paged latent or key/value cache of one layer: pages of 64 positions, a row of width values
 * each, dtype BF16 or F32; of latents also FP8 (below). Position p of a sequence lies in page
 * page_table[seq][p / 64], row p % 64. */
enum { YARD_PAGE_TOKENS = 64 };

typedef struct yard_kv_layer {
    yard_dtype dtype;
    uint32_t width; /* values of a row */
    void *data;     /* [n_pages, 64] rows, 16-byte aligned when FP8 */
} yard_kv_layer;

/* How a row of the latent cache lies in memory: kv_rank latents, then the rotated key. Where the
 * cache is FP8, only latents are:
 *
 *   [kv_rank] e4m3 codes | [ceil(kv_rank / 128)] f32 scales | [rope] bf16 | up to 16-byte units
 *
 * in 656 bytes at 512 + 64. Codes and scales are those of quantise for the bf16-rounded latent; a
 * latent counts as bf16(code * scale), the product rounded to f32 first, wherever it is read: so an
 * FP8 cache gives the bits of a BF16 one that holds these values. Quantising them again gives the
 * same values. */
typedef struct yard_latent_row {
    uint32_t scale_at, rope_at; /* bytes from the row's begin; scale_at is for FP8 only */
    uint32_t n_bytes;
} yard_latent_row;

static inline yard_latent_row yard_latent_row_of(yard_dtype dtype, uint32_t kv_rank,
                                                 uint32_t rope_dims)
{
    const uint32_t n_scales = (kv_rank + YARD_GROUP - 1) / YARD_GROUP;
    const uint32_t value_bytes = dtype == YARD_F32 ? 4 : 2;
    yard_latent_row row = { 0, kv_rank * value_bytes, (kv_rank + rope_dims) * value_bytes };

    if (dtype == YARD_FP8_E4M3) {
        row.scale_at = (kv_rank + 3) / 4 * 4;
        row.rope_at = row.scale_at + 4 * n_scales;
        row.n_bytes = (row.rope_at + 2 * rope_dims + 15) / 16 * 16;
    }
    return row;
}

/* The rows of one step. All arrays are device buffers filled by upload before the step: attention
 * looks at them while the operations ahead of it still run, so no operation writes them. Rows of
 * one sequence are consecutive, at ascending positions. */
typedef struct yard_batch {
    const int32_t *n_tokens;   /* [1] rows in use */
    const int32_t *token;      /* [n_tokens] ids */
    const int32_t *position;   /* [n_tokens] absolute position in the sequence */
    const int32_t *seq;        /* [n_tokens] row of page_table */
    const uint8_t *absorbed;   /* [n_tokens] 1: attention by matrix absorption (generated tokens),
                                  0: multi-head form (prompt tokens) */
    const int32_t *page_table; /* [max_seqs, page_table_ld] page numbers */
    uint32_t page_table_ld;
} yard_batch;

/* arguments. max_rows, where it is not said otherwise, bounds *n_rows (*n_tokens), and every buffer
 * has room for so many rows: what lies behind *n_rows may be read, whatever it is, and is not
 * written. A backend that cannot look at *n_rows sizes its work by it. 0: not known. */

/* x[i] = table[token[i]] as f32 */
typedef struct yard_embed_args {
    const int32_t *n_rows;
    uint32_t max_rows;
    const int32_t *token;
    yard_matrix table;
    float *x; /* [n_rows, table.cols] */
} yard_embed_args;

/* y = x / sqrt(mean(x^2) + eps) * weight, per row over n_cols. */
typedef struct yard_rms_norm_args {
    const int32_t *n_rows;
    uint32_t max_rows;
    uint32_t n_cols;
    yard_rows x;   /* F32 or BF16 */
    yard_rows add; /* data NULL, or F32/BF16: x += add first, written back; x must be F32 then */
    yard_dtype weight_dtype;
    const void *weight; /* [n_cols] F32 or BF16 */
    float eps;
    bool ue8m0; /* scales of y.quant are powers of two */
    yard_out y;
} yard_rms_norm_args;

/* y = x . w^T (+ nothing). max_rows bounds *n_rows: x and y have room for so many, and a backend
 * that cannot look at *n_rows picks its kernel by it; 0 means limits.max_tokens. */
typedef struct yard_linear_args {
    const int32_t *n_rows;
    uint32_t max_rows;
    yard_rows x;   /* [n_rows, w.cols] */
    yard_matrix w; /* [n_out, n_in] */
    yard_rows y;   /* [n_rows, w.rows] F32 or BF16 */
} yard_linear_args;

/* y row r of group g = x row r (or x_index[r]) times w[g]^T. Group g has the rows [offset[g],
 * offset[g + 1]), or, where row_count is given (groups aligned, with gaps between them),
 * row_count[g] rows from offset[g] on. Rows of no group are not written. */
typedef struct yard_grouped_linear_args {
    uint32_t n_groups;
    const int32_t *offset;    /* [n_groups + 1] first row of each group, on the device */
    const int32_t *row_count; /* [n_groups] or NULL */
    const int32_t *x_index;   /* [max_rows] x's row of each row of y; NULL: the same */
    uint32_t max_rows;        /* room of y, and of x without x_index; 0: limits.max_rows */
    uint32_t max_x_rows;      /* room of x; 0: max_rows */
    uint32_t expected_rows;   /* rows of all groups to be expected: speed only; 0: max_rows */
    yard_rows x;
    const yard_matrix *w; /* [n_groups] host array that lives as long as the model; equal shapes */
    yard_rows y;
} yard_grouped_linear_args;

/* One small product per head, w is a stack of heads:
 *   transposed false: y[i, h, r] = sum_c x[i, h, c] w[h * head_stride + head_offset + r, c]   (v_b)
 *   transposed true:  y[i, h, c] = sum_r x[i, h, r] w[h * head_stride + head_offset + r, c]   (k_b)
 * x is quantised inside (quantised mode): groups of 128 from each head's first element. */
typedef struct yard_head_linear_args {
    const int32_t *n_rows;
    uint32_t max_rows;       /* as in yard_linear_args */
    const uint8_t *row_mask; /* [n_rows] or NULL: rows with 0 are skipped */
    uint32_t n_heads;
    uint32_t head_rows;   /* rows of w that one head uses */
    uint32_t head_stride; /* rows of w from one head to the next */
    uint32_t head_offset;
    bool transposed;
    bool quantise; /* quantise x to FP8 first (w is FP8) */
    bool ue8m0;
    yard_matrix w;
    yard_rows x; /* ld per row; head h starts at x_head_stride * h */
    uint32_t x_head_stride;
    yard_rows y;
    uint32_t y_head_stride;
} yard_head_linear_args;

/* Which elements of a head form the pairs that turn. */
typedef enum yard_rope_layout {
    YARD_ROPE_PAIRS, /* pair i is (2i, 2i + 1): DeepSeek */
    YARD_ROPE_HALVES /* pair i is (i, n_dims / 2 + i): Mixtral, Llama */
} yard_rope_layout;

/* Rotary embedding: pair i = (a, b) of the rotated part becomes (a cos t - b sin t, b cos t +
 * a sin t), t = position * inv_freq[i], an angle in f64. In both layouts the result has the first
 * elements of all pairs, then the second ones; so the halves stay in their places. */
typedef struct yard_rope {
    const float *inv_freq; /* [n_dims / 2] */
    uint32_t n_dims;
    yard_rope_layout layout;
} yard_rope;

/* q[i, h, nope .. nope + rope) rotated in place. */
typedef struct yard_rope_q_args {
    const yard_batch *batch;
    uint32_t max_rows;
    uint32_t n_heads, head_dim; /* head_dim = nope + rope */
    yard_rope rope;
    yard_rows q;    /* [n_tokens, n_heads * head_dim] F32 or BF16 */
} yard_rope_q_args; /* grouped-query attention: nope 0, rope = head_dim */

/* kv[i] = [latent, k_rope]: normalises the latent, rotates k_rope, appends both to the cache. */
typedef struct yard_rope_append_kv_args {
    const yard_batch *batch;
    uint32_t max_rows;
    uint32_t kv_rank;
    yard_rows kv; /* [n_tokens, kv_rank + rope.n_dims] */
    yard_dtype norm_dtype;
    const void *norm_weight; /* [kv_rank] */
    float eps;
    yard_rope rope;
    yard_kv_layer cache;
    bool ue8m0; /* scales of an FP8 cache are powers of two */
} yard_rope_append_kv_args;

/* Attention of the rows with absorbed == 1 over the latent cache, positions 0 .. position[i]. */
typedef struct yard_mla_decode_args {
    const yard_batch *batch;
    uint32_t n_heads, kv_rank, rope_dims;
    float softmax_scale;
    yard_rows q_latent; /* [n_tokens, n_heads * kv_rank] */
    yard_rows q;        /* [n_tokens, n_heads * head_dim]; its rotated part is read */
    uint32_t head_dim;
    yard_kv_layer cache;
    yard_rows y; /* [n_tokens, n_heads * kv_rank] F32 or BF16 */
} yard_mla_decode_args;

/* Attention of the rows with absorbed == 0, multi-head form: cached latents are expanded by kv_b
 * in tiles of YARD_PAGE_TOKENS absolute positions; tiles are joined in ascending order. */
typedef struct yard_mla_prefill_args {
    const yard_batch *batch;
    uint32_t n_heads, kv_rank, nope_dims, rope_dims, v_dims;
    float softmax_scale;
    yard_rows q;      /* [n_tokens, n_heads * (nope + rope)] */
    yard_matrix kv_b; /* [n_heads * (nope + v), kv_rank] */
    bool quantise;    /* quantise the cached latents first (kv_b is FP8) */
    bool ue8m0;
    yard_kv_layer cache;
    yard_rows y; /* [n_tokens, n_heads * v] F32 or BF16 */
} yard_mla_prefill_args;

/* Grouped-query attention caches keys and values themselves. A position's row of the cache is
 * [key of kv head 0, .., key of the last, value of kv head 0, .., value of the last], head_dim
 * values each: width = 2 * n_kv_heads * head_dim, dtype BF16 or F32. Keys are stored rotated. */

/* Rotates the keys of all rows and appends keys and values to the cache, rounded to its dtype. */
typedef struct yard_gqa_append_kv_args {
    const yard_batch *batch;
    uint32_t max_rows;
    uint32_t n_kv_heads, head_dim;
    yard_rope rope; /* n_dims = head_dim */
    yard_rows k;    /* [n_tokens, n_kv_heads * head_dim] F32 or BF16, not rotated, not changed */
    yard_rows v;    /* [n_tokens, n_kv_heads * head_dim] F32 or BF16 */
    yard_kv_layer cache;
} yard_gqa_append_kv_args;

/* y[i, h] = sum over p of softmax_p(softmax_scale * q[i, h] . key[p, g]) * value[p, g], with
 * g = h / (n_heads / n_kv_heads) and p from max(0, position[i] + 1 - window) to position[i] of the
 * row's sequence; the row's own key is in the cache already. f32 arithmetic. Tiles of
 * YARD_PAGE_TOKENS absolute positions are joined in ascending order by their running maximum and
 * sum. Prompt rows and generated ones have one form: absorbed changes nothing. */
typedef struct yard_gqa_attend_args {
    const yard_batch *batch;
    uint32_t n_heads, n_kv_heads, head_dim; /* n_heads is a multiple of n_kv_heads */
    uint32_t window;                        /* positions a query sees, its own included; 0: all */
    float softmax_scale;
    yard_rows q; /* [n_tokens, n_heads * head_dim] F32 or BF16, rotated */
    yard_kv_layer cache;
    yard_rows y; /* [n_tokens, n_heads * head_dim] F32 or BF16 */
} yard_gqa_attend_args;

typedef enum yard_router_score { YARD_SCORE_SIGMOID, YARD_SCORE_SOFTMAX } yard_router_score;

/* What a group of experts is worth. */
typedef enum yard_group_value {
    YARD_GROUP_TWO_LARGEST, /* the sum of its two largest choices (one expert a group: that one) */
    YARD_GROUP_LARGEST      /* its largest choice */
} yard_group_value;

/* Group-limited top-k, for every family: one group of all experts is plain top-k (R149: Mixtral).
 * score = sigmoid(logits), or softmax over all experts, in f32; choice = score + bias. The
 * top_groups groups of the largest group value stay, then the top_k largest choices of those. Ties
 * go to the lower index. Weights are the scores without bias. top_k: 1 to 64. */
typedef struct yard_moe_route_args {
    const int32_t *n_rows;
    uint32_t max_rows;
    uint32_t n_experts, top_k, n_groups, top_groups;
    yard_router_score score;
    yard_group_value group_value;
    bool normalise;      /* divide by the sum of the chosen scores (+ 1e-20) */
    float scale;         /* then multiply */
    const float *logits; /* [n_rows, n_experts] */
    const float *bias;   /* [n_experts] or NULL */
    int32_t *expert;     /* [n_rows, top_k] ascending ids */
    float *weight;       /* [n_rows, top_k] */
} yard_moe_route_args;

/* Local dispatch: copies each token's row to the rows of its experts, expert by expert, tokens in
 * ascending order. An expert id of -1 is skipped. n_cols 0: nothing is copied, only said where rows
 * lie. */
typedef struct yard_moe_scatter_args {
    const int32_t *n_tokens;
    uint32_t max_rows;
    uint32_t n_experts, top_k, n_cols;
    const int32_t *expert; /* [n_tokens, top_k] */
    yard_rows x;           /* any dtype, scales travel too */
    int32_t *offset;       /* [n_experts + 1] out */
    int32_t *row_index;    /* [n_tokens, top_k] out: the row of expert_x, or -1 */
    yard_rows expert_x;    /* [n_tokens * top_k, n_cols] out, same dtype as x */
    /* The same routing by expert, for whoever sends to experts and not from tokens (R151):
     * [n_tokens * top_k] out, token * top_k + k of each row; NULL: not wanted. */
    int32_t *row_choice;
} yard_moe_scatter_args;

/* offset[0] = 0, offset[g + 1] = offset[g] + count[g]: where each group's rows begin. */
typedef struct yard_count_offsets_args {
    uint32_t n_groups;
    const int32_t *count; /* [n_groups] */
    int32_t *offset;      /* [n_groups + 1] out */
} yard_count_offsets_args;

/* Local combine: y[i] = sum over k ascending of weight[i, k] * expert_y[row_index[i, k]], f32. */
typedef struct yard_moe_gather_args {
    const int32_t *n_tokens;
    uint32_t max_rows;
    uint32_t top_k, n_cols;
    const int32_t *row_index;
    const float *weight;
    yard_rows expert_y; /* F32 or BF16 */
    float *y;           /* [n_tokens, n_cols] */
} yard_moe_gather_args;

/* y = silu(gate) * up; gate_up holds gate in columns [0, n_cols), up in [n_cols, 2 n_cols). */
typedef struct yard_silu_mul_args {
    const int32_t *n_rows;
    uint32_t max_rows;
    uint32_t n_cols;
    yard_rows gate_up; /* F32 or BF16 */
    bool ue8m0;
    yard_out y;
} yard_silu_mul_args;

/* x[i] += a[i] (+ b[i]); x is F32, a and b F32 or BF16, b may be absent (data NULL). */
typedef struct yard_residual_add_args {
    const int32_t *n_rows;
    uint32_t max_rows;
    uint32_t n_cols;
    float *x;
    yard_rows a, b;
} yard_residual_add_args;

/* Rounds and quantises rows that no norm or activation made (attention outputs). */
typedef struct yard_quantise_args {
    const int32_t *n_rows;
    uint32_t max_rows;
    uint32_t n_cols;
    yard_rows x; /* F32 or BF16 */
    bool ue8m0;
    yard_rows y; /* FP8 */
} yard_quantise_args;

/* out[i] = x[index[i]] for the rows that go on to the output head. */
typedef struct yard_select_rows_args {
    const int32_t *n_rows; /* rows of out */
    uint32_t max_rows;
    const int32_t *index;
    uint32_t n_cols;
    const float *x;
    float *out;
} yard_select_rows_args;

/* How one row is sampled. Order: logit bias, penalties, temperature, top-k, top-p, min-p. */
typedef struct yard_sample_params {
    float temperature;        /* 0: greedy */
    float top_p;              /* 1: off */
    float min_p;              /* 0: off */
    int32_t top_k;            /* 0: off */
    float repetition_penalty; /* 1: off; over prompt and output */
    float presence_penalty;   /* 0: off; over output */
    float frequency_penalty;  /* 0: off; over output */
    uint64_t seed;
} yard_sample_params;

/* One row to sample. The random number is a function of (seed, position) alone. */
typedef struct yard_sample_row {
    yard_sample_params params;
    uint64_t position;     /* index of the token to be sampled in its sequence */
    const int32_t *prompt; /* [n_prompt] */
    const int32_t *output; /* [n_output] */
    uint32_t n_prompt, n_output;
    const int32_t *bias_token; /* [n_bias] */
    const float *bias_value;
    uint32_t n_bias;
} yard_sample_row;

typedef struct yard_sample_args {
    const int32_t *n_rows;
    uint32_t n_vocab;
    float *logits;               /* [n_rows, n_vocab]; changed */
    const yard_sample_row *rows; /* [n_rows] */
    int32_t *token;              /* [n_rows] out */
    uint8_t *finite;             /* [n_rows] out, or NULL: 1 where every logit was a number neither
                                    infinite nor NaN, before anything changed it */
} yard_sample_args;

/* backends */

/* Bounds of every later call on the stream: they size its workspace. */
typedef struct yard_ops_limits {
    uint32_t max_tokens;  /* rows of a step */
    uint32_t max_rows;    /* of a grouped product; 0: max_tokens */
    uint32_t max_in;      /* columns of any linear's input */
    uint32_t max_vocab;   /* columns of sample's logits; 0: no sampling */
    uint32_t max_experts; /* groups of grouped_linear and moe_route */
    uint32_t max_heads;   /* of any head_linear or attention */
    /* MLA's; grouped-query attention: 0, 0, head_dim, head_dim */
    uint32_t kv_rank, nope_dims, rope_dims, v_dims;
} yard_ops_limits;

typedef struct yard_ops_config {
    uint32_t n_threads; /* CPU; 0: all processors of the affinity mask */
    /* NULL: the best there is. CPU: "c", "avx2", "avx512" force one;
     * "amx" rounds sums in another order than the definition, within 2^-17 of their terms' size.
     * CUDA: "deterministic" keeps the rule that a row's result does not depend on the other rows,
     * which its default, "fast", gives up; the name of a kernel ("few_fp8:8", see docs/kernels.md)
     * takes that one wherever it can run. */
    const char *variant;
    const char *choices; /* CUDA, fast: file of measured choices; NULL: the built-in ones */
    yard_ops_limits limits;
    yard_pin pin; /* CPU: where the threads run */
} yard_ops_config;

/* Weights as they lie in host memory, to be prepared for one kind of product. */
typedef struct yard_prepare_args {
    /* [n_matrices * n_parts] n_parts matrices of one dtype and width become one by stacking their
     * rows (a fused projection) */
    const yard_matrix *parts;
    uint32_t n_matrices,
        n_parts; /* n_matrices > 1: the groups of a grouped product, equal shapes */
    /* the shapes of a head_linear that will read the matrix (n_heads, head_*, w.cols); NULL: none.
     * The transposed form is made for it beside the plain one. */
    const yard_head_linear_args *absorb;
} yard_prepare_args;

/* What capture_end made: a list of operations that can be run again. */
typedef struct yard_graph yard_graph;

typedef struct yard_ops {
    const char *name;
    /* The device's memory is the host's: pointers of either are good for both, so nothing has to be
     * uploaded, downloaded or prepared. */
    bool in_host_memory;
    /* Makes one of the backend's devices that of the calling thread, where streams are opened: the
     * number device_idx modulo how many there are, so that the ranks of a machine may all ask by
     * their own number. NULL: the backend has no devices to choose from. Errors: YARD_EDEVICE, when
     * there is none. */
    yard_status (*use_device)(uint32_t device_idx, yard_error *err);
    size_t (*workspace_bytes)(const yard_ops_config *config); /* of a stream */
    /* Opens a stream with its workspace and threads. The caller closes it. */
    yard_status (*open)(yard_stream *out, const yard_ops_config *config, yard_error *err);
    void (*close)(yard_stream stream); /* NULL is fine */
    /* The device's own stream, for libraries beside this table: a cudaStream_t. NULL: there is
     * none, and they ignore it. */
    yard_stream (*native_stream)(yard_stream stream);
    /* The variant in use and why, for people ("avx2: the processor has AVX2, FMA and F16C"). */
    const char *(*describe)(yard_stream stream);
    void (*synchronise)(yard_stream stream);
    /* The first error of any operation on the stream since it was opened: arguments that no kernel
     * takes, a failed launch, a device that was lost (after synchronise). It stays. */
    yard_status (*check)(yard_stream s, yard_error *err);

    /* Memory of the backend's device, at least 64-byte aligned, not initialised; belongs to the
     * caller. upload has read the host's memory on return, and writes when the stream comes to
     * it; download waits for what the stream holds, and is complete on return.
     * available: bytes that nobody has taken now; UINT64_MAX: not known. Errors: YARD_ENOMEM,
     * YARD_EDEVICE. */
    yard_status (*available)(uint64_t *n_bytes, yard_stream s, yard_error *err);
    yard_status (*allocate)(void **out, yard_stream s, size_t n_bytes, yard_error *err);
    void (*release)(yard_stream s, void *memory); /* NULL is fine */
    yard_status (*upload)(yard_stream s, void *to, const void *host, size_t n_bytes,
                          yard_error *err);
    yard_status (*download)(yard_stream s, void *host, const void *from, size_t n_bytes,
                            yard_error *err);

    /* Brings weights into the form the kernels read, once, at load: w [n_matrices], which may be
     * a->parts where those are as many, describes the result, which *out owns; release it after the
     * last operation that reads it. A backend that reads weights in place refers to the host
     * memory, so that must live as long. Errors: YARD_EINVAL, YARD_ENOMEM, YARD_EDEVICE. */
    yard_status (*prepare)(struct yard_prepared **out, yard_matrix *w, yard_stream s,
                           const yard_prepare_args *a, yard_error *err);
    void (*release_prepared)(yard_stream s, struct yard_prepared *prepared); /* NULL is fine */

    /* Between the two calls operations are recorded, not run: then the whole list runs again and
     * again by one call, reading its counts anew. Backends whose operations cost nothing to start
     * have no graphs: YARD_ENOTSUP. us (may be NULL): waits, and says how long the device took. */
    yard_status (*capture_begin)(yard_stream s, yard_error *err);
    yard_status (*capture_end)(yard_graph **out, yard_stream s, yard_error *err);
    yard_status (*replay)(yard_stream s, yard_graph *graph, float *us, yard_error *err);
    void (*release_graph)(yard_stream s, yard_graph *graph); /* NULL is fine */

    /* Runs fn with a copy of ctx [n_bytes] when the stream comes to it: for calls of other rooms
     * that work on host memory and are complete when they return (libyard-ep between CPU ranks).
     * NULL: no such memory, or operations run at once: just call it. */
    void (*issue)(yard_stream s, void (*fn)(void *ctx), const void *ctx, size_t n_bytes);

    /* Operations. One that a backend does not have yet is NULL. */
    void (*embed)(yard_stream s, const yard_embed_args *a);
    void (*rms_norm_quant)(yard_stream s, const yard_rms_norm_args *a);
    void (*linear)(yard_stream s, const yard_linear_args *a);
    void (*grouped_linear)(yard_stream s, const yard_grouped_linear_args *a);
    void (*head_linear)(yard_stream s, const yard_head_linear_args *a);
    void (*rope_q)(yard_stream s, const yard_rope_q_args *a);
    void (*rope_append_kv)(yard_stream s, const yard_rope_append_kv_args *a);
    void (*mla_decode)(yard_stream s, const yard_mla_decode_args *a);
    void (*mla_prefill)(yard_stream s, const yard_mla_prefill_args *a);
    void (*gqa_append_kv)(yard_stream s, const yard_gqa_append_kv_args *a);
    void (*gqa_attend)(yard_stream s, const yard_gqa_attend_args *a);
    void (*moe_route)(yard_stream s, const yard_moe_route_args *a);
    void (*moe_scatter)(yard_stream s, const yard_moe_scatter_args *a);
    void (*count_offsets)(yard_stream s, const yard_count_offsets_args *a);
    void (*moe_gather)(yard_stream s, const yard_moe_gather_args *a);
    void (*silu_mul_quant)(yard_stream s, const yard_silu_mul_args *a);
    void (*residual_add)(yard_stream s, const yard_residual_add_args *a);
    void (*quantise)(yard_stream s, const yard_quantise_args *a);
    void (*select_rows)(yard_stream s, const yard_select_rows_args *a);
    void (*sample)(yard_stream s, const yard_sample_args *a);
} yard_ops;

/* The backend of that name ("cpu": the definition and its faster variants, "cuda"); NULL when this
 * library was built without it. Static storage. */
YARD_API const yard_ops *yard_ops_find(const char *name);

#ifdef __cplusplus
}
#endif
#endif
