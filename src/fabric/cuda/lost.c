/* The word by which kernels that wait for a peer learn that one is lost. */
#include <cuda_runtime_api.h>

#include "fabric/fabric_impl.h"

const uint32_t *yard_fabric_device_lost(yard_fabric *f, yard_error *err)
{
    _Atomic uint32_t *word = atomic_load(&f->device_lost);
    cudaError_t rc;

    if (word)
        return (const uint32_t *)word;
    rc = cudaHostAlloc((void **)&word, sizeof(*word), cudaHostAllocMapped | cudaHostAllocPortable);
    if (rc != cudaSuccess) {
        yard_fail(err, YARD_ENOMEM, "fabric: host memory that devices read: %s",
                  cudaGetErrorString(rc));
        return NULL;
    }
    atomic_store(word, 0);
    atomic_store(&f->device_lost, word);
    /* a peer that was lost before the control thread knew of the word */
    if (atomic_load(&f->first_lost) != UINT32_MAX)
        atomic_store(word, 1);
    return (const uint32_t *)word;
}

void yard_device_lost_free(yard_fabric *f)
{
    if (f->device_lost)
        cudaFreeHost((void *)f->device_lost);
    f->device_lost = NULL;
}
