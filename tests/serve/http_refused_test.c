/* The HTTP server and requests that it refuses. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "serve/http_client.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static void bodies_cut_and_broken_at_every_byte(void **state)
{
    static const char good[] = CHAT(",\"max_tokens\":1,\"logit_bias\":{\"5\":1}");
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const int fd = connect_to(s);
    char body[sizeof(good)];
    answer a;

    (void)state;
    for (size_t i = 0; i + 1 < sizeof(good); i++) {
        memcpy(body, good, i);
        body[i] = '\0';
        post(fd, chat, "", body);
        a = read_answer(fd);
        assert_int_equal(a.status, 400);
        assert_non_null(strstr(a.body, "\"type\":\"invalid_request_error\""));
        free(a.text);
        memcpy(body, good, sizeof(good));
        body[i] = (char)0xff; /* never UTF-8 */
        post(fd, chat, "", body);
        a = read_answer(fd);
        assert_int_equal(a.status, 400);
        free(a.text);
    }
    close(fd);
    assert_int_equal(atomic_load(&n_generated), 0);
    close_server(s);
}

static void every_field_of_a_wrong_type(void **state)
{
    static const char *const fields[] = { "max_tokens",
                                          "temperature",
                                          "top_p",
                                          "top_k",
                                          "min_p",
                                          "stop",
                                          "n",
                                          "stream",
                                          "seed",
                                          "logprobs",
                                          "top_logprobs",
                                          "logit_bias",
                                          "presence_penalty",
                                          "frequency_penalty",
                                          "repetition_penalty",
                                          "stream_options",
                                          "stop_token_ids",
                                          "ignore_eos",
                                          "max_completion_tokens",
                                          "messages",
                                          "model",
                                          "tools",
                                          "response_format",
                                          "tool_choice" };
    static const char *const wrong[] = { "{\"a\":1}", "[[]]", "[{}]" };
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    char body[256];

    (void)state;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        for (size_t k = 0; k < sizeof(wrong) / sizeof(wrong[0]); k++) {
            const int fd = connect_to(s);
            answer a;

            snprintf(body, sizeof(body),
                     "{\"model\":\"demo\",\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}],"
                     "\"%s\":%s}",
                     fields[i], wrong[k]);
            post(fd, chat, "", body);
            a = read_answer(fd);
            if (a.status != 400)
                fail_msg("%s: got %d", body, a.status);
            free(a.text);
            close(fd);
        }
    close_server(s);
}

/* A body of n_bytes: one long message. */
static int ask_with_body(const server *s, size_t n_bytes, bool chunked)
{
    static const char head[] =
        "{\"model\":\"demo\",\"messages\":[{\"role\":\"user\",\"content\":\"",
                      tail[] = "\"}]}";
    const int fd = connect_to(s);
    char *body = malloc(n_bytes), line[160];
    answer a;

    memset(body, 'a', n_bytes);
    memcpy(body, head, sizeof(head) - 1);
    memcpy(body + n_bytes - (sizeof(tail) - 1), tail, sizeof(tail) - 1);
    if (chunked)
        snprintf(line, sizeof(line),
                 "POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n%zx\r\n", chat,
                 n_bytes);
    else
        snprintf(line, sizeof(line), "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %zu\r\n\r\n",
                 chat, n_bytes);
    send_text(fd, line);
    send_bytes(fd, body, n_bytes);
    if (chunked)
        send_text(fd, "\r\n0\r\n\r\n");
    a = read_answer(fd);
    free(a.text);
    free(body);
    close(fd);
    return a.status;
}

static void bodies_too_large(void **state)
{
    yard_http_config config = YARD_HTTP_CONFIG_INIT;
    server *s = open_server(config);

    (void)state;
    assert_int_equal(ask_with_body(s, 1 << 20, true), 400); /* context_length_exceeded */
    if (!SANITIZED)
        assert_int_equal(ask_with_body(s, 64 << 20, false), 400);
    close_server(s);
    config.max_body_bytes = 100000;
    s = open_server(config);
    assert_int_equal(ask_with_body(s, 200, false), 200);
    assert_int_equal(ask_with_body(s, 100001, false), 413);
    assert_int_equal(ask_with_body(s, 100001, true), 413);
    assert_int_equal(ask_with_body(s, 10 << 20, false), 413);
    close_server(s);
}

static void headers_too_large(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const int fd = connect_to(s);
    answer a;

    (void)state;
    send_text(fd, "GET /health HTTP/1.1\r\nX: ");
    for (int i = 0; i < 1024; i++)
        send_text(fd, "0123456789012345678901234567890123456789012345678901234567890123456789");
    a = read_to_end(fd);
    assert_true(a.status == 0 || a.status / 100 == 4);
    free(a.text);
    close(fd);
    assert_int_equal(get_status(s, "/health"), 200);
    close_server(s);
}

static void no_http_at_all(void **state)
{
    static const char *const requests[] = { "\r\n\r\n",
                                            "hello\r\n\r\n",
                                            "GET /\r\n\r\n",
                                            "GET / HTTP/9.9\r\n\r\n",
                                            "\x16\x03\x01 TLS?\r\n\r\n",
                                            "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: "
                                            "-5\r\n\r\n",
                                            "POST /v1/chat/completions HTTP/1.1\r\nContent-Length: "
                                            "99999999999999999999\r\n\r\n" };
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);

    (void)state;
    for (size_t i = 0; i < sizeof(requests) / sizeof(requests[0]); i++) {
        const int fd = connect_to(s);
        answer a;

        send_text(fd, requests[i]);
        shutdown(fd, SHUT_WR);
        a = read_to_end(fd);
        assert_true(a.status == 0 || a.status / 100 == 4 || a.status == 505);
        free(a.text);
        close(fd);
    }
    assert_int_equal(get_status(s, "/health"), 200);
    close_server(s);
}

/* One byte now and then, for ever. */
static void a_slow_loris(void **state)
{
    static const char head[] = "POST /v1/chat/completions HTTP/1.1\r\nX: ";
    const uint64_t until_us = yard_now_us() + (uint64_t)PATIENCE_MS * 2000;
    yard_http_config config = YARD_HTTP_CONFIG_INIT;
    server *s;
    int fd, status;
    struct pollfd wait;

    (void)state;
    config.read_timeout_us = 300000;
    s = open_server(config);
    fd = connect_to(s);
    send_text(fd, head);
    wait = (struct pollfd){ .fd = fd, .events = POLLIN };
    for (int i = 0; i < PATIENCE_MS / 20 && poll(&wait, 1, 20) == 0; i++)
        send_text(fd, "x");
    assert_int_equal(wait.revents & POLLIN, POLLIN); /* its end */
    close(fd);
    do /* who is held up for as long is sent away, too */
        status = ask(s, chat, "", CHAT(",\"max_tokens\":3"));
    while (status == 0 && yard_now_us() < until_us);
    assert_int_equal(status, 200);
    close_server(s);
}

static void more_connections_than_allowed(void **state)
{
    yard_http_config config = YARD_HTTP_CONFIG_INIT;
    server *s;
    int fds[16];
    answer a;

    (void)state;
    config.max_connections = 8;
    s = open_server(config);
    for (int i = 0; i < 16; i++)
        fds[i] = connect_to(s); /* the kernel takes what the server does not yet */
    post(fds[15], chat, "", CHAT(",\"max_tokens\":3"));
    for (int i = 0; i < 15; i++)
        close(fds[i]);
    a = read_answer(fds[15]); /* its turn has come */
    assert_int_equal(a.status, 200);
    free(a.text);
    close(fds[15]);
    close_server(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bodies_cut_and_broken_at_every_byte),
        cmocka_unit_test(every_field_of_a_wrong_type),
        cmocka_unit_test(bodies_too_large),
        cmocka_unit_test(headers_too_large),
        cmocka_unit_test(no_http_at_all),
        cmocka_unit_test(a_slow_loris),
        cmocka_unit_test(more_connections_than_allowed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
