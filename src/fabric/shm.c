/* Ranks of one node: every rank maps the heaps of all.
 *
 * A heap is an anonymous memory file, handed from process to process over the control sockets: it
 * has no name, so nothing is left when processes die, and a later group, with files of its own,
 * cannot be reached by a late write. Sealed, so that no peer can shrink it under a reader. The
 * file's first page holds the doorbell on which the owner sleeps; the heap follows.
 *
 * No wake-up is lost. The sleeper: (1) reads rung, (2) stores sleeps_on, (3) reads the word; it
 * sleeps only if the word still has the old value, and then only while rung is as in (1). The
 * signaller: (4) adds to the word, (5) reads sleeps_on, and if that is its word, (6) adds to rung
 * and wakes. All of 2-5 are sequentially consistent, so they have one order: if (3) comes before
 * (4), then (2) before (5), and the signaller rings. The ring's (6) comes after (1): either the
 * sleeper is in the kernel and is woken, or the kernel finds rung changed. Otherwise (4) comes
 * before (3), and the sleeper sees the word. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fabric/fabric_impl.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x8u /* Linux 6.3 */
#endif

enum { CONTROL_BYTES = 4096 /* the doorbell's page */ };

typedef struct doorbell {
    _Alignas(64) _Atomic uint64_t sleeps_on; /* heap offset of a signal word + 1; 0: awake */
    _Alignas(64) _Atomic uint32_t rung;      /* futex word */
} doorbell;

typedef struct shm {
    int fd;         /* own file, until all peers have it */
    size_t n_bytes; /* of a file */
    uint8_t **maps; /* [n_ranks] */
} shm;

/* What goes with the file descriptor. */
typedef struct parcel {
    uint64_t n_bytes;
    uint32_t rank;
    uint32_t zero;
} parcel;

static doorbell *doorbell_of(const yard_fabric *f, uint32_t rank)
{
    const shm *s = f->impl;

    return (doorbell *)(void *)s->maps[rank];
}

/* ---- sleeping and waking ----------------------------------------------------------- */

/* Not FUTEX_PRIVATE: the word is shared by processes. until is of the monotonic clock, as is the
 * absolute time of FUTEX_WAIT_BITSET. */
static void futex_wait(_Atomic uint32_t *word, uint32_t seen, yard_deadline until)
{
    const struct timespec at = { .tv_sec = (time_t)(until / 1000000),
                                 .tv_nsec = (long)(until % 1000000 * 1000) };

    syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, &at, NULL, FUTEX_BITSET_MATCH_ANY);
}

static void ring(doorbell *d)
{
    atomic_fetch_add(&d->rung, 1);
    syscall(SYS_futex, &d->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void shm_sleep(yard_fabric *f, yard_sym sig, uint64_t seen, yard_deadline until)
{
    doorbell *d = doorbell_of(f, f->rank);
    const uint32_t rung = atomic_load(&d->rung);

    atomic_store(&d->sleeps_on, sig + 1);
    if (atomic_load(yard_signal_word(f, sig)) == seen && !yard_wait_disturbed(f))
        futex_wait(&d->rung, rung, until);
    atomic_store_explicit(&d->sleeps_on, 0, memory_order_relaxed);
}

static void shm_wake(yard_fabric *f)
{
    ring(doorbell_of(f, f->rank));
}

static yard_status shm_put_signal(yard_fabric *f, yard_sym dst, const void *src, size_t n_bytes,
                                  yard_sym sig, uint64_t value, uint32_t peer)
{
    const shm *s = f->impl;
    uint8_t *heap = s->maps[peer] + CONTROL_BYTES;
    doorbell *d = doorbell_of(f, peer);
    uint64_t sleeper = sig + 1;

    if (n_bytes)
        yard_copy(heap + dst, src, n_bytes);
    /* Releases the copy: who acquires the sum sees the bytes. */
    atomic_fetch_add((_Atomic uint64_t *)(void *)(heap + sig), value);
    /* Taking sleeps_on back leaves one wake-up for many signals to one word. */
    if (atomic_load(&d->sleeps_on) == sleeper &&
        atomic_compare_exchange_strong(&d->sleeps_on, &sleeper, 0))
        ring(d);
    return YARD_OK;
}

/* ---- the files --------------------------------------------------------------------- */

static yard_status map_file(yard_fabric *f, int fd, uint32_t rank, yard_error *err)
{
    shm *s = f->impl;
    /* Populated: page tables and, for the own file, nothing more, are ready before the first put.
     */
    void *p = mmap(NULL, s->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);

    if (p == MAP_FAILED)
        return yard_fail(err, YARD_ENOMEM, "fabric: heap: map %zu bytes of %s: %s", s->n_bytes,
                         f->peers[rank].name, strerror(errno));
    s->maps[rank] = p;
    return YARD_OK;
}

static yard_status create_file(yard_fabric *f, yard_error *err)
{
    const unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    shm *s = f->impl;
    int rc;

    s->fd = memfd_create("yard-fabric", flags | MFD_NOEXEC_SEAL);
    if (s->fd < 0 && errno == EINVAL)
        s->fd = memfd_create("yard-fabric", flags);
    if (s->fd < 0)
        return yard_fail(err, YARD_EIO, "fabric: heap: memfd_create: %s", strerror(errno));
    if (ftruncate(s->fd, (off_t)s->n_bytes) != 0)
        return yard_fail(err, YARD_ENOMEM, "fabric: heap: %zu bytes: %s", s->n_bytes,
                         strerror(errno));
    /* Takes and zeroes the memory now, with an error instead of a SIGBUS where it ends. */
    do
        rc = fallocate(s->fd, 0, 0, (off_t)s->n_bytes);
    while (rc != 0 && errno == EINTR);
    if (rc != 0)
        return yard_fail(err, YARD_ENOMEM, "fabric: heap: %zu bytes of shared memory: %s",
                         s->n_bytes, strerror(errno));
    if (fcntl(s->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return yard_fail(err, YARD_EIO, "fabric: heap: seal: %s", strerror(errno));
    return map_file(f, s->fd, f->rank, err);
}

static yard_status send_file(yard_fabric *f, uint32_t to, yard_error *err)
{
    const shm *s = f->impl;
    parcel note = { .n_bytes = s->n_bytes, .rank = f->rank };
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = { 0 };
    struct iovec iov = { &note, sizeof(note) };
    struct msghdr msg = { .msg_iov = &iov,
                          .msg_iovlen = 1,
                          .msg_control = control.bytes,
                          .msg_controllen = sizeof(control.bytes) };
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &s->fd, sizeof(int));
    while (sendmsg(f->peers[to].control_fd, &msg, MSG_NOSIGNAL) < 0) {
        /* The kernel bounds the descriptors in flight; peers are taking them. */
        if ((errno != EAGAIN && errno != ETOOMANYREFS && errno != EINTR) ||
            yard_stage_wait_ms(f, f->peers[to].name) == 0)
            return yard_fail(err, YARD_EPEER, "fabric: heap: cannot send to %s: %s",
                             f->peers[to].name, strerror(errno));
        poll(NULL, 0, 1);
    }
    return YARD_OK;
}

/* Waits for a message on the peer's control socket, or for news that the start has failed. */
static yard_status await_message(yard_fabric *f, uint32_t from, yard_error *err)
{
    for (;;) {
        struct pollfd p[2] = { { .fd = f->peers[from].control_fd, .events = POLLIN },
                               { .fd = yard_rendezvous_fd(f), .events = POLLIN } };
        const int wait_ms = yard_stage_wait_ms(f, f->peers[from].name);
        yard_status st = YARD_OK;

        if (wait_ms == 0)
            return yard_fail(err, YARD_ETIMEDOUT, "fabric: heap: nothing from %s after %.1f s",
                             f->peers[from].name, (double)f->config.start_timeout_us / 1e6);
        poll(p, 2, wait_ms);
        if (p[0].revents)
            return YARD_OK;
        if (p[1].revents)
            st = yard_rendezvous_check(f, err);
        if (st != YARD_OK)
            return st;
    }
}

static int take_descriptor(struct msghdr *msg)
{
    struct cmsghdr *c = CMSG_FIRSTHDR(msg);
    int fd = -1;

    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS &&
        c->cmsg_len == CMSG_LEN(sizeof(int)))
        memcpy(&fd, CMSG_DATA(c), sizeof(fd));
    return fd;
}

/* *out belongs to the caller on success. */
static yard_status receive_file(yard_fabric *f, uint32_t from, int *out, yard_error *err)
{
    const shm *s = f->impl;
    parcel note = { 0 };
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = { 0 };
    struct iovec iov = { &note, sizeof(note) };
    struct msghdr msg = { .msg_iov = &iov,
                          .msg_iovlen = 1,
                          .msg_control = control.bytes,
                          .msg_controllen = sizeof(control.bytes) };
    struct stat info = { 0 };
    yard_status st = await_message(f, from, err);
    ssize_t n;
    int fd;

    if (st != YARD_OK)
        return st;
    n = recvmsg(f->peers[from].control_fd, &msg, MSG_CMSG_CLOEXEC);
    if (n <= (ssize_t)sizeof(char)) /* closed, or a goodbye */
        return yard_fail(err, YARD_EPEER, "fabric: heap: %s went away while the group was starting",
                         f->peers[from].name);
    fd = take_descriptor(&msg);
    if (fd >= 0 && n == sizeof(note) && note.rank == from && fstat(fd, &info) == 0 &&
        (size_t)info.st_size == s->n_bytes && (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK)) {
        *out = fd;
        return YARD_OK;
    }
    if (fd >= 0)
        close(fd);
    return yard_fail(err, YARD_EFORMAT,
                     "fabric: heap: want a sealed file of %zu bytes from %s, got "
                     "%lld%s",
                     s->n_bytes, f->peers[from].name, (long long)info.st_size,
                     fd < 0 ? " and no descriptor (limit of open files?)" : "");
}

/* In step k everybody gives to the k-th rank above and takes from the k-th below, so that few
 * descriptors are on the way at any time. */
static yard_status trade_files(yard_fabric *f, yard_error *err)
{
    yard_status st = YARD_OK;

    for (uint32_t k = 1; k < f->n_ranks && st == YARD_OK; k++) {
        const uint32_t from = (f->rank + f->n_ranks - k) % f->n_ranks;
        int fd = -1;

        st = send_file(f, (f->rank + k) % f->n_ranks, err);
        if (st == YARD_OK)
            st = receive_file(f, from, &fd, err);
        if (st == YARD_OK)
            st = map_file(f, fd, from, err);
        if (fd >= 0)
            close(fd);
    }
    return st;
}

static yard_status shm_open_fabric(yard_fabric *f, yard_error *err)
{
    const size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    shm *s = calloc(1, sizeof(*s));
    yard_status st;

    if (!s)
        return yard_fail(err, YARD_ENOMEM, "fabric: heap: %zu bytes", sizeof(*s));
    f->impl = s;
    s->fd = -1;
    if (f->heap_bytes > PTRDIFF_MAX / 2)
        return yard_fail(err, YARD_ENOMEM, "fabric: heap: %zu bytes", f->heap_bytes);
    s->n_bytes = yard_align_up(CONTROL_BYTES + f->heap_bytes, page_bytes);
    s->maps = calloc(f->n_ranks, sizeof(*s->maps));
    if (!s->maps)
        return yard_fail(err, YARD_ENOMEM, "fabric: heap: room for %u ranks", f->n_ranks);
    st = create_file(f, err);
    if (st == YARD_OK)
        st = trade_files(f, err);
    if (st != YARD_OK)
        return st;
    close(s->fd);
    s->fd = -1;
    f->heap = s->maps[f->rank] + CONTROL_BYTES;
    return YARD_OK;
}

static void shm_close(yard_fabric *f)
{
    shm *s = f->impl;

    if (!s)
        return;
    for (uint32_t r = 0; s->maps && r < f->n_ranks; r++)
        if (s->maps[r])
            munmap(s->maps[r], s->n_bytes);
    if (s->fd >= 0)
        close(s->fd);
    free(s->maps);
    free(s);
    f->impl = NULL;
}

const yard_fabric_ops yard_fabric_shm = {
    .name = "shm",
    .copies = true,
    .open = shm_open_fabric,
    .close = shm_close,
    .put_signal = shm_put_signal,
    .sleep = shm_sleep,
    .wake = shm_wake,
};
