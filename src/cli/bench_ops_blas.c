/* bench ops --blas: the same products by a BLAS library's sgemm, for comparison. The library is
 * opened at run time; nothing else of this program uses one. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/bench_ops.h"

/* cblas.h's constants and type, which every BLAS shares. */
enum { ROW_MAJOR = 101, NOT_TRANSPOSED = 111, TRANSPOSED = 112 };
typedef void (*sgemm_fn)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                         const float *a, int lda, const float *b, int ldb, float beta, float *c,
                         int ldc);
typedef void (*set_threads_fn)(int n);

struct yard_bench_blas {
    void *library;
    sgemm_fn sgemm;
};

/* name as it is, or with the prefix that packages for Python give it. */
static void *find(void *library, const char *name)
{
    char prefixed[64];
    void *symbol = dlsym(library, name);

    snprintf(prefixed, sizeof(prefixed), "scipy_%s", name);
    return symbol ? symbol : dlsym(library, prefixed);
}

yard_status yard_bench_blas_open(yard_bench_blas **out, const char *path, uint32_t n_threads,
                                 yard_error *err)
{
    yard_bench_blas *blas = calloc(1, sizeof(*blas));
    set_threads_fn set_threads;
    yard_status st = YARD_OK;

    if (!blas)
        return yard_fail(err, YARD_ENOMEM, "--blas: no memory");
    blas->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!blas->library)
        st = yard_fail(err, YARD_EIO, "--blas: %s", dlerror());
    if (!st) {
        *(void **)&blas->sgemm = find(blas->library, "cblas_sgemm");
        *(void **)&set_threads = find(blas->library, "openblas_set_num_threads");
        if (!blas->sgemm)
            st = yard_fail(err, YARD_ENOTSUP, "--blas: %s: want a library with cblas_sgemm", path);
        else if (set_threads)
            set_threads((int)n_threads);
    }
    if (st) {
        yard_bench_blas_close(blas);
        return st;
    }
    *out = blas;
    return YARD_OK;
}

void yard_bench_blas_close(yard_bench_blas *blas)
{
    if (blas && blas->library)
        dlclose(blas->library);
    free(blas);
}

typedef struct product {
    const yard_bench_blas *blas;
    int m, n, k;
    float *x, *w, *y;
} product;

static yard_status multiply(void *ctx, yard_error *err)
{
    const product *p = ctx;

    (void)err;
    p->blas->sgemm(ROW_MAJOR, NOT_TRANSPOSED, TRANSPOSED, p->m, p->n, p->k, 1.0f, p->x, p->k, p->w,
                   p->k, 0.0f, p->y, p->n);
    return YARD_OK;
}

yard_status yard_bench_blas_time(const yard_bench_blas *blas, uint32_t m, uint32_t n, uint32_t k,
                                 uint32_t n_repeats, yard_bench_row *row, yard_error *err)
{
    const yard_bench_plan plan = { 1, n_repeats };
    const size_t n_x = (size_t)m * k, n_w = (size_t)n * k, n_y = (size_t)m * n;
    float *block = yard_alloc((n_x + n_w + n_y) * sizeof(float));
    product p = { blas, (int)m, (int)n, (int)k, block, block + n_x, block + n_x + n_w };
    yard_status st;

    if (!block)
        return yard_fail(err, YARD_ENOMEM, "--blas: no memory for %ux%ux%u", m, n, k);
    for (size_t i = 0; i < n_x + n_w; i++)
        block[i] = (float)(i % 17) - 8.0f;
    st = yard_bench_measure(row, &plan, multiply, &p, err);
    /* one value by hand */
    if (!st) {
        double want = 0;
        for (uint32_t i = 0; i < k; i++)
            want += (double)p.x[i] * (double)p.w[i];
        row->verified = p.y[0] - want < 1e-3 * k && want - p.y[0] < 1e-3 * k;
    }
    row->flops = 2.0 * m * n * k;
    row->bytes = 4.0 * (double)(n_x + n_w + n_y);
    free(block);
    return st;
}
