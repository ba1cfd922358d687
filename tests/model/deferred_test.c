/* The model on a stream that runs late, on another thread: no host code of the model may look at
 * what an operation computes, or change what one has yet to read. */
#include "ranks.h"

#include "../ops/deferred.h"

static ranks_prompt prompts[RANKS_PROMPTS];
static uint64_t *shared_hash; /* [RANKS_PROMPTS] seen by all ranks */

static ranks_case deferred_case(yard_layout layout, bool exact, const yard_schedule *schedule)
{
    return (ranks_case){ .dir = RANKS_DEMO_DIR,
                         .ops = &deferred_ops,
                         .layout = layout,
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

/* The stream itself: nothing happens before it is waited for, then all in order. */
static void operations_run_late(void **state)
{
    const yard_ops_config config = { .n_threads = 1,
                                     .limits = { .max_tokens = 4, .max_in = 8, .max_experts = 4 } };
    int32_t count[2] = { 3, 4 }, offset[3] = { -1, -1, -1 };
    const yard_count_offsets_args args = { .n_groups = 2, .count = count, .offset = offset };
    yard_stream stream = NULL;

    (void)state;
    assert_int_equal(deferred_ops.open(&stream, &config, NULL), YARD_OK);
    deferred_ops.count_offsets(stream, &args);
    assert_int_equal(offset[2], -1);
    count[0] = 5; /* what a hidden write does */
    deferred_ops.synchronise(stream);
    assert_int_equal(offset[2], 9);
    deferred_ops.close(stream);
}

static void exact_ids_are_golden(void **state)
{
    ranks_case one = deferred_case((yard_layout){ 1, 1, 1 }, true, NULL);
    ranks_case four = deferred_case((yard_layout){ 4, 2, 2 }, true, &yard_schedule_micro_batch);

    (void)state;
    ranks_run(&one);
    ranks_run(&four);
}

static void quantised_bits_are_the_same(void **state)
{
    ranks_case reference = deferred_case((yard_layout){ 1, 1, 1 }, false, NULL);
    ranks_case late = reference;

    (void)state;
    reference.ops = NULL;
    reference.is_reference = true;
    ranks_run(&reference);
    ranks_run(&late);
    late.schedule = &yard_schedule_micro_batch_stages;
    ranks_run(&late);
    late.layout = (yard_layout){ 2, 2, 1 };
    ranks_run(&late);
    late.schedule = &yard_schedule_dispatch_overlap;
    ranks_run(&late);
}

static void a_lost_rank_is_named_late(const yard_fabric_config *config, void *ctx)
{
    ranks_case *c = ctx;
    yard_fabric *fabric = NULL;
    yard_model *model = ranks_create(c, config, &fabric);
    yard_error err = { 0 };

    yard_model_step(model)->n_tokens = 0;
    CHECK(yard_model_forward(model, NULL, &err) == YARD_OK);
    if (config->rank == 1)
        _exit(0);
    CHECK(yard_model_forward(model, NULL, &err) == YARD_EPEER);
    CHECK_TEXT(err.message, "layer 1, stage ");
    CHECK_TEXT(err.message, "rank 1");
    yard_model_destroy(model);
    yard_fabric_destroy(fabric);
}

static void errors_are_kept(void **state)
{
    ranks_case c = deferred_case((yard_layout){ 2, 2, 1 }, true, NULL);

    (void)state;
    ranks_run_as(&c, a_lost_rank_is_named_late);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_ids_are_golden),
        cmocka_unit_test(quantised_bits_are_the_same),
        cmocka_unit_test(errors_are_kept),
        /* last: forking after threads have run is nothing to rely on */
        cmocka_unit_test(operations_run_late),
    };

    shared_hash = ranks_share_hashes();
    ranks_load_prompts(RANKS_DEMO_GOLDEN, prompts);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
