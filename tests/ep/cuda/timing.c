/* Quick figures while the kernels change; `switchyard bench ep --device cuda` is the real thing. */
#include <sys/mman.h>

#include "ep/ep.h"

#include "ep/cuda/ranks.h"

typedef struct timing {
    uint32_t tokens, n_pairs, n_samples, between_us, send_sms, self_proving;
    bool partial, cold, phases, flat, single;
    double *p50; /* [2][3] shared: rank; pair, dispatch, combine */
} timing;

void ep_gpu_timing(void);

static uint64_t state = 88172645463325252u;

static uint64_t next_random(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void run_timing(const yard_fabric_config *fabric, void *ctx)
{
    enum { HIDDEN = 7168, EXPERTS = 256, TOP_K = 8 };
    const timing *t = ctx;
    const uint32_t n_sets = t->tokens > 128 ? 1 : 5;
    const size_t n = (size_t)n_sets * t->tokens;
    yard_ep_config config = YARD_EP_CONFIG_INIT;
    yard_ep_bench_inputs in = { .n_sets = n_sets, .n_tokens = t->tokens };
    yard_ep_bench_plan plan = { .launch = t->single ? YARD_EP_BENCH_SINGLE : YARD_EP_BENCH_GRAPH,
                                .n_samples = t->n_samples,
                                .n_pairs = t->n_pairs,
                                .between_us = t->between_us,
                                .cold = t->cold,
                                .phases = t->phases };
    double *us[3];
    yard_ep_capacity room;
    yard_error err = { 0 };
    yard_ep_bench *b = NULL;
    yard_ep *ep = NULL;

    config.device = YARD_EP_CUDA;
    config.n_experts = EXPERTS;
    config.top_k = TOP_K;
    config.hidden = HIDDEN;
    config.max_tokens = t->tokens;
    config.mode = t->partial ? YARD_EP_PARTIAL : YARD_EP_EXACT;
    config.layout = t->flat ? YARD_EP_FLAT : YARD_EP_EXPERT_MAJOR;
    config.send_sms = t->send_sms;
    config.output = YARD_EP_BF16;
    if (t->self_proving != 1)
        config.self_proving_tokens = t->self_proving;
    config.fabric_config = fabric;
    config.timeout_us = 1000000;
    if (yard_ep_create(&ep, &config, &err) != YARD_OK) {
        printf("%s\n", err.message);
        _exit(1);
    }
    CHECK(yard_ep_capacity_of(&config, fabric->n_ranks, &room, NULL) == YARD_OK);
    state += fabric->rank * 977;
    uint16_t *x = malloc(n * HIDDEN * 2), *y = malloc(room.expert_y_rows * HIDDEN * 2);
    int32_t *expert = malloc(n * TOP_K * 4);
    float *weight = malloc(n * TOP_K * 4);
    for (size_t i = 0; i < n * HIDDEN; i++)
        x[i] = (uint16_t)(0x3f00 + next_random() % 256);
    for (size_t i = 0; i < room.expert_y_rows * HIDDEN; i++)
        y[i] = (uint16_t)(0x3f00 + i % 251);
    for (size_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < TOP_K; k++) {
            bool again = true;
            while (again) {
                again = false;
                expert[i * TOP_K + k] = (int32_t)(next_random() % EXPERTS);
                for (uint32_t j = 0; j < k; j++)
                    again |= expert[i * TOP_K + j] == expert[i * TOP_K + k];
            }
            weight[i * TOP_K + k] = 0.125f;
        }
    in.x = x;
    in.expert = expert;
    in.weight = weight;
    in.expert_y = y;
    if (yard_ep_bench_create(&b, ep, &config, &in, &err) != YARD_OK) {
        printf("%s\n", err.message);
        _exit(1);
    }
    for (int i = 0; i < 3; i++)
        us[i] = calloc(t->n_samples, sizeof(double));
    if (yard_ep_bench_time(b, &plan, us[0], us[1], us[2], &err) != YARD_OK) {
        printf("%s\n", err.message);
        _exit(1);
    }
    for (int i = 0; i < 3; i++) {
        qsort(us[i], t->n_samples, sizeof(double), by_value);
        t->p50[fabric->rank * 3 + i] = us[i][t->n_samples / 2];
    }
    if (t->between_us || t->cold) {
        CHECK(yard_ep_bench_fillers(b, &plan, us[0], &err) == YARD_OK);
        qsort(us[0], t->n_samples, sizeof(double), by_value);
        t->p50[fabric->rank * 3] -= us[0][t->n_samples / 2];
    }
    yard_ep_bench_destroy(b);
    yard_ep_destroy(ep);
}

static void measure(timing t, const char *name)
{
    int code;

    t.p50 = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    code = ranks_run(2, run_timing, &t);
    printf("%-22s T=%-5u %-8s%s pair %7.2f", name, t.tokens, t.partial ? "partial" : "exact",
           t.flat ? " flat" : "", t.p50[0] > t.p50[3] ? t.p50[0] : t.p50[3]);
    if (t.phases)
        printf("  dispatch %7.2f combine %7.2f", t.p50[1] > t.p50[4] ? t.p50[1] : t.p50[4],
               t.p50[2] > t.p50[5] ? t.p50[2] : t.p50[5]);
    printf(code ? "  exit %d\n" : "\n", code);
    fflush(stdout);
    munmap(t.p50, 4096);
}

void ep_gpu_timing(void)
{
    static const uint32_t tokens[] = { 1, 8, 32, 64, 128 };

    for (int partial = 1; partial >= 0; partial--)
        for (size_t i = 0; i < 5; i++)
            measure((timing){ .tokens = tokens[i],
                              .n_pairs = 20,
                              .n_samples = 200,
                              .self_proving = 1,
                              .partial = partial },
                    "graph");
    measure((timing){ .tokens = 128,
                      .n_pairs = 20,
                      .n_samples = 100,
                      .self_proving = 1,
                      .partial = true,
                      .send_sms = 24 },
            "24 SMs");
    measure(
        (timing){
            .tokens = 128, .n_pairs = 20, .n_samples = 100, .self_proving = 0, .partial = true },
        "flags");
    measure((timing){ .tokens = 4096,
                      .n_pairs = 4,
                      .n_samples = 20,
                      .self_proving = 1,
                      .partial = true,
                      .phases = true },
            "many");
    measure((timing){ .tokens = 4096,
                      .n_pairs = 4,
                      .n_samples = 20,
                      .self_proving = 1,
                      .flat = true,
                      .partial = true,
                      .phases = true },
            "many");
}
