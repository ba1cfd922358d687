/* Creation: the config is checked and copied, the start runs through its stages. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include "fabric/fabric_impl.h"

/* About 20 us of pauses: longer than a hop between two cores, shorter than the scheduler slice that
 * another process could use. With more ranks than cores the rank that is waited for may need this
 * very core: sleep soon. */
enum { SPINS = 1000, SPINS_CROWDED = 50 };

static const yard_fabric_ops *const transports[] = {
    &yard_fabric_shm,    &yard_fabric_tcp,     &yard_fabric_mixed,         &yard_fabric_libfabric,
    &yard_fabric_nvlink, &yard_fabric_nvshmem, &yard_fabric_nvlink_nvshmem
};

yard_status yard_fabric_config_read(yard_fabric_config *out, const yard_fabric_config *config,
                                    yard_error *err)
{
    const yard_fabric_config defaults = YARD_FABRIC_CONFIG_INIT;
    const size_t known = sizeof(*out);

    if (!config || config->size < sizeof(config->size) || config->size > YARD_MAX_CONFIG_BYTES)
        return yard_fail(err, YARD_EINVAL, "fabric: config: want YARD_FABRIC_CONFIG_INIT first");
    for (size_t i = known; i < config->size; i++)
        if (((const uint8_t *)config)[i])
            return yard_fail(err, YARD_EINVAL,
                             "fabric: config: want at most %zu bytes of fields, got %zu", known,
                             config->size);
    *out = defaults;
    memcpy(out, config, config->size < known ? config->size : known);
    out->size = known;
    return YARD_OK;
}

/* Copies a string of the config; *s then points to the copy, or stays NULL. */
static yard_status keep(const char **s, const char *what, char *text, size_t n_text,
                        yard_error *err)
{
    if (!*s)
        return YARD_OK;
    if (strlen(*s) >= n_text)
        return yard_fail(err, YARD_EINVAL, "fabric: %s: want at most %zu characters, got %zu", what,
                         n_text - 1, strlen(*s));
    memcpy(text, *s, strlen(*s) + 1);
    *s = text;
    return YARD_OK;
}

static yard_status keep_strings(yard_fabric *f, yard_error *err)
{
    yard_fabric_config *c = &f->config;
    yard_status st =
        keep(&c->rendezvous, "rendezvous", f->text.rendezvous, sizeof(f->text.rendezvous), err);

    if (st == YARD_OK && !c->secret)
        c->secret = c->rendezvous;
    if (st == YARD_OK)
        st = keep(&c->secret, "secret", f->text.secret, sizeof(f->text.secret), err);
    if (st == YARD_OK)
        st = keep(&c->transport, "transport", f->text.transport, sizeof(f->text.transport), err);
    if (st == YARD_OK)
        st = keep(&c->provider, "provider", f->text.provider, sizeof(f->text.provider), err);
    if (st == YARD_OK)
        st = keep(&c->bind_host, "bind_host", f->text.bind_host, sizeof(f->text.bind_host), err);
    if (!c->bind_host)
        snprintf(f->text.bind_host, sizeof(f->text.bind_host), "127.0.0.1");
    if (c->config_text) { /* for people: cut where it is too long */
        snprintf(f->text.config_text, sizeof(f->text.config_text), "%s", c->config_text);
        c->config_text = f->text.config_text;
    }
    return st;
}

static yard_status check_rendezvous(const yard_fabric_config *c, yard_error *err)
{
    enum { MAX_UNIX_NAME = 100 };
    char host[256];
    uint16_t port;

    if (!c->rendezvous)
        return yard_fail(err, YARD_EINVAL,
                         "fabric: rendezvous: want host:port or unix:NAME for %u "
                         "ranks, got none",
                         c->n_ranks);
    if (!strncmp(c->rendezvous, "unix:", 5)) {
        const size_t n = strlen(c->rendezvous + 5);

        if (n >= 1 && n <= MAX_UNIX_NAME)
            return YARD_OK;
        return yard_fail(err, YARD_EINVAL,
                         "fabric: rendezvous: want a unix name of 1 to %d "
                         "characters, got %zu",
                         MAX_UNIX_NAME, n);
    }
    if (yard_split_host_port(c->rendezvous, host, sizeof(host), &port))
        return YARD_OK;
    return yard_fail(err, YARD_EINVAL,
                     "fabric: rendezvous: want host:port, [IPv6]:port or unix:NAME, "
                     "got '%s'",
                     c->rendezvous);
}

static yard_status check_config(const yard_fabric_config *c, yard_error *err)
{
    const uint64_t max_timeout_us = UINT64_C(1000000) * 3600 * 24 * 365;

    if (c->n_ranks == 0 || c->n_ranks > YARD_MAX_RANKS)
        return yard_fail(err, YARD_EINVAL, "fabric: n_ranks: want 1 to %d, got %u", YARD_MAX_RANKS,
                         c->n_ranks);
    if (c->rank >= c->n_ranks)
        return yard_fail(err, YARD_EINVAL, "fabric: rank: want less than n_ranks %u, got %u",
                         c->n_ranks, c->rank);
    if (c->heap_bytes == 0)
        return yard_fail(err, YARD_EINVAL, "fabric: heap_bytes: want more than 0, got 0");
    if (c->start_timeout_us == 0 || c->start_timeout_us > max_timeout_us)
        return yard_fail(err, YARD_EINVAL, "fabric: start_timeout_us: want 1 to a year, got %llu",
                         (unsigned long long)c->start_timeout_us);
    if (c->timeout_us == 0 || c->timeout_us > max_timeout_us)
        return yard_fail(err, YARD_EINVAL, "fabric: timeout_us: want 1 to a year, got %llu",
                         (unsigned long long)c->timeout_us);
    if (c->bind_host &&
        (!c->bind_host[0] || !strcmp(c->bind_host, "0.0.0.0") || !strcmp(c->bind_host, "::")))
        return yard_fail(err, YARD_EINVAL,
                         "fabric: bind_host: want an address that the other nodes "
                         "reach this one at, got '%s'",
                         c->bind_host);
    return c->n_ranks > 1 ? check_rendezvous(c, err) : YARD_OK;
}

static const yard_fabric_ops *find_transport(const char *name)
{
    for (size_t i = 0; i < sizeof(transports) / sizeof(transports[0]); i++)
        if (!strcmp(transports[i]->name, name))
            return transports[i];
    return NULL;
}

static yard_status unknown_transport(const char *name, yard_error *err)
{
    char known[128] = "";
    size_t at = 0;

    for (size_t i = 0; i < sizeof(transports) / sizeof(transports[0]) && at < sizeof(known); i++)
        at += (size_t)snprintf(known + at, sizeof(known) - at, "%s%s", i ? ", " : "",
                               transports[i]->name);
    return yard_fail(err, YARD_ENOTSUP,
                     "fabric: transport: want one of this build's (%s), got '%s'", known, name);
}

static yard_status choose_transport(yard_fabric *f, yard_error *err)
{
    const bool device = f->config.transport && !strcmp(f->config.transport, "device");
    const char *told = device ? NULL : f->config.transport;
    const char *name = told                       ? told
                       : device                   ? f->n_nodes == 1 ? "nvlink" : "nvlink+nvshmem"
                       : f->n_nodes == 1          ? "shm"
                       : f->n_nodes == f->n_ranks ? "tcp"
                                                  : "shm+tcp";

    f->ops = find_transport(name);
    if (!f->ops)
        return unknown_transport(name, err);
    if ((f->ops == &yard_fabric_shm || f->ops == &yard_fabric_nvlink) && f->n_nodes > 1)
        return yard_fail(err, YARD_EINVAL,
                         "fabric: transport: %s wants all ranks on one node, got %u nodes",
                         f->ops->name, f->n_nodes);
    if (told)
        snprintf(f->reason, sizeof(f->reason), "the config asks for it");
    else if (f->n_ranks == 1)
        snprintf(f->reason, sizeof(f->reason), "there is one rank");
    else if (f->n_nodes == 1)
        snprintf(f->reason, sizeof(f->reason), "all %u ranks are on one node", f->n_ranks);
    else
        snprintf(f->reason, sizeof(f->reason), "the %u ranks are on %u nodes", f->n_ranks,
                 f->n_nodes);
    return YARD_OK;
}

static yard_fabric *allocate(uint32_t rank, uint32_t n_ranks, size_t heap_bytes, yard_error *err)
{
    yard_fabric *f = yard_alloc(sizeof(*f));

    if (f)
        f->peers = yard_alloc(n_ranks * sizeof(*f->peers));
    if (!f || !f->peers) {
        free(f);
        yard_fail(err, YARD_ENOMEM, "fabric: room for %u ranks", n_ranks);
        return NULL;
    }
    f->rank = rank;
    f->n_ranks = n_ranks;
    f->n_nodes = 1;
    f->heap_bytes = heap_bytes;
    f->listen_unix = f->listen_tcp = f->control_epoll = f->control_stop = -1;
    pthread_mutex_init(&f->control_lock, NULL);
    atomic_store(&f->first_lost, UINT32_MAX);
    for (uint32_t r = 0; r < n_ranks; r++) {
        f->peers[r].control_fd = -1;
        atomic_store(&f->peers[r].gave_up_on, UINT32_MAX);
        snprintf(f->peers[r].name, sizeof(f->peers[r].name), "rank %u", r);
    }
    return f;
}

/* A rank needs a few descriptors per peer, rank 0 one more. The usual soft limit of 1024 is too low
 * for large groups; what the system allows beyond it is there to be used. */
static void raise_fd_limit(uint32_t n_ranks)
{
    const int lowest_free = eventfd(0, EFD_CLOEXEC);
    struct rlimit limit;
    rlim_t wanted;

    if (lowest_free < 0)
        return;
    close(lowest_free);
    wanted = (rlim_t)lowest_free + 4 * (rlim_t)n_ranks + 256;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted)
        return;
    limit.rlim_cur = wanted < limit.rlim_max ? wanted : limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

static void close_start(yard_fabric *f)
{
    yard_rendezvous_close(f);
    if (f->listen_unix >= 0)
        close(f->listen_unix);
    if (f->listen_tcp >= 0)
        close(f->listen_tcp);
    f->listen_unix = f->listen_tcp = -1;
}

static uint32_t spins_for(const yard_fabric *f)
{
    const long n_cpus = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t n_here = 0;

    for (uint32_t r = 0; r < f->n_ranks; r++)
        n_here += f->peers[r].node == f->peers[f->rank].node;
    return n_here <= (n_cpus > 0 ? (uint32_t)n_cpus : 1) ? SPINS : SPINS_CROWDED;
}

static yard_status check_beside(const yard_fabric *f, yard_error *err)
{
    if (f->ops->device_heap)
        return yard_fail(err, YARD_EINVAL,
                         "fabric: device_heap_bytes: want 0 with %s, whose heap is a device's",
                         f->ops->name);
    if (f->n_nodes > 1)
        return yard_fail(err, YARD_ENOTSUP,
                         "fabric: device_heap_bytes: want all ranks on one node, got %u nodes",
                         f->n_nodes);
    return YARD_OK;
}

static yard_status make_heap_beside(yard_fabric *f, yard_error *err)
{
    const yard_status st = check_beside(f, err);

    if (st != YARD_OK)
        return st;
    f->beside = &yard_fabric_nvlink;
    return f->beside->open(f, err);
}

/* Every rank has looked at what is free before the first one takes of it. */
static yard_status make_heap(yard_fabric *f, yard_error *err)
{
    yard_status st;

    if (f->ops->copies)
        f->heap_bytes = f->copying_heap_bytes;
    st = yard_memory_check(f, err);
    if (st == YARD_OK)
        st = yard_rendezvous_exchange(f, NULL, 0, NULL, err);
    if (st == YARD_OK)
        st = f->ops->open(f, err);
    return st == YARD_OK && f->config.device_heap_bytes ? make_heap_beside(f, err) : st;
}

/* The stages. A rank that fails in one tells the others, so that all leave with one reason. */
static yard_status start(yard_fabric *f, yard_error *err)
{
    yard_status st = yard_rendezvous_open(f, err);

    if (st == YARD_OK)
        st = choose_transport(f, err);
    if (st == YARD_OK && f->n_ranks > 1)
        st = yard_control_connect(f, err);
    if (st == YARD_OK) {
        yard_stage_begin(f, "heap");
        st = make_heap(f, err);
    }
    if (st == YARD_OK)
        st = yard_control_start(f, err);
    if (st == YARD_OK) {
        yard_stage_begin(f, "ready");
        st = yard_rendezvous_exchange(f, NULL, 0, NULL, err);
    }
    return st;
}

yard_status yard_fabric_create_for(yard_fabric **out, const yard_fabric_config *config,
                                   size_t copying_heap_bytes, yard_error *err)
{
    yard_fabric_config c;
    yard_error why = { 0 };
    yard_fabric *f;
    yard_status st = yard_fabric_config_read(&c, config, err);

    if (st == YARD_OK)
        st = check_config(&c, err);
    if (st != YARD_OK)
        return st;
    f = allocate(c.rank, c.n_ranks, c.heap_bytes, err);
    if (!f)
        return YARD_ENOMEM;
    f->config = c;
    f->copying_heap_bytes = copying_heap_bytes ? copying_heap_bytes : c.heap_bytes;
    st = keep_strings(f, &why);
    if (st == YARD_OK) {
        raise_fd_limit(f->n_ranks);
        st = start(f, &why);
    }
    if (st != YARD_OK) {
        if (f->stage.given_up)
            yard_fail(&why, yard_stage_status(f), "fabric: %s: its caller gave up after %.1f s",
                      f->stage.name, yard_stage_seconds(f));
        else if (st == YARD_EPEER) /* a consequence of another rank's failure, mostly */
            yard_rendezvous_reason(f, &why);
        yard_rendezvous_abort(f, &why);
        st = yard_fail(err, why.status, "%s", why.message);
        yard_fabric_destroy(f);
        return st;
    }
    close_start(f);
    f->n_spins = f->ops->sleep_receives ? 0 : spins_for(f);
    *out = f;
    return YARD_OK;
}

yard_status yard_fabric_create(yard_fabric **out, const yard_fabric_config *config, yard_error *err)
{
    return yard_fabric_create_for(out, config, 0, err);
}

yard_status yard_fabric_create_custom(yard_fabric **out, const yard_fabric_ops *ops, uint32_t rank,
                                      uint32_t n_ranks, void *heap, size_t heap_bytes, void *impl,
                                      yard_error *err)
{
    const yard_fabric_config defaults = YARD_FABRIC_CONFIG_INIT;
    yard_fabric *f;

    if (n_ranks == 0 || n_ranks > YARD_MAX_RANKS || rank >= n_ranks)
        return yard_fail(err, YARD_EINVAL, "fabric: want rank < n_ranks <= %d, got %u of %u",
                         YARD_MAX_RANKS, rank, n_ranks);
    f = allocate(rank, n_ranks, heap_bytes, err);
    if (!f)
        return YARD_ENOMEM;
    f->config = defaults;
    f->ops = ops;
    f->impl = impl;
    f->heap = heap;
    snprintf(f->reason, sizeof(f->reason), "made by the caller");
    *out = f;
    return YARD_OK;
}

void yard_fabric_set_nodes(yard_fabric *f, uint32_t ranks_per_node)
{
    for (uint32_t r = 0; r < f->n_ranks; r++)
        f->peers[r].node = r / ranks_per_node;
    f->n_nodes = (f->n_ranks - 1) / ranks_per_node + 1;
}

void yard_fabric_destroy(yard_fabric *f)
{
    if (!f)
        return;
    close_start(f);
    yard_control_stop(f); /* before close: it wakes through the transport */
    if (f->beside)
        f->beside->close(f);
    if (f->ops && f->ops->close)
        f->ops->close(f);
    yard_control_close(f); /* after it: "left" says that everything sent is on its way */
    yard_device_lost_free(f);
    pthread_mutex_destroy(&f->control_lock);
    free(f->peers);
    free(f);
}
