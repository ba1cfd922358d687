/* The process that forks ranks. It is forked when the pod is created, while the pod's process has
 * one thread; from then on it forks and reaps ranks as it is told, so that the pod's process may
 * have threads. Its end, and the end of the pod's process, end all ranks. */
#ifndef YARD_ENGINE_POD_SPAWNER_H
#define YARD_ENGINE_POD_SPAWNER_H

#include <sys/types.h>

#include "engine/pod_rank.h"

/* To the spawner: one packet each. */
typedef enum yard_spawn_order_kind { YARD_SPAWN_START, YARD_SPAWN_SIGNAL } yard_spawn_order_kind;

typedef struct yard_spawn_order {
    yard_spawn_order_kind kind;
    uint32_t r; /* of the pod's ranks */
    int signal; /* of SIGNAL; one that has ended gets none */
} yard_spawn_order;

/* From the spawner. */
typedef enum yard_spawn_news_kind {
    YARD_SPAWN_STARTED, /* with the socket to the rank as SCM_RIGHTS; or status is an errno */
    YARD_SPAWN_ENDED,   /* status: as of waitpid() */
    YARD_SPAWN_STOPPED,
    YARD_SPAWN_CONTINUED
} yard_spawn_news_kind;

typedef struct yard_spawn_news {
    yard_spawn_news_kind kind;
    uint32_t r;
    pid_t pid;
    int status;
} yard_spawn_news;

/* In the spawner's process: runs until the other side of fd is closed, then kills all ranks. config
 * [n_ranks]. Does not return. */
void yard_pod_spawner_main(int fd, const yard_pod_rank_config *config, uint32_t n_ranks)
    __attribute__((noreturn));

#endif
