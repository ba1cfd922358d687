/* What a pod and its rank processes tell each other, and the frames it travels in: a pair of
 * sockets, one parent and one rank, both of the same program on the same machine, so structs go as
 * they are. Neither side blocks in a send; what a socket does not take waits in a buffer.
 *
 *   pod to rank                      rank to pod
 *   FORM    join a new group         READY     no group: waits for FORM
 *   SUBMIT  a request                PROGRESS  of a start stage
 *   ABORT   the end of one           WARNING   a line for people
 *   LEAVE   the group is over        FORMED    serves in a group
 *   STATS   tell them                EVENTS    of one step
 *   PAGES   say all anew             PAGES     what the cache holds now, and what no longer
 *   FINISH  no request comes now     REPORT    after each step
 *   QUIT    end                      REFUSED   a request that the engine does not take
 *                                    STATS
 *                                    FINISHED  so has the whole group
 *                                    LOST      why the group is over here; READY follows
 *                                    FAILED    cannot work at all; ends */
#ifndef YARD_ENGINE_POD_WIRE_H
#define YARD_ENGINE_POD_WIRE_H

#include <yard/engine.h>

#include "engine/report.h"

typedef enum yard_frame_kind {
    YARD_FRAME_FORM = 1,
    YARD_FRAME_SUBMIT,
    YARD_FRAME_ABORT,
    YARD_FRAME_LEAVE,
    YARD_FRAME_STATS,
    YARD_FRAME_FINISH,
    YARD_FRAME_FINISHED,
    YARD_FRAME_QUIT,
    YARD_FRAME_READY,
    YARD_FRAME_PROGRESS,
    YARD_FRAME_WARNING,
    YARD_FRAME_FORMED,
    YARD_FRAME_EVENTS,
    YARD_FRAME_PAGES,
    YARD_FRAME_REPORT,
    YARD_FRAME_REFUSED,
    YARD_FRAME_LOST,
    YARD_FRAME_FAILED
} yard_frame_kind;

/* FORM. */
typedef struct yard_form_frame {
    char rendezvous[256];
    bool first; /* no group of this pod has served yet */
} yard_form_frame;

/* ABORT; REFUSED with the message behind it. */
typedef struct yard_id_frame {
    uint64_t id; /* the pod's */
    uint32_t choice;
} yard_id_frame;

/* FORMED, with the engine's description behind it. */
typedef struct yard_formed_frame {
    yard_page_hash page_root;
} yard_formed_frame;

/* PROGRESS. */
typedef struct yard_progress_frame {
    char what[32];
    uint64_t done, total;
} yard_progress_frame;

/* EVENTS: yard_event with the pod's ids, each with its log-probabilities behind it. PAGES (to the
 * pod): an array of yard_page_event. REPORT: yard_engine_report; its n_seen is the id of the last
 * request received in this generation. WARNING, LOST, FAILED: text. STATS (to the pod):
 * yard_engine_stats. */

/* A received frame; data points into the wire's buffer until the next call. */
typedef struct yard_frame {
    yard_frame_kind kind;
    const void *data;
    size_t n_bytes;
} yard_frame;

typedef struct yard_wire {
    int fd; /* non-blocking; owned */
    uint8_t *in, *out;
    size_t n_in, in_at, in_capacity;    /* [in_at, n_in) is received and not taken */
    size_t n_out, out_at, out_capacity; /* [out_at, n_out) is to be sent */
    bool ended;                         /* the other side is gone */
} yard_wire;

void yard_wire_open(yard_wire *w, int fd);
void yard_wire_close(yard_wire *w);

/* Queues a frame of two parts and sends what the socket takes. False: no memory, or the other side
 * is gone. */
bool yard_wire_send(yard_wire *w, yard_frame_kind kind, const void *head, size_t n_head,
                    const void *tail, size_t n_tail);
void yard_wire_flush(yard_wire *w);
bool yard_wire_has_output(const yard_wire *w);

/* Takes the next frame; false when none is complete. Reads what the socket has. */
bool yard_wire_receive(yard_wire *w, yard_frame *out);

/* Appends an event to the payload of an EVENTS frame, which grows: data [*n_bytes] of *capacity,
 * the caller's. False: no memory. */
bool yard_event_encode(uint8_t **data, size_t *n_bytes, size_t *capacity, const yard_event *event);
/* Takes the next one; its log-probabilities lead into data. False at the end. */
bool yard_event_decode(const void *data, size_t n_bytes, size_t *at, yard_event *event);

/* A request as the payload of a SUBMIT frame; malloc'd, NULL: no memory. */
void *yard_request_encode(uint64_t id, const yard_request *request, size_t *n_bytes);
/* The other way: the request's pointers lead into data. False when it is no request. */
bool yard_request_decode(const void *data, size_t n_bytes, uint64_t *id, yard_request *request);

#endif
