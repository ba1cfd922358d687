/* mla_decode on the GPU against double precision: sequences of 1 to 100,000 positions, chains of
 * draft tokens, prompt rows in between; the deterministic table's rows alone and among others. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attention_gpu_test.h"
#include "ops/cuda/cuda.h"

enum { SPARE_ROWS = 2, SAMPLES = 4, MAX_SEQS = 1024 };

typedef struct decode_shape {
    const char *name;
    uint32_t n_heads, nope, rope, rank;
    yard_dtype dtype;
    bool fp8_cache;
} decode_shape;

static const decode_shape shapes[] = {
    { "v2-lite, FP8 cache", 16, 128, 64, 512, YARD_BF16, true },
    { "demo, FP8 cache", 4, 64, 32, 128, YARD_BF16, true },
    { "v2-lite", 16, 128, 64, 512, YARD_BF16, false },
    { "demo", 4, 64, 32, 128, YARD_BF16, false },
    { "f32", 3, 64, 64, 512, YARD_F32, false },
    { "odd", 5, 20, 12, 72, YARD_BF16, false },
    { "v3, tp 3", 43, 128, 64, 512, YARD_BF16, false },
    { "k2", 64, 128, 64, 512, YARD_BF16, false },
    { "v3", 128, 128, 64, 512, YARD_BF16, false },
    { "odd, FP8 cache", 5, 20, 12, 72, YARD_BF16, true },
    { "v3, tp 3, FP8 cache", 43, 128, 64, 512, YARD_BF16, true },
    { "v3, FP8 cache", 128, 128, 64, 512, YARD_BF16, true },
};
enum { N_SHAPES = sizeof(shapes) / sizeof(shapes[0]), N_QUICK = 6 };

typedef struct decode_case {
    const decode_shape *shape;
    scene s;
    rows_twin q_latent, q, y;
    float scale;
} decode_case;

static yard_mla_decode_args args_of(const decode_case *c)
{
    const decode_shape *h = c->shape;

    return (yard_mla_decode_args){ .batch = &c->s.batch,
                                   .n_heads = h->n_heads,
                                   .kv_rank = h->rank,
                                   .rope_dims = h->rope,
                                   .softmax_scale = c->scale,
                                   .q_latent = c->q_latent.device,
                                   .q = c->q.device,
                                   .head_dim = h->nope + h->rope,
                                   .cache = c->s.cache,
                                   .y = c->y.device };
}

static bool case_create(const bed *b, decode_case *c, const decode_shape *h, const scene_seq *seqs,
                        uint32_t n_seqs)
{
    const uint32_t head_dim = h->nope + h->rope;

    *c = (decode_case){ .shape = h, .scale = 4.0f / sqrtf((float)(h->rank + h->rope)) };
    if (!scene_create(b, &c->s, seqs, n_seqs, h->rank + h->rope, h->dtype))
        return false;
    if (h->fp8_cache && !scene_make_fp8(&c->s, h->rank, false))
        return false;
    return rows_create(b, &c->q_latent, h->dtype, c->s.n_rows + SPARE_ROWS, h->n_heads * h->rank,
                       h->n_heads * h->rank, true) &&
           rows_create(b, &c->q, h->dtype, c->s.n_rows + SPARE_ROWS, h->n_heads * head_dim,
                       h->n_heads * head_dim, true) &&
           rows_create(b, &c->y, h->dtype, c->s.n_rows + SPARE_ROWS, h->n_heads * h->rank,
                       h->n_heads * h->rank, false);
}

static void case_destroy(const bed *b, decode_case *c)
{
    rows_destroy(b, &c->q_latent);
    rows_destroy(b, &c->q);
    rows_destroy(b, &c->y);
    scene_destroy(&c->s);
}

static bool run_case(const bed *b, decode_case *c)
{
    const yard_mla_decode_args a = args_of(c);

    memset(c->y.data.host, 0xff, c->y.data.n_bytes);
    if (!twin_upload(b, &c->y.data))
        return false;
    b->ops->mla_decode(b->s, &a);
    return twin_download(b, &c->y.data);
}

/* One head of one row. */
static bool agrees(const decode_case *c, uint32_t row, uint32_t head, scene_error *error)
{
    const decode_shape *h = c->shape;
    const uint32_t width = h->rank + h->rope;
    const uint32_t n = (uint32_t)((int32_t *)c->s.position.host)[row] + 1;
    const uint32_t seq = (uint32_t)((int32_t *)c->s.seq.host)[row];
    double *key = malloc((size_t)n * width * sizeof(*key)), *want = malloc(h->rank * sizeof(*want));
    double *value = malloc((size_t)n * h->rank * sizeof(*value)), q[1024];
    bool ok;

    for (uint32_t p = 0; p < n; p++) {
        scene_values(&c->s, seq, p, 0, width, key + (size_t)p * width);
        memcpy(value + (size_t)p * h->rank, key + (size_t)p * width, h->rank * sizeof(*value));
    }
    for (uint32_t k = 0; k < width; k++)
        q[k] = k < h->rank
                   ? rows_value(&c->q_latent.host, 0, row, (size_t)head * h->rank + k)
                   : rows_value(&c->q.host, 0, row,
                                (size_t)(head + 1) * (h->nope + h->rope) - h->rope + k - h->rank);
    attend_reference(q, key, width, value, h->rank, n, (double)c->scale, want);
    ok = scene_close(&c->y, row, head * h->rank, h->rank, want, NULL, error);
    free(key);
    free(value);
    free(want);
    return ok;
}

static bool samples_agree(const bed *b, const decode_case *c, scene_error *error)
{
    bool ok = true;

    for (uint32_t i = 0; i < SAMPLES && c->s.n_rows; i++) {
        const uint32_t row = i == 0 ? c->s.n_rows - 1 : scene_below(b->t, c->s.n_rows);
        if (((uint8_t *)c->s.absorbed.host)[row])
            ok = agrees(c, row,
                        i == 0 ? c->shape->n_heads - 1 : scene_below(b->t, c->shape->n_heads),
                        error) &&
                 ok;
    }
    return ok;
}

/* Sequences with n rows in all: chains of 1 to most_rows, a prompt here and there. */
static uint32_t make_seqs(gpu_test *t, scene_seq *seqs, uint32_t n, uint32_t most_rows,
                          uint32_t most_length)
{
    uint32_t n_seqs = 0;

    while (n > 0) {
        const bool prompt = most_rows > 1 && scene_below(t, 5) == 0;
        uint32_t rows = 1 + scene_below(t, prompt ? 20 : most_rows);
        rows = rows < n ? rows : n;
        seqs[n_seqs++] = (scene_seq){ .length = rows + scene_below(t, most_length),
                                      .n_rows = rows,
                                      .absorbed = !prompt };
        n -= rows;
    }
    return n_seqs;
}

static void one_case(const bed *b, const decode_shape *h, const scene_seq *seqs, uint32_t n_seqs,
                     const char *what, uint32_t n)
{
    scene_error error = { 0 };
    twin first;
    decode_case c;
    bool ok = case_create(b, &c, h, seqs, n_seqs) && run_case(b, &c), agree;

    agree = ok && samples_agree(b, &c, &error);
    gpu_test_case(b->t, agree, "mla_decode %s, %s, %u rows, %s: %.2e, worst %.2f", b->variant,
                  h->name, n, what, sqrt(error.off / (error.size + 1e-300)), error.worst);
    gpu_test_case(b->t,
                  ok && only_written(&c.y, c.s.absorbed.host, c.s.n_rows, h->n_heads * h->rank),
                  "mla_decode %s, %s, %u rows, %s: what is written", b->variant, h->name, n, what);
    first = c.y.data;
    first.host = malloc(first.n_bytes);
    memcpy(first.host, c.y.data.host, first.n_bytes);
    ok = ok && run_case(b, &c);
    gpu_test_case(b->t, ok && !memcmp(first.host, c.y.data.host, first.n_bytes),
                  "mla_decode %s, %s, %u rows, %s: the same bits again", b->variant, h->name, n,
                  what);
    free(first.host);
    case_destroy(b, &c);
}

static void all_cases(const bed *b, const decode_shape *h)
{
    static const uint32_t counts[] = { 0, 1, 2, 7, 64, 129, 1000 };
    static const scene_seq chain[] = {
        { 130, 40, true }, { 64, 1, true }, { 65, 2, true }, { 66, 4, true }, { 1, 1, true }
    };
    static const scene_seq distant[] = { { 100000, 2, true }, { 1, 1, true }, { 30000, 1, true } };
    scene_seq *seqs = malloc(MAX_SEQS * sizeof(*seqs));
    const int n_counts = b->t->quick ? 4 : 7;

    for (int i = 0; i < n_counts; i++) {
        const uint32_t n = counts[i], most = n > 200 ? 300 : n > 7 ? 2000 : 6000;
        uint32_t n_seqs = make_seqs(b->t, seqs, n, 1, b->t->quick ? 300 : most);
        one_case(b, h, seqs, n_seqs, "single", n);
        n_seqs = make_seqs(b->t, seqs, n, 4, b->t->quick ? 300 : most);
        one_case(b, h, seqs, n_seqs, "chains", n);
        for (uint32_t k = 0; k < n / 2; k++) /* all alike */
            seqs[k] = (scene_seq){ n > 200 ? 200 : 700, 2, true };
        one_case(b, h, seqs, n / 2, "pairs", n / 2 * 2);
    }
    one_case(b, h, chain, 5, "at the ends of pages", 48);
    if (!b->t->quick)
        one_case(b, h, distant, 3, "100,000 positions", 4);
    free(seqs);
}

/* Rows of a batch, one at a time in a batch of their own, bit for bit: all, or some of many. */
static void rows_alone(const bed *b, const decode_shape *h, const scene_seq *seqs, uint32_t n_seqs,
                       const char *name)
{
    const size_t row_bytes = (size_t)h->n_heads * h->rank * yard_dtype_bytes(h->dtype);
    decode_case c;
    bool ok = case_create(b, &c, h, seqs, n_seqs) && run_case(b, &c), same = true;
    const uint32_t n_tries = c.s.n_rows <= 16 ? c.s.n_rows : 6;
    uint8_t *all = malloc(c.y.data.n_bytes);
    uint8_t *absorbed = malloc(c.s.n_rows);

    memcpy(all, c.y.data.host, c.y.data.n_bytes);
    memcpy(absorbed, c.s.absorbed.host, c.s.n_rows);
    for (uint32_t i = 0; i < n_tries && ok; i++) {
        const uint32_t row = n_tries == c.s.n_rows ? i : scene_below(b->t, c.s.n_rows);
        if (!absorbed[row])
            continue;
        memset(c.s.absorbed.host, 0, c.s.n_rows);
        ((uint8_t *)c.s.absorbed.host)[row] = 1;
        ok = scene_upload(&c.s) && run_case(b, &c);
        same = same && !memcmp(all + row * row_bytes, (uint8_t *)c.y.data.host + row * row_bytes,
                               row_bytes);
    }
    gpu_test_case(b->t, ok && same, "mla_decode %s, %s: rows alone, %s", b->variant, h->name, name);
    free(all);
    free(absorbed);
    case_destroy(b, &c);
}

static void all_rows_alone(const bed *b, const decode_shape *h)
{
    /* a row more is a tile, or a part, more; then other parts as well (16 tiles and 17) */
    static const scene_seq chains[] = {
        { 66, 4, true }, { 258, 4, true }, { 1282, 4, true }, { 130, 3, true }
    };
    static const scene_seq mixed[] = { { 1026, 4, true }, { 300, 2, true } };
    scene_seq *seqs = malloc(MAX_SEQS * sizeof(*seqs));
    const uint32_t n_seqs =
        make_seqs(b->t, seqs, b->t->quick ? 12 : 200, 4, b->t->quick ? 300 : 6000);

    rows_alone(b, h, seqs, n_seqs, "many");
    rows_alone(b, h, chains, 4, "chains");
    rows_alone(b, h, mixed, 2, "chains cut in two ways");
    free(seqs);
}

/* An FP8 cache and a bf16 one of the same values. */
static void widened(const bed *b, const decode_shape *h)
{
    static const scene_seq seqs[] = { { 3000, 2, true }, { 130, 3, true }, { 1, 1, true },
                                      { 64, 1, true },   { 700, 4, true }, { 65, 2, true } };
    decode_case c;
    bool ok = case_create(b, &c, h, seqs, 6) && run_case(b, &c);
    uint8_t *narrow = malloc(c.y.data.n_bytes);

    memcpy(narrow, c.y.data.host, c.y.data.n_bytes);
    ok = ok && scene_widen(&c.s) && run_case(b, &c) &&
         !memcmp(narrow, c.y.data.host, c.y.data.n_bytes);
    gpu_test_case(b->t, ok, "mla_decode %s, %s: the bits of a bf16 cache", b->variant, h->name);
    free(narrow);
    case_destroy(b, &c);
}

/* Blocks that do not wait for the others leave their share of the joining to the last one: the bits
 * stay, and the next launch finds nothing left over. */
static void impatient(const bed *b, const decode_shape *h)
{
    static const scene_seq seqs[] = {
        { 3000, 2, true }, { 400, 1, true }, { 1000, 4, true }, { 64, 1, true }
    };
    yard_mla_workspace *space = &cuda_of(b->s)->mla;
    const uint32_t patience_ns = space->patience_ns;
    decode_case c;
    bool ok = case_create(b, &c, h, seqs, 4) && run_case(b, &c), same = true;
    uint8_t *patient = malloc(c.y.data.n_bytes);

    memcpy(patient, c.y.data.host, c.y.data.n_bytes);
    for (int i = 0; i < 6 && ok; i++) {
        space->patience_ns = i < 4 ? 0 : patience_ns;
        ok = run_case(b, &c);
        same = same && !memcmp(patient, c.y.data.host, c.y.data.n_bytes);
    }
    space->patience_ns = patience_ns;
    gpu_test_case(b->t, ok && same, "mla_decode %s, %s: without patience", b->variant, h->name);
    free(patient);
    case_destroy(b, &c);
}

/* A graph reads lengths and counts anew. */
static void replayed(const bed *b, const decode_shape *h)
{
    static const scene_seq seqs[] = {
        { 300, 2, true }, { 700, 1, true }, { 90, 3, false }, { 5000, 2, true }
    };
    yard_graph *graph = NULL;
    yard_mla_decode_args a;
    scene_error error = { 0 };
    decode_case c;
    bool ok = case_create(b, &c, h, seqs, 4);

    a = args_of(&c);
    ok = ok && b->ops->capture_begin(b->s, NULL) == YARD_OK;
    b->ops->mla_decode(b->s, &a);
    b->ops->mla_decode(b->s, &a);
    ok = ok && b->ops->capture_end(&graph, b->s, NULL) == YARD_OK &&
         b->ops->replay(b->s, graph, NULL, NULL) == YARD_OK;
    *(int32_t *)c.s.n_tokens.host = 7; /* the last row goes */
    ((int32_t *)c.s.position.host)[2] = 65;
    ok = ok && scene_upload(&c.s) && twin_upload(b, &c.y.data) &&
         b->ops->replay(b->s, graph, NULL, NULL) == YARD_OK && twin_download(b, &c.y.data);
    c.s.n_rows = 7;
    ok = ok && agrees(&c, 2, 0, &error) && agrees(&c, 6, h->n_heads - 1, &error) &&
         only_written(&c.y, c.s.absorbed.host, 7, h->n_heads * h->rank);
    gpu_test_case(b->t, ok, "mla_decode %s, %s: a graph again", b->variant, h->name);
    b->ops->release_graph(b->s, graph);
    case_destroy(b, &c);
}

void gpu_test_mla_decode(gpu_test *t)
{
    static const char *const variants[] = { "fast", "deterministic" };
    bed b;

    for (int v = 0; v < 2; v++) {
        const yard_ops_limits limits = { .max_tokens = 1024,
                                         .max_heads = 128,
                                         .kv_rank = 512,
                                         .nope_dims = 128,
                                         .rope_dims = 64,
                                         .v_dims = 128 };
        if (!bed_open_for(&b, t, variants[v], &limits))
            return;
        for (int i = 0; i < (t->quick ? N_QUICK : N_SHAPES); i++) {
            if (t->shape && strcmp(t->shape, shapes[i].name) != 0)
                continue;
            all_cases(&b, &shapes[i]);
            replayed(&b, &shapes[i]);
            impatient(&b, &shapes[i]);
            if (shapes[i].fp8_cache)
                widened(&b, &shapes[i]);
            if (v == 1)
                all_rows_alone(&b, &shapes[i]);
        }
        bed_close(&b);
    }
}
