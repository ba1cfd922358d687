/* switchyard bench ops: one case, placed, verified and timed. */
#include <stdio.h>
#include <stdlib.h>

#include "cli/bench_ops_run.h"

/* The case over host memory, its copies on the device, and where calls stand. */
typedef struct run {
    const yard_bench_ops_case *c;
    yard_bench_ops_size size;
    yard_bench_ops_set host, *sets; /* [n_sets] */
    size_t set_bytes;
    uint32_t n_sets, next;
    const yard_ops *ops;
    yard_stream stream;
    double bytes, flops;
    char shape[BENCH_OPS_SHAPE_BYTES];
} run;

enum { CACHES = 4, SET_ALIGN = 4096 };
static const size_t max_sets_bytes = (size_t)3 << 30;

static void release(run *r)
{
    for (uint32_t i = 0; i < r->n_sets && r->sets; i++) {
        if (r->sets[i].prepared)
            r->ops->release_prepared(r->stream, r->sets[i].prepared);
        free(r->sets[i].w);
    }
    yard_pages_free(r->host.arena.base, r->set_bytes);
    free(r->host.w);
    free(r->sets);
}

static yard_status place_host(run *r, yard_error *err)
{
    yard_bench_ops_set measured = { 0 };

    r->c->place(r->c, &r->size, &measured, false);
    free(measured.w);
    r->set_bytes = yard_align_up(measured.arena.used_bytes, SET_ALIGN);
    r->host.arena =
        (yard_arena){ .base = yard_pages_alloc(r->set_bytes), .size_bytes = r->set_bytes };
    if (!r->host.arena.base)
        return yard_fail(
            err, YARD_ENOMEM,
            "no memory for the %zu bytes of %s: fewer --tokens or a shorter --context may do",
            r->set_bytes, r->c->op);
    r->c->place(r->c, &r->size, &r->host, true);
    yard_bench_ops_fill_set(&r->host);
    r->c->count(r->c, &r->size, &r->host, &r->bytes, &r->flops, r->shape);
    return YARD_OK;
}

/* So many that a call does not find in a cache what an earlier one read. */
static uint32_t count_sets(const ops_bench *b, const run *r)
{
    const double wanted = CACHES * (double)b->device->cache_bytes() / r->bytes + 1;
    const double fit = (double)max_sets_bytes / (double)r->set_bytes;
    const double calls = (double)b->args.n_repeats + 2; /* to verify and to warm up */
    double n = wanted < fit ? wanted : fit;

    n = n < calls ? n : calls;
    return n < 1 ? 1 : (uint32_t)n;
}

static yard_status grow_pool(ops_bench *b, size_t n_bytes, yard_error *err)
{
    if (b->pool_bytes >= n_bytes)
        return YARD_OK;
    if (b->pool)
        b->device->release(b->pool, b->pool_bytes);
    b->pool = b->device->alloc(n_bytes);
    b->pool_bytes = b->pool ? n_bytes : 0;
    if (!b->pool)
        return yard_fail(err, YARD_ENOMEM, "bench ops: %zu bytes on %s", n_bytes, b->device->name);
    return YARD_OK;
}

static yard_status place_sets(ops_bench *b, run *r, yard_error *err)
{
    const uint32_t n = count_sets(b, r);
    yard_status st = grow_pool(b, n * r->set_bytes, err);

    r->sets = calloc(n, sizeof(*r->sets));
    if (!r->sets)
        return yard_fail(err, YARD_ENOMEM, "bench ops: no memory for %u sets", n);
    for (; r->n_sets < n && !st; r->n_sets++) {
        yard_bench_ops_set *set = &r->sets[r->n_sets];

        set->arena.base = (uint8_t *)b->pool + r->n_sets * r->set_bytes;
        set->arena.size_bytes = r->set_bytes;
        r->c->place(r->c, &r->size, set, false);
        b->device->upload(set->arena.base, r->host.arena.base, r->set_bytes);
        set->batch = r->sets[0].batch; /* as the layers of a step */
        if (r->c->prepare && !b->device->in_place)
            st = r->c->prepare(r->ops, r->stream, &r->host, set, err);
    }
    return st;
}

static void call(void *ctx)
{
    run *r = ctx;

    r->c->run(r->ops, r->stream, &r->sets[r->next]);
    r->next = (r->next + 1) % r->n_sets;
}

/* One call on the device against the definition of a piece of it, on the host. */
static yard_status verify(const ops_bench *b, run *r, bool *verified, yard_error *err)
{
    yard_bench_ops_set got = { 0 };
    yard_status st = YARD_OK;

    got.arena = (yard_arena){ .base = yard_pages_alloc(r->set_bytes), .size_bytes = r->set_bytes };
    if (!got.arena.base)
        return yard_fail(err, YARD_ENOMEM, "bench ops: %zu bytes to verify %s", r->set_bytes,
                         r->c->op);
    r->c->place(r->c, &r->size, &got, false);
    call(r);
    b->ops->synchronise(b->stream);
    b->device->download(got.arena.base, r->sets[0].arena.base, r->set_bytes);
    r->c->shrink(&r->host);
    r->c->run(&yard_ops_cpu, b->definition, &r->host);
    *verified = yard_bench_ops_agrees(&got, &r->host, b->device->exact(&b->config));
    yard_pages_free(got.arena.base, r->set_bytes);
    free(got.w);
    return st;
}

static double flop_rate(ops_bench *b, yard_dtype x)
{
    if (b->flop_rate[x] <= 0)
        b->flop_rate[x] = b->device->flop_rate(&b->config, x);
    return b->flop_rate[x];
}

static double floor_us(ops_bench *b, const run *r)
{
    const double read_us = b->read_rate > 0 ? r->bytes / b->read_rate * 1e6 : -1;
    const yard_dtype x = r->c->x == YARD_FP8_E4M3 && !b->model.fp8 ? YARD_BF16 : r->c->x;
    const double compute_us = r->flops > 0 ? r->flops / flop_rate(b, x) * 1e6 : -1;

    return read_us > compute_us ? read_us : compute_us;
}

enum { MAX_US = 2000000, LEAST_REPEATS = 5 };

static yard_status print_row(ops_bench *b, const run *r, yard_bench_row *row, yard_error *err)
{
    yard_status st;

    row->shape = json_pack("{s:s, s:s, s:s, s:s, s:i}", "op", r->c->op, "shape", r->shape, "model",
                           b->args.model, "table", b->table, "tokens", (int)r->size.n_tokens);
    if (row->shape && b->device == &yard_bench_ops_cpu)
        json_object_set_new(row->shape, "threads", json_integer(b->config.n_threads));
    if (!row->shape)
        return yard_fail(err, YARD_ENOMEM, "bench ops: no memory for a row");
    st = yard_bench_print_row(row, b->args.json, err);
    json_decref(row->shape);
    b->n_rows++;
    b->n_wrong += !row->verified;
    return st;
}

/* The same product in f32 by somebody else. */
static yard_status time_blas(ops_bench *b, const run *r, yard_error *err)
{
    char shape[BENCH_OPS_SHAPE_BYTES];
    yard_bench_row row = { .bench = "ops",
                           .floor_us = -1,
                           .device = b->device->hardware(),
                           .variant = b->args.blas,
                           .ranks = 1 };
    uint32_t rows, cols;
    yard_status st;

    if (!b->blas || strcmp(r->c->op, "linear") != 0)
        return YARD_OK;
    rows = r->sets[0].args.linear.w.rows;
    cols = r->sets[0].args.linear.w.cols;
    snprintf(shape, sizeof(shape), "%s %ux%u f32", r->c->what, rows, cols);
    st = yard_bench_blas_time(b->blas, r->size.n_tokens, rows, cols, LEAST_REPEATS, &row, err);
    if (st)
        return st;
    row.shape = json_pack("{s:s, s:s, s:s, s:s, s:i, s:i}", "op", "sgemm", "shape", shape, "model",
                          b->args.model, "table", b->table, "tokens", (int)r->size.n_tokens,
                          "threads", (int)b->config.n_threads);
    st = row.shape ? yard_bench_print_row(&row, b->args.json, err)
                   : yard_fail(err, YARD_ENOMEM, "bench ops: no memory for a row");
    json_decref(row.shape);
    return st;
}

static yard_status time_case(ops_bench *b, run *r, yard_error *err)
{
    double *us = calloc(b->args.n_repeats, sizeof(*us)), sum_us = 0;
    const uint32_t least =
        b->args.n_repeats < LEAST_REPEATS ? (uint32_t)b->args.n_repeats : LEAST_REPEATS;
    yard_bench_row row = {
        .bench = "ops",
        .bytes = r->bytes,
        .flops = r->flops,
        .floor_us = floor_us(b, r),
        .device = b->device->hardware(),
        .variant = b->ops->describe(b->stream),
        .ranks = 1,
    };
    yard_status st = us ? verify(b, r, &row.verified, err)
                        : yard_fail(err, YARD_ENOMEM, "bench ops: no memory for samples");
    uint32_t n = 0;

    if (!st) {
        call(r); /* warm */
        for (; n < b->args.n_repeats && (n < least || sum_us < MAX_US); n++) {
            us[n] = b->device->time_us(b->ops, b->stream, call, r);
            sum_us += us[n];
        }
        yard_bench_fill(&row, us, n);
        st = print_row(b, r, &row, err);
    }
    free(us);
    return st;
}

yard_status yard_bench_ops_time_case(ops_bench *b, const yard_bench_ops_case *c, uint32_t n_tokens,
                                     yard_error *err)
{
    run r = { .c = c,
              .size = { .model = &b->model,
                        .kv_dtype = b->args.kv_dtype,
                        .n_tokens = n_tokens,
                        .context = (uint32_t)b->args.context,
                        .n_experts = (uint32_t)b->args.n_experts },
              .ops = b->ops,
              .stream = b->stream };
    yard_status st = place_host(&r, err);

    if (!st)
        st = place_sets(b, &r, err);
    if (!st)
        st = time_case(b, &r, err);
    if (!st)
        st = time_blas(b, &r, err);
    release(&r);
    return st;
}
