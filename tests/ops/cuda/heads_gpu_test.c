/* head_linear on the GPU (k_b and v_b of latent attention) against the double-precision definition,
 * with activations rounded to FP8 as the definition rounds them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "products_gpu_test.h"

enum { SPARE_ROWS = 2, SAMPLE_HEADS = 3, SAMPLE_ROWS = 6, SAMPLE_OUTS = 20, MAX_K = 1024 };

typedef struct heads_shape {
    const char *name;
    uint32_t n_heads, nope, rope, v, rank;
    yard_dtype w;
    uint32_t block_rows;
} heads_shape;

static const heads_shape shapes[] = {
    { "demo", 4, 64, 32, 64, 128, YARD_FP8_E4M3, 128 },
    { "v2-lite", 16, 128, 64, 128, 512, YARD_FP8_E4M3, 128 },
    { "straddling", 3, 192, 64, 256, 512, YARD_FP8_E4M3, 128 },
    { "odd", 3, 40, 8, 24, 72, YARD_FP8_E4M3, 128 },
    { "demo in bf16", 4, 64, 32, 64, 128, YARD_BF16, 128 },
    { "v2-lite in bf16", 16, 128, 64, 128, 512, YARD_BF16, 128 },
    { "straddling in bf16", 3, 192, 64, 80, 320, YARD_BF16, 128 },
    { "odd bf16", 3, 40, 8, 24, 72, YARD_BF16, 128 },
    { "k2", 64, 128, 64, 128, 512, YARD_FP8_E4M3, 128 },
    { "v3", 128, 128, 64, 128, 512, YARD_FP8_E4M3, 128 },
    { "v2 in bf16", 128, 128, 64, 128, 512, YARD_BF16, 128 },
};
enum {
    N_SHAPES = sizeof(shapes) / sizeof(shapes[0]),
    N_QUICK = 8,
    FEW_HEADS = 16,
    MANY_HEADS_ROWS = 300
};

static double pow2_above(double x)
{
    int exponent;

    return frexp(x, &exponent) == 0.5 ? x : ldexp(1.0, exponent);
}

/* What the product reads of one head's row. */
static void head_input(const yard_head_linear_args *a, const rows_twin *x, uint32_t row, uint32_t h,
                       uint32_t n_in, double *out)
{
    for (uint32_t k = 0; k < n_in; k += YARD_GROUP) {
        const uint32_t end = k + YARD_GROUP < n_in ? k + YARD_GROUP : n_in;
        float amax = 0, scale;

        for (uint32_t i = k; i < end; i++) {
            out[i] = rows_value(&x->host, 0, row, (size_t)h * a->x_head_stride + i);
            if (a->quantise)
                out[i] = (double)yard_bf16_round((float)out[i]);
            amax = fmaxf(amax, fabsf((float)out[i]));
        }
        if (!a->quantise)
            continue;
        scale = amax == 0 ? 1.0f : amax / 448.0f;
        if (a->ue8m0)
            scale = (float)pow2_above((double)scale);
        for (uint32_t i = k; i < end; i++)
            out[i] =
                (double)yard_f32_from_e4m3(yard_e4m3_from_f32((float)out[i] * (1.0f / scale))) *
                (double)scale;
    }
}

static uint32_t below(gpu_test *t, uint32_t n)
{
    return (uint32_t)(gpu_test_random(t) % n);
}

static bool agrees(gpu_test *t, const yard_head_linear_args *a, const yard_matrix *w,
                   const rows_twin *x, const rows_twin *y, const uint8_t *mask, uint32_t n_rows)
{
    const uint32_t n_in = a->transposed ? a->head_rows : w->cols;
    const uint32_t n_out = a->transposed ? w->cols : a->head_rows;
    double in[MAX_K];

    for (uint32_t i = 0; i < SAMPLE_ROWS * SAMPLE_HEADS && n_rows; i++) {
        const uint32_t row = i == 0 ? n_rows - 1 : below(t, n_rows);
        const uint32_t h = i == 0 ? a->n_heads - 1 : below(t, a->n_heads);
        const size_t first = (size_t)h * a->head_stride + a->head_offset;

        if (!mask[row])
            continue;
        head_input(a, x, row, h, n_in, in);
        for (uint32_t j = 0; j < SAMPLE_OUTS; j++) {
            const uint32_t o = j == 0 ? n_out - 1 : below(t, n_out);
            element want = { 0 };
            for (uint32_t k = 0; k < n_in; k++)
                element_add(&want, in[k] * (a->transposed ? matrix_value(w, first + k, o)
                                                          : matrix_value(w, first + o, k)));
            if (off_by(y->host.dtype,
                       rows_value(&y->host, 0, row, (size_t)h * a->y_head_stride + o), &want,
                       a->quantise) > 1)
                return false;
        }
    }
    return true;
}

static void call(const bed *b, const void *args)
{
    b->ops->head_linear(b->s, args);
}

/* Heads lie at once after another in y, so that every column of a written row is written. */
static void one_count(const bed *b, const heads_shape *s, const weights *w,
                      const yard_matrix *device, bool transposed, uint32_t n, yard_dtype x_dtype,
                      yard_dtype y_dtype)
{
    const uint32_t in = transposed ? s->nope + s->rope : s->rank;
    const uint32_t out = transposed ? s->rank : s->v;
    rows_twin x, y, again;
    twin n_rows, mask;
    bool ok =
        rows_create(b, &x, x_dtype, n + SPARE_ROWS, s->n_heads * in, s->n_heads * in, true) &&
        rows_create(b, &y, y_dtype, n + SPARE_ROWS, s->n_heads * out, s->n_heads * out, false) &&
        rows_create(b, &again, y_dtype, n + SPARE_ROWS, s->n_heads * out, s->n_heads * out,
                    false) &&
        twin_create(b, &n_rows, sizeof(int32_t)) && twin_create(b, &mask, n + SPARE_ROWS);
    yard_head_linear_args a = { .n_rows = n_rows.device,
                                .max_rows = n + SPARE_ROWS,
                                .row_mask = mask.device,
                                .n_heads = s->n_heads,
                                .head_rows = transposed ? s->nope : s->v,
                                .head_stride = s->nope + s->v,
                                .head_offset = transposed ? 0 : s->nope,
                                .transposed = transposed,
                                .quantise = s->w == YARD_FP8_E4M3,
                                .ue8m0 = n % 2 == 1,
                                .w = *device,
                                .x = x.device,
                                .x_head_stride = in,
                                .y = y.device,
                                .y_head_stride = out };

    if (ok) {
        *(int32_t *)n_rows.host = (int32_t)n;
        for (uint32_t i = 0; i < n; i++)
            ((uint8_t *)mask.host)[i] = below(b->t, 4) > 0;
        ok = twin_upload(b, &n_rows) && twin_upload(b, &mask);
        call(b, &a);
        a.y = again.device;
        ok = bed_replay(b, call, &a) && ok;
        ok = ok && twin_download(b, &y.data) && twin_download(b, &again.data);
    }
    gpu_test_case(b->t, ok && agrees(b->t, &a, &w->m[0], &x, &y, mask.host, n),
                  "heads %s, %s, %s, %u rows", s->name, transposed ? "k_b" : "v_b",
                  yard_dtype_name(y_dtype), n);
    gpu_test_case(b->t, ok && only_written(&y, mask.host, n, s->n_heads * out),
                  "heads %s, %s, %u rows: what is written", s->name, transposed ? "k_b" : "v_b", n);
    gpu_test_case(b->t, ok && !memcmp(y.data.host, again.data.host, y.data.n_bytes),
                  "heads %s, %s, %u rows: the same bits again", s->name, transposed ? "k_b" : "v_b",
                  n);
    rows_destroy(b, &x);
    rows_destroy(b, &y);
    rows_destroy(b, &again);
    twin_destroy(b, &n_rows);
    twin_destroy(b, &mask);
}

void gpu_test_heads(gpu_test *t)
{
    bed b;

    if (!bed_open(&b, t, NULL))
        return;
    for (int i = 0; i < (t->quick ? N_QUICK : N_SHAPES); i++) {
        const heads_shape *s = &shapes[i];
        const yard_head_linear_args absorb = { .n_heads = s->n_heads,
                                               .head_rows = s->nope,
                                               .head_stride = s->nope + s->v,
                                               .transposed = true };
        struct yard_prepared *prepared = NULL;
        yard_matrix device;
        weights w;
        const bool ok =
            weights_create(t, &w, s->w, 1, s->n_heads * (s->nope + s->v), s->rank, 0,
                           s->block_rows) &&
            b.ops->prepare(&prepared, &device, b.s,
                           &(yard_prepare_args){
                               .parts = w.m, .n_matrices = 1, .n_parts = 1, .absorb = &absorb },
                           NULL) == YARD_OK;
        gpu_test_case(t, ok, "heads %s: weights", s->name);
        for (int j = 0; ok && j < N_TOKEN_COUNTS; j++) {
            const uint32_t n = s->n_heads > FEW_HEADS && token_counts[j] > MANY_HEADS_ROWS
                                   ? MANY_HEADS_ROWS
                                   : token_counts[j];
            one_count(&b, s, &w, &device, true, n, YARD_BF16, j == 2 ? YARD_F32 : YARD_BF16);
            one_count(&b, s, &w, &device, false, n, j == 3 ? YARD_F32 : YARD_BF16,
                      j == 3 || j == 4 ? YARD_F32 : YARD_BF16);
        }
        weights_destroy(&w);
        b.ops->release_prepared(b.s, prepared);
    }
    bed_close(&b);
}
