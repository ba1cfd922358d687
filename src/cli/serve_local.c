/* The same load on an engine in this process: what a server is measured against. */
#include <stdlib.h>
#include <time.h>

#include "cli/serve_load.h"

/* A request under way. */
typedef struct local_request {
    uint64_t id, due_us, last_us;
    uint32_t n_output, n_counted;
} local_request;

typedef struct local_run {
    yard_engine *engine;
    const yard_load_plan *plan;
    yard_load_result *out;
    local_request *active; /* [n_active], room for all */
    uint32_t n_active;
    uint64_t n_sent, n_ended, due_us;
} local_run;

static yard_status submit(local_run *r, uint64_t due_us, yard_error *err)
{
    yard_request request = YARD_REQUEST_INIT;
    yard_load_prompt prompt;
    uint64_t id = 0;
    yard_status st;

    if (!yard_load_prompt_of(&r->plan->workload, r->n_sent, &prompt))
        return yard_fail(err, YARD_ENOMEM, "bench serve: no memory for a prompt");
    request.prompt = prompt.ids;
    request.n_prompt = prompt.n_ids;
    request.max_new_tokens = prompt.n_output;
    request.ignore_eos = true;
    st = yard_engine_submit(r->engine, &request, &id);
    free(prompt.ids);
    if (st != YARD_OK)
        return yard_fail(err, st, "%s", yard_engine_error(r->engine));
    r->out->n_prompt_tokens += prompt.n_ids;
    r->active[r->n_active++] = (local_request){ id, due_us, due_us, prompt.n_output, 0 };
    r->n_sent++;
    return YARD_OK;
}

/* Closed loop: as many as there are clients; open: what is due. */
static yard_status submit_due(local_run *r, yard_error *err)
{
    const yard_load_plan *plan = r->plan;
    yard_status st = YARD_OK;

    while (st == YARD_OK && plan->n_clients && r->n_active < plan->n_clients &&
           r->n_sent < plan->n_requests)
        st = submit(r, yard_now_us(), err);
    while (st == YARD_OK && !plan->n_clients && r->n_sent < plan->n_requests &&
           r->due_us <= yard_now_us()) {
        st = submit(r, r->due_us, err);
        r->due_us += (uint64_t)(yard_load_pause(&plan->workload, r->n_sent) / plan->rate * 1e6);
    }
    return st;
}

static bool end_request(local_run *r, uint32_t at, yard_finish finish, uint64_t now_us)
{
    const local_request q = r->active[at];

    r->active[at] = r->active[--r->n_active];
    r->n_ended++;
    r->out->n_output_tokens += q.n_counted;
    r->out->n_done += finish == YARD_FINISH_LENGTH;
    r->out->n_failed += finish != YARD_FINISH_LENGTH;
    r->out->n_wrong += finish == YARD_FINISH_LENGTH && q.n_counted != q.n_output;
    return yard_load_add_sample(&r->out->whole, now_us - q.due_us);
}

static bool take_event(local_run *r, const yard_event *e, uint64_t now_us)
{
    uint32_t at = 0;
    local_request *q;
    bool kept = true;

    while (at < r->n_active && r->active[at].id != e->id)
        at++;
    if (at == r->n_active)
        return true;
    q = &r->active[at];
    if (e->n_tokens > 0) {
        kept = yard_load_add_sample(q->n_counted == 0 ? &r->out->ttft : &r->out->gap,
                                    now_us - (q->n_counted == 0 ? q->due_us : q->last_us));
        r->out->n_cached_tokens += q->n_counted == 0 ? e->n_cached : 0;
        q->n_counted++;
        q->last_us = now_us;
    }
    return kept && (e->finish == YARD_RUNNING || end_request(r, at, e->finish, now_us));
}

static yard_status step(local_run *r, yard_error *err)
{
    enum { MOST = 64 };
    yard_event events[MOST];
    yard_status st = yard_engine_step(r->engine);
    const uint64_t now_us = yard_now_us();
    uint32_t n;

    if (st != YARD_OK)
        return yard_fail(err, st, "%s", yard_engine_error(r->engine));
    while ((n = yard_engine_poll(r->engine, events, MOST)) > 0)
        for (uint32_t i = 0; i < n; i++)
            if (!take_event(r, &events[i], now_us))
                return yard_fail(err, YARD_ENOMEM, "bench serve: no memory for samples");
    return YARD_OK;
}

static void sleep_until_due(const local_run *r)
{
    const uint64_t now_us = yard_now_us();
    struct timespec pause;

    if (r->due_us <= now_us)
        return;
    pause.tv_sec = (time_t)((r->due_us - now_us) / 1000000);
    pause.tv_nsec = (long)((r->due_us - now_us) % 1000000) * 1000;
    nanosleep(&pause, NULL);
}

yard_status yard_load_run_engine(yard_engine *engine, const yard_load_plan *plan,
                                 yard_load_result *out, yard_error *err)
{
    const uint64_t begin_us = yard_now_us();
    local_run r = { .engine = engine, .plan = plan, .out = out, .due_us = begin_us };
    yard_status st = YARD_OK;

    memset(out, 0, sizeof(*out));
    r.active = calloc(plan->n_clients ? plan->n_clients : plan->n_requests, sizeof(*r.active));
    if (!r.active)
        return yard_fail(err, YARD_ENOMEM, "bench serve: no memory for %llu requests",
                         (unsigned long long)plan->n_requests);
    while (st == YARD_OK && r.n_ended < plan->n_requests) {
        st = submit_due(&r, err);
        if (st == YARD_OK && r.n_active > 0)
            st = step(&r, err);
        else if (st == YARD_OK)
            sleep_until_due(&r);
        yard_progress(yard_cli_notify(), "requests", r.n_ended, plan->n_requests);
    }
    out->seconds = (double)(yard_now_us() - begin_us) * 1e-6;
    free(r.active);
    if (st != YARD_OK)
        yard_load_result_release(out);
    return st;
}
