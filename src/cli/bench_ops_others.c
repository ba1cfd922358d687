/* bench ops: attention, router, dispatch and combine on one rank, and what works on single rows. */
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

static bool has_experts(const yard_bench_ops_size *size)
{
    return size->model->n_experts > 0;
}

static bool always(const yard_bench_ops_size *size)
{
    return size->model->hidden > 0;
}

/* ---- attention over the latent cache --------------------------------------------------------- */

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

yard_kv_layer yard_bench_ops_place_cache(const yard_bench_ops_size *size, yard_bench_ops_set *set,
                                         uint32_t n_generated, bool fill)
{
    const uint32_t n_pages = pages_a_seq(size, n_generated) * count_seqs(size, n_generated);
    const uint32_t width = yard_model_kv_width(size->model, 1);

    return (yard_kv_layer){ .dtype = YARD_BF16,
                            .width = width,
                            .data = yard_bench_ops_take(
                                set, YARD_BF16, (size_t)n_pages * YARD_PAGE_TOKENS * width, fill) };
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
    *set->n_rows = (int32_t)min_u32((uint32_t)*set->n_rows, SHRUNK_ROWS);
    set->outs[0].n_rows = (uint32_t)*set->n_rows;
    set->outs[0].n_cols = a->n_heads * a->kv_rank;
}

static void count_decode(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                         const yard_bench_ops_set *host, double *bytes, double *flops,
                         char shape[BENCH_OPS_SHAPE_BYTES])
{
    const yard_mla_decode_args *a = &host->args.decode;
    const double n = size->n_tokens, width = a->kv_rank + a->rope_dims;
    const double n_seqs = count_seqs(size, c->id);

    *flops = 2 * n * a->n_heads * (double)size->context * (width + a->kv_rank);
    *bytes = 2 * (n_seqs * size->context * width + n * a->n_heads * (width + a->kv_rank));
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%u heads x %u+%u, context %u, query %u", a->n_heads,
             a->kv_rank, a->rope_dims, size->context, c->id);
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
    *set->n_rows = (int32_t)min_u32((uint32_t)*set->n_rows, SHRUNK_PROMPT);
    set->outs[0].n_rows = (uint32_t)*set->n_rows;
    set->outs[0].n_cols = a->n_heads * a->v_dims;
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
             2 * n * (a->kv_rank + a->rope_dims + heads * (head_dim + a->v_dims));
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%u heads x %u+%u/%u, one prompt", a->n_heads,
             a->nope_dims, a->rope_dims, a->v_dims);
}

/* ---- experts ----------------------------------------------------------------------------------
 */

static void place_route(const yard_bench_ops_case *c, const yard_bench_ops_size *size,
                        yard_bench_ops_set *set, bool host)
{
    const yard_model_config *m = size->model;
    const uint32_t n = size->n_tokens;
    yard_moe_route_args *a = &set->args.route;

    (void)c;
    *a = (yard_moe_route_args){
        .n_rows = yard_bench_ops_take_count(set, n, host),
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

static void shrink_nothing(yard_bench_ops_set *set)
{
    (void)set; /* quick enough as it is */
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

/* ---- single rows ------------------------------------------------------------------------------
 */

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
    yard_rope_append_kv_args *a = &set->args.append;

    (void)c;
    yard_bench_ops_place_batch(size, set, 0, host);
    *a = (yard_rope_append_kv_args){
        .batch = &set->batch,
        .kv_rank = m->kv_rank,
        .kv = yard_bench_ops_take_rows(set, YARD_F32, n, width, true),
        .norm_dtype = YARD_BF16,
        .norm_weight = yard_bench_ops_take(set, YARD_BF16, m->kv_rank, true),
        .eps = 1e-6f,
        .rope = place_rope(size, set),
        .cache = yard_bench_ops_place_cache(size, set, 0, false),
    };
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
    *bytes = 6.0 * size->n_tokens * a->cache.width;
    snprintf(shape, BENCH_OPS_SHAPE_BYTES, "%u+%u", a->kv_rank, a->rope.n_dims);
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

/* ---- the list ---------------------------------------------------------------------------------
 */

#define CASE(op, applies, name, shrink, x)                                                         \
    {                                                                                              \
        op, "", applies, place_##name, run_##name, NULL, shrink, count_##name, x, 0                \
    }

const yard_bench_ops_case *yard_bench_ops_others(uint32_t *n)
{
    static const yard_bench_ops_case list[] = {
        { "mla_decode", "query1", has_latent, place_decode, run_decode, NULL, shrink_decode,
          count_decode, YARD_BF16, 1 },
        { "mla_decode", "query2", has_latent, place_decode, run_decode, NULL, shrink_decode,
          count_decode, YARD_BF16, 2 },
        { "mla_prefill", "", has_latent, place_prefill, run_prefill, prepare_prefill,
          shrink_prefill, count_prefill, YARD_BF16, 0 },
        CASE("moe_route", has_experts, route, shrink_nothing, YARD_F32),
        CASE("moe_scatter", has_experts, scatter, shrink_nothing, YARD_F32),
        CASE("moe_gather", has_experts, gather, shrink_nothing, YARD_F32),
        CASE("rms_norm_quant", always, norm, shrink_nothing, YARD_F32),
        CASE("silu_mul_quant", always, silu, shrink_nothing, YARD_F32),
        CASE("quantise", has_fp8, quantise, shrink_nothing, YARD_F32),
        CASE("rope_append_kv", has_latent, append, shrink_nothing, YARD_F32),
        CASE("rope_q", always, rope_q, shrink_nothing, YARD_F32),
        CASE("residual_add", always, residual, shrink_nothing, YARD_F32),
    };

    *n = sizeof(list) / sizeof(list[0]);
    return list;
}
