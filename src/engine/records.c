/* Layout of the region, n = n_ranks, all parts multiples of 64 bytes:
 *   landed  [2][n] records     place of each source, by parity of the step
 *   staging [2] records        what this rank posts
 *   words   [2][n] u64         arrivals in each place */
#include "engine/records.h"

#include <stdlib.h>

static size_t words_bytes(uint32_t n_ranks)
{
    return yard_align_up((size_t)2 * n_ranks * sizeof(uint64_t), 64);
}

size_t yard_records_heap_bytes(uint32_t n_ranks)
{
    return ((size_t)2 * n_ranks + 2) * sizeof(yard_step_record) + words_bytes(n_ranks);
}

static yard_sym place_of(const yard_records *r, uint64_t step, uint32_t from)
{
    return r->at + ((step & 1) * r->config.n_ranks + from) * sizeof(yard_step_record);
}

static yard_sym staging_of(const yard_records *r, uint64_t step)
{
    return r->at + ((size_t)2 * r->config.n_ranks + (step & 1)) * sizeof(yard_step_record);
}

static yard_sym word_of(const yard_records *r, uint64_t step, uint32_t from)
{
    return r->at + ((size_t)2 * r->config.n_ranks + 2) * sizeof(yard_step_record) +
           ((step & 1) * r->config.n_ranks + from) * sizeof(uint64_t);
}

/* Arrivals in the step's places once its record is there: every second step from 0 or 1 on. */
static uint64_t arrivals_with(uint64_t step)
{
    return step / 2 + 1;
}

yard_status yard_records_open(yard_records *r, const yard_agree_config *config, yard_fabric *fabric,
                              yard_sym at, uint32_t generation, yard_error *err)
{
    *r = (yard_records){ .config = *config,
                         .fabric = fabric,
                         .at = at,
                         .rank = yard_fabric_rank(fabric),
                         .generation = generation };
    r->vector = calloc(config->n_ranks, sizeof(*r->vector));
    return r->vector
               ? YARD_OK
               : yard_fail(err, YARD_ENOMEM, "records: no memory for %u ranks", config->n_ranks);
}

void yard_records_close(yard_records *r)
{
    free(r->vector);
    *r = (yard_records){ 0 };
}

static bool is_there(const yard_records *r, uint64_t step, uint32_t from)
{
    return yard_fabric_read_signal(r->fabric, word_of(r, step, from)) >= arrivals_with(step);
}

static bool heard(const yard_records *r)
{
    for (uint32_t from = 0; from < r->config.n_ranks; from++)
        if (from != r->rank && is_there(r, r->agree.step, from))
            return true;
    return false;
}

yard_status yard_records_post(yard_records *r, const yard_step_record *mine, yard_error *err)
{
    const uint64_t step = r->agree.step;
    yard_step_record *staged;

    if (!yard_agree_must_post(&r->agree, mine->has_work || (mine->finished && !r->told_finished),
                              heard(r)))
        return YARD_OK;
    r->told_finished = mine->finished;
    staged = yard_fabric_local(r->fabric, staging_of(r, step));
    *staged = *mine;
    staged->step = step;
    staged->generation = r->generation;
    for (uint32_t i = 1; i < r->config.n_ranks; i++) {
        const uint32_t to = (r->rank + i) % r->config.n_ranks;
        const yard_status st =
            yard_fabric_put_signal(r->fabric, place_of(r, step, r->rank), staged, sizeof(*staged),
                                   word_of(r, step, r->rank), 1, to);
        if (st != YARD_OK)
            return yard_fail(err, st, "step %llu: record to rank %u: %s", (unsigned long long)step,
                             to, yard_fabric_error(r->fabric));
    }
    yard_agree_posted(&r->agree);
    return YARD_OK;
}

yard_status yard_records_plan(yard_records *r, yard_deadline until, yard_step_plan *out,
                              yard_error *err)
{
    const uint64_t step = r->agree.step;
    const uint32_t n = r->config.n_ranks;

    for (uint32_t i = 0; i < n; i++) {
        const uint32_t from = (r->rank + i) % n;
        const yard_sym at = from == r->rank ? staging_of(r, step) : place_of(r, step, from);
        yard_status st = YARD_OK;

        if (from != r->rank)
            st = yard_fabric_wait_until(r->fabric, word_of(r, step, from), arrivals_with(step),
                                        from, until);
        if (st != YARD_OK)
            return yard_fail(err, st, "step %llu: record of rank %u: %s", (unsigned long long)step,
                             from, yard_fabric_error(r->fabric));
        r->vector[from] = *(const yard_step_record *)yard_fabric_local(r->fabric, at);
    }
    yard_step_plan_of(&r->config, r->vector, r->rank / r->config.tp, out);
    r->generation = out->generation;
    yard_agree_planned(&r->agree, out);
    return YARD_OK;
}

bool yard_records_asleep(const yard_records *r)
{
    return r->agree.state == YARD_AGREE_ASLEEP;
}

static bool is_woken(void *ctx)
{
    const yard_records *r = ctx;

    return r->has_work(r->ctx) || heard(r);
}

yard_status yard_records_sleep(yard_records *r, bool (*has_work)(void *ctx), void *ctx,
                               yard_deadline until, yard_error *err)
{
    yard_status st;

    r->has_work = has_work;
    r->ctx = ctx;
    st = yard_fabric_wait_any(r->fabric, is_woken, r, until);
    if (st == YARD_OK || st == YARD_ETIMEDOUT)
        return YARD_OK;
    return yard_fail(err, st, "step %llu: while the group sleeps: %s",
                     (unsigned long long)r->agree.step, yard_fabric_error(r->fabric));
}
