/* Quick figures while the kernels change; `switchyard bench ep --device cuda` is the real thing. */
#include <sys/mman.h>

#include "ep/ep.h"

#include "ep/cuda/ranks.h"

typedef struct timing {
    const char *name;
    uint32_t tokens, n_pairs, n_samples, between_us, send_sms, self_proving;
    uint32_t room; /* tokens that the group has room for; 0: no more than tokens */
    bool partial, cold, phases, receives, flat, in_place, single, limits;
    double *p50; /* [2][3] shared: rank; pair, dispatch, combine */
} timing;

void ep_gpu_timing(void (*count)(int code));

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

static double median(double *us, uint32_t n)
{
    qsort(us, n, sizeof(*us), by_value);
    return us[n / 2];
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
                                .phases = t->phases,
                                .receives = t->receives };
    double *us[3];
    yard_ep_capacity room;
    yard_error err = { 0 };
    yard_ep_bench *b = NULL;
    yard_ep *ep = NULL;

    config.device = YARD_EP_CUDA;
    config.n_experts = EXPERTS;
    config.top_k = TOP_K;
    config.hidden = HIDDEN;
    config.max_tokens = t->room ? t->room : t->tokens;
    config.mode = t->partial ? YARD_EP_PARTIAL : YARD_EP_EXACT;
    config.layout = t->in_place ? YARD_EP_FLAT_IN_PLACE
                    : t->flat   ? YARD_EP_FLAT
                                : YARD_EP_EXPERT_MAJOR;
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
    if (t->limits)
        CHECK_EP(ep, yard_ep_round_limit(yard_ep_get_round(ep, 0), t->tokens));
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
    for (int i = 0; i < 3; i++)
        t->p50[fabric->rank * 3 + i] = median(us[i], t->n_samples);
    yard_ep_bench_destroy(b);
    yard_ep_destroy(ep);
}

static double slower(const timing *t, int what)
{
    return t->p50[what] > t->p50[3 + what] ? t->p50[what] : t->p50[3 + what];
}

static int measure(timing t)
{
    char name[64];
    int code;

    snprintf(name, sizeof(name), "%s T=%u %s", t.name, t.tokens, t.partial ? "partial" : "exact");
    if (!ranks_wants(name))
        return 0;
    t.p50 = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (t.p50 == MAP_FAILED)
        return 1;
    code = ranks_run(2, run_timing, &t);
    printf("%-22s T=%-5u %-8s%s pair %7.2f", t.name, t.tokens, t.partial ? "partial" : "exact",
           t.in_place ? " in place"
           : t.flat   ? " flat"
                      : "",
           slower(&t, 0));
    if (t.phases || t.receives)
        printf("  dispatch %7.2f combine %7.2f  (rank 0 %.1f %.1f, 1 %.1f %.1f)", slower(&t, 1),
               slower(&t, 2), t.p50[1], t.p50[2], t.p50[4], t.p50[5]);
    printf(code ? "  exit %d\n" : "\n", code);
    fflush(stdout);
    munmap(t.p50, 4096);
    return code;
}

#define MANY .tokens = 4096, .n_pairs = 4, .n_samples = 20, .self_proving = 1, .partial = true
#define SPLIT                                                                                      \
    .tokens = 128, .n_pairs = 20, .n_samples = 100, .self_proving = 1, .partial = true,            \
    .phases = true, .receives = true

#define APART(n)                                                                                   \
    .tokens = (n), .n_pairs = 20, .n_samples = 100, .self_proving = 1, .partial = true,            \
    .phases = true
#define ROOMY .n_pairs = 20, .n_samples = 100, .self_proving = 1, .partial = true, .room = 4096

/* Receives alone: with 1000 us of work before them all data are there. */
static const timing others[] = {
    { .name = "24 SMs",
      .tokens = 128,
      .n_pairs = 20,
      .n_samples = 100,
      .self_proving = 1,
      .partial = true,
      .send_sms = 24 },
    { .name = "flags", .tokens = 128, .n_pairs = 20, .n_samples = 100, .partial = true },
    { .name = "many", MANY, .phases = true },
    { .name = "many", MANY, .phases = true, .flat = true },
    { .name = "many", MANY, .phases = true, .in_place = true },
    { .name = "in place",
      .tokens = 1,
      .n_pairs = 20,
      .n_samples = 100,
      .self_proving = 1,
      .partial = true,
      .in_place = true },
    { .name = "in place",
      .tokens = 128,
      .n_pairs = 20,
      .n_samples = 100,
      .self_proving = 1,
      .partial = true,
      .in_place = true },
    { .name = "many, 500 us between", MANY, .phases = true, .between_us = 500 },
    { .name = "room for 4096", ROOMY, .tokens = 1 },
    { .name = "room for 4096, limit", ROOMY, .tokens = 1, .limits = true },
    { .name = "room for 4096, limit", ROOMY, .tokens = 128, .limits = true },
    { .name = "receives, 200 us", SPLIT, .between_us = 200 },
    { .name = "receives, 1000 us", SPLIT, .between_us = 1000 },
    { .name = "many, receives", MANY, .phases = true, .receives = true, .between_us = 500 },
    { .name = "100 us before each call", APART(1), .between_us = 100 },
    { .name = "cold", APART(1), .cold = true },
    { .name = "100 us before each call", APART(128), .between_us = 100 },
    { .name = "cold", APART(128), .cold = true },
};

void ep_gpu_timing(void (*count)(int code))
{
    static const uint32_t tokens[] = { 1, 8, 32, 64, 128 };

    for (int partial = 1; partial >= 0; partial--)
        for (size_t i = 0; i < 5; i++)
            count(measure((timing){ .name = "graph",
                                    .tokens = tokens[i],
                                    .n_pairs = 20,
                                    .n_samples = 200,
                                    .self_proving = 1,
                                    .partial = partial }));
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
        count(measure(others[i]));
}
