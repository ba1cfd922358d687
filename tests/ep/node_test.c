/* One copy per node: random cases against the plain definition with nodes of several sizes, what
 * crosses between nodes counted, and two network namespaces of two ranks each (as root; skipped
 * elsewhere). ctest: sanitize */
#include "fabric/fabric_test.h"

#include <fcntl.h>
#include <sched.h>

#include "ep/ep_case.h"

/* When memory under way between ranks is free again, other processes say. ThreadSanitizer does not
 * see them, so between a thread that sends or receives and the caller it has to be told. */
YARD_API const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void)
{
    return "race:sendmsg\nrace:recvmsg\nrace:take_data\n";
}

struct suite {
    uint64_t first_seed;
    uint32_t n_seeds, per_node;
    void (*change)(ep_case *c);
};

struct crossing {
    uint64_t n_entries; /* of headers to other ranks */
    uint64_t n_near;    /* rows to ranks of the own node */
    uint64_t n_between; /* rows to other nodes: one per node, or without node_copies per rank */
};

static uint64_t node_mask(const yard_fabric *f, uint32_t node)
{
    uint64_t mask = 0;

    for (uint32_t r = 0; r < yard_fabric_size(f); r++)
        mask |= (uint64_t)(yard_fabric_node(f, r) == node) << r;
    return mask;
}

static void count_token(const case_rank *r, const yard_fabric *f, uint64_t ranks,
                        struct crossing *n)
{
    const uint32_t own = yard_fabric_node(f, r->rank);

    ranks &= ~(1ull << r->rank);
    n->n_entries += (uint64_t)__builtin_popcountll(ranks);
    n->n_near += (uint64_t)__builtin_popcountll(ranks & node_mask(f, own));
    for (uint32_t node = 0; node < r->c->n_ranks; node++)
        if (node != own && (ranks & node_mask(f, node)))
            n->n_between += r->c->config.node_copies
                                ? 1
                                : (uint64_t)__builtin_popcountll(ranks & node_mask(f, node));
}

static struct crossing count_crossing(const case_rank *r, const yard_fabric *f)
{
    const yard_ep_config *g = &r->c->config;
    struct crossing n = { 0 };

    for (uint32_t step = 0; step < r->c->n_steps; step++)
        for (uint32_t t = r->rank % g->tp; t < case_tokens(r->c, step, r->group); t += g->tp) {
            int32_t expert[32];
            float weight[32];
            uint64_t ranks = 0;

            case_routing(r->c, step, r->group, t, expert, weight);
            for (uint32_t k = 0; k < g->top_k; k++)
                if (expert[k] >= 0)
                    ranks |= 1ull << (uint32_t)expert[k] / r->n_local;
            count_token(r, f, ranks, &n);
        }
    return n;
}

static uint64_t row_bytes(const yard_ep_config *g)
{
    const uint64_t payload = g->hidden * case_bytes(g->dispatch);

    if (g->dispatch != YARD_EP_FP8)
        return yard_align_up(payload, 64);
    return yard_align_up(yard_align_up(payload, 4) + yard_group_count(g->hidden) * 4, 64);
}

/* Rows and bytes as the definition says, and the fabric has put just these since the group began.
 */
static void check_counts(const case_rank *r, const yard_fabric *f, uint64_t put_before)
{
    const yard_ep_config *g = &r->c->config;
    const struct crossing n = count_crossing(r, f);
    const bool shares = yard_fabric_shares_node(f);
    const uint64_t n_rows = n.n_between + (shares ? 0 : n.n_near);
    const uint64_t n_headers = (uint64_t)r->c->n_steps * (r->c->n_ranks - 1);
    yard_fabric_stats wire;
    yard_ep_stats stats;

    yard_ep_get_stats(r->ep, &stats);
    yard_fabric_get_stats(f, &wire);
    CHECK(stats.n_dispatch_rows_sent == n_rows);
    CHECK(stats.n_rows_in_place == (shares ? n.n_near : 0));
    CHECK(stats.n_wire_bytes == n_rows * row_bytes(g) + n_headers * 64 +
                                    n.n_entries * (4 + 8 * g->top_k) +
                                    stats.n_combine_rows_sent * g->hidden * case_bytes(g->combine) +
                                    stats.n_results_in_place * 4 +
                                    stats.n_output_rows_sent * g->hidden * case_bytes(g->output));
    CHECK(wire.n_put_bytes - put_before == stats.n_wire_bytes);
}

/* Runs a case over a fabric of the test's own; n: what had to cross, may be NULL. */
static void run_case(const yard_fabric_config *base, ep_case *c, const char *want_transport,
                     struct crossing *n)
{
    yard_fabric_config config = *base;
    yard_ep_capacity capacity;
    yard_fabric_stats begun;
    yard_error err = { 0 };
    yard_fabric *f;
    yard_ep *ep = NULL;
    case_rank r;

    CHECK(yard_ep_capacity_of(&c->config, c->n_ranks, &capacity, &err) == YARD_OK);
    config.heap_bytes = capacity.heap_bytes;
    f = test_create(&config);
    CHECK(!strcmp(yard_fabric_transport(f, NULL), want_transport));
    c->config.fabric = f;
    c->config.timeout_us = base->timeout_us;
    if (yard_ep_create(&ep, &c->config, &err) != YARD_OK) {
        fprintf(stderr, "rank %u: %s: %s\n", base->rank, err.message, case_describe(c));
        _exit(1);
    }
    yard_fabric_get_stats(f, &begun);
    case_open(&r, c, ep);
    if (!case_run(&r)) {
        fprintf(stderr, "%s: %s\n", r.failure, case_describe(c));
        _exit(1);
    }
    check_counts(&r, f, begun.n_put_bytes);
    if (n)
        *n = count_crossing(&r, f);
    case_close(&r);
    yard_ep_destroy(ep);
    yard_fabric_destroy(f);
}

static void run_suite(const yard_fabric_config *base, void *ctx)
{
    const struct suite *suite = ctx;
    const uint32_t n = base->n_ranks, per_node = suite->per_node;

    for (uint32_t i = 0; i < suite->n_seeds; i++) {
        ep_case c = case_from_seed(suite->first_seed + i, n, 300);
        yard_fabric_config config = *base;
        char meet[128];

        c.config.node_copies = true;
        c.config.layout = (yard_ep_layout)(i % 2); /* rows in place go without */
        if (suite->change)
            suite->change(&c);
        snprintf(meet, sizeof(meet), "%s-%u", base->rendezvous, i);
        config.rendezvous = meet;
        config.ranks_per_node = per_node;
        run_case(&config, &c, n <= per_node ? "shm" : per_node == 1 ? "tcp" : "shm+tcp", NULL);
    }
}

static void random_cases(void **state)
{
    static const uint32_t n_ranks[] = { 2, 3, 4, 6, 8 }, per_node[] = { 1, 2, 3, 4 };

    (void)state;
    for (size_t i = 0; i < sizeof(n_ranks) / sizeof(n_ranks[0]); i++)
        for (size_t j = 0; j < sizeof(per_node) / sizeof(per_node[0]); j++) {
            struct suite suite = { .first_seed = 20000 + 1000 * i + 100 * j,
                                   .n_seeds = 6,
                                   .per_node = per_node[j] };
            test_run(n_ranks[i], run_suite, &suite);
        }
}

static void widest_rows(ep_case *c)
{
    c->config.hidden = 7168;
    c->config.top_k = 8;
    c->config.n_experts = 32;
    c->config.max_tokens = 20;
    c->n_steps = 3;
}

static void model_sized_rows(void **state)
{
    struct suite suite = {
        .first_seed = 29000, .n_seeds = 3, .per_node = 2, .change = widest_rows
    };

    (void)state;
    test_run(4, run_suite, &suite);
}

static void refusing_rank(const yard_fabric_config *base, void *ctx)
{
    ep_case c = case_from_seed(1, base->n_ranks, 60);
    yard_fabric_config config = *base;
    yard_error err = { 0 };
    yard_ep *ep = NULL;

    (void)ctx;
    config.transport = "tcp";
    config.ranks_per_node = 2;
    c.config.node_copies = true;
    c.config.layout = YARD_EP_FLAT;
    c.config.fabric_config = &config;
    CHECK(yard_ep_create(&ep, &c.config, &err) == YARD_ENOTSUP);
    CHECK_TEXT(err.message, "node_copies");
    CHECK_TEXT(err.message, "tcp");
}

static void mixed_configs_rank(const yard_fabric_config *base, void *ctx)
{
    ep_case c = case_from_seed(1, base->n_ranks, 60);
    yard_fabric_config config = *base;
    yard_error err = { 0 };
    yard_ep *ep = NULL;

    (void)ctx;
    c.config.node_copies = base->rank == 1;
    c.config.layout = YARD_EP_FLAT;
    c.config.fabric_config = &config;
    CHECK(yard_ep_create(&ep, &c.config, &err) == YARD_EINVAL);
    CHECK_TEXT(err.message, "node_copies 0");
    CHECK_TEXT(err.message, "node_copies 1");
}

static void what_cannot_be_is_refused(void **state)
{
    (void)state;
    test_run(4, refusing_rank, NULL);
    test_run(2, mixed_configs_rank, NULL);
}

enum { PORT = 7118 };

/* Ranks 0 and 1 live in one namespace, 2 and 3 in another; a virtual cable joins them. Namespaces
 * have no names: they go when the processes end, however they end. */
typedef struct cable {
    test_group g;
    test_pipe inside[2], plugged, ready[2];
    test_pipe done, leave; /* the cable goes with either namespace */
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

static void enter_namespace(const cable *c, uint32_t rank)
{
    const uint32_t node = rank / 2;
    char path[64];
    int fd;

    if (rank % 2 == 0) { /* its first rank makes it */
        CHECK(unshare(CLONE_NEWNET) == 0);
        test_tell(&c->inside[node]);
        test_tell(&c->inside[node]);
        test_hear(&c->plugged);
        CHECK(run_command("ip link set lo up && ip addr add 10.118.0.%u/24 dev yard0 && "
                          "ip link set yard0 up",
                          node + 1));
        test_tell(&c->ready[node]);
        return;
    }
    test_hear(&c->inside[node]);
    snprintf(path, sizeof(path), "/proc/%d/ns/net", c->g.pids[rank - 1]);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && setns(fd, CLONE_NEWNET) == 0);
    close(fd);
    test_hear(&c->ready[node]);
}

static uint64_t sent_over_cable(void)
{
    FILE *file = fopen("/proc/thread-self/net/dev", "re");
    unsigned long long n = 0;
    char line[512];

    CHECK(file);
    while (fgets(line, sizeof(line), file)) {
        const char *at = strstr(line, "yard0:");

        if (at)
            CHECK(sscanf(at + 6, "%*u %*u %*u %*u %*u %*u %*u %*u %llu", &n) == 1);
    }
    fclose(file);
    return n;
}

/* Every token goes to every rank: each of two ranks of a node sends 8 rows of 16 KB a step to the
 * other node, and gives back 16 of 8 KB. */
static ep_case dense_case(void)
{
    ep_case c = case_from_seed(4, 4, 60);

    c.config.tp = 1;
    c.config.n_experts = c.config.top_k = 4;
    c.config.hidden = 4096;
    c.config.max_tokens = 8;
    c.config.n_rounds = 1;
    c.config.dispatch = c.config.input = YARD_EP_F32;
    c.config.combine = YARD_EP_BF16;
    c.config.mode = YARD_EP_PARTIAL;
    c.crowd = 2;
    c.taste = 0;
    c.n_steps = 20;
    return c;
}

static void networked_rank(const yard_fabric_config *base, void *ctx)
{
    const cable *c = ctx;
    yard_fabric_config config = *base;
    struct crossing n;
    char meet[64], host[32];

    enter_namespace(c, base->rank);
    snprintf(host, sizeof(host), "10.118.0.%u", base->rank / 2 + 1);
    config.bind_host = host;
    config.rendezvous = meet;
    for (int copies = 1; copies >= 0; copies--) {
        ep_case dense = dense_case();
        const uint64_t before = sent_over_cable();
        uint64_t want, got;

        snprintf(meet, sizeof(meet), "10.118.0.1:%d", PORT + copies);
        dense.config.node_copies = copies;
        run_case(&config, &dense, "shm+tcp", &n);
        want = 2 * 20 * ((copies ? 8 : 16) * 16384 + 16 * 8192);
        got = sent_over_cable() - before;
        if (base->rank % 2 == 0 && (got < want - want / 10 || got > want + want / 10)) {
            fprintf(stderr, "node copies %d: want %llu bytes over the cable, got %llu\n", copies,
                    (unsigned long long)want, (unsigned long long)got);
            _exit(1);
        }
        CHECK(n.n_between == 20 * (copies ? 8u : 16u));
    }
    test_tell(&c->done);
    test_hear(&c->leave);
}

static void one_copy_crosses_the_cable(void **state)
{
    cable c = { .g = { .n_ranks = 4 } };

    (void)state;
    for (uint32_t node = 0; node < 2; node++) {
        test_pipe_open(&c.inside[node]);
        test_pipe_open(&c.ready[node]);
    }
    test_pipe_open(&c.plugged);
    test_pipe_open(&c.done);
    test_pipe_open(&c.leave);
    test_group_name(&c.g);
    fflush(NULL);
    for (uint32_t r = 0; r < 4; r++)
        test_start_rank(&c.g, r, networked_rank, &c);
    test_hear(&c.inside[0]);
    test_hear(&c.inside[1]);
    assert_true(run_command("ip link add name yard0 netns %d type veth peer name yard0 netns %d",
                            c.g.pids[0], c.g.pids[2]));
    test_tell(&c.plugged);
    test_tell(&c.plugged);
    for (uint32_t r = 0; r < 4; r++)
        test_hear(&c.done);
    for (uint32_t r = 0; r < 4; r++)
        test_tell(&c.leave);
    test_wait_all(&c.g);
    for (uint32_t node = 0; node < 2; node++) {
        test_pipe_close(&c.inside[node]);
        test_pipe_close(&c.ready[node]);
    }
    test_pipe_close(&c.plugged);
    test_pipe_close(&c.done);
    test_pipe_close(&c.leave);
}

static bool has_namespaces(void)
{
    const pid_t pid = geteuid() == 0 ? fork() : -1;
    int status = 1;

    if (pid == 0)
        _exit(unshare(CLONE_NEWNET) == 0 &&
                      run_command("ip link add yard0 type veth peer name yard1 2>/dev/null")
                  ? 0
                  : 1);
    return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

static void two_namespaces(void **state)
{
    if (has_namespaces())
        one_copy_crosses_the_cable(state);
    else
        skip();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_cannot_be_is_refused),
        cmocka_unit_test(random_cases),
        cmocka_unit_test(model_sized_rows),
        cmocka_unit_test(two_namespaces),
    };

    alarm(2 * TEST_ALARM_S); /* of the ranks: they die with their parent */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
