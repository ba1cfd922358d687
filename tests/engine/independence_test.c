/* A request's tokens and logits do not depend on what else runs: batch, chunk size, page layout,
 * threads, variant. Quantised mode, bit for bit. */
#include "golden.h"

enum { VOCAB = 3584, MAX_REQUESTS = 5, N_NEW = 20 };

struct recording {
    float *logits; /* [n_ids, VOCAB] */
};

static void record(void *ctx, uint32_t pos, const float *logits, const float *draft)
{
    struct recording *r = ctx;

    (void)draft;
    memcpy(r->logits + (size_t)pos * VOCAB, logits, VOCAB * sizeof(float));
}

/* Ids that no text has, so that routing and attention see unusual rows too. */
static void random_ids(uint32_t seed, int32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        ids[i] = (int32_t)(seed >> 8) % VOCAB;
    }
}

static float *score_all(yard_engine_config config, const int32_t *ids, uint32_t n)
{
    struct recording r = { malloc((size_t)n * VOCAB * sizeof(float)) };
    yard_engine *engine = golden_engine(config);

    if (yard_engine_score(engine, ids, n, 1, record, &r) != YARD_OK)
        fail_msg("%s", yard_engine_error(engine));
    yard_engine_destroy(engine);
    return r.logits;
}

static void logits_do_not_depend_on_chunks(void **state)
{
    enum { N = 150 };
    static const uint32_t chunks[] = { 1, 7, 64, 65, 128 };
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;
    int32_t ids[N];
    float *want;

    (void)state;
    random_ids(1, ids, N);
    config.max_seqs = 1;
    config.n_threads = 2;
    want = score_all(config, ids, N);
    for (size_t i = 0; i < sizeof(chunks) / sizeof(chunks[0]); i++) {
        float *got;

        config.max_tokens = chunks[i];
        config.n_threads = 1 + (uint32_t)i % 3;
        got = score_all(config, ids, N);
        for (size_t j = 0; j < (size_t)N * VOCAB; j++)
            if (yard_bits_from_f32(got[j]) != yard_bits_from_f32(want[j]))
                fail_msg("chunks of %u: position %zu, id %zu: want %a, got %a", chunks[i],
                         j / VOCAB, j % VOCAB, (double)want[j], (double)got[j]);
        free(got);
    }
    free(want);
}

/* The variants perform the same operations in the same order. */
static void logits_do_not_depend_on_the_variant(void **state)
{
    enum { N = 70 };
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;
    int32_t ids[N];

    (void)state;
    random_ids(2, ids, N);
    for (int exact = 0; exact < 2; exact++) {
        float *want, *got;

        config.mode = exact ? YARD_EXACT : YARD_QUANTISED;
        config.cpu_variant = NULL;
        got = score_all(config, ids, N);
        config.cpu_variant = "c";
        want = score_all(config, ids, N);
        assert_memory_equal(got, want, (size_t)N * VOCAB * sizeof(float));
        free(want);
        free(got);
    }
}

struct run {
    int32_t token[MAX_REQUESTS][N_NEW];
    uint32_t n[MAX_REQUESTS];
};

/* Runs the given requests together; later ones are submitted while earlier ones decode. */
static void run_together(yard_engine_config config, int32_t ids[MAX_REQUESTS][100],
                         const uint32_t *n_ids, const uint32_t *which, uint32_t n_which,
                         struct run *run)
{
    yard_engine *engine = golden_engine(config);
    uint64_t id_of[MAX_REQUESTS] = { 0 };
    yard_engine_stats stats;
    uint32_t n_done = 0, n_submitted = 0;
    yard_event event;

    while (n_done < n_which) {
        if (n_submitted < n_which) {
            const uint32_t r = which[n_submitted++];
            yard_request request = YARD_REQUEST_INIT;

            request.prompt = ids[r];
            request.n_prompt = n_ids[r];
            request.max_new_tokens = N_NEW;
            request.ignore_eos = true;
            request.sampling.temperature = r % 2 ? 0.8f : 0.0f;
            request.sampling.seed = r;
            assert_int_equal(yard_engine_submit(engine, &request, &id_of[r]), YARD_OK);
        }
        assert_int_equal(yard_engine_step(engine), YARD_OK);
        while (yard_engine_poll(engine, &event, 1))
            for (uint32_t r = 0; r < MAX_REQUESTS; r++)
                if (id_of[r] == event.id) {
                    run->token[r][run->n[r]++] = event.token;
                    n_done += event.finish != YARD_RUNNING;
                }
    }
    yard_engine_get_stats(engine, &stats);
    assert_int_equal(stats.n_free_pages, stats.n_pages);
    assert_int_equal(stats.n_running + stats.n_queued, 0);
    yard_engine_destroy(engine);
}

static void tokens_do_not_depend_on_the_batch(void **state)
{
    static const uint32_t n_ids[MAX_REQUESTS] = { 5, 64, 1, 99, 63 };
    static const uint32_t orders[][MAX_REQUESTS] = { { 0, 1, 2, 3, 4 }, { 4, 2, 0, 3, 1 } };
    static int32_t ids[MAX_REQUESTS][100];
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;
    struct run alone = { 0 };

    (void)state;
    for (uint32_t r = 0; r < MAX_REQUESTS; r++) {
        random_ids(10 + r, ids[r], n_ids[r]);
        run_together(config, ids, n_ids, &r, 1, &alone);
    }
    for (uint32_t i = 0; i < 6; i++) {
        struct run together = { 0 };

        config.max_seqs = 1 + i; /* 1 and 2: some wait for a slot */
        config.max_tokens = i % 2 ? 40 : 512;
        config.kv_tokens = i == 3 ? 256 : 0; /* some wait for pages */
        run_together(config, ids, n_ids, orders[i % 2], MAX_REQUESTS, &together);
        assert_memory_equal(together.token, alone.token, sizeof(alone.token));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_do_not_depend_on_chunks),
        cmocka_unit_test(logits_do_not_depend_on_the_variant),
        cmocka_unit_test(tokens_do_not_depend_on_the_batch),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
