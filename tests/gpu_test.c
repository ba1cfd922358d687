/* Runs the GPU tests: gpu_test [SEED] [quick] [NAME[:SHAPE]..]. quick: small shapes only, for the
 * sanitizers. SHAPE: that one of mla_decode alone, as its table names it. The last line is
 * "N passed, N failed". */
#include "gpu_test.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void gpu_test_case(gpu_test *t, bool passed, const char *fmt, ...)
{
    va_list args;

    if (passed) {
        t->n_passed++;
        return;
    }
    t->n_failed++;
    printf("FAILED: ");
    va_start(args, fmt);
    vprintf(fmt, args);
    va_end(args);
    printf("\n");
}

bool gpu_test_ok(cudaError_t code, const char *what)
{
    if (code == cudaSuccess)
        return true;
    printf("%s: %s\n", what, cudaGetErrorString(code));
    return false;
}

/* splitmix64 */
uint64_t gpu_test_random(gpu_test *t)
{
    uint64_t z = t->seed += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static const struct {
    const char *name;
    void (*run)(gpu_test *t);
} tests[] = {
    { "quantise", gpu_test_quantise },
    { "linear", gpu_test_linear },
    { "grouped", gpu_test_grouped },
    { "heads", gpu_test_heads },
    { "rows", gpu_test_rows },
    { "rope", gpu_test_rope },
    { "route", gpu_test_route },
    { "moe", gpu_test_moe },
    { "sample", gpu_test_sample },
    { "mla_decode", gpu_test_mla_decode },
    { "mla_prefill", gpu_test_mla_prefill },
    { "gqa", gpu_test_gqa },
};

/* Without names on the command line, all. *shape: what follows the name, or NULL. */
static bool is_wanted(const char *name, int argc, char **argv, const char **shape)
{
    const size_t n = strlen(name);

    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], name, n) != 0 || (argv[i][n] != '\0' && argv[i][n] != ':'))
            continue;
        *shape = argv[i][n] ? argv[i] + n + 1 : NULL;
        return true;
    }
    return argc == 0;
}

int main(int argc, char **argv)
{
    const uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    const bool quick = argc > 2 && !strcmp(argv[2], "quick");
    const int first_name = argc < 2 ? argc : 2 + quick;
    struct cudaDeviceProp device;
    uint32_t n_passed = 0, n_failed = 0;
    int n_devices = 0;

    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || n_devices == 0) {
        printf("gpu_test: no GPU here (or no driver); nothing was tested\n");
        return 77;
    }
    if (!gpu_test_ok(cudaGetDeviceProperties(&device, 0), "device 0"))
        return EXIT_FAILURE;
    printf("device: %s, compute %d.%d; seed %llu\n", device.name, device.major, device.minor,
           (unsigned long long)seed);
    for (size_t i = 0; i < sizeof(tests) / sizeof(tests[0]); i++) {
        gpu_test t = { .seed = seed, .quick = quick };
        if (!is_wanted(tests[i].name, argc - first_name, argv + first_name, &t.shape))
            continue;
        tests[i].run(&t);
        printf("%s: %u passed, %u failed\n", tests[i].name, t.n_passed, t.n_failed);
        n_passed += t.n_passed;
        n_failed += t.n_failed;
    }
    printf("%u passed, %u failed\n", n_passed, n_failed);
    return n_failed || !n_passed ? EXIT_FAILURE : EXIT_SUCCESS;
}
