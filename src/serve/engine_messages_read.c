/* Decoding: protobuf-c builds its structs in the reader's memory, which is bounded. */
#include <stdlib.h>

#include "proto/engine.pb-c.h"
#include "serve/engine_messages.h"

enum { HASH_BYTES = 16, BLOCK_BYTES = 1 << 16, ALIGNMENT = 16 };

/* Memory is given up whole with the next message; the largest block is kept. */
typedef struct block {
    struct block *next;
    size_t n_bytes, used;
    uint8_t *data;
} block;

struct yard_reader {
    ProtobufCAllocator allocator;
    block *blocks; /* the first is the one in use */
    size_t n_bytes, max_bytes;

    const Switchyard__V1__Tokens *tokens;
    const Switchyard__V1__State *state;
    size_t next; /* of its outputs or instances */
    bool told_report;
};

static block *add_block(yard_reader *r, size_t n)
{
    const size_t wanted = n > BLOCK_BYTES ? n : BLOCK_BYTES;
    block *b;

    if (r->n_bytes + wanted > r->max_bytes)
        return NULL;
    b = malloc(sizeof(*b));
    if (!b)
        return NULL;
    *b = (block){ .next = r->blocks, .n_bytes = wanted, .data = malloc(wanted) };
    if (!b->data) {
        free(b);
        return NULL;
    }
    r->n_bytes += wanted;
    r->blocks = b;
    return b;
}

static void *take_memory(void *ctx, size_t n)
{
    yard_reader *r = ctx;
    const size_t wanted = n <= r->max_bytes ? yard_align_up(n, ALIGNMENT) : n;
    block *b = r->blocks;
    uint8_t *data;

    if (!b || b->n_bytes - b->used < wanted)
        b = add_block(r, wanted);
    if (!b)
        return NULL;
    data = b->data + b->used;
    b->used += wanted;
    return data;
}

static void give_back(void *ctx, void *data)
{
    (void)ctx;
    (void)data;
}

static void free_blocks(yard_reader *r, block *kept)
{
    while (r->blocks) {
        block *b = r->blocks;

        r->blocks = b->next;
        if (b == kept)
            continue;
        free(b->data);
        free(b);
    }
    r->n_bytes = 0;
    if (kept) {
        kept->next = NULL;
        kept->used = 0;
        r->blocks = kept;
        r->n_bytes = kept->n_bytes;
    }
}

yard_status yard_reader_create(yard_reader **out, size_t max_bytes, yard_error *err)
{
    yard_reader *r = calloc(1, sizeof(*r));

    if (!r)
        return yard_fail(err, YARD_ENOMEM, "messages: %zu bytes", sizeof(*r));
    r->allocator = (ProtobufCAllocator){ take_memory, give_back, r };
    r->max_bytes = max_bytes;
    *out = r;
    return YARD_OK;
}

void yard_reader_destroy(yard_reader *r)
{
    if (!r)
        return;
    free_blocks(r, NULL);
    free(r);
}

static const void *unpack(yard_reader *r, const ProtobufCMessageDescriptor *what,
                          const uint8_t *bytes, size_t n_bytes)
{
    block *largest = r->blocks;

    for (block *b = r->blocks; b; b = b->next)
        largest = b->n_bytes > largest->n_bytes ? b : largest;
    free_blocks(r, largest);
    r->tokens = NULL;
    r->state = NULL;
    r->next = 0;
    r->told_report = false;
    return protobuf_c_message_unpack(what, &r->allocator, n_bytes, bytes);
}

static bool read_bias(yard_reader *r, const Switchyard__V1__Request *m, yard_request *out)
{
    yard_logit_bias *bias;

    if (m->n_bias_token != m->n_bias_value)
        return false;
    bias = take_memory(r, (m->n_bias_token + 1) * sizeof(*bias));
    if (!bias)
        return false;
    for (size_t i = 0; i < m->n_bias_token; i++)
        bias[i] = (yard_logit_bias){ m->bias_token[i], m->bias_value[i] };
    out->bias = bias;
    out->n_bias = (uint32_t)m->n_bias_token;
    return true;
}

static bool read_request(yard_reader *r, const Switchyard__V1__Request *m,
                         yard_request_message *out)
{
    yard_request request = YARD_REQUEST_INIT;

    request.prompt = m->prompt;
    request.n_prompt = (uint32_t)m->n_prompt;
    if (m->limit_case == SWITCHYARD__V1__REQUEST__LIMIT_MAX_NEW_TOKENS)
        request.max_new_tokens = m->max_new_tokens;
    request.sampling = (yard_sampling){
        .temperature = m->temperature,
        .top_p = m->top_p == 0.0f ? 1.0f : m->top_p,
        .min_p = m->min_p,
        .top_k = m->top_k,
        .repetition_penalty = m->repetition_penalty == 0.0f ? 1.0f : m->repetition_penalty,
        .presence_penalty = m->presence_penalty,
        .frequency_penalty = m->frequency_penalty,
        .seed = m->seed,
    };
    request.ignore_eos = m->ignore_eos;
    request.stop_token = m->stop_token;
    request.n_stop_token = (uint32_t)m->n_stop_token;
    request.n_choices = m->n_choices ? m->n_choices : 1;
    request.n_logprobs = m->n_logprobs;
    request.prompt_logprobs = m->prompt_logprobs;
    if (!read_bias(r, m, &request))
        return false;
    *out = (yard_request_message){ .tag = m->tag, .instance = m->instance, .request = request };
    return true;
}

bool yard_decode_request(yard_reader *r, const uint8_t *bytes, size_t n_bytes,
                         yard_request_message *out)
{
    const Switchyard__V1__GenerateRequest *m =
        unpack(r, &switchyard__v1__generate_request__descriptor, bytes, n_bytes);

    if (!m)
        return false;
    if (m->what_case == SWITCHYARD__V1__GENERATE_REQUEST__WHAT_REQUEST)
        return read_request(r, m->request, out);
    if (m->what_case != SWITCHYARD__V1__GENERATE_REQUEST__WHAT_ABORT)
        return false;
    *out = (yard_request_message){
        .is_abort = true,
        .tag = m->abort->tag,
        .choice = m->abort->which_case == SWITCHYARD__V1__ABORT__WHICH_CHOICE ? m->abort->choice
                                                                              : YARD_ALL_CHOICES,
    };
    return true;
}

bool yard_decode_abort(yard_reader *r, const uint8_t *bytes, size_t n_bytes, uint64_t *stream,
                       uint64_t *tag)
{
    const Switchyard__V1__AbortRequest *m =
        unpack(r, &switchyard__v1__abort_request__descriptor, bytes, n_bytes);

    if (!m)
        return false;
    *stream = m->stream;
    *tag = m->tag;
    return true;
}

bool yard_decode_watch(yard_reader *r, const uint8_t *bytes, size_t n_bytes, uint64_t *stream)
{
    const Switchyard__V1__WatchRequest *m =
        unpack(r, &switchyard__v1__watch_request__descriptor, bytes, n_bytes);

    if (!m)
        return false;
    *stream = m->stream;
    return true;
}

bool yard_decode_health(yard_reader *r, const uint8_t *bytes, size_t n_bytes, yard_health *out)
{
    const Switchyard__V1__HealthReply *m =
        unpack(r, &switchyard__v1__health_reply__descriptor, bytes, n_bytes);

    if (!m)
        return false;
    *out = (yard_health){ m->ready,      m->progressing, m->step_age_us,
                          m->generation, m->n_ranks,     m->n_ranks_alive };
    return true;
}

bool yard_decode_tokens(yard_reader *r, const uint8_t *bytes, size_t n_bytes, uint64_t *stream)
{
    const Switchyard__V1__Tokens *m =
        unpack(r, &switchyard__v1__tokens__descriptor, bytes, n_bytes);

    if (!m)
        return false;
    for (size_t i = 0; i < m->n_output; i++) {
        const Switchyard__V1__Output *o = m->output[i];

        if (o->n_logprob != o->n_logprob_token || o->n_logprobs > YARD_MAX_LOGPROBS ||
            o->n_logprob != o->n_token * o->n_logprobs ||
            (unsigned int)o->finish > SWITCHYARD__V1__FINISH__ERROR)
            return false;
    }
    *stream = m->stream;
    r->tokens = m;
    return true;
}

static const yard_finish finish_in[] = {
    [SWITCHYARD__V1__FINISH__RUNNING] = YARD_RUNNING,
    [SWITCHYARD__V1__FINISH__STOP] = YARD_FINISH_STOP,
    [SWITCHYARD__V1__FINISH__LENGTH] = YARD_FINISH_LENGTH,
    [SWITCHYARD__V1__FINISH__ABORTED] = YARD_FINISH_ABORTED,
    [SWITCHYARD__V1__FINISH__ERROR] = YARD_FINISH_ERROR,
};

static const yard_token_logprob *read_logprobs(yard_reader *r, const Switchyard__V1__Output *o)
{
    yard_token_logprob *logprob;

    if (o->n_logprob == 0)
        return NULL;
    logprob = take_memory(r, o->n_logprob * sizeof(*logprob));
    for (size_t i = 0; logprob && i < o->n_logprob; i++)
        logprob[i] = (yard_token_logprob){ o->logprob_token[i], o->logprob[i] };
    return logprob;
}

bool yard_reader_next_output(yard_reader *r, yard_link_tokens *out)
{
    const Switchyard__V1__Output *o;

    if (!r->tokens || r->next == r->tokens->n_output)
        return false;
    o = r->tokens->output[r->next++];
    *out = (yard_link_tokens){
        .tag = o->tag,
        .choice = o->choice,
        .n_cached = o->n_cached,
        .token = o->token,
        .n_tokens = (uint32_t)o->n_token,
        .logprob = read_logprobs(r, o),
        .n_logprobs = o->n_logprobs,
        .of_prompt = o->of_prompt,
        .finish = finish_in[o->finish],
        .message = o->finish == SWITCHYARD__V1__FINISH__ERROR ? o->message : NULL,
        .retry = o->retry,
    };
    if (!out->logprob)
        out->n_logprobs = 0;
    return true;
}

static yard_page_hash hash_from_bytes(const uint8_t *bytes)
{
    yard_page_hash hash = { { 0 } };

    for (int i = 0; i < HASH_BYTES; i++)
        hash.word[i / 8] |= (uint64_t)bytes[i] << i % 8 * 8;
    return hash;
}

static bool read_pod(const Switchyard__V1__Pod *m, yard_pod_state *out)
{
    *out = (yard_pod_state){
        .pod = { .n_instances = m->n_instances,
                 .max_requests = m->max_requests,
                 .context = m->context,
                 .vocab = m->vocab,
                 .generation = m->generation },
        .serves = m->serves,
        .n_ranks = m->n_ranks,
        .n_ranks_alive = m->n_ranks_alive,
    };
    if (m->page_root.len != HASH_BYTES || strlen(m->model) >= sizeof(out->pod.model))
        return false;
    out->pod.page_root = hash_from_bytes(m->page_root.data);
    strcpy(out->pod.model, m->model);
    return true;
}

bool yard_decode_state(yard_reader *r, const uint8_t *bytes, size_t n_bytes, bool *has_pod,
                       yard_pod_state *pod)
{
    const Switchyard__V1__State *m = unpack(r, &switchyard__v1__state__descriptor, bytes, n_bytes);

    if (!m)
        return false;
    for (size_t i = 0; i < m->n_instance; i++) {
        const Switchyard__V1__Pages *pages = m->instance[i]->pages;

        if (pages && (pages->hash.len % HASH_BYTES != 0 ||
                      (unsigned int)pages->what > SWITCHYARD__V1__PAGES__WHAT__UNKNOWN))
            return false;
    }
    *has_pod = m->pod != NULL;
    if (m->pod && !read_pod(m->pod, pod))
        return false;
    r->state = m;
    return true;
}

static bool next_pages(yard_reader *r, const Switchyard__V1__Pages *m, yard_link_event *out)
{
    static const yard_link_event_kind kinds[] = {
        [SWITCHYARD__V1__PAGES__WHAT__ADDED] = YARD_LINK_PAGES_ADDED,
        [SWITCHYARD__V1__PAGES__WHAT__EVICTED] = YARD_LINK_PAGES_EVICTED,
        [SWITCHYARD__V1__PAGES__WHAT__UNKNOWN] = YARD_LINK_PAGES_UNKNOWN,
    };
    const size_t n = m->hash.len / HASH_BYTES;
    yard_page_hash *page = take_memory(r, (n + 1) * sizeof(*page));

    if (!page)
        return false;
    for (size_t i = 0; i < n; i++)
        page[i] = hash_from_bytes(m->hash.data + i * HASH_BYTES);
    out->kind = kinds[m->what];
    out->page = page;
    out->n_pages = (uint32_t)n;
    return true;
}

bool yard_reader_next_event(yard_reader *r, yard_link_event *out)
{
    while (r->state && r->next < r->state->n_instance) {
        const Switchyard__V1__Instance *m = r->state->instance[r->next];

        *out = (yard_link_event){ .instance = m->instance };
        if (m->report && !r->told_report) {
            r->told_report = true;
            out->kind = YARD_LINK_REPORT;
            out->report = (yard_engine_report){
                .n_seen = m->report->n_seen,
                .n_requests = m->report->n_requests,
                .prompt_tokens = m->report->prompt_tokens,
                .running_tokens = m->report->running_tokens,
                .step_age_us = m->report->step_age_us,
                .n_free_pages = m->report->n_free_pages,
            };
            return true;
        }
        r->told_report = false;
        r->next++;
        if (m->pages && next_pages(r, m->pages, out))
            return true;
    }
    return false;
}
