/* bench ops: matrix products. */
#include <stdio.h>
#include <stdlib.h>

#include "cli/bench_ops.h"

enum { SHRUNK_ROWS = 2, SHRUNK_COLUMNS = 256, SHRUNK_HEADS = 2 };

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static yard_dtype weights_of(const yard_model_config *m)
{
    return m->fp8 ? YARD_FP8_E4M3 : YARD_BF16;
}

enum {
    Q_A,
    Q_B,
    KV_A,
    K, /* V has the same shape */
    O,
    DENSE_GATE,
    DENSE_DOWN,
    SHARED_GATE,
    SHARED_DOWN,
    ROUTER,
    HEAD,
    EXPERT_GATE,
    EXPERT_DOWN
};

/* [rows, cols] of a use; rows 0: the model has no such one. */
static void dimensions(const yard_model_config *m, uint32_t id, uint32_t *rows, uint32_t *cols)
{
    const uint32_t q_rows = m->n_heads * (m->nope_dims + m->rope_dims);
    const uint32_t shared = m->n_shared_experts * m->expert_inter;
    const uint32_t dims[][2] = {
        [Q_A] = { m->q_rank, m->hidden },
        [Q_B] = { q_rows, m->q_rank ? m->q_rank : m->hidden },
        [KV_A] = { m->kv_rank ? m->kv_rank + m->rope_dims : 0, m->hidden },
        [K] = { m->attention == YARD_ATTENTION_GQA ? m->n_kv_heads * m->rope_dims : 0, m->hidden },
        [O] = { m->v_dims ? m->hidden : 0, m->n_heads * m->v_dims },
        [DENSE_GATE] = { m->n_dense_layers ? m->dense_inter : 0, m->hidden },
        [DENSE_DOWN] = { m->n_dense_layers ? m->hidden : 0, m->dense_inter },
        [SHARED_GATE] = { shared, m->hidden },
        [SHARED_DOWN] = { shared ? m->hidden : 0, shared },
        [ROUTER] = { m->n_experts, m->hidden },
        [HEAD] = { m->vocab, m->hidden },
        [EXPERT_GATE] = { m->n_experts ? m->expert_inter : 0, m->hidden },
        [EXPERT_DOWN] = { m->n_experts ? m->hidden : 0, m->expert_inter },
    };

    *rows = dims[id][0];
    *cols = dims[id][1];
}

/* Router and head are never FP8. */
static yard_dtype weight_dtype(const yard_model_config *m, uint32_t id)
{
    return id == ROUTER || id == HEAD ? YARD_BF16 : weights_of(m);
}

#define LINEAR_APPLIES(name, use)                                                                  \
    static bool name(const yard_bench_ops_size *size)                                              \
    {                                                                                              \
        uint32_t rows, cols;                                                                       \
        dimensions(size->model, use, &rows, &cols);                                                \
        return rows > 0;                                                                           \
    }
LINEAR_APPLIES(has_q_a, Q_A)
LINEAR_APPLIES(has_q_b, Q_B)
LINEAR_APPLIES(has_kv_a, KV_A)
LINEAR_APPLIES(has_k, K)
LINEAR_APPLIES(has_o, O)
LINEAR_APPLIES(has_dense, DENSE_GATE)
LINEAR_APPLIES(has_shared, SHARED_GATE)
LINEAR_APPLIES(has_experts, EXPERT_GATE)
LINEAR_APPLIES(has_head, HEAD)

static void place_linear(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         yard_bench_ops_set *set, bool host)
{
    yard_linear_args *a = &set->args.linear;
    const yard_dtype dtype = weight_dtype(size->model, c->id);
    uint32_t rows, cols;

    dimensions(size->model, c->id, &rows, &cols);
    *a = (yard_linear_args){
        .n_rows = yard_bench_ops_take_count(set, size->n_tokens, host),
        .max_rows = size->n_tokens,
        .x = yard_bench_ops_take_rows(set, dtype, size->n_tokens, cols, true),
        .w = yard_bench_ops_take_matrix(set, dtype, rows, cols, size->model->block_rows),
        .y = yard_bench_ops_take_rows(set, c->id == HEAD || c->id == ROUTER ? YARD_F32 : YARD_BF16,
                                      size->n_tokens, rows, false),
    };
    yard_bench_ops_add_out(set, a->y, size->n_tokens, rows, false);
}

static void run_linear(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->linear(s, &set->args.linear);
}

static yard_status prepare_linear(const yard_ops *ops, yard_stream s,
                                  const yard_bench_ops_set *host, yard_bench_ops_set *set,
                                  yard_error *err)
{
    const yard_prepare_args a = { .parts = &host->args.linear.w, .n_matrices = 1, .n_parts = 1 };

    return ops->prepare(&set->prepared, &set->args.linear.w, s, &a, err);
}

static void shrink_linear(yard_bench_ops_set *set)
{
    yard_matrix *w = &set->args.linear.w;

    w->rows = min_u32(w->rows, SHRUNK_COLUMNS);
    yard_bench_ops_shrink_rows(set, SHRUNK_ROWS, w->rows);
}

static void count_linear(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         const yard_bench_ops_set *host, double *bytes, double *flops,
                         char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_linear_args *a = &host->args.linear;
    const double n = size->n_tokens;

    *flops = 2 * n * a->w.rows * a->w.cols;
    *bytes = yard_bench_ops_matrix_bytes(&a->w) + yard_bench_ops_rows_bytes(a->x, n, a->w.cols) +
             yard_bench_ops_rows_bytes(a->y, n, a->w.rows);
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%s %ux%u %s", c->what, a->w.rows, a->w.cols,
             yard_dtype_name(a->w.dtype));
}

/* How many rows each of this rank's experts gets when the tokens choose top_k of them each. */
static void draw_offsets(const yard_bench_ops_size *size, int32_t *offset)
{
    const uint32_t n = size->n_experts, top_k = min_u32(size->model->top_k, n);
    uint64_t state = 1;

    memset(offset, 0, (n + 1) * sizeof(*offset));
    for (uint32_t t = 0; t < size->n_tokens; t++)
        for (uint32_t k = 0, seen = 0; seen < top_k; k++) /* choose exactly top_k of n */
            if (yard_bench_ops_random(&state, n - k) < top_k - seen) {
                offset[k + 1]++;
                seen++;
            }
    for (uint32_t e = 0; e < n; e++)
        offset[e + 1] += offset[e];
}

static void place_grouped(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                          yard_bench_ops_set *set, bool host)
{
    yard_grouped_linear_args *a = &set->args.grouped;
    const yard_dtype dtype = weights_of(size->model);
    const uint32_t n = size->n_experts;
    const size_t n_rows = (size_t)size->n_tokens * min_u32(size->model->top_k, n);
    int32_t *offset = yard_bench_ops_take_ints(set, n + 1);
    uint32_t rows, cols;
    yard_matrix all;

    dimensions(size->model, c->id, &rows, &cols);
    all = yard_bench_ops_take_matrix(set, dtype, n * rows, cols, size->model->block_rows);
    if (!set->w)
        set->w = calloc(n, sizeof(*set->w));
    for (uint32_t g = 0; set->w && g < n; g++) {
        set->w[g] = all;
        set->w[g].rows = rows;
        set->w[g].row0 = g * rows;
        set->w[g].data =
            (const uint8_t *)all.data + (size_t)g * rows * cols * yard_dtype_bytes(dtype);
    }
    *a = (yard_grouped_linear_args){
        .n_groups = n,
        .offset = offset,
        .max_rows = (uint32_t)n_rows,
        .x = yard_bench_ops_take_rows(set, dtype, n_rows, cols, true),
        .w = set->w,
        .y = yard_bench_ops_take_rows(set, YARD_BF16, n_rows, rows, false),
    };
    yard_bench_ops_add_out(set, a->y, (uint32_t)n_rows, rows, false);
    if (host)
        draw_offsets(size, offset);
}

static void run_grouped(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->grouped_linear(s, &set->args.grouped);
}

static yard_status prepare_grouped(const yard_ops *ops, yard_stream s,
                                   const yard_bench_ops_set *host, yard_bench_ops_set *set,
                                   yard_error *err)
{
    const yard_prepare_args a = { .parts = host->w,
                                  .n_matrices = host->args.grouped.n_groups,
                                  .n_parts = 1 };

    return ops->prepare(&set->prepared, set->w, s, &a, err);
}

/* The first rows, whosever they are. */
static void shrink_grouped(yard_bench_ops_set *set)
{
    yard_grouped_linear_args *a = &set->args.grouped;
    int32_t *offset = (int32_t *)a->offset;
    const uint32_t rows = min_u32(a->w[0].rows, SHRUNK_COLUMNS);

    for (uint32_t g = 0; g <= a->n_groups; g++)
        offset[g] = offset[g] < SHRUNK_ROWS ? offset[g] : SHRUNK_ROWS;
    for (uint32_t g = 0; g < a->n_groups; g++)
        set->w[g].rows = rows;
    set->outs[0].n_rows = (uint32_t)offset[a->n_groups];
    set->outs[0].n_cols = rows;
}

static void count_grouped(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                          const yard_bench_ops_set *host, double *bytes, double *flops,
                          char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_grouped_linear_args *a = &host->args.grouped;
    const double n = a->offset[a->n_groups];
    uint32_t active = 0;

    (void)size;
    for (uint32_t g = 0; g < a->n_groups; g++)
        active += a->offset[g + 1] > a->offset[g];
    *flops = 2 * n * a->w[0].rows * a->w[0].cols;
    *bytes = active * yard_bench_ops_matrix_bytes(&a->w[0]) +
             yard_bench_ops_rows_bytes(a->x, n, a->w[0].cols) +
             yard_bench_ops_rows_bytes(a->y, n, a->w[0].rows);
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%s %u of %u x %ux%u %s", c->what, active, a->n_groups,
             a->w[0].rows, a->w[0].cols, yard_dtype_name(a->w[0].dtype));
}

enum { K_B, V_B };

static bool has_latent(const yard_bench_ops_size *size)
{
    return size->model->kv_rank > 0;
}

static void place_head(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                       yard_bench_ops_set *set, bool host)
{
    const yard_model_config *m = size->model;
    const uint32_t in = c->id == K_B ? m->nope_dims + m->rope_dims : m->kv_rank;
    const uint32_t out = c->id == K_B ? m->kv_rank : m->v_dims;
    const uint32_t head_rows = m->nope_dims + m->v_dims;
    yard_head_linear_args *a = &set->args.head;

    *a = (yard_head_linear_args){
        .n_rows = yard_bench_ops_take_count(set, size->n_tokens, host),
        .max_rows = size->n_tokens,
        .n_heads = m->n_heads,
        .head_rows = c->id == K_B ? m->nope_dims : m->v_dims,
        .head_stride = head_rows,
        .head_offset = c->id == K_B ? 0 : m->nope_dims,
        .transposed = c->id == K_B,
        .quantise = m->fp8,
        .w = yard_bench_ops_take_matrix(set, weights_of(m), m->n_heads * head_rows, m->kv_rank,
                                        m->block_rows),
        .x = yard_bench_ops_take_rows(set, YARD_BF16, size->n_tokens, m->n_heads * in, true),
        .x_head_stride = in,
        .y = yard_bench_ops_take_rows(set, YARD_BF16, size->n_tokens, m->n_heads * out, false),
        .y_head_stride = out,
    };
    yard_bench_ops_add_out(set, a->y, size->n_tokens, m->n_heads * out, false);
}

static void run_head(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *set)
{
    ops->head_linear(s, &set->args.head);
}

static yard_status prepare_head(const yard_ops *ops, yard_stream s, const yard_bench_ops_set *host,
                                yard_bench_ops_set *set, yard_error *err)
{
    const yard_head_linear_args *h = &host->args.head;
    const yard_prepare_args a = {
        .parts = &h->w, .n_matrices = 1, .n_parts = 1, .absorb = h->transposed ? h : NULL
    };

    return ops->prepare(&set->prepared, &set->args.head.w, s, &a, err);
}

static void shrink_head(yard_bench_ops_set *set)
{
    yard_head_linear_args *a = &set->args.head;

    a->n_heads = min_u32(a->n_heads, SHRUNK_HEADS);
    yard_bench_ops_shrink_rows(set, SHRUNK_ROWS, a->n_heads * a->y_head_stride);
}

static void count_head(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                       const yard_bench_ops_set *host, double *bytes, double *flops,
                       char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_head_linear_args *a = &host->args.head;
    const double n = size->n_tokens, heads = a->n_heads;

    *flops = 2 * n * heads * a->head_rows * a->w.cols;
    *bytes =
        yard_bench_ops_matrix_bytes(&a->w) * a->head_rows / a->head_stride +
        yard_bench_ops_rows_bytes(a->x, n, heads * (a->transposed ? a->head_rows : a->w.cols)) +
        yard_bench_ops_rows_bytes(a->y, n, heads * a->y_head_stride);
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%s %u x %ux%u %s", c->what, a->n_heads, a->head_rows,
             a->w.cols, yard_dtype_name(a->w.dtype));
}

#define LINEAR_OF(dtype, use, name, applies)                                                       \
    {                                                                                              \
        "linear", name, applies, place_linear, run_linear, prepare_linear, shrink_linear,          \
            count_linear, dtype, use,                                                              \
    }
#define LINEAR(use, name, applies) LINEAR_OF(YARD_FP8_E4M3, use, name, applies)
#define GROUPED(use, name)                                                                         \
    {                                                                                              \
        "grouped_linear", name, has_experts, place_grouped, run_grouped, prepare_grouped,          \
            shrink_grouped, count_grouped, YARD_FP8_E4M3, use,                                     \
    }
#define PER_HEAD(use, name)                                                                        \
    {                                                                                              \
        "head_linear", name, has_latent, place_head, run_head, prepare_head, shrink_head,          \
            count_head, YARD_FP8_E4M3, use,                                                        \
    }

const yard_bench_ops_case *yard_bench_ops_products(uint32_t *n)
{
    static const yard_bench_ops_case list[] = {
        LINEAR(Q_A, "q_a", has_q_a),
        LINEAR(Q_B, "q_b", has_q_b),
        LINEAR(KV_A, "kv_a", has_kv_a),
        LINEAR(K, "k", has_k),
        LINEAR(O, "o", has_o),
        LINEAR(DENSE_GATE, "dense_gate", has_dense),
        LINEAR(DENSE_DOWN, "dense_down", has_dense),
        LINEAR(SHARED_GATE, "shared_gate", has_shared),
        LINEAR(SHARED_DOWN, "shared_down", has_shared),
        LINEAR_OF(YARD_BF16, ROUTER, "router", has_experts),
        LINEAR_OF(YARD_BF16, HEAD, "head", has_head),
        GROUPED(EXPERT_GATE, "expert_gate"),
        GROUPED(EXPERT_DOWN, "expert_down"),
        PER_HEAD(K_B, "k_b"),
        PER_HEAD(V_B, "v_b"),
    };

    *n = sizeof(list) / sizeof(list[0]);
    return list;
}
