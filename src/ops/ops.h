/* The ops room's header for its neighbours: libyard-ops, and the table that is always there. */
#ifndef YARD_OPS_ROOM_H
#define YARD_OPS_ROOM_H

#include <yard/ops.h>

#include "base/base.h"

extern const yard_ops yard_ops_cpu;

#endif
