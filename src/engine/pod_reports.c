/* What a pod knows of its instances from what they say: reports, and changes of their caches. */
#include <stdlib.h>

#include "engine/pod_impl.h"

enum { MAX_PAGE_EVENTS = 1 << 18 }; /* 24 bytes each */

yard_status yard_pod_reports_open(yard_pod *pod, yard_error *err)
{
    const uint32_t n = yard_pod_instance_count(pod);

    pod->page_events.max_events = MAX_PAGE_EVENTS;
    pod->instance = calloc(n, sizeof(*pod->instance));
    return pod->instance ? YARD_OK
                         : yard_fail(err, YARD_ENOMEM, "pod: no memory for %u instances", n);
}

void yard_pod_reports_close(yard_pod *pod)
{
    yard_page_events_close(&pod->page_events);
    free(pod->instance);
}

void yard_pod_take_report(yard_pod *pod, uint32_t instance, const yard_frame *f)
{
    yard_pod_instance *x = &pod->instance[instance];

    if (f->n_bytes != sizeof(x->report))
        return;
    memcpy(&x->report, f->data, sizeof(x->report));
    x->has_report = true;
    x->said_us = yard_now_us();
}

bool yard_pod_report(const yard_pod *pod, uint32_t instance, yard_engine_report *out)
{
    const yard_pod_instance *x = &pod->instance[instance];
    const yard_pod_request *unseen;
    uint64_t since_us = x->said_us;

    if (!x->has_report || !yard_pod_serves(pod))
        return false;
    *out = x->report;
    unseen = yard_pod_requests_after(&pod->requests, instance, x->report.n_seen);
    out->n_seen = unseen ? unseen->id - 1 : pod->requests.last_id;
    if (x->report.n_requests == 0 && unseen && unseen->sent_us > since_us)
        since_us = unseen->sent_us;
    if (x->report.n_requests > 0 || unseen)
        out->step_age_us = yard_now_us() - since_us;
    return true;
}

void yard_pod_reports_forget(yard_pod *pod)
{
    for (uint32_t i = 0; i < yard_pod_instance_count(pod); i++)
        pod->instance[i].has_report = false;
}

void yard_pod_take_pages(yard_pod *pod, uint32_t instance, const yard_frame *f)
{
    for (size_t i = 0; i < f->n_bytes / sizeof(yard_page_event) && !pod->pages_lost; i++) {
        yard_page_event e;

        memcpy(&e, (const uint8_t *)f->data + i * sizeof(e), sizeof(e));
        e.instance = instance;
        pod->pages_lost = !yard_page_events_push(&pod->page_events, e);
    }
}

void yard_pod_pages_anew(yard_pod *pod, uint32_t instance)
{
    if (instance < yard_pod_instance_count(pod) && yard_pod_serves(pod))
        yard_wire_send(&pod->process[instance * pod->tp].wire, YARD_FRAME_PAGES, NULL, 0, NULL, 0);
}

uint32_t yard_pod_poll_pages(yard_pod *pod, yard_page_event *events, uint32_t max_events)
{
    const uint32_t n = yard_page_events_take(&pod->page_events, events, max_events);

    if (pod->pages_lost && pod->page_events.n == 0) {
        pod->pages_lost = false;
        for (uint32_t i = 0; i < yard_pod_instance_count(pod); i++)
            yard_pod_pages_anew(pod, i);
    }
    return n;
}

bool yard_pod_page_root(const yard_pod *pod, yard_page_hash *out)
{
    *out = pod->page_root;
    return pod->has_page_root;
}
