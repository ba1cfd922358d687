/* Sending of the TCP transport: a queue per peer, drained by the caller as far as the socket takes
 * it and by the transport's thread beyond that. Data is sent from where it lies: a queue of copies
 * would copy every byte once more (the system copies it anyway), for nothing but sources outside
 * the heap. */
#include <errno.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "fabric/tcp.h"

/* Large puts come in bursts and are held back for a moment, so that a burst goes out in few calls:
 * until HOLD_BYTES are held, a put that ends the burst, a wait of the caller, or the next look of
 * the thread. */
enum { SMALL_BYTES = 1024, HOLD_BYTES = 262144 };

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

/* A put is held back. The thread looks every now and then, if it knows that there is something to
 * look for: a timer of our own for each burst costs more than the sends that it saves (each start
 * and stop is an exit from a virtual machine). */
static void hold(yard_tcp *t)
{
    if (!atomic_load_explicit(&t->holding, memory_order_relaxed))
        atomic_store_explicit(&t->holding, true, memory_order_seq_cst);
    if (atomic_load_explicit(&t->dozing, memory_order_seq_cst) &&
        atomic_exchange_explicit(&t->dozing, false, memory_order_relaxed))
        eventfd_write(t->kick, 1);
}

void yard_tcp_end_burst(yard_tcp *t)
{
    if (!atomic_load_explicit(&t->holding, memory_order_relaxed))
        return;
    atomic_store_explicit(&t->holding, false, memory_order_relaxed);
    for (uint32_t r = 0; r < t->fabric->n_ranks; r++)
        if (t->peers[r].fd >= 0)
            yard_tcp_flush(t, &t->peers[r]);
}

/* Whether a put goes at once, and with it what is held. A burst signals one word (rows of data);
 * what comes after it signals another one (their header). Under the lock, before the put is queued.
 */
static bool ends_burst(const yard_tcp_out *out, const yard_put *put)
{
    const uint32_t n = out->queue.n_items;

    return put->n_bytes < SMALL_BYTES || out->n_held_bytes + put->n_bytes >= HOLD_BYTES ||
           (n > 0 && yard_put_queue_at(&out->queue, n - 1)->put.sig != put->sig);
}

yard_status yard_tcp_send(yard_tcp *t, yard_tcp_peer *p, const yard_queued_put *items, uint32_t n)
{
    yard_tcp_out *out = &p->out;
    bool pushed = true, blocked, now;

    if (atomic_load_explicit(&p->closed, memory_order_acquire))
        return yard_peer_fail(t->fabric, p->rank);
    pthread_mutex_lock(&out->lock);
    now = ends_burst(out, &items[0].put);
    for (uint32_t i = 0; i < n && pushed; i++) {
        pushed = yard_put_queue_push(&out->queue, &items[i]);
        out->n_held_bytes += items[i].put.n_bytes;
    }
    blocked = out->blocked;
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
