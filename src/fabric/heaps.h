/* The heaps of the ranks of one node, mapped by all of them (shm.c, mixed.c).
 *
 * A heap is an anonymous memory file, handed from process to process over the control sockets: it
 * has no name, so nothing is left when processes die, and a later group, with files of its own,
 * cannot be reached by a late write. Sealed, so that no peer can shrink it under a reader. In front
 * of the heap the file holds what the ranks of the node tell each other. */
#ifndef YARD_FABRIC_HEAPS_H
#define YARD_FABRIC_HEAPS_H

#include "fabric/fabric_impl.h"

enum { YARD_HEAP_CONTROL_BYTES = 8192 };

/* In front of a heap; of the rank that owns it. A transport uses what it needs. */
typedef struct yard_heap_control {
    _Alignas(64) _Atomic uint64_t sleeps_on;         /* as in shm.c; 0: awake */
    _Alignas(64) _Atomic uint32_t rung;              /* futex word */
    _Alignas(64) _Atomic bool blocked;               /* in poll(), with its event among the files */
    _Alignas(64) _Atomic bool ended[YARD_MAX_RANKS]; /* nothing more arrives from that rank here */
} yard_heap_control;

_Static_assert(sizeof(yard_heap_control) <= YARD_HEAP_CONTROL_BYTES,
               "control lies before the heap");

/* All zero is none. */
typedef struct yard_heaps {
    int fd;         /* own file, until all peers have it */
    size_t n_bytes; /* of a file */
    uint8_t **maps; /* [n_ranks]; NULL for ranks of other nodes */
    int *events;    /* [n_ranks] eventfds that ranks are woken by, -1: none; own one not owned */
} yard_heaps;

/* Collective within the node, in ops->open, once the control sockets are there: makes the own heap
 * and maps all. event: an eventfd that the others get beside the heap, or -1. Call close also after
 * a failure. */
yard_status yard_heaps_open(yard_fabric *f, yard_heaps *h, size_t heap_bytes, int event,
                            yard_error *err);
void yard_heaps_close(const yard_fabric *f, yard_heaps *h);

static inline bool yard_heaps_has(const yard_heaps *h, uint32_t rank)
{
    return h->maps && h->maps[rank];
}

static inline yard_heap_control *yard_heaps_control(const yard_heaps *h, uint32_t rank)
{
    return (yard_heap_control *)(void *)h->maps[rank];
}

static inline uint8_t *yard_heaps_heap(const yard_heaps *h, uint32_t rank)
{
    return h->maps[rank] + YARD_HEAP_CONTROL_BYTES;
}

static inline _Atomic uint64_t *yard_heaps_word(const yard_heaps *h, uint32_t rank, yard_sym sig)
{
    return (_Atomic uint64_t *)(void *)(yard_heaps_heap(h, rank) + sig);
}

#endif
