/* bench engine in this process.
 *
 * A prefill row times b prompts from submission to the last first token, a decode row the steps in
 * which all b requests generate. Every sequence must get the ids that it got alone, on the first
 * number of threads: rows of a batch are independent of each other. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "cli/bench_engine.h"
#include "cli/bench_ops.h"

/* One setting of everything, and what a run of it gives. */
typedef struct engine_case {
    uint32_t n_threads, n_prompt, n_seqs;
    int32_t *expected; /* [n_seqs, n_decode] */
} engine_case;

/* One run of sequences first_seq .. at once, and what it took. */
typedef struct engine_run {
    uint32_t first_seq, n_seqs, n_prompt, n_new;
    double prefill_us; /* until the last first token */
    double *step_us;   /* NULL, or [n_new]: durations of the steps that decoded all of them; they
                          start one after the other, and so they end */
    size_t n_steps;
} engine_run;

typedef struct engine_bench {
    yard_bench_engine_args args;
    yard_engine *engine; /* of the current number of threads */
    uint32_t max_seqs, max_prompt;
    int32_t *prompt;                  /* [max_prompt] */
    int32_t *expected;                /* [prompt.n, max_seqs, n_decode] of sequences alone, or of a
                                         row's first run: see is_relative() */
    int32_t *ids;                     /* [max_seqs, n_decode] of the last run */
    uint32_t *n_ids;                  /* [max_seqs] */
    uint64_t *requests;               /* [max_seqs] */
    double *samples_us;               /* [n_repeats * n_decode] */
    uint64_t n_done, n_rows, n_wrong; /* rows printed, in all, not verified */
} engine_bench;

/* Any ids do, but the same in every run. Sequence j begins at the j-th one, so that sequences of
 * a batch differ. */
static void fill_prompt(int32_t *prompt, uint32_t n, uint32_t n_vocab)
{
    uint64_t x = 1;

    for (uint32_t i = 0; i < n; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        prompt[i] = (int32_t)((x >> 33) % n_vocab);
    }
}

static yard_status engine_failed(const engine_bench *b, yard_status st, yard_error *err)
{
    return yard_fail(err, st, "%s", yard_engine_error(b->engine));
}

static yard_status submit(engine_bench *b, const engine_run *run, yard_error *err)
{
    for (uint32_t i = 0; i < run->n_seqs; i++) {
        yard_request request = YARD_REQUEST_INIT;
        yard_status st;

        request.prompt = b->prompt + run->first_seq + i;
        request.n_prompt = run->n_prompt;
        request.max_new_tokens = run->n_new;
        request.ignore_eos = true;
        b->n_ids[i] = 0;
        st = yard_engine_submit(b->engine, &request, &b->requests[i]);
        if (st != YARD_OK)
            return engine_failed(b, st, err);
    }
    return YARD_OK;
}

/* Sorts the events of a step to their sequences; counts first tokens and ends. Returns how many
 * sequences got a token. */
static uint32_t take_events(engine_bench *b, uint32_t n_seqs, uint32_t *n_started,
                            uint32_t *n_ended)
{
    yard_event events[64];
    uint32_t n, n_tokens = 0;

    while ((n = yard_engine_poll(b->engine, events, 64)) > 0)
        for (uint32_t i = 0; i < n; i++) {
            uint32_t seq = 0;

            while (seq < n_seqs && b->requests[seq] != events[i].id)
                seq++;
            if (seq == n_seqs)
                continue;
            n_tokens += events[i].n_tokens;
            *n_started += b->n_ids[seq] == 0;
            *n_ended += events[i].finish != YARD_RUNNING;
            if (events[i].n_tokens > 0 && b->n_ids[seq] < b->args.n_decode)
                b->ids[seq * b->args.n_decode + b->n_ids[seq]++] = events[i].token;
        }
    return n_tokens;
}

/* Runs the sequences to their ends. */
static yard_status run_batch(engine_bench *b, engine_run *run, yard_error *err)
{
    const double begin_us = yard_bench_now_us();
    uint32_t n_started = 0, n_ended = 0;
    yard_status st = submit(b, run, err);

    while (st == YARD_OK && n_ended < run->n_seqs) {
        const bool all_started = n_started == run->n_seqs;
        const double step_begin_us = yard_bench_now_us();
        double step_end_us;
        uint32_t n_tokens;

        st = yard_engine_step(b->engine);
        if (st != YARD_OK)
            return engine_failed(b, st, err);
        step_end_us = yard_bench_now_us();
        n_tokens = take_events(b, run->n_seqs, &n_started, &n_ended);
        if (all_started && n_tokens == run->n_seqs && run->step_us)
            run->step_us[run->n_steps++] = step_end_us - step_begin_us;
        if (!all_started && n_started == run->n_seqs)
            run->prefill_us = step_end_us - begin_us;
    }
    return st;
}

/* The first n ids of every sequence are as expected. */
static bool is_as_expected(const engine_bench *b, const engine_case *c, uint32_t n)
{
    for (uint32_t seq = 0; seq < c->n_seqs; seq++) {
        const size_t at = seq * b->args.n_decode;

        if (b->n_ids[seq] != n || memcmp(b->ids + at, c->expected + at, n * sizeof(*b->ids)) != 0)
            return false;
    }
    return true;
}

/* Multiplications and additions: two for each active parameter and token, and attention. The
 * output head runs for tokens that are sampled only. */
static double flops_of(const yard_model_config *m, const engine_case *c, bool decode,
                       double position)
{
    yard_param_count count;
    const double rows = decode ? c->n_seqs : (double)c->n_seqs * c->n_prompt;
    const double attended_by_seq =
        decode ? position + 1 : (double)c->n_prompt * (c->n_prompt + 1.0) / 2;
    const double widths = decode && m->attention == YARD_ATTENTION_MLA
                              ? 2.0 * m->kv_rank + m->rope_dims
                              : (double)m->nope_dims + m->rope_dims + m->v_dims;

    yard_model_count_params(m, &count);
    return 2 * rows * (double)(count.active - count.head) + 2.0 * c->n_seqs * (double)count.head +
           2 * c->n_seqs * attended_by_seq * widths * m->n_heads * m->n_layers;
}

/* What a decode step must read: all weights but the embedding table and the experts nobody chose,
 * and the cache. Of n experts, b tokens that choose k each evenly leave n (1 - k / n)^b unread. */
static double decode_bytes(const yard_model_config *m, yard_dtype cached, const engine_case *c,
                           double position, yard_error *err)
{
    const yard_layout alone = { 1, 1, 1 };
    const double n_moe = (double)m->n_layers - m->n_dense_layers;
    const double unread =
        m->n_experts ? m->n_experts * pow(1 - (double)m->top_k / m->n_experts, c->n_seqs) : 0;
    yard_param_count count;
    yard_rank_memory memory;

    if (yard_model_rank_memory(m, alone, 0, &memory, err) != YARD_OK)
        return -1;
    yard_model_count_params(m, &count);
    return (double)memory.weight_bytes - 2.0 * (double)count.embedding -
           n_moe * unread * (double)count.expert * (m->fp8 ? 1 : 2) +
           c->n_seqs * position * (double)yard_model_kv_bytes_per_token(m, cached);
}

/* Bits of a row depend on the batch: they are compared with those of the same batch. */
static bool is_relative(const yard_bench_engine_args *a)
{
    return !yard_bench_engine_on_cpu(a) && (!a->cuda_variant || !strcmp(a->cuda_variant, "fast"));
}

static const char *variant_of(const yard_bench_engine_args *a)
{
    if (yard_bench_engine_on_cpu(a))
        return a->variant ? a->variant : "best";
    return a->cuda_variant ? a->cuda_variant : "fast";
}

static yard_status print_row(engine_bench *b, const engine_case *c, bool decode, bool verified,
                             size_t n_samples, yard_error *err)
{
    const yard_model_config *m = yard_engine_model_config(b->engine);
    const double position = (double)c->n_prompt + (double)b->args.n_decode / 2;
    const yard_dtype cached = yard_bench_engine_cached(&b->args);
    yard_bench_row row = {
        .bench = "engine",
        .bytes = decode ? decode_bytes(m, cached, c, position, err) : -1,
        .flops = flops_of(m, c, decode, position),
        .floor_us = -1,
        .verified = verified,
        .device = yard_bench_engine_on_cpu(&b->args) ? yard_bench_cpu_name()
                                                     : yard_bench_ops_cuda.hardware(),
        .ranks = 1,
    };
    yard_status st;

    yard_bench_fill(&row, b->samples_us, n_samples);
    if (row.bytes > 0 && yard_bench_engine_on_cpu(&b->args))
        row.floor_us = yard_bench_read_floor_us(row.bytes, c->n_threads);
    else if (row.bytes > 0)
        row.floor_us = row.bytes / yard_bench_ops_cuda.read_rate(&(yard_ops_config){ 0 }) * 1e6;
    row.shape = json_pack("{s:s, s:s, s:s, s:s, s:s, s:i, s:i, s:i, s:i}", "phase",
                          decode ? "decode" : "prefill", "model", b->args.model, "mode",
                          b->args.exact ? "exact" : "quantised", "kv", yard_dtype_name(cached),
                          "variant", variant_of(&b->args), "threads", (int)c->n_threads, "batch",
                          (int)c->n_seqs, "prompt_tokens", (int)c->n_prompt, "tokens",
                          (int)(decode ? c->n_seqs : c->n_seqs * c->n_prompt));
    if (!row.shape)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for a row");
    st = yard_bench_print_row(&row, b->args.json, err);
    json_decref(row.shape);
    b->n_done++;
    b->n_wrong += !verified;
    if (!isatty(STDOUT_FILENO)) /* otherwise the rows themselves show the progress */
        fprintf(stderr, "bench: %llu of %llu rows\n", (unsigned long long)b->n_done,
                (unsigned long long)b->n_rows);
    return st;
}

static yard_status bench_prefill(engine_bench *b, const engine_case *c, yard_error *err)
{
    bool verified = true;

    for (uint64_t i = 0; i <= b->args.n_repeats; i++) {
        engine_run run = { .n_seqs = c->n_seqs, .n_prompt = c->n_prompt, .n_new = 1 };
        const yard_status st = run_batch(b, &run, err);

        if (st != YARD_OK)
            return st;
        if (i > 0) /* the first run warms up */
            b->samples_us[i - 1] = run.prefill_us;
        else if (is_relative(&b->args))
            memcpy(c->expected, b->ids, c->n_seqs * b->args.n_decode * sizeof(*b->ids));
        verified = verified && is_as_expected(b, c, 1);
    }
    return print_row(b, c, false, verified, b->args.n_repeats, err);
}

static yard_status bench_decode(engine_bench *b, const engine_case *c, yard_error *err)
{
    const uint32_t n_decode = (uint32_t)b->args.n_decode;
    bool verified = true;
    size_t n_samples = 0;

    for (uint64_t i = 0; i <= b->args.n_repeats; i++) {
        engine_run run = { .n_seqs = c->n_seqs,
                           .n_prompt = c->n_prompt,
                           .n_new = n_decode,
                           .step_us = b->samples_us + n_samples };
        const yard_status st = run_batch(b, &run, err);

        if (st != YARD_OK)
            return st;
        if (i > 0)
            n_samples += run.n_steps;
        else if (is_relative(&b->args))
            memcpy(c->expected, b->ids, c->n_seqs * b->args.n_decode * sizeof(*b->ids));
        verified = verified && is_as_expected(b, c, n_decode);
    }
    if (n_samples == 0)
        return yard_fail(err, YARD_EINVAL,
                         "bench: no step decodes all %u requests; want more --decode-tokens",
                         c->n_seqs);
    return print_row(b, c, true, verified, n_samples, err);
}

static int32_t *expected_ids(const engine_bench *b, uint32_t prompt_idx)
{
    return b->expected + (size_t)prompt_idx * b->max_seqs * b->args.n_decode;
}

/* Every sequence alone. */
static yard_status find_expected(engine_bench *b, yard_error *err)
{
    const size_t n_decode = b->args.n_decode;

    for (uint32_t p = 0; p < b->args.prompt.n; p++)
        for (uint32_t seq = 0; seq < b->max_seqs; seq++) {
            engine_run run = { .first_seq = seq,
                               .n_seqs = 1,
                               .n_prompt = b->args.prompt.value[p],
                               .n_new = (uint32_t)n_decode };
            const yard_status st = run_batch(b, &run, err);

            if (st != YARD_OK)
                return st;
            memcpy(expected_ids(b, p) + seq * n_decode, b->ids, n_decode * sizeof(*b->ids));
        }
    return YARD_OK;
}

static yard_status open_engine(engine_bench *b, uint32_t n_threads, yard_error *err)
{
    const yard_notify *notify = yard_cli_notify();
    const size_t seq_tokens = b->max_prompt + b->args.n_decode;
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;

    config.model_dir = b->args.model;
    config.mode = b->args.exact ? YARD_EXACT : YARD_QUANTISED;
    config.kv_dtype = b->args.kv_dtype;
    config.n_threads = n_threads;
    config.max_seqs = b->max_seqs;
    /* all at once: what starts leaves a page for each that runs */
    config.kv_tokens = b->max_seqs * yard_align_up(seq_tokens + YARD_PAGE_TOKENS, YARD_PAGE_TOKENS);
    config.cpu_variant = b->args.variant;
    config.device = b->args.device;
    config.cuda_variant = b->args.cuda_variant;
    config.cuda_choices = b->args.cuda_choices;
    config.prefix_cache = YARD_CACHE_OFF; /* every run computes */
    config.prefill_budget = INT32_MAX;    /* prompts end together, so that all decode together */
    config.pin = (yard_thread_place)b->args.pin;
    config.warn = notify->warn;
    config.progress = notify->progress;
    config.notify_ctx = notify->ctx;
    return yard_engine_create(&b->engine, &config, err);
}

static yard_status run_threads(engine_bench *b, uint32_t threads_idx, yard_error *err)
{
    const uint32_t n_threads = b->args.threads.value[threads_idx];
    yard_status st = open_engine(b, n_threads, err);

    if (st == YARD_OK && threads_idx == 0) {
        fill_prompt(b->prompt, b->max_prompt + b->max_seqs,
                    yard_engine_model_config(b->engine)->vocab);
        if (!is_relative(&b->args))
            st = find_expected(b, err);
    }
    for (uint32_t p = 0; p < b->args.prompt.n && st == YARD_OK; p++)
        for (uint32_t i = 0; i < b->args.batch.n && st == YARD_OK; i++) {
            const engine_case c = { .n_threads = n_threads,
                                    .n_prompt = b->args.prompt.value[p],
                                    .n_seqs = b->args.batch.value[i],
                                    .expected = expected_ids(b, p) };
            st = bench_prefill(b, &c, err);
            if (st == YARD_OK)
                st = bench_decode(b, &c, err);
        }
    yard_engine_destroy(b->engine);
    b->engine = NULL;
    return st;
}

static uint32_t largest(const yard_bench_list *list)
{
    uint32_t max = 0;

    for (uint32_t i = 0; i < list->n; i++)
        max = list->value[i] > max ? list->value[i] : max;
    return max;
}

static yard_status allocate(engine_bench *b, yard_error *err)
{
    const yard_bench_engine_args *a = &b->args;
    const size_t n_decode = a->n_decode;

    b->max_seqs = largest(&a->batch);
    b->max_prompt = largest(&a->prompt);
    b->n_rows = (uint64_t)a->threads.n * a->prompt.n * a->batch.n * 2;
    b->prompt = calloc((size_t)b->max_prompt + b->max_seqs, sizeof(*b->prompt));
    b->expected = calloc(a->prompt.n * b->max_seqs * n_decode, sizeof(*b->expected));
    b->ids = calloc(b->max_seqs * n_decode, sizeof(*b->ids));
    b->n_ids = calloc(b->max_seqs, sizeof(*b->n_ids));
    b->requests = calloc(b->max_seqs, sizeof(*b->requests));
    b->samples_us = calloc(a->n_repeats * n_decode, sizeof(*b->samples_us));
    if (!b->prompt || !b->expected || !b->ids || !b->n_ids || !b->requests || !b->samples_us)
        return yard_fail(err, YARD_ENOMEM, "bench: no memory for ids and samples");
    return YARD_OK;
}

yard_status yard_bench_engine_here(const yard_bench_engine_args *a, uint64_t *n_wrong,
                                   yard_error *err)
{
    engine_bench b = { .args = *a };
    yard_status st;

    if (!yard_bench_engine_on_cpu(a))
        b.args.threads = (yard_bench_list){ 1, { 1 } };
    st = allocate(&b, err);
    for (uint32_t i = 0; i < b.args.threads.n && st == YARD_OK; i++)
        st = run_threads(&b, i, err);
    *n_wrong = b.n_wrong;
    free(b.prompt);
    free(b.expected);
    free(b.ids);
    free(b.n_ids);
    free(b.requests);
    free(b.samples_us);
    return st;
}
