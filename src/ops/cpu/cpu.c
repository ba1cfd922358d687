/* The CPU table: streams, scratch, and which function is which operation. Operations run at once,
 * on the calling thread and the pool's. */
#include "ops/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>

#include "ops/cpu/sample.h"

static uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static float *take_floats(yard_arena *arena, size_t n)
{
    return yard_arena_take(arena, n * sizeof(float));
}

/* Called twice: to measure (arena->base NULL), then to place. */
static void lay_out(yard_arena *arena, struct yard_stream_s *s, uint32_t n_threads)
{
    const yard_ops_limits *l = &s->limits;
    const uint32_t head_dim = pad_lanes(l->nope_dims + l->rope_dims);
    const uint32_t latent = pad_lanes(l->kv_rank + l->rope_dims);
    const uint32_t longest = max_u32(max_u32(l->max_in, latent), head_dim);
    const uint32_t widest = row_form_ld(ROW_BF16, longest) + MAX_ROW_GAP; /* any row_form_ld() */
    const uint32_t page = YARD_PAGE_TOKENS;
    const uint32_t out = max_u32(max_u32(l->v_dims, l->kv_rank), 1);
    /* decode holds all heads of one row, prefill all rows of one head */
    const size_t rows = max_u32(max_u32(l->max_tokens, l->max_heads), MAX_TILE_ROWS);
    const size_t attention_x = rows * max_u32(latent, head_dim);
    const size_t product_x = (size_t)max_u32(MAX_TILE_ROWS, page) * widest;
    const uint32_t decoded = max_u32(max_u32(PANEL_ROWS * PANEL_K, YARD_GROUP * YARD_GROUP),
                                     FP8_DOT_SCRATCH / (uint32_t)sizeof(float));
    const size_t panel =
        max_u32(decoded, 3 * l->max_experts); /* the router's scores live there too */

    s->scratch = yard_arena_take(arena, n_threads * sizeof(*s->scratch));
    s->list =
        yard_arena_take(arena, (max_u32(l->max_tokens, l->max_experts) + 2) * sizeof(*s->list));
    for (uint32_t t = 0; t < n_threads; t++) {
        cpu_scratch c = {
            .x = take_floats(arena, product_x > attention_x ? product_x : attention_x),
            .x_scale =
                take_floats(arena, (size_t)max_u32(MAX_TILE_ROWS, page) * yard_group_count(widest)),
            .latent = take_floats(arena, (size_t)page * latent),
            .panel = take_floats(arena, panel),
            .lanes = take_floats(arena, MAX_TILE_ROWS * STRIP_BLOCK_ROWS * LANES),
            .out = take_floats(arena, MAX_TILE_ROWS * MAX_TASK_COLUMNS),
            .k = take_floats(arena, (size_t)page * head_dim),
            .v = take_floats(arena, (size_t)page * pad_lanes(l->v_dims)),
            .score = take_floats(arena, rows * page),
            .acc = take_floats(arena, rows * out),
            .max = take_floats(arena, rows),
            .sum = take_floats(arena, rows),
            .row = take_floats(arena, 2 * (size_t)widest),
            .turns = take_floats(arena, head_dim),
            .codes = yard_arena_take(arena, widest),
            .sample = yard_arena_take(arena, yard_cpu_sample_scratch_bytes(l->max_vocab)),
        };
        if (arena->base)
            s->scratch[t] = c;
    }
}

static size_t workspace_bytes(const yard_ops_config *config)
{
    struct yard_stream_s s = { .limits = config->limits };
    yard_arena arena = { 0 };

    lay_out(&arena, &s, config->n_threads ? config->n_threads : yard_cpu_count());
    return arena.used_bytes;
}

static void close_stream(yard_stream s)
{
    if (!s)
        return;
    yard_pool_destroy(s->pool);
    yard_pages_free(s->block, s->block_bytes);
    free(s);
}

static yard_status open_stream(yard_stream *out, const yard_ops_config *config, yard_error *err)
{
    const uint32_t n_threads = config->n_threads ? config->n_threads : yard_cpu_count();
    yard_arena arena = { 0 };
    yard_status st = YARD_OK;
    yard_stream s = yard_alloc(sizeof(*s));

    if (!s)
        return yard_fail(err, YARD_ENOMEM, "cpu stream: %zu bytes", sizeof(*s));
    s->limits = config->limits;
    s->kernels = yard_cpu_kernels_choose(config->variant);
    if (!s->kernels) {
        st = yard_fail(err, YARD_EINVAL,
                       "cpu variant: want c, or avx2, avx512 or amx where the processor has it "
                       "(its best: %s), got '%s'",
                       yard_cpu_kernels_choose(NULL)->name, config->variant);
        goto out;
    }
    st = yard_pool_create(&s->pool, n_threads, err);
    if (st == YARD_OK)
        st = yard_pool_pin(s->pool, config->pin, err);
    if (st != YARD_OK)
        goto out;
    lay_out(&arena, s, n_threads);
    arena.size_bytes = arena.used_bytes;
    arena.used_bytes = 0;
    s->block_bytes = arena.size_bytes;
    arena.base = s->block = yard_pages_alloc(arena.size_bytes);
    if (!s->block) {
        st = yard_fail(err, YARD_ENOMEM, "cpu workspace: %zu bytes for %u threads",
                       arena.size_bytes, n_threads);
        goto out;
    }
    lay_out(&arena, s, n_threads);
    snprintf(s->description, sizeof(s->description), "cpu, %u thread%s, %s: %s", n_threads,
             n_threads == 1 ? "" : "s", s->kernels->name, s->kernels->reason);
    *out = s;
    s = NULL;
out:
    close_stream(s);
    return st;
}

static const char *describe(yard_stream s)
{
    return s->description;
}

static void synchronise(yard_stream s)
{
    (void)s; /* every operation is complete when it returns */
}

static yard_status check(yard_stream s, yard_error *err)
{
    (void)s;
    (void)err;
    return YARD_OK; /* what can go wrong is refused when the stream is opened */
}

static yard_status no_capture(yard_stream s, yard_error *err)
{
    (void)s;
    return yard_fail(err, YARD_ENOTSUP, "cpu: operations run at once, there are no graphs");
}

static yard_status no_graph(yard_graph **out, yard_stream s, yard_error *err)
{
    (void)out;
    return no_capture(s, err);
}

static yard_status no_replay(yard_stream s, yard_graph *graph, float *us, yard_error *err)
{
    (void)graph;
    (void)us;
    return no_capture(s, err);
}

static void release_graph(yard_stream s, yard_graph *graph)
{
    (void)s;
    (void)graph;
}

struct sample_job {
    yard_stream s;
    const yard_sample_args *a;
};

static void sample_task(void *ctx, uint32_t i, uint32_t thread)
{
    const struct sample_job *job = ctx;
    const yard_sample_args *a = job->a;
    float *logits = a->logits + (size_t)i * a->n_vocab;

    if (a->finite)
        a->finite[i] = yard_all_finite(logits, a->n_vocab);
    yard_cpu_sample_row(job->s->kernels, &a->rows[i], logits, a->n_vocab,
                        job->s->scratch[thread].sample, &a->token[i]);
}

void yard_cpu_sample(yard_stream s, const yard_sample_args *a)
{
    struct sample_job job = { s, a };

    yard_pool_run(s->pool, sample_task, &job, (uint32_t)*a->n_rows);
}

const yard_ops yard_ops_cpu = {
    .name = "cpu",
    .in_host_memory = true,
    .workspace_bytes = workspace_bytes,
    .open = open_stream,
    .close = close_stream,
    .describe = describe,
    .synchronise = synchronise,
    .check = check,
    .available = yard_cpu_available,
    .allocate = yard_cpu_allocate,
    .release = yard_cpu_release,
    .upload = yard_cpu_upload,
    .download = yard_cpu_download,
    .prepare = yard_cpu_prepare,
    .release_prepared = yard_cpu_release_prepared,
    .capture_begin = no_capture,
    .capture_end = no_graph,
    .replay = no_replay,
    .release_graph = release_graph,
    .embed = yard_cpu_embed,
    .rms_norm_quant = yard_cpu_rms_norm_quant,
    .linear = yard_cpu_linear,
    .grouped_linear = yard_cpu_grouped_linear,
    .head_linear = yard_cpu_head_linear,
    .rope_q = yard_cpu_rope_q,
    .rope_append_kv = yard_cpu_rope_append_kv,
    .mla_decode = yard_cpu_mla_decode,
    .mla_prefill = yard_cpu_mla_prefill,
    .gqa_append_kv = yard_cpu_gqa_append_kv,
    .gqa_attend = yard_cpu_gqa_attend,
    .moe_route = yard_cpu_moe_route,
    .moe_scatter = yard_cpu_moe_scatter,
    .count_offsets = yard_cpu_count_offsets,
    .moe_gather = yard_cpu_moe_gather,
    .silu_mul_quant = yard_cpu_silu_mul_quant,
    .residual_add = yard_cpu_residual_add,
    .quantise = yard_cpu_quantise,
    .select_rows = yard_cpu_select_rows,
    .sample = yard_cpu_sample,
};
