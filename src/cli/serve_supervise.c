#include "cli/serve_supervise.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/cli.h"

enum {
    FIRST_PAUSE_US = 100000,
    LAST_PAUSE_US = 5000000,
    GOOD_LIFE_US = 10000000, /* after which a death is news, not a habit */
    END_US = 10000000,       /* for an engine to end after SIGTERM */
    STOPPED_US = 5000000     /* a process that stays stopped (SIGSTOP) so long is killed */
};

typedef struct child {
    const char *name;
    char *const *argv;
    pid_t pid; /* 0: not running */
    uint64_t started_us, start_us;
    uint64_t stopped_us; /* since when; 0: it is not */
    uint64_t pause_us;
    bool has_lived; /* well, once */
} child;

typedef struct supervisor {
    const yard_supervise_config *config;
    child engine, front;
    int signals;
    bool ending;
    uint64_t kill_us; /* when the engine has had its time; 0: not yet asked */
} supervisor;

/* Ctrl-C of a terminal goes to all its processes: this one decides what it means. */
static void become(const supervisor *s, const child *c, pid_t parent)
{
    sigset_t none;

    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent)
        _exit(EXIT_FAILURE);
    signal(SIGINT, SIG_IGN);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (c == &s->front)
        fcntl(s->config->listen_fd, F_SETFD, 0);
    else
        dup2(STDERR_FILENO, STDOUT_FILENO); /* standard output tells when the service is ready */
    execv("/proc/self/exe", c->argv);
    _exit(EXIT_FAILURE);
}

static void start(supervisor *s, child *c)
{
    const pid_t parent = getpid();
    const pid_t pid = fork();

    if (pid == 0)
        become(s, c, parent);
    c->started_us = yard_now_us();
    if (pid > 0)
        c->pid = pid;
    else
        c->start_us = c->started_us + LAST_PAUSE_US; /* no process to be had: later */
}

static void describe(int status, char *how, size_t n_how)
{
    if (WIFSIGNALED(status))
        snprintf(how, n_how, "was killed by signal %d (%s)", WTERMSIG(status),
                 strsignal(WTERMSIG(status)));
    else
        snprintf(how, n_how, "ended with exit code %d", WEXITSTATUS(status));
}

/* False: it is of no use to try again. */
static bool plan_next(child *c, int status, yard_error *err)
{
    const uint64_t now_us = yard_now_us();
    char how[80];

    describe(status, how, sizeof(how));
    if (now_us - c->started_us >= GOOD_LIFE_US) {
        c->has_lived = true;
        c->pause_us = 0;
    }
    if (!c->has_lived && WIFEXITED(status) && WEXITSTATUS(status) != 0) {
        yard_fail(err, YARD_EIO, "the %s %s", c->name, how);
        return false;
    }
    c->pause_us = c->pause_us == 0                  ? FIRST_PAUSE_US
                  : c->pause_us * 2 < LAST_PAUSE_US ? c->pause_us * 2
                                                    : LAST_PAUSE_US;
    c->start_us = now_us + c->pause_us;
    fprintf(stderr, "switchyard serve: the %s %s; starting it again in %.1f s\n", c->name, how,
            (double)c->pause_us * 1e-6);
    return true;
}

static void tell(const child *c, int signal_number)
{
    if (c->pid > 0)
        kill(c->pid, signal_number);
}

/* Takes what has ended, and notes what was stopped or goes on. */
static bool reap(supervisor *s, yard_error *err)
{
    int status;
    pid_t pid;
    bool good = true;

    while ((pid = waitpid(-1, &status, WNOHANG | WUNTRACED | WCONTINUED)) > 0) {
        child *c = pid == s->engine.pid ? &s->engine : pid == s->front.pid ? &s->front : NULL;

        if (!c)
            continue;
        c->stopped_us = WIFSTOPPED(status) ? yard_now_us() : 0;
        if (WIFSTOPPED(status) || WIFCONTINUED(status))
            continue;
        c->pid = 0;
        if (!s->ending && !plan_next(c, status, err))
            good = false;
    }
    return good;
}

/* What does not go on by itself keeps every request waiting, and the end of the service. */
static void kill_stopped(supervisor *s)
{
    child *const both[] = { &s->engine, &s->front };

    for (int i = 0; i < 2; i++)
        if (both[i]->stopped_us > 0 && yard_now_us() - both[i]->stopped_us >= STOPPED_US) {
            both[i]->stopped_us = 0;
            tell(both[i], SIGKILL);
        }
}

/* The front first: its requests need the engine. */
static void go_on_ending(supervisor *s)
{
    const uint64_t now_us = yard_now_us();

    if (s->front.pid > 0 || s->engine.pid == 0)
        return;
    if (s->kill_us == 0) {
        s->kill_us = now_us + END_US;
        tell(&s->engine, SIGTERM);
    } else if (now_us >= s->kill_us) {
        tell(&s->engine, SIGKILL);
    }
}

static void on_signal(supervisor *s)
{
    struct signalfd_siginfo info;

    while (read(s->signals, &info, sizeof(info)) == sizeof(info)) {
        if (info.ssi_signo == SIGCHLD)
            continue; /* reap looks anyway */
        if (s->ending) {
            tell(&s->front, SIGKILL);
            tell(&s->engine, SIGKILL);
        }
        s->ending = true;
        tell(&s->front, SIGTERM);
    }
}

static void start_due(supervisor *s)
{
    child *const both[] = { &s->engine, &s->front };
    const uint64_t now_us = yard_now_us();

    for (int i = 0; i < 2; i++)
        if (both[i]->pid == 0 && both[i]->start_us <= now_us)
            start(s, both[i]);
}

/* Milliseconds until something is due, -1: nothing is. */
static int next_wait(const supervisor *s)
{
    const uint64_t now_us = yard_now_us();
    uint64_t at_us = UINT64_MAX;

    if (s->ending && s->kill_us > 0)
        at_us = s->kill_us;
    if (!s->ending && s->engine.pid == 0)
        at_us = s->engine.start_us;
    if (!s->ending && s->front.pid == 0 && s->front.start_us < at_us)
        at_us = s->front.start_us;
    for (int i = 0; i < 2; i++) {
        const uint64_t stopped_us = (i ? &s->front : &s->engine)->stopped_us;

        if (stopped_us > 0 && stopped_us + STOPPED_US < at_us)
            at_us = stopped_us + STOPPED_US;
    }
    if (at_us == UINT64_MAX)
        return -1;
    return at_us > now_us ? (int)((at_us - now_us) / 1000) + 1 : 0;
}

static yard_status supervise(supervisor *s, yard_error *err)
{
    struct pollfd wait = { .fd = s->signals, .events = POLLIN };
    yard_status st = YARD_OK;

    for (;;) {
        if (!s->ending)
            start_due(s);
        poll(&wait, 1, next_wait(s));
        on_signal(s);
        if (!reap(s, err) && st == YARD_OK) {
            st = YARD_EIO;
            s->ending = true;
            tell(&s->front, SIGTERM);
        }
        kill_stopped(s);
        if (s->ending)
            go_on_ending(s);
        if (s->ending && s->front.pid == 0 && s->engine.pid == 0)
            return st;
    }
}

yard_status yard_supervise(const yard_supervise_config *config, yard_error *err)
{
    supervisor s = { .config = config,
                     .engine = { .name = "engine", .argv = config->engine },
                     .front = { .name = "front", .argv = config->front } };
    sigset_t set;
    yard_status st;

    signal(SIGPIPE, SIG_IGN); /* whoever read the messages may be gone: the service goes on */
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    s.signals = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    if (s.signals < 0)
        return yard_fail(err, YARD_EIO, "signalfd: %s", strerror(errno));
    st = supervise(&s, err);
    close(s.signals);
    return st;
}
