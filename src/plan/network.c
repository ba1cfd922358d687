/* The all-to-all: how many bytes cross which link, and for how long.
 *
 * Of the ranks of a group, those in one NVLink island are reached over NVLink, the rest over the
 * network; a rank keeps what it sends to itself. A transfer takes a latency and its bytes over the
 * slower of the two links, which work side by side. */
#include <math.h>

#include "plan/plan.h"

static double island(const yard_plan_config *c)
{
    return fmin(c->ep, c->gpu->gpus_per_island);
}

/* Expected number of different places out of n that k choices of a token fall on. */
static double distinct(double n, double k)
{
    return n * (1 - pow(1 - 1 / n, k));
}

/* The same for islands, under group-limited routing: the chosen groups lie in top_groups places. */
static double distinct_islands(const yard_plan_config *c, double n)
{
    const yard_plan_model *m = c->model;
    const double by_expert = distinct(n, m->top_k);

    if (m->n_groups <= 1 || n <= 1)
        return by_expert;
    return fmin(by_expert, distinct(fmin(n, m->n_groups), m->top_groups));
}

double yard_plan_network_rate(const yard_plan_config *c)
{
    return c->nic ? c->nic->bytes_per_s : c->gpu->network_bytes_per_s;
}

double yard_plan_dispatch_row_bytes(const yard_plan_config *c)
{
    const double h = c->model->hidden;
    const uint32_t bits = yard_plan_weight_bits(c);
    const double payload = bits == 16  ? 2 * h
                           : bits == 4 ? h / 2 + ceil(h / 16)
                                       : h + 4 * ceil(h / 128);

    return ceil((payload + 4) / 16) * 16; /* the token's index travels along */
}

double yard_plan_combine_row_bytes(const yard_plan_config *c)
{
    return 2.0 * c->model->hidden;
}

void yard_plan_exchange_bytes(const yard_plan_config *c, double tokens, double bytes_per_row,
                              double *network_bytes, double *nvlink_bytes)
{
    const double ep = c->ep, near = island(c), sent = tokens / c->tp * bytes_per_row;
    const double n_islands = ceil(ep / near);
    double copies = c->model->top_k, far, close;

    if (c->copies == YARD_PLAN_PER_RANK)
        copies = distinct(ep, copies);
    far = copies * (ep - near) / ep;
    close = copies * (near - 1) / ep;
    if (c->copies == YARD_PLAN_PER_NODE) {
        /* one copy to each island; from there, and at home, one to each rank */
        const double ranks = distinct(ep, c->model->top_k);
        far = distinct_islands(c, n_islands) * (n_islands - 1) / n_islands;
        close = ranks * (near - 1) / near;
    }
    *network_bytes = sent * far;
    *nvlink_bytes = sent * close;
}

static const yard_plan_exchange *find_exchange(const yard_plan_config *c)
{
    const yard_plan_model *m = c->model;

    /* the tables are of this shape, FP8, one copy per expert, 8 GPUs a node, 50 GB/s */
    if (c->copies != YARD_PLAN_PER_EXPERT || m->hidden != 7168 || m->top_k != 8 ||
        yard_plan_weight_bits(c) != 8 || c->gpu->gpus_per_island != 8 ||
        yard_plan_network_rate(c) != 50e9 || c->gpu->nvlink_bytes_per_s != 450e9 ||
        (c->nic && c->nic->extra_latency_us > 0))
        return NULL;
    for (uint32_t i = 0; i < c->profile->n_exchange; i++)
        if (c->profile->exchange[i].ep == c->ep)
            return &c->profile->exchange[i];
    return NULL;
}

/* base_us: without rows. */
static yard_plan_wire split(const yard_plan_config *c, double base_us, double busy_us)
{
    const double kernel_us = fmin(base_us, c->profile->exchange_kernel_us);

    return (yard_plan_wire){ .latency_us = base_us - kernel_us,
                             .busy_us = busy_us,
                             .kernel_us = kernel_us };
}

yard_plan_wire yard_plan_exchange_time(const yard_plan_config *c, const yard_plan_kernel *k,
                                       double tokens, double copies_us)
{
    const yard_plan_share *net = &c->profile->share[YARD_PLAN_NETWORK];
    const yard_plan_share *nvl = &c->profile->share[YARD_PLAN_NVLINK];
    const yard_plan_exchange *table = find_exchange(c);
    const bool far = k->network_bytes > 0, dispatch = k->stage == 3;
    const double network_us = k->network_bytes / (yard_plan_network_rate(c) * net->memory) * 1e6;
    const double nvlink_us = k->nvlink_bytes / (c->gpu->nvlink_bytes_per_s * nvl->memory) * 1e6;
    double base_us = far ? net->fixed_us : nvl->fixed_us;

    if (c->ep == 1)
        return (yard_plan_wire){ 0 };
    if (table) { /* it holds the copies as well; the wire is what is left, at least its floor */
        const double slope_us =
            dispatch ? table->dispatch_us_per_token : table->combine_us_per_token;
        const double busy_us = slope_us * fmax(0, tokens / c->tp - 1) - copies_us;
        return split(c, dispatch ? table->dispatch_base_us : table->combine_base_us,
                     fmax(k->floor_us, busy_us));
    }
    if (far && c->nic)
        base_us += c->nic->extra_latency_us;
    return split(c, base_us, fmax(network_us, nvlink_us));
}
