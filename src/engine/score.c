/* Logits of a given sequence, without generating: one sequence through prefill, chunk by chunk. */
#include <stdlib.h>

#include "engine/engine_impl.h"

/* Logits of a chunk are kept until the drafts are there too: bounded. */
enum { MAX_KEPT_LOGITS = 16 << 20 };

struct score {
    yard_engine *engine;
    const int32_t *ids;
    uint32_t n_ids, every;
    yard_logits_fn each;
    void *ctx;
    float *kept;     /* [wanted rows of a chunk, vocab] main logits while drafting */
    int32_t *wanted; /* [max_tokens] rows of the chunk whose logits are wanted */
    uint32_t n_wanted;
    uint32_t from;      /* first position of the chunk */
    yard_status status; /* the first failure */
};

static bool is_wanted(const struct score *s, uint32_t pos)
{
    return pos % s->every == 0 || pos == s->n_ids - 1;
}

static uint32_t chunk_rows(const struct score *s, uint32_t from)
{
    const uint32_t vocab = s->engine->model_config.vocab;
    const uint32_t max_wanted = MAX_KEPT_LOGITS / vocab > 0 ? MAX_KEPT_LOGITS / vocab : 1;
    uint32_t n = 0, n_wanted = 0;

    while (from + n < s->n_ids && n < s->engine->max_tokens) {
        n_wanted += is_wanted(s, from + n);
        if (n_wanted > max_wanted)
            break;
        n++;
    }
    return n;
}

static void check_finite(struct score *s, const float *logits, uint32_t first, uint32_t n)
{
    const uint32_t vocab = s->engine->model_config.vocab;

    for (uint32_t i = 0; i < n && s->status == YARD_OK; i++)
        if (!yard_all_finite(logits + (size_t)i * vocab, vocab))
            s->status = yard_fail(&s->engine->err, YARD_EFORMAT,
                                  "logits at position %u are not finite numbers: the model's "
                                  "weights overflow",
                                  s->from + (uint32_t)s->wanted[first + i]);
}

/* Calls each() for the wanted rows, or stores their logits in kept. */
static void take_logits(struct score *s, float *kept)
{
    const uint32_t vocab = s->engine->model_config.vocab;

    for (uint32_t i = 0; i < s->n_wanted && s->status == YARD_OK; i += s->engine->max_logits) {
        const uint32_t left = s->n_wanted - i;
        const uint32_t n = left < s->engine->max_logits ? left : s->engine->max_logits;
        const float *logits = NULL;

        s->status = yard_model_logits(s->engine->model, s->wanted + i, n, &s->engine->err);
        if (s->status == YARD_OK)
            s->status = yard_model_read_logits(s->engine->model, 0, n, &logits, &s->engine->err);
        if (s->status == YARD_OK)
            check_finite(s, logits, i, n);
        if (s->status != YARD_OK)
            return;
        if (kept) {
            memcpy(kept + (size_t)i * vocab, logits, (size_t)n * vocab * sizeof(float));
            continue;
        }
        for (uint32_t j = 0; j < n; j++)
            s->each(s->ctx, s->from + (uint32_t)s->wanted[i + j],
                    s->kept ? s->kept + (size_t)(i + j) * vocab : logits + (size_t)j * vocab,
                    s->kept ? logits + (size_t)j * vocab : NULL);
    }
}

/* Drafts need the token after each row, which the sequence's last row does not have. */
static void take_drafts(struct score *s, uint32_t n_rows)
{
    const bool last = s->from + n_rows == s->n_ids;
    const uint32_t n_drafts = n_rows - (last ? 1 : 0);
    const bool last_wanted = last; /* the last position is always wanted */

    if (n_drafts > 0) {
        s->n_wanted -= last_wanted;
        s->status = yard_model_draft(s->engine->model, NULL, s->ids + s->from + 1,
                                     (int32_t)n_drafts, &s->engine->err);
        take_logits(s, NULL);
        s->n_wanted += last_wanted;
    }
    if (last && s->status == YARD_OK)
        s->each(s->ctx, s->n_ids - 1,
                s->kept + (size_t)(s->n_wanted - 1) * s->engine->model_config.vocab, NULL);
}

static void score_chunk(struct score *s, uint32_t n_rows)
{
    yard_step *step = yard_model_step(s->engine->model);

    step->n_tokens = 0;
    step->max_rows = s->engine->max_tokens;
    yard_engine_add_rows(s->engine, 0, s->ids, s->from, n_rows, s->n_ids);
    s->status = yard_model_forward(s->engine->model, NULL, &s->engine->err);
    s->n_wanted = 0;
    for (uint32_t i = 0; i < n_rows; i++)
        if (is_wanted(s, s->from + i))
            s->wanted[s->n_wanted++] = (int32_t)i;
    take_logits(s, s->kept);
    if (s->kept && s->status == YARD_OK)
        take_drafts(s, n_rows);
}

static yard_status check(yard_engine *e, const int32_t *ids, uint32_t n_ids, uint32_t every)
{
    if (n_ids == 0 || n_ids > e->context)
        return yard_fail(&e->err, YARD_EINVAL, "ids: want 1 to %u tokens (the %s), got %u",
                         e->context, yard_engine_bound(e), n_ids);
    if (every == 0)
        return yard_fail(&e->err, YARD_EINVAL, "every: want at least 1, got 0");
    if (e->n_running > 0 || e->n_queued > 0)
        return yard_fail(&e->err, YARD_EAGAIN, "score: want no request running, got %u",
                         e->n_running + e->n_queued);
    for (uint32_t i = 0; i < n_ids; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= e->model_config.vocab)
            return yard_fail(&e->err, YARD_EINVAL, "id %u: want 0 to %u, got %d", i,
                             e->model_config.vocab - 1, ids[i]);
    return YARD_OK;
}

yard_status yard_engine_score(yard_engine *e, const int32_t *ids, uint32_t n_ids, uint32_t every,
                              yard_logits_fn each, void *ctx)
{
    struct score s = {
        .engine = e, .ids = ids, .n_ids = n_ids, .every = every, .each = each, .ctx = ctx
    };
    const uint32_t vocab = e->model_config.vocab;
    uint32_t n_pages = 0;
    yard_status st = check(e, ids, n_ids, every);

    if (st != YARD_OK)
        return st;
    s.wanted = malloc(e->max_tokens * sizeof(*s.wanted));
    if (yard_model_has_mtp(e->model))
        s.kept = malloc((MAX_KEPT_LOGITS + (size_t)vocab) * sizeof(*s.kept));
    if (!s.wanted || (yard_model_has_mtp(e->model) && !s.kept)) {
        st = yard_fail(&e->err, YARD_ENOMEM, "score: no memory for logits");
        goto out;
    }
    if (!yard_engine_take_pages(e, 0, n_ids, &n_pages)) {
        st = yard_fail(&e->err, YARD_ENOMEM, "score: want pages for %u tokens, %u are free", n_ids,
                       yard_page_pool_available(&e->pool));
        goto out;
    }
    for (uint32_t n = 0; s.from < n_ids && s.status == YARD_OK; s.from += n) {
        n = chunk_rows(&s, s.from);
        score_chunk(&s, n);
    }
    st = s.status;
out:
    yard_engine_drop_pages(e, 0, n_pages);
    free(s.wanted);
    free(s.kept);
    return st;
}
