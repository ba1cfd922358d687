/* What the GPUs of `switchyard bench ep --device cuda` could do at best. Written as a peer whose
 * phases are a flag, stores to a peer and a copy in own memory, so that ranks are started, watched
 * and merged as everywhere. */
#include <stdio.h>
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
    if (st == YARD_OK && (n_devices < r->settings->n_ranks || r->settings->n_ranks % 2 != 0))
        st = yard_fail(err, YARD_ENOTSUP, "%u GPUs for %u ranks, which should be an even number",
                       n_devices, r->settings->n_ranks);
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

static const yard_bench_ep_peer limits_peer = {
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

static const char *const limit_names[] = { "flag", "store", "copy" };

static yard_status print_limits(const yard_bench_ep_result *limits, uint32_t n_ranks, bool json,
                                yard_error *err)
{
    yard_status st = YARD_OK;

    for (int i = 0; i < YARD_BENCH_EP_N_PHASES && st == YARD_OK; i++) {
        const yard_bench_ep_times *t = &limits->phase[i];
        yard_bench_row row = {
            .bench = "ep",
            .shape = json_pack("{s:s, s:s}", "transport", "limits", "limit", limit_names[i]),
            .p50_us = t->p50_us,
            .p99_us = t->p99_us,
            .min_us = t->min_us,
            .floor_us = -1,
            .bytes = t->bytes,
            .flops = -1,
            .verified = true,
            .device = limits->device,
            .ranks = n_ranks,
        };

        if (!row.shape)
            return yard_fail(err, YARD_ENOMEM, "bench: no memory for a row");
        st = yard_bench_print_row(&row, json, err);
        json_decref(row.shape);
    }
    return st;
}

yard_status yard_bench_ep_run_limits(const yard_bench_ep_settings *settings, bool json,
                                     yard_bench_ep_result *out, yard_error *err)
{
    yard_bench_ep_settings once = *settings;
    const yard_bench_ep_group g = { .settings = &once, .peer = &limits_peer };
    uint32_t n_done;
    yard_status st;

    once.tokens = (yard_bench_list){ 1, { 1 } };
    st = yard_bench_ep_run_group(&g, out, &n_done, err);
    if (st == YARD_OK)
        return print_limits(out, settings->n_ranks, json, err);
    *out = (yard_bench_ep_result){ 0 };
    return st;
}

/* What the limits say of a machine, beside the pair that docs/performance.md was measured on. */
void yard_bench_ep_print_verdict(const yard_bench_ep_result *limits)
{
    const double reference[] = { 0.57, 358, 3790 }; /* us, GB/s, GB/s: two H200 with NVLink */
    const yard_bench_ep_times *t = limits->phase;
    const double stores = t[1].bytes / t[1].p50_us * 1e-3, copies = t[2].bytes / t[2].p50_us * 1e-3;

    if (t[0].p50_us <= 0)
        return;
    printf(
        "\nThis machine: a flag takes %.2f us, stores to a peer run at %.0f GB/s, copies at %.0f "
        "GB/s;\ntwo H200 with NVLink: %.2f us, %.0f and %.0f GB/s. ",
        t[0].p50_us, stores, copies, reference[0], reference[1], reference[2]);
    if (t[0].p50_us < 1.25 * reference[0] && stores > 0.8 * reference[1] &&
        copies > 0.8 * reference[2])
        printf("Their times should come out here.\n");
    else if (stores < 100)
        printf("Peers seem not to be joined by NVLink:\nexpect %.1f times theirs where the wire "
               "counts.\n",
               reference[1] / stores);
    else
        printf("Expect %.1f times theirs with one token,\n%.1f times where the wire counts, %.1f "
               "where memory does.\n",
               t[0].p50_us / reference[0], reference[1] / stores, reference[2] / copies);
}

/* See --help. Of the layout's bytes each is read or written once: rows that came and experts' rows
 * are read, rows of expert_x and y written. */
double yard_bench_ep_floor_us(const yard_bench_ep_result *limits, const yard_bench_ep_result *r,
                              int phase)
{
    const yard_bench_ep_times *limit = limits->phase;
    double us = 0;

    if (limit[0].p50_us <= 0)
        return -1;
    for (int i = 0; i < YARD_BENCH_EP_PAIR; i++) {
        const double wire_us = r->phase[i].wire_bytes * limit[1].p50_us / limit[1].bytes;
        const double memory_us = r->phase[i].bytes * limit[2].p50_us / limit[2].bytes;

        if (phase == YARD_BENCH_EP_PAIR || phase == i)
            us += limit[0].p50_us + (wire_us > memory_us ? wire_us : memory_us);
    }
    return us;
}
