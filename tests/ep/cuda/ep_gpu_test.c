/* Dispatch and combine on GPUs: ep_gpu_test [--seed N] [--scale PERCENT] [--transport NAME]
 * [--only TEXT] [SUITE...]. TEXT: of stress, sane, timing and conformance those cases that have it
 * in their name. The last line is "N passed, N failed"; 77 without a GPU.
 *
 *   conformance  random cases against the plain definition, bit for bit, buffers in line and askew
 *   stress       graphs of whole exchanges whose inputs and checks are made on the device, with and
 *                without late blocks, small and flagged rows, exact and partial, tensor parallel
 *   faults       a rank that is killed, one that stops, bad ids and token counts
 *   life         two groups in one process, many groups one after the other
 *   sum          the sum over an instance's ranks, call by call and in graphs, and a lost rank
 * and by name only: sane (few of each kind, for compute-sanitizer), timing and sum_timing (quick
 * figures) */
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>

#include "ep/cuda/group.h"
#include "ep/cuda/ranks.h"
#include "ep/cuda/stress.h"

static uint32_t n_passed, n_failed;
static uint64_t seed = 1;
static double scale = 1.0; /* of the numbers of repeats */
const char *ranks_transport, *ranks_only;

static uint64_t started_us;

static void count(int code)
{
    n_passed += code == 0;
    n_failed += code != 0;
}

static void outcome(int code, const char *fmt, const char *what, uint64_t n)
{
    count(code);
    printf("%s (%.1f s) ", code == 0 ? "ok" : "FAILED", (double)(yard_now_us() - started_us) / 1e6);
    printf(fmt, what, (unsigned long long)n);
    printf(code ? ", exit code %d\n" : "\n", code);
    fflush(stdout);
    started_us = yard_now_us();
}

static void dawdle_in(yard_ep *ep, uint32_t delay_seed)
{
    ep_cuda *cu = ep->impl;

    for (uint32_t i = 0; i < ep->config.n_rounds; i++)
        cu->rounds[i].args.delay_seed = delay_seed;
    cu->plain_sends = getenv("PLAIN_SENDS") != NULL;
}

/* ---- stress -------------------------------------------------------------------------------- */

typedef struct stress_case {
    const char *name;
    uint32_t max_tokens, hidden, n_experts, top_k, tp, row_align, self_proving, n_rounds;
    bool partial, late;
    uint32_t n_replays; /* of STRESS_STEPS exchanges */
    bool limits;        /* exchanges of few tokens among those of many */
    bool in_place;      /* rows stay where they landed */
} stress_case;

static yard_ep *open_stress(const yard_fabric_config *fabric, const stress_case *c)
{
    yard_ep_config config = YARD_EP_CONFIG_INIT;
    yard_error err = { 0 };
    yard_ep *ep = NULL;

    config.device = YARD_EP_CUDA;
    config.n_experts = c->n_experts;
    config.top_k = c->top_k;
    config.hidden = c->hidden;
    config.max_tokens = c->max_tokens;
    config.tp = c->tp;
    config.row_align = c->row_align;
    config.n_rounds = c->n_rounds;
    config.mode = c->partial ? YARD_EP_PARTIAL : YARD_EP_EXACT;
    config.layout = c->in_place ? YARD_EP_FLAT_IN_PLACE : YARD_EP_EXPERT_MAJOR;
    config.self_proving_tokens = c->self_proving;
    config.timeout_us = 1500000;
    config.fabric_config = fabric;
    if (yard_ep_create(&ep, &config, &err) != YARD_OK) {
        printf("rank %u: %s\n", fabric->rank, err.message);
        fflush(stdout);
        _exit(1);
    }
    return ep;
}

static void *on_device(size_t n_bytes)
{
    void *p = NULL;

    CHECK_CUDA(cudaMalloc(&p, n_bytes));
    CHECK_CUDA(cudaMemset(p, 0, n_bytes));
    CHECK_CUDA(cudaDeviceSynchronize());
    return p;
}

/* Each round has places of its own for rows. */
static stress with_rows_of(stress s, yard_ep_round *round)
{
    size_t scale_at_bytes = 0;

    if (!s.in_place)
        return s;
    s.expert_x = (uint8_t *)(uintptr_t)yard_ep_expert_x(round, &s.pitch_bytes, &scale_at_bytes);
    s.expert_x_scale = (float *)(void *)(s.expert_x + scale_at_bytes);
    s.scale_pitch_bytes = s.pitch_bytes;
    return s;
}

static stress make_stress(const yard_ep *ep, const stress_case *c)
{
    const uint32_t groups = yard_group_count(c->hidden), t = c->max_tokens;
    stress s = { .seed = seed,
                 .rank = ep->rank,
                 .n_ranks = ep->n_ranks,
                 .tp = c->tp,
                 .group = ep->group,
                 .dp = ep->dp,
                 .n_experts = c->n_experts,
                 .n_local = ep->n_local,
                 .top_k = c->top_k,
                 .hidden = c->hidden,
                 .max_tokens = t,
                 .row_align = c->row_align,
                 .partial = c->partial,
                 .in_place = c->in_place,
                 .pitch_bytes = c->hidden,
                 .scale_pitch_bytes = groups * sizeof(float) };
    const uint32_t some[] = { 0, c->self_proving, 1, t / 2, c->self_proving / 2 };
    yard_ep_capacity room;

    CHECK(yard_ep_capacity_of(&ep->config, ep->n_ranks, &room, NULL) == YARD_OK);
    for (uint32_t i = 0; c->limits && i < STRESS_STEPS; i++)
        s.limit[i] = some[(i * 7 + i / 5) % 5];
    s.step = on_device(4);
    s.n_wrong = on_device(16);
    s.x = on_device((size_t)t * c->hidden * 2);
    s.expert_y = on_device(room.expert_y_rows * c->hidden * 2);
    s.expert = on_device(t * c->top_k * 4);
    s.n_tokens = on_device(4);
    s.count = on_device(ep->n_local * 4);
    s.row_index = on_device(room.expert_y_rows * 4);
    s.weight = on_device(t * c->top_k * 4);
    s.expert_x_scale = on_device(room.expert_x_rows * groups * 4);
    s.y = on_device((size_t)t * c->hidden * 4);
    s.expert_x = on_device(room.expert_x_rows * c->hidden);
    return s;
}

static void enqueue_exchange(yard_ep *ep, const stress *same, uint32_t round_idx, uint32_t step,
                             cudaStream_t stream)
{
    yard_ep_round *round = yard_ep_get_round(ep, round_idx);
    const stress of_round = with_rows_of(*same, round), *s = &of_round;
    const yard_stream st = (yard_stream)stream;

    CHECK_CUDA(stress_inputs(s, stream));
    CHECK_EP(ep, yard_ep_round_limit(round, s->limit[step % STRESS_STEPS]));
    CHECK_EP(ep, yard_ep_dispatch_send(round, s->x, NULL, s->expert, s->weight, s->n_tokens, st));
    CHECK_EP(ep, yard_ep_dispatch_recv(round, s->in_place ? NULL : s->expert_x,
                                       s->in_place ? NULL : s->expert_x_scale, s->count,
                                       s->row_index, st));
    CHECK_CUDA(stress_experts(s, stream));
    CHECK_EP(ep, yard_ep_combine_send(round, s->expert_y, st));
    CHECK_EP(ep, yard_ep_combine_recv(round, s->y, st));
    CHECK_CUDA(stress_results(s, stream));
    CHECK_CUDA(stress_next(s, stream));
}

/* Replays begin behind a whole number of graphs, and first_step exchanges. */
static cudaGraphExec_t record(yard_ep *ep, const stress *s, uint32_t first_step,
                              cudaStream_t stream)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;

    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (uint32_t i = 0; i < STRESS_STEPS; i++)
        enqueue_exchange(ep, s, i % ep->config.n_rounds, first_step + i, stream);
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
    return exec;
}

static void check_stress(yard_ep *ep, const stress *s, uint32_t n_steps)
{
    uint32_t wrong[4], step = 0;

    CHECK_CUDA(cudaMemcpy(wrong, s->n_wrong, sizeof(wrong), cudaMemcpyDeviceToHost));
    CHECK_CUDA(cudaMemcpy(&step, s->step, sizeof(step), cudaMemcpyDeviceToHost));
    CHECK_EP(ep, yard_ep_poll(ep));
    if (wrong[0] | wrong[1] | wrong[2] | wrong[3] || step != n_steps) {
        printf("rank %u: wrong: %u codes, %u scales, %u places, %u sums; %u of %u exchanges\n",
               ep->rank, wrong[0], wrong[1], wrong[2], wrong[3], step, n_steps);
        fflush(stdout);
        _exit(1);
    }
}

/* One exchange outside a graph, then replays. */
static void run_stress(const yard_fabric_config *fabric, void *ctx)
{
    const stress_case *c = ctx;
    const uint32_t n = (uint32_t)(c->n_replays * scale) + 1;
    yard_ep *ep = open_stress(fabric, c);
    const stress s = make_stress(ep, c);
    cudaGraphExec_t exec;
    cudaStream_t stream;

    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (c->late)
        dawdle_in(ep, 7);
    enqueue_exchange(ep, &s, 0, 0, stream);
    exec = record(ep, &s, 1, stream);
    for (uint32_t i = 0; i < n; i++)
        CHECK_CUDA(cudaGraphLaunch(exec, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    check_stress(ep, &s, 1 + n * STRESS_STEPS);
    CHECK_CUDA(cudaGraphExecDestroy(exec));
    yard_ep_destroy(ep);
}

static void suite_stress(void)
{
    const stress_case cases[] = {
        { "late, self-proving, partial", 32, 7168, 64, 8, 1, 1, 128, 1, true, true, 60, false,
          false },
        { "late, self-proving, exact", 32, 7168, 64, 8, 1, 1, 128, 1, false, true, 60, false,
          false },
        { "late, 1 token", 1, 7168, 256, 8, 1, 1, 128, 1, true, true, 60, false, false },
        { "late, 128 tokens", 128, 7168, 256, 8, 1, 1, 128, 1, true, true, 20, false, false },
        { "late, flags, partial", 64, 7168, 64, 8, 1, 1, 0, 1, true, true, 60, false, false },
        { "late, flags, aligned, exact", 64, 2048, 64, 8, 1, 16, 0, 2, false, true, 60, false,
          false },
        { "late, many tokens", 600, 2048, 64, 8, 1, 1, 128, 1, true, true, 20, false, false },
        { "late, in place", 64, 7168, 64, 8, 1, 1, 128, 1, true, true, 60, .in_place = true },
        { "late, in place, two rounds, exact", 300, 1024, 32, 8, 1, 4, 128, 2, false, true, 40,
          .in_place = true },
        { "in place, 1 token", 1, 1024, 32, 8, 1, 1, 128, 1, true, false, 2000, .in_place = true },
        { "one instance of two ranks, late, in place", 24, 1000, 32, 8, 2, 1, 0, 1, true, true, 60,
          .in_place = true },
        { "late, few among many", 300, 2048, 64, 8, 1, 1, 64, 1, true, true, 60, true, false },
        { "few among many, exact", 90, 1024, 32, 8, 1, 4, 20, 2, false, false, 1000, true, false },
        { "late, aligned, two rounds", 16, 1024, 32, 4, 1, 8, 128, 2, true, true, 100, false,
          false },
        { "self-proving, partial", 8, 512, 16, 4, 1, 1, 128, 1, true, false, 4000, false, false },
        { "self-proving, exact", 16, 1024, 32, 8, 1, 1, 128, 1, false, false, 2000, false, false },
        { "flags, partial", 32, 1024, 32, 8, 1, 1, 0, 1, true, false, 2000, false, false },
        { "one instance of two ranks, late", 24, 1024, 32, 8, 2, 1, 128, 1, true, true, 60, false,
          false },
        { "one instance of two ranks, exact", 24, 512, 32, 8, 2, 1, 0, 1, false, false, 1000, false,
          false },
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (ranks_wants(cases[i].name))
            outcome(ranks_run(2, run_stress, (void *)&cases[i]), "stress: %s, %llu exchanges",
                    cases[i].name, (uint64_t)(cases[i].n_replays * scale + 1) * STRESS_STEPS + 1);
}

/* Few exchanges of every kind of kernel, for compute-sanitizer. */
static void suite_sane(void)
{
    const stress_case cases[] = {
        { "self-proving, partial", 3, 512, 16, 4, 1, 1, 128, 1, true, false, 0, false, false },
        { "self-proving, exact, aligned", 3, 200, 16, 4, 1, 4, 128, 1, false, false, 0, false,
          false },
        { "flags, partial", 5, 512, 16, 8, 1, 4, 0, 1, true, false, 0, false, false },
        { "few among many", 9, 512, 16, 8, 1, 1, 4, 1, true, false, 0, true, false },
        { "one instance of two ranks", 4, 256, 16, 4, 2, 1, 0, 1, false, false, 0, false, false },
        { "many tokens", 140, 512, 16, 8, 1, 1, 64, 1, true, false, 0, false, false },
        { "in place", 5, 512, 16, 8, 1, 4, 0, 2, true, false, 0, .in_place = true },
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
        if (ranks_wants(cases[i].name))
            outcome(ranks_run(2, run_stress, (void *)&cases[i]), "sane: %s, %llu exchanges",
                    cases[i].name, STRESS_STEPS + 1);
}

/* ---- faults -------------------------------------------------------------------------------- */

typedef struct fault_case {
    const stress_case *shape;
    bool stops;                    /* else rank 1 is killed */
    _Atomic uint64_t *happened_us; /* shared */
} fault_case;

/* For faults and groups that come and go; the second has flags and keeps its own share apart. */
static const stress_case fault_shape = { "",  16, 1024, 32,    8, 1,     1,
                                         128, 1,  true, false, 0, false, false };

static const stress_case flagged_shape = { "", 150, 1024, 32,    8, 1,     1,
                                           0,  1,   true, false, 0, false, false };

/* Rank 1 exchanges until the parent ends it; rank 0 must notice within its deadline, and long
 * before where its host learns that the process is gone: that deadline is never reached. */
static void run_victim(const yard_fabric_config *fabric, void *ctx)
{
    const fault_case *fault = ctx;
    const stress_case *c = fault->shape;
    yard_ep *ep = open_stress(fabric, c);
    const stress s = make_stress(ep, c);
    ep_cuda *cu = ep->impl;
    cudaGraphExec_t exec;
    cudaStream_t stream;
    uint64_t begun;

    cu->rounds[0].args.timeout_ns = fault->stops ? 300000000 : 3600000000000;
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    exec = record(ep, &s, 0, stream);
    begun = yard_now_us();
    while (yard_now_us() - begun < 20000000) {
        CHECK_CUDA(cudaGraphLaunch(exec, stream));
        CHECK_CUDA(cudaStreamSynchronize(stream));
        if (yard_ep_poll(ep) != YARD_OK)
            break;
    }
    if (fabric->rank == 0) {
        const yard_status st = yard_ep_poll(ep);

        printf("  %s, after %.1f ms\n", yard_ep_error(ep),
               (double)(yard_now_us() - *fault->happened_us) / 1e3);
        CHECK(fault->stops ? st == YARD_ETIMEDOUT : st == YARD_EPEER);
        CHECK(strstr(yard_ep_error(ep), "rank 1") != NULL);
        /* later calls return at once, later replays do nothing and end */
        CHECK(yard_ep_dispatch_send(yard_ep_get_round(ep, 0), s.x, NULL, s.expert, s.weight,
                                    s.n_tokens, (yard_stream)stream) == st);
        begun = yard_now_us();
        CHECK_CUDA(cudaGraphLaunch(exec, stream));
        CHECK_CUDA(cudaStreamSynchronize(stream));
        CHECK(yard_now_us() - begun < 2000000);
    }
    yard_ep_destroy(ep);
}

static void pause_us(uint64_t us)
{
    const struct timespec t = { (time_t)(us / 1000000), (long)(us % 1000000 * 1000) };

    nanosleep(&t, NULL); /* a random moment, nothing is synchronised by it */
}

static void suite_faults(void)
{
    _Atomic uint64_t *happened_us =
        mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (happened_us == MAP_FAILED)
        abort();
    for (uint64_t i = 0; i < (uint64_t)(6 * scale) + 4; i++) {
        const bool stop = i % 2, flags = i / 2 % 2;
        fault_case fault = { flags ? &flagged_shape : &fault_shape, stop, happened_us };
        ranks g;
        int code;

        ranks_start(&g, 2, run_victim, &fault);
        pause_us(3000000 + (i * 7919 + seed * 104729) % 1000 * 1000);
        *happened_us = yard_now_us();
        kill(g.pids[1], stop ? SIGSTOP : SIGKILL);
        code = ranks_wait(&g, 0);
        kill(g.pids[1], SIGKILL);
        ranks_wait(&g, 1);
        outcome(code, flags ? "faults: rank 1 %s, flags, run %llu" : "faults: rank 1 %s, run %llu",
                stop ? "stopped" : "killed", i);
    }
    munmap((void *)happened_us, 4096);
}

static void run_bad_input(const yard_fabric_config *fabric, void *ctx)
{
    const int what = *(const int *)ctx;
    yard_ep *ep = open_stress(fabric, &fault_shape);
    const stress s = make_stress(ep, &fault_shape);
    const int32_t n = what == 0 ? 17 : what == 1 ? -1 : 1, id = what == 2 ? 32 : 5;
    cudaStream_t stream;

    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK_CUDA(stress_inputs(&s, stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK_CUDA(cudaMemcpy(s.n_tokens, &n, 4, cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaMemcpy(s.expert, &id, 4, cudaMemcpyHostToDevice));
    CHECK_EP(ep, yard_ep_dispatch_send(yard_ep_get_round(ep, 0), s.x, NULL, s.expert, s.weight,
                                       s.n_tokens, (yard_stream)stream));
    CHECK_CUDA(cudaStreamSynchronize(stream));
    CHECK(yard_ep_poll(ep) == YARD_EINVAL);
    CHECK(strstr(yard_ep_error(ep), what < 2 ? "n_tokens" : "expert") != NULL);
    yard_ep_destroy(ep);
}

static void suite_bad_input(void)
{
    for (int what = 0; what < 3; what++)
        outcome(ranks_run(2, run_bad_input, &what), "faults: bad input %s %llu", "",
                (uint64_t)what);
}

/* ---- life ---------------------------------------------------------------------------------- */

static void meet_at(yard_fabric_config *to, const yard_fabric_config *from, char text[96],
                    uint32_t i)
{
    *to = *from;
    snprintf(text, 96, "%s-%u", from->rendezvous, i);
    to->rendezvous = text;
}

static void run_two_groups(const yard_fabric_config *fabric, void *ctx)
{
    const stress_case *c = ctx;
    yard_fabric_config f[2];
    cudaGraphExec_t exec[2];
    cudaStream_t stream[2];
    char meet[2][96];
    yard_ep *ep[2];
    stress s[2];

    for (uint32_t i = 0; i < 2; i++) {
        meet_at(&f[i], fabric, meet[i], i);
        ep[i] = open_stress(&f[i], c);
        s[i] = make_stress(ep[i], c);
        s[i].seed += i;
        CHECK_CUDA(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking));
        exec[i] = record(ep[i], &s[i], 0, stream[i]);
    }
    for (uint32_t n = 0; n < 50; n++)
        for (uint32_t i = 0; i < 2; i++)
            CHECK_CUDA(cudaGraphLaunch(exec[i], stream[i]));
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_CUDA(cudaStreamSynchronize(stream[i]));
        check_stress(ep[i], &s[i], 50 * STRESS_STEPS);
        yard_ep_destroy(ep[i]);
    }
}

static size_t free_memory(void)
{
    size_t n_free = 0, n_total = 0;

    CHECK_CUDA(cudaMemGetInfo(&n_free, &n_total));
    return n_free;
}

static uint32_t open_files(void)
{
    uint32_t n = 0;

    for (int fd = 0; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

static void run_cycles(const yard_fabric_config *fabric, void *ctx)
{
    const uint32_t n = *(const uint32_t *)ctx;
    size_t before = 0;
    uint32_t files = 0;

    for (uint32_t i = 0; i < n; i++) {
        yard_fabric_config f;
        char meet[96];

        meet_at(&f, fabric, meet, i);
        yard_ep_destroy(open_stress(&f, &fault_shape));
        if (i == 4) {
            before = free_memory();
            files = open_files();
        }
    }
    CHECK(free_memory() + (4 << 20) >= before); /* the driver may keep a page */
    CHECK(open_files() == files);
}

static void suite_life(void)
{
    stress_case small = fault_shape;
    uint32_t n = (uint32_t)(200 * scale) + 10;

    outcome(ranks_run(2, run_two_groups, &small), "life: two groups in one process%s, %llu", "", 2);
    outcome(ranks_run(2, run_cycles, &n), "life: created and destroyed %s%llu times", "", n);
}

/* ---- main ---------------------------------------------------------------------------------- */

typedef void (*ep_gpu_report)(int code, const char *fmt, const char *what, uint64_t n);
void ep_gpu_conformance(ep_gpu_report report, uint64_t first_seed, double part);
void ep_gpu_many(ep_gpu_report report, uint64_t first_seed, double part);
void ep_gpu_sum(ep_gpu_report report, uint64_t first_seed, double part);
void ep_gpu_sum_timing(void (*count)(int code));
void ep_gpu_timing(void (*count)(int code));

static void suite_conformance(void)
{
    ep_gpu_conformance(outcome, seed * 1000, scale);
}

static void suite_many(void)
{
    static const stress_case four = {
        "late, many tokens, four ranks", 200, 512, 64, 8, 1, 1, 128, 1, true, true, 5, false, false
    };

    ep_gpu_many(outcome, seed * 1000, scale);
    outcome(ranks_run(4, run_stress, (void *)&four), "stress: %s, %llu exchanges", four.name,
            (uint64_t)(four.n_replays * scale + 1) * STRESS_STEPS + 1);
}

static void suite_sum(void)
{
    ep_gpu_sum(outcome, seed, scale);
}

static void suite_timing(void)
{
    ep_gpu_timing(count);
}

static void suite_sum_timing(void)
{
    ep_gpu_sum_timing(count);
}

static const struct {
    const char *name;
    void (*run)(void);
} suites[] = {
    { "timing", suite_timing },
    { "sane", suite_sane },
    { "sum_timing", suite_sum_timing },
    { "many", suite_many }, /* 4 and 8 ranks; these four only when they are named */
    { "conformance", suite_conformance },
    { "stress", suite_stress },
    { "bad", suite_bad_input },
    { "life", suite_life },
    { "faults", suite_faults },
    { "sum", suite_sum },
};
enum { N_BY_NAME_ONLY = 4, N_SUITES = sizeof(suites) / sizeof(suites[0]) };

static void touch_device(const yard_fabric_config *config, void *ctx)
{
    (void)config;
    (void)ctx;
}

static int usage(const char *wrong)
{
    fprintf(stderr,
            "ep_gpu_test: '%s'\nusage: ep_gpu_test [--seed N] [--scale PERCENT] [--transport NAME] "
            "[--only TEXT] [SUITE...]\nby name only:",
            wrong);
    for (size_t i = 0; i < N_SUITES; i++)
        fprintf(stderr, "%s %s", i == N_BY_NAME_ONLY ? "\nand without a name all of:" : "",
                suites[i].name);
    fprintf(stderr, "\n");
    return 2;
}

/* False: no such suite. */
static bool want(bool wanted[N_SUITES], const char *name)
{
    for (size_t i = 0; i < N_SUITES; i++)
        if (!strcmp(suites[i].name, name))
            return wanted[i] = true;
    return false;
}

int main(int argc, char **argv)
{
    bool wanted[N_SUITES] = { false }, any = false;

    for (int i = 1; i < argc; i++) {
        const bool has_value = i + 1 < argc;

        if (!strcmp(argv[i], "--seed") && has_value)
            seed = strtoull(argv[++i], NULL, 0);
        else if (!strcmp(argv[i], "--scale") && has_value)
            scale = atof(argv[++i]) / 100;
        else if (!strcmp(argv[i], "--transport") && has_value)
            ranks_transport = argv[++i];
        else if (!strcmp(argv[i], "--only") && has_value)
            ranks_only = argv[++i];
        else if (want(wanted, argv[i]))
            any = true;
        else
            return usage(argv[i]);
    }
    if (ranks_run(1, touch_device, NULL) == RANKS_NO_GPU) {
        printf("ep_gpu_test: no GPU here (or no driver); nothing was tested\n");
        return RANKS_NO_GPU;
    }
    started_us = yard_now_us();
    for (size_t i = 0; i < N_SUITES; i++)
        if (any ? wanted[i] : i >= N_BY_NAME_ONLY)
            suites[i].run();
    printf("seed %llu: %u passed, %u failed\n", (unsigned long long)seed, n_passed, n_failed);
    return n_failed || !n_passed ? EXIT_FAILURE : EXIT_SUCCESS;
}
