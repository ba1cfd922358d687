/* What the GPUs of `switchyard bench ep --device cuda` could do at best. Written as a peer whose
 * phases are a flag, stores to a peer and a copy in own memory, so that ranks are started, watched
 * and merged as everywhere. */
#include <stdlib.h>

#include "cli/bench_ep.h"
#include "ep/ep.h"

enum { UNIT_BYTES = 1 << 20 }; /* what the times of stores and copies are of */

typedef struct limits_side {
    yard_fabric *fabric;
} limits_side;

static yard_status open_limits(yard_bench_ep_rank *r, yard_error *err)
{
    yard_fabric_config config = YARD_FABRIC_CONFIG_INIT;
    uint32_t n_devices = 0;
    yard_status st = yard_bench_ep_open_device(r, sizeof(limits_side), err);
    limits_side *s = r->impl;

    if (st == YARD_OK)
        st = yard_ep_device_count(&n_devices, err);
    if (st == YARD_OK && n_devices < r->settings->n_ranks)
        st = yard_fail(err, YARD_ENOTSUP, "%u GPUs for %u ranks", n_devices, r->settings->n_ranks);
    config.rank = r->rank;
    config.n_ranks = r->settings->n_ranks;
    config.transport = "nvlink";
    config.rendezvous = r->rendezvous;
    config.heap_bytes = YARD_EP_LIMITS_HEAP_BYTES;
    return st == YARD_OK ? yard_fabric_create(&s->fabric, &config, err) : st;
}

static yard_status nothing(yard_bench_ep_rank *r, yard_error *err)
{
    return YARD_OK;
}

static yard_status measure(yard_bench_ep_rank *r, double *samples_us, uint32_t *n, yard_error *err)
{
    const limits_side *s = r->impl;
    const size_t n_repeats = r->settings->n_repeats;
    yard_ep_limits limits;
    yard_status st = yard_ep_limits_measure(s->fabric, &limits, err);

    if (st != YARD_OK)
        return st;
    samples_us[0] = limits.flag_us;
    samples_us[n_repeats] = UNIT_BYTES / limits.store_bytes_per_s * 1e6;
    samples_us[2 * n_repeats] = UNIT_BYTES / limits.copy_bytes_per_s * 1e6;
    *n = 1;
    return YARD_OK;
}

static void poison(yard_bench_ep_rank *r)
{
}

static bool check(yard_bench_ep_rank *r, yard_error *err)
{
    return true;
}

static void close_limits(yard_bench_ep_rank *r)
{
    limits_side *s = r->impl;

    if (s)
        yard_fabric_destroy(s->fabric);
    free(s);
    r->impl = NULL;
}

static double bytes(const yard_bench_ep_rank *r, int phase)
{
    return phase == 0 ? 16 : UNIT_BYTES;
}

const yard_bench_ep_peer yard_bench_ep_limits = {
    .name = "limits",
    .launch = "graph",
    .one_token = true,
    .open = open_limits,
    .prepare = nothing,
    .dispatch = nothing,
    .combine = nothing,
    .measure = measure,
    .poison = poison,
    .check = check,
    .close = close_limits,
    .bytes = bytes,
};
