/* Inputs and plain definition of `switchyard bench ep`: what one rank of an exchange gives, what it
 * must get, and how many rows and bytes that takes. Also linked into bench/ep_mpi, so that the
 * peers move the same rows. */
#ifndef YARD_CLI_BENCH_EP_DATA_H
#define YARD_CLI_BENCH_EP_DATA_H

#include "base/base.h"

enum { YARD_BENCH_EP_MAX_TOP_K = 32 };

typedef enum yard_bench_ep_layout {
    YARD_BENCH_EP_EXPERT,   /* the rows of each expert follow each other */
    YARD_BENCH_EP_FLAT,     /* each token once */
    YARD_BENCH_EP_IN_PLACE, /* where they landed: row source * tokens + token */
    YARD_BENCH_EP_N_LAYOUTS
} yard_bench_ep_layout;

typedef struct yard_bench_ep_shape {
    uint32_t n_ranks, hidden, n_experts, top_k;
    uint32_t n_tokens; /* of every rank */
    bool partial;
    yard_bench_ep_layout layout;
    bool grouped; /* routing: a token's experts come from 4 of 8 groups of experts */
    bool y_bf16;  /* y is rounded to bf16 */
} yard_bench_ep_shape;

/* Where an expert-major row comes from. */
typedef struct yard_bench_ep_origin {
    uint32_t source, token, k;
} yard_bench_ep_origin;

/* Grouped routing, as DeepSeek-V3's. */
enum { YARD_BENCH_EP_GROUPS = 8, YARD_BENCH_EP_GROUPS_KEPT = 4 };

/* One rank's side of an exchange. Routing is uniform, distinct within a token, and the same
 * whenever the shape is; the values are those of yard_bench_ep_fill(). */
typedef struct yard_bench_ep_data {
    yard_bench_ep_shape shape;
    uint32_t rank, n_local, n_groups; /* n_groups: scales of a row */
    uint64_t seed;                    /* of the values */

    int32_t *expert; /* [n_ranks, n_tokens, top_k], of all ranks */
    float *weight;
    uint8_t *x;                   /* [n_tokens, hidden] FP8, this rank's */
    float *x_scale;               /* [n_tokens, n_groups] */
    uint16_t *expert_y;           /* [n_routed, hidden] bf16: results of this rank's experts */
    int32_t *count;               /* [n_local] rows of each local expert */
    uint32_t n_routed;            /* expert-major rows of this rank */
    uint32_t n_arrivals;          /* tokens, of all ranks, with an expert here */
    uint32_t *arrival;            /* [n_arrivals] source * n_tokens + token, ascending */
    uint32_t *arrival_of;         /* [n_routed] which arrival an expert-major row belongs to */
    yard_bench_ep_origin *origin; /* [n_routed] */

    /* Rows between this rank and others, one way each: dispatch has one row for each token and
     * destination rank, combine one for each (token, expert), or (token, rank) when partial. */
    uint32_t n_rows_out, n_rows_in, n_results_out, n_results_in;
    /* The same as n_rows_out with ranks [0, n_ranks / 2) and the rest as two nodes, where the other
     * node counts as one destination. */
    uint32_t n_node_rows_out;
} yard_bench_ep_data;

/* On success the caller owns *out; values are not filled yet. Errors: YARD_ENOMEM. */
yard_status yard_bench_ep_data_create(yard_bench_ep_data **out, const yard_bench_ep_shape *shape,
                                      uint32_t rank, yard_error *err);
void yard_bench_ep_data_destroy(yard_bench_ep_data *d); /* NULL is fine */

/* x, x_scale and expert_y from the seed. */
void yard_bench_ep_fill(yard_bench_ep_data *d, uint64_t seed);

/* The row of any rank's token under the current seed. */
void yard_bench_ep_make_row(const yard_bench_ep_data *d, uint32_t source, uint32_t token,
                            uint8_t *codes, float *scale);

/* What dispatch must have brought, bit for bit. count and row_index may be NULL, then they are not
 * looked at; origins in row_index count max_tokens for each rank. false with *err says what is
 * wrong. */
bool yard_bench_ep_check_dispatch(const yard_bench_ep_data *d, const uint8_t *expert_x,
                                  const float *expert_x_scale, const int32_t *count,
                                  const int32_t *row_index, uint32_t max_tokens, yard_error *err);

/* The same for y [n_tokens, hidden] f32 (values that bf16 has, with shape.y_bf16). */
bool yard_bench_ep_check_combine(const yard_bench_ep_data *d, const float *y, yard_error *err);

/* Bytes of one wire row of dispatch (codes, scales) and of one result row (bf16). */
static inline size_t yard_bench_ep_row_bytes(const yard_bench_ep_data *d)
{
    return d->shape.hidden + d->n_groups * sizeof(float);
}

static inline size_t yard_bench_ep_result_bytes(const yard_bench_ep_data *d)
{
    return d->shape.hidden * sizeof(uint16_t);
}

/* Bytes that the layout demands, each counted once: see YARD_BENCH_EP_FORMULA. */
double yard_bench_ep_dispatch_bytes(const yard_bench_ep_data *d);
double yard_bench_ep_combine_bytes(const yard_bench_ep_data *d);

/* A wire row is copied on its way in from another rank, then written where the layout wants it;
 * this rank's own tokens need no way in. A row of expert_y is copied once to where its token's sum
 * is made, whichever rank that is; the sum itself reads what was just counted, and writes y. */
#define YARD_BENCH_EP_FORMULA                                                                      \
    "Bytes that the layout demands of a rank, each copied once:\n"                                 \
    "  dispatch = (rows in + rows of expert_x) * (H + 4 * ceil(H / 128))\n"                        \
    "  combine  = rows of expert_y * 2 H + T * 4 H\n"                                              \
    "  pair     = dispatch + combine\n"                                                            \
    "H: hidden; T: tokens; rows in: one for each token of another rank that has an\n"              \
    "expert here; rows of expert_x: one for each (token, expert) in the expert\n"                  \
    "layout, one for each token in the flat one, none in place.\n"

#endif
