/* What the tests of batching and caching share: requests, each known by its answer alone, and
 * engines that answer many of them at once. Answers are compared to the bit, log-probabilities
 * included. */
#ifndef YARD_TESTS_ENGINE_SERVICE_H
#define YARD_TESTS_ENGINE_SERVICE_H

#include "../golden.h"

#include <math.h>

#include "engine/engine_impl.h"

enum {
    SERVICE_VOCAB = 3584,
    SERVICE_MAX_CHOICES = 4,
    SERVICE_MAX_PROMPT = 320,
    SERVICE_MAX_NEW = 160,
    SERVICE_LOGPROBS = 3
};

typedef struct service_answer {
    uint32_t n, n_prompt; /* tokens; prompt tokens that were told */
    int32_t token[SERVICE_MAX_NEW];
    yard_token_logprob logprob[SERVICE_MAX_NEW][SERVICE_LOGPROBS];
    float prompt_logprob[SERVICE_MAX_PROMPT];
    uint32_t n_cached;
    yard_finish finish;
} service_answer;

typedef struct service_request {
    int32_t prompt[SERVICE_MAX_PROMPT];
    uint32_t n_prompt, n_new, n_choices;
    float temperature;
    bool prompt_logprobs;
    uint64_t id; /* on the engine that runs it; 0: none */
    bool aborted[SERVICE_MAX_CHOICES];
    uint32_t n_ended;
    service_answer answer[SERVICE_MAX_CHOICES], alone[SERVICE_MAX_CHOICES];
} service_request;

static inline void service_ids(uint64_t seed, int32_t *ids, uint32_t n)
{
    seed = seed * 0x9e3779b97f4a7c15u + 1;
    for (uint32_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (int32_t)((seed >> 33) % SERVICE_VOCAB);
    }
}

/* A prompt of n_prefix tokens that all with the same prefix number share, and n_own others. */
static inline service_request service_request_of(uint64_t prefix, uint32_t n_prefix, uint64_t own,
                                                 uint32_t n_own, uint32_t n_new)
{
    service_request r = { .n_prompt = n_prefix + n_own, .n_new = n_new, .n_choices = 1 };

    service_ids(1000 + prefix, r.prompt, n_prefix);
    service_ids(2000 + own, r.prompt + n_prefix, n_own);
    return r;
}

static inline yard_engine_config service_config(yard_prefix_cache cache)
{
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;

    config.n_threads = 1;
    config.prefix_cache = cache;
    return config;
}

static inline void service_submit(yard_engine *engine, service_request *r)
{
    yard_request request = YARD_REQUEST_INIT;

    request.prompt = r->prompt;
    request.n_prompt = r->n_prompt;
    request.max_new_tokens = r->n_new;
    request.ignore_eos = true;
    request.n_choices = r->n_choices;
    request.n_logprobs = SERVICE_LOGPROBS;
    request.prompt_logprobs = r->prompt_logprobs;
    request.sampling.temperature = r->temperature;
    request.sampling.seed = (uint64_t)r->prompt[r->n_prompt - 1];
    memset(r->answer, 0, sizeof(r->answer));
    memset(r->aborted, 0, sizeof(r->aborted));
    r->n_ended = 0;
    if (yard_engine_submit(engine, &request, &r->id) != YARD_OK)
        fail_msg("%s", yard_engine_error(engine));
}

static inline void service_take_event(service_request *r, const yard_event *e)
{
    service_answer *a = &r->answer[e->choice];

    assert_true(e->choice < r->n_choices && a->finish == YARD_RUNNING);
    if (a->n == 0 && a->n_prompt == 0)
        a->n_cached = e->n_cached;
    else
        assert_int_equal(e->n_cached, 0);
    if (e->n_tokens > 0 && e->of_prompt) {
        assert_int_equal(e->token, r->prompt[a->n_prompt]);
        assert_int_equal(e->n_logprobs, a->n_prompt == 0 ? 1 : SERVICE_LOGPROBS);
        a->prompt_logprob[a->n_prompt++] = e->logprob[0].logprob;
    } else if (e->n_tokens > 0) {
        assert_true(a->n < r->n_new && e->n_logprobs == SERVICE_LOGPROBS);
        memcpy(a->logprob[a->n], e->logprob, sizeof(a->logprob[0]));
        a->token[a->n++] = e->token;
    }
    a->finish = e->finish;
    r->n_ended += e->finish != YARD_RUNNING;
}

/* One step, its events, and the accounts after it. */
static inline void service_step(yard_engine *engine, service_request *const *requests, size_t n)
{
    yard_event event;

    if (yard_engine_step(engine) != YARD_OK)
        fail_msg("%s", yard_engine_error(engine));
    while (yard_engine_poll(engine, &event, 1))
        for (size_t i = 0; i < n; i++)
            if (requests[i]->id == event.id)
                service_take_event(requests[i], &event);
    assert_true(yard_engine_accounts_hold(engine));
}

static inline bool service_has_ended(const service_request *r)
{
    return r->n_ended == r->n_choices;
}

static inline void service_run(yard_engine *engine, service_request *const *requests, size_t n)
{
    bool all = false;

    while (!all) {
        service_step(engine, requests, n);
        all = true;
        for (size_t i = 0; i < n; i++)
            all = all && service_has_ended(requests[i]);
    }
}

/* Every answer without a cache and without company. */
static inline void service_answer_alone(service_request *const *requests, size_t n)
{
    yard_engine *engine = golden_engine(service_config(YARD_CACHE_OFF));

    for (size_t i = 0; i < n; i++) {
        service_submit(engine, requests[i]);
        service_run(engine, &requests[i], 1);
        memcpy(requests[i]->alone, requests[i]->answer, sizeof(requests[i]->alone));
    }
    yard_engine_destroy(engine);
}

/* What an aborted choice has must be the beginning; all others are equal. */
static inline void service_compare(const service_request *r)
{
    for (uint32_t c = 0; c < r->n_choices; c++) {
        const service_answer *got = &r->answer[c], *want = &r->alone[c];

        assert_int_equal(got->finish, r->aborted[c] ? YARD_FINISH_ABORTED : want->finish);
        if (!r->aborted[c])
            assert_int_equal(got->n, want->n);
        assert_memory_equal(got->token, want->token, got->n * sizeof(*got->token));
        assert_memory_equal(got->logprob, want->logprob, got->n * sizeof(*got->logprob));
        for (uint32_t i = 0; i < got->n_prompt; i++)
            assert_int_equal(yard_bits_from_f32(got->prompt_logprob[i]),
                             yard_bits_from_f32(want->prompt_logprob[i]));
    }
}

static inline yard_engine_stats service_stats(const yard_engine *engine)
{
    yard_engine_stats stats;

    yard_engine_get_stats(engine, &stats);
    return stats;
}

static inline void service_all_is_free(const yard_engine *engine)
{
    const yard_engine_stats s = service_stats(engine);

    assert_true(s.n_queued == 0 && s.n_running == 0 && s.n_free_pages == s.n_pages);
}

#endif
