/* linear on the GPU against the double-precision definition: samples of large results, all of small
 * ones; nothing else written; the same bits again, and from a captured graph; rows that do not
 * depend on each other where the table promises it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "products_gpu_test.h"

enum { SPARE_ROWS = 3 };

typedef struct linear_shape {
    const char *name;
    uint32_t parts[3]; /* rows of the stacked matrices, 0: none */
    uint32_t n_in;
    yard_dtype x, w, y;
    uint32_t row0, block_rows;
    uint32_t pad; /* columns of x and y beyond */
} linear_shape;

#define FP8_SHAPE(name, rows, cols)                                                                \
    {                                                                                              \
        name, { rows }, cols, YARD_FP8_E4M3, YARD_FP8_E4M3, YARD_BF16, 0, 128, 0                   \
    }
#define BF16_SHAPE(name, rows, cols)                                                               \
    {                                                                                              \
        name, { rows }, cols, YARD_BF16, YARD_BF16, YARD_BF16, 0, 128, 0                           \
    }
static const linear_shape large_shapes[] = {
    { "v3 qkv_a", { 1536, 576 }, 7168, YARD_FP8_E4M3, YARD_FP8_E4M3, YARD_BF16, 0, 128, 0 },
    FP8_SHAPE("v3 q_b", 24576, 1536),
    FP8_SHAPE("v3 o", 7168, 16384),
    { "v3 shared gate_up",
      { 2048, 2048 },
      7168,
      YARD_FP8_E4M3,
      YARD_FP8_E4M3,
      YARD_F32,
      0,
      128,
      0 },
    FP8_SHAPE("v3 shared down", 7168, 2048),
    FP8_SHAPE("k2 o", 7168, 8192),
    FP8_SHAPE("mixtral down", 4096, 14336),
    { "v3 router", { 256 }, 7168, YARD_BF16, YARD_BF16, YARD_F32, 0, 128, 0 },
    BF16_SHAPE("v3 eh_proj", 7168, 14336),
    BF16_SHAPE("mixtral q", 4096, 4096),
};
static const linear_shape small_shapes[] = {
    FP8_SHAPE("v2-lite kv_a", 576, 2048),
    FP8_SHAPE("v2-lite down", 2048, 1408),
    FP8_SHAPE("v2-lite dense down", 2048, 10944),
    FP8_SHAPE("demo kv_a", 160, 256),
    { "demo q_b", { 384 }, 128, YARD_FP8_E4M3, YARD_FP8_E4M3, YARD_BF16, 128, 128, 16 },
    { "demo head", { 3584 }, 256, YARD_BF16, YARD_BF16, YARD_F32, 0, 128, 0 },
    BF16_SHAPE("v2-lite down in bf16", 2048, 1408),
    { "odd width in bf16", { 72 }, 200, YARD_BF16, YARD_BF16, YARD_F32, 0, 128, 8 },
    { "odd width", { 72 }, 200, YARD_FP8_E4M3, YARD_FP8_E4M3, YARD_BF16, 0, 128, 8 },
    { "odd blocks", { 300 }, 272, YARD_FP8_E4M3, YARD_FP8_E4M3, YARD_BF16, 37, 100, 0 },
    { "not aligned", { 130 }, 261, YARD_FP8_E4M3, YARD_FP8_E4M3, YARD_F32, 0, 128, 1 },
    { "exact fp8", { 160 }, 256, YARD_F32, YARD_FP8_E4M3, YARD_F32, 0, 128, 0 },
    { "exact f32", { 96 }, 256, YARD_F32, YARD_F32, YARD_F32, 0, 128, 0 },
    { "bf16 by f16", { 96 }, 256, YARD_BF16, YARD_F16, YARD_BF16, 0, 128, 0 },
};
enum {
    N_LARGE = sizeof(large_shapes) / sizeof(large_shapes[0]),
    N_SMALL = sizeof(small_shapes) / sizeof(small_shapes[0])
};
enum { MAX_COUNT = 1000 };

/* Both sides of one shape; the rows of all token counts. */
typedef struct linear_case {
    const linear_shape *shape;
    uint32_t n_out;
    weights w; /* the stacked matrix, as one for the definition */
    yard_matrix prepared_w;
    struct yard_prepared *prepared;
    rows_twin x;
    twin n_rows;
} linear_case;

static bool linear_create(const bed *b, linear_case *c, const linear_shape *s, uint32_t max_rows)
{
    yard_matrix parts[3];
    uint32_t n = 0, at = 0;
    yard_error err = { 0 };

    memset(c, 0, sizeof(*c));
    c->shape = s;
    for (; n < 3 && s->parts[n]; n++)
        c->n_out += s->parts[n];
    if (!weights_create(b->t, &c->w, s->w, 1, c->n_out, s->n_in, s->row0, s->block_rows) ||
        !rows_create(b, &c->x, s->x, max_rows, s->n_in, s->n_in + s->pad, true) ||
        !twin_create(b, &c->n_rows, sizeof(int32_t)))
        return false;
    for (uint32_t i = 0; i < n; at += s->parts[i++]) {
        parts[i] = c->w.m[0];
        parts[i].rows = s->parts[i];
        parts[i].row0 += at;
        parts[i].data = (const uint8_t *)parts[i].data +
                        (size_t)at * parts[i].ld * yard_dtype_bytes(parts[i].dtype);
    }
    return b->ops->prepare(&c->prepared, &c->prepared_w, b->s,
                           &(yard_prepare_args){ .parts = parts, .n_matrices = 1, .n_parts = n },
                           &err) == YARD_OK;
}

static void linear_destroy(const bed *b, linear_case *c)
{
    weights_destroy(&c->w);
    rows_destroy(b, &c->x);
    twin_destroy(b, &c->n_rows);
    b->ops->release_prepared(b->s, c->prepared);
}

/* first: row of x to begin with. max_rows is not n_rows: the kernel must read it. */
static void linear_call(const bed *b, const linear_case *c, uint32_t first, uint32_t max_rows,
                        const rows_twin *y)
{
    yard_rows x = c->x.device;

    x.data = (uint8_t *)x.data + (size_t)first * x.ld * yard_dtype_bytes(x.dtype);
    if (x.scale)
        x.scale += (size_t)first * yard_group_count(c->shape->n_in);
    b->ops->linear(b->s, &(yard_linear_args){ .n_rows = c->n_rows.device,
                                              .max_rows = max_rows,
                                              .x = x,
                                              .w = c->prepared_w,
                                              .y = y->device });
}

static void linear_count(const bed *b, linear_case *c, uint32_t n)
{
    const linear_shape *s = c->shape;
    const bool tensor_cores = s->x == YARD_FP8_E4M3;
    rows_twin y, again;
    product_errors result = { 0 };
    bool ok = rows_create(b, &y, s->y, n + SPARE_ROWS, c->n_out, c->n_out + s->pad, false) &&
              rows_create(b, &again, s->y, n + SPARE_ROWS, c->n_out, c->n_out + s->pad, false) &&
              set_count(b, &c->n_rows, n);

    if (ok) {
        linear_call(b, c, 0, n + SPARE_ROWS, &y);
        linear_call(b, c, 0, n + SPARE_ROWS, &again);
        ok = twin_download(b, &y.data) && twin_download(b, &again.data);
    }
    if (ok) {
        compare_rows(b->t, &result, &c->x, NULL, &c->w.m[0], &y, 0, n, tensor_cores);
        gpu_test_case(b->t, errors_pass(&result, s->y),
                      "linear %s, %s, %u rows: error %.2e, worst %.2f", s->name, b->variant, n,
                      result.size > 0 ? sqrt(result.error / result.size) : 0, result.worst);
        gpu_test_case(b->t, only_written(&y, NULL, n, c->n_out),
                      "linear %s, %s, %u rows: what is written", s->name, b->variant, n);
    }
    gpu_test_case(b->t, ok && !memcmp(y.data.host, again.data.host, y.data.n_bytes),
                  "linear %s, %s, %u rows: the same bits again", s->name, b->variant, n);
    rows_destroy(b, &y);
    rows_destroy(b, &again);
}

/* Rows of a call of many have the bits they have in calls of few. */
static void linear_independent(const bed *b, linear_case *c)
{
    enum { MANY = 129, FEW = 7, AT = 100 };
    rows_twin many, few;
    bool ok = rows_create(b, &many, c->shape->y, MANY, c->n_out, c->n_out, false) &&
              rows_create(b, &few, c->shape->y, FEW, c->n_out, c->n_out, false);

    if (ok && set_count(b, &c->n_rows, MANY)) {
        linear_call(b, c, 0, MAX_COUNT, &many);
        b->ops->synchronise(b->s);
        ok = set_count(b, &c->n_rows, FEW);
        linear_call(b, c, AT, FEW, &few);
        ok = ok && twin_download(b, &many.data) && twin_download(b, &few.data);
    }
    gpu_test_case(b->t,
                  ok && !memcmp(few.data.host,
                                (uint8_t *)many.data.host + many.data.n_bytes / MANY * AT,
                                few.data.n_bytes),
                  "linear %s, %s: a row does not depend on the others", c->shape->name, b->variant);
    rows_destroy(b, &many);
    rows_destroy(b, &few);
}

static void linear_shapes(gpu_test *t, const char *variant, const linear_shape *shapes, uint32_t n)
{
    bed b;

    if (!bed_open(&b, t, variant))
        return;
    for (uint32_t i = 0; i < n; i++) {
        linear_case c;
        const bool ok = linear_create(&b, &c, &shapes[i], MAX_COUNT + SPARE_ROWS);
        gpu_test_case(t, ok, "linear %s: memory and weights", shapes[i].name);
        for (uint32_t j = 0; ok && j < N_TOKEN_COUNTS; j++)
            linear_count(&b, &c, token_counts[j]);
        if (ok && variant && !strcmp(variant, "deterministic"))
            linear_independent(&b, &c);
        linear_destroy(&b, &c);
    }
    bed_close(&b);
}

/* The sums of all kernels run in the same order: any rows and columns a tile give the same bits.
 * The deterministic table relies on it. */
static void kernels_agree(gpu_test *t, const linear_shape *shape, const char *const *variants,
                          int n_variants)
{
    enum { ROWS = 300 };
    rows_twin first = { 0 };

    for (int i = 0; i < n_variants; i++) {
        const uint64_t seed = t->seed;
        linear_case c;
        rows_twin y;
        bed b;
        if (!bed_open(&b, t, variants[i]))
            return;
        bool ok = linear_create(&b, &c, shape, ROWS) &&
                  rows_create(&b, &y, YARD_BF16, ROWS, 640, 640, false) &&
                  set_count(&b, &c.n_rows, ROWS);
        linear_call(&b, &c, 0, ROWS, &y);
        ok = ok && twin_download(&b, &y.data);
        if (i > 0)
            gpu_test_case(t, ok && !memcmp(first.data.host, y.data.host, y.data.n_bytes),
                          "%s has the bits of %s", variants[i], variants[0]);
        linear_destroy(&b, &c);
        if (i > 0)
            rows_destroy(&b, &y);
        else
            first = y;
        bed_close(&b);
        t->seed = i < n_variants - 1 ? seed : t->seed;
    }
    free(first.data.host);
    free(first.scale.host);
}

/* A graph reads its counts anew every time it runs. */
static void graphs(gpu_test *t)
{
    static const linear_shape shape = FP8_SHAPE("graph", 384, 512);
    enum { ROWS = 200 };
    yard_graph *graph = NULL;
    linear_case c;
    rows_twin y, direct;
    bed b;

    if (!bed_open(&b, t, NULL))
        return;
    bool ok = linear_create(&b, &c, &shape, ROWS) &&
              rows_create(&b, &y, YARD_BF16, ROWS, 384, 384, false) &&
              set_count(&b, &c.n_rows, 0) && b.ops->capture_begin(b.s, NULL) == YARD_OK;
    linear_call(&b, &c, 0, ROWS, &y);
    ok = ok && b.ops->capture_end(&graph, b.s, NULL) == YARD_OK;
    for (uint32_t i = 0; ok && i < N_TOKEN_COUNTS - 1; i++) {
        const uint32_t n = token_counts[i];
        ok = rows_create(&b, &direct, YARD_BF16, ROWS, 384, 384, false) &&
             twin_upload(&b, &direct.data);
        memset(y.data.host, 0xff, y.data.n_bytes);
        ok = ok && twin_upload(&b, &y.data) && set_count(&b, &c.n_rows, n) &&
             b.ops->replay(b.s, graph, NULL, NULL) == YARD_OK && twin_download(&b, &y.data);
        linear_call(&b, &c, 0, ROWS, &direct);
        ok = ok && twin_download(&b, &direct.data);
        gpu_test_case(t,
                      ok && only_written(&y, NULL, n, 384) &&
                          !memcmp(y.data.host, direct.data.host, y.data.n_bytes),
                      "a graph replayed with %u rows", n);
        rows_destroy(&b, &direct);
    }
    gpu_test_case(t, ok, "graphs");
    b.ops->release_graph(b.s, graph);
    linear_destroy(&b, &c);
    rows_destroy(&b, &y);
    bed_close(&b);
}

/* What no kernel takes is an error of the stream, not a wrong result. */
static void refusals(gpu_test *t)
{
    static const linear_shape shape = FP8_SHAPE("refused", 128, 128);
    yard_error err = { 0 };
    linear_case c;
    rows_twin y;
    bed b;

    if (!bed_open(&b, t, NULL))
        return;
    if (linear_create(&b, &c, &shape, 4) && rows_create(&b, &y, YARD_F16, 4, 128, 128, false)) {
        linear_call(&b, &c, 0, 4, &y);
        gpu_test_case(t, b.ops->check(b.s, &err) == YARD_EINVAL && strstr(err.message, "f16"),
                      "f16 results are refused: %s", err.message);
    }
    linear_destroy(&b, &c);
    rows_destroy(&b, &y);
    b.ops->close(b.s);
    if (!bed_open(&b, t, NULL))
        return;
    b.ops->linear(b.s, &(yard_linear_args){ .w = { .rows = 1, .cols = 1 } });
    gpu_test_case(t, b.ops->check(b.s, &err) == YARD_EINVAL, "weights not prepared are refused");
    b.ops->close(b.s);
    gpu_test_case(
        t, b.ops->open(&b.s, &(yard_ops_config){ .variant = "fastest" }, &err) == YARD_EINVAL,
        "an unknown variant is refused");
}

void gpu_test_linear(gpu_test *t)
{
    static const linear_shape fp8 = FP8_SHAPE("kernels agree", 640, 1536);
    static const linear_shape bf16 = BF16_SHAPE("kernels agree in bf16", 640, 1536);
    static const char *const fp8_kernels[] = { "few_fp8", "many_fp8", "rows128", "rows192",
                                               "wide192", "group96",  "group144" };
    static const char *const bf16_kernels[] = { "few_bf16", "rows128_bf16", "group144_bf16" };
    static const char *const variants[] = { NULL,           "deterministic", "few_fp8:1",
                                            "few_fp8:2:32", "many_fp8:2",    "rows128",
                                            "rows192",      "wide192",       "group96",
                                            "group144",     "few_bf16:1",    "rows128_bf16",
                                            "group144_bf16" };
    const int n_variants = sizeof(variants) / sizeof(variants[0]);

    kernels_agree(t, &fp8, fp8_kernels, sizeof(fp8_kernels) / sizeof(fp8_kernels[0]));
    kernels_agree(t, &bf16, bf16_kernels, sizeof(bf16_kernels) / sizeof(bf16_kernels[0]));
    graphs(t);
    refusals(t);
    for (int i = 0; i < n_variants; i++) {
        linear_shapes(t, variants[i], small_shapes, N_SMALL);
        if (!t->quick)
            linear_shapes(t, variants[i], large_shapes, N_LARGE);
    }
}
