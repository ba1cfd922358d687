/* The front's making, its engines, and its loop. */
#include "serve/front.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "serve/front_impl.h"

enum { MAX_ENGINES = 1024, MISS_US = 3000000 };

static void take_defaults(yard_front_model_data *m, const yard_generation_config *g)
{
    m->limits = (yard_api_limits)YARD_API_LIMITS_INIT;
    m->limits.max_stop = YARD_FRONT_MAX_STOP;
    m->n_eos = g->n_eos;
    memcpy(m->eos, g->eos, sizeof(m->eos));
    if (!g->do_sample)
        return; /* the checkpoint says nothing about sampling: what the API's documents say */
    m->limits.defaults = (yard_sampling){ .temperature = g->params.temperature,
                                          .top_p = g->params.top_p,
                                          .min_p = g->params.min_p,
                                          .top_k = g->params.top_k,
                                          .repetition_penalty = g->params.repetition_penalty };
}

static uint32_t longest_token(const yard_tokenizer *tok)
{
    size_t longest = 1, n_bytes;

    for (uint32_t id = 0; id < yard_tokenizer_vocab_size(tok); id++)
        if (yard_tokenizer_token_bytes(tok, (int32_t)id, &n_bytes) && n_bytes > longest)
            longest = n_bytes;
    return (uint32_t)longest;
}

static int32_t bos_of(const yard_tokenizer *tok)
{
    const char *text = yard_tokenizer_bos_text(tok);

    return text && yard_tokenizer_adds_bos(tok) ? yard_tokenizer_find(tok, text, strlen(text)) : -1;
}

static yard_status load_model(yard_front_model_data *m, const yard_front_config *config,
                              yard_error *err)
{
    yard_model_config model;
    yard_generation_config generation;
    yard_status st = yard_model_config_load(&model, config->model_dir, &config->notify, err);

    if (st == YARD_OK)
        st = yard_generation_config_load(&generation, config->model_dir, &config->notify, err);
    if (st == YARD_OK)
        st = yard_tokenizer_load(&m->tok, config->model_dir, &config->notify, err);
    if (st != YARD_OK)
        return st;
    m->name = strdup(config->model);
    if (!m->name)
        return yard_fail(err, YARD_ENOMEM, "front: no memory");
    take_defaults(m, &generation);
    m->bos = bos_of(m->tok);
    m->max_token_bytes = longest_token(m->tok);
    m->max_positions = model.max_positions;
    st = yard_chat_template_find(&m->tpl, m->tok, config->template_name, &m->no_template);
    if (st != YARD_OK && config->template_name)
        return yard_fail(err, st, "%s", m->no_template.message);
    if (st != YARD_OK) /* completions go without one */
        yard_warn(&config->notify, "no chat: %s", m->no_template.message);
    return YARD_OK;
}

static yard_status open_pods(yard_front *front, const yard_front_config *config, yard_error *err)
{
    front->pods = calloc(config->n_engines, sizeof(*front->pods));
    if (!front->pods)
        return yard_fail(err, YARD_ENOMEM, "front: no memory for %u engines", config->n_engines);
    for (uint32_t i = 0; i < config->n_engines; i++) {
        const yard_link_config link = { .address = config->engine[i] };
        yard_front_pod *pod = &front->pods[i];
        yard_status st = YARD_OK;

        pod->address = strdup(config->engine[i]);
        if (!pod->address)
            return yard_fail(err, YARD_ENOMEM, "front: no memory for an address");
        front->n_pods = i + 1;
        st = config->link->open(&pod->link, &link, err);
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}

static yard_status fill(yard_front *front, const yard_front_config *config, yard_error *err)
{
    yard_scheduler_config scheduler = YARD_SCHEDULER_CONFIG_INIT;
    yard_status st = load_model(&front->model, config, err);

    scheduler.n_instances = config->n_engines * YARD_FRONT_MAX_POD_INSTANCES;
    scheduler.max_queued = config->max_queued;
    if (st == YARD_OK)
        st = yard_scheduler_create(&front->scheduler, &scheduler, err);
    if (st == YARD_OK)
        st = yard_front_reader_open(&front->reader, &front->model, err);
    if (st == YARD_OK)
        st = open_pods(front, config, err);
    return st;
}

yard_status yard_front_create(yard_front **out, const yard_front_config *config, yard_error *err)
{
    yard_front *front;
    yard_status st;

    if (config->n_engines == 0 || config->n_engines > MAX_ENGINES)
        return yard_fail(err, YARD_EINVAL, "front: want 1 to %d engines, got %u", MAX_ENGINES,
                         config->n_engines);
    front = calloc(1, sizeof(*front));
    if (!front)
        return yard_fail(err, YARD_ENOMEM, "front: no memory");
    front->config = *config;
    front->reader.fd = -1;
    front->free_tag = UINT32_MAX;
    front->created = (int64_t)time(NULL);
    st = fill(front, config, err);
    if (st != YARD_OK) {
        yard_front_destroy(front);
        return st;
    }
    *out = front;
    return YARD_OK;
}

void yard_front_destroy(yard_front *front)
{
    if (!front)
        return;
    yard_front_reader_close(&front->reader);
    while (front->newest) { /* cancelled while the thread had it */
        front->newest->with_thread = false;
        yard_front_job_close(front->newest);
    }
    for (uint32_t i = 0; i < front->n_pods; i++) {
        if (front->pods[i].link)
            front->config.link->close(front->pods[i].link);
        free(front->pods[i].address);
    }
    free(front->pods);
    yard_scheduler_destroy(front->scheduler);
    yard_tokenizer_free(front->model.tok);
    free(front->model.name);
    free(front->tags);
    yard_api_out_release(&front->out);
    free(front);
}

static uint32_t first_instance(const yard_front *front, const yard_front_pod *pod)
{
    return (uint32_t)(pod - front->pods) * YARD_FRONT_MAX_POD_INSTANCES;
}

/* What makes answers of two pods the same. */
static bool is_alike(const yard_link_pod *a, const yard_link_pod *b)
{
    return yard_page_hash_equal(a->page_root, b->page_root) && a->context == b->context &&
           a->vocab == b->vocab;
}

static void take_about(yard_front *front, const yard_link_pod *about)
{
    front->about = *about;
    front->has_about = true;
    snprintf(front->fingerprint, sizeof(front->fingerprint), "fp_%010llx",
             (unsigned long long)(about->page_root.word[0] & 0xffffffffffULL));
}

static void pod_down(yard_front *front, yard_front_pod *pod)
{
    if (!pod->up)
        return;
    pod->up = false;
    front->n_up--;
    for (uint32_t i = 0; i < pod->about.n_instances; i++) {
        pod->instance[i].up = false;
        yard_scheduler_instance_lost(front->scheduler, first_instance(front, pod) + i);
    }
}

static void pod_up(yard_front *front, uint64_t now_us, yard_front_pod *pod,
                   const yard_link_pod *about)
{
    pod_down(front, pod);
    if (about->n_instances == 0 || about->n_instances > YARD_FRONT_MAX_POD_INSTANCES) {
        yard_warn(&front->config.notify, "engine %s: want 1 to %d instances, got %u: not used",
                  pod->address, YARD_FRONT_MAX_POD_INSTANCES, about->n_instances);
        return;
    }
    if (front->n_up > 0 && !is_alike(&front->about, about)) {
        yard_warn(&front->config.notify,
                  "engine %s: runs another checkpoint, numeric mode, TP, --kv-dtype, --cache-salt, "
                  "device or context than the others (%s): not used",
                  pod->address, about->model);
        pod->about = *about;
        pod->unlike = true;
        return;
    }
    pod->unlike = false;
    if (front->n_up == 0)
        take_about(front, about);
    if (about->max_requests < front->about.max_requests)
        front->about.max_requests = about->max_requests;
    pod->about = *about;
    pod->up = true;
    front->n_up++;
    for (uint32_t i = 0; i < about->n_instances; i++) {
        pod->instance[i] = (yard_front_instance){ .up = true, .heard_us = now_us };
        yard_scheduler_instance_up(front->scheduler, now_us, first_instance(front, pod) + i,
                                   about->max_requests);
    }
    yard_warn(&front->config.notify, "engine %s is up: %u instance%s", pod->address,
              about->n_instances, about->n_instances == 1 ? "" : "s");
}

/* The last of its kind is gone: those of another take over, as after engines were exchanged one by
 * one. */
static void take_unlike(yard_front *front, uint64_t now_us)
{
    if (front->n_up > 0)
        return;
    for (uint32_t i = 0; i < front->n_pods; i++)
        if (front->pods[i].unlike)
            pod_up(front, now_us, &front->pods[i], &front->pods[i].about);
}

static void take_event(yard_front *front, uint64_t now_us, yard_front_pod *pod,
                       const yard_link_event *e)
{
    const uint32_t at = first_instance(front, pod) + e->instance;

    if (e->kind == YARD_LINK_UP) {
        pod->was_told = true;
        pod_up(front, now_us, pod, &e->pod);
        return;
    }
    if (e->kind == YARD_LINK_DOWN)
        pod->unlike = false;
    if (!pod->up)
        return;
    if (e->kind == YARD_LINK_DOWN) {
        yard_warn(&front->config.notify, "engine %s is lost: %s", pod->address,
                  e->message ? e->message : "no reason given");
        pod_down(front, pod);
        take_unlike(front, now_us);
        return;
    }
    if (e->kind == YARD_LINK_TOKENS) {
        yard_front_take_tokens(front, now_us, &e->tokens);
        return;
    }
    if (e->kind == YARD_LINK_PAUSED) {
        for (uint32_t i = 0; i < pod->about.n_instances; i++) {
            pod->instance[i].paused = true;
            yard_scheduler_instance_paused(front->scheduler, first_instance(front, pod) + i);
        }
        return;
    }
    if (e->instance >= pod->about.n_instances)
        return;
    switch (e->kind) {
    case YARD_LINK_REPORT:
        pod->instance[e->instance] =
            (yard_front_instance){ .up = true, .report = e->report, .heard_us = now_us };
        yard_scheduler_report(front->scheduler, now_us, at, &e->report);
        break;
    case YARD_LINK_PAGES_ADDED:
        yard_scheduler_pages_added(front->scheduler, at, e->page, e->n_pages);
        break;
    case YARD_LINK_PAGES_EVICTED:
        yard_scheduler_pages_evicted(front->scheduler, at, e->page, e->n_pages);
        break;
    default:
        yard_scheduler_pages_unknown(front->scheduler, at);
        break;
    }
}

uint32_t yard_front_fds(const yard_front *front, int *fds)
{
    fds[0] = front->reader.fd;
    for (uint32_t i = 0; i < front->n_pods; i++)
        fds[1 + i] = front->config.link->fd(front->pods[i].link);
    return 1 + front->n_pods;
}

/* Names the engines that have not answered since the start, once: an address may be wrong. */
static void look_for_missing(yard_front *front, uint64_t now_us)
{
    if (front->miss_us == 0)
        front->miss_us = now_us + MISS_US;
    if (now_us < front->miss_us)
        return;
    front->miss_us = UINT64_MAX;
    for (uint32_t i = 0; i < front->n_pods; i++)
        if (!front->pods[i].was_told)
            yard_warn(&front->config.notify, "engine %s does not answer; trying on",
                      front->pods[i].address);
}

/* Tokens that came are flushed before the scheduler decides: a request that has ended is then known
 * to have. */
void yard_front_run(yard_front *front, uint64_t now_us)
{
    yard_front_job *job;
    yard_link_event event;

    for (uint32_t i = 0; i < front->n_pods; i++)
        while (front->config.link->next(front->pods[i].link, &event))
            take_event(front, now_us, &front->pods[i], &event);
    look_for_missing(front, now_us);
    yard_front_flush(front, now_us);
    yard_front_decide(front, now_us);
    while ((job = yard_front_reader_take(&front->reader)))
        yard_front_job_read(front, now_us, job);
    yard_front_keep_alive(front, now_us);
    yard_front_decide(front, now_us);
}

uint64_t yard_front_wake_us(const yard_front *front)
{
    uint64_t wake_us = yard_scheduler_wake_us(front->scheduler);

    if (front->n_jobs > 0 && front->next_look_us < wake_us)
        wake_us = front->next_look_us;
    return front->miss_us < wake_us ? front->miss_us : wake_us;
}

const char *yard_front_model(const yard_front *front)
{
    return front->model.name;
}

uint32_t yard_front_context(const yard_front *front)
{
    return front->has_about ? front->about.context : front->model.max_positions;
}

int64_t yard_front_created(const yard_front *front)
{
    return front->created;
}
