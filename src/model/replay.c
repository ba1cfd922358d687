/* Passes over the layers of a few generated rows: on a device whose operations cost more to start
 * than to run, the second of a kind is recorded, and further ones are one call. */
#include "model/forward_impl.h"

/* Kinds differ by the pass and by max_rows, a power of two or max_tokens: nothing else that an
 * operation is started with changes from step to step. */
static uint32_t bound_idx(uint32_t max_rows)
{
    uint32_t idx = 0;

    while ((1u << idx) < max_rows)
        idx++;
    return idx;
}

/* Without rows there is no attention to record. Prompts are long enough to hide their launches, and
 * come in many mixtures. With several ranks the recording has dispatch and combine in it; another
 * rank may make the same pass call by call. */
static bool is_recorded(const yard_model *m, const yard_schedule *schedule)
{
    return m->ops->capture_begin && !m->ops->in_host_memory && !m->trace &&
           schedule->n_halves == 1 && m->all.has_generated && !m->all.has_prompts &&
           m->all.max_rows <= YARD_REPLAY_ROWS;
}

static yard_status record(yard_model *m, const yard_schedule *schedule, yard_pass pass,
                          yard_graph **out, yard_error *err)
{
    yard_status st = m->ops->capture_begin(m->stream, err);

    if (st != YARD_OK)
        return st;
    pass(m, schedule);
    return m->ops->capture_end(out, m->stream, err);
}

yard_status yard_model_issue_pass(yard_model *m, const yard_schedule *schedule, yard_pass_kind kind,
                                  yard_pass pass, yard_error *err)
{
    yard_status st = YARD_OK;
    yard_replay *r;

    if (!is_recorded(m, schedule)) {
        pass(m, schedule);
        return YARD_OK;
    }
    r = &m->replays[kind][bound_idx(m->all.max_rows)];
    if (r->schedule != schedule) { /* what a kernel needs once is done outside of a recording */
        m->ops->release_graph(m->stream, r->graph);
        *r = (yard_replay){ .schedule = schedule };
        pass(m, schedule);
        return YARD_OK;
    }
    if (!r->graph)
        st = record(m, schedule, pass, &r->graph, err);
    return st == YARD_OK ? m->ops->replay(m->stream, r->graph, NULL, err) : st;
}

void yard_model_release_replays(yard_model *m)
{
    for (uint32_t kind = 0; kind < YARD_PASS_COUNT; kind++)
        for (uint32_t i = 0; i < YARD_REPLAY_BOUNDS; i++)
            if (m->replays[kind][i].graph)
                m->ops->release_graph(m->stream, m->replays[kind][i].graph);
    memset(m->replays, 0, sizeof(m->replays));
}
