/* Host side of the sum over an instance's ranks on GPUs. */
#include <stdlib.h>

#include "ep/all_reduce_impl.h"
#include "ep/cuda/all_reduce.h"

enum { VECTOR_BYTES = 16 };

/* Words of a device: of this sum alone. */
typedef struct device_words {
    ep_cuda_sum_state state;
    uint32_t error;
} device_words;

typedef struct cuda_sum {
    int device;
    uint32_t max_blocks;
    ep_cuda_args args;
    ep_cuda_sum sum;
    device_words *words;
    ep_cuda_error *error; /* host memory that kernels write */
} cuda_sum;

static yard_status device_failed(yard_error *err, cudaError_t rc, const char *what)
{
    return yard_fail(err, rc == cudaErrorMemoryAllocation ? YARD_ENOMEM : YARD_EDEVICE,
                     "all-reduce: %s: %s", what, cudaGetErrorString(rc));
}

static yard_status check_device(const yard_all_reduce *r, yard_error *err)
{
    if (yard_fabric_size(r->config.fabric) > EP_CUDA_MAX_RANKS)
        return yard_fail(err, YARD_ENOTSUP, "all-reduce on cuda: want at most %d ranks, got %u",
                         EP_CUDA_MAX_RANKS, yard_fabric_size(r->config.fabric));
    if (all_reduce_row_bytes(&r->config) % VECTOR_BYTES)
        return yard_fail(err, YARD_ENOTSUP,
                         "all-reduce on cuda: want rows of a multiple of %d bytes, got %zu",
                         VECTOR_BYTES, all_reduce_row_bytes(&r->config));
    return YARD_OK;
}

static yard_status allocate(cuda_sum *c, yard_error *err)
{
    int n_sms = 0;
    cudaError_t rc = cudaGetDevice(&c->device);

    if (rc == cudaSuccess)
        rc = cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, c->device);
    if (rc == cudaSuccess)
        rc = cudaMalloc((void **)&c->words, sizeof(*c->words));
    if (rc == cudaSuccess)
        rc = cudaMemset(c->words, 0, sizeof(*c->words));
    if (rc == cudaSuccess)
        rc = cudaHostAlloc((void **)&c->error, sizeof(*c->error), cudaHostAllocMapped);
    if (rc == cudaSuccess)
        rc = cudaDeviceSynchronize();
    if (rc != cudaSuccess)
        return device_failed(err, rc, "memory");
    *c->error = (ep_cuda_error){ 0 };
    c->max_blocks = (uint32_t)n_sms * ALL_REDUCE_BLOCKS_PER_SM;
    return YARD_OK;
}

static void describe(const yard_all_reduce *r, cuda_sum *c, const uint32_t *lost)
{
    const yard_all_reduce_config *config = &r->config;
    const uint64_t timeout_us =
        yard_fabric_deadline(config->fabric, config->timeout_us) - yard_now_us();

    for (uint32_t i = 0; i < yard_fabric_size(config->fabric); i++)
        c->args.heap[i] = yard_fabric_device_heap(config->fabric, i);
    c->args.rank = r->rank;
    c->args.tp = config->tp;
    c->args.error = &c->words->error;
    c->args.host_error = c->error;
    c->args.lost = lost;
    c->args.timeout_ns = timeout_us * 1000;
    c->args.poison_substitute = config->dtype == YARD_BF16 ? 0xfffefffeu : 0xfffffffeu;
    c->sum = (ep_cuda_sum){ .state = &c->words->state,
                            .at_sets = all_reduce_sets_at(config),
                            .slot_bytes = all_reduce_slot_bytes(config),
                            .first = r->first,
                            .max_rows = config->max_rows,
                            .row_vectors = (uint32_t)(all_reduce_row_bytes(config) / VECTOR_BYTES),
                            .bf16 = config->dtype == YARD_BF16 };
}

static yard_status open_cuda(yard_all_reduce *r, yard_error *err)
{
    cuda_sum *c = r->impl = calloc(1, sizeof(*c));
    const uint32_t *lost = yard_fabric_device_lost(r->config.fabric, err);
    yard_status st = lost ? check_device(r, err) : YARD_ENOMEM;

    if (!c)
        return yard_fail(err, YARD_ENOMEM, "all-reduce: %zu bytes", sizeof(*c));
    if (st == YARD_OK)
        st = allocate(c, err);
    if (st == YARD_OK)
        describe(r, c, lost);
    return st;
}

/* A kernel may still run, also after a failure: it ends within the deadline. */
static void close_cuda(yard_all_reduce *r)
{
    cuda_sum *c = r->impl;
    int current = 0;

    if (!c)
        return;
    cudaGetDevice(&current);
    cudaSetDevice(c->device);
    cudaDeviceSynchronize();
    cudaFree(c->words);
    cudaFreeHost(c->error);
    cudaSetDevice(current);
    free(c);
    r->impl = NULL;
}

static void look(yard_all_reduce *r)
{
    const cuda_sum *c = r->impl;
    const uint32_t what = *(volatile uint32_t *)&c->error->what;
    const int value = *(volatile int32_t *)&c->error->value;
    bool lost;

    if (what == EP_FAULT_NONE)
        return;
    lost = yard_fabric_poll(r->config.fabric, NULL) == YARD_EPEER;
    if (what == EP_FAULT_TOKENS)
        r->status = yard_fail(&r->err, YARD_EINVAL, "all-reduce: rows: want 0 to %u, got %d",
                              r->config.max_rows, value);
    else
        r->status = yard_fail(&r->err, lost ? YARD_EPEER : YARD_ETIMEDOUT,
                              "rank %u, all-reduce: %s waiting for rank %d", r->rank,
                              lost ? "gave up" : "the deadline passed", value);
}

static yard_status sum(yard_all_reduce *r, void *x, const int32_t *n_rows, yard_stream stream)
{
    const cuda_sum *c = r->impl;
    const uint64_t n_vectors = (uint64_t)r->config.max_rows * c->sum.row_vectors;
    const uint64_t n_blocks = (n_vectors + ALL_REDUCE_THREADS - 1) / ALL_REDUCE_THREADS;
    ep_cuda_sum s = c->sum;
    cudaError_t rc;

    if ((uintptr_t)x % VECTOR_BYTES)
        return yard_fail(&r->err, YARD_EINVAL, "all-reduce: x: want a multiple of %d, got %p",
                         VECTOR_BYTES, x);
    s.x = x;
    s.n_rows = n_rows;
    rc = yard_ep_cuda_launch_all_reduce(
        &c->args, &s, n_blocks < c->max_blocks ? (uint32_t)n_blocks : c->max_blocks,
        (cudaStream_t)stream);
    if (rc != cudaSuccess)
        r->status = device_failed(&r->err, rc, "launch");
    return r->status;
}

const all_reduce_backend yard_all_reduce_cuda = {
    .open = open_cuda,
    .close = close_cuda,
    .look = look,
    .sum = sum,
};
