/* libfabric: the library, the provider, the objects.
 *
 * The library is loaded, not linked: a program starts on machines without it. Its symbols have
 * versions, and a newer one may mean larger structures than the headers here: dlvsym() asks for
 * those that belong to the headers. It stays loaded; providers keep threads and thread-local data.
 */
#include "fabric/libfabric.h"

#ifdef YARD_HAVE_LIBFABRIC

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ADDRESS_BYTES = 512, NOWHERE_BYTES = 64, MIN_VALUE_BITS = 4, CQ_ENTRIES = 8192 };

/* What a rank tells the others. */
typedef struct card {
    char provider[64];
    uint32_t address_format, n_address;
    uint64_t base, key;
    uint8_t address[ADDRESS_BYTES];
} card;

static yard_status fail(const yard_lf *t, yard_error *err, const char *what, int rc)
{
    return yard_fail(err, YARD_EIO, "libfabric: provider %s: %s: %s",
                     t->info ? t->info->fabric_attr->prov_name : "(none)", what,
                     t->lib.strerror(-rc));
}

#if FI_MAJOR_VERSION > 1
#define INFO_VERSION "FABRIC_1.8"
#elif FI_MINOR_VERSION >= 20
#define INFO_VERSION "FABRIC_1.7"
#else
#define INFO_VERSION "FABRIC_1.3"
#endif

static bool load(void *so, const char *name, const char *version, void *function)
{
    void *at = dlvsym(so, name, version);

    memcpy(function, &at, sizeof(at)); /* a void * is no function pointer in C */
    return at != NULL;
}

static yard_status load_library(yard_lf *t, yard_error *err)
{
    void *so = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    yard_lf_library *lib = &t->lib;

    if (!so)
        return yard_fail(err, YARD_ENOTSUP, "libfabric: %s", dlerror());
    if (load(so, "fi_getinfo", INFO_VERSION, &lib->getinfo) &&
        load(so, "fi_freeinfo", INFO_VERSION, &lib->freeinfo) &&
        load(so, "fi_dupinfo", INFO_VERSION, &lib->dupinfo) &&
        load(so, "fi_fabric", "FABRIC_1.1", &lib->fabric) &&
        load(so, "fi_strerror", "FABRIC_1.0", &lib->strerror) &&
        load(so, "fi_version", "FABRIC_1.0", &lib->version))
        return YARD_OK;
    return yard_fail(err, YARD_ENOTSUP,
                     "libfabric: the libfabric.so.1 found here is older than the headers %d.%d of "
                     "this build",
                     FI_MAJOR_VERSION, FI_MINOR_VERSION);
}

/* fi_allocinfo() is a macro over fi_dupinfo() that would be linked. */
static struct fi_info *make_hints(const yard_lf *t, const char *provider)
{
    struct fi_info *hints = t->lib.dupinfo(NULL);

    if (!hints)
        return NULL;
    hints->caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN; /* the lock sees to it */
    hints->fabric_attr->prov_name = strdup(provider);
    return hints;
}

/* How many bits a word index of this fabric needs, and how many are left for the value. */
static bool split_immediate(yard_lf *t, const struct fi_info *info)
{
    const size_t n_bytes = info->domain_attr->cq_data_size;
    const uint32_t n_bits = n_bytes >= 8 ? 64 : (uint32_t)n_bytes * 8;

    t->index_bits = 1;
    while (t->total_bytes / 8 >> t->index_bits)
        t->index_bits++;
    t->value_bits = n_bits > t->index_bits ? n_bits - t->index_bits : 0;
    return t->value_bits >= MIN_VALUE_BITS;
}

/* Names of devices are addresses of their own for these; the others listen at bind_host. */
static bool has_own_addresses(const char *provider)
{
    return !strncmp(provider, "shm", 3) || !strncmp(provider, "efa", 3);
}

static yard_status try_provider(yard_lf *t, const char *provider, yard_error *err)
{
    const char *host = has_own_addresses(provider) ? NULL : t->fabric->text.bind_host;
    const uint32_t ours = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION);
    const uint32_t theirs = t->lib.version();
    struct fi_info *hints = make_hints(t, provider), *list = NULL;
    int rc = hints ? t->lib.getinfo(theirs < ours ? theirs : ours, host, NULL, host ? FI_SOURCE : 0,
                                    hints, &list)
                   : -FI_ENOMEM;

    if (hints)
        t->lib.freeinfo(hints);
    if (rc != 0)
        return yard_fail(err, YARD_ENOTSUP,
                         "libfabric: provider %s has no reliable datagrams with remote writes%s%s "
                         "on this machine: %s",
                         provider, host ? " at " : "", host ? host : "", t->lib.strerror(-rc));
    if (!split_immediate(t, list)) {
        yard_fail(err, YARD_ENOTSUP,
                  "libfabric: provider %s carries immediates of %zu bytes, too few for a heap of "
                  "%zu bytes",
                  list->fabric_attr->prov_name, list->domain_attr->cq_data_size,
                  t->fabric->heap_bytes);
        t->lib.freeinfo(list);
        return YARD_ENOTSUP;
    }
    t->info = t->lib.dupinfo(list);
    t->lib.freeinfo(list);
    return t->info ? YARD_OK : yard_fail(err, YARD_ENOMEM, "libfabric: provider information");
}

static yard_status choose_provider(yard_lf *t, yard_error *err)
{
    static const char *const best_first[] = { "efa", "verbs", "tcp" };
    yard_status st = YARD_ENOTSUP;

    if (t->fabric->config.provider)
        return try_provider(t, t->fabric->config.provider, err);
    for (size_t i = 0; i < sizeof(best_first) / sizeof(best_first[0]) && st != YARD_OK; i++)
        st = try_provider(t, best_first[i], err);
    return st;
}

static yard_status map_heap(yard_lf *t, yard_error *err)
{
    yard_fabric *f = t->fabric;
    void *heap;

    t->nowhere = yard_align_up(f->heap_bytes, NOWHERE_BYTES);
    t->greetings = t->nowhere + NOWHERE_BYTES;
    t->total_bytes = t->greetings + 8 * (size_t)f->n_ranks;
    heap = mmap(NULL, t->total_bytes, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (heap == MAP_FAILED)
        return yard_fail(err, YARD_ENOMEM, "libfabric: a heap of %zu bytes: %s", f->heap_bytes,
                         strerror(errno));
    f->heap = heap;
    return YARD_OK;
}

/* Not every provider has a descriptor to wait on. */
static int open_cq(yard_lf *t)
{
    struct fi_cq_attr attr = { .size = CQ_ENTRIES,
                               .format = FI_CQ_FORMAT_DATA,
                               .wait_obj = FI_WAIT_FD };
    int rc = fi_cq_open(t->domain, &attr, &t->cq, NULL);

    if (rc == 0)
        return fi_control(&t->cq->fid, FI_GETWAIT, &t->cq_fd);
    attr.wait_obj = FI_WAIT_NONE;
    return fi_cq_open(t->domain, &attr, &t->cq, NULL);
}

static yard_status open_domain(yard_lf *t, yard_error *err)
{
    struct fi_av_attr av = { .type = FI_AV_TABLE, .count = t->fabric->n_ranks };
    int rc = t->lib.fabric(t->info->fabric_attr, &t->fid_fabric, NULL);

    if (rc != 0)
        return fail(t, err, "fabric", rc);
    rc = fi_domain(t->fid_fabric, t->info, &t->domain, NULL);
    if (rc != 0)
        return fail(t, err, "domain", rc);
    rc = fi_av_open(t->domain, &av, &t->av, NULL);
    if (rc != 0)
        return fail(t, err, "address vector", rc);
    rc = open_cq(t);
    return rc == 0 ? YARD_OK : fail(t, err, "completion queue", rc);
}

static yard_status open_endpoint(yard_lf *t, yard_error *err)
{
    int rc = fi_endpoint(t->domain, t->info, &t->ep, NULL);

    if (rc != 0)
        return fail(t, err, "endpoint", rc);
    rc = fi_ep_bind(t->ep, &t->av->fid, 0);
    if (rc == 0)
        rc = fi_ep_bind(t->ep, &t->cq->fid, FI_TRANSMIT | FI_RECV);
    if (rc == 0)
        rc = fi_enable(t->ep);
    return rc == 0 ? YARD_OK : fail(t, err, "enabling the endpoint", rc);
}

/* When the provider leaves the choice to us: nobody who was not told may guess it. */
static uint64_t random_key(const struct fi_info *info)
{
    const size_t n = info->domain_attr->mr_key_size;
    uint8_t nonce[YARD_NONCE_BYTES];
    uint64_t key;

    yard_auth_nonce(nonce);
    memcpy(&key, nonce, sizeof(key));
    return n == 0 || n >= sizeof(key) ? key : key >> 8 * (sizeof(key) - n);
}

static yard_status register_heap(yard_lf *t, yard_error *err)
{
    const int mode = t->info->domain_attr->mr_mode;
    const uint64_t access = FI_REMOTE_WRITE | FI_WRITE;
    int rc = fi_mr_reg(t->domain, t->fabric->heap, t->total_bytes, access, 0,
                       mode & FI_MR_PROV_KEY ? 0 : random_key(t->info), 0, &t->mr, NULL);

    if (rc != 0)
        return fail(t, err, "registering the heap", rc);
    if (mode & FI_MR_LOCAL)
        t->desc = fi_mr_desc(t->mr);
    return YARD_OK;
}

static yard_status fill_card(yard_lf *t, card *c, yard_error *err)
{
    size_t n = sizeof(c->address);
    int rc;

    memset(c, 0, sizeof(*c));
    snprintf(c->provider, sizeof(c->provider), "%s", t->info->fabric_attr->prov_name);
    c->address_format = t->info->addr_format;
    rc = fi_getname(&t->ep->fid, c->address, &n);
    if (rc != 0)
        return fail(t, err, "own address", rc);
    c->n_address = (uint32_t)n;
    c->base = t->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)t->fabric->heap : 0;
    c->key = fi_mr_key(t->mr);
    return YARD_OK;
}

static yard_status add_peer(yard_lf *t, const card *mine, card *c, uint32_t rank, yard_error *err)
{
    yard_lf_peer *p = &t->peers[rank];
    int rc;

    c->provider[sizeof(c->provider) - 1] = 0;
    if (strcmp(mine->provider, c->provider) != 0 || mine->address_format != c->address_format)
        return yard_fail(
            err, YARD_EINVAL,
            "libfabric: provider: want the same on all ranks, got %s here and %s on %s",
            mine->provider, c->provider, t->fabric->peers[rank].name);
    p->rank = rank;
    p->base = c->base;
    p->key = c->key;
    if (rank == t->fabric->rank)
        return YARD_OK;
    rc = fi_av_insert(t->av, c->address, 1, &p->address, 0, NULL);
    return rc == 1 ? YARD_OK : fail(t, err, "a peer's address", rc < 0 ? rc : -FI_EINVAL);
}

/* Everybody takes part in the exchange, also who already knows that it cannot go on: the exchange
 * fails for all when one reports its failure instead. */
static yard_status meet_peers(yard_lf *t, yard_error *err)
{
    yard_fabric *f = t->fabric;
    card mine, *all = calloc(f->n_ranks, sizeof(*all));
    yard_status st;

    t->peers = calloc(f->n_ranks, sizeof(*t->peers));
    if (!all || !t->peers) {
        free(all);
        return yard_fail(err, YARD_ENOMEM, "libfabric: room for %u ranks", f->n_ranks);
    }
    st = fill_card(t, &mine, err);
    if (st == YARD_OK && f->n_ranks > 1)
        st = yard_rendezvous_exchange(f, &mine, sizeof(mine), all, err);
    for (uint32_t r = 0; r < f->n_ranks && f->n_ranks > 1 && st == YARD_OK; r++)
        st = add_peer(t, &mine, &all[r], r, err);
    free(all);
    return st;
}

yard_status yard_lf_open_objects(yard_lf *t, yard_error *err)
{
    yard_status st = load_library(t, err);

    if (st == YARD_OK)
        st = map_heap(t, err);
    if (st == YARD_OK)
        st = choose_provider(t, err);
    if (st == YARD_OK)
        st = open_domain(t, err);
    if (st == YARD_OK)
        st = open_endpoint(t, err);
    if (st == YARD_OK)
        st = register_heap(t, err);
    if (st == YARD_OK)
        st = meet_peers(t, err);
    return st;
}

/* An endpoint of the shm provider is a file in /dev/shm with the endpoint's name. Who has said
 * hello has mapped it. */
void yard_lf_forget_name(yard_lf *t)
{
    static const char prefix[] = "fi_shm://";
    char name[ADDRESS_BYTES + 1] = { 0 };
    size_t n = ADDRESS_BYTES;

    if (!strcmp(t->info->fabric_attr->prov_name, "shm") && fi_getname(&t->ep->fid, name, &n) == 0 &&
        !strncmp(name, prefix, strlen(prefix)))
        shm_unlink(name + strlen(prefix));
}

static void close_fid(struct fid *fid)
{
    if (fid)
        fi_close(fid);
}

void yard_lf_close_objects(yard_lf *t)
{
    close_fid(t->ep ? &t->ep->fid : NULL);
    close_fid(t->mr ? &t->mr->fid : NULL);
    close_fid(t->cq ? &t->cq->fid : NULL);
    close_fid(t->av ? &t->av->fid : NULL);
    close_fid(t->domain ? &t->domain->fid : NULL);
    close_fid(t->fid_fabric ? &t->fid_fabric->fid : NULL);
    if (t->info)
        t->lib.freeinfo(t->info);
    if (t->fabric->heap)
        munmap(t->fabric->heap, t->total_bytes);
    t->fabric->heap = NULL;
    for (uint32_t r = 0; t->peers && r < t->fabric->n_ranks; r++)
        yard_put_queue_free(&t->peers[r].queue);
    free(t->peers);
}

#endif
