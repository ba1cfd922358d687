/* Grouped-query attention: several query heads share the keys and values of one kv head. A task
 * takes a tile, a few consecutive rows of one sequence, so that a page is decoded once for all
 * their queries; and kv heads of it: one where a tile has rows enough, several where steps have one
 * row a sequence, so that memory is read in long pieces. Pages are joined as in latent attention.
 */
#include "ops/cpu/cpu.h"

/* Keys and values of one position. */
static yard_rows cached_row(const yard_kv_layer *cache, const yard_batch *b, uint32_t row,
                            uint32_t page_idx, uint32_t position_in_page)
{
    const size_t row_bytes = cache->width * yard_dtype_bytes(cache->dtype);

    return (yard_rows){ .dtype = cache->dtype,
                        .ld = cache->width,
                        .data = yard_cpu_page_row(cache, row_bytes, b, row, page_idx,
                                                  position_in_page) };
}

struct append_job {
    yard_stream s;
    const yard_gqa_append_kv_args *a;
};

static void append_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct append_job *job = ctx;
    const yard_gqa_append_kv_args *a = job->a;
    const cpu_kernels *k = job->s->kernels;
    const uint32_t position = (uint32_t)a->batch->position[i], n_dims = a->head_dim;
    const yard_rows cache = cached_row(&a->cache, a->batch, i, position / YARD_PAGE_TOKENS,
                                       position % YARD_PAGE_TOKENS);
    float *x = job->s->scratch[thread].k, *y = job->s->scratch[thread].v;

    yard_cpu_turns(&a->rope, (int32_t)position, job->s->scratch[thread].turns);
    for (uint32_t h = 0; h < a->n_kv_heads; h++) {
        yard_cpu_read_row(k, a->k, i, (size_t)h * n_dims, n_dims, x);
        yard_cpu_rotate(&a->rope, job->s->scratch[thread].turns, x, y);
        yard_cpu_store_row(k, cache, 0, (size_t)h * n_dims, n_dims, y);
        yard_cpu_read_row(k, a->v, i, (size_t)h * n_dims, n_dims, x);
        yard_cpu_store_row(k, cache, 0, (size_t)(a->n_kv_heads + h) * n_dims, n_dims, x);
    }
}

void yard_cpu_gqa_append_kv(yard_stream s, const yard_gqa_append_kv_args *a)
{
    struct append_job job = { s, a };

    yard_pool_run(s->pool, append_row, &job, (uint32_t)*a->batch->n_tokens);
}

struct attend_job {
    yard_stream s;
    const yard_gqa_attend_args *a;
    const int32_t *tile; /* [n_tiles + 1] first row of each */
    uint32_t heads_per_task, tasks_per_tile;
};

/* One tile and one kv head; query (m, g) of row first + m is number q0 + m * n_shared + g. */
struct tile {
    const yard_gqa_attend_args *a;
    const cpu_kernels *k;
    cpu_scratch *scratch;
    uint32_t first, n_rows, kv_head, q0;
    uint32_t n_shared; /* query heads of the kv head */
    uint32_t ld;       /* of queries, keys and values in scratch */
};

static uint32_t last_key(const struct tile *t, uint32_t m)
{
    return (uint32_t)t->a->batch->position[t->first + m];
}

static uint32_t first_key(const struct tile *t, uint32_t m)
{
    const uint32_t n = last_key(t, m) + 1;

    return t->a->window && n > t->a->window ? n - t->a->window : 0;
}

static void load_queries(const struct tile *t)
{
    const uint32_t n_dims = t->a->head_dim;

    for (uint32_t q = 0; q < t->n_rows * t->n_shared; q++) {
        const uint32_t head = t->kv_head * t->n_shared + q % t->n_shared;
        float *x = t->scratch->x + (size_t)(t->q0 + q) * t->ld;

        yard_cpu_read_row(t->k, t->a->q, t->first + q / t->n_shared, (size_t)head * n_dims, n_dims,
                          x);
        memset(x + n_dims, 0, (t->ld - n_dims) * sizeof(*x));
    }
}

/* Keys and values [from, end) of a page, at their places in it. */
static void load_page(const struct tile *t, uint32_t page_idx, uint32_t from, uint32_t end)
{
    const yard_gqa_attend_args *a = t->a;
    const uint32_t n_dims = a->head_dim;

    for (uint32_t j = from; j < end; j++) {
        const yard_rows stored = cached_row(&a->cache, a->batch, t->first, page_idx, j);
        float *key = t->scratch->k + (size_t)j * t->ld;

        yard_cpu_read_row(t->k, stored, 0, (size_t)t->kv_head * n_dims, n_dims, key);
        memset(key + n_dims, 0, (t->ld - n_dims) * sizeof(*key));
        yard_cpu_read_row(t->k, stored, 0, (size_t)(a->n_kv_heads + t->kv_head) * n_dims, n_dims,
                          t->scratch->v + (size_t)j * t->ld);
    }
}

/* One page against the rows of the tile that see any of it. */
static void attend_page(const struct tile *t, uint32_t page_idx)
{
    const yard_gqa_attend_args *a = t->a;
    const uint32_t at = page_idx * YARD_PAGE_TOKENS, page_end = at + YARD_PAGE_TOKENS;
    uint32_t m0 = 0, end = t->n_rows;
    uint32_t from, to;

    while (m0 < end && last_key(t, m0) < at)
        m0++;
    while (end > m0 && first_key(t, end - 1) >= page_end)
        end--;
    if (m0 == end)
        return;
    from = first_key(t, m0) > at ? first_key(t, m0) - at : 0;
    to = last_key(t, end - 1) < page_end ? last_key(t, end - 1) + 1 - at : YARD_PAGE_TOKENS;
    load_page(t, page_idx, from, to);
    t->k->dot(&(dot_args){ .x = t->scratch->x + (size_t)(t->q0 + m0 * t->n_shared) * t->ld,
                           .x_ld = t->ld,
                           .n_x = (end - m0) * t->n_shared,
                           .w = t->scratch->k + (size_t)from * t->ld,
                           .w_ld = t->ld,
                           .n_w = to - from,
                           .n_k = a->head_dim,
                           .y = t->scratch->score +
                                (size_t)(t->q0 + m0 * t->n_shared) * YARD_PAGE_TOKENS + from,
                           .y_ld = YARD_PAGE_TOKENS });
    for (uint32_t m = m0; m < end; m++) {
        const uint32_t low = first_key(t, m) > at ? first_key(t, m) - at : 0;
        const uint32_t high = last_key(t, m) < page_end ? last_key(t, m) + 1 - at : page_end - at;

        yard_cpu_softmax_join(t->k, t->scratch, t->q0 + m * t->n_shared, t->n_shared, low,
                              high - low, a->softmax_scale, t->scratch->v, t->ld, a->head_dim);
    }
}

static void store_results(const struct tile *t)
{
    const uint32_t n_dims = t->a->head_dim;

    for (uint32_t q = 0; q < t->n_rows * t->n_shared; q++) {
        const uint32_t head = t->kv_head * t->n_shared + q % t->n_shared;

        yard_cpu_softmax_finish(t->k, t->scratch, t->q0 + q, n_dims);
        yard_cpu_store_row(t->k, t->a->y, t->first + q / t->n_shared, (size_t)head * n_dims, n_dims,
                           t->scratch->acc + (size_t)(t->q0 + q) * n_dims);
    }
}

static struct tile tile_of(const struct attend_job *job, uint32_t task, uint32_t thread)
{
    const int32_t *at = job->tile + task / job->tasks_per_tile;

    return (struct tile){ .a = job->a,
                          .k = job->s->kernels,
                          .scratch = &job->s->scratch[thread],
                          .first = (uint32_t)at[0],
                          .n_rows = (uint32_t)(at[1] - at[0]),
                          .n_shared = job->a->n_heads / job->a->n_kv_heads,
                          .ld = pad_lanes(job->a->head_dim) };
}

static void choose_head(struct tile *t, uint32_t first_head, uint32_t h)
{
    t->kv_head = first_head + h;
    t->q0 = h * t->n_rows * t->n_shared;
}

static void attend_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct attend_job *job = ctx;
    const uint32_t first_head = task % job->tasks_per_tile * job->heads_per_task;
    const uint32_t left = job->a->n_kv_heads - first_head;
    const uint32_t n_heads = left < job->heads_per_task ? left : job->heads_per_task;
    struct tile t = tile_of(job, task, thread);
    const uint32_t first_page = first_key(&t, 0) / YARD_PAGE_TOKENS;
    const uint32_t last_page = last_key(&t, t.n_rows - 1) / YARD_PAGE_TOKENS;

    yard_cpu_softmax_start(t.scratch, n_heads * t.n_rows * t.n_shared, job->a->head_dim);
    for (uint32_t h = 0; h < n_heads; h++) {
        choose_head(&t, first_head, h);
        load_queries(&t);
    }
    for (uint32_t page_idx = first_page; page_idx <= last_page; page_idx++)
        for (uint32_t h = 0; h < n_heads; h++) {
            choose_head(&t, first_head, h);
            attend_page(&t, page_idx);
        }
    for (uint32_t h = 0; h < n_heads; h++) {
        choose_head(&t, first_head, h);
        store_results(&t);
    }
}

/* Scratch holds max(MAX_TILE_ROWS, all heads of a row) queries. */
void yard_cpu_gqa_attend(yard_stream s, const yard_gqa_attend_args *a)
{
    const int32_t *seq = a->batch->seq, n_tokens = *a->batch->n_tokens;
    const uint32_t n_shared = a->n_heads / a->n_kv_heads;
    const int32_t most = n_shared < MAX_TILE_ROWS ? (int32_t)(MAX_TILE_ROWS / n_shared) : 1;
    struct attend_job job = { .s = s, .a = a, .tile = s->list, .heads_per_task = 1 };
    uint32_t n_tiles = 0;

    for (int32_t i = 0, start = 0; i < n_tokens; i++)
        if (i == 0 || seq[i] != seq[i - 1] || i - start == most)
            s->list[n_tiles++] = start = i;
    s->list[n_tiles] = n_tokens;
    if (n_tiles == (uint32_t)n_tokens) { /* two tasks a thread, if there are as many */
        const uint32_t n_threads = yard_pool_thread_count(s->pool);
        const uint32_t share = n_tiles * a->n_kv_heads / (2 * n_threads);

        job.heads_per_task = share < 1 ? 1 : share < a->n_kv_heads ? share : a->n_kv_heads;
    }
    job.tasks_per_tile = yard_ceil_div(a->n_kv_heads, job.heads_per_task);
    yard_pool_run(s->pool, attend_task, &job, n_tiles * job.tasks_per_tile);
}
