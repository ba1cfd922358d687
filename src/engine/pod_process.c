#include "engine/pod_process.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LOOK_US = 1000 };

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

/* In the child; does not return. Ctrl-C of a terminal goes to all its processes: the parent decides
 * what it means. */
static void become_rank(const yard_pod_rank_config *config, int fd, pid_t parent,
                        const yard_pod_process *others, uint32_t n_others)
{
    /* The signal is for the death of the parent; it may have died before it was asked for. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent)
        _exit(1);
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_DFL);
    if (config->engine.pin != YARD_THREADS_ANYWHERE)
        take_share(config->rank % n_others, n_others);
    for (uint32_t i = 0; i < n_others; i++)
        if (others[i].pid > 0)
            close(others[i].wire.fd);
    _exit(yard_pod_rank_main(config, fd));
}

yard_status yard_pod_process_start(yard_pod_process *p, const yard_pod_rank_config *config,
                                   const yard_pod_process *others, uint32_t n_others,
                                   yard_error *err)
{
    const pid_t parent = getpid();
    int fds[2];
    pid_t pid;

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0)
        return yard_fail(err, YARD_EIO, "rank %u: cannot start: sockets: %s", config->rank,
                         strerror(errno));
    fflush(NULL); /* the child inherits what is buffered */
    pid = fork();
    if (pid == 0) {
        close(fds[0]);
        become_rank(config, fds[1], parent, others, n_others);
    }
    close(fds[1]);
    if (pid < 0) {
        const int code = errno;
        close(fds[0]);
        return yard_fail(err, YARD_EIO, "rank %u: cannot start: %s", config->rank, strerror(code));
    }
    *p = (yard_pod_process){ .pid = pid };
    yard_wire_open(&p->wire, fds[0]);
    return YARD_OK;
}

static void describe(int status, char *how, size_t n_how)
{
    if (WIFSIGNALED(status))
        snprintf(how, n_how, "was killed by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    else
        snprintf(how, n_how, "ended with exit code %d", WEXITSTATUS(status));
}

void yard_pod_process_reap(yard_pod_process *p, uint64_t patience_us, char *how, size_t n_how)
{
    const uint64_t until_us = yard_now_us() + patience_us;
    const struct timespec pause = { .tv_nsec = LOOK_US * 1000 };
    pid_t got = 0;
    int status = 0;

    while (got == 0 && yard_now_us() < until_us) {
        got = waitpid(p->pid, &status, WNOHANG);
        if (got == 0)
            nanosleep(&pause, NULL);
    }
    if (got == 0) {
        kill(p->pid, SIGKILL);
        while ((got = waitpid(p->pid, &status, 0)) < 0 && errno == EINTR)
            ;
    }
    if (got == p->pid)
        describe(status, how, n_how);
    else
        snprintf(how, n_how, "is gone");
    yard_wire_close(&p->wire);
    *p = (yard_pod_process){ .wire = { .fd = -1 } };
}

bool yard_pod_process_look(yard_pod_process *p, bool *stopped)
{
    siginfo_t info = { 0 };

    /* WNOWAIT: the end itself is left for reap. */
    if (waitid(P_PID, (id_t)p->pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0)
        return true;
    info = (siginfo_t){ 0 };
    if (waitid(P_PID, (id_t)p->pid, &info, WSTOPPED | WCONTINUED | WNOHANG) == 0 &&
        info.si_pid != 0)
        *stopped = info.si_code == CLD_STOPPED;
    return false;
}
