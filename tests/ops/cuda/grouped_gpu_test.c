/* grouped_linear on the GPU against the double-precision definition: samples of large results, all
 * of small ones; nothing else written; the same bits again, from a captured graph. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "products_gpu_test.h"

enum { SPARE_ROWS = 3 };

static uint32_t below(gpu_test *t, uint32_t n)
{
    return (uint32_t)(gpu_test_random(t) % n);
}

typedef struct grouped_shape {
    const char *name;
    uint32_t n_groups, n_out, n_in;
    yard_dtype x, w;
} grouped_shape;

static const grouped_shape large_groups[] = {
    { "v3 gate_up", 4, 4096, 7168, YARD_FP8_E4M3, YARD_FP8_E4M3 },
    { "v3 down", 4, 7168, 2048, YARD_FP8_E4M3, YARD_FP8_E4M3 },
    { "mixtral gate_up", 2, 28672, 4096, YARD_FP8_E4M3, YARD_FP8_E4M3 },
};
static const grouped_shape large_bf16_groups[] = {
    { "mixtral gate in bf16", 3, 14336, 4096, YARD_BF16, YARD_BF16 },
    { "mixtral down in bf16", 3, 4096, 14336, YARD_BF16, YARD_BF16 },
};
static const grouped_shape small_groups[] = {
    { "v2-lite gate_up", 8, 2816, 2048, YARD_FP8_E4M3, YARD_FP8_E4M3 },
    { "v2-lite down", 8, 2048, 1408, YARD_FP8_E4M3, YARD_FP8_E4M3 },
    { "more tiles than blocks", 6, 7168, 128, YARD_FP8_E4M3, YARD_FP8_E4M3 },
    { "demo gate_up", 24, 256, 256, YARD_FP8_E4M3, YARD_FP8_E4M3 },
    { "demo down", 24, 256, 128, YARD_FP8_E4M3, YARD_FP8_E4M3 },
    { "exact", 5, 96, 200, YARD_F32, YARD_FP8_E4M3 },
};
static const grouped_shape small_bf16_groups[] = {
    { "v2-lite gate in bf16", 8, 1408, 2048, YARD_BF16, YARD_BF16 },
    { "v2-lite down in bf16", 8, 2048, 1408, YARD_BF16, YARD_BF16 },
    { "demo gate in bf16", 24, 128, 256, YARD_BF16, YARD_BF16 },
    { "demo down in bf16", 24, 256, 128, YARD_BF16, YARD_BF16 },
    { "odd bf16", 5, 100, 200, YARD_BF16, YARD_BF16 },
    { "bf16 not aligned", 5, 96, 201, YARD_BF16, YARD_BF16 },
};
#define COUNT(list) (sizeof(list) / sizeof(list[0]))
enum {
    MAX_GROUPS = 32,
    ROW_ALIGN = 16,
    X_ROWS = 300 /* of the flat layout */
};
typedef enum fill_kind { EMPTY, ONE_TAKES_ALL, ONES, RAGGED, COUNTS, FULL, N_FILLS } fill_kind;
typedef enum layout_kind { PACKED, ALIGNED, GATHERED, N_LAYOUTS } layout_kind;

static int32_t group_size(gpu_test *t, fill_kind fill, uint32_t g, uint32_t n_groups)
{
    switch (fill) {
    case EMPTY:
        return 0;
    case ONE_TAKES_ALL:
        return g == n_groups / 2 ? 333 : 0;
    case ONES:
        return 1;
    case RAGGED:
        return below(t, 3) ? (int32_t)below(t, 100) : 0;
    case COUNTS:
        return (int32_t)token_counts[g % N_TOKEN_COUNTS];
    default:
        return 128 + (int32_t)below(t, 140);
    }
}

typedef struct grouped_case {
    const grouped_shape *shape;
    weights w;
    yard_matrix *prepared_w;
    struct yard_prepared *prepared;
} grouped_case;

static uint32_t make_groups(const bed *b, const grouped_shape *s, fill_kind fill,
                            layout_kind layout, int32_t *offset, int32_t *count)
{
    offset[0] = 0;
    for (uint32_t g = 0; g < s->n_groups; g++) {
        count[g] = group_size(b->t, fill, g, s->n_groups);
        offset[g + 1] = offset[g] + count[g];
        if (layout == ALIGNED)
            offset[g + 1] = (offset[g + 1] + ROW_ALIGN - 1) / ROW_ALIGN * ROW_ALIGN;
    }
    return (uint32_t)offset[s->n_groups];
}

static void grouped_call(const bed *b, const void *args)
{
    b->ops->grouped_linear(b->s, args);
}

static void grouped_one(const bed *b, grouped_case *c, fill_kind fill, layout_kind layout)
{
    static const char *const fills[] = { "empty",  "one takes all", "ones",
                                         "ragged", "counts",        "full" };
    static const char *const layouts[] = { "packed", "aligned", "gathered" };
    const grouped_shape *s = c->shape;
    twin offset, count, index;
    rows_twin x, y, again;
    product_errors result = { 0 };
    bool ok = twin_create(b, &offset, (MAX_GROUPS + 1) * sizeof(int32_t)) &&
              twin_create(b, &count, MAX_GROUPS * sizeof(int32_t));
    const uint32_t n = make_groups(b, s, fill, layout, offset.host, count.host);
    const uint32_t x_rows = layout == GATHERED ? X_ROWS : n + SPARE_ROWS;
    const int32_t *first = offset.host, *counts = count.host;
    uint8_t *written = calloc(n + SPARE_ROWS, 1);

    ok = ok && twin_create(b, &index, (n + SPARE_ROWS) * sizeof(int32_t)) &&
         rows_create(b, &x, s->x, x_rows, s->n_in, s->n_in, true) &&
         rows_create(b, &y, YARD_BF16, n + SPARE_ROWS, s->n_out, s->n_out, false) &&
         rows_create(b, &again, YARD_BF16, n + SPARE_ROWS, s->n_out, s->n_out, false);
    for (uint32_t i = 0; ok && i < n + SPARE_ROWS; i++)
        ((int32_t *)index.host)[i] = (int32_t)below(b->t, x_rows);
    ok = ok && twin_upload(b, &offset) && twin_upload(b, &count) && twin_upload(b, &index);
    yard_grouped_linear_args a = { .n_groups = s->n_groups,
                                   .offset = offset.device,
                                   .row_count = layout == ALIGNED ? count.device : NULL,
                                   .x_index = layout == GATHERED ? index.device : NULL,
                                   .max_rows = n + SPARE_ROWS,
                                   .max_x_rows = x_rows,
                                   .x = x.device,
                                   .w = c->prepared_w,
                                   .y = y.device };
    grouped_call(b, &a);
    a.y = again.device;
    ok = bed_replay(b, grouped_call, &a) && ok;
    ok = ok && twin_download(b, &y.data) && twin_download(b, &again.data);
    for (uint32_t g = 0; ok && g < s->n_groups; g++) {
        memset(written + first[g], 1, (size_t)counts[g]);
        compare_rows(b->t, &result, &x, layout == GATHERED ? index.host : NULL, &c->w.m[g], &y,
                     (uint32_t)first[g], (uint32_t)counts[g], s->x == YARD_FP8_E4M3);
    }
    gpu_test_case(b->t, ok && errors_pass(&result, YARD_BF16),
                  "grouped %s, %s, %s, %s: error %.2e, worst %.2f", s->name, b->variant,
                  fills[fill], layouts[layout],
                  result.size > 0 ? sqrt(result.error / result.size) : 0, result.worst);
    gpu_test_case(b->t, ok && only_written(&y, written, n, s->n_out),
                  "grouped %s, %s, %s, %s: what is written", s->name, b->variant, fills[fill],
                  layouts[layout]);
    gpu_test_case(b->t, ok && !memcmp(y.data.host, again.data.host, y.data.n_bytes),
                  "grouped %s, %s, %s, %s: the same bits again", s->name, b->variant, fills[fill],
                  layouts[layout]);
    free(written);
    twin_destroy(b, &offset);
    twin_destroy(b, &count);
    twin_destroy(b, &index);
    rows_destroy(b, &x);
    rows_destroy(b, &y);
    rows_destroy(b, &again);
}

static void grouped_shapes(gpu_test *t, const char *variant, const grouped_shape *shapes,
                           uint32_t n)
{
    bed b;

    if (!bed_open(&b, t, variant))
        return;
    for (uint32_t i = 0; i < n; i++) {
        const grouped_shape *s = &shapes[i];
        grouped_case c = { .shape = s, .prepared_w = calloc(s->n_groups, sizeof(yard_matrix)) };
        const bool ok =
            weights_create(t, &c.w, s->w, s->n_groups, s->n_out, s->n_in, 0, 128) &&
            b.ops->prepare(
                &c.prepared, c.prepared_w, b.s,
                &(yard_prepare_args){ .parts = c.w.m, .n_matrices = s->n_groups, .n_parts = 1 },
                NULL) == YARD_OK;
        gpu_test_case(t, ok, "grouped %s: weights", s->name);
        for (int fill = 0; ok && fill < N_FILLS; fill++)
            for (int layout = 0; layout < N_LAYOUTS; layout++)
                grouped_one(&b, &c, (fill_kind)fill, (layout_kind)layout);
        weights_destroy(&c.w);
        b.ops->release_prepared(b.s, c.prepared);
        free(c.prepared_w);
    }
    bed_close(&b);
}

void gpu_test_grouped(gpu_test *t)
{
    static const char *const variants[] = { NULL,      "rows128", "rows192",
                                            "wide192", "group96", "group144" };
    static const char *const bf16_variants[] = { NULL, "rows128_bf16", "group144_bf16" };

    for (uint32_t i = 0; i < COUNT(variants); i++) {
        grouped_shapes(t, variants[i], small_groups, COUNT(small_groups));
        if (!t->quick)
            grouped_shapes(t, variants[i], large_groups, COUNT(large_groups));
    }
    for (uint32_t i = 0; i < COUNT(bf16_variants); i++) {
        grouped_shapes(t, bf16_variants[i], small_bf16_groups, COUNT(small_bf16_groups));
        if (!t->quick)
            grouped_shapes(t, bf16_variants[i], large_bf16_groups, COUNT(large_bf16_groups));
    }
}
