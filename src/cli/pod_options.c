#include "cli/pod_options.h"

#include <stdio.h>

enum { KEY_RANKS = 0x300, KEY_TP, KEY_TRANSPORT, KEY_TIMEOUT, KEY_START_TIMEOUT, KEY_MAX_SEQS };
enum { MAX_RANKS = 4096, MAX_SECONDS = 86400, MAX_SEQS = 65536 };

static error_t parse(int key, char *arg, struct argp_state *state)
{
    yard_pod_options *o = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        *o = (yard_pod_options){ .n_ranks = 1, .tp = 1, .timeout_s = 5, .start_timeout_s = 60 };
        return 0;
    case KEY_RANKS:
        o->n_ranks = (uint32_t)yard_cli_argp_u64(state, "--ranks", arg, 1, MAX_RANKS);
        break;
    case KEY_TP:
        o->tp = (uint32_t)yard_cli_argp_u64(state, "--tp", arg, 1, MAX_RANKS);
        break;
    case KEY_MAX_SEQS:
        o->max_seqs = (uint32_t)yard_cli_argp_u64(state, "--max-seqs", arg, 1, MAX_SEQS);
        break;
    case KEY_TRANSPORT:
        o->transport = arg;
        break;
    case KEY_TIMEOUT:
        o->timeout_s = (double)yard_cli_argp_f32(state, "--timeout", arg, 0.01f, MAX_SECONDS);
        break;
    case KEY_START_TIMEOUT:
        o->start_timeout_s =
            (double)yard_cli_argp_f32(state, "--start-timeout", arg, 0.1f, MAX_SECONDS);
        break;
    default:
        return ARGP_ERR_UNKNOWN;
    }
    o->given = true;
    return 0;
}

static const struct argp_option option_list[] = {
    { "ranks", KEY_RANKS, "N", 0,
      "Processes on this machine that share the experts (default 1), each on a GPU of its own with "
      "--device cuda, as far as there are; with mpirun, Slurm or the like N on each of its "
      "machines",
      0 },
    { "tp", KEY_TP, "T", 0, "Ranks that share the attention of one instance (default 1)", 0 },
    { "max-seqs", KEY_MAX_SEQS, "N", 0, "Sequences that an instance runs at once (default 16)", 0 },
    { "transport", KEY_TRANSPORT, "NAME", 0,
      "shm, tcp, shm+tcp or libfabric (default: by where the ranks are)", 0 },
    { "timeout", KEY_TIMEOUT, "S", 0, "Seconds until a silent rank is taken for lost (default 5)",
      0 },
    { "start-timeout", KEY_START_TIMEOUT, "S", 0, "Seconds for each start stage (default 60)", 0 },
    { 0 },
};

const struct argp yard_pod_argp = { option_list, parse, NULL, NULL, NULL, NULL, NULL };

static void print_notice(void *ctx, const char *line)
{
    (void)ctx;
    yard_cli_clear_bar();
    fprintf(stderr, "switchyard: %s\n", line);
}

yard_status yard_pod_options_config(const yard_pod_options *o, const yard_engine_config *engine,
                                    yard_fabric_env *storage, yard_pod_config *out, yard_error *err)
{
    yard_fabric_config fabric = YARD_FABRIC_CONFIG_INIT;
    const yard_status st = yard_fabric_config_from_env(&fabric, storage, err);

    if (st != YARD_OK)
        return st;
    *out = (yard_pod_config){ .engine = *engine,
                              .n_ranks = o->n_ranks,
                              .transport = o->transport,
                              .start_timeout_us = (uint64_t)(o->start_timeout_s * 1e6),
                              .notice = print_notice };
    if (o->max_seqs)
        out->engine.max_seqs = o->max_seqs;
    if (out->engine.max_tokens < out->engine.max_seqs)
        out->engine.max_tokens = out->engine.max_seqs;
    out->engine.tp = o->tp;
    out->engine.timeout_us = (uint64_t)(o->timeout_s * 1e6);
    if (storage->scheme && fabric.n_ranks > 1) { /* its processes are pods */
        out->pod = fabric.rank;
        out->n_pods = fabric.n_ranks;
        out->rendezvous = fabric.rendezvous;
        out->secret = fabric.secret ? fabric.secret : fabric.rendezvous;
        out->bind_host = fabric.bind_host;
    }
    return YARD_OK;
}

yard_status yard_pod_print_budget(const yard_pod_config *c, yard_error *err)
{
    const uint32_t n_ranks = c->n_ranks * (c->n_pods ? c->n_pods : 1);
    yard_engine_budget least = { 0 }, most = { 0 };

    for (uint32_t r = 0; r < n_ranks; r++) {
        yard_engine_budget b;
        const yard_status st = yard_engine_budget_of(&c->engine, n_ranks, r, &b, err);

        if (st != YARD_OK)
            return st;
        if (r == 0)
            least = most = b;
        if (b.weight_bytes < least.weight_bytes)
            least = b;
        if (b.weight_bytes > most.weight_bytes)
            most = b;
    }
    fprintf(stderr,
            "switchyard: EP%u DP%u TP%u; each rank: weights %.1f to %.1f MB, exchange %.1f MB, "
            "cache up to %.1f MB, scratch up to %.1f MB\n",
            n_ranks, n_ranks / c->engine.tp, c->engine.tp, (double)least.weight_bytes * 1e-6,
            (double)most.weight_bytes * 1e-6,
            (double)(most.heap_bytes + most.device_heap_bytes) * 1e-6,
            (double)most.cache_bytes * 1e-6, (double)most.scratch_bytes * 1e-6);
    return YARD_OK;
}
