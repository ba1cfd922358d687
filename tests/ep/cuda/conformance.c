/* The conformance suite of the CPU backend, on GPUs. */
#include "ep/ep_impl.h"

#include "ep/cuda/mirror.h"

#include "ep/ep_case.h"

typedef struct batch {
    uint64_t first_seed;
    uint32_t n_seeds, max_hidden, max_tokens, skew, self_proving;
    bool common; /* the shapes that kernels are compiled for */
} batch;

typedef struct named_batch {
    const char *name;
    uint32_t n_ranks;
    batch b;
} named_batch;

typedef void (*ep_gpu_report)(int code, const char *fmt, const char *what, uint64_t n);
void ep_gpu_conformance(ep_gpu_report report, uint64_t first_seed, double part);
void ep_gpu_many(ep_gpu_report report, uint64_t first_seed, double part);

static void run_case(const yard_fabric_config *base, const batch *b, uint64_t seed)
{
    ep_case c = case_from_seed(seed, base->n_ranks, b->max_hidden);
    yard_fabric_config fabric = *base;
    yard_error err = { 0 };
    yard_ep *ep = NULL;
    char meet[128];
    case_rank r;

    snprintf(meet, sizeof(meet), "%s-%llu", base->rendezvous, (unsigned long long)seed);
    fabric.rendezvous = meet;
    c.config.fabric_config = &fabric;
    c.config.device = YARD_EP_CUDA;
    c.config.expert_y_in_place = false;
    c.config.self_proving_tokens = seed % 3 == 0 ? 0 : seed % 3 == 1 ? 4 : b->self_proving;
    c.config.timeout_us = base->n_ranks > 8 ? 20000000 : 1500000; /* they take turns on a GPU */
    if (b->common) {
        c.config.hidden = (c.config.hidden / 16 + 1) * 16;
        c.config.top_k = 8;
        c.config.n_experts = 16 * base->n_ranks;
        c.config.tp = 1;
    }
    if (b->max_tokens) {
        c.config.hidden = b->max_tokens > 100 ? 512 : 7168;
        c.config.max_tokens = b->max_tokens;
        c.config.n_experts = 64;
        c.config.top_k = 8;
        c.n_steps = 2;
    }
    if (yard_ep_create(&ep, &c.config, &err) != YARD_OK) {
        printf("rank %u: %s: %s\n", base->rank, err.message, case_describe(&c));
        fflush(stdout);
        _exit(1);
    }
    mirror_open(&c.config, ep, b->skew);
    case_open(&r, &c, ep);
    if (!case_run(&r)) {
        printf("%s: %s, flags %d\n", r.failure, case_describe(&c),
               c.config.self_proving_tokens == 0);
        fflush(stdout);
        _exit(1);
    }
    case_close(&r);
    mirror_close();
    yard_ep_destroy(ep);
}

static void run_batch(const yard_fabric_config *base, void *ctx)
{
    const batch *b = ctx;

    for (uint32_t i = 0; i < b->n_seeds; i++)
        run_case(base, b, b->first_seed + i);
}

static void run_batches(ep_gpu_report report, const named_batch *batches, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        char device[32];

        if (!ranks_wants(batches[i].name))
            continue;
        snprintf(device, sizeof(device), "/dev/nvidia%u", batches[i].n_ranks - 1);
        if (ranks_transport && strstr(ranks_transport, "nvshmem") && access(device, F_OK) != 0 &&
            batches[i].n_ranks > 2) {
            printf("not run: conformance: %s: NVSHMEM wants a GPU for each\n", batches[i].name);
            continue;
        }
        report(ranks_run(batches[i].n_ranks, run_batch, (void *)&batches[i].b),
               "conformance: %s, %llu cases", batches[i].name, batches[i].b.n_seeds);
    }
}

void ep_gpu_conformance(ep_gpu_report report, uint64_t first_seed, double part)
{
    const uint32_t n = (uint32_t)(60 * part) + 4;
    const named_batch batches[] = {
        { "one rank", 1, { first_seed, n, 300, 0, 0, 128, false } },
        { "two ranks", 2, { first_seed + 100, 2 * n, 300, 0, 0, 128, false } },
        { "two ranks, buffers askew", 2, { first_seed + 300, n, 300, 0, 4, 128, false } },
        { "two ranks, hidden 7168", 2, { first_seed + 400, n / 8 + 2, 300, 20, 0, 128, false } },
        { "four ranks", 4, { first_seed + 500, n / 8 + 1, 300, 0, 0, 128, false } },
        { "two ranks, common shapes", 2, { first_seed + 600, n, 2000, 0, 0, 128, true } },
        { "two ranks, many tokens", 2, { first_seed + 700, n / 16 + 1, 300, 2500, 0, 128, true } },
    };

    run_batches(report, batches, sizeof(batches) / sizeof(batches[0]));
}

void ep_gpu_many(ep_gpu_report report, uint64_t first_seed, double part)
{
    const uint32_t n = (uint32_t)(60 * part) + 4;
    const named_batch batches[] = {
        { "four ranks", 4, { first_seed + 600, n, 300, 0, 0, 128, false } },
        { "four ranks, hidden 7168", 4, { first_seed + 700, n / 8 + 2, 300, 20, 0, 128, false } },
        { "eight ranks", 8, { first_seed + 800, n, 300, 0, 0, 128, false } },
        { "eight ranks, hidden 7168", 8, { first_seed + 900, n / 8 + 2, 300, 20, 0, 128, false } },
        { "forty ranks", 40, { first_seed + 950, n / 8 + 1, 40, 0, 0, 128, false } },
    };

    run_batches(report, batches, sizeof(batches) / sizeof(batches[0]));
}
