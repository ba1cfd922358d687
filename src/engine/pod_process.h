/* A rank's process as its pod sees it. */
#ifndef YARD_ENGINE_POD_PROCESS_H
#define YARD_ENGINE_POD_PROCESS_H

#include <sys/types.h>

#include "engine/pod_rank.h"
#include "engine/pod_wire.h"

typedef struct yard_pod_process {
    pid_t pid; /* 0: none */
    yard_wire wire;
    yard_progress_frame progress; /* of its start stage */
    yard_engine_stats stats;
    bool has_stats; /* they came since they were asked for */
    bool finished;  /* its group has */
} yard_pod_process;

/* Forks; others [n_others] are the pod's processes, whose sockets the child must not keep. Errors:
 * YARD_EIO. */
yard_status yard_pod_process_start(yard_pod_process *p, const yard_pod_rank_config *config,
                                   const yard_pod_process *others, uint32_t n_others,
                                   yard_error *err);

/* Waits until the process is gone, for patience_us, then kills it and waits. how: what became of
 * it, "was killed by signal 9 (Killed)". */
void yard_pod_process_reap(yard_pod_process *p, uint64_t patience_us, char *how, size_t n_how);

/* True when it has ended; *stopped is changed when a signal stopped or continued it. */
bool yard_pod_process_look(yard_pod_process *p, bool *stopped);

#endif
