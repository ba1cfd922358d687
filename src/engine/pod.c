/* The parent of ranks: its creation and end, and what its caller asks. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

#include "engine/pod_impl.h"

enum {
    QUIT_US = 3000000, /* from QUIT to kill */
    DEFAULT_START_US = 60000000,
    DEFAULT_STOP_US = 5000000,
    FINISH_US = 500000 /* a turn of yard_pod_finish() */
};

static yard_status make_secret(yard_pod *pod, yard_error *err)
{
    uint8_t random[16];

    if (getrandom(random, sizeof(random), 0) != sizeof(random))
        return yard_fail(err, YARD_EIO, "pod: no random numbers");
    for (size_t i = 0; i < sizeof(random); i++)
        snprintf(pod->secret + 2 * i, 3, "%02x", random[i]);
    pod->config.secret = pod->secret;
    return YARD_OK;
}

static uint32_t threads_for(const yard_pod_config *c)
{
    const uint32_t n = yard_cpu_count() / c->n_ranks;

    return c->engine.n_threads ? c->engine.n_threads : n > 0 ? n : 1;
}

static yard_status check_config(const yard_pod_config *c, yard_error *err)
{
    const uint32_t tp = c->engine.tp ? c->engine.tp : 1, n_pods = c->n_pods ? c->n_pods : 1;
    yard_engine_budget budget;

    if (c->n_ranks == 0)
        return yard_fail(err, YARD_EINVAL, "pod: want at least one rank, got 0");
    if (n_pods > 1 && c->n_ranks % tp != 0) {
        uint32_t near = tp < c->n_ranks ? tp : c->n_ranks;

        while (c->n_ranks % near != 0)
            near--;
        return yard_fail(err, YARD_EINVAL,
                         "layout: want ranks of a machine a multiple of TP %u, for an instance is "
                         "on one machine; got %u; nearest: TP %u",
                         tp, c->n_ranks, near);
    }
    if (c->pod >= n_pods || (n_pods > 1 && !c->rendezvous))
        return yard_fail(err, YARD_EINVAL, "pod: want number below %u, got %u%s", n_pods, c->pod,
                         c->rendezvous ? "" : "; and a rendezvous");
    return yard_engine_budget_of(&c->engine, c->n_ranks * n_pods, c->pod * c->n_ranks, &budget,
                                 err);
}

/* Kernels end a wait for a lost rank by its deadline alone: that of the sum, then that of dispatch.
 */
static uint64_t leave_us(const yard_engine_config *c, uint64_t timeout_us)
{
    const bool on_device = c->device && strcmp(c->device, "cpu") != 0;

    return YARD_POD_LEAVE_US + (on_device ? 2 * timeout_us : 0);
}

static yard_status open_pod(yard_pod *pod, yard_error *err)
{
    const yard_pod_config *c = &pod->config;
    const uint64_t start_us = c->start_timeout_us ? c->start_timeout_us : DEFAULT_START_US;
    const uint64_t timeout_us = c->engine.timeout_us ? c->engine.timeout_us : DEFAULT_STOP_US;
    yard_status st;

    pod->rank_config = calloc(pod->n_ranks, sizeof(*pod->rank_config));
    pod->process = calloc(pod->n_ranks, sizeof(*pod->process));
    pod->fds = calloc(pod->n_ranks + 1, sizeof(*pod->fds));
    pod->wake_fd = -1;
    if (!pod->rank_config || !pod->process || !pod->fds)
        return yard_fail(err, YARD_ENOMEM, "pod: no memory for %u ranks", pod->n_ranks);
    for (uint32_t r = 0; r < pod->n_ranks; r++) {
        yard_pod_rank_config *rank = &pod->rank_config[r];

        *rank = (yard_pod_rank_config){ .engine = c->engine,
                                        .rank = pod->first_rank + r,
                                        .n_ranks = pod->n_ranks * (c->n_pods ? c->n_pods : 1),
                                        .device_idx = r,
                                        .transport = c->transport,
                                        .secret = c->secret,
                                        .bind_host = c->bind_host,
                                        .start_timeout_us = start_us,
                                        .alone = c->n_pods <= 1,
                                        .reports = r % pod->tp == 0 };
        rank->engine.n_threads = threads_for(c);
        pod->process[r].wire.fd = -1;
    }
    st = yard_pod_reports_open(pod, err);
    if (st == YARD_OK)
        st = yard_pod_spawner_start(&pod->spawner, pod->rank_config, pod->process, pod->n_ranks,
                                    err);
    if (st != YARD_OK)
        return st;
    /* A start stage ends by itself within its time; the pod's patience is for what hangs. */
    return yard_generation_open(&pod->generation, pod->n_ranks, start_us + YARD_POD_LEAVE_US,
                                leave_us(&c->engine, timeout_us), timeout_us, err);
}

yard_status yard_pod_create(yard_pod **out, const yard_pod_config *config, yard_error *err)
{
    yard_pod *pod;
    yard_status st = check_config(config, err);

    if (st != YARD_OK)
        return st;
    pod = calloc(1, sizeof(*pod));
    if (!pod)
        return yard_fail(err, YARD_ENOMEM, "pod: %zu bytes", sizeof(*pod));
    pod->config = *config;
    pod->n_ranks = config->n_ranks;
    pod->tp = config->engine.tp ? config->engine.tp : 1;
    pod->first_rank = config->pod * config->n_ranks;
    pod->started_us = yard_now_us();
    pod->next_notice_us = pod->started_us + YARD_POD_NOTICE_US;
    if (!config->secret)
        st = make_secret(pod, err);
    if (st == YARD_OK)
        st = open_pod(pod, err);
    if (st == YARD_OK)
        st = yard_pod_run(pod, 0, err);
    if (st != YARD_OK) {
        yard_pod_destroy(pod);
        return st;
    }
    *out = pod;
    return YARD_OK;
}

void yard_pod_destroy(yard_pod *pod)
{
    const uint64_t until_us = yard_now_us() + QUIT_US;
    char how[64];

    if (!pod)
        return;
    for (uint32_t r = 0; pod->process && r < pod->n_ranks; r++)
        if (pod->process[r].pid > 0) {
            yard_wire_send(&pod->process[r].wire, YARD_FRAME_QUIT, NULL, 0, NULL, 0);
            /* a stopped one quits when it goes on */
            yard_pod_process_signal(&pod->spawner, r, SIGCONT);
        }
    for (uint32_t r = 0; pod->process && r < pod->n_ranks; r++) {
        const uint64_t now = yard_now_us();
        if (pod->process[r].pid > 0)
            yard_pod_process_reap(&pod->spawner, r, until_us > now ? until_us - now : 0, how,
                                  sizeof(how));
    }
    yard_pod_spawner_stop(&pod->spawner);
    yard_generation_close(&pod->generation);
    yard_pod_requests_close(&pod->requests);
    yard_pod_reports_close(pod);
    free(pod->rank_config);
    free(pod->process);
    free(pod->fds);
    free(pod);
}

void yard_pod_wake_on(yard_pod *pod, int fd)
{
    pod->wake_fd = fd;
}

uint32_t yard_pod_instance_count(const yard_pod *pod)
{
    return pod->n_ranks / pod->tp;
}

uint32_t yard_pod_first_instance(const yard_pod *pod)
{
    return pod->first_rank / pod->tp;
}

bool yard_pod_serves(const yard_pod *pod)
{
    return yard_generation_serves(&pod->generation);
}

uint32_t yard_pod_generation(const yard_pod *pod)
{
    return pod->generation.number;
}

const char *yard_pod_describe(const yard_pod *pod, uint32_t rank)
{
    return rank < pod->n_ranks ? pod->process[rank].description : "";
}

pid_t yard_pod_rank_pid(const yard_pod *pod, uint32_t rank)
{
    return rank < pod->n_ranks ? pod->process[rank].pid : 0;
}

yard_status yard_pod_submit(yard_pod *pod, uint32_t instance, const yard_request *request,
                            uint64_t *id, yard_error *err)
{
    yard_status st;

    if (instance >= yard_pod_instance_count(pod))
        return yard_fail(err, YARD_EINVAL, "instance: want below %u, got %u",
                         yard_pod_instance_count(pod), instance);
    if (request->n_choices == 0 || request->n_choices > pod->config.engine.max_seqs)
        return yard_fail(err, YARD_EINVAL, "n_choices: want 1 to %u, got %u",
                         pod->config.engine.max_seqs, request->n_choices);
    st = yard_pod_requests_add(&pod->requests, instance, request, id, err);
    if (st == YARD_OK && yard_pod_serves(pod))
        yard_pod_send_request(pod, &pod->requests.items[pod->requests.n - 1]);
    return st;
}

void yard_pod_abort(yard_pod *pod, uint64_t id, uint32_t choice)
{
    bool to_send;

    if (!yard_pod_requests_abort(&pod->requests, id, choice, &to_send))
        yard_pod_no_memory(pod);
    if (to_send)
        yard_pod_send_abort(pod, yard_pod_requests_find(&pod->requests, id), choice);
}

uint32_t yard_pod_poll(yard_pod *pod, yard_pod_event *events, uint32_t max_events)
{
    yard_pod_requests *q = &pod->requests;
    uint32_t n = 0;

    while (n < max_events && q->first_event < q->n_events)
        events[n++] = q->events[q->first_event++];
    return n;
}

/* What one rank says is true of the group: a rank that was lost since then is not missed. Where the
 * loss came just before, others may have finished all the same, and will not come to a new group;
 * one attempt without them is enough for a pod that needs nothing itself. */
static bool has_finished(const yard_pod *pod)
{
    bool any = false, all = true;

    for (uint32_t r = 0; r < pod->n_ranks; r++) {
        any = any || pod->process[r].finished;
        all = all && pod->process[r].finished;
    }
    if (yard_pod_serves(pod))
        return all;
    return any || (pod->served && pod->requests.n == 0 && pod->generation.n_attempts > 1);
}

yard_status yard_pod_finish(yard_pod *pod, yard_error *err)
{
    yard_status st = YARD_OK;

    pod->finishing = true;
    if (yard_pod_serves(pod))
        yard_pod_send_finish(pod);
    while (st == YARD_OK && !has_finished(pod))
        st = yard_pod_run(pod, FINISH_US, err);
    return st;
}

yard_status yard_pod_stats(yard_pod *pod, uint32_t rank, yard_engine_stats *out, yard_error *err)
{
    const uint64_t until_us = yard_now_us() + pod->generation.start_us;
    yard_pod_process *p = &pod->process[rank];

    if (!yard_pod_serves(pod))
        return yard_fail(err, YARD_EAGAIN, "pod: does not serve");
    p->has_stats = false;
    yard_wire_send(&p->wire, YARD_FRAME_STATS, NULL, 0, NULL, 0);
    while (!p->has_stats && pod->failure.status == YARD_OK && yard_now_us() < until_us) {
        yard_pod_await(pod, until_us);
        yard_pod_act(pod);
    }
    *out = p->stats;
    return p->has_stats ? YARD_OK
                        : yard_fail(err, YARD_ETIMEDOUT, "pod: rank %u: no statistics", rank);
}
