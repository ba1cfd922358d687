/* The ep room's header for its neighbours: libyard-ep, and the sum over an instance's ranks that
 * tensor parallelism needs. */
#ifndef YARD_EP_ROOM_H
#define YARD_EP_ROOM_H

#include <yard/ep.h>

#include "base/base.h"

/* Adds up what the tp ranks of an instance have, in ascending order of ranks, so that all of them
 * get the same bits. */
typedef struct yard_all_reduce yard_all_reduce;

typedef struct yard_all_reduce_config {
    uint32_t tp; /* ranks of an instance; rank r is in instance r / tp */
    uint32_t max_rows, n_cols;
    yard_fabric *fabric; /* borrowed */
    uint64_t heap_at;    /* as in yard_ep_config */
    uint64_t timeout_us; /* of every wait; 0: the fabric's */
} yard_all_reduce_config;

/* Bytes of heap: 2 * tp * max_rows * n_cols floats, tp words. The fabric is not read. */
size_t yard_all_reduce_heap_bytes(const yard_all_reduce_config *config);

/* Not collective. Errors: YARD_EINVAL (heap too small, ranks that do not divide by tp),
 * YARD_ENOMEM.
 */
yard_status yard_all_reduce_create(yard_all_reduce **out, const yard_all_reduce_config *config,
                                   yard_error *err);
void yard_all_reduce_destroy(yard_all_reduce *reduce); /* NULL is fine */

/* x [n_rows, n_cols] f32 becomes the sum over the instance. Collective over the instance, with
 * equal n_rows [1], 0 to max_rows. Errors are sticky: YARD_ETIMEDOUT, YARD_EPEER naming the rank.
 */
yard_status yard_all_reduce_sum(yard_all_reduce *reduce, float *x, const int32_t *n_rows,
                                yard_stream stream);

/* The message of the first failure; "" if there was none. */
const char *yard_all_reduce_error(const yard_all_reduce *reduce);

#endif
