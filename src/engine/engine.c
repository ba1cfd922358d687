/* Creating and destroying an engine; pages; statistics. */
#include "engine/engine.h"

#include <stdio.h>
#include <stdlib.h>

#include "engine/engine_impl.h"

enum { MIN_LOGIT_ROWS = 16, MIN_DEFAULT_KV_TOKENS = 8192 };

/* Address space, not memory: pages of the cache cost nothing until they are written. */
static const uint64_t default_kv_bytes = 2000000000;

/* Shorter configs of older callers get defaults for what they lack; longer ones must be zero there.
 */
static yard_status read_config(yard_engine_config *out, const yard_engine_config *config,
                               yard_error *err)
{
    const yard_engine_config defaults = YARD_ENGINE_CONFIG_INIT;
    const size_t known = sizeof(*out);

    if (!config || config->size < sizeof(config->size))
        return yard_fail(err, YARD_EINVAL, "engine config: want YARD_ENGINE_CONFIG_INIT first");
    for (size_t i = known; i < config->size; i++)
        if (((const uint8_t *)config)[i] != 0)
            return yard_fail(err, YARD_ENOTSUP,
                             "engine config: want %zu bytes at most, got %zu with a setting "
                             "this library does not know",
                             known, config->size);
    *out = defaults;
    memcpy(out, config, config->size < known ? config->size : known);
    if (!out->model_dir)
        return yard_fail(err, YARD_EINVAL, "engine config: model_dir: want a folder, got NULL");
    if (out->max_seqs == 0 || out->max_seqs > 65536)
        return yard_fail(err, YARD_EINVAL, "engine config: max_seqs: want 1 to 65536, got %u",
                         out->max_seqs);
    if (out->kv_dtype != YARD_KV_BF16 && out->kv_dtype != YARD_KV_FP8)
        return yard_fail(err, YARD_EINVAL,
                         "engine config: kv_dtype: want bf16 (%d) or fp8 (%d), got %d",
                         YARD_KV_BF16, YARD_KV_FP8, (int)out->kv_dtype);
    if (out->max_tokens < out->max_seqs || out->max_tokens > 1u << 20)
        return yard_fail(err, YARD_EINVAL,
                         "engine config: max_tokens: want max_seqs (%u) to 1048576, got %u",
                         out->max_seqs, out->max_tokens);
    return YARD_OK;
}

static yard_status allocate(yard_engine *e, yard_error *err)
{
    const uint32_t n = e->max_seqs;

    e->running = calloc(n, sizeof(*e->running));
    e->logit_slot = calloc(n, sizeof(*e->logit_slot));
    e->logit_row = calloc(n, sizeof(*e->logit_row));
    e->sample_rows = calloc(n, sizeof(*e->sample_rows));
    e->sampled = calloc(n, sizeof(*e->sampled));
    e->finite = calloc(n, sizeof(*e->finite));
    e->order = calloc(n, sizeof(*e->order));
    if (!e->running || !e->logit_slot || !e->logit_row || !e->sample_rows || !e->sampled ||
        !e->finite || !e->order)
        return yard_fail(err, YARD_ENOMEM, "engine: no memory for %u requests", n);
    return YARD_OK;
}

/* Room for every request at its longest, and so for prefixes when they are shorter. */
static uint64_t default_kv_tokens(const yard_model_config *c, yard_dtype cached, uint32_t max_seqs)
{
    const uint64_t most = (uint64_t)max_seqs * c->max_positions;
    uint64_t n = default_kv_bytes / yard_model_kv_bytes_per_token(c, cached);

    n = n < MIN_DEFAULT_KV_TOKENS ? MIN_DEFAULT_KV_TOKENS : n;
    return n < most ? n : most;
}

/* The model checks the layout. */
static void lay_out_ranks(yard_model_options *options, const yard_engine_config *c,
                          uint32_t n_ranks)
{
    const uint32_t tp = c->tp ? c->tp : 1;

    options->layout = (yard_layout){ n_ranks, n_ranks / tp, tp };
    options->fabric = c->fabric;
    options->rank = c->fabric ? yard_fabric_rank(c->fabric) : 0;
    options->heap_at = yard_group_model_at(n_ranks);
    options->timeout_us = c->timeout_us;
}

static yard_status choose_device(yard_model_options *options, const yard_engine_config *c,
                                 yard_error *err)
{
    const char *device = c->device ? c->device : "cpu";
    const bool cpu = !strcmp(device, "cpu");

    if (!cpu && strcmp(device, "cuda") != 0)
        return yard_fail(err, YARD_EINVAL, "device: want cpu or cuda, got '%s'", device);
    options->variant = cpu ? c->cpu_variant : c->cuda_variant;
    options->choices = cpu ? NULL : c->cuda_choices;
    options->ops = yard_ops_find(device);
    if (options->ops)
        return YARD_OK;
    return yard_fail(err, YARD_ENOTSUP,
                     "device %s: this program has none: it was made without nvcc, or with libyard "
                     "alone",
                     device);
}

/* Reads config.json and settles every size. */
static yard_status choose_sizes(yard_engine *e, const yard_engine_config *c, uint32_t n_ranks,
                                yard_model_options *options, yard_error *err)
{
    const yard_notify notify = { c->warn, c->progress, c->notify_ctx };
    yard_status st = yard_model_config_load(&e->model_config, c->model_dir, &notify, err);
    uint64_t kv_tokens = c->kv_tokens;

    *options = (yard_model_options){ .exact = c->mode == YARD_EXACT,
                                     .fp8_cache = c->kv_dtype == YARD_KV_FP8,
                                     .mtp = c->mtp,
                                     .n_threads = c->n_threads,
                                     .pin = (yard_pin)c->pin,
                                     .max_seqs = c->max_seqs };
    if (st == YARD_OK)
        st = choose_device(options, c, err);
    if (st != YARD_OK)
        return st;
    lay_out_ranks(options, c, n_ranks);
    if (kv_tokens == 0)
        kv_tokens = default_kv_tokens(&e->model_config,
                                      options->fp8_cache ? YARD_FP8_E4M3 : YARD_BF16, c->max_seqs);
    if (kv_tokens > (uint64_t)INT32_MAX)
        return yard_fail(err, YARD_EINVAL, "engine config: kv_tokens: want %d at most, got %llu",
                         INT32_MAX, (unsigned long long)kv_tokens);
    e->n_pages = yard_pages_for(kv_tokens);
    e->context = e->model_config.max_positions;
    if (e->context > e->n_pages * YARD_PAGE_TOKENS)
        e->context = e->n_pages * YARD_PAGE_TOKENS;
    e->max_pages_per_seq = yard_pages_for(e->context);
    e->max_seqs = c->max_seqs;
    e->max_tokens = c->max_tokens;
    if (e->max_tokens > e->n_pages * YARD_PAGE_TOKENS)
        e->max_tokens = e->n_pages * YARD_PAGE_TOKENS;
    if (e->max_tokens < c->max_seqs)
        e->max_tokens = c->max_seqs;
    options->max_tokens = e->max_tokens;
    e->max_logits = c->max_seqs > MIN_LOGIT_ROWS ? c->max_seqs : MIN_LOGIT_ROWS;
    options->n_pages = e->n_pages;
    options->max_pages_per_seq = e->max_pages_per_seq;
    options->max_logits = e->max_logits;
    return YARD_OK;
}

yard_status yard_engine_budget_of(const yard_engine_config *config, uint32_t n_ranks, uint32_t rank,
                                  yard_engine_budget *out, yard_error *err)
{
    yard_engine_config c;
    yard_engine e = { 0 }; /* for its sizes */
    yard_model_options options;
    yard_model_budget model;
    bool on_host;
    yard_status st = read_config(&c, config, err);

    c.fabric = NULL;
    if (st == YARD_OK)
        st = choose_sizes(&e, &c, n_ranks, &options, err);
    options.rank = rank;
    if (st == YARD_OK)
        st = yard_model_budget_of(&e.model_config, &options, &model, err);
    if (st != YARD_OK)
        return st;
    on_host = options.ops->in_host_memory;
    *out = (yard_engine_budget){ .weight_bytes = model.weight_bytes,
                                 .heap_bytes = options.heap_at + (on_host ? model.heap_bytes : 0),
                                 .device_heap_bytes = on_host ? 0 : model.heap_bytes,
                                 .cache_bytes = model.cache_bytes,
                                 .scratch_bytes = model.scratch_bytes,
                                 .context = e.context,
                                 .vocab = e.model_config.vocab };
    return YARD_OK;
}

static yard_status create_model(yard_engine *e, const yard_engine_config *c, yard_error *err)
{
    const yard_notify notify = { c->warn, c->progress, c->notify_ctx };
    yard_model_options options;
    yard_status st = choose_sizes(e, c, c->fabric ? yard_fabric_size(c->fabric) : 1, &options, err);

    if (st == YARD_OK)
        st = yard_model_create(&e->model, c->model_dir, &e->model_config, &options, &notify, err);
    return st;
}

yard_status yard_engine_create(yard_engine **out, const yard_engine_config *config, yard_error *err)
{
    yard_engine_config c;
    yard_engine *e;
    yard_status st = read_config(&c, config, err);

    if (st != YARD_OK)
        return st;
    e = calloc(1, sizeof(*e));
    if (!e)
        return yard_fail(err, YARD_ENOMEM, "engine: %zu bytes", sizeof(*e));
    st = create_model(e, &c, err);
    if (st == YARD_OK)
        st = allocate(e, err);
    if (st == YARD_OK)
        st = yard_group_open(e, &c, err);
    if (st == YARD_OK)
        st = yard_cache_open(e, &c, err);
    if (st != YARD_OK) {
        yard_engine_destroy(e);
        return st;
    }
    snprintf(e->description, sizeof(e->description), "%s", yard_model_describe(e->model));
    *out = e;
    return YARD_OK;
}

void yard_engine_destroy(yard_engine *e)
{
    if (!e)
        return;
    yard_engine_drop_all(e);
    yard_group_close(e);
    yard_cache_close(e);
    yard_model_destroy(e->model);
    free(e->running);
    free(e->logit_slot);
    free(e->logit_row);
    free(e->sample_rows);
    free(e->sampled);
    free(e->finite);
    free(e->order);
    free(e->logprobs);
    free(e->kept_logits);
    free(e->events.events);
    free(e);
}

void yard_engine_get_stats(const yard_engine *e, yard_engine_stats *out)
{
    *out = (yard_engine_stats){ .n_queued = e->n_pending + e->n_queued,
                                .n_running = e->n_running,
                                .n_pages = e->n_pages,
                                .n_free_pages = yard_page_pool_available(&e->pool),
                                .n_steps = e->n_steps,
                                .n_prompt_tokens = e->n_prompt_tokens,
                                .n_output_tokens = e->n_output_tokens,
                                .n_empty_steps = e->n_empty_steps,
                                .agree_us = e->agree_us,
                                .woken_at_us = e->woken_at_us,
                                .generation = e->records.generation,
                                .n_cached_pages = e->pool.n_idle,
                                .n_found_tokens = e->n_found_tokens,
                                .n_preemptions = e->n_preemptions };
}

/* What is left of a list of sequences that have not begun. */
static uint64_t prompt_tokens(const sequence *seq)
{
    uint64_t n = 0;

    for (; seq; seq = seq->next)
        n += sequence_length(seq);
    return n;
}

void yard_engine_get_report(const yard_engine *e, yard_engine_report *out)
{
    *out = (yard_engine_report){ .n_requests = yard_engine_live(e),
                                 .n_free_pages = yard_page_pool_available(&e->pool),
                                 .prompt_tokens = prompt_tokens(e->queue_head) };
    for (uint32_t slot = 0; slot < e->max_seqs; slot++) {
        const sequence *seq = e->running[slot];

        if (!seq)
            continue;
        out->running_tokens += seq->n_cached;
        if (!sequence_decodes(seq))
            out->prompt_tokens += sequence_length(seq) - seq->n_cached;
    }
    for (const command *c = e->command_head; c; c = c->next)
        out->prompt_tokens += prompt_tokens(c->seqs);
}

const char *yard_engine_error(const yard_engine *e)
{
    return e->err.message;
}

const char *yard_engine_describe(const yard_engine *e)
{
    return e->description;
}

const yard_model_config *yard_engine_model_config(const yard_engine *e)
{
    return &e->model_config;
}
