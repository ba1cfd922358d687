/* Receiving of the TCP transport: from the socket straight into the heap. */
#include <errno.h>
#include <sys/socket.h>

#include "fabric/tcp.h"

enum { MAX_CALLS = 16 };

/* The longest thing that must lie in the stage as a whole: head and descriptions of a batch. */
_Static_assert(sizeof(yard_tcp_head) + YARD_TCP_MAX_PUTS * sizeof(yard_put) <=
                   YARD_TCP_STAGE_BYTES / 2,
               "descriptions of a batch fit into the stage");

/* n_bytes of the batch's data have arrived, or as many of them as it still lacks; returns the
 * rest. Also finishes puts without data, so call it with 0 after a new batch. */
static size_t advance(yard_tcp *t, yard_tcp_in *in, size_t n_bytes)
{
    while (in->n_done < in->n_puts) {
        const yard_put *put = &in->puts[in->n_done];
        const uint64_t left = put->n_bytes - in->n_done_bytes;
        const size_t n = n_bytes < left ? n_bytes : (size_t)left;

        in->n_done_bytes += n;
        n_bytes -= n;
        if (n < left)
            return 0;
        yard_tcp_add(t, (uint32_t)put->target, put->sig, put->value);
        in->n_done++;
        in->n_done_bytes = 0;
    }
    in->n_puts = in->n_done = 0;
    return n_bytes;
}

static bool put_is_good(const yard_tcp *t, const yard_put *put)
{
    const uint64_t size = t->fabric->heap_bytes;
    const bool is_here =
        put->target == t->fabric->rank ||
        (put->target < t->fabric->n_ranks && yard_heaps_has(&t->heaps, (uint32_t)put->target));

    return is_here && put->n_bytes <= size && put->dst <= size - put->n_bytes &&
           put->sig % 8 == 0 && size >= 8 && put->sig <= size - 8;
}

/* Takes head and descriptions of a batch from the stage once they are whole; false when they are
 * nothing that a rank of this job sends. */
static bool take_batch(yard_tcp *t, yard_tcp_peer *p)
{
    yard_tcp_in *in = &p->in;
    const size_t n_have = in->stage_end - in->stage_at;
    yard_tcp_head head;
    size_t n_bytes;

    if (n_have < sizeof(head))
        return true;
    memcpy(&head, in->stage + in->stage_at, sizeof(head));
    if (head.magic == t->magic && head.n_puts == YARD_TCP_BYE) {
        yard_tcp_end(t, p, YARD_PEER_LEFT, 0);
        return true;
    }
    if (head.magic != t->magic || head.n_puts == 0 || head.n_puts > YARD_TCP_MAX_PUTS)
        return false;
    n_bytes = head.n_puts * sizeof(yard_put);
    if (n_have < sizeof(head) + n_bytes)
        return true;
    memcpy(in->puts, in->stage + in->stage_at + sizeof(head), n_bytes);
    for (uint32_t i = 0; i < head.n_puts; i++)
        if (!put_is_good(t, &in->puts[i]))
            return false;
    in->stage_at += sizeof(head) + n_bytes;
    in->n_puts = head.n_puts;
    in->n_done = 0;
    in->n_done_bytes = 0;
    advance(t, in, 0);
    return true;
}

/* Data of the current put that lies in the stage goes to the heap. */
static void take_data(yard_tcp *t, yard_tcp_in *in)
{
    const yard_put *put = &in->puts[in->n_done];
    const uint64_t left = put->n_bytes - in->n_done_bytes;
    size_t n = in->stage_end - in->stage_at;

    if (n > left)
        n = (size_t)left;
    yard_copy(t->fabric->heap + put->dst + in->n_done_bytes, in->stage + in->stage_at, n);
    in->stage_at += n;
    advance(t, in, n);
}

/* Uses up the stage as far as it goes. */
static bool take_stage(yard_tcp *t, yard_tcp_peer *p)
{
    yard_tcp_in *in = &p->in;
    size_t before;

    do {
        before = in->stage_end - in->stage_at;
        if (before == 0)
            break;
        if (in->n_puts > 0)
            take_data(t, in);
        else if (!take_batch(t, p))
            return false;
    } while (in->stage_end - in->stage_at < before);
    if (in->stage_at > 0)
        memmove(in->stage, in->stage + in->stage_at, in->stage_end - in->stage_at);
    in->stage_end -= in->stage_at;
    in->stage_at = 0;
    return true;
}

/* Where the next bytes go: what the batch still lacks, then the stage. */
static int receive_iov(yard_tcp *t, yard_tcp_in *in, struct iovec *iov, size_t *n_wanted)
{
    int n = 0;

    *n_wanted = 0;
    for (uint32_t i = in->n_done; i < in->n_puts; i++) {
        const uint64_t done = i == in->n_done ? in->n_done_bytes : 0;

        iov[n].iov_base = t->fabric->heap + in->puts[i].dst + done;
        iov[n].iov_len = in->puts[i].n_bytes - done;
        *n_wanted += iov[n++].iov_len;
    }
    iov[n].iov_base = in->stage + in->stage_end;
    iov[n].iov_len = YARD_TCP_STAGE_BYTES - in->stage_end;
    *n_wanted += iov[n++].iov_len;
    return n;
}

/* One call to the system. False when there was no more than it returned. */
static bool receive_some(yard_tcp *t, yard_tcp_peer *p)
{
    yard_tcp_in *in = &p->in;
    struct iovec iov[YARD_TCP_MAX_PUTS + 1];
    size_t n_wanted;
    struct msghdr msg = { .msg_iov = iov };
    ssize_t n;

    msg.msg_iovlen = (size_t)receive_iov(t, in, iov, &n_wanted);
    n = recvmsg(p->fd, &msg, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR)
        return true;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return false;
    if (n <= 0) {
        yard_tcp_end(t, p, YARD_PEER_LOST, n < 0 ? errno : 0);
        return false;
    }
    in->stage_end += advance(t, in, (size_t)n);
    if (!take_stage(t, p)) {
        yard_tcp_end(t, p, YARD_PEER_LOST, EBADMSG);
        return false;
    }
    return (size_t)n == n_wanted;
}

void yard_tcp_receive(yard_tcp *t, yard_tcp_peer *p)
{
    uint32_t n_calls = 0;

    if (pthread_mutex_trylock(&p->in.lock) != 0)
        return;
    /* Bounded, so that a peer that sends without end does not keep the others waiting. */
    while (n_calls++ < MAX_CALLS && !atomic_load_explicit(&p->closed, memory_order_relaxed) &&
           receive_some(t, p))
        ;
    pthread_mutex_unlock(&p->in.lock);
}
