/* linear, grouped_linear and head_linear of the CUDA table: which kernel, and its arguments. */
#include "ops/cuda/cuda.h"
#include "ops/cuda/heads.h"
#include "ops/cuda/product.h"

static bool is_aligned(const void *p, size_t n_bytes)
{
    return (uintptr_t)p % n_bytes == 0;
}

static uint32_t or_default(uint32_t value, uint32_t otherwise)
{
    return value ? value : otherwise;
}

static yard_status check_prepared(const char *op, const yard_matrix *w, yard_error *err)
{
    if (!w->prepared)
        return yard_fail(err, YARD_EINVAL, "%s: w: want weights that prepare made, got others", op);
    if (w->rows != w->prepared->rows || w->cols != w->prepared->cols)
        return yard_fail(err, YARD_EINVAL, "%s: w: want all of the prepared [%u, %u], got [%u, %u]",
                         op, w->prepared->rows, w->prepared->cols, w->rows, w->cols);
    return YARD_OK;
}

static yard_status check_rows(const char *op, const char *name, const yard_rows *r, uint32_t n_cols,
                              bool fp8, yard_error *err)
{
    const bool ok = r->dtype == YARD_F32 || r->dtype == YARD_BF16 ||
                    (fp8 && r->dtype == YARD_FP8_E4M3 && r->scale);

    if (!r->data || !ok)
        return yard_fail(err, YARD_EINVAL, "%s: %s: want f32%s bf16%s, got %s%s", op, name,
                         fp8 ? "," : " or", fp8 ? " or fp8 with scales" : "",
                         yard_dtype_name(r->dtype), r->data ? "" : " without data");
    if (r->ld < n_cols)
        return yard_fail(err, YARD_EINVAL, "%s: %s: want rows of at least %u, got %u", op, name,
                         n_cols, r->ld);
    return YARD_OK;
}

/* ---- linear and grouped linear --------------------------------------------------------------- */

/* Both operations, with the counts where the kernels want them. */
typedef struct job {
    const char *op;
    const struct yard_prepared *w;
    uint32_t first_group, n_groups;
    const int32_t *offset, *row_count, *x_index;
    uint32_t max_rows, max_x_rows, expected_rows;
    yard_rows x, y;
} job;

/* What the copy engine needs of x. */
static bool fits_tensor_cores(const job *j)
{
    const size_t bytes = yard_dtype_bytes(j->x.dtype);

    if (!j->w->tiled || j->x.dtype != j->w->all.dtype)
        return false;
    return is_aligned(j->x.data, 16) && j->x.ld * bytes % 16 == 0 && j->n_groups <= GEMM_MAX_GROUPS;
}

static yard_status encode_x(yard_gemm_maps *maps, const yard_rows *x, uint32_t n_rows,
                            uint32_t n_cols, const yard_gemm_variant *variant, yard_error *err)
{
    const uint32_t bytes = (uint32_t)yard_dtype_bytes(x->dtype);
    yard_status st = YARD_OK;

    for (uint32_t i = 0; i < variant->n_boxes && st == YARD_OK; i++)
        st = yard_cuda_encode_map(&maps->box[i], x->data, bytes, n_rows, n_cols,
                                  (uint64_t)x->ld * bytes, variant->box_rows[i], err);
    return st;
}

static yard_status run_gemm(cuda_stream *s, const job *j, yard_error *err)
{
    const struct yard_prepared *w = j->w;
    const cuda_choice choice = yard_cuda_choose(s, w->all.dtype, w->rows, w->cols, j->n_groups,
                                                j->offset != NULL, j->expected_rows);
    const yard_gemm_variant *variant = choice.variant;
    const uint32_t block = GEMM_BLOCK_BYTES / (uint32_t)yard_dtype_bytes(w->all.dtype);
    const uint32_t n_tiles = yard_ceil_div(w->padded_rows, variant->w_rows);
    const uint32_t width = or_default(choice.tile_width, variant->max_width);
    const uint32_t row_tiles = yard_ceil_div(j->max_rows, width);
    const bool y_f32 = j->y.dtype == YARD_F32;
    yard_gemm_args a = {
        .n_groups = j->n_groups,
        .n_boxes = variant->n_boxes,
        .offset = j->offset,
        .row_count = j->row_count,
        .x_index = j->x_index,
        .x_scale = j->x.scale,
        .w_scale = w->all.scale,
        .y = j->y.data,
        .y_ld = j->y.ld,
        .y_f32 = y_f32,
        .y_aligned = !y_f32 && is_aligned(j->y.data, 16) && j->y.ld % 8 == 0 && w->rows % 8 == 0,
        .n_out = w->rows,
        .n_tiles = n_tiles,
        .group_rows = w->padded_rows,
        .n_blocks = yard_ceil_div(w->cols, block),
        .first_group = j->first_group,
        .w_once = yard_ceil_div(j->expected_rows, j->n_groups) <= width,
        .tile_width = width,
        .early = !j->offset && j->max_rows <= width,
        .min_blocks = (size_t)n_tiles * row_tiles <= GEMM_MAX_ARRIVALS ? choice.min_blocks : 0,
        .partial = s->partial,
        .arrivals = s->arrivals,
    };
    yard_gemm_maps maps;
    yard_status st;

    maps.w = variant->w_rows == GEMM_TILE_ROWS ? w->map : w->half_map;
    st = encode_x(&maps, &j->x, j->max_x_rows, w->cols, variant, err);
    if (st != YARD_OK)
        return st;
    return variant->launch(&maps, &a, s->n_thread_blocks[yard_cuda_variant_idx(variant)], s->stream,
                           err);
}

static yard_status run_product(cuda_stream *s, const job *j, yard_error *err)
{
    const yard_product_args a = {
        .n_groups = j->n_groups,
        .n_in = j->w->cols,
        .n_out = j->w->rows,
        .offset = j->offset,
        .row_count = j->row_count,
        .x_index = j->x_index,
        .x = j->x,
        .y = j->y,
        .w = j->w->all,
        .w_first = j->first_group * j->w->padded_rows,
        .w_step = j->w->padded_rows,
    };

    return yard_cuda_product_launch(&a, j->max_rows, s->stream, err);
}

static void run(cuda_stream *s, const job *j)
{
    yard_error err = { 0 };
    yard_status st = check_rows(j->op, "x", &j->x, j->w->cols, true, &err);

    if (st == YARD_OK)
        st = check_rows(j->op, "y", &j->y, j->w->rows, false, &err);
    if (st == YARD_OK)
        fits_tensor_cores(j) ? run_gemm(s, j, &err) : run_product(s, j, &err);
    yard_cuda_set_error(s, &err);
}

void yard_cuda_linear(yard_stream stream, const yard_linear_args *a)
{
    cuda_stream *s = cuda_of(stream);
    const uint32_t max_rows = or_default(a->max_rows, s->limits.max_tokens);
    yard_error err = { 0 };
    const yard_status st = check_prepared("linear", &a->w, &err);

    if (st != YARD_OK) {
        yard_cuda_set_error(s, &err);
        return;
    }
    run(s, &(job){ .op = "linear",
                   .w = a->w.prepared,
                   .first_group = a->w.prepared_idx,
                   .n_groups = 1,
                   .row_count = a->n_rows,
                   .max_rows = max_rows,
                   .max_x_rows = max_rows,
                   .expected_rows = max_rows,
                   .x = a->x,
                   .y = a->y });
}

void yard_cuda_grouped_linear(yard_stream stream, const yard_grouped_linear_args *a)
{
    cuda_stream *s = cuda_of(stream);
    const uint32_t limit = or_default(s->limits.max_rows, s->limits.max_tokens);
    const uint32_t max_rows = or_default(a->max_rows, limit);
    yard_error err = { 0 };
    yard_status st = check_prepared("grouped_linear", &a->w[0], &err);

    if (st == YARD_OK && a->w[0].prepared_idx + a->n_groups > a->w[0].prepared->n_matrices)
        st = yard_fail(&err, YARD_EINVAL, "grouped_linear: want %u matrices prepared together",
                       a->n_groups);
    if (st != YARD_OK) {
        yard_cuda_set_error(s, &err);
        return;
    }
    run(s, &(job){ .op = "grouped_linear",
                   .w = a->w[0].prepared,
                   .first_group = a->w[0].prepared_idx,
                   .n_groups = a->n_groups,
                   .offset = a->offset,
                   .row_count = a->row_count,
                   .x_index = a->x_index,
                   .max_rows = max_rows,
                   .max_x_rows = or_default(a->max_x_rows, max_rows),
                   .expected_rows = or_default(a->expected_rows, max_rows),
                   .x = a->x,
                   .y = a->y });
}

enum { BLOCK_BF16 = GEMM_BLOCK_BYTES / 2 }; /* values of K in a stage */

/* ---- one product per head -------------------------------------------------------------------- */

static bool in_pieces(const yard_rows *r, uint32_t head_stride, uint32_t head_columns)
{
    return r->dtype == YARD_BF16 && is_aligned(r->data, 16) && r->ld % 8 == 0 &&
           head_stride % 8 == 0 && head_columns % 8 == 0;
}

static uint32_t head_inputs(const yard_head_linear_args *a)
{
    return a->transposed ? a->head_rows : a->w.cols;
}

static uint32_t head_outputs(const yard_head_linear_args *a)
{
    return a->transposed ? a->w.cols : a->head_rows;
}

/* FP8 weights, x is rounded on the way. */
static yard_status run_heads_fp8(cuda_stream *s, const yard_head_linear_args *a, uint32_t max_rows,
                                 yard_error *err)
{
    const struct yard_prepared *w = a->w.prepared;
    const yard_matrix *m = a->transposed ? &w->absorb : &w->all;
    const yard_heads_args args = {
        .n_rows = a->n_rows,
        .max_rows = max_rows,
        .row_mask = a->row_mask,
        .n_heads = a->n_heads,
        .n_in = head_inputs(a),
        .n_out = head_outputs(a),
        .x = a->x,
        .y = a->y,
        .x_step = a->x_head_stride,
        .y_step = a->y_head_stride,
        .x_aligned = in_pieces(&a->x, a->x_head_stride, head_inputs(a)),
        .y_aligned = in_pieces(&a->y, a->y_head_stride, head_outputs(a)),
        .ue8m0 = a->ue8m0,
        .w_first = a->transposed ? 0 : a->head_offset,
        .w_step = a->transposed ? w->absorb_step : a->head_stride,
        .w_scale = m->scale,
        .w_scale_ld = m->scale_ld,
    };

    return yard_cuda_heads_launch(a->transposed ? &w->absorb_map : &w->half_map, &args, s->stream,
                                  err);
}

/* bf16 by bf16. */
static yard_status run_heads_bf16(cuda_stream *s, const yard_head_linear_args *a, uint32_t max_rows,
                                  yard_error *err)
{
    const yard_gemm_variant *variant = &yard_gemm_heads_bf16;
    const struct yard_prepared *w = a->w.prepared;
    const yard_gemm_args args = {
        .n_groups = a->n_heads,
        .n_boxes = variant->n_boxes,
        .row_count = a->n_rows,
        .y = a->y.data,
        .y_ld = a->y.ld,
        .y_f32 = a->y.dtype == YARD_F32,
        .y_aligned = in_pieces(&a->y, a->y_head_stride, head_outputs(a)),
        .n_out = head_outputs(a),
        .n_tiles = yard_ceil_div(head_outputs(a), GEMM_TILE_ROWS),
        .n_blocks = head_inputs(a) / BLOCK_BF16,
        .w_once = max_rows <= variant->max_width,
        .early = max_rows <= variant->max_width,
        .x_step = a->x_head_stride,
        .w_first = a->transposed ? 0 : a->head_offset,
        .w_step = a->transposed ? w->absorb_step : a->head_stride,
        .y_step = a->y_head_stride,
        .row_mask = a->row_mask,
    };
    yard_gemm_maps maps;
    yard_status st;

    maps.w = a->transposed ? w->absorb_map : w->map;
    st = encode_x(&maps, &a->x, max_rows, (a->n_heads - 1) * a->x_head_stride + head_inputs(a),
                  variant, err);
    if (st != YARD_OK)
        return st;
    return variant->launch(&maps, &args, s->n_thread_blocks[yard_cuda_variant_idx(variant)],
                           s->stream, err);
}

static yard_status run_head_product(cuda_stream *s, const yard_head_linear_args *a,
                                    uint32_t max_rows, yard_error *err)
{
    const yard_product_args args = {
        .n_groups = a->n_heads,
        .n_in = head_inputs(a),
        .n_out = head_outputs(a),
        .row_count = a->n_rows,
        .row_mask = a->row_mask,
        .x = a->x,
        .y = a->y,
        .x_step = a->x_head_stride,
        .y_step = a->y_head_stride,
        .quantise = a->quantise,
        .ue8m0 = a->ue8m0,
        .w = a->w.prepared->all,
        .w_first = a->head_offset,
        .w_step = a->head_stride,
        .transposed = a->transposed,
    };

    return yard_cuda_product_launch(&args, max_rows, s->stream, err);
}

/* The transposed form that prepare made is that of these heads. */
static bool absorb_fits(const yard_head_linear_args *a)
{
    const struct yard_prepared *w = a->w.prepared;

    return w->absorb.data && w->absorb_step >= w->cols &&
           (uint64_t)w->absorb_step * a->n_heads <= w->absorb.rows &&
           a->head_rows == w->absorb.cols;
}

/* The FP8 kernel holds all of K, and takes one scale for 64 rows of w. */
static bool heads_fit_fp8(const yard_head_linear_args *a)
{
    const struct yard_prepared *w = a->w.prepared;

    if (!a->quantise || !w->tiled || w->all.dtype != YARD_FP8_E4M3)
        return false;
    if (a->transposed)
        return absorb_fits(a);
    return w->cols <= HEADS_MAX_K && a->head_stride % 64 == 0 && a->head_offset % 64 == 0;
}

/* The other one reads whole blocks of K: what lies behind a head's last column is the next head. */
static bool heads_fit_bf16(const yard_head_linear_args *a)
{
    const struct yard_prepared *w = a->w.prepared;

    if (a->quantise || !w->tiled || w->all.dtype != YARD_BF16 || a->n_heads > GEMM_MAX_GROUPS)
        return false;
    if (a->transposed && !absorb_fits(a))
        return false;
    return in_pieces(&a->x, a->x_head_stride, head_inputs(a)) && head_inputs(a) % BLOCK_BF16 == 0;
}

void yard_cuda_head_linear(yard_stream stream, const yard_head_linear_args *a)
{
    cuda_stream *s = cuda_of(stream);
    const uint32_t max_rows = or_default(a->max_rows, s->limits.max_tokens);
    yard_error err = { 0 };
    yard_status st = check_prepared("head_linear", &a->w, &err);

    if (st == YARD_OK)
        st = check_rows("head_linear", "x", &a->x, 0, false, &err);
    if (st == YARD_OK)
        st = check_rows("head_linear", "y", &a->y, 0, false, &err);
    if (st == YARD_OK &&
        (uint64_t)(a->n_heads - 1) * a->head_stride + a->head_offset + a->head_rows > a->w.rows)
        st = yard_fail(&err, YARD_EINVAL, "head_linear: %u heads of %u rows exceed the %u of w",
                       a->n_heads, a->head_stride, a->w.rows);
    if (st == YARD_OK && heads_fit_fp8(a))
        run_heads_fp8(s, a, max_rows, &err);
    else if (st == YARD_OK && heads_fit_bf16(a))
        run_heads_bf16(s, a, max_rows, &err);
    else if (st == YARD_OK)
        run_head_product(s, a, max_rows, &err);
    yard_cuda_set_error(s, &err);
}
