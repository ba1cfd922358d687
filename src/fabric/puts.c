/* Queues of puts, and the caller that receives while it waits. */
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>

#include "fabric/puts.h"

enum { FIRST_CAPACITY = 64 };

bool yard_put_queue_push(yard_put_queue *q, const yard_queued_put *item)
{
    if (q->n_items == q->capacity) {
        const uint32_t capacity = q->capacity ? 2 * q->capacity : FIRST_CAPACITY;
        yard_queued_put *items = malloc(capacity * sizeof(*items));

        if (!items)
            return false;
        for (uint32_t i = 0; i < q->n_items; i++)
            items[i] = *yard_put_queue_at(q, i);
        free(q->items);
        q->items = items;
        q->capacity = capacity;
        q->first = 0;
    }
    q->items[(q->first + q->n_items++) & (q->capacity - 1)] = *item;
    return true;
}

const yard_queued_put *yard_put_queue_at(const yard_put_queue *q, uint32_t i)
{
    return &q->items[(q->first + i) & (q->capacity - 1)];
}

void yard_put_queue_pop(yard_put_queue *q, uint32_t n)
{
    q->first = (q->first + n) & (q->capacity - 1);
    q->n_items -= n;
}

void yard_put_queue_free(yard_put_queue *q)
{
    free(q->items);
    *q = (yard_put_queue){ 0 };
}

bool yard_poll_two(int fd, int other_fd, uint64_t until)
{
    struct pollfd fds[2] = { { .fd = fd, .events = POLLIN }, { .fd = other_fd, .events = POLLIN } };
    const uint64_t now = yard_now_us();
    const uint64_t left_us = now < until ? until - now : 0;
    const struct timespec left = { .tv_sec = (time_t)(left_us / 1000000),
                                   .tv_nsec = (long)(left_us % 1000000) * 1000 };

    return ppoll(fds, 2, until == UINT64_MAX ? NULL : &left, NULL) > 0 && fds[1].revents;
}

bool yard_driver_open(yard_driver *d)
{
    d->blocked = &d->own_blocked;
    d->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return d->wake >= 0;
}

void yard_driver_signal(_Atomic uint64_t *word, uint64_t value, _Atomic bool *blocked, int wake)
{
    /* Release: who sees the count sees the data. Sequentially consistent beyond that, against the
     * caller's "I am about to block; has the word changed?": one of the two sees the other. */
    atomic_fetch_add_explicit(word, value, memory_order_seq_cst);
    if (atomic_load_explicit(blocked, memory_order_seq_cst))
        eventfd_write(wake, 1);
}

void yard_driver_add(yard_driver *d, const yard_fabric *f, uint64_t sig, uint64_t value)
{
    yard_driver_signal(yard_signal_word(f, sig), value, d->blocked, d->wake);
}

void yard_driver_begin(yard_driver *d)
{
    atomic_fetch_add_explicit(&d->n_drives, 1, memory_order_relaxed);
    atomic_store_explicit(&d->driving, true, memory_order_relaxed);
}

void yard_driver_end(yard_driver *d)
{
    atomic_store_explicit(&d->driving, false, memory_order_relaxed);
}

void yard_driver_block(yard_driver *d, const yard_fabric *f, yard_sym sig, uint64_t seen, int fd,
                       uint64_t until)
{
    eventfd_t count;

    atomic_store_explicit(d->blocked, true, memory_order_seq_cst);
    if (!yard_wait_over(f, sig, seen) && yard_poll_two(fd, d->wake, until))
        eventfd_read(d->wake, &count);
    atomic_store_explicit(d->blocked, false, memory_order_relaxed);
}

bool yard_driver_was_active(yard_driver *d)
{
    const uint32_t n = atomic_load_explicit(&d->n_drives, memory_order_relaxed);
    const bool active =
        n != d->n_drives_seen || atomic_load_explicit(&d->driving, memory_order_relaxed);

    d->n_drives_seen = n;
    return active;
}

uint64_t yard_linger_until(const yard_fabric *f)
{
    const uint64_t timeout_us = f->config.timeout_us;

    return yard_now_us() + (timeout_us < YARD_LINGER_US ? timeout_us : YARD_LINGER_US);
}

int yard_start_thread(pthread_t *thread, void *(*main)(void *), void *arg)
{
    sigset_t all, before;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(thread, NULL, main, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc;
}
