/* The HTTP server and clients that leave, or do not read. ctest: sanitize */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <dirent.h>
#include <malloc.h>

#include "serve/http_client.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

static void leaving_before_the_first_token(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    int fd = connect_to(s);

    (void)state;
    post(fd, chat, "", CHAT(",\"seed\":42"));
    wait_for(&n_generated, 1);
    close(fd);
    wait_for(&n_aborted, 1);
    fd = connect_to(s);
    post(fd, chat, "", CHAT(",\"seed\":42,\"stream\":true"));
    wait_for(&n_generated, 2);
    shutdown(fd, SHUT_WR); /* half closed is closed */
    wait_for(&n_aborted, 2);
    close(fd);
    wait_for_no_jobs(s);
    close_server(s);
}

static void leaving_within_a_stream(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const int fd = connect_to(s);
    answer a = { 0 };

    (void)state;
    post(fd, chat, "", CHAT(",\"seed\":43,\"stream\":true"));
    while (a.n_bytes < 20000)
        receive(fd, &a);
    free(a.text);
    close(fd);
    wait_for(&n_aborted, 1);
    wait_for_no_jobs(s);
    close_server(s);
}

static void not_reading(void **state)
{
    yard_http_config config = YARD_HTTP_CONFIG_INIT;
    const int small = 4096;
    server *s;
    int fd;

    (void)state;
    config.max_unread_bytes = 256 << 10;
    s = open_server(config);
    fd = connect_to(s);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
    post(fd, chat, "", CHAT(",\"seed\":43,\"stream\":true"));
    wait_for(&n_aborted, 1);
    wait_for_no_jobs(s);
    close(fd);
    assert_int_equal(ask(s, chat, "", CHAT(",\"max_tokens\":3")), 200);
    close_server(s);
}

static uint32_t count_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    uint32_t n = 0;

    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

/* Without a connection: the one that there is has two ends. */
static uint32_t count_fds_alone(const server *s)
{
    const int fd = connect_to(s);
    answer a;
    uint32_t n;

    send_text(fd, "GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n");
    a = read_answer(fd);
    assert_int_equal(a.status, 200);
    free(a.text);
    n = count_fds() - 2;
    close(fd);
    return n;
}

static void wait_for_fds(uint32_t at_most)
{
    const uint64_t until_us = yard_now_us() + (uint64_t)PATIENCE_MS * 1000;

    while (count_fds() > at_most) {
        assert_true(yard_now_us() < until_us);
        nap();
    }
}

/* The server has read the end of every connection, and what came before it; what it gave to the
 * engine, which ends nothing of this by itself, it has taken back. */
static void wait_until_left(const server *s, uint32_t n_fds)
{
    wait_for_fds(n_fds);
    wait_for_no_jobs(s); /* asks, by connections */
    wait_for_fds(n_fds);
    wait_for(&n_aborted, atomic_load(&n_generated));
}

/* Leaving after any number of bytes of a request: a job begins for the whole one only. */
static void leaving_within_a_request(void **state)
{
    static const char whole[] = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
                                "Content-Length: 74\r\n\r\n" CHAT(",\"seed\":42");
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const uint32_t n_fds = count_fds_alone(s);

    (void)state;
    for (size_t n = 0; n < sizeof(whole); n += SANITIZED ? 7 : 1) {
        const int fd = connect_to(s);

        send_bytes(fd, whole, n);
        close(fd);
    }
    wait_until_left(s, n_fds);
    assert_true(atomic_load(&n_generated) <= 1);
    assert_int_equal(ask(s, chat, "", CHAT(",\"max_tokens\":3")), 200);
    close_server(s);
}

static void abandon(const server *s, int n, int batch)
{
    int fds[64];

    for (int i = 0; i < n; i += batch) {
        for (int k = 0; k < batch; k++) {
            fds[k] = connect_to(s);
            post(fds[k], chat, "",
                 k % 2 ? CHAT(",\"seed\":42") : CHAT(",\"seed\":43,\"stream\":true"));
        }
        for (int k = 0; k < batch; k++)
            close(fds[k]);
    }
}

static void thousands_abandoned(void **state)
{
    server *s = open_server((yard_http_config)YARD_HTTP_CONFIG_INIT);
    const int n = SANITIZED ? 512 : 2048;
    const uint32_t n_fds = count_fds_alone(s);
    size_t n_bytes;

    (void)state;
    abandon(s, n, 64);
    wait_until_left(s, n_fds);
    n_bytes = mallinfo2().uordblks;
    abandon(s, n, 64);
    wait_until_left(s, n_fds);
    if (!SANITIZED)
        assert_true(mallinfo2().uordblks < n_bytes + (64 << 10));
    close_server(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(leaving_before_the_first_token),
        cmocka_unit_test(leaving_within_a_stream),
        cmocka_unit_test(not_reading),
        cmocka_unit_test(leaving_within_a_request),
        cmocka_unit_test(thousands_abandoned),
    };

    mallopt(M_ARENA_MAX, 1); /* so that mallinfo2() tells of all threads */
    return cmocka_run_group_tests(tests, NULL, NULL);
}
