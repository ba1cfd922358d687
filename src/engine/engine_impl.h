/* Private to the engine room. */
#ifndef YARD_ENGINE_IMPL_H
#define YARD_ENGINE_IMPL_H

#include "engine/engine.h"

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

    event_queue events;
    uint64_t n_steps, n_prompt_tokens, n_output_tokens;
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
