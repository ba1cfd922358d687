/* The start of a group: what is refused, who is missing, TCP rendezvous, meshes between nodes.
 * ctest: sanitize */
#include "fabric_test.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include "fabric/fabric_impl.h"

/* A free port, which stays so until the socket is closed: the kernel gives a bound port to nobody
 * who does not ask for it, and rank 0 may ask, since nobody listens there. */
static int tcp_rendezvous(char *text, size_t n_text)
{
    const int on = 1;
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof(a);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)), 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&a, n), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&a, &n), 0);
    snprintf(text, n_text, "127.0.0.1:%u", ntohs(a.sin_port));
    return fd;
}

/* How one rank differs from the others, and what all of them must say. */
typedef struct refusal {
    uint32_t odd_rank;
    yard_fabric_config odd;
    bool everybody; /* also ranks whose config is fine hear the reason */
    const char *error;
} refusal;

static void expect_failure(const yard_fabric_config *c, yard_status want, const char *text)
{
    yard_fabric *f = NULL;
    yard_error err = { 0 };
    const yard_status st = yard_fabric_create(&f, c, &err);

    if (st != want || f || !strstr(err.message, text)) {
        fprintf(stderr, "rank %u: want status %d '%s', got %d '%s'\n", c->rank, want, text, st,
                err.message);
        _exit(1);
    }
}

static void be_refused(const yard_fabric_config *config, void *ctx)
{
    const refusal *r = ctx;
    yard_fabric_config c = *config;

    c.config_hash = 1;
    c.config_text = "experts 256, top_k 8, layout expert";
    if (c.rank == r->odd_rank) {
        if (r->odd.n_ranks)
            c.n_ranks = r->odd.n_ranks;
        if (r->odd.rank)
            c.rank = r->odd.rank;
        if (r->odd.heap_bytes)
            c.heap_bytes = r->odd.heap_bytes;
        if (r->odd.device_heap_bytes)
            c.device_heap_bytes = r->odd.device_heap_bytes;
        if (r->odd.config_hash)
            c.config_hash = r->odd.config_hash;
        if (r->odd.config_text)
            c.config_text = r->odd.config_text;
        if (r->odd.transport)
            c.transport = r->odd.transport;
    }
    expect_failure(&c, YARD_EINVAL, r->error);
}

static void mismatches_are_refused(void **state)
{
    refusal cases[] = {
        { 2, { .heap_bytes = 4096 }, true, "heap_bytes: 65536 on rank 0, 4096 on rank 2" },
        { 2, { .device_heap_bytes = 64 }, true, "device_heap_bytes: 0 on rank 0, 64 on rank 2" },
        { 1, { .n_ranks = 4 }, true, "n_ranks: 3 on rank 0, 4 on rank 1" },
        { 1,
          { .config_hash = 2, .config_text = "experts 128, top_k 8, layout flat" },
          true,
          "fabric: config: rank 0 has 'experts 256, layout expert', rank 1 has 'experts 128, "
          "layout "
          "flat'; want the same on all ranks" },
        { 1,
          { .config_hash = 2, .config_text = "experts 256, top_k 8" },
          true,
          "rank 0 has 'layout expert', rank 1 has ''" },
        { 2, { .config_hash = 2 }, true, "config: hash 1 on rank 0, 2 on rank 2" },
        { 1, { .rank = 2 }, true, "rank 2 twice: pid " },
        { 2, { .transport = "shm" }, true, "rank 0 has '' provider '', rank 2 has 'shm'" },
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        test_run(3, be_refused, &cases[i]);
}

static void ask_for_device_heap(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;

    c.device_heap_bytes = 4096;
    c.ranks_per_node = 1;
    expect_failure(&c, YARD_ENOTSUP, ctx);
}

/* On all ranks, before a device is looked for. */
static void device_heaps_are_of_one_node(void **state)
{
    test_run(2, ask_for_device_heap, "device_heap_bytes: want all ranks on one node, got 2 nodes");
}

static void bad_configs(void **state)
{
    const yard_fabric_config good = { .size = sizeof(good),
                                      .rank = 0,
                                      .n_ranks = 2,
                                      .heap_bytes = 64,
                                      .rendezvous = "unix:x",
                                      .start_timeout_us = 1000,
                                      .timeout_us = 1000 };
    yard_fabric_config c;
    struct {
        yard_fabric_config known;
        uint64_t unknown;
    } longer = { .known = good, .unknown = 1 };

    expect_failure(NULL, YARD_EINVAL, "want YARD_FABRIC_CONFIG_INIT");
#define REFUSED(field, value, text)                                                                \
    do {                                                                                           \
        c = good;                                                                                  \
        c.field = value;                                                                           \
        expect_failure(&c, YARD_EINVAL, text);                                                     \
    } while (0)
    REFUSED(size, 0, "want YARD_FABRIC_CONFIG_INIT");
    REFUSED(n_ranks, 0, "n_ranks: want 1 to 4096, got 0");
    REFUSED(n_ranks, 5000, "n_ranks: want 1 to 4096, got 5000");
    REFUSED(rank, 2, "rank: want less than n_ranks 2, got 2");
    REFUSED(heap_bytes, 0, "heap_bytes: want more than 0");
    REFUSED(timeout_us, 0, "timeout_us: want");
    REFUSED(start_timeout_us, UINT64_MAX, "start_timeout_us: want");
    REFUSED(rendezvous, NULL, "rendezvous: want host:port or unix:NAME for 2 ranks, got none");
    REFUSED(rendezvous, "unix:", "rendezvous: want a unix name");
    REFUSED(rendezvous, "host", "rendezvous: want host:port, [IPv6]:port or unix:NAME, got 'host'");
    REFUSED(rendezvous, "host:0", "got 'host:0'");
    REFUSED(rendezvous, "host:99999", "got 'host:99999'");
    REFUSED(rendezvous, "::1:80", "got '::1:80'");
    REFUSED(bind_host, "0.0.0.0", "bind_host: want an address that the other nodes reach");
#undef REFUSED
    longer.known.size = sizeof(longer);
    expect_failure(&longer.known, YARD_EINVAL, "want at most");
}

/* Two processes that both believe to be rank 0: the second finds the place taken. */
static void second_root(const yard_fabric_config *config, void *ctx)
{
    const test_pipe *steps = ctx; /* [2]: rank 0 sits; the other has failed */
    yard_fabric_config c = *config;

    if (c.rank == 0) {
        char name[64];
        int fd;

        snprintf(name, sizeof(name), "%s", c.rendezvous + 5);
        fd = yard_listen_unix(name, sizeof(name));
        CHECK(fd >= 0);
        test_tell(&steps[0]);
        test_hear(&steps[1]);
        close(fd);
        return;
    }
    test_hear(&steps[0]);
    c.rank = 0;
    expect_failure(&c, YARD_EIO, "Address already in use; is there another rank 0?");
    test_tell(&steps[1]);
}

static void two_rank_zeros(void **state)
{
    test_pipe steps[2];

    test_pipe_open(&steps[0]);
    test_pipe_open(&steps[1]);
    test_run(2, second_root, steps);
    test_pipe_close(&steps[0]);
    test_pipe_close(&steps[1]);
}

/* Of rank 0, for the ranks that do come; they wait for its word. */
enum { MISSING_US = 5000000 };

typedef struct notices {
    char text[2048];
} notices;

static void note(void *ctx, const char *line)
{
    notices *n = ctx;
    const size_t used = strlen(n->text);

    snprintf(n->text + used, sizeof(n->text) - used, "%s\n", line);
}

static void miss_ranks(const yard_fabric_config *config, void *ctx)
{
    notices heard = { 0 };
    yard_fabric_config c = *config;

    if (c.rank == 0)
        c.start_timeout_us = MISSING_US;
    c.notice = note;
    c.notice_ctx = &heard;
    if (c.rank == 1 || c.rank == 2 || c.rank == 4)
        return;
    expect_failure(&c, YARD_ETIMEDOUT, "rendezvous: ranks 1-2, 4 of 5 missing at unix:");
    if (c.rank == 0)
        CHECK_TEXT(heard.text, "rank 0 of 5: rendezvous: waiting for ranks 1-2, 4 of 5 for ");
}

static void missing_ranks_are_named(void **state)
{
    test_run(5, miss_ranks, NULL);
}

static void miss_root(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;

    c.start_timeout_us = 100000;
    if (c.rank == 1)
        expect_failure(&c, YARD_ETIMEDOUT, "rendezvous: no rank 0 at unix:yard-test");
}

static void missing_root_is_named(void **state)
{
    test_run(2, miss_root, NULL);
}

static bool is_asked_often(void *ctx)
{
    return ++*(int *)ctx == 3;
}

/* A rank that is alone waits for others as rank 0, or for rank 0; it gives up long before the
 * deadline. */
static void give_up(const yard_fabric_config *config, void *ctx)
{
    const uint32_t *who = ctx;
    yard_fabric_config c = *config;
    int n_asked = 0;

    c.start_timeout_us = 300000000;
    c.gives_up = is_asked_often;
    c.gives_up_ctx = &n_asked;
    if (c.rank == *who)
        expect_failure(&c, YARD_EPEER, "rendezvous: its caller gave up after ");
}

static void a_caller_may_give_up(void **state)
{
    (void)state;
    for (uint32_t who = 0; who < 2; who++)
        test_run(2, give_up, &who);
}

static void know_another_secret(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;

    c.secret = c.rank == 1 ? "xyzzy" : "swordfish";
    if (c.rank == 0)
        c.start_timeout_us = MISSING_US;
    if (c.rank == 1)
        expect_failure(&c, YARD_EINVAL, "job secret is different");
    else
        expect_failure(&c, YARD_ETIMEDOUT,
                       "rank 1 of 3 (1 connection refused: different job secret) missing at unix:");
}

static void wrong_secret_is_refused(void **state)
{
    test_run(3, know_another_secret, NULL);
}

/* Garbage, silence and a wrong proof at the rendezvous do not disturb the job. */
static void be_disturbed(const yard_fabric_config *config, void *ctx)
{
    static const char garbage[64] = "GET / HTTP/1.1\r\n\r\n";
    const char *why = "";
    yard_fabric_config c = *config;
    yard_fabric *f;
    int fds[3] = { -1, -1, -1 };

    c.rendezvous = ctx;
    if (c.rank == 1) {
        char host[64];
        uint16_t port;

        CHECK(yard_split_host_port(ctx, host, sizeof(host), &port));
        for (int i = 0; i < 3; i++)
            while (fds[i] < 0)
                fds[i] = yard_connect_tcp(host, port, yard_now_us() + 1000000, &why);
        CHECK(write(fds[0], garbage, sizeof(garbage)) == sizeof(garbage));
        yard_frame_send(fds[1], YARD_FRAME_PROOF, garbage, sizeof(garbage),
                        yard_now_us() + 1000000);
    }
    f = test_create(&c);
    test_barrier(f, 0, 1);
    yard_fabric_destroy(f);
    for (int i = 0; i < 3; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

static void strays_do_not_disturb(void **state)
{
    char at[64];
    const int fd = tcp_rendezvous(at, sizeof(at));

    test_run(3, be_disturbed, at);
    close(fd);
}

/* A rank that dies before the group is complete, but has come to rank 0. */
static void die(void *ctx, const char *line)
{
    if (strstr(line, "waiting for rank 0's table of all ranks"))
        raise(SIGKILL);
}

static void lose_a_rank(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;

    if (c.rank == 2)
        return; /* never comes: only rank 1's end can end the start */
    if (c.rank == 1) {
        c.start_timeout_us = 8000000; /* also to find rank 0; the notice comes after a quarter */
        c.notice = die;
    }
    expect_failure(&c, YARD_EPEER, "rendezvous: rank 1 (pid ");
}

static void early_death_ends_the_start(void **state)
{
    test_group g = { 0 };

    test_start(&g, 3, lose_a_rank, NULL);
    assert_int_equal(test_wait_rank(&g, 1), 128 + SIGKILL);
    test_wait_all(&g);
}

static void meet_at(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;
    yard_fabric *f;

    c.rendezvous = ctx;
    c.secret = "a secret that is longer than one block of SHA-256, which is sixty-four bytes";
    f = test_create(&c);
    CHECK(!strcmp(yard_fabric_transport(f, NULL), "shm"));
    test_barrier(f, 0, 1);
    yard_fabric_destroy(f);
}

static void tcp_rendezvous_finds_one_node(void **state)
{
    char at[64];
    const int fd = tcp_rendezvous(at, sizeof(at));

    test_run(4, meet_at, at);
    close(fd);
}

static void refuse_shm(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;

    c.force_network = true;
    c.transport = "shm";
    expect_failure(&c, YARD_EINVAL, "transport: shm wants all ranks on one node, got 2 nodes");
}

static void shm_wants_one_node(void **state)
{
    test_run(2, refuse_shm, NULL);
}

/* The parts of a start, without a transport: what network transports build on. */
static yard_fabric *start_by_hand(const yard_fabric_config *c)
{
    static const yard_fabric_ops no_ops = { .name = "none" };
    yard_error err = { 0 };
    yard_fabric *f = NULL;

    CHECK(yard_fabric_create_custom(&f, &no_ops, c->rank, c->n_ranks, NULL, c->heap_bytes, NULL,
                                    &err) == YARD_OK);
    f->config = *c;
    snprintf(f->text.rendezvous, sizeof(f->text.rendezvous), "%s", c->rendezvous);
    snprintf(f->text.secret, sizeof(f->text.secret), "s");
    snprintf(f->text.bind_host, sizeof(f->text.bind_host), "127.0.0.1");
    if (yard_rendezvous_open(f, &err) != YARD_OK || yard_control_connect(f, &err) != YARD_OK) {
        fprintf(stderr, "rank %u: %s\n", c->rank, err.message);
        _exit(1);
    }
    return f;
}

static void check_mesh(yard_fabric *f, const int *fds, bool is_tcp)
{
    for (uint32_t r = 0; r < f->n_ranks; r++) {
        struct sockaddr_storage a = { 0 };
        socklen_t n = sizeof(a);
        uint32_t got = 0;

        CHECK((fds[r] < 0) == (r == f->rank));
        if (r == f->rank)
            continue;
        CHECK(getsockname(fds[r], (struct sockaddr *)&a, &n) == 0);
        CHECK(a.ss_family == (is_tcp ? AF_INET : AF_UNIX));
        CHECK(send(fds[r], &f->rank, sizeof(f->rank), MSG_NOSIGNAL) == sizeof(f->rank));
        CHECK(yard_wait_fd(fds[r], POLLIN, yard_now_us() + 60000000));
        CHECK(recv(fds[r], &got, sizeof(got), 0) == sizeof(got) && got == r);
    }
}

static void build_meshes(const yard_fabric_config *config, void *ctx)
{
    const bool network = *(const bool *)ctx;
    yard_fabric_config c = *config;
    uint32_t all[8], mine;
    yard_error err = { 0 };
    yard_fabric *f;
    int fds[8];

    c.force_network = network;
    f = start_by_hand(&c);
    CHECK(f->n_nodes == (network ? c.n_ranks : 1));
    for (uint32_t r = 0; r < c.n_ranks; r++)
        CHECK(yard_fabric_node(f, r) == (network ? r : 0));
    yard_stage_begin(f, "data");
    CHECK(yard_mesh_connect(f, 1, network ? YARD_MESH_TCP : YARD_MESH_UNIX, fds, &err) == YARD_OK);
    check_mesh(f, fds, network);
    mine = 100 + c.rank;
    CHECK(yard_rendezvous_exchange(f, &mine, sizeof(mine), all, &err) == YARD_OK);
    for (uint32_t r = 0; r < c.n_ranks; r++) {
        CHECK(all[r] == 100 + r);
        if (fds[r] >= 0)
            close(fds[r]);
    }
    if (c.rank == 0) { /* one fails, all hear of it */
        yard_fail(&err, YARD_ENOMEM, "no room");
        yard_rendezvous_abort(f, &err);
    } else {
        CHECK(yard_rendezvous_exchange(f, &mine, sizeof(mine), all, &err) == YARD_ENOMEM);
        CHECK_TEXT(err.message, "rank 0 (pid ");
        CHECK_TEXT(err.message, "no room");
    }
    yard_fabric_destroy(f);
}

static void meshes_and_exchange(void **state)
{
    bool network = false;

    test_run(5, build_meshes, &network);
    network = true;
    test_run(5, build_meshes, &network);
}

/* Control connections over TCP: a peer that leaves, a peer that dies. */
static void watch_by_tcp(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;
    yard_error err = { 0 };
    yard_fabric *f;
    uint32_t lost = 99;

    c.force_network = true;
    f = start_by_hand(&c);
    CHECK(yard_control_start(f, &err) == YARD_OK);
    CHECK(yard_rendezvous_exchange(f, NULL, 0, NULL, &err) == YARD_OK);
    if (c.rank == 2)
        raise(SIGKILL);
    while (c.rank == 0 && (!yard_peer_gone(f, 1) || !yard_peer_gone(f, 2)))
        poll(NULL, 0, 1);
    if (c.rank == 0) {
        CHECK(yard_peer_fail(f, 1) == YARD_EPEER);
        CHECK_TEXT(yard_fabric_error(f), "rank 1 (pid ");
        CHECK_TEXT(yard_fabric_error(f), "at 127.0.0.1) has left the group");
        CHECK(yard_peer_fail(f, 2) == YARD_EPEER);
        CHECK_TEXT(yard_fabric_error(f), "is lost: its process has ended");
        CHECK(yard_fabric_poll(f, &lost) == YARD_EPEER && lost == 2);
    }
    yard_fabric_destroy(f);
}

static void control_over_tcp(void **state)
{
    test_group g = { 0 };

    test_start(&g, 3, watch_by_tcp, NULL);
    assert_int_equal(test_wait_rank(&g, 2), 128 + SIGKILL);
    test_wait_all(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mismatches_are_refused),
        cmocka_unit_test(device_heaps_are_of_one_node),
        cmocka_unit_test(bad_configs),
        cmocka_unit_test(two_rank_zeros),
        cmocka_unit_test(missing_ranks_are_named),
        cmocka_unit_test(missing_root_is_named),
        cmocka_unit_test(a_caller_may_give_up),
        cmocka_unit_test(wrong_secret_is_refused),
        cmocka_unit_test(strays_do_not_disturb),
        cmocka_unit_test(early_death_ends_the_start),
        cmocka_unit_test(tcp_rendezvous_finds_one_node),
        cmocka_unit_test(shm_wants_one_node),
        cmocka_unit_test(meshes_and_exchange),
        cmocka_unit_test(control_over_tcp),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
