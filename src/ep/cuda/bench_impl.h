/* What the files of measurements on a device share. */
#ifndef YARD_EP_CUDA_BENCH_IMPL_H
#define YARD_EP_CUDA_BENCH_IMPL_H

#include "ep/cuda/group.h"
#include "ep/cuda/nccl.h"
#include "ep/ep.h"

enum { YARD_EP_BENCH_MAX_PAIRS = 64 };

/* Of a pair. A call may have a mark in front of it and one behind it. */
typedef enum call { DISPATCH_SEND, DISPATCH_RECV, COMBINE_SEND, COMBINE_RECV, N_CALLS } call;

static inline uint32_t begin_of(call which)
{
    return 2 * which;
}

static inline uint32_t end_of(call which)
{
    return 2 * which + 1;
}

struct yard_ep_bench {
    /* Padded all-to-alls: every rank gets n_bytes of every rank. NULL: ep does the exchanges. */
    yard_status (*all_to_all)(yard_ep_bench *b, const uint8_t *from, uint8_t *to, size_t n_bytes);
    yard_ep_padded_config padded;
    ep_cuda_nccl *nccl;          /* by NCCL, or */
    const yard_nvshmem *nvshmem; /* by NVSHMEM, whose heap then holds x, expert_x, expert_y, y */
    yard_ep *ep;
    yard_ep_round *round;
    yard_ep_config config;
    yard_ep_capacity capacity;
    uint32_t n_sets, n_tokens, n_groups, n_local;
    size_t x_row_bytes;
    cudaStream_t stream;
    cudaEvent_t begun, ended, mark[YARD_EP_BENCH_MAX_PAIRS][2 * N_CALLS];
    uint8_t *x, *expert_x, *expert_y, *y, *cold;
    float *x_scale, *weight, *expert_x_scale;
    int32_t *expert, *count, *row_index, *device_tokens;
};

yard_status yard_ep_bench_failed(cudaError_t rc, const char *what, yard_error *err);
yard_status yard_ep_bench_make_events(yard_ep_bench *b, yard_error *err);
/* Memory of the device; to: where its address goes; from: what it begins with, or NULL. */
cudaError_t yard_ep_bench_get(void *to, size_t n_bytes, const void *from);
yard_status yard_ep_bench_enqueue_pair(yard_ep_bench *b, yard_error *err);
void yard_ep_bench_padded_close(yard_ep_bench *b);

#endif
