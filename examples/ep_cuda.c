/* libyard-ep on GPUs without an engine: every rank sends eight tokens to random experts, an expert
 * returns its rows as they are, and the weighted sums come back. One process a GPU:
 *
 *   cc examples/ep_cuda.c $(pkg-config --cflags --libs yard-ep) -I/usr/local/cuda/include \
 *      -L/usr/local/cuda/lib64 -lcudart -o ep_cuda && switchyard run --ranks 2 -- ./ep_cuda
 */
#include <stdio.h>
#include <stdlib.h>

#include <cuda_runtime_api.h>

#include <yard/ep.h>

enum { HIDDEN = 1024, TOKENS = 8, TOP_K = 2, EXPERTS = 16 };

static int failed(const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    return 1;
}

static void *on_device(const void *from, size_t n_bytes)
{
    void *p = NULL;

    if (cudaMalloc(&p, n_bytes) != cudaSuccess ||
        (from && cudaMemcpy(p, from, n_bytes, cudaMemcpyHostToDevice) != cudaSuccess))
        exit(failed("device memory", cudaGetErrorString(cudaGetLastError())));
    return p;
}

int main(void)
{
    yard_ep_config config = YARD_EP_CONFIG_INIT;
    static float x[TOKENS][HIDDEN], y[TOKENS][HIDDEN], weight[TOKENS][TOP_K];
    int32_t expert[TOKENS][TOP_K], n_tokens = TOKENS;
    const char *rank = getenv("YARD_RANK");
    yard_ep_capacity capacity;
    yard_error err = { 0 };
    yard_ep *ep = NULL;
    cudaStream_t stream;

    cudaSetDevice(rank ? atoi(rank) : 0); /* the group belongs to this device */
    cudaStreamCreate(&stream);
    config.device = YARD_EP_CUDA;
    config.n_experts = EXPERTS;
    config.top_k = TOP_K;
    config.hidden = HIDDEN;
    config.max_tokens = TOKENS;
    config.dispatch = config.input = config.combine = YARD_EP_F32;
    if (yard_ep_create(&ep, &config, &err) != YARD_OK)
        return failed("create", err.message);
    yard_ep_capacity_of(&config, yard_ep_size(ep), &capacity, NULL);

    srand(yard_ep_rank(ep) + 1);
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < HIDDEN; i++)
            x[t][i] = (float)(t + 1);
        expert[t][0] = rand() % 8;
        expert[t][1] = 8 + rand() % 8;
        weight[t][0] = weight[t][1] = 0.5f;
    }
    void *d_x = on_device(x, sizeof(x)), *d_y = on_device(NULL, sizeof(y));
    void *rows = on_device(NULL, capacity.expert_x_rows * HIDDEN * sizeof(float));
    int32_t *d_expert = on_device(expert, sizeof(expert)), *d_n = on_device(&n_tokens, 4);
    int32_t *count = on_device(NULL, EXPERTS * sizeof(*count));
    float *d_weight = on_device(weight, sizeof(weight));

    /* All of this could be recorded in a CUDA graph and replayed. */
    yard_ep_round *round = yard_ep_get_round(ep, 0);
    yard_stream s = (yard_stream)stream;
    yard_status st = yard_ep_dispatch_send(round, d_x, NULL, d_expert, d_weight, d_n, s);
    if (st == YARD_OK)
        st = yard_ep_dispatch_recv(round, rows, NULL, count, NULL, s);
    if (st == YARD_OK) /* the experts' kernels would stand here */
        st = yard_ep_combine_send(round, rows, s);
    if (st == YARD_OK)
        st = yard_ep_combine_recv(round, d_y, s);
    cudaMemcpyAsync(y, d_y, sizeof(y), cudaMemcpyDeviceToHost, stream);
    cudaStreamSynchronize(stream);
    if (st != YARD_OK || yard_ep_poll(ep) != YARD_OK)
        return failed("exchange", yard_ep_error(ep));
    printf("rank %u of %u (%s): token 3 came back as %g, want %g\n", yard_ep_rank(ep),
           yard_ep_size(ep), yard_ep_describe(ep), (double)y[3][0], (double)x[3][0]);
    yard_ep_destroy(ep);
    return 0;
}
