/* The demo model on several ranks, against its golden ids and against itself on one rank. */
#include "ranks.h"

static ranks_prompt prompts[RANKS_PROMPTS];
static uint64_t *shared_hash; /* [RANKS_PROMPTS] seen by all ranks */

static ranks_case base_case(yard_layout layout, bool exact)
{
    return (ranks_case){ .dir = RANKS_DEMO_DIR,
                         .layout = layout,
                         .exact = exact,
                         .max_tokens = 64,
                         .n_slots = 4,
                         .n_prompts = RANKS_SHORT_PROMPTS,
                         .n_new = 12,
                         .prompts = prompts,
                         .hash = shared_hash };
}

static void exact_ids_are_golden(void **state)
{
    (void)state;
    for (uint32_t ep = 1; ep <= 8; ep *= 2)
        for (uint32_t tp = 1; tp <= ep && tp <= 4; tp *= 2) {
            ranks_case c = base_case((yard_layout){ ep, ep / tp, tp }, true);
            ranks_run(&c);
        }
}

/* Other families: projections without a latent, grouped heads, windows. */
static void families_are_golden(void **state)
{
    static const struct {
        const char *name;
        yard_layout layout;
    } cases[] = {
        { "mixtral", { 2, 1, 2 } },         { "mixtral", { 4, 2, 2 } },
        { "mixtral_window", { 5, 5, 1 } },  { "mixtral_fp8", { 2, 2, 1 } },
        { "deepseek_v2", { 3, 3, 1 } },     { "deepseek_v2_lite", { 4, 4, 1 } },
        { "deepseek_v2_fp8", { 4, 1, 4 } }, { "kimi_k2", { 6, 6, 1 } },
    };
    static ranks_prompt family_prompts[RANKS_PROMPTS];

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        ranks_case c = base_case(cases[i].layout, true);
        char dir[96], golden[128];

        snprintf(dir, sizeof(dir), "tests/golden/families/%s", cases[i].name);
        snprintf(golden, sizeof(golden), "%s/values.json", dir);
        c.dir = dir;
        c.n_prompts = ranks_load_prompts(golden, family_prompts);
        c.prompts = family_prompts;
        c.n_new = 8;
        c.max_tokens = 16;
        ranks_run(&c);
    }
}

/* Bit for bit: over EP, batch, chunks, schedules. */
static void quantised_logits_are_those_of_one_rank(void **state)
{
    static const struct {
        uint32_t ep, max_tokens, n_slots;
        const yard_schedule *schedule;
    } cases[] = {
        { 1, 64, 4, &yard_schedule_micro_batch },
        { 1, 64, 3, &yard_schedule_micro_batch_stages },
        { 2, 64, 4, &yard_schedule_none },
        { 2, 7, 1, &yard_schedule_dispatch_overlap },
        { 2, 33, 8, &yard_schedule_micro_batch },
        { 4, 64, 2, &yard_schedule_micro_batch_stages },
        { 8, 50, 4, &yard_schedule_dispatch_overlap },
        { 3, 20, 4, NULL },
    };
    ranks_case c = base_case((yard_layout){ 1, 1, 1 }, false);

    (void)state;
    c.n_prompts = 6;
    c.draft = true;
    c.is_reference = true;
    ranks_run(&c);
    c.is_reference = false;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        c.layout = (yard_layout){ cases[i].ep, cases[i].ep, 1 };
        c.max_tokens = cases[i].max_tokens;
        c.n_slots = cases[i].n_slots;
        c.schedule = cases[i].schedule;
        ranks_run(&c);
    }
}

/* Refused before anything is loaded, on every rank alike. */
static void refuse_to_cross_nodes(const yard_fabric_config *base, void *ctx)
{
    yard_fabric_config config = *base;
    const yard_layout layout = { 6, 2, 3 };
    yard_error err = { 0 };
    yard_fabric *fabric;

    (void)ctx;
    config.ranks_per_node = 2;
    fabric = test_create(&config);
    CHECK(yard_layout_check_nodes((yard_layout){ 6, 3, 2 }, fabric, &err) == YARD_OK);
    CHECK(yard_layout_check_nodes(layout, fabric, &err) == YARD_EINVAL);
    CHECK_TEXT(err.message, "layout EP 6, DP 2, TP 3: an instance would lie on two nodes; nearest: "
                            "EP 6, DP 6, TP 1");
    yard_fabric_destroy(fabric);
}

static void instances_stay_on_a_node(void **state)
{
    (void)state;
    test_run(6, refuse_to_cross_nodes, NULL);
}

/* A rank that stops is named, with layer and stage, by those who wait. */
static void lose_a_rank(const yard_fabric_config *config, void *ctx)
{
    ranks_case *c = ctx;
    yard_fabric *fabric = NULL;
    yard_model *model = ranks_create(c, config, &fabric);
    yard_step *step = yard_model_step(model);
    yard_error err = { 0 };
    yard_status st;

    step->n_tokens = 0;
    CHECK(yard_model_forward(model, c->schedule, &err) == YARD_OK);
    if (config->rank == 1)
        _exit(0);
    st = yard_model_forward(model, c->schedule, &err);
    CHECK(st == YARD_EPEER);
    CHECK_TEXT(err.message, "layer 1, stage ");
    CHECK_TEXT(err.message, "rank 1");
    CHECK(yard_model_forward(model, c->schedule, &err) == YARD_EPEER);
    CHECK(yard_model_draft(model, c->schedule, NULL, 0, &err) == YARD_EPEER);
    yard_model_destroy(model);
    yard_fabric_destroy(fabric);
}

static void a_lost_rank_ends_the_step(void **state)
{
    ranks_case c = base_case((yard_layout){ 4, 2, 2 }, true);

    (void)state;
    ranks_run_as(&c, lose_a_rank);
    c.schedule = &yard_schedule_micro_batch;
    ranks_run_as(&c, lose_a_rank);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_ids_are_golden),
        cmocka_unit_test(families_are_golden),
        cmocka_unit_test(quantised_logits_are_those_of_one_rank),
        cmocka_unit_test(instances_stay_on_a_node),
        cmocka_unit_test(a_lost_rank_ends_the_step),
    };

    shared_hash = ranks_share_hashes();
    ranks_load_prompts(RANKS_DEMO_GOLDEN, prompts);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
