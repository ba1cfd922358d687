/* bench ops: attention over the latent cache. */
#include <math.h>
#include <stdio.h>

#include "cli/bench_ops.h"

enum { SHRUNK_ROWS = 2, SHRUNK_PROMPT = 70, SHRUNK_HEADS = 2 };

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static bool has_latent(const yard_bench_ops_size *size)
{
    return size->model->kv_rank > 0;
}

static uint32_t count_seqs(const yard_bench_ops_size *size, uint32_t n_generated)
{
    return n_generated ? yard_ceil_div(size->n_tokens, n_generated) : 1;
}

static uint32_t pages_a_seq(const yard_bench_ops_size *size, uint32_t n_generated)
{
    return yard_ceil_div(n_generated ? size->context : size->n_tokens, YARD_PAGE_TOKENS);
}

static void list_pages(int32_t *pages, uint32_t n, bool shuffled)
{
    uint64_t state = n;

    for (uint32_t i = 0; i < n; i++) {
        const uint32_t j = shuffled ? yard_bench_ops_random(&state, i + 1) : i;
        pages[i] = pages[j];
        pages[j] = (int32_t)i;
    }
}

void yard_bench_ops_place_batch(const yard_bench_ops_size *size, yard_bench_ops_set *set,
                                uint32_t n_generated, bool host)
{
    const uint32_t n = size->n_tokens, n_seqs = count_seqs(size, n_generated);
    const uint32_t n_pages = pages_a_seq(size, n_generated);
    int32_t *count = yard_bench_ops_take_count(set, n, host);
    int32_t *position = yard_bench_ops_take_ints(set, n), *seq = yard_bench_ops_take_ints(set, n);
    int32_t *pages = yard_bench_ops_take_ints(set, (size_t)n_seqs * n_pages);
    uint8_t *form = yard_arena_take(&set->arena, n);

    set->batch = (yard_batch){ .n_tokens = count,
                               .token = position,
                               .position = position,
                               .seq = seq,
                               .absorbed = form,
                               .page_table = pages,
                               .page_table_ld = n_pages };
    if (!host)
        return;
    for (uint32_t i = 0; i < n; i++) {
        /* as if every sequence had all its rows: an odd last one is as long as the others */
        const uint32_t from_end = n_generated ? n_generated - i % n_generated : 0;
        const uint32_t at = size->context > from_end ? size->context - from_end : 0;
        position[i] = (int32_t)(n_generated ? at : i);
        seq[i] = n_generated ? (int32_t)(i / n_generated) : 0;
        form[i] = n_generated > 0;
    }
    list_pages(pages, n_seqs * n_pages, n_generated > 0);
}

static void fill_rows(yard_bench_ops_set *set, yard_dtype dtype, void *at, size_t n, size_t n_rows,
                      size_t row_bytes)
{
    set->fills[set->n_fills++] = (yard_bench_ops_fill){ .at = at,
                                                        .dtype = dtype,
                                                        .n = n,
                                                        .positive = dtype == YARD_F32,
                                                        .n_rows = n_rows,
                                                        .row_bytes = row_bytes };
}

static yard_kv_layer place_fp8_cache(const yard_model_config *m, yard_bench_ops_set *set,
                                     size_t n_rows, bool fill)
{
    const yard_latent_row row = yard_latent_row_of(YARD_FP8_E4M3, m->kv_rank, m->rope_dims);
    uint8_t *at = yard_arena_take(&set->arena, n_rows * row.n_bytes);

    if (fill) {
        fill_rows(set, YARD_FP8_E4M3, at, m->kv_rank, n_rows, row.n_bytes);
        fill_rows(set, YARD_F32, at + row.scale_at, yard_group_count(m->kv_rank), n_rows,
                  row.n_bytes);
        fill_rows(set, YARD_BF16, at + row.rope_at, m->rope_dims, n_rows, row.n_bytes);
    }
    return (yard_kv_layer){ YARD_FP8_E4M3, m->kv_rank + m->rope_dims, at };
}

yard_kv_layer yard_bench_ops_place_cache(const yard_bench_ops_size *size, yard_bench_ops_set *set,
                                         uint32_t n_generated, bool fill)
{
    const uint32_t n_pages = pages_a_seq(size, n_generated) * count_seqs(size, n_generated);
    const uint32_t width = yard_model_kv_width(size->model, 1);

    if (size->kv_dtype == YARD_KV_FP8)
        return place_fp8_cache(size->model, set, (size_t)n_pages * YARD_PAGE_TOKENS, fill);
    return (yard_kv_layer){ .dtype = YARD_BF16,
                            .width = width,
                            .data = yard_bench_ops_take(
                                set, YARD_BF16, (size_t)n_pages * YARD_PAGE_TOKENS * width, fill) };
}

static const char *cache_text(const yard_kv_layer *cache)
{
    return cache->dtype == YARD_FP8_E4M3 ? ", FP8 cache" : "";
}

static void place_decode(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         yard_bench_ops_set *set, bool host)
{
    const yard_model_config *m = size->model;
    const uint32_t n = size->n_tokens, head_dim = m->nope_dims + m->rope_dims;
    yard_mla_decode_args *a = &set->args.decode;

    yard_bench_ops_place_batch(size, set, c->id, host);
    *a = (yard_mla_decode_args){
        .batch = &set->batch,
        .n_heads = m->n_heads,
        .kv_rank = m->kv_rank,
        .rope_dims = m->rope_dims,
        .softmax_scale = 1 / sqrtf((float)head_dim),
        .q_latent = yard_bench_ops_take_rows(set, YARD_BF16, n, m->n_heads * m->kv_rank, true),
        .q = yard_bench_ops_take_rows(set, YARD_BF16, n, m->n_heads * head_dim, true),
        .head_dim = head_dim,
        .cache = yard_bench_ops_place_cache(size, set, c->id, true),
        .y = yard_bench_ops_take_rows(set, YARD_BF16, n, m->n_heads * m->kv_rank, false),
    };
    yard_bench_ops_add_out(set, a->y, n, m->n_heads * m->kv_rank, false);
}

static void run_decode(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->mla_decode(s, &set->args.decode);
}

static void shrink_decode(yard_bench_ops_set *set)
{
    yard_mla_decode_args *a = &set->args.decode;

    a->n_heads = min_u32(a->n_heads, SHRUNK_HEADS);
    yard_bench_ops_shrink_rows(set, SHRUNK_ROWS, a->n_heads * a->kv_rank);
}

static void count_decode(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         const yard_bench_ops_set *host, double *bytes, double *flops,
                         char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_mla_decode_args *a = &host->args.decode;
    const double n = size->n_tokens, width = a->kv_rank + a->rope_dims;
    const double n_seqs = count_seqs(size, c->id);

    *flops = 2 * n * a->n_heads * (double)size->context * (width + a->kv_rank);
    *bytes = n_seqs * size->context *
                 yard_latent_row_of(a->cache.dtype, a->kv_rank, a->rope_dims).n_bytes +
             2 * n * a->n_heads * (width + a->kv_rank);
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%u heads x %u+%u, context %u, query %u%s", a->n_heads,
             a->kv_rank, a->rope_dims, size->context, c->id, cache_text(&a->cache));
}

static void place_prefill(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                          yard_bench_ops_set *set, bool host)
{
    const yard_model_config *m = size->model;
    const uint32_t n = size->n_tokens, head_dim = m->nope_dims + m->rope_dims;
    yard_mla_prefill_args *a = &set->args.prefill;

    (void)c;
    yard_bench_ops_place_batch(size, set, 0, host);
    *a = (yard_mla_prefill_args){
        .batch = &set->batch,
        .n_heads = m->n_heads,
        .kv_rank = m->kv_rank,
        .nope_dims = m->nope_dims,
        .rope_dims = m->rope_dims,
        .v_dims = m->v_dims,
        .softmax_scale = 1 / sqrtf((float)head_dim),
        .q = yard_bench_ops_take_rows(set, YARD_BF16, n, m->n_heads * head_dim, true),
        .kv_b = yard_bench_ops_take_matrix(set, m->fp8 ? YARD_FP8_E4M3 : YARD_BF16,
                                           m->n_heads * (m->nope_dims + m->v_dims), m->kv_rank,
                                           m->block_rows),
        .quantise = m->fp8,
        .cache = yard_bench_ops_place_cache(size, set, 0, true),
        .y = yard_bench_ops_take_rows(set, YARD_BF16, n, m->n_heads * m->v_dims, false),
    };
    yard_bench_ops_add_out(set, a->y, n, m->n_heads * m->v_dims, false);
}

static void run_prefill(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->mla_prefill(s, &set->args.prefill);
}

static yard_status prepare_prefill(const yard_ops *ops, yard_stream s,
                                   const yard_bench_ops_set *host, yard_bench_ops_set *set,
                                   yard_error *err)
{
    const yard_prepare_args a = { .parts = &host->args.prefill.kv_b,
                                  .n_matrices = 1,
                                  .n_parts = 1 };

    return ops->prepare(&set->prepared, &set->args.prefill.kv_b, s, &a, err);
}

static void shrink_prefill(yard_bench_ops_set *set)
{
    yard_mla_prefill_args *a = &set->args.prefill;

    a->n_heads = min_u32(a->n_heads, SHRUNK_HEADS);
    yard_bench_ops_shrink_rows(set, SHRUNK_PROMPT, a->n_heads * a->v_dims);
}

static void count_prefill(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                          const yard_bench_ops_set *host, double *bytes, double *flops,
                          char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_mla_prefill_args *a = &host->args.prefill;
    const double n = size->n_tokens, heads = a->n_heads;
    const double head_dim = a->nope_dims + a->rope_dims;

    (void)c;
    *flops =
        2 * heads *
        (n * a->kv_rank * (a->nope_dims + a->v_dims) + n * (n + 1) / 2 * (head_dim + a->v_dims));
    *bytes = yard_bench_ops_matrix_bytes(&a->kv_b) +
             n * yard_latent_row_of(a->cache.dtype, a->kv_rank, a->rope_dims).n_bytes +
             2 * n * heads * (head_dim + a->v_dims);
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%u heads x %u+%u/%u, one prompt%s", a->n_heads,
             a->nope_dims, a->rope_dims, a->v_dims, cache_text(&a->cache));
}

const yard_bench_ops_case *yard_bench_ops_latent(uint32_t *n)
{
    static const yard_bench_ops_case list[] = {
        { "mla_decode", "query1", has_latent, place_decode, run_decode, NULL, shrink_decode,
          count_decode, YARD_BF16, 1 },
        { "mla_decode", "query2", has_latent, place_decode, run_decode, NULL, shrink_decode,
          count_decode, YARD_BF16, 2 },
        { "mla_prefill", "", has_latent, place_prefill, run_prefill, prepare_prefill,
          shrink_prefill, count_prefill, YARD_BF16, 0 },
    };

    *n = sizeof(list) / sizeof(list[0]);
    return list;
}
