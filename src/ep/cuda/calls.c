/* The four calls: grids, alignment, and whether a receive may start before its send has ended. */
#include "ep/cuda/group.h"

enum {
    FEW_TOKENS = 16,        /* up to here several blocks share a row */
    MIN_THREADS = 128,      /* also of short rows: a block polls and counts, too */
    RECV_MIN_THREADS = 256, /* eight warps find the rows of eight choices side by side */
    SEND_BLOCKS_PER_SM = 2, /* launch bounds of the send kernels */
    MANY_TOKENS = 128       /* above, combine keeps a rank's own share apart */
};

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static bool is_vector(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

static uint32_t threads_for(uint32_t n_vectors)
{
    const uint32_t n = least((uint32_t)yard_align_up(n_vectors, 32), EP_CUDA_THREADS);

    return n < MIN_THREADS ? MIN_THREADS : n;
}

/* Cuts rows of n_vectors into parts of whole warps, a thread a vector. */
static void cut_rows(ep_cuda_args *a, ep_cuda_launch *l, uint32_t n_vectors, uint32_t n_parts,
                     uint32_t max_threads)
{
    const uint32_t n_least = yard_ceil_div(n_vectors, max_threads);

    if (n_parts < n_least)
        n_parts = n_least;
    a->part_vectors = (uint32_t)yard_align_up(yard_ceil_div(n_vectors, n_parts), 32);
    l->n_parts = yard_ceil_div(n_vectors, a->part_vectors);
    l->n_threads = threads_for(a->part_vectors);
}

/* True: this exchange's rows of dispatch have flags. */
static bool apply_limit(const yard_ep_round *round, ep_cuda_args *a)
{
    const ep_cuda *cu = round->ep->impl;

    if (round->limit) {
        a->bound = round->limit;
        a->by_bound = ep_cuda_divide_by(a->bound);
    }
    if (!cu->flags || a->bound > cu->few_tokens)
        return cu->flags;
    a->at_rows = a->at_few_rows;
    a->row_slots = cu->few_tokens;
    a->in_flagged_group = true;
    return false;
}

/* Rows with flags, or in place, and what is put, are made and copied whole. */
static void take_rows_whole(ep_cuda_args *a, ep_cuda_launch *l, uint32_t n_vectors)
{
    a->part_vectors = n_vectors;
    l->n_parts = 1;
    l->n_threads = threads_for(n_vectors);
}

static uint32_t own_tokens(const ep_cuda_args *a)
{
    return (a->bound + a->tp - 1 - a->replica) / a->tp;
}

/* Blocks in x of a grid of at most n_most. */
static uint32_t blocks_of_rows(const ep_cuda_launch *l, uint32_t n_most)
{
    return n_most > l->n_parts ? n_most / l->n_parts : 1;
}

/* Of a send: one a row, or as many as the multiprocessors take that it may fill. */
static uint32_t send_blocks(const yard_ep *ep, const ep_cuda_launch *l, uint32_t n_rows,
                            uint32_t blocks_per_sm)
{
    const ep_cuda *cu = ep->impl;
    const uint32_t n_sms = ep->config.send_sms ? ep->config.send_sms : cu->n_sms;

    n_rows = least(n_rows, blocks_of_rows(l, n_sms * blocks_per_sm));
    return n_rows ? n_rows : 1; /* packets go out in any case */
}

/* Rows from p on to the end of its allocation; 0 when the driver does not know it. */
static uint32_t readable_rows(const ep_cuda *cu, const void *p, size_t row_bytes)
{
    const unsigned long long at = (uintptr_t)p;
    unsigned long long base = 0;
    size_t n_bytes = 0;

    if (!p || cu->address_range(&base, &n_bytes, at) != 0 || at < base)
        return 0;
    n_bytes = (base + n_bytes - at) / row_bytes;
    return n_bytes < UINT32_MAX ? (uint32_t)n_bytes : UINT32_MAX;
}

/* ---- what stands before a call in its stream ------------------------------------------------- */

typedef struct position {
    bool captured;              /* the stream records a graph */
    unsigned long long capture; /* which one */
    cudaGraphNode_t node;       /* the only predecessor, if it is a kernel; else NULL */
} position;

static position position_of(cudaStream_t stream)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaGraphEdgeData *edges = NULL;
    const cudaGraphNode_t *before = NULL;
    enum cudaGraphNodeType type;
    cudaGraph_t graph = NULL;
    position p = { 0 };
    size_t n = 0;

    if (cudaStreamGetCaptureInfo(stream, &status, &p.capture, &graph, &before, &edges, &n) !=
        cudaSuccess) {
        cudaGetLastError();
        p.captured = true; /* unknown: nothing overlaps */
        return p;
    }
    p.captured = status == cudaStreamCaptureStatusActive;
    if (p.captured && n == 1 && cudaGraphNodeGetType(before[0], &type) == cudaSuccess &&
        type == cudaGraphNodeTypeKernel)
        p.node = before[0];
    return p;
}

/* Sends wait for their predecessor before they touch anything. Only in graphs, and only behind a
 * kernel: what else may stand before a send in a stream is not waited for by a kernel that was
 * launched early. */
static bool send_overlaps(const ep_cuda *cu, cudaStream_t stream)
{
    return !cu->plain_sends && position_of(stream).node != NULL;
}

static void note_send(ep_cuda_round *r, cudaStream_t stream)
{
    const position p = position_of(stream);

    r->send_node = p.captured ? p.node : NULL;
    r->capture = p.capture;
}

/* In a stream that runs at once nobody knows what will stand between; a graph can be asked. */
static bool follows_send(const ep_cuda_round *r, cudaStream_t stream)
{
    const position p = position_of(stream);

    return p.captured && p.node && p.node == r->send_node && p.capture == r->capture;
}

static yard_status launched(yard_ep *ep, const char *call, cudaError_t rc)
{
    if (rc == cudaSuccess)
        return YARD_OK;
    ep->status = yard_fail(&ep->err, YARD_EDEVICE, "rank %u, %s: launch: %s", ep->rank, call,
                           cudaGetErrorString(rc));
    return ep->status;
}

/* ---- dispatch ------------------------------------------------------------------------------- */

static ep_cuda_input input_of(const yard_ep_config *c)
{
    if (c->dispatch != YARD_EP_FP8 || c->input == YARD_EP_FP8)
        return EP_INPUT_RAW;
    return c->input == YARD_EP_BF16 ? EP_INPUT_BF16 : EP_INPUT_F32;
}

static yard_status check_send(yard_ep *ep, const void *x, const float *x_scale,
                              const int32_t *n_tokens)
{
    if (!n_tokens)
        return yard_fail(&ep->err, YARD_EINVAL,
                         "dispatch_send: n_tokens: want a pointer, got NULL");
    if (x && (x_scale != NULL) != (ep->config.input == YARD_EP_FP8))
        return yard_fail(&ep->err, YARD_EINVAL,
                         "dispatch_send: x_scale: want it exactly when input is FP8");
    return YARD_OK;
}

yard_status yard_ep_cuda_dispatch_send(yard_ep_round *round, const void *x, const float *x_scale,
                                       const int32_t *expert, const float *weight,
                                       const int32_t *n_tokens, yard_stream stream)
{
    yard_ep *ep = round->ep;
    const ep_cuda *cu = ep->impl;
    const ep_cuda_input input = input_of(&ep->config);
    ep_cuda_round *r = ep_cuda_round_of(round);
    ep_cuda_launch l = { .stream = (cudaStream_t)stream };
    ep_cuda_args a = r->args;
    const bool flags = apply_limit(round, &a);
    const size_t x_bytes = input == EP_INPUT_RAW    ? a.payload_bytes
                           : input == EP_INPUT_BF16 ? a.hidden * 2u
                                                    : a.hidden * 4u;
    yard_status st = check_send(ep, x, x_scale, n_tokens);

    if (st != YARD_OK)
        return st;
    a.x = x;
    a.x_scale = x_scale;
    a.expert = expert;
    a.weight = weight;
    a.n_tokens = n_tokens;
    a.wide = is_vector(x) && (input == EP_INPUT_RAW ? a.payload_bytes % 16 : a.hidden % 16) == 0;
    a.n_readable = least(readable_rows(cu, x, x_bytes),
                         least(readable_rows(cu, expert, a.top_k * sizeof(*expert)),
                               readable_rows(cu, weight, a.top_k * sizeof(*weight))));
    if (flags || cu->puts)
        take_rows_whole(&a, &l, a.n_vectors);
    else
        cut_rows(&a, &l, a.n_vectors, a.bound <= FEW_TOKENS ? 2 : 1, EP_CUDA_THREADS);
    l.n_threads += 32; /* a warp for the header or the flags */
    l.n_blocks = send_blocks(ep, &l, own_tokens(&a), SEND_BLOCKS_PER_SM);
    if (flags)
        l.n_blocks = least(l.n_blocks, cu->n_sms); /* room for the receiver beside them */
    a.n_heads = least(cu->n_put, l.n_blocks);
    l.n_blocks += a.n_heads;
    l.overlap = send_overlaps(cu, l.stream);
    st = launched(ep, "dispatch_send", cu->kernels->dispatch_send(&a, input, flags, &l));
    if (st != YARD_OK)
        return st;
    note_send(r, l.stream);
    round->state = ROUND_DISPATCH_SENT;
    return YARD_OK;
}

static cudaError_t launch_flagged(const ep_cuda *cu, ep_cuda_args *a, ep_cuda_launch *l)
{
    cudaError_t rc;

    l->n_threads = EP_CUDA_LAYOUT_THREADS;
    l->n_blocks = a->n_local + 1;
    l->n_parts = 1;
    rc = cu->kernels->layout(a, l);
    if (rc != cudaSuccess || a->in_place)
        return rc;
    take_rows_whole(a, l, a->n_vectors);
    /* No more than find room beside a send: the others would begin once it has ended. */
    l->n_blocks = least(a->dp * a->bound, cu->n_sms * 2);
    l->overlap = true; /* nothing stands between */
    return cu->kernels->fan_out(a, l);
}

yard_status yard_ep_cuda_dispatch_recv(yard_ep_round *round, void *expert_x, float *expert_x_scale,
                                       int32_t *expert_count, int32_t *row_index,
                                       yard_stream stream)
{
    yard_ep *ep = round->ep;
    const ep_cuda *cu = ep->impl;
    const ep_cuda_round *r = ep_cuda_round_of(round);
    ep_cuda_launch l = { .stream = (cudaStream_t)stream };
    ep_cuda_args a = r->args;
    const bool flags = apply_limit(round, &a);
    cudaError_t rc;

    a.expert_x = expert_x;
    a.expert_x_scale = expert_x_scale;
    a.expert_count = expert_count;
    a.row_index = row_index;
    a.wide = is_vector(expert_x) && is_vector(expert_x_scale) && a.payload_bytes % 16 == 0;
    a.early = l.overlap = follows_send(r, l.stream);
    a.lets_next_start = ep->config.mode == YARD_EP_PARTIAL;
    if (flags) {
        rc = launch_flagged(cu, &a, &l);
    } else {
        cut_rows(&a, &l, a.n_vectors, a.bound <= FEW_TOKENS ? 2 : 1, EP_CUDA_THREADS);
        if (l.n_threads < RECV_MIN_THREADS)
            l.n_threads = RECV_MIN_THREADS;
        l.n_blocks = a.dp * a.bound + 1;
        l.shared_bytes = (size_t)a.dp * a.bound * a.n_id_packets * 8;
        rc = cu->kernels->dispatch_recv(&a, &l);
    }
    if (launched(ep, "dispatch_recv", rc) != YARD_OK)
        return ep->status;
    round->state = ROUND_DISPATCHED;
    return YARD_OK;
}

/* ---- combine -------------------------------------------------------------------------------- */

static uint32_t combine_parts(const ep_cuda_args *a)
{
    return a->bound <= FEW_TOKENS ? 4 : 2;
}

/* expert_y lies as kernels for common shapes want it, if a->wide. */
static bool keeps_own_apart(const yard_ep *ep, const ep_cuda_args *a)
{
    const yard_ep_config *c = &ep->config;
    const ep_cuda *cu = ep->impl;

    return a->bound > MANY_TOKENS && !cu->puts && c->mode == YARD_EP_PARTIAL &&
           c->combine == YARD_EP_BF16 && a->wide && a->tp == 1 && a->top_k == 8 && a->n_ranks > 1 &&
           a->n_ranks <= EP_CUDA_APART_RANKS;
}

/* Blocks in x of the send beside a receive that makes the own share. */
static uint32_t narrow_blocks(const yard_ep *ep, const ep_cuda_launch *l)
{
    const ep_cuda *cu = ep->impl;
    const uint32_t n_sms = ep->config.send_sms ? ep->config.send_sms : cu->n_sms;

    return least(blocks_of_rows(l, cu->n_sms * EP_CUDA_HALF_BLOCKS / 3),
                 blocks_of_rows(l, n_sms * EP_CUDA_HALF_BLOCKS));
}

/* Makes the captured send in front of a receive one of others' tokens only, and tells the receive
 * what it knew. False: it stays as it is. */
static bool narrow_send(const yard_ep *ep, const ep_cuda_round *r, const ep_cuda_launch *l,
                        ep_cuda_args *a)
{
    struct cudaKernelNodeParams node = { 0 };
    ep_cuda_args send;
    void *args[] = { &send };
    cudaError_t rc = cudaGraphKernelNodeGetParams(r->send_node, &node);

    if (rc == cudaSuccess) {
        send = *(const ep_cuda_args *)node.kernelParams[0];
        send.n_served = send.dp - 1;
        send.by_served = ep_cuda_divide_by(send.n_served);
        node.kernelParams = args;
        node.gridDim.x = narrow_blocks(ep, l);
        rc = cudaGraphKernelNodeSetParams(r->send_node, &node);
    }
    if (rc != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    a->expert_y = send.expert_y;
    return true;
}

yard_status yard_ep_cuda_combine_send(yard_ep_round *round, const void *expert_y,
                                      yard_stream stream)
{
    yard_ep *ep = round->ep;
    const yard_ep_config *c = &ep->config;
    const ep_cuda *cu = ep->impl;
    ep_cuda_round *r = ep_cuda_round_of(round);
    ep_cuda_launch l = { .stream = (cudaStream_t)stream };
    ep_cuda_args a = r->args;
    yard_status st;

    apply_limit(round, &a);
    a.expert_y = expert_y;
    a.wide = is_vector(expert_y) && a.result_bytes % 16 == 0;
    a.own_apart = r->own_apart = keeps_own_apart(ep, &a);
    a.n_served = a.dp;
    a.by_served = a.by_dp;
    l.half_flight = a.dp * a.bound > cu->n_sms;
    if (cu->puts)
        take_rows_whole(&a, &l, a.n_result_vectors);
    else
        cut_rows(&a, &l, a.n_result_vectors, combine_parts(&a),
                 l.half_flight ? EP_CUDA_THREADS / 2 : EP_CUDA_THREADS);
    l.n_blocks = send_blocks(ep, &l, a.dp * a.bound,
                             l.half_flight && !cu->puts ? EP_CUDA_HALF_BLOCKS : SEND_BLOCKS_PER_SM);
    l.overlap = send_overlaps(cu, l.stream);
    st = launched(
        ep, "combine_send",
        cu->kernels->combine_send(&a, c->combine == YARD_EP_BF16, c->mode == YARD_EP_EXACT, &l));
    if (st != YARD_OK)
        return st;
    note_send(r, l.stream);
    round->state = ROUND_COMBINE_SENT;
    return YARD_OK;
}

/* The receive's grid fills the multiprocessors, or what a send beside it leaves of them. */
static void share_rows_apart(const yard_ep *ep, const ep_cuda_round *r, ep_cuda_args *a,
                             ep_cuda_launch *l)
{
    const ep_cuda *cu = ep->impl;
    uint32_t n;

    cut_rows(a, l, a->n_result_vectors, combine_parts(a), EP_CUDA_THREADS / 2);
    a->early = a->early && narrow_send(ep, r, l, a);
    n = blocks_of_rows(l, cu->n_sms * EP_CUDA_APART_BLOCKS(a->n_ranks - 1));
    if (a->early)
        n -= narrow_blocks(ep, l);
    l->n_blocks = least(own_tokens(a), n - 1) + 1;
}

yard_status yard_ep_cuda_combine_recv(yard_ep_round *round, void *y, yard_stream stream)
{
    yard_ep *ep = round->ep;
    const yard_ep_config *c = &ep->config;
    const ep_cuda *cu = ep->impl;
    const ep_cuda_round *r = ep_cuda_round_of(round);
    ep_cuda_launch l = { .stream = (cudaStream_t)stream };
    ep_cuda_args a = r->args;
    yard_status st;

    apply_limit(round, &a);
    a.y = y;
    a.wide = is_vector(y) && a.hidden % 8 == 0;
    a.early = follows_send(r, l.stream);
    a.lets_next_start = ep->config.mode == YARD_EP_PARTIAL;
    a.own_apart = r->own_apart;
    if (a.own_apart) {
        share_rows_apart(ep, r, &a, &l);
    } else {
        cut_rows(&a, &l, a.n_result_vectors, combine_parts(&a), EP_CUDA_THREADS);
        /* One wave: a block that waits for a sibling's row never keeps out one that makes a row. */
        l.n_blocks = least(own_tokens(&a), blocks_of_rows(&l, cu->n_sms * 2 - l.n_parts)) + 1;
    }
    l.overlap = a.early;
    st = launched(
        ep, "combine_recv",
        cu->kernels->combine_recv(&a, c->combine == YARD_EP_BF16, c->mode == YARD_EP_EXACT, &l));
    if (st != YARD_OK)
        return st;
    round->state = ROUND_IDLE;
    return YARD_OK;
}
