/* The argument of ep_impl.h ("no barrier is needed"), checked exhaustively on a model: every order
 * in which ranks can run and messages can land, for 2 and 3 ranks and a few exchanges. What the
 * model keeps of the protocol: who sends what to whom in which call, what each call waits for and
 * reads. Data is the number of the exchange it belongs to; memory read in another exchange, or
 * staging overwritten before its message has landed, is a mistake. That the model can fail is
 * tested too.
 *
 * With node copies, ranks 0 and 1 are a node and rank 2 another: the rows of rank 2 for them land
 * once, at rank 0, and then signal each that they are for. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/base.h"

enum { MAX_R = 3, MAX_EXCHANGES = 3 };

/* The kinds of messages; each has one landing place per (receiver, sender). RELAYED is the signal
 * to a rank that its rows have landed at the relay. */
enum { ROWS, HEADER, RESULTS, DONE, RELAYED, KINDS };

enum { RELAY = 0, FAR = 2 };

/* Where a rank is. Sends go peer by peer. */
enum { DISPATCH_SEND, DISPATCH_RECV, COMBINE_SEND, COMBINE_HEADERS, COMBINE_RECV, FINISHED };

typedef struct state {
    uint8_t exchange[MAX_R], at[MAX_R], peer[MAX_R]; /* per rank */
    uint8_t staged[MAX_R][2];                        /* exchange in dispatch's, combine's staging */
    uint8_t results[MAX_R];                          /* exchange in expert_y, read in place */
    uint8_t place[KINDS][MAX_R][MAX_R];              /* [to][from] exchange that landed last */
    uint8_t landed[KINDS][MAX_R][MAX_R];             /* signals so far */
    uint8_t flying[KINDS][MAX_R][MAX_R];             /* bit e: the message of exchange e */
} state;

/* A mistake put in on purpose. */
enum {
    SOUND,
    NO_DONE_WAIT,
    NO_HEADER_WAIT,
    EARLY_DONE,
    RELAY_DONE_ONLY,
    SIGNAL_AHEAD,
    EARLY_RESULTS /* expert_y is written before dispatch_recv returns */
};

typedef struct model {
    uint32_t n_ranks, n_exchanges;
    uint32_t rows; /* bit from * MAX_R + to: whether rows flow there at all */
    bool node_copies;
    int flaw;
    state *states; /* all that were ever reached; those from next on are to be expanded */
    size_t n_states, next, capacity;
    uint32_t *table; /* hash of state to its number + 1 */
    size_t table_size;
    const char *mistake;
} model;

static bool has_rows(const model *m, uint32_t from, uint32_t to)
{
    return m->rows >> (from * MAX_R + to) & 1;
}

static bool relayed(const model *m, uint32_t from, uint32_t to)
{
    return m->node_copies && from == FAR && to != FAR;
}

static uint64_t hash_state(const state *s)
{
    const uint8_t *bytes = (const uint8_t *)s;
    uint64_t hash = 0xcbf29ce484222325u;

    for (size_t i = 0; i < sizeof(*s); i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash ^ hash >> 29;
}

static void add(model *m, const state *s)
{
    size_t at = hash_state(s) % m->table_size;

    for (; m->table[at]; at = (at + 1) % m->table_size)
        if (!memcmp(&m->states[m->table[at] - 1], s, sizeof(*s)))
            return;
    assert_true(m->n_states < m->capacity);
    m->states[m->n_states] = *s;
    m->table[at] = (uint32_t)++m->n_states;
}

static void wrong(model *m, const char *what)
{
    if (!m->mistake)
        m->mistake = what;
}

static void send_message(state *s, int kind, uint32_t from, uint32_t to)
{
    s->flying[kind][to][from] |= (uint8_t)(1 << s->exchange[from]);
}

static bool all_landed(const model *m, const state *s, int kind, uint32_t to)
{
    for (uint32_t from = 0; from < m->n_ranks; from++) {
        const bool skip = m->flaw == RELAY_DONE_ONLY && to == FAR && kind == DONE && from != RELAY;
        if (from != to && !skip && s->landed[kind][to][from] < s->exchange[to])
            return false;
    }
    return true;
}

/* Rows are awaited where the header (dispatch) or the own routing (combine) says that there are. */
static bool rows_landed(const model *m, const state *s, int kind, uint32_t to)
{
    for (uint32_t from = 0; from < m->n_ranks; from++) {
        const bool flow = kind == ROWS ? has_rows(m, from, to) : has_rows(m, to, from);
        const int sign = kind == ROWS && relayed(m, from, to) ? RELAYED : kind;
        if (from != to && flow && s->landed[sign][to][from] < s->exchange[to])
            return false;
    }
    return true;
}

/* A read of what `from` sent in this exchange. */
static void read_place(model *m, const state *s, int kind, uint32_t to, uint32_t from)
{
    static const char *const what[KINDS] = { "rows", "header", "results", "done" };
    const uint32_t at = kind == ROWS && relayed(m, from, to) ? RELAY : to;

    if (s->place[kind][at][from] != s->exchange[to])
        wrong(m, what[kind]);
}

static void read_all(model *m, const state *s, uint32_t rank, bool dispatch)
{
    for (uint32_t from = 0; from < m->n_ranks; from++) {
        if (from == rank)
            continue;
        if (dispatch)
            read_place(m, s, HEADER, rank, from);
        if (dispatch && has_rows(m, from, rank)) {
            read_place(m, s, ROWS, rank, from);
            if (s->staged[from][0] != s->exchange[rank])
                wrong(m, "rows in place");
        }
        if (!dispatch && has_rows(m, rank, from)) {
            read_place(m, s, RESULTS, rank, from);
            if (s->results[from] != s->exchange[rank])
                wrong(m, "results in place");
        }
    }
}

/* On to the next peer of a send; true when all are done. */
static bool next_peer(const model *m, state *s, uint32_t rank)
{
    do
        s->peer[rank]++;
    while (s->peer[rank] == rank);
    return s->peer[rank] >= m->n_ranks;
}

static void enter(state *s, uint32_t rank, uint8_t at)
{
    s->at[rank] = at;
    s->peer[rank] = rank == 0 ? 1 : 0;
}

/* Once for a node, with the first of its ranks; peers come in ascending order. */
static void send_rows(const model *m, state *s, uint32_t from, uint32_t to)
{
    if (!has_rows(m, from, to))
        return;
    if (!relayed(m, from, to))
        send_message(s, ROWS, from, to);
    else if (to == RELAY || !has_rows(m, from, RELAY))
        send_message(s, ROWS, from, RELAY);
    if (relayed(m, from, to) && m->flaw == SIGNAL_AHEAD)
        send_message(s, RELAYED, from, to);
}

/* One step of one rank; false when it has to wait. */
static bool step(model *m, state *s, uint32_t rank)
{
    const uint32_t peer = s->peer[rank];

    switch (s->at[rank]) {
    case DISPATCH_SEND:
        s->staged[rank][0] = s->exchange[rank];
        if (m->flaw == EARLY_RESULTS)
            s->results[rank] = s->exchange[rank];
        send_rows(m, s, rank, peer);
        send_message(s, HEADER, rank, peer);
        if (next_peer(m, s, rank))
            enter(s, rank, DISPATCH_RECV);
        return true;
    case DISPATCH_RECV:
        if (!(m->flaw == NO_HEADER_WAIT ? true : all_landed(m, s, HEADER, rank)) ||
            !rows_landed(m, s, ROWS, rank))
            return false;
        if (m->flaw != NO_HEADER_WAIT)
            read_all(m, s, rank, true);
        s->results[rank] = s->exchange[rank];
        enter(s, rank, m->flaw == EARLY_DONE ? COMBINE_HEADERS : COMBINE_SEND);
        return true;
    case COMBINE_SEND: /* reads the header again: it says where results go */
        if (m->flaw != NO_HEADER_WAIT)
            read_place(m, s, HEADER, rank, peer);
        s->staged[rank][1] = s->exchange[rank];
        if (has_rows(m, peer, rank))
            send_message(s, RESULTS, rank, peer);
        if (next_peer(m, s, rank))
            enter(s, rank, m->flaw == EARLY_DONE ? COMBINE_RECV : COMBINE_HEADERS);
        return true;
    case COMBINE_HEADERS: /* up to here a relay's memory may be read */
        if (peer == (rank == 0 ? 1 : 0) && relayed(m, FAR, rank) && has_rows(m, FAR, rank))
            read_place(m, s, ROWS, rank, FAR);
        send_message(s, DONE, rank, peer);
        if (next_peer(m, s, rank))
            enter(s, rank, m->flaw == EARLY_DONE ? COMBINE_SEND : COMBINE_RECV);
        return true;
    case COMBINE_RECV:
        if (!(m->flaw == NO_DONE_WAIT ? true : all_landed(m, s, DONE, rank)) ||
            !rows_landed(m, s, RESULTS, rank))
            return false;
        read_all(m, s, rank, false);
        enter(s, rank, DISPATCH_SEND);
        if (s->exchange[rank]++ == m->n_exchanges)
            s->at[rank] = FINISHED;
        return true;
    default:
        return false;
    }
}

static void land(model *m, state *s, int kind, uint32_t to, uint32_t from, uint8_t exchange)
{
    s->flying[kind][to][from] &= (uint8_t) ~(1 << exchange);
    s->place[kind][to][from] = exchange;
    s->landed[kind][to][from]++;
    for (uint32_t r = 0; kind == ROWS && relayed(m, from, to) && r < FAR; r++)
        if (has_rows(m, from, r) && m->flaw != SIGNAL_AHEAD)
            s->flying[RELAYED][r][from] |= (uint8_t)(1 << exchange);
    if ((kind == ROWS || kind == HEADER) && s->staged[from][0] != exchange)
        wrong(m, "staging of dispatch");
    if (kind == RESULTS && s->staged[from][1] != exchange)
        wrong(m, "staging of combine");
}

/* All states that follow s. */
static void expand(model *m, const state *s)
{
    bool moved = false;

    for (uint32_t r = 0; r < m->n_ranks; r++) {
        state next = *s;
        if (step(m, &next, r)) {
            add(m, &next);
            moved = true;
        }
    }
    for (int kind = 0; kind < KINDS; kind++)
        for (uint32_t to = 0; to < m->n_ranks; to++)
            for (uint32_t from = 0; from < m->n_ranks; from++)
                for (uint8_t e = 1; e <= m->n_exchanges; e++)
                    if (s->flying[kind][to][from] >> e & 1) {
                        state next = *s;
                        land(m, &next, kind, to, from, e);
                        add(m, &next);
                        moved = true;
                    }
    for (uint32_t r = 0; r < m->n_ranks && !moved; r++)
        if (s->at[r] != FINISHED)
            wrong(m, "a rank waits for ever");
}

/* NULL when no order of events makes a mistake. */
static const char *explore_model(model m, size_t *n_states)
{
    state first = { 0 };

    m.capacity = 3000000;
    m.table_size = 8000009;
    m.states = malloc(m.capacity * sizeof(*m.states));
    m.table = calloc(m.table_size, sizeof(*m.table));
    assert_true(m.states && m.table);
    for (uint32_t r = 0; r < m.n_ranks; r++) {
        first.exchange[r] = 1;
        enter(&first, r, DISPATCH_SEND);
    }
    add(&m, &first);
    while (m.next < m.n_states && !m.mistake) {
        const state s = m.states[m.next++];
        expand(&m, &s);
    }
    *n_states += m.n_states;
    free(m.states);
    free(m.table);
    return m.mistake;
}

static const char *explore(uint32_t n_ranks, uint32_t n_exchanges, uint32_t rows, int flaw,
                           size_t *n_states)
{
    const model m = { .n_ranks = n_ranks, .n_exchanges = n_exchanges, .rows = rows, .flaw = flaw };

    return explore_model(m, n_states);
}

static void two_ranks_any_rows(void **state_)
{
    static const uint32_t one[] = { 0 * MAX_R + 1, 1 * MAX_R + 0 };
    size_t n_states = 0;

    (void)state_;
    for (uint32_t mask = 0; mask < 4; mask++) {
        const uint32_t rows = (mask & 1) << one[0] | (mask >> 1) << one[1];
        const char *mistake = explore(2, MAX_EXCHANGES, rows, SOUND, &n_states);
        if (mistake)
            fail_msg("rows %u: %s", mask, mistake);
    }
    print_message("2 ranks, %d exchanges: %zu states\n", MAX_EXCHANGES, n_states);
}

static void three_ranks(void **state_)
{
#define ROW(from, to) (1u << ((from)*MAX_R + (to)))
    static const uint32_t patterns[] = {
        0,                                 /* headers alone */
        ROW(0, 1) | ROW(1, 0),             /* rank 2 is kept by headers */
        ROW(0, 1) | ROW(1, 2) | ROW(2, 0), /* a ring */
        ROW(0, 1) | ROW(0, 2),             /* one gives */
        ROW(1, 0) | ROW(2, 0),             /* one takes */
        ROW(0, 1) | ROW(0, 2) | ROW(1, 0) | ROW(1, 2) | ROW(2, 0) | ROW(2, 1),
    };
    size_t n_states = 0;

    (void)state_;
    for (size_t i = 0; i < sizeof(patterns) / sizeof(patterns[0]); i++) {
        const char *mistake = explore(3, i == 5 ? 1 : 2, patterns[i], SOUND, &n_states);
        if (mistake)
            fail_msg("pattern %zu: %s", i, mistake);
    }
    print_message("3 ranks, 2 exchanges: %zu states\n", n_states);
#undef ROW
}

#define ROW(from, to) (1u << ((from)*MAX_R + (to)))
static void node_copies(void **state_)
{
    static const uint32_t patterns[] = {
        ROW(2, 0) | ROW(2, 1),             /* both of the node */
        ROW(2, 1),                         /* not the relay itself */
        ROW(2, 0) | ROW(2, 1) | ROW(0, 1), /* and one inside the node */
        ROW(2, 1) | ROW(1, 2),             /* there and back */
    };
    model m = { .n_ranks = 3, .n_exchanges = 2, .node_copies = true };
    size_t n_states = 0;

    (void)state_;
    for (size_t i = 0; i < sizeof(patterns) / sizeof(patterns[0]); i++) {
        m.rows = patterns[i];
        const char *mistake = explore_model(m, &n_states);
        if (mistake)
            fail_msg("pattern %zu: %s", i, mistake);
    }
    print_message("node copies, 2 exchanges: %zu states\n", n_states);
    m.rows = patterns[0];
    for (m.flaw = RELAY_DONE_ONLY; m.flaw <= SIGNAL_AHEAD; m.flaw++)
        assert_string_equal(explore_model(m, &n_states), "rows");
}
#undef ROW

static void flaws_are_found(void **state_)
{
    const uint32_t all = 1u << 1 | 1u << MAX_R;
    size_t n_states = 0;

    (void)state_;
    assert_non_null(explore(2, MAX_EXCHANGES, 0, NO_DONE_WAIT, &n_states));
    assert_non_null(explore(2, MAX_EXCHANGES, 0, NO_HEADER_WAIT, &n_states));
    assert_non_null(explore(2, MAX_EXCHANGES, 0, EARLY_DONE, &n_states));
    assert_non_null(explore(2, MAX_EXCHANGES, all & 1u << 1, NO_DONE_WAIT, &n_states));
    assert_string_equal(explore(2, MAX_EXCHANGES, all, EARLY_RESULTS, &n_states),
                        "results in place");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_ranks_any_rows),
        cmocka_unit_test(three_ranks),
        cmocka_unit_test(node_copies),
        cmocka_unit_test(flaws_are_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
