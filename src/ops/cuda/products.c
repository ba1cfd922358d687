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
    if (j->x.dtype == YARD_BF16 && j->offset) /* no kernel for groups in bf16 */
        return false;
    return is_aligned(j->x.data, 16) && j->x.ld * bytes % 16 == 0 && j->n_groups <= GEMM_MAX_GROUPS;
}

static yard_status encode_x(yard_gemm_maps *maps, const job *j, const yard_gemm_variant *variant,
                            yard_error *err)
{
    const uint32_t bytes = (uint32_t)yard_dtype_bytes(j->x.dtype);
    yard_status st = YARD_OK;

    for (uint32_t i = 0; i < variant->n_boxes && st == YARD_OK; i++)
        st = yard_cuda_encode_map(&maps->box[i], j->x.data, bytes, j->max_x_rows, j->w->cols,
                                  (uint64_t)j->x.ld * bytes, variant->box_rows[i], err);
    return st;
}

static yard_status run_gemm(cuda_stream *s, const job *j, yard_error *err)
{
    const struct yard_prepared *w = j->w;
    const cuda_choice choice = yard_cuda_choose(s, w->all.dtype, w->rows, w->cols, j->n_groups,
                                                j->offset != NULL, j->expected_rows);
    const yard_gemm_variant *variant = choice.variant;
    const uint32_t block = w->all.dtype == YARD_FP8_E4M3 ? 128 : 64;
    const uint32_t n_tiles = w->padded_rows / GEMM_TILE_ROWS;
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
        .n_blocks = yard_ceil_div(w->cols, block),
        .first_group = j->first_group,
        .w_once = yard_ceil_div(j->expected_rows, j->n_groups) <= width,
        .tile_width = width,
        .early = j->max_rows <= width,
        .min_blocks = (size_t)n_tiles * row_tiles <= GEMM_MAX_ARRIVALS ? choice.min_blocks : 0,
        .partial = s->partial,
        .arrivals = s->arrivals,
    };
    yard_gemm_maps maps;
    yard_status st;

    maps.w = w->map;
    st = encode_x(&maps, j, variant, err);
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

/* ---- one product per head -------------------------------------------------------------------- */

static yard_status run_heads(cuda_stream *s, const yard_head_linear_args *a, uint32_t max_rows,
                             yard_error *err)
{
    const struct yard_prepared *w = a->w.prepared;
    const yard_matrix *m = a->transposed ? &w->absorb : &w->all;
    const yard_heads_args args = {
        .n_rows = a->n_rows,
        .max_rows = max_rows,
        .row_mask = a->row_mask,
        .n_heads = a->n_heads,
        .n_in = a->transposed ? a->head_rows : w->cols,
        .n_out = a->transposed ? w->cols : a->head_rows,
        .x = a->x,
        .y = a->y,
        .x_step = a->x_head_stride,
        .y_step = a->y_head_stride,
        .x_aligned = a->x.dtype == YARD_BF16 && is_aligned(a->x.data, 16) && a->x.ld % 8 == 0 &&
                     a->x_head_stride % 8 == 0 && (a->transposed ? a->head_rows : w->cols) % 8 == 0,
        .y_aligned = a->y.dtype == YARD_BF16 && is_aligned(a->y.data, 16) && a->y.ld % 8 == 0 &&
                     a->y_head_stride % 8 == 0 && (a->transposed ? w->cols : a->head_rows) % 8 == 0,
        .ue8m0 = a->ue8m0,
        .w_first = a->transposed ? 0 : a->head_offset,
        .w_step = a->transposed ? w->absorb_step : a->head_stride,
        .w_scale = m->scale,
        .w_scale_ld = m->scale_ld,
    };

    return yard_cuda_heads_launch(a->transposed ? &w->absorb_map : &w->map, &args, s->stream, err);
}

static yard_status run_head_product(cuda_stream *s, const yard_head_linear_args *a,
                                    uint32_t max_rows, yard_error *err)
{
    const yard_product_args args = {
        .n_groups = a->n_heads,
        .n_in = a->transposed ? a->head_rows : a->w.cols,
        .n_out = a->transposed ? a->w.cols : a->head_rows,
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

/* The tensor-core kernel holds all of K, and takes one scale for 64 rows of w. */
static bool heads_fit(const yard_head_linear_args *a)
{
    const struct yard_prepared *w = a->w.prepared;

    if (!a->quantise || !w->tiled || w->all.dtype != YARD_FP8_E4M3)
        return false;
    if (a->transposed)
        return w->absorb.data && w->absorb_step >= w->cols &&
               (uint64_t)w->absorb_step * a->n_heads <= w->absorb.rows &&
               a->head_rows == w->absorb.cols;
    return w->cols <= HEADS_MAX_K && a->head_stride % 64 == 0 && a->head_offset % 64 == 0;
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
    if (st == YARD_OK)
        heads_fit(a) ? run_heads(s, a, max_rows, &err) : run_head_product(s, a, max_rows, &err);
    yard_cuda_set_error(s, &err);
}
