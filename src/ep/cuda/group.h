/* Host side of ep/cuda: what a group keeps. */
#ifndef YARD_EP_CUDA_GROUP_H
#define YARD_EP_CUDA_GROUP_H

#include "ep/cuda/cuda.h"

#include "ep/ep_impl.h"

typedef struct ep_cuda_round {
    ep_cuda_args args; /* what is the same in every call */
    /* Where the last send stands in a graph under capture: a receive right behind it starts early.
     */
    cudaGraphNode_t send_node;
    unsigned long long capture;
    bool own_apart; /* of the last combine_send */
} ep_cuda_round;

typedef struct ep_cuda {
    int device;
    uint32_t n_sms;
    bool plain_sends;               /* tests: sends start when their predecessor has ended */
    bool puts;                      /* some peers are put to */
    uint32_t n_put;                 /* how many */
    bool flags;                     /* rows with flags instead of self-proving ones, but */
    uint32_t few_tokens;            /* where limits are not above this; 0: nowhere */
    ep_cuda_round *rounds;          /* [n_rounds] */
    void *memory;                   /* device memory of all rounds */
    ep_cuda_error *error;           /* host memory that kernels write */
    const ep_cuda_kernels *kernels; /* compiled for the transport */
    int (*address_range)(unsigned long long *base, size_t *n_bytes, unsigned long long p);
} ep_cuda;

static inline ep_cuda_divisor ep_cuda_divide_by(uint32_t d)
{
    return (ep_cuda_divisor){ d > 1 ? UINT32_MAX / d + 1 : 0 };
}

static inline ep_cuda_round *ep_cuda_round_of(const yard_ep_round *round)
{
    const ep_cuda *cu = round->ep->impl;

    return &cu->rounds[round - round->ep->rounds];
}

yard_status yard_ep_cuda_dispatch_send(yard_ep_round *round, const void *x, const float *x_scale,
                                       const int32_t *expert, const float *weight,
                                       const int32_t *n_tokens, yard_stream stream);
yard_status yard_ep_cuda_dispatch_recv(yard_ep_round *round, void *expert_x, float *expert_x_scale,
                                       int32_t *expert_count, int32_t *row_index,
                                       yard_stream stream);
yard_status yard_ep_cuda_combine_send(yard_ep_round *round, const void *expert_y,
                                      yard_stream stream);
yard_status yard_ep_cuda_combine_recv(yard_ep_round *round, void *y, yard_stream stream);

#endif
