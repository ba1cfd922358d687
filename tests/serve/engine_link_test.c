/* Link and server against each other over a socket, in one process, with a scripted engine: what is
 * asked comes back, whatever ends ends once, and either side survives the other.
 * ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <unistd.h>

#include <cmocka.h>

#include "scripted.h"

enum { MAX_REQUESTS = 300, MAX_OUT = 64, PATIENCE_US = 100000000 };

typedef struct answer {
    int32_t tokens[MAX_OUT];
    uint32_t n_tokens, n_ends;
    yard_finish finish;
    bool retry;
    char message[200];
} answer;

typedef struct test {
    char address[64];
    uint64_t timeout_us; /* of silence */
    scripted_engine engine;
    yard_engine_server_config config;
    yard_engine_server *server;
    yard_link *link;
    bool up;
    uint32_t n_ups, n_downs, n_reports, n_pauses;
    yard_link_pod pod;
    yard_engine_report report[2];
    char why[300];
    answer answers[MAX_REQUESTS][2]; /* by tag and choice */
} test;

static void open_server(test *t)
{
    yard_error err = { 0 };

    t->config.address = t->address;
    t->config.engine = scripted_served(&t->engine);
    if (yard_engine_server_open(&t->server, &t->config, &err) != YARD_OK)
        fail_msg("%s", err.message);
}

static yard_link *open_link(const test *t)
{
    const yard_link_config c = { .address = t->address,
                                 .timeout_us = t->timeout_us,
                                 .max_backoff_us = 100000 };
    yard_link *link = NULL;
    yard_error err = { 0 };

    if (yard_link_open(&link, &c, &err) != YARD_OK)
        fail_msg("%s", err.message);
    return link;
}

static test *begin(double rate, uint64_t timeout_us)
{
    static int n;
    test *t = calloc(1, sizeof(*t));

    assert_non_null(t);
    snprintf(t->address, sizeof(t->address), "unix:/tmp/yard-link-%d-%d", (int)getpid(), n++);
    t->engine.config = (scripted_config){
        .n_instances = 2, .max_requests = 64, .context = 256, .vocab = 1000, .rate = rate
    };
    t->timeout_us = timeout_us;
    open_server(t);
    t->link = open_link(t);
    return t;
}

static void end(test *t)
{
    yard_link_close(t->link);
    yard_engine_server_close(t->server);
    scripted_release(&t->engine);
    unlink(t->address + 5);
    free(t);
}

static void take_tokens(test *t, const yard_link_tokens *k)
{
    answer *a = &t->answers[k->tag][k->choice];

    assert_true(k->tag < MAX_REQUESTS && k->choice < 2);
    assert_int_equal(a->n_ends, 0);
    assert_true(a->n_tokens + k->n_tokens <= MAX_OUT);
    if (k->n_tokens > 0)
        memcpy(a->tokens + a->n_tokens, k->token, k->n_tokens * sizeof(*a->tokens));
    a->n_tokens += k->n_tokens;
    a->finish = k->finish;
    a->n_ends += k->finish != YARD_RUNNING;
    a->retry = k->retry;
    if (k->message)
        snprintf(a->message, sizeof(a->message), "%s", k->message);
}

static void take_event(test *t, const yard_link_event *e)
{
    switch (e->kind) {
    case YARD_LINK_UP:
        assert_false(t->up);
        t->up = true;
        t->n_ups++;
        t->pod = e->pod;
        break;
    case YARD_LINK_DOWN:
        assert_true(t->up);
        t->up = false;
        t->n_downs++;
        snprintf(t->why, sizeof(t->why), "%s", e->message);
        break;
    case YARD_LINK_TOKENS:
        assert_true(t->up);
        take_tokens(t, &e->tokens);
        break;
    case YARD_LINK_REPORT:
        assert_true(t->up && e->instance < 2);
        t->report[e->instance] = e->report;
        t->n_reports++;
        assert_int_equal(t->n_pauses, 0); /* here no pod goes on after one */
        break;
    case YARD_LINK_PAUSED:
        assert_true(t->up);
        t->n_pauses++;
        break;
    default:
        assert_true(t->up);
        break;
    }
}

static void pump(test *t, bool with_server)
{
    struct pollfd fd = { .fd = t->link ? yard_link_fd(t->link) : -1, .events = POLLIN };
    yard_link_event e;
    yard_error err = { 0 };

    if (with_server && yard_engine_server_run(t->server, 2000, &err) != YARD_OK)
        fail_msg("%s", err.message);
    if (poll(&fd, 1, with_server ? 2 : 20) > 0)
        while (yard_link_next(t->link, &e))
            take_event(t, &e);
}

#define PUMP_UNTIL(with_server, condition)                                                         \
    for (uint64_t until_us = yard_now_us() + PATIENCE_US; !(condition);) {                         \
        if (yard_now_us() > until_us)                                                              \
            fail_msg("waited in vain for %s; last DOWN: %s", #condition, t->why);                  \
        pump(t, with_server);                                                                      \
    }

static void fill_prompt(uint32_t tag, int32_t *prompt)
{
    for (int i = 0; i < 8; i++)
        prompt[i] = (int32_t)(tag * 8 + (uint32_t)i);
}

static void ask(test *t, uint32_t instance, uint32_t tag, uint32_t n_new, uint32_t n_choices)
{
    yard_request r = YARD_REQUEST_INIT;
    int32_t prompt[8];

    fill_prompt(tag, prompt);
    r.prompt = prompt;
    r.n_prompt = 8;
    r.max_new_tokens = n_new;
    r.n_choices = n_choices;
    assert_true(yard_link_generate(t->link, instance, tag, &r));
}

static void check_answer(const test *t, uint32_t tag, uint32_t choice, uint32_t n)
{
    const answer *a = &t->answers[tag][choice];
    int32_t prompt[8];

    fill_prompt(tag, prompt);
    assert_int_equal(a->n_tokens, n);
    assert_int_equal(a->finish, YARD_FINISH_LENGTH);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(a->tokens[i], scripted_token(&t->engine.config, prompt, 8, choice, i));
}

static bool all_ended(const test *t, uint32_t first, uint32_t end_tag)
{
    for (uint32_t tag = first; tag < end_tag; tag++)
        if (!t->answers[tag][0].n_ends)
            return false;
    return true;
}

static void answers_come_back(void **state)
{
    test *t = begin(0, PATIENCE_US);

    (void)state;
    PUMP_UNTIL(true, t->up);
    assert_int_equal(t->pod.n_instances, 2);
    assert_int_equal(t->pod.max_requests, 64);
    assert_int_equal(t->pod.context, 256);
    assert_int_equal(t->pod.vocab, 1000);
    assert_string_equal(t->pod.model, "scripted");
    assert_true(yard_page_hash_equal(t->pod.page_root, yard_page_hash_root("scripted", 8, "", 0)));
    for (uint32_t tag = 0; tag < MAX_REQUESTS; tag++)
        ask(t, tag % 2, tag, 1 + tag % MAX_OUT, 1 + tag % 2);
    PUMP_UNTIL(true, all_ended(t, 0, MAX_REQUESTS));
    PUMP_UNTIL(true, t->answers[MAX_REQUESTS - 1][1].n_ends);
    for (uint32_t tag = 0; tag < MAX_REQUESTS; tag++)
        for (uint32_t choice = 0; choice < 1 + tag % 2; choice++)
            check_answer(t, tag, choice, 1 + tag % MAX_OUT);
    PUMP_UNTIL(true,
               t->report[0].n_seen == MAX_REQUESTS / 2 && t->report[1].n_seen == MAX_REQUESTS / 2);
    PUMP_UNTIL(true, t->report[0].n_requests == 0 && t->report[1].n_requests == 0);
    PUMP_UNTIL(true, yard_engine_server_idle(t->server)); /* its last write is reported later */
    assert_int_equal(t->n_downs, 0);
    end(t);
}

static void requests_are_aborted(void **state)
{
    test *t = begin(0.001, PATIENCE_US);

    (void)state;
    PUMP_UNTIL(true, t->up);
    ask(t, 0, 0, 50, 2);
    ask(t, 1, 1, 50, 1);
    PUMP_UNTIL(true, t->answers[0][1].n_tokens && t->answers[1][0].n_tokens);
    yard_link_abort(t->link, 0, 1);
    PUMP_UNTIL(true, t->answers[0][1].n_ends);
    assert_int_equal(t->answers[0][1].finish, YARD_FINISH_ABORTED);
    assert_int_equal(t->answers[0][0].n_ends, 0);
    yard_link_abort(t->link, 77, YARD_ALL_CHOICES); /* of nobody */
    yard_link_abort(t->link, 0, YARD_ALL_CHOICES);
    yard_link_abort(t->link, 1, YARD_ALL_CHOICES);
    PUMP_UNTIL(true, all_ended(t, 0, 2));
    assert_int_equal(t->answers[1][0].finish, YARD_FINISH_ABORTED);
    assert_int_equal(t->engine.n, 0);
    end(t);
}

static void a_front_that_leaves_takes_its_requests_along(void **state)
{
    test *t = begin(0.001, PATIENCE_US);

    (void)state;
    PUMP_UNTIL(true, t->up);
    for (uint32_t tag = 0; tag < 20; tag++)
        ask(t, tag % 2, tag, 50, 1);
    PUMP_UNTIL(true, t->engine.n == 20);
    yard_link_close(t->link);
    t->link = NULL;
    PUMP_UNTIL(true, t->engine.n == 0 && yard_engine_server_idle(t->server));
    t->link = open_link(t);
    t->up = false;
    PUMP_UNTIL(true, t->up);
    ask(t, 0, 30, 1, 1);
    PUMP_UNTIL(true, all_ended(t, 30, 31));
    end(t);
}

static void a_pod_that_goes_and_comes_again(void **state)
{
    test *t = begin(0.001, PATIENCE_US);

    (void)state;
    PUMP_UNTIL(true, t->up);
    ask(t, 0, 0, 50, 1);
    PUMP_UNTIL(true, t->answers[0][0].n_tokens == 1);
    yard_engine_server_close(t->server);
    t->server = NULL;
    PUMP_UNTIL(false, !t->up);
    assert_non_null(strstr(t->why, t->address));
    ask(t, 0, 1, 1, 1); /* into nothing */
    scripted_release(&t->engine);
    t->engine = (scripted_engine){ .config = t->engine.config };
    open_server(t);
    PUMP_UNTIL(true, t->up);
    assert_int_equal(t->n_ups, 2);
    ask(t, 0, 2, 1, 1);
    PUMP_UNTIL(true, all_ended(t, 2, 3));
    check_answer(t, 2, 0, 1);
    assert_int_equal(t->answers[0][0].n_ends, 0);
    assert_int_equal(t->answers[1][0].n_ends, 0);
    end(t);
}

/* Asks until a token is there, by one tag after the other: where silence may be short, a busy
 * machine may lose the link as well. Returns the tag. */
static uint32_t ask_until_heard(test *t, uint32_t tag, uint32_t n_new)
{
    for (;; tag++) {
        PUMP_UNTIL(true, t->up);
        ask(t, 0, tag, n_new, 1);
        PUMP_UNTIL(true, t->answers[tag][0].n_tokens == 1 || !t->up);
        if (t->answers[tag][0].n_tokens == 1)
            return tag;
    }
}

/* Its sockets live, its gRPC answers probes, but nothing happens. */
static void a_pod_that_stalls_is_lost(void **state)
{
    test *t = begin(0.001, 2000000);
    uint32_t before, after;

    (void)state;
    before = ask_until_heard(t, 0, 50);
    PUMP_UNTIL(false, !t->up);
    assert_non_null(strstr(t->why, "silent"));
    PUMP_UNTIL(true, t->up && t->engine.n == 0); /* the old stream's requests are aborted */
    after = ask_until_heard(t, before + 1, 1);
    assert_int_equal(t->answers[after][0].n_ends, 1);
    assert_int_equal(t->answers[before][0].n_ends, 0);
    end(t);
}

static void what_cannot_be_is_refused(void **state)
{
    test *t;
    yard_request r = YARD_REQUEST_INIT;
    int32_t prompt[300] = { 0 };

    (void)state;
    t = begin(0.001, PATIENCE_US);
    t->config.max_requests = 3;
    yard_engine_server_close(t->server);
    open_server(t);
    PUMP_UNTIL(true, t->up);
    ask(t, 2, 0, 1, 1);
    r.prompt = prompt;
    r.n_prompt = 300;
    assert_true(yard_link_generate(t->link, 0, 1, &r));
    r.n_prompt = 0;
    assert_true(yard_link_generate(t->link, 0, 2, &r));
    PUMP_UNTIL(true, all_ended(t, 0, 3));
    assert_non_null(strstr(t->answers[0][0].message, "instance: want below 2, got 2"));
    assert_non_null(strstr(t->answers[1][0].message, "256 tokens, got 300"));
    assert_non_null(strstr(t->answers[2][0].message, "at least one token"));
    for (uint32_t tag = 0; tag < 3; tag++) {
        assert_int_equal(t->answers[tag][0].finish, YARD_FINISH_ERROR);
        assert_false(t->answers[tag][0].retry);
    }
    for (uint32_t tag = 10; tag < 14; tag++)
        ask(t, 0, tag, 50, 1);
    PUMP_UNTIL(true, t->answers[13][0].n_ends);
    assert_true(t->answers[13][0].retry);
    assert_int_equal(t->answers[12][0].n_ends, 0);
    yard_engine_server_drain(t->server);
    ask(t, 0, 20, 1, 1);
    PUMP_UNTIL(true, all_ended(t, 20, 21));
    assert_true(t->answers[20][0].retry);
    PUMP_UNTIL(true, t->n_pauses == 1);
    assert_false(yard_engine_server_idle(t->server));
    /* the refused ones count as seen: the front waits for none of them */
    yard_link_abort(t->link, 10, YARD_ALL_CHOICES);
    yard_link_abort(t->link, 11, YARD_ALL_CHOICES);
    yard_link_abort(t->link, 12, YARD_ALL_CHOICES);
    PUMP_UNTIL(true, all_ended(t, 10, 13) && yard_engine_server_idle(t->server));
    end(t);
}

static void a_front_that_does_not_read_is_let_go(void **state)
{
    test *t = begin(0, PATIENCE_US);
    uint32_t tag = 0;

    (void)state;
    t->config.max_unsent_bytes = 4096;
    yard_engine_server_close(t->server);
    open_server(t);
    t->engine.config.rate = 1e9;
    PUMP_UNTIL(true, t->up);
    for (uint64_t until_us = yard_now_us() + PATIENCE_US; tag == 0 || t->engine.n_aborts == 0;
         tag++) {
        yard_error err = { 0 };

        assert_true(yard_now_us() < until_us);
        for (int i = 0; i < 60; i++) /* read by nobody */
            ask(t, 0, tag % MAX_REQUESTS, 200, 2);
        for (int i = 0; i < 5; i++)
            assert_int_equal(yard_engine_server_run(t->server, 1000, &err), YARD_OK);
    }
    end(t);
}

static void bad_addresses_are_refused(void **state)
{
    yard_link_config c = { .address = "nowhere" };
    yard_link *link = NULL;
    yard_error err = { 0 };

    (void)state;
    assert_int_equal(yard_link_open(&link, &c, &err), YARD_EINVAL);
    assert_null(link);
    yard_link_close(NULL);
    yard_engine_server_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_come_back),
        cmocka_unit_test(requests_are_aborted),
        cmocka_unit_test(a_front_that_leaves_takes_its_requests_along),
        cmocka_unit_test(a_pod_that_goes_and_comes_again),
        cmocka_unit_test(a_pod_that_stalls_is_lost),
        cmocka_unit_test(what_cannot_be_is_refused),
        cmocka_unit_test(a_front_that_does_not_read_is_let_go),
        cmocka_unit_test(bad_addresses_are_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
