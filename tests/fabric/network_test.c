/* Two ranks in two network namespaces, joined by a virtual cable: real addresses, no shared
 * loopback, and a cable that can be cut. Needs root; skipped elsewhere. The namespaces have no
 * names: they go when the processes end, however they end. */
#include "traffic.h"

#include <sched.h>

enum { PORT = 7117, DEADLINE_US = 5000000 };

typedef struct cable {
    test_pipe inside, plugged; /* "I am in my namespace", "there is a cable" */
    test_rank_fn fn;
} cable;

static bool run_command(const char *format, ...)
{
    char line[256];
    va_list args;

    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    return system(line) == 0;
}

static void networked_rank(const yard_fabric_config *config, void *ctx)
{
    const cable *c = ctx;
    yard_fabric_config mine = *config;
    char rendezvous[64], host[32];

    CHECK(unshare(CLONE_NEWNET) == 0);
    test_tell(&c->inside);
    test_hear(&c->plugged);
    snprintf(host, sizeof(host), "10.117.0.%u", config->rank + 1);
    snprintf(rendezvous, sizeof(rendezvous), "10.117.0.1:%d", PORT);
    CHECK(run_command("ip link set lo up && ip addr add %s/24 dev yard0 && ip link set yard0 up",
                      host));
    mine.rendezvous = rendezvous;
    mine.bind_host = host;
    c->fn(&mine, NULL);
}

static void run_networked(test_rank_fn fn)
{
    test_group g = { 0 };
    cable c = { .fn = fn };

    test_pipe_open(&c.inside);
    test_pipe_open(&c.plugged);
    test_start(&g, 2, networked_rank, &c);
    test_hear(&c.inside);
    test_hear(&c.inside);
    assert_true(run_command("ip link add name yard0 netns %d type veth peer name yard0 netns %d",
                            g.pids[0], g.pids[1]));
    test_tell(&c.plugged);
    test_tell(&c.plugged);
    test_wait_all(&g);
    test_pipe_close(&c.inside);
    test_pipe_close(&c.plugged);
}

static void puts_cross_the_cable(void **state)
{
    run_networked(traffic_random_rank);
}

/* A name that means this machine to itself is of no use to the other. */
static void listen_at_loopback(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;
    yard_fabric *f = NULL;
    yard_error err = { 0 };

    if (c.rank == 1)
        c.bind_host = "0x7f000001"; /* resolves as names do */
    CHECK(yard_fabric_create(&f, &c, &err) == YARD_EINVAL && !f);
    CHECK_TEXT(err.message, "but rank 1 listens at 0x7f000001, which only its own machine reaches; "
                            "set bind_host (YARD_BIND_HOST)");
}

static void unreachable_addresses_are_refused(void **state)
{
    run_networked(listen_at_loopback);
}

static void pull_the_cable(void)
{
    CHECK(run_command("ip link set yard0 down"));
}

static void plug_it_in_after(unsigned int out_ms)
{
    if (fork() == 0) {
        usleep(1000 * out_ms);
        CHECK(run_command("ip link set yard0 up"));
        _exit(0);
    }
}

/* One round trip of 40 KB each way. */
static void exchange(yard_fabric *f, uint64_t round)
{
    enum { N_BYTES = 40000, PATIENCE_US = 100000000 };
    const uint32_t me = yard_fabric_rank(f);

    CHECK_OK(f, yard_fabric_put_signal(f, 4096 + N_BYTES * me,
                                       yard_fabric_local(f, 4096 + 2 * N_BYTES), N_BYTES, 8 * me, 1,
                                       1 - me));
    CHECK_OK(f, yard_fabric_wait_until(f, 8 * (1 - me), round, 1 - me,
                                       yard_fabric_deadline(f, PATIENCE_US)));
}

/* By which a link is given up, too. */
static yard_fabric_config with_deadline(const yard_fabric_config *config)
{
    yard_fabric_config c = *config;

    c.timeout_us = DEADLINE_US;
    return c;
}

/* A second without a link is a slow round, no more. */
static void cut_shortly(const yard_fabric_config *config, void *ctx)
{
    enum { N_ROUNDS = 500 };
    yard_fabric_config c = with_deadline(config);
    yard_fabric *f = traffic_create(&c, 4096 + 3 * 40000);
    uint64_t round = 0, out_us;

    while (round < N_ROUNDS)
        exchange(f, ++round);
    out_us = yard_now_us();
    if (config->rank == 0) {
        pull_the_cable();
        plug_it_in_after(1000);
    }
    exchange(f, ++round); /* the other one's part may have come before */
    exchange(f, ++round);
    CHECK(config->rank != 0 || yard_now_us() - out_us >= 1000000);
    while (round < 2 * N_ROUNDS)
        exchange(f, ++round);
    test_barrier(f, 2048, 1);
    yard_fabric_destroy(f);
    if (config->rank == 0)
        CHECK(wait(NULL) > 0);
}

static void a_link_cut_for_a_second_survives(void **state)
{
    run_networked(cut_shortly);
}

static test_pipe is_out, given_up;

static void plug_it_in_when_both_gave_up(void)
{
    if (fork() == 0) {
        test_hear(&given_up);
        test_hear(&given_up);
        CHECK(run_command("ip link set yard0 up"));
        _exit(0);
    }
}

/* Without a link: an error that names the other, on both sides, before there is one again. */
static void lose_each_other(yard_fabric *f, uint32_t peer)
{
    yard_status st;

    (void)yard_fabric_put_signal(f, 4096, yard_fabric_local(f, 4096), 40000, 0, 1, peer);
    st = yard_fabric_wait_until(f, 0, 1, peer, yard_fabric_deadline(f, 0));
    CHECK(st == YARD_ETIMEDOUT || st == YARD_EPEER);
    CHECK_TEXT(yard_fabric_error(f), peer ? "rank 1 " : "rank 0 ");
    yard_fabric_destroy(f);
    test_tell(&given_up);
}

/* Time without a link ends the group, and a new one forms once the cable is back. What the
 * old one had under way (40 KB of ones) does not reach it. */
static void cut_long(const yard_fabric_config *config, void *ctx)
{
    enum { N_ROUNDS = 100, N_BYTES = 40000, HEAP = 4096 + 3 * N_BYTES };
    yard_fabric_config c = with_deadline(config);
    yard_fabric *f = traffic_create(&c, HEAP);
    const uint32_t peer = 1 - config->rank;
    const uint8_t *heap;
    uint64_t round = 0;

    memset(yard_fabric_local(f, 4096), 1, N_BYTES);
    test_barrier(f, 2048, 1);
    if (config->rank == 0) {
        pull_the_cable();
        plug_it_in_when_both_gave_up();
        test_tell(&is_out);
    } else {
        test_hear(&is_out);
    }
    lose_each_other(f, peer);

    f = traffic_create(config, HEAP);
    heap = yard_fabric_local(f, 4096);
    while (round < N_ROUNDS)
        exchange(f, ++round);
    for (size_t i = 0; i < 3 * (size_t)N_BYTES; i++)
        CHECK(heap[i] == 0);
    test_barrier(f, 2048, 1);
    yard_fabric_destroy(f);
    if (config->rank == 0)
        CHECK(wait(NULL) > 0);
}

static void a_link_cut_for_long_is_an_error(void **state)
{
    test_pipe_open(&is_out);
    test_pipe_open(&given_up);
    run_networked(cut_long);
    test_pipe_close(&is_out);
    test_pipe_close(&given_up);
}

static bool has_namespaces(void)
{
    const pid_t pid = fork();
    int status = 1;

    if (pid == 0)
        _exit(unshare(CLONE_NEWNET) == 0 &&
                      run_command("ip link add yard0 type veth peer name yard1 2>/dev/null")
                  ? 0
                  : 1);
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(puts_cross_the_cable),
        cmocka_unit_test(unreachable_addresses_are_refused),
        cmocka_unit_test(a_link_cut_for_a_second_survives),
        cmocka_unit_test(a_link_cut_for_long_is_an_error),
    };
    int n_failed;

    if (geteuid() != 0 || !has_namespaces())
        return 77;
    alarm(2 * TEST_ALARM_S);
    traffic_transport = NULL; /* two networks are two nodes: tcp by itself */
    n_failed = cmocka_run_group_tests_name("tcp", tests, NULL, NULL);
    traffic_transport = "libfabric";
    traffic_provider = "tcp";
    return n_failed + cmocka_run_group_tests_name("libfabric over tcp", tests, NULL, NULL);
}
