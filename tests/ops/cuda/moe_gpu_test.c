/* Router, local dispatch and combine on the GPU, against the CPU's bits. */
#include <math.h>
#include <stdlib.h>

#include "both_gpu_test.h"

enum { SPARE_ROWS = 2, N_COUNTS = 7 };
static const uint32_t counts[N_COUNTS] = { 0, 1, 2, 7, 64, 129, 1000 };

typedef struct router {
    const char *name;
    uint32_t n_experts, top_k, n_groups, top_groups;
    yard_router_score score;
    yard_group_value group_value;
    bool bias, normalise;
} router;

static const router routers[] = {
    { "demo", 16, 4, 4, 2, YARD_SCORE_SIGMOID, YARD_GROUP_TWO_LARGEST, true, true },
    { "v2-lite", 64, 6, 1, 1, YARD_SCORE_SOFTMAX, YARD_GROUP_LARGEST, false, false },
    { "mixtral", 8, 2, 1, 1, YARD_SCORE_SOFTMAX, YARD_GROUP_LARGEST, false, true },
    { "v2", 160, 6, 8, 3, YARD_SCORE_SOFTMAX, YARD_GROUP_LARGEST, false, false },
    { "v3", 256, 8, 8, 4, YARD_SCORE_SIGMOID, YARD_GROUP_TWO_LARGEST, true, true },
    { "k2", 384, 8, 1, 1, YARD_SCORE_SIGMOID, YARD_GROUP_TWO_LARGEST, true, true },
    { "odd", 45, 45, 15, 7, YARD_SCORE_SIGMOID, YARD_GROUP_TWO_LARGEST, false, true },
    { "lone groups", 12, 5, 12, 6, YARD_SCORE_SIGMOID, YARD_GROUP_TWO_LARGEST, true, false },
    { "many", 512, 64, 32, 9, YARD_SCORE_SOFTMAX, YARD_GROUP_TWO_LARGEST, true, true },
};
enum { N_ROUTERS = sizeof(routers) / sizeof(routers[0]) };

/* Every third case does not say how many rows there may be. */
static uint32_t room(both *t, uint32_t n)
{
    return both_below(t, 3) == 0 ? 0 : n + SPARE_ROWS;
}

static void call_route(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->moe_route(s, args);
}

/* Rows of all kinds: ordinary, with ties, steep, and with what is no number. */
static void fill_logits(both *t, const rows_twin *logits)
{
    for (uint32_t row = 0; row < logits->n_rows; row++)
        for (uint32_t e = 0; e < logits->n_cols; e++) {
            float *x = (float *)logits->host.data + (size_t)row * logits->n_cols + e;
            switch (row % 7) {
            case 1:
                *x = rintf(*x * 3);
                break;
            case 2:
                *x *= 200;
                break;
            case 3:
                *x = 0.5f;
                break;
            case 4:
                if (both_below(t, 10) == 0)
                    *x = both_below(t, 2) ? NAN : both_below(t, 2) ? INFINITY : -INFINITY;
                break;
            default:
                *x *= 4;
            }
        }
}

static void route_case(both *t, const router *r, uint32_t n)
{
    const bed *b = &t->b;
    rows_twin logits = { 0 }, bias = { 0 };
    twin expert = { 0 }, weight = { 0 };
    const size_t n_chosen = (size_t)(n + SPARE_ROWS) * r->top_k;
    const bool ok =
        rows_create(b, &logits, YARD_F32, n + SPARE_ROWS, r->n_experts, r->n_experts, true) &&
        rows_create(b, &bias, YARD_F32, 1, r->n_experts, r->n_experts, true) &&
        twin_create(b, &expert, n_chosen * sizeof(int32_t)) &&
        twin_create(b, &weight, n_chosen * sizeof(float)) && both_set_count(t, n);
    const yard_moe_route_args host = { .n_rows = t->n_rows.host,
                                       .max_rows = room(t, n),
                                       .n_experts = r->n_experts,
                                       .top_k = r->top_k,
                                       .n_groups = r->n_groups,
                                       .top_groups = r->top_groups,
                                       .score = r->score,
                                       .group_value = r->group_value,
                                       .normalise = r->normalise,
                                       .scale = 2.5f,
                                       .logits = logits.data.host,
                                       .bias = r->bias ? bias.data.host : NULL,
                                       .expert = expert.host,
                                       .weight = weight.host };
    yard_moe_route_args device = host;

    device.n_rows = t->n_rows.device;
    device.logits = logits.data.device;
    device.bias = r->bias ? bias.data.device : NULL;
    device.expert = expert.device;
    device.weight = weight.device;
    if (ok) {
        fill_logits(t, &logits);
        if (twin_upload(b, &logits.data))
            both_run(t, call_route, &host, &device);
    }
    gpu_test_case(b->t, ok && both_same(t, &expert), "route %s, %u rows: experts", r->name, n);
    gpu_test_case(b->t, ok && both_same_floats(t, &weight), "route %s, %u rows: weights", r->name,
                  n);
    rows_destroy(b, &logits);
    rows_destroy(b, &bias);
    twin_destroy(b, &expert);
    twin_destroy(b, &weight);
}

static void refuses(both *t)
{
    yard_stream s = NULL;
    yard_error err = { 0 };
    const yard_ops_config config = { .limits = { .max_tokens = 8 } };

    if (t->b.ops->open(&s, &config, &err) != YARD_OK)
        return;
    t->b.ops->moe_route(s, &(yard_moe_route_args){ .n_experts = 1000, .top_k = 8, .n_groups = 1 });
    gpu_test_case(t->b.t, t->b.ops->check(s, &err) == YARD_EINVAL,
                  "route: too many experts are refused");
    t->b.ops->close(s);
}

void gpu_test_route(gpu_test *test)
{
    both t;

    if (!both_open(&t, test))
        return;
    refuses(&t);
    for (int r = 0; r < N_ROUTERS; r++)
        for (int c = 0; c < N_COUNTS - (int)test->quick; c++)
            route_case(&t, &routers[r], counts[c]);
    if (!test->quick)
        route_case(&t, &routers[0], 1300); /* more than there are blocks */
    both_close(&t);
}

typedef struct moe_twin {
    rows_twin x, expert_x, y;
    twin expert, offset, row_index, row_choice, weight;
    uint32_t max_rows;
} moe_twin;

static void call_scatter(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->moe_scatter(s, args);
}

static void call_offsets(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->count_offsets(s, args);
}

static void call_gather(const yard_ops *ops, yard_stream s, const void *args)
{
    ops->moe_gather(s, args);
}

static void scatter(both *t, moe_twin *m, uint32_t n_experts, uint32_t top_k)
{
    const yard_moe_scatter_args host = { .n_tokens = t->n_rows.host,
                                         .max_rows = m->max_rows,
                                         .n_experts = n_experts,
                                         .top_k = top_k,
                                         .n_cols = m->x.n_cols,
                                         .expert = m->expert.host,
                                         .x = m->x.host,
                                         .offset = m->offset.host,
                                         .row_index = m->row_index.host,
                                         .expert_x = m->expert_x.host,
                                         .row_choice = m->row_choice.host };
    yard_moe_scatter_args device = host;

    device.n_tokens = t->n_rows.device;
    device.expert = m->expert.device;
    device.x = m->x.device;
    device.offset = m->offset.device;
    device.row_index = m->row_index.device;
    device.expert_x = m->expert_x.device;
    device.row_choice = m->row_choice.device;
    both_run(t, call_scatter, &host, &device);
}

/* Reads the rows that scatter made, where they are f32 or bf16. */
static void gather(both *t, moe_twin *m, uint32_t top_k)
{
    const yard_moe_gather_args host = { .n_tokens = t->n_rows.host,
                                        .max_rows = m->max_rows,
                                        .top_k = top_k,
                                        .n_cols = m->x.n_cols,
                                        .row_index = m->row_index.host,
                                        .weight = m->weight.host,
                                        .expert_y = m->expert_x.host,
                                        .y = m->y.data.host };
    yard_moe_gather_args device = host;

    device.n_tokens = t->n_rows.device;
    device.row_index = m->row_index.device;
    device.weight = m->weight.device;
    device.expert_y = m->expert_x.device;
    device.y = m->y.data.device;
    both_run(t, call_gather, &host, &device);
}

static void moe_case(both *t, uint32_t n, uint32_t n_experts, uint32_t top_k, uint32_t cols,
                     yard_dtype dtype, uint32_t pad)
{
    const bed *b = &t->b;
    const uint32_t n_rows = n * top_k, n_room = (n + SPARE_ROWS) * top_k;
    moe_twin m = { .max_rows = room(t, n) };
    bool ok = rows_create(b, &m.x, dtype, n + SPARE_ROWS, cols, cols + pad, true) &&
              rows_create(b, &m.expert_x, dtype, n_room, cols, cols + pad, false) &&
              rows_create(b, &m.y, YARD_F32, n + SPARE_ROWS, cols, cols, false) &&
              twin_create(b, &m.expert, n_room * sizeof(int32_t)) &&
              twin_create(b, &m.row_index, n_room * sizeof(int32_t)) &&
              twin_create(b, &m.row_choice, n_room * sizeof(int32_t)) &&
              twin_create(b, &m.weight, n_room * sizeof(float)) &&
              twin_create(b, &m.offset, (n_experts + 2) * sizeof(int32_t)) && both_set_count(t, n);

    for (uint32_t i = 0; ok && i < n_rows; i++) {
        ((int32_t *)m.expert.host)[i] =
            both_below(t, 9) == 0 ? -1 : (int32_t)both_below(t, both_below(t, n_experts) + 1);
        ((float *)m.weight.host)[i] = (float)both_below(t, 1000) * 1e-3f;
    }
    ok = ok && twin_upload(b, &m.expert) && twin_upload(b, &m.weight);
    if (ok)
        scatter(t, &m, n_experts, top_k);
    gpu_test_case(b->t,
                  ok && both_same(t, &m.offset) && both_same(t, &m.row_index) &&
                      both_same(t, &m.row_choice) && both_same_rows(t, &m.expert_x),
                  "scatter: %u x %u %s to %u of %u experts", n, cols, yard_dtype_name(dtype), top_k,
                  n_experts);
    if (ok && dtype != YARD_FP8_E4M3) {
        gather(t, &m, top_k);
        gpu_test_case(b->t, both_same_rows(t, &m.y), "gather: %u x %u %s from %u", n, cols,
                      yard_dtype_name(dtype), top_k);
    }
    rows_destroy(b, &m.x);
    rows_destroy(b, &m.expert_x);
    rows_destroy(b, &m.y);
    twin_destroy(b, &m.expert);
    twin_destroy(b, &m.row_index);
    twin_destroy(b, &m.row_choice);
    twin_destroy(b, &m.weight);
    twin_destroy(b, &m.offset);
}

static void offsets_case(both *t, uint32_t n_groups)
{
    const bed *b = &t->b;
    twin count = { 0 }, offset = { 0 };
    bool ok = twin_create(b, &count, (n_groups + 1) * sizeof(int32_t)) &&
              twin_create(b, &offset, (n_groups + 2) * sizeof(int32_t));
    const yard_count_offsets_args host = { .n_groups = n_groups,
                                           .count = count.host,
                                           .offset = offset.host };
    yard_count_offsets_args device = host;

    device.count = count.device;
    device.offset = offset.device;
    for (uint32_t i = 0; ok && i < n_groups; i++)
        ((int32_t *)count.host)[i] = (int32_t)both_below(t, 300);
    ok = ok && twin_upload(b, &count);
    if (ok)
        both_run(t, call_offsets, &host, &device);
    gpu_test_case(b->t, ok && both_same(t, &offset), "count_offsets: %u groups", n_groups);
    twin_destroy(b, &count);
    twin_destroy(b, &offset);
}

void gpu_test_moe(gpu_test *test)
{
    static const yard_dtype dtypes[] = { YARD_FP8_E4M3, YARD_BF16, YARD_F32 };
    both t;

    if (!both_open(&t, test))
        return;
    for (uint32_t n_groups = 1; n_groups < 3000; n_groups = n_groups * 3 + 1)
        offsets_case(&t, n_groups);
    for (int c = 0; c < N_COUNTS - (int)test->quick; c++)
        for (int d = 0; d < 3; d++) {
            moe_case(&t, counts[c], 16, 4, 256, dtypes[d], 0);
            moe_case(&t, counts[c], 384, 8, 100, dtypes[d], d == 1 ? 3 : 0);
            if (test->quick)
                continue;
            moe_case(&t, counts[c], 256, 8, 7168, dtypes[d], 0);
            moe_case(&t, counts[c], 8, 2, 4096, dtypes[d], 0);
        }
    both_close(&t);
}
