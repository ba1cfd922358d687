/* The HTTP server's inside. Private to http*.c. */
#ifndef YARD_SERVE_HTTP_IMPL_H
#define YARD_SERVE_HTTP_IMPL_H

#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/event.h>
#include <event2/http.h>
#include <event2/listener.h>

#include "serve/front.h"
#include "serve/http.h"

/* Connections that take too long, and too many of them (http_guard.c).
 *
 * evhttp tells of a connection only when a whole request has come. Those that send one byte a
 * second are found by looking at the process's sockets once a second. */

typedef struct yard_http_guard_entry {
    uint64_t inode; /* of the socket; 0: none */
    uint64_t since_us;
    bool busy; /* a request is being answered */
} yard_http_guard_entry;

typedef struct yard_http_guard {
    yard_http_guard_entry *entry; /* [n_entries], by fd */
    int n_entries;
    uint64_t listen_name; /* hash of the listener's address: accepted sockets have the same one */
} yard_http_guard;

void yard_http_guard_open(yard_http_guard *g, int listen_fd);
void yard_http_guard_close(yard_http_guard *g);
/* A request begins or ends on this connection. */
void yard_http_guard_mark(yard_http_guard *g, uint64_t now_us, int fd, bool busy);
/* Shuts down those that have been reading for too long; returns how many connections there are, and
 * how many of them are busy. */
uint32_t yard_http_guard_look(yard_http_guard *g, uint64_t now_us, uint64_t read_timeout_us,
                              uint32_t *n_busy);

/* the server (http.c) */

/* A request that the front works on. */
typedef struct yard_http_exchange {
    yard_http *http;
    struct evhttp_request *request;
    yard_front_job *job; /* NULL until the front has taken it */
    uint64_t arrived_us;
    bool begun; /* a stream's status and headers are out */
    bool ended; /* answered */
    struct yard_http_exchange *newer, *older;
    char id[64];
} yard_http_exchange;

struct yard_http {
    yard_http_config config;
    yard_front *front;
    struct event_base *base;
    struct evhttp *server;
    struct evconnlistener *listener; /* owned by server */
    struct event **front_events;     /* [n_front_events] */
    uint32_t n_front_events;
    struct event *wake, *second, *stop;
    yard_http_guard guard;
    yard_http_exchange *newest;
    uint32_t n_exchanges, n_connections;
    bool is_ready, draining, full;
    uint64_t drain_until_us;
    uint64_t id_base, n_ids;
};

/* To be called after every call of the front, which may have changed when it wants to run. */
void yard_http_set_wake(yard_http *http);
/* While draining: ends the loop once every answer is out. */
void yard_http_leave_if_drained(yard_http *http);

/* http_exchange.c */
void yard_http_take(struct evhttp_request *request, void *http); /* an evhttp callback */
void yard_http_drop(yard_http_exchange *x);                      /* its connection closes now */

/* http_pages.c: what is answered at once. False: no such path. */
bool yard_http_page(yard_http *http, const char *path, yard_api_out *out, int *status);

/* http_log.c */
void yard_http_log(yard_http *http, struct evhttp_request *request, const char *id,
                   uint64_t arrived_us, const yard_front_summary *summary);

#endif
