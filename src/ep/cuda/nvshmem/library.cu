/* libyard-ep-nvshmem: NVSHMEM for the fabric (yard_nvshmem in fabric.h), and the kernels of ep
 * compiled for the three operations in device.cuh. A shared object of its own, loaded when a group
 * asks for it: libyard-ep needs no NVSHMEM.
 *
 * Puts use nothing of NVSHMEM but putmem_signal_nbi, signal_op (both with SET) and wait_until, so
 * what carries them (peer memory, IBGDA, IBRC by a proxy thread, libfabric) is chosen when NVSHMEM
 * starts, not here. No quiet and no fence: sources are free when the protocol says so. */
#include <string.h>

#include <nvshmem.h>
#include <nvshmemx.h>

#include "ep/cuda/cuda.h"
#include "ep/cuda/transport.cuh"
#include "fabric/fabric.h"

/* ---- on the host --------------------------------------------------------------------------- */

static int make_id(void *id)
{
    nvshmemx_uniqueid_t made = NVSHMEMX_UNIQUEID_INITIALIZER;
    const int rc = nvshmemx_get_uniqueid(&made);

    memcpy(id, &made, sizeof(made));
    return rc;
}

/* What nvshmemx_init_attr() does, which ends the process when it fails. */
static int start(const void *id, uint32_t rank, uint32_t n_ranks)
{
    const nvshmemi_version_t version = { NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION,
                                         NVSHMEM_VENDOR_PATCH_VERSION };
    nvshmemx_init_attr_t attr = NVSHMEMX_INIT_ATTR_INITIALIZER;
    nvshmemx_uniqueid_t given;
    int provided = 0;
    int rc;

    memcpy(&given, id, sizeof(given));
    rc = nvshmemx_set_attr_uniqueid_args((int)rank, (int)n_ranks, &given, &attr);
    if (rc == 0)
        rc = nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, NVSHMEMX_INIT_WITH_UNIQUEID,
                                  &attr, version);
    return rc;
}

static void *allocate(size_t n_bytes)
{
    return nvshmem_align(128, n_bytes);
}

static void *reach(const void *heap, uint32_t rank)
{
    return nvshmem_ptr(heap, (int)rank);
}

static int all_to_all(void *to, const void *from, size_t n_bytes, void *stream)
{
    return nvshmemx_alltoallmem_on_stream(NVSHMEM_TEAM_WORLD, to, from, n_bytes,
                                          (cudaStream_t)stream);
}

static const ep_cuda_kernels kernels = EP_CUDA_KERNELS;

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

extern "C" __attribute__((visibility("default"))) const yard_nvshmem yard_nvshmem_library = {
    .size = sizeof(yard_nvshmem),
    .id_bytes = sizeof(nvshmemx_uniqueid_t),
    .version = TEXT(NVSHMEM_VENDOR_MAJOR_VERSION) "." TEXT(NVSHMEM_VENDOR_MINOR_VERSION) "." TEXT(
        NVSHMEM_VENDOR_PATCH_VERSION),
    .make_id = make_id,
    .start = start,
    .allocate = allocate,
    .release = nvshmem_free,
    .reach = reach,
    .all_to_all = all_to_all,
    .kernels = &kernels,
};
