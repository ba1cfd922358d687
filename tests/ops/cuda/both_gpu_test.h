/* For operations whose CUDA form gives the definition's bits: the same call through both tables, on
 * buffers that began equal, after which they must be equal again, spare rows and columns too. */
#ifndef YARD_BOTH_GPU_TEST_H
#define YARD_BOTH_GPU_TEST_H

#include "products_gpu_test.h"

typedef struct both {
    bed b;
    const yard_ops *cpu;
    yard_stream cpu_stream;
    twin n_rows;
    uint32_t n_calls;
} both;

bool both_open(both *t, gpu_test *test);
void both_close(both *t);

/* On both sides. */
bool both_set_count(both *t, uint32_t n);

/* Calls fn through both tables; every other time through a graph on the device. */
void both_run(both *t, void (*fn)(const yard_ops *ops, yard_stream s, const void *args),
              const void *host_args, const void *device_args);

/* Whether the device holds what the host holds. */
bool both_same(both *t, const twin *m);
bool both_same_rows(both *t, const rows_twin *r);
/* The same for f32 where something may not be a number: that has many forms. */
bool both_same_floats(both *t, const twin *m);

/* Rows of very different sizes, some of zeros; for F32 and BF16. */
bool both_vary(both *t, rows_twin *r);

uint32_t both_below(both *t, uint32_t n);

#endif
