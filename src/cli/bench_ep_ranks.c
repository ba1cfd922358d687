/* The ranks of `switchyard bench ep`: processes that share a page of state with their parent, start
 * every repeat together, and leave their durations there. */
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/bench_ep.h"
#include "ep/ep.h"

enum { SPINS_BEFORE_YIELD = 20000, RENDEZVOUS_PORT = 29417 };

/* Shared by the ranks and the parent. */
typedef struct shared {
    _Atomic uint32_t n_arrived, generation; /* the barrier */
    _Atomic bool aborted;                   /* a rank failed */
    _Atomic bool linked;                    /* the namespaces are joined */
    _Atomic uint32_t n_left;                /* ranks in their own namespace */
    _Atomic uint32_t n_opened;              /* ranks whose peer is open */
    _Atomic uint32_t stop_at;               /* repeats of the current case; rank 0 shortens it */
    _Atomic uint32_t n_agreed;              /* the same where the device times; rank 0 says it */
    _Atomic uint32_t port;
    uint8_t group_id[YARD_EP_NCCL_ID_BYTES];
    char rendezvous[64];
} shared;

/* What a rank is at; its parent ends those that stay there. */
typedef enum step { OPEN, PREPARE, FIRST, TIMED, LAST, CLOSE } step;
static const char *const step_text[] = { "open",          "prepare",       "first exchange",
                                         "timed repeats", "last exchange", "close" };

/* What a rank leaves for its parent. */
typedef struct report {
    _Atomic uint64_t since_us; /* of its last progress */
    _Atomic uint32_t step, n_tokens;
    _Atomic uint32_t n_done; /* results that are there */
    yard_error err;
    yard_bench_ep_result results[YARD_BENCH_MAX_LIST];
} report;

typedef struct group {
    const yard_bench_ep_group *g;
    uint32_t n_ranks;
    shared *shared;
    report *reports; /* [n_ranks], in the shared memory too */
    size_t shared_bytes;
    pid_t pids[YARD_BENCH_EP_MAX_RANKS]; /* 0: ended */
} group;

static void progress(const group *g, uint32_t rank, step at, uint32_t n_tokens)
{
    report *mine = &g->reports[rank];

    atomic_store(&mine->step, at);
    atomic_store(&mine->n_tokens, n_tokens);
    atomic_store(&mine->since_us, yard_now_us());
}

/* All ranks leave within a fraction of a microsecond when each has a core. */
static yard_status barrier(const group *g, yard_error *err)
{
    shared *s = g->shared;
    const uint32_t generation = atomic_load(&s->generation);

    if (atomic_fetch_add(&s->n_arrived, 1) + 1 == g->n_ranks) {
        atomic_store(&s->n_arrived, 0);
        atomic_fetch_add(&s->generation, 1);
        return YARD_OK;
    }
    for (uint32_t i = 0; atomic_load(&s->generation) == generation; i++) {
        if (atomic_load(&s->aborted))
            return yard_fail(err, YARD_EPEER, "another rank failed");
        if (i >= SPINS_BEFORE_YIELD)
            sched_yield();
    }
    return YARD_OK;
}

static yard_status exchange(const yard_bench_ep_peer *peer, yard_bench_ep_rank *r, double *us,
                            yard_error *err)
{
    const double begin_us = yard_bench_now_us();
    double middle_us;
    yard_status st = peer->dispatch(r, err);

    us[YARD_BENCH_EP_DISPATCH] = yard_bench_now_us() - begin_us;
    if (peer->experts)
        peer->experts(r);
    middle_us = yard_bench_now_us();
    if (st == YARD_OK)
        st = peer->combine(r, err);
    us[YARD_BENCH_EP_COMBINE] = yard_bench_now_us() - middle_us;
    us[YARD_BENCH_EP_PAIR] = us[YARD_BENCH_EP_DISPATCH] + us[YARD_BENCH_EP_COMBINE];
    return st;
}

/* One exchange of new values, outside of the timing. */
static yard_status exchange_checked(const group *g, yard_bench_ep_rank *r, uint64_t seed,
                                    bool *verified, yard_error *err)
{
    const yard_bench_ep_peer *peer = g->g->peer;
    double us[YARD_BENCH_EP_N_PHASES];
    yard_status st;

    yard_bench_ep_fill(r->data, seed);
    peer->poison(r);
    st = exchange(peer, r, us, err);
    *verified = *verified && st == YARD_OK && peer->check(r, err);
    return st;
}

/* Rank 0 ends a case that has lasted long enough: what it writes before a barrier, all read behind
 * it, so all leave at the same repeat. */
static void shorten(shared *s, uint32_t rank, uint32_t i, uint32_t n_warmup, double begun_us)
{
    if (rank == 0 && i >= n_warmup + YARD_BENCH_EP_MIN_REPEATS &&
        yard_bench_now_us() - begun_us > YARD_BENCH_EP_CASE_US && i < atomic_load(&s->stop_at))
        atomic_store(&s->stop_at, i);
}

/* samples_us  [phases, n_repeats]. *n is how many were taken. */
static yard_status repeat(const group *g, yard_bench_ep_rank *r, double *samples_us, uint32_t *n,
                          yard_error *err)
{
    const uint32_t n_repeats = (uint32_t)r->settings->n_repeats;
    const uint32_t n_warmup = 1 + n_repeats / 10;
    const double begun_us = yard_bench_now_us();
    yard_status st;

    if (r->rank == 0)
        atomic_store(&g->shared->stop_at, n_warmup + n_repeats);
    st = barrier(g, err);
    *n = 0;
    for (uint32_t i = 0; st == YARD_OK; i++) {
        double us[YARD_BENCH_EP_N_PHASES];

        shorten(g->shared, r->rank, i, n_warmup, begun_us);
        st = barrier(g, err);
        if (st != YARD_OK || i >= atomic_load(&g->shared->stop_at))
            break;
        st = exchange(g->g->peer, r, us, err);
        progress(g, r->rank, TIMED, r->data->shape.n_tokens);
        if (i < n_warmup)
            continue;
        for (int phase = 0; phase < YARD_BENCH_EP_N_PHASES; phase++)
            samples_us[(size_t)phase * n_repeats + *n] = us[phase];
        (*n)++;
    }
    return st;
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* What rank 0 writes before the first barrier, all have read behind the second. */
uint32_t yard_bench_ep_agree(void *rank, double us)
{
    const yard_bench_ep_rank *r = rank;
    const group *g = r->group;
    const uint64_t n_repeats = r->settings->n_repeats;
    const double n = us > 0 ? YARD_BENCH_EP_CASE_US / us : (double)n_repeats;
    uint32_t agreed;

    progress(g, r->rank, TIMED, r->data->shape.n_tokens);
    if (r->rank == 0 && atomic_load(&g->shared->n_agreed) == 0)
        atomic_store(&g->shared->n_agreed,
                     n >= (double)n_repeats ? (uint32_t)n_repeats
                     : n < YARD_BENCH_EP_MIN_REPEATS
                         ? (uint32_t)least(YARD_BENCH_EP_MIN_REPEATS, n_repeats)
                         : (uint32_t)n);
    if (barrier(g, NULL) != YARD_OK)
        return 0;
    agreed = atomic_load(&g->shared->n_agreed);
    return barrier(g, NULL) == YARD_OK ? agreed : 0;
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

static void summarise(const group *g, const yard_bench_ep_rank *r, double *samples_us, uint32_t n,
                      yard_bench_ep_result *out)
{
    const yard_bench_ep_peer *peer = g->g->peer;
    const double layout_bytes[] = { yard_bench_ep_dispatch_bytes(r->data),
                                    yard_bench_ep_combine_bytes(r->data),
                                    yard_bench_ep_dispatch_bytes(r->data) +
                                        yard_bench_ep_combine_bytes(r->data) };
    const double dispatched =
        (double)yard_bench_ep_row_bytes(r->data) * larger(r->data->n_rows_out, r->data->n_rows_in);
    const double combined = (double)yard_bench_ep_result_bytes(r->data) *
                            larger(r->data->n_results_out, r->data->n_results_in);
    const double wire_bytes[] = { dispatched, combined, dispatched + combined };

    for (int phase = 0; phase < YARD_BENCH_EP_N_PHASES; phase++) {
        yard_bench_row row = { 0 };

        yard_bench_fill(&row, samples_us + (size_t)phase * r->settings->n_repeats, n);
        out->phase[phase] =
            (yard_bench_ep_times){ row.p50_us, row.p99_us, row.min_us,
                                   peer->bytes ? peer->bytes(r, phase) : layout_bytes[phase],
                                   wire_bytes[phase] };
    }
}

/* The timed repeats; their time is limited, so there may be fewer than were asked for. */
static yard_status run_timed(const group *g, yard_bench_ep_rank *r, double *samples_us, uint32_t *n,
                             yard_error *err)
{
    yard_status st;

    if (!g->g->peer->measure)
        return repeat(g, r, samples_us, n, err);
    if (r->rank == 0) /* all have read that of the case before */
        atomic_store(&g->shared->n_agreed, 0);
    st = g->g->peer->measure(r, samples_us, n, err);
    return st == YARD_OK && *n == 0 ? yard_fail(err, YARD_EPEER, "another rank failed") : st;
}

/* One number of tokens. The first and the last exchange have values of their own, so that nothing
 * that an earlier one left can pass for them; the last timed repeat is checked too. */
static yard_status run_case(const group *g, yard_bench_ep_rank *r, uint32_t n_tokens,
                            yard_bench_ep_result *out, yard_error *err)
{
    const yard_bench_ep_settings *s = r->settings;
    const yard_bench_ep_shape shape = { .n_ranks = s->n_ranks,
                                        .hidden = s->hidden,
                                        .n_experts = s->n_experts,
                                        .top_k = s->top_k,
                                        .n_tokens = n_tokens,
                                        .partial = r->partial,
                                        .layout = r->layout,
                                        .grouped = s->grouped };
    double *samples_us = malloc(YARD_BENCH_EP_N_PHASES * s->n_repeats * sizeof(*samples_us));
    uint32_t n = 0;
    yard_status st;

    progress(g, r->rank, PREPARE, n_tokens);
    st = yard_bench_ep_data_create(&r->data, &shape, r->rank, err);
    if (st == YARD_OK && !samples_us)
        st = yard_fail(err, YARD_ENOMEM, "bench: no memory for samples");
    if (st == YARD_OK)
        st = g->g->peer->prepare(r, err);
    out->verified = true;
    progress(g, r->rank, FIRST, n_tokens);
    if (st == YARD_OK)
        st = exchange_checked(g, r, 1, &out->verified, err);
    progress(g, r->rank, TIMED, n_tokens);
    if (st == YARD_OK) {
        yard_bench_ep_fill(r->data, 2);
        st = run_timed(g, r, samples_us, &n, err);
    }
    progress(g, r->rank, LAST, n_tokens);
    if (st == YARD_OK)
        out->verified = out->verified && g->g->peer->check(r, err);
    if (st == YARD_OK)
        st = exchange_checked(g, r, 3, &out->verified, err);
    if (st == YARD_OK)
        summarise(g, r, samples_us, n, out);
    snprintf(out->device, sizeof(out->device), "%s", r->device);
    free(samples_us);
    yard_bench_ep_data_destroy(r->data);
    r->data = NULL;
    return st;
}

/* Every rank the same share of the CPUs, when there are enough. */
static void pin(uint32_t rank, uint32_t n_ranks)
{
    cpu_set_t all, mine;
    uint32_t n_cpus, n = 0;

    if (sched_getaffinity(0, sizeof(all), &all) != 0)
        return;
    n_cpus = (uint32_t)CPU_COUNT(&all);
    if (n_ranks > n_cpus)
        return;
    CPU_ZERO(&mine);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &all))
            continue;
        if (n >= rank * n_cpus / n_ranks && n < (rank + 1) * n_cpus / n_ranks)
            CPU_SET(cpu, &mine);
        n++;
    }
    sched_setaffinity(0, sizeof(mine), &mine);
}

static yard_status enter_link(group *g, uint32_t rank, yard_error *err)
{
    yard_status st;

    if (!g->g->namespaces)
        return YARD_OK;
    st = yard_bench_ep_link_leave(err);
    if (st != YARD_OK)
        return st;
    atomic_fetch_add(&g->shared->n_left, 1);
    while (!atomic_load(&g->shared->linked) && !atomic_load(&g->shared->aborted))
        usleep(1000);
    st = yard_bench_ep_link_up(rank, err);
    return st == YARD_OK ? barrier(g, err) : st;
}

static uint32_t max_tokens(const yard_bench_ep_settings *s)
{
    uint32_t max = 0;

    for (uint32_t i = 0; i < s->tokens.n; i++)
        max = s->tokens.value[i] > max ? s->tokens.value[i] : max;
    return max;
}

static yard_status rank_main(group *g, uint32_t rank, yard_error *err)
{
    report *mine = &g->reports[rank];
    yard_bench_ep_rank r = { .settings = g->g->settings,
                             .peer = g->g->peer,
                             .rank = rank,
                             .max_tokens = max_tokens(g->g->settings),
                             .partial = g->g->partial,
                             .layout = g->g->layout,
                             .host = g->g->namespaces ? yard_bench_ep_link_host(rank) : "127.0.0.1",
                             .rendezvous = g->shared->rendezvous,
                             .port = &g->shared->port,
                             .group_id = g->shared->group_id,
                             .group = g };
    yard_status st;

    pin(rank, g->n_ranks);
    st = enter_link(g, rank, err);
    if (st == YARD_OK)
        st = g->g->peer->open(&r, err);
    if (st == YARD_OK)
        atomic_fetch_add(&g->shared->n_opened, 1);
    for (uint32_t i = 0; st == YARD_OK && i < r.settings->tokens.n; i++) {
        st = run_case(g, &r, r.settings->tokens.value[i], &mine->results[i], err);
        atomic_fetch_add(&mine->n_done, st == YARD_OK);
    }
    progress(g, rank, CLOSE, 0);
    g->g->peer->close(&r);
    return st;
}

static yard_status share_memory(group *g, yard_error *err)
{
    const size_t head_bytes = yard_align_up(sizeof(shared), 64);
    void *p;

    g->shared_bytes = head_bytes + g->n_ranks * sizeof(report);
    p = mmap(NULL, g->shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return yard_fail(err, YARD_ENOMEM, "bench: %zu bytes of shared memory", g->shared_bytes);
    g->shared = p;
    g->reports = (report *)(void *)((uint8_t *)p + head_bytes);
    if (g->g->namespaces)
        snprintf(g->shared->rendezvous, sizeof(g->shared->rendezvous), "%s:%d",
                 yard_bench_ep_link_host(0), RENDEZVOUS_PORT);
    else
        snprintf(g->shared->rendezvous, sizeof(g->shared->rendezvous), "unix:bench-ep-%d-%llu",
                 (int)getpid(), (unsigned long long)yard_now_us());
    return YARD_OK;
}

static yard_status start(group *g, yard_error *err)
{
    const pid_t parent = getpid();

    fflush(NULL); /* children inherit what is buffered */
    for (uint32_t rank = 0; rank < g->n_ranks; rank++) {
        pid_t pid;

        progress(g, rank, OPEN, 0);
        pid = fork();
        if (pid == 0) {
            if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent)
                _exit(EXIT_FAILURE);
            _exit(rank_main(g, rank, &g->reports[rank].err) == YARD_OK ? 0 : EXIT_FAILURE);
        }
        if (pid < 0)
            return yard_fail(err, YARD_EIO, "cannot start rank %u: %s", rank, strerror(errno));
        g->pids[rank] = pid;
    }
    return YARD_OK;
}

/* The message of a rank is worth more than "another rank failed". */
static void note_end(group *g, uint32_t rank, int status, yard_error *err)
{
    const yard_error *theirs = &g->reports[rank].err;

    g->pids[rank] = 0;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return;
    if (WIFSIGNALED(status))
        yard_fail(err, YARD_EPEER, "rank %u was killed by signal %d", rank, WTERMSIG(status));
    else if (err->status == YARD_OK || (err->status == YARD_EPEER && theirs->status != YARD_EPEER))
        *err = *theirs;
    atomic_store(&g->shared->aborted, true);
}

/* Nobody waits for ever: neither for a rank whose library or device does not answer, nor for one
 * that waits for a rank which has failed. */
static bool find_stuck(const group *g, yard_error *err)
{
    const uint64_t limit_us =
        atomic_load(&g->shared->aborted) ? YARD_BENCH_EP_LEFT_US : YARD_BENCH_EP_STUCK_US;
    const uint64_t now_us = yard_now_us(); /* since the machine's start, so maybe below the limit */
    uint64_t longest_us = limit_us;
    uint32_t stuck = UINT32_MAX, n_tokens;
    char tokens[32] = "";

    for (uint32_t rank = 0; rank < g->n_ranks; rank++) {
        const uint64_t since_us = atomic_load(&g->reports[rank].since_us);

        if (g->pids[rank] > 0 && now_us > since_us && now_us - since_us > longest_us) {
            longest_us = now_us - since_us;
            stuck = rank; /* others wait for the one that has been there for longest */
        }
    }
    if (stuck == UINT32_MAX)
        return false;
    n_tokens = atomic_load(&g->reports[stuck].n_tokens);
    if (n_tokens > 0)
        snprintf(tokens, sizeof(tokens), " of %u tokens", n_tokens);
    if (err->status == YARD_OK)
        yard_fail(err, YARD_ETIMEDOUT, "rank %u: %s%s: no end within %.0f s", stuck,
                  step_text[atomic_load(&g->reports[stuck].step)], tokens, (double)limit_us / 1e6);
    return true;
}

/* Reaps the ranks; joins the namespaces as soon as both ranks are in theirs. */
static yard_status watch(group *g, yard_error *err)
{
    yard_error found = { 0 };
    uint32_t n_running = g->n_ranks;

    while (n_running > 0 && !find_stuck(g, &found)) {
        const bool joins = g->g->namespaces && !atomic_load(&g->shared->linked);

        if (joins && atomic_load(&g->shared->n_left) == g->n_ranks) {
            if (yard_bench_ep_link_join(g->pids, &found) != YARD_OK)
                atomic_store(&g->shared->aborted, true);
            atomic_store(&g->shared->linked, true);
        }
        for (uint32_t rank = 0; rank < g->n_ranks; rank++) {
            int status;

            if (g->pids[rank] > 0 && waitpid(g->pids[rank], &status, WNOHANG) > 0) {
                note_end(g, rank, status, &found);
                n_running--;
            }
        }
        usleep(joins ? 1000 : 20000); /* seldom: the ranks want all cores */
    }
    if (found.status != YARD_OK && atomic_load(&g->shared->n_opened) < g->n_ranks)
        return yard_fail(err, YARD_ENOTSUP, "%s", found.message);
    if (found.status != YARD_OK)
        *err = found;
    return found.status;
}

/* A process whose device hangs may stay in the kernel: it is left behind. */
static void kill_all(group *g)
{
    const uint64_t until_us = yard_now_us() + YARD_BENCH_EP_LEFT_US;

    for (uint32_t rank = 0; rank < g->n_ranks; rank++)
        if (g->pids[rank] > 0)
            kill(g->pids[rank], SIGKILL);
    for (uint32_t rank = 0; rank < g->n_ranks; rank++)
        while (g->pids[rank] > 0 && waitpid(g->pids[rank], NULL, WNOHANG) == 0 &&
               yard_now_us() < until_us)
            usleep(1000);
}

static void merge(const group *g, uint32_t tokens_idx, yard_bench_ep_result *out)
{
    *out = (yard_bench_ep_result){ .verified = true };
    snprintf(out->device, sizeof(out->device), "%s", g->reports[0].results[tokens_idx].device);
    for (uint32_t rank = 0; rank < g->n_ranks; rank++) {
        const yard_bench_ep_result *r = &g->reports[rank].results[tokens_idx];

        out->verified = out->verified && r->verified;
        for (int phase = 0; phase < YARD_BENCH_EP_N_PHASES; phase++) {
            yard_bench_ep_times *to = &out->phase[phase];
            const yard_bench_ep_times *from = &r->phase[phase];

            to->p50_us = larger(to->p50_us, from->p50_us);
            to->p99_us = larger(to->p99_us, from->p99_us);
            to->min_us = larger(to->min_us, from->min_us);
            to->bytes = larger(to->bytes, from->bytes);
            to->wire_bytes = larger(to->wire_bytes, from->wire_bytes);
        }
    }
}

/* What was wrong in results that were got and are not right. */
static void tell_wrong(const group *g)
{
    for (uint32_t rank = 0; rank < g->n_ranks; rank++)
        if (g->reports[rank].err.message[0])
            fprintf(stderr, "bench ep: %s, rank %u: %s\n", g->g->peer->name, rank,
                    g->reports[rank].err.message);
}

static uint32_t count_done(const group *g)
{
    uint32_t n = g->g->settings->tokens.n;

    for (uint32_t rank = 0; rank < g->n_ranks; rank++)
        n = (uint32_t)least(n, atomic_load(&g->reports[rank].n_done));
    return n;
}

yard_status yard_bench_ep_run_group(const yard_bench_ep_group *of, yard_bench_ep_result *out,
                                    uint32_t *n_done, yard_error *err)
{
    group g = { .g = of, .n_ranks = of->settings->n_ranks };
    yard_status st = share_memory(&g, err);

    *n_done = 0;
    if (st != YARD_OK)
        return st;
    st = start(&g, err);
    if (st == YARD_OK)
        st = watch(&g, err);
    kill_all(&g);
    if (st == YARD_OK)
        tell_wrong(&g);
    *n_done = count_done(&g);
    for (uint32_t i = 0; i < *n_done; i++)
        merge(&g, i, &out[i]);
    munmap(g.shared, g.shared_bytes);
    return st;
}
