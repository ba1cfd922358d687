/* Stands for fabric/cuda in builds without CUDA. */
#include "fabric/fabric_impl.h"

static yard_status open_nvlink(yard_fabric *f, yard_error *err)
{
    (void)f;
    return yard_fail(err, YARD_ENOTSUP, "fabric: nvlink: this build has no CUDA");
}

static void close_nvlink(yard_fabric *f)
{
    (void)f;
}

const yard_fabric_ops yard_fabric_nvlink = { .name = "nvlink",
                                             .open = open_nvlink,
                                             .close = close_nvlink };
