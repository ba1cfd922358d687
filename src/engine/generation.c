#include "engine/generation.h"

#include <stdlib.h>

enum { MAX_ATTEMPTS = 5 };

yard_status yard_generation_open(yard_generation *g, uint32_t n_ranks, uint64_t start_us,
                                 uint64_t leave_us, uint64_t stop_us, yard_error *err)
{
    *g = (yard_generation){ .n_ranks = n_ranks,
                            .start_us = start_us,
                            .leave_us = leave_us,
                            .stop_us = stop_us,
                            .max_attempts = MAX_ATTEMPTS };
    g->state = calloc(n_ranks, sizeof(*g->state));
    g->until_us = calloc(n_ranks, sizeof(*g->until_us));
    g->stopped_us = calloc(n_ranks, sizeof(*g->stopped_us));
    g->to_leave = calloc(n_ranks, sizeof(*g->to_leave));
    g->killed = calloc(n_ranks, sizeof(*g->killed));
    if (g->state && g->until_us && g->stopped_us && g->to_leave && g->killed)
        return YARD_OK;
    yard_generation_close(g);
    return yard_fail(err, YARD_ENOMEM, "pod: no memory for %u ranks", n_ranks);
}

void yard_generation_close(yard_generation *g)
{
    free(g->state);
    free(g->until_us);
    free(g->stopped_us);
    free(g->to_leave);
    free(g->killed);
    *g = (yard_generation){ 0 };
}

static bool all_are(const yard_generation *g, yard_rank_state state)
{
    for (uint32_t r = 0; r < g->n_ranks; r++)
        if (g->state[r] != state || g->killed[r])
            return false;
    return true;
}

static bool in_group(const yard_generation *g, uint32_t rank)
{
    return g->state[rank] == YARD_RANK_FORMING || g->state[rank] == YARD_RANK_SERVING;
}

static void end_group(yard_generation *g, uint64_t now_us)
{
    g->forming = false;
    for (uint32_t r = 0; r < g->n_ranks; r++)
        if (in_group(g, r)) {
            g->state[r] = YARD_RANK_LEAVING;
            g->until_us[r] = now_us + g->leave_us;
            g->to_leave[r] = true;
        }
}

/* A rank that says READY in a group has lost it; the group is over before (yard_generation_lost).
 */
void yard_generation_ready(yard_generation *g, uint32_t rank)
{
    if (g->state[rank] == YARD_RANK_STARTING || g->state[rank] == YARD_RANK_LEAVING)
        g->state[rank] = YARD_RANK_READY;
    g->to_leave[rank] = false;
}

void yard_generation_formed(yard_generation *g, uint32_t rank)
{
    if (g->state[rank] == YARD_RANK_FORMING)
        g->state[rank] = YARD_RANK_SERVING;
    if (yard_generation_serves(g))
        g->n_attempts = 0;
}

void yard_generation_lost(yard_generation *g, uint64_t now_us)
{
    if (g->forming)
        end_group(g, now_us);
}

void yard_generation_ended(yard_generation *g, uint32_t rank, uint64_t now_us)
{
    if (g->state[rank] == YARD_RANK_STARTING && !g->killed[rank])
        g->n_attempts++;
    if (in_group(g, rank)) {
        g->state[rank] = YARD_RANK_DOWN;
        end_group(g, now_us);
    }
    g->state[rank] = YARD_RANK_DOWN;
    g->killed[rank] = g->to_leave[rank] = false;
    g->stopped_us[rank] = 0;
}

void yard_generation_stopped(yard_generation *g, uint32_t rank, bool stopped, uint64_t now_us)
{
    if (!stopped || g->stopped_us[rank] == 0)
        g->stopped_us[rank] = stopped ? now_us : 0;
}

void yard_generation_failed(yard_generation *g)
{
    g->hopeless = true;
}

static bool is_late(const yard_generation *g, uint32_t rank, uint64_t now_us)
{
    const yard_rank_state s = g->state[rank];

    return (s == YARD_RANK_STARTING || s == YARD_RANK_FORMING || s == YARD_RANK_LEAVING) &&
           now_us >= g->until_us[rank];
}

static bool must_die(const yard_generation *g, uint32_t rank, uint64_t now_us)
{
    if (g->killed[rank])
        return false;
    if (g->stopped_us[rank] > 0 &&
        (g->state[rank] == YARD_RANK_LEAVING || now_us >= g->stopped_us[rank] + g->stop_us))
        return true;
    return is_late(g, rank, now_us);
}

static yard_generation_act form(yard_generation *g, uint64_t now_us)
{
    g->forming = true;
    g->number++;
    g->n_attempts++;
    for (uint32_t r = 0; r < g->n_ranks; r++) {
        g->state[r] = YARD_RANK_FORMING;
        g->until_us[r] = now_us + g->start_us;
    }
    return YARD_GENERATION_FORM;
}

yard_generation_act yard_generation_next(yard_generation *g, uint64_t now_us, uint32_t *rank)
{
    if (g->hopeless || g->n_attempts > g->max_attempts)
        return YARD_GENERATION_GIVE_UP;
    for (uint32_t r = 0; r < g->n_ranks; r++)
        if (g->state[r] == YARD_RANK_FORMING && is_late(g, r, now_us))
            end_group(g, now_us);
    for (*rank = 0; *rank < g->n_ranks; ++*rank) {
        const uint32_t r = *rank;

        if (g->to_leave[r]) {
            g->to_leave[r] = false;
            return YARD_GENERATION_LEAVE;
        }
        if (must_die(g, r, now_us)) {
            g->killed[r] = true;
            return YARD_GENERATION_KILL;
        }
        if (g->state[r] == YARD_RANK_DOWN) {
            g->state[r] = YARD_RANK_STARTING;
            g->until_us[r] = now_us + g->start_us;
            return YARD_GENERATION_START;
        }
    }
    return all_are(g, YARD_RANK_READY) ? form(g, now_us) : YARD_GENERATION_NOTHING;
}

bool yard_generation_serves(const yard_generation *g)
{
    return all_are(g, YARD_RANK_SERVING);
}

uint64_t yard_generation_deadline(const yard_generation *g)
{
    uint64_t until_us = UINT64_MAX;

    for (uint32_t r = 0; r < g->n_ranks; r++) {
        const uint64_t dies_us = g->stopped_us[r] ? g->stopped_us[r] + g->stop_us : UINT64_MAX;

        if (g->killed[r])
            continue;
        if (is_late(g, r, UINT64_MAX) && g->until_us[r] < until_us)
            until_us = g->until_us[r];
        until_us = dies_us < until_us ? dies_us : until_us;
    }
    return until_us;
}
