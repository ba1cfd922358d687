/* The TCP transport: the suite of all transports, and bytes from strangers and from broken ranks.
 * ctest: sanitize */
#include "traffic.h"

#include <sys/socket.h>

#include "fabric/tcp.h"

enum { HEAP = 8192, N_HOSTILE = 12 };

typedef struct hostile_bytes {
    yard_tcp_head head;
    yard_put put;
    uint8_t data[64];
} hostile_bytes;

/* The kind-th way to be wrong; returns how many bytes to send. The data is 64 times 0xee. */
static size_t make_hostile(hostile_bytes *h, uint32_t magic, uint32_t kind)
{
    h->head = (yard_tcp_head){ magic, 1 };
    h->put = (yard_put){ .dst = 1024, .n_bytes = 64, .sig = 8, .value = 1 };
    memset(h->data, 0xee, sizeof(h->data));
    switch (kind) {
    case 0: /* garbage */
        memset(&h->head, 0xa5, sizeof(h->head));
        return sizeof(*h);
    case 1: /* another group's */
        h->head.magic++;
        return sizeof(*h);
    case 2:
        h->head.n_puts = 0;
        return sizeof(*h);
    case 3:
        h->head.n_puts = YARD_TCP_MAX_PUTS + 1;
        return sizeof(*h);
    case 4: /* reaches over the end */
        h->put.dst = HEAP - 63;
        return sizeof(*h);
    case 5: /* before the beginning */
        h->put.dst = UINT64_MAX - 31;
        return sizeof(*h);
    case 6:
        h->put.n_bytes = UINT64_MAX;
        return sizeof(*h);
    case 7: /* not a word */
        h->put.sig = 12;
        return sizeof(*h);
    case 8:
        h->put.sig = HEAP;
        return sizeof(*h);
    case 9: /* for a rank whose heap is not here */
        h->put.target = 1;
        return sizeof(*h);
    case 10:
        h->put.target = UINT64_MAX;
        return sizeof(*h);
    default: /* cut off in the data */
        return sizeof(*h) - 1;
    }
}

static void hostile_rank(const yard_fabric_config *config, void *ctx)
{
    const uint32_t kind = *(const uint32_t *)ctx;
    yard_fabric *f = traffic_create(config, HEAP);

    test_barrier(f, 2048, 1);
    if (config->rank == 1) {
        const yard_tcp *t = yard_fabric_impl(f);
        hostile_bytes h;
        const size_t n = make_hostile(&h, t->magic, kind);

        CHECK(send(t->peers[0].fd, &h, n, MSG_NOSIGNAL) == (ssize_t)n);
        shutdown(t->peers[0].fd, SHUT_WR); /* fails when the peer was quicker */
        CHECK(yard_fabric_wait_until(f, 16, 1, 0, yard_fabric_deadline(f, 0)) == YARD_EPEER);
    } else {
        const uint8_t *heap = yard_fabric_local(f, 0);

        CHECK(yard_fabric_wait_until(f, 8, 1, 1, yard_fabric_deadline(f, 0)) == YARD_EPEER);
        CHECK_TEXT(yard_fabric_error(f), "rank 1 ");
        CHECK(yard_fabric_poll(f, NULL) == YARD_EPEER);
        /* What is wrong in its description leaves no byte; what is cut off, no signal. */
        CHECK(yard_fabric_read_signal(f, 8) == 0);
        for (uint32_t i = 0; i < HEAP && kind < N_HOSTILE - 1; i++)
            CHECK(heap[i] != 0xee && heap[i] != 0xa5);
    }
    yard_fabric_destroy(f);
}

static void broken_frames_end_the_connection(void **state)
{
    for (uint32_t kind = 0; kind < N_HOSTILE; kind++)
        test_run(2, hostile_rank, &kind);
}

static bool owns_socket(pid_t pid, unsigned long inode)
{
    char path[64], link[64], want[64];
    DIR *d;
    bool found = false;

    snprintf(path, sizeof(path), "/proc/%d/fd", pid);
    snprintf(want, sizeof(want), "socket:[%lu]", inode);
    d = opendir(path);
    for (struct dirent *e; d && !found && (e = readdir(d));) {
        char full[sizeof(path) + sizeof(e->d_name)];
        ssize_t n;

        snprintf(full, sizeof(full), "%s/%s", path, e->d_name);
        n = readlink(full, link, sizeof(link) - 1);
        found = n > 0 && (link[n] = 0, !strcmp(link, want));
    }
    if (d)
        closedir(d);
    return found;
}

/* Ports that the process listens at on the loopback address; at most max. */
static uint32_t listening_ports(pid_t pid, uint16_t *ports, uint32_t max)
{
    FILE *table = fopen("/proc/net/tcp", "r");
    char line[256];
    uint32_t n = 0;

    assert_non_null(table);
    while (n < max && fgets(line, sizeof(line), table)) {
        unsigned int port, state;
        unsigned long inode;

        if (sscanf(line, "%*d: %*x:%x %*x:%*x %x %*x:%*x %*x:%*x %*x %*u %*u %lu", &port, &state,
                   &inode) == 3 &&
            state == 0x0a && owns_socket(pid, inode))
            ports[n++] = (uint16_t)port;
    }
    fclose(table);
    return n;
}

static int knock(uint16_t port)
{
    const char *why = "";
    const int fd = yard_connect_tcp("127.0.0.1", port, yard_now_us() + 60000000, &why);

    assert_true(fd >= 0);
    return fd;
}

/* Noise, a frame that announces more than there is, nothing at all, and one that knows the protocol
 * but not the secret. They stay connected. */
static void pester(uint16_t port)
{
    const uint32_t huge[2] = { YARD_FRAME_PROOF, 0x7fffffff };
    const uint32_t half[3] = { YARD_FRAME_PROOF, YARD_NONCE_BYTES + YARD_MAC_BYTES, 0 };
    yard_conn conn = { .fd = -1 };
    yard_error err = { 0 };
    uint8_t noise[3000];

    for (uint32_t i = 0; i < sizeof(noise); i++)
        noise[i] = (uint8_t)traffic_mix(i);
    (void)!send(knock(port), noise, sizeof(noise), MSG_NOSIGNAL);
    (void)!send(knock(port), huge, sizeof(huge), MSG_NOSIGNAL);
    (void)!send(knock(port), half, sizeof(half), MSG_NOSIGNAL);
    knock(port);
    /* Rank 0 serves its door now; the others do later, so their answer is not awaited. */
    conn.fd = knock(port);
    (void)yard_auth_connect(&conn, "not the secret", "the rank", yard_now_us() + 200000, &err);
    assert_int_not_equal(err.status, YARD_OK);
    yard_conn_close(&conn);
}

static void guarded_rank(const yard_fabric_config *config, void *ctx)
{
    yard_fabric_config c = *config;
    yard_fabric *f;

    c.secret = "the secret";
    f = traffic_create(&c, HEAP);
    test_barrier(f, 2048, 1);
    yard_fabric_destroy(f);
}

static void strangers_do_no_harm(void **state)
{
    test_group g = { .n_ranks = 3 };
    uint32_t n_pestered = 0;

    test_group_name(&g);
    for (uint32_t r = 0; r < 2; r++)
        test_start_rank(&g, r, guarded_rank, NULL);
    for (uint32_t r = 0; r < 2; r++) {
        const uint64_t until_us = yard_now_us() + 100000000;
        uint16_t ports[4];
        uint32_t n;

        while ((n = listening_ports(g.pids[r], ports, 4)) == 0 && yard_now_us() < until_us)
            usleep(5000);
        for (uint32_t i = 0; i < n; i++)
            pester(ports[i]);
        n_pestered += n > 0;
    }
    assert_int_equal(n_pestered, 2);
    test_start_rank(&g, 2, guarded_rank, NULL);
    test_wait_all(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        TRAFFIC_SUITE,
        cmocka_unit_test(broken_frames_end_the_connection),
        cmocka_unit_test(strangers_do_no_harm),
    };

    alarm(2 * TEST_ALARM_S); /* of the ranks: they die with their parent */
    traffic_transport = "tcp";
    traffic_network = true;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
