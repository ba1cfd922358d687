/* Conversions of whole rows, in the fastest form this processor has; all forms give the same bits.
 * The definition is convert.c. */
#ifndef YARD_BASE_CONVERT_H
#define YARD_BASE_CONVERT_H

#include "base/base.h"

typedef struct yard_convert {
    const char *name;
    /* dst[i] = value of src[i] (FP8: of the code, without scale) */
    void (*decode)(yard_dtype dtype, const void *src, uint32_t n, float *dst);
    void (*round_bf16)(const float *x, uint32_t n, uint16_t *y);
    /* dst[i] = bf16 of value of codes[i] * scale, which is one that quantise makes */
    void (*widen_fp8)(const uint8_t *codes, uint32_t n, float scale, float *dst);
    /* One row, already rounded to bf16, in groups of YARD_GROUP: scale = amax / 448 (1 when amax is
     * 0; ue8m0: rounded up to a power of two), code = e4m3 of x * (1 / scale). */
    void (*quantise)(const float *x, uint32_t n, bool ue8m0, uint8_t *codes, float *scale);
    /* acc[i] = fma(part[i], f, acc[i]) */
    void (*add_scaled)(const float *part, uint32_t n, float f, float *acc);
    /* y[i] = sum over r ascending of fma(value of rows[r][i], weight[r], sum so far), from 0; rows
     * are F32 or BF16, y is F32 or BF16 (rounded once, at the end). y may be one of the rows if it
     * has their dtype. */
    void (*weighted_sum)(yard_dtype dtype, const void *const *rows, const float *weight,
                         uint32_t n_rows, uint32_t n, yard_dtype y_dtype, void *y);
} yard_convert;

extern const yard_convert yard_convert_c;
#if defined(__x86_64__)
extern const yard_convert yard_convert_avx2;
#endif

/* True when AVX2, FMA and F16C are there. */
bool yard_cpu_has_avx2(void);

/* True when the above and AVX-512 F, BW, DQ, VL, VBMI and BF16 are there. */
bool yard_cpu_has_avx512(void);

/* The best table for this processor. */
const yard_convert *yard_convert_best(void);

#endif
