/* The process of one rank: an engine in a group, told what to do by its pod (pod_wire.h). */
#ifndef YARD_ENGINE_POD_RANK_H
#define YARD_ENGINE_POD_RANK_H

#include <yard/engine.h>

typedef struct yard_pod_rank_config {
    yard_engine_config engine; /* fabric and callbacks are filled in */
    uint32_t rank, n_ranks;    /* of the group */
    uint32_t device_idx;       /* of its pod's ranks: which of the machine's devices it takes */
    const char *transport, *secret, *bind_host; /* as yard_fabric_config */
    uint64_t start_timeout_us;                  /* of each start stage */
    bool alone;                                 /* all ranks of the group are of one pod */
    bool reports; /* sends events: the first rank of an instance; the others' are the same */
} yard_pod_rank_config;

/* Runs until the pod says QUIT or is gone; fd is the rank's end of the sockets, owned. Returns the
 * exit code of the process. */
int yard_pod_rank_main(const yard_pod_rank_config *config, int fd);

#endif
