/* bench ops: router, dispatch and combine on one rank. */
#include <stdio.h>

#include "cli/bench_ops.h"

static bool has_experts(const yard_bench_ops_size *size)
{
    return size->model->n_experts > 0;
}

static void place_route(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                        yard_bench_ops_set *set, bool host)
{
    const yard_model_config *m = size->model;
    const uint32_t n = size->n_tokens;
    yard_moe_route_args *a = &set->args.route;

    (void)c;
    *a = (yard_moe_route_args){
        .n_rows = yard_bench_ops_take_count(set, n, host),
        .max_rows = n,
        .n_experts = m->n_experts,
        .top_k = m->top_k,
        .n_groups = m->n_groups,
        .top_groups = m->top_groups,
        .score = m->score,
        .normalise = m->normalise_topk,
        .scale = m->routed_scale,
        .logits = yard_bench_ops_take(set, YARD_F32, (size_t)n * m->n_experts, true),
        .bias = m->score == YARD_SCORE_SIGMOID
                    ? yard_bench_ops_take(set, YARD_F32, m->n_experts, true)
                    : NULL,
        .expert = yard_bench_ops_take_ints(set, (size_t)n * m->top_k),
        .weight = yard_bench_ops_take(set, YARD_F32, (size_t)n * m->top_k, false),
    };
    yard_bench_ops_add_out(set, (yard_rows){ .ld = m->top_k, .data = a->expert }, n, m->top_k,
                           true);
    yard_bench_ops_add_out(set, (yard_rows){ .ld = m->top_k, .data = a->weight }, n, m->top_k,
                           false);
}

static void run_route(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->moe_route(s, &set->args.route);
}

static void count_route(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                        const yard_bench_ops_set *host, double *bytes, double *flops,
                        char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_moe_route_args *a = &host->args.route;

    (void)c;
    *flops = -1;
    *bytes =
        4.0 * size->n_tokens * (a->n_experts + 2 * a->top_k) + (a->bias ? 4.0 * a->n_experts : 0);
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%u of %u experts, %u of %u groups", a->top_k,
             a->n_experts, a->top_groups, a->n_groups);
}

static void choose_experts(const yard_bench_ops_size *size, int32_t *expert)
{
    uint64_t state = 1;
    size_t n = 0;

    for (uint32_t t = 0; t < size->n_tokens; t++)
        for (uint32_t e = 0, seen = 0; seen < size->model->top_k; e++)
            if (yard_bench_ops_random(&state, size->model->n_experts - e) <
                size->model->top_k - seen) {
                expert[n++] = (int32_t)e;
                seen++;
            }
}

static void place_scatter(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                          yard_bench_ops_set *set, bool host)
{
    const yard_model_config *m = size->model;
    const yard_dtype dtype = m->fp8 ? YARD_FP8_E4M3 : YARD_BF16;
    const size_t n_rows = (size_t)size->n_tokens * m->top_k;
    int32_t *expert = yard_bench_ops_take_ints(set, n_rows);
    yard_moe_scatter_args *a = &set->args.scatter;

    (void)c;
    *a = (yard_moe_scatter_args){
        .n_tokens = yard_bench_ops_take_count(set, size->n_tokens, host),
        .max_rows = size->n_tokens,
        .n_experts = m->n_experts,
        .top_k = m->top_k,
        .n_cols = m->hidden,
        .expert = expert,
        .x = yard_bench_ops_take_rows(set, dtype, size->n_tokens, m->hidden, true),
        .offset = yard_bench_ops_take_ints(set, m->n_experts + 1),
        .row_index = yard_bench_ops_take_ints(set, n_rows),
        .expert_x = yard_bench_ops_take_rows(set, dtype, n_rows, m->hidden, false),
    };
    yard_bench_ops_add_out(set, a->expert_x, (uint32_t)n_rows, m->hidden, false);
    yard_bench_ops_add_out(set, (yard_rows){ .ld = m->top_k, .data = a->row_index }, size->n_tokens,
                           m->top_k, true);
    if (host)
        choose_experts(size, expert);
}

static void run_scatter(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->moe_scatter(s, &set->args.scatter);
}

static void count_scatter(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                          const yard_bench_ops_set *host, double *bytes, double *flops,
                          char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_moe_scatter_args *a = &host->args.scatter;
    const double row_bytes = yard_bench_ops_rows_bytes(a->x, 1, a->n_cols);

    (void)c;
    *flops = -1;
    *bytes = size->n_tokens * (1.0 + a->top_k) * row_bytes;
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "hidden %u %s to %u experts", a->n_cols,
             yard_dtype_name(a->x.dtype), a->top_k);
}

static void place_gather(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         yard_bench_ops_set *set, bool host)
{
    const yard_model_config *m = size->model;
    const size_t n_rows = (size_t)size->n_tokens * m->top_k;
    int32_t *row_index = yard_bench_ops_take_ints(set, n_rows);
    yard_moe_gather_args *a = &set->args.gather;

    (void)c;
    *a = (yard_moe_gather_args){
        .n_tokens = yard_bench_ops_take_count(set, size->n_tokens, host),
        .max_rows = size->n_tokens,
        .top_k = m->top_k,
        .n_cols = m->hidden,
        .row_index = row_index,
        .weight = yard_bench_ops_take(set, YARD_F32, n_rows, true),
        .expert_y = yard_bench_ops_take_rows(set, YARD_BF16, n_rows, m->hidden, true),
        .y = yard_bench_ops_take(set, YARD_F32, (size_t)size->n_tokens * m->hidden, false),
    };
    yard_bench_ops_add_out(set, (yard_rows){ .ld = m->hidden, .data = a->y }, size->n_tokens,
                           m->hidden, false);
    /* rows of one token lie far apart, as experts do */
    for (uint32_t t = 0; host && t < size->n_tokens; t++)
        for (uint32_t k = 0; k < m->top_k; k++)
            row_index[t * m->top_k + k] = (int32_t)(k * size->n_tokens + t);
}

static void run_gather(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->moe_gather(s, &set->args.gather);
}

static void count_gather(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         const yard_bench_ops_set *host, double *bytes, double *flops,
                         char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_moe_gather_args *a = &host->args.gather;

    (void)c;
    *flops = 2.0 * size->n_tokens * a->top_k * a->n_cols;
    *bytes = size->n_tokens * (2.0 * a->top_k + 4.0) * a->n_cols;
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "hidden %u bf16 from %u experts", a->n_cols, a->top_k);
}

#define CASE(op, applies, name, x)                                                                 \
    {                                                                                              \
        op, "", applies, place_##name, run_##name, NULL, yard_bench_ops_shrink_nothing,            \
            count_##name, x, 0                                                                     \
    }

const yard_bench_ops_case *yard_bench_ops_moe(uint32_t *n)
{
    static const yard_bench_ops_case list[] = {
        CASE("moe_route", has_experts, route, YARD_F32),
        CASE("moe_scatter", has_experts, scatter, YARD_F32),
        CASE("moe_gather", has_experts, gather, YARD_F32),
    };

    *n = sizeof(list) / sizeof(list[0]);
    return list;
}
