#include "cli/bench.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "yard_commit.h"

double yard_bench_now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

void yard_bench_fill(yard_bench_row *row, double *samples_us, size_t n)
{
    qsort(samples_us, n, sizeof(samples_us[0]), by_value);
    row->min_us = samples_us[0];
    row->p50_us = n % 2 ? samples_us[n / 2] : (samples_us[n / 2 - 1] + samples_us[n / 2]) / 2;
    row->p90_us = samples_us[(size_t)ceil(0.90 * (double)n) - 1];
    row->p99_us = samples_us[(size_t)ceil(0.99 * (double)n) - 1];
}

yard_status yard_bench_measure(yard_bench_row *row, const yard_bench_plan *plan, yard_bench_fn fn,
                               void *ctx, yard_error *err)
{
    double *samples_us = malloc(plan->n_repeats * sizeof(*samples_us));
    yard_status st = YARD_OK;

    if (!samples_us)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for %u samples", plan->n_repeats);
    for (uint32_t i = 0; i < plan->n_warmup && st == YARD_OK; i++)
        st = fn(ctx, err);
    for (uint32_t i = 0; i < plan->n_repeats && st == YARD_OK; i++) {
        const double begin_us = yard_bench_now_us();
        st = fn(ctx, err);
        samples_us[i] = yard_bench_now_us() - begin_us;
    }
    if (st == YARD_OK)
        yard_bench_fill(row, samples_us, plan->n_repeats);
    free(samples_us);
    return st;
}

/* "phase=decode threads=2": what tells rows apart, for people. */
static void print_shape(const json_t *shape)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)shape, key, value)
    {
        if (json_is_string(value))
            printf(" %s=%s", key, json_string_value(value));
        else if (json_is_integer(value))
            printf(" %s=%" JSON_INTEGER_FORMAT, key, json_integer_value(value));
        else if (json_is_boolean(value))
            printf(" %s=%s", key, json_is_true(value) ? "true" : "false");
    }
}

void yard_bench_print_head(bool json)
{
    if (!json)
        printf("%-8s %12s %12s %12s %12s %6s %10s  %-8s  case\n", "bench", "p50 us", "p99 us",
               "min us", "floor us", "share", "tokens/s", "verified");
}

static void print_table_row(const yard_bench_row *row)
{
    const json_t *tokens = json_object_get(row->shape, "tokens");
    const json_t *found_rate = json_object_get(row->found, "tokens_per_s");
    char floor_us[32] = "-", share[32] = "-", rate[32] = "-";

    if (row->floor_us >= 0) {
        snprintf(floor_us, sizeof(floor_us), "%.1f", row->floor_us);
        snprintf(share, sizeof(share), "%.2f", row->floor_us / row->p50_us);
    }
    if (found_rate)
        snprintf(rate, sizeof(rate), "%.1f", json_real_value(found_rate));
    else if (json_is_integer(tokens) && row->p50_us > 0)
        snprintf(rate, sizeof(rate), "%.1f",
                 (double)json_integer_value(tokens) * 1e6 / row->p50_us);
    printf("%-8s %12.1f %12.1f %12.1f %12s %6s %10s  %-8s ", row->bench, row->p50_us, row->p99_us,
           row->min_us, floor_us, share, rate, row->verified ? "yes" : "NO");
    print_shape(row->shape);
    putchar('\n');
}

static json_t *real_or_null(double value)
{
    return value >= 0 ? json_real(value) : json_null();
}

static json_t *count_or_null(double value)
{
    return value >= 0 ? json_integer((json_int_t)value) : json_null();
}

static yard_status print_json_row(const yard_bench_row *row, yard_error *err)
{
    char date[32];
    const time_t now = time(NULL);
    struct tm utc;
    json_t *line;
    int rc;

    strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    line = json_pack("{s:s, s:O, s:f, s:o, s:f, s:f, s:o, s:o, s:o, s:b, s:s, s:i, s:s, s:s}",
                     "bench", row->bench, "case", row->shape, "p50_us", row->p50_us, "p90_us",
                     real_or_null(row->p90_us > 0 ? row->p90_us : -1), "p99_us", row->p99_us,
                     "min_us", row->min_us, "floor_us", real_or_null(row->floor_us), "bytes",
                     count_or_null(row->bytes), "flops", count_or_null(row->flops), "verified",
                     row->verified, "device", row->device, "ranks", (int)row->ranks, "commit",
                     YARD_COMMIT, "date", date);
    if (line && row->found)
        json_object_update_missing(line, row->found);
    if (line && row->variant)
        json_object_set_new(line, "variant", json_string(row->variant));
    if (line && row->floor_us >= 0 && row->p50_us > 0)
        json_object_set_new(line, "fraction", json_real(row->floor_us / row->p50_us));
    if (!line)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for a row");
    rc = json_dumpf(line, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
    json_decref(line);
    if (rc == 0)
        putchar('\n');
    return YARD_OK;
}

yard_status yard_bench_print_row(const yard_bench_row *row, bool json, yard_error *err)
{
    yard_status st = YARD_OK;

    if (json)
        st = print_json_row(row, err);
    else
        print_table_row(row);
    fflush(stdout);
    return st;
}

const char *yard_bench_cpu_name(void)
{
    static char name[128];
    char line[512];
    FILE *in;

    if (name[0])
        return name;
    snprintf(name, sizeof(name), "unknown processor");
    in = fopen("/proc/cpuinfo", "r");
    while (in && fgets(line, sizeof(line), in)) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon)
            continue;
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
        break;
    }
    if (in)
        fclose(in);
    return name;
}

enum { MAX_READ_BYTES = 1 << 30, FLOOR_WARMUP = 2, FLOOR_REPEATS = 25 };
enum { LINE_WORDS = 8, AHEAD_WORDS = 512 };

/* Every thread reads its own part once. */
typedef struct reader {
    yard_pool *pool;
    const uint64_t *words;
    size_t n_words;
    uint32_t n_tasks;
    uint64_t *sums; /* [n_tasks] keeps the compiler from leaving the reads out */
} reader;

static void read_part(void *ctx, uint32_t task_idx, uint32_t thread_idx)
{
    const reader *r = ctx;
    const size_t begin = r->n_words * task_idx / r->n_tasks;
    const size_t end = r->n_words * (task_idx + 1) / r->n_tasks;
    uint64_t sum[LINE_WORDS] = { 0 };
    size_t i = begin;

    (void)thread_idx;
    /* The memory's own prefetchers stop at the end of a page. */
    for (; i + LINE_WORDS <= end; i += LINE_WORDS) {
        __builtin_prefetch(r->words + i + AHEAD_WORDS, 0, 2);
        for (size_t j = 0; j < LINE_WORDS; j++)
            sum[j] += r->words[i + j];
    }
    for (; i < end; i++)
        sum[0] += r->words[i];
    for (size_t j = 0; j < LINE_WORDS; j++)
        r->sums[task_idx] += sum[j];
}

static yard_status read_once(void *ctx, yard_error *err)
{
    reader *r = ctx;

    (void)err;
    yard_pool_run(r->pool, read_part, r, r->n_tasks);
    return YARD_OK;
}

double yard_bench_read_floor_us(double n_bytes, uint32_t n_threads)
{
    const yard_bench_plan plan = { FLOOR_WARMUP, FLOOR_REPEATS };
    const size_t read_bytes = n_bytes < MAX_READ_BYTES ? (size_t)n_bytes : MAX_READ_BYTES;
    yard_bench_row row = { .min_us = -1 };
    uint64_t *words = yard_alloc(read_bytes);
    reader r = { .words = words, .n_words = read_bytes / sizeof(*words), .n_tasks = n_threads };

    r.sums = calloc(n_threads, sizeof(*r.sums));
    if (words && r.sums && r.n_words > 0 && yard_pool_create(&r.pool, n_threads, NULL) == YARD_OK) {
        memset(words, 1, read_bytes); /* pages of zeroes may be one page, always in the cache */
        if (yard_bench_measure(&row, &plan, read_once, &r, NULL) == YARD_OK)
            row.min_us *= n_bytes / (double)read_bytes;
    }
    yard_pool_destroy(r.pool);
    free(r.sums);
    free(words);
    return row.min_us;
}

yard_status yard_bench_parse_list(const char *option, const char *text, uint32_t max,
                                  yard_bench_list *out, yard_error *err)
{
    yard_bench_list list = { 0 };

    for (const char *at = text;;) {
        const size_t n = strcspn(at, ",");
        char item[16];
        uint64_t value;
        yard_status st;

        if (list.n == YARD_BENCH_MAX_LIST || n >= sizeof(item))
            return yard_fail(err, YARD_EINVAL, "%s: want at most %d numbers from 1 to %u, got '%s'",
                             option, YARD_BENCH_MAX_LIST, max, text);
        memcpy(item, at, n);
        item[n] = '\0';
        st = yard_cli_parse_u64(option, item, 1, max, &value, err);
        if (st != YARD_OK)
            return st;
        list.value[list.n++] = (uint32_t)value;
        if (at[n] == '\0')
            break;
        at += n + 1;
    }
    *out = list;
    return YARD_OK;
}

bool yard_bench_is_listed(const char *list, const char *name)
{
    const size_t n = strlen(name);

    for (const char *at = list; n > 0; at++) {
        const size_t word = strcspn(at, ",");
        if (word == n && !strncmp(at, name, n))
            return true;
        at += word;
        if (*at == '\0')
            break;
    }
    return false;
}

yard_status yard_bench_check_names(const char *option, const char *list,
                                   bool (*is_known)(const char *name), const char *examples,
                                   yard_error *err)
{
    for (const char *at = list;; at++) {
        const size_t n = strcspn(at, ",");
        char name[64] = "";

        if (n < sizeof(name))
            memcpy(name, at, n);
        if (name[0] == '\0' || !is_known(name))
            return yard_fail(err, YARD_EINVAL, "%s: want names such as %s, got '%.*s'", option,
                             examples, (int)n, at);
        at += n;
        if (*at == '\0')
            return YARD_OK;
    }
}
