/* A pod: all instances of one machine behind one handle. The parent process holds the requests and
 * starts, watches and replaces the ranks' processes; it computes nothing. When a rank is lost, the
 * group re-forms without a hand: requests that have streamed nothing begin anew, the others end
 * with an error. Every request that was submitted ends with exactly one last event.
 *
 *     yard_pod_create(&pod, &config, &err);
 *     yard_pod_submit(pod, instance, &request, &id, &err);
 *     while (!done && yard_pod_run(pod, 1000000, &err) == YARD_OK)
 *         n = yard_pod_poll(pod, events, 64);
 *     yard_pod_destroy(pod);
 *
 * Several pods (one a machine, equal but for `pod`) make one group when they share a rendezvous;
 * each has the requests of its own instances.
 *
 * Processes are forked without exec: the caller's process has one thread when it creates a pod.
 * That forks a process which forks the ranks from then on, so the caller may start threads
 * afterwards. The death of the caller's process ends all of them. Threads: one caller at a time. */
#ifndef YARD_ENGINE_POD_H
#define YARD_ENGINE_POD_H

#include <sys/types.h>

#include <yard/engine.h>

#include "engine/report.h"

typedef struct yard_pod yard_pod;

typedef struct yard_pod_config {
    yard_engine_config engine; /* of each rank; fabric is not read. n_threads 0: the processors
                                  divided by the ranks. timeout_us: how soon a lost rank shows */
    uint32_t n_ranks;          /* of this pod */
    uint32_t pod, n_pods;      /* n_pods 0: this is the only one */
    const char *transport;     /* as yard_fabric_config */
    const char *rendezvous;    /* where the first rank of pod 0 listens; NULL with one pod */
    const char *secret;        /* NULL: random, one pod only */
    const char *bind_host;
    uint64_t start_timeout_us;                   /* of each start stage; 0: 60 s */
    void (*notice)(void *ctx, const char *line); /* what starts, is lost, serves again */
    void *notice_ctx;
} yard_pod_config;

/* Checks the layout (YARD_EINVAL names the nearest one that can be) and starts the processes;
 * returns at once. Strings and callbacks of config must live as long as the pod. */
yard_status yard_pod_create(yard_pod **out, const yard_pod_config *config, yard_error *err);

/* Ends all processes; no events any more. NULL is fine. */
void yard_pod_destroy(yard_pod *pod);

/* Instances of this pod, and the number that the first one has in the group. */
uint32_t yard_pod_instance_count(const yard_pod *pod);
uint32_t yard_pod_first_instance(const yard_pod *pod);

bool yard_pod_serves(const yard_pod *pod);
uint32_t yard_pod_generation(const yard_pod *pod); /* groups so far */
/* Of a rank of this pod, once it served: yard_engine_describe() there, with the device that it has;
 * "" before. */
const char *yard_pod_describe(const yard_pod *pod, uint32_t rank);
pid_t yard_pod_rank_pid(const yard_pod *pod, uint32_t rank); /* of this pod's ranks; 0: none */

/* Accepts a request for an instance of this pod, also while it does not serve. What only the engine
 * can refuse ends it with an error event. Errors: YARD_EINVAL, YARD_ENOMEM. */
yard_status yard_pod_submit(yard_pod *pod, uint32_t instance, const yard_request *request,
                            uint64_t *id, yard_error *err);

/* Asks for the end of a request, or one choice of it; its last event says how it ended. Unknown ids
 * are none. */
void yard_pod_abort(yard_pod *pod, uint64_t id, uint32_t choice);

/* yard_pod_run() also returns when fd can be read, which is the caller's; -1: no such fd. */
void yard_pod_wake_on(yard_pod *pod, int fd);

/* Does what is to be done for up to timeout_us; returns earlier when there are events or it begins
 * to serve. Errors: a rank cannot work (YARD_EFORMAT, ..), or the group failed several times in a
 * row (YARD_EPEER): the pod is of no use any more. */
yard_status yard_pod_run(yard_pod *pod, uint64_t timeout_us, yard_error *err);

/* The orderly end where there are several pods: no request comes to this one any more, but its
 * ranks compute for the others until all pods have said so. Returns then, or when a rank was lost
 * at the end and the others do not come to a new group. Errors: as yard_pod_run(). */
yard_status yard_pod_finish(yard_pod *pod, yard_error *err);

/* As yard_event. The taker frees it. */
typedef struct yard_pod_event {
    uint64_t id;
    uint32_t choice;
    uint32_t n_tokens; /* 0 or 1 */
    int32_t token;
    yard_finish finish; /* other than YARD_RUNNING exactly once per choice, on its last event */
    uint32_t n_cached;
    bool of_prompt;
    uint32_t n_logprobs;
    yard_token_logprob *logprob; /* [n_logprobs] malloc'd; NULL: none */
    char *message;               /* of YARD_FINISH_ERROR, malloc'd; NULL otherwise */
    bool lost;                   /* of YARD_FINISH_ERROR: with its group, so that another pod may do
                                    better */
} yard_pod_event;

/* Takes up to max_events events, oldest first; returns how many. */
uint32_t yard_pod_poll(yard_pod *pod, yard_pod_event *events, uint32_t max_events);
void yard_pod_event_free(yard_pod_event *event); /* what it holds, not the struct */

/* What an instance said last; it does so after each step, and nothing is waited for. n_seen is the
 * highest id up to which all requests given to the instance are known to it or have ended.
 * step_age_us grows while the instance has work and says nothing. False: it has said nothing in
 * this generation. */
bool yard_pod_report(const yard_pod *pod, uint32_t instance, yard_engine_report *out);

/* Changes of what the instances' caches hold, in the order of each instance; returns how many. If
 * nobody takes them, or memory ends, they are lost: then, as after a regroup,
 * YARD_PAGES_UNKNOWN comes for an instance, and in time all its pages. */
uint32_t yard_pod_poll_pages(yard_pod *pod, yard_page_event *events, uint32_t max_events);

/* Asks for the same. */
void yard_pod_pages_anew(yard_pod *pod, uint32_t instance);

/* The parent of first pages, equal on all instances: yard_engine_page_root(). False: none has
 * joined a group yet. */
bool yard_pod_page_root(const yard_pod *pod, yard_page_hash *out);

/* Statistics of a rank of this pod; waits for its answer. Errors: YARD_EAGAIN when it does not
 * serve, YARD_ETIMEDOUT. */
yard_status yard_pod_stats(yard_pod *pod, uint32_t rank, yard_engine_stats *out, yard_error *err);

#endif
