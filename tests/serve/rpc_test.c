/* Calls over real sockets, both ends in this process: messages both ways and in order, every way in
 * which a call can end, limits, slow readers, and servers that come late or again.
 * ctest: sanitize */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "serve/rpc.h"

enum {
    ECHO,
    HOLD,
    N_METHODS,
    PATIENCE_MS = 100000,
    KEEPALIVE_US = 20000000, /* no connection is so slow */
    MAX_MESSAGE = 1 << 16
};

static const char *const methods[] = { "/test.Test/Echo", "/test.Test/Hold" };
static const char *const other_methods[] = { "/test.Test/Unknown" };

typedef struct ends {
    yard_rpc *server, *client;
    uint32_t max_calls;
    /* what the client's only call has seen */
    uint32_t n_messages;
    bool closed, ended, sent, timer;
    yard_rpc_code code;
    char message[200];
    uint8_t last[64];
    size_t n_last;
    /* what the server has seen */
    yard_rpc_call *held;
    uint32_t n_opened, n_server_ended;
    yard_rpc_code server_code;
} ends;

static yard_rpc *listen_on(const char *address, uint32_t max_calls)
{
    const yard_rpc_config c = { .address = address,
                                .methods = methods,
                                .n_methods = N_METHODS,
                                .max_calls = max_calls,
                                .max_message_bytes = MAX_MESSAGE,
                                .keepalive_us = KEEPALIVE_US };
    yard_rpc *rpc = NULL;
    yard_error err = { 0 };

    if (yard_rpc_listen(&rpc, &c, &err) != YARD_OK)
        fail_msg("%s", err.message);
    return rpc;
}

static yard_rpc *connect_to(const char *address, const char *const *names)
{
    const yard_rpc_config c = { .address = address,
                                .methods = names,
                                .n_methods = 1,
                                .max_message_bytes = MAX_MESSAGE,
                                .keepalive_us = KEEPALIVE_US,
                                .max_backoff_us = 100000 };
    yard_rpc_config all = c;
    yard_rpc *rpc = NULL;
    yard_error err = { 0 };

    all.n_methods = names == methods ? N_METHODS : 1;
    if (yard_rpc_connect(&rpc, &all, &err) != YARD_OK)
        fail_msg("%s", err.message);
    return rpc;
}

static void open_ends(ends *e, const char *const *names)
{
    *e = (ends){ .server = listen_on("127.0.0.1:0", e->max_calls) };
    e->client = connect_to(yard_rpc_address(e->server), names);
}

static void close_ends(ends *e)
{
    yard_rpc_close(e->client);
    yard_rpc_close(e->server);
}

/* Echo: every message goes back, then the call ends; Hold: the test does what it wants. */
static void serve(ends *e, const yard_rpc_event *v)
{
    switch (v->kind) {
    case YARD_RPC_OPENED:
        e->n_opened++;
        e->held = v->call;
        break;
    case YARD_RPC_MESSAGE:
        if (v->method == ECHO)
            assert_true(yard_rpc_send(v->call, v->bytes, v->n_bytes));
        break;
    case YARD_RPC_CLOSED:
        if (v->method == ECHO)
            yard_rpc_finish(v->call, YARD_RPC_OK, NULL);
        break;
    case YARD_RPC_ENDED:
        e->n_server_ended++;
        e->server_code = v->code;
        e->held = e->held == v->call ? NULL : e->held;
        break;
    default:
        break;
    }
}

static void take(ends *e, const yard_rpc_event *v)
{
    switch (v->kind) {
    case YARD_RPC_MESSAGE:
        e->n_messages++;
        e->n_last = v->n_bytes < sizeof(e->last) ? v->n_bytes : sizeof(e->last);
        memcpy(e->last, v->bytes, e->n_last);
        break;
    case YARD_RPC_CLOSED:
        e->closed = true;
        break;
    case YARD_RPC_SENT:
        e->sent = true;
        break;
    case YARD_RPC_TIMER:
        e->timer = true;
        break;
    case YARD_RPC_ENDED:
        assert_false(e->ended);
        e->ended = true;
        e->code = v->code;
        snprintf(e->message, sizeof(e->message), "%s", v->message);
        break;
    default:
        fail_msg("event %d at a client", (int)v->kind);
    }
}

static void pump(ends *e, bool client, bool server)
{
    struct pollfd fds[2] = {
        { .fd = client && e->client ? yard_rpc_fd(e->client) : -1, .events = POLLIN },
        { .fd = server && e->server ? yard_rpc_fd(e->server) : -1, .events = POLLIN }
    };
    yard_rpc_event v;

    if (poll(fds, 2, PATIENCE_MS) == 0)
        fail_msg("nothing happens: %u messages, ended %d", e->n_messages, (int)e->ended);
    if (fds[1].revents)
        while (yard_rpc_next(e->server, &v))
            serve(e, &v);
    if (fds[0].revents)
        while (yard_rpc_next(e->client, &v))
            take(e, &v);
}

#define PUMP_UNTIL(condition)                                                                      \
    while (!(condition))                                                                           \
    pump(&e, true, true)

static void messages_come_back_in_order(void **state)
{
    ends e = { 0 };
    yard_rpc_call *call;

    (void)state;
    open_ends(&e, methods);
    call = yard_rpc_start(e.client, ECHO, 0);
    assert_non_null(call);
    assert_null(yard_rpc_user(call));
    yard_rpc_set_user(call, &e);
    assert_ptr_equal(yard_rpc_user(call), &e);
    for (uint32_t i = 0; i < 500; i++) {
        assert_true(yard_rpc_send(call, &i, sizeof(i)));
        if (i % 50 == 49) {
            PUMP_UNTIL(e.n_messages == i + 1);
            assert_memory_equal(e.last, &i, sizeof(i));
        }
    }
    PUMP_UNTIL(e.sent && yard_rpc_unsent(call) == 0);
    assert_true(yard_rpc_send(call, "", 0)); /* an empty one is one, too */
    yard_rpc_finish(call, YARD_RPC_OK, NULL);
    PUMP_UNTIL(e.ended);
    assert_int_equal(e.n_messages, 501);
    assert_int_equal(e.code, YARD_RPC_OK);
    PUMP_UNTIL(e.n_server_ended == 1);
    assert_int_equal(e.server_code, YARD_RPC_OK);
    close_ends(&e);
}

static void a_server_says_how_it_ended(void **state)
{
    ends e = { 0 };

    (void)state;
    open_ends(&e, methods);
    yard_rpc_start(e.client, HOLD, 0);
    PUMP_UNTIL(e.held);
    assert_true(yard_rpc_send(e.held, "x", 1));
    yard_rpc_finish(e.held, YARD_RPC_NOT_FOUND, "no such thing");
    PUMP_UNTIL(e.ended);
    assert_int_equal(e.n_messages, 1);
    assert_int_equal(e.code, YARD_RPC_NOT_FOUND);
    assert_string_equal(e.message, "no such thing");
    close_ends(&e);
}

static void either_side_cancels(void **state)
{
    for (int by_server = 0; by_server < 2; by_server++) {
        ends e = { 0 };
        yard_rpc_call *call;

        (void)state;
        open_ends(&e, methods);
        call = yard_rpc_start(e.client, HOLD, 0);
        PUMP_UNTIL(e.held);
        yard_rpc_cancel(by_server ? e.held : call);
        PUMP_UNTIL(e.ended && e.n_server_ended == 1);
        assert_int_not_equal(e.code, YARD_RPC_OK);
        assert_int_equal(e.server_code, YARD_RPC_CANCELLED);
        close_ends(&e);
    }
}

static void time_is_up(void **state)
{
    ends e = { 0 };

    (void)state;
    open_ends(&e, methods);
    yard_rpc_start(e.client, HOLD, 100000);
    PUMP_UNTIL(e.ended);
    assert_int_equal(e.code, YARD_RPC_TIMED_OUT);
    yard_rpc_wake_at(e.client, yard_now_us() + 1000);
    PUMP_UNTIL(e.timer);
    close_ends(&e);
}

static void an_unknown_method_is_refused(void **state)
{
    ends e = { 0 };

    (void)state;
    open_ends(&e, other_methods);
    yard_rpc_start(e.client, 0, 0);
    PUMP_UNTIL(e.ended);
    assert_int_equal(e.code, YARD_RPC_UNIMPLEMENTED);
    assert_int_equal(e.n_opened, 0);
    close_ends(&e);
}

static void more_calls_than_allowed_are_refused(void **state)
{
    ends e = { .max_calls = 2 };
    yard_rpc *second;

    (void)state;
    open_ends(&e, methods);
    yard_rpc_start(e.client, HOLD, 0);
    PUMP_UNTIL(e.n_opened == 1);
    yard_rpc_start(e.client, HOLD, 0);
    PUMP_UNTIL(e.n_opened == 2);
    /* by another client: the limit of one connection holds its further calls back */
    second = connect_to(yard_rpc_address(e.server), methods);
    yard_rpc_start(second, HOLD, 0);
    {
        ends o = { .server = e.server, .client = second };
        while (!o.ended)
            pump(&o, true, true);
        assert_int_equal(o.code, YARD_RPC_EXHAUSTED);
        assert_int_equal(o.n_opened, 0);
    }
    yard_rpc_close(second);
    close_ends(&e);
}

static void a_message_above_the_limit_ends_its_call(void **state)
{
    static uint8_t large[MAX_MESSAGE + 1];
    ends e = { 0 };
    yard_rpc_call *call;

    (void)state;
    open_ends(&e, methods);
    call = yard_rpc_start(e.client, ECHO, 0);
    assert_true(yard_rpc_send(call, large, MAX_MESSAGE));
    PUMP_UNTIL(e.n_messages == 1);
    assert_true(yard_rpc_send(call, large, sizeof(large)));
    PUMP_UNTIL(e.n_server_ended == 1 || e.ended);
    PUMP_UNTIL(e.ended);
    assert_int_not_equal(e.code, YARD_RPC_OK);
    assert_int_equal(e.n_messages, 1);
    close_ends(&e);
}

/* What is not taken is not read: the sender is held up instead. */
static void a_reader_that_does_not_read_holds_the_sender_up(void **state)
{
    static uint8_t large[MAX_MESSAGE];
    enum { N = 200 };
    ends e = { 0 };

    (void)state;
    open_ends(&e, methods);
    yard_rpc_start(e.client, HOLD, 0);
    PUMP_UNTIL(e.held);
    for (int i = 0; i < N; i++)
        assert_true(yard_rpc_send(e.held, large, sizeof(large)));
    for (int i = 0; i < 20; i++) {
        struct pollfd fd = { .fd = yard_rpc_fd(e.server), .events = POLLIN };
        yard_rpc_event v;

        if (poll(&fd, 1, 20) > 0)
            while (yard_rpc_next(e.server, &v))
                serve(&e, &v);
    }
    assert_true(yard_rpc_unsent(e.held) > 0);
    yard_rpc_finish(e.held, YARD_RPC_OK, NULL);
    PUMP_UNTIL(e.ended);
    assert_int_equal(e.n_messages, N);
    assert_int_equal(e.code, YARD_RPC_OK);
    close_ends(&e);
}

static void servers_come_late_and_again(void **state)
{
    char path[64];
    ends e = { 0 };

    (void)state;
    snprintf(path, sizeof(path), "unix:/tmp/yard-rpc-test-%d", (int)getpid());
    e.client = connect_to(path, methods);
    for (int i = 0; i < 3; i++) {
        yard_rpc_start(e.client, HOLD, 0);
        e.server = listen_on(path, 0);
        PUMP_UNTIL(e.held);
        yard_rpc_close(e.server);
        e.server = NULL;
        e.held = NULL;
        while (!e.ended)
            pump(&e, true, false);
        assert_int_not_equal(e.code, YARD_RPC_OK);
        e.ended = e.closed = false;
    }
    yard_rpc_start(e.client, HOLD, 0); /* nobody comes any more */
    close_ends(&e);
    unlink(path + 5);
}

/* Libraries hardly look at a connection between two calls: this one says hello, in HTTP/2, and
 * reads nothing more. A probe that it does not answer would end it. */
static void a_client_without_calls_is_not_probed(void **state)
{
    enum { PROBE_US = 50000, N_PROBES = 20 };
    static const char hello[33] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4"; /* and settings */
    struct sockaddr_un to = { .sun_family = AF_UNIX };
    char path[64], byte;
    yard_rpc_config c = {
        .address = path, .methods = methods, .n_methods = N_METHODS, .keepalive_us = PROBE_US
    };
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    yard_rpc *rpc = NULL;
    ssize_t n;

    (void)state;
    snprintf(path, sizeof(path), "unix:/tmp/yard-rpc-idle-%d", (int)getpid());
    snprintf(to.sun_path, sizeof(to.sun_path), "%s", path + 5);
    assert_int_equal(yard_rpc_listen(&rpc, &c, NULL), YARD_OK);
    assert_int_equal(connect(fd, (struct sockaddr *)&to, sizeof(to)), 0);
    assert_int_equal(send(fd, hello, sizeof(hello), MSG_NOSIGNAL), sizeof(hello));
    poll(NULL, 0, N_PROBES * PROBE_US / 1000); /* as long as it likes */
    while ((n = recv(fd, &byte, 1, MSG_DONTWAIT)) > 0)
        ;
    assert_int_equal(n, -1); /* not the end */
    close(fd);
    yard_rpc_close(rpc);
    unlink(path + 5);
}

static void bad_addresses_are_refused(void **state)
{
    static const char *const bad[] = { "",        "localhost", "unix:", ":80",     "a:",      "a:b",
                                       "a:70000", "1:2:3",     "a:80x", "host:-1", "a:999999" };
    yard_rpc *rpc = NULL, *second = NULL;
    yard_rpc_config c = { .methods = methods, .n_methods = N_METHODS };
    yard_error err = { 0 };

    (void)state;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        c.address = bad[i];
        assert_int_equal(yard_rpc_listen(&rpc, &c, &err), YARD_EINVAL);
        assert_int_equal(yard_rpc_connect(&rpc, &c, &err), YARD_EINVAL);
        assert_non_null(strstr(err.message, "host:port"));
    }
    c.address = "192.0.2.1:1"; /* of nobody */
    assert_int_equal(yard_rpc_listen(&rpc, &c, &err), YARD_EIO);
    c.address = "127.0.0.1:0";
    assert_int_equal(yard_rpc_listen(&rpc, &c, &err), YARD_OK);
    c.address = yard_rpc_address(rpc);
    assert_int_equal(yard_rpc_listen(&second, &c, &err), YARD_EIO);
    assert_null(second);
    yard_rpc_close(rpc);
}

static void a_path_in_use_is_refused(void **state)
{
    char path[64];
    yard_rpc *rpc, *second = NULL;
    yard_rpc_config c = { .address = path, .methods = methods, .n_methods = N_METHODS };
    yard_error err = { 0 };

    (void)state;
    snprintf(path, sizeof(path), "unix:/tmp/yard-rpc-path-%d", (int)getpid());
    rpc = listen_on(path, 0);
    assert_int_equal(yard_rpc_listen(&second, &c, &err), YARD_EIO);
    assert_non_null(strstr(err.message, "already"));
    yard_rpc_close(rpc);
    unlink(path + 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(messages_come_back_in_order),
        cmocka_unit_test(a_server_says_how_it_ended),
        cmocka_unit_test(either_side_cancels),
        cmocka_unit_test(time_is_up),
        cmocka_unit_test(an_unknown_method_is_refused),
        cmocka_unit_test(more_calls_than_allowed_are_refused),
        cmocka_unit_test(a_message_above_the_limit_ends_its_call),
        cmocka_unit_test(a_reader_that_does_not_read_holds_the_sender_up),
        cmocka_unit_test(servers_come_late_and_again),
        cmocka_unit_test(a_client_without_calls_is_not_probed),
        cmocka_unit_test(bad_addresses_are_refused),
        cmocka_unit_test(a_path_in_use_is_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
