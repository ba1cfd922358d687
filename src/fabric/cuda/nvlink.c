/* Heaps of GPUs of one node, each mapped by all: kernels store to a peer's as to their own.
 *
 * The memory is made with the virtual memory calls of the driver, whose handles travel as file
 * descriptors beside the small host file that heaps.c trades. Every importer holds a reference to
 * the memory: when a rank dies, the survivors' mappings of its heap stay good, and stores that are
 * under way to it land in memory that nobody reads any more. */
#include <stdlib.h>
#include <unistd.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "fabric/heaps.h"

/* Functions of the driver, found at run time: a program with this file in it needs no driver. */
typedef struct driver {
    CUresult (*granularity)(size_t *, const CUmemAllocationProp *,
                            CUmemAllocationGranularity_flags);
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                       unsigned long long);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*free)(CUdeviceptr, size_t);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*set_access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
    CUresult (*export_handle)(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                              unsigned long long);
    CUresult (*import_handle)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
    CUresult (*error_name)(CUresult, const char **);
} driver;

typedef struct mapping {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    bool has_handle, is_reserved, is_mapped;
} mapping;

typedef struct nvlink {
    driver cu;
    int device;
    size_t n_bytes;   /* heap_bytes, rounded up to what the driver maps */
    yard_heaps files; /* trades the descriptors; their memory is not used */
    mapping *maps;    /* [n_ranks] */
} nvlink;

enum { FILE_BYTES = 64 };

/* The fabric's own heap, or the one beside it. */
static void **place_of(yard_fabric *f)
{
    return f->beside ? &f->beside_impl : &f->impl;
}

static const nvlink *nvlink_of(const yard_fabric *f)
{
    return f->beside ? f->beside_impl : f->impl;
}

static yard_status find_functions(driver *cu, yard_error *err)
{
    const struct {
        const char *name;
        void **to;
    } wanted[] = {
        { "cuMemGetAllocationGranularity", (void **)&cu->granularity },
        { "cuMemCreate", (void **)&cu->create },
        { "cuMemRelease", (void **)&cu->release },
        { "cuMemAddressReserve", (void **)&cu->reserve },
        { "cuMemAddressFree", (void **)&cu->free },
        { "cuMemMap", (void **)&cu->map },
        { "cuMemUnmap", (void **)&cu->unmap },
        { "cuMemSetAccess", (void **)&cu->set_access },
        { "cuMemExportToShareableHandle", (void **)&cu->export_handle },
        { "cuMemImportFromShareableHandle", (void **)&cu->import_handle },
        { "cuGetErrorName", (void **)&cu->error_name },
    };

    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
        const cudaError_t rc = cudaGetDriverEntryPointByVersion(wanted[i].name, wanted[i].to, 12000,
                                                                cudaEnableDefault, NULL);
        if (rc != cudaSuccess || !*wanted[i].to)
            return yard_fail(err, YARD_ENOTSUP, "fabric: nvlink: the driver has no %s: %s",
                             wanted[i].name, cudaGetErrorString(rc));
    }
    return YARD_OK;
}

static yard_status driver_failed(const nvlink *n, CUresult rc, const char *what, const char *whose,
                                 yard_error *err)
{
    const char *name = "?";

    n->cu.error_name(rc, &name);
    return yard_fail(err, rc == CUDA_ERROR_OUT_OF_MEMORY ? YARD_ENOMEM : YARD_EDEVICE,
                     "fabric: nvlink: %s (%zu bytes of %s, seen from device %d): %s", what,
                     n->n_bytes, whose, n->device, name);
}

static CUmemAllocationProp properties(const nvlink *n)
{
    const CUmemAllocationProp p = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = n->device },
    };

    return p;
}

static yard_status map_heap(const nvlink *n, mapping *m, const char *whose, yard_error *err)
{
    const CUmemAccessDesc access = {
        .location = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = n->device },
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    CUresult rc = n->cu.reserve(&m->at, n->n_bytes, 0, 0, 0);

    if (rc != CUDA_SUCCESS)
        return driver_failed(n, rc, "address space", whose, err);
    m->is_reserved = true;
    rc = n->cu.map(m->at, n->n_bytes, 0, m->handle, 0);
    if (rc != CUDA_SUCCESS)
        return driver_failed(n, rc, "map", whose, err);
    m->is_mapped = true;
    rc = n->cu.set_access(m->at, n->n_bytes, &access, 1);
    if (rc != CUDA_SUCCESS)
        return driver_failed(n, rc, "peer access", whose, err);
    return YARD_OK;
}

static void unmap_heap(const nvlink *n, mapping *m)
{
    if (m->is_mapped)
        n->cu.unmap(m->at, n->n_bytes);
    if (m->is_reserved)
        n->cu.free(m->at, n->n_bytes);
    if (m->has_handle)
        n->cu.release(m->handle);
    *m = (mapping){ 0 };
}

/* Filled before any peer can know of it. */
static yard_status make_heap(yard_fabric *f, nvlink *n, int *fd, yard_error *err)
{
    const CUmemAllocationProp p = properties(n);
    mapping *m = &n->maps[f->rank];
    size_t granularity = 0;
    CUresult rc = n->cu.granularity(&granularity, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    cudaError_t filled;
    yard_status st;

    if (rc != CUDA_SUCCESS)
        return driver_failed(n, rc, "granularity", "this rank", err);
    n->n_bytes = yard_align_up(yard_fabric_device_heap_bytes(f), granularity);
    rc = n->cu.create(&m->handle, n->n_bytes, &p, 0);
    if (rc != CUDA_SUCCESS)
        return driver_failed(n, rc, "memory", "this rank", err);
    m->has_handle = true;
    st = map_heap(n, m, "this rank", err);
    if (st != YARD_OK)
        return st;
    filled = cudaMemset((void *)(uintptr_t)m->at, 0xff, n->n_bytes);
    if (filled == cudaSuccess)
        filled = cudaDeviceSynchronize();
    if (filled != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "fabric: nvlink: fill %zu bytes of device %d: %s",
                         n->n_bytes, n->device, cudaGetErrorString(filled));
    rc = n->cu.export_handle(fd, m->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (rc != CUDA_SUCCESS)
        return driver_failed(n, rc, "export", "this rank", err);
    return YARD_OK;
}

static yard_status import_heaps(yard_fabric *f, nvlink *n, yard_error *err)
{
    for (uint32_t r = 0; r < f->n_ranks; r++) {
        mapping *m = &n->maps[r];
        const int fd = n->files.events[r];
        yard_status st;
        CUresult rc;

        if (r == f->rank)
            continue;
        if (fd < 0)
            return yard_fail(err, YARD_EFORMAT, "fabric: nvlink: no memory handle from %s",
                             f->peers[r].name);
        rc = n->cu.import_handle(&m->handle, (void *)(uintptr_t)fd,
                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        if (rc != CUDA_SUCCESS)
            return driver_failed(n, rc, "import", f->peers[r].name, err);
        m->has_handle = true;
        st = map_heap(n, m, f->peers[r].name, err);
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}

static yard_status find_device(nvlink *n, yard_error *err)
{
    cudaError_t rc = cudaGetDevice(&n->device);

    if (rc == cudaSuccess)
        rc = cudaFree(NULL); /* makes the context */
    if (rc != cudaSuccess)
        return yard_fail(err, YARD_ENOTSUP, "fabric: nvlink: no usable GPU: %s",
                         cudaGetErrorString(rc));
    return find_functions(&n->cu, err);
}

static yard_status nvlink_open(yard_fabric *f, yard_error *err)
{
    nvlink *n = *place_of(f) = calloc(1, sizeof(*n));
    uint8_t *const host_heap = f->heap;
    int fd = -1;
    yard_status st;

    if (!n)
        return yard_fail(err, YARD_ENOMEM, "fabric: nvlink: %zu bytes", sizeof(*n));
    n->files.fd = -1;
    n->maps = calloc(f->n_ranks, sizeof(*n->maps));
    if (!n->maps)
        return yard_fail(err, YARD_ENOMEM, "fabric: nvlink: room for %u ranks", f->n_ranks);
    st = find_device(n, err);
    if (st == YARD_OK)
        st = make_heap(f, n, &fd, err);
    if (st == YARD_OK)
        st = yard_heaps_open(f, &n->files, FILE_BYTES, fd, err);
    if (st == YARD_OK)
        st = import_heaps(f, n, err);
    if (fd >= 0)
        close(fd);
    f->heap = f->beside ? host_heap : (uint8_t *)(uintptr_t)n->maps[f->rank].at;
    return st;
}

static void nvlink_close(yard_fabric *f)
{
    nvlink *n = *place_of(f);

    if (!n)
        return;
    for (uint32_t r = 0; n->maps && r < f->n_ranks; r++)
        unmap_heap(n, &n->maps[r]);
    yard_heaps_close(f, &n->files);
    free(n->maps);
    free(n);
    *place_of(f) = NULL;
}

static yard_status nvlink_put_signal(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                                     yard_sym sig, uint64_t value, uint32_t peer)
{
    (void)dst, (void)src, (void)n_bytes, (void)sig, (void)value, (void)peer;
    return yard_fail(&f->err, YARD_ENOTSUP, "fabric: nvlink: only kernels put");
}

static void *nvlink_device_heap(const yard_fabric *f, uint32_t rank)
{
    return (void *)(uintptr_t)nvlink_of(f)->maps[rank].at;
}

const yard_fabric_ops yard_fabric_nvlink = {
    .name = "nvlink",
    .copies = true, /* kernels store what they make: nothing is staged */
    .open = nvlink_open,
    .close = nvlink_close,
    .put_signal = nvlink_put_signal,
    .device_heap = nvlink_device_heap,
};
