/* What every transport must do, with real processes: tests/fabric/<transport>_test.c run this suite
 * with traffic_use(). Included once per program. */
#ifndef YARD_TESTS_TRAFFIC_H
#define YARD_TESTS_TRAFFIC_H

#include "fabric_test.h"

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/base.h"

/* Set before the suite runs; ranks inherit it. */
static const char *traffic_transport, *traffic_provider;
static bool traffic_network;      /* every rank is its own node */
static uint32_t traffic_per_node; /* ranks of a node; 0: all */
static bool traffic_leak_check = true;
static uint32_t traffic_n_again = 50; /* groups one after the other */

static inline yard_fabric *traffic_create(const yard_fabric_config *config, size_t heap_bytes)
{
    yard_fabric_config c = *config;

    c.transport = traffic_transport;
    c.provider = traffic_provider;
    c.force_network = traffic_network;
    c.ranks_per_node = traffic_per_node;
    c.heap_bytes = heap_bytes;
    return test_create(&c);
}

static inline uint64_t traffic_mix(uint64_t x) /* splitmix64 */
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static inline uint64_t traffic_random(uint64_t *state)
{
    return traffic_mix((*state)++);
}

/* random puts, checked byte by byte */

enum {
    TRAFFIC_LANE = 65536, /* landing bytes per source, staging bytes per destination */
    TRAFFIC_ROUNDS = 60,
    TRAFFIC_WORDS = 4096 /* of the heap, before the lanes: signal words, barrier */
};

typedef struct traffic_put {
    uint32_t at, n_bytes, value;
    uint64_t key; /* of the data */
} traffic_put;

/* What rank `from` puts to rank `to` in a round: both know it. Lengths: none, odd, large. */
static inline uint32_t traffic_plan(uint32_t round, uint32_t from, uint32_t to,
                                    traffic_put puts[static 32])
{
    uint64_t state = traffic_mix(round) ^ traffic_mix((uint64_t)from << 32 | to);
    uint32_t n = (uint32_t)(traffic_random(&state) % 33), at = 0, i;

    for (i = 0; i < n; i++) {
        const uint32_t kind = (uint32_t)(traffic_random(&state) % 8);
        uint32_t n_bytes = (uint32_t)(traffic_random(&state) % (kind == 0 ? 30000 : 2000));

        if (kind == 1)
            n_bytes = 0;
        if (kind == 2)
            n_bytes = 64;
        if (n_bytes > TRAFFIC_LANE - at)
            n_bytes = TRAFFIC_LANE - at;
        puts[i] = (traffic_put){ at, n_bytes, (uint32_t)(traffic_random(&state) % 1000 + 1),
                                 traffic_random(&state) };
        at += n_bytes + (uint32_t)(traffic_random(&state) % 9);
        at = at > TRAFFIC_LANE ? TRAFFIC_LANE : at;
    }
    return n;
}

static inline void traffic_fill(uint8_t *at, const traffic_put *put)
{
    for (uint32_t i = 0; i < put->n_bytes; i++)
        at[i] = (uint8_t)traffic_mix(put->key + i);
}

static inline bool traffic_arrived(const uint8_t *at, const traffic_put *put)
{
    for (uint32_t i = 0; i < put->n_bytes; i++)
        if (at[i] != (uint8_t)traffic_mix(put->key + i))
            return false;
    return true;
}

static inline void traffic_put_all(yard_fabric *f, uint32_t round, uint32_t to)
{
    const uint32_t me = yard_fabric_rank(f), n_ranks = yard_fabric_size(f);
    const yard_sym staging = TRAFFIC_WORDS + (yard_sym)TRAFFIC_LANE * (n_ranks + to);
    const yard_sym lane = TRAFFIC_WORDS + (yard_sym)TRAFFIC_LANE * me;
    traffic_put puts[32];
    const uint32_t n = traffic_plan(round, me, to, puts);

    for (uint32_t i = 0; i < n; i++) {
        uint8_t *src = yard_fabric_local(f, staging + puts[i].at);

        traffic_fill(src, &puts[i]);
        CHECK_OK(f, yard_fabric_put_signal(f, lane + puts[i].at, src, puts[i].n_bytes, 8 * me,
                                           puts[i].value, to));
    }
}

static inline void traffic_check_all(yard_fabric *f, uint32_t round, uint32_t from, uint64_t *total)
{
    const yard_sym lane = TRAFFIC_WORDS + (yard_sym)TRAFFIC_LANE * from;
    traffic_put puts[32];
    const uint32_t n = traffic_plan(round, from, yard_fabric_rank(f), puts);

    for (uint32_t i = 0; i < n; i++)
        *total += puts[i].value;
    CHECK_OK(f, yard_fabric_wait_until(f, 8 * from, *total, from, yard_fabric_deadline(f, 0)));
    CHECK(yard_fabric_read_signal(f, 8 * from) == *total);
    for (uint32_t i = 0; i < n; i++)
        CHECK(traffic_arrived(yard_fabric_local(f, lane + puts[i].at), &puts[i]));
}

/* Also to itself. */
static inline void traffic_random_rank(const yard_fabric_config *config, void *ctx)
{
    const uint32_t n = config->n_ranks;
    yard_fabric *f = traffic_create(config, TRAFFIC_WORDS + (size_t)2 * n * TRAFFIC_LANE);
    uint64_t totals[TEST_MAX_RANKS] = { 0 };

    for (uint32_t round = 1; round <= TRAFFIC_ROUNDS; round++) {
        for (uint32_t k = 0; k < n; k++)
            traffic_put_all(f, round, (config->rank + k) % n);
        for (uint32_t k = 0; k < n; k++)
            traffic_check_all(f, round, (config->rank + k) % n, &totals[(config->rank + k) % n]);
        test_barrier(f, 2048, round); /* landing and staging are free again */
    }
    yard_fabric_destroy(f);
}

static inline void traffic_random_puts(void **state)
{
    for (uint32_t n = 1; n <= 8; n += n < 3 ? 1 : 5) /* 1, 2, 3, 8 */
        test_run(n, traffic_random_rank, NULL);
}

/* a receiver that is not there */

enum { TRAFFIC_FLOOD = 4 << 20, TRAFFIC_FLOOD_PUTS = 32 };

/* Far more than sockets hold, to a rank that computes: every put returns, everything arrives. */
static inline void traffic_flood_rank(const yard_fabric_config *config, void *ctx)
{
    const test_pipe *all_put = ctx;
    yard_fabric *f = traffic_create(config, TRAFFIC_WORDS + TRAFFIC_FLOOD);
    uint8_t *data = yard_fabric_local(f, TRAFFIC_WORDS);

    if (config->rank == 0) {
        for (uint32_t i = 0; i < TRAFFIC_FLOOD; i++)
            data[i] = (uint8_t)traffic_mix(i);
        for (uint32_t i = 0; i < TRAFFIC_FLOOD_PUTS; i++)
            CHECK_OK(f, yard_fabric_put_signal(f, TRAFFIC_WORDS, data, TRAFFIC_FLOOD, 0, 1, 1));
        test_tell(all_put);
    } else {
        test_hear(all_put);
        CHECK_OK(f,
                 yard_fabric_wait_until(f, 0, TRAFFIC_FLOOD_PUTS, 0, yard_fabric_deadline(f, 0)));
        for (uint32_t i = 0; i < TRAFFIC_FLOOD; i++)
            CHECK(data[i] == (uint8_t)traffic_mix(i));
    }
    test_barrier(f, 2048, 1);
    yard_fabric_destroy(f);
}

static inline void traffic_puts_do_not_block(void **state)
{
    test_pipe all_put;

    test_pipe_open(&all_put);
    test_run(2, traffic_flood_rank, &all_put);
    test_pipe_close(&all_put);
}

/* Words move without a wait, for callers that poll. */
static inline void traffic_poll_rank(const yard_fabric_config *config, void *ctx)
{
    yard_fabric *f = traffic_create(config, TRAFFIC_WORDS);
    const uint32_t peer = 1 - config->rank;

    test_barrier(f, 2048, 1); /* the last wait for a while */
    for (uint64_t i = 1; i <= 20; i++) {
        if (config->rank == 0)
            CHECK_OK(f, yard_fabric_signal(f, 0, 3, peer));
        while (yard_fabric_read_signal(f, 0) < 3 * i)
            usleep(100);
        if (config->rank == 1)
            CHECK_OK(f, yard_fabric_signal(f, 0, 3, peer));
    }
    test_barrier(f, 2048, 2);
    yard_fabric_destroy(f);
}

static inline void traffic_polled_words_move(void **state)
{
    test_run(2, traffic_poll_rank, NULL);
}

/* ranks that go */

/* What a rank put before it left arrives; then it is gone. */
static inline void traffic_leave_rank(const yard_fabric_config *config, void *ctx)
{
    const test_pipe *left = ctx;
    yard_fabric *f = traffic_create(config, TRAFFIC_WORDS + TRAFFIC_FLOOD);
    uint8_t *data = yard_fabric_local(f, TRAFFIC_WORDS);

    if (config->rank == 0) {
        memset(data, 7, TRAFFIC_FLOOD);
        CHECK_OK(f, yard_fabric_put_signal(f, TRAFFIC_WORDS, data, TRAFFIC_FLOOD, 0, 1, 1));
        CHECK_OK(f, yard_fabric_signal(f, 0, 1, 1));
        yard_fabric_destroy(f);
        test_tell(left);
        return;
    }
    test_hear(left);
    CHECK_OK(f, yard_fabric_wait_until(f, 0, 2, 0, yard_fabric_deadline(f, 0)));
    for (uint32_t i = 0; i < TRAFFIC_FLOOD; i++)
        CHECK(data[i] == 7);
    CHECK(yard_fabric_wait_until(f, 0, 3, 0, yard_fabric_deadline(f, 0)) == YARD_EPEER);
    CHECK_TEXT(yard_fabric_error(f), "rank 0 ");
    CHECK_TEXT(yard_fabric_error(f), "left");
    yard_fabric_destroy(f);
}

static inline void traffic_last_puts_arrive(void **state)
{
    for (uint32_t i = 0; i < traffic_n_again; i += 5) {
        test_pipe left;

        test_pipe_open(&left);
        test_run(2, traffic_leave_rank, &left);
        test_pipe_close(&left);
    }
}

/* Rank 2 dies; 0 and 1 wait for it, and can still speak to each other. */
static inline void traffic_killed_rank(const yard_fabric_config *config, void *ctx)
{
    const test_pipe *ready = ctx;
    yard_fabric *f = traffic_create(config, TRAFFIC_WORDS);
    uint64_t begun_us;
    uint32_t lost = 99;

    test_barrier(f, 2048, 1);
    test_tell(ready);
    if (config->rank == 2)
        for (;;)
            pause();
    begun_us = yard_now_us();
    CHECK(yard_fabric_wait_until(f, 16, 1, 2, yard_fabric_deadline(f, 0)) == YARD_EPEER);
    CHECK_TEXT(yard_fabric_error(f), "rank 2 ");
    CHECK(yard_now_us() - begun_us < config->timeout_us / 2);
    CHECK(yard_fabric_poll(f, &lost) == YARD_EPEER && lost == 2);
    CHECK(yard_fabric_signal(f, 16, 1, 2) == YARD_EPEER);
    CHECK_OK(f, yard_fabric_signal(f, 8 * config->rank, 1, 1 - config->rank));
    CHECK_OK(f, yard_fabric_wait_until(f, 8 * (1 - config->rank), 1, 1 - config->rank,
                                       yard_fabric_deadline(f, 0)));
    yard_fabric_destroy(f);
}

/* Some libraries keep a file there for each process, named after it. */
static inline void traffic_check_no_file(pid_t pid)
{
    char prefix[32];
    DIR *d = opendir("/dev/shm");

    snprintf(prefix, sizeof(prefix), "%d:", pid);
    for (struct dirent *e; d && (e = readdir(d));)
        assert_true(strncmp(e->d_name, prefix, strlen(prefix)) != 0);
    if (d)
        closedir(d);
}

static inline void traffic_killed_rank_is_named(void **state)
{
    test_group g = { 0 };
    test_pipe ready;
    pid_t killed;

    test_pipe_open(&ready);
    test_start(&g, 3, traffic_killed_rank, &ready);
    killed = g.pids[2];
    for (int i = 0; i < 3; i++)
        test_hear(&ready);
    kill(g.pids[2], SIGKILL);
    assert_int_equal(test_wait_rank(&g, 2), 128 + SIGKILL);
    test_wait_all(&g);
    traffic_check_no_file(killed);
    test_pipe_close(&ready);
}

/* Rank 1 is stopped: a wait for it ends at its deadline, puts to it return; when it goes on, so
 * does the group. */
typedef struct traffic_stop {
    test_pipe ready, stopped, timed_out;
} traffic_stop;

static inline void traffic_stopped_rank(const yard_fabric_config *config, void *ctx)
{
    const traffic_stop *s = ctx;
    yard_fabric *f = traffic_create(config, TRAFFIC_WORDS + TRAFFIC_FLOOD);
    uint8_t *data = yard_fabric_local(f, TRAFFIC_WORDS);
    const uint64_t n_puts = 16;

    test_barrier(f, 2048, 1);
    test_tell(&s->ready);
    if (config->rank == 0) {
        uint64_t begun_us, took_us;

        test_hear(&s->stopped);
        begun_us = yard_now_us();
        for (uint64_t i = 0; i < n_puts; i++)
            CHECK_OK(f, yard_fabric_put_signal(f, TRAFFIC_WORDS, data, TRAFFIC_FLOOD, 0, 1, 1));
        CHECK(yard_fabric_wait_until(f, 8, 1, 1, yard_fabric_deadline(f, 500000)) ==
              YARD_ETIMEDOUT);
        CHECK_TEXT(yard_fabric_error(f), "rank 1 ");
        took_us = yard_now_us() - begun_us; /* its own deadline, not the config's */
        CHECK(took_us >= 500000 && took_us < config->timeout_us / 2);
        CHECK_OK(f, yard_fabric_poll(f, NULL));
        test_tell(&s->timed_out);
        CHECK_OK(f, yard_fabric_wait_until(f, 8, 1, 1, yard_fabric_deadline(f, 0)));
    } else {
        CHECK_OK(f, yard_fabric_wait_until(f, 0, n_puts, 0, yard_fabric_deadline(f, 0)));
        CHECK_OK(f, yard_fabric_signal(f, 8, 1, 0));
    }
    test_barrier(f, 2048, 2);
    yard_fabric_destroy(f);
}

static inline void traffic_stopped_rank_times_out(void **state)
{
    test_group g = { 0 };
    traffic_stop s;

    test_pipe_open(&s.ready);
    test_pipe_open(&s.stopped);
    test_pipe_open(&s.timed_out);
    g.n_ranks = 2;
    test_group_name(&g);
    test_start_rank(&g, 1, traffic_stopped_rank, &s);
    test_start_rank(&g, 0, traffic_stopped_rank, &s);
    test_hear(&s.ready);
    test_hear(&s.ready);
    kill(g.pids[1], SIGSTOP);
    assert_int_equal(waitpid(g.pids[1], NULL, WUNTRACED), g.pids[1]);
    test_tell(&s.stopped);
    test_hear(&s.timed_out);
    kill(g.pids[1], SIGCONT);
    test_wait_all(&g);
    test_pipe_close(&s.ready);
    test_pipe_close(&s.stopped);
    test_pipe_close(&s.timed_out);
}

/* nothing is left behind */

static uint32_t traffic_count(const char *folder)
{
    DIR *d = opendir(folder);
    uint32_t n = 0;

    CHECK(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

/* Until there are as few: a thread that was joined is listed for a moment longer. */
static void traffic_await_count(const char *folder, uint32_t at_most)
{
    const uint64_t until_us = yard_now_us() + 60000000;

    while (traffic_count(folder) > at_most) {
        CHECK(yard_now_us() < until_us);
        usleep(1000);
    }
}

/* Of the address sanitizer, when it is there: ranks leave by _exit(), where it does not look. */
int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

typedef struct traffic_again {
    uint32_t n_times;
    char name[64];
} traffic_again;

static inline void traffic_again_rank(const yard_fabric_config *config, void *ctx)
{
    const traffic_again *again = ctx;
    uint32_t n_fds = 0, n_threads = 0;

    for (uint32_t i = 0; i < again->n_times; i++) {
        yard_fabric_config c = *config;
        char rendezvous[80];
        yard_fabric *f;

        /* a name for each: a rank may be a group ahead */
        snprintf(rendezvous, sizeof(rendezvous), "unix:%s-%u", again->name, i);
        c.rendezvous = rendezvous;
        f = traffic_create(&c, TRAFFIC_WORDS);
        test_barrier(f, 2048, 1);
        yard_fabric_destroy(f);
        if (i < again->n_times / 5) { /* what libraries open once and keep */
            n_fds = traffic_count("/proc/self/fd");
            n_threads = traffic_count("/proc/self/task");
        }
    }
    traffic_await_count("/proc/self/fd", n_fds);
    traffic_await_count("/proc/self/task", n_threads);
    if (traffic_leak_check && __lsan_do_recoverable_leak_check)
        CHECK(__lsan_do_recoverable_leak_check() == 0);
}

static inline void traffic_create_destroy_leaks_nothing(void **state)
{
    traffic_again again = { .n_times = traffic_n_again };

    snprintf(again.name, sizeof(again.name), "yard-again-%d", getpid());
    test_run(2, traffic_again_rank, &again);
}

/* One rank answers whoever signals next, waiting for any; the others' round trips end only if it
 * misses none. Then another thread interrupts it. */
typedef struct traffic_server {
    yard_fabric *f;
    uint64_t served[8];
    _Atomic bool told;
} traffic_server;

static inline bool traffic_asked(void *ctx)
{
    const traffic_server *s = ctx;

    for (uint32_t r = 1; r < yard_fabric_size(s->f); r++)
        if (yard_fabric_read_signal(s->f, 8 * r) > s->served[r])
            return true;
    return atomic_load(&s->told);
}

static inline void *traffic_tell(void *ctx)
{
    traffic_server *s = ctx;

    atomic_store(&s->told, true);
    yard_fabric_interrupt(s->f);
    return NULL;
}

static inline void traffic_serve(yard_fabric *f, uint32_t n_rounds)
{
    traffic_server s = { .f = f };
    pthread_t thread;
    uint64_t n_left = (uint64_t)n_rounds * (yard_fabric_size(f) - 1);

    while (n_left > 0) {
        CHECK_OK(f, yard_fabric_wait_any(f, traffic_asked, &s, yard_fabric_deadline(f, 0)));
        for (uint32_t r = 1; r < yard_fabric_size(f); r++)
            if (yard_fabric_read_signal(f, 8 * r) > s.served[r]) {
                s.served[r]++;
                n_left--;
                CHECK_OK(f, yard_fabric_signal(f, 256, 1, r));
            }
    }
    CHECK(yard_fabric_wait_any(f, traffic_asked, &s, yard_now_us() + 2000) == YARD_ETIMEDOUT);
    CHECK(pthread_create(&thread, NULL, traffic_tell, &s) == 0);
    CHECK_OK(f, yard_fabric_wait_any(f, traffic_asked, &s, yard_fabric_deadline(f, 0)));
    pthread_join(thread, NULL);
}

static inline void traffic_any_rank(const yard_fabric_config *config, void *ctx)
{
    enum { N_ROUNDS = 300 };
    yard_fabric *f = traffic_create(config, 1 << 16);
    const uint32_t me = yard_fabric_rank(f);

    if (me == 0)
        traffic_serve(f, N_ROUNDS);
    for (uint64_t i = 1; me > 0 && i <= N_ROUNDS; i++) {
        CHECK_OK(f, yard_fabric_signal(f, 8 * me, 1, 0));
        CHECK_OK(f, yard_fabric_wait_until(f, 256, i, 0, yard_fabric_deadline(f, 0)));
    }
    test_barrier(f, 512, 1);
    yard_fabric_destroy(f);
}

static inline void traffic_any_word_wakes(void **state)
{
    test_run(4, traffic_any_rank, NULL);
}

#define TRAFFIC_SUITE                                                                              \
    cmocka_unit_test(traffic_random_puts), cmocka_unit_test(traffic_puts_do_not_block),            \
        cmocka_unit_test(traffic_polled_words_move), cmocka_unit_test(traffic_last_puts_arrive),   \
        cmocka_unit_test(traffic_any_word_wakes), cmocka_unit_test(traffic_killed_rank_is_named),  \
        cmocka_unit_test(traffic_stopped_rank_times_out),                                          \
        cmocka_unit_test(traffic_create_destroy_leaks_nothing)

#endif
