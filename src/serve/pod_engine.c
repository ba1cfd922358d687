#include "serve/pod_engine.h"

#include <stdio.h>

static void name_model(char *name, size_t n_name, const char *path)
{
    size_t n = strlen(path), at;

    while (n > 1 && path[n - 1] == '/')
        n--;
    for (at = n; at > 0 && path[at - 1] != '/'; at--)
        ;
    snprintf(name, n_name, "%.*s", (int)(n - at), path + at);
}

yard_status yard_pod_engine_open(yard_pod_engine *out, yard_pod *pod, const yard_pod_config *config,
                                 yard_error *err)
{
    const uint32_t n_ranks = config->n_ranks * (config->n_pods ? config->n_pods : 1);
    const uint32_t max_seqs = config->engine.max_seqs;
    yard_engine_budget budget;
    const yard_status st = yard_engine_budget_of(&config->engine, n_ranks, 0, &budget, err);

    if (st != YARD_OK)
        return st;
    /* A few more than run at once, so that the next is there when one ends; the rest are better
     * placed later, when more is known. */
    *out = (yard_pod_engine){ .pod = pod,
                              .max_requests = max_seqs + yard_ceil_div(max_seqs, 4),
                              .context = budget.context,
                              .vocab = budget.vocab,
                              .n_ranks = config->n_ranks };
    name_model(out->name, sizeof(out->name), config->engine.model_dir);
    return YARD_OK;
}

static void describe(void *ctx, yard_pod_state *out)
{
    const yard_pod_engine *e = ctx;

    *out = (yard_pod_state){ .pod = { .n_instances = yard_pod_instance_count(e->pod),
                                      .max_requests = e->max_requests,
                                      .context = e->context,
                                      .vocab = e->vocab,
                                      .generation = yard_pod_generation(e->pod) },
                             .serves = yard_pod_serves(e->pod),
                             .n_ranks = e->n_ranks };
    for (uint32_t r = 0; r < e->n_ranks; r++)
        out->n_ranks_alive += yard_pod_rank_pid(e->pod, r) > 0;
    yard_pod_page_root(e->pod, &out->pod.page_root);
    snprintf(out->pod.model, sizeof(out->pod.model), "%s-%08x", e->name,
             (unsigned int)out->pod.page_root.word[0]);
}

static yard_status submit(void *ctx, uint32_t instance, const yard_request *request, uint64_t *id,
                          yard_error *err)
{
    return yard_pod_submit(((yard_pod_engine *)ctx)->pod, instance, request, id, err);
}

static void abort_request(void *ctx, uint64_t id, uint32_t choice)
{
    yard_pod_abort(((yard_pod_engine *)ctx)->pod, id, choice);
}

static yard_status run(void *ctx, int fd, uint64_t timeout_us, yard_error *err)
{
    yard_pod *pod = ((yard_pod_engine *)ctx)->pod;

    yard_pod_wake_on(pod, fd);
    return yard_pod_run(pod, timeout_us, err);
}

static uint32_t poll_events(void *ctx, yard_pod_event *events, uint32_t max_events)
{
    return yard_pod_poll(((yard_pod_engine *)ctx)->pod, events, max_events);
}

static bool report(void *ctx, uint32_t instance, yard_engine_report *out)
{
    return yard_pod_report(((yard_pod_engine *)ctx)->pod, instance, out);
}

static uint32_t poll_pages(void *ctx, yard_page_event *events, uint32_t max_events)
{
    return yard_pod_poll_pages(((yard_pod_engine *)ctx)->pod, events, max_events);
}

static void pages_anew(void *ctx, uint32_t instance)
{
    yard_pod_pages_anew(((yard_pod_engine *)ctx)->pod, instance);
}

yard_served_engine yard_pod_engine_served(yard_pod_engine *engine)
{
    return (yard_served_engine){ .ctx = engine,
                                 .describe = describe,
                                 .submit = submit,
                                 .abort = abort_request,
                                 .run = run,
                                 .poll = poll_events,
                                 .report = report,
                                 .poll_pages = poll_pages,
                                 .pages_anew = pages_anew };
}
