/* Ranks as processes for the GPU tests, which bring their own frame: the machine has no cmocka.
 * Rank r drives device r modulo the number of devices. Nothing touches CUDA before the fork. */
#ifndef YARD_TESTS_EP_RANKS_H
#define YARD_TESTS_EP_RANKS_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include <yard/ep.h>

#include "base/base.h"

enum { RANKS_MAX = 40, RANKS_ALARM_S = 60, RANKS_NO_GPU = 77 };

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            printf("%s:%d: rank %u: %s\n", __FILE__, __LINE__, ranks_self, #cond);                 \
            fflush(stdout);                                                                        \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

#define CHECK_CUDA(call)                                                                           \
    do {                                                                                           \
        const cudaError_t rc_ = (call);                                                            \
        if (rc_ != cudaSuccess) {                                                                  \
            printf("%s:%d: rank %u: %s: %s\n", __FILE__, __LINE__, ranks_self, #call,              \
                   cudaGetErrorString(rc_));                                                       \
            fflush(stdout);                                                                        \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

#define CHECK_EP(ep, call)                                                                         \
    do {                                                                                           \
        if ((call) != YARD_OK) {                                                                   \
            printf("%s:%d: rank %u: %s\n", __FILE__, __LINE__, ranks_self, yard_ep_error(ep));     \
            fflush(stdout);                                                                        \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static uint32_t ranks_self;
extern const char *ranks_transport; /* of the groups; NULL: what the library chooses */
extern const char *ranks_only;      /* in the name of every case that is run; NULL: all are */

static inline bool ranks_wants(const char *name)
{
    return !ranks_only || strstr(name, ranks_only);
}

typedef struct ranks {
    uint32_t n;
    char meet[64];
    pid_t pids[RANKS_MAX];
} ranks;

typedef void (*ranks_fn)(const yard_fabric_config *config, void *ctx);

static inline void ranks_use_device(uint32_t rank)
{
    int n = 0;

    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0)
        _exit(RANKS_NO_GPU);
    CHECK_CUDA(cudaSetDevice((int)rank % n));
}

static inline void ranks_start(ranks *g, uint32_t n, ranks_fn fn, void *ctx)
{
    static unsigned int counter;

    *g = (ranks){ .n = n };
    snprintf(g->meet, sizeof(g->meet), "unix:yard-gpu-%d-%u", getpid(), counter++);
    fflush(NULL);
    for (uint32_t r = 0; r < n; r++) {
        g->pids[r] = fork();
        if (g->pids[r] == 0) {
            yard_fabric_config c = YARD_FABRIC_CONFIG_INIT;

            prctl(PR_SET_PDEATHSIG, SIGKILL);
            alarm(RANKS_ALARM_S);
            ranks_self = r;
            ranks_use_device(r);
            c.rank = r;
            c.n_ranks = n;
            c.rendezvous = g->meet;
            c.transport = ranks_transport;
            fn(&c, ctx);
            fflush(NULL);
            _exit(0);
        }
    }
}

/* Exit code, or 128 + signal. */
static inline int ranks_wait(ranks *g, uint32_t rank)
{
    int status = 0;

    if (g->pids[rank] <= 0 || waitpid(g->pids[rank], &status, 0) < 0)
        return -1;
    g->pids[rank] = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* The first code that is not 0. */
static inline int ranks_run(uint32_t n, ranks_fn fn, void *ctx)
{
    int worst = 0;
    ranks g;

    ranks_start(&g, n, fn, ctx);
    for (uint32_t r = 0; r < n; r++) {
        const int code = ranks_wait(&g, r);
        worst = worst ? worst : code;
    }
    return worst;
}

#endif
