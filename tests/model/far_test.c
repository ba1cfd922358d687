/* The model on a device whose memory the host cannot touch: everything that an operation reads has
 * been brought there, everything that the host reads has been brought back, and the bits are those
 * of the definition. */
#include "ranks.h"

#include "../ops/far.h"

static ranks_prompt prompts[RANKS_PROMPTS];
static uint64_t *shared_hash;

static ranks_case far_case(const char *dir, bool exact, const yard_schedule *schedule)
{
    return (ranks_case){ .dir = dir,
                         .layout = { 1, 1, 1 },
                         .exact = exact,
                         .draft = true,
                         .max_tokens = 40,
                         .n_slots = 3,
                         .n_prompts = 5,
                         .n_new = 8,
                         .schedule = schedule,
                         .prompts = prompts,
                         .hash = shared_hash };
}

/* The definition first, then the same on the device. */
static void check_case(ranks_case c)
{
    c.is_reference = true;
    ranks_run(&c);
    c.is_reference = false;
    c.ops = &far_ops;
    ranks_run(&c);
}

static void bits_are_the_same(void **state)
{
    (void)state;
    check_case(far_case(RANKS_DEMO_DIR, true, NULL));
    check_case(far_case(RANKS_DEMO_DIR, false, NULL));
    check_case(far_case(RANKS_DEMO_DIR, false, &yard_schedule_micro_batch));
}

/* What the demo model does not have: no q_a, no router bias, keys and values, bf16 experts. */
static void families_too(void **state)
{
    static const char *const names[] = { "mixtral", "mixtral_fp8", "deepseek_v2_lite", "kimi_k2" };
    static ranks_prompt family_prompts[RANKS_PROMPTS];

    (void)state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char dir[96], golden[128];
        ranks_case c;

        snprintf(dir, sizeof(dir), "tests/golden/families/%s", names[i]);
        snprintf(golden, sizeof(golden), "%s/values.json", dir);
        c = far_case(dir, false, NULL);
        c.draft = false;
        c.n_prompts = ranks_load_prompts(golden, family_prompts);
        c.prompts = family_prompts;
        c.max_tokens = 16;
        check_case(c);
    }
}

enum { ROWS = 3, LOGITS = 3584 };

typedef struct sampled {
    int32_t token[ROWS];
    uint8_t finite[ROWS];
    int32_t likeliest;
} sampled;

static yard_model *create(const yard_ops *ops, yard_model_config *config)
{
    const yard_model_options options = { .ops = ops,
                                         .n_threads = 1,
                                         .max_tokens = 32,
                                         .max_seqs = ROWS,
                                         .max_logits = ROWS,
                                         .n_pages = ROWS,
                                         .max_pages_per_seq = 1 };
    yard_model *model = NULL;
    yard_error err = { 0 };

    CHECK(yard_model_config_load(config, RANKS_DEMO_DIR, NULL, NULL) == YARD_OK);
    if (yard_model_create(&model, RANKS_DEMO_DIR, config, &options, NULL, &err) != YARD_OK) {
        fprintf(stderr, "%s\n", err.message);
        _exit(1);
    }
    return model;
}

/* Greedy, with penalties over a history, and with a bias that decides. */
static sampled run_sampling(const yard_ops *ops)
{
    static const int32_t output[] = { 7, 7, 9 }, bias_token[] = { 11, 12 };
    static const float bias_value[] = { 100.0f, 1e4f };
    const yard_sample_params plain = { .top_p = 1, .repetition_penalty = 1 };
    yard_sample_row rows[ROWS] = { { .params = plain, .position = 4, .prompt = output },
                                   { .params = plain, .position = 5 },
                                   { .params = plain, .position = 6 } };
    const int32_t index[ROWS] = { 3, 3, 4 };
    yard_model_config config;
    yard_model *model = create(ops, &config);
    yard_step *step = yard_model_step(model);
    const float *logits = NULL;
    sampled s = { .likeliest = -1 };

    step->n_tokens = 20;
    for (int32_t i = 0; i < 20; i++) {
        step->token[i] = prompts[0].ids[i % prompts[0].n_ids];
        step->position[i] = i;
    }
    CHECK(yard_model_forward(model, NULL, NULL) == YARD_OK);
    CHECK(yard_model_logits(model, index, ROWS, NULL) == YARD_OK);
    CHECK(yard_model_read_logits(model, 0, 1, &logits, NULL) == YARD_OK);
    s.likeliest = ranks_largest(logits, (int32_t)config.vocab);
    rows[1].params.repetition_penalty = 1e9f;
    rows[1].params.presence_penalty = 1e9f;
    rows[1].prompt = &s.likeliest;
    rows[1].n_prompt = 1;
    rows[1].output = &s.likeliest;
    rows[1].n_output = 1;
    rows[2].bias_token = bias_token;
    rows[2].bias_value = bias_value;
    rows[2].n_bias = 2;
    CHECK(yard_model_sample(model, rows, ROWS, s.token, s.finite, NULL) == YARD_OK);
    yard_model_destroy(model);
    return s;
}

static void sampling_sees_lists(void **state)
{
    const sampled want = run_sampling(NULL), got = run_sampling(&far_ops);

    (void)state;
    assert_int_equal(want.token[0], want.likeliest);
    assert_int_not_equal(want.token[1], want.likeliest);
    assert_int_equal(want.token[2], 12);
    for (int i = 0; i < ROWS; i++) {
        assert_int_equal(got.token[i], want.token[i]);
        assert_int_equal(got.finite[i], 1);
        assert_int_equal(want.finite[i], 1);
    }
}

/* Logits of one more row a sequence, generated or not. */
static void step_rows(yard_model *model, int32_t n_rows, const int32_t *position, bool generated,
                      float *logits)
{
    static const int32_t index[ROWS] = { 0, 1, 2 };
    yard_step *step = yard_model_step(model);
    const float *out = NULL;

    step->n_tokens = n_rows;
    for (int32_t i = 0; i < n_rows; i++) {
        step->token[i] = prompts[i].ids[position[i] % prompts[i].n_ids];
        step->position[i] = position[i];
        step->seq[i] = i;
        step->absorbed[i] = generated;
        step->page_table[i] = i;
    }
    CHECK(yard_model_forward(model, NULL, NULL) == YARD_OK);
    CHECK(yard_model_logits(model, index, (uint32_t)n_rows, NULL) == YARD_OK);
    CHECK(yard_model_read_logits(model, 0, (uint32_t)n_rows, &out, NULL) == YARD_OK);
    memcpy(logits, out, (size_t)n_rows * LOGITS * sizeof(*logits));
}

/* The first step of so many rows is issued, the second recorded; prompts never are. */
static void generated_rows_are_replayed(void **state)
{
    static const struct {
        int32_t n_rows;
        bool generated;
        uint32_t n_replays;
    } steps[] = {
        { 1, false, 0 }, { 1, true, 0 }, { 1, true, 1 }, { 1, true, 2 },  { 3, true, 2 },
        { 3, true, 3 },  { 1, true, 4 }, { 2, true, 4 }, { 3, false, 4 }, { 3, true, 5 }
    };
    static float want[ROWS * LOGITS], got[ROWS * LOGITS];
    yard_model_config config;
    yard_model *here = create(NULL, &config), *far = create(&far_ops, &config);
    int32_t position[ROWS] = { 0 };

    (void)state;
    assert_int_equal(config.vocab, LOGITS);
    far_n_replays = 0;
    for (int i = 0; i < 3; i++) { /* without rows: attention is not launched, nor recorded so */
        yard_model_step(far)->n_tokens = 0;
        assert_int_equal(yard_model_forward(far, NULL, NULL), YARD_OK);
    }
    for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
        step_rows(here, steps[i].n_rows, position, steps[i].generated, want);
        step_rows(far, steps[i].n_rows, position, steps[i].generated, got);
        for (int32_t k = 0; k < steps[i].n_rows; k++)
            position[k]++;
        assert_memory_equal(got, want, (size_t)steps[i].n_rows * LOGITS * sizeof(*got));
        assert_int_equal(far_n_replays, steps[i].n_replays);
    }
    yard_model_destroy(here);
    yard_model_destroy(far);
}

static yard_status refuse(yard_model_options options, char *message)
{
    yard_model_config config;
    yard_model *model = NULL;
    yard_error err = { 0 };
    yard_status st;

    CHECK(yard_model_config_load(&config, RANKS_DEMO_DIR, NULL, NULL) == YARD_OK);
    st = yard_model_create(&model, RANKS_DEMO_DIR, &config, &options, NULL, &err);
    strcpy(message, err.message);
    yard_model_destroy(model);
    return st;
}

static void too_much_is_refused(void **state)
{
    yard_model_options options = { .ops = &far_ops,
                                   .n_threads = 1,
                                   .max_tokens = 32,
                                   .max_seqs = 1,
                                   .max_logits = 1,
                                   .n_pages = 1 << 20,
                                   .max_pages_per_seq = 64 };
    char message[YARD_ERROR_MESSAGE_BYTES];

    (void)state;
    assert_int_equal(refuse(options, message), YARD_ENOMEM);
    CHECK_TEXT(message, "device far: want ");
    CHECK_TEXT(message, "are free");
    options.n_pages = 64;
    options.layout = (yard_layout){ 2, 2, 1 };
    /* the exchange of devices is CUDA's, where it is built */
    if (refuse(options, message) == YARD_ENOTSUP)
        CHECK_TEXT(message, "device: this build has no CUDA");
    else
        CHECK_TEXT(message, "fabric: want rank 0 of 2, got none");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_are_the_same),   cmocka_unit_test(families_too),
        cmocka_unit_test(sampling_sees_lists), cmocka_unit_test(generated_rows_are_replayed),
        cmocka_unit_test(too_much_is_refused),
    };

    shared_hash = ranks_share_hashes();
    ranks_load_prompts(RANKS_DEMO_GOLDEN, prompts);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
