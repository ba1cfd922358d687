/* Dispatch on the CPU: a token's row is packed once and put to each rank (or other node) that has
 * one of its experts; a header per destination tells which tokens come and their experts. */
#include "ep/ep_impl.h"

/* The ids of one token. A repeated id would bring more rows than capacities count: min(top_k,
 * local) of a token. used holds, for each expert, the number of the token that named it last. */
static yard_status check_experts(yard_ep *ep, const int32_t *expert, uint32_t t)
{
    const yard_ep_config *c = &ep->config;

    if (++ep->n_checked == 0) { /* all numbers were used up */
        memset(ep->used, 0, c->n_experts * sizeof(*ep->used));
        ep->n_checked = 1;
    }
    for (uint32_t k = 0; k < c->top_k; k++) {
        if (expert[k] < -1 || expert[k] >= (int32_t)c->n_experts)
            return yard_fail(&ep->err, YARD_EINVAL,
                             "dispatch_send: token %u: want expert ids from -1 to %u, got %d", t,
                             c->n_experts - 1, expert[k]);
        if (expert[k] < 0)
            continue;
        if (ep->used[expert[k]] == ep->n_checked)
            return yard_fail(&ep->err, YARD_EINVAL,
                             "dispatch_send: token %u: want different experts, got %d twice", t,
                             expert[k]);
        ep->used[expert[k]] = ep->n_checked;
    }
    return YARD_OK;
}

static yard_status check_routing(const yard_ep_round *round, const int32_t *expert,
                                 int32_t n_tokens)
{
    yard_ep *ep = round->ep;
    const yard_ep_config *c = &ep->config;
    const uint32_t most = round->limit ? round->limit : c->max_tokens;
    yard_status st = YARD_OK;

    if (n_tokens < 0 || (uint32_t)n_tokens > most)
        return yard_fail(&ep->err, YARD_EINVAL,
                         "dispatch_send: n_tokens: want 0 to %u (%s), got %d", most,
                         round->limit ? "the round's limit" : "max_tokens", n_tokens);
    for (uint32_t t = 0; st == YARD_OK && t < (uint32_t)n_tokens; t++)
        st = check_experts(ep, expert + (size_t)t * c->top_k, t);
    return st;
}

/* Row t of x in its wire form: payload, then scales. */
static void pack_row(yard_ep *ep, const void *x, const float *x_scale, uint32_t t, uint8_t *row)
{
    const yard_ep_config *c = &ep->config;
    const uint32_t n = c->hidden;
    float *scale = (float *)(void *)(row + yard_align_up(ep->payload_bytes, 4));

    if (c->dispatch == YARD_EP_FP8 && c->input != YARD_EP_FP8) {
        const yard_dtype dtype = c->input == YARD_EP_BF16 ? YARD_BF16 : YARD_F32;
        const uint8_t *src = (const uint8_t *)x + (size_t)t * n * yard_dtype_bytes(dtype);

        ep->convert->decode(dtype, src, n, ep->row_f32);
        if (dtype == YARD_F32)
            for (uint32_t i = 0; i < n; i++)
                ep->row_f32[i] = yard_bf16_round(ep->row_f32[i]);
        ep->convert->quantise(ep->row_f32, n, c->ue8m0, row, scale);
        return;
    }
    memcpy(row, (const uint8_t *)x + t * ep->payload_bytes, ep->payload_bytes);
    if (x_scale)
        memcpy(scale, x_scale + (size_t)t * ep->n_groups_cols, ep->scale_bytes);
}

/* FNV-1a over ids and weights: replicas of an instance must agree on every bit. */
static uint64_t hash_routing(const yard_ep_round *round)
{
    const size_t n = (size_t)round->n_tokens * round->ep->config.top_k;
    uint64_t hash = 0xcbf29ce484222325u;

    for (size_t i = 0; i < n; i++)
        hash = (hash ^ (uint32_t)round->expert[i] ^
                (uint64_t)yard_bits_from_f32(round->weight[i]) << 32) *
               0x100000001b3u;
    return hash;
}

static ep_header *stage_header(const yard_ep_round *round, uint32_t peer)
{
    return ep_heap(round->ep, round->heap.stage_headers + peer * round->ep->header_bytes);
}

static void add_entry(const yard_ep_round *round, uint32_t peer, uint32_t t)
{
    const yard_ep *ep = round->ep;
    const uint32_t k = ep->config.top_k;
    ep_header *header = stage_header(round, peer);
    int32_t *entry =
        (int32_t *)(void *)((uint8_t *)(header + 1) + header->n_sent++ * ep->entry_bytes);

    entry[0] = (int32_t)t;
    memcpy(entry + 1, round->expert + (size_t)t * k, k * sizeof(*entry));
    memcpy(entry + 1 + k, round->weight + (size_t)t * k, k * sizeof(float));
}

/* Other ranks that have an expert of the token, in order of k; *here: whether this one has. */
static uint32_t destinations_of(yard_ep *ep, const int32_t *expert,
                                uint32_t ranks[static YARD_EP_MAX_TOP_K], bool *here)
{
    uint32_t n = 0;

    memset(ep->target, 0, ep->n_ranks);
    for (uint32_t k = 0; k < ep->config.top_k; k++) {
        const uint32_t rank = expert[k] >= 0 ? ep_rank_of(ep, expert[k]) : ep->rank;

        if (expert[k] >= 0 && !ep->target[rank] && rank != ep->rank)
            ranks[n++] = rank;
        ep->target[rank] |= expert[k] >= 0;
    }
    *here = ep->target[ep->rank];
    return n;
}

static bool rows_land(const yard_ep *ep)
{
    return ep->config.layout == YARD_EP_FLAT_IN_PLACE;
}

/* Whether rows between that rank and this one stay where they were packed. */
static bool reads_at_source(const yard_ep *ep, uint32_t rank)
{
    return ep->seen[rank] && !rows_land(ep);
}

static yard_sym landing_at(const yard_ep_round *round, uint32_t group, uint32_t t)
{
    return round->heap.dispatch_rows +
           ((yard_sym)group * round->ep->config.max_tokens + t) * round->ep->dispatch_row_bytes;
}

/* Where a row of this rank is packed. */
static yard_sym packed_at(const yard_ep_round *round, uint32_t t)
{
    return rows_land(round->ep) ? landing_at(round, round->ep->group, t)
                                : round->heap.stage_rows + t * round->ep->dispatch_row_bytes;
}

/* One copy to each relay, that is: to each rank, or to each other node. Ranks that see this one's
 * heap read the row where it was packed. */
static yard_status put_row(yard_ep_round *round, yard_sym dst, const void *row,
                           const uint32_t *ranks, uint32_t n_ranks)
{
    yard_ep *ep = round->ep;
    const yard_sym sig = round->heap.sig_rows + ep->rank * 8;

    for (uint32_t i = 0; i < n_ranks; i++) {
        const uint32_t relay = ep->relay_to[ranks[i]];
        uint32_t targets[YARD_EP_MAX_TOP_K], n_targets = 0;
        yard_status st;

        if (!ep->target[ranks[i]])
            continue; /* had it with another's */
        if (reads_at_source(ep, ranks[i])) {
            ep->stats.n_rows_in_place++;
            continue;
        }
        for (uint32_t j = i; j < n_ranks; j++)
            if (ep->relay_to[ranks[j]] == relay) {
                targets[n_targets++] = ranks[j];
                ep->target[ranks[j]] = 0;
            }
        st = n_targets == 1 && targets[0] == relay
                 ? yard_ep_put(ep, dst, row, ep->dispatch_row_bytes, sig, 1, relay)
                 : yard_ep_put_node(ep, dst, row, ep->dispatch_row_bytes, relay, sig, targets,
                                    n_targets);
        if (st != YARD_OK)
            return st;
        ep->stats.n_dispatch_rows_sent++;
    }
    return YARD_OK;
}

/* Packs token t, enters it in the headers of all ranks that have one of its experts, and puts it to
 * the others; this rank reads it where it was packed. */
static yard_status send_token(yard_ep_round *round, const void *x, const float *x_scale, uint32_t t)
{
    yard_ep *ep = round->ep;
    uint8_t *row = ep_heap(ep, packed_at(round, t));
    uint32_t ranks[YARD_EP_MAX_TOP_K];
    bool here;
    const uint32_t n =
        destinations_of(ep, round->expert + (size_t)t * ep->config.top_k, ranks, &here);

    if (n == 0 && !here)
        return YARD_OK;
    pack_row(ep, x, x_scale, t, row);
    if (here)
        add_entry(round, ep->rank, t);
    for (uint32_t i = 0; i < n; i++)
        add_entry(round, ranks[i], t);
    return put_row(round, landing_at(round, ep->group, t), row, ranks, n);
}

static yard_status send_headers(yard_ep_round *round)
{
    yard_ep *ep = round->ep;
    const uint64_t hash = hash_routing(round);

    for (uint32_t i = 1; i <= ep->n_ranks; i++) {
        const uint32_t peer = (ep->rank + i) % ep->n_ranks; /* not all at rank 0 first */
        ep_header *header = stage_header(round, peer);
        yard_status st;

        header->epoch = round->epoch;
        header->routing_hash = hash;
        header->n_tokens = round->n_tokens;
        st = yard_ep_put(ep, round->heap.headers + ep->rank * ep->header_bytes, header,
                         sizeof(*header) + header->n_sent * ep->entry_bytes,
                         round->heap.sig_header + ep->rank * 8, 1, peer);
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}

yard_status yard_ep_cpu_dispatch_send(yard_ep_round *round, const void *x, const float *x_scale,
                                      const int32_t *expert, const float *weight,
                                      const int32_t *n_tokens, yard_stream stream)
{
    yard_ep *ep = round->ep;
    yard_status st = YARD_OK;

    (void)stream;
    if (!n_tokens)
        st = yard_fail(&ep->err, YARD_EINVAL, "dispatch_send: n_tokens: want a number, got NULL");
    if (st == YARD_OK && *n_tokens > 0 && (!x || !expert || !weight))
        st = yard_fail(&ep->err, YARD_EINVAL,
                       "dispatch_send: x, expert, weight: want %d rows, got NULL", *n_tokens);
    if (st == YARD_OK)
        st = check_routing(round, expert, *n_tokens);
    if (st == YARD_OK && *n_tokens > 0 && (x_scale != NULL) != (ep->config.input == YARD_EP_FP8))
        st = yard_fail(&ep->err, YARD_EINVAL,
                       "dispatch_send: x_scale: want it exactly when input "
                       "is FP8");
    if (st != YARD_OK)
        return st;
    round->epoch++;
    round->n_tokens = (uint32_t)*n_tokens;
    if (round->n_tokens > 0) {
        const size_t n = (size_t)round->n_tokens * ep->config.top_k;
        memcpy(round->expert, expert, n * sizeof(*expert));
        memcpy(round->weight, weight, n * sizeof(*weight));
    }
    for (uint32_t peer = 0; peer < ep->n_ranks; peer++)
        stage_header(round, peer)->n_sent = 0;
    for (uint32_t t = ep->replica; st == YARD_OK && t < round->n_tokens; t += ep->config.tp)
        st = send_token(round, x, x_scale, t);
    if (st == YARD_OK)
        st = send_headers(round);
    if (st != YARD_OK)
        return yard_ep_broken(round, st, "dispatch_send", 0);
    round->state = ROUND_DISPATCH_SENT;
    return YARD_OK;
}

static const ep_header *header_of(const yard_ep_round *round, uint32_t source)
{
    return ep_heap(round->ep, round->heap.headers + source * round->ep->header_bytes);
}

/* All headers, then as many rows as each announces, unless they stay where its header says that
 * they are. Row counts are totals: signals only add. */
static yard_status wait_arrivals(yard_ep_round *round)
{
    yard_ep *ep = round->ep;
    const yard_deadline until = yard_fabric_deadline(ep->fabric, ep->config.timeout_us);

    for (uint32_t s = 0; s < ep->n_ranks; s++) {
        yard_status st = yard_fabric_wait_until(ep->fabric, round->heap.sig_header + s * 8,
                                                round->epoch, s, until);
        if (st == YARD_OK && s != ep->rank && !reads_at_source(ep, s)) {
            round->rows_seen[s] += header_of(round, s)->n_sent;
            st = yard_fabric_wait_relayed(
                ep->fabric, round->heap.sig_rows + s * 8, round->rows_seen[s], s,
                ep->relay_from[s] == ep->rank ? s : ep->relay_from[s], until);
        }
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}

static yard_status check_header(yard_ep_round *round, uint32_t source)
{
    yard_ep *ep = round->ep;
    const ep_header *h = header_of(round, source);
    const ep_header *first = header_of(round, source - source % ep->config.tp);

    if (h->epoch != round->epoch)
        return yard_fail(&ep->err, YARD_EINVAL,
                         "dispatch_recv: rank %u is at dispatch %llu of this round, rank %u at "
                         "%llu: calls out of order",
                         source, (unsigned long long)h->epoch, ep->rank,
                         (unsigned long long)round->epoch);
    if (h->routing_hash != first->routing_hash || h->n_tokens != first->n_tokens)
        return yard_fail(&ep->err, YARD_EINVAL,
                         "dispatch_recv: ranks %u and %u are replicas of one instance, want the "
                         "same routing, got %u and %u tokens (hash %llx and %llx)",
                         source - source % ep->config.tp, source, first->n_tokens, h->n_tokens,
                         (unsigned long long)first->routing_hash,
                         (unsigned long long)h->routing_hash);
    return YARD_OK;
}

/* Where the row of a token lies that came from rank source. */
static const uint8_t *row_of(const yard_ep_round *round, uint32_t source, uint32_t group,
                             uint32_t t)
{
    const yard_ep *ep = round->ep;
    const yard_sym at = landing_at(round, group, t);

    if (source == ep->rank)
        return ep_heap(ep, packed_at(round, t));
    if (reads_at_source(ep, source))
        return yard_fabric_view(ep->fabric, source, packed_at(round, t));
    if (ep->relay_from[source] == ep->rank)
        return ep_heap(ep, at);
    return yard_fabric_view(ep->fabric, ep->relay_from[source], at);
}

/* The replicas' tokens interleave: token t comes from replica t mod tp, in ascending order each. */
static void collect_group(yard_ep_round *round, uint32_t group)
{
    yard_ep *ep = round->ep;
    const uint32_t tp = ep->config.tp, first = group * tp;
    uint32_t next[YARD_EP_MAX_TP] = { 0 }; /* entries taken, per replica */

    for (;;) {
        const int32_t *best = NULL;
        uint32_t best_replica = 0;

        for (uint32_t j = 0; j < tp; j++) {
            const ep_header *h = header_of(round, first + j);
            const int32_t *entry = (const int32_t *)(const void *)((const uint8_t *)(h + 1) +
                                                                   next[j] * ep->entry_bytes);
            if (next[j] < h->n_sent && (!best || entry[0] < best[0])) {
                best = entry;
                best_replica = j;
            }
        }
        if (!best)
            return;
        next[best_replica]++;
        const uint32_t t = (uint32_t)best[0];
        round->arrivals[round->n_arrivals++] =
            (arrival){ .group = group,
                       .token = t,
                       .entry = best,
                       .row = row_of(round, first + best_replica, group, t) };
    }
}

/* Counts per local expert, and each expert's first row. */
static void count_rows(yard_ep_round *round, int32_t *expert_count)
{
    const yard_ep *ep = round->ep;
    const int32_t align = (int32_t)ep->config.row_align;

    memset(expert_count, 0, ep->n_local * sizeof(*expert_count));
    for (uint32_t i = 0; i < round->n_arrivals; i++)
        for (uint32_t k = 0; k < ep->config.top_k; k++) {
            const int32_t e = ep_local_expert(ep, ep_entry_experts(round->arrivals[i].entry)[k]);
            if (e >= 0)
                expert_count[e]++;
        }
    round->first_row[0] = 0;
    for (uint32_t e = 0; e < ep->n_local; e++)
        round->first_row[e + 1] =
            round->first_row[e] + (expert_count[e] + align - 1) / align * align;
}

void yard_ep_start_rows(yard_ep_round *round)
{
    memcpy(round->ep->cursor, round->first_row, round->ep->n_local * sizeof(int32_t));
}

static void copy_out(const yard_ep *ep, const uint8_t *row, size_t at, void *expert_x,
                     float *expert_x_scale)
{
    memcpy((uint8_t *)expert_x + at * ep->payload_bytes, row, ep->payload_bytes);
    if (expert_x_scale)
        memcpy(expert_x_scale + at * ep->n_groups_cols, row + yard_align_up(ep->payload_bytes, 4),
               ep->scale_bytes);
}

static void fan_out(yard_ep_round *round, void *expert_x, float *expert_x_scale, int32_t *row_index)
{
    const yard_ep *ep = round->ep;
    const bool flat = ep->config.layout == YARD_EP_FLAT;

    yard_ep_start_rows(round);
    for (uint32_t i = 0; i < round->n_arrivals; i++) {
        const arrival *a = &round->arrivals[i];
        const int32_t origin = (int32_t)(a->group * ep->config.max_tokens + a->token);

        if (flat) /* else once for each expert, or never */
            copy_out(ep, a->row, i, expert_x, expert_x_scale);
        for (uint32_t k = 0; k < ep->config.top_k; k++) {
            const int32_t e = ep_local_expert(ep, ep_entry_experts(a->entry)[k]);
            if (e < 0)
                continue;
            const int32_t row = ep->cursor[e]++;
            if (!flat && !rows_land(ep))
                copy_out(ep, a->row, (size_t)row, expert_x, expert_x_scale);
            if (row_index)
                row_index[row] = flat ? (int32_t)i : origin;
        }
    }
}

yard_status yard_ep_cpu_dispatch_recv(yard_ep_round *round, void *expert_x, float *expert_x_scale,
                                      int32_t *expert_count, int32_t *row_index, yard_stream stream)
{
    yard_ep *ep = round->ep;
    yard_status st;

    (void)stream;
    st = wait_arrivals(round);
    if (st != YARD_OK)
        return yard_ep_broken(round, st, "dispatch_recv", round->heap.sig_header);
    for (uint32_t s = 0; s < ep->n_ranks; s++)
        if (check_header(round, s) != YARD_OK)
            return ep->status = YARD_EINVAL;
    round->n_arrivals = 0;
    for (uint32_t g = 0; g < ep->dp; g++)
        collect_group(round, g);
    count_rows(round, expert_count);
    fan_out(round, expert_x, expert_x_scale, row_index);
    round->state = ROUND_DISPATCHED;
    return YARD_OK;
}
