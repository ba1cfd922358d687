/* mla_prefill on the GPU against double precision: prompts, chunks against a cache, several prompts
 * in a step with generated rows between them; FP8 weights with rounded latents, and bf16. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention_gpu_test.h"

enum { SPARE_ROWS = 2, SAMPLE_ROWS = 8 };

typedef struct prefill_shape {
    const char *name;
    uint32_t n_heads, nope, rope, v, rank;
    yard_dtype w, x; /* x: of queries, cache and results */
    bool fp8_cache;
} prefill_shape;

static const prefill_shape shapes[] = {
    { "demo", 4, 64, 32, 64, 128, YARD_FP8_E4M3, YARD_BF16, false },
    { "v2-lite, 3 heads", 3, 128, 64, 128, 512, YARD_BF16, YARD_BF16, false },
    { "v3, 2 heads", 2, 128, 64, 128, 512, YARD_FP8_E4M3, YARD_BF16, false },
    { "v3, 2 heads, FP8 cache", 2, 128, 64, 128, 512, YARD_FP8_E4M3, YARD_BF16, true },
    { "v2-lite, 3 heads, FP8 cache", 3, 128, 64, 128, 512, YARD_BF16, YARD_BF16, true },
    { "demo, FP8 cache", 4, 64, 32, 64, 128, YARD_FP8_E4M3, YARD_BF16, true },
    { "odd, FP8 cache", 5, 20, 12, 28, 72, YARD_BF16, YARD_BF16, true },
    { "odd", 5, 20, 12, 28, 72, YARD_BF16, YARD_BF16, false },
    { "f32", 2, 128, 64, 128, 512, YARD_F32, YARD_F32, false },
    { "v2-lite", 16, 128, 64, 128, 512, YARD_BF16, YARD_BF16, false },
    { "v3, tp 3", 43, 128, 64, 128, 512, YARD_FP8_E4M3, YARD_BF16, false },
    { "k2", 64, 128, 64, 128, 512, YARD_FP8_E4M3, YARD_BF16, false },
    { "v3", 128, 128, 64, 128, 512, YARD_FP8_E4M3, YARD_BF16, false },
};
enum { N_SHAPES = sizeof(shapes) / sizeof(shapes[0]), N_QUICK = 8 };

typedef struct prefill_scene {
    const char *name;
    scene_seq seqs[6];
    uint32_t n_seqs;
    bool large; /* for tensor cores only */
} prefill_scene;

static const prefill_scene scenes[] = {
    { "none", { { 5, 2, true } }, 1, false },
    { "1 token", { { 1, 1, false } }, 1, false },
    { "2 of 130", { { 130, 2, false } }, 1, false },
    { "7", { { 7, 7, false } }, 1, false },
    { "64 and others",
      { { 64, 64, false }, { 9, 1, true }, { 65, 65, false }, { 40, 3, false } },
      4,
      false },
    { "129 of 300", { { 20, 2, true }, { 300, 129, false } }, 2, false },
    { "1000", { { 1000, 1000, false } }, 1, true },
    { "700 of 9000", { { 9000, 700, false }, { 200, 130, false } }, 2, true },
};
enum { N_SCENES = sizeof(scenes) / sizeof(scenes[0]) };

typedef struct prefill_case {
    const prefill_shape *shape;
    scene s;
    weights kv_b;
    rows_twin q, y;
    bool ue8m0;
    float scale;
} prefill_case;

/* A latent as the product reads it. */
static void read_latent(const prefill_case *c, uint32_t seq, uint32_t p, double *out)
{
    const uint32_t rank = c->shape->rank;

    scene_values(&c->s, seq, p, 0, rank, out);
    if (c->shape->w != YARD_FP8_E4M3)
        return;
    for (uint32_t k = 0; k < rank; k += YARD_GROUP) {
        const uint32_t end = k + YARD_GROUP < rank ? k + YARD_GROUP : rank;
        float amax = 0, scale;
        int exponent;
        for (uint32_t i = k; i < end; i++)
            amax = fmaxf(amax, fabsf((float)out[i]));
        scale = amax == 0 ? 1.0f : amax / 448.0f;
        if (c->ue8m0 && frexp((double)scale, &exponent) != 0.5)
            scale = (float)ldexp(1.0, exponent);
        for (uint32_t i = k; i < end; i++)
            out[i] =
                (double)yard_f32_from_e4m3(yard_e4m3_from_f32((float)out[i] * (1.0f / scale))) *
                (double)scale;
    }
}

static double as_kept(const prefill_shape *h, double x)
{
    return h->x == YARD_BF16 ? (double)yard_bf16_round((float)x) : x;
}

/* Keys and values of one head of one sequence, n positions. blur: what values may be off by, of
 * which a sum close to where bf16 rounds the other way is most. */
static void expand(const prefill_case *c, uint32_t seq, uint32_t n, uint32_t head, double *key,
                   double *value, double *blur)
{
    const prefill_shape *h = c->shape;
    const uint32_t head_dim = h->nope + h->rope, n_out = h->nope + h->v;
    double *w = malloc((size_t)n_out * h->rank * sizeof(*w)), latent[1024];

    for (uint32_t o = 0; o < n_out; o++)
        for (uint32_t k = 0; k < h->rank; k++)
            w[o * h->rank + k] = matrix_value(&c->kv_b.m[0], (size_t)head * n_out + o, k);
    for (uint32_t p = 0; p < n; p++) {
        read_latent(c, seq, p, latent);
        for (uint32_t o = 0; o < n_out; o++) {
            element sum = { 0 };
            for (uint32_t k = 0; k < h->rank; k++)
                element_add(&sum, latent[k] * w[o * h->rank + k]);
            if (o < h->nope) {
                key[(size_t)p * head_dim + o] = as_kept(h, sum.value);
            } else {
                const double noise = element_noise(&sum, h->w == YARD_FP8_E4M3);
                const size_t at = (size_t)p * h->v + o - h->nope;
                value[at] = as_kept(h, sum.value);
                blur[at] = (as_kept(h, sum.value + noise) - as_kept(h, sum.value - noise)) / 2;
            }
        }
        scene_values(&c->s, seq, p, h->rank, h->rope, key + (size_t)p * head_dim + h->nope);
    }
    free(w);
}

/* Some rows of a sequence, of one head. */
static bool seq_agrees(const prefill_case *c, uint32_t seq, uint32_t first_row, uint32_t head,
                       scene_error *error)
{
    const prefill_shape *h = c->shape;
    const scene_seq *q = &c->s.seqs[seq];
    const uint32_t head_dim = h->nope + h->rope;
    double *key = malloc((size_t)q->length * head_dim * sizeof(*key));
    double *value = malloc((size_t)q->length * h->v * sizeof(*value)), query[512], want[512];
    double *blur = malloc((size_t)q->length * h->v * sizeof(*blur)), off[512];
    bool ok = true;

    expand(c, seq, q->length, head, key, value, blur);
    for (uint32_t i = 0; i < SAMPLE_ROWS; i++) {
        const uint32_t at = i == 0 ? q->n_rows - 1 : scene_below(c->s.b->t, q->n_rows);
        for (uint32_t k = 0; k < head_dim; k++)
            query[k] = rows_value(&c->q.host, 0, first_row + at, (size_t)head * head_dim + k);
        const uint32_t n = q->length - q->n_rows + at + 1;
        attend_reference(query, key, head_dim, value, h->v, n, (double)c->scale, want);
        attend_blur(query, key, head_dim, blur, h->v, n, (double)c->scale, off);
        ok = scene_close(&c->y, first_row + at, head * h->v, h->v, want, off, error) && ok;
    }
    free(key);
    free(value);
    free(blur);
    return ok;
}

static bool all_agree(const prefill_case *c, scene_error *error)
{
    uint32_t row = 0;
    bool ok = true;

    for (uint32_t i = 0; i < c->s.n_seqs; row += c->s.seqs[i++].n_rows)
        if (!c->s.seqs[i].absorbed)
            ok = seq_agrees(c, i, row, scene_below(c->s.b->t, c->shape->n_heads), error) && ok;
    return ok;
}

static bool run_case(const bed *b, prefill_case *c, const yard_matrix *kv_b)
{
    const prefill_shape *h = c->shape;

    memset(c->y.data.host, 0xff, c->y.data.n_bytes);
    if (!twin_upload(b, &c->y.data))
        return false;
    b->ops->mla_prefill(b->s, &(yard_mla_prefill_args){ .batch = &c->s.batch,
                                                        .n_heads = h->n_heads,
                                                        .kv_rank = h->rank,
                                                        .nope_dims = h->nope,
                                                        .rope_dims = h->rope,
                                                        .v_dims = h->v,
                                                        .softmax_scale = c->scale,
                                                        .q = c->q.device,
                                                        .kv_b = *kv_b,
                                                        .quantise = h->w == YARD_FP8_E4M3,
                                                        .ue8m0 = c->ue8m0,
                                                        .cache = c->s.cache,
                                                        .y = c->y.device });
    return twin_download(b, &c->y.data);
}

static void one_case(const bed *b, prefill_case *c, const prefill_scene *what,
                     const yard_matrix *kv_b)
{
    const prefill_shape *h = c->shape;
    const uint32_t q_cols = h->n_heads * (h->nope + h->rope), y_cols = h->n_heads * h->v;
    scene_error error = { 0 };
    uint8_t *first, *prompt;
    bool agree;
    bool ok = scene_create(b, &c->s, what->seqs, what->n_seqs, h->rank + h->rope, h->x) &&
              (!h->fp8_cache || scene_make_fp8(&c->s, h->rank, what->n_seqs % 2 == 0)) &&
              rows_create(b, &c->q, h->x, c->s.n_rows + SPARE_ROWS, q_cols, q_cols, true) &&
              rows_create(b, &c->y, h->x, c->s.n_rows + SPARE_ROWS, y_cols, y_cols, false);

    c->ue8m0 = what->n_seqs % 2 == 0;
    c->scale = 1.0f / sqrtf((float)(h->nope + h->rope));
    ok = ok && run_case(b, c, kv_b);
    agree = ok && all_agree(c, &error);
    gpu_test_case(b->t, agree, "mla_prefill %s, %s: %.2e, worst %.2f", h->name, what->name,
                  sqrt(error.off / (error.size + 1e-300)), error.worst);
    prompt = malloc(c->s.n_rows);
    for (uint32_t i = 0; i < c->s.n_rows; i++)
        prompt[i] = !((uint8_t *)c->s.absorbed.host)[i];
    gpu_test_case(b->t, ok && only_written(&c->y, prompt, c->s.n_rows, y_cols),
                  "mla_prefill %s, %s: what is written", h->name, what->name);
    first = malloc(c->y.data.n_bytes);
    memcpy(first, c->y.data.host, c->y.data.n_bytes);
    ok = ok && run_case(b, c, kv_b);
    gpu_test_case(b->t, ok && !memcmp(first, c->y.data.host, c->y.data.n_bytes),
                  "mla_prefill %s, %s: the same bits again", h->name, what->name);
    free(first);
    free(prompt);
    rows_destroy(b, &c->q);
    rows_destroy(b, &c->y);
    scene_destroy(&c->s);
}

void gpu_test_mla_prefill(gpu_test *t)
{
    const yard_ops_limits limits = { .max_tokens = 1024,
                                     .max_heads = 128,
                                     .kv_rank = 512,
                                     .nope_dims = 128,
                                     .rope_dims = 64,
                                     .v_dims = 128 };
    bed b;

    if (!bed_open_for(&b, t, NULL, &limits))
        return;
    for (int i = 0; i < (t->quick ? N_QUICK : N_SHAPES); i++) {
        const prefill_shape *h = &shapes[i];
        struct yard_prepared *prepared = NULL;
        yard_matrix device;
        prefill_case c = { .shape = h };
        const bool ok =
            weights_create(t, &c.kv_b, h->w, 1, h->n_heads * (h->nope + h->v), h->rank, 0, 128) &&
            b.ops->prepare(&prepared, &device, b.s,
                           &(yard_prepare_args){ .parts = c.kv_b.m, .n_matrices = 1, .n_parts = 1 },
                           NULL) == YARD_OK;
        gpu_test_case(t, ok, "mla_prefill %s: weights", h->name);
        for (int j = 0; ok && j < N_SCENES; j++)
            if (!scenes[j].large || (!t->quick && h->rank == 512 && h->x == YARD_BF16))
                one_case(&b, &c, &scenes[j], &device);
        b.ops->release_prepared(b.s, prepared);
        weights_destroy(&c.kv_b);
    }
    bed_close(&b);
}
