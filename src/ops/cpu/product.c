/* Matrix products: linear, grouped linear, and one small product per head. */
#include <assert.h>

#include "ops/cpu/cpu.h"

/* Scale rows of up to a few rows of w, NULL when w has none. */
static const float *const *scale_rows(const yard_matrix *w, uint32_t first, uint32_t n,
                                      const float **rows)
{
    if (w->dtype != YARD_FP8_E4M3)
        return NULL;
    for (uint32_t i = 0; i < n; i++)
        rows[i] = matrix_scale_row(w, first + i);
    return rows;
}

enum { RAW_BATCH = 64 }; /* rows of w handed to raw_dot at once */

/* Few rows of x: w is read once, decoded in registers. */
static void product_few(const cpu_kernels *k, const product_args *a)
{
    const bool codes =
        k->codes && a->x.scaled && a->w->dtype == YARD_FP8_E4M3 && k->codes->usable();
    const float *scales[RAW_BATCH];

    for (uint32_t n = 0; n < a->n_w; n += RAW_BATCH) {
        const uint32_t n_w = a->n_w - n < RAW_BATCH ? a->n_w - n : RAW_BATCH;
        const raw_dot_args args = {
            .x = a->x.x,
            .x_ld = a->x.ld,
            .n_x = a->x.n_x,
            .n_w = n_w,
            .n_k = a->w->cols,
            .w_dtype = a->w->dtype,
            .w = matrix_row(a->w, a->w_first + n),
            .w_ld = a->w->ld,
            .x_scale = a->x.scaled ? a->x.x_scale : NULL,
            .x_scale_ld = yard_group_count(a->w->cols),
            .w_scale = scale_rows(a->w, a->w_first + n, n_w, scales),
            .y = a->y + n,
            .y_ld = a->y_ld,
        };
        if (codes)
            k->codes->dot(&args);
        else
            k->raw_dot(&args);
    }
}

/* Rows [n, n + n_w) of a product's weights, which share their scales, and columns [at, at + n_k),
 * of one row of blocks and PANEL_K at most. factor: see dot_args. */
typedef struct block {
    uint32_t n, n_w, at, n_k;
    uint32_t panel_rows;
    const float *factor;
} block;

/* What the panel after the n_w rows from n on decodes: the memory's own prefetchers see only the
 * beginning of each piece, so that every row would begin with a wait. */
static piece_ahead panel_ahead(const product_args *a, const block *b, uint32_t n, uint32_t n_w)
{
    const size_t element_bytes = yard_dtype_bytes(a->w->dtype);
    uint32_t next = n + n_w, end = b->n + b->n_w, at = b->at, left;

    if (next == end) {
        next = b->n;
        at += b->n_k;
    }
    if (at == a->w->cols) {
        next = end;
        end = a->n_w;
        at = 0;
    }
    left = a->w->cols - at;
    return (piece_ahead){ .first = (const uint8_t *)matrix_row(a->w, a->w_first + next) +
                                   at * element_bytes,
                          .ld_bytes = a->w->ld * element_bytes,
                          .n_rows = end - next < b->panel_rows ? end - next : b->panel_rows,
                          .n_bytes = (left < PANEL_K ? left : PANEL_K) * (uint32_t)element_bytes };
}

static void fetch_row(const piece_ahead *p, uint32_t i)
{
    for (uint32_t at = 0; i < p->n_rows && at < p->n_bytes; at += 64)
        __builtin_prefetch(p->first + i * p->ld_bytes + at, 0, 2);
}

/* A panel: n_w of a block's rows from n on are decoded once and used for all rows of x. */
static void add_panel(const cpu_kernels *k, cpu_scratch *scratch, const product_args *a,
                      const block *b, uint32_t n, uint32_t n_w, float *lanes)
{
    const size_t element_bytes = yard_dtype_bytes(a->w->dtype);
    const piece_ahead ahead = panel_ahead(a, b, n, n_w);

    for (uint32_t i = 0; i < n_w; i++) {
        const uint8_t *row = matrix_row(a->w, a->w_first + n + i);

        fetch_row(&ahead, i);
        k->decode_pairs(a->w->dtype, row + b->at * element_bytes, b->n_k,
                        scratch->panel + (size_t)i * PANEL_K);
        if (a->x.form == ROW_QUADS)
            k->pairs_to_quads(scratch->panel + (size_t)i * PANEL_K, pad_lanes(b->n_k));
    }
    k->dot(&(dot_args){ .x = (const float *)a->x.x + b->at,
                        .x_ld = a->x.ld,
                        .n_x = a->x.n_x,
                        .w = scratch->panel,
                        .w_ld = PANEL_K,
                        .n_w = n_w,
                        .n_k = b->n_k,
                        .factor = b->factor,
                        .y = b->at + b->n_k == a->w->cols ? a->y + n : NULL,
                        .y_ld = a->y_ld,
                        .lanes = lanes,
                        .continued = b->at > 0 });
}

/* The strip kernels that take rows of this form, or NULL. */
static const strip_kernels *strips_of(const cpu_kernels *k, row_form form)
{
    return form == ROW_QUAD_STRIPS   ? k->fp8_strips
           : form == ROW_PAIR_STRIPS ? k->bf16_strips
                                     : NULL;
}

/* The same by strips. */
static void add_strip_panel(const strip_kernels *strips, cpu_scratch *scratch,
                            const product_args *a, const block *b, uint32_t n, uint32_t n_w,
                            float *lanes)
{
    const size_t element_bytes = yard_dtype_bytes(a->w->dtype);
    const uint8_t *rows = matrix_row(a->w, a->w_first + n);

    strips->lay_w(&(strip_source){ .dtype = a->w->dtype,
                                   .first = rows + b->at * element_bytes,
                                   .ld_bytes = a->w->ld * element_bytes,
                                   .n_w = n_w,
                                   .n_k = b->n_k },
                  scratch->panel);
    strips->dot(&(strip_args){ .x = a->x.x,
                               .x_ld = a->x.ld,
                               .n_x = a->x.n_x,
                               .at = b->at,
                               .n_k = b->n_k,
                               .w = scratch->panel,
                               .n_w = n_w,
                               .factor = b->factor,
                               .sums = lanes,
                               .continued = b->at > 0,
                               .y = b->at + b->n_k == a->w->cols ? a->y + n : NULL,
                               .y_ld = a->y_ld,
                               .ahead = panel_ahead(a, b, n, n_w) });
}

static void make_factors(const product_args *a, const block *b, float *factor)
{
    const uint32_t group = b->at / YARD_GROUP, scale_ld = yard_group_count(a->w->cols);
    const float *w_scale = matrix_scale_row(a->w, a->w_first + b->n) + group;

    for (uint32_t g = 0; g < yard_group_count(b->n_k); g++)
        for (uint32_t m = 0; m < a->x.n_x; m++)
            factor[g * MAX_TILE_ROWS + m] =
                a->x.scaled ? a->x.x_scale[m * scale_ld + group + g] * w_scale[g] : w_scale[g];
}

/* A block's columns of x meet its rows of w, a panel after the other, while they are in the second
 * cache. */
static void add_block(const cpu_kernels *k, cpu_scratch *scratch, const product_args *a, block b)
{
    const strip_kernels *strips = strips_of(k, a->x.form);
    float factor[PANEL_K / YARD_GROUP * MAX_TILE_ROWS];
    float *lanes = scratch->lanes;

    if (a->w->dtype == YARD_FP8_E4M3) {
        make_factors(a, &b, factor);
        b.factor = factor;
    }
    for (uint32_t n = 0, n_w; n < b.n_w; n += n_w) {
        n_w = b.n_w - n < b.panel_rows ? b.n_w - n : b.panel_rows;
        if (strips)
            add_strip_panel(strips, scratch, a, &b, b.n + n, n_w, lanes);
        else
            add_panel(k, scratch, a, &b, b.n + n, n_w, lanes);
        lanes += MAX_TILE_ROWS * b.panel_rows * LANES;
    }
}

/* Rows from the n-th on that share their scales, most at most. */
static uint32_t rows_of_block(const product_args *a, uint32_t n, uint32_t most)
{
    const yard_matrix *w = a->w;
    const uint32_t left = a->n_w - n < most ? a->n_w - n : most;
    const uint32_t in_block = w->dtype == YARD_FP8_E4M3
                                  ? w->block_rows - (w->row0 + a->w_first + n) % w->block_rows
                                  : left;

    return left < in_block ? left : in_block;
}

static void product_many(const cpu_kernels *k, cpu_scratch *scratch, const product_args *a)
{
    const strip_kernels *strips = strips_of(k, a->x.form);

    for (uint32_t n = 0, n_w; n < a->n_w; n += n_w) {
        n_w = rows_of_block(a, n, strips ? strips->block_rows : BLOCK_ROWS);
        for (uint32_t at = 0; at < a->w->cols; at += PANEL_K) {
            const uint32_t left = a->w->cols - at;
            add_block(k, scratch, a,
                      (block){ .n = n,
                               .n_w = n_w,
                               .at = at,
                               .n_k = left < PANEL_K ? left : PANEL_K,
                               .panel_rows = strips ? strips->panel_rows : PANEL_ROWS });
        }
    }
}

/* Rows of w that share a row of blocks, and so their scales. */
static void product_fp8(const cpu_kernels *k, cpu_scratch *scratch, const product_args *a)
{
    const yard_matrix *w = a->w;

    for (uint32_t n = 0, n_w; n < a->n_w; n += n_w) {
        const uint32_t first = a->w_first + n;

        n_w = rows_of_block(a, n, a->n_w);
        k->fp8_dot(&(fp8_dot_args){ .x = a->x.x,
                                    .x_ld = a->x.ld,
                                    .n_x = a->x.n_x,
                                    .n_w = n_w,
                                    .n_k = w->cols,
                                    .w = matrix_row(w, first),
                                    .w_ld = w->ld,
                                    .x_scale = a->x.x_scale,
                                    .x_scale_ld = yard_group_count(w->cols),
                                    .w_scale = matrix_scale_row(w, first),
                                    .y = a->y + n,
                                    .y_ld = a->y_ld,
                                    .scratch = scratch->panel });
    }
}

static bool has_scales(const row_source *source)
{
    return source->quantise || source->x.dtype == YARD_FP8_E4M3;
}

static row_form product_form(const cpu_kernels *k, const row_source *source, const yard_matrix *w,
                             uint32_t n_x)
{
    const bool many = n_x > FEW_ROWS;

    if (w->dtype == YARD_FP8_E4M3)
        return k->fp8_dot && has_scales(source) && (!many || k->fp8_dot_many()) ? ROW_BF16
               : k->fp8_strips && many                                          ? ROW_QUAD_STRIPS
                                                                                : ROW_QUADS;
    return k->bf16_strips && many && w->dtype == YARD_BF16 ? ROW_PAIR_STRIPS : ROW_PAIRS;
}

x_rows yard_cpu_product_rows(const cpu_kernels *k, const row_source *source, const yard_matrix *w,
                             uint32_t n_x, float *x, cpu_scratch *scratch)
{
    const row_form form = product_form(k, source, w, n_x);

    return (x_rows){ .form = form,
                     .x = x,
                     .ld = row_form_ld(form, w->cols),
                     .n_x = n_x,
                     .n_k = w->cols,
                     .scaled = has_scales(source),
                     .x_scale = scratch->x_scale };
}

void yard_cpu_product(const cpu_kernels *k, cpu_scratch *scratch, const product_args *a)
{
    if (a->x.form == ROW_BF16)
        product_fp8(k, scratch, a);
    else if (a->x.n_x <= FEW_ROWS)
        product_few(k, a);
    else
        product_many(k, scratch, a);
}

/* A task is a range of output columns of one group: so many that laying out its rows of x costs
 * little, so few that all threads have work. */
enum { MIN_TASK_COLUMNS = 32, TASKS_PER_THREAD = 8 };

struct linear_job {
    yard_stream s;
    row_source source;
    const yard_matrix *w;     /* [n_groups] */
    const int32_t *offset;    /* [n_groups + 1] */
    const int32_t *row_count; /* [n_groups] or NULL */
    const int32_t *x_index;   /* or NULL */
    const int32_t *active;    /* groups that have rows now */
    int32_t first_row;        /* now come MAX_TILE_ROWS rows of each group, from this one on */
    uint32_t task_columns, tasks_per_group;
    yard_rows y;
};

static int32_t group_end(const struct linear_job *job, uint32_t group)
{
    return job->row_count ? job->offset[group] + job->row_count[group] : job->offset[group + 1];
}

static int32_t rows_left(const struct linear_job *job, uint32_t group)
{
    return group_end(job, group) - job->offset[group] - job->first_row;
}

static void linear_task(void *ctx, uint32_t task, uint32_t thread)
{
    const struct linear_job *job = ctx;
    const cpu_kernels *k = job->s->kernels;
    cpu_scratch *scratch = &job->s->scratch[thread];
    const uint32_t group = (uint32_t)job->active[task / job->tasks_per_group];
    const int32_t row = job->offset[group] + job->first_row, left = rows_left(job, group);
    const yard_matrix *w = &job->w[group];
    const uint32_t first = task % job->tasks_per_group * job->task_columns;
    const uint32_t left_w = w->rows - first;
    const uint32_t n_w = left_w < job->task_columns ? left_w : job->task_columns;
    const uint32_t n_x = left < MAX_TILE_ROWS ? (uint32_t)left : MAX_TILE_ROWS;
    const x_rows x = yard_cpu_product_rows(k, &job->source, w, n_x, scratch->x, scratch);

    /* a thread's next task may be other columns of the same rows */
    for (uint32_t i = 0; i < n_x && scratch->x_row != row; i++) {
        const size_t y_row = (size_t)row + i;
        yard_cpu_load_row(k, &job->source, job->x_index ? (size_t)job->x_index[y_row] : y_row, 0,
                          scratch, &x, i);
    }
    scratch->x_row = row;
    yard_cpu_product(k, scratch,
                     &(product_args){ .x = x,
                                      .w = w,
                                      .w_first = first,
                                      .n_w = n_w,
                                      .y = scratch->out,
                                      .y_ld = MAX_TASK_COLUMNS });
    for (uint32_t i = 0; i < n_x; i++)
        yard_cpu_store_row(k, job->y, (size_t)row + i, first, n_w,
                           scratch->out + i * MAX_TASK_COLUMNS);
}

static uint32_t task_columns(uint32_t n_columns, uint32_t n_groups, uint32_t n_threads)
{
    const uint64_t share = (uint64_t)n_columns * n_groups / (n_threads * TASKS_PER_THREAD);
    const uint32_t whole = (uint32_t)share / MIN_TASK_COLUMNS * MIN_TASK_COLUMNS;

    return whole < MIN_TASK_COLUMNS   ? MIN_TASK_COLUMNS
           : whole > MAX_TASK_COLUMNS ? MAX_TASK_COLUMNS
                                      : whole;
}

/* Groups that have rows from job->first_row on; they become the active ones. */
static uint32_t find_active(struct linear_job *job, uint32_t n_groups)
{
    uint32_t n_active = 0;

    for (uint32_t g = 0; g < n_groups; g++)
        if (rows_left(job, g) > 0)
            job->s->list[n_active++] = (int32_t)g;
    job->active = job->s->list;
    return n_active;
}

/* All columns of some rows, then of the next ones: threads lay out rows of x once, while rows of w
 * are read again, which costs memory little time beside that of so many products. */
static void run_groups(struct linear_job *job, uint32_t n_groups)
{
    const uint32_t n_threads = yard_pool_thread_count(job->s->pool);

    assert(n_threads > 0);
    for (uint32_t t = 0; t < n_threads; t++)
        job->s->scratch[t].x_row = -1;
    for (uint32_t n; (n = find_active(job, n_groups)) > 0; job->first_row += MAX_TILE_ROWS) {
        job->task_columns = task_columns(job->w[0].rows, n, n_threads);
        job->tasks_per_group = yard_ceil_div(job->w[0].rows, job->task_columns);
        yard_pool_run(job->s->pool, linear_task, job, n * job->tasks_per_group);
    }
}

void yard_cpu_linear(yard_stream s, const yard_linear_args *a)
{
    const int32_t offset[2] = { 0, *a->n_rows };
    struct linear_job job = {
        .s = s, .source = { .x = a->x }, .w = &a->w, .offset = offset, .y = a->y
    };

    run_groups(&job, 1);
}

void yard_cpu_grouped_linear(yard_stream s, const yard_grouped_linear_args *a)
{
    struct linear_job job = {
        .s = s,
        .source = { .x = a->x },
        .w = a->w,
        .offset = a->offset,
        .row_count = a->row_count,
        .x_index = a->x_index,
        .y = a->y,
    };

    run_groups(&job, a->n_groups);
}

struct head_job {
    yard_stream s;
    const yard_head_linear_args *a;
    row_source source;
    const int32_t *row; /* rows that take part */
    uint32_t n_rows;
};

enum {
    TRANSPOSED_COLUMNS = YARD_GROUP, /* with one scale a row of blocks */
    TRANSPOSED_ROWS = 32             /* decoded at once: they stay in the first cache */
};

/* Rows [r, end) of a head's, whose first is w's first-th, and columns [c, c + n_c). */
typedef struct piece {
    uint32_t first, r, end, c, n_c;
} piece;

/* acc[m, c] += x[m, r] w[first + r, p->c + c] for the piece's r, and c below n_c. */
static void add_rows(const struct head_job *job, cpu_scratch *scratch, const x_rows *x,
                     const piece *p, float *acc, size_t acc_ld)
{
    const yard_matrix *w = &job->a->w;
    const cpu_kernels *k = job->s->kernels;
    const size_t skipped = p->c * yard_dtype_bytes(w->dtype);

    for (uint32_t r = p->r, n; r < p->end; r += n) {
        n = p->end - r < TRANSPOSED_ROWS ? p->end - r : TRANSPOSED_ROWS;
        for (uint32_t i = 0; i < n; i++)
            k->convert->decode(w->dtype, (const uint8_t *)matrix_row(w, p->first + r + i) + skipped,
                               p->n_c, scratch->panel + (size_t)i * TRANSPOSED_COLUMNS);
        k->axpy((const float *)x->x + r, x->ld, x->n_x, scratch->panel, TRANSPOSED_COLUMNS, n,
                p->n_c, acc, acc_ld);
    }
}

/* A piece, which lies in one block and group, times x is added to acc. */
static void add_piece(const struct head_job *job, cpu_scratch *scratch, const x_rows *x,
                      const piece *p)
{
    const yard_matrix *w = &job->a->w;
    const uint32_t scale_ld = yard_group_count(job->a->head_rows);
    float *acc = scratch->acc + p->c, *part = scratch->out;

    if (w->dtype != YARD_FP8_E4M3) {
        add_rows(job, scratch, x, p, acc, w->cols);
        return;
    }
    memset(part, 0, (size_t)x->n_x * TRANSPOSED_COLUMNS * sizeof(float));
    add_rows(job, scratch, x, p, part, TRANSPOSED_COLUMNS);
    for (uint32_t m = 0; m < x->n_x; m++) {
        const float xs = x->scaled ? x->x_scale[m * scale_ld + p->r / YARD_GROUP] : 1.0f;

        job->s->kernels->convert->add_scaled(
            part + (size_t)m * TRANSPOSED_COLUMNS, p->n_c,
            xs * matrix_scale_row(w, p->first + p->r)[p->c / YARD_GROUP],
            acc + (size_t)m * w->cols);
    }
}

/* y[c] = sum over r of x[r] w[first + r, c]: r is cut where its activation group or the block of w
 * ends; each piece is summed by itself, then scaled. */
static void transposed_rows(const struct head_job *job, cpu_scratch *scratch, uint32_t first,
                            const x_rows *x)
{
    const yard_matrix *w = &job->a->w;
    const uint32_t n_r = job->a->head_rows;

    memset(scratch->acc, 0, (size_t)x->n_x * w->cols * sizeof(float));
    /* pieces of rows are no pattern that the memory's own prefetchers follow */
    for (uint32_t r = 0; r < n_r; r++)
        for (size_t at = 0; at < w->cols * yard_dtype_bytes(w->dtype); at += 64)
            __builtin_prefetch((const uint8_t *)matrix_row(w, first + r) + at, 0, 2);
    for (uint32_t r = 0, end; r < n_r; r = end) {
        const uint32_t group_end = (r / YARD_GROUP + 1) * YARD_GROUP;

        end = group_end < n_r ? group_end : n_r;
        if (w->dtype == YARD_FP8_E4M3) {
            const uint32_t block_end = r + w->block_rows - (w->row0 + first + r) % w->block_rows;
            end = block_end < end ? block_end : end;
        }
        for (uint32_t c = 0; c < w->cols; c += TRANSPOSED_COLUMNS) {
            const uint32_t left = w->cols - c;

            add_piece(job, scratch, x,
                      &(piece){ .first = first,
                                .r = r,
                                .end = end,
                                .c = c,
                                .n_c = left < TRANSPOSED_COLUMNS ? left : TRANSPOSED_COLUMNS });
        }
    }
}

/* k_b's rows of x are read one value at a time. */
static x_rows transposed_x(const struct head_job *job, uint32_t n_x, cpu_scratch *scratch)
{
    return (x_rows){ .form = ROW_PLAIN,
                     .x = scratch->x,
                     .ld = row_form_ld(ROW_PLAIN, job->a->head_rows),
                     .n_x = n_x,
                     .n_k = job->a->head_rows,
                     .scaled = has_scales(&job->source),
                     .x_scale = scratch->x_scale };
}

static void head_task(void *ctx, uint32_t h, uint32_t thread)
{
    const struct head_job *job = ctx;
    const yard_head_linear_args *a = job->a;
    const cpu_kernels *k = job->s->kernels;
    cpu_scratch *scratch = &job->s->scratch[thread];
    const uint32_t first = h * a->head_stride + a->head_offset;
    const uint32_t n_out = a->transposed ? a->w.cols : a->head_rows;

    for (uint32_t i0 = 0; i0 < job->n_rows; i0 += MAX_TILE_ROWS) {
        const uint32_t left = job->n_rows - i0;
        const uint32_t n_x = left < MAX_TILE_ROWS ? left : MAX_TILE_ROWS;
        const x_rows x =
            a->transposed ? transposed_x(job, n_x, scratch)
                          : yard_cpu_product_rows(k, &job->source, &a->w, n_x, scratch->x, scratch);

        for (uint32_t i = 0; i < n_x; i++)
            yard_cpu_load_row(k, &job->source, (size_t)job->row[i0 + i],
                              (size_t)h * a->x_head_stride, scratch, &x, i);
        if (a->transposed)
            transposed_rows(job, scratch, first, &x);
        else
            yard_cpu_product(k, scratch,
                             &(product_args){ .x = x,
                                              .w = &a->w,
                                              .w_first = first,
                                              .n_w = n_out,
                                              .y = scratch->acc,
                                              .y_ld = n_out });
        for (uint32_t i = 0; i < n_x; i++)
            yard_cpu_store_row(k, a->y, (size_t)job->row[i0 + i], (size_t)h * a->y_head_stride,
                               n_out, scratch->acc + i * n_out);
    }
}

void yard_cpu_head_linear(yard_stream s, const yard_head_linear_args *a)
{
    struct head_job job = { .s = s,
                            .a = a,
                            .row = s->list,
                            .source = { .x = a->x, .quantise = a->quantise, .ue8m0 = a->ue8m0 } };

    for (int32_t i = 0; i < *a->n_rows; i++)
        if (!a->row_mask || a->row_mask[i])
            s->list[job.n_rows++] = i;
    yard_pool_run(s->pool, head_task, &job, job.n_rows ? a->n_heads : 0);
}
