/* glibc's memcpy switches to `rep movsb` from about 2 KB on, which drops to a tenth of its speed
 * when source and destination lie differently to the cache line. The plain vector loop does not. */
#include "fabric/fabric_impl.h"

#if defined(__x86_64__)
#include <immintrin.h>

enum {
    SMALL_BYTES = 1024, /* below, memcpy is a few vector moves itself */
    VECTOR_BYTES = 32,
    BLOCK_BYTES = 4 * VECTOR_BYTES
};

/* Stores are aligned, loads may be not: a load across a cache line costs less than such a store.
 * The last block is copied from its end, overlapping what was copied before. n_bytes >=
 * BLOCK_BYTES. */
__attribute__((target("avx2"))) static void copy_avx2(uint8_t *dst, const uint8_t *src,
                                                      size_t n_bytes)
{
    const size_t head = VECTOR_BYTES - ((uintptr_t)dst & (VECTOR_BYTES - 1));
    uint8_t *end = dst + n_bytes;
    const uint8_t *src_end = src + n_bytes;
    __m256i a, b, c, d;

    _mm256_storeu_si256((__m256i *)dst, _mm256_loadu_si256((const __m256i *)src));
    dst += head;
    src += head;
    for (; dst + BLOCK_BYTES <= end; dst += BLOCK_BYTES, src += BLOCK_BYTES) {
        a = _mm256_loadu_si256((const __m256i *)src);
        b = _mm256_loadu_si256((const __m256i *)src + 1);
        c = _mm256_loadu_si256((const __m256i *)src + 2);
        d = _mm256_loadu_si256((const __m256i *)src + 3);
        _mm256_store_si256((__m256i *)dst, a);
        _mm256_store_si256((__m256i *)dst + 1, b);
        _mm256_store_si256((__m256i *)dst + 2, c);
        _mm256_store_si256((__m256i *)dst + 3, d);
    }
    a = _mm256_loadu_si256((const __m256i *)src_end - 4);
    b = _mm256_loadu_si256((const __m256i *)src_end - 3);
    c = _mm256_loadu_si256((const __m256i *)src_end - 2);
    d = _mm256_loadu_si256((const __m256i *)src_end - 1);
    _mm256_storeu_si256((__m256i *)end - 4, a);
    _mm256_storeu_si256((__m256i *)end - 3, b);
    _mm256_storeu_si256((__m256i *)end - 2, c);
    _mm256_storeu_si256((__m256i *)end - 1, d);
}

void yard_copy(void *dst, const void *src, size_t n_bytes)
{
    /* A flag of the CPU that libgcc reads once, not a choice per call. */
    if (n_bytes >= SMALL_BYTES && __builtin_cpu_supports("avx2"))
        copy_avx2(dst, src, n_bytes);
    else
        memcpy(dst, src, n_bytes);
}

#else

void yard_copy(void *dst, const void *src, size_t n_bytes)
{
    memcpy(dst, src, n_bytes);
}

#endif
