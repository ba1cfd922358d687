/* What two devices and their link could do at best, by kernels that do nothing else. */
#include <stdlib.h>

#include "ep/cuda/bench.h"
#include "ep/cuda/bench_impl.h"

enum { N_TURNS = 2000, N_REPEATS = 11, COPY_BYTES = 1 << 29, TURNS_BYTES = 4096 };

typedef struct limits {
    cudaStream_t stream;
    cudaEvent_t begun, ended;
    uint8_t *own, *peer; /* heaps: words for turns, then what is stored */
    uint8_t *from, *to;  /* own memory */
    uint64_t *ns;
    uint32_t n_begun; /* turns so far */
    bool first;
} limits;

static int by_value(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;

    return (x > y) - (x < y);
}

static cudaError_t open_limits(yard_fabric *f, limits *l)
{
    const uint32_t rank = yard_fabric_rank(f);
    cudaError_t rc = cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking);

    l->first = rank % 2 == 0;
    l->own = yard_fabric_device_heap(f, rank);
    l->peer = yard_fabric_device_heap(f, rank ^ 1);
    if (rc == cudaSuccess)
        rc = cudaEventCreate(&l->begun);
    if (rc == cudaSuccess)
        rc = cudaEventCreate(&l->ended);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&l->from, COPY_BYTES, NULL);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&l->to, COPY_BYTES, NULL);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&l->ns, sizeof(*l->ns), NULL);
    if (rc == cudaSuccess)
        rc = cudaMemset(l->from, 0x5b, COPY_BYTES);
    return rc;
}

static void close_limits(limits *l)
{
    cudaDeviceSynchronize();
    cudaFree(l->from);
    cudaFree(l->to);
    cudaFree(l->ns);
    if (l->begun)
        cudaEventDestroy(l->begun);
    if (l->ended)
        cudaEventDestroy(l->ended);
    if (l->stream)
        cudaStreamDestroy(l->stream);
}

/* Enqueued: both devices are then there at the same time. */
static cudaError_t take_turns(limits *l, uint32_t n_turns)
{
    const ep_cuda_turns t = { .own = l->own,
                              .peer = l->peer,
                              .begin = l->n_begun,
                              .n_turns = n_turns,
                              .first = l->first,
                              .ns = l->ns };

    l->n_begun += n_turns;
    return yard_ep_cuda_launch_turns(&t, l->stream);
}

static yard_status time_flags(limits *l, double *us, yard_error *err)
{
    uint64_t ns = 0;
    cudaError_t rc = take_turns(l, N_TURNS);

    if (rc == cudaSuccess)
        rc = cudaStreamSynchronize(l->stream);
    if (rc == cudaSuccess)
        rc = cudaMemcpy(&ns, l->ns, sizeof(ns), cudaMemcpyDeviceToHost);
    if (rc != cudaSuccess)
        return yard_ep_bench_failed(rc, "turns", err);
    if (ns == UINT64_MAX)
        return yard_fail(err, YARD_ETIMEDOUT, "bench on cuda: the peer did not answer within 5 s");
    *us = (double)ns * 1e-3 / (2.0 * (N_TURNS - N_TURNS / 10 + 1)); /* there and back */
    return YARD_OK;
}

/* Median; both ranks begin each together. */
static yard_status time_bytes(limits *l, bool stores, double *bytes_per_s, yard_error *err)
{
    const size_t n_bytes = stores ? YARD_EP_LIMITS_HEAP_BYTES - TURNS_BYTES : COPY_BYTES;
    float ms[N_REPEATS];
    cudaError_t rc = cudaSuccess;

    for (int i = 0; i < N_REPEATS && rc == cudaSuccess; i++) {
        rc = take_turns(l, 20);
        cudaEventRecord(l->begun, l->stream);
        if (rc == cudaSuccess)
            rc = stores ? yard_ep_cuda_launch_store(l->peer + TURNS_BYTES, n_bytes, l->stream)
                        : yard_ep_cuda_launch_copy(l->to, l->from, n_bytes, l->stream);
        cudaEventRecord(l->ended, l->stream);
        if (rc == cudaSuccess)
            rc = cudaStreamSynchronize(l->stream);
        if (rc == cudaSuccess)
            rc = cudaEventElapsedTime(&ms[i], l->begun, l->ended);
    }
    if (rc != cudaSuccess)
        return yard_ep_bench_failed(rc, stores ? "stores" : "copies", err);
    qsort(ms, N_REPEATS, sizeof(ms[0]), by_value);
    *bytes_per_s = (double)n_bytes * (stores ? 1 : 2) / ((double)ms[N_REPEATS / 2] * 1e-3);
    return YARD_OK;
}

yard_status yard_ep_limits_measure(yard_fabric *fabric, yard_ep_limits *out, yard_error *err)
{
    limits l = { 0 };
    yard_status st;

    if (yard_fabric_size(fabric) % 2 != 0 ||
        !yard_fabric_device_heap(fabric, yard_fabric_rank(fabric) ^ 1) ||
        yard_fabric_heap_bytes(fabric) < YARD_EP_LIMITS_HEAP_BYTES)
        return yard_fail(err, YARD_EINVAL,
                         "bench on cuda: want an even number of ranks over nvlink and %d bytes of "
                         "heap",
                         YARD_EP_LIMITS_HEAP_BYTES);
    st = yard_ep_bench_failed(open_limits(fabric, &l), "memory", err);
    if (st == YARD_OK)
        st = time_flags(&l, &out->flag_us, err);
    if (st == YARD_OK)
        st = time_bytes(&l, true, &out->store_bytes_per_s, err);
    if (st == YARD_OK)
        st = time_bytes(&l, false, &out->copy_bytes_per_s, err);
    close_limits(&l);
    return st;
}
