/* The libfabric transport: its state, shared by libfabric.c (traffic) and libfabric_open.c
 * (library, provider, objects). Both are empty but for an explanation when the headers of libfabric
 * are not there at build time; the library itself is loaded at run time. */
#ifndef YARD_FABRIC_LIBFABRIC_H
#define YARD_FABRIC_LIBFABRIC_H

#if __has_include(<rdma/fabric.h>)
#define YARD_HAVE_LIBFABRIC 1

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include "fabric/puts.h"

/* The functions that are real symbols; all others are called through the objects. */
typedef struct yard_lf_library {
    int (*getinfo)(uint32_t version, const char *node, const char *service, uint64_t flags,
                   const struct fi_info *hints, struct fi_info **info);
    void (*freeinfo)(struct fi_info *info);
    struct fi_info *(*dupinfo)(const struct fi_info *info);
    int (*fabric)(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
    const char *(*strerror)(int code);
    uint32_t (*version)(void);
} yard_lf_library;

typedef struct yard_lf_peer {
    uint32_t rank;
    fi_addr_t address;
    uint64_t base, key; /* of its heap: what is added to an offset, and the right to write there */
    yard_put_queue queue; /* what the provider did not take yet */
} yard_lf_peer;

/* The registered memory is the heap, then (heap_bytes rounded up to 64) a place that writes without
 * data go to, then one greeting word per rank: 1 once it has said hello, 2 once it has left. */
typedef struct yard_lf {
    yard_fabric *fabric;
    yard_lf_library lib;
    struct fi_info *info;
    struct fid_fabric *fid_fabric;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_cq *cq;
    struct fid_ep *ep;
    struct fid_mr *mr;
    void *desc;                  /* of the heap as a source; NULL when the provider wants none */
    size_t total_bytes;          /* of the registered memory */
    uint64_t nowhere, greetings; /* offsets in it */

    /* An immediate is {value, index of the signal word}: index_bits low bits and value_bits above
     * them, of what the provider carries. */
    uint32_t index_bits, value_bits;

    yard_lf_peer *peers;    /* [n_ranks] */
    pthread_mutex_t lock;   /* of everything of libfabric, the queues and the counts */
    uint32_t n_queued;      /* puts in all queues */
    uint64_t n_outstanding; /* writes without their completion */

    int cq_fd; /* readable when there may be completions; -1: the provider has none, so poll */
    int kick;  /* eventfd: makes the thread look around */
    pthread_t thread;
    bool runs;
    _Atomic bool stop;
    yard_driver driver;
} yard_lf;

/* Loads the library, chooses the provider, opens everything and exchanges addresses. */
yard_status yard_lf_open_objects(yard_lf *t, yard_error *err);

/* Once all ranks have reached each other: removes what would be left behind if this process died.
 */
void yard_lf_forget_name(yard_lf *t);

void yard_lf_close_objects(yard_lf *t); /* half-opened ones too */

#endif
#endif
