/* cuBLASLt's FP8 product with block scales (1x128 by 128x128, bf16 result) at the projections of a
 * DeepSeek-V3 layer: what `switchyard bench roofline` is compared with. Every algorithm that its
 * heuristic offers is timed, the best one reported, in the same way: a graph of many calls over
 * weights that no cache holds.
 *
 * ops_cublaslt [TOKENS..]: a JSON object a row. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

enum { MAX_ALGOS = 8, REPLAYS = 11, WORKSPACE_BYTES = 64 << 20, WEIGHT_BYTES = 400000000 };

static const struct shape {
    const char *name;
    size_t n_out, n_in;
} shapes[] = {
    { "qkv_a", 2112, 7168 },       { "q_a", 1536, 7168 },
    { "kv_a", 576, 7168 },         { "q_b", 24576, 1536 },
    { "o", 7168, 16384 },          { "shared_gate_up", 4096, 7168 },
    { "shared_down", 7168, 2048 }, { "dense_gate_up", 36864, 7168 },
    { "dense_down", 7168, 18432 },
};

typedef struct product {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t w, x, y;
    uint8_t *w_data, *x_data;
    void *y_data, *workspace;
    float *scales;
    size_t w_bytes, n_weights;
    cudaStream_t stream;
} product;

static void must(int ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "ops_cublaslt: %s failed\n", what);
    exit(EXIT_FAILURE);
}

static void *device_memory(size_t n_bytes, int pattern)
{
    void *p = NULL;

    must(cudaMalloc(&p, n_bytes) == cudaSuccess, "cudaMalloc");
    must(cudaMemset(p, pattern, n_bytes) == cudaSuccess, "cudaMemset");
    return p;
}

/* Random codes without NaN: the clock depends on the bits. */
static void fill(uint8_t *device, size_t n)
{
    uint8_t *host = malloc(n);

    must(host != NULL, "malloc");
    for (size_t i = 0; i < n; i++)
        host[i] = (uint8_t)((rand() & 0x80) | (0x40 + rand() % 0x38));
    must(cudaMemcpy(device, host, n, cudaMemcpyHostToDevice) == cudaSuccess, "copy");
    free(host);
}

static void describe(product *p, const struct shape *s, size_t n_rows)
{
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const int blocks = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    const int vectors = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;

    must(!cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F), "descriptor");
    must(!cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                         sizeof(transposed)) &&
             !cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, &blocks,
                                             sizeof(blocks)) &&
             !cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, &vectors,
                                             sizeof(vectors)) &&
             !cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER,
                                             &p->scales, sizeof(p->scales)) &&
             !cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER,
                                             &p->scales, sizeof(p->scales)),
         "scale modes");
    must(
        !cublasLtMatrixLayoutCreate(&p->w, CUDA_R_8F_E4M3, s->n_in, s->n_out, (int64_t)s->n_in) &&
            !cublasLtMatrixLayoutCreate(&p->x, CUDA_R_8F_E4M3, s->n_in, n_rows, (int64_t)s->n_in) &&
            !cublasLtMatrixLayoutCreate(&p->y, CUDA_R_16BF, s->n_out, n_rows, (int64_t)s->n_out),
        "layouts");
}

static int call(const product *p, const cublasLtMatmulAlgo_t *algo, size_t i)
{
    const float one = 1.0f, zero = 0.0f;

    return cublasLtMatmul(p->handle, p->op, &one, p->w_data + i % p->n_weights * p->w_bytes, p->w,
                          p->x_data, p->x, &zero, p->y_data, p->y, p->y_data, p->y, algo,
                          p->workspace, WORKSPACE_BYTES, p->stream) == CUBLAS_STATUS_SUCCESS;
}

static int by_value(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;

    return x < y ? -1 : x > y;
}

/* Median time of one call; negative: the algorithm does not run. */
static float time_us(const product *p, const cublasLtMatmulAlgo_t *algo, int n_calls)
{
    cudaGraph_t captured = NULL;
    cudaGraphExec_t graph = NULL;
    cudaEvent_t begin, end;
    float us[REPLAYS];
    int ok = call(p, algo, 0) && cudaStreamSynchronize(p->stream) == cudaSuccess;

    if (!ok)
        return -1;
    must(cudaStreamBeginCapture(p->stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess,
         "capture");
    for (int i = 0; i < n_calls; i++)
        ok = call(p, algo, (size_t)i) && ok;
    must(cudaStreamEndCapture(p->stream, &captured) == cudaSuccess &&
             cudaGraphInstantiate(&graph, captured, 0) == cudaSuccess,
         "graph");
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    for (int i = -3; i < REPLAYS; i++) {
        float ms = 0;
        cudaEventRecord(begin, p->stream);
        cudaGraphLaunch(graph, p->stream);
        cudaEventRecord(end, p->stream);
        must(cudaEventSynchronize(end) == cudaSuccess, "replay");
        cudaEventElapsedTime(&ms, begin, end);
        if (i >= 0)
            us[i] = ms * 1000 / (float)n_calls;
    }
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaGraphExecDestroy(graph);
    cudaGraphDestroy(captured);
    qsort(us, REPLAYS, sizeof(us[0]), by_value);
    return ok ? us[REPLAYS / 2] : -1;
}

static void run(product *p, const struct shape *s, size_t n_rows)
{
    cublasLtMatmulHeuristicResult_t found[MAX_ALGOS];
    cublasLtMatmulPreference_t preference;
    const size_t workspace = WORKSPACE_BYTES;
    float best = -1, first = -1;
    int n = 0;

    describe(p, s, n_rows);
    must(!cublasLtMatmulPreferenceCreate(&preference) &&
             !cublasLtMatmulPreferenceSetAttribute(preference,
                                                   CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                   &workspace, sizeof(workspace)),
         "preference");
    if (cublasLtMatmulAlgoGetHeuristic(p->handle, p->op, p->w, p->x, p->y, p->y, preference,
                                       MAX_ALGOS, found, &n))
        n = 0;
    for (int i = 0; i < n; i++) {
        const float quick = time_us(p, &found[i].algo, 20);
        const float us = quick > 0 ? time_us(p, &found[i].algo, quick > 100 ? 20 : 100) : -1;
        if (i == 0)
            first = us;
        if (us > 0 && (best < 0 || us < best))
            best = us;
    }
    printf("{\"bench\":\"cublaslt\",\"case\":{\"op\":\"linear\",\"shape\":\"%s\",\"tokens\":%zu},"
           "\"p50_us\":%.2f,\"first_us\":%.2f,\"algorithms\":%d}\n",
           s->name, n_rows, (double)best, (double)first, n);
    fflush(stdout);
    cublasLtMatmulPreferenceDestroy(preference);
    cublasLtMatmulDescDestroy(p->op);
    cublasLtMatrixLayoutDestroy(p->w);
    cublasLtMatrixLayoutDestroy(p->x);
    cublasLtMatrixLayoutDestroy(p->y);
}

int main(int argc, char **argv)
{
    product p = { 0 };
    const float scale = 0.002f;
    const size_t n_scales = 1 << 22;
    float *scales = malloc(n_scales * sizeof(*scales));

    must(scales != NULL, "malloc");
    for (size_t i = 0; i < n_scales; i++)
        scales[i] = scale;
    must(!cublasLtCreate(&p.handle), "cublasLtCreate");
    must(cudaStreamCreate(&p.stream) == cudaSuccess, "stream");
    p.workspace = device_memory(WORKSPACE_BYTES, 0);
    p.scales = device_memory(n_scales * sizeof(*scales), 0);
    must(cudaMemcpy(p.scales, scales, n_scales * sizeof(*scales), cudaMemcpyHostToDevice) ==
             cudaSuccess,
         "copy");
    p.x_data = device_memory((size_t)4096 * 18432, 0);
    fill(p.x_data, (size_t)256 * 18432);
    p.y_data = device_memory((size_t)4096 * 36864 * 2, 0);
    p.w_data = device_memory(2 * (size_t)WEIGHT_BYTES, 0);
    fill(p.w_data, WEIGHT_BYTES / 8);
    for (int i = 1; i < 16; i++)
        must(cudaMemcpy(p.w_data + (size_t)i * (WEIGHT_BYTES / 8), p.w_data, WEIGHT_BYTES / 8,
                        cudaMemcpyDeviceToDevice) == cudaSuccess,
             "copy");
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        p.w_bytes = shapes[i].n_out * shapes[i].n_in;
        p.n_weights = 2 * (size_t)WEIGHT_BYTES / p.w_bytes;
        for (int j = 1; j < argc; j++)
            run(&p, &shapes[i], strtoul(argv[j], NULL, 10));
    }
    return EXIT_SUCCESS;
}
