/* What the tests of attention share: sequences in a paged cache, and attention in double precision.
 */
#ifndef YARD_ATTENTION_GPU_TEST_H
#define YARD_ATTENTION_GPU_TEST_H

#include "products_gpu_test.h"

/* A sequence of `length` cached positions whose last n_rows are rows of the step. */
typedef struct scene_seq {
    uint32_t length, n_rows;
    bool absorbed;
} scene_seq;

/* Pages in random order, shared by sequences except for the last pages, which hold NaN beyond the
 * end of their sequence. */
typedef struct scene {
    const bed *b;
    const scene_seq *seqs;
    uint32_t n_rows, n_seqs, width, page_ld;
    uint32_t kv_rank;    /* of an FP8 cache */
    yard_batch batch;    /* device */
    yard_kv_layer cache; /* device */
    twin n_tokens, position, seq, absorbed, page_table, pages;
} scene;

bool scene_create(const bed *b, scene *s, const scene_seq *seqs, uint32_t n_seqs, uint32_t width,
                  yard_dtype dtype);
/* Its bf16 cache becomes an FP8 one of latents. */
bool scene_make_fp8(scene *s, uint32_t kv_rank, bool ue8m0);
/* Its FP8 cache becomes a bf16 one of the same values. */
bool scene_widen(scene *s);
void scene_destroy(scene *s);
/* The host's copies, changed by the test, to the device. */
bool scene_upload(scene *s);

/* n values of the cache at a position, from column col on. */
void scene_values(const scene *s, uint32_t seq, uint32_t position, uint32_t col, uint32_t n,
                  double *out);

/* softmax(scale * q . key) . value over n keys; rows of n_q and n_v values. */
void attend_reference(const double *q, const double *key, uint32_t n_q, const double *value,
                      uint32_t n_v, uint32_t n, double scale, double *out);
/* What out is off by, as a root of mean squares, where values are off by blur. */
void attend_blur(const double *q, const double *key, uint32_t n_q, const double *blur, uint32_t n_v,
                 uint32_t n, double scale, double *out);

/* Row `row` of y, columns [col, col + n), against want: within 2^-7 of the largest for bf16, 2^-14
 * for f32, and four times blur (may be NULL), what want is off by. error collects the squares, for
 * a relative error over all rows, and the worst distance in units of what is allowed. */
typedef struct scene_error {
    double off, size, worst;
} scene_error;
bool scene_close(const rows_twin *y, uint32_t row, uint32_t col, uint32_t n, const double *want,
                 const double *blur, scene_error *error);

uint32_t scene_below(gpu_test *t, uint32_t n);

#endif
