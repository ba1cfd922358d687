/* What a pod does between calls: frames to and from its ranks, and what the state machine of
 * generations asks for. */
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "engine/pod_impl.h"

enum {
    LOOK_MS = 20,    /* for stopped processes, while it does not serve */
    LOOK_US = 500000 /* for stopped processes, while it serves */
};

static void notice(const yard_pod *pod, const char *format, ...) YARD_PRINTF(2, 3);

static void notice(const yard_pod *pod, const char *format, ...)
{
    char line[YARD_ERROR_MESSAGE_BYTES];
    va_list args;

    if (!pod->config.notice)
        return;
    va_start(args, format);
    vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    pod->config.notice(pod->config.notice_ctx, line);
}
/* The first thing said about a group's end counts, and what a surviving rank says of it. */
static void add_reason(yard_pod *pod, const char *format, ...) YARD_PRINTF(2, 3);

static void add_reason(yard_pod *pod, const char *format, ...)
{
    const size_t n = strlen(pod->reason);
    char text[YARD_POD_REASON_BYTES - sizeof("; ")];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    if (n <= YARD_POD_REASON_BYTES / 2 && !strstr(pod->reason, text))
        snprintf(pod->reason + n, YARD_POD_REASON_BYTES - n, "%s%s", n > 0 ? "; " : "", text);
}
void yard_pod_no_memory(yard_pod *pod)
{
    if (pod->failure.status == YARD_OK)
        yard_fail(&pod->failure, YARD_ENOMEM, "pod: no memory for events");
}
static void send_to_instance(yard_pod *pod, uint32_t instance, yard_frame_kind kind,
                             const void *data, size_t n_bytes)
{
    for (uint32_t i = 0; i < pod->tp; i++)
        yard_wire_send(&pod->process[instance * pod->tp + i].wire, kind, data, n_bytes, NULL, 0);
}

void yard_pod_send_request(yard_pod *pod, yard_pod_request *r)
{
    r->sent = true;
    r->sent_us = yard_now_us();
    r->n_tries++;
    send_to_instance(pod, r->instance, YARD_FRAME_SUBMIT, r->frame, r->n_frame);
    for (uint32_t c = 0; c < r->n_choices; c++)
        if (r->choice[c] == YARD_CHOICE_ENDED) /* before it was sent */
            yard_pod_send_abort(pod, r, c);
}

static void send_requests(yard_pod *pod)
{
    for (size_t i = 0; i < pod->requests.n; i++)
        if (!pod->requests.items[i].sent)
            yard_pod_send_request(pod, &pod->requests.items[i]);
}

void yard_pod_send_abort(yard_pod *pod, const yard_pod_request *r, uint32_t choice)
{
    const yard_id_frame frame = { .id = r->id, .choice = choice };

    send_to_instance(pod, r->instance, YARD_FRAME_ABORT, &frame, sizeof(frame));
}

void yard_pod_send_finish(yard_pod *pod)
{
    for (uint32_t r = 0; r < pod->n_ranks; r++) {
        pod->process[r].finished = false;
        yard_wire_send(&pod->process[r].wire, YARD_FRAME_FINISH, NULL, 0, NULL, 0);
    }
}

static void form_group(yard_pod *pod)
{
    yard_form_frame form = { .first = !pod->served };

    /* All ranks have left the old group, so nothing more comes from it. */
    if (!yard_pod_requests_regroup(&pod->requests, pod->reason))
        yard_pod_no_memory(pod);
    yard_pod_reports_forget(pod);
    if (pod->config.rendezvous)
        snprintf(form.rendezvous, sizeof(form.rendezvous), "%s", pod->config.rendezvous);
    else
        snprintf(form.rendezvous, sizeof(form.rendezvous), "unix:switchyard-pod-%d-%.16s-%u",
                 (int)getpid(), pod->config.secret, pod->generation.number);
    for (uint32_t r = 0; r < pod->n_ranks; r++)
        yard_wire_send(&pod->process[r].wire, YARD_FRAME_FORM, &form, sizeof(form), NULL, 0);
}
static void group_is_over(yard_pod *pod)
{
    if (pod->generation.forming)
        pod->started_us = yard_now_us();
    pod->next_notice_us = pod->started_us + YARD_POD_NOTICE_US;
    yard_generation_lost(&pod->generation, yard_now_us());
}

/* Which device it has, where there is a choice. */
static void take_description(yard_pod *pod, uint32_t r, const yard_frame *f)
{
    yard_pod_process *p = &pod->process[r];
    const char *device = pod->config.engine.device;

    snprintf(p->description, sizeof(p->description), "%.*s",
             (int)(f->n_bytes - sizeof(yard_formed_frame)),
             (const char *)f->data + sizeof(yard_formed_frame));
    if (!pod->served && device && strcmp(device, "cpu") != 0)
        notice(pod, "rank %u: %s", pod->first_rank + r, p->description);
}

static void rank_formed(yard_pod *pod, uint32_t r, const yard_frame *f)
{
    yard_formed_frame formed;

    memcpy(&formed, f->data, sizeof(formed));
    pod->page_root = formed.page_root;
    pod->has_page_root = true;
    take_description(pod, r, f);
    yard_generation_formed(&pod->generation, r);
    if (!yard_generation_serves(&pod->generation))
        return;
    pod->served = true;
    if (pod->reason[0])
        notice(pod, "serves again, generation %u, %.1f s after: %s", pod->generation.number,
               (double)(yard_now_us() - pod->started_us) * 1e-6, pod->reason);
    pod->reason[0] = '\0';
    send_requests(pod);
    if (pod->finishing)
        yard_pod_send_finish(pod);
}

/* What all ranks read together; those that have not said anything yet have as much to read as the
 * one that speaks. */
static void tell_progress(yard_pod *pod, uint32_t r, const yard_frame *f)
{
    yard_progress_frame *p = &pod->process[r].progress;
    uint64_t done = 0, total = 0;

    if (f->n_bytes != sizeof(*p))
        return;
    memcpy(p, f->data, sizeof(*p));
    p->what[sizeof(p->what) - 1] = '\0';
    if (!pod->config.engine.progress || p->total <= 1)
        return;
    for (uint32_t i = 0; i < pod->n_ranks; i++) {
        const yard_progress_frame *other = &pod->process[i].progress;
        const bool same = !strcmp(other->what, p->what) && other->total > 1;

        done += same ? other->done : 0;
        total += same ? other->total : p->total;
    }
    pod->config.engine.progress(pod->config.engine.notify_ctx, p->what, done, total);
}

static void take_events(yard_pod *pod, const yard_frame *f)
{
    yard_event event;

    for (size_t at = 0; yard_event_decode(f->data, f->n_bytes, &at, &event);)
        if (!yard_pod_requests_event(&pod->requests, &event))
            yard_pod_no_memory(pod);
}

static void take_frame(yard_pod *pod, uint32_t r, const yard_frame *f)
{
    yard_pod_process *p = &pod->process[r];
    const uint32_t rank = pod->first_rank + r;
    yard_id_frame id;

    switch (f->kind) {
    case YARD_FRAME_READY:
        yard_generation_ready(&pod->generation, r);
        break;
    case YARD_FRAME_FORMED:
        rank_formed(pod, r, f);
        break;
    case YARD_FRAME_PROGRESS:
        tell_progress(pod, r, f);
        break;
    case YARD_FRAME_WARNING:
        notice(pod, "rank %u: %s", rank, (const char *)f->data);
        break;
    case YARD_FRAME_EVENTS:
        take_events(pod, f);
        break;
    case YARD_FRAME_PAGES:
        yard_pod_take_pages(pod, r / pod->tp, f);
        break;
    case YARD_FRAME_REPORT:
        yard_pod_take_report(pod, r / pod->tp, f);
        break;
    case YARD_FRAME_REFUSED:
        memcpy(&id, f->data, sizeof(id));
        if (!yard_pod_requests_fail(&pod->requests, id.id, (const char *)f->data + sizeof(id)))
            yard_pod_no_memory(pod);
        break;
    case YARD_FRAME_STATS:
        memcpy(&p->stats, f->data, sizeof(p->stats));
        p->has_stats = true;
        break;
    case YARD_FRAME_FINISHED:
        p->finished = true;
        break;
    case YARD_FRAME_LOST:
        add_reason(pod, "rank %u: %s", rank, (const char *)f->data);
        group_is_over(pod);
        break;
    case YARD_FRAME_FAILED:
        yard_fail(&pod->failure, YARD_EFORMAT, "rank %u: %s", rank, (const char *)f->data);
        yard_generation_failed(&pod->generation);
        break;
    default:
        break;
    }
}

static void rank_ended(yard_pod *pod, uint32_t r)
{
    yard_pod_process *p = &pod->process[r];
    const int pid = (int)p->pid;
    char how[64];

    yard_pod_process_reap(&pod->spawner, r, YARD_POD_LEAVE_US, how, sizeof(how));
    if (pod->generation.hopeless)
        return;
    add_reason(pod, "rank %u (pid %d) %s", pod->first_rank + r, pid, how);
    notice(pod, "rank %u (pid %d) %s; starting it again", pod->first_rank + r, pid, how);
    group_is_over(pod);
    yard_generation_ended(&pod->generation, r, yard_now_us());
}

static void take_frames(yard_pod *pod, uint32_t r)
{
    yard_pod_process *p = &pod->process[r];
    yard_frame f;

    while (p->pid > 0 && yard_wire_receive(&p->wire, &f))
        take_frame(pod, r, &f);
    if (p->pid > 0 && p->wire.ended)
        rank_ended(pod, r);
}

/* Sockets tell of ends, but not of stops. */
static void look_for_stops(yard_pod *pod)
{
    pod->next_look_us = yard_now_us() + LOOK_US;
    for (uint32_t r = 0; r < pod->n_ranks; r++) {
        bool stopped;

        if (pod->process[r].pid == 0)
            continue;
        if (yard_pod_process_look(&pod->spawner, r, &stopped))
            take_frames(pod, r);
        else
            yard_generation_stopped(&pod->generation, r, stopped, yard_now_us());
    }
}

static void give_up(yard_pod *pod)
{
    if (pod->failure.status == YARD_OK)
        yard_fail(&pod->failure, YARD_EPEER,
                  "pod: %u attempts in a row did not serve; the last: %s",
                  pod->generation.max_attempts, pod->reason);
}

void yard_pod_act(yard_pod *pod)
{
    yard_generation_act what;
    uint32_t r;

    while (pod->failure.status == YARD_OK &&
           (what = yard_generation_next(&pod->generation, yard_now_us(), &r)) !=
               YARD_GENERATION_NOTHING)
        switch (what) {
        case YARD_GENERATION_START:
            yard_pod_process_start(&pod->spawner, r, &pod->failure);
            break;
        case YARD_GENERATION_KILL:
            add_reason(pod, "rank %u (pid %d) %s", pod->first_rank + r, (int)pod->process[r].pid,
                       pod->generation.stopped_us[r] ? "is stopped" : "does not answer");
            yard_pod_process_signal(&pod->spawner, r, SIGKILL);
            break;
        case YARD_GENERATION_LEAVE:
            yard_wire_send(&pod->process[r].wire, YARD_FRAME_LEAVE, NULL, 0, NULL, 0);
            break;
        case YARD_GENERATION_FORM:
            form_group(pod);
            break;
        default:
            give_up(pod);
            break;
        }
}

static void tell_who_is_missing(yard_pod *pod)
{
    static const char *const names[] = {
        [YARD_RANK_DOWN] = "down",       [YARD_RANK_STARTING] = "starting",
        [YARD_RANK_READY] = "ready",     [YARD_RANK_FORMING] = "forming",
        [YARD_RANK_SERVING] = "serving", [YARD_RANK_LEAVING] = "leaving the old group",
    };
    const uint64_t now = yard_now_us();
    char whom[300] = "";

    if (now < pod->next_notice_us)
        return;
    pod->next_notice_us = now + YARD_POD_NOTICE_US;
    for (uint32_t r = 0; r < pod->n_ranks && strlen(whom) < sizeof(whom) - 80; r++) {
        const yard_rank_state s = pod->generation.state[r];

        if (s != YARD_RANK_SERVING && s != YARD_RANK_READY)
            snprintf(whom + strlen(whom), sizeof(whom) - strlen(whom), "%srank %u (%s)",
                     whom[0] ? ", " : "", pod->first_rank + r,
                     s == YARD_RANK_FORMING && pod->process[r].progress.what[0]
                         ? pod->process[r].progress.what
                         : names[s]);
    }
    notice(pod, "start: waiting for %s, %.0f s of %.0f s", whom,
           (double)(now - pod->started_us) * 1e-6, (double)pod->generation.start_us * 1e-6);
}

static int poll_ms(const yard_pod *pod, uint64_t until_us)
{
    const uint64_t now = yard_now_us(), due_us = yard_generation_deadline(&pod->generation);
    const uint64_t at_us = due_us < until_us ? due_us : until_us;
    const uint64_t ms = at_us <= now ? 0 : (at_us - now + 999) / 1000;

    if (!yard_generation_serves(&pod->generation) && ms > LOOK_MS)
        return LOOK_MS;
    return ms > LOOK_US / 1000 ? LOOK_US / 1000 : (int)ms;
}

void yard_pod_await(yard_pod *pod, uint64_t until_us)
{
    const bool served = yard_generation_serves(&pod->generation);

    for (uint32_t r = 0; r < pod->n_ranks; r++) {
        pod->fds[r] = (struct pollfd){ .fd = pod->process[r].pid > 0 ? pod->process[r].wire.fd : -1,
                                       .events = POLLIN };
        if (yard_wire_has_output(&pod->process[r].wire))
            pod->fds[r].events |= POLLOUT;
    }
    pod->fds[pod->n_ranks] = (struct pollfd){ .fd = pod->wake_fd, .events = POLLIN };
    poll(pod->fds, pod->n_ranks + 1, poll_ms(pod, until_us));
    for (uint32_t r = 0; r < pod->n_ranks; r++) {
        if (pod->fds[r].revents & POLLOUT)
            yard_wire_flush(&pod->process[r].wire);
        if (pod->fds[r].revents & ~POLLOUT)
            take_frames(pod, r);
    }
    if (!served || yard_now_us() >= pod->next_look_us)
        look_for_stops(pod);
    if (!yard_generation_serves(&pod->generation))
        tell_who_is_missing(pod);
}

yard_status yard_pod_run(yard_pod *pod, uint64_t timeout_us, yard_error *err)
{
    const uint64_t begun_us = yard_now_us();
    const uint64_t until_us = begun_us + timeout_us < begun_us ? UINT64_MAX : begun_us + timeout_us;
    const yard_pod_requests *q = &pod->requests;
    const bool served = yard_generation_serves(&pod->generation);

    do {
        yard_pod_act(pod);
        if (pod->failure.status != YARD_OK)
            return yard_fail(err, pod->failure.status, "%s", pod->failure.message);
        if (q->first_event < q->n_events || (!served && yard_pod_serves(pod)))
            return YARD_OK;
        yard_pod_await(pod, until_us);
    } while ((yard_now_us() < until_us && !pod->fds[pod->n_ranks].revents) ||
             q->first_event < q->n_events);
    return YARD_OK;
}
