/* The prefix cache: full pages of the KV cache by the hash of all tokens up to their end, shared by
 * all requests of an instance. */
#include <stdio.h>

#include "engine/engine_impl.h"

/* ---- names and news ---------------------------------------------------------------------- */

static yard_page_hash root_of(const yard_engine *e, const yard_engine_config *c)
{
    const char *salt = c->cache_salt ? c->cache_salt : "";
    char identity[300];
    int n;

    /* Format 1. TP and the AMX variant change the order of sums. */
    n = snprintf(identity, sizeof(identity), "1 %s %s tp %u width %u%s%s",
                 yard_model_identity(e->model), c->mode == YARD_EXACT ? "exact" : "quantised",
                 c->tp ? c->tp : 1, yard_model_kv_width(&e->model_config, c->tp ? c->tp : 1),
                 yard_model_has_mtp(e->model) ? " mtp" : "",
                 c->cpu_variant && !strcmp(c->cpu_variant, "amx") ? " amx" : "");
    return yard_page_hash_root(identity, (size_t)n, salt, strlen(salt));
}

void yard_cache_open(yard_engine *e, const yard_engine_config *c)
{
    e->page_root = root_of(e, c);
    e->page_events.max_events = 2 * e->n_pages + 64; /* all that is held, and as much again */
    yard_engine_pages_anew(e);
}

void yard_cache_close(yard_engine *e)
{
    yard_page_events_close(&e->page_events);
}

yard_page_hash yard_engine_page_root(const yard_engine *e)
{
    return e->page_root;
}

void yard_engine_pages_anew(yard_engine *e)
{
    e->page_events.n = 0;
    (void)yard_page_events_push(&e->page_events, (yard_page_event){ .change = YARD_PAGES_UNKNOWN });
}

uint32_t yard_engine_poll_pages(yard_engine *e, yard_page_event *events, uint32_t max_events)
{
    return yard_page_events_take(&e->page_events, events, max_events);
}
