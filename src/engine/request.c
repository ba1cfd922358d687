/* Accepting, ending and reporting requests. */
#include <math.h>
#include <stdlib.h>

#include "engine/engine_impl.h"

void yard_sequence_free(sequence *seq)
{
    while (seq) {
        sequence *next = seq->next;

        free(seq->token);
        free(seq->name);
        free(seq->bias_token);
        free(seq->bias_value);
        free(seq->stop_token);
        free(seq);
        seq = next;
    }
}

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
    if (r->n_choices == 0 || r->n_choices > e->max_seqs)
        return yard_fail(err, YARD_EINVAL, "n_choices: want 1 to %u, got %u", e->max_seqs,
                         r->n_choices);
    if (r->n_logprobs > YARD_MAX_LOGPROBS || (r->prompt_logprobs && r->n_logprobs == 0))
        return yard_fail(err, YARD_EINVAL, "n_logprobs: want %s to %d, got %u",
                         r->prompt_logprobs ? "1 (for prompt_logprobs)" : "0", YARD_MAX_LOGPROBS,
                         r->n_logprobs);
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

/* Choice 0 is the answer alone; the others draw other numbers, each its own. */
static uint64_t seed_of(uint64_t seed, uint32_t choice)
{
    uint64_t x = seed + choice * 0x9e3779b97f4a7c15u;

    if (choice == 0)
        return seed;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static bool allocate(sequence *seq)
{
    const size_t n_tokens = (size_t)seq->n_prompt + seq->max_new;

    seq->token = malloc(n_tokens * sizeof(*seq->token));
    seq->name = malloc((n_tokens / YARD_PAGE_TOKENS + 1) * sizeof(*seq->name));
    seq->bias_token = malloc((seq->n_bias + 1) * sizeof(*seq->bias_token));
    seq->bias_value = malloc((seq->n_bias + 1) * sizeof(*seq->bias_value));
    seq->stop_token = malloc((seq->n_stop_token + 1) * sizeof(*seq->stop_token));
    return seq->token && seq->name && seq->bias_token && seq->bias_value && seq->stop_token;
}

static void fill(const yard_engine *e, sequence *seq, const yard_request *r)
{
    memcpy(seq->token, r->prompt, r->n_prompt * sizeof(*seq->token));
    if (r->n_stop_token > 0)
        memcpy(seq->stop_token, r->stop_token, r->n_stop_token * sizeof(*seq->stop_token));
    for (uint32_t i = 0; i < r->n_bias; i++) {
        seq->bias_token[i] = r->bias[i].token;
        seq->bias_value[i] = r->bias[i].value;
    }
    if (e->cache != YARD_CACHE_OFF)
        yard_cache_name(e, seq, r->n_prompt / YARD_PAGE_TOKENS);
}

static yard_status copy_choice(const yard_engine *e, const yard_request *r, uint32_t choice,
                               sequence **out, yard_error *err)
{
    const uint32_t room = e->context - r->n_prompt;
    sequence *seq = calloc(1, sizeof(*seq));

    if (!seq)
        return yard_fail(err, YARD_ENOMEM, "request: %zu bytes", sizeof(*seq));
    seq->choice = choice;
    seq->n_prompt = r->n_prompt;
    seq->max_new = r->max_new_tokens < room ? r->max_new_tokens : room;
    seq->params = sample_params(&r->sampling);
    seq->params.seed = seed_of(r->sampling.seed, choice);
    seq->n_bias = r->n_bias;
    seq->n_stop_token = r->n_stop_token;
    seq->ignore_eos = r->ignore_eos;
    seq->n_logprobs = r->n_logprobs;
    seq->n_prompt_to_tell = r->prompt_logprobs && choice == 0 ? r->n_prompt : 0;
    if (!allocate(seq)) {
        yard_sequence_free(seq);
        return yard_fail(err, YARD_ENOMEM, "request: %u tokens", r->n_prompt);
    }
    fill(e, seq, r);
    *out = seq;
    return YARD_OK;
}

static yard_status copy_request(yard_engine *e, const yard_request *r, sequence **out,
                                yard_error *err)
{
    sequence *first = NULL, **at = &first;
    yard_status st = r->n_logprobs > 0 ? yard_logprobs_reserve(e, err) : YARD_OK;

    for (uint32_t i = 0; i < r->n_choices && st == YARD_OK; i++, at = &(*at)->next)
        st = copy_choice(e, r, i, at, err);
    if (st != YARD_OK) {
        yard_sequence_free(first);
        return st;
    }
    for (sequence *seq = first; seq; seq = seq->next) {
        seq->id = e->next_id + 1;
        seq->order = e->n_arrived++;
    }
    *out = first;
    return YARD_OK;
}

/* A token and an end for each that lives, and an end for what is aborted before it was taken. */
static yard_status reserve_events(yard_engine *e, uint32_t n_more)
{
    return yard_events_reserve(&e->events, 2 * (yard_engine_live(e) + n_more + 1), &e->err);
}

yard_status yard_engine_submit(yard_engine *e, const yard_request *request, uint64_t *id)
{
    command c = { 0 };
    yard_status st = check_request(e, request, &e->err);

    if (st == YARD_OK)
        st = reserve_events(e, request->n_choices);
    if (st == YARD_OK)
        st = copy_request(e, request, &c.seqs, &e->err);
    if (st != YARD_OK)
        return st;
    c.n_seqs = request->n_choices;
    st = yard_group_command(e, &c);
    if (st == YARD_OK)
        *id = ++e->next_id;
    return st;
}

static bool is_meant(const sequence *seq, uint64_t id, uint32_t choice)
{
    return seq->id == id && (choice == YARD_ALL_CHOICES || seq->choice == choice);
}

static bool end_queued(yard_engine *e, uint64_t id, uint32_t choice)
{
    sequence *before = NULL, *next;
    bool found = false;

    for (sequence *seq = e->queue_head; seq; seq = next) {
        next = seq->next;
        if (!is_meant(seq, id, choice)) {
            before = seq;
            continue;
        }
        found = true;
        yard_engine_dequeue(e, before, seq);
        yard_events_push(&e->events, yard_event_of(seq, YARD_FINISH_ABORTED));
        yard_sequence_free(seq);
    }
    return found;
}

bool yard_engine_end(yard_engine *e, uint64_t id, uint32_t choice)
{
    bool found = end_queued(e, id, choice);

    for (uint32_t slot = 0; slot < e->max_seqs; slot++)
        if (e->running[slot] && is_meant(e->running[slot], id, choice)) {
            yard_events_push(&e->events, yard_event_of(e->running[slot], YARD_FINISH_ABORTED));
            yard_engine_release_slot(e, slot);
            found = true;
        }
    return found;
}

yard_status yard_engine_abort(yard_engine *e, uint64_t id, uint32_t choice)
{
    const yard_status st = reserve_events(e, 0);

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
    yard_sequence_free(e->queue_head);
    e->queue_head = e->queue_tail = NULL;
    e->n_queued = 0;
    e->events.n = 0;
}
