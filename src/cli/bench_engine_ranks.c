#include "cli/bench_engine_ranks.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static const double least_share = 0.5;

enum { N_WAKES = 200, IDLE_US = 3000000, START_US = 600000000, PAUSE_US = 2000 };

typedef struct ranks_bench {
    const yard_bench_ranks *args;
    yard_pod *pod;
    uint32_t n_ranks, tp, n_instances; /* of the pod at hand */
    uint32_t vocab, max_batch;
    int32_t *prompt;   /* [n_prompt + most requests]: request j begins at the j-th */
    int32_t *expected; /* [most requests, n_decode] */
    int32_t *ids;      /* [most requests, n_decode] of the last run */
    uint32_t *n_ids;   /* [most requests] */
    uint64_t *request; /* [most requests] */
    double *samples_us;
    uint64_t n_wrong;
} ranks_bench;

yard_engine_config yard_bench_ranks_engine(const yard_bench_ranks *b)
{
    yard_engine_config c = YARD_ENGINE_CONFIG_INIT;

    c.model_dir = b->model;
    c.mode = b->exact ? YARD_EXACT : YARD_QUANTISED;
    c.kv_dtype = b->kv_dtype;
    c.n_threads = b->n_threads;
    c.device = b->device;
    c.cpu_variant = b->variant;
    c.cuda_variant = b->cuda_variant;
    c.cuda_choices = b->cuda_choices;
    c.pin = b->pin;
    c.prefix_cache = YARD_CACHE_OFF; /* every run computes */
    c.timeout_us = 60000000;
    return c;
}

static bool on_cpu(const yard_bench_ranks *b)
{
    return !b->device || !strcmp(b->device, "cpu");
}

const char *yard_bench_ranks_hardware(const yard_bench_ranks *b, const yard_pod *pod, char *name)
{
    if (on_cpu(b))
        return yard_bench_cpu_name();
    return sscanf(yard_pod_describe(pod, 0), "cuda, %95[^,]", name) == 1 ? name : "?";
}

/* A row's bits do not depend on the layout, nor on the others of its step. */
static bool has_one_answer(const yard_bench_ranks *b)
{
    return on_cpu(b) || (b->cuda_variant && !strcmp(b->cuda_variant, "deterministic"));
}

static yard_status run_until_serving(ranks_bench *b, yard_error *err)
{
    yard_status st = YARD_OK;

    while (st == YARD_OK && !yard_pod_serves(b->pod))
        st = yard_pod_run(b->pod, START_US, err);
    return st;
}

/* start_us: from nothing to serving. */
static yard_status open_pod(ranks_bench *b, uint32_t n_ranks, uint32_t tp, double *start_us,
                            yard_error *err)
{
    const yard_bench_ranks *a = b->args;
    const double begun_us = yard_bench_now_us();
    yard_pod_config c = { .engine = yard_bench_ranks_engine(a),
                          .n_ranks = n_ranks,
                          .transport = a->transport,
                          .start_timeout_us = START_US };
    yard_status st;

    c.engine.prefill_budget = INT32_MAX; /* prompts end together, so that all decode together */
    c.engine.max_seqs = b->max_batch;
    /* all at once: what starts leaves a page for each that runs */
    c.engine.kv_tokens = b->max_batch * yard_align_up(a->n_prompt + a->n_decode + YARD_PAGE_TOKENS,
                                                      YARD_PAGE_TOKENS);
    c.engine.tp = tp;
    b->n_ranks = n_ranks;
    b->tp = tp;
    b->n_instances = n_ranks / tp;
    st = yard_pod_create(&b->pod, &c, err);
    if (st == YARD_OK)
        st = run_until_serving(b, err);
    *start_us = yard_bench_now_us() - begun_us;
    return st;
}

static void close_pod(ranks_bench *b)
{
    yard_pod_destroy(b->pod);
    b->pod = NULL;
}

static yard_status submit(ranks_bench *b, uint32_t n_seqs, uint32_t n_new, yard_error *err)
{
    yard_status st = YARD_OK;

    for (uint32_t j = 0; j < n_seqs && st == YARD_OK; j++) {
        yard_request r = YARD_REQUEST_INIT;

        r.prompt = b->prompt + j;
        r.n_prompt = b->args->n_prompt;
        r.max_new_tokens = n_new;
        r.ignore_eos = true;
        b->n_ids[j] = 0;
        st = yard_pod_submit(b->pod, j % b->n_instances, &r, &b->request[j], err);
    }
    return st;
}

/* What came: tokens, sequences that began, sequences that ended. */
static yard_status take_events(ranks_bench *b, uint32_t n_seqs, uint64_t *n_tokens,
                               uint32_t *n_begun, uint32_t *n_ended, yard_error *err)
{
    yard_pod_event events[64];
    yard_status st = YARD_OK;
    uint32_t n;

    while (st == YARD_OK && (n = yard_pod_poll(b->pod, events, 64)) > 0)
        for (uint32_t i = 0; i < n; i++) {
            uint32_t j = 0;

            if (events[i].message && st == YARD_OK)
                st = yard_fail(err, YARD_EPEER, "%s", events[i].message);
            yard_pod_event_free(&events[i]);
            while (j < n_seqs && b->request[j] != events[i].id)
                j++;
            if (j == n_seqs)
                continue;
            *n_tokens += events[i].n_tokens;
            *n_begun += events[i].n_tokens > 0 && b->n_ids[j] == 0;
            *n_ended += events[i].finish != YARD_RUNNING;
            if (events[i].n_tokens > 0 && b->n_ids[j] < b->args->n_decode)
                b->ids[(size_t)j * b->args->n_decode + b->n_ids[j]++] = events[i].token;
        }
    return st;
}

/* Runs n_seqs requests to their ends; *step_us: mean time of the steps in which all of them
 * decoded. */
static yard_status run(ranks_bench *b, uint32_t n_seqs, uint32_t n_new, double *step_us,
                       yard_error *err)
{
    uint64_t n_tokens = 0, n_before = 0;
    uint32_t n_begun = 0, n_ended = 0;
    double begun_us = 0;
    yard_status st = submit(b, n_seqs, n_new, err);

    while (st == YARD_OK && n_ended < n_seqs) {
        st = yard_pod_run(b->pod, START_US, err);
        if (st == YARD_OK)
            st = take_events(b, n_seqs, &n_tokens, &n_begun, &n_ended, err);
        if (begun_us == 0 && n_begun == n_seqs) {
            begun_us = yard_bench_now_us();
            n_before = n_tokens;
        }
    }
    if (st == YARD_OK && n_tokens > n_before)
        *step_us = (yard_bench_now_us() - begun_us) * n_seqs / (double)(n_tokens - n_before);
    return st;
}

static yard_status print_row(ranks_bench *b, const char *phase, uint32_t batch, size_t n_samples,
                             bool verified, const char *remark, uint64_t tokens, double *p50_us,
                             yard_error *err)
{
    const yard_bench_ranks *a = b->args;
    char hardware[96];
    yard_bench_row row = { .bench = "engine-ranks",
                           .bytes = -1,
                           .flops = -1,
                           .floor_us = -1,
                           .verified = verified,
                           .device = yard_bench_ranks_hardware(a, b->pod, hardware),
                           .variant = remark,
                           .ranks = b->n_ranks };
    yard_status st;

    yard_bench_fill(&row, b->samples_us, n_samples);
    row.shape = json_pack("{s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i}", "phase", phase, "model",
                          a->model, "mode", a->exact ? "exact" : "quantised", "kv", a->kv_name,
                          "ep", (int)b->n_ranks, "dp", (int)b->n_instances, "tp", (int)b->tp,
                          "threads", (int)a->n_threads, "batch_per_instance", (int)batch);
    if (!row.shape)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for a row");
    if (!on_cpu(a))
        json_object_set_new(row.shape, "variant",
                            json_string(a->cuda_variant ? a->cuda_variant : "fast"));
    if (tokens > 0)
        json_object_set_new(row.shape, "tokens", json_integer((json_int_t)tokens));
    st = yard_bench_print_row(&row, a->json, err);
    json_decref(row.shape);
    b->n_wrong += !verified;
    if (remark)
        fprintf(stderr, "bench: %s: %s\n", phase, remark);
    if (p50_us)
        *p50_us = row.p50_us;
    return st;
}

/* Of all ids, the share that is as expected: 1 where there is one answer. The fast table of a GPU
 * makes it less, for which requests share a step depends on when they came, and an id that rounding
 * changes changes those behind it; ids of rows that went astray agree by chance alone. 0: some are
 * missing. */
static double share_as_expected(const ranks_bench *b, uint32_t n_seqs)
{
    const size_t n_ids = (size_t)n_seqs * b->args->n_decode;
    size_t n_same = 0;

    for (uint32_t j = 0; j < n_seqs; j++)
        if (b->n_ids[j] != b->args->n_decode)
            return 0;
    for (size_t i = 0; i < n_ids; i++)
        n_same += b->ids[i] == b->expected[i];
    return (double)n_same / (double)n_ids;
}

/* Ids to compare with: of one rank where rounding is the same, else of a first run. */
static yard_status find_expected(ranks_bench *b, uint32_t n_seqs, yard_error *err)
{
    double step_us;
    const yard_status st = run(b, n_seqs, b->args->n_decode, &step_us, err);

    memcpy(b->expected, b->ids, (size_t)n_seqs * b->args->n_decode * sizeof(*b->ids));
    return st;
}

static yard_status bench_decode(ranks_bench *b, uint32_t batch, double *p50_us, yard_error *err)
{
    const uint32_t n_seqs = batch * b->n_instances;
    const bool one_answer = has_one_answer(b->args);
    double least = 1;
    char remark[64];
    yard_status st = b->tp > 1 || !one_answer ? find_expected(b, n_seqs, err) : YARD_OK;

    for (uint32_t i = 0; i <= b->args->n_repeats && st == YARD_OK; i++) { /* the first warms up */
        st = run(b, n_seqs, b->args->n_decode, &b->samples_us[i ? i - 1 : 0], err);
        least = fmin(least, share_as_expected(b, n_seqs));
    }
    if (st != YARD_OK)
        return st;
    snprintf(remark, sizeof(remark), "ids as in the first run: %.1f %% at least", 100 * least);
    return print_row(b, "decode", batch, b->args->n_repeats,
                     least >= (one_answer ? 1 : least_share), one_answer ? NULL : remark, n_seqs,
                     p50_us, err);
}

/* One request at instance 0 alone: what rank 0 waits for records, and steps without a token on all
 * ranks, as a share of the step. */
static yard_status bench_agreement(ranks_bench *b, yard_error *err)
{
    const uint32_t n_decode = b->args->n_decode;
    double share = 0, empty = 0;
    char remark[96];
    yard_status st = YARD_OK;

    for (uint32_t i = 0; i < b->args->n_repeats && st == YARD_OK; i++) {
        yard_engine_stats before = { 0 }, after = { 0 };
        double step_us = 0, n_steps;

        st = yard_pod_stats(b->pod, 0, &before, err);
        if (st == YARD_OK)
            st = run(b, 1, n_decode, &step_us, err);
        if (st == YARD_OK)
            st = yard_pod_stats(b->pod, 0, &after, err);
        n_steps = (double)(after.n_steps - before.n_steps);
        b->samples_us[i] = n_steps > 0 ? (double)(after.agree_us - before.agree_us) / n_steps : 0;
        share += 100 * b->samples_us[i] / step_us / b->args->n_repeats;
        empty += n_steps > 0 ? 100 * (double)(after.n_empty_steps - before.n_empty_steps) /
                                   n_steps / b->args->n_repeats
                             : 0;
    }
    snprintf(remark, sizeof(remark), "wait for records %.2f %% of a step; %.2f %% of steps empty",
             share, empty);
    return st == YARD_OK
               ? print_row(b, "agreement", 1, b->args->n_repeats, true, remark, 0, NULL, err)
               : st;
}

/* Processor time of all threads of a process so far. */
static double cpu_us(pid_t pid)
{
    char path[300];
    double sum_us = 0;
    DIR *dir;

    snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
    dir = opendir(path);
    for (struct dirent *e = dir ? readdir(dir) : NULL; e; e = readdir(dir)) {
        unsigned long long ns = 0;
        FILE *file;

        snprintf(path, sizeof(path), "/proc/%d/task/%.20s/schedstat", (int)pid, e->d_name);
        file = fopen(path, "r");
        if (file && fscanf(file, "%llu", &ns) == 1)
            sum_us += (double)ns / 1e3;
        if (file)
            fclose(file);
    }
    if (dir)
        closedir(dir);
    return sum_us;
}

/* Processor time of a rank in a second of sleep. */
static yard_status bench_idle(ranks_bench *b, yard_error *err)
{
    const double begun_us = yard_bench_now_us();
    double before = 0, most = 0, seconds;
    char remark[64];
    yard_status st = YARD_OK;

    for (uint32_t r = 0; r < b->n_ranks; r++)
        b->samples_us[r] = cpu_us(yard_pod_rank_pid(b->pod, r));
    while (st == YARD_OK && yard_bench_now_us() - begun_us < IDLE_US)
        st = yard_pod_run(b->pod, IDLE_US, err);
    seconds = (yard_bench_now_us() - begun_us) / 1e6;
    for (uint32_t r = 0; r < b->n_ranks; r++) {
        before = b->samples_us[r];
        b->samples_us[r] = (cpu_us(yard_pod_rank_pid(b->pod, r)) - before) / seconds;
        most = b->samples_us[r] > most ? b->samples_us[r] : most;
    }
    snprintf(remark, sizeof(remark), "at most %.2f %% of a core", most / 1e4);
    return st == YARD_OK ? print_row(b, "idle", 0, b->n_ranks, true, remark, 0, NULL, err) : st;
}

/* A rank tells its statistics between steps: once all have, no step is left that a rank is late in.
 * The pause is for the kernel's sleep. */
static yard_status await_sleep(ranks_bench *b, yard_error *err)
{
    const struct timespec pause = { .tv_nsec = PAUSE_US * 1000 };
    yard_engine_stats stats;
    yard_status st = YARD_OK;

    for (uint32_t r = 0; r < b->n_ranks && st == YARD_OK; r++)
        st = yard_pod_stats(b->pod, r, &stats, err);
    nanosleep(&pause, NULL);
    return st;
}

/* From the pod's submit, at instance 0, to the first layer of the step that it wakes the group for.
 */
static yard_status bench_wake(ranks_bench *b, yard_error *err)
{
    yard_status st = YARD_OK;
    size_t n = 0;

    for (uint32_t i = 0; i < N_WAKES && st == YARD_OK; i++) {
        yard_engine_stats stats = { 0 };
        double step_us;
        uint64_t begun_us = 0;

        st = await_sleep(b, err);
        if (st == YARD_OK) {
            begun_us = yard_now_us();
            st = run(b, 1, 1, &step_us, err);
        }
        if (st == YARD_OK)
            st = yard_pod_stats(b->pod, 0, &stats, err);
        if (stats.woken_at_us > begun_us) /* it was asleep */
            b->samples_us[n++] = (double)(stats.woken_at_us - begun_us);
    }
    return st == YARD_OK && n > 0 ? print_row(b, "wake", 0, n, true, NULL, 0, NULL, err) : st;
}

static yard_status bench_group(ranks_bench *b, const double *one_p50_us, yard_error *err)
{
    const yard_bench_ranks *a = b->args;
    double start_us;
    yard_status st = open_pod(b, a->n_ranks, a->tp, &start_us, err);

    b->samples_us[0] = start_us;
    if (st == YARD_OK)
        st = print_row(b, "start", 0, 1, true, NULL, 0, NULL, err);
    for (uint32_t i = 0; i < a->batch.n && st == YARD_OK; i++) {
        double p50_us = 0;

        st = bench_decode(b, a->batch.value[i], &p50_us, err);
        if (st == YARD_OK)
            fprintf(stderr,
                    "bench: EP%u DP%u TP%u, batch %u an instance: %.2f times the tokens/s of "
                    "one rank\n",
                    b->n_ranks, b->n_instances, b->tp, a->batch.value[i],
                    one_p50_us[i] * b->n_instances / p50_us);
    }
    if (st == YARD_OK)
        st = bench_agreement(b, err);
    if (st == YARD_OK)
        st = bench_idle(b, err);
    if (st == YARD_OK)
        st = bench_wake(b, err);
    close_pod(b);
    return st;
}

static yard_status bench_one(ranks_bench *b, double *one_p50_us, yard_error *err)
{
    const yard_bench_ranks *a = b->args;
    double start_us;
    yard_status st = open_pod(b, 1, 1, &start_us, err);

    if (st == YARD_OK)
        st = find_expected(b, b->max_batch * (a->n_ranks / a->tp), err);
    b->samples_us[0] = start_us;
    if (st == YARD_OK)
        st = print_row(b, "start", 0, 1, true, NULL, 0, NULL, err);
    for (uint32_t i = 0; i < a->batch.n && st == YARD_OK; i++)
        st = bench_decode(b, a->batch.value[i], &one_p50_us[i], err);
    close_pod(b);
    return st;
}

static yard_status open_bench(ranks_bench *b, yard_error *err)
{
    const yard_bench_ranks *a = b->args;
    yard_model_config config;
    yard_status st = yard_model_config_load(&config, a->model, NULL, err);
    size_t n_seqs, n_samples;
    uint64_t x = 1;

    if (st != YARD_OK)
        return st;
    b->vocab = config.vocab;
    for (uint32_t i = 0; i < a->batch.n; i++)
        b->max_batch = a->batch.value[i] > b->max_batch ? a->batch.value[i] : b->max_batch;
    n_seqs = (size_t)b->max_batch * (a->n_ranks / a->tp);
    n_samples = (size_t)a->n_repeats + a->n_ranks + N_WAKES;
    b->prompt = calloc(a->n_prompt + n_seqs, sizeof(*b->prompt));
    b->expected = calloc(n_seqs * a->n_decode, sizeof(*b->expected));
    b->ids = calloc(n_seqs * a->n_decode, sizeof(*b->ids));
    b->n_ids = calloc(n_seqs, sizeof(*b->n_ids));
    b->request = calloc(n_seqs, sizeof(*b->request));
    b->samples_us = calloc(n_samples, sizeof(*b->samples_us));
    if (!b->prompt || !b->expected || !b->ids || !b->n_ids || !b->request || !b->samples_us)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for ids and samples");
    for (size_t i = 0; i < a->n_prompt + n_seqs; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        b->prompt[i] = (int32_t)((x >> 33) % b->vocab);
    }
    return YARD_OK;
}

yard_status yard_bench_engine_ranks(const yard_bench_ranks *args, uint64_t *n_wrong,
                                    yard_error *err)
{
    ranks_bench b = { .args = args };
    double one_p50_us[YARD_BENCH_MAX_LIST] = { 0 };
    yard_status st = open_bench(&b, err);

    if (st == YARD_OK)
        st = bench_one(&b, one_p50_us, err);
    if (st == YARD_OK && args->n_ranks > 1)
        st = bench_group(&b, one_p50_us, err);
    *n_wrong = b.n_wrong;
    free(b.prompt);
    free(b.expected);
    free(b.ids);
    free(b.n_ids);
    free(b.request);
    free(b.samples_us);
    return st;
}
