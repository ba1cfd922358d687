/* The demo model against reference values of another implementation (tests/golden). */
#include "golden.h"

#include <math.h>

enum { VOCAB = 3584, N_GREEDY = 48 };
static const float LOGIT_TOLERANCE = 5e-3f, WEIGHT_TOLERANCE = 1e-4f;

struct logits_check {
    const char *name;
    const json_t *rows; /* golden rows, ascending positions */
    uint32_t row;
    uint32_t n_same_top;
    float worst;
};

static void check_row(void *ctx, uint32_t pos, const float *logits, const float *draft)
{
    struct logits_check *check = ctx;
    const json_t *row = json_array_get(check->rows, check->row++);
    const json_t *ids = json_object_get(row, "ids"), *want = json_object_get(row, "logits");

    (void)draft;
    assert_int_equal(pos, json_integer_value(json_object_get(row, "pos")));
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const float got = logits[json_integer_value(json_array_get(ids, i))];
        const float difference = fabsf(got - golden_float(want, i));
        check->worst = difference > check->worst ? difference : check->worst;
    }
    check->n_same_top += largest(logits, VOCAB) == json_integer_value(json_array_get(ids, 0));
}

static struct logits_check check_prompt(yard_engine *engine, const json_t *prompt)
{
    struct logits_check check = { .name = golden_string(prompt, "name"),
                                  .rows = json_object_get(prompt, "logits") };
    uint32_t n;
    int32_t *ids = golden_ids(json_object_get(prompt, "ids"), &n);

    if (yard_engine_score(engine, ids, n, 8, check_row, &check) != YARD_OK)
        fail_msg("%s: %s", check.name, yard_engine_error(engine));
    assert_int_equal(check.row, json_array_size(check.rows));
    free(ids);
    return check;
}

static void exact_logits(void **state)
{
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;
    json_t *root = golden_load("tests/golden/prompts.json");
    const json_t *prompt;
    yard_engine *engine;
    size_t i;

    (void)state;
    config.mode = YARD_EXACT;
    engine = golden_engine(config);
    json_array_foreach(json_object_get(root, "prompts"), i, prompt)
    {
        const struct logits_check check = check_prompt(engine, prompt);
        print_message("%-36s largest difference %.2e\n", check.name, (double)check.worst);
        assert_true(check.worst < LOGIT_TOLERANCE);
        assert_int_equal(check.n_same_top, check.row);
    }
    yard_engine_destroy(engine);
    json_decref(root);
}

/* All prompts at once: also proves that requests do not disturb each other. */
static void exact_greedy(void **state)
{
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;
    json_t *root = golden_load("tests/golden/prompts.json");
    const json_t *prompts = json_object_get(root, "prompts");
    uint32_t n_live = (uint32_t)json_array_size(prompts), n_tokens[32] = { 0 };
    yard_engine *engine;
    yard_event event;

    (void)state;
    config.mode = YARD_EXACT;
    engine = golden_engine(config);
    for (uint32_t i = 0; i < n_live; i++) {
        yard_request request = YARD_REQUEST_INIT;
        uint64_t id;
        int32_t *ids =
            golden_ids(json_object_get(json_array_get(prompts, i), "ids"), &request.n_prompt);
        request.prompt = ids;
        request.max_new_tokens = N_GREEDY;
        request.ignore_eos = true;
        assert_int_equal(yard_engine_submit(engine, &request, &id), YARD_OK);
        assert_int_equal(id, i + 1);
        free(ids);
    }
    while (n_live > 0) {
        assert_int_equal(yard_engine_step(engine), YARD_OK);
        while (yard_engine_poll(engine, &event, 1)) {
            const uint32_t i = (uint32_t)event.id - 1;
            const json_t *prompt = json_array_get(prompts, i);
            const json_t *want = json_array_get(json_object_get(prompt, "greedy"), n_tokens[i]);
            if (event.token != json_integer_value(want))
                fail_msg("%s: token %u: want %d, got %d", golden_string(prompt, "name"),
                         n_tokens[i], (int)json_integer_value(want), event.token);
            n_tokens[i]++;
            n_live -= event.finish != YARD_RUNNING;
        }
    }
    for (size_t i = 0; i < json_array_size(prompts); i++)
        assert_int_equal(n_tokens[i], N_GREEDY);
    yard_engine_destroy(engine);
    json_decref(root);
}

struct forced {
    const json_t *greedy;
    uint32_t n_prompt, n_same;
};

static void count_forced(void *ctx, uint32_t pos, const float *logits, const float *draft)
{
    struct forced *f = ctx;

    (void)draft;
    if (pos + 1 >= f->n_prompt && pos + 1 - f->n_prompt < N_GREEDY)
        f->n_same += largest(logits, VOCAB) ==
                     json_integer_value(json_array_get(f->greedy, pos + 1 - f->n_prompt));
}

static void quantised_agreement(void **state)
{
    const yard_engine_config config = YARD_ENGINE_CONFIG_INIT;
    json_t *root = golden_load("tests/golden/prompts.json");
    uint32_t n_rows = 0, n_same = 0, n_forced = 0, n_forced_same = 0;
    yard_engine *engine = golden_engine(config);
    const json_t *prompt;
    size_t i;

    (void)state;
    json_array_foreach(json_object_get(root, "prompts"), i, prompt)
    {
        const struct logits_check check = check_prompt(engine, prompt);
        struct forced forced = { .greedy = json_object_get(prompt, "greedy") };
        uint32_t n_greedy;
        int32_t *ids = golden_ids(json_object_get(prompt, "ids"), &forced.n_prompt);
        int32_t *greedy = golden_ids(forced.greedy, &n_greedy);
        const uint32_t n = forced.n_prompt + n_greedy;

        ids = realloc(ids, n * sizeof(*ids));
        memcpy(ids + forced.n_prompt, greedy, n_greedy * sizeof(*ids));
        assert_int_equal(yard_engine_score(engine, ids, n, 1, count_forced, &forced), YARD_OK);
        n_rows += check.row;
        n_same += check.n_same_top;
        n_forced += n_greedy;
        n_forced_same += forced.n_same;
        free(ids);
        free(greedy);
    }
    print_message("largest logit equal: %u of %u listed positions (%.2f %%), %u of %u forced "
                  "greedy ones (%.2f %%)\n",
                  n_same, n_rows, 100.0 * n_same / n_rows, n_forced_same, n_forced,
                  100.0 * n_forced_same / n_forced);
    assert_true(n_same * 100 >= n_rows * 96);
    assert_true(n_forced_same * 100 >= n_forced * 94);
    yard_engine_destroy(engine);
    json_decref(root);
}

struct draft_check {
    const json_t *rows;
    uint32_t row;
    float worst;
};

static void check_draft(void *ctx, uint32_t pos, const float *logits, const float *draft)
{
    struct draft_check *check = ctx;
    const json_t *row = json_array_get(check->rows, check->row);
    const json_t *ids = json_object_get(row, "ids"), *want = json_object_get(row, "logits");

    (void)logits;
    if (!row || pos != json_integer_value(json_object_get(row, "pos")))
        return;
    assert_non_null(draft);
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const float difference =
            fabsf(draft[json_integer_value(json_array_get(ids, i))] - golden_float(want, i));
        check->worst = difference > check->worst ? difference : check->worst;
    }
    check->row++;
}

static void exact_drafts(void **state)
{
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;
    json_t *root = golden_load("tests/golden/mtp.json");
    const json_t *prompt;
    size_t i;

    (void)state;
    config.mode = YARD_EXACT;
    config.mtp = true;
    /* whole, and in chunks that cut the sequence anywhere */
    for (uint32_t max_tokens = 512; max_tokens >= 16; max_tokens = max_tokens == 512 ? 29 : 0) {
        yard_engine *engine;
        config.max_tokens = max_tokens;
        engine = golden_engine(config);
        json_array_foreach(json_object_get(root, "prompts"), i, prompt)
        {
            struct draft_check check = { .rows = json_object_get(prompt, "drafts") };
            uint32_t n;
            int32_t *ids = golden_ids(json_object_get(prompt, "ids"), &n);

            assert_int_equal(yard_engine_score(engine, ids, n, 1, check_draft, &check), YARD_OK);
            assert_int_equal(check.row, json_array_size(check.rows));
            print_message("%s, chunks of %u: largest difference %.2e\n",
                          golden_string(prompt, "name"), max_tokens, (double)check.worst);
            assert_true(check.worst < LOGIT_TOLERANCE);
            free(ids);
        }
        yard_engine_destroy(engine);
    }
    json_decref(root);
}

static void check_layer(void *ctx, const yard_layer_trace *t)
{
    const json_t *layer = json_array_get(ctx, t->layer);
    const json_t *hidden = json_object_get(layer, "hidden_last");
    const json_t *experts = json_object_get(layer, "experts");
    const json_t *weights = json_object_get(layer, "weights_last");
    const uint32_t n_hidden = (uint32_t)json_array_size(hidden);
    const uint32_t top_k = (uint32_t)json_array_size(weights);

    for (uint32_t i = 0; i < n_hidden; i++)
        assert_true(fabsf(t->hidden[(size_t)(t->n_tokens - 1) * n_hidden + i] -
                          golden_float(hidden, i)) < LOGIT_TOLERANCE);
    assert_int_equal(experts == NULL, t->expert == NULL);
    for (uint32_t i = 0; experts && i < t->n_tokens; i++)
        for (uint32_t k = 0; k < top_k; k++)
            assert_int_equal(t->expert[i * top_k + k],
                             json_integer_value(json_array_get(json_array_get(experts, i), k)));
    for (uint32_t k = 0; k < top_k; k++)
        assert_true(fabsf(t->weight[(t->n_tokens - 1) * top_k + k] - golden_float(weights, k)) <
                    WEIGHT_TOLERANCE);
}

static void exact_layers(void **state)
{
    json_t *root = golden_load("tests/golden/layers.json");
    const yard_model_options options = { .exact = true,
                                         .n_threads = 2,
                                         .max_tokens = 128,
                                         .max_seqs = 1,
                                         .max_logits = 1,
                                         .n_pages = 4,
                                         .max_pages_per_seq = 4 };
    yard_model_config config;
    yard_model *model = NULL;
    yard_error err = { 0 };
    const json_t *prompt;
    size_t i;

    (void)state;
    assert_int_equal(yard_model_config_load(&config, DEMO_DIR, NULL, &err), YARD_OK);
    assert_int_equal(yard_model_create(&model, DEMO_DIR, &config, &options, NULL, &err), YARD_OK);
    json_array_foreach(json_object_get(root, "prompts"), i, prompt)
    {
        yard_step *step = yard_model_step(model);
        uint32_t n;
        int32_t *ids = golden_ids(json_object_get(prompt, "ids"), &n);

        step->n_tokens = (int32_t)n;
        for (uint32_t t = 0; t < n; t++) {
            step->token[t] = ids[t];
            step->position[t] = (int32_t)t;
            step->seq[t] = 0;
            step->absorbed[t] = i == 0; /* one prompt in each form */
        }
        for (int32_t p = 0; p < 4; p++)
            step->page_table[p] = 3 - p;
        yard_model_set_trace(model, check_layer, json_object_get(prompt, "layers"));
        assert_int_equal(yard_model_forward(model, NULL, &err), YARD_OK);
        free(ids);
    }
    yard_model_destroy(model);
    json_decref(root);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_layers),        cmocka_unit_test(exact_logits),
        cmocka_unit_test(exact_greedy),        cmocka_unit_test(exact_drafts),
        cmocka_unit_test(quantised_agreement),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
