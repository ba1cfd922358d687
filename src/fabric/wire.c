/* Frames over non-blocking sockets. */
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fabric/wire.h"

enum { HEADER_BYTES = 8 };

bool yard_wait_fd(int fd, short events, yard_deadline until)
{
    for (;;) {
        struct pollfd p = { .fd = fd, .events = events };
        const uint64_t now = yard_now_us();
        const uint64_t left_us = now < until ? until - now : 0;
        const int n = poll(&p, 1, left_us > 60000000 ? 60000 : (int)((left_us + 999) / 1000));

        if (n > 0)
            return true;
        if (n < 0 && errno != EINTR)
            return false;
        if (n == 0 && left_us == 0) {
            errno = ETIMEDOUT;
            return false;
        }
    }
}

void yard_conn_close(yard_conn *conn)
{
    if (conn->fd >= 0)
        close(conn->fd);
    free(conn->data);
    *conn = (yard_conn){ .fd = -1 };
}

/* What the frame still lacks: first its header, then its data. */
static size_t bytes_wanted(const yard_conn *conn, uint8_t **at)
{
    if (conn->n_have < HEADER_BYTES) {
        *at = (uint8_t *)conn->header + conn->n_have;
        return HEADER_BYTES - conn->n_have;
    }
    *at = conn->data + (conn->n_have - HEADER_BYTES);
    return HEADER_BYTES + (size_t)conn->header[1] - conn->n_have;
}

static bool header_is_good(yard_conn *conn, uint32_t max_bytes)
{
    const uint32_t type = conn->header[0];

    if (type < YARD_FRAME_CHALLENGE || type > YARD_FRAME_FAIL || conn->header[1] > max_bytes)
        return false;
    conn->data = malloc(conn->header[1] ? conn->header[1] : 1);
    return conn->data != NULL;
}

static void forget_frame(yard_conn *conn)
{
    free(conn->data);
    conn->data = NULL;
    conn->n_have = 0;
    conn->whole = false;
}

yard_conn_event yard_conn_read(yard_conn *conn, uint32_t max_bytes)
{
    if (conn->whole)
        forget_frame(conn);
    for (;;) {
        uint8_t *at = NULL;
        const size_t n_wanted = bytes_wanted(conn, &at);
        ssize_t n;

        if (n_wanted == 0) {
            conn->whole = true;
            return YARD_CONN_FRAME;
        }
        n = recv(conn->fd, at, n_wanted, 0);
        if (n == 0)
            return YARD_CONN_CLOSED;
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? YARD_CONN_AGAIN : YARD_CONN_CLOSED;
        conn->n_have += (size_t)n;
        if (conn->n_have == HEADER_BYTES && !conn->data && !header_is_good(conn, max_bytes))
            return YARD_CONN_BAD;
    }
}

static bool send_all(int fd, struct iovec *iov, int n_iov, yard_deadline until)
{
    while (n_iov > 0) {
        struct msghdr msg = { .msg_iov = iov, .msg_iovlen = (size_t)n_iov };
        ssize_t n = sendmsg(fd, &msg, MSG_NOSIGNAL);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            if (!yard_wait_fd(fd, POLLOUT, until))
                return false;
            continue;
        }
        if (n < 0)
            return false;
        while (n_iov > 0 && (size_t)n >= iov->iov_len) {
            n -= (ssize_t)iov->iov_len;
            iov++;
            n_iov--;
        }
        if (n_iov > 0) {
            iov->iov_base = (uint8_t *)iov->iov_base + n;
            iov->iov_len -= (size_t)n;
        }
    }
    return true;
}

bool yard_frame_send(int fd, uint32_t type, const void *data, size_t n_bytes, yard_deadline until)
{
    uint32_t header[2] = { type, (uint32_t)n_bytes };
    struct iovec iov[2] = { { header, sizeof(header) }, { (void *)(uintptr_t)data, n_bytes } };

    return send_all(fd, iov, 2, until);
}

bool yard_frame_send_fail(int fd, const yard_error *err, yard_deadline until)
{
    return yard_frame_send(fd, YARD_FRAME_FAIL, err, sizeof(*err), until);
}

yard_status yard_frame_fail_status(const yard_conn *conn, yard_error *err)
{
    yard_error got;

    if (conn->header[1] != sizeof(got))
        return yard_fail(err, YARD_EPEER, "fabric: a rank failed, its message is damaged");
    memcpy(&got, conn->data, sizeof(got));
    got.message[sizeof(got.message) - 1] = 0;
    if (got.status <= YARD_OK || got.status >= YARD_STATUS_COUNT)
        got.status = YARD_EPEER;
    return yard_fail(err, got.status, "%s", got.message);
}
