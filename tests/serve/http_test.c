/* The HTTP server on good days: routes, connections, keys, the log, the end. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "serve/http_client.h"

static void routes(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    answer a;

    (void)state;
    assert_int_equal(get_status(s, "/health/live"), 200);
    assert_int_equal(get_status(s, "/health/ready"), 200);
    assert_int_equal(get_status(s, "/health/progress"), 200);
    assert_int_equal(get_status(s, "/health"), 200);
    assert_int_equal(get_status(s, "/health/x"), 404);
    assert_int_equal(get_status(s, "/metrics"), 200);
    assert_int_equal(get_status(s, "/v1/models/demo"), 200);
    assert_int_equal(get_status(s, "/v1/models/x"), 404);
    assert_int_equal(get_status(s, "/v1/modelsx"), 404);
    assert_int_equal(get_status(s, "/nothing"), 404);
    assert_int_equal(get_status(s, chat), 405);
    assert_int_equal(ask(s, "/v1/models", "", ""), 405);
    a = get(s, "/v1/models", "X-Request-Id: mine-7\r\n");
    assert_non_null(strstr(a.text, "X-Request-Id: mine-7\r\n"));
    assert_non_null(strstr(a.body, "\"id\":\"demo\""));
    assert_non_null(strstr(a.body, "\"max_model_len\":4096"));
    free(a.text);
    a = get(s, "/v1/models", "X-Request-Id: \"bad\"\r\n");
    assert_null(strstr(a.text, "bad"));
    free(a.text);
    assert_int_equal(ask(s, chat, "", CHAT(",\"max_tokens\":3")), 200);
    assert_int_equal(ask(s, "/tokenize", "", "{\"prompt\":\"a\"}"), 200);
    assert_int_equal(ask(s, "/detokenize", "", "{\"tokens\":[72]}"), 200);
    close_server(s);
}

static void one_connection_many_requests(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const int fd = connect_to(s);
    answer a;

    (void)state;
    for (int i = 0; i < 3; i++) {
        post(fd, chat, "", CHAT(",\"max_tokens\":3"));
        a = read_answer(fd);
        assert_int_equal(a.status, 200);
        free(a.text);
    }
    /* a stream, and requests that do not wait for its end */
    post(fd, chat, "", CHAT(",\"max_tokens\":20,\"stream\":true"));
    post(fd, chat, "", CHAT(",\"max_tokens\":2"));
    post(fd, chat, "Connection: close\r\n", "{");
    a = read_to_end(fd);
    assert_non_null(strstr(a.text, "data: [DONE]\n\n"));
    assert_non_null(strstr(a.text, "\"completion_tokens\":2"));
    assert_non_null(strstr(a.text, "HTTP/1.1 400 Bad Request"));
    free(a.text);
    close(fd);
    close_server(s);
}

static void keys(void **state)
{
    static const char *const key[] = { "secret", "other" };
    yard_http_config config = YARD_HTTP_CONFIG_INIT;
    server *s;

    (void)state;
    config.api_key = key;
    config.n_api_keys = 2;
    s = open_server(config);
    assert_int_equal(get_status(s, "/v1/models"), 401);
    assert_int_equal(get_status(s, "/health/live"), 200);
    assert_int_equal(ask(s, chat, "", CHAT(",\"max_tokens\":1")), 401);
    assert_int_equal(ask(s, chat, "Authorization: Bearer secre\r\n", CHAT("")), 401);
    assert_int_equal(ask(s, chat, "Authorization: Bearer secrets\r\n", CHAT("")), 401);
    assert_int_equal(ask(s, chat, "Authorization: secret\r\n", CHAT("")), 401);
    assert_int_equal(ask(s, chat, "Authorization: bearer other\r\n", CHAT(",\"max_tokens\":1")),
                     200);
    close_server(s);
}

static void the_log(void **state)
{
    server *s = open_logging((yard_http_config)YARD_HTTP_CONFIG_INIT, true);

    (void)state;
    assert_int_equal(ask(s, chat, "X-Request-Id: r1\r\n", CHAT(",\"max_tokens\":3")), 200);
    assert_int_equal(ask(s, chat, "", "{"), 400);
    stop(s);
    pthread_join(s->thread, NULL);
    fflush(s->log);
    assert_non_null(strstr(s->log_text, "\"id\":\"r1\",\"method\":\"POST\",\"uri\":"
                                        "\"/v1/chat/completions\",\"status\":200,"));
    assert_non_null(strstr(s->log_text, "\"output_tokens\":3,"));
    assert_non_null(strstr(s->log_text, "\"status\":400,"));
    start(s); /* for close_server to stop */
    close_server(s);
}

/* A client may be silent for longer than it may take to ask. */
static void a_long_answer(void **state)
{
    yard_http_config config = YARD_HTTP_CONFIG_INIT;
    server *s;
    int fd;
    struct pollfd wait;

    (void)state;
    config.read_timeout_us = 100000;
    s = prepare_server(config, false);
    fd = connect_to(s);
    post(fd, chat, "", CHAT(",\"seed\":42"));
    start(s); /* all of the request is there: how long it took does not matter */
    wait_for(&n_generated, 1);
    wait = (struct pollfd){ .fd = fd, .events = POLLIN };
    assert_int_equal(poll(&wait, 1, 2500), 0);
    assert_int_equal(atomic_load(&n_aborted), 0);
    close(fd);
    wait_for(&n_aborted, 1);
    close_server(s);
}

static void the_end(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const int idle = connect_to(s), fd = connect_to(s);
    answer a = { 0 };

    (void)state;
    post(idle, chat, "", CHAT(",\"max_tokens\":3"));
    a = read_answer(idle);
    free(a.text);
    a = (answer){ 0 };
    post(fd, chat, "", CHAT(",\"max_tokens\":3000,\"stream\":true"));
    receive(fd, &a);
    stop(s);
    while (!strstr(a.text, "[DONE]"))
        assert_true(receive(fd, &a));
    free(a.text);
    close(fd);
    pthread_join(s->thread, NULL);
    close(idle);
    start(s); /* for close_server to stop */
    close_server(s);
}

/* The socket is another's too: a connection that is not accepted would wait for the whole drain. */
static void asked_while_it_ends(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const int fd = connect_to(s);
    int status;

    (void)state;
    post(fd, chat, "", CHAT(",\"seed\":42")); /* never answered: the drain lasts until it leaves */
    wait_for(&n_generated, 1);
    stop(s);
    while ((status = get_status(s, "/health/ready")) == 200) /* the loop has not seen it yet */
        ;
    assert_int_equal(status, 503);
    assert_int_equal(get_status(s, "/health/live"), 200);
    assert_int_equal(ask(s, chat, "", CHAT(",\"max_tokens\":1")), 503);
    close(fd);
    pthread_join(s->thread, NULL);
    start(s); /* for close_server to stop */
    close_server(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(routes),
        cmocka_unit_test(one_connection_many_requests),
        cmocka_unit_test(keys),
        cmocka_unit_test(the_log),
        cmocka_unit_test(a_long_answer),
        cmocka_unit_test(the_end),
        cmocka_unit_test(asked_while_it_ends),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
