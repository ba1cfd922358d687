/* Meshes of sockets between all ranks, and the control connections among them: no transport tells a
 * rank that only waits that its peer has died, so every pair of ranks holds a connection that
 * carries nothing but its own end. A thread sleeps on all of them.
 *
 * A peer that leaves in order says so; an end without it is a loss. One that gives up on a rank
 * tells on whom: what follows is no fault of its own. A stopped process (SIGSTOP) keeps its
 * connections: deadlines find it, and it may go on. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fabric/fabric_impl.h"

enum {
    SPARE_CONNECTIONS = 64,
    RETRY_MS = 2,
    BYE = 'B', /* kinds of notice */
    GAVE_UP = 'G',
    MIN_SILENCE_US = 3000000, /* a link that is cut for a second must survive */
    STOP = UINT32_MAX         /* epoll tag of control_stop */
};

/* First frame on a connection of a mesh. */
typedef struct introduction {
    uint8_t job_id[YARD_JOB_ID_BYTES]; /* of this very group, not of one before it */
    uint32_t channel, rank;
} introduction;

/* What a peer says on its control connection. */
typedef struct notice {
    uint32_t kind;
    uint32_t rank; /* GAVE_UP: on whom */
} notice;

typedef struct mesh {
    yard_fabric *f;
    uint32_t channel, n_missing; /* of missing */
    yard_mesh_inside inside;
    int *fds;
    bool *missing; /* [n_ranks] to be accepted */
} mesh;

static uint64_t silence_us(const yard_fabric *f)
{
    return f->config.timeout_us > MIN_SILENCE_US ? f->config.timeout_us : MIN_SILENCE_US;
}

static bool same_node(const yard_fabric *f, uint32_t rank)
{
    return f->peers[rank].node == f->peers[f->rank].node;
}

static bool belongs(const mesh *m, uint32_t rank)
{
    return m->inside != YARD_MESH_NONE || !same_node(m->f, rank);
}

static int connect_once(const mesh *m, uint32_t rank, const char **why)
{
    const yard_fabric *f = m->f;
    const yard_peer *p = &f->peers[rank];
    int fd;

    if (m->inside == YARD_MESH_UNIX && same_node(f, rank))
        return yard_connect_unix(p->unix_name, why);
    *why = "it has no TCP listener";
    errno = ENOTCONN;
    fd = p->port ? yard_connect_tcp(p->host, p->port, f->stage.until, why) : -1;
    if (fd >= 0)
        yard_tune_tcp(fd, silence_us(f));
    return fd;
}

/* To a rank below: its listener has been there since the rendezvous, but its queue may be full. */
static yard_status connect_rank(mesh *m, uint32_t rank, yard_error *err)
{
    yard_fabric *f = m->f;
    const char *who = f->peers[rank].name, *why = "";
    introduction me = { .channel = m->channel, .rank = f->rank };
    yard_conn conn = { .fd = -1 };
    yard_status st = YARD_EAGAIN;

    memcpy(me.job_id, f->job_id, sizeof(me.job_id));
    while (st == YARD_EAGAIN) {
        const int wait_ms = yard_stage_wait_ms(f, who);

        if (wait_ms == 0)
            return yard_fail(err, YARD_ETIMEDOUT, "fabric: %s: cannot connect to %s: %s",
                             f->stage.name, who, why);
        conn.fd = connect_once(m, rank, &why);
        if (conn.fd >= 0) {
            st = yard_auth_connect(&conn, f->text.secret, who, f->stage.until, err);
            why = "connection closed";
            if (st == YARD_OK &&
                !yard_frame_send(conn.fd, YARD_FRAME_PEER, &me, sizeof(me), f->stage.until))
                st = YARD_EAGAIN;
        }
        if (st == YARD_OK) {
            m->fds[rank] = conn.fd;
            conn.fd = -1;
        }
        yard_conn_close(&conn);
        if (st == YARD_EAGAIN) {
            st = yard_rendezvous_check(f, err);
            poll(NULL, 0, st == YARD_OK ? RETRY_MS : 0);
            st = st == YARD_OK ? YARD_EAGAIN : st;
        }
    }
    return st;
}

/* A rank above has connected. What does not belong to this group is closed without a word. */
static yard_status accept_rank(void *ctx, yard_conn *conn, yard_error *err)
{
    mesh *m = ctx;
    introduction who;

    if (conn->header[0] != YARD_FRAME_PEER || conn->header[1] != sizeof(who))
        return YARD_OK;
    memcpy(&who, conn->data, sizeof(who));
    if (memcmp(who.job_id, m->f->job_id, sizeof(who.job_id)) || who.channel != m->channel ||
        who.rank >= m->f->n_ranks || !m->missing[who.rank])
        return YARD_OK;
    yard_tune_tcp(conn->fd, silence_us(m->f));
    m->fds[who.rank] = conn->fd;
    conn->fd = -1;
    m->missing[who.rank] = false;
    m->n_missing--;
    return YARD_OK;
}

static yard_status accept_ranks(mesh *m, yard_error *err)
{
    yard_fabric *f = m->f;
    yard_acceptor *acceptor = NULL;
    yard_status st = yard_acceptor_create(&acceptor, f->text.secret, f->n_ranks + SPARE_CONNECTIONS,
                                          accept_rank, m, err);

    if (st == YARD_OK) {
        yard_acceptor_add_listener(acceptor, f->listen_unix);
        yard_acceptor_add_listener(acceptor, f->listen_tcp);
    }
    while (st == YARD_OK && m->n_missing > 0) {
        char whom[256];
        int wait_ms;

        yard_ranks_text(whom, sizeof(whom), m->missing, f->n_ranks);
        wait_ms = yard_stage_wait_ms(f, whom);
        if (wait_ms == 0)
            st = yard_fail(err, YARD_ETIMEDOUT, "fabric: %s: no connection from %s after %.1f s",
                           f->stage.name, whom, yard_stage_seconds(f));
        else
            st = yard_acceptor_step(acceptor, yard_rendezvous_fd(f), wait_ms, err);
        if (st == YARD_OK)
            st = yard_rendezvous_check(f, err);
    }
    yard_acceptor_destroy(acceptor);
    return st;
}

/* First to all ranks below, then the ranks above are taken: rank 0 takes at once, so rank 1 gets
 * through and takes, and so on; nobody waits in a circle. */
yard_status yard_mesh_connect(yard_fabric *f, uint32_t channel, yard_mesh_inside inside, int *fds,
                              yard_error *err)
{
    mesh m = { .f = f, .channel = channel, .inside = inside, .fds = fds };
    yard_status st = YARD_OK;

    for (uint32_t r = 0; r < f->n_ranks; r++)
        fds[r] = -1;
    m.missing = calloc(f->n_ranks, sizeof(*m.missing));
    if (!m.missing)
        return yard_fail(err, YARD_ENOMEM, "fabric: room for %u ranks", f->n_ranks);
    for (uint32_t r = f->rank + 1; r < f->n_ranks; r++) {
        m.missing[r] = belongs(&m, r);
        m.n_missing += m.missing[r];
    }
    for (uint32_t r = 0; r < f->rank && st == YARD_OK; r++)
        if (belongs(&m, r))
            st = connect_rank(&m, r, err);
    if (st == YARD_OK)
        st = accept_ranks(&m, err);
    free(m.missing);
    if (st == YARD_OK)
        st = yard_rendezvous_exchange(f, NULL, 0, NULL, err);
    for (uint32_t r = 0; r < f->n_ranks && st != YARD_OK; r++) {
        if (fds[r] >= 0)
            close(fds[r]);
        fds[r] = -1;
    }
    return st;
}

void yard_peer_mark(yard_fabric *f, uint32_t rank, yard_peer_state state, int why)
{
    yard_peer *p = &f->peers[rank];
    uint32_t live = YARD_PEER_LIVE, none = UINT32_MAX;

    atomic_store_explicit(&p->lost_errno, why, memory_order_relaxed);
    if (!atomic_compare_exchange_strong(&p->state, &live, (uint32_t)state))
        return;
    if (state == YARD_PEER_LOST) {
        _Atomic uint32_t *told;

        atomic_compare_exchange_strong(&f->first_lost, &none, rank);
        told = atomic_load(&f->device_lost);
        if (told) /* else whoever makes it looks at first_lost afterwards */
            atomic_store(told, 1);
    }
    /* After the state: a waiter that sees the new count finds the new state. */
    atomic_fetch_add(&f->n_disturbed, 1);
    if (f->ops->wake)
        f->ops->wake(f);
}

/* Next notice of a peer, which the caller may look at before the control thread gets to it: the
 * peer's other connections can bring its end sooner. */
static ssize_t take_notice(yard_fabric *f, uint32_t rank, int flags, notice *got)
{
    ssize_t n;

    pthread_mutex_lock(&f->control_lock);
    n = recv(f->peers[rank].control_fd, got, sizeof(*got), flags | MSG_DONTWAIT);
    if (n == sizeof(*got) && got->kind == GAVE_UP)
        atomic_store(&f->peers[rank].gave_up_on, got->rank);
    pthread_mutex_unlock(&f->control_lock);
    return n;
}

/* The rank that a peer gave up on, UINT32_MAX if it did not. */
static uint32_t gave_up_on(yard_fabric *f, uint32_t rank)
{
    yard_peer *p = &f->peers[rank];
    notice got;

    if (atomic_load(&p->gave_up_on) == UINT32_MAX && p->control_fd >= 0)
        take_notice(f, rank, MSG_PEEK, &got);
    return atomic_load(&p->gave_up_on);
}

void yard_peer_reason(yard_fabric *f, uint32_t rank, char *text, size_t n_text)
{
    const uint32_t on = gave_up_on(f, rank);

    text[0] = '\0';
    if (on != UINT32_MAX)
        snprintf(text, n_text, " after it gave up on rank %u", on);
}

yard_status yard_peer_fail(yard_fabric *f, uint32_t rank)
{
    const yard_peer *p = &f->peers[rank];
    const int why = atomic_load_explicit(&p->lost_errno, memory_order_relaxed);
    char reason[64];

    yard_peer_give_up(f, rank);
    yard_peer_reason(f, rank, reason, sizeof(reason));
    if (atomic_load_explicit(&p->state, memory_order_acquire) == YARD_PEER_LEFT)
        return yard_fail(&f->err, YARD_EPEER, "fabric: %s has left the group%s", p->name, reason);
    return yard_fail(&f->err, YARD_EPEER, "fabric: %s is lost: %s%s", p->name,
                     why ? strerror(why) : "its process has ended", reason);
}

void yard_peer_give_up(yard_fabric *f, uint32_t rank)
{
    const uint32_t theirs = gave_up_on(f, rank);
    const notice told = { .kind = GAVE_UP, .rank = theirs != UINT32_MAX ? theirs : rank };

    if (f->gave_up || !f->control_runs)
        return;
    f->gave_up = true;
    for (uint32_t r = 0; r < f->n_ranks; r++)
        if (f->peers[r].control_fd >= 0)
            (void)!send(f->peers[r].control_fd, &told, sizeof(told), MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void read_control(yard_fabric *f, uint32_t rank)
{
    const int fd = f->peers[rank].control_fd;
    notice got = { 0 };
    const ssize_t n = take_notice(f, rank, 0, &got);
    const int code = n < 0 ? errno : 0;

    if (n < 0 && (code == EAGAIN || code == EWOULDBLOCK || code == EINTR))
        return;
    if (n == sizeof(got) && got.kind == GAVE_UP)
        return;
    epoll_ctl(f->control_epoll, EPOLL_CTL_DEL, fd, NULL);
    if (n == sizeof(got) && got.kind == BYE)
        yard_peer_mark(f, rank, YARD_PEER_LEFT, 0);
    else /* unix sockets report the end of a process with unread data as a reset */
        yard_peer_mark(f, rank, YARD_PEER_LOST, code == ECONNRESET ? 0 : code);
}

static void *control_main(void *arg)
{
    enum { N_EVENTS = 16 };
    struct epoll_event events[N_EVENTS];
    yard_fabric *f = arg;

    for (;;) {
        const int n = epoll_wait(f->control_epoll, events, N_EVENTS, -1);

        for (int i = 0; i < n; i++) {
            if (events[i].data.u32 == STOP)
                return NULL;
            read_control(f, events[i].data.u32);
        }
        if (n < 0 && errno != EINTR)
            return NULL;
    }
}

yard_status yard_control_connect(yard_fabric *f, yard_error *err)
{
    int *fds = calloc(f->n_ranks, sizeof(*fds));
    yard_status st;

    if (!fds)
        return yard_fail(err, YARD_ENOMEM, "fabric: room for %u ranks", f->n_ranks);
    yard_stage_begin(f, "peers");
    st = yard_mesh_connect(f, 0, YARD_MESH_UNIX, fds, err);
    for (uint32_t r = 0; r < f->n_ranks; r++)
        f->peers[r].control_fd = fds[r];
    free(fds);
    return st;
}

static bool watch(yard_fabric *f, int fd, uint32_t tag)
{
    struct epoll_event event = { .events = EPOLLIN, .data.u32 = tag };

    return fd < 0 || epoll_ctl(f->control_epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

yard_status yard_control_start(yard_fabric *f, yard_error *err)
{
    sigset_t all, before;
    bool ok;
    int rc;

    if (f->n_ranks == 1)
        return YARD_OK;
    f->control_epoll = epoll_create1(EPOLL_CLOEXEC);
    f->control_stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    ok = f->control_epoll >= 0 && f->control_stop >= 0 && watch(f, f->control_stop, STOP);
    for (uint32_t r = 0; r < f->n_ranks && ok; r++)
        ok = watch(f, f->peers[r].control_fd, r);
    if (!ok)
        return yard_fail(err, YARD_EIO, "fabric: epoll: %s", strerror(errno));
    sigfillset(&all); /* the program's signals are handled on its own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(&f->control_thread, NULL, control_main, f);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0)
        return yard_fail(err, YARD_ENOMEM, "fabric: control thread: %s", strerror(rc));
    f->control_runs = true;
    return YARD_OK;
}

void yard_control_stop(yard_fabric *f)
{
    if (f->control_runs) {
        eventfd_write(f->control_stop, 1);
        pthread_join(f->control_thread, NULL);
        f->control_runs = false;
    }
    if (f->control_stop >= 0)
        close(f->control_stop);
    if (f->control_epoll >= 0)
        close(f->control_epoll);
    f->control_stop = f->control_epoll = -1;
}

void yard_control_close(yard_fabric *f)
{
    const notice bye = { .kind = BYE };

    for (uint32_t r = 0; r < f->n_ranks; r++) {
        const int fd = f->peers[r].control_fd;

        if (fd < 0)
            continue;
        /* A lost peer is nobody's concern here. */
        (void)!send(fd, &bye, sizeof(bye), MSG_NOSIGNAL | MSG_DONTWAIT);
        close(fd);
        f->peers[r].control_fd = -1;
    }
}
