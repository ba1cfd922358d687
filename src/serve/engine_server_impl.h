/* Private to the server: engine_server.c is its life and the calls of clients,
 * engine_server_fronts.c their requests and outputs, engine_server_watch.c what it says about its
 * engine. */
#ifndef YARD_SERVE_ENGINE_SERVER_IMPL_H
#define YARD_SERVE_ENGINE_SERVER_IMPL_H

#include "serve/engine_messages.h"
#include "serve/engine_requests.h"
#include "serve/engine_server.h"
#include "serve/rpc.h"

enum {
    YARD_SERVER_TELL_US = 100000, /* between states when nothing happens */
    YARD_SERVER_MAX_PAGES = 4096  /* page events of a state */
};

/* One call of a client. */
typedef struct yard_session {
    struct yard_session *next, **link;
    yard_rpc_call *call;
    yard_engine_method method;
    uint64_t opened_us;
    bool heard; /* its first message came */
    bool over;  /* this side has ended it */

    /* of GENERATE */
    uint64_t number;
    yard_outputs outputs; /* that wait for the next message */
    uint32_t n_requests;
    bool half_closed;
    yard_seen *seen; /* [n_instances] */

    /* of WATCH */
    uint64_t front;   /* number of the stream whose requests are counted; 0: none */
    uint64_t version; /* of the pod's state that it knows */
    bool behind;      /* page events were left out */
} yard_session;

struct yard_engine_server {
    yard_engine_server_config config;
    yard_served_engine engine;
    yard_rpc *rpc;
    yard_reader *reader;
    yard_session *sessions;
    yard_served_requests requests;
    uint64_t last_id;     /* that the engine gave */
    uint64_t last_number; /* of streams */
    yard_pod_state state; /* as it was last told */
    uint64_t version;     /* of state */
    uint64_t tell_us;     /* when the next state is due */
    bool draining, has_news;
    yard_error failure;
    yard_bytes bytes;
    yard_page_event *page_events;   /* [YARD_SERVER_MAX_PAGES] */
    yard_page_hash *hashes;         /* the same, their names alone */
    yard_instance_state *instances; /* [n_instances + the same] of a state */
    yard_engine_report *reports;    /* [n_instances] */
};

/* engine_server.c */

void yard_server_no_memory(yard_engine_server *s); /* the server fails, with its next run */
void yard_server_send(yard_engine_server *s, yard_session *x); /* s->bytes */
void yard_server_end_session(yard_session *x, yard_rpc_code code, const char *message);
yard_session *yard_server_find_front(const yard_engine_server *s, uint64_t number); /* NULL: none */

/* engine_server_fronts.c */

/* Aborts the requests of a front, or of one tag of it, or one choice. Returns how many; the engine
 * says how they end. */
uint32_t yard_server_abort(yard_engine_server *s, const yard_session *front, const uint64_t *tag,
                           uint32_t choice);
void yard_server_take_generate(yard_engine_server *s, yard_session *x, const yard_rpc_event *e);
void yard_server_front_left(yard_engine_server *s, yard_session *x);
void yard_server_take_outputs(yard_engine_server *s);
/* What has gathered while the last message was under way goes out as the next. */
void yard_server_flush(yard_engine_server *s, yard_session *x);

/* engine_server_watch.c */

void yard_server_begin_watch(yard_engine_server *s, yard_session *x, const yard_rpc_event *e);
void yard_server_watcher_read(yard_engine_server *s, yard_session *x); /* all that was sent */
void yard_server_answer_health(yard_engine_server *s, yard_session *x);
void yard_server_look_at_pod(yard_engine_server *s);
void yard_server_tell_watchers(yard_engine_server *s);

#endif
