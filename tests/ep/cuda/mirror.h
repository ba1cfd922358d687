/* Lets the conformance suite of the CPU backend (ep_case.h) run on a GPU: the same four calls with
 * host buffers, which are copied to the device and back. Include before ep_case.h. */
#ifndef YARD_TESTS_EP_MIRROR_H
#define YARD_TESTS_EP_MIRROR_H

#include "ep/cuda/ranks.h"

typedef struct mirror {
    yard_ep_round *round;
    void *x, *expert_x, *expert_y, *y;
    float *x_scale, *weight, *expert_x_scale;
    int32_t *expert, *n_tokens, *count, *row_index;
    uint8_t *landed; /* host: rows in place as they are now */
} mirror;

static struct {
    yard_ep_config config;
    yard_ep_capacity capacity;
    uint32_t n_local, n_groups, skew; /* skew: bytes by which buffers lie askew */
    cudaStream_t stream;
    mirror rounds[4];
} mirrors;

static inline void *mirror_alloc(size_t n_bytes)
{
    uint8_t *p = NULL;

    CHECK_CUDA(cudaMalloc((void **)&p, n_bytes + 64));
    CHECK_CUDA(cudaMemset(p, 0x77, n_bytes + 64));
    CHECK_CUDA(cudaDeviceSynchronize()); /* the legacy stream, which ours does not wait for */
    return p + mirrors.skew;
}

static inline void mirror_free(void *p)
{
    CHECK_CUDA(cudaFree((uint8_t *)p - mirrors.skew));
}

static inline void mirror_open(const yard_ep_config *c, yard_ep *ep, uint32_t skew)
{
    const size_t t = c->max_tokens, h = c->hidden, k = c->top_k;

    memset(&mirrors, 0, sizeof(mirrors));
    mirrors.config = *c;
    mirrors.n_local = c->n_experts / yard_ep_size(ep);
    mirrors.n_groups = yard_group_count(c->hidden);
    mirrors.skew = skew;
    CHECK(yard_ep_capacity_of(c, yard_ep_size(ep), &mirrors.capacity, NULL) == YARD_OK);
    CHECK_CUDA(cudaStreamCreateWithFlags(&mirrors.stream, cudaStreamNonBlocking));
    for (uint32_t i = 0; i < c->n_rounds && i < 4; i++)
        mirrors.rounds[i] = (mirror){
            .round = yard_ep_get_round(ep, i),
            .x = mirror_alloc(t * h * 4),
            .x_scale = mirror_alloc(t * mirrors.n_groups * 4),
            .expert = mirror_alloc(t * k * 4),
            .weight = mirror_alloc(t * k * 4),
            .n_tokens = mirror_alloc(4),
            .expert_x = mirror_alloc(mirrors.capacity.expert_x_rows * h * 4),
            .expert_x_scale = mirror_alloc(mirrors.capacity.expert_x_rows * mirrors.n_groups * 4),
            .count = mirror_alloc(mirrors.n_local * 4),
            .row_index = mirror_alloc(mirrors.capacity.expert_y_rows * 4),
            .expert_y = mirror_alloc(mirrors.capacity.expert_y_rows * h * 4),
            .y = mirror_alloc(t * h * 4),
        };
    for (uint32_t i = 0; i < c->n_rounds && i < 4; i++) {
        size_t pitch_bytes = 0, scale_at_bytes = 0;

        if (yard_ep_expert_x(mirrors.rounds[i].round, &pitch_bytes, &scale_at_bytes))
            mirrors.rounds[i].landed = malloc(mirrors.capacity.expert_x_rows * pitch_bytes);
    }
}

static inline void mirror_close(void)
{
    for (uint32_t i = 0; i < mirrors.config.n_rounds && i < 4; i++) {
        const mirror *m = &mirrors.rounds[i];
        void *const all[] = { m->x,        m->x_scale,        m->expert, m->weight,
                              m->n_tokens, m->expert_x,       m->count,  m->row_index,
                              m->expert_y, m->expert_x_scale, m->y };
        for (size_t j = 0; j < sizeof(all) / sizeof(all[0]); j++)
            mirror_free(all[j]);
        free(m->landed);
    }
    CHECK_CUDA(cudaStreamDestroy(mirrors.stream));
}

static inline mirror *mirror_of(const yard_ep_round *round)
{
    for (uint32_t i = 0; i < 4; i++)
        if (mirrors.rounds[i].round == round)
            return &mirrors.rounds[i];
    CHECK(false);
    return NULL;
}

static inline void to_device(void *to, const void *from, size_t n_bytes)
{
    CHECK_CUDA(cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyHostToDevice, mirrors.stream));
}

static inline void to_host(void *to, const void *from, size_t n_bytes)
{
    CHECK_CUDA(cudaMemcpyAsync(to, from, n_bytes, cudaMemcpyDeviceToHost, mirrors.stream));
    CHECK_CUDA(cudaStreamSynchronize(mirrors.stream));
}

static inline size_t mirror_bytes(yard_ep_dtype dtype)
{
    return dtype == YARD_EP_F32 ? 4 : dtype == YARD_EP_BF16 ? 2 : 1;
}

static inline yard_status mirror_dispatch_send(yard_ep_round *round, const void *x,
                                               const float *x_scale, const int32_t *expert,
                                               const float *weight, const int32_t *n_tokens,
                                               yard_stream stream)
{
    const yard_ep_config *c = &mirrors.config;
    const size_t t = c->max_tokens;
    mirror *m = mirror_of(round);
    yard_status st;

    (void)stream;
    to_device(m->x, x, t * c->hidden * mirror_bytes(c->input));
    if (x_scale)
        to_device(m->x_scale, x_scale, t * mirrors.n_groups * 4);
    to_device(m->expert, expert, t * c->top_k * 4);
    to_device(m->weight, weight, t * c->top_k * 4);
    to_device(m->n_tokens, n_tokens, 4);
    st = yard_ep_dispatch_send(round, m->x, x_scale ? m->x_scale : NULL, m->expert, m->weight,
                               m->n_tokens, (yard_stream)mirrors.stream);
    /* free when the stream passes the call */
    CHECK_CUDA(cudaMemsetAsync(m->x, 0xee, t * c->hidden, mirrors.stream));
    CHECK_CUDA(cudaMemsetAsync(m->expert, 0xee, t * c->top_k * 4, mirrors.stream));
    CHECK_CUDA(cudaMemsetAsync(m->weight, 0xee, t * c->top_k * 4, mirrors.stream));
    CHECK_CUDA(cudaMemsetAsync(m->n_tokens, 0xee, 4, mirrors.stream));
    return st;
}

static inline yard_status mirror_dispatch_recv(yard_ep_round *round, void *expert_x,
                                               float *expert_x_scale, int32_t *count,
                                               int32_t *row_index, yard_stream stream)
{
    const yard_ep_config *c = &mirrors.config;
    const size_t rows = mirrors.capacity.expert_x_rows;
    mirror *m = mirror_of(round);
    yard_status st;

    (void)stream;
    if (expert_x)
        to_device(m->expert_x, expert_x, rows * c->hidden * mirror_bytes(c->dispatch));
    st = yard_ep_dispatch_recv(round, expert_x ? m->expert_x : NULL,
                               expert_x_scale ? m->expert_x_scale : NULL, m->count, m->row_index,
                               (yard_stream)mirrors.stream);
    if (st != YARD_OK)
        return st;
    if (expert_x)
        to_host(expert_x, m->expert_x, rows * c->hidden * mirror_bytes(c->dispatch));
    if (expert_x_scale)
        to_host(expert_x_scale, m->expert_x_scale, rows * mirrors.n_groups * 4);
    to_host(count, m->count, mirrors.n_local * 4);
    to_host(row_index, m->row_index, mirrors.capacity.expert_y_rows * 4);
    return yard_ep_poll(round->ep);
}

static inline const void *mirror_expert_x(const yard_ep_round *round, size_t *pitch_bytes,
                                          size_t *scale_at_bytes)
{
    const void *landed = yard_ep_expert_x(round, pitch_bytes, scale_at_bytes);
    const mirror *m = mirror_of(round);

    if (landed)
        to_host(m->landed, landed, mirrors.capacity.expert_x_rows * *pitch_bytes);
    return landed ? m->landed : NULL;
}

static inline yard_status mirror_combine_send(yard_ep_round *round, const void *expert_y,
                                              yard_stream stream)
{
    const yard_ep_config *c = &mirrors.config;
    const size_t n_bytes = mirrors.capacity.expert_y_rows * c->hidden * mirror_bytes(c->combine);
    mirror *m = mirror_of(round);
    yard_status st;

    (void)stream;
    to_device(m->expert_y, expert_y, n_bytes);
    st = yard_ep_combine_send(round, m->expert_y, (yard_stream)mirrors.stream);
    CHECK_CUDA(cudaMemsetAsync(m->expert_y, 0xee, n_bytes, mirrors.stream));
    return st;
}

static inline yard_status mirror_combine_recv(yard_ep_round *round, void *y, yard_stream stream)
{
    const yard_ep_config *c = &mirrors.config;
    const size_t n_bytes = (size_t)c->max_tokens * c->hidden * mirror_bytes(c->output);
    mirror *m = mirror_of(round);
    yard_status st;

    (void)stream;
    to_device(m->y, y, n_bytes);
    st = yard_ep_combine_recv(round, m->y, (yard_stream)mirrors.stream);
    if (st == YARD_OK)
        to_host(y, m->y, n_bytes);
    return st == YARD_OK ? yard_ep_poll(round->ep) : st;
}

#define yard_ep_dispatch_send mirror_dispatch_send
#define yard_ep_dispatch_recv mirror_dispatch_recv
#define yard_ep_expert_x mirror_expert_x
#define yard_ep_combine_send mirror_combine_send
#define yard_ep_combine_recv mirror_combine_recv

#endif
