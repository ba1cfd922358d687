/* The records of step agreement over a fabric: every rank puts its record of step n into its place
 * at every other, and waits for theirs.
 *
 * Two places per peer are enough, steps alternate between them. Rank a posts n + 2 only after it
 * launched n + 1, hence with b's record of n + 1, which b posts only after it has read all records
 * of n: so when a's record of n + 2 can land at b, what was in its place has been read. The same
 * argument frees the staging that a's record of n was put from: b has read it, so it had arrived.
 * For the same reason at most one record per place is on its way; records of n and n + 1 may
 * overtake each other, which is why each place has a signal word of its own, counting its arrivals.
 */
#ifndef YARD_ENGINE_RECORDS_H
#define YARD_ENGINE_RECORDS_H

#include "engine/agree.h"
#include "fabric/fabric.h"

typedef struct yard_records {
    yard_agree agree;
    yard_agree_config config;
    yard_fabric *fabric; /* borrowed */
    yard_sym at;
    uint32_t rank, generation;
    yard_step_record *vector; /* [n_ranks] of the step that is planned */
    bool told_finished;       /* a record of this rank said so */

    bool (*has_work)(void *ctx); /* while asleep */
    void *ctx;
} yard_records;

/* Bytes of symmetric heap that the records of n_ranks take. */
size_t yard_records_heap_bytes(uint32_t n_ranks);

/* Collective without waiting; the heap from offset at on (a multiple of 64) is zero. generation:
 * proposed; step 0 settles on the highest. Errors: YARD_ENOMEM. */
yard_status yard_records_open(yard_records *r, const yard_agree_config *config, yard_fabric *fabric,
                              yard_sym at, uint32_t generation, yard_error *err);
void yard_records_close(yard_records *r);

/* Posts mine as the record of the next step if that is due, else does nothing; step and generation
 * are filled in. That this rank has finished is news that wakes a group, once. Errors: YARD_EPEER.
 */
yard_status yard_records_post(yard_records *r, const yard_step_record *mine, yard_error *err);

/* After posting: waits for the records of all and derives the plan. Errors: YARD_ETIMEDOUT,
 * YARD_EPEER; the message names step and rank. */
yard_status yard_records_plan(yard_records *r, yard_deadline until, yard_step_plan *out,
                              yard_error *err);

/* After yard_records_post(): true when no record was due, because the group sleeps. */
bool yard_records_asleep(const yard_records *r);

/* Sleeps until a peer wakes the group, has_work(ctx) (looked at after yard_fabric_interrupt() too),
 * or the deadline: no error. Errors: YARD_EPEER when a peer was lost or left. */
yard_status yard_records_sleep(yard_records *r, bool (*has_work)(void *ctx), void *ctx,
                               yard_deadline until, yard_error *err);

#endif
