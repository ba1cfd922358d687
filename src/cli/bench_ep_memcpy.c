/* The floor of `switchyard bench ep`: one thread per rank copies every byte that the layout
 * demands, row by row, from and to private memory (YARD_BENCH_EP_FORMULA). No rank waits for
 * another, nothing is summed. */
#include <stdlib.h>

#include "cli/bench_ep.h"

enum { MAX_SCALES = 8192 /* hidden is at most 2^20 */ };

typedef struct copies {
    uint64_t seed;          /* of what rows holds */
    size_t row_bytes;       /* wire row */
    uint8_t *rows, *landed; /* [n_arrivals] wire rows: as sent, as received */
    uint8_t *expert_x;
    float *expert_x_scale;
    uint8_t *results; /* [n_routed] landed results; partial: one place for each arrival */
    uint8_t *y;
} copies;

static yard_status open_copies(yard_bench_ep_rank *r, yard_error *err)
{
    r->impl = calloc(1, sizeof(copies));
    return r->impl ? YARD_OK : yard_fail(err, YARD_ENOMEM, "bench: no memory");
}

static void release(copies *c)
{
    free(c->rows);
    free(c->landed);
    free(c->expert_x);
    free(c->expert_x_scale);
    free(c->results);
    free(c->y);
    *c = (copies){ 0 };
}

static void close_copies(yard_bench_ep_rank *r)
{
    if (r->impl)
        release(r->impl);
    free(r->impl);
    r->impl = NULL;
}

static size_t y_bytes(const yard_bench_ep_data *d)
{
    return (size_t)d->shape.n_tokens * d->shape.hidden * sizeof(float);
}

/* y is copied from here, so there is at least so much. */
static size_t results_bytes(const yard_bench_ep_data *d)
{
    const size_t n_bytes = (size_t)d->n_routed * yard_bench_ep_result_bytes(d);

    return n_bytes > y_bytes(d) ? n_bytes : y_bytes(d);
}

static yard_status prepare(yard_bench_ep_rank *r, yard_error *err)
{
    const yard_bench_ep_data *d = r->data;
    copies *c = r->impl;

    release(c);
    c->row_bytes = yard_bench_ep_row_bytes(d);
    c->rows = yard_alloc(d->n_arrivals * c->row_bytes);
    c->landed = yard_alloc(d->n_arrivals * c->row_bytes);
    c->expert_x = yard_alloc((size_t)d->n_routed * d->shape.hidden);
    c->expert_x_scale = yard_alloc((size_t)d->n_routed * d->n_groups * sizeof(float));
    c->results = yard_alloc(results_bytes(d));
    c->y = yard_alloc(y_bytes(d));
    if (!c->rows || !c->landed || !c->expert_x || !c->expert_x_scale || !c->results || !c->y)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for %u rows", d->n_routed);
    return YARD_OK;
}

/* New values: the first exchange with them is never a timed one. */
static void refresh(copies *c, const yard_bench_ep_data *d)
{
    if (c->seed == d->seed)
        return;
    c->seed = d->seed;
    for (uint32_t i = 0; i < d->n_arrivals; i++) {
        uint8_t *row = c->rows + i * c->row_bytes;
        float scale[MAX_SCALES];

        yard_bench_ep_make_row(d, d->arrival[i] / d->shape.n_tokens,
                               d->arrival[i] % d->shape.n_tokens, row, scale);
        memcpy(row + d->shape.hidden, scale, d->n_groups * sizeof(*scale));
    }
}

static bool is_in_place(const yard_bench_ep_data *d)
{
    return d->shape.layout == YARD_BENCH_EP_IN_PLACE;
}

static yard_status dispatch(yard_bench_ep_rank *r, yard_error *err)
{
    const yard_bench_ep_data *d = r->data;
    const size_t hidden = d->shape.hidden, scale_bytes = d->n_groups * sizeof(float);
    const bool flat = d->shape.layout == YARD_BENCH_EP_FLAT;
    const uint32_t n_rows = flat ? d->n_arrivals : is_in_place(d) ? 0 : d->n_routed;
    copies *c = r->impl;

    refresh(c, d);
    for (uint32_t i = 0; i < d->n_arrivals; i++)
        if (d->arrival[i] / d->shape.n_tokens != d->rank)
            memcpy(c->landed + i * c->row_bytes, c->rows + i * c->row_bytes, c->row_bytes);
    for (uint32_t row = 0; row < n_rows; row++) {
        const uint32_t i = flat ? row : d->arrival_of[row];
        const bool own = d->arrival[i] / d->shape.n_tokens == d->rank;
        const uint8_t *from = (own ? c->rows : c->landed) + i * c->row_bytes;

        memcpy(c->expert_x + row * hidden, from, hidden);
        memcpy(c->expert_x_scale + (size_t)row * d->n_groups, from + hidden, scale_bytes);
    }
    return YARD_OK;
}

static yard_status combine(yard_bench_ep_rank *r, yard_error *err)
{
    const yard_bench_ep_data *d = r->data;
    const size_t n_bytes = yard_bench_ep_result_bytes(d);
    const size_t token_bytes = d->shape.hidden * sizeof(float);
    copies *c = r->impl;

    for (uint32_t row = 0; row < d->n_routed; row++)
        memcpy(c->results + (d->shape.partial ? d->arrival_of[row] : row) * n_bytes,
               (const uint8_t *)d->expert_y + row * n_bytes, n_bytes);
    for (uint32_t t = 0; t < d->shape.n_tokens; t++)
        memcpy(c->y + t * token_bytes, c->results + t * token_bytes, token_bytes);
    return YARD_OK;
}

static void poison(yard_bench_ep_rank *r)
{
    const yard_bench_ep_data *d = r->data;
    copies *c = r->impl;

    memset(c->landed, 0x55, d->n_arrivals * c->row_bytes);
    memset(c->expert_x, 0x55, (size_t)d->n_routed * d->shape.hidden);
    memset(c->expert_x_scale, 0x55, (size_t)d->n_routed * d->n_groups * sizeof(float));
    memset(c->results, 0x55, results_bytes(d));
    memset(c->y, 0x55, y_bytes(d));
}

static bool check_landed(const copies *c, const yard_bench_ep_data *d, yard_error *err)
{
    for (uint32_t i = 0; i < d->n_arrivals; i++)
        if (d->arrival[i] / d->shape.n_tokens != d->rank &&
            memcmp(c->landed + i * c->row_bytes, c->rows + i * c->row_bytes, c->row_bytes) != 0) {
            yard_fail(err, YARD_EDEVICE, "copy of row %u: other bytes", i);
            return false;
        }
    return true;
}

static bool check(yard_bench_ep_rank *r, yard_error *err)
{
    const yard_bench_ep_data *d = r->data;
    const size_t n_bytes = yard_bench_ep_result_bytes(d);
    const copies *c = r->impl;

    for (uint32_t row = 0; !d->shape.partial && row < d->n_routed; row++)
        if (memcmp(c->results + row * n_bytes, (const uint8_t *)d->expert_y + row * n_bytes,
                   n_bytes) != 0) {
            yard_fail(err, YARD_EDEVICE, "copy of result row %u: other bytes", row);
            return false;
        }
    if (memcmp(c->y, c->results, y_bytes(d)) != 0) {
        yard_fail(err, YARD_EDEVICE, "copy of y: other bytes");
        return false;
    }
    if (is_in_place(d))
        return check_landed(c, d, err);
    return yard_bench_ep_check_dispatch(d, c->expert_x, c->expert_x_scale, NULL, NULL, 0, err);
}

const yard_bench_ep_peer yard_bench_ep_memcpy = {
    .name = "memcpy",
    .open = open_copies,
    .prepare = prepare,
    .dispatch = dispatch,
    .combine = combine,
    .poison = poison,
    .check = check,
    .close = close_copies,
};
