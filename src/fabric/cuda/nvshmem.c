/* Heaps of GPUs that NVSHMEM owns: peers whose memory is mapped here are stored to, the others are
 * put to by kernels ("nvlink+nvshmem"); "nvshmem" puts to all, for tests and comparisons.
 *
 * NVSHMEM is in a shared object of its own, libyard-ep-nvshmem, looked for beside the program or
 * library that this file is in and on the loader's path. Its unique id travels over the connections
 * of the start. Its calls have no deadline and may wait for ranks that have gone, so each runs on a
 * thread of its own, which is left behind when it does not answer.
 *
 * NVSHMEM knows one set of ranks a process and cannot start twice, so its state is the process's:
 * the first group starts it, later groups must have the same ranks. It is never ended, for its end
 * waits for all ranks, those that were lost among them. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <cuda_runtime_api.h>

#include "fabric/fabric_impl.h"

#define LIBRARY "libyard-ep-nvshmem.so"

typedef struct nvshmem {
    int device;
    void *heap;
} nvshmem;

static struct {
    pthread_mutex_t lock; /* over all of it; one group of a process starts at a time */
    const yard_nvshmem *lib;
    uint8_t id[YARD_NVSHMEM_ID_BYTES];
    uint32_t rank, n_ranks;
    bool started;
    bool broken; /* a call never came back, or a rank was lost */
} world = { .lock = PTHREAD_MUTEX_INITIALIZER };

typedef enum what { START, ALLOCATE, RELEASE } what;
static const char *const what_text[] = { "start", "memory", "free" };

/* Shared with the thread; the last of both frees it. */
typedef struct call {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    what what;
    int device, rc;
    uint32_t rank, n_ranks;
    size_t n_bytes;
    void *heap;
    bool done, abandoned;
} call;

static void *run_call(void *arg)
{
    call *c = arg;
    bool abandoned;

    cudaSetDevice(c->device);
    if (c->what == START)
        c->rc = world.lib->start(world.id, c->rank, c->n_ranks);
    else if (c->what == ALLOCATE)
        c->heap = world.lib->allocate(c->n_bytes);
    else
        world.lib->release(c->heap);
    pthread_mutex_lock(&c->lock);
    c->done = true;
    abandoned = c->abandoned;
    pthread_cond_signal(&c->ended);
    pthread_mutex_unlock(&c->lock);
    if (abandoned)
        free(c);
    return NULL;
}

static bool wait_for(call *c, uint64_t timeout_us)
{
    struct timespec until;
    bool done;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(timeout_us / 1000000);
    until.tv_nsec += (long)(timeout_us % 1000000 * 1000);
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&c->lock);
    while (!c->done && pthread_cond_timedwait(&c->ended, &c->lock, &until) != ETIMEDOUT)
        ;
    done = c->done;
    c->abandoned = !done;
    pthread_mutex_unlock(&c->lock);
    return done;
}

/* result: what came of it, valid when this returns YARD_OK. */
static yard_status run_bounded(const call *wanted, uint64_t timeout_us, call *result,
                               yard_error *err)
{
    call *c = malloc(sizeof(*c));
    pthread_t thread;

    if (!c)
        return yard_fail(err, YARD_ENOMEM, "fabric: nvshmem: %zu bytes", sizeof(*c));
    *c = *wanted;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->ended, NULL);
    if (pthread_create(&thread, NULL, run_call, c) != 0) {
        free(c);
        return yard_fail(err, YARD_ENOMEM, "fabric: nvshmem: no thread");
    }
    pthread_detach(thread);
    if (!wait_for(c, timeout_us)) {
        world.broken = true;
        return yard_fail(err, YARD_ETIMEDOUT,
                         "fabric: nvshmem: rank %u: %s: no answer from NVSHMEM within %.1f s",
                         wanted->rank, what_text[wanted->what], (double)timeout_us / 1e6);
    }
    *result = *c;
    free(c);
    return YARD_OK;
}

/* Beside the file that this code is in: where a build leaves it, and where it is installed. */
static void *open_beside(void)
{
    char path[4096];
    const char *slash;
    Dl_info here;

    if (!dladdr((void *)&world, &here) || !here.dli_fname)
        return NULL;
    slash = strrchr(here.dli_fname, '/');
    snprintf(path, sizeof(path), "%.*s/%s", slash ? (int)(slash - here.dli_fname) : 1,
             slash ? here.dli_fname : ".", LIBRARY);
    return dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

static yard_status load_library(yard_error *err)
{
    void *so;

    if (world.lib)
        return YARD_OK;
    so = open_beside();
    if (!so) {
        char first[400];
        const char *why = dlerror();

        snprintf(first, sizeof(first), "%s", why ? why : "");
        so = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
        if (!so) /* of a file that is there, the reason is what it lacks */
            return yard_fail(err, YARD_ENOTSUP, "fabric: nvshmem: %s", first);
    }
    world.lib = dlsym(so, "yard_nvshmem_library");
    if (!world.lib || world.lib->size != sizeof(*world.lib) ||
        world.lib->id_bytes > YARD_NVSHMEM_ID_BYTES) {
        world.lib = NULL;
        return yard_fail(err, YARD_ENOTSUP, "fabric: nvshmem: %s is of another build", LIBRARY);
    }
    return YARD_OK;
}

/* NVSHMEM is told by its own variables only. Those that the user has set count, unless the config
 * says otherwise. Multicast and NCCL are for collectives, which only the bench uses, and wants to
 * be NVSHMEM's own; where it finds NCCL, NVSHMEM would make communicators of it as it starts. */
static yard_status choose_network(const yard_fabric *f, yard_error *err)
{
    static const struct {
        const char *name, *transport, *ibgda, *libfabric;
    } networks[] = {
        { "none", "none", "0", NULL },
        { "ibrc", "ibrc", "0", NULL },
        { "ibgda", "ibrc", "1", NULL },
        { "efa", "libfabric", "0", "efa" },
    };
    const char *name = f->config.provider;

    setenv("NVSHMEM_DISABLE_NVLS", "1", 1);
    setenv("NVSHMEM_DISABLE_NCCL", "1", 1);
    if (f->n_nodes == 1) {
        setenv("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo", 0);
        setenv("NVSHMEM_REMOTE_TRANSPORT", "none", 0);
    }
    if (!name)
        return YARD_OK;
    for (size_t i = 0; i < sizeof(networks) / sizeof(networks[0]); i++) {
        if (strcmp(networks[i].name, name) != 0)
            continue;
        setenv("NVSHMEM_REMOTE_TRANSPORT", networks[i].transport, 1);
        setenv("NVSHMEM_IB_ENABLE_IBGDA", networks[i].ibgda, 1);
        if (networks[i].libfabric)
            setenv("NVSHMEM_LIBFABRIC_PROVIDER", networks[i].libfabric, 1);
        return YARD_OK;
    }
    return yard_fail(err, YARD_EINVAL,
                     "fabric: provider: want none, ibrc, ibgda or efa with %s, got '%s'",
                     f->ops->name, name);
}

/* For people: the transport's reason says what carries puts. */
static void describe_network(yard_fabric *f)
{
    const char *transport = getenv("NVSHMEM_REMOTE_TRANSPORT");
    const char *ibgda = getenv("NVSHMEM_IB_ENABLE_IBGDA");
    const size_t n = strlen(f->reason);

    snprintf(f->reason + n, sizeof(f->reason) - n, "; NVSHMEM %s, network %s", world.lib->version,
             ibgda && ibgda[0] == '1' ? "ibgda"
             : transport              ? transport
                                      : "ibrc");
}

/* What each rank tells the others before NVSHMEM starts. */
typedef struct greeting {
    uint8_t id[YARD_NVSHMEM_ID_BYTES]; /* of its world; of a new one from rank 0 without one */
    char version[24];
    uint32_t rank_there, n_there; /* in its world */
    uint8_t started, broken;
} greeting;

static yard_status make_greeting(yard_fabric *f, greeting *g, yard_error *err)
{
    *g = (greeting){ .rank_there = world.rank,
                     .n_there = world.n_ranks,
                     .started = world.started,
                     .broken = world.broken };
    snprintf(g->version, sizeof(g->version), "%s", world.lib->version);
    if (!world.started && f->rank == 0) {
        const int rc = world.lib->make_id(world.id);
        if (rc != 0)
            return yard_fail(err, YARD_EIO, "fabric: nvshmem: unique id: status %d", rc);
    }
    memcpy(g->id, world.id, sizeof(g->id));
    return YARD_OK;
}

static yard_status check_greetings(const yard_fabric *f, const greeting *all, yard_error *err)
{
    for (uint32_t r = 0; r < f->n_ranks; r++) {
        const greeting *g = &all[r];

        if (g->broken)
            return yard_fail(
                err, YARD_ENOTSUP,
                "fabric: nvshmem: %s lost a rank before; NVSHMEM cannot start again in "
                "a process",
                f->peers[r].name);
        if (strcmp(g->version, all[0].version) != 0)
            return yard_fail(err, YARD_EINVAL, "fabric: nvshmem: rank 0 has NVSHMEM %s, %s has %s",
                             all[0].version, f->peers[r].name, g->version);
        if (g->started != all[0].started ||
            (g->started && (memcmp(g->id, all[0].id, sizeof(g->id)) != 0 || g->rank_there != r ||
                            g->n_there != f->n_ranks)))
            return yard_fail(err, YARD_ENOTSUP,
                             "fabric: nvshmem: %s is rank %u of %u of another set of ranks; a "
                             "process has one",
                             f->peers[r].name, g->rank_there, g->n_there);
    }
    return YARD_OK;
}

/* Collective: all ranks have started NVSHMEM, or start it. */
static yard_status start_world(yard_fabric *f, const nvshmem *n, yard_error *err)
{
    const call start = {
        .what = START, .device = n->device, .rank = f->rank, .n_ranks = f->n_ranks
    };
    greeting mine, *all = calloc(f->n_ranks, sizeof(*all));
    call done;
    yard_status st = all ? make_greeting(f, &mine, err)
                         : yard_fail(err, YARD_ENOMEM, "fabric: room for %u ranks", f->n_ranks);

    if (st == YARD_OK)
        st = yard_rendezvous_exchange(f, &mine, sizeof(mine), all, err);
    if (st == YARD_OK)
        st = check_greetings(f, all, err);
    if (st == YARD_OK && !world.started) {
        memcpy(world.id, all[0].id, sizeof(world.id));
        st = run_bounded(&start, f->config.start_timeout_us, &done, err);
        if (st == YARD_OK && done.rc != 0) {
            world.broken = true;
            st = yard_fail(err, YARD_EIO, "fabric: nvshmem: start: status %d", done.rc);
        }
        world.rank = f->rank;
        world.n_ranks = f->n_ranks;
        world.started = st == YARD_OK;
    }
    free(all);
    return st;
}

/* Filled before any peer can know of it: "ready" is a barrier. */
static yard_status make_heap(yard_fabric *f, nvshmem *n, yard_error *err)
{
    const call allocate = {
        .what = ALLOCATE, .device = n->device, .rank = f->rank, .n_bytes = f->heap_bytes
    };
    call done;
    cudaError_t rc;
    yard_status st = run_bounded(&allocate, f->config.start_timeout_us, &done, err);

    if (st != YARD_OK)
        return st;
    if (!done.heap)
        return yard_fail(err, YARD_ENOMEM, "fabric: nvshmem: memory (%zu bytes of device %d)",
                         f->heap_bytes, n->device);
    n->heap = done.heap;
    f->heap = n->heap;
    rc = cudaMemset(n->heap, 0xff, f->heap_bytes);
    if (rc == cudaSuccess)
        rc = cudaDeviceSynchronize();
    if (rc != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "fabric: nvshmem: fill %zu bytes of device %d: %s",
                         f->heap_bytes, n->device, cudaGetErrorString(rc));
    return YARD_OK;
}

static yard_status open_locked(yard_fabric *f, nvshmem *n, yard_error *err)
{
    yard_status st = load_library(err);

    if (st == YARD_OK)
        st = choose_network(f, err);
    if (st == YARD_OK)
        st = start_world(f, n, err);
    if (st == YARD_OK)
        st = make_heap(f, n, err);
    if (st == YARD_OK)
        describe_network(f);
    return st;
}

static yard_status nvshmem_open(yard_fabric *f, yard_error *err)
{
    nvshmem *n = f->impl = calloc(1, sizeof(*n));
    cudaError_t rc;
    yard_status st;

    if (!n)
        return yard_fail(err, YARD_ENOMEM, "fabric: nvshmem: %zu bytes", sizeof(*n));
    rc = cudaGetDevice(&n->device);
    if (rc == cudaSuccess)
        rc = cudaFree(NULL); /* makes the context */
    if (rc != cudaSuccess)
        return yard_fail(err, YARD_ENOTSUP, "fabric: nvshmem: no usable GPU: %s",
                         cudaGetErrorString(rc));
    pthread_mutex_lock(&world.lock);
    st = open_locked(f, n, err);
    pthread_mutex_unlock(&world.lock);
    return st;
}

/* Memory is given back by all ranks together. Where one is gone without having done so, or does not
 * come in time, it stays taken. */
static void nvshmem_close(yard_fabric *f)
{
    nvshmem *n = f->impl;
    call release = { .what = RELEASE, .rank = f->rank }, done;

    if (!n)
        return;
    release.device = n->device;
    release.heap = n->heap;
    pthread_mutex_lock(&world.lock);
    for (uint32_t r = 0; r < f->n_ranks; r++)
        world.broken |= r != f->rank && yard_peer_gone(f, r);
    if (n->heap && !world.broken)
        run_bounded(&release, f->config.timeout_us, &done, NULL);
    pthread_mutex_unlock(&world.lock);
    free(n);
    f->impl = NULL;
}

static yard_status nvshmem_put_signal(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                                      yard_sym sig, uint64_t value, uint32_t peer)
{
    (void)dst, (void)src, (void)n_bytes, (void)sig, (void)value, (void)peer;
    return yard_fail(&f->err, YARD_ENOTSUP, "fabric: %s: only kernels put", f->ops->name);
}

static void *nvshmem_device_heap(const yard_fabric *f, uint32_t rank)
{
    const nvshmem *n = f->impl;

    return rank == f->rank ? n->heap : world.lib->reach(n->heap, rank);
}

static const yard_nvshmem *nvshmem_device_puts(const yard_fabric *f)
{
    (void)f;
    return world.lib;
}

const yard_fabric_ops yard_fabric_nvshmem = {
    .name = "nvshmem",
    .open = nvshmem_open,
    .close = nvshmem_close,
    .put_signal = nvshmem_put_signal,
    .device_heap = nvshmem_device_heap,
    .device_puts = nvshmem_device_puts,
    .only_puts = true,
};

const yard_fabric_ops yard_fabric_nvlink_nvshmem = {
    .name = "nvlink+nvshmem",
    .open = nvshmem_open,
    .close = nvshmem_close,
    .put_signal = nvshmem_put_signal,
    .device_heap = nvshmem_device_heap,
    .device_puts = nvshmem_device_puts,
};
