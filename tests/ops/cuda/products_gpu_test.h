/* What the tests of products share: a table open on the device, random weights and rows on both
 * sides, and the double-precision view of a product that samples of results are compared with. */
#ifndef YARD_PRODUCTS_GPU_TEST_H
#define YARD_PRODUCTS_GPU_TEST_H

#include <math.h>

#include "gpu_test.h"
#include "ops/ops.h"

/* A table and a stream that keeps to one variant. */
typedef struct bed {
    gpu_test *t;
    const yard_ops *ops;
    yard_stream s;
    const char *variant;
} bed;

bool bed_open(bed *b, gpu_test *t, const char *variant);
bool bed_open_for(bed *b, gpu_test *t, const char *variant, const yard_ops_limits *limits);
void bed_close(bed *b);

/* Memory on both sides, filled with a pattern that valid data never has (NaN in every dtype). */
typedef struct twin {
    size_t n_bytes;
    void *host, *device;
} twin;

bool twin_create(const bed *b, twin *m, size_t n_bytes);
void twin_destroy(const bed *b, twin *m);
bool twin_upload(const bed *b, const twin *m);
bool twin_download(const bed *b, const twin *m);

/* [n_rows, n_cols] of any dtype with ld columns a row; FP8 with scales. */
typedef struct rows_twin {
    yard_rows host, device;
    twin data, scale;
    uint32_t n_rows, n_cols;
} rows_twin;

bool rows_create(const bed *b, rows_twin *r, yard_dtype dtype, uint32_t n_rows, uint32_t n_cols,
                 uint32_t ld, bool random);
void rows_destroy(const bed *b, rows_twin *r);
double rows_value(const yard_rows *r, uint32_t n_cols, size_t row, size_t col);

/* Host memory of random weights, n_matrices of [rows, cols], stored at row0 of taller tensors. */
typedef struct weights {
    yard_matrix *m;
    uint32_t n;
    uint8_t *data;
    float *scale;
} weights;

bool weights_create(gpu_test *t, weights *w, yard_dtype dtype, uint32_t n, uint32_t rows,
                    uint32_t cols, uint32_t row0, uint32_t block_rows);
void weights_destroy(weights *w);
double matrix_value(const yard_matrix *w, size_t row, size_t col);

/* One element of a product by the definition, its terms in ascending order of k. */
typedef struct element {
    double value; /* the sum */
    double size;  /* of the absolute terms */
    double units; /* for each group of YARD_GROUP terms the largest term or sum of its first ones */
    double in_group, largest;
    uint32_t n_terms;
} element;

static inline void element_add(element *e, double term)
{
    double most;

    if (e->n_terms++ % YARD_GROUP == 0)
        e->in_group = e->largest = 0;
    e->value += term;
    e->size += fabs(term);
    e->in_group += term;
    most = fabs(term) > fabs(e->in_group) ? fabs(term) : fabs(e->in_group);
    most = most > e->largest ? most : e->largest;
    e->units += most - e->largest;
    e->largest = most;
}

/* What sums on the device are off by, as a root of mean squares. fp8: tensor cores sum FP8
 * products, of which they keep 13 bits below the largest; 128 that are cut off at random come to 7
 * units of 2^-13. */
double element_noise(const element *e, bool fp8);

/* How far got is from want, in units of rounding and six times that noise: right up to 1. */
double off_by(yard_dtype y, double got, const element *want, bool fp8);

/* Numbers of tokens that products are tried with. */
enum { N_TOKEN_COUNTS = 7 };
extern const uint32_t token_counts[N_TOKEN_COUNTS];
/* n_rows, an int32_t, becomes n on both sides. */
bool set_count(const bed *b, const twin *n_rows, uint32_t n);

/* A piece of a product against the definition: errors and sizes squared, and the largest off_by().
 */
typedef struct product_errors {
    double error, size, worst;
} product_errors;

/* Rows y0 .. of y are rows of x (through x_index, may be NULL) times w: all of few elements, a
 * sample of many. Corners always count. */
void compare_rows(gpu_test *t, product_errors *s, const rows_twin *x, const int32_t *x_index,
                  const yard_matrix *w, const rows_twin *y, uint32_t y0, uint32_t n_rows,
                  bool tensor_cores);
/* Whether all that was compared is right, y being of that dtype. */
bool errors_pass(const product_errors *s, yard_dtype y);

/* fn(b, args) once more, from a captured graph. */
bool bed_replay(const bed *b, void (*fn)(const bed *b, const void *args), const void *args);

/* Every row of y below n_rows has only numbers in columns [0, n_cols), every other byte is the
 * pattern still. written (may be NULL): rows that count. */
bool only_written(const rows_twin *y, const uint8_t *written, uint32_t n_rows, uint32_t n_cols);

#endif
