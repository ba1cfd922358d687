/* From tokens to the client: what came from the engines since the last flush goes out together, so
 * that a front that is behind writes fewer, larger events. */
#include <stdlib.h>

#include "serve/front_impl.h"

static void clear_out(yard_front *front)
{
    if (front->out.no_memory)
        yard_api_out_release(&front->out);
    front->out.n_bytes = 0;
}

static yard_api_head head_of(const yard_front *front, const yard_front_job *job)
{
    return (yard_api_head){ .id = job->id,
                            .created = job->created,
                            .model = front->model.name,
                            .fingerprint = front->fingerprint,
                            .chat = job->route == YARD_ROUTE_CHAT,
                            .include_usage = job->prepared.request.include_usage };
}

/* The prompt counts once, also with many choices. */
static yard_api_usage usage_of(const yard_front_job *job)
{
    yard_api_usage u = { 0 };

    for (uint32_t i = 0; i < job->n_parts; i++) {
        const yard_front_part *part = &job->parts[i];

        u.n_prompt += part->prompt->n_ids;
        u.n_cached += part->n_cached;
        for (uint32_t k = 0; k < part->n_choices; k++) {
            u.n_output += part->choices[k].n_output;
            u.n_reasoning += part->choices[k].n_reasoning;
        }
    }
    return u;
}

/* Counts an answer that is about to be told for the last time. */
static yard_front_summary sum_up(yard_front *front, uint64_t now_us, const yard_front_job *job,
                                 int http_status)
{
    const yard_api_usage u = usage_of(job);
    yard_metrics *m = &front->metrics;

    yard_metrics_count(m, job->route, http_status);
    m->n_prompt_tokens += u.n_prompt;
    m->n_cached_tokens += u.n_cached;
    m->n_output_tokens += u.n_output;
    if (http_status == 200 && job->n_parts > 0)
        yard_histogram_add(&m->whole, now_us - job->arrived_us);
    return (yard_front_summary){
        .http_status = http_status,
        .stream = job->prepared.request.stream,
        .n_prompt = u.n_prompt,
        .n_cached = u.n_cached,
        .n_output = u.n_output,
        .first_token_us = job->first_us ? job->first_us - job->arrived_us : 0,
    };
}

void yard_front_answer(yard_front *front, uint64_t now_us, yard_front_job *job, int http_status,
                       const yard_api_out *body, uint32_t retry_after_s)
{
    const yard_front_summary summary = sum_up(front, now_us, job, http_status);
    const yard_front_sink *sink = job->sink;

    job->sink = NULL;
    sink->answer(job->ctx, &summary, body, retry_after_s);
}

/* front->out goes to the client. */
static void send_events(yard_front *front, uint64_t now_us, yard_front_job *job, int last_status)
{
    yard_front_summary summary;
    bool taken;

    if (last_status != 0)
        summary = sum_up(front, now_us, job, last_status);
    taken = job->sink->events(job->ctx, last_status ? &summary : NULL, &front->out);
    job->begun = true;
    job->sent_us = now_us;
    if (!taken && last_status == 0) {
        front->metrics.n_gone++;
        yard_front_job_abandon(front, job);
    }
    if (last_status != 0)
        job->sink = NULL;
}

void yard_front_fail(yard_front *front, uint64_t now_us, yard_front_job *job,
                     const yard_api_error *error, uint32_t retry_after_s)
{
    clear_out(front);
    if (job->begun) {
        yard_api_put_error_event(&front->out, error);
        send_events(front, now_us, job, error->http_status);
    } else {
        yard_api_put_error(&front->out, error);
        yard_front_answer(front, now_us, job, error->http_status, &front->out, retry_after_s);
    }
    yard_front_job_abandon(front, job);
}

static void complete_stream(yard_front *front, uint64_t now_us, yard_front_job *job)
{
    const yard_api_head head = head_of(front, job);
    const yard_api_usage usage = usage_of(job);

    clear_out(front);
    if (head.include_usage)
        yard_api_put_usage_event(&front->out, &head, &usage);
    yard_api_put_done(&front->out);
    send_events(front, now_us, job, 200);
}

void yard_front_complete(yard_front *front, uint64_t now_us, yard_front_job *job)
{
    const yard_front_prepared *p = &job->prepared;
    const yard_api_head head = head_of(front, job);
    const yard_api_usage usage = usage_of(job);
    const uint32_t n = job->n_parts * p->request.n;
    yard_api_choice *choices;

    if (p->request.stream) {
        complete_stream(front, now_us, job);
        return;
    }
    choices = malloc(n * sizeof(*choices));
    clear_out(front);
    if (choices) {
        for (uint32_t i = 0; i < n; i++)
            choices[i] =
                yard_front_choice_show(&job->parts[i / p->request.n].choices[i % p->request.n], p);
        yard_api_put_answer(&front->out, &head, choices, n, &usage);
    }
    free(choices);
    if (!choices || front->out.no_memory) {
        yard_error err;
        yard_api_error error;

        yard_fail(&err, YARD_ENOMEM, "no memory for the answer");
        yard_api_error_from(&error, &err);
        yard_front_fail(front, now_us, job, &error, 0);
        return;
    }
    yard_front_answer(front, now_us, job, 200, &front->out, 0);
}

static void mark_dirty(yard_front *front, yard_front_part *part)
{
    if (part->dirty)
        return;
    part->dirty = true;
    part->next_dirty = front->dirty;
    front->dirty = part;
}

/* The part's attempt is over; retry: another instance may do better. */
static void fail_part(yard_front *front, yard_front_part *part, bool retry)
{
    yard_scheduler_failed(front->scheduler, part->id, part->attempt, retry);
    front->config.link->abort(yard_front_pod_of(front, part->instance)->link, part->tag,
                              YARD_ALL_CHOICES);
    yard_front_tag_drop(front, part);
}

static void count_times(yard_front *front, uint64_t now_us, yard_front_job *job,
                        yard_front_choice *c)
{
    if (job->first_us == 0) {
        job->first_us = now_us;
        yard_histogram_add(&front->metrics.first_token, now_us - job->arrived_us);
    } else if (c->last_us != 0) {
        yard_histogram_add(&front->metrics.between_tokens, now_us - c->last_us);
    }
    c->last_us = now_us;
}

/* The prompt's tokens are said once and belong to all choices. */
static yard_status push(yard_front *front, yard_front_part *part, const yard_link_tokens *t)
{
    const yard_front_prepared *p = &part->job->prepared;
    const yard_tokenizer *tok = front->model.tok;
    yard_status st = YARD_OK;

    if (!t->of_prompt)
        return yard_front_choice_push(&part->choices[t->choice], p, tok, t, &part->why);
    for (uint32_t i = 0; i < part->n_choices && t->choice == 0 && st == YARD_OK; i++)
        st = yard_front_choice_push(&part->choices[i], p, tok, t, &part->why);
    return st;
}

void yard_front_take_tokens(yard_front *front, uint64_t now_us, const yard_link_tokens *t)
{
    yard_front_part *part = yard_front_tag_find(front, t->tag);
    yard_front_choice *c;

    if (!part || t->choice >= part->n_choices)
        return;
    c = &part->choices[t->choice];
    if (c->finish_reason)
        return; /* after a stop string */
    if (t->finish == YARD_FINISH_ERROR || t->finish == YARD_FINISH_ABORTED) {
        yard_fail(&part->why, t->retry || t->finish == YARD_FINISH_ABORTED ? YARD_EPEER : YARD_EIO,
                  "%s", t->message && t->message[0] ? t->message : "the engine ended the request");
        fail_part(front, part, t->retry || t->finish == YARD_FINISH_ABORTED);
        return;
    }
    if (!part->has_cached) {
        part->has_cached = true;
        part->n_cached = t->n_cached;
    }
    if (t->n_tokens > 0 && !t->of_prompt)
        count_times(front, now_us, part->job, c);
    if (push(front, part, t) != YARD_OK) {
        fail_part(front, part, false);
        return;
    }
    if (c->finish_reason && t->finish == YARD_RUNNING)
        front->config.link->abort(yard_front_pod_of(front, part->instance)->link, part->tag,
                                  part->n_choices == 1 ? YARD_ALL_CHOICES : t->choice);
    mark_dirty(front, part);
}

/* One event for each choice that has something new. */
static void put_events(yard_front *front, yard_front_part *part)
{
    yard_front_job *job = part->job;
    const yard_front_prepared *p = &job->prepared;
    const yard_api_head head = head_of(front, job);
    yard_api_usage usage = { 0 };

    if (p->request.continuous_usage)
        usage = usage_of(job);
    for (uint32_t i = 0; i < part->n_choices; i++) {
        yard_front_choice *c = &part->choices[i];
        yard_api_choice shown;

        if (!c->fresh)
            continue;
        shown = yard_front_choice_show(c, p);
        if (!c->begun || shown.text || shown.reasoning || shown.n_tokens > 0 || shown.finish_reason)
            yard_api_put_event(&front->out, &head, &shown,
                               p->request.continuous_usage ? &usage : NULL);
        yard_front_choice_sent(c);
    }
}

static bool has_ended(const yard_front_part *part, uint32_t *n_output)
{
    *n_output = 0;
    for (uint32_t i = 0; i < part->n_choices; i++) {
        if (!part->choices[i].finish_reason)
            return false;
        *n_output += part->choices[i].n_output;
    }
    return true;
}

/* From the first event on the part cannot begin anew elsewhere, so the scheduler is asked before
 * whether these tokens still count. */
static void flush_part(yard_front *front, uint64_t now_us, yard_front_part *part)
{
    yard_front_job *job = part->job;
    uint32_t n_output;

    if (!job->sink || part->id == 0)
        return;
    if (job->prepared.request.stream) {
        if (!part->started && !yard_scheduler_started(front->scheduler, part->id, part->attempt))
            return;
        part->started = true;
        clear_out(front);
        put_events(front, part);
        if (front->out.n_bytes > 0 || front->out.no_memory)
            send_events(front, now_us, job, 0);
    }
    if (job->sink && part->tag != 0 && has_ended(part, &n_output)) {
        yard_scheduler_finished(front->scheduler, now_us, part->id, part->attempt, n_output);
        yard_front_tag_drop(front, part);
    }
}

void yard_front_flush(yard_front *front, uint64_t now_us)
{
    while (front->dirty) {
        yard_front_part *part = front->dirty;

        front->dirty = part->next_dirty;
        part->dirty = false;
        flush_part(front, now_us, part);
    }
}

static bool is_silent(const yard_front *front, uint64_t now_us, const yard_front_job *job)
{
    /* what is prepared is the reading thread's until there are parts */
    if (!job->sink || job->n_open == 0 || !job->prepared.request.stream ||
        now_us - job->sent_us < front->config.keep_alive_us)
        return false;
    for (uint32_t i = 0; i < job->n_parts; i++)
        if (job->parts[i].tag != 0)
            return true;
    return false; /* it waits for an engine: a refusal can still have its status */
}

void yard_front_keep_alive(yard_front *front, uint64_t now_us)
{
    if (now_us < front->next_look_us)
        return;
    front->next_look_us = now_us + front->config.keep_alive_us / 4;
    for (yard_front_job *job = front->newest, *older; job; job = older) {
        older = job->older; /* jobs are freed later, by decide */
        if (!is_silent(front, now_us, job))
            continue;
        clear_out(front);
        yard_api_put_keep_alive(&front->out);
        send_events(front, now_us, job, 0);
    }
}
