#include "engine/pod_spawner.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"

typedef struct spawner {
    int fd, signals; /* the pod's process; SIGCHLD */
    const yard_pod_rank_config *config;
    uint32_t n_ranks;
    pid_t *pid; /* [n_ranks] 0: none */
} spawner;

/* Ranks that pin their threads do so within their share of the processors: rank r of this pod gets
 * r * n / n_ranks .. of n, or one in turn when there are more ranks. */
static void take_share(uint32_t r, uint32_t n_ranks)
{
    cpu_set_t all, mine;
    uint32_t n_cpus, first, end, n = 0;

    if (sched_getaffinity(0, sizeof(all), &all) != 0)
        return;
    n_cpus = (uint32_t)CPU_COUNT(&all);
    first = n_ranks <= n_cpus ? r * n_cpus / n_ranks : r % n_cpus;
    end = n_ranks <= n_cpus ? (r + 1) * n_cpus / n_ranks : first + 1;
    CPU_ZERO(&mine);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &all))
            continue;
        if (n >= first && n < end)
            CPU_SET(cpu, &mine);
        n++;
    }
    sched_setaffinity(0, sizeof(mine), &mine);
}

/* In the child; does not return. */
static void become_rank(const spawner *s, uint32_t r, int fd, pid_t parent)
{
    sigset_t none;

    /* The signal is for the death of the spawner; it may have died before it was asked for. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent)
        _exit(1);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    close(s->fd);
    close(s->signals);
    if (s->config[r].engine.pin != YARD_THREADS_ANYWHERE)
        take_share(r, s->n_ranks);
    _exit(yard_pod_rank_main(&s->config[r], fd));
}

/* fd: goes along; -1: none. */
static void tell(const spawner *s, yard_spawn_news news, int fd)
{
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = { 0 };
    struct iovec data = { .iov_base = &news, .iov_len = sizeof(news) };
    struct msghdr message = { .msg_iov = &data, .msg_iovlen = 1 };

    if (fd >= 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = sizeof(control.bytes);
        control.head = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)),
                                         .cmsg_level = SOL_SOCKET,
                                         .cmsg_type = SCM_RIGHTS };
        memcpy(CMSG_DATA(&control.head), &fd, sizeof(fd));
    }
    while (sendmsg(s->fd, &message, MSG_NOSIGNAL) < 0 && errno == EINTR)
        ;
}

static void start(spawner *s, uint32_t r)
{
    const pid_t parent = getpid();
    yard_spawn_news news = { .kind = YARD_SPAWN_STARTED, .r = r };
    int fds[2];

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) {
        news.status = errno;
        tell(s, news, -1);
        return;
    }
    news.pid = fork();
    if (news.pid == 0) {
        close(fds[0]);
        become_rank(s, r, fds[1], parent);
    }
    close(fds[1]);
    news.status = news.pid < 0 ? errno : 0;
    s->pid[r] = news.pid > 0 ? news.pid : 0;
    tell(s, news, news.pid > 0 ? fds[0] : -1);
    close(fds[0]);
}

static uint32_t rank_of(const spawner *s, pid_t pid)
{
    uint32_t r = 0;

    while (r < s->n_ranks && s->pid[r] != pid)
        r++;
    return r;
}

static void look_at_children(spawner *s)
{
    struct signalfd_siginfo info;
    pid_t pid;
    int status;

    if (read(s->signals, &info, sizeof(info)) < 0 && errno != EAGAIN)
        return;
    while ((pid = waitpid(-1, &status, WNOHANG | WUNTRACED | WCONTINUED)) > 0) {
        yard_spawn_news news = { .r = rank_of(s, pid), .pid = pid, .status = status };

        if (news.r == s->n_ranks)
            continue;
        news.kind = WIFSTOPPED(status)     ? YARD_SPAWN_STOPPED
                    : WIFCONTINUED(status) ? YARD_SPAWN_CONTINUED
                                           : YARD_SPAWN_ENDED;
        if (news.kind == YARD_SPAWN_ENDED)
            s->pid[news.r] = 0;
        tell(s, news, -1);
    }
}

/* False: the pod's process is gone. */
static bool take_order(spawner *s)
{
    yard_spawn_order order;
    ssize_t n;

    while ((n = recv(s->fd, &order, sizeof(order), 0)) < 0 && errno == EINTR)
        ;
    if (n != (ssize_t)sizeof(order) || order.r >= s->n_ranks)
        return false;
    if (order.kind == YARD_SPAWN_START)
        start(s, order.r);
    else if (s->pid[order.r] > 0)
        kill(s->pid[order.r], order.signal);
    return true;
}

static void serve(spawner *s)
{
    bool on = true;

    while (on) {
        struct pollfd fds[2] = { { .fd = s->fd, .events = POLLIN },
                                 { .fd = s->signals, .events = POLLIN } };

        if (poll(fds, 2, -1) < 0)
            continue;
        if (fds[1].revents)
            look_at_children(s);
        if (fds[0].revents)
            on = take_order(s);
    }
}

void yard_pod_spawner_main(int fd, const yard_pod_rank_config *config, uint32_t n_ranks)
{
    spawner s = { .fd = fd, .config = config, .n_ranks = n_ranks };
    sigset_t child;

    /* Ctrl-C of a terminal and the end of a service go to all processes: the pod's decides what
     * they mean. Descriptors of the caller are none of ours, nor of the ranks'. */
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    if (fd > STDERR_FILENO + 1)
        close_range(STDERR_FILENO + 1, (unsigned int)fd - 1, 0);
    close_range((unsigned int)fd + 1, ~0u, 0);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, NULL);
    signal(SIGCHLD, SIG_DFL);
    s.signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    s.pid = calloc(n_ranks, sizeof(*s.pid));
    if (s.signals < 0 || !s.pid)
        _exit(EXIT_FAILURE);
    serve(&s);
    for (uint32_t r = 0; r < n_ranks; r++)
        if (s.pid[r] > 0)
            kill(s.pid[r], SIGKILL);
    while (waitpid(-1, NULL, 0) > 0 || errno == EINTR)
        ;
    _exit(EXIT_SUCCESS);
}
