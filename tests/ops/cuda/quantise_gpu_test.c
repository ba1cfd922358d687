/* FP8 quantisation on the GPU against a plain C loop, byte for byte: values, scales, and that
 * nothing else is written. */
#include "gpu_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ops/cuda/launch.h"

enum { POISON = 0xa5, SPARE_ROWS = 2, SPARE_COLS = 5 };

typedef struct shape {
    uint32_t n_rows, n_cols;
    uint32_t n_buffer_rows; /* some rows more than the kernel may touch */
    uint32_t ld;            /* some columns more, too */
    uint32_t n_groups;
    yard_dtype dtype;
    bool ue8m0;
} shape;

/* One buffer on both sides. */
typedef struct twin {
    size_t n_bytes;
    void *host, *device;
} twin;

static bool twin_create(twin *b, size_t n_bytes)
{
    b->n_bytes = n_bytes;
    b->host = malloc(n_bytes);
    b->device = NULL;
    if (!b->host || !gpu_test_ok(cudaMalloc(&b->device, n_bytes), "cudaMalloc"))
        return false;
    memset(b->host, POISON, n_bytes);
    return gpu_test_ok(cudaMemset(b->device, POISON, n_bytes), "cudaMemset");
}

static void twin_destroy(twin *b)
{
    free(b->host);
    cudaFree(b->device);
}

/* Rows of every kind: ordinary values, wide ranges, zeros, ties, the smallest numbers. */
static float random_value(gpu_test *t, uint32_t row)
{
    const uint64_t bits = gpu_test_random(t);
    const float unit = (float)(int32_t)(bits >> 32) * 0x1p-31f;

    switch (row % 6) {
    case 0:
        return unit;
    case 1:
        return ldexpf(unit, (int)(bits % 40) - 20);
    case 2:
        return bits % 8 ? 0.0f * unit : unit; /* zeros of both signs */
    case 3:
        return (float)(int)(bits % 1793 - 896) * 0.5f; /* ties when the scale is 1 */
    case 4:
        return ldexpf(unit, -120 - (int)(bits % 30)); /* scales without a finite inverse */
    default:
        return 0.0f * unit;
    }
}

static void fill(gpu_test *t, const shape *s, void *x)
{
    for (uint32_t row = 0; row < s->n_rows; row++) {
        for (uint32_t col = 0; col < s->n_cols; col++) {
            const size_t at = (size_t)row * s->ld + col;
            const float value = random_value(t, row);
            if (s->dtype == YARD_BF16)
                ((uint16_t *)x)[at] = yard_bf16_from_f32(value);
            else
                ((float *)x)[at] = value;
        }
    }
}

static float rounded(const shape *s, const void *x, size_t at)
{
    if (s->dtype == YARD_BF16)
        return yard_f32_from_bf16(((const uint16_t *)x)[at]);
    return yard_bf16_round(((const float *)x)[at]);
}

static float scale_of(float amax, bool ue8m0)
{
    const float exact = amax / 448.0f;
    int exponent;

    if (amax == 0.0f)
        return 1.0f;
    if (!ue8m0)
        return exact;
    return frexpf(exact, &exponent) == 0.5f ? exact : ldexpf(1.0f, exponent);
}

static void quantise_reference(const shape *s, const void *x, uint8_t *y, float *scale)
{
    for (uint32_t row = 0; row < s->n_rows; row++) {
        for (uint32_t group = 0; group < s->n_groups; group++) {
            const uint32_t begin = group * YARD_GROUP;
            const uint32_t end = begin + YARD_GROUP < s->n_cols ? begin + YARD_GROUP : s->n_cols;
            float amax = 0.0f;

            for (uint32_t col = begin; col < end; col++)
                amax = fmaxf(amax, fabsf(rounded(s, x, (size_t)row * s->ld + col)));
            const float group_scale = scale_of(amax, s->ue8m0);
            const float inverse = 1.0f / group_scale;
            scale[(size_t)row * s->n_groups + group] = group_scale;
            for (uint32_t col = begin; col < end; col++) {
                const float value = rounded(s, x, (size_t)row * s->ld + col);
                y[(size_t)row * s->ld + col] =
                    yard_e4m3_from_f32(value == 0.0f ? value : value * inverse);
            }
        }
    }
}

/* Runs the kernel on device copies of x; y and scale hold the reference on the host. */
static bool same_on_device(const shape *s, const twin *x, const twin *y, const twin *scale,
                           const twin *n_rows)
{
    const yard_quantise_args args = {
        .n_rows = n_rows->device,
        .n_cols = s->n_cols,
        .x = { .dtype = s->dtype, .ld = s->ld, .data = x->device },
        .ue8m0 = s->ue8m0,
        .y = { .dtype = YARD_FP8_E4M3, .ld = s->ld, .data = y->device, .scale = scale->device },
    };
    yard_error err = { 0 };
    uint8_t *got_y = malloc(y->n_bytes), *got_scale = malloc(scale->n_bytes);
    bool same =
        got_y && got_scale &&
        gpu_test_ok(cudaMemcpy(x->device, x->host, x->n_bytes, cudaMemcpyHostToDevice), "copy") &&
        gpu_test_ok(
            cudaMemcpy(n_rows->device, n_rows->host, n_rows->n_bytes, cudaMemcpyHostToDevice),
            "copy") &&
        yard_cuda_quantise_launch(&args, s->n_rows + SPARE_ROWS, NULL, &err) == YARD_OK &&
        gpu_test_ok(cudaDeviceSynchronize(), "kernel") &&
        gpu_test_ok(cudaMemcpy(got_y, y->device, y->n_bytes, cudaMemcpyDeviceToHost), "copy") &&
        gpu_test_ok(cudaMemcpy(got_scale, scale->device, scale->n_bytes, cudaMemcpyDeviceToHost),
                    "copy") &&
        !memcmp(got_y, y->host, y->n_bytes) && !memcmp(got_scale, scale->host, scale->n_bytes);

    free(got_y);
    free(got_scale);
    return same;
}

static void run_case(gpu_test *t, const shape *s)
{
    const size_t n_values = (size_t)s->n_buffer_rows * s->ld;
    const size_t n_scales = (size_t)s->n_buffer_rows * s->n_groups;
    const uint64_t seed = t->seed;
    twin x = { 0 }, y = { 0 }, scale = { 0 }, n_rows = { 0 };
    bool ok = twin_create(&x, n_values * yard_dtype_bytes(s->dtype)) && twin_create(&y, n_values) &&
              twin_create(&scale, n_scales * sizeof(float)) &&
              twin_create(&n_rows, sizeof(int32_t));

    if (ok) {
        *(int32_t *)n_rows.host = (int32_t)s->n_rows;
        fill(t, s, x.host);
        quantise_reference(s, x.host, y.host, scale.host);
        ok = same_on_device(s, &x, &y, &scale, &n_rows);
    }
    gpu_test_case(t, ok, "quantise: %u rows, %u columns, %s%s, random state 0x%llx", s->n_rows,
                  s->n_cols, yard_dtype_name(s->dtype), s->ue8m0 ? ", ue8m0" : "",
                  (unsigned long long)seed);
    twin_destroy(&x);
    twin_destroy(&y);
    twin_destroy(&scale);
    twin_destroy(&n_rows);
}

static void refuses_bad_arguments(gpu_test *t)
{
    yard_quantise_args args = { .n_cols = 128, .x = { .dtype = YARD_F16, .ld = 128 } };
    yard_error err = { 0 };

    gpu_test_case(t, yard_cuda_quantise_launch(&args, 1, NULL, &err) == YARD_EINVAL,
                  "quantise: f16 rows are refused");
    args.x.dtype = YARD_F32;
    gpu_test_case(t, yard_cuda_quantise_launch(&args, 1, NULL, &err) == YARD_EINVAL,
                  "quantise: an output that is not fp8 is refused");
}

void gpu_test_quantise(gpu_test *t)
{
    static const uint32_t rows[] = { 0, 1, 2, 7, 64, 129, 1000 };
    static const uint32_t cols[] = { 1, 100, 128, 200, 7168 };

    refuses_bad_arguments(t);
    for (uint32_t i = 0; i < sizeof(rows) / sizeof(rows[0]) * 4; i++) {
        for (uint32_t j = 0; j < sizeof(cols) / sizeof(cols[0]); j++) {
            const shape s = {
                .n_rows = rows[i / 4],
                .n_cols = cols[j],
                .n_buffer_rows = rows[i / 4] + SPARE_ROWS,
                .ld = cols[j] + SPARE_COLS,
                .n_groups = yard_group_count(cols[j]),
                .dtype = i % 2 ? YARD_BF16 : YARD_F32,
                .ue8m0 = i % 4 >= 2,
            };
            run_case(t, &s);
        }
    }
}
