/* What the files of `switchyard bench ep` share. A *peer* is a way to exchange rows: a transport of
 * the library, or something it is compared with. A *group* of rank processes measures one peer in
 * one mode and layout, for all numbers of tokens. */
#ifndef YARD_CLI_BENCH_EP_H
#define YARD_CLI_BENCH_EP_H

#include <stdatomic.h>
#include <sys/types.h>

#include "cli/bench.h"
#include "cli/bench_ep_data.h"

enum { YARD_BENCH_EP_MAX_RANKS = 64, YARD_BENCH_EP_MIN_REPEATS = 5 };
/* A case ends after so long, whatever --repeat says, once it has YARD_BENCH_EP_MIN_REPEATS. */
enum { YARD_BENCH_EP_CASE_US = 3000000 };
enum { YARD_BENCH_EP_TIMEOUT_US = 60000000 };
/* Ranks that come no further for so long are ended; when another one failed, much sooner. */
enum { YARD_BENCH_EP_STUCK_US = 2 * YARD_BENCH_EP_TIMEOUT_US, YARD_BENCH_EP_LEFT_US = 10000000 };

enum { YARD_BENCH_EP_DISPATCH, YARD_BENCH_EP_COMBINE, YARD_BENCH_EP_PAIR, YARD_BENCH_EP_N_PHASES };

typedef struct yard_bench_ep_times {
    double p50_us, p99_us, min_us, bytes;
    double wire_bytes; /* between this rank and others, the larger of both ways */
} yard_bench_ep_times;

/* What a group found for one number of tokens: of each figure the largest of all ranks. */
typedef struct yard_bench_ep_result {
    yard_bench_ep_times phase[YARD_BENCH_EP_N_PHASES];
    bool verified;
    char device[64]; /* rank 0's; "": the processor */
} yard_bench_ep_result;

typedef struct yard_bench_ep_settings {
    uint32_t n_ranks, hidden, n_experts, top_k;
    bool grouped; /* routing */
    uint64_t n_repeats;
    yard_bench_list tokens;
} yard_bench_ep_settings;

/* What a rank process knows; dispatch and combine may leave sizes of their own in impl. */
typedef struct yard_bench_ep_rank {
    const yard_bench_ep_settings *settings;
    const struct yard_bench_ep_peer *peer;
    uint32_t rank, max_tokens;
    bool partial;
    yard_bench_ep_layout layout;
    char device[64];        /* the name of its GPU; "": none */
    const char *host;       /* address of this rank */
    const char *rendezvous; /* of the library's transports */
    _Atomic uint32_t *port; /* shared by the ranks; 0 until somebody writes it */
    uint8_t *group_id;      /* [YARD_EP_NCCL_ID_BYTES] shared by the ranks; port says it is there */
    yard_bench_ep_data *data; /* of the current number of tokens */
    void *impl;
    void *group; /* of bench_ep_ranks.c */
} yard_bench_ep_rank;

/* For measure: repeats to take when one lasts us, at most n_repeats. Every rank calls it; the
 * first call of a case decides for all ranks and later calls. 0: another rank failed. */
uint32_t yard_bench_ep_agree(void *rank, double us);

/* Calls come in this order: open, then for each number of tokens prepare and many exchanges, then
 * close, also after a failed open. dispatch and combine are what is timed. */
typedef struct yard_bench_ep_peer {
    const char *name, *variant; /* variant: NULL, or what tells rows of one name apart */
    const char *launch;         /* on a GPU: how the calls get there; NULL: no GPU */
    bool single, cold;          /* call by call, not in a graph; other data pass before each call */
    uint32_t between_us;        /* of work on the whole GPU between a send and its receive */
    uint32_t send_sms;          /* that sends may fill; 0: all */
    bool network;               /* between network namespaces where that is possible */
    bool two_ranks, one_token;  /* it knows only that */
    bool two_nodes;             /* halves of the ranks are nodes: an even number, 4 at least */
    bool pair_only;             /* dispatch and combine mean nothing alone */
    yard_status (*open)(yard_bench_ep_rank *r, yard_error *err);
    yard_status (*prepare)(yard_bench_ep_rank *r, yard_error *err);
    yard_status (*dispatch)(yard_bench_ep_rank *r, yard_error *err);
    yard_status (*combine)(yard_bench_ep_rank *r, yard_error *err);
    void (*experts)(
        yard_bench_ep_rank *r); /* between them, not timed; NULL: data has the results */
    /* the timed repeats where the device times them, samples_us as [phases, n_repeats], *n of them
     * taken; NULL: dispatch and combine are timed here */
    yard_status (*measure)(yard_bench_ep_rank *r, double *samples_us, uint32_t *n, yard_error *err);
    void (*poison)(yard_bench_ep_rank *r); /* spoils what an exchange must write */
    bool (*check)(yard_bench_ep_rank *r, yard_error *err);
    void (*close)(yard_bench_ep_rank *r);
    double (*bytes)(const yard_bench_ep_rank *r, int phase); /* NULL: those of the layout */
} yard_bench_ep_peer;

extern const yard_bench_ep_peer yard_bench_ep_shm, yard_bench_ep_shm_copied, yard_bench_ep_tcp,
    yard_bench_ep_libfabric, yard_bench_ep_rank_copies, yard_bench_ep_node_copies,
    yard_bench_ep_memcpy, yard_bench_ep_socket, yard_bench_ep_pingpong;
enum { YARD_BENCH_EP_N_LAUNCHES = 5 };
extern const yard_bench_ep_peer yard_bench_ep_nvlink[YARD_BENCH_EP_N_LAUNCHES],
    yard_bench_ep_nvshmem[YARD_BENCH_EP_N_LAUNCHES], yard_bench_ep_padded_nccl,
    yard_bench_ep_padded_nvshmem;
/* Of yard/ep.h. */
uint32_t yard_bench_ep_layout_of(const yard_bench_ep_rank *r);
/* In ranks that drive a GPU: rank r that of number r modulo their number. */
yard_status yard_bench_ep_open_device(yard_bench_ep_rank *r, size_t impl_bytes, yard_error *err);

typedef struct yard_bench_ep_group {
    const yard_bench_ep_settings *settings;
    const yard_bench_ep_peer *peer;
    bool partial, namespaces;
    yard_bench_ep_layout layout;
} yard_bench_ep_group;

/* Starts the ranks, measures, and reaps them; nothing of them is left whatever happens.
 *   out     [settings->tokens.n]
 *   n_done  how many of out are there, also when a later one failed
 * Errors: YARD_ENOTSUP when the peer cannot be opened here; YARD_ETIMEDOUT names the rank that came
 * no further, and what it was at; else what a rank met. */
yard_status yard_bench_ep_run_group(const yard_bench_ep_group *g, yard_bench_ep_result *out,
                                    uint32_t *n_done, yard_error *err);

/* The same by the helper program ep_mpi under mpirun, one result for each number of tokens.
 * Errors: YARD_ENOTSUP when one of them is not there. */
yard_status yard_bench_ep_run_mpi(const yard_bench_ep_settings *settings, bool padded,
                                  yard_bench_ep_result *out, yard_error *err);

/* What the GPUs could do at best, printed as rows: the phases are the times of a flag, of stores
 * and of a copy. Errors: YARD_ENOTSUP (fewer GPUs than ranks, an odd number). *out is zero then. */
yard_status yard_bench_ep_run_limits(const yard_bench_ep_settings *settings, bool json,
                                     yard_bench_ep_result *out, yard_error *err);
/* By them, of a phase that moves what r says; -1 where they are not known. */
double yard_bench_ep_floor_us(const yard_bench_ep_result *limits, const yard_bench_ep_result *r,
                              int phase);
void yard_bench_ep_print_verdict(const yard_bench_ep_result *limits); /* for people */

/* network namespaces: ranks 0 and 1 on two "machines", joined by a veth pair */

bool yard_bench_ep_link_possible(void);
/* In a rank: a network namespace of its own, still without a link. */
yard_status yard_bench_ep_link_leave(yard_error *err);
/* In the parent, once both have left: the pair of devices. They vanish with the processes. */
yard_status yard_bench_ep_link_join(const pid_t *pids, yard_error *err);
/* In a rank: its device gets its address. */
yard_status yard_bench_ep_link_up(uint32_t rank, yard_error *err);
const char *yard_bench_ep_link_host(uint32_t rank); /* static storage */

#endif
