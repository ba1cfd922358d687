/* A request's way to the engines: read, checked against what the engines are, given to the
 * scheduler, sent where that says, and ended. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>

#include "serve/front_impl.h"

enum { ENGINE_LOST_RETRY_S = 1 };

static yard_front_job *open_job(yard_front *front, uint64_t now_us)
{
    yard_front_job *job = calloc(1, sizeof(*job));

    if (!job)
        return NULL;
    job->front = front;
    job->arrived_us = job->sent_us = now_us;
    job->created = (int64_t)time(NULL);
    job->context = yard_front_context(front);
    job->older = front->newest;
    if (front->newest)
        front->newest->newer = job;
    front->newest = job;
    front->n_jobs++;
    return job;
}

static void free_parts(yard_front_job *job)
{
    for (uint32_t i = 0; i < job->n_parts; i++) {
        for (uint32_t k = 0; k < job->parts[i].n_choices; k++)
            yard_front_choice_release(&job->parts[i].choices[k]);
        free(job->parts[i].choices);
    }
    free(job->parts);
}

void yard_front_job_close(yard_front_job *job)
{
    yard_front *front = job->front;

    if (job->sink || job->n_open > 0 || job->with_thread || job->held)
        return;
    *(job->newer ? &job->newer->older : &front->newest) = job->older;
    if (job->older)
        job->older->newer = job->newer;
    front->n_jobs--;
    free_parts(job);
    yard_front_prepared_release(&job->prepared);
    free(job->body);
    free(job);
}

void yard_front_job_abandon(yard_front *front, yard_front_job *job)
{
    job->sink = NULL;
    for (uint32_t i = 0; i < job->n_parts; i++)
        if (job->parts[i].id != 0)
            yard_scheduler_abort(front->scheduler, job->parts[i].id);
}

yard_front_job *yard_front_submit(yard_front *front, uint64_t now_us, yard_front_route route,
                                  char *body, size_t n_bytes, const char *id,
                                  const yard_front_sink *sink, void *ctx)
{
    yard_front_job *job = open_job(front, now_us);

    if (!job) {
        const yard_front_summary summary = { .http_status = 500 };
        const yard_api_out nothing = { .no_memory = true };

        free(body);
        sink->answer(ctx, &summary, &nothing, 0);
        return NULL;
    }
    job->route = route;
    job->sink = sink;
    job->ctx = ctx;
    job->body = body;
    job->n_bytes = n_bytes;
    snprintf(job->id, sizeof(job->id), "%s-%.63s", route == YARD_ROUTE_CHAT ? "chatcmpl" : "cmpl",
             id);
    if (n_bytes > front->config.long_body_bytes) {
        yard_front_reader_give(&front->reader, job);
        return job;
    }
    yard_front_prepare(&job->prepared, &front->model, route, body, n_bytes, job->context);
    return yard_front_job_read(front, now_us, job) ? job : NULL;
}

void yard_front_cancel(yard_front *front, uint64_t now_us, yard_front_job *job)
{
    front->metrics.n_gone++;
    job->held = true;
    yard_front_job_abandon(front, job);
    yard_front_decide(front, now_us);
    job->held = false;
    yard_front_job_close(job);
}

static yard_status check_ids(const yard_front *front, const yard_front_prompt *prompt,
                             const char *param, yard_api_error *err)
{
    for (uint32_t i = 0; i < prompt->n_ids; i++)
        if ((uint32_t)prompt->ids[i] >= front->about.vocab)
            return yard_api_refuse(err, NULL, param, "want ids of the vocabulary (0 to %u), got %d",
                                   front->about.vocab - 1, prompt->ids[i]);
    return YARD_OK;
}

static yard_status check(const yard_front *front, const yard_front_job *job, yard_api_error *err)
{
    const yard_api_request *r = &job->prepared.request;
    yard_error lost;

    if (front->n_up == 0) {
        yard_fail(&lost, YARD_EPEER, "no engine is ready; try again");
        return yard_api_error_from(err, &lost);
    }
    if (r->n > front->about.max_requests)
        return yard_api_refuse(err, NULL, "n",
                               "want at most %u, what an instance takes at a time, got %u",
                               front->about.max_requests, r->n);
    for (uint32_t i = 0; i < r->n_bias; i++)
        if ((uint32_t)r->bias[i].token >= front->about.vocab)
            return yard_api_refuse(err, NULL, "logit_bias",
                                   "want ids of the vocabulary (0 to %u), got %d",
                                   front->about.vocab - 1, r->bias[i].token);
    for (uint32_t i = 0; i < job->prepared.n_prompts; i++) {
        const yard_front_prompt *prompt = &job->prepared.prompt[i];
        const char *param = r->messages ? "messages" : "prompt";

        if (prompt->n_ids >= front->about.context)
            return yard_api_too_long(err, param, front->about.context, prompt->n_ids);
        if (check_ids(front, prompt, param, err) != YARD_OK)
            return YARD_EINVAL;
    }
    return YARD_OK;
}

static bool open_parts(yard_front_job *job)
{
    const yard_front_prepared *p = &job->prepared;

    assert(p->n_prompts > 0 && p->prompt);
    job->parts = calloc(p->n_prompts, sizeof(*job->parts));
    if (!job->parts)
        return false;
    for (uint32_t i = 0; i < p->n_prompts; i++) {
        yard_front_part *part = &job->parts[job->n_parts++];

        *part = (yard_front_part){ .job = job, .prompt = &p->prompt[i] };
        part->choices = calloc(p->request.n, sizeof(*part->choices));
        if (!part->choices)
            return false;
        part->n_choices = p->request.n;
    }
    return true;
}

static uint32_t max_new_tokens(const yard_front *front, const yard_front_part *part)
{
    /* checked when it came; engines may have been replaced by others since: theirs to refuse */
    const uint32_t room =
        front->about.context > part->prompt->n_ids ? front->about.context - part->prompt->n_ids : 1;
    const uint32_t wished = part->job->prepared.request.max_new_tokens;

    return wished < room ? wished : room;
}

static yard_status submit_part(yard_front *front, yard_front_job *job, yard_front_part *part,
                               yard_error *err)
{
    const yard_front_prompt *prompt = part->prompt;
    const uint64_t timeout_us = front->config.request_timeout_us;
    const uint64_t left_us = UINT64_MAX - job->arrived_us;
    yard_page_hash *page = malloc((prompt->n_ids / YARD_PAGE_TOKENS + (size_t)1) * sizeof(*page));
    yard_scheduler_request request = {
        .n_prompt = prompt->n_ids,
        .page = page,
        .max_new_tokens = max_new_tokens(front, part),
        .deadline_us = timeout_us < left_us ? job->arrived_us + timeout_us : UINT64_MAX,
        .ctx = part,
    };
    yard_status st;

    if (!page)
        return yard_fail(err, YARD_ENOMEM, "no memory for the request");
    yard_page_hash_chain(front->about.page_root, prompt->ids, prompt->n_ids, page);
    st = yard_scheduler_submit(front->scheduler, &request, &part->id, err);
    if (st == YARD_OK)
        job->n_open++;
    free(page);
    return st;
}

static void draw_seed(yard_api_request *r)
{
    if (!r->has_seed && getrandom(&r->sampling.seed, sizeof(r->sampling.seed), GRND_NONBLOCK) < 0)
        r->sampling.seed = yard_now_us();
}

static void begin(yard_front *front, uint64_t now_us, yard_front_job *job)
{
    yard_api_error error = { 0 };
    yard_error err = { 0 };
    uint32_t retry_after_s = 0;
    yard_status st = YARD_OK;

    draw_seed(&job->prepared.request);
    if (!open_parts(job))
        st = yard_fail(&err, YARD_ENOMEM, "no memory for the request");
    for (uint32_t i = 0; i < job->n_parts && st == YARD_OK; i++)
        st = submit_part(front, job, &job->parts[i], &err);
    if (st == YARD_OK)
        return;
    if (st == YARD_EAGAIN)
        retry_after_s = yard_scheduler_retry_after_s(front->scheduler);
    yard_api_error_from(&error, &err);
    yard_front_fail(front, now_us, job, &error, retry_after_s);
}

static bool is_answered_here(yard_front_route route)
{
    return route == YARD_ROUTE_TOKENIZE || route == YARD_ROUTE_DETOKENIZE;
}

static void begin_or_answer(yard_front *front, uint64_t now_us, yard_front_job *job)
{
    yard_front_prepared *p = &job->prepared;

    if (p->error.http_status == 0 && is_answered_here(job->route))
        yard_front_answer(front, now_us, job, p->answer.no_memory ? 500 : 200, &p->answer, 0);
    else if (p->error.http_status == 0 && check(front, job, &p->error) == YARD_OK)
        begin(front, now_us, job);
    else
        yard_front_fail(front, now_us, job, &p->error,
                        p->error.http_status == 503 ? ENGINE_LOST_RETRY_S : 0);
}

bool yard_front_job_read(yard_front *front, uint64_t now_us, yard_front_job *job)
{
    bool goes_on;

    free(job->body);
    job->body = NULL;
    job->held = true;
    if (job->sink)
        begin_or_answer(front, now_us, job);
    yard_front_decide(front, now_us);
    job->held = false;
    goes_on = job->sink != NULL;
    yard_front_job_close(job);
    return goes_on;
}

static yard_request engine_request(const yard_front *front, const yard_front_part *part,
                                   int32_t *stop_token)
{
    const yard_api_request *r = &part->job->prepared.request;
    yard_request q = YARD_REQUEST_INIT;

    q.prompt = part->prompt->ids;
    q.n_prompt = part->prompt->n_ids;
    q.max_new_tokens = max_new_tokens(front, part);
    q.sampling = r->sampling;
    q.bias = r->bias;
    q.n_bias = r->n_bias;
    q.ignore_eos = r->ignore_eos;
    q.stop_token = stop_token;
    for (uint32_t i = 0; i < r->n_stop_token; i++)
        stop_token[q.n_stop_token++] = r->stop_token[i];
    for (uint32_t i = 0; i < front->model.n_eos && !r->ignore_eos; i++)
        stop_token[q.n_stop_token++] = front->model.eos[i];
    q.n_choices = r->n;
    q.n_logprobs = r->logprobs ? 1 + r->top_logprobs : 0;
    q.prompt_logprobs = r->echo && r->logprobs;
    return q;
}

static yard_status open_choices(yard_front *front, yard_front_part *part)
{
    const yard_front_prepared *p = &part->job->prepared;
    const uint32_t first = (uint32_t)(part - part->job->parts) * part->n_choices;
    yard_status st = YARD_OK;

    for (uint32_t i = 0; i < part->n_choices && st == YARD_OK; i++)
        st = yard_front_choice_open(&part->choices[i], first + i, p, part->prompt, front->model.tok,
                                    &part->why);
    return st;
}

static void send(yard_front *front, yard_front_part *part, const yard_action *action)
{
    yard_front_pod *pod = yard_front_pod_of(front, action->instance);
    int32_t stop_token[YARD_FRONT_MAX_STOP + YARD_MAX_EOS];
    const yard_request request = engine_request(front, part, stop_token);

    yard_front_tag_drop(front, part); /* of an attempt that failed */
    part->attempt = action->attempt;
    part->instance = action->instance;
    part->has_cached = false;
    if (open_choices(front, part) == YARD_OK && yard_front_tag_take(front, part) != 0 &&
        front->config.link->generate(pod->link, action->instance % YARD_FRONT_MAX_POD_INSTANCES,
                                     part->tag, &request))
        return;
    yard_fail(&part->why, YARD_ENOMEM, "no memory for the request");
    yard_scheduler_failed(front->scheduler, part->id, action->attempt, false);
}

static void describe_end(const yard_front *front, const yard_front_part *part,
                         yard_end_reason reason, yard_api_error *out)
{
    yard_error err = part->why;

    if (reason == YARD_END_DEADLINE)
        yard_fail(&err, YARD_ETIMEDOUT, "the request was not answered within %.3g s",
                  (double)front->config.request_timeout_us * 1e-6);
    else if (reason == YARD_END_INSTANCE_LOST)
        yard_fail(&err, YARD_EPEER, "the engine that computed the answer was lost; try again");
    else if (err.status == YARD_OK)
        yard_fail(&err, YARD_EIO, "the engine ended the request");
    yard_api_error_from(out, &err);
}

static void end(yard_front *front, uint64_t now_us, yard_front_part *part,
                const yard_action *action)
{
    yard_front_job *job = part->job;
    yard_api_error error;

    if (action->instance != YARD_NO_INSTANCE && part->tag != 0)
        front->config.link->abort(yard_front_pod_of(front, action->instance)->link, part->tag,
                                  YARD_ALL_CHOICES);
    yard_front_tag_drop(front, part);
    part->id = 0;
    job->n_open--;
    if (job->sink && action->reason != YARD_END_FINISHED) {
        describe_end(front, part, action->reason, &error);
        yard_front_fail(front, now_us, job, &error,
                        error.http_status == 503 ? ENGINE_LOST_RETRY_S : 0);
    } else if (job->sink && job->n_open == 0) {
        yard_front_complete(front, now_us, job);
    }
    yard_front_job_close(job);
}

void yard_front_decide(yard_front *front, uint64_t now_us)
{
    yard_action action;

    while (yard_scheduler_next(front->scheduler, now_us, &action)) {
        if (action.kind == YARD_ACTION_SEND)
            send(front, action.ctx, &action);
        else
            end(front, now_us, action.ctx, &action);
    }
}
