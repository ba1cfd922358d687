#include "cli/bench_gemm.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum {
    MIN_CALLS = 10,  /* in a graph, as the figures of other libraries were taken */
    GRAPH_US = 1000, /* .. or so many that it takes about as long */
    MAX_CALLS = 200,
    REPLAYS = 11,
    WARM_REPLAYS = 3,
    COOL_US = 50000, /* a chip that just multiplied runs at a lower clock */
    CHECKED = 96,    /* results compared */
    MAX_GROUPS = 512
};

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Bell-shaped values, as activations and weights are: power, and so the clock, depends on bits. */
static void fill_values(yard_dtype dtype, void *to, size_t n, uint64_t seed)
{
    enum { TABLE = 1 << 16 };
    static uint8_t fp8[TABLE];
    static uint16_t bf16[TABLE];
    static bool ready = false;
    uint64_t state = seed;

    for (uint32_t i = 0; i < TABLE && !ready; i++) {
        const uint64_t r = next_random(&state);
        const float sum = (float)(r & 0xffff) + (float)(r >> 16 & 0xffff) +
                          (float)(r >> 32 & 0xffff) + (float)(r >> 48);
        const float value = (sum / 65536.0f - 2.0f) * 190.0f; /* deviation 110 */
        fp8[i] = yard_e4m3_from_f32(value);
        bf16[i] = yard_bf16_from_f32(value / 110.0f);
    }
    ready = true;
    for (size_t i = 0; i < n; i += 4) {
        uint64_t r = next_random(&state);
        for (size_t j = i; j < i + 4 && j < n; j++, r >>= 16) {
            if (dtype == YARD_FP8_E4M3)
                ((uint8_t *)to)[j] = fp8[r & 0xffff];
            else
                ((uint16_t *)to)[j] = bf16[r & 0xffff];
        }
    }
}

static void fill_scales(float *to, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        to[i] = 1e-3f + 2e-3f * (float)(next_random(&seed) >> 40) * 0x1p-24f;
}

yard_status yard_bench_weights_create(yard_bench_weights **out, const yard_ops *ops, yard_stream s,
                                      yard_dtype dtype, uint32_t n_out, uint32_t n_in,
                                      size_t n_bytes, yard_error *err)
{
    const size_t each = (size_t)n_out * n_in * yard_dtype_bytes(dtype);
    const uint32_t scale_ld = yard_group_count(n_in);
    const size_t n_scales = (size_t)yard_ceil_div(n_out, YARD_GROUP) * scale_ld;
    yard_bench_weights *w = yard_alloc(sizeof(*w));
    yard_matrix *parts = NULL;
    void *values = NULL;
    float *scale = NULL;
    yard_status st = YARD_OK;

    if (!w)
        return yard_fail(err, YARD_ENOMEM, "bench: %zu bytes", sizeof(*w));
    w->n_matrices = (uint32_t)((n_bytes + each - 1) / each);
    w->n_out = n_out;
    w->n_in = n_in;
    w->device = calloc(w->n_matrices, sizeof(*w->device));
    parts = calloc(w->n_matrices, sizeof(*parts));
    values = malloc(each);
    scale = malloc(n_scales * sizeof(*scale));
    w->host = (yard_matrix){ .dtype = dtype,
                             .rows = n_out,
                             .cols = n_in,
                             .ld = n_in,
                             .data = values,
                             .scale = dtype == YARD_FP8_E4M3 ? scale : NULL,
                             .scale_ld = scale_ld,
                             .block_rows = YARD_GROUP };
    if (!w->device || !parts || !values || !scale) {
        st = yard_fail(err, YARD_ENOMEM, "bench: weights of %u by %u", n_out, n_in);
    } else {
        fill_values(dtype, values, (size_t)n_out * n_in, 77);
        fill_scales(scale, n_scales, 9);
        for (uint32_t i = 0; i < w->n_matrices; i++)
            parts[i] = w->host;
        st = ops->prepare(
            &w->prepared, w->device, s,
            &(yard_prepare_args){ .parts = parts, .n_matrices = w->n_matrices, .n_parts = 1 }, err);
    }
    free(parts);
    w->host.scale = scale;
    if (st != YARD_OK) {
        yard_bench_weights_destroy(ops, s, w);
        return st;
    }
    *out = w;
    return YARD_OK;
}

void yard_bench_weights_destroy(const yard_ops *ops, yard_stream s, yard_bench_weights *w)
{
    if (!w)
        return;
    ops->release_prepared(s, w->prepared);
    free((void *)w->host.data);
    free((void *)w->host.scale);
    free(w->device);
    free(w);
}

typedef struct gemm_run {
    const yard_bench_gemm *g;
    int32_t offset[MAX_GROUPS + 1]; /* linear: [1] is the number of rows */
    yard_rows x_host, x, y;
    int32_t *offset_device;
} gemm_run;

/* Pairs of tokens and experts fall on groups at random: the first seed whose draw is as wanted. */
static void draw_groups(gemm_run *r)
{
    enum { SEEDS = 10000 };
    const yard_bench_gemm *g = r->g;
    const uint32_t n = g->n_groups ? g->n_groups : 1;

    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        uint64_t state = seed;
        uint32_t n_active = 0, padded = 0;
        memset(r->offset, 0, sizeof(r->offset));
        for (uint32_t i = 0; i < g->n_rows; i++)
            r->offset[next_random(&state) % n + 1]++;
        for (uint32_t i = 1; i <= n; i++) {
            n_active += r->offset[i] > 0;
            padded += yard_ceil_div((uint32_t)r->offset[i], 128) * 128;
        }
        if ((!g->n_active || n_active == g->n_active) &&
            (!g->padded_rows || padded == g->padded_rows))
            break;
    }
    for (uint32_t i = 0; i < n; i++)
        r->offset[i + 1] += r->offset[i];
}

static void count_work(const gemm_run *r, yard_bench_gemm_time *out)
{
    const yard_bench_gemm *g = r->g;
    const yard_matrix *w = &g->w->host;
    const double n_groups = g->n_groups ? g->n_groups : 1, n_rows = g->n_rows;
    const double n_out = g->w->n_out, n_in = g->w->n_in;
    const double element = (double)yard_dtype_bytes(w->dtype);
    const double scales = w->scale ? 4 * yard_group_count(w->cols) : 0;
    const double matrix =
        n_out * n_in * element + (w->scale ? scales * yard_ceil_div(w->rows, YARD_GROUP) : 0);

    for (uint32_t i = 0; i < n_groups; i++) {
        const uint32_t rows = (uint32_t)(r->offset[i + 1] - r->offset[i]);
        out->n_active += rows > 0;
        out->max_group_rows = rows > out->max_group_rows ? rows : out->max_group_rows;
    }
    out->flops = 2 * n_rows * n_out * n_in;
    out->article_bytes = n_groups * n_out * n_in * element + n_rows * (n_in * element + n_out);
    out->bytes = out->n_active * matrix + n_rows * (n_in * element + scales + 2 * n_out);
}

static yard_status place(gemm_run *r, const yard_ops *ops, yard_stream s, yard_error *err)
{
    const yard_matrix *w = &r->g->w->host;
    const size_t n = (size_t)r->g->n_rows * w->cols, bytes = n * yard_dtype_bytes(w->dtype);
    const size_t n_scales = (size_t)r->g->n_rows * yard_group_count(w->cols);
    yard_status st = YARD_OK;

    r->x_host = (yard_rows){ .dtype = w->dtype,
                             .ld = w->cols,
                             .data = malloc(bytes),
                             .scale = malloc(n_scales * sizeof(float)) };
    r->x = r->x_host;
    r->x.data = NULL;
    r->x.scale = NULL;
    r->y = (yard_rows){ .dtype = YARD_BF16, .ld = w->rows };
    if (!r->x_host.data || !r->x_host.scale)
        return yard_fail(err, YARD_ENOMEM, "bench: %zu bytes of activations", bytes);
    fill_values(w->dtype, r->x_host.data, n, 11);
    fill_scales(r->x_host.scale, n_scales, 5);
    st = ops->allocate(&r->x.data, s, bytes, err);
    if (!st)
        st = ops->allocate((void **)&r->x.scale, s, n_scales * sizeof(float), err);
    if (!st)
        st = ops->allocate(&r->y.data, s, (size_t)r->g->n_rows * w->rows * sizeof(uint16_t), err);
    if (!st)
        st = ops->allocate((void **)&r->offset_device, s, sizeof(r->offset), err);
    if (!st)
        st = ops->upload(s, r->x.data, r->x_host.data, bytes, err);
    if (!st)
        st = ops->upload(s, r->x.scale, r->x_host.scale, n_scales * sizeof(float), err);
    if (!st)
        st = ops->upload(s, r->offset_device, r->offset, sizeof(r->offset), err);
    return st;
}

static void unplace(gemm_run *r, const yard_ops *ops, yard_stream s)
{
    free(r->x_host.data);
    free(r->x_host.scale);
    ops->release(s, r->x.data);
    ops->release(s, r->x.scale);
    ops->release(s, r->y.data);
    ops->release(s, r->offset_device);
}

/* Call number i: the next weights in turn. */
static void call(const gemm_run *r, const yard_ops *ops, yard_stream s, uint32_t i)
{
    const yard_bench_gemm *g = r->g;
    const uint32_t each = g->n_groups ? g->n_groups : 1, n_sets = g->w->n_matrices / each;
    const yard_matrix *w = &g->w->device[i % (n_sets ? n_sets : 1) * each];

    if (g->n_groups)
        ops->grouped_linear(s, &(yard_grouped_linear_args){ .n_groups = g->n_groups,
                                                            .offset = r->offset_device,
                                                            .max_rows = g->n_rows,
                                                            .x = r->x,
                                                            .w = w,
                                                            .y = r->y });
    else
        ops->linear(s, &(yard_linear_args){ .n_rows = r->offset_device + 1,
                                            .max_rows = g->n_rows,
                                            .x = r->x,
                                            .w = *w,
                                            .y = r->y });
}

/* A graph of n_calls, and how long each of them took. */
static yard_status time_calls(const gemm_run *r, const yard_ops *ops, yard_stream s,
                              uint32_t n_calls, uint32_t n_replays, double *us, yard_error *err)
{
    yard_graph *graph = NULL;
    float graph_us = 0;
    yard_status st = ops->capture_begin(s, err);

    for (uint32_t i = 0; i < n_calls && !st; i++)
        call(r, ops, s, i);
    if (!st)
        st = ops->capture_end(&graph, s, err);
    if (!st)
        st = ops->check(s, err);
    for (uint32_t i = 0; i < WARM_REPLAYS && !st; i++)
        st = ops->replay(s, graph, &graph_us, err);
    for (uint32_t i = 0; i < n_replays && !st; i++) {
        st = ops->replay(s, graph, &graph_us, err);
        us[i] = (double)graph_us / n_calls;
    }
    ops->release_graph(s, graph);
    return st;
}

static double x_value(const gemm_run *r, size_t row, uint32_t k)
{
    const size_t at = row * r->x_host.ld + k;

    if (r->x.dtype == YARD_BF16)
        return (double)yard_f32_from_bf16(((const uint16_t *)r->x_host.data)[at]);
    return (double)yard_f32_from_e4m3(((const uint8_t *)r->x_host.data)[at]) *
           (double)r->x_host.scale[row * yard_group_count(r->x_host.ld) + k / YARD_GROUP];
}

static double w_value(const yard_matrix *w, size_t row, uint32_t k)
{
    if (w->dtype == YARD_BF16)
        return (double)yard_f32_from_bf16(((const uint16_t *)w->data)[row * w->ld + k]);
    return (double)yard_f32_from_e4m3(((const uint8_t *)w->data)[row * w->ld + k]) *
           (double)w->scale[row / YARD_GROUP * w->scale_ld + k / YARD_GROUP];
}

/* Results of the last call, at places drawn by chance: all matrices hold the same values. */
static yard_status verify(const gemm_run *r, const yard_ops *ops, yard_stream s, bool *verified,
                          yard_error *err)
{
    const yard_matrix *w = &r->g->w->host;
    const size_t n_bytes = (size_t)r->g->n_rows * w->rows * sizeof(uint16_t);
    uint16_t *y = malloc(n_bytes);
    uint64_t state = 3;
    double error = 0, size = 0;
    yard_status st;

    if (!y)
        return yard_fail(err, YARD_ENOMEM, "bench: %zu bytes to verify", n_bytes);
    memset(y, 0xff, n_bytes);
    st = ops->upload(s, r->y.data, y, n_bytes, err);
    call(r, ops, s, 0);
    if (!st)
        st = ops->download(s, y, r->y.data, n_bytes, err);
    for (int i = 0; i < CHECKED && !st; i++) {
        const size_t row = next_random(&state) % r->g->n_rows;
        const size_t col = next_random(&state) % w->rows;
        double want = 0;
        for (uint32_t k = 0; k < w->cols; k++)
            want += x_value(r, row, k) * w_value(w, col, k);
        const double got = (double)yard_f32_from_bf16(y[row * w->rows + col]);
        error += (got - want) * (got - want);
        size += want * want;
    }
    *verified = !st && error <= size * 3e-3 * 3e-3;
    free(y);
    return st;
}

yard_status yard_bench_gemm_run(yard_bench_gemm_time *out, const yard_ops *ops, yard_stream s,
                                const yard_bench_gemm *g, yard_error *err)
{
    gemm_run r = { .g = g };
    yard_bench_row row = { 0 };
    double us[REPLAYS], n_calls = 0;
    yard_status st;

    *out = (yard_bench_gemm_time){ 0 };
    draw_groups(&r);
    count_work(&r, out);
    st = place(&r, ops, s, err);
    if (!st)
        st = verify(&r, ops, s, &out->verified, err);
    if (!st)
        st = time_calls(&r, ops, s, MIN_CALLS, 1, us, err);
    if (!st) {
        n_calls = GRAPH_US / us[0];
        n_calls = n_calls < MIN_CALLS ? MIN_CALLS : n_calls > MAX_CALLS ? MAX_CALLS : n_calls;
        if (out->flops / us[0] > 2e8) /* 200 TFLOP/s */
            usleep(COOL_US);
        st = time_calls(&r, ops, s, (uint32_t)n_calls, REPLAYS, us, err);
    }
    if (!st) {
        yard_bench_fill(&row, us, REPLAYS);
        out->p50_us = row.p50_us;
        out->p99_us = row.p99_us;
        out->min_us = row.min_us;
    }
    unplace(&r, ops, s);
    return st;
}
