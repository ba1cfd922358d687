/* All ranks of a group need one config. A group with a fabric of its own has it compared by the
 * fabric's start; over a borrowed one the ranks tell each other here. */
#include <stdio.h>

#include "ep/ep_impl.h"

static const char *name_of(const char *const *names, uint32_t n, uint32_t value)
{
    return value < n ? names[value] : "none";
}

static void describe_config(const yard_ep_config *c, char *text, size_t n_bytes)
{
    static const char *const dtypes[] = { "f32", "bf16", "fp8" };
    static const char *const modes[] = { "exact", "partial" };
    static const char *const layouts[] = { "expert-major", "flat", "flat in place" };

    snprintf(text, n_bytes,
             "abi %u, n_experts %u, top_k %u, hidden %u, max_tokens %u, tp %u, n_rounds %u, "
             "row_align %u, dispatch %s, combine %s, input %s, output %s, mode %s, layout %s, "
             "ue8m0 %d, node_copies %d, expert_y_in_place %d",
             YARD_EP_ABI_VERSION, c->n_experts, c->top_k, c->hidden, c->max_tokens, c->tp,
             c->n_rounds, c->row_align, name_of(dtypes, 3, c->dispatch),
             name_of(dtypes, 3, c->combine), name_of(dtypes, 3, c->input),
             name_of(dtypes, 3, c->output), name_of(modes, 2, c->mode),
             name_of(layouts, 3, c->layout), c->ue8m0, c->node_copies, c->expert_y_in_place);
}

void yard_ep_sign(const yard_ep_config *c, ep_signature *out)
{
    memset(out, 0, sizeof(*out));
    describe_config(c, out->text, sizeof(out->text));
    if (c->device == YARD_EP_CUDA)
        snprintf(out->text + strlen(out->text), sizeof(out->text) - strlen(out->text),
                 ", cuda, self-proving up to %u", c->self_proving_tokens);
    out->hash = 0xcbf29ce484222325u;
    for (const char *at = out->text; *at; at++) /* FNV-1a */
        out->hash = (out->hash ^ (uint8_t)*at) * 0x100000001b3u;
}

/* Where it lies: signal words [n_ranks], one word of this rank alone, signatures [n_ranks]. */
typedef struct agree_heap {
    yard_sym sig, taken, signatures;
    size_t n_bytes;
} agree_heap;

static agree_heap lay_out(uint32_t n_ranks, yard_sym at)
{
    agree_heap h = { .sig = at };

    h.taken = h.sig + yard_ep_align(n_ranks * sizeof(uint64_t));
    h.signatures = h.taken + yard_ep_align(sizeof(uint64_t));
    h.n_bytes = h.signatures - at + n_ranks * sizeof(ep_signature);
    return h;
}

size_t yard_ep_agree_bytes(uint32_t n_ranks)
{
    return lay_out(n_ranks, 0).n_bytes;
}

/* Signatures lie where puts read them, and stay. */
static yard_status send_signature(const yard_ep *ep, const agree_heap *h)
{
    const uint32_t n = yard_fabric_size(ep->fabric), me = yard_fabric_rank(ep->fabric);
    const yard_sym at = h->signatures + me * sizeof(ep_signature);
    yard_status st = YARD_OK;

    yard_ep_sign(&ep->config, ep_heap(ep, at));
    for (uint32_t i = 1; st == YARD_OK && i < n; i++)
        st = yard_fabric_put_signal(ep->fabric, at, ep_heap(ep, at), sizeof(ep_signature),
                                    h->sig + me * 8, 1, (me + i) % n);
    return st;
}

static yard_status compare(const yard_ep *ep, const agree_heap *h, yard_error *err)
{
    const ep_signature *all = ep_heap(ep, h->signatures);

    for (uint32_t r = 1; r < yard_fabric_size(ep->fabric); r++) {
        const yard_rank_config first = { 0, all[0].hash, all[0].text };
        const yard_rank_config other = { r, all[r].hash, all[r].text };

        if (first.hash != other.hash)
            return yard_fabric_config_differs(&first, &other, err);
    }
    return YARD_OK;
}

yard_status yard_ep_agree(const yard_ep *ep, yard_error *err)
{
    const yard_deadline until = yard_fabric_start_deadline(ep->fabric);
    const uint32_t n = yard_fabric_size(ep->fabric), me = yard_fabric_rank(ep->fabric);
    const agree_heap h = lay_out(n, ep->config.heap_at);
    uint64_t *taken = ep_heap(ep, h.taken);
    yard_status st;

    if (*taken)
        return yard_fail(err, YARD_EINVAL,
                         "ep: the fabric's heap at %llu has had a group before: give each group "
                         "its own part (heap_at) or a new fabric",
                         (unsigned long long)ep->config.heap_at);
    *taken = 1;
    st = send_signature(ep, &h);
    for (uint32_t r = 0; st == YARD_OK && r < n; r++)
        if (r != me)
            st = yard_fabric_wait_until(ep->fabric, h.sig + r * 8, 1, r, until);
    if (st != YARD_OK)
        return yard_fail(err, st, "ep: create: %s", yard_fabric_error(ep->fabric));
    return compare(ep, &h, err);
}
