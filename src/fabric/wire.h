/* Sockets and frames of the start-up and control connections. All sockets are non-blocking and
 * close-on-exec; calls that wait take a deadline. */
#ifndef YARD_FABRIC_WIRE_H
#define YARD_FABRIC_WIRE_H

#include "fabric/fabric.h"

/* A frame is {u32 type, u32 n_bytes} and n_bytes, in the machine's byte order: ranks of one job run
 * one architecture, which the first frame's magic proves. */
typedef enum yard_frame_type {
    YARD_FRAME_CHALLENGE = 0x59520101, /* listener: nonce */
    YARD_FRAME_PROOF,                  /* connector: nonce, mac */
    YARD_FRAME_ACCEPT,                 /* listener: mac */
    YARD_FRAME_HELLO,                  /* connector: who it is, what it was configured with */
    YARD_FRAME_TABLE,                  /* rank 0: all hellos */
    YARD_FRAME_PEER,                   /* connector of a mesh: job id, channel, rank */
    YARD_FRAME_BLOB,                   /* exchange: one rank's */
    YARD_FRAME_ALL_BLOBS,              /* exchange: everybody's */
    YARD_FRAME_FAIL                    /* status, message */
} yard_frame_type;

enum {
    YARD_FRAME_MAX_BYTES = 64 << 20,
    YARD_FRAME_STRANGER_BYTES = 4096, /* what an unproven connection may send at once */
    YARD_NONCE_BYTES = 32,
    YARD_MAC_BYTES = 32
};

/* One end of a connection and the frame that it is receiving. All zero but fd is a fresh one. */
typedef struct yard_conn {
    int fd;
    bool whole;         /* the frame below is complete */
    uint32_t header[2]; /* type, n_bytes */
    size_t n_have;      /* bytes of header and data so far */
    uint8_t *data;      /* owned; [header[1]] */
} yard_conn;

typedef enum yard_conn_event {
    YARD_CONN_FRAME,
    YARD_CONN_AGAIN,
    YARD_CONN_CLOSED,
    YARD_CONN_BAD /* not our protocol, or out of memory */
} yard_conn_event;

/* Reads what is there of the next frame and never beyond it. After FRAME, conn->header and data
 * hold it until the next call. */
yard_conn_event yard_conn_read(yard_conn *conn, uint32_t max_bytes);
void yard_conn_close(yard_conn *conn);

/* Sends one frame; false when the connection broke or the deadline passed (errno says). */
bool yard_frame_send(int fd, uint32_t type, const void *data, size_t n_bytes, yard_deadline until);
bool yard_frame_send_fail(int fd, const yard_error *err, yard_deadline until);

/* The status and message of a FAIL frame into err. */
yard_status yard_frame_fail_status(const yard_conn *conn, yard_error *err);

/* Listens at an abstract unix name (without the leading zero byte); name[0] == 0: the kernel
 * chooses one, written to name. -1 and errno on failure. */
int yard_listen_unix(char *name, size_t n_name);

/* Listens at host:*port; 0 lets the kernel choose, written to *port. On failure -1 with the reason
 * in *why (static storage or strerror's). */
int yard_listen_tcp(const char *host, uint16_t *port, const char **why);

/* Whether only this machine can reach a TCP listener. Names may mean such an address, too: many
 * systems give their own name 127.0.1.1. */
bool yard_is_loopback(int fd);

/* One attempt. -1 with errno and *why as above. */
int yard_connect_unix(const char *name, const char **why);
int yard_connect_tcp(const char *host, uint16_t port, yard_deadline until, const char **why);

/* No delay, keepalive: a connection whose other machine is silent for dead_after_us is reset. */
void yard_tune_tcp(int fd, uint64_t dead_after_us);

/* Splits "host:port" or "[v6]:port". False when it is neither. */
bool yard_split_host_port(const char *text, char *host, size_t n_host, uint16_t *port);

/* poll() of one socket until the deadline; false when it passed. */
bool yard_wait_fd(int fd, short events, yard_deadline until);

/* proof of the job secret: challenge and response, HMAC-SHA256 */

void yard_auth_nonce(uint8_t nonce[YARD_NONCE_BYTES]);

/* mac = HMAC(secret, role, nonce of the listener, nonce of the connector). */
void yard_auth_mac(const char *secret, const char *role, const uint8_t *listener_nonce,
                   const uint8_t *connector_nonce, uint8_t mac[YARD_MAC_BYTES]);
bool yard_auth_equal(const uint8_t *a, const uint8_t *b); /* in constant time */

/* The connector's side, after connect(). YARD_EAGAIN when the other end closed before it had
 * challenged (a listener that was about to go): try again. who is for messages. */
yard_status yard_auth_connect(yard_conn *conn, const char *secret, const char *who,
                              yard_deadline until, yard_error *err);

/* The listener's side for many connections at once. */
typedef struct yard_acceptor yard_acceptor;

/* Called with the first frame of a connection that has proven the secret; takes conn->fd by setting
 * it to -1, else the connection is closed. An error ends yard_acceptor_step with it. */
typedef yard_status (*yard_accepted_fn)(void *ctx, yard_conn *conn, yard_error *err);

yard_status yard_acceptor_create(yard_acceptor **out, const char *secret, uint32_t max_pending,
                                 yard_accepted_fn accepted, void *ctx, yard_error *err);
void yard_acceptor_destroy(yard_acceptor *a); /* closes pending connections, not the listeners */
void yard_acceptor_add_listener(yard_acceptor *a, int fd); /* at most 2; -1 is fine */

/* Waits at most wait_ms for something to do, does it. Also returns when other_fd (-1: none) is
 * readable. */
yard_status yard_acceptor_step(yard_acceptor *a, int other_fd, int wait_ms, yard_error *err);

/* Connections refused so far because they could not prove the secret. */
uint32_t yard_acceptor_refused_count(const yard_acceptor *a);

#endif
