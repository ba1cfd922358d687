/* Proof of the job secret, without sending it: each side answers the other's random number with a
 * MAC under the secret. What follows on the connection is neither encrypted nor authenticated: this
 * keeps other jobs and stray connections out, not somebody who controls the network. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <sha2.h>

#include "fabric/wire.h"

static const char connector_role[] = "switchyard fabric 1: connector";
static const char listener_role[] = "switchyard fabric 1: listener";

typedef struct proof {
    uint8_t nonce[YARD_NONCE_BYTES], mac[YARD_MAC_BYTES];
} proof;

void yard_auth_nonce(uint8_t nonce[YARD_NONCE_BYTES])
{
    /* Never short for so few bytes; blocks only before the machine has gathered entropy. */
    while (getrandom(nonce, YARD_NONCE_BYTES, 0) != YARD_NONCE_BYTES)
        ;
}

bool yard_auth_equal(const uint8_t *a, const uint8_t *b)
{
    uint8_t different = 0;

    for (int i = 0; i < YARD_MAC_BYTES; i++)
        different |= a[i] ^ b[i];
    return different == 0;
}

/* HMAC (RFC 2104): H(key ^ opad, H(key ^ ipad, text)), the key hashed when longer than a block. */
void yard_auth_mac(const char *secret, const char *role, const uint8_t *listener_nonce,
                   const uint8_t *connector_nonce, uint8_t mac[YARD_MAC_BYTES])
{
    uint8_t inner[SHA256_BLOCK_LENGTH] = { 0 }, outer[SHA256_BLOCK_LENGTH];
    const size_t n_secret = strlen(secret);
    SHA2_CTX sha;

    if (n_secret > sizeof(inner)) {
        SHA256Init(&sha);
        SHA256Update(&sha, (const uint8_t *)secret, n_secret);
        SHA256Final(inner, &sha);
    } else {
        memcpy(inner, secret, n_secret);
    }
    for (size_t i = 0; i < sizeof(inner); i++) {
        outer[i] = inner[i] ^ 0x5c;
        inner[i] ^= 0x36;
    }
    SHA256Init(&sha);
    SHA256Update(&sha, inner, sizeof(inner));
    SHA256Update(&sha, (const uint8_t *)role, strlen(role));
    SHA256Update(&sha, listener_nonce, YARD_NONCE_BYTES);
    SHA256Update(&sha, connector_nonce, YARD_NONCE_BYTES);
    SHA256Final(mac, &sha);
    SHA256Init(&sha);
    SHA256Update(&sha, outer, sizeof(outer));
    SHA256Update(&sha, mac, YARD_MAC_BYTES);
    SHA256Final(mac, &sha);
}

static yard_conn_event read_by(yard_conn *conn, yard_deadline until)
{
    yard_conn_event event = yard_conn_read(conn, YARD_FRAME_STRANGER_BYTES);

    while (event == YARD_CONN_AGAIN && yard_wait_fd(conn->fd, POLLIN, until))
        event = yard_conn_read(conn, YARD_FRAME_STRANGER_BYTES);
    return event;
}

static yard_status answer_fail(const yard_conn *conn, yard_conn_event event, const char *who,
                               yard_error *err)
{
    if (event == YARD_CONN_FRAME && conn->header[0] == YARD_FRAME_FAIL)
        return yard_frame_fail_status(conn, err);
    if (event == YARD_CONN_AGAIN)
        return yard_fail(err, YARD_ETIMEDOUT, "fabric: %s does not answer the handshake", who);
    if (event == YARD_CONN_CLOSED)
        return yard_fail(err, YARD_EPEER, "fabric: %s closed the connection in the handshake", who);
    return yard_fail(err, YARD_EFORMAT, "fabric: %s does not speak this protocol", who);
}

yard_status yard_auth_connect(yard_conn *conn, const char *secret, const char *who,
                              yard_deadline until, yard_error *err)
{
    uint8_t listener_nonce[YARD_NONCE_BYTES], mac[YARD_MAC_BYTES];
    proof mine;
    yard_conn_event event = read_by(conn, until);

    if (event == YARD_CONN_CLOSED)
        return YARD_EAGAIN;
    if (event != YARD_CONN_FRAME || conn->header[0] != YARD_FRAME_CHALLENGE ||
        conn->header[1] != sizeof(listener_nonce))
        return answer_fail(conn, event, who, err);
    memcpy(listener_nonce, conn->data, sizeof(listener_nonce));
    yard_auth_nonce(mine.nonce);
    yard_auth_mac(secret, connector_role, listener_nonce, mine.nonce, mine.mac);
    if (!yard_frame_send(conn->fd, YARD_FRAME_PROOF, &mine, sizeof(mine), until))
        return YARD_EAGAIN;
    event = read_by(conn, until);
    if (event != YARD_CONN_FRAME || conn->header[0] != YARD_FRAME_ACCEPT ||
        conn->header[1] != sizeof(mac))
        return answer_fail(conn, event, who, err);
    yard_auth_mac(secret, listener_role, listener_nonce, mine.nonce, mac);
    if (!yard_auth_equal(mac, conn->data))
        return yard_fail(err, YARD_EINVAL,
                         "fabric: %s could not prove the job secret; it belongs to another job",
                         who);
    return YARD_OK;
}

enum {
    MAX_LISTENERS = 2,
    TUNE_US = 10000000,
    PENDING_US = 10000000 /* a connection that has not proven itself by then is a stray one */
};

typedef struct pending {
    yard_conn conn;
    yard_deadline until;
    bool proven;
    uint8_t nonce[YARD_NONCE_BYTES];
} pending;

struct yard_acceptor {
    const char *secret;
    yard_accepted_fn accepted;
    void *ctx;
    uint32_t n_refused;
    int listeners[MAX_LISTENERS];
    uint32_t n_listeners, n_pending, max_pending;
    pending *pending;      /* [max_pending] */
    struct pollfd *polled; /* [MAX_LISTENERS + 1 + max_pending] */
};

yard_status yard_acceptor_create(yard_acceptor **out, const char *secret, uint32_t max_pending,
                                 yard_accepted_fn accepted, void *ctx, yard_error *err)
{
    yard_acceptor *a = calloc(1, sizeof(*a));

    if (a) {
        a->pending = calloc(max_pending, sizeof(*a->pending));
        a->polled = calloc(MAX_LISTENERS + 1 + max_pending, sizeof(*a->polled));
    }
    if (!a || !a->pending || !a->polled) {
        yard_acceptor_destroy(a);
        return yard_fail(err, YARD_ENOMEM, "fabric: room for %u connections", max_pending);
    }
    a->secret = secret;
    a->max_pending = max_pending;
    a->accepted = accepted;
    a->ctx = ctx;
    *out = a;
    return YARD_OK;
}

void yard_acceptor_destroy(yard_acceptor *a)
{
    if (!a)
        return;
    for (uint32_t i = 0; i < a->n_pending; i++)
        yard_conn_close(&a->pending[i].conn);
    free(a->pending);
    free(a->polled);
    free(a);
}

void yard_acceptor_add_listener(yard_acceptor *a, int fd)
{
    if (fd >= 0 && a->n_listeners < MAX_LISTENERS)
        a->listeners[a->n_listeners++] = fd;
}

uint32_t yard_acceptor_refused_count(const yard_acceptor *a)
{
    return a->n_refused;
}

static void drop_pending(yard_acceptor *a, uint32_t i)
{
    yard_conn_close(&a->pending[i].conn);
    a->pending[i] = a->pending[--a->n_pending];
}

/* Takes all that wait. Beyond max_pending they stay in the backlog: those inside either prove
 * themselves or run into their deadline. */
static yard_status take_connections(yard_acceptor *a, int listener, yard_error *err)
{
    while (a->n_pending < a->max_pending) {
        const int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        pending *p = &a->pending[a->n_pending];

        if (fd < 0 && (errno == EMFILE || errno == ENFILE))
            return yard_fail(err, YARD_EIO, "fabric: accept: %s; raise the limit (ulimit -n)",
                             strerror(errno));
        if (fd < 0)
            return YARD_OK;
        yard_tune_tcp(fd, TUNE_US);
        *p = (pending){ .conn = { .fd = fd }, .until = yard_now_us() + PENDING_US };
        yard_auth_nonce(p->nonce);
        a->n_pending++;
        /* Fits into an empty socket buffer: a deadline of 0 never waits. */
        if (!yard_frame_send(fd, YARD_FRAME_CHALLENGE, p->nonce, sizeof(p->nonce), 0))
            drop_pending(a, a->n_pending - 1);
    }
    return YARD_OK;
}

/* False when the connection is to be closed. */
static bool check_proof(yard_acceptor *a, pending *p)
{
    static const char refusal[] =
        "fabric: the other side's job secret is different from this rank's (config.secret, "
        "YARD_SECRET; where that is not set, the text of the rendezvous)";
    uint8_t mac[YARD_MAC_BYTES];
    yard_error told = { .status = YARD_EINVAL };
    proof theirs;

    if (p->conn.header[0] != YARD_FRAME_PROOF || p->conn.header[1] != sizeof(theirs))
        return false;
    memcpy(&theirs, p->conn.data, sizeof(theirs));
    yard_auth_mac(a->secret, connector_role, p->nonce, theirs.nonce, mac);
    if (!yard_auth_equal(mac, theirs.mac)) {
        memcpy(told.message, refusal, sizeof(refusal));
        yard_frame_send_fail(p->conn.fd, &told, 0);
        a->n_refused++;
        return false;
    }
    p->proven = true;
    yard_auth_mac(a->secret, listener_role, p->nonce, theirs.nonce, mac);
    return yard_frame_send(p->conn.fd, YARD_FRAME_ACCEPT, mac, sizeof(mac), 0);
}

/* Sets *drop when the connection is done with, one way or the other. */
static yard_status serve_pending(yard_acceptor *a, pending *p, bool *drop, yard_error *err)
{
    for (;;) {
        const yard_conn_event event = yard_conn_read(&p->conn, YARD_FRAME_STRANGER_BYTES);

        if (event == YARD_CONN_AGAIN)
            return YARD_OK;
        *drop = event != YARD_CONN_FRAME || p->proven || !check_proof(a, p);
        if (event == YARD_CONN_FRAME && p->proven && *drop)
            return a->accepted(a->ctx, &p->conn, err);
        if (*drop)
            return YARD_OK;
    }
}

static void fill_polled(yard_acceptor *a, int other_fd)
{
    const bool full = a->n_pending == a->max_pending;
    struct pollfd *p = a->polled;

    for (uint32_t i = 0; i < MAX_LISTENERS; i++) /* poll() ignores negative ones */
        *p++ = (struct pollfd){ .fd = i < a->n_listeners && !full ? a->listeners[i] : -1,
                                .events = POLLIN };
    *p++ = (struct pollfd){ .fd = other_fd, .events = POLLIN };
    for (uint32_t i = 0; i < a->n_pending; i++)
        *p++ = (struct pollfd){ .fd = a->pending[i].conn.fd, .events = POLLIN };
}

yard_status yard_acceptor_step(yard_acceptor *a, int other_fd, int wait_ms, yard_error *err)
{
    const struct pollfd *pending_polled = a->polled + MAX_LISTENERS + 1;
    const uint64_t now = yard_now_us();

    fill_polled(a, other_fd);
    /* With strays inside, look at their deadlines now and then. */
    if (a->n_pending > 0 && wait_ms > 1000)
        wait_ms = 1000;
    if (poll(a->polled, MAX_LISTENERS + 1 + a->n_pending, wait_ms) < 0)
        return YARD_OK;                         /* a signal; the caller looks at its deadline */
    for (uint32_t i = a->n_pending; i-- > 0;) { /* downwards: dropping moves the last one here */
        bool drop = now > a->pending[i].until;
        yard_status st = YARD_OK;

        if (pending_polled[i].revents)
            st = serve_pending(a, &a->pending[i], &drop, err);
        if (drop)
            drop_pending(a, i);
        if (st != YARD_OK)
            return st;
    }
    for (uint32_t i = 0; i < a->n_listeners; i++) {
        yard_status st = YARD_OK;

        if (a->polled[i].revents)
            st = take_connections(a, a->listeners[i], err);
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}
