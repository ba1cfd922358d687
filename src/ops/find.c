#include "ops/ops.h"

/* In programs that are linked with the CUDA objects; see cmake/cuda.cmake. */
extern const yard_ops yard_ops_cuda __attribute__((weak));

const yard_ops *yard_ops_find(const char *name)
{
    const yard_ops *const tables[] = { &yard_ops_cpu, &yard_ops_cuda };

    for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++)
        if (tables[i] && !strcmp(tables[i]->name, name))
            return tables[i];
    return NULL;
}
