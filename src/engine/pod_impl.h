/* Private to the pod: pod.c is its life and its caller's side, pod_run.c what it does meanwhile. */
#ifndef YARD_ENGINE_POD_IMPL_H
#define YARD_ENGINE_POD_IMPL_H

#include <poll.h>

#include "engine/generation.h"
#include "engine/pod.h"
#include "engine/pod_process.h"
#include "engine/pod_requests.h"

enum {
    YARD_POD_REASON_BYTES = 400,
    YARD_POD_LEAVE_US = 2500000, /* from the end of a group to the kill of who stays in it; closing
                                    a network fabric may take it 2 s */
    YARD_POD_NOTICE_US = 3000000 /* between lines about who is missing */
};

/* What an instance says of itself. */
typedef struct yard_pod_instance {
    yard_engine_report report;
    bool has_report;
    uint64_t said_us; /* when it came */
} yard_pod_instance;

struct yard_pod {
    yard_pod_config config;
    yard_pod_rank_config *rank_config; /* [n_ranks] */
    yard_pod_process *process;         /* [n_ranks] */
    yard_pod_spawner spawner;
    struct pollfd *fds; /* [n_ranks + 1] the last is the caller's */
    int wake_fd;        /* the caller's; -1: none */
    uint32_t n_ranks, tp, first_rank;
    char secret[33];

    yard_generation generation;
    char reason[YARD_POD_REASON_BYTES]; /* why the last group is over; "" since it serves */
    uint64_t started_us, next_notice_us, next_look_us;
    yard_pod_requests requests;
    yard_pod_instance *instance;  /* [n_ranks / tp] */
    yard_page_events page_events; /* of all instances */
    bool pages_lost;              /* some did not fit: nothing more is kept until all are taken */
    yard_page_hash page_root;
    bool has_page_root;
    bool finishing, served; /* no request comes any more; a group did once */
    yard_error failure;     /* status other than YARD_OK: of no use any more */
};

/* The pod fails, with its next yard_pod_run(). */
void yard_pod_no_memory(yard_pod *pod);

void yard_pod_send_request(yard_pod *pod, yard_pod_request *request);
void yard_pod_send_abort(yard_pod *pod, const yard_pod_request *request, uint32_t choice);
void yard_pod_send_finish(yard_pod *pod);

/* Waits for what happens until until_us, or less, and takes it; yard_pod_act() does what follows.
 */
void yard_pod_await(yard_pod *pod, uint64_t until_us);
void yard_pod_act(yard_pod *pod);

/* pod_reports.c: what instances say of themselves, until the group is over. */
yard_status yard_pod_reports_open(yard_pod *pod, yard_error *err);
void yard_pod_reports_close(yard_pod *pod);
void yard_pod_reports_forget(yard_pod *pod);
void yard_pod_take_report(yard_pod *pod, uint32_t instance, const yard_frame *frame);
void yard_pod_take_pages(yard_pod *pod, uint32_t instance, const yard_frame *frame);

#endif
