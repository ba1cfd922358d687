/* One step: admit, gather rows, run the model, sample, report. */
#include <stdlib.h>

#include "engine/engine_impl.h"

/* First come, first served: a request that does not fit keeps the later ones waiting. It gets pages
 * for all the tokens it may ever have, so a running request never runs out. */
static void admit(yard_engine *e)
{
    for (uint32_t slot = 0; slot < e->max_seqs && e->queue_head; slot++) {
        sequence *seq = e->queue_head;

        if (e->running[slot])
            continue;
        if (!yard_engine_take_pages(e, slot, seq->n_prompt + seq->max_new, &seq->n_pages))
            return;
        e->queue_head = seq->next;
        if (!e->queue_head)
            e->queue_tail = NULL;
        seq->next = NULL;
        e->n_queued--;
        e->running[slot] = seq;
        e->started[slot] = e->n_started++;
        e->n_running++;
    }
}

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
    const uint32_t n_rows = left < max_rows ? left : max_rows;

    yard_engine_add_rows(e, slot, seq->token, seq->n_cached, n_rows, seq->n_prompt);
    if (seq->n_cached < seq->n_prompt)
        e->n_prompt_tokens += n_rows;
    seq->n_cached += n_rows;
    if (n_rows == left) {
        e->logit_slot[e->n_logit_rows] = slot;
        e->logit_row[e->n_logit_rows++] = yard_model_step(e->model)->n_tokens - 1;
    }
}

/* Running slots, oldest first. */
static uint32_t order_slots(yard_engine *e)
{
    uint32_t n = 0;

    for (uint32_t slot = 0; slot < e->max_seqs; slot++) {
        uint32_t at = n;

        if (!e->running[slot])
            continue;
        for (; at > 0 && e->started[e->order[at - 1]] > e->started[slot]; at--)
            e->order[at] = e->order[at - 1];
        e->order[at] = slot;
        n++;
    }
    return n;
}

/* Decodes first, one row each; what room is left goes to prompts, oldest first, as far as the
 * group's budget allows. */
static void gather_rows(yard_engine *e, uint32_t prefill_tokens)
{
    yard_step *step = yard_model_step(e->model);
    const uint32_t n = order_slots(e);
    uint32_t end;

    step->n_tokens = 0;
    e->n_logit_rows = 0;
    for (uint32_t i = 0; i < n; i++)
        if (e->running[e->order[i]]->n_cached >= e->running[e->order[i]]->n_prompt)
            add_sequence(e, e->order[i], 1);
    end = (uint32_t)step->n_tokens;
    end = prefill_tokens < e->max_tokens - end ? end + prefill_tokens : e->max_tokens;
    for (uint32_t i = 0; i < n && (uint32_t)step->n_tokens < end; i++)
        if (e->running[e->order[i]]->n_cached < e->running[e->order[i]]->n_prompt)
            add_sequence(e, e->order[i], end - (uint32_t)step->n_tokens);
}

bool yard_logits_are_finite(const float *logits, uint32_t n)
{
    float sum = 0.0f;

    for (uint32_t i = 0; i < n; i++)
        sum += logits[i] * 0.0f; /* a NaN if any is not finite */
    return sum == 0.0f;
}

static void mark_failed(yard_engine *e, const float *logits, bool *failed)
{
    const uint32_t vocab = e->model_config.vocab;

    for (uint32_t i = 0; i < e->n_logit_rows; i++)
        failed[i] = !yard_logits_are_finite(logits + (size_t)i * vocab, vocab);
}

static void sample(yard_engine *e)
{
    const float *logits;

    for (uint32_t i = 0; i < e->n_logit_rows; i++) {
        const sequence *seq = e->running[e->logit_slot[i]];

        e->sample_rows[i] = (yard_sample_row){ .params = seq->params,
                                               .position = sequence_length(seq),
                                               .prompt = seq->token,
                                               .output = seq->token + seq->n_prompt,
                                               .n_prompt = seq->n_prompt,
                                               .n_output = seq->n_output,
                                               .bias_token = seq->bias_token,
                                               .bias_value = seq->bias_value,
                                               .n_bias = seq->n_bias };
    }
    logits = yard_model_logits(e->model, e->logit_row, e->n_logit_rows);
    mark_failed(e, logits, e->failed);
    yard_model_sample(e->model, e->sample_rows, e->n_logit_rows, e->sampled);
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
    const sequence *seq = e->running[slot];

    yard_fail(&e->err, YARD_EFORMAT,
              "request %llu: logits after token %u are not finite numbers: the model's weights "
              "overflow",
              (unsigned long long)seq->id, sequence_length(seq) - 1);
    yard_events_push(&e->events, (yard_event){ .id = seq->id, .finish = YARD_FINISH_ERROR });
    yard_engine_release_slot(e, slot);
}

static void report(yard_engine *e, uint32_t slot, int32_t token)
{
    sequence *seq = e->running[slot];
    yard_event event = { .id = seq->id, .n_tokens = 1, .token = token };

    seq->token[sequence_length(seq)] = token;
    seq->n_output++;
    e->n_output_tokens++;
    if (ends(&e->model_config, seq, token))
        event.finish = YARD_FINISH_STOP;
    else if (seq->n_output == seq->max_new)
        event.finish = YARD_FINISH_LENGTH;
    yard_events_push(&e->events, event);
    if (event.finish != YARD_RUNNING)
        yard_engine_release_slot(e, slot);
}

static const yard_schedule *const schedules[] = {
    [YARD_STEP_NONE] = &yard_schedule_none,
    [YARD_STEP_DISPATCH_OVERLAP] = &yard_schedule_dispatch_overlap,
    [YARD_STEP_MICRO_BATCH] = &yard_schedule_micro_batch,
};

yard_status yard_engine_step(yard_engine *e)
{
    yard_status st = yard_events_reserve(&e->events, yard_engine_live(e), &e->err);
    yard_step_plan plan;

    if (st == YARD_OK)
        st = yard_group_plan(e, &plan);
    if (st != YARD_OK || !plan.runs)
        return st;
    yard_group_take_commands(e, plan.n_commands);
    admit(e);
    gather_rows(e, plan.prefill_tokens);
    e->n_empty_steps += yard_model_step(e->model)->n_tokens == 0;
    st = yard_group_post(e);
    if (e->slept)
        e->woken_at_us = yard_now_us();
    e->slept = false;
    if (st == YARD_OK)
        st = yard_model_forward(e->model, schedules[plan.schedule], &e->err);
    if (st != YARD_OK)
        return yard_group_break(e, st);
    if (e->n_logit_rows > 0)
        sample(e);
    for (uint32_t i = 0; i < e->n_logit_rows; i++)
        if (e->failed[i])
            report_failure(e, e->logit_slot[i]);
        else
            report(e, e->logit_slot[i], e->sampled[i]);
    e->n_steps++;
    return YARD_OK;
}
