/* An endpoint over gRPC's C core: its address, how it listens or connects, its end. */
#include <errno.h>
#include <grpc/grpc_security.h>
#include <grpc/support/log.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <unistd.h>

#include "serve/rpc_impl.h"

enum {
    DEFAULT_MAX_CALLS = 1024,
    DEFAULT_MAX_MESSAGE = 4 << 20,
    DEFAULT_KEEPALIVE_US = 2000000,
    DEFAULT_BACKOFF_US = 2000000,
    MIN_BACKOFF_MS = 50,
    RESOLVE_MS = 1000, /* between looks at a host name */
    MAX_METADATA = 16384,
    WINDOW = 1 << 20 /* bytes of a call under way to a reader that takes none */
};

static bool is_port(const char *text)
{
    unsigned long port = 0;
    size_t n = 0;

    for (; text[n] >= '0' && text[n] <= '9' && n < 6; n++)
        port = port * 10 + (unsigned long)(text[n] - '0');
    return n > 0 && !text[n] && port <= 65535;
}

static yard_status check_address(const char *address, yard_error *err)
{
    const size_t max_path = sizeof(((struct sockaddr_un *)NULL)->sun_path) - 1;
    const char *colon = strrchr(address, ':');
    bool ok;

    if (!strncmp(address, "unix:", 5))
        ok = address[5] && strlen(address + 5) <= max_path;
    else
        ok = colon && colon > address && is_port(colon + 1) &&
             strlen(address) < YARD_RPC_ADDRESS_BYTES - 16 &&
             (address[0] == '[' || !memchr(address, ':', (size_t)(colon - address)));
    return ok ? YARD_OK
              : yard_fail(err, YARD_EINVAL,
                          "address: want host:port, [IPv6]:port or unix:path of at most %zu bytes, "
                          "got '%s'",
                          max_path, address);
}

static void drop_log(gpr_log_func_args *args)
{
    (void)args;
}

static yard_status open_fds(yard_rpc *rpc, yard_error *err)
{
    struct epoll_event readable = { .events = EPOLLIN };

    rpc->fd = epoll_create1(EPOLL_CLOEXEC);
    rpc->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    rpc->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (rpc->fd < 0 || rpc->wake < 0 || rpc->timer < 0 ||
        epoll_ctl(rpc->fd, EPOLL_CTL_ADD, rpc->wake, &readable) != 0 ||
        epoll_ctl(rpc->fd, EPOLL_CTL_ADD, rpc->timer, &readable) != 0)
        return yard_fail(err, YARD_EIO, "%s: no descriptors: %s", rpc->config.address,
                         strerror(errno));
    return YARD_OK;
}

static yard_status create(yard_rpc **out, const yard_rpc_config *config, yard_error *err)
{
    yard_rpc *rpc;
    yard_status st = check_address(config->address, err);

    if (st != YARD_OK)
        return st;
    rpc = calloc(1, sizeof(*rpc));
    if (!rpc)
        return yard_fail(err, YARD_ENOMEM, "rpc: %zu bytes", sizeof(*rpc));
    gpr_set_log_function(drop_log); /* what matters comes as statuses */
    grpc_init();
    pthread_mutex_init(&rpc->lock, NULL);
    rpc->config = *config;
    if (!rpc->config.max_calls)
        rpc->config.max_calls = DEFAULT_MAX_CALLS;
    if (!rpc->config.max_message_bytes)
        rpc->config.max_message_bytes = DEFAULT_MAX_MESSAGE;
    if (!rpc->config.keepalive_us)
        rpc->config.keepalive_us = DEFAULT_KEEPALIVE_US;
    if (!rpc->config.max_backoff_us)
        rpc->config.max_backoff_us = DEFAULT_BACKOFF_US;
    rpc->ready_end = &rpc->ready;
    rpc->new_tag = (yard_rpc_tag){ .kind = YARD_RPC_TAG_NEW_CALL };
    rpc->shutdown_tag = (yard_rpc_tag){ .kind = YARD_RPC_TAG_SHUTDOWN };
    rpc->queue = grpc_completion_queue_create_for_next(NULL);
    rpc->fd = rpc->wake = rpc->timer = -1;
    *out = rpc;
    return open_fds(rpc, err);
}

static yard_status start_thread(yard_rpc *rpc, yard_error *err)
{
    rpc->has_thread = pthread_create(&rpc->thread, NULL, yard_rpc_run, rpc) == 0;
    return rpc->has_thread ? YARD_OK
                           : yard_fail(err, YARD_ENOMEM, "%s: no thread", rpc->config.address);
}

static grpc_arg integer(char *key, uint64_t value)
{
    return (grpc_arg){ .type = GRPC_ARG_INTEGER,
                       .key = key,
                       .value.integer = value > INT32_MAX ? INT32_MAX : (int)value };
}

/* Of both sides. Probes are answered however often they come. Returns how many. */
static size_t common_args(const yard_rpc *rpc, grpc_arg *args)
{
    const yard_rpc_config *c = &rpc->config;
    size_t n = 0;

    args[n++] = integer(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, c->max_message_bytes);
    args[n++] = integer(GRPC_ARG_MAX_METADATA_SIZE, MAX_METADATA);
    /* or the window grows with what the connection takes, whether the reader does or not */
    args[n++] = integer(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    args[n++] = integer(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, WINDOW);
    args[n++] = integer(GRPC_ARG_KEEPALIVE_TIME_MS, c->keepalive_us / 1000);
    args[n++] = integer(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, c->keepalive_us / 1000);
    args[n++] = integer(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    return n;
}

/* gRPC would take the place of whoever listens on the path. */
static bool somebody_listens(const char *path)
{
    struct sockaddr_un to = { .sun_family = AF_UNIX };
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool listens;

    snprintf(to.sun_path, sizeof(to.sun_path), "%s", path);
    listens = fd >= 0 && connect(fd, (const struct sockaddr *)&to, sizeof(to)) == 0;
    if (fd >= 0)
        close(fd);
    return listens;
}

static yard_status bind_server(yard_rpc *rpc, yard_error *err)
{
    const char *address = rpc->config.address;
    const bool unix_path = !strncmp(address, "unix:", 5);
    grpc_server_credentials *plain;
    int port;

    if (unix_path && somebody_listens(address + 5))
        return yard_fail(err, YARD_EIO, "%s: somebody listens there already", address);
    plain = grpc_insecure_server_credentials_create();
    port = grpc_server_add_http2_port(rpc->server, address, plain);
    grpc_server_credentials_release(plain);
    if (port <= 0)
        return yard_fail(err, YARD_EIO,
                         "%s: cannot listen there: taken, not allowed, or no address of this "
                         "machine",
                         address);
    if (unix_path)
        snprintf(rpc->address, sizeof(rpc->address), "%s", address);
    else
        snprintf(rpc->address, sizeof(rpc->address), "%.*s:%d",
                 (int)(strrchr(address, ':') - address), address, port);
    return YARD_OK;
}

yard_status yard_rpc_listen(yard_rpc **out, const yard_rpc_config *config, yard_error *err)
{
    yard_rpc *rpc = NULL;
    yard_status st = create(&rpc, config, err);

    if (st == YARD_OK) {
        grpc_arg args[12];
        size_t n = common_args(rpc, args);
        grpc_channel_args all = { .args = args };

        /* Clients without a call are not probed: libraries look at such a connection now and then
         * only (every 5 s the C core's), and would lose it between two calls. */
        args[n++] = integer(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 0);
        args[n++] = integer(GRPC_ARG_ALLOW_REUSEPORT, 0);
        args[n++] = integer(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
        args[n++] = integer(GRPC_ARG_MAX_CONCURRENT_STREAMS, rpc->config.max_calls);
        all.num_args = n;
        rpc->server = grpc_server_create(&all, NULL);
        grpc_server_register_completion_queue(rpc->server, rpc->queue, NULL);
        st = bind_server(rpc, err);
        grpc_server_start(rpc->server);
        if (st == YARD_OK)
            yard_rpc_await_call(rpc);
    }
    if (st == YARD_OK)
        st = start_thread(rpc, err);
    if (st != YARD_OK) {
        yard_rpc_close(rpc);
        return st;
    }
    *out = rpc;
    return YARD_OK;
}

yard_status yard_rpc_connect(yard_rpc **out, const yard_rpc_config *config, yard_error *err)
{
    yard_rpc *rpc = NULL;
    yard_status st = create(&rpc, config, err);

    if (st == YARD_OK) {
        const uint64_t backoff_ms = rpc->config.max_backoff_us / 1000;
        grpc_channel_credentials *plain = grpc_insecure_credentials_create();
        grpc_arg args[16];
        size_t n = common_args(rpc, args);
        grpc_channel_args all = { .args = args };

        args[n++] = integer(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, MIN_BACKOFF_MS);
        args[n++] = integer(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, backoff_ms);
        /* also the time that a connection has to be made */
        args[n++] = integer(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, rpc->config.keepalive_us / 1000);
        args[n++] = integer(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, RESOLVE_MS);
        args[n++] = integer(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
        args[n++] = integer(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
        args[n++] = integer(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
        args[n++] = integer(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
        args[n++] = integer(GRPC_ARG_ENABLE_RETRIES, 0);
        all.num_args = n;
        rpc->channel = grpc_channel_create(rpc->config.address, plain, &all);
        grpc_channel_credentials_release(plain);
        st = start_thread(rpc, err);
    }
    if (st != YARD_OK) {
        yard_rpc_close(rpc);
        return st;
    }
    *out = rpc;
    return YARD_OK;
}

/* Every batch completes once its call is cancelled, and with the last one the thread ends. */
static void stop(yard_rpc *rpc)
{
    yard_rpc_cancel_calls(rpc);
    if (rpc->server) {
        grpc_server_shutdown_and_notify(rpc->server, rpc->queue, &rpc->shutdown_tag);
        grpc_server_cancel_all_calls(rpc->server);
    }
    grpc_completion_queue_shutdown(rpc->queue);
    if (rpc->has_thread)
        pthread_join(rpc->thread, NULL);
    else
        yard_rpc_run(rpc);
}

void yard_rpc_close(yard_rpc *rpc)
{
    if (!rpc)
        return;
    stop(rpc);
    yard_rpc_free_calls(rpc);
    if (rpc->server)
        grpc_server_destroy(rpc->server);
    if (rpc->channel)
        grpc_channel_destroy(rpc->channel);
    grpc_completion_queue_destroy(rpc->queue);
    grpc_shutdown();
    if (rpc->timer >= 0)
        close(rpc->timer);
    if (rpc->wake >= 0)
        close(rpc->wake);
    if (rpc->fd >= 0)
        close(rpc->fd);
    pthread_mutex_destroy(&rpc->lock);
    free(rpc);
}

const char *yard_rpc_address(const yard_rpc *rpc)
{
    return rpc->address;
}

int yard_rpc_fd(const yard_rpc *rpc)
{
    return rpc->fd;
}
