/* The binary interface of libyard-ep. A number that changes here is a new YARD_EP_ABI_VERSION and a
 * new soname, unless the change only appends a field to a config. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <yard/ep.h>

#define FIELD(type, field, at) assert_int_equal(offsetof(type, field), at)

static void layouts(void **state)
{
    (void)state;
    assert_int_equal(YARD_EP_ABI_VERSION, 1);
    FIELD(yard_ep_config, size, 0);
    FIELD(yard_ep_config, n_experts, 8);
    FIELD(yard_ep_config, top_k, 12);
    FIELD(yard_ep_config, hidden, 16);
    FIELD(yard_ep_config, max_tokens, 20);
    FIELD(yard_ep_config, tp, 24);
    FIELD(yard_ep_config, n_rounds, 28);
    FIELD(yard_ep_config, row_align, 32);
    FIELD(yard_ep_config, dispatch, 36);
    FIELD(yard_ep_config, combine, 40);
    FIELD(yard_ep_config, input, 44);
    FIELD(yard_ep_config, output, 48);
    FIELD(yard_ep_config, mode, 52);
    FIELD(yard_ep_config, layout, 56);
    FIELD(yard_ep_config, ue8m0, 60);
    FIELD(yard_ep_config, timeout_us, 64);
    FIELD(yard_ep_config, fabric, 72);
    FIELD(yard_ep_config, fabric_config, 80);
    FIELD(yard_ep_config, node_copies, 88);
    FIELD(yard_ep_config, expert_y_in_place, 89);
    FIELD(yard_ep_config, heap_at, 96);
    assert_true(sizeof(yard_ep_config) >= 96);
    assert_int_equal(sizeof(yard_ep_capacity), 24);
    assert_int_equal(sizeof(yard_ep_stats), 48);
    FIELD(yard_fabric_config, rank, 8);
    FIELD(yard_fabric_config, n_ranks, 12);
    FIELD(yard_fabric_config, heap_bytes, 16);
    FIELD(yard_fabric_config, transport, 24);
    FIELD(yard_fabric_config, rendezvous, 40);
    FIELD(yard_fabric_config, notice_ctx, 112);
    FIELD(yard_fabric_config, ranks_per_node, 120);
}

static void constants(void **state)
{
    (void)state;
    assert_int_equal(YARD_EP_F32, 0);
    assert_int_equal(YARD_EP_BF16, 1);
    assert_int_equal(YARD_EP_FP8, 2);
    assert_int_equal(YARD_EP_EXACT, 0);
    assert_int_equal(YARD_EP_PARTIAL, 1);
    assert_int_equal(YARD_EP_EXPERT_MAJOR, 0);
    assert_int_equal(YARD_EP_FLAT, 1);
    assert_int_equal(YARD_OK, 0);
    assert_int_equal(YARD_ETIMEDOUT, 7);
    assert_int_equal(YARD_EPEER, 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layouts),
        cmocka_unit_test(constants),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
