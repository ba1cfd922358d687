/* The ranks' processes as their pod sees them: started, watched and reaped through a spawner
 * (pod_spawner.h). */
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
    bool has_stats;        /* they came since they were asked for */
    bool finished;         /* its group has */
    char description[256]; /* of its engine, once it was in a group */

    /* what the spawner said */
    bool ended, stopped;
    int status; /* of ended */
} yard_pod_process;

typedef struct yard_pod_spawner {
    pid_t pid; /* 0: none */
    int fd;
    yard_pod_process *process; /* [n_ranks] the pod's */
    uint32_t n_ranks;
} yard_pod_spawner;

/* Forks the spawner; the process has one thread. config, process [n_ranks]: the pod's. Errors:
 * YARD_EIO. */
yard_status yard_pod_spawner_start(yard_pod_spawner *s, const yard_pod_rank_config *config,
                                   yard_pod_process *process, uint32_t n_ranks, yard_error *err);
/* Kills what is left of the ranks, and waits. None started is fine. */
void yard_pod_spawner_stop(yard_pod_spawner *s);

/* Starts process r, which has none. Errors: YARD_EIO. */
yard_status yard_pod_process_start(yard_pod_spawner *s, uint32_t r, yard_error *err);

/* Nothing happens to one that has ended. */
void yard_pod_process_signal(yard_pod_spawner *s, uint32_t r, int number);

/* Waits until the process is gone, for patience_us, then kills it and waits. how: what became of
 * it, "was killed by signal 9 (Killed)". */
void yard_pod_process_reap(yard_pod_spawner *s, uint32_t r, uint64_t patience_us, char *how,
                           size_t n_how);

/* True when it has ended; *stopped: a signal has stopped it. */
bool yard_pod_process_look(yard_pod_spawner *s, uint32_t r, bool *stopped);

#endif
