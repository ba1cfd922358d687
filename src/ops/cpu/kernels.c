/* Which variant of the inner kernels runs here. */
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "ops/cpu/cpu.h"

#if defined(__x86_64__)
/* Tiles are state that Linux gives to a process that asks for it. */
static bool may_use_tiles(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18, TILES_AND_BF16 = 1 << 24 | 1 << 22 };
    unsigned int a, b, c, d;

    return yard_cpu_has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (d & TILES_AND_BF16) == TILES_AND_BF16 &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

const cpu_kernels *yard_cpu_kernels_choose(const char *variant)
{
#if defined(__x86_64__)
    if (variant && !strcmp(variant, yard_cpu_kernels_amx.name))
        return may_use_tiles() ? &yard_cpu_kernels_amx : NULL;
    if (yard_cpu_has_avx512() && (!variant || !strcmp(variant, yard_cpu_kernels_avx512.name)))
        return &yard_cpu_kernels_avx512;
    if (yard_cpu_has_avx2() && (!variant || !strcmp(variant, yard_cpu_kernels_avx2.name)))
        return &yard_cpu_kernels_avx2;
#endif
    if (!variant || !strcmp(variant, yard_cpu_kernels_c.name))
        return &yard_cpu_kernels_c;
    return NULL;
}
