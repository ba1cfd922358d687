/* The base room: what every other room stands on. Number formats, memory, threads, clock.
 * Statuses and errors are in <yard/status.h>, dtypes and streams in <yard/types.h>. Nothing here
 * knows about models. */
#ifndef YARD_BASE_H
#define YARD_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <yard/status.h>
#include <yard/types.h>

/* number formats */

size_t yard_dtype_bytes(yard_dtype dtype);
const char *yard_dtype_name(yard_dtype dtype); /* "f32", "bf16", "f16", "fp8_e4m3" */

static inline uint32_t yard_bits_from_f32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static inline float yard_f32_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

static inline float yard_f32_from_bf16(uint16_t b)
{
    return yard_f32_from_bits((uint32_t)b << 16);
}

/* Round to nearest, ties to even; a NaN stays a (quiet) NaN. */
static inline uint16_t yard_bf16_from_f32(float x)
{
    uint32_t bits = yard_bits_from_f32(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline float yard_bf16_round(float x)
{
    return yard_f32_from_bf16(yard_bf16_from_f32(x));
}

float yard_f32_from_f16(uint16_t h);

/* False when one of n values is a NaN or infinite. */
bool yard_all_finite(const float *x, size_t n);

extern const float yard_e4m3_table[256]; /* value of every e4m3 code */

static inline float yard_f32_from_e4m3(uint8_t code)
{
    return yard_e4m3_table[code];
}

/* Round to nearest, ties to even, saturating at +-448; a NaN becomes 0x7f. */
uint8_t yard_e4m3_from_f32(float x);

static inline uint32_t yard_ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

static inline uint32_t yard_group_count(uint32_t n_cols)
{
    return yard_ceil_div(n_cols, YARD_GROUP);
}

static inline size_t yard_align_up(size_t n, size_t align)
{
    return (n + align - 1) / align * align;
}

/* memory */

/* A bump allocator over one block. With base == NULL it only counts, so that the same layout
 * function first measures and then places. Pointers are 64-byte aligned. */
typedef struct yard_arena {
    uint8_t *base;
    size_t size_bytes;
    size_t used_bytes;
} yard_arena;

/* NULL while measuring; never fails otherwise: the block was sized by the same calls. */
void *yard_arena_take(yard_arena *arena, size_t n_bytes);

/* Zeroed block, 64-byte aligned; NULL when memory ran out. n_bytes 0 gives a valid pointer.
 * Release with free(). */
void *yard_alloc(size_t n_bytes);

/* The same for blocks that are large and perhaps never used whole: pages cost memory only once they
 * are written. Release with yard_pages_free(pages, the same n_bytes); NULL is fine there. */
void *yard_pages_alloc(size_t n_bytes);
void yard_pages_free(void *pages, size_t n_bytes);

/* threads */

/* A fixed set of threads for fork-join work. Workers spin briefly for the next job, then
 * sleep on a futex. One job at a time; the caller works too, as thread 0. */
typedef struct yard_pool yard_pool;

/* task_idx in [0, n_tasks), thread_idx in [0, n_threads). */
typedef void (*yard_task_fn)(void *ctx, uint32_t task_idx, uint32_t thread_idx);

/* n_threads >= 1 counts the calling thread. */
yard_status yard_pool_create(yard_pool **out, uint32_t n_threads, yard_error *err);
void yard_pool_destroy(yard_pool *pool); /* NULL is fine */
uint32_t yard_pool_thread_count(const yard_pool *pool);

/* Runs fn for every task, in any order, on all threads; returns when all are done. */
void yard_pool_run(yard_pool *pool, yard_task_fn fn, void *ctx, uint32_t n_tasks);

/* Binds the pool's threads, the calling one included, which stays so. Errors: YARD_EINVAL when
 * there are fewer processors than threads to have one each; YARD_EIO. */
yard_status yard_pool_pin(yard_pool *pool, yard_pin pin, yard_error *err);

/* Processors this process may run on (affinity mask), at least 1. */
uint32_t yard_cpu_count(void);

/* clock */

uint64_t yard_now_us(void); /* monotonic */

/* notices */

/* How library code speaks to its user without printing. Both callbacks may be NULL. */
typedef struct yard_notify {
    void (*warn)(void *ctx, const char *line);
    /* done of total bytes or items of the stage named what; done == total ends the stage */
    void (*progress)(void *ctx, const char *what, uint64_t done, uint64_t total);
    void *ctx;
} yard_notify;

void yard_warn(const yard_notify *notify, const char *fmt, ...) YARD_PRINTF(2, 3);
void yard_progress(const yard_notify *notify, const char *what, uint64_t done, uint64_t total);

/* text */

/* True when n_bytes at text are well-formed UTF-8 (no surrogates, nothing above U+10FFFF);
 * otherwise *bad_at (may be NULL) is the offset of the first bad byte. */
bool yard_utf8_valid(const char *text, size_t n_bytes, size_t *bad_at);

#endif
