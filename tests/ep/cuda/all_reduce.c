/* The sum over an instance's ranks on GPUs: random rows against the definition, bit for bit. */
#include "ep/ep.h"

#include "ep/cuda/ranks.h"

#include "ep/cuda/nccl.h"
#include "fabric/fabric.h"

enum { MAX_ROWS = 40, N_GRAPH_SUMS = 6, TIMED_SUMS = 20, TIMED_REPLAYS = 101 };

typedef struct sum_case {
    uint32_t n_ranks, tp, n_cols;
    yard_dtype dtype;
    uint64_t seed;
    uint32_t n_calls;
} sum_case;

typedef struct sum_rank {
    const sum_case *c;
    yard_fabric *fabric;
    yard_all_reduce *reduce;
    cudaStream_t stream;
    uint32_t first, max_rows;
    uint8_t *x, *host;  /* device, host: N_GRAPH_SUMS of max_rows rows */
    int32_t *n_rows;    /* device [N_GRAPH_SUMS] */
    ep_cuda_nccl *nccl; /* timing: NULL without it */
} sum_rank;

static uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint64_t draw(const sum_case *c, uint64_t what, uint64_t i)
{
    return mix(mix(c->seed * 0x9e3779b97f4a7c15u + what) + i);
}

/* Sums of these depend on the order; now and then one looks like what places are filled with. */
static float value_of(const sum_case *c, uint32_t rank, uint64_t sum, uint32_t i)
{
    const uint64_t r = draw(c, rank * 1000003u + sum, i);
    const float x = (float)(int32_t)(r >> 32) * (r % 3 ? 1.0f : 0x1p-12f);

    return c->dtype == YARD_BF16 ? yard_bf16_round(x) : x;
}

static uint32_t rows_of(const sum_case *c, uint32_t first, uint64_t sum, uint32_t max_rows)
{
    return (uint32_t)(draw(c, 77 + first, sum) % (max_rows + 1));
}

static size_t row_bytes(const sum_case *c)
{
    return c->n_cols * yard_dtype_bytes(c->dtype);
}

static void open_rank(sum_rank *s, const yard_fabric_config *base, const sum_case *c,
                      uint32_t max_rows)
{
    yard_all_reduce_config config = { .tp = c->tp,
                                      .max_rows = max_rows,
                                      .n_cols = c->n_cols,
                                      .dtype = c->dtype,
                                      .heap_at = 256,
                                      .timeout_us = 3000000 };
    yard_fabric_config fc = *base;
    yard_error err = { 0 };

    *s = (sum_rank){ .c = c, .first = base->rank / c->tp * c->tp, .max_rows = max_rows };
    fc.heap_bytes = 256 + yard_all_reduce_heap_bytes(&config);
    fc.transport = "nvlink";
    if (yard_fabric_create(&s->fabric, &fc, &err) == YARD_OK) {
        config.fabric = s->fabric;
        yard_all_reduce_create(&s->reduce, &config, &err);
    }
    if (!s->reduce) {
        printf("rank %u: %s\n", base->rank, err.message);
        fflush(stdout);
        _exit(1);
    }
    s->host = malloc(N_GRAPH_SUMS * max_rows * row_bytes(c));
    CHECK(s->host != NULL);
    CHECK_CUDA(cudaMalloc((void **)&s->x, N_GRAPH_SUMS * max_rows * row_bytes(c)));
    CHECK_CUDA(cudaMalloc((void **)&s->n_rows, N_GRAPH_SUMS * sizeof(*s->n_rows)));
    CHECK_CUDA(cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking));
}

static void close_rank(sum_rank *s)
{
    yard_all_reduce_destroy(s->reduce);
    yard_fabric_destroy(s->fabric);
    free(s->host);
}

static void put_value(const sum_case *c, uint8_t *row, uint32_t i, float x)
{
    if (c->dtype == YARD_BF16)
        ((uint16_t *)row)[i] = yard_bf16_from_f32(x);
    else
        ((float *)row)[i] = x;
}

/* Rows of sum number `sum` into place k of the device's buffers. */
static void fill(sum_rank *s, uint64_t sum, uint32_t k)
{
    const sum_case *c = s->c;
    uint8_t *rows = s->host + k * s->max_rows * row_bytes(c);
    const int32_t n = (int32_t)rows_of(c, s->first, sum, s->max_rows);

    for (uint32_t i = 0; i < s->max_rows * c->n_cols; i++)
        put_value(c, rows, i, value_of(c, ranks_self, sum, i));
    CHECK_CUDA(cudaMemcpyAsync(s->x + k * s->max_rows * row_bytes(c), rows,
                               s->max_rows * row_bytes(c), cudaMemcpyHostToDevice, s->stream));
    CHECK_CUDA(cudaMemcpyAsync(s->n_rows + k, &n, sizeof(n), cudaMemcpyHostToDevice, s->stream));
    CHECK_CUDA(cudaStreamSynchronize(s->stream));
}

static void check(sum_rank *s, uint64_t sum, uint32_t k)
{
    const sum_case *c = s->c;
    const uint32_t n = rows_of(c, s->first, sum, s->max_rows) * c->n_cols;
    uint8_t *rows = s->host + k * s->max_rows * row_bytes(c);

    CHECK_CUDA(cudaMemcpyAsync(rows, s->x + k * s->max_rows * row_bytes(c),
                               s->max_rows * row_bytes(c), cudaMemcpyDeviceToHost, s->stream));
    CHECK_CUDA(cudaStreamSynchronize(s->stream));
    for (uint32_t i = 0; i < s->max_rows * c->n_cols; i++) {
        uint8_t want[4] = { 0 };
        float x = 0;

        for (uint32_t r = s->first; i < n && r < s->first + c->tp; r++)
            x += value_of(c, r, sum, i);
        put_value(c, want, 0, i < n ? x : value_of(c, ranks_self, sum, i)); /* others stay */
        CHECK(!memcmp(rows + i * yard_dtype_bytes(c->dtype), want, yard_dtype_bytes(c->dtype)));
    }
}

static void sum_once(sum_rank *s, uint32_t k)
{
    if (yard_all_reduce_sum(s->reduce, s->x + k * s->max_rows * row_bytes(s->c), s->n_rows + k,
                            (yard_stream)s->stream) != YARD_OK) {
        printf("rank %u: %s\n", ranks_self, yard_all_reduce_error(s->reduce));
        fflush(stdout);
        _exit(1);
    }
}

static cudaGraphExec_t record(sum_rank *s, uint32_t n_sums, void (*once)(sum_rank *s, uint32_t k))
{
    cudaGraphExec_t exec;
    cudaGraph_t graph;

    CHECK_CUDA(cudaStreamBeginCapture(s->stream, cudaStreamCaptureModeThreadLocal));
    for (uint32_t k = 0; k < n_sums; k++)
        once(s, k % N_GRAPH_SUMS);
    CHECK_CUDA(cudaStreamEndCapture(s->stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    return exec;
}

static void run_sums(const yard_fabric_config *base, void *ctx)
{
    const sum_case *c = ctx;
    uint64_t sum = 0;
    cudaGraphExec_t exec;
    sum_rank s;

    open_rank(&s, base, c, MAX_ROWS);
    for (uint32_t i = 0; i < c->n_calls; i++, sum++) {
        fill(&s, sum, 0);
        sum_once(&s, 0);
        check(&s, sum, 0);
    }
    exec = record(&s, N_GRAPH_SUMS, sum_once);
    for (uint32_t i = 0; i < c->n_calls / 4 + 1; i++, sum += N_GRAPH_SUMS) {
        for (uint32_t k = 0; k < N_GRAPH_SUMS; k++)
            fill(&s, sum + k, k);
        CHECK_CUDA(cudaGraphLaunch(exec, s.stream));
        for (uint32_t k = 0; k < N_GRAPH_SUMS; k++)
            check(&s, sum + k, k);
    }
    CHECK(yard_all_reduce_poll(s.reduce) == YARD_OK);
    close_rank(&s);
}

/* Rank 1 leaves after the first sum; rank 0 is told whom it waited for. */
static void lose_rank(const yard_fabric_config *base, void *ctx)
{
    const int32_t one = 1;
    sum_rank s;

    open_rank(&s, base, ctx, MAX_ROWS);
    CHECK_CUDA(cudaMemcpy(s.n_rows, &one, sizeof(one), cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemset(s.x, 0, row_bytes(s.c)));
    CHECK_CUDA(cudaDeviceSynchronize());
    sum_once(&s, 0);
    CHECK_CUDA(cudaStreamSynchronize(s.stream));
    if (base->rank == 1)
        _exit(0);
    sum_once(&s, 0);
    CHECK_CUDA(cudaStreamSynchronize(s.stream));
    CHECK(yard_all_reduce_poll(s.reduce) != YARD_OK);
    CHECK(strstr(yard_all_reduce_error(s.reduce), "rank 1") != NULL);
    CHECK(yard_all_reduce_sum(s.reduce, s.x, s.n_rows, (yard_stream)s.stream) != YARD_OK);
    close_rank(&s);
}

void ep_gpu_sum(void (*report)(int code, const char *fmt, const char *what, uint64_t n),
                uint64_t first_seed, double part);

void ep_gpu_sum(void (*report)(int code, const char *fmt, const char *what, uint64_t n),
                uint64_t first_seed, double part)
{
    const uint32_t n = (uint32_t)(40 * part) + 2;
    const sum_case cases[] = {
        { 1, 1, 256, YARD_F32, first_seed, n },     { 2, 2, 7168, YARD_BF16, first_seed, n },
        { 2, 2, 64, YARD_F32, first_seed + 1, n },  { 4, 2, 264, YARD_BF16, first_seed + 2, n / 4 },
        { 4, 4, 256, YARD_F32, first_seed, n / 4 },
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        report(ranks_run(cases[i].n_ranks, run_sums, (void *)&cases[i]), "sum: tp %s%llu",
               cases[i].n_ranks > cases[i].tp ? "of two instances, " : "", cases[i].tp);
    report(ranks_run(2, lose_rank, (void *)&cases[1]), "sum: a rank leaves%s, %llu", "", 1);
}

/* ---- timing ---------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    const float x = *(const float *)a, y = *(const float *)b;

    return x < y ? -1 : x > y;
}

typedef struct sum_timing {
    sum_case c;
    int id[2]; /* a pipe, in which rank 0 hands NCCL's group to the other */
} sum_timing;

static void open_nccl(sum_rank *s, const yard_fabric_config *base, const sum_timing *t)
{
    uint8_t id[YARD_EP_NCCL_ID_BYTES] = { 0 };
    yard_error err = { 0 };
    yard_status st = YARD_OK;

    if (base->rank == 0) {
        st = yard_ep_nccl_id(id, &err);
        CHECK(write(t->id[1], id, sizeof(id)) == sizeof(id));
    } else {
        CHECK(read(t->id[0], id, sizeof(id)) == sizeof(id));
    }
    if (st == YARD_OK) /* without the library, rank 1 learns it here */
        st = yard_ep_cuda_nccl_open(&s->nccl, id, base->n_ranks, base->rank, &err);
    if (st != YARD_OK && base->rank == 0)
        printf("%s\n", err.message);
}

static void nccl_once(sum_rank *s, uint32_t k)
{
    CHECK(yard_ep_cuda_nccl_all_reduce(s->nccl, s->x + k * s->max_rows * row_bytes(s->c),
                                       (size_t)s->max_rows * s->c->n_cols, s->stream) == YARD_OK);
}

/* Median and 99th percentile of a sum in a graph of TIMED_SUMS. */
static void time_graph(sum_rank *s, const char *who, void (*once)(sum_rank *s, uint32_t k))
{
    const sum_case *c = s->c;
    cudaGraphExec_t exec = record(s, TIMED_SUMS, once);
    float us[TIMED_REPLAYS];
    cudaEvent_t begin, end;

    CHECK_CUDA(cudaEventCreate(&begin));
    CHECK_CUDA(cudaEventCreate(&end));
    for (uint32_t i = 0; i < TIMED_REPLAYS; i++) {
        CHECK_CUDA(cudaEventRecord(begin, s->stream));
        CHECK_CUDA(cudaGraphLaunch(exec, s->stream));
        CHECK_CUDA(cudaEventRecord(end, s->stream));
        CHECK_CUDA(cudaEventSynchronize(end));
        CHECK_CUDA(cudaEventElapsedTime(&us[i], begin, end));
        us[i] *= 1000.0f / TIMED_SUMS;
    }
    qsort(us, TIMED_REPLAYS, sizeof(us[0]), by_value);
    printf("{\"bench\":\"all_reduce\",\"case\":{\"who\":\"%s\",\"rows\":%u,\"cols\":%u,"
           "\"dtype\":\"bf16\",\"ranks\":%u,\"rank\":%u},\"p50_us\":%.2f,\"p99_us\":%.2f}\n",
           who, s->max_rows, c->n_cols, c->tp, ranks_self, (double)us[TIMED_REPLAYS / 2],
           (double)us[TIMED_REPLAYS * 99 / 100]);
    fflush(stdout);
    CHECK_CUDA(cudaGraphExecDestroy(exec));
}

static void time_sums(const yard_fabric_config *base, void *ctx)
{
    const sum_timing *t = ctx;
    sum_rank s;

    open_rank(&s, base, &t->c, t->c.n_calls);
    for (uint32_t k = 0; k < N_GRAPH_SUMS; k++) {
        fill(&s, k, k);
        CHECK_CUDA(
            cudaMemcpy(s.n_rows + k, &t->c.n_calls, sizeof(int32_t), cudaMemcpyHostToDevice));
    }
    CHECK_CUDA(cudaDeviceSynchronize());
    time_graph(&s, "yard", sum_once);
    open_nccl(&s, base, t);
    if (s.nccl)
        time_graph(&s, "nccl", nccl_once);
    yard_ep_cuda_nccl_close(s.nccl);
    close_rank(&s);
}

void ep_gpu_sum_timing(void (*count)(int code));

/* Two ranks, each with a GPU of its own; on one GPU the figures are those of its time slices. */
void ep_gpu_sum_timing(void (*count)(int code))
{
    static const uint32_t n_rows[] = { 1, 2, 4, 8, 16, 32, 64, 128 };

    for (size_t i = 0; i < sizeof(n_rows) / sizeof(n_rows[0]); i++) {
        sum_timing t = { .c = { 2, 2, 7168, YARD_BF16, 1, n_rows[i] } };

        if (pipe(t.id) != 0) {
            count(1);
            return;
        }
        count(ranks_run(2, time_sums, &t));
        close(t.id[0]);
        close(t.id[1]);
    }
}
