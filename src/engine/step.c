/* One step: admit, gather rows, run the model, sample, report. */
#include <stdlib.h>

#include "engine/engine_impl.h"

void yard_engine_add_rows(yard_engine *e, uint32_t slot, const int32_t *token, uint32_t from,
                          uint32_t n_rows, uint32_t n_prompt)
{
    yard_step *step = yard_model_step(e->model);

    for (uint32_t i = 0; i < n_rows; i++) {
        const int32_t row = step->n_tokens++;

        step->token[row] = token[from + i];
        step->position[row] = (int32_t)(from + i);
        step->seq[row] = (int32_t)slot;
        /* Generated tokens use matrix absorption, also if they are ever computed again. */
        step->absorbed[row] = from + i >= n_prompt;
    }
}

static void add_sequence(yard_engine *e, uint32_t slot, uint32_t max_rows)
{
    sequence *seq = e->running[slot];
    const uint32_t left = sequence_length(seq) - seq->n_cached;

    seq->n_rows = left < max_rows ? left : max_rows;
    seq->first_row = (uint32_t)yard_model_step(e->model)->n_tokens;
    yard_engine_add_rows(e, slot, seq->token, seq->n_cached, seq->n_rows, seq->n_prompt);
    if (seq->n_cached < seq->n_prompt)
        e->n_prompt_tokens += seq->n_rows;
    seq->n_cached += seq->n_rows;
    if (seq->n_rows == left) {
        e->logit_slot[e->n_logit_rows] = slot;
        e->logit_row[e->n_logit_rows++] = yard_model_step(e->model)->n_tokens - 1;
    }
}

/* Running slots, the oldest first. */
static uint32_t order_slots(yard_engine *e)
{
    uint32_t n = 0;

    for (uint32_t slot = 0; slot < e->max_seqs; slot++) {
        uint32_t at = n;

        if (!e->running[slot])
            continue;
        e->running[slot]->n_rows = 0;
        for (; at > 0 && e->running[e->order[at - 1]]->order > e->running[slot]->order; at--)
            e->order[at] = e->order[at - 1];
        e->order[at] = slot;
        n++;
    }
    return n;
}

/* Decodes first, one row each, as far as there are pages: the oldest take those of the youngest.
 * What room is left goes to prompts, the oldest first, as far as the group's budget allows. */
static void gather_rows(yard_engine *e, uint32_t prefill_tokens)
{
    yard_step *step = yard_model_step(e->model);
    const uint32_t n = order_slots(e);
    uint32_t end;

    step->n_tokens = 0;
    e->n_logit_rows = 0;
    for (uint32_t i = 0; i < n; i++) {
        const sequence *seq = e->running[e->order[i]]; /* NULL: it was preempted */

        if (seq && sequence_decodes(seq) && yard_engine_grow(e, e->order[i]))
            add_sequence(e, e->order[i], 1);
    }
    end = (uint32_t)step->n_tokens;
    end = prefill_tokens < e->max_tokens - end ? end + prefill_tokens : e->max_tokens;
    for (uint32_t i = 0; i < n && (uint32_t)step->n_tokens < end; i++) {
        const sequence *seq = e->running[e->order[i]];

        if (seq && seq->n_rows == 0 && seq->n_cached < sequence_length(seq))
            add_sequence(e, e->order[i], end - (uint32_t)step->n_tokens);
    }
}

static yard_sample_row sample_row(const sequence *seq)
{
    return (yard_sample_row){ .params = seq->params,
                              .position = sequence_length(seq),
                              .prompt = seq->token,
                              .output = seq->token + seq->n_prompt,
                              .n_prompt = seq->n_prompt,
                              .n_output = seq->n_output,
                              .bias_token = seq->bias_token,
                              .bias_value = seq->bias_value,
                              .n_bias = seq->n_bias };
}

static yard_status keep_logits(yard_engine *e, uint32_t row)
{
    const size_t vocab = e->model_config.vocab;
    const float *logits = NULL;
    const yard_status st = yard_model_read_logits(e->model, row, 1, &logits, &e->err);

    if (st == YARD_OK)
        memcpy(e->kept_logits + row * vocab, logits, vocab * sizeof(*logits));
    return st;
}

static yard_status sample(yard_engine *e)
{
    const uint32_t n = e->n_logit_rows;
    yard_status st = yard_model_logits(e->model, e->logit_row, n, &e->err);

    for (uint32_t i = 0; i < n && st == YARD_OK; i++) {
        const sequence *seq = e->running[e->logit_slot[i]];

        e->sample_rows[i] = sample_row(seq);
        if (seq->n_logprobs > 0)
            st = keep_logits(e, i);
    }
    if (st != YARD_OK)
        return st;
    return yard_model_sample(e->model, e->sample_rows, n, e->sampled, e->finite, &e->err);
}

static bool contains(const int32_t *ids, uint32_t n, int32_t id)
{
    for (uint32_t i = 0; i < n; i++)
        if (ids[i] == id)
            return true;
    return false;
}

static bool ends(const yard_model_config *c, const sequence *seq, int32_t token)
{
    return (!seq->ignore_eos && contains(c->eos, c->n_eos, token)) ||
           contains(seq->stop_token, seq->n_stop_token, token);
}

static void report_failure(yard_engine *e, uint32_t slot)
{
    sequence *seq = e->running[slot];

    yard_fail(&e->err, YARD_EFORMAT,
              "request %llu: logits after token %u are not finite numbers: the model's weights "
              "overflow",
              (unsigned long long)seq->id, sequence_length(seq) - 1);
    yard_events_push(&e->events, yard_event_of(seq, YARD_FINISH_ERROR));
    yard_engine_release_slot(e, slot);
}

static void report(yard_engine *e, uint32_t slot, uint32_t row)
{
    sequence *seq = e->running[slot];
    const int32_t token = e->sampled[row];
    yard_event event = yard_event_of(seq, YARD_RUNNING);

    event.n_tokens = 1;
    event.token = token;
    seq->token[sequence_length(seq)] = token;
    seq->n_output++;
    e->n_output_tokens++;
    if (ends(&e->model_config, seq, token))
        event.finish = YARD_FINISH_STOP;
    else if (seq->n_output == seq->max_new)
        event.finish = YARD_FINISH_LENGTH;
    if (seq->n_logprobs > 0)
        yard_logprobs_add(e, &event, seq->n_logprobs,
                          e->kept_logits + (size_t)row * e->model_config.vocab);
    yard_events_push(&e->events, event);
    if (event.finish != YARD_RUNNING)
        yard_engine_release_slot(e, slot);
}

/* Prompt tokens with log-probabilities; where the logits are no numbers, the request fails. */
static yard_status tell_prompts(yard_engine *e)
{
    for (uint32_t slot = 0; slot < e->max_seqs; slot++) {
        const sequence *seq = e->running[slot];
        bool finite = true;
        yard_status st = YARD_OK;

        if (seq && seq->n_prompt_to_tell > 0)
            st = yard_logprobs_tell_prompt(e, slot, &finite);
        if (st != YARD_OK)
            return st;
        if (finite)
            continue;
        for (uint32_t i = 0; i < e->n_logit_rows; i++)
            if (e->logit_slot[i] == slot) {
                e->logit_slot[i] = e->logit_slot[--e->n_logit_rows];
                e->logit_row[i] = e->logit_row[e->n_logit_rows];
            }
        report_failure(e, slot);
    }
    return YARD_OK;
}

/* Of the step that ran. */
static yard_status take_results(yard_engine *e)
{
    yard_status st;

    for (uint32_t slot = 0; slot < e->max_seqs; slot++)
        if (e->running[slot])
            yard_cache_show(e, slot);
    st = tell_prompts(e);
    if (st == YARD_OK && e->n_logit_rows > 0)
        st = sample(e);
    if (st != YARD_OK)
        return st;
    for (uint32_t i = 0; i < e->n_logit_rows; i++)
        if (e->finite[i])
            report(e, e->logit_slot[i], i);
        else
            report_failure(e, e->logit_slot[i]);
    e->n_steps++;
    yard_engine_check_accounts(e);
    return YARD_OK;
}

static const yard_schedule *const schedules[] = {
    [YARD_STEP_NONE] = &yard_schedule_none,
    [YARD_STEP_DISPATCH_OVERLAP] = &yard_schedule_dispatch_overlap,
    [YARD_STEP_MICRO_BATCH] = &yard_schedule_micro_batch,
};

yard_status yard_engine_step(yard_engine *e)
{
    /* A token and an end each; with them, what a step computes of prompts. */
    const uint32_t n_events = 2 * (yard_engine_live(e) + 1) + (e->logprobs ? e->max_tokens : 0);
    yard_status st = yard_events_reserve(&e->events, n_events, &e->err);
    yard_step_plan plan;

    if (st == YARD_OK)
        st = yard_group_plan(e, &plan);
    if (st != YARD_OK || !plan.runs)
        return st;
    yard_events_forget_logprobs(e);
    yard_group_take_commands(e, plan.n_commands);
    yard_engine_admit(e);
    gather_rows(e, plan.prefill_tokens);
    yard_model_step(e->model)->max_rows =
        plan.max_rows < e->max_tokens ? (uint32_t)plan.max_rows : e->max_tokens;
    e->n_empty_steps += yard_model_step(e->model)->n_tokens == 0;
    st = yard_group_post(e);
    if (e->slept)
        e->woken_at_us = yard_now_us();
    e->slept = false;
    if (st == YARD_OK)
        st = yard_model_forward(e->model, schedules[plan.schedule], &e->err);
    if (st == YARD_OK)
        st = take_results(e);
    return st == YARD_OK ? YARD_OK : yard_group_break(e, st);
}
