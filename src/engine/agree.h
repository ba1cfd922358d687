/* Step agreement: how the ranks of a group decide, each for itself and all alike, what step n is.
 *
 * Every rank posts one immutable record for step n to all others, and launches n only with the
 * records of all. The plan of the step is a pure function of this vector, so that all ranks derive
 * the same one. A rank posts n + 1 right after it launched n, so records travel while the step
 * runs; what arrives after posting waits one step. When no record of n has work, n does not run and
 * nobody posts n + 1: the group sleeps. The first record of n + 1 is the wake-up: a rank that has
 * work posts it, and every rank that sees one posts its own.
 *
 *              post n                      all records of n, one has work
 *     LAUNCHED -------> WAITING(n) ------------------------------------------> LAUNCHED, n + 1
 *                         ^    |
 *    work here, or a      |    | all records of n, none has work
 *    record of n from     |    v
 *    a peer: post n       +-- ASLEEP, n + 1
 *
 * Here is no input and no output: records.c carries records over a fabric, tests carry them as they
 * like. */
#ifndef YARD_ENGINE_AGREE_H
#define YARD_ENGINE_AGREE_H

#include "base/base.h"

/* What a rank says about step n before it knows how n - 1 ends: upper bounds, and what it wishes.
 * The ranks of an instance hold the same requests but hear of new ones at different times;
 * n_commands tells how far each has heard. 64 bytes: one line, one put. */
typedef struct yard_step_record {
    uint64_t step;
    uint64_t n_commands;     /* submissions and aborts received so far, in the instance's order */
    uint32_t generation;     /* of the group; step 0: the one that this rank proposes */
    uint32_t n_tokens;       /* generated tokens to compute, at most */
    uint32_t prefill_tokens; /* prompt tokens that this rank would compute, at most */
    uint32_t mtp_passes;     /* wished */
    uint32_t schedule;       /* wished, yard_step_schedule */
    uint32_t has_work;       /* 0 or 1 */
    uint32_t finished;       /* 1: no request will ever come here any more */
    uint32_t n_resumed;      /* requests that gave way and may go on, at most: a row each beside
                                those that n_tokens and prefill_tokens tell of */
    uint32_t reserved[4];    /* 0 */
} yard_step_record;

typedef enum yard_step_schedule {
    YARD_STEP_NONE,             /* one round per MoE layer, receive right after send */
    YARD_STEP_DISPATCH_OVERLAP, /* one round, the shared expert while rows travel */
    YARD_STEP_MICRO_BATCH,      /* two rounds in flight */
} yard_step_schedule;

/* Constants of the group, equal on all ranks. */
typedef struct yard_agree_config {
    uint32_t n_ranks, tp;
    uint32_t prefill_budget; /* prompt tokens of all instances in a step in which any of them
                                decodes: while one is in prefill, the MoE layers of all are slower.
                                At least 1 */
} yard_agree_config;

/* Equal on all ranks but for the last two, which are those of the caller's instance. max_rows: no
 * instance has more rows. */
typedef struct yard_step_plan {
    uint64_t step;
    uint32_t generation; /* the highest that a rank names: step 0 settles it */
    bool runs;           /* false: no rank has work; the group sleeps */
    bool ends;           /* all have finished, and so has the group: no step follows */
    uint32_t n_rounds;   /* per MoE layer */
    yard_step_schedule schedule;
    uint32_t mtp_passes;
    uint64_t max_rows;
    uint64_t n_commands;     /* to be taken before the step: those that the whole instance has */
    uint32_t prefill_tokens; /* prompt tokens that the instance may compute */
} yard_step_plan;

/* The plan of a step for the ranks of one instance.
 *   records  [n_ranks] of the same step and generation, in order of rank */
void yard_step_plan_of(const yard_agree_config *config, const yard_step_record *records,
                       uint32_t instance, yard_step_plan *out);

typedef enum yard_agree_state {
    YARD_AGREE_LAUNCHED, /* the record of step `step` is due at once */
    YARD_AGREE_WAITING,  /* it is posted; the others' are awaited */
    YARD_AGREE_ASLEEP    /* nobody had work: it is due when there is some */
} yard_agree_state;

/* One rank's place in the protocol. All zero but for the step begins: the record of `step` is due.
 */
typedef struct yard_agree {
    uint64_t step; /* the next to be planned */
    yard_agree_state state;
} yard_agree;

/* True when this rank has to post its record of a->step now. has_work: here; heard: a peer's record
 * of a->step is there. */
bool yard_agree_must_post(const yard_agree *a, bool has_work, bool heard);

/* The record of a->step is on its way. */
void yard_agree_posted(yard_agree *a);

/* All records of a->step are there, and this is their plan: run it (if plan->runs) after this call
 * and after posting the next record. */
void yard_agree_planned(yard_agree *a, const yard_step_plan *plan);

#endif
