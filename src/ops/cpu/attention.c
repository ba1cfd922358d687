/* Latent attention. Both forms walk the cache page by page, at absolute positions, and keep for
 * every query the largest score so far, the sum of exponentials and the weighted sum of values;
 * pages are joined in ascending order. So a query's result depends on its own sequence only. */
#include <math.h>

#include "ops/cpu/cpu.h"

void *yard_cpu_page_row(const yard_kv_layer *cache, size_t row_bytes, const yard_batch *b,
                        uint32_t row, uint32_t page_idx, uint32_t position_in_page)
{
    const int32_t page = b->page_table[(size_t)b->seq[row] * b->page_table_ld + page_idx];

    return (uint8_t *)cache->data +
           ((size_t)page * YARD_PAGE_TOKENS + position_in_page) * row_bytes;
}

/* The first n positions of a page as f32 [n, ld], padded with zeros. */
static void load_page(const cpu_kernels *k, const yard_mla_decode_args *a, uint32_t row,
                      uint32_t page_idx, uint32_t n, float *dst, uint32_t ld)
{
    const yard_kv_layer *cache = &a->cache;
    const uint32_t row_bytes = yard_latent_row_of(cache->dtype, a->kv_rank, a->rope_dims).n_bytes;

    for (uint32_t j = 0; j < n; j++) {
        const void *stored = yard_cpu_page_row(cache, row_bytes, a->batch, row, page_idx, j);
        float *to = dst + j * ld;

        yard_cpu_load_latent(k, cache->dtype, a->kv_rank, stored, to);
        yard_cpu_load_rope(k, cache->dtype, a->kv_rank, a->rope_dims, stored, to + a->kv_rank);
        memset(to + cache->width, 0, (ld - cache->width) * sizeof(float));
    }
}

/* Scores of query m for keys [from, from + n_k) become weights; what it has so far is put to their
 * scale. */
static void weigh(const cpu_kernels *k, cpu_scratch *scratch, uint32_t m, uint32_t from,
                  uint32_t n_k, float scale, uint32_t n_v)
{
    float *score = scratch->score + (size_t)m * YARD_PAGE_TOKENS + from;
    const float largest = k->scale_max(score, n_k, scale, scratch->max[m]);

    if (largest > scratch->max[m]) {
        const float shrink = yard_cpu_exp(scratch->max[m] - largest);
        scratch->sum[m] *= shrink;
        k->scale(scratch->acc + (size_t)m * n_v, n_v, shrink);
        scratch->max[m] = largest;
    }
    scratch->sum[m] += k->exp_sum(score, n_k, largest);
}

/* Values v of keys [from, from + n_k), weighed, are added for queries [first, first + n_x). */
static void add_values(const cpu_kernels *k, cpu_scratch *scratch, uint32_t first, uint32_t n_x,
                       uint32_t from, uint32_t n_k, const float *v, uint32_t v_ld, uint32_t n_v)
{
    k->axpy(scratch->score + (size_t)first * YARD_PAGE_TOKENS + from, YARD_PAGE_TOKENS, n_x,
            v + (size_t)from * v_ld, v_ld, n_k, n_v, scratch->acc + (size_t)first * n_v, n_v);
}

void yard_cpu_softmax_join(const cpu_kernels *k, cpu_scratch *scratch, uint32_t first, uint32_t n_x,
                           uint32_t from, uint32_t n_k, float scale, const float *v, uint32_t v_ld,
                           uint32_t n_v)
{
    for (uint32_t m = first; m < first + n_x; m++)
        weigh(k, scratch, m, from, n_k, scale, n_v);
    add_values(k, scratch, first, n_x, from, n_k, v, v_ld, n_v);
}

void yard_cpu_softmax_start(cpu_scratch *scratch, uint32_t n_x, uint32_t n_v)
{
    for (uint32_t m = 0; m < n_x; m++) {
        scratch->max[m] = -INFINITY;
        scratch->sum[m] = 0.0f;
    }
    memset(scratch->acc, 0, (size_t)n_x * n_v * sizeof(float));
}

void yard_cpu_softmax_finish(const cpu_kernels *k, cpu_scratch *scratch, uint32_t m, uint32_t n_v)
{
    k->scale(scratch->acc + (size_t)m * n_v, n_v, 1.0f / scratch->sum[m]);
}

/* A page is widened once for so many; with 16, widening FP8 was a quarter of the time. */
enum { MAX_TASK_HEADS = 64 };

struct decode_job {
    yard_stream s;
    const yard_mla_decode_args *a;
    const int32_t *row;
    uint32_t heads_per_task, tasks_per_row;
};

static void decode_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct decode_job *job = ctx;
    const yard_mla_decode_args *a = job->a;
    const cpu_kernels *k = job->s->kernels;
    cpu_scratch *scratch = &job->s->scratch[thread];
    const uint32_t row = (uint32_t)job->row[task / job->tasks_per_row];
    const uint32_t h0 = task % job->tasks_per_row * job->heads_per_task;
    const uint32_t left = a->n_heads - h0;
    const uint32_t n_h = left < job->heads_per_task ? left : job->heads_per_task;
    const uint32_t n_keys = (uint32_t)a->batch->position[row] + 1;
    const uint32_t width = a->kv_rank + a->rope_dims, ld = pad_lanes(width);

    for (uint32_t h = 0; h < n_h; h++) {
        float *x = scratch->x + (size_t)h * ld;

        yard_cpu_read_row(k, a->q_latent, row, (size_t)(h0 + h) * a->kv_rank, a->kv_rank, x);
        yard_cpu_read_row(k, a->q, row, (size_t)(h0 + h + 1) * a->head_dim - a->rope_dims,
                          a->rope_dims, x + a->kv_rank);
        memset(x + width, 0, (ld - width) * sizeof(float));
    }
    yard_cpu_softmax_start(scratch, n_h, a->kv_rank);
    for (uint32_t at = 0; at < n_keys; at += YARD_PAGE_TOKENS) {
        const uint32_t n = n_keys - at < YARD_PAGE_TOKENS ? n_keys - at : YARD_PAGE_TOKENS;

        load_page(k, a, row, at / YARD_PAGE_TOKENS, n, scratch->latent, ld);
        k->dot(&(dot_args){ .x = scratch->x,
                            .x_ld = ld,
                            .n_x = n_h,
                            .w = scratch->latent,
                            .w_ld = ld,
                            .n_w = n,
                            .n_k = width,
                            .y = scratch->score,
                            .y_ld = YARD_PAGE_TOKENS });
        yard_cpu_softmax_join(k, scratch, 0, n_h, 0, n, a->softmax_scale, scratch->latent, ld,
                              a->kv_rank);
    }
    for (uint32_t h = 0; h < n_h; h++) {
        yard_cpu_softmax_finish(k, scratch, h, a->kv_rank);
        yard_cpu_store_row(k, a->y, row, (size_t)(h0 + h) * a->kv_rank, a->kv_rank,
                           scratch->acc + (size_t)h * a->kv_rank);
    }
}

void yard_cpu_mla_decode(yard_stream s, const yard_mla_decode_args *a)
{
    const uint32_t n_threads = yard_pool_thread_count(s->pool);
    const uint32_t share = yard_ceil_div(a->n_heads, n_threads);
    struct decode_job job = { .s = s, .a = a, .row = s->list };
    uint32_t n_rows = 0;

    for (int32_t i = 0; i < *a->batch->n_tokens; i++)
        if (a->batch->absorbed[i])
            s->list[n_rows++] = i;
    job.heads_per_task = share < MAX_TASK_HEADS ? share : MAX_TASK_HEADS;
    job.tasks_per_row = yard_ceil_div(a->n_heads, job.heads_per_task);
    yard_pool_run(s->pool, decode_task, &job, n_rows * job.tasks_per_row);
}

/* Consecutive rows of one sequence: queries at positions first_position, first_position + 1, .. */
struct span {
    uint32_t row, n_rows, first_position;
};

struct prefill_job {
    yard_stream s;
    const yard_mla_prefill_args *a;
    row_source latent_source;
    struct span span;
};

/* A cached latent as a product reads it: as it is stored, or, where a product of plain values meets
 * an FP8 cache, as the values it stands for. */
static yard_rows latent_of(const yard_mla_prefill_args *a, const cpu_kernels *k, void *stored,
                           float *values)
{
    const yard_latent_row at = yard_latent_row_of(a->cache.dtype, a->kv_rank, a->rope_dims);
    yard_rows x = { .dtype = a->cache.dtype, .ld = a->kv_rank, .data = stored };

    if (x.dtype == YARD_FP8_E4M3 && !a->quantise) {
        yard_cpu_load_latent(k, x.dtype, a->kv_rank, stored, values);
        x.dtype = YARD_F32;
        x.data = values;
    } else if (x.dtype == YARD_FP8_E4M3) {
        x.scale = (float *)(void *)((uint8_t *)stored + at.scale_at);
    }
    return x;
}

/* Keys and values of one head for the first n positions of a page. */
static void expand_page(const struct prefill_job *job, cpu_scratch *scratch, uint32_t head,
                        uint32_t page_idx, uint32_t n)
{
    const yard_mla_prefill_args *a = job->a;
    const cpu_kernels *k = job->s->kernels;
    const uint32_t head_rows = a->nope_dims + a->v_dims;
    const uint32_t k_ld = pad_lanes(a->nope_dims + a->rope_dims), v_ld = pad_lanes(a->v_dims);
    row_source source = job->latent_source;
    product_args product = {
        .x = yard_cpu_product_rows(k, &source, &a->kv_b, n, scratch->latent, scratch), .w = &a->kv_b
    };
    const uint32_t cached_bytes =
        yard_latent_row_of(a->cache.dtype, a->kv_rank, a->rope_dims).n_bytes;

    for (uint32_t j = 0; j < n; j++) {
        void *stored =
            yard_cpu_page_row(&a->cache, cached_bytes, a->batch, job->span.row, page_idx, j);
        float *key = scratch->k + j * k_ld;

        source.x = latent_of(a, k, stored, scratch->row);
        yard_cpu_load_row(k, &source, 0, 0, scratch, &product.x, j);
        memset(key, 0, k_ld * sizeof(float));
        yard_cpu_load_rope(k, a->cache.dtype, a->kv_rank, a->rope_dims, stored, key + a->nope_dims);
    }
    product.w_first = head * head_rows;
    product.n_w = a->nope_dims;
    product.y = scratch->k;
    product.y_ld = k_ld;
    yard_cpu_product(k, scratch, &product);
    product.w_first += a->nope_dims;
    product.n_w = a->v_dims;
    product.y = scratch->v;
    product.y_ld = v_ld;
    yard_cpu_product(k, scratch, &product);
    if (a->y.dtype == YARD_BF16) /* what a projection would have stored */
        for (uint32_t j = 0; j < n; j++) {
            yard_cpu_round_values(k, scratch->k + (size_t)j * k_ld, a->nope_dims);
            yard_cpu_round_values(k, scratch->v + (size_t)j * v_ld, a->v_dims);
        }
}

enum { ASCENDING_QUERIES = 4 };

/* Queries [first, end) of a page's keys: the first sees n_k, each one more than the one before.
 * What a few of them see all is added at once. */
static void join_ascending(const struct prefill_job *job, cpu_scratch *scratch, uint32_t first,
                           uint32_t end, uint32_t n_k)
{
    const yard_mla_prefill_args *a = job->a;
    const cpu_kernels *k = job->s->kernels;
    const uint32_t v_ld = pad_lanes(a->v_dims);

    for (uint32_t n; first < end; first += n, n_k += n) {
        n = end - first < ASCENDING_QUERIES ? end - first : ASCENDING_QUERIES;
        for (uint32_t i = 0; i < n; i++)
            weigh(k, scratch, first + i, 0, n_k + i, a->softmax_scale, a->v_dims);
        add_values(k, scratch, first, n, 0, n_k, scratch->v, v_ld, a->v_dims);
        for (uint32_t i = 1; i < n; i++)
            add_values(k, scratch, first + i, 1, n_k, i, scratch->v, v_ld, a->v_dims);
    }
}

/* One page against the queries of the span that see it; on the page of a query's own position each
 * query sees one key more than the one before. */
static void attend_page(const struct prefill_job *job, cpu_scratch *scratch, uint32_t page_at,
                        uint32_t n_keys)
{
    const yard_mla_prefill_args *a = job->a;
    const struct span *span = &job->span;
    const cpu_kernels *k = job->s->kernels;
    const uint32_t ld = pad_lanes(a->nope_dims + a->rope_dims), v_ld = pad_lanes(a->v_dims);
    const uint32_t first = page_at > span->first_position ? page_at - span->first_position : 0;
    /* queries from here on see the whole page */
    const uint32_t whole_from = page_at + YARD_PAGE_TOKENS - 1;
    uint32_t whole = whole_from > span->first_position ? whole_from - span->first_position : 0;

    if (whole > span->n_rows)
        whole = span->n_rows;
    k->dot(&(dot_args){ .x = scratch->x + (size_t)first * ld,
                        .x_ld = ld,
                        .n_x = span->n_rows - first,
                        .w = scratch->k,
                        .w_ld = ld,
                        .n_w = n_keys,
                        .n_k = a->nope_dims + a->rope_dims,
                        .y = scratch->score + (size_t)first * YARD_PAGE_TOKENS,
                        .y_ld = YARD_PAGE_TOKENS });
    join_ascending(job, scratch, first, whole, span->first_position + first - page_at + 1);
    if (whole < span->n_rows)
        yard_cpu_softmax_join(k, scratch, whole, span->n_rows - whole, 0, YARD_PAGE_TOKENS,
                              a->softmax_scale, scratch->v, v_ld, a->v_dims);
}

static void prefill_task(void *ctx, uint32_t head, uint32_t thread)
{
    const struct prefill_job *job = ctx;
    const yard_mla_prefill_args *a = job->a;
    const struct span *span = &job->span;
    const cpu_kernels *k = job->s->kernels;
    cpu_scratch *scratch = &job->s->scratch[thread];
    const uint32_t head_dim = a->nope_dims + a->rope_dims, ld = pad_lanes(head_dim);
    const uint32_t n_keys = span->first_position + span->n_rows;

    for (uint32_t m = 0; m < span->n_rows; m++) {
        float *x = scratch->x + (size_t)m * ld;
        yard_cpu_read_row(k, a->q, span->row + m, (size_t)head * head_dim, head_dim, x);
        memset(x + head_dim, 0, (ld - head_dim) * sizeof(float));
    }
    yard_cpu_softmax_start(scratch, span->n_rows, a->v_dims);
    for (uint32_t at = 0; at < n_keys; at += YARD_PAGE_TOKENS) {
        const uint32_t n = n_keys - at < YARD_PAGE_TOKENS ? n_keys - at : YARD_PAGE_TOKENS;

        expand_page(job, scratch, head, at / YARD_PAGE_TOKENS, n);
        attend_page(job, scratch, at, n);
    }
    for (uint32_t m = 0; m < span->n_rows; m++) {
        yard_cpu_softmax_finish(k, scratch, m, a->v_dims);
        yard_cpu_store_row(k, a->y, span->row + m, (size_t)head * a->v_dims, a->v_dims,
                           scratch->acc + (size_t)m * a->v_dims);
    }
}

void yard_cpu_mla_prefill(yard_stream s, const yard_mla_prefill_args *a)
{
    const yard_batch *b = a->batch;
    const int32_t n_tokens = *b->n_tokens;
    struct prefill_job job = { .s = s,
                               .a = a,
                               .latent_source = { .quantise = a->quantise, .ue8m0 = a->ue8m0 } };

    for (int32_t i = 0; i < n_tokens;) {
        int32_t end = i + 1;

        if (b->absorbed[i]) {
            i++;
            continue;
        }
        while (end < n_tokens && b->seq[end] == b->seq[i] && !b->absorbed[end])
            end++;
        job.span = (struct span){ (uint32_t)i, (uint32_t)(end - i), (uint32_t)b->position[i] };
        yard_pool_run(s->pool, prefill_task, &job, a->n_heads);
        i = end;
    }
}
