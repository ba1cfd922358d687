/* Memory and weights of the CPU table: memory is memory, and weights are used in place. */
#include <stdlib.h>

#include "ops/cpu/cpu.h"

yard_status yard_cpu_available(uint64_t *n_bytes, yard_stream s, yard_error *err)
{
    (void)s;
    (void)err;
    *n_bytes = UINT64_MAX;
    return YARD_OK;
}

/* Not touched: a cache takes memory as it is used. */
yard_status yard_cpu_allocate(void **out, yard_stream s, size_t n_bytes, yard_error *err)
{
    enum { ALIGN = 64 };
    void *p = n_bytes > SIZE_MAX - ALIGN
                  ? NULL
                  : aligned_alloc(ALIGN, yard_align_up(n_bytes ? n_bytes : 1, ALIGN));

    (void)s;
    if (!p)
        return yard_fail(err, YARD_ENOMEM, "cpu: %zu bytes", n_bytes);
    *out = p;
    return YARD_OK;
}

void yard_cpu_release(yard_stream s, void *memory)
{
    (void)s;
    free(memory);
}

yard_status yard_cpu_upload(yard_stream s, void *to, const void *host, size_t n_bytes,
                            yard_error *err)
{
    (void)s;
    (void)err;
    memcpy(to, host, n_bytes);
    return YARD_OK;
}

yard_status yard_cpu_download(yard_stream s, void *host, const void *from, size_t n_bytes,
                              yard_error *err)
{
    (void)s;
    (void)err;
    memcpy(host, from, n_bytes);
    return YARD_OK;
}

/* Copies of stacked matrices, n_bytes each; none where there is one part to a matrix. */
struct yard_prepared {
    size_t values_bytes, scale_bytes;
    uint8_t *block;
};

static yard_status check_parts(const yard_prepare_args *a, yard_error *err)
{
    if (a->n_matrices == 0 || a->n_parts == 0)
        return yard_fail(err, YARD_EINVAL, "prepare: want matrices, got %u of %u parts",
                         a->n_matrices, a->n_parts);
    for (uint32_t i = 0; i < a->n_matrices * a->n_parts; i++) {
        const yard_matrix *w = &a->parts[i], *like = &a->parts[i % a->n_parts];
        if (w->dtype != a->parts[0].dtype || w->cols != a->parts[0].cols || w->rows != like->rows)
            return yard_fail(
                err, YARD_EINVAL, "prepare: matrix %u, part %u: want %s [%u, %u], got %s [%u, %u]",
                i / a->n_parts, i % a->n_parts, yard_dtype_name(a->parts[0].dtype), like->rows,
                a->parts[0].cols, yard_dtype_name(w->dtype), w->rows, w->cols);
    }
    return YARD_OK;
}

/* The stacked matrix has one scale a row: parts may begin anywhere in their blocks. */
static yard_matrix stack(const yard_matrix *parts, uint32_t n_parts, uint8_t *values, float *scale)
{
    const size_t bytes = yard_dtype_bytes(parts[0].dtype);
    yard_matrix m = {
        .dtype = parts[0].dtype, .cols = parts[0].cols, .ld = parts[0].cols, .data = values
    };

    if (m.dtype == YARD_FP8_E4M3) {
        m.scale = scale;
        m.scale_ld = yard_group_count(m.cols);
        m.block_rows = 1;
    }
    for (uint32_t i = 0; i < n_parts; i++) {
        for (uint32_t r = 0; r < parts[i].rows; r++, values += m.cols * bytes) {
            memcpy(values, matrix_row(&parts[i], r), m.cols * bytes);
            if (!m.scale)
                continue;
            memcpy(scale, matrix_scale_row(&parts[i], r), m.scale_ld * sizeof(*scale));
            scale += m.scale_ld;
        }
        m.rows += parts[i].rows;
    }
    return m;
}

yard_status yard_cpu_prepare(struct yard_prepared **out, yard_matrix *w, yard_stream s,
                             const yard_prepare_args *a, yard_error *err)
{
    struct yard_prepared *p;
    uint32_t rows = 0;
    yard_status st = check_parts(a, err);

    (void)s;
    if (st != YARD_OK)
        return st;
    p = yard_alloc(sizeof(*p));
    if (!p)
        return yard_fail(err, YARD_ENOMEM, "prepare: %zu bytes", sizeof(*p));
    if (a->n_parts > 1) {
        for (uint32_t i = 0; i < a->n_parts; i++)
            rows += a->parts[i].rows;
        p->values_bytes = yard_align_up(
            (size_t)rows * a->parts[0].cols * yard_dtype_bytes(a->parts[0].dtype), sizeof(float));
        if (a->parts[0].dtype == YARD_FP8_E4M3)
            p->scale_bytes = (size_t)rows * yard_group_count(a->parts[0].cols) * sizeof(float);
        p->block = yard_alloc((p->values_bytes + p->scale_bytes) * a->n_matrices);
        if (!p->block) {
            st = yard_fail(err, YARD_ENOMEM, "prepare: %u matrices of %zu bytes", a->n_matrices,
                           p->values_bytes + p->scale_bytes);
            free(p);
            return st;
        }
    }
    for (uint32_t i = 0; i < a->n_matrices; i++) {
        uint8_t *const at = p->block + i * (p->values_bytes + p->scale_bytes);
        w[i] = a->parts[i];
        if (a->n_parts > 1)
            w[i] = stack(a->parts + (size_t)i * a->n_parts, a->n_parts, at,
                         (float *)(void *)(at + p->values_bytes));
        w[i].prepared = p;
        w[i].prepared_idx = i;
    }
    *out = p;
    return YARD_OK;
}

void yard_cpu_release_prepared(yard_stream s, struct yard_prepared *prepared)
{
    (void)s;
    if (!prepared)
        return;
    free(prepared->block);
    free(prepared);
}
