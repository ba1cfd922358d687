#include "model/schedule.h"

const yard_schedule yard_schedule_none = {
    .name = "none",
    .n_halves = 1,
    .shared_before_recv = false,
    .n_calls = YARD_STAGE_COUNT,
    .call = { { YARD_STAGE_INPUT, 0, 0 },
              { YARD_STAGE_ATTEND, 0, 0 },
              { YARD_STAGE_SEND, 0, 0 },
              { YARD_STAGE_EXPERTS, 0, 0 },
              { YARD_STAGE_RECEIVE, 0, 0 } },
};

const yard_schedule yard_schedule_dispatch_overlap = {
    .name = "dispatch-overlap",
    .n_halves = 1,
    .shared_before_recv = true,
    .n_calls = YARD_STAGE_COUNT,
    .call = { { YARD_STAGE_INPUT, 0, 0 },
              { YARD_STAGE_ATTEND, 0, 0 },
              { YARD_STAGE_SEND, 0, 0 },
              { YARD_STAGE_EXPERTS, 0, 0 },
              { YARD_STAGE_RECEIVE, 0, 0 } },
};

const yard_schedule yard_schedule_micro_batch = {
    .name = "micro-batch",
    .n_halves = 2,
    .shared_before_recv = true,
    .n_calls = 10,
    .call = { { YARD_STAGE_RECEIVE, 0, -1 },
              { YARD_STAGE_INPUT, 0, 0 },
              { YARD_STAGE_ATTEND, 0, 0 },
              { YARD_STAGE_SEND, 0, 0 },
              { YARD_STAGE_RECEIVE, 1, -1 },
              { YARD_STAGE_INPUT, 1, 0 },
              { YARD_STAGE_ATTEND, 1, 0 },
              { YARD_STAGE_SEND, 1, 0 },
              { YARD_STAGE_EXPERTS, 0, 0 },
              { YARD_STAGE_EXPERTS, 1, 0 } },
};

const yard_schedule yard_schedule_micro_batch_stages = {
    .name = "micro-batch-stages",
    .n_halves = 2,
    .shared_before_recv = true,
    .n_calls = 10,
    .call = { { YARD_STAGE_EXPERTS, 0, 0 },
              { YARD_STAGE_INPUT, 1, 0 },
              { YARD_STAGE_RECEIVE, 0, 0 },
              { YARD_STAGE_ATTEND, 1, 0 },
              { YARD_STAGE_INPUT, 0, 1 },
              { YARD_STAGE_SEND, 1, 0 },
              { YARD_STAGE_ATTEND, 0, 1 },
              { YARD_STAGE_EXPERTS, 1, 0 },
              { YARD_STAGE_SEND, 0, 1 },
              { YARD_STAGE_RECEIVE, 1, 0 } },
};
