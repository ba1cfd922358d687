/* Log-probabilities of tokens, of the model's own distribution: before bias, penalties and
 * temperature. */
#include <math.h>
#include <stdlib.h>

#include "engine/engine_impl.h"

/* A step has at most max_tokens rows with logits, and the first token of each prompt beside. */
yard_status yard_logprobs_reserve(yard_engine *e, yard_error *err)
{
    const size_t n = ((size_t)e->max_tokens + e->max_seqs) * YARD_MAX_LOGPROBS;
    const size_t n_logits = (size_t)e->max_seqs * e->model_config.vocab;

    if (!e->logprobs)
        e->logprobs = malloc(n * sizeof(*e->logprobs));
    if (!e->kept_logits)
        e->kept_logits = malloc(n_logits * sizeof(*e->kept_logits));
    if (!e->logprobs || !e->kept_logits)
        return yard_fail(err, YARD_ENOMEM, "log-probabilities: no memory for %zu logits", n_logits);
    return YARD_OK;
}

/* log(sum(exp(logits))) */
static float log_sum(const float *logits, uint32_t n)
{
    float max = logits[0];
    double sum = 0;

    for (uint32_t i = 1; i < n; i++)
        max = logits[i] > max ? logits[i] : max;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)expf(logits[i] - max);
    return max + (float)log(sum);
}

/* The likeliest n tokens, the lower id first among equals; out[i].logprob is a logit. */
static void find_likeliest(const float *logits, uint32_t n_vocab, yard_token_logprob *out,
                           uint32_t n)
{
    uint32_t n_out = 0;

    for (uint32_t i = 0; i < n_vocab; i++) {
        uint32_t at;

        if (n_out == n && !(n > 0 && logits[i] > out[n - 1].logprob))
            continue;
        n_out += n_out < n;
        for (at = n_out - 1; at > 0 && logits[i] > out[at - 1].logprob; at--)
            out[at] = out[at - 1];
        out[at] = (yard_token_logprob){ (int32_t)i, logits[i] };
    }
}

void yard_logprobs_add(yard_engine *e, yard_event *event, uint32_t n_logprobs, const float *logits)
{
    yard_token_logprob *out = e->logprobs + e->n_logprobs;
    const uint32_t vocab = e->model_config.vocab;
    const uint32_t n_likeliest = n_logprobs - 1 < vocab ? n_logprobs - 1 : vocab;

    out[0] = (yard_token_logprob){ event->token, NAN };
    event->logprob = out;
    event->n_logprobs = 1;
    if (logits) {
        const float total = log_sum(logits, vocab);

        find_likeliest(logits, vocab, out + 1, n_likeliest);
        out[0].logprob = logits[event->token];
        event->n_logprobs += n_likeliest;
        for (uint32_t i = 0; i < event->n_logprobs; i++)
            out[i].logprob -= total;
    }
    e->n_logprobs += event->n_logprobs;
}

static void tell_token(yard_engine *e, sequence *seq, const float *logits)
{
    yard_event event = yard_event_of(seq, YARD_RUNNING);

    event.n_tokens = 1;
    event.of_prompt = true;
    event.token = seq->token[seq->n_prompt_told++];
    yard_logprobs_add(e, &event, seq->n_logprobs, logits);
    yard_events_push(&e->events, event);
}

yard_status yard_logprobs_tell_prompt(yard_engine *e, uint32_t slot, bool *finite)
{
    sequence *seq = e->running[slot];
    const uint32_t vocab = e->model_config.vocab, from = seq->n_cached - seq->n_rows;

    *finite = true;
    if (seq->n_rows == 0)
        return YARD_OK;
    if (seq->n_prompt_told == 0)
        tell_token(e, seq, NULL);
    /* Position p says what token p + 1 is worth. */
    while (seq->n_prompt_told < seq->n_prompt_to_tell && seq->n_prompt_told <= seq->n_cached) {
        const uint32_t first = seq->n_prompt_told - 1;
        uint32_t n = seq->n_cached - first;
        const float *logits = NULL;
        yard_status st;

        n = n < seq->n_prompt_to_tell - seq->n_prompt_told
                ? n
                : seq->n_prompt_to_tell - seq->n_prompt_told;
        n = n < e->max_seqs ? n : e->max_seqs;
        for (uint32_t i = 0; i < n; i++)
            e->sampled[i] = (int32_t)(seq->first_row + first - from + i);
        st = yard_model_logits(e->model, e->sampled, n, &e->err);
        if (st == YARD_OK)
            st = yard_model_read_logits(e->model, 0, n, &logits, &e->err);
        if (st != YARD_OK)
            return st;
        for (uint32_t i = 0; i < n; i++) {
            *finite = yard_all_finite(logits + (size_t)i * vocab, vocab);
            if (!*finite)
                return YARD_OK;
            tell_token(e, seq, logits + (size_t)i * vocab);
        }
    }
    return YARD_OK;
}
