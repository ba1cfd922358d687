/* Operations on single rows: embedding, norm, activation, quantisation, residual. */
#include <math.h>

#include "ops/cpu/cpu.h"

static const void *row_at(yard_rows x, size_t row, size_t col)
{
    return (const uint8_t *)x.data + (row * x.ld + col) * yard_dtype_bytes(x.dtype);
}

void yard_cpu_read_row(const cpu_kernels *k, yard_rows x, size_t row, size_t col, uint32_t n,
                       float *dst)
{
    k->convert->decode(x.dtype, row_at(x, row, col), n, dst);
}

void yard_cpu_store_row(const cpu_kernels *k, yard_rows y, size_t row, size_t col, uint32_t n,
                        const float *src)
{
    void *dst = (void *)row_at(y, row, col);

    if (y.dtype == YARD_BF16)
        k->convert->round_bf16(src, n, dst);
    else
        memcpy(dst, src, n * sizeof(*src));
}

/* Codes or plain values as the m-th row of x. */
static void lay_out_row(const cpu_kernels *k, yard_dtype dtype, const void *stored,
                        cpu_scratch *scratch, const x_rows *x, uint32_t m)
{
    float *row = (float *)x->x + m * x->ld;
    float *apart = scratch->row + pad_lanes(x->n_k); /* what is stored may be in the first */

    switch (x->form) {
    case ROW_BF16:
        k->codes_to_bf16(stored, x->n_k, (uint16_t *)x->x + m * x->ld);
        break;
    case ROW_PAIRS:
        k->decode_pairs(dtype, stored, x->n_k, row);
        break;
    case ROW_QUADS:
        k->decode_pairs(dtype, stored, x->n_k, row);
        k->pairs_to_quads(row, pad_lanes(x->n_k));
        break;
    case ROW_PAIR_STRIPS:
        k->decode_pairs(dtype, stored, x->n_k, apart);
        k->bf16_strips->lay_pairs(apart, x->n_k, m, x->n_x, x->x, x->ld);
        break;
    case ROW_QUAD_STRIPS:
        k->decode_pairs(dtype, stored, x->n_k, apart);
        k->pairs_to_quads(apart, pad_lanes(x->n_k));
        k->fp8_strips->lay_quads(apart, x->n_k, m, x->n_x, x->x, x->ld);
        break;
    case ROW_PLAIN:
        k->convert->decode(dtype, stored, x->n_k, row);
        memset(row + x->n_k, 0, (pad_lanes(x->n_k) - x->n_k) * sizeof(float));
    }
}

void yard_cpu_load_row(const cpu_kernels *k, const row_source *source, size_t row, size_t col,
                       cpu_scratch *scratch, const x_rows *x, uint32_t m)
{
    const void *stored = row_at(source->x, row, col);
    yard_dtype dtype = source->x.dtype;
    float *scale = x->x_scale + m * yard_group_count(x->n_k);

    if (dtype == YARD_FP8_E4M3) {
        const size_t n_scales = yard_group_count(x->n_k); /* FP8 rows are read whole */
        memcpy(scale, source->x.scale + row * n_scales, n_scales * sizeof(*scale));
    } else if (source->quantise) {
        k->convert->decode(dtype, stored, x->n_k, scratch->row);
        k->convert->quantise(scratch->row, x->n_k, source->ue8m0, scratch->codes, scale);
        stored = scratch->codes;
        dtype = YARD_FP8_E4M3;
    }
    lay_out_row(k, dtype, stored, scratch, x, m);
}

enum { PIECE = 512 }; /* values converted at once, on the stack; sums of squares are of so many */

void yard_cpu_round_values(const cpu_kernels *k, float *values, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += PIECE) {
        const uint32_t left = n - i < PIECE ? n - i : PIECE;
        uint16_t rounded[PIECE];

        k->convert->round_bf16(values + i, left, rounded);
        k->convert->decode(YARD_BF16, rounded, left, values + i);
    }
}

/* Puts one f32 row into the wanted forms; values are rounded in place for the quantised one. */
static void emit(const cpu_kernels *k, const yard_out *y, size_t row, uint32_t n, bool ue8m0,
                 float *values)
{
    if (y->plain.data)
        yard_cpu_store_row(k, y->plain, row, 0, n, values);
    if (y->quant.data) {
        yard_cpu_round_values(k, values, n);
        k->convert->quantise(values, n, ue8m0, (uint8_t *)(void *)row_at(y->quant, row, 0),
                             y->quant.scale + row * yard_group_count(n));
    }
}

struct job {
    yard_stream s;
    const void *args;
};

static void run_rows(yard_stream s, yard_task_fn fn, const void *args, const int32_t *n_rows)
{
    struct job job = { s, args };

    yard_pool_run(s->pool, fn, &job, (uint32_t)*n_rows);
}

static void embed_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct job *job = ctx;
    const yard_embed_args *a = job->args;

    (void)thread;
    job->s->kernels->convert->decode(a->table.dtype, matrix_row(&a->table, (size_t)a->token[i]),
                                     a->table.cols, a->x + (size_t)i * a->table.cols);
}

void yard_cpu_embed(yard_stream s, const yard_embed_args *a)
{
    run_rows(s, embed_row, a, a->n_rows);
}

/* Pieces of PIECE values one after the other, so that a GPU may sum them side by side. */
static float sum_squares(const cpu_kernels *k, const float *values, uint32_t n)
{
    float sum = 0;

    for (uint32_t i = 0; i < n; i += PIECE)
        sum += k->sum_squares(values + i, n - i < PIECE ? n - i : PIECE);
    return sum;
}

/* values = values / rms * weight */
static void norm_values(const cpu_kernels *k, float *values, uint32_t n, yard_dtype dtype,
                        const void *weight, float eps)
{
    const float inverse = 1.0f / sqrtf(sum_squares(k, values, n) / (float)n + eps);
    const uint8_t *stored = weight;

    for (uint32_t i = 0; i < n; i += PIECE) {
        const uint32_t left = n - i < PIECE ? n - i : PIECE;
        float w[PIECE];

        k->convert->decode(dtype, stored + i * yard_dtype_bytes(dtype), left, w);
        for (uint32_t c = 0; c < left; c++)
            values[i + c] = values[i + c] * inverse * w[c];
    }
}

static void rms_norm_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct job *job = ctx;
    const yard_rms_norm_args *a = job->args;
    const cpu_kernels *k = job->s->kernels;
    cpu_scratch *scratch = &job->s->scratch[thread];
    float *values = scratch->row, *add = scratch->row + pad_lanes(a->n_cols);

    yard_cpu_read_row(k, a->x, i, 0, a->n_cols, values);
    if (a->add.data) {
        yard_cpu_read_row(k, a->add, i, 0, a->n_cols, add);
        for (uint32_t c = 0; c < a->n_cols; c++)
            values[c] += add[c];
        yard_cpu_store_row(k, a->x, i, 0, a->n_cols, values);
    }
    norm_values(k, values, a->n_cols, a->weight_dtype, a->weight, a->eps);
    emit(k, &a->y, i, a->n_cols, a->ue8m0, values);
}

void yard_cpu_rms_norm_quant(yard_stream s, const yard_rms_norm_args *a)
{
    run_rows(s, rms_norm_row, a, a->n_rows);
}

static void silu_mul_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct job *job = ctx;
    const yard_silu_mul_args *a = job->args;
    const cpu_kernels *k = job->s->kernels;
    cpu_scratch *scratch = &job->s->scratch[thread];
    float *gate = scratch->row, *up = scratch->row + pad_lanes(a->n_cols);

    yard_cpu_read_row(k, a->gate_up, i, 0, a->n_cols, gate);
    yard_cpu_read_row(k, a->gate_up, i, a->n_cols, a->n_cols, up);
    k->silu_mul(gate, up, a->n_cols, gate);
    emit(k, &a->y, i, a->n_cols, a->ue8m0, gate);
}

void yard_cpu_silu_mul_quant(yard_stream s, const yard_silu_mul_args *a)
{
    run_rows(s, silu_mul_row, a, a->n_rows);
}

static void residual_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct job *job = ctx;
    const yard_residual_add_args *a = job->args;
    const cpu_kernels *k = job->s->kernels;
    float *x = a->x + (size_t)i * a->n_cols;
    float *add = job->s->scratch[thread].row;
    const yard_rows parts[2] = { a->a, a->b };

    for (int p = 0; p < 2; p++) {
        if (!parts[p].data)
            continue;
        yard_cpu_read_row(k, parts[p], i, 0, a->n_cols, add);
        for (uint32_t c = 0; c < a->n_cols; c++)
            x[c] += add[c];
    }
}

void yard_cpu_residual_add(yard_stream s, const yard_residual_add_args *a)
{
    run_rows(s, residual_row, a, a->n_rows);
}

static void quantise_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct job *job = ctx;
    const yard_quantise_args *a = job->args;
    const yard_out y = { .quant = a->y };
    cpu_scratch *scratch = &job->s->scratch[thread];

    yard_cpu_read_row(job->s->kernels, a->x, i, 0, a->n_cols, scratch->row);
    emit(job->s->kernels, &y, i, a->n_cols, a->ue8m0, scratch->row);
}

void yard_cpu_quantise(yard_stream s, const yard_quantise_args *a)
{
    run_rows(s, quantise_row, a, a->n_rows);
}

void yard_cpu_select_rows(yard_stream s, const yard_select_rows_args *a)
{
    (void)s;
    for (int32_t i = 0; i < *a->n_rows; i++)
        memcpy(a->out + (size_t)i * a->n_cols, a->x + (size_t)a->index[i] * a->n_cols,
               a->n_cols * sizeof(float));
}

/* Angles in double: at position 100,000 an f32 angle is off by several thousandths. */
void yard_cpu_turns(const yard_rope *rope, int32_t position, float *turns)
{
    const uint32_t half = rope->n_dims / 2;

    for (uint32_t i = 0; i < half; i++) {
        const double angle = (double)position * (double)rope->inv_freq[i];

        turns[i] = (float)cos(angle);
        turns[half + i] = (float)sin(angle);
    }
}

void yard_cpu_rotate(const yard_rope *rope, const float *turns, const float *x, float *y)
{
    const uint32_t half = rope->n_dims / 2;
    const uint32_t step = rope->layout == YARD_ROPE_HALVES ? 1 : 2;
    const float *second = x + (rope->layout == YARD_ROPE_HALVES ? half : 1);

    for (uint32_t i = 0; i < half; i++) {
        const float c = turns[i], s = turns[half + i];

        y[i] = x[step * i] * c - second[step * i] * s;
        y[half + i] = second[step * i] * c + x[step * i] * s;
    }
}

static void rope_q_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct job *job = ctx;
    const yard_rope_q_args *a = job->args;
    const cpu_kernels *k = job->s->kernels;
    cpu_scratch *scratch = &job->s->scratch[thread];
    float *x = scratch->row, *y = x + a->rope.n_dims;

    yard_cpu_turns(&a->rope, a->batch->position[i], scratch->turns);
    for (uint32_t h = 0; h < a->n_heads; h++) {
        const size_t col = (size_t)(h + 1) * a->head_dim - a->rope.n_dims;

        yard_cpu_read_row(k, a->q, i, col, a->rope.n_dims, x);
        yard_cpu_rotate(&a->rope, scratch->turns, x, y);
        yard_cpu_store_row(k, a->q, i, col, a->rope.n_dims, y);
    }
}

void yard_cpu_rope_q(yard_stream s, const yard_rope_q_args *a)
{
    run_rows(s, rope_q_row, a, a->batch->n_tokens);
}

static void append_row(void *ctx, uint32_t i, uint32_t thread)
{
    const struct job *job = ctx;
    const yard_rope_append_kv_args *a = job->args;
    const yard_batch *b = a->batch;
    const cpu_kernels *k = job->s->kernels;
    const uint32_t position = (uint32_t)b->position[i];
    void *row = yard_cpu_page_row(
        &a->cache, yard_latent_row_of(a->cache.dtype, a->kv_rank, a->rope.n_dims).n_bytes, b, i,
        position / YARD_PAGE_TOKENS, position % YARD_PAGE_TOKENS);
    float *x = job->s->scratch[thread].row, *y = x + a->kv_rank + a->rope.n_dims;

    yard_cpu_read_row(k, a->kv, i, 0, a->kv_rank + a->rope.n_dims, x);
    norm_values(k, x, a->kv_rank, a->norm_dtype, a->norm_weight, a->eps);
    yard_cpu_turns(&a->rope, (int32_t)position, job->s->scratch[thread].turns);
    yard_cpu_rotate(&a->rope, job->s->scratch[thread].turns, x + a->kv_rank, y);
    yard_cpu_store_latent(k, a->cache.dtype, a->kv_rank, a->rope.n_dims, a->ue8m0, x, y, row);
}

void yard_cpu_rope_append_kv(yard_stream s, const yard_rope_append_kv_args *a)
{
    run_rows(s, append_row, a, a->batch->n_tokens);
}
