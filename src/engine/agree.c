/* The plan of a step, and a rank's place in the protocol. Pure: no clock, no memory, no fabric. */
#include "engine/agree.h"

#include <assert.h>

/* What all ranks of an instance have heard of; who has heard less has less to compute. */
typedef struct instance_view {
    uint32_t prefill_tokens;
    uint64_t n_commands;
    uint64_t n_decodes; /* at most */
} instance_view;

static uint64_t decodes_of(const yard_step_record *r)
{
    return (uint64_t)r->n_tokens + r->n_resumed;
}

static instance_view view_of(const yard_agree_config *c, const yard_step_record *records,
                             uint32_t instance)
{
    const yard_step_record *r = records + (size_t)instance * c->tp;
    instance_view v = { r->prefill_tokens, r->n_commands, decodes_of(r) };

    for (uint32_t i = 1; i < c->tp; i++) {
        v.prefill_tokens =
            r[i].prefill_tokens < v.prefill_tokens ? r[i].prefill_tokens : v.prefill_tokens;
        v.n_commands = r[i].n_commands < v.n_commands ? r[i].n_commands : v.n_commands;
        v.n_decodes = decodes_of(&r[i]) > v.n_decodes ? decodes_of(&r[i]) : v.n_decodes;
    }
    return v;
}

/* Tokens that the instances take when none may take more than level. */
static uint64_t taken_at(const yard_agree_config *c, const yard_step_record *records,
                         uint32_t level)
{
    uint64_t n = 0;

    for (uint32_t i = 0; i < c->n_ranks / c->tp; i++) {
        const uint32_t wish = view_of(c, records, i).prefill_tokens;
        n += wish < level ? wish : level;
    }
    return n;
}

/* Where nobody decodes, a long step delays nobody. */
static uint32_t prefill_budget(const yard_agree_config *c, const yard_step_record *records)
{
    for (uint32_t r = 0; r < c->n_ranks; r++)
        if (records[r].n_tokens > 0)
            return c->prefill_budget;
    return UINT32_MAX;
}

/* The highest level that the budget allows. */
static uint32_t level_within(const yard_agree_config *c, const yard_step_record *records,
                             uint32_t budget)
{
    uint32_t level = 0, above = budget;

    while (level < above) {
        const uint32_t middle = above - (above - level) / 2;

        if (taken_at(c, records, middle) <= budget)
            level = middle;
        else
            above = middle - 1;
    }
    return level;
}

/* Nobody gets more than it wishes, and whoever gets less than that gets as much as any other. What
 * does not divide goes to the unsatisfied one after the other, beginning at another instance each
 * step, so that a budget below one token each starves nobody. */
static uint32_t share_prefill(const yard_agree_config *c, const yard_step_record *records,
                              uint32_t instance, uint32_t budget, uint32_t level)
{
    const uint32_t dp = c->n_ranks / c->tp, wish = view_of(c, records, instance).prefill_tokens;
    uint32_t place = 0, first;

    assert(dp > 0);
    first = (uint32_t)(records[0].step % dp);
    if (wish <= level)
        return wish;
    for (uint32_t i = first; i != instance; i = (i + 1) % dp)
        place += view_of(c, records, i).prefill_tokens > level;
    return level + (place < budget - taken_at(c, records, level));
}

/* Of any instance: its share of prompt tokens may be one above the level. */
static uint64_t most_rows(const yard_agree_config *c, const yard_step_record *records,
                          uint32_t level)
{
    uint64_t most = 0;

    for (uint32_t i = 0; i < c->n_ranks / c->tp; i++) {
        const instance_view v = view_of(c, records, i);
        const uint64_t n =
            v.n_decodes + (v.prefill_tokens <= level ? v.prefill_tokens : (uint64_t)level + 1);

        most = n > most ? n : most;
    }
    return most;
}

/* Two rounds only where every rank that has tokens gains by them: one wish for less decides. */
static yard_step_schedule agree_on_schedule(const yard_agree_config *c,
                                            const yard_step_record *records)
{
    uint32_t lowest = YARD_STEP_MICRO_BATCH;
    bool any = false;

    for (uint32_t r = 0; r < c->n_ranks; r++) {
        if (records[r].n_tokens == 0 && records[r].prefill_tokens == 0)
            continue;
        any = true;
        lowest = records[r].schedule < lowest ? records[r].schedule : lowest;
    }
    return any ? (yard_step_schedule)lowest : YARD_STEP_NONE;
}

void yard_step_plan_of(const yard_agree_config *c, const yard_step_record *records,
                       uint32_t instance, yard_step_plan *out)
{
    const uint32_t budget = prefill_budget(c, records), level = level_within(c, records, budget);

    *out = (yard_step_plan){ .step = records[0].step, .ends = true };
    for (uint32_t r = 0; r < c->n_ranks; r++) {
        assert(records[r].step == records[0].step);
        out->runs = out->runs || records[r].has_work;
        out->ends = out->ends && records[r].finished && !records[r].has_work;
        if (records[r].generation > out->generation)
            out->generation = records[r].generation;
        if (records[r].mtp_passes > out->mtp_passes)
            out->mtp_passes = records[r].mtp_passes;
    }
    out->schedule = agree_on_schedule(c, records);
    out->n_rounds = out->schedule == YARD_STEP_MICRO_BATCH ? 2 : 1;
    out->max_rows = most_rows(c, records, level);
    out->n_commands = view_of(c, records, instance).n_commands;
    out->prefill_tokens = share_prefill(c, records, instance, budget, level);
}

bool yard_agree_must_post(const yard_agree *a, bool has_work, bool heard)
{
    return a->state == YARD_AGREE_LAUNCHED ||
           (a->state == YARD_AGREE_ASLEEP && (has_work || heard));
}

void yard_agree_posted(yard_agree *a)
{
    assert(a->state != YARD_AGREE_WAITING);
    a->state = YARD_AGREE_WAITING;
}

void yard_agree_planned(yard_agree *a, const yard_step_plan *plan)
{
    assert(a->state == YARD_AGREE_WAITING && plan->step == a->step);
    a->state = plan->runs ? YARD_AGREE_LAUNCHED : YARD_AGREE_ASLEEP;
    a->step++;
}
