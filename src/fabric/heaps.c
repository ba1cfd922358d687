/* Memory files of the ranks of a node: made, traded over the control sockets, mapped. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fabric/heaps.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x8u /* Linux 6.3 */
#endif

enum { MAX_DESCRIPTORS = 2 };

/* What goes with the file descriptors: the memory file and, if there is one, the event. */
typedef struct parcel {
    uint64_t n_bytes;
    uint32_t rank;
    uint32_t n_descriptors;
} parcel;

/* Control message with room for the descriptors. */
typedef union envelope {
    struct cmsghdr align;
    char bytes[CMSG_SPACE(MAX_DESCRIPTORS * sizeof(int))];
} envelope;

static yard_status map_file(const yard_fabric *f, yard_heaps *h, int fd, uint32_t rank,
                            yard_error *err)
{
    /* Populated: page tables and, for the own file, nothing more, are ready before the first put.
     */
    void *p = mmap(NULL, h->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);

    if (p == MAP_FAILED)
        return yard_fail(err, YARD_ENOMEM, "fabric: heap: map %zu bytes of %s: %s", h->n_bytes,
                         f->peers[rank].name, strerror(errno));
    h->maps[rank] = p;
    return YARD_OK;
}

static yard_status create_file(const yard_fabric *f, yard_heaps *h, yard_error *err)
{
    const unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    int rc;

    h->fd = memfd_create("yard-fabric", flags | MFD_NOEXEC_SEAL);
    if (h->fd < 0 && errno == EINVAL)
        h->fd = memfd_create("yard-fabric", flags);
    if (h->fd < 0)
        return yard_fail(err, YARD_EIO, "fabric: heap: memfd_create: %s", strerror(errno));
    if (ftruncate(h->fd, (off_t)h->n_bytes) != 0)
        return yard_fail(err, YARD_ENOMEM, "fabric: heap: %zu bytes: %s", h->n_bytes,
                         strerror(errno));
    /* Takes and zeroes the memory now, with an error instead of a SIGBUS where it ends. */
    do
        rc = fallocate(h->fd, 0, 0, (off_t)h->n_bytes);
    while (rc != 0 && errno == EINTR);
    if (rc != 0)
        return yard_fail(err, YARD_ENOMEM, "fabric: heap: %zu bytes of shared memory: %s",
                         h->n_bytes, strerror(errno));
    if (fcntl(h->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return yard_fail(err, YARD_EIO, "fabric: heap: seal: %s", strerror(errno));
    return map_file(f, h, h->fd, f->rank, err);
}

static yard_status send_file(yard_fabric *f, const yard_heaps *h, uint32_t to, yard_error *err)
{
    const int fds[MAX_DESCRIPTORS] = { h->fd, h->events[f->rank] };
    const uint32_t n_fds = fds[1] >= 0 ? 2 : 1;
    parcel note = { .n_bytes = h->n_bytes, .rank = f->rank, .n_descriptors = n_fds };
    envelope control = { 0 };
    struct iovec iov = { &note, sizeof(note) };
    struct msghdr msg = { .msg_iov = &iov,
                          .msg_iovlen = 1,
                          .msg_control = control.bytes,
                          .msg_controllen = CMSG_SPACE(n_fds * sizeof(int)) };
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(n_fds * sizeof(int));
    memcpy(CMSG_DATA(c), fds, n_fds * sizeof(int));
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
                             f->peers[from].name, yard_stage_seconds(f));
        poll(p, 2, wait_ms);
        if (p[0].revents)
            return YARD_OK;
        if (p[1].revents)
            st = yard_rendezvous_check(f, err);
        if (st != YARD_OK)
            return st;
    }
}

/* Descriptors that came along, -1 where there are fewer. */
static void take_descriptors(struct msghdr *msg, int fds[static MAX_DESCRIPTORS])
{
    struct cmsghdr *c = CMSG_FIRSTHDR(msg);
    size_t n = 0;

    fds[0] = fds[1] = -1;
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
        n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    if (n >= 1 && n <= MAX_DESCRIPTORS)
        memcpy(fds, CMSG_DATA(c), n * sizeof(int));
}

static bool file_is_good(const yard_heaps *h, int fd, struct stat *info)
{
    return fd >= 0 && fstat(fd, info) == 0 && (size_t)info->st_size == h->n_bytes &&
           (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK);
}

/* The descriptors belong to the caller, also after a failure. */
static yard_status receive_file(yard_fabric *f, const yard_heaps *h, uint32_t from,
                                int fds[static MAX_DESCRIPTORS], yard_error *err)
{
    parcel note = { 0 };
    envelope control = { 0 };
    struct iovec iov = { &note, sizeof(note) };
    struct msghdr msg = { .msg_iov = &iov,
                          .msg_iovlen = 1,
                          .msg_control = control.bytes,
                          .msg_controllen = sizeof(control.bytes) };
    struct stat info = { 0 };
    yard_status st = await_message(f, from, err);
    ssize_t n;

    if (st != YARD_OK)
        return st;
    n = recvmsg(f->peers[from].control_fd, &msg, MSG_CMSG_CLOEXEC);
    if (n < (ssize_t)sizeof(note)) /* closed, or a goodbye */
        return yard_fail(err, YARD_EPEER, "fabric: heap: %s went away while the group was starting",
                         f->peers[from].name);
    take_descriptors(&msg, fds);
    if (n == sizeof(note) && note.rank == from && file_is_good(h, fds[0], &info) &&
        (note.n_descriptors == 2) == (fds[1] >= 0))
        return YARD_OK;
    return yard_fail(err, YARD_EFORMAT,
                     "fabric: heap: want a sealed file of %zu bytes from %s, got "
                     "%lld%s",
                     h->n_bytes, f->peers[from].name, (long long)info.st_size,
                     fds[0] < 0 ? " and no descriptor (limit of open files?)" : "");
}

static yard_status take_file(yard_fabric *f, yard_heaps *h, uint32_t from, yard_error *err)
{
    int fds[MAX_DESCRIPTORS] = { -1, -1 };
    yard_status st = receive_file(f, h, from, fds, err);

    if (st == YARD_OK)
        st = map_file(f, h, fds[0], from, err);
    if (fds[0] >= 0)
        close(fds[0]);
    h->events[from] = fds[1];
    return st;
}

/* In step k everybody gives to the k-th rank of the node above and takes from the k-th below, so
 * that few descriptors are on the way at any time.
 *   mates  [n] the ranks of the node in ascending order, at is this rank's place in it. */
static yard_status trade_files(yard_fabric *f, yard_heaps *h, const uint32_t *mates, uint32_t n,
                               uint32_t at, yard_error *err)
{
    yard_status st = YARD_OK;

    for (uint32_t k = 1; k < n && st == YARD_OK; k++) {
        st = send_file(f, h, mates[(at + k) % n], err);
        if (st == YARD_OK)
            st = take_file(f, h, mates[(at + n - k) % n], err);
    }
    return st;
}

static yard_status trade_in_node(yard_fabric *f, yard_heaps *h, yard_error *err)
{
    uint32_t *mates = calloc(f->n_ranks, sizeof(*mates)), n = 0, at = 0;
    yard_status st;

    if (!mates)
        return yard_fail(err, YARD_ENOMEM, "fabric: heap: room for %u ranks", f->n_ranks);
    for (uint32_t r = 0; r < f->n_ranks; r++) {
        if (r == f->rank)
            at = n;
        if (f->peers[r].node == f->peers[f->rank].node)
            mates[n++] = r;
    }
    st = trade_files(f, h, mates, n, at, err);
    free(mates);
    return st;
}

yard_status yard_heaps_open(yard_fabric *f, yard_heaps *h, size_t heap_bytes, int event,
                            yard_error *err)
{
    const size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    yard_status st;

    h->fd = -1;
    if (heap_bytes > PTRDIFF_MAX / 2)
        return yard_fail(err, YARD_ENOMEM, "fabric: heap: %zu bytes", heap_bytes);
    h->n_bytes = yard_align_up(YARD_HEAP_CONTROL_BYTES + heap_bytes, page_bytes);
    h->maps = calloc(f->n_ranks, sizeof(*h->maps));
    h->events = calloc(f->n_ranks, sizeof(*h->events));
    if (!h->maps || !h->events)
        return yard_fail(err, YARD_ENOMEM, "fabric: heap: room for %u ranks", f->n_ranks);
    for (uint32_t r = 0; r < f->n_ranks; r++)
        h->events[r] = r == f->rank ? event : -1;
    st = create_file(f, h, err);
    if (st == YARD_OK)
        st = trade_in_node(f, h, err);
    if (st != YARD_OK)
        return st;
    close(h->fd);
    h->fd = -1;
    f->heap = yard_heaps_heap(h, f->rank);
    return YARD_OK;
}

void yard_heaps_close(const yard_fabric *f, yard_heaps *h)
{
    for (uint32_t r = 0; h->maps && r < f->n_ranks; r++)
        if (h->maps[r])
            munmap(h->maps[r], h->n_bytes);
    for (uint32_t r = 0; h->events && r < f->n_ranks; r++)
        if (r != f->rank && h->events[r] >= 0)
            close(h->events[r]);
    if (h->maps && h->fd >= 0)
        close(h->fd);
    free(h->maps);
    free(h->events);
    *h = (yard_heaps){ 0 };
}
