/* Models of several ranks in lockstep: real processes, each with a fabric and its share of the demo
 * model. Instance g answers prompts g, g + dp, ..; instances that are done go on with no tokens.
 * Every rank knows beforehand how many steps there are: lengths are known, and nothing ends early.
 */
#ifndef YARD_TESTS_MODEL_RANKS_H
#define YARD_TESTS_MODEL_RANKS_H

#include "../fabric/fabric_test.h"

#include <sys/mman.h>

#include <jansson.h>

#include "model/model.h"

#define RANKS_DEMO_DIR "models/demo"
#define RANKS_DEMO_GOLDEN "tests/golden/prompts.json"

enum { RANKS_PROMPTS = 12, RANKS_SHORT_PROMPTS = 10, RANKS_NEW = 48, RANKS_MAX_LENGTH = 1600 };

typedef struct ranks_prompt {
    uint32_t n_ids;
    int32_t ids[RANKS_MAX_LENGTH]; /* the prompt, then the golden ids */
} ranks_prompt;

typedef struct ranks_case {
    const char *dir;     /* of the model */
    const yard_ops *ops; /* NULL: the CPU's */
    yard_layout layout;
    bool exact, draft;   /* draft: the MTP module runs after each step */
    uint32_t max_tokens; /* rows of a step */
    uint32_t n_slots;    /* sequences at once */
    uint32_t n_prompts, n_new;
    const yard_schedule *schedule;
    const char *transport;
    const ranks_prompt *prompts; /* [n_prompts] */
    uint64_t *hash;              /* [n_prompts] shared: of all logits that a prompt saw */
    bool is_reference;           /* writes the hashes; otherwise compares, unless exact */
    uint64_t *n_same; /* shared; not NULL: golden ids are fed, those that come out counted here, and
                         nothing is compared */
} ranks_case;

/* [RANKS_PROMPTS] seen by all ranks that are forked later. */
static inline uint64_t *ranks_share_hashes(void)
{
    void *hashes = mmap(NULL, RANKS_PROMPTS * sizeof(uint64_t), PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    CHECK(hashes != MAP_FAILED);
    return hashes;
}

/* Prompts of a golden file, at most RANKS_PROMPTS, the long ones last. */
static inline uint32_t ranks_load_prompts(const char *path, ranks_prompt *prompts)
{
    json_t *root = json_load_file(path, 0, NULL);
    const json_t *list = json_object_get(root, "prompts");
    const uint32_t n = (uint32_t)json_array_size(list);
    uint32_t at = 0;

    CHECK(n > 0 && n <= RANKS_PROMPTS);
    for (uint32_t i = 0; i < 2 * n; i++) {
        const json_t *p = json_array_get(list, i % n);
        const json_t *ids = json_object_get(p, "ids"), *greedy = json_object_get(p, "greedy");
        const uint32_t n_ids = (uint32_t)json_array_size(ids);
        const uint32_t n_greedy = (uint32_t)json_array_size(greedy);

        if ((n_ids > 200) != (i >= n))
            continue;
        CHECK(n_ids + n_greedy <= RANKS_MAX_LENGTH);
        prompts[at].n_ids = n_ids;
        for (uint32_t j = 0; j < n_ids + n_greedy; j++)
            prompts[at].ids[j] = (int32_t)json_integer_value(
                j < n_ids ? json_array_get(ids, j) : json_array_get(greedy, j - n_ids));
        at++;
    }
    json_decref(root);
    return n;
}

/* What one instance does, step by step. */
typedef struct ranks_slot {
    uint32_t prompt; /* UINT32_MAX: free */
    uint32_t n_cached, n_known;
    int32_t ids[RANKS_MAX_LENGTH];
} ranks_slot;

typedef struct ranks_driver {
    const ranks_case *c;
    uint32_t vocab;
    uint32_t group, next; /* prompt to start */
    ranks_slot slot[8];
    uint32_t n_rows[8]; /* rows of the slot in this step */
    uint32_t n_tokens;
} ranks_driver;

/* Chooses the rows of the next step; false when there is nothing left to do. */
static inline bool ranks_plan(ranks_driver *d)
{
    const ranks_case *c = d->c;

    d->n_tokens = 0;
    for (uint32_t s = 0; s < c->n_slots; s++) {
        ranks_slot *slot = &d->slot[s];
        uint32_t left;

        if (slot->prompt == UINT32_MAX && d->next < c->n_prompts) {
            const ranks_prompt *p = &c->prompts[d->next];
            slot->prompt = d->next;
            d->next += c->layout.dp;
            slot->n_cached = 0;
            slot->n_known = p->n_ids;
            memcpy(slot->ids, p->ids, p->n_ids * sizeof(*p->ids));
        }
        d->n_rows[s] = 0;
        if (slot->prompt == UINT32_MAX)
            continue;
        left = c->max_tokens - d->n_tokens;
        d->n_rows[s] = slot->n_known - slot->n_cached;
        if (d->n_rows[s] > left)
            d->n_rows[s] = left;
        d->n_tokens += d->n_rows[s];
    }
    return d->n_tokens > 0;
}

/* After the step: slot s has the token after its last row when that row ends the sequence. */
static inline void ranks_advance(ranks_driver *d, uint32_t s, int32_t token)
{
    ranks_slot *slot = &d->slot[s];
    const uint32_t n_prompt = slot->prompt == UINT32_MAX ? 0 : d->c->prompts[slot->prompt].n_ids;

    slot->n_cached += d->n_rows[s];
    if (d->n_rows[s] == 0 || slot->n_cached < slot->n_known)
        return;
    slot->ids[slot->n_known++] = token;
    if (slot->n_known == n_prompt + d->c->n_new)
        slot->prompt = UINT32_MAX;
}

static inline ranks_driver ranks_driver_of(const ranks_case *c, uint32_t group)
{
    ranks_driver d = { .c = c, .group = group, .next = group };

    for (uint32_t s = 0; s < 8; s++)
        d.slot[s].prompt = UINT32_MAX;
    return d;
}

static inline uint32_t ranks_count_steps(const ranks_case *c)
{
    uint32_t most = 0;

    for (uint32_t g = 0; g < c->layout.dp; g++) {
        ranks_driver d = ranks_driver_of(c, g);
        uint32_t n = 0;
        for (; ranks_plan(&d); n++)
            for (uint32_t s = 0; s < c->n_slots; s++)
                ranks_advance(&d, s, 0);
        most = n > most ? n : most;
    }
    return most;
}

static inline yard_model *ranks_create(const ranks_case *c, const yard_fabric_config *base,
                                       yard_fabric **fabric)
{
    enum { PAGES = RANKS_MAX_LENGTH / YARD_PAGE_TOKENS };
    yard_model_options options = { .exact = c->exact,
                                   .ops = c->ops,
                                   .mtp = true,
                                   .n_threads = 1,
                                   .max_tokens = c->max_tokens,
                                   .max_seqs = c->n_slots,
                                   .max_logits = 8,
                                   .n_pages = PAGES * c->n_slots,
                                   .max_pages_per_seq = PAGES,
                                   .layout = c->layout,
                                   .rank = base->rank,
                                   .micro_batch = c->schedule && c->schedule->n_halves > 1,
                                   .heap_at = 4096 }; /* somebody else's memory comes first */
    yard_fabric_config config = *base;
    yard_model_config model_config;
    yard_model_budget budget = { 0 };
    yard_model *model = NULL;
    yard_error err = { 0 };
    yard_status st = yard_model_config_load(&model_config, c->dir, NULL, &err);

    if (st == YARD_OK)
        st = yard_model_budget_of(&model_config, &options, &budget, &err);
    config.heap_bytes = budget.heap_bytes + options.heap_at;
    config.transport = c->transport;
    if (st == YARD_OK && c->layout.ep > 1)
        st = yard_fabric_create(fabric, &config, &err);
    options.fabric = *fabric;
    if (st == YARD_OK)
        st = yard_model_create(&model, c->dir, &model_config, &options, NULL, &err);
    if (st != YARD_OK) {
        fprintf(stderr, "rank %u: %s\n", base->rank, err.message);
        _exit(1);
    }
    for (uint32_t s = 0; s < c->n_slots; s++)
        for (uint32_t p = 0; p < PAGES; p++)
            yard_model_step(model)->page_table[s * PAGES + p] = (int32_t)(p * c->n_slots + s);
    return model;
}

static inline void ranks_fill(const ranks_driver *d, yard_step *step)
{
    step->n_tokens = 0;
    for (uint32_t s = 0; s < d->c->n_slots; s++)
        for (uint32_t i = 0; i < d->n_rows[s]; i++) {
            const ranks_slot *slot = &d->slot[s];
            const uint32_t at = slot->n_cached + i;
            const int32_t row = step->n_tokens++;
            step->token[row] = slot->ids[at];
            step->position[row] = (int32_t)at;
            step->seq[row] = (int32_t)s;
            step->absorbed[row] = at >= d->c->prompts[slot->prompt].n_ids;
        }
}

static inline const float *ranks_logits(yard_model *model, int32_t row)
{
    const float *logits = NULL;

    CHECK(yard_model_logits(model, &row, 1, NULL) == YARD_OK);
    CHECK(yard_model_read_logits(model, 0, 1, &logits, NULL) == YARD_OK);
    return logits;
}

static inline int32_t ranks_largest(const float *logits, int32_t vocab)
{
    int32_t best = 0;

    for (int32_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

static inline uint64_t ranks_hash(uint64_t hash, const void *data, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i += 4) {
        uint32_t word;
        memcpy(&word, (const char *)data + i, 4);
        hash = (hash ^ word) * 0x100000001b3u;
    }
    return hash;
}

/* Reads logits where the golden file does (every 8th position of a prompt, and where a sequence
 * ends), so that the chunks do not matter. */
static inline void ranks_read(ranks_driver *d, yard_model *model, uint64_t *hash)
{
    int32_t row = 0;

    for (uint32_t s = 0; s < d->c->n_slots; s++) {
        const ranks_slot *slot = &d->slot[s];
        int32_t token = 0;

        for (uint32_t i = 0; i < d->n_rows[s]; i++, row++) {
            const uint32_t at = slot->n_cached + i;
            const float *logits;

            if (at % 8 != 0 && at + 1 != slot->n_known)
                continue;
            logits = ranks_logits(model, row);
            hash[slot->prompt] = ranks_hash(hash[slot->prompt], logits, 4 * d->vocab);
            token = ranks_largest(logits, (int32_t)d->vocab);
            if (at + 1 != slot->n_known)
                continue;
            if (d->c->n_same) {
                const int32_t want = d->c->prompts[slot->prompt].ids[at + 1];
                __atomic_fetch_add(d->c->n_same, token == want, __ATOMIC_RELAXED);
                token = want;
            } else if (d->c->exact && token != d->c->prompts[slot->prompt].ids[at + 1]) {
                fprintf(stderr, "prompt %u, position %u: want %d, got %d\n", slot->prompt, at + 1,
                        d->c->prompts[slot->prompt].ids[at + 1], token);
                _exit(1);
            }
        }
        ranks_advance(d, s, token);
    }
}

/* After ranks_read(): drafts of all rows, prompt_of the slots when they were planned. */
static inline yard_status ranks_draft(ranks_driver *d, yard_model *model, const uint32_t *prompt_of,
                                      uint64_t *hash, yard_error *err)
{
    int32_t next[RANKS_MAX_LENGTH], row = 0;
    yard_status st;

    for (uint32_t s = 0; s < d->c->n_slots; s++)
        for (uint32_t i = 0; i < d->n_rows[s]; i++)
            next[row++] = d->slot[s].ids[d->slot[s].n_cached - d->n_rows[s] + i + 1];
    st = yard_model_draft(model, d->c->schedule, next, row, err);
    row = 0;
    for (uint32_t s = 0; s < d->c->n_slots; s++)
        for (uint32_t i = 0; i < d->n_rows[s]; i++, row++)
            if ((d->slot[s].n_cached - d->n_rows[s] + i) % 8 == 0)
                hash[prompt_of[s]] =
                    ranks_hash(hash[prompt_of[s]], ranks_logits(model, row), 4 * d->vocab);
    return st;
}

static inline void ranks_run_rank(const yard_fabric_config *config, void *ctx)
{
    const ranks_case *c = ctx;
    const uint32_t n_steps = ranks_count_steps(c), group = config->rank / c->layout.tp;
    ranks_driver d = ranks_driver_of(c, group);
    uint64_t hash[RANKS_PROMPTS] = { 0 }, draft_hash[RANKS_PROMPTS] = { 0 };
    yard_fabric *fabric = NULL;
    yard_model *model = ranks_create(c, config, &fabric);
    yard_error err = { 0 };
    yard_model_config model_config;

    CHECK(yard_model_config_load(&model_config, c->dir, NULL, NULL) == YARD_OK);
    d.vocab = model_config.vocab;
    for (uint32_t i = 0; i < n_steps; i++) {
        uint32_t prompt_of[8];
        yard_status st;

        ranks_plan(&d);
        for (uint32_t s = 0; s < 8; s++)
            prompt_of[s] = d.slot[s].prompt;
        ranks_fill(&d, yard_model_step(model));
        st = yard_model_forward(model, c->schedule, &err);
        if (st == YARD_OK)
            ranks_read(&d, model, hash);
        if (st == YARD_OK && c->draft)
            st = ranks_draft(&d, model, prompt_of, draft_hash, &err);
        if (st != YARD_OK) {
            fprintf(stderr, "rank %u, step %u: %s\n", config->rank, i, err.message);
            _exit(1);
        }
    }
    for (uint32_t p = group; p < c->n_prompts; p += c->layout.dp) {
        hash[p] ^= draft_hash[p] * 3;
        if (c->is_reference)
            c->hash[p] = hash[p];
        else if (!c->exact && !c->n_same && hash[p] != c->hash[p]) {
            fprintf(stderr, "rank %u: prompt %u: other logits than on one rank\n", config->rank, p);
            _exit(1);
        }
    }
    yard_model_destroy(model);
    yard_fabric_destroy(fabric);
}

static inline void ranks_run_as(ranks_case *c, test_rank_fn fn)
{
    test_run(c->layout.ep, fn, c);
}

static inline void ranks_run(ranks_case *c)
{
    ranks_run_as(c, ranks_run_rank);
}

#endif
