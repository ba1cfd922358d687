/* Rotary embedding and appends to the paged cache on the GPU, against the CPU's bits, up to
 * position 100,000 and with pages in random order. */
#include <math.h>
#include <stdlib.h>

#include "both_gpu_test.h"

enum { SPARE_ROWS = 2, MAX_POSITION = 100000, TABLE_LD = MAX_POSITION / YARD_PAGE_TOKENS + 1 };

/* Every token has a place of its own: pages of 64 tokens in random order, each at any position. */
typedef struct batch_twin {
    twin n_tokens, position, seq, page_table;
    yard_batch host, device;
    uint32_t n_pages;
} batch_twin;

static bool batch_create(both *t, batch_twin *k, uint32_t n)
{
    const bed *b = &t->b;
    const uint32_t n_pages = n / YARD_PAGE_TOKENS + 1;
    int32_t page[32];

    if (!twin_create(b, &k->n_tokens, sizeof(int32_t)) ||
        !twin_create(b, &k->position, (n + 1) * sizeof(int32_t)) ||
        !twin_create(b, &k->seq, (n + 1) * sizeof(int32_t)) ||
        !twin_create(b, &k->page_table, (size_t)n_pages * TABLE_LD * sizeof(int32_t)))
        return false;
    k->n_pages = n_pages;
    *(int32_t *)k->n_tokens.host = (int32_t)n;
    for (uint32_t i = 0; i < n_pages; i++) {
        const uint32_t j = both_below(t, i + 1);
        page[i] = page[j];
        page[j] = (int32_t)i;
    }
    for (uint32_t p = 0; p < n_pages; p++) {
        const uint32_t at = p == 0 ? MAX_POSITION / YARD_PAGE_TOKENS : both_below(t, TABLE_LD);
        ((int32_t *)k->page_table.host)[p * TABLE_LD + at] = page[p];
        for (uint32_t i = p * YARD_PAGE_TOKENS; i < n && i < (p + 1) * YARD_PAGE_TOKENS; i++) {
            ((int32_t *)k->position.host)[i] =
                (int32_t)(at * YARD_PAGE_TOKENS + i % YARD_PAGE_TOKENS);
            ((int32_t *)k->seq.host)[i] = (int32_t)p;
        }
    }
    k->host = (yard_batch){ .n_tokens = k->n_tokens.host,
                            .position = k->position.host,
                            .seq = k->seq.host,
                            .page_table = k->page_table.host,
                            .page_table_ld = TABLE_LD };
    k->device = (yard_batch){ .n_tokens = k->n_tokens.device,
                              .position = k->position.device,
                              .seq = k->seq.device,
                              .page_table = k->page_table.device,
                              .page_table_ld = TABLE_LD };
    return twin_upload(b, &k->n_tokens) && twin_upload(b, &k->position) &&
           twin_upload(b, &k->seq) && twin_upload(b, &k->page_table);
}

static void batch_destroy(both *t, batch_twin *k)
{
    twin_destroy(&t->b, &k->n_tokens);
    twin_destroy(&t->b, &k->position);
    twin_destroy(&t->b, &k->seq);
    twin_destroy(&t->b, &k->page_table);
}

static bool freq_create(both *t, twin *freq, uint32_t n_dims)
{
    if (!twin_create(&t->b, freq, n_dims / 2 * sizeof(float)))
        return false;
    for (uint32_t i = 0; i < n_dims / 2; i++)
        ((float *)freq->host)[i] = powf(10000.0f, -2.0f * (float)i / (float)n_dims);
    return twin_upload(&t->b, freq);
}

static void call_append(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->rope_append_kv(s, args);
}

static void call_rope_q(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->rope_q(s, args);
}

static void call_gqa(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->gqa_append_kv(s, args);
}

/* fp8: the cache is, in rows of as many bytes as so many bf16 values. */
static void append_case(both *t, uint32_t n, uint32_t rank, uint32_t n_dims, uint32_t variant,
                        bool fp8)
{
    const bed *b = &t->b;
    const uint32_t width = rank + n_dims, pad = variant % 3;
    const yard_dtype dtype = fp8 || variant % 4 < 2 ? YARD_BF16 : YARD_F32;
    const uint32_t cols = fp8 ? yard_latent_row_of(YARD_FP8_E4M3, rank, n_dims).n_bytes / 2 : width;
    const yard_dtype weight_dtype = variant % 2 ? YARD_BF16 : YARD_F32;
    batch_twin k = { 0 };
    rows_twin kv = { 0 }, cache = { 0 }, weight = { 0 };
    twin freq = { 0 };
    const bool ok =
        batch_create(t, &k, n) && freq_create(t, &freq, n_dims) &&
        rows_create(b, &kv, variant % 2 ? YARD_F32 : YARD_BF16, n + SPARE_ROWS, width, width + pad,
                    true) &&
        both_vary(t, &kv) &&
        rows_create(b, &cache, dtype, k.n_pages * YARD_PAGE_TOKENS, cols, cols, false) &&
        rows_create(b, &weight, weight_dtype, 1, rank, rank, true);
    const yard_rope rope = { .inv_freq = freq.host,
                             .n_dims = n_dims,
                             .layout = variant % 5 ? YARD_ROPE_PAIRS : YARD_ROPE_HALVES };
    const yard_rope_append_kv_args host = {
        .batch = &k.host,
        .max_rows = variant % 3 == 2 ? 0 : n + SPARE_ROWS,
        .kv_rank = rank,
        .kv = kv.host,
        .norm_dtype = weight_dtype,
        .norm_weight = weight.data.host,
        .eps = 1e-6f,
        .rope = rope,
        .cache = { .dtype = fp8 ? YARD_FP8_E4M3 : dtype, .width = width, .data = cache.data.host },
        .ue8m0 = variant % 2
    };
    yard_rope_append_kv_args device = host;

    device.batch = &k.device;
    device.kv = kv.device;
    device.norm_weight = weight.data.device;
    device.rope.inv_freq = freq.device;
    device.cache.data = cache.data.device;
    if (ok)
        both_run(t, call_append, &host, &device);
    gpu_test_case(b->t, ok && both_same_rows(t, &cache), "append: %u x %u + %u, variant %u%s", n,
                  rank, n_dims, variant, fp8 ? ", FP8 cache" : "");
    batch_destroy(t, &k);
    rows_destroy(b, &kv);
    rows_destroy(b, &cache);
    rows_destroy(b, &weight);
    twin_destroy(b, &freq);
}

static void rope_q_case(both *t, uint32_t n, uint32_t n_heads, uint32_t nope, uint32_t n_dims,
                        uint32_t variant)
{
    const bed *b = &t->b;
    const uint32_t width = n_heads * (nope + n_dims);
    batch_twin k = { 0 };
    rows_twin q = { 0 };
    twin freq = { 0 };
    const bool ok = batch_create(t, &k, n) && freq_create(t, &freq, n_dims) &&
                    rows_create(b, &q, variant % 2 ? YARD_F32 : YARD_BF16, n + SPARE_ROWS, width,
                                width + variant % 3, true);
    const yard_rope_q_args host = {
        .batch = &k.host,
        .max_rows = variant % 3 == 2 ? 0 : n + SPARE_ROWS,
        .n_heads = n_heads,
        .head_dim = nope + n_dims,
        .rope = { .inv_freq = freq.host,
                  .n_dims = n_dims,
                  .layout = nope ? YARD_ROPE_PAIRS : YARD_ROPE_HALVES },
        .q = q.host,
    };
    yard_rope_q_args device = host;

    device.batch = &k.device;
    device.rope.inv_freq = freq.device;
    device.q = q.device;
    if (ok)
        both_run(t, call_rope_q, &host, &device);
    gpu_test_case(b->t, ok && both_same_rows(t, &q), "rope_q: %u x %u heads of %u + %u", n, n_heads,
                  nope, n_dims);
    batch_destroy(t, &k);
    rows_destroy(b, &q);
    twin_destroy(b, &freq);
}

static void gqa_case(both *t, uint32_t n, uint32_t n_heads, uint32_t head_dim, uint32_t variant)
{
    const bed *b = &t->b;
    const uint32_t width = n_heads * head_dim;
    const yard_dtype dtype = variant % 2 ? YARD_F32 : YARD_BF16;
    batch_twin k = { 0 };
    rows_twin keys = { 0 }, values = { 0 }, cache = { 0 };
    twin freq = { 0 };
    const bool ok = batch_create(t, &k, n) && freq_create(t, &freq, head_dim) &&
                    rows_create(b, &keys, dtype, n + SPARE_ROWS, width, width, true) &&
                    rows_create(b, &values, dtype, n + SPARE_ROWS, width, width, true) &&
                    rows_create(b, &cache, variant % 3 ? YARD_BF16 : YARD_F32,
                                k.n_pages * YARD_PAGE_TOKENS, 2 * width, 2 * width, false);
    const yard_gqa_append_kv_args host = {
        .batch = &k.host,
        .max_rows = variant % 3 == 2 ? 0 : n + SPARE_ROWS,
        .n_kv_heads = n_heads,
        .head_dim = head_dim,
        .rope = { .inv_freq = freq.host, .n_dims = head_dim, .layout = YARD_ROPE_HALVES },
        .k = keys.host,
        .v = values.host,
        .cache = { .dtype = cache.host.dtype, .width = 2 * width, .data = cache.data.host },
    };
    yard_gqa_append_kv_args device = host;

    device.batch = &k.device;
    device.rope.inv_freq = freq.device;
    device.k = keys.device;
    device.v = values.device;
    device.cache.data = cache.data.device;
    if (ok)
        both_run(t, call_gqa, &host, &device);
    gpu_test_case(b->t, ok && both_same_rows(t, &cache), "gqa append: %u x %u heads of %u", n,
                  n_heads, head_dim);
    batch_destroy(t, &k);
    rows_destroy(b, &keys);
    rows_destroy(b, &values);
    rows_destroy(b, &cache);
    twin_destroy(b, &freq);
}

void gpu_test_rope(gpu_test *test)
{
    static const uint32_t counts[] = { 0, 1, 2, 7, 64, 129, 1000 };
    both t;

    if (!both_open(&t, test))
        return;
    for (uint32_t c = 0, variant = 0; c < 7 - (uint32_t)test->quick; c++) {
        for (uint32_t forms = 0; forms < 4; forms++, variant++) {
            for (int fp8 = 0; fp8 < 2; fp8++) {
                append_case(&t, counts[c], 512, 64, variant, fp8); /* V3, K2, V2-Lite */
                append_case(&t, counts[c], 128, 32, variant, fp8); /* demo */
                append_case(&t, counts[c], 70, 6, variant, fp8);
            }
        }
        rope_q_case(&t, counts[c], 4, 64, 32, variant);
        rope_q_case(&t, counts[c], 16, 128, 64, variant + 1);
        rope_q_case(&t, counts[c], 3, 10, 6, variant);
        gqa_case(&t, counts[c], 2, 16, variant + 1);
        if (test->quick)
            continue;
        rope_q_case(&t, counts[c], 128, 128, 64, variant);
        rope_q_case(&t, counts[c], 64, 128, 64, variant);
        rope_q_case(&t, counts[c], 32, 0, 128, variant);
        gqa_case(&t, counts[c], 8, 128, variant);
    }
    for (int fp8 = 0; fp8 < 2; fp8++) {
        append_case(&t, 7, 1100, 32, 0, fp8); /* three pieces, the last not whole */
        append_case(&t, 7, 1024, 64, 0, fp8);
        if (!test->quick) /* more than there are blocks */
            append_case(&t, 1300, 128, 32, 0, fp8);
    }
    both_close(&t);
}
