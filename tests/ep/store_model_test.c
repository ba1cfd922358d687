/* The argument of src/ep/cuda/cuda.h ("why nothing waits for a barrier"), on a model: random orders
 * in which ranks run and stores land. What the model keeps of the kernels: who stores what where in
 * which call, what each call polls, reads and poisons again, and that only a row and its flag land
 * in order. A place holds the number of the exchange that was stored last, 0 is poison. A store
 * that lands on what nobody has read yet, a read of another exchange, and ranks that wait for each
 * other are mistakes. That the model can fail is tested too. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "base/base.h"

enum { MAX_R = 3, N_EXCHANGES = 6, N_WALKS = 3000 };

/* Stores of one exchange, each with a place for every (receiver, sender). HEADER stands for counts
 * and ids, ROW has a flag or proves itself, FLAG stands for a source's count of rows in place, too,
 * DONE is the packet of combine. */
typedef enum kind { HEADER, WEIGHT, ROW, FLAGGED_ROW, FLAG, RESULT, DONE, N_KINDS } kind;

/* Where a rank is; all but SEND go peer by peer. In READ the caller reads rows in place. */
typedef enum phase { SEND, RECEIVE, READ, RETURN, FINISH } phase;

typedef enum flaw {
    SOUND,
    NO_DONE_WAIT,  /* combine_recv takes its results and goes on */
    EARLY_DONE,    /* the packet of combine leaves before all rows were read */
    FLAG_AHEAD,    /* a flag may overtake its row */
    NO_POISON,     /* places of rows are not poisoned again */
    ONE_PLACE,     /* rows with and without flags share places */
    MOVED_WEIGHTS, /* weights of a sender lie in another place each time */
    LATE_READ      /* rows in place are read behind combine_send */
} flaw;

typedef struct place {
    uint8_t value; /* exchange; 0: poison, or nothing yet */
    bool was_read;
} place;

typedef struct rank {
    uint32_t exchange, peer; /* from 1 on; peer: how many it has dealt with in this phase */
    uint32_t told;           /* exchange of its last DONE */
    phase at;
} rank;

typedef struct model {
    uint32_t n_ranks;
    flaw flaw;
    bool in_place;
    bool flags[N_EXCHANGES + 1]; /* whether rows have flags or prove themselves */
    uint64_t state;
    rank ranks[MAX_R];
    place places[N_KINDS][MAX_R][MAX_R]; /* [receiver][sender] */
    uint8_t flying[N_KINDS][MAX_R][MAX_R];
    bool routed[N_EXCHANGES + 1][MAX_R][MAX_R]; /* from, to: whether a row goes there */
    const char *mistake;
} model;

static uint32_t draw(model *m, uint32_t n)
{
    m->state ^= m->state << 13;
    m->state ^= m->state >> 7;
    m->state ^= m->state << 17;
    return (uint32_t)(m->state % n);
}

static void wrong(model *m, const char *what)
{
    if (!m->mistake)
        m->mistake = what;
}

static uint32_t nth_peer(const model *m, uint32_t self)
{
    return (self + 1 + m->ranks[self].peer) % m->n_ranks;
}

static place *place_of(model *m, kind k, uint32_t at, uint32_t sender, uint32_t exchange)
{
    if (k == WEIGHT && m->flaw == MOVED_WEIGHTS)
        sender = (sender + exchange) % m->n_ranks;
    if (k == FLAGGED_ROW && m->flaw == ONE_PLACE)
        k = ROW;
    return &m->places[k][at][sender];
}

static void store(model *m, kind k, uint32_t from, uint32_t to)
{
    if (m->flying[k][to][from])
        wrong(m, "two stores to one place are under way");
    m->flying[k][to][from] = (uint8_t)m->ranks[from].exchange;
}

static void land(model *m, kind k, uint32_t to, uint32_t from)
{
    const uint8_t value = m->flying[k][to][from];
    place *p = place_of(m, k, to, from, value);

    if (k == FLAG && m->flying[FLAGGED_ROW][to][from] && m->flaw != FLAG_AHEAD)
        return; /* released behind it */
    if (p->value && !p->was_read)
        wrong(m, "a store lands on what nobody has read");
    if ((k == ROW || k == RESULT) && p->value)
        wrong(m, "a store lands where there is no poison");
    *p = (place){ value, false };
    m->flying[k][to][from] = 0;
}

/* False: it has not come, or is of an earlier exchange. */
static bool take(model *m, kind k, uint32_t self, uint32_t from, bool poisons)
{
    const uint32_t exchange = m->ranks[self].exchange;
    place *p = place_of(m, k, self, from, exchange);

    if (k == ROW || k == RESULT) { /* all that is no poison is taken for it */
        if (p->value && p->value != exchange)
            wrong(m, "a row of another exchange is read");
    } else if (p->value > exchange) {
        wrong(m, "what is awaited was overwritten");
    }
    if (p->value != exchange)
        return false;
    p->was_read = true;
    if (poisons && m->flaw != NO_POISON)
        p->value = 0;
    return true;
}

static void tell_done(model *m, uint32_t self)
{
    rank *mine = &m->ranks[self];

    for (uint32_t r = 0; r < m->n_ranks && mine->told != mine->exchange; r++)
        if (r != self)
            store(m, DONE, self, r);
    mine->told = mine->exchange;
}

static void next_phase(rank *r)
{
    r->peer = 0;
    if (r->at == FINISH) {
        r->exchange++;
        r->at = SEND;
    } else {
        r->at++;
    }
}

static void send_all(model *m, uint32_t self)
{
    const bool flags = m->flags[m->ranks[self].exchange];

    for (uint32_t to = 0; to < m->n_ranks; to++) {
        if (to == self)
            continue;
        store(m, HEADER, self, to);
        if (!m->routed[m->ranks[self].exchange][self][to])
            continue;
        store(m, WEIGHT, self, to);
        store(m, flags ? FLAGGED_ROW : ROW, self, to);
        if (flags)
            store(m, FLAG, self, to);
    }
}

static bool receive(model *m, uint32_t self, uint32_t from)
{
    const bool row = m->routed[m->ranks[self].exchange][from][self];
    const bool flags = m->flags[m->ranks[self].exchange];
    const kind proof = flags ? FLAG : ROW;

    if (m->flaw == EARLY_DONE)
        tell_done(m, self);
    /* a rank may poll the row before it has the header, so each is looked at by itself */
    if (m->places[HEADER][self][from].value != m->ranks[self].exchange ||
        (row && m->places[proof][self][from].value == 0))
        return false;
    if (row && !take(m, proof, self, from, !flags))
        return false;
    if (row && flags && !m->in_place && !take(m, FLAGGED_ROW, self, from, false))
        wrong(m, "a flag came before its row");
    return take(m, HEADER, self, from, false);
}

static bool read_in_place(model *m, uint32_t self, uint32_t from)
{
    if (m->in_place && m->routed[m->ranks[self].exchange][from][self] &&
        !take(m, FLAGGED_ROW, self, from, false))
        wrong(m, "a row in place is not there");
    return true;
}

/* The packets leave first: weights are read behind them. */
static bool give_back(model *m, uint32_t self, uint32_t to)
{
    tell_done(m, self);
    if (!m->routed[m->ranks[self].exchange][to][self])
        return true;
    if (!take(m, WEIGHT, self, to, false))
        return false;
    store(m, RESULT, self, to);
    return true;
}

static bool finish(model *m, uint32_t self, uint32_t from)
{
    const place *done = &m->places[DONE][self][from];
    const bool expected = m->routed[m->ranks[self].exchange][self][from];

    if (m->flaw == LATE_READ)
        read_in_place(m, self, from);
    if (m->flaw == NO_DONE_WAIT)
        return !expected || take(m, RESULT, self, from, true);
    if (done->value != m->ranks[self].exchange ||
        (expected && m->places[RESULT][self][from].value == 0))
        return false;
    return (!expected || take(m, RESULT, self, from, true)) && take(m, DONE, self, from, false);
}

/* True: the rank got further. */
static bool step(model *m, uint32_t self)
{
    rank *r = &m->ranks[self];
    const uint32_t peer = nth_peer(m, self);
    bool moved;

    if (r->exchange > N_EXCHANGES)
        return false;
    if (r->at == SEND) {
        send_all(m, self);
        next_phase(r);
        return true;
    }
    moved = r->at == RECEIVE  ? receive(m, self, peer)
            : r->at == READ   ? m->flaw == LATE_READ || read_in_place(m, self, peer)
            : r->at == RETURN ? give_back(m, self, peer)
                              : finish(m, self, peer);
    if (moved && ++r->peer == m->n_ranks - 1)
        next_phase(r);
    return moved;
}

static bool land_any(model *m, uint32_t patience)
{
    bool any = false;

    for (uint32_t i = 0; i < N_KINDS * m->n_ranks * m->n_ranks; i++) {
        const kind k = i % N_KINDS;
        const uint32_t to = i / N_KINDS % m->n_ranks, from = i / N_KINDS / m->n_ranks;

        if (!m->flying[k][to][from])
            continue;
        any = true;
        if (draw(m, patience) == 0)
            land(m, k, to, from);
    }
    return any;
}

typedef enum rows { PROVING, FLAGGED, MIXED, IN_PLACE, N_ROWS } rows;

/* One order of events; NULL: no mistake. Ranks and stores are slow by turns. */
static const char *walk(uint32_t n_ranks, rows kind_of_rows, flaw f, uint64_t seed)
{
    model m = {
        .n_ranks = n_ranks, .flaw = f, .in_place = kind_of_rows == IN_PLACE, .state = seed * 2 + 1
    };
    uint32_t n_idle = 0, density;

    for (int i = 0; i < 20; i++)
        draw(&m, 2);
    density = 1 + draw(&m, 4);
    for (uint32_t e = 1; e <= N_EXCHANGES; e++) {
        m.flags[e] = kind_of_rows == MIXED ? draw(&m, 2) : kind_of_rows != PROVING;
        for (uint32_t i = 0; i < MAX_R * MAX_R; i++)
            m.routed[e][i / MAX_R][i % MAX_R] = draw(&m, 4) < density;
    }
    for (uint32_t r = 0; r < n_ranks; r++)
        m.ranks[r].exchange = 1;
    while (!m.mistake) {
        const uint32_t slow = draw(&m, 2 * n_ranks), n_steps = draw(&m, 12);
        bool moved = false, over = true, any;

        any = land_any(&m, 1 + draw(&m, 6));
        for (uint32_t i = 0; i < n_steps; i++) {
            const uint32_t self = draw(&m, n_ranks);
            moved |= self != slow && step(&m, self);
        }
        for (uint32_t r = 0; r < n_ranks; r++)
            over &= m.ranks[r].exchange > N_EXCHANGES;
        if (over && !any)
            return NULL;
        n_idle = moved || any ? 0 : n_idle + 1;
        if (n_idle > 1000)
            wrong(&m, "the ranks wait for each other");
    }
    return m.mistake;
}

static const char *walk_all(uint32_t n_ranks, rows kind_of_rows, flaw f)
{
    for (uint64_t seed = 0; seed < N_WALKS; seed++) {
        const char *mistake = walk(n_ranks, kind_of_rows, f, seed);
        if (mistake)
            return mistake;
    }
    return NULL;
}

static void no_order_of_events_is_wrong(void **state)
{
    (void)state;
    for (uint32_t n_ranks = 2; n_ranks <= MAX_R; n_ranks++)
        for (rows kind_of_rows = PROVING; kind_of_rows < N_ROWS; kind_of_rows++) {
            const char *mistake = walk_all(n_ranks, kind_of_rows, SOUND);
            if (mistake)
                fail_msg("%u ranks, rows %d: %s", n_ranks, (int)kind_of_rows, mistake);
        }
}

static void mistakes_are_found(void **state)
{
    (void)state;
    for (rows kind_of_rows = PROVING; kind_of_rows < N_ROWS; kind_of_rows++) {
        assert_non_null(walk_all(2, kind_of_rows, NO_DONE_WAIT));
        assert_non_null(walk_all(2, kind_of_rows, EARLY_DONE));
        assert_non_null(walk_all(3, kind_of_rows, MOVED_WEIGHTS));
    }
    assert_non_null(walk_all(2, FLAGGED, FLAG_AHEAD));
    assert_non_null(walk_all(2, PROVING, NO_POISON));
    assert_non_null(walk_all(2, MIXED, ONE_PLACE));
    assert_non_null(walk_all(2, IN_PLACE, FLAG_AHEAD));
    assert_non_null(walk_all(2, IN_PLACE, LATE_READ));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_order_of_events_is_wrong),
        cmocka_unit_test(mistakes_are_found),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
