/* The engine as one rank of a group: what it says in its records, and when what it was asked for
 * takes effect. A process alone derives the same plan from its own record. */
#include <stdlib.h>

#include "engine/engine_impl.h"

static void free_commands(yard_engine *e)
{
    while (e->command_head) {
        command *c = e->command_head;
        e->command_head = c->next;
        yard_sequence_free(c->seqs);
        free(c->import.data);
        free(c);
    }
    e->command_tail = NULL;
    e->n_commands = e->n_taken = e->n_pending = 0;
}

static void enqueue_all(yard_engine *e, sequence *seq)
{
    while (seq) {
        sequence *next = seq->next;

        yard_engine_enqueue(e, seq);
        seq = next;
    }
}

yard_status yard_group_command(yard_engine *e, const command *what)
{
    command *c;

    if (!e->fabric) {
        enqueue_all(e, what->seqs);
        return YARD_OK;
    }
    c = malloc(sizeof(*c));
    if (!c) {
        yard_sequence_free(what->seqs);
        free(what->import.data);
        return yard_fail(&e->err, YARD_ENOMEM, "request: %zu bytes", sizeof(*c));
    }
    *c = *what;
    if (e->command_tail)
        e->command_tail->next = c;
    else
        e->command_head = c;
    e->command_tail = c;
    e->n_commands++;
    e->n_pending += c->n_seqs;
    return YARD_OK;
}

void yard_group_take_commands(yard_engine *e, uint64_t n_commands)
{
    for (; e->n_taken < n_commands; e->n_taken++) {
        command *c = e->command_head;

        e->command_head = c->next;
        if (!e->command_head)
            e->command_tail = NULL;
        e->n_pending -= c->n_seqs;
        if (c->import.data)
            yard_cache_place(e, &c->import);
        else if (c->seqs)
            enqueue_all(e, c->seqs);
        else
            (void)yard_engine_end(e, c->abort_id,
                                  c->abort_choice); /* it may have ended by itself */
        free(c->import.data);
        free(c);
    }
}

/* Of those that wait, requests that gave way: what they have said is not computed again where the
 * cache still has it. */
static uint32_t count_resumed(const yard_engine *e)
{
    uint32_t n = 0;

    for (const sequence *seq = e->queue_head; seq && n < e->max_seqs; seq = seq->next)
        n += seq->n_output > 0;
    return n;
}

/* Of the step after the one whose rows are gathered, if there is one: what it may compute at most,
 * for nobody knows yet which sequences end. Those that reach their length do. */
static yard_step_record record_of(const yard_engine *e)
{
    yard_step_record r = { .n_commands = e->n_commands };
    uint64_t prefill = yard_engine_admissible(e);

    for (uint32_t slot = 0; slot < e->max_seqs; slot++) {
        const sequence *seq = e->running[slot];

        if (!seq)
            continue;
        if (sequence_decodes(seq) ||
            (seq->n_cached == sequence_length(seq) && seq->n_output + 1 < seq->max_new))
            r.n_tokens++;
        else
            prefill += sequence_length(seq) - seq->n_cached;
    }
    r.n_resumed = count_resumed(e);
    r.prefill_tokens = prefill < e->max_tokens ? (uint32_t)prefill : e->max_tokens;
    r.finished = e->finished;
    r.has_work = r.n_tokens > 0 || prefill > 0 || e->n_queued > 0 || e->command_head;
    return r;
}

yard_status yard_group_plan(yard_engine *e, yard_step_plan *plan)
{
    const yard_step_record mine = record_of(e);
    yard_status st = e->broken; /* its message is still there */
    uint64_t begun_us, timeout_us;

    if (st != YARD_OK)
        return st;
    if (!e->fabric) {
        yard_step_plan_of(&e->group, &mine, 0, plan);
        return YARD_OK;
    }
    *plan = (yard_step_plan){ 0 };
    if (e->ended)
        return YARD_OK;
    st = yard_records_post(&e->records, &mine, &e->err);
    if (st != YARD_OK)
        return yard_group_break(e, st);
    if (yard_records_asleep(&e->records))
        return YARD_OK;
    begun_us = yard_now_us();
    timeout_us = e->records.agree.step == 0 ? e->start_timeout_us : e->timeout_us;
    st = yard_records_plan(&e->records, yard_fabric_deadline(e->fabric, timeout_us), plan, &e->err);
    e->agree_us += yard_now_us() - begun_us;
    e->slept = e->slept || (st == YARD_OK && !plan->runs);
    e->ended = st == YARD_OK && plan->ends;
    return st == YARD_OK ? YARD_OK : yard_group_break(e, st);
}

yard_status yard_group_post(yard_engine *e)
{
    const yard_step_record mine = record_of(e);

    return e->fabric ? yard_records_post(&e->records, &mine, &e->err) : YARD_OK;
}

yard_status yard_group_break(yard_engine *e, yard_status st)
{
    e->broken = st;
    return st;
}

static bool is_called(void *ctx)
{
    yard_engine *e = ctx;

    return atomic_load(&e->woken) || record_of(e).has_work ||
           (e->finished && !e->records.told_finished);
}

yard_status yard_engine_wait(yard_engine *e, uint64_t timeout_us)
{
    yard_status st = e->broken;

    if (st == YARD_OK && e->fabric && !e->ended && yard_records_asleep(&e->records))
        st = yard_records_sleep(&e->records, is_called, e,
                                yard_fabric_deadline(e->fabric, timeout_us), &e->err);
    atomic_store(&e->woken, false);
    return st == YARD_OK ? YARD_OK : yard_group_break(e, st);
}

void yard_engine_finish(yard_engine *e)
{
    e->finished = true;
}

bool yard_engine_ended(const yard_engine *e)
{
    return e->ended;
}

void yard_engine_wake(yard_engine *e)
{
    atomic_store(&e->woken, true);
    if (e->fabric)
        yard_fabric_interrupt(e->fabric);
}

yard_status yard_group_open(yard_engine *e, const yard_engine_config *c, yard_error *err)
{
    const uint32_t n_ranks = c->fabric ? yard_fabric_size(c->fabric) : 1, tp = c->tp ? c->tp : 1;

    e->fabric = c->fabric;
    e->timeout_us = c->timeout_us;
    e->start_timeout_us = c->start_timeout_us ? c->start_timeout_us : c->timeout_us;
    e->group =
        (yard_agree_config){ .n_ranks = n_ranks, .tp = tp, .prefill_budget = c->prefill_budget };
    if (e->group.prefill_budget == 0)
        e->group.prefill_budget = e->max_tokens / 8 > 64 ? e->max_tokens / 8 : 64;
    return e->fabric ? yard_records_open(&e->records, &e->group, e->fabric, 0, 1, err) : YARD_OK;
}

void yard_group_close(yard_engine *e)
{
    free_commands(e);
    yard_records_close(&e->records);
}

yard_status yard_engine_rejoin(yard_engine *e, yard_fabric *fabric, yard_error *err)
{
    const uint32_t generation = e->records.generation + 1;
    yard_status st;

    yard_engine_drop_all(e);
    yard_group_close(e);
    e->finished = e->ended = false;
    e->fabric = fabric;
    st = yard_model_rejoin(e->model, fabric, &e->err);
    if (st == YARD_OK)
        st = yard_records_open(&e->records, &e->group, fabric, 0, generation, &e->err);
    yard_cache_forget(e);
    e->records.generation = generation; /* also for the next attempt */
    e->broken = st;
    if (st != YARD_OK && err)
        *err = e->err;
    return st;
}
