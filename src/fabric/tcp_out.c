/* Sending of the TCP transport: a queue per peer, drained by the caller as far as the socket takes
 * it and by the transport's thread beyond that. Data is sent from where it lies: a queue of copies
 * would copy every byte once more (the system copies it anyway), for nothing but sources outside
 * the heap. */
#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include "fabric/tcp.h"

enum {
    HOLD_NS = 30000 /* a caller that computes after a burst delays its last puts by this */
};

/* Under the lock: moves the first items into a new batch. */
static void make_batch(yard_tcp *t, yard_tcp_out *out)
{
    const uint32_t n =
        out->queue.n_items < YARD_TCP_MAX_PUTS ? out->queue.n_items : YARD_TCP_MAX_PUTS;

    out->batch.head = (yard_tcp_head){ .magic = t->magic, .n_puts = n };
    out->iov[0].iov_base = &out->batch;
    out->iov[0].iov_len = sizeof(out->batch.head) + n * sizeof(yard_put);
    out->n_iov = 1;
    out->iov_at = 0;
    for (uint32_t i = 0; i < n; i++) {
        const yard_queued_put *item = yard_put_queue_at(&out->queue, i);

        out->batch.puts[i] = item->put;
        if (item->put.n_bytes > 0)
            out->iov[out->n_iov++] =
                (struct iovec){ (void *)(uintptr_t)item->src, (size_t)item->put.n_bytes };
    }
    yard_put_queue_pop(&out->queue, n);
    out->n_held_bytes = 0;
}

/* The flusher, without the lock. False when the socket is full (EAGAIN) or broken. */
static bool send_batch(yard_tcp_peer *p)
{
    yard_tcp_out *out = &p->out;

    while (out->iov_at < out->n_iov) {
        struct msghdr msg = { .msg_iov = out->iov + out->iov_at,
                              .msg_iovlen = out->n_iov - out->iov_at };
        ssize_t n = sendmsg(p->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return false;
        while (out->iov_at < out->n_iov && (size_t)n >= out->iov[out->iov_at].iov_len)
            n -= (ssize_t)out->iov[out->iov_at++].iov_len;
        if (out->iov_at < out->n_iov) {
            out->iov[out->iov_at].iov_base = (uint8_t *)out->iov[out->iov_at].iov_base + n;
            out->iov[out->iov_at].iov_len -= (size_t)n;
        }
    }
    return true;
}

/* Under the lock: whether the transport's thread watches for room in the socket. */
static void set_blocked(yard_tcp *t, yard_tcp_peer *p, bool blocked)
{
    struct epoll_event event = { .events = EPOLLOUT, .data.u32 = p->rank };

    if (p->out.blocked == blocked)
        return;
    p->out.blocked = blocked;
    epoll_ctl(t->epoll_out, blocked ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, p->fd, &event);
}

static bool is_idle(const yard_tcp_out *out)
{
    return out->queue.n_items == 0 && out->iov_at == out->n_iov;
}

void yard_tcp_flush(yard_tcp *t, yard_tcp_peer *p)
{
    yard_tcp_out *out = &p->out;
    bool sent = true;
    int error_code = 0;

    pthread_mutex_lock(&out->lock);
    if (out->flushing) {
        pthread_mutex_unlock(&out->lock);
        return; /* that thread looks at the queue again before it stops */
    }
    out->flushing = true;
    while (sent && !is_idle(out)) {
        if (out->iov_at == out->n_iov)
            make_batch(t, out);
        pthread_mutex_unlock(&out->lock);
        sent = send_batch(p);
        error_code = errno;
        pthread_mutex_lock(&out->lock);
    }
    out->flushing = false;
    if (sent || error_code == EAGAIN || error_code == EWOULDBLOCK) {
        set_blocked(t, p, !sent);
        error_code = 0;
    } else {
        set_blocked(t, p, false);
        out->queue.n_items = 0;
        out->n_held_bytes = 0;
        out->n_iov = out->iov_at = 0;
    }
    pthread_mutex_unlock(&out->lock);
    if (error_code)
        yard_tcp_end(t, p, YARD_PEER_LOST, error_code);
}

/* Starts the timer that ends the burst, unless it runs. */
static void hold(yard_tcp *t)
{
    const struct itimerspec soon = { .it_value.tv_nsec = HOLD_NS };

    if (!atomic_exchange_explicit(&t->holding, true, memory_order_acq_rel))
        timerfd_settime(t->timer, 0, &soon, NULL);
}

void yard_tcp_end_burst(yard_tcp *t)
{
    atomic_fetch_add_explicit(&t->burst, 1, memory_order_relaxed);
    if (!atomic_exchange_explicit(&t->holding, false, memory_order_acq_rel))
        return;
    for (uint32_t r = 0; r < t->fabric->n_ranks; r++)
        if (r != t->fabric->rank)
            yard_tcp_flush(t, &t->peers[r]);
}

yard_status yard_tcp_send(yard_tcp *t, yard_tcp_peer *p, const yard_queued_put *item)
{
    const uint32_t burst = atomic_load_explicit(&t->burst, memory_order_relaxed);
    yard_tcp_out *out = &p->out;
    bool pushed, blocked, now;

    if (atomic_load_explicit(&p->closed, memory_order_acquire))
        return yard_peer_fail(t->fabric, p->rank, &t->fabric->err);
    pthread_mutex_lock(&out->lock);
    pushed = yard_put_queue_push(&out->queue, item);
    out->n_held_bytes += item->put.n_bytes;
    blocked = out->blocked;
    now = out->burst != burst || out->n_held_bytes >= YARD_TCP_HOLD_BYTES;
    out->burst = burst;
    pthread_mutex_unlock(&out->lock);
    if (!pushed)
        return yard_fail(&t->fabric->err, YARD_ENOMEM, "tcp: a queue of %u puts to %s",
                         out->queue.n_items, t->fabric->peers[p->rank].name);
    if (blocked)
        return YARD_OK; /* the thread sends it with the others */
    if (now)
        yard_tcp_flush(t, p);
    else
        hold(t);
    return YARD_OK;
}
