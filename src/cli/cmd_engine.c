/* switchyard engine: a pod, which serves its instances to fronts over RPC. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

#include "cli/cli.h"
#include "cli/engine_options.h"
#include "cli/pod_options.h"
#include "serve/serve.h"

enum { KEY_LISTEN = 0x6000, KEY_DRAIN_TIMEOUT, KEY_JSON, LOOK_US = 100000 };

typedef struct engine_args {
    const char *model, *address;
    double drain_s;
    bool json;
    yard_engine_config engine;
    yard_pod_options pod;
} engine_args;

static error_t parse(int key, char *arg, struct argp_state *state)
{
    engine_args *args = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        *args = (engine_args){ .address = "127.0.0.1:9000", .drain_s = 30 };
        state->child_inputs[0] = &args->engine;
        state->child_inputs[1] = &args->pod;
        return 0;
    case KEY_LISTEN:
        args->address = arg;
        return 0;
    case KEY_DRAIN_TIMEOUT:
        args->drain_s = (double)yard_cli_argp_f32(state, "--drain-timeout", arg, 0.0f, 86400.0f);
        return 0;
    case KEY_JSON:
        args->json = true;
        return 0;
    default:
        return yard_cli_parse_model(key, arg, state, &args->model);
    }
}

static const struct argp_option option_list[] = {
    { "listen", KEY_LISTEN, "ADDR", 0,
      "HOST:PORT (port 0: a free one, which is printed) or unix:PATH (default 127.0.0.1:9000)", 0 },
    { "drain-timeout", KEY_DRAIN_TIMEOUT, "S", 0,
      "Seconds that requests have to end after SIGTERM (default 30)", 0 },
    { "json", KEY_JSON, NULL, 0, "The line that says that it is ready as JSON", 0 },
    { 0 },
};

static const struct argp_child children[] = {
    { &yard_engine_argp, 0, "Computing:", 1 },
    { &yard_pod_argp, 0, "On several ranks:", 2 },
    { 0 },
};

static const struct argp engine_argp = {
    .options = option_list,
    .parser = parse,
    .args_doc = "MODEL",
    .doc =
        "Runs a model on the ranks of this machine and serves them over gRPC (proto/engine.proto) "
        "to fronts: 'switchyard serve MODEL --engines ADDR,..'."
        "\vIt listens from the beginning; once all ranks have their weights it says on standard "
        "output that it is ready. A rank that is lost is started again, and requests that had no "
        "output yet begin anew. SIGTERM and Ctrl-C refuse new requests and let those under way "
        "end; a second one does not. Under mpirun, Slurm or the like each process is one machine "
        "of a larger group.\n\n"
        "The address has neither passwords nor encryption: whoever reaches it uses the model. "
        "Listen on loopback, a unix socket, or a network of your own.\n\n"
        "Examples:\n"
        "  switchyard engine models/demo --listen unix:/run/demo.sock\n"
        "  switchyard engine models/demo --ranks 8 --tp 2 --listen 10.0.0.1:9000\n"
        "  mpirun -np 4 --map-by node switchyard engine MODEL --ranks 8 \\\n"
        "      --listen 0.0.0.0:9000\n",
    .children = children,
};

static volatile sig_atomic_t n_asked; /* to end */

static void ask_to_end(int number)
{
    (void)number;
    n_asked++;
}

/* One that was ignored from outside stays so: a parent process decides for both. */
static void catch_signals(void)
{
    static const int numbers[] = { SIGTERM, SIGINT };
    struct sigaction action = { .sa_handler = ask_to_end }, old;

    signal(SIGPIPE, SIG_IGN); /* whoever read the messages may be gone: the pod goes on */
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        if (sigaction(numbers[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            sigaction(numbers[i], &action, NULL);
}

static void say_ready(const engine_args *args, const yard_pod *pod, yard_engine_server *server,
                      uint64_t begun_us)
{
    const double s = (double)(yard_now_us() - begun_us) * 1e-6;
    const char *address = yard_engine_server_address(server);
    const uint32_t n = yard_pod_instance_count(pod);

    if (args->json)
        printf("{\"ready\":true,\"address\":\"%s\",\"instances\":%u,\"first_instance\":%u,"
               "\"seconds\":%.3f}\n",
               address, n, yard_pod_first_instance(pod), s);
    else
        printf("ready in %.1f s: %u %s at %s\n", s, n, n == 1 ? "instance" : "instances", address);
    fflush(stdout);
}

static yard_status serve(const engine_args *args, yard_pod *pod, yard_engine_server *server,
                         yard_error *err)
{
    const uint64_t begun_us = yard_now_us();
    yard_status st = YARD_OK;
    bool said = false;

    while (st == YARD_OK && n_asked == 0) {
        st = yard_engine_server_run(server, LOOK_US, err);
        if (!said && yard_pod_serves(pod)) {
            said = true;
            say_ready(args, pod, server, begun_us);
        }
    }
    return st;
}

static yard_status drain(const engine_args *args, yard_engine_server *server, yard_error *err)
{
    const uint64_t until_us = yard_now_us() + (uint64_t)(args->drain_s * 1e6);
    yard_status st = YARD_OK;

    fprintf(stderr, "switchyard engine: ending; requests have %.0f s to end\n", args->drain_s);
    yard_engine_server_drain(server);
    while (st == YARD_OK && n_asked < 2 && yard_now_us() < until_us &&
           !yard_engine_server_idle(server))
        st = yard_engine_server_run(server, LOOK_US, err);
    if (st == YARD_OK && !yard_engine_server_idle(server))
        fprintf(stderr, "switchyard engine: ended with requests under way\n");
    return st;
}

static yard_status run(const engine_args *args, const yard_pod_config *config, yard_error *err)
{
    yard_engine_server_config server_config = { .address = args->address };
    yard_engine_server *server = NULL;
    yard_pod_engine engine;
    yard_pod *pod = NULL;
    yard_status st = yard_cli_check_model(args->model, err);

    if (st == YARD_OK)
        st = yard_pod_print_budget(config, err);
    if (st == YARD_OK)
        st = yard_pod_create(&pod, config, err); /* before any thread */
    if (st == YARD_OK)
        st = yard_pod_engine_open(&engine, pod, config, err);
    if (st == YARD_OK) {
        server_config.engine = yard_pod_engine_served(&engine);
        st = yard_engine_server_open(&server, &server_config, err);
    }
    if (st == YARD_OK)
        fprintf(stderr, "switchyard engine: listening on %s\n", yard_engine_server_address(server));
    if (st == YARD_OK)
        st = serve(args, pod, server, err);
    if (st == YARD_OK)
        st = drain(args, server, err);
    yard_engine_server_close(server);
    if (st == YARD_OK && config->n_pods > 1 && n_asked < 2)
        st = yard_pod_finish(pod, err);
    yard_pod_destroy(pod);
    return st;
}

int yard_cmd_engine(int argc, char **argv)
{
    engine_args args = { 0 };
    yard_fabric_env storage;
    yard_pod_config config;
    yard_error err = { 0 };
    yard_status st;

    yard_cli_parse_args(&engine_argp, "switchyard engine", argc, argv, 0, &args);
    args.engine.model_dir = args.model;
    catch_signals();
    st = yard_pod_options_config(&args.pod, &args.engine, &storage, &config, &err);
    if (st == YARD_OK)
        st = run(&args, &config, &err);
    return st == YARD_OK ? yard_cli_close_stdout("engine") : yard_cli_fail("engine", &err);
}
