/* The FP8 latent cache: prompts of an FP8 checkpoint get the logits of the bf16 cache to the bit,
 * generated tokens stay as near to them as they are to exact ones; a request's answer depends on
 * nothing but the request; pages are smaller and never taken for those of the other type; models
 * and modes that have no such cache are refused. */
#include "service.h"

enum {
    N_PROMPTS = 12,
    N_CUTS = 4,
    N_REQUESTS = N_PROMPTS * N_CUTS,
    N_NEW = 48,
    MAX_PROMPT = SERVICE_MAX_PROMPT - N_NEW
};

static service_request requests[N_REQUESTS], *all[N_REQUESTS];
static service_request longer[N_REQUESTS], *all_longer[N_REQUESTS]; /* with their answers */

static yard_engine_config config_of(yard_numeric_mode mode, yard_kv_dtype kv_dtype)
{
    yard_engine_config config = service_config(YARD_CACHE_OFF);

    config.mode = mode;
    config.kv_dtype = kv_dtype;
    return config;
}

/* The golden prompts: text that the model knows, so that answers stay alike for a while. Each also
 * without its last tokens, one to three. */
static void make_requests(void)
{
    json_t *root = golden_load("tests/golden/prompts.json");
    const json_t *prompts = json_object_get(root, "prompts");

    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        service_request *r = &requests[i];
        const json_t *prompt = json_array_get(prompts, i % N_PROMPTS);
        int32_t *ids = golden_ids(json_object_get(prompt, "ids"), &r->n_prompt);

        r->n_prompt = r->n_prompt < MAX_PROMPT ? r->n_prompt : MAX_PROMPT;
        r->n_prompt -= r->n_prompt > N_CUTS ? i / N_PROMPTS : 0;
        memcpy(r->prompt, ids, r->n_prompt * sizeof(*ids));
        r->n_new = N_NEW;
        r->n_choices = 1;
        r->prompt_logprobs = true;
        all[i] = r;
        free(ids);
    }
    json_decref(root);
}

static void answer_all(yard_engine_config config, service_request *const *which)
{
    yard_engine *engine = golden_engine(config);

    for (uint32_t i = 0; i < N_REQUESTS; i++)
        service_submit(engine, which[i]);
    service_run(engine, which, N_REQUESTS);
    service_all_is_free(engine);
    yard_engine_destroy(engine);
}

static void keep_answers(void)
{
    for (uint32_t i = 0; i < N_REQUESTS; i++)
        memcpy(requests[i].alone, requests[i].answer, sizeof(requests[i].alone));
}

/* Products with kv_b round the cached latents of a prompt to FP8 in any case. */
static void prompts_are_equal(void **state)
{
    (void)state;
    answer_all(config_of(YARD_QUANTISED, YARD_KV_BF16), all);
    keep_answers();
    answer_all(config_of(YARD_QUANTISED, YARD_KV_FP8), all);
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        const service_answer *got = &requests[i].answer[0], *want = &requests[i].alone[0];

        assert_int_equal(got->n_prompt, requests[i].n_prompt);
        for (uint32_t p = 1; p < got->n_prompt; p++) /* the first token has none */
            assert_int_equal(yard_bits_from_f32(got->prompt_logprob[p]),
                             yard_bits_from_f32(want->prompt_logprob[p]));
        assert_memory_equal(got->logprob[0], want->logprob[0], sizeof(got->logprob[0]));
    }
}

static void lengthen(void)
{
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        longer[i] = requests[i];
        all_longer[i] = &longer[i];
        memcpy(longer[i].prompt + longer[i].n_prompt, requests[i].answer[0].token,
               N_NEW * sizeof(int32_t));
        longer[i].n_prompt += N_NEW;
        longer[i].n_new = 1;
    }
}

static double mean(const double *of_request)
{
    double sum = 0;

    for (uint32_t i = 0; i < N_REQUESTS; i++)
        sum += of_request[i];
    return sum / N_REQUESTS;
}

/* Of each request, the mean difference, over all generated tokens but the first, between their
 * log-probability as they were generated and that as the tokens of a prompt; at most 1 each, for a
 * router that chooses other experts may change any of them entirely. */
static void distance_to_prompt(yard_engine_config config, double *of_request)
{
    answer_all(config, all_longer);
    for (uint32_t i = 0; i < N_REQUESTS; i++) {
        double sum = 0;

        for (uint32_t t = 1; t < N_NEW; t++) {
            const float generated = requests[i].answer[0].logprob[t][0].logprob;
            const float prompt = longer[i].answer[0].prompt_logprob[requests[i].n_prompt + t];

            sum += fmin(fabs((double)generated - (double)prompt), 1);
        }
        of_request[i] = sum / (N_NEW - 1);
    }
}

/* How much farther, in standard errors of the requests' differences: one router that chooses
 * otherwise moves a text's mean by as much as all else. */
static double farther(const double *far, const double *near)
{
    double difference[N_REQUESTS], square[N_REQUESTS], all_mean;

    for (uint32_t i = 0; i < N_REQUESTS; i++)
        difference[i] = far[i] - near[i];
    all_mean = mean(difference);
    for (uint32_t i = 0; i < N_REQUESTS; i++)
        square[i] = (difference[i] - all_mean) * (difference[i] - all_mean);
    return all_mean / sqrt(mean(square) / (N_REQUESTS - 1));
}

/* The same tokens as a prompt read latents rounded to FP8, as generation does from an FP8 cache: it
 * is no farther from them than generation from a bf16 cache is, and no farther from exact ones. */
static void generated_tokens_are_near(void **state)
{
    static const yard_kv_dtype types[] = { YARD_KV_BF16, YARD_KV_FP8 };
    double rounded[2][N_REQUESTS], exact[2][N_REQUESTS];

    (void)state;
    for (int k = 0; k < 2; k++) {
        answer_all(config_of(YARD_QUANTISED, types[k]), all);
        lengthen();
        distance_to_prompt(config_of(YARD_QUANTISED, YARD_KV_BF16), rounded[k]);
        distance_to_prompt(config_of(YARD_EXACT, YARD_KV_BF16), exact[k]);
        print_message("%s cache: %.4f from the same tokens as a prompt, %.4f in exact mode\n",
                      k ? "FP8" : "bf16", mean(rounded[k]), mean(exact[k]));
    }
    print_message("farther by %.1f and %.1f standard errors\n", farther(rounded[1], rounded[0]),
                  farther(exact[1], exact[0]));
    assert_true(farther(rounded[1], rounded[0]) <= 2);
    assert_true(farther(exact[1], exact[0]) <= 2);
}

enum { N_SCORED = 100 };

struct scores {
    uint32_t vocab;
    float *logits; /* [N_SCORED, vocab] */
};

static void keep_logits(void *ctx, uint32_t pos, const float *logits, const float *draft)
{
    struct scores *s = ctx;

    (void)draft;
    memcpy(s->logits + (size_t)pos * s->vocab, logits, s->vocab * sizeof(float));
}

static struct scores score(yard_kv_dtype kv_dtype, uint32_t max_tokens)
{
    yard_engine_config config = config_of(YARD_QUANTISED, kv_dtype);
    int32_t ids[N_SCORED];
    yard_engine *engine = NULL;
    struct scores s;

    config.model_dir = "tests/golden/families/deepseek_v2_lite";
    config.max_seqs = 1;
    config.max_tokens = max_tokens;
    assert_int_equal(yard_engine_create(&engine, &config, NULL), YARD_OK);
    s.vocab = yard_engine_model_config(engine)->vocab;
    s.logits = malloc((size_t)N_SCORED * s.vocab * sizeof(float));
    for (int32_t i = 0; i < N_SCORED; i++)
        ids[i] = i * 7 % (int32_t)s.vocab;
    assert_int_equal(yard_engine_score(engine, ids, N_SCORED, 1, keep_logits, &s), YARD_OK);
    yard_engine_destroy(engine);
    return s;
}

/* Products of bf16 weights read latents that are rounded, each by at most 2^-4 of itself (more only
 * where it is tiny beside its group): what is one operand of attention alone moves logits by less.
 */
static void plain_weights_read_rounded_latents(void **state)
{
    const struct scores plain = score(YARD_KV_BF16, 64), fp8 = score(YARD_KV_FP8, 64);
    const struct scores chunks = score(YARD_KV_FP8, 9);
    const size_t n = (size_t)N_SCORED * plain.vocab;
    double squares = 0, off = 0;

    (void)state;
    for (size_t i = 0; i < n; i++) {
        squares += pow((double)plain.logits[i], 2);
        off += pow((double)fp8.logits[i] - (double)plain.logits[i], 2);
    }
    print_message("logits of a bf16 checkpoint: moved by %.4f of their size\n",
                  sqrt(off / squares));
    assert_true(off > 0 && off < squares * 0x1p-8);
    assert_memory_equal(fp8.logits, chunks.logits, n * sizeof(float));
    free(plain.logits);
    free(fp8.logits);
    free(chunks.logits);
}

static void answers_depend_on_nothing_else(void **state)
{
    enum { N = 4 };
    static const struct {
        const char *variant;
        uint32_t max_seqs, max_tokens, kv_tokens;
    } cases[] = { { NULL, 3, 37, 0 }, { "c", 16, 512, 0 }, { NULL, 4, 60, 320 } };
    static service_request some[N], *which[N];
    yard_engine *engine = golden_engine(config_of(YARD_QUANTISED, YARD_KV_FP8));

    (void)state;
    for (uint32_t i = 0; i < N; i++) {
        some[i] = service_request_of(0, i < 3 ? 66 : 0, i, 1 + 21 * i, 16);
        some[i].temperature = i % 2 ? 0.8f : 0.0f;
        which[i] = &some[i];
        service_submit(engine, which[i]);
        service_run(engine, which + i, 1);
        memcpy(some[i].alone, some[i].answer, sizeof(some[i].alone));
    }
    yard_engine_destroy(engine);
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        yard_engine_config config = config_of(YARD_QUANTISED, YARD_KV_FP8);

        config.cpu_variant = cases[c].variant;
        config.max_seqs = cases[c].max_seqs;
        config.max_tokens = cases[c].max_tokens;
        config.kv_tokens = cases[c].kv_tokens;
        config.n_threads = 1 + (uint32_t)c % 2;
        config.prefix_cache = YARD_CACHE_STRICT;
        engine = golden_engine(config);
        for (int round = 0; round < 2; round++) { /* the second finds the first's pages */
            for (uint32_t i = 0; i < N; i++)
                service_submit(engine, which[i]);
            service_run(engine, which, N);
            for (uint32_t i = 0; i < N; i++)
                service_compare(which[i]);
        }
        assert_true(service_stats(engine).n_found_tokens > 0);
        yard_engine_destroy(engine);
    }
}

static void pages_are_another_kind(void **state)
{
    enum { RANK = 128, ROPE = 32 }; /* of the demo model */
    yard_engine *plain = golden_engine(config_of(YARD_QUANTISED, YARD_KV_BF16));
    yard_engine *fp8 = golden_engine(config_of(YARD_QUANTISED, YARD_KV_FP8));
    const yard_page_hash a = yard_engine_page_root(plain), b = yard_engine_page_root(fp8);
    const uint32_t n_layers = yard_engine_model_config(fp8)->n_layers;

    (void)state;
    assert_memory_not_equal(&a, &b, sizeof(a));
    assert_int_equal(yard_engine_page_bytes(plain), n_layers * 64 * (RANK + ROPE) * 2);
    assert_int_equal(yard_engine_page_bytes(fp8), n_layers * 64 * (RANK + 4 + 2 * ROPE + 12));
    yard_engine_destroy(plain);
    yard_engine_destroy(fp8);
}

static void budget_follows(void **state)
{
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;
    yard_engine_budget plain, fp8;

    (void)state;
    config.model_dir = DEMO_DIR;
    config.kv_tokens = 6400;
    assert_int_equal(yard_engine_budget_of(&config, 2, 0, &plain, NULL), YARD_OK);
    config.kv_dtype = YARD_KV_FP8;
    assert_int_equal(yard_engine_budget_of(&config, 2, 0, &fp8, NULL), YARD_OK);
    assert_int_equal(plain.cache_bytes * 208, fp8.cache_bytes * 320);
    assert_int_equal(plain.weight_bytes, fp8.weight_bytes);
    assert_int_equal(plain.heap_bytes, fp8.heap_bytes);
}

static void refused(yard_engine_config config, yard_status want, const char *text)
{
    yard_engine *engine = NULL;
    yard_error err = { 0 };

    assert_int_equal(yard_engine_create(&engine, &config, &err), want);
    if (!strstr(err.message, text))
        fail_msg("want '%s', got '%s'", text, err.message);
}

static void what_has_no_such_cache(void **state)
{
    yard_engine_config config = config_of(YARD_QUANTISED, YARD_KV_FP8);

    (void)state;
    config.model_dir = "tests/golden/families/mixtral";
    refused(config, YARD_ENOTSUP, "want a model that caches latents, got mixtral");
    config.model_dir = DEMO_DIR;
    config.mode = YARD_EXACT;
    refused(config, YARD_EINVAL, "want quantised mode, got exact");
    config.mode = YARD_QUANTISED;
    config.kv_dtype = (yard_kv_dtype)7;
    refused(config, YARD_EINVAL, "kv_dtype: want bf16 (0) or fp8 (1), got 7");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(prompts_are_equal),
        cmocka_unit_test(generated_tokens_are_near),
        cmocka_unit_test(plain_weights_read_rounded_latents),
        cmocka_unit_test(answers_depend_on_nothing_else),
        cmocka_unit_test(pages_are_another_kind),
        cmocka_unit_test(budget_follows),
        cmocka_unit_test(what_has_no_such_cache),
    };

    make_requests();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
