/* The demo model on several ranks, against its golden ids and against itself on one rank. */
#include "ranks.h"

static ranks_prompt prompts[RANKS_PROMPTS];
static uint64_t *shared_hash; /* [RANKS_PROMPTS] seen by all ranks */

static ranks_case base_case(yard_layout layout, bool exact)
{
    return (ranks_case){ .layout = layout,
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
    for (uint32_t ep = 1; ep <= 8; ep *= 2) {
        ranks_case c = base_case((yard_layout){ ep, ep, 1 }, true);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exact_ids_are_golden),
        cmocka_unit_test(quantised_logits_are_those_of_one_rank),
    };

    shared_hash = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared_hash != MAP_FAILED);
    ranks_load_prompts(prompts);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
