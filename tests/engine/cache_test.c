/* The prefix cache, choices of one prompt and preemption: whatever is reused, shared or computed
 * again, answers and log-probabilities are those of the request alone, to the bit; and what is
 * computed is counted. */
#include "service.h"

enum { N_REQUESTS = 8 };

static service_request requests[N_REQUESTS], *all[N_REQUESTS];

static const yard_prefix_cache modes[] = { YARD_CACHE_STRICT, YARD_CACHE_ON, YARD_CACHE_OFF };

static uint32_t full_pages(uint32_t n_tokens)
{
    return n_tokens / YARD_PAGE_TOKENS * YARD_PAGE_TOKENS;
}

static void make_requests(void)
{
    static const uint32_t n_own[N_REQUESTS] = { 5, 64, 1, 70, 56, 57, 120, 28 };

    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        requests[i] = service_request_of(i % 2, i < 6 ? 136 : 0, i, n_own[i], 24);
        requests[i].temperature = i % 3 ? 0.8f : 0.0f;
        all[i] = &requests[i];
    }
    requests[2].prompt_logprobs = requests[5].prompt_logprobs = true;
    service_answer_alone(all, N_REQUESTS);
}

static void compare_all(void)
{
    for (uint32_t i = 0; i < N_REQUESTS; i++)
        service_compare(&requests[i]);
}

static void hits_change_nothing(void **state)
{
    static const struct {
        yard_prefix_cache mode;
        uint32_t max_seqs, max_tokens, kv_tokens;
    } cases[] = {
        { YARD_CACHE_STRICT, 16, 512, 0 }, { YARD_CACHE_STRICT, 3, 37, 0 },
        { YARD_CACHE_STRICT, 4, 60, 320 }, { YARD_CACHE_ON, 2, 37, 0 },
        { YARD_CACHE_ON, 4, 512, 320 },    { YARD_CACHE_OFF, 4, 37, 320 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        yard_engine_config config = service_config(cases[i].mode);
        yard_engine *engine;

        config.max_seqs = cases[i].max_seqs;
        config.max_tokens = cases[i].max_tokens;
        config.kv_tokens = cases[i].kv_tokens;
        engine = golden_engine(config);
        for (int round = 0; round < 2; round++) {
            for (uint32_t j = 0; j < N_REQUESTS; j++)
                service_submit(engine, &requests[j]);
            service_run(engine, all, N_REQUESTS);
            compare_all();
            service_all_is_free(engine);
        }
        for (uint32_t j = 0; j < N_REQUESTS && cases[i].kv_tokens == 0; j++)
            assert_int_equal(requests[j].answer[0].n_cached,
                             requests[j].prompt_logprobs ? 0
                                                         : full_pages(requests[j].n_prompt - 1));
        yard_engine_destroy(engine);
    }
}

/* Requests that begin alike wait for the first one; one that does not passes them. */
static void a_burst_is_computed_once(void **state)
{
    yard_engine_config config = service_config(YARD_CACHE_STRICT);
    yard_engine *engine;
    uint64_t want;
    bool passed;

    (void)state;
    config.max_tokens = 40;
    engine = golden_engine(config);
    want = requests[3].n_prompt + requests[7].n_prompt + requests[1].n_prompt - 128;
    service_submit(engine, &requests[3]);
    service_submit(engine, &requests[1]); /* the same prefix */
    service_submit(engine, &requests[7]);
    service_step(engine, all, N_REQUESTS);
    assert_int_equal(service_stats(engine).n_running, 2);
    do
        service_step(engine, all, N_REQUESTS);
    while (service_stats(engine).n_running == 2);
    passed = requests[3].answer[0].n == 0;
    assert_true(passed); /* it starts when the pages are there, not when the first has answered */
    while (!service_has_ended(&requests[3]) || !service_has_ended(&requests[1]) ||
           !service_has_ended(&requests[7]))
        service_step(engine, all, N_REQUESTS);
    assert_int_equal(service_stats(engine).n_prompt_tokens, want);
    assert_int_equal(requests[1].answer[0].n_cached, 128);
    service_compare(&requests[3]);
    service_compare(&requests[1]);
    service_compare(&requests[7]);
    yard_engine_destroy(engine);
}

static void who_is_waited_for_may_go(void **state)
{
    yard_engine_config config = service_config(YARD_CACHE_STRICT);
    yard_engine *engine;
    service_request *some[] = { &requests[0], &requests[4] };

    (void)state;
    config.max_tokens = 40;
    engine = golden_engine(config);
    service_submit(engine, &requests[0]);
    service_submit(engine, &requests[4]);
    service_step(engine, some, 2);
    requests[0].aborted[0] = true;
    assert_int_equal(yard_engine_abort(engine, requests[0].id, 0), YARD_OK);
    service_run(engine, some, 2);
    service_compare(&requests[0]);
    service_compare(&requests[4]);
    service_all_is_free(engine);
    yard_engine_destroy(engine);
}

static void choices_share_a_prompt(void **state)
{
    static const uint32_t n_prompts[] = { 3, 64, 65, 150, 192 };

    (void)state;
    for (size_t p = 0; p < 5; p++) {
        service_request one = service_request_of(7, 0, p, n_prompts[p], 30), four;
        service_request *only[] = { &one }, *both[] = { &four };

        one.temperature = 1.0f;
        service_answer_alone(only, 1);
        four = one;
        four.n_choices = 4;
        service_answer_alone(both, 1);
        assert_memory_equal(four.alone[0].token, one.alone[0].token, sizeof(one.alone[0].token));
        assert_memory_not_equal(four.alone[1].token, one.alone[0].token, 30 * sizeof(int32_t));
        assert_memory_not_equal(four.alone[2].token, four.alone[1].token, 30 * sizeof(int32_t));
        for (uint32_t m = 0; m < 3; m++) {
            yard_engine_config config = service_config(modes[(p + m) % 3]);
            yard_engine *engine;

            config.max_seqs = m == 0 ? 4 : 8;
            config.max_tokens = m == 1 ? 33 : 512;
            config.kv_tokens = m == 2 ? 256 : 0; /* too few pages for all at once */
            engine = golden_engine(config);
            service_submit(engine, &four);
            service_run(engine, both, 1);
            service_compare(&four);
            service_all_is_free(engine);
            if (m != 2)
                assert_int_equal(service_stats(engine).n_prompt_tokens, four.n_prompt + 3);
            yard_engine_destroy(engine);
        }
    }
}

static void one_choice_is_aborted(void **state)
{
    yard_engine *engine = golden_engine(service_config(YARD_CACHE_ON));
    service_request r = service_request_of(7, 0, 1, 100, 40), *some[] = { &r };

    (void)state;
    r.n_choices = 4;
    r.temperature = 1.0f;
    service_answer_alone(some, 1);
    service_submit(engine, &r);
    assert_int_equal(yard_engine_abort(engine, r.id, 0), YARD_OK); /* before it began */
    r.aborted[0] = true;
    while (r.answer[2].n < 5)
        service_step(engine, some, 1);
    assert_int_equal(yard_engine_abort(engine, r.id, 2), YARD_OK);
    r.aborted[2] = true;
    assert_int_equal(yard_engine_abort(engine, r.id, 2), YARD_EINVAL);
    assert_int_equal(yard_engine_abort(engine, r.id, 4), YARD_EINVAL);
    service_run(engine, some, 1);
    service_compare(&r);
    assert_int_equal(r.answer[0].n, 0);
    assert_int_equal(r.answer[2].n, 5);
    service_all_is_free(engine);
    yard_engine_destroy(engine);
}

static void preemption_changes_nothing(void **state)
{
    service_request r[5], *some[5];

    (void)state;
    for (uint32_t i = 0; i < 5; i++) {
        r[i] = service_request_of(9, i < 2 ? 70 : 0, 30 + i, 40 + 7 * i, 150);
        r[i].temperature = i % 2 ? 0.9f : 0.0f;
        some[i] = &r[i];
    }
    r[1].prompt_logprobs = true;
    service_answer_alone(some, 5);
    for (size_t m = 0; m < 3; m++) {
        yard_engine_config config = service_config(modes[m]);
        yard_engine *engine;

        config.kv_tokens = 512;
        config.max_seqs = 5;
        config.max_tokens = m == 1 ? 50 : 512;
        engine = golden_engine(config);
        for (uint32_t i = 0; i < 5; i++)
            service_submit(engine, &r[i]);
        while (!service_has_ended(&r[0])) /* the oldest is never held up */
            service_step(engine, some, 5);
        service_run(engine, some, 5);
        print_message("%llu preemptions\n",
                      (unsigned long long)service_stats(engine).n_preemptions);
        assert_true(service_stats(engine).n_preemptions > 0);
        for (uint32_t i = 0; i < 5; i++)
            service_compare(&r[i]);
        service_all_is_free(engine);
        yard_engine_destroy(engine);
    }
}

/* A second turn that begins with the first one's answer: with the cache on its pages are taken
 * over, in strict mode those of the prompt alone. */
static void answers_are_reused_unless_strict(void **state)
{
    (void)state;
    for (size_t m = 0; m < 2; m++) {
        service_request first = service_request_of(11, 0, 0, 70, 130), second;
        service_request *one[] = { &first }, *two[] = { &second };
        yard_engine_config config = service_config(modes[m]);
        yard_engine *engine;

        engine = golden_engine(config);
        service_submit(engine, &first);
        service_run(engine, one, 1);
        second = service_request_of(11, 0, 0, 70, 10);
        memcpy(second.prompt + 70, first.answer[0].token, 130 * sizeof(int32_t));
        service_ids(5, second.prompt + 200, 20);
        second.n_prompt = 220;
        service_answer_alone(two, 1);
        service_submit(engine, &second);
        service_run(engine, two, 1);
        assert_int_equal(second.answer[0].n_cached, modes[m] == YARD_CACHE_ON ? 192 : 64);
        if (modes[m] == YARD_CACHE_STRICT)
            service_compare(&second);
        yard_engine_destroy(engine);
    }
}

/* Moves what `from` has of the prompt; falsify: other bytes than it has. */
static void move_pages(yard_engine *from, yard_engine *to, const service_request *r, bool falsify)
{
    yard_page_hash name[SERVICE_MAX_PROMPT / YARD_PAGE_TOKENS];
    const size_t n_bytes = yard_engine_page_bytes(from);
    const uint32_t n =
        yard_page_hash_chain(yard_engine_page_root(from), r->prompt, r->n_prompt, name);
    uint8_t *data = malloc(n_bytes);
    bool generated;

    assert_int_equal(n_bytes, yard_engine_page_bytes(to));
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(yard_engine_export_page(from, name[i], data, &generated), YARD_OK);
        assert_false(generated);
        if (falsify)
            memset(data, 0, n_bytes);
        assert_int_equal(yard_engine_import_page(to, name[i], generated, data), YARD_OK);
        assert_int_equal(yard_engine_import_page(to, name[i], generated, data), YARD_OK);
    }
    name[0].word[0]++;
    assert_int_equal(yard_engine_export_page(from, name[0], data, &generated), YARD_EAGAIN);
    assert_int_equal(yard_engine_import_page(to, name[0], true, data), YARD_EINVAL);
    free(data);
    assert_int_equal(service_stats(to).n_cached_pages, n);
    assert_true(yard_engine_accounts_hold(to));
}

static void pages_move_between_engines(void **state)
{
    service_request *r = &requests[3], *some[] = { r };
    yard_engine_config config = service_config(YARD_CACHE_STRICT);
    yard_engine *from = golden_engine(config), *to;

    (void)state;
    service_submit(from, r);
    service_run(from, some, 1);
    for (int falsify = 0; falsify < 2; falsify++) {
        to = golden_engine(config);
        move_pages(from, to, r, falsify);
        service_submit(to, r);
        service_run(to, some, 1);
        assert_int_equal(r->answer[0].n_cached, full_pages(r->n_prompt - 1));
        if (!falsify)
            service_compare(r);
        else
            assert_memory_not_equal(r->answer[0].logprob, r->alone[0].logprob,
                                    sizeof(r->alone[0].logprob[0]));
        yard_engine_destroy(to);
    }
    config.cache_salt = "another";
    to = golden_engine(config);
    assert_false(yard_page_hash_equal(yard_engine_page_root(from), yard_engine_page_root(to)));
    yard_engine_destroy(to);
    yard_engine_destroy(from);
}

typedef struct scores {
    const service_request *r;
    double worst;
    uint32_t n;
} scores;

static double log_softmax(const float *logits, int32_t token)
{
    double sum = 0, max = logits[0];

    for (uint32_t i = 1; i < SERVICE_VOCAB; i++)
        max = (double)logits[i] > max ? (double)logits[i] : max;
    for (uint32_t i = 0; i < SERVICE_VOCAB; i++)
        sum += exp((double)logits[i] - max);
    return (double)logits[token] - max - log(sum);
}

static void compare_logits(void *ctx, uint32_t pos, const float *logits, const float *draft)
{
    scores *s = ctx;
    const service_answer *a = &s->r->alone[0];
    double error;

    (void)draft;
    if (pos + 1 < s->r->n_prompt) {
        error = (double)a->prompt_logprob[pos + 1] - log_softmax(logits, s->r->prompt[pos + 1]);
    } else {
        const yard_token_logprob *l = a->logprob[0];

        error = (double)l[0].logprob - log_softmax(logits, a->token[0]);
        assert_int_equal(l[1].token, largest(logits, SERVICE_VOCAB));
        assert_true(l[1].logprob >= l[2].logprob);
        assert_true(fabs((double)l[2].logprob - log_softmax(logits, l[2].token)) < 1e-5);
    }
    s->n++;
    s->worst = fabs(error) > s->worst ? fabs(error) : s->worst;
}

static void logprobs_are_the_models(void **state)
{
    yard_engine *engine = golden_engine(service_config(YARD_CACHE_ON));
    scores s = { .r = &requests[5] };

    (void)state;
    assert_int_equal(yard_engine_score(engine, s.r->prompt, s.r->n_prompt, 1, compare_logits, &s),
                     YARD_OK);
    assert_int_equal(s.n, s.r->n_prompt);
    assert_int_equal(s.r->alone[0].n_prompt, s.r->n_prompt);
    assert_true(isnan(s.r->alone[0].prompt_logprob[0]));
    assert_true(s.worst < 1e-5);
    yard_engine_destroy(engine);
}

static void what_cannot_be_is_refused(void **state)
{
    yard_engine *engine = golden_engine(service_config(YARD_CACHE_ON));
    const int32_t prompt[] = { 1, 2 };
    yard_request r = YARD_REQUEST_INIT;
    uint64_t id;

    (void)state;
    r.prompt = prompt;
    r.n_prompt = 2;
    r.n_choices = 17;
    assert_int_equal(yard_engine_submit(engine, &r, &id), YARD_EINVAL);
    assert_string_equal(yard_engine_error(engine), "n_choices: want 1 to 16, got 17");
    r.n_choices = 1;
    r.n_logprobs = 22;
    assert_int_equal(yard_engine_submit(engine, &r, &id), YARD_EINVAL);
    assert_string_equal(yard_engine_error(engine), "n_logprobs: want 0 to 21, got 22");
    r.n_logprobs = 0;
    r.prompt_logprobs = true;
    assert_int_equal(yard_engine_submit(engine, &r, &id), YARD_EINVAL);
    assert_string_equal(yard_engine_error(engine),
                        "n_logprobs: want 1 (for prompt_logprobs) to 21, got 0");
    yard_engine_destroy(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hits_change_nothing),
        cmocka_unit_test(a_burst_is_computed_once),
        cmocka_unit_test(who_is_waited_for_may_go),
        cmocka_unit_test(choices_share_a_prompt),
        cmocka_unit_test(one_choice_is_aborted),
        cmocka_unit_test(preemption_changes_nothing),
        cmocka_unit_test(answers_are_reused_unless_strict),
        cmocka_unit_test(pages_move_between_engines),
        cmocka_unit_test(logprobs_are_the_models),
        cmocka_unit_test(what_cannot_be_is_refused),
    };

    make_requests();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
