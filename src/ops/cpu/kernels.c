/* Which variant of the inner kernels runs here. */
#include "ops/cpu/cpu.h"

const cpu_kernels *yard_cpu_kernels_choose(const char *variant)
{
#if defined(__x86_64__)
    if (yard_cpu_has_avx512() && (!variant || !strcmp(variant, yard_cpu_kernels_avx512.name)))
        return &yard_cpu_kernels_avx512;
    if (yard_cpu_has_avx2() && (!variant || !strcmp(variant, yard_cpu_kernels_avx2.name)))
        return &yard_cpu_kernels_avx2;
#endif
    if (!variant || !strcmp(variant, yard_cpu_kernels_c.name))
        return &yard_cpu_kernels_c;
    return NULL;
}
