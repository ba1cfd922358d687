/* Shared memory between processes: puts, signals, waits, bounds, many ranks, nothing left behind.
 * ctest: sanitize */
#include "traffic.h"

static void ping_pong(const yard_fabric_config *config, void *ctx)
{
    enum { N_ROUNDS = 2000, DATA = 1024, SIG = 0 };
    yard_fabric *f = test_create(config);
    const uint32_t me = yard_fabric_rank(f), peer = 1 - me;

    for (uint64_t i = 1; i <= N_ROUNDS; i++) {
        const uint64_t value = i * 0x9e3779b97f4a7c15u;

        if ((i & 1) == me) {
            CHECK_OK(f, yard_fabric_put_signal(f, DATA, &value, sizeof(value), SIG, 1, peer));
        } else {
            CHECK_OK(f,
                     yard_fabric_wait_until(f, SIG, (i + 1) / 2, peer, yard_fabric_deadline(f, 0)));
            CHECK(!memcmp(yard_fabric_local(f, DATA), &value, sizeof(value)));
        }
    }
    test_barrier(f, 64, 1);
    yard_fabric_destroy(f);
}

static void two_ranks_ping_pong(void **state)
{
    test_run(2, ping_pong, NULL);
}

static void signals_add(const yard_fabric_config *config, void *ctx)
{
    yard_fabric *f = test_create(config);
    const uint32_t me = yard_fabric_rank(f), peer = 1 - me;
    const yard_sym sig = 8 * (yard_sym)me, theirs = 8 * (yard_sym)peer;
    yard_fabric_stats stats;

    CHECK_OK(f, yard_fabric_put_signal(f, 4096, "12345", 5, sig, 5, peer));
    CHECK_OK(f, yard_fabric_signal(f, sig, UINT64_C(1) << 40, peer));
    CHECK_OK(f, yard_fabric_put_signal(f, 0, NULL, 0, sig, 7, peer));
    CHECK_OK(f, yard_fabric_wait_until(f, theirs, (UINT64_C(1) << 40) + 12, peer,
                                       yard_fabric_deadline(f, 0)));
    CHECK(yard_fabric_read_signal(f, theirs) == (UINT64_C(1) << 40) + 12);
    CHECK_OK(f, yard_fabric_wait_until(f, theirs, 3, peer, 0)); /* at least: no deadline matters */
    CHECK_OK(f, yard_fabric_put_signal(f, 4096, "self", 4, 32, 1, me)); /* not over the wire */
    yard_fabric_get_stats(f, &stats);
    CHECK(stats.n_puts == 1 && stats.n_put_bytes == 5 && stats.n_signals == 2);
    test_barrier(f, 64, 1);
    yard_fabric_destroy(f);
}

static void signals_add_up(void **state)
{
    test_run(2, signals_add, NULL);
}

static void describe(const yard_fabric_config *config, void *ctx)
{
    yard_fabric *f = test_create(config);
    const char *reason = NULL;

    CHECK(!strcmp(yard_fabric_transport(f, &reason), "shm"));
    CHECK_TEXT(reason, "all 3 ranks are on one node");
    CHECK(yard_fabric_size(f) == 3 && yard_fabric_rank(f) == config->rank);
    for (uint32_t r = 0; r < 3; r++)
        CHECK(yard_fabric_node(f, r) == 0);
    CHECK(yard_fabric_copies(f) && yard_fabric_heap_bytes(f) == config->heap_bytes);
    CHECK((uintptr_t)yard_fabric_local(f, 0) % 64 == 0 && !*yard_fabric_error(f));
    for (size_t i = 64; i < config->heap_bytes; i++) /* below, a faster rank may have signalled */
        CHECK(((uint8_t *)yard_fabric_local(f, 0))[i] == 0);
    CHECK(yard_fabric_poll(f, NULL) == YARD_OK);
    test_barrier(f, 0, 1);
    yard_fabric_destroy(f);
}

static void topology_is_told(void **state)
{
    test_run(3, describe, NULL);
}

static yard_fabric *alone(size_t heap_bytes)
{
    yard_fabric_config c = YARD_FABRIC_CONFIG_INIT;
    yard_fabric *f = NULL;
    yard_error err = { 0 };

    c.n_ranks = 1;
    c.heap_bytes = heap_bytes;
    if (yard_fabric_create(&f, &c, &err) != YARD_OK)
        fail_msg("%s", err.message);
    return f;
}

static void bounds_are_checked(void **state)
{
    enum { HEAP = 1000 };
    yard_fabric *f = alone(HEAP);
    static const uint8_t data[HEAP + 1];
    const struct {
        yard_sym dst;
        size_t n_bytes;
        yard_sym sig;
        uint32_t peer;
        const char *error;
    } bad[] = {
        { 0, HEAP + 1, 0, 0, "put: want 1001 bytes at 0 inside the heap's 1000" },
        { HEAP, 1, 0, 0, "put: want 1 bytes at 1000" },
        { 999, 2, 0, 0, "put: want 2 bytes at 999" },
        { 8, SIZE_MAX, 0, 0, "put: want" },
        { UINT64_MAX, 2, 0, 0, "put: want" },
        { 0, 8, 4, 0, "sig: want 8 aligned bytes inside the heap's 1000, got offset 4" },
        { 0, 8, HEAP, 0, "sig: want" },
        { 0, 8, UINT64_MAX - 7, 0, "sig: want" },
        { 0, 8, 0, 1, "peer: want less than 1 ranks, got 1" },
        { 0, 0, 0, UINT32_MAX, "peer: want" },
    };

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(
            yard_fabric_put_signal(f, bad[i].dst, data, bad[i].n_bytes, bad[i].sig, 1, bad[i].peer),
            YARD_EINVAL);
        if (!strstr(yard_fabric_error(f), bad[i].error))
            fail_msg("want '%s', got '%s'", bad[i].error, yard_fabric_error(f));
    }
    assert_int_equal(yard_fabric_signal(f, 3, 1, 0), YARD_EINVAL);
    assert_int_equal(yard_fabric_wait_until(f, 3, 1, 0, 0), YARD_EINVAL);
    assert_int_equal(yard_fabric_wait_until(f, 0, 1, 1, 0), YARD_EINVAL);
    assert_int_equal(yard_fabric_read_signal(f, 0), 0);
    assert_int_equal(yard_fabric_put_signal(f, 0, data, HEAP, HEAP - 8, 1, 0), YARD_OK);
    assert_int_equal(yard_fabric_put_signal(f, HEAP, data, 0, HEAP - 8, 1, 0), YARD_OK);
    assert_int_equal(yard_fabric_read_signal(f, HEAP - 8), 2);
    yard_fabric_destroy(f);
    f = alone(7);
    assert_int_equal(yard_fabric_signal(f, 0, 1, 0), YARD_EINVAL);
    yard_fabric_destroy(f);
    yard_fabric_destroy(NULL);
}

static void self_puts_and_deadlines(void **state)
{
    yard_fabric *f = alone(4096);
    const char *reason = NULL;

    assert_string_equal(yard_fabric_transport(f, &reason), "shm");
    assert_string_equal(reason, "there is one rank");
    assert_int_equal(yard_fabric_put_signal(f, 100, "hello", 5, 0, 3, 0), YARD_OK);
    assert_int_equal(yard_fabric_wait_until(f, 0, 3, 0, yard_fabric_deadline(f, 0)), YARD_OK);
    assert_memory_equal(yard_fabric_local(f, 100), "hello", 5);
    assert_int_equal(yard_fabric_wait_until(f, 0, 4, 0, yard_fabric_deadline(f, 20000)),
                     YARD_ETIMEDOUT);
    assert_non_null(strstr(yard_fabric_error(f), "for rank 0 (pid"));
    assert_non_null(strstr(yard_fabric_error(f), "signal at 0 is 3, want 4"));
    assert_true(yard_fabric_deadline(f, UINT64_MAX) == UINT64_MAX);
    yard_fabric_destroy(f);
}

/* Every length and both alignments around the vector loop's edges. */
static void copies_every_length(void **state)
{
    enum { MAX = 2300 };
    yard_fabric *f = alone(8192);
    uint8_t src[MAX + 64], *heap = yard_fabric_local(f, 0);

    for (size_t i = 0; i < sizeof(src); i++)
        src[i] = (uint8_t)(i * 7 + i / 251 + 1);
    for (size_t n = 0; n <= MAX; n += n < 300 || n > 1000 ? 1 : 29) {
        const size_t to = 128 + n % 67, from = n % 61;

        memset(heap + 64, 0, 8192 - 64);
        assert_int_equal(yard_fabric_put_signal(f, to, src + from, n, 0, 1, 0), YARD_OK);
        assert_memory_equal(heap + to, src + from, n);
        for (size_t i = 64; i < to; i++)
            assert_int_equal(heap[i], 0);
        for (size_t i = to + n; i < to + n + 64; i++)
            assert_int_equal(heap[i], 0);
    }
    yard_fabric_destroy(f);
}

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

typedef struct traffic {
    uint32_t n_rounds;
    size_t max_bytes;
    uint64_t seed;
} traffic;

/* A message from one rank to another in one round: both sides know its length, place and bytes. */
typedef struct message {
    size_t n_bytes, offset;
    uint64_t bytes_seed;
} message;

static message message_of(const traffic *t, uint32_t from, uint32_t to, uint32_t round)
{
    uint64_t s = t->seed ^ ((uint64_t)from << 40 | (uint64_t)to << 20 | round);
    message m = { .bytes_seed = next_random(&s) };

    m.n_bytes = next_random(&s) % (t->max_bytes + 1);
    m.offset = next_random(&s) % (t->max_bytes - m.n_bytes + 1);
    return m;
}

static void fill(uint8_t *bytes, message m)
{
    for (size_t i = 0; i < m.n_bytes; i++)
        bytes[i] = (uint8_t)(next_random(&m.bytes_seed) >> 13);
}

/* Heap: arrived words by source, free words by destination, then two buffers of max_bytes a source.
 * A buffer is written again once its reader has said so. */
static void all_to_all(yard_fabric *f, const traffic *t)
{
    const uint32_t n = yard_fabric_size(f), me = yard_fabric_rank(f);
    const yard_sym arrived = 0, freed = 8 * (yard_sym)n, data = 16 * (yard_sym)n;
    const yard_deadline until = yard_fabric_deadline(f, 0);
    uint8_t *bytes = malloc(t->max_bytes + 1);

    for (uint32_t round = 0; round < t->n_rounds; round++) {
        for (uint32_t k = 0; k < n; k++) {
            const uint32_t peer = (me + k) % n;
            const message m = message_of(t, me, peer, round);
            const yard_sym at = data + (2 * me + round % 2) * t->max_bytes + m.offset;

            if (round >= 2)
                CHECK_OK(f, yard_fabric_wait_until(f, freed + 8 * peer, round - 1, peer, until));
            fill(bytes, m);
            CHECK_OK(f, yard_fabric_put_signal(f, at, bytes, m.n_bytes, arrived + 8 * me, 1, peer));
        }
        for (uint32_t k = 0; k < n; k++) {
            const uint32_t peer = (me + n - k) % n;
            const message m = message_of(t, peer, me, round);
            const yard_sym at = data + (2 * peer + round % 2) * t->max_bytes + m.offset;

            CHECK_OK(f, yard_fabric_wait_until(f, arrived + 8 * peer, round + 1, peer, until));
            fill(bytes, m);
            CHECK(!memcmp(yard_fabric_local(f, at), bytes, m.n_bytes));
            CHECK_OK(f, yard_fabric_signal(f, freed + 8 * me, 1, peer));
        }
    }
    for (uint32_t r = 0; r < n; r++)
        CHECK_OK(f, yard_fabric_wait_until(f, freed + 8 * r, t->n_rounds, r, until));
    free(bytes);
}

static size_t traffic_heap(const traffic *t, uint32_t n_ranks)
{
    return (16 + 2 * t->max_bytes) * n_ranks;
}

static void random_traffic(const yard_fabric_config *config, void *ctx)
{
    const traffic *t = ctx;
    yard_fabric_config c = *config;
    yard_fabric *f;

    c.heap_bytes = traffic_heap(t, c.n_ranks);
    f = test_create(&c);
    all_to_all(f, t);
    yard_fabric_destroy(f);
}

static void random_traffic_many_ranks(void **state)
{
    traffic t = { .n_rounds = 40, .max_bytes = 9000, .seed = 20240917 };

    for (uint32_t n = 2; n <= 8; n++) {
        t.seed += n;
        print_message("%u ranks, seed %llu\n", n, (unsigned long long)t.seed);
        test_run(n, random_traffic, &t);
    }
    t = (traffic){ .n_rounds = 4, .max_bytes = 300, .seed = 5 };
    test_run(32, random_traffic, &t);
}

/* A token goes round: all but one rank sleep at any time. */
static void pass_token(const yard_fabric_config *config, void *ctx)
{
    enum { N_LAPS = 100 };
    yard_fabric *f = test_create(config);
    const uint32_t n = yard_fabric_size(f), me = yard_fabric_rank(f);
    const uint32_t before = (me + n - 1) % n, after = (me + 1) % n;

    for (uint64_t lap = 1; lap <= N_LAPS; lap++) {
        if (me != 0 || lap > 1)
            CHECK_OK(f, yard_fabric_wait_until(f, 0, lap - (me == 0), before,
                                               yard_fabric_deadline(f, 0)));
        CHECK_OK(f, yard_fabric_signal(f, 0, 1, after));
    }
    if (me == 0)
        CHECK_OK(f, yard_fabric_wait_until(f, 0, N_LAPS, before, yard_fabric_deadline(f, 0)));
    yard_fabric_destroy(f);
}

static void token_ring(void **state)
{
    test_run(8, pass_token, NULL);
}

static void hello_all(const yard_fabric_config *config, void *ctx)
{
    yard_fabric *f = test_create(config);

    test_barrier(f, 0, 1);
    test_barrier(f, 8 * (yard_sym)yard_fabric_size(f), 1);
    yard_fabric_destroy(f);
}

static void ranks_128(void **state)
{
    test_run(128, hello_all, NULL);
}

enum { N_THREADS = 3, N_GROUPS = 2 };

typedef struct thread_rank {
    test_group *groups; /* [N_GROUPS] */
    uint32_t rank;
    const traffic *t;
} thread_rank;

static void *thread_main(void *arg)
{
    const thread_rank *self = arg;
    yard_fabric *fabrics[N_GROUPS];

    for (int g = 0; g < N_GROUPS; g++) {
        yard_fabric_config c = test_config(&self->groups[g], self->rank);

        c.heap_bytes = traffic_heap(self->t, N_THREADS);
        fabrics[g] = test_create(&c);
    }
    for (int g = N_GROUPS - 1; g >= 0; g--)
        all_to_all(fabrics[g], self->t);
    for (int g = 0; g < N_GROUPS; g++)
        yard_fabric_destroy(fabrics[g]);
    return NULL;
}

static void run_threads(const traffic *t)
{
    test_group groups[N_GROUPS] = { 0 };
    thread_rank ranks[N_THREADS];
    pthread_t threads[N_THREADS];

    for (int g = 0; g < N_GROUPS; g++) {
        groups[g].n_ranks = N_THREADS;
        test_group_name(&groups[g]);
    }
    for (uint32_t r = 0; r < N_THREADS; r++) {
        ranks[r] = (thread_rank){ .groups = groups, .rank = r, .t = t };
        assert_int_equal(pthread_create(&threads[r], NULL, thread_main, &ranks[r]), 0);
    }
    for (uint32_t r = 0; r < N_THREADS; r++)
        pthread_join(threads[r], NULL);
}

static void several_fabrics_in_one_process(void **state)
{
    const traffic t = { .n_rounds = 50, .max_bytes = 5000, .seed = 77 };

    run_threads(&t);
}

/* Entries with the word in their names. */
static int count_entries(const char *path, const char *word)
{
    DIR *dir = opendir(path);
    int n = 0;

    if (!dir)
        return -1;
    for (const struct dirent *e; (e = readdir(dir));)
        n += strstr(e->d_name, word) != NULL;
    closedir(dir);
    return n;
}

static int count_mappings(void)
{
    FILE *file = fopen("/proc/self/maps", "re");
    char line[512];
    int n = 0;

    assert_non_null(file);
    while (fgets(line, sizeof(line), file))
        n += strstr(line, "memfd:yard") != NULL;
    fclose(file);
    return n;
}

static void no_leftovers(void **state)
{
    const traffic t = { .n_rounds = 1, .max_bytes = 100, .seed = 3 };
    int fds;

    run_threads(&t); /* what the first use opens for good (a sanitizer's files) is not ours */
    fds = count_entries("/proc/self/fd", "");
    for (int i = 0; i < 100; i++) {
        yard_fabric_destroy(alone(4096));
        if (i % 10 == 0)
            run_threads(&t);
    }
    assert_int_equal(count_entries("/proc/self/fd", ""), fds);
    assert_true(count_entries("/dev/shm", "yard") <= 0); /* other programs have files there, too */
    assert_int_equal(count_mappings(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_ranks_ping_pong),
        cmocka_unit_test(signals_add_up),
        cmocka_unit_test(topology_is_told),
        cmocka_unit_test(bounds_are_checked),
        cmocka_unit_test(self_puts_and_deadlines),
        cmocka_unit_test(copies_every_length),
        cmocka_unit_test(random_traffic_many_ranks),
        cmocka_unit_test(token_ring),
        cmocka_unit_test(traffic_any_word_wakes),
        cmocka_unit_test(ranks_128),
        /* last: forking after threads have run is nothing to rely on */
        cmocka_unit_test(several_fabrics_in_one_process),
        cmocka_unit_test(no_leftovers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
