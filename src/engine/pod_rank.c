/* A rank's process. Its main thread runs the engine and everything else; while the group may sleep,
 * a second one watches the socket and wakes the engine. */
#include "engine/pod_rank.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine/engine_impl.h"
#include "engine/pod_wire.h"
#include "engine/signature.h"

enum { IDLE_WAIT_US = 10000000 };

/* A request's number here and at the pod. */
typedef struct id_pair {
    uint64_t id, pod_id;
    uint32_t n_left; /* choices that have not ended */
} id_pair;

typedef struct rank {
    const yard_pod_rank_config *config;
    yard_wire wire;
    size_t heap_bytes, device_heap_bytes;
    char signature[YARD_ENGINE_SIGNATURE_BYTES];
    yard_fabric *fabric; /* NULL: in no group */
    yard_engine *engine; /* NULL: never was in one */
    yard_form_frame form;
    bool forms, leaves, quits; /* what the pod said last */
    yard_error failure;        /* why this rank never will work; it still has to tell the others */

    id_pair *ids; /* [n_ids] of live requests, ascending */
    size_t n_ids, max_ids;
    uint64_t last_pod_id; /* of requests of this generation; 0: none */

    uint8_t *frame; /* EVENTS in the making */
    size_t frame_capacity;
    yard_engine_report report; /* sent last */
    uint64_t n_steps;          /* when it was */

    pthread_t watcher;
    bool watches;
    int stop, drained; /* eventfds: it is to end; the socket has been read */
} rank;

static void await_socket(rank *r, short events)
{
    struct pollfd p = { .fd = r->wire.fd, .events = events };

    poll(&p, 1, -1);
}

/* The pod reads whatever happens; a rank may wait for it. */
static void send_frame(rank *r, yard_frame_kind kind, const void *head, size_t n_head,
                       const void *tail, size_t n_tail)
{
    yard_wire_send(&r->wire, kind, head, n_head, tail, n_tail);
    while (yard_wire_has_output(&r->wire)) {
        await_socket(r, POLLOUT);
        yard_wire_flush(&r->wire);
    }
}

static void send_text(rank *r, yard_frame_kind kind, const char *text)
{
    send_frame(r, kind, text, strlen(text) + 1, NULL, 0);
}

static void warn_pod(void *ctx, const char *line)
{
    send_text(ctx, YARD_FRAME_WARNING, line);
}

static void tell_progress(void *ctx, const char *what, uint64_t done, uint64_t total)
{
    yard_progress_frame p = { .done = done, .total = total };

    snprintf(p.what, sizeof(p.what), "%s", what);
    send_frame(ctx, YARD_FRAME_PROGRESS, &p, sizeof(p), NULL, 0);
}

static bool remember(rank *r, id_pair pair)
{
    if (r->n_ids == r->max_ids) {
        const size_t max_ids = r->max_ids ? 2 * r->max_ids : 64;
        id_pair *larger = realloc(r->ids, max_ids * sizeof(*larger));

        if (!larger)
            return false;
        r->ids = larger;
        r->max_ids = max_ids;
    }
    r->ids[r->n_ids++] = pair;
    return true;
}

static int compare_ids(const void *a, const void *b)
{
    const uint64_t x = ((const id_pair *)a)->id, y = ((const id_pair *)b)->id;

    return x < y ? -1 : x > y;
}

static id_pair *find(const rank *r, uint64_t id)
{
    const id_pair key = { .id = id };

    return r->n_ids ? bsearch(&key, r->ids, r->n_ids, sizeof(key), compare_ids) : NULL;
}

/* 0: of no live request. */
static uint64_t id_of(const rank *r, uint64_t pod_id)
{
    for (size_t i = 0; i < r->n_ids; i++)
        if (r->ids[i].pod_id == pod_id)
            return r->ids[i].id;
    return 0;
}

static void forget(rank *r, id_pair *pair)
{
    const size_t after = r->n_ids - (size_t)(pair - r->ids) - 1;

    memmove(pair, pair + 1, after * sizeof(*pair));
    r->n_ids--;
}

/* All ranks of an instance refuse the same requests, so their commands stay in step. */
static void take_request(rank *r, const yard_frame *f)
{
    yard_request request;
    yard_id_frame refused;
    uint64_t id, pod_id;

    if (!yard_request_decode(f->data, f->n_bytes, &pod_id, &request))
        return;
    r->last_pod_id = pod_id;
    if (yard_engine_submit(r->engine, &request, &id) == YARD_OK) {
        if (!remember(r, (id_pair){ id, pod_id, request.n_choices }))
            r->quits = true; /* out of memory: the pod starts it again */
        return;
    }
    refused.id = pod_id;
    if (r->config->reports)
        send_frame(r, YARD_FRAME_REFUSED, &refused, sizeof(refused), yard_engine_error(r->engine),
                   strlen(yard_engine_error(r->engine)) + 1);
}

static void tell_stats(rank *r)
{
    yard_engine_stats stats = { 0 };

    if (r->engine)
        yard_engine_get_stats(r->engine, &stats);
    send_frame(r, YARD_FRAME_STATS, &stats, sizeof(stats), NULL, 0);
}

static void take_frame(rank *r, const yard_frame *f)
{
    switch (f->kind) {
    case YARD_FRAME_FORM:
        if (f->n_bytes == sizeof(r->form))
            memcpy(&r->form, f->data, sizeof(r->form));
        r->forms = f->n_bytes == sizeof(r->form);
        r->leaves = false; /* that was another group; a LEAVE behind this frame counts */
        break;
    case YARD_FRAME_SUBMIT:
        if (r->fabric)
            take_request(r, f);
        break;
    case YARD_FRAME_ABORT:
        if (r->fabric && f->n_bytes == sizeof(yard_id_frame)) {
            yard_id_frame a;
            memcpy(&a, f->data, sizeof(a));
            /* also one that has ended here: another rank of the instance may not know yet */
            if (yard_engine_abort(r->engine, id_of(r, a.id), a.choice) != YARD_OK)
                r->quits = true;
        }
        break;
    case YARD_FRAME_LEAVE:
        r->leaves = true;
        break;
    case YARD_FRAME_FINISH:
        if (r->fabric)
            yard_engine_finish(r->engine);
        break;
    case YARD_FRAME_PAGES:
        if (r->fabric)
            yard_engine_pages_anew(r->engine);
        break;
    case YARD_FRAME_STATS:
        tell_stats(r);
        break;
    default:
        r->quits = true;
        break;
    }
}

static void take_frames(rank *r)
{
    yard_frame f;
    bool any = false;

    while (!r->quits && yard_wire_receive(&r->wire, &f)) {
        take_frame(r, &f);
        any = true;
    }
    r->quits = r->quits || r->wire.ended;
    if (any && r->watches)
        eventfd_write(r->drained, 1);
}

/* False: it is to end. */
static bool await_or_stop(const rank *r, int fd)
{
    struct pollfd fds[2] = { { .fd = fd, .events = POLLIN }, { .fd = r->stop, .events = POLLIN } };

    while (poll(fds, 2, -1) < 0)
        ;
    return !fds[1].revents;
}

static void *watch(void *arg)
{
    const rank *r = arg;
    eventfd_t count;

    while (await_or_stop(r, r->wire.fd)) {
        yard_engine_wake(r->engine);
        if (!await_or_stop(r, r->drained))
            break;
        eventfd_read(r->drained, &count);
    }
    return NULL;
}

static bool start_watcher(rank *r)
{
    eventfd_t count;

    while (eventfd_read(r->stop, &count) == 0 || eventfd_read(r->drained, &count) == 0)
        ;
    r->watches = pthread_create(&r->watcher, NULL, watch, r) == 0;
    return r->watches;
}

static void stop_watcher(rank *r)
{
    if (!r->watches)
        return;
    eventfd_write(r->stop, 1);
    pthread_join(r->watcher, NULL);
    r->watches = false;
}

/* While the fabric waits for other ranks: the pod may say that they do not come. */
static bool gives_up(void *ctx)
{
    rank *r = ctx;

    take_frames(r);
    return r->leaves || r->quits;
}

/* Before the fabric makes its heap there. */
static yard_status take_device(const rank *r, yard_error *err)
{
    const char *name = r->config->engine.device;
    const yard_ops *ops = name ? yard_ops_find(name) : NULL;

    return ops && ops->use_device ? ops->use_device(r->config->device_idx, err) : YARD_OK;
}

static yard_status join_fabric(rank *r, yard_error *err)
{
    yard_fabric_config c = YARD_FABRIC_CONFIG_INIT;

    c.rank = r->config->rank;
    c.n_ranks = r->config->n_ranks;
    c.heap_bytes = r->heap_bytes;
    c.device_heap_bytes = r->device_heap_bytes;
    c.transport = r->config->transport;
    c.rendezvous = r->form.rendezvous;
    c.secret = r->config->secret;
    c.bind_host = r->config->bind_host;
    c.start_timeout_us = r->config->start_timeout_us;
    if (r->config->engine.timeout_us)
        c.timeout_us = r->config->engine.timeout_us;
    c.notice = warn_pod;
    c.notice_ctx = r;
    c.config_text = r->signature;
    c.gives_up = gives_up;
    c.gives_up_ctx = r;
    return yard_fabric_create(&r->fabric, &c, err);
}

static yard_status join_engine(rank *r, yard_error *err)
{
    yard_engine_config c = r->config->engine;

    if (r->engine)
        return yard_engine_rejoin(r->engine, r->fabric, err);
    c.fabric = r->fabric;
    c.warn = warn_pod;
    c.progress = tell_progress;
    c.notify_ctx = r;
    c.start_timeout_us = r->config->start_timeout_us;
    return yard_engine_create(&r->engine, &c, err);
}

static void send_formed(rank *r)
{
    const yard_formed_frame formed = { .page_root = yard_engine_page_root(r->engine) };
    const char *text = yard_engine_describe(r->engine);

    send_frame(r, YARD_FRAME_FORMED, &formed, sizeof(formed), text, strlen(text) + 1);
}

/* Ends when all ranks of the group have their weights: the first step, which has no work. */
static yard_status join_group(rank *r, yard_error *err)
{
    yard_status st;

    r->forms = false;
    tell_progress(r, "fabric", 0, 1);
    st = join_fabric(r, err);
    if (r->failure.status != YARD_OK)
        return yard_fail(err, r->failure.status, "%s", r->failure.message);
    if (st == YARD_OK) {
        tell_progress(r, "weights", 0, 1);
        st = join_engine(r, err);
    }
    if (st != YARD_OK)
        return st;
    tell_progress(r, "group", 0, 1);
    st = yard_engine_step(r->engine);
    if (st != YARD_OK)
        return yard_fail(err, st, "%s", yard_engine_error(r->engine));
    if (!start_watcher(r))
        return yard_fail(err, YARD_ENOMEM, "rank %u: no thread", r->config->rank);
    send_formed(r);
    return YARD_OK;
}

static void leave_group(rank *r)
{
    stop_watcher(r);
    yard_fabric_destroy(r->fabric);
    r->fabric = NULL;
    r->n_ids = 0;
    r->last_pod_id = 0;
}

static bool add_event(rank *r, size_t *n_frame, yard_event *e)
{
    id_pair *pair = find(r, e->id);

    if (!pair)
        return true;
    e->id = pair->pod_id;
    if (e->finish != YARD_RUNNING && --pair->n_left == 0)
        forget(r, pair);
    return !r->config->reports || yard_event_encode(&r->frame, n_frame, &r->frame_capacity, e);
}

static void send_events(rank *r)
{
    yard_event events[256];
    size_t n_frame = 0;
    uint32_t n;

    while ((n = yard_engine_poll(r->engine, events, 256)) > 0)
        for (uint32_t i = 0; i < n; i++)
            if (!add_event(r, &n_frame, &events[i]))
                r->quits = true; /* out of memory: the pod starts it again */
    if (n_frame > 0)
        send_frame(r, YARD_FRAME_EVENTS, r->frame, n_frame, NULL, 0);
}

static void send_pages(rank *r)
{
    yard_page_event events[256];
    uint32_t n;

    while ((n = yard_engine_poll_pages(r->engine, events, 256)) > 0)
        send_frame(r, YARD_FRAME_PAGES, events, n * sizeof(*events), NULL, 0);
}

/* Also without a change, once per step: it says that steps end. */
static void send_report(rank *r)
{
    yard_engine_report report;
    yard_engine_stats stats;

    yard_engine_get_stats(r->engine, &stats);
    yard_engine_get_report(r->engine, &report);
    report.n_seen = r->last_pod_id;
    if (stats.n_steps == r->n_steps && !memcmp(&report, &r->report, sizeof(report)))
        return;
    r->n_steps = stats.n_steps;
    r->report = report;
    send_frame(r, YARD_FRAME_REPORT, &report, sizeof(report), NULL, 0);
}

static void tell_step(rank *r)
{
    send_events(r);
    if (!r->config->reports)
        return;
    send_pages(r);
    send_report(r);
}

/* All ranks have finished: nothing but the pod's word is to be expected. */
static void await_end(rank *r)
{
    while (!r->leaves && !r->quits) {
        await_socket(r, POLLIN);
        take_frames(r);
    }
}

static yard_status serve(rank *r, yard_error *err)
{
    yard_status st = YARD_OK;

    r->report = (yard_engine_report){ .step_age_us = UINT64_MAX }; /* none yet: ours has no age */
    for (;;) {
        take_frames(r);
        if (r->leaves || r->quits)
            return YARD_OK;
        st = yard_engine_step(r->engine);
        if (st == YARD_OK) {
            tell_step(r);
            st = yard_engine_wait(r->engine, IDLE_WAIT_US);
        }
        if (st != YARD_OK)
            return yard_fail(err, st, "%s", yard_engine_error(r->engine));
        if (yard_engine_ended(r->engine)) {
            send_frame(r, YARD_FRAME_FINISHED, NULL, 0, NULL, 0);
            await_end(r);
            return YARD_OK;
        }
    }
}

/* Only what another rank did can be better next time. */
static bool may_pass(yard_status st)
{
    return st == YARD_EPEER || st == YARD_ETIMEDOUT || st == YARD_EIO;
}

/* This rank never will work. Ranks of other pods cannot know: where there are some, it comes to the
 * next rendezvous with its reason for a signature, and they refuse each other. */
static void fail(rank *r, const yard_error *err)
{
    const bool refused = r->form.rendezvous[0] && !r->fabric; /* then all have heard */

    r->failure = *err;
    if (r->config->alone || refused) {
        send_text(r, YARD_FRAME_FAILED, err->message);
        r->quits = true;
        return;
    }
    warn_pod(r, err->message);
    snprintf(r->signature, sizeof(r->signature), "error %.*s", YARD_ENGINE_SIGNATURE_BYTES - 7,
             err->message);
}

static bool open_rank(rank *r)
{
    yard_engine_budget budget = { 0 };
    yard_error err = { 0 };
    yard_status st;

    r->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    r->drained = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    st = take_device(r, &err);
    if (st == YARD_OK)
        st = yard_engine_budget_of(&r->config->engine, r->config->n_ranks, r->config->rank, &budget,
                                   &err);
    if (st == YARD_OK)
        st = yard_engine_sign(&r->config->engine, r->signature, &err);
    r->heap_bytes = budget.heap_bytes;
    r->device_heap_bytes = budget.device_heap_bytes;
    if (st != YARD_OK)
        fail(r, &err);
    return r->stop >= 0 && r->drained >= 0;
}

/* The group is over, or was not joined. Who is not there within the very first start's time is not
 * going to come; later others may be starting again. */
static void report_end(rank *r, yard_status st, const yard_error *err)
{
    const bool nobody_came = st == YARD_ETIMEDOUT && r->form.first && !r->fabric;

    if (r->failure.status != YARD_OK) {
        send_text(r, YARD_FRAME_FAILED, r->failure.message);
        r->quits = true;
    } else if (!may_pass(st) || nobody_came) {
        fail(r, err);
        if (!r->quits)
            send_text(r, YARD_FRAME_LOST, err->message);
    } else if (!r->leaves) { /* who is told to leave does not complain */
        send_text(r, YARD_FRAME_LOST, err->message);
    }
}

static void run(rank *r)
{
    while (!r->quits) {
        yard_error err = { 0 };
        yard_status st;

        send_frame(r, YARD_FRAME_READY, NULL, 0, NULL, 0);
        while (!r->forms && !r->quits) {
            await_socket(r, POLLIN);
            take_frames(r);
        }
        if (r->quits)
            break;
        st = join_group(r, &err);
        if (st == YARD_OK)
            st = serve(r, &err);
        if (st != YARD_OK)
            report_end(r, st, &err);
        leave_group(r);
    }
}

int yard_pod_rank_main(const yard_pod_rank_config *config, int fd)
{
    rank r = { .config = config, .stop = -1, .drained = -1 };

    yard_wire_open(&r.wire, fd);
    if (open_rank(&r))
        run(&r);
    leave_group(&r);
    yard_engine_destroy(r.engine);
    yard_wire_close(&r.wire);
    if (r.stop >= 0)
        close(r.stop);
    if (r.drained >= 0)
        close(r.drained);
    free(r.ids);
    free(r.frame);
    return EXIT_SUCCESS;
}
