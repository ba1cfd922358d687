#include <stdlib.h>
#include <sys/mman.h>

#include "base/base.h"

enum { ALIGN = 64 };

void *yard_arena_take(yard_arena *arena, size_t n_bytes)
{
    const size_t at = arena->used_bytes;

    arena->used_bytes = yard_align_up(at + n_bytes, ALIGN);
    return arena->base ? arena->base + at : NULL;
}

void *yard_alloc(size_t n_bytes)
{
    void *p;

    if (n_bytes == 0)
        n_bytes = 1;
    if (n_bytes > SIZE_MAX - ALIGN)
        return NULL;
    p = aligned_alloc(ALIGN, yard_align_up(n_bytes, ALIGN));
    if (p)
        memset(p, 0, n_bytes);
    return p;
}

void *yard_pages_alloc(size_t n_bytes)
{
    void *p = mmap(NULL, n_bytes ? n_bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                   -1, 0);

    return p == MAP_FAILED ? NULL : p;
}

void yard_pages_free(void *pages, size_t n_bytes)
{
    if (pages)
        munmap(pages, n_bytes ? n_bytes : 1);
}
