/* The first stage of a start: every rank connects to rank 0 and says who it is; rank 0 compares and
 * answers with the table of all. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fabric/star.h"

enum {
    HELLO_VERSION = 5,
    SPARE_CONNECTIONS = 64, /* for strays beside the ranks */
    BACKOFF_MIN_MS = 1,
    BACKOFF_MAX_MS = 100,
    LINGER_US = 10000000, /* after a refusal, for ranks that come later, so that they learn of it */
    SLACK_US = 2000000
};

/* Sent as it lies in memory: frames and the handshake before it prove the byte order. */
typedef struct hello {
    uint32_t version;
    uint32_t rank, n_ranks, pid;
    uint64_t heap_bytes, device_heap_bytes, config_hash;
    uint32_t ranks_per_node;
    uint16_t tcp_port;
    bool force_network, loopback; /* the latter: nobody else reaches its TCP listener */
    char node_id[96], machine[64];
    char host[YARD_HOST_BYTES], unix_name[16], transport[16], provider[64];
    char config_text[YARD_CONFIG_TEXT_BYTES];
} hello;

typedef struct table_head {
    uint8_t job_id[YARD_JOB_ID_BYTES];
} table_head;

/* What rank 0 works with until the table is complete. */
typedef struct registry {
    yard_fabric *f;
    hello *hellos; /* [n_ranks] */
    uint32_t n_here;
} registry;

static void read_line(const char *path, char *text, size_t n_text)
{
    FILE *file = fopen(path, "re");

    text[0] = 0;
    if (file) {
        if (fgets(text, (int)n_text, file))
            text[strcspn(text, "\n")] = 0;
        fclose(file);
    }
}

/* Ranks with the same id share abstract unix names and, with them, memory: one boot of one machine
 * and one network namespace. */
static void describe_node(hello *h)
{
    struct stat net_namespace = { 0 };
    char boot[64];

    gethostname(h->machine, sizeof(h->machine) - 1);
    read_line("/proc/sys/kernel/random/boot_id", boot, sizeof(boot));
    if (stat("/proc/self/ns/net", &net_namespace) != 0)
        net_namespace.st_ino = 0;
    snprintf(h->node_id, sizeof(h->node_id), "%s/%llu", boot[0] ? boot : h->machine,
             (unsigned long long)net_namespace.st_ino);
}

static void fill_hello(const yard_fabric *f, hello *h)
{
    const yard_fabric_config *c = &f->config;

    memset(h, 0, sizeof(*h)); /* padding goes over the wire, too */
    h->version = HELLO_VERSION;
    h->rank = f->rank;
    h->n_ranks = f->n_ranks;
    h->pid = (uint32_t)getpid();
    h->heap_bytes = f->heap_bytes;
    h->device_heap_bytes = c->device_heap_bytes;
    h->config_hash = c->config_hash;
    h->force_network = c->force_network;
    h->loopback = f->listen_tcp >= 0 && yard_is_loopback(f->listen_tcp);
    h->ranks_per_node = c->ranks_per_node;
    h->tcp_port = f->peers[f->rank].port;
    snprintf(h->host, sizeof(h->host), "%s", f->text.bind_host);
    snprintf(h->unix_name, sizeof(h->unix_name), "%s", f->peers[f->rank].unix_name);
    snprintf(h->transport, sizeof(h->transport), "%s", f->text.transport);
    snprintf(h->provider, sizeof(h->provider), "%s", f->text.provider);
    snprintf(h->config_text, sizeof(h->config_text), "%s", f->text.config_text);
    describe_node(h);
}

static void end_strings(hello *h)
{
    h->node_id[sizeof(h->node_id) - 1] = 0;
    h->machine[sizeof(h->machine) - 1] = 0;
    h->host[sizeof(h->host) - 1] = 0;
    h->unix_name[sizeof(h->unix_name) - 1] = 0;
    h->transport[sizeof(h->transport) - 1] = 0;
    h->provider[sizeof(h->provider) - 1] = 0;
    h->config_text[sizeof(h->config_text) - 1] = 0;
}

static void fill_peer(yard_peer *p, const hello *h)
{
    p->pid = h->pid;
    p->port = h->tcp_port;
    snprintf(p->host, sizeof(p->host), "%s", h->host);
    snprintf(p->unix_name, sizeof(p->unix_name), "%s", h->unix_name);
    if (h->tcp_port)
        snprintf(p->name, sizeof(p->name), "rank %u (pid %u on %.60s at %.100s)", h->rank, h->pid,
                 h->machine, h->host);
    else
        snprintf(p->name, sizeof(p->name), "rank %u (pid %u on %.60s)", h->rank, h->pid,
                 h->machine);
}

/* The listeners of the later stages, whose addresses go into the hello. */
static yard_status listen_for_peers(yard_fabric *f, yard_error *err)
{
    yard_peer *self = &f->peers[f->rank];
    const bool one_node = !strncmp(f->text.rendezvous, "unix:", 5);
    const bool tcp_wanted = f->config.force_network || f->config.ranks_per_node != 0 ||
                            !strcmp(f->text.transport, "tcp");
    const char *why = "";

    f->listen_unix = yard_listen_unix(self->unix_name, sizeof(self->unix_name));
    if (f->listen_unix < 0)
        return yard_fail(err, YARD_EIO, "fabric: rendezvous: listen at a unix name: %s",
                         strerror(errno));
    if (one_node && !tcp_wanted)
        return YARD_OK;
    f->listen_tcp = yard_listen_tcp(f->text.bind_host, &self->port, &why);
    if (f->listen_tcp < 0)
        return yard_fail(err, YARD_EIO, "fabric: rendezvous: listen at bind_host %s: %s",
                         f->text.bind_host, why);
    return YARD_OK;
}

static yard_status check_config(const hello *mine, const hello *theirs, yard_error *why)
{
    const yard_rank_config a = { mine->rank, mine->config_hash, mine->config_text };
    const yard_rank_config b = { theirs->rank, theirs->config_hash, theirs->config_text };

    return a.hash == b.hash && !strcmp(a.text, b.text) ? YARD_OK
                                                       : yard_fabric_config_differs(&a, &b, why);
}

static yard_status check_transport(const hello *mine, const hello *theirs, yard_error *why)
{
    if (!strcmp(mine->transport, theirs->transport) && !strcmp(mine->provider, theirs->provider))
        return YARD_OK;
    return yard_fail(why, YARD_EINVAL,
                     "fabric: transport: rank %u has '%s' provider '%s', rank %u has '%s' provider "
                     "'%s' (empty: automatic); want the same on all ranks",
                     mine->rank, mine->transport, mine->provider, theirs->rank, theirs->transport,
                     theirs->provider);
}

static yard_status check_bytes(const char *what, uint64_t mine, uint64_t theirs, uint32_t rank,
                               yard_error *why)
{
    if (theirs == mine)
        return YARD_OK;
    return yard_fail(why, YARD_EINVAL,
                     "fabric: %s: %llu on rank 0, %llu on rank %u; want the same on all ranks",
                     what, (unsigned long long)mine, (unsigned long long)theirs, rank);
}

/* What rank 0 refuses in a hello; both values are named. */
static yard_status check_hello(const registry *reg, const hello *theirs, yard_error *why)
{
    const yard_fabric *f = reg->f;
    const hello *mine = &reg->hellos[0];
    yard_status st;

    if (theirs->n_ranks != mine->n_ranks)
        return yard_fail(why, YARD_EINVAL,
                         "fabric: n_ranks: %u on rank 0, %u on rank %u; want the same on all ranks",
                         mine->n_ranks, theirs->n_ranks, theirs->rank);
    if (theirs->rank == 0 || theirs->rank >= mine->n_ranks)
        return yard_fail(why, YARD_EINVAL,
                         "fabric: rank: want 1 to %u beside rank 0, got %u (pid %u on %s)",
                         mine->n_ranks - 1, theirs->rank, theirs->pid, theirs->machine);
    if (f->star->conns[theirs->rank].fd >= 0)
        return yard_fail(why, YARD_EINVAL, "fabric: rank %u twice: pid %u on %s and pid %u on %s",
                         theirs->rank, reg->hellos[theirs->rank].pid,
                         reg->hellos[theirs->rank].machine, theirs->pid, theirs->machine);
    /* before the heap: its size often follows from the caller's config, which says more */
    st = check_config(mine, theirs, why);
    if (st != YARD_OK)
        return st;
    st = check_bytes("heap_bytes", mine->heap_bytes, theirs->heap_bytes, theirs->rank, why);
    if (st == YARD_OK)
        st = check_bytes("device_heap_bytes", mine->device_heap_bytes, theirs->device_heap_bytes,
                         theirs->rank, why);
    if (st != YARD_OK)
        return st;
    if (theirs->ranks_per_node != mine->ranks_per_node)
        return yard_fail(why, YARD_EINVAL,
                         "fabric: ranks_per_node: %u on rank 0, %u on rank %u; want the same on "
                         "all ranks",
                         mine->ranks_per_node, theirs->ranks_per_node, theirs->rank);
    return check_transport(mine, theirs, why);
}

/* A connection that knows the secret: the rank is entered, or the whole start refused. */
static yard_status register_rank(void *ctx, yard_conn *conn, yard_error *err)
{
    registry *reg = ctx;
    yard_fabric *f = reg->f;
    yard_error why = f->star->failed; /* refused before: the latecomer hears the same */
    hello theirs = { 0 };

    if (conn->header[0] != YARD_FRAME_HELLO)
        return YARD_OK;
    if (conn->header[1] == sizeof(theirs)) {
        memcpy(&theirs, conn->data, sizeof(theirs));
        end_strings(&theirs);
    }
    if (theirs.version != HELLO_VERSION && why.status == YARD_OK)
        yard_fail(&why, YARD_EINVAL, "fabric: a rank runs another version of this library");
    if (why.status == YARD_OK)
        check_hello(reg, &theirs, &why);
    if (why.status != YARD_OK) {
        yard_star_broadcast_fail(f, &why);
        yard_frame_send_fail(conn->fd, &why, yard_now_us() + SLACK_US);
        reg->n_here++;
        return YARD_OK;
    }
    reg->hellos[theirs.rank] = theirs;
    fill_peer(&f->peers[theirs.rank], &theirs);
    reg->n_here++;
    return yard_star_add(f, theirs.rank, conn, err);
}

/* An address that only its own machine can reach is of no use to ranks elsewhere. */
static yard_status check_reachable(const registry *reg, yard_error *err)
{
    const hello *h = reg->hellos;
    const uint32_t n = reg->f->n_ranks;

    for (uint32_t r = 1; r < n; r++) {
        if (!strcmp(h[r].node_id, h[0].node_id))
            continue;
        for (uint32_t at = 0; at < n; at++)
            if (h[at].loopback)
                return yard_fail(
                    err, YARD_EINVAL,
                    "fabric: bind_host: rank %u is on %s and rank 0 on %s, but rank %u "
                    "listens at %s, which only its own machine reaches; set bind_host "
                    "(YARD_BIND_HOST)",
                    r, h[r].machine, h[0].machine, at, h[at].host);
    }
    return YARD_OK;
}

static int listen_as_root(const yard_fabric *f, yard_error *err)
{
    const char *at = f->text.rendezvous, *why = "";
    char host[256], name[256];
    uint16_t port = 0;
    int fd;

    if (!strncmp(at, "unix:", 5)) {
        snprintf(name, sizeof(name), "%s", at + 5);
        fd = yard_listen_unix(name, sizeof(name));
        why = strerror(errno);
    } else {
        yard_split_host_port(at, host, sizeof(host), &port);
        /* A told address wins: a host name may mean another interface on its own machine. */
        fd = yard_listen_tcp(f->config.bind_host ? f->text.bind_host : host, &port, &why);
    }
    if (fd < 0)
        yard_fail(err, YARD_EIO, "fabric: rendezvous: rank 0 cannot listen at %s: %s%s", at, why,
                  errno == EADDRINUSE ? "; is there another rank 0?" : "");
    return fd;
}

static void missing_text(const registry *reg, const yard_acceptor *acceptor, char *text,
                         size_t n_text)
{
    const yard_fabric *f = reg->f;
    bool missing[YARD_MAX_RANKS];
    const uint32_t n_refused = yard_acceptor_refused_count(acceptor);
    size_t n;

    for (uint32_t r = 0; r < f->n_ranks; r++)
        missing[r] = r != 0 && f->star->conns[r].fd < 0;
    yard_ranks_text(text, n_text, missing, f->n_ranks);
    n = strlen(text);
    if (n_refused)
        snprintf(text + n, n_text - n, " (%u connection%s refused: different job secret)",
                 n_refused, n_refused == 1 ? "" : "s");
}

/* Accepts until all ranks are here. After a refusal it goes on for a moment, so that the ranks
 * still on their way hear of it instead of knocking until their deadline. */
static yard_status gather_ranks(registry *reg, yard_acceptor *acceptor, yard_error *err)
{
    yard_fabric *f = reg->f;
    yard_deadline linger = 0;
    yard_status st = YARD_OK;
    char whom[320];

    while (reg->n_here < f->n_ranks && st == YARD_OK) {
        const bool failed = f->star->failed.status != YARD_OK;
        int wait_ms;

        if (failed && !linger)
            linger = yard_now_us() + LINGER_US;
        if (failed && yard_now_us() > linger)
            break;
        missing_text(reg, acceptor, whom, sizeof(whom));
        wait_ms = yard_stage_wait_ms(f, whom);
        if (wait_ms == 0) {
            yard_error late = { 0 };

            yard_fail(&late, yard_stage_status(f),
                      "fabric: rendezvous: %s missing at %s after %.1f s", whom, f->text.rendezvous,
                      yard_stage_seconds(f));
            yard_star_broadcast_fail(f, &late);
            break;
        }
        st =
            yard_acceptor_step(acceptor, failed ? -1 : f->star->epoll, failed ? 100 : wait_ms, err);
        if (st == YARD_OK)
            yard_star_pump(f, NULL); /* a rank that went away again */
    }
    if (st == YARD_OK && f->star->failed.status != YARD_OK)
        st = yard_fail(err, f->star->failed.status, "%s", f->star->failed.message);
    return st;
}

static yard_status send_table(registry *reg, yard_error *err)
{
    yard_fabric *f = reg->f;
    const size_t n_hellos = (size_t)f->n_ranks * sizeof(hello);
    uint8_t *table = malloc(sizeof(table_head) + n_hellos), nonce[YARD_NONCE_BYTES];
    yard_status st;

    if (!table)
        return yard_fail(err, YARD_ENOMEM, "fabric: table of %u ranks", f->n_ranks);
    yard_auth_nonce(nonce);
    memcpy(f->job_id, nonce, sizeof(f->job_id));
    memcpy(table, f->job_id, sizeof(f->job_id));
    memcpy(table + sizeof(table_head), reg->hellos, n_hellos);
    st = yard_star_broadcast(f, YARD_FRAME_TABLE, table, sizeof(table_head) + n_hellos, err);
    free(table);
    return st;
}

static yard_status run_root(registry *reg, yard_error *err)
{
    yard_fabric *f = reg->f;
    yard_acceptor *acceptor = NULL;
    const int listener = listen_as_root(f, err);
    yard_status st = listener < 0 ? YARD_EIO : YARD_OK;

    if (st == YARD_OK)
        st = yard_acceptor_create(&acceptor, f->text.secret, f->n_ranks + SPARE_CONNECTIONS,
                                  register_rank, reg, err);
    if (st == YARD_OK) {
        yard_acceptor_add_listener(acceptor, listener);
        reg->n_here = 1;
        st = gather_ranks(reg, acceptor, err);
    }
    if (st == YARD_OK)
        st = check_reachable(reg, err);
    yard_acceptor_destroy(acceptor);
    if (listener >= 0)
        close(listener);
    return st == YARD_OK ? send_table(reg, err) : st;
}

static int connect_once(const yard_fabric *f, const char **why)
{
    const char *at = f->text.rendezvous;
    char host[256];
    uint16_t port = 0;

    if (!strncmp(at, "unix:", 5))
        return yard_connect_unix(at + 5, why);
    yard_split_host_port(at, host, sizeof(host), &port);
    return yard_connect_tcp(host, port, f->stage.until, why);
}

/* Knocks until rank 0 listens. Any error may pass: rank 0 not started, its name not in the DNS yet,
 * the previous group's listener just closing. */
static yard_status knock(yard_fabric *f, yard_conn *conn, yard_error *err)
{
    char whom[320];
    const char *why = "";
    int backoff_ms = BACKOFF_MIN_MS;

    snprintf(whom, sizeof(whom), "rank 0 at %s", f->text.rendezvous);
    for (;;) {
        const int wait_ms = yard_stage_wait_ms(f, whom);
        yard_status st;

        if (wait_ms == 0)
            return yard_fail(err, YARD_ETIMEDOUT, "fabric: rendezvous: no %s after %.1f s: %s",
                             whom, yard_stage_seconds(f), why);
        conn->fd = connect_once(f, &why);
        if (conn->fd >= 0) {
            st = yard_auth_connect(conn, f->text.secret, whom, f->stage.until, err);
            if (st != YARD_EAGAIN)
                return st;
            why = "connection closed";
            yard_conn_close(conn);
        }
        poll(NULL, 0, backoff_ms < wait_ms ? backoff_ms : wait_ms);
        backoff_ms = backoff_ms * 2 < BACKOFF_MAX_MS ? backoff_ms * 2 : BACKOFF_MAX_MS;
    }
}

static yard_status read_table(registry *reg, yard_error *err)
{
    yard_fabric *f = reg->f;
    const yard_conn *conn = &f->star->conns[0];
    const size_t n_hellos = (size_t)f->n_ranks * sizeof(hello);

    if (conn->header[0] != YARD_FRAME_TABLE || conn->header[1] != sizeof(table_head) + n_hellos)
        return yard_fail(err, YARD_EFORMAT, "fabric: rendezvous: damaged table from rank 0 at %s",
                         f->text.rendezvous);
    memcpy(f->job_id, conn->data, sizeof(f->job_id));
    memcpy(reg->hellos, conn->data + sizeof(table_head), n_hellos);
    for (uint32_t r = 0; r < f->n_ranks; r++) {
        end_strings(&reg->hellos[r]);
        if (reg->hellos[r].rank != r)
            return yard_fail(err, YARD_EFORMAT,
                             "fabric: rendezvous: rank %u in row %u of the table",
                             reg->hellos[r].rank, r);
    }
    return YARD_OK;
}

static yard_status run_other(registry *reg, yard_error *err)
{
    yard_fabric *f = reg->f;
    yard_conn conn = { .fd = -1 };
    yard_status st = knock(f, &conn, err);

    if (st == YARD_OK) {
        yard_stage_begin(f, "rendezvous"); /* connected: from here rank 0's deadline counts */
        if (!yard_frame_send(conn.fd, YARD_FRAME_HELLO, &reg->hellos[f->rank], sizeof(hello),
                             f->stage.until))
            st = yard_fail(err, YARD_EPEER, "fabric: rendezvous: rank 0 at %s went away: %s",
                           f->text.rendezvous, strerror(errno));
    }
    if (st == YARD_OK)
        st = yard_star_add(f, 0, &conn, err);
    if (st == YARD_OK)
        st = yard_star_gather(f, SLACK_US, "rank 0's table of all ranks", err);
    yard_conn_close(&conn);
    return st == YARD_OK ? read_table(reg, err) : st;
}

static bool same_node(const hello *a, const hello *b)
{
    const uint32_t n = a->ranks_per_node;

    return !a->force_network && !b->force_network && !strcmp(a->node_id, b->node_id) &&
           (n == 0 || a->rank / n == b->rank / n);
}

static void take_table(registry *reg)
{
    yard_fabric *f = reg->f;

    f->n_nodes = 0;
    for (uint32_t r = 0; r < f->n_ranks; r++) {
        uint32_t first = 0;

        fill_peer(&f->peers[r], &reg->hellos[r]);
        while (first < r && !same_node(&reg->hellos[first], &reg->hellos[r]))
            first++;
        f->peers[r].node = first < r ? f->peers[first].node : f->n_nodes++;
    }
}

yard_status yard_rendezvous_open(yard_fabric *f, yard_error *err)
{
    registry reg = { .f = f, .hellos = calloc(f->n_ranks, sizeof(hello)) };
    yard_status st = YARD_OK;

    if (!reg.hellos)
        return yard_fail(err, YARD_ENOMEM, "fabric: table of %u ranks", f->n_ranks);
    yard_stage_begin(f, "rendezvous");
    for (uint32_t r = 0; r < f->n_ranks; r++)
        snprintf(f->peers[r].name, sizeof(f->peers[r].name), "rank %u", r);
    if (f->n_ranks > 1) {
        st = listen_for_peers(f, err);
        if (st == YARD_OK)
            st = yard_star_create(f, err);
    }
    fill_hello(f, &reg.hellos[f->rank]);
    if (st == YARD_OK && f->n_ranks > 1)
        st = f->rank == 0 ? run_root(&reg, err) : run_other(&reg, err);
    if (st == YARD_OK && f->n_ranks > 1)
        st = yard_star_rearm(f, err);
    if (st == YARD_OK)
        take_table(&reg);
    free(reg.hellos);
    return st;
}
