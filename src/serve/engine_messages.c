#include "serve/engine_messages.h"

#include <stdlib.h>

#include "proto/engine.pb-c.h"

enum { HASH_BYTES = 16, OUTPUT_BYTES = 16 /* about, without its arrays */ };

const char *const yard_engine_methods[YARD_METHOD_COUNT] = {
    [YARD_METHOD_GENERATE] = "/switchyard.v1.Engine/Generate",
    [YARD_METHOD_ABORT] = "/switchyard.v1.Engine/Abort",
    [YARD_METHOD_WATCH] = "/switchyard.v1.Engine/Watch",
    [YARD_METHOD_HEALTH] = "/switchyard.v1.Engine/Health",
};

void yard_bytes_release(yard_bytes *b)
{
    free(b->data);
    *b = (yard_bytes){ 0 };
}

static bool pack(yard_bytes *out, const void *message)
{
    const size_t n = protobuf_c_message_get_packed_size(message);

    if (n > out->capacity) {
        uint8_t *larger = realloc(out->data, 2 * n);

        if (!larger)
            return false;
        out->data = larger;
        out->capacity = 2 * n;
    }
    out->n = n > 0 ? protobuf_c_message_pack(message, out->data) : 0;
    return true;
}

static void fill_request(Switchyard__V1__Request *m, const yard_request *r)
{
    m->n_prompt = r->n_prompt;
    m->prompt = (int32_t *)r->prompt;
    if (r->max_new_tokens != UINT32_MAX) {
        m->limit_case = SWITCHYARD__V1__REQUEST__LIMIT_MAX_NEW_TOKENS;
        m->max_new_tokens = r->max_new_tokens;
    }
    m->temperature = r->sampling.temperature;
    m->top_p = r->sampling.top_p;
    m->min_p = r->sampling.min_p;
    m->top_k = r->sampling.top_k;
    m->repetition_penalty = r->sampling.repetition_penalty;
    m->presence_penalty = r->sampling.presence_penalty;
    m->frequency_penalty = r->sampling.frequency_penalty;
    m->seed = r->sampling.seed;
    m->ignore_eos = r->ignore_eos;
    m->n_stop_token = r->n_stop_token;
    m->stop_token = (int32_t *)r->stop_token;
    m->n_choices = r->n_choices;
    m->n_logprobs = r->n_logprobs;
    m->prompt_logprobs = r->prompt_logprobs;
}

static bool fill_bias(Switchyard__V1__Request *m, const yard_request *r)
{
    m->bias_token = malloc((r->n_bias + 1) * sizeof(*m->bias_token));
    m->bias_value = malloc((r->n_bias + 1) * sizeof(*m->bias_value));
    if (!m->bias_token || !m->bias_value)
        return false;
    for (uint32_t i = 0; i < r->n_bias; i++) {
        m->bias_token[i] = r->bias[i].token;
        m->bias_value[i] = r->bias[i].value;
    }
    m->n_bias_token = m->n_bias_value = r->n_bias;
    return true;
}

bool yard_encode_request(yard_bytes *out, uint32_t instance, uint64_t tag,
                         const yard_request *request)
{
    Switchyard__V1__GenerateRequest whole = SWITCHYARD__V1__GENERATE_REQUEST__INIT;
    Switchyard__V1__Request m = SWITCHYARD__V1__REQUEST__INIT;
    bool ok;

    m.tag = tag;
    m.instance = instance;
    fill_request(&m, request);
    whole.what_case = SWITCHYARD__V1__GENERATE_REQUEST__WHAT_REQUEST;
    whole.request = &m;
    ok = fill_bias(&m, request) && pack(out, &whole);
    free(m.bias_token);
    free(m.bias_value);
    return ok;
}

bool yard_encode_abort(yard_bytes *out, uint64_t tag, uint32_t choice)
{
    Switchyard__V1__GenerateRequest whole = SWITCHYARD__V1__GENERATE_REQUEST__INIT;
    Switchyard__V1__Abort m = SWITCHYARD__V1__ABORT__INIT;

    m.tag = tag;
    if (choice != YARD_ALL_CHOICES) {
        m.which_case = SWITCHYARD__V1__ABORT__WHICH_CHOICE;
        m.choice = choice;
    }
    whole.what_case = SWITCHYARD__V1__GENERATE_REQUEST__WHAT_ABORT;
    whole.abort = &m;
    return pack(out, &whole);
}

bool yard_encode_watch(yard_bytes *out, uint64_t stream)
{
    Switchyard__V1__WatchRequest m = SWITCHYARD__V1__WATCH_REQUEST__INIT;

    m.stream = stream;
    return pack(out, &m);
}

bool yard_encode_abort_reply(yard_bytes *out, bool found)
{
    Switchyard__V1__AbortReply m = SWITCHYARD__V1__ABORT_REPLY__INIT;

    m.found = found;
    return pack(out, &m);
}

bool yard_encode_health(yard_bytes *out, const yard_health *health)
{
    Switchyard__V1__HealthReply m = SWITCHYARD__V1__HEALTH_REPLY__INIT;

    m.ready = health->ready;
    m.progressing = health->progressing;
    m.step_age_us = health->step_age_us;
    m.generation = health->generation;
    m.n_ranks = health->n_ranks;
    m.n_ranks_alive = health->n_ranks_alive;
    return pack(out, &m);
}

/* Arrays are said by where they begin, for they move when they grow. */
struct yard_output {
    yard_link_tokens head; /* its pointers mean nothing, but for message */
    size_t token_at, logprob_at;
    char *message; /* owned */
};

/* Room for n more; false: no memory. */
static bool grow(void *items, size_t n, size_t more, size_t *max, size_t item_bytes)
{
    void **array = items;
    const size_t wanted = n + more > 2 * *max ? n + more : 2 * *max;
    void *larger;

    if (n + more <= *max)
        return true;
    larger = realloc(*array, wanted * item_bytes);
    if (!larger)
        return false;
    *array = larger;
    *max = wanted;
    return true;
}

static size_t output_bytes(const struct yard_output *o)
{
    return OUTPUT_BYTES + (o->message ? strlen(o->message) : 0) +
           o->head.n_tokens * (sizeof(int32_t) + o->head.n_logprobs * sizeof(yard_token_logprob));
}

bool yard_outputs_add(yard_outputs *o, const yard_link_tokens *t)
{
    const size_t n_logprobs = t->logprob ? (size_t)t->n_tokens * t->n_logprobs : 0;
    struct yard_output item = { .head = *t, .token_at = o->n_tokens, .logprob_at = o->n_logprobs };

    if (!grow(&o->items, o->n, 1, &o->max, sizeof(*o->items)) ||
        !grow(&o->tokens, o->n_tokens, t->n_tokens, &o->max_tokens, sizeof(*o->tokens)) ||
        !grow(&o->logprobs, o->n_logprobs, n_logprobs, &o->max_logprobs, sizeof(*o->logprobs)))
        return false;
    if (t->message && !(item.message = strdup(t->message)))
        return false;
    if (t->n_tokens > 0)
        memcpy(o->tokens + o->n_tokens, t->token, t->n_tokens * sizeof(*o->tokens));
    if (n_logprobs > 0)
        memcpy(o->logprobs + o->n_logprobs, t->logprob, n_logprobs * sizeof(*o->logprobs));
    else
        item.head.n_logprobs = 0;
    o->n_tokens += t->n_tokens;
    o->n_logprobs += n_logprobs;
    o->items[o->n++] = item;
    o->n_bytes += output_bytes(&item);
    return true;
}

void yard_outputs_clear(yard_outputs *o)
{
    for (size_t i = 0; i < o->n; i++)
        free(o->items[i].message);
    o->n = o->n_tokens = o->n_logprobs = o->n_bytes = 0;
}

void yard_outputs_release(yard_outputs *o)
{
    yard_outputs_clear(o);
    free(o->items);
    free(o->tokens);
    free(o->logprobs);
    *o = (yard_outputs){ 0 };
}

static const Switchyard__V1__Finish finish_out[] = {
    [YARD_RUNNING] = SWITCHYARD__V1__FINISH__RUNNING,
    [YARD_FINISH_STOP] = SWITCHYARD__V1__FINISH__STOP,
    [YARD_FINISH_LENGTH] = SWITCHYARD__V1__FINISH__LENGTH,
    [YARD_FINISH_ABORTED] = SWITCHYARD__V1__FINISH__ABORTED,
    [YARD_FINISH_ERROR] = SWITCHYARD__V1__FINISH__ERROR,
};

static void fill_output(Switchyard__V1__Output *m, const yard_outputs *o, size_t i,
                        int32_t *logprob_token, float *logprob)
{
    const struct yard_output *from = &o->items[i];
    const yard_link_tokens *t = &from->head;
    const size_t n_logprobs = (size_t)t->n_tokens * t->n_logprobs, at = from->logprob_at;

    m->tag = t->tag;
    m->choice = t->choice;
    m->n_token = t->n_tokens;
    m->token = t->n_tokens > 0 ? o->tokens + from->token_at : NULL;
    m->finish = finish_out[t->finish];
    m->n_cached = t->n_cached;
    m->of_prompt = t->of_prompt;
    m->n_logprobs = t->n_logprobs;
    for (size_t j = 0; j < n_logprobs; j++) {
        logprob_token[at + j] = o->logprobs[at + j].token;
        logprob[at + j] = o->logprobs[at + j].logprob;
    }
    m->n_logprob_token = m->n_logprob = n_logprobs;
    m->logprob_token = logprob_token + at;
    m->logprob = logprob + at;
    if (from->message)
        m->message = from->message;
    m->retry = t->retry;
}

bool yard_encode_stream(yard_bytes *out, uint64_t stream)
{
    Switchyard__V1__Tokens m = SWITCHYARD__V1__TOKENS__INIT;

    m.stream = stream;
    return pack(out, &m);
}

size_t yard_outputs_part(const yard_outputs *o, size_t first, size_t max_bytes)
{
    size_t end = first, n_bytes = 0;

    while (end < o->n && n_bytes < max_bytes)
        n_bytes += output_bytes(&o->items[end++]);
    return end;
}

bool yard_encode_tokens(yard_bytes *out, const yard_outputs *o, size_t first, size_t end)
{
    const Switchyard__V1__Output empty = SWITCHYARD__V1__OUTPUT__INIT;
    Switchyard__V1__Tokens whole = SWITCHYARD__V1__TOKENS__INIT;
    const size_t n = end - first;
    Switchyard__V1__Output *messages = malloc((n + 1) * sizeof(*messages));
    Switchyard__V1__Output **list = malloc((n + 1) * sizeof(*list));
    int32_t *logprob_token = malloc((o->n_logprobs + 1) * sizeof(*logprob_token));
    float *logprob = malloc((o->n_logprobs + 1) * sizeof(*logprob));
    bool ok = messages && list && logprob_token && logprob;

    for (size_t i = 0; ok && i < n; i++) {
        messages[i] = empty;
        list[i] = &messages[i];
        fill_output(&messages[i], o, first + i, logprob_token, logprob);
    }
    whole.n_output = n;
    whole.output = list;
    ok = ok && pack(out, &whole);
    free(messages);
    free(list);
    free(logprob_token);
    free(logprob);
    return ok;
}

static void hash_to_bytes(const yard_page_hash *hash, uint8_t *bytes)
{
    for (int i = 0; i < HASH_BYTES; i++)
        bytes[i] = (uint8_t)(hash->word[i / 8] >> i % 8 * 8);
}

/* One instance's part, with all that it points to. */
typedef struct instance_part {
    Switchyard__V1__Instance instance;
    Switchyard__V1__Report report;
    Switchyard__V1__Pages pages;
} instance_part;

static void fill_report(Switchyard__V1__Report *m, const yard_engine_report *r)
{
    m->n_seen = r->n_seen;
    m->n_requests = r->n_requests;
    m->prompt_tokens = r->prompt_tokens;
    m->running_tokens = r->running_tokens;
    m->step_age_us = r->step_age_us;
    m->n_free_pages = r->n_free_pages;
}

static bool fill_instance(instance_part *part, const yard_instance_state *s)
{
    const instance_part empty = { SWITCHYARD__V1__INSTANCE__INIT, SWITCHYARD__V1__REPORT__INIT,
                                  SWITCHYARD__V1__PAGES__INIT };

    *part = empty;
    part->instance.instance = s->instance;
    if (s->report) {
        fill_report(&part->report, s->report);
        part->instance.report = &part->report;
    }
    if (s->n_pages == 0 && s->change != YARD_PAGES_UNKNOWN)
        return true;
    part->pages.what = s->change == YARD_PAGE_ADDED     ? SWITCHYARD__V1__PAGES__WHAT__ADDED
                       : s->change == YARD_PAGE_EVICTED ? SWITCHYARD__V1__PAGES__WHAT__EVICTED
                                                        : SWITCHYARD__V1__PAGES__WHAT__UNKNOWN;
    part->pages.hash.data = malloc((size_t)s->n_pages * HASH_BYTES + 1);
    if (!part->pages.hash.data)
        return false;
    part->pages.hash.len = (size_t)s->n_pages * HASH_BYTES;
    for (uint32_t i = 0; i < s->n_pages; i++)
        hash_to_bytes(&s->page[i], part->pages.hash.data + (size_t)i * HASH_BYTES);
    part->instance.pages = &part->pages;
    return true;
}

static void fill_pod(Switchyard__V1__Pod *m, const yard_pod_state *s, uint8_t *root)
{
    hash_to_bytes(&s->pod.page_root, root);
    m->n_instances = s->pod.n_instances;
    m->max_requests = s->pod.max_requests;
    m->context = s->pod.context;
    m->vocab = s->pod.vocab;
    m->page_root.data = root;
    m->page_root.len = HASH_BYTES;
    m->generation = s->pod.generation;
    m->model = (char *)s->pod.model;
    m->serves = s->serves;
    m->n_ranks = s->n_ranks;
    m->n_ranks_alive = s->n_ranks_alive;
}

bool yard_encode_state(yard_bytes *out, const yard_pod_state *pod,
                       const yard_instance_state *instances, uint32_t n_instances)
{
    Switchyard__V1__State whole = SWITCHYARD__V1__STATE__INIT;
    Switchyard__V1__Pod pod_message = SWITCHYARD__V1__POD__INIT;
    instance_part *parts = calloc(n_instances + 1, sizeof(*parts));
    Switchyard__V1__Instance **list = calloc(n_instances + 1, sizeof(*list));
    uint8_t root[HASH_BYTES];
    bool ok = parts && list;

    for (uint32_t i = 0; ok && i < n_instances; i++) {
        list[i] = &parts[i].instance;
        ok = fill_instance(&parts[i], &instances[i]);
    }
    if (pod) {
        fill_pod(&pod_message, pod, root);
        whole.pod = &pod_message;
    }
    whole.instance = list;
    whole.n_instance = n_instances;
    ok = ok && pack(out, &whole);
    for (uint32_t i = 0; parts && i < n_instances; i++)
        free(parts[i].pages.hash.data);
    free(parts);
    free(list);
    return ok;
}
