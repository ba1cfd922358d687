/* Who runs: the queue, what starts when, and who gives way when pages run out. All of it follows
 * from the order of commands and steps alone, so that the ranks of an instance decide alike. */
#include <assert.h>
#include <stdlib.h>

#include "engine/engine_impl.h"

/* Of the queue, in one step: those that wait for others' pages let later ones pass, so far. */
enum { MAX_LOOKED_AT = 64 };

static bool append_pages(yard_engine *e, uint32_t slot, uint32_t first, uint32_t end)
{
    if (end > first && end - first > yard_page_pool_available(&e->pool))
        return false;
    for (uint32_t i = first; i < end; i++)
        yard_engine_page_row(e, slot)[i] = yard_page_pool_take(&e->pool);
    return true;
}

bool yard_engine_take_pages(yard_engine *e, uint32_t slot, uint32_t n_tokens, uint32_t *n_pages)
{
    const uint32_t n = yard_pages_for(n_tokens);

    *n_pages = append_pages(e, slot, 0, n) ? n : 0;
    return *n_pages == n;
}

/* The last page first: what is evicted first is then the end of a prefix, not its beginning. */
void yard_engine_drop_pages(yard_engine *e, uint32_t slot, uint32_t n_pages)
{
    for (uint32_t i = n_pages; i-- > 0;)
        yard_page_pool_drop(&e->pool, yard_engine_page_row(e, slot)[i]);
}

void yard_engine_release_slot(yard_engine *e, uint32_t slot)
{
    yard_engine_drop_pages(e, slot, e->running[slot]->n_pages);
    yard_sequence_free(e->running[slot]);
    e->running[slot] = NULL;
    e->n_running--;
}

void yard_engine_enqueue(yard_engine *e, sequence *seq)
{
    sequence **at = &e->queue_head;

    if (e->queue_tail && e->queue_tail->order < seq->order)
        at = &e->queue_tail->next;
    while (*at && (*at)->order < seq->order)
        at = &(*at)->next;
    seq->next = *at;
    *at = seq;
    if (!seq->next)
        e->queue_tail = seq;
    e->n_queued++;
}

void yard_engine_dequeue(yard_engine *e, sequence *before, sequence *seq)
{
    if (before)
        before->next = seq->next;
    else
        e->queue_head = seq->next;
    if (e->queue_tail == seq)
        e->queue_tail = before;
    seq->next = NULL;
    e->n_queued--;
}

typedef struct need {
    bool waits;              /* for pages that a running sequence is computing */
    const sequence *sibling; /* another choice whose prompt is cached; NULL: none */
    uint32_t n_shared;       /* pages that it does not compute, the first ones */
    uint32_t n_available;    /* how many fewer pages are available once it has what it needs */
    uint32_t n_rows;         /* tokens to compute before it decodes */
} need;

static const sequence *find_sibling(const yard_engine *e, const sequence *seq)
{
    for (uint32_t slot = 0; slot < e->max_seqs; slot++)
        if (e->running[slot] && e->running[slot]->id == seq->id)
            return e->running[slot];
    return NULL;
}

/* True when a running sequence has the page's tokens in its prompt, and has not got to its end. */
static bool is_being_computed(const yard_engine *e, const sequence *seq, uint32_t page_idx)
{
    const uint32_t end = (page_idx + 1) * YARD_PAGE_TOKENS;

    if (page_idx >= yard_cache_reusable_pages(e, seq) || end > seq->n_prompt)
        return false;
    for (uint32_t slot = 0; slot < e->max_seqs; slot++) {
        const sequence *r = e->running[slot];

        if (r && r->n_cached < end && end <= r->n_prompt &&
            yard_page_hash_equal(r->name[page_idx], seq->name[page_idx]))
            return true;
    }
    return false;
}

static need need_of(const yard_engine *e, sequence *seq)
{
    const uint32_t length = sequence_length(seq);
    const sequence *sibling = seq->started || seq->choice == 0 ? NULL : find_sibling(e, seq);
    uint32_t n_idle = 0;
    need n = { .n_rows = 1 };

    if (sibling && sibling->n_cached >= sibling->n_prompt) {
        n.sibling = sibling;
        n.n_shared = (seq->n_prompt - 1) / YARD_PAGE_TOKENS;
    } else {
        n.n_shared = yard_cache_match(e, seq, &n_idle);
        n.n_rows = length - n.n_shared * YARD_PAGE_TOKENS;
        n.waits = sibling || is_being_computed(e, seq, n.n_shared);
    }
    n.n_available = yard_pages_for(length) - n.n_shared + n_idle;
    return n;
}

typedef struct room {
    uint32_t n_slots, n_pages, n_running;
} room;

static room room_of(const yard_engine *e)
{
    return (room){ e->max_seqs - e->n_running, yard_page_pool_available(&e->pool), e->n_running };
}

/* A page is left for each that runs, so that what starts does not soon give way again. Those that
 * wait have their room kept, so that nobody passes them for ever. False: it does not fit. */
static bool take_room(room *r, const need *n)
{
    if (r->n_slots == 0 || n->n_available + r->n_running > r->n_pages)
        return false;
    r->n_slots--;
    r->n_pages -= n->n_available;
    r->n_running += !n->waits;
    return true;
}

/* The sibling's last page is not full, or its last token has to be computed again for its logits:
 * that page is copied. */
static void share_with_sibling(yard_engine *e, sequence *seq, uint32_t slot, const need *n)
{
    uint32_t from = 0;

    while (e->running[from] != n->sibling)
        from++;
    for (uint32_t i = 0; i < n->n_shared; i++) {
        yard_engine_page_row(e, slot)[i] = yard_engine_page_row(e, from)[i];
        yard_page_pool_hold(&e->pool, yard_engine_page_row(e, slot)[i]);
    }
    seq->builds_on_generated = n->sibling->builds_on_generated;
    append_pages(e, slot, n->n_shared, yard_pages_for(sequence_length(seq)));
    seq->n_cached = n->n_shared * YARD_PAGE_TOKENS;
    if (yard_model_copy_page(e->model, yard_engine_page_row(e, from)[n->n_shared],
                             yard_engine_page_row(e, slot)[n->n_shared], NULL) == YARD_OK)
        seq->n_cached = seq->n_prompt - 1; /* else the page is computed */
}

static void start(yard_engine *e, sequence *seq, const need *n)
{
    uint32_t slot = 0;

    while (e->running[slot])
        slot++;
    if (n->sibling) {
        share_with_sibling(e, seq, slot, n);
    } else {
        yard_cache_hold(e, seq, slot, n->n_shared);
        append_pages(e, slot, n->n_shared, yard_pages_for(sequence_length(seq)));
        seq->n_cached = n->n_shared * YARD_PAGE_TOKENS;
    }
    seq->n_pages = yard_pages_for(sequence_length(seq));
    seq->n_shown = n->n_shared;
    if (!seq->started) {
        seq->n_found = seq->n_cached;
        e->n_found_tokens += seq->n_found;
    }
    seq->started = true;
    e->running[slot] = seq;
    e->n_running++;
}

void yard_engine_admit(yard_engine *e)
{
    room r = room_of(e);
    sequence *before = NULL, *seq = e->queue_head;

    for (uint32_t i = 0; i < MAX_LOOKED_AT && seq; i++) {
        const need n = need_of(e, seq);

        if (!take_room(&r, &n))
            return;
        if (n.waits) {
            before = seq;
        } else {
            yard_engine_dequeue(e, before, seq);
            start(e, seq, &n);
        }
        seq = before ? before->next : e->queue_head;
    }
}

uint32_t yard_engine_admissible(const yard_engine *e)
{
    const command *c = e->command_head;
    sequence *seq = e->queue_head;
    room r = room_of(e);
    uint64_t n_rows = 0;

    for (uint32_t i = 0; i < MAX_LOOKED_AT && n_rows < e->max_tokens; i++) {
        need n;

        for (; !seq && c; c = c->next)
            seq = c->seqs;
        if (!seq)
            break;
        n = need_of(e, seq);
        if (!take_room(&r, &n))
            break;
        n_rows += n.waits ? 0 : n.n_rows;
        seq = seq->next;
    }
    return n_rows < e->max_tokens ? (uint32_t)n_rows : e->max_tokens;
}

static uint32_t youngest(const yard_engine *e)
{
    uint32_t best = e->max_seqs;

    for (uint32_t slot = 0; slot < e->max_seqs; slot++)
        if (e->running[slot] &&
            (best == e->max_seqs || e->running[slot]->order > e->running[best]->order))
            best = slot;
    return best;
}

/* Its tokens are kept; their cache is computed again, each in the form in which it was. */
static void preempt(yard_engine *e, uint32_t slot)
{
    sequence *seq = e->running[slot];

    yard_engine_drop_pages(e, slot, seq->n_pages);
    seq->n_pages = seq->n_cached = 0;
    e->running[slot] = NULL;
    e->n_running--;
    e->n_preemptions++;
    yard_engine_enqueue(e, seq);
}

bool yard_engine_grow(yard_engine *e, uint32_t slot)
{
    sequence *seq = e->running[slot];

    if (seq->n_cached < seq->n_pages * YARD_PAGE_TOKENS)
        return true;
    while (!append_pages(e, slot, seq->n_pages, seq->n_pages + 1)) {
        const uint32_t victim = youngest(e);

        assert(e->n_running > 1 && victim < e->max_seqs); /* the cache holds a context */
        preempt(e, victim);
        if (victim == slot)
            return false;
    }
    seq->n_pages++;
    return true;
}

bool yard_engine_accounts_hold(const yard_engine *e)
{
    uint32_t *n_holders = calloc(e->n_pages, sizeof(*n_holders));
    uint32_t n_running = 0, n_queued = 0;
    bool hold;

    if (!n_holders)
        return true;
    for (uint32_t slot = 0; slot < e->max_seqs; slot++) {
        const sequence *seq = e->running[slot];

        n_running += seq != NULL;
        for (uint32_t i = 0; seq && i < seq->n_pages; i++)
            n_holders[yard_engine_page_row(e, slot)[i]]++;
    }
    for (const sequence *seq = e->queue_head; seq; seq = seq->next)
        n_queued += seq->n_pages == 0;
    hold = n_running == e->n_running && n_queued == e->n_queued &&
           yard_page_pool_is_sound(&e->pool, n_holders);
    free(n_holders);
    return hold;
}
