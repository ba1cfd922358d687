/* The rules of a call against random orders of completions and wishes: of each batch at most one is
 * in flight, metadata goes first, nothing follows the last message of a side, nothing starts after
 * the end, and every call can be released in the end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "serve/rpc_state.h"

enum { N_RUNS = 20000, N_STEPS = 60 };

typedef struct model {
    yard_rpc_state s;
    uint64_t random;
    uint32_t to_send, sent, received, to_receive;
    bool finish_started, peer_gone;
    char log[N_STEPS * 40 + 400];
} model;

static uint32_t draw(model *m, uint32_t n)
{
    m->random = m->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(m->random >> 33) % n;
}

static void say(model *m, const char *what, int which)
{
    snprintf(m->log + strlen(m->log), sizeof(m->log) - strlen(m->log), "%s%d ", what, which);
}

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            fail_msg("%s; after: %s", #condition, m->log);                                         \
    } while (0)

static void start_all(model *m)
{
    yard_rpc_batch b;

    for (;;) {
        const yard_rpc_state before = m->s;

        if (!yard_rpc_state_next(&m->s, &b))
            return;
        say(m, "start", (int)b);
        CHECK(!before.in_flight[b] && m->s.in_flight[b]);
        CHECK(!before.ended);
        CHECK(b == YARD_RPC_BEGIN || before.started[YARD_RPC_BEGIN]);
        CHECK(b != YARD_RPC_BEGIN || !before.started[b]);
        CHECK(b != YARD_RPC_END || !before.started[b]);
        CHECK(b != YARD_RPC_SEND || (!m->finish_started && m->sent < m->to_send));
        CHECK(b != YARD_RPC_RECEIVE || (!before.peer_closed && before.wants_message));
        CHECK(b != YARD_RPC_FINISH || !m->finish_started);
        CHECK(b != YARD_RPC_FINISH || m->sent == m->to_send || before.broken);
        m->finish_started = m->finish_started || b == YARD_RPC_FINISH;
    }
}

/* A batch that may complete now; a server's end needs its status or a peer that is gone. */
static bool may_complete(const model *m, yard_rpc_batch b)
{
    if (!m->s.in_flight[b])
        return false;
    return b != YARD_RPC_END || m->peer_gone ||
           (m->s.started[YARD_RPC_FINISH] && !m->s.in_flight[YARD_RPC_FINISH]);
}

static void complete(model *m, yard_rpc_batch b)
{
    const bool ok = !m->peer_gone || draw(m, 2), any = draw(m, 4) != 0;

    say(m, ok ? "done" : "failed", (int)b);
    if (b == YARD_RPC_SEND)
        m->sent++;
    yard_rpc_state_done(&m->s, b, ok, b == YARD_RPC_RECEIVE && ok && any);
}

static void wish(model *m)
{
    switch (draw(m, 5)) {
    case 0:
        if (!m->s.wants_finish) {
            m->to_send++;
            m->s.n_unsent++;
            say(m, "send", 0);
        }
        break;
    case 1:
        m->s.wants_message = true;
        say(m, "want", 0);
        break;
    case 2:
        m->s.wants_finish = true;
        say(m, "finish", 0);
        break;
    case 3:
        if (draw(m, 6) == 0) {
            m->peer_gone = true;
            say(m, "gone", 0);
        }
        break;
    default:
        break;
    }
}

static void any_order_keeps_the_rules(void **state)
{
    (void)state;
    for (uint32_t run = 0; run < N_RUNS; run++) {
        model *m = &(model){ .random = run, .s = { .server = run % 2, .wants_message = true } };

        for (uint32_t step = 0; step < N_STEPS; step++) {
            const yard_rpc_batch b = (yard_rpc_batch)draw(m, YARD_RPC_BATCH_COUNT);

            wish(m);
            start_all(m);
            if (may_complete(m, b))
                complete(m, b);
            CHECK(!yard_rpc_state_over(&m->s) || m->s.ended);
        }
        m->peer_gone = true;
        say(m, "gone", 0);
        for (int i = 0; i < YARD_RPC_BATCH_COUNT * 2; i++) {
            start_all(m);
            if (may_complete(m, (yard_rpc_batch)(i % YARD_RPC_BATCH_COUNT)))
                complete(m, (yard_rpc_batch)(i % YARD_RPC_BATCH_COUNT));
        }
        CHECK(yard_rpc_state_over(&m->s));
    }
}

static void all_is_sent_before_the_finish(void **state)
{
    yard_rpc_state s = { .server = true, .n_unsent = 2, .wants_finish = true };
    yard_rpc_batch b;

    (void)state;
    assert_true(yard_rpc_state_next(&s, &b) && b == YARD_RPC_BEGIN);
    assert_true(yard_rpc_state_next(&s, &b) && b == YARD_RPC_END);
    assert_true(yard_rpc_state_next(&s, &b) && b == YARD_RPC_SEND);
    assert_false(yard_rpc_state_next(&s, &b));
    yard_rpc_state_done(&s, YARD_RPC_SEND, true, false);
    assert_true(yard_rpc_state_next(&s, &b) && b == YARD_RPC_SEND);
    yard_rpc_state_done(&s, YARD_RPC_SEND, true, false);
    assert_true(yard_rpc_state_next(&s, &b) && b == YARD_RPC_FINISH);
    assert_false(yard_rpc_state_next(&s, &b));
}

static void what_cannot_be_sent_does_not_hold_the_finish_up(void **state)
{
    yard_rpc_state s = { .server = true, .n_unsent = 3, .wants_finish = true };
    yard_rpc_batch b;

    (void)state;
    while (yard_rpc_state_next(&s, &b))
        ;
    yard_rpc_state_done(&s, YARD_RPC_SEND, false, false);
    assert_true(yard_rpc_state_next(&s, &b) && b == YARD_RPC_FINISH);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_order_keeps_the_rules),
        cmocka_unit_test(all_is_sent_before_the_finish),
        cmocka_unit_test(what_cannot_be_sent_does_not_hold_the_finish_up),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
