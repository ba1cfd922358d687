/* Padded all-to-alls by NCCL and by NVSHMEM's own collective: what dispatch and combine are
 * compared with. */
#include <stdlib.h>

#include "ep/cuda/bench_impl.h"

static yard_status by_nccl(yard_ep_bench *b, const uint8_t *from, uint8_t *to, size_t n_bytes)
{
    return yard_ep_cuda_nccl_all_to_all(b->nccl, from, to, n_bytes, b->stream);
}

static yard_status by_nvshmem(yard_ep_bench *b, const uint8_t *from, uint8_t *to, size_t n_bytes)
{
    return b->nvshmem->all_to_all(to, from, n_bytes, b->stream) == 0 ? YARD_OK : YARD_EDEVICE;
}

/* ---- create ---------------------------------------------------------------------------------- */

static yard_status open_nccl(yard_ep_bench *b, yard_error *err)
{
    const yard_ep_padded_config *c = &b->padded;
    const size_t n = c->n_ranks;
    cudaError_t rc = yard_ep_bench_get(&b->x, n * c->dispatch_bytes, NULL);
    yard_status st;

    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&b->expert_x, n * c->dispatch_bytes, NULL);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&b->expert_y, n * c->combine_bytes, NULL);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&b->y, n * c->combine_bytes, NULL);
    st = yard_ep_bench_failed(rc, "memory", err);
    b->all_to_all = by_nccl;
    return st == YARD_OK ? yard_ep_cuda_nccl_open(&b->nccl, c->id, c->n_ranks, c->rank, err) : st;
}

static yard_status open_nvshmem(yard_ep_bench *b, yard_error *err)
{
    const yard_ep_padded_config *c = &b->padded;
    const size_t n = c->n_ranks;

    b->nvshmem = yard_fabric_device_puts(c->fabric);
    if (!b->nvshmem)
        return yard_fail(err, YARD_EINVAL, "bench on cuda: want a fabric over nvshmem, got %s",
                         yard_fabric_transport(c->fabric, NULL));
    if (yard_fabric_heap_bytes(c->fabric) < yard_ep_padded_heap_bytes(c))
        return yard_fail(err, YARD_EINVAL, "bench on cuda: want a heap of %zu bytes, got %zu",
                         yard_ep_padded_heap_bytes(c), yard_fabric_heap_bytes(c->fabric));
    b->x = yard_fabric_local(c->fabric, 0);
    b->expert_x = b->x + n * c->dispatch_bytes;
    b->expert_y = b->expert_x + n * c->dispatch_bytes;
    b->y = b->expert_y + n * c->combine_bytes;
    b->all_to_all = by_nvshmem;
    return YARD_OK;
}

size_t yard_ep_padded_heap_bytes(const yard_ep_padded_config *config)
{
    return 2 * config->n_ranks * (config->dispatch_bytes + config->combine_bytes);
}

yard_status yard_ep_bench_create_padded(yard_ep_bench **out, const yard_ep_padded_config *config,
                                        yard_error *err)
{
    yard_ep_bench *b = calloc(1, sizeof(*b));
    yard_status st;

    if (!b)
        return yard_fail(err, YARD_ENOMEM, "bench on cuda: no memory");
    b->padded = *config;
    b->n_sets = 1;
    st = yard_ep_bench_make_events(b, err);
    if (st == YARD_OK)
        st = config->fabric ? open_nvshmem(b, err) : open_nccl(b, err);
    if (st != YARD_OK) {
        yard_ep_bench_destroy(b);
        return st;
    }
    *out = b;
    return YARD_OK;
}

void yard_ep_bench_padded_close(yard_ep_bench *b)
{
    yard_ep_cuda_nccl_close(b->nccl);
    if (b->nvshmem) /* the fabric's memory */
        b->x = b->expert_x = b->expert_y = b->y = NULL;
}

/* ---- check ------------------------------------------------------------------------------------
 */

/* What rank from sends to rank to. */
static uint8_t mark_of(uint32_t from, uint32_t to)
{
    return (uint8_t)(from * 16 + to + 1);
}

static cudaError_t mark_parts(uint8_t *at, size_t n_bytes, const yard_ep_bench *b)
{
    cudaError_t rc = cudaSuccess;

    for (uint32_t r = 0; r < b->padded.n_ranks && rc == cudaSuccess; r++)
        rc = cudaMemsetAsync(at + r * n_bytes, mark_of(b->padded.rank, r), n_bytes, b->stream);
    return rc;
}

static yard_status check_parts(const uint8_t *at, size_t n_bytes, const yard_ep_bench *b,
                               yard_error *err)
{
    const uint32_t n_ranks = b->padded.n_ranks;
    uint8_t *got = malloc(n_ranks * n_bytes);
    yard_status st;

    if (!got)
        return yard_fail(err, YARD_ENOMEM, "bench on cuda: no memory for %zu bytes", n_bytes);
    st = yard_ep_bench_failed(cudaMemcpy(got, at, n_ranks * n_bytes, cudaMemcpyDeviceToHost),
                              "results", err);
    for (uint32_t r = 0; r < n_ranks && st == YARD_OK; r++) {
        const uint8_t *part = got + r * n_bytes;

        if (part[0] != mark_of(r, b->padded.rank) || memcmp(part, part + 1, n_bytes - 1) != 0)
            st = yard_fail(err, YARD_EDEVICE, "all-to-all: bytes from rank %u are wrong", r);
    }
    free(got);
    return st;
}

/* Of NVSHMEM's collectives only the one before says that no rank still writes here: outputs keep
 * what a rank ahead of this one may already have put. */
yard_status yard_ep_bench_padded_check(yard_ep_bench *b, yard_error *err)
{
    const yard_ep_padded_config *c = &b->padded;
    cudaError_t rc = mark_parts(b->x, c->dispatch_bytes, b);
    yard_status st;

    if (rc == cudaSuccess)
        rc = mark_parts(b->expert_y, c->combine_bytes, b);
    if (rc == cudaSuccess && !b->nvshmem)
        rc = cudaMemsetAsync(b->expert_x, 0, c->n_ranks * c->dispatch_bytes, b->stream);
    if (rc == cudaSuccess && !b->nvshmem)
        rc = cudaMemsetAsync(b->y, 0, c->n_ranks * c->combine_bytes, b->stream);
    st = rc == cudaSuccess ? yard_ep_bench_enqueue_pair(b, err)
                           : yard_ep_bench_failed(rc, "marks", err);
    if (st == YARD_OK)
        st = yard_ep_bench_failed(cudaStreamSynchronize(b->stream), "exchange", err);
    if (st == YARD_OK)
        st = check_parts(b->expert_x, c->dispatch_bytes, b, err);
    return st == YARD_OK ? check_parts(b->y, c->combine_bytes, b, err) : st;
}
