/* What a cache holds, what ends a sequence, and weights that overflow. ctest: sanitize */
#include "golden.h"

#include <math.h>

#include "model/small_checkpoint.h"

static void the_bound_is_named(void **state)
{
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;
    static int32_t ids[5000];
    yard_request request = YARD_REQUEST_INIT;
    yard_engine *engine;
    uint64_t id;

    (void)state;
    request.prompt = ids;
    request.n_prompt = 5000;
    engine = golden_engine(config);
    assert_int_equal(yard_engine_submit(engine, &request, &id), YARD_EINVAL);
    assert_string_equal(yard_engine_error(engine),
                        "prompt: want at most 4095 tokens (the context holds 4096), got 5000");
    yard_engine_destroy(engine);
    config.kv_tokens = 100; /* two pages */
    config.max_tokens = 1 << 20;
    engine = golden_engine(config);
    assert_int_equal(yard_engine_submit(engine, &request, &id), YARD_EINVAL);
    assert_string_equal(yard_engine_error(engine),
                        "prompt: want at most 127 tokens (the KV cache holds 128), got 5000");
    yard_engine_destroy(engine);
}

/* Runs to the end; returns the last event. */
static yard_event run(yard_engine *engine, const yard_request *request, uint32_t *n_tokens)
{
    yard_event event = { 0 };
    uint64_t id;

    *n_tokens = 0;
    assert_int_equal(yard_engine_submit(engine, request, &id), YARD_OK);
    while (event.finish == YARD_RUNNING) {
        assert_int_equal(yard_engine_step(engine), YARD_OK);
        while (yard_engine_poll(engine, &event, 1))
            *n_tokens += event.n_tokens;
    }
    return event;
}

static void stop_tokens_end_a_sequence(void **state)
{
    static const int32_t prompt[] = { 0, 3572, 42 };
    yard_engine *engine = golden_engine((yard_engine_config)YARD_ENGINE_CONFIG_INIT);
    yard_request request = YARD_REQUEST_INIT;
    yard_event first, event;
    uint32_t n;
    int32_t wrong = 3584;

    (void)state;
    request.prompt = prompt;
    request.n_prompt = 3;
    request.max_new_tokens = 1;
    request.ignore_eos = true;
    first = run(engine, &request, &n);
    assert_int_equal(first.finish, YARD_FINISH_LENGTH);
    request.max_new_tokens = 8;
    request.stop_token = &first.token;
    request.n_stop_token = 1;
    event = run(engine, &request, &n);
    assert_int_equal(event.finish, YARD_FINISH_STOP);
    assert_int_equal(event.token, first.token);
    assert_int_equal(n, 1);
    request.stop_token = &wrong;
    assert_int_equal(yard_engine_submit(engine, &request, &(uint64_t){ 0 }), YARD_EINVAL);
    assert_string_equal(yard_engine_error(engine),
                        "stop token 0: want an id from 0 to 3583, got 3584");
    yard_engine_destroy(engine);
}

static void nobody(void *ctx, uint32_t pos, const float *logits, const float *draft)
{
    (void)ctx;
    (void)pos;
    (void)draft;
    assert_true(isfinite(logits[0]));
}

/* A finite weight so large that products are not. */
static void overflow_is_an_error(void **state)
{
    static const float huge = 3e38f;
    static const char scale[] = "model.layers.1.mlp.shared_experts.down_proj.weight_scale_inv";
    static const int32_t ids[] = { 5, 6, 7 };
    const yard_synth_options options = { .seed = 1, .n_threads = 1 };
    const json_t *at;
    small_image im;
    char dir[] = "/tmp/yard-overflow-XXXXXX";
    yard_model_config c = small_config();
    yard_engine_config config = YARD_ENGINE_CONFIG_INIT;
    yard_request request = YARD_REQUEST_INIT;
    yard_engine *engine = NULL;
    yard_error err = { 0 };
    uint32_t n;

    (void)state;
    assert_non_null(mkdtemp(dir));
    assert_int_equal(yard_synth_write(dir, &c, &options, NULL, NULL), YARD_OK);
    im = small_open(dir);
    at = json_array_get(json_object_get(json_object_get(im.header, scale), "data_offsets"), 0);
    memcpy(im.data + json_integer_value(at), &huge, sizeof(huge));
    small_close(dir, &im);
    config.model_dir = dir;
    if (yard_engine_create(&engine, &config, &err) != YARD_OK)
        fail_msg("%s", err.message);
    assert_int_equal(yard_engine_score(engine, ids, 3, 1, nobody, NULL), YARD_EFORMAT);
    assert_non_null(strstr(yard_engine_error(engine), "logits at position 0 are not finite"));
    request.prompt = ids;
    request.n_prompt = 3;
    assert_int_equal(run(engine, &request, &n).finish, YARD_FINISH_ERROR);
    assert_int_equal(n, 0);
    assert_non_null(strstr(yard_engine_error(engine), "logits after token 2 are not finite"));
    yard_engine_destroy(engine);
    small_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bound_is_named),
        cmocka_unit_test(stop_tokens_end_a_sequence),
        cmocka_unit_test(overflow_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
