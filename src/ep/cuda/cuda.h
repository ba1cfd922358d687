/* What the files of ep/cuda share: the arguments of the kernels and the wrappers that launch them.
 *
 * Memory of one round in every rank's heap, with *slot* = instance * max_tokens + token:
 *   packets   16 bytes, three words of data and the epoch of the exchange: they prove their own
 *             arrival. Each rank sends one with its token count to every rank in every dispatch
 *             and every combine, and for each of its tokens one with the local expert ids as
 *             bytes (255: another rank's); where the token goes, in partial mode also its
 *             weights.
 *   rows      of dispatch: up to config.self_proving_tokens the place is filled with all-ones
 *             words (*poison*), which valid data never has; the reader polls the words themselves
 *             and poisons the place again. Above, a flag a row that holds the epoch, written with
 *             release once the row is there. A group with flags has places of the first kind as
 *             well, for exchanges whose limit allows no more tokens. Rows in place have neither:
 *             each source counts the blocks of its send that are through, in one word of every
 *             rank.
 *   results   of combine, self-proving at any size; likewise finished rows for siblings.
 *
 * Why nothing waits for a barrier: the argument of ep_impl.h, with packets for its headers. Two
 * things are added. (a) Poisoning again is a local store of a kernel that ends before this rank
 * sends its next packets, which the peer has before it writes the place again. (b) Finished rows
 * for a sibling leave only after its combine packet of the same exchange has come. Rows in place
 * are read by kernels of the caller, which stand between dispatch_recv and combine_send and have
 * ended before the latter sends its packets: to the argument they are a part of dispatch_recv.
 *
 * Epochs are two words of the device. Dispatch works on dispatch_epoch + 1, combine on
 * combine_epoch + 1. dispatch_send sets combine_epoch to dispatch_epoch, combine_send sets
 * dispatch_epoch to what it works on: no kernel writes a word that one beside it reads, and a graph
 * is replayed without the host.
 *
 * Early receive. A receive kernel may start while its send kernel still runs (programmatic
 * dependent launch): the send first waits for its predecessor and only then lets the receive start;
 * the receive waits for the send as its last act, so that its end still means that the send has
 * ended. Behind rows with flags stand two kernels, layout and fan_out. A kernel behind an early one
 * waits for both when it waits, so fan_out starts early as well and waits for counts that the
 * blocks of layout, and of the send, leave when they are done.
 *
 * Own share apart. A rank's partial sum of its own tokens travels nowhere. With few tokens it lands
 * like others' and proves itself, which is fastest. Of many tokens combine_send stores it behind
 * the landing places of all ranks, where nobody polls or poisons; the receive then starts when the
 * send has ended. In a graph where the receive stands right behind the send, it makes the own share
 * itself, from expert_y, beside a send that is narrowed to others' tokens and a third of the
 * multiprocessors. */
#ifndef YARD_EP_CUDA_H
#define YARD_EP_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#include <yard/status.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    EP_CUDA_MAX_RANKS = 384, /* their heaps are arguments of a kernel, which has 4 KB for them */
    EP_CUDA_RANK_WORDS = EP_CUDA_MAX_RANKS / 32, /* of a mask of ranks */
    EP_CUDA_MAX_TOP_K = 32,
    EP_CUDA_NO_EXPERT = 255, /* id byte of an expert that another rank has */
    EP_CUDA_MAX_LOCAL = 255, /* experts of a rank */
    EP_CUDA_THREADS = 448,   /* 14 warps: one vector of 16 bytes each is an FP8 row of 7168 */
    EP_CUDA_LAYOUT_THREADS = 512,
    EP_CUDA_LAYOUT_REGISTERS = 48,   /* a block fits beside two of dispatch_send */
    EP_CUDA_MAX_SELF_PROVING = 2048, /* id packets that a receiving block holds in shared memory */
    EP_CUDA_ROWS_IN_FLIGHT = 8,
    EP_CUDA_HALF_BLOCKS = 5, /* a multiprocessor, of half the threads and half the rows in flight */
    EP_CUDA_APART_RANKS = 4  /* up to so many keep their own share apart */
};

/* Receiving blocks a multiprocessor, likewise, where that many peers return results. */
#define EP_CUDA_APART_BLOCKS(n_peers) ((n_peers) == 1 ? 5 : 4)

/* What a kernel reports, in ep_cuda_error.what */
typedef enum ep_cuda_fault {
    EP_FAULT_NONE,
    EP_FAULT_TOKENS,   /* n_tokens outside 0 .. max_tokens; value */
    EP_FAULT_EXPERT,   /* an id outside -1 .. n_experts - 1; value */
    EP_FAULT_DISPATCH, /* dispatch_recv: nothing from rank value within the deadline */
    EP_FAULT_COMBINE,  /* combine_recv: the same */
    EP_FAULT_RESULT,   /* combine_recv: all ranks have answered, but no result of token value */
    EP_FAULT_OUTPUT,   /* combine_recv: finished rows of a sibling */
    EP_FAULT_SUM,      /* all-reduce: rows of rank value */
    EP_FAULT_LAYOUT,   /* dispatch_recv: this rank's layout; value is its number */
    EP_FAULT_LIMIT     /* dispatch_recv: rank value has another limit of tokens */
} ep_cuda_fault;

/* In host memory that the device writes once. */
typedef struct ep_cuda_error {
    uint32_t what; /* ep_cuda_fault, written last */
    int32_t value;
} ep_cuda_error;

/* In device memory, one a round; a group's error word is that of its first round. */
typedef struct ep_cuda_state {
    uint32_t dispatch_epoch, combine_epoch;
    uint32_t reserved[30];
    /* Of dispatches with flags: blocks of the send, and of the layout, that have done their work;
     * EP_CUDA_DONE a dispatch, whatever the grid is. Other dispatches of the group add it, too. */
    uint32_t n_sent, more[31];
    uint32_t n_laid_out, rest[31];
} ep_cuda_state;

/* What a put tells has come: a word for each of them, set to the epoch by the rank that puts it. */
typedef enum ep_cuda_signal {
    EP_SIGNAL_HEADER,  /* [n_ranks] header of a dispatch */
    EP_SIGNAL_COMBINE, /* [n_ranks] a combine has begun there */
    EP_SIGNAL_ROW,     /* [slots] */
    EP_SIGNAL_RESULT   /* [max_tokens][top_k] */
} ep_cuda_signal;

enum { EP_CUDA_DONE = 4096 };

/* How the values of x become the payload of a row. */
typedef enum ep_cuda_input { EP_INPUT_RAW, EP_INPUT_BF16, EP_INPUT_F32 } ep_cuda_input;

/* Of a division by multiplication; magic 0: by 1. */
typedef struct ep_cuda_divisor {
    uint32_t magic;
} ep_cuda_divisor;

/* Everything a kernel knows. By value: the constant bank holds it. */
typedef struct ep_cuda_args {
    /* offsets in every heap */
    uint64_t at_count[2]; /* [n_ranks] packets of dispatch, of combine */
    uint64_t at_ids;      /* [slots][n_id_packets] packets */
    uint64_t at_weights;  /* [slots][n_weight_packets] packets */
    uint64_t at_rows;     /* [slots] of row_pitch */
    uint64_t at_flags;    /* [slots] u32 */
    uint64_t at_sent;     /* [n_ranks] u32, with rows in place: of each source, EP_CUDA_DONE a
                             dispatch whose rows are all here; begins with all ones, one before 0 */
    uint64_t at_few_rows; /* [dp * few_tokens] of row_pitch, self-proving, in groups with flags */
    uint64_t at_results;  /* [max_tokens][top_k] of result_pitch */
    uint64_t at_outputs;  /* [max_tokens] of output_pitch; tp > 1 */
    /* with puts only; ids and weights then lie as header_pitch says */
    uint64_t at_signals;       /* u64 of each ep_cuda_signal, one writer each; all ones: none yet */
    uint64_t at_stage_headers; /* [n_ranks] of header_pitch */
    uint64_t at_stage_rows;    /* [own tokens] of row_pitch */
    uint64_t at_stage_results; /* [slots][top_k, or 1 with partial sums] of result_pitch */

    /* this rank's own memory */
    ep_cuda_state *state;
    uint32_t *error;           /* sticky, of the group */
    ep_cuda_error *host_error; /* host memory */
    const uint32_t *lost;      /* host memory: not 0 once a peer is lost */
    int32_t *kept_expert;      /* [max_tokens, top_k] of the last send */
    float *kept_weight;        /* [max_tokens, top_k] */
    uint32_t *kept_ranks;      /* [max_tokens] ranks that a token went to */
    uint32_t *kept_puts;  /* [max_tokens] bit mask of landing slots that are put to; with puts */
    uint32_t *kept_count; /* [1] tokens */
    int32_t *row_map;     /* [slots, top_k] row of each arrival's k, or -1 */
    uint32_t *ordinal;    /* [slots] of this rank among the ranks of the token */
    uint32_t *arrived;    /* [dp] tokens of each instance */
    int32_t *flat_row;    /* [slots]; flat only */

    uint32_t rank, n_ranks, tp, dp, group, replica;
    uint32_t n_rank_words; /* of a mask of n_ranks */
    uint32_t n_experts, n_local, top_k, hidden, max_tokens, row_align;
    uint32_t n_id_packets, n_weight_packets;   /* of a token; no weights: exact */
    uint32_t payload_bytes, n_vectors, n_cols; /* of a row of dispatch; n_cols: scales */
    uint32_t scale_at;                         /* in the row on the wire */
    uint32_t row_pitch, result_pitch, output_pitch;
    /* with puts: what a source tells this rank lies together, the packet with its token count, then
     * the id packets of its tokens; a row begins with its weight packets */
    uint32_t header_pitch, row_bytes;
    uint32_t n_heads; /* blocks of dispatch_send, the last ones, that put headers */
    uint32_t result_bytes, n_result_vectors;   /* of a row of combine */
    uint32_t poison_substitute;                /* for a payload word that looks like poison */
    ep_cuda_divisor by_local, by_dp, by_bound; /* n_local, dp, bound */
    uint64_t timeout_ns;
    bool flat, in_place; /* flat: rows are copied out */
    bool ue8m0, output_bf16;
    uint32_t no_bits; /* 0: see load_packet */

    /* this call */
    uint32_t bound;        /* no instance has more tokens */
    uint32_t row_slots;    /* of an instance, rows of dispatch: max_tokens, or few_tokens */
    bool in_flagged_group; /* this dispatch, whose rows have no flags */
    uint32_t part_vectors; /* of a row, which block (., y) takes from y * part_vectors on */
    uint32_t n_readable;   /* rows of x, expert and weight that may be read early */
    bool wide;             /* rows of the caller's buffers can be accessed by vectors */
    bool early;            /* launched before the send has ended */
    bool lets_next_start;  /* the kernel behind this one may be launched at once */
    /* combine: instances that combine_send returns results to, others' first */
    uint32_t n_served;
    ep_cuda_divisor by_served;
    bool own_apart; /* combine: this rank's own share does not land: see the top */
    const void *x;
    const float *x_scale;
    const int32_t *expert;
    const float *weight;
    const int32_t *n_tokens;
    void *expert_x;
    float *expert_x_scale;
    int32_t *expert_count, *row_index;
    const void *expert_y;
    void *y;
    uint32_t delay_seed; /* tests: blocks dawdle; 0: not */

    /* last: what small groups use of the arguments lies together */
    uint32_t stores[EP_CUDA_RANK_WORDS]; /* mask of the ranks that are stored to */
    uint8_t *heap[EP_CUDA_MAX_RANKS];    /* of each rank, as this device reaches it; NULL: put to */
} ep_cuda_args;

typedef struct ep_cuda_launch {
    uint32_t n_blocks, n_parts, n_threads; /* a grid of n_blocks x n_parts */
    size_t shared_bytes;
    cudaStream_t stream;
    bool half_flight; /* combine_send: few rows in flight a thread, many threads */
    bool overlap;     /* may start before its predecessor has ended */
} ep_cuda_launch;

/* Each returns what the launch returned. flags: rows with a flag each instead of self-proving. The
 * sources of the kernels are compiled twice, for peers that are all stored to and, with
 * YARD_EP_NVSHMEM, for those of which some are put to. */
cudaError_t yard_ep_cuda_launch_dispatch_send(const ep_cuda_args *a, ep_cuda_input input,
                                              bool flags, const ep_cuda_launch *l);
cudaError_t yard_ep_cuda_launch_dispatch_recv(const ep_cuda_args *a, const ep_cuda_launch *l);
cudaError_t yard_ep_cuda_launch_layout(const ep_cuda_args *a, const ep_cuda_launch *l);
cudaError_t yard_ep_cuda_launch_fan_out(const ep_cuda_args *a, const ep_cuda_launch *l);
cudaError_t yard_ep_cuda_launch_combine_send(const ep_cuda_args *a, bool bf16, bool exact,
                                             const ep_cuda_launch *l);
cudaError_t yard_ep_cuda_launch_combine_recv(const ep_cuda_args *a, bool bf16, bool exact,
                                             const ep_cuda_launch *l);

typedef struct ep_cuda_kernels {
    size_t args_bytes; /* sizeof(ep_cuda_args): libraries that do not fit together are refused */
    cudaError_t (*dispatch_send)(const ep_cuda_args *a, ep_cuda_input input, bool flags,
                                 const ep_cuda_launch *l);
    cudaError_t (*dispatch_recv)(const ep_cuda_args *a, const ep_cuda_launch *l);
    cudaError_t (*layout)(const ep_cuda_args *a, const ep_cuda_launch *l);
    cudaError_t (*fan_out)(const ep_cuda_args *a, const ep_cuda_launch *l);
    cudaError_t (*combine_send)(const ep_cuda_args *a, bool bf16, bool exact,
                                const ep_cuda_launch *l);
    cudaError_t (*combine_recv)(const ep_cuda_args *a, bool bf16, bool exact,
                                const ep_cuda_launch *l);
} ep_cuda_kernels;

#define EP_CUDA_KERNELS                                                                            \
    {                                                                                              \
        sizeof(ep_cuda_args), yard_ep_cuda_launch_dispatch_send,                                   \
            yard_ep_cuda_launch_dispatch_recv, yard_ep_cuda_launch_layout,                         \
            yard_ep_cuda_launch_fan_out, yard_ep_cuda_launch_combine_send,                         \
            yard_ep_cuda_launch_combine_recv                                                       \
    }

#ifdef __cplusplus
}
#endif

#endif
