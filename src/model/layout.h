/* How a model is spread over ranks, and which part of it each rank has. */
#ifndef YARD_MODEL_LAYOUT_H
#define YARD_MODEL_LAYOUT_H

#include <yard/fabric.h>

#include "model/config.h"

/* ep = dp * tp ranks, instances (DP groups) of tp consecutive ranks. */
typedef struct yard_layout {
    uint32_t ep, dp, tp;
} yard_layout;

typedef struct yard_span {
    uint32_t first, n;
} yard_span;

/* A rank's part. What no span names, it has whole. */
typedef struct yard_share {
    uint32_t dp_group, tp_slice;
    yard_span experts;         /* of every MoE layer */
    yard_span heads, kv_heads; /* the same with MLA */
    yard_span dense; /* of the inner values of dense MLPs: whole blocks of 128, but for the last
                        slice's end; n differs by a block when they do not divide */
} yard_share;

/* Whether the model can be spread so. Where TP would cut a group of 128 attention outputs that
 * share a scale, only exact mode can. Takes microseconds; nothing is opened. Errors: YARD_EINVAL
 * naming what does not divide and the nearest layout that can be. */
yard_status yard_layout_check(const yard_model_config *c, yard_layout layout, bool exact,
                              yard_error *err);

/* Whether every instance of a layout that passed the check is on one node of the fabric, as it must
 * be: what its ranks add up would cross the network twice a layer. Errors: as above. */
yard_status yard_layout_check_nodes(yard_layout layout, const yard_fabric *fabric, yard_error *err);

/* The part of rank < layout.ep, of a layout that passed the check. */
yard_share yard_layout_share(const yard_model_config *c, yard_layout layout, uint32_t rank);

#endif
