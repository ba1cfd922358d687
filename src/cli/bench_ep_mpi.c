/* Runs bench/ep_mpi under mpirun and reads its results. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/bench_ep.h"

enum { MAX_WORDS = 16 + YARD_BENCH_MAX_LIST, EXIT_NOT_FOUND = 127 };

typedef struct command {
    char program[512], numbers[MAX_WORDS][16];
    char *words[MAX_WORDS + 1];
    int n;
} command;

static void add(command *c, const char *word)
{
    c->words[c->n++] = (char *)word;
}

static void add_number(command *c, uint64_t value)
{
    snprintf(c->numbers[c->n], sizeof(c->numbers[0]), "%llu", (unsigned long long)value);
    add(c, c->numbers[c->n]);
}

/* The helper lies beside this program. */
static yard_status find_program(command *c, yard_error *err)
{
    const ssize_t n = readlink("/proc/self/exe", c->program, sizeof(c->program) - 16);
    char *slash;

    c->program[n > 0 ? n : 0] = '\0';
    slash = strrchr(c->program, '/');
    if (!slash)
        return yard_fail(err, YARD_ENOTSUP, "cannot tell where this program lies");
    memcpy(slash + 1, "ep_mpi", sizeof("ep_mpi"));
    if (access(c->program, X_OK) != 0)
        return yard_fail(err, YARD_ENOTSUP, "no %s: it is built where Open MPI is installed",
                         c->program);
    return YARD_OK;
}

static void write_command(command *c, const yard_bench_ep_settings *s, bool padded)
{
    add(c, "mpirun");
    if (geteuid() == 0)
        add(c, "--allow-run-as-root");
    if (s->n_ranks > yard_cpu_count())
        add(c, "--oversubscribe");
    add(c, "--bind-to");
    add(c, s->n_ranks > yard_cpu_count() ? "none" : "core");
    add(c, "-n");
    add_number(c, s->n_ranks);
    add(c, c->program);
    add(c, padded ? "padded" : "counts");
    add_number(c, s->hidden);
    add_number(c, s->n_experts);
    add_number(c, s->top_k);
    add_number(c, s->n_repeats);
    for (uint32_t i = 0; i < s->tokens.n; i++)
        add_number(c, s->tokens.value[i]);
    c->words[c->n] = NULL;
}

static bool read_result(const char *line, uint32_t n_tokens, yard_bench_ep_result *out)
{
    unsigned int tokens = 0;
    int verified = 0, n = 0;

    if (sscanf(line, "result %u %d%n", &tokens, &verified, &n) != 2 || tokens != n_tokens)
        return false;
    out->verified = verified == 1;
    for (int phase = 0; phase < YARD_BENCH_EP_N_PHASES; phase++) {
        yard_bench_ep_times *t = &out->phase[phase];
        int n_more = 0;

        if (sscanf(line + n, "%lf %lf %lf %lf%n", &t->p50_us, &t->p99_us, &t->min_us, &t->bytes,
                   &n_more) != 4)
            return false;
        n += n_more;
    }
    return true;
}

static uint32_t read_results(FILE *from, const yard_bench_ep_settings *s, yard_bench_ep_result *out)
{
    char line[1024];
    uint32_t n = 0;

    while (fgets(line, sizeof(line), from))
        if (n < s->tokens.n && read_result(line, s->tokens.value[n], &out[n]))
            n++;
    return n;
}

static yard_status start(const command *c, pid_t *pid, FILE **from, yard_error *err)
{
    int ends[2];

    if (pipe(ends) != 0)
        return yard_fail(err, YARD_EIO, "cannot start mpirun: %s", strerror(errno));
    fflush(NULL);
    *pid = fork();
    if (*pid == 0) {
        dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        close(ends[1]);
        execvp(c->words[0], c->words);
        _exit(EXIT_NOT_FOUND);
    }
    close(ends[1]);
    *from = *pid > 0 ? fdopen(ends[0], "r") : NULL;
    if (*from)
        return YARD_OK;
    close(ends[0]);
    return yard_fail(err, YARD_EIO, "cannot start mpirun: %s", strerror(errno));
}

yard_status yard_bench_ep_run_mpi(const yard_bench_ep_settings *s, bool padded,
                                  yard_bench_ep_result *out, yard_error *err)
{
    command c = { .n = 0 };
    FILE *from = NULL;
    pid_t pid = 0;
    uint32_t n = 0;
    int status = 0;
    yard_status st = find_program(&c, err);

    if (st == YARD_OK) {
        write_command(&c, s, padded);
        st = start(&c, &pid, &from, err);
    }
    if (st != YARD_OK)
        return st;
    n = read_results(from, s, out);
    fclose(from);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    if (WIFEXITED(status) && WEXITSTATUS(status) == EXIT_NOT_FOUND)
        return yard_fail(err, YARD_ENOTSUP, "there is no mpirun");
    if (n < s->tokens.n || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
        return yard_fail(err, YARD_ENOTSUP, "%s gave %u of %u results", c.program, n, s->tokens.n);
    return YARD_OK;
}
