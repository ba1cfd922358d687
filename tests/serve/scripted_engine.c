/* A pod without a model, on the engine's RPC; tokens are those of scripted_token().
 *
 *     scripted_engine --listen unix:/tmp/x --rate 10 [--instances 2] [--max-requests 1024]
 *                     [--context 4096] [--vocab 1000] [--prefill-ms 0]
 *
 * Prints "listening on ADDRESS" once clients can connect; SIGTERM ends it. */
#include <signal.h>

#include "scripted.h"

static volatile sig_atomic_t stops;

static void stop(int number)
{
    stops = number;
}

static double number_of(const char *text)
{
    char *end;
    const double x = strtod(text, &end);

    if (*end || x < 0) {
        fprintf(stderr, "scripted_engine: want a number, got '%s'\n", text);
        exit(2);
    }
    return x;
}

static const char *read_options(int argc, char **argv, scripted_config *c)
{
    const char *address = NULL;

    for (int i = 1; i + 1 < argc; i += 2) {
        const char *key = argv[i], *value = argv[i + 1];

        if (!strcmp(key, "--listen"))
            address = value;
        else if (!strcmp(key, "--rate"))
            c->rate = number_of(value);
        else if (!strcmp(key, "--instances"))
            c->n_instances = (uint32_t)number_of(value);
        else if (!strcmp(key, "--max-requests"))
            c->max_requests = (uint32_t)number_of(value);
        else if (!strcmp(key, "--context"))
            c->context = (uint32_t)number_of(value);
        else if (!strcmp(key, "--vocab"))
            c->vocab = (uint32_t)number_of(value);
        else if (!strcmp(key, "--prefill-ms"))
            c->prefill_us = (uint64_t)(number_of(value) * 1000);
        else
            return NULL;
    }
    return c->n_instances && c->max_requests && c->vocab > 3 ? address : NULL;
}

int main(int argc, char **argv)
{
    scripted_engine e = { .config = { .n_instances = 1,
                                      .max_requests = 1024,
                                      .context = 4096,
                                      .vocab = 1000,
                                      .rate = 10 } };
    yard_engine_server_config config = { .address = read_options(argc, argv, &e.config),
                                         .engine = scripted_served(&e) };
    yard_engine_server *server = NULL;
    yard_error err = { 0 };
    yard_status st;

    if (!config.address) {
        fprintf(stderr, "usage: scripted_engine --listen ADDRESS --rate R [--instances N] "
                        "[--max-requests N] [--context N] [--vocab N] [--prefill-ms MS]\n");
        return 2;
    }
    signal(SIGTERM, stop);
    signal(SIGINT, stop);
    st = yard_engine_server_open(&server, &config, &err);
    if (st == YARD_OK) {
        printf("listening on %s\n", yard_engine_server_address(server));
        fflush(stdout);
    }
    while (st == YARD_OK && !stops)
        st = yard_engine_server_run(server, 200000, &err);
    yard_engine_server_close(server);
    scripted_release(&e);
    if (st != YARD_OK)
        fprintf(stderr, "scripted_engine: %s\n", err.message);
    return st == YARD_OK ? EXIT_SUCCESS : EXIT_FAILURE;
}
