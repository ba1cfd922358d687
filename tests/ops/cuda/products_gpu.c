#include "products_gpu_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { POISON = 0xff, ALL_BELOW = 1 << 21, SAMPLE_ROWS = 12, SAMPLE_COLS = 20, SAMPLES = 256 };

const uint32_t token_counts[N_TOKEN_COUNTS] = { 0, 1, 2, 7, 64, 129, 1000 };

static uint32_t below(gpu_test *t, uint32_t n)
{
    return (uint32_t)(gpu_test_random(t) % n);
}

bool bed_open(bed *b, gpu_test *t, const char *variant)
{
    return bed_open_for(
        b, t, variant,
        &(yard_ops_limits){ .max_tokens = 1024, .max_rows = 8192, .max_vocab = 200000 });
}

bool bed_open_for(bed *b, gpu_test *t, const char *variant, const yard_ops_limits *limits)
{
    const yard_ops_config config = { .variant = variant, .limits = *limits };
    yard_error err = { 0 };

    *b = (bed){ .t = t, .ops = yard_ops_find("cuda"), .variant = variant ? variant : "fast" };
    gpu_test_case(t, b->ops && b->ops->open(&b->s, &config, &err) == YARD_OK, "open %s: %s",
                  b->variant, err.message);
    return b->s != NULL;
}

void bed_close(bed *b)
{
    yard_error err = { 0 };

    b->ops->synchronise(b->s);
    gpu_test_case(b->t, b->ops->check(b->s, &err) == YARD_OK, "%s: an operation failed: %s",
                  b->variant, err.message);
    b->ops->close(b->s);
}

bool twin_create(const bed *b, twin *m, size_t n_bytes)
{
    yard_error err = { 0 };

    m->n_bytes = n_bytes ? n_bytes : 1;
    m->host = malloc(m->n_bytes);
    if (!m->host || b->ops->allocate(&m->device, b->s, m->n_bytes, &err) != YARD_OK)
        return false;
    memset(m->host, POISON, m->n_bytes);
    return twin_upload(b, m);
}

void twin_destroy(const bed *b, twin *m)
{
    free(m->host);
    b->ops->release(b->s, m->device);
}

bool twin_upload(const bed *b, const twin *m)
{
    return b->ops->upload(b->s, m->device, m->host, m->n_bytes, NULL) == YARD_OK;
}

bool twin_download(const bed *b, const twin *m)
{
    return b->ops->download(b->s, m->host, m->device, m->n_bytes, NULL) == YARD_OK;
}

/* In (-1, 1), four a random number: tests draw hundreds of millions. */
static void random_values(gpu_test *t, yard_dtype dtype, void *to, size_t n)
{
    for (size_t i = 0; i < n; i += 4) {
        uint64_t bits = gpu_test_random(t);
        for (size_t j = i; j < i + 4 && j < n; j++, bits >>= 16) {
            const float value = (float)(int16_t)(bits & 0xffff) * 0x1p-15f;
            if (dtype == YARD_FP8_E4M3) /* any code but NaN, with fewer large ones */
                ((uint8_t *)to)[j] =
                    (uint8_t)((bits & 0x80) | (bits >> 8 & 0x7f) * (bits & 0x7f) / 0x80);
            else if (dtype == YARD_BF16)
                ((uint16_t *)to)[j] = yard_bf16_from_f32(value);
            else if (dtype == YARD_F16)
                ((uint16_t *)to)[j] = (uint16_t)((bits & 0x83ff) | 0x3800); /* +-[0.5, 1) */
            else
                ((float *)to)[j] = value;
        }
    }
}

static void random_scales(gpu_test *t, float *to, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = 0.001f + 0.004f * (float)(gpu_test_random(t) >> 40) * 0x1p-24f;
}

bool rows_create(const bed *b, rows_twin *r, yard_dtype dtype, uint32_t n_rows, uint32_t n_cols,
                 uint32_t ld, bool random)
{
    const size_t n_scales = (size_t)n_rows * yard_group_count(n_cols);

    memset(r, 0, sizeof(*r));
    r->n_rows = n_rows;
    r->n_cols = n_cols;
    if (!twin_create(b, &r->data, (size_t)n_rows * ld * yard_dtype_bytes(dtype)) ||
        !twin_create(b, &r->scale, n_scales * sizeof(float)))
        return false;
    r->host = (yard_rows){ .dtype = dtype, .ld = ld, .data = r->data.host };
    r->device = (yard_rows){ .dtype = dtype, .ld = ld, .data = r->data.device };
    if (dtype == YARD_FP8_E4M3) {
        r->host.scale = r->scale.host;
        r->device.scale = r->scale.device;
    }
    if (random) {
        random_values(b->t, dtype, r->data.host, (size_t)n_rows * ld);
        random_scales(b->t, r->scale.host, n_scales);
    }
    return twin_upload(b, &r->data) && twin_upload(b, &r->scale);
}

void rows_destroy(const bed *b, rows_twin *r)
{
    twin_destroy(b, &r->data);
    twin_destroy(b, &r->scale);
}

static double plain_value(yard_dtype dtype, const void *data, size_t at)
{
    switch (dtype) {
    case YARD_F32:
        return (double)((const float *)data)[at];
    case YARD_BF16:
        return (double)yard_f32_from_bf16(((const uint16_t *)data)[at]);
    case YARD_F16:
        return (double)yard_f32_from_f16(((const uint16_t *)data)[at]);
    default:
        return (double)yard_f32_from_e4m3(((const uint8_t *)data)[at]);
    }
}

double rows_value(const yard_rows *r, uint32_t n_cols, size_t row, size_t col)
{
    const double value = plain_value(r->dtype, r->data, row * r->ld + col);

    if (r->dtype != YARD_FP8_E4M3)
        return value;
    return value * (double)r->scale[row * yard_group_count(n_cols) + col / YARD_GROUP];
}

bool weights_create(gpu_test *t, weights *w, yard_dtype dtype, uint32_t n, uint32_t rows,
                    uint32_t cols, uint32_t row0, uint32_t block_rows)
{
    const size_t each = (size_t)rows * cols, bytes = yard_dtype_bytes(dtype);
    const size_t scales = (size_t)((row0 + rows) / block_rows + 1) * yard_group_count(cols);

    *w = (weights){ .n = n,
                    .m = calloc(n, sizeof(*w->m)),
                    .data = malloc(n * each * bytes),
                    .scale = malloc(n * scales * sizeof(float)) };
    if (!w->m || !w->data || !w->scale)
        return false;
    random_values(t, dtype, w->data, n * each);
    random_scales(t, w->scale, n * scales);
    for (uint32_t i = 0; i < n; i++)
        w->m[i] = (yard_matrix){ .dtype = dtype,
                                 .rows = rows,
                                 .cols = cols,
                                 .ld = cols,
                                 .data = w->data + i * each * bytes,
                                 .scale = dtype == YARD_FP8_E4M3 ? w->scale + i * scales : NULL,
                                 .scale_ld = yard_group_count(cols),
                                 .block_rows = block_rows,
                                 .row0 = row0 };
    return true;
}

void weights_destroy(weights *w)
{
    free(w->m);
    free(w->data);
    free(w->scale);
}

double matrix_value(const yard_matrix *w, size_t row, size_t col)
{
    const double value = plain_value(w->dtype, w->data, row * w->ld + col);

    if (w->dtype != YARD_FP8_E4M3)
        return value;
    return value * (double)w->scale[(w->row0 + row) / w->block_rows * w->scale_ld +
                                    (w->col0 + col) / YARD_GROUP];
}

double element_noise(const element *e, bool fp8)
{
    return fp8 ? e->units * 7 * 0x1p-13 : e->size * 0x1p-18 / 6;
}

double off_by(yard_dtype y, double got, const element *want, bool fp8)
{
    const double rounding = y == YARD_BF16 ? fabs(want->value) * 0x1p-8 : 0;
    const double off = fabs(got - want->value) / (rounding + 6 * element_noise(want, fp8) + 1e-30);

    return isnan(off) ? INFINITY : off;
}

bool only_written(const rows_twin *y, const uint8_t *written, uint32_t n_rows, uint32_t n_cols)
{
    const size_t bytes = yard_dtype_bytes(y->host.dtype);

    for (uint32_t row = 0; row < y->n_rows; row++) {
        const uint8_t *at = (const uint8_t *)y->host.data + (size_t)row * y->host.ld * bytes;
        const bool counts = row < n_rows && (!written || written[row]);
        for (uint32_t col = 0; counts && col < n_cols; col++)
            if (isnan(plain_value(y->host.dtype, at, col)))
                return false;
        for (size_t i = counts ? n_cols * bytes : 0; i < y->host.ld * bytes; i++)
            if (at[i] != POISON)
                return false;
    }
    return true;
}

bool set_count(const bed *b, const twin *n_rows, uint32_t n)
{
    *(int32_t *)n_rows->host = (int32_t)n;
    return twin_upload(b, n_rows);
}

static void compare(product_errors *s, const rows_twin *x, size_t x_row, const yard_matrix *w,
                    const rows_twin *y, size_t y_row, uint32_t col, bool tensor_cores)
{
    const double got = rows_value(&y->host, y->n_cols, y_row, col);
    element want = { 0 };

    for (uint32_t k = 0; k < w->cols; k++)
        element_add(&want, rows_value(&x->host, x->n_cols, x_row, k) * matrix_value(w, col, k));
    s->error += (got - want.value) * (got - want.value);
    s->size += want.value * want.value;
    s->worst = fmax(s->worst, off_by(y->host.dtype, got, &want, tensor_cores));
}

void compare_rows(gpu_test *t, product_errors *s, const rows_twin *x, const int32_t *x_index,
                  const yard_matrix *w, const rows_twin *y, uint32_t y0, uint32_t n_rows,
                  bool tensor_cores)
{
    const bool all = (uint64_t)n_rows * w->rows * w->cols <= ALL_BELOW;
    const uint32_t rows = all || n_rows < SAMPLE_ROWS ? n_rows : SAMPLE_ROWS;
    const uint32_t some = rows * SAMPLE_COLS < SAMPLES ? SAMPLES / (rows ? rows : 1) : SAMPLE_COLS;
    const uint32_t cols = all || w->rows < some ? w->rows : some;

    for (uint32_t i = 0; i < rows; i++) {
        const uint32_t row = rows == n_rows ? i : i == 0 ? n_rows - 1 : below(t, n_rows);
        const size_t x_row = x_index ? (size_t)x_index[y0 + row] : y0 + row;
        for (uint32_t j = 0; j < cols; j++) {
            const uint32_t col = cols == w->rows ? j : j == 0 ? w->rows - 1 : below(t, w->rows);
            compare(s, x, x_row, w, y, y0 + row, col, tensor_cores);
        }
    }
}

/* As a whole: bf16 rounds by 2^-8 at most, all of which counts where one value of a sample is much
 * larger than the others; FP8 products on tensor cores keep about 13 bits. */
bool errors_pass(const product_errors *s, yard_dtype y)
{
    return s->worst <= 1 && sqrt(s->error) <= sqrt(s->size) * (y == YARD_BF16 ? 0x1p-8 : 1e-3);
}

bool bed_replay(const bed *b, void (*fn)(const bed *b, const void *args), const void *args)
{
    yard_graph *graph = NULL;
    bool ok = b->ops->capture_begin(b->s, NULL) == YARD_OK;

    if (ok) {
        fn(b, args);
        ok = b->ops->capture_end(&graph, b->s, NULL) == YARD_OK &&
             b->ops->replay(b->s, graph, NULL, NULL) == YARD_OK;
    }
    b->ops->synchronise(b->s);
    b->ops->release_graph(b->s, graph);
    return ok;
}
