/* glibc's allocator with a countdown: block number fail_at is refused while counting. Sanitizers
 * bring their own allocator: FAILING_ALLOC is 0 there. Included once per program. */
#ifndef YARD_TESTS_FAILING_ALLOC_H
#define YARD_TESTS_FAILING_ALLOC_H

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

#include <yard/status.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FAILING_ALLOC 0
#else
#define FAILING_ALLOC 1

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);
extern void *__libc_memalign(size_t align, size_t n);
extern void __libc_free(void *p);

static atomic_bool counting;
static atomic_long n_blocks, fail_at, n_live;

static bool refuse(void)
{
    if (!counting || ++n_blocks != fail_at)
        return false;
    errno = ENOMEM; /* glibc's own callers rely on it */
    return true;
}

static void *count_live(void *p)
{
    n_live += counting && p;
    return p;
}

YARD_API void *malloc(size_t n)
{
    return refuse() ? NULL : count_live(__libc_malloc(n));
}

YARD_API void *calloc(size_t n, size_t size)
{
    return refuse() ? NULL : count_live(__libc_calloc(n, size));
}

YARD_API void *aligned_alloc(size_t align, size_t n)
{
    return refuse() ? NULL : count_live(__libc_memalign(align, n));
}

YARD_API void *realloc(void *p, size_t n)
{
    if (refuse())
        return NULL;
    return p ? __libc_realloc(p, n) : count_live(__libc_realloc(p, n));
}

YARD_API void free(void *p)
{
    n_live -= counting && p;
    __libc_free(p);
}

#endif
#endif
