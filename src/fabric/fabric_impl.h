/* What the files of the fabric room share. A transport (shm.c, tcp.c, libfabric.c) needs the
 * struct, the stages, yard_rendezvous_exchange() and, if it speaks over sockets,
 * yard_mesh_connect(). */
#ifndef YARD_FABRIC_IMPL_H
#define YARD_FABRIC_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include "fabric/fabric.h"
#include "fabric/wire.h"

enum {
    YARD_MAX_RANKS = 4096,
    YARD_HOST_BYTES = 128,
    YARD_PEER_NAME_BYTES = 192,
    YARD_CONFIG_TEXT_BYTES = 400,
    YARD_JOB_ID_BYTES = 16
};

typedef enum yard_peer_state {
    YARD_PEER_LIVE,
    YARD_PEER_LEFT, /* it destroyed its fabric; what it sent before may still be on the way */
    YARD_PEER_LOST  /* gone without a word: process ended, machine or link lost */
} yard_peer_state;

/* Another rank, or this one. Filled by the rendezvous; fixed afterwards but for the state. */
typedef struct yard_peer {
    uint32_t node; /* counted from 0 in order of first rank */
    uint32_t pid;
    char host[YARD_HOST_BYTES];      /* its sockets listen there (config.bind_host) */
    uint16_t port;                   /* of its TCP listener for start-up; 0: it has none */
    char unix_name[16];              /* of its abstract unix listener */
    char name[YARD_PEER_NAME_BYTES]; /* for messages: "rank 3 (pid 4711 on host, 10.0.0.2:40123)" */
    int control_fd;                  /* -1 for this rank and in custom fabrics */
    _Atomic uint32_t state;          /* yard_peer_state */
    _Atomic int lost_errno;          /* why it is lost; 0: end of stream */
    _Atomic uint32_t gave_up_on;     /* rank whose loss it told of; UINT32_MAX: none */
} yard_peer;

/* A step of the collective start. Each has a deadline of config.start_timeout_us and tells who is
 * missing when it takes long. */
typedef struct yard_stage {
    const char *name; /* "rendezvous", "peers", "heap", "ready" */
    uint64_t begun_us, next_notice_us;
    yard_deadline until;
    bool given_up; /* by config.gives_up */
} yard_stage;

struct yard_fabric {
    /* Filled before ops->open. */
    const yard_fabric_ops *ops;
    yard_fabric_config config; /* strings point into text, or are NULL */
    struct {
        char rendezvous[256], secret[256], bind_host[YARD_HOST_BYTES];
        char transport[16], provider[64], config_text[YARD_CONFIG_TEXT_BYTES];
    } text;
    uint32_t rank, n_ranks, n_nodes;
    size_t heap_bytes, copying_heap_bytes; /* the latter is taken where puts copy at once */
    yard_peer *peers;                      /* [n_ranks] */
    uint8_t job_id[YARD_JOB_ID_BYTES];     /* random, equal on all ranks, new for each group */
    char reason[160];
    uint32_t n_spins; /* of a wait before ops->sleep */

    /* Set by ops->open. */
    void *impl;
    uint8_t *heap; /* [heap_bytes], zeroed, touched, 64-byte aligned */

    /* The heap of a device beside that one (config.device_heap_bytes). */
    const yard_fabric_ops *beside; /* NULL: none */
    void *beside_impl;             /* its, as impl is of ops */

    /* While starting. */
    yard_stage stage;
    struct yard_star *star;      /* connections to rank 0; NULL once started */
    int listen_unix, listen_tcp; /* -1 once started */

    /* The caller's thread. */
    yard_error err;
    yard_fabric_stats stats;

    /* The control thread watches the peers' connections. */
    pthread_t control_thread;
    pthread_mutex_t control_lock; /* reading a notice and entering what it says */
    bool control_runs, gave_up;
    int control_epoll, control_stop;       /* -1: none */
    _Atomic uint32_t first_lost;           /* rank, or UINT32_MAX */
    _Atomic uint32_t *_Atomic device_lost; /* as yard_fabric_device_lost(); NULL: nobody asked */
    _Atomic uint32_t n_disturbed;          /* ranks lost or left, after their state; interrupts */
    uint32_t n_disturbed_seen;             /* by the waiting caller, before it looked at its peer */

    /* What a wait for any word waits for. */
    bool (*ready)(void *ctx);
    void *ready_ctx;
};

/* transports */

extern const yard_fabric_ops yard_fabric_shm, yard_fabric_tcp, yard_fabric_mixed,
    yard_fabric_libfabric, yard_fabric_nvlink, yard_fabric_nvshmem, yard_fabric_nvlink_nvshmem;

/* Gives back what yard_fabric_device_lost() made; the control thread has ended. */
void yard_device_lost_free(yard_fabric *f);

/* True once nothing more is to be expected of a rank: it was lost, or left. Any thread. */
static inline bool yard_peer_gone(const yard_fabric *f, uint32_t rank)
{
    return atomic_load_explicit(&f->peers[rank].state, memory_order_acquire) != YARD_PEER_LIVE;
}

/* Enters that a rank has left or is lost, once, and wakes the waiter. Any thread. why: an errno, 0:
 * end of stream. */
void yard_peer_mark(yard_fabric *f, uint32_t rank, yard_peer_state state, int why);

/* YARD_EPEER with the message for a rank that is gone in f->err. The caller's thread. */
yard_status yard_peer_fail(yard_fabric *f, uint32_t rank);

/* Tells the peers, once, which rank this one gave up on. They will find this one gone, or waiting
 * no more, and can then name the rank that it began with. */
void yard_peer_give_up(yard_fabric *f, uint32_t rank);

/* "" or " after it gave up on rank 2", for a message that blames a rank. */
void yard_peer_reason(yard_fabric *f, uint32_t rank, char *text, size_t n_text);

/* The signal word at a heap offset that was checked. */
static inline _Atomic uint64_t *yard_signal_word(const yard_fabric *f, yard_sym sig)
{
    return (_Atomic uint64_t *)(void *)(f->heap + sig);
}

/* The copy loop of puts: memcpy's contract, and as fast when source and destination lie differently
 * to the cache line. */
void yard_copy(void *dst, const void *src, size_t n_bytes);

/* start */

/* A new stage with a full deadline. name is a string literal. */
void yard_stage_begin(yard_fabric *f, const char *name);

/* Tells config.notice that the stage still waits for whom ("ranks 2, 5-7"), at most every few
 * seconds. Returns how long a poll() may sleep until the next notice or the deadline, in ms; 0 once
 * the deadline has passed or the caller gives up. */
int yard_stage_wait_ms(yard_fabric *f, const char *whom);

/* How long the stage has been waited for, for messages once yard_stage_wait_ms() was 0, and the
 * status then. */
double yard_stage_seconds(const yard_fabric *f);
yard_status yard_stage_status(const yard_fabric *f);

/* Connects this rank to rank 0, checks that all agree on the config, fills peers, job_id, n_nodes.
 */
yard_status yard_rendezvous_open(yard_fabric *f, yard_error *err);
void yard_rendezvous_close(yard_fabric *f); /* NULL star is fine */

/* All-gather during the start (ops->open): every rank gives n_bytes, equal on all ranks and at most
 * 4096, and gets all of them in order of rank. Also a barrier: on return every rank has called it.
 * Fails on all ranks when one fails, leaves or misses the stage's deadline. blob may be NULL with 0
 * bytes.
 *   all  [n_ranks][n_bytes], out. */
yard_status yard_rendezvous_exchange(yard_fabric *f, const void *blob, size_t n_bytes, void *all,
                                     yard_error *err);

/* YARD_ENOMEM when the heaps of this node's ranks together do not fit into memory. Before the first
 * of them is made. */
yard_status yard_memory_check(const yard_fabric *f, yard_error *err);

/* Tells the other ranks, through rank 0, that this one fails; err is its message. */
void yard_rendezvous_abort(yard_fabric *f, const yard_error *err);

/* After a peer's connection broke: why, if that is known to rank 0 or about to be, into err, which
 * is left alone otherwise. */
void yard_rendezvous_reason(yard_fabric *f, yard_error *err);

/* YARD_EPEER or what the others report once another rank has failed; for loops that wait for
 * something else. Watch yard_rendezvous_fd() for reading beside it. Does not block. */
yard_status yard_rendezvous_check(yard_fabric *f, yard_error *err);
int yard_rendezvous_fd(const yard_fabric *f); /* -1 with one rank */

/* How ranks of one node are connected; ranks of different nodes always are by TCP. */
typedef enum yard_mesh_inside { YARD_MESH_UNIX, YARD_MESH_TCP, YARD_MESH_NONE } yard_mesh_inside;

/* Connects every rank with every other by one authenticated stream socket, TCP with no delay.
 * Non-blocking, close-on-exec. Collective; a transport may call it in open for connections of its
 * own. channel tells several meshes of one fabric apart (0: control).
 *   fds  [n_ranks], out; -1 for this rank, those that it has no connection with, and, after an
 *        error, for all. */
yard_status yard_mesh_connect(yard_fabric *f, uint32_t channel, yard_mesh_inside inside, int *fds,
                              yard_error *err);

/* control connections */

yard_status yard_control_connect(yard_fabric *f, yard_error *err); /* the mesh, channel 0 */
yard_status yard_control_start(yard_fabric *f, yard_error *err);   /* the thread */
void yard_control_stop(yard_fabric *f);  /* joins the thread; no ops->wake afterwards */
void yard_control_close(yard_fabric *f); /* says goodbye to the peers and closes */

#endif
