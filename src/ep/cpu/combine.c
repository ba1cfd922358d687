/* Combine on the CPU: results go to the owner of their token, which adds them in one fixed order
 * and gives the finished row to its siblings. */
#include "ep/ep_impl.h"

static yard_dtype plain_dtype(yard_ep_dtype dtype)
{
    return dtype == YARD_EP_BF16 ? YARD_BF16 : YARD_F32;
}

static const uint8_t *result_row(const yard_ep *ep, const void *expert_y, int32_t row)
{
    const size_t row_bytes = ep->config.hidden * yard_dtype_bytes(plain_dtype(ep->config.combine));

    return (const uint8_t *)expert_y + (size_t)row * row_bytes;
}

/* The ranks that have an expert of the token, ascending, each once. */
static uint32_t ranks_of(const yard_ep *ep, const int32_t *expert,
                         uint32_t ranks[static YARD_EP_MAX_TOP_K])
{
    uint32_t n = 0;

    for (uint32_t k = 0; k < ep->config.top_k; k++) {
        uint32_t at = n, rank;

        if (expert[k] < 0)
            continue;
        rank = ep_rank_of(ep, expert[k]);
        while (at > 0 && ranks[at - 1] > rank)
            at--;
        if (at > 0 && ranks[at - 1] == rank)
            continue;
        memmove(ranks + at + 1, ranks + at, (n++ - at) * sizeof(*ranks));
        ranks[at] = rank;
    }
    return n;
}

/* The place of this rank among them. */
static uint32_t ordinal_of(const yard_ep *ep, const int32_t *expert)
{
    uint32_t ranks[YARD_EP_MAX_TOP_K], at = 0;
    const uint32_t n = ranks_of(ep, expert, ranks);

    while (at < n && ranks[at] != ep->rank)
        at++;
    return at;
}

static yard_sym landing_at(const yard_ep_round *round, uint32_t t, uint32_t slot)
{
    return round->heap.combine_rows +
           ((yard_sym)t * round->ep->config.top_k + slot) * round->ep->combine_row_bytes;
}

static size_t result_bytes(const yard_ep *ep)
{
    return ep->config.hidden * yard_dtype_bytes(plain_dtype(ep->config.combine));
}

/* Where a row for `owner` is prepared: in its landing slot if that is here, else where transports
 * that do not copy at once may read it later; transports that do need one place only. */
static uint8_t *prepare_at(const yard_ep_round *round, uint32_t owner, uint32_t t, uint32_t slot,
                           uint32_t *n_staged)
{
    const yard_ep *ep = round->ep;
    const uint32_t place = yard_fabric_copies(ep->fabric) ? 0 : (*n_staged)++;

    if (owner == ep->rank)
        return ep_heap(ep, landing_at(round, t, slot));
    return ep_heap(ep, round->heap.stage_combine + place * ep->combine_row_bytes);
}

static yard_status put_result(yard_ep_round *round, uint32_t owner, uint32_t t, uint32_t slot,
                              const void *src)
{
    yard_ep *ep = round->ep;

    if (owner == ep->rank)
        return YARD_OK; /* prepared where it lands; nobody waits for it */
    ep->stats.n_combine_rows_sent++;
    return yard_ep_put(ep, landing_at(round, t, slot), src, result_bytes(ep),
                       round->heap.sig_results + ep->rank * 8, 1, owner);
}

static int32_t *list_at(const yard_ep_round *round, yard_sym lists, uint32_t rank)
{
    return ep_heap(round->ep, lists + rank * round->ep->list_bytes);
}

/* The own list is written where it is read. */
static void list_row(yard_ep_round *round, uint32_t owner, int32_t row)
{
    yard_ep *ep = round->ep;
    const yard_sym lists = owner == ep->rank ? round->heap.result_lists : round->heap.stage_lists;

    list_at(round, lists, owner)[ep->n_listed[owner]++] = row;
}

static yard_status send_lists(yard_ep_round *round)
{
    yard_ep *ep = round->ep;
    yard_status st = YARD_OK;

    for (uint32_t i = 1; st == YARD_OK && i < ep->n_ranks; i++) {
        const uint32_t peer = (ep->rank + i) % ep->n_ranks;

        ep->stats.n_results_in_place += ep->n_listed[peer];
        if (ep->n_listed[peer] > 0)
            st = yard_ep_put(ep, round->heap.result_lists + ep->rank * ep->list_bytes,
                             list_at(round, round->heap.stage_lists, peer),
                             ep->n_listed[peer] * sizeof(int32_t),
                             round->heap.sig_results + ep->rank * 8, 1, peer);
    }
    return st;
}

/* The next result from rank s, which lists them in the order in which they are read. NULL when it
 * names a row that cannot be. */
static const uint8_t *listed_result(const yard_ep_round *round, uint32_t s)
{
    const yard_ep *ep = round->ep;
    const int32_t row = list_at(round, round->heap.result_lists, s)[ep->n_listed[s]++];

    if (row < 0 || (uint64_t)row >= ep->routed_rows)
        return NULL;
    return result_row(ep,
                      s == ep->rank ? ep_heap(ep, round->heap.expert_y)
                                    : yard_fabric_view(ep->fabric, s, round->heap.expert_y),
                      row);
}

static yard_status send_exact(yard_ep_round *round, const arrival *a, const void *expert_y,
                              uint32_t *n_staged)
{
    yard_ep *ep = round->ep;
    const uint32_t owner = ep_owner_of(ep, a->group, a->token);
    const bool direct =
        ep->config.expert_y_in_place || (owner != ep->rank && yard_fabric_copies(ep->fabric));

    for (uint32_t k = 0; k < ep->config.top_k; k++) {
        const int32_t e = ep_local_expert(ep, ep_entry_experts(a->entry)[k]);
        const uint8_t *row;
        yard_status st;

        if (e < 0)
            continue;
        if (ep->in_place[owner]) {
            list_row(round, owner, ep->cursor[e]++);
            continue;
        }
        row = result_row(ep, expert_y, ep->cursor[e]++);
        if (!direct) {
            uint8_t *prepared = prepare_at(round, owner, a->token, k, n_staged);
            memcpy(prepared, row, result_bytes(ep));
            row = prepared;
        }
        st = put_result(round, owner, a->token, k, row);
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}

/* With results in place, the sum goes where the first of its rows was, and from there to owners
 * that do not see it. */
static yard_status send_partial(yard_ep_round *round, const arrival *a, const void *expert_y,
                                uint32_t *n_staged)
{
    yard_ep *ep = round->ep;
    const int32_t *expert = ep_entry_experts(a->entry);
    const uint32_t owner = ep_owner_of(ep, a->group, a->token);
    const uint32_t slot = ep->in_place[owner] ? 0 : ordinal_of(ep, expert); /* a landing slot */
    const yard_dtype dtype = plain_dtype(ep->config.combine);
    const void *rows[YARD_EP_MAX_TOP_K];
    float weight[YARD_EP_MAX_TOP_K];
    int32_t first_row = 0;
    uint32_t n = 0;
    uint8_t *sum;

    for (uint32_t k = 0; k < ep->config.top_k; k++) {
        const int32_t e = ep_local_expert(ep, expert[k]);

        if (e < 0)
            continue;
        if (n == 0)
            first_row = ep->cursor[e];
        rows[n] = result_row(ep, expert_y, ep->cursor[e]++);
        weight[n++] = ep_entry_weights(ep, a->entry)[k];
    }
    sum = ep->config.expert_y_in_place
              ? ep_heap(ep, round->heap.expert_y + (size_t)first_row * result_bytes(ep))
              : prepare_at(round, owner, a->token, slot, n_staged);
    ep->convert->weighted_sum(dtype, rows, weight, n, ep->config.hidden, dtype, sum);
    if (!ep->in_place[owner])
        return put_result(round, owner, a->token, slot, sum);
    list_row(round, owner, first_row);
    return YARD_OK;
}

yard_status yard_ep_cpu_combine_send(yard_ep_round *round, const void *expert_y, yard_stream stream)
{
    yard_ep *ep = round->ep;
    yard_status st = YARD_OK;
    uint32_t n_staged = 0;

    (void)stream;
    if (round->n_arrivals > 0 && !expert_y)
        st = yard_fail(&ep->err, YARD_EINVAL, "combine_send: expert_y: want rows, got NULL");
    if (st == YARD_OK && ep->config.expert_y_in_place && expert_y != yard_ep_expert_y(round))
        st =
            yard_fail(&ep->err, YARD_EINVAL,
                      "combine_send: expert_y: want yard_ep_expert_y() with expert_y_in_place, got "
                      "another buffer");
    if (st != YARD_OK)
        return st;
    yard_ep_start_rows(round);
    memset(ep->n_listed, 0, ep->n_ranks * sizeof(*ep->n_listed));
    for (uint32_t i = 0; st == YARD_OK && i < round->n_arrivals; i++)
        st = ep->config.mode == YARD_EP_EXACT
                 ? send_exact(round, &round->arrivals[i], expert_y, &n_staged)
                 : send_partial(round, &round->arrivals[i], expert_y, &n_staged);
    if (st == YARD_OK)
        st = send_lists(round);
    /* Last: this header says that dispatch's memory has been read. */
    for (uint32_t i = 1; st == YARD_OK && i <= ep->n_ranks; i++)
        st = yard_fabric_signal(ep->fabric, round->heap.sig_combine + ep->rank * 8, 1,
                                (ep->rank + i) % ep->n_ranks);
    if (st != YARD_OK)
        return yard_ep_broken(round, st, "combine_send", 0);
    round->state = ROUND_COMBINE_SENT;
    return YARD_OK;
}

/* One signal for each row, or one for a list. */
static void count_result(yard_ep_round *round, uint32_t s)
{
    const yard_ep *ep = round->ep;

    if (!ep->in_place[s] || ep->n_listed[s]++ == 0)
        round->results_seen[s]++;
}

/* Adds to results_seen what each rank sends for the tokens that this rank owns. */
static void expect_results(yard_ep_round *round)
{
    const yard_ep *ep = round->ep;
    const uint32_t top_k = ep->config.top_k;

    memset(ep->n_listed, 0, ep->n_ranks * sizeof(*ep->n_listed));

    for (uint32_t t = ep->replica; t < round->n_tokens; t += ep->config.tp) {
        const int32_t *expert = round->expert + (size_t)t * top_k;

        for (uint32_t k = 0; k < top_k; k++) {
            bool counts = expert[k] >= 0;
            for (uint32_t j = 0; ep->config.mode == YARD_EP_PARTIAL && counts && j < k; j++)
                counts = expert[j] < 0 || ep_rank_of(ep, expert[j]) != ep_rank_of(ep, expert[k]);
            if (counts)
                count_result(round, ep_rank_of(ep, expert[k]));
        }
    }
}

static yard_status wait_results(yard_ep_round *round, yard_deadline until)
{
    yard_ep *ep = round->ep;

    expect_results(round);
    for (uint32_t s = 0; s < ep->n_ranks; s++) {
        yard_status st = yard_fabric_wait_until(ep->fabric, round->heap.sig_combine + s * 8,
                                                round->epoch, s, until);
        if (st == YARD_OK && s != ep->rank)
            st = yard_fabric_wait_until(ep->fabric, round->heap.sig_results + s * 8,
                                        round->results_seen[s], s, until);
        if (st != YARD_OK)
            return st;
    }
    return YARD_OK;
}

/* One result of a token: in place at rank s, or in its landing slot. NULL after an error. */
static const void *result_of(const yard_ep_round *round, uint32_t s, uint32_t t, uint32_t slot)
{
    yard_ep *ep = round->ep;
    const void *row;

    if (!ep->in_place[s])
        return ep_heap(ep, landing_at(round, t, slot));
    row = listed_result(round, s);
    if (!row)
        yard_fail(&ep->err, YARD_EINVAL,
                  "combine_recv: token %u: rank %u names a row beyond its %llu", t, s,
                  (unsigned long long)ep->routed_rows);
    return row;
}

/* The token's results, exact: times weight in order of k; partial: in order of ranks. */
static yard_status reduce_token(const yard_ep_round *round, uint32_t t, void *y)
{
    const yard_ep *ep = round->ep;
    const bool exact = ep->config.mode == YARD_EP_EXACT;
    const size_t first = (size_t)t * ep->config.top_k;
    uint32_t ranks[YARD_EP_MAX_TOP_K];
    const uint32_t n_ranks = exact ? 0 : ranks_of(ep, round->expert + first, ranks);
    const uint32_t n_slots = exact ? ep->config.top_k : n_ranks;
    const void *rows[YARD_EP_MAX_TOP_K];
    float weight[YARD_EP_MAX_TOP_K];
    uint32_t n = 0;

    for (uint32_t slot = 0; slot < n_slots; slot++) {
        const int32_t expert = round->expert[first + slot];

        if (exact && expert < 0)
            continue;
        rows[n] = result_of(round, exact ? ep_rank_of(ep, expert) : ranks[slot], t, slot);
        if (!rows[n])
            return YARD_EINVAL;
        weight[n++] = exact ? round->weight[first + slot] : 1;
    }
    ep->convert->weighted_sum(plain_dtype(ep->config.combine), rows, weight, n, ep->config.hidden,
                              plain_dtype(ep->config.output), y);
    return YARD_OK;
}

/* Gives a finished row to the other replicas of the instance. */
static yard_status push_output(yard_ep_round *round, uint32_t t, const void *finished)
{
    yard_ep *ep = round->ep;
    const size_t n_bytes = ep->config.hidden * yard_dtype_bytes(plain_dtype(ep->config.output));
    const void *src = finished;

    if (!yard_fabric_copies(ep->fabric)) {
        void *staged = ep_heap(ep, round->heap.stage_output + t * ep->output_row_bytes);
        memcpy(staged, finished, n_bytes);
        src = staged;
    }
    for (uint32_t j = 1; j < ep->config.tp; j++) {
        const uint32_t sibling = ep->group * ep->config.tp + (ep->replica + j) % ep->config.tp;
        yard_status st = yard_ep_put(ep, round->heap.output_rows + t * ep->output_row_bytes, src,
                                     n_bytes, round->heap.sig_output + ep->rank * 8, 1, sibling);
        if (st != YARD_OK)
            return st;
        ep->stats.n_output_rows_sent++;
    }
    return YARD_OK;
}

/* Rows that the siblings own. */
static yard_status take_outputs(yard_ep_round *round, uint8_t *y, size_t y_row_bytes,
                                yard_deadline until)
{
    yard_ep *ep = round->ep;
    const uint32_t tp = ep->config.tp;

    for (uint32_t j = 0; j < tp; j++) {
        const uint32_t owner = ep->group * tp + j;
        yard_status st;

        if (owner == ep->rank)
            continue;
        for (uint32_t t = j; t < round->n_tokens; t += tp)
            round->outputs_seen[owner]++;
        st = yard_fabric_wait_until(ep->fabric, round->heap.sig_output + owner * 8,
                                    round->outputs_seen[owner], owner, until);
        if (st != YARD_OK)
            return st;
        for (uint32_t t = j; t < round->n_tokens; t += tp)
            memcpy(y + t * y_row_bytes,
                   ep_heap(ep, round->heap.output_rows + t * ep->output_row_bytes), y_row_bytes);
    }
    return YARD_OK;
}

yard_status yard_ep_cpu_combine_recv(yard_ep_round *round, void *y, yard_stream stream)
{
    yard_ep *ep = round->ep;
    const size_t y_row_bytes = ep->config.hidden * yard_dtype_bytes(plain_dtype(ep->config.output));
    const yard_deadline until = yard_fabric_deadline(ep->fabric, ep->config.timeout_us);
    yard_status st;

    (void)stream;
    if (round->n_tokens > 0 && !y)
        return yard_fail(&ep->err, YARD_EINVAL, "combine_recv: y: want %u rows, got NULL",
                         round->n_tokens);
    st = wait_results(round, until);
    memset(ep->n_listed, 0, ep->n_ranks * sizeof(*ep->n_listed));
    for (uint32_t t = ep->replica; st == YARD_OK && t < round->n_tokens; t += ep->config.tp) {
        uint8_t *row = (uint8_t *)y + t * y_row_bytes;

        st = reduce_token(round, t, row);
        if (st == YARD_EINVAL)
            return ep->status = st;
        if (st == YARD_OK)
            st = push_output(round, t, row);
    }
    if (st == YARD_OK)
        st = take_outputs(round, y, y_row_bytes, until);
    if (st != YARD_OK)
        return yard_ep_broken(round, st, "combine_recv", round->heap.sig_combine);
    round->state = ROUND_IDLE;
    return YARD_OK;
}
