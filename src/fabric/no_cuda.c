/* Stands for fabric/cuda in builds without CUDA. */
#include "fabric/fabric_impl.h"

static yard_status open_device(yard_fabric *f, yard_error *err)
{
    return yard_fail(err, YARD_ENOTSUP, "fabric: %s: this build has no CUDA",
                     f->beside ? "device_heap_bytes" : f->ops->name);
}

static void close_device(yard_fabric *f)
{
    (void)f;
}

const uint32_t *yard_fabric_device_lost(yard_fabric *f, yard_error *err)
{
    (void)f;
    yard_fail(err, YARD_ENOTSUP, "fabric: this build has no CUDA");
    return NULL;
}

void yard_device_lost_free(yard_fabric *f)
{
    (void)f;
}

const yard_fabric_ops yard_fabric_nvlink = { .name = "nvlink",
                                             .open = open_device,
                                             .close = close_device };
const yard_fabric_ops yard_fabric_nvshmem = { .name = "nvshmem",
                                              .open = open_device,
                                              .close = close_device };
const yard_fabric_ops yard_fabric_nvlink_nvshmem = { .name = "nvlink+nvshmem",
                                                     .open = open_device,
                                                     .close = close_device };
