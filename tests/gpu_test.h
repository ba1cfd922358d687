/* The frame of the GPU tests: they run on a machine that has a driver and libc only, so they bring
 * their own instead of cmocka. One function per file, listed in gpu_test.c. */
#ifndef YARD_GPU_TEST_H
#define YARD_GPU_TEST_H

#include <stdbool.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

/* What one test file reports. A failed case says why on standard output. */
typedef struct gpu_test {
    uint32_t n_passed, n_failed;
    uint64_t seed;     /* state of gpu_test_random */
    bool quick;        /* small shapes only: for the sanitizers */
    const char *shape; /* this one only; NULL: all */
} gpu_test;

/* Counts one case; fmt describes it, and is printed when it failed. */
void gpu_test_case(gpu_test *t, bool passed, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* True when code is success; otherwise says what failed. */
bool gpu_test_ok(cudaError_t code, const char *what);

uint64_t gpu_test_random(gpu_test *t);

void gpu_test_quantise(gpu_test *t);
void gpu_test_linear(gpu_test *t);
void gpu_test_grouped(gpu_test *t);
void gpu_test_heads(gpu_test *t);
void gpu_test_rows(gpu_test *t);
void gpu_test_rope(gpu_test *t);
void gpu_test_route(gpu_test *t);
void gpu_test_moe(gpu_test *t);
void gpu_test_sample(gpu_test *t);
void gpu_test_mla_decode(gpu_test *t);
void gpu_test_mla_prefill(gpu_test *t);
void gpu_test_gqa(gpu_test *t);

#endif
