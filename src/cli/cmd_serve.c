/* switchyard serve: the OpenAI API over engines, its own or others'. */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cli/serve_options.h"
#include "cli/serve_supervise.h"

enum { BACKLOG = 4096 };

static int try_to_listen(const struct addrinfo *at)
{
    const int fd = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
    const int one = 1;
    int code;

    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, at->ai_addr, at->ai_addrlen) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    code = errno;
    close(fd);
    errno = code;
    return -1;
}

static yard_status listen_at(const yard_serve_options *o, int *out, yard_error *err)
{
    const struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE };
    struct addrinfo *list = NULL;
    char port[8];
    int code;

    snprintf(port, sizeof(port), "%u", o->port);
    code = getaddrinfo(o->host, port, &hints, &list);
    if (code != 0)
        return yard_fail(err, YARD_EIO, "--host %s: %s", o->host, gai_strerror(code));
    *out = -1;
    for (const struct addrinfo *at = list; at && *out < 0; at = at->ai_next)
        *out = try_to_listen(at);
    code = errno;
    freeaddrinfo(list);
    if (*out < 0)
        return yard_fail(err, YARD_EIO, "cannot listen on %s port %u: %s", o->host, o->port,
                         strerror(code));
    return YARD_OK;
}

/* "http://HOST:PORT" as a client on this machine reaches it. */
static void url_of(int fd, char *out, size_t n_out)
{
    struct sockaddr_storage name = { 0 };
    socklen_t n = sizeof(name);
    char host[128] = "127.0.0.1", port[16] = "0";

    getsockname(fd, (struct sockaddr *)&name, &n);
    getnameinfo((struct sockaddr *)&name, n, host, sizeof(host), port, sizeof(port),
                NI_NUMERICHOST | NI_NUMERICSERV);
    if (!strcmp(host, "0.0.0.0") || !strcmp(host, "::"))
        snprintf(host, sizeof(host), "127.0.0.1");
    snprintf(out, n_out, strchr(host, ':') ? "http://[%s]:%s" : "http://%s:%s", host, port);
}

static void print_ready(void *ctx)
{
    const yard_serve_options *o = ctx;
    char url[192];

    url_of(o->listen_fd, url, sizeof(url));
    printf("ready: %s serves %s; try\n"
           "  curl %s/v1/chat/completions -H 'Content-Type: application/json'%s -d "
           "'{\"model\": \"%s\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'\n",
           url, o->served_name, url, o->api_keys.n_words ? " -H 'Authorization: Bearer KEY'" : "",
           o->served_name);
    fflush(stdout);
}

static void warn(void *ctx, const char *line)
{
    (void)ctx;
    fprintf(stderr, "switchyard serve: %s\n", line);
}

static const yard_link_ops rpc_link = { .open = yard_link_open,
                                        .close = yard_link_close,
                                        .fd = yard_link_fd,
                                        .next = yard_link_next,
                                        .generate = yard_link_generate,
                                        .abort = yard_link_abort };

static yard_status open_log(const char *path, FILE **out, yard_error *err)
{
    *out = NULL;
    if (!path)
        return YARD_OK;
    *out = !strcmp(path, "-") ? stdout : fopen(path, "ae");
    if (!*out)
        return yard_fail(err, YARD_EIO, "--access-log %s: %s", path, strerror(errno));
    setvbuf(*out, NULL, _IOLBF, BUFSIZ); /* whoever kills the front has its last lines too */
    return YARD_OK;
}

/* As many descriptors as connections are allowed, and some for engines and files. */
static void allow_connections(uint32_t max_connections)
{
    struct rlimit limit;
    const rlim_t want = (rlim_t)max_connections + 256;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= want)
        return;
    limit.rlim_cur = want < limit.rlim_max ? want : limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
}

/* Signals are read from a descriptor from before the first thread on, so that none takes them. */
static int catch_signals(void)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    signal(SIGPIPE, SIG_IGN);
    return signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
}

static yard_status run_front(yard_serve_options *o, yard_error *err)
{
    yard_front_config front_config = o->front;
    yard_http_config http_config = o->http;
    yard_front *front = NULL;
    yard_http *http = NULL;
    yard_status st;

    http_config.stop_fd = catch_signals();
    http_config.listen_fd = o->listen_fd;
    http_config.api_key = (const char *const *)o->api_keys.word;
    http_config.n_api_keys = (uint32_t)o->api_keys.n_words;
    http_config.ready = print_ready;
    http_config.ready_ctx = o;
    allow_connections(http_config.max_connections);
    front_config.model_dir = o->model;
    front_config.model = o->served_name;
    front_config.template_name = o->template_name;
    front_config.engine = (const char *const *)o->engines.word;
    front_config.n_engines = (uint32_t)o->engines.n_words;
    front_config.link = &rpc_link;
    front_config.notify.warn = warn;
    st = open_log(o->access_log, &http_config.access_log, err);
    if (st == YARD_OK)
        st = yard_front_create(&front, &front_config, err);
    if (st == YARD_OK)
        st = yard_http_create(&http, &http_config, front, err);
    if (st == YARD_OK)
        st = yard_http_run(http, err);
    yard_http_destroy(http);
    yard_front_destroy(front);
    if (http_config.access_log && http_config.access_log != stdout)
        fclose(http_config.access_log);
    return st;
}

static void add_words(yard_words *to, const yard_words *from)
{
    for (size_t i = 0; i < from->n_words; i++)
        yard_words_add(to, from->word[i]);
}

/* Command lines of the two children. */
static void write_commands(const yard_serve_options *o, const char *socket, yard_words *engine,
                           yard_words *front)
{
    char text[160];

    yard_words_add(engine, "switchyard");
    yard_words_add(engine, "engine");
    yard_words_add(front, "switchyard");
    yard_words_add(front, "serve");
    snprintf(text, sizeof(text), "--listen=unix:%s", socket);
    yard_words_add(engine, text);
    snprintf(text, sizeof(text), "--engines=unix:%s", socket);
    yard_words_add(front, text);
    snprintf(text, sizeof(text), "--listen-fd=%d", o->listen_fd);
    yard_words_add(front, text);
    add_words(engine, &o->for_engine);
    add_words(front, &o->for_front);
    yard_words_add(engine, "--");
    yard_words_add(engine, o->model);
    yard_words_add(front, "--");
    yard_words_add(front, o->model);
}

/* A folder that only this user may enter. XDG_RUNTIME_DIR is another's after su: then /tmp. */
static yard_status make_dir(char *out, size_t n_out, yard_error *err)
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");

    if (runtime && runtime[0] && strlen(runtime) < 64) {
        snprintf(out, n_out, "%s/switchyard-XXXXXX", runtime);
        if (mkdtemp(out))
            return YARD_OK;
    }
    snprintf(out, n_out, "%s/switchyard-XXXXXX", P_tmpdir);
    if (!mkdtemp(out))
        return yard_fail(err, YARD_EIO, "%s: cannot make a folder for the engine's socket: %s",
                         P_tmpdir, strerror(errno));
    return YARD_OK;
}

static yard_status run_both(const yard_serve_options *o, yard_error *err)
{
    yard_words engine = { 0 }, front = { 0 };
    char dir[96], socket[112];
    yard_status st;

    if ((st = make_dir(dir, sizeof(dir), err)) != YARD_OK)
        return st;
    snprintf(socket, sizeof(socket), "%s/engine", dir);
    write_commands(o, socket, &engine, &front);
    st = yard_supervise(&(yard_supervise_config){ .engine = engine.word,
                                                  .front = front.word,
                                                  .listen_fd = o->listen_fd },
                        err);
    unlink(socket);
    rmdir(dir);
    yard_words_release(&engine);
    yard_words_release(&front);
    return st;
}

int yard_cmd_serve(int argc, char **argv)
{
    yard_serve_options o;
    yard_error err = { 0 };
    yard_status st;

    yard_serve_options_parse(&o, argc, argv);
    st = yard_cli_check_model(o.model, &err);
    if (st == YARD_OK && o.listen_fd < 0)
        st = listen_at(&o, &o.listen_fd, &err);
    if (st == YARD_OK)
        st = o.engines.n_words > 0 ? run_front(&o, &err) : run_both(&o, &err);
    yard_serve_options_release(&o);
    if (st != YARD_OK)
        return yard_cli_fail("serve", &err);
    return yard_cli_close_stdout("serve");
}
