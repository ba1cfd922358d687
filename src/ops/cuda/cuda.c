/* The CUDA table: streams, memory, graphs, and which function is which operation. */
#include <stdio.h>
#include <stdlib.h>

#include <cuda_runtime_api.h>

#include "ops/cuda/cuda.h"
#include "ops/cuda/heads.h"
#include "ops/cuda/launch.h"

void yard_cuda_set_error(cuda_stream *s, const yard_error *err)
{
    if (err->status != YARD_OK && s->error.status == YARD_OK)
        s->error = *err;
}

static yard_status cuda_fail(yard_error *err, cudaError_t code, const char *what)
{
    if (code == cudaSuccess)
        return YARD_OK;
    return yard_fail(err, code == cudaErrorMemoryAllocation ? YARD_ENOMEM : YARD_EDEVICE,
                     "cuda: %s: %s", what, cudaGetErrorString(code));
}

/* ---- streams --------------------------------------------------------------------------------- */

static void close_stream(yard_stream stream)
{
    cuda_stream *s = cuda_of(stream);

    if (!s)
        return;
    cudaFree(s->partial);
    cudaFree(s->arrivals);
    yard_cuda_attention_close(s);
    yard_cuda_sample_close(&s->sample);
    if (s->stream)
        cudaStreamDestroy(s->stream);
    free(s->rows);
    free(s);
}

static yard_status count_devices(int *n_devices, yard_error *err)
{
    const cudaError_t code = cudaGetDeviceCount(n_devices);

    if (code == cudaSuccess && *n_devices > 0)
        return YARD_OK;
    return yard_fail(err, YARD_EDEVICE,
                     "cuda: no device: %s: want a GPU of compute capability 9.0 and its driver, "
                     "and CUDA_VISIBLE_DEVICES, where it is set, to name one; or take device cpu",
                     code == cudaSuccess ? "none found" : cudaGetErrorString(code));
}

static yard_status use_device(uint32_t device_idx, yard_error *err)
{
    int n_devices = 0;
    const yard_status st = count_devices(&n_devices, err);

    if (st != YARD_OK)
        return st;
    return cuda_fail(err, cudaSetDevice((int)(device_idx % (uint32_t)n_devices)), "device");
}

static yard_status open_device(cuda_stream *s, yard_error *err)
{
    struct cudaDeviceProp p;
    char which[40] = "";
    int n_devices = 0;
    cudaError_t code;
    const yard_status st = count_devices(&n_devices, err);

    if (st != YARD_OK)
        return st;
    code = cudaGetDevice(&s->device);
    if (code == cudaSuccess)
        code = cudaGetDeviceProperties(&p, s->device);
    if (code != cudaSuccess)
        return cuda_fail(err, code, "device");
    if (p.major != 9 || p.minor != 0)
        return yard_fail(err, YARD_ENOTSUP,
                         "cuda: device %d, %s: want compute capability 9.0, found %d.%d", s->device,
                         p.name, p.major, p.minor);
    if (n_devices > 1)
        snprintf(which, sizeof(which), ", device %d of %d", s->device, n_devices);
    snprintf(s->description, sizeof(s->description), "cuda, %.80s, %d processors, %s%s", p.name,
             p.multiProcessorCount,
             s->deterministic    ? "deterministic"
             : s->forced.variant ? s->forced.variant->name
                                 : "fast",
             which);
    return YARD_OK;
}

/* Split K needs room for two cut tiles of every thread block, and a count for every tile. */
static const size_t partial_bytes =
    (size_t)2 * GEMM_MAX_BLOCKS * GEMM_TILE_ROWS * GEMM_SPLIT_WIDTH * sizeof(float);
static const size_t arrivals_bytes = GEMM_MAX_ARRIVALS * sizeof(uint32_t);

static size_t workspace_bytes(const yard_ops_config *config)
{
    const yard_ops_limits *limits = &config->limits;

    return partial_bytes + arrivals_bytes + yard_cuda_attention_bytes(limits) +
           (limits->max_vocab > 0 ? yard_cuda_sample_bytes(limits->max_tokens) : 0);
}

static yard_status open_workspace(cuda_stream *s, yard_error *err)
{
    cudaError_t code;

    for (uint32_t i = 0; i < CUDA_VARIANTS; i++) {
        const yard_status st = yard_cuda_variants[i]->open(&s->n_thread_blocks[i], err);
        if (st != YARD_OK)
            return st;
        if (s->n_thread_blocks[i] > GEMM_MAX_BLOCKS)
            s->n_thread_blocks[i] = GEMM_MAX_BLOCKS;
    }
    code = cudaMalloc((void **)&s->partial, partial_bytes);
    if (code == cudaSuccess)
        code = cudaMalloc((void **)&s->arrivals, arrivals_bytes);
    if (code == cudaSuccess)
        code = cudaMemset(s->arrivals, 0, arrivals_bytes);
    return cuda_fail(err, code, "workspace of a stream");
}

static yard_status open_stream(yard_stream *out, const yard_ops_config *config, yard_error *err)
{
    cuda_stream *s = yard_alloc(sizeof(*s));
    cudaStream_t stream = NULL;
    yard_status st;

    if (!s)
        return yard_fail(err, YARD_ENOMEM, "cuda stream: %zu bytes", sizeof(*s));
    s->limits = config->limits;
    st = yard_cuda_read_choices(s, config, err);
    if (st == YARD_OK)
        st = open_device(s, err);
    if (st == YARD_OK)
        st = cuda_fail(err, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    s->stream = stream;
    if (st == YARD_OK)
        st = open_workspace(s, err);
    if (st == YARD_OK)
        st = yard_cuda_heads_open(err);
    if (st == YARD_OK)
        st = yard_cuda_moe_open(err);
    if (st == YARD_OK)
        st = s->limits.max_vocab > 0 ? yard_cuda_sample_open(&s->sample, s->limits.max_tokens, err)
                                     : YARD_OK;
    if (st == YARD_OK)
        st = yard_cuda_attention_open(s, err);
    if (st == YARD_OK)
        st = cuda_fail(err, cudaDeviceSynchronize(), "start");
    if (st != YARD_OK) {
        close_stream((yard_stream)s);
        return st;
    }
    *out = (yard_stream)s;
    return YARD_OK;
}

static yard_stream native_stream(yard_stream s)
{
    return (yard_stream)cuda_of(s)->stream;
}

static const char *describe(yard_stream s)
{
    return cuda_of(s)->description;
}

static void synchronise(yard_stream stream)
{
    cuda_stream *s = cuda_of(stream);
    yard_error err = { 0 };

    cuda_fail(&err, cudaStreamSynchronize(s->stream), "an earlier operation");
    yard_cuda_set_error(s, &err);
}

static yard_status check(yard_stream stream, yard_error *err)
{
    const cuda_stream *s = cuda_of(stream);

    if (s->error.status != YARD_OK && err)
        *err = s->error;
    return s->error.status;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static yard_status available(uint64_t *n_bytes, yard_stream s, yard_error *err)
{
    size_t n_free = 0, n_all = 0;
    const cudaError_t code = cudaMemGetInfo(&n_free, &n_all);

    (void)s;
    *n_bytes = n_free;
    return cuda_fail(err, code, "free memory");
}

static yard_status allocate(void **out, yard_stream s, size_t n_bytes, yard_error *err)
{
    void *p = NULL;
    const cudaError_t code = cudaMalloc(&p, n_bytes ? n_bytes : 1);

    (void)s;
    if (code != cudaSuccess)
        return yard_fail(err, YARD_ENOMEM, "cuda: %zu bytes: %s", n_bytes,
                         cudaGetErrorString(code));
    *out = p;
    return YARD_OK;
}

static void release(yard_stream s, void *memory)
{
    (void)s;
    cudaFree(memory);
}

/* From memory that is not pinned a copy has been read, into a buffer of the driver, on return. */
static yard_status upload(yard_stream s, void *to, const void *host, size_t n_bytes,
                          yard_error *err)
{
    return cuda_fail(err,
                     cudaMemcpyAsync(to, host, n_bytes, cudaMemcpyHostToDevice, cuda_of(s)->stream),
                     "copy to the device");
}

static yard_status download(yard_stream s, void *host, const void *from, size_t n_bytes,
                            yard_error *err)
{
    cudaStream_t stream = cuda_of(s)->stream;
    cudaError_t code = cudaMemcpyAsync(host, from, n_bytes, cudaMemcpyDeviceToHost, stream);

    if (code == cudaSuccess)
        code = cudaStreamSynchronize(stream);
    return cuda_fail(err, code, "copy from the device");
}

/* ---- graphs ---------------------------------------------------------------------------------- */

struct yard_graph {
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
};

static void release_graph(yard_stream s, yard_graph *graph)
{
    (void)s;
    if (!graph)
        return;
    if (graph->exec)
        cudaGraphExecDestroy(graph->exec);
    if (graph->begin)
        cudaEventDestroy(graph->begin);
    if (graph->end)
        cudaEventDestroy(graph->end);
    free(graph);
}

static yard_status capture_begin(yard_stream stream, yard_error *err)
{
    return cuda_fail(
        err, cudaStreamBeginCapture(cuda_of(stream)->stream, cudaStreamCaptureModeThreadLocal),
        "capture");
}

static yard_status capture_end(yard_graph **out, yard_stream stream, yard_error *err)
{
    cuda_stream *s = cuda_of(stream);
    cudaGraph_t captured = NULL;
    yard_graph *graph = yard_alloc(sizeof(*graph));
    cudaError_t code = cudaStreamEndCapture(s->stream, &captured);

    if (!graph) {
        cudaGraphDestroy(captured);
        return yard_fail(err, YARD_ENOMEM, "cuda graph: %zu bytes", sizeof(*graph));
    }
    if (code == cudaSuccess)
        code = cudaGraphInstantiate(&graph->exec, captured, 0);
    if (code == cudaSuccess)
        code = cudaEventCreate(&graph->begin);
    if (code == cudaSuccess)
        code = cudaEventCreate(&graph->end);
    if (captured)
        cudaGraphDestroy(captured);
    if (code != cudaSuccess) {
        release_graph(stream, graph);
        return cuda_fail(err, code, "capture");
    }
    *out = graph;
    return YARD_OK;
}

static yard_status replay(yard_stream stream, yard_graph *graph, float *us, yard_error *err)
{
    cuda_stream *s = cuda_of(stream);
    float ms = 0.0f;
    cudaError_t code = us ? cudaEventRecord(graph->begin, s->stream) : cudaSuccess;

    if (code == cudaSuccess)
        code = cudaGraphLaunch(graph->exec, s->stream);
    if (us) {
        if (code == cudaSuccess)
            code = cudaEventRecord(graph->end, s->stream);
        if (code == cudaSuccess)
            code = cudaEventSynchronize(graph->end);
        if (code == cudaSuccess)
            code = cudaEventElapsedTime(&ms, graph->begin, graph->end);
        *us = ms * 1000.0f;
    }
    return cuda_fail(err, code, "replay");
}

const yard_ops yard_ops_cuda = {
    .name = "cuda",
    .use_device = use_device,
    .workspace_bytes = workspace_bytes,
    .open = open_stream,
    .close = close_stream,
    .native_stream = native_stream,
    .describe = describe,
    .synchronise = synchronise,
    .check = check,
    .available = available,
    .allocate = allocate,
    .release = release,
    .upload = upload,
    .download = download,
    .prepare = yard_cuda_prepare,
    .release_prepared = yard_cuda_release_prepared,
    .capture_begin = capture_begin,
    .capture_end = capture_end,
    .replay = replay,
    .release_graph = release_graph,
    .linear = yard_cuda_linear,
    .grouped_linear = yard_cuda_grouped_linear,
    .head_linear = yard_cuda_head_linear,
    .embed = yard_cuda_embed,
    .rms_norm_quant = yard_cuda_rms_norm_quant,
    .rope_q = yard_cuda_rope_q,
    .rope_append_kv = yard_cuda_rope_append_kv,
    .gqa_append_kv = yard_cuda_gqa_append_kv,
    .moe_route = yard_cuda_moe_route,
    .moe_scatter = yard_cuda_moe_scatter,
    .count_offsets = yard_cuda_count_offsets,
    .moe_gather = yard_cuda_moe_gather,
    .silu_mul_quant = yard_cuda_silu_mul_quant,
    .residual_add = yard_cuda_residual_add,
    .quantise = yard_cuda_quantise,
    .select_rows = yard_cuda_select_rows,
    .sample = yard_cuda_sample,
    .mla_decode = yard_cuda_mla_decode,
    .mla_prefill = yard_cuda_mla_prefill,
    .gqa_attend = yard_cuda_gqa_attend,
};
