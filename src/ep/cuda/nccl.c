#include "ep/cuda/nccl.h"

#include <dlfcn.h>
#include <stdlib.h>

/* Of NCCL's interface, which has kept them since version 2. */
typedef struct nccl_id {
    char bytes[YARD_EP_NCCL_ID_BYTES];
} nccl_id;
enum { NCCL_UINT8 = 1, NCCL_BFLOAT16 = 9, NCCL_SUM = 0 };

typedef struct nccl_library {
    int (*get_id)(nccl_id *id);
    int (*init)(void **comm, int n_ranks, nccl_id id, int rank);
    int (*destroy)(void *comm);
    int (*send)(const void *from, size_t n, int type, int peer, void *comm, cudaStream_t stream);
    int (*receive)(void *to, size_t n, int type, int peer, void *comm, cudaStream_t stream);
    int (*all_reduce)(const void *from, void *to, size_t n, int type, int op, void *comm,
                      cudaStream_t stream);
    int (*begin)(void);
    int (*end)(void);
    const char *(*explain)(int rc);
} nccl_library;

struct ep_cuda_nccl {
    nccl_library lib;
    void *comm;
    uint32_t n_ranks;
};

static yard_status load(nccl_library *lib, yard_error *err)
{
    void *so = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    const struct {
        const char *name;
        void **to;
    } functions[] = {
        { "ncclGetUniqueId", (void **)&lib->get_id },
        { "ncclCommInitRank", (void **)&lib->init },
        { "ncclCommDestroy", (void **)&lib->destroy },
        { "ncclSend", (void **)&lib->send },
        { "ncclRecv", (void **)&lib->receive },
        { "ncclAllReduce", (void **)&lib->all_reduce },
        { "ncclGroupStart", (void **)&lib->begin },
        { "ncclGroupEnd", (void **)&lib->end },
        { "ncclGetErrorString", (void **)&lib->explain },
    };

    if (!so)
        return yard_fail(err, YARD_ENOTSUP, "nccl: %s", dlerror());
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++)
        if (!(*functions[i].to = dlsym(so, functions[i].name)))
            return yard_fail(err, YARD_ENOTSUP, "nccl: libnccl.so.2 has no %s", functions[i].name);
    return YARD_OK;
}

static yard_status failed(const nccl_library *lib, int rc, const char *what, yard_error *err)
{
    return rc ? yard_fail(err, YARD_EDEVICE, "nccl: %s: %s", what, lib->explain(rc)) : YARD_OK;
}

yard_status yard_ep_nccl_id(uint8_t *id, yard_error *err)
{
    nccl_library lib;
    nccl_id made;
    yard_status st = load(&lib, err);

    if (st == YARD_OK)
        st = failed(&lib, lib.get_id(&made), "unique id", err);
    if (st == YARD_OK)
        memcpy(id, made.bytes, sizeof(made));
    return st;
}

yard_status yard_ep_cuda_nccl_open(ep_cuda_nccl **out, const uint8_t *id, uint32_t n_ranks,
                                   uint32_t rank, yard_error *err)
{
    ep_cuda_nccl *n = calloc(1, sizeof(*n));
    nccl_id given;
    yard_status st;

    if (!n)
        return yard_fail(err, YARD_ENOMEM, "nccl: no memory");
    n->n_ranks = n_ranks;
    memcpy(given.bytes, id, sizeof(given));
    st = load(&n->lib, err);
    if (st == YARD_OK)
        st = failed(&n->lib, n->lib.init(&n->comm, (int)n_ranks, given, (int)rank), "start", err);
    if (st == YARD_OK)
        *out = n;
    else
        free(n);
    return st;
}

void yard_ep_cuda_nccl_close(ep_cuda_nccl *n)
{
    if (!n)
        return;
    n->lib.destroy(n->comm);
    free(n);
}

yard_status yard_ep_cuda_nccl_all_to_all(ep_cuda_nccl *n, const uint8_t *from, uint8_t *to,
                                         size_t n_bytes, cudaStream_t stream)
{
    int rc = n->lib.begin();

    for (uint32_t r = 0; r < n->n_ranks && !rc; r++) {
        rc = n->lib.send(from + r * n_bytes, n_bytes, NCCL_UINT8, (int)r, n->comm, stream);
        if (!rc)
            rc = n->lib.receive(to + r * n_bytes, n_bytes, NCCL_UINT8, (int)r, n->comm, stream);
    }
    if (!rc)
        rc = n->lib.end();
    return rc ? YARD_EDEVICE : YARD_OK;
}

yard_status yard_ep_cuda_nccl_all_reduce(ep_cuda_nccl *n, void *x, size_t n_values,
                                         cudaStream_t stream)
{
    const int rc = n->lib.all_reduce(x, x, n_values, NCCL_BFLOAT16, NCCL_SUM, n->comm, stream);

    return rc ? YARD_EDEVICE : YARD_OK;
}
