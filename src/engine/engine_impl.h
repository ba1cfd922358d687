/* Private to the engine room. */
#ifndef YARD_ENGINE_IMPL_H
#define YARD_ENGINE_IMPL_H

#include <assert.h>
#include <stdatomic.h>

#include "engine/engine.h"
#include "engine/page_pool.h"
#include "engine/records.h"

/* One choice of a request. Its tokens are the prompt, then the output; the first n_cached of them
 * are in the KV cache. */
typedef struct sequence {
    struct sequence *next; /* in the queue, and in a command */
    uint64_t id;
    uint32_t choice;
    uint64_t order; /* of arrival: who is older comes first */
    int32_t *token; /* [n_prompt + max_new] */
    uint32_t n_prompt, n_output, max_new;
    uint32_t n_cached;
    uint32_t n_pages;           /* held while running, listed in its page table row */
    uint32_t first_row, n_rows; /* of the step in the making */

    yard_page_hash
        *name; /* [(n_prompt + max_new) / 64] of its full pages, so far as they are known */
    uint32_t n_names;
    uint32_t n_shown;         /* of its pages, the first ones: they have been given to the cache */
    bool builds_on_generated; /* a page that it took from the cache was marked so */
    uint32_t n_found;         /* prompt tokens that it did not compute when it first started */
    bool started, told;       /* ran once; had an event */

    yard_sample_params params;
    int32_t *bias_token; /* [n_bias] */
    float *bias_value;
    uint32_t n_bias;
    bool ignore_eos;
    int32_t *stop_token; /* [n_stop_token] */
    uint32_t n_stop_token;
    uint32_t n_logprobs;
    uint32_t n_prompt_told, n_prompt_to_tell; /* prompt tokens with log-probabilities */
} sequence;

/* A page on its way into the cache. */
typedef struct yard_page_import {
    yard_page_hash name;
    bool generated;
    void *data; /* NULL: none */
} yard_page_import;

/* What was asked for since the last step, in the instance's order: a request, its end, or a page.
 */
typedef struct command {
    struct command *next;
    yard_page_import import;
    sequence *seqs; /* [n_seqs] its choices, a list; NULL: abort_id ends */
    uint32_t n_seqs;
    uint64_t abort_id;
    uint32_t abort_choice;
} command;

/* A growing ring of events. */
typedef struct event_queue {
    yard_event *events;
    uint32_t capacity, first, n;
} event_queue;

struct yard_engine {
    yard_model_config model_config;
    yard_model *model;
    uint32_t max_seqs, max_tokens, max_logits;
    uint32_t context; /* tokens a request may have: the model's positions, or the cache */
    uint32_t max_pages_per_seq;

    sequence **running;                /* [max_seqs] slot = page table row; NULL: free */
    sequence *queue_head, *queue_tail; /* the oldest first */
    uint32_t n_queued, n_running;
    uint64_t next_id;
    uint64_t n_arrived; /* sequences */

    uint32_t n_pages;
    yard_page_pool pool;
    yard_prefix_cache cache;
    yard_page_hash page_root;
    yard_page_events page_events;
    bool page_events_lost; /* what is held is to be said anew */

    /* the step in the making: slots whose last row gets logits, and that row */
    uint32_t *logit_slot; /* [max_seqs] */
    int32_t *logit_row;   /* [max_seqs] */
    uint32_t n_logit_rows;
    yard_sample_row *sample_rows; /* [max_seqs] */
    int32_t *sampled;             /* [max_seqs] */
    uint8_t *finite;              /* [max_seqs] 0: rows whose logits are not all finite numbers */
    uint32_t *order;              /* [max_seqs] running slots, the oldest first */

    /* several ranks (group.c) */
    yard_fabric *fabric; /* NULL: this process alone */
    yard_agree_config group;
    yard_records records;
    uint64_t timeout_us, start_timeout_us;
    yard_status broken;   /* why the group is over; YARD_OK: it is not */
    bool slept;           /* no step ran since */
    bool finished, ended; /* nothing comes here any more; nor to any rank */
    _Atomic bool woken;
    command *command_head, *command_tail;
    uint64_t n_commands, n_taken; /* received and taken so far, in this generation */
    uint32_t n_pending;           /* sequences among those not taken */

    event_queue events;
    yard_token_logprob *logprobs; /* [max_logprobs] of the last step's events */
    uint32_t n_logprobs, max_logprobs;
    float *kept_logits; /* [max_seqs, vocab] as the model says them: sampling changes them; NULL
                           until log-probabilities are asked for */

    uint64_t n_steps, n_prompt_tokens, n_output_tokens, n_empty_steps, agree_us, woken_at_us;
    uint64_t n_found_tokens, n_preemptions;
    yard_error err;
    char description[256];
};

static inline uint32_t sequence_length(const sequence *seq)
{
    return seq->n_prompt + seq->n_output;
}

/* True when one row is left to compute, whose token comes next: it decodes. Otherwise it is in
 * prefill, or being computed again after it was preempted. */
static inline bool sequence_decodes(const sequence *seq)
{
    return seq->n_output > 0 && seq->n_cached + 1 == sequence_length(seq);
}

static inline uint32_t yard_pages_for(uint64_t n_tokens)
{
    return (uint32_t)((n_tokens + YARD_PAGE_TOKENS - 1) / YARD_PAGE_TOKENS);
}

void yard_sequence_free(sequence *seq); /* a list of them; NULL is fine */

/* What bounds engine->context, for messages. */
static inline const char *yard_engine_bound(const yard_engine *engine)
{
    return engine->context == engine->model_config.max_positions ? "context" : "KV cache";
}

/* Gives a slot back: pages return, the sequence is freed. */
void yard_engine_release_slot(yard_engine *engine, uint32_t slot);

static inline int32_t *yard_engine_page_row(const yard_engine *e, uint32_t slot)
{
    return yard_model_step(e->model)->page_table + (size_t)slot * e->max_pages_per_seq;
}

/* Requests that may still get events. */
static inline uint32_t yard_engine_live(const yard_engine *e)
{
    return e->n_pending + e->n_queued + e->n_running;
}

/* several ranks: group.c; a process alone is a group of one */

/* Of the group's heap: the records of step agreement come first. */
static inline yard_sym yard_group_model_at(uint32_t n_ranks)
{
    return yard_align_up(yard_records_heap_bytes(n_ranks), 64);
}

/* After the model was created over config->fabric. */
yard_status yard_group_open(yard_engine *engine, const yard_engine_config *config, yard_error *err);
void yard_group_close(yard_engine *engine);

/* Takes over what, to take effect with a later step; on error what it owns is freed. */
yard_status yard_group_command(yard_engine *engine, const command *what);

/* What the next step is; plan->runs is false when the group sleeps. */
yard_status yard_group_plan(yard_engine *engine, yard_step_plan *plan);

/* The commands that the plan says. */
void yard_group_take_commands(yard_engine *engine, uint64_t n_commands);

/* Between gathering the rows of a step and running it: this rank's record of the next one. */
yard_status yard_group_post(yard_engine *engine);

/* The step failed: the group is over. Returns st. */
yard_status yard_group_break(yard_engine *engine, yard_status st);

/* the prefix cache: prefix_cache.c */

/* After the model was created: the root of page names; nothing is held. */
yard_status yard_cache_open(yard_engine *engine, const yard_engine_config *config, yard_error *err);
void yard_cache_close(yard_engine *engine);

/* What the pages hold is void. */
void yard_cache_forget(yard_engine *engine);

/* Pages of seq that may come from the cache; at least its last token is computed, for its logits.
 */
uint32_t yard_cache_reusable_pages(const yard_engine *engine, const sequence *seq);

/* Names of seq's first n_pages, which it has tokens for, are in seq->name. */
void yard_cache_name(const yard_engine *engine, sequence *seq, uint32_t n_pages);

/* How many pages of seq the cache has, from the first on without a gap; those that have no holder
 * are counted in *n_idle. */
uint32_t yard_cache_match(const yard_engine *engine, sequence *seq, uint32_t *n_idle);

/* seq holds its first n_pages, found by yard_cache_match(), in slot's row. */
void yard_cache_hold(yard_engine *engine, sequence *seq, uint32_t slot, uint32_t n_pages);

/* After a step: pages of the slot that are full now can be found by others. */
void yard_cache_show(yard_engine *engine, uint32_t slot);

/* A held page gets its name, unless another has it. */
void yard_cache_add(yard_engine *engine, int32_t page, yard_page_hash name, bool generated);

/* A page with content from elsewhere, held by nobody (page_move.c). */
void yard_cache_place(yard_engine *engine, const yard_page_import *import);

/* who runs: admit.c */

/* Places a sequence in the queue, by age. */
void yard_engine_enqueue(yard_engine *engine, sequence *seq);
/* Takes it out; before: the one in front of it, NULL: it is the first. */
void yard_engine_dequeue(yard_engine *engine, sequence *before, sequence *seq);

/* Starts what has room, the oldest first. */
void yard_engine_admit(yard_engine *engine);

/* Prompt tokens that the next call would find to compute, at most; counts to max_tokens. */
uint32_t yard_engine_admissible(const yard_engine *engine);

/* A page for the next token of the slot's sequence, if it needs one; the youngest sequences give
 * theirs up until there is one. False: it was itself preempted. */
bool yard_engine_grow(yard_engine *engine, uint32_t slot);

/* The slot's first n_pages, which are all that it has. */
void yard_engine_drop_pages(yard_engine *engine, uint32_t slot, uint32_t n_pages);

/* Takes pages for n_tokens and writes them to slot's page table row; false when too few are
 * available. */
bool yard_engine_take_pages(yard_engine *engine, uint32_t slot, uint32_t n_tokens,
                            uint32_t *n_pages);

/* True when every page is held by exactly those that list it. */
bool yard_engine_accounts_hold(const yard_engine *engine);

static inline void yard_engine_check_accounts(const yard_engine *e)
{
#ifdef YARD_DEBUG
    assert(yard_engine_accounts_hold(e));
#endif
    (void)e;
}

/* requests */

/* Ends a choice (YARD_ALL_CHOICES: all) of a queued or running request with an event; false when
 * there is none such. */
bool yard_engine_end(yard_engine *engine, uint64_t id, uint32_t choice);

/* Ends all, without events. */
void yard_engine_drop_all(yard_engine *engine);

/* events: events.c */

/* Room for n_more events than there are. */
yard_status yard_events_reserve(event_queue *queue, uint32_t n_more, yard_error *err);
void yard_events_push(event_queue *queue, yard_event event);

/* An event of seq, without a token; says on the first one what the cache had. */
yard_event yard_event_of(sequence *seq, yard_finish finish);

/* What the events of the step before point to is gone. */
void yard_events_forget_logprobs(yard_engine *engine);

/* log-probabilities: logprobs.c */

/* Memory for those of a step; before a request that wants them is accepted. */
yard_status yard_logprobs_reserve(yard_engine *engine, yard_error *err);

/* The event gets n_logprobs >= 1 of its token, by logits [vocab]; NULL: there are none. */
void yard_logprobs_add(yard_engine *engine, yard_event *event, uint32_t n_logprobs,
                       const float *logits);

/* After a step's forward pass, before sampling: events for the prompt tokens whose turn it was.
 * *finite is false when logits were not. Errors: those of the device. */
yard_status yard_logprobs_tell_prompt(yard_engine *engine, uint32_t slot, bool *finite);

/* rows */

/* Appends rows for tokens [from, from + n_rows) of a sequence in slot to the model's step. */
void yard_engine_add_rows(yard_engine *engine, uint32_t slot, const int32_t *token, uint32_t from,
                          uint32_t n_rows, uint32_t n_prompt);

#endif
