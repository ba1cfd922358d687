/* Stands for ep/cuda in builds without CUDA. */
#include "ep/all_reduce_impl.h"
#include "ep/ep_impl.h"

static yard_status check(const yard_ep *ep, yard_error *err)
{
    (void)ep;
    return yard_fail(err, YARD_ENOTSUP, "ep config: device: this build has no CUDA");
}

static size_t heap_bytes(const yard_ep *ep, bool copies)
{
    (void)ep;
    (void)copies;
    return 0;
}

const ep_backend yard_ep_cuda = { .name = "cuda", .check = check, .heap_bytes = heap_bytes };

/* Never chosen: no fabric has a device's heap here. */
const all_reduce_backend yard_all_reduce_cuda = { 0 };

static yard_status no_cuda(yard_error *err)
{
    return yard_fail(err, YARD_ENOTSUP, "this build has no CUDA");
}

yard_status yard_ep_device_count(uint32_t *out, yard_error *err)
{
    return no_cuda(err);
}

yard_status yard_ep_device_use(uint32_t device, char *name, char *versions, yard_error *err)
{
    return no_cuda(err);
}

yard_status yard_ep_bench_create(yard_ep_bench **out, yard_ep *ep, const yard_ep_config *config,
                                 const yard_ep_bench_inputs *inputs, yard_error *err)
{
    return no_cuda(err);
}

void yard_ep_bench_destroy(yard_ep_bench *b)
{
}

yard_status yard_ep_bench_time(yard_ep_bench *b, const yard_ep_bench_plan *plan, double *pair,
                               double *dispatch, double *combine, yard_error *err)
{
    return no_cuda(err);
}

yard_status yard_ep_bench_exchange(yard_ep_bench *b, uint32_t set_idx, void *expert_x,
                                   float *expert_x_scale, int32_t *expert_count, int32_t *row_index,
                                   void *y, yard_error *err)
{
    return no_cuda(err);
}

yard_status yard_ep_nccl_id(uint8_t *id, yard_error *err)
{
    return no_cuda(err);
}

size_t yard_ep_padded_heap_bytes(const yard_ep_padded_config *config)
{
    return 0;
}

yard_status yard_ep_limits_measure(yard_fabric *fabric, yard_ep_limits *out, yard_error *err)
{
    return no_cuda(err);
}

yard_status yard_ep_bench_create_padded(yard_ep_bench **out, const yard_ep_padded_config *config,
                                        yard_error *err)
{
    return no_cuda(err);
}

yard_status yard_ep_bench_padded_check(yard_ep_bench *b, yard_error *err)
{
    return no_cuda(err);
}
