/* Times exchanges on a device. The ranks need no barrier: an exchange waits for all of them. */
#include <stdio.h>
#include <stdlib.h>

#include "ep/cuda/bench.h"
#include "ep/cuda/bench_impl.h"

enum { COLD_BYTES = 192 << 20, WARM_UP = 5 };

/* Where samples go, [n_samples] each. */
typedef struct samples {
    double *pair, *dispatch, *combine;
} samples;

/* ---- devices ------------------------------------------------------------------------------- */

yard_status yard_ep_bench_failed(cudaError_t rc, const char *what, yard_error *err)
{
    if (rc == cudaSuccess)
        return YARD_OK;
    return yard_fail(err, rc == cudaErrorMemoryAllocation ? YARD_ENOMEM : YARD_EDEVICE,
                     "bench on cuda: %s: %s", what, cudaGetErrorString(rc));
}

yard_status yard_ep_device_count(uint32_t *out, yard_error *err)
{
    int n = 0;
    const cudaError_t rc = cudaGetDeviceCount(&n);

    if (rc != cudaSuccess || n == 0)
        return yard_fail(err, YARD_ENOTSUP, "no GPU here: %s", cudaGetErrorString(rc));
    *out = (uint32_t)n;
    return YARD_OK;
}

yard_status yard_ep_device_use(uint32_t device, char *name, char *versions, yard_error *err)
{
    struct cudaDeviceProp p;
    int driver = 0, runtime = 0;
    cudaError_t rc = cudaSetDevice((int)device);

    if (rc == cudaSuccess)
        rc = cudaGetDeviceProperties(&p, (int)device);
    if (rc == cudaSuccess)
        rc = cudaDriverGetVersion(&driver);
    if (rc == cudaSuccess)
        rc = cudaRuntimeGetVersion(&runtime);
    if (rc != cudaSuccess)
        return yard_fail(err, YARD_EDEVICE, "device %u: %s", device, cudaGetErrorString(rc));
    if (name)
        snprintf(name, 64, "%.63s", p.name);
    if (versions)
        snprintf(versions, 64, "CUDA driver %d.%d, runtime %d.%d", driver / 1000,
                 driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return YARD_OK;
}

/* ---- memory -------------------------------------------------------------------------------- */

cudaError_t yard_ep_bench_get(void *to, size_t n_bytes, const void *from)
{
    cudaError_t rc = cudaMalloc((void **)to, n_bytes ? n_bytes : 1);

    if (rc == cudaSuccess && from)
        rc = cudaMemcpy(*(void **)to, from, n_bytes, cudaMemcpyHostToDevice);
    return rc;
}

static yard_status get_memory(yard_ep_bench *b, const yard_ep_bench_inputs *in, yard_error *err)
{
    const yard_ep_config *c = &b->config;
    const size_t t = (size_t)in->n_sets * in->n_tokens, rows = b->capacity.expert_x_rows;
    const size_t out_bytes = c->output == YARD_EP_BF16 ? 2 : 4;
    const int32_t n_tokens = (int32_t)in->n_tokens;
    cudaError_t rc = yard_ep_bench_get(&b->x, t * b->x_row_bytes, in->x);

    if (rc == cudaSuccess && in->x_scale)
        rc = yard_ep_bench_get(&b->x_scale, t * b->n_groups * sizeof(float), in->x_scale);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&b->expert, t * c->top_k * sizeof(int32_t), in->expert);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&b->weight, t * c->top_k * sizeof(float), in->weight);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&b->expert_y,
                               b->capacity.expert_y_rows * c->hidden *
                                   (c->combine == YARD_EP_BF16 ? 2 : 4),
                               in->expert_y);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&b->device_tokens, sizeof(n_tokens), &n_tokens);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&b->expert_x, rows * b->ep->payload_bytes, NULL);
    if (rc == cudaSuccess && c->dispatch == YARD_EP_FP8)
        rc = yard_ep_bench_get(&b->expert_x_scale, rows * b->n_groups * sizeof(float), NULL);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&b->count, b->n_local * sizeof(int32_t), NULL);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&b->row_index, b->capacity.expert_y_rows * sizeof(int32_t), NULL);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&b->y, (size_t)c->max_tokens * c->hidden * out_bytes, NULL);
    if (rc == cudaSuccess)
        rc = yard_ep_bench_get(&b->cold, COLD_BYTES, NULL);
    return yard_ep_bench_failed(rc, "memory", err);
}

yard_status yard_ep_bench_make_events(yard_ep_bench *b, yard_error *err)
{
    cudaError_t rc = cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking);

    if (rc == cudaSuccess)
        rc = cudaEventCreate(&b->begun);
    if (rc == cudaSuccess)
        rc = cudaEventCreate(&b->ended);
    for (uint32_t i = 0; i < YARD_EP_BENCH_MAX_PAIRS * 2 * N_CALLS && rc == cudaSuccess; i++)
        rc = cudaEventCreate(&b->mark[i / (2 * N_CALLS)][i % (2 * N_CALLS)]);
    return yard_ep_bench_failed(rc, "stream and events", err);
}

yard_status yard_ep_bench_create(yard_ep_bench **out, yard_ep *ep, const yard_ep_config *config,
                                 const yard_ep_bench_inputs *in, yard_error *err)
{
    yard_ep_bench *b = calloc(1, sizeof(*b));
    yard_status st;

    if (!b)
        return yard_fail(err, YARD_ENOMEM, "bench on cuda: no memory");
    b->ep = ep;
    b->config = *config;
    b->round = yard_ep_get_round(ep, 0);
    b->n_sets = in->n_sets;
    b->n_tokens = in->n_tokens;
    b->n_groups = yard_group_count(config->hidden);
    b->n_local = config->n_experts / yard_ep_size(ep);
    b->x_row_bytes = (size_t)config->hidden * (config->input == YARD_EP_F32    ? 4
                                               : config->input == YARD_EP_BF16 ? 2
                                                                               : 1);
    st = yard_ep_capacity_of(config, yard_ep_size(ep), &b->capacity, err);
    if (st == YARD_OK)
        st = get_memory(b, in, err);
    if (st == YARD_OK)
        st = yard_ep_bench_make_events(b, err);
    if (st != YARD_OK) {
        yard_ep_bench_destroy(b);
        return st;
    }
    *out = b;
    return YARD_OK;
}

void yard_ep_bench_destroy(yard_ep_bench *b)
{
    if (!b)
        return;
    cudaDeviceSynchronize();
    if (!b->ep)
        yard_ep_bench_padded_close(b);
    void *const memory[] = { b->x,      b->expert_x,       b->expert_y, b->y,
                             b->cold,   b->weight,         b->x_scale,  b->row_index,
                             b->expert, b->expert_x_scale, b->count,    b->device_tokens };
    for (size_t i = 0; i < sizeof(memory) / sizeof(memory[0]); i++)
        cudaFree(memory[i]);
    for (uint32_t i = 0; i < YARD_EP_BENCH_MAX_PAIRS * 2 * N_CALLS; i++)
        if (b->mark[i / (2 * N_CALLS)][i % (2 * N_CALLS)])
            cudaEventDestroy(b->mark[i / (2 * N_CALLS)][i % (2 * N_CALLS)]);
    if (b->begun)
        cudaEventDestroy(b->begun);
    if (b->ended)
        cudaEventDestroy(b->ended);
    if (b->stream)
        cudaStreamDestroy(b->stream);
    free(b);
}

/* ---- exchanges ----------------------------------------------------------------------------- */

/* One that is read after a replay, where there is one. */
static void set_mark(yard_ep_bench *b, const yard_ep_bench_plan *p, bool wanted, uint32_t pair,
                     uint32_t mark)
{
    if (wanted)
        cudaEventRecordWithFlags(b->mark[pair][mark], b->stream,
                                 p->launch == YARD_EP_BENCH_GRAPH ? cudaEventRecordExternal
                                                                  : cudaEventRecordDefault);
}

/* Something stands before each call, which then has marks of its own. */
static bool is_apart(const yard_ep_bench_plan *p)
{
    return p->cold || p->between_us;
}

static void fill_gap(yard_ep_bench *b, const yard_ep_bench_plan *p)
{
    if (p->cold)
        yard_ep_cuda_launch_sweep(b->cold, COLD_BYTES, b->stream);
    else if (p->between_us)
        yard_ep_cuda_launch_busy(p->between_us, b->stream);
}

static bool in_place(const yard_ep_bench *b)
{
    return b->config.layout == YARD_EP_FLAT_IN_PLACE;
}

static yard_status make_call(yard_ep_bench *b, uint32_t set, call which)
{
    const size_t first = (size_t)set * b->n_tokens, k = b->config.top_k;
    const yard_stream s = (yard_stream)b->stream;

    switch (which) {
    case DISPATCH_SEND:
        return yard_ep_dispatch_send(b->round, b->x + first * b->x_row_bytes,
                                     b->x_scale ? b->x_scale + first * b->n_groups : NULL,
                                     b->expert + first * k, b->weight + first * k, b->device_tokens,
                                     s);
    case DISPATCH_RECV:
        return yard_ep_dispatch_recv(b->round, in_place(b) ? NULL : b->expert_x,
                                     in_place(b) ? NULL : b->expert_x_scale, b->count, b->row_index,
                                     s);
    case COMBINE_SEND:
        return yard_ep_combine_send(b->round, b->expert_y, s);
    default:
        return yard_ep_combine_recv(b->round, b->y, s);
    }
}

/* All-to-alls stand where receives do. */
static yard_status make_all_to_all(yard_ep_bench *b, call which)
{
    if (which == DISPATCH_RECV)
        return b->all_to_all(b, b->x, b->expert_x, b->padded.dispatch_bytes);
    if (which == COMBINE_RECV)
        return b->all_to_all(b, b->expert_y, b->y, b->padded.combine_bytes);
    return YARD_OK;
}

static yard_status enqueue_pairs(yard_ep_bench *b, const yard_ep_bench_plan *p, uint32_t first,
                                 uint32_t n, yard_error *err)
{
    yard_status st = YARD_OK;

    for (uint32_t i = 0; i < n * N_CALLS && st == YARD_OK; i++) {
        const uint32_t pair = i / N_CALLS;
        const call which = (call)(i % N_CALLS);
        const bool begins = p->phases && which == DISPATCH_SEND;
        const bool ends = p->phases && (which == DISPATCH_RECV || which == COMBINE_RECV);

        fill_gap(b, p);
        set_mark(b, p, begins || is_apart(p), pair, begin_of(which));
        st = b->all_to_all ? make_all_to_all(b, which)
                           : make_call(b, (first + pair) % b->n_sets, which);
        set_mark(b, p, ends || is_apart(p), pair, end_of(which));
    }
    if (st != YARD_OK)
        return yard_fail(err, st, "%s", b->ep ? yard_ep_error(b->ep) : "an all-to-all failed");
    return yard_ep_bench_failed(cudaGetLastError(), "launch", err);
}

yard_status yard_ep_bench_enqueue_pair(yard_ep_bench *b, yard_error *err)
{
    const yard_ep_bench_plan plain = { 0 };

    return enqueue_pairs(b, &plain, 0, 1, err);
}

static yard_status record(yard_ep_bench *b, const yard_ep_bench_plan *p, cudaGraphExec_t *out,
                          yard_error *err)
{
    cudaGraph_t graph = NULL;
    cudaError_t rc = cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal);
    yard_status st;

    if (rc != cudaSuccess)
        return yard_ep_bench_failed(rc, "capture", err);
    st = enqueue_pairs(b, p, 0, p->n_pairs, err);
    rc = cudaStreamEndCapture(b->stream, &graph);
    if (st == YARD_OK && rc == cudaSuccess)
        rc = cudaGraphInstantiate(out, graph, 0);
    if (graph)
        cudaGraphDestroy(graph);
    return st == YARD_OK ? yard_ep_bench_failed(rc, "graph", err) : st;
}

/* Microseconds from one mark to another; a failure leaves *rc. */
static double between(const yard_ep_bench *b, uint32_t pair, uint32_t from, uint32_t to,
                      cudaError_t *rc)
{
    float ms = 0;

    if (*rc == cudaSuccess)
        *rc = cudaEventElapsedTime(&ms, b->mark[pair][from], b->mark[pair][to]);
    return (double)ms * 1e3;
}

/* A phase of a pair, whose send is the given call. */
static double phase_us(const yard_ep_bench *b, const yard_ep_bench_plan *p, uint32_t pair,
                       call send, cudaError_t *rc)
{
    const call recv = (call)(send + 1);
    double us;

    if (!is_apart(p)) /* combine begins where dispatch ended */
        return between(b, pair, send == DISPATCH_SEND ? begin_of(send) : end_of(DISPATCH_RECV),
                       end_of(recv), rc);
    us = between(b, pair, begin_of(recv), end_of(recv), rc);
    return p->receives ? us : us + between(b, pair, begin_of(send), end_of(send), rc);
}

/* Mean of the pairs of one replay; the first pair of it found the stream idle and does not count.
 * Where calls are apart, their sum is the pair. */
static cudaError_t read_marks(const yard_ep_bench *b, const yard_ep_bench_plan *p, uint32_t n_pairs,
                              samples s, uint32_t at)
{
    const uint32_t first = n_pairs > 1;
    cudaError_t rc = cudaSuccess;
    double d = 0, c = 0;

    for (uint32_t i = first; i < n_pairs; i++) {
        d += phase_us(b, p, i, DISPATCH_SEND, &rc) / (n_pairs - first);
        c += phase_us(b, p, i, COMBINE_SEND, &rc) / (n_pairs - first);
    }
    if (p->phases) {
        s.dispatch[at] = d;
        s.combine[at] = c;
    }
    if (is_apart(p))
        s.pair[at] = d + c;
    return rc;
}

static uint32_t agree(const yard_ep_bench_plan *p, float ms)
{
    const uint32_t n = p->agree ? p->agree(p->ctx, (double)ms * 1e3) : p->n_samples;

    return n < p->n_samples ? n : p->n_samples;
}

static yard_status time_graph(yard_ep_bench *b, const yard_ep_bench_plan *p, samples s,
                              yard_error *err)
{
    cudaGraphExec_t graph = NULL;
    yard_status st = record(b, p, &graph, err);
    uint32_t n = p->n_samples;
    cudaError_t rc = cudaSuccess;

    for (uint32_t i = 0; st == YARD_OK && rc == cudaSuccess && i < n + WARM_UP; i++) {
        const uint32_t at = i < WARM_UP ? 0 : i - WARM_UP;
        float ms = 0;

        cudaEventRecord(b->begun, b->stream);
        cudaGraphLaunch(graph, b->stream);
        cudaEventRecord(b->ended, b->stream);
        rc = cudaEventSynchronize(b->ended);
        if (rc == cudaSuccess)
            rc = cudaEventElapsedTime(&ms, b->begun, b->ended);
        s.pair[at] = (double)ms * 1e3 / p->n_pairs;
        if (rc == cudaSuccess && (p->phases || is_apart(p)))
            rc = read_marks(b, p, p->n_pairs, s, at);
        if (rc == cudaSuccess && i + 1 == WARM_UP)
            n = agree(p, ms);
    }
    if (graph)
        cudaGraphExecDestroy(graph);
    return st == YARD_OK ? yard_ep_bench_failed(rc, "replay", err) : st;
}

static yard_status time_single(yard_ep_bench *b, const yard_ep_bench_plan *p, samples s,
                               yard_error *err)
{
    uint32_t n = p->n_samples;
    cudaError_t rc = cudaSuccess;
    yard_status st = YARD_OK;

    for (uint32_t i = 0; st == YARD_OK && rc == cudaSuccess && i < n + WARM_UP; i++) {
        const uint32_t at = i < WARM_UP ? 0 : i - WARM_UP;
        float ms = 0;

        rc = cudaEventRecord(b->begun, b->stream);
        st = enqueue_pairs(b, p, 0, 1, err);
        cudaEventRecord(b->ended, b->stream);
        if (rc == cudaSuccess)
            rc = cudaStreamSynchronize(b->stream);
        if (rc == cudaSuccess)
            rc = cudaEventElapsedTime(&ms, b->begun, b->ended);
        s.pair[at] = (double)ms * 1e3;
        if (rc == cudaSuccess && (p->phases || is_apart(p)))
            rc = read_marks(b, p, 1, s, at);
        if (rc == cudaSuccess && i + 1 == WARM_UP)
            n = agree(p, ms);
    }
    return st == YARD_OK ? yard_ep_bench_failed(rc, "calls", err) : st;
}

yard_status yard_ep_bench_time(yard_ep_bench *b, const yard_ep_bench_plan *plan, double *pair,
                               double *dispatch_us, double *combine_us, yard_error *err)
{
    const samples s = { pair, dispatch_us, combine_us };
    yard_status st;

    if (plan->n_pairs > YARD_EP_BENCH_MAX_PAIRS)
        return yard_fail(err, YARD_EINVAL, "bench on cuda: want at most %d pairs, got %u",
                         YARD_EP_BENCH_MAX_PAIRS, plan->n_pairs);
    st = plan->launch == YARD_EP_BENCH_GRAPH ? time_graph(b, plan, s, err)
                                             : time_single(b, plan, s, err);
    if (st == YARD_OK && b->ep && yard_ep_poll(b->ep) != YARD_OK)
        st = yard_fail(err, yard_ep_poll(b->ep), "%s", yard_ep_error(b->ep));
    return st;
}

/* ---- results ------------------------------------------------------------------------------- */

static cudaError_t fetch(void *to, const void *from, size_t n_bytes)
{
    return to && from ? cudaMemcpy(to, from, n_bytes, cudaMemcpyDeviceToHost) : cudaSuccess;
}

/* Rows in place, before peers write them again. */
static void keep_rows(const yard_ep_bench *b)
{
    const size_t rows = b->capacity.expert_x_rows, scale_bytes = b->n_groups * sizeof(float);
    size_t pitch_bytes = 0, scale_at_bytes = 0;
    const uint8_t *landed = yard_ep_expert_x(b->round, &pitch_bytes, &scale_at_bytes);

    if (!landed)
        return;
    cudaMemcpy2DAsync(b->expert_x, b->ep->payload_bytes, landed, pitch_bytes, b->ep->payload_bytes,
                      rows, cudaMemcpyDeviceToDevice, b->stream);
    if (b->expert_x_scale)
        cudaMemcpy2DAsync(b->expert_x_scale, scale_bytes, landed + scale_at_bytes, pitch_bytes,
                          scale_bytes, rows, cudaMemcpyDeviceToDevice, b->stream);
}

yard_status yard_ep_bench_exchange(yard_ep_bench *b, uint32_t set_idx, void *expert_x,
                                   float *expert_x_scale, int32_t *expert_count, int32_t *row_index,
                                   void *y, yard_error *err)
{
    const yard_ep_config *c = &b->config;
    const size_t rows = b->capacity.expert_x_rows, x_bytes = rows * b->ep->payload_bytes;
    const size_t y_bytes = (size_t)b->n_tokens * c->hidden * (c->output == YARD_EP_BF16 ? 2 : 4);
    cudaError_t rc;
    yard_status st = YARD_OK;

    cudaMemsetAsync(b->expert_x, 0x55, x_bytes, b->stream);
    cudaMemsetAsync(b->count, 0x55, b->n_local * sizeof(int32_t), b->stream);
    cudaMemsetAsync(b->y, 0x55, y_bytes, b->stream);
    for (uint32_t i = 0; st == YARD_OK && i < N_CALLS; i++) {
        st = make_call(b, set_idx % b->n_sets, (call)i);
        if (i == DISPATCH_RECV)
            keep_rows(b);
    }
    if (st != YARD_OK)
        return yard_fail(err, st, "%s", yard_ep_error(b->ep));
    rc = cudaStreamSynchronize(b->stream);
    if (rc == cudaSuccess && yard_ep_poll(b->ep) != YARD_OK)
        return yard_fail(err, yard_ep_poll(b->ep), "%s", yard_ep_error(b->ep));
    if (rc == cudaSuccess)
        rc = fetch(expert_x, b->expert_x, x_bytes);
    if (rc == cudaSuccess)
        rc = fetch(expert_x_scale, b->expert_x_scale, rows * b->n_groups * sizeof(float));
    if (rc == cudaSuccess)
        rc = fetch(expert_count, b->count, b->n_local * sizeof(int32_t));
    if (rc == cudaSuccess)
        rc = fetch(row_index, b->row_index, b->capacity.expert_y_rows * sizeof(int32_t));
    if (rc == cudaSuccess)
        rc = fetch(y, b->y, y_bytes);
    return yard_ep_bench_failed(rc, "results", err);
}
