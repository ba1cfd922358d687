/* bench ops on a GPU, through its table alone: a graph of many calls, replayed. */
#include <stdio.h>
#include <stdlib.h>

#include "cli/bench_ops.h"

enum { CALLS = 20, CACHE_BYTES = 60 << 20 };

/* What an H200 was seen to reach (docs/performance.md): a kernel that only reads, and long FP8 and
 * bf16 products. */
static const double h200_read_rate = 4.67e12, h200_fp8_rate = 1.3e15, h200_bf16_rate = 6.8e14;

/* A stream for copies, open as long as the program runs. */
static yard_stream copies(void)
{
    static yard_stream s;
    yard_error err = { 0 };

    if (!s && yard_ops_find("cuda")->open(&s, &(yard_ops_config){ 0 }, &err) != YARD_OK) {
        fprintf(stderr, "switchyard bench ops: %s\n", err.message);
        exit(EXIT_FAILURE);
    }
    return s;
}

static const yard_ops *table(const char *name)
{
    return !strcmp(name, "fast") || !strcmp(name, "deterministic") ? yard_ops_find("cuda") : NULL;
}

/* "NVIDIA H200" of "cuda, NVIDIA H200, 132 processors, fast". */
static const char *hardware(void)
{
    static char name[96];

    if (name[0] == '\0')
        sscanf(yard_ops_find("cuda")->describe(copies()), "cuda, %95[^,]", name);
    return name;
}

static void *allocate(size_t n_bytes)
{
    void *p = NULL;

    return yard_ops_find("cuda")->allocate(&p, copies(), n_bytes, NULL) == YARD_OK ? p : NULL;
}

static void release(void *block, size_t n_bytes)
{
    (void)n_bytes;
    yard_ops_find("cuda")->release(copies(), block);
}

static void must(yard_status st, const yard_error *err)
{
    if (st == YARD_OK)
        return;
    fprintf(stderr, "switchyard: bench ops: %s\n", err->message);
    exit(EXIT_FAILURE);
}

static void upload(void *device, const void *host, size_t n_bytes)
{
    yard_error err = { 0 };

    must(yard_ops_find("cuda")->upload(copies(), device, host, n_bytes, &err), &err);
    yard_ops_find("cuda")->synchronise(copies()); /* other streams read it */
}

static void download(void *host, const void *device, size_t n_bytes)
{
    yard_error err = { 0 };

    must(yard_ops_find("cuda")->download(copies(), host, device, n_bytes, &err), &err);
}

static size_t cache_bytes(void)
{
    return CACHE_BYTES;
}

static double read_rate(const yard_ops_config *config)
{
    (void)config;
    return strstr(hardware(), "H200") ? h200_read_rate : -1;
}

static double flop_rate(const yard_ops_config *config, yard_dtype x)
{
    (void)config;
    if (!strstr(hardware(), "H200"))
        return -1;
    return x == YARD_FP8_E4M3 ? h200_fp8_rate : h200_bf16_rate;
}

static double time_us(const yard_ops *ops, yard_stream s, void (*fn)(void *ctx), void *ctx)
{
    yard_graph *graph = NULL;
    yard_error err = { 0 };
    float us = 0;

    must(ops->capture_begin(s, &err), &err);
    for (int i = 0; i < CALLS; i++)
        fn(ctx);
    must(ops->capture_end(&graph, s, &err), &err);
    must(ops->check(s, &err), &err);
    must(ops->replay(s, graph, &us, &err), &err); /* the first one also uploads the graph */
    must(ops->replay(s, graph, &us, &err), &err);
    ops->release_graph(s, graph);
    return (double)us / CALLS;
}

/* Sums are in another order than the definition's. */
static bool exact(const yard_ops_config *config)
{
    (void)config;
    return false;
}

const yard_bench_ops_device yard_bench_ops_cuda = {
    .name = "cuda",
    .table = table,
    .exact = exact,
    .hardware = hardware,
    .alloc = allocate,
    .release = release,
    .upload = upload,
    .download = download,
    .cache_bytes = cache_bytes,
    .read_rate = read_rate,
    .flop_rate = flop_rate,
    .in_place = false,
    .tables_are_variants = true,
    .time_us = time_us,
};
