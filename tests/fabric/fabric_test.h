/* What the fabric tests share: ranks as real processes, each with a fabric of its own. In a rank,
 * failures end the process with a message; the parent collects exit codes. Nothing here sleeps to
 * wait for something: pipes and signals tell. */
#ifndef YARD_TESTS_FABRIC_H
#define YARD_TESTS_FABRIC_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fabric/fabric.h"

enum { TEST_MAX_RANKS = 128, TEST_ALARM_S = 600 };

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "%s:%d: pid %d: %s\n", __FILE__, __LINE__, getpid(), #cond);           \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

/* A call on fabric f that must succeed. */
#define CHECK_OK(f, call)                                                                          \
    do {                                                                                           \
        if ((call) != YARD_OK) {                                                                   \
            fprintf(stderr, "%s:%d: rank %u: %s\n", __FILE__, __LINE__, yard_fabric_rank(f),       \
                    yard_fabric_error(f));                                                         \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

#define CHECK_TEXT(text, part)                                                                     \
    do {                                                                                           \
        if (!strstr(text, part)) {                                                                 \
            fprintf(stderr, "%s:%d: want \"%s\" in \"%s\"\n", __FILE__, __LINE__, part, text);     \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

/* A group of processes; children of the test. */
typedef struct test_group {
    uint32_t n_ranks;
    char rendezvous[64];
    pid_t pids[TEST_MAX_RANKS];
} test_group;

typedef void (*test_rank_fn)(const yard_fabric_config *config, void *ctx);

static inline yard_fabric_config test_config(const test_group *g, uint32_t rank)
{
    yard_fabric_config c = YARD_FABRIC_CONFIG_INIT;

    c.rank = rank;
    c.n_ranks = g->n_ranks;
    c.heap_bytes = 1 << 16;
    c.rendezvous = g->rendezvous;
    c.timeout_us = 100000000; /* tests of deadlines set their own */
    return c;
}

static inline void test_group_name(test_group *g)
{
    static unsigned int n;

    snprintf(g->rendezvous, sizeof(g->rendezvous), "unix:yard-test-%d-%u", getpid(), n++);
}

/* Starts rank as a process that runs fn and ends with 0. */
static inline void test_start_rank(test_group *g, uint32_t rank, test_rank_fn fn, void *ctx)
{
    const yard_fabric_config config = test_config(g, rank);
    const pid_t parent = getpid();
    const pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        alarm(TEST_ALARM_S);
        fn(&config, ctx);
        _exit(0);
    }
    g->pids[rank] = pid;
}

static inline void test_start(test_group *g, uint32_t n_ranks, test_rank_fn fn, void *ctx)
{
    g->n_ranks = n_ranks;
    test_group_name(g);
    fflush(NULL);
    for (uint32_t r = 0; r < n_ranks; r++)
        test_start_rank(g, r, fn, ctx);
}

/* Exit code of a rank, or 128 + signal. */
static inline int test_wait_rank(test_group *g, uint32_t rank)
{
    int status = 0;

    while (waitpid(g->pids[rank], &status, 0) < 0)
        assert_int_equal(errno, EINTR);
    g->pids[rank] = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static inline void test_wait_all(test_group *g)
{
    int n_failed = 0;

    for (uint32_t r = 0; r < g->n_ranks; r++)
        n_failed += g->pids[r] && test_wait_rank(g, r) != 0;
    assert_int_equal(n_failed, 0);
}

static inline void test_run(uint32_t n_ranks, test_rank_fn fn, void *ctx)
{
    test_group g = { 0 };

    test_start(&g, n_ranks, fn, ctx);
    test_wait_all(&g);
}

static inline yard_fabric *test_create(const yard_fabric_config *config)
{
    yard_fabric *f = NULL;
    yard_error err = { 0 };

    if (yard_fabric_create(&f, config, &err) != YARD_OK) {
        fprintf(stderr, "rank %u: %s\n", config->rank, err.message);
        _exit(1);
    }
    return f;
}

/* A pipe that the parent and a rank tell each other steps by. */
typedef struct test_pipe {
    int fds[2];
} test_pipe;

static inline void test_pipe_open(test_pipe *p)
{
    assert_int_equal(pipe(p->fds), 0);
}

static inline void test_pipe_close(test_pipe *p)
{
    close(p->fds[0]);
    close(p->fds[1]);
}

static inline void test_tell(const test_pipe *p)
{
    CHECK(write(p->fds[1], "x", 1) == 1);
}

static inline void test_hear(const test_pipe *p)
{
    char byte;

    CHECK(read(p->fds[0], &byte, 1) == 1);
}

/* Every rank signals every other and waits for all; word: an offset of n_ranks signal words that
 * nothing else uses; round counts from 1. */
static inline void test_barrier(yard_fabric *f, yard_sym word, uint64_t round)
{
    const uint32_t n = yard_fabric_size(f), me = yard_fabric_rank(f);

    for (uint32_t k = 1; k < n; k++)
        CHECK_OK(f, yard_fabric_signal(f, word + 8 * me, 1, (me + k) % n));
    for (uint32_t k = 1; k < n; k++)
        CHECK_OK(f, yard_fabric_wait_until(f, word + 8 * ((me + k) % n), round, (me + k) % n,
                                           yard_fabric_deadline(f, 0)));
}

#endif
