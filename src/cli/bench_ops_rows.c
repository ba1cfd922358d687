/* bench ops: what works on single rows. */
#include <stdio.h>

#include "cli/bench_ops.h"

static bool has_latent(const yard_bench_ops_size *size)
{
    return size->model->kv_rank > 0;
}

static bool always(const yard_bench_ops_size *size)
{
    return size->model->hidden > 0;
}

/* Where the wide rows go on: FP8 for the projections, and bf16. */
static yard_out place_out(const yard_model_config *m, yard_bench_ops_set *set, uint32_t n,
                          uint32_t n_cols)
{
    yard_out y = { .plain = yard_bench_ops_take_rows(set, YARD_BF16, n, n_cols, false) };

    yard_bench_ops_add_out(set, y.plain, n, n_cols, false);
    if (m->fp8) {
        y.quant = yard_bench_ops_take_rows(set, YARD_FP8_E4M3, n, n_cols, false);
        yard_bench_ops_add_out(set, y.quant, n, n_cols, false);
    }
    return y;
}

static double out_bytes(const yard_out *y, double n, double n_cols)
{
    return yard_bench_ops_rows_bytes(y->plain, n, n_cols) +
           (y->quant.data ? yard_bench_ops_rows_bytes(y->quant, n, n_cols) : 0);
}

static void place_norm(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                       yard_bench_ops_set *set, bool host)
{
    const yard_model_config *m = size->model;
    const uint32_t n = size->n_tokens;

    (void)c;
    set->args.norm = (yard_rms_norm_args){
        .n_rows = yard_bench_ops_take_count(set, n, host),
        .max_rows = n,
        .n_cols = m->hidden,
        .x = yard_bench_ops_take_rows(set, YARD_F32, n, m->hidden, true),
        .weight_dtype = YARD_BF16,
        .weight = yard_bench_ops_take(set, YARD_BF16, m->hidden, true),
        .eps = 1e-6f,
        .y = place_out(m, set, n, m->hidden),
    };
}

static void run_norm(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->rms_norm_quant(s, &set->args.norm);
}

static void count_norm(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                       const yard_bench_ops_set *host, double *bytes, double *flops,
                       char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_rms_norm_args *a = &host->args.norm;

    (void)c;
    *flops = -1;
    *bytes = 4.0 * size->n_tokens * a->n_cols + 2.0 * a->n_cols +
             out_bytes(&a->y, size->n_tokens, a->n_cols);
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "hidden %u", a->n_cols);
}

static void place_silu(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                       yard_bench_ops_set *set, bool host)
{
    const yard_model_config *m = size->model;
    const uint32_t n = size->n_tokens, n_cols = m->n_experts ? m->expert_inter : m->dense_inter;

    (void)c;
    set->args.silu = (yard_silu_mul_args){
        .n_rows = yard_bench_ops_take_count(set, n, host),
        .max_rows = n,
        .n_cols = n_cols,
        .gate_up = yard_bench_ops_take_rows(set, YARD_BF16, n, 2 * n_cols, true),
        .y = place_out(m, set, n, n_cols),
    };
}

static void run_silu(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->silu_mul_quant(s, &set->args.silu);
}

static void count_silu(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                       const yard_bench_ops_set *host, double *bytes, double *flops,
                       char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_silu_mul_args *a = &host->args.silu;

    (void)c;
    *flops = -1;
    *bytes = 4.0 * size->n_tokens * a->n_cols + out_bytes(&a->y, size->n_tokens, a->n_cols);
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "inter %u", a->n_cols);
}

static bool has_fp8(const yard_bench_ops_size *size)
{
    return size->model->fp8;
}

static void place_quantise(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                           yard_bench_ops_set *set, bool host)
{
    const uint32_t n = size->n_tokens, n_cols = size->model->n_heads * size->model->v_dims;
    yard_quantise_args *a = &set->args.quantise;

    (void)c;
    *a = (yard_quantise_args){
        .n_rows = yard_bench_ops_take_count(set, n, host),
        .max_rows = n,
        .n_cols = n_cols,
        .x = yard_bench_ops_take_rows(set, YARD_BF16, n, n_cols, true),
        .y = yard_bench_ops_take_rows(set, YARD_FP8_E4M3, n, n_cols, false),
    };
    yard_bench_ops_add_out(set, a->y, n, n_cols, false);
}

static void run_quantise(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->quantise(s, &set->args.quantise);
}

static void count_quantise(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                           const yard_bench_ops_set *host, double *bytes, double *flops,
                           char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_quantise_args *a = &host->args.quantise;
    const double n = size->n_tokens;

    (void)c;
    *flops = -1;
    *bytes = yard_bench_ops_rows_bytes(a->x, n, a->n_cols) +
             yard_bench_ops_rows_bytes(a->y, n, a->n_cols);
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%u bf16", a->n_cols);
}

static yard_rope place_rope(const yard_bench_ops_size *size, yard_bench_ops_set *set)
{
    return (yard_rope){
        .inv_freq = yard_bench_ops_take(set, YARD_F32, size->model->rope_dims / 2, true),
        .n_dims = size->model->rope_dims,
    };
}

static void place_append(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         yard_bench_ops_set *set, bool host)
{
    const yard_model_config *m = size->model;
    const uint32_t n = size->n_tokens, width = m->kv_rank + m->rope_dims;
    const yard_latent_row row = yard_latent_row_of(YARD_FP8_E4M3, m->kv_rank, m->rope_dims);
    yard_rope_append_kv_args *a = &set->args.append;

    (void)c;
    yard_bench_ops_place_batch(size, set, 0, host);
    *a = (yard_rope_append_kv_args){
        .batch = &set->batch,
        .max_rows = size->n_tokens,
        .kv_rank = m->kv_rank,
        .kv = yard_bench_ops_take_rows(set, YARD_F32, n, width, true),
        .norm_dtype = YARD_BF16,
        .norm_weight = yard_bench_ops_take(set, YARD_BF16, m->kv_rank, true),
        .eps = 1e-6f,
        .rope = place_rope(size, set),
        .cache = yard_bench_ops_place_cache(size, set, 0, false),
    };
    if (a->cache.dtype == YARD_FP8_E4M3) /* codes and scales, word by word */
        yard_bench_ops_add_out(set, (yard_rows){ YARD_F32, row.n_bytes / 4, a->cache.data, NULL },
                               n, row.rope_at / 4, true);
    else
        yard_bench_ops_add_out(set, (yard_rows){ YARD_BF16, width, a->cache.data, NULL }, n, width,
                               false);
}

static void run_append(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->rope_append_kv(s, &set->args.append);
}

static void count_append(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         const yard_bench_ops_set *host, double *bytes, double *flops,
                         char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_rope_append_kv_args *a = &host->args.append;

    (void)c;
    *flops = -1;
    *bytes =
        size->n_tokens * (4.0 * a->cache.width +
                          yard_latent_row_of(a->cache.dtype, a->kv_rank, a->rope.n_dims).n_bytes);
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%u+%u%s", a->kv_rank, a->rope.n_dims,
             a->cache.dtype == YARD_FP8_E4M3 ? ", FP8 cache" : "");
}

/* The rows are rotated in place: every call turns them on, which costs the same. */
static void place_rope_q(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         yard_bench_ops_set *set, bool host)
{
    const yard_model_config *m = size->model;
    const uint32_t head_dim = m->nope_dims + m->rope_dims;
    yard_rope_q_args *a = &set->args.rope_q;

    (void)c;
    yard_bench_ops_place_batch(size, set, 0, host);
    *a = (yard_rope_q_args){
        .batch = &set->batch,
        .max_rows = size->n_tokens,
        .n_heads = m->n_heads,
        .head_dim = head_dim,
        .rope = place_rope(size, set),
        .q = yard_bench_ops_take_rows(set, YARD_BF16, size->n_tokens, m->n_heads * head_dim, true),
    };
    yard_bench_ops_add_out(set, a->q, size->n_tokens, m->n_heads * head_dim, false);
}

static void run_rope_q(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->rope_q(s, &set->args.rope_q);
}

static void count_rope_q(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         const yard_bench_ops_set *host, double *bytes, double *flops,
                         char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_rope_q_args *a = &host->args.rope_q;

    (void)c;
    *flops = -1;
    *bytes = 4.0 * size->n_tokens * a->n_heads * a->rope.n_dims;
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%u heads x %u", a->n_heads, a->rope.n_dims);
}

/* x is added to in place: a call changes its values, not its cost. */
static void place_residual(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                           yard_bench_ops_set *set, bool host)
{
    const uint32_t n = size->n_tokens, hidden = size->model->hidden;
    yard_residual_add_args *a = &set->args.residual;

    (void)c;
    *a = (yard_residual_add_args){
        .n_rows = yard_bench_ops_take_count(set, n, host),
        .max_rows = n,
        .n_cols = hidden,
        .x = yard_bench_ops_take(set, YARD_F32, (size_t)n * hidden, true),
        .a = yard_bench_ops_take_rows(set, YARD_F32, n, hidden, true),
        .b = yard_bench_ops_take_rows(set, YARD_F32, n, hidden, true),
    };
    yard_bench_ops_add_out(set, (yard_rows){ .ld = hidden, .data = a->x }, n, hidden, false);
}

static void run_residual(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->residual_add(s, &set->args.residual);
}

static void count_residual(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                           const yard_bench_ops_set *host, double *bytes, double *flops,
                           char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_residual_add_args *a = &host->args.residual;

    (void)c;
    *flops = -1;
    *bytes = 16.0 * size->n_tokens * a->n_cols;
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "hidden %u", a->n_cols);
}

#define CASE(op, applies, name, x)                                                                 \
    {                                                                                              \
        op, "", applies, place_##name, run_##name, NULL, yard_bench_ops_shrink_nothing,            \
            count_##name, x, 0                                                                     \
    }

const yard_bench_ops_case *yard_bench_ops_rows(uint32_t *n)
{
    static const yard_bench_ops_case list[] = {
        CASE("rms_norm_quant", always, norm, YARD_F32),
        CASE("silu_mul_quant", always, silu, YARD_F32),
        CASE("quantise", has_fp8, quantise, YARD_F32),
        CASE("rope_append_kv", has_latent, append, YARD_F32),
        CASE("rope_q", always, rope_q, YARD_F32),
        CASE("residual_add", always, residual, YARD_F32),
    };

    *n = sizeof(list) / sizeof(list[0]);
    return list;
}
