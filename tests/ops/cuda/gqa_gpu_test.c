/* Grouped-query attention on the GPU against double precision: prompts and generated rows, with and
 * without a window. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention_gpu_test.h"

enum { SPARE_ROWS = 2, SAMPLES = 6, MAX_SEQS = 1024 };

typedef struct gqa_shape {
    const char *name;
    uint32_t n_heads, n_kv_heads, head_dim;
    yard_dtype dtype;
} gqa_shape;

static const gqa_shape shapes[] = {
    { "mixtral, tp 4", 8, 2, 128, YARD_BF16 },
    { "small", 4, 2, 64, YARD_BF16 },
    { "odd", 6, 3, 20, YARD_BF16 },
    { "f32", 4, 1, 128, YARD_F32 },
    { "mixtral", 32, 8, 128, YARD_BF16 },
};
enum { N_SHAPES = sizeof(shapes) / sizeof(shapes[0]), N_QUICK = 3 };

typedef struct gqa_case {
    const gqa_shape *shape;
    uint32_t window;
    scene s;
    rows_twin q, y;
    float scale;
} gqa_case;

static bool agrees(const gqa_case *c, uint32_t row, uint32_t head, scene_error *error)
{
    const gqa_shape *h = c->shape;
    const uint32_t dims = h->head_dim, kv_head = head / (h->n_heads / h->n_kv_heads);
    const uint32_t end = (uint32_t)((int32_t *)c->s.position.host)[row] + 1;
    const uint32_t first = c->window && end > c->window ? end - c->window : 0, n = end - first;
    const uint32_t seq = (uint32_t)((int32_t *)c->s.seq.host)[row];
    double *key = malloc((size_t)n * dims * sizeof(*key)), q[256], want[256];
    double *value = malloc((size_t)n * dims * sizeof(*value));
    bool ok;

    for (uint32_t p = 0; p < n; p++) {
        scene_values(&c->s, seq, first + p, kv_head * dims, dims, key + (size_t)p * dims);
        scene_values(&c->s, seq, first + p, (h->n_kv_heads + kv_head) * dims, dims,
                     value + (size_t)p * dims);
    }
    for (uint32_t k = 0; k < dims; k++)
        q[k] = rows_value(&c->q.host, 0, row, (size_t)head * dims + k);
    attend_reference(q, key, dims, value, dims, n, (double)c->scale, want);
    ok = scene_close(&c->y, row, head * dims, dims, want, NULL, error);
    free(key);
    free(value);
    return ok;
}

static void one_case(const bed *b, const gqa_shape *h, const scene_seq *seqs, uint32_t n_seqs,
                     uint32_t window, const char *what, uint32_t n)
{
    const uint32_t cols = h->n_heads * h->head_dim;
    gqa_case c = { .shape = h, .window = window, .scale = 3.0f / sqrtf((float)h->head_dim) };
    scene_error error = { 0 };
    uint8_t *first;
    bool ok = scene_create(b, &c.s, seqs, n_seqs, 2 * h->n_kv_heads * h->head_dim, h->dtype) &&
              rows_create(b, &c.q, h->dtype, c.s.n_rows + SPARE_ROWS, cols, cols, true) &&
              rows_create(b, &c.y, h->dtype, c.s.n_rows + SPARE_ROWS, cols, cols, false);
    const yard_gqa_attend_args a = { .batch = &c.s.batch,
                                     .n_heads = h->n_heads,
                                     .n_kv_heads = h->n_kv_heads,
                                     .head_dim = h->head_dim,
                                     .window = window,
                                     .softmax_scale = c.scale,
                                     .q = c.q.device,
                                     .cache = c.s.cache,
                                     .y = c.y.device };

    if (ok)
        b->ops->gqa_attend(b->s, &a);
    ok = ok && twin_download(b, &c.y.data);
    for (uint32_t i = 0; i < SAMPLES && ok && c.s.n_rows; i++)
        ok = agrees(&c, i == 0 ? c.s.n_rows - 1 : scene_below(b->t, c.s.n_rows),
                    i == 0 ? h->n_heads - 1 : scene_below(b->t, h->n_heads), &error);
    gpu_test_case(b->t, ok, "gqa_attend %s, %s, %s, %u rows, window %u: %.2e, worst %.2f",
                  b->variant, h->name, what, n, window, sqrt(error.off / (error.size + 1e-300)),
                  error.worst);
    gpu_test_case(b->t, ok && only_written(&c.y, NULL, c.s.n_rows, cols),
                  "gqa_attend %s, %s, %u rows: what is written", h->name, what, n);
    first = malloc(c.y.data.n_bytes);
    memcpy(first, c.y.data.host, c.y.data.n_bytes);
    if (ok)
        b->ops->gqa_attend(b->s, &a);
    ok = ok && twin_download(b, &c.y.data);
    gpu_test_case(b->t, ok && !memcmp(first, c.y.data.host, c.y.data.n_bytes),
                  "gqa_attend %s, %s, %u rows: the same bits again", h->name, what, n);
    free(first);
    rows_destroy(b, &c.q);
    rows_destroy(b, &c.y);
    scene_destroy(&c.s);
}

static void attend_cases(const bed *b, const gqa_shape *h)
{
    static const uint32_t counts[] = { 0, 1, 2, 7, 64, 129, 1000 };
    static const scene_seq prompts[] = {
        { 1, 1, false }, { 130, 70, false }, { 300, 2, true }, { 129, 129, false }
    };
    static const scene_seq distant[] = { { 100000, 1, true }, { 5000, 3, false } };
    scene_seq *seqs = malloc(MAX_SEQS * sizeof(*seqs));

    for (int i = 0; i < (b->t->quick ? 4 : 7); i++) {
        for (uint32_t k = 0; k < counts[i]; k++)
            seqs[k] = (scene_seq){ 1 + scene_below(b->t, b->t->quick ? 200 : 3000), 1, true };
        one_case(b, h, seqs, counts[i], i % 2 ? 100 : 0, "generated", counts[i]);
        seqs[0] = (scene_seq){ counts[i] + scene_below(b->t, 500), counts[i], false };
        one_case(b, h, seqs, counts[i] > 0, i % 2 ? 0 : 100, "prompt", counts[i]);
    }
    one_case(b, h, prompts, 4, 0, "several", 202);
    one_case(b, h, prompts, 4, 33, "several", 202);
    if (!b->t->quick)
        one_case(b, h, distant, 2, 0, "100,000 positions", 4);
    free(seqs);
}

void gpu_test_gqa(gpu_test *t)
{
    static const char *const variants[] = { "fast", "deterministic" };
    const yard_ops_limits limits = {
        .max_tokens = 1024, .max_heads = 32, .rope_dims = 128, .v_dims = 128
    };
    bed b;

    for (int v = 0; v < 2; v++) {
        if (!bed_open_for(&b, t, variants[v], &limits))
            return;
        for (int i = 0; i < (t->quick ? N_QUICK : N_SHAPES); i++)
            attend_cases(&b, &shapes[i]);
        bed_close(&b);
    }
}
