#include "both_gpu_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

bool both_open(both *t, gpu_test *test)
{
    const yard_ops_config config = { .limits = { .max_tokens = 1024,
                                                 .max_rows = 8192,
                                                 .max_in = 32768,
                                                 .max_vocab = 200000,
                                                 .max_experts = 512,
                                                 .max_heads = 128,
                                                 .kv_rank = 512,
                                                 .nope_dims = 128,
                                                 .rope_dims = 128,
                                                 .v_dims = 256 } };
    yard_error err = { 0 };

    *t = (both){ .cpu = &yard_ops_cpu };
    if (!bed_open(&t->b, test, NULL))
        return false;
    gpu_test_case(test, t->cpu->open(&t->cpu_stream, &config, &err) == YARD_OK, "open cpu: %s",
                  err.message);
    return t->cpu_stream && twin_create(&t->b, &t->n_rows, sizeof(int32_t));
}

void both_close(both *t)
{
    twin_destroy(&t->b, &t->n_rows);
    t->cpu->close(t->cpu_stream);
    bed_close(&t->b);
}

bool both_set_count(both *t, uint32_t n)
{
    *(int32_t *)t->n_rows.host = (int32_t)n;
    return twin_upload(&t->b, &t->n_rows);
}

static void run_graph(both *t, void (*fn)(const yard_ops *ops, yard_stream s, const void *args),
                      const void *args)
{
    const yard_ops *ops = t->b.ops;
    yard_graph *graph = NULL;
    yard_error err = { 0 };
    yard_status st = ops->capture_begin(t->b.s, &err);

    if (st == YARD_OK) {
        fn(ops, t->b.s, args);
        st = ops->capture_end(&graph, t->b.s, &err);
    }
    if (st == YARD_OK)
        st = ops->replay(t->b.s, graph, NULL, &err);
    ops->synchronise(t->b.s);
    ops->release_graph(t->b.s, graph);
    gpu_test_case(t->b.t, st == YARD_OK, "graph: %s", err.message);
}

void both_run(both *t, void (*fn)(const yard_ops *ops, yard_stream s, const void *args),
              const void *host_args, const void *device_args)
{
    fn(t->cpu, t->cpu_stream, host_args);
    if (t->n_calls++ % 2)
        run_graph(t, fn, device_args);
    else
        fn(t->b.ops, t->b.s, device_args);
}

bool both_same(both *t, const twin *m)
{
    void *got = malloc(m->n_bytes);
    const bool same = got &&
                      t->b.ops->download(t->b.s, got, m->device, m->n_bytes, NULL) == YARD_OK &&
                      !memcmp(got, m->host, m->n_bytes);

    free(got);
    return same;
}

bool both_same_floats(both *t, const twin *m)
{
    float *got = malloc(m->n_bytes);
    const float *want = m->host;
    bool same = got && t->b.ops->download(t->b.s, got, m->device, m->n_bytes, NULL) == YARD_OK;

    for (size_t i = 0; same && i < m->n_bytes / sizeof(*got); i++)
        same = yard_bits_from_f32(got[i]) == yard_bits_from_f32(want[i]) ||
               (isnan(got[i]) && isnan(want[i]));
    free(got);
    return same;
}

bool both_same_rows(both *t, const rows_twin *r)
{
    return both_same(t, &r->data) && both_same(t, &r->scale);
}

bool both_vary(both *t, rows_twin *r)
{
    for (uint32_t row = 0; row < r->n_rows; row++) {
        const float size = row % 11 == 5 ? 0.0f : ldexpf(1.0f, (int)(row % 37) - 18);
        for (size_t i = (size_t)row * r->host.ld; i < (size_t)(row + 1) * r->host.ld; i++) {
            if (r->host.dtype == YARD_BF16) {
                uint16_t *x = (uint16_t *)r->host.data + i;
                *x = yard_bf16_from_f32(yard_f32_from_bf16(*x) * size);
            } else {
                ((float *)r->host.data)[i] *= size;
            }
        }
    }
    return twin_upload(&t->b, &r->data);
}

uint32_t both_below(both *t, uint32_t n)
{
    return (uint32_t)(gpu_test_random(t->b.t) % n);
}
