/* The step on a virtual clock.
 *
 * A rank has three resources: its multiprocessors (compute; buffer copies run on them and are shown
 * as "copy") and its links (network), which carry one transfer at a time in the order of the sends.
 * The schedule's table gives the order of calls. A receive waits until the rows of all ranks have
 * arrived: everybody sends to everybody. Ranks of equal load do the same at the same time, so one
 * class of them is simulated, however many there are. */
#include <math.h>

#include "model/model.h"
#include "plan/plan.h"

static const yard_schedule *const tables[YARD_PLAN_SCHEDULE_COUNT] = {
    [YARD_PLAN_NONE] = &yard_schedule_none,
    [YARD_PLAN_DISPATCH_OVERLAP] = &yard_schedule_dispatch_overlap,
    [YARD_PLAN_MICRO_BATCH] = &yard_schedule_micro_batch,
    [YARD_PLAN_MICRO_BATCH_STAGES] = &yard_schedule_micro_batch_stages,
};

const char *yard_plan_schedule_name(yard_plan_schedule s)
{
    return tables[s]->name;
}

uint32_t yard_plan_schedule_halves(yard_plan_schedule schedule)
{
    return tables[schedule]->n_halves;
}

enum { CLASSES = YARD_PLAN_MAX_RANK_CLASSES };

typedef struct machine {
    const yard_plan_work *work;
    const yard_plan_observer *observer;
    double compute_us[CLASSES], link_us[CLASSES];     /* when each is free */
    double dispatched_us[2], combined_us[2];          /* when the rows of all ranks have arrived */
    double busy_us, wire_us, dispatch_us, combine_us; /* of class 0 */
    uint32_t layer, half;
    uint8_t stage;
} machine;

static void note(machine *m, uint32_t c, const char *resource, const char *what, double start,
                 double end)
{
    const yard_plan_event event = { .rank_class = c,
                                    .layer = m->layer,
                                    .half = m->half,
                                    .stage = m->stage,
                                    .resource = resource,
                                    .what = what,
                                    .start_us = start,
                                    .end_us = end };

    if (m->observer && m->observer->fn && end > start)
        m->observer->fn(m->observer->ctx, &event);
}

static void work_on(machine *m, uint32_t c, const char *resource, const char *what, double us)
{
    note(m, c, resource, what, m->compute_us[c], m->compute_us[c] + us);
    m->compute_us[c] += us;
    if (c == 0)
        m->busy_us += us;
}

/* The kernel that waits occupies the multiprocessors, but does nothing. Returns the waiting. */
static double wait_for(machine *m, uint32_t c, double at_us)
{
    const double waited = fmax(0, at_us - m->compute_us[c]);

    m->compute_us[c] += waited;
    return waited;
}

/* Returns when the rows have arrived. */
static double transfer(machine *m, uint32_t c, const char *what, yard_plan_wire wire)
{
    const double start = fmax(m->compute_us[c], m->link_us[c]);

    m->link_us[c] = start + wire.busy_us;
    note(m, c, "network", what, start, m->link_us[c]);
    if (c == 0)
        m->wire_us += wire.busy_us;
    return m->link_us[c] + wire.latency_us;
}

static void receive_dispatch(machine *m, uint32_t c, const yard_plan_stage_times *t)
{
    const double waited = wait_for(m, c, m->dispatched_us[m->half]);

    work_on(m, c, "copy", "dispatch copy", t->receive_copy_us);
    if (c == 0)
        m->dispatch_us += waited + t->receive_copy_us;
}

static void send(machine *m, const yard_schedule *s)
{
    double arrived = 0;

    for (uint32_t c = 0; c < m->work->n_classes; c++) {
        const yard_plan_stage_times *t = &m->work->part[c][m->half];
        work_on(m, c, "copy", "dispatch send", t->send_us);
        arrived = fmax(arrived, transfer(m, c, "dispatch", t->dispatch));
        if (c == 0)
            m->dispatch_us += t->send_us;
    }
    m->dispatched_us[m->half] = arrived;
    for (uint32_t c = 0; c < m->work->n_classes; c++) {
        const yard_plan_stage_times *t = &m->work->part[c][m->half];
        if (!s->shared_before_recv)
            receive_dispatch(m, c, t);
        work_on(m, c, "compute", "shared expert", t->shared_us);
    }
}

static void experts(machine *m, const yard_schedule *s)
{
    double arrived = 0;

    for (uint32_t c = 0; c < m->work->n_classes; c++) {
        const yard_plan_stage_times *t = &m->work->part[c][m->half];
        if (s->shared_before_recv)
            receive_dispatch(m, c, t);
        work_on(m, c, "compute", "experts", t->experts_us);
        work_on(m, c, "copy", "combine copy", t->combine_send_us);
        arrived = fmax(arrived, transfer(m, c, "combine", t->combine));
        if (c == 0)
            m->combine_us += t->combine_send_us;
    }
    m->combined_us[m->half] = arrived;
}

static void receive(machine *m)
{
    for (uint32_t c = 0; c < m->work->n_classes; c++) {
        const yard_plan_stage_times *t = &m->work->part[c][m->half];
        const double waited = wait_for(m, c, m->combined_us[m->half]);
        work_on(m, c, "copy", "combine sum", t->combine_receive_us);
        if (c == 0)
            m->combine_us += waited + t->combine_receive_us;
    }
}

static void call(machine *m, const yard_schedule *s, yard_stage stage)
{
    switch (stage) {
    case YARD_STAGE_INPUT:
        for (uint32_t c = 0; c < m->work->n_classes; c++)
            work_on(m, c, "compute", "projections", m->work->part[c][m->half].input_us);
        return;
    case YARD_STAGE_ATTEND:
        for (uint32_t c = 0; c < m->work->n_classes; c++)
            work_on(m, c, "compute", "attention", m->work->part[c][m->half].attend_us);
        return;
    case YARD_STAGE_SEND:
        send(m, s);
        return;
    case YARD_STAGE_EXPERTS:
        experts(m, s);
        return;
    case YARD_STAGE_RECEIVE:
        receive(m);
        return;
    case YARD_STAGE_COUNT:
        break;
    }
}

static void walk(machine *m, const yard_schedule *s)
{
    const int64_t n_layers = m->work->n_layers;

    for (int64_t at = -1; at <= n_layers; at++)
        for (uint32_t i = 0; i < s->n_calls; i++) {
            const yard_stage_call *next = &s->call[i];
            const int64_t layer = at + next->layer_offset;
            if (layer < 0 || layer >= n_layers)
                continue;
            m->layer = (uint32_t)layer;
            m->half = next->half;
            m->stage = (uint8_t)(next->stage + 1);
            call(m, s, next->stage);
        }
}

void yard_plan_simulate(yard_plan_schedule schedule, const yard_plan_work *work,
                        const yard_plan_observer *observer, yard_plan_run *out)
{
    machine m = { .work = work, .observer = observer };
    const double n = work->n_layers;
    double end = 0;

    if (!work->n_layers) {
        *out = (yard_plan_run){ 0 };
        return;
    }
    walk(&m, tables[schedule]);
    for (uint32_t c = 0; c < work->n_classes; c++)
        end = fmax(end, m.compute_us[c]);
    *out = (yard_plan_run){ .total_us = end,
                            .dispatch_us = m.dispatch_us / n,
                            .combine_us = m.combine_us / n,
                            .wire_us = m.wire_us / n,
                            .idle_us = (m.compute_us[0] - m.busy_us) / n };
}
