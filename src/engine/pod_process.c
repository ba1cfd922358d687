#include "engine/pod_process.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/pod_spawner.h"

enum {
    START_US = 10000000, /* a fork takes no such time */
    KILL_US = 10000000   /* nor does the end of a killed process, unless the kernel hangs */
};

yard_status yard_pod_spawner_start(yard_pod_spawner *s, const yard_pod_rank_config *config,
                                   yard_pod_process *process, uint32_t n_ranks, yard_error *err)
{
    int fds[2];
    pid_t pid;

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0)
        return yard_fail(err, YARD_EIO, "pod: no sockets: %s", strerror(errno));
    fflush(NULL); /* the child inherits what is buffered */
    pid = fork();
    if (pid == 0) {
        close(fds[0]);
        yard_pod_spawner_main(fds[1], config, n_ranks);
    }
    close(fds[1]);
    if (pid < 0) {
        const int code = errno;
        close(fds[0]);
        return yard_fail(err, YARD_EIO, "pod: no process: %s", strerror(code));
    }
    *s = (yard_pod_spawner){ .pid = pid, .fd = fds[0], .process = process, .n_ranks = n_ranks };
    return YARD_OK;
}

/* Should it be stopped (SIGSTOP): without it no rank is started, waited for, or seen to be stopped.
 */
static void wake(const yard_pod_spawner *s)
{
    kill(s->pid, SIGCONT);
}

void yard_pod_spawner_stop(yard_pod_spawner *s)
{
    if (s->pid <= 0)
        return;
    close(s->fd);
    wake(s);
    while (waitpid(s->pid, NULL, 0) < 0 && errno == EINTR)
        ;
    *s = (yard_pod_spawner){ .fd = -1 };
}

static int passed_fd(struct msghdr *message)
{
    const struct cmsghdr *c = CMSG_FIRSTHDR(message);
    int fd = -1;

    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
        memcpy(&fd, CMSG_DATA(c), sizeof(fd));
    return fd;
}

static void note(yard_pod_spawner *s, const yard_spawn_news *news, int fd)
{
    yard_pod_process *p = &s->process[news->r];

    switch (news->kind) {
    case YARD_SPAWN_STARTED:
        *p = (yard_pod_process){ .pid = news->pid, .status = news->status };
        yard_wire_open(&p->wire, fd);
        break;
    case YARD_SPAWN_ENDED:
        p->ended = true;
        p->status = news->status;
        break;
    default:
        p->stopped = news->kind == YARD_SPAWN_STOPPED;
        break;
    }
}

/* Takes one piece of news, waiting for it up to until_us. False: none came. *gone: the spawner is.
 */
static bool hear(yard_pod_spawner *s, uint64_t until_us, bool *gone)
{
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    yard_spawn_news news;
    struct iovec data = { .iov_base = &news, .iov_len = sizeof(news) };
    struct msghdr message = { .msg_iov = &data,
                              .msg_iovlen = 1,
                              .msg_control = control.bytes,
                              .msg_controllen = sizeof(control.bytes) };
    struct pollfd fd = { .fd = s->fd, .events = POLLIN };
    const uint64_t now = yard_now_us();
    ssize_t n;

    *gone = false;
    if (poll(&fd, 1, until_us > now ? (int)((until_us - now + 999) / 1000) : 0) <= 0)
        return false;
    n = recvmsg(s->fd, &message, MSG_CMSG_CLOEXEC);
    *gone = n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN);
    if (n != (ssize_t)sizeof(news) || news.r >= s->n_ranks)
        return false;
    note(s, &news, passed_fd(&message));
    return true;
}

static bool order(yard_pod_spawner *s, yard_spawn_order what)
{
    wake(s);
    return send(s->fd, &what, sizeof(what), MSG_NOSIGNAL) == (ssize_t)sizeof(what);
}

yard_status yard_pod_process_start(yard_pod_spawner *s, uint32_t r, yard_error *err)
{
    yard_pod_process *p = &s->process[r];
    const uint64_t until_us = yard_now_us() + START_US;
    bool gone = !order(s, (yard_spawn_order){ .kind = YARD_SPAWN_START, .r = r });

    p->status = 0;
    while (!gone && p->pid <= 0 && p->status == 0 && yard_now_us() < until_us)
        hear(s, until_us, &gone);
    if (p->pid > 0)
        return YARD_OK;
    p->pid = 0;
    return yard_fail(err, YARD_EIO, "rank process %u: cannot start: %s", r,
                     p->status ? strerror(p->status)
                     : gone    ? "the process that starts ranks is gone"
                               : "the process that starts ranks does not answer");
}

void yard_pod_process_signal(yard_pod_spawner *s, uint32_t r, int number)
{
    order(s, (yard_spawn_order){ .kind = YARD_SPAWN_SIGNAL, .r = r, .signal = number });
}

static void describe(int status, char *how, size_t n_how)
{
    if (WIFSIGNALED(status))
        snprintf(how, n_how, "was killed by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    else
        snprintf(how, n_how, "ended with exit code %d", WEXITSTATUS(status));
}

void yard_pod_process_reap(yard_pod_spawner *s, uint32_t r, uint64_t patience_us, char *how,
                           size_t n_how)
{
    yard_pod_process *p = &s->process[r];
    uint64_t until_us = yard_now_us() + patience_us;
    bool gone = false, killed = false;

    while (!p->ended && !gone) {
        if (!hear(s, until_us, &gone) && yard_now_us() >= until_us) {
            if (killed)
                break;
            killed = true;
            yard_pod_process_signal(s, r, SIGKILL);
            until_us = yard_now_us() + KILL_US;
        }
    }
    if (p->ended)
        describe(p->status, how, n_how);
    else
        snprintf(how, n_how, "is gone");
    yard_wire_close(&p->wire);
    *p = (yard_pod_process){ .wire = { .fd = -1 } };
}

bool yard_pod_process_look(yard_pod_spawner *s, uint32_t r, bool *stopped)
{
    bool gone;

    wake(s);
    while (hear(s, 0, &gone))
        ;
    *stopped = s->process[r].stopped;
    return s->process[r].ended;
}
