/* Link and server in two processes under load: 1,000 streams at 10 tokens/s with every token
 * compared, and what a request waits for its first token when the engine has it at once. Prints
 * what it took; nothing is asserted about time. ctest: long */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "scripted.h"

enum {
    N_STREAMS = 1000,
    RATE = 10,
    SECONDS = 10,
    N_TOKENS = RATE * SECONDS,
    N_LONE = 500,
    LONE_US = 20000, /* between lone requests: 50 a second */
    PATIENCE_US = 120000000
};

static const scripted_config script = {
    .n_instances = 2, .max_requests = 1024, .context = 4096, .vocab = 1000
};

typedef struct stream {
    uint32_t n_tokens;
    bool ended;
    uint64_t asked_us, first_us;
} stream;

typedef struct load {
    char address[64];
    pid_t engine;
    yard_link *link;
    bool up;
    uint32_t n_downs, n_ended;
    uint64_t n_outputs;
    stream streams[N_STREAMS];
} load;

static load *begin(const char *rate, uint64_t timeout_us)
{
    const char *build = getenv("YARD_BUILD_DIR");
    load *l = calloc(1, sizeof(*l));
    yard_link_config c = { .timeout_us = timeout_us };
    char program[512];
    yard_error err = { 0 };

    assert_non_null(l);
    snprintf(l->address, sizeof(l->address), "unix:/tmp/yard-load-%d-%s", (int)getpid(), rate);
    snprintf(program, sizeof(program), "%s/tests/scripted_engine", build ? build : "build");
    fflush(NULL);
    l->engine = fork();
    if (l->engine == 0) {
        execl(program, "scripted_engine", "--listen", l->address, "--rate", rate, "--instances",
              "2", (char *)NULL);
        _exit(127);
    }
    c.address = l->address;
    if (yard_link_open(&l->link, &c, &err) != YARD_OK)
        fail_msg("%s", err.message);
    return l;
}

static void end(load *l, const char *what)
{
    struct rusage mine, engines;
    int status;

    yard_link_close(l->link);
    kill(l->engine, SIGTERM);
    assert_int_equal(waitpid(l->engine, &status, 0), l->engine);
    assert_int_equal(status, 0);
    getrusage(RUSAGE_SELF, &mine);
    getrusage(RUSAGE_CHILDREN, &engines);
    printf("%s: so far %.2f s of CPU here, %.2f s in engines\n", what,
           (double)mine.ru_utime.tv_sec + (double)mine.ru_stime.tv_sec +
               1e-6 * (double)(mine.ru_utime.tv_usec + mine.ru_stime.tv_usec),
           (double)engines.ru_utime.tv_sec + (double)engines.ru_stime.tv_sec +
               1e-6 * (double)(engines.ru_utime.tv_usec + engines.ru_stime.tv_usec));
    free(l);
}

static void fill_prompt(uint32_t tag, int32_t *prompt)
{
    for (int i = 0; i < 16; i++)
        prompt[i] = (int32_t)(tag % 20 * 16) + i; /* 20 distinct ones */
}

static void ask(load *l, uint32_t tag, uint32_t n_new)
{
    yard_request r = YARD_REQUEST_INIT;
    int32_t prompt[16];

    fill_prompt(tag, prompt);
    r.prompt = prompt;
    r.n_prompt = 16;
    r.max_new_tokens = n_new;
    l->streams[tag].asked_us = yard_now_us();
    assert_true(yard_link_generate(l->link, tag % 2, tag, &r));
}

static void take(load *l, const yard_link_tokens *t)
{
    stream *s = &l->streams[t->tag];
    int32_t prompt[16];

    fill_prompt((uint32_t)t->tag, prompt);
    assert_false(s->ended);
    if (s->n_tokens == 0)
        s->first_us = yard_now_us();
    for (uint32_t i = 0; i < t->n_tokens; i++)
        assert_int_equal(t->token[i], scripted_token(&script, prompt, 16, 0, s->n_tokens++));
    s->ended = t->finish != YARD_RUNNING;
    l->n_ended += s->ended;
    l->n_outputs++;
}

static void pump(load *l, int timeout_ms)
{
    struct pollfd fd = { .fd = yard_link_fd(l->link), .events = POLLIN };
    yard_link_event e;

    if (poll(&fd, 1, timeout_ms) <= 0)
        return;
    while (yard_link_next(l->link, &e)) {
        l->n_downs += e.kind == YARD_LINK_DOWN;
        l->up = (l->up || e.kind == YARD_LINK_UP) && e.kind != YARD_LINK_DOWN;
        if (e.kind == YARD_LINK_TOKENS)
            take(l, &e.tokens);
    }
}

#define PUMP_UNTIL(condition)                                                                      \
    for (uint64_t until_us = yard_now_us() + PATIENCE_US; !(condition); pump(l, 100))              \
    assert_true(yard_now_us() < until_us)

static void a_thousand_streams(void **state)
{
    load *l = begin("10", PATIENCE_US);
    const uint64_t begun_us = yard_now_us();

    (void)state;
    PUMP_UNTIL(l->up);
    for (uint32_t tag = 0; tag < N_STREAMS; tag++)
        ask(l, tag, N_TOKENS);
    PUMP_UNTIL(l->n_ended == N_STREAMS);
    assert_int_equal(l->n_downs, 0);
    for (uint32_t tag = 0; tag < N_STREAMS; tag++)
        assert_int_equal(l->streams[tag].n_tokens, N_TOKENS);
    printf("%d streams of %d tokens at %d tokens/s: %.1f s, %.0f outputs/s\n", N_STREAMS, N_TOKENS,
           RATE, (double)(yard_now_us() - begun_us) * 1e-6,
           (double)l->n_outputs * 1e6 / (double)(yard_now_us() - begun_us));
    end(l, "streams");
}

static int compare(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return x < y ? -1 : x > y;
}

static void lone_requests(void **state)
{
    load *l = begin("0", PATIENCE_US);
    uint64_t wait_us[N_LONE], next_us;

    (void)state;
    PUMP_UNTIL(l->up);
    next_us = yard_now_us();
    for (uint32_t tag = 0; tag < N_LONE; tag++) {
        ask(l, tag, 1);
        PUMP_UNTIL(l->streams[tag].ended);
        wait_us[tag] = l->streams[tag].first_us - l->streams[tag].asked_us;
        for (next_us += LONE_US; yard_now_us() < next_us;)
            pump(l, 1);
    }
    qsort(wait_us, N_LONE, sizeof(wait_us[0]), compare);
    printf("%d requests at 50/s: first token after %u us p50, %u us p99\n", N_LONE,
           (unsigned int)wait_us[N_LONE / 2], (unsigned int)wait_us[N_LONE * 99 / 100]);
    end(l, "lone requests");
}

/* The kernel still takes what is sent to it; nobody answers. */
static void a_stopped_engine(void **state)
{
    load *l = begin("0", 1000000);
    uint32_t tag = 0;

    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        const uint32_t stopped = tag++;

        PUMP_UNTIL(l->up);
        kill(l->engine, SIGSTOP);
        ask(l, stopped, 4000);
        PUMP_UNTIL(!l->up);
        kill(l->engine, SIGCONT);
        do { /* a busy machine may lose the link as well */
            PUMP_UNTIL(l->up);
            ask(l, tag, 10);
            PUMP_UNTIL(l->streams[tag].ended || !l->up);
        } while (!l->streams[tag++].ended);
        assert_false(l->streams[stopped].ended);
    }
    end(l, "a stopped engine");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lone_requests),
        cmocka_unit_test(a_thousand_streams),
        cmocka_unit_test(a_stopped_engine),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
