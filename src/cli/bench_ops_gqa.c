/* Cases of `switchyard bench ops`: grouped-query attention. */
#include <math.h>
#include <stdio.h>

#include "cli/bench_ops.h"

enum { DECODE, PREFILL, SHRUNK_ROWS = 4 };

static bool has_kv_heads(const yard_bench_ops_size *size)
{
    return size->model->attention == YARD_ATTENTION_GQA;
}

static void place_attend(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         yard_bench_ops_set *set, bool host)
{
    const yard_model_config *m = size->model;
    const uint32_t n = size->n_tokens, cols = m->n_heads * m->rope_dims;
    const bool decode = c->id == DECODE;

    yard_bench_ops_place_batch(size, set, decode, host);
    set->args.gqa = (yard_gqa_attend_args){
        .batch = &set->batch,
        .n_heads = m->n_heads,
        .n_kv_heads = m->n_kv_heads,
        .head_dim = m->rope_dims,
        .window = m->window,
        .softmax_scale = 1 / sqrtf((float)m->rope_dims),
        .q = yard_bench_ops_take_rows(set, YARD_BF16, n, cols, true),
        .cache = yard_bench_ops_place_cache(size, set, decode, true),
        .y = yard_bench_ops_take_rows(set, YARD_BF16, n, cols, false),
    };
    yard_bench_ops_add_out(set, set->args.gqa.y, n, cols, false);
}

static void run_attend(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->gqa_attend(s, &set->args.gqa);
}

static void shrink_attend(yard_bench_ops_set *set)
{
    yard_bench_ops_shrink_rows(set, SHRUNK_ROWS, set->outs[0].n_cols);
}

/* Decoding reads a sequence of its own for each token; a prompt reads itself, its rows half of it
 * on average. */
static void count_attend(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         const yard_bench_ops_set *host, double *bytes, double *flops,
                         char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_gqa_attend_args *a = &host->args.gqa;
    const double n = size->n_tokens, dims = a->head_dim;
    const double window = a->window ? a->window : 1e18;
    const bool decode = c->id == DECODE;
    const double seen = fmin(decode ? size->context : (n + 1) / 2, window);
    const double cached = decode ? n * seen : n;

    *flops = 4 * n * a->n_heads * seen * dims;
    *bytes = 2 * (2 * cached * a->n_kv_heads * dims + 2 * n * a->n_heads * dims);
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%u heads on %u x %u, context %u", a->n_heads,
             a->n_kv_heads, a->head_dim, decode ? size->context : size->n_tokens);
}

static void place_append(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         yard_bench_ops_set *set, bool host)
{
    const yard_model_config *m = size->model;
    const uint32_t n = size->n_tokens, cols = m->n_kv_heads * m->rope_dims;
    const float *inv_freq = yard_bench_ops_take(set, YARD_F32, m->rope_dims / 2, true);

    (void)c;
    yard_bench_ops_place_batch(size, set, 0, host);
    set->args.gqa_append = (yard_gqa_append_kv_args){
        .batch = &set->batch,
        .max_rows = size->n_tokens,
        .n_kv_heads = m->n_kv_heads,
        .head_dim = m->rope_dims,
        .rope = { .inv_freq = inv_freq, .n_dims = m->rope_dims, .layout = m->rope_layout },
        .k = yard_bench_ops_take_rows(set, YARD_F32, n, cols, true),
        .v = yard_bench_ops_take_rows(set, YARD_F32, n, cols, true),
        .cache = yard_bench_ops_place_cache(size, set, 0, false),
    };
    /* Pages are in order here, so the rows of the cache are those of the tokens. */
    yard_bench_ops_add_out(
        set,
        (yard_rows){ .dtype = YARD_BF16, .ld = 2 * cols, .data = set->args.gqa_append.cache.data },
        n, 2 * cols, false);
}

static void run_append(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->gqa_append_kv(s, &set->args.gqa_append);
}

static void count_append(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         const yard_bench_ops_set *host, double *bytes, double *flops,
                         char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_gqa_append_kv_args *a = &host->args.gqa_append;

    (void)c;
    *flops = -1;
    *bytes = size->n_tokens * 2.0 * a->n_kv_heads * a->head_dim * (4 + 2);
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%u heads x %u", a->n_kv_heads, a->head_dim);
}

const yard_bench_ops_case *yard_bench_ops_gqa(uint32_t *n)
{
    static const yard_bench_ops_case list[] = {
        { "gqa_attend", "decode", has_kv_heads, place_attend, run_attend, NULL, shrink_attend,
          count_attend, YARD_BF16, DECODE },
        { "gqa_attend", "prefill", has_kv_heads, place_attend, run_attend, NULL, shrink_attend,
          count_attend, YARD_BF16, PREFILL },
        { "gqa_append_kv", "", has_kv_heads, place_append, run_append, NULL,
          yard_bench_ops_shrink_nothing, count_append, YARD_F32, 0 },
    };

    *n = sizeof(list) / sizeof(list[0]);
    return list;
}
