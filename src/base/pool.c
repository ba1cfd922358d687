/* Fork-join threads: spin briefly for the next job, then sleep on a futex. */
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/pool.h"

/* About 20 us: longer than the gap between two operations of a step, shorter than a scheduler
 * slice that another process could use. */
enum { SPIN_PAUSES = 1000 };

/* state = job number, whether workers may still join it, and how many have: one word, so that a
 * worker joins exactly the job it saw. A worker that the system runs too late finds the job closed:
 * nobody waits for it. */
enum { ACTIVE_BITS = 16, OPEN = 1 << ACTIVE_BITS, ONE_JOB = 2 * OPEN, ACTIVE_MASK = OPEN - 1 };

struct yard_pool {
    uint32_t n_threads;
    uint32_t n_started; /* workers that run and must be joined */
    pthread_t *workers; /* [n_threads - 1] */
    struct worker *worker_args;

    yard_task_fn fn;
    void *ctx;
    uint32_t n_tasks;
    bool stop;

    _Alignas(64) _Atomic uint32_t state; /* futex word of workers and of the caller */
    _Alignas(64) _Atomic uint32_t next;  /* next task to take */
};

struct worker {
    yard_pool *pool;
    uint32_t thread_idx;
};

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Returns once *word differs from seen. */
static uint32_t wait_change(_Atomic uint32_t *word, uint32_t seen)
{
    for (uint32_t i = 0; i < SPIN_PAUSES; i++) {
        const uint32_t now = atomic_load_explicit(word, memory_order_acquire);
        if (now != seen)
            return now;
        pause_cpu();
    }
    for (;;) {
        const uint32_t now = atomic_load_explicit(word, memory_order_acquire);
        if (now != seen)
            return now;
        futex_wait(word, seen);
    }
}

static void take_tasks(yard_pool *pool, uint32_t thread_idx)
{
    for (;;) {
        const uint32_t i = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (i >= pool->n_tasks)
            return;
        pool->fn(pool->ctx, i, thread_idx);
    }
}

/* Acquire: the job's fields were written before its number. */
static bool join_job(yard_pool *pool, uint32_t *state)
{
    while (*state & OPEN)
        if (atomic_compare_exchange_weak_explicit(&pool->state, state, *state + 1,
                                                  memory_order_acquire, memory_order_acquire))
            return true;
    return false;
}

static void *worker_main(void *arg)
{
    const struct worker *self = arg;
    yard_pool *pool = self->pool;
    uint32_t state = atomic_load_explicit(&pool->state, memory_order_acquire);

    for (;;) {
        if (!join_job(pool, &state)) {
            state = wait_change(&pool->state, state);
            continue;
        }
        const bool stop = pool->stop; /* while active: the caller changes nothing meanwhile */
        const uint32_t job = state / ONE_JOB;
        if (!stop)
            take_tasks(pool, self->thread_idx);
        /* Release: what the tasks wrote is visible to the caller that sees nobody active. */
        state = atomic_fetch_sub_explicit(&pool->state, 1, memory_order_acq_rel) - 1;
        if ((state & (OPEN | ACTIVE_MASK)) == 0)
            futex_wake(&pool->state);
        if (stop)
            return NULL;
        /* All tasks of this job are taken: there is nothing to join before the next one. */
        while ((state & OPEN) && state / ONE_JOB == job)
            state = wait_change(&pool->state, state);
    }
}

static void open_job(yard_pool *pool)
{
    const uint32_t state = atomic_load_explicit(&pool->state, memory_order_relaxed);

    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->state, state + ONE_JOB + OPEN, memory_order_release);
    futex_wake(&pool->state);
}

void yard_pool_run(yard_pool *pool, yard_task_fn fn, void *ctx, uint32_t n_tasks)
{
    uint32_t state;

    if (n_tasks <= 1 || pool->n_started == 0) {
        for (uint32_t i = 0; i < n_tasks; i++)
            fn(ctx, i, 0);
        return;
    }
    pool->fn = fn;
    pool->ctx = ctx;
    pool->n_tasks = n_tasks;
    open_job(pool);
    take_tasks(pool, 0);
    state = atomic_fetch_and_explicit(&pool->state, ~(uint32_t)OPEN, memory_order_acq_rel) &
            ~(uint32_t)OPEN;
    while (state & ACTIVE_MASK)
        state = wait_change(&pool->state, state);
}

yard_status yard_pool_create(yard_pool **out, uint32_t n_threads, yard_error *err)
{
    yard_pool *pool = NULL;
    yard_status st = YARD_OK;

    if (n_threads == 0 || n_threads > 4096)
        return yard_fail(err, YARD_EINVAL, "threads: want 1 to 4096, got %u", n_threads);
    pool = yard_alloc(sizeof(*pool));
    if (!pool)
        return yard_fail(err, YARD_ENOMEM, "thread pool: %zu bytes", sizeof(*pool));
    pool->n_threads = n_threads;
    pool->workers = calloc(n_threads, sizeof(*pool->workers));
    pool->worker_args = calloc(n_threads, sizeof(*pool->worker_args));
    if (!pool->workers || !pool->worker_args) {
        st = yard_fail(err, YARD_ENOMEM, "thread pool: %u threads", n_threads);
        goto out;
    }
    for (uint32_t i = 0; i + 1 < n_threads; i++) {
        pool->worker_args[i] = (struct worker){ .pool = pool, .thread_idx = i + 1 };
        if (pthread_create(&pool->workers[i], NULL, worker_main, &pool->worker_args[i]) != 0) {
            st = yard_fail(err, YARD_ENOMEM, "thread pool: could start %u of %u threads", i + 1,
                           n_threads);
            goto out;
        }
        pool->n_started++;
    }
    *out = pool;
    pool = NULL;
out:
    yard_pool_destroy(pool);
    return st;
}

void yard_pool_destroy(yard_pool *pool)
{
    if (!pool)
        return;
    pool->stop = true;
    open_job(pool); /* stays open: every worker joins it, sees stop and ends */
    for (uint32_t i = 0; i < pool->n_started; i++)
        pthread_join(pool->workers[i], NULL);
    free(pool->workers);
    free(pool->worker_args);
    free(pool);
}

uint32_t yard_pool_thread_count(const yard_pool *pool)
{
    return pool->n_threads;
}

pthread_t yard_pool_thread(const yard_pool *pool, uint32_t thread_idx)
{
    return thread_idx == 0 ? pthread_self() : pool->workers[thread_idx - 1];
}

uint32_t yard_cpu_count(void)
{
    cpu_set_t set;

    if (sched_getaffinity(0, sizeof(set), &set) != 0 || CPU_COUNT(&set) < 1)
        return 1;
    return (uint32_t)CPU_COUNT(&set);
}
