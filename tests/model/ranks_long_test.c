/* Every layout of the demo model over both transports, in several chunk sizes and mixtures of
 * requests: exact mode gives the golden ids. How often quantised TP does. ctest: long */
#include "ranks.h"

static ranks_prompt prompts[RANKS_PROMPTS];
static uint64_t *shared_words; /* [RANKS_PROMPTS + 1] hashes, counter */

static ranks_case base_case(yard_layout layout, bool exact)
{
    return (ranks_case){ .dir = RANKS_DEMO_DIR,
                         .layout = layout,
                         .exact = exact,
                         .max_tokens = 128,
                         .n_slots = 4,
                         .n_prompts = RANKS_PROMPTS,
                         .n_new = RANKS_NEW,
                         .prompts = prompts,
                         .hash = shared_words };
}

static void every_layout(const char *transport, uint32_t max_tokens, uint32_t n_slots,
                         const yard_schedule *schedule)
{
    for (uint32_t ep = 1; ep <= 8; ep *= 2)
        for (uint32_t tp = 1; tp <= ep && tp <= 4; tp *= 2) {
            ranks_case c = base_case((yard_layout){ ep, ep / tp, tp }, true);

            c.transport = transport;
            c.max_tokens = max_tokens;
            c.n_slots = n_slots;
            c.schedule = schedule;
            c.draft = ep == 4;
            ranks_run(&c);
        }
}

static void golden_over_shared_memory(void **state)
{
    (void)state;
    every_layout("shm", 128, 4, NULL);
    every_layout("shm", 500, 8, &yard_schedule_micro_batch);
    every_layout("shm", 31, 1, &yard_schedule_dispatch_overlap);
}

static void golden_over_tcp(void **state)
{
    (void)state;
    every_layout("tcp", 100, 3, NULL);
    every_layout("tcp", 257, 8, &yard_schedule_micro_batch_stages);
}

/* Rounding of partial sums flips a choice now and then: as often as quantisation itself does. */
static void quantised_tp_agrees_mostly(void **state)
{
    static const yard_layout layouts[] = { { 1, 1, 1 }, { 2, 1, 2 }, { 4, 2, 2 } };

    (void)state;
    for (size_t i = 0; i < sizeof(layouts) / sizeof(layouts[0]); i++) {
        ranks_case c = base_case(layouts[i], false);

        c.n_same = &shared_words[RANKS_PROMPTS];
        *c.n_same = 0;
        ranks_run(&c);
        *c.n_same /= layouts[i].tp; /* every replica counts */
        print_message("EP %u, TP %u: %u of %u forced greedy ids (%.2f %%)\n", layouts[i].ep,
                      layouts[i].tp, (uint32_t)*c.n_same, RANKS_PROMPTS * RANKS_NEW,
                      100.0 * (double)*c.n_same / (RANKS_PROMPTS * RANKS_NEW));
        assert_true(*c.n_same * 100 >= RANKS_PROMPTS * RANKS_NEW * 94);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantised_tp_agrees_mostly),
        cmocka_unit_test(golden_over_shared_memory),
        cmocka_unit_test(golden_over_tcp),
    };

    shared_words = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared_words != MAP_FAILED);
    ranks_load_prompts(RANKS_DEMO_GOLDEN, prompts);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
