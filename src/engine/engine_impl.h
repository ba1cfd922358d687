/* Private to the engine room. */
#ifndef YARD_ENGINE_IMPL_H
#define YARD_ENGINE_IMPL_H

#include <stdatomic.h>

#include "engine/engine.h"
#include "engine/records.h"

/* One request. Its tokens are the prompt, then the output; the first n_cached of them are in the
 * KV cache. */
typedef struct sequence {
    struct sequence *next; /* in the queue */
    uint64_t id;
    int32_t *token; /* [n_prompt + max_new] */
    uint32_t n_prompt, n_output, max_new;
    uint32_t n_cached;
    uint32_t n_pages; /* pages held while running, listed in its page table row */
    yard_sample_params params;
    int32_t *bias_token; /* [n_bias] */
    float *bias_value;
    uint32_t n_bias;
    bool ignore_eos;
    int32_t *stop_token; /* [n_stop_token] */
    uint32_t n_stop_token;
} sequence;

/* What was asked for since the last step, in the instance's order: a request, or its end. */
typedef struct command {
    struct command *next;
    sequence *seq; /* NULL: abort_id ends */
    uint64_t abort_id;
    uint32_t abort_choice;
} command;

/* A growing ring of events; its capacity always covers one event for every live request. */
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

    sequence **running; /* [max_seqs] slot = page table row; NULL: free */
    uint64_t *started;  /* [max_seqs] order of admission */
    sequence *queue_head, *queue_tail;
    uint32_t n_queued, n_running;
    uint64_t next_id;
    uint64_t n_started;

    int32_t *free_pages; /* [n_pages] a stack */
    uint32_t n_pages, n_free_pages;

    /* the step in the making: slots whose last row gets logits, and that row */
    uint32_t *logit_slot; /* [max_seqs] */
    int32_t *logit_row;   /* [max_seqs] */
    uint32_t n_logit_rows;
    yard_sample_row *sample_rows; /* [max_seqs] */
    int32_t *sampled;             /* [max_seqs] */
    bool *failed;                 /* [max_seqs] rows whose logits are not finite */
    uint32_t *order;              /* [max_seqs] running slots in order of admission */

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
    uint32_t n_pending;           /* requests among those not taken */

    event_queue events;
    yard_page_hash page_root;
    yard_page_events page_events;
    uint64_t n_steps, n_prompt_tokens, n_output_tokens, n_empty_steps, agree_us, woken_at_us;
    yard_error err;
    char description[256];
};

static inline uint32_t sequence_length(const sequence *seq)
{
    return seq->n_prompt + seq->n_output;
}

void yard_sequence_free(sequence *seq); /* NULL is fine */

/* What bounds engine->context, for messages. */
static inline const char *yard_engine_bound(const yard_engine *engine)
{
    return engine->context == engine->model_config.max_positions ? "context" : "KV cache";
}

/* False when one of n logits is a NaN or infinite. */
bool yard_logits_are_finite(const float *logits, uint32_t n);

/* Gives a slot back: pages return to the stack, the sequence is freed. */
void yard_engine_release_slot(yard_engine *engine, uint32_t slot);

/* Requests that may still get events. */
static inline uint32_t yard_engine_live(const yard_engine *e)
{
    return e->n_pending + e->n_queued + e->n_running;
}

/* ---- several ranks: group.c; a process alone is a group of one ----------------------------- */

/* Of the group's heap: the records of step agreement come first. */
static inline yard_sym yard_group_model_at(uint32_t n_ranks)
{
    return yard_align_up(yard_records_heap_bytes(n_ranks), 64);
}

/* After the model was created over config->fabric. */
yard_status yard_group_open(yard_engine *engine, const yard_engine_config *config, yard_error *err);
void yard_group_close(yard_engine *engine);

/* Takes over what, to take effect with a later step; on error its sequence is freed. */
yard_status yard_group_command(yard_engine *engine, const command *what);

/* What the next step is; plan->runs is false when the group sleeps. */
yard_status yard_group_plan(yard_engine *engine, yard_step_plan *plan);

/* The commands that the plan says. */
void yard_group_take_commands(yard_engine *engine, uint64_t n_commands);

/* Between gathering the rows of a step and running it: this rank's record of the next one. */
yard_status yard_group_post(yard_engine *engine);

/* The step failed: the group is over. Returns st. */
yard_status yard_group_break(yard_engine *engine, yard_status st);

/* ---- the prefix cache: prefix_cache.c ------------------------------------------------------ */

/* After the model was created: the root of page names; nothing is held. */
void yard_cache_open(yard_engine *engine, const yard_engine_config *config);
void yard_cache_close(yard_engine *engine);

/* ---- requests ----------------------------------------------------------------------------- */

/* Appends to the queue. */
void yard_engine_enqueue(yard_engine *engine, sequence *seq);

/* Ends a choice (YARD_ALL_CHOICES: all) of a queued or running request with an event; false when
 * there is none such. */
bool yard_engine_end(yard_engine *engine, uint64_t id, uint32_t choice);

/* Ends all, without events. */
void yard_engine_drop_all(yard_engine *engine);

/* Room for one event more than there are live requests; called before a request is accepted. */
yard_status yard_events_reserve(event_queue *queue, uint32_t n_live, yard_error *err);
void yard_events_push(event_queue *queue, yard_event event);

/* Appends rows for tokens [from, from + n_rows) of a sequence in slot to the model's step. */
void yard_engine_add_rows(yard_engine *engine, uint32_t slot, const int32_t *token, uint32_t from,
                          uint32_t n_rows, uint32_t n_prompt);

/* Takes pages for n_tokens and writes them to slot's page table row; false when too few are free.
 */
bool yard_engine_take_pages(yard_engine *engine, uint32_t slot, uint32_t n_tokens,
                            uint32_t *n_pages);
void yard_engine_return_pages(yard_engine *engine, uint32_t slot, uint32_t n_pages);

#endif
