/* The thread pool: every task once, jobs in a row, wake from sleep. ctest: sanitize */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/base.h"

enum { MAX_TASKS = 1000 };

struct job {
    uint32_t n_threads;
    uint32_t seen[MAX_TASKS]; /* each written by the one thread that has the task */
    _Atomic uint32_t bad_thread;
};

static void count_task(void *ctx, uint32_t task_idx, uint32_t thread_idx)
{
    struct job *job = ctx;

    job->seen[task_idx]++;
    if (thread_idx >= job->n_threads)
        job->bad_thread++;
}

static void run_all(uint32_t n_threads)
{
    static const uint32_t n_tasks[] = { 0, 1, 2, 3, 17, MAX_TASKS };
    yard_pool *pool = NULL;

    assert_int_equal(yard_pool_create(&pool, n_threads, NULL), YARD_OK);
    assert_int_equal(yard_pool_thread_count(pool), n_threads);
    for (int round = 0; round < 300; round++) {
        const uint32_t n = n_tasks[round % 6];
        struct job job = { .n_threads = n_threads };
        yard_pool_run(pool, count_task, &job, n);
        for (uint32_t i = 0; i < MAX_TASKS; i++)
            assert_int_equal(job.seen[i], i < n ? 1 : 0);
        assert_int_equal(job.bad_thread, 0);
        if (round % 100 == 0)
            usleep(2000); /* long enough for the workers to fall asleep; nothing depends on it */
    }
    yard_pool_destroy(pool);
}

static void every_task_once(void **state)
{
    (void)state;
    run_all(1);
    run_all(2);
    run_all(7);
}

static void refuses_no_threads(void **state)
{
    yard_pool *pool = NULL;
    yard_error err = { 0 };

    (void)state;
    assert_int_equal(yard_pool_create(&pool, 0, &err), YARD_EINVAL);
    assert_null(pool);
    assert_string_equal(err.message, "threads: want 1 to 4096, got 0");
    yard_pool_destroy(NULL);
}

/* Each thread says where it runs; one a processor, and never outside of the mask. */
static void note_cpu(void *ctx, uint32_t task_idx, uint32_t thread_idx)
{
    cpu_set_t set;

    (void)task_idx;
    assert_int_equal(sched_getaffinity(0, sizeof(set), &set), 0);
    ((int *)ctx)[thread_idx] = CPU_COUNT(&set);
}

static void pinned(void **state)
{
    const uint32_t n = yard_cpu_count();
    int *counts = calloc(n + 1, sizeof(*counts));
    yard_pool *pool = NULL;
    cpu_set_t before;
    yard_error err = { 0 };

    (void)state;
    assert_int_equal(sched_getaffinity(0, sizeof(before), &before), 0);
    assert_int_equal(yard_pool_create(&pool, n, NULL), YARD_OK);
    assert_int_equal(yard_pool_pin(pool, YARD_PIN_NODE, NULL), YARD_OK);
    yard_pool_run(pool, note_cpu, counts, 100 * n);
    for (uint32_t i = 0; i < n; i++)
        assert_true(counts[i] <= (int)n);
    assert_int_equal(sched_setaffinity(0, sizeof(before), &before), 0);
    assert_int_equal(yard_pool_pin(pool, YARD_PIN_CPU, NULL), YARD_OK);
    for (counts[0] = 0; counts[0] == 0;) /* any thread may come too late for any task */
        yard_pool_run(pool, note_cpu, counts, 100 * n);
    assert_int_equal(counts[0], 1);
    yard_pool_destroy(pool);

    assert_int_equal(sched_setaffinity(0, sizeof(before), &before), 0);
    assert_int_equal(yard_pool_create(&pool, n + 1, NULL), YARD_OK);
    assert_int_equal(yard_pool_pin(pool, YARD_PIN_CPU, &err), YARD_EINVAL);
    yard_pool_destroy(pool);
    free(counts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_task_once),
        cmocka_unit_test(refuses_no_threads),
        cmocka_unit_test(pinned),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
