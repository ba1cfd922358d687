/* What the tests of operations share: random data from a printed seed, streams of every variant
 * that this machine can run, weights with a double-precision view. */
#ifndef YARD_TESTS_OPS_H
#define YARD_TESTS_OPS_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "ops/ops.h"

enum { MAX_VARIANTS = 4 };

typedef struct rng {
    uint64_t state;
} rng;

static inline uint64_t rng_next(rng *r)
{
    uint64_t z = (r->state += 0x9e3779b97f4a7c15u);

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline float rng_float(rng *r) /* (-1, 1) */
{
    return (float)((double)(int64_t)rng_next(r) / 9223372036854775808.0);
}

static inline uint32_t rng_below(rng *r, uint32_t n)
{
    return (uint32_t)(rng_next(r) % n);
}

static inline yard_ops_limits test_limits(void)
{
    return (yard_ops_limits){ .max_tokens = 256,
                              .max_in = 3072,
                              .max_vocab = 64,
                              .max_experts = 64,
                              .max_heads = 16,
                              .kv_rank = 512,
                              .nope_dims = 192,
                              .rope_dims = 64,
                              .v_dims = 256 };
}

/* Streams of all variants this processor has, the definition first; several threads. */
static inline uint32_t open_variants(yard_stream *streams)
{
    static const char *const names[] = { "c", "avx2", "avx512" };
    uint32_t n = 0;

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        const yard_ops_config config = { .n_threads = 3,
                                         .variant = names[i],
                                         .limits = test_limits() };
        if (yard_ops_cpu.open(&streams[n], &config, NULL) == YARD_OK)
            n++;
        else
            print_message("variant %s: not on this processor\n", names[i]);
    }
    return n;
}

static inline void close_variants(yard_stream *streams, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        yard_ops_cpu.close(streams[i]);
}

/* Random rows of any dtype; FP8 with scales. Free with free_rows. */
static inline yard_rows random_rows(rng *r, yard_dtype dtype, size_t n_rows, uint32_t n_cols)
{
    yard_rows x = { .dtype = dtype, .ld = n_cols };
    const size_t n = n_rows * n_cols;

    x.data = yard_alloc(n * yard_dtype_bytes(dtype) + 64);
    for (size_t i = 0; i < n; i++) {
        const float value = rng_float(r) * 4.0f;
        if (dtype == YARD_FP8_E4M3)
            ((uint8_t *)x.data)[i] = yard_e4m3_from_f32(value * 100.0f);
        else if (dtype == YARD_BF16)
            ((uint16_t *)x.data)[i] = yard_bf16_from_f32(value);
        else
            ((float *)x.data)[i] = value;
    }
    if (dtype == YARD_FP8_E4M3) {
        const size_t n_scales = n_rows * yard_group_count(n_cols);
        x.scale = yard_alloc(n_scales * sizeof(float));
        for (size_t i = 0; i < n_scales; i++)
            x.scale[i] = 0.01f + 0.02f * fabsf(rng_float(r));
    }
    return x;
}

static inline void free_rows(yard_rows x)
{
    free(x.data);
    free(x.scale);
}

static inline double rows_value(yard_rows x, size_t row, size_t col)
{
    const size_t i = row * x.ld + col;

    if (x.dtype == YARD_FP8_E4M3)
        return (double)yard_f32_from_e4m3(((const uint8_t *)x.data)[i]) *
               (double)x.scale[row * yard_group_count(x.ld) + col / YARD_GROUP];
    if (x.dtype == YARD_BF16)
        return (double)yard_f32_from_bf16(((const uint16_t *)x.data)[i]);
    return (double)((const float *)x.data)[i];
}

/* A slice [rows, cols] of a random stored tensor, starting at row0, col0. */
typedef struct random_matrix {
    yard_matrix m;
    void *stored;
    float *scale;
} random_matrix;

static inline random_matrix make_matrix(rng *r, yard_dtype dtype, uint32_t rows, uint32_t cols,
                                        uint32_t row0, uint32_t col0, uint32_t block_rows)
{
    const uint32_t ld = col0 + cols, all_rows = row0 + rows;
    const size_t n = (size_t)ld * all_rows, bytes = yard_dtype_bytes(dtype);
    random_matrix out = { .stored = malloc(n * bytes) }; /* exact: a read beyond shows under ASan */

    for (size_t i = 0; i < n; i++) {
        const float value = rng_float(r);
        switch (dtype) {
        case YARD_FP8_E4M3:
            ((uint8_t *)out.stored)[i] = yard_e4m3_from_f32(value * 448.0f);
            break;
        case YARD_BF16:
            ((uint16_t *)out.stored)[i] = yard_bf16_from_f32(value);
            break;
        case YARD_F16: /* any finite bits of small exponent */
            ((uint16_t *)out.stored)[i] = (uint16_t)(rng_next(r) & 0xbbff);
            break;
        default:
            ((float *)out.stored)[i] = value;
        }
    }
    out.m = (yard_matrix){ .dtype = dtype,
                           .rows = rows,
                           .cols = cols,
                           .ld = ld,
                           .data = (uint8_t *)out.stored + ((size_t)row0 * ld + col0) * bytes,
                           .block_rows = block_rows,
                           .row0 = row0,
                           .col0 = col0 };
    if (dtype == YARD_FP8_E4M3) {
        const uint32_t n_scales = yard_group_count(ld) * yard_ceil_div(all_rows, block_rows);
        out.m.scale_ld = yard_group_count(ld);
        out.m.scale = out.scale = malloc(n_scales * sizeof(float));
        for (uint32_t i = 0; i < n_scales; i++)
            out.scale[i] = 0.001f + 0.003f * fabsf(rng_float(r));
    }
    return out;
}

static inline void free_matrix(random_matrix w)
{
    free(w.stored);
    free(w.scale);
}

static inline double matrix_value(const yard_matrix *w, size_t row, size_t col)
{
    const size_t i = row * w->ld + col;

    switch (w->dtype) {
    case YARD_FP8_E4M3:
        return (double)yard_f32_from_e4m3(((const uint8_t *)w->data)[i]) *
               (double)w->scale[(w->row0 + row) / w->block_rows * w->scale_ld +
                                (w->col0 + col) / YARD_GROUP];
    case YARD_BF16:
        return (double)yard_f32_from_bf16(((const uint16_t *)w->data)[i]);
    case YARD_F16:
        return (double)yard_f32_from_f16(((const uint16_t *)w->data)[i]);
    default:
        return (double)((const float *)w->data)[i];
    }
}

/* Poisons an output, so that what is not written shows. */
static inline void poison(yard_rows y, size_t n_rows)
{
    memset(y.data, 0xff, n_rows * y.ld * yard_dtype_bytes(y.dtype));
}

/* |got - want| within an f32 dot product's error over terms of size `size`, and bf16's rounding. */
static inline void assert_close(const char *what, uint64_t seed, yard_dtype dtype, double got,
                                double want, double size)
{
    const double tolerance =
        size * 2e-6 + (dtype == YARD_BF16 ? fabs(want) * 0x1p-8 : fabs(want) * 1e-6) + 1e-30;

    if (!(fabs(got - want) <= tolerance))
        fail_msg("%s: seed %llu: want %.9g, got %.9g (tolerance %.3g)", what,
                 (unsigned long long)seed, want, got, tolerance);
}

#endif
