/* The stages of a layer and the orders they may be called in. Data only, so that the engine runs,
 * and the planner simulates, the same tables.
 *
 *   1 input    input norm, query and latent projections, append to the cache, absorb
 *   2 attend   attention, output projection, post norm, router
 *   3 send     dispatch of rows to experts; shared expert, or the whole of a dense MLP
 *   4 experts  receipt of rows, routed experts, combine of their results
 *   5 receive  combine, residual */
#ifndef YARD_MODEL_SCHEDULE_H
#define YARD_MODEL_SCHEDULE_H

#include "base/base.h"

typedef enum yard_stage {
    YARD_STAGE_INPUT,
    YARD_STAGE_ATTEND,
    YARD_STAGE_SEND,
    YARD_STAGE_EXPERTS,
    YARD_STAGE_RECEIVE,
    YARD_STAGE_COUNT
} yard_stage;

enum { YARD_MAX_HALVES = 2, YARD_MAX_STAGE_CALLS = YARD_MAX_HALVES * YARD_STAGE_COUNT };

/* One call of the order: a stage of one half of the batch, in the layer at hand plus an offset. */
typedef struct yard_stage_call {
    yard_stage stage;
    uint8_t half;        /* 0 in schedules of one half */
    int8_t layer_offset; /* -1, 0 or 1 */
} yard_stage_call;

/* The order for one layer; it is walked for layer -1, 0 .. n_layers, and calls whose layer plus
 * offset does not exist are left out. Micro-batch orders hold for the MoE layers; dense layers take
 * the whole batch in the order of yard_schedule_none. */
typedef struct yard_schedule {
    const char *name;
    uint32_t n_halves;       /* micro-batches in flight */
    bool shared_before_recv; /* the shared expert runs while rows travel */
    uint32_t n_calls;
    yard_stage_call call[YARD_MAX_STAGE_CALLS];
} yard_schedule;

extern const yard_schedule yard_schedule_none;             /* recv right after send */
extern const yard_schedule yard_schedule_dispatch_overlap; /* shared expert between them */
/* Two halves; a half yields after its dispatch send and after its combine send. */
extern const yard_schedule yard_schedule_micro_batch;
/* Two halves, strictly alternating stage by stage, three stages apart. */
extern const yard_schedule yard_schedule_micro_batch_stages;

#endif
