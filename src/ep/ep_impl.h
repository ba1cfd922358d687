/* Private to the ep room: a group, its rounds, and where everything lies in the symmetric heap.
 *
 * One round, seen from rank r. Headers and rows of dispatch land where the sender says, with no
 * agreement before: the header of source s in slot s, the row of token t of instance g in row
 * g * max_tokens + t, whichever replica sent it. Rows of combine land at the token's owner, replica
 * t mod tp of its instance: row t * top_k + j, where j is the index k of the expert (exact) or the
 * ordinal of the sending rank among the ranks of the token (partial).
 *
 * Why no barrier is needed to use the same memory again. Every rank sends a header to every rank in
 * every dispatch_send and every combine_send, tokens or not, and each receive waits for the headers
 * of all ranks. The four calls of a round alternate. So:
 *   (1) When s writes dispatch n + 1 into r's memory, s has finished combine_recv n, so it has r's
 *       combine header n. r sends that at the end of combine_send n, after it last read what
 *       dispatch n brought. Headers and rows of dispatch are free.
 *   (2) When r writes combine n + 1 into s's memory, r has finished dispatch_recv n + 1, so it has
 *       s's dispatch header n + 1, which s sends after combine_recv n, where it last read what
 *       combine n brought. Rows of combine are free.
 *   (3) When a replica writes finished rows n + 1 into its sibling's memory (in combine_recv n +
 * 1), it has the sibling's combine header n + 1, sent after the sibling's combine_recv n. (4)
 * Staging of dispatch n (sources of puts) is free after the own combine_recv n: the combine headers
 * of all ranks say that they have received dispatch n. Staging of combine n is free after the own
 * dispatch_recv n + 1: the dispatch headers of all ranks say that they have finished combine_recv
 * n. Staging of finished rows n is written in combine_recv n + 1, after the siblings' combine
 * headers n + 1, sent after they received rows n.
 *
 * Rows in place. Where ranks see each other's heaps, rows of dispatch are not put: the receiver
 * reads them in the sender's staging, once the header says that they are there. It does so in
 * dispatch_recv, before its combine header, so (4) holds as it stands.
 *
 * Tokens in place (layout FLAT_IN_PLACE). Rows of dispatch are always put, also to ranks that would
 * see them, and own rows are packed where they land: one base serves all. The caller reads them
 * between dispatch_recv n and the call of combine_send n, and the combine header n leaves in that
 * call, so (1) holds as it stands: it is the caller now who last read what dispatch n brought. The
 * own landing place is staging as well; it has one writer, this rank, which packs n + 1 after its
 * combine_recv n (4).
 *
 * Results in place (config.expert_y_in_place). expert_y lies in the heap of the rank that made it,
 * and the owner of a token, where it sees that heap, reads it there, in combine_recv. A partial sum
 * is made over the first of its rows. What travels is the list of rows, one put for each peer,
 * which lands, is staged and is read like the results that it replaces. Owners that do not see
 * expert_y get rows put from it: it is their staging. expert_y of combine n may be written again
 * after the own dispatch_recv n + 1, as staging of combine may: the dispatch headers of all ranks
 * say that they have finished combine_recv n.
 *
 * One copy per node (config.node_copies). A row from rank s to ranks of another node goes to one of
 * them, the relay, which the node and s determine: row g * max_tokens + t of the relay's heap. The
 * relay's transport adds to sig_rows[s] of every rank of the node that has an expert of the token;
 * they read the row in the relay's heap, having learnt from their own headers that it is for them.
 * Headers, combine, and rows inside a node stay as they are. What changes in the argument:
 *   - The row's place has one writer, the replica that owns the token, as before: whether it goes
 * to the relay for the relay itself or for others, it is the same bytes at the same place, once.
 *     Ranks of the relay's own node that send to the relay are other instances or other tokens, so
 *     other places.
 *   - (1) must hold for every reader, not for the place's owner alone. The readers of a row are
 * ranks of the relay's node; each reads it in dispatch_recv n, before it sends its combine header
 * n. When s writes the place again, in dispatch n + 1, it has finished combine_recv n, so it has
 * the combine headers n of all ranks, every reader's among them. The relay itself may be far behind
 *     or ahead as the protocol allows; none of its calls is awaited or needed.
 *   - The converse, that nobody reads too early: a reader waits for sig_rows[s] to reach the number
 *     of rows that s has announced to it so far. Each of its rows adds one to the word after the
 *     bytes lie in the relay's heap, and no row of s for this rank comes another way, so the total
 *     says that all are there.
 *   - A signal word still has one writing rank, and its signals one path: sig_rows[s] of a rank is
 *     written for s directly when both are on one node, else through the one relay.
 *   - (4), staging: a put to a node has at least one target, whose combine header n follows its
 *     signal, which follows the reading of the source. */
#ifndef YARD_EP_IMPL_H
#define YARD_EP_IMPL_H

#include <yard/ep.h>

#include "base/base.h"
#include "base/convert.h"
#include "fabric/fabric.h"

enum { YARD_EP_MAX_RANKS = 4096, YARD_EP_MAX_TOP_K = 32, YARD_EP_MAX_TP = 64 };

/* What a source tells a rank about one dispatch: which of its tokens come, and their experts. */
typedef struct ep_header {
    uint64_t epoch;
    uint64_t routing_hash; /* of the instance's whole routing: replicas must agree */
    uint32_t n_tokens;     /* of the instance */
    uint32_t n_sent;       /* entries that follow */
    uint8_t reserved[40];
} ep_header;

/* One entry: token, then top_k expert ids, then top_k weights; entry_words() words of 4 bytes. */

typedef enum round_state {
    ROUND_IDLE,
    ROUND_DISPATCH_SENT,
    ROUND_DISPATCHED,
    ROUND_COMBINE_SENT
} round_state;

/* Offsets in the heap; signal words are arrays of n_ranks, one writer each. */
typedef struct round_heap {
    yard_sym headers;                  /* [n_ranks] of header_bytes */
    yard_sym dispatch_rows;            /* [dp * max_tokens] of dispatch_row_bytes */
    yard_sym combine_rows;             /* [max_tokens * top_k] of combine_row_bytes */
    yard_sym output_rows;              /* [max_tokens] of output_row_bytes; tp > 1 */
    yard_sym sig_header, sig_rows;     /* dispatch */
    yard_sym sig_combine, sig_results; /* combine: headers, rows */
    yard_sym sig_output;               /* finished rows from siblings */
    yard_sym stage_headers;            /* [n_ranks] */
    yard_sym stage_rows;               /* [max_tokens] */
    yard_sym stage_combine;            /* [routed rows]; only for transports that do not copy */
    yard_sym stage_output;             /* [max_tokens] */
    /* expert_y_in_place: results, dense; and for each peer the rows of them that it reads, here,
     * in order of (token, k) */
    yard_sym expert_y;                  /* [routed rows] */
    yard_sym result_lists, stage_lists; /* [n_ranks] of list_bytes */
} round_heap;

/* A token that this rank's experts work on. */
typedef struct arrival {
    uint32_t group, token;
    const int32_t *entry; /* its header entry */
    const uint8_t *row;   /* its dispatch row, in the heap */
} arrival;

struct yard_ep_round {
    yard_ep *ep;
    round_heap heap;
    round_state state;
    uint32_t limit;                                    /* of tokens; 0: config.max_tokens */
    uint64_t epoch;                                    /* dispatches so far */
    uint64_t *rows_seen, *results_seen, *outputs_seen; /* [n_ranks] totals awaited so far */

    /* this instance's routing, kept from the send */
    uint32_t n_tokens;
    int32_t *expert; /* [max_tokens, top_k] */
    float *weight;

    /* what arrived: ascending (instance, token) */
    arrival *arrivals; /* [dp * max_tokens] */
    uint32_t n_arrivals;
    int32_t *first_row; /* [n_local + 1] first expert-major row of each local expert, aligned */
};

/* What carries out the calls: ranks as processes on CPUs (ep/cpu) or GPUs (ep/cuda). The calls were
 * checked to be in order before they get here. */
typedef struct ep_backend {
    const char *name;
    const char *transport; /* of the group's own fabric; NULL: the fabric chooses */
    yard_status (*check)(const yard_ep *ep, yard_error *err); /* what this backend cannot do */
    size_t (*heap_bytes)(const yard_ep *ep, bool copies);
    yard_status (*open)(yard_ep *ep, yard_error *err); /* the fabric is there; sets ep->rounds */
    void (*close)(yard_ep *ep);                        /* half-opened ones too; may be NULL */
    void (*look)(yard_ep *ep); /* sets ep->status if something failed meanwhile; may be NULL */
    const void *(*expert_x)(const yard_ep_round *round, size_t *pitch_bytes,
                            size_t *scale_at_bytes); /* rows in place only */
    yard_status (*dispatch_send)(yard_ep_round *round, const void *x, const float *x_scale,
                                 const int32_t *expert, const float *weight,
                                 const int32_t *n_tokens, yard_stream stream);
    yard_status (*dispatch_recv)(yard_ep_round *round, void *expert_x, float *expert_x_scale,
                                 int32_t *expert_count, int32_t *row_index, yard_stream stream);
    yard_status (*combine_send)(yard_ep_round *round, const void *expert_y, yard_stream stream);
    yard_status (*combine_recv)(yard_ep_round *round, void *y, yard_stream stream);
} ep_backend;

extern const ep_backend yard_ep_cpu, yard_ep_cuda;

struct yard_ep {
    yard_ep_config config;
    const ep_backend *backend;
    void *impl; /* of the backend */
    yard_fabric *fabric;
    bool owns_fabric;
    const yard_convert *convert;
    uint32_t rank, n_ranks, dp, group, replica, n_local, first_expert;
    uint32_t n_groups_cols; /* scales of a row */
    size_t header_bytes, entry_bytes;
    size_t payload_bytes, scale_bytes, dispatch_row_bytes; /* dispatch: codes, scales, row */
    size_t combine_row_bytes, output_row_bytes, list_bytes;
    uint64_t routed_rows;

    yard_ep_round *rounds; /* [n_rounds] */
    void *block;           /* memory under the rounds' arrays and scratch */
    int32_t *cursor;       /* [n_local] */
    float *row_f32;        /* [hidden] */
    uint8_t *target;       /* [n_ranks] marks */
    uint32_t *used;        /* [n_experts] number of the checked token that named the expert last */
    uint32_t n_checked;    /* tokens checked so far */
    uint32_t *relay_to;    /* [n_ranks] whose heap this rank's rows for that rank go to */
    uint32_t *relay_from;  /* [n_ranks] whose heap that rank's rows for this rank lie in */
    bool *seen;            /* [n_ranks] another rank whose heap is seen here, and sees this one */
    bool *in_place;        /* [n_ranks] results between that rank and this one stay in place */
    uint32_t *n_listed;    /* [n_ranks] of a list: entries written, or read, so far */

    yard_status status; /* sticky */
    yard_error err;
    yard_ep_stats stats;
    char description[256];
};

size_t yard_ep_align(size_t n); /* up to 64 */

/* What all ranks need equal, for comparison and for people. */
typedef struct ep_signature {
    uint64_t hash;
    char text[376]; /* "name value, name value" */
} ep_signature;

/* The values need not be valid. */
void yard_ep_sign(const yard_ep_config *c, ep_signature *out);

/* Collective over ep->fabric, which is borrowed: compares the ranks' configs by means of the first
 * yard_ep_agree_bytes() of the group's heap, which nothing else uses. Errors: YARD_EINVAL (a
 * difference, a heap that had a group before), those of waits. */
yard_status yard_ep_agree(const yard_ep *ep, yard_error *err);
size_t yard_ep_agree_bytes(uint32_t n_ranks);

static inline uint32_t ep_rank_of(const yard_ep *ep, int32_t expert)
{
    return (uint32_t)expert / ep->n_local;
}

static inline uint32_t ep_owner_of(const yard_ep *ep, uint32_t group, uint32_t token)
{
    return group * ep->config.tp + token % ep->config.tp;
}

static inline void *ep_heap(const yard_ep *ep, yard_sym at)
{
    return yard_fabric_local(ep->fabric, at);
}

static inline const int32_t *ep_entry_experts(const int32_t *entry)
{
    return entry + 1;
}

static inline const float *ep_entry_weights(const yard_ep *ep, const int32_t *entry)
{
    return (const float *)(const void *)(entry + 1 + ep->config.top_k);
}

/* Expert-major row of each (arrival, k), by walking arrivals in order: sets cursor to first_row. */
void yard_ep_start_rows(yard_ep_round *round);

/* Local expert number, or -1 when the id is not one of this rank's. */
static inline int32_t ep_local_expert(const yard_ep *ep, int32_t expert)
{
    return expert >= 0 && ep_rank_of(ep, expert) == ep->rank ? expert - (int32_t)ep->first_expert
                                                             : -1;
}

/* The sticky status; then whether the round is in the wanted state. */
yard_status yard_ep_enter(yard_ep_round *round, round_state want, const char *call);

yard_status yard_ep_cpu_dispatch_send(yard_ep_round *round, const void *x, const float *x_scale,
                                      const int32_t *expert, const float *weight,
                                      const int32_t *n_tokens, yard_stream stream);
yard_status yard_ep_cpu_dispatch_recv(yard_ep_round *round, void *expert_x, float *expert_x_scale,
                                      int32_t *expert_count, int32_t *row_index,
                                      yard_stream stream);
yard_status yard_ep_cpu_combine_send(yard_ep_round *round, const void *expert_y,
                                     yard_stream stream);
yard_status yard_ep_cpu_combine_recv(yard_ep_round *round, void *y, yard_stream stream);

/* Records a failure of the fabric under the name of the call. sig: the header words [n_ranks] that
 * the call waited for, so that every rank that is missing is named; 0 and a call that only sends
 * names the first lost one. */
yard_status yard_ep_broken(yard_ep_round *round, yard_status st, const char *call, yard_sym sig);

/* Sends one row or header; counts bytes to other ranks. */
yard_status yard_ep_put(yard_ep *ep, yard_sym dst, const void *src, size_t n_bytes, yard_sym sig,
                        uint64_t value, uint32_t peer);
/* One row to a relay on another node, a signal of 1 to each target there. */
yard_status yard_ep_put_node(yard_ep *ep, yard_sym dst, const void *src, size_t n_bytes,
                             uint32_t relay, yard_sym sig, const uint32_t *targets,
                             uint32_t n_targets);

#endif
