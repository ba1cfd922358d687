/* The engine on ranks: rank r has device r modulo the number of devices, so that one GPU will do.
 */
#include "engine_gpu_test.h"

#include <sys/mman.h>

#include "../../ep/cuda/ranks.h"
#include "engine/engine_impl.h"

enum { N_NEW = 24, MAX_PROMPT = 200, LAST_STEP = 6, START_US = 60000000 };

const char *ranks_transport; /* what the library chooses */

/* What a case's ranks were told, for the parent. */
typedef struct answers {
    int32_t token[MAX_PROMPTS][N_NEW];
    float logprob[MAX_PROMPTS][N_NEW];
    uint32_t n[MAX_PROMPTS];
    char lost[YARD_ERROR_MESSAGE_BYTES]; /* of the rank that lost another */
} answers;

typedef struct layout_case {
    const char *name;
    uint32_t n_ranks, tp;
    yard_numeric_mode mode;
    bool uneven;            /* instance 0 has all requests */
    const char *meet_again; /* rank 1 dies; the rest meets there. NULL: all live */
} layout_case;

typedef struct job {
    const test *t;
    const layout_case *c;
    answers *out; /* shared */
} job;

typedef struct rank {
    const job *j;
    yard_fabric_config fabric_config;
    yard_fabric *fabric;
    yard_engine *engine;
    uint64_t id[MAX_PROMPTS]; /* 0: another instance's */
} rank;

static void must(const rank *r, yard_status st, const char *what, const char *why)
{
    if (st == YARD_OK)
        return;
    printf("rank %u: %s: %s\n", r->fabric_config.rank, what, why);
    fflush(stdout);
    _exit(1);
}

static yard_engine_config config_of(const job *j)
{
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;

    config.model_dir = j->t->model;
    config.mode = j->c->mode;
    config.device = "cuda";
    config.cuda_variant = "deterministic";
    config.n_threads = 1;
    config.max_tokens = 192;
    config.kv_tokens = 16384;
    config.prefix_cache = YARD_CACHE_OFF;
    config.tp = j->c->tp;
    config.timeout_us = 4000000;
    config.start_timeout_us = START_US;
    return config;
}

static void open_rank(rank *r)
{
    const uint32_t n_ranks = r->fabric_config.n_ranks;
    yard_engine_config config = config_of(r->j);
    yard_engine_budget budget;
    yard_error err = { 0 };

    must(r, yard_engine_budget_of(&config, n_ranks, r->fabric_config.rank, &budget, &err), "budget",
         err.message);
    r->fabric_config.heap_bytes = budget.heap_bytes;
    r->fabric_config.device_heap_bytes = budget.device_heap_bytes;
    must(r, yard_fabric_create(&r->fabric, &r->fabric_config, &err), "fabric", err.message);
    if (r->engine) {
        must(r, yard_engine_rejoin(r->engine, r->fabric, &err), "rejoin", err.message);
        return;
    }
    config.fabric = r->fabric;
    must(r, yard_engine_create(&r->engine, &config, &err), "engine", err.message);
}

/* One after the other has a prompt of moderate length, or instance 0 all. */
static void submit_all(rank *r)
{
    const test *t = r->j->t;
    const uint32_t dp = r->fabric_config.n_ranks / r->j->c->tp;
    uint32_t place = 0;

    for (uint32_t p = 0; p < t->n; p++) {
        yard_request request = YARD_REQUEST_INIT;

        r->id[p] = 0;
        if (t->prompts[p].n_ids > MAX_PROMPT)
            continue;
        if ((r->j->c->uneven ? 0 : place++ % dp) != r->fabric_config.rank / r->j->c->tp)
            continue;
        request.prompt = t->prompts[p].ids;
        request.n_prompt = t->prompts[p].n_ids;
        request.max_new_tokens = N_NEW;
        request.ignore_eos = true;
        request.n_logprobs = 1;
        must(r, yard_engine_submit(r->engine, &request, &r->id[p]), "submit",
             yard_engine_error(r->engine));
    }
}

static void take_events(rank *r)
{
    answers *out = r->j->out;
    yard_event e;

    while (yard_engine_poll(r->engine, &e, 1))
        for (uint32_t p = 0; p < r->j->t->n; p++) {
            if (r->id[p] != e.id || e.n_tokens == 0 || r->fabric_config.rank % r->j->c->tp != 0)
                continue;
            CHECK(out->n[p] < N_NEW && e.n_logprobs > 0);
            out->token[p][out->n[p]] = e.token;
            out->logprob[p][out->n[p]++] = e.logprob[0].logprob;
        }
}

static uint64_t steps_so_far(const rank *r)
{
    yard_engine_stats stats;

    yard_engine_get_stats(r->engine, &stats);
    return stats.n_steps;
}

/* Until a call runs no step. */
static yard_status run(rank *r, uint64_t n_most)
{
    yard_status st = YARD_OK;
    uint64_t before;

    do {
        before = steps_so_far(r);
        st = yard_engine_step(r->engine);
        if (st == YARD_OK)
            take_events(r);
    } while (st == YARD_OK && steps_so_far(r) > before && steps_so_far(r) < n_most);
    return st;
}

static void answering_rank(const yard_fabric_config *config, void *ctx)
{
    rank r = { .j = ctx, .fabric_config = *config };

    open_rank(&r);
    submit_all(&r);
    must(&r, run(&r, UINT64_MAX), "step", yard_engine_error(r.engine));
    yard_engine_destroy(r.engine);
    yard_fabric_destroy(r.fabric);
}

/* Goes when the others have its record, and so begin a step with it. */
static void die_in_a_step(rank *r)
{
    yard_step_plan plan;

    must(r, run(r, LAST_STEP), "step", yard_engine_error(r->engine));
    must(r, yard_group_plan(r->engine, &plan), "plan", yard_engine_error(r->engine));
    must(r, yard_group_post(r->engine), "post", yard_engine_error(r->engine));
    _exit(0);
}

/* Processes 0 and 1 are a group of two; 2 is rank 1 of the next one. */
static void losing_rank(const yard_fabric_config *config, void *ctx)
{
    rank r = { .j = ctx, .fabric_config = *config };
    yard_status st;

    r.fabric_config.n_ranks = 2;
    if (config->rank < 2) {
        open_rank(&r);
        submit_all(&r);
    }
    if (config->rank == 1)
        die_in_a_step(&r);
    if (config->rank == 0) {
        st = run(&r, UINT64_MAX);
        CHECK(st == YARD_EPEER || st == YARD_ETIMEDOUT);
        snprintf(r.j->out->lost, sizeof(r.j->out->lost), "%s", yard_engine_error(r.engine));
        memset(r.j->out->n, 0, sizeof(r.j->out->n));
        yard_fabric_destroy(r.fabric);
    }
    r.fabric_config.rank = config->rank > 0;
    r.fabric_config.rendezvous = r.j->c->meet_again;
    open_rank(&r);
    submit_all(&r);
    must(&r, run(&r, UINT64_MAX), "step", yard_engine_error(r.engine));
    yard_engine_destroy(r.engine);
    yard_fabric_destroy(r.fabric);
}

static bool run_case(test *t, const layout_case *c, answers *out)
{
    const uint64_t begun_us = yard_now_us();
    job j = { .t = t, .c = c, .out = out };
    int code;

    memset(out, 0, sizeof(*out));
    t->case_name = c->name;
    code =
        c->meet_again ? ranks_run(3, losing_rank, &j) : ranks_run(c->n_ranks, answering_rank, &j);
    if (code == RANKS_NO_GPU) {
        printf("engine_gpu_test: no GPU here (or no driver); nothing was tested\n");
        exit(RANKS_NO_GPU);
    }
    printf("%s: %.1f s\n", c->name, (double)(yard_now_us() - begun_us) * 1e-6);
    engine_gpu_check(t, code == 0, "ranks end well");
    return code == 0;
}

static bool are_same(const test *t, const answers *a, const answers *b)
{
    for (uint32_t p = 0; p < t->n; p++) {
        const uint32_t n = t->prompts[p].n_ids > MAX_PROMPT ? 0 : N_NEW;

        if (a->n[p] != n || b->n[p] != n ||
            memcmp(a->token[p], b->token[p], sizeof(a->token[p])) != 0 ||
            memcmp(a->logprob[p], b->logprob[p], sizeof(a->logprob[p])) != 0) {
            printf("%s: %u and %u tokens differ\n", t->prompts[p].name, a->n[p], b->n[p]);
            return false;
        }
    }
    return true;
}

static bool are_golden(const test *t, const answers *a)
{
    for (uint32_t p = 0; p < t->n; p++)
        if (t->prompts[p].n_ids <= MAX_PROMPT &&
            (a->n[p] != N_NEW || memcmp(a->token[p], t->prompts[p].ids + t->prompts[p].n_ids,
                                        sizeof(a->token[p])) != 0))
            return false;
    return true;
}

static void *share(size_t n_bytes)
{
    void *p = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    if (p == MAP_FAILED)
        exit(EXIT_FAILURE);
    return p;
}

void engine_gpu_ranks(test *t)
{
    char meet_again[64];
    const layout_case one = { "ep 1", 1, 1, YARD_QUANTISED, false, NULL };
    const layout_case same[] = {
        { "ep 2, dp 2", 2, 1, YARD_QUANTISED, false, NULL },
        { "ep 2, dp 2, one instance idle", 2, 1, YARD_QUANTISED, true, NULL },
        { "ep 2, dp 2, rank 1 dies", 2, 1, YARD_QUANTISED, false, meet_again },
    };
    const layout_case exact = { "ep 2, tp 2, exact", 2, 2, YARD_EXACT, false, NULL };
    answers *want = share(sizeof(*want)), *got = share(sizeof(*got));

    snprintf(meet_again, sizeof(meet_again), "unix:yard-gpu-%d-again", getpid());
    if (!run_case(t, &one, want))
        return;
    for (size_t i = 0; i < sizeof(same) / sizeof(same[0]); i++) {
        if (run_case(t, &same[i], got))
            engine_gpu_check(t, are_same(t, want, got), "ids and logits are those of ep 1");
        if (!same[i].meet_again)
            continue;
        printf("%s: %s\n", same[i].name, got->lost);
        engine_gpu_check(t, strstr(got->lost, "rank 1"), "the error names it");
    }
    if (run_case(t, &exact, got))
        engine_gpu_check(t, are_golden(t, got), "ids are the reference's");
}
