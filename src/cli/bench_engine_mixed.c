#include "cli/bench_engine_mixed.h"

#include <stdio.h>
#include <stdlib.h>

enum { MAX_WAIT_US = 600000000, MAX_BATCH_TOKENS = 512 };

typedef struct mixed_bench {
    const yard_bench_ranks *args;
    yard_pod *pod;
    uint32_t batch, n_instances;
    int32_t *prompt;   /* [n_prompt + batch]: answer j begins with the j-th and has 16 */
    uint64_t *answer;  /* [batch] ids of instance 0's requests */
    uint32_t *n_ids;   /* [batch] */
    double *last_us;   /* [batch] when its last token came */
    int32_t *ids;      /* [batch, n_decode] */
    int32_t *expected; /* [batch, n_decode] of the first run */
    bool has_expected, verified;
    uint64_t long_prompt; /* the request at instance 1; 0: none */
    double long_begun_us;
    double *gap_us;   /* [n_repeats * batch * n_decode] */
    double *first_us; /* [n_repeats * n_decode] times to first token of the long prompts */
    size_t n_gaps, n_firsts;
    uint32_t n_ended; /* answers */
} mixed_bench;

typedef struct mixed_case {
    const char *phase;
    bool prompts;
    uint32_t budget; /* 0: the engine's */
} mixed_case;

static yard_status open_pod(mixed_bench *b, const mixed_case *c, yard_error *err)
{
    const yard_bench_ranks *a = b->args;
    yard_pod_config config = { .engine = yard_bench_ranks_engine(a),
                               .n_ranks = a->n_ranks,
                               .transport = a->transport,
                               .start_timeout_us = MAX_WAIT_US };
    yard_status st;

    config.engine.max_seqs = b->batch > 1 ? b->batch : 2;
    config.engine.max_tokens = MAX_BATCH_TOKENS;
    config.engine.prefill_budget = c->budget;
    config.engine.tp = a->tp;
    st = yard_pod_create(&b->pod, &config, err);
    while (st == YARD_OK && !yard_pod_serves(b->pod))
        st = yard_pod_run(b->pod, MAX_WAIT_US, err);
    return st;
}

static yard_status submit(mixed_bench *b, uint32_t instance, const int32_t *prompt,
                          uint32_t n_prompt, uint32_t n_new, uint64_t *id, yard_error *err)
{
    yard_request r = YARD_REQUEST_INIT;

    r.prompt = prompt;
    r.n_prompt = n_prompt;
    r.max_new_tokens = n_new;
    r.ignore_eos = true;
    return yard_pod_submit(b->pod, instance, &r, id, err);
}

static yard_status submit_long(mixed_bench *b, yard_error *err)
{
    b->long_begun_us = yard_bench_now_us();
    return submit(b, 1, b->prompt, b->args->n_prompt, 1, &b->long_prompt, err);
}

/* A time counts when a prompt was under way, or there is none in this case. */
static void take_answer(mixed_bench *b, const mixed_case *c, uint32_t j, const yard_pod_event *e)
{
    const double now = yard_bench_now_us();

    if (e->n_tokens > 0) {
        if (b->n_ids[j] > 0 && (!c->prompts || b->long_prompt))
            b->gap_us[b->n_gaps++] = now - b->last_us[j];
        b->ids[(size_t)j * b->args->n_decode + b->n_ids[j]++] = e->token;
        b->last_us[j] = now;
    }
    b->n_ended += e->finish != YARD_RUNNING;
}

static yard_status take_events(mixed_bench *b, const mixed_case *c, yard_error *err)
{
    yard_pod_event events[64];
    yard_status st = YARD_OK;
    uint32_t n;

    while ((n = yard_pod_poll(b->pod, events, 64)) > 0)
        for (uint32_t i = 0; i < n; i++) {
            if (events[i].message && st == YARD_OK)
                st = yard_fail(err, YARD_EPEER, "%s", events[i].message);
            for (uint32_t j = 0; j < b->batch; j++)
                if (b->answer[j] == events[i].id)
                    take_answer(b, c, j, &events[i]);
            if (events[i].id == b->long_prompt) {
                b->first_us[b->n_firsts++] = yard_bench_now_us() - b->long_begun_us;
                b->long_prompt = 0;
            }
            yard_pod_event_free(&events[i]);
        }
    return st;
}

static bool all_have_begun(const mixed_bench *b)
{
    for (uint32_t j = 0; j < b->batch; j++)
        if (b->n_ids[j] == 0)
            return false;
    return true;
}

/* All answers once, with a prompt beside them until they have ended. */
static yard_status run(mixed_bench *b, const mixed_case *c, yard_error *err)
{
    yard_status st = YARD_OK;

    b->n_ended = 0;
    for (uint32_t j = 0; j < b->batch && st == YARD_OK; j++) {
        b->n_ids[j] = 0;
        st = submit(b, 0, b->prompt + j, 16, b->args->n_decode, &b->answer[j], err);
    }
    while (st == YARD_OK && (b->n_ended < b->batch || b->long_prompt)) {
        st = yard_pod_run(b->pod, MAX_WAIT_US, err);
        if (st == YARD_OK)
            st = take_events(b, c, err);
        if (st == YARD_OK && c->prompts && !b->long_prompt && b->n_ended < b->batch &&
            all_have_begun(b))
            st = submit_long(b, err);
    }
    return st;
}

static void compare(mixed_bench *b)
{
    const size_t n_bytes = (size_t)b->batch * b->args->n_decode * sizeof(*b->ids);

    if (!b->has_expected)
        memcpy(b->expected, b->ids, n_bytes);
    b->has_expected = true;
    b->verified = b->verified && !memcmp(b->expected, b->ids, n_bytes);
}

static int compare_doubles(const void *x, const void *y)
{
    const double a = *(const double *)x, b = *(const double *)y;

    return a < b ? -1 : a > b;
}

static yard_status print_row(mixed_bench *b, const mixed_case *c, yard_error *err)
{
    const yard_bench_ranks *a = b->args;
    char remark[96] = "", hardware[96];
    yard_bench_row row = { .bench = "engine-mixed",
                           .bytes = -1,
                           .flops = -1,
                           .floor_us = -1,
                           .verified = b->verified,
                           .device = yard_bench_ranks_hardware(a, b->pod, hardware),
                           .ranks = a->n_ranks };
    yard_status st;

    if (b->n_firsts > 0) {
        qsort(b->first_us, b->n_firsts, sizeof(*b->first_us), compare_doubles);
        snprintf(remark, sizeof(remark), "prompt's first token after %.1f ms (median)",
                 b->first_us[b->n_firsts / 2] / 1e3);
        row.variant = remark;
        fprintf(stderr, "bench: %s: %s\n", c->phase, remark);
    }
    yard_bench_fill(&row, b->gap_us, b->n_gaps);
    row.shape =
        json_pack("{s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i}", "phase", c->phase, "model",
                  a->model, "mode", a->exact ? "exact" : "quantised", "kv", a->kv_name, "ep",
                  (int)a->n_ranks, "tp", (int)a->tp, "threads", (int)a->n_threads, "batch",
                  (int)b->batch, "prompt_tokens", (int)(c->prompts ? a->n_prompt : 0));
    if (!row.shape)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for a row");
    st = yard_bench_print_row(&row, a->json, err);
    json_decref(row.shape);
    return st;
}

static yard_status bench_case(mixed_bench *b, const mixed_case *c, uint64_t *n_wrong,
                              yard_error *err)
{
    yard_status st = open_pod(b, c, err);

    b->verified = true;
    for (uint32_t i = 0; i <= b->args->n_repeats && st == YARD_OK; i++) {
        if (i <= 1) /* the first run warms up */
            b->n_gaps = b->n_firsts = 0;
        st = run(b, c, err);
        compare(b);
    }
    if (st == YARD_OK && b->n_gaps == 0)
        st = yard_fail(err, YARD_EINVAL,
                       "bench: no token while a prompt is under way; want more "
                       "--decode-tokens");
    if (st == YARD_OK)
        st = print_row(b, c, err);
    *n_wrong += !b->verified;
    yard_pod_destroy(b->pod);
    b->pod = NULL;
    return st;
}

static yard_status open_bench(mixed_bench *b, yard_error *err)
{
    const yard_bench_ranks *a = b->args;
    const size_t n_ids = (size_t)b->batch * a->n_decode, n_prompt = a->n_prompt + b->batch + 16;
    yard_model_config config;
    yard_status st = yard_model_config_load(&config, a->model, NULL, err);
    uint64_t x = 1;

    if (st != YARD_OK)
        return st;
    b->prompt = calloc(n_prompt, sizeof(*b->prompt));
    b->answer = calloc(b->batch, sizeof(*b->answer));
    b->n_ids = calloc(b->batch, sizeof(*b->n_ids));
    b->last_us = calloc(b->batch, sizeof(*b->last_us));
    b->ids = calloc(n_ids, sizeof(*b->ids));
    b->expected = calloc(n_ids, sizeof(*b->expected));
    b->gap_us = calloc(n_ids * (a->n_repeats + 1), sizeof(*b->gap_us));
    b->first_us = calloc((size_t)a->n_decode * (a->n_repeats + 1), sizeof(*b->first_us));
    if (!b->prompt || !b->answer || !b->n_ids || !b->last_us || !b->ids || !b->expected ||
        !b->gap_us || !b->first_us)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for ids and samples");
    for (size_t i = 0; i < n_prompt; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        b->prompt[i] = (int32_t)((x >> 33) % config.vocab);
    }
    return YARD_OK;
}

static void close_bench(mixed_bench *b)
{
    free(b->prompt);
    free(b->answer);
    free(b->n_ids);
    free(b->last_us);
    free(b->ids);
    free(b->expected);
    free(b->gap_us);
    free(b->first_us);
}

yard_status yard_bench_engine_mixed(const yard_bench_ranks *args, uint64_t *n_wrong,
                                    yard_error *err)
{
    static const mixed_case cases[] = {
        { .phase = "decode alone" },
        { .phase = "beside prompts", .prompts = true },
        { .phase = "without a budget", .prompts = true, .budget = 1 << 30 },
    };
    mixed_bench b = { .args = args,
                      .batch = args->batch.value[0],
                      .n_instances = args->n_ranks / args->tp };
    yard_status st;

    if (b.n_instances < 2)
        return yard_fail(err, YARD_EINVAL, "--mixed: want two instances at least, got %u",
                         b.n_instances);
    st = open_bench(&b, err);
    for (size_t i = 0; i < 3 && st == YARD_OK; i++)
        st = bench_case(&b, &cases[i], n_wrong, err);
    close_bench(&b);
    return st;
}
