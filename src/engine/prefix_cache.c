/* The prefix cache: full pages of the KV cache by the hash of all tokens up to their end, shared by
 * all requests of an instance; and what is said of them to whoever places requests. */
#include <stdio.h>

#include "engine/engine_impl.h"

static void tell(yard_engine *e, yard_page_change change, yard_page_hash name)
{
    const yard_page_event event = { .change = change, .page = name };

    if (!e->page_events_lost)
        e->page_events_lost = !yard_page_events_push(&e->page_events, event);
}

static void tell_evicted(void *ctx, yard_page_hash name)
{
    tell(ctx, YARD_PAGE_EVICTED, name);
}

void yard_engine_pages_anew(yard_engine *e)
{
    e->page_events_lost = true;
}

static void tell_all(yard_engine *e)
{
    e->page_events.n = 0;
    e->page_events_lost = false;
    tell(e, YARD_PAGES_UNKNOWN, (yard_page_hash){ { 0 } });
    for (uint32_t i = 0; i < e->n_pages; i++)
        if (e->pool.page[i].named)
            tell(e, YARD_PAGE_ADDED, e->pool.page[i].name);
}

uint32_t yard_engine_poll_pages(yard_engine *e, yard_page_event *events, uint32_t max_events)
{
    if (e->page_events_lost)
        tell_all(e);
    return yard_page_events_take(&e->page_events, events, max_events);
}

static yard_page_hash root_of(const yard_engine *e, const yard_engine_config *c)
{
    const char *salt = c->cache_salt ? c->cache_salt : "";
    char identity[300];
    int n;

    /* Format 1. TP, the AMX variant and the kernels of a device change the order of sums. */
    n = snprintf(identity, sizeof(identity), "1 %s %s tp %u width %u%s%s%s%s",
                 yard_model_identity(e->model), c->mode == YARD_EXACT ? "exact" : "quantised",
                 c->tp ? c->tp : 1, yard_model_kv_width(&e->model_config, c->tp ? c->tp : 1),
                 c->kv_dtype == YARD_KV_FP8 ? " fp8" : "",
                 yard_model_has_mtp(e->model) ? " mtp" : "",
                 !c->device || !strcmp(c->device, "cpu")                   ? ""
                 : c->cuda_variant && strcmp(c->cuda_variant, "fast") != 0 ? " cuda deterministic"
                                                                           : " cuda",
                 c->cpu_variant && !strcmp(c->cpu_variant, "amx") ? " amx" : "");
    return yard_page_hash_root(identity, (size_t)n, salt, strlen(salt));
}

yard_status yard_cache_open(yard_engine *e, const yard_engine_config *c, yard_error *err)
{
    const yard_status st = yard_page_pool_open(&e->pool, e->n_pages, err);

    e->pool.evicted = tell_evicted;
    e->pool.ctx = e;
    e->cache = c->prefix_cache;
    e->page_root = root_of(e, c);
    e->page_events.max_events = 2 * e->n_pages + 64; /* all that is held, and as much again */
    yard_engine_pages_anew(e);
    return st;
}

void yard_cache_close(yard_engine *e)
{
    yard_page_pool_close(&e->pool);
    yard_page_events_close(&e->page_events);
}

void yard_cache_forget(yard_engine *e)
{
    yard_page_pool_forget(&e->pool);
    yard_engine_pages_anew(e);
}

yard_page_hash yard_engine_page_root(const yard_engine *e)
{
    return e->page_root;
}

void yard_cache_name(const yard_engine *e, sequence *seq, uint32_t n_pages)
{
    for (; seq->n_names < n_pages; seq->n_names++)
        seq->name[seq->n_names] =
            yard_page_hash_next(seq->n_names ? seq->name[seq->n_names - 1] : e->page_root,
                                seq->token + (size_t)seq->n_names * YARD_PAGE_TOKENS);
}

uint32_t yard_cache_reusable_pages(const yard_engine *e, const sequence *seq)
{
    uint32_t n = sequence_length(seq) - 1;

    if (e->cache == YARD_CACHE_OFF)
        return 0;
    if (e->cache == YARD_CACHE_STRICT && n > seq->n_prompt)
        n = seq->n_prompt;
    /* The row before a prompt token gives its log-probability. */
    if (seq->n_prompt_told < seq->n_prompt_to_tell)
        n = seq->n_prompt_told > 0 ? seq->n_prompt_told - 1 : 0;
    return n / YARD_PAGE_TOKENS;
}

uint32_t yard_cache_match(const yard_engine *e, sequence *seq, uint32_t *n_idle)
{
    const uint32_t max = yard_cache_reusable_pages(e, seq);
    uint32_t n = 0;

    yard_cache_name(e, seq, max);
    for (*n_idle = 0; n < max; n++) {
        const int32_t page = yard_page_pool_find(&e->pool, seq->name[n]);

        if (page == YARD_NO_PAGE)
            break;
        *n_idle += e->pool.page[page].n_holders == 0;
    }
    return n;
}

void yard_cache_hold(yard_engine *e, sequence *seq, uint32_t slot, uint32_t n_pages)
{
    int32_t *row = yard_engine_page_row(e, slot);

    seq->builds_on_generated = false;
    for (uint32_t i = 0; i < n_pages; i++) {
        row[i] = yard_page_pool_find(&e->pool, seq->name[i]);
        yard_page_pool_hold(&e->pool, row[i]);
        seq->builds_on_generated = seq->builds_on_generated || e->pool.page[row[i]].generated;
    }
}

void yard_cache_add(yard_engine *e, int32_t page, yard_page_hash name, bool generated)
{
    if (yard_page_pool_name(&e->pool, page, name, generated))
        tell(e, YARD_PAGE_ADDED, name);
}

void yard_cache_show(yard_engine *e, uint32_t slot)
{
    sequence *seq = e->running[slot];

    if (e->cache == YARD_CACHE_OFF)
        return;
    for (; (seq->n_shown + 1) * YARD_PAGE_TOKENS <= seq->n_cached; seq->n_shown++) {
        const uint32_t i = seq->n_shown;
        const bool generated =
            seq->builds_on_generated || (i + 1) * YARD_PAGE_TOKENS > seq->n_prompt;

        if (generated && e->cache == YARD_CACHE_STRICT)
            return;
        yard_cache_name(e, seq, i + 1);
        yard_cache_add(e, yard_engine_page_row(e, slot)[i], seq->name[i], generated);
    }
}
