/* switchyard run: ranks of a job as processes of this machine. */
#include <argp.h>
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cli/engine_options.h"

enum {
    KEY_RANKS = 0x2000,
    KEY_BIND_CPUS,
    MAX_RANKS = 4096,
    GRACE_US = 5000000, /* after a failure, for the others to notice and end by themselves */
    TERM_US = 3000000,  /* after SIGTERM, before SIGKILL */
    EXIT_NOT_RUNNABLE = 126,
    EXIT_NOT_FOUND = 127,
    EXIT_SIGNAL = 128
};

static const char doc[] =
    "Runs COMMAND as N processes of this machine, the ranks of one job.\v"
    "Each process finds its rank and the others in the environment (YARD_RANK, YARD_SIZE, "
    "YARD_RENDEZVOUS, YARD_SECRET). Output is passed through as it comes. SIGINT and SIGTERM go to "
    "all "
    "ranks. When a rank fails, the others get a few seconds to end by themselves, then they are "
    "stopped, with what they started. When the launcher dies, so do they.\n\n"
    "The exit code is 0 when all ranks ended with 0, else that of the first that failed (128 and "
    "the "
    "signal's number if one killed it).\n\n"
    "Examples:\n"
    "  switchyard run --ranks 4 -- ./my-program --option\n"
    "  switchyard run --ranks 2 --bind-cpus -- switchyard bench ep\n";

static const struct argp_option options[] = {
    { "ranks", KEY_RANKS, "N", 0, "Number of processes", 0 },
    { "bind-cpus", KEY_BIND_CPUS, NULL, 0,
      "Divide the CPUs among the ranks; with more ranks than CPUs, one each in turn", 0 },
    { 0 },
};

typedef struct job {
    uint32_t n_ranks;
    bool bind_cpus;
    char **command;

    char rendezvous[64], secret[33];
    pid_t launcher;
    sigset_t old_mask;
    pid_t *pids; /* [n_ranks]; 0: ended */
    uint32_t n_running;
    int exit_code;
    bool stopping;    /* a rank failed, or we were told to stop */
    uint64_t next_us; /* when the remaining ranks get next_signal; 0: never */
    int next_signal;
} job;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    job *j = state->input;
    yard_error err = { 0 };
    uint64_t value = 0;

    switch (key) {
    case KEY_RANKS:
        if (yard_cli_parse_u64("--ranks", arg, 1, MAX_RANKS, &value, &err) != YARD_OK)
            argp_error(state, "%s", err.message);
        j->n_ranks = (uint32_t)value;
        return 0;
    case KEY_BIND_CPUS:
        j->bind_cpus = true;
        return 0;
    case ARGP_KEY_ARGS:
        j->command = state->argv + state->next;
        return 0;
    case ARGP_KEY_END:
        if (!j->n_ranks)
            argp_error(state, "want --ranks N");
        if (!j->command)
            argp_error(state, "want a COMMAND after --");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

/* Rank r gets CPUs r * n / n_ranks .. of those that the launcher may use. */
static void bind_cpus(const job *j, uint32_t rank)
{
    cpu_set_t all, mine;
    uint32_t n_cpus, first, end, n = 0;

    if (sched_getaffinity(0, sizeof(all), &all) != 0)
        return;
    n_cpus = (uint32_t)CPU_COUNT(&all);
    first = j->n_ranks <= n_cpus ? rank * n_cpus / j->n_ranks : rank % n_cpus;
    end = j->n_ranks <= n_cpus ? (rank + 1) * n_cpus / j->n_ranks : first + 1;
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

static void set_number(const char *name, uint32_t value)
{
    char text[16];

    snprintf(text, sizeof(text), "%u", value);
    setenv(name, text, 1);
}

/* In the child; does not return. */
static void become_rank(const job *j, uint32_t rank)
{
    /* The signal is for the death of the parent; it may have died before it was asked for. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != j->launcher)
        _exit(EXIT_FAILURE);
    set_number("YARD_RANK", rank);
    set_number("YARD_SIZE", j->n_ranks);
    setenv("YARD_RENDEZVOUS", j->rendezvous, 1);
    setenv("YARD_SECRET", j->secret, 1);
    if (j->bind_cpus)
        bind_cpus(j, rank);
    sigprocmask(SIG_SETMASK, &j->old_mask, NULL);
    execvp(j->command[0], j->command);
    if (rank == 0) /* one line, not one of each rank */
        fprintf(stderr, "switchyard run: cannot run '%s': %s\n", j->command[0], strerror(errno));
    _exit(errno == ENOENT ? EXIT_NOT_FOUND : EXIT_NOT_RUNNABLE);
}

static void send_all(const job *j, int signal_number)
{
    for (uint32_t r = 0; r < j->n_ranks; r++)
        if (j->pids[r] > 0)
            kill(j->pids[r], signal_number);
}

static void stop_in(job *j, uint64_t us, int signal_number)
{
    j->stopping = true;
    j->next_us = yard_now_us() + us;
    j->next_signal = signal_number;
}

static void note_end(job *j, uint32_t rank, int status)
{
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_SIGNAL + WTERMSIG(status);

    if (code != 0 && j->exit_code == 0)
        j->exit_code = code;
    if (code != 0 && !j->stopping) {
        if (WIFEXITED(status))
            fprintf(stderr, "switchyard run: rank %u (pid %d) ended with exit code %d%s\n", rank,
                    (int)j->pids[rank], code, j->n_running > 1 ? "; stopping the others" : "");
        else
            fprintf(stderr, "switchyard run: rank %u (pid %d) was killed by signal %d (%s)%s\n",
                    rank, (int)j->pids[rank], WTERMSIG(status), strsignal(WTERMSIG(status)),
                    j->n_running > 1 ? "; stopping the others" : "");
        stop_in(j, GRACE_US, SIGTERM);
    }
    j->pids[rank] = 0;
    j->n_running--;
}

static void reap(job *j)
{
    int status;
    pid_t pid;

    while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
        for (uint32_t r = 0; r < j->n_ranks; r++)
            if (j->pids[r] == pid)
                note_end(j, r, status);
}

static bool start_all(job *j)
{
    for (uint32_t r = 0; r < j->n_ranks; r++) {
        const pid_t pid = fork();

        if (pid == 0)
            become_rank(j, r);
        if (pid < 0) {
            fprintf(stderr, "switchyard run: cannot start rank %u: %s\n", r, strerror(errno));
            return false;
        }
        j->pids[r] = pid;
        j->n_running++;
    }
    return true;
}

/* A terminal sends its Ctrl-C to the whole process group, ranks included; what was sent to the
 * launcher alone is passed on. */
static void pass_on(job *j, const siginfo_t *info)
{
    if (info->si_code <= 0) /* SI_USER, SI_QUEUE, ..: another process */
        send_all(j, info->si_signo);
    stop_in(j, GRACE_US, SIGKILL);
}

static void watch_ranks(job *j, const sigset_t *mask)
{
    while (j->n_running > 0) {
        const uint64_t now = yard_now_us();
        const uint64_t wait_us = j->next_us == 0    ? 3600000000u
                                 : j->next_us > now ? j->next_us - now
                                                    : 0;
        const struct timespec wait = { .tv_sec = (time_t)(wait_us / 1000000),
                                       .tv_nsec = (long)(wait_us % 1000000 * 1000) };
        siginfo_t info;
        const int got = sigtimedwait(mask, &info, &wait);

        if (got > 0 && got != SIGCHLD)
            pass_on(j, &info);
        reap(j);
        if (j->next_us && yard_now_us() >= j->next_us) {
            send_all(j, j->next_signal);
            send_all(j, SIGCONT); /* a stopped process gets SIGTERM when it goes on */
            stop_in(j, TERM_US, SIGKILL);
        }
    }
}

/* What a rank started and left behind (the program of a wrapper script, say) is a child of the
 * launcher then. Kills all there are; false when there are none. */
static bool kill_orphans(void)
{
    char path[64];
    FILE *children;
    bool any = false;
    int pid;

    snprintf(path, sizeof(path), "/proc/self/task/%d/children", (int)getpid());
    children = fopen(path, "re");
    while (children && fscanf(children, "%d", &pid) == 1)
        any |= kill(pid, SIGKILL) == 0;
    if (children)
        fclose(children);
    return any;
}

static bool make_names(job *j)
{
    uint8_t random[24];

    if (getrandom(random, sizeof(random), 0) != sizeof(random))
        return false;
    j->launcher = getpid();
    snprintf(j->rendezvous, sizeof(j->rendezvous), "unix:switchyard-run-%d-", (int)j->launcher);
    for (int i = 0; i < 8; i++)
        snprintf(j->rendezvous + strlen(j->rendezvous), 3, "%02x", random[i]);
    for (int i = 0; i < 16; i++)
        snprintf(j->secret + 2 * i, 3, "%02x", random[8 + i]);
    return true;
}

/* What the launcher looks at; a signal that its own parent set to be ignored stays so. */
static void block_signals(job *j, sigset_t *mask)
{
    static const int passed_on[] = { SIGINT, SIGTERM };
    struct sigaction action;

    signal(SIGCHLD, SIG_DFL); /* ignored, as some parents leave it, it would hide the exit codes */
    sigemptyset(mask);
    sigaddset(mask, SIGCHLD);
    for (int i = 0; i < 2; i++)
        if (sigaction(passed_on[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            sigaddset(mask, passed_on[i]);
    sigprocmask(SIG_BLOCK, mask, &j->old_mask);
}

int yard_cmd_run(int argc, char **argv)
{
    const struct argp argp = { options, parse, "-- COMMAND [ARGUMENT...]", doc, NULL, NULL, NULL };
    job j = { 0 };
    sigset_t mask;

    yard_cli_parse_args(&argp, "switchyard run", argc, argv, ARGP_IN_ORDER, &j);
    j.pids = calloc(j.n_ranks, sizeof(*j.pids));
    if (!j.pids || !make_names(&j)) {
        fprintf(stderr, "switchyard run: no memory for %u ranks\n", j.n_ranks);
        free(j.pids);
        return EXIT_FAILURE;
    }
    block_signals(&j, &mask);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    fflush(NULL); /* children inherit what is buffered */
    if (!start_all(&j)) {
        j.exit_code = EXIT_FAILURE;
        stop_in(&j, 0, SIGKILL);
    }
    watch_ranks(&j, &mask);
    while (j.stopping && kill_orphans()) /* killed ones leave orphans of their own */
        waitpid(-1, NULL, 0);
    free(j.pids);
    return j.exit_code;
}
