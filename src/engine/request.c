/* Accepting, ending and reporting requests. */
#include <math.h>
#include <stdlib.h>

#include "engine/engine_impl.h"

void yard_sequence_free(sequence *seq)
{
    if (!seq)
        return;
    free(seq->token);
    free(seq->bias_token);
    free(seq->bias_value);
    free(seq->stop_token);
    free(seq);
}

/* ---- events ------------------------------------------------------------------------------ */

yard_status yard_events_reserve(event_queue *q, uint32_t n_live, yard_error *err)
{
    const uint32_t want = q->n + 2 * (n_live + 1); /* a token and an end for each */
    yard_event *larger;

    if (want <= q->capacity)
        return YARD_OK;
    larger = malloc((size_t)2 * want * sizeof(*larger));
    if (!larger)
        return yard_fail(err, YARD_ENOMEM, "events: no memory for %u", 2 * want);
    for (uint32_t i = 0; i < q->n; i++)
        larger[i] = q->events[(q->first + i) % q->capacity];
    free(q->events);
    q->events = larger;
    q->capacity = 2 * want;
    q->first = 0;
    return YARD_OK;
}

void yard_events_push(event_queue *q, yard_event event)
{
    q->events[(q->first + q->n++) % q->capacity] = event;
}

uint32_t yard_engine_poll(yard_engine *e, yard_event *events, uint32_t max_events)
{
    event_queue *q = &e->events;
    uint32_t n = 0;

    while (n < max_events && q->n > 0) {
        events[n++] = q->events[q->first];
        q->first = (q->first + 1) % q->capacity;
        q->n--;
    }
    return n;
}

/* ---- submit ------------------------------------------------------------------------------ */

static yard_status check_number(yard_error *err, const char *name, float value, bool ok,
                                const char *want)
{
    if (ok && isfinite(value))
        return YARD_OK;
    return yard_fail(err, YARD_EINVAL, "%s: want %s, got %g", name, want, (double)value);
}

static yard_status check_sampling(const yard_sampling *s, yard_error *err)
{
    const struct {
        const char *name, *want;
        float value;
        bool ok;
    } checks[] = {
        { "temperature", "a number >= 0", s->temperature, s->temperature >= 0 },
        { "top_p", "a number in (0, 1]", s->top_p, s->top_p > 0 && s->top_p <= 1 },
        { "min_p", "a number in [0, 1]", s->min_p, s->min_p >= 0 && s->min_p <= 1 },
        { "top_k", "a whole number >= 0", (float)s->top_k, s->top_k >= 0 },
        { "repetition_penalty", "a number > 0", s->repetition_penalty, s->repetition_penalty > 0 },
        { "presence_penalty", "a finite number", s->presence_penalty, true },
        { "frequency_penalty", "a finite number", s->frequency_penalty, true },
    };

    for (size_t i = 0; i < sizeof(checks) / sizeof(checks[0]); i++)
        if (check_number(err, checks[i].name, checks[i].value, checks[i].ok, checks[i].want))
            return YARD_EINVAL;
    return YARD_OK;
}

static yard_status check_token(const yard_engine *e, const char *what, uint32_t at, int32_t token,
                               yard_error *err)
{
    if (token >= 0 && (uint32_t)token < e->model_config.vocab)
        return YARD_OK;
    return yard_fail(err, YARD_EINVAL, "%s %u: want an id from 0 to %u, got %d", what, at,
                     e->model_config.vocab - 1, token);
}

static yard_status check_request(const yard_engine *e, const yard_request *r, yard_error *err)
{
    if (!r || r->size != sizeof(*r))
        return yard_fail(err, YARD_EINVAL, "request: want YARD_REQUEST_INIT first");
    if (r->n_prompt == 0 || !r->prompt)
        return yard_fail(err, YARD_EINVAL, "prompt: want at least one token, got none");
    if (r->max_new_tokens == 0)
        return yard_fail(err, YARD_EINVAL, "max_new_tokens: want at least 1, got 0");
    if (r->n_prompt >= e->context)
        return yard_fail(err, YARD_EINVAL,
                         "prompt: want at most %u tokens (the %s holds %u), got %u", e->context - 1,
                         yard_engine_bound(e), e->context, r->n_prompt);
    for (uint32_t i = 0; i < r->n_prompt; i++)
        if (check_token(e, "prompt token", i, r->prompt[i], err))
            return YARD_EINVAL;
    for (uint32_t i = 0; i < r->n_bias; i++)
        if (check_token(e, "logit bias", i, r->bias[i].token, err) ||
            check_number(err, "logit bias", r->bias[i].value, true, "a finite number"))
            return YARD_EINVAL;
    for (uint32_t i = 0; i < r->n_stop_token; i++)
        if (check_token(e, "stop token", i, r->stop_token[i], err))
            return YARD_EINVAL;
    if (r->n_choices != 1 || r->n_logprobs > 0 || r->prompt_logprobs)
        return yard_fail(err, YARD_ENOTSUP,
                         "several choices and log-probabilities are not implemented");
    return check_sampling(&r->sampling, err);
}

static yard_sample_params sample_params(const yard_sampling *s)
{
    return (yard_sample_params){ .temperature = s->temperature,
                                 .top_p = s->top_p,
                                 .min_p = s->min_p,
                                 .top_k = s->top_k,
                                 .repetition_penalty = s->repetition_penalty,
                                 .presence_penalty = s->presence_penalty,
                                 .frequency_penalty = s->frequency_penalty,
                                 .seed = s->seed };
}

static yard_status copy_request(const yard_engine *e, const yard_request *r, sequence **out,
                                yard_error *err)
{
    const uint32_t room = e->context - r->n_prompt;
    sequence *seq = calloc(1, sizeof(*seq));

    if (!seq)
        return yard_fail(err, YARD_ENOMEM, "request: %zu bytes", sizeof(*seq));
    seq->n_prompt = r->n_prompt;
    seq->max_new = r->max_new_tokens < room ? r->max_new_tokens : room;
    seq->params = sample_params(&r->sampling);
    seq->n_bias = r->n_bias;
    seq->ignore_eos = r->ignore_eos;
    seq->token = malloc(((size_t)seq->n_prompt + seq->max_new) * sizeof(*seq->token));
    seq->bias_token = malloc((r->n_bias + 1) * sizeof(*seq->bias_token));
    seq->bias_value = malloc((r->n_bias + 1) * sizeof(*seq->bias_value));
    seq->n_stop_token = r->n_stop_token;
    seq->stop_token = malloc((r->n_stop_token + 1) * sizeof(*seq->stop_token));
    if (!seq->token || !seq->bias_token || !seq->bias_value || !seq->stop_token) {
        yard_sequence_free(seq);
        return yard_fail(err, YARD_ENOMEM, "request: %u tokens", r->n_prompt);
    }
    memcpy(seq->token, r->prompt, r->n_prompt * sizeof(*seq->token));
    if (r->n_stop_token > 0)
        memcpy(seq->stop_token, r->stop_token, r->n_stop_token * sizeof(*seq->stop_token));
    for (uint32_t i = 0; i < r->n_bias; i++) {
        seq->bias_token[i] = r->bias[i].token;
        seq->bias_value[i] = r->bias[i].value;
    }
    *out = seq;
    return YARD_OK;
}

yard_status yard_engine_submit(yard_engine *e, const yard_request *request, uint64_t *id)
{
    sequence *seq = NULL;
    yard_status st = check_request(e, request, &e->err);

    if (st == YARD_OK)
        st = yard_events_reserve(&e->events, yard_engine_live(e) + 1, &e->err);
    if (st == YARD_OK)
        st = copy_request(e, request, &seq, &e->err);
    if (st != YARD_OK)
        return st;
    seq->id = e->next_id + 1;
    st = yard_group_command(e, &(command){ .seq = seq });
    if (st == YARD_OK)
        *id = ++e->next_id;
    return st;
}

void yard_engine_enqueue(yard_engine *e, sequence *seq)
{
    if (e->queue_tail)
        e->queue_tail->next = seq;
    else
        e->queue_head = seq;
    e->queue_tail = seq;
    e->n_queued++;
}

/* ---- abort ------------------------------------------------------------------------------- */

void yard_engine_release_slot(yard_engine *e, uint32_t slot)
{
    yard_engine_return_pages(e, slot, e->running[slot]->n_pages);
    yard_sequence_free(e->running[slot]);
    e->running[slot] = NULL;
    e->n_running--;
}

static bool unqueue(yard_engine *e, uint64_t id)
{
    sequence *before = NULL;

    for (sequence *seq = e->queue_head; seq; before = seq, seq = seq->next) {
        if (seq->id != id)
            continue;
        if (before)
            before->next = seq->next;
        else
            e->queue_head = seq->next;
        if (e->queue_tail == seq)
            e->queue_tail = before;
        e->n_queued--;
        yard_sequence_free(seq);
        return true;
    }
    return false;
}

bool yard_engine_end(yard_engine *e, uint64_t id, uint32_t choice)
{
    const bool is_there = choice == 0 || choice == YARD_ALL_CHOICES;
    bool found = is_there && unqueue(e, id);

    for (uint32_t slot = 0; is_there && !found && slot < e->max_seqs; slot++)
        if (e->running[slot] && e->running[slot]->id == id) {
            yard_engine_release_slot(e, slot);
            found = true;
        }
    if (found)
        yard_events_push(&e->events, (yard_event){ .id = id, .finish = YARD_FINISH_ABORTED });
    return found;
}

yard_status yard_engine_abort(yard_engine *e, uint64_t id, uint32_t choice)
{
    const yard_status st = yard_events_reserve(&e->events, yard_engine_live(e) + 1, &e->err);

    if (st != YARD_OK)
        return st;
    if (e->fabric)
        return yard_group_command(e, &(command){ .abort_id = id, .abort_choice = choice });
    if (!yard_engine_end(e, id, choice))
        return yard_fail(&e->err, YARD_EINVAL, "abort: no request %llu is queued or running",
                         (unsigned long long)id);
    return YARD_OK;
}

void yard_engine_drop_all(yard_engine *e)
{
    for (uint32_t slot = 0; e->running && slot < e->max_seqs; slot++)
        if (e->running[slot])
            yard_engine_release_slot(e, slot);
    while (e->queue_head) {
        sequence *seq = e->queue_head;
        e->queue_head = seq->next;
        yard_sequence_free(seq);
    }
    e->queue_tail = NULL;
    e->n_queued = 0;
    e->events.n = 0;
}
