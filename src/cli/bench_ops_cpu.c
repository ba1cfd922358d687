/* bench ops on the CPU: the same memory for host and device, floors from the threads of the run. */
#include <math.h>
#include <unistd.h>

#include "base/convert.h"
#include "cli/bench_ops.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* One table: rows are independent, whatever the number of tokens. */
static const yard_ops *table(const char *name)
{
    return !strcmp(name, "deterministic") ? &yard_ops_cpu : NULL;
}

static bool is_amx(const yard_ops_config *config)
{
    return config->variant && !strcmp(config->variant, "amx");
}

static bool exact(const yard_ops_config *config)
{
    return !is_amx(config);
}

static void copy_in(void *device, const void *host, size_t n_bytes)
{
    memcpy(device, host, n_bytes);
}

static void copy_out(void *host, const void *device, size_t n_bytes)
{
    memcpy(host, device, n_bytes);
}

static size_t cache_bytes(void)
{
    const long n_bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);

    return n_bytes > 0 ? (size_t)n_bytes : (size_t)32 << 20;
}

static uint32_t threads_of(const yard_ops_config *config)
{
    return config->n_threads ? config->n_threads : yard_cpu_count();
}

static double read_rate(const yard_ops_config *config)
{
    const double n_bytes = 8.0 * (double)cache_bytes();

    return n_bytes / yard_bench_read_floor_us(n_bytes, threads_of(config)) * 1e6;
}

enum { PEAK_STEPS = 1 << 18, PEAK_REPEATS = 25 };

/* Multiply-adds of PEAK_STEPS steps of one thread: independent chains, enough to fill the units. */
typedef struct peak {
    double flops; /* of one task */
    void (*task)(void *ctx, uint32_t task_idx, uint32_t thread_idx);
    yard_pool *pool;
} peak;

/* The sums stay in registers only where the loop over them is gone. */
#define UNROLL _Pragma("GCC unroll 16")

/* Results that nobody reads, where a compiler must believe that somebody does. */
#define KEEP(value) __asm__ volatile("" ::"x"(value))

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void fma_avx2(void *ctx, uint32_t task, uint32_t thread)
{
    __m256 sum[12];
    const __m256 x = _mm256_set1_ps(0.999f);

    for (int i = 0; i < 12; i++)
        sum[i] = _mm256_set1_ps((float)(task + thread));
    for (int step = 0; step < PEAK_STEPS; step++)
        UNROLL for (int i = 0; i < 12; i++) sum[i] = _mm256_fmadd_ps(sum[i], x, x);
    for (int i = 0; i < 12; i++)
        KEEP(sum[i]);
    (void)ctx;
}

__attribute__((target("avx512f"))) static void fma_avx512(void *ctx, uint32_t task, uint32_t thread)
{
    __m512 sum[12];
    const __m512 x = _mm512_set1_ps(0.999f);

    for (int i = 0; i < 12; i++)
        sum[i] = _mm512_set1_ps((float)(task + thread));
    for (int step = 0; step < PEAK_STEPS; step++)
        UNROLL for (int i = 0; i < 12; i++) sum[i] = _mm512_fmadd_ps(sum[i], x, x);
    for (int i = 0; i < 12; i++)
        KEEP(sum[i]);
    (void)ctx;
}

/* Pairs of bf16 values, as the avx512 variant multiplies FP8. */
__attribute__((target("avx512f,avx512bf16"))) static void dot_bf16(void *ctx, uint32_t task,
                                                                   uint32_t thread)
{
    __m512 sum[12];
    __m512i x = _mm512_set1_epi16(0x3f7f);

    for (int i = 0; i < 12; i++)
        sum[i] = _mm512_set1_ps((float)(task + thread));
    for (int step = 0; step < PEAK_STEPS; step++) {
        __asm__ volatile("" : "+x"(x)); /* each step anew */
        UNROLL for (int i = 0; i < 12; i++) sum[i] =
            _mm512_dpbf16_ps(sum[i], (__m512bh)x, (__m512bh)x);
    }
    for (int i = 0; i < 12; i++)
        KEEP(sum[i]);
    (void)ctx;
}

__attribute__((target("amx-tile,amx-bf16"))) static void dot_tiles(void *ctx, uint32_t task,
                                                                   uint32_t thread)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = { .palette = 1 };

    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = 16;
    }
    __asm__ volatile("" : : "r"(&config) : "memory"); /* gcc 12 tells only 8 bytes to be read */
    _tile_loadconfig(&config);
    for (int step = 0; step < PEAK_STEPS / 8; step++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    (void)ctx, (void)task, (void)thread;
}
#endif

static void fma_plain(void *ctx, uint32_t task, uint32_t thread)
{
    float sum[12];

    for (int i = 0; i < 12; i++)
        sum[i] = (float)(task + thread);
    for (int step = 0; step < PEAK_STEPS; step++)
        UNROLL for (int i = 0; i < 12; i++) sum[i] = sum[i] * 0.999f + 0.999f;
    for (int i = 0; i < 12; i++)
        KEEP(sum[i]);
    (void)ctx;
}

/* The arithmetic that products of this type may be made of: one way, or two. */
static uint32_t find_peaks(const yard_ops_config *config, yard_dtype x, peak peaks[2])
{
    uint32_t n = 0;

#if defined(__x86_64__)
    const char *variant = config->variant;

    __builtin_cpu_init();
    if (x == YARD_FP8_E4M3 && is_amx(config)) { /* whose stream got the permission */
        peaks[0] = (peak){ .flops = 2.0 * 16 * 16 * 32 * 4 * PEAK_STEPS / 8, .task = dot_tiles };
        return 1;
    }
    if (x == YARD_FP8_E4M3 && yard_cpu_has_avx512() && (!variant || !strcmp(variant, "avx512")))
        peaks[n++] = (peak){ .flops = 2.0 * 32 * 12 * PEAK_STEPS, .task = dot_bf16 };
    if (__builtin_cpu_supports("avx512f"))
        peaks[n++] = (peak){ .flops = 2.0 * 16 * 12 * PEAK_STEPS, .task = fma_avx512 };
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        peaks[n++] = (peak){ .flops = 2.0 * 8 * 12 * PEAK_STEPS, .task = fma_avx2 };
    if (n > 0)
        return n;
#endif
    peaks[n++] = (peak){ .flops = 2.0 * 12 * PEAK_STEPS, .task = fma_plain };
    return n;
}

static yard_status run_peak(void *ctx, yard_error *err)
{
    const peak *p = ctx;

    (void)err;
    yard_pool_run(p->pool, p->task, NULL, yard_pool_thread_count(p->pool));
    return YARD_OK;
}

static double peak_rate(const yard_ops_config *config, peak p)
{
    const yard_bench_plan plan = { 2, PEAK_REPEATS };
    yard_bench_row row = { 0 };

    if (yard_pool_create(&p.pool, threads_of(config), NULL) != YARD_OK)
        return 0;
    if (yard_bench_measure(&row, &plan, run_peak, &p, NULL) != YARD_OK)
        row.min_us = 0;
    yard_pool_destroy(p.pool);
    return row.min_us > 0 ? p.flops * threads_of(config) / row.min_us * 1e6 : 0;
}

/* Of the fastest one. */
static double flop_rate(const yard_ops_config *config, yard_dtype x)
{
    peak peaks[2];
    double best = 0;

    for (uint32_t n = find_peaks(config, x, peaks), i = 0; i < n; i++)
        best = fmax(best, peak_rate(config, peaks[i]));
    return best;
}

static double time_us(const yard_ops *ops, yard_stream s, void (*fn)(void *ctx), void *ctx)
{
    const double begin_us = yard_bench_now_us();

    fn(ctx);
    ops->synchronise(s);
    return yard_bench_now_us() - begin_us;
}

const yard_bench_ops_device yard_bench_ops_cpu = {
    .name = "cpu",
    .table = table,
    .exact = exact,
    .hardware = yard_bench_cpu_name,
    .alloc = yard_pages_alloc,
    .release = yard_pages_free,
    .upload = copy_in,
    .download = copy_out,
    .cache_bytes = cache_bytes,
    .read_rate = read_rate,
    .flop_rate = flop_rate,
    .in_place = true,
    .time_us = time_us,
};
