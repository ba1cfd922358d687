/* Private to the ep room: the sum over an instance's ranks, its places in the heap, its backends.
 *
 * One hop: everybody puts its rows to everybody, and adds all of them in the order of ranks. The
 * rows of a decode step are few, and what a longer chunk would save by two hops is small beside its
 * products.
 *
 * Landing places alternate between two sets. When s writes sum n + 2 into r's memory, s has
 * finished sum n + 1, so it has r's rows n + 1, which r sent after it had read sum n: the set is
 * free. The same holds for s's own rows, which transports that do not copy at once read from its
 * heap: s has all rows n + 1, sent after their senders had received its rows n. */
#ifndef YARD_EP_ALL_REDUCE_IMPL_H
#define YARD_EP_ALL_REDUCE_IMPL_H

#include "base/convert.h"
#include "ep/ep.h"
#include "fabric/fabric.h"

enum { ALL_REDUCE_ALIGN = 64, ALL_REDUCE_MAX_TP = 64, ALL_REDUCE_SETS = 2 };

typedef struct all_reduce_backend {
    yard_status (*open)(yard_all_reduce *r, yard_error *err); /* may be NULL */
    void (*close)(yard_all_reduce *r); /* half-opened ones too; may be NULL */
    /* Sets status and err if something failed meanwhile; may be NULL. */
    void (*look)(yard_all_reduce *r);
    yard_status (*sum)(yard_all_reduce *r, void *x, const int32_t *n_rows, yard_stream stream);
} all_reduce_backend;

extern const all_reduce_backend yard_all_reduce_cpu, yard_all_reduce_cuda;

struct yard_all_reduce {
    yard_all_reduce_config config;
    const all_reduce_backend *backend;
    void *impl; /* of the backend */
    const yard_convert *convert;
    uint32_t rank, first; /* first: of the instance */
    uint64_t epoch;       /* sums so far; cpu */
    yard_status status;   /* sticky */
    yard_error err;
};

static inline size_t all_reduce_row_bytes(const yard_all_reduce_config *c)
{
    return c->n_cols * yard_dtype_bytes(c->dtype);
}

static inline size_t all_reduce_slot_bytes(const yard_all_reduce_config *c)
{
    return yard_align_up(c->max_rows * all_reduce_row_bytes(c), ALL_REDUCE_ALIGN);
}

/* Words first, then the sets, each with a slot per rank: where those begin. */
static inline yard_sym all_reduce_sets_at(const yard_all_reduce_config *c)
{
    return c->heap_at + yard_align_up(c->tp * sizeof(uint64_t), ALL_REDUCE_ALIGN);
}

#endif
